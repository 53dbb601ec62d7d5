"""Finds objects with Mask2Former and names their colours with CLIP: the detector of GenEval's rewards.

Both are read from local checkpoints in safetensors, as transformers saves them. Images are prepared here, as the
checkpoint's ``preprocessor_config.json`` says, and what the network answers is made into objects here, too: torchvision
is not needed. Images are looked at one by one, so that an image gets the same objects whatever is in its batch.
Not verified on a GPU, nor with published weights.

Shapes: Q queries, K classes, H and W pixels of the image, h and w of the network's masks.

Source: GenEval (arXiv 2310.11513), evaluation/evaluate_images.py, for thresholds, crops and the words for colours;
Mask2Former (arXiv 2112.01527) for a mask's certainty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.records import SpotlightError
from spotlight.rl.rewards.base import checkpoint, network
from spotlight.rl.rewards.clip import ClipScorer, preprocessing
from spotlight.rl.rewards.geneval import MAX_OBJECTS, THRESHOLD, Objects

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COLOUR_TEXTS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
"""The mean of their embeddings stands for a colour."""
AROUND = (153, 153, 153)
"""What an object's surroundings are painted with before CLIP sees it."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, where a checkpoint does not say."""
SIZE = {"shortest_edge": 800, "longest_edge": 1333}
"""What transformers takes where it does not."""
OTHER_NAMES = (
    ("airplane", "aeroplane"),
    ("computer keyboard", "keyboard"),
    ("computer mouse", "mouse"),
    ("couch", "sofa"),
    ("dining table", "diningtable"),
    ("motorcycle", "motorbike"),
    ("potted plant", "pottedplant"),
    ("tv", "tvmonitor"),
    ("tv remote", "remote"),
)
"""GenEval's name of a class, and one that a checkpoint may have for it."""


