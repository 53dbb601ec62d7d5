"""Noises clean samples to the levels that forward-process methods train on, as (seed, iteration, sample) has it.

Shapes: B samples, N latent tokens, C channels of a token, R rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spotlight.rl.algorithms.base import Rows, TrainingBatch, take
from spotlight.rl.models.base import Model
from spotlight.rl.parts import stream

Levels = Literal["sampler", "uniform"]
PERMUTATION = 1 << 32
"""Slots from here on draw the order of a sample's levels; its levels use lower ones."""


@dataclass(frozen=True, slots=True)
class Noised:
    """Samples between clean and noise: ``x = (1 - sigma) clean + sigma noise``."""

    x_RNC: Tensor
    sigma_R: Tensor
    clean_RNC: Tensor
    noise_RNC: Tensor


def noised(batch: TrainingBatch, rows: Rows, levels: Levels, key: tuple[int, int], model: Model) -> Noised:
    """The rows' clean samples at their noise levels, drawn anew for every sample, slot and iteration.

    Args:
        levels: "sampler": those that the sampler visits, each once before any twice, in an order of each sample's own;
            "uniform": anywhere in (0, 1].
        key: ``(seed, iteration)``.
    """
    clean_RNC = take(batch.clean_BNC, rows, model)
    noise = np.empty(tuple(clean_RNC.shape), dtype=np.float32)
    sigma = np.empty(len(rows.samples), dtype=np.float32)
    for row, (sample, slot) in enumerate(zip(rows.samples, rows.slots, strict=True)):
        draws = stream(*key, sample=batch.position(sample), slot=slot)
        uniform = 1 - draws.random()
        sigma[row] = uniform if levels == "uniform" else _visited(batch, sample, slot, key)
        draws.standard_normal(out=noise[row], dtype=np.float32)
    noise_RNC = torch.from_numpy(noise).to(clean_RNC.device)
    sigma_R = torch.from_numpy(sigma).to(clean_RNC.device)
    return Noised(clean_RNC.lerp(noise_RNC, sigma_R.view(-1, 1, 1)), sigma_R, clean_RNC, noise_RNC)


def _visited(batch: TrainingBatch, sample: int, slot: int, key: tuple[int, int]) -> float:
    """The slot-th of the sampler's levels in this sample's order; sigma = 0, the end of sampling, is none of them."""
    turn, place = divmod(slot, len(batch.sigmas) - 1)
    order = stream(*key, sample=batch.position(sample), slot=PERMUTATION + turn).permutation(len(batch.sigmas) - 1)
    return batch.sigmas[order[place]]
