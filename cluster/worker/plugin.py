"""Makes any Dask worker one of ours: the scheduler hands this plugin to those that are there and those that come.

A worker takes part if its resources name a pool (``--resources spot=1``, ``reserved=1`` or ``reward=1``). It then gets
node memory, a device of its machine, an engine process and the notices of its pool, in the background, since whoever
registers a plugin waits for all workers; when it can work it says so. Until it can, it says why not and tries again:
a mount may come late. When the plugin is taken away, or the worker closes, all of it ends, and another run may begin on
the same worker. There is no other way to be a worker.

A node is who shares memory. The resource ``node:NAME`` plays several nodes on one machine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from dask.utils import key_split
from distributed import Status, Worker, WorkerPlugin

from cluster.dispatch.rules import CLOSE_MARGIN_S, LEAVE_POLL_S
from cluster.messages import ORDER, PLACE, READY, REFUSED
from cluster.scheduler.setup import steady
from cluster.version import code_version
from cluster.worker import peers
from cluster.worker.device import WorkerDevice
from cluster.worker.fork_server import continue_fork_server, end_with_this_process, fork_server
from cluster.worker.notices import SIGNALS, Notice, first_notice, sources
from spotlight.clock import wall_clock
from spotlight.config import RESOLVED, Config
from spotlight.device.process import EngineProcess
from spotlight.device.protocol import install
from spotlight.device.signals import Clear, Leave, Order, order_from_message, shard_from_message, signals
from spotlight.records import NO_DEVICE, SpotlightError, Stopped, record
from spotlight.store.device_locks import DeviceLock, visible_devices
from spotlight.store.disks import full_here, is_full
from spotlight.store.node import Node, shared_root, sweep
from spotlight.store.objects import objects_at

POOLS = ("reserved", "spot", "reward", "head")
KEEP_S = 0.5
"""Pause between two checks of the node's memory; a worker takes longer to start."""
AGAIN_S, AGAIN_MAX_S = 5.0, 300.0
"""Pause before a worker that cannot take part tries again, and its maximum: each try may start an engine."""
TRIES = 3
"""Failed tries, some 15 s, after which the reason is taken to last: a run without another such worker ends."""
RUN_SHOWN = 40
"""Characters of a run's name, which may be as long as a file's, that are part of another name."""
WORKER_LOG = "distributed.worker"
TELL_S = 2.0
"""Longest wait for the scheduler to hear that a worker takes no part any more; the scheduler may be gone."""

logger = logging.getLogger("spotlight.member")


class OtherVersion(SpotlightError):
    """The code here is not the driver's, and will not be as long as both run."""


@record
class Terms:
    """What a run asks of its workers; plain values, since it travels to them."""

    version: str
    """The driver's version of Spotlight."""
    run_dir: str
    session: str
    """Which start of the run this is."""
    hang_after_s: float
    quarantine_after: int
    """Engine processes in a row that a task may lose before it fails."""
    score_limit_s: float
    """Longest that a worker of the reward pool may take to score a request."""
    notices: Mapping[str, tuple[str, ...]]
    """{pool: sources of its notices of preemption}; see `cluster.worker.notices`."""
    grace_s: Mapping[str, float]
    """{pool: seconds left after a notice that names no deadline}"""
    bare: tuple[str, ...] = ()
    """Pools whose workers have no GPU, and use none that is there."""

    @property
    def run(self) -> str:
        return self.run_dir.rpartition("/")[2]

    @property
    def memory(self) -> str:
        """Names the run's memory on each machine; every start begins with its own."""
        return f"{self.run[:RUN_SHOWN]}-{self.session}"


def terms_of(config: Config, run_dir: str, session: str) -> Terms:
    """What the settings ask of workers."""
    return Terms(
        version=code_version(),
        run_dir=run_dir,
        session=session,
        hang_after_s=config.cluster.hang_after_s,
        quarantine_after=config.cluster.quarantine_after,
        score_limit_s=config.reward.limit_s,
        notices={name: pool.notices for name, pool in config.pools},
        grace_s={name: pool.grace_s for name, pool in config.pools},
        bare=() if config.reserved_computes else ("reserved",),
    )


def member_name(session: str) -> str:
    """Name of the plugin: each start of a run has its own, so that the end of one leaves the next alone."""
    return f"spotlight-member-{session}"


