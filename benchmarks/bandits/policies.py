"""Policies that decide which candidates are tried: equal shares, epsilon-greedy, the planner, and some that know more.

Every policy sees the same candidates. The optimum knows each prompt's true distribution and sees every score at once;
the informed sees every score at once and knows the distributions, but not which prompt has which; the others see the
scores of rounds up to r - 2, as in the graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.bandits.rewards import POOL, Array, Draw, Scenario
from spotlight.plan import bandit
from spotlight.plan.bandit import allocate, equal_shares
from spotlight.plan.beliefs import GRID_N, Arm, Beliefs, learn
from spotlight.plan.subset import max_variance_subset

Chunks = list[tuple[int, int, int]]
"""(prompt, first candidate, number of candidates) each."""

PROMPTS, ITERATIONS = 16, 12
"""Prompts of an iteration, and iterations: each of 48 prompts is met four times, three iterations apart. Of the 40
recorded ones 32 are met, six times, two iterations apart."""
KEEP, CHUNK, SEEDS_TRIED = 8, 8, 32
EPSILON = 0.2
WORLDS, AHEAD = 64, 3 * CHUNK
"""Worlds in which the optimum weighs a chunk, and candidates that it looks ahead."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One iteration's exploration by one policy."""

    iteration: int
    ids: Sequence[int]
    draws: Sequence[Draw]
    pool: Sequence[Draw]
    """Distributions of all prompts, of this iteration or not."""
    rewards_PL: tuple[Array, Array]
    """Explored and regenerated rewards of each prompt's candidates, tried or not."""
    rounds: int
    given: list[Chunks] = field(default_factory=list)
    """Chunks of each round so far."""

    def tried(self, rounds: int) -> list[int]:
        """Candidates of each prompt given out in the first rounds."""
        count = [0] * len(self.ids)
        for chunks in self.given[:rounds]:
            for prompt, _, size in chunks:
                count[prompt] += size
        return count

    def scored(self, prompt: int, count: int) -> Array:
        return self.rewards_PL[0][prompt, :count]

    def slots(self, round_index: int) -> int:
        return len(equal_shares(len(self.ids), SEEDS_TRIED, CHUNK, self.rounds, round_index))

    def kept(self) -> list[tuple[Array, Array, int]]:
        """Each prompt's kept (explored, regenerated) rewards and how many of its candidates were scored."""
        groups = []
        for prompt, count in enumerate(self.tried(self.rounds)):
            best = max_variance_subset(self.scored(prompt, count), KEEP) if count > KEEP else list(range(KEEP))
            groups.append((self.rewards_PL[0][prompt, best], self.rewards_PL[1][prompt, best], count))
        return groups


class Equal:
    """The plain allocation."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        return equal_shares(len(trial.ids), SEEDS_TRIED, CHUNK, trial.rounds, r)

    def end(self, trial: Trial) -> None: ...


class Unexplored(Equal):
    """Nothing is tried: the first candidates are kept."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        return []


class EpsilonGreedy(Equal):
    """The prompt whose seen candidates promise most by resampling them, or, one time in 1/epsilon, any prompt."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        rng = np.random.default_rng([seed, r])
        seen, tried = trial.tried(max(0, r - 1)), trial.tried(r)
        chunks: Chunks = []
        for _ in range(trial.slots(r)):
            gains = [
                _gain(trial.scored(p, seen[p]), rng.choice(trial.scored(p, seen[p]), (16, tried[p] - seen[p] + CHUNK)))
                if seen[p]
                else 1.0
                for p in range(len(tried))
            ]
            best = max(range(len(tried)), key=lambda p: (gains[p], -tried[p]))
            chosen = int(rng.integers(len(tried))) if rng.random() < EPSILON else best
            chunks.append((chosen, tried[chosen], CHUNK))
            tried[chosen] += CHUNK
        return chunks


class Planner(Equal):
    """Spotlight's own planner."""

    def __init__(self) -> None:
        self.beliefs = Beliefs()

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        seen, tried = trial.tried(max(0, r - 1)), trial.tried(r)
        arms = [
            Arm(prompt=id, rewards=tuple(trial.scored(p, seen[p])), tried=tried[p], pending=tried[p] - seen[p])
            for p, id in enumerate(trial.ids)
        ]
        return allocate(
            arms,
            self.beliefs.about(trial.ids),
            iteration=trial.iteration,
            slots=trial.slots(r),
            later=sum(trial.slots(later) for later in range(r + 1, trial.rounds)),
            candidates=len(trial.ids) * SEEDS_TRIED - sum(tried),
            chunk=CHUNK,
            keep=KEEP,
            seed=seed * 1000 + r,
        )

    def end(self, trial: Trial) -> None:
        found = _learnable(trial)
        rewards = {id: rewards for id, (rewards, _) in found.items()}
        pairs = {id: pairs for id, (_, pairs) in found.items()}
        self.beliefs = learn(self.beliefs, trial.iteration, rewards, pairs)


