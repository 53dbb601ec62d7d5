"""Reserved and spot pools on this machine: they start the scheduler and keep worker processes alive.

A pool has places; each place keeps one worker process alive, and replaces it some time after it was
lost, as a cloud would. Along a trace, a place also takes its worker away. What runs where is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Scheduler, Security, SpecCluster, Worker
from distributed.deploy.spec import ProcessInterface

from cluster.dashboard.plugin import ROWS, PagePlugin, prepare
from cluster.dispatch import Snapshot, rules_of
from cluster.notices import sources
from cluster.plugins import ControlPlugin, DispatchPlugin
from cluster.workers import WorkerSpec, serve, warm_parent
from spotlight.config import Config, PoolSection
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches, preemption_kinds, ups
from spotlight.records import SpotlightError
from spotlight.store.node import shared_root, sweep

DASK_SETTINGS = {
    "distributed.scheduler.allowed-failures": 1000,  # losing spot workers is normal; see DispatchPlugin.log_event
    "distributed.scheduler.work-stealing": False,  # the dispatcher alone moves work
    "distributed.scheduler.active-memory-manager.start": False,  # results are small, and each is wanted where it is
    "distributed.scheduler.worker-ttl": None,  # see DispatchPlugin._watch, which knows a pause from a loss
    "distributed.scheduler.no-workers-timeout": None,  # tasks behind the gate wait as long as it takes
    "distributed.deploy.lost-worker-timeout": "10000h",  # places replace their own workers
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.admin.tick.limit": "1h",  # a busy laptop is not worth a warning every few seconds
}


logger = logging.getLogger("spotlight.pools")

RETRY_S = 0.05
NEVER_S = 1e9
MADE_UP_S = 24 * 3600.0
"""How long a made-up trace lasts; after that, who is there stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSchedule:
    """When a place has a worker, and how the worker is taken away."""

    replace_after_s: float
    """From a loss to the next worker; along a trace, the trace says when."""
    ups: tuple[tuple[float, float], ...] | None = None
    """``(start_s, stop_s)`` from the place's start: when a worker is there. None: always."""
    kinds: tuple[str, ...] = ("kill",)
    """How workers are taken away at each stop, in turn: "kill", "notice" or "hang"."""
    grace_s: float = 30.0
    """From a notice to the kill."""


class Place(ProcessInterface):
    """One place in a pool: keeps a worker process alive there."""

    def __init__(self, scheduler: str, *, name: str, spec: Mapping[str, Any], schedule: PreemptionSchedule) -> None:
        super().__init__()
        self._spec = WorkerSpec(scheduler=scheduler, name=name, **spec)
        self._schedule = schedule
        self._tasks: list[asyncio.Task[None]] = []
        self._process: ForkServerProcess | None = None
        self._began_s = 0.0

    def evict(self) -> None:
        """End the worker that is there now; the place replaces it as after any other loss."""
        self._signal(signal.SIGKILL)

    async def start(self) -> None:
        await super().start()
        self._began_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._keep())]
        if self._schedule.ups is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._schedule.ups)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._until_up_s())
            try:
                await self._live_once()
            except (EOFError, ConnectionError):  # the warm parent died; the next start makes another
                pass
            except Exception:  # a place that gave up would leave the run waiting without a word
                logger.warning("%s could not start a worker and tries again", self._spec.name, exc_info=True)
            await asyncio.sleep(RETRY_S if self._schedule.ups else self._schedule.replace_after_s)

    def _until_up_s(self) -> float:
        """Seconds until the trace has a worker here; for ever after its end, if it ends without one."""
        if self._schedule.ups is None:
            return 0.0
        now_s = time.monotonic() - self._began_s
        return next((max(0.0, start_s - now_s) for start_s, stop_s in self._schedule.ups if stop_s > now_s), NEVER_S)

    async def _follow(self, ups: Sequence[tuple[float, float]]) -> None:
        for (_, stop_s), kind in zip(ups, cycle(self._schedule.kinds), strict=False):
            await asyncio.sleep(min(stop_s, NEVER_S) - (time.monotonic() - self._began_s))
            if kind == "notice":
                self._signal(signal.SIGTERM)
                self._tasks.append(asyncio.create_task(self._kill_after(self._schedule.grace_s)))
            else:
                self._signal(signal.SIGSTOP if kind == "hang" else signal.SIGKILL)

    async def _kill_after(self, grace_s: float) -> None:
        process = self._process
        await asyncio.sleep(grace_s)
        if process is self._process:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _live_once(self) -> None:
        context = warm_parent()
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(self._spec, theirs), daemon=True)
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, _start, process)  # the first one waits for the warm parent's imports
        try:
            await asyncio.shield(starting)
            theirs.close()
            self._process = process
            await _end_of(process)
        finally:
            self._process = None
            ours.close()  # ends the process if it is still there
            await starting  # called off or not: what is being started is ended before its cluster is
            process.kill()
            await loop.run_in_executor(None, process.join)
            process.close()


