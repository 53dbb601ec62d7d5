"""Does the simulator foretell a live run? Paced runs under real kills beside the same scenario simulated.

Nothing is fitted: durations come from the cost model, what happens when from the scenario and the trace, and what the
live system adds (launching, publishing, starting workers) from calibration runs on other clusters, before the cases.
``python -m benchmarks.fidelity`` prints tables in Markdown; the rows go to ``benchmarks/data/fidelity.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from spotlight import config
from spotlight.config import Config
from spotlight.device.pace import Pace
from spotlight.market.ledger import Price, pool_usd
from spotlight.market.trace_files import write_trace
from spotlight.market.trace_models import BURSTY, CALM, COLLAPSING, Climate, synthesise
from spotlight.market.traces import Event, Trace
from spotlight.plan import durations
from spotlight.records import Span, WorkerLife
from spotlight.rl.prompts import read_prompts
from spotlight.run import Run
from spotlight.scenario import Scenario
from spotlight.simulator import simulate
from spotlight.store.accounts import read_lives, read_spans
from spotlight.store.rundir import HISTORY, SUMMARY, RunDir

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "ocr-tiny.toml"
DATA = Path(__file__).parent / "data" / "fidelity.jsonl"
GOAL = 0.10
LOAD = "load.json"
"""In a run directory: how many processes wanted the machine's cores when it began and ended."""
VALIDATION_PROMPTS = 4
TRACE_S = 240.0
"""Emulated seconds of a trace: about as long as a run."""
LOSSES = 3
"""At least so many workers are lost in a run."""

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
    """Emulated seconds in a real one: small enough that this machine keeps the pace."""
    iterations: int = 3
    explores: bool = True


SHAPES = (
    Shape(name="1 + 2", reserved=1, spot=2, prompts=6, speedup=3.0),
    Shape(name="2 + 4, widths 1 and 2", reserved=2, spot=4, per_node=2, widths=(1, 2), prompts=12, speedup=2.0),
    Shape(name="4 + 8", reserved=4, spot=8, prompts=24, speedup=1.5),
)
CLIMATES = {"bursty": BURSTY, "calm": CALM, "collapsing": COLLAPSING}
CALIBRATION = Shape(name="1 + 3", reserved=1, spot=3, prompts=8, speedup=3.0, iterations=4)
GANGS = Shape(
    name="2 + 2, width 2",
    reserved=2,
    spot=2,
    per_node=2,
    widths=(2,),
    prompts=8,
    speedup=2.0,
    iterations=1,
    explores=False,
)
DOWN_S, UP_S = (70.0, 120.0), (80.0, 135.0)
"""Emulated seconds at which the calibration loses a worker, and gets it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the live system adds to the cost model's durations, in real seconds; medians."""

    request_s: float
    """From a request's launch to the next one's on the same worker, beyond denoising and scoring."""
    form_s: float
    """More than that, for a gang of two."""
    graph_s: float
    """From the last task of a graph to the first one of the next."""
    publish_s: float
    """From the last score to new weights, beyond training."""
    boot_s: float
    """From the moment at which a place is up until its worker joins."""
    load_s: float
    """What a worker's first request takes longer: it loads model and scorer."""
    prepare_s: float
    """From the start of the places to the first iteration: all workers start, load and validate at once."""


def settings(shape: Shape, directory: Path, trace: Path | None) -> Config:
    """A paced run of the tiny model, shaped like Qwen-Image at 512 px on H100."""
    validation = directory / "validation.txt"
    prompts = read_prompts(SETTINGS.parent / "prompts" / "digits-validation.txt")[:VALIDATION_PROMPTS]
    validation.write_text("".join(f"{prompt.text}\n" for prompt in prompts))
    spot = [f"pools.spot.trace={trace}", f"pools.spot.speedup={shape.speedup}"] if trace else []
    return config.load(
        SETTINGS,
        [
            f"run.dir={directory}",
            f"run.iterations={shape.iterations}",
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
            *spot,
            f"strategy.widths={list(shape.widths)}",
            f'strategy.exploration="{"stale" if shape.explores else "off"}"',
            "cluster.dashboard_port=0",
        ],
    )


