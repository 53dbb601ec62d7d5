"""What a driver keeps of a run that ends by an error: all that the cluster told, and nobody is paid for any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.start import existing
from cluster.start.run_cluster import RunCluster
from runs import settings_file
from spotlight import attach, config, driver
from spotlight.driver import Driver
from spotlight.records import Drained, Span, SpotlightError, WorkerLife
from spotlight.report.feed import Feed
from spotlight.store.accounts import Accounts
from spotlight.store.creating import create_run
from spotlight.store.lease import Lease
from spotlight.store.rows import SPANS
from spotlight.store.rundir import RunDir

NOW_S = 1.8e9
ALIVE = WorkerLife(worker="spot-0", pool="spot", joined_s=NOW_S - 3600, left_s=None, reason="")
SPAN = Span(
    worker="spot-0",
    pool="spot",
    phase="rollout",
    iteration=0,
    key="k",
    start_s=NOW_S - 3000,
    stop_s=NOW_S - 60,
    outcome="done",
)
HALF = "c0.12ab.partial"
FINE = {"waiting_for": (), "refused": {}, "running": {}, "hopeless": ""}


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "wall_clock", lambda: NOW_S)


class Failing:
    """A cluster that tells of a span, once, and then what ends the run; what it told it does not tell again."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._told, self.status = False, status

    def drain(self) -> Drained:
        spans = [] if self._told else [SPAN]
        self._told = True
        return Drained(spans=spans, workers={0: ALIVE})

    def close(self) -> None: ...


class Held(Lease):
    """A lease that nobody took away, or somebody did."""

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def check(self) -> None:
        if self._lost:
            raise SpotlightError(self._lost)


def hopeless() -> dict[str, Any]:
    return FINE | {"hopeless": "nothing begins"}


def failed() -> dict[str, Any]:
    raise SpotlightError("spot-0: 6 worker processes in a row failed")


def ended(tmp_path: Path, status: Callable[[], dict[str, Any]], lease: Lease) -> tuple[RunDir, Accounts]:
    """A run whose cluster says this."""
    run = create_run(config.load(settings_file(tmp_path)), 0.0)
    (run.path / HALF).touch()
    accounts = Accounts(run, run.config())
    ours = Driver(run, accounts, lease, threading.Event(), began_s=NOW_S)
    ours.pools = cast(RunCluster, Failing(status))
    with pytest.raises(SpotlightError):
        ours._follow()
    ours._close("failed")
    return run, accounts


@pytest.mark.parametrize("status", [hopeless, failed])
def test_what_was_told_is_kept_and_nobody_is_paid_for_after_the_end(
    tmp_path: Path, status: Callable[[], dict[str, Any]]
) -> None:
    run, accounts = ended(tmp_path, status, Held())

    usd = sum(accounts.usd_by_pool(NOW_S).values())
    assert [row["key"] for row in run.rows(SPANS)] == ["k"]
    assert usd == pytest.approx(2.5, rel=0.01)  # an hour
    assert sum(accounts.usd_by_pool(NOW_S + 3600).values()) == pytest.approx(usd, rel=0.01)
    assert sum(Accounts(run, run.config()).usd_by_pool(NOW_S + 3600).values()) == pytest.approx(usd, rel=0.01)
    assert accounts.alive() == {}
    assert not (run.path / HALF).exists()


def test_a_run_that_another_driver_has_is_written_to_no_more(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="another has it"):
        ended(tmp_path, hopeless, Held("another has it"))

    (run_dir,) = tmp_path.glob("run-*")
    assert (run_dir / HALF).exists(), "what the other's workers are writing"
    assert not RunDir(run_dir).rows(SPANS)
    assert not (run_dir / "workers.jsonl").exists()


def test_the_live_page_gets_the_last_rows_however_soon_they_come(tmp_path: Path) -> None:
    run = create_run(config.load(settings_file(tmp_path)), 0.0)
    ours = Driver(run, Accounts(run, run.config()), Held(), threading.Event(), began_s=NOW_S)
    cluster, shown = Failing(lambda: FINE), list[int]()
    ours.pools, ours._feed = cast(RunCluster, cluster), Feed(run, run.config())
    cluster.show = lambda rows: shown.append(len(rows))  # type: ignore[attr-defined]

    ours._follow()
    ours._follow()
    assert len(shown) == 1
    ours._close("finished")

    assert len(shown) == 2


def test_a_run_says_which_cluster_resumes_it_before_it_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(existing, "CONNECT_S", 0.1)
    run = create_run(config.load(settings_file(tmp_path)), 0.0)

    with run.lock() as lease:
        ours = Driver(run, Accounts(run, run.config()), lease, threading.Event(), began_s=NOW_S)
        with pytest.raises(SpotlightError, match="no scheduler answers there"):
            ours.go("tcp://127.0.0.1:1")

        assert attach(run.path).resume_command == f"{run.resume_command} --cluster tcp://127.0.0.1:1"
