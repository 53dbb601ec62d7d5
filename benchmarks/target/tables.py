"""What came of the runs of `benchmarks.time_to_target`: when each reached a score, tables in Markdown, a figure."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import inf, isinf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.target.cases import (
    OURS,
    SETTINGS,
    SOONEST,
    STRATEGIES,
    TARGETS,
    Case,
    Row,
    first_case,
    middle,
    told,
    tried,
)
from benchmarks.target.prices import LISTS, at_prices
from spotlight import config
from spotlight.report.palette import AXIS, FAINT, LOST, PHASE_COLOURS, POOL_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOALS = {"reserved only (4)": "4 times sooner", "all reserved (12)": "6.4 times cheaper"}
"""What the README's first table is beside, and by how much it should be better."""
UNITS = {"seconds": 60.0, "usd": 1.0}
BOTH = (OURS, SOONEST)
"""What that table is about."""
HEAVY = "6 levels"
"""The regime of the README's second table."""
BESIDE = (SOONEST, "no exploration, gradients on spot (1 + 47)")
"""What the strategies of a cell are compared with on the page: the first of these that was run there."""
BRIEF = ("strategy", "min", "times [95 %]", "dollars", "times [95 %]", "iterations, by seed", "recipe")
PAGE = """# Time and dollars to a score, by strategy

Made from the raw data by `python -m benchmarks.time_to_target --table`; do not edit this page. What was run, and what
follows from it, is in [results.md](results.md#time-and-dollars-to-a-score).

Minutes and dollars are medians over seeds; a run that did not get there (–) took longer than any that did. They count
up to the first of two validations in a row at the target, without start-up and without validations. Times: the ratio to
the row that has 1, with its 95 % interval by paired bootstrap over seeds. In brackets: reserved + spot GPUs. Seconds
are a cost model's; at what an H100 took, [iterations last 0.8 to 1.4 times as long](results.md#on-a-gpu).
"""
GLANCE = """## At a glance

How many times sooner, and how many times cheaper, than *reserved only (4)* in the same column, to the last target of
each job, with the 95 % interval. In italics: a recipe was not tuned. –: not run. 0.0: too many seeds did not get there.
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
trained: beside the same GPUs that train on all samples. Four of a prompt: beside the same GPUs that sample and train on
eight, and explore nothing.
"""
PAPERS = """### The paper's own case: does exploration pay where only reserved GPUs train?

Four reserved and eight spot GPUs, heavy training, base recipe but for how many prompts and samples of each an iteration
rolls out, and how many samples it trains on. Iterations and seconds are those to the last target. *Sooner*, *cheaper*:
than the first line. *Chosen samples*: how many times sooner than this line Spotlight is with four explored samples of a
prompt.
"""
PAPERS_COLUMNS = (
    *("strategy", "prompts x samples", "trained on", "candidates a prompt", "iterations, by seed", "s an iteration"),
    *("times sooner", "times cheaper", "chosen samples, times sooner"),
)
RESERVED_ONLY, FOUR_EXPLORED = "reserved only (4)", "Spotlight, four of a prompt"
FOUR_ON_MANY, AS_DRAWN = "Spotlight, four of a prompt (1 + 47)", "Spotlight, four as drawn"
DRAWN_ON_MANY = "Spotlight, four as drawn (1 + 47)"
CHOSEN_ON_RESERVED = "chosen of eight in six steps, reserved only (4)"
CHOSEN_ON_MANY = "chosen of eight in six steps (1 + 47)"
CHOSEN_WITHOUT_GPU = "chosen of eight in six steps, only updates on reserved (no GPU + 12)"
NO_GPU_UNEXPLORED = "no exploration, only updates on reserved (no GPU + 12)"
WITHOUT = {
    "reserved only (4), blocking exploration": RESERVED_ONLY,
    "Spotlight": "reserved + spot, no exploration",
    "Spotlight, gradients on spot (4 + 8)": "no exploration, gradients on spot",
    OURS: "no exploration, gradients on spot (1 + 11)",
    SOONEST: "no exploration, gradients on spot (1 + 47)",
    "a quarter ahead (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "half trained, reserved only (4)": RESERVED_ONLY,
    "half trained (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "half trained (1 + 11)": "no exploration, gradients on spot (1 + 11)",
    "half trained (1 + 47)": "no exploration, gradients on spot (1 + 47)",
    "half trained, only updates on reserved (no GPU + 12)": NO_GPU_UNEXPLORED,
    "four of a prompt, no exploration (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "six prompts, no exploration (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    FOUR_EXPLORED: "reserved + spot, no exploration",
    FOUR_ON_MANY: "no exploration, gradients on spot (1 + 47)",
    "four of a prompt, no exploration (1 + 47)": "no exploration, gradients on spot (1 + 47)",
    CHOSEN_ON_RESERVED: RESERVED_ONLY,
    "chosen of eight in six steps (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "chosen of eight in six steps (1 + 11)": "no exploration, gradients on spot (1 + 11)",
    CHOSEN_ON_MANY: "no exploration, gradients on spot (1 + 47)",
    CHOSEN_WITHOUT_GPU: NO_GPU_UNEXPLORED,
    AS_DRAWN: "reserved + spot, no exploration",
    DRAWN_ON_MANY: "no exploration, gradients on spot (1 + 47)",
} | {
    name: name.replace("a quarter ahead", "no exploration, gradients on spot" if "(1 +" in name else "no exploration")
    for name in STRATEGIES
    if name.startswith("a quarter ahead") and "(4 +" not in name
}
"""What explores, begins rollouts early, or trains on half of the samples; and the same GPUs that do none of it."""
ON_FOUR_RESERVED = [
    "reserved + spot, no exploration",
    "a quarter ahead (4 + 8), only reserved GPUs train",
    "half trained (4 + 8), only reserved GPUs train",
    "four of a prompt, no exploration (4 + 8), only reserved GPUs train",
    "six prompts, no exploration (4 + 8), only reserved GPUs train",
    "chosen of eight in six steps (4 + 8), only reserved GPUs train",
    "Spotlight",
    FOUR_EXPLORED,
    AS_DRAWN,
]
"""What trains on four reserved GPUs alone, while eight spot ones roll out."""


class Gain(NamedTuple):
    """A line of the README's second table."""

    who: str
    ours: Sequence[str]
    """Strategies, of which a cell's best is taken."""
    than: str
    other: str
    """The strategy that they are beside."""
    field: str = "seconds"


_UNEXPLORED = [name for name in ON_FOUR_RESERVED[1:] if "Spotlight" not in name]
GAINED = [
    Gain("4 + 8: four explored", [FOUR_EXPLORED], "sooner than eight unexplored", ON_FOUR_RESERVED[0]),
    Gain("4 + 8: four as drawn", [AS_DRAWN], "the same", ON_FOUR_RESERVED[0]),
    Gain("4 + 8: the soonest that explores nothing", _UNEXPLORED, "the same", ON_FOUR_RESERVED[0]),
    Gain("1 + 47: four as drawn", [DRAWN_ON_MANY], "sooner than reserved only (4)", RESERVED_ONLY),
    Gain("1 + 47: four of eight in six steps", [CHOSEN_ON_MANY], "the same", RESERVED_ONLY),
    Gain("the same", [CHOSEN_ON_MANY], "sooner than (4) that does so", CHOSEN_ON_RESERVED),
    Gain(
        "no GPU + 12: four of eight in six steps",
        [CHOSEN_WITHOUT_GPU],
        "cheaper than reserved only (4)",
        RESERVED_ONLY,
        "usd",
    ),
    Gain("the same", [CHOSEN_WITHOUT_GPU], "cheaper than (4) that does so", CHOSEN_ON_RESERVED, "usd"),
]
PRICES = """## The same at other prices

Dollars by three lists of what an H100 costs on demand and on the spot market, and how many times as many the dearest
strategy costs, with its 95 % interval. AWS's spot price is that of its cheapest region; in others it is up to 2.5 times
as high. The A100 and the machine without a GPU cost the same in all three.

"""
CURVES = {
    "reserved only (4)": POOL_COLOURS["reserved"],
    "all reserved (12)": FAINT,
    "all reserved (48)": AXIS,
    "no exploration, gradients on spot (1 + 47)": POOL_COLOURS["spot"],
    OURS: PHASE_COLOURS["explore"],
    SOONEST: LOST,
}
"""Strategies whose runs are drawn as lines, with their colours."""

IN_A_ROW = 2
"""So many validations in succession must reach a target, for a single one may by luck."""
RESAMPLES = 4000


def reached(row: Row, target: float) -> float:
    """The first version of so many in succession that are at the target; infinite where there are none."""
    versions = sorted(map(int, row["scores"]))
    scores = {int(version): score for version, score in row["scores"].items()}
    runs = (versions[at : at + IN_A_ROW] for at in range(len(versions) - IN_A_ROW + 1))
    return next((float(run[0]) for run in runs if min(scores[v] for v in run) >= target), inf)


def is_at(scores: Sequence[float], target: float) -> bool:
    """Whether the last validations of a run are."""
    return len(scores) >= IN_A_ROW and min(scores[-IN_A_ROW:]) >= target


def until(row: Row, target: float, field: str) -> float:
    """Seconds or dollars until then; infinite where the run did not get there."""
    version = reached(row, target)
    return inf if isinf(version) else row[field][int(version)]


def chosen(rows: Sequence[Row], case: Case, tuning: Sequence[int], count: int) -> int | None:
    """The trial whose tuning runs came soonest to the target in the middle, then highest; None before all are made.

    A single trial is not chosen, and needs no tuning runs.
    """
    trials = tried(case.strategy, count)
    if len(trials) == 1:
        return trials[0]
    target = middle(case.job)
    ranks = []
    for trial in trials:
        mine = [row for row in rows if row["trial"] == trial and row["seed"] in tuning and _same(row, case)]
        if len(mine) < len(tuning):
            return None
        times = [until(row, target, "seconds") for row in mine]
        ranks.append((statistics.fmean(times), -statistics.fmean(curve(row)[-1][1] for row in mine), trial))
    return min(ranks)[-1]


def _same(row: Row, case: Case) -> bool:
    return all(row[name] == getattr(case, name) for name in ("job", "regime", "size", "strategy"))


def curve(row: Row) -> list[tuple[int, float]]:
    return sorted((int(version), score) for version, score in row["scores"].items())


def interval(theirs: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float, float, float]:
    """How many times ours theirs is: the ratio of medians over the seeds that both ran, and its 95 % interval.

    By paired bootstrap over seeds; a run that did not get there took longer than any that did. A draw of seeds in which
    neither median got there counts as 1, for it says nothing.
    """
    seeds = sorted(theirs.keys() & ours.keys())
    pairs_S2 = np.array([(theirs[seed], ours[seed]) for seed in seeds])
    draws_RS = np.random.Generator(np.random.Philox(0)).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    with np.errstate(invalid="ignore"):
        medians_R2 = np.median(pairs_S2[draws_RS], axis=1)
        ratios_R = np.nan_to_num(medians_R2[:, 0] / medians_R2[:, 1], nan=1.0, posinf=inf)
        whole = np.median(pairs_S2, axis=0)
        low, high = np.quantile(ratios_R, (0.025, 0.975), method="nearest")
        return float(whole[0] / whole[1]), float(low), float(high)


COLUMNS = (
    *("strategy", "recipe", "score", "runs there", "min, median (range)", "x ours [95 %]", "USD, median (range)"),
    *("x ours [95 %]", "iterations", "min per iteration", "seeds per prompt", "losses", "spot busy"),
)


def table(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy and target: its fresh runs, with the recipe that its tuning chose."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    fresh = {name: _fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES}
    for target, name in product(TARGETS[job], STRATEGIES):
        if fresh[name]:
            recipe = told(_shown(rows, first_case(job, regime, size, name), arguments))
            lines.append(f"| {name} | {recipe} | {' | '.join(_cells(name, fresh[name], fresh[OURS], target))} |")
    return "\n".join(lines)


def page(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Of each cell that was run, a line for each strategy to the last target: docs/time_to_target.md."""
    cells = [cell for cell in _cells_of(arguments) if any(_fresh(rows, *cell, name, arguments) for name in STRATEGIES)]
    tables = [f"## {_title(*cell)}\n\n{_brief(rows, *cell, arguments)}\n" for cell in cells]
    if not cells:
        return PAGE
    glance = _explained(GLANCE, _glance(rows, cells, dict.fromkeys(STRATEGIES, RESERVED_ONLY), arguments))
    gains = _explained(GAINS, _glance(rows, cells, WITHOUT, arguments))
    theirs = [_papers(rows, *cell, arguments) for cell in cells if _fresh(rows, *cell, FOUR_EXPLORED, arguments)]
    if theirs:
        gains += "\n" + _explained(PAPERS, "\n\n".join(theirs))
    like_the_first = (cell for cell in cells if cell[1:] == cells[0][1:])
    elsewhere = (
        f"### At other prices: {_title(*cell)}\n\n{_elsewhere(rows, *cell, arguments)}\n" for cell in like_the_first
    )
    prices = PRICES + "\n".join(elsewhere)
    return "\n".join([PAGE, glance, gains, *tables, prices])


def _explained(head: str, found: str) -> str:
    """Tables below what is said of them, which explains the mark of old runs if they have it."""
    return f"{head}{OLDER if OLD in found else ''}\n{found}\n"


def _glance(
    rows: Sequence[Row], cells: Sequence[tuple[str, str, str]], beside: Mapping[str, str], arguments: argparse.Namespace
) -> str:
    """A table of times and one of dollars: a column for each cell, a line for each strategy and what it is beside."""
    runs = {(cell, name): _fresh(rows, *cell, name, arguments) for cell, name in product(cells, STRATEGIES)}
    tuned = {(cell, name): _shown(rows, first_case(*cell, name), arguments) is not None for cell, name in runs}
    parts = []
    for field, title in (("seconds", "times sooner"), ("usd", "times cheaper")):
        lines = [f"| {' | '.join((title, *(', '.join(cell) for cell in cells)))} |", f"|---{'|---' * len(cells)}|"]
        for name, other in beside.items():
            said = []
            for cell in cells:
                gain = _gain(runs[cell, other], runs[cell, name], TARGETS[cell[0]][-1], field)
                is_plain = len(gain) == 1 or (tuned[cell, name] and tuned[cell, other])
                mark = "" if len(gain) == 1 else _mark(runs[cell, name], runs[cell, other])
                said.append(f"{gain if is_plain else f'*{gain}*'}{mark}")
            if set(said) != {"–"}:
                lines.append(f"| {name} | {' | '.join(said)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _mark(*of: Mapping[int, Row]) -> str:
    """A dagger where any of the runs was not made with the settings of now."""
    return f" {OLD}" if any(Case.of(row).digest != row.get("settings") for runs in of for row in runs.values()) else ""


def _gain(theirs: Mapping[int, Row], mine: Mapping[int, Row], target: float, field: str) -> str:
    """How many times theirs mine is, with its interval; of the baseline itself 1, of what was not run a dash."""
    if mine is theirs:
        return "1"
    if not theirs.keys() & mine.keys():
        return "–"
    return _ratio(interval(_until(theirs, target, field), _until(mine, target, field)))


def _title(job: str, regime: str, size: str) -> str:
    return f"{job.capitalize()}, {regime}, {size} px, to {TARGETS[job][-1]}"


def _brief(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    found = {name: runs for name in STRATEGIES if (runs := _fresh(rows, job, regime, size, name, arguments))}
    beside, target = next((name for name in BESIDE if name in found), next(iter(found))), TARGETS[job][-1]
    lines = [f"| {' | '.join(BRIEF)} |", "|---" * len(BRIEF) + "|"]
    for name, runs in found.items():
        cells = [f"**{name}**" if name.startswith("Spotlight, gradients") else name]
        for field, unit in UNITS.items():
            mine, theirs = (_until(each, target, field) for each in (runs, found[beside]))
            cells.append(f"{statistics.median(mine.values()) / unit:.3g}")
            cells.append("1" if name == beside else "{:.2f} [{:.2f}, {:.2f}]".format(*interval(mine, theirs)))
        cells.append(_iterations(runs, target))
        cells.append(told(_shown(rows, first_case(job, regime, size, name), arguments)) + _mark(runs))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _papers(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy that trains on four reserved GPUs alone: what it does, and what it gains."""
    found = {name: runs for name in ON_FOUR_RESERVED if (runs := _fresh(rows, job, regime, size, name, arguments))}
    first, best, target = next(iter(found)), FOUR_EXPLORED, TARGETS[job][-1]
    lines = [f"| {' | '.join((_title(job, regime, size), *PAPERS_COLUMNS[1:]))} |", "|---" * len(PAPERS_COLUMNS) + "|"]
    for name, runs in found.items():
        settings = config.load(SETTINGS, first_case(job, regime, size, name).overrides())
        prompts, kept = settings.rollout.prompts, settings.rollout.seeds_kept
        used = settings.train.seeds_used or kept
        candidates = statistics.fmean(statistics.fmean(row["seeds_scored"]) for row in runs.values())
        cells = [name, f"{prompts} x {kept}", f"{prompts * used}", f"{candidates:.0f}" if candidates else "–"]
        cells.append(_iterations(runs, target))
        cells.append(f"{statistics.fmean(row['seconds'][-1] / (len(row['seconds']) - 1) for row in runs.values()):.3g}")
        gains = [(first, name, "seconds"), (first, name, "usd"), (name, best, "seconds")]
        cells += [_gain(found[slow], found[fast], target, field) for slow, fast, field in gains]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _iterations(runs: Mapping[int, Row], target: float) -> str:
    """That each seed needed."""
    versions = [reached(runs[seed], target) for seed in sorted(runs)]
    return ", ".join("–" if isinf(version) else f"{version:g}" for version in versions)


def _elsewhere(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each strategy: its dollars at each list of prices, and how many times as many the dearest costs."""
    target = TARGETS[job][-1]
    found = {name: runs for name in STRATEGIES if (runs := _fresh(rows, job, regime, size, name, arguments))}
    columns: dict[str, list[str]] = {name: [] for name in found}
    for gpu in LISTS.values():
        usd = {name: _until(at_prices(runs, name, gpu), target, "usd") for name, runs in found.items()}
        dearest = max(usd, key=lambda name: statistics.median(usd[name].values()))
        for name, mine in usd.items():
            times = "1" if name == dearest else _ratio(interval(usd[dearest], mine))
            columns[name] += [f"{statistics.median(mine.values()):.3g}", times]
    titles = ["strategy", *(cell for name in LISTS for cell in (name, "the dearest, times"))]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in columns.items())])


def headlines(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    """The README's tables, to the last target: of the first cell in which 1 + 11, 1 + 47 and all that they are compared
    with were run, each with its own best recipe; and of six levels in all cells.

    Recipes of their own are of the first size; docs/time_to_target.md has the others.
    """
    cells = [cell for cell in _cells_of(arguments) if cell[-1] == arguments.sizes[0]]
    tuned = (_by_own_recipes(rows, *cell, arguments) for cell in cells)
    return [*[found for found in tuned if found][:1], *_by_cells(rows, arguments)]


def _by_own_recipes(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for 1 + 11 and 1 + 47, a column for what they are beside: times sooner, and times cheaper."""
    target, names = TARGETS[job][-1], {*BOTH, *GOALS, *(WITHOUT[ours] for ours in BOTH)}
    found = {name: _fresh(rows, job, regime, size, name, arguments) for name in names}
    if any(_shown(rows, first_case(job, regime, size, name), arguments) is None for name in names):
        return ""
    goals = (f"{name} (goal: {told})" for name, told in GOALS.items())
    cell = f"{job} to {target}, {regime}, {size} px: times sooner; cheaper"
    lines = [f"| {' | '.join((cell, *goals, 'itself without exploration'))} |", "|---" * (len(GOALS) + 2) + "|"]
    for ours in BOTH:
        others = (*GOALS, WITHOUT[ours])
        gains = ("; ".join(_gain(found[other], found[ours], target, field) for field in UNITS) for other in others)
        lines.append(f"| {' | '.join((_gpus(ours), *gains))} |")
    return "\n".join(lines)


def _by_cells(rows: Sequence[Row], arguments: argparse.Namespace) -> Iterator[str]:
    """A line for each of `GAINED_BY`, a column for each job and size: times sooner, or times cheaper."""
    cells = [
        cell for cell in _cells_of(arguments) if cell[1] == HEAVY and _fresh(rows, *cell, FOUR_EXPLORED, arguments)
    ]
    if not cells:
        return
    heads = (f"{job} {size} px" for job, _, size in cells)
    lines = [f"| {' | '.join((HEAVY, 'times', *heads))} |", "|---" * (len(cells) + 2) + "|"]
    for each in GAINED:
        gains = []
        for cell in cells:
            target = TARGETS[cell[0]][-1]
            runs = {name: _fresh(rows, *cell, name, arguments) for name in (*each.ours, each.other)}
            times = {name: _until(runs[name], target, each.field).values() for name in each.ours if runs[name]}
            best = min(times, key=lambda name: statistics.median(times[name]), default=each.ours[0])
            gains.append(_gain(runs[each.other], runs[best], target, each.field))
        lines.append(f"| {' | '.join((each.who, each.than, *gains))} |")
    yield "\n".join(lines)


def _gpus(name: str) -> str:
    """As "1 + 11"."""
    return name.rpartition("(")[2].rstrip(")")


def _ratio(found: tuple[float, float, float]) -> str:
    return "{:.1f} [{:.1f}, {:.1f}]".format(*found)


def _cells_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    return product(arguments.jobs, arguments.regimes, arguments.sizes)


def _fresh(
    rows: Sequence[Row], job: str, regime: str, size: str, name: str, arguments: argparse.Namespace
) -> dict[int, Row]:
    case = first_case(job, regime, size, name)
    return _runs(rows, case, _shown(rows, case, arguments) or 0, arguments)


def _runs(rows: Sequence[Row], case: Case, trial: int, arguments: argparse.Namespace) -> dict[int, Row]:
    """A recipe's, by fresh seed."""
    mine = [row for row in rows if _same(row, case) and row["seed"] not in arguments.tuning_seeds]
    return {row["seed"]: row for row in mine if row["trial"] == trial}


def _shown(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    """The best recipe, once fresh seeds have been run with it; None: the tables show the base one, untuned."""
    trial = best(rows, case, arguments)
    return trial if trial is not None and _runs(rows, case, trial, arguments) else None


def best(rows: Sequence[Row], case: Case, arguments: argparse.Namespace) -> int | None:
    return chosen(rows, case, arguments.tuning_seeds, arguments.trials)


def _until(runs: Mapping[int, Row], target: float, field: str) -> dict[int, float]:
    return {seed: until(row, target, field) for seed, row in runs.items()}


def _cells(name: str, mine: Mapping[int, Row], ours: Mapping[int, Row], target: float) -> Iterator[str]:
    there = [row for row in mine.values() if not isinf(reached(row, target))]
    yield f"{target}"
    yield f"{len(there)} of {len(mine)}"
    for field, unit in UNITS.items():
        found = _until(mine, target, field)
        median, *ends = (of(found.values()) / unit for of in (statistics.median, min, max))
        yield "{:.3g} ({:.3g} to {:.3g})".format(median, *ends)
        ratio = interval(found, _until(ours, target, field)) if name != OURS and ours else None
        yield "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else "1"
    yield f"{statistics.median(reached(row, target) for row in mine.values()):.3g}"
    yield f"{statistics.median(b - a for row in mine.values() for a, b in pairwise(row['seconds'])) / 60:.3f}"
    yield f"{statistics.fmean(statistics.fmean(row['seeds_scored']) for row in mine.values()):.1f}"
    yield f"{statistics.median(sum(row['preemptions']) for row in mine.values()):.3g}"
    yield f"{statistics.fmean(statistics.fmean(row['spot_busy']) for row in mine.values()):.0%}"


def draw(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """A row of panels for each job and regime: score against time, and minutes against dollars to the last target."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = [(*cell, "512") for cell in product(arguments.jobs, arguments.regimes)]
    shown = [cell for cell in cells if any(_fresh(rows, *cell, name, arguments) for name in STRATEGIES)] or cells[:1]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.6 * len(shown) + 2.4), layout="constrained")
        panels = figure.subplots(len(shown), 2, squeeze=False)
        for cell, (left, right) in zip(shown, panels, strict=True):
            found = {name: runs for name in STRATEGIES if (runs := _fresh(rows, *cell, name, arguments))}
            _draw_curves(left, {name: found[name] for name in CURVES if name in found}, cell)
            _draw_costs(right, found, cell)
        marks = {
            name: mark for panel in panels[:, 1] for mark, name in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        names = [name for name in STRATEGIES if name in marks]
        figure.legend(
            [marks[name] for name in names],
            names,
            frameon=False,
            loc="outside lower center",
            ncols=2,
            title="median (line: runs that got there)",
        )
        figure.suptitle("Virtual clock: Qwen-Image at 512 px on H100s; learning is the embedded model's", fontsize=10)
        figure.savefig(arguments.figure, dpi=130)


def _colour(name: str) -> str:
    """Where it has no line, that of its kind: reserved GPUs alone, spot ones too, or exploration beside training."""
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


def _draw_costs(axis: Axes, found: Mapping[str, Mapping[int, Row]], cell: tuple[str, str, str]) -> None:
    """Each strategy's number, one for all panels, at its medians; lines over the runs that got there, if most did."""
    from matplotlib.ticker import LogLocator, NullLocator

    target = TARGETS[cell[0]][-1]
    for number, name in enumerate(STRATEGIES, 1):
        runs = found.get(name, {})
        each = [[value / unit for value in _until(runs, target, field).values()] for field, unit in UNITS.items()]
        minutes, dollars = (statistics.median(values or [inf]) for values in each)
        if isinf(minutes):
            continue
        there = [[value for value in values if not isinf(value)] for values in each]
        reach = [
            [[middle - min(values)], [max(values) - middle]]
            for values, middle in zip(there, (minutes, dollars), strict=True)
        ]
        axis.errorbar(minutes, dollars, xerr=reach[0], yerr=reach[1], color=_colour(name), lw=0.8, alpha=0.4)
        axis.plot(minutes, dollars, ls="", marker=f"${number}$", ms=9, color=_colour(name), label=name)
    axis.set(xscale="log", yscale="log", xlabel=f"minutes to {target}, emulated", ylabel=f"US dollars to {target}")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_locator(NullLocator())


def tables(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Those of all cells that were run, in Markdown."""
    return "\n".join(
        f"## {job}, {regime}, {size} px\n\n{table(rows, job, regime, size, arguments)}\n"
        for job, regime, size in _cells_of(arguments)
        if any(_fresh(rows, job, regime, size, name, arguments) for name in STRATEGIES)
    )
