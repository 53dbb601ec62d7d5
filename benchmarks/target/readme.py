"""The README's tables of `benchmarks.time_to_target`."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.target.cases import (
    AS_DRAWN,
    CHOSEN_ON_MANY,
    CHOSEN_ON_RESERVED,
    CHOSEN_WITHOUT_GPU,
    DRAWN_ON_MANY,
    FILTERED_ON_BOTH,
    FOUR_EXPLORED,
    HEAVY,
    ON_ALL_TWELVE,
    ON_FOUR_RESERVED,
    OURS,
    RESERVED_ONLY,
    SIX_ON_MANY,
    SIX_WITHOUT_GPU,
    SOONEST,
    TARGETS,
    WITHOUT,
    Row,
    first_case,
)
from benchmarks.target.outcomes import (
    UNITS,
    cells_of,
    compared,
    fresh,
    gain,
    shown,
    times_until,
)

GOALS = {"reserved only (4)": " (goal: 4 times sooner)", "all reserved (12)": ""}
"""{baseline of the README's first table: by how much it should be beaten}"""
SAME = "the same GPUs, no exploration, 16 steps"
LIGHT = {
    "1 + 11, explored": OURS,
    "1 + 47, explored": SOONEST,
    "1 + 47, in six steps": SIX_ON_MANY,
    "no GPU + 12, in six steps": SIX_WITHOUT_GPU,
}
"""{line of that table: strategy}"""


class Gain(NamedTuple):
    """A line of the README's second table."""

    who: str
    ours: Sequence[str]
    """Strategies, of which a cell's best is taken."""
    than: str
    other: str
    """The strategy that they are beside."""
    field: str = "seconds"


_UNEXPLORED = [*(name for name in ON_FOUR_RESERVED[1:] if "Spotlight" not in name)]
_UNEXPLORED += [*ON_ALL_TWELVE, FILTERED_ON_BOTH]
_EIGHT, _FOUR = "sooner than 4 + 8, no exploration", "sooner than reserved only (4)"
_OF_EIGHT = "four of eight in six steps"
GAINED = [
    Gain("1 + 47: four as drawn", [DRAWN_ON_MANY], _FOUR, RESERVED_ONLY),
    Gain(f"1 + 47: {_OF_EIGHT}", [CHOSEN_ON_MANY], f"{_FOUR} with {_OF_EIGHT}", CHOSEN_ON_RESERVED),
    Gain(f"4 + 8: {_OF_EIGHT}, filtered", [FILTERED_ON_BOTH], _FOUR, RESERVED_ONLY),
    Gain(f"no GPU + 12: {_OF_EIGHT}", [CHOSEN_WITHOUT_GPU], "cheaper than reserved only (4)", RESERVED_ONLY, "usd"),
    Gain(
        f"no GPU + 12: {_OF_EIGHT}",
        [CHOSEN_WITHOUT_GPU],
        f"cheaper than reserved only (4) with {_OF_EIGHT}",
        CHOSEN_ON_RESERVED,
        "usd",
    ),
    Gain("4 + 8: four as drawn", [AS_DRAWN], _EIGHT, ON_FOUR_RESERVED[0]),
    Gain("4 + 8: the soonest that explores nothing", _UNEXPLORED, _EIGHT, ON_FOUR_RESERVED[0]),
]


MARK = "<!-- made by benchmarks.time_to_target -->"
"""Precedes each of the tables in the README."""


def put(text: str, tables: Sequence[str]) -> str:
    """The README with these tables below its marks, in place of the old ones.

    Raises:
        ValueError: it does not have as many marks.
    """
    head, *rest = text.split(MARK)
    if len(rest) != len(tables):
        raise ValueError(
            f"README.md has {len(rest)} times {MARK!r}, and there are {len(tables)} tables: mark each place"
        )
    behind = (re.sub(r"\A(\s*\|.*\n)*", "", part) for part in rest)
    return head + "".join(f"{MARK}\n{table}\n{part}" for table, part in zip(tables, behind, strict=True))


def headlines(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    """The README's tables, to the last target: of the first cell in which all of `LIGHT` and what they are compared
    with were run, each with its own best recipe; and of six levels in all cells.

    Recipes of their own are of the first size; docs/time_to_target.md has the others.
    """
    cells = [cell for cell in cells_of(arguments) if cell[-1] == arguments.sizes[0]]
    tuned = (_by_own_recipes(rows, *cell, arguments) for cell in cells)
    both = next(filter(None, tuned), ""), _by_cells(rows, arguments)
    return [table for table in both if table]


def _by_own_recipes(rows: Sequence[Row], job: str, regime: str, size: str, arguments: argparse.Namespace) -> str:
    """A line for each of `LIGHT`, a column for what they are beside: times sooner, and times cheaper."""
    target, names = TARGETS[job][-1], {*LIGHT.values(), *GOALS, *(WITHOUT[ours] for ours in LIGHT.values())}
    found = {name: fresh(rows, job, regime, size, name, arguments) for name in names}
    if any(shown(rows, first_case(job, regime, size, name), arguments) is None for name in names):
        return ""
    goals = (f"{name}{told}" for name, told in GOALS.items())
    cell = f"{job} to {target}, {regime}, {size} px: times sooner; cheaper"
    lines = [f"| {' | '.join((cell, *goals, SAME))} |", "|---" * (len(GOALS) + 2) + "|"]
    for said, ours in LIGHT.items():
        others = (*GOALS, WITHOUT[ours])
        gains = ("; ".join(gain(found[other], found[ours], target, field) for field in UNITS) for other in others)
        lines.append(f"| {' | '.join((said, *gains))} |")
    return "\n".join(lines)


def _by_cells(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """A line for each of `GAINED`, a column for each job and size: times sooner, or times cheaper.

    Bold where each has its own best recipe.
    """
    cells = [cell for cell in cells_of(arguments) if cell[1] == HEAVY and fresh(rows, *cell, FOUR_EXPLORED, arguments)]
    if not cells:
        return ""
    heads = (f"{job} {size} px" for job, _, size in cells)
    lines = [f"| {' | '.join((HEAVY, 'how many times', *heads))} |", "|---" * (len(cells) + 2) + "|"]
    for each in GAINED:
        gains = []
        for cell in cells:
            target = TARGETS[cell[0]][-1]
            runs = {name: compared(rows, cell, each.other, name, arguments) for name in each.ours}
            times = {name: times_until(found.mine, target, each.field).values() for name, found in runs.items()}
            best = min(
                (name for name in times if times[name]),
                key=lambda name: statistics.median(times[name]),
                default=each.ours[0],
            )
            theirs, mine, is_tuned = runs[best]
            times_sooner = gain(theirs, mine, target, each.field)
            gains.append(f"**{times_sooner}**" if is_tuned and mine else times_sooner)
        lines.append(f"| {' | '.join((each.who, each.than, *gains))} |")
    return "\n".join(lines)
