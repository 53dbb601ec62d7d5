"""A long run takes no more memory as it goes on: nothing is kept for each iteration."""

from __future__ import annotations

import gc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from benchmarks.fuzz import SETTINGS
from spotlight import config
from spotlight.records import Span
from spotlight.simulation import Simulation
from spotlight.store.rows import DECISIONS

FIRST, LAST = 40, 90
"""Iterations between which the objects are counted; the first fills what is bounded."""


def counted() -> Counter[str]:
    """How many objects of each type this process holds."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def grown(directory: Path) -> Counter[str]:
    """How many more objects of each type a simulation holds at the last iteration than at the first."""
    counts = dict[int, Counter[str]]()

    def follow(name: str, iteration: int, hours: float) -> None:
        if iteration in (FIRST, LAST) and iteration not in counts:
            counts[iteration] = counted()

    settings = directory / "run.toml"
    settings.write_text(SETTINGS)
    overrides = [f"run.dir={directory}", f"run.iterations={LAST + 2}", "run.validate_every=1000"]
    with (  # what the page of the dashboard may ask for is bounded, too
        patch("spotlight.store.accounts.FOLD_SPANS", 500),
        patch("cluster.dispatch.journal.SHOWN", 50),
        patch("cluster.dispatch.journal.RECENT", 50),
    ):
        Simulation("soak", config.load(settings, overrides), "modelled", follow).go(report=False)
    assert counts[LAST][Span.__name__] < 700
    counts[LAST].subtract(counts[FIRST])
    return counts[LAST]


def test_nothing_is_kept_for_each_iteration(tmp_path: Path) -> None:
    """In a process of its own: threads that other tests left may still hold, or free, something here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        more = alone.submit(grown, tmp_path).result()

    assert {kind: count for kind, count in more.items() if count > 2 * (LAST - FIRST) and kind != Span.__name__} == {}


def test_of_many_requests_each_costs_the_log_as_much_as_of_few(tmp_path: Path) -> None:
    """It has what changed; who waits, each time anew, would be quadratic."""

    def bytes_each(prompts: int, seeds: int) -> float:
        settings = tmp_path / "run.toml"
        settings.write_text(SETTINGS)
        counted = ["rollout.request_seeds=1", f"rollout.prompts={prompts}", f"rollout.seeds_kept={seeds}"]
        run = [f"run.dir={tmp_path}", "run.iterations=1", "run.validate_every=1", "strategy.exploration=off"]
        simulation = Simulation("log", config.load(settings, [*run, *counted]), "modelled")
        simulation.go(report=False)
        return (simulation.directory.path / DECISIONS).stat().st_size / (prompts * seeds)

    assert bytes_each(64, 16) < 1.1 * bytes_each(32, 4)
