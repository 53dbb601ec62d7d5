"""Prompts' rewards: synthetic distributions of every sort, and those recorded from the embedded job.

Nothing is drawn here but numbers. What was recorded is in ``benchmarks/data/planner.jsonl``, which ``python -m
benchmarks.planner --record`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Array]
"""A prompt's distribution: n candidates' (explored, regenerated) rewards, shape (2, n)."""
Scenario = Callable[[int, int], list[Draw]]
"""The prompts' distributions, given the iteration and a seed; a prompt keeps its place."""

RECORDED = Path(__file__).parents[1] / "data" / "planner.jsonl"
POOL = 48
"""Prompts of a whole run."""


def coin(p: float) -> Draw:
    return lambda rng, n: np.tile((rng.random(n) < p).astype(float), (2, 1))


def bell(mean: float, std: float) -> Draw:
    return lambda rng, n: np.tile(np.clip(rng.normal(mean, std, n), 0, 1), (2, 1))


def either(share: float, first: Draw, second: Draw) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, first(rng, n), second(rng, n))


def faded(draw: Draw, fidelity: float) -> Draw:
    """A distribution whose regenerated reward is the explored one with probability ``fidelity``, else a new one."""

    def both(rng: np.random.Generator, n: int) -> Array:
        explored, again = draw(rng, n)[0], draw(rng, n)[0]
        return np.stack([explored, np.where(rng.random(n) < fidelity, explored, again)])

    return both


def _difficulties(seed: int) -> Array:
    return np.random.default_rng([seed, 99]).beta(0.3, 0.3, POOL)


def mixed_coins(k: int, seed: int) -> list[Draw]:
    return [coin(p) for p in _difficulties(seed)]


def mixed_bells(k: int, seed: int) -> list[Draw]:
    rng = np.random.default_rng([seed, 98])
    stds = np.exp(rng.uniform(np.log(0.02), np.log(0.25), POOL))
    return [bell(mean, std) for mean, std in zip(rng.uniform(0.3, 0.7, POOL), stds, strict=True)]


def mixtures(k: int, seed: int) -> list[Draw]:
    shares = np.random.default_rng([seed, 97]).beta(0.5, 0.5, POOL)
    return [either(p, bell(0.85, 0.05), bell(0.15, 0.05)) for p in shares]


def drifting_coins(k: int, seed: int) -> list[Draw]:
    rng = np.random.default_rng([seed, 96])
    start, speed = rng.normal(-3, 2.5, POOL), rng.uniform(0, 0.6, POOL)
    return [coin(p) for p in 1 / (1 + np.exp(-start - speed * k))]


def fading(scenario: Scenario, fidelity: float) -> Scenario:
    return lambda k, seed: [faded(draw, fidelity) for draw in scenario(k, seed)]


def recorded(version: int) -> Scenario:
    """The embedded job's prompts: explored with a version, regenerated with the next one."""
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    by = {(row["version"], row["prompt"]): np.array(row["rewards"]) for row in rows}
    prompts = sorted({id for found, id in by if found == version})
    pairs = [np.stack([by[version, id], by[version + 1, id]]) for id in prompts]

    def resampled(pair: Array) -> Draw:
        return lambda rng, n: pair[:, rng.integers(pair.shape[1], size=n)]

    return lambda k, seed: [resampled(pair) for pair in pairs]


SCENARIOS: Mapping[str, Scenario] = {
    "alike: coins of 0.5": lambda k, seed: [coin(0.5)] * POOL,
    "alike: coins of 0.05": lambda k, seed: [coin(0.05)] * POOL,
    "alike: bells": lambda k, seed: [bell(0.5, 0.12)] * POOL,
    "coins of Beta(0.3, 0.3)": mixed_coins,
    "bells, std 0.02 to 0.25": mixed_bells,
    "mixtures of two bells": mixtures,
    "drifting coins": drifting_coins,
    "coins, fidelity 0.7": fading(mixed_coins, 0.7),
    "coins, fidelity 0.3": fading(mixed_coins, 0.3),
    "coins, fidelity 0": fading(mixed_coins, 0.0),
    "recorded, version 0": recorded(0),
    "recorded, version 12": recorded(12),
    "recorded, version 40": recorded(40),
}
