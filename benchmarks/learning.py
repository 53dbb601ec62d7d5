"""How steadily and how fast the demo's recipe learns, and what explored seeds save: whole runs on the virtual clock.

The embedded model really learns; time is that of the virtual clock, so a busy machine changes nothing, and a row can be
made again bit for bit. The raw data has a line per run; recorded runs, if as long or longer, are not run again.
``python -m benchmarks.learning`` runs what is missing (hours on one core) and prints tables in Markdown;
``--smoke`` makes two runs of two iterations in some ten seconds, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import at_least
from spotlight import config
from spotlight.simulation import Simulation

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "ocr-tiny.toml"
DATA = ROOT / "benchmarks" / "data" / "learning.jsonl"
VALIDATION = ["run.validation_seeds=12"]
"""Seeds of each of the 20 held-out prompts: 240 images, whose mean has a standard error of some 0.02."""
TARGET, IN_A_ROW = 0.9, 2

BEFORE = ["train.old_decay=copy", "train.nft_beta=1.0", "train.levels=uniform", "train.timesteps=8"]
RECIPES: dict[str, list[str]] = {
    "the demo's": [],
    "uniform levels": ["train.levels=uniform"],
    "decay 0.8": ["train.old_decay=0.8"],
    "copy, beta 1, uniform levels": BEFORE,
    "copy, beta 1, 2e-4, uniform levels": [*BEFORE, "train.learning_rate=2e-4"],
}
"""The fourth is the demo's recipe before there was an old policy."""
VARIANTS: dict[str, list[str]] = {
    "as the demo": [],
    "not explored": ["strategy.exploration=off"],
    "8 prompts x 32, stale": ["exploration.budget=fixed"],
    "16 prompts x 16, stale, 6 steps": [
        "exploration.budget=fixed",
        "exploration.prompts=16",
        "exploration.seeds_tried=16",
        "exploration.steps=6",
    ],
    "16 prompts x 16, current weights": [
        "strategy.exploration=blocking",
        "exploration.budget=fixed",
        "exploration.prompts=16",
        "exploration.seeds_tried=16",
    ],
}
"""The first explores as long as training takes."""
SMOKE = ["run.validation_seeds=1", "rollout.prompts=2", "rollout.seeds_kept=2", "exploration.prompts=2"]
SMOKE += ["exploration.seeds_tried=2", "exploration.rounds=1", "rollout.steps=2", "exploration.steps=2"]


def run(recipe: str, variant: str, seed: int, iterations: int, every: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """One run as a row: its validation scores by iteration, and how long it took by the virtual clock."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"run.dir={directory}", f"run.seed={seed}", f"run.iterations={iterations}", "latents.keep=none"]
        overrides += [f"run.validate_every={every}", *VALIDATION, *RECIPES[recipe], *VARIANTS[variant], *more]
        simulation = Simulation("learning", config.load(SETTINGS, overrides), "real")
        outcome = simulation.go(report=False)
        rows, history = simulation.directory.validation(), simulation.directory.history()
        return {
            "recipe": recipe,
            "variant": variant,
            "seed": seed,
            "scores": {row.version: round(row.score, 5) for row in rows},
            "rewards": [round(row.metrics["reward_mean"], 4) for row in history],
            "virtual_s": round(outcome.hours * 3600, 2),
        }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each recipe and variant: the longest run of each seed."""
    columns = ["recipe", "variant", "seeds", "iterations", f"iterations to {TARGET}", "their mean", "their spread"]
    columns += ["deepest fall below the best", "last score, mean (range)"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for recipe in RECIPES:
        for variant in VARIANTS:
            mine = longest([row for row in rows if (row["recipe"], row["variant"]) == (recipe, variant)])
            if mine:
                lines.append(f"| {' | '.join([recipe, variant, *_cells(mine)])} |")
    return "\n".join(lines)


def longest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The longest run of each seed, by seed."""
    by_seed = {row["seed"]: row for row in sorted(rows, key=_length)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    curves = [_curve(row) for row in rows]
    firsts, falls, lasts = [reached(c) for c in curves], [fall(c) for c in curves], [c[-1][1] for c in curves]
    yield ", ".join(str(row["seed"]) for row in rows)
    yield ", ".join(sorted({str(_length(row)) for row in rows}, key=int))
    yield ", ".join("–" if first == inf else f"{first:.0f}" for first in firsts)
    known = [first for first in firsts if first < inf]
    yield f"{statistics.fmean(known):.1f}" if len(known) == len(firsts) else "–"
    spread = statistics.pstdev(known) / statistics.fmean(known) if len(known) == len(firsts) > 1 else inf
    yield "–" if spread == inf else f"{spread:.2f}"
    yield f"{max(falls):.3f} (seed {rows[falls.index(max(falls))]['seed']})"
    yield f"{statistics.fmean(lasts):.3f} ({min(lasts):.3f} to {max(lasts):.3f})"


def reached(curve: Sequence[tuple[int, float]], target: float = TARGET) -> float:
    """The first iteration of so many validations in a row that reach the target; infinite if there is none."""
    runs = (curve[at : at + IN_A_ROW] for at in range(len(curve) - IN_A_ROW + 1))
    return next((run[0][0] for run in runs if min(score for _, score in run) >= target), inf)


def fall(curve: Sequence[tuple[int, float]]) -> float:
    """The largest fall of a score below the best one before it."""
    best, deepest = -inf, 0.0
    for _, score in curve:
        best = max(best, score)
        deepest = max(deepest, best - score)
    return deepest


def _curve(row: Mapping[str, Any]) -> list[tuple[int, float]]:
    return sorted((int(version), score) for version, score in row["scores"].items())


def _length(row: Mapping[str, Any]) -> int:
    return max(map(int, row["scores"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=["the demo's"], choices=list(RECIPES), metavar="NAME")
    parser.add_argument("--variants", nargs="*", default=["as the demo"], choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(8)), help="run seeds")
    parser.add_argument("--iterations", type=at_least(1), default=100)
    parser.add_argument("--every", type=at_least(1), default=4, help="iterations between validations")
    parser.add_argument("--data", type=Path, default=DATA, help="raw data, read and added to")
    parser.add_argument("--smoke", action="store_true", help="two short runs of two iterations, in seconds")
    arguments = parser.parse_args()

    if arguments.smoke:
        pairs = [("the demo's", "as the demo"), ("copy, beta 1, uniform levels", "not explored")]
        print(table([run(*pair, seed=0, iterations=2, every=1, more=SMOKE) for pair in pairs]))
        return
    rows = [json.loads(line) for line in arguments.data.read_text().splitlines()] if arguments.data.exists() else []
    there = {(row["recipe"], row["variant"], row["seed"]): _length(row) for row in sorted(rows, key=_length)}
    for seed in arguments.seeds:
        for recipe in arguments.recipes:
            for variant in arguments.variants:
                if there.get((recipe, variant, seed), 0) >= arguments.iterations:
                    continue
                began_s = time.monotonic()
                rows.append(run(recipe, variant, seed, arguments.iterations, arguments.every))
                with arguments.data.open("a") as file:
                    file.write(f"{json.dumps(rows[-1])}\n")
                seconds = time.monotonic() - began_s
                print(f"{recipe}, {variant}, seed {seed}, {seconds:.0f} s: {_curve(rows[-1])}", file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
