"""The Dask scheduler of a cluster of the run's own: as Dask has it, but that it keeps nothing of a graph that is done.

Dask opens a span for every graph, keeps it with its task groups to the scheduler's end, and has each worker keep a
dozen measurements of it. A run sends a graph per iteration, for days.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Scheduler


class NoSpans:
    """Stands in for Dask's extension: tells no graph from another. What Dask's pages show of spans is empty."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.spans_search_by_tag: dict[str, Any] = {}

    def observe_tasks(self, *tasks: Any, **what: Any) -> Mapping[Any, Any]:
        return {}

    def heartbeat(self, worker: Any, measured: Mapping[Any, float]) -> None:
        pass


class LeanScheduler(Scheduler):
    """Takes what `distributed.Scheduler` takes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.extensions["spans"] = NoSpans()
