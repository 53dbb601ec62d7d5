"""Time and dollars until a validation score is reached: Spotlight and its baselines, each with its own recipe.

Whole runs on the virtual clock: the embedded model really learns, and each step takes as long as the cost model says
of Qwen-Image on H100s. Seconds and dollars are those of the iterations; start-up and validation are left out.

Each strategy tries as many recipes as the others, on tuning seeds, up to the target in the middle, or with
``--to-last`` to the last one, for which tuning takes twice as long and needs raw data of its own. Recipes are drawn
at random from one space: strategies that explore share one set of them, those that do not share another. Fresh seeds
are then run with the best, to the last target. Without exploration a run learns the same whichever GPUs it uses: it
is made once, and for the other strategies only timed (a test checks that the times are the same). So is blocking
exploration at another size.

The tables show the base recipe ("untuned") of a strategy until all fresh seeds were run with its best one, and nothing
if not all were run with either. The raw data has a line per run; recorded runs are not made again. ``python -m
benchmarks.time_to_target`` makes what is missing (days of one core: see ``--estimate``), prints the tables in Markdown
and the README's, which ``--readme`` puts into it, writes a page with the last target's and draws the figure;
``--table`` makes no runs, ``--whole`` says what start-up and validations would add, ``--as-measured`` how long
iterations take at the speed measured on an H100, and ``--smoke`` takes a minute and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, product
from math import isinf
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

from benchmarks.target.cases import (
    JOBS,
    OURS,
    REGIMES,
    ROOT,
    SEEDS,
    SETTINGS,
    SIZES,
    STRATEGIES,
    TARGETS,
    TRACE_SPEEDUP,
    TRIALS,
    TUNING_SEEDS,
    Case,
    Row,
    first_case,
    tried,
    tuning_target,
)
from benchmarks.target.figure import draw
from benchmarks.target.outcomes import Data, best, curve, is_at, reached
from benchmarks.target.readme import headlines, put
from benchmarks.target.tables import page, tables
from graphs.tasks import training
from spotlight import config
from spotlight.device.modelled import ModelledDevice
from spotlight.plan.durations import GPUS, LAYER_S, PUBLISH_LORA_S
from spotlight.records import Dropped, Request, Scored
from spotlight.simulation import Learning, Simulation

DATA = ROOT / "benchmarks" / "data" / "time_to_target.jsonl"
FIGURE = ROOT / "docs" / "time_to_target.png"
REQUESTS = (1, 2, 4, 8)
"""Samples of a request that are tried."""
SMOKE = ["run.validation_seeds=1", "rollout.prompts=3", "rollout.seeds_kept=2", "rollout.steps=2"]
SMOKE += ["exploration.prompts=3", "exploration.seeds_tried=4", "exploration.rounds=1", "exploration.steps=2"]
SMOKE += ["rollout.request_seeds=2", "exploration.request_seeds=4"]


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
        with _replayed(learnt.get("flat", ())):
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
            if learning == "real" and is_at([row.score for row in run.directory.validation()], target):
                raise _Enough

        run = Simulation(case.strategy, settings, learning, follow)
        with suppress(_Enough), _noted() as flat:
            run.go(report=False)
        history, scores = run.directory.history(), run.directory.validation()
    measured = [row.measured for row in history]
    left_out = {"flat": flat[: len(history)]} if settings.train.filter_groups else {}
    return {
        **left_out,
        "scores": {row.version: round(row.score, 5) for row in scores},
        "seconds": [round(s, 2) for s in accumulate((row["wall_s"] for row in measured), initial=0.0)],
        "usd": [round(usd, 4) for usd in accumulate((row["usd"] for row in measured), initial=0.0)],
        "preemptions": [row["preemptions"] for row in measured],
        "spot_busy": [round(row["spot_utilisation"], 3) for row in measured],
        "seeds_scored": [row.metrics["seeds_scored"] / settings.rollout.prompts for row in history],
    }


@contextmanager
def _noted() -> Iterator[list[list[int]]]:
    """Yields a list that gets, for each iteration, the ids of the prompts whose samples all have the same reward."""
    found: list[list[int]] = []

    def noting(parts: Sequence[training.TrainingSet], *, filters: bool) -> training.TrainingSet:
        together = training.whole(parts, filters=filters)
        prompts = dict.fromkeys(sample.request.prompt.id for sample in together.samples)
        telling = training.prompts_with_signal(together.samples)
        found.append([prompt for prompt in prompts if prompt not in telling])
        return together

    with patch("graphs.loop.whole", noting):
        yield found


@contextmanager
def _replayed(flat: Sequence[Collection[int]]) -> Iterator[None]:
    """Inside, modelled rewards are all the same for these prompts of each iteration, and for no other prompt."""
    score = ModelledDevice.score

    def scoring(device: ModelledDevice, run_dir: str, request: Request) -> Scored | Dropped:
        scored = score(device, run_dir, request)
        if request.purpose == "validate" or request.iteration >= len(flat) or isinstance(scored, Dropped):
            return scored
        is_flat = request.prompt.id in flat[request.iteration]
        return replace(scored, rewards=tuple(0.5 if is_flat else seed / 2**64 for seed in request.seeds))

    with patch.object(ModelledDevice, "score", scoring):
        yield


def missing(rows: Sequence[Row], arguments: argparse.Namespace) -> list[Case]:
    """The runs to make next: all trials of every strategy, then fresh seeds with the best one."""
    wanted: list[Case] = []
    for job, regime, size, strategy in _asked(arguments):
        found = best(rows, first_case(job, regime, size, strategy), arguments)
        seeds = arguments.tuning_seeds if found is None else arguments.seeds
        trials = tried(strategy, arguments.trials) if found is None else [found]
        wanted += [
            Case(job=job, regime=regime, size=size, strategy=strategy, trial=trial, seed=seed)
            for seed, trial in product(seeds, trials)
        ]
    there = {(*(row[field.name] for field in fields(Case)), row.get("settings")) for row in rows}
    return [case for case in wanted if not {(*asdict(case).values(), made) for made in (case.digest, None)} & there]


def _asked(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str, str]]:
    """Job, regime, size and strategy of all that is asked for."""
    return product(arguments.jobs, arguments.regimes, arguments.sizes, arguments.strategies)


def to_begin(wanted: Iterable[Case], running: Collection[Case]) -> Case | None:
    """The first case that may begin: one that learns the same as a running case waits for it, and is then only
    timed."""
    return next(
        (case for case in wanted if not any(case == other or case.learns_as(asdict(other)) for other in running)), None
    )


def estimate(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """A line on the missing runs of each strategy: how many, and the hours of one core that those that learn take.

    Each takes as long as the median of the strategy's runs that learnt, or of all strategies' if there are none. Where
    a recipe is still to be found, its fresh seeds are counted, too, as if strategies that learn the same chose the same
    recipe. What is only timed takes a second or so, and counts as nothing.
    """
    learnt = [row for row in rows if row["cpu_s"] > len(row["seconds"])]
    lines, hours, known, later = [], 0.0, list(rows), list[Row]()

    def learns(case: Case, known: list[Row]) -> bool:
        first = not any(case.learns_as(row) for row in known)
        known.append(asdict(case))
        return first

    for strategy in arguments.strategies:
        wanted = missing(rows, argparse.Namespace(**vars(arguments) | {"strategies": [strategy]}))
        tuned = dict.fromkeys(replace(case, trial=0, seed=0) for case in wanted if case.seed in arguments.tuning_seeds)
        to_come = [replace(case, seed=seed) for case in tuned for seed in arguments.seeds]
        learning = sum(learns(case, known) for case in wanted) + sum(learns(case, later) for case in to_come)
        took = [row["cpu_s"] for row in learnt if row["strategy"] == strategy] or [row["cpu_s"] for row in learnt]
        hours += (mine := learning * statistics.median(took) / 3600 if took else float("nan"))
        lines.append(f"{strategy}: {len(wanted) + len(to_come)} runs, of which {learning} learn: {mine:.1f} h")
    return "\n".join([*lines, f"all: {hours:.1f} h of one core"])


def read(arguments: argparse.Namespace) -> Data:
    """The recorded runs, but for tuning runs that ended before the target that recipes are chosen by."""
    lines = arguments.data.read_text().splitlines() if arguments.data.exists() else ()
    return Data(row for row in map(json.loads, lines) if not _is_short(row, arguments))


def _is_short(row: Row, arguments: argparse.Namespace) -> bool:
    target = tuning_target(row["job"], last=arguments.to_last)
    return row["seed"] in arguments.tuning_seeds and not _is_over(row, target, arguments.iterations)


def _begin(place: str) -> None:
    """Set up a process that runs cases in a directory: it is nice to others, and ends with its parent, even in the
    middle of a case, and the directory with it."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        for _ in range(10):  # the case goes on writing meanwhile, until it finds no directory
            shutil.rmtree(place, ignore_errors=True)
        os._exit(1)

    os.nice(5)
    tempfile.tempdir = place
    Thread(target=follow, daemon=True).start()