def scenario(settings: Config, constants: Constants, trace: Path | None) -> Scenario:
    """A live run's settings as a scenario; times are emulated ones."""
    run, rollout, pools, pace = settings.run, settings.rollout, settings.pools, settings.pace
    emulated = {name: real_s * pace.speedup for name, real_s in asdict(constants).items()}
    tree = {
        "name": run.name,
        "seed": run.seed,
        "hours": 1.0,
        "iterations": run.iterations,
        "cluster": {
            "reserved_gpus": pools.reserved.workers,
            "reserved_gpus_per_node": pools.reserved.workers_per_node,
            "spot_nodes": pools.spot.workers // pools.spot.workers_per_node,
            "spot_gpus_per_node": pools.spot.workers_per_node,
            "gpu": pace.gpu,
            "usd_per_h_reserved": pools.reserved.usd_per_h,
            "usd_per_h_spot": pools.spot.usd_per_h,
            "startup_s": emulated["boot_s"] + emulated["load_s"],
            "pays_start_up": False,
            "form_s": emulated["form_s"],
            "recovery_s": 0.0,
        },
        "job": {
            "model": pace.model,
            "height_px": pace.height_px,
            "width_px": pace.width_px,
            "steps": rollout.steps,
            "guidance": pace.guidance,
            "widths": settings.strategy.widths,
            "prompts": rollout.prompts,
            "seeds_kept": rollout.seeds_kept,
            "request_seeds": rollout.request_seeds,
            "timesteps": settings.train.timesteps,
            "lora": pace.lora,
            "old_log_probs": settings.train.algorithm == "grpo",
            "score_s": durations.SCORE_S,
            "launch_s": emulated["request_s"],
            "publish_s": emulated["publish_s"],
            "prepare_s": emulated["prepare_s"],
            "graph_s": emulated["graph_s"],
            "validation_images": 0,  # it comes before the first iteration, in what is prepared
            "dataset": len(read_prompts(settings.data.train_prompts)),
        },
        "exploration": {
            "prompts": settings.exploration.prompts,
            "seeds_tried": settings.exploration.seeds_tried,
            "request_seeds": settings.exploration.request_seeds,
            "rounds": settings.exploration.rounds,
            "steps": settings.exploration.steps,
        },
        "trace": {"file": str(trace or ""), "takes": "gpu"},
        "strategies": [
            {
                "name": "live",
                "exploration": settings.strategy.exploration,
                "rollout_pools": settings.strategy.rollout_pools,
                "on_preemption": settings.strategy.on_preemption,
                "offload": settings.strategy.offload if settings.train_parts > 1 else "none",
            }
        ],
    }
    return Scenario.model_validate(tree)


# Live


def go(settings: Config) -> RunDir:
    """Run it live, to its end; a run that is there and finished is taken as it is."""
    directory = Path(settings.run.dir)
    for finished in directory.glob(f"*/{SUMMARY}"):
        return RunDir.open(finished.parent)
    path = directory / "settings.toml"
    path.write_text(config.dump(settings))
    load = [os.getloadavg()[0]]
    run = Run(path).start()
    run.wait()
    load.append(os.getloadavg()[0])
    (run.directory.path / LOAD).write_text(json.dumps(load))
    return run.directory


def pace_ratio(settings: Config, spans: Sequence[Span]) -> float:
    """Median rollout, launching included, beside the emulated duration of its steps; 1 where nothing is added."""
    lasted_s = [span.stop_s - span.start_s for span in spans if span.phase == "rollout" and span.outcome == "done"]
    return statistics.median(lasted_s) / denoising_s(settings, min(settings.strategy.widths))


def denoising_s(settings: Config, width: int) -> float:
    """Real seconds of all steps of a request."""
    pace, rollout = settings.pace, settings.rollout
    size = pace.height_px, pace.width_px
    step_s = durations.seconds_per_step(
        pace.model, *size, width=width, gpu=pace.gpu, batch=rollout.request_seeds, guidance=pace.guidance
    )
    return rollout.steps * step_s / pace.speedup


def training_s(settings: Config) -> float:
    """Real seconds of training, as it is paced."""
    return Pace(settings).train_s(settings.rollout.prompts * settings.rollout.seeds_kept)


# Calibration


def calibrate(directory: Path) -> Constants:
    """Measure what the system adds, on clusters and a trace that are none of the cases'."""
    wide = settings(GANGS, _folder(directory, "gangs"), None)
    wide_run = go(wide)
    trace = directory / "calibration.csv"
    write_trace(_calibration_trace(), trace)
    narrow = settings(CALIBRATION, _folder(directory, "calibration"), trace)
    run = go(narrow)
    spans, lives = sorted(read_spans(run), key=lambda span: span.start_s), read_lives(run)
    scoring_s = narrow.rollout.request_seeds * durations.SCORE_S
    request_s = _median_turn_s(spans) - denoising_s(narrow, 1) - scoring_s / narrow.pace.speedup
    gang_spans = [span for span in read_spans(wide_run) if span.phase == "rollout"]
    alone_s = _median_s(spans, "rollout") - denoising_s(narrow, 1)
    began_s, boot_s = _places(lives, narrow.pace.speedup)
    rows = run.rows(HISTORY)
    return Constants(
        request_s=request_s,
        form_s=max(0.0, _median_s(gang_spans, "rollout") - denoising_s(wide, 2) - alone_s),
        graph_s=statistics.median(_gaps(spans, [row["measured"]["stopped_s"] for row in rows])),
        publish_s=statistics.median(_publishing(spans, narrow.run.iterations)) - training_s(narrow),
        boot_s=boot_s,
        load_s=_loading_s(spans, lives),
        prepare_s=rows[0]["measured"]["started_s"] - began_s,
    )


