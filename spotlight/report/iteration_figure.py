"""Draws one iteration's Dask graph as a figure: what runs in which pool, and what waits for what.

It reads the graph and changes nothing. Lanes are pools, columns follow the dependencies, and two things that
no edge of the graph says are taken from how a run goes: spot workers explore once they have nothing left to
roll out, and the end of training ends exploration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as Line

from spotlight.records import AHEAD, SpotlightError, base_phase, record
from spotlight.report.palette import FAINT, INK, POOL_COLOURS, phase_colour


class AnnotatedLayer(Protocol):
    """A phase of a graph."""

    @property
    def annotations(self) -> Mapping[str, Any] | None: ...

    def __len__(self) -> int: ...


class Layered(Protocol):
    """The parts of a Dask graph that are drawn."""

    @property
    def layers(self) -> Mapping[str, AnnotatedLayer]: ...

    @property
    def dependencies(self) -> Mapping[str, AbstractSet[str]]: ...


SUFFIXES = (".svg", ".png")
BOXES_MAX = 8
"""Tasks drawn one by one; more are drawn as this many and counted in the label."""
ROUNDS_MAX, ROUNDS_APART = 4, 2
"""Most rounds of exploration drawn apart; of more, the first ones are drawn, and all others as one."""
LANES = {
    "reserved": ("reserved",),
    "spot": ("explore", "explore-score"),
    "reward": ("reward",),
    "head": ("head",),
}
"""{lane: its rows}, from top to bottom; the lane of workers that only score is drawn if there are any."""
BESIDE = ("allocate", "explore", "explore-decode", "explore-score", AHEAD, "score-ahead")
"""Phases that run while an iteration trains."""
MAKES = {"publish": "weights {}", "select": "kept seeds {}"}
"""What the next iteration takes from this one; both carry the next iteration's number."""
TITLES = {
    "reserved": ("reserved workers", "roll out,\nthen train"),
    "spot": ("spot workers", "roll out, then explore\nwith weights that are\none version old"),
    "reward": ("reward workers", "score what the\nothers drew"),
    "head": ("head", "decides, beside\nthe scheduler"),
}
POOL_LANES = {
    "reserved": {"reserved"},
    "reserved-engine": {"reserved"},
    "gradient-reserved": {"reserved"},
    "gradient-spot": {"spot"},
    "update": {"reserved"},
    "spot": {"spot"},
    "reward": {"reward"},
    "head": {"head"},
}
"""Where a pool's tasks run; tasks of ``engine`` go where their input is, and all others to both kinds of worker."""
COLUMN, GAP, ROW, PAD, LEFT, TOP = 1.0, 0.38, 1.2, 0.16, 2.3, 0.85
"""Inches: a column of boxes, the space for arrows after it, a row, around rows, titles of lanes and figure."""
LABEL, TALLEST = 0.34, 0.46
"""Inches: a label above its boxes, and the tallest box but that of training."""


@record
class _Layer:
    """A layer of the graph, and where it is drawn."""

    phase: str
    iteration: str
    round: str
    tasks: int
    lanes: frozenset[str]
    on_both: bool = False
    """Spot workers do it, too, beside what else is in their lane."""


@record
class _Box:
    """The place of a layer's stack of tasks, in inches."""

    left: float
    right: float
    bottom: float
    top: float