def make(arguments: argparse.Namespace) -> None:
    """Run what is missing, ``--processes`` at a time; each run's line is written when it has ended."""
    with (
        tempfile.TemporaryDirectory(prefix="time-to-target-") as place,
        ProcessPoolExecutor(
            arguments.processes,
            mp_context=get_context("spawn"),
            max_tasks_per_child=8,
            initializer=_begin,
            initargs=(place,),
        ) as pool,
    ):
        running: dict[Future[dict[str, Any]], Case] = {}
        while True:
            rows = read(arguments)
            wanted = missing(rows, arguments)
            while len(running) < arguments.processes and (case := to_begin(wanted, running.values())):
                last = arguments.to_last or case.seed not in arguments.tuning_seeds
                target = tuning_target(case.job, last=last)
                running[pool.submit(measure, case, target, arguments.iterations, arguments.every, rows)] = case
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, row = running.pop(future), future.result()
                with arguments.data.open("a") as file:
                    file.write(f"{json.dumps(row)}\n")
                print(asdict(case), row["cpu_s"], "s", curve(row), file=sys.stderr, flush=True)


def smoke() -> None:
    """Run strategies that learn, some that are only timed, and ours; the timed ones must take as long as if they
    learnt."""
    names = ("reserved only (4)", "reserved + spot, no exploration", OURS)
    cases = [Case(job="digits", regime="2 levels", size="512", strategy=name, trial=0, seed=0) for name in names]
    target = TARGETS["digits"][-1]
    first = measure(cases[0], target, 2, 1, (), SMOKE)
    timed = measure(cases[1], target, 2, 1, [first], SMOKE)
    learnt = measure(cases[1], target, 2, 1, (), SMOKE)
    assert timed["scores"] == learnt["scores"] == first["scores"], "strategies that explore nothing learn alike"
    assert timed["seconds"] == learnt["seconds"], "to learn takes no time of the virtual clock"
    blocking = replace(cases[0], strategy=f"{names[0]}, blocking exploration")
    large = replace(blocking, size="1280")
    explored = measure(blocking, target, 2, 1, (), SMOKE)
    timed_too, learnt_too = (measure(large, target, 2, 1, rows, SMOKE) for rows in ([explored], ()))
    assert timed_too["scores"] == learnt_too["scores"] == explored["scores"], "no clock decides what is tried first"
    assert timed_too["seconds"] == learnt_too["seconds"], "nor what it costs"
    filtered = replace(cases[0], job="strict", strategy=f"filtered, {names[0]}")
    on_spot = replace(filtered, strategy="filtered, no exploration, gradients on spot")
    more = [*SMOKE, "rollout.steps=8", "rollout.seeds_kept=4"]
    alone = measure(filtered, target, 2, 1, (), more)
    timed_apart, learnt_apart = (measure(on_spot, target, 2, 1, rows, more) for rows in ([alone], ()))
    assert any(0 < len(each) < 3 for each in alone["flat"]), "not all prompts are trained on"
    assert timed_apart["seconds"] == learnt_apart["seconds"], "the same prompts are left out"
    ours = measure(cases[2], target, 2, 1, (), SMOKE)
    for row in (first, timed, explored, timed_too, timed_apart, ours):
        print(row)


