"""A run as an object: start it, watch it, stop it, resume it, report it. For notebooks and the shell alike.

It joins the three rooms: settings and records, the graphs, and the cluster. The run goes on in a
thread of this process, which also holds the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spotlight import config as configuration
from spotlight.clock import wall_clock
from spotlight.demands import check_demands
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches
from spotlight.records import SpotlightError, Stopped
from spotlight.report import tracking
from spotlight.report.feed import Feed
from spotlight.report.tracking import Tracking
from spotlight.rl import checkpoints, rewards
from spotlight.rl.prompts import check_prompts, choose_prompts, read_prompts
from spotlight.store import resuming
from spotlight.store.accounts import Accounts, pool_prices
from spotlight.store.disks import full_disk
from spotlight.store.leftovers import remove_half_written
from spotlight.store.rundir import DECISIONS, HISTORY, SUMMARY, HistoryRow, RunDir, Summary

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client, Future

    from cluster.pools import Pools
    from cluster.standing import Standing
    from graphs.iteration import Graph
    from spotlight.notebook import Images, Plot
    from spotlight.plan.offload import Balance
    from spotlight.store.lease import Lease

logger = logging.getLogger(__name__)

STOP_GRACE_S = 60.0
"""How long a stop waits for the steps in flight; a step of a large model can last many seconds."""
POLL_S = 0.25
SHOW_S = 1.0
"""Between two messages to the page on the dashboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run is, now."""

    state: str
    """"new", "starting", "running", "finished", "stopped" or "failed"; of a run that this process did not start, as its
    directory has it, where a failed one is "stopped"."""
    phase: str
    iteration: int
    """Iterations finished."""
    iterations: int
    reward: float | None
    """Mean of the last iteration's training samples."""
    scores: Mapping[int, float]
    """Validation score by weights version."""
    spot_utilisation: float | None
    """Busy share of the spot workers' seconds so far, 0 to 1."""
    usd: float
    usd_by_pool: Mapping[str, float]
    wasted_s: Mapping[str, float]
    """Worker seconds that bought nothing, by kind (`ledger.Kind`); this and what follows: as of the last iteration."""
    usd_wasted: float
    """Of idle time, start-up, lost and repeated work, and exploration that was called off."""
    usd_reserved_only: float
    """The least that the same work would have cost on reserved workers alone."""
    usd_per_iteration: float | None
    usd_per_sample: float | None
    """That was kept and trained on."""
    usd_per_point: float | None
    """Of a hundredth of the validation score; None where it has not risen."""
    preemptions: int
    workers: Mapping[str, int]
    """Alive, by pool."""
    running: Mapping[str, int]
    """Tasks in progress, by phase."""
    window_s: float | None
    """How long reserved workers rolled out at most before they trained, in the last iteration; None without an end."""
    train_wait_s: float | None
    """Training then waited so long for samples of spot workers."""
    spot_worth_renting: int | None
    """More spot workers than so many would have had no rollout left; as of the last iteration."""
    waiting_for: tuple[str, ...]
    """What the run waits for: pools without a worker, or a node with enough of them."""
    refused: Mapping[str, str]
    """Why workers take no part in the run, by name."""
    elapsed_s: float
    dashboard: str
    run_dir: str


