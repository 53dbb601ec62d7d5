"""An exported version, loaded by plain diffusers, is the model that was trained."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor

from pipelines import tiny_flux, tiny_qwen_image, tiny_sd3
from runs import PROMPTS, settings_file
from spotlight import config
from spotlight.config import Config
from spotlight.records import SpotlightError
from spotlight.rl import export, models
from spotlight.rl.export import LORA_FILE, export_weights
from spotlight.rl.sample import GAP_PX, draw, sample
from spotlight.shell import main
from spotlight.simulation import simulate
from spotlight.store import weights
from spotlight.store.creating import create_run, create_run_at

RANK, ALPHA = 4, 12.0
"""Neither equal nor one twice the other: a lost alpha, or a default one, shows."""


DIGITS = PROMPTS / "digits-train.txt"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.mktemp("pipeline"))


def make_run(
    pipeline: Path,
    parent: Path,
    *,
    rank: int = RANK,
    dtype: str = "float32",
    versions: int = 2,
    name: str = "qwen-image",
) -> Path:
    """A run directory with published versions 0, 1, ..., each further from the start.

    The policy that samples is the one in training, but for version 2, where it is that of version 1.
    """
    settings = config.resolve(
        {
            "run": {"dir": str(parent)},
            "model": {
                "name": name,
                "path": str(pipeline),
                "dtype": dtype,
                "device": "cpu",
                "height_px": 16,
                "width_px": 32,
            },
            "data": {"train_prompts": str(DIGITS), "validation_prompts": str(DIGITS)},
            "train": {"lora_rank": rank, "lora_alpha": ALPHA, "old_decay": 0.5},
        },
        parent,
    )
    run_dir = create_run(settings, now_s=0.0).path
    model = models.load(settings.model)
    model.make_trainable(rank=rank, alpha=ALPHA, seed=settings.run.seed)
    generator = torch.Generator().manual_seed(0)
    old: dict[str, Tensor] = {}
    for version in range(versions):
        if version < 2:
            old = {name: value.clone() for name, value in model.trainable().items()}
        weights.stage(run_dir, version, model.trainable(), {}, {}, None, old)
        weights.publish(run_dir, version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return run_dir


def transformer_of(run_dir: Path, version: int) -> QwenImageTransformer2DModel:
    """The trained one, restored inside the project."""
    settings = config.load(run_dir / config.RESOLVED)
    model = models.load(settings.model)
    model.make_trainable(rank=settings.train.lora_rank, alpha=settings.train.lora_alpha, seed=settings.run.seed)
    published = weights.published(run_dir, version)
    assert published
    model.load_trainable(weights.load(run_dir, published.weights, "trainable"))
    return model.transformer


@torch.no_grad()
def outputs(transformer: QwenImageTransformer2DModel) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden_BNC = torch.randn(1, 8, transformer.config["in_channels"], generator=generator)
    texts_BTD = torch.randn(1, 8, transformer.config["joint_attention_dim"], generator=generator)
    (v_BNC,) = transformer(
        hidden_states=hidden_BNC.to(transformer.dtype),
        encoder_hidden_states=texts_BTD.to(transformer.dtype),
        encoder_hidden_states_mask=None,
        timestep=torch.tensor([0.5], dtype=transformer.dtype),
        img_shapes=[[(1, 2, 4)]],
        return_dict=False,
    )
    return v_BNC.float()


def test_an_exported_lora_gives_plain_diffusers_the_trained_outputs(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path)
    plain = QwenImagePipeline.from_pretrained(pipeline)
    base = outputs(plain.transformer)

    to = export_weights(run_dir, tmp_path / "lora")
    plain.load_lora_weights(to)

    trained = outputs(transformer_of(run_dir, version=1))
    assert (trained - base).abs().max() > 0.1 * base.abs().max()
    assert torch.equal(outputs(plain.transformer), trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_lora_beside_a_narrower_base_is_exported_in_float32(
    pipeline: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    run_dir = make_run(pipeline, tmp_path, dtype=str(dtype).removeprefix("torch."))
    plain = QwenImageTransformer2DModel.from_pretrained(pipeline, subfolder="transformer", torch_dtype=dtype)
    base = outputs(plain)

    to = export_weights(run_dir, tmp_path / "lora")
    state, metadata = QwenImagePipeline.lora_state_dict(
        str(to), weight_name=LORA_FILE, return_lora_metadata=True, local_files_only=True
    )
    QwenImagePipeline.load_lora_into_transformer(state, plain, metadata=metadata)

    trained = outputs(transformer_of(run_dir, version=1))
    assert {value.dtype for value in state.values()} == {torch.float32}
    # What is left is diffusers' rounding of the adapters to the base's type; an adapter not loaded would leave all.
    assert (outputs(plain) - trained).norm() < 0.05 * (base - trained).norm()


def test_full_weights_are_exported_as_a_transformer(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, rank=0)
    base = outputs(QwenImageTransformer2DModel.from_pretrained(pipeline, subfolder="transformer"))

    to = export_weights(run_dir, tmp_path / "transformer")

    trained = outputs(transformer_of(run_dir, version=1))
    assert (trained - base).abs().max() > 0.1 * base.abs().max()
    assert torch.equal(outputs(QwenImageTransformer2DModel.from_pretrained(to)), trained)


def test_a_merged_lora_is_exported_as_a_transformer_that_needs_none(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path)
    base = outputs(QwenImageTransformer2DModel.from_pretrained(pipeline, subfolder="transformer"))

    to = export_weights(run_dir, tmp_path / "merged", merged=True)

    trained = outputs(transformer_of(run_dir, version=1))
    assert (trained - base).abs().max() > 0.1 * base.abs().max()
    torch.testing.assert_close(outputs(QwenImageTransformer2DModel.from_pretrained(to)), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "build", "kind"), [("sd3", tiny_sd3, StableDiffusion3Pipeline), ("flux", tiny_flux, FluxPipeline)]
)
@pytest.mark.parametrize("merged", [False, True])
def test_other_families_are_exported_as_their_own_plain_pipelines_load_them(
    tmp_path: Path, name: str, build: Callable[[Path], Path], kind: Any, merged: bool
) -> None:
    checkpoint = build(tmp_path / "checkpoint")
    run_dir = make_run(checkpoint, tmp_path, name=name)

    to = export_weights(run_dir, tmp_path / "out", merged=merged)
    plain = kind.from_pretrained(checkpoint)
    before = [value.clone() for value in plain.transformer.state_dict().values()]
    if merged:
        plain.transformer = type(plain.transformer).from_pretrained(to)
        after = plain.transformer.state_dict().values()
        assert not all(map(torch.equal, before, after))
    else:
        plain.load_lora_weights(to)
        assert plain.transformer.peft_config["default_0"].lora_alpha == ALPHA


def test_an_earlier_version_is_exported_when_asked_for(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=3)
    plain = QwenImagePipeline.from_pretrained(pipeline)

    plain.load_lora_weights(export_weights(run_dir, tmp_path / "lora", version=1))

    assert torch.equal(outputs(plain.transformer), outputs(transformer_of(run_dir, version=1)))
    assert not torch.equal(outputs(plain.transformer), outputs(transformer_of(run_dir, version=2)))


def test_the_policy_that_samples_is_exported_unless_told_otherwise(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, rank=0, versions=3)

    sampling, trained = (
        outputs(QwenImageTransformer2DModel.from_pretrained(to))
        for to in (export_weights(run_dir, tmp_path / "a"), export_weights(run_dir, tmp_path / "b", policy="trained"))
    )

    assert torch.equal(sampling, outputs(transformer_of(run_dir, version=1)))
    assert torch.equal(trained, outputs(transformer_of(run_dir, version=2)))


def test_the_file_holds_alpha_and_tensors_that_diffusers_names(pipeline: Path, tmp_path: Path) -> None:
    to = export_weights(make_run(pipeline, tmp_path), tmp_path / "lora")

    state, metadata = QwenImagePipeline.lora_state_dict(
        str(to), weight_name=LORA_FILE, return_lora_metadata=True, local_files_only=True
    )

    assert metadata["transformer.lora_alpha"] == ALPHA
    assert metadata["transformer.r"] == RANK
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in state
    assert [file.name for file in to.iterdir()] == [LORA_FILE]


def test_an_export_that_lost_its_alpha_is_refused_and_leaves_nothing(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(pipeline, tmp_path)
    save = QwenImageLoraLoaderMixin.save_lora_weights

    def save_without_metadata(directory: Path, *, transformer_lora_layers: Any, **_: object) -> None:
        save(directory, transformer_lora_layers=transformer_lora_layers)

    monkeypatch.setattr(QwenImageLoraLoaderMixin, "save_lora_weights", save_without_metadata)

    with pytest.raises(SpotlightError, match="does not give the outputs of the trained model"):
        export_weights(run_dir, tmp_path / "lora")

    assert [path.name for path in tmp_path.iterdir()] == [run_dir.name]


def test_an_export_whose_outputs_are_no_numbers_is_refused(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=1)
    first = weights.published(run_dir, 0)
    assert first
    huge = {name: torch.full_like(value, 1e30) for name, value in weights.load(run_dir, first.weights, "old").items()}
    weights.stage(run_dir, 1, huge, {}, {}, None, huge)
    weights.publish(run_dir, 1)

    with pytest.raises(SpotlightError, match="does not give the outputs of the trained model"):
        export_weights(run_dir, tmp_path / "lora")


def test_a_merge_that_lost_what_was_trained_is_refused(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(pipeline, tmp_path, dtype="bfloat16")
    monkeypatch.setitem(export.MERGED_TOLERANCE, "bfloat16", math.inf)
    monkeypatch.setattr(QwenImageTransformer2DModel, "fuse_lora", lambda self: None)

    with pytest.raises(SpotlightError, match=r"rounding to bfloat16 takes 100% of what was trained.*without --merged"):
        export_weights(run_dir, tmp_path / "merged", merged=True)

    assert [path.name for path in tmp_path.iterdir()] == [run_dir.name]


@pytest.mark.parametrize("merged", [False, True])
def test_who_may_look_into_an_export_may_read_its_weights(pipeline: Path, tmp_path: Path, merged: bool) -> None:
    run_dir = make_run(pipeline, tmp_path)
    before = os.umask(0o022)
    try:
        to = export_weights(run_dir, tmp_path / "weights", merged=merged)
    finally:
        os.umask(before)

    assert {oct(file.stat().st_mode & 0o777) for file in to.iterdir()} == {"0o644"}


def test_exporting_does_not_overwrite(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")

    with pytest.raises(SpotlightError, match="exists already"):
        export_weights(run_dir, taken)

    assert (taken / "notes.txt").read_text() == "mine"


def test_the_directory_where_one_is_cannot_be_replaced(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(pipeline, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    with pytest.raises(SpotlightError, match="exists already"):
        export_weights(run_dir, Path())


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=f"{tmp_path}: not a run directory"):
        export_weights(tmp_path, tmp_path / "lora")


def test_a_version_that_is_not_there_is_answered_with_those_that_are(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=2)

    with pytest.raises(SpotlightError, match="no weights version 7; it has 0, 1"):
        export_weights(run_dir, tmp_path / "lora", version=7)


def test_a_version_is_exported_though_others_are_damaged(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=3)
    for damaged in ("v00000", "v00002"):
        (run_dir / "weights" / damaged / "manifest.json").write_text("")

    assert export_weights(run_dir, tmp_path / "lora", version=1).exists()
    with pytest.raises(SpotlightError, match="no weights version 7; it has 0, 1, 2"):
        export_weights(run_dir, tmp_path / "other", version=7)


def test_a_run_that_published_nothing_says_so(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=0)

    with pytest.raises(SpotlightError, match="no weights were published yet"):
        export_weights(run_dir, tmp_path / "lora")


def test_a_sample_sheet_shows_the_run_before_and_after(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path)
    to = tmp_path / "sheet.png"

    status = main(["sample", str(run_dir), "--prompt", 'a "4"', "--to", str(to), "--seeds", "3", "4", "--steps", "2"])

    drawn = np.asarray(Image.open(to))
    before, after = drawn[:16], drawn[16 + GAP_PX :]
    assert status == 0
    assert drawn.shape == (2 * 16 + GAP_PX, 2 * 32 + GAP_PX, 3)
    assert not np.array_equal(before, after)
    assert not np.array_equal(before[:, :32], before[:, 32 + GAP_PX :])


def test_a_sample_is_drawn_in_the_steps_asked_for_or_of_a_validation_or_of_a_rollout_and_with_its_guidance(
    pipeline: Path,
) -> None:
    def settings(validation_steps: int = 0, guidance: float = 4.0) -> Config:
        tree = {
            "run": {"validation_steps": validation_steps},
            "model": {"name": "qwen-image", "path": str(pipeline), "device": "cpu", "height_px": 16, "width_px": 32},
            "data": {"train_prompts": str(DIGITS), "validation_prompts": str(DIGITS)},
            "rollout": {"steps": 2, "guidance": guidance},
        }
        return config.resolve(tree, pipeline)

    model = models.load(settings().model)
    model.preload([""])

    two, three, four = (draw(model, settings(), "", [0], steps).tolist() for steps in (2, 3, 4))

    assert two != three != four
    assert draw(model, settings(), "", [0], 0).tolist() == two
    assert draw(model, settings(validation_steps=3), "", [0], 0).tolist() == three
    assert draw(model, settings(validation_steps=3), "", [0], 4).tolist() == four
    assert draw(model, settings(guidance=1.0), "", [0], 0).tolist() != two


@pytest.mark.parametrize(
    ("to", "more", "says"),
    [
        ("sheet.txt", {}, r"sheet\.txt: expected the name of an image file that ends in \.png, \.jpg"),
        ("sheet", {}, "expected the name of an image file"),
        ("sheet.psd", {}, "expected the name of an image file"),
        (".", {}, "expected the name of an image file"),
        ("sheet.png", {"seeds": []}, "no seeds: expected one for each column"),
        ("sheet.png", {"seeds": [-1]}, r"seeds \[-1\]: expected"),
        ("sheet.png", {"seeds": [2**64]}, rf"seeds \[{2**64}\]: expected numbers from 0 to 2\^64 - 1"),
        ("sheet.png", {"steps": -3}, "steps -3: expected"),
        ("sheet.png", {"prompt": "a \udcff"}, r"prompt = 'a \\udcff': is not Unicode"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path: Path, to: str, more: dict[str, Any], says: str
) -> None:
    settings = config.resolve({"data": {"train_prompts": str(DIGITS), "validation_prompts": str(DIGITS)}}, tmp_path)
    run = create_run_at(tmp_path / "run", settings)  # which has no weights

    with pytest.raises(SpotlightError, match=says):
        sample(run.path, to=tmp_path / to, **{"prompt": "a", "seeds": [0]} | more)


def test_a_sample_that_cannot_be_written_is_refused_before_it_is_drawn_and_leaves_what_was_there(
    pipeline: Path, tmp_path: Path
) -> None:
    """The model is gone: whoever loads it, says so."""
    gone = shutil.copytree(pipeline, tmp_path / "pipeline")
    run_dir, to = make_run(gone, tmp_path), tmp_path / "sheet.png"
    shutil.rmtree(gone)
    (tmp_path / "file").write_text("")
    to.write_bytes(b"mine")

    with pytest.raises(SpotlightError, match=r"a\.png: cannot be written"):
        sample(run_dir, "a", tmp_path / "file" / "a.png", seeds=[0])
    with pytest.raises(SpotlightError, match=r"model\.path must name"):
        sample(run_dir, "a", to, seeds=[0])
    with pytest.raises(SpotlightError, match="no weights version -2"):
        sample(run_dir, "a", to, seeds=[0], version=-2)

    assert to.read_bytes() == b"mine"
    assert [file for file in tmp_path.iterdir() if file.name.startswith(".sheet")] == []


def test_a_sample_is_of_the_policy_that_was_validated(pipeline: Path, tmp_path: Path) -> None:
    run_dir = make_run(pipeline, tmp_path, versions=3)  # version 2 samples with the weights of version 1

    sheets = [
        np.asarray(Image.open(sample(run_dir, 'a "4"', tmp_path / f"{version}.png", seeds=[0], version=version)))
        for version in (1, 2)
    ]

    assert np.array_equal(sheets[0], sheets[1])


def test_a_sample_of_weights_that_are_not_there_says_which_are(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="no weights version 7; it has 0, 1"):
        sample(make_run(pipeline, tmp_path), 'a "4"', tmp_path / "sheet.png", seeds=[0], version=7)


@pytest.mark.parametrize("verb", ["export", "sample"])
def test_a_run_whose_learning_was_modelled_has_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (found,) = simulate(settings_file(tmp_path), ["run.iterations=1"], compare=False, report=False)
    more = ["--prompt", "a"] if verb == "sample" else []

    status = main([verb, str(found.run_dir), *more, "--to", str(tmp_path / "x.png")])

    assert status == 1
    assert "learning was modelled in this simulated run, so it has no weights" in capsys.readouterr().err
