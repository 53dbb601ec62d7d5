"""What each algorithm makes of an iteration's samples: one file each, behind the protocol of `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from torch import Tensor

from spotlight.config import TrainSection
from spotlight.rl.algorithms.awm import Awm
from spotlight.rl.algorithms.base import Objective, Rows, TrainingBatch
from spotlight.rl.algorithms.dpo import Dpo
from spotlight.rl.algorithms.grpo import Grpo
from spotlight.rl.algorithms.nft import Nft
from spotlight.rl.models.base import Model

__all__ = ["Objective", "Rows", "TrainingBatch", "objective"]


def objective(
    model: Model,
    settings: TrainSection,
    batch: TrainingBatch,
    *,
    seed: int,
    iteration: int,
    old: Sequence[Tensor] | None,
) -> Objective:
    """The objective of ``train.algorithm`` for an iteration's samples.

    Args:
        old: of the policy that sampled, in the order of `Model.parameters`; None where that is the one in training.
    """
    match settings.algorithm:
        case "nft":
            return Nft(model, settings, batch, seed=seed, iteration=iteration, old=old)
        case "awm":
            return Awm(model, settings, batch, seed=seed, iteration=iteration)
        case "dpo":
            return Dpo(model, settings, batch, seed=seed, iteration=iteration)
        case "grpo" | "grpo-guard":
            return Grpo(model, settings, batch, seed=seed, iteration=iteration)
        case without_a_case:
            assert_never(without_a_case)
