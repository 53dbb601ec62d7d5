"""The figure of `benchmarks.time_to_target`: scores over time, and minutes against dollars."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from math import isinf
from typing import TYPE_CHECKING

from benchmarks.target.cases import (
    AS_DRAWN,
    CHOSEN_ON_MANY,
    FOUR_EXPLORED,
    OURS,
    RESERVED_ONLY,
    SOONEST,
    STRATEGIES,
    TARGETS,
    Row,
)
from benchmarks.target.outcomes import (
    UNITS,
    curve,
    fresh,
    times_until,
)
from spotlight.report.palette import AXIS, FAINT, LOST, PHASE_COLOURS, POOL_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {
    "reserved only (4)": POOL_COLOURS["reserved"],
    "all reserved (12)": FAINT,
    "all reserved (48)": AXIS,
    "no exploration, gradients on spot (1 + 47)": POOL_COLOURS["spot"],
    OURS: PHASE_COLOURS["explore"],
    SOONEST: LOST,
}
"""Strategies whose runs are drawn as lines, with their colours."""
NUMBERED = {
    *(*CURVES, AS_DRAWN, CHOSEN_ON_MANY, FOUR_EXPLORED, f"{RESERVED_ONLY}, blocking exploration"),
    *("reserved + spot, no exploration", "restart on preemption", "Spotlight"),
}
"""Strategies that are numbered where minutes are against dollars, beside those that no other beats in some cell."""


def draw(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """A row of panels for each job and regime: score against time, and minutes against dollars to the last target."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = [(*cell, "512") for cell in product(arguments.jobs, arguments.regimes)]
    shown = [cell for cell in cells if any(fresh(rows, *cell, name, arguments) for name in STRATEGIES)] or cells[:1]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.6 * len(shown) + 2.4), layout="constrained")
        panels = figure.subplots(len(shown), 2, squeeze=False)
        found = {
            cell: {name: runs for name in STRATEGIES if (runs := fresh(rows, *cell, name, arguments))} for cell in shown
        }
        best = {name for cell in shown for name in unbeaten(_medians(found[cell], TARGETS[cell[0]][-1]))}
        names = [name for name in STRATEGIES if name in NUMBERED or name in best]
        for cell, (left, right) in zip(shown, panels, strict=True):
            _draw_curves(left, {name: found[cell][name] for name in CURVES if name in found[cell]}, cell)
            _draw_costs(right, found[cell], TARGETS[cell[0]][-1], names)
        marks = {
            name: mark for panel in panels[:, 1] for mark, name in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        told = [name for name in names if name in marks]
        figure.legend(
            [marks[name] for name in told],
            told,
            frameon=False,
            loc="outside lower center",
            ncols=2,
            title="median (lines: runs that got there; dashed: nobody is sooner and cheaper; dots: all others)",
        )
        figure.suptitle("Virtual clock: Qwen-Image at 512 px on H100s; learning is the embedded model's", fontsize=10)
        figure.savefig(arguments.figure, dpi=130)


def _colour(name: str) -> str:
    """A strategy's colour: its line's or, without a line, its kind's: reserved GPUs alone, with spot ones, or
    exploration."""
    alone = RESERVED_ONLY in name or name.startswith("all reserved")
    kind = POOL_COLOURS["reserved" if alone else "spot"]
    return CURVES.get(name, PHASE_COLOURS["explore"] if name.startswith("Spotlight") else kind)


def _draw_curves(axis: Axes, found: Mapping[str, Mapping[int, Row]], cell: tuple[str, str, str]) -> None:
    """A line for each run."""
    job, regime, _ = cell
    for name, runs in found.items():
        for row in runs.values():
            points = [(row["seconds"][version] / UNITS["seconds"], score) for version, score in curve(row)]
            axis.plot(*zip(*points, strict=True), color=_colour(name), lw=1)
        axis.plot([], [], color=_colour(name), label=name)
    for target in TARGETS[job]:
        axis.axhline(target, color=AXIS, lw=0.6, ls="--")
    axis.set(xlim=(0, None), xlabel="minutes, emulated", ylabel=f"validation score, {job}, {regime}")
    axis.legend(frameon=False, loc="lower right")


def _draw_costs(axis: Axes, found: Mapping[str, Mapping[int, Row]], target: float, names: Sequence[str]) -> None:
    """The strategies' numbers, the same in all panels, at their medians, with lines over the runs that got there; dots
    for all others. A dashed line joins those that no other beats in both.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    medians = _medians(found, target)
    for name, (minutes, dollars) in medians.items():
        if name not in names:
            axis.plot(minutes, dollars, ls="", marker="o", ms=3, mec="none", alpha=0.5, color=_colour(name))
            continue
        each = _by_seed(found[name], target)
        there = [[value for value in values if not isinf(value)] for values in each]
        reach = [
            [[middle - min(values)], [max(values) - middle]]
            for values, middle in zip(there, (minutes, dollars), strict=True)
        ]
        number = names.index(name) + 1
        axis.errorbar(minutes, dollars, xerr=reach[0], yerr=reach[1], color=_colour(name), lw=0.8, alpha=0.4)
        axis.plot(minutes, dollars, ls="", marker=f"${number}$", ms=10, color=_colour(name), label=name)
    if front := sorted(medians[name] for name in unbeaten(medians)):
        axis.plot(*zip(*front, strict=True), ls="--", lw=0.8, color=AXIS)
    axis.set(xscale="log", yscale="log", xlabel=f"minutes to {target}, emulated", ylabel=f"US dollars to {target}")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_locator(NullLocator())


def _by_seed(runs: Mapping[int, Row], target: float) -> list[list[float]]:
    """Minutes, and dollars, of each run to the target."""
    return [[value / unit for value in times_until(runs, target, field).values()] for field, unit in UNITS.items()]


def _medians(found: Mapping[str, Mapping[int, Row]], target: float) -> dict[str, tuple[float, float]]:
    """Minutes and dollars to the target of the strategies most of whose runs reached it."""
    each = {name: _by_seed(runs, target) for name, runs in found.items()}
    medians = {
        name: (statistics.median(minutes), statistics.median(dollars)) for name, (minutes, dollars) in each.items()
    }
    return {name: middle for name, middle in medians.items() if not isinf(middle[0])}


def unbeaten(medians: Mapping[str, tuple[float, float]]) -> list[str]:
    """Strategies that no other beats in both minutes and dollars."""
    return [
        name
        for name, (minutes, dollars) in medians.items()
        if not any(sooner < minutes and cheaper < dollars for sooner, cheaper in medians.values())
    ]
