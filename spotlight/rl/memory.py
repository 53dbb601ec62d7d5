"""Estimates the device memory of each phase of a run from its checkpoint's headers; loads nothing, asks no device.

An estimate to refuse what cannot fit, not to fill a device to the brim: allocators, kernels' workspaces and the
fragmentation of memory come on top (`SPARE`). Checked against what torch's meta device keeps; on an H100, denoising
took 42.9 GB where 46.2 were estimated, and 44.2 where it was 47.2, and an update, beside 1.7 GB of other things, 46.9
where it was 46.6 (docs/results/gpu.md). The other phases are not verified on a GPU.

Shapes: S tokens of image and text together, D width of the transformer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from spotlight.config import Config, ModelSection, TrainSection
from spotlight.plan.batching import SEEDS_MAX
from spotlight.records import SpotlightError, record
from spotlight.rl.checkpoints import DTYPE_BYTES, Network, Survey, stored_bytes
from spotlight.rl.models.captured import KEPT_LEARNING
from spotlight.rl.parts import Cut

SAVED_DOUBLE, SAVED_SINGLE = 31, 27
"""Values that a block keeps for its backward pass, over S D: a block with a branch for the text, and one without (as in
FLUX.1). Counted on the meta device, less the attention's matrices, which fused attention does not keep."""
LIVE = 16
"""Values, over S D, that are alive at once inside one block without a backward: a normed input, queries, keys and
values, and the four times wider middle of its last part."""
VAE_LIVE, VIDEO_VAE_LIVE = 3, 9
"""Tensors of the VAE's widest full-size layer that are alive at once; and the same of a VAE for videos, whose
convolutions put two frames in front of an image."""
SPARE = 0.08
"""Share of a device's memory that is left for what is not counted here."""
OPTIMIZER_BYTES = 16
"""Bytes of a trained value: itself, its gradient and two moments in float32."""
CAPTURED = "CUDA graphs"
"""Name of what captured denoising passes keep."""
OLD_COPIES = 2
"""Copies of an old policy: the trainer's, and the one that samples."""


@record
class Phase:
    """What one phase holds in memory at its peak."""

    name: str
    parts: Mapping[str, float]
    """Bytes, by what they are for."""
    way_out: str

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


def estimate(survey: Survey, settings: Config, lora_targets: Sequence[str]) -> tuple[Phase, ...]:
    """Every phase of a run on one device.

    Args:
        lora_targets: ends of the names of the layers that a LoRA adapts.
    """
    model, train = settings.model, settings.train
    size = DTYPE_BYTES[model.dtype]
    vae_size = size if model.vae_dtype == "auto" else DTYPE_BYTES[model.vae_dtype]
    weights = {"transformer": survey.transformer.parameters * size, "VAE": survey.vae.parameters * vae_size}
    copies = OLD_COPIES * train.keeps_old + bool(train.ema_decay)
    trained = _trained_bytes(survey.transformer, train, lora_targets, size, copies)
    row = tokens(survey, model) * width(survey.transformer) * size
    passes = 2 if settings.rollout.guidance > 1 and not survey.transformer.config.get("guidance_embeds") else 1
    explored = settings.exploration.request_seeds if settings.strategy.exploration != "off" else 0
    images = max(settings.rollout.request_seeds or SEEDS_MAX, explored, settings.run.validation_seeds)
    pixels = (min(model.height_px, 512) * min(model.width_px, 512)) if model.vae_tiling else _pixels(settings)
    denoising = LIVE * row * images
    live = VIDEO_VAE_LIVE if survey.vae.config.get("temperal_downsample") else VAE_LIVE
    scored = reward_bytes(settings)
    rewards = {"networks of rewards": scored} if scored else {}
    encoders = sum(network.parameters for network in survey.encoders) * size
    samples, units = _largest_part(Cut.of(settings))
    rows = min(train.micro_batch, units * (1 if train.is_stepwise else train.timesteps))  # of the largest pass
    kept = _saved(survey.transformer, checkpointed=model.gradient_checkpointing) * row * passes * rows
    kept *= 2 if train.algorithm == "dpo" else 1  # the better and the worse sample of a pair
    kept /= train.width  # each rank of a gang keeps those of its own tokens
    texts = samples * text_tokens(survey, model) * survey.transformer.config["joint_attention_dim"] * size  # of a part
    learned = {CAPTURED: kept * KEPT_LEARNING} if model.cuda_graphs and train.cuda_graphs else {}
    captured = {CAPTURED: denoising + sum(learned.values())} if model.cuda_graphs else {}
    size_px = f"{model.height_px} x {model.width_px} px"
    return (
        Phase(
            name="encoding the prompts",
            parts={**weights, "text encoders": encoders},
            way_out="take a device with more memory",
        ),
        Phase(
            name=f"denoising {images} samples of {size_px}",
            parts={**weights, "what is trained": trained, **rewards, **learned, "activations": denoising},
            way_out="make rollout.request_seeds, exploration.request_seeds and run.validation_seeds smaller",
        ),
        Phase(
            name=f"decoding an image of {size_px}",
            parts={
                **weights,
                "what is trained": trained,
                **rewards,
                **captured,
                "pixels": live * _vae_channels(survey.vae) * pixels * vae_size,
            },
            way_out="set model.vae_tiling = true",
        ),
        Phase(
            name=f"training at {size_px} with{'' if model.gradient_checkpointing else 'out'} checkpointing",
            parts={**weights, "what is trained": trained, **rewards, **captured, "activations": kept, "texts": texts},
            way_out=(
                "make train.micro_batch smaller, share its passes (train.width)"
                if model.gradient_checkpointing
                else "set model.gradient_checkpointing = true, or make train.micro_batch smaller"
            )
            + (", raise train.parts" if texts > kept else ""),
        ),
    )


