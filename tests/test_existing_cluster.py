"""A run on a Dask cluster that is there already: plain workers join it, and all who are attacked give the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import psutil
import pytest
from distributed import Client, Scheduler, SpecCluster
from distributed.client import default_client

from cluster.certificate import certificate
from cluster.dashboard.plugin import PagePlugin
from cluster.scheduler.plugin import DispatchPlugin
from cluster.start.existing import _unreachable, refuse_unsafe, where
from cluster.start.run_cluster import RunCluster
from existing import DaskCluster, certificates, dask_settings
from graphs.loop import Loop, synchronous
from kills import KillWorkers, client_of
from leftovers import OURS, marked, memory_of
from runs import LITTLE, ROOT, WAIT_S, NoWatch, outcome, settings_file, wait_for
from spotlight import attach, config
from spotlight.clock import wall_clock
from spotlight.detached import LOG, certificates_of
from spotlight.records import SpotlightError, Stopped
from spotlight.run import Run
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.rows import EVENTS, HISTORY, SPANS, WORKERS

SETTINGS = ("run.iterations=2", "strategy.widths=[1]")


@pytest.fixture(scope="module")
def existing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """A reserved worker, and a spot worker that a nanny starts again."""
    cluster = DaskCluster(tmp_path_factory.mktemp("existing"))
    cluster.worker("trainer", "reserved")
    cluster.worker("nursed", "spot", nanny=True)
    with dask.config.set(dask_settings(cluster.tls)):
        yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run without any cluster."""
    run = create_run(config.load(settings_file(tmp_path_factory.mktemp("alone")), SETTINGS), now_s=0.0)
    Loop(run, synchronous, NoWatch()).go()
    return run.path


Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a run that ends with the test, however that ends."""
    runs: list[Run] = []

    def begun(cluster: object, *overrides: str) -> Run:
        runs.append(Run(settings_file(tmp_path), [*SETTINGS, *overrides], cluster=cluster))  # type: ignore[arg-type]
        return runs[-1].start()

    yield begun
    for run in runs:
        run.stop()
        with suppress(Stopped, SpotlightError):
            run.wait()


def test_a_run_on_plain_workers_gets_the_same_bits_whatever_happens_to_them(
    existing: DaskCluster, undisturbed: Path, begin: Begin, tmp_path: Path
) -> None:
    """The only spot worker is killed, others come late, and one that cannot take part says why."""
    run = begin(existing.address, 'strategy.rollout_pools=["spot"]')
    client_of(run).register_plugin(KillWorkers("rollout", pool="spot", count=1))
    with pytest.raises(
        SpotlightError, match=rf"runs {run.directory.path.name} already \(driver: process {os.getpid()} "
    ):
        RunCluster(run.config, run.directory.path, existing.file)
    with pytest.raises(SpotlightError, match="was there before the run: end its workers"):
        run.scale(spot=1)
    (tmp_path / "other.py").write_text("import spotlight\nspotlight.__version__ = '0.0.1'\n")
    other = existing.worker("other", "spot", "--preload", str(tmp_path / "other.py"))
    existing.worker("late", "spot")
    refused = wait_for(lambda: dict(run.status.refused))
    other.kill()

    run.wait()

    joined = [row["worker"] for row in run.directory.rows(EVENTS) if row["event"] == "joined"]
    assert outcome(run.directory.path) == outcome(undisturbed)
    assert "Spotlight 0.0.1" in refused["other"]
    assert len(joined) > 2
    assert [row["outcome"] for row in run.directory.rows(SPANS)].count("lost") == 1


class ElsewhereInTime(DaskCluster):
    """Its machines' clocks are ten minutes behind."""

    @property
    def environment(self) -> Mapping[str, str]:
        found = super().environment
        (self.directory / "sitecustomize.py").write_text(
            "import time\n"
            "right, right_ns = time.time, time.time_ns\n"
            "time.time, time.time_ns = lambda: right() - 600, lambda: right_ns() - 600 * 10**9\n"
        )
        return {**found, "PYTHONPATH": f"{self.directory}{os.pathsep}{found['PYTHONPATH']}"}


