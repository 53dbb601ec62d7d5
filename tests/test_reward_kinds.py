"""Scenes, GenEval's decisions, CLIP and what is built on it, several rewards at once, and rewards of one's own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from pipelines import clip_tokenizer, write_clip
from spotlight import config
from spotlight.config import RewardSection
from spotlight.inputs import check_inputs
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import (
    GenEvalScorer,
    Scorer,
    Tagged,
    Weighted,
    build,
    geneval_correct,
    geneval_graded,
    load,
    normalised,
    ocr_score,
    planned_range,
    quoted_target,
    score,
    score_each,
)
from spotlight.rl.rewards.clip import AestheticScorer, ClipScorer, PickScorer
from spotlight.rl.rewards.geneval import MAX_OBJECTS, Objects, metadata_of, relative_position
from spotlight.rl.rewards.ocr import OcrScorer
from spotlight.rl.rewards.reader import ReaderScorer

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"

# Scenes


def scene(text: str, size_px: int, xy: tuple[int, int], *, angle: float = 0.0, side_px: int = 512) -> NDArray[np.uint8]:
    """Text somewhere on a coloured background that is not plain."""
    ground = np.random.default_rng(0).integers(40, 190, (16, 16, 3)).astype(np.uint8)
    image = Image.fromarray(ground).resize((side_px, side_px), Image.Resampling.BICUBIC).convert("RGBA")
    layer = Image.new("RGBA", image.size, (0, 0, 0, 0))
    font = ImageFont.truetype(str(FONT), size_px)
    ImageDraw.Draw(layer).multiline_text(xy, text, font=font, fill=(240, 230, 90, 255))
    image.alpha_composite(layer.rotate(angle))
    return np.asarray(image.convert("RGB"))


def test_text_is_found_and_read_in_scenes_that_one_line_readers_fail_on() -> None:
    scenes = {
        "Open Late": scene("Open Late", 28, (40, 400)),
        "Quantum Leap": scene("Quantum\nLeap", 48, (120, 150)),
        "Happy Birthday": scene("Happy Birthday", 40, (80, 220), angle=12),
    }
    images, prompts = np.stack(list(scenes.values())), [f'a sign "{text}"' for text in scenes]

    found, as_one_line = load("scene-ocr")(images, prompts), load("ocr")(images, prompts)

    assert found == [1.0, 1.0, 1.0]
    assert max(as_one_line) < 1.0


def test_tiny_text_is_read_in_a_large_scene() -> None:
    image = scene("Platform 9", 14, (700, 1100), side_px=1280)

    assert load("scene-ocr")(image[None], ['a sign "Platform 9"']) == [1.0]


def test_where_nothing_is_found_the_image_is_read_as_one_line_and_a_blank_one_has_nothing() -> None:
    blank = np.full((1, 64, 64, 3), 200, dtype=np.uint8)

    assert load("scene-ocr")(blank, ['a "47"']) == [0.0]


# GenEval


def thing(x: float, y: float, *, side: float = 10, color: str = "red", certain: float = 0.95) -> dict[str, Any]:
    return {"box": [x, y, x + side, y + side], "score": certain, "color": color}


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (-50, 0, {"left of"}),
        (50, 0, {"right of"}),
        (0, -50, {"above"}),
        (0, 50, {"below"}),
        (-50, -50, {"left of", "above"}),
        (-50, -20, {"left of"}),  # shortened to (48, 18) of 53.9: 0.89 and 0.33
        (1.5, 1.5, set()),  # a tenth of both sizes is 2
        (5, 0, {"right of"}),  # shortened to 3 of 5
        (0, 0, set()),
    ],
)
def test_a_position_is_a_direction_that_most_of_the_shortened_offset_lies_along(
    x: float, y: float, expected: set[str]
) -> None:
    assert relative_position(thing(x, y)["box"], thing(0, 0)["box"]) == expected


def include(*clauses: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"include": list(clauses), **more}


DOG, CAT = {"class": "dog", "count": 1}, {"class": "cat", "count": 1}
CASES: list[tuple[Objects, dict[str, Any], bool, float]] = [
    ({"dog": [thing(0, 0)]}, include(DOG), True, 1.0),
    ({}, include(DOG), False, 0.0),
    ({"dog": [thing(0, 0)] * 3}, include(DOG), True, -1.0),  # officially, more is enough; graded 1 - |3 - 1| / 1
    ({"dog": [thing(0, 0)] * 2}, include({"class": "dog", "count": 4}), False, 0.5),
    ({"dog": [thing(0, 0)] * 4}, include({"class": "dog", "count": 4}), True, 1.0),
    ({"dog": [thing(0, 0)], "cat": []}, include(DOG, CAT), False, 0.5),
    ({"dog": [thing(0, 0, color="blue")]}, include({**DOG, "color": "red"}), False, 0.5),
    ({"dog": [thing(0, 0)]}, include({**DOG, "color": "red"}), True, 1.0),
    ({"dog": [thing(0, 0)] * 2}, include({**DOG, "color": "red"}), True, 0.0),  # mean of 0 for the count, 0 for colour
    ({"dog": [thing(0, 0)], "cat": [thing(90, 0)]}, include(DOG, {**CAT, "position": ["right of", 0]}), True, 1.0),
    (
        {"dog": [thing(0, 0)], "cat": [thing(90, 0)] * 2},
        include(DOG, {**CAT, "color": "red", "position": ["right of", 0]}),
        True,
        1 / 3,  # 1, then 0 for the count, and one 0 for colour and position together
    ),
    (
        {"dog": [thing(0, 0)], "cat": [thing(-90, 0)]},
        include(DOG, {**CAT, "position": ["right of", 0]}),
        False,
        0.75,  # 1 and 1 for the counts, then 0 and 1
    ),
    ({"cat": [thing(0, 0)]}, include(DOG, {**CAT, "position": ["right of", 0]}), False, 1 / 3),  # 0, 1, no target: 0
    (
        {"dog": [thing(0, 0)], "cat": [thing(90, 0, color="blue")]},
        include(DOG, {**CAT, "color": "red", "position": ["right of", 0]}),
        False,
        2 / 3,  # 1 and 1 for the counts, then 0: where the colour is wrong, a position has no term
    ),
    (
        {"dog": [thing(0, 0, color="blue")], "cat": [thing(90, 0)]},
        include({**DOG, "color": "red"}, {**CAT, "position": ["right of", 0]}),
        False,
        0.5,  # 1, 0 for the colour, 1, and 0: what has the wrong colour is no target
    ),
    ({"dog": [thing(0, 0)] * 2}, include(DOG, exclude=[{"class": "dog", "count": 2}]), False, 0.0),
    ({"dog": [thing(0, 0)]}, include(DOG, exclude=[{"class": "dog", "count": 2}]), True, 1.0),
]


@pytest.mark.parametrize(("objects", "metadata", "correct", "graded"), CASES)
def test_objects_are_judged_as_geneval_and_the_reward_server_judge_them(
    objects: Objects, metadata: dict[str, Any], correct: bool, graded: float
) -> None:
    assert geneval_correct(objects, metadata) is correct
    assert geneval_graded(objects, metadata) == pytest.approx(graded)


class Painted:
    """Finds what a test painted: as many dogs as the first pixel says."""

    def __call__(self, image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Objects:
        dogs = [thing(20.0 * n, 0, certain=0.95 if n < 2 else 0.5) for n in range(int(image_HWC[0, 0, 0]))]
        return {"dog": dogs} if "dog" in classes else {}


def dogs(count: int, tag: str = "two_object") -> Prompt:
    return Prompt(id=0, text="dogs", metadata=json.dumps(include({"class": "dog", "count": count}, tag=tag)))


@pytest.mark.parametrize("found", [[thing(0, 0)], {"dog": [(0, 0, 10, 10, 0.95)]}, {"dog": [{"box": [0, 0, 9, 9]}]}])
def test_what_is_no_answer_of_a_detector_is_shown_with_what_one_is(found: Any) -> None:
    def detector(image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Any:
        return found

    missing, (error,) = score(GenEvalScorer(detector), np.zeros((1, 1, 1, 3), np.uint8), [dogs(1)], attempts=1)

    assert missing == [None]
    assert "the detector returned " in error
    assert '{"bench": [{"box": [x0, y0, x1, y1], "score": 0.95, "color": "red"}' in error


def test_a_detector_that_cannot_be_called_is_refused() -> None:
    nothing: Any = object()

    with pytest.raises(SpotlightError, match=r"the detector object finds nothing: give it __call__"):
        GenEvalScorer(nothing)


def test_the_scorer_takes_what_is_asked_for_from_the_prompt_and_counts_only_what_is_certain() -> None:
    images = np.array([0, 1, 2, 4, 9], dtype=np.uint8).reshape(5, 1, 1, 1).repeat(3, -1)

    graded, _ = score(GenEvalScorer(Painted()), images, [dogs(2)] * 5, attempts=1)
    counted, _ = score(GenEvalScorer(Painted()), images, [dogs(2, "counting")] * 5, attempts=1)
    strict, _ = score(GenEvalScorer(Painted(), graded=False), images, [dogs(2)] * 5, attempts=1)

    assert graded == [0.0, 0.5, 1.0, 0.0, 0.0]  # far too many are as bad as none
    assert counted == [0.0, 0.5, 1.0, 1.0, 1.0]  # the other dogs are less certain than 0.9
    assert strict == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_of_many_objects_the_most_certain_count() -> None:
    def detector(image_HWC: NDArray[np.uint8], classes: Sequence[str]) -> Objects:
        return {"dog": [thing(0, 0, color="blue", certain=0.5), *[thing(0, 0, color="red")] * MAX_OBJECTS]}

    clause = {"class": "dog", "count": MAX_OBJECTS, "color": "red"}
    prompt = Prompt(id=0, text="dogs", metadata=json.dumps(include(clause)))

    assert score(GenEvalScorer(detector), GREY[:1], [prompt], attempts=1) == ([1.0], [])


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "{}",
        '{"include": []}',
        '{"include": [{"class": "dog"}]}',
        '{"include": [{"class": "dog", "count": 0}]}',
        '{"include": [{"class": "a", "count": 1, "position": ["above", 0]}]}',
        '{"include": [{"class": "a", "count": 1, "color": 3}]}',
        '{"include": [{"class": "a", "count": 1}, {"class": "a", "count": 1, "position": ["above", 0.0]}]}',
    ],
)
def test_a_prompt_without_usable_metadata_is_refused(metadata: str) -> None:
    with pytest.raises(SpotlightError, match="'a dog' has no GenEval metadata"):
        GenEvalScorer(Painted()).check_prompt(Prompt(id=0, text="a dog", metadata=metadata))


def test_what_a_clause_leaves_out_may_be_null_as_tables_have_it() -> None:
    clause = {"class": "dog", "count": 1, "color": None, "position": None}
    prompt = Prompt(id=0, text="a dog", metadata=json.dumps({"include": [clause], "exclude": None}))
    image = np.ones((1, 1, 1, 3), dtype=np.uint8)

    GenEvalScorer(Painted()).check_prompt(prompt)

    assert score(GenEvalScorer(Painted()), image, [prompt], attempts=1) == ([1.0], [])
    assert score(GenEvalScorer(Painted(), graded=False), image, [prompt], attempts=1) == ([1.0], [])


def test_all_published_geneval_prompts_are_accepted(shared_data: Path) -> None:
    prompts = read_prompts(shared_data / "geneval_evaluation_metadata.jsonl")

    tags = [metadata_of(prompt)["tag"] for prompt in prompts]

    counts = {tag: tags.count(tag) for tag in dict.fromkeys(tags)}
    assert list(counts.values()) == [80, 99, 80, 94, 100, 100]


# CLIP


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


def pictures() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3)).astype(np.uint8)


def test_a_clip_score_is_the_cosine_that_the_model_itself_gives(clip: Path) -> None:
    model = CLIPModel.from_pretrained(clip).eval()
    prompts = ["a dog", "a red cat", "a dog"]
    resized = [Image.fromarray(each).resize((42, 32), Image.Resampling.BICUBIC) for each in pictures()]
    middle = np.stack([np.asarray(each)[:, 5:37] for each in resized])
    x = torch.from_numpy((middle / 255 - 0.5) / 0.25).float().permute(0, 3, 1, 2)
    tokens = clip_tokenizer()(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(pixel_values=x, **tokens).logits_per_image.diagonal()

    cosines = ClipScorer(str(clip))(pictures(), prompts)
    picked = PickScorer(str(clip))(pictures(), prompts)

    assert picked == pytest.approx(logits.tolist(), abs=1e-4)
    assert cosines == pytest.approx((logits / model.logit_scale.exp()).tolist(), abs=1e-6)
    assert len(set(cosines)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_clip_that_is_stored_in_half_precision_computes_in_float32(
    clip: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    half, same = (shutil.copytree(clip, tmp_path / name) for name in ("half", "same"))
    rounded = CLIPModel.from_pretrained(clip).to(dtype)
    rounded.save_pretrained(half)
    rounded.float().save_pretrained(same)
    prompts = ["a dog", "a red cat", "a dog"]

    assert PickScorer(str(half))(pictures(), prompts) == PickScorer(str(same))(pictures(), prompts)


def test_of_a_tall_picture_the_middle_is_seen_as_of_a_wide_one(clip: Path) -> None:
    scorer, picture = ClipScorer(str(clip)), pictures()[0]

    wide, tall = scorer._prepared(picture), scorer._prepared(picture.transpose(1, 0, 2))

    assert np.abs(tall - wide.transpose(0, 2, 1)).mean() < 0.1  # not 0: rounded in another order


def test_a_network_of_a_reward_drops_nothing_out(clip: Path, tmp_path: Path) -> None:
    trained = shutil.copytree(clip, tmp_path / "trained")
    settings = json.loads((trained / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        settings[part]["attention_dropout"] = 0.5
    (trained / "config.json").write_text(json.dumps(settings))

    with_dropout, without = (ClipScorer(str(each))(pictures(), ["a dog"] * 3) for each in (trained, clip))

    assert with_dropout == without


def test_the_aesthetic_score_is_that_of_its_layers(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 8), nn.Dropout(), nn.Linear(8, 1)).eval()
    save_file({f"layers.{name}": value for name, value in layers.state_dict().items()}, tmp_path / "head.safetensors")
    model = CLIPModel.from_pretrained(clip).eval()
    scorer = AestheticScorer(str(clip), head=str(tmp_path / "head.safetensors"))
    x = torch.from_numpy(np.stack([scorer._prepared(each) for each in pictures()]))
    with torch.no_grad():
        features = model.get_image_features(pixel_values=x).pooler_output
        expected = layers(features / features.norm(dim=-1, keepdim=True))[:, 0]

    assert scorer(pictures(), [""] * 3) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_pickled_head_or_checkpoint_is_refused(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "head.pth").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    for head in (str(tmp_path / "head.pth"), ""):
        with pytest.raises(SpotlightError, match=rf"^reward\.options\.head = '{head}': no such \.safetensors file"):
            AestheticScorer(str(clip), head=head)
    with pytest.raises(SpotlightError, match="its weights are pickled"):
        ClipScorer(str(tmp_path))


@pytest.mark.parametrize("kind", [ClipScorer, PickScorer])
def test_a_clip_checkpoint_without_a_vocabulary_is_refused_where_texts_matter(
    clip: Path, tmp_path: Path, kind: type[ClipScorer]
) -> None:
    bare = shutil.copytree(
        clip, tmp_path / "bare", ignore=lambda _, names: {*names} - {"config.json", "model.safetensors"}
    )
    save_file({"layers.0.weight": torch.zeros(1, 16), "layers.0.bias": torch.zeros(1)}, tmp_path / "head.safetensors")

    with pytest.raises(SpotlightError, match=r"bare: has no vocabulary of a tokenizer: one of tokenizer\.json"):
        kind(str(bare))
    assert AestheticScorer(str(bare), head=str(tmp_path / "head.safetensors"))(pictures(), [""] * 3) == [0.0] * 3


def test_what_no_image_could_be_scored_with_is_found_when_a_clip_reward_is_made(clip: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(clip, tmp_path / "damaged")
    (damaged / "preprocessor_config.json").write_text("{")
    save_file({"layers.0.weight": torch.zeros(1, 768), "layers.0.bias": torch.zeros(1)}, tmp_path / "h.safetensors")

    with pytest.raises(SpotlightError, match=r"preprocessor_config\.json: not readable"):
        ClipScorer(str(damaged))
    with pytest.raises(SpotlightError, match="its first layer takes 768 features, and the CLIP checkpoint .* makes 16"):
        AestheticScorer(str(clip), head=str(tmp_path / "h.safetensors"))


@pytest.mark.parametrize("kind", [ClipScorer, PickScorer])
@pytest.mark.parametrize("shape", [None, (8, 16)])
def test_a_network_that_would_be_filled_at_random_is_refused(
    clip: Path, tmp_path: Path, kind: type[ClipScorer], shape: tuple[int, ...] | None
) -> None:
    partial = shutil.copytree(clip, tmp_path / "partial")
    state = load_file(clip / "model.safetensors")
    lost = {"text_projection.weight": torch.zeros(shape)} if shape else {}
    rest = {name: value for name, value in state.items() if name != "text_projection.weight"}
    save_file(rest | lost, partial / "model.safetensors", metadata={"format": "pt"})
    save_file({"layers.0.weight": torch.ones(1, 16), "layers.0.bias": torch.ones(1)}, tmp_path / "head.safetensors")
    heads = [AestheticScorer(str(each), head=str(tmp_path / "head.safetensors")) for each in (clip, partial)]

    with pytest.raises(SpotlightError, match=r"partial: 1 weights that CLIPModel needs .*, such as text_projection"):
        score(kind(str(partial)), pictures(), ["a dog"] * 3, attempts=1)
    assert heads[0](pictures(), [""] * 3) == heads[1](pictures(), [""] * 3)  # it reads no text


# A vision-language model that reads


ASKS = "{% for c in messages[0]['content'] %}{{ c['text'] if c['type'] == 'text' else '<image>' }}{% endfor %}"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA of random weights, in the real layout."""
    path, tokenizer = tmp_path_factory.mktemp("reader"), clip_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    layers: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(**layers, vocab_size=len(tokenizer), bos_token_id=512, eos_token_id=513, pad_token_id=513)
    vision = CLIPVisionConfig(**layers, image_size=32, patch_size=8)
    image_token: Any = tokenizer.convert_tokens_to_ids("<image>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            LlavaConfig(text_config=text, vision_config=vision, image_token_index=image_token)
        )
        for parameter in model.parameters():
            parameter.data.mul_(8.0)  # so that what it says depends on what it sees
    model.save_pretrained(path)
    side = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=ASKS,
    )
    processor.save_pretrained(path)
    return path


