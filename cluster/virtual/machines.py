"""Virtual workers come and go: they join, freeze, pause, lose their engine, get a notice, leave and are killed.

Each event is reported to the dispatcher as live; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.dispatch.events import (
    EngineGone,
    Event,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerPool,
    WorkerSilent,
)
from cluster.dispatch.rules import CLOSE_MARGIN_S, LEAVE_POLL_S, WATCH_S
from cluster.virtual.clock import VirtualClock
from cluster.virtual.executor import BACK_OFF_S, Executor
from cluster.virtual.gang_epochs import GangEpochs
from cluster.virtual.messages import Messages
from cluster.virtual.tasks import parts
from cluster.virtual.workers import VirtualWorker
from spotlight.device.signals import Leave


class Machines:
    """The workers that are alive.

    Args:
        hang_after_s: a worker that is silent for longer is ended.
        tell: called with each event for the dispatcher.
        gone: called with a worker that is gone.
    """

    def __init__(
        self,
        clock: VirtualClock,
        messages: Messages,
        executor: Executor,
        gangs: GangEpochs,
        workers: dict[str, VirtualWorker],
        *,
        hang_after_s: float,
        tell: Callable[[Event], None],
        gone: Callable[[VirtualWorker], None],
    ) -> None:
        self._clock, self._messages, self._executor, self._gangs, self._workers = (
            clock,
            messages,
            executor,
            gangs,
            workers,
        )
        self._hang_after_s, self._tell, self._gone = hang_after_s, tell, gone
        self._joins = 0

        self.is_closed = False
        """No worker joins any more."""

    def close(self) -> None:
        """Remove all workers at once, without events; what was scheduled for them is cancelled."""
        self.is_closed = True
        for worker in list(self._workers.values()):
            worker.alive = False
            worker.drop_all()
        self._workers.clear()

    def join(self, name: str, pool: WorkerPool, node: str, *, threads: int = 1) -> VirtualWorker:
        """A worker joins."""
        self._joins += 1
        address = f"virtual://{name}#{self._joins}"
        worker = VirtualWorker(address=address, name=name, pool=pool, node=node, threads=threads)
        self._workers[address] = worker
        self._tell(WorkerJoined(at_s=self._clock.now_s, address=address, name=name, pool=pool, node=node))
        self._executor.tasks.place_unplaced()
        return worker

    def kill(self, address: str) -> None:
        """Remove a worker at once, with its work and its results."""
        worker = self._workers.get(address)
        if worker:
            self._remove(worker, expected=False)

    def freeze(self, address: str) -> None:
        """Freeze a worker; it is killed after a while without a sign of life."""
        worker = self._workers.get(address)
        if worker is None or worker.frozen:
            return
        worker.frozen = True
        for forming in self._gangs.of(worker):
            self._gangs.halt(forming)
        worker.cancel_alarms()
        silent_s = self._hang_after_s + WATCH_S
        self._clock.after(silent_s, self.suspect, address, silent_s)

    def suspect(self, address: str, silent_s: float) -> None:
        """Report that the scheduler has not heard of a worker for ``silent_s``."""
        if address in self._workers:
            self._tell(WorkerSilent(at_s=self._clock.now_s, address=address, silent_s=silent_s))

    def pause(self, address: str, seconds: float) -> None:
        """Pause a worker: it begins nothing for a while; its running work goes on."""
        worker = self._workers.get(address)
        if worker is None or worker.paused or worker.pool == "head":
            return
        worker.paused = True
        self._tell(WorkerAvailable(at_s=self._clock.now_s, address=address, available=False))
        self._clock.after(seconds, self._unpause, worker)

    def _unpause(self, worker: VirtualWorker) -> None:
        worker.paused = False
        if worker.alive:
            self._tell(WorkerAvailable(at_s=self._clock.now_s, address=worker.address, available=True))
            self._executor.begin_next(worker)
            self._executor.tasks.place_unplaced()

    def notice(self, address: str, grace_s: float, reason: str = "the machine will be taken away") -> None:
        """Give a worker notice: it ends at its next step boundary, hands over its results, and leaves."""
        worker = self._workers.get(address)
        if worker is None or worker.leaving or worker.frozen:
            return
        worker.leaving = True
        worker.signals.obey(Leave())
        self._messages.send("notice", address, self._tell_notice, address, reason)
        self._clock.after(grace_s, self.kill, address)
        for forming in self._gangs.of(worker):
            self._gangs.end_at_boundary(forming)
        self._clock.after(max(0.0, grace_s - CLOSE_MARGIN_S), self._leave, worker)
        self.leave_when_idle(worker)

    def _tell_notice(self, address: str, reason: str) -> None:
        self._tell(WorkerNoticed(at_s=self._clock.now_s, address=address, reason=reason))

    def lose_engine(self, address: str, reason: str = "it was killed") -> None:
        """A worker's engine process dies: its work must be done again."""
        worker = self._workers.get(address)
        if worker is None or worker.frozen or worker.pool == "head":
            return
        gang_epochs = self._gangs.of(worker)
        name = gang_epochs[0].name if gang_epochs else ""
        for forming in gang_epochs:  # first, as steps that it took are known by then
            self._gangs.halt(forming)
        self._tell(EngineGone(at_s=self._clock.now_s, worker=worker.name, gang=name, reason=reason))
        for key in [key for key in worker.running if key not in worker.reports]:
            for forming in gang_epochs:
                forming.members.pop(key, None)
            self._clock.after(BACK_OFF_S, self._executor.hand_back, self._executor.tasks.all[key], worker)
        for forming in gang_epochs:
            if not forming.members:
                self._gangs.dissolve(forming)

    def leave_when_idle(self, worker: VirtualWorker) -> None:
        if worker.leaving and worker.alive and not worker.running:
            self._clock.after(LEAVE_POLL_S, self._leave, worker)

    def _leave(self, worker: VirtualWorker) -> None:
        """Hand over all results, and leave."""
        if not worker.alive or worker.frozen:
            return
        heirs = [other for other in self._workers.values() if other.pool != "head" and not other.leaving]
        heir = next((other for other in heirs if other.pool == "reserved"), next(iter(heirs), None))
        if heir:
            for task in self._executor.tasks.results_of(worker.address):
                self._executor.tasks.hold(task, heir.address)
        self._remove(worker, expected=True)

    def _remove(self, worker: VirtualWorker, *, expected: bool) -> None:
        worker.alive = False
        del self._workers[worker.address]
        now_s = self._clock.now_s
        for forming in self._gangs.of(worker):
            self._gangs.halt(forming)
        self._tell(WorkerLeft(at_s=now_s, address=worker.address, expected=expected))
        had = [*worker.running, *worker.queue]
        worker.drop_all()
        worker.queue.clear()
        for key in had:
            for forming in self._gangs.of(worker):
                forming.members.pop(key, None)
        for held in self._executor.tasks.results_of(worker.address):
            for part in parts((held,)):
                if part.state == "memory" and part.worker == worker.address:
                    self._executor.tasks.lose(part)
        for key in had:
            task = self._executor.tasks.all.get(key)
            if task is not None and task.state == "processing" and task.worker == worker.address:
                self._executor.tasks.hand_back(task)
        self._gangs.forget_empty()
        self._gone(worker)
