"""Draws the page's panels with Bokeh; each reads the facts when it is updated, and sends only what is new.

A panel has a ``root``, and an ``update`` that is called about once a second while the page is open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.widgets.markups import Div

from cluster.dashboard import text
from cluster.dashboard.facts import Facts, head_count
from cluster.dashboard.lanes import Lanes
from spotlight.market.ledger import AT_RESERVED_PRICES
from spotlight.report.palette import FAINT, INK, LOST, PHASE_COLOURS, POOL_COLOURS
from spotlight.report.style import Plot, clock_below, empty_plot, legend_above

POOLS = {"reserved": "dashed", "spot": "solid", "reward": "dotted"}
"""{pool: dash of its lines}. Optional pools are shown once they have had workers."""
RARE = ("reward",)
STEPS_MAX = 600
"""Most arrivals and departures of workers that are drawn; of more, every second or third."""


class _Redrawn(ABC):
    """A panel that is drawn anew when there are new rows of the driver."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._seen = -1

    def update(self) -> None:
        if (seen := self._facts.changes.total()) != self._seen:
            self._seen = seen
            self._redraw()

    @abstractmethod
    def _redraw(self) -> None: ...


class Pools:
    """GPUs by pool over time, and the dollars spent, beside what the same useful seconds cost at reserved prices."""

    HEIGHT = 210

    def __init__(self, facts: Facts, *, title: str = "") -> None:
        self._facts = facts
        self._money_s = -1.0
        self._drawn = -1, 0, 0.0
        """What the steps were drawn from: number of lives, of ended ones, and the first time."""
        self._steps = ColumnDataSource({"at": [], **{pool: [] for pool in POOLS}})
        self._spent = ColumnDataSource({"at": [], "total": [], **{pool: [] for pool in POOLS}})
        self._reserved_only = ColumnDataSource({"at": [], "usd": [], "spent": []})
        self._hidden: dict[str, list[Any]] = {}
        """{pool without workers so far: its lines, areas and legends}"""
        self.root = column(self._counts(title), self._dollars(), sizing_mode="stretch_width")

    def _hide_if_rare(self, pool: str, plot: Plot, drawn: Any) -> None:
        if pool in RARE:
            (item,) = (item for item in plot.legend[0].items if item.label.value == pool)
            self._hidden.setdefault(pool, []).extend([drawn, item])
            drawn.visible = item.visible = False

    def _counts(self, title: str) -> Plot:
        plot = empty_plot(150, tools="xpan,reset,save", title=title, y_axis_label="GPUs alive")
        clock_below(plot)
        plot.y_range.start = 0
        for pool, dash in POOLS.items():
            style: Any = {"color": POOL_COLOURS[pool], "line_width": 2.5, "line_dash": dash}
            line = plot.step("at", pool, source=self._steps, mode="after", name=pool, legend_label=pool, **style)
            self._hide_if_rare(pool, plot, line)
        plot.yaxis.ticker.min_interval = 1
        legend_above(plot)
        self._count_range = plot.x_range
        return plot

    def _dollars(self) -> Plot:
        plot = empty_plot(
            self.HEIGHT,
            tools="xpan,reset,save",
            x_axis_label="since the first worker joined",
            y_axis_label="US dollars spent",
        )
        plot.x_range = self._count_range
        clock_below(plot)
        plot.yaxis.formatter = NumeralTickFormatter(format="$0,0.00[00]")
        colours = [POOL_COLOURS[pool] for pool in POOLS]
        names = list(POOLS)
        areas = plot.varea_stack(names, x="at", color=colours, alpha=0.8, legend_label=names, source=self._spent)
        for pool, area in zip(POOLS, areas, strict=True):
            self._hide_if_rare(pool, plot, area)
        dashed: Any = {"color": LOST, "line_width": 2, "line_dash": "dashed"}
        beside = plot.line("at", "usd", source=self._reserved_only, **dashed, legend_label=AT_RESERVED_PRICES)
        line = plot.line("at", "total", source=self._spent, line_alpha=0)
        rows = [(pool, f"@{pool}{{$0,0.0000}}") for pool in POOLS]
        plot.add_tools(HoverTool(renderers=[line], tooltips=rows, mode="vline", visible=False))
        at_end = [(AT_RESERVED_PRICES, "@usd{$0,0.0000}"), ("spent by then", "@spent{$0,0.0000}")]
        plot.add_tools(HoverTool(renderers=[beside], tooltips=at_end, visible=False))
        legend_above(plot)
        return plot

    def update(self) -> None:
        zero_s, now_s = self._facts.zero_s(), self._facts.clock()
        self._count(zero_s, now_s)
        for pool in {life.pool for life in self._facts.lives()} & self._hidden.keys():
            for drawn in self._hidden.pop(pool):
                drawn.visible = True
        money = [each for each in self._facts.money if each.at_s >= zero_s]
        if money and money[-1].at_s != self._money_s:
            self._money_s = money[-1].at_s
            self._spent.data = {
                "at": [each.at_s - zero_s for each in money],
                "total": [sum(each.usd.values()) for each in money],
                **{pool: [each.usd.get(pool, 0.0) for each in money] for pool in POOLS},
            }
            ends = {
                each.ledger_s: each for each in money if each.ledger_s >= zero_s and each.usd_reserved_only
            }.values()
            self._reserved_only.data = {
                "at": [each.ledger_s - zero_s for each in ends],
                "usd": [each.usd_reserved_only for each in ends],
                "spent": [each.ledger_usd for each in ends],
            }

    def _count(self, zero_s: float, now_s: float) -> None:
        """Draw the steps anew when a worker came or went; else only move the last point."""
        lives = self._facts.lives()
        drawn = len(lives), sum(life.left_s is not None for life in lives), zero_s
        if drawn == self._drawn and lives:
            self._steps.patch({"at": [(len(self._steps.data["at"]) - 1, now_s - zero_s)]})
            return
        self._drawn, steps = drawn, head_count(lives, list(POOLS))
        if steps:
            every = -(-len(steps) // STEPS_MAX)
            steps = [*steps[:-1:every], steps[-1], (now_s, steps[-1][1])]
        self._steps.data = {
            "at": [at_s - zero_s for at_s, _ in steps],
            **{pool: [counts[pool] for _, counts in steps] for pool in POOLS},
        }


class Learning(_Redrawn):
    """Rewards and validation scores; reward variance kept against equal shares; whether stale rewards rank well."""

    CURVES = (
        *("reward_mean", "explored_reward_mean", "rank_correlation"),
        *("fidelity", "variance_kept", "variance_equal"),
    )
    NEEDED = ("reward_mean", "variance_kept", "rank_correlation")
    """Of each plot, the curve without which it is not shown: a run that explores nothing has the first alone."""

    def __init__(self, facts: Facts, *, title: str = "") -> None:
        super().__init__(facts)
        self._rows = ColumnDataSource({name: [] for name in ("k", "low", "high", *self.CURVES)})
        self._scores = ColumnDataSource({"k": [], "score": []})
        self._counts: dict[str, int] = {}
        """{kind: changes that are drawn}"""
        nothing = "<p>No iteration is finished yet.</p>"
        self._said = Div(text=nothing, stylesheets=[text.TABLE], sizing_mode="stretch_width")
        self._plots = self._rewards(title), self._variances(), self._ranks()
        self.root = column(self._said, *self._plots, sizing_mode="stretch_width")

    def _rewards(self, title: str) -> Plot:
        plot = empty_plot(220, tools="xpan,reset,save", title=title, y_axis_label="reward")
        plot.xaxis.axis_label = "iteration; for validation, weights version"
        train = PHASE_COLOURS["train"]
        plot.varea("k", "low", "high", source=self._rows, color=train, alpha=0.12, legend_label="± std")
        self._line(plot, "reward_mean", train, "trained samples")
        self._line(plot, "explored_reward_mean", PHASE_COLOURS["explore"], "explored seeds", "dashed")
        plot.line("k", "score", source=self._scores, color=INK, line_width=1, legend_label="validation")
        marks = plot.scatter(
            "k", "score", source=self._scores, marker="diamond", size=12, color=INK, legend_label="validation"
        )
        plot.add_tools(
            HoverTool(renderers=[marks], tooltips=[("validation", "@score{0.000}"), ("version", "@k")], visible=False)
        )
        legend_above(plot)
        self._x_range = plot.x_range
        plot.xaxis.ticker.min_interval = 1
        return plot

    def _variances(self) -> Plot:
        plot = self._small("variance")
        self._line(plot, "variance_kept", PHASE_COLOURS["explore"], "kept by the planner")
        self._line(plot, "variance_equal", FAINT, "by equal shares (imagined)", "dashed")
        plot.y_range.start = 0
        legend_above(plot)
        return plot

    def _ranks(self) -> Plot:
        plot = self._small("ranking")
        plot.y_range = Range1d(start=-0.05, end=1.05)
        self._line(plot, "rank_correlation", PHASE_COLOURS["rollout"], "rank correlation")
        self._line(plot, "fidelity", PHASE_COLOURS["train"], "fidelity that the planner believes in", "dashed")
        legend_above(plot)
        return plot

    def _small(self, label: str) -> Plot:
        plot = empty_plot(135, tools="xpan,reset,save", x_range=self._x_range, y_axis_label=label)
        plot.xaxis.ticker.min_interval = 1
        return plot

    def _line(self, plot: Plot, name: str, colour: str, label: str, dash: str = "solid") -> None:
        plot.line("k", name, source=self._rows, color=colour, line_width=2.5, line_dash=dash, legend_label=label)
        dots = plot.scatter("k", name, source=self._rows, color=colour, size=5, legend_label=label)
        plot.add_tools(
            HoverTool(renderers=[dots], tooltips=[(label, f"@{name}{{0.0000}}"), ("iteration", "@k")], visible=False)
        )

    def _redraw(self) -> None:
        if self._is_new("iteration"):
            self._draw_iterations()
        if self._is_new("validation"):
            scores = self._facts.rows("validation")
            self._scores.data = {"k": [row["id"] for row in scores], "score": [row["score"] for row in scores]}

    def _is_new(self, kind: str) -> bool:
        count = self._facts.changes[kind]
        is_new, self._counts[kind] = count != self._counts.get(kind), count
        return is_new

    def _draw_iterations(self) -> None:
        rows, nothing = self._facts.rows("iteration"), float("nan")
        self._said.visible = not rows
        for plot, curve in zip(self._plots, self.NEEDED, strict=True):
            plot.visible = any(curve in row for row in rows)  # else it is blank, but for its legend
        data: dict[str, Any] = {name: [row.get(name, nothing) for row in rows] for name in self.CURVES}
        data["k"] = [row["id"] for row in rows]
        data["low"] = [row["reward_mean"] - row["reward_std"] for row in rows]
        data["high"] = [row["reward_mean"] + row["reward_std"] for row in rows]
        self._rows.data = data


class Planner(_Redrawn):
    """Candidates that exploration tried of each prompt, in the latest iteration that it chose seeds for."""

    def __init__(self, facts: Facts, *, title: str = "") -> None:
        super().__init__(facts)
        names = ("y", "tried", "spread", "reward", "colour", "prompt", "what")
        self._source = ColumnDataSource({name: [] for name in names})
        self._range = FactorRange(factors=[])
        self._said = Div(text="", stylesheets=[text.TABLE], sizing_mode="stretch_width")
        self.plot = plot = empty_plot(
            260, tools="save", y_range=self._range, x_axis_label="candidate seeds scored", title=title
        )
        plot.ygrid.grid_line_color = None
        plot.x_range.start = 0
        plot.yaxis.major_tick_line_color = plot.yaxis.axis_line_color = None
        bars = plot.hbar("y", 0.7, 0, "tried", source=self._source, color="colour", line_color=None)
        rows = [
            ("", "@prompt"),
            ("scored", "@tried"),
            ("mean reward", "@reward{0.000}"),
            ("spread", "@spread{0.000}"),
            ("", "@what"),
        ]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=rows, visible=False))
        self.root = column(self._said, plot, sizing_mode="stretch_width")

    def _redraw(self) -> None:
        latest = self._facts.latest("prompts")
        rows = list(reversed(latest.get("prompts", [])))
        names = [_label(row) for row in rows]
        self._range.factors = names
        self.plot.height = 60 + 15 * max(4, len(rows))
        self.plot.visible = bool(rows)
        self._source.data = {
            "y": names,
            "tried": [row["tried"] for row in rows],
            "spread": [row["spread"] for row in rows],
            "reward": [row["reward"] for row in rows],
            "colour": [PHASE_COLOURS["explore"] if row["kept"] else PHASE_COLOURS["explore-score"] for row in rows],
            "prompt": [row["prompt"] or f"prompt {row['id']}" for row in rows],
            "what": ["kept" if row["kept"] else "not kept" for row in rows],
        }
        self._said.text = _spent(latest) if latest else "<p>Nothing was explored yet.</p>"


