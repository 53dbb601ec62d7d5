"""Turns a run directory into one page that explains the run, and the pictures for a README.

Reads what other code wrote and computes nothing that training depends on. The page needs no network and
no server. A run that stopped early gives a page that says what is missing; only a directory that is no run is an error.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TypeVar
from zipfile import BadZipFile

import matplotlib as mpl
import numpy as np
import pandas as pd
from bokeh.embed import components
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    Model,
    NumeralTickFormatter,
    RangeTool,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import Resources
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from spotlight import config
from spotlight.costs import (
    SECONDS_PER_H,
    Span,
    Window,
    WorkerLife,
    busy_intervals,
    dollars,
    life_from_json,
    pool_seconds,
    reserved_only_usd,
    span_from_json,
    spot_utilisation,
    useful,
)
from spotlight.records import SpotlightError

PHASE_COLOURS = {
    "rollout": "#3f7fd6",
    "score": "#a9cbf3",
    "advantage": "#8b95a7",
    "train": "#5546a8",
    "publish": "#b56bcb",
    "explore": "#f0991c",
    "explore-score": "#f8d08a",
    "allocate": "#b9690b",
    "select": "#7d4a0c",
    "validate": "#5f9e94",
}
"""Blue makes samples, violet learns from them, amber explores: the same in every picture of the project."""
ALIASES = {"refill": "rollout", "validate-score": "validate", "validate-images": "validate"}
"""Phases that are a part of another one, or its work done again."""
POOL_COLOURS = {"reserved": "#475569", "spot": "#1f9e8f"}
OTHER, LOST, INK, FAINT, ALIVE = "#c3c9d2", "#d3323a", "#1d2433", "#6b7485", "#e9ecf1"
CALLED_OFF_ALPHA = 0.4
"""Of work that was dropped or stopped, so that what counted stands out."""

GRID_COLUMNS, GRID_MOST = 8, 32
"""Validation images in a row and in all: more cannot be told apart on a page 1,180 px wide."""

METRICS = {
    "reward_mean": "reward of the samples that were trained on",
    "reward_std": "their spread: what the advantage lives on",
    "explored_reward_mean": "reward of all seeds tried, drawn with weights one version old",
    "rank_correlation": "Spearman, explored against regenerated rewards: does stale ranking hold? 1 is perfect",
    "zero_std_ratio": "share of groups whose rewards are all equal: nothing to learn from them",
    "seeds_scored": "candidate seeds scored before training ended",
    "seeds_dropped": "candidate seeds called off by the end of training",
    "loss": "of the last update",
    "grad_norm": "before clipping",
    "log_prob_difference": "|Δ log-prob|, trainer against worker: near 0, or they disagree",
    "ratio": "of the new policy to the old one",
    "clip_fraction": "share of samples outside the clip range",
    "spot_utilisation": "busy share of the seconds that spot workers were alive",
    "preemptions": "spot workers lost",
    "usd": "dollars, idle time included",
}
FILES = {
    "config.toml": "the settings, every default written out",
    "history.jsonl": "metrics of every iteration",
    "validation.jsonl": "validation scores; their images are in images/",
    "spans.jsonl": "what every worker did, and when",
    "workers.jsonl": "when every worker came and went",
    "summary.json": "the numbers at the top of this page",
    "images": "validation images, and this page's pictures as PNG",
    "weights": "every weights version, as safetensors",
    "latents": "committed denoising steps, as Zarr",
}


Record = TypeVar("Record")
Plot = Any
"""A Bokeh figure; Bokeh's types know neither factors of two levels nor all of an axis's properties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """All that a run directory says, and what it should say but does not."""

    dir: Path
    settings: config.Config
    history: pd.DataFrame
    validation: list[dict[str, Any]]
    spans: list[Span]
    workers: list[WorkerLife]
    summary: dict[str, Any]
    window: Window
    """First to last moment that anything is known of, Unix seconds."""
    missing: list[str]

    @property
    def prices(self) -> dict[str, float]:
        pools = self.settings.pools
        return {"reserved": pools.reserved.usd_per_h, "spot": pools.spot.usd_per_h}


def phase_colour(phase: str) -> str:
    """The phase's colour in every picture of the project; grey where it has none."""
    return PHASE_COLOURS.get(base_phase(phase), OTHER)


