"""Claims about the OCR reward, and about scorers that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spotlight.config import RewardSection
from spotlight.records import Prompt, SpotlightError
from spotlight.rl import rewards
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import Scorer, build, load, ocr_score, quoted_target, score
from spotlight.rl.rewards.base import BACK_OFF_S, PAUSE_S_MAX, Unreachable

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"


def draw(text: str, *, height_px: int = 16, width_px: int = 32) -> NDArray[np.uint8]:
    """Black text in the middle of a white image, as the embedded model was taught to draw it."""
    image = Image.new("RGB", (width_px, height_px), "white")
    font = ImageFont.truetype(str(FONT), round(0.8 * height_px))
    ImageDraw.Draw(image).text((width_px / 2, height_px / 2), text, fill="black", font=font, anchor="mm")
    return np.asarray(image)


def distance(a: str, b: str) -> int:
    """Levenshtein's, by the recursion that defines it."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return distance(a[1:], b[1:])
    return 1 + min(distance(a[1:], b), distance(a, b[1:]), distance(a[1:], b[1:]))


def test_the_target_is_what_the_first_pair_of_double_quotes_holds() -> None:
    prompt = """It's a "first sign" beside a "second" one"""

    target = quoted_target(prompt)

    assert target == "first sign"


@pytest.mark.parametrize("prompt", ["no quotes", 'one " only', 'an empty "" pair', 'only space "  "', "a “curly” pair"])
def test_a_prompt_without_a_target_is_named(prompt: str) -> None:
    with pytest.raises(SpotlightError, match="double quotes") as raised:
        quoted_target(prompt)

    assert prompt in str(raised.value)


def test_targets_of_published_prompts_are_as_long_as_their_source_says(shared_data: Path) -> None:
    prompts = read_prompts(shared_data / "ocr_prompts_test.txt")

    lengths = [len(quoted_target(prompt.text)) for prompt in prompts]

    assert max(lengths) == 29


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("47", "47", 1.0),
        ("", "47", 0.0),
        ("4", "47", 1 / 2),  # one letter missing of two
        ("74", "47", 0.0),  # two substitutions of two
        ("open late", "Open Late", 1.0),  # case does not count
        ("OpenLate", "Open Late", 1.0),  # nor does space
        ("xx47yy", "47", 1.0),  # the target occurs in the text, so d = 0
        ("abcdefgh", "47", 0.0),  # d = 8 is capped at the target's 2 letters
        ("kitten", "sitting", 1 - 3 / 7),  # k->s, e->i, +g
        ("caf\u00e9", "Cafe\u0301", 1.0),  # one letter, as engines read it, or two, as in names of files of a Mac
    ],
)
def test_the_score_of_hand_computed_cases(text: str, target: str, expected: float) -> None:
    assert ocr_score(text, target) == pytest.approx(expected)


@given(text=st.text("abAB 1", max_size=6), target=st.text("abAB1", min_size=1, max_size=6))
def test_the_score_follows_the_fields_formula(text: str, target: str) -> None:
    plain_text, plain_target = text.replace(" ", "").lower(), target.lower()
    edits = 0 if plain_target in plain_text else min(distance(plain_text, plain_target), len(plain_target))

    result = ocr_score(text, target)

    assert result == pytest.approx(1 - edits / len(plain_target))


def test_a_reward_that_is_not_graded_says_whether_all_was_read() -> None:
    images = np.stack([draw("47")] * 3)
    strict = build(RewardSection(options={"graded": False}))

    assert strict(images, ['a "47"', 'a "41"', 'a "4"']) == [1.0, 0.0, 1.0]  # the last is in what was read
    assert load("ocr")(images[:1], ['a "41"']) == [0.5]  # another scorer than the strict one


def test_an_option_that_an_ocr_reward_has_not_is_refused() -> None:
    with pytest.raises(SpotlightError, match="reward 'ocr': its options do not fit: .*'exact'"):
        build(RewardSection(options={"exact": True}))


def test_an_empty_target_is_an_error_and_no_score() -> None:
    with pytest.raises(SpotlightError, match="empty"):
        ocr_score("anything", " ")