def _calibration_trace() -> Trace:
    there = [Event(time_s=0.0, instance=f"n{index}", kind="add") for index in range(CALIBRATION.spot)]
    changes = [
        event
        for turn, (down_s, up_s) in enumerate(zip(DOWN_S, UP_S, strict=True))
        for event in (
            Event(time_s=down_s, instance=f"n{turn}", kind="remove"),
            Event(time_s=up_s, instance=f"again{turn}", kind="add"),
        )
    ]
    return Trace(events=(*there, *changes), duration_s=TRACE_S)


def _median_s(spans: Sequence[Span], phase: str) -> float:
    return statistics.median(span.stop_s - span.start_s for span in spans if span.phase == phase)


def _median_turn_s(spans: Sequence[Span]) -> float:
    """From one request's beginning to the next one's, of a phase on a worker."""
    begun_s: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for span in spans:
        if span.outcome == "done" and span.phase in ("rollout", "explore-r0", "explore-r1"):
            begun_s[span.worker, span.phase, span.iteration].append(span.start_s)
    return statistics.median(after - before for starts in begun_s.values() for before, after in pairwise(starts))


def _places(lives: Sequence[WorkerLife], speedup: float) -> tuple[float, float]:
    """When the places started, and how long a worker takes to join, from the losses that the trace makes."""
    lost = sorted((life for life in lives if life.reason == "lost"), key=lambda life: life.left_s or 0.0)
    began, booted = [], []
    for life, down_s, up_s in zip(lost, DOWN_S, UP_S, strict=True):
        assert life.left_s is not None
        began_s = life.left_s - down_s / speedup
        (again,) = (one for one in lives if one.worker == life.worker and one.joined_s > life.left_s)
        began.append(began_s)
        booted.append(again.joined_s - began_s - up_s / speedup)
    return statistics.mean(began), statistics.mean(booted)


def _loading_s(spans: Sequence[Span], lives: Sequence[WorkerLife]) -> float:
    """What the first request of a worker takes longer to denoise and to score."""
    lost = {life.worker: life.left_s or 0.0 for life in lives if life.reason == "lost"}
    longer = []
    for worker, left_s in lost.items():
        for kind in ("explore-r", "explore-score-r"):
            done = [span for span in spans if span.phase.startswith(kind) and span.outcome == "done"]
            usual_s = statistics.median(span.stop_s - span.start_s for span in done if span.worker not in lost)
            first = next(span for span in done if span.worker == worker and span.start_s > left_s)
            longer.append(first.stop_s - first.start_s - usual_s)
    return max(0.0, sum(longer) / len(lost))


def _gaps(spans: Sequence[Span], ends_s: Sequence[float]) -> Iterator[float]:
    """From the last task before an iteration's end to the first after it."""
    for end_s in ends_s:
        after = min((span.start_s for span in spans if span.start_s > end_s), default=end_s)
        yield after - max(span.stop_s for span in spans if span.stop_s <= end_s)


def _publishing(spans: Sequence[Span], iterations: int) -> Iterator[float]:
    """From the last score to the new weights."""
    for k in range(iterations):
        stops = {
            phase: max(span.stop_s for span in spans if (span.phase, span.iteration) == (phase, k))
            for phase in ("score", "publish")
        }
        yield stops["publish"] - stops["score"]


# Cases


def case_trace(climate: Climate, shape: Shape) -> Trace:
    """Hours of a climate in the minutes of a run: the first seed that takes enough workers well within it."""
    hours = 2 * LOSSES / (climate.losses_per_instance_h * climate.mean_share * shape.spot)
    for seed in count():
        whole = synthesise(seed=seed, capacity=shape.spot, duration_s=3600 * hours, climate=climate)
        trace = whole.stretch(TRACE_S / whole.duration_s)
        lost = sum(loss.instances for loss in trace.losses() if 0.25 < loss.time_s / TRACE_S < 0.75)
        if lost >= LOSSES:
            return trace
    raise AssertionError


def compare(shape: Shape, climate: str, constants: Constants, directory: Path) -> Row:
    """One case, live and simulated."""
    path = directory / f"{climate}.csv"
    write_trace(case_trace(CLIMATES[climate], shape), path)
    chosen = settings(shape, directory, path)
    run = go(chosen)
    started = replace(constants, prepare_s=observed_prepare_s(run, constants))
    return {
        "shape": shape.name,
        "trace": climate,
        "speedup": shape.speedup,
        "load": json.loads((run.path / LOAD).read_text()),
        "pace": pace_ratio(chosen, read_spans(run)),
        "live": measured(run, shape.speedup),
        "simulated": foretold(chosen, constants, path),
        "simulated_from_observed_start": foretold(chosen, started, path),
        "constants": asdict(constants),
    }


