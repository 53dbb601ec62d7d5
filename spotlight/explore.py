"""Decides which seeds to try and which of them to keep.

Values in, values out: no randomness, no clock, no torch. Ties fall to the earlier candidate, so the
same rewards always give the same seeds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def max_variance_subset(rewards: ArrayLike, keep: int) -> list[int]:
    """The ``keep`` candidates whose rewards have the largest variance; exact, in O(n log n).

    The best subset is always the i lowest and the ``keep - i`` highest for some i, and prefix sums give the variance
    of each such split.

    Args:
        rewards: one finite number per candidate.
        keep: how many to keep, from 1 to all.

    Returns:
        Indices into ``rewards``, ascending. Of equally good splits, the one with more of the lowest.

    Raises:
        ValueError: ``keep`` is out of range, or a reward is not finite.

    Source: PODS (arXiv 2504.13818).
    """
    values = _finite(rewards, "rewards")
    n = len(values)
    if not 1 <= keep <= n:
        raise ValueError(f"keep = {keep} of {n} rewards: it must be from 1 to {n}")
    order = np.argsort(values, kind="stable")
    centred = values[order] - values[order[n // 2]]  # variances do not mind, and the sums of squares lose fewer digits
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    low = np.arange(keep + 1)
    high = n - (keep - low)
    mean = (sums[low] + sums[n] - sums[high]) / keep
    variance = (squares[low] + squares[n] - squares[high]) / keep - mean**2
    lowest = order[: keep - int(np.argmax(variance[::-1]))].tolist()
    rest = np.setdiff1d(np.arange(n), lowest)
    highest = rest[np.argsort(-values[rest], kind="stable")][: keep - len(lowest)].tolist()
    return sorted(lowest + highest)


def equal_shares(
    prompts: int, seeds_tried: int, chunk: int, rounds: int, round_index: int
) -> list[tuple[int, int, int]]:
    """One round of the plain allocation: every prompt gets the same number of candidates.

    Chunks are dealt candidates first: every prompt's first chunk, then every prompt's second. So wherever the deadline
    cuts, prompts are explored equally to within a chunk. The rounds together cover each prompt's candidates
    ``0 .. seeds_tried - 1`` exactly once, and their numbers of chunks differ by at most one.

    Args:
        prompts: how many there are.
        seeds_tried: candidates per prompt.
        chunk: most candidates in one request.
        rounds: how many rounds there are.
        round_index: which of them, from 0.

    Returns:
        ``(prompt index, first candidate, number of candidates)`` each, in the order to run them.

    Raises:
        ValueError: a count is not positive, or there is no such round.
    """
    if min(prompts, seeds_tried, chunk, rounds) < 1 or not 0 <= round_index < rounds:
        raise ValueError(
            f"prompts = {prompts}, seeds_tried = {seeds_tried}, chunk = {chunk} and rounds = {rounds} must be positive "
            f"and round_index = {round_index} in [0, rounds)"
        )
    chunks = [
        (prompt, first, min(chunk, seeds_tried - first))
        for first in range(0, seeds_tried, chunk)
        for prompt in range(prompts)
    ]
    start, end = (len(chunks) * edge // rounds for edge in (round_index, round_index + 1))
    return chunks[start:end]


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float | None:
    """Spearman's rank correlation of paired numbers, equal ones sharing their mean rank; in [-1, 1].

    Returns:
        None where it is undefined: fewer than two pairs, or one side is constant.

    Raises:
        ValueError: the lengths differ, or a number is not finite.
    """
    left, right = _finite(a, "a"), _finite(b, "b")
    if len(left) != len(right):
        raise ValueError(f"pairs are needed, and there are {len(left)} and {len(right)} numbers")
    if len(left) < 2:
        return None
    x, y = _centred_ranks(left), _centred_ranks(right)
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(ranks[inverse] - (len(values) + 1) / 2)


def _finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a row of finite numbers, got {values!r}")
    return array
