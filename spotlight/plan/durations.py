"""How long work takes: a cost model of denoising, training, scoring and loading, per model, size, width and GPU.

Pure: no clock, no file, no Dask. It is calibrated to published runs; what a number is from, and what is assumed, stands
beside it. Seconds are those of one GPU or one group of GPUs; what they cost is `costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from spotlight.records import SpotlightError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """What of a diffusion transformer its speed depends on."""

    layers: int
    dim: int
    heads: int
    px_per_token: int
    """Edge of the square of pixels behind one latent token: VAE factor x patch."""
    text_tokens: int
    weights_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its maker describes it."""

    flops_per_s: float
    """Dense bfloat16."""
    bytes_per_s: float
    """Of its memory."""
    link_bytes_per_s: float
    """To its neighbours in the node, one direction."""


TRANSFORMERS = {
    # Published: the checkpoint's own settings; 20.43e9 parameters in bfloat16. About 100 text tokens is inferred.
    "qwen-image": Transformer(layers=60, dim=3072, heads=24, px_per_token=16, text_tokens=100, weights_bytes=40.9e9),
}
GPUS = {  # published: the makers' data sheets
    "a100": Gpu(flops_per_s=312e12, bytes_per_s=2.04e12, link_bytes_per_s=300e9),
    "b200": Gpu(flops_per_s=2250e12, bytes_per_s=8.0e12, link_bytes_per_s=900e9),
    "h100": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=450e9),
    "h200": Gpu(flops_per_s=989e12, bytes_per_s=4.8e12, link_bytes_per_s=450e9),
    "h800": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=200e9),
    "l40s": Gpu(flops_per_s=362e12, bytes_per_s=0.864e12, link_bytes_per_s=32e9),
}
EFFICIENCY = 0.215
"""Share of a GPU's peak that a whole run sustains. Calibrated to three published Qwen-Image runs at 512 px on H800 and
H200, which give 0.210, 0.210 and 0.221; it absorbs text encoding, VAE and waits. On other GPUs it is assumed."""
LINK_EFFICIENCY, COLLECTIVE_S = 0.7, 30e-6
"""Share of the link's peak that an all-to-all reaches, and what starting one costs. Assumed."""
SCORE_S = (420 - 360) * 4 / 512
"""GPU-seconds to score an image with a vision-language model of 8e9 parameters. Published: moving the reward off four
H800 shortened a step of 512 images from 420 to 360 s (verl-omni)."""
BACKWARD_LORA, BACKWARD_FULL = 2, 3
"""Backward passes cost this many forward ones: activations again (checkpointing), their gradients, and the weights'."""
BOOT_S = 120.0
"""From asking for a spot machine to its worker's first line. Assumed: no measurement was found."""
REGROUP_S = 0.64
"""To re-form a sequence-parallel group from survivors. Measured on two CPU cores with gloo; assumed for GPUs."""


def forward_flops(model: str, height_px: int, width_px: int) -> float:
    """Floating-point operations of one forward pass for one image.

    ``2 L 12 d^2 S + 4 L d S^2`` with ``S`` image and text tokens: the linear layers and attention.

    Raises:
        SpotlightError: no such model, or the size is not a whole number of tokens.
    """
    shape = _known(TRANSFORMERS, model, "model")
    if min(height_px, width_px) < shape.px_per_token or height_px % shape.px_per_token or width_px % shape.px_per_token:
        raise SpotlightError(
            f"{height_px} x {width_px} px is no size of {model}: both edges must be multiples of {shape.px_per_token}"
        )
    tokens = _tokens(shape, height_px, width_px)
    return 24.0 * shape.layers * shape.dim**2 * tokens + 4.0 * shape.layers * shape.dim * tokens**2


