"""Advantage-weighted matching: a clipped policy gradient whose log-probability is minus the flow-matching error.

Shapes: B samples, N latent tokens, C channels of a token, S levels, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.rl.algorithms.base import Mean, Ratios, Rows, TrainingBatch, advantages, reference_velocity, velocity
from spotlight.rl.algorithms.noising import Noised, noised
from spotlight.rl.models.base import Model
from spotlight.rl.objectives import matching_log_prob


class Awm:
    """An `Objective`."""

    def __init__(
        self, model: Model, settings: TrainSection, batch: TrainingBatch, *, seed: int, iteration: int
    ) -> None:
        self.slots, self.units = settings.timesteps, len(batch.advantages_B)
        self._model, self._settings, self._batch = model, settings, batch
        self._key = (seed, iteration)
        self._old_BS = torch.empty(self.units, self.slots, dtype=torch.float64)
        self._is_first = False
        self._ratios = Ratios(settings.clip_range)
        self._kl = Mean()

    @torch.no_grad()
    def remember(self, rows: Iterable[Rows], *, first: bool) -> None:
        self._is_first = first
        if first:
            return  # the policy that trains is this one, and `loss` has its log-probabilities
        for each in rows:
            log_prob_R, _ = self._judge(self._noised(each), each)
            self._old_BS[list(each.samples), list(each.slots)] = log_prob_R.cpu()

    def loss(self, rows: Rows) -> Tensor:
        settings, at = self._settings, self._noised(rows)
        v_ref_RNC = None
        if settings.kl:
            v_ref_RNC = reference_velocity(self._model, self._batch, at.x_RNC, at.sigma_R, rows)
        log_prob_R, v_RNC = self._judge(at, rows)
        if self._is_first:
            self._old_BS[list(rows.samples), list(rows.slots)] = log_prob_R.detach().cpu()
        old_R = self._old_BS[list(rows.samples), list(rows.slots)].to(log_prob_R.device)
        limit = settings.advantage_clip
        loss = self._ratios.loss(log_prob_R, old_R, advantages(self._batch, rows, self._model).clamp(-limit, limit))
        if v_ref_RNC is None:
            return loss
        return loss + settings.kl * self._kl.add((v_RNC - v_ref_RNC).square().mean(), len(rows.samples))

    def metrics(self) -> dict[str, float]:
        return self._ratios.metrics() | ({"kl": self._kl.value()} if self._settings.kl else {})

    def _judge(self, at: Noised, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probability and velocity."""
        settings = self._settings
        v_RNC = velocity(self._model, self._batch, at.x_RNC, at.sigma_R, rows)
        target_RNC = at.noise_RNC - at.clean_RNC
        log_prob_R = matching_log_prob(
            v_RNC, target_RNC, at.sigma_R, weighting=settings.awm_weighting, power=settings.awm_power
        )
        return log_prob_R, v_RNC

    def _noised(self, rows: Rows) -> Noised:
        return noised(self._batch, rows, self._settings.levels, self._key, self._model)
