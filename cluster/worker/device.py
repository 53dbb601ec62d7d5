"""The `Device` of a Dask worker: the work is done in its engine process, and the scheduler is told how it goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from functools import partial
from math import inf
from typing import Any

import numpy as np
from distributed import Reschedule, Worker
from numpy.typing import NDArray

from cluster.messages import BEAT, HOLDS, LOST_ENGINE
from cluster.worker import peers
from spotlight.device.calls import (
    Call,
    DecodeCall,
    GradientCall,
    ImagesCall,
    PrepareCall,
    RolloutCall,
    ScoreCall,
    T,
    UpdateCall,
)
from spotlight.device.process import Beat, EngineLost, EngineProcess, TimedOut
from spotlight.device.protocol import ALONE, Prepared
from spotlight.records import (
    Dropped,
    Gradient,
    GradientPart,
    Interrupted,
    Placement,
    Policy,
    Request,
    Rollout,
    Scored,
    SpotlightError,
    Surplus,
    Updated,
    WeightsRef,
)
from spotlight.store import updates, weights
from spotlight.store.disks import full_here, is_full
from spotlight.store.node import Node, NotOnNode
from spotlight.store.rundir import RunDir

HANDED_OUT = (GradientCall.verb, UpdateCall.verb)
"""What the dispatcher hands out, and no gang does: it knows whether other workers fare better."""
BACK_OFF_S = 0.01
"""Pause before a task is sent back: it comes again at once, and the scheduler needs a moment to see why."""


class WorkerDevice:
    """Does a worker's tasks.

    Its verbs are called by task threads. Each may raise `Reschedule`: it is to be done anew, here or elsewhere.
    The weights that a request asks for are on the node before the engine is: they come from another node that has
    them, or else from the run directory.

    Args:
        score_limit_s: longest that scoring a request may take.
        scores_only: the worker only scores, from images that are kept, so it needs no weights.
    """

    def __init__(
        self,
        worker: Worker,
        engine: EngineProcess,
        node: Node,
        *,
        quarantine_after: int,
        score_limit_s: float = inf,
        scores_only: bool = False,
    ) -> None:
        self._worker, self._engine, self._node = worker, engine, node
        self._quarantine_after, self._lost_in_row = quarantine_after, 0
        self._score_limit_s, self._scores_only = score_limit_s, scores_only

    def prepare(self, run_dir: str) -> Prepared:
        return self._call(run_dir, PrepareCall())

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        self._bring(run_dir, request.weights, request.policy)
        return self._call(run_dir, RolloutCall(request=request, place=place), place if place.gang else None)

    def decode(self, run_dir: str, request: Request) -> Dropped | None:
        self._bring(run_dir, request.weights, request.policy)
        return self._call(run_dir, DecodeCall(request=request))

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        if not self._scores_only:
            self._bring(run_dir, request.weights, request.policy)
        try:
            return self._call(run_dir, ScoreCall(request=request), limit_s=self._score_limit_s)
        except TimedOut as error:  # a missing reward is no number
            seeds = len(request.seeds)
            why = f"{request.prompt.text!r}: {error} (reward.limit_s)"
            return Scored(request=request, rewards=(None,) * seeds, errors=(why,))

    def has_scores(self, run_dir: str, request: Request) -> bool:
        from spotlight.store.latents import LatentStore  # imports Zarr, which a worker need not

        return LatentStore(RunDir(run_dir).latents_url).known_scores(request) is not None

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        self._bring(run_dir, request.weights, request.policy)
        return self._call(run_dir, ImagesCall(request=request))

    def gradient(self, run_dir: str, part: GradientPart, place: Placement = ALONE) -> Gradient | Surplus:
        if place.width == 1 and (found := updates.find(run_dir, part)):
            return found
        policies: set[Policy] = {"trained", *(sample.request.policy for sample in part.samples)}
        for policy in sorted(policies):
            self._bring(run_dir, part.weights, policy)
        return self._call(run_dir, GradientCall(part=part, place=place), place if place.gang else None)

    def has_gradient(self, run_dir: str, part: GradientPart) -> bool:
        return updates.find(run_dir, part) is not None

    def update(
        self,
        run_dir: str,
        weights: WeightsRef,
        gradients: tuple[tuple[Gradient, ...], ...],
        terms: tuple[tuple[Gradient, ...], ...],
        iteration: int,
        after: str = "",
    ) -> Updated:
        call = UpdateCall(weights=weights, gradients=gradients, terms=terms, iteration=iteration, after=after)
        return self._call(run_dir, call)

    def _call(self, run_dir: str, call: Call[T], gang: Placement | None = None, limit_s: float = inf) -> T:
        """Run a call on the engine.

        Raises:
            Reschedule: it is to be done anew, here or elsewhere.
            TimedOut: it took longer than it may.
            SpotlightError: it lost its engine process too many times in a row.
        """
        try:
            value = self._engine.call(run_dir, call, partial(self._beat, gang), limit_s)
        except Interrupted:
            time.sleep(BACK_OFF_S)
            raise Reschedule from None
        except TimedOut as lost:
            self._tell(LOST_ENGINE, gang="", reason=str(lost))
            raise
        except EngineLost as lost:
            self._count_lost_engine(call.verb, gang, str(lost))
            raise Reschedule from None
        except OSError as error:
            if is_full(error):
                error.add_note(full_here(error))
            raise
        self._lost_in_row = 0
        return value

    def _bring(self, run_dir: str, ref: WeightsRef, policy: Policy) -> None:
        """Have a policy's weights in the node's memory, from a peer or the store, before the engine asks for them."""
        part = weights.PARTS[policy]
        sha256 = weights.part_ref(run_dir, ref, part).sha256
        if self._node.holds(sha256):
            return
        with contextlib.suppress(NotOnNode):  # the engine will read the store itself
            weights.bring(run_dir, ref, self._node, part, peers.sources(self._worker, self._holders(sha256)))
            self._tell(HOLDS, sha256=sha256)

    def _holders(self, sha256: str) -> list[str]:
        """Workers that have the file; none where the scheduler, busy or paused, does not answer: the store has it."""
        asked = self._worker.scheduler.spotlight_holders(sha256=sha256)
        try:
            return asyncio.run_coroutine_threadsafe(_answer(asked), self._worker.loop.asyncio_loop).result()  # type: ignore[attr-defined]
        except OSError:
            return []

    def _count_lost_engine(self, verb: str, gang: Placement | None, reason: str) -> None:
        """Report a lost engine process; the dispatcher counts those of what it hands out, this worker the others."""
        self._tell(LOST_ENGINE, gang=gang.gang if gang else "", reason=reason)
        if gang is None and verb not in HANDED_OUT:
            self._lost_in_row += 1
            if self._lost_in_row >= self._quarantine_after:
                scorer = "look at what the scorer does to its process; " if verb == "score" else ""
                raise SpotlightError(
                    f"{verb!r} lost its engine process {self._lost_in_row} times in a row on worker "
                    f"{self._worker.name}: {reason}; {scorer}if memory is short, make the requests smaller, then "
                    "`spotlight resume` the run"
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
