"""Cleans up after a process that has workers, however it ends: a small process that outlives it by moments.

Its owner tells it, over a pipe, what would be left. When the owner is gone, it kills the fork server, and with that
the system kills all that was forked from it, frozen or not; then it removes directories and half-written files. If
this process is killed, too, the next start removes what is left (`spotlight.store.leftovers`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator

CleanupItem = tuple[str, str]
"""``(kind, what)`` of what would be left: "process" (its number and when it began), "memory" (a run's, by name),
"folder" (a path), or "half written" (the directory or URL of the run that such files belong to)."""


class _Janitor:
    """The owner's end of the pipe."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.left: set[CleanupItem] = set()
        self._changing = threading.Lock()
        self._pid, self._pipe = _start()

    def tell(self, *, added: Iterable[CleanupItem] = (), removed: Iterable[CleanupItem] = ()) -> None:
        with self._changing:
            self.left = (self.left | {*added}) - {*removed}
            try:
                self._send((True, added), (False, removed))
            except BrokenPipeError:  # somebody killed it
                os.close(self._pipe)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)
                self._pid, self._pipe = _start()
                self._send((True, self.left))

    def _send(self, *changes: tuple[bool, Iterable[CleanupItem]]) -> None:
        for there, left in changes:
            for kind, what in left:
                os.write(self._pipe, json.dumps([there, kind, what]).encode() + b"\n")


_janitors: list[_Janitor] = []
"""This process's janitor comes last, if it has one; after a fork, the last is the parent's."""
_starting = threading.Lock()


def register(kind: str, what: str) -> None:
    """Have something cleaned up if this process is killed from now on."""
    with _starting:
        if not _janitors or _janitors[-1].owner != os.getpid():
            _janitors.append(_Janitor())
    _janitors[-1].tell(added=[(kind, what)])


def unregister(kind: str, what: str) -> None:
    """No longer have it cleaned up."""
    if _janitors and _janitors[-1].owner == os.getpid():
        _janitors[-1].tell(removed=[(kind, what)])


@contextlib.contextmanager
def registered(kind: str, what: str) -> Iterator[None]:
    """Have something cleaned up if this process is killed inside."""
    register(kind, what)
    try:
        yield
    finally:
        unregister(kind, what)


def module_path() -> list[str]:
    """``sys.path`` for another process, whose directory may be another: without relative paths, and without what is no
    text (a script's `Path`, say), since imports skip that."""
    return [os.path.abspath(path) for path in sys.path if isinstance(path, str)]


def _start() -> tuple[int, int]:
    """Start the process; returns its number, and the end of the pipe to it."""
    theirs, ours = os.pipe()
    code = f"import sys; sys.path[:] = {module_path()!r}; "
    code += f"from cluster.start import janitor; janitor.watch({os.getpid()})"
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    command = [sys.executable, "-I", "-B", "-c", code]
    try:  # a session of its own: what ends a terminal's processes does not end it
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsid=True)
    finally:
        os.close(theirs)
    return pid, ours


# In the process


def watch(owner: int) -> None:
    """Wait until the owner ends, and clean up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    clean(_left(owner))


def _left(owner: int) -> set[CleanupItem]:
    """What is left when the owner has ended."""
    left: set[CleanupItem] = set()
    for line in _lines(owner):
        there, kind, what = json.loads(line)
        (left.add if there else left.discard)((kind, what))
    return left


def _lines(owner: int) -> Iterator[bytes]:
    """The owner's messages, until it ends; others may have inherited its end of the pipe, so the process is watched,
    too."""
    ends, rest = [0], b""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            ends.append(os.pidfd_open(owner))
    while True:
        is_gone = os.getppid() != owner  # its number may be used again
        ready, _, _ = select.select(ends, [], [], 0.0 if is_gone else None)
        if 0 not in ready:
            return
        said = os.read(0, 1 << 16)
        if not said:
            return
        *lines, rest = (rest + said).split(b"\n")
        yield from lines


def clean(left: Iterable[CleanupItem]) -> None:
    """Kill and remove what is left; if one fails, the rest is still done."""
    from spotlight.records import SpotlightError
    from spotlight.store.device_locks import end
    from spotlight.store.leftovers import remove_half_written, sweep_ended

    by_kind: dict[str, list[str]] = {}
    for kind, what in left:
        by_kind.setdefault(kind, []).append(what)
    for process in by_kind.get("process", ()):
        pid, _, began = process.partition(" ")
        end(int(pid), began)
    for memory in by_kind.get("memory", ()):
        sweep_ended(memory)
    for folder in by_kind.get("folder", ()):
        shutil.rmtree(folder, ignore_errors=True)
    from spotlight.store.rundir import RunDir  # takes half a second: processes have ended before

    for run_dir in by_kind.get("half written", ()):
        with contextlib.suppress(OSError, SpotlightError):
            run = RunDir(run_dir)
            remove_half_written(run.path, run.unused)  # else its next driver is there already, whose workers write
