"""The Dask cluster of one run: its own, on this machine or Slurm, or an existing one.

On either, the run's plugins are installed on the scheduler and the workers, and a worker beside the driver runs tasks
that only decide. An existing cluster is left as it was. What runs where is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import dask
from distributed import Client, Security, SpecCluster, Worker
from tornado.ioloop import IOLoop

from cluster.dashboard.plugin import ROWS, PagePlugin, prepare
from cluster.dispatch.rules import rules_of
from cluster.dispatch.snapshot import Snapshot
from cluster.messages import EVICTED, HEARD_OF
from cluster.scheduler.plugin import DispatchPlugin, snapshot_of
from cluster.scheduler.setup import steady
from cluster.start import janitor
from cluster.start.existing import ExistingCluster, connect
from cluster.start.local import WorkerKeeper, local_cluster
from cluster.start.slurm import SlurmJobs, slurm_cluster
from cluster.worker.plugin import SpotlightWorkerPlugin, Terms, member_name, terms_of
from cluster.worker.process import continue_own_fork_server, own_fork_server_pid
from spotlight.clock import ahead_s, wall_clock
from spotlight.config import Config
from spotlight.files import whole
from spotlight.records import Drained, SpotlightError, WorkerLife
from spotlight.store.device_locks import is_stopped
from spotlight.store.leftovers import Scratch, sweep_ended, sweep_leftovers
from spotlight.store.rundir import files_of

DASK_SETTINGS = {
    "distributed.deploy.lost-worker-timeout": "10000h",  # places replace their own workers
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.admin.low-level-log-length": 100,  # messages and transitions that each connection and worker keeps
    "distributed.admin.system-monitor.log-length": 600,  # five minutes
    "distributed.admin.tick.limit": "1h",  # a busy laptop is not worth a warning every few seconds
}
DASHBOARD_LINK = "{scheme}://{host}:{port}/status"
"""Dask's default."""
RETRY_S = 0.5
HEAD_FAILURES = 20
"""Starts of the head worker that fail in a row until that is said."""
HAND_OUT_ATTEMPTS = 5
"""A worker may die while the plugin is sent to it; it is not asked again."""
HAND_OUT_S = 15.0
"""How long to wait for all workers to have the plugin; one that is frozen never says so."""
SCHEDULER_HAND_OUT_S = 90.0
"""The same for the scheduler, which imports it first, perhaps from a slow file system."""
ANSWER_S = 30.0
"""How long to wait for a scheduler's answer, however busy it is."""
ASK_ATTEMPTS = 2
MOMENTS = ("at_s", "ledger_s")
"""Fields of the page's rows that are times of the driver's clock."""

logger = logging.getLogger(__name__)


