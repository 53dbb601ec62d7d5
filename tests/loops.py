"""The real loop on a virtual cluster that is struck by a fault schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import Event, Instruction, Train
from cluster.virtual.clock import VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.faults import DriverKilled, Schedule, inject, stays
from cluster.virtual.timing import Denoising, Fixed
from graphs.layers import Graph
from graphs.loop import Loop, synchronous
from graphs.tasks import exploration, sampling, training
from runs import NoWatch
from spotlight import config
from spotlight.device import protocol
from spotlight.device.engine import InProcess
from spotlight.device.modelled import ModelledDevice
from spotlight.records import Request, Stopped
from spotlight.store import weights
from spotlight.store.creating import create_run
from spotlight.store.rundir import RunDir


class LoopTiming:
    """How long the calls of real graphs take."""

    launch_s, form_s, graph_s = 0.02, 0.05, 0.1

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.start_up_s = schedule.start_up_s

    def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
        if function in (sampling.rollout_shard, sampling.rollout_ahead):
            return self._denoising(arguments()[1])
        if function is exploration.explore_slot:
            _, allocation, slot, *_ = arguments()
            return self._denoising(allocation[slot]) if slot < len(allocation) else Fixed(seconds=0.0)
        if function in (training.gradient, training.add_gradients, training.update):
            return Fixed(seconds=self._schedule.train_s)
        return Fixed(seconds=0.05)

    @staticmethod
    def _denoising(request: Request) -> Denoising:
        return Denoising(request=request.id, samples=len(request.seeds), steps=request.steps)

    def step_s(self, samples: int, width: int, pool: str) -> float:
        return self._schedule.step_s * samples / width


def go_struck(
    run: RunDir,
    schedule: Schedule,
    device: Callable[[], protocol.Device] = ModelledDevice,
    trained: list[str] | None = None,
    kills: Container[int] = (),
) -> list[str]:
    """A run to its end, resumed after each death of its driver; returns how each driver ended.

    Args:
        device: makes one for each driver.
        trained: gets the address of each worker that begins to train.
        kills: which of them are killed half a second later, counted from 0.
    """
    with protocol.using(device()):  # of a module's fixture too, nothing stays installed
        return _go_struck(run, schedule, device, [] if trained is None else trained, kills)


def _go_struck(
    run: RunDir,
    schedule: Schedule,
    device: Callable[[], protocol.Device],
    trained: list[str],
    kills: Container[int],
) -> list[str]:
    clock, chance, committed = VirtualClock(), Random(schedule.seed), dict[str, int]()
    clusters: list[VirtualCluster] = []

    def strike_somebody(fault: Any, whom: int) -> None:
        workers = [worker for worker in clusters[-1].workers.values() if worker.pool != "head"]
        inject(clusters[-1], fault, workers[whom % len(workers)].address if workers else "", chance)

    def told(event: Event, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Train):
                if len(trained) in kills:
                    clock.after(0.5, lambda address: clusters[-1].machines.kill(address), each.address)
                trained.append(each.address)

    for at_s, fault, whom in schedule.faults:
        clock.at(at_s, strike_somebody, fault, whom)
    ends: list[str] = []
    while not ends or ends[-1] != "done":
        protocol.install(device())  # a new process remembers nothing
        clusters.append(
            VirtualCluster(
                run.path.name,
                Dispatcher(schedule.rules, logged=False),
                clock,
                LoopTiming(schedule),
                stays(schedule, clock.now_s),
                lag=lambda kind: chance.uniform(0.0, schedule.lag_s) if schedule.lag_s else 0.0,
                committed=committed,
                told=told,
            )
        )
        try:
            Loop(RunDir.open(run.path), partial(_compute, clusters[-1]), NoWatch(), clock).go()
            ends.append("done")
        except (DriverKilled, Stopped) as end:
            ends.append(type(end).__name__)
        clusters[-1].close()
    return ends


def _compute(cluster: VirtualCluster, graph: Graph) -> Mapping[str, Any]:
    wanted = {name: keys if isinstance(keys, list) else [keys] for name, keys in graph.outputs.items()}
    keys = list(chain.from_iterable(wanted.values()))
    results = dict(zip(keys, cluster.compute(graph.graph, keys), strict=True))
    return {
        name: [results[key] for key in keys] if isinstance(keys, list) else results[keys]
        for name, keys in graph.outputs.items()
    }


def begun_and_ended(settings: Path, overrides: Sequence[str]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The weights that a run in this process begins and ends with."""
    with tempfile.TemporaryDirectory() as directory, protocol.using(InProcess(paced=False)):
        run = create_run(config.load(settings, [*overrides, f"run.dir={directory}"]), 0.0)
        Loop(run, synchronous, NoWatch()).go()
        first, last = (weights.published(run.url, version) for version in (0, len(run.history())))
        assert first
        assert last
        return weights.load(run.url, first.weights), weights.load(run.url, last.weights)


def apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """How far weights differ, in all."""
    return sum(float((first[name].float() - second[name].float()).abs().sum()) for name in first)
