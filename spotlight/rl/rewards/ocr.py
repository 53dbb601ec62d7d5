"""Rewards images for the text that their prompts ask for, read by an OCR engine; loads none until it is called.

An image gets the same reward whatever else is in its batch.

Shapes: B images, T time steps of the recogniser, K characters it knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import SpotlightError
from spotlight.rl.rewards.base import Scorer

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read by onnxruntime's import: else it reports to its makers

READ = "Write down all text in this image, exactly as it is written, and nothing else."
"""What a model that reads images is asked."""
OCR_MODEL = "PP-OCRv6_rec_small.onnx"
"""The text-line recogniser that the rapidocr wheel carries, so nothing is downloaded."""
OCR_HEIGHT_PX = 48
"""The only height that the recogniser takes."""
OCR_STEP_PX = 8
"""Input width behind one of the recogniser's time steps, each of which gives at most one character."""
OCR_SQUEEZE = 2 / 3
"""Input width over the width that keeps the image's aspect. Rendered two- and three-digit numbers are
read as often at 64 px as at 96 px (0.98 and 1.00 of the score), in 0.7 of the time."""
OCR_BATCH = 16
"""Images in one run of the recogniser: 2.6 ms an image on one core; 3.7 ms by ones and by 64."""
SCENE_SIDE_PX = 384
"""The detector looks at a scene of this longer side: it found the text of all six test scenes, in 0.11 s an image."""
SCENE_SIDE_LARGE_PX = 960
"""The same for images of more than a megapixel, whose text may be tiny."""


def quoted_target(text: str) -> str:
    """The text that a prompt asks for: what stands between its first pair of double quotes.

    Raises:
        SpotlightError: there is no such pair, or nothing but space in it.
    """
    parts = text.split('"', 2)
    if len(parts) < 3 or not parts[1].strip():
        raise SpotlightError(
            f"the prompt {shown(text)} has no text in double quotes: put what is to be drawn there, "
            'for example A sign that reads "47"'
        )
    return parts[1]


def ocr_score(text: str, target: str, *, graded: bool = True) -> float:
    """How much of the target was read, 0 to 1; or (not graded) whether all of it was, 0 or 1.

    Space and case do not count, nor how accents are encoded. With the edit distance d, 0 where the target occurs
    anywhere in the text::

        score = 1 - min(d, len(target)) / len(target)

    Args:
        text: all that was read in the image.
        target: what should be there; not only space.

    Source: Flow-GRPO (arXiv 2505.05470), as in its code, but for accents.
    """
    from rapidfuzz.distance import Levenshtein

    text, target = (normalize("NFC", "".join(words.split()).lower()) for words in (text, target))
    if not target:
        raise SpotlightError("the target of an OCR reward is empty: give it at least one letter")
    if target in text:
        return 1.0
    if not graded:
        return 0.0
    return 1.0 - min(Levenshtein.distance(text, target), len(target)) / len(target)


class OcrScorer(Scorer):
    """Reads each image as one line of text and compares it with the prompt's quoted target.

    It finds no text in a larger scene (see `SceneOcrScorer`): the line should fill the image. One thread, so that a
    process on one core keeps to it.
    """

    def __init__(self, *, graded: bool = True) -> None:
        self._graded = graded

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        targets = [quoted_target(prompt) for prompt in prompts]
        texts = self.read(images_BHWC, targets)
        return [ocr_score(text, target, graded=self._graded) for text, target in zip(texts, targets, strict=True)]

    def check(self, prompt: str) -> None:
        quoted_target(prompt)

    def read(self, images_BHWC: NDArray[np.uint8], targets: Sequence[str]) -> list[str]:
        """The text in each image; a target only makes sure that a text of its length could be read."""
        height_px, width_px = images_BHWC.shape[1:3]
        texts = [""] * len(targets)
        rows_by_width: dict[int, list[int]] = {}
        for row, target in enumerate(targets):
            rows_by_width.setdefault(_input_width_px(width_px / height_px, len(target)), []).append(row)
        for input_width_px, rows in rows_by_width.items():
            for start in range(0, len(rows), OCR_BATCH):
                batch = rows[start : start + OCR_BATCH]
                for row, text in zip(batch, self._read_batch(images_BHWC[batch], input_width_px), strict=True):
                    texts[row] = text
        return texts

    def _read_batch(self, images_BHWC: NDArray[np.uint8], width_px: int) -> list[str]:
        from PIL import Image

        size = (width_px, OCR_HEIGHT_PX)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BILINEAR) for image in images_BHWC]
        x_BCHW = np.stack([np.asarray(image, dtype=np.float32) for image in resized]).transpose(0, 3, 1, 2) / 127.5 - 1
        (scores_BTK,) = self._session.run(None, {self._session.get_inputs()[0].name: x_BCHW})
        best_BT = np.asarray(scores_BTK).argmax(-1)
        # Connectionist temporal classification: a repeated class is one character, class 0 is none.
        changed_BT = np.diff(best_BT, axis=1, prepend=0) != 0
        rows = zip(best_BT, changed_BT, strict=True)
        return ["".join(self._characters[k] for k in best[changed]) for best, changed in rows]

    @cached_property
    def _session(self) -> InferenceSession:
        import onnxruntime

        path = Path(str(distribution("rapidocr").locate_file(f"rapidocr/models/{OCR_MODEL}")))
        if not path.is_file():
            raise SpotlightError(f"{path}: the installed rapidocr has no such model; install a version with PP-OCRv6")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    @cached_property
    def _characters(self) -> list[str]:
        """The text of each of the recogniser's K classes; the blank has none."""
        return ["", *self._session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]


