"""DiffusionNFT: contrasts the policy in training with the older one that drew the samples, at drawn noise levels.

Shapes: B samples, N latent tokens, C channels of a token, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.rl.algorithms.base import Mean, Rows, TrainingBatch, advantages, reference_velocity, velocity
from spotlight.rl.algorithms.noising import Noised, noised
from spotlight.rl.models.base import Model
from spotlight.rl.objectives import nft_loss


class Nft:
    """An `Objective`; the policy that sampled is ``old``, or else the one that the iteration starts from.

    Without a policy of its own (``old`` is None) the first update contrasts a velocity with itself, where
    ``train.nft_beta`` has no effect: it is advantage-weighted flow matching.
    """

    def __init__(
        self,
        model: Model,
        settings: TrainSection,
        batch: TrainingBatch,
        *,
        seed: int,
        iteration: int,
        old: Sequence[Tensor] | None,
    ) -> None:
        self.slots, self.units = settings.timesteps, len(batch.advantages_B)
        self._model, self._settings, self._batch, self._old = model, settings, batch, old
        self._key = (seed, iteration)
        self._v_old: dict[Rows, Tensor] = {}
        self._kl = Mean()

    @torch.no_grad()
    def remember(self, rows: Iterable[Rows], *, first: bool) -> None:
        if first or self._old is not None:
            return  # `loss` has its velocities, or computes them with the old policy's weights
        for each in rows:
            self._v_old[each] = self._velocity(self._noised(each), each).cpu()  # a device may have no room for all

    def loss(self, rows: Rows) -> Tensor:
        settings, batch, at = self._settings, self._batch, self._noised(rows)
        # Both before the pass that trains: they swap the weights in place.
        v_ref_RNC = reference_velocity(self._model, batch, at.x_RNC, at.sigma_R, rows) if settings.kl else None
        v_old_RNC = self._old_velocity(at, rows)
        v_RNC = self._velocity(at, rows)
        loss = nft_loss(
            v_RNC,
            v_RNC if v_old_RNC is None else v_old_RNC,
            at.x_RNC,
            at.clean_RNC,
            at.sigma_R,
            advantages(batch, rows, self._model),
            beta=settings.nft_beta,
            advantage_clip=settings.advantage_clip,
        )
        if v_ref_RNC is None:
            return loss
        return loss + settings.kl * self._kl.add((v_RNC - v_ref_RNC).square().mean(), len(rows.samples))

    def metrics(self) -> dict[str, float]:
        return {"kl": self._kl.value()} if self._settings.kl else {}

    @torch.no_grad()
    def _old_velocity(self, at: Noised, rows: Rows) -> Tensor | None:
        """Velocity of the policy that sampled; None where that is the one in training."""
        if self._old is None:
            v_old_RNC = self._v_old.get(rows)
            return None if v_old_RNC is None else v_old_RNC.to(at.x_RNC.device)
        with self._model.standing_in(self._old):
            return self._velocity(at, rows)

    def _velocity(self, at: Noised, rows: Rows) -> Tensor:
        return velocity(self._model, self._batch, at.x_RNC, at.sigma_R, rows)

    def _noised(self, rows: Rows) -> Noised:
        return noised(self._batch, rows, self._settings.levels, self._key, self._model)