def test_what_a_vision_language_model_reads_is_its_most_likely_text_and_is_scored_as_any_other(reader: Path) -> None:
    scorer = build(RewardSection(name="vlm-ocr", path=str(reader), options={"question": "read", "tokens": 6}))
    assert isinstance(scorer, ReaderScorer)
    model = LlavaForConditionalGeneration.from_pretrained(reader).eval()
    processor = LlavaProcessor.from_pretrained(reader)
    expected = []
    for image in pictures():
        given = processor(images=[Image.fromarray(image)], text=["<image>read"], return_tensors="pt")
        said: list[int] = []
        while len(said) < 6 and 513 not in said:
            ids = torch.cat([given["input_ids"], torch.tensor([said], dtype=torch.long)], dim=1)
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=given["pixel_values"]).logits
            said.append(int(logits[0, -1].argmax()))
        expected.append(processor.decode(said, skip_special_tokens=True))

    read = [scorer.read(image) for image in pictures()]

    assert read == expected
    assert len(set(read)) > 1
    prompts = [f'a sign that says "{text.replace(chr(34), "")}"' for text in read]
    scores = scorer(pictures(), prompts)
    assert scores == [ocr_score(text, quoted_target(prompt)) for text, prompt in zip(read, prompts, strict=True)]
    assert scorer(pictures()[2:], prompts[2:]) == scores[2:]
    options = {"question": "read", "tokens": 6, "graded": False}
    strict = build(RewardSection(name="vlm-ocr", path=str(reader), options=options))
    more = [f'{prompts[0][:-1]}q"', prompts[1]]
    assert 0.0 < scorer(pictures()[:1], more[:1])[0] < scores[0] == scores[1] == 1.0
    assert strict(pictures()[:2], more) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"tokens": "64"}, r"tokens = '64': give a whole number, at least 1"),
        ({"tokens": 0}, r"tokens = 0: give a whole number"),
        ({"text": 7}, r"text = 7: give a text"),
    ],
)
def test_what_no_image_could_be_read_with_is_found_when_a_reader_is_made(
    reader: Path, option: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpotlightError, match=rf"^reward\.options\.{says}"):
        build(RewardSection(name="vlm-ocr", path=str(reader), options=option))


