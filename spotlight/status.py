"""Where a run is, as a value: what `Run.status` says, and `spotlight status` and notebooks show."""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.records import record

HINT_AFTER_S = 20.0
"""A worker that was just started is not ready yet; one that is not there by then may never come by itself."""


@record
class Status:
    """Where a run is, now."""

    state: str
    """"new", "starting", "running", "finished", "stopped" or "failed"; of a run that this process did not start, as its
    directory has it, where a killed one is "stopped", and one that waits in a queue "new"."""
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
    """What the same useful seconds cost at reserved prices, as if none idled."""
    usd_per_iteration: float | None
    usd_per_sample: float | None
    """Dollars for each sample that was kept."""
    usd_per_point: float | None
    """Dollars for each hundredth of the validation score; None where it has not risen."""
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
    """Since it was started here, until its end; of a run that this process does not run, how long it had workers."""
    dashboard: str
    """Dask's, as the run's driver reaches it; empty where nobody runs it."""
    run_dir: str
    emulated_per_real_s: float
    """Of a run that emulates GPUs, by which its seconds and dollars are to be multiplied; 1 of any other."""
    emulated: str
    """What is not real about its seconds and dollars, in words; empty where all of it is."""
    error: str
    """Why it failed, or that its driver was killed; empty where neither is so."""

    @property
    def live_page(self) -> str:
        """Our page on Dask's dashboard; empty where nobody runs it."""
        return f"{self.dashboard.removesuffix('/status')}/spotlight" if self.dashboard else ""
