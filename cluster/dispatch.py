"""Decides who runs what: events in, instructions out, each with its cause. It knows neither Dask nor a clock.

`Dispatch.handle` takes what happened, and answers what is to be done. The live cluster and the virtual one hand it the
same events, and a log of them gives the same instructions again. It is level-triggered: on `TimePassed` it looks at
all that waits, so that it does not matter which event came first.

Invariants: the shards of a gang are launched together or not at all; a worker gets one task at a time; nothing is
launched on a worker under notice; work of an earlier forming of a gang is called off before a later one begins;
whatever waits and may run, runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from math import inf
from operator import attrgetter
from typing import Any, get_args

from cluster.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    Dismiss,
    EngineLost,
    Event,
    EventLog,
    Evict,
    GangBeat,
    GraphCame,
    Instruction,
    Key,
    Launch,
    Layer,
    Member,
    Regroup,
    StopAsked,
    StopWork,
    TaskChanged,
    TaskPhase,
    TasksChanged,
    TimePassed,
    Train,
    Wake,
    WeightsHeld,
    WindowChanged,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerSilent,
    event_of,
    row,
)
from cluster.gangs import GATED, TRAINING, GangState, gang_of
from cluster.journal import Journal, Label
from cluster.requests import Requests
from cluster.roster import Roster, WorkerState
from cluster.snapshot import Doing, Snapshot, view_of
from spotlight.config import Config
from spotlight.plan.offload import PhaseDecision, PhaseView, decide_phase
from spotlight.plan.placement import View, Waiting, plan, widen
from spotlight.records import Placement, Pool, Surplus

LATE_S = 0.01
"""A wake for the end of a rollout window comes so much after it, so that the window is over when it is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the settings of a run say about dispatching."""

    close_with_training: bool = True
    """The end of training closes exploration."""
    hang_after_s: float = 60.0
    """A worker that is silent for longer is ended."""
    quarantine_after: int = 5
    """Preemptions in a row without a new step, after which nobody runs a request any more."""
    widens: bool = True
    """A gang at work forms anew when idle workers could make it wider; it then resumes its steps."""
    moves: bool = True
    """A rollout at work on reserved workers goes on elsewhere, from its last step, once their window is over."""


def rules_of(config: Config) -> Rules:
    """What the settings say about dispatching."""
    strategy = config.strategy
    return Rules(
        close_with_training=strategy.exploration == "stale" and config.exploration.budget != "fixed",
        hang_after_s=config.cluster.hang_after_s,
        quarantine_after=config.cluster.quarantine_after,
        widens=strategy.elastic and strategy.on_preemption == "resume",
        moves=strategy.on_preemption == "resume",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWindow:
    """How long reserved workers roll out, from when an iteration's graph came."""

    began_s: float = 0.0
    window_s: float = inf
    pools: tuple[Pool, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Task:
    key: Key
    label: Label
    gang: GangState | None
    state: TaskPhase = "released"
    worker: str = ""


class Dispatch:
    """The state of a cluster, and what is to be done about it.

    Args:
        rules: what the settings say.
        logged: whether events and instructions are kept for `drain`.
    """

    def __init__(self, rules: Rules, *, logged: bool = True) -> None:
        self.rules = rules
        self._log = EventLog(asdict(rules)) if logged else None
        self.journal = Journal()
        self._roster = Roster()
        self._requests = Requests()
        self._tasks: dict[Key, _Task] = {}
        self._gangs: dict[str, GangState] = {}
        self._order = 0
        self._window = RolloutWindow()
        self._training: dict[Key, _Task] = {}
        """Gradients of parts, and updates."""
        self._ready: dict[Key, _Task] = {}
        """Those that wait behind the gate."""
        self._trainer = ""
        self._trained = -1
        self._stopping = False
        self._decided_s = 0.0

    # What happened

    def handle(self, event: Event) -> list[Instruction]:
        """Take note of an event; returns what is to be done now, in this order."""
        instructions = list(self._instructions(event))
        if self._log:
            self._log.add(event, instructions)
        return instructions

    def _instructions(self, event: Event) -> Iterable[Instruction]:
        match event:
            case TaskChanged():
                return self._task_changed(event)
            case TasksChanged():
                return self._tasks_changed(event)
            case TimePassed():
                return [] if self._stopping else self._decide(event.at_s)
            case GangBeat():
                return self._beat(event)
            case GraphCame():
                return self._graph_came(event)
            case WorkerJoined():
                return self._joined(event)
            case WorkerAvailable():
                return self._available(event)
            case WorkerLeft():
                return self._left(event)
            case WorkerNoticed():
                return self._noticed(event)
            case WorkerSilent():
                return self._silent(event)
            case EngineLost():
                known = self._gangs.get(event.gang)
                self.journal.event(event.at_s, "engine lost", gang=known, worker=event.worker, reason=event.reason)
                return []
            case WeightsHeld():
                self._roster.hold(event)
                return []
            case WindowChanged():
                self._window = replace(self._window, window_s=event.window_s)
                return []
            case StopAsked():
                self._stopping = True
                return [StopWork(cause="the run is to stop")]

    def drain(self) -> dict[str, list[dict[str, Any]]]:
        """Spans, events and decisions since the last call, and the lives of all workers so far."""
        return {**self.journal.drain(), "decisions": self._log.drain() if self._log else []}

    # Graphs and tasks

    def _graph_came(self, event: GraphCame) -> Iterator[Instruction]:
        for layer in sorted(event.layers, key=lambda layer: (len(layer.name), layer.name)):  # rounds by their numbers
            self._add_tasks(layer)
            if layer.pool in GATED and layer.phase == "rollout":
                self._window = RolloutWindow(began_s=event.at_s, window_s=layer.window_s, pools=GATED[layer.pool])
                if layer.window_s < inf:
                    at_s = event.at_s + layer.window_s + LATE_S
                    yield Wake(at_s=at_s, cause=f"reserved workers roll out for {layer.window_s:g} s")

    def _add_tasks(self, layer: Layer) -> None:
        label = Label(layer.pool, layer.phase, layer.iteration)
        for _, indices in groupby(sorted(layer.indices), key=lambda index: index // layer.shards):
            keys = [(layer.name, index) for index in indices]
            gang = self._gang(gang_of(keys[0], layer.shards), layer) if layer.pool in GATED else None
            if gang:
                gang.add(keys)
            for key in keys:
                self._tasks[key] = task = _Task(key=key, label=label, gang=gang)
                if layer.pool in TRAINING:
                    self._training[key] = task
            self._file_if_known(gang)

    def _gang(self, name: str, layer: Layer) -> GangState:
        if name not in self._gangs:
            self._order += 1
            self._gangs[name] = GangState(
                name=name,
                iteration=layer.iteration,
                exploring=layer.phase.startswith("explore"),
                pools=GATED[layer.pool],
                order=self._order,
                widths=tuple(layer.widths),
                windowed=layer.phase == "rollout",
            )
        return self._gangs[name]

    def _task_changed(self, event: TaskChanged) -> Iterable[Instruction]:
        task = self._tasks.get(event.key)
        if task is None:
            return ()
        instructions: list[Instruction] = []
        if self._note(task, event, instructions):
            self._file_if_known(task.gang)
        instructions += self._follows(task, event.state)
        return instructions

    def _tasks_changed(self, event: TasksChanged) -> Iterable[Instruction]:
        """As one after the other; but a request is filed anew only once, when the last of its shards has changed."""
        instructions: list[Instruction] = []
        known = [task for key in event.keys if (task := self._tasks.get(key))]
        for gang, alike in groupby(known, attrgetter("gang")):
            tasks = list(alike)
            if gang is None or any(task.key in gang.members for task in tasks):
                changes = [self._note(task, event, instructions) for task in tasks]
                if any(changes):
                    self._file_if_known(gang)
            else:
                self._note_together(gang, tasks, event)
            if event.state in ("released", "forgotten"):
                for task in tasks:
                    instructions += self._follows(task, event.state)
        return instructions

    def _note_together(self, gang: GangState, tasks: Sequence[_Task], event: TasksChanged) -> None:
        """As `_note`, of shards of a request, none of which is at work on it."""
        state = event.state
        for task in tasks:
            if state == "processing":
                self._begins(task, event.worker, event.at_s)
            elif task.state == "processing":
                self._ends(task, event)
            task.state = state
        if gang.change_all([task.key for task in tasks], state):
            self._file_if_known(gang)

    def _note(self, task: _Task, event: TaskChanged | TasksChanged, instructions: list[Instruction]) -> bool:
        """Take down a task's new state; returns whether that may change what its request waits for."""
        state, before, gang = event.state, task.state, task.gang
        task.state = state
        if state == "processing":
            self._begins(task, event.worker, event.at_s)
        elif before == "processing":
            self._ends(task, event)
        if gang is None:
            self._note_ready(task)
            return False
        changes = gang.change(task.key, state)
        if before == "processing" and task.key in gang.members:
            instructions += self._came_back(gang, task, event)
            return True
        return changes

    def _note_ready(self, task: _Task) -> None:
        if task.state == "gated" and task.key in self._training:
            self._ready[task.key] = task
        else:
            self._ready.pop(task.key, None)

    def _follows(self, task: _Task, state: TaskPhase) -> Iterable[Instruction]:
        if state == "released":
            return self._close_gate(task)
        if state == "memory" and task.label.pool == "training" and self._is_last_update(task):
            return self._training_ended(task.label.iteration)
        if state == "forgotten":
            self._forget(task)
        return ()

    def _close_gate(self, task: _Task) -> Iterable[Instruction]:
        again = task.gang or task.key in self._training
        return (CloseGate(key=task.key, cause="it is to run again"),) if again else ()

    def _file_if_known(self, gang: GangState | None) -> None:
        if gang and gang.name in self._gangs:
            self._file(gang)

    def _begins(self, task: _Task, address: str, at_s: float) -> None:
        if task.worker and task.worker != address:
            self._roster.unburden(task.key, task.worker)
        task.worker = address
        self._roster.burden(task.key, address, at_s)

    def _ends(self, task: _Task, event: TaskChanged | TasksChanged) -> None:
        address, started_s = task.worker, self._roster.unburden(task.key, task.worker)
        if address not in self.journal.lives:
            return
        ended = event.state in ("memory", "erred")
        if not ended:
            planned = task.gang is not None and task.gang.planned and address in self._roster.workers
            outcome = "stopped" if planned else "lost"
            self.journal.span(task.key, task.label, task.gang, address, started_s, event.at_s, outcome)
        elif event.work:
            outcome = "failed" if event.state == "erred" else "dropped" if event.work.dropped else "done"
            work = event.work
            self.journal.span(task.key, task.label, task.gang, address, work.start_s, work.stop_s, outcome)

    def _forget(self, task: _Task) -> None:
        del self._tasks[task.key]
        gang = task.gang
        if gang is None:
            self._training.pop(task.key, None)
            self._ready.pop(task.key, None)
        elif self._gangs.pop(gang.name, None):
            self._requests.unfile(gang)

    def _is_last_update(self, task: _Task) -> bool:
        """Layers of one iteration's updates have ever longer names."""
        updates = [key for key, other in self._training.items() if other.label == task.label]
        return task.key == max(updates, key=lambda key: (len(key[0]), key))

    def _training_ended(self, iteration: int) -> Iterator[Instruction]:
        self._trained = max(self._trained, iteration)
        for gang in self._gangs.values():
            if gang.exploring:
                self._file(gang)
        if self.rules.close_with_training:
            yield CloseExploration(iteration=iteration + 1, cause=f"training of iteration {iteration} has ended")

    # Workers

    def _joined(self, event: WorkerJoined) -> list[Instruction]:
        self._roster.join(event)
        if event.pool != "head":
            self.journal.joined(event.at_s, event.address, event.name, event.pool)
        return []

    def _available(self, event: WorkerAvailable) -> list[Instruction]:
        self._roster.note_available(event.address, available=event.available)
        return []

    def _left(self, event: WorkerLeft) -> list[Instruction]:
        """Told before its tasks change."""
        worker = self._roster.leave(event.address, expected=event.expected)
        if worker and worker.pool != "head":
            reason = "end" if self._stopping else "left" if worker.name in self._roster.leaving else "lost"
            self.journal.left(event.at_s, event.address, reason)
        return []

    def _noticed(self, event: WorkerNoticed) -> list[Instruction]:
        """It gets no more work."""
        worker = self._roster.note_leaving(event.address)
        if worker:
            self.journal.event(event.at_s, "notice", worker=worker.name, reason=event.reason)
        return []

    def _silent(self, event: WorkerSilent) -> list[Instruction]:
        worker, hung = self._roster.workers.get(event.address), self._roster.hung
        if worker is None or worker.pool == "head" or event.silent_s <= self.rules.hang_after_s:
            return []
        if event.address in hung:
            return []
        hung.add(event.address)
        self.journal.event(event.at_s, "hung", worker=worker.name)
        cause = f"no sign of life for {event.silent_s:.1f} s"
        return [Evict(address=event.address, name=worker.name, cause=cause)]

    def holders(self, sha256: str) -> list[str]:
        """Workers, one a node, whose nodes hold a file of weights; the latest to get it first: it serves fewest."""
        return self._roster.holders(sha256)

    # Gangs

    def _came_back(self, gang: GangState, task: _Task, event: TaskChanged | TasksChanged) -> Iterator[Instruction]:
        """A shard is done, or its worker is gone, or it was sent back at a step boundary."""
        address = gang.members.pop(task.key, None)
        if address is None or event.state in ("memory", "erred"):
            return
        alive = address in self._roster.workers
        if not gang.breaking:
            yield from self._break(gang, event.at_s, gang.names[address], gone=not alive)
        if alive:
            gang.held = (*gang.held, gang.names[address])

    def _break(self, gang: GangState, at_s: float, member: str, *, gone: bool) -> Iterator[Instruction]:
        """A member is gone, or handed its shard back: the present forming is over, and the others are to leave."""
        gang.breaking = True
        agreed = gang.planned or self._stopping or not self._roster.leaving.isdisjoint((member, *gang.workers))
        self.journal.event(at_s, "leaves" if agreed else "broken", gang=gang, lost=member if gone else "")
        if not agreed:
            gang.lose()
            gang.quarantined |= gang.fruitless >= self.rules.quarantine_after  # for good: a step may be told of late
        why = f"{member} is gone" if gone else f"{member} handed its shard back"
        for address in gang.members.values():  # after a leave that was agreed on they have ended already
            yield CallOff(gang=gang.name, epoch=gang.epoch, address=address, cause=why)

    def _beat(self, event: GangBeat) -> list[Instruction]:
        gang = self._gangs.get(event.gang)
        if gang is None or gang.epoch != event.epoch or not gang.members:
            return []
        if event.resumed:
            gang.begin(event.step, event.steps, event.at_s)
            self.journal.gang_event(event.at_s, "resumed", gang)
            return []
        if event.step <= gang.step:  # told twice, or late
            return []
        first = gang.step == gang.resumed_at
        gang.advance(event.step, event.at_s)
        if first:
            self.journal.gang_event(event.at_s, "stepped", gang)
        return []

    # What waits

    def _file(self, gang: GangState) -> None:
        """Keep a request where `_decide` looks for it."""
        self._requests.file(gang, over=self._is_over(gang))

    def _is_over(self, gang: GangState) -> bool:
        """Whether what is behind the gate has nothing to do any more: done, called off, or quarantined."""
        return gang.is_done or gang.quarantined or self._called_off(gang)

    def _called_off(self, gang: GangState) -> bool:
        closed = self.rules.close_with_training and gang.iteration <= self._trained + 1
        return closed and gang.exploring and self._trained >= 0

    # What follows

    def _decide(self, at_s: float) -> Iterator[Instruction]:
        self._decided_s = at_s
        for gang in list(self._requests.over.values()):
            yield from self._dismiss(gang, at_s)
        if not (self._roster.idle or self._requests.rollouts_reserved):
            return
        phase = self._phase(at_s)
        if "reserved" not in phase.pools and self._requests.rollouts_reserved and self.rules.moves:
            yield from self._move_rollouts(at_s)
        yield from self._train(phase)
        if self._ready and self._requests.rollouts_waiting:  # rollouts, then gradients, then exploration
            yield from self._place(phase, at_s, explores=False)
            yield from self._train(self._phase(at_s))
        yield from self._place(phase, at_s)
        yield from self._train(self._phase(at_s))  # perhaps no rollout waits any more
        yield from self._widen(at_s)

    def _place(self, phase: PhaseDecision, at_s: float, *, explores: bool = True) -> Iterator[Instruction]:
        """Admit gangs for what waits; but for exploration, where that is to wait longer."""
        if self._roster.idle and self._requests.any_waits:
            for launch in plan(self._view(phase, explores=explores)):
                yield self._launch(self._gangs[launch.request], launch.workers, at_s)

    def _dismiss(self, gang: GangState, at_s: float) -> Iterator[Instruction]:
        head = self._roster.head
        if head is None:
            return
        for shard, key in gang.gated:
            first = shard == 0
            tell: Surplus | int | None = Surplus()
            cause = "its request needs it no more"
            if first and gang.quarantined:
                tell, cause = gang.preemptions, f"its request was preempted {gang.fruitless} times without a new step"
                self.journal.event(at_s, "quarantined", gang=gang)
            elif first and self._called_off(gang):
                tell, cause = None, "exploration is closed"
            yield Dismiss(key=key, address=head.address, gang=gang.name, shard=shard, tell=tell, cause=cause)

    def _phase(self, at_s: float) -> PhaseDecision:
        """Who may roll out and whether training may begin; everybody, where no rollout needs a reserved worker."""
        if not self._requests.rollouts:
            return PhaseDecision(pools=self._window.pools, train=True)
        elapsed_s, window_s = at_s - self._window.began_s, self._window.window_s
        view = PhaseView(
            pools=self._window.pools,
            elapsed_s=elapsed_s,
            window_s=window_s,
            spot=self._spot_for_rollouts() if elapsed_s >= window_s else 0,  # of no interest while the window is open
            waiting=self._requests.rollouts_waiting,
        )
        return decide_phase(view)

    def _spot_for_rollouts(self) -> int:
        """Spot workers that stay, on nodes where there are enough of them for a gang."""
        narrowest = self._gangs[next(iter(self._requests.rollouts))].widths[0]
        return self._roster.spot_on_nodes(of_at_least=narrowest)

    def _move_rollouts(self, at_s: float) -> Iterator[Instruction]:
        for gang in self._requests.with_gang():
            if gang.windowed and gang.pool == "reserved" and not (gang.breaking or gang.planned):
                yield from self._regroup(gang, at_s, "moves", "the rollout window of reserved workers is over")

    def _train(self, phase: PhaseDecision) -> Iterator[Instruction]:
        """Let updates that are ready go, then gradients, as many as there are free workers.

        An update goes to the worker that took the one before, if it is free, and gradients to that one last.
        """
        if not (self._ready and self._roster.idle):
            return
        may = self._may_train(phase)
        free = sorted(
            self._roster.idle.values(), key=lambda idle: (idle.pool, idle.worker == self._trainer, idle.worker)
        )
        for task in sorted(self._unbegun(), key=_training_order):
            pools, is_update = may.intersection(TRAINING[task.label.pool]), task.label.pool == "training"
            able = (each for each in free if each.pool in pools and (not is_update or each.worker == self._trainer))
            found, cause = next(able, None), "it has the optimizer's state" if is_update else "it is free"
            if found is None and is_update:
                found, cause = next((each for each in free if each.pool in pools), None), "it is free"
            if found is None:
                continue
            free.remove(found)
            self._trainer = found.worker if is_update else self._trainer
            address = self._roster.by_name[found.worker].address
            self._burden(task.key, address)
            yield Train(key=task.key, address=address, cause=cause)

    def _unbegun(self) -> list[_Task]:
        """Training that waits behind the gate, and for which no worker was named just now."""
        return [task for task in self._ready.values() if not self._roster.has(task.key, task.worker)]

    def _may_train(self, phase: PhaseDecision) -> set[str]:
        """Pools whose free workers no rollout needs."""
        waits = self._requests.rollouts_waiting > 0
        return {pool for pool, may in (("reserved", phase.train), ("spot", not waits)) if may}

    def _burden(self, key: Key, address: str) -> None:
        """Count on the worker for a task before it begins, so that it gets no other."""
        self._roster.burden(key, address)
        self._tasks[key].worker = address

    def _view(self, phase: PhaseDecision, *, explores: bool) -> View:
        """What the plan looks at, less what could not change it: those who cannot use each other, and the far queue.

        Fresh requests of a kind are alike. With more than twice as many of them as there are idle workers each gets
        the narrowest gang, however many more there are, and the last ones get none.
        """
        enough = 2 * len(self._roster.idle) + 1
        pools = {worker.pool for worker in self._roster.idle.values()}
        names = [name for name, gang in self._requests.broken.items() if explores or not gang.exploring]
        for queue in self._requests.queues.values():
            first = self._gangs[queue[0][1]]
            if (explores or not first.exploring) and not pools.isdisjoint(self._pools_of(first, phase)):
                names += (name for _, name in islice(queue, enough))
        waiting = tuple(self._waiting(self._gangs[name], phase) for name in names)
        wanted = {pool for request in waiting for pool in request.pools}
        idle = tuple(worker for worker in self._roster.idle.values() if worker.pool in wanted)
        return View(idle=idle, waiting=waiting, nodes=self._roster.nodes)

    def _pools_of(self, gang: GangState, phase: PhaseDecision) -> tuple[Pool, ...]:
        """Rollouts run where it is their turn; once training has ended, reserved workers help with exploration."""
        if gang.windowed and "reserved" in gang.pools and "reserved" not in phase.pools:
            return ("spot",)
        if gang.exploring and gang.iteration <= self._trained + 1:
            return ("spot", "reserved")
        return gang.pools

    def _waiting(self, gang: GangState, phase: PhaseDecision) -> Waiting:
        pools = self._pools_of(gang, phase)
        moved = gang.windowed and pools != gang.pools  # its survivors are where it may not run
        return gang.waiting(pools, held=() if moved else gang.held)

    def _launch(self, gang: GangState, names: Sequence[str], at_s: float) -> Launch:
        """Admit a whole gang."""
        workers = [self._roster.by_name[name] for name in names]
        chosen = list(zip(gang.gated, [worker.address for worker in workers], strict=False))
        members = {key: address for (_, key), address in chosen}
        cause = f"forming {gang.epoch + 1}: {len(workers)} of {len(self._roster.idle)} idle workers"
        gang.form(members, {w.address: w.name for w in workers}, workers[0].idle.pool, workers[0].idle.node)
        for key, address in members.items():
            self._burden(key, address)
        self._file(gang)
        self.journal.gang_event(at_s, "formed", gang)
        launched = [
            Member(
                key=key,
                shard=shard,
                address=address,
                place=Placement(gang=gang.name, epoch=gang.epoch, rank=rank, width=len(members)),
            )
            for rank, ((shard, key), address) in enumerate(chosen)
        ]
        return Launch(gang=gang.name, members=tuple(launched), cause=cause)

    def _widen(self, at_s: float) -> Iterator[Instruction]:
        """Gangs beside idle workers that nobody waits for form anew, wider, if that pays."""
        running = tuple(gang.running(len(gang.members) + gang.parked, at_s) for gang in self._beside_idle())
        for name in widen(View(idle=tuple(self._roster.idle.values()), waiting=(), running=running)) if running else ():
            yield from self._regroup(self._gangs[name], at_s, "regroup", "idle workers make it wider")

    def _regroup(self, gang: GangState, at_s: float, event: str, cause: str) -> Iterator[Instruction]:
        """Have a gang form anew at its next step boundary: wider, or elsewhere."""
        gang.planned = True
        self.journal.event(at_s, event, gang=gang)
        for address in gang.members.values():
            yield Regroup(gang=gang.name, epoch=gang.epoch, address=address, cause=cause)

    # What may be asked

    def widenable(self) -> list[str]:
        """Requests whose gangs might form anew, wider, with workers that are idle now: how far they are matters."""
        return [gang.name for gang in self._beside_idle()]

    def _beside_idle(self) -> Iterator[GangState]:
        """Gangs that idle workers, for whom nobody waits, might make wider."""
        if not self.rules.widens or self._requests.any_waits:
            return
        for node in dict.fromkeys(idle.node for idle in self._roster.idle.values()):
            for gang in self._requests.at_work.get(node, {}).values():
                if gang.widths[-1] > gang.width and not (gang.breaking or gang.planned):
                    yield gang

    def epoch(self, gang: str) -> int:
        """Formings of a gang so far."""
        return self._gangs[gang].epoch if gang in self._gangs else 0

    def step(self, gang: str) -> int:
        """Of a gang's present forming, as far as was reported."""
        return self._gangs[gang].step if gang in self._gangs else 0

    def idle_beside_waiting(self) -> Iterator[str]:
        """Requests and training that wait although idle workers could do them, as sentences; after a decision none are.

        Looked at are requests that a single worker may run: of wider ones, workers may be kept for the first.
        """
        for gang in self._gangs.values() if self._roster.idle and not self._stopping else ():
            if gang.behind and not gang.members and gang.widths[0] == 1 and gang.parked and not self._is_over(gang):
                pools = self._pools_of(gang, self._phase(self._decided_s))
                if idle := sorted(worker.worker for worker in self._roster.idle.values() if worker.pool in pools):
                    yield f"request {gang.name} waits for a worker of {pools} and {', '.join(idle)} are idle"
        may = self._may_train(self._phase(self._decided_s)) if self._ready and not self._stopping else set()
        for task in self._unbegun():
            admitted = sorted(may.intersection(TRAINING[task.label.pool]))
            if idle := sorted(worker.worker for worker in self._roster.idle.values() if worker.pool in admitted):
                yield f"{task.key} waits for a worker of {admitted} and {', '.join(idle)} are idle"

    def knows(self, key: object) -> bool:
        """Whether a task is one of ours."""
        return key in self._tasks

    def doing(self) -> list[Doing]:
        """What each worker is at now; for displays, which look often: it costs a microsecond a worker."""
        return [self._doing(worker) for worker in self._roster.by_name.values()]

    def _doing(self, worker: WorkerState) -> Doing:
        who: dict[str, Any] = {
            "worker": worker.name,
            "pool": worker.pool,
            "leaving": worker.name in self._roster.leaving,
        }
        at_work = [(key, since_s) for key, since_s in worker.tasks.items() if since_s and key in self._tasks]
        if not at_work:
            return Doing(**who)
        key, since_s = at_work[0]
        task = self._tasks[key]
        return Doing(
            **who,
            phase=task.label.phase,
            iteration=task.label.iteration,
            key=str(key),
            forming=task.gang.forming if task.gang else "",
            since_s=since_s,
        )

    def missing_pools(self) -> tuple[str, ...]:
        """Pools that requests wait for, and that have no worker at all now."""
        alive = {worker.pool for worker in self._roster.by_name.values()}
        if len(alive) == len(get_args(Pool)):
            return ()
        waiting = (gang for gang in self._gangs.values() if not gang.members and gang.parked)
        return tuple(sorted({pool for gang in waiting if alive.isdisjoint(gang.pools) for pool in gang.pools}))

    def snapshot(self) -> Snapshot:
        """The state now; plain values."""
        lives = self.journal.lives.values()
        waiting = [gang for gang in self._gangs.values() if not gang.members and gang.parked]
        return Snapshot(
            workers={name: worker.address for name, worker in self._roster.by_name.items()},
            pools=dict(Counter(worker.pool for worker in self._roster.by_name.values())),
            running=dict(Counter(task.label.phase for task in self._tasks.values() if task.state == "processing")),
            waiting=len(waiting),
            waiting_for=self.missing_pools(),
            narrowest=max((gang.widths[0] for gang in waiting), default=0),
            widths=dict(Counter(gang.width for gang in self._requests.with_gang())),
            gangs={name: view_of(gang) for name, gang in self._gangs.items()},
            leaving=frozenset(self._roster.leaving),
            trained=self._trained,
            trainer=self._trainer,
            preemptions=sum(life.reason in ("lost", "left") and life.pool == "spot" for life in lives),
            stopping=self._stopping,
        )


def _training_order(task: _Task) -> tuple[bool, int, Key]:
    return task.label.pool != "training", len(task.key[0]), task.key


def differing(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Dispatch a log of events again: the rows whose instructions are not those that were given then.

    Args:
        rows: all that `Dispatch.drain` told of one session after the other; other decisions are passed over.
    """
    again = Dispatch(Rules(), logged=False)
    for given in rows:
        if given["decision"] == "dispatch rules":
            again = Dispatch(Rules(**given["rules"]), logged=False)
        elif given["decision"] == "dispatch":
            event = event_of(given)
            if row(event, again.handle(event)).get("then") != given.get("then"):
                yield given
