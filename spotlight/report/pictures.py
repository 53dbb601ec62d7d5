"""Draws a run's pictures for a README with matplotlib: reward, timeline, images before and after training."""

from __future__ import annotations

import warnings
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from spotlight.records import Interval
from spotlight.report.facts import Facts
from spotlight.report.palette import (
    ALIVE,
    AXIS,
    CALLED_OFF,
    CALLED_OFF_ALPHA,
    FAINT,
    INK,
    LOST,
    PHASE_COLOURS,
    POOL_COLOURS,
    RULE,
    phase_colour,
)

GRID_COLUMNS, GRID_MAX = 8, 32
"""Validation prompts in a row and in all: more cannot be told apart on a page 1,180 px wide."""
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "PingFang SC"]
FONTS += ["Hiragino Sans", "Microsoft YaHei", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback"]
"""Fonts to use, as far as the machine has them: the first has no Chinese and no Japanese."""
COUNTS_IN = 2.4
"""Height of the picture that counts workers."""
STYLE: dict[Any, Any] = {
    "font.family": [name for name in FONTS if name in font_manager.get_font_names()],
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": RULE,
    "legend.frameon": False,
}


def write_pictures(facts: Facts) -> Path | None:
    """Write ``images/reward.png``, ``timeline.png`` and ``before-after.png``, each if the run has data for it.

    Returns:
        The path of the last, which the page shows too; None where no validation image can be read.
    """
    images = facts.dir / "images"
    images.mkdir(exist_ok=True)
    grid = images / "before-after.png"
    with mpl.rc_context(STYLE):
        drawn = {
            images / "reward.png": _reward(facts),
            images / "timeline.png": _timeline(facts),
            grid: _grid(facts),
        }
        for path, picture in drawn.items():
            if picture:
                save(picture, path, dpi=160)
    return grid if drawn[grid] else None


def save(picture: Figure, file: Path | BytesIO, **options: Any) -> None:
    """Write a picture as PNG."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # it is drawn as a box
        picture.savefig(file, format="png", facecolor="white", **options)


def draw(facts: Facts, what: str) -> Figure | None:
    """One of the pictures, by its file's name; None where the run has no data for it."""
    with mpl.rc_context(STYLE):
        return {"reward": _reward, "timeline": _timeline, "before-after": _grid}[what](facts)


def _reward(facts: Facts) -> Figure | None:
    reward, explored, band = facts.curve("reward_mean"), facts.curve("explored_reward_mean"), facts.reward_band()
    if reward is None and not facts.validation:
        return None
    picture = Figure(figsize=(9, 4), layout="constrained")
    ax = picture.subplots()
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    if reward is not None:
        colour = PHASE_COLOURS["train"]
        if band is not None:
            ax.fill_between(band.index, band["low"], band["high"], color=colour, alpha=0.12, lw=0)
        ax.plot(reward.index, reward, color=colour, lw=2.2, label="trained samples (mean ± std)")
    if explored is not None:
        dashed: Any = {"color": PHASE_COLOURS["explore"], "lw": 1.8, "ls": (0, (4, 2))}
        ax.plot(explored.index, explored, **dashed, label="explored seeds")
    if facts.validation:
        scores = [(line.version, line.score) for line in facts.validation]
        ax.plot(*zip(*scores, strict=True), "D-", color=INK, lw=1, ms=6, label="validation (held-out prompts)")
        for at in {scores[0], scores[-1]}:
            ax.annotate(f"{at[1]:.2f}", at, (0, 9), textcoords="offset points", ha="center", weight="bold")
    ax.set(title="Reward", xlabel="weights version", ylabel="reward")
    ax.margins(x=0.03)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="lower right")
    return picture


def _timeline(facts: Facts) -> Figure | None:
    """What every worker did, and below it a few iterations; of a crowded run, how many workers did what, and a few."""
    if not facts.spans:
        return None
    zoom, is_crowded = facts.zoom(), facts.is_crowded()
    shown = facts.closer() if is_crowded else facts
    count = len(shown.lanes())
    lanes_in = 0.75 + max(0.12, min(0.34, 6 / count)) * count
    heights_in = [COUNTS_IN, lanes_in] if is_crowded else [lanes_in] * len({facts.whole, zoom})
    picture = Figure(figsize=(13, 1.3 + sum(heights_in)), layout="constrained")
    axes = picture.subplots(len(heights_in), 1, squeeze=False, height_ratios=heights_in)[:, 0]
    if is_crowded:
        _draw_counts(axes[0], facts)
        axes[0].set_title("How many workers did what")
    else:
        _draw_lanes(axes[0], facts, facts.whole)
        axes[0].set_title("What every worker did")
    if len(axes) > 1:
        _draw_lanes(axes[1], shown, zoom)
        axes[0].axvspan(*zoom, fill=False, edgecolor=INK, lw=1.2, zorder=5)
        some = f", {count} of {len(facts.lanes()):,} workers" if is_crowded else ""
        axes[1].set_title(f"Closer: {zoom[0]:.0f} s to {zoom[1]:.0f} s{some}", fontsize=10)
    axes[-1].set_xlabel(facts.time_axis())
    handles: list[Artist] = [Patch(color=phase_colour(phase), label=phase) for phase in facts.by_phase()]
    handles.append(Patch(color=ALIVE, label="idle"))
    if shown.losses():
        handles.append(Line2D([], [], color=LOST, marker="X", mec="white", ms=9, lw=0, label="preempted"))
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.1, columnspacing=1.4)
    return picture


