"""Seconds and dollars, against sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.market.ledger import (
    ON_DEMAND,
    Ledger,
    Price,
    absolute,
    busy_intervals,
    ledger,
    pool_seconds,
    pool_usd,
    segments,
    spot_utilisation,
)
from spotlight.records import Span, SpotlightError, WorkerLife

PRICES = {"reserved": Price.constant(10.0), "spot": Price.constant(2.5)}
H = 3600.0


def span(
    worker: str,
    start_s: float,
    stop_s: float,
    *,
    phase: str = "rollout",
    outcome: str = "done",
    uncommitted_s: float | None = None,
    redone_s: float = 0.0,
) -> Span:
    return Span(
        worker=worker,
        pool=worker.split("-")[0],
        phase=phase,
        iteration=0,
        key="k",
        start_s=start_s,
        stop_s=stop_s,
        outcome=outcome,
        uncommitted_s=uncommitted_s,
        redone_s=redone_s,
    )


def life(worker: str, joined_s: float, left_s: float | None) -> WorkerLife:
    reason = "end" if left_s is None else "lost"
    return WorkerLife(worker=worker, pool=worker.split("-")[0], joined_s=joined_s, left_s=left_s, reason=reason)


def by_kind(found: Ledger) -> dict[str, float]:
    return {kind: found.seconds(kind=kind) for kind in sorted({entry.kind for entry in found.entries})}


def test_workers_are_paid_from_joining_to_leaving_within_the_window() -> None:
    lives = [life("reserved-0", 0, None), life("spot-0", 10, 40), life("spot-1", 90, 200), life("spot-2", 150, None)]

    seconds = pool_seconds(lives, (0, 100))

    assert seconds == {"reserved": 100, "spot": 30 + 10 + 0}


def test_an_hour_of_each_worker_costs_its_pools_price() -> None:
    lives = [life("reserved-0", 0, None), life("spot-0", 0, H), life("spot-1", H / 2, None)]

    usd = pool_usd(lives, PRICES, (0, H))

    assert usd == pytest.approx({"reserved": 10.0, "spot": 1.5 * 2.5})


def test_a_price_that_changes_is_integrated_over_time() -> None:
    price = Price(times_s=(0, H, 3 * H), usd_per_h=(2.0, 5.0, 1.0))

    # Half an hour at 2, two hours at 5, a quarter of an hour at 1.
    assert price.usd(H / 2, 3.25 * H) == pytest.approx(0.5 * 2 + 2 * 5 + 0.25 * 1)


def test_the_first_price_holds_before_its_time_and_the_last_for_ever() -> None:
    price = Price(times_s=(H, 2 * H), usd_per_h=(2.0, 5.0))

    assert price.usd(0, H) == pytest.approx(2.0)
    assert price.usd(9 * H, 10 * H) == pytest.approx(5.0)


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(0, 9), min_size=6, max_size=6),
    st.lists(st.floats(-50, 150), min_size=3, max_size=3),
)
def test_splitting_a_stretch_of_time_splits_its_price(
    times_s: list[float], usd_per_h: list[float], cuts_s: list[float]
) -> None:
    price = Price(times_s=tuple(sorted(times_s)), usd_per_h=tuple(usd_per_h[: len(times_s)]))
    start_s, middle_s, stop_s = sorted(cuts_s)

    whole = price.usd(start_s, stop_s)

    assert price.usd(start_s, middle_s) + price.usd(middle_s, stop_s) == pytest.approx(whole)


def test_prices_that_count_from_the_start_begin_with_the_first_worker() -> None:
    replayed = Price(times_s=(0, 60), usd_per_h=(1.0, 3.0), since_start=True)

    moved = absolute({"spot": replayed}, [life("spot-0", 500, None), life("reserved-0", 400, None)])

    assert moved["spot"] == Price(times_s=(400, 460), usd_per_h=(1.0, 3.0))


def test_prices_of_the_calendar_stay_where_they_are() -> None:
    of_days = Price(times_s=(0, 60), usd_per_h=(1.0, 3.0))

    assert absolute({"spot": of_days}, [life("spot-0", 500, None)]) == {"spot": of_days}


def test_only_what_spot_workers_did_would_cost_the_price_on_demand() -> None:
    prices = {**PRICES, "reserved": Price.constant(1.0), ON_DEMAND: Price.constant(4.0)}  # it has no GPU
    work = [span("reserved-0", 0, H), span("spot-0", 0, H)]

    found = ledger(work, [life("reserved-0", 0, H), life("spot-0", 0, H)], prices)

    assert found.usd_reserved_only == pytest.approx(1.0 + 4.0)


def test_of_prices_whose_times_become_one_the_last_holds() -> None:
    price = Price(times_s=(0.0, 10.0, 20.0, 30.0), usd_per_h=(1.0, 2.0, 3.0, 4.0))

    assert price.at_times(lambda at_s: min(at_s, 10.0)) == Price(times_s=(0.0, 10.0), usd_per_h=(1.0, 4.0))


@pytest.mark.parametrize(("times_s", "usd_per_h"), [((), ()), ((0.0,), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0))])
def test_a_price_that_makes_no_sense_is_refused(times_s: tuple[float, ...], usd_per_h: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"times"):
        Price(times_s=times_s, usd_per_h=usd_per_h)


def test_a_price_holds_from_its_moment_on() -> None:
    price = Price(times_s=(10.0, 20.0), usd_per_h=(1.0, 3.0))

    assert [price.at(time_s) for time_s in (0.0, 10.0, 19.9, 20.0, 1e9)] == [1.0, 1.0, 1.0, 3.0, 3.0]


def test_a_worker_of_a_pool_that_has_no_price_is_named() -> None:
    with pytest.raises(SpotlightError, match=r"workers\.jsonl: x is of the pool 'other'"):
        pool_usd([WorkerLife(worker="x", pool="other", joined_s=0, left_s=1, reason="end")], {}, (0.0, 1.0))


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


def test_every_kind_of_second_has_its_column() -> None:
    spans = [
        span("spot-0", 10, 30),
        span("spot-0", 40, 60, phase="explore-r1", outcome="dropped"),
        span("spot-0", 60, 80, redone_s=5),
        span("spot-0", 80, 100, outcome="lost", uncommitted_s=8),
    ]

    found = ledger(spans, [life("spot-0", 0, 100)], PRICES, (0, 200))

    assert by_kind(found) == {
        "start-up": 10,
        "idle": 10,
        "dropped": 20,
        "redone": 5,
        "lost": 8,
        "useful": 20 + 15 + 12,
    }
    assert found.seconds(phase="explore") == 20
    assert found.usd_wasted == pytest.approx((10 + 10 + 20 + 5 + 8) * 2.5 / H)


@pytest.mark.parametrize("outcome", ["lost", "failed"])
@pytest.mark.parametrize(("uncommitted_s", "lost_s"), [(3, 3), (0, 0), (50, 20), (None, 20)])
def test_of_a_loss_all_is_wasted_but_what_was_committed(
    outcome: str, uncommitted_s: float | None, lost_s: float
) -> None:
    work = span("spot-0", 0, 20, outcome=outcome, uncommitted_s=uncommitted_s)

    found = ledger([work], [life("spot-0", 0, 20)], PRICES)

    assert found.seconds(kind="lost") == lost_s
    assert found.seconds() == 20


def test_what_was_repeated_before_a_loss_is_wasted_once() -> None:
    work = span("spot-0", 0, 20, outcome="lost", redone_s=15, uncommitted_s=8)

    found = ledger([work], [life("spot-0", 0, 20)], PRICES)

    assert by_kind(found) == {"redone": 15, "lost": 5}


def test_work_that_a_person_stopped_is_not_wasted() -> None:
    found = ledger([span("spot-0", 0, 20, outcome="stopped")], [life("spot-0", 0, 20)], PRICES)

    assert by_kind(found) == {"useful": 20}


def test_where_spans_overlap_useful_work_counts_first_and_then_the_later() -> None:
    spans = [
        span("spot-0", 3, 10, phase="explore", outcome="dropped"),
        span("spot-0", 2, 6, phase="score"),
        span("spot-0", 4, 5, phase="rollout"),
    ]

    found = ledger(spans, [life("spot-0", 2, 10)], PRICES)

    assert {entry.phase: entry.seconds for entry in found.entries} == {"explore": 4, "rollout": 1, "score": 3}


def test_a_name_that_a_later_worker_takes_over_is_two_workers() -> None:
    spans = [span("spot-0", 5, 10), span("spot-0", 32, 40)]

    found = ledger(spans, [life("spot-0", 0, 10), life("spot-0", 30, 45)], PRICES)

    assert by_kind(found) == {"start-up": 5 + 2, "useful": 5 + 8, "idle": 5}


def test_a_window_cuts_the_account_and_not_the_start_up() -> None:
    spans, lives = [span("spot-0", 10, 40)], [life("spot-0", 0, None)]

    found = ledger(spans, lives, PRICES, (5, 50))

    assert by_kind(found) == {"start-up": 5, "useful": 30, "idle": 10}


WORK = st.builds(
    span,
    st.sampled_from(["reserved-0", "spot-0", "spot-1", "spot-9"]),
    st.floats(0, 100),
    st.floats(0, 100),
    phase=st.sampled_from(["rollout", "refill", "explore-r3", "explore-score-r0", "train", "validate"]),
    outcome=st.sampled_from(["done", "dropped", "lost", "failed", "stopped"]),
    uncommitted_s=st.none() | st.floats(0, 200),
    redone_s=st.just(0.0) | st.floats(0, 200),
)
LIVES = st.builds(
    lambda worker, joined_s, lasts_s: life(worker, joined_s, None if lasts_s is None else joined_s + lasts_s),
    st.sampled_from(["reserved-0", "spot-0", "spot-1", "spot-2"]),
    st.floats(0, 100),
    st.none() | st.floats(0, 100),
)


@given(st.lists(WORK, max_size=12), st.lists(LIVES, max_size=6), st.floats(0, 100), st.floats(0, 100))
def test_the_ledger_adds_up_whatever_happened(
    spans: list[Span], lives: list[WorkerLife], start_s: float, lasts_s: float
) -> None:
    window = (start_s, start_s + lasts_s)
    prices = {"reserved": Price(times_s=(0, 40), usd_per_h=(9.0, 11.0)), "spot": Price.constant(2.5)}

    found = ledger(spans, lives, prices, window)

    assert found.seconds() == pytest.approx(sum(pool_seconds(lives, window).values()), abs=1e-9)
    assert found.usd() == pytest.approx(sum(pool_usd(lives, prices, window).values()), abs=1e-9)
    assert all(entry.seconds > 0 for entry in found.entries)


@given(st.lists(WORK, max_size=12), st.floats(0, 200))
def test_the_parts_of_a_window_add_up_to_it_column_by_column(spans: list[Span], cut_s: float) -> None:
    lives = [life("reserved-0", 0, None), life("spot-0", 20, 150)]

    whole, *parts = (ledger(spans, lives, PRICES, window) for window in ((0, 200), (0, cut_s), (cut_s, 200)))

    for entry in whole.entries:
        column = {"pool": entry.pool, "phase": entry.phase, "kind": entry.kind}
        assert sum(part.seconds(**column) for part in parts) == pytest.approx(entry.seconds, abs=1e-9)


def test_segments_of_a_worker_touch_and_do_not_overlap() -> None:
    spans = [span("spot-0", 3, 9), span("spot-0", 4, 20, phase="score"), span("spot-0", 22, 30, outcome="lost")]

    found = list(segments(spans, [life("spot-0", 0, 30)]))

    assert [each.stop_s for each in found[:-1]] == [each.start_s for each in found[1:]]
    assert (found[0].start_s, found[-1].stop_s) == (0, 30)


def test_each_life_of_a_name_has_the_work_of_its_own_time() -> None:
    """A work's record may reach into the next life, and what began later may have ended before."""
    spans = [span("spot-0", 5, 25), span("spot-0", 31, 35, phase="score"), span("spot-0", 6, 7, phase="score")]
    lives = [life("spot-0", 0, 10), life("spot-0", 20, 30), life("spot-0", 30, 40)]

    found = [(each.start_s, each.stop_s, each.phase) for each in segments(spans, lives)]

    first = [(0, 5, "start-up"), (5, 6, "rollout"), (6, 7, "score"), (7, 10, "rollout")]
    second = [(20, 25, "rollout"), (25, 30, "idle")]
    assert found == [*first, *second, (30, 31, "start-up"), (31, 35, "score"), (35, 40, "idle")]


