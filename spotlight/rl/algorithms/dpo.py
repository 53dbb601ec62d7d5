"""Online Diffusion-DPO: of each prompt's samples the best is preferred to the worst, beside the reference policy.

Explored seeds are kept for their extremes, so the pairs are natural ones. Rows index pairs, not samples.

Shapes: B samples, N latent tokens, C channels of a token, R pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spotlight.config import TrainSection
from spotlight.rl.algorithms.base import Mean, Rows, TrainingBatch, Velocity, reference_velocity, take, velocity
from spotlight.rl.algorithms.noising import noised
from spotlight.rl.models.base import Model
from spotlight.rl.objectives import dpo_loss
from spotlight.rl.parts import preference_pairs


class Dpo:
    """An `Objective` over pairs."""

    def __init__(
        self, model: Model, settings: TrainSection, batch: TrainingBatch, *, seed: int, iteration: int
    ) -> None:
        assert batch.groups_B is not None, "pairs are of a group"
        self._pairs = preference_pairs(batch.advantages_B, batch.groups_B, pairs_max=settings.dpo_pairs)
        self.slots, self.units = settings.timesteps, len(self._pairs)
        self._model, self._settings, self._batch = model, settings, batch
        self._key = (seed, iteration)
        self._right = Mean()

    def remember(self, rows: Iterable[Rows], *, first: bool) -> None:
        """Nothing to keep: the loss compares with the reference, which never changes."""

    def loss(self, rows: Rows) -> Tensor:
        settings = self._settings
        reference = self._errors(rows, reference_velocity)
        policy = self._errors(rows, velocity)
        loss, right = dpo_loss(*policy, *reference, beta=settings.dpo_beta)
        self._right.add(right, len(rows.samples))
        return loss

    def metrics(self) -> dict[str, float]:
        return {"dpo_accuracy": self._right.value(), "dpo_pairs": float(self.units)}

    def _errors(self, rows: Rows, of: Velocity) -> tuple[Tensor, Tensor]:
        """Flow-matching errors of the better and the worse samples, at one level and with one noise."""
        better = Rows(tuple(self._pairs[row][0] for row in rows.samples), rows.slots)
        worse = Rows(tuple(self._pairs[row][1] for row in rows.samples), rows.slots)
        at = noised(self._batch, better, self._settings.levels, self._key, self._model)
        errors = []
        for arm in (better, worse):
            clean_RNC = take(self._batch.clean_BNC, arm, self._model)
            x_RNC = clean_RNC.lerp(at.noise_RNC, at.sigma_R.view(-1, 1, 1))
            v_RNC = of(self._model, self._batch, x_RNC, at.sigma_R, arm)
            errors.append((v_RNC - (at.noise_RNC - clean_RNC)).square().flatten(1).mean(1))
        return errors[0], errors[1]