def test_rendered_numbers_are_read() -> None:
    targets = [f"{number:02d}" for number in range(0, 100, 5)]
    images = np.stack([draw(target) for target in targets])

    scores = load("ocr")(images, [f'a "{target}"' for target in targets])

    assert np.mean(scores) >= 0.9  # all 100 numbers in six fonts: 0.98


def test_the_reward_is_that_of_the_prompt() -> None:
    images = np.stack([draw("47")] * 3)

    scores = load("ocr")(images, ['a "47"', 'a "41"', 'a "12"'])

    assert scores == [1.0, 0.5, 0.0]


def test_longer_text_is_read_in_the_same_batch_as_short_text() -> None:
    targets = ["7", "47", "SPOTLIGHT"]
    images = np.stack([draw(target, height_px=32, width_px=256) for target in targets])

    scores = load("ocr")(images, [f'a "{target}"' for target in targets])

    assert scores == [1.0, 1.0, 1.0]


def test_a_reward_does_not_depend_on_what_else_is_in_the_batch() -> None:
    generator = np.random.default_rng(0)
    targets = [f"{number:02d}" for number in generator.integers(100, size=20)] + ["1", "123", "12345"]
    drawn = np.stack([draw(target) for target in targets]).astype(np.int16)
    images = np.clip(drawn + generator.normal(0, 60, drawn.shape), 0, 255).astype(np.uint8)
    prompts = [f'a "{target}"' for target in targets]
    scorer = load("ocr")

    together = scorer(images, prompts)

    assert together == [scorer(images[row : row + 1], prompts[row : row + 1])[0] for row in range(len(prompts))]
    assert 0.0 < np.mean(together) < 1.0  # the noise makes some unreadable: the comparison is not of constants


def test_a_narrow_image_is_read_with_room_for_every_letter_of_its_target() -> None:
    """Equal neighbours need a blank between them."""
    wide = Image.fromarray(draw("222222", height_px=32, width_px=112))
    narrow = np.asarray(wide.resize((48, 32)))

    assert load("ocr")(narrow[None], ['a "222222"']) == [1.0]


def test_an_unreadable_image_scores_zero() -> None:
    blank = np.full((1, 16, 32, 3), 255, dtype=np.uint8)

    scores = load("ocr")(blank, ['a "47"'])

    assert scores == [0.0]


def test_a_scorer_is_loaded_once_per_process() -> None:
    assert load("ocr") is load("ocr")


def test_an_unknown_scorer_is_an_error_that_names_the_known() -> None:
    with pytest.raises(SpotlightError, match="'orc' is not known; there is .*'ocr'"):
        load("orc")


def test_a_scorer_of_a_notebook_is_refused_at_once_for_workers_do_not_see_it() -> None:
    with pytest.raises(SpotlightError, match=r"'__main__:Mine': .* write it to a file, .* and name mine:Mine"):
        build(RewardSection(name="__main__:Mine"))


def test_a_scorer_accepts_any_prompt_unless_it_says_otherwise() -> None:
    prompt = "a sign without digits"

    Failing(raise_always).check(prompt)

    with pytest.raises(SpotlightError, match="double quotes"):
        load("ocr").check(prompt)


def test_checking_prompts_loads_no_ocr_engine() -> None:
    code = "from spotlight.rl.rewards import load; load('ocr').check('a \"1\"'); import sys; print(*sys.modules)"

    root = Path(__file__).parents[1]
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout

    assert not {"onnxruntime", "rapidocr", "cv2", "PIL", "torch", "dask"} & set(loaded.split())


def test_reading_text_tells_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    """Onnxruntime would leave an id of the device, and send what it measures."""
    code = "import numpy; from spotlight.rl.rewards import load; image = numpy.zeros((1, 32, 32, 3), 'u1'); "
    code += "load('ocr')(image, ['\"1\"'])"
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()

    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=environment, check=True)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


IMAGES = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1)
"""Four images, told apart by their only pixel."""
PROMPTS = ['"a"', '"b"', '"c"', '"d"']


