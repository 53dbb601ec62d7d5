"""The dispatcher by itself: events in, instructions out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from cluster.dispatch.dispatcher import Dispatcher, differing
from cluster.dispatch.events import (
    CallOff,
    CloseExploration,
    Dismiss,
    Dismissals,
    EngineGone,
    Event,
    Evict,
    GangBeat,
    GangBeats,
    GraphCame,
    Instruction,
    Key,
    Launch,
    Layer,
    Regroup,
    Score,
    StopAsked,
    StopWork,
    TaskChanged,
    TasksChanged,
    TimePassed,
    Train,
    Wake,
    Work,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerSilent,
    event_of,
    one_by_one,
    row,
)
from cluster.dispatch.request_state import SCORING, RequestState
from cluster.dispatch.rules import Rules
from cluster.dispatch.state import ENGINES_MIN, ENOUGH_LOSSES
from spotlight.records import Surplus


class Cluster:
    """A dispatcher, told of what happens second by second; it is told that tasks begin where it says so."""

    def __init__(self, **rules: Any) -> None:
        self.dispatch = Dispatcher(Rules(**rules))
        self.now_s = 0.0
        self.tell(WorkerJoined(at_s=0.0, address="head", name="head", pool="head"))

    def tell(self, event: Event) -> list[Instruction]:
        return self.dispatch.handle(event)

    def decide(self) -> list[Instruction]:
        """A second passes; what is launched begins."""
        self.now_s += 1.0
        instructions = list(one_by_one(self.tell(TimePassed(at_s=self.now_s))))
        for instruction in instructions:
            match instruction:
                case Launch(members=members):
                    for member in members:
                        self.change(member.key, "processing", worker=member.address)
                case (
                    Dismiss(key=key, address=address)
                    | Train(key=key, address=address)
                    | Score(key=key, address=address)
                ):
                    self.change(key, "processing", worker=address)
        return instructions

    def join(self, *names: str, pool: Any = "spot", node: str = "n") -> None:
        for name in names:
            self.tell(WorkerJoined(at_s=self.now_s, address=f"tcp://{name}", name=name, pool=pool, node=node))

    def lose(self, name: str, *keys: Key) -> list[Instruction]:
        """A worker is gone; the tasks that it had go back behind the gate."""
        instructions = self.tell(WorkerLeft(at_s=self.now_s, address=f"tcp://{name}", expected=False))
        for key in keys:
            instructions += self.change(key, "released") + self.change(key, "gated")
        return instructions

    def change(self, key: Key, state: Any, worker: str = "") -> list[Instruction]:
        return self.tell(TaskChanged(at_s=self.now_s, key=key, state=state, worker=worker))

    def submit(self, name: str, count: int, pool: str = "spot", **more: Any) -> None:
        """Requests that may run at once."""
        shards = more.get("shards", 1)
        facts: dict[str, Any] = {"phase": name, "iteration": 0, **more}
        layer = Layer(name=name, indices=tuple(range(count * shards)), pool=pool, **facts)
        self.tell(GraphCame(at_s=self.now_s, layers=(layer,)))
        for index in layer.indices:
            self.change((name, index), "gated")


def launched(instructions: list[Instruction]) -> dict[str, list[str]]:
    """Of each gang, the addresses of its members by rank."""
    return {i.gang: [member.address for member in i.members] for i in instructions if isinstance(i, Launch)}


@pytest.mark.parametrize("node", ["elsewhere", "here"])
def test_a_gang_wants_its_workers_on_one_node_in_one_pool(node: str) -> None:
    cluster = Cluster()
    cluster.join("r1", "r2", "r3", "r4", pool="reserved", node="here")
    cluster.join("a", "b", "c", node=node)
    cluster.submit("rollout", 1, shards=4, widths=(4,))

    cluster.decide()
    assert cluster.dispatch.state.snapshot().too_wide == 4
    cluster.join("d", node=node)
    cluster.decide()

    assert cluster.dispatch.state.snapshot().too_wide == 0


@pytest.mark.parametrize(
    ("told", "taken_down"),
    [((2.0, 4.0), (2.0, 4.0)), ((-3598.0, -1796.0), (1.0, 1.0)), ((1802.0, 3604.0), (5.0, 5.0))],
)
def test_what_was_done_was_done_between_its_launch_and_now(
    told: tuple[float, float], taken_down: tuple[float, float]
) -> None:
    """A clock that is set while Dask compares the worker's with its own is wrong by half of that for a moment."""
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1)
    cluster.decide()
    work = Work(start_s=told[0], stop_s=told[1])
    cluster.tell(TaskChanged(at_s=5.0, key=("rollout", 0), state="memory", work=work))

    (span,) = cluster.dispatch.drain().spans
    assert (span.start_s, span.stop_s) == taken_down


def test_steps_that_were_lost_and_steps_that_were_repeated_are_told_of_each_worker() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1)

    def run(name: str, epoch: int, *beats: tuple[float, int]) -> None:
        """Launched a second from now, it resumes at the first step, commits the others, and is lost 7 s from now."""
        began_s = cluster.now_s
        cluster.join(name)
        cluster.decide()
        for after_s, step in beats:
            resumed = (after_s, step) == beats[0]
            at_s = began_s + after_s
            cluster.tell(GangBeat(at_s=at_s, gang="rollout/0", epoch=epoch, step=step, steps=9, resumed=resumed))
        cluster.now_s = began_s + 7.0
        cluster.lose(name, ("rollout", 0))

    run("a", 1, (1.5, 0), (3.0, 1), (5.0, 2), (6.0, 2))
    run("b", 2, (1.5, 1), (3.0, 2), (4.0, 3))
    run("c", 3, (1.5, 3))

    spans = cluster.dispatch.drain().spans
    assert [(span.uncommitted_s, span.redone_s) for span in spans] == [(2.0, 0.0), (3.0, 2.0), (6.0, 0.0)]


def test_a_gang_that_was_just_formed_has_done_no_step() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1)
    cluster.decide()
    cluster.tell(GangBeat(at_s=1.0, gang="rollout/0", epoch=1, step=5, steps=9, resumed=False))
    cluster.lose("a", ("rollout", 0))
    cluster.join("b")

    cluster.decide()

    assert cluster.dispatch.state.step("rollout/0") == 0


def test_a_gang_widens_by_the_pace_of_the_steps_that_it_did_itself() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1, shards=2, widths=(1, 2))
    cluster.decide()
    cluster.join("b")
    cluster.tell(GangBeat(at_s=1.0, gang="rollout/0", epoch=1, step=8, steps=10, resumed=True))
    cluster.now_s = 2.0
    cluster.tell(GangBeat(at_s=3.0, gang="rollout/0", epoch=1, step=9, steps=10, resumed=False))

    (order,) = cluster.decide()  # a step of 2 s is left: two workers save one of them

    assert isinstance(order, Regroup)


