"""Draws what every GPU does: a lane each, coloured by phase, with gangs joined and losses marked.

A browser gets a bar once, when the work is done; only bars of work in progress are sent again at each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d
from bokeh.models.widgets.groups import RadioButtonGroup

from cluster.dashboard.facts import Facts, Lane, lanes
from cluster.dispatch.snapshot import WorkerActivity
from spotlight.records import Span
from spotlight.report.palette import ALIVE, CALLED_OFF, CALLED_OFF_ALPHA, INK, LOST, base_phase, phase_colour
from spotlight.report.style import clock_below, empty_plot

SPANS_SENT = 4_000
"""Bars that a browser keeps; more make it slow."""
WINDOWS_S = {"1 min": 60.0, "5 min": 300.0, "30 min": 1800.0, "all": 1e9}
LABELLED = 40
"""Most lanes whose names can be read; with more, names are shown at the pointer only."""
LANE_MIN_PX = 1.0
"""Least height of a lane: of a thousand, waves are seen rather than lanes, and the panels below stay within reach."""
BAR = 0.36
"""Half of a lane's height, in lanes."""
ENDLESS = 1e9
"""Where bars end that have no end yet; the plot ends before."""
FORMINGS = 200
"""Gangs that are remembered, to join the bars of their members, which end at nearly the same time."""