def measured(run: RunDir, speedup: float) -> Row:
    """Of a live run's iterations, in emulated seconds."""
    rows = run.rows(HISTORY)
    window = rows[0]["measured"]["started_s"], rows[-1]["measured"]["stopped_s"]
    return {
        "iteration_s": [row["measured"]["wall_s"] * speedup for row in rows],
        "usd": sum(row["measured"]["usd"] for row in rows) * speedup,
        "losses": losses(read_lives(run), window),
        "explored": sum(row["metrics"]["seeds_scored"] for row in rows),
    }


def observed_prepare_s(run: RunDir, constants: Constants) -> float:
    """As in `Constants`, but of the case itself: where in the trace its first iteration fell."""
    began_s = min(life.joined_s for life in read_lives(run)) - constants.boot_s
    return float(run.rows(HISTORY)[0]["measured"]["started_s"] - began_s)


def foretold(settings: Config, constants: Constants, trace: Path) -> Row:
    """The same of a simulated one."""
    (outcome,) = simulate(scenario(settings, constants, trace)).outcomes
    prices = {name: Price.constant(pool.usd_per_h) for name, pool in settings.pools}
    usd = (pool_usd(outcome.lives, prices, window) for window in outcome.windows)
    window = outcome.windows[0][0], outcome.windows[-1][1]
    return {
        "iteration_s": [stop_s - start_s for start_s, stop_s in outcome.windows],
        "usd": sum(sum(by_pool.values()) for by_pool in usd),
        "losses": losses(outcome.lives, window),
        "explored": outcome.seeds_explored * outcome.iterations * settings.rollout.prompts,
    }


def losses(lives: Sequence[WorkerLife], window: tuple[float, float]) -> int:
    return sum(life.reason == "lost" and window[0] <= (life.left_s or 0.0) <= window[1] for life in lives)


def ratio(row: Row, value: Callable[[Row], float], side: str = "simulated") -> float:
    """Foretold / measured."""
    return value(row[side]) / value(row["live"])


def mean_s(side: Row) -> float:
    return statistics.fmean(side["iteration_s"])


def dollars(side: Row) -> float:
    return float(side["usd"])


def _folder(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def print_rows(rows: Sequence[Row]) -> None:
    print(
        "| cluster | trace | iteration, s: simulated / live | ratio | dollars: simulated / live | ratio "
        "| ratios from the observed start | workers lost | seeds explored | pace | load |"
    )
    print("|---" * 11 + "|")
    for row in rows:
        live, simulated = row["live"], row["simulated"]
        aligned = [ratio(row, value, "simulated_from_observed_start") for value in (mean_s, dollars)]
        print(
            f"| {row['shape']} | {row['trace']} | {mean_s(simulated):.1f} / {mean_s(live):.1f} "
            f"| {ratio(row, mean_s):.3f} | {simulated['usd']:.3f} / {live['usd']:.3f} | {ratio(row, dollars):.3f} "
            f"| {aligned[0]:.3f}, {aligned[1]:.3f} | {simulated['losses']} / {live['losses']} "
            f"| {simulated['explored']:.0f} / {live['explored']:.0f} | {row['pace']:.3f} "
            f"| {row['load'][0]:.0f}, {row['load'][1]:.0f} |"
        )
    for side in ("simulated", "simulated_from_observed_start"):
        ratios = [(ratio(row, mean_s, side), ratio(row, dollars, side)) for row in rows]
        within = sum(max(abs(one - 1) for one in pair) <= GOAL for pair in ratios)
        print(f"\n{side.replace('_', ' ')}: within {GOAL:.0%} in both {within} of {len(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="which ones, by number")
    parser.add_argument("--climates", nargs="*", choices=CLIMATES, default=list(CLIMATES))
    parser.add_argument("--runs", type=Path, help="keep the live runs here; those that are here are not run again")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        directory = arguments.runs.resolve() if arguments.runs else Path(name)
        constants = calibrate(directory)
        print("real seconds: " + ", ".join(f"{key} {value:.3f}" for key, value in asdict(constants).items()) + "\n")
        rows = []
        for index in arguments.shapes:
            for climate in arguments.climates:
                rows.append(compare(SHAPES[index], climate, constants, _folder(directory, f"{index}-{climate}")))
                print(f"{SHAPES[index].name}, {climate}: done", file=sys.stderr, flush=True)
    DATA.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print_rows(rows)


if __name__ == "__main__":
    main()