def whole(arguments: argparse.Namespace, more: Sequence[str] = ()) -> Iterator[str]:
    """A line for each strategy: its iterations, which the tables count, and its whole run. Learning is modelled."""
    yield "| strategy | iterations: min | whole run: min | iterations: dollars | whole run: dollars |"
    yield "|---" * 5 + "|"
    for job, regime, size, strategy in _asked(arguments):
        case = first_case(job, regime, size, strategy)
        with tempfile.TemporaryDirectory(prefix="time-to-target-") as directory:
            overrides = [f"run.dir={directory}", f"run.iterations={arguments.iterations}"]
            overrides += [f"run.validate_every={arguments.every}", *case.overrides(), *more]
            run = Simulation(strategy, config.load(SETTINGS, overrides), "modelled")
            outcome = run.go(report=False)
            measured = [row.measured for row in run.directory.history()]
        minutes, usd = sum(row["wall_s"] for row in measured) / 60, sum(row["usd"] for row in measured)
        yield f"| {strategy} | {minutes:.1f} | {outcome.hours * 60:.1f} | {usd:.2f} | {outcome.usd:.2f} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured durations of Qwen-Image on an H100 over the cost model's: `benchmarks.engine`, docs/results/gpu.md."""

    denoising: float
    """With two samples, in CUDA graphs."""
    training: float
    """A pass with its backward, and one of the old policy's."""
    rows: int
    """Of such a pass."""