def base_phase(phase: str) -> str:
    """The phase as people count it: ``explore-r2`` is a round of ``explore``, a refill is a rollout."""
    phase = re.sub(r"-r\d+$", "", phase)
    return ALIASES.get(phase, phase)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file yet.

    A last line that a dying writer left torn is ignored.

    Raises:
        SpotlightError: a line that is not the last is not JSON.
    """
    if not path.exists():
        return []
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    values = []
    for number, line in lines:
        try:
            values.append(json.loads(line))
        except ValueError as error:
            if number == lines[-1][0]:
                break
            raise SpotlightError(f"{path}:{number}: not JSON ({error}); restore the file or delete the line") from None
    return values


def history_frame(run_dir: Path) -> pd.DataFrame:
    """Metrics and measurements of every finished iteration, one column each, indexed by iteration.

    Raises:
        SpotlightError: the directory is not a run, or its history is damaged.
    """
    _require_run(run_dir)
    rows = {}
    for line in read_jsonl(run_dir / "history.jsonl"):
        plain = {name: value for name, value in line.items() if name not in ("metrics", "measured")}
        rows[line["iteration"]] = plain | line.get("metrics", {}) | line.get("measured", {})
    frame = pd.DataFrame.from_records([rows[iteration] for iteration in sorted(rows)])
    return frame.set_index("iteration") if rows else pd.DataFrame(index=pd.Index([], name="iteration"))


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` and the PNG files that the run has data for; return the page's path.

    The pictures are ``images/reward.png``, ``images/timeline.png`` and ``images/before-after.png``.

    Raises:
        SpotlightError: the directory is not a run, or one of its files is damaged.
    """
    run = _load(run_dir)
    images = run_dir / "images"
    images.mkdir(exist_ok=True)
    with _pictures_look_alike():
        grid = _draw_grid(run)
        for name, picture in (
            ("reward", _draw_reward(run)),
            ("timeline", _draw_timeline(run)),
            ("before-after", grid),
        ):
            if picture is not None:
                picture.savefig(images / f"{name}.png", dpi=160, facecolor="white")
    page = run_dir / "report.html"
    page.write_text(_page(run, images / "before-after.png" if grid else None), encoding="utf-8")
    return page


def _require_run(run_dir: Path) -> None:
    if not (run_dir / config.RESOLVED).is_file():
        raise SpotlightError(
            f"{run_dir}: not a run directory, it has no {config.RESOLVED}; "
            "give the directory that the run printed when it started"
        )


def _load(run_dir: Path) -> _Run:
    history = history_frame(run_dir)
    validation = read_jsonl(run_dir / "validation.jsonl")
    spans = _records(run_dir / "spans.jsonl", span_from_json)
    # A worker may have a line when it joins and one when it leaves: the later one knows more.
    lives = {(life.worker, life.joined_s): life for life in _records(run_dir / "workers.jsonl", life_from_json)}
    workers = list(lives.values())
    summary = _summary(run_dir / "summary.json")
    absent = {
        "history.jsonl: no iteration has finished, so there is no reward curve": not len(history),
        "validation.jsonl: nothing was validated, so there is no score and no image": not validation,
        "validation.jsonl: validated only once, so there is no score after training": len(validation) == 1,
        "spans.jsonl: no work was recorded, so there is no timeline": not spans,
        "workers.jsonl: no worker was recorded, so there are no dollars": not workers,
        "summary.json: the run has not ended; the numbers below are worked out from the other files": not summary,
    }
    moments = [
        *(moment for span in spans for moment in (span.start_s, span.stop_s)),
        *(moment for life in workers for moment in (life.joined_s, life.left_s) if moment is not None),
        *(line["at_s"] for line in validation),
    ]
    return _Run(
        dir=run_dir,
        settings=config.load(run_dir / config.RESOLVED),
        history=history,
        validation=validation,
        spans=spans,
        workers=workers,
        summary=summary,
        window=(min(moments), max(moments)) if moments else (0.0, 0.0),
        missing=[text for text, is_absent in absent.items() if is_absent],
    )


def _records(path: Path, parse: Callable[[Mapping[str, Any]], Record]) -> list[Record]:
    try:
        return [parse(line) for line in read_jsonl(path)]
    except KeyError as error:
        raise SpotlightError(f"{path}: a line has no field {error}; restore the file or delete the line") from None


