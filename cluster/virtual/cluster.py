"""The virtual cluster: carries out the dispatcher's instructions on simulated workers, and reports what follows to it.

It computes graphs as the live cluster does, with the same `Dispatcher` and the same calls: each takes as long as
`Timing` says, and is then really made. It decides nothing, and knows of a graph only what its layers' annotations say.

Invariants: a worker runs one task at a time; a gang takes its steps together; a step that was committed stays, and
one in flight goes with any member of its gang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, Literal

from dask.highlevelgraph import HighLevelGraph

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    CloseGates,
    Dismiss,
    Dismissals,
    Event,
    Evict,
    GraphCame,
    Instruction,
    Key,
    Launch,
    Regroup,
    Score,
    StopAsked,
    StopWork,
    TaskChanged,
    TasksChanged,
    TaskState,
    TimePassed,
    Train,
    Wake,
    Work,
)
from cluster.virtual.clock import VirtualClock
from cluster.virtual.executor import Executor
from cluster.virtual.gang_epochs import GangEpochs
from cluster.virtual.machines import Machines
from cluster.virtual.messages import Messages
from cluster.virtual.replacement import Keeper
from cluster.virtual.tasks import Task
from cluster.virtual.timing import Stay, Timing
from cluster.virtual.workers import VirtualWorker
from spotlight.device import signals as orders
from spotlight.records import SpotlightError, Stopped

HEAD = "head"


class VirtualCluster:
    """Workers that come and go, the graphs that they compute, and a dispatcher's view of it all.

    Args:
        run: name of the run, which the signals to its workers carry.
        dispatch: a fresh one.
        clock: goes on as graphs are computed.
        timing: how long work takes.
        stays: every worker's place, with the times at which its machine is there.
        resumes: whether a request that lost its gang goes on after its committed steps; else it begins anew.
        lag: seconds that a message of a kind takes ("result", "beat", "order", "notice"); those between one worker
            and the scheduler arrive in order, except beats. None: all arrive at once.
        copies: how often a beat arrives.
        committed: steps of each request that a store holds already.
        told: called with every event and the instructions that follow from it, before they are carried out.
        check: called whenever a moment's events have been dispatched.
    """

    def __init__(
        self,
        run: str,
        dispatch: Dispatcher,
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
        self._run, self._dispatch, self._clock, self._graph_s = run, dispatch, clock, timing.graph_s
        self._began_s = clock.now_s
        self.workers: dict[str, VirtualWorker] = {}
        """{address: worker}, of those alive."""
        self._told, self._check = told, check
        self._messages = Messages(clock, lag, copies)
        self._executor = Executor(
            clock,
            self._messages,
            timing,
            self.workers,
            resumes=resumes,
            changed=self._tasks_changed,
            failed=self._note_failure,
            ended=self._ended,
        )
        self.tasks = self._executor.tasks
        self._gangs = GangEpochs(
            run,
            clock,
            self._messages,
            {} if committed is None else committed,
            tell=self._tell,
            epoch=dispatch.state.epoch,
            finish=self._executor.finish_members,
            hand_back=self._executor.hand_back_member,
        )
        self.gang_epochs = self._gangs.all
        self.machines = Machines(
            clock,
            self._messages,
            self._executor,
            self._gangs,
            self.workers,
            hang_after_s=dispatch.state.rules.hang_after_s,
            tell=self._tell,
            gone=self._gone,
        )
        """Makes workers join, and takes them away."""
        self._changed = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._keepers: list[Keeper] = []
        self.machines.join(HEAD, "head", "", threads=4)
        self._keepers += [Keeper(self.machines, stay, clock, start_up_s=timing.start_up_s) for stay in stays]

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def _ended(self, worker: VirtualWorker) -> None:
        self.machines.leave_when_idle(worker)

    def _gone(self, worker: VirtualWorker) -> None:
        for keeper in self._keepers:
            keeper.gone(worker)

    # Graphs

    def compute(self, graph: HighLevelGraph, outputs: Sequence[Key]) -> list[Any]:
        """Compute a graph; returns the results of ``outputs``, in order.

        Raises:
            Stopped: it was stopped first.
            SpotlightError: there are no more events, and results are missing.
            Exception: what a call raised.
        """
        self._pass(self._graph_s)
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
    def now_s(self) -> float:
        return self._clock.now_s

    def close(self) -> None:
        """The driver is gone, and all workers with it; their scheduled events are cancelled."""
        self.machines.close()
        self.gang_epochs.clear()

    def stop(self) -> None:
        """Let what runs end at its next step boundary, and nothing more begin; `compute` then raises `Stopped`."""
        self._stopping = True
        self._tell(StopAsked(at_s=self._clock.now_s))

    def _pass(self, seconds: float) -> None:
        """Let so many seconds pass, with all events in them."""
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
            if self._dispatch.state.outlasted:
                raise SpotlightError(self._dispatch.state.outlasted)
            if done():
                return
            if self._clock.next_s is None:
                raise SpotlightError(self._why_nothing_happens())
            step = self._clock.step
            while step():
                pass

    def _settle(self) -> None:
        """Tell the dispatcher all events of a moment, then carry out what it decides."""
        while self._changed:
            self._changed = False
            self._tell_steps()
            self._tell(TimePassed(at_s=self._clock.now_s))

    def _tell_steps(self) -> None:
        """Tell the dispatcher how far gangs are, if idle workers could make them wider."""
        names = self._dispatch.state.widenable()
        self._gangs.tell_steps([self.gang_epochs[name] for name in names if name in self.gang_epochs])

    def _why_nothing_happens(self) -> str:
        now = self._dispatch.state.snapshot()
        pools = ", ".join(now.waiting_for) or "that they may use"
        another = (
            "let another pool do it (strategy.rollout_pools, strategy.train_pools)"
            if self._dispatch.state.rules.reserved_computes
            else "give the reserved workers a GPU (pools.reserved.gpu)"
        )
        return (
            f"nothing happens any more after {self._clock.now_s - self._began_s:.0f} s: what is left waits for "
            f"workers of the pools {pools}, and none will come; {another}, or extend the pool's trace"
        )

    def _abandon(self, tasks: Iterable[Task]) -> None:
        """The graph is done: workers that still run tasks of it are free again."""
        tasks = list(tasks)
        for forming in list(self.gang_epochs.values()):
            self._gangs.commit(forming)
            self._gangs.dissolve(forming)
        for worker in self.workers.values():
            worker.drop_all()
            worker.queue.clear()
        self.tasks.forget(tasks)

    # The dispatcher

    def _tell(self, event: Event) -> None:
        if self.machines.is_closed:
            return
        instructions = self._dispatch.handle(event)
        if self._told:
            self._told(event, instructions)
        if instructions:
            self._do(instructions)
        if not isinstance(event, TimePassed):
            self._changed = True

    def _tasks_changed(self, tasks: Sequence[Task], state: TaskState) -> None:
        match state:
            case "processing":
                self._tell_tasks(tasks, state, workers=[task.worker for task in tasks for _ in task.keys])
            case "memory" | "erred":
                for (work, _), those in groupby(tasks, lambda task: (self._work_of(task), task.pool == "update")):
                    done = list(those)
                    self._tell_tasks(done, state, work=work)
                    for task in done:
                        task.began_s = None
            case _:
                self._tell_tasks(tasks, state)
                if state in ("released", "forgotten"):
                    for task in tasks:
                        if task.given:
                            self._executor.take_back(task)

    def _work_of(self, task: Task) -> Work:
        now_s = self._clock.now_s
        start_s = now_s if task.began_s is None else task.began_s
        return Work(start_s=start_s, stop_s=now_s, dropped=type(task.result).__name__ == "Dropped")

    def _tell_tasks(
        self, tasks: Sequence[Task], state: TaskState, *, workers: Sequence[str] = (), work: Work | None = None
    ) -> None:
        """Report a new state of tasks: a single one as an event of its own, from which more may follow than from
        several."""
        now_s, first = self._clock.now_s, tasks[0]
        worker = workers[0] if workers else ""
        if len(tasks) == 1 and not first.alike:
            self._tell(TaskChanged(at_s=now_s, key=first.key, state=state, worker=worker, work=work))
            return
        keys = tuple(chain.from_iterable([task.keys for task in tasks]))
        if len(set(workers)) > 1:
            self._tell(TasksChanged(at_s=now_s, keys=keys, state=state, workers=tuple(workers), work=work))
        else:
            self._tell(TasksChanged(at_s=now_s, keys=keys, state=state, worker=worker, work=work))

    def _do(self, instructions: Iterable[Instruction]) -> None:
        now_s = self._clock.now_s
        for instruction in self._carry_out_alike(instructions):
            match instruction:
                case CloseGate():
                    self.tasks.all[instruction.key].bound = ""
                case CloseGates():
                    for key in instruction.keys:
                        self.tasks.all[key].bound = ""
                case Dismiss():
                    self._executor.dismiss([instruction])
                case Dismissals():
                    for each in instruction.one_by_one():
                        self._executor.dismiss([each])
                case Launch() | Train() | Score():
                    self._executor.begin([instruction], self._gangs)
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
                    self._clock.at(now_s, self.machines.kill, instruction.address)
                case Wake():
                    self._clock.at(instruction.at_s, self._wake)

    def _carry_out_alike(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        """Begin tasks together where possible, and end dismissed ones together; yields the other instructions.

        If messages may be late, it yields all of them: then each is carried out alone, as live.
        """
        if self._messages.are_late:
            yield from instructions
            return
        for does, some in groupby(instructions, _what_it_does):
            alike = list(some)
            if does == "begin":
                self._executor.begin([each for each in alike if isinstance(each, Launch | Train | Score)], self._gangs)
            elif does == "dismiss":
                self._executor.dismiss([each for each in alike if isinstance(each, Dismiss | Dismissals)])
            else:
                yield from alike

    def _wake(self) -> None:
        """Tell the dispatcher that time has passed. Alarms call it by name: the cluster may be closed by then."""
        self._changed = True

    def _call_off(self, order: CallOff) -> None:
        self._gangs.call_off(order.gang, order.epoch, order.address)

    def _regroup(self, order: Regroup) -> None:
        self._gangs.regroup(order.gang, order.epoch)

    # Orders to all

    def _close_exploration(self, worker: VirtualWorker, iteration: int) -> None:
        """End exploration on a worker: requests at their next step boundary, scoring at once."""
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
                worker.running[key] = self._executor.finish_after(0.0, task, worker)

    def _stop_work(self) -> None:
        for worker in self.workers.values():
            worker.signals.obey(orders.Stop(run=self._run))
        for forming in list(self.gang_epochs.values()):
            self._gangs.end_at_boundary(forming)


def _what_it_does(instruction: Instruction) -> Literal["begin", "dismiss", ""]:
    if isinstance(instruction, Launch | Train | Score):
        return "begin"
    return "dismiss" if isinstance(instruction, Dismiss | Dismissals) else ""
