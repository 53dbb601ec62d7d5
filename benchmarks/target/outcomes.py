"""Results of runs: when each reached a score, and how many times sooner or cheaper one strategy is than another."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations_with_replacement, product
from math import factorial, inf, isinf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.target.cases import (
    Case,
    Row,
    first_case,
    tried,
    tuning_target,
)

UNITS = {"seconds": 60.0, "usd": 1.0}
IN_A_ROW = 2
"""Consecutive validations that must reach a target, since a single one may by luck."""
SEEDS_MAX = 8
"""Most seeds of which all draws are looked at: 6,435 different ones. Ten have 92,378."""
DRAWS = 4000
"""Of more seeds, so many draws."""


class Data(tuple[Row, ...]):
    """The raw data, whose runs are found by strategy and cell without looking at all of them."""

    @cached_property
    def by_strategy(self) -> Mapping[tuple[str, ...], Sequence[Row]]:
        """{(job, regime, size, strategy): its runs}"""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self:
            found.setdefault((row["job"], row["regime"], row["size"], row["strategy"]), []).append(row)
        return found


def reached(row: Row, target: float) -> float:
    """The first version of `IN_A_ROW` that are at the target; infinite if there are none."""
    found = curve(row)
    at_target = 0
    for at, (_, score) in enumerate(found):
        at_target = at_target + 1 if score >= target else 0
        if at_target == IN_A_ROW:
            return float(found[at - IN_A_ROW + 1][0])
    return inf


def is_at(scores: Sequence[float], target: float) -> bool:
    """Whether the last `IN_A_ROW` validations of a run are at the target."""
    return len(scores) >= IN_A_ROW and min(scores[-IN_A_ROW:]) >= target


def until(row: Row, target: float, field: str) -> float:
    """Seconds or dollars until a run reached the target; infinite if it did not."""
    version = reached(row, target)
    return inf if isinf(version) else row[field][int(version)]


def chosen(rows: Sequence[Row], case: Case, tuning: Sequence[int], count: int, *, last: bool = False) -> int | None:
    """The trial whose tuning runs came soonest to their target, by the median, then highest; None before all are made.

    A single trial is not chosen, and needs no tuning runs.
    """
    trials = tried(case.strategy, count)
    if len(trials) == 1:
        return trials[0]
    target = tuning_target(case.job, last=last)
    ranks = []
    for trial in trials:
        mine = [row for row in _of(rows, case) if row["trial"] == trial and row["seed"] in tuning]
        if len(mine) < len(tuning):
            return None
        times = [until(row, target, "seconds") for row in mine]
        ranks.append((statistics.median(times), -statistics.fmean(curve(row)[-1][1] for row in mine), trial))
    return min(ranks)[-1]


def _of(rows: Sequence[Row], case: Case) -> Sequence[Row]:
    """The runs of a strategy in one cell."""
    data = rows if isinstance(rows, Data) else Data(rows)
    return data.by_strategy.get((case.job, case.regime, case.size, case.strategy), ())


def curve(row: Row) -> list[tuple[int, float]]:
    return sorted((int(version), score) for version, score in row["scores"].items())


def interval(theirs: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float, float, float]:
    """Theirs over ours: the ratio of medians over the seeds that both ran, and its 95 % interval.

    By paired bootstrap over seeds; a run that did not reach the target took longer than any that did. A draw of seeds
    in which neither median reached it counts as 1.
    """
    return _interval(tuple((theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())))


@cache  # several tables say the same
def _interval(pairs: tuple[tuple[float, float], ...]) -> tuple[float, float, float]:
    pairs_S2 = np.array(pairs)
    drawn_DS, counts_D = _draws(len(pairs))
    with np.errstate(invalid="ignore"):
        theirs_D, ours_D = (_medians(values_S, drawn_DS) for values_S in pairs_S2.T)
        ratios_D = np.nan_to_num(theirs_D / ours_D, nan=1.0, posinf=inf)
        whole = np.median(pairs_S2, axis=0)
        low, high = np.quantile(ratios_D, (0.025, 0.975), method="inverted_cdf", weights=counts_D)
        return float(whole[0] / whole[1]), float(low), float(high)


def _medians(values_S: NDArray[np.float64], drawn_DS: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median of each draw, (D,), given how many times it has each value; no draw is sorted."""
    order, seeds = np.argsort(values_S), len(values_S)
    ranks_DS = np.cumsum(drawn_DS[:, order], axis=1)
    low_D, high_D = (
        values_S[order][np.argmax(ranks_DS >= rank, axis=1)] for rank in ((seeds + 1) // 2, seeds // 2 + 1)
    )
    medians_D: NDArray[np.float64] = (low_D + high_D) / 2
    return medians_D


@cache
def _draws(seeds: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As many seeds drawn with replacement: how many times a draw has each, (D, S), and how often it comes, (D,).

    Chance has no part in it: all draws that differ in more than their order; of many seeds, some that were drawn once
    and for all.
    """
    if seeds > SEEDS_MAX:
        drawn = np.random.Generator(np.random.Philox(0)).integers(seeds, size=(DRAWS, seeds))
        return np.stack([(drawn == seed).sum(axis=1) for seed in range(seeds)], axis=1), np.ones(DRAWS)
    every = [Counter(draw) for draw in combinations_with_replacement(range(seeds), seeds)]
    orders = [factorial(seeds) / prod(map(factorial, draw.values())) for draw in every]
    return np.array([[draw[seed] for seed in range(seeds)] for draw in every]), np.array(orders)


def ratio(found: tuple[float, float, float], digits: int = 1) -> str:
    """A ratio as text: without a number if half of the runs of either side did not reach the target; an end of the
    interval for which that holds is a dash."""
    if not 0 < found[0] < inf:  # not a number, if it holds of both sides
        return "not there"
    low, high = ("–" if end in (0.0, inf) else f"{end:.{digits}f}" for end in found[1:])
    return f"{found[0]:.{digits}f} [{low}, {high}]"


def gain(theirs: Mapping[int, Row], mine: Mapping[int, Row], target: float, field: str) -> str:
    """Theirs over mine as text, with its interval; 1 for the baseline itself, a dash for what was not run."""
    if mine is theirs:
        return "1"
    if not theirs.keys() & mine.keys():
        return "–"
    return ratio(interval(times_until(theirs, target, field), times_until(mine, target, field)))


def iterations_of(runs: Mapping[int, Row], target: float) -> str:
    """Iterations that each seed needed."""
    versions = [reached(runs[seed], target) for seed in sorted(runs)]
    return ", ".join("–" if isinf(version) else f"{version:g}" for version in versions)


def cells_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    return product(arguments.jobs, arguments.regimes, arguments.sizes)


def fresh(
    rows: Sequence[Row], job: str, regime: str, size: str, name: str, arguments: argparse.Namespace
) -> dict[int, Row]:
    case = first_case(job, regime, size, name)
    return _runs(rows, case, shown(rows, case, arguments) or 0, arguments)


def _runs(rows: Sequence[Row], case: Case, trial: int, arguments: argparse.Namespace) -> dict[int, Row]:
    """{fresh seed: its run with a recipe}; empty before all seeds that are asked for were run."""
    mine = (row for row in _of(rows, case) if row["seed"] not in arguments.tuning_seeds)
    found = {row["seed"]: row for row in mine if row["trial"] == trial}
    return found if found.keys() >= set(arguments.seeds) else {}


def shown(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    """The best recipe, once all fresh seeds were run with it; None: the tables show the base one, untuned."""
    trial = best(rows, case, arguments)
    return trial if trial is not None and _runs(rows, case, trial, arguments) else None


def best(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    return chosen(rows, case, arguments.tuning_seeds, arguments.trials, last=arguments.to_last)


def untuned(
    rows: Sequence[Row], cell: tuple[str, str, str], name: str, arguments: argparse.Namespace
) -> dict[int, Row]:
    """Fresh runs with the base recipe."""
    return _runs(rows, first_case(*cell, name), 0, arguments)


class Compared(NamedTuple):
    """Fresh runs of two strategies, with recipes that are fair to compare."""

    theirs: dict[int, Row]
    mine: dict[int, Row]
    is_tuned: bool
    """Each has its own best recipe. Else both have the base one, as far as both were run with it."""


def compared(
    rows: Sequence[Row], cell: tuple[str, str, str], other: str, name: str, arguments: argparse.Namespace
) -> Compared:
    """Runs of a strategy, and of the one that it is beside, in one cell."""
    cases = [first_case(*cell, each) for each in (other, name)]
    own = [shown(rows, case, arguments) for case in cases]
    theirs, mine = (untuned(rows, cell, each, arguments) for each in (other, name))
    if None not in own or not (theirs and mine):
        theirs, mine = (_runs(rows, case, trial or 0, arguments) for case, trial in zip(cases, own, strict=True))
    return Compared(theirs, mine, is_tuned=None not in own)


def times_until(runs: Mapping[int, Row], target: float, field: str) -> dict[int, float]:
    return {seed: until(row, target, field) for seed, row in runs.items()}
