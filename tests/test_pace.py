"""Paced devices: what is emulated is the emulated model's, whatever the real one does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from spotlight import config
from spotlight.device.pace import Pace
from spotlight.plan.durations import SCORE_S, seconds_per_step, train_s

SIZE: tuple[str, int, int] = ("qwen-image", 512, 512)
SAMPLES, RESERVED = 24, 3


def settings(*, train: Mapping[str, object] = MappingProxyType({}), **pace: object) -> config.Config:
    """Three reserved H100 as DiffusionNFT uses them; the real model trains its full weights."""
    tree = {
        "data": {"train_prompts": "a", "validation_prompts": "b"},
        "pools": {"reserved": {"workers": RESERVED, "usd_per_h": 10.0}},
        "rollout": {"sampler": "sde"},
        "train": {"lora_rank": 0, "timesteps": 2, "old_decay": "copy"} | dict(train),
        "pace": {"gpu": "h100"} | pace,
    }
    return config.resolve(tree, Path("/"))


def test_without_a_gpu_to_play_nothing_is_paced() -> None:
    pace = Pace(settings(gpu=""))

    assert (pace.step_s(SAMPLES, 1), pace.train_s(SAMPLES), pace.score_s(SAMPLES)) == (0, 0, 0)


def test_a_device_that_does_not_wait_is_not_paced_whatever_the_settings_say() -> None:
    pace = Pace(settings(gpu="h100"), waits=False)

    assert (pace.step_s(SAMPLES, 1), pace.train_s(SAMPLES), pace.score_s(SAMPLES)) == (0, 0, 0)


def test_work_lasts_what_the_cost_model_says_over_the_speedup() -> None:
    pace = Pace(settings(speedup=4.0))

    assert pace.step_s(8, 2) == pytest.approx(seconds_per_step(*SIZE, gpu="h100", width=2, batch=8, guidance=4.0) / 4)
    assert pace.score_s(8) == pytest.approx(8 * SCORE_S / 4)


@pytest.mark.parametrize("lora", [True, False])
def test_training_is_that_of_the_played_model_shared_by_all_reserved_workers(lora: bool) -> None:
    pace = Pace(settings(lora=lora))

    alone_s = SAMPLES * train_s(*SIZE, gpu="h100", timesteps=2, guidance=4.0, lora=lora, looks=0)
    assert pace.train_s(SAMPLES) == pytest.approx(alone_s)


def test_the_played_model_trains_a_lora_unless_it_is_told_otherwise() -> None:
    usual, full = (Pace(settings(lora=lora)).train_s(SAMPLES) for lora in (True, False))

    # Forward, and a backward pass that costs two forward ones for a LoRA, three for all weights.
    assert usual / full == pytest.approx((1 + 2) / (1 + 3))


@pytest.mark.parametrize("train", [{"updates": 2}, {"kl": 0.1}, {"old_decay": "linear"}])
def test_comparing_with_another_policy_takes_one_more_forward_pass(train: dict[str, object]) -> None:
    first_update, compared = (Pace(settings(train=more)).train_s(SAMPLES) for more in ({}, train))

    assert compared / first_update == pytest.approx((1 + 2 + 1) / (1 + 2))


@pytest.mark.parametrize("algorithm", ["nft", "grpo", "grpo-guard", "awm"])
def test_one_update_of_the_very_policy_that_sampled_takes_no_other_pass(algorithm: str) -> None:
    alone_s = SAMPLES * train_s(*SIZE, gpu="h100", timesteps=2, guidance=4.0, looks=0)

    assert Pace(settings(train={"algorithm": algorithm})).train_s(SAMPLES) == pytest.approx(alone_s)


def test_guidance_doubles_denoising_and_training() -> None:
    plain, guided = (Pace(settings(guidance=guidance)) for guidance in (1.0, 4.0))

    assert guided.step_s(8, 1) == pytest.approx(2 * plain.step_s(8, 1))
    assert guided.train_s(SAMPLES) == pytest.approx(2 * plain.train_s(SAMPLES))


def test_work_is_made_to_last() -> None:
    pace = Pace(settings())
    before_s = time.monotonic()

    with pace.lasting(0.1):
        pass
    lasted_s = time.monotonic() - before_s

    assert lasted_s >= 0.1


def test_a_wait_ends_when_its_work_is_called_off() -> None:
    def look() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), Pace(settings()).lasting(3600.0, look):
        pass