def test_a_reader_without_a_chat_template_wants_the_whole_text(reader: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(reader, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()

    with pytest.raises(SpotlightError, match=r"no chat template: set reward\.options\.text"):
        ReaderScorer(str(plain)).read(pictures()[0])
    asked = ReaderScorer(str(plain), text="<image>read", tokens=4).read(pictures()[0])
    assert asked == ReaderScorer(str(reader), question="read", tokens=4).read(pictures()[0])


def test_a_checkpoint_that_reads_nothing_is_refused_with_what_it_should_be(
    clip: Path, reader: Path, tmp_path: Path
) -> None:
    partial = shutil.copytree(reader, tmp_path / "partial")
    state = load_file(reader / "model.safetensors")
    state.pop(next(name for name in state if "linear_1.weight" in name))
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(SpotlightError, match="is no model that reads images and writes text"):
        _ = ReaderScorer(str(clip))._model
    with pytest.raises(SpotlightError, match="partial: 1 weights that LlavaForConditionalGeneration needs are absent"):
        _ = ReaderScorer(str(partial))._model


# Several, and one's own


class Mean(Scorer):
    """How bright an image is, as a share of a limit."""

    range = (0.0, 255.0)

    def __init__(self, *, limit: float = 255.0) -> None:
        self._limit = limit

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        if (images_BHWC == 13).any():
            raise RuntimeError("13")
        return [float(min(image.mean(), self._limit)) for image in images_BHWC]


class Same(Mean):
    """Any two images are as good."""

    range = (0.5, 0.5)


class Endless(Scorer):
    range = (-math.inf, math.inf)

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        return [0.0] * len(prompts)


class Huge(Endless):
    """Squares of its scores are no floats."""

    range = (0.0, 1e155)


class OneEnded(Endless):
    range = (0.0,)  # type: ignore[assignment]


class Downwards(Mean):
    """Would be planned for upside down."""

    usual = (200.0, 100.0)


class OneUsual(Mean):
    usual = 100.0  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("Same", "range"),
        ("Endless", "range"),
        ("Huge", "range"),
        ("OneEnded", "range"),
        ("Downwards", "usual"),
        ("OneUsual", "usual"),
    ],
)
def test_a_scorer_whose_range_is_none_is_refused(name: str, attribute: str) -> None:
    with pytest.raises(
        SpotlightError, match=rf"its {attribute} .* must be the least score and a larger one, none beyond 1e\+100"
    ):
        build(RewardSection(name=f"{__name__}:{name}"))


