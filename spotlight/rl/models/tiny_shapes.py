"""The embedded model that draws scenes of coloured shapes; it reads GenEval's prompts about them, word by word."""

from __future__ import annotations

from spotlight.records import SpotlightError
from spotlight.rl.models.tiny import SHIPPED, Tiny, Variant
from spotlight.rl.rewards.shapes import CLASSES, COLOURS

WORDS = (
    *("and", "left", "right", "above", "below", "two", "three", "four"),
    *COLOURS,
    *CLASSES,
    *("circles", "squares", "triangles", "crosses"),
)
"""That it knows; the weights go by their order."""
SILENT = ("a", "an", "photo", "of", "the")
"""Words that say nothing about a scene."""
SCENES = Variant(
    weights=SHIPPED / "tiny_shapes.safetensors",
    height_px=24,
    width_px=24,
    colours=3,
    head_dim=24,
    axes_dims=(4, 10, 10),
)
"""1.1 million parameters."""


class TinyShapes(Tiny):
    """Its symbols are words."""

    shipped = SCENES
    symbols = len(WORDS)
    text_tokens = 8

    def read(self, text: str) -> list[int]:
        """The words of a prompt; an empty one (the negative prompt) is a blank.

        Raises:
            SpotlightError: there are too many, or one that the model never saw.
        """
        every = text.lower().replace(".", " ").replace(",", " ").split()
        words = [word for word in every if word not in SILENT]
        unknown = [word for word in words if word not in WORDS]
        if unknown or len(words) > self.text_tokens:
            what = f"has the word {unknown[0]!r}" if unknown else f"has {len(words)} words"
            raise SpotlightError(
                f"the embedded model of shapes reads up to {self.text_tokens} of the words {', '.join(WORDS)}; the "
                f"prompt {text!r} {what}: put it in these words, or use a real checkpoint (model.name)"
            )
        return [WORDS.index(word) + 1 for word in words]
