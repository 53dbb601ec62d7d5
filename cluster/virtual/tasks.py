"""The tasks of graphs, in the states that Dask's scheduler would have them in; it knows no time and runs nothing.

It does as Dask does: a task waits for its inputs; behind the gate it waits for the dispatcher; any
other goes where its inputs are, to a worker that has what its annotations ask for. A result is released when no task
needs it any more, and computed again when it is needed and its worker is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from dask.highlevelgraph import HighLevelGraph

from cluster.dispatch.events import Key, Layer, TaskState


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A call in a graph, and how far it is."""

    key: Key
    call: tuple[Any, ...]
    """``(function, *arguments)``; keys among the arguments, also in lists, stand for results."""
    needs: Mapping[str, float]
    """Resources that its worker must have."""
    phase: str
    pool: str
    gated: bool
    """Whether it waits behind the gate for the dispatcher."""
    wanted: bool = False
    """Whether its result was asked for when the graph was submitted."""
    inputs: tuple[Task, ...] = ()
    """Some of them, and of its users, may have been split since: see `parts`."""
    users: Sequence[Task] = ()
    missing: int = 0
    """Inputs that are still missing, if the task waits."""
    waiters: int = 0
    """Tasks that still need its result."""
    needs_inputs: bool = True
    """Whether it counts among the waiters of its inputs."""
    state: TaskState = "released"
    worker: str = ""
    """Address of the worker that runs it, or has its result."""
    result: Any = None
    held: int = 0
    """Number of its result, in the order in which workers got theirs."""
    bound: str = ""
    """Behind the gate: the only worker that may run it, until the gate is closed again."""
    given: str = ""
    """Address of the worker that it was given to, until that ends or loses it."""
    began_s: float | None = None
    """When it was begun."""
    alike: Mapping[Key, tuple[Any, ...]] = field(default_factory=dict)
    """Calls of all tasks of the graph that this `Task` stands for, if several; ``key`` and ``call`` are the first
    one's.

    They are the last shards of a request. As long as none of them runs in a gang, what happens to one happens to all.
    """
    split: tuple[Task, ...] = ()
    """Tasks that it no longer stands for, since something happened to them alone."""
    keys: Collection[Key] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.alike or (self.key,)

    @property
    def shard(self) -> tuple[str, int]:
        """A shard's request, by its name within the graph, and its number: the last two arguments of its call."""
        if self.gated and len(self.call) > 3 and isinstance(self.call[-2], str):
            return self.call[-2], self.call[-1]
        return "", 0


