"""Flow-GRPO and GRPO-Guard: the clipped policy gradient of the stochastic steps that the samples were made with.

Shapes: B samples, N latent tokens, C channels of a token, S stochastic steps, K = S + 1 latents around them, R rows of
a micro-batch. Where fewer steps are trained on than are stochastic (``train.steps_used``), S are these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import SpotlightError
from spotlight.rl.algorithms.base import (
    Mean,
    Ratios,
    Rows,
    TrainingBatch,
    Velocity,
    advantages,
    reference_velocity,
    take,
    velocity,
)
from spotlight.rl.flow import sde_step
from spotlight.rl.models.base import Model
from spotlight.rl.objectives import gaussian_kl, guarded_log_ratio
from spotlight.rl.parts import stream

STEPS = 1
"""Slot of an iteration's stream that draws which steps are trained on; slot 0 draws an order."""


class Grpo:
    """An `Objective`; GRPO-Guard's where the settings say so."""

    def __init__(
        self, model: Model, settings: TrainSection, batch: TrainingBatch, *, seed: int, iteration: int
    ) -> None:
        start, end = batch.sde_window
        if batch.window_BKNC is None or batch.sampler not in ("sde", "cps", "dance"):
            raise SpotlightError(
                f'train.algorithm = "{settings.algorithm}" trains on the stochastic steps of a rollout, and sampler '
                f'"{batch.sampler}" left none: set rollout.sampler to "sde", "cps" or "dance"'
            )
        assert batch.window_BKNC.shape[1] == end - start + 1, f"{batch.window_BKNC.shape} for window {batch.sde_window}"
        self._steps = _drawn(end - start, settings.steps_used, seed, iteration)
        self.slots, self.units = len(self._steps), len(batch.advantages_B)
        self._model, self._settings, self._batch = model, settings, batch
        self._window_BKNC, self._kind = batch.window_BKNC, batch.sampler
        self._iteration = iteration
        self._old_BS = torch.empty(self.units, self.slots)
        self._old_means: dict[Rows, Tensor] = {}
        self._is_first = False
        self._ratios = Ratios(settings.clip_range)
        self._kl = Mean()

    @torch.no_grad()
    def remember(self, rows: Iterable[Rows], *, first: bool) -> None:
        self._is_first = first
        if first:
            return  # the policy that trains is this one, and `loss` has its log-probabilities and means
        for each in rows:
            log_prob_R, mean_RNC, _ = self._judge(each, velocity)
            self._old_BS[list(each.samples), each.slot] = log_prob_R.cpu()
            if self._settings.algorithm == "grpo-guard":
                self._old_means[each] = mean_RNC.cpu()

    def loss(self, rows: Rows) -> Tensor:
        settings = self._settings
        reference = self._judge(rows, reference_velocity) if settings.kl else None
        log_prob_R, mean_RNC, std = self._judge(rows, velocity)
        if self._is_first:
            self._old_BS[list(rows.samples), rows.slot] = log_prob_R.detach().cpu()
        old_R = self._old_BS[list(rows.samples), rows.slot].to(log_prob_R.device)
        limit = settings.advantage_clip
        advantages_R = advantages(self._batch, rows, self._model).clamp(-limit, limit)
        sigmas, step = self._batch.sigmas, self._step(rows.slot)
        duration = sigmas[step] - sigmas[step + 1]
        if settings.algorithm == "grpo-guard":
            old_mean_RNC = self._old_means.get(rows, mean_RNC).to(mean_RNC.device)
            log_ratio_R = guarded_log_ratio(log_prob_R, old_R, mean_RNC, old_mean_RNC, std)
            loss = self._ratios.loss(log_ratio_R, torch.zeros_like(old_R), advantages_R) / duration
        else:
            loss = self._ratios.loss(log_prob_R, old_R, advantages_R)
        if reference is None:
            return loss
        if settings.kl_form == "code" and self._kind == "sde":
            std /= math.sqrt(duration)
        divergence = gaussian_kl(mean_RNC, reference[1], std).mean()
        return loss + settings.kl * self._kl.add(divergence, len(rows.samples))

    def metrics(self) -> dict[str, float]:
        workers_BS = self._batch.log_prob_BS
        diagnosis = {} if workers_BS is None else self._compare(workers_BS)
        return self._ratios.metrics() | diagnosis | ({"kl": self._kl.value()} if self._settings.kl else {})

    def _judge(self, rows: Rows, velocity: Velocity) -> tuple[Tensor, Tensor, float]:
        """Log-probability, mean and standard deviation of the step that each row's sample really took."""
        sigmas, step, at = self._batch.sigmas, self._step(rows.slot), self._steps[rows.slot]
        x_RNC = take(self._window_BKNC[:, at], rows, self._model)
        sigma_R = torch.full((len(rows.samples),), sigmas[step], device=x_RNC.device)
        _, log_prob_R, mean_RNC, std = sde_step(
            x_RNC,
            velocity(self._model, self._batch, x_RNC, sigma_R, rows),
            sigmas[step],
            sigmas[step + 1],
            noise_level=self._batch.noise_level,
            kind=self._kind,
            sigma_cap=sigmas[1],
            x_next_BNC=take(self._window_BKNC[:, at + 1], rows, self._model),
        )
        return log_prob_R, mean_RNC, std

    def _step(self, slot: int) -> int:
        """The number of the sampler's step."""
        return self._batch.sde_window[0] + self._steps[slot]

    def _compare(self, worker_BS: Tensor) -> dict[str, float]:
        """How far the trainer's log-probabilities are from the workers'; too far is an error."""
        worker_BS = worker_BS[:, list(self._steps)]
        delta_BS = self._old_BS - worker_BS
        error_BS = torch.expm1(delta_BS).abs()
        error_BS = torch.where(error_BS.isnan(), math.inf, error_BS)
        if error_BS.max() > self._settings.ratio_tolerance:
            sample, slot = divmod(int(error_BS.argmax()), self.slots)
            here, there = self._old_BS[sample, slot].item(), worker_BS[sample, slot].item()
            raise SpotlightError(
                f"iteration {self._iteration}: before the first update the trainer's policy is not the one that "
                f"sampled. |ratio - 1| reaches {error_BS.max().item():.3g} (sample {self._batch.position(sample)}, "
                f"step {self._step(slot)}: log-probability {here:.7g} on the trainer, {there:.7g} from the "
                f"worker) and train.ratio_tolerance is {self._settings.ratio_tolerance:g}. Likely causes: the worker "
                "held another weights version; guidance passes batched in one path and separate in the other; another "
                "dtype, attention backend or text padding on the worker. Make worker and trainer alike, or raise "
                "train.ratio_tolerance if the difference is rounding"
            )
        return {"log_prob_delta": delta_BS.abs().mean().item(), "log_prob_delta_max": delta_BS.abs().max().item()}


def _drawn(steps: int, used: int, seed: int, iteration: int) -> tuple[int, ...]:
    """Steps of the window that an iteration trains on, ascending."""
    if not used:
        return tuple(range(steps))
    return tuple(sorted(stream(seed, iteration, slot=STEPS).permutation(steps)[:used].tolist()))
