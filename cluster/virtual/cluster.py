"""The virtual cluster: carries out what the dispatcher says on workers that are not there, and tells it what follows.

It computes graphs as the live cluster does, by the same `Dispatch` and the same calls: each lasts what `Timing` says,
and is then really made. It decides nothing, and it knows of a graph only what its layers' annotations say.

Invariants: a worker runs one task at a time; a gang takes its steps together; a step that was committed stays, and
one in flight goes with any member of its gang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from dask.highlevelgraph import HighLevelGraph

from cluster.dispatch import Dispatch
from cluster.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    Dismiss,
    EngineLost,
    Event,
    Evict,
    GraphCame,
    Instruction,
    Key,
    Launch,
    Regroup,
    StopAsked,
    StopWork,
    TaskChanged,
    TaskPhase,
    TasksChanged,
    TimePassed,
    Train,
    Wake,
    Work,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerPool,
    WorkerSilent,
)
from cluster.virtual.clock import VirtualClock
from cluster.virtual.formings import Forming, Formings
from cluster.virtual.keepers import Keeper
from cluster.virtual.messages import Messages
from cluster.virtual.tasks import Task, Tasks
from cluster.virtual.timing import Fixed, Stay, Timing
from cluster.virtual.workers import VirtualWorker
from spotlight.device import signals as orders
from spotlight.device.signals import Leave, signals
from spotlight.records import Placement, SpotlightError, Stopped, Surplus

HEAD = "head"
BACK_OFF_S = 0.01
"""Before a task is handed back; as live, so that the scheduler sees why first."""
WATCH_S = 0.5
"""How often the scheduler looks for silent workers; as live."""
LEAVE_POLL_S = 0.01
"""How often a worker under notice looks whether it is idle; as live."""
CLOSE_MARGIN_S = 2.0
"""Left of a notice's time for handing over results; as live."""


