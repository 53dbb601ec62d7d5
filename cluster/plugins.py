"""Dask's events into `spotlight.policy`, its launches back into Dask. The only user of Dask's internals.

`Placer` runs on the scheduler's event loop. It uses, of the scheduler: ``tasks``, ``running``, ``workers``,
``handlers``, ``stream_handlers``, ``loop``, ``set_restrictions``, ``transitions``, ``remove_worker`` and ``send_all``;
of a task: ``state``, ``resource_restrictions``, ``worker_restrictions``, ``processing_on`` and ``suspicious``; of a
worker: ``address``, ``name``, ``processing``, ``resources`` and ``last_seen``. `Ears` uses the ``stream_handlers``
of a worker.

Invariants: a gated task is in Dask's state "no-worker" until a launch names its worker; the shards of a gang are
launched in one transition or not at all; a worker gets one task at a time; a lost worker's tasks go back
behind the gate, and are never counted as failures.

A launch and what it says to a shard travel in the same ordered stream, so a task finds its
placement on the worker when it starts.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from cluster.gangs import GATED, Gang, gang_of, members_of
from cluster.journal import Journal, Label
from spotlight.decisions import PlacementLog, turn_row
from spotlight.offload import Sides, Turn, turn
from spotlight.policy import Idle, Pool, Running, View, Waiting, plan, widen
from spotlight.records import Placement, Spare
from spotlight.signals import signals

ORDER, PLACE = "spotlight-order", "spotlight-place"
"""To workers: an order for the work in flight; where a shard runs."""
BEAT, LOST_ENGINE, NOTICE = "spotlight-beat", "spotlight-lost-engine", "spotlight-notice"
"""From workers: how far a gang is; the engine process died; the machine will be taken away."""
HOLDS = "spotlight-holds"
"""From workers: a file of weights is on their node now."""
MOST_HOLDERS = 3
"""Told to a node that lacks a file: the others are spares, should the first be lost in the middle of it."""
WATCH_S = 0.5
LATE_S = 0.01
"""A timer for the end of a window rings so much after it, so that the window is over when it is looked at."""
GATE = {"gate": 1}


@dataclass(frozen=True, slots=True)
class Window:
    """How long reserved workers roll out, from when an iteration's graph came."""

    began_s: float
    """On the monotonic clock."""
    window_s: float
    pools: tuple[Pool, ...]


