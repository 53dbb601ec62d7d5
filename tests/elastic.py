"""A live cluster without a loop around it: single requests on it, and blows struck at a chosen step."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Scheduler
from numpy.typing import NDArray

from cluster.dispatch.snapshot import Snapshot
from cluster.messages import BEAT
from cluster.scheduler.plugin import DispatchPlugin
from cluster.start.run_cluster import RunCluster
from graphs.iteration import prepare_graph
from graphs.layers import Graph, Layers
from graphs.requests import rollout_requests, unexplored
from graphs.tasks import sampling
from graphs.tasks.context import RunContext
from runs import WAIT_S, settings_file, wait_for
from spotlight import config as configuration
from spotlight.records import Request, Rollout, Span, WorkerLife
from spotlight.rl.prompts import read_prompts
from spotlight.store.creating import create_run
from spotlight.store.latents import LatentStore
from spotlight.store.node import memory_roots

STEPS = 30
"""Of a request: some two seconds, so that a blow at step 5 finds it at work."""


class Live:
    """A run's cluster, and what its tests ask of it."""

    def __init__(self, directory: Path, overrides: Sequence[str]) -> None:
        steps = (f"rollout.steps={STEPS}", "rollout.sampler=cps", "rollout.sde_window=[0,10]")
        self.config = configuration.load(settings_file(directory), (*steps, *overrides))
        self.run = create_run(self.config, time.time())
        self.pools = RunCluster(self.config, self.run.path)
        self._requests = 0
        self.events: list[dict[str, Any]] = []
        self._spans: list[Span] = []
        self._lives: dict[int, WorkerLife] = {}
        spot, reserved = self.config.pools.spot.workers, self.config.pools.reserved.workers
        wait_for(lambda: len(self.snapshot().workers) == spot + reserved)
        graph = prepare_graph(str(self.run.path))
        self.context: RunContext = self.pools.client.get(graph.graph, graph.outputs["context"])

    def snapshot(self) -> Snapshot:
        """The dispatcher's state, taken on the scheduler's event loop."""
        return self.pools.snapshot()

    @property
    def plugin(self) -> DispatchPlugin:
        """In this process."""
        plugin = self.scheduler.plugins[DispatchPlugin.name]
        assert isinstance(plugin, DispatchPlugin)
        return plugin

    @property
    def scheduler(self) -> Scheduler:
        """In this process."""
        assert self.pools.cluster
        assert self.pools.cluster.scheduler
        return self.pools.cluster.scheduler

    def request(self) -> Request:
        """A fresh one on every call."""
        self._requests += 1
        prompts = read_prompts(self.config.data.train_prompts)
        selection = unexplored(self.config, self.context, self._requests, prompts[:1])
        return rollout_requests(self.config, self.context, selection, self.context.start)[0]

    def start(self, request: Request, *, pool: str = "spot", window_s: float = inf, widths: Sequence[int] = ()) -> Any:
        """Begin a request; returns the future of its first shard.

        Args:
            widths: those of the settings, if left out.
            window_s: how long reserved workers may run it while there are spot workers.
        """
        layers, widths = Layers(), tuple(widths) or self.config.strategy.widths
        call = (sampling.rollout_shard, str(self.run.path), request)
        shards = layers.add_requests("rollout", request.iteration, [call], pool=pool, widths=widths, window_s=window_s)
        graph = Graph(graph=layers.graph(), outputs={"shards": shards[0]})
        self._all = self.pools.client.get(graph.graph, shards[0], sync=False)
        return self._all[0]

    def call_off(self) -> None:
        """Want the last request no more."""
        for future in self._all:
            future.release()

    def finish(self) -> Rollout:
        """Wait for all shards of the last request; returns what the first one did."""
        done = [future.result(timeout=WAIT_S) for future in self._all]
        assert isinstance(done[0], Rollout)
        return done[0]

    def history(self) -> list[dict[str, Any]]:
        """All events so far."""
        self._follow()
        return self.events

    def spans(self, request: Request) -> list[Span]:
        """What workers did for a request, so far."""
        self._follow()
        layer = f"('rollout-{request.iteration}',"
        return [span for span in self._spans if span.key.startswith(layer)]

    def lives(self) -> list[WorkerLife]:
        """Of all workers so far."""
        self._follow()
        return list(self._lives.values())

    def _follow(self) -> None:
        drained = self.pools.drain()
        self.events += drained.events
        self._spans += drained.spans
        self._lives |= drained.workers

    def store(self) -> LatentStore:
        return LatentStore(self.run.latents_url)

    def commits(self, request: Request) -> Counter[int]:
        """How many epochs committed each step."""
        folder = Path(self.run.latents_url) / "commits" / f"{request.iteration:05d}" / request.id
        found = (re.fullmatch(r"commit\.(\d+)\.(\d+)", path.name) for path in folder.iterdir())
        return Counter(int(match[2]) for match in found if match)

    @contextmanager
    def at_step(self, step: int, strike: Callable[[list[str]], None]) -> Iterator[None]:
        """When the gang at work reports this step, strike once, given the names of its workers by rank."""
        handlers = self.scheduler.stream_handlers
        report, reached, blows = handlers[BEAT], threading.Event(), []

        def listen(**facts: Any) -> None:
            report(**facts)
            if facts["step"] >= step and not facts["resumed"] and not reached.is_set():
                reached.set()
                gang = self.plugin.snapshot().gangs[facts["gang"]]
                blow = threading.Thread(target=strike, args=(list(gang.workers),))
                blows.append(blow)
                blow.start()

        handlers[BEAT] = listen
        try:
            yield
            assert reached.is_set(), f"no gang came to step {step}"
        finally:
            handlers[BEAT] = report
            for blow in blows:
                blow.join()

    @contextmanager
    def at_each(self, resumed: bool, strike: Callable[[list[str]], None]) -> Iterator[None]:
        """At each report of a gang that begins (or has taken a step), strike, given its workers' names."""
        handlers = self.scheduler.stream_handlers
        report = handlers[BEAT]

        def listen(**facts: Any) -> None:
            report(**facts)
            if facts["resumed"] == resumed:
                members = list(self.plugin.snapshot().gangs[facts["gang"]].workers)
                threading.Thread(target=strike, args=(members,)).start()

        handlers[BEAT] = listen
        try:
            yield
        finally:
            handlers[BEAT] = report

    def when_formed(self, strike: Callable[[list[str]], None]) -> None:
        """Strike the gang of the last request as soon as it is formed, while its ranks look for each other."""
        name = f"rollout-{self._requests}/0"
        strike(wait_for(lambda: name in (gangs := self.snapshot().gangs) and list(gangs[name].workers)))

    def worker_pid(self, name: str) -> int:
        assert self.pools.cluster
        return int(self.pools.cluster.workers[name]._process.pid)

    def engine_pid(self, name: str) -> int:
        (pid,) = self.pools.client.run(engine_pid, workers=[self.snapshot().workers[name]]).values()
        return int(pid)

    def engine_pids(self) -> list[int]:
        """Of all workers, at once: from what they leave in node memory, without asking anybody."""
        slots = [path for root in self.memory() for path in root.glob("slot-*")]
        return [int(recorded.split()[0]) for path in slots if (recorded := path.read_text())]

    def memory(self) -> list[Path]:
        """What the workers share; a run that another test began in the same second has the name, and other sessions."""
        return memory_roots(f"{self.run.path.name}-{self.pools.session}")

    def kill(self, *names: str) -> None:
        for pid in [self.worker_pid(name) for name in names]:
            os.kill(pid, signal.SIGKILL)

    def full(self) -> None:
        """Wait until every place has a worker."""
        spot, reserved = self.config.pools.spot.workers, self.config.pools.reserved.workers
        wait_for(lambda: len(self.snapshot().workers) == spot + reserved)

    def close(self) -> None:
        self.pools.close()


def engine_pid() -> int:
    """Of the worker that this is run on, by ``client.run``."""
    from spotlight.device.protocol import current

    return current()._engine.pid  # type: ignore[attr-defined]


def device_number() -> int:
    """Which of the machine's devices the worker has that this is run on."""
    from spotlight.device.protocol import current

    return current()._engine._number  # type: ignore[attr-defined]


def latents(store: LatentStore, request: Request) -> NDArray[np.float32]:
    return store.clean(request)


def undisturbed(live: Live, request: Request) -> NDArray[np.float32]:
    """What the same request gives in this process, alone: the samples do not depend on the run's name."""
    from spotlight.device.engine import Engine

    engine = Engine(live.run.path)
    alone = replace(request, iteration=request.iteration + 10_000)
    engine.rollout(alone)
    return engine.store.clean(alone)
