"""What a reward is, and how it is asked: a reward that cannot be had is missing, never 0."""

from __future__ import annotations

import logging
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spotlight.files import kind_of, shown
from spotlight.records import Prompt, SpotlightError, is_of_the_device
from spotlight.rl.checkpoints import require_class, weight_files

logger = logging.getLogger(__name__)

BACK_OFF_S = 0.05
"""Pause before the second attempt; it doubles for each further one."""
PAUSE_S_MAX = 5.0
"""Longest pause between two attempts to reach a server."""
NOT_ITS_OWN = (f"{Path(__file__).parents[2]}/", "site-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen")
"""Parts of paths that tell the files of Spotlight and of libraries from a user's scorer."""
ERROR_MAX = 2000
"""Characters of an error that are kept: a server may answer anything."""


def explained(error: BaseException) -> str:
    """What a scorer raised, and where: its own last line, not that of a library which it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in NOT_ITS_OWN)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


class Refused(Exception):
    """A server will not score this, however often it is asked."""


class Unreachable(Exception):
    """A server cannot be asked now: nothing listens at its address, or it says that it is busy or starting."""


class Broken(Unreachable):
    """A server took the connection and ended it without an answer: it is not up yet, or fails at what it was sent."""


class Scorer:
    """Rewards images. It is called on workers, and checks prompts before a run begins."""

    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """The least and the largest reward there is; anything outside is a fault of the scorer."""
    usual: ClassVar[tuple[float, float] | None] = None
    """Where rewards of real images lie, if that is much narrower than `range`: the planner tells rewards apart by a
    twentieth of it."""
    shown_as: str = ""
    """What warnings call it; empty: the name of its class."""

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        """A reward within `range` for each image and its prompt, in order. It may raise: `score` tries again."""
        raise SpotlightError(f"{type(self).__name__} is called with the texts of prompts, and wants whole ones")

    def check(self, prompt: str) -> None:  # without needs of its own, a scorer accepts any prompt
        """Whether images of this prompt can be scored at all.

        Raises:
            SpotlightError: they cannot; the text says what the prompt lacks.
        """

    # Replaced by scorers that want more of a prompt than its text

    def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
        """As calling it, with the prompts' metadata at hand."""
        return self(images_BHWC, [prompt.text for prompt in prompts])

    def check_prompt(self, prompt: Prompt) -> None:
        """As `check`, with the metadata at hand."""
        self.check(prompt.text)


def planned_range(scorer: Scorer) -> tuple[float, float]:
    """The range of rewards that the planner looks at: where real ones lie, if that is known."""
    return scorer.usual or scorer.range


