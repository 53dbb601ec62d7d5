"""What the whole system costs compared with a bare loop of the same model and batch, on one worker.

Both run on the same worker, in turn, several times: the bare loop in the worker's process, the system in its
engine's. The figure is the median of the pairs' ratios. ``python -m benchmarks.overhead`` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import at_least
from cluster.start.run_cluster import RunCluster
from graphs.iteration import prepare_graph
from graphs.layers import Layers
from graphs.tasks import sampling
from graphs.tasks.context import RunContext
from spotlight import config
from spotlight.records import Request
from spotlight.rl.prompts import read_prompts
from spotlight.run import Run
from spotlight.store.creating import create_run
from spotlight.store.rows import HISTORY

SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
REQUESTS = 12
"""Requests per turn: enough that the latency of the first one and of the graph hardly counts."""


def bare_loop(run_dir: str, requests: Sequence[Request]) -> float:
    """Denoise requests with the bare model; returns seconds. Runs on the worker."""
    import torch

    from spotlight.device.engine import InProcess
    from spotlight.rl import flow

    engine = InProcess().engine(run_dir)
    engine.resident.use(requests[0].weights)
    started_s = time.perf_counter()
    with torch.no_grad():
        for request in requests:
            text = engine.model.encode([request.prompt.text]).rows([0] * len(request.seeds))
            tokens, channels = engine.model.latent_shape(request.height_px, request.width_px)
            x_BNC = flow.initial_noise(request.seeds, tokens, channels)
            for sigma, sigma_next in zip(request.sigmas, request.sigmas[1:], strict=False):
                sigma_B = torch.full((len(request.seeds),), sigma)
                size = {"height_px": request.height_px, "width_px": request.width_px}
                v_BNC = engine.model.velocity(x_BNC, sigma_B, text, guidance=1.0, **size)
                x_BNC = flow.ode_step(x_BNC, v_BNC, sigma, sigma_next)
    return time.perf_counter() - started_s


def whole_system(pools: RunCluster, run_dir: str, requests: Sequence[Request], turn: int) -> float:
    """Run the same requests through graph, gate, commits and results; returns seconds."""
    layers = Layers()
    calls = [(sampling.rollout_shard, run_dir, request) for request in requests]
    shards = layers.add_requests("rollout", turn, calls, pool="any", widths=[1])
    started_s = time.perf_counter()
    pools.client.get(layers.graph(), shards)
    return time.perf_counter() - started_s


def measure(batch: int, steps: int, turns: int) -> tuple[float, float, list[float]]:
    """Seconds per request (bare, median), seconds per request (system, median), throughput ratios by turn."""
    with tempfile.TemporaryDirectory() as directory:
        settings = config.load(
            SETTINGS,
            [
                f"run.dir={directory}",
                f"rollout.steps={steps}",
                "pools.spot.workers=0",
                'strategy.exploration="off"',
                "cluster.dashboard_port=0",
            ],
        )
        run = create_run(settings, time.time())
        pools = RunCluster(settings, run.path)
        try:
            graph = prepare_graph(str(run.path))
            context: RunContext = pools.client.get(graph.graph, graph.outputs["context"])
            template = _template(settings, context)
            bare, system = [], []
            for turn in range(turns + 1):
                first = turn * REQUESTS * batch
                requests = [
                    replace(template, seeds=tuple(range(first + n * batch, first + (n + 1) * batch)))
                    for n in range(REQUESTS)
                ]
                bare.append(pools.client.submit(bare_loop, str(run.path), requests, resources={"reserved": 1}).result())
                system.append(whole_system(pools, str(run.path), requests, turn))
        finally:
            pools.close()
    ratios = [alone / ours for alone, ours in zip(bare[1:], system[1:], strict=True)]  # the first turn warms up
    return statistics.median(bare[1:]) / REQUESTS, statistics.median(system[1:]) / REQUESTS, ratios


def iteration_stretch(iterations: int) -> list[float]:
    """For each iteration of the demo: wall seconds / (busy worker seconds / workers), 1 if no worker ever waits."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"run.dir={directory}", f"run.iterations={iterations}", "cluster.dashboard_port=0"]
        run = Run(SETTINGS, overrides).start()
        run.wait()
        rows = [row["measured"] for row in run.directory.rows(HISTORY)]
    busy = [[value for name, value in row.items() if name.startswith("busy_s.")] for row in rows]
    # The first iteration loads models, the last does not explore.
    return [row["wall_s"] / statistics.fmean(seconds) for row, seconds in zip(rows[1:-1], busy[1:-1], strict=True)]


def _template(settings: config.Config, context: RunContext) -> Request:
    from graphs.requests import rollout_requests, unexplored

    prompts = read_prompts(settings.data.train_prompts)[:1]
    return rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=at_least(1), default=7)
    parser.add_argument(
        "--iterations", type=at_least(3), default=12, help="of the demo; the first and the last are not counted"
    )
    arguments = parser.parse_args()

    print(
        "| batch x steps | bare, s per request | system, s per request | throughput, system / bare (min, median, max) |"
    )
    print("|---|---|---|---|")
    for batch, steps in ((8, 8), (32, 8), (128, 8), (512, 8)):
        bare_s, system_s, ratios = measure(batch, steps, arguments.turns)
        spread = f"{min(ratios):.3f}, {statistics.median(ratios):.3f}, {max(ratios):.3f}"
        print(f"| {batch} x {steps} | {bare_s:.3f} | {system_s:.3f} | {spread} |", flush=True)
    stretch = iteration_stretch(arguments.iterations)
    print(
        f"\nIteration of the demo, wall seconds / (busy worker seconds / workers): median "
        f"{statistics.median(stretch):.2f} over {len(stretch)} iterations"
    )


if __name__ == "__main__":
    main()
