"""Reads prompt files, and chooses which prompts an iteration trains on.

The choice is pure: it depends on the seed and the iteration alone, so a resumed run makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from spotlight.files import read_bytes
from spotlight.records import Prompt, SpotlightError


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a UTF-8 text file, one a line; blank lines are skipped.

    A prompt's ``id`` is its line's index, blank lines counted, so it always leads back to the line.

    Raises:
        SpotlightError: the file is missing, is not UTF-8 text or has no prompt in it.
    """
    try:
        content = read_bytes(path, "a prompt file")
    except SpotlightError as error:
        raise SpotlightError(f"{error}; see [data]") from None
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpotlightError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8: save the file as UTF-8 text"
        ) from None
    prompts = tuple(Prompt(id=index, text=line.strip()) for index, line in enumerate(lines) if line.strip())
    if not prompts:
        raise SpotlightError(f"{path}: the file is empty: give it one prompt a line")
    return prompts


def check_prompts(prompts: Iterable[Prompt], path: str | Path, check: Callable[[str], None]) -> None:
    """Find the first prompt of a file that cannot be used.

    Args:
        prompts: of `read_prompts`.
        path: the file they are from.
        check: raises `SpotlightError` for a text that cannot be used, as `rewards.Scorer.check` does.

    Raises:
        SpotlightError: from ``check``, with the file and the line.
    """
    for prompt in prompts:
        try:
            check(prompt.text)
        except SpotlightError as error:
            raise SpotlightError(f"{path}:{prompt.id + 1}: {error}") from None


def choose_prompts(count_available: int, per_iteration: int, *, seed: int, iteration: int) -> tuple[int, ...]:
    """Indices of the prompts of one iteration, none twice within an epoch.

    An epoch is a permutation drawn from (seed, epoch) and cut into whole iterations; what is left over at its
    end, fewer than ``per_iteration``, waits for the next permutation.

    Args:
        count_available: prompts to choose from.
        per_iteration: how many to choose.

    Raises:
        SpotlightError: there are fewer prompts than one iteration needs.
    """
    if per_iteration > count_available:
        raise SpotlightError(
            f"an iteration takes {per_iteration} prompts (the larger of rollout.prompts and exploration.prompts), and "
            f"data.train_prompts has {count_available} prompts: lower it, or add prompts"
        )
    epoch, part = divmod(iteration, count_available // per_iteration)
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count_available)
    return tuple(int(index) for index in order[part * per_iteration : (part + 1) * per_iteration])
