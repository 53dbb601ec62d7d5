"""Kill -9 at a chosen moment: plugins that watch the scheduler, which lives in the test's own process."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
from distributed import Client, Scheduler, SchedulerPlugin
from distributed.scheduler import WorkerState

from runs import kill, wait_for
from spotlight.records import SpotlightError
from spotlight.run import Run

MID_TASK_S = 0.02
"""After its launch a tiny rollout is in the middle of its steps; it lasts some 0.1 s."""


class KillDriver(SchedulerPlugin):
    """Kills this very process when a task of a layer enters a state of Dask's."""

    name = "kill-driver"

    def __init__(self, layer: str, state: str) -> None:
        self._layer, self._state = layer, state

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        if isinstance(key, tuple) and key[0].startswith(f"{self._layer}-") and finish == self._state:
            kill(os.getpid())


class KillWorkers(SchedulerPlugin):
    """Kills the first so many workers of a pool that have a task of a phase, so long after they were given it.

    Args:
        settle_s: time for which a worker is stopped before it is killed. One that turns out to have ended its task goes
            on: the scheduler had not read that yet. 0: it is killed at once, and may be at its next task by then.
    """

    name = "kill-workers"

    def __init__(
        self, phase: str, *, pool: str, count: int, after_s: float = MID_TASK_S, settle_s: float = 0.0
    ) -> None:
        self._phase, self._pool, self._left, self._after_s, self._settle_s = phase, pool, count, after_s, settle_s

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        if isinstance(key, tuple) and key[0].startswith(self._phase) and finish == "processing":
            self._scheduler.loop.call_later(self._after_s, self._kill, key)

    def _kill(self, key: Any) -> None:
        worker = self._worker_of(key)
        if worker and self._pool in worker.resources and self._left:
            self._left -= 1
            pid = process_of(worker.address)
            if self._settle_s:
                os.kill(pid, signal.SIGSTOP)
                self._scheduler.loop.call_later(self._settle_s, self._kill_stopped, key, pid)
            else:
                kill(pid)

    def _kill_stopped(self, key: Any, pid: int) -> None:
        if self._worker_of(key):
            kill(pid)
        else:
            os.kill(pid, signal.SIGCONT)
            self._left += 1

    def _worker_of(self, key: Any) -> WorkerState | None:
        task = self._scheduler.tasks.get(key)
        return task.processing_on if task else None


class KillHolder(SchedulerPlugin):
    """Kills, once, the worker that has just done a task."""

    name = "kill-holder"

    def __init__(self, layer: str, index: int) -> None:
        self._layer, self._index, self._struck = layer, index, False

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **facts: Any) -> None:
        ours = isinstance(key, tuple) and key[0].startswith(f"{self._layer}-") and key[1] == self._index
        if ours and finish == "memory" and not self._struck:
            self._struck = True
            kill(process_of(facts["worker"]))


def process_of(address: str) -> int:
    """Id of the process that listens on a Dask address."""
    port = int(address.rsplit(":", 1)[1])
    found = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    ]
    assert found[0] is not None
    return found[0]


def client_of(run: Run) -> Client:
    """The client of a run that is starting."""

    def client() -> Client | None:
        try:
            return run.client
        except SpotlightError:
            return None

    found = wait_for(client)
    assert isinstance(found, Client)
    return found