GREY = np.array([10, 13, 250], dtype=np.uint8).reshape(3, 1, 1, 1)


def test_several_tables_are_a_weighted_sum_in_which_nothing_missing_counts_as_a_number(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[data]\ntrain_prompts = "a"\nvalidation_prompts = "b"\n'
        f'[[reward]]\nname = "{__name__}:Mean"\nweight = 2.0\nattempts = 1\n'
        f'[[reward]]\nname = "{__name__}:Mean"\nweight = -1.0\n[reward.options]\nlimit = 100.0\n'
    )
    settings = config.load(file).reward

    scorer = build(settings)
    values, _, errors = score_each(scorer, GREY, ["x"] * 3, attempts=settings.attempts)

    assert scorer.range == (-255.0, 510.0)
    assert values == [2 * 10 - 10, None, 2 * 250 - 100]
    assert len(errors) == 2  # of each reward


def test_each_of_several_rewards_is_kept_by_itself_and_tried_again_by_itself() -> None:
    tables = RewardSection(name="ocr", weight=2.0, also=(RewardSection(name=f"{__name__}:Mean", weight=-1.0),))
    black = np.zeros((3, 16, 32, 3), dtype=np.uint8)
    black[1] = 13

    totals, (texts, means), errors = score_each(build(tables), black, ['"x"'] * 3, attempts=2)

    assert texts == [0.0, 0.0, 0.0]
    assert means == [0.0, None, 0.0]
    assert totals == [0.0, None, 0.0]
    assert len(errors) == 1
    assert score_each(build(RewardSection()), black, ['"x"'] * 3, attempts=1) == ([0.0] * 3, [], [])


