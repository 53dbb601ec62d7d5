"""Detectors of objects for GenEval's rewards: simple shapes by their outlines, and Mask2Former with CLIP's colours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures_of_shapes import Shapes, draw_shape
from PIL import Image, ImageDraw
from transformers import (
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)

from pipelines import clip_tokenizer, write_clip
from runs import ROOT
from spotlight import config
from spotlight.config import RewardSection
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.models.tiny_shapes import TinyShapes
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import GenEvalScorer, build
from spotlight.rl.rewards.clip import ClipScorer
from spotlight.rl.rewards.geneval import metadata_of
from spotlight.rl.rewards.mask2former import COLOURS as TOLD_COLOURS
from spotlight.rl.rewards.mask2former import Mask2FormerDetector
from spotlight.rl.rewards.shapes import CLASSES, COLOURS, ShapeDetector, connected
from spotlight.simulation import Simulation

STAGES = ["stage1", "stage2", "stage3", "stage4"]
SIDE_PX = 384
"""Of images that Mask2Former's own post-processing leaves as they are."""

# Shapes


def scene(*shapes: tuple[str, str, tuple[float, float, float, float]], side_px: int = 32) -> NDArray[np.uint8]:
    image = Image.new("RGB", (side_px, side_px), "white")
    for name, colour, box in shapes:
        draw_shape(ImageDraw.Draw(image), name, COLOURS[colour], box)
    return np.asarray(image)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("side_px", [32, 128])
def test_a_shape_is_found_where_it_is_with_its_colour(name: str, colour: str, side_px: int) -> None:
    box = tuple(side_px * edge / 32 for edge in (5, 9, 15, 19))

    found = ShapeDetector()(scene((name, colour, box), side_px=side_px), CLASSES)  # type: ignore[arg-type]

    assert {other: len(things) for other, things in found.items() if things} == {name: 1}
    (thing,) = found[name]
    assert thing["color"] == colour
    assert thing["score"] > 0.9
    assert thing["box"] == pytest.approx(box, abs=1.5)


def test_shapes_that_were_not_asked_for_are_not_named() -> None:
    image = scene(("circle", "red", (4, 4, 14, 14)), ("square", "blue", (18, 18, 28, 28)))

    assert list(ShapeDetector()(image, ["square", "bench"])) == ["square", "bench"]
    assert ShapeDetector()(image, ["bench"]) == {"bench": []}


def test_noise_specks_and_an_empty_picture_have_no_sure_shapes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    specks = scene(("square", "red", (3, 3, 5, 5)), ("square", "red", (20, 20, 22, 22)))

    for image in (noise, specks, np.full((32, 32, 3), 255, dtype=np.uint8), np.zeros((32, 32, 3), dtype=np.uint8)):
        found = ShapeDetector()(image, CLASSES)
        assert sum(thing["score"] > 0.9 for name in CLASSES if name != "square" for thing in found[name]) == 0


def test_a_region_of_less_than_a_hundredth_of_the_picture_or_of_half_a_shape_is_none() -> None:
    speck, small, half = (
        ShapeDetector()(scene(("square", "red", box)), ["square"])["square"]
        for box in ((3, 3, 5, 5), (3, 3, 6, 6), (3, 3, 22, 12))
    )

    assert speck == []  # 3 x 3 of 32 x 32 pixels
    assert [thing["score"] for thing in small] == [1.0]
    assert [thing["score"] for thing in half] == [0.0]  # as wide as two


def test_pixels_that_a_shape_covers_in_part_belong_to_its_box() -> None:
    image = np.full((32, 32, 3), 255, np.uint8)
    image[7:19, 7:19] = 255 - 0.4 * (255 - np.array(COLOURS["red"]))
    image[8:18, 8:18] = COLOURS["red"]

    (thing,) = ShapeDetector()(image, ["square"])["square"]

    assert thing["box"] == pytest.approx((7.6, 7.6, 18.4, 18.4), abs=0.2)


def test_regions_that_touch_at_corners_only_are_two() -> None:
    labels = connected(np.array([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 1]], dtype=bool))

    assert len(np.unique(labels[labels > 0])) == 3
    assert labels[0, 0] == labels[1, 1] != labels[2, 0]


def test_a_faint_line_is_no_shape() -> None:
    image = np.full((24, 24, 3), 255, np.uint8)
    image[10, 5:13] = 255 - 140

    assert ShapeDetector()(image, CLASSES) == {name: [] for name in CLASSES}


