"""Tasks on virtual workers: each begins, takes as long as `Timing` says, and is then really called, or is handed back.

It is told what runs where, and decides only what Dask's scheduler does: where a task without a gate goes.

Invariant: a worker runs no more tasks than it has threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from cluster.dispatch.events import Dismiss, Dismissals, Key, Launch, Score, TaskState, Train
from cluster.virtual.clock import Alarm, VirtualClock
from cluster.virtual.gang_epochs import GangEpoch, GangEpochs
from cluster.virtual.messages import Messages
from cluster.virtual.tasks import Task, Tasks, parts
from cluster.virtual.timing import Denoising, Fixed, Timing
from cluster.virtual.workers import VirtualWorker
from spotlight.device.signals import signals
from spotlight.records import Placement, Surplus

BACK_OFF_S = 0.01
"""Pause before a task is handed back; as live, so that the scheduler learns the cause first."""


class Executor:
    """The tasks of graphs, on workers.

    Args:
        resumes: whether a request that lost its gang goes on after its committed steps; else it begins anew.
        changed: called with tasks whose state has changed.
        failed: called with what a call raised.
        ended: called with a worker that has ended a task.
    """

    def __init__(
        self,
        clock: VirtualClock,
        messages: Messages,
        timing: Timing,
        workers: dict[str, VirtualWorker],
        *,
        resumes: bool,
        changed: Callable[[Sequence[Task], TaskState], None],
        failed: Callable[[BaseException], None],
        ended: Callable[[VirtualWorker], None],
    ) -> None:
        self._clock, self._messages, self._timing, self._workers = clock, messages, timing, workers
        self._resumes, self._failed, self._ended = resumes, failed, ended
        self.tasks = Tasks(changed, self._choose, self._enqueue)

    # Where

    def _choose(self, task: Task) -> str:
        """The worker that Dask would choose: the one that it is bound to; else where its inputs are; else the least
        busy one."""
        if task.bound:
            only = self._workers.get(task.bound)
            return task.bound if only and not only.paused else ""
        holders = dict.fromkeys([needed.worker for needed in parts(task.inputs)])
        near = [self._workers[address] for address in holders if address in self._workers]
        for workers in (near, self._workers.values()):
            able = [worker for worker in workers if worker.can(task.needs) and not (worker.leaving or worker.paused)]
            if able:
                return min(able, key=lambda worker: worker.load).address
        return ""

    def _enqueue(self, task: Task) -> None:
        worker = self._workers.get(task.worker)
        if worker:
            task.given = worker.address
            worker.queue.append(task.key)
            if not worker.frozen:
                self.begin_next(worker)

    def _tell_place(self, address: str, gang: str, shard: int, place: Placement | Surplus | int) -> None:
        self._workers[address].places[gang, shard] = place

    def _open_gate(self, key: Key, address: str) -> None:
        task = self.tasks.alone(key)
        task.bound = address
        self.tasks.start(task, address)

    # From begin to end

    def begin_next(self, worker: VirtualWorker) -> None:
        while worker.queue and len(worker.running) < worker.threads and worker.can_begin:
            key = worker.queue.popleft()
            task = self.tasks.all.get(key)
            if task is None or task.state != "processing" or task.worker != worker.address:
                continue
            worker.running[key] = None
            worker.reports.pop(key, None)
            task.began_s = self._clock.now_s
            if not isinstance(worker.places.get(task.shard), Placement):
                seconds = self._seconds(task, worker)
                worker.running[key] = self.finish_after(seconds, task, worker)

    def finish_after(self, seconds: float, task: Task, worker: VirtualWorker) -> Alarm:
        """Schedule the end of a task that its worker has begun."""
        return self._clock.together(self._clock.now_s + seconds, self._finish, (task, worker))

    def _seconds(self, task: Task, worker: VirtualWorker) -> float:
        """Duration of a task that no gang runs: 0 for a shard without a place, or a dismissed one."""
        if task.shard[0] or (task.gated and worker.pool == "head"):
            return 0.0
        work = self._timing.work(task.call[0], lambda: self.tasks.arguments(task))
        assert isinstance(work, Fixed), f"{task.key} denoises and is no shard"
        return work.seconds

    def _finish(self, ended: Iterable[tuple[Task, VirtualWorker]]) -> None:
        """Tasks have taken their time: send their results."""
        reports = []
        for task, worker in ended:
            worker.reports[task.key] = report = object()
            if self._messages.are_late:
                self._messages.send("result", worker.address, self._arrive, [(task, worker, report)])
            else:
                reports.append((task, worker, report))
        self._arrive(reports)

    def _arrive(self, reports: Sequence[tuple[Task, VirtualWorker, object]]) -> None:
        """Make the calls, except those whose workers are gone, gave the task back, or have begun it again since."""
        done: list[Task] = []
        results: list[Any] = []
        workers: list[VirtualWorker] = []
        for task, worker, report in reports:
            if task.key not in worker.running or worker.reports.get(task.key) is not report:
                continue
            del worker.running[task.key], worker.reports[task.key]
            workers.append(worker)
            if task.state != "processing" or task.worker != worker.address:
                continue
            task.given = ""
            try:
                results.append(self._call(task, worker))
                done.append(task)
            except Exception as error:
                self.tasks.fail(task, error)
                self._failed(error)
        self.tasks.finish(done, results)
        for worker in workers:
            self.begin_next(worker)
            self._ended(worker)

    def _call(self, task: Task, worker: VirtualWorker) -> Any:
        with signals.standing_in_for(worker.signals):
            return self._call_here(task, worker)

    def _call_here(self, task: Task, worker: VirtualWorker) -> Any:
        """Make a task's call in this process, in place of the worker."""
        name, shard = task.shard
        told = worker.places.pop((name, shard), None)
        if isinstance(told, Placement):  # a gang's first rank does it all; there is one process
            told = Placement(gang=name, epoch=told.epoch, rank=0, width=1) if told.rank == 0 else Surplus()
        if told is not None:
            signals.place(name, shard, told)
        return task.call[0](*self.tasks.arguments(task))

    def hand_back(self, task: Task, worker: VirtualWorker) -> None:
        """A shard ends without a result, a moment after it was told to."""
        alarm = worker.running.pop(task.key, None)
        if alarm:
            alarm.cancel()
        if task.state == "processing" and task.worker == worker.address:
            worker.places.pop(task.shard, None)
            self.tasks.hand_back(task)
        self.begin_next(worker)
        self._ended(worker)

    # No more

    def take_back(self, task: Task) -> None:
        """End a task on its worker, since it is no longer needed, or its inputs are lost."""
        task.began_s = None
        worker, task.given = self._workers.get(task.given), ""
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
                self._clock.after(0.0, self.begin_next, worker)

    # Dismissed

    def _dismiss_alone(self, dismiss: Dismiss) -> None:
        if dismiss.tell is not None:
            self._tell_place(dismiss.address, dismiss.gang, dismiss.shard, dismiss.tell)
        self._open_gate(dismiss.key, dismiss.address)
        self.tasks.flush()

    def dismiss(self, dismissed: Sequence[Dismiss | Dismissals]) -> None:
        """End dismissed shards. They have nothing to do, so they take no time and no thread."""
        if len(dismissed) == 1 and isinstance(dismissed[0], Dismiss):
            self._dismiss_alone(dismissed[0])
            return
        head = self._workers[dismissed[0].address]
        tasks: dict[Task, None] = {}
        for dismiss in dismissed:
            for task, shard in self._dismissed(dismiss):
                tasks[task] = None
                if dismiss.tell is not None:
                    head.places[dismiss.gang, shard] = dismiss.tell
                task.bound = task.given = head.address
                head.running.update(dict.fromkeys(task.keys))
        self.tasks.start_together(list(tasks), head.address)
        self._clock.after(0.0, self._end_together, list(tasks), head)

    def _dismissed(self, dismiss: Dismiss | Dismissals) -> list[tuple[Task, int]]:
        """The dismissed tasks, each with the number of its shard, or of the first one that it stands for."""
        if isinstance(dismiss, Dismiss):
            return [(self.tasks.alone(dismiss.key), dismiss.shard)]
        task = self.tasks.all[dismiss.keys[0]]
        if tuple(task.alike) == dismiss.keys:
            return [(task, dismiss.first)]
        return [(self.tasks.alone(key), shard) for shard, key in enumerate(dismiss.keys, dismiss.first)]

    def _end_together(self, tasks: Sequence[Task], head: VirtualWorker) -> None:
        done: list[Task] = []
        results: list[Any] = []
        with signals.standing_in_for(head.signals):
            for task in tasks:
                if task.key not in head.running or task.state != "processing":
                    continue
                for key in task.keys:
                    del head.running[key]
                task.given = ""
                try:
                    results.append(self._call_here(task, head))
                    done.append(task)
                except Exception as error:
                    for key in task.keys:
                        self.tasks.fail(self.tasks.alone(key), error)
                    self._failed(error)
        self.tasks.finish(done, results)
        self.begin_next(head)

    # Gangs

    def begin(self, instructions: Sequence[Launch | Train | Score], gangs: GangEpochs) -> None:
        """Start tasks behind the gate: the shards of a gang all at once, other tasks each by itself."""
        launches = [instruction for instruction in instructions if isinstance(instruction, Launch)]
        for launch in launches:
            for member in launch.members:
                self._tell_place(member.address, launch.gang, member.shard, member.place)
                self.tasks.alone(member.key)
        for instruction in instructions:
            if isinstance(instruction, Launch):
                for member in instruction.members:
                    self._open_gate(member.key, member.address)
            else:
                self._open_gate(instruction.key, instruction.address)
        self.tasks.flush()
        for launch in launches:
            self._form(launch, gangs)

    def _form(self, launch: Launch, gangs: GangEpochs) -> None:
        """Start the shards of a gang on its members."""
        first = self.tasks.all[launch.members[0].key]
        members = {member.key: self._workers[member.address] for member in launch.members}
        leader = members[first.key]
        work = self._timing.work(first.call[0], lambda: self.tasks.arguments(first))
        if isinstance(work, Fixed):
            for key, worker in members.items():
                if key in worker.running:  # else it is about to leave
                    worker.running[key] = self.finish_after(work.seconds, self.tasks.all[key], worker)
            return
        width = len(members)
        overhead_s = self._timing.launch_s + (self._timing.form_s if width > 1 else 0.0)
        begun = gangs.committed.get(work.request, 0) if self._resumes else 0
        step_s = self._step_s(work, width, leader)
        if 0 < begun < work.steps:
            overhead_s += work.passes_to_resume * step_s
        forming = GangEpoch(
            name=launch.gang,
            epoch=launch.members[0].place.epoch,
            work=work,
            members=members,
            step_s=step_s,
            first=begun,
            from_s=self._clock.now_s + overhead_s,
            explores=first.phase.startswith("explore"),
            width=width,
        )
        gangs.begin(forming)

    def _step_s(self, work: Denoising, width: int, leader: VirtualWorker) -> float:
        if work.step_s is not None:
            return work.step_s
        return self._timing.step_s(work.samples, width, "spot" if leader.pool == "spot" else "reserved")

    def finish_members(self, members: Iterable[tuple[Key, VirtualWorker]]) -> None:
        self._finish((self.tasks.all[key], worker) for key, worker in members)

    def hand_back_member(self, key: Key, worker: VirtualWorker) -> None:
        self._clock.after(BACK_OFF_S, self.hand_back, self.tasks.all[key], worker)
