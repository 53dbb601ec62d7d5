"""Time and dollars until a validation score is reached: Spotlight and what it is to beat, each with its own recipe.

Whole runs on the virtual clock: the embedded model really learns, each step lasts what the cost model says of
Qwen-Image on H100s. Seconds and dollars are those of the iterations; start-up and validation are left out.

A strategy's recipe is the best of so many trials on tuning seeds, which end at the target in the middle: as many for
each, drawn at random from one space, and the same for all that explore, and for all that do not. Fresh seeds are then
run with it, to the last target. What nobody explores for learns the same whoever rolls it out: such a run is made once,
and for the other strategies only timed (a test says that the times are the same).

The tables show the base recipe ("untuned") of a strategy as long as no fresh seed was run with its best. The raw data
has a line per run; runs that are there are not made again. ``python -m benchmarks.time_to_target`` makes what is
missing (days of one core: see ``--estimate``), prints the tables in Markdown and the README's rows, writes a page with
the last target's and draws the figure; ``--table`` makes no runs, and ``--smoke`` takes a minute and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from itertools import accumulate, islice, pairwise, product
from math import inf, isinf
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spotlight import config
from spotlight.report.palette import AXIS, FAINT, LOST, PHASE_COLOURS, POOL_COLOURS
from spotlight.rl.parts import Cut
from spotlight.simulation import Learning, Simulation
from spotlight.store.rows import ValidationRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "paced.toml"
PROMPTS = ROOT / "examples" / "prompts"
DATA = ROOT / "benchmarks" / "data" / "time_to_target.jsonl"
FIGURE = ROOT / "docs" / "time_to_target.png"

COMMON = ["pace.speedup=1", "latents.keep=none", "rollout.request_seeds=4", "rollout.steps=16", "exploration.steps=6"]
COMMON += ["train.old_decay=0.5", "train.nft_beta=0.1", "train.levels=sampler", "pace.guidance=1.0"]
TRACE_SPEEDUP = 5.33
COMMON += ["pools.spot.trace_model=bursty", "pools.spot.trace_takes=node", f"pools.spot.speedup={TRACE_SPEEDUP}"]
COMMON += ["simulation.start_up_s=28.6", "simulation.publish_s=0.19", "simulation.gradient_s=0.26", "train.parts=24"]
"""An iteration has 96 samples where the paper's has 512: the trace passes, and machines start, 5.33 times as fast.
As many parts as twelve GPUs can share."""
MIXED = [
    "model.name=tiny-mixed",
    "model.width_px=48",
    f"data.train_prompts={PROMPTS / 'mixed-train.txt'}",
    f"data.validation_prompts={PROMPTS / 'mixed-validation.txt'}",
    "run.validation_seeds=6",
]
JOBS: dict[str, list[str]] = {
    "digits": ["run.validation_seeds=12"],
    "mixed": MIXED,
    "mixed, strict": [*MIXED, "reward.options.graded=false"],
}
"""Strict: an image is right or wrong, as in GenEval. So groups are flat where a prompt is solved or hopeless."""
TARGETS = {"digits": (0.75, 0.85, 0.92), "mixed": (0.6, 0.7, 0.8), "mixed, strict": (0.3, 0.4, 0.45)}
"""The last is near the plateau of the first two jobs, and as far as time allowed for the third. Recipes are chosen by
the one in the middle."""
REGIMES = {"2 levels": ["train.timesteps=2"], "6 levels": ["train.timesteps=6"]}
"""How heavy training is. With two noise levels a sample, spot GPUs would idle for 49 % of an iteration that neither
explores nor streams, at 512 px (the paper has 47 %); with the demo's six, for 74 %."""
SIZES = {"512": ["pace.height_px=512", "pace.width_px=512"], "1280": ["pace.height_px=1280", "pace.width_px=1280"]}