@pytest.mark.live
def test_a_driver_whose_clock_is_ahead_of_the_cluster_s_measures_the_same(tmp_path: Path, begin: Begin) -> None:
    cluster = ElsewhereInTime(tmp_path)
    try:
        for pool in ("reserved", "spot"):
            cluster.worker(f"{pool}-0", pool)
        with dask.config.set(dask_settings(cluster.tls)):
            run = begin(cluster.address, *LITTLE, "run.iterations=1")
            began_s = wall_clock()
            run.wait(WAIT_S)
        (row,), lives = run.directory.rows(HISTORY), run.directory.rows(WORKERS)
    finally:
        cluster.close()

    measured = row["measured"]
    assert measured["usd"] == pytest.approx(measured["wall_s"] * (10.0 + 2.5) / 3600, rel=0.1)
    assert 0 < measured["spot_utilisation"] <= 1
    assert 0 < measured["work_s"] < 2 * measured["wall_s"]
    assert all(began_s < life["joined_s"] < life["left_s"] < wall_clock() for life in lives)


def test_a_connection_to_the_scheduler_that_broke_ends_the_run_which_goes_on_later(
    existing: DaskCluster, undisturbed: Path, begin: Begin
) -> None:
    run = begin(existing.address)
    wait_for(lambda: run.directory.rows(HISTORY))

    client: Any = run.client
    client.loop.add_callback(lambda: client.scheduler_comm.comm.abort())
    with pytest.raises(SpotlightError, match="what was committed is kept"):
        run.wait(WAIT_S)

    assert run.status.workers == {}, "nobody is paid for any more"
    Run.resume(run.directory.path, cluster=existing.address).start().wait(WAIT_S)
    assert outcome(run.directory.path) == outcome(undisturbed)


def test_a_driver_that_slept_ends_no_other_run_that_began_there_meanwhile(
    existing: DaskCluster, tmp_path: Path
) -> None:
    """The scheduler takes its broken connection for the run's end, and serves the next; then it wakes."""
    settings = config.load(settings_file(tmp_path), SETTINGS)
    ours, theirs = (create_run_at(tmp_path / name, settings).path for name in ("ours", "theirs"))
    slept = RunCluster(settings, ours, existing.address)
    client: Any = slept.client
    client.loop.add_callback(lambda: client.scheduler_comm.comm.abort())
    wait_for(lambda: DispatchPlugin.name not in client.run_on_scheduler(names_of_plugins))
    other = RunCluster(settings, theirs, existing.address)
    try:
        wait_for(lambda: other.status()["workers"], at_most_s=60)
        for asked in (slept.drain, slept.status):
            with pytest.raises(SpotlightError, match="knows nothing of this run any more"):
                asked()
        slept.stop()
        slept.show([{"kind": "weather", "id": 0}])  # which the page would refuse
        slept.close()

        assert other.status()["workers"]
        assert not other.snapshot().stopping
        assert {life.left_s for life in other.drain().workers.values()} == {None}
        assert {DispatchPlugin.name, PagePlugin.name} <= other.client.run_on_scheduler(names_of_plugins)
    finally:
        slept.close()
        other.close()
    with Client(existing.address, set_as_default=False) as client:
        assert not {DispatchPlugin.name, PagePlugin.name} & client.run_on_scheduler(names_of_plugins)


def test_a_scheduler_that_is_gone_is_never_gone_for_no_reason() -> None:
    def in_vain(*_: object, **__: object) -> None:
        raise TimeoutError

    pools: Any = object.__new__(RunCluster)
    pools._gone, pools.session = "", "s"
    pools.client = SimpleNamespace(sync=in_vain, scheduler=SimpleNamespace(address="tcp://a:1", spotlight_status=None))

    with pytest.raises(SpotlightError, match=r"is gone \(timed out\)"):
        pools._ask("spotlight_status")


