"""What exploration gains for its GPU seconds: equal shares, epsilon-greedy, the planner, and two that know more.

Rewards are those of `benchmarks.bandits.rewards`, policies those of `benchmarks.bandits.policies`. What counts is the
variance of the *regenerated* rewards of the kept seeds. ``python -m benchmarks.planner`` prints a table in Markdown;
with ``--explore-steps``, how well candidates of fewer denoising steps predict the regenerated ones; with ``--told``,
what the planner's rule gains if it knows which distributions there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import NoWatch, at_least
from benchmarks.bandits.bound import coin_bound
from benchmarks.bandits.policies import CHUNK, KEEP, POLICIES, PROMPTS, Equal, Told, epoch, explore
from benchmarks.bandits.rewards import RECORDED, SCENARIOS, Array, Draw, Scenario
from spotlight.plan.bandit import allocate, rank_correlation
from spotlight.plan.beliefs import Arm, Beliefs
from spotlight.plan.subset import max_variance_subset

EXPLORE_STEPS = RECORDED.with_name("explore_steps.jsonl")
SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
CANDIDATE_S = 0.003
"""GPU seconds of one candidate: the embedded model's share of a batch of 512 on one core (docs/results/speed.md)."""
TOLD = (
    "coins of Beta(0.3, 0.3)",
    "bells, std 0.02 to 0.25",
    "mixtures of two bells",
    "drifting coins",
    "coins, fidelity 0.7",
)
LIKE_THEM = 6
"""Number of other runs whose distributions the rule knows instead of this one's."""


def record(out: Path, versions: Sequence[int], steps: Sequence[int], prompts: int, seeds: int) -> None:
    """Train the embedded job in this process, and write each version's rewards for the same seeds.

    Args:
        steps: denoising steps; each number of them is a row of its own.
    """
    from graphs.layers import Graph
    from graphs.loop import Loop, synchronous
    from graphs.requests import candidates_for
    from graphs.tasks.context import RunContext
    from graphs.tasks.seeds import candidate_seed
    from spotlight import config
    from spotlight.device.engine import InProcess
    from spotlight.device.protocol import install
    from spotlight.records import Scored, WeightsRef
    from spotlight.rl.prompts import read_prompts
    from spotlight.store.creating import create_run

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

    class Telling(NoWatch):
        def begin(self, phase: str, iteration: int) -> None:
            print(phase, iteration, file=sys.stderr, flush=True)

    known: list[RunContext] = []
    device = InProcess()
    install(device)
    made = out.with_suffix(".part")
    with tempfile.TemporaryDirectory() as directory, made.open("w") as file:
        overrides = [f"run.dir={directory}", f"run.iterations={max(versions)}", "run.validate_every=1000"]
        settings = config.load(SETTINGS, [*overrides, "strategy.exploration=off"])
        run = create_run(settings, time.time())
        Loop(run, compute, Telling()).go()
    made.replace(out)  # only now: what was recorded before is kept until all is there


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
        of_optimum, of_informed = (_shares(found, of, parts(scenario)) for of in ("optimum", "informed"))
        print(f"| {name} | {cells} | {of_optimum} | {of_informed} |", flush=True)


def told_table(rounds: int, seeds: int, only: str) -> None:
    """Print the share of the informed policy's gain that the planner gets, and its rule if it knows more."""
    print("| rewards | planner: all, first, later | told these distributions | told of others like them |")
    print("|---" * 4 + "|")
    for name in TOLD:
        if only not in name:
            continue
        scenario, found = SCENARIOS[name], {}
        for policy in ("none", "equal", "informed", "planner"):
            found[policy] = _measure(scenario, POLICIES[policy], rounds, seeds)
        cells = [_shares(found, "informed", parts(scenario))]
        for others in (0, LIKE_THEM):
            runs = [explore(scenario, Told(_pool(scenario, seed, others)), rounds, seed)[0] for seed in range(seeds)]
            told = found | {"planner": (np.array(runs), np.zeros(seeds))}
            cells.append(_shares(told, "informed", parts(scenario)))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _pool(scenario: Scenario, seed: int, others: int) -> Callable[[int], Sequence[Draw]]:
    """A run's own distributions, or those of ``others`` other runs."""
    seeds = [1000 + 100 * seed + other for other in range(others)] or [seed]
    return lambda k: [draw for each in seeds for draw in scenario(k, each)]


def parts(scenario: Scenario) -> tuple[slice, slice, slice]:
    """Iterations: all, those in which prompts are met for the first time, and later ones."""
    first = epoch(len(scenario(0, 0)))
    return slice(None), slice(first), slice(first, None)


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
    """Print what fewer exploration steps cost in fidelity, with weights one version old and, below, with the same
    weights."""
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
    parser.add_argument("--rounds", type=at_least(1), default=16)
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--record", action="store_true", help="record the embedded job's rewards anew (takes minutes)")
    parser.add_argument("--explore-steps", action="store_true", help="instead: what fewer exploration steps cost")
    parser.add_argument(
        "--bound", action="store_true", help="instead: about the most that any planner can gain with coins"
    )
    parser.add_argument("--told", action="store_true", help="instead: the planner's rule, if it knows more")
    arguments = parser.parse_args()
    names = TOLD if arguments.told else tuple(SCENARIOS)
    if not any(arguments.only in name for name in names):
        parser.error(f"--only: no scenario's name contains {arguments.only!r}: {', '.join(names)}")
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
