"""Shows a simulated scenario: the strategies in one table, and what every worker did, as a page to zoom into."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d
from bokeh.plotting import figure
from bokeh.resources import Resources
from rich.box import SIMPLE
from rich.table import Table

from spotlight.machines import RETURNED
from spotlight.market.ledger import SECONDS_PER_H
from spotlight.records import Span, WorkerLife, base_phase
from spotlight.report.palette import ALIVE, CALLED_OFF_ALPHA, LOST, phase_colour
from spotlight.simulator import Outcome, Result

Plot = Any
"""A Bokeh figure; Bokeh's types know neither factors of two levels nor keyword styles."""
MOST_LANES, MOST_SPANS = 64, 20_000
"""What a browser still moves smoothly: larger strategies show their first workers, and only as much time as fits."""
COLUMNS = (
    "strategy",
    "iter.",
    "h to\ntarget",
    "$ to\ntarget",
    "$/h",
    "spot\nbusy",
    "GPUs\nlost",
    "steps\nlost",
    "seeds\ntried",
    "kept\nvar.",
    "GPU-h\nwasted",
    "score",
)
"""So short that a terminal of 80 characters need break no word of a strategy's name."""


def results_table(result: Result) -> Table:
    """The strategies side by side; a model's numbers say so beneath."""
    table = Table(
        title=f"{result.scenario.name} (simulated)",
        caption=result.model,
        caption_justify="left",
        box=SIMPLE,
        padding=0,
    )
    for name in COLUMNS:
        first = name == COLUMNS[0]
        table.add_column(name, justify="left" if first else "right", no_wrap=not first)
    for outcome in result.outcomes:
        table.add_row(*_cells(outcome))
    return table


def write_timeline(result: Result, path: str | Path) -> None:
    """Write one page, which needs no network, with a timeline of every strategy."""
    script, plots = components([_timeline(outcome) for outcome in result.outcomes])
    title = f"{escape(result.scenario.name)}, simulated"
    bokeh = Resources(mode="inline", components=["bokeh"]).render()
    style = "body { font-family: system-ui, sans-serif; margin: 2em; }"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>{bokeh}{script}'
    body = f"<h1>{title}</h1><p>{escape(result.model)}.</p>{''.join(plots)}"
    Path(path).write_text(f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>", "utf-8")


def _cells(outcome: Outcome) -> list[str]:
    reached = outcome.target_s is not None
    return [
        outcome.strategy.name,
        str(outcome.iterations),
        f"{outcome.wall_s / SECONDS_PER_H:.2f}" if reached else "-",
        f"{outcome.usd:,.2f}" if reached else "-",
        f"{outcome.usd_per_h:,.2f}",
        f"{outcome.spot_utilisation:.0%}" if outcome.strategy.rents_spot else "-",
        str(outcome.preemptions),
        str(outcome.steps_lost),
        f"{outcome.seeds_explored:.1f}",
        f"{outcome.captured:.2f}x",
        f"{sum(outcome.ledger.wasted_s.values()) / SECONDS_PER_H:.1f}",
        f"{outcome.score:.3f}",
    ]


def _timeline(outcome: Outcome) -> Plot:
    lanes = sorted({_lane(life.pool, life.worker) for life in outcome.lives}, key=_natural)[:MOST_LANES]
    spans = sorted((span for span in outcome.spans if _lane(span.pool, span.worker) in set(lanes)), key=_start)
    end_s = spans[MOST_SPANS].start_s if len(spans) > MOST_SPANS else outcome.wall_s
    cut = f", of which the first {end_s / SECONDS_PER_H:.1f} h" if end_s < outcome.wall_s else ""
    plot: Plot = figure(
        title=f"{outcome.strategy.name}: {outcome.iterations} iterations{cut}",
        height=150 + 14 * len(lanes),
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
        x_range=Range1d(start=0, end=end_s / SECONDS_PER_H),
        y_range=FactorRange(factors=lanes[::-1]),
        x_axis_label="hours",
    )
    plot.ygrid.grid_line_color = None
    _plot_lives(plot, [life for life in outcome.lives if _lane(life.pool, life.worker) in set(lanes)])
    bars = []
    for phase in dict.fromkeys(base_phase(span.phase) for span in spans[:MOST_SPANS]):
        chosen = [span for span in spans[:MOST_SPANS] if base_phase(span.phase) == phase]
        style: dict[str, Any] = {"color": phase_colour(phase), "alpha": "alpha", "line_color": None}
        bars.append(plot.hbar("lane", 0.8, "start_h", "stop_h", source=_source(chosen), legend_label=phase, **style))
    tooltips = [("", "@phase, iteration @iteration: @outcome"), ("request", "@key"), ("lasts", "@seconds{0.0} s")]
    plot.add_tools(HoverTool(renderers=bars, tooltips=tooltips))
    for legend in plot.legend:
        legend.orientation, legend.click_policy = "horizontal", "hide"
        plot.add_layout(legend, "above")
    return plot


def _plot_lives(plot: Plot, lives: Sequence[WorkerLife]) -> None:
    """When each worker was there, and where it was lost."""
    lanes = [_lane(life.pool, life.worker) for life in lives]
    joined_h = [life.joined_s / SECONDS_PER_H for life in lives]
    left_h = [(life.left_s or life.joined_s) / SECONDS_PER_H for life in lives]
    plot.hbar(lanes, 0.95, joined_h, left_h, color=ALIVE, legend_label="there")
    gone = [index for index, life in enumerate(lives) if life.reason != "end"]
    if gone:
        style: dict[str, Any] = {"marker": "x", "size": 8, "color": LOST, "legend_label": "preempted"}
        plot.scatter([left_h[index] for index in gone], [lanes[index] for index in gone], **style)


def _source(spans: Sequence[Span]) -> ColumnDataSource:
    return ColumnDataSource(
        {
            "lane": [_lane(span.pool, span.worker) for span in spans],
            "start_h": [span.start_s / SECONDS_PER_H for span in spans],
            "stop_h": [span.stop_s / SECONDS_PER_H for span in spans],
            "seconds": [span.stop_s - span.start_s for span in spans],
            "phase": [span.phase for span in spans],
            "iteration": [span.iteration for span in spans],
            "outcome": [span.outcome for span in spans],
            "key": [span.key for span in spans],
            "alpha": [CALLED_OFF_ALPHA if span.outcome == "dropped" else 1.0 for span in spans],
        }
    )


def _lane(pool: str, worker: str) -> tuple[str, str]:
    """A place keeps its lane, whoever takes it."""
    return pool, worker.partition(RETURNED)[0]


def _natural(lane: tuple[str, str]) -> tuple[str, tuple[int, ...]]:
    """Workers in the order of their numbers: ``spot-9/1`` before ``spot-10/0``."""
    pool, worker = lane
    return pool, tuple(int(part) for part in worker.removeprefix(f"{pool}-").split("/"))


def _start(span: Span) -> float:
    return span.start_s
