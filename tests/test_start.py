"""Training starts from a LoRA that was trained elsewhere, or the run is refused before it begins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines import tiny_flux, tiny_qwen_image, tiny_sd3
from runs import PROMPTS, settings_file
from spotlight import Run, config
from spotlight.config import Config
from spotlight.device.engine import InProcess
from spotlight.inputs import check_inputs
from spotlight.records import SpotlightError
from spotlight.rl import models
from spotlight.rl.export import LORA_FILE, export_weights
from spotlight.rl.sample import GAP_PX, sample
from spotlight.rl.start import start_from_lora
from spotlight.store import weights
from spotlight.store.creating import create_run

RANK, ALPHA = 4, 12.0
DIGITS = PROMPTS / "digits-train.txt"
BUILD = {"qwen-image": tiny_qwen_image, "sd3": tiny_sd3, "flux": tiny_flux}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.mktemp("pipeline"))


def settings_of(pipeline: Path, parent: Path, name: str = "qwen-image", **train: Any) -> Config:
    tree = {
        "run": {"dir": str(parent / "runs")},
        "model": {"name": name, "path": str(pipeline), "device": "cpu", "height_px": 16, "width_px": 32},
        "data": {"train_prompts": str(DIGITS), "validation_prompts": str(DIGITS)},
        "train": {"lora_rank": RANK, "lora_alpha": ALPHA, "old_decay": "copy", **train},
    }
    return config.resolve(tree, parent)


def made_trainable(settings: Config) -> models.Model:
    model, train = models.load(settings.model), settings.train
    model.make_trainable(rank=train.lora_rank, alpha=train.lora_alpha, seed=0)
    return model


def changed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As after some training."""
    generator = torch.Generator().manual_seed(1)
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def lora_of_peft(settings: Config, directory: Path) -> dict[str, Tensor]:
    """Written as Flow-GRPO and DiffusionNFT write it; returns its weights, by the names that a model has for them."""
    model = models.load(settings.model)
    targets = list(model.lora_targets)
    wrapped = get_peft_model(model.transformer, LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=targets))
    wrapped.save_pretrained(str(directory))
    file = directory / "adapter_model.safetensors"
    state = changed(load_file(file))
    save_file(state, file)
    return {name.removeprefix("base_model.model."): value for name, value in state.items()}


def trained_run(pipeline: Path, parent: Path) -> tuple[Path, dict[str, Tensor]]:
    """A run with one version, and its weights."""
    settings = settings_of(pipeline, parent)
    run_dir = create_run(settings, now_s=0.0).path
    state = changed(made_trainable(settings).trainable())
    weights.stage(run_dir, 0, state, {}, {}, None, None)
    weights.publish(run_dir, 0)
    return run_dir, state


@pytest.mark.parametrize("name", BUILD)
def test_a_lora_that_peft_saved_is_what_training_starts_from(tmp_path: Path, name: str) -> None:
    checkpoint = BUILD[name](tmp_path / "checkpoint")
    expected = lora_of_peft(settings_of(checkpoint, tmp_path, name), tmp_path / "lora")
    settings = settings_of(checkpoint, tmp_path, name, lora_path="lora")
    model = made_trainable(settings)

    start_from_lora(model, settings.train)

    found = model.trainable()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[layer], expected[layer]) for layer in expected)


@pytest.mark.parametrize("is_file", [False, True])
def test_an_exported_lora_is_what_another_run_begins_with_which_then_needs_it_no_more(
    pipeline: Path, tmp_path: Path, is_file: bool
) -> None:
    run_dir, expected = trained_run(pipeline, tmp_path)
    path = export_weights(run_dir, tmp_path / "lora") / (LORA_FILE if is_file else "")
    settings = settings_of(pipeline, tmp_path, lora_path=str(path), old_decay=0.5, ema_decay=0.5)
    check_inputs(settings)
    run = create_run(settings, now_s=1.0)
    start = InProcess().prepare(str(run.path)).start
    shutil.rmtree(tmp_path / "lora")

    Run.resume(run.path)
    Run.into(run.path, run.path / "config.toml")
    assert InProcess().prepare(str(run.path)).start == start
    for part in weights.PARTS.values():
        found = weights.load(run.url, start, part)
        assert all(torch.equal(found[layer], expected[layer]) for layer in expected)


