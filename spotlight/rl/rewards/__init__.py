"""Turns images and prompts into rewards; a reward that cannot be had is missing, never 0.

Importing this package, making a scorer and checking prompts load no OCR engine and no network: a scorer loads what it
needs when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from spotlight.files import shown
from spotlight.records import SpotlightError
from spotlight.rl.rewards.base import Refused as Refused
from spotlight.rl.rewards.base import Scorer as Scorer
from spotlight.rl.rewards.base import normalised as normalised
from spotlight.rl.rewards.base import planned_range as planned_range
from spotlight.rl.rewards.base import score as score
from spotlight.rl.rewards.combined import Rewards as Rewards
from spotlight.rl.rewards.combined import Tagged as Tagged
from spotlight.rl.rewards.combined import Weighted as Weighted
from spotlight.rl.rewards.combined import score_each as score_each
from spotlight.rl.rewards.geneval import GenEvalScorer as GenEvalScorer
from spotlight.rl.rewards.geneval import geneval_correct as geneval_correct
from spotlight.rl.rewards.geneval import geneval_graded as geneval_graded
from spotlight.rl.rewards.ocr import OcrScorer, SceneOcrScorer
from spotlight.rl.rewards.ocr import ocr_score as ocr_score
from spotlight.rl.rewards.ocr import quoted_target as quoted_target
from spotlight.rl.rewards.own import check_kind, imported, made
from spotlight.rl.rewards.own import looked_in as looked_in
from spotlight.rl.rewards.own import read_again as read_again
from spotlight.rl.rewards.own import refuse_while_importing as refuse_while_importing
from spotlight.rl.rewards.server import ChatOcrScorer, ChatScorer, HttpScorer

if TYPE_CHECKING:
    from spotlight.config import RewardSection

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
    return GenEvalScorer(made(kind, f"reward.options.detector = {name!r}", options), graded=graded)


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
LARGEST = 1e100
"""Largest score, or smallest with its sign changed: a weighted sum of many, squared, is still a finite float."""


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
            check_kind(kind, f"reward.name = {settings.name!r}")
            scorer = made(kind, f"reward.name = {settings.name!r}", settings.options)
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


def _check_range(name: str, attribute: str, within: Any) -> None:
    """
    Args:
        attribute: of the scorer that says so, ``range`` or ``usual``.

    Raises:
        SpotlightError: it is not two numbers, the least first, or one is too large.
    """
    try:
        low, high = within
        whole = -LARGEST <= low < high <= LARGEST
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise SpotlightError(
            f"reward {name!r}: its {attribute} {shown(within)} must be the least score and a larger one, none beyond "
            f"{LARGEST:g}"
        )
