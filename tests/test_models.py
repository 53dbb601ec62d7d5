"""Real checkpoints, on a tiny one in the real layout: loading, texts, schedule, guidance, pixels and training."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from diffusers.models import modeling_utils
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module
from transformers import Qwen2_5_VLForConditionalGeneration

from pipelines import PX_PER_TOKEN, TEXT_DIM, checkpoint_scheduler, tiny_qwen_image
from spotlight.config import ModelSection
from spotlight.records import WITHOUT_GPU, SpotlightError
from spotlight.rl import models
from spotlight.rl.checkpoints import survey
from spotlight.rl.models import device_of, fix_order_of_sums, load
from spotlight.rl.models import pipeline as pipeline_module
from spotlight.rl.models.base import Conditioning
from spotlight.rl.models.pipeline import TEXT_MULTIPLE, Encoded, Loading
from spotlight.rl.models.qwen_image import QwenImage
from spotlight.rl.models.tiny import Tiny, Variant, patches
from spotlight.rl.models.tiny_shapes import SCENES, TinyShapes
from spotlight.rl.models.tiny_text import MIXED, TWO_DIGITS, TinyText
from spotlight.store.node import Node
from spotlight.store.room import SHARED_MEMORY

EmbeddedName = Literal["tiny-text", "tiny-mixed", "tiny-shapes"]

HEIGHT_PX, WIDTH_PX = 16, 32
SHORT, LONG = 'a "4"', 'a shop sign that reads "47 é"'
TEXTS = (SHORT, LONG)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def cache(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoded texts, written by one model for all the others."""
    file = tmp_path_factory.mktemp("cache") / "prompts.safetensors"
    QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32)).preload(TEXTS, file)
    return file


@pytest.fixture
def model(directory: Path, cache: Path) -> QwenImage:
    return loaded(directory, cache)


def loaded(directory: Path, cache: Path, dtype: torch.dtype = torch.float32) -> QwenImage:
    model = QwenImage.load(str(directory), Loading(device=CPU, dtype=dtype))
    model.preload(TEXTS, cache)
    return model


