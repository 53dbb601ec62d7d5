"""A checkpoint in the real layout goes through the whole system, and what comes out is plain diffusers' again.

The weights are random, so images are noise. The recogniser reads letters into it, so single-letter
prompts get rewards of 0 and of 1, and training has something to follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from numpy.typing import NDArray
from torch import Tensor

from graphs.loop import Loop, synchronous
from graphs.tasks.seeds import validation_seeds
from pipelines import PACKED_CHANNELS, PX_PER_TOKEN, tiny_qwen_image
from runs import NoWatch, outcome, settings_file
from spotlight import config
from spotlight.device.engine import Engine
from spotlight.device.residency import Residency
from spotlight.records import WITHOUT_GPU, WeightsRef
from spotlight.rl import flow
from spotlight.rl.export import export_weights
from spotlight.rl.models import Model
from spotlight.rl.prompts import read_prompts
from spotlight.run import Run
from spotlight.store import weights
from spotlight.store.creating import create_run
from spotlight.store.rows import HISTORY, SPANS
from spotlight.store.rundir import RunDir

ITERATIONS, STEPS, GUIDANCE, RANK = 2, 4, 4.0, 4
HEIGHT_PX, WIDTH_PX = 16, 64
"""Flat enough that the recogniser takes the noise for a word: about a third of the images have an "e" in it."""
TOKENS, CHANNELS = (HEIGHT_PX // PX_PER_TOKEN) * (WIDTH_PX // PX_PER_TOKEN), PACKED_CHANNELS
LEVEL = 1 / 255
"""Of an image: what is stored is rounded by half a level."""
LETTERS = {"train": "eant", "validation": "r"}
COMMON = [
    f"run.iterations={ITERATIONS}",
    f"run.validate_every={ITERATIONS}",
    "rollout.prompts=2",
    f"rollout.steps={STEPS}",
    "pools.spot.workers=1",
    "train.learning_rate=0.05",  # so that two updates are seen in the images
]
ALGORITHMS = {
    "nft": ["train.algorithm=nft", "rollout.sampler=ode"],
    "grpo": ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window=[1, 3]"],
}
LOG_PROB_TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 1e-3
"""Worker and trainer differ in the size of their batches alone, measured: 1.2e-7 and 0. A trainer that forgot the
guidance was off by 7e-4 and 2e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run, and the pipeline that it started from."""

    pipeline: Path
    run: RunDir

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One per iteration."""
        return [row["metrics"] for row in self.run.rows(HISTORY)]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module", params=[pytest.param("nft", marks=pytest.mark.live), "grpo"])