class SpotlightWorkerPlugin(WorkerPlugin):
    """Has a worker take part in a run."""

    def __init__(self, terms: Terms) -> None:
        self.name = member_name(terms.session)
        self._terms = terms

    async def setup(self, worker: Worker) -> None:
        for name, other in list(worker.plugins.items()):
            if isinstance(other, SpotlightWorkerPlugin) and other is not self:  # of a run whose driver is gone
                await worker.plugin_remove(name)
        steady(worker.loop)
        logging.getLogger(WORKER_LOG).addFilter(self._is_fault)
        self._member = Member(worker, self._terms)
        self._member.begin()

    async def teardown(self, worker: Worker) -> None:
        logging.getLogger(WORKER_LOG).removeFilter(self._is_fault)
        await self._member.leave()

    def _is_fault(self, said: logging.LogRecord) -> bool:
        """Whether a line of Dask's log is to be written: not that a task failed with `Stopped`, as all do when a run is
        stopped."""
        exception = said.args[3] if isinstance(said.args, tuple) and len(said.args) == 5 else ""
        return not (str(said.msg).startswith("Compute Failed") and str(exception).startswith(f"{Stopped.__name__}("))


_turns: WeakKeyDictionary[Worker, asyncio.Lock] = WeakKeyDictionary()
"""Held while a worker takes part, so that one run has ended on it before the next begins."""
_in_process = threading.Lock()
"""Held by the worker that does this process's work: orders, places and the device are the process's."""


