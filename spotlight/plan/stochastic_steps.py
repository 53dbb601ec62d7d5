"""Chooses an iteration's stochastic steps: once, for all of its samples, as a pure function of seed and iteration.

Windows that differ within a group would make its rewards differ for another reason than its seeds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np


def stochastic_steps(
    within: tuple[int, int],
    size: int,
    *,
    order: Literal["random", "sliding"],
    stride: int,
    every: int,
    seed: int,
    iteration: int,
) -> tuple[int, int]:
    """Steps ``[start, end)`` of a window of ``size`` that lies in ``within``.

    Args:
        order: "random" draws each start with equal chance; "sliding" begins at the first, moves on by ``stride`` every
            ``every`` iterations, and begins again when the next would not fit.

    Source: Flow-GRPO-Fast (github.com/yifan123/flow_grpo), MixGRPO (arXiv 2507.21802).
    """
    first, last = within[0], within[1] - size
    if order == "sliding":
        start = first + iteration // every % ((last - first) // stride + 1) * stride
    else:
        start = int(np.random.default_rng([seed, iteration]).integers(first, last + 1))
    return start, start + size