def test_no_gang_widens_over_a_worker_that_a_waiting_gang_will_need() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1, shards=2, widths=(1, 2))
    cluster.decide()
    cluster.submit("wide", 1, shards=2, widths=(2,), phase="rollout")
    cluster.join("b")
    cluster.tell(GangBeat(at_s=1.0, gang="rollout/0", epoch=1, step=0, steps=10, resumed=True))
    cluster.tell(GangBeat(at_s=2.0, gang="rollout/0", epoch=1, step=1, steps=10, resumed=False))

    assert cluster.decide() == []


def test_a_request_is_launched_when_a_worker_is_free_and_not_before() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 2)
    assert launched(cluster.decide()) == {}

    cluster.join("a")
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"]}
    assert launched(cluster.decide()) == {}

    cluster.change(("rollout", 0), "memory")
    assert launched(cluster.decide()) == {"rollout/1": ["tcp://a"]}


def test_a_worker_whose_task_began_on_another_is_free() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1)
    cluster.tell(TimePassed(at_s=1.0))
    cluster.join("b")

    cluster.change(("rollout", 0), "processing", worker="tcp://b")
    cluster.submit("another", 1, phase="rollout")

    assert launched(cluster.decide()) == {"another/0": ["tcp://a"]}


def test_a_gang_is_launched_as_a_whole_on_one_node() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1, shards=2, widths=(2,))
    cluster.join("a", node="n0")
    cluster.join("b", node="n1")
    assert launched(cluster.decide()) == {}

    cluster.join("c", node="n1")
    (launch,) = cluster.decide()

    assert isinstance(launch, Launch)
    assert [member.address for member in launch.members] == ["tcp://b", "tcp://c"]
    assert [(member.place.rank, member.place.width, member.place.epoch) for member in launch.members] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert [event["workers"] for event in cluster.dispatch.drain().events if event["event"] == "formed"] == [["b", "c"]]


def test_when_a_member_is_lost_the_others_are_called_off_and_kept_for_the_next_forming() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1, shards=2, widths=(1, 2))
    cluster.join("a", "b")
    cluster.decide()

    (order,) = [i for i in cluster.lose("a", ("rollout", 0)) if isinstance(i, CallOff)]
    assert (order.address, order.epoch, order.cause) == ("tcp://b", 1, "a is gone")

    cluster.change(("rollout", 1), "released")
    cluster.change(("rollout", 1), "gated")
    (launch,) = cluster.decide()

    assert isinstance(launch, Launch)
    assert [(member.address, member.place.epoch) for member in launch.members] == [("tcp://b", 2)]


def test_a_gang_that_loses_all_members_was_lost_once() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.submit("rollout", 1, shards=2, widths=(2,))
    cluster.join("a", "b")
    cluster.decide()

    cluster.lose("a", ("rollout", 0))
    cluster.lose("b", ("rollout", 1))
    cluster.join("c", "d")

    assert launched(cluster.decide()) == {"rollout/0": ["tcp://c", "tcp://d"]}


def test_a_worker_under_notice_gets_no_more_work() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.tell(WorkerNoticed(at_s=0.0, address="tcp://a", reason="spot"))
    cluster.submit("rollout", 1)

    assert launched(cluster.decide()) == {}
    assert cluster.dispatch.state.snapshot().leaving == {"a"}


def test_each_life_is_reported_when_it_begins_and_when_it_ends() -> None:
    cluster = Cluster()
    cluster.join("a")

    reported = [cluster.dispatch.drain().workers for _ in range(2)]
    cluster.lose("a")
    reported.append(cluster.dispatch.drain().workers)

    assert [[life.left_s for life in lives.values()] for lives in reported] == [[None], [], [0.0]]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_worker_that_goes_after_a_notice_has_left_and_another_is_lost(noticed: bool) -> None:
    cluster = Cluster()
    cluster.join("a")
    if noticed:
        cluster.tell(WorkerNoticed(at_s=0.0, address="tcp://a", reason="spot"))

    cluster.lose("a")

    (life,) = cluster.dispatch.drain().workers.values()
    assert life.reason == ("left" if noticed else "lost")


def test_a_notice_that_comes_twice_is_taken_down_once() -> None:
    cluster = Cluster()
    cluster.join("a")

    for _ in range(2):
        cluster.tell(WorkerNoticed(at_s=0.0, address="tcp://a", reason="spot"))

    assert [event["event"] for event in cluster.dispatch.drain().events].count("notice") == 1


def test_a_worker_that_takes_no_tasks_gets_none_until_it_does() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.tell(WorkerAvailable(at_s=0.0, address="tcp://a", available=False))
    cluster.submit("rollout", 1)
    assert launched(cluster.decide()) == {}

    cluster.tell(WorkerAvailable(at_s=0.0, address="tcp://a", available=True))
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"]}


def test_shards_whose_results_are_lost_come_back_to_one_worker_if_they_are_too_few_for_a_gang() -> None:
    """Three workers could not share the heads of most models."""
    cluster = Cluster()
    cluster.submit("rollout", 1, shards=4, widths=(4,))
    cluster.join("a", "b", "c", "d")
    cluster.decide()
    for shard in range(4):
        cluster.change(("rollout", shard), "memory")

    for shard in (0, 1, 2):
        cluster.change(("rollout", shard), "released")
        cluster.change(("rollout", shard), "gated")
    launch, *others = cluster.decide()

    assert isinstance(launch, Launch)
    assert [member.place.width for member in launch.members] == [1]
    assert not [other for other in others if isinstance(other, Launch)]
    cluster.change(launch.members[0].key, "memory")
    assert {dismissed.key for dismissed in cluster.decide() if isinstance(dismissed, Dismiss)} == {
        ("rollout", 1),
        ("rollout", 2),
    }


def test_shards_may_become_ready_in_any_order() -> None:
    cluster = Cluster()
    cluster.join("a", "b", "c", "d")
    layer = Layer(name="rollout", indices=(0, 1, 2, 3), pool="any", phase="rollout", iteration=0, shards=4, widths=(4,))
    cluster.tell(GraphCame(at_s=0.0, layers=(layer,)))

    for shard in (2, 3, 1, 0):
        cluster.change(("rollout", shard), "waiting")
    for shard in (3, 1, 0, 2):
        assert cluster.decide() == []
        cluster.change(("rollout", shard), "gated")

    assert [len(members) for members in launched(cluster.decide()).values()] == [4]


def test_rounds_of_exploration_come_in_the_order_of_their_numbers() -> None:
    cluster = Cluster()
    layers = [
        Layer(name=name, indices=(0,), pool="spot", phase=name, iteration=0) for name in ("explore-r10", "explore-r9")
    ]
    cluster.tell(GraphCame(at_s=0.0, layers=tuple(layers)))
    for layer in layers:
        cluster.change((layer.name, 0), "gated")
    cluster.join("s")

    assert launched(cluster.decide()) == {"explore-r9/0": ["tcp://s"]}


