"""A whole run under fire: dozens of workers and engines killed at random, and the outcome is the same to the bit."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic import engine_pid
from kills import client_of
from runs import outcome, settings_file
from spotlight.records import Stopped
from spotlight.run import Run
from spotlight.store.rows import HISTORY

PAUSE_S = 0.1
"""Between two kills, at most: a worker that is replaced in half a second is seldom hit while it boots."""
FATES = {"worker killed": 6, "engine killed": 6, "notice": 2, "killed while it boots": 2, "engine frozen": 1}
"""How often each occurs, in proportion."""
SIGNALS = {"notice": signal.SIGTERM, "engine frozen": signal.SIGSTOP}
SETTINGS = [
    "run.validate_every=1",
    "rollout.prompts=2",
    "rollout.steps=10",
    "rollout.sampler=dpm2",  # needs the step before, too
    "strategy.widths=[2]",
    'strategy.rollout_pools=["spot"]',
    'strategy.train_pools=["reserved","spot"]',
    "train.width=2",
    "train.parts=4",
    "pools.spot.workers=4",
    "pools.spot.workers_per_node=2",
    "pools.spot.replace_after_s=0.1",
    "pools.spot.grace_s=2",
    "cluster.hang_after_s=1",
    "cluster.quarantine_after=1000",  # so many kills say nothing about a request
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.live)])
def test_kills_by_the_dozen_change_no_bit(tmp_path: Path, kills: int) -> None:
    run = Run(settings_file(tmp_path), [*SETTINGS, f"run.iterations={kills}"]).start()
    client_of(run)
    done = Chaos(random.Random(0), run).strike(kills)
    run.stop()
    with pytest.raises(Stopped):
        run.wait()
    iterations = len(run.directory.rows(HISTORY))

    quiet = Run(settings_file(tmp_path), [*SETTINGS, f"run.iterations={iterations + 1}"]).start()
    quiet.wait()

    assert done.total() >= kills
    assert all(done[fate] > 0 for fate in FATES)
    assert iterations > 0
    assert beginning(outcome(run.directory.path), iterations) == beginning(outcome(quiet.directory.path), iterations)


def beginning(outcome: dict[str, list[Any]], iterations: int) -> dict[str, list[Any]]:
    """What a run's first iterations led to."""
    return {part: rows[:iterations] for part, rows in outcome.items()}


class Chaos:
    """Strikes the spot workers of a run that lives in this process."""

    def __init__(self, chance: random.Random, run: Run) -> None:
        self._chance = chance
        self._run = run

    def strike(self, times: int) -> Counter[str]:
        """At least so many blows that hit something, and one of each kind, until an iteration is through; how many."""
        done: Counter[str] = Counter()
        pause = threading.Event()
        while self._run.alive and (
            done.total() < times or done.keys() != FATES.keys() or not self._run.directory.rows(HISTORY)
        ):
            (fate,) = self._chance.choices(list(FATES), list(FATES.values()))
            pid = self._boot() if fate == "killed while it boots" else self._victim(fate)
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGNALS.get(fate, signal.SIGKILL))
                    done[fate] += 1
            pause.wait(self._chance.uniform(0, PAUSE_S))
        return done

    def _boot(self) -> int | None:
        """A worker that has not joined yet."""
        places = self._places()
        joined = self._joined()
        booting = [places[name]._process for name in places if name.startswith("spot") and name not in joined]
        with suppress(ValueError, IndexError, AttributeError):  # there is none, or it ended this moment
            return int(booting[0].pid)
        return None

    def _places(self) -> dict[str, Any]:
        assert self._run.pools
        assert self._run.pools.cluster
        return self._run.pools.cluster.workers

    def _victim(self, fate: str) -> int | None:
        """A spot worker that has joined, or its engine."""
        joined = self._joined()
        if not joined:
            return None
        name = self._chance.choice(sorted(joined))
        with suppress(OSError, AttributeError, ValueError):  # it is gone, or going
            if not fate.startswith("engine"):
                return int(self._places()[name]._process.pid)
            pid = self._run.client.run(engine_pid, workers=[joined[name]], on_error="return").get(joined[name])
            return pid if isinstance(pid, int) else None
        return None

    def _joined(self) -> dict[str, str]:
        """Addresses of the spot workers, by name; none of a run that is ending."""
        workers = self._run.client.scheduler_info(n_workers=-1).get("workers", {})
        return {worker["name"]: address for address, worker in workers.items() if worker["name"].startswith("spot")}


@pytest.mark.live
def test_a_worker_whose_engine_always_dies_costs_time_and_changes_no_bit(tmp_path: Path) -> None:
    """As one with a broken GPU: what it cannot do, others do, and nothing is set aside for it."""
    overrides = ["run.iterations=3", "strategy.widths=[1]", 'strategy.train_pools=["reserved","spot"]', "train.parts=4"]
    run = Run(settings_file(tmp_path), overrides).start()
    client, killed = client_of(run), set[int]()
    while run.alive and run.directory.count(HISTORY) < 2:  # the client of a run that ends answers nobody
        workers = client.scheduler_info(n_workers=-1).get("workers", {})
        sick = [address for address, worker in workers.items() if worker["name"] == "spot-0"]
        with suppress(OSError, AttributeError, ValueError, TypeError):  # it is not there yet, or ends anyway
            (pid,) = client.run(engine_pid, workers=sick, on_error="return").values()
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    run.wait()

    quiet = Run(settings_file(tmp_path), overrides).start()
    quiet.wait()

    assert len(killed) > 1
    assert outcome(run.directory.path) == outcome(quiet.directory.path)
    assert run.directory.all_quarantined() == []