class Lanes:
    """Every GPU as a lane over time, coloured by phase; the members of a gang are one bar over their lanes."""

    def __init__(self, facts: Facts, *, title: str = "") -> None:
        self._facts = facts
        self._sent, self._of = 0, facts.dispatch
        self._lives: list[Any] = []
        self._window_s = WINDOWS_S["5 min"]
        self._x_range = Range1d(start=0.0, end=1.0)
        self._y_range = FactorRange(factors=[], group_padding=0.5)
        self._right = 1.0
        self._formings: dict[str, list[Span]] = {}
        self._order: dict[Lane, int] = {}
        self.plot = empty_plot(160, x_range=self._x_range, y_range=self._y_range, tools="xpan,reset,save", title=title)
        self._style()
        self._alive, self._now = ColumnDataSource(_bars(())), ColumnDataSource(_columns((), NOW_COLUMNS))
        self._done = ColumnDataSource(_bars(()), name="lanes-done")
        self._joints = ColumnDataSource(_joints(()), name="lanes-joints")
        self._joints_now = ColumnDataSource(_joints(()))
        self._losses = ColumnDataSource({"lane": [], "at": [], "what": []}, name="lanes-losses")
        self._draw()
        choice = RadioButtonGroup(labels=list(WINDOWS_S), active=1, stylesheets=[":host { font-size: 12px; }"])
        choice.on_change("active", lambda _, __, active: self._look_back(list(WINDOWS_S.values())[active]))
        self.root = column(choice, self.plot, sizing_mode="stretch_width")

    def _style(self) -> None:
        plot = self.plot
        plot.ygrid.grid_line_color = None
        clock_below(plot)
        plot.xaxis.axis_label = "since the first worker joined\n(h:mm:ss; drag to look back)"
        plot.yaxis.group_text_color = INK
        plot.yaxis.group_text_font_size = "12px"
        plot.yaxis.group_label_orientation = "normal"
        plot.yaxis.separator_line_color = plot.yaxis.major_tick_line_color = plot.yaxis.axis_line_color = None

    def _draw(self) -> None:
        plot, style = self.plot, {"color": "colour", "alpha": "alpha", "line_color": None}
        plot.hbar("lane", 0.9, "start", "stop", source=self._alive, color=ALIVE, line_color=None)
        for joints in (self._joints, self._joints_now):
            plot.quad("start", "stop", "top", "bottom", source=joints, color="colour", alpha=1.0, line_color=None)
        bars = plot.hbar("lane", 2 * BAR, "start", "stop", source=self._done, **style)
        now = plot.hbar("lane", 2 * BAR, "start", ENDLESS, source=self._now, color="colour", line_color=None)
        crosses = plot.scatter("at", "lane", source=self._losses, marker="x", size=13, line_width=4, color=LOST)
        rows = [
            ("", "@what"),
            ("worker", "@worker (@pool)"),
            ("time", "@start{0.0} s, for @seconds{0.00} s"),
            ("key", "@key"),
        ]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=rows, visible=False))
        begun = [("", "@what"), ("since", "@start{0.0} s")]
        plot.add_tools(HoverTool(renderers=[now], tooltips=begun, visible=False))
        plot.add_tools(HoverTool(renderers=[crosses], tooltips=[("", "@what")], visible=False))

    def _look_back(self, window_s: float) -> None:
        self._window_s, self._right = window_s, self._end()
        self.update()

    def _end(self) -> float:
        """Where the plot ends now; a person may have dragged it."""
        end: Any = self._x_range.end
        return float(end)

    def update(self) -> None:
        now_s, zero_s = self._facts.clock(), self._facts.zero_s()
        if self._facts.has_run and self._facts.dispatch is not self._of:
            self._begin_anew()
        self._follow(now_s - zero_s)
        self._set_lanes(zero_s)
        self._send_spans(zero_s)
        doing = self._facts.doing()
        self._send_now(doing, zero_s)
        joints = _joints(self._current_joints(doing, zero_s))
        if joints != self._joints_now.data:
            self._joints_now.data = joints

    def _begin_anew(self) -> None:
        """Begin again for another run on the scheduler, whose spans are numbered from the first."""
        self._of, self._sent, self._lives = self._facts.dispatch, 0, []
        self._formings.clear()
        self._done.data, self._joints.data = _bars(()), _joints(())

    def _send_now(self, doing: Iterable[WorkerActivity], zero_s: float) -> None:
        """Bars of what is at work, without an end; sent when it has changed."""
        now = _columns((_current(each, zero_s) for each in doing if each.phase), NOW_COLUMNS)
        if now != self._now.data:
            self._now.data = now

    def _follow(self, right: float) -> None:
        """Scroll with time, unless a person has dragged the plot."""
        if self._end() == self._right:
            self._right = max(1.0, right)
            self._x_range.update(start=max(0.0, self._right - self._window_s), end=self._right)

    def _set_lanes(self, zero_s: float) -> None:
        lives = self._facts.lives()
        if lives == self._lives and not any(life.left_s for life in lives):
            return
        since_s = zero_s + max(0.0, self._right - self._window_s)
        shown = lanes(lives, since_s)
        if shown != list(self._order):
            self._order = {lane: number for number, lane in enumerate(shown)}
            self._y_range.factors = [*reversed(shown)]
            height, labelled = min(22.0, 640 / max(1, len(shown))), len(shown) <= LABELLED
            self.plot.height = round(92 + max(LANE_MIN_PX, height) * len(shown))
            self.plot.yaxis.major_label_text_font_size = "12px" if labelled else "0px"
        if lives != self._lives:
            self._lives = lives
            self._alive.data = _bars(
                _bar(
                    (life.pool, life.worker),
                    life.joined_s - zero_s,
                    ENDLESS if life.left_s is None else life.left_s - zero_s,
                )
                for life in lives
            )
            gone = [life for life in lives if life.was_taken]
            self._losses.data = {
                "lane": [(life.pool, life.worker) for life in gone],
                "at": [(life.left_s or 0.0) - zero_s for life in gone],
                "what": [
                    f"{life.worker}: {'lost without a notice' if life.reason == 'lost' else 'left on notice'}"
                    for life in gone
                ],
            }

    def _send_spans(self, zero_s: float) -> None:
        new = self._facts.shown_after(self._sent)[-SPANS_SENT:]
        if not new:
            return
        self._sent = new[-1].number
        self._done.stream(_bars(_past(shown.span, zero_s) for shown in new), rollover=SPANS_SENT)
        joints = []
        for shown in new:
            if shown.forming:
                known = self._formings.setdefault(shown.forming, [])
                joints += [joint for other in known if (joint := self._joint(shown.span, other, zero_s))]
                known.append(shown.span)
        if joints:
            self._joints.stream(_joints(joints), rollover=SPANS_SENT)
        for old in list(self._formings)[:-FORMINGS]:
            del self._formings[old]

    def _joint(self, first: Span, second: Span, zero_s: float) -> Mapping[str, Any] | None:
        """What joins the bars of two members, where their lanes are neighbours."""
        start, stop = max(first.start_s, second.start_s) - zero_s, min(first.stop_s, second.stop_s) - zero_s
        return self._between((first.pool, first.worker), (second.pool, second.worker), start, stop, first.phase)

    def _between(self, first: Lane, second: Lane, start: float, stop: float, phase: str) -> Mapping[str, Any] | None:
        above, below = sorted((self._order.get(first, -1), self._order.get(second, -1)))
        if above < 0 or below - above != 1 or first[0] != second[0] or stop <= start:
            return None
        upper, lower = (first, second) if self._order[first] == above else (second, first)
        return {
            "start": start,
            "stop": stop,
            "top": (*upper, -BAR + 0.02),
            "bottom": (*lower, BAR - 0.02),
            "colour": phase_colour(phase),
        }

    def _current_joints(self, doing: Iterable[WorkerActivity], zero_s: float) -> Iterable[Mapping[str, Any]]:
        gangs: dict[str, list[WorkerActivity]] = {}
        for member in doing:
            if member.forming and member.phase:
                gangs.setdefault(member.forming, []).append(member)
        for members in gangs.values():
            members.sort(key=lambda member: self._order.get((member.pool, member.worker), -1))
            for member, other in zip(members, members[1:], strict=False):
                start = max(member.since_s, other.since_s) - zero_s
                lanes_of = (member.pool, member.worker), (other.pool, other.worker)
                if joint := self._between(*lanes_of, start, ENDLESS, member.phase):
                    yield joint