ON_RESERVED = ["pools.spot.workers=0", 'strategy.rollout_pools=["reserved"]']
ON_SPOT = ['strategy.train_pools=["reserved","spot"]']
ONE_RESERVED = ["pools.reserved.workers=1", "pools.spot.workers=11"]
FINER = ["rollout.request_seeds=1", "train.parts=48"]
"""How work is cut for 48 GPUs: of six ways, what ends an iteration of either cluster soonest at 512 px; at 1280 px, 96
parts would end one of 1 + 47 a tenth sooner. For four and twelve GPUs, 24 requests of four samples and as many parts
are within 5 % of the best of six ways (docs/results.md)."""
MORE_SPOT = ["pools.reserved.workers=1", "pools.spot.workers=47", *FINER]
ONLY_UPDATES = ['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]']
ONLY_UPDATES += ["pools.reserved.workers=1", "pools.reserved.gpu=a100-80gb"]
"""The reserved GPU neither rolls out nor computes gradients, so it need not be an H100."""
AHEAD = "rollout.prompts_ahead=3"
"""Of the base recipe's twelve prompts: half of the six of another."""
OURS = "Spotlight, gradients on spot (1 + 11)"
"""What all are compared with."""
SOONEST = "Spotlight, gradients on spot (1 + 47)"
STRATEGIES: dict[str, list[str]] = {
    "reserved only (4)": [*ON_RESERVED, "strategy.exploration=off"],
    "reserved only (4), blocking exploration": [*ON_RESERVED, "strategy.exploration=blocking"],
    "all reserved (12)": [*ON_RESERVED, "strategy.exploration=off", "pools.reserved.workers=12"],
    "all reserved (48)": [*ON_RESERVED, "strategy.exploration=off", "pools.reserved.workers=48", *FINER],
    "reserved + spot, no exploration": ["strategy.exploration=off"],
    "restart on preemption": ["strategy.on_preemption=restart", "strategy.elastic=false"],
    "Spotlight": [],
    "no exploration, gradients on spot": ["strategy.exploration=off", *ON_SPOT],
    "no exploration, gradients on spot (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED],
    "no exploration, gradients on spot (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT],
    "no exploration, only updates on reserved (A100 + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *ONLY_UPDATES,
    ],
    "no exploration, only updates on reserved (A100 + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*ONLY_UPDATES, *FINER),
    ],
    "a quarter ahead (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED, AHEAD],
    "a quarter ahead (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT, AHEAD],
    "a quarter ahead (4 + 8), only reserved GPUs train": ["strategy.exploration=off", AHEAD],
    "a quarter ahead, only updates on reserved (A100 + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*ONLY_UPDATES, AHEAD),
    ],
    "a quarter ahead, only updates on reserved (A100 + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*ONLY_UPDATES, *FINER, AHEAD),
    ],
    "Spotlight, gradients on spot (4 + 8)": [*ON_SPOT, "exploration.budget=worth"],
    OURS: [*ON_SPOT, *ONE_RESERVED, "exploration.budget=worth"],
    SOONEST: [*ON_SPOT, *MORE_SPOT, "exploration.request_seeds=2"],
}
"""The fifth streams, as RLBoost, unless its recipe divides advantages by the spread of all rewards; the sixth is
Spotlight but for what it does about a loss. With gradients on spot GPUs too, what is explored is what is worth its
seconds. All have twelve GPUs, but for those that are reserved only, those that have an A100 for updates beside twelve
or 48 spot H100s, and 1 + 47, where what is saved goes into more spot GPUs; small requests of exploration fill the gaps
between its requests and parts. A quarter ahead: idle GPUs begin with the next iteration's rollouts, with weights that
are one version old; it explores nothing."""
GOALS = {"reserved only (4)": {"seconds": 4.0}, "all reserved (12)": {"usd": 6.4}}
"""How many times as long, and as dear, they should be."""
UNITS = {"seconds": 60.0, "usd": 1.0}
BESIDE = (SOONEST, "no exploration, gradients on spot (1 + 47)")
"""What the strategies of a cell are compared with on the page: the first of these that was run there."""
BRIEF = ("strategy", "min", "times [95 %]", "dollars", "times [95 %]", "iterations, by seed", "recipe")
PAGE = """# Time and dollars to a score, by strategy

Made from the raw data by `python -m benchmarks.time_to_target --table`; do not edit this page. What was run, and what
follows from it, is in [results.md](results.md#time-and-dollars-to-a-score).

Minutes and dollars are medians over seeds; a run that did not get there (–) took longer than any that did. Times: the
ratio to the row that has 1, with its 95 % interval by paired bootstrap over seeds. In brackets: reserved + spot GPUs.
"""
CURVES = {
    "reserved only (4)": POOL_COLOURS["reserved"],
    "all reserved (12)": FAINT,
    "all reserved (48)": AXIS,
    "no exploration, gradients on spot (1 + 47)": POOL_COLOURS["spot"],
    OURS: PHASE_COLOURS["explore"],
    SOONEST: LOST,
}
"""Strategies whose runs are drawn as lines, with their colours."""

