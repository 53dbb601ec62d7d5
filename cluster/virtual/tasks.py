"""The tasks of graphs and the states that Dask's scheduler would have them in; it knows no time and runs nothing.

What Dask does is done as Dask does it: a task waits for its inputs; behind the gate it waits for the dispatcher; any
other goes where its inputs are, to a worker that has what its annotations ask for. A result is released when nobody
needs it any more, and made again when it is needed and its worker is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask.highlevelgraph import HighLevelGraph

from cluster.events import Key, Layer, TaskPhase


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A call in a graph, and how far it is."""

    key: Key
    call: tuple[Any, ...]
    """``(function, *arguments)``; keys among the arguments, also in lists, stand for results."""
    needs: Mapping[str, float]
    """Resources that its worker must have."""
    phase: str
    wanted: bool = False
    """By whoever submitted the graph."""
    inputs: tuple[Key, ...] = ()
    users: tuple[Key, ...] = ()
    missing: set[Key] = field(default_factory=set)
    """Inputs that are not there."""
    waiters: set[Key] = field(default_factory=set)
    """Tasks that still need its result."""
    state: TaskPhase = "released"
    worker: str = ""
    """That runs it or has its result."""
    result: Any = None
    bound: str = ""
    """Behind the gate: the only worker that may run it, until the gate is closed again."""


class Tasks:
    """All tasks that are not forgotten.

    Args:
        changed: is told of each task that is in another state.
        choose: names a worker for a task that is ready and not behind a gate, or "" if there is none now.
    """

    def __init__(self, changed: Callable[[Task], None], choose: Callable[[Task], str]) -> None:
        self._changed, self._choose = changed, choose
        self.all: dict[Key, Task] = {}
        self.unplaced: dict[Key, None] = {}
        """Ready, not behind a gate, and no worker for them."""

    def layers(self, graph: HighLevelGraph) -> tuple[Layer, ...]:
        """What the annotations of a graph say."""
        return tuple(_layer(name, layer) for name, layer in graph.layers.items())

    def add(self, graph: HighLevelGraph, wanted: Iterable[Key]) -> list[Task]:
        """Add the tasks of a graph, none of which begins yet."""
        added = []
        for layer in graph.layers.values():
            annotations = layer.annotations or {}
            calls: Mapping[Any, Any] = layer
            for key, call in calls.items():
                task = Task(key=key, call=call, needs=annotations["resources"], phase=annotations["phase"])
                self.all[key] = task
                added.append(task)
        users: dict[Key, list[Key]] = {}
        for task in added:
            task.inputs = tuple(dict.fromkeys(self._keys_in(task.call[1:])))
            for key in task.inputs:
                users.setdefault(key, []).append(task.key)
        for key in wanted:
            self.all[key].wanted = True
        for task in added:
            task.users = tuple(users.get(task.key, ()))
            task.waiters = set(task.users)
        return added

    def begin(self, tasks: Iterable[Task]) -> None:
        """Let tasks run as soon as their inputs are there."""
        for task in tasks:
            if task.state == "released":
                self._want(task)

    def arguments(self, task: Task) -> list[Any]:
        """Of its call, with results in the place of keys."""
        return [self._resolve(argument) for argument in task.call[1:]]

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, list):
            return [self._resolve(part) for part in argument]
        return self.all[argument].result if self._is_key(argument) else argument

    def _keys_in(self, arguments: Iterable[Any]) -> Iterator[Key]:
        for argument in arguments:
            if isinstance(argument, list):
                yield from self._keys_in(argument)
            elif self._is_key(argument):
                yield argument

    def _is_key(self, argument: Any) -> bool:
        return type(argument) is tuple and len(argument) == 2 and type(argument[0]) is str and argument in self.all

    # From state to state

    def _want(self, task: Task) -> None:
        """A released task is to run, as are the inputs that it lacks."""
        task.missing = {key for key in task.inputs if self.all[key].state != "memory"}
        for key in task.inputs:
            self.all[key].waiters.add(task.key)
        if not task.missing:
            self._ready(task)
            return
        self._set(task, "waiting")
        for key in sorted(task.missing):  # those that were released, or lost, are made again
            if self.all[key].state == "released":
                self._want(self.all[key])

    def _ready(self, task: Task) -> None:
        if "gate" in task.needs and not task.bound:
            self._set(task, "gated")
            return
        address = self._choose(task)
        if address:
            self.start(task, address)
        else:
            self.unplaced[task.key] = None
            self._set(task, "gated")

    def place_unplaced(self) -> None:
        """A worker came: tasks that had none may go to it."""
        for key in list(self.unplaced):
            task = self.all[key]
            address = self._choose(task)
            if address:
                del self.unplaced[key]
                self.start(task, address)

    def start(self, task: Task, address: str) -> None:
        """A worker has it now, to run it when it can."""
        self.unplaced.pop(task.key, None)
        task.worker = address
        self._set(task, "processing")

    def finish(self, task: Task, result: Any) -> None:
        """It has a result; what waited for it may begin, and inputs that nobody else needs are released."""
        task.result = result
        self._set(task, "memory")
        for key in task.users:
            user = self.all[key]
            if user.state == "waiting":
                user.missing.discard(task.key)
                if not user.missing:
                    self._ready(user)
        for key in task.inputs:
            self.all[key].waiters.discard(task.key)
            self._release_if_unneeded(self.all[key])
        self._release_if_unneeded(task)

    def fail(self, task: Task, error: BaseException) -> None:
        task.result = error
        self._set(task, "erred")

    def hand_back(self, task: Task) -> None:
        """Whoever ran it did not finish it: it is to run again, from the start of its call."""
        task.worker = ""
        self._set(task, "released")
        self._want(task)

    def lose(self, task: Task) -> None:
        """The worker that had its result is gone."""
        task.worker, task.result = "", None
        self._set(task, "released")
        for key in sorted(task.waiters):
            user = self.all[key]
            if user.state in ("gated", "processing"):
                user.worker = ""
                self.unplaced.pop(key, None)
                self._set(user, "released")
                self._want(user)
            elif user.state == "waiting":
                user.missing.add(task.key)
        if (task.waiters or task.wanted) and task.state == "released":
            self._want(task)

    def _release_if_unneeded(self, task: Task) -> None:
        if task.state == "memory" and not (task.waiters or task.wanted):
            task.result = None
            self._set(task, "released")

    def forget(self, tasks: Iterable[Task]) -> None:
        """Nobody asks for them any more."""
        for task in tasks:
            self.unplaced.pop(task.key, None)
            self._set(task, "forgotten")
            del self.all[task.key]

    def _set(self, task: Task, state: TaskPhase) -> None:
        task.state = state
        self._changed(task)


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
