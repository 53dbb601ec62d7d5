"""Do the decisions keep up with a thousand GPUs? Seconds to simulate a day of them, milliseconds to plan for them.

CPU seconds of one process with one thread, so that other work on the machine counts little. ``python -m
benchmarks.scale`` prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from math import ceil
from pathlib import Path

from benchmarks import at_least
from spotlight.config import Config, load
from spotlight.plan.placement import Idle, View, Waiting, plan
from spotlight.records import Pool
from spotlight.simulation import Simulation
from spotlight.store.rows import SPANS

LARGE = Path(__file__).parents[1] / "examples" / "large.toml"
WORKERS, NODE, REQUESTS = 1_000, 8, 10_000
PLAN_GOAL_MS, SIMULATE_GOAL_S = 10.0, 60.0
ANY: tuple[Pool, ...] = ("reserved", "spot")


def view(idle: int, widths: tuple[int, ...], *, broken: int = 0) -> View:
    """A view with so many idle workers, and a full queue: a third of it rollouts, the rest exploration.

    Idle workers are spread over the nodes as a wave leaves them: whole nodes if all are idle.
    """
    nodes = [f"node-{index // NODE}" for index in range(WORKERS)]
    pools: list[Pool] = ["reserved" if index < WORKERS // 5 else "spot" for index in range(WORKERS)]
    chosen = range(0, WORKERS, WORKERS // idle)
    waiting = tuple(
        Waiting(
            id=f"{order:05d}",
            pools=ANY if order % 3 == 0 else ("spot",),
            order=order,
            exploring=order % 3 != 0,
            begun=order < broken,
            widths=widths,
            slots=widths[-1],
        )
        for order in range(REQUESTS)
    )
    sizes = Counter(zip(pools, nodes, strict=True))
    workers = tuple(Idle(worker=f"{nodes[i]}/{i % NODE}", pool=pools[i], node=nodes[i]) for i in chosen)
    return View(idle=workers, waiting=waiting, alive=sizes)


CASES = {
    "all idle, width 1": view(WORKERS, (1,)),
    "all idle, widths 1 to 8": view(WORKERS, (1, 2, 4, 8)),
    "all idle, width 8 only": view(WORKERS, (8,)),
    "all idle, 100 broken gangs": view(WORKERS, (1, 2, 4, 8), broken=100),
    "one node's worth idle": view(NODE, (1, 2, 4, 8)),
    "one idle per node, width 8 only: nothing fits": view(WORKERS // NODE, (8,)),
}


def plan_ms(case: View, turns: int) -> list[float]:
    """CPU milliseconds of each of so many plans, sorted."""
    taken = []
    for _ in range(turns):
        start_s = time.process_time()
        plan(case)
        taken.append(1000 * (time.process_time() - start_s))
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=at_least(1), default=200, help="plans per case")
    parser.add_argument("--hours", type=float, default=24.0, help="hours to simulate; 0: none")
    arguments = parser.parse_args()

    gc.collect()
    gc.freeze()  # the cases are not the garbage of a plan
    print(f"`plan` with {WORKERS:,} workers and {REQUESTS:,} waiting requests; goal: p99 <= {PLAN_GOAL_MS:g} ms\n")
    print("| case | launches | median | p99 |\n|---|---|---|---|")
    for name, case in CASES.items():
        taken = plan_ms(case, arguments.turns)
        p99 = taken[ceil(0.99 * len(taken)) - 1]
        print(f"| {name} | {len(plan(case))} | {statistics.median(taken):.1f} ms | {p99:.1f} ms |", flush=True)
    if arguments.hours:
        print_simulation(load(LARGE, [f"simulation.hours={arguments.hours}"]))


def print_simulation(settings: Config) -> None:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="scale-") as directory:
        run = settings.run.model_copy(update={"dir": directory})
        simulation = Simulation("Spotlight", settings.model_copy(update={"run": run}), "modelled")
        outcome = simulation.go(report=False)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        spans = simulation.directory.count(SPANS)
    print(f"\nSimulating {LARGE.name}; goal: {SIMULATE_GOAL_S:g} s for 24 h on one core\n")
    print("| simulated | iterations | spans | preempted GPUs | CPU | wall |\n|---|---|---|---|---|---|")
    print(
        f"| {outcome.hours:.1f} h | {outcome.iterations} | {spans:,} | {outcome.preemptions} "
        f"| {cpu_s:.1f} s | {wall_s:.1f} s |"
    )


if __name__ == "__main__":
    main()