SPACE: dict[str, dict[str, list[str]]] = {
    "learning rate": {f"{rate:g}": [f"train.learning_rate={rate}"] for rate in (3e-4, 2e-4, 4.5e-4)},
    "advantages by": {"group": ["train.advantage_std=group"], "global": ["train.advantage_std=global"]},
    "updates": {"1": ["train.updates=1"], "2": ["train.updates=2"]},
    "groups x samples": {
        "12 x 8": ["rollout.prompts=12", "rollout.seeds_kept=8"],
        "6 x 16": ["rollout.prompts=6", "rollout.seeds_kept=16"],
    },
    "explored": {"4": ["times=4"], "2": ["times=2"], "2 of twice the prompts": ["times=2", "prompts=2"]},
}
"""What a recipe may be, by dimension. The first of each make the base recipe, which is the demo's but for advantages:
divided by the spread of their own prompt, they let training begin with the first samples. Explored: candidates for each
sample kept."""
TRIALS, TUNING_SEEDS, SEEDS = 6, (100, 101), tuple(range(8))
IN_A_ROW = 2
"""So many validations in succession must reach a target, for a single one may by luck."""
RESAMPLES = 4000
SMOKE = ["run.validation_seeds=1", "rollout.prompts=3", "rollout.seeds_kept=2", "rollout.steps=2"]
SMOKE += ["exploration.prompts=3", "exploration.seeds_tried=4", "exploration.rounds=1", "exploration.steps=2"]
SMOKE += ["rollout.request_seeds=2", "exploration.request_seeds=4"]
Row = Mapping[str, Any]
"""A line of the raw data: a `Case`, and what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    job: str
    regime: str
    size: str
    strategy: str
    trial: int
    """Which recipe, by its place in `recipes`."""
    seed: int

    def overrides(self) -> list[str]:
        learnt = [*COMMON, *JOBS[self.job], *REGIMES[self.regime], *recipe(self.trial), f"run.seed={self.seed}"]
        return [*learnt, *SIZES[self.size], *STRATEGIES[self.strategy]]

    def learns_as(self, row: Row) -> bool:
        """Whether a run that explores nothing has learnt the same.

        How work is cut changes the order of sums, so bits, and no score so far (docs/results.md).
        """
        if any(row[name] != getattr(self, name) for name in ("job", "regime", "trial", "seed")):
            return False
        other = Case(**{field.name: row[field.name] for field in fields(Case)})
        if row.get("settings", other.digest) != other.digest:
            return False
        first, second = (config.load(SETTINGS, [*case.overrides(), "train.parts=1"]) for case in (self, other))
        unexplored = first.strategy.exploration == second.strategy.exploration == "off"
        as_old = first.rollout.prompts_ahead == second.rollout.prompts_ahead
        return unexplored and as_old and Cut.of(first) == Cut.of(second)

    @property
    def digest(self) -> str:
        """Of what its settings have that the file's have not."""
        told = json.dumps(self.overrides()).replace(str(ROOT), "")
        return sha256(told.encode()).hexdigest()[:12]


def recipes(count: int) -> list[dict[str, str]]:
    """The base one, and points of the space at random, each once."""
    points = [dict(zip(SPACE, names, strict=True)) for names in product(*SPACE.values())]
    order = np.random.Generator(np.random.Philox(0)).permutation(np.arange(1, len(points)))
    return [points[0], *(points[index] for index in order)][:count]


def tried(strategy: str, trials: int) -> list[int]:
    """Which recipes a strategy tries, by their places. What is explored is no matter where nothing is."""
    explores = "strategy.exploration=off" not in STRATEGIES[strategy]
    points = recipes(math.prod(map(len, SPACE.values())))
    fitting = (at for at, point in enumerate(points) if explores or point["explored"] == points[0]["explored"])
    return list(islice(fitting, trials))


def recipe(trial: int) -> list[str]:
    """The overrides of a trial."""
    point = recipes(trial + 1)[trial]
    found = [override for name, choice in point.items() if name != "explored" for override in SPACE[name][choice]]
    rolled = dict(override.rpartition("=")[::2] for override in found)
    explored = dict(override.split("=") for override in SPACE["explored"][point["explored"]])
    prompts = int(rolled["rollout.prompts"]) * int(explored.get("prompts", 1))
    tried = int(rolled["rollout.seeds_kept"]) * int(explored["times"])
    return [*found, f"exploration.prompts={prompts}", f"exploration.seeds_tried={tried}", "exploration.request_seeds=8"]


