"""Dask's events into the dispatcher, its instructions back into Dask. The only user of Dask's internals.

`DispatchPlugin` runs on the scheduler's event loop. It uses, of the scheduler: ``tasks``, ``running``, ``workers``,
``handlers``, ``stream_handlers``, ``loop``, ``set_restrictions``, ``transitions``, ``remove_worker`` and ``send_all``;
of a task: ``state``, ``key``, ``resource_restrictions``, ``worker_restrictions``, ``processing_on`` and ``suspicious``;
of a worker: ``address``, ``name``, ``processing``, ``resources`` and ``last_seen``. `ControlPlugin` uses a worker's
``stream_handlers``. It decides nothing.

Invariants: a gated task is in Dask's state "no-worker" until an instruction names its worker; the shards of a gang are
launched in one transition; a lost worker's tasks go back behind the gate, and are never counted as failures.

A launch and what it says to a shard travel in the same ordered stream, so a task finds its
placement on the worker when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Worker, WorkerPlugin
from distributed.scheduler import WorkerState
from tornado.ioloop import PeriodicCallback

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
from cluster.snapshot import Snapshot
from spotlight.clock import Clock, wall_clock
from spotlight.device import signals as orders
from spotlight.device.signals import (
    Order,
    PlaceShard,
    order_from_message,
    order_to_message,
    shard_from_message,
    shard_to_message,
    signals,
)
from spotlight.records import Placement, Surplus

ORDER, PLACE = "spotlight-order", "spotlight-place"
"""To workers: an order for the work in flight; where a shard runs."""
BEAT, LOST_ENGINE, NOTICE = "spotlight-beat", "spotlight-lost-engine", "spotlight-notice"
"""From workers: how far a gang is; the engine process died; the machine will be taken away."""
HOLDS = "spotlight-holds"
"""From workers: a file of weights is on their node now."""
WATCH_S = 0.5
PAUSE_S = 2.0
"""If a look at the workers comes so much too late, this process was paused, and the workers may have been too."""
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

    Args:
        run: name of the run, which signals to workers carry.
        rules: the dispatcher's.
        evict: is given the name of a worker that hangs, to end its process.
        clock: in seconds since 1970, as workers have it.
    """

    name = "spotlight-dispatch"

    def __init__(
        self,
        run: str,
        rules: Rules,
        *,
        evict: Callable[[str], None] = lambda name: None,
        clock: Clock = wall_clock,
    ) -> None:
        self._run = run
        self._dispatch = Dispatch(rules)
        self._evict, self._clock = evict, clock
        self._deciding = False
        self._unavailable: set[str] = set()
        """Addresses of workers that take no tasks, as the dispatcher was told."""
        self._evicting: list[Evict] = []
        self._hang_after_s = rules.hang_after_s
        self._watched_s = clock()
        self._heard: dict[str, tuple[float, float]] = {}
        """Of each worker: its last heartbeat by Dask's clock, and when we saw that by ours."""

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.handlers.update(spotlight_status=self.status, spotlight_stop=self.stop)
        scheduler.handlers["spotlight_drain"] = self._dispatch.drain
        scheduler.handlers["spotlight_holders"] = self._dispatch.holders
        heard = ((BEAT, self._beat), (LOST_ENGINE, self._lost_engine), (NOTICE, self._notice), (HOLDS, self._holds))
        scheduler.stream_handlers.update(heard)
        self._watching = PeriodicCallback(self._watch, WATCH_S * 1000)
        self._watching.start()

    async def close(self) -> None:
        self._watching.stop()

    # Dask's events

    def update_graph(self, scheduler: Scheduler, *, annotations: dict[str, dict[Any, Any]], **_: Any) -> None:
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
        work = _work(facts) if start == "processing" and finish in ("memory", "erred") else None
        self._tell(TaskChanged(at_s=self._clock(), key=key, state=STATES[finish], worker=worker, work=work))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        state = scheduler.workers[worker]
        pools: tuple[WorkerPool, ...] = ("reserved", "spot", "head")
        pool = next((pool for pool in pools if pool in state.resources), None)
        if pool:
            node = next((name for name in state.resources if name.startswith("node:")), "")
            self._tell(WorkerJoined(at_s=self._clock(), address=worker, name=str(state.name), pool=pool, node=node))

    def log_event(self, topic: str, msg: Any) -> None:
        """Before a lost worker's tasks are moved: tell that it is gone; its loss is no fault of theirs."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker":
            self._unavailable.discard(msg["worker"])
            self._heard.pop(msg["worker"], None)
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

    async def _watch(self) -> None:
        """Report workers whose heartbeats stopped; each worker watches its own engine."""
        now_s = self._clock()
        paused_s = max(0.0, now_s - self._watched_s - WATCH_S)
        self._watched_s = now_s
        for address, state in list(self._scheduler.workers.items()):
            heard = self._heard.get(address)
            if heard is None or heard[0] != state.last_seen:
                self._heard[address] = heard = (state.last_seen, now_s)
            elif paused_s > PAUSE_S:  # this process was paused, and saw no heartbeat meanwhile
                self._heard[address] = heard = (heard[0], heard[1] + paused_s)
            if now_s - heard[1] > self._hang_after_s:
                self._tell(WorkerSilent(at_s=now_s, address=address, silent_s=now_s - heard[1]))
        evicting, self._evicting = self._evicting, []
        for hung in evicting:
            stimulus = "spotlight-watch"
            await self._scheduler.remove_worker(hung.address, stimulus_id=stimulus, expected=True, close=True)
            self._evict(hung.name)

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
                    self._open_gate(instruction.key, instruction.address, "reserved")
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
        self._send(address, {"op": ORDER, **order_to_message(order)})

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
            "waiting_for": list(now.waiting_for),
            "widths": dict(now.widths),
            "preemptions": now.preemptions,
        }

    @property
    def shown(self) -> Dispatch:
        """The dispatcher, for a display in the scheduler's process: to be read only."""
        return self._dispatch

    def snapshot(self) -> Snapshot:
        """The dispatcher's state; to be asked for in the scheduler's process."""
        return self._dispatch.snapshot()


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


def _work(facts: Mapping[str, Any]) -> Work | None:
    """What a worker did for a task that has a result or an error, of which Dask tells these facts."""
    compute = [entry for entry in facts.get("startstops") or () if entry["action"] == "compute"]
    if not compute:
        return None
    dropped = str(facts.get("typename")).endswith(".Dropped")
    return Work(start_s=compute[0]["start"], stop_s=compute[-1]["stop"], dropped=dropped)


class ControlPlugin(WorkerPlugin):
    """Passes what the dispatcher tells a worker on to the work in its process, and to its engine.

    Args:
        pass_on: is given each order too.
    """

    name = "spotlight-control"

    def __init__(self, pass_on: Callable[[Order], None] = lambda order: None) -> None:
        self._pass_on = pass_on

    def setup(self, worker: Worker) -> None:
        worker.stream_handlers[ORDER] = self._order
        worker.stream_handlers[PLACE] = self._place

    def _order(self, order: str, facts: dict[str, Any]) -> None:
        command = order_from_message(order, facts)
        signals.obey(command)
        self._pass_on(command)

    @staticmethod
    def _place(gang: str, shard: int, value: Any) -> None:
        signals.obey(shard_from_message(gang, shard, value))