class Pools:
    """The cluster of one run: scheduler, head and both pools, all on this machine and on loopback.

    They speak TLS, and each proves with the run's own certificate that it belongs there: who can talk to a Dask
    process can have it run anything. The certificate is made anew for each run and lives in memory only.
    """

    cluster: SpecCluster

    def __init__(self, config: Config, run: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="spotlight-"))
            private = {"temporary-directory": directory}  # Dask imports from there; its default is open to other users
            stack.enter_context(dask.config.set(DASK_SETTINGS | private))
            self._plugin = plugin = DispatchPlugin(run, rules_of(config), evict=self._evict)
            roots = stack.enter_context(_node_roots(run, directory))
            security = Security.temporary() if config.cluster.tls else None
            self.cluster = stack.enter_context(_cluster(config, directory, plugin, roots, security))
            self.client = stack.enter_context(Client(self.cluster, set_as_default=False))
            self._stack = stack.pop_all()

    def _evict(self, name: str) -> None:
        self.cluster.workers[name].evict()

    @property
    def dashboard(self) -> str:
        """Address of Dask's dashboard."""
        return str(self.cluster.dashboard_link)

    def status(self) -> dict[str, Any]:
        return self._ask("spotlight_status")

    def snapshot(self) -> Snapshot:
        """What the dispatcher knows now; the scheduler is in this process."""
        plugin = self._plugin

        async def ask() -> Snapshot:
            return plugin.snapshot()

        return self.client.sync(ask)

    def drain(self) -> dict[str, Any]:
        return self._ask("spotlight_drain")

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Hand the page on the dashboard what only the driver knows; see `spotlight.report.feed`."""
        self.client.sync(getattr(self.client.scheduler, ROWS), rows=rows)

    def stop(self) -> None:
        """Launch nothing more, end what runs at its next step boundary."""
        self._ask("spotlight_stop")

    def close(self) -> None:
        self._stack.close()

    def _ask(self, name: str) -> Any:
        return self.client.sync(getattr(self.client.scheduler, name))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Dask reports each lost worker as a fault, down to the last ones at the end; here they are expected."""
    levels = {"distributed": logging.ERROR, "distributed.worker": logging.CRITICAL}  # as in the worker processes
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _start(process: ForkServerProcess) -> None:
    """Start with SIGINT blocked in this thread, which a new warm parent inherits: Ctrl-C is for the driver alone."""
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()


async def _end_of(process: ForkServerProcess) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)


@contextlib.contextmanager
def _node_roots(run: str, directory: str) -> Iterator[Callable[[str], Path]]:
    """Where each node of this machine has its shared memory; freed at the end."""
    token = f"{run}-{Path(directory).name}"  # a run's name may occur in several directories
    roots: dict[str, Path] = {}

    def root(node: str) -> Path:
        return roots.setdefault(node, shared_root(f"{token}-{node.removeprefix('node:')}"))

    try:
        yield root
    finally:
        for path in roots.values():
            sweep(path)


def _cluster(
    config: Config, directory: str, plugin: DispatchPlugin, root: Callable[[str], Path], security: Security | None
) -> SpecCluster:
    address = {
        "host": "127.0.0.1",
        "security": security,
        "dashboard_address": f"127.0.0.1:{config.cluster.dashboard_port}",
    }
    common = {
        "local_directory": directory,
        "security": security,
        "settings": DASK_SETTINGS,
        "hang_after_s": config.cluster.hang_after_s,
        "quarantine_after": config.cluster.quarantine_after,
    }
    prepare()
    places: dict[str, Any] = {}
    for pool, section in (("reserved", config.pools.reserved), ("spot", config.pools.spot)):
        schedules = _schedules(section, config.run.seed)
        for index in range(section.workers):
            spec = _spec(pool, section, index, root) | common | {"number": len(places)}
            places[f"{pool}-{index}"] = {"cls": Place, "options": {"spec": spec, "schedule": schedules[index]}}
    return SpecCluster(
        scheduler={"cls": Scheduler, "options": {**address, "plugins": [plugin, PagePlugin()]}},
        workers={"head": _head(directory, security), **places},
        security=security,
    )


def _spec(pool: str, section: PoolSection, index: int, root: Callable[[str], Path]) -> dict[str, Any]:
    node = f"node:{pool}-{index // section.workers_per_node}"
    return {
        "resources": {"engine": 1, pool: 1, node: 1},
        "node": root(node),
        "notices": _checked_notices(pool, section.notices),
        "grace_s": section.grace_s,
    }


def _checked_notices(pool: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if all are known.

    Raises:
        SpotlightError: a name is not known.
    """
    try:
        sources(names)
    except SpotlightError as error:
        raise SpotlightError(f"pools.{pool}.{error}") from None
    return names


def _schedules(section: PoolSection, seed: int) -> list[PreemptionSchedule]:
    """Of each place of a pool: for ever, or along the pool's trace."""
    schedule = PreemptionSchedule(
        replace_after_s=section.replace_after_s, kinds=preemption_kinds(section), grace_s=section.grace_s
    )
    if not section.trace and not section.trace_model:
        return [schedule] * section.workers
    recorded = read_trace(section.trace) if section.trace else None
    switches = pool_switches(section, recorded, seed=seed, duration_s=MADE_UP_S)
    return [replace(schedule, ups=ups(moments)) for moments in switches]


def _head(directory: str, security: Security | None) -> dict[str, Any]:
    """A worker beside the scheduler for what only decides; it never runs a model."""
    options = {
        "name": "head",
        "host": "127.0.0.1",
        "security": security,
        "nthreads": 4,
        "resources": {"head": 4},
        "memory_limit": 0,
        "dashboard": False,
        "local_directory": directory,
        "plugins": (ControlPlugin(),),
    }
    return {"cls": Worker, "options": options}
