"""Decides how large a request is."""

from __future__ import annotations

from math import ceil

SEEDS_MAX = 8
"""In a forward batch, where the settings do not say: larger ones take memory and save little."""


def request_seeds(
    *, prompts: int, seeds: int, gangs: int, seeds_max: int, fixed_s: float, sample_s: float, least_s: float = 0.0
) -> int:
    """Seeds per request that end the rollout soonest: large batches waste no time, small ones make the last wave short.

    With ``b`` seeds in a request there are ``prompts * ceil(seeds / b)`` requests, and the rollout takes::

        ceil(requests / gangs) * (fixed_s + max(b * sample_s, least_s))

    Args:
        prompts: groups to roll out.
        seeds: samples per group.
        gangs: requests that run at once.
        seeds_max: samples that fit one forward batch.
        fixed_s: what a request costs whatever its size.
        sample_s: what each of its samples adds.
        least_s: what its samples take together, however few they are.

    Returns:
        From 1 to ``min(seeds, seeds_max)``; of equals the largest, which is the fewest requests.

    Raises:
        ValueError: a count is not positive, or a time is negative.
    """
    if min(prompts, seeds, gangs, seeds_max) < 1 or min(fixed_s, sample_s, least_s) < 0:
        raise ValueError(
            f"prompts = {prompts}, seeds = {seeds}, gangs = {gangs} and seeds_max = {seeds_max} must be positive, "
            f"fixed_s = {fixed_s}, sample_s = {sample_s} and least_s = {least_s} not negative"
        )

    def makespan_s(size: int) -> float:
        requests = prompts * ceil(seeds / size)
        return ceil(requests / gangs) * (fixed_s + max(size * sample_s, least_s))

    return min(range(min(seeds, seeds_max), 0, -1), key=makespan_s)
