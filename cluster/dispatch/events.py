"""What the dispatcher is told, and what it answers: records that travel between `dispatch` and whoever acts for it.

Every event says when it happened, in seconds of the clock of whoever reports it; every instruction says why. All of
them turn into JSON rows and back, so that a log of events can be dispatched again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import inf
from typing import Any, ClassVar, Literal

from spotlight.records import Placement, Surplus, record

Key = tuple[str, int]
"""A task's key: its layer, and its number in the layer."""
TaskState = Literal["waiting", "gated", "processing", "memory", "erred", "released", "forgotten"]
"""Dask's states of a task; "gated" is its "no-worker", in which a task stays until the dispatcher names a worker."""
WorkerPool = Literal["reserved", "spot", "reward", "head"]


@record
class Layer:
    """The tasks of one phase in a graph, and what their annotations say of all of them."""

    name: str
    indices: tuple[int, ...]
    pool: str
    phase: str
    iteration: int
    shards: int = 1
    """Tasks of each request."""
    widths: tuple[int, ...] = (1,)
    window_s: float = inf
    """How long reserved workers run these requests while there are spot workers."""


@record
class Work:
    """What a worker did for a task that has a result or an error, by the worker's clock."""

    start_s: float
    stop_s: float
    dropped: bool = False
    """The task was called off."""


# Events


@record
class GraphCame:
    """A graph was submitted."""

    at_s: float
    layers: tuple[Layer, ...]


@record
class TaskChanged:
    """A task is in another state now."""

    at_s: float
    key: Key
    state: TaskState
    worker: str = ""
    """Address of the worker that begins it; of no meaning in other states."""
    work: Work | None = None
    """What the worker of a task that ended did; None where it reported nothing."""


@record
class TasksChanged:
    """Several tasks are in another state now, the same for all, and for the same reason.

    It means the same as one `TaskChanged` after the other, and is logged as these. None of the tasks is an update, and
    none breaks its gang by it: no instructions follow but to close gates.
    """

    at_s: float
    keys: tuple[Key, ...]
    state: TaskState
    worker: str = ""
    workers: tuple[str, ...] = ()
    """Addresses of the workers that begin them, one for each task, where it is not the same for all."""
    work: Work | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers that begin them, one for each task."""
        return self.workers or (self.worker,) * len(self.keys)

    def one_by_one(self) -> Iterator[TaskChanged]:
        return (
            TaskChanged(at_s=self.at_s, key=key, state=self.state, worker=worker, work=self.work)
            for key, worker in zip(self.keys, self.addresses, strict=True)
        )


@record
class WorkerJoined:
    """A worker came; its name may have been another's, and so may its address."""

    at_s: float
    address: str
    name: str
    pool: WorkerPool
    node: str = ""
    host: str = ""
    job: str = ""
    """Id of the batch system's job that started it."""


@record
class WorkerAvailable:
    """A worker takes tasks, or takes none for now: it is paused, or runs tasks that are not ours."""

    at_s: float
    address: str
    available: bool


@record
class WorkerLeft:
    """A worker is gone; told before its tasks change."""

    at_s: float
    address: str
    expected: bool


@record
class WorkerNoticed:
    """A worker's machine will be taken away."""

    at_s: float
    address: str
    reason: str


@record
class WorkerSilent:
    """No heartbeat of a worker has come for a while."""

    at_s: float
    address: str
    silent_s: float


@record
class GangBeat:
    """The first rank of a gang reports how far the gang is."""

    at_s: float
    gang: str
    epoch: int
    step: int
    """Steps committed."""
    steps: int
    resumed: bool
    """True: the gang begins at this step. False: it has just run the step."""


@record
class GangBeats:
    """Several gangs report at once; logged as one `GangBeat` after the other."""

    at_s: float
    beats: tuple[GangBeat, ...]


@record
class EngineGone:
    """A worker lives, and the engine process that did its work is gone."""

    at_s: float
    worker: str
    gang: str
    reason: str


@record
class WeightsHeld:
    """A worker's node has a file of weights now."""

    at_s: float
    address: str
    sha256: str


@record
class StopAsked:
    """The run is to end: what runs ends at its next step boundary, and nothing more begins."""

    at_s: float


@record
class TimePassed:
    """All events up to now have been reported: decide."""

    at_s: float


Event = (
    GraphCame
    | TaskChanged
    | TasksChanged
    | WorkerJoined
    | WorkerAvailable
    | WorkerLeft
    | WorkerNoticed
    | WorkerSilent
    | GangBeat
    | GangBeats
    | EngineGone
    | WeightsHeld
    | StopAsked
    | TimePassed
)


# Instructions


@record
class LaunchedShard:
    """A shard of a gang that is launched."""

    key: Key
    shard: int
    address: str
    place: Placement


@record
class Launch:
    """Begin the shards of a gang, all at once: each worker is told its placement before its task comes."""

    gang: str
    members: tuple[LaunchedShard, ...]
    """By rank."""
    cause: str


@record
class Dismiss:
    """Run a shard that has nothing to do, or scoring that was called off, on the worker beside the scheduler."""

    key: Key
    address: str
    gang: str
    shard: int
    tell: Surplus | int | None
    """What the shard is told: that it is surplus, that its request is quarantined after so many preemptions, or nothing
    (it finds by itself that it was called off, as scoring does, which is of no gang)."""
    cause: str