def predicted(model: QwenImage, guidance: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x_BNC = torch.randn(2, *model.latent_shape(HEIGHT_PX, WIDTH_PX), generator=generator)
    sigma_B = torch.tensor([0.9, 0.3])
    return model.velocity(
        x_BNC, sigma_B, model.encode(TEXTS), height_px=HEIGHT_PX, width_px=WIDTH_PX, guidance=guidance
    )


def perturb(model: QwenImage) -> None:
    """Stands for an update: every trained parameter moves."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


# The node's memory


def mapped_from(folder: Path) -> list[range]:
    """The addresses at which this process has mapped files that lie under a folder."""
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line
    )
    return [range(int(first, 16), int(end, 16)) for first, end in spans]


def copied(parameters: Iterable[Tensor], folder: Path) -> int:
    spans = mapped_from(folder)
    return sum(not any(value.data_ptr() in span for span in spans) for value in parameters)


def blank(file: Path) -> None:
    """Overwrite the tensors, and let nobody notice who does not read them."""
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_networks_on_a_node_are_views_of_its_memory_and_the_checkpoint_is_read_once(
    directory: Path, cache: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoint = shutil.copytree(directory, tmp_path / "checkpoint")
    alone = loaded(directory, cache, dtype)
    node = Node(tmp_path / "node")

    QwenImage.load(str(checkpoint), Loading(device=CPU, dtype=dtype), node)
    for part in ("transformer", "vae"):
        blank(checkpoint / part / "diffusion_pytorch_model.safetensors")
    joiner = QwenImage.load(str(checkpoint), Loading(device=CPU, dtype=dtype), node)
    joiner.preload(TEXTS, cache)

    for networks in zip(networks_of(joiner), networks_of(alone), strict=True):
        ours, expected = (network.state_dict() for network in networks)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        assert copied(ours.values(), node.root) == 0
    assert torch.equal(predicted(joiner), predicted(alone))


@pytest.mark.parametrize("rank", [0, 2])
def test_training_on_a_node_leaves_its_memory_as_it_was(
    directory: Path, cache: Path, tmp_path: Path, rank: int
) -> None:
    node = Node(tmp_path / "node")
    trained, other = (QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32), node) for _ in range(2))
    for model in (trained, other):
        model.preload(TEXTS, cache)
        model.make_trainable(rank=rank, alpha=0, seed=0)
    before = predicted(other)

    perturb(trained)

    assert not torch.equal(predicted(trained), before)
    assert torch.equal(predicted(other), before)
    assert (
        copied((weight for name, weight in trained.transformer.named_parameters() if "lora" not in name), node.root)
        == 0
    )


def test_a_changed_checkpoint_is_read_anew(directory: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(directory, tmp_path / "checkpoint")
    node = Node(tmp_path / "node")
    QwenImage.load(str(checkpoint), Loading(device=CPU, dtype=torch.float32), node)
    file = checkpoint / "transformer" / "diffusion_pytorch_model.safetensors"
    changed = {name: value + 1 for name, value in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})

    model = QwenImage.load(str(checkpoint), Loading(device=CPU, dtype=torch.float32), node)

    torch.testing.assert_close(model.transformer.state_dict(), changed, rtol=0, atol=0)


def test_a_damaged_checkpoint_is_named_and_leaves_nothing_on_the_node(directory: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(directory, tmp_path / "damaged")
    file = damaged / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    node = Node(tmp_path / "node")

    with pytest.raises(SpotlightError, match="damaged or cut short"):
        QwenImage.load(str(damaged), Loading(device=CPU, dtype=torch.float32), node)

    assert not list(node.root.glob("*made-*"))


def drop_a_weight(part: Path) -> None:
    file = part / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.popitem()
    save_file(weights, file, metadata={"format": "pt"})


def name_another_class(part: Path) -> None:
    file = part / "config.json"
    file.write_text(file.read_text().replace("AutoencoderKLQwenImage", "AutoencoderKL"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [(drop_a_weight, "1 weights that .* needs are absent"), (name_another_class, "the network is of class")],
)
def test_what_does_not_fit_is_named_where_the_user_has_it_and_not_in_the_nodes_copy(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    damaged = shutil.copytree(directory, tmp_path / "damaged")
    damage(damaged / "vae")
    node = Node(tmp_path / "node")

    with pytest.raises(SpotlightError, match=rf"^{damaged / 'vae'}.*: {said}"):
        QwenImage.load(str(damaged), Loading(device=CPU, dtype=torch.float32), node)


def test_a_node_without_room_leaves_reading_to_the_checkpoint_and_says_so(
    directory: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = loaded(directory, cache)
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=0))

    model = QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32), Node(tmp_path / "node"))
    model.preload(TEXTS, cache)

    assert torch.equal(predicted(model), predicted(alone))
    assert copied(model.transformer.parameters(), tmp_path / "node") == len(list(model.transformer.parameters()))
    assert f"{directory / 'transformer'} is read by each worker" in caplog.text


def test_a_node_with_room_for_half_precision_alone_takes_no_copy_in_single(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Filling a file system in memory gets a process killed."""
    half, sizes = shutil.copytree(directory, tmp_path / "half"), []
    for part in ("transformer", "vae"):
        file = half / part / "diffusion_pytorch_model.safetensors"
        weights = {name: value.bfloat16() for name, value in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        sizes.append(file.stat().st_size)
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=int(1.5 * max(sizes))))
    node = Node(tmp_path / "node")

    model = QwenImage.load(str(half), Loading(device=CPU, dtype=torch.float32), node)

    assert model.transformer.dtype == torch.float32
    assert "is read by each worker: no room for" in caplog.text
    assert all(file.stat().st_size < 1.5 * max(sizes) for file in node.root.rglob("*.safetensors"))


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this machine has no /dev/shm")
@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, []), (torch.bfloat16, ["transformer", "vae"])])
def test_a_checkpoint_that_is_in_memory_is_copied_only_for_another_dtype(
    directory: Path, tmp_path: Path, dtype: torch.dtype, copies: list[str]
) -> None:
    node = Node(tmp_path / "node")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as staged:
        checkpoint = shutil.copytree(directory, Path(staged) / "checkpoint")
        model = QwenImage.load(str(checkpoint), Loading(device=CPU, dtype=dtype), node)

        assert sorted(path.name for path in node.root.glob("made-*/*")) == copies
        assert copied(model.transformer.parameters(), node.root if copies else checkpoint) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedded_model_is_a_view_of_the_nodes_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    node = Node(tmp_path / "node")
    alone = TinyText.load("", CPU, dtype)

    shared = [TinyText.load("", CPU, dtype, node) for _ in range(2)]

    for model in shared:
        torch.testing.assert_close(model.state(), alone.state(), rtol=0, atol=0)
        assert copied(model.state().values(), node.root) == 0
        assert model.transformer.dtype == dtype
        assert not model.parameters()