class Optimum(Equal):
    """Chunk by chunk, with every score so far, where the true distribution promises most."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        if r:
            return []
        rng = np.random.default_rng(seed)
        tried = [0] * len(trial.ids)
        promise = [self._promise(trial, p, 0, rng) for p in range(len(tried))]
        chunks: Chunks = []
        for _ in range(sum(trial.slots(index) for index in range(trial.rounds))):
            best = int(np.argmax(promise))
            chunks.append((best, tried[best], CHUNK))
            tried[best] += CHUNK
            promise[best] = self._promise(trial, best, tried[best], rng)
        return chunks

    def _promise(self, trial: Trial, p: int, count: int, rng: np.random.Generator) -> float:
        """Most gain per chunk over the next one to three."""
        drawn = self._drawn(trial, p, count, rng)
        scored = trial.scored(p, count)
        missing = max(0, KEEP - count)
        before = _variance(scored, drawn[:, :missing])
        sizes = range(CHUNK, AHEAD + 1, CHUNK)
        return max((_variance(scored, drawn[:, : max(size, missing)]) - before) * CHUNK / size for size in sizes)

    def _drawn(self, trial: Trial, p: int, count: int, rng: np.random.Generator) -> Array:
        """What further candidates may bring, (W, KEEP + AHEAD)."""
        return trial.draws[p](rng, WORLDS * (KEEP + AHEAD))[0].reshape(WORLDS, KEEP + AHEAD)


class Informed(Optimum):
    """As the optimum, but it knows only which distributions there are, not which prompt has which.

    It infers that from the scores, by Bayes' rule, so that it shows what can be learnt from them.
    """

    def __init__(self) -> None:
        self.log_likelihood = np.zeros((POOL, POOL))
        """Log-likelihood of each prompt's rewards in earlier iterations, under each distribution of the pool."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        if r == 0:
            rng = np.random.default_rng([seed, 1])
            self.bank = np.stack([draw(rng, 16 * WORLDS * (KEEP + AHEAD))[0] for draw in trial.pool])
            self.log_chance = _log_chance(self.bank)
            self.bank = self.bank.reshape(len(trial.pool), 16 * WORLDS, -1)
        return super().round(trial, r, seed)

    def _drawn(self, trial: Trial, p: int, count: int, rng: np.random.Generator) -> Array:
        known = self.log_likelihood[trial.ids[p], : len(self.bank)]
        log = known + self.log_chance @ _histogram(trial.scored(p, count))
        share = np.exp(log - log.max())
        kinds = rng.choice(len(share), 4 * WORLDS, p=share / share.sum())
        return np.asarray(self.bank[kinds, rng.integers(self.bank.shape[1], size=4 * WORLDS)])

    def end(self, trial: Trial) -> None:
        for id, (rewards, _) in _learnable(trial).items():
            self.log_likelihood[id, : len(self.bank)] += self.log_chance @ _histogram(rewards)