@record
class Dismissals:
    """Run neighbouring shards of a request that have nothing to do; logged as one `Dismiss` after the other."""

    keys: tuple[Key, ...]
    address: str
    gang: str
    first: int
    """Number of the first shard."""
    tell: Surplus
    cause: str

    def one_by_one(self) -> Iterator[Dismiss]:
        return (
            Dismiss(key=key, address=self.address, gang=self.gang, shard=shard, tell=self.tell, cause=self.cause)
            for shard, key in enumerate(self.keys, self.first)
        )


@record
class Train:
    """Begin to compute the gradient of a part, to add several, or an update."""

    key: Key
    address: str
    cause: str


@record
class Score:
    """Begin to score a request, on a worker of the reward pool."""

    key: Key
    address: str
    cause: str


@record
class CallOff:
    """This member leaves its gang at once: another member is gone."""

    gang: str
    epoch: int
    address: str
    cause: str


@record
class Regroup:
    """This member leaves its gang at the next step boundary; the gang is formed anew."""

    gang: str
    epoch: int
    address: str
    cause: str


@record
class CloseExploration:
    """Exploration for an iteration, and any before it, ends everywhere at the next step boundary."""

    iteration: int
    cause: str


@record
class StopWork:
    """All work ends at its next step boundary, everywhere."""

    cause: str


@record
class CloseGate:
    """A task waits behind the gate again: any worker may be named for it."""

    key: Key
    cause: str


@record
class CloseGates:
    """Several tasks wait behind the gate again; logged as one `CloseGate` after the other."""

    keys: tuple[Key, ...]
    cause: str

    def one_by_one(self) -> Iterator[CloseGate]:
        return (CloseGate(key=key, cause=self.cause) for key in self.keys)


@record
class Evict:
    """End a worker that has hung."""

    address: str
    name: str
    cause: str


@record
class Wake:
    """Send `TimePassed` at this moment at the latest."""

    at_s: float
    cause: str


Instruction = (
    Launch
    | Dismiss
    | Dismissals
    | Train
    | Score
    | CallOff
    | Regroup
    | CloseExploration
    | StopWork
    | CloseGate
    | CloseGates
    | Evict
    | Wake
)


def one_by_one(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """The same instructions, each about one task or one worker."""
    for instruction in instructions:
        if isinstance(instruction, Dismissals | CloseGates):
            yield from instruction.one_by_one()
        else:
            yield instruction


class EventLog:
    """Events and the instructions that followed, as JSON rows; first the rules by which they were given.

    Rows are linear in what happens: each tells only what is new.
    """

    KINDS: ClassVar[Mapping[str, type]] = {kind.__name__: kind for kind in Event.__args__}

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._entries: list[tuple[Event, tuple[Instruction, ...]]] = []
        self._head: list[dict[str, Any]] = [{"decision": "dispatch rules", "rules": dict(rules)}]

    def add(self, event: Event, instructions: Iterable[Instruction]) -> None:
        self._entries.append((event, tuple(instructions)))

    def drain(self) -> list[dict[str, Any]]:
        """Rows since the last call."""
        head, self._head = self._head, []
        entries, self._entries = self._entries, []
        return [*head, *(line for entry in entries for line in rows(*entry))]


def rows(event: Event, instructions: Iterable[Instruction]) -> Iterable[dict[str, Any]]:
    """As `row`, one for each task or gang, where several changed or reported together."""
    if isinstance(event, GangBeats):
        return [row(beat, ()) for beat in event.beats]
    if not isinstance(event, TasksChanged):
        return [row(event, instructions)]
    gates = {gate.key: gate for gate in one_by_one(instructions) if isinstance(gate, CloseGate)}
    common = row(next(event.one_by_one()), ()) if event.keys else {}
    return (
        common
        | {"key": list(key)}
        | ({"worker": worker} if worker else {})
        | ({"then": [_plain(gates[key])]} if key in gates else {})
        for key, worker in zip(event.keys, event.addresses, strict=True)
    )


def row(event: Event, instructions: Iterable[Instruction]) -> dict[str, Any]:
    """An event and what followed from it; fields that have their default value are left out."""
    followed = [_plain(instruction) for instruction in one_by_one(instructions)]
    return {"decision": "dispatch", **_plain(event), **({"then": followed} if followed else {})}


def event_of(entry: Mapping[str, Any]) -> Event:
    """The event that `row` made a row of.

    Raises:
        KeyError, TypeError, ValueError: it is not such a row.
    """
    kind = EventLog.KINDS[entry["is"]]
    given = {name: value for name, value in entry.items() if name not in ("decision", "is", "then")}
    if "key" in given:
        given["key"] = (given["key"][0], given["key"][1])
    if given.get("work"):
        given["work"] = Work(**{name: value for name, value in given["work"].items() if name != "is"})
    if "layers" in given:
        given["layers"] = tuple(_layer(layer) for layer in given["layers"])
    event: Event = kind(**given)
    return event


def _layer(entry: Mapping[str, Any]) -> Layer:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items() if name != "is"
    }
    return Layer(**given)


def _plain(value: Any) -> Any:
    kind: type = type(value)
    if kind in (str, float, int, bool):  # nearly always
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if is_dataclass(kind):
        given = ((name, getattr(value, name), default) for name, default in _defaults(kind).items())
        return {"is": kind.__name__} | {name: _plain(each) for name, each, default in given if each != default}
    return value


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """{field of a record: its default value}"""
    return {field.name: field.default for field in fields(kind)}