class Tasks:
    """All tasks that are not forgotten.

    Args:
        changed: called with tasks that have all come into the same state.
        choose: returns a worker for a task that is ready and not behind a gate, or "" if there is none now.
        begun: called with a task that its worker is to run, before `changed`.
    """

    def __init__(
        self,
        changed: Callable[[Sequence[Task], TaskState], None],
        choose: Callable[[Task], str],
        begun: Callable[[Task], None],
    ) -> None:
        self._changed, self._choose, self._begun = changed, choose, begun
        self.all: dict[Key, Task] = {}
        self.unplaced: dict[Key, None] = {}
        """Tasks that are ready and not behind a gate, but have no worker."""
        self._held = count(1)
        self._alike: list[Task] = []
        """Tasks whose new state the next `flush` reports."""
        self._alike_state: TaskState = "released"

    def layers(self, graph: HighLevelGraph) -> tuple[Layer, ...]:
        """What the annotations of a graph say."""
        return tuple(_layer(name, layer) for name, layer in graph.layers.items())

    def add(self, graph: HighLevelGraph, wanted: Iterable[Key]) -> list[Task]:
        """Add the tasks of a graph, none of which begins yet."""
        added: list[Task] = []
        for layer in graph.layers.values():
            annotations = layer.annotations or {}
            needs, phase = annotations["resources"], annotations["phase"]
            gated = "gate" in needs
            more = {"needs": needs, "phase": phase, "pool": annotations["pool"], "gated": gated}
            for key, call, alike in _together(layer, annotations.get("shards", 1) if gated else 1):
                task = Task(key=key, call=call, alike=alike, **more)
                added.append(task)
                if alike:
                    self.all.update(dict.fromkeys(alike, task))
                else:
                    self.all[key] = task
        users: dict[Task, list[Task]] = {}
        for task in added:
            found: dict[Key, Task] = {}
            self._find_inputs(task.call, found)
            task.inputs = tuple(dict.fromkeys(found.values()))
            together = sum([len(needed.keys) for needed in task.inputs])
            assert together == len(found), f"{task.key} needs some shards of a request, and not all but the first"
            for needed in task.inputs:
                users.setdefault(needed, []).append(task)
        for task, those in users.items():
            task.users, task.waiters = those, sum(len(user.keys) for user in those)
        for key in wanted:
            self.alone(key).wanted = True
        return added

    def alone(self, key: Key) -> Task:
        """The task of a key, split off if it stood for several."""
        task = self.all[key]
        if task.alike:
            self._split(task, 1 if key == task.key else len(task.alike))
        return self.all[key]

    def _split(self, task: Task, count: int) -> None:
        """Split off the first ``count`` tasks that it stands for: each becomes a `Task` of its own."""
        self.flush()
        calls = list(task.alike.items())
        count = min(count, len(calls) - 1)  # then it stands for the last one alone
        off = [replace(task, key=key, call=call, alike={}, split=()) for key, call in calls[:count]]
        self.all.update((part.key, part) for part in off)
        task.key, task.call = calls[count]
        task.alike = dict(calls[count:]) if count < len(calls) - 1 else {}
        task.keys = task.alike or (task.key,)
        task.split += tuple(off)
        for user in parts(task.users):
            if user.state == "waiting" and task.state != "memory":
                user.missing += count

    def begin(self, tasks: Iterable[Task]) -> None:
        """Let tasks run as soon as their inputs are there."""
        for task in tasks:
            if task.state == "released":
                self._want(task)
        self.flush()

    def arguments(self, task: Task) -> list[Any]:
        """Arguments of its call, with results in place of keys."""
        return self._resolved(task.call[1:]) if task.inputs else list(task.call[1:])

    def _resolved(self, arguments: Iterable[Any]) -> list[Any]:
        known, resolved = self.all, []
        for argument in arguments:
            kind = type(argument)
            if kind is tuple and len(argument) == 2 and type(argument[0]) is str and argument in known:
                resolved.append(known[argument].result)
            else:
                resolved.append(self._resolved(argument) if kind is list else argument)
        return resolved

    def _find_inputs(self, arguments: Iterable[Any], found: dict[Key, Task]) -> None:
        known = self.all
        for argument in arguments:
            kind = type(argument)
            if kind is tuple and len(argument) == 2 and type(argument[0]) is str:
                if argument in known:
                    found[argument] = known[argument]
            elif kind is list:
                self._find_inputs(argument, found)

    # From state to state

    def _want(self, task: Task) -> None:
        """Have a released task run, with the inputs that it lacks."""
        missing = [needed for needed in parts(task.inputs) if needed.state != "memory"] if task.inputs else []
        task.missing = len(missing)
        if not task.needs_inputs:
            task.needs_inputs = True
            for needed in parts(task.inputs):
                needed.waiters += len(task.keys)
        if not missing:
            self._ready(task)
            return
        self._set_alike(task, "waiting")
        if released := [needed for needed in missing if needed.state == "released"]:
            for needed in sorted(released, key=_key):  # they are made again
                if needed.state == "released":
                    self._want(needed)

    def _ready(self, task: Task) -> None:
        if task.gated and not task.bound:
            self._set_alike(task, "gated")
            return
        address = self._choose(task)
        if address:
            self.start(task, address)
        else:
            self.unplaced[task.key] = None
            self._set_alike(task, "gated")

    def place_unplaced(self) -> None:
        """Place tasks that had no worker, since one has joined."""
        for key in list(self.unplaced):
            task = self.all[key]
            address = self._choose(task)
            if address:
                self.start(task, address)
        self.flush()

    def start(self, task: Task, address: str) -> None:
        """Give a task to a worker, which runs it when it can; call `flush` afterwards."""
        self.unplaced.pop(task.key, None)
        task.worker = address
        self._set_alike(task, "processing")
        self._begun(task)

    def start_together(self, tasks: Sequence[Task], address: str) -> None:
        """As `start`, for tasks behind the gate, which are reported together."""
        for task in tasks:
            task.worker = address
            self._set_alike(task, "processing")
        self.flush()

    def finish(self, tasks: Sequence[Task], results: Sequence[Any]) -> None:
        """Set the results of tasks; tasks that waited for them may begin, and inputs that no other task needs are
        released."""
        for task, result in zip(tasks, results, strict=True):
            task.result, task.held = result, next(self._held)
            self._set_alike(task, "memory")
        self.flush()
        for task in tasks:
            self._finished(task)
        self.flush()

    def _finished(self, task: Task) -> None:
        for user in parts(task.users):
            if user.state == "waiting":
                user.missing -= 1
                if not user.missing:
                    self._ready(user)
        needed_before, task.needs_inputs = task.needs_inputs, False
        for needed in parts(task.inputs):
            needed.waiters -= len(task.keys) if needed_before else 0
            if not needed.waiters:
                self._release_if_unneeded(needed)
        if not task.waiters:
            self._release_if_unneeded(task)

    def fail(self, task: Task, error: BaseException) -> None:
        task.result = error
        self._set(task, "erred")

    def hand_back(self, task: Task) -> None:
        """A task was not finished: it is to run again, from the start of its call."""
        task.worker = ""
        self._set(task, "released")
        self._want(task)
        self.flush()

    def results_of(self, address: str) -> list[Task]:
        """Tasks whose results a worker has, in the order in which it got them."""
        there = [task for task in self.all.values() if task.worker == address and task.state == "memory"]
        return sorted(dict.fromkeys(there), key=attrgetter("held"))

    def hold(self, task: Task, address: str) -> None:
        """Move a task's result to another worker."""
        task.worker, task.held = address, next(self._held)

    def lose(self, task: Task) -> None:
        """A task's result is gone with its worker."""
        task.worker, task.result = "", None
        for user in [user for user in parts(task.users) if user.alike]:
            self._split(user, len(user.alike))
        self._set(task, "released")
        for user in sorted((user for user in parts(task.users) if user.needs_inputs), key=_key):
            if user.state in ("gated", "processing"):
                user.worker = ""
                self.unplaced.pop(user.key, None)
                self._set(user, "released")
                self._want(user)
            elif user.state == "waiting":
                user.missing += 1
        if (task.waiters or task.wanted) and task.state == "released":
            self._want(task)
        self.flush()

    def _release_if_unneeded(self, task: Task) -> None:
        if task.state == "memory" and not (task.waiters or task.wanted):
            task.result = None
            self._set_alike(task, "released")

    def forget(self, tasks: Sequence[Task]) -> None:
        """Forget tasks that are no longer needed."""
        tasks = parts(tasks)
        for task in tasks:
            self.unplaced.pop(task.key, None)
            if task.state == "processing":
                self._set(task, "forgotten")
            else:
                self._set_alike(task, "forgotten")
        self.flush()
        for task in tasks:
            for key in task.keys:
                del self.all[key]
            task.inputs = task.users = ()  # of each other, which would keep them in memory for a while

    def _set(self, task: Task, state: TaskState) -> None:
        self.flush()
        task.state = state
        self._changed((task,), state)

    def _set_alike(self, task: Task, state: TaskState) -> None:
        """As `_set`; reported together with tasks before it that came into the same state."""
        if self._alike_state != state:
            self.flush()
            self._alike_state = state
        task.state = state
        self._alike.append(task)

    def flush(self) -> None:
        """Report the tasks whose state has changed."""
        if self._alike:
            alike, self._alike = self._alike, []
            self._changed(alike, self._alike_state)