def require(phases: Sequence[Phase], available_bytes: float, device: str) -> None:
    """Refuse a run one of whose phases does not fit.

    Raises:
        SpotlightError: one does not; the text says which, what it needs, and what may be changed.
    """
    for phase in phases:
        if phase.total_bytes > available_bytes * (1 - SPARE):
            parts = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in phase.parts.items())
            graphs = "set model.cuda_graphs = false, " if CAPTURED in phase.parts else ""
            raise SpotlightError(
                f"{phase.name} needs about {phase.total_bytes / 1e9:.0f} GB ({parts}), and {device} has "
                f"{available_bytes / 1e9:.0f}: {phase.way_out}, {graphs}choose a smaller model.dtype "
                "or size, or take a device with more memory"
            )


def reward_bytes(settings: Config) -> float:
    """Bytes of the networks that score images beside the model, as they are stored: once loaded, they stay."""
    if settings.scores_apart:
        return 0.0
    tables = (settings.reward, *settings.reward.also)
    paths = {path for table in tables for path in (table.path, table.options.get("clip")) if isinstance(path, str)}
    return float(sum(stored_bytes(Path(path)) for path in paths if path))


def tokens(survey: Survey, model: ModelSection) -> int:
    """S: the tokens of the image, and of the longest usual text."""
    config = survey.vae.config
    stages = config.get("temperal_downsample") or config["block_out_channels"][1:]
    unit_px = 2 * 2 ** len(stages)
    return (model.height_px // unit_px) * (model.width_px // unit_px) + text_tokens(survey, model)


def text_tokens(survey: Survey, model: ModelSection) -> int:
    """The tokens of the longest usual text."""
    family = survey.family
    more = model.text_tokens - family.padded_to if model.text_tokens and family.padded_to else 0
    return family.text_tokens + more


def width(transformer: Network) -> int:
    """D: the width of the transformer."""
    return int(transformer.config["num_attention_heads"] * transformer.config["attention_head_dim"])


def _saved(transformer: Network, *, checkpointed: bool) -> float:
    """Values kept for the backward pass of the whole transformer, over S D."""
    double, single = transformer.config["num_layers"], transformer.config.get("num_single_layers") or 0
    if checkpointed:  # the inputs of all blocks, and all of one
        return float(double + single + SAVED_DOUBLE)
    return float(double * SAVED_DOUBLE + single * SAVED_SINGLE)


def _trained_bytes(transformer: Network, train: TrainSection, targets: Sequence[str], size: int, copies: int) -> float:
    if not train.lora_rank:  # gradient, two moments and perhaps where training started, all as the weights are
        return (3.0 + train.has_reference + copies) * transformer.parameters * size
    ends = tuple(f".{target}.weight" for target in targets)
    layers = [shape for name, shape in transformer.shapes.items() if name.endswith(ends)]
    return float((OPTIMIZER_BYTES + 4 * copies) * train.lora_rank * sum(map(sum, layers)))


def _largest_part(cut: Cut) -> tuple[int, int]:
    """Samples of the largest part of an update, and what its objective has rows of: the same, or pairs of them."""
    pairs = min(cut.pairs, cut.seeds // 2)  # of a prompt
    if cut.updates > 1:
        units = math.ceil(math.ceil(cut.prompts * (pairs or cut.seeds) / cut.updates) / cut.count)
        return units * (2 if pairs else 1), units
    samples = max(len(cut.span(part)) for part in range(cut.count))
    return samples, (samples // cut.seeds * pairs if pairs else samples)


def _vae_channels(vae: Network) -> int:
    return 2 * int(vae.config.get("base_dim") or vae.config["block_out_channels"][0])


def _pixels(settings: Config) -> int:
    return math.prod((settings.model.height_px, settings.model.width_px))
