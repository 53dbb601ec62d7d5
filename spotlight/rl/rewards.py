"""Turns images and prompts into rewards; a reward that cannot be had is missing, never 0.

Importing this file, making a scorer and checking prompts load no OCR engine: a scorer loads what it needs when it is
first called. A scorer gives an image the same reward whatever else is in its batch.

Shapes: B images, T time steps of the recogniser, K characters it knows.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import SpotlightError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

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
BACK_OFF_S = 0.05
"""Pause before the second attempt; it doubles for each further one."""


class Scorer(ABC):
    """Rewards images. It is called on workers, and checks prompts before a run begins."""

    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """The least and the largest reward there is; anything outside is a fault of the scorer."""

    @abstractmethod
    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        """A reward within `range` for each image and its prompt, in order. It may raise: `score` tries again."""

    def check(self, prompt: str) -> None:  # noqa: B027  # without needs of its own, a scorer accepts any prompt
        """Whether images of this prompt can be scored at all.

        Raises:
            SpotlightError: they cannot; the text says what the prompt lacks.
        """


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


def ocr_score(text: str, target: str) -> float:
    """How much of the target was read, 0 to 1.

    Space and case do not count. With the edit distance d, 0 where the target occurs anywhere in
    the text::

        score = 1 - min(d, len(target)) / len(target)

    Args:
        text: all that was read in the image.
        target: what should be there; not only space.

    Source: Flow-GRPO (arXiv 2505.05470), as in its code.
    """
    from rapidfuzz.distance import Levenshtein

    text, target = ("".join(words.split()).lower() for words in (text, target))
    if not target:
        raise SpotlightError("the target of an OCR reward is empty: give it at least one letter")
    if target in text:
        return 1.0
    return 1.0 - min(Levenshtein.distance(text, target), len(target)) / len(target)


class OcrScorer(Scorer):
    """Reads each image as one line of text and compares it with the prompt's quoted target.

    It finds no text in a larger scene: the line should fill the image. One thread, so that a
    process on one core keeps to it.
    """

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        targets = [quoted_target(prompt) for prompt in prompts]
        return [ocr_score(text, target) for text, target in zip(self.read(images_BHWC, targets), targets, strict=True)]

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


def _input_width_px(aspect: float, letters: int) -> int:
    """Width that an image is resized to: little for speed, yet with time steps for every letter.

    Equal neighbours need a blank between them, so n letters need up to 2 n + 1 steps.
    """
    steps = max(math.ceil(OCR_SQUEEZE * aspect * OCR_HEIGHT_PX / OCR_STEP_PX), 2 * letters + 1)
    return steps * OCR_STEP_PX


SCORERS: dict[str, type[Scorer]] = {"ocr": OcrScorer}
"""By the name that ``reward.name`` gives."""


@cache
def load(name: str) -> Scorer:
    """The scorer of that name, one per process.

    Raises:
        SpotlightError: there is none.
    """
    if name not in SCORERS:
        raise SpotlightError(f"reward.name = {name!r} is not known; there is {', '.join(map(repr, SCORERS))}")
    return SCORERS[name]()


def score(
    scorer: Scorer, images_BHWC: NDArray[np.uint8], prompts: Sequence[str], *, attempts: int
) -> tuple[list[float | None], list[str]]:
    """Rewards in order, None where there is none, and one text for each of those.

    A batch that keeps failing is scored image by image, so that a bad image costs only itself.

    Args:
        images_BHWC: one image per prompt.
        attempts: times that a batch or an image is tried, at least 1.

    Raises:
        SpotlightError: from the scorer: trying again helps nobody, a person must put it right.
    """
    if not prompts:
        return [], []
    for attempt in range(attempts):
        if attempt:
            time.sleep(BACK_OFF_S * 2 ** (attempt - 1))
        try:
            return list(_checked(scorer(images_BHWC, prompts), len(prompts), scorer.range)), []
        except SpotlightError:
            raise
        except Exception as raised:  # a scorer may be anyone's code, or a server
            error = f"{prompts[0]!r}: {type(raised).__name__}: {raised}"
    if len(prompts) == 1:
        return [None], [error]
    rows = [slice(row, row + 1) for row in range(len(prompts))]
    singles = [score(scorer, images_BHWC[row], prompts[row], attempts=attempts) for row in rows]
    return [reward for rewards, _ in singles for reward in rewards], [text for _, errors in singles for text in errors]


def normalised(name: str, rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards of a scorer by its name, its range mapped to [0, 1]: what the planner sees."""
    low, high = load(name).range
    return tuple((reward - low) / (high - low) for reward in rewards)


def _checked(rewards: Sequence[float], expected: int, within: tuple[float, float]) -> Sequence[float]:
    if len(rewards) != expected:
        raise ValueError(f"the scorer returned {len(rewards)} rewards for {expected} images")
    for reward in rewards:
        if not within[0] <= reward <= within[1]:  # also catches NaN, which compares false
            raise ValueError(f"the scorer returned {reward}, and says that its rewards lie in {list(within)}")
    return rewards
