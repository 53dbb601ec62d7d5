"""Denoises one request on this rank, committing its steps; it never decides what runs, nor where.

The ranks of a gang hold the same latents: all of them take every step, and the first commits it. Whether they
go on is agreed before each step, so that all leave at the same one. Signals from outside are looked at
between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight.device import xfuser_backend
from spotlight.device.pace import Pace
from spotlight.device.process import Beat
from spotlight.device.protocol import ALONE
from spotlight.device.residency import Residency
from spotlight.device.sequence_parallel import Gang, GangBroken, Share
from spotlight.device.signals import signals
from spotlight.records import Dropped, Interrupted, Placement, Request, Rollout, Stopped, Surplus, record
from spotlight.rl import flow
from spotlight.rl.models import Conditioning
from spotlight.store.latents import LatentStore, MissingLatents, StaleEpoch, Writer
from spotlight.store.node import Node

JOIN_TIMEOUT_S = 600.0
"""Longest that a rank waits for the others: they may have a large model to load first."""
ELSEWHERE_S, LOOK_S = 120.0, 0.2
"""How long to wait for latents that another worker is denoising, and the pause between two looks for them."""
GO_ON, LEAVE, DROP, STOP = range(4)
"""What the ranks of a gang may agree on before a step; the largest wins."""

RESTS = Beat(patience=inf)
"""Before what sends no beats and may take any time: reads and writes, and scoring."""
STORES = Beat(patience=5.0)
"""Before a wait for the store of latents: one on the network may be away for a while, and is tried again (`RETRY_S`);
but what is stuck in one worker's file system is to be done elsewhere."""
OnBeat = Callable[[Beat | None], None]
"""Is called with a beat after every step, and with None while waiting for others."""


def ignore_beat(beat: Beat | None) -> None:
    """Does nothing: for work that nobody watches."""


def join_gang(
    resident: Residency,
    node: Node | None,
    place: Placement,
    *,
    called_off: Callable[[], str | None],
    share: Share | None = None,
) -> Gang:
    """This process's membership in the gang that a placement names; the ranks meet in their node's memory.

    Args:
        called_off: asked while waiting; returns why to leave the gang, or None.
        share: splits the passes of the transformer; by default, as diffusers does.
    """
    assert node, "the ranks of a gang meet in their node's memory"
    return Gang(
        resident.model.transformer,
        meeting=node.meeting(place.name),
        name=place.name,
        rank=place.rank,
        width=place.width,
        device=resident.model.device,
        called_off=called_off,
        timeout_s=JOIN_TIMEOUT_S,
        share=share,
    )


@record
class _Begun:
    """Where a rank begins with a request."""

    step: int
    """Steps done."""
    x_BNC: Tensor
    """The latents after them."""
    before_BNC: Tensor | None
    """Those a step earlier, if the next step needs them."""
    writer: Writer | None
    """Commits steps; None on all ranks but the first, and where no step is left."""


