"""Keeps workers at the places of a virtual cluster: they join, and are taken away, as each place's `Stay` says."""

from __future__ import annotations

from itertools import cycle
from math import inf

from cluster.virtual.clock import Alarm, VirtualClock
from cluster.virtual.machines import Machines
from cluster.virtual.timing import Stay
from cluster.virtual.workers import VirtualWorker


class Keeper:
    """Keeps a worker at one place, and takes it away, as its `Stay` says."""

    def __init__(self, machines: Machines, stay: Stay, clock: VirtualClock, *, start_up_s: float) -> None:
        self._machines, self._stay, self._clock, self._start_up_s = machines, stay, clock, start_up_s
        self._address = ""
        self._boot: Alarm | None = None
        """The alarm for a machine that is starting up."""
        kinds = cycle(stay.preemptions)
        for from_s, until_s in stay.ups:
            clock.at(from_s, self._come)
            if until_s < inf:
                clock.at(until_s, self._go, next(kinds))

    def gone(self, worker: VirtualWorker) -> None:
        """Replace a lost worker, if a machine is to be there."""
        if worker.address == self._address:
            self._address = ""
            self._clock.after(self._stay.replace_after_s, self._come)

    def _come(self) -> None:
        if self._is_up() and not self._address and not self._boot:
            self._boot = self._clock.after(self._start_up_s, self._start)

    def _start(self) -> None:
        self._boot = None
        if self._is_up():
            self._address = self._machines.join(self._stay.name, self._stay.pool, self._stay.node).address

    def _is_up(self) -> bool:
        if self._machines.is_closed:
            return False
        now_s = self._clock.now_s
        return any(from_s <= now_s < until_s for from_s, until_s in self._stay.ups)

    def _go(self, kind: str) -> None:
        if self._boot:  # the machine that is starting up is taken away; the next one starts from the beginning
            self._boot.cancel()
            self._boot = None
            return
        match kind:
            case "notice":
                self._machines.notice(self._address, self._stay.grace_s)
            case "hang":
                self._machines.freeze(self._address)
            case _:
                self._machines.kill(self._address)