def test_surplus_shards_end_once_the_first_is_done() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1, shards=2, widths=(1, 2))
    cluster.join("a")
    cluster.decide()
    assert cluster.decide() == []

    cluster.change(("rollout", 0), "memory")
    (dismissed,) = cluster.decide()

    assert isinstance(dismissed, Dismiss)
    assert (dismissed.key, dismissed.address, dismissed.tell) == (("rollout", 1), "head", Surplus())


def test_a_request_that_keeps_losing_its_workers_is_quarantined() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.submit("rollout", 1)
    for name in ("a", "b"):
        cluster.join(name)
        assert launched(cluster.decide()) == {"rollout/0": [f"tcp://{name}"]}
        cluster.lose(name, ("rollout", 0))

    (dismissed,) = cluster.decide()

    assert isinstance(dismissed, Dismiss)
    assert dismissed.tell == 2
    assert "preempted 2 times" in dismissed.cause


def engine_lost(cluster: Cluster, name: str, *keys: Key) -> list[Instruction]:
    """A worker lives, but the engine that did these tasks is gone: they are to be done again."""
    gang = f"{keys[0][0]}/{keys[0][1]}" if keys else ""
    instructions = cluster.tell(EngineGone(at_s=cluster.now_s, worker=name, gang=gang, reason="killed"))
    for key in keys:
        instructions += cluster.change(key, "released") + cluster.change(key, "gated")
    return instructions


def test_a_worker_whose_engine_always_fails_has_no_request_set_aside_that_others_can_run() -> None:
    cluster = Cluster(quarantine_after=5)
    cluster.join("sick", "well")
    cluster.submit("rollout", 4)
    ran: list[str] = []
    for second in range(120):
        for key in [key for key, task in cluster.dispatch.state.tasks.items() if task.state == "processing"]:
            worker = cluster.dispatch.state.tasks[key].worker
            if worker == "tcp://sick":
                engine_lost(cluster, "sick", key)
            elif second % 10 == 0:
                cluster.change(key, "memory")
                ran.append(worker)
        assert not any(isinstance(each, Dismiss) for each in cluster.decide())

    assert ran == 4 * ["tcp://well"]


def test_a_worker_that_lost_engines_in_a_row_rests_ever_longer_until_it_gets_something_done() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1)
    rests = []
    for minute in range(4):
        cluster.now_s = 60.0 * minute
        cluster.decide()
        orders = engine_lost(cluster, "a", ("rollout", 0))
        rests.append([order.at_s - cluster.now_s for order in orders if isinstance(order, Wake)])
    assert rests == [[], [0.5], [1.0], [2.0]]
    assert launched(cluster.decide()) == {}, "it rests"
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"]}

    cluster.tell(GangBeat(at_s=cluster.now_s, gang="rollout/0", epoch=5, step=1, steps=9, resumed=False))

    assert not any(isinstance(order, Wake) for order in engine_lost(cluster, "a", ("rollout", 0)))
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"]}


def test_a_worker_that_got_a_task_done_has_lost_no_engines_in_a_row() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("train", 2, pool="gradient-reserved")
    cluster.decide()
    engine_lost(cluster, "a", ("train", 0))
    cluster.decide()
    work = Work(start_s=cluster.now_s, stop_s=cluster.now_s)
    cluster.tell(TaskChanged(at_s=cluster.now_s, key=("train", 0), state="memory", work=work))
    cluster.decide()

    assert not [order for order in engine_lost(cluster, "a", ("train", 1)) if isinstance(order, Wake)]


def test_an_engine_that_is_lost_at_a_task_which_dask_gave_out_is_no_reason_to_rest() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("score", 1, pool="engine")

    for _ in range(3):
        cluster.change(("score", 0), "processing", worker="tcp://a")
        assert not [order for order in engine_lost(cluster, "a", ("score", 0)) if isinstance(order, Wake)]


def test_a_worker_may_leave_while_it_rests() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit("rollout", 1)
    for _ in range(2):
        cluster.decide()
        engine_lost(cluster, "a", ("rollout", 0))

    cluster.lose("a")
    cluster.join("b")

    assert launched(cluster.decide()) == {"rollout/0": ["tcp://b"]}


def test_a_request_at_which_the_only_worker_that_stays_loses_its_engine_is_set_aside() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.join("a", "leaving")
    cluster.tell(WorkerNoticed(at_s=0.0, address="tcp://leaving", reason="spot"))
    cluster.submit("rollout", 1)
    for _ in range(2):
        assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"]}
        engine_lost(cluster, "a", ("rollout", 0))

    (dismissed,) = cluster.decide()

    assert isinstance(dismissed, Dismiss)
    assert dismissed.tell == 2


def test_a_request_at_which_every_worker_loses_its_engine_is_set_aside() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.join("a", "b")
    cluster.submit("rollout", 1)
    tried: list[str] = []
    for _ in range(20):
        instructions = cluster.decide()
        for address in launched(instructions).get("rollout/0", []):
            tried.append(address)
            engine_lost(cluster, address.removeprefix("tcp://"), ("rollout", 0))

    assert set(tried) == {"tcp://a", "tcp://b"}
    assert cluster.dispatch.state.requests["rollout/0"].quarantined


def test_losses_are_a_requests_own_fault_if_they_are_on_many_workers_or_very_many() -> None:
    request = RequestState(name="r", iteration=0, exploring=False, pools=("spot",), order=1, widths=(1,))

    def lose(worker: str, times: int) -> None:
        for _ in range(times):
            request.form({("r", 0): worker}, {worker: worker}, "spot", "n")
            request.lose()

    lose("a", 1)
    request.advance(1, 1.0)  # what was lost before the new step counts no more
    lose("b", 5)
    assert not request.is_to_blame(2, able=4)
    lose("b", 1)
    assert request.is_to_blame(2, able=4)
    request.advance(2, 2.0)
    lose("b", 1)
    lose("c", 1)
    assert request.is_to_blame(2, able=4)


def test_a_gradient_that_one_worker_cannot_do_is_done_by_another() -> None:
    cluster = Cluster(quarantine_after=1)
    cluster.join("sick", "well", pool="reserved")
    cluster.submit("train", 1, pool="gradient-reserved")
    assert trained(cluster.decide()) == {"train/0": "tcp://sick"}

    engine_lost(cluster, "sick", ("train", 0))

    assert trained(cluster.decide()) == {"train/0": "tcp://well"}
    assert cluster.dispatch.state.outlasted == ""


