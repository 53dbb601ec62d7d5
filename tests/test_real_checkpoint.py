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
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor

from graphs.loop import Loop, synchronous
from graphs.tasks import validation_seeds
from pipelines import tiny_qwen_image
from runs import outcome, settings_file
from spotlight import config, flow, weights
from spotlight.data import read_prompts
from spotlight.engine import Engine
from spotlight.export import export_lora
from spotlight.run import Run
from spotlight.rundir import HISTORY, SPANS, RunDir

ITERATIONS, STEPS, GUIDANCE, RANK = 2, 4, 4.0, 4
HEIGHT_PX, WIDTH_PX = 16, 64
"""Flat enough that the recogniser takes the noise for a word: about a third of the images have an "e" in it."""
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
    "grpo": ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.window=[1, 3]"],
}
LOG_PROB_TOLERANCE = 1e-4
"""Worker and trainer differ in the size of their batches alone; the clip range in use is as wide."""


class NoWatch:
    """Follows nothing."""

    def begin(self, phase: str, iteration: int) -> None: ...

    def validated(self, version: int, score: float) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None: ...

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run, and the pipeline that it started from."""

    algorithm: str
    pipeline: Path
    run: RunDir

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One per iteration."""
        return [row["metrics"] for row in self.run.rows(HISTORY)]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def trained(request: pytest.FixtureRequest, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two iterations on one reserved and one spot process."""
    directory = tmp_path_factory.mktemp(request.param)
    run = Run(settings_file(directory), checkpoint_overrides(pipeline, directory, request.param)).start()
    run.wait()
    return Trained(algorithm=request.param, pipeline=pipeline, run=run.directory)


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
    run = RunDir.create(config.load(settings_file(directory), overrides), time.time())
    Loop(run, synchronous, NoWatch()).go()
    return run


def lora(run: RunDir, version: int) -> dict[str, Tensor]:
    """All that a published version holds."""
    found = weights.published(run.path, version)
    assert found
    return weights.load(run.path, found.weights, "trainable")


def moved(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Largest change of a weight."""
    return max((new[name] - value).abs().max().item() for name, value in old.items())


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


def test_worker_and_trainer_agree_on_the_policy_that_sampled(trained: Trained) -> None:
    if trained.algorithm != "grpo":
        assert not any("log_prob_delta" in metrics for metrics in trained.metrics)
        return

    for metrics in trained.metrics:
        assert metrics["log_prob_delta_max"] < LOG_PROB_TOLERANCE
        assert metrics["ratio_mean"] == 1  # one update an iteration: every ratio is taken before it
        assert metrics["pg_clipfrac"] == 0


def test_plain_diffusers_draws_the_validation_images_with_the_exported_lora(trained: Trained, tmp_path: Path) -> None:
    settings = trained.run.config()
    (prompt,) = read_prompts(settings.data.validation_prompts)
    with np.load(trained.run.path / "images" / f"validation-{ITERATIONS:05d}.npz") as file:
        ours = file["images"]
    plain: Any = QwenImagePipeline.from_pretrained(trained.pipeline)
    plain.set_progress_bar_config(disable=True)
    tokens, channels = Engine(trained.run.path).model.latent_shape(HEIGHT_PX, WIDTH_PX)
    noise_BNC = flow.initial_noise(validation_seeds(prompt, settings.run.validation_seeds), tokens, channels)

    def draw() -> np.ndarray[Any, np.dtype[np.float32]]:
        return plain(
            prompt=prompt.text,
            negative_prompt=" ",
            true_cfg_scale=GUIDANCE,
            height=HEIGHT_PX,
            width=WIDTH_PX,
            num_inference_steps=STEPS,
            latents=noise_BNC,
            output_type="np",
        ).images

    before = draw()
    plain.load_lora_weights(export_lora(trained.run.path, tmp_path / "lora"))
    after = draw()

    np.testing.assert_allclose(ours / 255, after, atol=1 / 255)  # half a level of rounding, and float32's own
    assert np.abs(after - before).max() > 4 / 255