class Denoiser:
    """Denoises requests, and returns the latents of finished ones.

    Args:
        node: where the ranks of a gang meet; None where there are no gangs.
        resumes: whether a request goes on after its last committed step, rather than beginning again.
        commits_each_step: false where nobody takes over a half-finished request: then only the steps whose latents
            are read later are committed.
    """

    def __init__(
        self,
        resident: Residency,
        store: LatentStore,
        pace: Pace,
        on_beat: OnBeat,
        node: Node | None,
        *,
        resumes: bool,
        commits_each_step: bool = True,
    ) -> None:
        self._resident, self._store, self._pace, self._on_beat, self._resumes = resident, store, pace, on_beat, resumes
        self._node, self._commits_each_step = node, commits_each_step

    def rollout(self, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        """Denoise a request, committing its steps; finished and half-finished work is not done again.

        Args:
            place: this process's part in the gang that runs it.

        Returns:
            From the first rank a `Rollout`, from the others a `Surplus`.

        Raises:
            Stopped: the run is being stopped; what was committed stays.
            Interrupted: the gang broke, or is to go on elsewhere; what was committed stays.
            SpotlightError: it does not fit the device's memory.
        """
        try:
            with self._resident.limits(f"request {request.id} ({len(request.seeds)} samples)"):
                return self._denoise(request, place, resume=self._resumes)
        except (GangBroken, StaleEpoch) as error:
            reason = signals.check(request)  # was it the run that stopped, or exploration that closed?
            if reason:
                return Dropped(reason=reason)
            raise Interrupted(str(error)) from error

    # Latents of finished requests; those that are lost or damaged are drawn again, for a request is a pure value

    def clean(self, request: Request) -> NDArray[np.float32]:
        """The final latents, shape (B, N, C)."""
        try:
            return self._store.clean(request)
        except MissingLatents:
            if request.purpose == "explore":  # may be closed by now; a rollout has the same bits
                request = replace(request, purpose="rollout")
            self.rollout(request)
            self._on_beat(RESTS)
            return self._store.clean(request)

    def window(self, request: Request) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Latents around the stochastic steps, (B, S + 1, N, C), and the steps' log-probabilities, (B, S)."""
        initial_BNC = self._initial(request).numpy()
        try:
            return self._store.window_latents(request, initial_BNC)
        except MissingLatents as error:
            missing = error
        try:
            with self._resident.limits(f"request {request.id} ({len(request.seeds)} samples)"):
                self._denoise(request, ALONE, resume=False)
        except StaleEpoch:  # another worker took the request over: taking it back would interrupt that one
            return self._await_window(request, initial_BNC, missing)
        return self._store.window_latents(request, initial_BNC)

    def _await_window(
        self, request: Request, initial_BNC: NDArray[np.float32], missing: MissingLatents
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As `window`, once the worker that took the request over has committed its steps."""
        until_s = time.monotonic() + ELSEWHERE_S
        while time.monotonic() < until_s:
            with suppress(MissingLatents):
                return self._store.window_latents(request, initial_BNC)
            if signals.is_stopping(request.run):
                raise Stopped(request.id)
            self._on_beat(None)
            time.sleep(LOOK_S)
        raise Interrupted(f"who drew them again is gone: {missing}")

    # One request

    def _denoise(self, request: Request, place: Placement, *, resume: bool) -> Rollout | Dropped | Surplus:
        if place.width == 1 and resume and self._is_done(request):
            return self._rolled_out(request, resumed=request.steps)
        self._resident.use(request.weights, request.policy)
        text = self._resident.model.encode([request.prompt.text]).rows([0] * len(request.seeds))
        with ExitStack() as stack:
            gang = stack.enter_context(self._gang_of(request, place)) if place.width > 1 else None
            begun = self._begin(request, place, gang, stack, resume=resume)
            x_BNC, writer = begun.x_BNC, begun.writer
            if self._resident.captures and not gang:
                stack.enter_context(self._resident.model.capturing())
            step_s = self._pace.step_s(len(request.seeds), place.width)
            before: flow.Pass | None = None
            if begun.before_BNC is not None:
                with self._pace.lasting(step_s, partial(self._raise_if_called_off, request, place)):
                    before = self._pass(request, begun.step - 1, begun.before_BNC, text)
            for step in range(begun.step, request.steps):
                reason = self._agree(request, place, gang)
                if reason:
                    return Dropped(reason=reason)
                with self._pace.lasting(step_s, partial(self._raise_if_called_off, request, place)):
                    now = self._pass(request, step, x_BNC, text)
                    x_BNC, log_prob_B = _step(request, step, now, before)
                before = now
                if writer and (self._commits_each_step or _is_read(request, step + 1)):
                    self._on_beat(STORES)  # it waits for the commit before
                    writer.commit(step + 1, x_BNC.numpy(), log_prob_B)
                self._on_beat(Beat(step=step + 1, steps=request.steps))
            self._on_beat(STORES)
            if gang:
                if writer:
                    writer.wait()
                gang.agree(GO_ON)  # a barrier: a finished shard never runs again, so the last commit comes first
        return Surplus() if place.rank else self._rolled_out(request, resumed=begun.step)

    def _gang_of(self, request: Request, place: Placement) -> Gang:
        xfuser = self._resident.sp_backend == "xfuser"
        return join_gang(
            self._resident,
            self._node,
            place,
            called_off=lambda: self._called_off(request, place),
            share=xfuser_backend.shared if xfuser else None,
        )

    def _called_off(self, request: Request, place: Placement) -> str | None:
        """Why to stop waiting for other ranks, or None: one may have been told to drop the request before it joined."""
        self._on_beat(None)
        return f"{place.name} was called off" if signals.is_called_off(place) else signals.check(request)

    def _raise_if_called_off(self, request: Request, place: Placement) -> None:
        reason = self._called_off(request, place)
        if reason:
            raise GangBroken(reason)

    def _begin(
        self, request: Request, place: Placement, gang: Gang | None, stack: ExitStack, *, resume: bool
    ) -> _Begun:
        """The first rank finds where to go on and takes the request over; all ranks get its latents."""
        first, x_BNC, writer = 0, self._initial(request), None
        before_BNC = x_BNC
        self._on_beat(STORES)
        if place.rank == 0 and resume and self._is_done(request):
            first = request.steps
        elif place.rank == 0:
            found = self._store.resume(request)
            if resume and found.x_BNC is not None:
                first, x_BNC = found.step, torch.from_numpy(found.x_BNC)
                before_BNC = before_BNC if found.before_BNC is None else torch.from_numpy(found.before_BNC)
            writer = stack.enter_context(self._store.writer(request, found.epoch))
            self._on_beat(Beat(step=first, steps=request.steps, resumed=True))
        if gang:
            first = int(gang.broadcast(torch.tensor([float(first)]))[0])
            x_BNC = gang.broadcast(x_BNC)
        if not request.looks_back or first in (0, request.steps):
            return _Begun(step=first, x_BNC=x_BNC, before_BNC=None, writer=writer)
        before_BNC = gang.broadcast(before_BNC) if gang else before_BNC
        return _Begun(step=first, x_BNC=x_BNC, before_BNC=before_BNC, writer=writer)

    def _agree(self, request: Request, place: Placement, gang: Gang | None) -> str | None:
        """Agree, before a step, whether all ranks take it: None if they do, the reason if the request is dropped."""
        code, reason = GO_ON, None
        if signals.is_stopping(request.run):
            code = STOP
        elif reason := signals.check(request):
            code = DROP
        elif signals.must_leave(place):
            code = LEAVE
        code = gang.agree(code) if gang else code
        if code == STOP:
            raise Stopped(request.id)
        if code == LEAVE:
            raise Interrupted(f"{place.name} leaves at a step boundary")
        return (reason or "another rank called it off") if code == DROP else None

    def _rolled_out(self, request: Request, *, resumed: int) -> Rollout:
        ran = resumed < request.steps
        weights = (self._resident.loaded if ran else None) or request.weights
        return Rollout(
            request=request,
            weights_sha256=weights.sha256,
            steps_resumed=resumed,
            steps_run=request.steps - resumed,
        )

    def _is_done(self, request: Request) -> bool:
        with suppress(MissingLatents):
            self._store.clean(request)
            return True
        return False

    def _initial(self, request: Request) -> Tensor:
        tokens, channels = self._resident.model.latent_shape(request.height_px, request.width_px)
        shared = request.first_noise
        seeds = request.seeds if shared is None else (shared,) * len(request.seeds)
        return flow.initial_noise(seeds, tokens, channels)

    @torch.no_grad()
    def _pass(self, request: Request, step: int, x_BNC: Tensor, text: Conditioning) -> flow.Pass:
        """The model's velocity where a step begins."""
        sigma, device = request.sigmas[step], self._resident.model.device
        v_BNC = self._resident.model.velocity(
            x_BNC.to(device),
            torch.full((len(request.seeds),), sigma, device=device),
            text,
            height_px=request.height_px,
            width_px=request.width_px,
            guidance=request.guidance,
        ).cpu()
        return flow.Pass(x_BNC, v_BNC, sigma)


def _step(
    request: Request, step: int, now: flow.Pass, before: flow.Pass | None
) -> tuple[Tensor, NDArray[np.float32] | None]:
    """The latents after the step, and its log-probability where it is stochastic."""
    sigma_next = request.sigmas[step + 1]
    if request.looks_back and before is not None:
        return flow.dpm2_step(now, sigma_next, before), None
    if request.sampler in ("sde", "cps", "dance") and request.sde_window[0] <= step < request.sde_window[1]:
        x_BNC, log_prob, _, _ = flow.sde_step(
            *now,
            sigma_next,
            noise_level=request.noise_level,
            kind=request.sampler,
            sigma_cap=request.sigmas[1],
            noise_BNC=flow.step_noise(request.seeds, step, *now.x_BNC.shape[1:]),
        )
        return x_BNC, log_prob.numpy()
    return flow.ode_step(*now, sigma_next), None


def _is_read(request: Request, steps: int) -> bool:
    """Whether the latents after so many steps are read later: the final ones, and those around stochastic steps."""
    start, end = request.sde_window
    return steps == request.steps or (request.is_stochastic and start <= steps <= end)
