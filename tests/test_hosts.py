"""On several hosts: one dies, the cable of one is pulled, frames come late or never, and the bits are the same.

One run, on a Dask cluster of the documentation's commands: the scheduler and the driver on one host, a reserved and two
spot workers on others, which share the run directory and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graphs.loop import Loop, synchronous
from hosts import Hosts, missing
from runs import COLD_S, LITTLE, ROOT, NoWatch, little_file, outcome, wait_for
from spotlight import config
from spotlight.store.rundir import EVENTS, HISTORY, SPANS, RunDir
from standing import certificates

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same settings lead to without any cluster."""
    run = RunDir.create(config.load(little_file(tmp_path_factory.mktemp("alone")), LITTLE), now_s=0.0)
    Loop(run, synchronous, NoWatch()).go()
    return outcome(run.path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    made = Hosts(tmp_path_factory.mktemp("shared"), "head", *WORKERS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def attacked(hosts: Hosts, undisturbed: dict[str, Any]) -> Attacked:
    """In the first iteration's rollouts a cable is pulled, in the second's a host is killed."""
    driver, run = begin(hosts)
    wait_for(lambda: rolling_out(run, 0), at_most_s=COLD_S)
    pulled_s = time.time()
    hosts.pull("cut")
    wait_for(lambda: rolling_out(run, 1), at_most_s=COLD_S)
    killed_s = time.time()
    hosts.kill("doomed")

    assert driver.wait(COLD_S) == 0, hosts.log("head")
    return Attacked(run=RunDir(run), pulled_s=pulled_s, killed_s=killed_s)


def begin(hosts: Hosts) -> tuple[subprocess.Popen[bytes], Path]:
    """The driver of a run on workers that are there, and the run's directory."""
    tls = certificates(hosts.shared / "tls")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **tls}
    here, run = f"tls://{hosts.address('head')}:{PORT}", hosts.shared / "run"

    def dask(host: str, *arguments: str) -> None:
        address = ("--host", hosts.address(host))
        hosts.start(host, [sys.executable, "-m", "dask", *arguments, *address], environment)

    dask("head", "scheduler", "--protocol", "tls", "--port", str(PORT), "--dashboard-address", "127.0.0.1:0")
    for name, pool in WORKERS.items():
        line = f"--name {name} --no-nanny --nthreads 1 --memory-limit 0 --no-dashboard --resources {pool}=1"
        dask(name, "worker", here, *line.split())
    for name in ("head", *WORKERS):
        hosts.spoil(name, **NETWORK)
    wait_for(lambda: all(f"name: {name}\n" in hosts.log("head") for name in WORKERS), at_most_s=COLD_S)
    given = [part for setting in (*LITTLE, *PACED) for part in ("--set", setting)]
    command = ["-m", "spotlight", "run", str(little_file(hosts.shared)), "--into", str(run), "--cluster", here]
    return hosts.start("head", [sys.executable, *command, *given], environment), run


def rolling_out(run: Path, iteration: int) -> bool:
    return any((run / "latents" / "commits" / f"{iteration:05}").glob("*/commit.*"))


def test_the_bits_are_those_of_a_run_without_hosts(attacked: Attacked, undisturbed: dict[str, Any]) -> None:
    assert outcome(attacked.run.path) == undisturbed
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
