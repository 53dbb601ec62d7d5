"""Draws the page's plots with Bokeh: reward, timeline, dollars and where they went, to hover over, drag and zoom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    RangeTool,
)
from bokeh.models.annotations import BoxAnnotation

from spotlight.market.ledger import AT_RESERVED_PRICES, Ledger
from spotlight.records import Interval, Span
from spotlight.report.facts import Facts
from spotlight.report.money import rows
from spotlight.report.palette import (
    ALIVE,
    CALLED_OFF,
    CALLED_OFF_ALPHA,
    INK,
    LOST,
    PHASE_COLOURS,
    POOL_COLOURS,
    phase_colour,
)
from spotlight.report.style import Plot, empty_plot, legend_above


def reward_plot(facts: Facts) -> Plot:
    """Rewards of trained, explored and held-out samples over weights versions."""
    plot = empty_plot(340, tools="xpan,box_zoom,reset,save", x_axis_label="weights version", y_axis_label="reward")
    plot.xaxis.ticker.min_interval = 1
    reward, explored, band = facts.curve("reward_mean"), facts.curve("explored_reward_mean"), facts.reward_band()
    if reward is not None:
        colour = PHASE_COLOURS["train"]
        if band is not None:
            plot.varea(list(band.index), band["low"], band["high"], color=colour, alpha=0.12, legend_label="± std")
        _hoverable_line(plot, reward, colour, "trained samples")
    if explored is not None:
        _hoverable_line(plot, explored, PHASE_COLOURS["explore"], "explored seeds", dash="dashed")
    if facts.validation:
        scores = pd.Series({line.version: line.score for line in facts.validation})
        _hoverable_line(plot, scores, INK, "validation", width=1, marker="diamond", size=13)
    legend_above(plot)
    return plot


POOL_PX, FEW_LANES = 60, 16
"""Height of a pool's name, beside its lanes."""
ABOVE_PX, GROUP_PADDING = 110, 0.6
"""Height of legend and axis in pixels; gap between pools, in lanes."""
Sources = Mapping[str, ColumnDataSource]
"""{phase: its data}, shared by all plots that show it."""


def timeline_plot(facts: Facts) -> Plot:
    """What every worker did, and below it the whole run with a window to drag.

    Of a crowded run, how many workers did what, and below it what some of them did in a few iterations.
    """
    if facts.is_crowded():
        closer = facts.closer()
        return column(
            _counts_plot(facts), _lanes_plot(closer, facts.zoom(), _sources(closer)), sizing_mode="stretch_width"
        )
    sources = _sources(facts)
    plot = _lanes_plot(facts, facts.zoom(), sources)
    if facts.zoom() == facts.whole:
        return plot
    overview = empty_plot(50 + min(12 * len(facts.lanes()), 140), tools="", y_range=plot.y_range, x_range=facts.whole)
    overview.yaxis.visible = overview.ygrid.visible = False
    _plot_lanes(overview, facts, sources, cross_px=7)
    overview.legend.visible = False
    window = RangeTool(x_range=plot.x_range)
    window.overlay.fill_color, window.overlay.fill_alpha = INK, 0.08
    window.overlay.line_color, window.overlay.line_alpha, window.overlay.line_dash = INK, 0.8, "solid"
    overview.add_tools(window)
    return column(plot, overview, sizing_mode="stretch_width")


def _counts_plot(facts: Facts) -> Plot:
    """How many workers were at each phase, one band upon the other, and a frame around the iterations of `zoom`."""
    at_s, counts = facts.counts()
    plot = empty_plot(280, tools="xpan,reset,save", x_range=facts.whole, y_axis_label="workers")
    plot.y_range.start = 0
    colours = [ALIVE if phase == "idle" else phase_colour(phase) for phase in counts]
    source = ColumnDataSource({"at": at_s, "all": np.sum(list(counts.values()), axis=0), **counts})
    plot.varea_stack(list(counts), x="at", color=colours, legend_label=list(counts), source=source)
    line = plot.line("at", "all", source=source, line_alpha=0)
    tooltips = [("at", "@at{0} s"), *((phase, f"@{{{phase}}}{{0.0}}") for phase in counts), ("all", "@all{0.0}")]
    plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips, mode="vline", visible=False))
    left, right = facts.zoom()
    _draw_breaks(plot, facts)
    plot.add_layout(BoxAnnotation(left=left, right=right, fill_alpha=0, line_color=INK, line_alpha=0.8))
    legend_above(plot)
    return plot


