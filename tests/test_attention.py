"""Qwen-Image's attention without a mask: what diffusers makes of the mask, padding aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from gangs import TEXTS, gradients, tiny_model, velocity
from pipelines import qwen_image_of_layers
from spotlight import config
from spotlight.config import ModelSection
from spotlight.rl import models
from spotlight.rl.models import Loading, Model, attention, fix_order_of_sums
from spotlight.rl.models.attention import Packing, can_pack, pack_texts, packed
from spotlight.rl.models.qwen_image import QwenImage

TINY = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
TEXT, IMAGE, HEADS, FEATURES = 8, 24, 4, 32
LENGTHS = (8, 3, 5)


def by_sequences(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, *most: int) -> Tensor:
    """Flash attention's rule, for where there is no GPU: each sequence by itself."""
    parts = []
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        assert 0 <= end - begin <= most[0]
        query, key, value = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        parts.append(functional.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", by_sequences)


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, that learn; and which tokens of the texts count."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), TEXT + IMAGE, HEADS, FEATURES)
    made = [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(3)]
    counts_BT = torch.arange(TEXT) < torch.tensor(LENGTHS)[:, None]
    return made, counts_BT.to(device)


def learned(output: Callable[..., Tensor], made: list[Tensor], counts_BT: Tensor) -> list[Tensor]:
    """What is computed of the tokens that count, and the gradients of it."""
    counts_BS = torch.cat([counts_BT, counts_BT.new_ones(len(counts_BT), IMAGE)], 1)
    found = output(*made, counts_BT)[counts_BS]
    weights = torch.linspace(-1, 1, found.numel(), device=found.device, dtype=found.dtype).view_as(found)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), made)]


def masked(q: Tensor, k: Tensor, v: Tensor, counts_BT: Tensor) -> Tensor:
    mask_BS = torch.cat([counts_BT, counts_BT.new_ones(len(counts_BT), IMAGE)], 1)
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(query, key, value, mask_BS[:, None, None]).transpose(1, 2)


def test_tokens_that_count_attend_to_each_other_and_to_no_padding(without_gpu: None) -> None:
    made, counts_BT = drawn()

    for found, expected in zip(learned(packed, made, counts_BT), learned(masked, made, counts_BT), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
def test_a_gpu_attends_as_precisely_as_under_a_mask_with_the_same_bits_each_time() -> None:
    fix_order_of_sums(ModelSection(device="cuda"))
    exact = learned(masked, *drawn("cpu", torch.float64))
    once, again, under_mask = (learned(by, *drawn("cuda", torch.bfloat16)) for by in (packed, packed, masked))

    for found, same, other, expected in zip(once, again, under_mask, exact, strict=True):
        assert torch.equal(found, same)
        off, others = ((each.cpu().double() - expected).norm() / expected.norm() for each in (found, other))
        assert off < max(1e-2, 1.5 * others)


def packing(model: Model) -> Model:
    """The same model, its processors as on a GPU."""
    for block in model.transformer.transformer_blocks:
        block.attn.processor = Packing()
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_transformer_computes_and_learns_as_under_its_mask(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    monkeypatch.setattr(transformer_qwenimage, "dispatch_attention_fn", attention._dispatch)
    plain, ours = tiny_model(lora=True), packing(tiny_model(lora=True))

    torch.testing.assert_close(velocity(ours), velocity(plain), atol=1e-4, rtol=0)
    found, expected = (gradients(model, checkpointed=checkpointed) for model in (ours, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3 * float(abs(other).max()), rtol=0)


@pytest.mark.parametrize(
    ("settings", "has_flash", "capability", "packs"),
    [
        ([], True, (9, 0), True),
        (["model.pack_texts=false"], True, (9, 0), False),
        (["model.dtype=float32"], True, (9, 0), False),
        ([], False, (9, 0), False),
        ([], True, (7, 5), False),
    ],
)
def test_texts_are_packed_where_a_gpu_has_flash_attention_for_them(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], has_flash: bool, capability: tuple[int, int], packs: bool
) -> None:
    monkeypatch.setattr(transformer_qwenimage, "dispatch_attention_fn", attention._with_mask)
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if has_flash else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = tiny_model(lora=True)
    monkeypatch.setattr(QwenImage, "load", lambda *_: model)
    large = ["model.name=qwen-image", "model.path=x", "model.height_px=64", "model.width_px=64", "model.dtype=bfloat16"]
    large += ["train.lora_rank=4"]

    loaded = models.load(config.load(TINY, [*large, *settings]).model)

    processors = [block.attn.processor for block in loaded.transformer.transformer_blocks]
    assert [isinstance(each, Packing) for each in processors] == [packs] * len(processors)
    assert (attention._diffusers.dispatch_attention_fn is attention._dispatch) == packs


def test_without_a_gpu_nothing_is_packed() -> None:
    assert not can_pack(torch.device("cpu"))


@pytest.mark.gpu
def test_a_large_transformer_on_a_gpu_predicts_what_it_does_under_its_mask(tmp_path: Path) -> None:
    device = torch.device("cuda")
    path = qwen_image_of_layers(tmp_path / "checkpoint", 2)
    model = QwenImage.load(str(path), Loading(device=device, dtype=torch.bfloat16))
    model.preload(TEXTS)
    plain = velocity(model)
    pack_texts(model.transformer)
    assert all(isinstance(block.attn.processor, Packing) for block in model.transformer.transformer_blocks)

    ours = velocity(model)

    off = abs(ours - plain).max() / abs(plain).max()
    assert 0 < off < 3e-2