def test_a_run_whose_first_weights_are_not_there_is_resumed_with_its_lora_alone(pipeline: Path, tmp_path: Path) -> None:
    lora_of_peft(settings_of(pipeline, tmp_path), tmp_path / "lora")
    run = create_run(settings_of(pipeline, tmp_path, lora_path="lora"), now_s=1.0)
    shutil.rmtree(tmp_path / "lora")

    with pytest.raises(SpotlightError, match="no LoRA there"):
        Run.resume(run.path)


def test_the_upper_row_of_a_sample_is_what_the_run_began_with(pipeline: Path, tmp_path: Path) -> None:
    run_dir, state = trained_run(pipeline, tmp_path)
    settings = settings_of(pipeline, tmp_path, lora_path=str(export_weights(run_dir, tmp_path / "lora")))
    again = create_run(settings, now_s=1.0).path
    weights.stage(again, 0, state, {}, {}, None, None)
    weights.publish(again, 0)
    shutil.rmtree(tmp_path / "lora")

    began, plain = (
        np.asarray(Image.open(sample(run, 'a "4"', tmp_path / f"{at}.png", seeds=[0])))
        for at, run in enumerate((again, run_dir))
    )

    assert np.array_equal(began[:16], began[16 + GAP_PX :])
    assert np.array_equal(began[16 + GAP_PX :], plain[16 + GAP_PX :])
    assert not np.array_equal(plain[:16], plain[16 + GAP_PX :])


def say(file: Path, **settings: Any) -> None:
    beside = file.with_name("adapter_config.json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **settings}))


def rename(file: Path) -> None:
    save_file({name.replace("to_q", "to_x"): value for name, value in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("damage", "train", "says"),
    [
        (lambda file: None, {"lora_rank": 8}, r"it has rank \[4\], and train.lora_rank is 8"),
        (lambda file: None, {"lora_alpha": 0}, r"its alpha is 12 and train.lora_alpha is 8: set train.lora_alpha = 12"),
        (lambda file: file.with_name("adapter_config.json").unlink(), {}, "its alpha is 4, as it does not say, and"),
        (lambda file: say(file, use_rslora=True), {}, r"no plain LoRA \(use_rslora is set\)"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), {}, "damaged or cut short"),
        (lambda file: save_file({"a": torch.zeros(2)}, file), {}, "is no LoRA of diffusers or peft"),
        (lambda file: save_file({"a.lora_A.weight": torch.zeros(())}, file), {}, "is no LoRA of diffusers or peft"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"F32", b"F99")), {}, "not readable .*unknown.*F99"),
        (lambda file: file.rename(file.with_suffix(".bin")), {}, "no LoRA there; give a .safetensors file"),
        (lambda file: file.with_name("adapter_config.json").write_text("{"), {}, "of itself is not readable"),
    ],
)
def test_a_lora_that_cannot_be_started_from_is_refused_before_anything_starts(
    pipeline: Path, tmp_path: Path, damage: Any, train: dict[str, Any], says: str
) -> None:
    lora_of_peft(settings_of(pipeline, tmp_path), tmp_path / "lora")
    damage(tmp_path / "lora" / "adapter_model.safetensors")

    with pytest.raises(SpotlightError, match=says):
        check_inputs(settings_of(pipeline, tmp_path, lora_path="lora", **train))


def test_a_lora_of_other_layers_is_refused(pipeline: Path, tmp_path: Path) -> None:
    lora_of_peft(settings_of(pipeline, tmp_path), tmp_path / "lora")
    rename(tmp_path / "lora" / "adapter_model.safetensors")
    settings = settings_of(pipeline, tmp_path, lora_path="lora")

    with pytest.raises(SpotlightError, match="not those that a LoRA of this model adapts: .* such as .*to_[qx]"):
        start_from_lora(made_trainable(settings), settings.train)


def test_a_lora_to_start_from_needs_its_rank(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="train.lora_path = 'lora' needs train.lora_rank"):
        config.load(settings_file(tmp_path), ["train.lora_path=lora"])
