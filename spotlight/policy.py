"""Who runs what: placement as a pure function, called by the cluster and the simulator.

Nothing here sleeps, logs, draws a random number or reads a clock. The same `View` always gives the
same plan, so a live run can be replayed offline. It is level-triggered: it looks at the whole state
each time, so a lost or doubled event cannot corrupt it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pool = Literal["reserved", "spot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A worker with nothing to do."""

    worker: str
    pool: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request whose inputs are ready and that no worker has."""

    id: str
    pools: tuple[Pool, ...]
    """Where it may run, the preferred pool first."""
    order: int
    """Arrival, smaller is earlier."""
    exploring: bool = False
    losses: int = 0
    """Workers it has lost: its committed steps wait to be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a placement decision may look at."""

    idle: tuple[Idle, ...]
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run this request there, now."""

    request: str
    worker: str


def plan(view: View) -> list[Launch]:
    """Pair idle workers with waiting requests: pull, never push.

    A worker gets its next request when it is free and not before, so nothing queues on a machine
    that may vanish. Preempted requests go first, so that work half done never waits behind fresh
    work; what training waits for goes before exploration; then first come, first served. A request
    that no idle worker may take does not hold up those behind it.
    """
    free = sorted(view.idle, key=lambda idle: idle.worker)
    launches = []
    for waiting in sorted(view.waiting, key=lambda w: (w.losses == 0, w.exploring, w.order)):
        if not free:
            break
        chosen = _preferred(free, waiting.pools)
        if chosen:
            free.remove(chosen)
            launches.append(Launch(request=waiting.id, worker=chosen.worker))
    return launches


def _preferred(free: list[Idle], pools: tuple[Pool, ...]) -> Idle | None:
    for pool in pools:
        for idle in free:
            if idle.pool == pool:
                return idle
    return None
