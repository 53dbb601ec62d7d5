"""Turns rewards into advantages: how much better than its group each sample is. In float64, without torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


def group_advantages(
    rewards_B: ArrayLike,
    groups_B: Sequence[Hashable] | NDArray[np.generic],
    *,
    std: Literal["global", "group", "none"] = "global",
    eps: float = 1e-4,
) -> NDArray[np.float64]:
    """How much better than its group each sample is: ``(r - mean_group) / (std + eps)``, or ``r - mean_group``.

    Args:
        rewards_B: finite rewards, any scale.
        groups_B: an id per sample; equal ids make a group, in any order.
        std: of the whole batch (``"global"``, population form) or of each group by itself; or ``"none"``.
        eps: keeps groups of nearly equal rewards from blowing up.

    Returns:
        Shape (B,), float64. Exactly 0 in a group of one sample or of equal rewards.

    Raises:
        ValueError: nothing came, the lengths differ, a reward is not finite, or ``std`` is neither.

    Source: Flow-GRPO (arXiv 2505.05470); without a spread, Dr. GRPO (arXiv 2503.20783).
    """
    if std not in ("global", "group", "none"):
        raise ValueError(f"std = {std!r} must be 'global', 'group' or 'none'")
    rewards, members = _grouped(rewards_B, groups_B)
    advantages = np.zeros_like(rewards)
    for rows in members:
        above_first = rewards[rows] - rewards[rows[0]]  # exactly 0 where rewards are equal, unlike r - mean(r)
        better = above_first - above_first.mean()
        spread = float(np.std(rewards if std == "global" else above_first))
        advantages[rows] = better if std == "none" else better / (spread + eps)
    return advantages


def spread(rewards_B: ArrayLike) -> float:
    """Standard deviation of rewards, population form; exactly 0 where all are equal."""
    rewards = np.asarray(rewards_B, dtype=np.float64)
    return float(np.std(rewards - rewards[0]))


def zero_std_ratio(rewards_B: ArrayLike, groups_B: Sequence[Hashable] | NDArray[np.generic]) -> float:
    """Share of groups, in [0, 1], whose rewards are all equal: they teach nothing.

    Raises:
        ValueError: as `group_advantages`.
    """
    rewards, members = _grouped(rewards_B, groups_B)
    return sum(bool(np.ptp(rewards[rows]) == 0) for rows in members) / len(members)


def _grouped(
    rewards_B: ArrayLike, groups_B: Sequence[Hashable] | NDArray[np.generic]
) -> tuple[NDArray[np.float64], list[list[int]]]:
    """The rewards, checked, and the rows of each group."""
    rewards = np.asarray(rewards_B, dtype=np.float64)
    if rewards.shape != (len(groups_B),) or not len(rewards):
        raise ValueError(
            f"rewards of shape {rewards.shape} and {len(groups_B)} group ids: each sample needs one of both"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, and {rewards[~np.isfinite(rewards)][0]} came: drop failed samples first"
        )
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups_B):
        members.setdefault(group, []).append(row)
    return rewards, list(members.values())