class VirtualCluster:
    """Workers that come and go, the graphs that they compute, and a dispatcher's view of it all.

    Args:
        run: name of the run, which the signals to its workers carry.
        dispatch: a fresh one.
        clock: goes on as graphs are computed.
        timing: how long work takes.
        stays: every worker's place.
        resumes: whether a request that lost its gang goes on after its committed steps; else it begins anew.
        lag: seconds that a message of a kind is on its way ("result", "beat", "order", "notice"); those between
            one worker and the scheduler arrive in order, but for beats. None: all arrive at once.
        copies: how often a beat arrives.
        committed: steps of each request that a store holds from before.
        told: called with every event and the instructions that follow from it, before they are carried out.
        check: called whenever a moment's events have been dispatched.
    """

    def __init__(
        self,
        run: str,
        dispatch: Dispatch,
        clock: VirtualClock,
        timing: Timing,
        stays: Iterable[Stay],
        *,
        resumes: bool = True,
        lag: Callable[[str], float] | None = None,
        copies: Callable[[], int] = lambda: 1,
        committed: dict[str, int] | None = None,
        told: Callable[[Event, list[Instruction]], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._dispatch, self._clock, self._timing = run, dispatch, clock, timing
        self._resumes = resumes
        self.tasks = Tasks(self._tasks_changed, self._choose)
        self.workers: dict[str, VirtualWorker] = {}
        """Alive, by address."""
        self._told, self._check = told, check
        self._messages = Messages(clock, lag, copies)
        self._gangs = Formings(
            run,
            clock,
            self._messages,
            {} if committed is None else committed,
            tell=self._tell,
            epoch=dispatch.epoch,
            finish=self._finish_member,
            hand_back=self._hand_back_member,
        )
        self.formings = self._gangs.all
        self._changed = False
        self._stopping = self._closed = False
        self._failure: BaseException | None = None
        self._joins = 0
        self._keepers: list[Keeper] = []
        self._join(HEAD, "head", "", threads=4)
        self._keepers += [Keeper(self, stay, clock, start_up_s=timing.start_up_s) for stay in stays]

    # Graphs

    def compute(self, graph: HighLevelGraph, outputs: Sequence[Key]) -> list[Any]:
        """Results of these keys of a graph, when they are there.

        Raises:
            Stopped: it was stopped first.
            SpotlightError: nothing happens any more, and they are not there.
            Exception: what a call raised.
        """
        self._pass(self._timing.graph_s)
        added = self.tasks.add(graph, outputs)
        self._tell(GraphCame(at_s=self._clock.now_s, layers=self.tasks.layers(graph)))
        self.tasks.begin(added)
        wanted = [self.tasks.all[key] for key in outputs]
        try:
            self._advance(lambda: all(task.state == "memory" for task in wanted))
            self._gangs.forget_earlier()
            return [task.result for task in wanted]
        finally:
            self._abandon(added)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def close(self) -> None:
        """The driver is gone, and every worker with it; nothing that was to happen to them happens."""
        self._closed = True
        for worker in list(self.workers.values()):
            worker.alive = False
            for alarm in worker.running.values():
                if alarm:
                    alarm.cancel()
            worker.running.clear()
            worker.reports.clear()
        self.workers.clear()
        self.formings.clear()

    def stop(self) -> None:
        """Let what runs end at its next step boundary, and nothing more begin; `compute` then raises `Stopped`."""
        self._stopping = True
        self._tell(StopAsked(at_s=self._clock.now_s))

    def _pass(self, seconds: float) -> None:
        """Let time go by, whatever happens meanwhile."""
        until_s = self._clock.now_s + seconds
        self._clock.at(until_s, self._wake)
        self._advance(lambda: self._clock.now_s >= until_s)

    def _advance(self, done: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._stopping and not any(worker.running for worker in self.workers.values()):
                raise Stopped
            self._settle()
            self._check()
            if done():
                return
            if self._clock.next_s is None:
                raise SpotlightError(self._why_nothing_happens())
            step = self._clock.step
            while step():
                pass

    def _settle(self) -> None:
        """All events of a moment are told before anything is decided."""
        while self._changed:
            self._changed = False
            self._tell_steps()
            self._tell(TimePassed(at_s=self._clock.now_s))

    def _tell_steps(self) -> None:
        """How far gangs are, where idle workers could make them wider."""
        for name in self._dispatch.widenable():
            if name in self.formings:
                self._gangs.tell_step(self.formings[name])

    def _why_nothing_happens(self) -> str:
        now = self._dispatch.snapshot()
        return (
            f"nothing happens any more after {self._clock.now_s:.0f} s: {now.waiting} requests wait for workers of the "
            f"pools {', '.join(now.waiting_for) or 'that they may use'}, and none will come; let another pool run them "
            "(strategy.rollout_pools), or extend the pool's trace"
        )

    def _abandon(self, tasks: Iterable[Task]) -> None:
        """The graph is over: whoever runs something of it is free again."""
        tasks = list(tasks)
        for forming in list(self.formings.values()):
            self._gangs.commit(forming)
            self._gangs.dissolve(forming)
        for worker in self.workers.values():
            for alarm in worker.running.values():
                if alarm:
                    alarm.cancel()
            worker.running.clear()
            worker.reports.clear()
            worker.queue.clear()
            worker.results.clear()
        self.tasks.forget(tasks)

    # The dispatcher

    def _tell(self, event: Event) -> None:
        if self._closed:
            return
        instructions = self._dispatch.handle(event)
        if self._told:
            self._told(event, instructions)
        if instructions:
            self._do(instructions)
        if not isinstance(event, TimePassed):
            self._changed = True

    def _tasks_changed(self, tasks: Sequence[Task], state: TaskPhase) -> None:
        if len(tasks) == 1 and not tasks[0].alike:
            self._task_changed(tasks[0], state)
            return
        now_s = self._clock.now_s
        keys = _keys(tasks)
        match state:
            case "processing":
                self._tell(TasksChanged(at_s=now_s, keys=keys, state=state, worker=tasks[0].worker))
            case "memory":
                for dropped, alike in groupby(tasks, _is_dropped):
                    work = Work(start_s=now_s, stop_s=now_s, dropped=dropped)
                    self._tell(TasksChanged(at_s=now_s, keys=_keys(alike), state=state, work=work))
                self.workers[tasks[0].worker].results |= dict.fromkeys(keys)
            case _:
                self._tell(TasksChanged(at_s=now_s, keys=keys, state=state))
                if state in ("released", "forgotten"):
                    for task in tasks:
                        if task.given or task.worker:
                            self._let_go(task)

    def _task_changed(self, task: Task, state: TaskPhase) -> None:
        now_s, key = self._clock.now_s, task.key
        match state:
            case "processing":
                self._tell(TaskChanged(at_s=now_s, key=key, state=state, worker=task.worker))
                self._enqueue(task)
            case "memory" | "erred":
                start_s, task.began_s = now_s if task.began_s is None else task.began_s, None
                work = Work(start_s=start_s, stop_s=now_s, dropped=_is_dropped(task))
                self._tell(TaskChanged(at_s=now_s, key=key, state=state, work=work))
                if state == "memory" and task.worker in self.workers:
                    self.workers[task.worker].results[key] = None
            case _:
                self._tell(TaskChanged(at_s=now_s, key=key, state=state))
                if state in ("released", "forgotten"):
                    self._let_go(task)

    def _let_go(self, task: Task) -> None:
        """No worker has it or its result any more."""
        task.began_s = None
        if task.given:
            self._take_back(task)
        worker = self.workers.get(task.worker)
        if worker:
            for key in task.keys:
                worker.results.pop(key, None)

    def _take_back(self, task: Task) -> None:
        """Nobody asks for it any more, or its inputs are lost: its worker ends it."""
        worker, task.given = self.workers.get(task.given), ""
        if worker is None:
            return
        for key in task.keys:
            if key in worker.running or key in worker.queue:
                alarm = worker.running.pop(key, None)
                worker.reports.pop(key, None)
                if alarm:
                    alarm.cancel()
                with suppress(ValueError):
                    worker.queue.remove(key)
                self._clock.after(0.0, self._begin_next, worker)

    def _do(self, instructions: Iterable[Instruction]) -> None:
        now_s = self._clock.now_s
        dismissed: list[Dismiss] = []
        for instruction in instructions:
            if isinstance(instruction, Dismiss) and not self._messages.are_late:
                dismissed.append(instruction)
                continue
            if dismissed:
                self._dismiss_together(dismissed)
                dismissed = []
            match instruction:
                case Launch():
                    for member in instruction.members:
                        self._place(member.address, instruction.gang, member.shard, member.place)
                    for member in instruction.members:
                        self._open_gate(member.key, member.address)
                    self._form(instruction)
                case CloseGate():
                    self.tasks.all[instruction.key].bound = ""
                case Dismiss():
                    self._dismiss(instruction)
                case Train():
                    self._open_gate(instruction.key, instruction.address)
                case CallOff():
                    self._messages.send("order", instruction.address, self._call_off, instruction)
                case Regroup():
                    self._messages.send("order", instruction.address, self._regroup, instruction)
                case CloseExploration():
                    for worker in self.workers.values():
                        self._messages.send(
                            "order", worker.address, self._close_exploration, worker, instruction.iteration
                        )
                case StopWork():
                    self._stop_work()
                case Evict():
                    self._clock.at(now_s, self.kill, instruction.address)
                case Wake():
                    self._clock.at(instruction.at_s, self._wake)
        if dismissed:
            self._dismiss_together(dismissed)

    def _dismiss(self, dismiss: Dismiss) -> None:
        if dismiss.tell is not None:
            self._place(dismiss.address, dismiss.gang, dismiss.shard, dismiss.tell)
        self._open_gate(dismiss.key, dismiss.address)

    def _dismiss_together(self, dismissed: Sequence[Dismiss]) -> None:
        """They have nothing to do, so they take no time, and no thread from each other."""
        if len(dismissed) == 1:
            self._dismiss(dismissed[0])
            return
        head = self.workers[dismissed[0].address]
        told = {dismiss.key for dismiss in dismissed}
        tasks: dict[Task, None] = {}
        for dismiss in dismissed:
            task = self.tasks.all[dismiss.key]
            if task in tasks:
                continue
            if task.alike and not told.issuperset(task.alike):
                task = self.tasks.alone(dismiss.key)
            tasks[task] = None
            if dismiss.tell is not None:
                head.places[dismiss.gang, dismiss.shard] = dismiss.tell
            task.bound = task.given = head.address
            head.running.update(dict.fromkeys(task.keys))
        self.tasks.start_together(list(tasks), head.address)
        self._clock.after(0.0, self._end_together, list(tasks), head)

    def _end_together(self, tasks: Sequence[Task], head: VirtualWorker) -> None:
        done: list[Task] = []
        results: list[Any] = []
        with signals.standing_in_for(head.signals):
            for task in tasks:
                if task.key not in head.running or task.state != "processing":
                    continue
                for key in task.keys:
                    del head.running[key]
                try:
                    results.append(self._call_here(task, head))
                    done.append(task)
                except Exception as error:
                    for key in task.keys:
                        self.tasks.fail(self.tasks.alone(key), error)
                    self._failure = error
        if done:
            self.tasks.finish_together(done, results)

    def _open_gate(self, key: Key, address: str) -> None:
        task = self.tasks.alone(key)
        task.bound = address
        self.tasks.start(task, address)

    def _place(self, address: str, gang: str, shard: int, place: Placement | Surplus | int) -> None:
        self.workers[address].places[gang, shard] = place

    def _wake(self) -> None:
        """Time has passed; to be asked for by name, since the cluster that asks may be closed by then."""
        self._changed = True

    # Workers come and go

    def _join(self, name: str, pool: WorkerPool, node: str, *, threads: int = 1) -> VirtualWorker:
        self._joins += 1
        address = f"virtual://{name}#{self._joins}"
        worker = VirtualWorker(address=address, name=name, pool=pool, node=node, threads=threads)
        self.workers[address] = worker
        self._tell(WorkerJoined(at_s=self._clock.now_s, address=address, name=name, pool=pool, node=node))
        self.tasks.place_unplaced()
        return worker

    def join(self, name: str, pool: WorkerPool, node: str) -> VirtualWorker:
        """A worker comes."""
        return self._join(name, pool, node)

    def kill(self, address: str) -> None:
        """A worker is gone at once, with what it was doing and the results that it had."""
        worker = self.workers.get(address)
        if worker:
            self._remove(worker, expected=False)

    def freeze(self, address: str) -> None:
        """A worker stops where it is; after a while without a sign of life it is ended."""
        worker = self.workers.get(address)
        if worker is None or worker.frozen:
            return
        worker.frozen = True
        for forming in self._gangs.of(worker):
            self._gangs.halt(forming)
        for alarm in worker.running.values():
            if alarm:
                alarm.cancel()
        silent_s = self._dispatch.rules.hang_after_s + WATCH_S
        self._clock.after(silent_s, self.suspect, address, silent_s)

    def suspect(self, address: str, silent_s: float) -> None:
        """The scheduler has not heard of a worker for so long."""
        if address in self.workers:
            self._tell(WorkerSilent(at_s=self._clock.now_s, address=address, silent_s=silent_s))

    def pause(self, address: str, seconds: float) -> None:
        """A worker begins nothing for a while; what it runs goes on."""
        worker = self.workers.get(address)
        if worker is None or worker.paused or worker.pool == "head":
            return
        worker.paused = True
        self._tell(WorkerAvailable(at_s=self._clock.now_s, address=address, available=False))
        self._clock.after(seconds, self._unpause, worker)

    def _unpause(self, worker: VirtualWorker) -> None:
        worker.paused = False
        if worker.alive:
            self._tell(WorkerAvailable(at_s=self._clock.now_s, address=worker.address, available=True))
            self._begin_next(worker)
            self.tasks.place_unplaced()

    def notice(self, address: str, grace_s: float, reason: str = "the machine will be taken away") -> None:
        """A worker learns that it will be taken away: it ends at its next step boundary, hands over, and leaves."""
        worker = self.workers.get(address)
        if worker is None or worker.leaving or worker.frozen:
            return
        worker.leaving = True
        worker.signals.obey(Leave())
        self._messages.send("notice", address, self._tell_notice, address, reason)
        self._clock.after(grace_s, self.kill, address)
        for forming in self._gangs.of(worker):
            self._gangs.end_at_boundary(forming)
        self._clock.after(max(0.0, grace_s - CLOSE_MARGIN_S), self._leave, worker)
        self._leave_when_idle(worker)

    def _tell_notice(self, address: str, reason: str) -> None:
        self._tell(WorkerNoticed(at_s=self._clock.now_s, address=address, reason=reason))

    def lose_engine(self, address: str, reason: str = "it was killed") -> None:
        """The process that does a worker's work dies: what it was doing is to be done again."""
        worker = self.workers.get(address)
        if worker is None or worker.frozen or worker.pool == "head":
            return
        formings = self._gangs.of(worker)
        name = formings[0].name if formings else ""
        self._tell(EngineLost(at_s=self._clock.now_s, worker=worker.name, gang=name, reason=reason))
        for forming in formings:
            self._gangs.halt(forming)
        for key in [key for key in worker.running if key not in worker.reports]:
            for forming in formings:
                forming.members.pop(key, None)
            self._clock.after(BACK_OFF_S, self._hand_back, self.tasks.all[key], worker)
        for forming in formings:
            if not forming.members:
                self._gangs.dissolve(forming)

    def _leave_when_idle(self, worker: VirtualWorker) -> None:
        if worker.leaving and worker.alive and not worker.running:
            self._clock.after(LEAVE_POLL_S, self._leave, worker)

    def _leave(self, worker: VirtualWorker) -> None:
        """Hand over all results, and go."""
        if not worker.alive or worker.frozen:
            return
        heirs = [other for other in self.workers.values() if other.pool != "head" and not other.leaving]
        heir = next((other for other in heirs if other.pool == "reserved"), next(iter(heirs), None))
        if heir:
            for key in worker.results:
                self.tasks.all[key].worker = heir.address
            heir.results |= worker.results
            worker.results.clear()
        self._remove(worker, expected=True)

    def _remove(self, worker: VirtualWorker, *, expected: bool) -> None:
        worker.alive = False
        del self.workers[worker.address]
        now_s = self._clock.now_s
        for forming in self._gangs.of(worker):
            self._gangs.halt(forming)
        self._tell(WorkerLeft(at_s=now_s, address=worker.address, expected=expected))
        for alarm in worker.running.values():
            if alarm:
                alarm.cancel()
        had = [*worker.running, *worker.queue]
        worker.running.clear()
        worker.reports.clear()
        worker.queue.clear()
        for key in had:
            for forming in self._gangs.of(worker):
                forming.members.pop(key, None)
        for key in worker.results:
            task = self.tasks.all.get(key)
            if task is not None and task.state == "memory" and task.worker == worker.address:
                self.tasks.lose(task)
        for key in had:
            task = self.tasks.all.get(key)
            if task is not None and task.state == "processing" and task.worker == worker.address:
                self.tasks.hand_back(task)
        for name in [name for name, forming in self.formings.items() if not forming.members]:
            del self.formings[name]
        for keeper in self._keepers:
            keeper.gone(worker)

    # Work

    def _choose(self, task: Task) -> str:
        """As Dask chooses: the one that it is bound to; else where its inputs are; else the least busy one."""
        if task.bound:
            only = self.workers.get(task.bound)
            return task.bound if only and not only.paused else ""
        holders = dict.fromkeys([needed.worker for needed in task.inputs])
        near = [self.workers[address] for address in holders if address in self.workers]
        for workers in (near, self.workers.values()):
            able = [worker for worker in workers if worker.can(task.needs) and not (worker.leaving or worker.paused)]
            if able:
                return min(able, key=lambda worker: worker.load).address
        return ""

    def _enqueue(self, task: Task) -> None:
        worker = self.workers.get(task.worker)
        if worker:
            task.given = worker.address
            worker.queue.append(task.key)
            if not worker.frozen:
                self._begin_next(worker)

    def _begin_next(self, worker: VirtualWorker) -> None:
        while worker.queue and len(worker.running) < worker.threads and worker.can_begin:
            key = worker.queue.popleft()
            task = self.tasks.all.get(key)
            if task is None or task.state != "processing" or task.worker != worker.address:
                continue
            worker.running[key] = None
            worker.reports.pop(key, None)
            task.began_s = self._clock.now_s
            if not isinstance(worker.places.get(self._shard_of(task)), Placement):
                seconds = self._seconds(task, worker)
                worker.running[key] = self._clock.after(seconds, self._finish, task, worker)

    def _seconds(self, task: Task, worker: VirtualWorker) -> float:
        """Of a task that no gang runs: a shard without a place has nothing to do."""
        if self._shard_of(task)[0]:
            return 0.0
        work = self._timing.work(task.call[0], self.tasks.arguments(task))
        assert isinstance(work, Fixed), f"{task.key} denoises and is no shard"
        return work.seconds

    @staticmethod
    def _shard_of(task: Task) -> tuple[str, int]:
        """Of a shard, the name of its request within the graph, and its number: the last arguments of its call."""
        if task.gated and len(task.call) > 3 and isinstance(task.call[-2], str):
            return task.call[-2], task.call[-1]
        return "", 0

    def _finish(self, task: Task, worker: VirtualWorker) -> None:
        """Its time is over: have its result arrive."""
        worker.reports[task.key] = report = object()
        self._messages.send("result", worker.address, self._arrive, task, worker, report)

    def _arrive(self, task: Task, worker: VirtualWorker, report: object) -> None:
        """Make the call, unless the worker is gone, gave the task back, or has begun it anew since."""
        if task.key not in worker.running or worker.reports.get(task.key) is not report:
            return
        del worker.running[task.key], worker.reports[task.key]
        if task.state != "processing" or task.worker != worker.address:
            self._begin_next(worker)
            return
        try:
            result = self._call(task, worker)
        except Stopped as stopped:
            self.tasks.fail(task, stopped)
            self._failure = stopped
        except Exception as error:
            self.tasks.fail(task, error)
            self._failure = error
        else:
            self.tasks.finish(task, result)
        self._begin_next(worker)
        self._leave_when_idle(worker)

    def _call(self, task: Task, worker: VirtualWorker) -> Any:
        with signals.standing_in_for(worker.signals):
            return self._call_here(task, worker)

    def _call_here(self, task: Task, worker: VirtualWorker) -> Any:
        """In the place of the worker."""
        name, shard = self._shard_of(task)
        told = worker.places.pop((name, shard), None)
        if isinstance(told, Placement):  # a gang's first rank does it all; there is one process
            told = Placement(gang=name, epoch=told.epoch, rank=0, width=1) if told.rank == 0 else Surplus()
        if told is not None:
            signals.place(name, shard, told)
        return task.call[0](*self.tasks.arguments(task))

    def _hand_back(self, task: Task, worker: VirtualWorker) -> None:
        """A shard ends without a result, a moment after it was told to."""
        alarm = worker.running.pop(task.key, None)
        if alarm:
            alarm.cancel()
        if task.state == "processing" and task.worker == worker.address:
            worker.places.pop(self._shard_of(task), None)
            self.tasks.hand_back(task)
        self._begin_next(worker)
        self._leave_when_idle(worker)

    # Gangs

    def _form(self, launch: Launch) -> None:
        first = self.tasks.all[launch.members[0].key]
        members = {member.key: self.workers[member.address] for member in launch.members}
        leader = members[first.key]
        work = self._timing.work(first.call[0], self.tasks.arguments(first))
        if isinstance(work, Fixed):
            for key, worker in members.items():
                if key in worker.running:  # else it is about to leave
                    worker.running[key] = self._clock.after(work.seconds, self._finish, self.tasks.all[key], worker)
            return
        width = len(members)
        overhead_s = self._timing.launch_s + (self._timing.form_s if width > 1 else 0.0)
        forming = Forming(
            name=launch.gang,
            epoch=launch.members[0].place.epoch,
            work=work,
            members=members,
            step_s=self._timing.step_s(work.samples, width, "spot" if leader.pool == "spot" else "reserved"),
            first=self._gangs.committed.get(work.request, 0) if self._resumes else 0,
            from_s=self._clock.now_s + overhead_s,
            explores=first.phase.startswith("explore"),
            width=width,
        )
        self._gangs.begin(forming)

    def _call_off(self, order: CallOff) -> None:
        self._gangs.call_off(order.gang, order.epoch, order.address)

    def _regroup(self, order: Regroup) -> None:
        self._gangs.regroup(order.gang, order.epoch)

    def _finish_member(self, key: Key, worker: VirtualWorker) -> None:
        self._finish(self.tasks.all[key], worker)

    def _hand_back_member(self, key: Key, worker: VirtualWorker) -> None:
        self._clock.after(BACK_OFF_S, self._hand_back, self.tasks.all[key], worker)

    # Orders to all

    def _close_exploration(self, worker: VirtualWorker, iteration: int) -> None:
        """Requests under way end at their next step boundary, and what is scored of them at once."""
        worker.signals.obey(orders.CloseExploration(run=self._run, iteration=iteration))
        if worker.frozen or not worker.alive:
            return
        for forming in self._gangs.of(worker):
            if forming.explores:
                self._gangs.drop_at_boundary(forming)
        for key, alarm in list(worker.running.items()):
            task = self.tasks.all[key]
            if alarm and task.phase.startswith("explore-score"):
                alarm.cancel()
                worker.running[key] = self._clock.after(0.0, self._finish, task, worker)

    def _stop_work(self) -> None:
        for worker in self.workers.values():
            worker.signals.obey(orders.Stop(run=self._run))
        for forming in list(self.formings.values()):
            self._gangs.end_at_boundary(forming)


def _keys(tasks: Iterable[Task]) -> tuple[Key, ...]:
    return tuple([key for task in tasks for key in task.keys])


def _is_dropped(task: Task) -> bool:
    return type(task.result).__name__ == "Dropped"
