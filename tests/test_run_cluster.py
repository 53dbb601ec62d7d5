"""Pools of worker processes: along a trace they lose and regain workers, and nothing that hangs stays."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

import dask
import pytest
from distributed import Client, Worker

from cluster.start import local
from cluster.start import run_cluster as pools
from cluster.start.local import PreemptionSchedule, TraceClock, WorkerKeeper
from cluster.start.run_cluster import RunCluster
from cluster.worker.process import end_own_fork_server_at_its_imports, own_fork_server
from elastic import Live
from runs import ROOT, WAIT_S, settings_file, wait_for
from spotlight import config
from spotlight.records import SpotlightError

TRACE = """0,add,a
0,add,b
2000,remove,b
3000,add,c
13000,remove,c
14000,add,d
"""
"""Two workers, one of which is lost and replaced twice. In milliseconds, with ample time for a new one to boot."""
STOP_S = 0.05


def start(directory: Path, *settings: str) -> Live:
    (directory / "trace.csv").write_text(TRACE)
    return Live(directory, ("pools.spot.trace=trace.csv", *settings))


def test_a_pool_follows_its_trace_from_when_its_first_workers_are_there(tmp_path: Path) -> None:
    live = start(tmp_path, "pools.spot.preemption=mixed")
    try:
        wait_for(lambda: [life for life in live.lives() if life.pool == "spot"][3:])
        lives = live.lives()
    finally:
        live.close()

    lost = [(life.left_s, life.worker, life.reason) for life in lives if life.left_s]
    assert [what for _, *what in lost] == [["spot-1", "lost"], ["spot-1", "left"]]  # killed, then warned
    assert lost[0][0] - max(life.joined_s for life in lives[:3]) == pytest.approx(2.0, abs=1.0)


def test_a_pool_that_is_made_smaller_has_its_last_workers_leave_and_may_grow_again(tmp_path: Path) -> None:
    live = Live(tmp_path, ("pools.spot.replace_after_s=0",))

    def spot() -> list[tuple[str, str]]:
        """Those that are there or were, and why they went."""
        return [(life.worker, life.reason) for life in live.lives() if life.pool == "spot"]

    try:
        wait_for(lambda: len(spot()) == 2)
        live.pools.scale(spot=1)
        wait_for(lambda: len(live.snapshot().workers) == 2)
        live.pools.scale(spot=1)  # again, before anybody asked why they went
        wait_for(lambda: ("spot-1", "sent away") in spot())
        with pytest.raises(SpotlightError, match=r"spot = 3: this run can have 0, 1, 2 \(pools\.spot\.workers\)"):
            live.pools.scale(spot=3)
        with pytest.raises(SpotlightError, match="spot = '1': give a whole number"):
            live.pools.scale(spot=cast(int, "1"))
        live.pools.scale(spot=2)
        wait_for(lambda: len(spot()) == 3)
        assert sorted(spot()) == [("spot-0", ""), ("spot-1", ""), ("spot-1", "sent away")]
    finally:
        live.close()


def test_what_a_run_needs_of_dask_stays_until_the_last_run_of_its_process_ends(tmp_path: Path) -> None:
    """As of two runs of a notebook; Dask gives a lost worker's place up after 15 s, unless it is told otherwise."""

    def of_dask() -> tuple[str, int]:
        return dask.config.get("distributed.deploy.lost-worker-timeout"), logging.getLogger("distributed").level

    before = of_dask()
    first, second = (
        RunCluster(config.load(settings_file(place)), place) for place in (tmp_path / "first", tmp_path / "second")
    )
    try:
        first.close()
        during = of_dask()
    finally:
        second.close()

    assert during == ("10000h", logging.ERROR)
    assert of_dask() == before


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With a key in the environment that was not there when the first workers' parent began."""
    own_fork_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        live = Live(tmp_path_factory.mktemp("live"), ())
        try:
            wait_for(lambda: len(live.lives()) == 3)
            yield live
        finally:
            live.close()


