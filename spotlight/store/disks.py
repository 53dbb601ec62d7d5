"""Says which disk is full, and of what: of bytes or of inodes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FULL_BYTES = 2**20
"""Less than what a run writes at once."""
FULL_INODES = 16


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
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path
