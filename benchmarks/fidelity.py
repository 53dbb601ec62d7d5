"""How accurate is the virtual cluster? Paced live runs under real kills, compared with the same settings on its clock.

Nothing is fitted: durations come from the cost model, the times of events from the settings and the trace, and the
system's own costs from the defaults of ``[simulation]``, or as ``benchmarks.fixed_costs`` measured them on another
cluster. Seconds and dollars count from the start of the first iteration to the end of the last. ``python -m
benchmarks.fidelity`` prints a table in Markdown; the rows go to ``benchmarks/data/fidelity.jsonl``. ``--headline`` does
the same for rows of ``benchmarks.time_to_target``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import at_least
from benchmarks.target.cases import OURS, TRACE_SPEEDUP, Case
from benchmarks.target.cases import SETTINGS as PACED
from spotlight import config
from spotlight.config import Config, SimulationSection
from spotlight.market.ledger import pool_usd
from spotlight.market.trace_files import write_trace
from spotlight.market.trace_models import MODELS, synthesise
from spotlight.rl.prompts import read_prompts
from spotlight.run import Run
from spotlight.simulation import Simulation
from spotlight.store.accounts import pool_prices, read_lives
from spotlight.store.rows import SIMULATED
from spotlight.store.rundir import RunDir

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "ocr-tiny.toml"
DATA = Path(__file__).parent / "data" / "fidelity.jsonl"
GOAL = 0.05
VALIDATION_PROMPTS = 4
TRACE_S = 240.0
"""Emulated seconds of a trace: about as long as a run."""
PREEMPTIONS = 3
"""Least number of lost workers in a run: traces are drawn until one has them."""

HEADLINE = ("reserved only (4)", OURS, "a quarter ahead (1 + 11)")
HEADLINE_SPEEDUP = 3.0
"""Twelve engines on two cores: a slow machine needs a smaller one."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster, and work that gives it an iteration of about a minute."""

    name: str
    reserved: int
    spot: int
    per_node: int = 1
    widths: tuple[int, ...] = (1,)
    prompts: int
    speedup: float
    """Emulated seconds in a real one: few enough for two cores to keep up."""


SHAPES = (
    Shape(name="1 + 2", reserved=1, spot=2, prompts=6, speedup=3.0),
    Shape(name="2 + 4, widths 1 and 2", reserved=2, spot=4, per_node=2, widths=(1, 2), prompts=12, speedup=2.0),
    Shape(name="4 + 8", reserved=4, spot=8, prompts=24, speedup=1.5),
)


def settings(shape: Shape, model: str, directory: Path) -> Config:
    """A paced run of the tiny model, shaped like Qwen-Image at 512 px on H100."""
    validation = directory / "validation.txt"
    prompts = read_prompts(SETTINGS.parent / "prompts" / "digits-validation.txt")[:VALIDATION_PROMPTS]
    validation.write_text("".join(f"{prompt.text}\n" for prompt in prompts))
    return config.load(
        SETTINGS,
        [
            f"run.dir={directory}",
            "run.iterations=3",
            "run.validate_every=1000",
            "run.validation_seeds=2",
            f"data.validation_prompts={validation}",
            f"rollout.prompts={shape.prompts}",
            "rollout.seeds_kept=4",
            "rollout.request_seeds=4",
            "rollout.steps=10",
            "exploration.seeds_tried=8",
            "exploration.request_seeds=4",
            "exploration.rounds=2",
            "train.timesteps=2",
            "pace.gpu=h100",
            f"pace.speedup={shape.speedup}",
            f"pools.reserved.workers={shape.reserved}",
            f"pools.reserved.workers_per_node={min(shape.per_node, shape.reserved)}",
            f"pools.spot.workers={shape.spot}",
            f"pools.spot.workers_per_node={shape.per_node}",
            f"pools.spot.trace={trace_of(shape, model, directory)}",
            f"pools.spot.speedup={shape.speedup}",
            f"strategy.widths={list(shape.widths)}",
            "cluster.dashboard_port=0",
        ],
    )


def trace_of(shape: Shape, model: str, directory: Path) -> Path:
    """Make a synthetic trace with enough preemptions, compressed to the length of a run."""
    for seed in range(1000):
        drawn = synthesise(seed=seed, capacity=shape.spot, duration_s=24 * 3600.0, model=MODELS[model])
        trace = drawn.stretch(TRACE_S / drawn.duration_s)
        if trace.summary().losses >= PREEMPTIONS:
            path = directory / "trace.csv"
            write_trace(trace, path)
            return path
    raise AssertionError(f"no trace of the model {model!r} has {PREEMPTIONS} preemptions")


def spent(run: RunDir, settings: Config) -> tuple[float, float]:
    """Emulated seconds and dollars from the start of the first iteration to the end of the last."""
    history, lives = run.history(), read_lives(run)
    began_s, ended_s = history[0].measured["started_s"], history[-1].measured["stopped_s"]
    usd = sum(pool_usd(lives, pool_prices(settings), (began_s, ended_s)).values())
    return settings.pace.speedup * (ended_s - began_s), settings.pace.speedup * usd


