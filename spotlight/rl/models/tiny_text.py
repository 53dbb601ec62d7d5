"""The embedded models that draw short texts into small grey images.

They read the quoted target of a prompt, letter by letter.
"""

from __future__ import annotations

import string

from spotlight.files import shown
from spotlight.records import SpotlightError
from spotlight.rl.models.tiny import SHIPPED, Tiny, Variant
from spotlight.rl.rewards import quoted_target

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " "

HEIGHT_PX, WIDTH_PX = 16, 32
TWO_DIGITS = Variant(
    weights=SHIPPED / "tiny_text.safetensors",
    height_px=HEIGHT_PX,
    width_px=WIDTH_PX,
    head_dim=16,
    axes_dims=(4, 6, 6),
)
"""Half a million parameters: two-digit numbers."""
MIXED = Variant(
    weights=SHIPPED / "tiny_mixed.safetensors", height_px=16, width_px=48, head_dim=32, axes_dims=(4, 14, 14)
)
"""1.9 million parameters: one to four digits and capitals."""


class TinyText(Tiny):
    """Its symbols are letters."""

    shipped = TWO_DIGITS
    symbols = len(ALPHABET)
    text_tokens = 8

    def read(self, text: str) -> list[int]:
        """Letters of the quoted target; a text without quotes (the negative prompt) is a blank.

        Raises:
            SpotlightError: a target is longer than the model's text, or has a letter it never saw.
        """
        target = quoted_target(text) if '"' in text else " "
        if len(target) > self.text_tokens or any(letter not in ALPHABET for letter in target):
            raise SpotlightError(
                f"the embedded model draws up to {self.text_tokens} ASCII characters, and the prompt {shown(text)} "
                f"asks for {shown(target)}: shorten it, or use a real checkpoint (model.name)"
            )
        return [ALPHABET.index(letter) + 1 for letter in target]