SPEEDS = {
    "512": Speed(denoising=0.1525 / 0.126, training=2.44 / 3.03, rows=8),
    "1280": Speed(denoising=1.12 / 0.777, training=4.48 / 4.07, rows=2),
}
PUBLISHING = f"simulation.publish_s={PUBLISH_LORA_S / TRACE_SPEEDUP:.2f}"
"""The time that `benchmarks.updates` measured, scaled to an iteration of fewer samples; the tables have 0.19."""


def as_measured(arguments: argparse.Namespace, more: Sequence[str] = ()) -> Iterator[str]:
    """A line for each strategy: an iteration as the tables have it, and at the speed that was measured on an H100.

    There each training pass also takes as long as launching its kernels, and a request has as many samples as end an
    iteration soonest. Learning is modelled.
    """
    yield "| job, cell | strategy | an iteration: s | as measured: s | samples a request | times as long |"
    yield "|---" * 6 + "|"
    for job, regime, size, strategy in _asked(arguments):
        case, speed = first_case(job, regime, size, strategy), SPEEDS[size]
        usual_s = _iteration_s(case, arguments, more)
        gpu = config.load(SETTINGS, case.overrides()).pace.gpu
        usual = GPUS[gpu]
        measured = replace(
            usual, flops_per_s=speed.denoising * usual.flops_per_s, train_speed=speed.training / speed.denoising
        )
        costs = [f"pace.layer_s={LAYER_S}", f"train.micro_batch={speed.rows}", PUBLISHING, *more]
        with patch.dict(GPUS, {gpu: measured}):
            took_s = {
                each: _iteration_s(case, arguments, [*costs, f"rollout.request_seeds={each}"]) for each in REQUESTS
            }
        seeds = min(took_s, key=lambda each: took_s[each])
        cell = f"{job}, {regime}, {size} px"
        yield f"| {cell} | {strategy} | {usual_s:.1f} | {took_s[seeds]:.1f} | {seeds} | {took_s[seeds] / usual_s:.2f} |"


def _iteration_s(case: Case, arguments: argparse.Namespace, more: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="time-to-target-") as directory:
        overrides = [f"run.dir={directory}", f"run.iterations={arguments.iterations}", *case.overrides(), *more]
        run = Simulation(case.strategy, config.load(SETTINGS, overrides), "modelled")
        run.go(report=False)
        return statistics.fmean(row.measured["wall_s"] for row in run.directory.history())


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse arguments; those of the command line, if ``given`` is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in (("jobs", JOBS), ("regimes", REGIMES), ("sizes", SIZES), ("strategies", STRATEGIES)):
        parser.add_argument(f"--{name}", nargs="*", default=list(known), choices=list(known), metavar="NAME")
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="recipes that each strategy tries (1: only the base one)"
    )
    parser.add_argument("--tuning-seeds", type=int, nargs="*", default=list(TUNING_SEEDS), help="run seeds of trials")
    parser.add_argument("--to-last", action="store_true", help="choose recipes by the last target, not the middle one")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="fresh run seeds")
    parser.add_argument("--iterations", type=int, default=60, help="most iterations of a run")
    parser.add_argument("--every", type=int, default=2, help="iterations between validations")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--data", type=Path, default=DATA, help="raw data, read and added to; tables go beside it")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the page goes beside it")
    parser.add_argument("--readme", type=Path, help="put its tables into this file, below their marks")
    parser.add_argument("--table", action="store_true", help="print the tables, and make no runs")
    parser.add_argument(
        "--estimate", action="store_true", help="print the CPU time that the missing runs would take, and make none"
    )
    parser.add_argument("--whole", action="store_true", help="say what start-up and validations add; run nothing else")
    parser.add_argument(
        "--as-measured", action="store_true", help="say how long iterations last on an H100; run nothing else"
    )
    parser.add_argument("--smoke", action="store_true", help="runs of two iterations, and nothing is kept")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    if arguments.smoke:
        smoke()
        return
    if arguments.estimate:
        print(estimate(read(arguments), arguments))
        return
    if arguments.whole:
        for line in whole(arguments):
            print(line, flush=True)
        return
    if arguments.as_measured:
        for line in as_measured(arguments):
            print(line, flush=True)
        return
    if not arguments.table:
        make(arguments)
    rows = read(arguments)
    found = tables(rows, arguments)
    for_readme = headlines(rows, arguments)
    print(found, *for_readme, sep="\n\n")
    if arguments.readme:
        arguments.readme.write_text(put(arguments.readme.read_text(), for_readme))
    arguments.data.with_suffix(".md").write_text(found)
    arguments.figure.with_suffix(".md").write_text(page(rows, arguments))
    draw(rows, arguments)


if __name__ == "__main__":
    main()