def _lanes_plot(facts: Facts, window: Interval, sources: Sources) -> Plot:
    """A lane per worker, which shows this stretch of time at first."""
    lanes = facts.lanes()[::-1]
    pools = Counter(pool for pool, _ in lanes)
    lane_px = max(14, min(36, 900 // len(lanes)), POOL_PX / min(pools.values()) if len(lanes) <= FEW_LANES else 0)
    plot = empty_plot(
        round(ABOVE_PX + lane_px * (len(lanes) + GROUP_PADDING * (len(pools) - 1))),
        tools="xpan,xbox_zoom,reset,save",
        y_range=FactorRange(factors=lanes, group_padding=GROUP_PADDING),
        x_range=window,
        x_axis_label=facts.time_axis(),
    )
    plot.ygrid.grid_line_color = None
    plot.yaxis.group_text_font_size = "12px"
    plot.yaxis.group_text_color = INK
    plot.yaxis.separator_line_color = plot.yaxis.major_tick_line_color = plot.yaxis.axis_line_color = None
    tooltips = [
        ("", "@phase, iteration @iteration: @outcome"),
        ("worker", "@worker (@pool)"),
        ("time", "@start_s{0.00} s, for @seconds{0.00} s"),
        ("key", "@key"),
    ]
    plot.add_tools(
        HoverTool(renderers=_plot_lanes(plot, facts, sources, cross_px=13), tooltips=tooltips, visible=False)
    )
    legend_above(plot)
    return plot


def money_plot(facts: Facts) -> Plot:
    """Dollars spent by pool over time, beside what the same useful seconds cost at reserved prices."""
    plot = empty_plot(280, tools="xpan,reset,save", x_axis_label=facts.time_axis(), y_axis_label="US dollars")
    plot.yaxis.formatter = NumeralTickFormatter(format="$0,0.00[00]")
    plot.y_range.start = 0
    at_s, pools, reserved_only = facts.money()
    total = np.sum(list(pools.values()), axis=0)
    source = ColumnDataSource({"at": at_s, "reserved_only": reserved_only, "total": total, **pools})
    names = list(pools)
    colours = [POOL_COLOURS[name] for name in names]
    plot.varea_stack(names, x="at", color=colours, alpha=0.8, legend_label=names, source=source)
    line = plot.line("at", "total", source=source, line_alpha=0)
    dashed: Any = {"color": LOST, "line_width": 2, "line_dash": "dashed"}
    _draw_breaks(plot, facts)
    plot.line("at", "reserved_only", source=source, **dashed, legend_label=AT_RESERVED_PRICES)
    rows = [("at", "@at{0} s"), *((name, f"@{name}{{$0,0.000}}") for name in names), ("together", "@total{$0,0.000}")]
    tooltips = [*rows, (AT_RESERVED_PRICES, "@reserved_only{$0,0.000}")]
    plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips, mode="vline", visible=False))
    legend_above(plot)
    return plot


def spending_plot(ledger: Ledger) -> Plot:
    """Dollars of each pool: useful work by phase, then, hatched, what was wasted."""
    pools = sorted({entry.pool for entry in ledger.entries}, reverse=True)  # the axis begins at the bottom
    is_free = not ledger.usd()
    plot = empty_plot(
        120 + 52 * len(pools),
        tools="save",
        y_range=FactorRange(factors=pools),
        x_axis_label="seconds of workers (nothing has a price)" if is_free else "US dollars",
    )
    plot.ygrid.grid_line_color = None
    plot.yaxis.axis_line_color = plot.yaxis.major_tick_line_color = None
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0" if is_free else "$0,0.00[00]")
    plot.x_range.start = 0
    left = dict.fromkeys(pools, 0.0)
    for row in rows(ledger):
        if row.is_sum:
            continue
        amounts = row.seconds if is_free else row.usd
        shown = [pool for pool in pools if amounts[pool]]
        right = {pool: left[pool] + amounts[pool] for pool in shown}
        source = ColumnDataSource(
            {
                "pool": shown,
                "left": [left[pool] for pool in shown],
                "right": list(right.values()),
                "usd": [row.usd[pool] for pool in shown],
                "seconds": [row.seconds[pool] for pool in shown],
            }
        )
        left |= right
        style: Any = {"color": row.colour, "line_color": "white"}
        if row.is_waste:
            style |= {"hatch_pattern": "/", "hatch_color": "white", "hatch_scale": 14, "hatch_weight": 1.2}
        bar = plot.hbar("pool", 0.62, "left", "right", source=source, **style, legend_label=row.name)
        tooltips = [("", f"{row.name}, @pool"), ("dollars", "@usd{$0,0.0000}"), ("time", "@seconds{0,0.0} s")]
        plot.add_tools(HoverTool(renderers=[bar], tooltips=tooltips, visible=False))
    legend_above(plot)
    return plot


