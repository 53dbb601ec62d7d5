"""What the warm parent of the workers imports, once for all of them; nothing else may import it.

A process that `multiprocessing` starts first runs the driver's main script again. A worker needs nothing
from there, and a script that starts a run at its top level would start it once more in every worker.
"""

from __future__ import annotations

import sys
from multiprocessing import spawn
from types import TracebackType

import cluster.workers
import spotlight.engine


def _leave_out(main: str) -> None:
    """Stands in for running the driver's main script."""


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of a driver that left while a worker was being started: the worker ends, as it should."""
    if not isinstance(error, EOFError | BrokenPipeError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report
spawn._fixup_main_from_name = spawn._fixup_main_from_path = _leave_out  # type: ignore[attr-defined]

__all__ = ["cluster", "spotlight"]