@pytest.mark.parametrize("link", ["/user/{NOT_SET_HERE}/proxy/{port}/status", "{host", "{}"])
def test_a_link_to_the_dashboard_that_cannot_be_made_here_is_dasks_own(live: Live, link: str) -> None:
    """As that for a JupyterHub, which sets its variables in notebooks alone."""
    with dask.config.set({"distributed.dashboard.link": link}):
        made = live.pools.dashboard

    assert made == live.pools.dashboard
    assert made.startswith("http://127.0.0.1:")


def test_workers_know_the_keys_that_the_driver_got_after_the_first_ones_began(live: Live) -> None:
    known = live.pools.client.run(os.environ.get, "AWS_ACCESS_KEY_ID")

    assert set(known.values()) == {"someone"}


def test_a_graph_that_is_done_leaves_nothing_with_scheduler_and_workers(live: Live) -> None:
    client = live.pools.client
    first = client.submit(pow, 2, 0, pure=False).result() and _measured(client)
    for _ in range(3):
        client.submit(pow, 2, 0, pure=False).result()

    assert _measured(client) == first


def _measured(client: Client) -> set[Any]:
    """Names of all that Dask's workers measured of tasks that were run on them."""
    return {name for names in client.run(_names).values() for name in names}


def _names(dask_worker: Worker) -> list[Any]:
    return [name for name in dask_worker.digests_total if isinstance(name, tuple) and "pow" in name]


@pytest.mark.live
def test_a_machine_whose_network_is_down_is_told_so(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a network of its own")

    command = [*alone, sys.executable, "-m", "spotlight", "run", str(settings_file(tmp_path))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)

    assert ran.returncode == 1
    assert "the run's scheduler cannot be started or reached (" in ran.stderr
    assert "127.0.0.1" in ran.stderr


def test_a_stop_does_not_wait_for_the_imports_of_the_fork_server(tmp_path: Path) -> None:
    """One that is stopped never ends them; a run after that has another."""
    code = f"""
import os, signal, time
from cluster.worker.process import own_fork_server_pid
from spotlight.records import Stopped
from spotlight.run import Run

def stop_when(is_time, workers):
    run = Run({str(settings_file(tmp_path))!r}, [f"pools.spot.workers={{workers}}"]).start()
    while not is_time(run):
        time.sleep(0.01)
    run.stop()
    try:
        run.wait({WAIT_S / 2})
    except Stopped:
        print("stopped", flush=True)

def it_was_frozen(run):
    if run.status.dashboard and own_fork_server_pid():
        os.kill(own_fork_server_pid(), signal.SIGSTOP)
        return True

if __name__ == "__main__":
    stop_when(it_was_frozen, 12)  # more than are started at once
    stop_when(lambda run: run.status.workers, 1)
"""
    (tmp_path / "stops.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "stops.py")]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.stdout.splitlines() == ["stopped", "stopped"], done.stderr


def test_a_fork_server_whose_end_was_just_waited_for_is_ended_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", ended.pid)

    end_own_fork_server_at_its_imports()


def test_a_place_that_is_closed_starts_no_more_workers_though_its_clean_up_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, fails, starts = threading.Event(), threading.Event(), list[ForkServerProcess]()

    def begin(process: ForkServerProcess) -> None:
        starts.append(process)
        began.set()
        fails.wait(WAIT_S)
        raise RuntimeError("of a kind that nobody foresaw")

    async def live() -> None:
        spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": {}, "security": None}
        schedule = PreemptionSchedule(replace_after_s=0.0)
        place = WorkerKeeper(
            "tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock(["spot-0"])
        )
        await place.start()
        await asyncio.to_thread(began.wait, WAIT_S)
        asyncio.get_running_loop().call_later(0.1, fails.set)
        await place.close()

    monkeypatch.setattr(local, "_start", begin)
    monkeypatch.setattr(local, "end_own_fork_server_at_its_imports", lambda: None)
    asyncio.run(live())

    assert len(starts) == 1


def test_the_fork_server_finds_modules_where_its_program_does(tmp_path: Path) -> None:
    """As where a script put a checkout into sys.path that is not installed: no worker could start."""
    for package in ("spotlight", "graphs", "cluster"):
        (tmp_path / package).symlink_to(ROOT / package)
    code = f"""
import pathlib, sys
sys.path[:0] = [{str(tmp_path)!r}, pathlib.Path("/elsewhere")]  # a Path harms no import
from cluster.worker.process import made_by_own_fork_server, own_fork_server
said = "import os, sys; print(sys.modules['cluster.worker.preload'].__file__, os.environ.get('PYTHONPATH'))"
process = own_fork_server().Process(target=exec, args=(said,))
made_by_own_fork_server(process)
process.join()
"""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd="/", env=outside, capture_output=True, text=True, timeout=WAIT_S)

    assert said.stdout == f"{tmp_path}/cluster/worker/preload.py None\n"


def test_a_place_gives_up_on_workers_that_cannot_start_and_says_why(tmp_path: Path) -> None:
    settings = {"distributed.comm.timeouts.connect": "a while"}
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0)

    async def live() -> str:
        place = WorkerKeeper(
            "tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock(["spot-0"])
        )
        await place.start()
        async with asyncio.timeout(WAIT_S):
            while not place.failure:
                await asyncio.sleep(0.01)
        await place.close()
        return place.failure

    assert "spot-0: 6 worker processes in a row failed: " in (said := asyncio.run(live()))
    assert "Invalid time unit" in said