class RunCluster:
    """The cluster of one run, from its start to its end.

    Args:
        run_dir: the run's directory or URL, under which all workers see it.
        existing: the cluster to run on: an address, a scheduler file, or a Dask client or cluster. None: one of its
            own.

    Raises:
        SpotlightError: that cluster cannot be reached or used, or runs something else.
    """

    def __init__(self, config: Config, run_dir: str | Path, existing: ExistingCluster | None = None) -> None:
        self._run = str(run_dir).rpartition("/")[2]
        self.session = token_hex(4)
        """Identifies this start of the run."""
        self.cluster: SpecCluster | None = None
        """The run's own cluster, if it has one."""
        self._hang_after_s = config.cluster.hang_after_s
        self._spot_workers = config.pools.spot.workers
        alone = ("spot",) in (config.strategy.rollout_pools, config.strategy.train_pools)
        self._needed = ("reserved", "reward", *(("spot",) if alone else ()))
        """Pools that a run cannot do without, if it has them."""
        self._reported: set[str] = set()
        """Failures of jobs that were reported."""
        self._stopped_s: float | None = None
        """When the fork server was first found stopped; None: it is not."""
        self._gone = ""
        """That the scheduler is gone; empty until it is: it is asked no more then, as each time would take a minute."""
        self._fetched = 0
        self._sent_away = defaultdict[str, list[float]](list)
        """{surplus worker (`scale`): when it was told to leave}; all times, as lives are drained later"""
        self._noted: list[dict[str, Any]] = []
        """Events that the scheduler does not see, for the next `drain`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_dask_as_runs_need_it)
            if swept := sweep_leftovers():
                names = ", ".join(sorted(path.name for path in swept))
                logger.warning("removed what processes that were killed had left on this machine: %s", names)
            terms, files = terms_of(config, str(run_dir), self.session), files_of(run_dir)
            directory = self._keep_scratch(stack, terms)
            if existing is None:
                prepare()
                self.cluster = _start(stack, config, files, directory)
                self.client = stack.enter_context(Client(self.cluster, set_as_default=False))
                self.client.subscribe_topic(EVICTED, self._evicted)
                self.client.subscribe_topic(HEARD_OF, self._heard_of)
            else:
                self.client = stack.enter_context(connect(existing, insecure=config.cluster.insecure))
            dispatch = DispatchPlugin(
                self._run,
                self.session,
                rules_of(config),
                owner=self.client.id,
                driver=f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}",
                member=member_name(self.session),
                page=PagePlugin.name,
                logged=config.logs_decisions,
            )
            self._register(dispatch)
            stack.callback(self._leave)
            self._ahead_s = ahead_s(lambda: float(self._told("spotlight_clock")))
            """How far this process's clock is ahead of the scheduler's, to convert times of spans, lives and events."""
            self._register(PagePlugin())
            self._register(SpotlightWorkerPlugin(terms))
            head = Head(self.client, f"head-{self.session}", directory)
            self.client.sync(head.start)
            stack.callback(self._close, head)
            self._stack = stack.pop_all()

    def _keep_scratch(self, stack: contextlib.ExitStack, terms: Terms) -> str:
        """A scratch directory for Dask; it, and all that the run has outside its own directory, is removed however the
        run ends."""
        self._scratch = scratch = Scratch()
        left = (("folder", str(scratch.path)), ("memory", terms.memory), ("half written", terms.run_dir))
        for kind, what in left:
            stack.enter_context(janitor.registered(kind, what))  # this process may be killed at its end, too
        stack.callback(scratch.close)
        stack.callback(sweep_ended, terms.memory)
        return str(scratch.path)

    def _register(self, plugin: DispatchPlugin | PagePlugin | SpotlightWorkerPlugin) -> None:
        for attempts_left in reversed(range(HAND_OUT_ATTEMPTS)):
            try:
                self.client.sync(self._registered, plugin)
                return
            except TimeoutError:
                if not isinstance(plugin, SpotlightWorkerPlugin):
                    address = self.client.scheduler.address
                    raise SpotlightError(
                        f"the scheduler {address} has not answered in {SCHEDULER_HAND_OUT_S:g} s: start it anew"
                    ) from None
                logger.warning(  # those that answered have it, and others get it as soon as they can
                    "not all workers of the cluster have answered in %g s: the run begins without the others, which "
                    "join it when they answer",
                    HAND_OUT_S,
                )
                return
            except (ImportError, AttributeError, TypeError) as error:
                raise self._without_us("the scheduler", error) from None
            except OSError:
                if not attempts_left:
                    raise
            except Exception as error:  # Dask hands on what a worker answered, as a text
                if "ModuleNotFoundError" not in str(error):
                    raise
                raise self._without_us("a worker", error) from None

    async def _registered(self, plugin: DispatchPlugin | PagePlugin | SpotlightWorkerPlugin) -> None:
        for_workers = isinstance(plugin, SpotlightWorkerPlugin)
        await asyncio.wait_for(self.client.register_plugin(plugin), HAND_OUT_S if for_workers else SCHEDULER_HAND_OUT_S)

    def _without_us(self, who: str, error: Exception) -> SpotlightError:
        return SpotlightError(
            f"{who} of the cluster {self.client.scheduler.address} does not have this Spotlight ({error!r}): install "
            "the same version where the scheduler and the workers run, on all of them: Dask hands each what a run "
            "brings along, also those that take no part"
        )

    def _evicted(self, event: tuple[float, str]) -> None:
        if place := self._place(event[1]):
            place.evict()
        for jobs in self._jobs():
            if jobs.has(event[1]):
                jobs.evict()

    def _heard_of(self, event: tuple[float, str]) -> None:
        if place := self._place(event[1]):
            place.clock.heard_of(event[1])
        for jobs in self._jobs():
            if jobs.has(event[1]):
                jobs.heard_of()

    def _jobs(self) -> list[SlurmJobs]:
        """The Slurm jobs; none elsewhere."""
        found = self.cluster.workers.values() if self.cluster else ()
        return [jobs for jobs in found if isinstance(jobs, SlurmJobs)]

    def _place(self, name: str) -> WorkerKeeper | None:
        place = self.cluster.workers.get(name) if self.cluster else None
        return place if isinstance(place, WorkerKeeper) else None

    @property
    def dashboard(self) -> str:
        """Address of Dask's dashboard; without a proxy if the user's link to it needs variables that are not set."""
        try:
            return str(self.client.dashboard_link)
        except (LookupError, ValueError):
            with dask.config.set({"distributed.dashboard.link": DASHBOARD_LINK}):
                return str(self.client.dashboard_link)

    def status(self) -> dict[str, Any]:
        """
        Raises:
            SpotlightError: the scheduler is gone, workers of this machine cannot be started, or no job of a pool whose
                workers the run needs can.
        """
        for place in self.cluster.workers.values() if self.cluster else ():
            if isinstance(place, WorkerKeeper) and place.failure:
                raise SpotlightError(place.failure)
        self._look_at_jobs()
        self._look_at_own_fork_server()
        self._scratch.keep()
        found: dict[str, Any] = self._told("spotlight_status")
        return found

    def queued(self) -> list[str]:
        """Slurm's messages about the run's jobs that have not begun."""
        return [text for jobs in self._jobs() if (text := jobs.waits())]

    def _look_at_jobs(self) -> None:
        """Go on without jobs that always fail, as long as their pool has others, or can be done without."""
        for pool in self._needed:
            jobs = [jobs for jobs in self._jobs() if jobs.pool == pool]
            if jobs and all(each.failure for each in jobs):
                raise SpotlightError(jobs[0].failure)
        for each in self._jobs():
            if each.failure and each.failure not in self._reported:
                self._reported.add(each.failure)
                logger.warning("%s; the run goes on without it", each.failure)

    def _look_at_own_fork_server(self) -> None:
        """Continue the fork server if it has been stopped (SIGSTOP) for long: no worker could start, and nothing else
        would show it."""
        now_s = wall_clock()
        if self.cluster is None or not is_stopped(own_fork_server_pid()):
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        elif now_s - self._stopped_s > self._hang_after_s:
            continue_own_fork_server()
            what = (
                f"the process that workers are forked from was stopped for {now_s - self._stopped_s:.0f} s: it goes on"
            )
            self._noted.append({"at_s": now_s, "event": "continued", "what": what})

    def snapshot(self) -> Snapshot:
        """The dispatcher's present state."""
        found: Snapshot = self.client.run_on_scheduler(snapshot_of)
        return found

    def drain(self) -> Drained:
        """Spans, events and decisions since the last call, and the lives that began or ended since then.

        Times are converted to this process's clock, but for those of decisions.
        """
        drained = Drained.of(self._told("spotlight_drain", fetched=self._fetched)).later(self._ahead_s)
        self._fetched += 1
        noted, self._noted = self._noted, []
        workers = {number: self._as_it_left(life) for number, life in drained.workers.items()}
        return replace(drained, events=[*drained.events, *noted], workers=workers)

    def _as_it_left(self, life: WorkerLife) -> WorkerLife:
        """The life of a worker, with the reason corrected if it was sent away by `scale`."""
        sent_s = self._sent_away.get(life.worker, ())
        if not life.was_taken or not any(life.joined_s <= at_s <= (life.left_s or 0) for at_s in sent_s):
            return life
        return replace(life, reason="sent away")

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Send the live page what only the driver knows; see `spotlight.report.feed`."""
        moments = MOMENTS if self._ahead_s else ()  # the page has the scheduler's clock
        told = [row | {name: row[name] - self._ahead_s for name in moments if name in row} for row in rows]
        self._ask(ROWS, rows=told)

    def scale(self, spot: int) -> None:
        """Use so many spot workers; surplus ones, the last, leave as on a notice.

        Raises:
            SpotlightError: the cluster is not ours to scale, or cannot have that many.
        """
        cluster = self.cluster
        if cluster is None:
            raise SpotlightError(
                f"{self.client.scheduler.address} was there before the run: end its workers, or start more, where they "
                "are; to a `dask worker --no-nanny`, SIGTERM is a notice"
            )
        places = {int(name.removeprefix("spot-")): place for name, place in _spot(cluster.workers)}
        possible = sorted({0, *places, self._spot_workers})
        if whole(spot, "spot") not in possible:
            raise SpotlightError(
                f"spot = {spot}: this run can have {', '.join(map(str, possible))} (pools.spot.workers)"
            )

        for first, place in places.items():
            if first >= spot:
                for name in filter(place.has, (f"spot-{number}" for number in range(self._spot_workers))):
                    self._sent_away[name].append(wall_clock())

        async def change() -> None:
            for first, place in places.items():
                place.want(first < spot)

        cluster.sync(change)

    def stop(self) -> None:
        """Launch nothing more, and end what runs at its next step boundary."""
        self._ask("spotlight_stop")

    def close(self) -> None:
        self._stack.close()

    def _close(self, head: Head) -> None:
        with contextlib.suppress(RuntimeError):  # a user closed the client, and its event loop with it: that ended both
            self.client.sync(head.close)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, SpotlightError, ValueError):  # one that is gone, or back, has ended it too
            self._ask("spotlight_close")

    def _told(self, name: str, **facts: Any) -> Any:
        """
        Raises:
            SpotlightError: the scheduler does not answer, or knows nothing of the run: it may have another now.
        """
        answer = self._ask(name, **facts)
        if answer is None:
            raise SpotlightError(
                f"the scheduler {self.client.scheduler.address} knows nothing of this run any more: it was restarted, "
                "or the connection to it broke, which it takes for the run's end; what was committed is kept"
            )
        return answer

    def _ask(self, name: str, **facts: Any) -> Any:
        """
        Raises:
            SpotlightError: the scheduler does not answer.
        """
        if self._gone:
            raise SpotlightError(self._gone)
        asked, scheduler = facts | {"session": self.session}, self.client.scheduler
        if scheduler is None:
            self._gone = (
                "the run's Dask client was closed (`run.client`), and a run ends with it; what was committed is kept"
            )
            raise SpotlightError(self._gone)
        for attempts_left in reversed(range(ASK_ATTEMPTS)):
            try:
                return self.client.sync(getattr(scheduler, name), callback_timeout=ANSWER_S, **asked)
            except (OSError, TimeoutError) as error:
                if isinstance(error, TimeoutError) and attempts_left:
                    continue  # a pause of this process uses that time up, too
                why = str(error) or "timed out"  # asyncio's own says nothing
                self._gone = f"the scheduler {scheduler.address} is gone ({why}); what was committed is kept"
                raise SpotlightError(self._gone) from None
        raise AssertionError


class Head:
    """A worker beside the driver for tasks that only decide, so that no decision queues behind a denoising step.

    It is in the driver's process, so that a cluster needs none for it, and is started again when it is lost.
    """

    def __init__(self, client: Client, name: str, directory: str) -> None:
        self._client, self._name, self._directory = client, name, directory

    async def start(self) -> None:
        steady(IOLoop.current())
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                async with self._worker() as worker:
                    failures = 0
                    await worker.finished()
            except (OSError, TimeoutError, ValueError, RuntimeError) as error:  # at first, its former self is there
                failures += 1
                if failures == HEAD_FAILURES:
                    logger.warning(
                        "the worker beside the driver does not start, and nothing is decided without it (%s): it is "
                        "tried again every %g s",
                        repr(_root_of(error)),
                        RETRY_S,
                    )
            await asyncio.sleep(RETRY_S)

    def _worker(self) -> Worker:
        """A worker that listens at the address at which the scheduler reaches this process."""
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
            dashboard_address="127.0.0.1:0",  # Dask serves its health there all the same
            local_directory=self._directory,
        )


def _spot(workers: Mapping[str, Any]) -> list[tuple[str, WorkerKeeper | SlurmJobs]]:
    return [(name, place) for name, place in workers.items() if name.startswith("spot-")]


def _as_worker(security: Any) -> Any:
    """Security for a worker, with the client's certificate if there is no other."""
    if not security.tls_client_cert or security.tls_worker_cert:
        return security
    return Security(
        require_encryption=security.require_encryption,
        tls_ca_file=security.tls_ca_file,
        tls_worker_cert=security.tls_client_cert,
        tls_worker_key=security.tls_client_key,
    )


