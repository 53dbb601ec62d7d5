"""Says which disk is full, and of what: of bytes or of inodes."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from spotlight.store.room import SHARED_MEMORY

FULL_BYTES = 2**20
"""Less than what a run writes at once."""
FULL_INODES = 16


def is_full(error: BaseException) -> bool:
    """Whether an error means a full disk, or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def full_here(error: OSError) -> str:
    """Which disk of this machine caused an error, as half a sentence for whoever reads it elsewhere."""
    named = [error.filename] if isinstance(error.filename, str) else []
    found = full_disk([*named, SHARED_MEMORY, tempfile.gettempdir()])
    return f"on {socket.gethostname()}, {found or ': '.join([*named, 'make room'])}"


def full_disk(places: Iterable[str | Path]) -> str:
    """Of the disks that these places are on, the one that is full, as half a sentence; empty where none is."""
    for place in dict.fromkeys(_mount_point(Path(place)) for place in places):
        found = os.statvfs(place)
        free_mb = found.f_bavail * found.f_frsize / 1e6
        if found.f_files and found.f_favail < FULL_INODES:
            return (
                f"{place} has {found.f_favail} inodes left of {found.f_files}, and {free_mb:.1f} MB: delete files there"
            )
        if found.f_bavail * found.f_frsize < FULL_BYTES:
            return f"{place} has {free_mb:.1f} MB left: make room"
    return ""


def _mount_point(path: Path) -> Path:
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path
