"""How a Bokeh plot looks, in the report and on the live page alike."""

from __future__ import annotations

from typing import Any

from bokeh.models import CategoricalAxis, NoOverlap, NumeralTickFormatter, WheelZoomTool
from bokeh.plotting import figure

from spotlight.report.palette import AXIS, FAINT, INK, RULE

Plot = Any
"""One Bokeh figure or several; Bokeh's types know neither factors of two levels nor all of an axis's properties."""
WRAPPED = ":host { max-width: 100%; } .bk-grid.bk-grid { display: flex; flex-wrap: wrap; width: auto; gap: 2px 14px; }"
"""Has the names of a legend in as many rows as the plot's width needs."""


def empty_plot(height: int, **options: Any) -> Plot:
    """An empty plot in the style of the report and the live page."""
    plot: Plot = figure(height=height, sizing_mode="stretch_width", toolbar_location="right", **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.outline_line_color = None
    plot.grid.grid_line_color = RULE
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = AXIS
    plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_font = plot.axis.axis_label_text_font = "system-ui, sans-serif"
    plot.axis.major_label_text_font_size = plot.axis.axis_label_text_font_size = "12px"
    plot.axis.major_label_text_color = plot.axis.axis_label_text_color = FAINT
    plot.axis.axis_label_text_font_style = "normal"
    plot.xaxis.formatter.use_scientific = False  # Bokeh writes 100,000 seconds, 28 hours, as 1.000e+5
    for axis in plot.axis:
        if not isinstance(axis, CategoricalAxis):  # of names, none may be missing
            axis.major_label_policy = NoOverlap()
    wheel = WheelZoomTool(dimensions="width", modifiers="ctrl")  # without ctrl the wheel scrolls the page
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    return plot


def clock_below(plot: Plot) -> None:
    """Write the seconds of the horizontal axis as h:mm:ss, none of them twice."""
    plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    plot.xaxis.ticker.min_interval = 1


def legend_above(plot: Plot) -> None:
    """Put the legend above the plot; a click hides what it names."""
    for legend in plot.legend:
        legend.click_policy = "hide"
        legend.label_text_font = "system-ui, sans-serif"
        legend.label_text_font_size = "12px"
        legend.label_text_color = INK
        legend.border_line_color = None
        legend.orientation = "horizontal"
        legend.location = "top_left"
        legend.padding = legend.margin = 0
        legend.stylesheets = [WRAPPED]
        plot.add_layout(legend, "above")
