"""A worker process of this machine's own pools: a plain Dask worker that lives as long as its driver.

What makes it one of ours is the plugin that the scheduler hands it, as for any other worker (`cluster.worker.plugin`).
It is forked from a process that has done the imports (the fork server), and so is its engine, so that either starts in
moments; the fork server starts no thread and holds no device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import dask
from distributed import Security, Worker

from cluster.start import janitor
from spotlight.device.process import end_with_parent, take_environment
from spotlight.records import record
from spotlight.store.device_locks import began, is_stopped
from spotlight.store.leftovers import Scratch

FOR_OTHERS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""Signals blocked in the fork server and its engines: Ctrl-C is for the driver alone, and notices, which Slurm
sends to all processes of a job, are for the workers."""
KEYED = hasattr(forkserver._forkserver, "_forkserver_authkey")
"""Whether a fork server forks only for who knows its key: from Python 3.14 on."""
PYTHONPATH_BEFORE = "SPOTLIGHT_PYTHONPATH"
"""Variable with PYTHONPATH as it was before a fork server was to be started."""


@record
class WorkerSpec:
    """All that a worker process needs to know."""

    name: str
    scheduler: str
    resources: Mapping[str, float]
    local_directory: str
    settings: Mapping[str, Any]
    """Dask's configuration, the same for all processes of a run."""
    security: Security | None
    """The run's certificate and key, in memory alone: they are in no file, command line or text of this object."""

    @property
    def last_words(self) -> Path:
        """Where a process says why it cannot be a worker."""
        return Path(self.local_directory) / f"{self.name}.failed"


def own_fork_server() -> ForkServerContext:
    """The context whose processes are forked from the fork server; the first start waits for its imports."""
    context = fork_context()
    _make_reachable()
    if "cluster.worker.preload" not in sys.modules:  # else this process was forked from it, and ends with it
        _have_it_end_with_this_process()
    return context


def has_own_fork_server() -> bool:
    """Whether this process was forked from one, or has started one."""
    return "cluster.worker.preload" in sys.modules or bool(_begun)


def fork_context() -> ForkServerContext:
    # Python 3.11.0 would let any user start processes here (CVE-2022-42919).
    util.abstract_sockets_supported = False  # type: ignore[misc]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cluster.worker.preload"])
    return context


def _make_reachable() -> None:
    """Forget the fork server if its socket's folder was removed, or if the program started it, so without our imports:
    the next start then makes another one.

    The first stays, with all that was forked from it.
    """
    server: Any = forkserver._forkserver
    with _starting:
        for scratch in _scratch:
            scratch.keep()
        address = server._forkserver_address
        removed = isinstance(address, str) and not Path(address).exists()
        if removed:
            Path(address).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if removed or (own_fork_server_pid() and not _begun):
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


_scratch: list[Scratch] = []
"""Where this process's fork server is asked for workers."""
_begun: list[int] = []
"""The fork servers that this process has started."""
_ready: set[int] = set()
"""Those of them that have started a process."""
_starting = threading.Lock()


def _have_it_end_with_this_process() -> None:
    """Start the fork server, and have the janitor know it.

    By itself it would stay as long as any process that was forked from it, and one that is frozen would never end. It
    starts with signals blocked that are for others.
    """
    with _starting:
        config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        if config.get("tempdir") is None:
            _scratch.append(Scratch(sockets=True))
            config["tempdir"] = str(_scratch[-1].path)
            janitor.register("folder", config["tempdir"])
        resource_tracker.ensure_running()  # first, because it unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_OTHERS)
        try:
            with _told_where_we_find_modules():
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pid = own_fork_server_pid()
        if pid not in _begun:
            _begun.append(pid)
        janitor.register("process", f"{pid} {began(pid)}")


@contextlib.contextmanager
def _told_where_we_find_modules() -> Iterator[None]:
    """Hand ``sys.path`` on to a fork server that is started inside, which Python 3.11 does not."""
    os.environ[PYTHONPATH_BEFORE] = os.environ.get("PYTHONPATH", "")
    before, sys.path = sys.path, janitor.module_path()  # `multiprocessing` writes them into the server's program
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if os.pathsep not in path)
    try:
        yield
    finally:
        sys.path = before
        take_back_pythonpath()


def take_back_pythonpath() -> None:
    """Set the variable to what it was: a program that a worker starts may be another Python, with other modules."""
    before = os.environ.pop(PYTHONPATH_BEFORE, None)
    if before is not None:
        os.environ["PYTHONPATH"] = before
    if before == "":
        del os.environ["PYTHONPATH"]


def own_fork_server_pid() -> int:
    """Id of this process's own fork server; 0 before it was started."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) or 0


def made_by_own_fork_server(process: ForkServerProcess) -> None:
    """Start a process; from then on the fork server is known to have done its imports."""
    process.start()
    _ready.add(own_fork_server_pid())


def end_own_fork_server_at_its_imports() -> None:
    """Kill it if nothing came from it yet, so that who waits for its first process need not; the next start makes
    another."""
    pid = own_fork_server_pid()
    if pid and pid not in _ready:
        with contextlib.suppress(ProcessLookupError):  # a start in another thread has just waited for its end
            os.kill(pid, signal.SIGKILL)


def continue_own_fork_server() -> bool:
    """Continue the fork server if it was stopped (SIGSTOP); returns whether it was."""
    pid = own_fork_server_pid()
    return bool(pid) and continued(pid)


def continued(pid: int) -> bool:
    """Continue a process if it was stopped; returns whether it was."""
    if not is_stopped(pid):
        return False
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # it ended this moment
        return False
    return True


def serve(spec: WorkerSpec, environment: Mapping[str, str], lifeline: Connection) -> None:
    """Run a worker until it is told to close or the driver is gone; the body of a worker process.

    Args:
        environment: the driver's, with, say, the keys of stores. This process inherits that of the fork server, which
            may be older.
        lifeline: its other end is held by the driver; when that closes, however the driver ended,
            this process ends at once, so that no orphan goes on training or committing.
    """
    take_environment(environment)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which stops workers in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_OTHERS)  # notices come by the others
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    dask.config.set(spec.settings)
    logging.getLogger("distributed").setLevel(logging.ERROR)  # losing a peer is no news here
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)  # a failed task's error goes to the driver
    try:
        asyncio.run(_serve(spec))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        spec.last_words.write_text(f"{type(cause).__name__}: {cause}")
        os._exit(1)
    os._exit(0)  # a task thread that is still at work would keep the process alive


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


async def _serve(spec: WorkerSpec) -> None:
    async with Worker(
        spec.scheduler,
        name=spec.name,
        nthreads=1,
        resources=dict(spec.resources),
        memory_limit=0,
        host="127.0.0.1",
        security=spec.security,
        local_directory=spec.local_directory,
        dashboard=False,
    ) as worker:
        await worker.finished()