def test_a_gradient_at_which_every_worker_loses_its_engine_ends_the_run_with_the_reason() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.join("a", "b", pool="reserved")
    cluster.submit("train", 1, pool="gradient-reserved")
    tried: list[str] = []
    while not cluster.dispatch.state.outlasted:
        for address in trained(cluster.decide()).values():
            tried.append(address)
            engine_lost(cluster, address.removeprefix("tcp://"), ("train", 0))

    assert tried == ENGINES_MIN * ["tcp://a", "tcp://b"]
    assert cluster.dispatch.state.outlasted.startswith(
        "train 0: each worker that may do it lost its engine process 5 times in a row, the last one so: killed; if mem"
    )


def test_a_new_step_is_no_reason_for_quarantine() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.submit("rollout", 1)
    for epoch, name in enumerate("abcd", 1):
        cluster.join(name)
        assert launched(cluster.decide()) == {"rollout/0": [f"tcp://{name}"]}
        for step, resumed in ((epoch - 1, True), (epoch, False)):
            beat = GangBeat(at_s=0.0, gang="rollout/0", epoch=epoch, step=step, steps=9, resumed=resumed)
            cluster.tell(beat)
        cluster.lose(name, ("rollout", 0))


def test_the_end_of_training_closes_exploration_and_dismisses_what_waits_of_it() -> None:
    cluster = Cluster()
    cluster.join("r", pool="reserved")
    cluster.submit("explore-r0", 1, iteration=1, phase="explore-r0")
    cluster.submit("train", 1, pool="update")
    (trains,) = cluster.decide()
    assert isinstance(trains, Train)
    assert trains.address == "tcp://r"

    closes = cluster.change(("train", 0), "memory")
    (dismissed,) = cluster.decide()

    assert [i.iteration for i in closes if isinstance(i, CloseExploration)] == [1]
    assert isinstance(dismissed, Dismiss)
    assert dismissed.tell is None


def test_training_that_is_done_again_opens_no_exploration() -> None:
    cluster = Cluster()
    for iteration in (1, 0):
        cluster.submit(f"update-{iteration}", 1, pool="update", iteration=iteration)
        cluster.change((f"update-{iteration}", 0), "memory")

    assert cluster.dispatch.state.is_closed(2)


def test_a_worker_beside_the_scheduler_that_comes_anew_is_told_which_exploration_is_closed() -> None:
    """Else it would run what it is to dismiss, in the driver's process."""
    cluster = Cluster()
    cluster.join("r", pool="reserved")
    cluster.submit("explore-r0", 1, iteration=1, phase="explore-r0")
    cluster.submit("train", 1, pool="update")
    cluster.decide()
    cluster.tell(WorkerLeft(at_s=cluster.now_s, address="head", expected=False))
    cluster.change(("train", 0), "memory")
    assert cluster.decide() == []

    (closes,) = cluster.tell(WorkerJoined(at_s=cluster.now_s, address="head", name="head", pool="head"))
    (dismissed,) = cluster.decide()

    assert isinstance(closes, CloseExploration)
    assert closes.iteration == 1
    assert isinstance(dismissed, Dismiss)
    assert dismissed.tell is None


def trained(instructions: Sequence[Instruction]) -> dict[str, str]:
    """Worker of each task that trains."""
    found = [instruction for instruction in instructions if isinstance(instruction, Train)]
    return {f"{train.key[0]}/{train.key[1]}": train.address for train in found}


def test_gradients_go_to_every_free_reserved_worker_and_to_no_spot_one() -> None:
    cluster = Cluster()
    cluster.join("a", "b", pool="reserved")
    cluster.join("s")
    cluster.submit("train", 3, pool="gradient-reserved")

    begun = trained(cluster.decide())
    cluster.lose("a", ("train", 0))
    cluster.change(("train", 1), "memory")

    assert begun == {"train/0": "tcp://a", "train/1": "tcp://b"}
    assert trained(cluster.decide()) == {"train/0": "tcp://b"}


def test_gradients_that_spot_workers_may_compute_come_after_rollouts_and_before_exploration() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1)
    cluster.submit("train", 3, pool="gradient-any")
    cluster.submit("explore-r0", 4, iteration=1, phase="explore-r0")
    cluster.join("a", pool="reserved")
    cluster.join("s", "t", "u")

    found = cluster.decide()

    assert trained(found) == {"train/0": "tcp://a", "train/1": "tcp://t", "train/2": "tcp://u"}
    assert launched(found) == {"rollout/0": ["tcp://s"]}
    cluster.join("v")
    assert launched(cluster.decide()) == {"explore-r0/0": ["tcp://v"]}


def test_what_must_be_explored_comes_after_rollouts_and_before_gradients_on_spot_workers() -> None:
    cluster = Cluster(explored_first=2)
    cluster.submit("rollout", 1)
    cluster.submit("train", 9, pool="gradient-any")
    cluster.submit("explore-r0", 1, iteration=1, phase="explore-r0")
    cluster.submit("explore-r1", 3, iteration=1, phase="explore-r1")
    cluster.join("a", pool="reserved")
    cluster.join("s")

    found = cluster.decide()
    assert launched(found) == {"rollout/0": ["tcp://s"]}
    assert trained(found) == {"train/0": "tcp://a"}
    cluster.join("t")
    assert launched(cluster.decide()) == {"explore-r0/0": ["tcp://t"]}
    cluster.join("u", "v")
    found = cluster.decide()
    assert launched(found) == {"explore-r1/0": ["tcp://u"]}  # the second, and the last that is before gradients
    assert trained(found) == {"train/1": "tcp://v"}
    cluster.lose("t", ("explore-r0", 0))
    cluster.change(("train", 1), "memory")
    assert launched(cluster.decide()) == {"explore-r0/0": ["tcp://v"]}  # what was begun is still before them


def test_each_iteration_has_what_must_be_explored_for_it() -> None:
    cluster = Cluster(explored_first=1)
    cluster.join("s")

    for iteration in (1, 2):
        cluster.submit(f"train-{iteration}", 1, pool="gradient-any", iteration=iteration - 1)
        cluster.submit(f"explore-{iteration}", 2, iteration=iteration, phase="explore-r0")
        cluster.submit(f"update-{iteration}", 1, pool="update", iteration=iteration - 1)

        assert launched(cluster.decide()) == {f"explore-{iteration}/0": ["tcp://s"]}
        cluster.change((f"explore-{iteration}", 0), "memory")
        assert trained(cluster.decide()) == {f"train-{iteration}/0": "tcp://s"}
        cluster.change((f"train-{iteration}", 0), "memory")
        cluster.change((f"update-{iteration}", 0), "memory")
        cluster.change((f"explore-{iteration}", 1), "forgotten")


