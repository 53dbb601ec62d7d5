"""A run as an object: start it, watch it, stop it, resume it, report it. For notebooks and the shell alike.

It joins the three rooms: settings and records, the graphs, and the cluster. The run goes on in a
thread of this process, which also holds the scheduler.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight import config as configuration
from spotlight.clock import wall_clock
from spotlight.device.signals import Clear, signals
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches
from spotlight.records import SpotlightError, Stopped
from spotlight.rl import rewards
from spotlight.rl.prompts import check_prompts, choose_prompts, read_prompts
from spotlight.store.accounts import Accounts, pool_prices
from spotlight.store.rundir import DECISIONS, HISTORY, SUMMARY, RunDir, Summary
from spotlight.store.weights import published

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client, Future

    from cluster.pools import Pools
    from graphs.iteration import Graph
    from spotlight.plan.offload import Balance

logger = logging.getLogger(__name__)

STOP_GRACE_S = 60.0
"""How long a stop waits for the steps in flight; a step of a large model can last many seconds."""
POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run is, now."""

    state: str
    """"starting", "running", "finished", "stopped" or "failed"."""
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
    """Pools that requests wait for, because none that may run them has a worker now."""
    elapsed_s: float
    dashboard: str
    run_dir: str


class Run:
    """One run of post-training.

    Args:
        settings: a TOML file.
        overrides: ``"section.key=value"`` each.

    Raises:
        SpotlightError: the settings or the prompts cannot be used.

    >>> run = Run("ocr-tiny.toml")  # doctest: +SKIP
    >>> run.start(); run.wait(); run.history  # doctest: +SKIP
    """

    def __init__(self, settings: str | Path, overrides: Sequence[str] = ()) -> None:
        self._open(None, configuration.load(settings, overrides))

    @classmethod
    def of(cls, settings: configuration.Config) -> Run:
        """A run of settings that are already read."""
        run = cls.__new__(cls)
        run._open(None, settings)
        return run

    @classmethod
    def resume(cls, run_dir: str | Path) -> Run:
        """A run that was stopped or killed; `start` goes on where it was."""
        directory = RunDir.open(run_dir)
        run = cls.__new__(cls)
        run._open(directory, directory.config())
        return run

    def _open(self, directory: RunDir | None, settings: configuration.Config) -> None:
        self.config = settings
        self._directory = directory
        self._accounts: Accounts | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._state, self._phase = "new", ""
        self._pools: Pools | None = None
        self._dashboard = ""
        self._waiting_for: tuple[str, ...] = ()
        self._began_s = 0.0
        check_inputs(settings)

    @property
    def directory(self) -> RunDir:
        if self._directory is None:
            raise SpotlightError("this run has no directory yet: call start()")
        return self._directory

    def start(self) -> Run:
        """Begin in the background, or go on; returns at once."""
        if self.alive:
            raise SpotlightError(f"{self.directory.path}: this run is already running")
        _check_port(self.config.cluster.dashboard_port)
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
        """The accounts, opened at the first look."""
        if self._accounts is None:
            self._accounts = Accounts(self.directory, self.config)
        return self._accounts

    @property
    def alive(self) -> bool:
        """Whether it is going on now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait for the end.

        Raises:
            Stopped: the run was stopped; `start` resumes it.
            SpotlightError: it failed for a reason that a person can put right.
            TimeoutError: it still runs.
        """
        assert self._thread, "start() comes first"
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.directory.path}: still running after {timeout_s} s")
        if self._error:
            raise self._error
        return self.status

    def stop(self) -> None:
        """Ask the run to end after the steps in flight; `wait` tells when it has."""
        self._stop.set()

    @property
    def status(self) -> Status:
        run, now_s = self.directory, wall_clock()
        accounts = self._kept
        history = run.history()
        measured = history[-1].measured if history else {}
        worth_renting = measured.get("spot_worth_renting")
        ledger, usd_by_pool = accounts.ledger(now_s), accounts.usd_by_pool(now_s)
        return Status(
            state=self._state,
            phase=self._phase,
            iteration=len(history),
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
            elapsed_s=now_s - self._began_s if self._began_s else 0.0,
            dashboard=self._dashboard,
            run_dir=str(run.path),
        )

    @property
    def history(self) -> pd.DataFrame:
        """One row per finished iteration: what it measured, and what it cost."""
        from spotlight.report import history_frame

        return history_frame(self.directory.path)

    @property
    def client(self) -> Client:
        """The Dask client of the cluster, while the run goes on."""
        if self._pools is None:
            raise SpotlightError("the run has no cluster now: it is not running, or not yet")
        return self._pools.client

    def report(self) -> Path:
        """Write ``report.html`` and its pictures; returns its path."""
        from spotlight.report import write_report

        return write_report(self.directory.path)

    # The thread

    def _work(self) -> None:
        try:
            with self.directory.lock():
                self._run_locked()
            self._state = "finished"
        except Stopped:
            self._state, self._error = "stopped", Stopped(f"resume with: spotlight resume {self.directory.path}")
        except BaseException as error:  # carried to whoever waits
            self._state, self._error = "failed", _explain(error, self.directory.path)

    def _run_locked(self) -> None:
        from cluster.pools import Pools
        from graphs.loop import Loop

        run = self.directory
        signals.obey(Clear(run=run.path.name))
        self._rewind()
        done = len(run.history())
        self._pools = Pools(self.config, run.path.name)
        try:
            self._dashboard = self._pools.dashboard
            self._state = "running"
            Loop(run, self._compute, self).go()
        finally:
            self._close()
        if len(run.history()) > done or not (run.path / SUMMARY).exists():
            summarise(run, self._kept, now_s=wall_clock(), began_s=self._began_s)
        self._phase = "report"
        self.report()

    def _rewind(self) -> None:
        """Take back the last iterations if their weights were deleted, being damaged: they are done again."""
        run = self.directory
        done = history = run.history()
        while done and not published(run.path, done[-1].weights_version):
            done = done[:-1]
        if done != history:
            run.rewrite(HISTORY, run.rows(HISTORY)[: len(done)])

    def _close(self) -> None:
        assert self._pools
        try:
            self._follow()
            self._kept.close(wall_clock())
        finally:
            self._pools.close()
            self._pools = None

    def _compute(self, graph: Graph) -> Mapping[str, Any]:
        """Run a graph on the cluster, unless the run is stopped first."""
        assert self._pools
        packed = self._pools.client.get(graph.graph, list(graph.outputs.values()), sync=False)
        futures = _flatten(packed)
        try:
            while any(future.status == "pending" for future in futures):
                _wait(futures)
                self._follow()
                failed = next((future for future in futures if future.status == "error"), None)
                if failed is not None:
                    failed.result()
                if self._stop.is_set():
                    self._end_steps()
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
        drained, status = self._pools.drain(), self._pools.status()
        if drained["decisions"]:
            self.directory.append(DECISIONS, *drained["decisions"])
        self._waiting_for = tuple(status["waiting_for"])
        self._kept.take(drained, status["running"])

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


