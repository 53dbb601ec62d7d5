"""Removes what killed processes leave on a machine and in a run directory.

Our directories are named ``spotlight-<user>-...``. A process that uses one holds a lock in it, which the system
releases however the process ends: a directory that nobody holds is left over.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from spotlight.records import SpotlightError
from spotlight.store.device_locks import end_leftovers
from spotlight.store.node import PREFIX, hold, is_held, memory_roots, own_directory, sweep
from spotlight.store.room import SHARED_MEMORY
from spotlight.store.versions import WRITING

HALF_WRITTEN = (".*.part", "*.partial")
"""Files on their way: ours, and Zarr's."""
SOCKET_BYTES = 107
"""Longest name of a socket that the system takes."""
ENDING_S = 8.0
"""How long killed processes may take to end and release what they held."""
POLL_S = 0.05


class Scratch:
    """A directory on this machine's disk for this process alone.

    Args:
        sockets: whether it will hold some, of names as long as ``/listener-12345678``. The system takes only short
            ones: where the temporary directory has a long name, this one is in node memory.
    """

    def __init__(self, *, sockets: bool = False) -> None:
        prefix = f"{PREFIX}scratch-{os.getpid()}-"
        longest = Path(tempfile.gettempdir()) / f"{prefix}12345678" / "listener-12345678"
        is_long = len(os.fsencode(longest)) > SOCKET_BYTES
        moved = sockets and is_long and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY if moved else None))
        self._descriptor = hold(self.path)

    def keep(self) -> None:
        """Make it again if somebody removed it, as what tidies up temporary files may."""
        if not is_held(self.path, before := self._descriptor):
            self._descriptor = hold(self.path)
            os.close(before)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep_leftovers(name: str = "") -> list[Path]:
    """Kill leftover processes, and remove unheld directories, of this user on this machine; returns those directories.

    Args:
        name: only directories whose names begin with this, after `PREFIX`.
    """
    roots = memory_roots(name)
    for root in roots:
        with suppress(OSError, SpotlightError), own_directory(root):  # another user's is of no concern here
            end_leftovers(root)
    return [root for root in roots if _swept(root)]


def sweep_ended(name: str) -> None:
    """Remove what a run that has ended leaves on this machine; its processes may still be ending, and are waited for.

    Args:
        name: with which the names of its directories begin.
    """
    until_s = time.monotonic() + ENDING_S
    while memory_roots(name) and time.monotonic() < until_s:
        sweep_leftovers(name)
        time.sleep(POLL_S)


def _swept(root: Path) -> bool:
    with suppress(SpotlightError):
        return sweep(root)
    return False


def _held_by_caller() -> AbstractContextManager[bool]:
    """For a run that the caller holds, so that nobody else does."""
    return nullcontext(True)


def remove_half_written(
    run_dir: Path, unused: Callable[[], AbstractContextManager[bool]] = _held_by_caller
) -> list[Path]:
    """Remove files that were being written in a run directory when their writers ended; those of living ones stay.

    Versions of the weights that were being written are removed, whoever wrote them: nobody waits for those any more.

    Args:
        unused: for a run that the caller does not hold, a context that holds it and yields whether nobody else does.
            What was there before is then no living driver's.

    Returns:
        What was removed.
    """
    removed = []
    for path in [path for path in _half_written(run_dir) if not _is_being_written(path)]:
        with unused() as is_nobodys:
            if not is_nobodys:
                break
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_being_written(path: Path) -> bool:
    """Whether a file's name has the id of another process that lives, such as one that writes a report."""
    pid = re.search(r"\.(\d+)-\d+\.part$", path.name)
    return pid is not None and int(pid[1]) != os.getpid() and Path(f"/proc/{pid[1]}").exists()


def _half_written(run_dir: Path) -> Iterable[Path]:
    def walk(directory: str) -> Iterator[Path]:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(WRITING):
                    yield from walk(entry.path)
                elif entry.name.startswith(WRITING) or any(map(Path(entry.name).match, HALF_WRITTEN)):
                    yield Path(entry.path)

    with suppress(OSError):  # a directory that goes meanwhile
        yield from walk(str(run_dir))
