"""The cost model of work, against timings that others published."""

from __future__ import annotations

import pytest

from spotlight.plan.durations import (
    GPUS,
    REGROUP_S,
    SCORE_S,
    forward_flops,
    load_s,
    parallel_efficiency,
    recovery_s,
    seconds_per_step,
    start_up_s,
    train_s,
)
from spotlight.records import SpotlightError


@pytest.mark.parametrize(("edge_px", "tera"), [(512, 16), (1280, 119)])
def test_a_forward_pass_takes_the_operations_that_its_layers_add_up_to(edge_px: int, tera: float) -> None:
    flops = forward_flops("qwen-image", edge_px, edge_px)

    assert flops == pytest.approx(tera * 1e12, rel=0.02)  # the table that these are from has two digits


@pytest.mark.parametrize(
    ("gpu", "guidance", "lora", "scored_apart", "published_s"),
    [("h800", 4.0, True, False, 420), ("h800", 4.0, True, True, 360), ("h200", 1.0, False, False, 250)],
)
def test_published_qwen_image_steps_are_reproduced(
    gpu: str, guidance: float, lora: bool, scored_apart: bool, published_s: float
) -> None:
    # verl-omni, 4 GPUs, 512 images of 512 px, 10 steps of which 2 are trained on; a fifth GPU scores in one of them.
    size: tuple[str, int, int] = ("qwen-image", 512, 512)
    denoise_s = 10 * seconds_per_step(*size, gpu=gpu, batch=16, guidance=guidance) / 16
    update_s = train_s(*size, gpu=gpu, timesteps=2, guidance=guidance, lora=lora)

    iteration_s = 512 / 4 * (denoise_s + update_s + (0 if scored_apart else SCORE_S))

    assert iteration_s == pytest.approx(published_s, rel=0.05)


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("edge_px", [512, 1280])
def test_wider_is_faster_and_less_efficient(gpu: str, edge_px: int) -> None:
    size: tuple[str, int, int] = ("qwen-image", edge_px, edge_px)

    times_s = [seconds_per_step(*size, width=width, gpu=gpu, batch=4) for width in (1, 2, 4, 8)]
    shares = [parallel_efficiency(*size, width=width, gpu=gpu, batch=4) for width in (1, 2, 4, 8)]

    assert times_s == sorted(times_s, reverse=True)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0


def test_parallel_groups_pay_off_more_at_high_resolution() -> None:
    low, high = (parallel_efficiency("qwen-image", edge, edge, width=4, gpu="h100") for edge in (512, 1280))

    assert 0 < low < high < 1


def test_guidance_takes_two_passes_and_a_batch_at_least_one() -> None:
    one, guided, full = (
        seconds_per_step("qwen-image", 512, 512, gpu="h100", guidance=guidance, batch=batch)
        for guidance, batch in ((1.0, 1), (4.0, 1), (1.0, 8))
    )

    assert guided == pytest.approx(2 * one)
    assert full == pytest.approx(8 * one)


def test_a_step_never_takes_less_than_reading_the_weights() -> None:
    step_s = seconds_per_step("qwen-image", 512, 512, gpu="h100", width=24)

    assert step_s > 40.9e9 / 3.35e12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "flux"}, "no cost model of the model 'flux'; there are 'qwen-image'"),
        ({"gpu": "tpu"}, "no cost model of the GPU 'tpu'; there are 'a100'"),
        ({"width": 5}, "width 5 does not divide the 24 attention heads"),
        ({"height_px": 500}, "500 x 512 px is no size of qwen-image: both edges must be multiples of 16"),
        ({"height_px": 0}, "0 x 512 px is no size"),
    ],
)
def test_what_the_cost_model_does_not_know_is_refused_by_name(change: dict[str, object], message: str) -> None:
    known = {"model": "qwen-image", "height_px": 512, "width_px": 512, "gpu": "h100"}

    with pytest.raises(SpotlightError, match=message):
        seconds_per_step(**known | change)  # type: ignore[arg-type]  # the values are of every type


def test_survivors_recover_without_loading_weights() -> None:
    elastic_s, rigid_s = (recovery_s("qwen-image", elastic=elastic) for elastic in (True, False))

    assert elastic_s == REGROUP_S
    assert load_s("qwen-image") == pytest.approx(33, rel=0.02)  # 40.9 GB at 10 Gb/s, as published
    assert rigid_s > load_s("qwen-image")
    assert start_up_s("qwen-image", boot_s=0) == load_s("qwen-image")
