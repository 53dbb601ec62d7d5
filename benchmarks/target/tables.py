"""All results of `benchmarks.time_to_target`, as tables in Markdown."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import isinf

from benchmarks.target.cases import (
    AS_DRAWN,
    DRAWN_ON_MANY,
    EIGHT_DRAWN,
    FOUR_EXPLORED,
    FOUR_ON_MANY,
    ON_ALL_TWELVE,
    ON_FOUR_RESERVED,
    ON_MANY,
    OURS,
    RESERVED_ONLY,
    SETTINGS,
    SOONEST,
    STRATEGIES,
    TARGETS,
    WITHOUT,
    Case,
    Row,
    first_case,
    told,
)
from benchmarks.target.outcomes import (
    UNITS,
    Compared,
    cells_of,
    compared,
    fresh,
    gain,
    interval,
    iterations_of,
    ratio,
    reached,
    shown,
    times_until,
    untuned,
)
from benchmarks.target.prices import LISTS, at_prices
from spotlight import config

BESIDE = (SOONEST, "no exploration, gradients on spot (1 + 47)")
"""Baselines of a cell on the page: the first of these that was run there."""
EXPLORED = {
    FOUR_EXPLORED: [*(name for name in ON_FOUR_RESERVED if name not in (FOUR_EXPLORED, AS_DRAWN)), *ON_ALL_TWELVE],
    AS_DRAWN: [*(name for name in ON_FOUR_RESERVED if name != AS_DRAWN), *ON_ALL_TWELVE],
    FOUR_ON_MANY: [name for name in ON_MANY if name != FOUR_ON_MANY],
    DRAWN_ON_MANY: ON_MANY,
    EIGHT_DRAWN: [
        *("reserved + spot, no exploration", "six steps (4 + 8), only reserved GPUs train", "Spotlight"),
        *("no exploration, gradients on spot", "six steps, gradients on spot (4 + 8)"),
        "filtered, six steps, gradients on spot (4 + 8)",
    ],
}
"""{strategy that explores few samples of a prompt: its baselines}"""
BRIEF = ("strategy", "min", "times [95 %]", "dollars", "times [95 %]", "iterations, by seed", "recipe")
PAGE = """# Time and dollars to a score, by strategy

