"""Reserved and spot pools on this machine: they start the scheduler and keep worker processes alive.

A pool has places; each place keeps one worker process alive, and replaces it some time after it was
lost, as a cloud would. What runs where is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import Any

import dask
from distributed import Client, Scheduler, SpecCluster, Worker
from distributed.deploy.spec import ProcessInterface

from cluster.plugins import Ears, Placer
from cluster.workers import WorkerSpec, serve, warm_parent
from spotlight.config import Config, PoolSection

SETTINGS = {
    "distributed.scheduler.allowed-failures": 1000,  # losing spot workers is normal; see Placer.log_event
    "distributed.scheduler.work-stealing": False,  # the placer alone moves work
    "distributed.scheduler.active-memory-manager.start": False,  # results are small, and each is wanted where it is
    "distributed.scheduler.worker-ttl": "30s",
    "distributed.scheduler.no-workers-timeout": None,  # tasks behind the gate wait as long as it takes
    "distributed.deploy.lost-worker-timeout": "10000h",  # places replace their own workers
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.admin.tick.limit": "1h",  # a busy laptop is not worth a warning every few seconds
}


class Place(ProcessInterface):
    """One place in a pool: keeps a worker process alive there."""

    def __init__(self, scheduler: str, *, name: str, spec: Mapping[str, Any], replace_after_s: float) -> None:
        super().__init__()
        self._spec = WorkerSpec(scheduler=scheduler, name=name, **spec)
        self._replace_after_s = replace_after_s
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await super().close()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(EOFError, ConnectionError):  # the warm parent died; the next start makes another
                await self._live_once()
            await asyncio.sleep(self._replace_after_s)

    async def _live_once(self) -> None:
        context = warm_parent()
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(self._spec, theirs), daemon=True)
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, _start, process)  # the first one waits for the warm parent's imports
        try:
            await asyncio.shield(starting)
            theirs.close()
            await _end_of(process)
        finally:
            ours.close()  # ends the process if it is still there
            await starting  # called off or not: what is being started is ended before its cluster is
            process.kill()
            await loop.run_in_executor(None, process.join)
            process.close()


class Pools:
    """The cluster of one run: scheduler, head and both pools, all on this machine and on loopback."""

    def __init__(self, config: Config, run: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(dask.config.set(SETTINGS))
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="spotlight-"))
            self.cluster = stack.enter_context(_cluster(config, run, directory))
            self.client = stack.enter_context(Client(self.cluster))
            self._stack = stack.pop_all()

    @property
    def dashboard(self) -> str:
        """Address of Dask's dashboard."""
        return str(self.cluster.dashboard_link)

    def status(self) -> dict[str, Any]:
        return self._ask("spotlight_status")

    def drain(self) -> dict[str, Any]:
        return self._ask("spotlight_drain")

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


def _cluster(config: Config, run: str, directory: str) -> SpecCluster:
    placer = Placer(
        run, close_with_training=config.strategy.exploration == "stale" and config.exploration.budget == "time"
    )
    address = {"host": "127.0.0.1", "dashboard_address": f"127.0.0.1:{config.cluster.dashboard_port}"}
    common = {"local_directory": directory, "settings": SETTINGS}
    places: dict[str, Any] = {}
    for pool, section in (("reserved", config.pools.reserved), ("spot", config.pools.spot)):
        for index in range(section.workers):
            places[f"{pool}-{index}"] = _place(pool, section, {**common, "number": len(places)})
    return SpecCluster(
        scheduler={"cls": Scheduler, "options": {**address, "plugins": [placer]}},
        workers={"head": _head(directory), **places},
        name=run,
    )


def _place(pool: str, section: PoolSection, common: Mapping[str, Any]) -> dict[str, Any]:
    spec = {"resources": {"engine": 1, pool: 1}, **common}
    return {"cls": Place, "options": {"spec": spec, "replace_after_s": section.replace_after_s}}


def _head(directory: str) -> dict[str, Any]:
    """A worker beside the scheduler for what only decides; it never runs a model."""
    options = {
        "name": "head",
        "nthreads": 4,
        "resources": {"head": 4},
        "memory_limit": 0,
        "dashboard": False,
        "local_directory": directory,
        "plugins": (Ears(),),
    }
    return {"cls": Worker, "options": options}