def _hoverable_line(
    plot: Plot,
    values: pd.Series[float],
    colour: str,
    label: str,
    *,
    dash: str = "solid",
    width: float = 2.5,
    marker: str = "circle",
    size: int = 5,
) -> None:
    source = ColumnDataSource({"x": list(values.index), "y": values.to_numpy(dtype=float)})
    plot.line("x", "y", source=source, color=colour, line_width=width, line_dash=dash, legend_label=label)
    dots = plot.scatter("x", "y", source=source, color=colour, marker=marker, size=size, legend_label=label)
    plot.add_tools(HoverTool(renderers=[dots], tooltips=[(label, "@y{0.000}"), ("version", "@x")], visible=False))


def _sources(facts: Facts) -> Sources:
    return {phase: ColumnDataSource(_columns(spans)) for phase, spans in facts.by_phase().items()}


def _plot_lanes(plot: Plot, facts: Facts, sources: Sources, *, cross_px: int) -> list[Any]:
    """Draw every worker's lane; returns the bars of its work."""
    alive = facts.alive()
    plot.hbar(
        y=[lane for lane, _ in alive],
        left=[joined_s for _, (joined_s, _) in alive],
        right=[left_s for _, (_, left_s) in alive],
        height=0.9,
        color=ALIVE,
        legend_label="idle",
    )
    training = facts.training()
    plot.vstrip(
        x0=[start_s for start_s, _ in training],
        x1=[stop_s for _, stop_s in training],
        color=PHASE_COLOURS["train"],
        alpha=0.1,
        line_color=None,
    )
    _draw_breaks(plot, facts)
    bars = []
    for phase, source in sources.items():
        style: Any = {"color": phase_colour(phase), "alpha": "alpha", "line_color": None}
        bars.append(plot.hbar("lane", 0.72, "start_s", "stop_s", source=source, **style, legend_label=phase))
    gone, losses = facts.departures(), facts.losses()
    plot.rect([at_s for _, at_s in gone], [lane for lane, _ in gone], 3, 0.94, width_units="screen", color=LOST)
    if losses:
        cross: Any = {"marker": "x", "size": cross_px, "line_width": cross_px // 3, "color": LOST}
        plot.scatter([at_s for _, at_s in losses], [lane for lane, _ in losses], **cross, legend_label="preempted")
    return bars


def _draw_breaks(plot: Plot, facts: Facts) -> None:
    """Mark where stretches without a worker are left out."""
    if facts.breaks:
        plot.vspan(x=[at_s for at_s, _ in facts.breaks], color=INK, line_width=1.4, line_dash="dotted")


def _columns(spans: Sequence[Span]) -> dict[str, Any]:
    spans = sorted(spans, key=lambda span: span.outcome in CALLED_OFF)  # a legend shows the first
    alphas = [CALLED_OFF_ALPHA if span.outcome in CALLED_OFF else 1.0 for span in spans]
    return {
        **{name: [getattr(span, name) for span in spans] for name in ("worker", "pool", "key", "phase", "outcome")},
        **{name: np.array([getattr(span, name) for span in spans]) for name in ("iteration", "start_s", "stop_s")},
        "lane": [(span.pool, span.worker) for span in spans],
        "seconds": np.array([span.stop_s - span.start_s for span in spans]),
        "alpha": np.array(alphas),
    }