def test_a_scheduler_that_did_not_answer_is_asked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that asked again at each step of its end took minutes to end."""
    settings = config.load(settings_file(tmp_path), SETTINGS)
    cluster = DaskCluster(tmp_path)
    with dask.config.set(dask_settings(cluster.tls)):
        pools = RunCluster(settings, create_run(settings, wall_clock()).path, cluster.address)
    try:
        wait_for(lambda: "the driver's own" not in pools.status()["waiting_for"])
        monkeypatch.setattr("cluster.start.run_cluster.ANSWER_S", 0.5)
        cluster.processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(SpotlightError, match=r"is gone \(timed out"):
            pools.status()
        cluster.processes[0].send_signal(signal.SIGCONT)

        for asked in (pools.drain, pools.stop):
            with pytest.raises(SpotlightError, match=r"is gone \(timed out"):
                asked()
    finally:
        cluster.processes[0].send_signal(signal.SIGCONT)
        pools.close()
        cluster.close()


def test_a_run_whose_client_was_closed_says_so_and_leaves_the_cluster_all_the_same(
    tmp_path: Path, existing: DaskCluster
) -> None:
    """As by ``with run.client``."""
    settings = config.load(settings_file(tmp_path), SETTINGS)
    pools = RunCluster(settings, create_run(settings, wall_clock()).path, existing.address)
    wait_for(lambda: "the driver's own" not in pools.status()["waiting_for"])
    pools.client.close()

    for asked in (pools.status, pools.drain, pools.stop):
        with pytest.raises(SpotlightError, match=r"client was closed \(`run.client`\)"):
            asked()
    pools.close()

    with Client(existing.address, set_as_default=False) as client:
        wait_for(lambda: not {DispatchPlugin.name, PagePlugin.name} & client.run_on_scheduler(names_of_plugins))
        wait_for(lambda: has_only_its_own_workers(client.run_on_scheduler(names_of_workers)))


def has_only_its_own_workers(names: set[str]) -> bool:
    """Nothing of a run, however many workers other tests have added."""
    return {"trainer", "nursed"} <= names and not any(name.startswith("head-") for name in names)


def names_of_workers(dask_scheduler: Scheduler) -> set[str]:
    """To be sent to a scheduler."""
    return {str(state.name) for state in dask_scheduler.workers.values()}


def names_of_plugins(dask_scheduler: Scheduler) -> set[str]:
    """To be sent to a scheduler."""
    return {*dask_scheduler.plugins}


def test_a_driver_killed_on_a_standing_cluster_is_resumed_there(
    existing: DaskCluster, undisturbed: Path, tmp_path: Path
) -> None:
    settings = [value for setting in SETTINGS for value in ("--set", setting)]
    driver = spotlight_on(existing, "run", settings_file(tmp_path), *settings)
    wait_for(lambda: list(tmp_path.glob("run-*/history.jsonl")), driver)
    driver.kill()
    driver.communicate()
    (run_dir,) = tmp_path.glob("run-*")
    wait_for(lambda: not memory_of([run_dir.name]))  # what belonged to the run has ended with it

    again = spotlight_on(existing, "resume", run_dir)
    _, err = again.communicate(timeout=WAIT_S)

    assert again.returncode == 0, err
    assert outcome(run_dir) == outcome(undisturbed)


def spotlight_on(existing: DaskCluster, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spotlight", *map(str, arguments), "--cluster", str(existing.file)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, text=True, env=existing.environment, stdout=pipe, stderr=pipe)


def test_a_run_that_was_stopped_goes_on_on_the_same_workers_which_are_then_as_before(
    existing: DaskCluster, undisturbed: Path, begin: Begin
) -> None:
    with Client(existing.address, set_as_default=False) as client:
        run = begin(client)
        wait_for(lambda: run.directory.rows(HISTORY))
        with pytest.raises(ValueError, match="No clients"):  # a notebook's own stays the default
            default_client()
        assert engines()
        run.stop()
        with pytest.raises(Stopped, match=f"spotlight resume {run.directory.path} --cluster {existing.address}$"):
            run.wait()

        run.start().wait()

        assert outcome(run.directory.path) == outcome(undisturbed)
        assert client.submit(abs, -1, resources={"spot": 1}).result(timeout=WAIT_S) == 1
        assert memory_of([run.directory.path.name]) == []
        wait_for(lambda: not engines())


@pytest.mark.live
def test_a_detached_run_outlives_the_process_that_began_it(
    existing: DaskCluster, undisturbed: Path, tmp_path: Path
) -> None:
    """As a notebook's kernel that is restarted; certificates are those of the client."""
    code = """
import os, sys, spotlight
from distributed import Client
client = Client(sys.argv[1])
run = spotlight.Run(sys.argv[2], sys.argv[3:], cluster=client).start(detached=True)
print(run.directory.path, flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", code, existing.address, str(settings_file(tmp_path)), *SETTINGS]
    began = subprocess.run(command, cwd=ROOT, env=existing.environment, capture_output=True, text=True)
    assert began.returncode == -signal.SIGKILL, began.stderr

    run = attach(began.stdout.strip())
    alive, found = run.alive, run.wait(WAIT_S)

    assert alive
    assert found.state == "finished"
    assert outcome(run.directory.path) == outcome(undisturbed)


def test_a_detached_driver_that_cannot_go_on_is_told_of_and_one_that_is_stopped_stops(
    existing: DaskCluster, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel has it
    lost = Run.into(tmp_path / "made", settings_file(tmp_path), cluster="tcp://127.0.0.1:1").start(detached=True)
    with pytest.raises(SpotlightError, match=r"no scheduler answers there.*driver\.log"):
        lost.wait(WAIT_S)
    found = attach(lost.directory.path)
    assert found.state == "failed"
    assert "no scheduler answers there" in found.status.error
    with pytest.raises(SpotlightError, match="no scheduler answers there"):
        found.wait(WAIT_S)

    run = Run(settings_file(tmp_path / "stopped"), ["run.iterations=100"], cluster=existing.file).start(detached=True)
    looked_at = attach(run.directory.path)
    wait_for(lambda: len(looked_at.workers) > 0)
    assert looked_at.resume_command == f"spotlight resume {run.directory.path} --cluster {existing.address}"
    looked_at.stop()
    with pytest.raises(Stopped, match=f"spotlight resume {run.directory.path} --cluster {existing.file}"):
        run.wait(WAIT_S)
    assert looked_at.state == "stopped"
    said = (run.directory.path / LOG).read_text()
    assert "iteration 0/100" in said
    assert "\x1b" not in said
    assert len(run.workers) == len(looked_at.workers) > 0
    assert run.status.usd == looked_at.status.usd > 0
    assert run.status.elapsed_s == looked_at.status.elapsed_s > 0


def test_of_two_workers_in_one_process_one_takes_part_and_the_other_says_why(undisturbed: Path, tmp_path: Path) -> None:
    code = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(100, exit=True)  # it hung once, nobody knows where
import spotlight
from distributed import LocalCluster
with LocalCluster(
    n_workers=2, processes=False, threads_per_worker=1, resources={"reserved": 1}, dashboard_address=None
) as cluster:
    run = spotlight.Run.into(*sys.argv[1:3], sys.argv[3:], cluster=cluster).start()
    while not run.status.refused and run.alive:
        time.sleep(0.1)
    print(*run.status.refused.values())
    run.wait()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "made"), str(settings_file(tmp_path)), *SETTINGS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("another worker of process "), ended.stdout
    assert outcome(tmp_path / "made") == outcome(undisturbed)


def test_a_cluster_in_this_process_drives_no_detached_run(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), cluster="inproc://127.0.0.1/1/1")
    with pytest.raises(SpotlightError, match="this cluster is in this process, and the driver of a detached run is"):
        run.start(detached=True)

    assert not list(tmp_path.glob("run-*")), "nothing began"


def test_the_certificates_of_a_client_are_found_again_in_the_environment() -> None:
    given: Any = certificate()

    found = dask.config.collect_env(certificates_of(given))

    assert dask.config.get("distributed.comm.require-encryption", config=found) is True
    assert dask.config.get("distributed.comm.tls.ca-file", config=found) == given.tls_ca_file
    assert dask.config.get("distributed.comm.tls.client.key", config=found) == given.tls_client_key


def engines() -> list[psutil.Process]:
    """Processes that fork servers of these tests' workers have forked."""
    ours = marked(OURS, os.environ[OURS])
    parents = {each.pid for each in ours if "cluster.worker.fork_server import serve" in " ".join(each.cmdline())}
    return [each for each in ours if each.ppid() in parents]


