"""Virtual workers: what each has to do now and next, what it was told, and what its device remembers. It decides
nothing, and knows no time but what it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.dispatch.events import Key, WorkerPool
from cluster.virtual.clock import Alarm
from spotlight.device.signals import Signals
from spotlight.records import Placement, Surplus


@dataclass(slots=True, kw_only=True, eq=False)
class VirtualWorker:
    """One worker from its joining to its end; another that takes its name is another worker."""

    address: str
    name: str
    pool: WorkerPool
    node: str
    threads: int = 1
    signals: Signals = field(default_factory=Signals)
    places: dict[tuple[str, int], Placement | Surplus | int] = field(default_factory=dict)
    """What it was told of shards that it has yet to end, by request and shard."""
    queue: deque[Key] = field(default_factory=deque)
    """Tasks that it has and has not begun."""
    running: dict[Key, Alarm | None] = field(default_factory=dict)
    """Tasks that it has begun, with what will end them."""
    reports: dict[Key, object] = field(default_factory=dict)
    """Of those, the ones that have ended, with the report that is on its way."""
    gang: str = ""
    """Name of the request that it was put to work on last."""
    leaving: bool = False
    """Under notice: it begins nothing more."""
    paused: bool = False
    """It begins nothing for now."""
    frozen: bool = False
    """It neither works nor answers."""
    alive: bool = True

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def can_begin(self) -> bool:
        return self.alive and not (self.frozen or self.paused or self.leaving)

    def can(self, needs: Iterable[str]) -> bool:
        """Whether it has the resources that a task asks for."""
        return all(need == self.pool or (need == "engine" and self.pool in ("reserved", "spot")) for need in needs)

    def cancel_alarms(self) -> None:
        """What it has begun does not end by itself any more."""
        for alarm in self.running.values():
            if alarm:
                alarm.cancel()

    def drop_all(self) -> None:
        """It has nothing begun any more."""
        self.cancel_alarms()
        self.running.clear()
        self.reports.clear()
