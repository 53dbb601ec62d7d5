"""A run without GPUs: the iterations of a scenario, one after the other, on simulated machines and a spot trace.

Pure: no torch, no Dask, no clock; the same scenario always gives the same result. What is decided is decided by the
functions that decide in a live run: `placement.plan`, `bandit.allocate` and `max_variance_subset`, `offload`; what it
costs by `costs`. How long work takes is `timings`', what a run learns from it is `learning`'s: both are models.

Invariant: the seconds of a strategy's ledger are those that its workers were alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotlight import learning
from spotlight.fleet import pool_prices, spot_switches
from spotlight.market.ledger import SECONDS_PER_H, Ledger, Price, ledger, spot_utilisation
from spotlight.market.traces import Switches
from spotlight.records import Interval, Span, WorkerLife
from spotlight.scenario import Scenario, Strategy, load
from spotlight.simulated import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one strategy did."""

    strategy: Strategy
    iterations: int
    wall_s: float
    score: float
    """Of the last weights, by the model of learning."""
    target_s: float | None
    """When the target was reached; None where it was not."""
    usd: float
    preemptions: int
    """Spot GPUs lost."""
    steps_lost: int
    """Denoising steps computed and not kept."""
    spot_utilisation: float
    seeds_explored: float
    """Per prompt and iteration."""
    captured: float
    """Mean reward variance of the kept seeds, in units of what unexplored seeds have."""
    spot_worth_renting: int
    """Spot GPUs that the last iteration's rollout could use, exploration aside (`offload.spot_worth_renting`)."""
    ledger: Ledger
    spans: tuple[Span, ...]
    lives: tuple[WorkerLife, ...]
    windows: tuple[Interval, ...]
    """When each iteration began and ended."""

    @property
    def usd_per_h(self) -> float:
        return self.usd / (self.wall_s / SECONDS_PER_H)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The strategies of a scenario side by side."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]
    model: str = learning.MODEL
    """What of this is not simulated but modelled."""


def simulate_file(path: str | Path, overrides: Sequence[str] = ()) -> Result:
    """Simulate the scenario in a TOML file, with some of its values overridden (`scenario.load`).

    Raises:
        SpotlightError: the scenario or a file that it names is not usable, or a strategy cannot go on.
    """
    return simulate(load(path, overrides))


def simulate(scenario: Scenario) -> Result:
    """Run every strategy of a scenario on the same trace, with the same seeds.

    Raises:
        SpotlightError: a file is not usable; or a strategy cannot go on: it has only spot GPUs, gone for good.
    """
    switches, prices = spot_switches(scenario), pool_prices(scenario)
    outcomes = [_outcome(scenario, strategy, switches, prices) for strategy in scenario.strategies]
    return Result(scenario=scenario, outcomes=tuple(outcomes))


def _outcome(
    scenario: Scenario, strategy: Strategy, switches: Sequence[Switches], prices: Mapping[str, Price]
) -> Outcome:
    run = Run(scenario, strategy, switches)
    run.go()
    machines, job = run.machines, scenario.job
    spans, lives = tuple(machines.spans), tuple(machines.lives())
    window = (0.0, machines.now_s)
    book = ledger(
        spans,
        lives,
        prices,
        window,
        iterations=run.k,
        samples=run.k * job.prompts * job.seeds_kept,
        scores=(scenario.learning.start, run.score),
    )
    return Outcome(
        strategy=strategy,
        iterations=run.k,
        wall_s=machines.now_s,
        score=run.score,
        target_s=run.target_s,
        usd=book.usd(),
        preemptions=machines.preemptions,
        steps_lost=machines.steps_lost,
        spot_utilisation=spot_utilisation(spans, lives, window),
        seeds_explored=run.explored / (max(1, run.k) * job.prompts),
        captured=run.captured_sum / max(1, run.k),
        spot_worth_renting=run.worth,
        ledger=book,
        spans=spans,
        lives=lives,
        windows=tuple(run.windows),
    )