def draw(graph: Layered, path: Path) -> None:
    """Write the graph's figure, as SVG or PNG by the path's suffix.

    Raises:
        SpotlightError: the suffix is neither, or the graph is empty.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SpotlightError(f"{path}: a graph is drawn as {' or '.join(SUFFIXES)}, not as {path.suffix!r}; rename it")
    if not graph.layers:
        raise SpotlightError(f"{path}: the graph has no layers, so there is nothing to draw")
    layers = _read(graph)
    dependencies = _nearest(graph, layers)
    columns = _columns(layers, dependencies)
    # Fixed salt and no date: the same graph gives the same bytes.
    with mpl.rc_context({"font.size": 11, "text.color": INK, "svg.hashsalt": "spotlight"}):
        picture = _picture(layers, dependencies, columns)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def _read(graph: Layered) -> dict[str, _Layer]:
    """The layers that have tasks, upstream first; of many rounds, the last stands for all after the first ones."""
    layers = _all(graph)
    last = max((int(layer.round) for layer in layers.values() if layer.round), default=0)
    found = {name: layer for name, layer in layers.items() if layer.tasks}
    if last < ROUNDS_MAX:
        return found
    tasks: Counter[str] = Counter()
    for layer in found.values():
        if layer.round and int(layer.round) >= ROUNDS_APART:
            tasks[layer.phase] += layer.tasks
    folded = {}
    for name, layer in found.items():
        if not layer.round or int(layer.round) < ROUNDS_APART:
            folded[name] = layer
        elif int(layer.round) == last:
            folded[name] = replace(layer, round=f"{ROUNDS_APART}–{last}", tasks=tasks[layer.phase])
    return folded


def _nearest(graph: Layered, layers: Mapping[str, _Layer]) -> dict[str, set[str]]:
    """What each layer waits for, of those that are drawn."""
    nearest: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph.dependencies).static_order():
        above = graph.dependencies[name]
        nearest[name] = {near for each in above for near in ({each} if each in layers else nearest[each])}
    return {name: nearest[name] for name in layers}


def _all(graph: Layered) -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    for name in TopologicalSorter(graph.dependencies).static_order():
        layer = graph.layers[name]
        annotations = layer.annotations or {}
        parts = re.fullmatch(r"(?P<phase>.+?)(?:-r(\d+))?-(?P<iteration>\d+)(?:-r(\d+))?\+*", name)
        phase, pool = parts["phase"] if parts else name, annotations.get("pool", "any")
        on_both = pool == "gradient-any" or (phase == "train" and pool == "any")  # the latter if a gang shares it
        above = {lane for before in graph.dependencies[name] for lane in layers[before].lanes} - {"reward", "head"}
        lanes = above if pool == "engine" and above else POOL_LANES.get(pool, {"reserved", "spot"})
        if on_both:  # it is drawn in one lane, and says so
            lanes = {"reserved"}
        layers[name] = _Layer(
            phase=phase,
            iteration=parts["iteration"] if parts else "",
            round=(parts[2] or parts[4] or "") if parts else "",
            tasks=len(layer),
            lanes=frozenset(lanes),
            on_both=on_both,
        )
    return layers


def _ancestors(dependencies: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """All that each layer waits for, near and far; the dependencies come upstream first."""
    above: dict[str, set[str]] = {}
    for name, before in dependencies.items():
        above[name] = before.union(*(above[near] for near in before))
    return above


def _columns(layers: Mapping[str, _Layer], dependencies: Mapping[str, set[str]]) -> dict[str, range]:
    """The columns of each layer: after all that it waits for, where its row is free.

    Training lasts until what waits for it begins, for that is how long exploration lasts.
    """
    waits = _waits(layers, dependencies)
    taken: set[tuple[str, int]] = set()
    first: dict[str, int] = {}
    # A round at a time, as slots are served; names break ties, so that a graph has one figure.
    while len(first) < len(layers):
        ready = [name for name in layers if name not in first and waits[name] <= first.keys()]
        name = min(
            ready, key=lambda name: (max((first[b] + 1 for b in waits[name]), default=0), layers[name].round, name)
        )
        column = max((first[before] + 1 for before in waits[name]), default=0)
        rows = _rows(layers[name])
        while any((row, column) in taken for row in rows):
            column += 1
        taken |= {(row, column) for row in rows}
        first[name] = column
    spans = {name: range(column, column + 1) for name, column in first.items()}
    for name, layer in layers.items():
        after = [first[other] for other in layers if name in dependencies[other]]
        if layer.phase == "train" and after and layer.lanes != {"spot"}:  # there, exploration is in the same row
            spans[name] = range(first[name], min(after))
    return spans


def _waits(layers: Mapping[str, _Layer], dependencies: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The dependencies, and what a run adds to them around training."""
    waits = {name: set(before) for name, before in dependencies.items()}
    above = _ancestors(dependencies)
    training = {name for name, layer in layers.items() if layer.phase == "train"}
    first = {name for name in layers if not above[name] & training}  # what comes after a training waits for exploration
    for train in training:
        beside = {
            name
            for name, layer in layers.items()
            if layer.phase in BESIDE and name not in above[train] and train not in above[name]
        }
        for name in beside:
            waits[name] |= {before for before in above[train] & first if "spot" in layers[before].lanes}
        for name in layers:
            if train in dependencies[name]:
                waits[name] |= beside
    return waits


def _rows(layer: _Layer) -> list[str]:
    """The rows that a layer fills: its lane's own, or those of all lanes that it runs in."""
    if layer.lanes == {"spot"}:
        return ["explore-score" if layer.phase == "explore-score" else "explore"]
    return [row for lane, rows in LANES.items() if lane in layer.lanes for row in rows]