class SceneOcrScorer(OcrScorer):
    """Finds text anywhere in a scene, reads all of it, and compares it with the prompt's quoted target.

    Where nothing is found, the whole image is read as one line.
    """

    def read(self, images_BHWC: NDArray[np.uint8], targets: Sequence[str]) -> list[str]:
        found = [self._scene(image) for image in images_BHWC]
        blank = [row for row, text in enumerate(found) if not text]
        for row, text in zip(blank, super().read(images_BHWC[blank], [targets[row] for row in blank]), strict=True):
            found[row] = text
        return found

    def _scene(self, image_HWC: NDArray[np.uint8]) -> str:
        height_px, width_px = image_HWC.shape[:2]
        engine = self._engine(SCENE_SIDE_LARGE_PX if height_px * width_px > 1e6 else SCENE_SIDE_PX)
        output = engine(np.ascontiguousarray(image_HWC[:, :, ::-1]))  # it takes blue first
        return "".join(output.txts[row] for row in reading_order(output.boxes)) if output.txts else ""

    def _engine(self, side_px: int) -> Any:
        if side_px not in self._engines:
            from rapidocr import RapidOCR

            self._engines[side_px] = RapidOCR(
                params={
                    "Global.log_level": "critical",
                    "Global.text_score": 0.0,
                    "Global.use_cls": False,
                    "Det.limit_side_len": side_px,
                    "Det.limit_type": "max",
                    "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                    "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                }
            )
        return self._engines[side_px]

    @cached_property
    def _engines(self) -> dict[int, Any]:
        return {}


def reading_order(boxes_N42: NDArray[np.floating]) -> list[int]:
    """Indices of pieces of text line by line, along the direction of the text, which may be tilted.

    Args:
        boxes_N42: corners of N pieces of text, from the top left one clockwise.
    """
    run = (boxes_N42[:, 1] - boxes_N42[:, 0]).sum(axis=0)
    run = run / max(float(np.hypot(*run)), 1e-6)
    centre_N2 = boxes_N42.mean(axis=1)
    along_N, down_N = centre_N2 @ run, centre_N2 @ np.array([-run[1], run[0]])
    height = float(np.linalg.norm(boxes_N42[:, 3] - boxes_N42[:, 0], axis=-1).mean())
    lines: list[list[int]] = []
    for row in np.argsort(down_N, kind="stable").tolist():
        if not lines or down_N[row] - down_N[lines[-1][0]] > height / 2:
            lines.append([])
        lines[-1].append(row)
    return [row for line in lines for row in sorted(line, key=lambda row: along_N[row])]


def _input_width_px(aspect: float, letters: int) -> int:
    """Width that an image is resized to: little for speed, yet with time steps for every letter.

    Equal neighbours need a blank between them, so n letters need up to 2 n + 1 steps.
    """
    steps = max(math.ceil(OCR_SQUEEZE * aspect * OCR_HEIGHT_PX / OCR_STEP_PX), 2 * letters + 1)
    return steps * OCR_STEP_PX