TAGGED = RewardSection(
    name="ocr", tags=("text",), also=(RewardSection(name=f"{__name__}:Mean", weight=2.0, tags=("grey", "blue")),)
)


def tagged(tag: str, text: str = "x") -> Prompt:
    return Prompt(id=0, text=text, metadata=json.dumps({"tag": tag}) if tag else "")


def test_a_table_with_tags_scores_prompts_with_these_alone() -> None:
    scorer = build(TAGGED)

    grey, parts, _ = score_each(scorer, GREY[[0, 2]], [tagged("grey")] * 2, attempts=1)
    text, others, errors = score_each(scorer, np.zeros((1, 16, 32, 3), np.uint8), [tagged("text", 'a "7"')], attempts=1)

    assert grey == [2 * 10, 2 * 250]
    assert parts == [[None, None], [10.0, 250.0]]
    assert (text, others, errors) == ([0.0], [[0.0], [None]], [])
    scorer.check_prompt(tagged("blue", "no text in quotes"))
    with pytest.raises(SpotlightError, match="double quotes"):
        scorer.check_prompt(tagged("text", "no text in quotes"))


def test_the_planner_tells_rewards_of_one_tables_prompts_apart_whatever_is_usual_of_another_table() -> None:
    class Narrow(Scorer):
        range, usual = (-101.0, 101.0), (14.0, 28.0)

    scorer = Weighted([(1.0, Tagged(Narrow(), ["picture"])), (1.0, Tagged(OcrScorer(), ["text"]))])

    unread, read, low, high = normalised(planned_range(scorer), [0.0, 1.0, 18.0, 24.0])

    assert unread < read < low < high


