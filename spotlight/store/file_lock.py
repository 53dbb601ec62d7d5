"""Who uses a run's files on this machine: one process that runs it, or any number that only look.

The operating system lets go of the lock when a process ends, however it ends. It says nothing of other machines: see
`spotlight.store.lease`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO

from spotlight.records import SpotlightError
from spotlight.store.objects import needed_of, without_links


class FileLock:
    """The lock of one directory, which is a file in it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory / "lock"

    @contextlib.contextmanager
    def held(self, *, shared: bool = False) -> Iterator[bool]:
        """Whether the lock was free, and is held inside: by this process alone, or as one of many.

        Raises:
            SpotlightError: this user may not write there, or the file system has no locks.
        """
        with self._open() as file:
            yield self._is_locked(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def is_held(self) -> bool:
        """Whether a process holds it alone. This asks as one of many, and lets go at once.

        Raises:
            SpotlightError: the file system has no locks.
        """
        if not self._file.exists():
            return False
        with self._file.open() as file:
            return not self._is_locked(file, fcntl.LOCK_SH)

    def _is_locked(self, file: IO[str], how: int) -> bool:
        """Lock it until it is closed, unless another has."""
        with needed_of(self._directory, "locks of files (flock)"):
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    @property
    def identity(self) -> str:
        """Tells these files from those of any other machine or directory; empty where nobody has held them yet."""
        found = self._file.stat() if self._file.exists() else None
        return f"{_boot()}:{found.st_dev}:{found.st_ino}" if found else ""

    def _open(self) -> IO[str]:
        try:
            return open(self._file, "a+", opener=without_links)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise SpotlightError(
                f"{self._directory}: nothing can be written there ({error.strerror}): it is not yours, or mounted "
                "read-only; a copy of the directory can be gone on with"
            ) from None


@cache
def _boot() -> str:
    """Names this machine since it was started."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else f"{uuid.getnode():x}"
