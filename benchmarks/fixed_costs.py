"""How much time does a live run spend beside its work? Measured in a paced run without preemptions on a small cluster.

``python -m benchmarks.fixed_costs`` prints settings of ``[simulation]``, in seconds of this machine at its present
load; the defaults are from a quiet machine. `benchmarks.updates` measures an update of a large LoRA.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean

from spotlight import config
from spotlight.config import Config
from spotlight.plan.durations import TaskDurations
from spotlight.records import Span
from spotlight.run import Run
from spotlight.store.rows import SPANS
from spotlight.store.rundir import RunDir

SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
PROMPTS, SEEDS, STEPS = 8, 4, 10
DENOISING = ("rollout", "explore-r")


def settings(directory: Path) -> Config:
    """Two reserved and two spot workers that stay: none of the clusters on which fidelity is measured."""
    return config.load(
        SETTINGS,
        [
            f"run.dir={directory}",
            "run.iterations=3",
            "run.validate_every=1000",
            "run.validation_seeds=2",
            f"rollout.prompts={PROMPTS}",
            f"rollout.seeds_kept={SEEDS}",
            f"rollout.request_seeds={SEEDS}",
            f"rollout.steps={STEPS}",
            "exploration.seeds_tried=8",
            f"exploration.request_seeds={SEEDS}",
            "exploration.rounds=2",
            "train.timesteps=2",
            "pace.gpu=h100",
            "pace.speedup=2",
            "pools.reserved.workers=2",
            "pools.spot.workers=2",
            "cluster.dashboard_port=0",
        ],
    )


def fixed_costs(run: RunDir, settings: Config) -> dict[str, float]:
    """Settings of ``[simulation]``, computed from a run without preemptions."""
    durations, spans = TaskDurations(settings), [Span(**row) for row in run.rows(SPANS)]
    train, publish = (_lasted(spans, phase) for phase in ("train", "publish"))
    cycle_s = STEPS * durations.step_s(SEEDS, 1) + durations.score_s(SEEDS)
    prepared = next(span for span in spans if span.phase == "prepare")
    after = [span for span in spans if span.start_s >= prepared.start_s]
    graphs = 3 + len(run.history())  # two validations, and the exploration before the first iteration
    return {
        "launch_s": max(0.0, mean(_cycles(spans)) - cycle_s),
        "graph_s": sum(_idle(after)) / graphs,
        "publish_s": max(0.0, mean(train) - durations.train_s(PROMPTS * SEEDS)) + mean(publish),
        "prepare_s": prepared.stop_s - prepared.start_s,
    }


def _lasted(spans: Iterable[Span], phase: str) -> list[float]:
    return [span.stop_s - span.start_s for span in spans if span.phase == phase]


def _cycles(spans: Iterable[Span]) -> Iterator[float]:
    """Seconds from the start of a worker's request to that of its next one in the same phase, if it scored in
    between."""
    mine: dict[tuple[str, str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.phase.startswith(DENOISING) and span.outcome == "done":
            mine.setdefault((span.worker, span.phase, span.iteration), []).append(span)
    for in_turn in mine.values():
        yield from (after.start_s - before.start_s for before, after in pairwise(in_turn))


def _idle(spans: Iterable[Span]) -> Iterator[float]:
    """Lengths of the periods in which no worker had a task, in seconds."""
    until_s = None
    for span in sorted(spans, key=lambda span: span.start_s):
        if until_s is not None and span.start_s > until_s:
            yield span.start_s - until_s
        until_s = max(until_s or 0.0, span.stop_s)


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="fixed-costs-") as directory:
        asked = settings(Path(directory))
        live = Run.of(asked).start()
        live.wait()
        return {name: round(seconds, 4) for name, seconds in fixed_costs(live.directory, asked).items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