def test_too_many_rewards_of_a_table_with_tags_are_missing_rewards(caplog: pytest.LogCaptureFixture) -> None:
    class TwoEach(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            return [0.5, 0.5] * len(prompts)

    values, errors = score(Tagged(TwoEach(), ["a"]), GREY[:2], [tagged("a")] * 2, attempts=1)

    assert values == [None, None]
    assert "returned 2 rewards for 1 images" in errors[0]
    assert any(message.startswith("the reward TwoEach failed for several images") for message in caplog.messages)


@pytest.mark.parametrize(("tag", "says"), [("other", "it has the tag 'other'"), ("", "it has no tag that is a text")])
def test_a_prompt_that_no_table_is_for_is_refused(tag: str, says: str) -> None:
    with pytest.raises(SpotlightError, match=says):
        build(TAGGED).check_prompt(tagged(tag))
    build(TAGGED.model_copy(update={"tags": ()})).check_prompt(tagged(tag, 'a "7"'))


def test_tags_that_no_prompt_has_are_refused(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": 'a "7"', "tag": tag}) for tag in ("digit", "letter")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    tree = {
        "data": {"train_prompts": "prompts.jsonl", "validation_prompts": "prompts.jsonl"},
        "reward": [{"name": "ocr", "tags": ["digit"]}, {"name": "scene-ocr", "tags": ["letter"]}],
        "rollout": {"prompts": 2},
    }
    check_inputs(config.resolve(tree, tmp_path), with_model=False)
    tree["reward"] = [{"name": "ocr"}, {"name": "scene-ocr", "tags": ["leter"]}]

    with pytest.raises(SpotlightError, match="has the tag 'leter'; there are 'digit', 'letter'"):
        check_inputs(config.resolve(tree, tmp_path), with_model=False)


def test_several_tables_survive_being_written_and_read(tmp_path: Path) -> None:
    tree = {
        "data": {"train_prompts": "a", "validation_prompts": "b"},
        "reward": [{"name": "ocr"}, {"name": "pickscore", "path": "clip"}],
    }
    settings = config.resolve(tree, tmp_path)
    (tmp_path / "again.toml").write_text(config.dump(settings))

    assert config.load(tmp_path / "again.toml") == settings
    assert [(table.name, table.path) for table in settings.reward.also] == [("pickscore", str(tmp_path / "clip"))]


class ImagesAlone(Scorer):
    """Takes no prompts."""

    def __call__(self, images_BHWC: Any) -> list[float]:  # type: ignore[override]
        return [0.0 for _ in images_BHWC]


class OutOfAHundred(Scorer):
    """Has a range of its own."""

    range: ClassVar[tuple[float, float]] = (0.0, 100.0)

    def __call__(self, images_BHWC: Any, prompts: Any) -> list[float]:
        return [50.0 for _ in images_BHWC]


@pytest.mark.parametrize("key", ["attempts", "batch", "limit_s", "patience_s"])
def test_what_counts_of_the_first_table_alone_is_doubted_in_a_further_one(tmp_path: Path, key: str) -> None:
    tables = [{"name": "ocr", key: 7}, {"name": "ocr", key: 8}]
    tree = {"data": {"train_prompts": "a", "validation_prompts": "b"}, "reward": tables}

    (doubt,) = config.resolve(tree, tmp_path).doubts
    tables[1][key] = 7

    assert doubt.startswith(f"reward.{key} = 8 of a further [[reward]] table counts nothing: the first table's does")
    assert config.resolve(tree, tmp_path).doubts == ()


@pytest.mark.parametrize(
    ("weights", "train", "is_doubted"),
    [
        ({"pickscore": 1.0, "clip-score": 1.0}, {}, True),  # as they stand in published recipes
        ({"pickscore": 1 / 26, "clip-score": 100 / 30}, {}, False),
        ({"pickscore": -1.0, "ocr": 1.0}, {}, True),
        ({"pickscore": 1.0, "ocr": 1.0}, {"combine": "advantages"}, False),
        ({"pickscore": 1.0, "ocr": 1.0}, {"combine": "advantages", "advantage_std": "none"}, True),
        ({"clip-score": 1.0, "ocr": 1.0}, {}, False),
        ({"test_reward_kinds:OutOfAHundred": 1.0, "ocr": 1.0}, {}, True),
        ({"test_reward_kinds:OutOfAHundred": 0.01, "ocr": 1.0}, {}, False),
    ],
)
def test_a_sum_of_rewards_in_which_one_has_hardly_any_say_is_doubted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    clip: Path,
    weights: dict[str, float],
    train: dict[str, str],
    is_doubted: bool,
) -> None:
    of_clip = {name: {"path": str(clip)} for name in ("pickscore", "clip-score")}
    tables = [{"name": name, "weight": weight, **of_clip.get(name, {})} for name, weight in weights.items()]
    (tmp_path / "prompts.txt").write_text('A sign that says "47"\n')
    data = {"train_prompts": "prompts.txt", "validation_prompts": "prompts.txt"}
    settings = config.resolve({"data": data, "reward": tables, "train": train, "rollout": {"prompts": 1}}, tmp_path)

    check_inputs(settings, with_model=False)

    assert ["reward.weight:" in record.message for record in caplog.records] == [True] * is_doubted


