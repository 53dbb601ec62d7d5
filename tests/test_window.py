"""Reserved and spot workers sharing an iteration, live: the rollout window, and training that takes part after part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.dispatch.dispatcher import differing as dispatched_otherwise
from cluster.dispatch.events import GraphCame, Layer
from elastic import STEPS, Live, latents, undisturbed
from graphs.loop import Loop, synchronous
from kills import KillHolder, client_of
from runs import NoWatch, outcome, settings_file
from spotlight import config
from spotlight.clock import wall_clock
from spotlight.plan.replay import differing
from spotlight.records import Request
from spotlight.run import Run
from spotlight.store.creating import create_run
from spotlight.store.rows import DECISIONS, HISTORY, SPANS

PARTED = ("train.advantage_std=group", "strategy.offload=all", "train.parts=3")
"""Reserved workers train while spot workers still roll out; its three prompts make three parts."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A reserved and a spot worker; once lost, the latter does not come back."""
    cluster = Live(tmp_path_factory.mktemp("window"), ("pools.spot.workers=1", "pools.spot.replace_after_s=600"))
    yield cluster
    cluster.close()


def pools_of(live: Live, request: Request) -> list[str]:
    """Where the request went on, each time that it was formed anew."""
    pools = {life.worker: life.pool for life in live.lives()}
    name = f"rollout-{request.iteration}/0"
    formed = [row for row in live.history() if row["event"] == "formed" and row["gang"] == name]
    return [pools[worker] for row in formed for worker in row["workers"]]


def assert_whole(live: Live, request: Request) -> None:
    """Every step was committed once, and the samples are those of an undisturbed run."""
    assert live.commits(request) == Counter(range(1, STEPS + 1))
    np.testing.assert_array_equal(latents(live.store(), request), undisturbed(live, request))


def close_window(live: Live) -> None:
    layer = Layer(name="rollout", indices=(), pool="any", phase="rollout", iteration=0, window_s=0.0)
    live.plugin._tell(GraphCame(at_s=wall_clock(), layers=(layer,)))


def test_a_rollout_on_a_reserved_worker_moves_when_the_window_closes_and_loses_no_step(live: Live) -> None:
    request = live.request()

    with live.at_step(5, lambda members: live.scheduler.loop.add_callback(close_window, live)):
        live.start(request, pool="any")
        done = live.finish()

    assert done.steps_resumed >= 5
    assert [(span.pool, span.outcome) for span in live.spans(request) if span.phase == "rollout"] == [
        ("reserved", "stopped"),
        ("spot", "done"),
    ]
    assert pools_of(live, request) == ["spot"]
    assert "moves" in {row["event"] for row in live.history()}
    assert_whole(live, request)


def test_the_window_closes_by_itself(live: Live) -> None:
    requests = live.request()

    live.start(requests, pool="any", window_s=0.1)
    live.finish()

    assert pools_of(live, requests) == ["spot"]
    assert_whole(live, requests)


def test_with_no_spot_worker_left_reserved_ones_go_on_though_the_window_is_over(live: Live) -> None:
    request = live.request()

    with live.at_step(5, lambda members: live.kill(*members)):
        live.start(request, pool="any", window_s=0.0)
        done = live.finish()

    assert done.steps_resumed >= 5
    assert pools_of(live, request) == ["reserved"]
    assert_whole(live, request)


@pytest.fixture(scope="module")
def in_one_thread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run in parts leaves when nothing is distributed."""
    run = create_run(config.load(settings_file(tmp_path_factory.mktemp("sync")), PARTED), now_s=0.0)
    Loop(run, synchronous, NoWatch()).go()
    return outcome(run.path)


def test_a_run_that_trains_in_parts_beside_its_rollouts_is_that_of_one_thread(
    in_one_thread: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(settings_file(tmp_path), PARTED).start()
    status = run.wait()

    rows, decisions = run.directory.rows(SPANS), run.directory.rows(DECISIONS)
    trained = Counter(row["iteration"] for row in rows if row["phase"] == "train" and row["outcome"] == "done")
    assert trained == dict.fromkeys(range(2), 3)
    assert [
        row
        for row in decisions
        if row.get("is") == "TimePassed" and any(i["is"] == "Train" for i in row.get("then", ()))
    ]
    assert [*differing(run.directory.decisions()), *dispatched_otherwise(decisions)] == []
    assert status.window_s == 0.0
    assert status.spot_worth_renting
    assert outcome(run.directory.path) == in_one_thread


@pytest.mark.live
def test_a_trainer_that_is_killed_between_two_parts_changes_nothing(
    in_one_thread: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(settings_file(tmp_path), PARTED).start()
    client_of(run).register_plugin(KillHolder("train-1", 1))
    run.wait()

    lost = [row for row in run.directory.rows("workers.jsonl") if row["reason"] == "lost"]
    assert [row["pool"] for row in lost] == ["reserved"]
    assert outcome(run.directory.path) == in_one_thread


@pytest.mark.live
def test_the_window_adapts_and_is_kept_with_the_run(tmp_path: Path) -> None:
    settings = ("train.advantage_std=group", "strategy.exploration=off", "run.iterations=3")
    run = Run(settings_file(tmp_path), settings).start()
    run.wait()

    windows = [row["measured"]["window_s"] for row in run.directory.rows(HISTORY)]
    recorded_s = [state.window_s for k in range(3) if (state := run.directory.offload(k + 1))]
    assert windows[1:] == recorded_s[:2]
    assert recorded_s[2] < windows[0]  # spot workers waited for training, with nothing to explore beside it
    assert run.status.window_s == windows[-1]