def test_what_prompts_ask_for_is_rewarded_and_what_others_ask_for_is_not() -> None:
    rng, pictures = np.random.default_rng(1), Shapes()
    strict = GenEvalScorer(ShapeDetector(), graded=False)
    for kind, prompts in pictures.kinds(rng, 24).items():
        images = np.stack([pictures.render(prompt, rng) for prompt in prompts])
        other = [next(p for p in prompts if _asks(p) != _asks(prompt)) for prompt in prompts]
        rewards, wrong = strict.of(images, prompts), strict.of(images, other)
        assert np.mean(rewards) >= 0.9, kind
        assert np.mean(wrong) <= (0.35 if kind == "position" else 0.1), kind  # "above" may be "left of", too


def _asks(prompt: Prompt) -> Any:
    return metadata_of(prompt)["include"]


def test_the_job_of_shapes_draws_what_is_rewarded_and_trains_on_it(tmp_path: Path) -> None:
    small = ["run.iterations=1", "run.validate_every=1", "run.validation_seeds=2", "rollout.prompts=2", "train.parts=1"]
    settings = config.load(ROOT / "examples" / "shapes-tiny.toml", [f"run.dir={tmp_path}", *small])

    run = Simulation("shapes", settings, "real")
    run.go(report=False)

    before, after = run.directory.validation()
    tags = {metadata_of(prompt)["tag"] for prompt in read_prompts(settings.data.validation_prompts)}
    assert before.metrics.keys() == {f"tag_{tag}" for tag in tags}
    assert len(tags) > 3
    assert 0.15 < before.score < 0.6  # pre-training stopped early, on purpose
    assert {0.5, 1.0} < set(before.rewards)
    assert after.rewards != before.rewards


def test_a_scene_in_words_that_the_model_never_saw_is_refused() -> None:
    read = TinyShapes().read

    assert len(read("a photo of a red circle and a blue square")) == 5
    assert read("") == []
    with pytest.raises(SpotlightError, match=r"'a photo of a red bench' has the word 'bench'"):
        read("a photo of a red bench")


# Mask2Former


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Mask2Former, sure of what it sees, and a tiny CLIP: random weights in the real layout."""
    path = tmp_path_factory.mktemp("mask2former")
    backbone: dict[str, Any] = {
        **{"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4, "image_size": 64},
        **{"out_features": STAGES},
    }
    small: dict[str, Any] = {
        **{"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16},
        **{"dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2},
        **{"num_queries": 8, "id2label": {0: "bench", 1: "pottedplant", 2: "dog"}},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=SwinConfig(**backbone), **small))
        with torch.no_grad():
            model.class_predictor.weight.mul_(20)
    model.save_pretrained(path)
    size = {"height": SIDE_PX, "width": SIDE_PX}
    (path / "preprocessor_config.json").write_text(json.dumps({"size": size, "size_divisor": 32}))
    return path, write_clip(tmp_path_factory.mktemp("clip"))


def picture(height_px: int = SIDE_PX, width_px: int = SIDE_PX) -> NDArray[np.uint8]:
    small = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(small).resize((width_px, height_px), Image.Resampling.NEAREST))


def test_instances_are_those_of_the_models_own_processing(checkpoints: tuple[Path, Path]) -> None:
    path, clip = checkpoints
    model = Mask2FormerForUniversalSegmentation.from_pretrained(path).eval()
    processor = Mask2FormerImageProcessorPil(size={"height": SIDE_PX, "width": SIDE_PX})
    with torch.no_grad():
        output = model(pixel_values=processor(Image.fromarray(picture()), return_tensors="pt")["pixel_values"])
    (expected,) = processor.post_process_instance_segmentation(
        output, threshold=0.0, target_sizes=[(SIDE_PX, SIDE_PX)], return_binary_maps=True
    )
    masks = {
        (segment["label_id"], round(segment["score"], 4)): mask.bool().numpy()
        for segment, mask in zip(expected["segments_info"], expected["segmentation"], strict=True)
    }

    found = Mask2FormerDetector(path=str(path), clip=str(clip))._instances(picture())

    assert len(found) == len(masks) > 4
    assert [score for _, score, _ in found] == sorted((score for _, score, _ in found), reverse=True)
    for number, score, mask in found:
        known = next(mask for (label, s), mask in masks.items() if label == number and abs(s - score) < 1e-3)
        assert (mask == known).mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_finds_objects(
    checkpoints: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    path, clip = checkpoints
    half = shutil.copytree(path, tmp_path / "half")
    Mask2FormerForUniversalSegmentation.from_pretrained(path).to(dtype).save_pretrained(half)

    found, expected = (
        Mask2FormerDetector(path=str(each), clip=str(clip))._instances(picture())[0] for each in (half, path)
    )

    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=0.02)
    assert (found[2] == expected[2]).mean() > 0.95


def test_objects_have_the_boxes_of_their_masks_and_the_colour_that_clip_tells(checkpoints: tuple[Path, Path]) -> None:
    path, clip = checkpoints
    detector = Mask2FormerDetector(path=str(path), clip=str(clip))
    names = ["bench", "potted plant", "dog"]

    found = detector(picture(), names)

    sure = [(number, score, mask) for number, score, mask in detector._instances(picture()) if score > 0.3]
    assert sum(map(len, found.values())) == len(sure) > 0
    model = CLIPModel.from_pretrained(clip).eval()
    for at, name in enumerate(names):
        mine = [(score, mask) for number, score, mask in sure if number == at]
        for thing, (score, mask) in zip(found[name], mine, strict=True):
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert thing["box"] == box
            assert thing["score"] == score
            assert thing["color"] == _told(model, clip, mask, box, name)
    assert {name: len(things) for name, things in detector(picture(), ["dog"]).items()} == {"dog": len(found["dog"])}


def _told(model: CLIPModel, clip: Path, mask: NDArray[np.bool_], box: list[int], name: str) -> str:
    """As GenEval's own script tells colours: crops of the object on grey, and the mean of three texts a colour."""
    grey = Image.new("RGB", (SIDE_PX, SIDE_PX), "#999999")
    alone = Image.composite(Image.fromarray(picture()), grey, Image.fromarray(mask)).crop(tuple(box))  # type: ignore[arg-type]
    x = torch.from_numpy(ClipScorer(str(clip))._prepared(np.asarray(alone)))[None]
    means = []
    with torch.no_grad():
        image = model.get_image_features(pixel_values=x).pooler_output
        for colour in TOLD_COLOURS:
            texts = [
                f"a photo of a {colour} {name}",
                f"a photo of a {colour}-colored {name}",
                f"a photo of a {colour} object",
            ]
            features = model.get_text_features(
                **clip_tokenizer()(texts, padding=True, return_tensors="pt")
            ).pooler_output
            mean = (features / features.norm(dim=-1, keepdim=True)).mean(dim=0)
            means.append(mean / mean.norm())
        return TOLD_COLOURS[int((image @ torch.stack(means).T).argmax())]