def headline(strategy: str, iterations: int, speedup: float, directory: Path) -> Config:
    """Settings of a row of the headline, with so many iterations, and the system's own costs on this machine."""
    row = Case(job="digits", regime="2 levels", size="512", strategy=strategy, trial=0, seed=0)
    of_other_machines = ("simulation.", "pace.speedup", "pools.spot.speedup")
    return config.load(
        PACED,
        [
            *(override for override in row.overrides() if not override.startswith(of_other_machines)),
            f"pace.speedup={speedup}",
            f"pools.spot.speedup={speedup * TRACE_SPEEDUP}",
            f"run.dir={directory}",
            f"run.iterations={iterations}",
            "run.validate_every=1000",
            "run.validation_seeds=1",
        ],
    )


def compare(configured: Callable[[Path], Config], directory: Path, costs: Mapping[str, float]) -> Row:
    """Run settings live, unless this directory has that run, and on the virtual clock, with real learning in both."""
    if done := recorded(directory):
        live, load = done[0], None
        asked = live.config()
    else:
        asked = configured(directory)
        run = Run.of(asked).start()
        run.wait()
        live, load = run.directory, os.getloadavg()[0]
    known = asked.simulation.model_copy(update=dict(costs))
    simulated = Simulation("as configured", asked.model_copy(update={"simulation": known}), "real")
    outcome = simulated.go(report=False)
    (live_s, live_usd), (virtual_s, virtual_usd) = (spent(each, asked) for each in (live, simulated.directory))
    lost = sum(life.reason in ("lost", "left") for life in read_lives(live))
    return {
        "live_s": live_s,
        "virtual_s": virtual_s,
        "live_usd": live_usd,
        "virtual_usd": virtual_usd,
        "preemptions": [lost, outcome.preemptions],
        "load": load,
        "speedup": asked.pace.speedup,
        "costs": dict(costs),
    }


def recorded(directory: Path) -> list[RunDir]:
    """The live runs in this directory that have all their iterations."""
    runs = [RunDir.open(path) for path in sorted(directory.glob("*/")) if not (path / SIMULATED).exists()]
    return [run for run in runs if len(run.history()) == run.config().run.iterations]


def table(rows: list[Row]) -> Iterator[str]:
    yield "| cluster | trace | live s | virtual / live | live USD | virtual / live | preempted live, virtual |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        seconds, usd = row["virtual_s"] / row["live_s"], row["virtual_usd"] / row["live_usd"]
        lost = ", ".join(map(str, row["preemptions"]))
        yield (
            f"| {row['shape']} | {row['model']} | {row['live_s']:.0f} | {seconds:.3f} "
            f"| {row['live_usd']:.3f} | {usd:.3f} | {lost} |"
        )
    within = sum(
        max(abs(row["virtual_s"] / row["live_s"] - 1), abs(row["virtual_usd"] / row["live_usd"] - 1)) <= GOAL
        for row in rows
    )
    yield f"\nWithin {GOAL:.0%} in seconds and dollars: {within} of {len(rows)}."


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[Path], Config]]]:
    """``(cluster, trace, function that makes the settings)`` of each case."""
    if arguments.headline is not None:
        for strategy in arguments.headline or HEADLINE:
            yield strategy, "bursty", partial(headline, strategy, arguments.iterations, arguments.speedup)
        return
    for shape, model in product((SHAPES[number] for number in arguments.shapes), arguments.models):
        yield shape.name, model, partial(settings, shape, model)


def fixed_costs(text: str) -> dict[str, Any]:
    """Of ``--costs``: settings of ``[simulation]``, refused before a live run begins if they are none."""
    found = json.loads(text)
    return SimulationSection.model_validate(found).model_dump(include=found.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=int,
        nargs="*",
        choices=range(len(SHAPES)),
        default=range(len(SHAPES)),
        help="numbers of the clusters to run (all)",
    )
    parser.add_argument("--models", nargs="*", default=sorted(MODELS), choices=sorted(MODELS))
    parser.add_argument(
        "--headline", nargs="*", choices=HEADLINE, metavar="NAME", help="rows of the headline instead of the clusters"
    )
    parser.add_argument("--iterations", type=at_least(1), default=3, help="iterations of a row of the headline")
    parser.add_argument(
        "--speedup", type=float, default=HEADLINE_SPEEDUP, help="emulated seconds in a real one, for such a row"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep run directories here; a recorded live run is not repeated"
    )
    parser.add_argument(
        "--costs",
        type=fixed_costs,
        default={},
        metavar="JSON",
        help="fixed costs, as benchmarks.fixed_costs prints them",
    )
    parser.add_argument("--table", action="store_true", help="print the recorded rows; run nothing")
    arguments = parser.parse_args()
    for shape, model, configured in () if arguments.table else cases(arguments):
        with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
            directory = arguments.keep / f"{shape} {model}" if arguments.keep else Path(name)
            directory.mkdir(parents=True, exist_ok=True)
            row = {"shape": shape, "model": model} | compare(configured, directory, arguments.costs)
        with DATA.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("\n".join(table([row])), file=sys.stderr, flush=True)
    lines = DATA.read_text().splitlines() if DATA.exists() else []
    print("\n".join(table([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main()
