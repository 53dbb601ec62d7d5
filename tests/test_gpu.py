"""On a GPU: runs with kills, every algorithm, and gangs. One GPU is enough; those who work on it share it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

from gangs import as_if_on_hosts, gradients, tiny_model, velocity, wait_until_left
from kills import KillWorkers, client_of
from loops import apart, begun_and_ended
from pipelines import qwen_image_of_layers, write_clip
from runs import outcome, settings_file
from spotlight.device import sequence_parallel
from spotlight.device.sequence_parallel import Gang, GangBroken
from spotlight.run import Run
from spotlight.store.rows import SPANS
from test_fake_gpu import CHECKPOINT, CHECKPOINTS, EMBEDDED, SHORT, write_prompts

pytestmark = pytest.mark.gpu

ROUNDED = 1e-2
"""Of how far weights were moved: a GPU's sums have another order."""
OFF_S = 3.0
"""A member is called off so long after it joined."""
REALISTIC = (
    "model.name=qwen-image model.dtype=bfloat16 model.height_px=256 model.width_px=256 reward.name=clip-score "
    "train.lora_rank=16 train.parts=4 train.timesteps=2 rollout.guidance=2 run.iterations=2 run.validate_every=2 "
    "rollout.prompts=2"
)
"""As many tokens as 512 px are in the published model."""


def run_under_fire(directory: Path, overrides: list[str], struck: bool) -> Run:
    """One reserved and two spot workers on one GPU; some are killed in mid-rollout, exploration, training."""
    run = Run(settings_file(directory), ["model.device=cuda", *overrides]).start()
    if struck:
        client = client_of(run)
        for name, pool in (("rollout", "spot"), ("explore-r", "spot"), ("train", "reserved")):
            client.register_plugin(KillWorkers(name, pool=pool, count=1), name=f"kill-{name}")
    run.wait()
    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "graphs"), [("embedded", "false"), ("qwen-image", "false"), ("embedded", "true"), ("qwen-image", "true")]
)
def test_workers_killed_on_a_gpu_change_no_bit(tmp_path: Path, model: str, graphs: str) -> None:
    """Nor does it whether the passes of the run with kills are captured in training, too."""
    overrides: list[str] = []
    if model == "qwen-image":
        checkpoint, clip = qwen_image_of_layers(tmp_path / "checkpoint", 2), write_clip(tmp_path / "clip")
        overrides = [*REALISTIC.split(), f"model.path={checkpoint}", f"reward.path={clip}"]

    quiet = run_under_fire(tmp_path / "quiet", overrides, struck=False)
    struck = run_under_fire(tmp_path / "struck", [*overrides, f"train.cuda_graphs={graphs}"], struck=True)

    lost = [row["phase"] for row in struck.directory.rows(SPANS) if row["outcome"] == "lost"]
    assert len(lost) == 3
    assert outcome(struck.directory.path) == outcome(quiet.directory.path)


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_algorithm_learns_on_a_gpu_what_it_learns_on_a_processor(tmp_path: Path, name: str) -> None:
    assert_same_on_both(tmp_path, f"{SHORT} {EMBEDDED[name]}")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_checkpoint_learns_on_a_gpu_what_it_learns_on_a_processor(tmp_path: Path, name: str) -> None:
    path, clip = CHECKPOINTS[name](tmp_path / "checkpoint"), write_clip(tmp_path / "clip")

    assert_same_on_both(
        tmp_path, f"{CHECKPOINT} model.name={name} model.path={path} reward.name=clip-score reward.path={clip}"
    )


def assert_same_on_both(directory: Path, overrides: str) -> None:
    write_prompts(directory)
    began, here = begun_and_ended(settings_file(directory), [*overrides.split(), "model.device=cpu"])
    _, there = begun_and_ended(settings_file(directory), [*overrides.split(), "model.device=cuda"])

    assert apart(began, here) > 0
    assert apart(here, there) < apart(began, here) * ROUNDED


# Gangs


@pytest.mark.parametrize("connected_by", ["nccl", "gloo"])
def test_a_gang_shares_passes_and_is_left_when_a_member_is_lost(tmp_path: Path, connected_by: str) -> None:
    spawn(member, (tmp_path, connected_by), nprocs=2)


def member(rank: int, folder: Path, connected_by: str) -> None:
    """Twice in a gang of two, alone in between and afterwards; then the other is lost in the middle of a pass."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    if connected_by == "nccl":
        as_if_on_hosts(rank)
        sequence_parallel._device_name = lambda device: str(rank)
    else:
        sequence_parallel._device_name = lambda device: "the same"
    model: Any = tiny_model(lora=True, device=device)
    alone, alone_gradients = velocity(model), gradients(model)

    def gang(turn: int, called_off: Callable[[], str | None] = lambda: None) -> Gang:
        return Gang(
            model.transformer,
            meeting=folder / f"{turn}",
            name=f"turn {turn}",
            rank=rank,
            width=2,
            device=device,
            called_off=called_off,
            timeout_s=60.0,
        )

    for turn in range(2):
        with gang(turn) as shared:
            assert shared._queues == (connected_by == "nccl")
            assert np.abs(velocity(model) - alone).max() < 1e-4 * np.abs(alone).max()
            for found, expected in zip(gradients(model, shared), alone_gradients, strict=True):
                assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
        assert np.array_equal(velocity(model), alone)
    if rank:
        model.transformer.get_submodule("transformer_blocks.1").register_forward_hook(lambda *_: os._exit(0))
    joined_s: list[float] = []

    def called_off() -> str | None:
        return "called off" if joined_s and time.monotonic() > joined_s[0] + OFF_S else None

    def pass_with_one_that_ends() -> None:
        with gang(2, called_off):
            joined_s.append(time.monotonic())
            velocity(model)

    with pytest.raises(GangBroken) as raised:
        pass_with_one_that_ends()
    assert "took longer" not in str(raised.value)
    assert np.array_equal(velocity(model), alone)
    wait_until_left()