def test_rollouts_of_the_next_iteration_come_last_and_are_put_off_when_training_has_ended() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1)
    cluster.submit("train", 1, pool="gradient-any")
    cluster.submit("rollout-ahead", 2, pool="spot", iteration=1, phase="rollout-ahead")
    cluster.submit("update", 1, pool="update")
    cluster.join("a", "b", pool="reserved")
    cluster.join("s", "t")

    begun = cluster.decide()
    ended = cluster.change(("update", 0), "memory")
    (dismissed,) = (each for each in cluster.decide() if isinstance(each, Dismiss))
    orders = [(each.gang, each.address) for each in ended if isinstance(each, Regroup)]

    assert launched(begun) == {"rollout/0": ["tcp://s"], "rollout-ahead/0": ["tcp://t"]}
    assert trained(begun) == {"train/0": "tcp://b", "update/0": "tcp://a"}
    assert orders == [("rollout-ahead/0", "tcp://t")]
    assert (dismissed.key, dismissed.tell) == (("rollout-ahead", 1), None)
    cluster.change(("rollout-ahead", 0), "released")
    cluster.change(("rollout-ahead", 0), "gated")
    (dismissed,) = (each for each in cluster.decide() if isinstance(each, Dismiss))
    assert dismissed.key == ("rollout-ahead", 0)


def test_a_rollout_of_this_iteration_goes_before_one_of_the_next_that_came_first() -> None:
    cluster = Cluster()
    cluster.submit("rollout-ahead", 1, pool="spot", iteration=1, phase="rollout-ahead")
    cluster.submit("rollout", 1)
    cluster.join("s")

    assert launched(cluster.decide()) == {"rollout/0": ["tcp://s"]}


def test_training_does_not_wait_for_a_rollout_that_nobody_wants_any_more() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 1, pool="any")
    cluster.submit("train", 1, pool="gradient-reserved")
    cluster.change(("rollout", 0), "forgotten")
    cluster.join("r", pool="reserved")

    assert trained(cluster.decide()) == {"train/0": "tcp://r"}


def test_training_that_waits_gets_the_worker_of_a_rollout_of_the_next_iteration() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.join("s", "t")
    cluster.submit("rollout-ahead", 2, pool="spot", iteration=1, phase="rollout-ahead")
    cluster.decide()
    cluster.submit("train", 1, pool="gradient-reserved")
    cluster.submit("train+", 1, pool="gradient-any", phase="train")

    found = cluster.decide()
    (order,) = (each for each in found if isinstance(each, Regroup))

    assert trained(found) == {"train/0": "tcp://a"}
    assert (order.gang, order.cause) == ("rollout-ahead/0", "this iteration waits for a worker")
    assert not [each for each in cluster.decide() if isinstance(each, Regroup)], "one leaves already"
    cluster.change(("rollout-ahead", 0), "released")
    cluster.change(("rollout-ahead", 0), "gated")
    assert trained(cluster.decide()) == {"train+/0": "tcp://s"}


def test_a_rollout_that_lost_its_worker_gets_that_of_a_rollout_of_the_next_iteration() -> None:
    cluster = Cluster()
    cluster.join("a", "b")
    cluster.submit("rollout", 1)
    cluster.submit("rollout-ahead", 1, pool="spot", iteration=1, phase="rollout-ahead")
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://a"], "rollout-ahead/0": ["tcp://b"]}
    cluster.lose("a", ("rollout", 0))

    (order,) = cluster.decide()
    again = list(cluster.decide())
    cluster.change(("rollout-ahead", 0), "released")
    cluster.change(("rollout-ahead", 0), "gated")

    assert isinstance(order, Regroup)
    assert (order.gang, again) == ("rollout-ahead/0", []), "one leaves already"
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://b"]}
    assert list(cluster.decide()) == []
    cluster.change(("rollout", 0), "memory")
    assert launched(cluster.decide()) == {"rollout-ahead/0": ["tcp://b"]}


def test_no_more_rollouts_are_put_off_than_others_need_workers() -> None:
    cluster = Cluster()
    cluster.join("a", "b", node="n")
    cluster.join("c", "d", node="m")
    cluster.submit("rollout-ahead", 2, pool="spot", iteration=1, phase="rollout-ahead", shards=2, widths=[2])
    assert len(launched(cluster.decide())) == 2
    cluster.submit("train", 2, pool="gradient-spot")

    orders = [each for each in cluster.decide() if isinstance(each, Regroup)]
    first = ("rollout-ahead", 2 * int(orders[0].gang.rpartition("/")[2]))
    cluster.change(first, "released")
    cluster.change(first, "gated")

    assert len({order.gang for order in orders}) == 1
    assert not [each for each in cluster.decide() if isinstance(each, Regroup)], "the other member is about to come"


def test_gradients_that_only_spot_workers_may_compute_go_to_no_reserved_one() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.join("s")
    cluster.submit("train", 2, pool="gradient-spot")
    cluster.submit("update", 1, pool="update")

    begun = trained(cluster.decide())
    cluster.lose("s", ("train", 0))
    cluster.join("t")

    assert begun == {"train/0": "tcp://s", "update/0": "tcp://a"}
    assert trained(cluster.decide()) == {"train/0": "tcp://t"}


def test_a_gradient_that_outlasts_its_spot_workers_goes_to_a_reserved_one() -> None:
    cluster = Cluster(quarantine_after=2)
    cluster.join("a", pool="reserved")
    cluster.submit("train", 1, pool="gradient-spot")
    for name in ("s", "t"):
        cluster.join(name)
        assert trained(cluster.decide()) == {"train/0": f"tcp://{name}"}
        cluster.lose(name, ("train", 0))

    missing = cluster.dispatch.state.missing_pools()
    (begun,) = cluster.decide()

    assert missing == ()
    assert isinstance(begun, Train)
    assert (begun.address, begun.cause) == ("tcp://a", "2 workers left before it was done")


def test_a_worker_that_is_lost_after_its_engine_counts_once_against_its_gradient() -> None:
    """As when a machine is taken: its processes end one after the other."""
    cluster = Cluster(quarantine_after=2)
    cluster.join("a", pool="reserved")
    cluster.submit("train", 1, pool="gradient-spot")
    cluster.join("s")
    assert trained(cluster.decide()) == {"train/0": "tcp://s"}
    engine_lost(cluster, "s")
    cluster.lose("s", ("train", 0))
    cluster.join("t")

    assert trained(cluster.decide()) == {"train/0": "tcp://t"}


def test_where_reserved_workers_have_no_gpu_a_gradient_that_outlasts_its_spot_workers_waits_for_another() -> None:
    cluster = Cluster(quarantine_after=2, reserved_computes=False)
    cluster.join("a", pool="reserved")
    cluster.submit("train", 1, pool="gradient-spot")
    for name in ("s", "t"):
        cluster.join(name)
        cluster.decide()
        cluster.lose(name, ("train", 0))

    missing, nobody = cluster.dispatch.state.missing_pools(), cluster.decide()
    cluster.join("u")

    assert (missing, list(nobody)) == (("spot",), [])
    assert trained(cluster.decide()) == {"train/0": "tcp://u"}


