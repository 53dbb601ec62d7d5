"""Dask's events into the dispatcher, and its instructions back; what the driver asks of it. It decides nothing.

`DispatchPlugin` runs on the scheduler's event loop, on any scheduler, for one run at a time. This package alone uses
Dask's internals: of the scheduler ``tasks``, ``running``, ``workers``, ``handlers``, ``stream_handlers``, ``loop``,
``plugins``, ``worker_plugins``, ``extensions``, ``set_restrictions``, ``transitions``, ``remove_worker``,
``remove_plugin``, ``unregister_worker_plugin``, ``bulk_schedule_unrunnable_after_adding_worker``, ``log_event``,
``send_all`` and what `setup` sets; of a task: ``state``, ``key``, ``resource_restrictions``, ``worker_restrictions``,
``processing_on`` and ``suspicious``; of a worker: ``address``, ``name``, ``processing``, ``resources`` and
``last_seen``.

Invariants: a gated task is in Dask's state "no-worker" until an instruction names its worker; a lost worker's tasks go
back behind the gate, and are never counted as failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from dask.utils import key_split
from distributed import Scheduler, SchedulerPlugin
from distributed.scheduler import WorkerState, heartbeat_interval

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    EngineGone,
    Event,
    Evict,
    GangBeat,
    GraphCame,
    Key,
    StopAsked,
    TaskChanged,
    TimePassed,
    WeightsHeld,
    Work,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerPool,
    WorkerSilent,
)
from cluster.dispatch.heartbeats import Heartbeats
from cluster.dispatch.rules import WATCH_S, Rules
from cluster.dispatch.snapshot import Snapshot
from cluster.dispatch.stall import StallDetector, sentence
from cluster.messages import BEAT, EVICTED, HEARD_OF, HOLDS, LOST_ENGINE, READY, REFUSED
from cluster.scheduler.answers import Answers, Ready, Refusal
from cluster.scheduler.calls import SchedulerCalls
from cluster.scheduler.setup import configure, steady
from cluster.scheduler.translation import STATES, STEP_S, layer_of, work_of
from cluster.version import code_version
from spotlight.clock import Clock, wall_clock
from spotlight.records import SpotlightError
from spotlight.status import ON_ONE_NODE

logger = logging.getLogger(__name__)

WORKING: tuple[WorkerPool, ...] = ("reserved", "spot", "reward")
"""Pools of workers that do a GPU's work, or score."""
DRIVERS_OWN = "the driver's own"
"""What the worker in the driver's process is called, while a run waits for it."""
LEAVE_S = 5.0
"""Longest wait for workers to end what belongs to a run; only a frozen one takes longer."""


