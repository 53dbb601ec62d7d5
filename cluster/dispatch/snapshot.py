"""What may be asked of the dispatcher's state: plain values, for displays and tests."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.dispatch.request_state import RequestState
from spotlight.records import record


@record
class GangView:
    """A request, as `Snapshot` shows it."""

    workers: tuple[str, ...]
    """At work on it, by rank."""
    epoch: int
    step: int
    width: int
    preemptions: int
    breaking: bool


@record
class Snapshot:
    """All that may be asked of the dispatcher's state; for displays and tests."""

    workers: Mapping[str, str]
    """Address of each worker that is alive, by name."""
    pools: Mapping[str, int]
    """Workers alive, by pool."""
    running: Mapping[str, int]
    """Tasks in progress, by phase."""
    waiting: int
    """Requests that wait for workers."""
    waiting_for: tuple[str, ...]
    """Pools that requests wait for, and that have no worker at all now."""
    too_wide: int
    """Workers that a waiting request needs on one node at least, and no node of its pools has; 0: there is no such."""
    widths: Mapping[int, int]
    """Gangs at work, by their width."""
    gangs: Mapping[str, GangView]
    leaving: frozenset[str]
    """Names of workers under notice."""
    preemptions: int
    """Spot workers lost, with and without a notice."""
    stopping: bool


@record
class WorkerActivity:
    """A worker that is alive, and what it is at."""

    worker: str
    pool: str
    leaving: bool
    """It is under notice."""
    phase: str = ""
    """Empty where it has nothing to do."""
    iteration: int = 0
    key: str = ""
    forming: str = ""
    """Name of its gang, the same for all members; empty for a worker alone."""
    since_s: float = 0.0


def view_of(request: RequestState) -> GangView:
    return GangView(
        workers=request.workers,
        epoch=request.epoch,
        step=request.step,
        width=request.width,
        preemptions=request.preemptions,
        breaking=request.breaking,
    )
