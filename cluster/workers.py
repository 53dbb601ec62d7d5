"""One worker process: it lives as long as its driver, runs one task at a time, and leaves on notice.

The worker stays light: a child process, its engine, owns the device, and is killed and started again without
it. Both are forked from a warm parent that has done the imports, so that either starts in moments;
the parent starts no thread and holds no device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Reschedule, Security, Status, Worker
from numpy.typing import NDArray

from cluster import peers
from cluster.notices import Notice, first_notice, sources
from cluster.plugins import BEAT, HOLDS, LOST_ENGINE, NOTICE, ControlPlugin
from spotlight.clock import wall_clock
from spotlight.device.calls import Call, ImagesCall, PrepareCall, RolloutCall, ScoreCall, T, TrainCall
from spotlight.device.process import Beat, EngineLost, EngineProcess
from spotlight.device.protocol import ALONE, Prepared, install
from spotlight.device.signals import Leave, signals
from spotlight.records import (
    Dropped,
    Interrupted,
    Placement,
    Request,
    Rollout,
    Sample,
    Scored,
    SpotlightError,
    Surplus,
    WeightsRef,
)
from spotlight.store import weights
from spotlight.store.node import Node, NotOnNode

BACK_OFF_S = 0.01
"""Before a task is sent back: it comes again at once, and the scheduler needs a moment to see why."""
LEAVE_POLL_S = 0.01
CLOSE_MARGIN_S = 2.0
"""Left of a notice's time for handing over what the worker's memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker process needs to know."""

    name: str
    number: int
    """Among the machine's workers; picks its GPU where there are several."""
    scheduler: str
    resources: Mapping[str, float]
    local_directory: str
    settings: Mapping[str, Any]
    """Dask's configuration, the same for all processes of a run."""
    node: Path
    """Root of the shared memory of its machine."""
    hang_after_s: float
    quarantine_after: int
    """Engine processes in a row that a task may lose before it fails."""
    notices: tuple[str, ...]
    """Where notices of preemption come from; see `cluster.notices`."""
    grace_s: float
    """From a notice that tells no deadline."""
    security: Security | None
    """The run's certificate and key, in memory alone: they are in no file, command line or text of this object."""


def warm_parent() -> ForkServerContext:
    """The context whose processes are forked from the warm parent; the first start waits for its imports."""
    # Python 3.11.0 would let any user start processes here (CVE-2022-42919).
    util.abstract_sockets_supported = False  # type: ignore[misc]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cluster.warm"])
    return context