Made from the raw data by `python -m benchmarks.time_to_target --table`; do not edit this page. What was run, and what
follows from it, is in [time and dollars](results/time_and_dollars.md#time-and-dollars-to-a-score).

Minutes and dollars are medians over seeds; a run that did not get there (–) took longer than any that did. They count
up to the first of two validations in a row at the target, without start-up and without validations. Times: the ratio to
the row that has 1, with its 95 % interval by paired bootstrap over seeds. In brackets: reserved + spot GPUs. Seconds
are a cost model's; at what an H100 took, [iterations last 0.8 to 1.4 times as long](results/gpu.md#on-a-gpu).
"""
GLANCE = """## At a glance

How many times sooner, and how many times cheaper, than *reserved only (4)* in the same column, to the last target of
each job, with the 95 % interval. Each has its own best recipe. In italics: one of the two was not tuned, so both have
the base recipe; if the tuned one was not run with it, it keeps its own. –: not run. Not there: half of the runs of one
of the two did not get there; an end of an interval that is a dash is not known, since the same is so in too many draws
of seeds.
"""
OLD = "†"
OLDER = f"""
{OLD}: some of these runs are older than the settings that their strategy has now, or do not say with which they were
made; those that do not say are from before gradients were added in slices.
"""
"""Stands below the tables that have the mark."""
GAINS = """### What exploration and early rollouts gain

The same, beside the same GPUs without them: above 1 is a gain. Of so many comparisons a few intervals leave 1 out by
chance. What explores nothing learns once for all clusters and sizes, so its rows and columns are not independent. Half
trained: beside the same GPUs that train on all samples. Six steps: beside the same GPUs in sixteen. Four of a prompt:
beside the same GPUs that sample and train on eight, and explore nothing.
"""
PAPERS = """### Does exploration pay where only reserved GPUs train, and training is heavy?

The paper's GPUs, four reserved and eight spot ones, but more training: without exploration spot GPUs would idle for 74
% of an iteration, where the paper has 47 %. All have the base recipe but for how many prompts and samples of each an
iteration rolls out, and how many samples it trains on. Iterations are those to the last target, seconds the mean of a
run's. *Sooner*, *cheaper*: than the first line. *Chosen samples*: how many times sooner than this line Spotlight is
with four explored samples of a prompt.
"""
PAPERS_COLUMNS = (
    *("strategy", "prompts x samples", "trained on", "candidates a prompt", "iterations, by seed", "s an iteration"),
    *("times sooner", "times cheaper", "chosen samples, times sooner"),
)
BESIDE_ALL = """### What explores, beside all that the same GPUs may do instead

How many times sooner, to the last target. Recipes as above.
"""
PRICES = """## The same at other prices

Dollars by three lists of what an H100 costs on demand and on the spot market, and how many times as many the dearest
strategy that got there costs, with its 95 % interval. AWS's spot price is that of its cheapest region; in others it is
up to 2.5 times as high. The A100 and the machine without a GPU cost the same in all three.

"""
COLUMNS = (
    *("strategy", "recipe", "score", "runs there", "min, median (range)", "x ours [95 %]", "USD, median (range)"),
    *("x ours [95 %]", "iterations", "min per iteration", "seeds per prompt", "losses", "spot busy"),
)


def table(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy and target: its fresh runs, with the recipe that its tuning chose."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    runs = {name: fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES}
    for target, name in product(TARGETS[job], STRATEGIES):
        if runs[name]:
            recipe = told(shown(rows, first_case(job, regime, size, name), arguments))
            lines.append(f"| {name} | {recipe} | {' | '.join(_cells(name, runs[name], runs[OURS], target))} |")
    return "\n".join(lines)


def page(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """The page docs/time_to_target.md: for each cell that was run, a line for each strategy, to the last target."""
    cells = [cell for cell in cells_of(arguments) if any(fresh(rows, *cell, name, arguments) for name in STRATEGIES)]
    tables = [f"## {_title(*cell)}\n\n{_brief(rows, *cell, arguments)}\n" for cell in cells]
    if not cells:
        return PAGE
    glance = _explained(GLANCE, _glance(rows, cells, dict.fromkeys(STRATEGIES, RESERVED_ONLY), arguments))
    gains = _explained(GAINS, _glance(rows, cells, WITHOUT, arguments))
    theirs = [_papers(rows, *cell, arguments) for cell in cells if untuned(rows, cell, FOUR_EXPLORED, arguments)]
    if theirs:
        gains += "\n" + _explained(PAPERS, "\n\n".join(theirs))
    like_the_first = (cell for cell in cells if cell[1:] == cells[0][1:])
    elsewhere = (
        f"### At other prices: {_title(*cell)}\n\n{_elsewhere(rows, *cell, arguments)}\n" for cell in like_the_first
    )
    if beside := list(_beside_all(rows, cells, arguments)):
        gains += "\n" + _explained(BESIDE_ALL, "\n\n".join(beside))
    prices = PRICES + "\n".join(elsewhere)
    return "\n".join([PAGE, glance, gains, *tables, prices])


def _explained(head: str, found: str) -> str:
    """Tables below their explanation, which includes the mark of old runs if they have it."""
    return f"{head}{OLDER if OLD in found else ''}\n{found}\n"


def _beside_all(
    rows: Sequence[Row], cells: Sequence[tuple[str, str, str]], arguments: argparse.Namespace
) -> Iterator[str]:
    """For each strategy that explores few samples, a line for each other of its GPUs."""
    for name, others in EXPLORED.items():
        if not (ran := [cell for cell in cells if fresh(rows, *cell, name, arguments)]):
            continue
        lines = [f"| *{name}*, beside | {' | '.join(f'{job}, {regime}, {size} px' for job, regime, size in ran)} |"]
        lines.append(f"|---{'|---' * len(ran)}|")
        for other in others:
            times = [_times(compared(rows, cell, other, name, arguments), cell, "seconds") for cell in ran]
            if set(times) != {"–"}:
                lines.append(f"| {other} | {' | '.join(times)} |")
        if len(lines) > 2:
            yield "\n".join(lines)


def _times(found: Compared, cell: tuple[str, str, str], field: str) -> str:
    """How many times sooner or cheaper; in italics where recipes are not their own, and with the mark of old runs."""
    times = gain(found.theirs, found.mine, TARGETS[cell[0]][-1], field)
    if times == "–":
        return times
    return f"{times if found.is_tuned else f'*{times}*'}{_mark(found.mine, found.theirs)}"


def _glance(
    rows: Sequence[Row], cells: Sequence[tuple[str, str, str]], beside: Mapping[str, str], arguments: argparse.Namespace
) -> str:
    """A table of times and one of dollars: a column for each cell, a line for each strategy and what it is beside."""
    found = {
        (cell, name): compared(rows, cell, other, name, arguments)
        for cell, (name, other) in product(cells, beside.items())
    }
    parts = []
    for field, title in (("seconds", "times sooner"), ("usd", "times cheaper")):
        lines = [f"| {' | '.join((title, *(', '.join(cell) for cell in cells)))} |", f"|---{'|---' * len(cells)}|"]
        for name, other in beside.items():
            said = []
            for cell in cells:
                each = found[cell, name]
                said.append("1" if name == other and each.mine else _times(each, cell, field))
            if set(said) != {"–"}:
                lines.append(f"| {name} | {' | '.join(said)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _mark(*of: Mapping[int, Row]) -> str:
    """A dagger if any of the runs was made with other settings than the present ones."""
    return f" {OLD}" if any(Case.of(row).digest != row.get("settings") for runs in of for row in runs.values()) else ""


def _title(job: str, regime: str, size: str) -> str:
    return f"{job.capitalize()}, {regime}, {size} px, to {TARGETS[job][-1]}"


def _brief(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    found = {name: runs for name in STRATEGIES if (runs := fresh(rows, job, regime, size, name, arguments))}
    beside, target = next((name for name in BESIDE if name in found), next(iter(found))), TARGETS[job][-1]
    lines = [f"| {' | '.join(BRIEF)} |", "|---" * len(BRIEF) + "|"]
    for name, runs in found.items():
        cells = [f"**{name}**" if name.startswith("Spotlight, gradients") else name]
        for field, unit in UNITS.items():
            mine, theirs = (times_until(each, target, field) for each in (runs, found[beside]))
            cells.append(_median(mine.values(), unit))
            cells.append("1" if name == beside else ratio(interval(mine, theirs), digits=2))
        cells.append(iterations_of(runs, target))
        cells.append(told(shown(rows, first_case(job, regime, size, name), arguments)) + _mark(runs))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _papers(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy that trains on four reserved GPUs alone: what it does, and what it gains."""
    found = {name: runs for name in ON_FOUR_RESERVED if (runs := untuned(rows, (job, regime, size), name, arguments))}
    first, best, target = next(iter(found)), FOUR_EXPLORED, TARGETS[job][-1]
    lines = [f"| {' | '.join((_title(job, regime, size), *PAPERS_COLUMNS[1:]))} |", "|---" * len(PAPERS_COLUMNS) + "|"]
    for name, runs in found.items():
        settings = config.load(SETTINGS, first_case(job, regime, size, name).overrides())
        prompts, kept = settings.rollout.prompts, settings.rollout.seeds_kept
        used = settings.train.seeds_used or kept
        candidates = statistics.fmean(statistics.fmean(row["seeds_scored"]) for row in runs.values())
        cells = [name, f"{prompts} x {kept}", f"{prompts * used}", f"{candidates:.0f}" if candidates else "–"]
        cells.append(iterations_of(runs, target))
        cells.append(f"{statistics.fmean(row['seconds'][-1] / (len(row['seconds']) - 1) for row in runs.values()):.3g}")
        gains = [(first, name, "seconds"), (first, name, "usd"), (name, best, "seconds")]
        cells += [gain(found[slow], found[fast], target, field) for slow, fast, field in gains]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _elsewhere(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy: its dollars at each list of prices, and how many times as many the dearest costs."""
    target = TARGETS[job][-1]
    found = {name: runs for name in STRATEGIES if (runs := fresh(rows, job, regime, size, name, arguments))}
    columns: dict[str, list[str]] = {name: [] for name in found}
    for gpu in LISTS.values():
        usd = {name: times_until(at_prices(runs, name, gpu), target, "usd") for name, runs in found.items()}
        medians = {name: statistics.median(mine.values()) for name, mine in usd.items()}
        there = (name for name in medians if not isinf(medians[name]))
        dearest = max(there, key=lambda name: medians[name], default=next(iter(found)))
        for name, mine in usd.items():
            times = "1" if name == dearest else ratio(interval(usd[dearest], mine))
            columns[name] += [_median(mine.values()), times]
    titles = ["strategy", *(cell for name in LISTS for cell in (name, "the dearest, times"))]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in columns.items())])


def _median(values: Collection[float], unit: float = 1.0) -> str:
    """The median as text; a dash if half of the runs did not reach the target."""
    median = statistics.median(values)
    return "–" if isinf(median) else f"{median / unit:.3g}"


def _cells(name: str, mine: Mapping[int, Row], ours: Mapping[int, Row], target: float) -> Iterator[str]:
    there = [row for row in mine.values() if not isinf(reached(row, target))]
    yield f"{target}"
    yield f"{len(there)} of {len(mine)}"
    for field, unit in UNITS.items():
        found = times_until(mine, target, field)
        median, *ends = (of(found.values()) / unit for of in (statistics.median, min, max))
        yield "{:.3g} ({:.3g} to {:.3g})".format(median, *ends)
        ratio = interval(found, times_until(ours, target, field)) if name != OURS and ours else None
        yield "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else "1"
    yield f"{statistics.median(reached(row, target) for row in mine.values()):.3g}"
    yield f"{statistics.median(b - a for row in mine.values() for a, b in pairwise(row['seconds'])) / 60:.3f}"
    yield f"{statistics.fmean(statistics.fmean(row['seeds_scored']) for row in mine.values()):.1f}"
    yield f"{statistics.median(sum(row['preemptions']) for row in mine.values()):.3g}"
    yield f"{statistics.fmean(statistics.fmean(row['spot_busy']) for row in mine.values()):.0%}"


def tables(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """The tables of all cells that were run, in Markdown."""
    return "\n".join(
        f"## {job}, {regime}, {size} px\n\n{table(rows, job, regime, size, arguments)}\n"
        for job, regime, size in cells_of(arguments)
        if any(fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES)
    )