def test_the_embedded_model_in_half_precision_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning", said.append)

    assert TinyText.load("", CPU, torch.bfloat16).transformer.dtype == torch.bfloat16

    assert said == []


def test_weights_of_another_embedded_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"tiny_mixed\.safetensors: these are another model's weights"):
        TinyText.load(str(MIXED.weights), CPU, torch.float32)


EMBEDDED: dict[EmbeddedName, tuple[type[Tiny], Variant]] = {
    "tiny-text": (TinyText, TWO_DIGITS),
    "tiny-mixed": (TinyText, MIXED),
    "tiny-shapes": (TinyShapes, SCENES),
}


@pytest.mark.parametrize(("kind", "variant"), EMBEDDED.values())
def test_an_embedded_model_is_small_and_its_latents_are_pixels(kind: type[Tiny], variant: Variant) -> None:
    model, size = kind(variant), (variant.height_px, variant.width_px)
    images = np.random.default_rng(0).integers(0, 256, (3, *size, variant.colours), dtype=np.uint8)

    latents_BNC = patches(images)

    assert latents_BNC.shape == (3, *model.latent_shape(*size))
    assert np.array_equal(model.decode(latents_BNC, *size), np.repeat(images, 3 // variant.colours, axis=-1))
    assert sum(value.numel() for value in model.state().values()) < 2e6
    with pytest.raises(SpotlightError, match=f"draws {size[0]} x {size[1]} px only"):
        model.grid(64, 64)


def networks_of(model: QwenImage) -> tuple[torch.nn.Module, torch.nn.Module]:
    return model.transformer, model._pipeline.vae


# Texts


def test_an_embedded_model_reads_a_runs_texts_and_encodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded, a hundred thousand would take 400 MB of each engine."""
    model = TinyText()
    monkeypatch.setattr(model, "encode", lambda texts: pytest.fail(f"encodes {len(texts)} texts"))

    model.preload([SHORT, "no text in quotes"])

    with pytest.raises(SpotlightError, match="draws up to 8 ASCII characters"):
        model.preload([SHORT, LONG])


def test_texts_are_encoded_as_the_pipeline_encodes_each_of_them_alone(directory: Path, model: QwenImage) -> None:
    pipeline = QwenImagePipeline.from_pretrained(directory)

    ours = model.encode([LONG, SHORT, QwenImage.negative_text])

    for row, text in enumerate([LONG, SHORT, QwenImage.negative_text]):
        with torch.no_grad():
            expected, _ = pipeline.encode_prompt(text)
        torch.testing.assert_close(ours.embeds_BTD[row][ours.mask_BT[row]], expected[0], rtol=0, atol=0)
        assert ours.mask_BT[row].sum() == expected.shape[1]


def test_every_text_has_the_runs_width_and_the_padding_is_masked(model: QwenImage) -> None:
    alone, together = model.encode([SHORT]), model.encode([LONG, SHORT])

    longest = int(together.mask_BT[0].sum())
    width = together.mask_BT.shape[1]

    assert width % TEXT_MULTIPLE == 0
    assert longest <= width < longest + TEXT_MULTIPLE
    assert model.negative.mask_BT.shape[1] == width
    assert torch.equal(alone.embeds_BTD[0], together.embeds_BTD[1])
    assert not together.embeds_BTD[~together.mask_BT].any()


def test_the_negative_prompt_follows_the_width_of_the_texts_preloaded_last(directory: Path, cache: Path) -> None:
    model = loaded(directory, cache)
    before = model.negative.mask_BT.shape[1]

    model.preload([LONG * 3])

    assert model.negative.mask_BT.shape[1] == model.encode([LONG * 3]).mask_BT.shape[1] > before


def test_masked_padding_does_not_change_a_prediction(model: QwenImage) -> None:
    text = model.encode([SHORT])
    bare = Conditioning(embeds_BTD=text.embeds_BTD[text.mask_BT][None], mask_BT=text.mask_BT[text.mask_BT][None])
    x_BNC = torch.randn(1, *model.latent_shape(HEIGHT_PX, WIDTH_PX), generator=torch.Generator().manual_seed(0))

    padded_v, bare_v = (
        model.velocity(x_BNC, torch.tensor([0.5]), each, height_px=HEIGHT_PX, width_px=WIDTH_PX, guidance=1.0)
        for each in (text, bare)
    )

    assert text.mask_BT.shape[1] > bare.mask_BT.shape[1]
    torch.testing.assert_close(padded_v, bare_v)


def test_rows_take_conditioning_in_the_order_asked_for(model: QwenImage) -> None:
    text = model.encode(TEXTS)

    rows = text.rows([1, 0, 1])

    assert torch.equal(rows.embeds_BTD, model.encode([LONG, SHORT, LONG]).embeds_BTD)
    assert torch.equal(rows.mask_BT, model.encode([LONG, SHORT, LONG]).mask_BT)


def test_the_text_encoder_is_gone_after_preload(directory: Path) -> None:
    model = QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32))

    model.preload(TEXTS)

    assert model.encode([SHORT]).embeds_BTD.shape[2] == TEXT_DIM
    assert not [each for each in gc.get_objects() if type(each) is Qwen2_5_VLForConditionalGeneration]


def test_a_second_process_needs_no_text_encoder(directory: Path, cache: Path, tmp_path: Path) -> None:
    first = loaded(directory, cache)
    bare = tmp_path / "pipeline"
    shutil.copytree(directory, bare, ignore=shutil.ignore_patterns("text_encoder", "tokenizer"))

    second = loaded(bare, cache)

    assert torch.equal(first.encode(TEXTS).embeds_BTD, second.encode(TEXTS).embeds_BTD)
    assert torch.equal(first.negative.embeds_BTD, second.negative.embeds_BTD)
    with pytest.raises(SpotlightError, match="text_encoder"):
        second.preload(["another"], cache)


def test_what_an_editor_leaves_beside_an_encoder_is_no_part_of_it(directory: Path, tmp_path: Path) -> None:
    left = tmp_path / "pipeline"
    shutil.copytree(directory, left)
    (left / "tokenizer" / ".ipynb_checkpoints").mkdir()
    (left / "text_encoder" / "backup").mkdir()

    first, second = (loaded(path, tmp_path / "prompts.safetensors") for path in (directory, left))

    assert torch.equal(first.encode(TEXTS).embeds_BTD, second.encode(TEXTS).embeds_BTD)


def test_a_text_missing_from_the_cache_is_added_to_it(directory: Path, cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "prompts.safetensors"
    shutil.copy(cache, own)
    model = QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32))

    model.preload(["another"], own)

    assert own.stat().st_size > cache.stat().st_size
    assert loaded(directory, own).encode(TEXTS).mask_BT.any()


def test_texts_that_were_encoded_before_a_process_was_lost_are_not_encoded_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, encoded = tmp_path / "prompts.safetensors", []
    encode_alone = QwenImage._encode_alone

    def lost_at_the_third(self: QwenImage, pipeline: object, text: str) -> Encoded:
        encoded.append(text)
        if len(encoded) == 3:
            raise KeyboardInterrupt
        return encode_alone(self, pipeline, text)

    monkeypatch.setattr(QwenImage, "_encode_alone", lost_at_the_third)
    monkeypatch.setattr(pipeline_module, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(pipeline_module, "SAVE_SHARE", inf)
    with pytest.raises(KeyboardInterrupt):
        QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32)).preload(TEXTS, file)
    model = QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32))
    model.preload(TEXTS, file)

    assert sorted(encoded) == sorted([*TEXTS, " ", encoded[2]])
    assert torch.equal(predicted(model), predicted(loaded(directory, tmp_path / "other")))


def test_a_text_that_was_not_preloaded_is_named(model: QwenImage) -> None:
    with pytest.raises(SpotlightError, match="'a surprise'"):
        model.encode([SHORT, "a surprise"])


def test_a_damaged_cache_is_named(directory: Path, cache: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "prompts.safetensors"
    damaged.write_bytes(cache.read_bytes()[:-1])

    with pytest.raises(SpotlightError, match=str(damaged)):
        loaded(directory, damaged)


# Sizes and schedule


@pytest.mark.parametrize(
    ("size_px", "expected"),
    [
        (512, (1, 0.9290, 0.8515, 0.7666, 0.6733, 0.5701, 0.4555, 0.3274, 0.1833, 0.02, 0)),
        (1280, (1, 0.9423, 0.8774, 0.8038, 0.7198, 0.6228, 0.5098, 0.3761, 0.2158, 0.02, 0)),
    ],
)
def test_the_schedule_is_that_of_the_published_checkpoint(
    model: QwenImage, size_px: int, expected: tuple[float, ...]
) -> None:
    # The published VAE scales by 8, so that its token spans 16 px; this one's spans 8.
    same_tokens_px = size_px * PX_PER_TOKEN // 16

    sigmas = model.sigmas(10, same_tokens_px, same_tokens_px)

    assert sigmas == pytest.approx(expected, abs=5e-5)  # the fixture has four decimals
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0


def test_the_schedule_is_the_schedulers_own_without_a_stretch(directory: Path, model: QwenImage) -> None:
    model._pipeline.scheduler = checkpoint_scheduler(shift_terminal=None)
    steps, tokens = 4, (HEIGHT_PX // PX_PER_TOKEN) * (WIDTH_PX // PX_PER_TOKEN)
    mu = 0.5 + (0.9 - 0.5) * (tokens - 256) / (8192 - 256)
    flat = np.linspace(1, 1 / steps, steps)

    sigmas = model.sigmas(steps, HEIGHT_PX, WIDTH_PX)

    assert sigmas == pytest.approx([*(np.exp(mu) / (np.exp(mu) + 1 / flat - 1)), 0])


def test_a_schedule_that_does_not_descend_is_refused(model: QwenImage) -> None:
    with pytest.raises(SpotlightError, match="at least 2 steps"):
        model.sigmas(1, HEIGHT_PX, WIDTH_PX)


def test_a_size_has_a_token_for_each_two_by_two_latent_pixels(model: QwenImage) -> None:
    assert model.grid(HEIGHT_PX, WIDTH_PX) == (HEIGHT_PX // PX_PER_TOKEN, WIDTH_PX // PX_PER_TOKEN)


@pytest.mark.parametrize(
    ("height_px", "width_px", "nearest"),
    [
        (12, 32, "8 x 32 or 16 x 32"),
        (16, 33, "16 x 32 or 16 x 40"),
        (9, 15, "8 x 8 or 8 x 16 or 16 x 8 or 16 x 16"),
        (7, 32, "8 x 32"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_do(
    model: QwenImage, height_px: int, width_px: int, nearest: str
) -> None:
    with pytest.raises(SpotlightError, match=f"multiples of {PX_PER_TOKEN} px.*the nearest sizes are {nearest}$"):
        model.grid(height_px, width_px)


# Predictions and pixels


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_images_are_those_of_the_diffusers_pipeline(directory: Path, model: QwenImage, guidance: float) -> None:
    steps = 4
    pipeline = QwenImagePipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    start_BNC = torch.randn(1, *model.latent_shape(HEIGHT_PX, WIDTH_PX), generator=torch.Generator().manual_seed(1))

    options = {"height": HEIGHT_PX, "width": WIDTH_PX, "num_inference_steps": steps, "latents": start_BNC}
    negative = {"negative_prompt": QwenImage.negative_text} if guidance > 1 else {}
    theirs_BNC = pipeline(LONG, true_cfg_scale=guidance, output_type="latent", **negative, **options).images
    their_image = pipeline(LONG, true_cfg_scale=guidance, output_type="np", **negative, **options).images
    x_BNC, sigmas = start_BNC, model.sigmas(steps, HEIGHT_PX, WIDTH_PX)
    with torch.no_grad():
        for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
            v_BNC = model.velocity(
                x_BNC,
                torch.tensor([sigma]),
                model.encode([LONG]),
                height_px=HEIGHT_PX,
                width_px=WIDTH_PX,
                guidance=guidance,
            )
            x_BNC = x_BNC + v_BNC * (sigma_next - sigma)
    image = model.decode(x_BNC, HEIGHT_PX, WIDTH_PX)

    torch.testing.assert_close(x_BNC, theirs_BNC, rtol=0, atol=1e-4)
    # Half a grey level is the rounding to bytes; the rest is the difference of the latents.
    np.testing.assert_allclose(image / 255, their_image, rtol=0, atol=0.5 / 255 + 1e-4)
    assert image.dtype == np.uint8
    assert image.std() > 1


def test_guidance_changes_the_prediction_but_no_tokens_norm(model: QwenImage) -> None:
    with torch.no_grad():
        plain, guided = predicted(model), predicted(model, guidance=4.0)

    assert (plain - guided).abs().max() > 1e-3 * plain.abs().max()
    torch.testing.assert_close(plain.norm(dim=-1), guided.norm(dim=-1))


def test_an_image_does_not_depend_on_its_batch(model: QwenImage) -> None:
    x_BNC = torch.randn(3, *model.latent_shape(HEIGHT_PX, WIDTH_PX), generator=torch.Generator().manual_seed(2))

    together = model.decode(x_BNC, HEIGHT_PX, WIDTH_PX)
    alone = model.decode(x_BNC[1:2], HEIGHT_PX, WIDTH_PX)

    assert together.shape == (3, HEIGHT_PX, WIDTH_PX, 3)
    assert np.array_equal(together[1:2], alone)


def test_bfloat16_predicts_nearly_the_same(directory: Path, tmp_path: Path, model: QwenImage) -> None:
    half = loaded(directory, tmp_path / "prompts.safetensors", torch.bfloat16)
    half.make_trainable(rank=2, alpha=4, seed=0)

    with torch.no_grad():
        exact, rounded = predicted(model), predicted(half)
    image = half.decode(exact, HEIGHT_PX, WIDTH_PX)

    assert half.encode([SHORT]).embeds_BTD.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    assert rounded.dtype == torch.float32
    assert (exact - rounded).norm() < 0.1 * exact.norm()  # about 2 ** -8 for each of some tens of layers
    assert image.shape == (2, HEIGHT_PX, WIDTH_PX, 3)


def test_bfloat16_rounds_noise_levels_as_the_diffusers_pipeline_does(directory: Path, cache: Path) -> None:
    steps, model = 16, loaded(directory, cache, torch.bfloat16)
    pipeline = QwenImagePipeline.from_pretrained(directory).to(torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    start_BNC = torch.zeros(1, *model.latent_shape(HEIGHT_PX, WIDTH_PX), dtype=torch.bfloat16)
    text = model.encode([LONG])

    def passed(transformer: Module, call: Callable[[], object]) -> list[float]:
        given: list[float] = []
        hook = transformer.register_forward_pre_hook(
            lambda _module, _args, kwargs: given.append(kwargs["timestep"].item()), with_kwargs=True
        )
        with hook, torch.no_grad():
            call()
        return given

    def ours() -> None:
        for sigma in model.sigmas(steps, HEIGHT_PX, WIDTH_PX)[:-1]:
            model.velocity(start_BNC, torch.tensor([sigma]), text, height_px=HEIGHT_PX, width_px=WIDTH_PX, guidance=1.0)

    options = {"height": HEIGHT_PX, "width": WIDTH_PX, "num_inference_steps": steps, "latents": start_BNC}
    theirs = passed(pipeline.transformer, lambda: pipeline(LONG, true_cfg_scale=1.0, output_type="latent", **options))

    assert len(theirs) == steps
    assert passed(model.transformer, ours) == theirs


# Training


def test_a_lora_adapts_the_twelve_layers_of_every_block_and_starts_without_effect(model: QwenImage) -> None:
    with torch.no_grad():
        base = predicted(model)

    model.make_trainable(rank=4, alpha=8, seed=0)

    layers = {name.rsplit(".lora_", 1)[0] for name in model.trainable()}
    blocks = len(model.transformer.transformer_blocks)
    assert len(layers) == blocks * len(QwenImage.lora_targets)
    with torch.no_grad():
        torch.testing.assert_close(predicted(model), base, rtol=0, atol=0)
        perturb(model)
        assert (predicted(model) - base).abs().max() > 1e-3 * base.abs().max()


def test_a_seed_fixes_the_lora_and_leaves_the_global_generator_alone(directory: Path) -> None:
    state = torch.get_rng_state()
    models = [QwenImage.load(str(directory), Loading(device=CPU, dtype=torch.float32)) for _ in range(3)]

    for model, seed in zip(models, (7, 7, 8), strict=True):
        model.make_trainable(rank=2, alpha=0, seed=seed)

    first, same, other = ([parameter.detach() for parameter in model.parameters()] for model in models)
    assert all(map(torch.equal, first, same))
    assert not all(map(torch.equal, first, other))
    assert torch.equal(torch.get_rng_state(), state)
    assert models[0].transformer.peft_config["default"].lora_alpha == 2 * 2


@pytest.mark.parametrize("rank", [0, 4])
def test_loading_what_was_trained_gives_its_predictions_to_the_same_parameters(
    directory: Path, cache: Path, rank: int
) -> None:
    trained, fresh = loaded(directory, cache), loaded(directory, cache)
    for model in (trained, fresh):
        model.make_trainable(rank=rank, alpha=8, seed=0)
    perturb(trained)
    parameters = fresh.parameters()

    fresh.load_trainable({name: value.clone() for name, value in trained.trainable().items()})

    with torch.no_grad():
        assert torch.equal(predicted(fresh), predicted(trained))
    assert all(old is new for old, new in zip(parameters, fresh.parameters(), strict=True))


def test_weights_of_another_rank_are_not_loaded(directory: Path, cache: Path) -> None:
    first, other = loaded(directory, cache), loaded(directory, cache)
    first.make_trainable(rank=1, alpha=2, seed=0)
    other.make_trainable(rank=2, alpha=2, seed=0)

    with pytest.raises(AssertionError, match="another model or LoRA rank"):
        first.load_trainable(other.trainable())


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_the_start_of_training_and_nests(model: QwenImage, rank: int) -> None:
    model.make_trainable(rank=rank, alpha=8, seed=0)
    with torch.no_grad():
        start = predicted(model)
        perturb(model)
        trained = predicted(model)

        with model.reference():
            outer = predicted(model)
            with model.reference():
                inner = predicted(model)
            after_inner = predicted(model)
        after = predicted(model)

    assert not torch.equal(start, trained)
    assert torch.equal(outer, start)
    assert torch.equal(inner, start)
    assert torch.equal(after_inner, start)
    assert torch.equal(after, trained)


@pytest.mark.parametrize("rank", [0, 4])
def test_an_error_inside_the_reference_restores_the_trained_weights(model: QwenImage, rank: int) -> None:
    model.make_trainable(rank=rank, alpha=8, seed=0)
    perturb(model)
    with torch.no_grad():
        trained = predicted(model)

        with pytest.raises(KeyboardInterrupt), model.reference():
            raise KeyboardInterrupt

        assert torch.equal(predicted(model), trained)


@pytest.mark.parametrize("rank", [0, 4])
def test_looking_at_the_reference_does_not_change_the_gradients_under_way(model: QwenImage, rank: int) -> None:
    model.make_trainable(rank=rank, alpha=8, seed=0)
    perturb(model)
    parameters = model.parameters()

    expected = torch.autograd.grad(predicted(model).square().mean(), parameters, allow_unused=True)
    loss = predicted(model).square().mean()
    with model.reference(), torch.no_grad():
        predicted(model)
    loss.backward()

    assert any(gradient is not None and gradient.any() for gradient in expected)
    for parameter, gradient in zip(parameters, expected, strict=True):
        if parameter.grad is None or gradient is None:  # the text branch of the last block reaches no output
            assert parameter.grad is gradient
        else:
            assert torch.equal(parameter.grad, gradient)


# Directories that are no pipeline


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="absent: no such directory"):
        QwenImage.load(str(tmp_path / "absent"), Loading(device=CPU, dtype=torch.float32))


def test_a_directory_that_is_no_pipeline_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="has no model_index.json"):
        QwenImage.load(str(tmp_path), Loading(device=CPU, dtype=torch.float32))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (json.dumps({"_class_name": "FluxPipeline"}), "'FluxPipeline'.*'QwenImagePipeline'"),
        (json.dumps([]), "not a readable pipeline index"),
        ("{", "not a readable pipeline index"),
    ],
)
def test_another_kind_of_pipeline_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model_index.json").write_text(index)

    with pytest.raises(SpotlightError, match=message):
        QwenImage.load(str(tmp_path), Loading(device=CPU, dtype=torch.float32))


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_a_truncated_file_is_named(directory: Path, tmp_path: Path, part: str) -> None:
    damaged = tmp_path / "pipeline"
    shutil.copytree(directory, damaged)
    (file,) = (damaged / part).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(SpotlightError, match=str(file)):
        QwenImage.load(str(damaged), Loading(device=CPU, dtype=torch.float32)).preload(TEXTS)


@pytest.mark.parametrize("part", ["transformer", "vae", "scheduler", "tokenizer"])
def test_a_missing_part_is_named(directory: Path, tmp_path: Path, part: str) -> None:
    incomplete = tmp_path / "pipeline"
    shutil.copytree(directory, incomplete, ignore=shutil.ignore_patterns(part))

    with pytest.raises(SpotlightError, match=str(incomplete / part)):
        QwenImage.load(str(incomplete), Loading(device=CPU, dtype=torch.float32)).preload(TEXTS)


def test_weights_that_a_file_lacks_are_named_and_never_random(directory: Path, tmp_path: Path) -> None:
    incomplete = tmp_path / "pipeline"
    shutil.copytree(directory, incomplete)
    file = incomplete / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)

    del state["proj_out.weight"]
    save_file(state, file)

    with pytest.raises(SpotlightError, match=r"proj_out\.weight"):
        QwenImage.load(str(incomplete), Loading(device=CPU, dtype=torch.float32))


def test_weights_that_the_settings_have_no_place_for_are_named_and_never_dropped(
    directory: Path, tmp_path: Path
) -> None:
    shorter = shutil.copytree(directory, tmp_path / "pipeline")
    file = shorter / "transformer" / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"num_layers": settings["num_layers"] - 1}))

    with pytest.raises(SpotlightError, match=r"transformer: \d+ weights have no place .* such as transformer_blocks"):
        QwenImage.load(str(shorter), Loading(device=CPU, dtype=torch.float32))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("transformer/x.safetensors.index.json", '{"weight_map": []}', "not a readable index of weights"),
        ("transformer/x.safetensors.index.json", '{"weight_map": {"a": 5}}', "not a readable index of weights"),
        ("transformer/config.json", "[" * 100_000, "config.json: not readable"),
        ("model_index.json", "[" * 100_000, "not a readable pipeline index"),
    ],
)
def test_a_damaged_description_is_named(directory: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    damaged = shutil.copytree(directory, tmp_path / "pipeline")
    (damaged / name).write_text(content)

    with pytest.raises(SpotlightError, match=message):
        survey("qwen-image", damaged)


def test_a_damaged_schedule_is_named(directory: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(directory, tmp_path / "pipeline")
    file = damaged / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_shift": "x"}))
    model = QwenImage.load(str(damaged), Loading(device=CPU, dtype=torch.float32))

    with pytest.raises(SpotlightError, match="scheduler: not loadable as FlowMatchEulerDiscreteScheduler"):
        model.sigmas(4, 32, 32)


def test_where_nothing_asks_for_the_reference_full_weights_are_kept_once(model: QwenImage) -> None:
    model.make_trainable(rank=0, alpha=0, seed=0, reference=False)

    assert not model._base
    with pytest.raises(AssertionError, match="no reference would be asked for"), model.reference():
        pass


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_models_weights_are_in_the_package(name: EmbeddedName) -> None:
    kind, variant = EMBEDDED[name]
    settings = ModelSection(name=name, height_px=variant.height_px, width_px=variant.width_px)

    model = load(settings)

    assert isinstance(model, kind)
    assert model.state().keys() == kind(variant).state().keys()
    assert not settings.gradient_checkpointing


@pytest.mark.parametrize("told", [{}, {"gradient_checkpointing": False}])
def test_a_checkpoints_model_keeps_each_blocks_input_only_unless_told_otherwise(
    directory: Path, told: dict[str, bool]
) -> None:
    settings = ModelSection(name="qwen-image", path=str(directory), height_px=HEIGHT_PX, width_px=WIDTH_PX, **told)

    model = load(settings)

    assert isinstance(model, QwenImage)
    assert model.transformer.is_gradient_checkpointing is not bool(told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_with_the_way_out() -> None:
    with pytest.raises(SpotlightError, match=r"finds no GPU.*model\.device"):
        device_of(ModelSection(device="cuda"))


def test_networks_of_rewards_go_where_the_runs_model_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(models, "_rewards_on", [])

    alone = models.device_of_rewards()
    models.place_rewards(ModelSection(device="cpu"))

    assert (alone, models.device_of_rewards()) == (torch.device("cuda:0"), torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpu_has_a_fixed_order_of_sums_where_the_settings_say_so(
    monkeypatch: pytest.MonkeyPatch, device: str, deterministic: bool
) -> None:
    monkeypatch.setattr("spotlight.rl.models.device_of", lambda settings: torch.device(device))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        fix_order_of_sums(ModelSection(deterministic=deterministic))

        expected = deterministic and device != "cpu"
        assert torch.are_deterministic_algorithms_enabled() == expected
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == expected
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_process_that_may_have_no_gpu_works_on_the_processor_whatever_the_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ModelSection(name="tiny-text", device="cuda")
    with pytest.raises(SpotlightError, match="finds no GPU"):
        device_of(settings)

    monkeypatch.setenv(WITHOUT_GPU, "1")

    assert device_of(settings) == torch.device("cpu")