def _picture(
    layers: Mapping[str, _Layer], dependencies: Mapping[str, set[str]], columns: Mapping[str, range]
) -> Figure:
    last = max(span.stop for span in columns.values())
    lanes = [lane for lane in LANES if lane != "reward" or any("reward" in layer.lanes for layer in layers.values())]
    rows = sum(len(LANES[lane]) for lane in lanes)
    width, height = LEFT + last * (COLUMN + GAP) + 0.1, TOP + rows * ROW + len(lanes) * 2.5 * PAD + 0.1
    picture = Figure(figsize=(width, height))
    ax = picture.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.set_axis_off()
    tops = _lanes(ax, lanes, width, height, _subtitles(list(layers.values())))
    boxes = {name: _place(layer, columns[name], tops) for name, layer in layers.items()}
    above = _ancestors(dependencies)
    for name, before in dependencies.items():
        # What is reached through another layer needs no arrow of its own.
        through = {far for near in before for far in above[near]}
        for source in sorted(before - through):
            _arrow(ax, boxes[source], boxes[name], [box for other, box in boxes.items() if other not in (source, name)])
    for name, layer in layers.items():
        _stack(ax, layer, boxes[name])
    _deadline(ax, layers, boxes, tops)
    iterations = {layer.phase: layer.iteration for layer in layers.values()}
    ax.text(0.3, height - 0.42, _title(iterations), fontsize=17, weight="bold", va="center")
    return picture


def _title(iterations: Mapping[str, str]) -> str:
    now, following = iterations.get("train") or iterations.get("rollout"), iterations.get("explore")
    if now and following and now != following:
        return f"Iteration {now}: train on its samples while spot workers explore seeds for iteration {following}"
    if now and AHEAD in iterations:
        return f"Iteration {now}: train on its samples while others begin with iteration {iterations[AHEAD]}"
    return f"Iteration {now or following}" if now or following else "Task graph"


def _subtitles(layers: Sequence[_Layer]) -> dict[str, str]:
    """What the workers of each lane do."""
    told = {lane: subtitle for lane, (_, subtitle) in TITLES.items()}
    does = {lane: {layer.phase for layer in layers if lane in layer.lanes} for lane in ("reserved", "spot")}
    if "train" in does["spot"]:
        last = ",\nthen explore" if "explore" in does["spot"] else ""
        told["spot"] = "roll out, then train" + (",\nthen roll out ahead" if AHEAD in does["spot"] else last)
    elif AHEAD in does["spot"]:
        told["spot"] = "roll out, then begin\nwith the next iteration"
    elif any(layer.on_both for layer in layers):
        told["spot"] = "roll out, then train" + ("\nand explore" if "explore" in does["spot"] else "")
    elif "explore" not in does["spot"]:
        told["spot"] = "roll out,\nthen wait"
    if "train" not in does["reserved"]:
        told["reserved"] = (
            "update the weights" if "rollout" not in does["reserved"] else "roll out, then update\nthe weights"
        )
    if not any(layer.phase == "rollout" for layer in layers):  # samples are trained on as they were drawn
        told |= {lane: re.sub(r"^roll out,\s(then )?", "", told[lane]) for lane in ("reserved", "spot")}
    return told


def _lanes(
    ax: Axes, lanes: Iterable[str], width: float, height: float, subtitles: Mapping[str, str]
) -> dict[str, float]:
    """Draw the lanes; return the top of every row."""
    tops: dict[str, float] = {}
    y = height - TOP
    for lane in lanes:
        rows = LANES[lane]
        lane_height = ROW * len(rows) + PAD * 2
        colour = POOL_COLOURS.get(lane, FAINT)
        style = "round,pad=0,rounding_size=0.12"
        ax.add_patch(
            FancyBboxPatch((0.2, y - lane_height), width - 0.4, lane_height, style, fc=colour, ec="none", alpha=0.08)
        )
        title, subtitle = TITLES[lane][0], subtitles[lane]
        ax.text(0.4, y - lane_height / 2 + 0.1, title, color=colour, weight="bold", fontsize=12, va="center")
        ax.text(0.4, y - lane_height / 2 - 0.16, subtitle, color=FAINT, fontsize=9, va="top")
        for index, row in enumerate(rows):
            tops[row] = y - PAD - ROW * index
        y -= lane_height + PAD * 0.5
    return tops


def _place(layer: _Layer, columns: range, tops: Mapping[str, float]) -> _Box:
    rows = _rows(layer)
    left = LEFT + columns.start * (COLUMN + GAP)
    bottom, top = tops[rows[-1]] - ROW + 0.06, tops[rows[0]] - LABEL
    unused = 0.0 if layer.phase == "train" else max(0.0, top - bottom - TALLEST * _grid(layer, len(rows))[0])
    return _Box(
        left=left, right=left + len(columns) * (COLUMN + GAP) - GAP, bottom=bottom + unused / 2, top=top - unused / 2
    )


