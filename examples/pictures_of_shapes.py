"""Pictures of coloured shapes, as GenEval's prompts ask for them, for the embedded model of shapes to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from spotlight.records import Prompt
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards.geneval import metadata_of, relative_position
from spotlight.rl.rewards.shapes import CLASSES, COLOURS

PROMPTS = [Path(__file__).parent / "prompts" / f"shapes-{name}.jsonl" for name in ("train", "validation")]
CELL_PX = 12
"""A shape is in one of four cells, alone."""
RADII = (4.0, 5.0)
"""Of shapes, in pixels: half the side of the box around one."""
OFF_CENTRE_PX = 0.75
"""Of its cell, at most."""
FINE = 8
"""A picture is drawn so many times larger, and made smaller then, for soft edges."""
Box = tuple[float, float, float, float]


class Shapes:
    """Scenes of one to four shapes, 24 x 24 px."""

    height_px = width_px = 2 * CELL_PX

    def __init__(self) -> None:
        self._kinds: dict[str, list[Prompt]] = {}
        for prompt in (prompt for file in PROMPTS for prompt in read_prompts(file)):
            self._kinds.setdefault(str(metadata_of(prompt)["tag"]), []).append(prompt)

    def prompts(self, rng: np.random.Generator, count: int) -> list[Prompt]:
        """All kinds alike."""
        kinds = list(self._kinds.values())
        return [_one_of(kinds[rng.integers(len(kinds))], rng) for _ in range(count)]

    def kinds(self, rng: np.random.Generator, count: int) -> Mapping[str, list[Prompt]]:
        return {name: [_one_of(prompts, rng) for _ in range(count)] for name, prompts in self._kinds.items()}

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        """What the prompt asks for and nothing else, on white; of colours that it does not name, any."""
        image = Image.new("RGB", (FINE * self.width_px, FINE * self.height_px), "white")
        canvas = ImageDraw.Draw(image)
        for name, colour, box in self._scene(prompt, rng):
            draw_shape(canvas, name, COLOURS[colour], tuple(FINE * edge for edge in box))  # type: ignore[arg-type]
        return np.asarray(image.resize((self.width_px, self.height_px), Image.Resampling.BOX))

    def _scene(self, prompt: Prompt, rng: np.random.Generator) -> list[tuple[str, str, Box]]:
        include = metadata_of(prompt)["include"]
        while True:  # until they are where they should be: after a few times
            boxes = [_box(int(cell), rng) for cell in rng.permutation(4)]
            scene: list[tuple[str, str, Box]] = []
            firsts: list[Box] = []
            for clause in include:
                colour = clause.get("color") or str(rng.choice(list(COLOURS)))
                firsts.append(boxes[0])
                scene += [(clause["class"], colour, boxes.pop(0)) for _ in range(clause["count"])]
            wanted = (
                (first, *clause["position"])
                for first, clause in zip(firsts, include, strict=True)
                if "position" in clause
            )
            if all(relation in relative_position(first, firsts[other]) for first, relation, other in wanted):
                return scene


def _box(cell: int, rng: np.random.Generator) -> Box:
    radius = rng.uniform(*RADII)
    x, y = (CELL_PX * (at + 0.5) + rng.uniform(-OFF_CENTRE_PX, OFF_CENTRE_PX) for at in divmod(cell, 2))
    return x - radius, y - radius, x + radius, y + radius


def draw_shape(canvas: ImageDraw.ImageDraw, name: str, colour: tuple[int, int, int], box: Box) -> None:
    """One of `CLASSES`, filling a box."""
    assert name in CLASSES, name
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    match name:
        case "circle":
            canvas.ellipse(box, fill=colour)
        case "triangle":
            canvas.polygon([(left + width / 2, top), (right, bottom), (left, bottom)], fill=colour)
        case "cross":
            canvas.rectangle((left + width / 3, top, right - width / 3, bottom), fill=colour)
            canvas.rectangle((left, top + height / 3, right, bottom - height / 3), fill=colour)
        case _:
            canvas.rectangle(box, fill=colour)


def _one_of(prompts: list[Prompt], rng: np.random.Generator) -> Prompt:
    return prompts[rng.integers(len(prompts))]
