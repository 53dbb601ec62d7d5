"""The Dask cluster of one run: one of its own on this machine, or any that is there.

On either, the run's plugins go to the scheduler and to its workers, and a worker beside the driver runs what only
decides. Both leave the cluster as they found it. What runs where is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import dask
from distributed import Client, Security, SpecCluster, Worker

from cluster.dashboard.plugin import ROWS, PagePlugin, prepare
from cluster.dispatch import rules_of
from cluster.local import Place, local_cluster
from cluster.member import MemberPlugin, member_name, terms_of
from cluster.notices import sources
from cluster.plugins import EVICTED, DispatchPlugin, snapshot_of
from cluster.snapshot import Snapshot
from cluster.standing import Standing, connect
from spotlight.config import Config
from spotlight.records import SpotlightError
from spotlight.store.node import shared_roots, sweep
from spotlight.store.slots import end_leftovers

DASK_SETTINGS = {
    "distributed.deploy.lost-worker-timeout": "10000h",  # places replace their own workers
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.admin.tick.limit": "1h",  # a busy laptop is not worth a warning every few seconds
}
RETRY_S = 0.5
HAND_OUT_ATTEMPTS = 5
"""A worker may die while the plugin is handed to it; the next time it is not asked."""
ANSWER_S = 30.0
"""For a scheduler's answer, however busy it is."""


class Pools:
    """The cluster of one run, from its start to its end.

    Args:
        run_dir: or URL of the run; all workers see it under this path or URL.
        standing: the cluster to run on: an address, a scheduler file, or a Dask client or cluster. None: one of its
            own.

    Raises:
        SpotlightError: that cluster cannot be reached or used, or runs something else.
    """

    def __init__(self, config: Config, run_dir: str | Path, standing: Standing | None = None) -> None:
        self._run = str(run_dir).rpartition("/")[2]
        self.session = token_hex(4)
        """Which start of the run this is."""
        self.cluster: SpecCluster | None = None
        """Its own, if it has one."""
        for pool, section in config.pools:
            _check_notices(pool, section.notices)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="spotlight-"))
            private = {"temporary-directory": directory}  # Dask imports from there; its default is open to other users
            stack.enter_context(dask.config.set(DASK_SETTINGS | private))
            terms = terms_of(config, str(run_dir), self.session)
            stack.callback(_free, terms.memory)
            if standing is None:
                prepare()
                self.cluster = stack.enter_context(local_cluster(config, directory, DASK_SETTINGS))
                self.client = stack.enter_context(Client(self.cluster, set_as_default=False))
                self.client.subscribe_topic(EVICTED, self._evicted)
            else:
                self.client = stack.enter_context(connect(standing, insecure=config.cluster.insecure))
            dispatch = DispatchPlugin(
                self._run,
                self.session,
                rules_of(config),
                owner=self.client.id,
                driver=f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}",
                member=member_name(self.session),
            )
            self._register(dispatch)
            stack.callback(self._leave)
            self._register(PagePlugin())
            self._register(MemberPlugin(terms))
            head = Head(self.client, f"head-{self.session}", directory)
            self.client.sync(head.start)
            stack.callback(self.client.sync, head.close)
            self._stack = stack.pop_all()

    def _register(self, plugin: DispatchPlugin | PagePlugin | MemberPlugin) -> None:
        for attempts_left in reversed(range(HAND_OUT_ATTEMPTS)):
            try:
                self.client.register_plugin(plugin)
                return
            except (ImportError, AttributeError, TypeError) as error:
                raise SpotlightError(
                    f"a process of the cluster {self.client.scheduler.address} does not have this Spotlight "
                    f"({error!r}): install the same version where the scheduler and the workers run"
                ) from None
            except OSError:
                if not attempts_left:
                    raise

    def _evicted(self, event: tuple[float, str]) -> None:
        _, name = event
        place = self.cluster.workers.get(name) if self.cluster else None
        if isinstance(place, Place):
            place.evict()

    @property
    def dashboard(self) -> str:
        """Address of Dask's dashboard."""
        return str(self.client.dashboard_link)

    def status(self) -> dict[str, Any]:
        """
        Raises:
            SpotlightError: the scheduler is gone, or workers of this machine cannot be started.
        """
        for place in self.cluster.workers.values() if self.cluster else ():
            if place.failure:
                raise SpotlightError(place.failure)
        return self._ask("spotlight_status")

    def snapshot(self) -> Snapshot:
        """What the dispatcher knows now."""
        found: Snapshot = self.client.run_on_scheduler(snapshot_of)
        return found

    def drain(self) -> dict[str, Any]:
        return self._ask("spotlight_drain")

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Hand the page on the dashboard what only the driver knows; see `spotlight.report.feed`."""
        self._ask(ROWS, rows=rows)

    def stop(self) -> None:
        """Launch nothing more, end what runs at its next step boundary."""
        self._ask("spotlight_stop")

    def close(self) -> None:
        self._stack.close()

    def _leave(self) -> None:
        with contextlib.suppress(
            OSError, SpotlightError, ValueError
        ):  # a scheduler that is gone, or back, has ended it too
            self._ask("spotlight_close")
            self.client.unregister_scheduler_plugin(PagePlugin.name)

    def _ask(self, name: str, **facts: Any) -> Any:
        """
        Raises:
            SpotlightError: the scheduler does not answer.
        """
        try:
            return self.client.sync(getattr(self.client.scheduler, name), callback_timeout=ANSWER_S, **facts)
        except (OSError, TimeoutError) as error:
            address = self.client.scheduler.address
            raise SpotlightError(f"the scheduler {address} is gone ({error}); what was committed is kept") from None


class Head:
    """A worker beside the driver for what only decides: no decision queues behind a denoising step.

    It is in the driver's process, so that a cluster needs none, and is started again when it is lost.
    """

    def __init__(self, client: Client, name: str, directory: str) -> None:
        self._client, self._name, self._directory = client, name, directory

    async def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError, ValueError):  # ValueError: its former self is still there
                async with self._worker() as worker:
                    await worker.finished()
            await asyncio.sleep(RETRY_S)

    def _worker(self) -> Worker:
        """It listens where the scheduler sees this process."""
        client: Any = self._client
        scheme, _, here = client.scheduler_comm.comm.local_address.partition("://")
        return Worker(
            client.scheduler.address,
            name=self._name,
            host=here.rpartition(":")[0].strip("[]") if scheme in ("tcp", "tls") else None,
            security=_as_worker(client.security),
            nthreads=4,
            resources={"head": 4},
            memory_limit=0,
            dashboard=False,
            local_directory=self._directory,
        )


def _as_worker(security: Any) -> Any:
    """A client's certificate, for a worker where there is no other."""
    if not security.tls_client_cert or security.tls_worker_cert:
        return security
    return Security(
        require_encryption=security.require_encryption,
        tls_ca_file=security.tls_ca_file,
        tls_worker_cert=security.tls_client_cert,
        tls_worker_key=security.tls_client_key,
    )


def _check_notices(pool: str, names: tuple[str, ...]) -> None:
    """
    Raises:
        SpotlightError: a name is not known.
    """
    try:
        sources(names)
    except SpotlightError as error:
        raise SpotlightError(f"pools.{pool}.{error}") from None


def _free(memory: str) -> None:
    """End what is left on this machine's devices, and free the run's memory here."""
    for root in shared_roots(memory):
        end_leftovers(root)
    for root in shared_roots(memory):
        sweep(root)


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
