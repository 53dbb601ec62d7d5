"""A model of Qwen-Image's size, live on a GPU: an iteration's time beside the virtual clock's, and the cost of a loss.

Three runs of a checkpoint in the published layout with random weights (41 GB; the transformer and the VAE have the
published shapes, the text encoder is small). In the first a reserved worker is alone; the same settings are then run on
the virtual clock. In the second a spot worker shares the GPU with it, and is killed (kill -9) in the middle of its
first rollout: both must have the same weights, bit for bit. In the third it explores.

``python -m benchmarks.full_size`` needs a GPU with room for two such workers (an H200) and prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import at_least
from benchmarks.target.cases import ROOT
from spotlight import config
from spotlight.config import Config
from spotlight.records import Span, base_phase
from spotlight.run import Run
from spotlight.simulation import Simulation
from spotlight.store.accounts import read_lives
from spotlight.store.rows import SPANS
from spotlight.store.rundir import RunDir

sys.path.append(str(ROOT / "tests"))

from kills import KillWorkers, client_of
from pipelines import qwen_image_as_published, tiny_qwen_image

SETTINGS = ROOT / "examples" / "presets" / "nft.toml"
PROMPTS = 4
"""Prompts in all: two of an iteration, and those of the next."""
MID_REQUEST_S, MID_TASK_S = 1.0, 0.04
"""Time after its launch at which a request of two samples at 512 px is in the middle of its steps; for a tiny one,
sooner."""
SEPARATE = ("add", "update")
"""Phases of training with a line of their own."""
RUNS = ("alone", "struck", "explored")


def settings(directory: Path, arguments: argparse.Namespace, *, spot: int, exploration: str = "off") -> Config:
    """A small iteration of the preset's recipe: eight samples, with two levels of each in training."""
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.txt"
    prompts.write_text("".join(f'A door with a number plate "{number}".\n' for number in range(10, 10 + PROMPTS)))
    return config.load(
        SETTINGS,
        [
            f"run.dir={directory}",
            f"run.iterations={arguments.iterations}",
            "run.validate_every=1000",
            "run.validation_seeds=1",
            f"data.train_prompts={prompts}",
            f"data.validation_prompts={prompts}",
            f"model.path={arguments.checkpoint}",
            *(["model.device=cpu", "model.dtype=float32"] if arguments.smoke else []),
            f"model.height_px={arguments.px}",
            f"model.width_px={arguments.px}",
            "reward.name=benchmarks.engine:SeedlessScorer",
            "rollout.prompts=2",
            "rollout.seeds_kept=4",
            "rollout.request_seeds=2",
            "exploration.seeds_tried=8",
            "exploration.request_seeds=2",
            "train.timesteps=2",
            "train.updates=1",
            "train.parts=2",
            "pools.reserved.workers=1",
            "pools.reserved.gpu=h100",
            "pools.spot.gpu=h100",
            f"pools.spot.workers={spot}",
            "pools.spot.replace_after_s=1",
            f"strategy.exploration={exploration}",
            "cluster.dashboard_port=0",
        ],
    )


def live(asked: Config, *, struck_s: float | None = None) -> RunDir:
    """Run settings live; a spot worker is killed ``struck_s`` after it began its first rollout."""
    run = Run.of(asked).start()
    if struck_s is not None:
        plugin = KillWorkers("rollout", pool="spot", count=1, after_s=struck_s)
        client_of(run).register_plugin(plugin, name="kill")
    run.wait()
    return run.directory


def phases(run: RunDir) -> list[dict[str, float]]:
    """Seconds of work of each iteration, by phase, and from its start to its end."""
    found = []
    spans = [Span(**row) for row in run.rows(SPANS)]
    for row in run.history():
        by_phase: dict[str, float] = defaultdict(float)
        for span in spans:
            if span.iteration == row.iteration and not span.phase.startswith(("prepare", "validate")):
                phase = span.phase if span.phase in SEPARATE else base_phase(span.phase)
                by_phase[phase] += span.stop_s - span.start_s
        found.append({**by_phase, "all": row.measured["stopped_s"] - row.measured["started_s"]})
    return found


