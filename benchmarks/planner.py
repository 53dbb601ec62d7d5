"""What exploration gets for its GPU seconds: equal shares, epsilon-greedy, the planner and a clairvoyant optimum.

Nothing is drawn here but numbers: prompts' rewards come from synthetic models, or are those that the embedded job gave
(``benchmarks/data/planner.jsonl``, written by ``--record``). Every policy sees the same candidates. The optimum knows
each prompt's true distribution and sees every score at once, the others see those of rounds up to r - 2, as in the
graph. What counts is the variance of the *regenerated* rewards of the kept seeds. ``python -m benchmarks.planner``
prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.explore import Arm, Beliefs, allocate, equal_shares, learn, max_variance_subset

Array = NDArray[np.float64]
Chunks = list[tuple[int, int, int]]
"""(prompt, first candidate, number of candidates) each."""
Draw = Callable[[np.random.Generator, int], Array]
"""A prompt's distribution: n candidates' (explored, regenerated) rewards, shape (2, n)."""
Scenario = Callable[[int, int], list[Draw]]
"""The prompts' distributions, given the iteration and a seed; a prompt keeps its place."""

RECORDED = Path(__file__).with_name("data") / "planner.jsonl"
SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
PROMPTS, POOL, ITERATIONS = 16, 48, 12
"""Prompts of an iteration and of the whole run: each is met four times, three iterations apart."""
KEEP, CHUNK, SEEDS_TRIED = 8, 8, 32
CANDIDATE_S = 0.003
"""GPU seconds of one candidate: the embedded model's share of a batch of 512 on one core (RESULTS.md)."""
EPSILON = 0.2
WORLDS = 64
"""In which the optimum weighs a chunk."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One iteration's exploration by one policy."""

    iteration: int
    ids: Sequence[int]
    draws: Sequence[Draw]
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
        rewards, pairs = {}, {}
        for p, (id, (explored, regenerated, count)) in enumerate(zip(trial.ids, trial.kept(), strict=True)):
            rewards[id] = [*trial.scored(p, count), *(regenerated[count:] if count < KEEP else ())]
            pairs[id] = list(zip(explored[:count], regenerated[:count], strict=True)) if count else []
        self.beliefs = learn(self.beliefs, trial.iteration, rewards, pairs)


class Optimum(Equal):
    """Chunk by chunk, with every score so far, where the true distribution promises most."""

    def round(self, trial: Trial, r: int, seed: int) -> Chunks:
        if r:
            return []
        rng = np.random.default_rng(seed)
        tried = [0] * len(trial.ids)
        ahead = 3 * CHUNK
        promise = [self._promise(trial, p, 0, rng, ahead) for p in range(len(tried))]
        chunks: Chunks = []
        for _ in range(sum(trial.slots(index) for index in range(trial.rounds))):
            best = int(np.argmax(promise))
            chunks.append((best, tried[best], CHUNK))
            tried[best] += CHUNK
            promise[best] = self._promise(trial, best, tried[best], rng, ahead)
        return chunks

    def _promise(self, trial: Trial, p: int, count: int, rng: np.random.Generator, ahead: int) -> float:
        """Most gain per chunk over the next one to three."""
        drawn = trial.draws[p](rng, WORLDS * (KEEP + ahead))[0].reshape(WORLDS, KEEP + ahead)
        scored = trial.scored(p, count)
        missing = max(0, KEEP - count)
        before = _variance(scored, drawn[:, :missing])
        sizes = range(CHUNK, ahead + 1, CHUNK)
        return max((_variance(scored, drawn[:, : max(size, missing)]) - before) * CHUNK / size for size in sizes)


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


def either(share: float, one: Draw, other: Draw) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, one(rng, n), other(rng, n))


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
POLICIES: Mapping[str, Callable[[], Equal]] = {
    "none": Unexplored,
    "equal": Equal,
    "epsilon-greedy": EpsilonGreedy,
    "planner": Planner,
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
            iteration=k, ids=ids, draws=[draws[id] for id in ids], rewards_PL=(rewards[0], rewards[1]), rounds=rounds
        )
        for r in range(rounds):
            trial.given.append(policy.round(trial, r, seed * ITERATIONS + k))
        policy.end(trial)
        variances.append(statistics.fmean(float(np.var(regenerated)) for _, regenerated, _ in trial.kept()))
        candidates += sum(trial.tried(rounds))
    return variances, candidates


