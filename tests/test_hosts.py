"""On several hosts: one dies, the cable of one is pulled, frames come late or never, and the bits are the same.

One run, on a Dask cluster of the documentation's commands: the scheduler and the driver on one host, a reserved and two
spot workers on others, which share the run directory and nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from existing import certificates
from hosts import Hosts, missing
from runs import COLD_S, LITTLE, ROOT, outcome, settings_file, wait_for
from spotlight.store.rows import EVENTS, HISTORY, SPANS
from spotlight.store.rundir import RunDir
from strikes import EXPLORING, SLOWLY, strike, undisturbed

HANG_AFTER_S = 15.0
PACED = ("pace.gpu=h100", "pace.score_s=0", "pace.speedup=3", f"cluster.hang_after_s={HANG_AFTER_S}")
"""A rollout lasts a second, and shows that it is under way by what it commits."""
WORKERS = {"trainer": "reserved", "cut": "spot", "doomed": "spot"}
"""Each on a host of its name: the pool of its worker."""
NETWORK = {"delay_s": 0.005, "drop": 0.01}
"""Of each cable: 20 ms from host to host and back, and every fiftieth frame lost."""
PORT = 8786


pytestmark = [pytest.mark.live, pytest.mark.timeout(3 * COLD_S)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attacked:
    """A run, and when it was attacked."""

    run: RunDir
    pulled_s: float
    killed_s: float

    def events(self, *kinds: str) -> list[tuple[str, str, float]]:
        """Event, worker and time, of these kinds."""
        rows = self.run.rows(EVENTS)
        return [(row["event"], row["worker"], row["at_s"]) for row in rows if row["event"] in kinds and "worker" in row]


@contextmanager
def made(shared: Path) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    hosts = Hosts(shared, "head", *WORKERS)
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """In the first iteration's rollouts a cable is pulled, in the second's a host is killed."""
    with made(tmp_path_factory.mktemp("shared")) as hosts:
        yield attack(hosts)


def attack(hosts: Hosts) -> Attacked:
    driver, run = Cluster(hosts).run(*LITTLE, *PACED)
    wait_for(lambda: rolling_out(run, 0), at_most_s=COLD_S)
    pulled_s = time.time()
    hosts.pull("cut")
    wait_for(lambda: rolling_out(run, 1), at_most_s=COLD_S)
    killed_s = time.time()
    hosts.kill("doomed")

    assert driver.wait(COLD_S) == 0, hosts.log("head")
    return Attacked(run=RunDir(run), pulled_s=pulled_s, killed_s=killed_s)


class Cluster:
    """A scheduler and workers on hosts, by the documentation's commands, and a run's driver beside the scheduler."""

    def __init__(self, hosts: Hosts) -> None:
        tls = certificates(hosts.shared / "tls")
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "OMP_NUM_THREADS": "1",
            **tls,
        }
        self._hosts, self._address = hosts, f"tls://{hosts.address('head')}:{PORT}"
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        address = f"--dashboard-address 127.0.0.1:0 --host {hosts.address('head')}"
        self._start("head", f"dask scheduler --protocol tls --port {PORT} {address}")
        for name in WORKERS:
            self.worker(name)
        for name in ("head", *WORKERS):
            hosts.spoil(name, **NETWORK)
        wait_for(lambda: all(f"name: {name}\n" in hosts.log("head") for name in WORKERS), at_most_s=COLD_S)

    def worker(self, name: str) -> None:
        """The worker of a host; anew, if there was one."""
        line = f"--name {name} --no-nanny --nthreads 1 --memory-limit 0 --no-dashboard --resources {WORKERS[name]}=1"
        host = f"--host {self._hosts.address(name)}"
        self._workers[name] = self._start(name, f"dask worker {self._address} {line} {host}")

    def send(self, name: str, what: signal.Signals) -> None:
        """A signal to the worker of a host."""
        of_host(self._workers[name]).send_signal(what)

    def run(self, *settings: str) -> tuple[subprocess.Popen[bytes], Path]:
        """The driver of a new run, and the run's directory."""
        shared = self._hosts.shared
        given = " ".join(f"--set {setting}" for setting in settings)
        file = settings_file(shared)
        line = f"spotlight run {file} --into {shared / 'run'} --cluster {self._address} {given}"
        return self._start("head", line), shared / "run"

    def resume(self, run: Path) -> subprocess.Popen[bytes]:
        return self._start("head", f"spotlight resume {run} --cluster {self._address}")

    def _start(self, host: str, line: str) -> subprocess.Popen[bytes]:
        return self._hosts.start(host, [sys.executable, "-m", *line.split()], self._environment)


