"""The virtual cluster by itself: what happens at once, and what waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cluster.dispatch.dispatcher import Dispatcher, differing
from cluster.dispatch.events import (
    CloseExploration,
    Dismiss,
    Event,
    Instruction,
    Launch,
    TaskChanged,
    TasksChanged,
    TaskState,
    Train,
    Wake,
    WorkerJoined,
    WorkerLeft,
)
from cluster.dispatch.rules import CLOSE_MARGIN_S, Rules
from cluster.virtual.clock import SAME_MOMENT_S, VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.example import Example, ExampleTiming, _score, request
from cluster.virtual.executor import BACK_OFF_S, Executor
from cluster.virtual.faults import DriverKilled
from cluster.virtual.messages import Messages
from cluster.virtual.replacement import Keeper
from cluster.virtual.timing import Denoising, Fixed, Stay
from cluster.virtual.workers import VirtualWorker
from spotlight.records import Stopped


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


def test_events_that_only_rounding_sets_apart_are_of_one_moment() -> None:
    clock, seen = VirtualClock(), list[float]()
    times_s = [1.0, 1.0 + SAME_MOMENT_S / 2, 1.0 + 3 * SAME_MOMENT_S]
    for at_s in times_s:
        clock.at(at_s, seen.append, at_s)

    assert [clock.step() for _ in range(3)] == [True, False, False]
    assert seen == times_s


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


class ASecond:
    """Every call that is `busy` takes a second."""

    launch_s = form_s = start_up_s = 0.0
    graph_s = 0.5
    """Until then all workers are there."""

    def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Fixed:
        return Fixed(seconds=float(function is busy))

    def step_s(self, samples: int, width: int, pool: str) -> float:
        raise AssertionError("nothing denoises")


def busy(*inputs: Any) -> str:
    return "done"


def test_an_update_that_ends_with_others_closes_exploration_and_its_log_replays() -> None:
    """What follows from it stands with it in the log, wherever in its wave it was."""

    def layer(name: str, pool: str, resource: str, phase: str, call: tuple[Any, ...]) -> MaterializedLayer:
        annotations = {"pool": pool, "iteration": 0, "resources": {resource: 1}, "phase": phase}
        return MaterializedLayer({(name, 0): call}, annotations=annotations)

    layers = {
        "select": layer("select", "head", "head", "allocate", (str, 1)),
        "score": layer("score", "reward", "gate", "explore-score-r0", (busy, ("select", 0))),
        "update": layer("update", "update", "gate", "update", (busy,)),
    }
    told: list[tuple[Event, list[Instruction]]] = []
    stays = [
        Stay(pool="reserved", name="reserved-0", node="a", ups=((0.0, inf),)),
        Stay(pool="reward", name="reward-0", node="b", ups=((0.0, inf),)),
    ]
    dispatch, clock = Dispatcher(Rules(close_with_training=True)), VirtualClock()
    cluster = VirtualCluster("r", dispatch, clock, ASecond(), stays, told=lambda *what: told.append(what))

    cluster.compute(HighLevelGraph(layers, {name: set() for name in layers}), [("score", 0), ("update", 0)])

    (closing,) = (event for event, then in told if any(isinstance(each, CloseExploration) for each in then))
    assert isinstance(closing, TaskChanged)
    assert closing.key == ("update", 0)
    rows = json.loads(json.dumps(list(dispatch.drain().decisions)))
    ends = [row["key"][0] for row in rows if row.get("state") == "memory" and row["key"][0] != "select"]
    assert ends == ["update", "score"]
    assert not list(differing(rows))


def test_what_goes_on_elsewhere_takes_passes_again_and_what_begins_takes_none() -> None:
    ups_s = {"never": ((0.0, inf),), "lost": ((0.0, 1.7), (20.0, inf))}

    class Timing(ExampleTiming):
        passes = 0

        def work(self, function: Any, given: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
            work = super().work(function, given)
            return replace(work, passes_to_resume=self.passes) if isinstance(work, Denoising) else work

    def ends_s(lost: str, passes: int) -> float:
        timing, clock = Timing(step_s=1.0, train_s=0.5, start_up_s=0.0), VirtualClock()
        timing.passes = passes
        stays = [
            Stay(pool="spot", name="spot-0", node="n", ups=ups_s[lost]),
            Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),)),
        ]
        graph, outputs = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
        VirtualCluster("r", Dispatcher(Rules()), clock, timing, stays).compute(graph, outputs)
        return clock.now_s

    step_s = float(len(request("rollout", 0).seeds))
    assert ends_s("never", 1) == ends_s("never", 0)
    assert ends_s("lost", 0) > 20
    assert ends_s("lost", 1) == pytest.approx(ends_s("lost", 0) + step_s)


L, F, B, STEPS = ExampleTiming.launch_s, ExampleTiming.form_s, BACK_OFF_S, request("rollout", 0).steps


@pytest.mark.parametrize(
    ("lost", "after_s", "width", "resumes", "takes_s"),
    [
        ("nothing", 0.0, 1, True, L + STEPS),
        ("nothing", 0.0, 2, True, L + F + STEPS / 2),
        ("worker", L + 1.5, 1, True, L + 1.5 + L + STEPS - 1),
        ("worker", L + 1.5, 1, False, L + 1.5 + L + STEPS),
        ("engine", L + 1.5, 1, True, L + 1.5 + B + L + STEPS - 1),
        ("notice", L + 0.5, 1, True, L + 1 + B + L + STEPS - 1),
        ("worker", L + 1.0, 1, True, L + 1 + L + STEPS - 1),
        ("notice", L / 2, 1, True, L / 2 + B + L + STEPS),
        ("notice", L, 1, True, L + B + L + STEPS),
        ("notice", L + 1.0, 1, True, L + 1 + B + L + STEPS - 1),
        ("notice", L + STEPS - 0.5, 1, True, L + STEPS),
        ("worker", L + F + 0.75, 2, True, L + F + 0.75 + B + L + F + (STEPS - 1) / 2),
        ("notice", L + F + 0.25, 2, True, L + F + 0.5 + B + L + F + (STEPS - 1) / 2),
    ],
)
def test_a_step_counts_once_it_is_taken_and_what_is_lost_is_a_part_of_one(
    lost: str, after_s: float, width: int, resumes: bool, takes_s: float
) -> None:
    """A kill loses the step in flight, and a notice none; a step of a sample takes a worker a second."""
    clock, began_s, ended_s = VirtualClock(), list[float](), list[float]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, TaskChanged | TasksChanged) and event.state == "memory":
            ended_s.extend(event.at_s for key in event_keys(event) if key == ("rollout", 0))
        for each in instructions:
            if isinstance(each, Launch) and not began_s:
                began_s.append(clock.now_s)
                clock.after(after_s, lose[lost], each.members[-1].address)

    graph, outputs = Example(widths=(width,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    spot = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(width + 1)]
    reserved = Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    rules = Rules(widens=resumes, moves=resumes)
    cluster = VirtualCluster("faults", Dispatcher(rules), clock, timing, [*spot, reserved], resumes=resumes, told=told)
    machines = cluster.machines
    lose: dict[str, Callable[[str], None]] = {
        "nothing": lambda address: None,
        "worker": machines.kill,
        "engine": machines.lose_engine,
        "notice": lambda address: machines.notice(address, grace_s=30.0),
    }

    cluster.compute(graph, outputs)

    assert ended_s[0] - began_s[0] == pytest.approx(takes_s)


@pytest.mark.parametrize(("resumes", "redone_steps"), [(True, 0), (False, 2)])
def test_what_a_kill_wastes_is_the_step_in_flight_and_the_steps_that_are_taken_again(
    resumes: bool, redone_steps: int
) -> None:
    """As live, where each step is reported as it is taken; here most are when somebody asks."""
    clock, step_s = VirtualClock(), float(len(request("rollout", 1).seeds))

    def told(event: Event, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Launch) and each.gang == "rollout/1" and each.members[0].place.epoch == 1:
                clock.after(L + 2.75 * step_s, cluster.machines.kill, each.members[0].address)

    graph, outputs = Example(widths=(1,), rollouts=2, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    spot = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(2)]
    reserved = Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    dispatch = Dispatcher(Rules(widens=resumes, moves=resumes))
    cluster = VirtualCluster("faults", dispatch, clock, timing, [*spot, reserved], resumes=resumes, told=told)

    cluster.compute(graph, outputs)

    lost, done = (span for span in dispatch.drain().spans if span.key == str(("rollout", 1)))
    assert (lost.outcome, done.outcome) == ("lost", "done")
    assert lost.uncommitted_s == pytest.approx(0.75 * step_s)
    assert done.redone_s == pytest.approx(redone_steps and L + redone_steps * step_s)
    assert done.stop_s - done.start_s == pytest.approx(L + (1 + redone_steps) * step_s)


@pytest.mark.parametrize(("freezes_after_s", "dies_after_s"), [(0.7, 5.0), (9.0, 0.7)])
def test_what_a_gang_has_committed_stays_when_its_driver_dies_and_it_takes_no_step_with_a_frozen_member(
    freezes_after_s: float, dies_after_s: float
) -> None:
    clock, committed = VirtualClock(), dict[str, int]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if launch := next((each for each in instructions if isinstance(each, Launch)), None):
            clock.after(L + F + freezes_after_s, cluster.machines.freeze, launch.members[-1].address)
            clock.after(L + F + dies_after_s, die)

    def die() -> None:
        raise DriverKilled

    graph, outputs = Example(widths=(2,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    stays = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(2)]
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, stays, committed=committed, told=told)

    with pytest.raises(DriverKilled):
        cluster.compute(graph, outputs)

    assert committed == {request("rollout", 0).id: 1}


def test_exploration_ends_at_a_step_boundary_and_its_scoring_at_once() -> None:
    class Timing(ExampleTiming):
        def work(self, function: Any, given: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
            work = super().work(function, given)
            return Fixed(seconds=5.0) if function is _score else work

        def step_s(self, samples: int, width: int, pool: str) -> float:
            return samples * (4.0 if pool == "spot" else 1.0)

    clock, began_s, ended_s = VirtualClock(), dict[str, float](), dict[Any, float]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, TaskChanged | TasksChanged) and event.state == "memory":
            ended_s.update(dict.fromkeys(event_keys(event), event.at_s))
        began_s.update((each.gang, clock.now_s) for each in instructions if isinstance(each, Launch))

    example = Example(widths=(1,), rollouts=1, pool="reserved", rounds=1, slots=2, parts=1)
    graph, outputs = example.graph(lambda: None)
    stays = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),)) for n in range(2)]
    stays += [Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))]
    timing = Timing(step_s=1.0, train_s=1.0, start_up_s=0.0)

    dispatch = Dispatcher(Rules())

    VirtualCluster("faults", dispatch, clock, timing, stays, told=told).compute(graph, outputs)

    outcomes = {span.key: span.outcome for span in dispatch.drain().spans if span.phase == "explore-r0"}
    assert outcomes == {str(("explore-r0", 0)): "done", str(("explore-r0", 1)): "dropped"}
    closed_s = ended_s["update", 0]
    assert ended_s["explore-r0", 0] < closed_s  # its scoring would take longer
    assert ended_s["explore-score-r0", 0] == closed_s
    asked, begun_s = request("explore", 1), began_s["explore-r0/1"] + L
    step_s = 4.0 * len(asked.seeds)
    taken = ceil((closed_s - begun_s) / step_s)
    assert 1 < taken < asked.steps
    assert ended_s["explore-r0", 1] == pytest.approx(begun_s + taken * step_s)


def test_a_stop_waits_for_the_step_in_flight_and_for_no_other() -> None:
    clock, committed, began_s = VirtualClock(), dict[str, int](), list[float]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if any(isinstance(each, Launch) for each in instructions):
            began_s.append(clock.now_s)
            clock.after(L + 0.5, cluster.stop)

    graph, outputs = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    stays = [Stay(pool="spot", name="spot-0", node="n", ups=((0.0, inf),))]
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, stays, committed=committed, told=told)

    with pytest.raises(Stopped):
        cluster.compute(graph, outputs)

    assert clock.now_s - began_s[0] == pytest.approx(L + 1 + B)
    assert committed == {request("rollout", 0).id: 1}


def test_workers_that_come_in_one_moment_are_seen_together() -> None:
    launched = list[Launch]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        launched.extend(each for each in instructions if isinstance(each, Launch))

    graph, outputs = Example(widths=(1, 2), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    stays = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((5.0, inf),)) for n in range(2)]
    stays += [Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))]
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)

    VirtualCluster("faults", Dispatcher(Rules()), VirtualClock(), timing, stays, told=told).compute(graph, outputs)

    assert [len(each.members) for each in launched] == [2]


def test_a_worker_whose_work_outlasts_its_notice_hands_over_what_it_has_in_time() -> None:
    clock, trained, grace_s = VirtualClock(), list[tuple[Any, str, float]](), 10.0

    def told(event: Event, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Train) and each.key[0] == "train":
                trained.append((each.key, each.address, clock.now_s))
                if len(trained) == 3:  # who takes it has the gradient of another part
                    clock.after(1.0, lambda: cluster.machines.notice(trained[2][1], grace_s))

    graph, outputs = Example(widths=(1,), rollouts=3, pool="spot", rounds=0, slots=1, parts=3).graph(lambda: None)
    stays = [Stay(pool="reserved", name=f"reserved-{n}", node="r", ups=((0.0, inf),)) for n in range(2)]
    stays += [Stay(pool="spot", name="spot-0", node="n", ups=((0.0, inf),))]
    timing = ExampleTiming(step_s=1.0, train_s=20.0, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, stays, told=told)

    cluster.compute(graph, outputs)

    *_, (key, address, began_s), (key_again, address_again, again_s) = trained
    assert len(trained) == 4
    assert key == key_again
    assert address != address_again
    assert again_s - began_s == pytest.approx(1 + grace_s - CLOSE_MARGIN_S)


def event_keys(event: TaskChanged | TasksChanged) -> Sequence[Any]:
    return (event.key,) if isinstance(event, TaskChanged) else event.keys


def test_with_a_worker_only_its_own_results_are_lost() -> None:
    """Shards of a gang were one task before it was formed."""
    clock, lost = VirtualClock(), list[int]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, TaskChanged) and event.key[0] == "score" and event.state == "processing":
            clock.after(0.0, lambda: cluster.machines.kill(cluster.tasks.all["rollout", 3].worker))
        if isinstance(event, WorkerLeft):
            clock.after(0.0, note)

    def note() -> None:
        lost.extend(n for n in range(4) if cluster.tasks.all["rollout", n].state != "memory")

    graph, outputs = Example(widths=(4,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    spot = [Stay(pool="spot", name=f"spot-{n}", node="n", ups=((0.0, inf),), replace_after_s=0.5) for n in range(4)]
    reserved = Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))
    timing = ExampleTiming(step_s=0.6, train_s=0.5, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, [*spot, reserved], told=told)

    cluster.compute(graph, outputs)

    assert lost == [3]


def test_a_step_that_was_taken_before_the_engine_was_lost_is_known_by_then() -> None:
    """As live, where both travel the same way: the next loss is the second in a row."""
    clock, lost_after_s, rests = VirtualClock(), iter([1.5, 0.5]), list[int]()
    launched = list[Launch]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Launch):
                launched.append(each)
                if wait_s := next(lost_after_s, None):
                    clock.after(wait_s, lambda: cluster.machines.lose_engine(launched[-1].members[0].address))
            elif isinstance(each, Wake):
                rests.append(len(launched))

    graph, outputs = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    stays = [Stay(pool=pool, name=pool, node=pool, ups=((0.0, inf),)) for pool in ("spot", "reserved")]
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    cluster = VirtualCluster("faults", Dispatcher(Rules()), clock, timing, stays, told=told)

    cluster.compute(graph, outputs)

    assert rests == [2]


def test_a_result_that_was_asked_for_is_made_again_when_it_is_lost_and_its_place_is_filled_in_time() -> None:
    """Nobody else needs it."""
    clock, joined_s, began_s = VirtualClock(), list[float](), list[float]()

    def told(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, WorkerJoined) and event.name == "reward-0":
            joined_s.append(event.at_s)
        if isinstance(event, TaskChanged) and event.key == ("score", 0) and event.state == "processing":
            began_s.append(event.at_s)
            if len(began_s) == 1:
                clock.after(1.5, cluster.machines.kill, event.worker)

    def layer(name: str, pool: str) -> MaterializedLayer:
        annotations = {"pool": pool, "iteration": 0, "resources": {"gate": 1}, "phase": name}
        return MaterializedLayer({(name, 0): (busy,)}, annotations=annotations)

    class Slow(ASecond):
        start_up_s = 3.0

        def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Fixed:
            return Fixed(seconds=1.0)

    stay = Stay(pool="reward", name="reward-0", node="b", ups=((0.0, inf),), replace_after_s=7.0)
    late = Stay(pool="reserved", name="reserved-0", node="a", ups=((30.0, inf),))
    cluster = VirtualCluster("r", Dispatcher(Rules()), clock, Slow(), [stay, late], told=told)
    layers = {"score": layer("score", "reward"), "update": layer("update", "update")}

    found = cluster.compute(HighLevelGraph(layers, {name: set() for name in layers}), [("score", 0), ("update", 0)])

    assert found == ["done", "done"]
    assert joined_s == [3.0, 3.0 + 1.5 + 7.0 + 3.0]
    assert began_s == joined_s


@pytest.mark.parametrize(("kind", "uncommitted_s"), [("notice", B), ("kill", L + 0.5)])
def test_a_machine_that_is_taken_with_a_notice_has_its_time_for_the_step_in_flight(
    kind: str, uncommitted_s: float
) -> None:
    """It is taken in the middle of the first step of two."""
    gone_s = ExampleTiming.graph_s + L + 0.5
    ups_s = {"spot-0": ((0.0, gone_s),), "spot-1": ((gone_s + 1.0, inf),)}
    graph, outputs = Example(widths=(1,), rollouts=1, pool="spot", rounds=0, slots=1, parts=1).graph(lambda: None)
    spot = [Stay(pool="spot", name=name, node="n", ups=ups, preemptions=(kind,)) for name, ups in ups_s.items()]
    reserved = Stay(pool="reserved", name="reserved-0", node="r", ups=((0.0, inf),))
    timing = ExampleTiming(step_s=1.0, train_s=0.5, start_up_s=0.0)
    dispatch = Dispatcher(Rules())

    VirtualCluster("faults", dispatch, VirtualClock(), timing, [*spot, reserved]).compute(graph, outputs)

    spans = [span for span in dispatch.drain().spans if span.phase == "rollout"]
    assert [span.uncommitted_s for span in spans] == pytest.approx([uncommitted_s, 0.0])


def test_a_machine_that_is_taken_while_it_starts_up_leaves_the_next_ones_start_whole() -> None:
    clock, joined = VirtualClock(), list[float]()

    class Seen:
        is_closed = False

        def join(self, name: str, pool: str, node: str) -> SimpleNamespace:
            joined.append(clock.now_s)
            return SimpleNamespace(address="a")

    stay = Stay(pool="spot", name="spot-0", node="n", ups=((0.0, 100.0), (120.0, inf)))
    Keeper(cast(Any, Seen()), stay, clock, start_up_s=153.0)
    while clock.next_s is not None:
        clock.step()

    assert joined == [273.0]
