"""Rewards text that a vision-language model reads in an image, from a local checkpoint through transformers.

Any class that transformers knows as image-text-to-text will do, if its processor needs nothing that is not installed;
code that a checkpoint brings along is never run. Images are read one by one, and greedily, so that what is read in one
does not depend on what else is in its batch. Not verified on a GPU, nor with published weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import SpotlightError
from spotlight.rl.rewards.base import Scorer, checkpoint, network
from spotlight.rl.rewards.ocr import READ, ocr_score, quoted_target

TOKENS_MAX = 64
"""Most tokens of an answer: more than the targets of published prompts take."""


class ReaderScorer(Scorer):
    """Has a model write down the text in an image, and compares it with the prompt's quoted target.

    Args:
        path: of the checkpoint, in safetensors.
        question: what the model is asked, in its chat template.
        text: the whole text that it is given instead, with its own sign for the image, such as
            ``<image>\\nFree OCR.``; a checkpoint without a chat template needs one.
        tokens: most that it may answer.
        graded: reward the part of the target that was read, not only all of it.
    """

    def __init__(
        self, path: str, *, question: str = READ, text: str = "", tokens: int = TOKENS_MAX, graded: bool = True
    ) -> None:
        self._path, self._question, self._text, self._tokens = checkpoint(path), question, text, tokens
        self._graded = graded
        if type(tokens) is not int or tokens < 1:
            raise SpotlightError(f"reward.options.tokens = {shown(tokens)}: give a whole number, at least 1")
        for name, said in (("question", question), ("text", text)):
            if not isinstance(said, str):
                raise SpotlightError(f"reward.options.{name} = {shown(said)}: give a text, in quotes")

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        targets = [quoted_target(prompt) for prompt in prompts]
        texts = [self.read(image) for image in images_BHWC]
        return [ocr_score(text, target, graded=self._graded) for text, target in zip(texts, targets, strict=True)]

    def check(self, prompt: str) -> None:
        quoted_target(prompt)

    def read(self, image_HWC: NDArray[np.uint8]) -> str:
        """What the model says is written in an image."""
        import torch
        from PIL import Image

        given = self._processor(images=[Image.fromarray(image_HWC)], text=[self._asked], return_tensors="pt")
        given = given.to(self._model.device, self._model.dtype)
        with torch.no_grad():
            answer = self._model.generate(**given, do_sample=False, num_beams=1, max_new_tokens=self._tokens)
        said = answer[:, given["input_ids"].shape[1] :]
        return str(self._processor.batch_decode(said, skip_special_tokens=True)[0])

    @cached_property
    def _asked(self) -> str:
        if self._text:
            return self._text
        if not getattr(self._processor, "chat_template", None):
            raise SpotlightError(
                f"{self._path}: the checkpoint has no chat template: set reward.options.text to the whole text that it "
                "is to be given, with its own sign for the image"
            )
        content = [{"type": "image"}, {"type": "text", "text": self._question}]
        asked = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
        except (ImportError, OSError, ValueError) as error:
            raise SpotlightError(
                f"{self._path}: its processor cannot be loaded ({error}); take a checkpoint whose classes transformers "
                "has, with its processor's files, and install what they need"
            ) from None

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForImageTextToText

        try:
            return network(AutoModelForImageTextToText, self._path, trust_remote_code=False, dtype="auto")
        except SpotlightError:
            raise
        except (ImportError, ValueError) as error:
            raise SpotlightError(
                f"{self._path}: is no model that reads images and writes text ({error}); take one that transformers "
                "has a class for"
            ) from None