def _flatten(packed: Any) -> list[Future[Any]]:
    return [future for part in packed for future in _flatten(part)] if isinstance(packed, list) else [packed]


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Until all are done, or for a moment."""
    from distributed import wait

    with contextlib.suppress(TimeoutError):
        wait(futures, timeout=POLL_S)


def check_inputs(settings: configuration.Config, *, with_model: bool = True) -> None:
    """Find at once what would stop the run once its cluster is up; its model's files only if it needs the model.

    What is only doubtful is said in the log.
    """
    for doubt in settings.doubts:
        logger.warning("%s", doubt)
    data, model = settings.data, settings.model
    pool_prices(settings)
    for _, pool in settings.pools:
        recorded = read_trace(pool.trace) if pool.trace else None
        pool_switches(pool, recorded, seed=settings.run.seed, duration_s=1.0)
    scorer = rewards.load(settings.reward.name)
    for path in (data.train_prompts, data.validation_prompts):
        check_prompts(read_prompts(path), path, scorer.check)
    choose_prompts(len(read_prompts(data.train_prompts)), settings.prompts_drawn, seed=settings.run.seed, iteration=0)
    if not with_model:
        return
    if model.path and model.name == "tiny-text" and not Path(model.path).is_file():
        raise SpotlightError(
            f"model.path = {model.path!r}: no such file; give one that examples/pretrain_tiny.py wrote, or leave it out"
        )
    if model.path and model.name != "tiny-text" and not Path(model.path).is_dir():
        raise SpotlightError(f"model.path = {model.path!r}: no such directory; give that of a diffusers pipeline")


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


def _explain(error: BaseException, run_dir: Path) -> BaseException:
    """A full disk is for a person to put right; what nobody foresaw says at least how to go on."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free_mb = shutil.disk_usage(run_dir).free / 1e6
        return SpotlightError(
            f"{run_dir}: the disk is full ({free_mb:.1f} MB free): make room, then `spotlight resume {run_dir}`; "
            "all that was committed is kept"
        )
    if not isinstance(error, SpotlightError):
        error.add_note(f"all that was committed is kept; `spotlight resume {run_dir}` goes on from there")
    return error
