"""Dask's events into the dispatcher, its instructions back into Dask. The only user of Dask's internals.

`DispatchPlugin` runs on the scheduler's event loop, on any scheduler, for one run at a time. It uses, of the scheduler:
``tasks``, ``running``, ``workers``, ``handlers``, ``stream_handlers``, ``loop``, ``plugins``, ``worker_plugins``,
``extensions``, ``set_restrictions``, ``transitions``, ``remove_worker``, ``remove_plugin``,
``unregister_worker_plugin``, ``bulk_schedule_unrunnable_after_adding_worker``, ``log_event``, ``send_all`` and what
`_relaxed` sets; of a task: ``state``, ``key``, ``resource_restrictions``, ``worker_restrictions``, ``processing_on``
and ``suspicious``; of a worker: ``address``, ``name``, ``processing``, ``resources`` and ``last_seen``. It decides
nothing.

Invariants: a gated task is in Dask's state "no-worker" until an instruction names its worker; the shards of a gang are
launched in one transition; a lost worker's tasks go back behind the gate, and are never counted as failures.

A launch and what it says to a shard travel in the same ordered stream, so a task finds its
placement on the worker when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.scheduler import WorkerState
from tornado.ioloop import IOLoop

from cluster.dispatch import Dispatch, Rules
from cluster.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    Dismiss,
    EngineLost,
    Event,
    Evict,
    GangBeat,
    GraphCame,
    Instruction,
    Key,
    Launch,
    Layer,
    Regroup,
    StopAsked,
    StopWork,
    TaskChanged,
    TaskPhase,
    TimePassed,
    Train,
    Wake,
    WeightsHeld,
    WindowChanged,
    Work,
    WorkerAvailable,
    WorkerJoined,
    WorkerLeft,
    WorkerNoticed,
    WorkerPool,
    WorkerSilent,
)
from cluster.quiet import Quiet, sentence
from cluster.snapshot import Snapshot
from spotlight import __version__
from spotlight.clock import Clock, wall_clock
from spotlight.device import signals as orders
from spotlight.device.signals import Order, PlaceShard, order_to_message, shard_to_message
from spotlight.records import Placement, SpotlightError, Surplus

ORDER, PLACE = "spotlight-order", "spotlight-place"
"""To workers: an order for the work in flight; where a shard runs."""
BEAT, LOST_ENGINE = "spotlight-beat", "spotlight-lost-engine"
"""From workers: how far a gang is; the engine process died; the machine will be taken away."""
HOLDS = "spotlight-holds"
"""From workers: a file of weights is on their node now."""
READY, REFUSED = "spotlight-ready", "spotlight-refused"
"""From workers: one can do the run's work; one cannot, and why."""
EVICTED = "spotlight-evicted"
"""Topic of the scheduler's events, for whoever started the workers: the process of one that hangs is to be ended."""
HEARD_OF = "spotlight-heard-of"
"""Topic of the scheduler's events, for the same: a worker is there, whether it can do the run's work or not."""
WATCH_S = 0.5
logger = logging.getLogger(__name__)

FAILURES = 1_000_000
"""Losses of its worker that a task survives."""
LEAVE_S = 5.0
"""For workers to end what belongs to a run; only one that is frozen takes longer."""
PAUSE_S = 2.0
"""If a look at the workers comes so much too late, this process was paused, and the workers may have been too."""
SAID_PAUSE_S = 10.0
"""A pause that is told of; a busy machine may bring a shorter one."""
READY_S = 10
"""Times the limit after which a silent worker has hung: one that has joined and is not ready by then has hung, too."""
STEP_S = 1.0
"""By which the system's clock differs from ours once it was set."""
GATE = {"gate": 1}
STATES: dict[str, TaskPhase] = {
    "waiting": "waiting",
    "queued": "waiting",
    "no-worker": "gated",
    "processing": "processing",
    "memory": "memory",
    "erred": "erred",
    "released": "released",
    "forgotten": "forgotten",
}
"""Dask's names of a task's states to ours."""


