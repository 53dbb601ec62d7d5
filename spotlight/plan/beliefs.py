"""What is believed of prompts' rewards: learnt from iteration to iteration, and worked out anew with each score.

Values in, values out. Beliefs about a prompt are counts of its rewards on a grid, fading with every iteration, over
kinds of prompts whose shares are learnt from all prompts, so that a new prompt starts with what the others taught.

Shapes: P prompts, K kinds, N grid nodes, L rewards of all prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from spotlight.records import record

Array = NDArray[np.float64]
GRID_N: Array = np.linspace(0.0, 1.0, 21)
"""Rewards are counted at their nearest node: halves, quarters and tenths are exact. A spread below 0.02 is not seen."""
_MEANS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
_CONCENTRATIONS = (1.0, 4.0, 16.0, 64.0)
"""Of the kinds that are Beta distributions: 1 is nearly Bernoulli; 64 has one peak, and a standard deviation of 0.06 at
most."""
_BACKGROUND = 0.005
"""Share of every kind that is spread over the whole grid, so that no reward is impossible."""
OWN_WEIGHT = 40.0
"""How many of a prompt's own rewards its kind counts as. On rewards of 0 and 1, 10 lost some 3 points of the optimum's
gain, 4 some 10; 25 and 60 were as good (``benchmarks.planner``)."""
START_PROMPTS = 1.0
"""How many prompts the prior of the kinds' shares counts as."""
FADING = 0.93
"""Factor by which counts shrink in an iteration: to half after ten."""
MEMORY = 64.0
"""Most rewards that a prompt's past counts as, so that a few iterations of drift never outweigh the present."""
FORGOTTEN_AFTER = 155
"""Iterations after which a prompt's past is given up: by then it is worth a thousandth of a reward at most."""
FIDELITY_START = 0.8
"""The fidelity that is assumed before it is measured: that of the demo."""
FIDELITY_PAIRS = 32.0
"""Weight of the fidelity believed so far, in pairs, when new pairs come."""


def _check_length(name: str, values: Sequence[float], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} values: give {length}")


@record
class RewardCounts:
    """What a prompt's rewards were."""

    prompt: int
    """Its id."""
    iteration: int
    """When the counts were last brought up to date."""
    counts: tuple[float, ...]
    """Rewards at each node of the grid; older ones count less."""

    def __post_init__(self) -> None:
        _check_length("counts", self.counts, len(GRID_N))


@record
class Beliefs:
    """All that exploration remembers from one iteration to the next."""

    iteration: int = 0
    """The last one learnt from."""
    kinds: tuple[float, ...] = ()
    """Prompts seen of each kind, older ones counting less; empty before the first."""
    nodes: tuple[float, ...] = ()
    """Rewards of the same prompts at each node of the grid; those of a prompt add up to 1."""
    prompts: tuple[RewardCounts, ...] = ()
    fidelity: float = FIDELITY_START
    """How much of a difference between two explored rewards is there again after regeneration, 0 to 1."""

    def __post_init__(self) -> None:
        if self.kinds or self.nodes:
            _check_length("kinds", self.kinds, len(_KINDS_KN))
            _check_length("nodes", self.nodes, len(GRID_N))

    def about(self, prompts: Sequence[int]) -> Beliefs:
        """The part that matters for some prompts: small enough to travel in a task."""
        wanted = set(prompts)
        return replace(self, prompts=tuple(seen for seen in self.prompts if seen.prompt in wanted))


@record
class Arm:
    """One prompt of the iteration, as far as it is explored."""

    prompt: int
    """Its id."""
    rewards: tuple[float, ...] = ()
    """Rewards of the candidates scored so far."""
    tried: int = 0
    """Candidates given out so far: the next one has this number."""
    pending: int = 0
    """Candidates given out whose score is still to come; lost ones do not count."""


