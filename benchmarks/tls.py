"""What TLS costs: the same iterations on two clusters, one with it and one without, in turn.

Both clusters are up all the time, and one of them works at a time, so that other load on the machine affects both
alike. An iteration has half of the demo's samples and a quarter of its candidates, and takes two thirds as long, so TLS
weighs more here than there. The figure is the median of the pairs' ratios, with its 95 % interval by resampling the
pairs. CPU seconds are those of all processes: other load changes them little. ``python -m benchmarks.tls`` prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Semaphore
from typing import Any

import psutil

from benchmarks import NoWatch, at_least
from cluster.certificate import certificate
from cluster.start.run_cluster import RunCluster
from graphs.layers import Graph
from graphs.loop import Loop
from spotlight import config
from spotlight.store.creating import create_run

SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
TLS = (True, False)
RESAMPLED = 2000


class Side:
    """A run with a cluster of its own, which computes one graph per turn."""

    def __init__(self, directory: Path, overrides: Sequence[str], pass_on: Callable[[], None]) -> None:
        settings = config.load(SETTINGS, [f"run.dir={directory}", *overrides])
        self.run = create_run(settings, time.time())
        self.pools = RunCluster(settings, self.run.path)
        self.turn = Semaphore(0)
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        """CPU seconds of each iteration, by all processes."""
        self._pass_on = pass_on
        self._is_stopped = False

    def stop(self) -> None:
        """Have it end instead of waiting for a turn that does not come."""
        self._is_stopped = True
        self.turn.release()

    def go(self) -> None:
        Loop(self.run, self._compute, NoWatch()).go()

    def _compute(self, graph: Graph) -> Mapping[str, Any]:
        self.turn.acquire()
        if self._is_stopped:
            raise CancelledError("the other cluster failed")
        try:
            before_s, started_s = cpu_s(), time.perf_counter()
            results = self.pools.client.get(graph.graph, list(graph.outputs.values()))
            if "published" in graph.outputs:
                self.wall_s.append(time.perf_counter() - started_s)
                self.cpu_s.append(cpu_s() - before_s)
            return dict(zip(graph.outputs, results, strict=True))
        finally:
            self._pass_on()


def cpu_s() -> float:
    """CPU seconds so far of this process, and of those that it started and that still run."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(iterations: int) -> dict[bool, Side]:
    """Run both, the same number of graphs each."""
    common = [
        f"run.iterations={iterations}",
        f"run.validate_every={iterations}",
        "rollout.prompts=4",
        "exploration.seeds_tried=16",
        'exploration.budget="fixed"',
        "cluster.dashboard_port=0",
    ]
    with ExitStack() as stack:
        sides: dict[bool, Side] = {}
        for tls in TLS:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = [*common, f"cluster.tls={str(tls).lower()}"]
            sides[tls] = Side(directory, settings, lambda other=not tls: sides[other].turn.release())  # type: ignore[misc]
            stack.callback(sides[tls].pools.close)
        sides[True].turn.release()
        with ThreadPoolExecutor(len(sides)) as threads:
            ended, _ = wait((threads.submit(side.go) for side in sides.values()), return_when=FIRST_EXCEPTION)
            for side in sides.values():
                side.stop()
            for each in ended:
                each.result()
    return sides


def certificate_s() -> float:
    """Median seconds to make a run's key and certificate, which vary at random."""
    seconds = []
    for _ in range(20):
        started_s = time.perf_counter()
        certificate()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median of such ratios, by the bootstrap."""
    chance = random.Random(0)
    medians = [statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED)]
    *_, high = cuts = statistics.quantiles(medians, n=40)
    return cuts[0], high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=at_least(3), default=60, help="of each cluster; the first is not counted")
    parser.add_argument("--save", type=Path, help="also write every iteration's seconds to this JSON file")
    arguments = parser.parse_args()

    sides = measure(arguments.iterations)
    if arguments.save:
        rows = [{"tls": tls, "wall_s": side.wall_s, "cpu_s": side.cpu_s} for tls, side in sides.items()]
        arguments.save.write_text(json.dumps(rows) + "\n")
    print("| of an iteration | with TLS, s | without, s | with / without: median (95 %) | quartiles of the pairs |")
    print("|---|---|---|---|---|")
    for name in ("wall_s", "cpu_s"):
        tls, plain = (getattr(sides[side], name)[1:] for side in TLS)  # the first loads models
        ratios = [secured / bare for secured, bare in zip(tls, plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lowest, highest = interval(ratios)
        seconds = f"{statistics.median(tls):.3f} | {statistics.median(plain):.3f}"
        print(f"| {name} | {seconds} | {middle:.4f} ({lowest:.4f} to {highest:.4f}) | {low:.3f} to {high:.3f} |")
    print(
        f"\n{arguments.iterations - 1} pairs. A run's key and certificate take {certificate_s():.2f} s to make, once."
    )


if __name__ == "__main__":
    main()
