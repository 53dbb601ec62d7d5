"""Dispatchers with one bug each, planted to see that the fault schedules find it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cluster.dispatch.decisions import Decisions
from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    CallOff,
    CloseGate,
    CloseGates,
    Event,
    GangBeat,
    Instruction,
    Launch,
    TaskChanged,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
)
from cluster.dispatch.request_state import SCORING, RequestState
from cluster.dispatch.rules import Rules
from cluster.dispatch.state import State
from spotlight.plan.offload import PhaseDecision
from spotlight.records import Pool


class _Otherwise(Dispatcher):
    """Has another state, or decides otherwise."""

    state_type: type[State] = State
    decisions_type: type[Decisions] = Decisions

    def __init__(self, rules: Rules, *, logged: bool = True) -> None:
        super().__init__(rules, logged=logged)
        self.state = self.state_type(rules)
        self._decisions = self.decisions_type(self.state)


class _Without(Dispatcher):
    """Leaves out instructions of a kind."""

    kinds: tuple[type[Instruction], ...]

    def handle(self, event: Event) -> list[Instruction]:
        return [each for each in super().handle(event) if not isinstance(each, self.kinds)]


class NeverCallsOff(_Without):
    """Survivors of a broken gang are not told."""

    kinds = (CallOff,)


class NeverClosesGates(_Without):
    """A task that is to run again stays bound to the worker that is gone."""

    kinds = (CloseGate, CloseGates)


class IgnoresNotices(Dispatcher):
    """Workers under notice get work."""

    def _noticed(self, event: WorkerNoticed) -> list[Instruction]:
        return []


class KeepsOldNotices(Dispatcher):
    """A worker that takes the name of one that left gets no work."""

    def _joined(self, event: WorkerJoined) -> list[Instruction]:
        leaving = set(self.state.roster.leaving)
        instructions = super()._joined(event)
        self.state.roster.leaving |= leaving
        idle = self.state.roster.idle
        self.state.roster.idle = {address: each for address, each in idle.items() if each.worker not in leaving}
        return instructions


class BelievesOldFormings(Dispatcher):
    """A beat counts whatever forming of its gang it came from."""

    def _beat(self, event: GangBeat) -> list[Instruction]:
        request = self.state.requests.get(event.gang)
        if request:
            request.epoch, epoch = event.epoch, request.epoch
            super()._beat(event)
            request.epoch = epoch
        return []


class RepeatsFormings(_Otherwise):
    """A gang that is formed again has the number of its last forming."""

    class decisions_type(Decisions):
        def _launch(self, request: RequestState, names: Sequence[str], at_s: float) -> Launch:
            request.epoch = max(0, request.epoch - 1)
            return super()._launch(request, names, at_s)


class GivesTheBusyMore(Dispatcher):
    """A worker that may take tasks again counts as idle, whatever it is at work on."""

    def _available(self, event: WorkerAvailable) -> list[Instruction]:
        instructions = super()._available(event)
        worker = self.state.roster.workers.get(event.address)
        if worker and event.available and worker.name not in self.state.roster.leaving:
            self.state.roster.idle[event.address] = worker.idle
        return instructions


class IgnoresPauses(Dispatcher):
    """Workers that take no tasks get some."""

    def _available(self, event: WorkerAvailable) -> list[Instruction]:
        return []


class KeepsTheDead(Dispatcher):
    """A worker that is gone counts as idle if it was."""

    def _left(self, event: WorkerLeft) -> list[Instruction]:
        idle = self.state.roster.idle.get(event.address)
        instructions = super()._left(event)
        if idle:
            self.state.roster.idle[event.address] = idle
        return instructions


class KeepsTheGone(Dispatcher):
    """A worker that is gone counts as there."""

    def _left(self, event: WorkerLeft) -> list[Instruction]:
        return []


class SpansNodes(_Otherwise):
    """The last member of a gang is a worker of any node."""

    class decisions_type(Decisions):
        def _launch(self, request: RequestState, names: Sequence[str], at_s: float) -> Launch:
            idle = [each.worker for each in self._state.roster.idle.values() if each.pool in request.pools]
            others = [name for name in idle if name not in names]
            return super()._launch(request, [*names[:-1], *others[-1:]] if others else names, at_s)


class IgnoresPools(_Otherwise):
    """A request runs on whoever computes."""

    class state_type(State):
        def pools_of(self, request: RequestState, phase: PhaseDecision) -> tuple[Pool, ...]:
            return ("spot", "reserved")


class ForgetsBroken(_Otherwise):
    """A request that lost its gang is not looked at again."""

    class state_type(State):
        def file(self, request: RequestState) -> None:
            super().file(request)
            if request.filed == "broken":
                self.index.take_out(request)


class NeverQuarantines(_Otherwise):
    """A request that kills whoever runs it is run again and again."""

    class state_type(State):
        def is_over(self, request: RequestState) -> bool:
            request.quarantined = False
            return super().is_over(request)


class ForgivesLate(_Otherwise):
    """A request that was set aside runs again when a step of it is told of late."""

    class state_type(State):
        def is_over(self, request: RequestState) -> bool:
            request.quarantined = request.fruitless >= self.rules.quarantine_after
            return super().is_over(request)


class LaunchesParts(Dispatcher):
    """A gang begins without its last member."""

    def handle(self, event: Event) -> list[Instruction]:
        return [
            Launch(gang=each.gang, members=each.members[:-1], cause=each.cause)
            if isinstance(each, Launch) and len(each.members) > 1
            else each
            for each in super().handle(event)
        ]


class LooksAtArrivalsOnly(Dispatcher):
    """That a worker joined is no reason to look at what waits."""

    _joined_last = False

    def _instructions(self, event: Event) -> Iterable[Instruction]:
        joined, self._joined_last = self._joined_last, isinstance(event, WorkerJoined)
        return [] if joined else super()._instructions(event)


class LeavesSurplusWaiting(_Otherwise):
    """Shards that have nothing to do stay behind the gate."""

    class decisions_type(Decisions):
        def _dismiss(self, request: RequestState, at_s: float) -> Iterator[Instruction]:
            return (each for each in super()._dismiss(request, at_s) if request.is_done is False)


class FreesSurvivorsEarly(Dispatcher):
    """A request may be launched again although a survivor still runs its old forming."""

    def _task_changed(self, event: TaskChanged) -> Iterator[Instruction]:
        yield from super()._task_changed(event)
        request = getattr(self.state.tasks.get(event.key), "request", None)
        if request and request.breaking:
            request.members.clear()
            self.state.file(request)


class LeavesScoringWaiting(Dispatcher):
    """Scoring whose worker is gone stays behind the gate."""

    def _note_ready(self, task: Any) -> None:
        if task.label.pool != SCORING or not task.worker:
            super()._note_ready(task)


HANGS = "nothing happens any more"
MUTANTS: dict[type[Dispatcher], str] = {
    NeverCallsOff: HANGS,
    NeverClosesGates: "begins without its first shard",
    IgnoresNotices: "is under notice",
    KeepsOldNotices: HANGS,
    BelievesOldFormings: "is known, forming",
    RepeatsFormings: "is formed again as forming",
    GivesTheBusyMore: "tasks from behind the gate",
    IgnoresPauses: "is paused",
    KeepsTheDead: "has two shards on one worker",
    KeepsTheGone: "is gone",
    ForgetsBroken: "waits for a worker of ('spot',) and",
    NeverQuarantines: "it hangs",
    LaunchesParts: "is launched with (rank, width, forming)",
    SpansNodes: "spans nodes",
    IgnoresPools: ", of the pool spot, is to run on reserved-",
    LooksAtArrivalsOnly: "waits for a worker that scores and",
    LeavesSurplusWaiting: HANGS,
    FreesSurvivorsEarly: "still has a shard of an earlier forming",
    LeavesScoringWaiting: "is None instead of",
}
"""{dispatcher: part of a sentence that says what its bug leads to}"""
