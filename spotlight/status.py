"""The state of a run, as a value: what `Run.status` returns, and `spotlight status` and notebooks show."""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.records import record

HINT_AFTER_S = 20.0
"""A worker that was just started is not ready yet; one that is not there by then may never come by itself."""
ON_ONE_NODE = " on one node"
"""Ends what a run waits for whose gangs fit on no node."""


@record
class Status:
    """The state of a run now."""

    state: str
    """"new", "starting", "running", "finished", "stopped" or "failed"; if another process runs it, as its directory
    says: there a killed run is "stopped", and one that waits in a queue is "new"."""
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
    """Worker seconds that bought nothing, by kind (`ledger.Kind`); this and the next five: as of the last iteration."""
    usd_wasted: float
    """Dollars for idle time, start-up, lost and repeated work, and exploration that was called off."""
    usd_reserved_only: float
    """What the same useful seconds cost at reserved prices, as if none idled."""
    usd_per_iteration: float | None
    usd_per_sample: float | None
    """Dollars for each sample that was kept."""
    usd_per_point: float | None
    """Dollars for each hundredth of the validation score; None where it has not risen."""
    preemptions: int
    workers: Mapping[str, int]
    """Workers alive, by pool."""
    running: Mapping[str, int]
    """Tasks in progress, by phase."""
    window_s: float | None
    """Longest time that reserved workers rolled out before they trained, in the last iteration; None: no limit."""
    train_wait_s: float | None
    """How long training then waited for samples of spot workers."""
    spot_worth_renting: int | None
    """Number of spot workers beyond which there would have been no rollout for another, in the last iteration."""
    waiting_for: tuple[str, ...]
    """What the run waits for: pools without a worker, the driver's own worker, or a node with enough of them."""
    refused: Mapping[str, str]
    """{worker: why it takes no part in the run}"""
    elapsed_s: float
    """Seconds since it was started here, until its end; if another process runs it, how long it had workers."""
    dashboard: str
    """Address of Dask's dashboard, as the run's driver reaches it; empty if nobody runs it."""
    run_dir: str
    emulated_per_real_s: float
    """Factor by which seconds and dollars of a run that emulates GPUs are to be multiplied; 1 for other runs."""
    emulated: str
    """What is not real about its seconds and dollars, in words; empty if all is real."""
    error: str
    """Why it failed, or that its driver was killed; else empty."""

    @property
    def live_page(self) -> str:
        """Address of our page on Dask's dashboard; empty if nobody runs it."""
        return f"{self.dashboard.removesuffix('/status')}/spotlight" if self.dashboard else ""