def of_host(entered: subprocess.Popen[bytes]) -> psutil.Process:
    """The process itself that was started on a host."""
    (process,) = psutil.Process(entered.pid).children()
    return process


def rolling_out(run: Path, iteration: int) -> bool:
    return any((run / "latents" / "commits" / f"{iteration:05}").glob("*/commit.*"))


def test_the_bits_are_those_of_a_run_without_hosts(attacked: Attacked, tmp_path: Path) -> None:
    assert outcome(attacked.run.path) == undisturbed(tmp_path, LITTLE)
    assert len(attacked.run.rows(HISTORY)) == 2


def test_a_host_whose_cable_is_pulled_is_given_up_after_the_limit(attacked: Attacked) -> None:
    ((_, worker, at_s),) = attacked.events("hung")
    assert worker == "cut"
    assert HANG_AFTER_S - 1.0 < at_s - attacked.pulled_s < HANG_AFTER_S + 4.0


def test_a_host_that_is_killed_is_missed_at_once_and_its_work_is_done_elsewhere(attacked: Attacked) -> None:
    lost = {worker: at_s for _, worker, at_s in attacked.events("lost")}
    work = {row["worker"] for row in attacked.run.rows(SPANS) if row["outcome"] == "lost"}
    assert lost.keys() == work == {"cut", "doomed"}
    assert lost["doomed"] - attacked.killed_s < 2.0


def test_whoever_is_killed_warned_or_frozen_on_several_hosts_the_bits_are_the_same(tmp_path: Path) -> None:
    """In exploration, rollout and training; then the driver, which is resumed."""
    (shared := tmp_path / "shared").mkdir()
    with made(shared) as hosts:
        cluster = Cluster(hosts)
        driver, run = cluster.run(*EXPLORING, *SLOWLY, f"cluster.hang_after_s={HANG_AFTER_S}")
        killed = strike(run, "explore-r0-0", signal.SIGKILL, cluster.send)
        cluster.worker(killed)
        warned = strike(run, "rollout-0", signal.SIGTERM, cluster.send)
        cluster.worker(warned)
        trainer = strike(run, "train-0", signal.SIGKILL, cluster.send)
        cluster.worker(trainer)
        frozen = strike(run, "rollout-1", signal.SIGSTOP, cluster.send)
        wait_for(lambda: "hung" in {row["event"] for row in RunDir(run).rows(EVENTS)}, at_most_s=COLD_S)
        strike(run, "train-1", signal.SIGKILL, lambda *_: of_host(driver).kill())
        assert driver.wait(COLD_S) != 0

        assert cluster.resume(run).wait(COLD_S) == 0, hosts.log("head")

    ends = {(row["event"], row.get("worker")) for row in RunDir(run).rows(EVENTS)}
    assert outcome(run) == undisturbed(tmp_path / "alone", EXPLORING)
    assert {("lost", killed), ("left", warned), ("lost", trainer), ("hung", frozen)} <= ends
    assert trainer == "trainer"


def test_gradients_that_are_computed_and_added_on_several_hosts_give_the_same_bits(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    everywhere = (*EXPLORING, "train.parts=8", 'strategy.train_pools=["reserved","spot"]')
    with made(shared) as hosts:
        cluster = Cluster(hosts)
        driver, run = cluster.run(*everywhere, *SLOWLY)
        killed = strike(run, "train-0", signal.SIGKILL, cluster.send)
        cluster.worker(killed)
        assert driver.wait(COLD_S) == 0, hosts.log("head")

    done = [row for row in RunDir(run).rows(SPANS) if row["outcome"] == "done"]
    added = [row["worker"] for row in done if row["phase"] == "add"]
    assert outcome(run) == undisturbed(tmp_path / "alone", everywhere)
    assert len(added) == 2 * len(WORKERS)  # iterations, slices
    assert len(set(added)) > 1
    assert ("lost", killed) in {(row["event"], row.get("worker")) for row in RunDir(run).rows(EVENTS)}
