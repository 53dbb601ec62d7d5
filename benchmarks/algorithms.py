"""Which algorithm learns faster per second on the demo's job: DiffusionNFT or Flow-GRPO?

Each setting runs the whole demo for the same wall time and is then validated; the settings take turns, once for each
run seed, and a row gives a setting's median. ``python -m benchmarks.algorithms`` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import at_least
from spotlight.run import Run
from spotlight.store.rows import HISTORY, VALIDATION
from spotlight.store.rundir import RunDir

SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
SDE = ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.noise_level=0.7", "rollout.sde_window=[0, 4]"]
VARIANTS: dict[str, list[str]] = {
    "DiffusionNFT, explored": [],
    "DiffusionNFT, not explored": ["strategy.exploration=off"],
    "Flow-GRPO (SDE), explored": [*SDE, "train.clip_range=1e-3"],
    "Flow-GRPO (SDE), not explored": [*SDE, "train.clip_range=1e-3", "strategy.exploration=off"],
}


def run_for(seconds: float, overrides: list[str], seed: int) -> tuple[float, float, int]:
    """Validation scores before and after about ``seconds`` of iterations, and the number of these iterations."""
    with tempfile.TemporaryDirectory() as directory:
        common = [f"run.dir={directory}", f"run.seed={seed}", "run.iterations=200", "cluster.dashboard_port=0"]
        run = Run(SETTINGS, [*common, "run.validate_every=200", *overrides]).start()
        first_row_s = None
        while run.alive:
            time.sleep(0.2)
            if first_row_s is None and run.directory.rows(HISTORY):
                first_row_s = time.monotonic()
            if first_row_s is not None and time.monotonic() - first_row_s > seconds:
                break
        run.stop()
        _stopped(run)
        return _finish(run.directory, len(run.directory.rows(HISTORY)))  # one more may have ended


def _stopped(run: Run) -> None:
    from spotlight.records import Stopped

    try:
        run.wait()
    except Stopped:
        return


def _finish(directory: RunDir, done: int) -> tuple[float, float, int]:
    """Validate the last version: the same run with no iterations left."""
    settings = directory.path / "config.toml"
    settings.write_text(settings.read_text().replace("iterations = 200", f"iterations = {done}"))
    Run.resume(directory.path).start().wait()
    scores = directory.rows(VALIDATION)
    return scores[0]["score"], scores[-1]["score"], done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=at_least(0.0), default=40.0, help="time of iterations, after the first")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--only", default="", help="run only settings whose name contains this")
    arguments = parser.parse_args()

    variants = {name: more for name, more in VARIANTS.items() if arguments.only in name}
    if not variants:
        parser.error(f"--only: no setting's name contains {arguments.only!r}: {', '.join(VARIANTS)}")
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in variants}
    for seed in range(arguments.seeds):
        for name, overrides in variants.items():
            results[name].append(run_for(arguments.seconds, overrides, seed))
            print(f"{name}, seed {seed}: {results[name][-1]}", file=sys.stderr, flush=True)

    print(f"| setting | score before | after {arguments.seconds:.0f} s: median (min, max) | iterations |")
    print("|---|---|---|---|")
    for name, rows in results.items():
        before, after, iterations = zip(*rows, strict=True)
        spread = f"{statistics.median(after):.3f} ({min(after):.3f}, {max(after):.3f})"
        print(f"| {name} | {before[0]:.3f} | {spread} | {statistics.median(iterations):.0f} |")


if __name__ == "__main__":
    main()