@pytest.mark.parametrize(
    ("pool", "name"),
    [("gradient-spot", "train"), ("gradient-any", "train"), ("update", "update"), (SCORING, "score")],
)
def test_a_task_at_which_every_worker_is_lost_is_given_up_by_name(pool: str, name: str) -> None:
    cluster = Cluster(quarantine_after=1, reserved_computes=False)
    kind = {"update": "reserved", SCORING: "reward"}.get(pool, "spot")
    cluster.submit(name, 1, pool=pool)
    for number in range(ENOUGH_LOSSES):
        assert cluster.dispatch.state.outlasted == ""
        cluster.join(f"w{number}", pool=kind)
        cluster.decide()
        cluster.lose(f"w{number}", (name, 0))

    assert cluster.dispatch.state.outlasted.startswith(
        f"{name} 0: 10 workers were lost at the task ('{name}', 0), so it is "
    )


@pytest.mark.parametrize("computes", [True, False])
def test_once_training_has_ended_reserved_workers_that_can_help_to_explore(computes: bool) -> None:
    cluster = Cluster(reserved_computes=computes)
    cluster.join("a", pool="reserved")
    cluster.join("s")
    cluster.submit("explore-r0", 2, pool="spot", phase="explore-r0")  # what the first iteration waits for

    begun = launched(cluster.decide())

    assert ("tcp://a" in [member for members in begun.values() for member in members]) == computes


def test_until_training_has_ended_reserved_workers_do_not_explore_for_the_next_iteration() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("explore-r0", 1, pool="spot", iteration=1, phase="explore-r0")

    assert launched(cluster.decide()) == {}


def test_gradients_that_wait_for_spot_workers_while_there_are_none_are_told() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("train", 2, pool="gradient-spot")

    missing = cluster.dispatch.state.missing_pools()
    cluster.join("s")

    assert missing == ("spot",)
    assert cluster.dispatch.state.missing_pools() == ()


@pytest.mark.parametrize("computes", [True, False])
def test_where_reserved_workers_have_no_gpu_scoring_without_a_spot_worker_is_told(computes: bool) -> None:
    cluster = Cluster(reserved_computes=computes)
    cluster.join("a", pool="reserved")
    none_wanted = cluster.dispatch.state.missing_pools()
    cluster.submit("score", 2, pool="engine")

    missing = cluster.dispatch.state.missing_pools()
    cluster.join("s")

    assert none_wanted == ()
    assert missing == (() if computes else ("spot",))
    assert cluster.dispatch.state.missing_pools() == ()


def test_a_pool_is_missing_only_where_no_other_will_do() -> None:
    cluster = Cluster()
    cluster.join("s")
    cluster.submit("rollout", 2, pool="any")

    assert cluster.dispatch.state.missing_pools() == ()


def test_where_only_reserved_workers_roll_out_spot_ones_train_meanwhile() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("rollout", 2, pool="reserved")
    cluster.submit("train", 1, pool="gradient-spot")
    cluster.submit("explore-r0", 1, iteration=1, phase="explore-r0")
    cluster.join("s")

    found = cluster.decide()

    assert launched(found) == {"rollout/0": ["tcp://a"]}
    assert trained(found) == {"train/0": "tcp://s"}


def test_updates_stay_with_the_worker_that_has_the_optimizers_state() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("update", 1, pool="update")
    first = trained(cluster.decide())
    cluster.change(("update", 0), "memory")
    cluster.join("b", pool="reserved")

    cluster.submit("train", 1, pool="gradient-reserved")
    gradient = trained(cluster.decide())
    cluster.change(("train", 0), "memory")
    cluster.submit("update+", 1, pool="update", phase="update")
    second = trained(cluster.decide())

    assert first == {"update/0": "tcp://a"}
    assert gradient == {"train/0": "tcp://b"}  # whom no update needs
    assert second == {"update+/0": "tcp://a"}


def test_a_reserved_worker_that_no_rollout_needs_trains_beside_one_that_rolls_out() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reserved")
    cluster.submit("rollout", 2, pool="reserved")
    cluster.decide()
    cluster.submit("train", 1, pool="gradient-reserved")
    waiting = cluster.decide()
    cluster.join("b", "c", pool="reserved")

    found = cluster.decide()

    assert waiting == []
    assert launched(found) == {"rollout/1": ["tcp://b"]}
    assert trained(found) == {"train/0": "tcp://c"}


def test_at_the_end_of_the_window_rollouts_leave_reserved_workers_for_spot_ones() -> None:
    cluster = Cluster()
    cluster.join("r", pool="reserved")
    cluster.submit("rollout", 1, pool="any", window_s=5.0)
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://r"]}
    cluster.join("s", node="m")

    *quiet, (moved,) = ([*cluster.decide()] for _ in range(4))

    assert quiet == [[], [], []]
    assert isinstance(moved, Regroup)
    assert moved.address == "tcp://r"
    cluster.change(("rollout", 0), "released")
    cluster.change(("rollout", 0), "gated")
    assert launched(cluster.decide()) == {"rollout/0": ["tcp://s"]}
    assert [span.outcome for span in cluster.dispatch.drain().spans] == ["stopped"]
    assert cluster.dispatch.state.requests["rollout/0"].preemptions == 0


@pytest.mark.parametrize("moves", [True, False])
def test_rollouts_leave_reserved_workers_also_where_spot_ones_are_busy_if_they_resume_their_steps(moves: bool) -> None:
    cluster = Cluster(moves=moves)
    cluster.join("r", pool="reserved")
    cluster.join("s", node="m")
    cluster.submit("rollout", 2, pool="any", window_s=2.0)
    assert len(launched(cluster.decide())) == 2

    assert [type(order) for order in cluster.decide()] == ([Regroup] if moves else [])
    assert cluster.decide() == []


def test_a_worker_that_is_gone_before_its_gang_could_form_anew_is_a_loss() -> None:
    cluster = Cluster()
    cluster.join("r", pool="reserved")
    cluster.submit("rollout", 1, pool="any", window_s=1.0)
    cluster.decide()
    cluster.join("s", node="m")
    (moved,) = cluster.decide()

    cluster.lose("r", ("rollout", 0))

    assert isinstance(moved, Regroup)
    assert [span.outcome for span in cluster.dispatch.drain().spans] == ["lost"]


def test_a_window_that_ends_is_looked_at_then() -> None:
    cluster = Cluster()
    layer = Layer(name="rollout", indices=(0,), pool="any", phase="rollout", iteration=0, window_s=5.0)

    (wake,) = cluster.tell(GraphCame(at_s=10.0, layers=(layer,)))

    assert isinstance(wake, Wake)
    assert 15.0 < wake.at_s < 15.1


