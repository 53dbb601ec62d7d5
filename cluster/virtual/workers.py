"""Virtual workers: the work, the queue and the orders of each. Nothing is decided here, and no clock is read."""

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
    """One worker from its joining to its end; a later one of the same name is another worker."""

    address: str
    name: str
    pool: WorkerPool
    node: str
    threads: int = 1
    signals: Signals = field(default_factory=Signals)
    places: dict[tuple[str, int], Placement | Surplus | int] = field(default_factory=dict)
    """{(request, shard): what it was told about a shard that it has yet to end}"""
    queue: deque[Key] = field(default_factory=deque)
    """Tasks that it was given and has not begun."""
    running: dict[Key, Alarm | None] = field(default_factory=dict)
    """{task that it has begun: the alarm that will end it}"""
    reports: dict[Key, object] = field(default_factory=dict)
    """{task of those that has ended: the report on its way}"""
    gang: str = ""
    """Name of the request that it was last put to work on."""
    leaving: bool = False
    """Whether it has a notice, and begins nothing more."""
    paused: bool = False
    """Whether it begins nothing for now."""
    frozen: bool = False
    """Whether it neither works nor answers."""
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
        """Cancel the alarms that would end what it has begun."""
        for alarm in self.running.values():
            if alarm:
                alarm.cancel()

    def drop_all(self) -> None:
        """Drop all that it has begun."""
        self.cancel_alarms()
        self.running.clear()
        self.reports.clear()