def record(out: Path, versions: Sequence[int], prompts: int, seeds: int) -> None:
    """Train the embedded job in this process, and write what each version in turn gives for the same seeds."""
    from graphs.iteration import Graph, candidates_for
    from graphs.loop import Loop, synchronous
    from graphs.tasks import Setting, candidate_seed
    from spotlight import config
    from spotlight.data import read_prompts
    from spotlight.engine import engine_of
    from spotlight.records import WeightsRef
    from spotlight.rundir import RunDir

    def save(setting: Setting, weights: WeightsRef) -> None:
        engine = engine_of(str(run.path))
        for prompt in read_prompts(settings.data.train_prompts)[:prompts]:
            template = candidates_for(settings, setting, weights.version, [prompt], weights).template
            tried = tuple(candidate_seed(settings.run.seed, 0, prompt, index) for index in range(seeds))
            request = replace(template, prompt=prompt, seeds=tried)
            engine.rollout(request)
            row = {"version": weights.version, "prompt": prompt.id, "rewards": engine.score(request).rewards}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def compute(graph: Graph) -> Mapping[str, Any]:
        results = synchronous(graph)
        if "setting" in results:
            known.append(results["setting"])
        reached: WeightsRef | None = results["setting"].start if "setting" in results else None
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

    known: list[Setting] = []
    with tempfile.TemporaryDirectory() as directory, out.open("w") as file:
        overrides = [f"run.dir={directory}", f"run.iterations={max(versions)}", "run.validate_every=1000"]
        settings = config.load(SETTINGS, [*overrides, "strategy.exploration=off"])
        run = RunDir.create(settings, time.time())
        Loop(run, compute, NoWatch()).go()


def table(rounds: int, seeds: int, only: str) -> None:
    """Print one row per scenario."""
    names = [*POLICIES][1:]
    print(f"| scenario, {rounds} rounds | {' | '.join(names)} | share of the optimum's gain: all, first, later |")
    print("|---" * (len(names) + 2) + "|")
    for name, scenario in SCENARIOS.items():
        if only not in name:
            continue
        found = {policy: _measure(scenario, make, rounds, seeds) for policy, make in POLICIES.items()}
        cells = " | ".join(_cell(found, policy) for policy in names)
        print(f"| {name} | {cells} | {', '.join(_shares(found))} |", flush=True)


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


def _shares(found: Mapping[str, tuple[Array, Array]]) -> list[str]:
    """The planner's share of the optimum's gain over equal shares, where that is more than 2 %."""
    met_first = POOL // PROMPTS
    shares = []
    for part in (slice(None), slice(met_first), slice(met_first, None)):
        equal, planner, optimum = (found[policy][0][:, part].mean() for policy in ("equal", "planner", "optimum"))
        differs = optimum > 1.02 * equal
        shares.append(f"{(planner - equal) / (optimum - equal):.2f}" if differs else "-")
    return shares


def speed(prompts: int = 32, chunks: int = 16) -> float:
    """Median seconds of one round's allocation for so many prompts and chunks each, half of them scored."""
    rng = np.random.default_rng(0)
    scored = chunks // 2 * CHUNK
    arms = [
        Arm(prompt=p, rewards=tuple((rng.random(scored) < p / prompts).astype(float)), tried=scored)
        for p in range(prompts)
    ]
    seconds = []
    for seed in range(9):
        started_s = time.perf_counter()
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
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="the scenarios whose name has this in it")
    parser.add_argument("--record", action="store_true", help="write the embedded job's rewards anew: minutes")
    arguments = parser.parse_args()
    if arguments.record:
        record(RECORDED, (0, 1, 12, 13, 40, 41), prompts=40, seeds=96)
    else:
        table(arguments.rounds, arguments.seeds, arguments.only)
        print(f"\nallocate, 32 prompts x 16 chunks: {1000 * speed():.0f} ms (median of 9)")


if __name__ == "__main__":
    main()
