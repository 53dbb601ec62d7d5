"""Imagines what further candidates would bring, in worlds drawn from what is believed.

Values in, values out: a seed fixes all random numbers.

Shapes: P prompts, K kinds, N grid nodes, V values of rewards, W worlds, J chunks, M kept, S sides (low and high).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.plan.beliefs import GRID_N, Arm, Array

Narrow = NDArray[np.float32]
"""For what is computed in each world: single precision is enough, a reward's seventh digit decides nothing."""
WORLDS, LEAST_WORLDS, ALL_WORLDS = 128, 16, 2**14
"""In which a prompt is imagined: fewer where there are many prompts, so that the time grows little with them. Spread
evenly, 64 were as good as 256."""
BLOCK = 2**13
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
    draws_J = [[_spread(rng, worlds) for _ in range(new_P.max())] for new_P in new_JP]
    values_V = np.unique(np.concatenate([GRID_V, *(np.array(arm.rewards, dtype=np.float32) for arm in arms)]))
    variance_PWJ = np.empty((len(arms), worlds, ahead + 1))
    block = max(1, BLOCK // worlds)
    for first in range(0, len(arms), block):
        some = slice(first, first + block)
        kind_PW = (shares_PK[some].cumsum(axis=1)[:, None, :-1] < kind_W[:, None]).sum(axis=-1)
        below_PKN = chance_PKN[some].cumsum(axis=-1)[..., :-1].astype(np.float32)
        below_NPW = np.ascontiguousarray(np.moveaxis(np.take_along_axis(below_PKN, kind_PW[..., None], axis=1), -1, 0))
        variance_PWJ[some] = _variances(
            _extremes(arms[some], values_V, keep, worlds), values_V, below_NPW, new_JP[:, some], draws_J
        )
    return variance_PWJ


def _spread(rng: np.random.Generator, worlds: int) -> Narrow:
    """A uniform number for each world, spread evenly over them."""
    uniform_W: Narrow = ((rng.permutation(worlds) + rng.random(worlds)) / worlds).astype(np.float32)
    return uniform_W


def _variances(
    ranks_MSPW: NDArray[Any],
    values_V: Narrow,
    below_NPW: Narrow,
    new_JP: NDArray[Any],
    draws_J: Sequence[Sequence[Narrow]],
) -> Array:
    """Of some prompts: the variance of the kept subset after each number of chunks, (P, W, J).

    Args:
        ranks_MSPW: of what was scored; it is overwritten.
        below_NPW: the chance of a reward below each node but the first.
        new_JP: candidates of each chunk.
        draws_J: the worlds' uniform numbers for each candidate of each chunk.
    """
    none, last = _none(ranks_MSPW.dtype), len(values_V) - 1
    rank_N = np.searchsorted(values_V, GRID_V).astype(ranks_MSPW.dtype)
    low_V, high_V = (
        np.append(side_V, np.float32(end)) for side_V, end in ((values_V, np.inf), (values_V[::-1], -np.inf))
    )
    new_SPW = np.empty_like(ranks_MSPW[0])
    variance_JPW = np.empty((len(new_JP), *below_NPW.shape[1:]), dtype=np.float32)
    for new_P, draws, variance_PW in zip(new_JP, draws_J, variance_JPW, strict=True):
        for at, uniform_W in enumerate(draws):
            node_PW = (below_NPW < uniform_W).view(np.uint8).sum(axis=0, dtype=np.uint8)
            np.take(rank_N, node_PW, out=new_SPW[0], mode="clip")
            np.subtract(last, new_SPW[0], out=new_SPW[1])
            if (absent_P := new_P <= at).any():
                new_SPW[:, absent_P] = none
            _insert(ranks_MSPW, new_SPW)
        low_MPW, high_MPW = (ranks_MSPW[:, side].astype(np.intp) for side in (0, 1))
        variance_PW[:] = _best_variance(low_V.take(low_MPW, mode="clip"), high_V.take(high_MPW, mode="clip"))
    return np.moveaxis(variance_JPW, 0, -1).astype(np.float64)


def _none(kind: np.dtype[Any]) -> int:
    """The rank of no reward: behind all others."""
    return int(np.iinfo(kind).max)


def _extremes(arms: Sequence[Arm], values_V: Narrow, keep: int, worlds: int) -> NDArray[Any]:
    """Ranks among the values of the lowest scored rewards, and, from the other end, of the highest, ascending.

    Shape (M, S, P, W). Ranks, in one byte where that is enough, are compared faster than rewards. The last one
    stands for no reward, where there are too few.
    """
    kind: type[np.unsignedinteger[Any]] = np.uint8 if len(values_V) < 256 else np.uint32
    columns = max(keep, *(len(arm.rewards) for arm in arms))
    both = np.full((2, len(arms), columns), _none(np.dtype(kind)), dtype=kind)
    for p, arm in enumerate(arms):
        ranks = np.searchsorted(values_V, np.array(arm.rewards, dtype=np.float32))
        both[:, p, : len(arm.rewards)] = ranks, len(values_V) - 1 - ranks
    both.sort(axis=-1)
    return np.repeat(np.moveaxis(both, -1, 0)[:keep, :, :, None], worlds, axis=-1)


def _insert(lowest_MSPW: NDArray[Any], new_SPW: NDArray[Any]) -> None:
    """A new value among the lowest, which stay ascending: what it displaces moves up. It is overwritten."""
    larger_SPW = np.empty_like(new_SPW)
    for value_SPW in lowest_MSPW:
        np.maximum(value_SPW, new_SPW, out=larger_SPW)
        np.minimum(value_SPW, new_SPW, out=value_SPW)
        new_SPW, larger_SPW = larger_SPW, new_SPW


def _best_variance(low_MPW: Narrow, high_MPW: Narrow) -> Narrow:
    """The largest variance of M rewards, given the M lowest ascending and the M highest descending."""
    keep = len(low_MPW)
    means, variances = _splits(low_MPW, high_MPW), _splits(low_MPW**2, high_MPW**2)
    means /= keep
    variances /= keep
    variances -= np.square(means, out=means)
    best: Narrow = variances.max(axis=0)
    return best


def _splits(low_MPW: Narrow, high_MPW: Narrow) -> Narrow:
    """Sums of the i lowest and the M - i highest, for i from 0 to M."""
    keep, high_PW = len(low_MPW), np.zeros_like(low_MPW[0])
    sums_IPW = np.zeros((keep + 1, *high_PW.shape), dtype=np.float32)
    for i in range(keep):
        np.add(sums_IPW[i], low_MPW[i], out=sums_IPW[i + 1])
    for i in range(keep):
        high_PW += high_MPW[i]
        sums_IPW[keep - 1 - i] += high_PW
    return sums_IPW
