"""What a policy learns from the seeds it trains on, and the rewards that show it: a model, fitted to the embedded job.

It is a model, and everything that shows its numbers says so. Pure: a reward is a function of the run's seed, the
prompt, the sample's seed, the score of the weights and whether they are stale; where, when and in which batch a sample
is drawn cannot change it.

A reward is the share of a text's characters that came out right, as the OCR reward of the embedded job has it. Prompt
p gets each character right with the chance ``Phi(t_p)``, where the thresholds ``t_p`` spread over prompts such that
the mean chance is the score of the weights. Which of them a seed gets right is fixed by latent normal numbers; those
of an image explored with weights one version old correlate with those of the image drawn again.

Shapes: B samples, C characters, D = 2 C numbers of a sample, Q quadrature nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import acos, exp, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Words = NDArray[np.uint64]

MODEL = (
    "Learning is modelled, not simulated: each iteration the distance of the score to 1 shrinks by a share in "
    "proportion to the reward variance of the kept seeds, at the pace of the embedded two-digit job; old weights and "
    "fewer steps cost nothing"
)
CHARACTERS = 2
SPREAD = 0.48
"""Standard deviation of the thresholds over prompts. Measured: at a score of 0.512 the means of the 20 validation
prompts vary by 0.056 - 0.104 / 4 (the second is the variance within prompts, over 4 seeds); this gives 0.030."""
STALE_CORRELATION = 0.95
"""Correlation of latents under weights one version apart. The rewards of 8 kept from 16 then have a rank correlation of
0.79 to 0.87 as the score goes from 0.9 to 0.5; measured in nine runs of the embedded job: 0.76 to 0.83."""
SCORE_MAX = 1 - 1e-9
"""The highest score: at 1 no threshold would be finite."""
GOLDEN = (sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, fill the unit interval more evenly than chance would, however many there are."""

_NORMAL = NormalDist()
_STRIDE, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(bits) for bits in (11, 27, 30, 31))
"""The constants of SplitMix64, as 64-bit words so that nothing turns into a float."""
_NODES_Q, _SHARES_Q = np.polynomial.hermite_e.hermegauss(32)
_SHARES_Q = _SHARES_Q / _SHARES_Q.sum()


def rewards(
    score: float, seeds: Sequence[int], *, run_seed: int, prompt: int, held_out: bool = False, stale: bool = False
) -> Array:
    """Rewards of a prompt's samples, shape (B,), under weights of a score.

    With ``t_p = Phi^-1(score) sqrt(1 + SPREAD^2) + difficulty_p``, a character of prompt p comes out right where
    ``z < t_p``, so that the mean over all prompts is the score. Stale: ``z' = c z + sqrt(1 - c^2) e``.

    Args:
        score: in (0, 1).
        seeds: of the samples, each in [0, 2^64).
        prompt: its id in its file.
        held_out: the file is that of the validation prompts.
        stale: the weights are one version older than those that the sample is to be drawn with in the end.
    """
    latents_BC = _latents(seeds, run_seed, prompt, stale=stale)
    right_BC = latents_BC < _threshold(score, difficulty(run_seed, prompt, held_out=held_out))
    return right_BC.sum(axis=1) / CHARACTERS


@lru_cache(maxsize=1 << 16)
def difficulty(run_seed: int, prompt: int, *, held_out: bool = False) -> float:
    """What is to be added to a prompt's threshold: normal with deviation `SPREAD` over prompts, the same all run long.

    ``SPREAD Phi^-1(frac(offset + prompt GOLDEN))``: the 20 prompts of a validation then miss the score by 0.014
    (root mean square), where independent draws would by 0.04.
    """
    offset = float(_uniforms(_counters(run_seed, -1 - held_out))[0])
    share = (offset + (prompt + 1) * GOLDEN) % 1.0
    return SPREAD * _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))


