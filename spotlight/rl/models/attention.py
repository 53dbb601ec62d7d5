"""Qwen-Image's attention on a GPU: texts of several lengths without a mask (`model.pack_texts`).

Under a mask torch has one backward whose sums have a fixed order, and with two samples of 1280 px it doubles a training
pass (docs/results/gpu.md, "On a GPU"). Here what counts of a sample is one sequence and its padding another, which no
one reads, so flash attention can take all of them: its own fixed order costs a fourteenth. At 1280 px a forward pass
takes three quarters of the time, at 512 px the same.

Shapes: B samples, S tokens of text and image together, T of text, H heads, D features of a head.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor

CAPABLE = (8, 0)
"""Of a GPU, for flash attention."""

_counts_BT: ContextVar[Tensor | None] = ContextVar("counts_BT", default=None)
_diffusers: Any = transformer_qwenimage
_with_mask = _diffusers.dispatch_attention_fn


def can_pack(device: torch.device) -> bool:
    """Whether torch and the device have flash attention for it; ROCm, on which nobody tried, counts as without."""
    has_it = torch.version.cuda is not None and find_spec("torch.nn.attention.varlen") is not None
    return device.type == "cuda" and has_it and torch.cuda.get_device_capability(device) >= CAPABLE


def pack_texts(transformer: Any) -> None:
    """Have a transformer of Qwen-Image, in half precision on a device that `can_pack`, compute so, outside of gangs."""
    _diffusers.dispatch_attention_fn = _dispatch
    for block in transformer.transformer_blocks:
        block.attn.processor = Packing()


class Packing(QwenDoubleStreamAttnProcessor2_0):
    """Diffusers' own, but for what it makes of a mask."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,  # diffusers hands on what it finds among the names
    ) -> Any:
        plain: Any = super().__call__
        compute = partial(plain, attn, hidden_states, encoder_hidden_states)
        others = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
        if self._parallel_config is not None:
            return compute(encoder_hidden_states_mask, **others)
        token = _counts_BT.set(encoder_hidden_states_mask)
        try:
            return compute(None, **others)
        finally:
            _counts_BT.reset(token)


def _dispatch(query_BSHD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, **named: Any) -> Tensor:
    counts_BT = _counts_BT.get()
    if counts_BT is None:
        output: Tensor = _with_mask(query_BSHD, key_BSHD, value_BSHD, **named)
        return output
    return packed(query_BSHD, key_BSHD, value_BSHD, counts_BT)


def packed(query_BSHD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, counts_BT: Tensor) -> Tensor:
    """Attention among the tokens that count, and among those of the padding.

    Args:
        counts_BT: which of the first T tokens count: of each sample, the first so many.
    """
    from torch.nn.attention.varlen import varlen_attn

    (batch, tokens), text = query_BSHD.shape[:2], counts_BT.shape[1]
    # The image first: then what counts is in one piece, and the padding behind it
    q, k, v = (each.roll(-text, 1).flatten(0, 1) for each in (query_BSHD, key_BSHD, value_BSHD))
    begins_B = torch.arange(0, batch * tokens, tokens, device=counts_BT.device)
    pads_B = begins_B + tokens - text + counts_BT.sum(1)
    ends = torch.stack([pads_B, begins_B + tokens], 1).flatten()
    bounds = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    output = varlen_attn(q, k, v, bounds, bounds, tokens, tokens)
    assert isinstance(output, Tensor)
    return output.unflatten(0, (batch, tokens)).roll(text, 1)
