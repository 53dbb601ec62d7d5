"""Adds the gradients of an update's parts, in an order that only their number decides; knows no torch and no worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

ADDED_TOGETHER = 4
"""Gradients of neighbouring parts that one task adds. A power of two, so that the tree of all adds stays the same; with
2 or 8, the sum of 48 gradients would wait longer for what is fetched and kept on the way (docs/decisions.md)."""
ADDED_BY_UPDATE = 8
"""Most gradients that an update adds by itself: one level of adds takes as long as to fetch five."""
Value = TypeVar("Value", bound=Any)
"""An array or a tensor."""


def additions(count: int) -> list[list[range]]:
    """Which gradients are added before an update adds what is left, level by level.

    The update would read one gradient after the other; adds run beside each other, wherever somebody is free.

    Args:
        count: parts of the update.

    Returns:
        For each level, the neighbours that each add takes of the level before it; nothing for few parts.
    """
    levels = []
    while count > ADDED_BY_UPDATE:
        levels.append([range(first, min(first + ADDED_TOGETHER, count)) for first in range(0, count, ADDED_TOGETHER)])
        count = len(levels[-1])
    return levels


def tree_sum(gradients: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """The sum by a binary tree, ((g0 + g1) + (g2 + g3)) + ...; of K gradients, log2(K) + 1 are held at once.

    Where neighbours are added first, as `additions` says, the bits are the same.

    Args:
        gradients: in the order of their parts; what one of them lacks, it adds nothing to.
    """
    held: list[tuple[int, dict[str, Value]]] = []
    for gradient in gradients:
        leaves, total = 1, dict(gradient)
        while held and held[-1][0] == leaves:
            total = _added(held.pop()[1], total)
            leaves *= 2
        held.append((leaves, total))
    while len(held) > 1:
        _, right = held.pop()
        leaves, left = held.pop()
        held.append((leaves, _added(left, right)))
    return held[0][1] if held else {}


def _added(left: dict[str, Value], right: dict[str, Value]) -> dict[str, Value]:
    both = {name: left[name] + right[name] for name in left if name in right}
    return {**left, **right, **both}