@lru_cache(maxsize=64)
def unexplored_variance(score: float) -> float:
    """Expected variance of the rewards of a prompt's seeds that nobody chose, over all prompts: ``E[q (1 - q)] / C``.

    ``q = Phi(t)`` is the chance of a character, t normal over prompts; by Gauss-Hermite quadrature. The variance
    *among* n seeds is ``(n - 1) / n`` of it.
    """
    chance_Q = np.array([_NORMAL.cdf(_threshold(score, SPREAD * node)) for node in _NODES_Q])
    return float(_SHARES_Q @ (chance_Q * (1 - chance_Q))) / CHARACTERS


def captured(score: float, groups: Sequence[Sequence[float]], *, rolled_out: int = 0) -> float:
    """Mean over prompts of the variance of their samples' rewards, over that of unexplored seeds.

    Samples that are rolled out and not trained on add no variance, so that some of a group never teach more than all.

    Args:
        score: of the weights that drew them.
        groups: the rewards of each prompt's samples that are trained on.
        rolled_out: samples of each prompt, where that is more.
    """
    sizes = [max(len(group), rolled_out) for group in groups]
    expected = np.mean([(size - 1) / size for size in sizes]) * unexplored_variance(score)
    found = [np.var(group) * len(group) / size for group, size in zip(groups, sizes, strict=True)]
    return float(np.mean(found) / expected) if expected else 0.0


def after(score: float, captured: float, *, gain: float) -> float:
    """The score after an iteration: ``1 - (1 - score) exp(-gain * captured)``.

    Args:
        gain: share of the distance to 1 that an iteration without exploration closes.
    """
    return min(SCORE_MAX, 1 - (1 - score) * exp(-gain * captured))


def _threshold(score: float, difficulty: float) -> float:
    return _NORMAL.inv_cdf(score) * sqrt(1 + SPREAD**2) + difficulty


def _latents(seeds: Sequence[int], run_seed: int, prompt: int, *, stale: bool) -> Array:
    """A normal number for each character of each sample, (B, C): a pure function of the arguments.

    Box and Muller's method, which makes of two uniform numbers two normal ones: those of the sample, and what is mixed
    into them where the weights are stale. The uniform ones are hashes of (run seed, prompt, sample's seed, counter).
    """
    state_BD = np.array(seeds, dtype=np.uint64)[:, None] * _STRIDE + _counters(run_seed, prompt)
    uniform_BD = _uniforms(_hashed(state_BD))
    radius_BC, angle_BC = np.sqrt(-2 * np.log(uniform_BD[:, :CHARACTERS])), 2 * np.pi * uniform_BD[:, CHARACTERS:]
    if stale:  # c cos + sqrt(1 - c^2) sin is a cosine too
        angle_BC -= acos(STALE_CORRELATION)
    latents_BC: Array = radius_BC * np.cos(angle_BC)
    return latents_BC


@lru_cache(maxsize=1 << 12)
def _counters(run_seed: int, prompt: int) -> Words:
    """What is added to a sample's state before it is hashed, (D,): another value for each number of the sample."""
    start = np.array([run_seed], dtype=np.uint64) * _STRIDE
    start = _hashed(_hashed(start) + np.array([prompt], dtype=np.int64).view(np.uint64) * _STRIDE)
    return _hashed(start + np.arange(2 * CHARACTERS, dtype=np.uint64) * _STRIDE)


def _hashed(state: Words) -> Words:
    """The output of SplitMix64 for a state (Steele, Lea and Flood, 2014); the argument is overwritten."""
    state ^= state >> _SHIFT_30
    state *= _FIRST
    state ^= state >> _SHIFT_27
    state *= _SECOND
    state ^= state >> _SHIFT_31
    return state


def _uniforms(words: Words) -> Array:
    """In (0, 1), from the upper 53 bits."""
    uniforms: Array = ((words >> _SHIFT_11) + np.float64(0.5)) * 2.0**-53
    return uniforms