@pytest.mark.parametrize("key", ["nmae", "nam"])
def test_an_unknown_key_of_a_further_table_is_named(tmp_path: Path, key: str) -> None:
    tree = {"data": {"train_prompts": "a", "validation_prompts": "b"}, "reward": [{"name": "ocr"}, {key: "x"}]}

    with pytest.raises(SpotlightError, match=rf"\[reward\] has no field '{key}' \(did you mean 'name'\?\)"):
        config.resolve(tree, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RewardSection(name="no_such_module:Class"), "cannot be imported"),
        (RewardSection(name="json:JSONDecoder"), r"no subclass .*: write a class that is one, with __call__"),
        (RewardSection(name="json:loads"), r"no subclass .*: write a class that is one, with __call__"),
        (RewardSection(name="test_reward_kinds:ImagesAlone"), r"its __call__ cannot be called with images and prompts"),
        (RewardSection(name=f"{__name__}:Mean", options={"unknown": 1}), "options do not fit"),
        (RewardSection(name="geneval"), "reward.options.detector"),
        (
            RewardSection(name="geneval", options={"detector": f"{__name__}:Unmakable"}),
            r"reward\.options\.detector = '.*:Unmakable' cannot be made: FileNotFoundError",
        ),
        (RewardSection(name="clip-score"), r"no checkpoint is named; reward\.path must name one"),
        (RewardSection(name="vlm-ocr", path="/nowhere"), r"/nowhere: no such directory; reward\.path must name one"),
        (
            RewardSection(name="geneval", path="/", options={"detector": "mask2former"}),
            r"/: has no config\.json",
        ),
        (RewardSection(name="ocr", options={"x": [1]}), "options do not fit: .*'x'"),
        (RewardSection(name="orc"), "'orc' is not known"),
    ],
)
def test_a_reward_that_cannot_be_made_is_named(settings: RewardSection, message: str) -> None:
    with pytest.raises(SpotlightError, match=message):
        build(settings)