def _spent(latest: Mapping[str, Any]) -> str:
    k, scored, dropped, prompts = (int(latest[name]) for name in ("id", "scored", "dropped", "of"))
    return (
        f"<p>Iteration <b>{k}</b>: <b>{scored}</b> seeds scored, {dropped} called off, {prompts} prompts. "
        "Darker: seeds of it were kept.</p>"
    )


def _label(row: Mapping[str, Any]) -> str:
    """Label of a prompt, unique within its plot."""
    wanted = text.target(row["prompt"]) if row["prompt"] else ""
    return f"{wanted[:18]}{'…' if len(wanted) > 18 else ''} #{row['id']}" if wanted else f"#{row['id']}"


class Said(ABC):
    """A panel of HTML, sent when it has changed."""

    STYLE = ""

    def __init__(self, facts: Facts, *, title: str = "") -> None:
        self._facts = facts
        self._div = Div(text="", stylesheets=[self.STYLE], sizing_mode="stretch_width")
        self.root = self._div

    def update(self) -> None:
        said = self._say()
        if said != self._div.text:
            self._div.text = said

    @abstractmethod
    def _say(self) -> str: ...


class Cards(Said):
    """The run in a few numbers."""

    STYLE = text.CARDS

    def _say(self) -> str:
        return text.cards(self._facts)


class Recoveries(Said):
    """Losses, and how long until the work went on."""

    STYLE = text.TABLE

    def _say(self) -> str:
        return text.recovery_table(self._facts.recoveries(), self._facts.zero_s())


class Images(Said):
    """The newest images, and the best and the worst kept seeds."""

    STYLE = text.IMAGES

    def _say(self) -> str:
        return text.gallery(self._facts)


PANELS: Mapping[str, tuple[Any, str]] = {
    "cards": (Cards, ""),
    "lanes": (Lanes, "What every GPU does"),
    "pools": (Pools, "Pools and prices"),
    "learning": (Learning, "Reward, variance kept, and ranking fidelity"),
    "planner": (Planner, "What the planner spends per prompt"),
    "recoveries": (Recoveries, "Recoveries"),
    "images": (Images, "Newest images"),
}
"""{name: (panel, title)}"""