@pytest.mark.live
def test_a_worker_that_is_warned_leaves_in_order(existing: DaskCluster, begin: Begin) -> None:
    run = begin(existing.address, "run.iterations=100")
    warned = existing.worker("warned", "spot")
    wait_for(lambda: "warned" in {row.get("worker") for row in run.directory.rows(EVENTS)})
    warned.send_signal(signal.SIGTERM)
    warned.wait(timeout=WAIT_S)
    wait_for(lambda: "left" in {row["event"] for row in run.directory.rows(EVENTS)})

    events = [row["event"] for row in run.directory.rows(EVENTS) if row.get("worker") == "warned"]
    assert events == ["joined", "notice", "left"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.json", "is neither an address"),
        ("~nobody-here/scheduler.json", "is neither an address"),
        ("x" * 300, "is neither an address"),
        ("tcp://192.0.2.1:8786", r"cluster\.insecure = true"),
        ("tcp://127.0.0.1:1", "no scheduler answers there"),
        ("http://head:8786", "http://head:8786: is no address of a Dask scheduler"),
        ("tls://head", "tls://head: names no port: give it as in tls://head:8786"),
        ("tcp://127.0.0.1:99999", "tcp://127.0.0.1:99999: names no port: give it as in tcp://127.0.0.1:8786"),
        ("tcp://[::1:8786", r"tcp://\[::1:8786: is no address of a Dask scheduler"),
        ("tcp://head..cluster:8786", r"tcp://head\.\.cluster:8786: anybody who reaches this scheduler"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_named_with_the_way_out(
    begin: Begin, tmp_path: Path, given: str, said: str
) -> None:
    with pytest.raises(SpotlightError, match=said):
        begin(given)

    assert not list(tmp_path.glob("run-*")), "nothing began"


def test_a_name_that_no_host_can_have_is_one_where_nobody_answers(begin: Begin, tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="no scheduler answers there"):
        begin("tcp://head..cluster:8786", "cluster.insecure=true")

    assert not list(tmp_path.glob("run-*")), "nothing began"


@pytest.mark.parametrize(
    ("cause", "speaks_of_certificates"),
    [
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("gaierror: [Errno -2] Name or service not known", False),
        ("SSLError: certificate verify failed", True),
    ],
)
def test_where_nobody_listens_no_certificate_is_blamed(cause: str, speaks_of_certificates: bool) -> None:
    error = OSError("Timed out")
    error.__cause__ = OSError(f"in <distributed.comm.tcp.TLSConnector object at 0x7fb2>: {cause}")

    told = _unreachable("tls://head:8786", error)

    assert f"({cause})" in told
    assert ("certificate" in told.replace(cause, "")) == speaks_of_certificates


def test_a_certificate_whose_file_is_not_there_is_named(begin: Begin, tmp_path: Path) -> None:
    missing = {f"distributed.comm.tls.{name}": str(tmp_path / "cert.pem") for name in ("ca-file", "client.cert")}
    with dask.config.set(missing), pytest.raises(SpotlightError, match=r"there is no file .*cert\.pem, .* whole paths"):
        begin("tls://127.0.0.1:1").wait()


def test_a_worker_without_the_package_is_told_of_before_anything_runs(
    existing: DaskCluster, tmp_path: Path, begin: Begin
) -> None:
    """Dask hands a run's plugin to all workers, also to those that are to take no part."""
    (tmp_path / "bare.py").write_text("import sys\nsys.modules['cluster'] = None\n")
    bare = existing.worker("bare", "other", "--preload", str(tmp_path / "bare.py"))
    with Client(existing.address, set_as_default=False) as client:
        wait_for(lambda: "bare" in {worker["name"] for worker in client.scheduler_info(-1)["workers"].values()})
        try:
            with pytest.raises(SpotlightError, match="a worker of the cluster .* does not have this Spotlight"):
                begin(existing.address).wait()
        finally:
            bare.kill()
        wait_for(lambda: "bare" not in {worker["name"] for worker in client.scheduler_info(-1)["workers"].values()})


def test_a_run_does_not_wait_for_a_worker_that_is_frozen(
    existing: DaskCluster, begin: Begin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.start.run_cluster.HAND_OUT_S", 3.0)
    frozen = existing.worker("frozen", "other")
    with Client(existing.address, set_as_default=False) as client:
        wait_for(lambda: "frozen" in {worker["name"] for worker in client.scheduler_info(-1)["workers"].values()})
    frozen.send_signal(signal.SIGSTOP)
    try:
        run = begin(existing.address, "run.iterations=1")
        run.wait(WAIT_S)
    finally:
        frozen.kill()

    assert "not all workers of the cluster have answered in 3 s" in caplog.text


def test_without_a_certificate_a_scheduler_with_tls_is_not_asked(begin: Begin) -> None:
    nothing = {"distributed.comm.tls.client.cert": None}
    with dask.config.set(nothing), pytest.raises(SpotlightError, match="export DASK_.*TLS__CLIENT__CERT.*clusters"):
        begin("tls://127.0.0.1:1").wait()


def test_an_address_without_tls_is_refused_where_dask_s_configuration_requires_it(begin: Begin, tmp_path: Path) -> None:
    asked = {"distributed.comm.require-encryption": True}
    with dask.config.set(asked), pytest.raises(SpotlightError, match=r"requires it .*: give the scheduler's tls://"):
        begin("tcp://127.0.0.1:1").wait()

    assert not list(tmp_path.glob("run-*")), "nothing began"


def test_a_certificate_whose_file_holds_its_key_is_enough_to_ask(begin: Begin, tmp_path: Path) -> None:
    given = dask_settings(certificates(tmp_path))
    cert, key = (Path(given[f"distributed.comm.tls.client.{name}"]) for name in ("cert", "key"))
    (both := tmp_path / "both.pem").write_text(cert.read_text() + key.read_text())
    del given["distributed.comm.tls.client.key"]
    given["distributed.comm.tls.client.cert"] = str(both)
    with (
        dask.config.set({**given, "distributed.comm.tls.client.key": None}),
        pytest.raises(SpotlightError, match="no scheduler answers there"),
    ):
        begin("tls://127.0.0.1:1").wait()


def test_a_scheduler_of_other_certificates_is_not_spoken_to(
    existing: DaskCluster, begin: Begin, tmp_path: Path
) -> None:
    other = dask_settings(certificates(tmp_path / "other"))
    with dask.config.set(other), pytest.raises(SpotlightError, match="certificate"):
        begin(existing.address).wait()


def test_a_cluster_of_dask_s_own_classes_is_its_scheduler_and_its_certificates() -> None:
    async def found() -> tuple[Any, Any, Any]:
        security = certificate()
        options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "security": security}
        scheduler = {"cls": Scheduler, "options": options}
        cluster = SpecCluster(scheduler=scheduler, security=security, asynchronous=True)
        with pytest.raises(SpotlightError, match="has not begun: await it"):
            where(cluster)
        async with cluster:
            return where(cluster), cluster.scheduler_address, security

    given, address, security = asyncio.run(found())

    assert given == (address, security)


@pytest.mark.parametrize(
    "address", ["tls://head:8786", "tcp://127.0.0.1:8786", "tcp://[::1]:8786", "tcp://localhost:1"]
)
def test_what_others_cannot_reach_or_read_is_safe(address: str) -> None:
    refuse_unsafe(address, insecure=False)


def test_a_network_may_be_trusted_by_a_setting() -> None:
    refuse_unsafe("tcp://192.0.2.1:8786", insecure=True)