def _bar(lane: Lane, start: float, stop: float, **more: Any) -> dict[str, Any]:
    said = {"colour": ALIVE, "alpha": 1.0, "what": "", "key": ""}
    return {
        "lane": lane,
        "start": start,
        "stop": stop,
        "seconds": stop - start,
        "pool": lane[0],
        "worker": lane[1],
        **said,
        **more,
    }


def _past(span: Span, zero_s: float) -> dict[str, Any]:
    called_off = span.outcome in CALLED_OFF
    return _bar(
        (span.pool, span.worker),
        span.start_s - zero_s,
        span.stop_s - zero_s,
        colour=phase_colour(span.phase),
        alpha=CALLED_OFF_ALPHA if called_off else 1.0,
        what=f"{base_phase(span.phase)}, iteration {span.iteration}: {span.outcome}",
        key=span.key,
    )


def _current(doing: WorkerActivity, zero_s: float) -> dict[str, Any]:
    notice = ", under notice" if doing.leaving else ""
    what = f"{base_phase(doing.phase)}, iteration {doing.iteration}: at work on {doing.worker}{notice}"
    lane = (doing.pool, doing.worker)
    return {"lane": lane, "start": doing.since_s - zero_s, "colour": phase_colour(doing.phase), "what": what}


BAR_COLUMNS = ("lane", "start", "stop", "seconds", "pool", "worker", "colour", "alpha", "what", "key")
NOW_COLUMNS = ("lane", "start", "colour", "what")
JOINT_COLUMNS = ("start", "stop", "top", "bottom", "colour")


def _bars(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return _columns(rows, BAR_COLUMNS)


def _joints(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return _columns(rows, JOINT_COLUMNS)


def _columns(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    found = list(rows)
    return {name: [row.get(name) for row in found] for name in names}
