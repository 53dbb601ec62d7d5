"""The virtual cluster by itself: what happens at once, and what waits."""

from __future__ import annotations

from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cluster.events import Dismiss, TaskState
from cluster.virtual.clock import VirtualClock
from cluster.virtual.example import ExampleTiming
from cluster.virtual.executor import Executor
from cluster.virtual.messages import Messages
from cluster.virtual.workers import VirtualWorker


def test_alike_events_of_a_moment_are_one_call() -> None:
    clock, told = VirtualClock(), list[tuple[float, Any]]()

    def ended(some: list[str]) -> None:
        told.append((clock.now_s, some))

    def alone(what: str) -> None:
        told.append((clock.now_s, what))

    for what in "ab":
        clock.together(2.0, ended, what)
    clock.together(2.0, ended, "cancelled").cancel()
    clock.together(2.0, ended, "c")
    clock.at(2.0, alone, "d")
    clock.together(2.0, ended, "e")
    clock.together(1.0, ended, "first")
    clock.together(3.0, ended, "last")
    while clock.next_s is not None:
        clock.step()

    assert told == [(1.0, ["first"]), (2.0, ["a", "b", "c"]), (2.0, "d"), (2.0, ["e"]), (3.0, ["last"])]


def test_who_is_dismissed_while_others_are_ends_too() -> None:
    """The worker beside the scheduler has few threads: what waits for one begins when those that came before end."""
    count, clock = 7, VirtualClock()
    head = VirtualWorker(address="head", name="head", pool="head", node="", threads=4)
    keys = [("rollout", index) for index in range(count)]
    annotations = {"resources": {"gate": 1}, "phase": "rollout", "pool": "any", "iteration": 0}
    layer = MaterializedLayer({key: (str, key[1]) for key in keys}, annotations=annotations)
    states: dict[Any, TaskState] = {}

    def changed(tasks: Any, state: TaskState) -> None:
        states.update((key, state) for task in tasks for key in task.keys)

    executor = Executor(
        clock,
        Messages(clock, None, lambda: 1),
        ExampleTiming(step_s=1.0, train_s=1.0, start_up_s=0.0),
        {"head": head},
        resumes=True,
        changed=changed,
        failed=lambda error: None,
        ended=lambda worker: None,
    )
    executor.tasks.begin(executor.tasks.add(HighLevelGraph({"rollout": layer}, {"rollout": set()}), keys))

    dismissed = [
        Dismiss(key=key, address="head", gang="", shard=0, tell=None, cause="it is called off") for key in keys
    ]
    executor.dismiss(dismissed[:-1])
    executor.dismiss(dismissed[-1:])
    while clock.next_s is not None:
        clock.step()

    assert states == dict.fromkeys(keys, "memory")
