"""A run's accounts: sums of what is long over, the end of a run, and journals that were damaged."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spotlight.records import Drained, SpotlightError
from spotlight.store.accounts import Accounts
from spotlight.store.rows import HISTORY, SPANS, WORKERS
from test_accounts import START_S, H, books, drained, life, open_run, span


def test_iterations_measure_the_same_though_earlier_ones_are_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some work lasts from one iteration into the next, and some losses are told of before theirs is measured."""
    chance, end_s = random.Random(0), START_S + 3000

    def account(name: str) -> tuple[Accounts, list[dict[str, float]]]:
        kept, rows = books(open_run(tmp_path / name)), []
        chance.seed(1)
        for k in range(30):
            spans = [
                span(worker, 100 * k + at, 100 * k + at + chance.uniform(1, 9), phase)
                for worker in ("reserved-0", "spot-0", "spot-1")
                for at, phase in ((5, "rollout"), (50, "explore-score-r0"), (97, "explore-r0"))
            ]
            told = drained(spans, [life(worker, 0, None) for worker in ("reserved-0", "spot-0", "spot-1")])
            broken: dict[str, Any] = {"gang": f"g{k}", "event": "broken", "at_s": START_S + 100 * k + 101}
            stepped = broken | {"event": "stepped", "at_s": broken["at_s"] + 1}
            kept.take(Drained(spans=told.spans, workers=told.workers, events=[broken, stepped]))
            rows.append(kept.measure(START_S + 100 * k, START_S + 100 * (k + 1)))
        return kept, rows

    whole, expected = account("whole")
    monkeypatch.setattr("spotlight.store.accounts.FOLD_SPANS", 20)
    folded, measured = account("folded")

    assert len(folded._spans) < 40 < len(whole._spans)
    assert [row["gangs_broken"] for row in expected] == [0] + [1] * 29
    assert [pytest.approx(row) for row in expected] == measured
    for found, wanted in zip(folded.ledger(end_s).entries, whole.ledger(end_s).entries, strict=True):
        assert asdict(found) == pytest.approx(asdict(wanted))


def test_what_a_run_cost_at_its_end_is_counted_to_its_end(tmp_path: Path) -> None:
    """Also where a display has just asked; and nothing goes on any more."""
    kept = books(open_run(tmp_path))
    kept.take(drained([span("spot-0", 1, 5)], [life("spot-0", 0, None)]))
    kept.measure(START_S, START_S + 10)
    kept.running = {"validate": 1}
    shown = [kept.money(START_S + at_s) for at_s in (10, 20)]

    kept.close(START_S + 30)

    assert [each["ledger_s"] for each in shown] == [START_S + 10] * 2
    assert kept.ledger(START_S + 30).seconds() == 30
    assert kept.running == {}


def test_workers_that_left_after_all_work_are_paid_for_whatever_the_clock_says(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(SPANS, span("reserved-0", 10, 100))
    run.append(WORKERS, life("reserved-0", 0, 120, "end"))

    assert books(run).until_s(START_S) == START_S + 120


@pytest.mark.parametrize(
    ("journal", "wrong", "says"),
    [
        (SPANS, {"start_s": -1.0}, "start_s: expected seconds from 0 to"),
        (SPANS, {"stop_s": 1e30}, "stop_s: expected seconds from 0 to"),
        (SPANS, {"uncommitted_s": -5.0}, "uncommitted_s: expected seconds from 0 to"),
        (SPANS, {"redone_s": 1e30}, "redone_s: expected seconds from 0 to"),
        (SPANS, {"pool": "sopt"}, r"pool: expected one of \('reserved', 'spot', 'reward'\), found 'sopt'"),
        (WORKERS, {"joined_s": -1.0}, "joined_s: expected seconds from 0 to"),
        (WORKERS, {"left_s": 1e30}, "left_s: expected seconds from 0 to"),
        (WORKERS, {"pool": "sopt"}, "pool: expected one of"),
    ],
)
def test_a_time_that_no_clock_shows_and_a_pool_that_is_none_are_named_by_line(
    tmp_path: Path, journal: str, wrong: dict[str, Any], says: str
) -> None:
    run = open_run(tmp_path)
    good = span("spot-0", 1, 5) if journal == SPANS else life("spot-0", 0, 9, "lost")
    run.append(journal, good, good | wrong)

    with pytest.raises(SpotlightError, match=rf"{journal}:2: {says}"):
        books(run)


def test_the_first_image_is_of_what_makes_images_and_all_scoring_is_one_phase(tmp_path: Path) -> None:
    kept = books(open_run(tmp_path))
    phases = ("prepare", "validate", "rollout", "score", "explore-score-r1")
    spans = [span("reserved-0", at, at + 2, phase) for at, phase in enumerate(phases)]
    kept.take(drained(spans, [life("reserved-0", 0, None)]))

    measured = kept.measure(START_S, START_S + 10)

    assert kept.first_image_s(START_S) == 3.0
    assert {name: measured.get(name) for name in ("score_s", "explore-score_s")} == {
        "score_s": 4.0,
        "explore-score_s": None,
    }


def test_samples_that_are_no_number_count_as_none(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(WORKERS, life("reserved-0", 0, H, "end"))
    done = {"weights_version": 1, "weights_sha256": "ab", "measured": {}}
    run.append(
        HISTORY,
        *({"iteration": k, "metrics": {"samples": count}, **done} for k, count in enumerate((8.0, float("nan")))),
    )

    assert books(run).ledger(START_S + H).samples == 8