def test_reserved_only_pays_for_useful_work_alone_at_the_reserved_price() -> None:
    spans = [
        span("reserved-0", 0, 1800, phase="train"),
        span("spot-0", 0, 900, phase="explore"),
        span("spot-0", 900, 1800, phase="explore", outcome="dropped"),
        span("spot-1", 0, 900, outcome="lost", uncommitted_s=100),
    ]

    found = ledger(spans, [life("reserved-0", 0, 3600), life("spot-0", 0, 3600), life("spot-1", 0, 900)], PRICES)

    assert found.usd_reserved_only == pytest.approx(10.0 * (1800 + 900 + 800) / H)


def test_what_dollars_bought_is_their_quotient() -> None:
    lives = [life("reserved-0", 0, H)]

    found = ledger([], lives, PRICES, iterations=4, samples=200, scores=[0.50, 0.40, 0.75])

    assert found.usd_per_iteration == pytest.approx(10.0 / 4)
    assert found.usd_per_sample == pytest.approx(10.0 / 200)
    assert found.usd_per_point == pytest.approx(10.0 / 25)


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 0.5], [0.5, 0.4]])
def test_points_that_were_not_gained_have_no_price(scores: list[float]) -> None:
    found = ledger([], [life("reserved-0", 0, H)], PRICES, scores=scores)

    assert (found.usd_per_point, found.usd_per_iteration, found.usd_per_sample) == (None, None, None)