class Told(Planner):
    """The planner's rule and its late scores, but not its beliefs: it knows which distributions there are.

    Args:
        pool: the distributions of an iteration.
    """

    def __init__(self, pool: Callable[[int], Sequence[Draw]]) -> None:
        super().__init__()
        self.pool = pool
        self.log_likelihood: dict[int, Array] = {}
        """Log-likelihood of each prompt's rewards in earlier iterations, under each distribution of the pool."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        if r == 0:
            rng = np.random.default_rng([seed, 1])
            rewards_KL = np.stack([draw(rng, 8000)[0] for draw in self.pool(trial.iteration)])
            self.log_chance = _log_chance(rewards_KL)
            node_KL = np.rint(rewards_KL * (len(GRID_N) - 1)).astype(np.int64)
            self.chance_KN = np.stack([np.bincount(node_L, minlength=len(GRID_N)) for node_L in node_KL]) / 8000
        with mock.patch.object(bandit, "posterior", self._posterior):
            return super().round(trial, r, seed)

    def _posterior(self, arms: Sequence[Arm], beliefs: Beliefs, iteration: int) -> tuple[Array, Array]:
        log_PK = np.stack(
            [self.log_likelihood.get(arm.prompt, 0) + self.log_chance @ _histogram(arm.rewards) for arm in arms]
        )
        shares_PK = np.exp(log_PK - log_PK.max(axis=1, keepdims=True))
        chance_PKN = np.broadcast_to(self.chance_KN, (len(arms), *self.chance_KN.shape))
        return chance_PKN, shares_PK / shares_PK.sum(axis=1, keepdims=True)

    def end(self, trial: Trial) -> None:
        super().end(trial)
        for id, (rewards, _) in _learnable(trial).items():
            self.log_likelihood[id] = self.log_likelihood.get(id, 0) + self.log_chance @ _histogram(rewards)


def _log_chance(rewards_KL: Array) -> Array:
    """Log-probability of each hundredth that a reward may be, under each of these distributions."""
    log_KN = np.log(np.stack([_histogram(rewards) for rewards in rewards_KL]) + 0.5)
    return np.asarray(log_KN - np.log(rewards_KL.shape[1] + 0.5 * log_KN.shape[1]))


def _histogram(rewards: ArrayLike) -> Array:
    return np.bincount(np.rint(np.asarray(rewards) * 100).astype(np.int64), minlength=101).astype(float)


def _learnable(trial: Trial) -> dict[int, tuple[list[float], list[tuple[float, float]]]]:
    """{prompt: (rewards of seeds that were not chosen for them, pairs of explored and regenerated rewards)}"""
    found = {}
    for p, (id, (explored, regenerated, count)) in enumerate(zip(trial.ids, trial.kept(), strict=True)):
        rewards = [*trial.scored(p, count), *(regenerated[count:] if count < KEEP else ())]
        found[id] = rewards, list(zip(explored[:count], regenerated[:count], strict=True)) if count else []
    return found


def _gain(scored: Array, drawn_WL: Array) -> float:
    """Mean gain in kept variance by the last chunk of those drawn."""
    missing = max(KEEP - len(scored), drawn_WL.shape[1] - CHUNK)
    if missing >= drawn_WL.shape[1]:
        return 1.0
    return _variance(scored, drawn_WL) - _variance(scored, drawn_WL[:, :missing])


def _variance(scored: Array, drawn_WL: Array) -> float:
    """Variance of the kept subset, averaged over worlds; the subset is the lowest and the highest rewards."""
    rows = np.sort(np.concatenate([np.broadcast_to(scored, (len(drawn_WL), len(scored))), drawn_WL], axis=1), axis=1)
    low = np.arange(KEEP + 1)
    high = rows.shape[1] - KEEP + low

    def means(rows: Array) -> Array:
        sums = np.concatenate([np.zeros((len(rows), 1)), rows.cumsum(axis=1)], axis=1)
        return np.asarray((sums[:, low] + sums[:, -1:] - sums[:, high]) / KEEP)

    return float((means(rows**2) - means(rows) ** 2).max(axis=1).mean())


POLICIES: Mapping[str, Callable[[], Equal]] = {
    "none": Unexplored,
    "equal": Equal,
    "epsilon-greedy": EpsilonGreedy,
    "planner": Planner,
    "informed": Informed,
    "optimum": Optimum,
}


def epoch(prompts: int) -> int:
    """Iterations in which so many prompts are each met once; those that fill no iteration are not met."""
    return prompts // PROMPTS


def explore(scenario: Scenario, policy: Equal, rounds: int, seed: int) -> tuple[list[float], int]:
    """Mean kept variance of each iteration, and candidates tried in all."""
    variances, candidates = [], 0
    for k in range(ITERATIONS):
        draws = scenario(k, seed)
        first = k % epoch(len(draws)) * PROMPTS
        ids = range(first, first + PROMPTS)
        rng = np.random.default_rng([seed, k])
        rewards = np.stack([draws[id](rng, PROMPTS * SEEDS_TRIED + KEEP) for id in ids], axis=1)
        trial = Trial(
            iteration=k,
            ids=ids,
            draws=[draws[id] for id in ids],
            pool=draws,
            rewards_PL=(rewards[0], rewards[1]),
            rounds=rounds,
        )
        for r in range(rounds):
            trial.given.append(policy.round(trial, r, seed * ITERATIONS + k))
        policy.end(trial)
        variances.append(statistics.fmean(float(np.var(regenerated)) for _, regenerated, _ in trial.kept()))
        candidates += sum(trial.tried(rounds))
    return variances, candidates