def trained(request: pytest.FixtureRequest, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two iterations on one reserved and one spot process."""
    directory = tmp_path_factory.mktemp(request.param)
    run = Run(settings_file(directory), checkpoint_overrides(pipeline, directory, request.param)).start()
    run.wait()
    return Trained(pipeline=pipeline, run=run.directory)


def checkpoint_overrides(pipeline: Path, directory: Path, algorithm: str) -> list[str]:
    """Settings of a small run on the checkpoint; its prompts are written to ``directory``."""
    for name, letters in LETTERS.items():
        (directory / f"{name}.txt").write_text("".join(f'A sign that says "{letter}".\n' for letter in letters))
    return [
        *COMMON,
        *ALGORITHMS[algorithm],
        "model.name=qwen-image",
        f'model.path="{pipeline}"',
        f"model.height_px={HEIGHT_PX}",
        f"model.width_px={WIDTH_PX}",
        f"rollout.guidance={GUIDANCE}",
        f"train.lora_rank={RANK}",
        f"train.lora_alpha={2 * RANK}",
        'data.train_prompts="train.txt"',
        'data.validation_prompts="validation.txt"',
    ]


def run_here(directory: Path, overrides: list[str]) -> RunDir:
    """The run without a cluster, task by task in this process."""
    run = create_run(config.load(settings_file(directory), overrides), time.time())
    Loop(run, synchronous, NoWatch()).go()
    return run


def published(run: RunDir, version: int) -> WeightsRef:
    found = weights.published(run.path, version)
    assert found
    return found.weights


def lora(run: RunDir, version: int) -> dict[str, Tensor]:
    """All that a published version holds."""
    return weights.load(run.path, published(run, version), "trainable")


def moved(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Largest change of a weight."""
    return max((new[name] - value).abs().max().item() for name, value in old.items())


def plain_pipeline(path: Path) -> Any:
    """As anyone loads it who has never heard of this project."""
    plain = QwenImagePipeline.from_pretrained(path)
    plain.set_progress_bar_config(disable=True)
    return plain


def draw(plain: Any, text: str, noise_BNC: Tensor) -> NDArray[np.float32]:
    """What a pipeline makes of the noise: images of shape (B, height, width, 3), from 0 to 1."""
    drawn = plain(
        prompt=text,
        negative_prompt=" ",
        true_cfg_scale=GUIDANCE,
        height=HEIGHT_PX,
        width=WIDTH_PX,
        num_inference_steps=STEPS,
        latents=noise_BNC,
        output_type="np",
    )
    images: NDArray[np.float32] = drawn.images
    return images


@torch.no_grad()
def velocity(model: Model) -> Tensor:
    """For two noise levels of one noise."""
    x_BNC = flow.initial_noise([0, 0], TOKENS, CHANNELS)
    text = model.encode([f'A sign that says "{LETTERS["validation"]}".']).rows([0, 0])
    sigma_B = torch.tensor([1.0, 0.5])
    return model.velocity(x_BNC, sigma_B, text, height_px=HEIGHT_PX, width_px=WIDTH_PX, guidance=GUIDANCE)


def test_both_pools_worked_and_the_rewards_differed(trained: Trained) -> None:
    spans = trained.run.rows(SPANS)

    assert {row["pool"] for row in spans if row["phase"] == "train"} == {"reserved"}
    assert {row["pool"] for row in spans if row["phase"].startswith("explore-r")} >= {"spot"}
    assert [row["weights_version"] for row in trained.run.rows(HISTORY)] == [1, 2]
    assert all(metrics["reward_std"] > 0 for metrics in trained.metrics)


def test_every_metric_is_finite_and_there_was_a_gradient(trained: Trained) -> None:
    values = [value for metrics in trained.metrics for value in metrics.values()]

    assert all(math.isfinite(value) for value in values)
    assert all(metrics["grad_norm"] > 0 for metrics in trained.metrics)


def test_versions_hold_the_lora_alone_and_each_differs_from_the_last(trained: Trained) -> None:
    states = [lora(trained.run, version) for version in range(ITERATIONS + 1)]

    assert {name.split(".")[-2] for state in states for name in state} == {"lora_A", "lora_B"}
    assert all(min(value.shape) == RANK for state in states for value in state.values())
    assert all(moved(old, new) > 0 for old, new in pairwise(states))


@pytest.mark.parametrize("trained", ["grpo"], indirect=True)
def test_worker_and_trainer_agree_on_the_policy_that_sampled(trained: Trained) -> None:
    deltas = [metrics["log_prob_delta_max"] for metrics in trained.metrics]
    ratios = [metrics["ratio_mean"] for metrics in trained.metrics]

    assert max(deltas) < LOG_PROB_TOLERANCE
    assert ratios == [1.0] * ITERATIONS  # one update an iteration: every ratio is taken before it


def test_plain_diffusers_draws_the_validation_images_with_the_exported_lora(trained: Trained, tmp_path: Path) -> None:
    settings = trained.run.config()
    (prompt,) = read_prompts(settings.data.validation_prompts)
    with np.load(trained.run.path / "images" / f"validation-{ITERATIONS:05d}.npz") as file:
        ours_BHWC = file["images"] / 255
    noise_BNC = flow.initial_noise(validation_seeds(prompt, settings.run.validation_seeds), TOKENS, CHANNELS)
    plain = plain_pipeline(trained.pipeline)

    untrained_BHWC = draw(plain, prompt.text, noise_BNC)
    plain.load_lora_weights(export_weights(trained.run.path, tmp_path / "lora"))
    trained_BHWC = draw(plain, prompt.text, noise_BNC)

    np.testing.assert_allclose(trained_BHWC, ours_BHWC, atol=LEVEL)
    assert np.abs(trained_BHWC - untrained_BHWC).max() > 10 * LEVEL


def test_the_exported_lora_gives_the_velocities_of_the_engine(trained: Trained, tmp_path: Path) -> None:
    engine, plain = Engine(trained.run.path), plain_pipeline(trained.pipeline)
    engine.resident.use(published(trained.run, ITERATIONS), trained.run.config().validation_policy)
    plain.load_lora_weights(export_weights(trained.run.path, tmp_path / "lora"))

    ours_BNC = velocity(engine.model)
    engine.model.transformer = plain.transformer

    assert torch.equal(velocity(engine.model), ours_BNC)


def test_a_finished_run_that_is_resumed_does_nothing_again(trained: Trained) -> None:
    before, spans = outcome(trained.run.path), trained.run.rows(SPANS)
    written = {path: path.stat().st_mtime_ns for path in (trained.run.path / "weights").rglob("*")}

    status = Run.resume(trained.run.path).start().wait()

    assert status.state == "finished"
    assert trained.run.rows(SPANS) == spans
    assert outcome(trained.run.path) == before
    assert {path: path.stat().st_mtime_ns for path in (trained.run.path / "weights").rglob("*")} == written


@pytest.mark.live
def test_without_a_reserved_gpu_the_same_run_makes_the_same_weights(pipeline: Path, tmp_path: Path) -> None:
    spot = ['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]']
    found = []
    for name, extra in (("usual", []), ("bare", [*spot, "pools.reserved.gpu=cpu"])):
        overrides = [*checkpoint_overrides(pipeline, tmp_path, "nft"), f"run.name={name}", *extra]
        run = Run(settings_file(tmp_path), overrides).start()
        assert run.wait().state == "finished"
        found.append(outcome(run.directory.path))

    assert found[1] == found[0]


@pytest.mark.parametrize(("rank", "read"), [(RANK, False), (0, True)])
def test_who_only_takes_updates_of_a_lora_reads_no_base_weights(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, read: bool
) -> None:
    overrides = [*checkpoint_overrides(pipeline, tmp_path, "nft"), f"train.lora_rank={rank}"]
    run = create_run(config.load(settings_file(tmp_path), overrides), time.time())
    monkeypatch.setenv(WITHOUT_GPU, "1")

    model = Residency(run, run.config(), None).model

    weights = {id(value) for value in model.parameters()}
    base = [value for value in model.transformer.parameters() if rank == 0 or id(value) not in weights]
    assert all((value.untyped_storage().nbytes() > value.itemsize) == read for value in base if value.numel() > 1)


def test_in_bfloat16_worker_and_trainer_agree_to_its_rounding(pipeline: Path, tmp_path: Path) -> None:
    overrides = [*checkpoint_overrides(pipeline, tmp_path, "grpo"), "model.dtype=bfloat16", "run.iterations=1"]

    run = run_here(tmp_path, overrides)

    (row,) = run.rows(HISTORY)
    assert row["metrics"]["ratio_mean"] == 1
    assert row["metrics"]["log_prob_delta_max"] < BFLOAT16_TOLERANCE
    assert {value.dtype for value in lora(run, 1).values()} == {torch.float32}


@pytest.mark.parametrize("sampler", ["sde", "cps", "dance"])
def test_the_embedded_model_trains_on_any_stochastic_sampler(sampler: str, tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text('A sign that says "47".\n')
    overrides = [
        'data.validation_prompts="validation.txt"',
        "train.algorithm=grpo",
        f"rollout.sampler={sampler}",
        "run.iterations=1",
        "strategy.exploration=off",
    ]

    run = run_here(tmp_path, overrides)

    (row,) = run.rows(HISTORY)
    assert row["metrics"]["ratio_mean"] == 1
    assert row["metrics"]["log_prob_delta_max"] < LOG_PROB_TOLERANCE
    assert row["metrics"]["grad_norm"] > 0