def test_a_worker_at_an_address_that_another_had_is_another_worker() -> None:
    cluster = Cluster(hang_after_s=5.0)
    silent = WorkerSilent(at_s=9.0, address="tcp://a", silent_s=6.0)
    for _ in range(2):
        cluster.join("a")
        assert [type(i) for i in cluster.tell(silent)] == [Evict]
        cluster.lose("a")

    lives = [life for life in cluster.dispatch.state.journal.lives.values() if life.worker == "a"]
    assert [life.reason for life in lives] == ["lost", "lost"]
    assert cluster.dispatch.state.snapshot().preemptions == 2


def test_a_worker_that_began_a_task_before_it_was_ready_is_busy_with_it_and_was_from_its_beginning() -> None:
    """Dask knows of a worker's engine a moment before the worker says that it is ready."""
    cluster = Cluster()
    cluster.submit("score", 1, pool="engine")
    cluster.submit("rollout", 1)
    cluster.now_s = 5.0
    cluster.change(("score", 0), "processing", worker="tcp://a")

    cluster.join("a")

    assert [each.phase for each in cluster.dispatch.state.doing()] == ["score"]
    assert launched(cluster.decide()) == {}
    cluster.lose("a", ("score", 0))
    (span,) = cluster.dispatch.drain().spans
    assert (span.outcome, span.start_s, span.stop_s) == ("lost", 5.0, 6.0)


def test_a_worker_that_takes_part_anew_is_counted_and_billed_once() -> None:
    """A run is handed out again if a worker was lost at it; the others hear it a second time."""
    cluster = Cluster()
    cluster.join("a", "b")
    cluster.now_s = 5.0

    cluster.join("a", "b")

    assert cluster.dispatch.state.snapshot().pools["spot"] == 2
    lives = [(life.joined_s, life.left_s) for life in cluster.dispatch.drain().workers.values() if life.worker == "a"]
    assert lives == [(0.0, None)]
    assert cluster.dispatch.state.snapshot().preemptions == 0
    cluster.submit("wide", 1, shards=2, widths=(2,))
    assert [set(members) for members in launched(cluster.decide()).values()] == [{"tcp://a", "tcp://b"}]
    assert +cluster.dispatch.state.roster.alive == {("spot", "n"): 2}


@pytest.mark.parametrize(("silent_s", "ended"), [(3.0, False), (5.1, True)])
def test_a_worker_is_ended_after_the_limit_of_silence(silent_s: float, ended: bool) -> None:
    cluster = Cluster(hang_after_s=5.0)
    cluster.join("a")
    silent = WorkerSilent(at_s=9.0, address="tcp://a", silent_s=silent_s)

    first, second = cluster.tell(silent), cluster.tell(silent)

    assert [type(i) for i in first] == ([Evict] if ended else [])
    assert second == []  # it is being ended


def test_a_worker_that_was_ended_for_its_silence_is_lost_even_if_it_leaves_in_order() -> None:
    cluster = Cluster(hang_after_s=5.0)
    cluster.join("a")
    cluster.tell(WorkerSilent(at_s=9.0, address="tcp://a", silent_s=5.1))

    cluster.tell(WorkerLeft(at_s=9.0, address="tcp://a", expected=True))

    (life,) = cluster.dispatch.drain().workers.values()
    assert life.reason == "lost"


def test_the_worker_beside_the_scheduler_is_never_ended_for_its_silence() -> None:
    cluster = Cluster(hang_after_s=5.0)

    assert cluster.tell(WorkerSilent(at_s=9.0, address="head", silent_s=60.0)) == []


def test_after_a_stop_nothing_is_launched() -> None:
    cluster = Cluster()
    cluster.join("a")
    (stop,) = cluster.tell(StopAsked(at_s=0.0))
    cluster.submit("rollout", 1)

    assert isinstance(stop, StopWork)
    assert cluster.decide() == []


@pytest.mark.parametrize("pool", ["spot", "head"])
def test_a_worker_that_is_ready_only_after_a_stop_is_told_of_it(pool: Any) -> None:
    """Dask may have given it a task already."""
    cluster = Cluster()
    cluster.tell(StopAsked(at_s=0.0))

    told = cluster.tell(WorkerJoined(at_s=1.0, address="tcp://late", name="late", pool=pool, node="n"))

    assert [type(each) for each in told] == [StopWork]


def test_what_happens_to_tasks_of_others_is_passed_over() -> None:
    cluster = Cluster()

    assert cluster.change(("somebody's", 0), "memory") == []
    assert not cluster.dispatch.state.knows(("somebody's", 0))


def test_the_log_gives_the_same_instructions_again_and_shows_where_one_was_another() -> None:
    cluster = Cluster()
    cluster.submit("rollout", 3, shards=2, widths=(1, 2))
    cluster.join("a", "b")
    cluster.decide()
    cluster.lose("a", ("rollout", 0))
    cluster.decide()
    rows = json.loads(json.dumps(list(cluster.dispatch.drain().decisions)))
    assert list(differing(rows)) == []

    changed = next(entry for entry in rows if entry.get("is") == "TimePassed" and "then" in entry)
    changed["then"] = []

    assert list(differing(rows)) == [changed]


def test_an_event_survives_its_row() -> None:
    layer = Layer(name="rollout", indices=(0, 1), pool="any", phase="rollout", iteration=3, shards=2, widths=(1, 2))
    event = GraphCame(at_s=1.5, layers=(layer,))

    again = event_of(json.loads(json.dumps(row(event, []))))

    assert asdict(again) == asdict(event)


def test_tasks_told_of_together_are_tasks_told_of_one_after_the_other() -> None:
    together, apart = Cluster(), Cluster()
    layer = Layer(
        name="rollout", indices=tuple(range(12)), pool="any", phase="rollout", iteration=0, shards=4, widths=(1, 2, 4)
    )
    answers: list[list[Instruction]] = [[], []]
    for cluster, heard in zip((together, apart), answers, strict=True):
        cluster.join("a", "b", "c", "d")
        cluster.tell(GraphCame(at_s=0.0, layers=(layer,)))

        def change(state: Any, keys: list[Key], cluster: Cluster = cluster, heard: list[Instruction] = heard) -> None:
            event = TasksChanged(at_s=cluster.now_s, keys=tuple(keys), state=state)
            for each in [event] if cluster is together else event.one_by_one():
                heard += cluster.tell(each)
            heard += cluster.decide()

        keys = [("rollout", index) for index in layer.indices]
        change("waiting", keys)
        change("gated", keys)
        heard += cluster.change(("rollout", 0), "memory") + cluster.decide()
        change("memory", keys[1:4])
        change("released", keys[:4])
        change("forgotten", keys[:4])

    assert list(one_by_one(answers[0])) == list(one_by_one(answers[1]))
    assert len(launched(answers[0])) == 3
    assert together.dispatch.state.snapshot() == apart.dispatch.state.snapshot()
    assert together.dispatch.drain() == apart.dispatch.drain()


