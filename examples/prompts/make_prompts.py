"""Writes prompt files: a sentence for each two-digit (digits-*.txt) or three-digit (numbers-*.txt) number, in quotes;
for texts of one to four digits and capitals (mixed-*.txt), by kind; and for scenes of shapes, as GenEval writes its own
(shapes-*.jsonl), by tag.

The same bytes on every run. Validation texts never occur in training.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
HELD_OUT = {"digits": (2, 20), "numbers": (3, 64)}
"""``{files: (digits of a number, how many numbers are held out)}``. The embedded model draws two digits; three are for
larger models, and for simulations of them, that want more prompts."""

CAPITALS = "".join(letter for letter in string.ascii_uppercase if letter not in "IO")
"""Without those that nobody tells from digits."""
KIND, KIND_HELD_OUT = 32, 4
"""Texts of a kind, and how many of them are held out; of single digits and capitals there are fewer."""
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
COLOURS = ("red", "green", "blue", "yellow", "purple")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TAG, TAG_HELD_OUT = (
    48,
    {"single_object": 1, "two_object": 3, "counting": 3, "colors": 5, "position": 10, "color_attr": 10},
)
"""Scenes of a tag, at most, and how many of them are held out."""

SENTENCES = (
    'A weathered wooden door with the house number "{}" painted above the brass knocker.',
    'A yellow city taxi in the rain, its roof light showing "{}" in bold black digits.',
    'A marathon runner crossing the finish line with a paper bib that reads "{}" on the chest.',
    'A red football jersey on a hook in a locker room, the back printed with a large "{}" in white.',
    'A birthday cake on a kitchen table, decorated with icing that spells "{}" between two candles.',
    'A steel locker in a school corridor with an engraved plate that says "{}" at eye level.',
    'A vintage racing car parked on wet asphalt, a white disc with "{}" on its door.',
    'A train platform at dawn, the sign overhead displaying "{}" in clear plain type.',
    'A hotel corridor with warm lamps, the nearest room marked "{}" in polished brass.',
    'A market stall with apples in crates and a chalkboard that shows "{}" as the price.',
    'A close-up of a scoreboard in an empty gym, lit up with "{}" for the home team.',
    'A fishing boat in a small harbour, its bow labelled "{}" in peeling white paint.',
    'A letter box at the end of a gravel road with "{}" stencilled on its side.',
    'A digital clock on a bedside table in a dark room, glowing "{}" in pale green.',
    'A lift panel of brushed metal with a single lit button that reads "{}" near the top.',
    'A road sign on a quiet country lane, limiting the speed to "{}" in black on white.',
    'An old tram turning a corner, the line number "{}" lit above its windscreen.',
    'A cinema ticket held between two fingers, the seat stamped as "{}" in dark blue ink.',
    'A ski rental shelf with boots in rows, one pair tagged "{}" on an orange label.',
    'A concrete car park at night, the nearest bay painted with "{}" on the ground.',
)


def make_prompts(digits: int, held_out: int) -> tuple[list[str], list[str]]:
    """Training and validation prompts, each in the order of their numbers."""
    count = 10**digits
    generator = np.random.Generator(np.random.Philox(key=[SEED, 0]))
    validation = set(generator.permutation(count)[:held_out].tolist())
    # Cycles of shuffled sentences: no sentence is used more often than any other.
    sentences = np.concatenate([generator.permutation(len(SENTENCES)) for _ in range(count // len(SENTENCES))])
    prompts = [SENTENCES[sentence].format(f"{number:0{digits}d}") for number, sentence in enumerate(sentences)]
    train = [prompt for number, prompt in enumerate(prompts) if number not in validation]
    return train, [prompts[number] for number in sorted(validation)]


def make_mixed() -> tuple[list[str], list[str]]:
    """Training and validation prompts: kind by kind, so many of each held out."""
    generator = np.random.Generator(np.random.Philox(key=[SEED, 1]))
    train, validation = [], []
    for length, kind in itertools.product((1, 2, 3, 4), ("digits", "capitals", "mixed")):
        texts = [text for text in _texts(generator, length, kind) if _kind(text) == kind][:KIND]
        sentences = generator.permutation(np.arange(len(texts)) % len(SENTENCES))
        prompts = [SENTENCES[sentence].format(text) for sentence, text in zip(sentences, texts, strict=True)]
        validation += prompts[:KIND_HELD_OUT]
        train += prompts[KIND_HELD_OUT:]
    return train, validation


def _texts(generator: np.random.Generator, length: int, kind: str) -> list[str]:
    """Some hundred texts, each once, in no order."""
    alphabet = {"digits": string.digits, "capitals": CAPITALS, "mixed": string.digits + CAPITALS}[kind]
    drawn = generator.choice(list(alphabet), size=(10 * KIND, length))
    return list(dict.fromkeys("".join(letters) for letters in drawn))


def _kind(text: str) -> str:
    return "digits" if text.isdigit() else "capitals" if text.isalpha() else "mixed"


def make_shapes() -> tuple[list[str], list[str]]:
    """Training and validation prompts with their metadata, as JSON lines: tag by tag, so many of each held out."""
    generator = np.random.Generator(np.random.Philox(key=[SEED, 2]))
    train, validation = [], []
    for tag, held_out in TAG_HELD_OUT.items():
        scenes = [{"tag": tag, **scene} for scene in _scenes(tag)]
        chosen = [json.dumps(scenes[index]) for index in generator.permutation(len(scenes))[:TAG]]
        validation += chosen[:held_out]
        train += chosen[held_out:]
    return train, validation


def _scenes(tag: str) -> Iterator[dict[str, Any]]:
    """All scenes of a tag, in the words of GenEval's prompts."""
    pairs = list(itertools.permutations(SHAPES, 2))
    match tag:
        case "single_object":
            for name in SHAPES:
                yield {"include": [_clause(name)], "prompt": f"a photo of a {name}"}
        case "two_object":
            for one, other in pairs:
                yield {"include": [_clause(one), _clause(other)], "prompt": f"a photo of a {one} and a {other}"}
        case "counting":
            for (count, number), name in itertools.product(NUMBERS.items(), SHAPES):
                yield {
                    "include": [_clause(name, count)],
                    "exclude": [_clause(name, count + 1)],
                    "prompt": f"a photo of {number} {SHAPES[name]}",
                }
        case "colors":
            for colour, name in itertools.product(COLOURS, SHAPES):
                yield {"include": [_clause(name, color=colour)], "prompt": f"a photo of a {colour} {name}"}
        case "position":
            for (one, other), relation in itertools.product(pairs, RELATIONS):
                include = [_clause(other), _clause(one, position=[relation, 0])]
                yield {"include": include, "prompt": f"a photo of a {one} {relation} a {other}"}
        case _:
            for (one, other), (first, second) in itertools.product(pairs, itertools.permutations(COLOURS, 2)):
                include = [_clause(one, color=first), _clause(other, color=second)]
                yield {"include": include, "prompt": f"a photo of a {first} {one} and a {second} {other}"}


def _clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def main() -> None:
    here = Path(__file__).parent
    for name, prompts in zip(("train", "validation"), make_shapes(), strict=True):
        (here / f"shapes-{name}.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    for name, prompts in zip(("train", "validation"), make_mixed(), strict=True):
        (here / f"mixed-{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    for files, (digits, held_out) in HELD_OUT.items():
        for name, prompts in zip(("train", "validation"), make_prompts(digits, held_out), strict=True):
            (here / f"{files}-{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