class DispatchPlugin(SchedulerPlugin):
    """Translates: tells a `Dispatch` what happens on the scheduler, and does what it says.

    It is plain values until it starts, since it travels to the scheduler. It ends when its driver says so, or is gone.

    Args:
        run: name of the run, which signals to workers carry.
        session: which start of the run this is.
        rules: the dispatcher's.
        owner: id of the driver's client.
        driver: says who that is, to others who want to run something here.
        member: name of the worker plugin that belongs to this one.
        clock: in seconds since 1970, as workers have it.
    """

    name = "spotlight-dispatch"

    def __init__(
        self, run: str, session: str, rules: Rules, *, owner: str, driver: str, member: str, clock: Clock = wall_clock
    ) -> None:
        self._run, self._session, self._rules = run, session, rules
        self._owner, self._driver, self._member = owner, driver, member
        self._clock, self._version = clock, __version__

    async def start(self, scheduler: Scheduler) -> None:
        """Begin; nothing is awaited, so that of two runs that come at once the second finds the first.

        Raises:
            SpotlightError: another run is here, or this scheduler has another version of Spotlight.
        """
        self._refuse_another(scheduler)
        self._scheduler = scheduler
        self._dispatch = Dispatch(self._rules)
        self._closed = self._deciding = False
        self._unavailable: set[str] = set()
        """Addresses of workers that take no tasks, as the dispatcher was told."""
        self._heads: set[str] = set()
        """Addresses of the workers for what only decides."""
        self._nodes: dict[str, str] = {}
        """Of the other workers, by address."""
        self._refused: dict[str, tuple[str, str]] = {}
        """By address, the name of a worker that takes no part, and why."""
        self._evicting: list[Evict] = []
        self._watched_s = self._clock()
        self._quiet = Quiet(self._rules.hang_after_s, self._watched_s)
        self._came: dict[str, float] = {}
        """When workers joined that are not ready yet."""
        self._drained: tuple[int, dict[str, Any]] = (0, {})
        """What the driver fetched last, and how many times it had fetched something by then."""
        self._heard: dict[str, tuple[float, float]] = {}
        """Of each worker: its last heartbeat by Dask's clock, and when we saw that by ours."""
        scheduler.handlers.update(spotlight_status=self.status, spotlight_stop=self.stop, spotlight_close=self.leave)
        scheduler.handlers["spotlight_drain"] = self.drain
        scheduler.handlers.update(spotlight_holders=self._dispatch.holders, spotlight_notice=self._notice)
        heard = ((BEAT, self._beat), (LOST_ENGINE, self._lost_engine), (HOLDS, self._holds))
        scheduler.stream_handlers.update((*heard, (READY, self._ready), (REFUSED, self._refuse)))
        self._restore = _relaxed(scheduler)
        steady(scheduler.loop)
        self._watching = asyncio.create_task(self._keep_watching())

    def _refuse_another(self, scheduler: Scheduler) -> None:
        other = scheduler.plugins.get(self.name)
        if isinstance(other, DispatchPlugin) and other is not self:
            raise SpotlightError(
                f"the scheduler {scheduler.address} runs {other._run} already (driver: {other._driver}): wait until it "
                "ends, or stop it first; a scheduler serves one run at a time"
            )
        if self._version != __version__:
            raise SpotlightError(
                f"the scheduler {scheduler.address} has Spotlight {__version__}, and the driver has {self._version}: "
                "install the same version on both"
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
        scheduler.remove_plugin(self.name)
        for name in ("status", "stop", "close", "drain", "holders", "notice"):
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
        layers: dict[str, list[Key]] = {}
        for key in annotations.get("pool", {}):
            layers.setdefault(key[0], []).append(key)
        self._tell(GraphCame(at_s=self._clock(), layers=tuple(_layer(keys, annotations) for keys in layers.values())))

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        if not self._dispatch.knows(key):
            return
        task, worker = self._scheduler.tasks.get(key), ""
        if finish == "processing" and task is not None and task.processing_on is not None:
            worker = task.processing_on.address
        work = self._work(facts) if start == "processing" and finish in ("memory", "erred") else None
        self._tell(TaskChanged(at_s=self._clock(), key=key, state=STATES[finish], worker=worker, work=work))

    def _work(self, facts: Mapping[str, Any]) -> Work | None:
        set_s = self._clock() - time.time()
        return _work(facts, set_s if abs(set_s) > STEP_S else 0.0)

    def _ready(
        self, worker: str, session: str, pool: WorkerPool, node: str, host: str = "", job: str = "", **_: Any
    ) -> None:
        state = self._scheduler.workers.get(worker)
        if state is None or session != self._session:
            return
        name, at_s = str(state.name), self._clock()
        if pool == "head":
            self._heads.add(worker)
        else:
            self._nodes[worker] = node
        self._came.pop(worker, None)
        self._tell(WorkerJoined(at_s=at_s, address=worker, name=name, pool=pool, node=node, host=host, job=job))
        self._scheduler.log_event(HEARD_OF, name)
        # Dask looks for tasks that a worker may run when it comes, and not when it gets its resources.
        waiting = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(state)
        self._scheduler.transitions(waiting, stimulus_id=f"spotlight-ready-{at_s}")

    def _refuse(self, worker: str, session: str, reason: str, **_: Any) -> None:
        state = self._scheduler.workers.get(worker)
        if state is not None and session == self._session:
            self._refused[worker] = (str(state.name), reason)
            self._scheduler.log_event(HEARD_OF, str(state.name))
            self._came.pop(worker, None)

    def log_event(self, topic: str, msg: Any) -> None:
        """Before a lost worker's tasks are moved: tell that it is gone; its loss is no fault of theirs."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker":
            self._unavailable.discard(msg["worker"])
            self._heard.pop(msg["worker"], None)
            self._came.pop(msg["worker"], None)
            self._nodes.pop(msg["worker"], None)
            self._refused.pop(msg["worker"], None)
            self._heads.discard(msg["worker"])
            self._tell(WorkerLeft(at_s=self._clock(), address=msg["worker"], expected=bool(msg.get("expected"))))
            for key in msg.get("processing-tasks", ()):
                if key in self._scheduler.tasks:
                    self._scheduler.tasks[key].suspicious = 0

    def _beat(self, gang: str, epoch: int, step: int, steps: int, resumed: bool, **_: Any) -> None:
        self._tell(GangBeat(at_s=self._clock(), gang=gang, epoch=epoch, step=step, steps=steps, resumed=resumed))

    def _lost_engine(self, worker: str, gang: str, reason: str, **_: Any) -> None:
        self._tell(EngineLost(at_s=self._clock(), worker=worker, gang=gang, reason=reason))

    def _notice(self, worker: str, reason: str, **_: Any) -> None:
        self._tell(WorkerNoticed(at_s=self._clock(), address=worker, reason=reason))

    def _holds(self, worker: str, sha256: str, **_: Any) -> None:
        self._tell(WeightsHeld(at_s=self._clock(), address=worker, sha256=sha256))

    def _tell(self, event: Event) -> None:
        if self._closed:
            return
        if not isinstance(event, TimePassed | WorkerSilent):
            self._quiet.happened(event.at_s)
        self._do(self._dispatch.handle(event))
        if not isinstance(event, TimePassed):
            self.schedule_decision()

    def schedule_decision(self) -> None:
        """Have the dispatcher decide once all events of this moment are reported."""
        if not self._deciding:
            self._deciding = True
            self._scheduler.loop.add_callback(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        self._tell_availability()
        self._tell(TimePassed(at_s=self._clock()))

    def _tell_availability(self) -> None:
        """Look at each worker: Dask tells plugins neither of a change in its status nor of tasks that are not ours."""
        for address, state in self._scheduler.workers.items():
            available = state in self._scheduler.running and not self._has_foreign_tasks(state)
            if available == (address in self._unavailable):
                (self._unavailable.discard if available else self._unavailable.add)(address)
                event = WorkerAvailable(at_s=self._clock(), address=address, available=available)
                self._do(self._dispatch.handle(event))

    def _has_foreign_tasks(self, state: WorkerState) -> bool:
        return any(not self._dispatch.knows(task.key) for task in state.processing)

    async def _keep_watching(self) -> None:
        """Time and again, whatever becomes of the system's clock."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._watch()
            except Exception:  # the next look comes all the same
                logger.exception("a look at the workers failed")

    async def _watch(self) -> None:
        """Report workers whose heartbeats stopped, and pauses; each worker watches its own engine."""
        now_s = self._clock()
        paused_s = max(0.0, now_s - self._watched_s - WATCH_S)
        self._watched_s = now_s
        if paused_s > PAUSE_S:
            self._paused(now_s, paused_s)
        self._look_at_quiet(now_s)
        for address, state in list(self._scheduler.workers.items()):
            heard = self._heard.get(address)
            if heard is None or heard[0] != state.last_seen:
                self._heard[address] = heard = (state.last_seen, now_s)
            elif paused_s > PAUSE_S:  # this process was paused, and saw no heartbeat meanwhile
                self._heard[address] = heard = (heard[0], heard[1] + paused_s)
            if now_s - heard[1] > self._rules.hang_after_s:
                self._tell(WorkerSilent(at_s=now_s, address=address, silent_s=now_s - heard[1]))
        self._look_at_unready(now_s)
        evicting, self._evicting = self._evicting, []
        for hung in evicting:
            stimulus = "spotlight-watch"
            await self._scheduler.remove_worker(hung.address, stimulus_id=stimulus, expected=True, close=True)
            self._scheduler.log_event(EVICTED, hung.name)

    def _paused(self, now_s: float, paused_s: float) -> None:
        """This process, and perhaps the whole machine, stood still."""
        self._quiet.paused(paused_s)
        self._came = {address: at_s + paused_s for address, at_s in self._came.items()}
        if paused_s > min(SAID_PAUSE_S, max(PAUSE_S, self._rules.hang_after_s)):
            self._dispatch.journal.event(now_s, "paused", lost_s=paused_s)

    def _look_at_quiet(self, now_s: float) -> None:
        """Say what is waited for; and decide again, should an event have been lost."""
        if self._quiet.is_due(now_s) and not self._dispatch.snapshot().stopping:
            self._dispatch.journal.event(now_s, "waits", what=self._waits(now_s))
            self.schedule_decision()

    def _waits(self, now_s: float) -> str:
        now, lasts_s = self._dispatch.snapshot(), self._quiet.lasts_s(now_s)
        return sentence(lasts_s, self._running(now_s), missing=self._waiting_for(now), requests=now.waiting)

    def _running(self, now_s: float) -> list[tuple[str, str, float]]:
        """``(task, worker, seconds)`` of what is at work, what only decides, too."""
        heads = [
            (str(task.key), str(self._scheduler.workers[address].name), self._quiet.lasts_s(now_s))
            for address in self._heads & self._scheduler.workers.keys()
            for task in self._scheduler.workers[address].processing
        ]
        doing = [each for each in self._dispatch.doing() if each.phase]
        return [*((f"{each.phase} {each.iteration}", each.worker, now_s - each.since_s) for each in doing), *heads]

    def _look_at_unready(self, now_s: float) -> None:
        """A worker that has come and will not be ready is ended, so that another may come in its place."""
        for address, state in self._scheduler.workers.items():
            ours = any(state.resources.get(pool) for pool in ("reserved", "spot"))
            if ours and address not in self._nodes and address not in self._refused:
                came_s = self._came.setdefault(address, now_s)
                if now_s - came_s > READY_S * self._rules.hang_after_s:
                    cause = f"not ready {now_s - came_s:.0f} s after it came"
                    self._dispatch.journal.event(now_s, "hung", worker=str(state.name))
                    self._evicting.append(Evict(address=address, name=str(state.name), cause=cause))

    # The dispatcher's instructions

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Launch():
                    self._launch(instruction)
                case Dismiss():
                    if instruction.tell is not None:
                        self._place(instruction.address, instruction.gang, instruction.shard, instruction.tell)
                    self._open_gate(instruction.key, instruction.address, "head")
                case Train():
                    self._open_gate(instruction.key, instruction.address, "engine")
                case CallOff():
                    order = orders.CallOff(gang=instruction.gang, epoch=instruction.epoch)
                    self._order(instruction.address, order)
                case Regroup():
                    self._order(instruction.address, orders.Regroup(gang=instruction.gang, epoch=instruction.epoch))
                case CloseExploration():
                    self._order_all(orders.CloseExploration(run=self._run, iteration=instruction.iteration))
                case StopWork():
                    self._order_all(orders.Stop(run=self._run))
                case CloseGate():
                    self._close_gate(instruction.key)
                case Evict():
                    self._evicting.append(instruction)
                case Wake():
                    wait_s = max(0.0, instruction.at_s - self._clock())
                    self._scheduler.loop.call_later(wait_s, self.schedule_decision)

    def _launch(self, launch: Launch) -> None:
        """Admit a whole gang, in one transition."""
        for member in launch.members:
            self._place(member.address, launch.gang, member.shard, member.place)
            self._restrict(member.key, member.address, "engine")
        keys = [member.key for member in launch.members]
        self._scheduler.transitions(dict.fromkeys(keys, "processing"), stimulus_id=f"spotlight-{launch.gang}")

    def _open_gate(self, key: Key, address: str, resource: str) -> None:
        self._restrict(key, address, resource)
        self._scheduler.transitions({key: "processing"}, stimulus_id=f"spotlight-open-{self._clock()}")

    def _restrict(self, key: Key, address: str, resource: str) -> None:
        self._scheduler.tasks[key].resource_restrictions = {resource: 1}
        self._scheduler.set_restrictions({key: {address}})

    def _close_gate(self, key: Key) -> None:
        task = self._scheduler.tasks.get(key)
        if task is not None:
            task.resource_restrictions, task.worker_restrictions = dict(GATE), None

    def _order_all(self, order: Order) -> None:
        for address in self._scheduler.workers:
            self._order(address, order)

    def _order(self, address: str, order: Order) -> None:
        self._send(address, {"op": ORDER, "session": self._session, **order_to_message(order)})

    def _place(self, address: str, gang: str, shard: int, placement: Placement | Surplus | int) -> None:
        command = PlaceShard(gang=gang, shard=shard, placement=placement)
        self._send(address, {"op": PLACE, **shard_to_message(command)})

    def _send(self, address: str, message: dict[str, Any]) -> None:
        if address in self._scheduler.workers:
            self._scheduler.send_all({}, {address: [message]})

    # What the driver asks

    def stop(self) -> None:
        """Launch nothing more; what runs ends at its next step boundary."""
        self._tell(StopAsked(at_s=self._clock()))

    def drain(self, fetched: int = 0) -> dict[str, Any]:
        """What is new since the driver fetched it last.

        Args:
            fetched: how many times it had got an answer; one that was lost on its way is given again.
        """
        number, told = self._drained
        if number != fetched + 1:
            told = self._dispatch.drain()
            self._drained = (fetched + 1, told)
        return told

    def change_window(self, window_s: float) -> None:
        """Let reserved workers roll out for so long in this iteration."""
        self._tell(WindowChanged(at_s=self._clock(), window_s=window_s))

    def status(self) -> dict[str, Any]:
        """What is running where, for a display; plain values."""
        now = self._dispatch.snapshot()
        return {
            "workers": dict(now.pools),
            "running": dict(now.running),
            "waiting": now.waiting,
            "waiting_for": self._waiting_for(now),
            "refused": dict(self._refused.values()),
            "hopeless": self._hopeless(now),
            "widths": dict(now.widths),
            "preemptions": now.preemptions,
        }

    @property
    def shown(self) -> Dispatch:
        """The dispatcher, for a display in the scheduler's process: to be read only."""
        return self._dispatch

    def _waiting_for(self, now: Snapshot) -> list[str]:
        """Pools without a worker that something waits for; and a node that is large enough, if none is."""
        missing = {
            *now.waiting_for,
            *(() if "reserved" in now.pools else ("reserved",)),
            *(() if self._heads else ("head",)),
        }
        largest = max(Counter(self._nodes.values()).values(), default=0)
        narrow = [f"{now.narrowest} on one node"] if now.narrowest > largest > 0 else []
        return [*sorted(missing), *narrow]

    def _hopeless(self, now: Snapshot) -> str:
        """Why the run cannot go on: nothing begins though all is there, or none of the reserved workers that are there
        can take part; else empty."""
        now_s = self._clock()
        if self._quiet.is_over(now_s) and now.waiting and not self._running(now_s) and not self._waiting_for(now):
            return f"{self._waits(now_s)}, and all workers are there; what was committed is kept"
        reserved = {address for address, state in self._scheduler.workers.items() if "reserved" in state.resources}
        if not reserved or "reserved" in now.pools or not reserved <= self._refused.keys():
            return ""
        name, reason = self._refused[min(reserved)]
        return f"no reserved worker can take part in the run: {name}: {reason}"

    def snapshot(self) -> Snapshot:
        """The dispatcher's state; to be asked for in the scheduler's process."""
        return self._dispatch.snapshot()


def snapshot_of(dask_scheduler: Scheduler) -> Snapshot:
    """To be sent to the scheduler that the plugin is on."""
    plugin = dask_scheduler.plugins[DispatchPlugin.name]
    assert isinstance(plugin, DispatchPlugin)
    return plugin.snapshot()


def _relaxed(scheduler: Scheduler) -> Callable[[], None]:
    """Set a scheduler so that losses are normal and only the dispatcher moves work; returns what undoes that."""
    names = ("allowed_failures", "worker_ttl", "no_workers_timeout")
    before = {name: getattr(scheduler, name) for name in names}
    scheduler.allowed_failures = FAILURES  # losing spot workers is normal; see `DispatchPlugin.log_event`
    if scheduler.worker_ttl is not None:
        scheduler.worker_ttl = inf  # see `DispatchPlugin._watch`, which knows a pause from a loss
    scheduler.no_workers_timeout = None  # tasks behind the gate wait as long as it takes
    stealing = "stealing" in scheduler.periodic_callbacks
    if stealing:  # the dispatcher alone moves work
        scheduler.loop.add_callback(scheduler.extensions["stealing"].stop)
    manager: Any = scheduler.extensions.get("amm")
    managed = manager is not None and manager.running
    if managed:  # results are small, and each is wanted where it is
        manager.stop()

    def restore() -> None:
        for name, value in before.items():
            setattr(scheduler, name, value)
        if stealing:
            scheduler.loop.add_callback(scheduler.extensions["stealing"].start)
        if managed:
            manager.start()

    return restore


def _layer(keys: list[Key], annotations: Mapping[str, Mapping[Key, Any]]) -> Layer:
    """Tasks of one layer, whose annotations are the same."""
    first = keys[0]
    more = {name: annotations[name][first] for name in ("shards", "window_s") if first in annotations.get(name, {})}
    if first in annotations.get("widths", {}):
        more["widths"] = tuple(annotations["widths"][first])
    return Layer(
        name=first[0],
        indices=tuple(sorted(index for _, index in keys)),
        pool=annotations["pool"][first],
        phase=annotations["phase"][first],
        iteration=annotations["iteration"][first],
        **more,
    )


def steady(loop: IOLoop) -> None:
    """Have what a loop does time and again go on when the system's clock is set back: it would wait until that has
    caught up."""
    ahead_s = loop.time() - wall_clock()
    loop.time = lambda: ahead_s + wall_clock()  # type: ignore[method-assign]


def _work(facts: Mapping[str, Any], set_s: float = 0.0) -> Work | None:
    """What a worker did for a task that has a result or an error, of which Dask tells these facts.

    Args:
        set_s: by which the system's clock, which Dask tells, is behind ours.
    """
    compute = [entry for entry in facts.get("startstops") or () if entry["action"] == "compute"]
    if not compute:
        return None
    dropped = str(facts.get("typename")).endswith(".Dropped")
    start_s, stop_s = compute[0]["start"] + set_s, compute[-1]["stop"] + set_s
    return Work(start_s=min(start_s, stop_s), stop_s=stop_s, dropped=dropped)
