"""Pictures of short texts, for the embedded models of text to learn from."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spotlight.records import Prompt

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
CAPITALS = "".join(letter for letter in string.ascii_uppercase if letter not in "IO")
"""Without those that nobody tells from digits."""
ALPHABETS = {"digits": string.digits, "capitals": CAPITALS, "mixed": string.digits + CAPITALS}
LENGTHS = (1, 2, 3, 4)
LENGTH_SHARES = (0.25, 0.35, 0.25, 0.15)
ALPHABET_SHARES = (0.45, 0.35, 0.2)
COMMON = 4
"""A text's letters have shares 1 / (COMMON + place in their alphabet): late ones are rare, and so drawn badly."""
UNIFORM = 1e9
"""In its place: no letter is rarer than another."""


class Digits:
    """Two-digit numbers, in six faces."""

    faces: tuple[str, ...] = FACES
    sizes: tuple[int, int] = (11, 15)
    """Of type, in pixels: at least, and less than."""
    height_px, width_px = 16, 32

    def prompts(self, rng: np.random.Generator, count: int) -> list[Prompt]:
        return [_quoted(f"{number:02d}") for number in rng.integers(100, size=count)]

    def kinds(self, rng: np.random.Generator, count: int) -> Mapping[str, list[Prompt]]:
        return {"2 digits": self.prompts(rng, count)}

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Black text on white, in a random face and size, a little off the centre."""
        text = prompt.text.strip('"')
        face = self.faces[rng.integers(len(self.faces))]
        font = ImageFont.truetype(str(FONTS / f"{face}.ttf"), int(rng.integers(*self.sizes)))
        image = Image.new("L", (self.width_px, self.height_px), 255)
        canvas = ImageDraw.Draw(image)
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        x = (self.width_px - right - left) / 2 + rng.integers(-2, 3)
        y = (self.height_px - bottom - top) / 2 + rng.integers(-1, 2)
        canvas.text((x, y), text, fill=0, font=font)
        return np.asarray(image)[..., None]


class Mixed(Digits):
    """One to four digits and capitals, in two faces."""

    faces, sizes, width_px = FACES[:2], (10, 14), 48

    def prompts(self, rng: np.random.Generator, count: int) -> list[Prompt]:
        """Some kinds and some letters are rarer than others."""
        return [
            _quoted(text_of(rng, ALPHABETS[str(kind)], int(length)))
            for kind, length in zip(
                rng.choice(list(ALPHABETS), size=count, p=ALPHABET_SHARES),
                rng.choice(LENGTHS, size=count, p=LENGTH_SHARES),
                strict=True,
            )
        ]

    def kinds(self, rng: np.random.Generator, count: int) -> Mapping[str, list[Prompt]]:
        return {
            f"{length} {name}": [_quoted(text_of(rng, alphabet, length, common=UNIFORM)) for _ in range(count)]
            for name, alphabet in ALPHABETS.items()
            for length in LENGTHS
            if not (length == 1 and name == "mixed")
        }


def text_of(rng: np.random.Generator, alphabet: str, length: int, common: float = COMMON) -> str:
    shares = 1 / (common + np.arange(len(alphabet)))
    return "".join(rng.choice(list(alphabet), size=length, p=shares / shares.sum()))


def _quoted(text: str) -> Prompt:
    return Prompt(id=0, text=f'"{text}"')