class DispatchPlugin(SchedulerPlugin):
    """Translates: tells a `Dispatcher` what happens on the scheduler, and does what it says.

    It is plain values until it starts, since it travels to the scheduler. It ends when its driver says so, or is gone.

    Args:
        run: name of the run, which signals to workers carry.
        session: which start of the run this is.
        rules: the dispatcher's.
        owner: id of the driver's client.
        driver: says who the driver is, to others who want to run something here.
        member: name of the worker plugin of this run.
        page: name of the scheduler plugin with the run's live page; empty where there is none.
        logged: whether the dispatcher's log is kept.
        clock: in seconds since 1970, as workers have it.
    """

    name = "spotlight-dispatch"

    def __init__(
        self,
        run: str,
        session: str,
        rules: Rules,
        *,
        owner: str,
        driver: str,
        member: str,
        page: str = "",
        logged: bool = True,
        clock: Clock = wall_clock,
    ) -> None:
        self._run, self._session, self._rules = run, session, rules
        self._owner, self._driver, self._member, self._page = owner, driver, member, page
        self._logged = logged
        self._clock, self._version = clock, code_version()

    async def start(self, scheduler: Scheduler) -> None:
        """Begin; nothing is awaited, so that of two runs that come at once the second finds the first.

        Raises:
            SpotlightError: another run is here, or this scheduler has another version of Spotlight.
        """
        self._refuse_another(scheduler)
        self._scheduler = scheduler
        self._dispatch = Dispatcher(self._rules, logged=self._logged)
        self._closed = self._deciding = False
        self._answers = Answers()
        # Apart from answers, since it is seen: also of workers that have not answered, or are no part of any run.
        self._unavailable: set[str] = set()
        """Addresses of workers that take no tasks, as the dispatcher was told."""
        self._evicting: list[Evict] = []
        self._calls = SchedulerCalls(
            scheduler,
            self._clock,
            run=self._run,
            session=self._session,
            members=lambda: self._answers.ready_in(*WORKING, "head"),
            evict=self._evicting.append,
            wake_at=self._wake_at,
        )
        now_s, limit_s = self._clock(), self._rules.hang_after_s
        self._stall = StallDetector(limit_s, now_s)
        self._heartbeats = Heartbeats(limit_s=limit_s, every_s=WATCH_S, now_s=now_s)
        self._said_limit = False
        self._drained: tuple[int, dict[str, Any]] = (0, {})
        """How many times the driver has fetched something, and what it fetched last."""
        asked = {
            "status": self.status,
            "stop": self.stop,
            "close": self.leave,
            "drain": self.drain,
            "clock": self.clock,
        }
        scheduler.handlers.update(
            {f"spotlight_{name}": for_its_driver(scheduler, answer) for name, answer in asked.items()}
        )
        scheduler.handlers.update(spotlight_holders=self._dispatch.state.holders, spotlight_notice=self._notice)
        heard = ((BEAT, self._beat), (LOST_ENGINE, self._lost_engine), (HOLDS, self._holds))
        scheduler.stream_handlers.update((*heard, (READY, self._ready), (REFUSED, self._refuse)))
        self._restore = configure(scheduler)
        steady(scheduler.loop)
        self._watching = asyncio.create_task(self._keep_watching())

    def _refuse_another(self, scheduler: Scheduler) -> None:
        other = scheduler.plugins.get(self.name)
        if isinstance(other, DispatchPlugin) and other is not self:
            raise SpotlightError(
                f"the scheduler {scheduler.address} runs {other._run} already (driver: {other._driver}): wait until it "
                "ends, or stop it first; a scheduler serves one run at a time"
            )
        if self._version != code_version():
            raise SpotlightError(
                f"the scheduler {scheduler.address} has Spotlight {code_version()}, and the driver has "
                f"{self._version}: install the same version on both"
            )

    async def close(self) -> None:
        self._watching.cancel()

    async def leave(self) -> None:
        """End here, and have all workers end what belongs to the run: the scheduler is as before."""
        if self._closed:
            return
        self._closed = True
        scheduler = self._scheduler
        await self.close()
        self._restore()
        for name in {self.name, self._page} & scheduler.plugins.keys():
            scheduler.remove_plugin(name)
        for name in ("status", "stop", "close", "drain", "clock", "holders", "notice"):
            del scheduler.handlers[f"spotlight_{name}"]
        if self._member in scheduler.worker_plugins:
            with contextlib.suppress(OSError, TimeoutError):  # a worker that is gone, or frozen, has ended it too
                await asyncio.wait_for(scheduler.unregister_worker_plugin(None, self._member), LEAVE_S)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """The driver is gone, however it ended: nothing goes on without it."""
        if client == self._owner and not self._closed:
            self.stop()
            scheduler.loop.add_callback(self.leave)

    # Dask's events

    def update_graph(
        self, scheduler: Scheduler, *, client: str, annotations: dict[str, dict[Any, Any]], **_: Any
    ) -> None:
        if client != self._owner:
            return
        key_split.cache_clear()  # remembers 100,000 keys, and no key comes again
        layers: dict[str, list[Key]] = {}
        for key in annotations.get("pool", {}):
            layers.setdefault(key[0], []).append(key)
        self._tell(GraphCame(at_s=self._clock(), layers=tuple(layer_of(keys, annotations) for keys in layers.values())))

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        if not self._dispatch.state.knows(key):
            return
        task, worker = self._scheduler.tasks.get(key), ""
        if finish == "processing" and task is not None and task.processing_on is not None:
            worker = task.processing_on.address
        work = self._work(facts) if start == "processing" and finish in ("memory", "erred") else None
        self._tell(TaskChanged(at_s=self._clock(), key=key, state=STATES[finish], worker=worker, work=work))

    def _work(self, facts: Mapping[str, Any]) -> Work | None:
        set_s = self._clock() - time.time()
        return work_of(facts, set_s if abs(set_s) > STEP_S else 0.0)

    def _ready(
        self, worker: str, session: str, pool: WorkerPool, node: str, host: str = "", job: str = "", **_: Any
    ) -> None:
        state = self._scheduler.workers.get(worker)
        if state is None or session != self._session:
            return
        name, at_s = str(state.name), self._clock()
        self._answers[worker] = Ready(pool=pool, node=node)
        self._heartbeats.note_ready(worker)
        self._unavailable.discard(worker)  # whoever joins is taken to be available: the dispatcher is told anew
        self._tell(WorkerJoined(at_s=at_s, address=worker, name=name, pool=pool, node=node, host=host, job=job))
        self._scheduler.log_event(HEARD_OF, name)
        # Dask looks for tasks that a worker may run when it comes, and not when it gets its resources.
        waiting = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(state)
        self._scheduler.transitions(waiting, stimulus_id=f"spotlight-ready-{at_s}")

    def _refuse(self, worker: str, session: str, reason: str, lasts: bool, **_: Any) -> None:
        state = self._scheduler.workers.get(worker)
        if state is not None and session == self._session:
            self._answers[worker] = Refusal(name=str(state.name), reason=reason, lasts=lasts)
            self._scheduler.log_event(HEARD_OF, str(state.name))
            self._heartbeats.note_ready(worker)

    def log_event(self, topic: str, msg: Any) -> None:
        """Before a lost worker's tasks are moved: tell that it is gone; its loss is no fault of theirs."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker":
            self._answers.pop(msg["worker"], None)
            self._unavailable.discard(msg["worker"])
            self._heartbeats.forget(msg["worker"])
            self._tell(WorkerLeft(at_s=self._clock(), address=msg["worker"], expected=bool(msg.get("expected"))))
            for key in msg.get("processing-tasks", ()):
                if key in self._scheduler.tasks:
                    self._scheduler.tasks[key].suspicious = 0

    def _beat(self, gang: str, epoch: int, step: int, steps: int, resumed: bool, **_: Any) -> None:
        self._tell(GangBeat(at_s=self._clock(), gang=gang, epoch=epoch, step=step, steps=steps, resumed=resumed))

    def _lost_engine(self, worker: str, gang: str, reason: str, **_: Any) -> None:
        state = self._scheduler.workers.get(worker)
        if state is not None:
            self._tell(EngineGone(at_s=self._clock(), worker=str(state.name), gang=gang, reason=reason))

    def _notice(self, worker: str, reason: str, **_: Any) -> None:
        self._tell(WorkerNoticed(at_s=self._clock(), address=worker, reason=reason))

    def _holds(self, worker: str, sha256: str, **_: Any) -> None:
        self._tell(WeightsHeld(at_s=self._clock(), address=worker, sha256=sha256))

    def _tell(self, event: Event) -> None:
        if self._closed:
            return
        if not isinstance(event, TimePassed | WorkerSilent):
            self._stall.happened(event.at_s)
        self._calls.carry_out(self._dispatch.handle(event))
        if not isinstance(event, TimePassed):
            self.schedule_decision()

    def schedule_decision(self) -> None:
        """Have the dispatcher decide once all events of this moment are reported."""
        if not self._deciding:
            self._deciding = True
            self._scheduler.loop.add_callback(self._decide)

    def _wake_at(self, at_s: float) -> None:
        self._scheduler.loop.call_later(max(0.0, at_s - self._clock()), self.schedule_decision)

    def _decide(self) -> None:
        self._deciding = False
        self._tell_availability()
        self._tell(TimePassed(at_s=self._clock()))

    def _tell_availability(self) -> bool:
        """Look at each worker: Dask tells plugins neither of a change in its status nor of tasks that are not ours.

        Returns:
            Whether anything has changed.
        """
        changed = False
        for address, state in self._scheduler.workers.items():
            available = state in self._scheduler.running and not self._has_foreign_tasks(state)
            if available == (address in self._unavailable):
                (self._unavailable.discard if available else self._unavailable.add)(address)
                event = WorkerAvailable(at_s=self._clock(), address=address, available=available)
                self._calls.carry_out(self._dispatch.handle(event))
                changed = True
        return changed

    def _has_foreign_tasks(self, state: WorkerState) -> bool:
        return any(not self._dispatch.state.knows(task.key) for task in state.processing)

    async def _keep_watching(self) -> None:
        """Watch the workers every `WATCH_S`; a change of the system's clock does not matter."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._watch()
            except Exception:  # the next look comes all the same
                logger.exception("a look at the workers failed")

    async def _watch(self) -> None:
        """Report workers whose heartbeats stopped, and pauses; each worker watches its own engine."""
        now_s = self._clock()
        paused_s = self._heartbeats.look(now_s)
        if paused_s:
            self._stall.paused(paused_s)
            if self._heartbeats.is_worth_telling(paused_s):
                self._dispatch.state.journal.event(now_s, "paused", lost_s=paused_s)
        self._look_for_stall(now_s)
        if self._tell_availability():
            self._decide()  # at once: to who asks before that, a run whose workers were long busy looks stalled
        self._expect_heartbeats(now_s)
        workers = self._scheduler.workers
        silent = {address: self._heartbeats.silent_s(address, state.last_seen) for address, state in workers.items()}
        for address, silent_s in silent.items():
            if silent_s > self._heartbeats.limit_s:
                self._tell(WorkerSilent(at_s=now_s, address=address, silent_s=silent_s))
        self._look_at_unready(now_s, silent)
        while self._evicting:
            hung, stimulus = self._evicting.pop(0), "spotlight-watch"
            await self._scheduler.remove_worker(hung.address, stimulus_id=stimulus, expected=True, close=True)
            self._scheduler.log_event(EVICTED, hung.name)

    def _expect_heartbeats(self, now_s: float) -> None:
        """Give workers the time that Dask gives them, if that is more than the settings do; it is said once."""
        count, set_s = len(self._scheduler.workers), self._rules.hang_after_s
        beat_s = heartbeat_interval(count)
        self._heartbeats.expect(beat_s)
        if self._heartbeats.limit_s > set_s and not self._said_limit:
            self._said_limit = True
            what = (
                f"cluster.hang_after_s = {set_s:g}, but Dask has a worker send a heartbeat every {beat_s:g} s (workers "
                f"now: {count}): one that is silent is ended after {self._heartbeats.limit_s:g} s"
            )
            self._dispatch.state.journal.event(now_s, "limited", what=what)

    def _look_for_stall(self, now_s: float) -> None:
        """Say what is waited for; and decide again, should an event have been lost."""
        if self._stall.is_due(now_s) and not self._dispatch.state.snapshot().stopping:
            self._dispatch.state.journal.event(now_s, "waits", what=self._waits(now_s))
            self.schedule_decision()

    def _waits(self, now_s: float) -> str:
        now, lasts_s = self._dispatch.state.snapshot(), self._stall.lasts_s(now_s)
        said = sentence(lasts_s, self._running(now_s), missing=self._waiting_for(now), requests=now.waiting)
        refused = [f"; {each.name} takes no part: {each.reason}" for each in self._answers.refusals().values()]
        return said + "".join(refused[:1])

    def _running(self, now_s: float) -> list[tuple[str, str, float]]:
        """``(task, worker, seconds)`` of all tasks at work, those of head workers included."""
        heads = [
            (str(task.key), str(self._scheduler.workers[address].name), self._stall.lasts_s(now_s))
            for address in self._answers.ready_in("head").keys() & self._scheduler.workers.keys()
            for task in self._scheduler.workers[address].processing
        ]
        doing = [each for each in self._dispatch.state.doing() if each.phase]
        return [*((f"{each.phase} {each.iteration}", each.worker, now_s - each.since_s) for each in doing), *heads]

    def _look_at_unready(self, now_s: float, silent: Mapping[str, float]) -> None:
        """Have a worker ended that joined and does not become ready, so that another may come in its place."""
        for address, state in self._scheduler.workers.items():
            ours = any(state.resources.get(pool) for pool in WORKING)
            if ours and address not in self._answers:
                unready_s = self._heartbeats.overdue_s(address, silent[address])
                if unready_s:
                    cause = f"not ready {unready_s:.0f} s after it came"
                    self._dispatch.state.journal.event(now_s, "hung", worker=str(state.name))
                    self._evicting.append(Evict(address=address, name=str(state.name), cause=cause))

    # What the driver asks

    def stop(self) -> None:
        """Launch nothing more; what runs ends at its next step boundary."""
        self._tell(StopAsked(at_s=self._clock()))

    def drain(self, fetched: int = 0) -> dict[str, Any]:
        """What is new since the driver fetched it last: a `Drained` as a message.

        Args:
            fetched: how many times it had got an answer; one that was lost on its way is given again.
        """
        number, told = self._drained
        if number != fetched + 1:
            told = self._dispatch.drain().message()
            self._drained = (fetched + 1, told)
        return told

    def clock(self) -> float:
        """What time it is here: all that is drained has this clock's times."""
        return self._clock()

    def status(self) -> dict[str, Any]:
        """What is running where, for a display; plain values."""
        now = self._dispatch.state.snapshot()
        return {
            "workers": dict(now.pools),
            "running": dict(now.running),
            "waiting": now.waiting,
            "waiting_for": self._waiting_for(now),
            "refused": {each.name: each.reason for each in self._answers.refusals().values()},
            "hopeless": self._hopeless(now),
            "widths": dict(now.widths),
            "preemptions": now.preemptions,
        }

    def belongs_to(self, session: str) -> bool:
        """Whether this start of a run is the one that is here."""
        return session == self._session

    @property
    def shown(self) -> Dispatcher:
        """The dispatcher, for a display in the scheduler's process: to be read only."""
        return self._dispatch

    def _waiting_for(self, now: Snapshot) -> list[str]:
        """What is missing of what something waits for: pools, the driver's own worker, a node that is large enough."""
        missing = {
            *now.waiting_for,
            *(() if "reserved" in now.pools else ("reserved",)),
            *(() if self._answers.ready_in("head") else (DRIVERS_OWN,)),
        }
        return [*sorted(missing), *([f"{now.too_wide}{ON_ONE_NODE}"] if now.too_wide else [])]

    def _hopeless(self, now: Snapshot) -> str:
        """Why the run cannot go on: a task ends all its workers, nothing begins though all is there, or nobody who is
        there can take part; else empty."""
        if self._dispatch.state.outlasted:
            return self._dispatch.state.outlasted
        now_s, waiting_for = self._clock(), self._waiting_for(now)
        busy = not self._unavailable.isdisjoint(self._answers.ready_in(*WORKING))  # with tasks that are not ours
        if self._stall.is_over(now_s) and not (busy or self._running(now_s)):
            if now.waiting and not waiting_for:
                return f"{self._waits(now_s)}, and all workers are there; what was committed is kept"
            refusals = [self._refusal(pool) for pool in WORKING if pool in waiting_for]
            if refusals and all(refusals):
                return refusals[0]
        return "" if "reserved" in now.pools else self._refusal("reserved")

    def _refusal(self, pool: WorkerPool) -> str:
        """Why no worker of a pool can take part, if that lasts; empty if one can, or none is there."""
        there = {address for address, state in self._scheduler.workers.items() if pool in state.resources}
        lasting = {address: each for address, each in self._answers.refusals().items() if each.lasts}
        if not there or not there <= lasting.keys():
            return ""
        first = lasting[min(there)]
        return f"no {pool} worker can take part in the run: {first.name}: {first.reason}"

    def snapshot(self) -> Snapshot:
        """The dispatcher's state; to be asked for in the scheduler's process."""
        return self._dispatch.state.snapshot()


def for_its_driver(scheduler: Scheduler, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that answers the driver of the run on this scheduler only; any other gets None, and nothing is done.

    A driver that slept may find that its run was ended here, and that another one has begun.
    """

    @wraps(answer)
    def answered(session: str, **facts: Any) -> Any:
        plugin = scheduler.plugins.get(DispatchPlugin.name)
        return answer(**facts) if isinstance(plugin, DispatchPlugin) and plugin.belongs_to(session) else None

    return answered


def snapshot_of(dask_scheduler: Scheduler) -> Snapshot:
    """The dispatcher's state; a function for `Client.run_on_scheduler`."""
    plugin = dask_scheduler.plugins[DispatchPlugin.name]
    assert isinstance(plugin, DispatchPlugin)
    return plugin.snapshot()
