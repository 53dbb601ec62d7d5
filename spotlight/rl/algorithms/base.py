"""What an algorithm is given and must offer, and what several of them share; no formula of any is here.

All that is drawn depends on (seed, iteration, sample) alone.

Shapes: B samples, N latent tokens, C channels of a token, S stochastic steps, K = S + 1 latents around them, R rows of
a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight.records import Sampler, record
from spotlight.rl.models.base import Conditioning, Model
from spotlight.rl.objectives import clipped_objective


@record
class TrainingBatch:
    """Samples of an iteration, in request order, and how they were sampled; latents stay on the CPU, see `take`."""

    clean_BNC: Tensor
    """Final latents, float32."""
    advantages_B: NDArray[np.float64]
    conditioning: Conditioning
    height_px: int
    width_px: int
    guidance: float
    sigmas: tuple[float, ...]
    sde_window: tuple[int, int]
    """Steps ``[start, end)`` that were stochastic; S of them."""
    sampler: Sampler
    noise_level: float
    window_BKNC: Tensor | None
    """Latents before each step of the window and after the last, float32; Flow-GRPO only."""
    log_prob_BS: Tensor | None
    """The workers' values; only compared with the trainer's own."""
    groups_B: tuple[int, ...] | None = None
    """The prompt of each sample."""
    positions: tuple[int, ...] = ()
    """Position of each sample in the iteration, the key of its random numbers; empty: the whole iteration is here."""

    def position(self, row: int) -> int:
        return self.positions[row] if self.positions else row


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch: samples, each in a slot, which is a noise level drawn (NFT) or a window step (GRPO)."""

    samples: tuple[int, ...]
    """Indices of samples; of pairs, where the objective is over pairs."""
    slots: tuple[int, ...]

    @property
    def slot(self) -> int:
        """The slot, where all rows share one."""
        (slot,) = set(self.slots)
        return slot


class Objective(Protocol):
    """What an algorithm computes from rows; made anew for each part of an update."""

    slots: int
    """Rows per sample."""
    units: int
    """Samples, or pairs of them."""

    def remember(self, rows: Iterable[Rows], *, first: bool) -> None:
        """Keep what the loss needs of the policy that the iteration starts from, which is in the model now.

        Args:
            rows: all whose loss will be asked for.
            first: whether this is the iteration's first update, which trains that very policy.
        """

    def loss(self, rows: Rows) -> Tensor:
        """Mean over the rows; gradients flow to the model."""

    def metrics(self) -> dict[str, float]:
        """Over all rows whose loss was asked for.

        Raises:
            SpotlightError: (Flow-GRPO) the policy before the first update is not the one that sampled.
        """


class Mean:
    """A mean over rows that arrive in micro-batches."""

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def add(self, mean: Tensor, rows: int) -> Tensor:
        """Count a micro-batch's mean; returns it."""
        self._sum += mean.item() * rows
        self._rows += rows
        return mean

    def value(self) -> float:
        return self._sum / self._rows


class Ratios:
    """The clipped objective of rows that arrive in micro-batches, and its metrics over all of them."""

    def __init__(self, clip_range: float) -> None:
        self._clip_range = clip_range
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def loss(self, log_prob_R: Tensor, old_R: Tensor, advantages_R: Tensor) -> Tensor:
        loss, _ = clipped_objective(log_prob_R, old_R, advantages_R, clip_range=self._clip_range)
        self._seen.append((log_prob_R.detach(), old_R, advantages_R))
        return loss

    def metrics(self) -> dict[str, float]:
        log_prob, old, advantages = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        return clipped_objective(log_prob, old, advantages, clip_range=self._clip_range)[1]


Velocity = Callable[[Model, TrainingBatch, Tensor, Tensor, Rows], Tensor]


def velocity(model: Model, batch: TrainingBatch, x_RNC: Tensor, sigma_R: Tensor, rows: Rows) -> Tensor:
    """The model's velocity for the rows' prompts: the same code for the old and the new policy."""
    return model.velocity(
        x_RNC,
        sigma_R,
        batch.conditioning.rows(rows.samples),
        height_px=batch.height_px,
        width_px=batch.width_px,
        guidance=batch.guidance,
    )


def reference_velocity(model: Model, batch: TrainingBatch, x_RNC: Tensor, sigma_R: Tensor, rows: Rows) -> Tensor:
    """As `velocity`, of the policy that training started from.

    Ask before the pass that trains: without a LoRA the weights are swapped in place, which a pending backward forbids.
    """
    with torch.no_grad(), model.reference():
        return velocity(model, batch, x_RNC, sigma_R, rows)


def take(x_BNC: Tensor, rows: Rows, model: Model) -> Tensor:
    """The rows' latents, on the model's device."""
    return x_BNC[list(rows.samples)].to(model.device)


def advantages(batch: TrainingBatch, rows: Rows, model: Model) -> Tensor:
    """The rows' advantages, shape (R,), float32, on the model's device."""
    return torch.from_numpy(batch.advantages_B[list(rows.samples)]).float().to(model.device)