def test_a_place_does_not_give_up_on_workers_that_lived_long_before_they_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run of weeks ended when the fork server was killed for the sixth time, all workers with it."""
    started: list[ForkServerProcess] = []
    start = local._start

    def start_and_tell(process: ForkServerProcess) -> None:
        start(process)
        started.append(process)

    monkeypatch.setattr(local, "_start", start_and_tell)
    monkeypatch.setattr(local, "LIVED_S", 0.0)
    settings = {"distributed.comm.timeouts.connect": "a while"}
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0)

    async def live() -> str:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))
        await place.start()
        async with asyncio.timeout(WAIT_S):
            while len(started) <= local.START_ATTEMPTS and not place.failure:
                await asyncio.sleep(0.01)
        await place.close()
        return place.failure

    assert asyncio.run(live()) == ""


def test_a_worker_that_does_not_leave_in_time_is_killed_and_its_successor_is_left_alone(tmp_path: Path) -> None:
    settings = {"distributed.comm.timeouts.connect": "1h"}
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0, grace_s=1.0)

    async def live() -> tuple[int, int]:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))

        async def next_after(before: int) -> int:
            async with asyncio.timeout(WAIT_S):
                while not (place._process and place._process.pid not in (None, before)):
                    await asyncio.sleep(0.01)
            return place._process.pid or 0

        await place.start()
        os.kill(frozen := await next_after(0), signal.SIGSTOP)
        place._warn()
        second = await next_after(frozen)
        place._warn()
        third = await next_after(second)
        await asyncio.sleep(1.2)
        found = third, await next_after(0)
        await place.close()
        return found

    third, last = asyncio.run(live())
    assert third == last


def test_a_worker_that_its_trace_freezes_is_killed_in_the_end(tmp_path: Path) -> None:
    settings = {"distributed.comm.timeouts.connect": "1h"}
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0, ups=((0.0, 5.0),), kinds=("hang",), frozen_s=0.2)
    clock = TraceClock(["spot-0"])

    async def live() -> None:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=clock)
        await place.start()
        async with asyncio.timeout(WAIT_S):
            while not place._process:
                await asyncio.sleep(0.01)
            clock.heard_of("spot-0")
            clock._began_s -= 4.8  # so long ago
            while place._process:
                await asyncio.sleep(0.01)
        await place.close()

    asyncio.run(live())


def test_a_place_that_gave_up_ends_the_run(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.pools.cluster
    monkeypatch.setattr(live.pools.cluster.workers["spot-0"], "failure", "spot-0: no memory")

    with pytest.raises(SpotlightError, match="spot-0: no memory"):
        live.pools.status()


def test_a_place_does_not_repeat_what_an_earlier_process_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spot-0.failed").write_text("OSError: no network")
    monkeypatch.setattr(local, "START_ATTEMPTS", 1)
    settings = {7: "ends it before it can say anything"}
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0)
    place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))

    asyncio.run(place._keep())

    assert place.failure == "spot-0: 1 worker processes in a row failed: it said nothing"


def test_traces_begin_without_workers_that_were_sent_away_before_they_joined(tmp_path: Path) -> None:
    clock = TraceClock(["spot-0", "spot-1"])
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": {}, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0)

    async def live() -> None:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-1", spec=spec, schedule=schedule, clock=clock)
        clock.heard_of("spot-0")
        place.want(False)
        await asyncio.wait_for(clock.begun(), WAIT_S)
        await place.close()

    asyncio.run(live())


def test_a_place_keeps_nothing_of_notices_whose_time_is_over(tmp_path: Path) -> None:
    """A place of a long run gives hundreds."""
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": {}, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0, grace_s=0.0)

    async def live() -> int:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))
        for _ in range(20):
            place._warn()
            await asyncio.wait(place._tasks)
        return len(place._tasks)

    assert asyncio.run(live()) == 1


def test_a_worker_that_its_trace_takes_away_while_it_starts_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ForkServerProcess] = []
    start = local._start

    def start_and_tell(process: ForkServerProcess) -> None:
        time.sleep(2 * STOP_S)
        start(process)
        started.append(process)

    monkeypatch.setattr(local, "_start", start_and_tell)
    settings = {"distributed.comm.timeouts.connect": "1h"}  # by itself it would stay
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": settings, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0, ups=((0.0, STOP_S),))

    async def live() -> None:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))
        await place.start()
        async with asyncio.timeout(WAIT_S):
            while not (started and started[0]._closed):  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        await place.close()

    asyncio.run(live())

    assert len(started) == 1


def test_a_worker_that_freezes_before_it_joins_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = local._start

    def start_frozen(process: ForkServerProcess) -> None:
        start(process)
        assert process.pid
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)

    monkeypatch.setattr(local, "_start", start_frozen)
    spec = {"resources": {"spot": 1}, "local_directory": str(tmp_path), "settings": {}, "security": None}
    schedule = PreemptionSchedule(replace_after_s=0.0, frozen_s=0.01)

    async def live() -> None:
        place = WorkerKeeper("tcp://127.0.0.1:1", name="spot-0", spec=spec, schedule=schedule, clock=TraceClock([]))
        await place.start()
        async with asyncio.timeout(WAIT_S):
            while len(started) < 2:
                await asyncio.sleep(0.01)
        await place.close()

    asyncio.run(live())


@pytest.mark.parametrize("error", [RuntimeError("name taken"), ValueError("name taken"), OSError(), TimeoutError()])
def test_the_worker_beside_the_driver_is_started_again_whatever_kept_it_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """If that lasts, it is said once: the run would wait for ever, and nobody would know for what."""
    tries: list[str] = []

    class Refused:
        async def __aenter__(self) -> None:
            tries.append("start")
            raise error

        async def __aexit__(self, *_: object) -> None: ...

    async def keep() -> None:
        head: Any = pools.Head.__new__(pools.Head)
        head._worker = Refused
        kept = asyncio.create_task(head._keep())
        while len(tries) < 3 and not kept.done():
            await asyncio.sleep(0.01)
        kept.cancel()

    monkeypatch.setattr(pools, "RETRY_S", 0.01)
    monkeypatch.setattr(pools, "HEAD_FAILURES", 2)
    asyncio.run(asyncio.wait_for(keep(), 30.0))

    assert len(tries) == 3
    assert [repr(error) in record.getMessage() for record in caplog.records] == [True]


def test_where_no_reserved_worker_can_take_part_the_run_cannot_go_on(tmp_path: Path) -> None:
    pools = RunCluster(config.load(settings_file(tmp_path)), tmp_path / "nowhere")
    try:
        said = wait_for(lambda: pools.status()["hopeless"])
    finally:
        pools.close()

    assert said.startswith("no reserved worker can take part in the run: reserved-0: on ")
    assert str(tmp_path / "nowhere") in said
