"""Who can talk to a run: sockets are on loopback, Dask's want the run's own certificate, its key stays in memory."""

from __future__ import annotations

import asyncio
import ssl
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from pickle import dumps
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from distributed import Security, rpc

from cluster.worker.process import WorkerSpec
from kills import client_of
from runs import outcome, settings_file, wait_for
from spotlight.records import Stopped
from spotlight.run import Run
from spotlight.store.rows import SPANS

GANGS = ("strategy.widths=[2]",)
"""Every request on a pair of spot workers, so that gloo is there, and samples are the same bit for bit."""
CONNECTIONS = 5
"""Processes that talk to each other: scheduler, head, one reserved and two spot workers."""


LOOK_S = 0.3
REFUSED_S = 3.0
"""For a connection: a stranger who is turned away tries again until then."""


@dataclass(slots=True)
class Seen:
    """Of all processes of a run, while it was at work."""

    listeners: set[tuple[int, str, int]] = field(default_factory=set)
    """(process id, host, port) of each socket that waits for strangers."""
    unix: set[tuple[str, int]] = field(default_factory=set)
    """(name, mode of its directory) of each socket that has a name."""
    told: set[str] = field(default_factory=set)
    """Command lines and environments: other processes can read them."""
    addresses: list[str] = field(default_factory=list)
    """Of Dask's processes."""
    obeyed: dict[str, set[str]] = field(default_factory=dict)
    """By who asked: the addresses that ran what they were asked to."""
    secrets: frozenset[bytes] = frozenset()
    """Lines of the run's certificate and key."""
    scratch: dict[Path, bool] = field(default_factory=dict)
    """Files of the run outside its directory, and whether one of these lines is in them."""

    def look(self) -> bool:
        """Whether a member of a gang has been seen by now."""
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
                self._look_at(process)
        return bool(self.members)

    def _look_at(self, process: psutil.Process) -> None:
        self.told.update((*process.cmdline(), *process.environ().values()))
        for connection in process.net_connections("inet"):
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                self.listeners.add((process.pid, connection.laddr.ip, connection.laddr.port))
        for connection in process.net_connections("unix"):
            if name := str(connection.laddr):
                mode = 0 if name.startswith(("@", "\0")) else stat.S_IMODE(Path(name).parent.stat().st_mode)
                self.unix.add((name, mode))

    def search(self, folder: Path) -> dict[Path, bool]:
        """All files in a folder, and whether a secret is in them."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path: any(line in path.read_bytes() for line in self.secrets) for path in files}

    @property
    def members(self) -> set[int]:
        """Processes that listen, but not for Dask: members of gangs."""
        ports = {urlsplit(address).port for address in self.addresses}
        dask = {pid for pid, _, port in self.listeners if port in ports}
        return {pid for pid, _, _ in self.listeners} - dask


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Not begun."""
    return Run(settings_file(tmp_path_factory.mktemp("watched")), GANGS)