class Mask2FormerDetector:
    """Finds objects of the classes that a checkpoint knows.

    Args:
        path: of a Mask2Former checkpoint for instances, such as one trained on COCO.
        clip: of a CLIP checkpoint, by which colours are told.
    """

    def __init__(self, *, path: str = "", clip: str = "") -> None:
        self._path = checkpoint(path)
        self._clip = ClipScorer(str(checkpoint(clip, "reward.options.clip")))
        preprocessing(self._path)

    def __call__(self, image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Objects:
        """Objects of these classes, the most certain first; those that are too unsure to count are left out.

        Raises:
            SpotlightError: the checkpoint does not know a class.
        """
        numbers = {self._number(name): name for name in classes}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in classes}
        for number, score, mask_HW in self._instances(image_HWC):
            if number not in numbers or score <= THRESHOLD or len(found[numbers[number]]) == MAX_OBJECTS:
                continue
            rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
            box = [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]
            colour = self._colour(image_HWC, mask_HW, box, numbers[number])
            found[numbers[number]].append({"box": box, "score": score, "color": colour})
        return found

    def check(self, classes: Sequence[str], colours: Sequence[str]) -> None:
        """
        Raises:
            SpotlightError: the checkpoint does not know a class, or GenEval a colour.
        """
        for name in classes:
            self._number(name)
        if unknown := sorted({*colours} - {*COLOURS}):
            raise SpotlightError(f"GenEval has no colour {', '.join(map(repr, unknown))}: it has {', '.join(COLOURS)}")

    @cached_property
    def _known(self) -> dict[str, int]:
        """The number of each class, as the checkpoint's settings have it."""
        settings = json.loads((self._path / "config.json").read_text())
        return {label: int(number) for number, label in settings.get("id2label", {}).items()}

    def _number(self, name: str) -> int:
        known = self._known
        spellings = [name, *(other for ours, other in OTHER_NAMES if ours == name)]
        number = next((known[spelling] for spelling in spellings if spelling in known), None)
        if number is None:
            raise SpotlightError(
                f"{self._path}: the checkpoint does not know the class {name!r}; it knows {', '.join(known)}: take a "
                "checkpoint that was trained on the classes of these prompts, or other prompts"
            )
        return number

    def _instances(self, image_HWC: NDArray[np.uint8]) -> list[tuple[int, float, NDArray[np.bool_]]]:
        """Class, score and mask of objects whose mask is not empty, highest score first; at most as many as queries."""
        import torch
        from torch.nn.functional import interpolate

        with torch.no_grad():
            output = self._model(pixel_values=torch.from_numpy(self._prepared(image_HWC))[None].to(self._model.device))
            logits_QK, masks_Qhw = output.class_queries_logits[0], output.masks_queries_logits[0]
            probability_QK = logits_QK.float().softmax(-1)[:, :-1]  # the last class is: nothing
            best = probability_QK.flatten().topk(len(probability_QK))
            queries = best.indices // probability_QK.shape[1]
            size = image_HWC.shape[:2]
            masks_QHW = interpolate(masks_Qhw[queries][None].float(), size, mode="bilinear", align_corners=False)[0]
            inside_QHW = masks_QHW > 0
            area_Q = inside_QHW.flatten(1).sum(-1)
            mask_score_Q = (masks_QHW.sigmoid() * inside_QHW).flatten(1).sum(-1) / area_Q.clamp(min=1)
            scores = (best.values * mask_score_Q).tolist()
        numbers = (best.indices % probability_QK.shape[1]).tolist()
        order = [at for at in np.argsort([-score for score in scores], kind="stable") if area_Q[at]]
        return [(numbers[at], scores[at], inside_QHW[at].cpu().numpy()) for at in order]

    def _prepared(self, image_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Resized, the colours normalised; channels first."""
        from PIL import Image

        height, width = self._size_px(*image_HWC.shape[:2])
        image = Image.fromarray(image_HWC).resize((width, height), Image.Resampling.BILINEAR)
        mean = np.array(self._settings.get("image_mean", MEAN), dtype=np.float32)
        std = np.array(self._settings.get("image_std", STD), dtype=np.float32)
        x_HWC = (np.asarray(image, dtype=np.float32) / 255 - mean) / std
        return np.ascontiguousarray(x_HWC.transpose(2, 0, 1), dtype=np.float32)

    def _size_px(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image as the network sees it, a multiple of the checkpoint's divisor: the same for all
        images; or the shorter side so long, and the longer one not beyond its limit."""
        size, divisor = self._settings.get("size") or SIZE, int(self._settings.get("size_divisor") or 1)
        if "height" in size:
            edges = int(size["height"]), int(size["width"])
        else:
            longest = size.get("longest_edge") or inf
            shorter = min(size["shortest_edge"], longest * min(height, width) / max(height, width))
            longer = int(shorter * max(height, width) / min(height, width))
            edges = (round(shorter), longer) if height <= width else (longer, round(shorter))
        return ceil(edges[0] / divisor) * divisor, ceil(edges[1] / divisor) * divisor

    def _colour(self, image_HWC: NDArray[np.uint8], mask_HW: NDArray[np.bool_], box: Sequence[int], name: str) -> str:
        left, top, right, bottom = box
        alone_HWC = np.where(mask_HW[..., None], image_HWC, np.array(AROUND, dtype=np.uint8))[top:bottom, left:right]
        image_E = self._clip.image_features(alone_HWC[None])[0]
        return COLOURS[int((self._colours_of(name) @ image_E).argmax())]

    def _colours_of(self, name: str) -> NDArray[np.float32]:
        """Text embeddings of `COLOURS` for objects of this class, one row each."""
        if name not in self._known_colours:
            rows = []
            for colour in COLOURS:
                features = self._clip.text_features([text.format(colour=colour, name=name) for text in COLOUR_TEXTS])
                mean_E = features.mean(axis=0)
                rows.append(mean_E / np.linalg.norm(mean_E))
            self._known_colours[name] = np.stack(rows)
        return self._known_colours[name]

    @cached_property
    def _known_colours(self) -> dict[str, NDArray[np.float32]]:
        return {}

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return preprocessing(self._path)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import Mask2FormerForUniversalSegmentation

        try:  # in bfloat16, which it may be stored in, a tiny one found other objects
            return network(Mask2FormerForUniversalSegmentation, self._path, dtype=torch.float32)
        except ImportError as error:  # its loss, which nobody asks for here, wants SciPy
            raise SpotlightError(f"{self._path}: cannot be loaded ({error}): pip install scipy") from None
