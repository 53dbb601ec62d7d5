"""The embedded model with random weights, batches that it rolled out, and what an update did to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import Sampler
from spotlight.rl.algorithms import TrainingBatch
from spotlight.rl.flow import initial_noise, ode_step, sde_step, step_noise
from spotlight.rl.gradients import PartGradient, part_gradient, rows_to_learn_from
from spotlight.rl.models.base import Model
from spotlight.rl.models.tiny_text import HEIGHT_PX, WIDTH_PX, TinyText
from spotlight.rl.parts import Cut
from spotlight.rl.trainer import Trainer

SIZE: dict[str, Any] = {"height_px": HEIGHT_PX, "width_px": WIDTH_PX}
ADVANTAGES = np.array([1.5, -1.0, 0.5, -2.0, 0.25, 0.75])
PROMPTS = ("12", "12", "12", "7", "7", "7")
STEPS, WINDOW, NOISE_LEVEL = 4, (0, 2), 0.7
UNBOUND = 1e9
"""A gradient norm that is never reached: gradients stay as they were computed."""


class OneProcessTrainer(Trainer):
    """Makes an iteration's weights in this process: the same bits as if its parts had been computed anywhere.

    Args:
        seed: of the run.
    """

    def __init__(self, model: Model, settings: TrainSection, *, seed: int) -> None:
        super().__init__(model, settings)
        self._seed = seed

    def update(self, batch: TrainingBatch, *, iteration: int) -> dict[str, float]:
        """Take the iteration's optimizer steps, part after part; the model holds the next version afterwards.

        Args:
            batch: all samples of the iteration.

        Returns:
            What `finish` does.

        Raises:
            SpotlightError: a gradient that is not finite; or (Flow-GRPO) the trainer's policy is not the one that
                sampled.
        """
        settings, groups = self._settings, batch.groups_B or tuple(range(len(batch.advantages_B)))
        prompts, pairs = len(set(groups)), settings.dpo_pairs if settings.algorithm == "dpo" else 0
        cut = Cut(
            parts=settings.parts,
            updates=settings.updates,
            prompts=prompts,
            seeds=len(groups) // prompts,
            pairs=pairs,
            seed=self._seed,
        )
        start = {name: value.clone() for name, value in self._model.trainable().items()}
        updates, norms = [], []
        for u in range(settings.updates):
            current = {name: value.clone() for name, value in self._model.trainable().items()}
            parts = []
            for part in range(cut.count):
                self._model.load_trainable(start)
                chosen = some_of(batch, cut.positions(iteration, u, part, batch.advantages_B.tolist(), groups))
                parts.append(self.gradient(chosen, iteration=iteration, current=current if u else None))
            self._model.load_trainable(current)
            tensors = (part.tensors for part in parts)
            rows = rows_to_learn_from(settings, [(part.rows, part.metrics) for part in parts])
            norms.append(self.step(rows, tensors, iteration=iteration, update=u))
            updates.append([(part.rows, part.loss, part.metrics) for part in parts])
        return self.finish(updates, norms, iteration=iteration)

    def gradient(
        self, batch: TrainingBatch, *, iteration: int, current: Mapping[str, Tensor] | None = None
    ) -> PartGradient:
        """Of one part; see `part_gradient`."""
        return part_gradient(
            self._model,
            self._settings,
            batch,
            seed=self._seed,
            iteration=iteration,
            old=self._old,
            current=current,
        )


def make_model(*, rank: int = 0) -> TinyText:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyText()
    del model.transformer.transformer_blocks[1:]  # one layer has all that a few have
    model.make_trainable(rank=rank, alpha=0, seed=1)
    return model


def make_batch(
    model: TinyText, *, sampler: Sampler = "sde", guidance: float = 1.0, window: tuple[int, int] = WINDOW
) -> TrainingBatch:
    """Roll the model out as a worker does, one batch for all samples."""
    with torch.no_grad():
        conditioning = model.encode([f'a "{prompt}"' for prompt in PROMPTS])
        seeds, sigmas = range(len(PROMPTS)), model.sigmas(STEPS, **SIZE)
        x = initial_noise(seeds, *model.latent_shape(**SIZE))
        latents, log_probs = [x], []
        for step, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
            v = model.velocity(x, torch.full((len(x),), sigma), conditioning, guidance=guidance, **SIZE)
            if sampler in ("sde", "cps", "dance") and step in range(*window):
                noise = step_noise(seeds, step, *x.shape[1:])
                x, log_prob, _, _ = sde_step(
                    x, v, sigma, sigma_next, noise_level=NOISE_LEVEL, kind=sampler, sigma_cap=sigmas[1], noise_BNC=noise
                )
                log_probs.append(log_prob)
            else:
                x = ode_step(x, v, sigma, sigma_next)
            latents.append(x)
    return TrainingBatch(
        clean_BNC=x,
        advantages_B=ADVANTAGES.copy(),
        conditioning=conditioning,
        guidance=guidance,
        sigmas=sigmas,
        sde_window=window,
        sampler=sampler,
        noise_level=NOISE_LEVEL,
        window_BKNC=torch.stack(latents[window[0] : window[1] + 1], dim=1) if log_probs else None,
        log_prob_BS=torch.stack(log_probs, dim=1) if log_probs else None,
        **SIZE,
    )


def some_of(batch: TrainingBatch, rows: Sequence[int]) -> TrainingBatch:
    """Some samples of a batch, as one of their own."""
    at = list(rows)
    return replace(
        batch,
        clean_BNC=batch.clean_BNC[at],
        advantages_B=batch.advantages_B[at],
        conditioning=batch.conditioning.rows(at),
        window_BKNC=None if batch.window_BKNC is None else batch.window_BKNC[at],
        log_prob_BS=None if batch.log_prob_BS is None else batch.log_prob_BS[at],
        groups_B=None if batch.groups_B is None else tuple(batch.groups_B[row] for row in at),
        positions=tuple(batch.position(row) for row in at),
    )


def make_trainer(model: TinyText, *, seed: int = 5, **settings: Any) -> OneProcessTrainer:
    return OneProcessTrainer(model, TrainSection(**settings), seed=seed)


def weights_of(model: TinyText) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.trainable().items()}


def gradient_of(model: TinyText) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
