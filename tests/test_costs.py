"""Seconds and dollars, against sums done by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.costs import (
    Span,
    WorkerLife,
    busy_intervals,
    dollars,
    life_from_json,
    pool_seconds,
    reserved_only_usd,
    span_from_json,
    spot_utilisation,
)


def span(worker: str, start_s: float, stop_s: float, *, phase: str = "rollout", outcome: str = "done") -> Span:
    pool = worker.split("-")[0]
    return Span(
        worker=worker, pool=pool, phase=phase, iteration=0, key="k", start_s=start_s, stop_s=stop_s, outcome=outcome
    )


def life(worker: str, joined_s: float, left_s: float | None) -> WorkerLife:
    reason = "end" if left_s is None else "lost"
    return WorkerLife(worker=worker, pool=worker.split("-")[0], joined_s=joined_s, left_s=left_s, reason=reason)


def test_workers_are_paid_from_joining_to_leaving_within_the_window() -> None:
    lives = [life("reserved-0", 0, None), life("spot-0", 10, 40), life("spot-1", 90, 200), life("spot-2", 150, None)]

    seconds = pool_seconds(lives, (0, 100))

    assert seconds == {"reserved": 100, "spot": 30 + 10 + 0}


def test_an_hour_of_each_pool_costs_the_sum_of_their_prices() -> None:
    prices = {"reserved": 10.0, "spot": 2.5}

    usd = dollars({"reserved": 3600, "spot": 2 * 3600}, prices)

    assert usd == pytest.approx(10.0 + 2 * 2.5)


def test_reserved_only_pays_for_all_work_but_dropped_exploration() -> None:
    spans = [
        span("reserved-0", 0, 1800, phase="train"),
        span("spot-0", 0, 900, phase="explore"),
        span("spot-0", 900, 1800, phase="explore", outcome="dropped"),
        span("spot-1", 0, 900, outcome="lost"),
    ]

    usd = reserved_only_usd(spans, 8.0)

    assert usd == pytest.approx(8.0 * (1800 + 900 + 900) / 3600)


def test_a_span_inside_a_span_counts_once() -> None:
    spans = [span("spot-0", 0, 10), span("spot-0", 2, 5, phase="score"), span("spot-0", 10, 12), span("spot-0", 20, 30)]

    assert busy_intervals(spans) == {"spot-0": [(0, 12), (20, 30)]}


def test_utilisation_is_the_busy_share_of_spot_time_alone() -> None:
    lives = [life("reserved-0", 0, None), life("spot-0", 0, None), life("spot-1", 50, 100)]
    spans = [span("reserved-0", 0, 100), span("spot-0", 0, 60), span("spot-1", 80, 110, outcome="lost")]

    share = spot_utilisation(spans, lives, (0, 100))

    assert share == pytest.approx((60 + 20) / (100 + 50))


def test_utilisation_without_spot_workers_is_zero() -> None:
    assert spot_utilisation([span("reserved-0", 0, 5)], [life("reserved-0", 0, None)], (0, 5)) == 0


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=8), st.floats(0, 100))
def test_splitting_the_window_splits_the_price(times: list[tuple[float, float]], cut_s: float) -> None:
    spans = [span("spot-0", start_s, start_s + lasts_s) for start_s, lasts_s in times]

    whole = reserved_only_usd(spans, 3.0, (0, 100))

    parts = reserved_only_usd(spans, 3.0, (0, cut_s)) + reserved_only_usd(spans, 3.0, (cut_s, 100))
    assert parts == pytest.approx(whole)


def test_records_survive_json_and_ignore_fields_they_do_not_know() -> None:
    one, other = span("spot-0", 1.5, 2.5), life("spot-0", 1.0, None)

    sent = [json.loads(json.dumps(asdict(record) | {"node": "n0"})) for record in (one, other)]

    assert (span_from_json(sent[0]), life_from_json(sent[1])) == (one, other)
