"""A cluster on this machine: a Dask scheduler, and pools that keep worker processes alive.

A pool has places; each place keeps one worker process alive, and replaces it some time after it was
lost, as a cloud would. Along a trace, a place also takes its worker away; traces begin when the first workers are
there. What runs where is not decided here, and these workers join a run as any others do
(`cluster.worker.plugin`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import Any

from distributed import SpecCluster
from distributed.deploy.spec import ProcessInterface

from cluster.certificate import certificate
from cluster.scheduler.scheduler import LeanScheduler
from cluster.worker.process import (
    FOR_OTHERS,
    WorkerSpec,
    end_own_fork_server_at_its_imports,
    made_by_own_fork_server,
    own_fork_server,
    serve,
)
from spotlight.config import Config, PoolSection
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import made_up_s, pool_switches, preemption_kinds, ups
from spotlight.records import record
from spotlight.store.device_locks import is_stopped

RETRY_S = 0.05
START_ATTEMPTS = 6
"""Failures in a row until a place gives up; the pause before each try doubles: 3 s in all."""
LIVED_S = 600.0
"""The failure of a process that lived so long is the first of its row: it could start."""
FROZEN_MARGIN_S = 5.0
"""Added to the time after which the scheduler has a silent worker ended."""
NEVER_S = 1e9


@record
class PreemptionSchedule:
    """When a place has a worker, and how the worker is taken away."""

    replace_after_s: float
    """Seconds from a loss to the next worker; along a trace, the trace says when."""
    ups: tuple[tuple[float, float], ...] | None = None
    """``(start_s, stop_s)`` from the trace's beginning: when a worker is there. None: always."""
    kinds: tuple[str, ...] = ("kill",)
    """How workers are taken away at each stop, in turn: "kill", "notice" or "hang"."""
    grace_s: float = 30.0
    """Seconds from a notice to the kill."""
    frozen_s: float = 60.0
    """Seconds after which a frozen worker is killed here, or at most twice as many, if the scheduler has not done so:
    it may not have joined yet."""

    @property
    def is_up_first(self) -> bool:
        """Whether a worker is there when the trace begins."""
        return self.ups is None or any(start_s == 0 for start_s, _ in self.ups)


class TraceClock:
    """Seconds since the traces of a cluster began, which is when all first workers have joined.

    Args:
        first: names of their places.
    """

    def __init__(self, first: Iterable[str]) -> None:
        self._awaited = set(first)
        self._begun = asyncio.Event()
        self._began_s = 0.0
        self._begin_if_all_are_there()

    def heard_of(self, place: str) -> None:
        """A worker has joined; to be called on the event loop of the places."""
        self._awaited.discard(place)
        self._begin_if_all_are_there()

    def _begin_if_all_are_there(self) -> None:
        if not (self._awaited or self._begun.is_set()):
            self._began_s = time.monotonic()
            self._begun.set()

    async def begun(self) -> None:
        await self._begun.wait()

    @property
    def now_s(self) -> float:
        """Seconds since the traces began; 0 before."""
        return time.monotonic() - self._began_s if self._begun.is_set() else 0.0


class WorkerKeeper(ProcessInterface):
    """One place in a pool: keeps a worker process alive there."""

    def __init__(
        self, scheduler: str, *, name: str, spec: Mapping[str, Any], schedule: PreemptionSchedule, clock: TraceClock
    ) -> None:
        super().__init__()
        self._spec = WorkerSpec(scheduler=scheduler, name=name, **spec)
        self._schedule = schedule
        self.clock = clock
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: ForkServerProcess | None = None
        self.failure = ""
        """Why the place has given up; empty while it has not."""

    def has(self, worker: str) -> bool:
        """Whether this place has the worker of this name."""
        return worker == self._spec.name

    def evict(self) -> None:
        """Kill this place's worker; it is replaced as after any other loss."""
        self._signal(signal.SIGKILL)

    def want(self, wanted: bool) -> None:
        """Set whether there is to be a worker here; one that is no longer wanted gets a notice, and is not replaced."""
        if wanted:
            self._wanted.set()
        elif self._wanted.is_set():
            self._wanted.clear()
            self._warn()
            self.clock.heard_of(self._spec.name)  # it may never join, and traces do not wait for it

    async def start(self) -> None:
        await super().start()
        self._tasks = [asyncio.create_task(self._keep())]
        if self._schedule.ups is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._schedule.ups)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    async def _keep(self) -> None:
        failures = 0
        while failures < START_ATTEMPTS:
            await self._wanted.wait()
            if self._until_up_s():
                await self.clock.begun()
                await asyncio.sleep(self._until_up_s())
            began_s = time.monotonic()
            try:
                self._spec.last_words.unlink(missing_ok=True)  # of an earlier process
                cause = self._why() if await self._live_once() else ""
            except Exception as error:  # EOFError: the fork server died; the next start makes another
                if (task := asyncio.current_task()) and task.cancelling():
                    raise  # the place is closed: the clean-up's error came instead of the cancellation
                cause = str(error) or repr(error)
            if time.monotonic() - began_s > LIVED_S:
                failures = 0
            failures = failures + 1 if cause else 0
            wait_s = RETRY_S if self._schedule.ups else self._schedule.replace_after_s
            await asyncio.sleep(max(wait_s, RETRY_S * 2**failures if failures else 0.0))
        self.failure = f"{self._spec.name}: {failures} worker processes in a row failed: {cause}"

    def _why(self) -> str:
        """The last output of the process before it ended."""
        said = self._spec.last_words
        return said.read_text() if said.exists() else "it said nothing"

    def _until_up_s(self) -> float:
        """Seconds until the trace has a worker here; for ever after its end, if it ends without one."""
        if self._schedule.ups is None:
            return 0.0
        now_s = self.clock.now_s
        return next((max(0.0, start_s - now_s) for start_s, stop_s in self._schedule.ups if stop_s > now_s), NEVER_S)

    async def _follow(self, ups: Sequence[tuple[float, float]]) -> None:
        await self.clock.begun()
        for (_, stop_s), kind in zip(ups, cycle(self._schedule.kinds), strict=False):
            await asyncio.sleep(min(stop_s, NEVER_S) - self.clock.now_s)
            if kind == "notice":
                self._warn()
            elif kind == "hang":
                self._signal(signal.SIGSTOP)  # see `_end_of`
            else:
                self._signal(signal.SIGKILL)

    def _warn(self) -> None:
        self._signal(signal.SIGTERM)
        killing = asyncio.create_task(self._kill_after(self._schedule.grace_s))
        self._tasks = [*(task for task in self._tasks if not task.done()), killing]

    async def _kill_after(self, grace_s: float) -> None:
        process = self._process
        await asyncio.sleep(grace_s)
        if process is self._process:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _live_once(self) -> bool:
        """Start a process and wait for its end; returns whether it failed by itself."""
        context = own_fork_server()
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(self._spec, dict(os.environ), theirs), daemon=True)
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(_starters, _start, process)  # the first waits for the fork server's imports
        try:
            await asyncio.shield(starting)
            theirs.close()
            self._process = process
            if self._until_up_s() == 0 and self._wanted.is_set():  # else it was lost before it was there
                await _end_of(process, self._schedule.frozen_s)
                return process.exitcode is not None and process.exitcode > 0
            return False
        finally:
            self._process = None
            ours.close()  # ends the process if it is still there
            while not starting.done():  # called off; a start that waited for its turn makes another fork server
                end_own_fork_server_at_its_imports()
                await asyncio.wait([starting], timeout=RETRY_S)
            with contextlib.suppress(EOFError, OSError):  # the fork server died, as who is not called off was told
                await starting  # what is being started is ended before its cluster is
                process.kill()
                await loop.run_in_executor(None, process.join)
            process.close()