class Run:
    """One run of post-training.

    Args:
        settings: a TOML file.
        overrides: ``"section.key=value"`` each.
        cluster: a Dask cluster to run on: an address, a scheduler file, or a Dask client or cluster. None: a cluster of
            its own on this machine.

    Raises:
        SpotlightError: the settings or the prompts cannot be used.

    >>> run = Run("ocr-tiny.toml")  # doctest: +SKIP
    >>> run.start(); run.wait(); run.history  # doctest: +SKIP
    """

    def __init__(self, settings: str | Path, overrides: Sequence[str] = (), *, cluster: Standing | None = None) -> None:
        self._open(None, configuration.load(settings, overrides), cluster)

    @classmethod
    def of(cls, settings: configuration.Config) -> Run:
        """A run of settings that are already read."""
        run = cls.__new__(cls)
        run._open(None, settings, None)
        return run

    @classmethod
    def into(
        cls,
        run_dir: str | Path,
        settings: str | Path,
        overrides: Sequence[str] = (),
        *,
        cluster: Standing | None = None,
    ) -> Run:
        """The run of this directory: a new one if nothing is there, else the one that is, and `start` goes on with it.

        Raises:
            SpotlightError: what is there is no run, or one of other settings.
        """
        wanted = configuration.load(settings, overrides)
        check_inputs(wanted)
        directory = RunDir.into(run_dir, wanted)
        return cls.resume(directory.url, cluster=cluster)

    @classmethod
    def resume(cls, run_dir: str | Path, *, cluster: Standing | None = None) -> Run:
        """A run that was stopped or killed; `start` goes on where it was, on any cluster."""
        directory = RunDir.open(run_dir)
        resuming.check(directory)
        run = cls.__new__(cls)
        run._open(directory, directory.config(), cluster)
        return run

    @classmethod
    def attach(cls, run_dir: str | Path) -> Run:
        """A run to look at, whoever runs it: as it is now, and as it goes on.

        Of one that nobody runs, `start` goes on where it was.
        """
        directory = RunDir.open(run_dir)
        run = cls.__new__(cls)
        run._hold(directory, directory.config(), None)
        return run

    def _open(self, directory: RunDir | None, settings: configuration.Config, cluster: Standing | None) -> None:
        check_inputs(settings)
        self._hold(directory, settings, cluster)
        self._checked = True

    def _hold(self, directory: RunDir | None, settings: configuration.Config, cluster: Standing | None) -> None:
        self.config = settings
        self._cluster = cluster
        self._directory = directory
        self._checked = False
        self._accounts: Accounts | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._state, self._phase = "new", ""
        self._pools: Pools | None = None
        self._lease: Lease | None = None
        self._dashboard = ""
        self._waiting_for: tuple[str, ...] = ()
        self._refused: Mapping[str, str] = {}
        self._began_s = 0.0
        self._feed: Feed | None = None
        self._tracking: Tracking | None = None
        self._shown_s = 0.0

    @property
    def directory(self) -> RunDir:
        if self._directory is None:
            raise SpotlightError("this run has no directory yet: call start()")
        return self._directory

    def start(self) -> Run:
        """Begin in the background, or go on; returns at once."""
        if self._is_ours:
            raise SpotlightError(f"{self.directory.url}: this run is already running")
        if not self._checked:  # it was only looked at so far
            resuming.check(self.directory)
            check_inputs(self.config)
            self._checked = True
        if self.config.run.dir.startswith("memory://"):
            raise SpotlightError(
                f"run.dir = {self.config.run.dir!r}: workers are processes, and none sees the memory of another: name "
                "a directory, or a URL of an object store"
            )
        if self._cluster is None:
            _check_port(self.config.cluster.dashboard_port)
        tracking.check(self.config)
        self._began_s = wall_clock()
        if self._directory is None:
            self._directory = RunDir.create(self.config, self._began_s)
        self._accounts = Accounts(self._directory, self.config)
        self._stop.clear()
        self._error = None
        self._state = "starting"
        self._thread = threading.Thread(target=self._work, name="spotlight-run")
        self._thread.start()
        return self

    @property
    def _kept(self) -> Accounts:
        """The accounts; those of a run that goes on elsewhere are read again at every look."""
        if self._is_elsewhere:
            self.directory.pull()
            return Accounts(self.directory, self.config, watched=True)
        if self._accounts is None:
            self._accounts = Accounts(self.directory, self.config)
        return self._accounts

    @property
    def _is_elsewhere(self) -> bool:
        """Whether somebody else runs it now: another process, or another object of this one."""
        return not self._is_ours and self._directory is not None and bool(self._directory.holder())

    @property
    def _is_ours(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether it is going on now; one that was not started here, elsewhere."""
        return self._is_elsewhere if self._thread is None else self._is_ours

    @property
    def state(self) -> str:
        """As `Status` has it."""
        if self._thread is not None or self._directory is None:
            return self._state
        if self._is_elsewhere:
            return "running"
        done = len(self._directory.history()) >= self.config.run.iterations and self._directory.summary() is not None
        return "finished" if done else "stopped"

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait for the end.

        Raises:
            Stopped: the run was stopped; `start` resumes it.
            SpotlightError: it failed for a reason that a person can put right.
            TimeoutError: it still runs.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self._wait_elsewhere(timeout_s)
        if self.alive:
            raise TimeoutError(f"{self.directory.url}: still running after {timeout_s} s")
        if self._error:
            raise self._error
        return self.status

    def _wait_elsewhere(self, timeout_s: float | None) -> None:
        began_s = wall_clock()
        while self.alive and (timeout_s is None or wall_clock() < began_s + timeout_s):
            time.sleep(POLL_S)
        if not self.alive and self.state == "stopped":
            raise Stopped(f"resume with: spotlight resume {self.directory.url}")

    def __await__(self) -> Generator[Any, None, Status]:
        """``await run``: as `wait`, while the event loop, of a notebook for example, goes on."""
        return self._ended().__await__()

    async def _ended(self) -> Status:
        while self.alive:
            await asyncio.sleep(POLL_S)
        return self.wait()

    def stop(self) -> None:
        """Ask the run to end after the steps in flight; `wait` tells when it has."""
        self._stop.set()

    def scale(self, *, spot: int) -> None:
        """Have so many spot workers from now on, at most `pools.spot.workers`.

        Those that are too many finish their step, commit and leave, as on a notice. What the run computes stays the
        same.

        Raises:
            SpotlightError: it does not run here, its cluster is not its own, or it cannot have that many.
        """
        if self._pools is None:
            raise SpotlightError("this run has no workers here and now: start it, or scale where it was started")
        self._pools.scale(spot)

    @property
    def status(self) -> Status:
        run, now_s = self.directory, wall_clock()
        accounts = self._kept
        history = run.last(HISTORY, HistoryRow, 1)
        measured = history[-1].measured if history else {}
        worth_renting = measured.get("spot_worth_renting")
        ledger, usd_by_pool = accounts.ledger(now_s), accounts.usd_by_pool(now_s)
        return Status(
            state=self.state,
            phase=self._phase,
            iteration=run.count(HISTORY),
            iterations=self.config.run.iterations,
            reward=history[-1].metrics["reward_mean"] if history else None,
            scores={row.version: row.score for row in run.validation()},
            spot_utilisation=accounts.spot_utilisation(now_s),
            usd=sum(usd_by_pool.values()),
            usd_by_pool=usd_by_pool,
            wasted_s=ledger.wasted_s,
            usd_wasted=ledger.usd_wasted,
            usd_reserved_only=ledger.usd_reserved_only,
            usd_per_iteration=ledger.usd_per_iteration,
            usd_per_sample=ledger.usd_per_sample,
            usd_per_point=ledger.usd_per_point,
            preemptions=accounts.preemptions(),
            workers=accounts.alive(),
            running=accounts.running,
            window_s=measured.get("window_s"),
            train_wait_s=measured.get("train_wait_s"),
            spot_worth_renting=None if worth_renting is None else int(worth_renting),
            waiting_for=self._waiting_for,
            refused=self._refused,
            elapsed_s=now_s - self._began_s if self._began_s else 0.0,
            dashboard=self._dashboard,
            run_dir=run.url,
        )

    @property
    def history(self) -> pd.DataFrame:
        """One row per finished iteration: what it measured, and what it cost."""
        from spotlight.report import history_frame

        return history_frame(self.directory.url)

    @property
    def workers(self) -> pd.DataFrame:
        """One row per worker that there is or was: its pool, when it came and went, and why."""
        from spotlight.notebook import workers_frame

        return workers_frame(self._kept.lives())

    def plot(self, what: Literal["reward", "timeline", "before-after"] = "reward") -> Plot:
        """A picture of the run so far; a notebook shows it, and its ``figure`` is matplotlib's.

        Raises:
            SpotlightError: the run has nothing to draw there yet.
        """
        from spotlight.notebook import plot

        return plot(self.directory.url, what)

    def images(self, iteration: int | None = None) -> Images:
        """Small pictures of the kept seeds that an iteration was trained on, with their rewards; a notebook shows them.

        Args:
            iteration: the last one that is finished, if it is left out.

        Raises:
            SpotlightError: there are none.
        """
        from spotlight.notebook import images

        return images(self.directory, iteration)

    def _repr_html_(self) -> str:
        from spotlight.notebook import describe

        return describe(self)

    def _ipython_display_(self) -> None:
        """Show it in a notebook, and what becomes of it while it goes on."""
        from spotlight.notebook import show

        show(self)

    @property
    def client(self) -> Client:
        """The Dask client of the cluster, while the run goes on."""
        if self._pools is None:
            raise SpotlightError("the run has no cluster now: it is not running, or not yet")
        return self._pools.client

    def report(self) -> Path:
        """Write ``report.html`` and its pictures; returns its path."""
        from spotlight.report import write_report

        return write_report(self.directory.url)

    # The thread

    def _work(self) -> None:
        try:
            with self.directory.lock() as lease:
                self._run_locked(lease)
            self._state = "finished"
        except Stopped:
            self._state, self._error = "stopped", Stopped(f"resume with: spotlight resume {self.directory.url}")
        except BaseException as error:  # carried to whoever waits
            self._state, self._error = "failed", _explain(error, self.directory)

    def _run_locked(self, lease: Lease) -> None:
        from cluster.pools import Pools
        from graphs.loop import Loop

        run = self.directory
        if removed := remove_half_written(run.path):
            logger.warning("removed what a killed process had begun to write: %s", ", ".join(map(str, removed)))
        self._rewind()
        done = len(run.history())
        self._pools, self._lease = Pools(self.config, run.url, self._cluster), lease
        try:
            lease.names(self._pools.client.scheduler.address)
            self._feed, self._tracking = Feed(run, self.config), Tracking(run, self.config)
            self._dashboard = self._pools.dashboard
            self._state = "running"
            Loop(run, self._compute, self, session=self._pools.session).go()
        finally:
            self._close()
        if len(run.history()) > done or run.objects.size(SUMMARY) is None:
            summarise(run, self._kept, now_s=wall_clock(), began_s=self._began_s)
        self._phase = "report"
        self.report()

    def _rewind(self) -> None:
        """Take back the last iterations if their weights were deleted, being damaged: they are done again."""
        run = self.directory
        done = resuming.rows_that_stay(run)
        if len(done) != len(run.history()):
            run.rewrite(HISTORY, run.rows(HISTORY)[: len(done)])

    def _close(self) -> None:
        assert self._pools
        try:
            self._follow()
            self._kept.close(wall_clock())
            if self._tracking:
                self._tracking.close()
        finally:
            self._pools.close()
            self._pools = None
            remove_half_written(self.directory.path)  # by workers that were killed at it

    def _compute(self, graph: Graph) -> Mapping[str, Any]:
        """Run a graph on the cluster, unless the run is stopped first."""
        assert self._pools
        packed = self._pools.client.get(graph.graph, list(graph.outputs.values()), sync=False)
        futures = _flatten(packed)
        try:
            while any(future.status == "pending" for future in futures):
                _wait(self._pools.client, futures)
                self._follow()
                failed = next((future for future in futures if future.status == "error"), None)
                if failed is not None:
                    failed.result()
                if self._stop.is_set():
                    self._end_steps()
            if any(future.status in ("cancelled", "lost") for future in futures):
                raise SpotlightError(
                    f"the cluster lost the run's tasks: its scheduler ended, or was restarted; what was committed is "
                    f"kept: `spotlight resume {self.directory.url}` goes on, with --cluster on another one"
                )
            return dict(zip(graph.outputs, self._pools.client.gather(packed), strict=True))
        finally:
            for future in futures:
                future.release()

    def _end_steps(self) -> None:
        assert self._pools
        self._pools.stop()
        deadline_s = wall_clock() + STOP_GRACE_S
        while self._pools.status()["running"] and wall_clock() < deadline_s:
            time.sleep(POLL_S / 5)
        raise Stopped

    def _follow(self) -> None:
        """Take over what the cluster did since the last time."""
        assert self._pools
        if self._lease:
            self._lease.check()
        drained, status = self._pools.drain(), self._pools.status()
        if drained["decisions"]:
            self.directory.append(DECISIONS, *drained["decisions"])
        for event in drained["events"]:
            if said := _worth_saying(event):
                logger.warning("%s", said)
        self._waiting_for, self._refused = tuple(status["waiting_for"]), status["refused"]
        if status["hopeless"]:
            raise SpotlightError(status["hopeless"])
        self._kept.take(drained, status["running"])
        self.directory.push()
        self._show()

    def _show(self) -> None:
        """Tell the page on the dashboard what is new, now and then."""
        now_s = wall_clock()
        if self._feed is None or now_s < self._shown_s + SHOW_S:
            return
        assert self._pools
        self._shown_s = now_s
        self._pools.show(self._feed.rows(self._kept.money(now_s)))
        if self._tracking:
            self._tracking.follow()

    # Watch

    def begin(self, phase: str, iteration: int) -> None:
        self._phase = f"{phase} {iteration}"

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        self._follow()
        return self._kept.measure(start_s, stop_s)

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        self._follow()
        return self._kept.balance(iteration, began_s, window_s)


def summarise(run: RunDir, accounts: Accounts, *, now_s: float, began_s: float) -> None:
    """Write the few numbers that a run comes to."""
    validation, ledger = run.validation(), accounts.ledger(now_s)
    run.write_summary(
        Summary(
            score_before=validation[0].score,
            score_after=validation[-1].score,
            iterations=len(run.history()),
            wall_s=now_s - began_s,
            usd=ledger.usd(),
            usd_wasted=ledger.usd_wasted,
            usd_reserved_only=ledger.usd_reserved_only,
            preemptions=accounts.preemptions(),
            first_image_s=accounts.first_image_s(began_s),
        )
    )


def _worth_saying(event: Mapping[str, Any]) -> str:
    """What a person should know of at once; empty for what is as it should be."""
    match event["event"]:
        case "paused":
            return f"{event['lost_s']:.0f} s were lost: the run was paused, or its machine slept; it goes on"
        case "waits" | "continued":
            return str(event["what"])
        case _:
            return ""


def _flatten(packed: Any) -> list[Future[Any]]:
    return [future for part in packed for future in _flatten(part)] if isinstance(packed, list) else [packed]


def _wait(client: Client, futures: Sequence[Future[Any]]) -> None:
    """Until all are done, or for a moment; the client is no default, which a notebook may have of its own."""
    from distributed import wait

    with client.as_current(), contextlib.suppress(TimeoutError):
        wait(futures, timeout=POLL_S)


def check_inputs(settings: configuration.Config, *, with_model: bool = True, live: bool = True) -> None:
    """Find at once what would stop the run once its cluster is up.

    Args:
        with_model: whether it needs the model's files, and stores latents.
        live: whether it will have workers.

    What is only doubtful is said in the log.
    """
    for doubt in settings.doubts:
        logger.warning("%s", doubt)
    data, model = settings.data, settings.model
    pool_prices(settings)
    for _, pool in settings.pools:
        recorded = read_trace(pool.trace) if pool.trace else None
        pool_switches(pool, recorded, seed=settings.run.seed, duration_s=1.0)
    scorer = rewards.build(settings.reward)
    for path in (data.train_prompts, data.validation_prompts):
        check_prompts(read_prompts(path), path, scorer.check_prompt)
    choose_prompts(len(read_prompts(data.train_prompts)), settings.prompts_drawn, seed=settings.run.seed, iteration=0)
    check_demands(settings, validation_prompts=len(read_prompts(data.validation_prompts)), live=live)
    if not with_model:
        return
    if settings.latents.url:
        from spotlight.store.zarr_store import check_url

        check_url(settings.latents.url)
    if model.path and model.embedded and not Path(model.path).is_file():
        raise SpotlightError(
            f"model.path = {model.path!r}: no such file; give one that examples/pretrain_tiny.py wrote, or leave it out"
        )
    if model.path and not model.embedded and not Path(model.path).is_dir():
        raise SpotlightError(f"model.path = {model.path!r}: no such directory; give that of a diffusers pipeline")
    if not model.embedded:
        checkpoints.survey(model.name, model.path)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SpotlightError(
                f"cluster.dashboard_port = {port} cannot be used ({error.strerror}): stop what listens there, or "
                "choose another, 0 for any free one: for a new run by --set cluster.dashboard_port=0, for a resumed "
                f"one in its {configuration.RESOLVED}"
            ) from None


def _explain(error: BaseException, run: RunDir) -> BaseException:
    """A full disk is for a person to put right; what nobody foresaw says at least how to go on."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        places = [run.path, "/dev/shm", tempfile.gettempdir(), *([error.filename] if error.filename else [])]
        found = full_disk(places) or "make room"
        return SpotlightError(
            f"{run.path}: the disk is full: {found}, then `spotlight resume {run.url}`; all that was committed is kept"
        )
    if not isinstance(error, SpotlightError):
        error.add_note(f"all that was committed is kept; `spotlight resume {run.url}` goes on from there")
    return error
