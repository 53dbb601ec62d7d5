"""What exploration gets for its GPU seconds: equal shares, epsilon-greedy, the planner, and two that know more.

Nothing is drawn here but numbers: prompts' rewards come from synthetic models, or are those that the embedded job gave
(``benchmarks/data/planner.jsonl``, written by ``--record``). Every policy sees the same candidates. The optimum knows
each prompt's true distribution and sees every score at once; the informed sees every score at once and knows the
distributions, but not which prompt has which; the others see the scores of rounds up to r - 2, as in the graph. What
counts is the variance of the *regenerated* rewards of the kept seeds. ``python -m benchmarks.planner`` prints a table
in Markdown; with ``--explore-steps``, what candidates of fewer denoising steps say of the regenerated ones; with
``--told``, what the planner's rule gets if it is told which distributions there are.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spotlight.plan import bandit
from spotlight.plan.bandit import allocate, equal_shares, rank_correlation
from spotlight.plan.beliefs import GRID_N, Arm, Beliefs, learn
from spotlight.plan.subset import max_variance_subset

Array = NDArray[np.float64]
Chunks = list[tuple[int, int, int]]
"""(prompt, first candidate, number of candidates) each."""
Draw = Callable[[np.random.Generator, int], Array]
"""A prompt's distribution: n candidates' (explored, regenerated) rewards, shape (2, n)."""
Scenario = Callable[[int, int], list[Draw]]
"""The prompts' distributions, given the iteration and a seed; a prompt keeps its place."""

