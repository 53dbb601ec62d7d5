"""Whether memory grows over a long run: of the driver with its scheduler, of the workers, and of their engines.

``python -m benchmarks.soak --iterations 10000`` follows the loop, dispatcher and accounts of a live run on the virtual
clock (with ``--tiny`` in half the time); ``python -m benchmarks.soak --live --iterations 1000`` follows a live run of
tiny iterations with all its processes. Memory is level if from the hundredth iteration on nothing is kept for each
iteration. A process's unshared memory is counted, so that what engines map from their node's memory counts once at
most. Workers and engines are forked from a parent that has done the imports, and pages that they share with it become
their own as they write to them. So their anonymous memory, shared or not, is shown, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import at_least
from benchmarks.fuzz import SETTINGS
from cluster.start.local import WorkerKeeper
from spotlight import config
from spotlight.run import Run
from spotlight.simulation import Simulation
from spotlight.store.rows import HISTORY

Memory = Mapping[str, float]
"""{kind of process: MB}; of several alike, their mean."""
Tell = Callable[[int, Memory], None]
"""Called repeatedly with the number of finished iterations, and the memory now."""
WARM = 100
"""Iterations after which caches are full."""
TINY = [
    "run.validate_every=100000",
    "rollout.prompts=1",
    "rollout.seeds_kept=2",
    "rollout.request_seeds=2",
    "rollout.steps=2",
    "exploration.steps=2",
    "exploration.seeds_tried=2",
    "exploration.request_seeds=2",
    "exploration.rounds=1",
    "pools.spot.workers=1",
    "cluster.dashboard_port=0",
]
"""Settings with which a live iteration takes a moment: as many things are kept for each as usual, if smaller ones."""
LOOK_S = 0.2


def simulated(iterations: int, every: int, tell: Tell, overrides: Sequence[str] = ()) -> None:
    """Follow a run on the virtual clock, in this one process."""
    told = 0

    def follow(name: str, iteration: int, hours: float) -> None:
        nonlocal told
        if iteration >= told + every:
            told = iteration
            gc.collect()
            tell(iteration, {"all": _mb(psutil.Process())})

    with _settings(iterations) as (settings, common):
        Simulation("soak", config.load(settings, [*common, *overrides]), "modelled", follow).go(report=False)


def live(iterations: int, every: int, tell: Tell) -> None:
    """Follow a live run on this machine."""
    with _settings(iterations) as (settings, common):
        run = Run(settings, [*common, *TINY]).start()
        told = 0
        try:
            while run.alive:
                done = run.directory.count(HISTORY) if run.state == "running" else 0
                if done >= told + every and (found := _of(run)):
                    told = done
                    tell(done, found)
                time.sleep(LOOK_S)
            run.wait()
        finally:
            run.stop()
            with suppress(Exception):  # which is told above
                run.wait()


@contextmanager
def _settings(iterations: int) -> Iterator[tuple[Path, list[str]]]:
    """A settings file in a directory of its own, and what both kinds of run have in common."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "run.toml"
        settings.write_text(SETTINGS)
        yield settings, [f"run.dir={directory}", f"run.iterations={iterations}", "run.validate_every=1000"]


def _of(run: Run) -> Memory:
    """Memory of all processes of a run; empty while it is starting or ending."""
    if run.pools is None or run.pools.cluster is None:
        return {}
    places = [place for place in run.pools.cluster.workers.values() if isinstance(place, WorkerKeeper)]
    workers = {place._process.pid for place in places if place._process}
    found: defaultdict[str, list[float]] = defaultdict(list)
    me = psutil.Process()
    found["driver and scheduler"].append(_mb(me))
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            who = "a worker" if process.pid in workers else "an engine" if process.parent() != me else ""
            if who:
                memory = process.memory_info()
                found[who].append(_mb(process))
                found[f"{who} with what is shared"].append((memory.rss - memory.shared) / 1e6)
    return {who: sum(each) / len(each) for who, each in found.items()}


def _mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().uss) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=at_least(1), default=10_000)
    parser.add_argument("--live", action="store_true", help="a live run, of tiny iterations")
    parser.add_argument("--tiny", action="store_true", help="tiny iterations on the virtual clock, as live ones are")
    parser.add_argument("--every", type=at_least(1), help="iterations between two looks (a twentieth of all)")
    parser.add_argument("--save", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    every = arguments.every or max(1, min(WARM, arguments.iterations // 20))
    rows: list[tuple[int, Memory]] = []

    def tell(iteration: int, memory: Memory) -> None:
        if not rows:
            print(f"| iterations | {' | '.join(f'{who}, MB' for who in memory)} |\n|---|{'---|' * len(memory)}")
        rows.append((iteration, memory))
        print(f"| {iteration} | {' | '.join(f'{mb:.1f}' for mb in memory.values())} |", flush=True)
        if arguments.save:
            took_s = round(time.monotonic() - began_s, 1)
            arguments.save.write_text(json.dumps({"live": arguments.live, "s": took_s, "mb": rows}) + "\n")

    if arguments.live:
        live(arguments.iterations, every, tell)
    else:
        simulated(arguments.iterations, every, tell, TINY if arguments.tiny else ())
    print(f"\n{time.monotonic() - began_s:.0f} s")
    for who, growth in growths(rows).items():
        print(f"{who}: {growth:+.1%} since iteration {WARM}")


def growths(rows: list[tuple[int, Memory]]) -> Mapping[str, float]:
    """{kind of process: growth from the first look after the hundredth iteration to the last one, as a share}"""
    warm = [memory for iteration, memory in rows if iteration >= WARM]
    return {who: warm[-1][who] / warm[0][who] - 1 for who in warm[0]} if warm else {}


if __name__ == "__main__":
    main()
