"""What the outside may ask of work in flight; asked from any thread, read between two steps.

One `signals` object per process: the cluster sets it, the work reads it. It imports nothing heavy, so
that work which is called off costs nothing. A run's signals never touch another run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, assert_never

from spotlight.records import Placement, Quarantined, Request, Stopped, Surplus, record


@record
class Clear:
    """Forget what was asked of an earlier session of this run."""

    run: str


@record
class Stop:
    """Everything of this run that is in flight ends at its next step boundary."""

    run: str


@record
class CloseExploration:
    """Exploration for this iteration, and any earlier one, ends at its next step boundary."""

    run: str
    iteration: int


@record
class Leave:
    """This machine goes away: everything in flight ends at its next step boundary."""


@record
class Regroup:
    """This epoch of the gang ends at its next step boundary; the gang is formed anew."""

    gang: str
    epoch: int


@record
class CallOff:
    """This epoch of the gang, and any before it, ends at once: a member is gone."""

    gang: str
    epoch: int


@record
class PlaceShard:
    """Where a shard that is about to start runs; `Surplus`: nowhere; a number: its request is quarantined after so many
    losses."""

    gang: str
    shard: int
    placement: Placement | Surplus | int


Order = Clear | Stop | CloseExploration | Leave | Regroup | CallOff
"""The commands that a worker passes on to its engine process."""
Command = Order | PlaceShard

ORDERS: Mapping[str, type[Order]] = {
    "clear": Clear,
    "stop": Stop,
    "close_exploration": CloseExploration,
    "leave": Leave,
    "regroup": Regroup,
    "call_off": CallOff,
}
"""{name in a message: order}"""


def order_to_message(order: Order) -> dict[str, Any]:
    """As plain values."""
    (name,) = (name for name, kind in ORDERS.items() if isinstance(order, kind))
    return {"order": name, "facts": asdict(order)}


def order_from_message(order: str, facts: Mapping[str, Any]) -> Order:
    return ORDERS[order](**facts)


def shard_to_message(command: PlaceShard) -> dict[str, Any]:
    """As plain values; ``value`` has the fields of a placement, is None for a surplus, or is the number."""
    match command.placement:
        case Placement() as placement:
            value: Any = asdict(placement)
        case Surplus():
            value = None
        case preemptions:
            value = preemptions
    return {"gang": command.gang, "shard": command.shard, "value": value}


def shard_from_message(gang: str, shard: int, value: Any) -> PlaceShard:
    placement: Placement | Surplus | int = Surplus() if value is None else value
    if isinstance(value, Mapping):
        placement = Placement(**value)
    return PlaceShard(gang=gang, shard=shard, placement=placement)


GANGS_MAX = 10_000
"""Most gangs remembered as regrouped or called off; the earliest, which have long ended, are forgotten."""
PLACES_MAX = 1000
"""Most placements kept until their shards ask for them: a shard that is called off never does. Usually a few."""


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

    def standing_in_for(self, other: Signals) -> _StandingIn:
        """Be another worker's signals for a while, in a process that does the work of several."""
        return _StandingIn(self, other)

    def obey(self, command: Command) -> None:
        match command:
            case Clear(run=run):
                self._stopped.discard(run)
                self._closed.pop(run, None)
            case Stop(run=run):
                self._stopped.add(run)
            case CloseExploration(run=run, iteration=iteration):
                self._closed[run] = max(iteration, self._closed.get(run, -1))
            case Leave():
                self._leaving = True
            case Regroup(gang=gang, epoch=epoch):
                _remember(self._regroup, gang, epoch)
            case CallOff(gang=gang, epoch=epoch):
                _remember(self._called_off, gang, epoch)
            case PlaceShard(gang=gang, shard=shard, placement=placement):
                self.place(gang, shard, placement)
            case _:
                assert_never(command)

    def place(self, gang: str, shard: int, placement: Placement | Surplus | int) -> None:
        """As `PlaceShard` asks."""
        while len(self._places) >= PLACES_MAX:
            self._places.pop(next(iter(self._places)), None)
        self._places[gang, shard] = placement

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

    def closed(self, run: str) -> int:
        """The last iteration for which exploration is closed; -1 before any."""
        return self._closed.get(run, -1)

    def is_stopping(self, run: str) -> bool:
        return run in self._stopped

    def must_leave(self, placement: Placement) -> bool:
        """Whether the gang is to end at its next step boundary and go on elsewhere."""
        return self._leaving or placement.epoch <= self._regroup.get(placement.gang, -1)

    def is_called_off(self, placement: Placement) -> bool:
        return placement.epoch <= self._called_off.get(placement.gang, -1)

    def placed(self, gang: str, shard: int, request: Request) -> Placement | Surplus | Quarantined:
        """Where this shard of a request runs, or why it does not."""
        found = self.told(gang, shard)
        return Quarantined(request=request, preemptions=found) if isinstance(found, int) else found

    def was_told(self, gang: str, shard: int) -> bool:
        """Whether `PlaceShard` said where this shard runs, and `told` has not taken it yet."""
        return (gang, shard) in self._places

    def told(self, gang: str, shard: int) -> Placement | Surplus | int:
        """Take what `PlaceShard` said of this shard; if it said nothing, shard 0 runs alone, and others are surplus."""
        found = self._places.pop((gang, shard), None)
        if found is None:
            return Surplus() if shard else Placement(gang=gang, epoch=0, rank=0, width=1)
        return found


def _remember(epochs: dict[str, int], gang: str, epoch: int) -> None:
    """Keep the highest epoch named for a gang."""
    while len(epochs) >= GANGS_MAX:
        epochs.pop(next(iter(epochs)), None)
    epochs[gang] = max(epoch, epochs.get(gang, -1))


class _StandingIn:
    """A context in which some signals are another worker's; light, since a simulated iteration enters ten thousand."""

    __slots__ = ("_before", "_here", "_other")

    def __init__(self, here: Signals, other: Signals) -> None:
        self._here, self._other, self._before = here, other, here.__dict__

    def __enter__(self) -> None:
        self._before, self._here.__dict__ = self._here.__dict__, self._other.__dict__

    def __exit__(self, *error: object) -> None:
        self._here.__dict__ = self._before


signals = Signals()
