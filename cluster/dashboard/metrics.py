"""Exports the page's figures in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.dashboard.facts import Facts, Row
from cluster.dashboard.text import Counts
from spotlight.market.ledger import AT_RESERVED_PRICES

Sample = tuple[Mapping[str, str], float]

OF_ITERATIONS = {
    "reward_mean": "Mean reward of the samples of the last iteration",
    "explored_reward_mean": "Mean reward of all seeds that were explored for it",
    "rank_correlation": "Spearman, explored against regenerated rewards, in the last iteration",
    "fidelity": "Share of a difference in explored reward that is there again after regeneration",
    "variance_kept": "Mean reward variance of the kept groups",
    "variance_equal": "The same, had all prompts had equal shares of the candidates (imagined)",
    "seeds_scored": "Candidate seeds scored for the last iteration",
    "spot_utilisation": "Busy share of the seconds of spot workers in the last iteration",
}


def exposition(facts: Facts) -> str:
    """All figures, without those not known yet; empty if there is no live run.

    Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
    """
    run = {"run": str(facts.latest("run").get("name", ""))}
    if not run["run"] and not facts.lives():
        return ""
    lines: list[str] = []
    for name, kind, said, samples in (*_of_scheduler(facts), *_of_driver(facts)):
        lines += [f"# HELP spotlight_{name} {said}", f"# TYPE spotlight_{name} {kind}"]
        lines += [f"spotlight_{name}{_labels(run | dict(labels))} {value!r}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


Family = tuple[str, str, str, list[Sample]]


def _of_scheduler(facts: Facts) -> Iterator[Family]:
    counts, found = Counts(facts), facts.recoveries()
    yield "workers", "gauge", "Workers alive", [({"pool": pool}, float(n)) for pool, n in counts.alive.items()]
    running: list[Sample] = [({"phase": phase}, float(n)) for phase, n in counts.running.items()]
    yield "workers_busy", "gauge", "Workers at work, by phase", running
    yield "preemptions_total", "counter", "Spot workers taken away", [({}, float(counts.preemptions))]
    yield (
        "pools_missing",
        "gauge",
        "Pools that requests wait for and that have no worker",
        [({}, float(len(counts.waiting_for)))],
    )
    times = [recovery.work_s for recovery in found if recovery.work_s is not None]
    yield (
        "recovery_seconds",
        "gauge",
        "From the latest loss that struck work to the next step of that work",
        [({}, float(times[-1]))] if times else [],
    )
    yield "usd_per_hour", "gauge", "Price of all workers alive", [({}, float(facts.usd_per_h()))]


def _of_driver(facts: Facts) -> Iterator[Family]:
    iteration: Row = facts.latest("iteration")
    done = float(iteration["id"] + 1) if iteration else 0.0
    yield "iterations_done", "gauge", "Iterations finished", [({}, done)]
    if facts.latest("run"):
        yield (
            "iterations_wanted",
            "gauge",
            "Iterations that the run is to have",
            [({}, float(facts.latest("run")["iterations"]))],
        )
    for name, said in OF_ITERATIONS.items():
        if name in iteration:
            yield name, "gauge", said, [({}, float(iteration[name]))]
    if score := facts.latest("validation"):
        yield (
            "validation_score",
            "gauge",
            "Of the latest weights version that was validated",
            [({}, float(score["score"]))],
        )
    if facts.money:
        money = facts.money[-1]
        yield "usd_total", "counter", "Dollars spent", [({"pool": pool}, float(usd)) for pool, usd in money.usd.items()]
        only = float(money.usd_reserved_only)  # 0 until an iteration has ended
        said = f"Dollars: {AT_RESERVED_PRICES}, up to the last iteration's end"
        yield "usd_reserved_only", "gauge", said, [({}, only)]


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
