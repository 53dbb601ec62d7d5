"""How many bytes a directory can still take: of its file system and, where that is in memory, of the memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LEFT = 0.05
"""Of the machine's memory, for the processes that are there."""


def is_in_memory(directory: Path) -> bool:
    return directory.resolve().is_relative_to(SHARED_MEMORY)


def room_bytes(directory: Path) -> float:
    """What may be written there. A file system in memory may be larger than the memory that is free, and whoever fills
    that is killed, or gets another process killed."""
    free_bytes = float(shutil.disk_usage(directory).free)
    if not is_in_memory(directory):
        return free_bytes
    return min(free_bytes, spare_memory_bytes() - LEFT * psutil.virtual_memory().total)


def spare_memory_bytes() -> float:
    """Of the machine, and of the control groups that this process is in: those of a Slurm job or a container."""
    return min(psutil.virtual_memory().available, *_spare_in_groups(), float("inf"))


def _spare_in_groups() -> Iterator[float]:
    """In each group with a limit, and in those that it is in; version 1 of cgroups, and 2."""
    with suppress(OSError):  # there are none
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _spare_above(GROUPS, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                yield from _spare_above(
                    GROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
                )


def _spare_above(root: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[float]:
    """Pages of files that are only cached count as spare. In a container, the path may be one of outside."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # no such group here, or no limit
            limit_bytes = int((folder / limit).read_text())
            used_bytes = int((folder / used).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached_bytes = sum(int(counts[f"{prefix}{each}_file"]) for each in ("active", "inactive"))
            yield float(limit_bytes - used_bytes + cached_bytes)
        if folder == root:
            return
