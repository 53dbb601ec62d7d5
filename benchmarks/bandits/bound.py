"""About the most that any planner can gain with coins, by Lagrangian relaxation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from benchmarks.bandits.policies import CHUNK, KEEP, SEEDS_TRIED
from benchmarks.bandits.rewards import Array


def coin_bound(seen: int, a: float = 0.3) -> float:
    """About the most of the optimum's gain over equal shares that *any* planner can get, with ``seen`` rewards each.

    For coins of Beta(a, a), that prior known and every score seen at once. By Lagrangian relaxation: each prompt pays a
    price per chunk and stops when it likes; for any price, its mean value and the budget's price together are no less
    than the best policy's value. The optimum, whose coins are known, is relaxed alike; only a ratio of two bounds is
    no bound itself.
    """
    prices = np.geomspace(1e-4, 0.1, 60)
    chunks = SEEDS_TRIED / CHUNK
    coins = np.sort(np.random.default_rng(0).beta(a, a, 20_000))[50::100]
    equal = float(_heads(a, a, SEEDS_TRIED) @ [_kept(heads, SEEDS_TRIED - heads) for heads in range(SEEDS_TRIED + 1)])
    known = np.mean([_stopped(1e6 * p, 1e6 * (1 - p), prices) for p in coins], axis=0)
    priors = ((chance, a + heads, a + seen - heads) for heads, chance in enumerate(_heads(a, a, seen)))
    learnt = np.sum([chance * _stopped(alpha, beta, prices) for chance, alpha, beta in priors], axis=0)
    informed, optimum = (float((chunks * prices + value).min()) for value in (learnt, known))
    return (informed - equal) / (optimum - equal)


def _stopped(alpha: float, beta: float, prices: Array, chunks_max: int = 20) -> Array:
    """Expected kept variance of a coin minus the cost of its chunks, at each price, with optimal stopping."""
    value = np.zeros((len(prices), CHUNK * (chunks_max + 1) + 1))
    for n in range(CHUNK * chunks_max, -1, -CHUNK):
        unseen = alpha * beta / (alpha + beta) / (alpha + beta + 1) * (KEEP - 1) / KEEP
        stop = np.array([_kept(heads, n - heads) if n else unseen for heads in range(n + 1)])
        chance = np.array([_heads(alpha + heads, beta + n - heads, CHUNK) for heads in range(n + 1)])
        ahead = np.lib.stride_tricks.sliding_window_view(value, CHUNK + 1, axis=1)
        value = np.maximum(stop, np.einsum("hc,phc->ph", chance, ahead) - prices[:, None])
    return value[:, 0]


@cache
def _kept(heads: int, tails: int) -> float:
    """Variance of the kept samples among so many ones and zeros."""
    ones = min(heads, max(KEEP - tails, KEEP // 2))
    return ones * (KEEP - ones) / KEEP**2


def _heads(alpha: float, beta: float, n: int) -> Array:
    """Chance of 0 to n heads of a coin of Beta(alpha, beta)."""
    up, down, all_ = (np.cumprod(np.append(1.0, x + np.arange(n))) for x in (alpha, beta, alpha + beta))
    return np.array([math.comb(n, heads) for heads in range(n + 1)]) * up * down[::-1] / all_[-1]