_starters = ThreadPoolExecutor(thread_name_prefix="spotlight-start")
"""Threads that start processes and wait for imports: Dask needs the event loop's own threads meanwhile."""


def _start(process: ForkServerProcess) -> None:
    """Start with signals blocked in this thread: if the fork server has just died, its successor inherits that."""
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_OTHERS)
    made_by_own_fork_server(process)


async def _end_of(process: ForkServerProcess, frozen_s: float) -> None:
    """Wait for its end. It is killed if it was stopped at two looks in a row, as nobody else knows of one that has not
    joined yet."""
    loop, ended, was_stopped = asyncio.get_running_loop(), asyncio.Event(), False
    loop.add_reader(process.sentinel, ended.set)
    try:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), frozen_s)
            stopped = process.pid is not None and is_stopped(process.pid)
            if stopped and was_stopped:
                process.kill()
            was_stopped = stopped
    finally:
        loop.remove_reader(process.sentinel)


def local_cluster(config: Config, directory: str, settings: Mapping[str, Any]) -> SpecCluster:
    """Scheduler and all pools, on loopback.

    They use TLS, and each proves with the run's own certificate that it belongs there: whoever can connect to a Dask
    process can run any code in it. The certificate is made for each run and kept in memory only.

    Args:
        directory: private to this user, for Dask's scratch files.
        settings: Dask's configuration for the workers.
    """
    security = certificate() if config.cluster.tls else None
    common = {"local_directory": directory, "security": security, "settings": settings}
    options: dict[str, dict[str, Any]] = {}
    for pool, section in config.pools:
        for index, schedule in enumerate(_schedules(pool, section, config)):
            node = f"node:{pool}-{index // section.workers_per_node}"
            spec = {"resources": {pool: 1, node: 1}, **common}
            options[f"{pool}-{index}"] = {"spec": spec, "schedule": schedule}
    clock = TraceClock(name for name, option in options.items() if option["schedule"].is_up_first)
    places = {name: {"cls": WorkerKeeper, "options": {**option, "clock": clock}} for name, option in options.items()}
    dashboard = f"{config.cluster.dashboard_host}:{config.cluster.dashboard_port}"
    address = {"host": "127.0.0.1", "dashboard_address": dashboard, "security": security, "local_directory": directory}
    return SpecCluster(scheduler={"cls": LeanScheduler, "options": address}, workers=places, security=security)


def _schedules(name: str, section: PoolSection, config: Config) -> list[PreemptionSchedule]:
    """The schedule of each place of a pool: always up, or along the pool's trace."""
    schedule = PreemptionSchedule(
        replace_after_s=section.replace_after_s,
        kinds=preemption_kinds(section),
        grace_s=section.grace_s,
        frozen_s=config.cluster.hang_after_s + FROZEN_MARGIN_S,
    )
    if not section.trace and not section.trace_model:
        return [schedule] * section.workers
    recorded = read_trace(section.trace) if section.trace else None
    switches = pool_switches(section, recorded, seed=config.run.seed, duration_s=made_up_s(section), name=name)
    return [replace(schedule, ups=ups(moments)) for moments in switches]
