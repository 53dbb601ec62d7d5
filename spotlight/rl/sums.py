"""Adds the gradients of an update's parts, in an order that only their number decides; knows no torch.

Where several workers train, each adds one slice of all gradients, so that nobody reads all of them: a reduce-scatter,
whose shares go through the store. Sums are made number by number, so no bit depends on the slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from spotlight.config import Config

SLICES_MAX = 32
"""Most slices: an update of 400 parts then takes no more than 12,800 reads."""
ADD_COST = 2.0
"""What one more task in a row costs, in transfers of a gradient of the embedded model on one machine; with a large
model, less."""
Value = TypeVar("Value", bound=Any)
"""An array or a tensor."""


def slices_of(config: Config, parts: int) -> int:
    """How many slices to keep and add the gradients of an update in; 1: the update reads and adds them all.

    Args:
        parts: how many parts the update has.
    """
    return best_slices(parts, sum(pool.workers for name, pool in config.pools if name in config.strategy.train_pools))


def best_slices(parts: int, workers: int) -> int:
    """One slice for each worker, but at most half as many as parts, so that a few workers may be away; 1 where slices
    gain nothing.

    In transfers of one gradient: an update that adds all by itself reads ``parts``. With ``n`` slices, the worker of
    each slice reads ``parts / n`` and writes ``1 / n``, all of them in parallel, and the update reads 1.
    """
    slices = max(1, min(workers, -(-parts // 2), SLICES_MAX))
    return slices if (parts + 1) / slices + 1 + ADD_COST < parts else 1


def sliced(sizes: Sequence[int], slices: int) -> list[range]:
    """A range of parameters for each slice; all slices have about as many values.

    Args:
        sizes: number of values of each parameter, in order.
    """
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    cuts = [bisect_right(middles, sum(sizes) * at / slices) for at in range(1, slices)]
    return [range(first, stop) for first, stop in zip([0, *cuts], [*cuts, len(sizes)], strict=True)]


def tree_sum(gradients: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """The sum by a binary tree, ((g0 + g1) + (g2 + g3)) + ...

    At most log2(K) + 1 of K gradients are held at once, besides those that the iterable read ahead.

    Args:
        gradients: in the order of their parts, or slices; a parameter that one of them lacks counts as zero in it.
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
