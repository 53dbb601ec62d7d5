"""The cost model of work, against timings that others published."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight import config
from spotlight.device.pace import Pace
from spotlight.plan.durations import (
    BACKWARD_LORA,
    COLLECTIVE_S,
    GPUS,
    LAYER_S,
    LINK_EFFICIENCY,
    LOCAL_PUBLISH_S,
    LOCAL_START_UP_S,
    OCR_SCORE_S,
    PUBLISH_LORA_S,
    SCORE_S,
    UPDATE_LORA_S,
    TaskDurations,
    forward_flops,
    load_s,
    parallel_efficiency,
    seconds_per_step,
    start_up_s,
    train_s,
)
from spotlight.records import SpotlightError
from spotlight.rl.parts import Cut

EXAMPLES = Path(__file__).parents[1] / "examples"
CPU_STEP_S, CPU_STEP_LEAST_S, CPU_TRAIN_S = 0.013, 0.010, 0.0175
"""Of the embedded model on a core: a step of 8 samples and of one, and to train on one; see `GPUS`."""


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


def test_a_gang_exchanges_what_each_member_has_but_its_own_share() -> None:
    size: tuple[str, int, int] = ("qwen-image", 512, 512)

    alone_s, together_s = (seconds_per_step(*size, gpu="h100", width=width, batch=8) for width in (1, 4))

    # 60 layers with four all-to-alls each, of 2 x 3072 bytes a token; 32 x 32 of the image and 100 of the text
    sent_bytes = 8 * (32 * 32 + 100) / 4 * 2 * 3072 * 3 / 4
    exchange_s = 4 * 60 * (sent_bytes / (LINK_EFFICIENCY * 450e9) + COLLECTIVE_S)
    assert together_s == pytest.approx(alone_s / 4 + exchange_s)


def test_guidance_takes_two_passes_and_a_batch_at_least_one() -> None:
    plain, guided, full = (
        seconds_per_step("qwen-image", 512, 512, gpu="h100", guidance=guidance, batch=batch)
        for guidance, batch in ((1.0, 1), (4.0, 1), (1.0, 8))
    )

    assert guided == pytest.approx(2 * plain)
    assert full == pytest.approx(8 * plain)


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


def test_a_machine_loads_the_weights_over_its_link() -> None:
    assert load_s("qwen-image") == pytest.approx(33, rel=0.02)  # 40.9 GB at 10 Gb/s, as published
    assert start_up_s("qwen-image", boot_s=0) == load_s("qwen-image")


def test_the_embedded_model_takes_what_was_measured_on_a_core() -> None:
    measured = ["train.timesteps=8", "train.old_decay=copy"]
    embedded = TaskDurations(config.load(EXAMPLES / "ocr-tiny.toml", measured))

    assert embedded.step_s(8, 1) == pytest.approx(CPU_STEP_S, rel=0.01)
    assert embedded.step_s(1, 1) == pytest.approx(CPU_STEP_LEAST_S, rel=0.01)
    assert embedded.train_s(64) == pytest.approx(64 * CPU_TRAIN_S, rel=0.01)
    assert embedded.score_s(8) == pytest.approx(8 * OCR_SCORE_S)


def test_preferences_are_trained_on_by_pairs_alone() -> None:
    kept = ["rollout.seeds_kept=24"]
    pairs, all_of_them, more_than_there_are = (
        TaskDurations(
            config.load(EXAMPLES / "ocr-tiny.toml", [*kept, "train.algorithm=dpo", f"train.dpo_pairs={most}"])
        )
        for most in (3, 12, 13)
    )

    assert pairs.train_s(24) == pytest.approx(all_of_them.train_s(24) / 4)
    assert more_than_there_are.train_s(24) == all_of_them.train_s(24)


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_the_same_pairs_take_as_long_in_any_number_of_updates(updates: int) -> None:
    """The parts of one update are whole prompts, of which only pairs are trained on; those of several hold pairs."""
    kept = ["rollout.prompts=4", "rollout.seeds_kept=8", "train.dpo_pairs=2", "train.parts=2", "train.algorithm=dpo"]
    settings = config.load(EXAMPLES / "ocr-tiny.toml", [*kept, f"train.updates={updates}"])
    cut, durations = Cut.of(settings), TaskDurations(settings)
    groups = [prompt for prompt in range(4) for _ in range(8)]
    advantages = [float(seed) for _ in range(4) for seed in range(8)]

    parts = [cut.positions(0, u, part, advantages, groups) for u in range(updates) for part in range(cut.count)]

    at_once = TaskDurations(config.load(EXAMPLES / "ocr-tiny.toml", kept)).train_s(4 * 8)
    assert sum(durations.train_s(len(part)) for part in parts) == pytest.approx(at_once)


def test_a_run_of_its_own_model_takes_the_gpus_of_its_pools() -> None:
    overrides = ["pools.reserved.gpu=h100-aws", "pools.spot.gpu=a100-80gb"]
    durations = TaskDurations(config.load(EXAMPLES / "qwen-image-ocr.toml", overrides))
    size: tuple[str, int, int] = ("qwen-image", 512, 512)

    reserved_s = seconds_per_step(*size, gpu="h100", width=1, batch=8, guidance=4.0)
    spot_s = seconds_per_step(*size, gpu="a100", width=1, batch=8, guidance=4.0)

    assert durations.step_s(8, 1) == reserved_s
    assert durations.step_s(8, 1, "spot") == spot_s > reserved_s
    assert durations.step_s(1, 1) == durations.step_s(8, 1) / 8  # a graph is launched in no time
    assert durations.least_samples() == 1
    launched = TaskDurations(config.load(EXAMPLES / "qwen-image-ocr.toml", [*overrides, "model.cuda_graphs=false"]))
    assert launched.step_s(1, 1) == launched.step_s(1, 1, "spot") == pytest.approx(2 * 60 * LAYER_S)
    assert launched.least_samples() == pytest.approx(7.4, abs=0.1)
    assert launched.least_samples("spot") == pytest.approx(7.4 * 312 / 989, abs=0.1)
    assert durations.step_s(1, 2) == launched.step_s(1, 2) > launched.step_s(1, 1)  # a gang has no graphs
    # Two stochastic steps, of a LoRA, with old log-probabilities; whoever trains does it alone.
    assert durations.train_s(64) == 64 * train_s(*size, gpu="h100", timesteps=2, guidance=4.0)
    fewer = TaskDurations(config.load(EXAMPLES / "qwen-image-ocr.toml", [*overrides, "train.steps_used=1"]))
    assert fewer.train_s(64) == 64 * train_s(*size, gpu="h100", timesteps=1, guidance=4.0)
    on_spot = TaskDurations(
        config.load(EXAMPLES / "qwen-image-ocr.toml", [*overrides, 'strategy.train_pools=["spot"]'])
    )
    assert on_spot.train_s(64) == 64 * train_s(*size, gpu="a100", timesteps=2, guidance=4.0)


def test_no_pass_is_shorter_than_launching_its_kernels() -> None:
    few = ["model.cuda_graphs=false", "train.micro_batch=16", "pace.speedup=1"]
    usual, launched = (
        TaskDurations(config.load(EXAMPLES / "paced.toml", [*few, f"pace.layer_s={layer_s}"])) for layer_s in (0, 0.01)
    )
    guided = [
        "model.cuda_graphs=false",
        "pace.speedup=1",
        "pace.guidance=4",
        "train.timesteps=2",
        "train.kl=0.1",
        "train.micro_batch=16",
        "pace.layer_s=0.1",
    ]
    settings = config.load(EXAMPLES / "paced.toml", guided)
    layers, forwards = 60, 1 + BACKWARD_LORA + (settings.train.keeps_old or settings.train.updates > 1) + 1

    assert launched.step_s(1, 1) == launched.step_s(2, 1) > usual.step_s(2, 1)
    assert launched.step_s(64, 1) == usual.step_s(64, 1)
    assert launched.train_s(1024) == usual.train_s(1024)
    assert TaskDurations(settings).step_s(1, 1) == pytest.approx(2 * layers * 0.1)
    assert TaskDurations(settings).train_s(1) == pytest.approx(2 * layers * 0.1 * forwards)
    faster = TaskDurations(config.load(EXAMPLES / "paced.toml", [*guided, "pace.speedup=2"]))
    assert faster.train_s(1) == TaskDurations(settings).train_s(1) / 2
    assert TaskDurations(settings).train_s(9) == pytest.approx(2 * 2 * layers * 0.1 * forwards)
    captured = config.load(EXAMPLES / "paced.toml", [*guided, "model.cuda_graphs=true", "train.cuda_graphs=true"])
    assert TaskDurations(captured).train_s(1) == TaskDurations(captured).train_s(9) / 9 < 2 * layers * 0.1
    not_captured = config.load(EXAMPLES / "paced.toml", [*guided, "train.cuda_graphs=true"])  # without the model's
    assert TaskDurations(not_captured).train_s(1) == TaskDurations(settings).train_s(1)
    assert TaskDurations(captured).train_s(1, 2) > TaskDurations(captured).train_s(1)  # a gang has no graphs
    stepwise = config.load(EXAMPLES / "qwen-image-ocr.toml")  # each of its two steps has passes of its own
    assert TaskDurations(stepwise).train_s(1) == pytest.approx(2 * 2 * layers * LAYER_S * (1 + BACKWARD_LORA + 1))


def test_a_paced_run_takes_what_its_devices_wait_for() -> None:
    paced = config.load(EXAMPLES / "paced.toml", ["pace.speedup=3"])
    durations, pace = TaskDurations(paced), Pace(paced)

    assert (
        durations.step_s(8, 2)
        == pace.step_s(8, 2)
        == pytest.approx(seconds_per_step("qwen-image", 512, 512, gpu="h100", width=2, batch=8, guidance=4.0) / 3)
    )
    assert (durations.train_s(64), durations.score_s(8)) == (pace.train_s(64), pace.score_s(8))


@pytest.mark.parametrize(("score_s", "expected_s"), [("0.0", 0.0), ("0.25", 2.0)])
def test_rewards_of_a_paced_run_may_cost_something_else(score_s: str, expected_s: float) -> None:
    paced = config.load(EXAMPLES / "paced.toml", [f"pace.score_s={score_s}", "pace.speedup=1"])

    assert TaskDurations(paced).score_s(8) == pytest.approx(expected_s)


@pytest.mark.parametrize("example", ["ocr-tiny.toml", "paced.toml"])
def test_workers_that_are_processes_of_one_machine_start_at_once(example: str) -> None:
    durations = TaskDurations(config.load(EXAMPLES / example))

    assert (durations.start_up_s, durations.publish_s) == (LOCAL_START_UP_S, LOCAL_PUBLISH_S)


def test_machines_with_a_large_model_boot_and_load_it() -> None:
    file = EXAMPLES / "qwen-image-ocr.toml"
    lora, full = (
        TaskDurations(config.load(file, [f"train.lora_rank={rank}", "model.dtype=float32"])) for rank in (64, 0)
    )

    assert lora.start_up_s == full.start_up_s == start_up_s("qwen-image")
    assert full.gradient_s == 2 * load_s("qwen-image")  # in float32, and the weights are in bfloat16
    assert [lora.publish_s, full.publish_s] == pytest.approx([PUBLISH_LORA_S, PUBLISH_LORA_S * 40.9 / 0.85])


def test_an_update_takes_time_where_the_reserved_worker_has_no_gpu() -> None:
    file, works = EXAMPLES / "qwen-image-ocr.toml", ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]')
    full = ("train.lora_rank=0", "model.dtype=float32")

    takes_s = [
        TaskDurations(config.load(file, ["model.device=auto", *works, f"pools.reserved.gpu={gpu}", *more])).update_s
        for gpu, more in (("h100", ()), ("cpu", ()), ("cpu", full))
    ]

    assert takes_s == [0.0, UPDATE_LORA_S, pytest.approx(UPDATE_LORA_S * 40.9 / 0.85)]


@pytest.mark.parametrize(
    "name", ["launch_s", "form_s", "graph_s", "warm_up_s", "prepare_s", "update_s", "publish_s", "start_up_s"]
)
def test_what_the_system_costs_is_a_setting_in_real_seconds(name: str) -> None:
    paced = config.load(EXAMPLES / "paced.toml", [f"simulation.{name}=12.5"])

    assert getattr(TaskDurations(paced), name) == 12.5
