"""A long run takes no more memory as it goes on: nothing is kept for each iteration."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fuzz import SETTINGS
from spotlight import config
from spotlight.records import Span
from spotlight.simulation import Simulation
from spotlight.store.rows import DECISIONS

FIRST, LAST = 40, 90
"""Iterations between which the objects are counted; the first fills what is bounded."""


def counted() -> Counter[type]:
    """How many objects of each type this process holds."""
    gc.collect()
    return Counter(type(each) for each in gc.get_objects())


def test_nothing_is_kept_for_each_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.store.accounts.FOLD_SPANS", 500)
    for bound in ("SHOWN", "RECENT"):  # what the page of the dashboard may ask for is bounded, too
        monkeypatch.setattr(f"cluster.dispatch.journal.{bound}", 50)
    counts = {0: counted()}

    def follow(name: str, iteration: int, hours: float) -> None:
        if iteration in (FIRST, LAST) and iteration not in counts:
            counts[iteration] = counted()

    settings = tmp_path / "run.toml"
    settings.write_text(SETTINGS)
    overrides = [f"run.dir={tmp_path}", f"run.iterations={LAST + 2}", "run.validate_every=1000"]
    Simulation("soak", config.load(settings, overrides), "modelled", follow).go(report=False)

    grown = {kind: count - counts[FIRST][kind] for kind, count in counts[LAST].items()}
    assert counts[LAST][Span] - counts[0][Span] < 700  # other tests of this process may hold some of theirs
    assert {kind: count for kind, count in grown.items() if count > 2 * (LAST - FIRST) and kind is not Span} == {}


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
