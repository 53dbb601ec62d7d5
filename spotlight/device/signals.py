"""What the outside may ask of work in flight; asked from any thread, read between two steps.

One `signals` object per process: the cluster sets it, the work reads it. It imports nothing heavy, so
that work which is called off costs nothing. A run's signals never touch another run's.
"""

from __future__ import annotations

from typing import Any

from spotlight.records import Placement, Quarantined, Request, Stopped, Surplus

ORDERS = ("clear", "stop", "close_exploration", "leave", "regroup", "call_off")
"""What a worker passes on to the process that does its work."""


class Signals:
    """Requests to end early, by run and by gang; single assignments to a dict or a set, so any thread may make them."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()
        self._closed: dict[str, int] = {}
        self._leaving = False
        self._regroup: dict[str, int] = {}
        self._called_off: dict[str, int] = {}
        self._places: dict[tuple[str, int], Placement | Surplus | int] = {}

    def adopt(self, other: Signals) -> None:
        """Take over all that was asked of another process."""
        self.__dict__.update(other.__dict__)

    def obey(self, order: str, facts: dict[str, Any]) -> None:
        """Do what one of `ORDERS` says."""
        assert order in ORDERS
        getattr(self, order)(**facts)

    # Orders

    def clear(self, run: str) -> None:
        """Forget what was asked of an earlier session of this run."""
        self._stopped.discard(run)
        self._closed.pop(run, None)

    def stop(self, run: str) -> None:
        """Everything in flight ends at its next step boundary."""
        self._stopped.add(run)

    def close_exploration(self, run: str, iteration: int) -> None:
        """Exploration for ``iteration``, and any earlier one, ends at its next step boundary."""
        self._closed[run] = max(iteration, self._closed.get(run, -1))

    def leave(self) -> None:
        """This machine goes away: everything in flight ends at its next step boundary."""
        self._leaving = True

    def regroup(self, gang: str, epoch: int) -> None:
        """This forming of the gang ends at its next step boundary; it is formed anew."""
        self._regroup[gang] = epoch

    def call_off(self, gang: str, epoch: int) -> None:
        """This forming of the gang, and any before it, ends at once: a member is gone."""
        self._called_off[gang] = epoch

    def place(self, gang: str, shard: int, placement: Placement | Surplus | int) -> None:
        """Where a shard that is about to start runs; a number sets its request aside, after so many losses."""
        self._places[gang, shard] = placement

    # Answers

    def check(self, request: Request) -> str | None:
        """Why the request is to be dropped, or None to go on.

        Raises:
            Stopped: the run is being stopped.
        """
        if request.run in self._stopped:
            raise Stopped(request.id)
        if request.purpose == "explore" and request.iteration <= self._closed.get(request.run, -1):
            return f"exploration for iteration {request.iteration} is closed"
        return None

    def is_stopping(self, run: str) -> bool:
        return run in self._stopped

    def must_leave(self, placement: Placement) -> bool:
        """Whether the gang is to end at its next step boundary and go on elsewhere."""
        return self._leaving or placement.epoch <= self._regroup.get(placement.gang, -1)

    def is_called_off(self, placement: Placement) -> bool:
        return placement.epoch <= self._called_off.get(placement.gang, -1)

    def placed(self, gang: str, shard: int, request: Request) -> Placement | Surplus | Quarantined:
        """What was said of this shard. Where nobody places shards, the first one runs alone."""
        found = self._places.pop((gang, shard), None)
        if found is None:
            return Surplus() if shard else Placement(gang=gang, epoch=0, rank=0, width=1)
        return Quarantined(request=request, preemptions=found) if isinstance(found, int) else found


signals = Signals()
