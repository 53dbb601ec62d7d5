"""xfuser is optional: nothing imports it by itself, it is refused with the reason, and never given padding."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from gangs import as_if_on_hosts, wait_until_left
from graphs.tasks.context import prepare
from runs import settings_file
from spotlight import config
from spotlight.device import xfuser_backend
from spotlight.device.engine import Engine
from spotlight.device.sequence_parallel import Gang
from spotlight.records import SpotlightError
from spotlight.store.creating import create_run

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_importing_the_engine_does_not_import_xfuser() -> None:
    assert Engine.__module__ in sys.modules
    assert "xfuser" not in sys.modules


def test_xfuser_is_refused_without_a_gpu() -> None:
    with pytest.raises(SpotlightError, match=r"needs GPUs, and the model is on cpu: .* sp\.backend = \"native\""):
        xfuser_backend.require(CPU)


def test_xfuser_that_is_not_installed_is_named_with_how_to_get_it() -> None:
    if find_spec("xfuser"):
        xfuser_backend.require(GPU)
    else:
        with pytest.raises(SpotlightError, match=r"not installed: pip install 'xfuser>="):
            xfuser_backend.require(GPU)


def test_a_run_that_cannot_have_xfuser_ends_before_its_model_is_loaded(tmp_path: Path) -> None:
    qwen = ("model.name=qwen-image", "model.path=nowhere", "model.height_px=64", "model.width_px=64")
    run = create_run(config.load(settings_file(tmp_path), ["sp.backend=xfuser", "model.device=cpu", *qwen]), 0.0)

    with pytest.raises(SpotlightError, match=r"sp\.backend = \"xfuser\""):
        prepare(str(run.path))


def test_texts_lose_their_padding_and_batches_of_different_lengths_are_refused() -> None:
    text_BTD = torch.randn(2, 8, 3)
    same, different = torch.zeros(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    same[:, :5] = True
    different[0, :5] = different[1, :6] = True
    given = {"encoder_hidden_states": text_BTD, "timestep": torch.ones(2)}

    cut = xfuser_backend.without_padding(given | {"encoder_hidden_states_mask": same})

    assert torch.equal(cut["encoder_hidden_states"], text_BTD[:, :5])
    assert cut["encoder_hidden_states_mask"] is None
    assert cut["timestep"] is given["timestep"]
    with pytest.raises(SpotlightError, match="texts of 5, 6 tokens came in one batch"):
        xfuser_backend.without_padding(given | {"encoder_hidden_states_mask": different})


def small() -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(16, 24, 24),
    ).eval()


@torch.no_grad()
def predicted(transformer: Any, device: torch.device) -> Tensor:
    """For texts of six tokens, padded to eight."""
    draw = torch.Generator().manual_seed(1)
    mask_BT = torch.arange(8).expand(2, -1) < 6
    (v_BNC,) = transformer(
        hidden_states=torch.randn(2, 64, 64, generator=draw).to(device),
        encoder_hidden_states=torch.randn(2, 8, 32, generator=draw).to(device),
        encoder_hidden_states_mask=mask_BT.to(device),
        timestep=torch.tensor([0.9, 0.3]).to(device),
        img_shapes=[[(1, 8, 8)]] * 2,
        return_dict=False,
    )
    return v_BNC.cpu()


def member(rank: int, meeting: Path) -> None:
    """Twice in a gang of two, one after the other; alone in between and afterwards."""
    as_if_on_hosts(rank)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transformer: Any = small()
    transformer.to(device)
    alone = predicted(transformer, device)
    for turn in range(2):
        with Gang(
            transformer,
            meeting=meeting.with_name(f"meeting-{turn}"),
            name=f"turn {turn}",
            rank=rank,
            width=2,
            device=device,
            called_off=lambda: None,
            timeout_s=60.0,
            share=xfuser_backend.shared,
        ):
            shared = predicted(transformer, device)
        assert (shared - alone).abs().max() <= 1e-4 * alone.abs().max()
        assert torch.equal(predicted(transformer, device), alone)
        assert not torch.distributed.is_initialized()
    wait_until_left()


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("xfuser") is None, reason="needs xfuser")
def test_a_gang_of_xfuser_predicts_what_one_gpu_does_and_leaves_nothing_behind(tmp_path: Path) -> None:
    spawn(member, (tmp_path / "meeting",), nprocs=2)