def serve(spec: WorkerSpec, lifeline: Connection) -> None:
    """Run a worker until it is told to close or the driver is gone; the body of a worker process.

    Args:
        lifeline: its other end is held by the driver; when that closes, however the driver ended,
            this process ends at once, so that no orphan goes on training or committing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which stops workers in order
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it ends its own child
    dask.config.set(spec.settings)
    logging.getLogger("distributed").setLevel(logging.ERROR)  # losing a peer is no news here
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)  # a failed task's error goes to the driver
    asyncio.run(_serve(spec))
    os._exit(0)  # a task thread that is still at work would keep the process alive


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


async def _serve(spec: WorkerSpec) -> None:
    engine = EngineProcess(warm_parent(), spec.number, node=spec.node, hang_after_s=spec.hang_after_s)
    async with Worker(
        spec.scheduler,
        name=spec.name,
        nthreads=1,
        resources=dict(spec.resources),
        memory_limit=0,
        host="127.0.0.1",
        security=spec.security,
        local_directory=spec.local_directory,
        dashboard=False,
        plugins=(ControlPlugin(engine.tell),),
    ) as worker:
        node = Node(spec.node)
        peers.serve(worker, node)
        install(WorkerDevice(worker, engine, node, quarantine_after=spec.quarantine_after))
        waiting = asyncio.create_task(_leave_on_notice(worker, engine, spec))
        await worker.finished()
        waiting.cancel()
    engine.close()


class WorkerDevice:
    """A `Device` whose work is done in the engine process; the scheduler is told how it goes.

    Its verbs are called by task threads. Each may raise `Reschedule`: it is to be done anew, here or elsewhere.
    The weights that a request asks for are on the node before the engine is: they come from another node that has
    them, or else from the run directory.
    """

    def __init__(self, worker: Worker, engine: EngineProcess, node: Node, *, quarantine_after: int) -> None:
        self._worker, self._engine, self._node = worker, engine, node
        self._quarantine_after, self._lost_in_row = quarantine_after, 0

    def prepare(self, run_dir: str) -> Prepared:
        return self._call(run_dir, PrepareCall())

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        self._bring(Path(run_dir), request)
        return self._call(run_dir, RolloutCall(request=request, place=place), place if place.gang else None)

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        self._bring(Path(run_dir), request)
        return self._call(run_dir, ScoreCall(request=request))

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        self._bring(Path(run_dir), request)
        return self._call(run_dir, ImagesCall(request=request))

    def train(
        self, run_dir: str, weights: WeightsRef, parts: tuple[tuple[Sample, ...], ...], of: int, iteration: int
    ) -> None:
        self._call(run_dir, TrainCall(weights=weights, parts=parts, of=of, iteration=iteration))

    def _call(self, run_dir: str, call: Call[T], gang: Placement | None = None) -> T:
        """Run a call on the engine.

        Raises:
            Reschedule: it is to be done anew, here or elsewhere.
            SpotlightError: it lost its engine process too many times in a row.
        """
        try:
            value = self._engine.call(run_dir, call, partial(self._beat, gang))
        except Interrupted:
            time.sleep(BACK_OFF_S)
            raise Reschedule from None
        except EngineLost as lost:
            self._count(call.verb, gang, str(lost))
            raise Reschedule from None
        self._lost_in_row = 0
        return value

    def _bring(self, run_dir: Path, request: Request) -> None:
        part = weights.PARTS[request.policy]
        sha256 = weights.digest(run_dir, request.weights, part)
        if self._node.holds(sha256):
            return
        asked = self._worker.scheduler.spotlight_holders(sha256=sha256)
        holders = asyncio.run_coroutine_threadsafe(_answer(asked), self._worker.loop.asyncio_loop).result()  # type: ignore[attr-defined]
        with contextlib.suppress(NotOnNode):  # the engine will read the store itself
            weights.bring(run_dir, request.weights, self._node, part, peers.sources(self._worker, holders))
            self._tell(HOLDS, sha256=sha256)

    def _count(self, verb: str, gang: Placement | None, reason: str) -> None:
        """Requests are counted by the scheduler, wherever they run; the rest here."""
        self._tell(LOST_ENGINE, worker=self._worker.name, gang=gang.gang if gang else "", reason=reason)
        if gang is None:
            self._lost_in_row += 1
            if self._lost_in_row >= self._quarantine_after:
                raise SpotlightError(
                    f"{verb!r} lost its engine process {self._lost_in_row} times in a row on worker "
                    f"{self._worker.name}: {reason}; if memory is short, make train.micro_batch or the requests "
                    "smaller, then `spotlight resume` the run"
                )
        time.sleep(BACK_OFF_S)

    def _beat(self, gang: Placement | None, beat: Beat) -> None:
        if gang and gang.rank == 0 and beat.steps:
            where = {"gang": gang.gang, "epoch": gang.epoch}
            self._tell(BEAT, **where, step=beat.step, steps=beat.steps, resumed=beat.resumed)

    def _tell(self, op: str, **facts: Any) -> None:
        self._worker.loop.add_callback(self._worker.batched_send, {"op": op, **facts})


async def _answer(asked: Awaitable[Any]) -> Any:
    return await asked


async def _leave_on_notice(worker: Worker, engine: EngineProcess, spec: WorkerSpec) -> None:
    notice = await first_notice(sources(spec.notices, grace_s=spec.grace_s))
    last = threading.Timer(max(0.0, notice.deadline_s - wall_clock()), os._exit, (0,))  # whatever hangs by then
    last.daemon = True
    last.start()
    worker.batched_send({"op": NOTICE, "reason": notice.reason})
    signals.obey(Leave())
    engine.tell(Leave())
    await _finish(worker, notice)
    with contextlib.suppress(Exception):  # whatever goes wrong, the worker is gone by the deadline
        async with asyncio.timeout(max(0.0, notice.deadline_s - wall_clock())):
            await worker.close_gracefully()
    await worker.close(executor_wait=False)


async def _finish(worker: Worker, notice: Notice) -> None:
    """Take no new tasks, and let those in flight come to their step boundary, if there is time."""
    worker.status = Status.paused
    while worker.state.executing_count and wall_clock() < notice.deadline_s - CLOSE_MARGIN_S:
        await asyncio.sleep(LEAVE_POLL_S)
