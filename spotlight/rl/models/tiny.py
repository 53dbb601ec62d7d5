"""What the embedded models have in common: a tiny Qwen-Image transformer in pixel space, and a table of symbols.

Their text encoder is that table and one of places; their latents are pixels. Pre-trained by
``examples/pretrain_tiny.py``; see ``weights/CARD.md``.

Shapes: B images, H and W pixels, C colours (1 where the model draws grey), N tokens of an image.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spotlight.records import SpotlightError, record
from spotlight.rl.models.base import Conditioning
from spotlight.rl.models.qwen_transformer import QwenTransformer
from spotlight.store.node import Node, NotOnNode, fingerprint, map_tensors

PATCH_PX = 4
TEXT_DIM = 64
SHIPPED = Path(__file__).parent / "weights"
"""The weights that come with the package."""


@record
class Variant:
    """In what one embedded model differs from another that reads the same symbols."""

    weights: Path
    """The file that ships with the package."""
    height_px: int
    width_px: int
    """Of an image; it draws no other."""
    colours: int = 1
    """1: grey; 3: red, green and blue."""
    head_dim: int
    axes_dims: tuple[int, int, int]
    """Of a head, for the rotary positions of frame, row and column."""


class Tiny(QwenTransformer):
    """A network of the same class as Qwen-Image, in pixel space."""

    shipped: ClassVar[Variant]
    """The one that it is where no other is asked for."""
    symbols: ClassVar[int]
    """How many there are, without the padding."""
    text_tokens: ClassVar[int]
    """Longest text; a multiple of 8, so that text splits among up to 8 ranks."""

    def __init__(self, variant: Variant | None = None) -> None:
        self.device = torch.device("cpu")
        self.variant = variant = variant or self.shipped
        self.transformer = QwenImageTransformer2DModel(
            patch_size=PATCH_PX,
            in_channels=PATCH_PX * PATCH_PX * variant.colours,
            out_channels=variant.colours,
            num_layers=3,
            attention_head_dim=variant.head_dim,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            guidance_embeds=False,
            axes_dims_rope=variant.axes_dims,
        )
        self.letters = nn.Embedding(self.symbols + 1, TEXT_DIM)  # index 0 is padding
        self.places = nn.Embedding(self.text_tokens, TEXT_DIM)

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        node: Node | None = None,
        variant: Variant | None = None,
    ) -> Self:
        """The embedded weights of a variant, or those of another file that ``examples/pretrain_tiny.py`` wrote.

        Args:
            node: holds them for all its processes: on the CPU, the parameters are views of its memory.

        Raises:
            SpotlightError: the file cannot be read, or is another model's.
        """
        model = cls(variant)
        file = Path(path) if path else model.variant.weights
        try:
            mapped = _on_node(node, file, dtype) if node else None
            model.load_state(load_file(file) if mapped is None else mapped, assign=mapped is not None)
        except (SafetensorError, OSError) as error:
            raise SpotlightError(
                f"{file}: not a readable weights file ({error}); restore it or pre-train anew"
            ) from None
        except (RuntimeError, KeyError) as error:  # of torch: other shapes, or other names
            raise SpotlightError(f"{file}: these are another model's weights ({str(error)[:300]}...)") from None
        model.device = device
        parts: tuple[nn.Module, ...] = (model.transformer, model.letters, model.places)
        for part in parts:
            part.to(device)
            if dtype != torch.float32:
                nn.Module.to(part, dtype)  # diffusers' own warns of layers to be kept in float32, and has none here
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

    @abstractmethod
    def read(self, text: str) -> list[int]:
        """The numbers of a prompt's symbols, from 1; none: a blank.

        Raises:
            SpotlightError: the model cannot draw what it asks for.
        """

    def preload(self, texts: Sequence[str], cache: Path | None = None) -> None:
        """Nothing is worth keeping, but what cannot be drawn is found before the run begins.

        Texts are read and not encoded: a hundred thousand of them would take 400 MB.

        Raises:
            SpotlightError: as `read`.
        """
        for text in texts:
            self.read(text)

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """The symbols of texts, each with its place.

        Raises:
            SpotlightError: as `read`.
        """
        ids = torch.zeros(len(texts), self.text_tokens, dtype=torch.long)
        for row, text in enumerate(texts):
            symbols = self.read(text)
            ids[row, : len(symbols)] = torch.tensor(symbols)
        ids = ids.to(self.device)
        return Conditioning(embeds_BTD=self.letters(ids) + self.places.weight, mask_BT=ids > 0)

    @property
    def small_px(self) -> tuple[int, int]:
        return self.variant.height_px, self.variant.width_px

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        if (height_px, width_px) != self.small_px:
            raise SpotlightError(
                f"this embedded model draws {self.variant.height_px} x {self.variant.width_px} px only, "
                f"and model.height_px x model.width_px is {height_px} x {width_px}"
            )
        return height_px // PATCH_PX, width_px // PATCH_PX

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        return (*np.linspace(1.0, 1.0 / steps, steps).tolist(), 0.0)

    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        rows, columns = self.grid(height_px, width_px)
        pixels = x_BNC.view(-1, rows, columns, PATCH_PX, PATCH_PX, self.variant.colours).permute(0, 1, 3, 2, 4, 5)
        x_BHWC = pixels.reshape(-1, height_px, width_px, self.variant.colours)
        drawn = x_BHWC.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        return np.repeat(drawn, 3 // self.variant.colours, axis=-1)


def _on_node(node: Node, file: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The weights in this dtype, mapped from the node's memory; None without room there."""

    def write(copy: Path) -> None:
        save_file({name: value.to(dtype) for name, value in load_file(file).items()}, copy)

    try:
        return map_tensors(node.make(fingerprint([file], str(dtype)), write, size_bytes=file.stat().st_size))
    except NotOnNode:
        return None


def patches(images_BHWC: NDArray[np.uint8]) -> Tensor:
    """Images to latents in [-1, 1], of shape (B, N, pixels of a token): the inverse of `Tiny.decode`."""
    count, height_px, width_px, colours = images_BHWC.shape
    x = torch.from_numpy(images_BHWC).float() / 127.5 - 1
    x = x.view(count, height_px // PATCH_PX, PATCH_PX, width_px // PATCH_PX, PATCH_PX, colours)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(count, -1, PATCH_PX * PATCH_PX * colours)
