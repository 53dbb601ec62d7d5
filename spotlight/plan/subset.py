"""Decides which seeds, and which prompts, to keep: those whose rewards differ most.

Values in, values out. Ties fall to the earlier candidate, so the same rewards always give the same seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
    values = finite_row(rewards, "rewards")
    n = len(values)
    if not 1 <= keep <= n:
        raise ValueError(f"keep = {keep} of {n} rewards: it must be from 1 to {n}")
    order = np.argsort(values, kind="stable")
    centred = values[order] - values[order[n // 2]]  # changes no variance, and the sums of squares lose fewer digits
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    low = np.arange(keep + 1)
    high = n - (keep - low)
    mean = (sums[low] + sums[n] - sums[high]) / keep
    variance = (squares[low] + squares[n] - squares[high]) / keep - mean**2
    lowest = order[: keep - int(np.argmax(variance[::-1]))].tolist()
    is_rest = np.ones(n, dtype=np.bool_)
    is_rest[lowest] = False
    rest = np.flatnonzero(is_rest)
    highest = rest[np.argsort(-values[rest], kind="stable")][: keep - len(lowest)].tolist()
    return sorted(lowest + highest)


def most_varied(groups: Sequence[Sequence[float]], count: int) -> list[int]:
    """The ``count`` groups whose rewards have the largest variance.

    Args:
        groups: the known rewards of each, finite. A group with fewer than two counts as the mean of the others: it is
            better than one that is known to be flat.
        count: how many to take; all, if there are no more.

    Returns:
        Indices into ``groups``, ascending. Of equally varied ones, the earlier.
    """
    known = {index: statistics.pvariance(rewards) for index, rewards in enumerate(groups) if len(rewards) > 1}
    unknown = statistics.fmean(known.values()) if known else 0.0
    order = sorted(range(len(groups)), key=lambda index: (-known.get(index, unknown), index))
    return sorted(order[:count])


def finite_row(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a row of finite numbers, got {values!r}")
    return array
