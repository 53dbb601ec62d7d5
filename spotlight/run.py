"""A run as an object: start it, watch it, stop it, resume it, report it. For notebooks and the shell alike.

The run goes on in a thread of this process (`spotlight.background`), which also holds the scheduler, or in a process of
its own (`spotlight.detached`).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spotlight import config as configuration
from spotlight.background import Background, begun_here, names_here, refuse_at_the_end, refuse_while_simulating
from spotlight.clock import wall_clock
from spotlight.detached import begin, end_of, stop
from spotlight.driver import POLL_S
from spotlight.files import from_home, is_url, whole, writing
from spotlight.inputs import check_inputs, check_port, check_same_model
from spotlight.records import SpotlightError, Stopped, in_a_sentence
from spotlight.report import tracking
from spotlight.report.money import emulated
from spotlight.rl import rewards
from spotlight.status import ON_ONE_NODE, Status
from spotlight.store import resuming
from spotlight.store.accounts import Accounts, alive_s
from spotlight.store.creating import check_place, create_run, create_run_at
from spotlight.store.lease import Holder
from spotlight.store.rows import HISTORY, HistoryRow
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client

    from cluster.start.existing import ExistingCluster
    from cluster.start.run_cluster import RunCluster
    from spotlight.notebook import Images, Plot


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

    def __init__(
        self, settings: str | Path, overrides: Sequence[str] = (), *, cluster: ExistingCluster | None = None
    ) -> None:
        loaded = configuration.load(settings, overrides)
        check_inputs(loaded, joins=cluster is not None)
        self._open(None, loaded, cluster)

    @classmethod
    def of(cls, settings: configuration.Config) -> Run:
        """A run of settings that are already read."""
        check_inputs(settings)
        return cls._of(None, settings, None)

    @classmethod
    def into(
        cls,
        run_dir: str | os.PathLike[str],
        settings: str | Path,
        overrides: Sequence[str] = (),
        *,
        cluster: ExistingCluster | None = None,
    ) -> Run:
        """The run in this directory: a new one if nothing is there, else the existing one, which `start` resumes.

        Raises:
            SpotlightError: what is there is no run, or one of other settings.
        """
        wanted = configuration.load(settings, overrides)
        run_dir = from_home(os.fspath(run_dir))
        check_place(run_dir)
        check_inputs(wanted, joins=cluster is not None, begun=resuming.has_begun(run_dir))
        directory = create_run_at(run_dir, wanted)
        resuming.check(directory)
        return cls._of(directory, directory.config(), cluster)

    @classmethod
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        cluster: ExistingCluster | None = None,
        iterations: int | None = None,
        target: float | None = None,
        usd_max: float | None = None,
    ) -> Run:
        """A run that was stopped or killed, or is to end later; `start` resumes it, on any cluster.

        Args:
            iterations, target, usd_max: new values of its ``run.iterations``, ``run.target`` and ``run.usd_max``; None
                leaves one as it is.
        """
        directory = RunDir.open(run_dir)
        resuming.check(directory, None if iterations is None else whole(iterations, "iterations"))
        check_inputs(directory.config(), joins=cluster is not None, begun=resuming.has_begun(directory.url))
        if (iterations, target, usd_max) != (None, None, None):
            directory.change_end(iterations=iterations, target=target, usd_max=usd_max)
        return cls._of(directory, directory.config(), cluster)

    @classmethod
    def attach(cls, run_dir: str | os.PathLike[str]) -> Run:
        """A run to watch, whichever process runs it.

        If none does, `start` resumes it.
        """
        directory = RunDir.open(run_dir)
        run = cls.__new__(cls)
        run._hold(directory, directory.config(), None)
        return run

    @classmethod
    def _of(cls, directory: RunDir | None, settings: configuration.Config, cluster: ExistingCluster | None) -> Run:
        run = cls.__new__(cls)
        run._open(directory, settings, cluster)
        return run

    def _open(self, directory: RunDir | None, settings: configuration.Config, cluster: ExistingCluster | None) -> None:
        """Set the run up from settings whose inputs were checked."""
        if isinstance(cluster, str | Path):
            from cluster.start.existing import refuse_unsafe, where

            address, _ = where(cluster)
            refuse_unsafe(address, insecure=settings.cluster.insecure)
        self._hold(directory, settings, cluster, checked=True)

    def _hold(
        self,
        directory: RunDir | None,
        settings: configuration.Config,
        cluster: ExistingCluster | None,
        *,
        checked: bool = False,
    ) -> None:
        self.config = settings
        self._cluster = cluster
        self._directory = directory
        self._checked = settings.run if checked else None
        """When the run was to end as its inputs were checked; None: not checked yet."""
        self._accounts: Accounts | None = None
        self._watched: Accounts | None = None
        """The accounts of a run that another process drives, as of the last look."""
        self._thread: Background | None = None
        """The driver, if it is a thread of this process; see `_background`."""
        self._process: subprocess.Popen[bytes] | None = None
        """The driver, if it is a process of its own that was begun here."""
        self._refused: tuple[str, Holder | None] = ("", None)
        """Why that process could not go on, and who had the run last by then."""

    @property
    def directory(self) -> RunDir:
        """The run's directory.

        Raises:
            SpotlightError: it has none yet.
        """
        if self._directory is None:
            raise SpotlightError("this run has no directory yet: call start()")
        return self._directory

    def start(self, *, detached: bool = False) -> Run:
        """Start or resume the run in the background; returns at once.

        Args:
            detached: the driver is a process of its own, which goes on when this one ends, such as a notebook's kernel
                that is restarted; `attach` finds the run again. Returns once that process holds the run.

        Raises:
            SpotlightError: it runs already, or cannot begin.
        """
        rewards.refuse_while_importing()
        if not detached:
            refuse_at_the_end()
            refuse_while_simulating()
        if self._is_ours:
            raise SpotlightError(f"{self.directory.url}: this run is already running")
        if self._directory is not None:
            self.config = self._directory.config()  # another may have made it longer
        if self._directory is not None and (holder := self._directory.holder()):
            raise SpotlightError(f"{self.directory.url}: {holder} is running this run: wait for it, or stop it first")
        if self._checked != self.config.run:  # or another has made it longer
            resuming.check(self.directory)
            begun = resuming.has_begun(self.directory.url)
            check_inputs(self.config, joins=self._cluster is not None, begun=begun)
            self._checked = self.config.run
        for name, url in (("run.dir", self.config.run.dir), ("latents.url", self.config.latents.url)):
            if url.startswith("memory://"):
                raise SpotlightError(
                    f"{name} = {url!r}: workers are processes, and none sees the memory of another: name a directory, "
                    "or a URL of an object store"
                )
        if self._cluster is None and not (self._directory and resuming.is_over(self._directory, self.config)):
            check_port(self.config.cluster.dashboard_host, self.config.cluster.dashboard_port)
        tracking.check(self.config)
        if detached and self._cluster is not None:
            from cluster.start.existing import check_outlives

            check_outlives(self._cluster)
        began_s = wall_clock()
        if self._directory is None:
            self._check_cluster()
            self._directory = create_run(self.config, began_s, taken=names_here())
        elif not detached and self._directory.name in names_here(self._directory.url):
            raise SpotlightError(
                f"{self._directory.url}: another run of this name goes on in this process, and signals to its workers "
                "say no more than the name: wait for that one, or start this one detached, or in another process"
            )
        check_same_model(self._directory, self.config)
        self._accounts = None
        self._refused = ("", None)
        if detached:
            self._thread = None
            try:
                self._process = begin(self._directory, self._cluster)
            except SpotlightError as error:
                self._refused = str(error), self._directory.last_holder()
                raise
        else:
            self._thread = Background(
                self._directory, self.config, self._cluster, resume_command=self.resume_command, began_s=began_s
            )
        return self

    def _check_cluster(self) -> None:
        """
        Raises:
            SpotlightError: a quick check shows that there can be no cluster.
        """
        if self._cluster is not None:
            from cluster.start.existing import check_reach

            check_reach(self._cluster)
        elif self.config.cluster.manager == "slurm":
            from cluster.start.slurm import check_commands

            check_commands()

    @property
    def _kept(self) -> Accounts:
        """The accounts; those of a run that another process drives are brought up to date each time."""
        watched, self._watched = self._watched, None
        if self._is_elsewhere:
            self.directory.pull()
            self._accounts = None  # what is known of it is not the last word
            if watched is None or not watched.look():
                watched = Accounts(self.directory, self.config, watched=True)
            self._watched = watched
            return watched
        if (driver := self._background) is not None and not driver.is_over:
            return driver.accounts
        if self._accounts is None:
            accounts = Accounts(self.directory, self.config)
            accounts.check()
            self._accounts = accounts
        return self._accounts

    @property
    def _background(self) -> Background | None:
        """The driver, if it is a thread of this process, whichever object began it; None once somebody else has it."""
        if self._directory is not None:
            if found := begun_here(self._directory.url):
                self._thread = found
            elif self._thread is not None and self._thread.is_over and self._directory.holder():
                self._thread = None
        return self._thread

    @property
    def _is_elsewhere(self) -> bool:
        """Whether another process runs it now, or another `Run` of this one."""
        return not self._is_ours and self._directory is not None and bool(self._directory.holder())

    @property
    def _is_ours(self) -> bool:
        return (driver := self._background) is not None and not driver.is_over

    @property
    def alive(self) -> bool:
        """Whether it is running now, here or, if it was not started here, elsewhere."""
        return self._is_elsewhere if self._background is None else self._is_ours

    @property
    def _is_to_end(self) -> bool:
        """Whether there is an end to wait for: it is running, or its directory waits for a driver."""
        return self.alive or (self._directory is not None and self.state == "new")

    @property
    def state(self) -> str:
        """See `Status.state`."""
        if (driver := self._background) is not None:
            return driver.state
        if self._directory is None:
            return "new"
        if self._is_elsewhere:
            return "running"
        if not is_url(self._directory.url) and not self._directory.path.is_dir():
            raise SpotlightError(f"{self._directory.url}: the run's directory is gone: was it moved, or deleted?")
        if resuming.is_over(self._directory, self.config):
            return "finished"
        self.config = self._directory.config()  # another may have changed how long it is to be
        if resuming.is_over(self._directory, self.config):
            return "finished"
        last = self._directory.last_holder()
        if self._refused[0] and self._refused[1] == last:
            return "failed"
        if last is None:
            return "stopped" if self._directory.simulated or self._directory.history() else "new"
        return "failed" if last.error else "stopped"

    def _why(self, state: str) -> str:
        """See `Status.error`; of a run in this state."""
        if (driver := self._background) is not None:
            error = driver.error
            return in_a_sentence(error) if error and state == "failed" else ""
        last = self.directory.last_holder() if state in ("stopped", "failed") else None
        if self._refused[0] and self._refused[1] == last:
            return self._refused[0]
        return last.last_words if last else ""

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait for the end; a run in Slurm's queue is waited for, too.

        Raises:
            Stopped: the run was stopped; `start` resumes it.
            SpotlightError: it failed for a reason that a person can fix.
            TimeoutError: it still runs.
        """
        if (driver := self._background) is not None:
            driver.wait(timeout_s)
        else:
            began_s = wall_clock()
            if self._process is not None:
                end_of(self._process, self.directory, timeout_s)
            self._wait_elsewhere(began_s, timeout_s)
        if self._is_to_end:
            now = "still running" if self.alive else "nobody has begun it"
            raise TimeoutError(f"{self.directory.url}: {now} after {timeout_s} s")
        if driver is not None and driver.error:
            raise driver.error
        return self.status

    def _wait_elsewhere(self, began_s: float, timeout_s: float | None) -> None:
        while self._is_to_end and (timeout_s is None or wall_clock() < began_s + timeout_s):
            time.sleep(POLL_S)
        state = self.state
        if state == "stopped":
            raise Stopped("; ".join(filter(None, (self._why(state), f"resume with: {self.resume_command}"))))
        if state == "failed":
            raise SpotlightError(self._why(state))

    def __await__(self) -> Generator[Any, None, Status]:
        """``await run``: as `wait`, without blocking the event loop."""
        return self._ended().__await__()

    async def _ended(self) -> Status:
        while self._is_to_end or (self._process is not None and self._process.poll() is None):  # it outlives the run
            await asyncio.sleep(POLL_S)
        return self.wait()

    def stop(self) -> None:
        """Ask the run to end after the steps in flight; `wait` returns when it has.

        This also works if a `spotlight` command of this machine runs it, such as a detached driver.

        Raises:
            SpotlightError: another process runs it, which cannot be asked from here.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        elif (driver := self._background) is not None:
            driver.stop()
        elif self._is_elsewhere:
            stop(self.directory)

    @property
    def resume_command(self) -> str:
        """The shell command that resumes the run, on the same cluster."""
        cluster = self._cluster_elsewhere
        if not cluster and (holder := self.directory.lease_holder()):
            cluster = holder.cluster
        where = f" --cluster {shlex.quote(cluster)}" if cluster else ""
        return f"{self.directory.resume_command}{where}"

    @property
    def _cluster_elsewhere(self) -> str:
        """The given cluster, as another process reaches it; empty where there is none, or none does."""
        if self._cluster is None or isinstance(self._cluster, str | Path):
            return str(self._cluster or "")
        from cluster.start.existing import IN_PROCESS, where

        try:
            address, _ = where(self._cluster)
        except SpotlightError:  # the client was closed
            return ""
        return "" if address.startswith(IN_PROCESS) else address

    def _lacking(self, accounts: Accounts) -> tuple[str, ...]:
        """Pools of a run that goes on elsewhere without any worker."""
        if not self._is_elsewhere:
            return ()
        there = accounts.alive()
        return tuple(name for name, pool in self.config.pools if pool.workers and not there.get(name))

    def __repr__(self) -> str:
        try:
            state = self.state
        except SpotlightError:
            state = "its state cannot be read" if self.directory.path.is_dir() else "its directory is gone"
        return f"<Run {self._directory.url if self._directory else self.config.run.name}: {state}>"

    def how_to_start(self, waiting_for: Sequence[str]) -> str:
        """A hint on how to get what a run waits for (`Status.waiting_for`); empty if the run starts it itself."""
        if self._cluster is None:
            queued = self.pools.queued() if self.pools else []
            return f"Slurm: {', '.join(queued)}; `squeue --me` lists the jobs" if queued else ""
        pools = [name for name, _ in self.config.pools if name in waiting_for]
        if not pools:
            narrow = (each for each in waiting_for if each.endswith(ON_ONE_NODE))
            hint = "no node has enough workers: start {}, or add a smaller width to strategy.widths"
            return next(map(hint.format, narrow), "")
        address = self._cluster if isinstance(self._cluster, str) else "ADDRESS"
        workers = " and ".join(f"`dask worker {address} --resources {pool}=1`" for pool in pools)
        return (
            f"no worker of the cluster takes part as {' or '.join(pools)}: start {workers}; docs/clusters.md says how"
        )

    def scale(self, *, spot: int) -> None:
        """Use so many spot workers from now on, at most `pools.spot.workers`.

        Surplus workers finish their step, commit and leave, as on a notice. What the run computes stays the same.

        Raises:
            SpotlightError: it does not run here, its cluster is not its own, or it cannot have that many.
        """
        if self.pools is None:
            raise SpotlightError(
                "this run's workers are not there yet: try again in a moment"
                if self._is_ours
                else "this run has no workers here and now: start it, or scale where it was started"
            )
        self.pools.scale(spot)

    @property
    def status(self) -> Status:
        run, state = self.directory, self.state
        driver = self._background.driver if self._background else None
        accounts = self._kept
        now_s = accounts.until_s(wall_clock())
        history = run.last(HISTORY, HistoryRow, 1)
        measured = history[-1].measured if history else {}
        worth_renting = measured.get("spot_worth_renting")
        until_s = measured.get("stopped_s", 0.0) if accounts is self._watched else now_s  # its driver's is of then, too
        ledger, usd_by_pool = accounts.ledger(until_s), accounts.usd_by_pool(now_s)
        return Status(
            state=state,
            phase=driver.phase if driver and self._is_ours else "",
            iteration=run.count(HISTORY),
            iterations=self.config.run.iterations,
            reward=history[-1].metrics.get("reward_mean") if history else None,
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
            waiting_for=driver.waiting_for if driver and self._is_ours else self._lacking(accounts),
            refused=driver.refused if driver else {},
            elapsed_s=self._elapsed_s(accounts, now_s),
            dashboard=driver.dashboard if driver and self._is_ours else self._dashboard_elsewhere(),
            run_dir=run.url,
            emulated_per_real_s=self.config.emulated_per_real_s,
            emulated=emulated(self.config, "" if self._is_ours else run.simulated),  # ours is live
            error=self._why(state),
        )

    def _dashboard_elsewhere(self) -> str:
        holder = self.directory.lease_holder() if self._is_elsewhere else None
        return holder.dashboard if holder else ""

    def _elapsed_s(self, accounts: Accounts, now_s: float) -> float:
        if self._background is None:
            return alive_s(accounts.lives(), now_s)
        return (wall_clock() if self._is_ours else self._background.ended_s) - self._background.began_s

    @property
    def history(self) -> pd.DataFrame:
        """One row per finished iteration: what it measured, and what it cost."""
        from spotlight.report import history_frame

        return history_frame(self.directory)

    @property
    def workers(self) -> pd.DataFrame:
        """One row per worker so far: its pool, when it joined and left, and why."""
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
            iteration: None: the last finished one.

        Raises:
            SpotlightError: there are none.
        """
        from spotlight.notebook import images

        return images(self.directory, iteration)

    def _repr_html_(self) -> str:
        from spotlight.notebook import describe

        return describe(self)

    def _ipython_display_(self) -> None:
        """Show the run in a notebook, updated while it is running."""
        from spotlight.notebook import show

        show(self)

    @property
    def pools(self) -> RunCluster | None:
        """The cluster, while the run goes on."""
        driver = self._background.driver if self._background else None
        return driver.pools if driver else None

    @property
    def client(self) -> Client:
        """The Dask client of the cluster, while the run goes on; to close it ends the run.

        Raises:
            SpotlightError: it does not run here, or has no cluster yet.
        """
        if self.pools is None:
            raise SpotlightError(
                "this run's cluster is not there yet: try again in a moment"
                if self._is_ours
                else "this run has no cluster here and now: start it, or use the client where it was started"
            )
        return self.pools.client

    def report(self) -> Path:
        """Write ``report.html`` and its pictures; returns its path.

        Raises:
            SpotlightError: a file of the run is damaged, or its directory cannot be written to.
        """
        from spotlight.report import write_report

        with writing(self.directory.url):
            return write_report(self.directory.url)