# One run


class _Enough(Exception):
    """The last target was reached."""


def measure(
    case: Case, target: float, iterations: int, every: int, rows: Sequence[Row], more: Sequence[str] = ()
) -> dict[str, Any]:
    """Run to the target or the last iteration; only time it, if another run has learnt the same: ``learnt_by``."""
    learnt = next((row for row in rows if case.learns_as(row) and _is_over(row, target, iterations)), None)
    began_s = time.process_time()
    if learnt is None:
        found = _simulate(case, "real", target, iterations, every, more)
    else:
        scores = {int(version): score for version, score in learnt["scores"].items()}
        found = _simulate(case, "modelled", target, max(scores), every, more)
        found |= {"scores": scores, "learnt_by": learnt.get("learnt_by", learnt["strategy"])}
    return {**asdict(case), "settings": case.digest, **found, "cpu_s": round(time.process_time() - began_s, 1)}


def _is_over(row: Row, target: float, iterations: int) -> bool:
    """Whether a run came to the target, or is as long as asked for."""
    return max(map(int, row["scores"])) >= iterations or not isinf(reached(row, target))


def _simulate(
    case: Case, learning: Learning, target: float, iterations: int, every: int, more: Sequence[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="time-to-target-") as directory:
        overrides = [f"run.dir={directory}", f"run.iterations={iterations}", f"run.validate_every={every}"]
        settings = config.load(SETTINGS, [*overrides, *case.overrides(), *more])

        def follow(name: str, iteration: int, hours: float) -> None:
            if learning == "real" and _at(run.directory.validation(), target):
                raise _Enough

        run = Simulation(case.strategy, settings, learning, follow)
        with suppress(_Enough):
            run.go(report=False)
        history, scores = run.directory.history(), run.directory.validation()
    measured = [row.measured for row in history]
    return {
        "scores": {row.version: round(row.score, 5) for row in scores},
        "seconds": [round(s, 2) for s in accumulate((row["wall_s"] for row in measured), initial=0.0)],
        "usd": [round(usd, 4) for usd in accumulate((row["usd"] for row in measured), initial=0.0)],
        "preemptions": [row["preemptions"] for row in measured],
        "spot_busy": [round(row["spot_utilisation"], 3) for row in measured],
        "seeds_scored": [row.metrics["seeds_scored"] / settings.rollout.prompts for row in history],
    }


def _at(validation: Sequence[ValidationRow], target: float) -> bool:
    return len(validation) >= IN_A_ROW and min(row.score for row in validation[-IN_A_ROW:]) >= target


# What came of it


def reached(row: Row, target: float) -> float:
    """The first version of so many in succession that are at the target; infinite where there are none."""
    versions = sorted(map(int, row["scores"]))
    scores = {int(version): score for version, score in row["scores"].items()}
    runs = (versions[at : at + IN_A_ROW] for at in range(len(versions) - IN_A_ROW + 1))
    return next((float(run[0]) for run in runs if min(scores[v] for v in run) >= target), inf)


def until(row: Row, target: float, field: str) -> float:
    """Seconds or dollars until then; infinite where the run did not get there."""
    version = reached(row, target)
    return inf if isinf(version) else row[field][int(version)]


def chosen(rows: Sequence[Row], case: Case, tuning: Sequence[int], count: int) -> int | None:
    """The trial whose tuning runs came soonest to the target in the middle, then highest; None before all are made.

    A single trial is not chosen, and needs no tuning runs.
    """
    trials = tried(case.strategy, count)
    if len(trials) == 1:
        return trials[0]
    target = middle(case.job)
    ranks = []
    for trial in trials:
        mine = [row for row in rows if row["trial"] == trial and row["seed"] in tuning and _same(row, case)]
        if len(mine) < len(tuning):
            return None
        times = [until(row, target, "seconds") for row in mine]
        ranks.append((statistics.fmean(times), -statistics.fmean(_curve(row)[-1][1] for row in mine), trial))
    return min(ranks)[-1]


def middle(job: str) -> float:
    """The target that recipes are chosen by."""
    return TARGETS[job][len(TARGETS[job]) // 2]


def _same(row: Row, case: Case) -> bool:
    return all(row[name] == getattr(case, name) for name in ("job", "regime", "size", "strategy"))


def _curve(row: Row) -> list[tuple[int, float]]:
    return sorted((int(version), score) for version, score in row["scores"].items())


def interval(theirs: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float, float, float]:
    """How many times ours theirs is: the ratio of medians over the seeds that both ran, and its 95 % interval.

    By paired bootstrap over seeds; a run that did not get there took longer than any that did.
    """
    seeds = sorted(theirs.keys() & ours.keys())
    pairs_S2 = np.array([(theirs[seed], ours[seed]) for seed in seeds])
    draws_RS = np.random.Generator(np.random.Philox(0)).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    with np.errstate(invalid="ignore"):
        medians_R2 = np.median(pairs_S2[draws_RS], axis=1)
        ratios_R = np.nan_to_num(medians_R2[:, 0] / medians_R2[:, 1], nan=1.0, posinf=inf)
        whole = np.median(pairs_S2, axis=0)
        low, high = np.quantile(ratios_R, (0.025, 0.975), method="nearest")
        return float(whole[0] / whole[1]), float(low), float(high)


COLUMNS = (
    *("strategy", "recipe", "score", "runs there", "min, median (range)", "x ours [95 %]", "USD, median (range)"),
    *("x ours [95 %]", "iterations", "min per iteration", "seeds per prompt", "losses", "spot busy"),
)


def table(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy and target: its fresh runs, with the recipe that its tuning chose."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    fresh = {name: _fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES}
    for target, name in product(TARGETS[job], STRATEGIES):
        if fresh[name]:
            recipe = told(_shown(rows, _case(job, regime, size, name), arguments))
            lines.append(f"| {name} | {recipe} | {' | '.join(_cells(name, fresh[name], fresh[OURS], target))} |")
    return "\n".join(lines)


def page(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Of each cell that was run, a line for each strategy to the last target: docs/time_to_target.md."""
    cells = [cell for cell in _cells_of(arguments) if any(_fresh(rows, *cell, name, arguments) for name in STRATEGIES)]
    return "\n".join([PAGE, *(f"## {_title(*cell)}\n\n{_brief(rows, *cell, arguments)}\n" for cell in cells)])


def _title(job: str, regime: str, size: str) -> str:
    return f"{job.capitalize()}, {regime}, {size} px, to {TARGETS[job][-1]}"


def _brief(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    found = {name: runs for name in STRATEGIES if (runs := _fresh(rows, job, regime, size, name, arguments))}
    beside, target = next((name for name in BESIDE if name in found), next(iter(found))), TARGETS[job][-1]
    lines = [f"| {' | '.join(BRIEF)} |", "|---" * len(BRIEF) + "|"]
    for name, runs in found.items():
        cells = [f"**{name}**" if name.startswith("Spotlight, gradients") else name]
        for field, unit in UNITS.items():
            mine, theirs = (_until(each, target, field) for each in (runs, found[beside]))
            cells.append(f"{statistics.median(mine.values()) / unit:.3g}")
            cells.append("1" if name == beside else "{:.2f} [{:.2f}, {:.2f}]".format(*interval(mine, theirs)))
        versions = [reached(runs[seed], target) for seed in sorted(runs)]
        cells.append(", ".join("–" if isinf(version) else f"{version:g}" for version in versions))
        cells.append(told(_shown(rows, _case(job, regime, size, name), arguments)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def told(trial: int | None) -> str:
    """A recipe, by what it has that the base one has not."""
    if trial is None:
        return "untuned"
    point = recipes(trial + 1)[trial]
    other = [f"{dimension} {choice}" for dimension, choice in point.items() if choice != next(iter(SPACE[dimension]))]
    return ", ".join(other) or "base"


def headlines(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    """The rows of the README's table, to the last target: a cell's, if 1 + 11, 1 + 47 and all that has a goal were run.

    Of the first size; the tables have the others.
    """
    cells = [cell for cell in _cells_of(arguments) if cell[-1] == arguments.sizes[0]]
    return [row for cell in cells if (row := _headline(rows, *cell, arguments))]


def _headline(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    target, seeds = TARGETS[job][-1], set[int]()
    best = dict.fromkeys(((name, field) for name, goals in GOALS.items() for field in goals), 0.0)
    seen: list[str] = []
    theirs = {name: _fresh(rows, job, regime, size, name, arguments) for name in GOALS}
    for ours in (OURS, SOONEST):
        mine, said = _fresh(rows, job, regime, size, ours, arguments), []
        if not all(mine.keys() & runs.keys() for runs in theirs.values()):
            continue
        for name, runs in theirs.items():
            found = {field: interval(_until(runs, target, field), _until(mine, target, field)) for field in UNITS}
            said.append(f"{name} {' and '.join('{:.1f} [{:.1f}, {:.1f}]'.format(*ratio) for ratio in found.values())}")
            best |= {(name, field): max(best[name, field], found[field][0]) for field in GOALS[name]}
        seeds |= {len(mine.keys() & runs.keys()) for runs in theirs.values()}
        seen.append(f"{_gpus(ours)}'s: {'; '.join(said)}")
    if len(seen) < 2:
        return ""
    tried = {
        name: _shown(rows, _case(job, regime, size, name), arguments) is not None for name in (*GOALS, OURS, SOONEST)
    }
    untuned = [_gpus(name) if name in (OURS, SOONEST) else name for name, is_tuned in tried.items() if not is_tuned]
    recipes = f", untuned: {' and '.join(untuned)}" if untuned else ", each with its best recipe"
    pairs = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    goals = [f"{GOALS[name][field]:g} {_met(ratio, GOALS[name][field])}" for (name, field), ratio in best.items()]
    return (
        f"| minutes and dollars to {target} ({job}, {regime}), Qwen-Image at {size} px on H100s, virtual clock, "
        f"{pairs} seeds{recipes} | `python -m benchmarks.time_to_target` | as multiples of {'; of '.join(seen)} "
        f"(goals: {' and '.join(goals)}) |"
    )


def _gpus(name: str) -> str:
    """As "1 + 11"."""
    return name.rpartition("(")[2].rstrip(")")


def _met(ratio: float, goal: float) -> str:
    return "met" if ratio >= goal else "**missed**"


def _cells_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    return product(arguments.jobs, arguments.regimes, arguments.sizes)


def _fresh(
    rows: Sequence[Row], job: str, regime: str, size: str, name: str, arguments: argparse.Namespace
) -> dict[int, Row]:
    case = _case(job, regime, size, name)
    return _runs(rows, case, _shown(rows, case, arguments) or 0, arguments)


def _runs(rows: Sequence[Row], case: Case, trial: int, arguments: argparse.Namespace) -> dict[int, Row]:
    """A recipe's, by fresh seed."""
    mine = [row for row in rows if _same(row, case) and row["seed"] not in arguments.tuning_seeds]
    return {row["seed"]: row for row in mine if row["trial"] == trial}


def _shown(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    """The best recipe, once fresh seeds have been run with it; None: the tables show the base one, untuned."""
    best = _best(rows, case, arguments)
    return best if best is not None and _runs(rows, case, best, arguments) else None


def _case(job: str, regime: str, size: str, name: str) -> Case:
    """The first run of a strategy."""
    return Case(job=job, regime=regime, size=size, strategy=name, trial=0, seed=0)


def _best(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    return chosen(rows, case, arguments.tuning_seeds, arguments.trials)


def _until(runs: Mapping[int, Row], target: float, field: str) -> dict[int, float]:
    return {seed: until(row, target, field) for seed, row in runs.items()}


def _cells(name: str, mine: Mapping[int, Row], ours: Mapping[int, Row], target: float) -> Iterator[str]:
    there = [row for row in mine.values() if not isinf(reached(row, target))]
    yield f"{target}"
    yield f"{len(there)} of {len(mine)}"
    for field, unit in UNITS.items():
        found = _until(mine, target, field)
        median, *ends = (of(found.values()) / unit for of in (statistics.median, min, max))
        yield "{:.3g} ({:.3g} to {:.3g})".format(median, *ends)
        ratio = interval(found, _until(ours, target, field)) if name != OURS and ours else None
        yield "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else "1"
    yield f"{statistics.median(reached(row, target) for row in mine.values()):.3g}"
    yield f"{statistics.median(b - a for row in mine.values() for a, b in pairwise(row['seconds'])) / 60:.3f}"
    yield f"{statistics.fmean(statistics.fmean(row['seeds_scored']) for row in mine.values()):.1f}"
    yield f"{statistics.median(sum(row['preemptions']) for row in mine.values()):.3g}"
    yield f"{statistics.fmean(statistics.fmean(row['spot_busy']) for row in mine.values()):.0%}"


def draw(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """A row of panels for each job and regime: score against time, and minutes against dollars to the last target."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = [(*cell, "512") for cell in product(arguments.jobs, arguments.regimes)]
    shown = [cell for cell in cells if any(_fresh(rows, *cell, name, arguments) for name in STRATEGIES)] or cells[:1]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 4.2 * len(shown)), layout="constrained")
        panels = figure.subplots(len(shown), 2, squeeze=False)
        for cell, (left, right) in zip(shown, panels, strict=True):
            found = {name: runs for name in STRATEGIES if (runs := _fresh(rows, *cell, name, arguments))}
            _draw_curves(left, {name: found[name] for name in CURVES if name in found}, cell)
            _draw_costs(right, found, cell)
        figure.suptitle("Virtual clock: Qwen-Image at 512 px on H100s; learning is the embedded model's", fontsize=10)
        figure.savefig(arguments.figure, dpi=130)


def _colour(name: str) -> str:
    """Where it has no line, that of its kind: reserved GPUs alone, spot ones too, or exploration beside training."""
    kind = POOL_COLOURS["reserved"] if name.startswith(("reserved only", "all reserved")) else POOL_COLOURS["spot"]
    return CURVES.get(name, PHASE_COLOURS["explore"] if name.startswith("Spotlight") else kind)


def _draw_curves(axis: Axes, found: Mapping[str, Mapping[int, Row]], cell: tuple[str, str, str]) -> None:
    """A line for each run."""
    job, regime, _ = cell
    for name, runs in found.items():
        for row in runs.values():
            curve = [(row["seconds"][version] / UNITS["seconds"], score) for version, score in _curve(row)]
            axis.plot(*zip(*curve, strict=True), color=_colour(name), lw=1)
        axis.plot([], [], color=_colour(name), label=name)
    for target in TARGETS[job]:
        axis.axhline(target, color=AXIS, lw=0.6, ls="--")
    axis.set(xlim=(0, None), xlabel="minutes, emulated", ylabel=f"validation score, {job}, {regime}")
    axis.legend(frameon=False, loc="lower right")


def _draw_costs(axis: Axes, found: Mapping[str, Mapping[int, Row]], cell: tuple[str, str, str]) -> None:
    """A number for each strategy at its medians, and lines over those runs that got there, if most did."""
    from matplotlib.ticker import LogLocator, NullLocator

    target = TARGETS[cell[0]][-1]
    for number, (name, runs) in enumerate(found.items(), 1):
        each = [[value / unit for value in _until(runs, target, field).values()] for field, unit in UNITS.items()]
        minutes, dollars = (statistics.median(values) for values in each)
        if isinf(minutes):
            continue
        there = [[value for value in values if not isinf(value)] for values in each]
        reach = [
            [[middle - min(values)], [max(values) - middle]]
            for values, middle in zip(there, (minutes, dollars), strict=True)
        ]
        axis.errorbar(minutes, dollars, xerr=reach[0], yerr=reach[1], color=_colour(name), lw=0.8, alpha=0.4)
        axis.plot(minutes, dollars, ls="", marker=f"${number}$", ms=9, color=_colour(name), label=name)
    axis.set(xscale="log", yscale="log", xlabel=f"minutes to {target}, emulated", ylabel=f"US dollars to {target}")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_locator(NullLocator())
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="median (line: runs that got there)")


# Which runs


def missing(rows: Sequence[Row], arguments: argparse.Namespace) -> list[Case]:
    """The runs to make next: of every strategy all trials first, then fresh seeds with the best."""
    cells = product(arguments.jobs, arguments.regimes, arguments.sizes, arguments.strategies)
    wanted: list[Case] = []
    for job, regime, size, strategy in cells:
        best = _best(rows, _case(job, regime, size, strategy), arguments)
        seeds = arguments.tuning_seeds if best is None else arguments.seeds
        trials = tried(strategy, arguments.trials) if best is None else [best]
        wanted += [
            Case(job=job, regime=regime, size=size, strategy=strategy, trial=trial, seed=seed)
            for seed, trial in product(seeds, trials)
        ]
    there = {(*(row[field.name] for field in fields(Case)), row.get("settings")) for row in rows}
    return [case for case in wanted if not {(*asdict(case).values(), made) for made in (case.digest, None)} & there]


def estimate(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """CPU time of all that is asked for, by what runs took that learnt; what was only timed took less than a second an
    iteration."""
    cells = len(arguments.jobs) * len(arguments.regimes) * len(arguments.sizes)
    tuning = arguments.trials * len(arguments.tuning_seeds) if arguments.trials > 1 else 0
    runs = tuning + len(arguments.seeds)
    lines = []
    for strategy in arguments.strategies:
        each_s = (row["cpu_s"] / max(1, len(row["seconds"]) - 1) for row in rows if row["strategy"] == strategy)
        took = [seconds for seconds in each_s if seconds > 1]
        each = (
            f"{statistics.fmean(took):.1f} s of CPU an iteration ({len(took)} runs)" if took else "timed after others"
        )
        lines.append(f"{strategy}: {cells} cells x {runs} runs, up to {arguments.iterations} iterations; {each}")
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    """What was measured before; nothing if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def make(arguments: argparse.Namespace) -> None:
    """Run what is missing, so many at a time; each line is written when its run has ended."""
    with ProcessPoolExecutor(
        arguments.processes, mp_context=get_context("spawn"), max_tasks_per_child=8, initializer=os.nice, initargs=(5,)
    ) as pool:
        running: dict[Future[dict[str, Any]], Case] = {}
        while True:
            rows = read(arguments.data)
            idle = arguments.processes - len(running)
            for case in [case for case in missing(rows, arguments) if case not in running.values()][:idle]:
                target = middle(case.job) if case.seed in arguments.tuning_seeds else TARGETS[case.job][-1]
                running[pool.submit(measure, case, target, arguments.iterations, arguments.every, rows)] = case
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, row = running.pop(future), future.result()
                with arguments.data.open("a") as file:
                    file.write(f"{json.dumps(row)}\n")
                print(asdict(case), row["cpu_s"], "s", _curve(row), file=sys.stderr, flush=True)


def smoke() -> None:
    """A strategy that learns, one that is only timed, and ours; the timed one must take as long as if it learnt."""
    names = ("reserved only (4)", "reserved + spot, no exploration", OURS)
    cases = [Case(job="digits", regime="2 levels", size="512", strategy=name, trial=0, seed=0) for name in names]
    target = TARGETS["digits"][-1]
    first = measure(cases[0], target, 2, 1, (), SMOKE)
    timed = measure(cases[1], target, 2, 1, [first], SMOKE)
    learnt = measure(cases[1], target, 2, 1, (), SMOKE)
    assert timed["scores"] == learnt["scores"] == first["scores"], "strategies that explore nothing learn alike"
    assert timed["seconds"] == learnt["seconds"], "to learn takes no time of the virtual clock"
    ours = measure(cases[2], target, 2, 1, (), SMOKE)
    for row in (first, timed, ours):
        print(row)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for: of the command line, if nothing is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in (("jobs", JOBS), ("regimes", REGIMES), ("sizes", SIZES), ("strategies", STRATEGIES)):
        parser.add_argument(f"--{name}", nargs="*", default=list(known), choices=list(known), metavar="NAME")
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="recipes that each strategy tries; 1: the base one only"
    )
    parser.add_argument("--tuning-seeds", type=int, nargs="*", default=list(TUNING_SEEDS), help="run seeds of trials")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="fresh run seeds")
    parser.add_argument("--iterations", type=int, default=60, help="at most")
    parser.add_argument("--every", type=int, default=2, help="iterations between validations")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--data", type=Path, default=DATA, help="raw data, read and added to; tables go beside it")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the page goes beside it")
    parser.add_argument("--table", action="store_true", help="make no runs")
    parser.add_argument("--estimate", action="store_true", help="say what the runs would take, and make none")
    parser.add_argument("--smoke", action="store_true", help="four runs of two iterations, and nothing is kept")
    return parser.parse_args(given)


def tables(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Those of all cells that were run, in Markdown."""
    return "\n".join(
        f"## {job}, {regime}, {size} px\n\n{table(rows, job, regime, size, arguments)}\n"
        for job, regime, size in _cells_of(arguments)
        if any(_fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES)
    )


def main() -> None:
    arguments = parse()
    if arguments.smoke:
        smoke()
        return
    if arguments.estimate:
        print(estimate(read(arguments.data), arguments))
        return
    if not arguments.table:
        make(arguments)
    rows = read(arguments.data)
    found = tables(rows, arguments)
    print(found, *headlines(rows, arguments), sep="\n")
    arguments.data.with_suffix(".md").write_text(found)
    arguments.figure.with_suffix(".md").write_text(page(rows, arguments))
    draw(rows, arguments)


if __name__ == "__main__":
    main()