def _grid(layer: _Layer, rows: int) -> tuple[int, int]:
    """Rows and columns of a layer's boxes: one above the other where there is room; parts of training one by one."""
    count = min(layer.tasks, BOXES_MAX)
    if layer.phase == "train":
        return 1, count
    across = 2 if rows == 1 and count > 3 else 1
    return -(-count // across), across


def _stack(ax: Axes, layer: _Layer, box: _Box) -> None:
    """A layer's label and its tasks, one small box each."""
    down, across = _grid(layer, len(_rows(layer)))
    gap = 0.05
    wide = (box.right - box.left - gap * (across - 1)) / across
    high = (box.top - box.bottom - gap * (down - 1)) / down
    style = f"round,pad=0,rounding_size={min(0.09, high / 3)}"
    for index in range(min(layer.tasks, BOXES_MAX)):
        corner = (box.left + index % across * (wide + gap), box.top - (index // across + 1) * (high + gap) + gap)
        ax.add_patch(FancyBboxPatch(corner, wide, high, style, fc=phase_colour(layer.phase), ec="none", zorder=3))
    label = layer.phase.removeprefix("explore-") + (f" r{layer.round}" if layer.round else "")
    times = f" × {layer.tasks}" if layer.tasks > 1 else ""
    middle = (box.left + box.right) / 2
    both = ", on spot workers too" if layer.on_both and layer.phase == "train" else ""
    ax.text(middle, box.top + 0.07, label + times + both, ha="center", va="bottom", fontsize=10.5, zorder=5)
    if layer.phase in MAKES and layer.iteration:
        made = MAKES[layer.phase].format(int(layer.iteration) + (layer.phase == "publish"))
        ax.text(middle, box.bottom - 0.07, made, ha="center", va="top", fontsize=10, style="italic", color=FAINT)


def _arrow(ax: Axes, source: _Box, target: _Box, others: list[_Box]) -> None:
    """From the right of one layer to the left of the next; it turns in the space between columns."""
    low, high = max(source.bottom, target.bottom), min(source.top, target.top)
    level = (low + high) / 2 if low < high else None
    start = (source.right + 0.03, level or (source.bottom + source.top) / 2)
    end = (target.left - 0.09, level or (target.bottom + target.top) / 2)
    lean = 0.05 if end[1] > start[1] else -0.05  # so that ways up and down do not share a line
    first, last = source.right + GAP / 2 + lean, target.left - GAP / 2 + lean

    def free(y: float) -> bool:
        return not any(box.left < last and box.right > first and box.bottom < y < box.top + LABEL for box in others)

    points = [start, (first, start[1]), (first, end[1]), end]
    if not free(end[1]):
        beside = start[1] if free(start[1]) else source.bottom - 0.13
        points = [start, (first, start[1]), (first, beside), (last, beside), (last, end[1]), end]
    ax.add_patch(PathPatch(_rounded(points), fc="none", ec=INK, lw=1.1, alpha=0.75, zorder=4))
    tip = [(end[0] + 0.07, end[1]), (end[0] - 0.02, end[1] + 0.05), (end[0] - 0.02, end[1] - 0.05)]
    ax.add_patch(Polygon(tip, fc=INK, ec="none", alpha=0.85, zorder=4))


def _rounded(points: Sequence[tuple[float, float]]) -> Line:
    """A line through points, along the axes, with its corners rounded."""
    vertices, codes = [points[0]], [Line.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        cut = []
        for other in (before, after):
            length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
            share = min(0.08, length / 2) / length if length else 0.0
            cut.append((corner[0] + share * (other[0] - corner[0]), corner[1] + share * (other[1] - corner[1])))
        vertices += [cut[0], corner, cut[1]]
        codes += [Line.LINETO, Line.CURVE3, Line.CURVE3]
    return Line([*vertices, points[-1]], [*codes, Line.LINETO])


def _deadline(ax: Axes, layers: Mapping[str, _Layer], boxes: Mapping[str, _Box], tops: Mapping[str, float]) -> None:
    """The end of training, where exploration runs beside it."""
    explored = [boxes[name] for name, layer in layers.items() if layer.phase.startswith("explore")]
    for name, layer in layers.items():
        box = boxes[name]
        if layer.phase == "train" and any(box.left < other.right <= box.right + 0.01 for other in explored):
            ends = max(boxes[last].right for last, other in layers.items() if base_phase(other.phase) == "train")
            x, bottom = ends + 0.08, tops["explore-score"] - ROW - PAD
            ax.plot([x, x], [box.bottom, bottom], color=phase_colour("train"), lw=1.6, ls=(0, (3, 2)), zorder=2)
            text = "training ends:\nexploration\ncloses"
            ax.text(x + 0.12, tops["explore"] - LABEL, text, color=phase_colour("train"), fontsize=10, va="top")