def normalised(within: tuple[float, float], rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards with `planned_range` mapped to [0, 1], those outside cut off: what the planner sees."""
    low, high = within
    return tuple(min(1.0, max(0.0, (reward - low) / (high - low))) for reward in rewards)


def checkpoint(path: str, setting: str = "reward.path") -> Path:
    """The directory of a network that a scorer reads, whose files are whole.

    Raises:
        SpotlightError: it is not given, is no directory, or lacks a file.
    """
    directory = Path(path)
    if not path or kind_of(directory) != "directory":
        found = f"{path}: no such directory" if path else "no checkpoint is named"
        raise SpotlightError(f"{found}; {setting} must name one in safetensors, as transformers saves it")
    require_class(directory, None)
    weight_files(directory)
    return directory


def network(kind: Any, path: Path, unused: tuple[str, ...] = (), **options: Any) -> Any:
    """A network of a checkpoint, on the device of rewards. What transformers would fill at random is an error.

    Args:
        unused: how names of weights begin that are not needed.
        options: of ``from_pretrained``.

    Raises:
        SpotlightError: weights are absent, or have other shapes.
    """
    from spotlight.rl.models import device_of_rewards

    always: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    model, report = kind.from_pretrained(path, ignore_mismatched_sizes=True, **always, **options)
    drawn = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    weights = (name for name, _ in model.named_parameters())  # buffers are made, not read
    if lost := sorted(name for name in weights if name in drawn and not name.startswith(unused)):
        raise SpotlightError(
            f"{path}: {len(lost)} weights that {type(model).__name__} needs are absent, or of other shapes, such as "
            f"{lost[0]}: copy the checkpoint anew, or name one of that class"
        )
    return model.to(device_of_rewards())  # transformers gave it in evaluation mode


def score(
    scorer: Scorer,
    images_BHWC: NDArray[np.uint8],
    prompts: Sequence[Prompt | str],
    *,
    attempts: int,
    batch: int = 0,
    patience_s: float = 0.0,
) -> tuple[list[float | None], list[str]]:
    """Rewards in order, None where there is none, and an error's text for each that is missing.

    A batch that keeps failing is scored image by image, so that a bad image costs only itself.

    Args:
        images_BHWC: one image per prompt.
        attempts: times that a batch or an image is tried, at least 1.
        batch: most images that the scorer is given at once; 0: all of them.
        patience_s: longest wait for a server that cannot be reached, each time; it costs no attempts.

    Raises:
        SpotlightError: from the scorer, which means that trying again cannot help; or a server could not be reached in
            that time.
        RuntimeError: an error of CUDA, after which this process scores nothing any more.
    """
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(id=0, text=prompt) for prompt in prompts]
    if not asked:
        return [], []

    def again(row: slice) -> tuple[list[float | None], list[str]]:
        return score(scorer, images_BHWC[row], asked[row], attempts=attempts, patience_s=patience_s)

    if 0 < batch < len(asked):
        rows = [slice(first, first + batch) for first in range(0, len(asked), batch)]
        return _joined([again(row) for row in rows])
    for attempt in range(attempts):
        if attempt:
            time.sleep(BACK_OFF_S * 2 ** (attempt - 1))
        try:
            found = _reached(scorer, images_BHWC, asked, patience_s)
            return list(checked(found, len(asked), scorer.range)), []
        except SpotlightError:
            raise
        except (Exception, SystemExit) as raised:  # a scorer may be anyone's code, or a server
            if is_of_the_device(raised):
                raise
            why = explained(raised)
            error = f"{asked[0].text!r}: {why}"[:ERROR_MAX]
            if isinstance(raised, Refused):
                break
    if len(asked) == 1:
        return [None], [error]
    _say_once(scorer.shown_as or type(scorer).__name__, why[:ERROR_MAX])
    return _joined([again(slice(row, row + 1)) for row in range(len(asked))])


def _reached(scorer: Scorer, images_BHWC: NDArray[np.uint8], prompts: list[Prompt], patience_s: float) -> Any:
    """What a scorer returns, once its server can be reached.

    Raises:
        SpotlightError: it could not, for so long.
    """
    until_s, pause_s = time.monotonic() + patience_s, BACK_OFF_S
    while True:
        try:
            return scorer.of(images_BHWC.copy(), list(prompts))  # copies: a scorer may change them, and be tried again
        except Unreachable as error:
            if not patience_s:
                raise
            if time.monotonic() > until_s:
                at_these = f"{len(prompts)} images of {shown(prompts[0].text)}"
                hint = f"; if it runs, it fails at one of {at_these}: have it answer 400 to that, and only that is lost"
                raise SpotlightError(
                    f"{error}, for {patience_s:g} s (reward.patience_s): start the server, then resume the run"
                    f"{hint if isinstance(error, Broken) else ''}"
                ) from None
            _say_waiting(str(error), patience_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)


@lru_cache(64)
def _say_waiting(why: str, patience_s: float) -> None:
    logger.warning("%s: it is waited for, up to %g s each time (reward.patience_s)", why, patience_s)


@lru_cache(64)
def _say_once(name: str, why: str) -> None:
    """A scorer that can do one image and not many takes many times as long."""
    logger.warning("the reward %s failed for several images at once, so each is scored alone: %s", name, why)


def _joined(scored: Sequence[tuple[list[float | None], list[str]]]) -> tuple[list[float | None], list[str]]:
    return [reward for rewards, _ in scored for reward in rewards], [text for _, errors in scored for text in errors]


def checked(rewards: Any, expected: int, within: tuple[float, float]) -> list[float]:
    """The rewards that a scorer returned, as floats.

    Raises:
        ValueError: they are not ``expected`` numbers within the range.
    """
    unordered = isinstance(rewards, Mapping | Set | bytes | bytearray)
    if unordered or not isinstance(rewards, Sized) or not isinstance(rewards, Iterable):
        raise ValueError(f"the scorer returned {shown(rewards)}, which is no list of rewards")
    if len(rewards) != expected:
        raise ValueError(f"the scorer returned {len(rewards)} rewards for {expected} images")
    found = [each.item() if getattr(each, "ndim", None) == 0 else each for each in rewards]  # such as a torch scalar
    for reward in found:
        if isinstance(reward, bool) or not isinstance(reward, int | float | np.integer | np.floating):
            raise ValueError(f"the scorer returned {shown(reward)}, which is no number")
        if isinstance(reward, float | np.floating) and not isfinite(reward):
            raise ValueError(
                f"the scorer returned {reward}, which is no finite number; where an image has no reward, raise an error"
            )
        if not within[0] <= reward <= within[1]:
            raise ValueError(
                f"the scorer returned {reward}, and its rewards are to lie in {list(within)}: give its class another "
                "range, or set reward.range"
            )
    return [float(reward) for reward in found]
