"""Gangs on a live cluster, struck in the middle of a step: nothing is lost, nothing is done twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic import STEPS, Live, latents, undisturbed
from runs import WAIT_S, wait_for
from spotlight.records import Quarantined, Request

LONG = 150
"""Steps of a request that still runs when lost workers have been replaced."""
ACROSS_WIDTHS = 1e-5 * STEPS
"""Each step is the same to 1e-5 at every width, and errors add up at most."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One reserved worker and a spot node of four."""
    settings = ("pools.spot.workers=4", "strategy.widths=[1,2,4]", "cluster.hang_after_s=2", "rollout.request_seeds=4")
    cluster = Live(tmp_path_factory.mktemp("elastic"), settings)
    yield cluster
    cluster.close()


@pytest.fixture
def request_of_four(live: Live) -> Request:
    live.full()
    return live.request()


def assert_whole(live: Live, request: Request) -> None:
    """Every step was committed once, and the samples are those of an undisturbed run."""
    assert live.commits(request) == Counter(range(1, STEPS + 1))
    np.testing.assert_allclose(latents(live.store(), request), undisturbed(live, request), atol=ACROSS_WIDTHS)


def gang_epochs(live: Live, request: Request, event: str) -> list[dict[str, Any]]:
    gang = f"rollout-{request.iteration}/0"
    return [row for row in live.history() if row.get("gang") == gang and row["event"] == event]


def test_a_request_runs_on_a_gang_of_four_as_on_one_worker(live: Live, request_of_four: Request) -> None:
    live.start(request_of_four)
    done = live.finish()

    assert done.steps_run == STEPS
    assert [row["width"] for row in gang_epochs(live, request_of_four, "formed")] == [4]
    assert_whole(live, request_of_four)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_gang_that_loses_a_rank_goes_on_with_its_survivors(live: Live, request_of_four: Request, rank: int) -> None:
    with live.at_step(5, lambda members: live.kill(members[rank])):
        live.start(request_of_four)
        done = live.finish()

    assert done.steps_resumed >= 5
    assert [row["width"] for row in gang_epochs(live, request_of_four, "formed")][:2] == [4, 2]
    assert_whole(live, request_of_four)


def test_a_sampler_that_looks_back_goes_on_with_the_survivors(live: Live) -> None:
    live.full()
    request = replace(live.request(), sampler="dpm2")

    with live.at_step(5, lambda members: live.kill(members[0])):
        live.start(request)
        done = live.finish()

    assert done.steps_resumed >= 5
    assert_whole(live, request)


def test_of_a_lost_gang_only_what_was_not_committed_is_wasted(live: Live, request_of_four: Request) -> None:
    with live.at_step(5, lambda members: live.kill(members[1])):
        live.start(request_of_four)
        live.finish()

    lost = [span for span in live.spans(request_of_four) if span.outcome == "lost"]
    done = [span for span in live.spans(request_of_four) if span.outcome == "done"]
    assert {span.worker for span in lost} == {"spot-0", "spot-1", "spot-2", "spot-3"}
    assert all(span.uncommitted_s is not None for span in lost)
    assert all(0 < (span.uncommitted_s or 0) < span.stop_s - span.start_s for span in lost)
    # A step is done again only if the blow fell within the moment that its commit took.
    longest_s = max(span.stop_s - span.start_s for span in done)
    assert all(span.redone_s < longest_s / 2 for span in done)


