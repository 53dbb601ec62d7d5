"""Several rewards at once: their weighted sum, and rewards of prompts with certain tags only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.records import Prompt, SpotlightError
from spotlight.rl.rewards.base import Scorer, checked, planned_range, score

Rewards = list[float | None]
"""Rewards of images, in order; None where there is none."""


def score_each(
    scorer: Scorer, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt | str], **how: Any
) -> tuple[Rewards, list[Rewards], list[str]]:
    """As `score`, to which ``how`` goes; the parts of a `Weighted` scorer are scored, and tried again, one by one.

    Returns:
        The rewards; those of each part, if the scorer is `Weighted`, None for prompts that it is not for; and the
        errors.
    """
    if not isinstance(scorer, Weighted):
        rewards, errors = score(scorer, images_BHWC, prompts, **how)
        return rewards, [], errors
    found = [score(part, images_BHWC, prompts, **how) for _, part in scorer.parts]
    sums = scorer.sums([rewards for rewards, _ in found])
    parts: list[Rewards] = [
        [reward if _is_for(part, prompt) else None for reward, prompt in zip(rewards, prompts, strict=True)]
        for (rewards, _), (_, part) in zip(found, scorer.parts, strict=True)
    ]
    return sums, parts, [error for _, errors in found for error in errors]


class Weighted(Scorer):
    """A weighted sum of rewards, by `score_each`. One that is missing leaves the sum missing."""

    def __init__(self, parts: Sequence[tuple[float, Scorer]]) -> None:
        self.parts = tuple(parts)
        ends = [sorted(weight * end for end in scorer.range) for weight, scorer in self.parts]
        self.range = sum(low for low, _ in ends), sum(high for _, high in ends)  # type: ignore[misc]  # of this one
        usual = [sorted(weight * end for end in planned_range(scorer)) for weight, scorer in self.parts]
        self.usual = sum(low for low, _ in usual), sum(high for _, high in usual)  # type: ignore[misc]  # as well

    def sums(self, parts: Sequence[Sequence[float | None]]) -> Rewards:
        """The weighted sum for each image; None where a part is missing."""
        total = np.zeros(len(parts[0]))
        for (weight, _), rewards in zip(self.parts, parts, strict=True):
            total += weight * np.array(rewards, dtype=np.float64)  # None becomes NaN
        known = np.clip(total, *self.range)  # rounding may leave the range
        return [float(value) if np.isfinite(value) else None for value in known]

    def check_prompt(self, prompt: Prompt) -> None:
        for _, scorer in self.parts:
            scorer.check_prompt(prompt)
        _check_is_scored(prompt, [scorer for _, scorer in self.parts])


class Tagged(Scorer):
    """A reward of prompts with certain tags; to others it gives 0."""

    def __init__(self, scorer: Scorer, tags: Sequence[str]) -> None:
        self._scorer, self._tags = scorer, frozenset(tags)
        self.shown_as = type(scorer).__name__
        self.range = _with_zero(scorer.range)  # type: ignore[misc]  # of this one
        self.usual = scorer.usual and _with_zero(scorer.usual)  # type: ignore[misc]  # as well

    def counts(self, prompt: Prompt) -> bool:
        return prompt.tag in self._tags

    def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
        rows = [row for row, prompt in enumerate(prompts) if self.counts(prompt)]
        rewards = [0.0] * len(prompts)
        if rows:
            found = checked(
                self._scorer.of(images_BHWC[rows], [prompts[row] for row in rows]), len(rows), self._scorer.range
            )
            for row, reward in zip(rows, found, strict=True):
                rewards[row] = reward
        return rewards

    def check_prompt(self, prompt: Prompt) -> None:
        if self.counts(prompt):
            self._scorer.check_prompt(prompt)


def _with_zero(within: tuple[float, float]) -> tuple[float, float]:
    return min(0.0, within[0]), max(0.0, within[1])


def _is_for(scorer: Scorer, prompt: Prompt | str) -> bool:
    return not isinstance(scorer, Tagged) or (isinstance(prompt, Prompt) and scorer.counts(prompt))


def _check_is_scored(prompt: Prompt, scorers: Sequence[Scorer]) -> None:
    """
    Raises:
        SpotlightError: all of them are for prompts with other tags.
    """
    if not any(_is_for(scorer, prompt) for scorer in scorers):
        has = f"the tag {prompt.tag!r}" if prompt.tag else "no tag that is a text"
        raise SpotlightError(
            f"nothing scores this prompt: it has {has}, and all [[reward]] tables are for others; give its line one of "
            'theirs ({"prompt": "...", "tag": "..."}), or a table this one (reward.tags)'
        )
