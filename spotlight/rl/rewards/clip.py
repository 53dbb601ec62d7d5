"""Rewards from CLIP and what is built on it: CLIP score, PickScore, the aesthetic predictor; from local checkpoints.

Images are prepared here, as CLIP's are, with the mean and the deviation of colours that the checkpoint's
``preprocessor_config.json`` gives; torchvision is not needed. Networks are on the GPU where this process has one.
Tiny checkpoints were tried on a GPU; the published weights nowhere.

Shapes: B images, E features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spotlight.files import kind_of, shown
from spotlight.records import SpotlightError
from spotlight.rl.checkpoints import require_class, require_tokenizer, tensors
from spotlight.rl.rewards.base import Scorer, checkpoint, network

LAYER = re.compile(r"layers\.\d+\.weight")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""CLIP's own, where a checkpoint does not say."""


class ClipScorer(Scorer):
    """The cosine of an image's and its prompt's CLIP embeddings; Flow-GRPO and DiffusionNFT have it times 100 / 30."""

    reads_text: ClassVar[bool] = True
    range = (-1.0, 1.0)
    usual: ClassVar[tuple[float, float] | None] = (0.1, 0.45)  # assumed: from published scores of 0.2 to 0.35

    def __init__(self, path: str) -> None:
        self._path = checkpoint(path)
        preprocessing(self._path)
        if self.reads_text:
            require_tokenizer(self._path)

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        image_BE, text_BE = self.image_features(images_BHWC), self.text_features(prompts)
        cosine_B = (image_BE * text_BE).sum(-1).astype(np.float64)
        return [float(value) for value in np.clip(cosine_B, -1, 1)]  # rounding may leave the range

    def image_features(self, images_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embeddings of length 1, of shape (B, E)."""
        import torch

        parts = []
        with torch.no_grad():
            for image in images_BHWC:  # one by one: in a batch, the last bits would depend on its size
                x = torch.from_numpy(self._prepared(image))[None].to(self._model.device)
                parts.append(self._embedding(self._model.get_image_features(pixel_values=x)))
        return np.concatenate(parts)

    def text_features(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """As `image_features`; what is too long for the model is cut off."""
        import torch

        features = {}
        with torch.no_grad():
            for text in set(prompts):
                tokens = self._tokenizer(text, truncation=True, max_length=self._tokens_max, return_tensors="pt")
                features[text] = self._embedding(self._model.get_text_features(**tokens.to(self._model.device)))
        return np.concatenate([features[text] for text in prompts])

    @staticmethod
    def _embedding(output: Any) -> NDArray[np.float32]:
        x_BE = getattr(output, "pooler_output", output).float()
        unit: NDArray[np.float32] = (x_BE / x_BE.norm(dim=-1, keepdim=True)).cpu().numpy()
        return unit

    def _prepared(self, image_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The shorter side resized, the middle cut out, the colours normalised; channels first."""
        from PIL import Image

        side = self._side_px
        height, width = image_HWC.shape[:2]
        short = min(height, width)
        size = side * width // short, side * height // short  # cut off, as transformers does
        resized = np.asarray(Image.fromarray(image_HWC).resize(size, Image.Resampling.BICUBIC), dtype=np.float32) / 255
        top, left = (size[1] - side) // 2, (size[0] - side) // 2
        middle = resized[top : top + side, left : left + side]
        mean, std = (np.array(self._settings.get(name, given), dtype=np.float32) for name, given in NORMALISED)
        return ((middle - mean) / std).transpose(2, 0, 1).astype(np.float32)

    @property
    def _tokens_max(self) -> int:
        return int(self._model.config.text_config.max_position_embeddings)

    @property
    def _side_px(self) -> int:
        return int(self._model.config.vision_config.image_size)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return preprocessing(self._path)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import CLIPModel

        unused = () if self.reads_text else ("text_", "logit_scale")
        return network(CLIPModel, self._path, dtype=torch.float32, unused=unused)  # also where it is stored in half

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(self._path, local_files_only=True)


NORMALISED = (("image_mean", MEAN), ("image_std", STD))


def preprocessing(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of how images are prepared; nothing, where it does not.

    Raises:
        SpotlightError: the file is damaged.
    """
    file = directory / "preprocessor_config.json"
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SpotlightError(f"{file}: not readable ({error}); copy it anew") from None


class PickScorer(ClipScorer):
    """PickScore: the cosine, times the learned scale of its checkpoint (some 100).

    Flow-GRPO and DiffusionNFT divide it by 26.
    """

    range: ClassVar[tuple[float, float]] = (-101.0, 101.0)
    usual: ClassVar[tuple[float, float] | None] = (14.0, 28.0)  # assumed: from published scores of 18 to 24

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        scale = self._model.logit_scale.detach().exp().item()
        return [scale * cosine for cosine in super().__call__(images_BHWC, prompts)]


class AestheticScorer(ClipScorer):
    """The aesthetic predictor: linear layers on CLIP's image embedding; prompts do not matter.

    Args:
        path: of the CLIP checkpoint.
        head: a .safetensors file of the layers, ``layers.N.weight`` and ``layers.N.bias``, in order.
    """

    range: ClassVar[tuple[float, float]] = (0.0, 10.0)
    usual: ClassVar[tuple[float, float] | None] = None
    reads_text: ClassVar[bool] = False

    def __init__(self, path: str, *, head: str) -> None:
        super().__init__(path)
        self._head = Path(head)
        if self._head.suffix != ".safetensors" or kind_of(head) != "file":
            raise SpotlightError(
                f"reward.options.head = {head!r}: no such .safetensors file, and the layers of the aesthetic predictor "
                "are read from one: name it"
            )
        _check_head(self._head, require_class(self._path, None).get("projection_dim"))

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        x_BE = self.image_features(images_BHWC).astype(np.float64)
        for weight, bias in self._layers:
            x_BE = x_BE @ weight.T + bias
        return [float(value) for value in x_BE[:, 0]]

    @cached_property
    def _layers(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        from safetensors.numpy import load_file

        state = {name: value.astype(np.float64) for name, value in load_file(self._head).items()}
        names = sorted((name[: -len(".weight")] for name in state if name.endswith(".weight")), key=_number)
        return [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]


def _check_head(file: Path, features: int | None) -> None:
    """
    Raises:
        SpotlightError: its layers do not follow each other to a single number, or do not take so many features.
    """
    shapes = tensors(file)
    layers = sorted((name[: -len(".weight")] for name in shapes if LAYER.fullmatch(name)), key=_number)
    outs = [shapes.get(f"{name}.bias", ()) for name in layers]
    ins = [shapes[f"{name}.weight"] for name in layers]
    follow = all(len(given) == 2 and (given[0],) == out for given, out in zip(ins, outs, strict=True)) and all(
        after[1] == out[0] for after, out in zip(ins[1:], outs, strict=False)
    )
    if not layers or len(shapes) != 2 * len(layers) or not follow or outs[-1] != (1,):
        raise SpotlightError(
            f"{file}: expected layers.N.weight and layers.N.bias of linear layers that follow each other, the last of "
            f"them with one output; found {shown(shapes)}"
        )
    if features is not None and ins[0][1] != features:
        raise SpotlightError(
            f"{file}: its first layer takes {ins[0][1]} features, and the CLIP checkpoint of reward.path makes "
            f"{features}: name the checkpoint that the predictor was trained on"
        )


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])
