"""Keeps the workers of a virtual cluster at their places: along each one's stay they come, and are taken away."""

from __future__ import annotations

from itertools import cycle
from math import inf
from typing import Protocol

from cluster.events import WorkerPool
from cluster.virtual.clock import VirtualClock
from cluster.virtual.timing import Stay
from cluster.virtual.workers import VirtualWorker


class Machines(Protocol):
    """The cluster, as far as its machines are concerned."""

    @property
    def is_closed(self) -> bool: ...

    def join(self, name: str, pool: WorkerPool, node: str) -> VirtualWorker: ...

    def kill(self, address: str) -> None: ...

    def freeze(self, address: str) -> None: ...

    def notice(self, address: str, grace_s: float) -> None: ...


class Keeper:
    """Keeps a worker at its place, and takes it away, as its stay has it."""

    def __init__(self, cluster: Machines, stay: Stay, clock: VirtualClock, *, start_up_s: float) -> None:
        self._cluster, self._stay, self._clock, self._start_up_s = cluster, stay, clock, start_up_s
        self._address = ""
        kinds = cycle(stay.preemptions)
        for from_s, until_s in stay.ups:
            clock.at(from_s, self._come)
            if until_s < inf:
                clock.at(until_s, self._go, next(kinds))

    def gone(self, worker: VirtualWorker) -> None:
        """Replace it, if a machine is to be there."""
        if worker.address == self._address:
            self._address = ""
            self._clock.after(self._stay.replace_after_s, self._come)

    def _come(self) -> None:
        if self._is_up() and not self._address:
            self._address = "booting"
            self._clock.after(self._start_up_s, self._start)

    def _start(self) -> None:
        self._address = ""
        if self._is_up():
            pool: WorkerPool = "spot" if self._stay.pool == "spot" else "reserved"
            self._address = self._cluster.join(self._stay.name, pool, self._stay.node).address

    def _is_up(self) -> bool:
        if self._cluster.is_closed:
            return False
        now_s = self._clock.now_s
        return any(from_s <= now_s < until_s for from_s, until_s in self._stay.ups)

    def _go(self, kind: str) -> None:
        match kind:
            case "notice":
                self._cluster.notice(self._address, self._stay.grace_s)
            case "hang":
                self._cluster.freeze(self._address)
            case _:
                self._cluster.kill(self._address)
