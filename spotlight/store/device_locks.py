"""Which of a machine's devices a process has: a numbered lock in node memory, released however the process ends.

The lock's file names the process that works on the device. Whoever takes the lock next kills that process if it is
still there: one that is frozen when its worker ends would keep the device, and its memory, for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ENDS_S = 2.0
"""How long to wait until a killed process is gone; the system needs moments."""


class DeviceLock:
    """Holds the first device that no other process has; ``number`` is its place among those that this process sees.

    Args:
        root: a directory in the machine's memory, the same for all its processes.
        kind: each kind has its own locks: a process that only scores takes no GPU from one that denoises.
        devices: their names, in the order in which this process sees them; empty: it sees them all. If all are
            taken, they are shared: each is taken once more.
    """

    def __init__(self, root: Path, kind: str = "", devices: Sequence[str] = ()) -> None:
        for self.number, name in _in_turn(devices):
            path = root / f"{kind}slot-{name}"
            descriptor = os.open(path, _OPEN, 0o600)
            if _try_lock(descriptor):
                break
            os.close(descriptor)
        _end_recorded(descriptor)
        self._path = path
        self._descriptor = descriptor

    def record(self, pid: int) -> None:
        """Record that process ``pid`` works on the device now."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{pid} {began(pid)}".encode(), 0)

    def keep(self) -> None:
        """Lock the device again if the lock's file was removed, so that nobody else takes it."""
        with contextlib.suppress(OSError):  # whoever removed it does so again
            if not self._path.exists():
                again = os.open(self._path, _OPEN, 0o600)
                os.pwrite(again, os.pread(self._descriptor, 100, 0), 0)
                _try_lock(again)
                os.close(self._descriptor)
                self._descriptor = again

    def close(self) -> None:
        """Release the device."""
        os.close(self._descriptor)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that a process sees, in its order; none where its environment does not say.

    Slurm may count the GPUs of each job from 0, so two jobs' are told apart.
    """
    job = environment.get("SLURM_JOB_ID", "")
    named = filter(None, map(str.strip, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    return [f"{job and f'{job}-'}{name.replace('/', '_')}" for name in named]  # a part of a GPU may have a path's name


def _in_turn(devices: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Numbers of devices and names for their locks: each device once, then each once more, and so on."""
    if not devices:
        yield from ((number, str(number)) for number in count())
    for turn in count():
        yield from ((number, f"{name}+{turn}" if turn else name) for number, name in enumerate(devices))


def end_leftovers(root: Path) -> None:
    """Kill processes that still work on devices whose lock nobody holds."""
    for path in root.glob("*slot-*"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:  # it may be gone, or be another user's link
            if _try_lock(descriptor):
                _end_recorded(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _OPEN, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_recorded(descriptor: int) -> None:
    pid, _, when = os.pread(descriptor, 100, 0).decode().partition(" ")
    if when:
        end(int(pid), when)


def end(pid: int, when: str) -> None:
    """Kill a process and wait until it is gone, unless the process of that number began at another time."""
    if not when or began(pid) != when:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + _ENDS_S
    while began(pid) == when and time.monotonic() < until_s:
        time.sleep(0.005)


def began(pid: int) -> str:
    """When a process began, in the system's ticks; empty if there is none, or if the system does not tell."""
    state, *fields = _stat(pid)
    return "" if state in "ZX" else fields[18]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by SIGSTOP and its like, and does nothing until it is told to go on."""
    return _stat(pid)[0] == "T"


def _stat(pid: int) -> list[str]:
    """State and following fields of ``/proc/<pid>/stat``; if it cannot be read, the state of an ended process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["X"]