def test_where_nothing_is_resumed_the_repeated_steps_are_wasted(tmp_path: Path) -> None:
    settings = ("pools.spot.workers=2", 'strategy.on_preemption="restart"')
    live = Live(tmp_path, settings)
    request = live.request()

    with live.at_step(STEPS // 2, lambda members: live.kill(*members)):
        live.start(request)
        live.finish()
    spans = live.spans(request)
    live.close()

    lost, done = (next(span for span in spans if span.outcome == outcome) for outcome in ("lost", "done"))
    assert lost.uncommitted_s is not None
    assert lost.uncommitted_s < lost.stop_s - lost.start_s
    assert (lost.redone_s, done.worker == lost.worker) == (0, False)
    assert 0 < done.redone_s < done.stop_s - done.start_s


def test_two_ranks_lost_at_once(live: Live, request_of_four: Request) -> None:
    with live.at_step(5, lambda members: live.kill(members[0], members[2])):
        live.start(request_of_four)
        live.finish()

    assert [row["width"] for row in gang_epochs(live, request_of_four, "formed")][:2] == [4, 2]
    assert_whole(live, request_of_four)


def test_all_spot_workers_lost_at_once_leave_the_work_to_the_reserved_one(live: Live, request_of_four: Request) -> None:
    with live.at_step(5, lambda members: live.kill(*members)):
        live.start(request_of_four, pool="any")
        live.finish()

    second = gang_epochs(live, request_of_four, "formed")[1]
    assert (second["width"], list(second["workers"])) == (1, ["reserved-0"])
    assert_whole(live, request_of_four)


def test_an_engine_killed_without_its_worker_is_started_again(live: Live, request_of_four: Request) -> None:
    workers = set(live.snapshot().workers.items())
    engines = {name: live.engine_pid(name) for name, _ in workers}

    with live.at_step(5, lambda members: os.kill(engines[members[1]], signal.SIGKILL)):
        live.start(request_of_four)
        live.finish()

    assert set(live.snapshot().workers.items()) == workers
    assert {name for name, pid in engines.items() if live.engine_pid(name) != pid} != set()
    assert_whole(live, request_of_four)


@pytest.mark.parametrize("frozen", ["engine", "worker"])
def test_a_frozen_rank_is_replaced_after_the_limit(live: Live, request_of_four: Request, frozen: str) -> None:
    stopped: list[int] = []

    def freeze(members: list[str]) -> None:
        stopped.append((live.engine_pid if frozen == "engine" else live.worker_pid)(members[1]))
        os.kill(stopped[0], signal.SIGSTOP)

    with live.at_step(5, freeze):
        live.start(request_of_four)
        live.finish()

    assert len(gang_epochs(live, request_of_four, "broken")) >= 1
    wait_for(lambda: not any(_is_stopped(pid) for pid in stopped))
    assert_whole(live, request_of_four)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except FileNotFoundError:
        return False


def test_a_worker_under_notice_leaves_at_a_step_boundary_and_nothing_is_lost(
    live: Live, request_of_four: Request
) -> None:
    pids = {name: live.worker_pid(name) for name in live.snapshot().workers}
    losses = live.pools.status()["preemptions"]

    with live.at_step(5, lambda members: os.kill(pids[members[1]], signal.SIGTERM)):
        live.start(request_of_four)
        live.finish()

    assert gang_epochs(live, request_of_four, "broken") == []
    left, regrouped = (len(gang_epochs(live, request_of_four, event)) for event in ("leaves", "regroup"))
    assert 1 <= left <= 1 + regrouped  # with the worker, and to be wider again once it is replaced
    assert live.pools.status()["preemptions"] == losses + 1
    assert_whole(live, request_of_four)


def test_a_worker_lost_while_its_gang_is_joining(live: Live, request_of_four: Request) -> None:
    live.start(request_of_four)
    live.when_formed(lambda members: live.kill(members[2]))
    live.finish()

    assert len(gang_epochs(live, request_of_four, "broken")) >= 1
    assert_whole(live, request_of_four)


def test_work_that_only_spot_workers_may_do_waits_for_them_and_says_so(live: Live, request_of_four: Request) -> None:
    with live.at_step(5, lambda members: live.kill(*members)):
        live.start(request_of_four, pool="spot")
        wait_for(lambda: list(live.pools.status()["waiting_for"]) == ["spot"])
        live.finish()

    assert not live.pools.status()["waiting_for"]
    assert_whole(live, request_of_four)


def test_work_that_no_node_is_large_enough_for_says_so(live: Live, request_of_four: Request) -> None:
    live.start(request_of_four, widths=(8,))
    wait_for(lambda: list(live.pools.status()["waiting_for"]) == ["8 on one node"])
    live.call_off()
    wait_for(lambda: not live.pools.status()["waiting_for"])


def test_a_gang_widens_when_workers_join(live: Live) -> None:
    live.full()
    long = live.request()
    long = replace(long, sampler="ode", sigmas=tuple(1 - step / LONG for step in range(LONG + 1)))
    gone = {"spot-1", "spot-2", "spot-3"}
    live.kill(*gone)
    wait_for(lambda: gone.isdisjoint(live.snapshot().workers))

    live.start(long)
    live.finish()

    assert gang_epochs(live, long, "regroup")[0]["width"] == 1
    assert gang_epochs(live, long, "resumed")[-1]["width"] > 1
    assert gang_epochs(live, long, "broken") == []
    assert live.commits(long) == Counter(range(1, LONG + 1))


def test_a_request_that_keeps_killing_engines_is_set_aside(live: Live, request_of_four: Request) -> None:
    def kill_engines(members: list[str]) -> None:
        for pid in live.engine_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with live.at_each(True, kill_engines):
        first = live.start(request_of_four)
        aside = first.result(timeout=WAIT_S)

    assert isinstance(aside, Quarantined)
    assert aside.preemptions >= live.config.cluster.quarantine_after
    (recorded,) = live.run.all_quarantined()
    assert recorded.request.prompt.text == request_of_four.prompt.text
    assert recorded.request.seeds == request_of_four.seeds