class Failing(Scorer):
    """A scorer that gives each image its pixel / 10, and fails as ``trouble`` says.

    Args:
        trouble: given the call's number and pixels, returns the reward that goes wrong, or raises.
    """

    def __init__(self, trouble: Callable[[int, list[int]], float | None]) -> None:
        self.trouble = trouble
        self.calls: list[list[int]] = []

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        pixels = [int(pixel) for pixel in images_BHWC.reshape(-1)]
        self.calls.append(pixels)
        wrong = self.trouble(len(self.calls), pixels)
        return [pixel / 10 if wrong is None else wrong for pixel in pixels]


def raise_always(call: int, pixels: list[int]) -> None:
    raise RuntimeError("out of order")


def raise_once(call: int, pixels: list[int]) -> None:
    if call == 1:
        raise ConnectionError("busy")


def raise_on_image_2(call: int, pixels: list[int]) -> None:
    if 2 in pixels:
        raise RuntimeError("bad image")


def test_a_failure_that_passes_costs_nothing() -> None:
    scorer = Failing(raise_once)

    values, errors = score(scorer, IMAGES, PROMPTS, attempts=3)

    assert (values, errors) == ([0.0, 0.1, 0.2, 0.3], [])
    assert scorer.calls == [[0, 1, 2, 3]] * 2


def test_a_bad_image_costs_only_itself() -> None:
    scorer = Failing(raise_on_image_2)

    values, errors = score(scorer, IMAGES, PROMPTS, attempts=2)

    assert values == [0.0, 0.1, None, 0.3]
    assert [error.partition(" (")[0] for error in errors] == ["""'"c"': RuntimeError: bad image"""]
    assert scorer.calls == [[0, 1, 2, 3]] * 2 + [[0], [1], [2], [2], [3]]


