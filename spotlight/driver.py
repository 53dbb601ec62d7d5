"""Drives a run on a cluster, in one thread: sends graphs to the scheduler, and journals what happened there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from spotlight.clock import wall_clock
from spotlight.config import Config
from spotlight.records import SpotlightError, Stopped
from spotlight.report.feed import Feed
from spotlight.report.tracking import Ended, Tracking
from spotlight.store import resuming
from spotlight.store.accounts import Accounts
from spotlight.store.leftovers import remove_half_written
from spotlight.store.rows import DECISIONS, HISTORY, SUMMARY, Summary
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from distributed import Client, Future

    from cluster.start.existing import ExistingCluster
    from cluster.start.run_cluster import RunCluster
    from graphs.layers import Graph
    from spotlight.plan.balance import Balance
    from spotlight.store.lease import Lease

logger = logging.getLogger(__name__)

STOP_GRACE_S = 60.0
"""How long a stop waits for the steps in flight; a step of a large model can last many seconds."""
POLL_S = 0.25
SHOW_S = 1.0
"""Least time between two messages to the live page."""


class Driver:
    """Runs a run's iterations; as a `graphs.loop.Watch`, it tells the loop what was measured.

    Args:
        lease: the run's, which this process holds.
        stop: set when the run is to end after the steps in flight.
        began_s: when the run was started, this time.
    """

    def __init__(self, run: RunDir, accounts: Accounts, lease: Lease, stop: threading.Event, *, began_s: float) -> None:
        self._run, self._accounts, self._lease, self._stop, self._began_s = run, accounts, lease, stop, began_s
        self.pools: RunCluster | None = None
        self.phase = self.dashboard = ""
        self.waiting_for: tuple[str, ...] = ()
        self.refused: Mapping[str, str] = {}
        self._feed: Feed | None = None
        self._tracking: Tracking | None = None
        self._shown_s = 0.0

    def go(self, cluster: ExistingCluster | None) -> None:
        """Run all iterations that the directory does not hold yet, on this cluster, or on one of its own."""
        run, config = self._run, self._run.config()
        if removed := remove_half_written(run.path):
            logger.warning("removed what a killed process had begun to write: %s", ", ".join(map(str, removed)))
        self._rewind()
        if not resuming.is_over(run, config):
            self._iterate(config, cluster)
        if config.run.report:
            self.phase = "report"
            from spotlight.report import write_report  # draws: workers should not wait for its imports at the start

            write_report(run.url)

    def _iterate(self, config: Config, cluster: ExistingCluster | None) -> None:
        from cluster.start.run_cluster import RunCluster
        from graphs.loop import Loop

        run, done = self._run, len(self._run.history())
        self._accounts.settle()
        if cluster is not None:
            from cluster.start.existing import where

            self._lease.names(where(cluster)[0], "", is_ours=False)  # to who stops the run before it is connected
        self.pools = RunCluster(config, run.url, cluster)
        ended: Ended = "failed"
        try:
            self.dashboard = self.pools.dashboard
            address, is_ours = self.pools.client.scheduler.address, self.pools.cluster is not None
            self._lease.names(address, self.dashboard, is_ours=is_ours)
            self._feed, self._tracking = Feed(run, config), Tracking(run, config)
            Loop(run, self._compute, self, session=self.pools.session).go()
            ended = "finished"
        except Stopped:
            ended = "stopped"
            raise
        finally:
            self._close(ended)
        if len(run.history()) > done or run.summary() is None:
            summarise(run, self._accounts, now_s=wall_clock(), began_s=self._began_s)

    def _rewind(self) -> None:
        """Remove the last iterations from the history if their weights were deleted as damaged: they are done again.

        The summary, of a finished run, is deleted first.
        """
        run = self._run
        done = resuming.rows_that_stay(run)
        if len(done) != len(run.history()):
            run.objects.delete(SUMMARY)
            run.rewrite(HISTORY, run.rows(HISTORY)[: len(done)])

    def _close(self, ended: Ended) -> None:
        assert self.pools
        try:
            self._shown_s = 0.0  # the live page gets the last rows, however soon they come
            with contextlib.suppress(SpotlightError):  # it ended the run, and is raised there
                self._follow()
            self._lease.check()
            self._accounts.close(wall_clock())
        finally:
            self.pools.close()
            self.pools = None
            if self._tracking:
                self._tracking.close(ended)
            self._lease.check()  # if another driver has the run, its workers write these files
            remove_half_written(self._run.path)  # by workers that were killed at it

    def _compute(self, graph: Graph) -> Mapping[str, Any]:
        """Run a graph on the cluster, unless the run is stopped first."""
        assert self.pools
        packed = self.pools.client.get(graph.graph, list(graph.outputs.values()), sync=False)
        futures = _flatten(packed)
        try:
            while any(future.status in ("pending", "lost") for future in futures):  # Dask computes lost results again
                _wait(self.pools.client, futures)
                if any(future.status == "cancelled" for future in futures):
                    break
                self._follow()
                failed = next((future for future in futures if future.status == "error"), None)
                if failed is not None:
                    failed.result()
                if self._stop.is_set():
                    self._end_steps()
            if any(future.status == "cancelled" for future in futures):
                raise SpotlightError(
                    "the cluster lost the run's tasks: its scheduler ended, or was restarted, or `run.client` was "
                    f"closed; what was committed is kept: `{self._run.resume_command}` goes on, with --cluster, there "
                    "or elsewhere"
                )
            return dict(zip(graph.outputs, self.pools.client.gather(packed), strict=True))
        finally:
            for future in futures:
                future.release()

    def _end_steps(self) -> None:
        assert self.pools
        self.pools.stop()
        deadline_s = wall_clock() + STOP_GRACE_S
        while self.pools.status()["running"] and wall_clock() < deadline_s:
            time.sleep(POLL_S / 5)
        raise Stopped

    def _follow(self) -> None:
        """Record what the cluster did since the last call."""
        assert self.pools
        self._lease.check()
        drained = self.pools.drain()  # sent only once: it is kept before anything else can fail
        self._accounts.take(drained)
        if drained.decisions:
            self._run.append(DECISIONS, *drained.decisions)
        for event in drained.events:
            if said := _worth_saying(event):
                logger.warning("%s", said)
        status = self.pools.status()
        self._accounts.running = status["running"]
        self.waiting_for, self.refused = tuple(status["waiting_for"]), status["refused"]
        if status["hopeless"]:
            raise SpotlightError(status["hopeless"])
        self._run.push()
        self._show()

    def _show(self) -> None:
        """Send what is new to the live page, at most every `SHOW_S`."""
        now_s = wall_clock()
        if self._feed is None or now_s < self._shown_s + SHOW_S:
            return
        assert self.pools
        self._shown_s = now_s
        self.pools.show(self._feed.rows(self._accounts.money(now_s)))
        if self._tracking:
            self._tracking.follow()

    # Watch

    def begin(self, phase: str, iteration: int) -> None:
        self.phase = f"{phase} {iteration}"

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        self._follow()
        return self._accounts.measure(start_s, stop_s)

    def usd(self) -> float:
        self._follow()
        return sum(self._accounts.usd_by_pool(wall_clock()).values())

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        self._follow()
        return self._accounts.balance(iteration, began_s, window_s)


def summarise(run: RunDir, accounts: Accounts, *, now_s: float, began_s: float) -> None:
    """Write the run's summary.

    Args:
        began_s: when this session began; earlier ones count for the time in which they had workers.
    """
    validation, ledger = run.validation(), accounts.ledger(now_s)
    run.write_summary(
        Summary(
            score_before=validation[0].score,
            score_after=validation[-1].score,
            iterations=len(run.history()),
            wall_s=accounts.worked_s(began_s) + now_s - began_s,
            usd=ledger.usd(),
            usd_wasted=ledger.usd_wasted,
            usd_reserved_only=ledger.usd_reserved_only,
            preemptions=accounts.preemptions(),
            first_image_s=accounts.first_image_s(began_s),
        )
    )


def _worth_saying(event: Mapping[str, Any]) -> str:
    """A message about an event that a person should know of at once; else empty."""
    match event["event"]:
        case "paused":
            return f"{event['lost_s']:.0f} s were lost: the run was paused, or its machine slept; it goes on"
        case "waits" | "continued" | "limited":
            return str(event["what"])
        case _:
            return ""


def _flatten(packed: Any) -> list[Future[Any]]:
    return [future for part in packed for future in _flatten(part)] if isinstance(packed, list) else [packed]


def _wait(client: Client, futures: Sequence[Future[Any]]) -> None:
    """Wait until all are done, or `POLL_S`; the client is not Dask's default one, which may be the notebook's own."""
    from distributed import wait

    with client.as_current(), contextlib.suppress(TimeoutError, CancelledError):
        wait(futures, timeout=POLL_S)
