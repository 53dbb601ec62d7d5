"""The books of a run directory: what they make of sessions, losses and prices."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runs import settings_file
from spotlight import config
from spotlight.market.ledger import reserved_price
from spotlight.records import Drained, SpotlightError, WorkerLife
from spotlight.store.accounts import Accounts, alive_s, pool_prices
from spotlight.store.creating import create_run_at
from spotlight.store.lease import LEASE_S, Holder
from spotlight.store.rows import EVENTS, HISTORY, SPANS, VALIDATION, WORKERS
from spotlight.store.rundir import RunDir

START_S = 1_700_000_000.0
H = 3600.0


def open_run(directory: Path, *, paced: bool = False, **pools: Any) -> RunDir:
    """A run directory with settings alone: 10 and 2 dollars an hour."""
    pools = {"reserved": {"usd_per_h": 10.0}, "spot": {"usd_per_h": 2.0}} | pools
    tree = {"data": {"train_prompts": "a", "validation_prompts": "b"}, "pools": pools}
    tree |= {"pace": {"gpu": "h100"}} if paced else {}
    directory.mkdir(exist_ok=True)
    (directory / config.RESOLVED).write_text(config.dump(config.resolve(tree, directory)))
    return RunDir.open(directory)


def span(worker: str, start_s: float, stop_s: float, phase: str = "rollout", outcome: str = "done") -> dict[str, Any]:
    """A line of the journal, its times after the start of the run."""
    what = {"worker": worker, "pool": worker.split("-")[0], "phase": phase, "iteration": 0, "key": "k"}
    return what | {"start_s": START_S + start_s, "stop_s": START_S + stop_s, "outcome": outcome}


def life(worker: str, joined_s: float, left_s: float | None, reason: str = "") -> dict[str, Any]:
    left_s = None if left_s is None else START_S + left_s
    pool = worker.split("-")[0]
    return {"worker": worker, "pool": pool, "joined_s": START_S + joined_s, "left_s": left_s, "reason": reason}


def drained(spans: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Drained:
    return Drained.of({"spans": spans, "workers": list(enumerate(workers)), "events": [], "decisions": []})


def books(run: RunDir) -> Accounts:
    return Accounts(run, run.config())


def test_a_killed_run_is_paid_for_until_its_driver_was_last_seen(tmp_path: Path) -> None:
    """Also if the next session is killed an hour later, before it has a worker."""
    run = open_run(tmp_path)
    run.append(SPANS, span("reserved-0", 10, 100))
    run.append(WORKERS, life("reserved-0", 0, None))

    for seen_s in (START_S + H, START_S + 2 * H):
        holder = Holder(host="a", pid=1, files="", until_s=seen_s + LEASE_S)
        run.objects.put("lease/000001.json", json.dumps(asdict(holder)).encode())
        killed = books(run)
        killed.settle()

    assert killed.usd_by_pool(START_S + 9 * H)["reserved"] == pytest.approx(10.0)


def test_a_killed_run_is_paid_for_until_its_last_span(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(SPANS, span("reserved-0", 10, H / 2), span("spot-0", 20, 30))
    run.append(WORKERS, life("reserved-0", 0, None), life("spot-0", 15, 40, "lost"))

    ledger = books(run).ledger(START_S + 100 * H)

    assert ledger.seconds(pool="reserved") == H / 2
    assert ledger.seconds(pool="spot") == 25
    assert ledger.usd(pool="reserved") == pytest.approx(5.0)


def test_sessions_add_up(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(SPANS, span("reserved-0", 10, 100))
    run.append(WORKERS, life("reserved-0", 0, None))
    second = books(run)

    assert second.worked_s(START_S + 190) == 100
    assert second.first_image_s(START_S + 190) is None
    second.take(drained([span("reserved-0", 250, 300)], [life("reserved-0", 200, None)]))
    second.close(START_S + 300)

    assert second.ledger(START_S + 300).seconds() == 100 + 100
    assert books(run).ledger(START_S + 999).entries == second.ledger(START_S + 300).entries


def test_the_ledger_of_an_iteration_holds_until_the_next(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    kept = books(run)
    kept.take(drained([span("spot-0", 1, 5)], [life("spot-0", 0, None)]))
    kept.measure(START_S, START_S + 10)

    first, later = kept.ledger(START_S + 10), kept.ledger(START_S + 20)
    kept.measure(START_S + 10, START_S + 30)

    assert first.seconds() == later.seconds() == 10
    assert kept.ledger(START_S + 30).seconds() == 30
    assert kept.usd_by_pool(START_S + 20) == pytest.approx({"spot": 20 * 2.0 / H})


def test_a_pause_that_ends_after_its_iteration_or_is_told_of_late_counts_in_the_next(tmp_path: Path) -> None:
    kept, found = books(open_run(tmp_path)), []
    for start_s, stop_s, paused_at_s in ((0, 10, 4), (12, 20, 11), (20, 30, 15), (30, 40, 45), (40, 50, 50)):
        pause = {"event": "paused", "at_s": START_S + paused_at_s, "lost_s": 2.0}
        kept.take(Drained.of({"spans": [], "workers": [], "events": [pause], "decisions": []}))
        times = [kept.measure(START_S + start_s, START_S + stop_s) for _ in range(2)]
        found.append([each.get("paused_s", 0.0) for each in times])

    assert found == [[2.0, 2.0]] * 3 + [[0.0, 0.0], [4.0, 4.0]]


def test_a_gang_recovers_also_if_its_loss_was_told_of_before_its_next_step(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    accounts = books(run)
    for event, after_s in (("broken", 10), ("broken", 12), ("stepped", 14)):  # from its first loss on
        told = {"event": event, "at_s": START_S + after_s, "gang": "rollout/0"}
        accounts.take(Drained.of({"spans": [], "workers": [], "events": [told], "decisions": []}))

    measured = accounts.measure(START_S, START_S + 20)

    assert (measured["gangs_broken"], measured["recovery_s"]) == (1.0, 4.0)
    assert [row["event"] for row in run.rows(EVENTS)] == ["broken", "broken", "stepped"]


def test_an_iteration_has_the_dollars_of_its_own_time_and_those_losses_that_nobody_asked_for(tmp_path: Path) -> None:
    accounts = books(open_run(tmp_path))
    accounts.take(drained([], [life("reserved-0", 0, None), life("spot-0", 0, H + 360, "sent away")]))

    measured = accounts.measure(START_S + H, START_S + 2 * H)

    assert measured["usd"] == pytest.approx(10.0 + 2.0 / 10)
    assert measured["preemptions"] == 0


def test_what_is_told_of_late_counts_when_an_iteration_is_measured_again(tmp_path: Path) -> None:
    accounts, window = books(open_run(tmp_path)), (START_S, START_S + 10)
    accounts.take(drained([span("spot-0", 1, 5)], [life("spot-0", 0, None)]))
    measured = [accounts.measure(*window)]

    for spans, lives in (([span("spot-0", 6, 8)], []), ([], [life("spot-0", 0, 9, "lost")])):
        accounts.take(drained(spans, lives))
        measured.append(accounts.measure(*window))

    assert [each["busy_s.spot-0"] for each in measured] == [4, 6, 6]
    assert [each["preemptions"] for each in measured] == [0, 0, 1]


def test_a_run_whose_workers_are_gone_is_accounted_for_until_the_last_of_them_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    run = open_run(tmp_path)
    run.append(SPANS, span("reserved-0", 10, 100))
    run.append(WORKERS, life("reserved-0", 0, 90, "end"))
    ended, alive = books(run), Accounts(run, run.config())
    alive.take(drained([], [life("spot-0", 0, None)]))

    assert ended.until_s(START_S) == START_S + 100
    assert ended.until_s(START_S + 500) == START_S + 500
    assert alive.until_s(START_S + 50) == START_S + 50


def test_history_says_what_the_dollars_bought(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(WORKERS, life("reserved-0", 0, 2 * H, "end"))
    rows = [(0, 24), (1, 30), (1, 40)]  # the second iteration was taken back and run again
    done = {"weights_version": 1, "weights_sha256": "ab", "measured": {}}
    run.append(HISTORY, *({"iteration": k, "metrics": {"samples": samples}, **done} for k, samples in rows))
    validated = {"version": 0, "rewards": [], "images": "", "at_s": START_S}
    run.append(VALIDATION, *({"score": score, **validated} for score in (0.5, 0.75)))

    ledger = books(run).ledger(START_S + 2 * H)

    assert (ledger.iterations, ledger.samples, ledger.points) == (2, 24 + 40, 25)
    assert ledger.usd_per_point == pytest.approx(20.0 / 25)


def test_a_row_of_history_names_the_workers_that_were_there_and_no_others(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    kept = books(run)
    gone, late = life("spot-0", 0, 90, "lost"), life("spot-2", 250, None)
    kept.take(drained([span("spot-0", 10, 60)], [gone, life("reserved-0", 0, None), late]))

    first, second = (kept.measure(START_S + at_s, START_S + at_s + 100) for at_s in (0, 100))

    def busy(row: dict[str, float]) -> dict[str, float]:
        return {name: seconds for name, seconds in row.items() if name.startswith("busy_s.")}

    assert busy(first) == {"busy_s.spot-0": 50, "busy_s.reserved-0": 0}
    assert busy(second) == {"busy_s.reserved-0": 0}


def test_a_worker_that_is_lost_between_two_iterations_counts_in_one_of_them(tmp_path: Path) -> None:
    accounts = books(open_run(tmp_path))
    lives = [life("reserved-0", 0, None), life("spot-0", 0, 100, "lost"), life("reserved-1", 0, 100, "lost")]
    broken = {"gang": "g", "event": "broken", "at_s": START_S + 100}
    stepped = {"gang": "g", "event": "stepped", "at_s": START_S + 101}
    told = {"spans": [], "workers": list(enumerate(lives)), "events": [broken, stepped], "decisions": []}
    accounts.take(Drained.of(told))

    rows = [accounts.measure(START_S + at_s, START_S + at_s + 100) for at_s in (0, 100)]

    for name in ("preemptions", "others_lost", "gangs_broken"):
        assert sum(row.get(name, 0.0) for row in rows) == 1, name


def test_displays_may_ask_while_workers_come_and_go(tmp_path: Path) -> None:
    kept = books(open_run(tmp_path))
    over = threading.Event()

    def come() -> None:
        for number in range(300):
            row = life(f"spot-{number}", number, None)
            kept.take(Drained.of({"spans": [], "workers": [(number, row)], "events": [], "decisions": []}))
        over.set()

    threading.Thread(target=come).start()
    while not over.is_set():
        kept.until_s(START_S)

    assert kept.alive() == {"spot": 300}


def test_all_lives_are_written_however_few_of_them_changed(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(WORKERS, life("reserved-0", 0, 50, "end"))
    kept = books(run)

    kept.take(drained([], [life("spot-0", 60, None), life("spot-1", 60, None)]))
    kept.take(
        Drained.of({"spans": [], "workers": [(0, life("spot-0", 60, 70, "lost"))], "events": [], "decisions": []})
    )
    before_the_end = run.rows(WORKERS)
    kept.close(START_S + 99)

    assert before_the_end[1:] == [life("spot-0", 60, 70, "lost"), life("spot-1", 60, None)]
    assert run.rows(WORKERS) == [
        life("reserved-0", 0, 50, "end"),
        life("spot-0", 60, 70, "lost"),
        life("spot-1", 60, 99, "end"),
    ]


def test_the_ledger_reads_on_in_a_history_and_anew_where_iterations_are_done_again(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(WORKERS, life("reserved-0", 0, 2 * H, "end"))
    kept = books(run)

    def samples_per_usd() -> float | None:
        kept.measure(START_S, START_S + H)
        return kept.ledger(START_S + 2 * H).usd_per_sample

    def done(k: int, samples: float) -> dict[str, Any]:
        what = {"iteration": k, "weights_version": k + 1, "weights_sha256": "", "measured": {}}
        return what | {"metrics": {"samples": samples}}

    run.append(HISTORY, done(0, 10.0))
    assert samples_per_usd() == pytest.approx(20.0 / 10)
    run.append(HISTORY, done(1, 30.0))
    assert samples_per_usd() == pytest.approx(20.0 / 40)
    run.rewrite(HISTORY, [done(0, 10.0)])
    run.append(HISTORY, done(1, 15.0), done(2, 15.0))
    assert samples_per_usd() == pytest.approx(20.0 / 40)
    run.rewrite(HISTORY, [done(0, 10.0)])
    assert samples_per_usd() == pytest.approx(20.0 / 10)


def test_prices_pass_as_fast_as_the_clock(tmp_path: Path) -> None:
    prices = tmp_path / "spot.csv"
    prices.write_text("since_start_s,usd_per_h\n0,1\n600,100\n")
    pools = {"spot": {"gpu": "h100", "prices": str(prices)}}
    paced = config.resolve(
        {
            "data": {"train_prompts": "a", "validation_prompts": "b"},
            "pools": pools,
            "pace": {"gpu": "h100", "speedup": 8},
        },
        tmp_path,
    )

    assert pool_prices(paced)["spot"].times_s == (0, 75)

    prices.write_text("time,usd_per_h\n2026-01-01,1\n2026-01-02,2\n")
    with pytest.raises(
        SpotlightError, match=r"pools\.spot\.prices = .*a calendar, and this run's clock is 8 times as fast"
    ):
        pool_prices(paced)


@pytest.mark.parametrize(
    ("spot", "usd_per_h"),
    [
        ({"gpu": "h100"}, 10.47),
        ({"gpu": "mine", "usd_per_h": 3.0}, 3.0),
        ({"gpu": "mine", "usd_per_h": 0.5}, 1.21),
        ({"usd_per_h": 0.5}, 10.47),
    ],
)
def test_work_on_reserved_workers_is_priced_as_that_of_gpus_like_the_spot_ones(
    tmp_path: Path, spot: dict[str, Any], usd_per_h: float
) -> None:
    apart = {"rollout_pools": ["spot"], "train_pools": ["spot"]}
    tree = {"data": {"train_prompts": "a", "validation_prompts": "b"}, "strategy": apart}
    prices = pool_prices(config.resolve(tree | {"pools": {"spot": spot, "reserved": {"gpu": "cpu"}}}, tmp_path))

    assert prices["reserved"].usd_per_h == (1.21,)
    assert reserved_price(prices, "spot").usd_per_h == (usd_per_h,)
    assert reserved_price(prices, "reserved") == prices["reserved"]


def test_a_run_keeps_the_prices_that_it_paid(tmp_path: Path) -> None:
    prices = tmp_path / "spot.csv"
    prices.write_text("since_start_s,usd_per_h\n0,1\n")
    settings = config.load(settings_file(tmp_path), [f"pools.spot.prices={prices}"])
    run = create_run_at(tmp_path / "run", settings)

    prices.write_text("since_start_s,usd_per_h\n0,100\n")

    assert pool_prices(run.config())["spot"].usd_per_h == (1.0,)
    assert create_run_at(tmp_path / "run", settings).path == run.path  # the same settings still
    prices.unlink()
    assert pool_prices(RunDir.open(run.path).config())["spot"].usd_per_h == (1.0,)


def test_dollars_follow_a_file_of_prices(tmp_path: Path) -> None:
    prices = tmp_path / "spot.csv"
    prices.write_text(f"since_start_s,usd_per_h\n0,1\n{H},4\n")
    run = open_run(tmp_path / "run", spot={"gpu": "h100", "prices": str(prices)})
    run.append(WORKERS, life("reserved-0", 0, 2 * H, "end"), life("spot-0", H / 2, 2 * H, "lost"))

    kept = books(run)

    expected = {"reserved": 20.0, "spot": 0.5 * 1 + 1 * 4}
    assert kept.usd_by_pool(START_S + 2 * H) == pytest.approx(expected)
    assert kept.measure(START_S, START_S + H)["usd"] == pytest.approx(10.0 + 0.5)


def test_a_file_of_prices_that_is_gone_is_named(tmp_path: Path) -> None:
    run = open_run(tmp_path, spot={"usd_per_h": 2.0, "prices": "gone.csv"})

    with pytest.raises(SpotlightError, match=r"gone\.csv: no such file of prices"):
        books(run)


def test_the_page_is_told_what_a_worker_costs_now(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("since_start_s,usd_per_h\n0,1\n3600,8\n")
    kept = books(open_run(tmp_path, spot={"usd_per_h": 2.0, "prices": str(tmp_path / "prices.csv")}))
    kept.take(drained([], [life("spot-0", 0, None)]))

    before, after = kept.money(START_S + 60), kept.money(START_S + 2 * H)

    assert (before["usd_per_h"]["spot"], after["usd_per_h"]["spot"]) == (1.0, 8.0)
    assert before["usd_per_h"]["reserved"] == 10.0


def test_pauses_between_sessions_are_no_time_of_a_run() -> None:
    lives = [
        WorkerLife(worker="a", pool="spot", joined_s=joined_s, left_s=left_s, reason="end")
        for joined_s, left_s in ((0.0, 10.0), (5.0, 20.0), (100.0, None))
    ]

    assert alive_s(lives, 130.0) == 20.0 + 30.0


@pytest.mark.parametrize("journal", [SPANS, WORKERS])
def test_a_record_without_a_field_is_an_error_that_names_both(tmp_path: Path, journal: str) -> None:
    run = open_run(tmp_path)
    (run.path / journal).write_text(json.dumps({"worker": "spot-0"}) + "\n")

    with pytest.raises(SpotlightError, match=rf"{journal}:1: no field 'pool'"):
        books(run)


def test_a_long_run_is_summed_up_as_it_goes_and_its_account_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)

    def account(name: str) -> Accounts:
        kept, now_s = books(open_run(tmp_path / name)), START_S
        chance.seed(1)
        workers = [life("reserved-0", 0, None, ""), *(life(f"spot-{n}", n, None, "") for n in range(3))]
        workers += [life("spot-3", 1, 700, "lost"), life("spot-3", 1500, None, "")]  # its name is used again
        for k in range(30):
            spans = [
                span(worker["worker"], 100 * k + at, 100 * k + at + chance.uniform(1, 9), phase=phase)
                for worker in workers
                for at, phase in ((chance.uniform(2, 9), "rollout"), (50, "explore-r0"), (90, "score"))
                if worker["worker"] != "spot-2" or k > 20
                if START_S + 100 * k >= worker["joined_s"] - 99 and (not worker["left_s"] or k < 7)
            ]
            kept.take(drained(spans, [worker for worker in workers if worker["joined_s"] <= now_s + 100]))
            now_s = START_S + 100 * (k + 1)
            kept.measure(now_s - 100, now_s)
        return kept

    whole = account("whole")
    monkeypatch.setattr("spotlight.store.accounts.FOLD_SPANS", 20)
    folded = account("folded")

    assert len(whole._spans) > 290
    assert len(folded._spans) < 40
    end_s = START_S + 3000
    for found, expected in zip(folded.ledger(end_s).entries, whole.ledger(end_s).entries, strict=True):
        assert asdict(found) == pytest.approx(asdict(expected))
    assert folded.spot_utilisation(end_s) == pytest.approx(whole.spot_utilisation(end_s))
    assert folded.first_image_s(START_S) == whole.first_image_s(START_S)


def test_a_run_that_is_watched_is_read_on_and_is_accounted_for_as_if_it_were_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path)
    run.append(WORKERS, life("reserved-0", 0, None), life("spot-0", 5, None))
    watched = Accounts(run, run.config(), watched=True)
    for k in range(12):
        at_s = 100 * k
        run.append(SPANS, *(span(name, at_s + 10, at_s + 60) for name in ("reserved-0", "spot-0")))
        run.append(SPANS, *(span("reserved-0", at_s + n, at_s + n + 0.5, "train") for n in range(70, 90)))
        if k == 6:
            rest = [life("spot-0", 5, 655, "lost"), life("spot-1", 660, None)]
            run.rewrite(WORKERS, [life("reserved-0", 0, None), *rest])
        measured = {"started_s": START_S + at_s, "stopped_s": START_S + at_s + 100}
        what = {"iteration": k, "weights_version": k + 1, "weights_sha256": "", "metrics": {"samples": 8.0}}
        run.append(HISTORY, what | {"measured": measured})
        anew, now_s = Accounts(run, run.config(), watched=True), START_S + at_s + 100
        with monkeypatch.context() as patched:
            patched.setattr("spotlight.store.accounts.FOLD_SPANS", 30)
            assert watched.look()

        for found, expected in zip(watched.ledger(now_s).entries, anew.ledger(now_s).entries, strict=True):
            assert asdict(found) == pytest.approx(asdict(expected))
        assert watched.ledger(now_s).usd_per_sample == pytest.approx(anew.ledger(now_s).usd_per_sample)
        assert watched.spot_utilisation(now_s) == pytest.approx(anew.spot_utilisation(now_s))
        assert (watched.alive(), watched.preemptions(), watched.lives()) == (
            anew.alive(),
            anew.preemptions(),
            anew.lives(),
        )
    assert len(watched._spans) < 80

    run.rewrite(SPANS, [span("reserved-0", 10, 60)])
    assert not watched.look()
