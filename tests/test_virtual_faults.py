"""The virtual cluster takes the time it should, and its faults really strike: or schedules would find nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    Event,
    Instruction,
    Launch,
    LaunchedShard,
    TaskChanged,
    TasksChanged,
    Train,
    WorkerLeft,
)
from cluster.dispatch.rules import LEAVE_POLL_S, Rules
from cluster.virtual.clock import VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.example import Example, ExampleTiming, _score, request
from cluster.virtual.executor import BACK_OFF_S, Executor
from cluster.virtual.faults import FAULTS, Fault, Moment, TriggeredFault, draw, verdict
from cluster.virtual.messages import Messages
from cluster.virtual.timing import Denoising, Fixed, Stay
from cluster.virtual.workers import VirtualWorker
from spotlight.records import Dropped, Quarantined

L = ExampleTiming.launch_s


def test_a_task_that_is_not_behind_the_gate_goes_to_the_least_busy_worker_that_takes_tasks() -> None:
    workers = {
        name: VirtualWorker(address=name, name=name, pool="spot", node="n")
        for name in ("leaves", "paused", "busy", "idle")
    }
    workers["leaves"].leaving = workers["paused"].paused = True
    workers["busy"].running["x", 0] = None
    executor = Executor(
        clock := VirtualClock(),
        Messages(clock, None, lambda: 1),
        ExampleTiming(step_s=1.0, train_s=1.0, start_up_s=0.0),
        workers,
        resumes=True,
        changed=lambda tasks, state: None,
        failed=lambda error: None,
        ended=lambda worker: None,
    )
    annotations = {"resources": {"engine": 1}, "phase": "score", "pool": "engine", "iteration": 0}
    layer = MaterializedLayer({("score", 0): (str, 0)}, annotations=annotations)
    (task,) = executor.tasks.add(HighLevelGraph({"score": layer}, {"score": set()}), [("score", 0)])

    executor.tasks.begin([task])
    bound = [executor._choose(task) for task.bound in ("paused", "gone", "busy")]

    assert task.worker == "idle"
    assert bound == ["", "", "busy"]


def ended_s(of: Any, event: Event) -> list[float]:
    if isinstance(event, TaskChanged | TasksChanged) and event.state == "memory":
        keys = (event.key,) if isinstance(event, TaskChanged) else event.keys
        return [event.at_s for key in keys if key == of]
    return []


@pytest.mark.parametrize(("key", "lasts_s"), [(("train", 0), 5.0), (("rollout", 0), L + 1.0 + BACK_OFF_S)])
def test_a_worker_that_has_notice_leaves_as_soon_as_it_may(key: Any, lasts_s: float) -> None:
    """It is paid for no longer: a gradient is finished, a request ends at its next step."""
    clock, began_s, left_s = VirtualClock(), list[float](), list[float]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, WorkerLeft):
            left_s.append(event.at_s)
        for each in instructions:
            begun = each.members[0] if isinstance(each, Launch) else each
            if isinstance(begun, Train | LaunchedShard) and begun.key == key and not began_s:
                began_s.append(clock.now_s)
                clock.after(0.5, cluster.machines.notice, begun.address, 30.0)

    graph, outputs = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    spot = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(2)]
    reserved = [Stay(pool="reserved", name=f"reserved-{n}", node="r", ups=((0.0, inf),)) for n in range(2)]
    timing = ExampleTiming(step_s=1.0, train_s=5.0, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, [*spot, *reserved], told=told)

    cluster.compute(graph, outputs)

    assert left_s == [pytest.approx(began_s[0] + lasts_s + LEAVE_POLL_S)]


def test_work_that_is_done_again_where_it_was_begun_takes_all_of_its_time_again() -> None:
    """After its engine was lost; and a score whose image was lost meanwhile."""

    class Timing(ExampleTiming):
        def work(self, function: Any, given: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
            return Fixed(seconds=20.0) if function is _score else super().work(function, given)

    clock, began_s, ends_s = VirtualClock(), list[float](), dict[str, list[float]]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        for name in ("score", "train"):
            ends_s.setdefault(name, []).extend(ended_s((name, 0), event))
        if isinstance(event, TaskChanged) and event.key == ("score", 0) and event.state == "processing":
            began_s.append(event.at_s)
            if len(began_s) == 1:
                clock.after(1.0, lambda: cluster.machines.kill(cluster.tasks.all["decode", 0].worker))
        for each in instructions:
            if isinstance(each, Train) and each.key == ("train", 0):
                began_s.append(clock.now_s)
                if len(began_s) == 3:
                    clock.after(1.0, cluster.machines.lose_engine, each.address)

    example = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1, score_pool="reward")
    graph, outputs = example.graph(lambda: None)
    stays = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(2)]
    stays += [Stay(pool=pool, name=f"{pool}-0", node=pool, ups=((0.0, inf),)) for pool in ("reserved", "reward")]
    timing = Timing(step_s=1.0, train_s=5.0, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, stays, told=told)

    cluster.compute(graph, outputs)

    assert 0 < began_s[1] - began_s[0] - 1.0 < 5.0
    assert ends_s["score"] == [pytest.approx(began_s[1] + 20.0)]
    assert ends_s["train"] == [pytest.approx(began_s[2] + 1.0 + BACK_OFF_S + 5.0)]


def struck(
    *faults: tuple[float, Fault, int], triggered: tuple[TriggeredFault, ...] = (), **changed: Any
) -> list[dict[str, Any]]:
    """What the dispatchers of a small run are told that is struck by these faults alone."""
    log: list[dict[str, Any]] = []
    up: Any = {"ups": (((0.0, inf),),) * 4, "scorers": 0, "sick": "", "lag_s": 0.0, "always_fails": None}
    size: Any = {"reserved": 1, "spot": 4, "per_node": 2, "step_s": 0.2, "train_s": 1.5, "start_up_s": 0.5}
    schedule = replace(
        draw(0),
        example=Example(widths=(1,), rollouts=4, pool="any", rounds=1, slots=2, parts=2),
        rules=Rules(hang_after_s=2.0, quarantine_after=1000),
        faults=faults,
        triggered=triggered,
        **(up | size | changed),
    )
    assert verdict(schedule, log=log).violations == ()
    return log


def told(log: list[dict[str, Any]], event: str) -> list[float]:
    return [row["at_s"] for row in log if row.get("is") == event]


MARKS: dict[Fault, tuple[str, int]] = {
    "kill": ("WorkerLeft", 1),
    "notice": ("WorkerNoticed", 1),
    "hang": ("WorkerSilent", 1),
    "engine": ("EngineGone", 1),
    "pause": ("WorkerAvailable", 2),
    "suspect": ("WorkerSilent", 1),
    "node": ("WorkerLeft", 2),
    "stop": ("StopAsked", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_strikes(fault: Fault) -> None:
    """Or schedules would find nothing, and nobody would know."""
    calm, log = struck(), struck((0.7, fault, 1))

    drivers = [sum(row["decision"] == "dispatch rules" for row in each) for each in (calm, log)]
    assert drivers == [1, 2 if fault in ("driver", "stop", "store") else 1]
    if fault in MARKS:
        event, times = MARKS[fault]
        assert (len(told(calm, event)), len(told(log, event))) == (0, times)


def test_every_moment_triggers() -> None:
    """A fault that is triggered strikes at its moment: a step that is about to end lies in the future."""

    def struck_at_s(moment: Moment, fault: Fault, event: str) -> list[float]:
        return told(struck(triggered=(TriggeredFault(moment=moment, nth=0, after_s=0.0, fault=fault),)), event)

    assert len(struck_at_s("trained", "stop", "StopAsked")) == 1
    ((joined_s,), (launched_s,), (stepped_s,)) = (
        struck_at_s(moment, "kill", "WorkerLeft") for moment in ("came", "launched", "boundary")
    )
    assert joined_s <= launched_s < launched_s + ExampleTiming.launch_s + 0.2 <= stepped_s


def test_what_is_wrong_all_the_time_is_so() -> None:
    sick, late = struck(sick="spot-0"), struck(lag_s=0.02)

    beats = Counter(str({**row, "at_s": 0}) for row in late if row.get("is") == "GangBeat")
    assert len(told(sick, "EngineGone")) > 1
    assert max(beats.values()) == 2  # one arrives twice


def test_a_driver_that_follows_another_finds_steps_and_workers_as_the_first_did() -> None:
    log = struck((3.1, "driver", 0), ups=(((1.0, inf),),) * 4)
    second = [row["decision"] for row in log].index("dispatch rules", 1)

    joined = [
        [row["at_s"] - rows[1]["at_s"] for row in rows if row.get("is") == "WorkerJoined"]
        for rows in (log[:second], log[second:])
    ]
    went_on = [row["step"] for row in log[second:] if row.get("is") == "GangBeat" and row["resumed"]]
    assert joined[0] == pytest.approx(joined[1])
    assert max(went_on) > 0


def test_results_that_are_not_as_they_must_be_are_named() -> None:
    """Or a schedule could leave anything."""
    example = Example(widths=(1, 2), rollouts=2, pool="spot", rounds=1, slots=1, parts=1, ahead=1)
    graph, outputs = example.graph(lambda: None)
    stays = [Stay(pool=pool, name=pool, node=pool, ups=((0.0, inf),)) for pool in ("spot", "reserved")]
    timing = ExampleTiming(step_s=0.1, train_s=5.0, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), VirtualClock(), timing, stays)
    right = dict(zip(outputs, cluster.compute(graph, outputs), strict=True))
    (first, second), dropped = right["advantage", 0], Dropped(reason="it was closed")
    of_first, of_another = (Quarantined(request=request("rollout", at), preemptions=3) for at in (0, 1))

    def wrong(closes: bool = False, sets_aside: bool = False, **found: Any) -> list[str]:
        changed = right | {(name, 0): value for name, value in found.items()}
        return example.wrong(changed, closes=closes, may_quarantine=lambda gang, count: sets_aside and count == 3)

    published = f"published is {right['publish', 0]!r} instead of"
    assert wrong() == []
    assert wrong(closes=True, select=(dropped,), ahead=(dropped,)) == []
    assert wrong(advantage=(of_first, second), sets_aside=True)[0].startswith("published is")
    for found, said in (
        (wrong(advantage=(second, first)), "rollout/0 is 'score of image"),
        (wrong(advantage=(dropped, second)), "rollout/0 is Dropped("),
        (wrong(advantage=(of_first, second)), "rollout/0 is Quarantined("),
        (wrong(advantage=(of_another, second), sets_aside=True), "rollout/0 is Quarantined("),
        (wrong(publish=("published", ())), "published is ('published', ()) instead of"),
        (wrong(select=(dropped,)), "explore-r0/0 is Dropped("),
        (wrong(select=("score of an image",), closes=True), "explore-r0/0 is 'score of an image'"),
        (wrong(ahead=("score of an image",)), "rollout-ahead/0 is 'score of an image'"),
        (wrong(select=()), "(2, 0, 1) results"),
    ):
        assert any(sentence.startswith(said) for sentence in found), (said, found)
    assert published not in wrong(select=(dropped,))


class QuarantinesEarly(Dispatcher):
    """A request is set aside at its first loss."""

    def __init__(self, rules: Rules, *, logged: bool = True) -> None:
        super().__init__(replace(rules, quarantine_after=1), logged=logged)


def test_a_request_that_is_set_aside_too_early_is_found() -> None:
    sentences = (sentence for seed in range(400) for sentence in verdict(draw(seed), QuarantinesEarly).violations)

    assert any(" is Quarantined(" in sentence for sentence in sentences)