def test_a_scorer_that_always_raises_gives_no_reward_at_all() -> None:
    values, errors = score(Failing(raise_always), IMAGES, PROMPTS, attempts=2)

    assert values == [None] * 4
    assert [error.partition(":")[0] for error in errors] == [repr(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("wrong", [float("nan"), -0.1, 1.1, float("inf")])
def test_a_reward_outside_its_range_is_missing(wrong: float) -> None:
    values, errors = score(Failing(lambda call, pixels: wrong), IMAGES[:1], PROMPTS[:1], attempts=2)

    assert values == [None]
    assert str(wrong) in errors[0]


def test_a_scorer_may_declare_another_range() -> None:
    class Wide(Failing):
        range = (-10.0, 15.0)

    values, errors = score(Wide(lambda call, pixels: -7.5), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert (values, errors) == ([-7.5], [])


def test_a_reward_may_be_a_whole_number_of_numpys() -> None:
    right: Any = np.int64(1)

    assert score(Failing(lambda call, pixels: right), IMAGES[:1], PROMPTS[:1], attempts=1) == ([1.0], [])


def test_a_range_in_the_settings_is_that_of_a_named_scorer_too() -> None:
    narrow = build(RewardSection(name="ocr", range=(0.0, 0.01)))

    assert narrow.range == (0.0, 0.01)
    assert build(RewardSection(name="ocr")).range == (0.0, 1.0)


def test_the_planner_sees_rewards_between_0_and_1() -> None:
    assert rewards.normalised((-10.0, 15.0), [-10.0, 15.0, 2.5]) == (0.0, 1.0, 0.5)
    assert rewards.normalised((0.0, 1.0), [0.25]) == (0.25,)


@pytest.mark.parametrize(
    "returned", [[0.5, 1], (np.float32(0.5), True + 0.0), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0])]
)
def test_rewards_may_be_numbers_of_any_library(returned: Any) -> None:
    class Another(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            return returned

    assert score(Another(), np.zeros((2, 2, 2, 3), np.uint8), ["a", "b"], attempts=1) == ([0.5, 1.0], [])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "None, which is no list"),
        (["a"], "'a', which is no number"),
        ([float("nan")], "nan, which is no finite number; where an image has no reward, raise an error"),
        ([float("inf")], "inf, which is no finite number"),
        ([10**400], "its rewards are to lie in [0.0, 1.0]"),
        ({0: 0.5}, "which is no list"),
        ({0.5}, "which is no list"),
        (b"\x01", "which is no list"),
    ],
)
def test_what_is_no_list_of_numbers_is_a_missing_reward_that_says_so(returned: Any, says: str) -> None:
    class Another(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            return returned

    missing, (error,) = score(Another(), np.zeros((1, 2, 2, 3), np.uint8), ["a"], attempts=1)

    assert missing == [None]
    assert says in error


def test_a_scorer_cannot_change_the_prompts_that_it_is_asked_for_again() -> None:
    class Reversing(Scorer):
        calls = 0

        def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
            texts = [prompt.text for prompt in prompts]
            list.reverse(prompts)  # type: ignore[arg-type]  # what nobody should
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("once")
            return [float(text == str(image[0, 0, 0])) for text, image in zip(texts, images_BHWC, strict=True)]

    images = np.array([1, 2], np.uint8).reshape(2, 1, 1, 1)

    assert score(Reversing(), images, ["1", "2"], attempts=2) == ([1.0, 1.0], [])


def test_an_error_of_a_scorer_says_where_it_was_raised() -> None:
    class Failing(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            return [float(np.asarray(images_BHWC).reshape(7).sum())]  # within NumPy, and this is the line

    _, (error,) = score(Failing(), np.zeros((1, 2, 2, 3), np.uint8), ["a"], attempts=1)

    assert re.search(rf"cannot reshape array .* \({re.escape(__file__)}:\d+\)$", error)


def test_too_few_rewards_are_missing_rewards() -> None:
    class Silent(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            return []

    values, errors = score(Silent(), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert "0 rewards for 1 images" in errors[0]


@pytest.mark.parametrize("says", ["CUDA error: device-side assert triggered", "CUDA error: unspecified launch failure"])
def test_after_an_error_of_cuda_nothing_is_tried_in_this_process(says: str) -> None:
    asked: list[int] = []

    class Broken(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            asked.append(len(prompts))
            raise torch.AcceleratorError(says)

    with pytest.raises(RuntimeError, match=says):
        score(Broken(), np.zeros((2, 4, 4, 3), np.uint8), ["a", "b"], attempts=3)

    assert asked == [2]


def test_what_a_person_must_put_right_is_not_tried_again() -> None:
    def raise_for_a_person(call: int, pixels: list[int]) -> None:
        raise SpotlightError("install the model")

    scorer = Failing(raise_for_a_person)

    with pytest.raises(SpotlightError, match="install the model"):
        score(scorer, IMAGES, PROMPTS, attempts=3)
    assert len(scorer.calls) == 1


@pytest.mark.parametrize(("batch", "sizes"), [(2, [2, 2, 1]), (4, [4, 1]), (5, [5]), (0, [5])])
def test_a_scorer_is_given_no_more_images_than_it_may_have_at_once(batch: int, sizes: list[int]) -> None:
    class Counts(Scorer):
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            self.sizes.append(len(prompts))
            return [float(image.flat[0]) / 10 for image in images_BHWC]

    counts, images = Counts(), np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)

    found = score(counts, images, ["a"] * 5, attempts=1, batch=batch)

    assert found == ([0.0, 0.1, 0.2, 0.3, 0.4], [])
    assert counts.sizes == sizes


def test_each_further_attempt_comes_after_twice_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses_s.append)

    score(Failing(raise_always), IMAGES[:1], PROMPTS[:1], attempts=4)

    assert pauses_s == [BACK_OFF_S, 2 * BACK_OFF_S, 4 * BACK_OFF_S]


@pytest.mark.parametrize("batch", [0, 2])
def test_a_server_is_asked_again_after_longer_and_longer_pauses_up_to_a_longest_one(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses_s.append)

    def starting(call: int, pixels: list[int]) -> None:
        if call <= 10:
            raise Unreachable("starting")

    found = score(Failing(starting), IMAGES, PROMPTS, attempts=1, batch=batch, patience_s=60.0)

    assert found == ([0.0, 0.1, 0.2, 0.3], [])
    assert pauses_s == [BACK_OFF_S * 2**n for n in range(7)] + [PAUSE_S_MAX] * 3


def test_nothing_to_score_needs_no_scorer() -> None:
    assert score(Failing(raise_always), IMAGES[:0], [], attempts=1) == ([], [])