def test_a_wave_of_gangs_is_what_they_are_one_after_the_other() -> None:
    together, apart = Cluster(close_with_training=True), Cluster(close_with_training=True)
    rollouts = Layer(name="rollout", indices=(0, 1, 2, 3), pool="any", phase="rollout", iteration=0)
    updates = Layer(name="update", indices=(0,), pool="update", phase="train", iteration=0)
    answers: list[list[Instruction]] = [[], []]
    for cluster, heard in zip((together, apart), answers, strict=True):
        cluster.join("a", "b", "c", pool="reserved")
        cluster.tell(GraphCame(at_s=0.0, layers=(rollouts, updates)))
        for key in [("rollout", index) for index in rollouts.indices] + [("update", 0)]:
            cluster.change(key, "gated")
        heard += cluster.tell(TimePassed(at_s=1.0))
        begun = [
            (member.key, member.address) for launch in heard if isinstance(launch, Launch) for member in launch.members
        ]
        keys, workers = (tuple(column) for column in zip(*begun, strict=True))
        beats = tuple(
            GangBeat(at_s=at_s, gang=f"rollout/{index}", epoch=1, step=step, steps=5, resumed=not step)
            for at_s, step in ((2.0, 0), (9.0, 5))
            for _, index in keys
        )
        work = Work(start_s=1.0, stop_s=9.0)
        events: list[TasksChanged | GangBeats] = [
            TasksChanged(at_s=1.0, keys=keys, state="processing", workers=workers),
            *(GangBeats(at_s=beat.at_s, beats=(beat,)) for beat in beats),
            GangBeats(at_s=9.0, beats=beats),
            TasksChanged(at_s=9.0, keys=keys, state="memory", work=work),
        ]
        for event in events:
            for each in [event] if cluster is together else one_after_the_other(event):
                heard += cluster.tell(each)
        heard += cluster.tell(TimePassed(at_s=10.0))
        cluster.change(("update", 0), "processing", worker="tcp://a")
        heard += cluster.tell(TaskChanged(at_s=11.0, key=("update", 0), state="memory", work=work))

    assert answers[0] == answers[1]
    assert len(launched(answers[0])) == 4
    assert isinstance(answers[0][-1], CloseExploration)
    logs = [cluster.dispatch.drain() for cluster in (together, apart)]
    assert logs[0] == logs[1]
    assert {span.worker for span in logs[0].spans} == {"a", "b", "c"}
    assert not list(differing(json.loads(json.dumps(list(logs[0].decisions)))))


def one_after_the_other(event: TasksChanged | GangBeats) -> list[Event]:
    return list(event.beats) if isinstance(event, GangBeats) else list(event.one_by_one())


def test_shards_that_no_gang_needs_are_dismissed_together_whatever_its_width() -> None:
    cluster = Cluster()
    layer = Layer(
        name="rollout", indices=tuple(range(8)), pool="any", phase="rollout", iteration=0, shards=8, widths=(1, 2, 4, 8)
    )
    cluster.join("a", "b", "c")
    cluster.tell(GraphCame(at_s=0.0, layers=(layer,)))
    cluster.tell(TasksChanged(at_s=0.0, keys=tuple(("rollout", index) for index in range(8)), state="gated"))

    (launch,) = cluster.decide()
    cluster.change(("rollout", 0), "memory")
    instructions = cluster.tell(TimePassed(at_s=2.0))

    assert launched([launch]) == {"rollout/0": ["tcp://a", "tcp://b"]}
    (dismissed,) = instructions
    assert isinstance(dismissed, Dismissals)
    assert (dismissed.first, dismissed.keys) == (2, tuple(("rollout", index) for index in range(2, 8)))


# Workers that only score


def scored(instructions: Sequence[Instruction]) -> dict[str, str]:
    """Worker of each task that is scored by the reward pool."""
    found = [instruction for instruction in instructions if isinstance(instruction, Score)]
    return {f"{score.key[0]}/{score.key[1]}": score.address for score in found}


def test_what_training_waits_for_is_scored_before_exploration_and_each_worker_gets_one_request_at_a_time() -> None:
    cluster = Cluster()
    cluster.submit("explore-score-r0", 1, pool="reward", iteration=1)
    cluster.submit("score", 2, pool="reward")
    cluster.join("a", pool="reward")

    first = scored(cluster.decide())
    nothing = scored(cluster.decide())
    cluster.change(("score", 0), "memory")
    second = scored(cluster.decide())
    cluster.join("b", pool="reward")

    assert (first, nothing) == ({"score/0": "tcp://a"}, {})
    assert second == {"score/1": "tcp://a"}
    assert scored(cluster.decide()) == {"explore-score-r0/0": "tcp://b"}


def test_scoring_whose_worker_is_lost_goes_to_another_that_only_scores() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reward")
    cluster.join("s")
    cluster.submit("score", 1, pool="reward")
    cluster.decide()

    closed = cluster.lose("a", ("score", 0))

    assert [type(instruction).__name__ for instruction in closed] == ["CloseGate"]
    assert cluster.decide() == []
    assert cluster.dispatch.state.missing_pools() == ("reward",)
    cluster.join("b", pool="reward")
    assert scored(cluster.decide()) == {"score/0": "tcp://b"}


def test_a_worker_that_only_scores_gets_no_request_and_none_under_notice_gets_scoring() -> None:
    cluster = Cluster()
    cluster.join("a", pool="reward")
    cluster.submit("rollout", 1, pool="any")
    cluster.submit("train", 1, pool="gradient-any")

    assert cluster.decide() == []
    cluster.tell(WorkerNoticed(at_s=1.0, address="tcp://a", reason="it goes"))
    cluster.submit("score", 1, pool="reward")
    assert cluster.decide() == []
    assert list(cluster.dispatch.state.idle_beside_waiting()) == []


def test_scoring_of_exploration_that_is_closed_ends_beside_the_scheduler_whenever_it_comes() -> None:
    cluster = Cluster()
    cluster.join("r", pool="reserved")
    cluster.submit("explore-score-r0", 1, pool="reward", iteration=1)
    cluster.submit("train", 1, pool="update")
    cluster.decide()
    cluster.change(("train", 0), "memory")

    (waited,) = cluster.decide()
    cluster.submit("explore-score-r1", 1, pool="reward", iteration=1)
    (late,) = cluster.decide()

    for dismissed in (waited, late):
        assert isinstance(dismissed, Dismiss)
        assert (dismissed.address, dismissed.tell) == ("head", None)