def _summary(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError as error:
        raise SpotlightError(f"{path}: not JSON ({error}); delete it, the report does without") from None


# What is drawn, whichever library draws it.


def _lanes(run: _Run) -> list[tuple[str, str]]:
    """``(pool, worker)`` of every lane, reserved workers first, then by name with numbers in order."""
    workers = {(span.pool, span.worker) for span in run.spans} | {(life.pool, life.worker) for life in run.workers}

    def order(lane: tuple[str, str]) -> tuple[bool, str, list[tuple[int, str]]]:
        pool, worker = lane
        return pool != "reserved", pool, [(int(part or 0), text) for part, text in re.findall(r"(\d+)|(\D+)", worker)]

    return sorted(workers, key=order)


def _phases(run: _Run) -> list[str]:
    """The phases that the run had, in the order of an iteration, unknown ones last."""
    known = list(PHASE_COLOURS)
    found = {base_phase(span.phase) for span in run.spans}
    return sorted(found, key=lambda phase: (known.index(phase) if phase in known else len(known), phase))


def _zoom(run: _Run) -> Window:
    """About four iterations worth a closer look, in seconds since the start: around the first loss, else the middle."""
    whole = (0.0, run.window[1] - run.window[0])
    ends = sorted({span.iteration: span.stop_s for span in run.spans if span.phase == "train"}.values())
    if len(ends) <= 5:
        return whole
    losses = [span.stop_s for span in run.spans if span.outcome == "lost"]
    middle = losses[0] if losses else ends[len(ends) // 2]
    at = max(2, min(int(np.searchsorted(ends, middle)), len(ends) - 3))
    return ends[at - 2] - run.window[0], ends[at + 2] - run.window[0]


def _departures(run: _Run) -> list[tuple[WorkerLife, float]]:
    """Workers that went before the run's end, and when, in seconds since the start."""
    return [
        (life, life.left_s - run.window[0])
        for life in run.workers
        if life.left_s is not None and life.reason in ("lost", "left")
    ]


def _losses(run: _Run) -> list[tuple[float, tuple[str, str]]]:
    """When, in seconds since the start, and in which lane a preemption struck: at the lost work where there was any."""
    struck = [(span.stop_s - run.window[0], (span.pool, span.worker)) for span in run.spans if span.outcome == "lost"]
    workers = {lane for _, lane in struck}
    idle = [(left, (life.pool, life.worker)) for life, left in _departures(run)]
    return struck + [(left, lane) for left, lane in idle if lane not in workers]


def _money(run: _Run) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Seconds since the start, dollars spent by then in each pool, and the reserved-only price of the work by then."""
    start_s, stop_s = run.window
    at_s = np.linspace(start_s, stop_s, 120)

    def spent(intervals: Iterable[Window], usd_per_h: float) -> NDArray[np.float64]:
        seconds = np.zeros_like(at_s)
        for begin_s, end_s in intervals:
            seconds += np.clip(at_s - begin_s, 0, end_s - begin_s)
        return seconds / SECONDS_PER_H * usd_per_h

    pools = {
        pool: spent(
            ((w.joined_s, stop_s if w.left_s is None else w.left_s) for w in run.workers if w.pool == pool), usd
        )
        for pool, usd in run.prices.items()
    }
    busy = [interval for worker in busy_intervals(useful(run.spans)).values() for interval in worker]
    return at_s - start_s, pools, spent(busy, run.prices["reserved"])


def _curve(run: _Run, name: str) -> pd.Series[float] | None:
    """A metric over iterations, where the run has it at all."""
    if name not in run.history:
        return None
    values = pd.to_numeric(run.history[name]).dropna()
    return values if len(values) else None


def _images(run: _Run, line: Mapping[str, Any]) -> tuple[NDArray[np.uint8], list[str]] | None:
    """Images (B, height, width, 3) and prompts of one validation; None where the file cannot be read."""
    try:
        with np.load(run.dir / line["images"]) as file:
            return file["images"], [str(text) for text in file["texts"]]
    except (OSError, KeyError, ValueError, BadZipFile):
        return None


# Pictures, with matplotlib.


@contextmanager
def _pictures_look_alike() -> Iterator[None]:
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": "#b4bac5",
        "axes.labelcolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "grid.color": "#eceef2",
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        yield


def _draw_reward(run: _Run) -> Figure | None:
    reward, spread, explored = (_curve(run, name) for name in ("reward_mean", "reward_std", "explored_reward_mean"))
    if reward is None and not run.validation:
        return None
    picture = Figure(figsize=(9, 4), layout="constrained")
    ax = picture.subplots()
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    if reward is not None:
        if spread is not None:
            ax.fill_between(
                reward.index, reward - spread, reward + spread, color=PHASE_COLOURS["train"], alpha=0.12, lw=0
            )
        ax.plot(reward.index, reward, color=PHASE_COLOURS["train"], lw=2.2, label="trained samples (mean ± std)")
    if explored is not None:
        ax.plot(
            explored.index, explored, color=PHASE_COLOURS["explore"], lw=1.8, ls=(0, (4, 2)), label="explored seeds"
        )
    if run.validation:
        versions, scores = zip(*((line["version"], line["score"]) for line in run.validation), strict=True)
        ax.plot(versions, scores, "D-", color=INK, lw=1, ms=6, label="validation (held-out prompts)")
        for version, score in {(versions[0], scores[0]), (versions[-1], scores[-1])}:
            ax.annotate(
                f"{score:.2f}", (version, score), (0, 9), textcoords="offset points", ha="center", weight="bold"
            )
    ax.set(title="Reward", xlabel="weights version", ylabel="reward")
    ax.margins(x=0.03)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="lower right")
    return picture


def _draw_timeline(run: _Run) -> Figure | None:
    if not run.spans:
        return None
    whole = (0.0, run.window[1] - run.window[0])
    windows = list(dict.fromkeys([whole, _zoom(run)]))
    lanes = _lanes(run)
    lane_in = max(0.12, min(0.34, 6 / len(lanes)))
    picture = Figure(figsize=(13, 1.3 + len(windows) * (0.75 + lane_in * len(lanes))), layout="constrained")
    axes = picture.subplots(len(windows), 1, squeeze=False)[:, 0]
    for ax, window in zip(axes, windows, strict=True):
        _draw_lanes(ax, run, lanes, window)
    axes[0].set_title("What every worker did")
    axes[-1].set_xlabel("seconds since the start")
    if len(windows) > 1:
        axes[0].axvspan(*windows[1], fill=False, edgecolor=INK, lw=1.2, zorder=5)
        axes[1].set_title(f"Closer: {windows[1][0]:.0f} s to {windows[1][1]:.0f} s", fontsize=10)
    handles: list[Artist] = [Patch(color=phase_colour(phase), label=phase) for phase in _phases(run)]
    handles.append(Patch(color=ALIVE, label="idle"))
    if _losses(run):
        handles.append(Line2D([], [], color=LOST, marker="X", mec="white", ms=9, lw=0, label="preempted"))
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.1, columnspacing=1.4)
    return picture


def _draw_lanes(ax: Axes, run: _Run, lanes: Sequence[tuple[str, str]], window: Window) -> None:
    """One row per worker, seconds since the start, the pools set apart by a gap."""
    start_s = run.window[0]
    pools = list(dict.fromkeys(pool for pool, _ in lanes))
    row = {lane: index + 0.5 * pools.index(lane[0]) for index, lane in enumerate(lanes)}
    for life in run.workers:
        left_s = run.window[1] if life.left_s is None else life.left_s
        ax.broken_barh(
            [(life.joined_s - start_s, left_s - life.joined_s)],
            (row[life.pool, life.worker] - 0.44, 0.88),
            color=ALIVE,
            lw=0,
            zorder=0.5,
        )
    bars: defaultdict[tuple[float, str, bool], list[Window]] = defaultdict(list)
    for span in run.spans:
        called_off = span.outcome in ("dropped", "stopped")
        bar = (span.start_s - start_s, span.stop_s - span.start_s)
        bars[row[span.pool, span.worker], phase_colour(span.phase), called_off].append(bar)
        if span.phase == "train":
            ax.axvspan(bar[0], bar[0] + bar[1], color=phase_colour("train"), alpha=0.1, lw=0, zorder=0.8)
    for (middle, colour, called_off), where in bars.items():
        alpha = CALLED_OFF_ALPHA if called_off else 1
        ax.broken_barh(where, (middle - 0.36, 0.72), color=colour, alpha=alpha, lw=0)
    for lost, lane in _losses(run):
        ax.plot(lost, row[lane], "X", color=LOST, mec="white", ms=9, zorder=6)
    for life, left in _departures(run):
        middle = row[life.pool, life.worker]
        ax.vlines(left, middle - 0.46, middle + 0.46, color=LOST, lw=2.5)
    ax.set_yticks([row[lane] for lane in lanes], [worker for _, worker in lanes])
    for label, (pool, _) in zip(ax.get_yticklabels(), lanes, strict=True):
        label.set_color(POOL_COLOURS.get(pool, INK))
        label.set_fontweight("bold")
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=window, ylim=(max(row.values()) + 0.6, -0.6))


def _draw_grid(run: _Run) -> Figure | None:
    """Each validation prompt's target, its image before and after training, and their rewards."""
    ends = run.validation[:1] + run.validation[1:][-1:]
    shown = [(line, found) for line in ends if (found := _images(run, line)) is not None]
    if not shown:
        return None
    count = min(GRID_MOST, len(shown[0][1][0]))
    columns = min(GRID_COLUMNS, count)
    height_px, width_px = shown[0][1][0].shape[1:3]
    cell_in, label_in, title_in, reward_in = 12.2 / GRID_COLUMNS, 0.8, 0.4, 0.26
    image_in = (cell_in - 0.1) * height_px / width_px
    block_in = title_in + len(shown) * (image_in + reward_in)
    width_in, height_in = label_in + cell_in * columns, block_in * -(-count // columns)
    picture = Figure(figsize=(width_in, height_in))
    for at in range(count):
        left_in, bottom_in = label_in + at % columns * cell_in, height_in - at // columns * block_in - title_in
        for turn, (line, (images, texts)) in enumerate(shown):
            bottom_in -= image_in
            place = (left_in / width_in, bottom_in / height_in, (cell_in - 0.1) / width_in, image_in / height_in)
            ax = picture.add_axes(place)
            bottom_in -= reward_in
            _draw_image(ax, images[at], line["rewards"][at], shown[0][0]["rewards"][at])
            if turn == 0:
                ax.set_title(_target(texts[at]), loc="center", fontsize=12, pad=4)
            if at % columns == 0:
                label = f"version {line['version']}" if len(shown) == 1 else ("before", "after")[turn]
                ax.text(-0.07, 0.5, label, transform=ax.transAxes, ha="right", va="center", color=FAINT)
    return picture


def _draw_image(ax: Axes, image: NDArray[np.uint8], reward: float | None, before: float | None) -> None:
    """One image and its reward below, green where it rose and red where it fell."""
    ax.imshow(image, interpolation="nearest", aspect="auto")
    ax.set_axis_off()
    risen = 0.0 if reward is None or before is None else reward - before
    colour = "#1c8a5a" if risen > 0 else LOST if risen < 0 else FAINT
    text = "no reward" if reward is None else f"{reward:.2f}"
    below: dict[str, Any] = {
        "xy": (0.5, 0),
        "xycoords": "axes fraction",
        "xytext": (0, -3),
        "textcoords": "offset points",
    }
    ax.annotate(text, **below, ha="center", va="top", color=colour, weight="bold", fontsize=9)


def _target(text: str) -> str:
    """What a prompt asks to be written, else its beginning, short enough for a title."""
    parts = text.split('"')
    wanted = parts[1] if len(parts) > 2 else text
    return (wanted if len(wanted) <= 14 else wanted[:13] + "…").replace("$", r"\$")


# The page, with Bokeh.


def _plot(height: int, **options: Any) -> Plot:
    """An empty plot in the page's style."""
    plot = figure(height=height, sizing_mode="stretch_width", toolbar_location="right", **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.outline_line_color = None
    plot.grid.grid_line_color = "#eceef2"
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = "#b4bac5"
    plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_font = plot.axis.axis_label_text_font = "system-ui, sans-serif"
    plot.axis.major_label_text_font_size = plot.axis.axis_label_text_font_size = "12px"
    plot.axis.major_label_text_color = plot.axis.axis_label_text_color = FAINT
    plot.axis.axis_label_text_font_style = "normal"
    wheel = WheelZoomTool(dimensions="width", modifiers="ctrl")  # without ctrl the wheel scrolls the page
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    return plot


def _legend(plot: Plot, place: str = "above") -> None:
    for legend in plot.legend:
        legend.click_policy = "hide"
        legend.label_text_font = "system-ui, sans-serif"
        legend.label_text_font_size = "12px"
        legend.label_text_color = INK
        legend.border_line_color = None
        legend.orientation = "horizontal"
        legend.location = "top_left"
        legend.padding = legend.margin = 0
        legend.spacing = 14
        plot.add_layout(legend, place)


def _plot_reward(run: _Run) -> Plot:
    plot = _plot(340, tools="xpan,box_zoom,reset,save", x_axis_label="weights version", y_axis_label="reward")
    reward, spread, explored = (_curve(run, name) for name in ("reward_mean", "reward_std", "explored_reward_mean"))
    if reward is not None:
        colour = PHASE_COLOURS["train"]
        if spread is not None:
            low, high = reward - spread, reward + spread
            plot.varea(list(reward.index), low, high, color=colour, alpha=0.12, legend_label="± std")
        _hoverable_line(plot, reward, colour, "trained samples", "solid")
    if explored is not None:
        _hoverable_line(plot, explored, PHASE_COLOURS["explore"], "explored seeds (stale weights)", "dashed")
    if run.validation:
        scores = pd.Series({line["version"]: line["score"] for line in run.validation})
        _hoverable_line(plot, scores, INK, "validation", "solid", width=1, marker="diamond", size=13)
    _legend(plot)
    return plot


def _hoverable_line(
    plot: Plot,
    values: pd.Series[float],
    colour: str,
    label: str,
    dash: str,
    *,
    width: float = 2.5,
    marker: str = "circle",
    size: int = 5,
) -> None:
    source = ColumnDataSource({"x": list(values.index), "y": values.to_numpy(dtype=float)})
    plot.line("x", "y", source=source, color=colour, line_width=width, line_dash=dash, legend_label=label)
    dots = plot.scatter("x", "y", source=source, color=colour, marker=marker, size=size, legend_label=label)
    plot.add_tools(HoverTool(renderers=[dots], tooltips=[(label, "@y{0.000}"), ("version", "@x")], visible=False))


def _plot_timeline(run: _Run) -> Model:
    """The timeline, and below it the whole run with a window to drag."""
    lanes = [(pool, worker) for pool, worker in reversed(_lanes(run))]
    lane_px = max(14, min(36, 900 // len(lanes)))
    plot = _plot(
        90 + lane_px * len(lanes),
        tools="xpan,xbox_zoom,reset,save",
        y_range=FactorRange(factors=lanes, group_padding=0.6),
        x_range=_zoom(run),
        x_axis_label="seconds since the start",
    )
    plot.ygrid.grid_line_color = None
    plot.yaxis.group_text_font_size = "12px"
    plot.yaxis.group_text_color = INK
    plot.yaxis.separator_line_color = plot.yaxis.major_tick_line_color = plot.yaxis.axis_line_color = None
    whole = (0.0, run.window[1] - run.window[0])
    overview = _plot(50 + min(12, lane_px // 2) * len(lanes), tools="", y_range=plot.y_range, x_range=whole)
    overview.yaxis.visible = overview.ygrid.visible = False
    for each in (plot, overview):
        _plot_lanes(each, run, with_legend=each is plot)
    window = RangeTool(x_range=plot.x_range)
    window.overlay.fill_color, window.overlay.fill_alpha = INK, 0.08
    window.overlay.line_color, window.overlay.line_alpha, window.overlay.line_dash = INK, 0.8, "solid"
    overview.add_tools(window)
    return column(plot, overview, sizing_mode="stretch_width") if _zoom(run) != whole else plot


def _plot_lanes(plot: Plot, run: _Run, *, with_legend: bool) -> None:
    start_s = run.window[0]
    lives = [(life, run.window[1] if life.left_s is None else life.left_s) for life in run.workers]
    plot.hbar(
        y=[(life.pool, life.worker) for life, _ in lives],
        left=[life.joined_s - start_s for life, _ in lives],
        right=[left_s - start_s for _, left_s in lives],
        height=0.9,
        color=ALIVE,
        **({"legend_label": "idle"} if with_legend else {}),
    )
    training = [span for span in run.spans if span.phase == "train"]
    plot.vstrip(
        x0=[span.start_s - start_s for span in training],
        x1=[span.stop_s - start_s for span in training],
        color=PHASE_COLOURS["train"],
        alpha=0.1,
        line_color=None,
    )
    bars = []
    for phase in _phases(run):
        source = ColumnDataSource(
            _span_columns([span for span in run.spans if base_phase(span.phase) == phase], start_s)
        )
        label = {"legend_label": phase} if with_legend else {}
        bars.append(
            plot.hbar(
                "lane",
                0.72,
                "start",
                "stop",
                color=phase_colour(phase),
                alpha="alpha",
                line_color=None,
                source=source,
                **label,
            )
        )
    _plot_losses(plot, run, with_legend=with_legend)
    if with_legend:
        plot.add_tools(
            HoverTool(
                renderers=bars,
                tooltips=[
                    ("", "@phase, iteration @iteration: @outcome"),
                    ("worker", "@worker (@pool)"),
                    ("time", "@start{0.00} s, for @seconds{0.00} s"),
                    ("key", "@key"),
                ],
                visible=False,
            )
        )
        _legend(plot)


def _span_columns(spans: Sequence[Span], start_s: float) -> dict[str, Any]:
    return {
        "lane": [(span.pool, span.worker) for span in spans],
        "start": [span.start_s - start_s for span in spans],
        "stop": [span.stop_s - start_s for span in spans],
        "seconds": [span.stop_s - span.start_s for span in spans],
        "alpha": [CALLED_OFF_ALPHA if span.outcome in ("dropped", "stopped") else 1.0 for span in spans],
        **{
            name: [getattr(span, name) for span in spans]
            for name in ("phase", "iteration", "outcome", "worker", "pool", "key")
        },
    }


def _plot_losses(plot: Plot, run: _Run, *, with_legend: bool) -> None:
    gone = [(left, (life.pool, life.worker)) for life, left in _departures(run)]
    plot.rect([at for at, _ in gone], [lane for _, lane in gone], 3, 0.94, width_units="screen", color=LOST)
    losses = _losses(run)
    if losses:
        label = {"legend_label": "preempted"} if with_legend else {}
        size, line_width = (13, 4) if with_legend else (7, 2)
        at, lanes = [at for at, _ in losses], [lane for _, lane in losses]
        plot.scatter(at, lanes, marker="x", size=size, color=LOST, line_width=line_width, **label)


def _plot_money(run: _Run) -> Plot:
    plot = _plot(280, tools="xpan,reset,save", x_axis_label="seconds since the start", y_axis_label="US dollars")
    plot.yaxis.formatter = NumeralTickFormatter(format="$0.00")
    at_s, pools, reserved_only = _money(run)
    source = ColumnDataSource(
        {"at": at_s, "reserved_only": reserved_only, "total": np.sum(list(pools.values()), axis=0), **pools}
    )
    names = list(pools)
    plot.varea_stack(
        names, x="at", color=[POOL_COLOURS[name] for name in names], alpha=0.8, legend_label=names, source=source
    )
    line = plot.line("at", "total", source=source, line_alpha=0)
    plot.line(
        "at",
        "reserved_only",
        source=source,
        color=LOST,
        line_width=2,
        line_dash="dashed",
        legend_label="the same work on reserved workers alone, never idle",
    )
    rows = [("at", "@at{0} s"), *((name, f"@{name}{{$0.000}}") for name in names), ("together", "@total{$0.000}")]
    tooltips = [*rows, ("reserved only", "@reserved_only{$0.000}")]
    plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips, mode="vline", visible=False))
    _legend(plot)
    return plot


def _page(run: _Run, grid: Path | None) -> str:
    """The whole page: what is missing is said on top, and its section is left out."""
    plots: dict[str, Model] = {}
    if len(run.history) or run.validation:
        plots["reward"] = _plot_reward(run)
    if run.spans:
        plots["timeline"] = _plot_timeline(run)
    if run.workers:
        plots["money"] = _plot_money(run)
    script, divs = components(plots) if plots else ("", {})
    sections = [
        _section("Reward", REWARD_NOTE, divs.get("reward", "")),
        _section("What every worker did", TIMELINE_NOTE, divs.get("timeline", "")),
        _section("Before and after", GRID_NOTE, _embedded(grid) if grid else ""),
        _section("Dollars", MONEY_NOTE, divs.get("money", "")),
        _section("Diagnostics", DIAGNOSTICS_NOTE, _diagnostics(run)),
        _section("Files", html.escape(str(run.dir.resolve())), _files(run)),
    ]
    return _PAGE.substitute(
        title=html.escape(run.settings.run.name),
        subtitle=html.escape(_subtitle(run)),
        missing=_missing(run),
        cards=_cards(run),
        sections="\n".join(section for section in sections if section),
        bokeh=Resources(mode="inline", components=["bokeh"]).render() if plots else "",
        script=script,
    )


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p>{note}</p>{body}</section>" if body else ""


def _missing(run: _Run) -> str:
    lines = "".join(f"<li>{html.escape(text)}</li>" for text in run.missing)
    return f"<aside><b>Not in this run directory</b><ul>{lines}</ul></aside>" if lines else ""


def _subtitle(run: _Run) -> str:
    settings = run.settings
    pools = settings.pools
    return (
        f"{settings.model.name}, {settings.train.algorithm}, exploration {settings.strategy.exploration}; "
        f"{pools.reserved.workers} reserved + {pools.spot.workers} spot workers "
        f"at ${pools.reserved.usd_per_h:.2f} and ${pools.spot.usd_per_h:.2f} per hour; seed {settings.run.seed}"
    )


def _cards(run: _Run) -> str:
    """The headline numbers, from the summary where there is one, else worked out from the records."""
    scores = [line["score"] for line in run.validation]
    alive_s = {pool: s for pool, s in pool_seconds(run.workers, run.window).items() if pool in run.prices}
    facts: dict[str, Any] = {
        "score_before": scores[0] if scores else None,
        "score_after": scores[-1] if len(scores) > 1 else None,
        "iterations": len(run.history),
        "wall_s": run.window[1] - run.window[0] or None,
        "usd": dollars(alive_s, run.prices) if run.workers else None,
        "usd_reserved_only": reserved_only_usd(run.spans, run.prices["reserved"]) if run.spans else None,
        "preemptions": len(_departures(run)),
        "first_image_s": None,
    } | run.summary
    before, after, usd, alone = (facts[name] for name in ("score_before", "score_after", "usd", "usd_reserved_only"))
    busy = spot_utilisation(run.spans, run.workers, run.window)
    cards = [
        (
            "Validation score",
            f"{_number(before, '.2f')} → {_number(after, '.2f')}",
            "not measured yet" if before is None or after is None else f"{after - before:+.2f} on held-out prompts",
        ),
        ("Wall time", _duration(facts["wall_s"]), f"first image after {_number(facts['first_image_s'], '.1f')} s"),
        ("Iterations", str(facts["iterations"]), f"of {run.settings.run.iterations} asked for"),
        (
            "Cost",
            _number(usd, ".2f", "$"),
            f"reserved workers alone: {_number(alone, '.2f', '$')}"
            + (f" ({alone / usd:.1f} ×)" if usd and alone else ""),
        ),
        ("Spot workers busy", f"{busy:.0%}" if alive_s.get("spot") else "–", "of the seconds that were paid for"),
        ("Preemptions", str(facts["preemptions"]), "spot workers lost on the way"),
    ]
    return "".join(
        f"<div><h3>{name}</h3><b>{html.escape(value)}</b><span>{note}</span></div>" for name, value, note in cards
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else unit + format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    hours, rest = divmod(round(seconds), 3600)
    return (
        f"{hours} h {rest // 60:02d} min"
        if hours
        else f"{rest // 60} min {rest % 60:02d} s"
        if rest >= 60
        else f"{rest} s"
    )


def _diagnostics(run: _Run) -> str:
    """A row per metric: its course in a small line, and its first, last and mean value."""
    hidden = ("weights_version", "weights_sha256", "started_s", "stopped_s", "busy_s.")  # the timeline shows them
    others = sorted(str(name) for name in run.history if name not in METRICS)
    names = [name for name in (*METRICS, *others) if not name.startswith(hidden)]
    rows = []
    for name in names:
        try:
            values = _curve(run, name)
        except (ValueError, TypeError):  # a metric that is no number has no row
            continue
        if values is not None:
            numbers = "".join(f"<td>{value:.4g}</td>" for value in (values.iloc[0], values.iloc[-1], values.mean()))
            note = html.escape(METRICS.get(name, "seconds" if name.endswith("_s") else ""))
            rows.append(f"<tr><th>{html.escape(name)}<i>{note}</i></th><td>{_sparkline(values)}</td>{numbers}</tr>")
    head = "<tr><td></td><td>over the run</td><td>first</td><td>last</td><td>mean</td></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _sparkline(values: pd.Series[float]) -> str:
    y = values.to_numpy(dtype=float)
    spread = float(np.ptp(y)) or 1.0
    x = np.linspace(2, 158, len(y))
    points = " ".join(f"{a:.1f},{20 - 16 * (b - y.min()) / spread:.1f}" for a, b in zip(x, y, strict=True))
    return f'<svg width="160" height="24"><polyline points="{points}"/></svg>'


def _files(run: _Run) -> str:
    present = [(name, note) for name, note in FILES.items() if (run.dir / name).exists()]
    return "<dl>" + "".join(f'<dt><a href="{name}">{name}</a></dt><dd>{note}</dd>' for name, note in present) + "</dl>"


def _embedded(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="validation images before and after training" src="data:image/png;base64,{data}">'


REWARD_NOTE = (
    "Mean reward of the samples that were trained on, of all seeds that were explored, and of the held-out prompts. "
    "Explored seeds were drawn one version earlier than the samples chosen from them. Click a name to hide its line."
)
TIMELINE_NOTE = (
    "One lane per worker. In the violet bands a reserved worker trains: amber below it is exploration for the next "
    "iteration, in time that spot workers would have idled away. Pale amber was called off when training ended. "
    "Drag to move, drag the window in the small picture, or hold ctrl and use the wheel."
)
GRID_NOTE = (
    "The text that each held-out prompt asks for, drawn with the same seed before and after training; rewards below."
)
MONEY_NOTE = (
    "What the workers cost from joining to leaving, idle time included. "
    "The dashed line prices the same busy seconds on reserved workers alone: the least that such a run could have cost."
)
DIAGNOSTICS_NOTE = "One value per iteration."

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title · Spotlight</title>
<style>
body { margin: 0; background: #f4f5f8; color: #1d2433; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 30px; letter-spacing: -0.02em; }
h1 small { color: #f0991c; font-size: inherit; }
h2 { margin: 0; font-size: 19px; letter-spacing: -0.01em; }
p, header { color: #6b7485; margin: 2px 0 14px; max-width: 880px; }
header h1 { color: #1d2433; }
section, .cards div { background: #fff; border: 1px solid #e4e7ed; border-radius: 12px; }
section { margin-top: 20px; padding: 22px 26px 24px; }
section > img { display: block; max-width: 100%; margin: 0 auto; }
.cards { display: grid; grid-template-columns: 1.45fr 1fr 0.85fr 1.35fr 1fr 0.95fr; gap: 12px; }
.cards div { padding: 14px 16px; }
.cards h3 { margin: 0; font-size: 13px; font-weight: 500; color: #6b7485; }
.cards b { display: block; font-size: 25px; letter-spacing: -0.02em; white-space: nowrap; }
.cards span { font-size: 12.5px; color: #6b7485; }
aside { background: #fff6e5; border: 1px solid #f8d08a; border-radius: 12px; padding: 12px 18px; margin: 0 0 14px; }
aside ul { margin: 4px 0 0; padding-left: 20px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td { text-align: right; padding: 5px 10px; }
th { text-align: left; font-weight: 500; padding: 5px 10px 5px 0; }
th i { display: block; font-style: normal; font-weight: 400; font-size: 12.5px; color: #6b7485; }
thead td { color: #6b7485; font-size: 12.5px; }
tbody tr { border-top: 1px solid #eceef2; }
polyline { fill: none; stroke: #5546a8; stroke-width: 1.5; }
svg { vertical-align: middle; }
dl { display: grid; grid-template-columns: 180px 1fr; gap: 4px 12px; margin: 0; }
dt { font-family: ui-monospace, monospace; font-size: 13.5px; }
dd { margin: 0; color: #6b7485; }
a { color: #3f7fd6; text-decoration: none; }
</style>
$bokeh
</head>
<body>
<main>
<header><h1><small>Spotlight</small> $title</h1>$subtitle</header>
$missing
<div class="cards">$cards</div>
$sections
</main>
$script
</body>
</html>
""")
