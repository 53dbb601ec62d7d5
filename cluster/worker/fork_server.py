"""The fork server that the plain Dask workers of a node share: the first worker's imports serve those that come later.

It lives in a directory of node memory: a socket, on which it is asked for processes, and a pipe that every worker
keeps open for writing. When the last of them is gone, however it ended, the pipe ends; then the parent ends too, and
with it the system kills whatever was forked from it. Only workers that would have started the same parent share one:
with the same user, programs, environment, processors, and, since Slurm and containers bound those, groups and
namespaces.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

import spotlight
from cluster.start import janitor
from cluster.worker.process import FOR_OTHERS, KEYED, continued, fork_context, has_own_fork_server, own_fork_server
from spotlight.records import SpotlightError
from spotlight.store.device_locks import began
from spotlight.store.leftovers import SOCKET_BYTES
from spotlight.store.node import hold, shared_root, sweep

OWN = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "OLDPWD", "RANK", "SHLVL", "_", "__DASK_PARENT_PID")
"""Variables in which workers that share a parent may differ: they are read when a device is first used, or never."""
OWN_FOLDER = "dask-scratch-space"
"""Where Dask gives each worker a folder, and looks for modules that were sent to it; we send none."""
ENDING_S, POLL_S = 1.0, 0.01
KEY_BYTES = 32
"""As long as `multiprocessing` makes it."""
TURN_S = 300.0
"""How long another worker may take to start the parent: that takes moments, and a frozen worker is replaced before."""


@dataclass(slots=True)
class _Joined:
    """The parent that this process asks for engines. Its descriptors are never closed: the parent would end."""

    root: Path
    held: int
    """Keeps the directory from being swept."""
    alive: int
    """The writing end of the pipe."""

    @property
    def is_there(self) -> bool:
        """Whether somebody reads the pipe, and the socket can be found: a logout may have removed it."""
        poll = select.poll()
        poll.register(self.alive, 0)
        return not poll.poll(0) and (self.root / "socket").exists()


_joined: list[_Joined] = []
_joining = threading.Lock()


def fork_server() -> ForkServerContext:
    """The context whose processes are forked from the node's fork server, or from this process's own.

    It has its own where it came from a fork server itself, and where the system cannot tell who may share one.
    """
    if has_own_fork_server() or (root := place()) is None:
        return own_fork_server()
    context = fork_context()
    with _joining:
        if not _joined or not _joined[-1].is_there:
            _joined.append(_join(root))
            _ask(_joined[-1])
    return context


def place() -> Path | None:
    """The directory in node memory of the parent that this process may share; None where there can be none."""
    try:
        names = sorted(os.listdir("/proc/self/ns"))
        bounds = [*(os.readlink(f"/proc/self/ns/{name}") for name in names), Path("/proc/self/cgroup").read_text()]
    except OSError:
        return None
    programs = [spotlight.__version__, sys.executable, *_modules()]
    environment = sorted((name, value) for name, value in os.environ.items() if name not in OWN)
    known = repr((os.getuid(), programs, environment, bounds, sorted(os.sched_getaffinity(0))))
    root = shared_root(f"parent-{sha256(known.encode()).hexdigest()[:16]}")
    return root if len(os.fsencode(root / "socket")) <= SOCKET_BYTES else None


def _modules() -> list[str]:
    """Where modules are found, without this worker's own folder."""
    return [path for path in janitor.module_path() if OWN_FOLDER not in path]


def continue_fork_server() -> bool:
    """Continue the parent if it was stopped (SIGSTOP), since requests to it would wait; returns whether it was."""
    try:
        pid = int((_joined[-1].root / "pid").read_text()) if _joined and _joined[-1].is_there else 0
    except (OSError, ValueError):
        pid = 0
    return bool(pid) and continued(pid)


def end_with_this_process(pid: int) -> None:
    """Have an engine end when this process does, though the parent that it was forked from goes on."""
    if _joined:
        janitor.register("process", f"{pid} {began(pid)}")


def _join(root: Path) -> _Joined:
    """Open the pipe to the parent; start one if nobody reads, or it cannot be asked.

    Raises:
        SpotlightError: another process has been at it for long.
    """
    held = hold(root)
    try:
        with (root / "starting").open("a+") as turn:
            _wait_for(turn)
            try:
                (root / "socket").stat()
                alive = os.open(root / "alive", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENXIO):
                    raise
                alive = _start(root)
    except BaseException:
        os.close(held)
        raise
    return _Joined(root, held, alive)


def _wait_for(turn: IO[str]) -> None:
    """Lock the file, and write this process's id into it."""
    until_s = time.monotonic() + TURN_S
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until_s:
                turn.seek(0)
                raise SpotlightError(
                    f"on {socket.gethostname()} process {turn.read() or 'unknown'} has held {turn.name} for "
                    f"{TURN_S:g} s, so this worker can start no engine: is it a frozen worker? End it (`kill -KILL`)"
                ) from None
        time.sleep(POLL_S)
    turn.truncate(0)
    turn.write(str(os.getpid()))
    turn.flush()


def _start(root: Path) -> int:
    """Start the parent; returns the writing end of its pipe. Its first request waits for its imports."""
    for name in ("socket", "alive", "pid", "key"):
        (root / name).unlink(missing_ok=True)
    if KEYED:
        (root / "key").touch(mode=0o600)
        (root / "key").write_bytes(os.urandom(KEY_BYTES))
    os.mkfifo(root / "alive", 0o600)
    reads = os.open(root / "alive", os.O_RDONLY | os.O_NONBLOCK)
    alive = os.open(root / "alive", os.O_WRONLY | os.O_NONBLOCK)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_OTHERS)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(root / "socket"))
            listener.listen()
            code = f"import sys; sys.path[:] = {_modules()!r}; from cluster.worker.fork_server import serve; "
            code += f"serve({listener.fileno()}, {reads}, {str(root)!r})"
            pid = util.spawnv_passfds(
                os.fsencode(sys.executable), [sys.executable, "-B", "-c", code], [listener.fileno(), reads]
            )
            (root / "pid").write_text(str(pid))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reads)
    return alive


def _ask(joined: _Joined) -> None:
    """Have `multiprocessing` ask this parent from now on.

    `multiprocessing` hands its end of the pipe on to each process that it starts, so the parent would live as long as
    any of them, even a frozen one. They get /dev/null in its place.
    """
    server: Any = forkserver._forkserver
    server._forkserver_address = str(joined.root / "socket")
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server._forkserver_pid = None
    if KEYED:
        server._forkserver_authkey = (joined.root / "key").read_bytes()
    server.ensure_running = resource_tracker.ensure_running


def serve(listener: int, reads: int, root: str) -> None:
    """The body of the parent: fork processes until no worker is left, and tidy up.

    It keeps nothing of the worker that started it: neither its process group, nor its output pipes, whose reader waits
    until nobody holds them open.
    """
    os.setsid()
    with open(os.devnull, "rb") as nothing, (Path(root) / "log").open("wb") as log:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    try:
        forkserver.main(listener, reads, ["cluster.worker.preload"], **_given_key(Path(root)))
    finally:
        until_s = time.monotonic() + ENDING_S
        while not sweep(Path(root)) and time.monotonic() < until_s:  # it may be held a moment longer than the pipe
            time.sleep(POLL_S)


def _given_key(root: Path) -> dict[str, Any]:
    """An argument of the parent's, where there are keys."""
    if not KEYED:
        return {}
    reads, writes = os.pipe()
    os.write(writes, (root / "key").read_bytes())
    os.close(writes)
    return {"authkey_r": reads}
