"""How much memory a long run takes as it goes on: the loop, dispatcher and accounts of a live one on the virtual clock.

``python -m benchmarks.soak --iterations 10000`` prints what the process holds after every tenth of the way. Level means
that from the hundredth iteration on nothing is kept for each of them.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.fuzz import SETTINGS
from spotlight import config
from spotlight.simulation import Simulation


def memory_mb(iterations: int, every: int, *overrides: str) -> Iterator[tuple[int, float]]:
    """``(iterations finished, MB that the process holds)``, time and again."""
    found: list[tuple[int, float]] = []

    def follow(name: str, iteration: int, hours: float) -> None:
        if iteration % every == 0 and iteration and (not found or found[-1][0] != iteration):
            gc.collect()
            found.append((iteration, psutil.Process().memory_info().rss / 1e6))

    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "run.toml"
        settings.write_text(SETTINGS)
        common = [f"run.dir={directory}", f"run.iterations={iterations}", "run.validate_every=1000"]
        Simulation("soak", config.load(settings, [*common, *overrides]), "modelled", follow).go(report=False)
    yield from found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10_000)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    print("| iterations | MB |\n|---|---|")
    for iteration, mb in memory_mb(arguments.iterations, max(1, arguments.iterations // 10)):
        print(f"| {iteration} | {mb:.1f} |")
    print(f"\n{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
