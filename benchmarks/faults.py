"""Does the dispatcher keep its invariants under any faults? Thousands of fault schedules, each drawn from a seed.

``python -m benchmarks.faults --schedules N`` prints a table in Markdown, and for each schedule that broke an invariant
the command that replays it: ``python -m benchmarks.faults --seed SEED --trace``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pprint import pprint
from typing import Any

from benchmarks import at_least
from cluster.virtual.faults import Verdict, draw, verdict

CHUNK = 200
"""Schedules that a process gets at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Results of some schedules."""

    events: int
    virtual_s: float
    broken: dict[int, tuple[str, ...]]
    """{seed: violations}, of schedules that have any."""


def count(seeds: range) -> Count:
    verdicts = {seed: verdict(draw(seed)) for seed in seeds}
    return Count(
        events=sum(found.events for found in verdicts.values()),
        virtual_s=sum(found.virtual_s for found in verdicts.values()),
        broken={seed: found.violations for seed, found in verdicts.items() if found.violations},
    )


def counts(seeds: range, processes: int) -> Iterator[Count]:
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    if processes == 1:
        yield from map(count, chunks)
    else:
        with ProcessPoolExecutor(processes) as pool:
            yield from pool.map(count, chunks)


def replay(seed: int, *, trace: bool) -> Verdict:
    """Run one schedule again, and print it."""
    schedule = draw(seed)
    pprint(schedule, width=120)
    log: list[dict[str, Any]] = []
    found = verdict(schedule, log=log)
    for row in log if trace else ():
        if row.get("is") != "TimePassed" or "then" in row:
            print(json.dumps(row))
    for violation in found.violations:
        print(f"violated: {violation}")
    print(f"seed {seed}: {found.events} events in {found.virtual_s:.1f} s, {len(found.violations)} violations")
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=at_least(1), default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first schedule")
    parser.add_argument("--processes", type=at_least(1), default=1)
    parser.add_argument("--seed", type=int, help="run only this schedule, and print it")
    parser.add_argument("--trace", action="store_true", help="with --seed: print its events and instructions")
    arguments = parser.parse_args(given)
    if arguments.seed is not None:
        sys.exit(bool(replay(arguments.seed, trace=arguments.trace).violations))

    started_s = time.perf_counter()
    events, virtual_s, broken = 0, 0.0, 0
    for counted in counts(range(arguments.first, arguments.first + arguments.schedules), arguments.processes):
        events, virtual_s, broken = events + counted.events, virtual_s + counted.virtual_s, broken + len(counted.broken)
        for seed, violations in counted.broken.items():
            print(f"python -m benchmarks.faults --seed {seed}  # {violations[0]}", flush=True)
    seconds = time.perf_counter() - started_s
    print("| schedules | events | virtual hours | seconds | with violations |\n|---|---|---|---|---|")
    print(f"| {arguments.schedules:,} | {events:,} | {virtual_s / 3600:,.1f} | {seconds:,.0f} | {broken} |")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
