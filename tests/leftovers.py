"""What processes leave behind: found by a mark in their environment, by their folder for temporary files, by names."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil

from spotlight.store.leftovers import HALF_WRITTEN
from spotlight.store.node import memory_roots

OURS = "SPOTLIGHT_TESTS"
"""In the environment of what these tests start: see `conftest`."""
GONE_S = 10.0
"""After any end, nothing is left by then."""


class Watched:
    """Processes that a test starts with a mark, and a directory for their temporary files."""

    def __init__(self) -> None:
        self._mark = uuid4().hex
        self._tmp = Path(tempfile.mkdtemp(prefix="left-"))  # a short path: sockets' names are limited

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SPOTLIGHT_WATCHED": self._mark, "TMPDIR": str(self._tmp)}

    def processes(self) -> list[psutil.Process]:
        return marked("SPOTLIGHT_WATCHED", self._mark)

    def left(self, runs: Path) -> list[str]:
        """All that is there now of these processes, whose run directories are in a folder."""
        names = [path.name for path in runs.glob("run-*")]
        files = [path for pattern in HALF_WRITTEN for path in runs.rglob(pattern)]
        ours = [path for pattern in ("spotlight-*", "pymp-*") for path in self._tmp.glob(pattern)]
        found: list[Path] = [*ours, *files, *memory_of(names)]
        return [*map(described, self.processes()), *map(str, found)]

    def assert_nothing_is_left(self, runs: Path) -> None:
        assert soon_empty(lambda: self.left(runs)) == []

    def close(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._tmp, ignore_errors=True)


def marked(variable: str, mark: str) -> list[psutil.Process]:
    """Processes that have this variable in their environment, or that come from one that has."""

    def has_it() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == mark:
                    yield process

    return list(has_it())


def described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"process {process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:160]}"
    return ""


def memory_of(names: Iterable[str]) -> list[Path]:
    """Directories outside their own of runs of these names, which others may have: they tell the second."""
    return [root for name in names for root in memory_roots(name) if not _is_held_by_others(root)]


def _is_held_by_others(root: Path) -> bool:
    """Whether a process holds it that these tests did not start."""
    held = str(root / ".alive")
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(OURS) != os.environ.get(OURS):
                descriptors = Path(f"/proc/{process.pid}/fd").iterdir()
                if any(os.readlink(descriptor) == held for descriptor in descriptors):
                    return True
    return False


def soon_empty(left: Callable[[], list[str]]) -> list[str]:
    """What is left, as soon as it is nothing, or after as long as it may take."""
    until_s = time.monotonic() + GONE_S
    while (found := left()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return found