def _draw_counts(ax: Axes, facts: Facts) -> None:
    """How many workers were at each phase, one band upon the other, over the whole run."""
    at_s, counts = facts.counts()
    colours = [ALIVE if phase == "idle" else phase_colour(phase) for phase in counts]
    ax.stackplot(at_s, *counts.values(), colors=colours, lw=0)
    ax.set(xlim=facts.whole, ylabel="workers")
    ax.set_ylim(bottom=0)


def _draw_lanes(ax: Axes, facts: Facts, window: Interval) -> None:
    """One row per worker, the pools set apart by a gap."""
    lanes = facts.lanes()
    pools = list(dict.fromkeys(pool for pool, _ in lanes))
    row = {lane: index + 0.5 * pools.index(lane[0]) for index, lane in enumerate(lanes)}
    _draw_bars(ax, [(row[lane], alive) for lane, alive in facts.alive()], 0.88, color=ALIVE, zorder=0.5)
    bars: defaultdict[tuple[str, float], list[tuple[float, Interval]]] = defaultdict(list)
    for span in facts.spans:
        alpha = CALLED_OFF_ALPHA if span.outcome in CALLED_OFF else 1.0
        bars[phase_colour(span.phase), alpha].append((row[span.pool, span.worker], (span.start_s, span.stop_s)))
    for start_s, stop_s in facts.training():
        ax.axvspan(start_s, stop_s, color=phase_colour("train"), alpha=0.1, lw=0, zorder=0.8)
    for (colour, alpha), drawn in bars.items():
        _draw_bars(ax, drawn, 0.72, color=colour, alpha=alpha)
    for lane, at_s in facts.losses():
        ax.plot(at_s, row[lane], "X", color=LOST, mec="white", ms=9, zorder=6)
    for lane, left_s in facts.departures():
        ax.vlines(left_s, row[lane] - 0.46, row[lane] + 0.46, color=LOST, lw=2.5)
    for at_s, _ in facts.breaks:
        ax.axvline(at_s, color=INK, lw=1.4, ls=":", zorder=5)
    ax.set_yticks([row[lane] for lane in lanes], [worker for _, worker in lanes])
    for label, (pool, _) in zip(ax.get_yticklabels(), lanes, strict=True):
        label.set_color(POOL_COLOURS.get(pool, INK))
        label.set_fontweight("bold")
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=window, ylim=(max(row.values()) + 0.6, -0.6))


def _draw_bars(ax: Axes, bars: list[tuple[float, Interval]], height: float, **style: Any) -> None:
    """Bars by their middle and interval, as one artist: a thousand artists take a minute."""
    half = height / 2
    corners = [
        [(start, middle - half), (start, middle + half), (stop, middle + half), (stop, middle - half)]
        for middle, (start, stop) in bars
    ]
    ax.add_collection(PolyCollection(corners, lw=0, **style), autolim=False)


def _grid(facts: Facts) -> Figure | None:
    """Each validation prompt's target, its first image before and after training, and their rewards.

    A prompt that was set aside before or after is left out.
    """
    ends = facts.validation[:1] + facts.validation[1:][-1:]
    shown = [(line, *found) for line in ends if (found := facts.images(line)) is not None]
    everywhere = set.intersection(*(set(texts) for _, _, texts in shown)) if shown else set()
    if not everywhere:
        return None
    targets = [text for text in dict.fromkeys(shown[0][2]) if text in everywhere][:GRID_MAX]
    count, columns = len(targets), min(GRID_COLUMNS, len(targets))
    height_px, width_px = shown[0][1].shape[1:3]
    cell_in, label_in, title_in, reward_in = 12.2 / GRID_COLUMNS, 0.8, 0.4, 0.26
    image_in = (cell_in - 0.1) * height_px / width_px
    block_in = title_in + len(shown) * (image_in + reward_in)
    width_in, height_in = label_in + cell_in * columns, block_in * -(-count // columns)
    picture = Figure(figsize=(width_in, height_in))
    for at, target in enumerate(targets):
        before = shown[0][0].rewards[shown[0][2].index(target)]
        left_in, bottom_in = label_in + at % columns * cell_in, height_in - at // columns * block_in - title_in
        for turn, (line, images, texts) in enumerate(shown):
            row = texts.index(target)
            bottom_in -= image_in
            place = (left_in / width_in, bottom_in / height_in, (cell_in - 0.1) / width_in, image_in / height_in)
            ax = picture.add_axes(place)
            bottom_in -= reward_in
            _draw_image(ax, images[row], line.rewards[row], before)
            if turn == 0:
                ax.set_title(_target(target), loc="center", fontsize=12, pad=4)
            if at % columns == 0:
                label = f"version {line.version}" if len(shown) == 1 else ("before", "after")[turn]
                ax.text(-0.07, 0.5, label, transform=ax.transAxes, ha="right", va="center", color=FAINT)
    return picture


def _draw_image(ax: Axes, image: NDArray[Any], reward: float | None, before: float | None) -> None:
    """One image and its reward below, green where it rose and red where it fell."""
    ax.imshow(image, interpolation="nearest", aspect="auto")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#d9dde4", linewidth=0.8)
    risen = 0.0 if reward is None or before is None else reward - before
    colour = "#1c8a5a" if risen > 0 else LOST if risen < 0 else FAINT
    text = "no reward" if reward is None else f"{reward:.2f}"
    below: Any = {"xy": (0.5, 0), "xycoords": "axes fraction", "xytext": (0, -3), "textcoords": "offset points"}
    ax.annotate(text, **below, ha="center", va="top", color=colour, weight="bold", fontsize=9)


def _target(text: str) -> str:
    """What a prompt asks to be written, else its beginning, short enough for a title."""
    parts = " ".join(text.split()).split('"')
    wanted = parts[1] if len(parts) > 2 and parts[1].strip() else '"'.join(parts)
    return wanted if len(wanted) <= 14 else wanted[:13] + "…"
