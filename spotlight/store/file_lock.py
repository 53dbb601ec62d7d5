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
from spotlight.store.objects import needed_of, not_a_file, without_links


class FileLock:
    """The lock of one directory, which is a file in it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory / "lock"

    @contextlib.contextmanager
    def held(self, *, shared: bool = False) -> Iterator[bool]:
        """Hold the lock inside, if it is free: alone, or shared. Yields whether it is held.

        Raises:
            SpotlightError: this user may not write there, the file system has no locks, or a directory is in the lock's
                place.
        """
        with self._open() as file:
            yield self._try_lock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def is_held(self) -> bool:
        """Whether a process holds it alone. To find out, this takes a shared lock for a moment.

        Raises:
            SpotlightError: the file system has no locks, or a directory is in the lock's place.
        """
        if not self._file.exists():
            return False
        self._refuse_directory()
        with self._file.open() as file:
            return not self._try_lock(file, fcntl.LOCK_SH)

    def _try_lock(self, file: IO[str], how: int) -> bool:
        """Lock a file until it is closed; returns False if another process holds it."""
        with needed_of(self._directory, "locks of files (flock)"):
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    @property
    def identity(self) -> str:
        """Identifies this directory on this machine; empty where nobody has held the lock yet."""
        found = self._file.stat() if self._file.exists() else None
        return f"{_boot()}:{found.st_dev}:{found.st_ino}" if found else ""

    def _refuse_directory(self) -> None:
        """
        Raises:
            SpotlightError: a directory is in the lock's place.
        """
        if self._file.is_dir():
            raise not_a_file(self._file)

    def _open(self) -> IO[str]:
        self._refuse_directory()
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
    """Identifies this machine, since it was started."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else f"{uuid.getnode():x}"