_key, _split_from = attrgetter("key"), attrgetter("split")


def parts(tasks: Sequence[Task]) -> Sequence[Task]:
    """Tasks, and those that were split from them since."""
    if not any(map(_split_from, tasks)):
        return tasks
    return [part for task in tasks for part in (*task.split, task)]


_Calls = Mapping[Key, tuple[Any, ...]]


def _together(calls: Mapping[Any, Any], shards: int) -> Iterator[tuple[Key, tuple[Any, ...], _Calls]]:
    """The calls of a layer, each with those that one `Task` is to stand for: the shards of a request but the first."""
    if shards < 3:
        yield from ((key, call, {}) for key, call in calls.items())
        return
    for _, request in groupby(calls.items(), lambda entry: entry[0][1] // shards):
        first, *others = request
        yield *first, {}
        if len(others) > 1 and all(call[:-1] == others[0][1][:-1] for _, call in others):
            yield *others[0], dict(others)
        else:
            yield from ((*other, {}) for other in others)


def _layer(name: str, layer: Any) -> Layer:
    annotations = layer.annotations or {}
    more = {key: annotations[key] for key in ("shards", "window_s") if key in annotations}
    return Layer(
        name=name,
        indices=tuple(sorted(index for _, index in layer)),
        pool=annotations["pool"],
        phase=annotations["phase"],
        iteration=annotations["iteration"],
        widths=tuple(annotations.get("widths", (1,))),
        **more,
    )