def learn(
    beliefs: Beliefs,
    iteration: int,
    rewards: Mapping[int, Sequence[float]],
    pairs: Mapping[int, Sequence[tuple[float, float]]] | None = None,
) -> Beliefs:
    """What to believe after more rewards were seen.

    Args:
        iteration: the one that the rewards are from; not before ``beliefs.iteration``.
        rewards: ``{prompt id: rewards}`` in [0, 1]: of every candidate scored, or regenerated ones of seeds that
            were *not* chosen for their reward. Others would make each prompt look more varied than it is.
        pairs: ``{prompt id: (explored, regenerated) rewards}`` of the seeds that were kept.
    """
    age = iteration - beliefs.iteration
    counts_PN = _past(beliefs, rewards, iteration) + _counts(rewards.values())
    seen = tuple(
        RewardCounts(prompt=prompt, iteration=iteration, counts=tuple(counts_N))
        for prompt, counts_N in zip(rewards, counts_PN.tolist(), strict=True)
    )
    kinds = _kinds(beliefs, age, counts_PN)
    remembered = (
        known
        for known in beliefs.prompts
        if known.prompt not in rewards and iteration - known.iteration <= FORGOTTEN_AFTER
    )
    return Beliefs(
        iteration=iteration,
        kinds=tuple(kinds.prompts_K.tolist()),
        nodes=tuple(kinds.prompts_N.tolist()),
        prompts=(*remembered, *seen),
        fidelity=_fidelity(beliefs.fidelity, (pairs or {}).values()),
    )


def posterior(arms: Sequence[Arm], beliefs: Beliefs, iteration: int) -> tuple[Array, Array]:
    """The chance of each node if a prompt is of a kind, (P, K, N), and the chance that it is of that kind, (P, K)."""
    counts_PN = _past(beliefs, [arm.prompt for arm in arms], iteration) + _counts([arm.rewards for arm in arms])
    kinds = _kinds(beliefs, iteration - beliefs.iteration, counts_PN)
    total_P = OWN_WEIGHT + counts_PN.sum(axis=1)
    return (OWN_WEIGHT * kinds.chance_KN + counts_PN[:, None]) / total_P[:, None, None], kinds.shares_PK


def unexplored_variance(chance_PKN: Array, shares_PK: Array, keep: int) -> Array:
    """Expected variance among the rewards of ``keep`` seeds that are not chosen by them, (P,)."""
    mean_PK, square_PK = chance_PKN @ GRID_N, chance_PKN @ GRID_N**2
    return (shares_PK * (square_PK - mean_PK**2)).sum(axis=1) * (keep - 1) / keep


def _counts(rewards_P: Collection[Sequence[float]]) -> Array:
    """How many of each prompt's rewards are nearest to each node, (P, N); those outside count at the grid's ends."""
    last = len(GRID_N) - 1
    prompt_L = np.repeat(np.arange(len(rewards_P)), [len(rewards) for rewards in rewards_P])
    rewards_L = np.fromiter(chain.from_iterable(rewards_P), dtype=np.float64)
    node_L = np.rint(np.clip(rewards_L, 0, 1) * last).astype(np.int64)
    counts = np.bincount(prompt_L * len(GRID_N) + node_L, minlength=len(rewards_P) * len(GRID_N))
    return counts.reshape(len(rewards_P), len(GRID_N)).astype(np.float64)


def _past(beliefs: Beliefs, prompts: Iterable[int], iteration: int) -> Array:
    """Counts of prompts' rewards in earlier iterations, faded, (P, N)."""
    known = {seen.prompt: seen for seen in beliefs.prompts}
    nothing = RewardCounts(prompt=-1, iteration=iteration, counts=(0.0,) * len(GRID_N))
    seen = [known.get(prompt, nothing) for prompt in prompts]
    counts_PN = np.array([known.counts for known in seen]).reshape(len(seen), len(GRID_N))
    counts_PN *= FADING ** np.array([[iteration - known.iteration] for known in seen]).reshape(len(seen), 1)
    return np.asarray(counts_PN * np.minimum(1.0, MEMORY / np.maximum(counts_PN.sum(axis=1, keepdims=True), 1.0)))


