"""Decides how much exploration is worth its GPU-seconds, where every GPU could also roll out or train."""

from __future__ import annotations

import math
from collections.abc import Sequence


def worth_exploring(captured: Sequence[float], *, work_s: float, chunk_s: float, idle_s: float = 0.0) -> int:
    """Chunks of candidates to try: as long as they raise the captured variance more than they lengthen the iteration.

    With captured variance V and GPU-seconds of rollout R, of training T and of exploration E, an iteration learns in
    proportion to V, and lasts in proportion to R + T + E; so the best E maximises ``V(E) / (R + T + E)``. It is where
    ``V'(E) / V(E)`` has come down to ``1 / (R + T + E)``. GPU-seconds I in which GPUs would idle cost nothing, so that
    the iteration lasts in proportion to ``R + T + max(I, E)``. The first chunks, of which all candidates are kept, may
    gain nothing by themselves: what counts is where the quotient is largest.

    Args:
        captured: V after 0, 1, 2, ... chunks; not all 0.
        work_s: R + T.
        chunk_s: of each chunk.
        idle_s: I.

    Returns:
        The smallest of the best numbers of chunks.

    Raises:
        ValueError: there is no V, one is negative or not finite, ``work_s`` or ``chunk_s`` is not positive, or
            ``idle_s`` is negative.

    Source: ours; the papers explore in the time that is left over.
    """
    if not captured or not all(math.isfinite(value) and value >= 0 for value in captured):
        raise ValueError(f"captured = {list(captured)} must be finite and not negative, and not empty")
    if not (work_s > 0 and chunk_s > 0 and 0 <= idle_s < math.inf):
        raise ValueError(f"work_s = {work_s} and chunk_s = {chunk_s} must be positive, and idle_s = {idle_s} not less")
    rates = [value / (work_s + max(idle_s, chunks * chunk_s)) for chunks, value in enumerate(captured)]
    return rates.index(max(rates))