def _start(stack: contextlib.ExitStack, config: Config, files: Path, directory: str) -> SpecCluster:
    """A cluster of the run's own, which ends with the stack.

    Raises:
        SpotlightError: its scheduler cannot be started or reached.
    """
    try:
        if config.cluster.manager == "slurm":
            return stack.enter_context(slurm_cluster(config, files, directory))
        return stack.enter_context(local_cluster(config, directory, DASK_SETTINGS))
    except RuntimeError as error:  # Dask raises it for any cause
        there = "this machine's network is up, 127.0.0.1 too,"
        if config.cluster.manager == "slurm":
            host = config.cluster.host or socket.gethostname()
            there = f"{host} is an address of this machine (cluster.host, or else its name), that its network is up,"
        raise SpotlightError(
            f"the run's scheduler cannot be started or reached ({_root_of(error)}): "
            f"see that {there} and that no firewall is between"
        ) from error


def _root_of(error: BaseException) -> BaseException:
    """What an error was raised from at first: Dask's own say only that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class WhileAny:
    """A context that several threads may share: the first one enters it, the last one exits it."""

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._context, self._lock, self._inside = context, threading.Lock(), 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stack.enter_context(self._context())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stack.close()


@contextlib.contextmanager
def _changed_dask() -> Iterator[None]:
    """Change Dask's settings and log levels, which the whole process shares.

    Dask logs each lost worker as an error, even the last ones at the end; here losses are expected.
    """
    levels = {"distributed": logging.ERROR, "distributed.worker": logging.CRITICAL}  # as in the worker processes
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        with dask.config.set(DASK_SETTINGS):
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


_dask_as_runs_need_it = WhileAny(_changed_dask)