def table(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """A column for each run: seconds by iteration."""
    phase_names = dict.fromkeys(name for iterations in runs.values() for each in iterations for name in each)
    yield f"| s | {' | '.join(runs)} |"
    yield "|---" * (1 + len(runs)) + "|"
    for name in phase_names:
        cells = (", ".join(f"{each.get(name, 0.0):.2f}" for each in iterations) for iterations in runs.values())
        yield f"| {name} | {' | '.join(cells)} |"


def start(run: RunDir, began_s: float) -> str:
    """A sentence on how long it took until workers had joined, and the first of them worked."""
    joined = ", ".join(f"{life.joined_s - began_s:.1f}" for life in read_lives(run))
    first_s = min(row["start_s"] for row in run.rows(SPANS))
    return f"Workers joined after {joined} s; work began after {first_s - began_s:.1f} s."


def loss(run: RunDir) -> Iterator[str]:
    """Sentences on what the killed worker left undone, and when the next one worked."""
    spans, lives = [Span(**row) for row in run.rows(SPANS)], read_lives(run)
    for span in spans:
        if span.outcome == "lost":
            undone = "nothing" if span.uncommitted_s is None else f"the last {span.uncommitted_s:.2f} s"
            yield f"Lost: {span.worker} in {span.phase}, {span.stop_s - span.start_s:.2f} s after it began: {undone}."
    for life in lives:
        if life.reason != "lost" or life.left_s is None:
            continue
        joined = [each.joined_s for each in lives if each.pool == "spot" and each.joined_s >= life.left_s]
        later = [span for span in spans if span.pool == "spot" and span.start_s > life.left_s]
        if joined and later:
            first = min(later, key=lambda span: span.start_s)
            yield (
                f"The next worker was there {min(joined) - life.left_s:.1f} s later, had its first task after "
                f"{first.start_s - life.left_s:.1f} s and had done it after {first.stop_s - life.left_s:.1f} s."
            )
    yield f"Steps that were not computed again: {sum(row.measured['steps_resumed'] for row in run.history()):.0f}."


def hashes(run: RunDir) -> list[str]:
    """Hashes of each version's weights."""
    return [row.weights_sha256 for row in run.history()]


def measure(place: Path, arguments: argparse.Namespace) -> None:
    """Make the runs that are asked for, and print what they took.

    Raises:
        AssertionError: no worker was lost, or the run with a loss has other weights than the one without.
    """
    if "alone" in arguments.runs:
        asked, began_s = settings(place / "alone", arguments, spot=0), time.time()
        alone = live(asked)
        virtual = Simulation("as configured", asked, "modelled")
        virtual.go(report=False)
        print("\nA reserved worker alone:\n")
        print("\n".join(table({"live": phases(alone), "virtual clock": phases(virtual.directory)[-1:]})))
        print(f"\n{start(alone, began_s)}", flush=True)
    if "struck" in arguments.runs:
        asked, began_s = settings(place / "struck", arguments, spot=1), time.time()
        struck = live(asked, struck_s=MID_TASK_S if arguments.smoke else MID_REQUEST_S)
        assert any(life.reason == "lost" for life in read_lives(struck)), "no worker was killed in mid-request"
        print("\nWith a spot worker on the same GPU, killed in its first rollout:\n")
        print("\n".join((*table({"live": phases(struck)}), "", start(struck, began_s), *loss(struck))), flush=True)
    if "explored" in arguments.runs:
        asked, began_s = settings(place / "explored", arguments, spot=1, exploration="stale"), time.time()
        explored = live(asked)
        scored = ", ".join(f"{row.metrics['seeds_scored']:.0f}" for row in explored.history())
        print("\nWith a spot worker on the same GPU, which explores:\n")
        ends = (start(explored, began_s), f"Candidates of each iteration: {scored}.")
        print("\n".join((*table({"live": phases(explored)}), "", *ends)), flush=True)
    if {"alone", "struck"} <= set(arguments.runs):
        assert hashes(alone) == hashes(struck), "a loss changed the weights"
        print("\nWith the loss and without it, all versions of the weights are the same bits.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=RUNS, choices=RUNS, metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument(
        "--checkpoint", type=Path, help="where the checkpoint is, or is written (a temporary directory)"
    )
    parser.add_argument(
        "--layers", type=at_least(1), default=60, help="layers of the published transformer, if it is written"
    )
    parser.add_argument("--px", type=int, default=512, help="edge of the images")
    parser.add_argument("--iterations", type=at_least(1), default=2, help="iterations of each run")
    parser.add_argument("--smoke", action="store_true", help="a tiny transformer at 32 px, on the CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.px = 32
    elif not torch.cuda.is_available():
        parser.error("there is no GPU here; --smoke does without one")
    else:
        print(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory(prefix="full-size-") as name:
        arguments.checkpoint = arguments.checkpoint or Path(name) / "checkpoint"
        if not (arguments.checkpoint / "model_index.json").exists():
            began_s = time.perf_counter()
            if arguments.smoke:
                tiny_qwen_image(arguments.checkpoint)
            else:
                qwen_image_as_published(arguments.checkpoint, arguments.layers)
            print(f"The checkpoint was written in {time.perf_counter() - began_s:.0f} s.", flush=True)
        measure(Path(name), arguments)


if __name__ == "__main__":
    main()
