"""The embedded models: tiny Qwen-Image transformers that draw short texts into small grey images.

Their text encoder reads the quoted target of a prompt, letter by letter; their latents are pixels.
Pre-trained by ``examples/pretrain_tiny.py``; see ``weights/CARD.md``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spotlight.records import SpotlightError
from spotlight.rl.models.base import Conditioning
from spotlight.rl.models.qwen_transformer import QwenTransformer
from spotlight.rl.rewards import quoted_target
from spotlight.store.node import Node, NotOnNode, fingerprint, map_tensors

PATCH_PX = 4
TEXT_TOKENS = 8
"""Longest target; a multiple of 8, so that text splits among up to 8 ranks."""
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " "
TEXT_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """In what one embedded model differs from another."""

    weights: Path
    """The file that ships with the package."""
    height_px: int
    width_px: int
    """Of an image; it draws no other."""
    head_dim: int
    axes_dims: tuple[int, int, int]
    """Of a head, for the rotary positions of frame, row and column."""


_SHIPPED = Path(__file__).parent / "weights"
HEIGHT_PX, WIDTH_PX = 16, 32
TWO_DIGITS = Shape(
    weights=_SHIPPED / "tiny_text.safetensors",
    height_px=HEIGHT_PX,
    width_px=WIDTH_PX,
    head_dim=16,
    axes_dims=(4, 6, 6),
)
"""Half a million parameters: two-digit numbers."""
MIXED = Shape(
    weights=_SHIPPED / "tiny_mixed.safetensors", height_px=16, width_px=48, head_dim=32, axes_dims=(4, 14, 14)
)
"""1.9 million parameters: one to four digits and capitals."""
SHAPES = {"tiny-text": TWO_DIGITS, "tiny-mixed": MIXED}
"""By the name that ``model.name`` gives."""


class TinyText(QwenTransformer):
    """A network of the same class as Qwen-Image, in pixel space."""

    def __init__(self, shape: Shape = TWO_DIGITS) -> None:
        self.device = torch.device("cpu")
        self.shape = shape
        self.transformer = QwenImageTransformer2DModel(
            patch_size=PATCH_PX,
            in_channels=PATCH_PX * PATCH_PX,
            out_channels=1,
            num_layers=3,
            attention_head_dim=shape.head_dim,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            guidance_embeds=False,
            axes_dims_rope=shape.axes_dims,
        )
        self.letters = nn.Embedding(len(ALPHABET) + 1, TEXT_DIM)  # index 0 is padding
        self.places = nn.Embedding(TEXT_TOKENS, TEXT_DIM)

    @classmethod
    def load(
        cls, path: str, device: torch.device, dtype: torch.dtype, node: Node | None = None, shape: Shape = TWO_DIGITS
    ) -> TinyText:
        """The embedded weights of this shape, or those of another file that ``examples/pretrain_tiny.py`` wrote.

        Args:
            node: holds them for all its processes: on the CPU, the parameters are views of its memory.
        """
        model = cls(shape)
        file = Path(path) if path else shape.weights
        try:
            mapped = _on_node(node, file, dtype) if node else None
            model.load_state(load_file(file) if mapped is None else mapped, assign=mapped is not None)
        except (SafetensorError, OSError) as error:
            raise SpotlightError(
                f"{file}: not a readable weights file ({error}); restore it or pre-train anew"
            ) from None
        model.device = device
        parts: tuple[nn.Module, ...] = (model.transformer, model.letters, model.places)
        for part in parts:
            part.to(device)
            if dtype != torch.float32:
                part.to(dtype)
            part.requires_grad_(False)
            part.eval()
        return model

    def state(self) -> dict[str, Tensor]:
        """All weights, by dotted name."""
        parts = {"transformer": self.transformer, "letters": self.letters, "places": self.places}
        return {
            f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()
        }

    def load_state(self, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
        """Copy what `state` returned into the parameters, or ``assign`` the given tensors to them."""
        for part, module in (("transformer", self.transformer), ("letters", self.letters), ("places", self.places)):
            prefix = f"{part}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            module.load_state_dict(own, assign=assign)

    def preload(self, texts: Sequence[str], cache: Path | None = None) -> None:
        """Nothing is worth keeping, but what cannot be drawn is found before the run begins.

        Raises:
            SpotlightError: as `encode`.
        """
        self.encode(texts)

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Letters of the quoted targets; a text without quotes (the negative prompt) is a blank.

        Raises:
            SpotlightError: a target is longer than the model's text, or has a letter it never saw.
        """
        ids = torch.zeros(len(texts), TEXT_TOKENS, dtype=torch.long)
        for row, text in enumerate(texts):
            target = quoted_target(text) if '"' in text else " "
            if len(target) > TEXT_TOKENS or any(letter not in ALPHABET for letter in target):
                raise SpotlightError(
                    f"the embedded model draws up to {TEXT_TOKENS} ASCII characters, and the prompt {text!r} "
                    f"asks for {target!r}: shorten it, or use a real checkpoint (model.name)"
                )
            ids[row, : len(target)] = torch.tensor([ALPHABET.index(letter) + 1 for letter in target])
        ids = ids.to(self.device)
        return Conditioning(embeds_BTD=self.letters(ids) + self.places.weight, mask_BT=ids > 0)

    @property
    def small_px(self) -> tuple[int, int]:
        return self.shape.height_px, self.shape.width_px

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        if (height_px, width_px) != self.small_px:
            raise SpotlightError(
                f"this embedded model draws {self.shape.height_px} x {self.shape.width_px} px only, "
                f"and model.height_px x model.width_px is {height_px} x {width_px}"
            )
        return height_px // PATCH_PX, width_px // PATCH_PX

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        return (*np.linspace(1.0, 1.0 / steps, steps).tolist(), 0.0)

    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        rows, columns = self.grid(height_px, width_px)
        pixels = x_BNC.view(-1, rows, columns, PATCH_PX, PATCH_PX).permute(0, 1, 3, 2, 4)
        grey = pixels.reshape(-1, height_px, width_px, 1).add(1).mul(127.5).round().clamp(0, 255)
        return np.repeat(grey.to(torch.uint8).cpu().numpy(), 3, axis=-1)


def _on_node(node: Node, file: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The weights in this dtype, mapped from the node's memory; None without room there."""

    def write(copy: Path) -> None:
        save_file({name: value.to(dtype) for name, value in load_file(file).items()}, copy)

    try:
        return map_tensors(node.make(fingerprint([file], str(dtype)), write, size_bytes=file.stat().st_size))
    except NotOnNode:
        return None


def patches(images: NDArray[np.uint8]) -> Tensor:
    """Grey images of shape (B, height, width) to latents in [-1, 1], the inverse of `TinyText.decode`."""
    _, height_px, width_px = images.shape
    x = torch.from_numpy(images).float() / 127.5 - 1
    x = x.view(-1, height_px // PATCH_PX, PATCH_PX, width_px // PATCH_PX, PATCH_PX).permute(0, 1, 3, 2, 4)
    return x.reshape(len(images), -1, PATCH_PX * PATCH_PX)
