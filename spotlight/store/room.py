"""How much memory there is, and how many bytes a directory can still take that may be in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups, by which Slurm's jobs and containers are limited."""
LEFT = 0.05
"""Share of the memory that stays free for running processes."""


def is_in_memory(directory: Path) -> bool:
    return directory.resolve().is_relative_to(SHARED_MEMORY)


def room_bytes(directory: Path) -> float:
    """Bytes that may be written to a directory. A file system in memory may be larger than the free memory, and filling
    that gets a process killed."""
    free_bytes = float(shutil.disk_usage(directory).free)
    return min(free_bytes, spare_memory_bytes() - LEFT * memory_bytes()) if is_in_memory(directory) else free_bytes


def memory_bytes() -> float:
    """How much memory this process, with all others of its control groups, may use."""
    return min(float(psutil.virtual_memory().total), *(limit for limit, _ in _groups()), float("inf"))


def spare_memory_bytes() -> float:
    """How much of that is free."""
    return min(float(psutil.virtual_memory().available), *(limit - used for limit, used in _groups()), float("inf"))


def _groups() -> Iterator[tuple[float, float]]:
    """Limit and use of each control group that this process is in, and of those around it; of version 1 or 2."""
    with suppress(OSError):  # there are none
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _limited(GROUPS, path, ("memory.max", "memory.current"), "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _limited(GROUPS / "memory", path, names, "total_")


def _limited(root: Path, path: str, names: tuple[str, str], prefix: str) -> Iterator[tuple[float, float]]:
    """Limit and use of one group and those around it. Cached pages of files do not count as used. In a container, the
    path may be the host's."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError, KeyError):  # no such group here, no limit, or no such counts
            limit_bytes, used_bytes = (float(int((folder / name).read_text())) for name in names)
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit_bytes, used_bytes - sum(int(counts[f"{prefix}{each}_file"]) for each in ("active", "inactive"))
        if folder == root:
            return
