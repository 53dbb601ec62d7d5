"""Imagines what further candidates would bring, in worlds drawn from what is believed.

Values in, values out: a seed fixes all random numbers.

Shapes: P prompts, K kinds, N grid nodes, W worlds, J numbers of chunks, C candidates of a chunk, M lowest or highest,
S sides (low and high).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.plan.beliefs import GRID_N, Arm, Array

Narrow = NDArray[np.float32]
"""For what is computed in each world. Single precision is enough: a reward's seventh digit decides nothing."""
WORLDS, LEAST_WORLDS, ALL_WORLDS = 128, 16, 2**13
"""Most and fewest worlds of a prompt, and most of all prompts together, so that the time grows little with them. Spread
evenly, 64 were as good as 256."""
BLOCK = 2**12
"""Prompts times worlds that are imagined at a time: what is known of so many stays in a processor's cache."""
GRID_V = np.arange(len(GRID_N), dtype=np.uint8) * np.float32(GRID_N[1])
"""The grid's nodes, in single precision."""


def imagine(
    arms: Sequence[Arm], chance_PKN: Array, shares_PK: Array, ahead: int, chunk: int, keep: int, seed: int
) -> Array:
    """Variance of the kept subset after 0, 1, ... ``ahead`` further chunks, in each world: (P, W, ahead + 1).

    Draw by draw, for all arms and worlds at once. A draw's random numbers are spread evenly over the worlds, in an
    order of its own (a Latin hypercube), so that few worlds do for many.
    """
    scored_P = np.array([len(arm.rewards) for arm in arms])
    pending_P = np.array([arm.pending for arm in arms])
    drawn_JP = np.maximum(pending_P + chunk * np.arange(ahead + 1)[:, None], keep - scored_P)
    new_JP = np.diff(drawn_JP, axis=0, prepend=0)
    worlds = min(WORLDS, max(LEAST_WORLDS, ALL_WORLDS // len(arms)))
    rng = np.random.Generator(np.random.Philox(key=seed))
    kind_W = (np.arange(worlds) + rng.random()) / worlds
    draws_J = [np.reshape([_spread(rng, worlds) for _ in range(new_P.max())], (-1, worlds)) for new_P in new_JP]
    variance_PWJ = np.empty((len(arms), worlds, ahead + 1))
    block = max(1, BLOCK // worlds)
    for first in range(0, len(arms), block):
        some = slice(first, first + block)
        kind_PW = (shares_PK[some].cumsum(axis=1)[:, None, :-1] < kind_W[:, None]).sum(axis=-1)
        below_PKN = chance_PKN[some].cumsum(axis=-1)[..., :-1].astype(np.float32)
        below_NPW = np.ascontiguousarray(np.moveaxis(np.take_along_axis(below_PKN, kind_PW[..., None], axis=1), -1, 0))
        variance_PWJ[some] = _variances(_extremes(arms[some], keep, worlds), below_NPW, new_JP[:, some], draws_J, keep)
    return variance_PWJ


def _spread(rng: np.random.Generator, worlds: int) -> Narrow:
    """A uniform number for each world, spread evenly over them."""
    uniform_W: Narrow = ((rng.permutation(worlds) + rng.random(worlds)) / worlds).astype(np.float32)
    return uniform_W


def _variances(
    extremes_SMPW: Narrow, below_NPW: Narrow, new_JP: NDArray[Any], draws_J: Sequence[Narrow], keep: int
) -> Array:
    """The variance of the kept subset of some prompts after each number of chunks, (P, W, J).

    Args:
        extremes_SMPW: of what was scored, as `_extremes` has them; they are overwritten.
        below_NPW: the chance of a reward below each node but the first.
        new_JP: candidates of each chunk.
        draws_J: the worlds' uniform numbers for each candidate of each chunk.
    """
    variance_JPW = np.empty((len(new_JP), *below_NPW.shape[1:]), dtype=np.float32)
    for j, (new_P, draws_CW) in enumerate(zip(new_JP, draws_J, strict=True)):
        if j and not new_P.any():
            variance_JPW[j] = variance_JPW[j - 1]
            continue
        for extremes_MPW, new_CPW in zip(extremes_SMPW, _drawn(new_P, draws_CW, below_NPW, keep), strict=True):
            _merge(extremes_MPW, new_CPW)
        low_MPW, high_MPW = extremes_SMPW[:, :keep]
        variance_JPW[j] = _best_variance(low_MPW, high_MPW)
    return np.moveaxis(variance_JPW, 0, -1).astype(np.float64)


def _extremes(arms: Sequence[Arm], keep: int, worlds: int) -> Narrow:
    """The lowest scored rewards, and the highest with their sign changed, both ascending: (S, M, P, W).

    There is room for M = 2, 4, 8, ... of them, no fewer than are kept; where there are fewer, infinity stands for none.
    """
    room = 1 << (keep - 1).bit_length()
    both_SPM = np.full((2, len(arms), max(room, *(len(arm.rewards) for arm in arms))), np.inf, dtype=np.float32)
    for p, arm in enumerate(arms):
        rewards = np.array(arm.rewards, dtype=np.float32)
        both_SPM[:, p, : len(rewards)] = rewards, -rewards
    both_SPM.sort(axis=-1)
    return np.repeat(np.moveaxis(both_SPM, -1, 1)[:, :room, :, None], worlds, axis=-1)


def _drawn(new_P: NDArray[Any], draws_CW: Narrow, below_NPW: Narrow, keep: int) -> tuple[Narrow, Narrow]:
    """The lowest of the new rewards, and the highest with their sign changed, both ascending: (C, P, W) each.

    Larger uniform numbers make no smaller rewards, so that these are sorted, for all prompts at once, and what will be
    neither among the lowest nor among the highest is left out.
    """
    counts, room = np.unique(new_P), 1 << (keep - 1).bit_length()
    if len(counts) == 1 and counts[0] <= room:
        low_CPW = _rewards(np.sort(draws_CW[: counts[0]], axis=0)[:, None], below_NPW)
        return low_CPW, -low_CPW[::-1]
    most = min(room, counts[-1])
    low_CPW, high_CPW = (np.zeros((most, *below_NPW.shape[1:]), dtype=np.float32) for _ in range(2))
    absent_CP = np.arange(most)[:, None] >= new_P
    for count in counts:
        sorted_CW, those_P = np.sort(draws_CW[:count], axis=0), new_P == count
        low_CPW[:count, those_P] = sorted_CW[:most, None]
        high_CPW[:count, those_P] = sorted_CW[::-1][:most, None]
    low_CPW, high_CPW = _rewards(low_CPW, below_NPW), -_rewards(high_CPW, below_NPW)
    low_CPW[absent_CP] = high_CPW[absent_CP] = np.inf
    return low_CPW, high_CPW


def _rewards(uniform_CPW: Narrow, below_NPW: Narrow) -> Narrow:
    """The node of each world's reward for each uniform number."""
    rewards_CPW = np.empty((len(uniform_CPW), *below_NPW.shape[1:]), dtype=np.float32)
    for uniform_PW, rewards_PW in zip(uniform_CPW, rewards_CPW, strict=True):
        node_PW = (below_NPW < uniform_PW).view(np.uint8).sum(axis=0, dtype=np.uint8)
        np.take(GRID_V, node_PW, out=rewards_PW, mode="clip")
    return rewards_CPW


def _merge(lowest_MPW: Narrow, new_CPW: Narrow) -> None:
    """New values among the lowest, both ascending: the lowest of all stay, ascending.

    The lesser of the i-th lowest and the i-th highest new one, for all i, are the M lowest of both, first rising and
    then falling; they are sorted by comparing those at distance M / 2, M / 4, ... 1 (a bitonic merge).
    """
    room, count = len(lowest_MPW), len(new_CPW)
    np.minimum(lowest_MPW[room - count :], new_CPW[::-1], out=lowest_MPW[room - count :])
    distance = room // 2
    while distance:
        pairs = lowest_MPW.reshape(-1, 2, distance, *lowest_MPW.shape[1:])
        lesser = np.minimum(pairs[:, 0], pairs[:, 1])
        np.maximum(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
        pairs[:, 0] = lesser
        distance //= 2


def _best_variance(low_MPW: Narrow, high_MPW: Narrow) -> Narrow:
    """The largest variance of M rewards, given the M lowest, and the M highest with their sign changed, both ascending.

    It is that of the i lowest and the M - i highest, for some i from 0 to M.
    """
    keep = len(low_MPW)
    means_IPW = _sums(low_MPW)
    means_IPW -= _sums(high_MPW)[::-1]
    variances_IPW = _sums(np.square(low_MPW))
    variances_IPW += _sums(np.square(high_MPW))[::-1]
    means_IPW /= keep
    variances_IPW /= keep
    variances_IPW -= np.square(means_IPW, out=means_IPW)
    best_PW: Narrow = variances_IPW.max(axis=0)
    return best_PW


def _sums(values_MPW: Narrow) -> Narrow:
    """Sums of the first i values, for i from 0 to M: (M + 1, P, W)."""
    sums_IPW = np.empty((len(values_MPW) + 1, *values_MPW.shape[1:]), dtype=np.float32)
    sums_IPW[0] = 0.0
    for before_PW, value_PW, after_PW in zip(sums_IPW, values_MPW, sums_IPW[1:], strict=False):
        np.add(before_PW, value_PW, out=after_PW)
    return sums_IPW
