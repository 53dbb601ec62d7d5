"""A driver in a process of its own: the run goes on when the notebook or the script that began it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight.files import writing
from spotlight.records import SpotlightError
from spotlight.rl.rewards import looked_in
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from cluster.start.existing import ExistingCluster

LOG = "driver.log"
"""File in the run's directory with such a driver's output."""
STOPPED = 130
"""Exit status of a driver that was stopped: see `spotlight.shell`."""
OWN = "spotlight: "
"""Begins what the command itself says."""
POLL_S = 0.05
TLS = "DASK_DISTRIBUTED__COMM__TLS__"


def begin(run: RunDir, cluster: ExistingCluster | None) -> subprocess.Popen[bytes]:
    """Start a process that drives a run that nobody holds; returns once it holds the run.

    Raises:
        SpotlightError: it could not, with its own message.
    """
    command = [sys.executable, "-m", "spotlight", "resume", run.url]
    environment = {**os.environ, "FORCE_COLOR": ""}  # Jupyter sets it for terminals, and the log is a file
    environment["PYTHONPATH"] = os.pathsep.join(_found_here())
    if cluster is not None:
        from distributed import Security

        from cluster.start.existing import where

        address, security = where(cluster)
        command += ["--cluster", address]
        environment |= certificates_of(security or Security())
    with writing(run.url):
        opened = (run.path / LOG).open("wb")
    with opened as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while not _has(run, process.pid) and process.poll() is None:
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C: it is not wanted any more
        process.terminate()
        process.wait()
        raise
    if process.poll():
        raise SpotlightError(_last_words(run))
    return process


def _has(run: RunDir, pid: int) -> bool:
    """Whether process ``pid`` holds the run: it may still wait for an owner that is gone, and be refused."""
    last = run.last_holder()
    return last is not None and (last.pid, last.host) == (pid, socket.gethostname())


def _found_here() -> list[str]:
    """Paths at which this process finds modules, beyond those of its Python environment, for the driver to find them,
    too.

    Those of rewards are left out: the run's settings name them.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    known = sysconfig.get_paths()
    own = [Path(known[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    zipped = own[0].parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    places = [Path(path).resolve() for path in sys.path if path not in looked_in]  # "" is where we are
    mine = [
        str(place)
        for place in places
        if place != zipped
        and place.name not in ("site-packages", "dist-packages")
        and not any(place.is_relative_to(each) for each in own)
    ]
    return list(dict.fromkeys([*mine, *given]))


def stop(run: RunDir) -> None:
    """Ask the process that has a run to end it in order, as it does on SIGTERM; returns at once.

    Raises:
        SpotlightError: it is on another machine, does not have it yet, or would not stop in order.
    """
    if other := run.perhaps_lost():
        raise SpotlightError(
            f"{run.url}: {other} runs this run: stop it there. If that machine is lost, a process of this one waits "
            f"for it, to go on with the run: end that by Ctrl-C or `kill PID`; `fuser {run.path / 'lock'}` names it"
        )
    holder = run.lease_holder()
    if holder is None or holder.host != socket.gethostname():
        raise SpotlightError(
            f"{run.url}: {holder or 'another process'} is running this run: stop it there (`kill PID`, Ctrl-C, or "
            "`scancel` for a job of Slurm's)"
        )
    if holder.pid == os.getpid() or not _is_command(holder.pid):
        raise SpotlightError(
            f"{run.url}: {holder} is running this run, and is no `spotlight` command: stop it there, as by run.stop()"
        )
    os.kill(holder.pid, signal.SIGTERM)


def _is_command(pid: int) -> bool:
    """Whether a process of this machine is a `spotlight` command that runs a run."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name in ("spotlight", "__main__.py") for word in words) and bool({"run", "resume"} & {*words})


def end_of(process: subprocess.Popen[bytes], run: RunDir, timeout_s: float | None) -> None:
    """Wait for the end of such a driver, at most ``timeout_s``. A killed one said nothing: its run is stopped.

    Raises:
        SpotlightError: it failed, with its own message.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(timeout_s)
        if status > 0 and status != STOPPED:
            raise SpotlightError(_last_words(run))


def certificates_of(security: Any) -> Mapping[str, str]:
    """Environment variables from which Dask reads the certificates, be they files or texts; only this user can read
    them."""
    roles = {f"{role}__{part}": f"tls_{role}_{part}" for role in ("client", "worker") for part in ("cert", "key")}
    found = {name: getattr(security, field) for name, field in {"ca_file": "tls_ca_file", **roles}.items()}
    given = {f"{TLS}{name.upper()}": value for name, value in found.items() if value}
    return {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": str(bool(security.require_encryption)), **given}


def _last_words(run: RunDir) -> str:
    """An error text with the last lines that an ended driver printed: the command's own, if it said why it ended."""
    log = run.path / LOG
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    own = list(takewhile(lambda line: line.startswith(OWN), reversed(lines)))[::-1]
    said = "; ".join(line.removeprefix(OWN) for line in own or lines[-1:])
    return f"the driver ended: {said or 'it said nothing'} ({log})"