@pytest.fixture(scope="module")
def seen(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What was seen of the run, while strangers tried to have it do things; the run has ended."""
    run.start()
    try:
        return watched(run, tmp_path_factory.mktemp("marks"))
    finally:
        run.stop()


def watched(run: Run, marks: Path) -> Seen:
    seen = Seen()
    client = client_of(run)
    wait_for(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == CONNECTIONS - 1)
    info = client.scheduler_info(n_workers=-1)
    seen.addresses = [info["address"], *info["workers"]]
    seen.secrets = secrets(client.security)
    wait_for(seen.look)
    for folder in scratch(run, info["workers"].values()):
        seen.scratch |= seen.search(folder)
    friend = {"friend": client.security.get_connection_args("client")}
    seen.obeyed = asyncio.run(ask_all(seen.addresses, strangers() | friend, marks))
    assert run.alive, "it ended before all had asked"
    while run.alive:
        seen.look()
        time.sleep(LOOK_S)
    run.wait()
    return seen


def secrets(security: Any) -> frozenset[bytes]:
    """Lines of the certificate and key of a Dask `Security`."""
    lines = f"{security.tls_client_key}\n{security.tls_client_cert}".splitlines()
    return frozenset(line.encode() for line in lines if len(line) > 20)  # the last may be short


def scratch(run: Run, workers: Iterable[dict[str, Any]]) -> set[Path]:
    """Directories of a run outside its own: Dask's, and the nodes' memory."""
    dask = {Path(worker["local_directory"]).parents[1] for worker in workers}
    return dask | set(Path("/dev/shm").glob(f"spotlight-*{run.directory.path.name}*"))


def strangers() -> dict[str, dict[str, Any]]:
    """How those connect who are not of the run; none of them cares whom he talks to."""
    nameless = ssl.create_default_context()
    other = Security.temporary().get_connection_args("client")["ssl_context"]
    for context in (nameless, other):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    tls = {"require_encryption": True, "extra_conn_args": {}}
    return {
        "plain": {"require_encryption": False},
        "without a certificate": {**tls, "ssl_context": nameless},
        "with another run's certificate": {**tls, "ssl_context": other},
    }


async def ask_all(addresses: Sequence[str], askers: dict[str, dict[str, Any]], marks: Path) -> dict[str, set[str]]:
    """Each asker has each process make a file; returns by asker the addresses of those that did."""
    asked = [
        (who, address, marks / f"{number}-{urlsplit(address).port}")
        for number, who in enumerate(askers)
        for address in addresses
    ]
    scheduler = addresses[0]
    await asyncio.gather(
        *(
            ask(address, "run_function" if address == scheduler else "run", askers[who], file)
            for who, address, file in asked
        )
    )
    return {who: {address for asker, address, file in asked if asker == who and file.exists()} for who in askers}


async def ask(address: str, verb: str, how: dict[str, Any], file: Path) -> None:
    """Send a process what Dask's clients send it, as far as it lets us."""
    scheme = "tls" if "ssl_context" in how else "tcp"
    remote = rpc(address.replace("tls", scheme), connection_args=how, timeout=REFUSED_S)
    call = getattr(remote, verb)(function=dumps(partial(Path.touch, file)), args=dumps(()), kwargs={})
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(call, 2 * REFUSED_S)
    await remote.close_rpc()


def test_all_sockets_of_all_processes_are_on_loopback(seen: Seen) -> None:
    assert seen.members
    assert {host for _, host, _ in seen.listeners} <= {"127.0.0.1", "::1"}


def test_sockets_that_have_a_name_are_where_only_this_user_comes(seen: Seen) -> None:
    assert seen.unix
    assert {mode for _, mode in seen.unix} == {0o700}


def test_nobody_without_the_certificate_of_the_run_can_have_its_processes_do_anything(seen: Seen) -> None:
    assert len(seen.addresses) == CONNECTIONS
    assert seen.obeyed.pop("friend") == set(seen.addresses)
    assert seen.obeyed == {who: set() for who in strangers()}


def test_what_strangers_try_does_not_change_the_outcome(seen: Seen, run: Run, tmp_path: Path) -> None:
    plain = Run(settings_file(tmp_path), [*GANGS, "cluster.tls=false"]).start()
    plain.wait()

    assert outcome(run.directory.path) == outcome(plain.directory.path)


def test_the_key_is_in_no_file_command_line_or_environment(seen: Seen, run: Run) -> None:
    files = seen.scratch | seen.search(run.directory.path)

    assert len(seen.secrets) > 20
    assert len(files) > 20
    assert [path for path, shows in files.items() if shows] == []
    assert [text for text in seen.told for line in seen.secrets if line.decode() in text] == []


def test_the_key_is_in_no_text_of_what_a_worker_is_told() -> None:
    security = Security.temporary()
    nothing: dict[str, Any] = {field.name: None for field in fields(WorkerSpec)}

    spec = WorkerSpec(**{**nothing, "security": security})

    assert not any(line.decode() in f"{spec!r} {spec}" for line in secrets(security))


def test_no_directory_that_others_may_write_to_is_imported_from(tmp_path: Path) -> None:
    """Dask puts its scratch directory on the path for imports; by default that of whoever makes it first."""
    before = set(sys.path)
    run = Run(settings_file(tmp_path), ["run.iterations=1"]).start()
    try:
        wait_for(lambda: run.directory.rows(SPANS))
        added = [Path(path) for path in sys.path if path not in before and "dask" in path]
        private = [any(stat.S_IMODE(above.stat().st_mode) == 0o700 for above in path.parents) for path in added]
    finally:
        run.stop()
        with suppress(Stopped):
            run.wait()

    assert added
    assert all(private), added