class Placer(SchedulerPlugin):
    """Opens the gate: whenever anything changes, asks `plan` and launches what it says.

    Args:
        widens: whether a gang at work forms anew when idle workers could make it wider; it then resumes its steps.
        moves: whether a rollout at work on reserved workers goes on elsewhere, from its last step, once their window is
            over.
        evict: is given the name of a worker that hangs, to end its process.
    """

    name = "spotlight-placer"

    def __init__(
        self,
        run: str,
        *,
        close_with_training: bool,
        hang_after_s: float = 60.0,
        losses: int = 5,
        widens: bool = True,
        moves: bool = True,
        evict: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._run = run
        self._close_with_training = close_with_training
        self._hang_after_s, self._losses, self._widens, self._moves = hang_after_s, losses, widens, moves
        self._evict = evict
        self._labels: dict[Any, Label] = {}
        self._gangs: dict[str, Gang] = {}
        self._gang_of: dict[Any, Gang] = {}
        self._parts: dict[Any, None] = {}
        """Training, part by part."""
        self._trainer = ""
        """The worker that had the last part: it holds the gradient."""
        self._window = Window(began_s=0.0, window_s=inf, pools=())
        self._turn: Turn | None = None
        self._trained = -1
        self._pumping = self._stopping = False
        self._order = 0
        self._running: dict[Any, tuple[str, float]] = {}
        self._journal = Journal()
        self._nodes: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        """Of the workers that are alive, by name."""
        self._holders: dict[str, dict[str, None]] = {}
        """Of each file of weights, by hash, the workers whose nodes have it, the latest last."""
        self._leaving: set[str] = set()
        """Names of workers under notice, until another takes the name."""
        self._hung: set[str] = set()
        self._placements = PlacementLog()

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.handlers.update(spotlight_status=self.status, spotlight_stop=self.stop)
        scheduler.handlers["spotlight_drain"] = self._journal.drain
        scheduler.handlers["spotlight_holders"] = self.holders
        heard = ((BEAT, self._beat), (LOST_ENGINE, self._lost_engine), (NOTICE, self._notice), (HOLDS, self._holds))
        scheduler.stream_handlers.update(heard)
        PeriodicCallback(self._watch, WATCH_S * 1000).start()

    # What happened

    def update_graph(self, scheduler: Scheduler, *, annotations: dict[str, dict[Any, Any]], **_: Any) -> None:
        shards, widths = annotations.get("shards", {}), annotations.get("widths", {})
        pools, windows = annotations.get("pool", {}), annotations.get("window_s", {})
        for key in sorted(pools, key=lambda key: (len(key[0]), key)):  # rounds and requests in the order of numbers
            pool = pools[key]
            label = Label(pool, annotations["phase"][key], annotations["iteration"][key])
            self._labels[key] = label
            if pool in GATED:
                gang = self._gang(gang_of(key, shards.get(key, 1)), label, tuple(widths.get(key, (1,))))
                insort(gang.keys, key)
                self._gang_of[key] = gang
                if gang.windowed:
                    self._window = Window(time.monotonic(), windows.get(key, inf), gang.pools)
            elif pool == "training":
                self._parts[key] = None
        if self._window.window_s < inf:
            scheduler.loop.call_later(self._window.window_s + LATE_S, self._schedule_pump)
        self._schedule_pump()

    def _gang(self, name: str, label: Label, widths: tuple[int, ...]) -> Gang:
        if name not in self._gangs:
            self._order += 1
            self._gangs[name] = Gang(
                name=name,
                iteration=label.iteration,
                exploring=label.phase.startswith("explore"),
                pools=GATED[label.pool],
                order=self._order,
                widths=widths,
                windowed=label.phase == "rollout",
            )
        return self._gangs[name]

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        label, gang = self._labels.get(key), self._gang_of.get(key)
        if label is None:
            return
        if finish == "processing":
            worker = self._scheduler.tasks[key].processing_on
            if worker is not None:
                self._running[key] = (worker.address, time.time())
        elif start == "processing":
            address, started_s = self._running.pop(key, ("", 0.0))
            if finish in ("memory", "erred"):
                self._journal.ended(key, label, gang, facts, failed=finish == "erred")
            elif address in self._journal.lives:
                agreed = gang and gang.planned and address in self._addresses.values()
                outcome = "stopped" if agreed else "lost"
                self._journal.span(key, label, gang, address, started_s, time.time(), outcome)
            if gang:
                self._came_back(gang, key, done=finish in ("memory", "erred"))
        if (gang or key in self._parts) and finish == "released":
            self._close_gate(key)
        if finish == "memory" and key in self._parts and key == max(part for part in self._parts if part[0] == key[0]):
            self._training_ended(label.iteration)
        if finish == "forgotten":
            self._forget(key)
        self._schedule_pump()

    def _forget(self, key: Any) -> None:
        del self._labels[key]
        self._parts.pop(key, None)
        gang = self._gang_of.pop(key, None)
        if gang:
            self._gangs.pop(gang.name, None)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        state = scheduler.workers[worker]
        pool = next((pool for pool in ("reserved", "spot") if pool in state.resources), None)
        if pool:
            node = next((name for name in state.resources if name.startswith("node:")), "")
            self._nodes[worker], self._addresses[str(state.name)] = node, worker
            self._leaving.discard(str(state.name))
            self._journal.joined(worker, str(state.name), pool)
            self._schedule_pump()

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> None:
        life = self._journal.lives.get(worker)
        if life is None:
            return
        reason = "end" if self._stopping else "left" if life.worker in self._leaving else "lost"
        self._journal.left(worker, reason)
        self._schedule_pump()

    def log_event(self, topic: str, msg: Any) -> None:
        """Before a lost worker's tasks are moved: note that it is gone, and that its loss is no fault of theirs."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker":
            for holders in self._holders.values():
                holders.pop(msg["worker"], None)
            life = self._journal.lives.get(msg["worker"])
            if life and self._addresses.get(life.worker) == msg["worker"]:
                del self._addresses[life.worker]
                if msg.get("expected") and msg["worker"] not in self._hung:
                    self._leaving.add(life.worker)  # its notice may still be on its way, in another stream
            for key in msg.get("processing-tasks", ()):
                if key in self._scheduler.tasks:
                    self._scheduler.tasks[key].suspicious = 0

    # Gangs

    def _came_back(self, gang: Gang, key: Any, *, done: bool) -> None:
        """A shard is done, or its worker is gone, or it was sent back at a step boundary."""
        worker = gang.members.pop(key, None)
        if done or worker is None:
            return
        alive = worker in self._addresses
        if not gang.breaking:
            self._break(gang, lost="" if alive else worker)
        if alive:
            gang.held = (*gang.held, worker)

    def _break(self, gang: Gang, *, lost: str) -> None:
        """The present forming is over: its other members are to leave."""
        gang.breaking = True
        planned = gang.planned or self._stopping or not self._leaving.isdisjoint((lost, *gang.members.values()))
        self._journal.event("leaves" if planned else "broken", gang=gang, lost=lost)
        if not planned:
            gang.lose()
        for worker in gang.members.values():  # after a leave that was agreed on they have ended, and hear it in vain
            self._order_gang("call_off", gang, worker)

    def _order_gang(self, order: str, gang: Gang, worker: str) -> None:
        facts = {"gang": gang.name, "epoch": gang.epoch}
        self._send(self._addresses.get(worker), {"op": ORDER, "order": order, "facts": facts})

    def _beat(self, gang: str, epoch: int, step: int, steps: int, resumed: bool, **_: Any) -> None:
        """The first rank tells where its gang is."""
        known = self._gangs.get(gang)
        if known is None or known.epoch != epoch:
            return
        if resumed:
            known.begin(step, steps, time.time())
            self._journal.gang_event("resumed", known)
            return
        first = known.step == known.resumed_at
        known.advance(step, time.time())
        if first:
            self._journal.gang_event("stepped", known)
            self._schedule_pump()

    def _lost_engine(self, worker: str, gang: str, reason: str, **_: Any) -> None:
        known = self._gangs.get(gang)
        self._journal.event("engine lost", gang=known, worker=worker, reason=reason)

    def _notice(self, worker: str, reason: str, **_: Any) -> None:
        """The worker's machine will be taken away: it gets no more work."""
        life = self._journal.lives.get(worker)
        if life:
            self._leaving.add(life.worker)
            self._journal.event("notice", worker=life.worker, reason=reason)

    def _holds(self, worker: str, sha256: str, **_: Any) -> None:
        self._holders.setdefault(sha256, {})[worker] = None

    # What follows

    def _schedule_pump(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._scheduler.loop.add_callback(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._stopping:
            return
        waiting, parked = [], {}
        for gang in list(self._gangs.values()):
            keys = self._parked(gang)
            if not keys:
                continue
            if self._is_over(gang):
                for key in keys:
                    self._dismiss(gang, key)
            elif not gang.members:
                waiting.append(gang.waiting(len(keys)))
                parked[gang.name] = keys
        turned = self._take_turns()
        self._train_on(turned)
        waiting = [self._pools_now(self._gangs[one.id], one, turned) for one in waiting]
        view = View(
            idle=tuple(self._idle()),
            waiting=tuple(waiting),
            running=tuple(self._at_work()),
            nodes=Counter(self._nodes[address] for address in self._addresses.values()),
        )
        launches = plan(view)
        widened = widen(view) if self._widens and not waiting else []
        if launches or widened:
            self._journal.decisions.append(self._placements.row(view, launches, widened))
        for launch in launches:
            self._launch(self._gangs[launch.request], parked[launch.request], launch.workers)
        for name in widened:
            self._regroup(self._gangs[name], "regroup")

    def _take_turns(self) -> Turn:
        """Whether reserved workers roll out or train now; what they should no longer roll out goes elsewhere."""
        windowed = [gang for gang in self._gangs.values() if gang.windowed]
        rolling = [gang for gang in windowed if "reserved" in {self._pool_of(name) for name in gang.members.values()}]
        sides = Sides(
            pools=self._window.pools,
            elapsed_s=time.monotonic() - self._window.began_s,
            window_s=self._window.window_s,
            spot=self._spot_for(min((gang.widths[0] for gang in windowed), default=1)),
            waiting=sum((gang.breaking or not gang.members) and not self._is_over(gang) for gang in windowed),
            rolling=sum(len(gang.members) for gang in rolling),
        )
        turned = turn(sides)
        if windowed and turned != self._turn:
            self._turn = turned
            self._journal.decisions.append(turn_row(sides, turned))
        if "reserved" not in turned.pools and self._moves:
            for gang in rolling:
                if not (gang.breaking or gang.planned):
                    self._regroup(gang, "moves")
        return turned

    def _spot_for(self, width: int) -> int:
        """Spot workers that stay, on machines where there are enough of them for a gang."""
        names = [name for name in self._addresses if self._pool_of(name) == "spot" and name not in self._leaving]
        machines = Counter(self._nodes[self._addresses[name]] for name in names)
        return sum(count for count in machines.values() if count >= width)

    def _pool_of(self, worker: str) -> str:
        return self._journal.pool(self._addresses[worker]) if worker in self._addresses else ""

    def _train_on(self, turned: Turn) -> None:
        """Let the next part of training go, if it is ready, to the worker that had the one before, if it is free."""
        ready = [key for key in self._parts if self._scheduler.tasks[key].state == "no-worker"]
        free = [idle.worker for idle in self._idle() if idle.pool == "reserved"]
        if ready and free and turned.train:
            self._trainer = self._trainer if self._trainer in free else min(free)
            self._open_gate(min(ready), self._addresses[self._trainer], "reserved")

    def _parked(self, gang: Gang) -> list[Any]:
        """Its shards behind the gate, if all that are not done are there or at work; nobody wants a released one."""
        states = {key: self._scheduler.tasks[key].state for key in gang.keys if key in self._scheduler.tasks}
        if "waiting" in states.values():
            return []
        return [key for key, state in states.items() if state == "no-worker"]

    def _is_over(self, gang: Gang) -> bool:
        """Whether what is behind the gate has nothing to do any more: done, called off, or set aside."""
        first = self._scheduler.tasks.get(gang.keys[0])
        done = first is not None and first.state in ("memory", "erred", "released")
        return done or gang.fruitless >= self._losses or self._called_off(gang)

    def _called_off(self, gang: Gang) -> bool:
        closed = self._close_with_training and gang.iteration <= self._trained + 1
        return closed and gang.exploring and self._trained >= 0

    def _dismiss(self, gang: Gang, key: Any) -> None:
        """Run a shard that has nothing to do where it costs nothing."""
        aside = gang.fruitless >= self._losses and key == gang.keys[0]
        if aside:
            self._journal.event("set aside", gang=gang)
        elif self._called_off(gang) and key == gang.keys[0]:
            self._open_gate(key, self._head(), "head")  # it sees by itself that it is called off
            return
        self._place(self._head(), gang, key, gang.losses if aside else Spare())
        self._open_gate(key, self._head(), "head")

    def _idle(self) -> Iterator[Idle]:
        for state in self._scheduler.running:
            life = self._journal.lives.get(state.address)
            if life and not state.processing and life.worker not in self._leaving:
                yield Idle(worker=life.worker, pool=self._journal.pool(state.address), node=self._nodes[state.address])

    def _at_work(self) -> Iterator[Running]:
        now_s = time.time()
        for gang in self._gangs.values():
            if gang.members and max(gang.widths) > gang.width and not (gang.breaking or gang.planned):
                address = self._addresses.get(next(iter(gang.members.values())))
                if address:
                    slots = len(gang.members) + len(self._parked(gang))
                    yield gang.running(self._journal.pool(address), self._nodes[address], slots, now_s)

    def _pools_now(self, gang: Gang, waiting: Waiting, turned: Turn) -> Waiting:
        """Rollouts run where it is their turn; once training has ended, reserved workers help with exploration."""
        if gang.windowed and "reserved" in gang.pools and "reserved" not in turned.pools:
            return replace(waiting, pools=("spot",), held=())
        helped = gang.exploring and gang.iteration <= self._trained + 1
        return replace(waiting, pools=("spot", "reserved")) if helped else waiting

    def _head(self) -> str:
        return next(state.address for state in self._scheduler.running if "head" in state.resources)

    def _launch(self, gang: Gang, parked: list[Any], workers: tuple[str, ...]) -> None:
        """Admit a whole gang, in one transition."""
        members = members_of(parked, workers)
        gang.form(members)
        for rank, (key, worker) in enumerate(members.items()):
            placement = Placement(gang=gang.name, epoch=gang.epoch, rank=rank, width=len(members))
            self._place(self._addresses[worker], gang, key, placement)
            self._restrict(key, self._addresses[worker], "engine")
        self._journal.gang_event("formed", gang)
        self._scheduler.transitions(dict.fromkeys(members, "processing"), stimulus_id=f"spotlight-{gang.name}")

    def _regroup(self, gang: Gang, why: str) -> None:
        """Have a gang form anew at its next step boundary: wider, or elsewhere."""
        gang.planned = True
        self._journal.event(why, gang=gang)
        for worker in gang.members.values():
            self._order_gang("regroup", gang, worker)

    def _open_gate(self, key: Any, address: str, resource: str) -> None:
        self._restrict(key, address, resource)
        self._scheduler.transitions({key: "processing"}, stimulus_id=f"spotlight-dismiss-{time.time()}")

    def _restrict(self, key: Any, address: str, resource: str) -> None:
        self._scheduler.tasks[key].resource_restrictions = {resource: 1}
        self._scheduler.set_restrictions({key: {address}})

    def _close_gate(self, key: Any) -> None:
        task = self._scheduler.tasks.get(key)
        if task is not None:
            task.resource_restrictions, task.worker_restrictions = dict(GATE), None

    def _training_ended(self, iteration: int) -> None:
        self._trained = max(self._trained, iteration)
        if self._close_with_training:
            self._tell("close_exploration", run=self._run, iteration=iteration + 1)

    def _tell(self, order: str, **facts: Any) -> None:
        for address in self._scheduler.workers:
            self._send(address, {"op": ORDER, "order": order, "facts": facts})

    def _place(self, address: str, gang: Gang, key: Any, what: Placement | Spare | int) -> None:
        value = asdict(what) if isinstance(what, Placement) else None if isinstance(what, Spare) else what
        self._send(address, {"op": PLACE, "gang": gang.name, "shard": gang.shard(key), "value": value})

    def _send(self, address: str | None, message: dict[str, Any]) -> None:
        if address in self._scheduler.workers:
            self._scheduler.send_all({}, {address: [message]})

    async def _watch(self) -> None:
        """Remove workers that run something and have not been heard of; their engines are watched by themselves."""
        now_s = time.time()
        for address in {address for address, _ in self._running.values()}:
            state, life = self._scheduler.workers.get(address), self._journal.lives.get(address)
            if state is not None and life and now_s - state.last_seen > self._hang_after_s:
                self._journal.event("hung", worker=life.worker)
                self._hung.add(address)
                await self._scheduler.remove_worker(address, stimulus_id="spotlight-watch", expected=True, close=True)
                self._evict(life.worker)

    # What workers ask

    def holders(self, sha256: str) -> list[str]:
        """Workers, one a node, whose nodes hold a file of weights; the latest to get it first: it serves fewest."""
        by_node = {self._nodes[address]: address for address in self._holders.get(sha256, ())}
        return list(by_node.values())[::-1][:MOST_HOLDERS]

    # What the driver asks

    def stop(self) -> None:
        """Launch nothing more; what runs ends at its next step boundary."""
        self._stopping = True
        self._tell("stop", run=self._run)

    def status(self) -> dict[str, Any]:
        """What is running where, for a display; plain values."""
        alive = [life for life in self._journal.lives.values() if life.left_s is None]
        return {
            "workers": dict(Counter(life.pool for life in alive)),
            "running": dict(Counter(self._labels[key].phase for key in self._running)),
            "waiting": sum(bool(self._parked(gang)) for gang in self._gangs.values() if not gang.members),
            "waiting_for": sorted(self._missing_pools()),
            "widths": dict(Counter(gang.width for gang in self._gangs.values() if gang.members)),
            "preemptions": sum(
                life.reason in ("lost", "left") and life.pool == "spot" for life in self._journal.lives.values()
            ),
        }

    def _missing_pools(self) -> set[str]:
        """Pools that requests wait for, and that have no worker at all now."""
        alive = {self._journal.pool(address) for address in self._addresses.values()}
        waiting = [gang for gang in self._gangs.values() if not gang.members and self._parked(gang)]
        return {pool for gang in waiting if alive.isdisjoint(gang.pools) for pool in gang.pools}


class Ears(WorkerPlugin):
    """Passes what the `Placer` tells a worker on to the work in its process, and to its engine.

    Args:
        pass_on: is given each order and its facts too.
    """

    name = "spotlight-ears"

    def __init__(self, pass_on: Callable[..., None] = lambda order, **facts: None) -> None:
        self._pass_on = pass_on

    def setup(self, worker: Worker) -> None:
        worker.stream_handlers[ORDER] = self._order
        worker.stream_handlers[PLACE] = self._place

    def _order(self, order: str, facts: dict[str, Any]) -> None:
        signals.obey(order, facts)
        self._pass_on(order, **facts)

    @staticmethod
    def _place(gang: str, shard: int, value: Any) -> None:
        if isinstance(value, dict):
            value = Placement(**value)
        signals.place(gang, shard, Spare() if value is None else value)
