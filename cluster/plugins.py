"""Dask's events into `spotlight.policy`, its launches back into Dask. The only user of Dask's internals.

`Placer` runs on the scheduler's event loop. It uses, of the scheduler: ``tasks``, ``running``,
``workers``, ``handlers``, ``loop``, ``set_restrictions``, ``transitions`` and ``send_all``; of a task:
``state``, ``resource_restrictions`` and ``suspicious``; of a worker: ``processing`` and ``resources``.

Invariants: a gated task is in Dask's state "no-worker" until a launch names its worker; a worker gets
one task at a time; a lost worker's tasks go back behind the gate with one more loss, and are never
counted as failures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Worker, WorkerPlugin

from spotlight.costs import Span, WorkerLife
from spotlight.policy import Idle, Pool, View, Waiting, plan
from spotlight.signals import signals

GATED: dict[str, tuple[Pool, ...]] = {"any": ("reserved", "spot"), "spot": ("spot",), "reserved": ("reserved",)}
"""Pool annotation of a gated task to the pools it may run in, the preferred one first."""
CLOSE, STOP = "spotlight-close-exploration", "spotlight-stop"


@dataclass(frozen=True, slots=True)
class Label:
    """What the annotations say of a task."""

    pool: str
    phase: str
    iteration: int


class Placer(SchedulerPlugin):
    """Opens the gate: whenever anything changes, asks `plan` and launches what it says."""

    name = "spotlight-placer"

    def __init__(self, run: str, *, close_with_training: bool) -> None:
        self._run = run
        self._close_with_training = close_with_training
        self._labels: dict[Any, Label] = {}
        self._waiting: dict[Any, Waiting] = {}
        self._trained = -1
        self._pumping = self._stopping = False
        self._order = 0
        self._running: dict[Any, tuple[str, float]] = {}
        self._lives: dict[str, WorkerLife] = {}
        self._spans: list[Span] = []

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.handlers.update(spotlight_status=self.status, spotlight_drain=self.drain, spotlight_stop=self.stop)

    # What happened

    def update_graph(self, scheduler: Scheduler, *, annotations: dict[str, dict[Any, Any]], **_: Any) -> None:
        for key, pool in annotations.get("pool", {}).items():
            label = Label(pool, annotations["phase"][key], annotations["iteration"][key])
            self._labels[key] = label
            if pool in GATED:
                self._order += 1
                exploring = label.phase.startswith("explore")
                self._waiting[key] = Waiting(id=str(key), pools=GATED[pool], order=self._order, exploring=exploring)
        self._schedule_pump()

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        label = self._labels.get(key)
        if label is None:
            return
        if finish == "processing":
            worker = self._scheduler.tasks[key].processing_on
            if worker is not None:
                self._running[key] = (worker.address, time.time())
        elif start == "processing":
            address, started_s = self._running.pop(key, ("", 0.0))
            if finish in ("memory", "erred"):
                self._record(key, label, facts, failed=finish == "erred")
            elif address in self._lives:
                self._lose(key, label, self._lives[address], started_s)
        if finish == "memory" and label.phase == "train":
            self._training_ended(label.iteration)
        if finish == "forgotten":
            self._labels.pop(key)
            self._waiting.pop(key, None)
        self._schedule_pump()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        state = scheduler.workers[worker]
        pool = next((pool for pool in ("reserved", "spot") if pool in state.resources), None)
        if pool:
            self._lives[worker] = WorkerLife(
                worker=str(state.name), pool=pool, joined_s=time.time(), left_s=None, reason=""
            )
            self._schedule_pump()

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> None:
        life = self._lives.get(worker)
        if life is None:
            return
        self._lives[worker] = replace(life, left_s=time.time(), reason="end" if self._stopping else "lost")
        self._schedule_pump()

    def log_event(self, topic: str, msg: Any) -> None:
        """Forgive a lost worker's tasks: losing a spot machine is no fault of theirs."""
        if topic == "all" and isinstance(msg, dict) and msg.get("action") == "remove-worker":
            for key in msg.get("processing-tasks", ()):
                if key in self._scheduler.tasks:
                    self._scheduler.tasks[key].suspicious = 0

    # What follows

    def _schedule_pump(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._scheduler.loop.add_callback(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._stopping:
            return
        parked = {w.id: key for key, w in self._parked()}
        called_off = [key for key in parked.values() if self._called_off(key)]
        for key in called_off:
            del parked[str(key)]
            self._launch(key, self._head(), resource="head")
        addresses = {str(life.worker): address for address, life in self._lives.items() if life.left_s is None}
        view = View(
            idle=tuple(self._idle()),
            waiting=tuple(self._pools_now(key) for key in parked.values()),
        )
        for launch in plan(view):
            self._launch(parked[launch.request], addresses[launch.worker], resource="engine")

    def _parked(self) -> Iterator[tuple[Any, Waiting]]:
        for key, waiting in self._waiting.items():
            task = self._scheduler.tasks.get(key)
            if task is not None and task.state == "no-worker":
                yield key, waiting

    def _idle(self) -> Iterator[Idle]:
        for state in self._scheduler.running:
            life = self._lives.get(state.address)
            if life and not state.processing:
                yield Idle(worker=life.worker, pool="spot" if life.pool == "spot" else "reserved")

    def _pools_now(self, key: Any) -> Waiting:
        """Once training has ended, reserved workers help with the exploration that is left."""
        waiting, label = self._waiting[key], self._labels[key]
        helped = waiting.exploring and label.iteration <= self._trained + 1
        return replace(waiting, pools=("spot", "reserved")) if helped else waiting

    def _called_off(self, key: Any) -> bool:
        label = self._labels[key]
        closed = self._close_with_training and label.iteration <= self._trained + 1
        return closed and self._waiting[key].exploring and self._trained >= 0

    def _head(self) -> str:
        return next(state.address for state in self._scheduler.running if "head" in state.resources)

    def _launch(self, key: Any, address: str, *, resource: str) -> None:
        self._scheduler.tasks[key].resource_restrictions = {resource: 1}
        self._scheduler.set_restrictions({key: {address}})
        self._scheduler.transitions({key: "processing"}, stimulus_id=f"spotlight-launch-{time.time()}")

    def _training_ended(self, iteration: int) -> None:
        self._trained = max(self._trained, iteration)
        if self._close_with_training:
            self._tell({"op": CLOSE, "run": self._run, "iteration": iteration + 1})

    def _tell(self, message: dict[str, Any]) -> None:
        self._scheduler.send_all({}, {address: [message] for address in self._scheduler.workers})

    # What the driver asks

    def stop(self) -> None:
        """Launch nothing more; what runs ends at its next step boundary."""
        self._stopping = True
        self._tell({"op": STOP, "run": self._run})

    def status(self) -> dict[str, Any]:
        """What is running where, for a display; plain values."""
        alive = [life for life in self._lives.values() if life.left_s is None]
        return {
            "workers": dict(Counter(life.pool for life in alive)),
            "running": dict(Counter(self._labels[key].phase for key in self._running)),
            "waiting": sum(1 for _ in self._parked()),
            "preemptions": sum(life.reason == "lost" and life.pool == "spot" for life in self._lives.values()),
        }

    def drain(self) -> dict[str, list[dict[str, Any]]]:
        """The spans since the last call, and the lives of all workers so far."""
        spans, self._spans = self._spans, []
        return {
            "spans": [asdict(span) for span in spans],
            "workers": [asdict(life) for life in self._lives.values()],
        }

    def _record(self, key: Any, label: Label, facts: dict[str, Any], *, failed: bool) -> None:
        life = self._lives.get(facts.get("worker", ""))
        compute = [one for one in facts.get("startstops") or () if one["action"] == "compute"]
        if life and compute:
            outcome = "failed" if failed else "dropped" if facts.get("typename") == "Dropped" else "done"
            self._spans.append(self._span(key, label, life, compute[0]["start"], compute[-1]["stop"], outcome))

    def _lose(self, key: Any, label: Label, life: WorkerLife, started_s: float) -> None:
        """The task goes back behind the gate, if it came from there, ahead of fresh work."""
        self._spans.append(self._span(key, label, life, started_s, time.time(), "lost"))
        if key in self._waiting:
            self._waiting[key] = replace(self._waiting[key], losses=self._waiting[key].losses + 1)

    @staticmethod
    def _span(key: Any, label: Label, life: WorkerLife, start_s: float, stop_s: float, outcome: str) -> Span:
        return Span(
            worker=life.worker,
            pool=life.pool,
            phase=label.phase,
            iteration=label.iteration,
            key=str(key),
            start_s=start_s,
            stop_s=stop_s,
            outcome=outcome,
        )


class Ears(WorkerPlugin):
    """Passes what the `Placer` tells a worker on to the work in its process."""

    name = "spotlight-ears"

    def setup(self, worker: Worker) -> None:
        worker.stream_handlers[CLOSE] = signals.close_exploration
        worker.stream_handlers[STOP] = signals.stop
