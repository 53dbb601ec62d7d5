"""Lays out a run's ledger: a row per kind of work and of waste, for the page, the terminal and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from spotlight.config import Config
from spotlight.market.ledger import AT_RESERVED_PRICES, Ledger
from spotlight.market.traces import SECONDS_PER_H
from spotlight.records import record
from spotlight.report.palette import PHASE_COLOURS, WASTE_COLOURS, phase_colour

WASTE = {
    "idle": ("idle", "nothing to do"),
    "start-up": ("start-up", "joined, and no task yet"),
    "dropped": ("dropped exploration", "called off by the end of training"),
    "lost": ("lost work", "steps that went with their worker before they were committed"),
    "redone": ("repeated steps", "done before by another worker"),
}
"""``{kind: its name, what it is}``"""
LONG_S, DEAR_USD = 100_000, 10.0
"""Larger accounts are in hours, and in whole cents."""


def simulation(learning: str) -> str:
    """A label that says what is not real about a simulated run, shown with its numbers; empty for a live one."""
    return f"SIMULATED: durations by the cost model, learning {learning}" if learning else ""


def emulated(config: Config, learning: str) -> str:
    """A label that says what is not real about a run's seconds and dollars; empty if all is real.

    Args:
        learning: of a simulated run, as `simulation` takes it.
    """
    pace, scale = config.pace, config.emulated_per_real_s
    fewer = f", seconds and dollars are {scale:g} times fewer" if scale != 1 else ""
    paced = f"PACED: {pace.model} on {pace.gpu} is emulated{fewer}" if pace.gpu else ""
    return "; ".join(filter(None, (simulation(learning), paced)))


@record
class Row:
    """One line of the account."""

    name: str
    note: str
    seconds: Mapping[str, float]
    """{pool: seconds}, with every pool."""
    usd: Mapping[str, float]
    share: float
    """Share of all dollars, in [0, 1]; of all seconds where nothing costs anything."""
    colour: str = ""
    is_waste: bool = False
    is_sum: bool = False


def rows(ledger: Ledger) -> list[Row]:
    """Useful phases in the order of an iteration, their sum, the kinds of waste that occurred, their sum, and all."""
    found = {entry.phase for entry in ledger.entries if entry.kind == "useful"}
    phases = [phase for phase in (*PHASE_COLOURS, *sorted(found - PHASE_COLOURS.keys())) if phase in found]
    wasted = [kind for kind in WASTE if ledger.seconds(kind=kind)]
    return [
        *(_row(ledger, phase, "", [{"phase": phase, "kind": "useful"}], phase_colour(phase)) for phase in phases),
        _row(ledger, "useful", "", [{"kind": "useful"}]),
        *(_row(ledger, *WASTE[kind], [{"kind": kind}], WASTE_COLOURS[kind]) for kind in wasted),
        _row(ledger, "wasted", "", [{"kind": kind} for kind in wasted]),
        _row(ledger, "all", "", [{}]),
    ]


def _row(ledger: Ledger, name: str, note: str, columns: list[dict[str, str]], colour: str = "") -> Row:
    pools = sorted({entry.pool for entry in ledger.entries})
    seconds = {pool: sum(ledger.seconds(pool=pool, **column) for column in columns) for pool in pools}
    usd = {pool: sum(ledger.usd(pool=pool, **column) for column in columns) for pool in pools}
    whole, part = (ledger.usd(), sum(usd.values())) if ledger.usd() else (ledger.seconds(), sum(seconds.values()))
    return Row(
        name=name,
        note=note,
        seconds=seconds,
        usd=usd,
        share=part / whole if whole else 0.0,
        colour=colour,
        is_waste=colour in WASTE_COLOURS.values(),
        is_sum=not colour,
    )


def bought(ledger: Ledger) -> list[tuple[str, str]]:
    """What the dollars bought, as (name, text); a dash where the run has none of it."""
    times = f" ({ledger.usd_reserved_only / ledger.usd():.1f} ×)" if ledger.usd() else ""
    return [
        (f"per iteration ({ledger.iterations})", dollars(ledger.usd_per_iteration)),
        (f"per kept sample ({ledger.samples})", dollars(ledger.usd_per_sample)),
        ("per point of validation score" + _points(ledger.points), dollars(ledger.usd_per_point)),
        (AT_RESERVED_PRICES, dollars(ledger.usd_reserved_only) + times),
    ]


def dollars(value: float | None) -> str:
    """An amount of money for people; a dash where there is none."""
    return "–" if value is None else f"${value:.4f}" if value < 10 else f"${value:,.2f}"


def _points(points: float | None) -> str:
    return "" if points is None else f" ({points:+.1f})"


def cost_table(ledger: Ledger, title: str, *, width: int) -> Table:
    """The account for a terminal, with all pools side by side if there is room, else summed up.

    Args:
        width: characters that a line may have.
    """
    pools, account = sorted({entry.pool for entry in ledger.entries}), rows(ledger)
    is_long, is_dear = ledger.seconds() > LONG_S, ledger.usd() >= DEAR_USD
    unit, unit_s = ("h", SECONDS_PER_H) if is_long else ("s", 1.0)

    def texts(seconds: float, usd: float) -> tuple[str, str]:
        return f"{seconds / unit_s:,.1f}", f"{usd:,.2f}" if is_dear else f"{usd:.4f}"

    def lines(*, apart: bool) -> list[list[str]]:
        """The heads, and the cells of each row."""
        heads = [head for pool in pools for head in (f"{pool} {unit}", "$")] if apart else [f"all {unit}"]
        found = [["", *heads, "all $", "share"]]
        for row in account:
            each = [text for pool in pools for text in texts(row.seconds[pool], row.usd[pool])]
            seconds, usd = texts(sum(row.seconds.values()), sum(row.usd.values()))
            found.append([row.name, *(each if apart else [seconds]), usd, f"{row.share:.1%}"])
        return found

    (heads, *cells), caption = lines(apart=True), None
    if sum(max(map(len, column)) + 1 for column in zip(heads, *cells, strict=True)) > width:
        (heads, *cells), caption = lines(apart=False), "a wider terminal, or a file, shows each pool"
    table = Table(title=title, box=None, pad_edge=False, collapse_padding=True, caption=caption)
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row, line in zip(account, cells, strict=True):
        table.add_row(*line, style="bold" if row.is_sum else None, end_section=row.is_sum)
    return table


def cost_json(ledger: Ledger) -> dict[str, Any]:
    """The account as JSON values: every column of the ledger, and every number derived from it."""
    pools = sorted({entry.pool for entry in ledger.entries})
    derived = ("usd_wasted", "usd_reserved_only", "usd_per_iteration", "usd_per_sample", "usd_per_point")
    return {
        "seconds": ledger.seconds(),
        "usd": ledger.usd(),
        "usd_by_pool": {pool: ledger.usd(pool=pool) for pool in pools},
        "wasted_s": ledger.wasted_s,
        **{name: getattr(ledger, name) for name in derived},
        **asdict(ledger),
    }