class Unmakable:
    def __init__(self) -> None:
        raise FileNotFoundError("weights")


def test_every_prompt_is_checked_by_each_of_several_rewards() -> None:
    scorer = build(RewardSection(name=f"{__name__}:Mean", also=(RewardSection(name="ocr"),)))

    with pytest.raises(SpotlightError, match="double quotes"):
        scorer.check_prompt(Prompt(id=0, text="a dog"))


@pytest.mark.parametrize(
    ("state", "fits"),
    [
        ({"layers.0.weight": (8, 16), "layers.0.bias": (8,), "layers.2.weight": (1, 8), "layers.2.bias": (1,)}, True),
        ({"weight": (1, 16), "bias": (1,)}, False),
        ({"layers.0.weight": (4, 16), "layers.0.bias": (4,)}, False),
        ({"layers.0.weight": (8, 16), "layers.0.bias": (8,), "layers.2.weight": (1, 9), "layers.2.bias": (1,)}, False),
        ({"layers.0.weight": (1, 16)}, False),
    ],
)
def test_a_head_that_gives_no_single_score_is_refused(
    clip: Path, tmp_path: Path, state: dict[str, tuple[int, ...]], fits: bool
) -> None:
    head = tmp_path / "head.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in state.items()}, head)

    if fits:
        AestheticScorer(str(clip), head=str(head))
    else:
        with pytest.raises(SpotlightError, match=r"expected layers\.N\.weight and layers\.N\.bias"):
            AestheticScorer(str(clip), head=str(head))


def test_a_reward_outside_of_the_range_that_the_settings_give_is_missing_and_not_cut_off(clip: Path) -> None:
    scorer = build(RewardSection(name="pickscore", path=str(clip), range=(200.0, 300.0)))

    values, errors = score(scorer, pictures(), ["a dog"] * 3, attempts=1)

    assert values == [None] * 3
    assert len(errors) == 3


def test_the_planner_looks_where_rewards_of_real_images_lie_unless_the_settings_say_where(clip: Path) -> None:
    picked, given = (
        build(RewardSection(name="pickscore", path=str(clip), range=within)) for within in (None, (10.0, 30.0))
    )
    twice = build(RewardSection(name="pickscore", path=str(clip), weight=2.0))

    assert planned_range(picked) == (14.0, 28.0)
    assert planned_range(given) == (10.0, 30.0)
    assert planned_range(twice) == (28.0, 56.0)
    assert planned_range(Weighted([(-2.0, picked)])) == (-56.0, -28.0)
    assert normalised((14.0, 28.0), [7.0, 21.0, 99.0]) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("clause", "said"),
    [
        ({"class": "dog", "count": 1}, "finds no 'dog'"),
        ({"class": "circle", "count": 1, "color": "pink"}, "finds no 'pink'"),
        ({"class": "circle", "count": 1.5}, "GenEval metadata"),
        ({"class": "circle", "count": 1, "position": ["near", 0]}, "GenEval metadata"),
        ({"class": "circle", "count": 1, "position": ["left of", -1]}, "GenEval metadata"),
    ],
)
def test_what_can_never_be_found_is_refused_before_the_run(clause: Mapping[str, Any], said: str) -> None:
    scorer = build(RewardSection(name="geneval", options={"detector": "shapes"}))
    include = [{"class": "square", "count": 1}, clause]

    with pytest.raises(SpotlightError, match=said):
        scorer.check_prompt(Prompt(id=0, text="x", metadata=json.dumps({"include": include})))


@pytest.mark.parametrize("options", [{}, {"detector": "yolo"}])
def test_a_detector_that_is_not_known_is_refused_with_those_that_are(options: dict[str, Any]) -> None:
    with pytest.raises(SpotlightError, match=r"reward\.options\.detector = .*'mask2former', 'shapes'"):
        build(RewardSection(name="geneval", options=options))


@pytest.mark.parametrize("name", ["clip-score", "pickscore", "http"])
def test_options_that_a_scorer_does_not_have_are_refused(clip: Path, name: str) -> None:
    settings = RewardSection(name=name, path=str(clip), url="http://127.0.0.1:9", options={"prompt": "x"})

    with pytest.raises(SpotlightError, match="its options do not fit"):
        build(settings)


class Darkens(Scorer):
    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        images_BHWC[:] = 0
        return [0.0] * len(prompts)


def test_a_scorer_cannot_change_the_images_that_others_see() -> None:
    values, errors = score(Darkens(), GREY, ["x"] * 3, attempts=1)

    assert (values, errors) == ([0.0] * 3, [])
    assert GREY.any()
