"""Judges objects found in an image against what a GenEval prompt asks for; finds none itself.

Pure logic on boxes, so that it runs and is tested anywhere. Objects are ``{class: [{"box": [x0, y0, x1, y1], "score":
s, "color": c}, ...]}``, the most certain first.

Source: GenEval (arXiv 2310.11513), evaluation/evaluate_images.py; the graded form is that of Flow-GRPO's reward server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.rewards.base import Scorer

Object = Mapping[str, Any]
Objects = Mapping[str, Sequence[Object]]

POSITION_SLACK = 0.1
"""Share of both objects' sizes by which the offset of their centres is shortened."""
DIRECTION = 0.5
"""Share of the offset that must lie along an axis to count as a direction."""
RELATIONS = ("left of", "right of", "above", "below")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
"""Least score of an object; the second for prompts about counting."""
MAX_OBJECTS = 16
"""Most objects of one class; those with the highest scores are kept."""
FOUND = '{"bench": [{"box": [x0, y0, x1, y1], "score": 0.95, "color": "red"}, ...], ...}'
"""What a detector returns, as an error shows it."""


class Detector(Protocol):
    """Finds objects of classes in one image, with their colours.

    It may have a method ``check(classes, colours)``, which raises `SpotlightError` for what it can never find: so a run
    with such a prompt is refused before anything starts.
    """

    def __call__(self, image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Objects: ...


def relative_position(box: Sequence[float], other: Sequence[float]) -> set[str]:
    """Where a box is, seen from another: "left of", "right of", "above", "below"; none if they are too close.

    The offset of the centres, on each axis shortened by a tenth of both sizes, over its whole length.
    """
    offset = [(box[axis] + box[axis + 2] - other[axis] - other[axis + 2]) / 2 for axis in (0, 1)]
    sizes = [abs(box[axis + 2] - box[axis]) + abs(other[axis + 2] - other[axis]) for axis in (0, 1)]
    shortened = [
        math.copysign(max(abs(d) - POSITION_SLACK * size, 0.0), d) for d, size in zip(offset, sizes, strict=True)
    ]
    if max(map(abs, shortened)) < 1e-3:
        return set()
    dx, dy = (d / math.hypot(*offset) for d in shortened)
    said = dict(zip(RELATIONS, (-dx, dx, -dy, dy), strict=True))
    return {name for name, share in said.items() if share > DIRECTION}


def geneval_correct(objects: Objects, metadata: Mapping[str, Any]) -> bool:
    """Whether an image has all that its prompt includes, and nothing that it excludes."""
    groups: list[Sequence[Object] | None] = []
    for clause in metadata.get("include", ()):
        found = list(objects.get(clause["class"], ()))[: clause["count"]]
        groups.append(found if _matches(found, clause, groups) else None)
    excluded = any(len(objects.get(clause["class"], ())) >= clause["count"] for clause in metadata.get("exclude", ()))
    return not excluded and all(group is not None for group in groups)


def _matches(found: Sequence[Object], clause: Mapping[str, Any], groups: Sequence[Sequence[Object] | None]) -> bool:
    if len(found) < clause["count"]:
        return False
    if "color" in clause and sum(thing["color"] == clause["color"] for thing in found) < clause["count"]:
        return False
    if "position" not in clause:
        return True
    relation, target = clause["position"]
    others = groups[target]
    return others is not None and all(
        relation in relative_position(thing["box"], other["box"]) for thing in found for other in others
    )


def geneval_graded(objects: Objects, metadata: Mapping[str, Any]) -> float:
    """How far an image has what its prompt includes: a mean of terms, at most 1, below 0 where far too many are found.

    Each clause gives a term for its count, ``1 - |found - n| / n``. If the count is wrong, a colour or a position gives
    0, and both together one 0. If it is right, a colour gives ``1 - |matched - n| / n``; a position 1 if it is right,
    and 0 and 1 if it is wrong (as the server has it), or 0 if its target is not there, and nothing if the colour is
    wrong. What is excluded does not count.
    """
    terms: list[float] = []
    groups: list[Sequence[Object] | None] = []
    for clause in metadata.get("include", ()):
        count, every = clause["count"], list(objects.get(clause["class"], ()))
        found, matched = every[:count], len(every) == count
        terms.append(1 - abs(len(every) - count) / count)
        if not matched:
            terms += [0.0] * ("color" in clause or "position" in clause)
        elif "color" in clause:
            of_colour = sum(thing["color"] == clause["color"] for thing in found)
            terms.append(1 - abs(of_colour - count) / count)
            matched = of_colour == count
        if matched and "position" in clause:
            matched = _matches(found, {**clause, "count": count}, groups)
            there = groups[clause["position"][1]] is not None
            terms += [1.0] if matched else [0.0, 1.0] if there else [0.0]
        groups.append(found if matched else None)
    return sum(terms) / len(terms)


class GenEvalScorer(Scorer):
    """The share of a GenEval prompt that an image shows, or (not graded) whether it shows all of it."""

    def __init__(self, detector: Detector, *, graded: bool = True) -> None:
        if not callable(detector):
            raise SpotlightError(
                f"the detector {type(detector).__name__} finds nothing: give it __call__(self, image_HWC, classes)"
            )
        self._detector, self._graded = detector, graded

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        raise SpotlightError("GenEval rewards need the prompts' metadata: give [data] GenEval's own .jsonl file")

    def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
        return [self._judge(image, metadata_of(prompt)) for image, prompt in zip(images_BHWC, prompts, strict=True)]

    def check_prompt(self, prompt: Prompt) -> None:
        metadata = metadata_of(prompt)
        if check := getattr(self._detector, "check", None):
            clauses = [*metadata["include"], *metadata.get("exclude", ())]
            colours = [clause["color"] for clause in clauses if "color" in clause]
            check([clause["class"] for clause in clauses], colours)

    def _judge(self, image_HWC: NDArray[np.uint8], metadata: Mapping[str, Any]) -> float:
        classes = [clause["class"] for part in ("include", "exclude") for clause in metadata.get(part, ())]
        least = COUNTING_THRESHOLD if metadata.get("tag") == "counting" else THRESHOLD
        every = self._detector(image_HWC, sorted(set(classes)))
        try:
            objects = {
                name: sorted((thing for thing in found if thing["score"] > least), key=lambda thing: -thing["score"])[
                    :MAX_OBJECTS
                ]
                for name, found in every.items()
            }
            if not self._graded:
                return float(geneval_correct(objects, metadata))
            return max(0.0, geneval_graded(objects, metadata))  # far too many objects are as bad as none
        except (AttributeError, LookupError, TypeError):  # the metadata were checked
            raise ValueError(f"the detector returned {shown(every)}, and not {FOUND}") from None


def metadata_of(prompt: Prompt) -> Mapping[str, Any]:
    """What a GenEval prompt asks for.

    Raises:
        SpotlightError: it says nothing of that, or not in GenEval's form.
    """
    try:
        found: dict[str, Any] = json.loads(prompt.metadata or "{}")
        for part in found.keys() & {"include", "exclude"}:  # tables fill what a clause leaves out with null
            stated = ({k: v for k, v in clause.items() if v is not None} for clause in found[part] or ())
            found[part] = list(stated)
        clauses = [*found["include"], *found.get("exclude", ())]
        whole = found["include"] and all(
            isinstance(clause["class"], str)
            and type(clause["count"]) is int
            and clause["count"] >= 1
            and isinstance(clause.get("color", ""), str)
            for clause in clauses
        )
        placed = [(at, *clause["position"]) for at, clause in enumerate(found["include"]) if "position" in clause]
        earlier = all(
            relation in RELATIONS and type(target) is int and 0 <= target < at for at, relation, target in placed
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        whole = earlier = False
    if not whole or not earlier:
        raise SpotlightError(
            f'the prompt {prompt.text!r} has no GenEval metadata: its line needs "include", a list of clauses such as '
            f'{{"class": "bench", "count": 1}}, whose "position" is one of {RELATIONS} and an earlier clause\'s number'
        )
    return found