RECORDED = Path(__file__).with_name("data") / "planner.jsonl"
EXPLORE_STEPS = RECORDED.with_name("explore_steps.jsonl")
SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
PROMPTS, POOL, ITERATIONS = 16, 48, 12
"""Prompts of an iteration and of the whole run: each is met four times, three iterations apart."""
KEEP, CHUNK, SEEDS_TRIED = 8, 8, 32
PARTS = (slice(None), slice(POOL // PROMPTS), slice(POOL // PROMPTS, None))
"""Iterations: all, those in which prompts are met for the first time, and later ones."""
CANDIDATE_S = 0.003
"""GPU seconds of one candidate: the embedded model's share of a batch of 512 on one core (docs/results.md)."""
EPSILON = 0.2
WORLDS, AHEAD = 64, 3 * CHUNK
"""In which the optimum weighs a chunk, and the candidates that it looks ahead."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One iteration's exploration by one policy."""

    iteration: int
    ids: Sequence[int]
    draws: Sequence[Draw]
    pool: Sequence[Draw]
    """All prompts', of this iteration or not."""
    rewards_PL: tuple[Array, Array]
    """Explored and regenerated rewards of each prompt's candidates, tried or not."""
    rounds: int
    given: list[Chunks] = field(default_factory=list)
    """Of each round so far."""

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
    """The product's."""

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

    That it works out from the scores, by Bayes' rule, so that it shows what can be learnt from them.
    """

    def __init__(self) -> None:
        self.log_likelihood = np.zeros((POOL, POOL))
        """Of each prompt's rewards in the iterations before, were it each of the pool."""

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
        """Of each prompt's rewards in the iterations before, were it each of the pool."""

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
    """Of each hundredth that a reward may be, were it from each of these distributions."""
    log_KN = np.log(np.stack([_histogram(rewards) for rewards in rewards_KL]) + 0.5)
    return np.asarray(log_KN - np.log(rewards_KL.shape[1] + 0.5 * log_KN.shape[1]))


def _histogram(rewards: ArrayLike) -> Array:
    return np.bincount(np.rint(np.asarray(rewards) * 100).astype(np.int64), minlength=101).astype(float)


def _learnable(trial: Trial) -> dict[int, tuple[list[float], list[tuple[float, float]]]]:
    """Of each prompt: rewards of seeds that were not chosen for them, and pairs of explored and regenerated ones."""
    found = {}
    for p, (id, (explored, regenerated, count)) in enumerate(zip(trial.ids, trial.kept(), strict=True)):
        rewards = [*trial.scored(p, count), *(regenerated[count:] if count < KEEP else ())]
        found[id] = rewards, list(zip(explored[:count], regenerated[:count], strict=True)) if count else []
    return found


def _gain(scored: Array, drawn_WL: Array) -> float:
    """Of the last chunk of those drawn, on average."""
    missing = max(KEEP - len(scored), drawn_WL.shape[1] - CHUNK)
    if missing >= drawn_WL.shape[1]:
        return 1.0
    return _variance(scored, drawn_WL) - _variance(scored, drawn_WL[:, :missing])


def _variance(scored: Array, drawn_WL: Array) -> float:
    """The kept subset's, averaged over worlds; straight from the rule that it is the lowest and the highest."""
    rows = np.sort(np.concatenate([np.broadcast_to(scored, (len(drawn_WL), len(scored))), drawn_WL], axis=1), axis=1)
    low = np.arange(KEEP + 1)
    high = rows.shape[1] - KEEP + low

    def means(rows: Array) -> Array:
        sums = np.concatenate([np.zeros((len(rows), 1)), rows.cumsum(axis=1)], axis=1)
        return np.asarray((sums[:, low] + sums[:, -1:] - sums[:, high]) / KEEP)

    return float((means(rows**2) - means(rows) ** 2).max(axis=1).mean())


def coin(p: float) -> Draw:
    return lambda rng, n: np.tile((rng.random(n) < p).astype(float), (2, 1))


def bell(mean: float, std: float) -> Draw:
    return lambda rng, n: np.tile(np.clip(rng.normal(mean, std, n), 0, 1), (2, 1))


def either(share: float, first: Draw, second: Draw) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, first(rng, n), second(rng, n))


def faded(draw: Draw, fidelity: float) -> Draw:
    """Regenerated, a reward is what it was as often as ``fidelity`` says, else a new one."""

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
TOLD = (
    "coins of Beta(0.3, 0.3)",
    "bells, std 0.02 to 0.25",
    "mixtures of two bells",
    "drifting coins",
    "coins, fidelity 0.7",
)
LIKE_THEM = 6
"""Other runs, whose distributions the rule is told of instead of this one's."""
POLICIES: Mapping[str, Callable[[], Equal]] = {
    "none": Unexplored,
    "equal": Equal,
    "epsilon-greedy": EpsilonGreedy,
    "planner": Planner,
    "informed": Informed,
    "optimum": Optimum,
}


def explore(scenario: Scenario, policy: Equal, rounds: int, seed: int) -> tuple[list[float], int]:
    """Mean kept variance of each iteration, and candidates tried in all."""
    variances, candidates = [], 0
    for k in range(ITERATIONS):
        draws = scenario(k, seed)
        per_epoch = len(draws) // PROMPTS
        ids = range(k % per_epoch * PROMPTS, (k % per_epoch + 1) * PROMPTS)
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


def record(out: Path, versions: Sequence[int], steps: Sequence[int], prompts: int, seeds: int) -> None:
    """Train the embedded job in this process, and write what each version in turn gives for the same seeds.

    Args:
        steps: denoising steps; each number of them is a row of its own.
    """
    from graphs.iteration import Graph, candidates_for
    from graphs.loop import Loop, synchronous
    from graphs.tasks import RunContext, candidate_seed
    from spotlight import config
    from spotlight.device.engine import InProcess
    from spotlight.device.protocol import install
    from spotlight.records import Scored, WeightsRef
    from spotlight.rl.prompts import read_prompts
    from spotlight.store.rundir import RunDir

    def save(context: RunContext, weights: WeightsRef) -> None:
        engine = device.engine(str(run.path))
        for prompt, count in product(read_prompts(settings.data.train_prompts)[:prompts], steps):
            template = candidates_for(settings, context, weights.version, [prompt], weights).template
            sigmas = engine.model.sigmas(count, template.height_px, template.width_px)
            tried = tuple(candidate_seed(settings.run.seed, 0, prompt, index) for index in range(seeds))
            request = replace(template, prompt=prompt, seeds=tried, sigmas=sigmas)
            engine.rollout(request)
            scored = engine.score(request)
            assert isinstance(scored, Scored)
            row = {"version": weights.version, "steps": count, "prompt": prompt.id, "rewards": scored.rewards}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def compute(graph: Graph) -> Mapping[str, Any]:
        results = synchronous(graph)
        if "context" in results:
            known.append(results["context"])
        reached: WeightsRef | None = results["context"].start if "context" in results else None
        if "published" in results:
            reached = results["published"].weights
        if reached and reached.version in versions:
            save(known[0], reached)
        return results

    class NoWatch:
        def begin(self, phase: str, iteration: int) -> None:
            print(phase, iteration, file=sys.stderr, flush=True)

        def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
            return {}

        def balance(self, iteration: int, began_s: float, window_s: float) -> None: ...

    known: list[RunContext] = []
    device = InProcess()
    install(device)
    with tempfile.TemporaryDirectory() as directory, out.open("w") as file:
        overrides = [f"run.dir={directory}", f"run.iterations={max(versions)}", "run.validate_every=1000"]
        settings = config.load(SETTINGS, [*overrides, "strategy.exploration=off"])
        run = RunDir.create(settings, time.time())
        Loop(run, compute, NoWatch()).go()


def table(rounds: int, seeds: int, only: str) -> None:
    """Print one row per scenario."""
    names = [*POLICIES][1:]
    shares = "share of the optimum's gain: all, first, later | of the informed's: all, first, later"
    print(f"| scenario, {rounds} rounds | {' | '.join(names)} | {shares} |")
    print("|---" * (len(names) + 3) + "|")
    for name, scenario in SCENARIOS.items():
        if only not in name:
            continue
        found = {policy: _measure(scenario, make, rounds, seeds) for policy, make in POLICIES.items()}
        cells = " | ".join(_cell(found, policy) for policy in names)
        of_optimum, of_informed = (_shares(found, of, PARTS) for of in ("optimum", "informed"))
        print(f"| {name} | {cells} | {of_optimum} | {of_informed} |", flush=True)


def told_table(rounds: int, seeds: int, only: str) -> None:
    """Print the share of the informed's gain that the planner gets, and its rule if it is told more."""
    print("| rewards | planner: all, first, later | told these distributions | told of others like them |")
    print("|---" * 4 + "|")
    for name in TOLD:
        if only not in name:
            continue
        scenario, found = SCENARIOS[name], {}
        for policy in ("none", "equal", "informed", "planner"):
            found[policy] = _measure(scenario, POLICIES[policy], rounds, seeds)
        cells = [_shares(found, "informed", PARTS)]
        for others in (0, LIKE_THEM):
            runs = [explore(scenario, Told(_pool(scenario, seed, others)), rounds, seed)[0] for seed in range(seeds)]
            cells.append(_shares(found | {"planner": (np.array(runs), np.zeros(seeds))}, "informed", PARTS))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _pool(scenario: Scenario, seed: int, others: int) -> Callable[[int], Sequence[Draw]]:
    """A run's own distributions; or those of so many other runs."""
    seeds = [1000 + 100 * seed + other for other in range(others)] or [seed]
    return lambda k: [draw for each in seeds for draw in scenario(k, each)]


def _measure(scenario: Scenario, make: Callable[[], Equal], rounds: int, seeds: int) -> tuple[Array, Array]:
    """Kept variance (seeds, iterations), and candidates tried (seeds,)."""
    runs = [explore(scenario, make(), rounds, seed) for seed in range(seeds)]
    return np.array([variances for variances, _ in runs]), np.array([float(candidates) for _, candidates in runs])


def _cell(found: Mapping[str, tuple[Array, Array]], policy: str) -> str:
    """Kept variance; against equal shares, with the spread over seeds; gain over no exploration per GPU second."""
    (variances, candidates), equal = found[policy], found["equal"][0].mean(axis=1)
    gained = (variances.mean() - found["none"][0].mean()) * variances[0].size * PROMPTS
    per_s = f"{gained / (candidates.mean() * CANDIDATE_S):.2f}/s" if candidates.any() else "-"
    if policy == "equal":
        return f"{variances.mean():.4f}, {per_s}"
    over = 100 * (variances.mean(axis=1) / equal - 1)
    return f"{variances.mean():.4f}, {over.mean():+.1f} % ({over.min():+.1f} to {over.max():+.1f}), {per_s}"


def _shares(found: Mapping[str, tuple[Array, Array]], of: str, parts: Sequence[slice]) -> str:
    """The planner's share of another's gain over equal shares in parts of the run, where that is more than 2 %."""
    shares = []
    for part in parts:
        equal, planner, best = (found[policy][0][:, part].mean() for policy in ("equal", "planner", of))
        shares.append(f"{(planner - equal) / (best - equal):.2f}" if best > 1.02 * equal else "-")
    return ", ".join(shares)


def steps_table(rollout_steps: Sequence[int] = (8, 16)) -> None:
    """Print what fewer explore steps cost in fidelity, with weights one version old and, below, with the same ones."""
    rows = [json.loads(line) for line in EXPLORE_STEPS.read_text().splitlines()]
    rewards = {(row["version"], row["steps"], row["prompt"]): np.array(row["rewards"]) for row in rows}
    versions, steps, prompts = ({row[name] for row in rows} for name in ("version", "steps", "prompt"))
    print("| versions | steps | " + " | ".join(f"explored with {count}" for count in sorted(steps)) + " |")
    print("|---" * (len(steps) + 2) + "|")
    for age, version, regenerated in product((1, 0), sorted(versions), rollout_steps):
        if not {version - 1, version} <= versions:
            continue
        after = [rewards[version, regenerated, prompt] for prompt in sorted(prompts)]
        cells = (
            _steps_cell([rewards[version - age, explored, prompt] for prompt in sorted(prompts)], after)
            for explored in sorted(steps)
        )
        print(f"| {version - age}, {version} | {regenerated} | {' | '.join(cells)} |")


def _steps_cell(explored: Sequence[Array], regenerated: Sequence[Array]) -> str:
    """Rank correlation within prompts, and the share of the gain in variance that choosing by explored rewards gets.

    The whole is the gain of choosing by the regenerated rewards themselves, over keeping seeds unseen, whose variance
    is the candidates' own but for a factor.
    """
    unseen = [float(np.var(after, ddof=1)) * (KEEP - 1) / KEEP for after in regenerated]
    gained, best = (
        sum(float(np.var(after[max_variance_subset(by, KEEP)])) for by, after in zip(chosen, regenerated, strict=True))
        - sum(unseen)
        for chosen in (explored, regenerated)
    )
    correlations = [rank_correlation(*pair) for pair in zip(explored, regenerated, strict=True)]
    return f"{statistics.fmean(each for each in correlations if each is not None):.2f}, {gained / best:.2f}"


def coin_bound(seen: int, a: float = 0.3) -> float:
    """About the most of the optimum's gain over equal shares that *any* planner can get, with ``seen`` rewards each.

    For coins of Beta(a, a), that prior known and every score seen at once. By Lagrange's relaxation: each prompt pays a
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
    """Expected variance kept of a coin less what its chunks cost, at each price, if each stop is the best one."""
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
    """Variance of the kept among so many ones and zeros."""
    ones = min(heads, max(KEEP - tails, KEEP // 2))
    return ones * (KEEP - ones) / KEEP**2


def _heads(alpha: float, beta: float, n: int) -> Array:
    """Chance of 0 to n heads of a coin of Beta(alpha, beta)."""
    up, down, all_ = (np.cumprod(np.append(1.0, x + np.arange(n))) for x in (alpha, beta, alpha + beta))
    return np.array([math.comb(n, heads) for heads in range(n + 1)]) * up * down[::-1] / all_[-1]


def speed(prompts: int = 32, chunks: int = 16) -> float:
    """Median CPU seconds of one round's allocation for so many prompts and chunks each, half of them scored."""
    rng = np.random.default_rng(0)
    scored = chunks // 2 * CHUNK
    arms = [
        Arm(prompt=p, rewards=tuple((rng.random(scored) < p / prompts).astype(float)), tried=scored)
        for p in range(prompts)
    ]
    seconds = []
    for seed in range(9):
        started_s = time.process_time()
        allocate(
            arms,
            Beliefs(),
            iteration=0,
            slots=prompts,
            later=prompts * (chunks // 2 - 1),
            candidates=prompts * scored,
            chunk=CHUNK,
            keep=KEEP,
            seed=seed,
        )
        seconds.append(time.process_time() - started_s)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="the scenarios whose name has this in it")
    parser.add_argument("--record", action="store_true", help="write the embedded job's rewards anew: minutes")
    parser.add_argument("--explore-steps", action="store_true", help="instead: what fewer explore steps cost")
    parser.add_argument(
        "--bound", action="store_true", help="instead: about the most that any planner can get of coins"
    )
    parser.add_argument("--told", action="store_true", help="instead: the planner's rule, if it is told more")
    arguments = parser.parse_args()
    if arguments.record and arguments.explore_steps:
        record(EXPLORE_STEPS, (0, 1, 12, 13, 24, 25), steps=(2, 3, 4, 6, 8, 16), prompts=12, seeds=32)
    elif arguments.record:
        record(RECORDED, (0, 1, 12, 13, 40, 41), steps=(8,), prompts=40, seeds=96)
    elif arguments.bound:
        for seen in (0, 16, 32, 64, 96):
            print(f"coins with {seen} rewards seen: about {coin_bound(seen):.2f} of the optimum's gain", flush=True)
    elif arguments.explore_steps:
        steps_table()
    elif arguments.told:
        told_table(arguments.rounds, arguments.seeds, arguments.only)
    else:
        table(arguments.rounds, arguments.seeds, arguments.only)
        seconds = ", ".join(f"{prompts} prompts {1000 * speed(prompts):.0f}" for prompts in (32, 1024))
        print(f"\nallocate, 16 chunks a prompt, CPU ms (median of 9): {seconds}")


if __name__ == "__main__":
    main()