@pytest.mark.parametrize(
    "size",
    [
        {"shortest_edge": 96, "longest_edge": 160},
        {"shortest_edge": 70, "longest_edge": 999},
        {"height": 96, "width": 64},
    ],
)
def test_pictures_of_any_size_have_masks_of_their_size(
    checkpoints: tuple[Path, Path], tmp_path: Path, size: dict[str, int]
) -> None:
    path, clip = checkpoints
    shutil.copytree(path, tmp_path / "copy")
    (tmp_path / "copy" / "preprocessor_config.json").write_text(json.dumps({"size": size, "size_divisor": 32}))
    detector = Mask2FormerDetector(path=str(tmp_path / "copy"), clip=str(clip))
    image = picture(90, 200)

    prepared = detector._prepared(image)

    expected = Mask2FormerImageProcessorPil(size=size, size_divisor=32)(Image.fromarray(image), return_tensors="np")
    np.testing.assert_allclose(prepared, expected["pixel_values"][0], atol=1e-5)
    assert {mask.shape for _, _, mask in detector._instances(image)} == {(90, 200)}


def test_a_class_that_the_checkpoint_does_not_know_is_named(checkpoints: tuple[Path, Path]) -> None:
    path, clip = checkpoints

    with pytest.raises(SpotlightError, match="does not know the class 'zebra'; it knows bench, pottedplant, dog"):
        Mask2FormerDetector(path=str(path), clip=str(clip))(picture(), ["zebra"])


def test_a_reward_with_a_detector_is_made_from_settings(checkpoints: tuple[Path, Path]) -> None:
    path, clip = map(str, checkpoints)
    prompt = Prompt(id=0, text="a photo of a dog", metadata='{"include": [{"class": "dog", "count": 1}]}')

    scorer = build(
        RewardSection(name="geneval", path=path, options={"detector": "mask2former", "clip": clip, "graded": False})
    )

    assert scorer.of(picture()[None], [prompt]) in ([0.0], [1.0])
    assert isinstance(build(RewardSection(name="geneval", options={"detector": "shapes"})), GenEvalScorer)
    with pytest.raises(SpotlightError, match="no checkpoint is named; reward.path must name one"):
        build(RewardSection(name="geneval", options={"detector": "mask2former"}))
