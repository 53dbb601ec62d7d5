"""Finds simple coloured shapes on a light ground: a detector for GenEval's rewards that needs no model.

What is dark or coloured is cut into connected regions; each is taken for the shape whose outline covers it best.

Shapes: H and W pixels of an image, C colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.records import SpotlightError
from spotlight.rl.rewards.geneval import Objects

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 190, 20),
    "purple": (150, 50, 170),
}
"""{name: red, green and blue}"""
CLASSES = ("circle", "square", "triangle", "cross")

INK = 0.5
"""Least share of full ink that a pixel of a shape has: at an edge, the shape covers half of the pixel."""
FINE = 4
"""Outlines are compared at so many times the size."""
LEAST_AREA = 0.01
"""Least share of the image; smaller regions are ignored."""
CERTAIN_COVER, NO_COVER = 0.75, 0.5
"""Intersection over union at which a region certainly is a shape (score 1), and up to which it is none (score 0)."""


class ShapeDetector:
    """Finds shapes of `CLASSES`, in `COLOURS`; of other classes it finds none."""

    def check(self, classes: Sequence[str], colours: Sequence[str]) -> None:
        """
        Raises:
            SpotlightError: it knows no such shape or colour.
        """
        unknown = sorted({*classes} - {*CLASSES}) + sorted({*colours} - COLOURS.keys())
        if unknown:
            raise SpotlightError(
                f"the detector 'shapes' finds no {', '.join(map(repr, unknown))}: it knows {', '.join(CLASSES)} in "
                f"{', '.join(COLOURS)}"
            )

    def __call__(self, image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Objects:
        """The objects of these classes; a ``score`` is 1 where a region looks exactly like its shape."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in classes}
        for name, thing in regions(image_HWC):
            if name in found:
                found[name].append(thing)
        return found


def regions(image_HWC: NDArray[np.uint8]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each connected region with the name of its shape."""
    ink_HW = 1 - image_HWC.min(axis=-1) / 255
    labels_HW = connected(ink_HW > INK)
    for label in np.unique(labels_HW[labels_HW > 0]):
        mask_HW = labels_HW == label
        if mask_HW.sum() < LEAST_AREA * mask_HW.size:
            continue
        found = finely(np.where(grown(mask_HW), ink_HW, 0.0))
        if found is None:
            continue
        fine_HW, box = found
        covers = {name: cover(fine_HW, name) for name in CLASSES}
        name = max(covers, key=covers.__getitem__)
        narrow = min(fine_HW.shape) / max(fine_HW.shape)
        score = (covers[name] * narrow - NO_COVER) / (CERTAIN_COVER - NO_COVER)
        yield (
            name,
            {
                "box": box,
                "score": float(np.clip(score, 0, 1)),
                "color": colour(image_HWC[mask_HW], ink_HW[mask_HW]),
            },
        )


def connected(mask_HW: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Label regions of pixels that touch at an edge, by positive numbers with gaps; 0 is outside."""
    labels_HW = np.where(mask_HW, np.arange(1, mask_HW.size + 1).reshape(mask_HW.shape), 0)
    while True:
        around = np.pad(labels_HW, 1)
        neighbours = (around[1:-1, 1:-1], around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:])
        spread_HW = np.where(mask_HW, np.maximum.reduce(neighbours), 0)
        if np.array_equal(spread_HW, labels_HW):
            return labels_HW
        labels_HW = spread_HW


def grown(mask_HW: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask with the pixels that touch it at an edge, which the shape may cover in part (a dilation)."""
    around = np.pad(mask_HW, 1)
    return mask_HW | around[:-2, 1:-1] | around[2:, 1:-1] | around[1:-1, :-2] | around[1:-1, 2:]


def finely(ink_HW: NDArray[np.floating]) -> tuple[NDArray[np.bool_], list[float]] | None:
    """A region cut out and enlarged `FINE` times, so that partly covered pixels count in part; its box in pixels.

    None if nothing is left of it, as of a faint line that is a pixel wide.
    """
    from PIL import Image

    rows, columns = np.flatnonzero(ink_HW.any(axis=1)), np.flatnonzero(ink_HW.any(axis=0))
    top, left = rows[0], columns[0]
    cut = np.pad(ink_HW[top : rows[-1] + 1, left : columns[-1] + 1], 1).astype(np.float32)
    size = FINE * cut.shape[1], FINE * cut.shape[0]
    large_HW = np.asarray(Image.fromarray(cut).resize(size, Image.Resampling.BILINEAR)) > INK
    rows, columns = np.flatnonzero(large_HW.any(axis=1)), np.flatnonzero(large_HW.any(axis=0))
    if not len(rows):
        return None
    edges = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    offsets = (left - 1, top - 1, left - 1, top - 1)
    box = [float(offset + edge / FINE) for offset, edge in zip(offsets, edges, strict=True)]
    return large_HW[edges[1] : edges[3], edges[0] : edges[2]], box


def cover(mask_HW: NDArray[np.bool_], name: str) -> float:
    """Intersection over union of a region, cut out, and a shape's outline of the same size."""
    outline_HW = outline(name, *mask_HW.shape)
    return float((mask_HW & outline_HW).sum() / (mask_HW | outline_HW).sum())


def outline(name: str, height: int, width: int) -> NDArray[np.bool_]:
    """The pixels of a shape that fills a box."""
    y, x = (np.arange(height)[:, None] + 0.5) / height, (np.arange(width)[None, :] + 0.5) / width
    inside: NDArray[np.bool_]
    match name:
        case "circle":
            inside = (2 * x - 1) ** 2 + (2 * y - 1) ** 2 <= 1
        case "triangle":
            inside = np.abs(2 * x - 1) <= y
        case "cross":
            inside = (np.abs(2 * x - 1) <= 1 / 3) | (np.abs(2 * y - 1) <= 1 / 3)
        case _:
            inside = np.ones((height, width), dtype=bool)
    return inside


def colour(pixels_NC: NDArray[np.uint8], ink_N: NDArray[np.floating]) -> str:
    """The name of the colour that is nearest to the mean of a region's inner pixels, which no edge has made lighter."""
    inner_NC = pixels_NC[ink_N >= np.median(ink_N)].astype(np.float64)
    distances = {name: float(np.linalg.norm(inner_NC.mean(axis=0) - rgb)) for name, rgb in COLOURS.items()}
    return min(distances, key=distances.__getitem__)
