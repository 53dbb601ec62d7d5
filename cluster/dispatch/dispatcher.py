"""Events in, instructions out, each with its cause: who runs what. It knows neither Dask nor a clock.

`Dispatcher` notes what happens in its `State`, has `Decisions` say what follows, and keeps a log of both.

`Dispatcher.handle` takes what happened, and answers what is to be done. The live cluster and the virtual one hand it
the same events, and a log of them gives the same instructions again. It is level-triggered: on `TimePassed` it looks
at all that waits, so that it does not matter which event came first.

Invariants: the shards of a gang are launched together or not at all; a worker gets one task at a time; nothing is
launched on a worker under notice; work of an earlier forming of a gang is called off before a later one begins;
whatever waits and may run, runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Any

from cluster.dispatch.decisions import AHEAD_IS_OVER, Decisions
from cluster.dispatch.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    CloseGates,
    EngineGone,
    Event,
    EventLog,
    Evict,
    GangBeat,
    GangBeats,
    GraphCame,
    Instruction,
    Key,
    Layer,
    StopAsked,
    StopWork,
    TaskChanged,
    TasksChanged,
    TaskState,
    TimePassed,
    Wake,
    WeightsHeld,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerSilent,
    event_of,
    row,
)
from cluster.dispatch.journal import Label
from cluster.dispatch.request_state import ALONE, GATED, SCORING, TRAINING, RequestState, request_of
from cluster.dispatch.rules import Rules
from cluster.dispatch.state import RolloutWindow, State, Task
from spotlight.records import AHEAD, Drained

LATE_S = 0.01
"""How long after the end of a rollout window the wake for it comes, so that the window surely is over."""


class Dispatcher:
    """Notes what happens to a cluster in its state, and answers what is to be done about it.

    Args:
        rules: what the settings say.
        logged: whether events and instructions are kept for `drain`.
    """

    def __init__(self, rules: Rules, *, logged: bool = True) -> None:
        self.state = State(rules)
        self._decisions = Decisions(self.state)
        self._log = EventLog(asdict(rules)) if logged else None

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
                return [] if self.state.stopping else self._decisions.decide(event.at_s)
            case GangBeat():
                return self._beat(event)
            case GangBeats():
                return [instruction for beat in event.beats for instruction in self._beat(beat)]
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
            case EngineGone():
                return self._engine_gone(event)
            case WeightsHeld():
                self.state.roster.hold(event)
                return []
            case StopAsked():
                self.state.stopping = True
                return [StopWork(cause="the run is to stop")]

    def drain(self) -> Drained:
        """Spans, events and decisions since the last call, and the lives that began or ended since then."""
        return replace(self.state.journal.drain(), decisions=self._log.drain() if self._log else ())

    # Graphs and tasks

    def _graph_came(self, event: GraphCame) -> Iterator[Instruction]:
        for layer in sorted(event.layers, key=lambda layer: (len(layer.name), layer.name)):  # rounds by their numbers
            self._add_tasks(layer)
            if layer.pool in GATED and layer.phase == "rollout":
                self.state.window = RolloutWindow(began_s=event.at_s, window_s=layer.window_s, pools=GATED[layer.pool])
                if layer.window_s < inf:
                    at_s = event.at_s + layer.window_s + LATE_S
                    yield Wake(at_s=at_s, cause=f"reserved workers roll out for {layer.window_s:g} s")

    def _add_tasks(self, layer: Layer) -> None:
        label = Label(pool=layer.pool, phase=layer.phase, iteration=layer.iteration)
        for _, indices in groupby(sorted(layer.indices), key=lambda index: index // layer.shards):
            keys = [(layer.name, index) for index in indices]
            if layer.pool in GATED:
                self._add_request(self._request(request_of(keys[0], layer.shards), layer), label, keys)
                continue
            for key in keys:
                self.state.tasks[key] = task = Task(key=key, label=label, request=None)
                if layer.pool in TRAINING:
                    self.state.training[key] = task

    def _add_request(self, request: RequestState, label: Label, keys: Sequence[Key]) -> None:
        request.add(keys)
        for key in keys:
            if key not in request.alike:
                self.state.tasks[key] = Task(key=key, label=label, request=request)
        if request.alike:
            task = Task(key=request.alike[0], label=label, request=request, alike=request.alike)
            self.state.tasks |= dict.fromkeys(request.alike, task)
        self.state.file(request)

    def _request(self, name: str, layer: Layer) -> RequestState:
        if name not in self.state.requests:
            self.state.order += 1
            self.state.requests[name] = RequestState(
                name=name,
                iteration=layer.iteration,
                exploring=layer.phase.startswith("explore"),
                pools=GATED[layer.pool],
                order=self.state.order,
                widths=tuple(layer.widths),
                windowed=layer.phase == "rollout",
                ahead=layer.phase == AHEAD,
            )
            if layer.phase == AHEAD:
                self.state.ahead[name] = self.state.requests[name]
        return self.state.requests[name]

    def _task_changed(self, event: TaskChanged) -> Iterable[Instruction]:
        if event.key not in self.state.tasks:
            return ()
        task = self.state.single(event.key)
        instructions: list[Instruction] = []
        if self._note(task, event, event.worker, instructions):
            self._file_if_known(task.request)
        instructions += self._follows(task, event.state, event.at_s)
        return instructions

    def _tasks_changed(self, event: TasksChanged) -> Iterable[Instruction]:
        """As one after the other; but a request is filed anew only once, when the last of its shards has changed."""
        instructions: list[Instruction] = []
        addresses = dict(zip(event.keys, event.workers, strict=True)) if event.workers else {}
        for request, alike in groupby(self._known(event.keys), attrgetter("request")):
            tasks = list(alike)
            if request is None or (request.members and any(task.key in request.members for task in tasks)):
                changes = [
                    self._note(task, event, addresses.get(task.key, event.worker), instructions) for task in tasks
                ]
                if any(changes):
                    self._file_if_known(request)
            else:
                self._note_together(request, tasks, event, addresses)
            if event.state in ("released", "forgotten"):
                for task in tasks:
                    instructions += self._follows(task, event.state, event.at_s)
        return instructions

    def _known(self, keys: tuple[Key, ...]) -> list[Task]:
        """The tasks of these keys. One that stands for several keys is split, unless all of them are here."""
        known: list[Task] = []
        at = 0
        while at < len(keys):
            task = self.state.tasks.get(keys[at])
            if task is None:
                at += 1
            elif task.alike and keys[at : at + len(task.alike)] != task.alike:
                self.state.split(task, len(task.alike))
            else:
                known.append(task)
                at += len(task.keys)
        return known

    def _note_together(
        self, request: RequestState, tasks: Sequence[Task], event: TasksChanged, addresses: Mapping[Key, str]
    ) -> None:
        """As `_note`, of several shards of a request, none of which is a member of its gang."""
        state = event.state
        for task in tasks:
            if state == "processing":
                self._begins(task, addresses.get(task.key, event.worker), event.at_s)
            elif task.state == "processing":
                self._ends(task, event)
            task.state = state
        changes = [request.change(task.key, state, len(task.keys)) for task in tasks]
        if any(changes):
            self._file_if_known(request)

    def _note(
        self, task: Task, event: TaskChanged | TasksChanged, address: str, instructions: list[Instruction]
    ) -> bool:
        """Note a task's new state; returns whether that may change what its request waits for.

        Args:
            address: of the worker that begins it.
            instructions: the instructions that follow are appended to it.
        """
        state, before, request = event.state, task.state, task.request
        task.state = state
        if state == "processing":
            self._begins(task, address, event.at_s)
        elif before == "processing":
            self._ends(task, event)
        if request is None:
            self._note_ready(task)
            return False
        changes = request.change(task.key, state, len(task.keys))
        if before == "processing" and task.key in request.members:
            instructions += self._came_back(request, task, event)
            return True
        return changes

    def _note_ready(self, task: Task) -> None:
        if task.label.pool not in ALONE:
            return
        if task.state != "gated":
            self._unready(task.key)
        elif task.key in self.state.training:
            self.state.ready[task.key] = task
        elif task.label.pool == SCORING:
            closed = task.explores and self.state.is_closed(task.label.iteration)
            (self.state.unwanted if closed else self.state.unscored)[task.key] = task

    def _unready(self, key: Key) -> None:
        for tasks in (self.state.ready, self.state.unscored, self.state.unwanted):
            tasks.pop(key, None)

    def _follows(self, task: Task, state: TaskState, at_s: float) -> Iterable[Instruction]:
        if state == "released":
            return self._close_gate(task)
        if state == "memory" and task.label.pool == "update" and self._is_last_update(task):
            return self._training_ended(task.label.iteration, at_s)
        if state == "forgotten":
            self._forget(task)
        return ()

    def _close_gate(self, task: Task) -> Iterable[Instruction]:
        cause = "it is to run again"
        if task.alike:
            return (CloseGates(keys=task.alike, cause=cause),)
        return (CloseGate(key=task.key, cause=cause),) if task.request or task.label.pool in ALONE else ()

    def _file_if_known(self, request: RequestState | None) -> None:
        if request and request.name in self.state.requests:
            self.state.file(request)

    def _begins(self, task: Task, address: str, at_s: float) -> None:
        if task.worker and task.worker != address:
            self.state.roster.unassign(task.key, task.worker)
        task.worker, task.is_lost = address, False
        self.state.roster.assign(task.key, address, at_s)

    def _ends(self, task: Task, event: TaskChanged | TasksChanged) -> None:
        address, started_s = task.worker, self.state.roster.unassign(task.key, task.worker)
        if address not in self.state.journal.lives:
            return
        ended = event.state in ("memory", "erred")
        if not ended:
            agreed = self.state.stopping or (task.request is not None and task.request.planned)
            outcome = "stopped" if agreed and address in self.state.roster.workers else "lost"
            self.state.journal.span(task.key, task.label, task.request, address, started_s, event.at_s, outcome)
            if task.request is None and address not in self.state.roster.workers:
                self.state.lose(task)
        elif event.work:
            outcome = "failed" if event.state == "erred" else "dropped" if event.work.dropped else "done"
            if outcome == "done":
                self.state.roster.note_working(address)
            # A worker's clock may have been set meanwhile: the work was done after it was handed out, and before now.
            start_s = min(max(event.work.start_s, started_s), event.at_s)
            stop_s = min(max(event.work.stop_s, start_s), event.at_s)
            self.state.journal.span(task.key, task.label, task.request, address, start_s, stop_s, outcome)

    def _forget(self, task: Task) -> None:
        for key in task.keys:
            del self.state.tasks[key]
        request = task.request
        if request is None:
            self.state.training.pop(task.key, None)
            self._unready(task.key)
        elif self.state.requests.pop(request.name, None):
            self.state.ahead.pop(request.name, None)
            self.state.index.unfile(request)

    def _is_last_update(self, task: Task) -> bool:
        """Layers of one iteration's updates have ever longer names."""
        updates = [key for key, other in self.state.training.items() if other.label == task.label]
        return task.key == max(updates, key=lambda key: (len(key[0]), key))

    def _training_ended(self, iteration: int, at_s: float) -> Iterator[Instruction]:
        """Close exploration; rollouts of the next iteration stop, and go on in that iteration from their last step."""
        self.state.trained = max(self.state.trained, iteration)
        for request in self.state.requests.values():
            if request.can_wait:
                self.state.file(request)
        for request in self.state.ahead.values():
            if request.members and self.state.is_called_off(request) and not (request.breaking or request.planned):
                yield from self._decisions.regroup(request, at_s, "put off", AHEAD_IS_OVER)
        for task in list(self.state.unscored.values()):
            self._unready(task.key)
            self._note_ready(task)
        if self.state.rules.close_with_training:
            yield CloseExploration(iteration=iteration + 1, cause=f"training of iteration {iteration} has ended")

    # Workers

    def _joined(self, event: WorkerJoined) -> list[Instruction]:
        """A worker may join again without having left: the plugin is handed to all again if one was lost meanwhile."""
        was_there = self.state.roster.leave(event.address, expected=True) is not None
        self.state.roster.join(event)
        if event.pool != "head" and not was_there:
            self.state.journal.joined(event.at_s, event.address, event.name, event.pool)
        if self.state.stopping:
            return [StopWork(cause=f"{event.name} is ready, and the run is to stop")]
        return self._closed_before(event) if event.pool == "head" else []

    def _closed_before(self, event: WorkerJoined) -> list[Instruction]:
        """A worker beside the scheduler that comes anew must know what is closed: it is to dismiss that."""
        iteration = self.state.trained + 1
        if not self.state.is_closed(iteration):
            return []
        return [CloseExploration(iteration=iteration, cause=f"{event.name} comes anew")]

    def _available(self, event: WorkerAvailable) -> list[Instruction]:
        self.state.roster.note_available(event.address, available=event.available)
        return []

    def _left(self, event: WorkerLeft) -> list[Instruction]:
        """Told before its tasks change."""
        worker = self.state.roster.leave(event.address, expected=event.expected)
        if worker and worker.pool != "head":
            reason = "end" if self.state.stopping else "left" if worker.name in self.state.roster.leaving else "lost"
            self.state.journal.left(event.at_s, event.address, reason)
        return []

    def _noticed(self, event: WorkerNoticed) -> list[Instruction]:
        """A worker under notice gets no more work."""
        worker = self.state.roster.note_leaving(event.address)
        if worker:
            self.state.journal.event(event.at_s, "notice", worker=worker.name, reason=event.reason)
        return []

    def _silent(self, event: WorkerSilent) -> list[Instruction]:
        worker, hung = self.state.roster.workers.get(event.address), self.state.roster.hung
        if worker is None or worker.pool == "head" or event.silent_s <= self.state.rules.hang_after_s:
            return []
        if event.address in hung:
            return []
        hung.add(event.address)
        self.state.journal.event(event.at_s, "hung", worker=worker.name)
        cause = f"no sign of life for {event.silent_s:.1f} s"
        return [Evict(address=event.address, name=worker.name, cause=cause)]

    def _engine_gone(self, event: EngineGone) -> list[Instruction]:
        request, worker = self.state.requests.get(event.gang), self.state.roster.by_name.get(event.worker)
        self.state.journal.event(event.at_s, "engine lost", request=request, worker=event.worker, reason=event.reason)
        tasks = [self.state.tasks[key] for key in worker.tasks if key in self.state.tasks] if worker else []
        if worker is None or not any(task.is_gated for task in tasks):
            return []
        until_s = self.state.roster.lose_engine(worker, event.at_s)
        for task in tasks:
            if task.key in self.state.training:
                self.state.lose_engine(task, event.reason)
        cause = f"{worker.name} lost its engine {worker.engines_lost} times in a row"
        return [Wake(at_s=until_s, cause=cause)] if until_s > event.at_s else []

    # Gangs

    def _came_back(self, request: RequestState, task: Task, event: TaskChanged | TasksChanged) -> Iterator[Instruction]:
        """A member ended: its shard is done, or its worker is gone, or it handed the shard back at a step boundary."""
        address = request.members.pop(task.key, None)
        if address is None or event.state in ("memory", "erred"):
            return
        alive = address in self.state.roster.workers
        if not request.breaking:
            yield from self._break(request, event.at_s, request.names[address], gone=not alive)
        if alive:
            request.held = (*request.held, request.names[address])

    def _break(self, request: RequestState, at_s: float, member: str, *, gone: bool) -> Iterator[Instruction]:
        """End the present gang, since a member is gone or handed its shard back: the others are to leave."""
        request.breaking = True
        leaves = not self.state.roster.leaving.isdisjoint((member, *request.workers))
        agreed = request.planned or self.state.stopping or leaves
        self.state.journal.event(at_s, "leaves" if agreed else "broken", request=request, lost=member if gone else "")
        if not agreed:
            request.lose()
            enough = self.state.rules.quarantine_after
            if not request.ran and request.fruitless >= enough:  # for good, even if a new step is reported late
                request.quarantined |= request.is_to_blame(enough, self.state.able(request, at_s))
        why = f"{member} is gone" if gone else f"{member} handed its shard back"
        for address in request.members.values():  # after a leave that was agreed on they have ended already
            yield CallOff(gang=request.name, epoch=request.epoch, address=address, cause=why)

    def _beat(self, event: GangBeat) -> list[Instruction]:
        request = self.state.requests.get(event.gang)
        if request is None or request.epoch != event.epoch or not request.members:
            return []
        if event.resumed:
            request.begin(event.step, event.steps, event.at_s)
            self.state.journal.gang_event(event.at_s, "resumed", request)
            return []
        if event.step <= request.step:  # reported twice, or late
            return []
        first = request.step == request.resumed_at
        request.advance(event.step, event.at_s)
        for address in request.members.values():
            self.state.roster.note_working(address)
        if first:
            self.state.journal.gang_event(event.at_s, "stepped", request)
        return []


def differing(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Dispatch a log of events again: the rows whose instructions are not those that were given then.

    Args:
        rows: all rows of `Dispatcher.drain`, of one session after the other; other decisions are skipped.
    """
    again = Dispatcher(Rules(), logged=False)
    for given in rows:
        if given["decision"] == "dispatch rules":
            again = Dispatcher(Rules(**given["rules"]), logged=False)
        elif given["decision"] == "dispatch":
            event = event_of(given)
            if row(event, again.handle(event)).get("then") != given.get("then"):
                yield given
