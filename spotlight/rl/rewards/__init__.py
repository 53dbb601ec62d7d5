"""Turns images and prompts into rewards; a reward that cannot be had is missing, never 0.

Importing this package, making a scorer and checking prompts load no OCR engine and no network: a scorer loads what it
needs when it is first called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from math import inf
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.rewards.base import Refused as Refused
from spotlight.rl.rewards.base import Scorer as Scorer
from spotlight.rl.rewards.base import checked, explained
from spotlight.rl.rewards.base import score as score
from spotlight.rl.rewards.geneval import GenEvalScorer as GenEvalScorer
from spotlight.rl.rewards.geneval import geneval_correct as geneval_correct
from spotlight.rl.rewards.geneval import geneval_graded as geneval_graded
from spotlight.rl.rewards.ocr import OcrScorer, SceneOcrScorer
from spotlight.rl.rewards.ocr import ocr_score as ocr_score
from spotlight.rl.rewards.ocr import quoted_target as quoted_target
from spotlight.rl.rewards.server import ChatOcrScorer, ChatScorer, HttpScorer

if TYPE_CHECKING:
    from spotlight.config import RewardSection

Made = TypeVar("Made")

SCORERS: dict[str, type[Scorer]] = {"ocr": OcrScorer, "scene-ocr": SceneOcrScorer}
"""{``reward.name``: scorer that needs nothing but its options}"""


def _clip(settings: RewardSection) -> Scorer:
    from spotlight.rl.rewards.clip import ClipScorer

    return ClipScorer(settings.path, **settings.options)


def _pick(settings: RewardSection) -> Scorer:
    from spotlight.rl.rewards.clip import PickScorer

    return PickScorer(settings.path, **settings.options)


def _aesthetic(settings: RewardSection) -> Scorer:
    from spotlight.rl.rewards.clip import AestheticScorer

    return AestheticScorer(settings.path, **{"head": "", **settings.options})


def _geneval(settings: RewardSection) -> Scorer:
    options = dict(settings.options)
    name = str(options.pop("detector", ""))
    if name not in DETECTORS and ":" not in name:
        known = ", ".join(map(repr, DETECTORS))
        raise SpotlightError(
            f"reward 'geneval': reward.options.detector = {shown(name)}: give {known}, or 'module:Class' of your own"
        )
    if name in DETECTORS:
        kind = imported(DETECTORS[name], "reward.options.detector")
    else:
        kind = imported(name, "reward.options.detector", settings.module_dir)
    graded = options.pop("graded", True)
    if settings.path:
        options["path"] = settings.path
    return GenEvalScorer(_made(kind, f"reward.options.detector = {name!r}", options), graded=graded)


def _http(settings: RewardSection) -> Scorer:
    return HttpScorer(
        settings.url, timeout_s=settings.timeout_s, within=settings.range or (0.0, 1.0), **settings.options
    )


def _chat(settings: RewardSection) -> Scorer:
    within = settings.range or ChatScorer.range
    return ChatScorer(settings.url, timeout_s=settings.timeout_s, within=within, **settings.options)


def _chat_ocr(settings: RewardSection) -> Scorer:
    return ChatOcrScorer(settings.url, timeout_s=settings.timeout_s, **settings.options)


def _reader(settings: RewardSection) -> Scorer:
    from spotlight.rl.rewards.reader import ReaderScorer

    return ReaderScorer(settings.path, **settings.options)


DETECTORS = {
    "mask2former": "spotlight.rl.rewards.mask2former:Mask2FormerDetector",
    "shapes": "spotlight.rl.rewards.shapes:ShapeDetector",
}
"""{``reward.options.detector``: detector of objects, for GenEval's rewards}"""

MADE: dict[str, Callable[[RewardSection], Scorer]] = {
    "aesthetic": _aesthetic,
    "chat": _chat,
    "chat-ocr": _chat_ocr,
    "clip-score": _clip,
    "geneval": _geneval,
    "http": _http,
    "pickscore": _pick,
    "vlm-ocr": _reader,
}
"""{``reward.name``: makes a scorer that needs more of the settings}"""


_LOADED: dict[str, Scorer] = {}


def load(name: str, **options: Any) -> Scorer:
    """The scorer of that name with these options, one per process.

    Raises:
        SpotlightError: there is none, or it needs more than a name.
        TypeError: it has no such option.
    """
    if name not in SCORERS:
        known = ", ".join(map(repr, sorted([*SCORERS, *MADE])))
        raise SpotlightError(f"reward.name = {name!r} is not known; there is {known}, or 'module:Class' of your own")
    key = repr((name, sorted(options.items())))
    if key not in _LOADED:
        _LOADED[key] = SCORERS[name](**options)
    return _LOADED[key]


def build(settings: RewardSection) -> Scorer:
    """The scorer that the settings describe; of several tables, their weighted sum.

    Raises:
        SpotlightError: a name is not known, or what it needs is missing.
    """
    tables = (settings, *settings.also)
    if len(tables) == 1 and settings.weight == 1.0 and not settings.tags:
        return _one(settings)
    return Weighted([(table.weight, _tagged(table)) for table in tables])


def _tagged(settings: RewardSection) -> Scorer:
    return Tagged(_one(settings), settings.tags) if settings.tags else _one(settings)


def _one(settings: RewardSection) -> Scorer:
    try:
        if settings.name in MADE:
            scorer = MADE[settings.name](settings)
        elif ":" in settings.name:
            kind = imported(settings.name, "reward.name", settings.module_dir)
            _check_kind(kind, f"reward.name = {settings.name!r}")
            scorer = _made(kind, f"reward.name = {settings.name!r}", settings.options)
        else:
            scorer = load(settings.name, **settings.options)
            if settings.range is None:
                return scorer
            scorer = copy(scorer)  # it is this process's only one
    except TypeError as error:
        raise SpotlightError(
            f"reward {settings.name!r}: its options do not fit: {error}; its arguments are keys of [reward.options]"
        ) from None
    if settings.range is not None:
        scorer.range, scorer.usual = settings.range, None  # type: ignore[misc]  # of this one alone
    _check_range(settings.name, "range", scorer.range)
    if scorer.usual is not None:
        _check_range(settings.name, "usual", scorer.usual)
    return scorer


def _check_kind(kind: Any, setting: str) -> None:
    """
    Raises:
        SpotlightError: a person's own reward is no scorer, or cannot be called as one.
    """
    if not (isinstance(kind, type) and issubclass(kind, Scorer)):
        raise SpotlightError(
            f"{setting} is no subclass of spotlight.rl.rewards.Scorer: write a class that is one, with "
            "__call__(self, images_BHWC, prompts)"
        )
    if kind.__call__ is Scorer.__call__ and kind.of is Scorer.of:
        raise SpotlightError(f"{setting} scores nothing: give it __call__(self, images_BHWC, prompts), or of")
    for name in ("__call__", "of"):
        try:
            inspect.signature(getattr(kind, name)).bind(None, None, None)
        except TypeError as error:
            raise SpotlightError(
                f"{setting}: its {name} cannot be called with images and prompts ({error}): give it the arguments "
                "(self, images_BHWC, prompts)"
            ) from None
        if inspect.iscoroutinefunction(getattr(kind, name)):
            raise SpotlightError(
                f"{setting}: its {name} is a coroutine, which nothing awaits: write `def` instead of `async def`, and "
                "asyncio.run(...) in it"
            )


def _made(kind: Callable[..., Made], setting: str, options: Mapping[str, Any]) -> Made:
    """A scorer or a detector of a person's own class.

    Args:
        setting: which names it.

    Raises:
        TypeError: its arguments are others.
    """
    inspect.signature(kind).bind(**options)
    try:
        return kind(**options)
    except SpotlightError:
        raise
    except Exception as error:  # of anyone's code
        raise SpotlightError(f"{setting} cannot be made: {explained(error)}") from None


def _check_range(name: str, attribute: str, within: Any) -> None:
    """
    Args:
        attribute: of the scorer that says so, ``range`` or ``usual``.

    Raises:
        SpotlightError: it is not two finite numbers, the least first.
    """
    try:
        low, high = within
        whole = -inf < low < high < inf
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise SpotlightError(
            f"reward {name!r}: its {attribute} {shown(within)} must be the least score and a larger one, both finite"
        )


def planned_range(scorer: Scorer) -> tuple[float, float]:
    """The range of rewards that the planner looks at: where real ones lie, if that is known."""
    return scorer.usual or scorer.range


def normalised(within: tuple[float, float], rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards with `planned_range` mapped to [0, 1], those outside cut off: what the planner sees."""
    low, high = within
    if within == (0.0, 1.0) and all(0.0 <= reward <= 1.0 for reward in rewards):  # most scorers' own range
        return tuple(map(float, rewards))
    return tuple(min(1.0, max(0.0, (reward - low) / (high - low))) for reward in rewards)


def imported(name: str, where: str, beside: str = "") -> Any:
    """What ``module:Class`` names.

    Args:
        beside: a directory to look in last, for this module and those that it imports, so that it hides nothing that
            Python finds elsewhere. "": none.

    Raises:
        SpotlightError: it has another form, there is no such thing, or the module cannot be imported, or is another
            than the one in that directory.
    """
    module, _, attribute = name.partition(":")
    way_out = (
        f"give module:Class, of a file in {beside or 'the directory of the settings file'}, or of a module that Python "
        "finds (PYTHONPATH); workers look there, too"
    )
    if module == "__main__":
        raise SpotlightError(
            f"{where} = {name!r}: workers are processes of their own, which do not see what a notebook or a script "
            f"defines: write it to a file, such as mine.py, and name mine:{attribute}"
        )
    if not all(part.isidentifier() for part in module.split(".")):
        raise SpotlightError(f"{where} = {name!r} names no module: {way_out}; mypkg/mine.py is mypkg.mine")
    if beside and beside not in sys.path:
        sys.path.append(beside)
        looked_in.add(beside)
    _importing.names.append(name)
    try:
        if module not in sys.modules:
            _read_s[module] = time.time()
        found = importlib.import_module(module)
        _check_is_beside(found, beside)
        return getattr(found, attribute)
    except SpotlightError as error:  # it has a way out of its own
        raise SpotlightError(f"{where} = {name!r}: {error}") from None
    except Exception as error:  # of anyone's code
        raise SpotlightError(f"{where} = {name!r} cannot be imported ({explained(error)}): {way_out}") from None
    finally:
        _importing.names.pop()


def _check_is_beside(module: ModuleType, folder: str) -> None:
    """
    Raises:
        ImportError: Python found this one, and another lies in the folder: workers might find that.
    """
    place, found = Path(folder, *module.__name__.split(".")), Path(module.__file__ or "")
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if folder and file.is_file()]
    if files and not any(found.exists() and file.samefile(found) for file in files):
        raise ImportError(f"Python finds {module.__file__ or 'one of its own'}, and {files[0]} is another: rename it")


looked_in: set[str] = set()
"""Directories that this process looks into for modules of rewards, at the end of ``sys.path``."""


class _Importing(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_importing = _Importing()
"""Names that this thread is importing. A module that begins a run as it is imported would begin one in every worker."""
_read_s: dict[str, float] = {}
"""{module: when it was read here}, in Unix seconds; others were read after this process began."""


def refuse_while_importing() -> None:
    """
    Raises:
        SpotlightError: a reward's module is being imported, here or in a worker.
    """
    if _importing.names:
        name = _importing.names[-1]
        raise SpotlightError(
            f"{name.partition(':')[0]} begins a run as it is imported, and all workers import it for {name}: begin it "
            f'under `if __name__ == "__main__":`, or give the scorer a file of its own'
        )


def read_again(names: Iterable[str]) -> None:
    """Reload the modules of rewards whose files were changed since they were read: new workers read the new files.

    Args:
        names: ``module:Class``; names of built-in rewards are skipped.

    Raises:
        SpotlightError: one cannot be read.
    """
    for name in names:
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        if module is None or name in _importing.names or _changed_s(module) <= _known_s(module):
            continue
        _importing.names.append(name)
        read_s = time.time()
        try:
            importlib.reload(module)
        except Exception as error:  # of anyone's code
            where = module.__file__
            raise SpotlightError(f"{where} was changed and cannot be imported again ({explained(error)})") from None
        finally:
            _importing.names.pop()
        _read_s[module.__name__] = read_s


def _known_s(module: ModuleType) -> float:
    return _read_s.get(module.__name__) or psutil.Process().create_time()


def _changed_s(module: ModuleType) -> float:
    """When its file was changed last; 0 where there is none."""
    try:
        return Path(module.__file__ or "").stat().st_mtime
    except OSError:
        return 0.0


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
        self.range = min(0.0, scorer.range[0]), max(0.0, scorer.range[1])  # type: ignore[misc]  # of this one
        self.usual = scorer.usual  # type: ignore[misc]  # as well

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
