"""What a report's plots show is what the run's books say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotlight.report.facts import Facts, read
from spotlight.report.plots import money_plot, reward_plot, spending_plot, timeline_plot
from test_report import SPOTS, write_run


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return read(write_run(tmp_path_factory.mktemp("plots") / "run"))


def named(plot: Any) -> dict[str, Any]:
    """{name in the legend: the first thing drawn under it}; a column of plots is the first of them."""
    plot = getattr(plot, "children", [plot])[0]
    found = {item.label.value: item.renderers[0] for legend in plot.legend for item in legend.items}
    return {
        name: drawn.data_source.data | {"hatch": getattr(drawn.glyph, "hatch_pattern", None)}
        for name, drawn in found.items()
    }


@pytest.mark.parametrize("is_free", [False, True])
def test_the_bars_of_a_pool_stand_end_to_end_and_are_all_that_it_cost(facts: Facts, is_free: bool) -> None:
    entries = facts.ledger.entries
    if is_free:
        entries = tuple(replace(each, usd=0.0, usd_reserved=0.0) for each in entries)
    ledger = replace(facts.ledger, entries=entries)

    drawn = named(spending_plot(ledger))

    for pool in ("reserved", "spot"):
        bars = [
            (left, right)
            for bar in drawn.values()
            for name, left, right in zip(bar["pool"], bar["left"], bar["right"], strict=True)
            if name == pool
        ]
        assert len(bars) > 3
        assert [left for left, _ in bars] == [0.0, *(right for _, right in bars[:-1])]
        assert bars[-1][1] == pytest.approx(ledger.seconds(pool=pool) if is_free else ledger.usd(pool=pool))
    assert {name for name, bar in drawn.items() if bar["hatch"]} == {
        "idle",
        "start-up",
        "dropped exploration",
        "lost work",
    }


def test_the_curves_of_dollars_are_what_each_pool_cost_and_their_sum(facts: Facts) -> None:
    at_s, pools, reserved_only = facts.money()

    drawn = named(money_plot(facts))

    found = drawn["spot"]
    assert [*found["at"]] == [*at_s]
    np.testing.assert_allclose(found["total"], pools["reserved"] + pools["spot"])
    np.testing.assert_allclose(found["reserved_only"], reserved_only)
    assert found["reserved_only"][-1] != pytest.approx(found["total"][-1])


def test_rewards_are_drawn_at_the_versions_that_they_are_of(facts: Facts) -> None:
    drawn = named(reward_plot(facts))

    assert dict(zip(drawn["validation"]["x"], drawn["validation"]["y"], strict=True)) == {
        row.version: row.score for row in facts.validation
    }
    for name, metric in (("trained samples", "reward_mean"), ("explored seeds", "explored_reward_mean")):
        curve = facts.curve(metric)
        assert curve is not None
        assert dict(zip(drawn[name]["x"], drawn[name]["y"], strict=True)) == dict(curve)


def test_lanes_are_as_long_as_workers_were_there_with_a_cross_where_one_was_lost(facts: Facts) -> None:
    drawn, (loss,) = named(timeline_plot(facts)), facts.losses()

    lanes = [*zip(drawn["idle"]["y"], drawn["idle"]["left"], drawn["idle"]["right"], strict=True)]
    assert [(lane, (left, right)) for lane, left, right in lanes] == facts.alive()
    assert len(lanes) == 1 + SPOTS + 1
    assert ([*drawn["preempted"]["y"]], [*drawn["preempted"]["x"]]) == ([loss[0]], [loss[1]])
    outcomes, alphas = drawn["explore"]["outcome"], drawn["explore"]["alpha"]
    assert {(what, alpha < 1) for what, alpha in zip(outcomes, alphas, strict=True)} == {
        ("done", False),
        ("dropped", True),
    }


def test_a_crowded_run_is_counted_whole_and_some_of_it_is_shown_closely(tmp_path: Path) -> None:
    facts = read(write_run(tmp_path / "run", spots=150))
    counts, lanes = timeline_plot(facts).children

    source = next(each.data_source.data for each in counts.renderers if "all" in each.data_source.data)
    np.testing.assert_allclose(source["all"], sum(facts.counts()[1].values()))
    assert lanes.y_range.factors == facts.closer().lanes()[::-1]
    assert (lanes.x_range.start, lanes.x_range.end) == facts.zoom() != facts.whole
