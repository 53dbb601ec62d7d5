"""A run that was paused, or whose clock was set back, goes on and says what it lost; what is stopped is noticed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from distributed import batched

from cluster.dispatch.stall import StallDetector
from cluster.worker.process import own_fork_server_pid
from elastic import Live, device_number
from runs import ROOT, WAIT_S, settings_file, wait_for
from spotlight.clock import wall_clock
from spotlight.store.rows import EVENTS, HISTORY, SPANS, WORKERS
from spotlight.store.rundir import RunDir

HANG_AFTER_S = 3.0
PAUSE_S = 7.0
"""More than twice the limit after which what is silent has hung; far more than a busy machine's delays."""
HOUR_S = 3600
SET_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead_s(void) {
    static volatile long *shared;
    if (!shared) {
        int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
        void *found = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (found == MAP_FAILED) abort();
        shared = found;
    }
    return *shared;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s();
    return failed;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
"""
"""Stands before the system's own: what it is ahead by is in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run to which things happened."""

    status: int
    said: str
    dir: RunDir


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """It was paused, its clock was set back by an hour, and then it lost a worker."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("paused")
    if sys.platform != "linux" or not compiler:
        pytest.skip("needs Linux and a C compiler, to set a clock back for some processes alone")
    shim, ahead = folder / "clock.so", folder / "ahead"
    (folder / "clock.c").write_text(SET_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, folder / "clock.c", "-ldl"], check=True)
    ahead.write_bytes(bytes(8))
    settings = [f"cluster.hang_after_s={HANG_AFTER_S}", "run.iterations=5", "run.validate_every=5", "run.report=true"]
    command = [sys.executable, "-m", "spotlight", "run", str(settings_file(folder))]
    process = subprocess.Popen(
        [*command, *(word for each in settings for word in ("--set", each))],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_PRELOAD": str(shim), "CLOCK_AHEAD": str(ahead)},
        start_new_session=True,
    )
    try:
        history = wait_for(lambda: list(folder.glob(f"run-*/{HISTORY}")), process)[0]
        run = RunDir.open(history.parent)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.killpg(process.pid, signal.SIGCONT)
        wait_for(lambda: "paused" in {row["event"] for row in run.rows(EVENTS)}, process)
        done = len(run.rows(HISTORY))
        with ahead.open("r+b") as mapped:  # in place: who reads a page of a file that was cut short dies (SIGBUS)
            mapped.write((-HOUR_S).to_bytes(8, sys.byteorder, signed=True))
        wait_for(lambda: len(run.rows(HISTORY)) > done or process.poll() is not None)
        said, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()
    return Ended(status=process.returncode, said=said, dir=run)


def events(ended: Ended, kind: str) -> list[dict[str, Any]]:
    return [row for row in ended.dir.rows(EVENTS) if row["event"] == kind]


def test_after_a_pause_of_everything_the_run_goes_on_and_says_what_was_lost(ended: Ended) -> None:
    assert ended.status == 0, ended.said
    assert len(ended.dir.rows(HISTORY)) == 5
    lost_s = [row["lost_s"] for row in events(ended, "paused")]
    assert any(PAUSE_S - 1 < each < PAUSE_S + 10 for each in lost_s), lost_s
    assert "s were lost: the run was paused" in ended.said.replace("\n", " ")
    report = ended.dir.path / "report.html"
    assert str(report) in ended.said
    assert "of it lost: the run was paused" in report.read_text()


def test_a_pause_is_no_loss_of_a_worker(ended: Ended) -> None:
    assert events(ended, "hung") == []


def test_of_the_history_it_is_known_which_iteration_lost_time(ended: Ended) -> None:
    paused_s = [row["measured"].get("paused_s", 0.0) for row in ended.dir.rows(HISTORY)]

    assert sum(paused_s) == pytest.approx(sum(row["lost_s"] for row in events(ended, "paused")))


def test_a_clock_that_is_set_back_moves_nothing_that_was_recorded(ended: Ended) -> None:
    joined_s = min(row["joined_s"] for row in ended.dir.rows(WORKERS))

    assert min(row["start_s"] for row in ended.dir.rows(SPANS)) > joined_s
    stopped_s = [row["measured"]["stopped_s"] for row in ended.dir.rows(HISTORY)]
    assert stopped_s == sorted(stopped_s)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    overrides = ["pools.spot.workers=1", f"cluster.hang_after_s={HANG_AFTER_S}", "pools.spot.replace_after_s=0"]
    live = Live(tmp_path_factory.mktemp("live"), overrides)
    yield live
    live.close()


def test_a_own_fork_server_that_is_stopped_is_continued_and_that_is_said(live: Live) -> None:
    os.kill(own_fork_server_pid(), signal.SIGSTOP)
    live.kill("spot-0")
    gone = live.snapshot().workers.get("spot-0")

    def replaced() -> bool:
        live.pools.status()  # as the run asks all the time
        return live.snapshot().workers.get("spot-0") not in (None, gone)

    wait_for(replaced)

    (said,) = [row["what"] for row in live.history() if row["event"] == "continued"]
    assert "that workers are forked from was stopped" in said


def test_a_run_that_waits_says_for_what(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.full()
    sooner = StallDetector(HANG_AFTER_S / 3, live.plugin._clock())  # than engines are ended
    monkeypatch.setattr(live.plugin, "_stall", sooner)
    request = live.request()
    os.kill(live.engine_pid("reserved-0"), signal.SIGSTOP)
    os.kill(live.engine_pid("spot-0"), signal.SIGSTOP)
    live.start(request)

    waits = wait_for(lambda: [row["what"] for row in live.history() if "rollout" in row.get("what", "")])
    live.finish()

    assert waits[0].startswith("nothing has happened for ")


def lost(live: Live) -> list[float]:
    return [row["lost_s"] for row in live.history() if row["event"] == "paused"]


def test_a_pause_of_an_hour_in_the_middle_of_a_request_loses_no_worker(live: Live) -> None:
    """The scheduler's clock leaps; nobody waits for it."""
    clock, plugin = live.plugin._clock, live.plugin
    leap_s = [0.0]
    plugin._clock = lambda: clock() + leap_s[0]
    live.full()
    before = live.snapshot().workers
    live.start(live.request())
    leap_s[0] = HOUR_S

    live.finish()
    (lost_s,) = wait_for(lambda: [each for each in lost(live) if each > HOUR_S / 2])  # a busy machine has small ones

    assert lost_s == pytest.approx(HOUR_S, abs=60)
    assert live.snapshot().workers == before


def test_a_message_that_follows_another_does_not_wait_for_a_clock_that_is_set_back(live: Live) -> None:
    """Dask holds it back for milliseconds, and would for as long as the system's clock was set back by."""
    assert vars(batched)["time"] is wall_clock


def test_memory_and_temporary_folders_that_are_removed_under_a_run_are_made_again(live: Live) -> None:
    """As a logout does that removes shared memory, and what tidies up old temporary files."""
    live.full()
    live.start(live.request())
    live.finish()
    survivor, removed = live.engine_pid("reserved-0"), live.memory()
    reached_in = Path(forkserver._forkserver._forkserver_address).parent  # type: ignore[attr-defined]
    for folder in (*removed, live.pools._scratch.path, reached_in):
        shutil.rmtree(folder)
    gone = live.snapshot().workers["spot-0"]
    live.kill("spot-0")

    def replaced() -> bool:
        live.pools.status()  # as the run asks all the time
        return live.snapshot().workers.get("spot-0") not in (None, gone)

    wait_for(replaced)
    live.start(live.request())
    assert live.finish().steps_run > 0
    numbers = live.pools.client.run(device_number, workers=list(live.snapshot().workers.values()))
    assert live.engine_pid("reserved-0") == survivor
    assert len(set(numbers.values())) == len(numbers)  # nobody took the device of another
    assert set(live.memory()) == set(removed)