@record
class _Kinds:
    """The kinds of prompts, as the prompts seen have shaped them."""

    prompts_K: Array
    """Prompts seen of each."""
    prompts_N: Array
    """The same prompts, each spread over the nodes of its rewards."""
    chance_KN: Array
    """Chance of each node."""
    shares_PK: Array
    """How likely each prompt is of each kind."""


def _kinds(beliefs: Beliefs, age: int, counts_PN: Array) -> _Kinds:
    """Empirical Bayes: the kinds' shares, their shapes and the prompts' kinds, each worked out from the others in turn.

    All kinds are stretched alike, so that together they give the rewards that were seen. So a reward of few values, or
    one that keeps to a small part of [0, 1], makes kinds that do the same.
    """
    seen_PN = counts_PN[counts_PN.any(axis=1)]
    fading = FADING**age
    past_K = fading * np.array(beliefs.kinds) if beliefs.kinds else np.zeros(len(_KINDS_KN))
    past_N = fading * np.array(beliefs.nodes) if beliefs.nodes else np.zeros(len(GRID_N))
    prompts_N = past_N + (seen_PN / seen_PN.sum(axis=1, keepdims=True)).sum(axis=0)
    prompts_K, chance_KN = past_K, _KINDS_KN
    for _ in range(5):
        log_PK = np.log(prompts_K + START_PROMPTS / len(_KINDS_KN)) + counts_PN @ np.log(chance_KN).T
        shares_PK = np.exp(log_PK - log_PK.max(axis=1, keepdims=True))
        shares_PK /= shares_PK.sum(axis=1, keepdims=True)
        prompts_K = past_K + shares_PK[counts_PN.any(axis=1)].sum(axis=0)
        if total := prompts_K.sum():
            expected_N = prompts_K @ chance_KN
            stretch_N = (prompts_N / expected_N * total + START_PROMPTS) / (total + START_PROMPTS)
            chance_KN = chance_KN * stretch_N
            chance_KN = chance_KN / chance_KN.sum(axis=1, keepdims=True)
    return _Kinds(prompts_K=prompts_K, prompts_N=prompts_N, chance_KN=chance_KN, shares_PK=shares_PK)


def _fidelity(before: float, pairs: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Fidelity with these pairs among its measurements.

    It is the slope of regenerated on explored rewards *within* prompts. Unlike a correlation, a slope does not
    change by choosing seeds for their explored reward; and unlike a pooled one, it does not count that
    prompts differ.
    """
    rows = [np.array(values) for values in pairs if len({explored for explored, _ in values}) > 1]
    if not rows:
        return before
    x, y = np.concatenate([values - values.mean(axis=0) for values in rows]).T
    if not (spread := float(x @ x)):  # their squares are less than any number
        return before
    slope = float(x @ y) / spread
    return min(1.0, max(0.0, before + (slope - before) * len(x) / (len(x) + FIDELITY_PAIRS)))


def _make_kinds() -> Array:
    """The kinds of prompts, (K, N): distributions on the grid, of every difficulty, Bernoulli or with one peak."""
    inner_N = np.clip(GRID_N, 0.5 / len(GRID_N), 1 - 0.5 / len(GRID_N))
    kinds = []
    for mean in _MEANS:
        kinds.append(np.where(GRID_N == 0, 1 - mean, np.where(GRID_N == 1, mean, 0.0)))
        for concentration in _CONCENTRATIONS:
            if concentration <= 200 * min(mean, 1 - mean):  # narrower ones fall on two nodes at most
                a, b = mean * concentration, (1 - mean) * concentration
                log_N = (a - 1) * np.log(inner_N) + (b - 1) * np.log1p(-inner_N)
                kinds.append(np.exp(log_N - log_N.max()))
    kinds_KN = np.stack(kinds)
    return _BACKGROUND / len(GRID_N) + (1 - _BACKGROUND) * kinds_KN / kinds_KN.sum(axis=1, keepdims=True)


_KINDS_KN = _make_kinds()
