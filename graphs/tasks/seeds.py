"""Which seeds are tried: a hash of what they are for, so that every worker finds the same."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from spotlight.records import Prompt


def candidate_seed(seed: int, iteration: int, prompt: Prompt, index: int) -> int:
    """The index-th candidate of a prompt in an iteration: 63 bits of a hash, so that no two runs share noise."""
    return candidate_seeds(seed, iteration, prompt, (index,))[0]


def candidate_seeds(seed: int, iteration: int, prompt: Prompt, indices: Iterable[int]) -> tuple[int, ...]:
    """As `candidate_seed`, of several."""
    name = f"{seed}/{iteration}/{prompt.id}/"
    return tuple([int.from_bytes(sha256(f"{name}{index}".encode()).digest()[:8]) >> 1 for index in indices])


def validation_seeds(prompt: Prompt, count: int) -> tuple[int, ...]:
    """The same for every version and every run, so that scores compare."""
    return candidate_seeds(-1, 0, prompt, range(count))