class Member:
    """What one worker has and does while it takes part in a run."""

    def __init__(self, worker: Worker, terms: Terms) -> None:
        self._worker, self._terms = worker, terms
        resources = worker.state.total_resources
        self._pool = next((pool for pool in POOLS if resources.get(pool)), None)
        named = (name for name in resources if name.startswith("node:"))
        self._named_node = next(named, "").removeprefix("node:")
        self._engine: EngineProcess | None = None
        self._opening: asyncio.Future[str] | None = None
        self._opened = ExitStack()
        self._turn = _turns.setdefault(worker, asyncio.Lock())
        self._has_turn = self._noticed = False
        self._keeping: asyncio.Task[None] | None = None
        self._kept: tuple[Node | DeviceLock, ...] = ()

    def begin(self) -> None:
        """Take part as soon as possible; returns at once."""
        self._task = asyncio.create_task(self._take_part())

    async def _take_part(self) -> None:
        if self._pool is None:
            return
        await self._turn.acquire()
        self._has_turn = True
        signals.obey(Clear(run=self._terms.run))
        self._worker.stream_handlers[ORDER] = self._order
        self._worker.stream_handlers[PLACE] = _place
        node = ""
        if self._pool != "head":
            self._keeping = asyncio.create_task(self._keep())
            try:
                node = await self._opened_at_last()
            except OtherVersion:
                return
            if self._pool != "reward":  # tasks that ask for an engine denoise or train
                await self._offer_engine()
        host, job = socket.gethostname(), os.environ.get("SLURM_JOB_ID", "")
        self._tell(READY, pool=self._pool, node=node, host=host, job=job)
        if self._pool != "head":
            await self._leave_on_notice()

    async def _opened_at_last(self) -> str:
        """Get all that the work needs, however often that has to be tried; returns the node's name.

        Raises:
            OtherVersion: another try cannot help.
        """
        wait_s, tries = AGAIN_S, 0
        while True:
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
            try:
                return await asyncio.shield(self._opening)
            except Exception as error:  # whatever it is, it is told to the driver; until it is over, there is no work
                logger.warning("this worker takes no part in %s: %s", self._terms.run, error)
                full = full_here(error) if isinstance(error, OSError) and is_full(error) else ""
                tries += 1
                is_final = isinstance(error, OtherVersion)
                self._tell(REFUSED, reason=full or str(error) or repr(error), lasts=is_final or tries >= TRIES)
                if is_final:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_MAX_S)

    async def _offer_engine(self) -> None:
        """Tell the scheduler of the engine, however busy it is; if it is gone, this worker closes, and this ends."""
        while True:
            try:
                return await self._worker.set_resources(engine=1)
            except OSError as error:
                logger.warning("the scheduler does not answer, and is asked again: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _open(self) -> str:
        """Get all that the work needs, or nothing; returns the node's name."""
        try:
            return self._open_all()
        except BaseException:
            self._kept, self._engine = (), None
            self._opened.close()
            raise

    def _open_all(self) -> str:
        terms, opened = self._terms, self._opened
        _check(terms)
        if "/" in self._named_node:
            raise SpotlightError(
                f"its resource node:{self._named_node} names a node that a directory cannot be called after: leave out "
                "the /"
            )
        if not _in_process.acquire(blocking=False):
            raise SpotlightError(
                f"another worker of process {os.getpid()} takes part, and each needs a process of its own: start "
                "workers with `dask worker`, or LocalCluster(processes=True)"
            )
        opened.callback(_in_process.release)
        machine = shared_root(terms.memory)
        root = machine.with_name(f"{machine.name}-{self._named_node}") if self._named_node else machine
        for directory in (machine, root):
            opened.callback(sweep, directory)
        on_machine, node = Node(machine), Node(root)
        opened.callback(on_machine.close)
        opened.callback(node.close)
        scores, is_bare = self._pool == "reward", self._pool in terms.bare
        kind = f"{self._pool}-" if scores or is_bare else ""
        slot = DeviceLock(machine, kind, visible_devices(os.environ))
        opened.callback(slot.close)
        self._kept = (on_machine, node, slot)

        def started(pid: int) -> None:
            slot.record(pid)
            end_with_this_process(pid)

        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a nanny's worker is one
        self._engine = EngineProcess(
            fork_server(),
            NO_DEVICE if is_bare else slot.number,
            node=root,
            hang_after_s=terms.hang_after_s,
            run_dir="" if scores else terms.run_dir,
            on_start=started,
            renew=fork_server,
        )
        opened.callback(self._engine.close)
        atexit.register(opened.close)  # a worker that ends without `leave` would wait for its engine for ever
        opened.callback(atexit.unregister, opened.close)
        peers.serve(self._worker, node)
        install(
            WorkerDevice(
                self._worker,
                self._engine,
                node,
                quarantine_after=terms.quarantine_after,
                score_limit_s=terms.score_limit_s,
                scores_only=scores,
            )
        )
        return node.name

    async def _keep(self) -> None:
        """Repair what others did: removed the node's memory under a run (a logout may), or stopped its fork server."""
        while True:
            await asyncio.sleep(KEEP_S)
            key_split.cache_clear()  # remembers 100,000 keys, and no key comes again
            if continue_fork_server():
                logger.warning("the process that engines are forked from was stopped: it goes on")
            for each in self._kept:
                with contextlib.suppress(OSError, SpotlightError):  # the next time
                    each.keep()

    async def leave(self) -> None:
        """Take part no more: end the engine, and let go of the node's memory."""
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if not self._noticed:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._opening:
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._engine and self._pool != "reward" and self._worker.status == Status.running:
            with contextlib.suppress(Exception):  # nobody to tell
                await asyncio.wait_for(self._worker.set_resources(engine=0), TELL_S)
        try:
            await asyncio.to_thread(self._opened.close)
        finally:
            if self._has_turn:
                self._turn.release()

    async def _leave_on_notice(self) -> None:
        assert self._pool
        terms, worker = self._terms, self._worker
        with _signals_as_before():
            notice = await first_notice(sources(terms.notices[self._pool], grace_s=terms.grace_s[self._pool]))
        self._noticed = True
        last = threading.Timer(max(0.0, notice.deadline_s - wall_clock()), os._exit, (0,))  # whatever hangs by then
        last.daemon = True
        last.start()
        self._obey(Leave())
        with contextlib.suppress(Exception):  # nobody to tell
            # An RPC, since a message of the stream may arrive after the worker has left.
            told: Any = worker.scheduler.spotlight_notice(worker=worker.address, reason=notice.reason)
            await asyncio.wait_for(told, TELL_S)
        await _finish(worker, notice)
        with contextlib.suppress(Exception):  # whatever goes wrong, the worker is gone by the deadline
            async with asyncio.timeout(max(0.0, notice.deadline_s - wall_clock())):
                await worker.close_gracefully()
        await worker.close(executor_wait=False)

    def _order(self, order: str, facts: dict[str, Any], session: str) -> None:
        if session == self._terms.session:  # a run may be stopped and started again
            self._obey(order_from_message(order, facts))

    def _obey(self, order: Order) -> None:
        signals.obey(order)
        if self._engine:
            self._engine.tell(order)

    def _tell(self, op: str, **facts: Any) -> None:
        self._worker.batched_send({"op": op, "session": self._terms.session, **facts})


def _place(gang: str, shard: int, value: Any) -> None:
    signals.obey(shard_from_message(gang, shard, value))


def _check(terms: Terms) -> None:
    """Check at once that this worker can do the run's work.

    Raises:
        OtherVersion: its code is not the driver's.
        SpotlightError: there is no run directory, perhaps not yet.
    """
    if terms.version != code_version():
        raise OtherVersion(
            f"it has Spotlight {code_version()}, and the driver has {terms.version}: install the same version on both"
        )
    if objects_at(terms.run_dir).size(RESOLVED) is None:
        raise SpotlightError(
            f"on {socket.gethostname()} there is no run directory {terms.run_dir}: set run.dir to a directory that all "
            "machines share under the same path, or to the URL of an object store"
        )


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """Restore the handlers of signals on leaving, if no notice came."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS.values()}
    try:
        yield
    except asyncio.CancelledError:
        for number, handler in handlers.items():
            if asyncio.get_running_loop().remove_signal_handler(number):
                signal.signal(number, handler)
        raise


async def _finish(worker: Worker, notice: Notice) -> None:
    """Take no new tasks, and let those in flight come to their step boundary, if there is time."""
    worker.memory_manager.memory_pause_fraction = False  # else Dask resumes it as soon as its memory allows
    worker.status = Status.paused
    while worker.state.executing_count and wall_clock() < notice.deadline_s - CLOSE_MARGIN_S:
        await asyncio.sleep(LEAVE_POLL_S)
