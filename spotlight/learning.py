"""How much a policy learns from the seeds it trains on: the simulator's model of learning, fitted to the embedded job.

It is a model, and everything that shows its numbers says so. Pure; randomness is fixed by a seed argument.

A reward is the share of a text's characters that came out right, as the OCR reward of the embedded job has it. Prompt
p gets each character right with the chance ``Phi(t_p)``, where the thresholds ``t_p`` spread over prompts such that
the mean chance is the validation score. Which of them a seed gets right is fixed by latent normal numbers; those of an
image explored with weights one version old correlate with those of the image drawn again.

Shapes: P prompts, N candidate seeds, C characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MODEL = (
    "learning is modelled, not simulated: each iteration the distance of the score to 1 shrinks by a share in "
    "proportion to the reward variance of the kept seeds, at the pace of the embedded two-digit job"
)
PACE = 0.050
"""Share of the distance to 1 that an iteration without exploration closes. Measured: 0.512 to 0.781 in 16 iterations of
the embedded job, ``ln(0.488 / 0.219) / 16`` (benchmarks/RESULTS.md). An iteration that kept the 8 of some 15 explored
seeds closed 0.086, 1.7 times as much, where this model says 1.4; in a trial 8 of 32 halved the iterations, and it says
1.8 (current weights: 2.2). So the model is on the careful side."""
CHARACTERS = 2
SPREAD = 0.48
"""Standard deviation of the thresholds over prompts. Measured: at a score of 0.512 the means of the 20 validation
prompts vary by 0.056 - 0.104 / 4 (the second is the variance within prompts, over 4 seeds); this gives 0.030."""
STALE_CORRELATION = 0.95
"""Of latents under weights one version apart. Of the rewards of 8 kept from 16 it makes a rank correlation of 0.79 to
0.87 as the score goes from 0.9 to 0.5; measured in nine runs of the embedded job: 0.76 to 0.83."""

BLOCK = 64
"""Candidates that are drawn at a time."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The rewards of one iteration's candidates, as exploration and as the rollout would see them."""

    threshold_P: Array
    explored_PN: Array
    regenerated_PN: Array

    def unexplored_variance(self, keep: int) -> float:
        """Mean over prompts of the expected variance of ``keep`` seeds that nobody chose.

        ``mean of q (1 - q) / C * (keep - 1) / keep`` with the chances ``q = Phi(t)``.
        """
        chance_P = np.array([_NORMAL.cdf(threshold) for threshold in self.threshold_P])
        return float(np.mean(chance_P * (1 - chance_P))) / CHARACTERS * (keep - 1) / keep

    def captured(self, kept: Mapping[int, Sequence[int]]) -> float:
        """Variance of the regenerated rewards of the kept seeds, in units of the unexplored one; 0 where that is 0.

        Args:
            kept: by the index of their prompt.
        """
        unexplored = self.unexplored_variance(len(next(iter(kept.values()))))
        variances = [self.regenerated_PN[index, list(seeds)].var() for index, seeds in kept.items()]
        return float(np.mean(variances)) / unexplored if unexplored else 0.0


def difficulties(prompts: int, *, seed: int) -> Array:
    """What is to be added to every prompt's threshold; the same for the whole run."""
    return SPREAD * np.random.default_rng([seed, 0]).standard_normal(prompts)


def draw(score: float, difficulty_P: Array, *, candidates: int, stale: bool, seed: int, iteration: int) -> Rewards:
    """Rewards of an iteration's candidates at a validation score.

    With ``t_p = Phi^-1(score) sqrt(1 + SPREAD^2) + difficulty_p``, a character of prompt p comes out right where
    ``z < t_p``, so that the mean over all prompts is the score. Explored: ``z' = c z + sqrt(1 - c^2) e``.

    Args:
        score: in (0, 1).
        candidates: how many per prompt, at least; the first ones do not depend on how many there are.
        stale: exploration used the weights before these; else both rewards of a seed are equal.
        seed, iteration: fix all randomness; strategies that share them see the same seeds.
    """
    threshold_P = _NORMAL.inv_cdf(score) * sqrt(1 + SPREAD**2) + difficulty_P
    c = STALE_CORRELATION if stale else 1.0
    explored, regenerated = [], []
    for block in range(-(-candidates // BLOCK)):
        rng = np.random.default_rng([seed, 1, iteration, block])
        latent_PNC, noise_PNC = rng.standard_normal((2, len(difficulty_P), BLOCK, CHARACTERS))
        before_PNC = c * latent_PNC + sqrt(1 - c * c) * noise_PNC
        explored.append((before_PNC < threshold_P[:, None, None]).mean(axis=2))
        regenerated.append((latent_PNC < threshold_P[:, None, None]).mean(axis=2))
    return Rewards(
        threshold_P=threshold_P,
        explored_PN=np.concatenate(explored, axis=1),
        regenerated_PN=np.concatenate(regenerated, axis=1),
    )


def after(score: float, captured: float, *, pace: float = PACE) -> float:
    """The score after an iteration: ``1 - (1 - score) exp(-pace * captured)``."""
    return 1 - (1 - score) * exp(-pace * captured)