def seconds_per_step(
    model: str, height_px: int, width_px: int, *, width: int = 1, gpu: str, batch: int = 1, guidance: float = 1.0
) -> float:
    """Seconds of one denoising step of a batch on a sequence-parallel group of ``width`` GPUs in one node::

        passes * (max(batch F / (width e P), W / M) + 4 L (batch (S / width) 2 d (width - 1) / width / B + c))

    ``F`` is `forward_flops`, ``e P`` the peak times `EFFICIENCY`, ``W / M`` the time to read all weights once;
    each layer has four all-to-alls of ``2 d`` bytes per token at bandwidth ``B``, each with a latency ``c``; a width
    of 1 has none. True classifier-free guidance (above 1) takes two passes.

    Raises:
        SpotlightError: no such model or GPU, a size of no whole tokens, or a width that does not divide the heads.
    """
    shape, device = _known(TRANSFORMERS, model, "model"), _known(GPUS, gpu, "GPU")
    if width < 1 or shape.heads % width:
        raise SpotlightError(f"width {width} does not divide the {shape.heads} attention heads of {model}")
    compute_s = batch * forward_flops(model, height_px, width_px) / (width * EFFICIENCY * device.flops_per_s)
    exchange_s = 0.0
    if width > 1:
        sent_bytes = batch * _tokens(shape, height_px, width_px) / width * 2 * shape.dim * (width - 1) / width
        exchange_s = 4 * shape.layers * (sent_bytes / (LINK_EFFICIENCY * device.link_bytes_per_s) + COLLECTIVE_S)
    return _passes(guidance) * (max(compute_s, shape.weights_bytes / device.bytes_per_s) + exchange_s)


def parallel_efficiency(model: str, height_px: int, width_px: int, *, width: int, gpu: str, batch: int = 1) -> float:
    """Images per GPU-second at a width against width 1: ``t(1) / (width t(width))``, in (0, 1]."""
    alone_s, together_s = (
        seconds_per_step(model, height_px, width_px, width=w, gpu=gpu, batch=batch) for w in (1, width)
    )
    return alone_s / (width * together_s)


def train_s(
    model: str,
    height_px: int,
    width_px: int,
    *,
    gpu: str,
    timesteps: int,
    guidance: float = 1.0,
    lora: bool = True,
    old_log_probs: bool = True,
) -> float:
    """GPU-seconds to train on one sample: ``timesteps passes F (1 + backward + old) / (e P)``.

    Symbols as in `seconds_per_step`; ``backward`` is 2 forward passes for a LoRA and 3 for full weights, ``old`` is 1
    where old log-probabilities are computed again. Divide by the GPUs that share the batch.

    Raises:
        SpotlightError: no such model or GPU, or a size of no whole tokens.
    """
    device = _known(GPUS, gpu, "GPU")
    forwards = 1 + (BACKWARD_LORA if lora else BACKWARD_FULL) + old_log_probs
    flops = timesteps * _passes(guidance) * forwards * forward_flops(model, height_px, width_px)
    return flops / (EFFICIENCY * device.flops_per_s)


def load_s(model: str, *, gbit_per_s: float = 10.0) -> float:
    """Seconds to bring a model's weights over the network: ``8 weights_bytes / (1e9 gbit_per_s)``."""
    return 8 * _known(TRANSFORMERS, model, "model").weights_bytes / (1e9 * gbit_per_s)


def start_up_s(model: str, *, boot_s: float = BOOT_S, gbit_per_s: float = 10.0) -> float:
    """Seconds from asking for a machine to its first step: boot, then `load_s`."""
    return boot_s + load_s(model, gbit_per_s=gbit_per_s)


def recovery_s(model: str, *, elastic: bool, gbit_per_s: float = 10.0) -> float:
    """Seconds until a group that lost a member steps again: survivors re-form, or every process loads its weights."""
    return REGROUP_S if elastic else REGROUP_S + load_s(model, gbit_per_s=gbit_per_s)


def _tokens(shape: Transformer, height_px: int, width_px: int) -> int:
    return height_px // shape.px_per_token * (width_px // shape.px_per_token) + shape.text_tokens


def _passes(guidance: float) -> int:
    return 2 if guidance > 1 else 1


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise SpotlightError(f"there is no cost model of the {what} {name!r}; there are {', '.join(map(repr, table))}")
    return table[name]
