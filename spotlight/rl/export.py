"""Writes a weights version in the form that plain diffusers loads, and proves that it does.

Nothing appears under the asked name before a fresh transformer, loaded as any other program would load
it, gives the outputs of the trained one, its LoRA rounded to the base's type as diffusers does.
Runs on the CPU, and holds one transformer at a time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin, QwenImageLoraLoaderMixin, SD3LoraLoaderMixin
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor

from spotlight.config import Config
from spotlight.files import shown, writing
from spotlight.records import Policy, SpotlightError, WeightsRef
from spotlight.rl import models
from spotlight.rl.sample import find_version, open_trained
from spotlight.store import weights
from spotlight.store.rundir import RunDir

LOADERS: dict[type, Any] = {
    QwenImageTransformer2DModel: QwenImageLoraLoaderMixin,
    SD3Transformer2DModel: SD3LoraLoaderMixin,
    FluxTransformer2DModel: FluxLoraLoaderMixin,
}
LORA_FILE = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for."""
TOLERANCE = 1e-5
"""Largest error, as a share of the largest output. Equal files give 0.0 on the same machine; a lost alpha gave 0.3."""

MERGED_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""The same where a LoRA was added to weights of that type, which rounds them."""
EFFECT_LOST_MAX = 0.5
"""Share of a LoRA's effect on the outputs that this rounding may lose."""


def export_weights(
    run_dir: str | Path,
    to: str | Path,
    version: int | None = None,
    policy: Policy | None = None,
    *,
    merged: bool = False,
) -> Path:
    """Write a version of a run's weights to a new directory.

    A LoRA becomes the file that ``pipeline.load_lora_weights(to)`` reads, alpha included. Full
    weights (``train.lora_rank = 0``) become a directory for the ``from_pretrained(to)`` of the transformer's class.

    Args:
        run_dir: of a finished or stopped run.
        to: made here; may exist if it is empty.
        version: the latest if not given.
        policy: which of its weights; those that were validated if not given.
        merged: write the whole transformer, as full weights are written, with the LoRA added to its weights.

    Returns:
        ``to``.

    Raises:
        SpotlightError: no such run or version, ``to`` is taken, or what was written does not load
            back with equal outputs.
    """
    run, to = open_trained(run_dir), Path(to)
    ref = find_version(run.url, version)
    if policy is not None and policy not in weights.PARTS:
        raise SpotlightError(f"policy = {shown(policy)}: expected {' or '.join(map(repr, weights.PARTS))}")
    if to.exists() and (not to.is_dir() or any(to.iterdir()) or to.samefile(Path.cwd())):
        raise SpotlightError(f"{to}: exists already; export to a new directory, or delete it first")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        staging_place = tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent)
    with staging_place as staging, writing(to):
        unchecked = Path(staging) / "unchecked"
        expected, base = _write(run, ref, policy or run.config().validation_policy, unchecked, merged=merged)
        found = _probe(_load_with_diffusers(run.config(), unchecked))
        error, size = (found - expected).abs().max(), expected.abs().max()
        tolerance = MERGED_TOLERANCE[run.config().model.dtype] if merged else TOLERANCE
        if not error <= tolerance * size:  # also when it is not a number
            raise SpotlightError(
                f"{to}: version {ref.version} of {run_dir} was written, but plain diffusers does not give the outputs "
                f"of the trained model with it (largest difference {error:.3g}, largest output {size:.3g}), so it "
                "was deleted: compare the installed diffusers and peft with constraints.txt"
            )
        if base is not None:
            lost, effect = (found - expected).norm(), (expected - base).norm()
            if lost > EFFECT_LOST_MAX * effect + TOLERANCE * expected.norm():
                raise SpotlightError(
                    f"{to}: version {ref.version} of {run_dir} was merged, but rounding to {run.config().model.dtype} "
                    f"takes {lost / effect:.0%} of what was trained, so it was deleted: export the LoRA itself, "
                    "without --merged"
                )
        for file in unchecked.iterdir():  # safetensors lets nobody else read what it writes
            file.chmod(unchecked.stat().st_mode & 0o666)
        unchecked.replace(to)
    return to


def _write(
    run: RunDir, ref: WeightsRef, policy: Policy, directory: Path, *, merged: bool
) -> tuple[Tensor, Tensor | None]:
    """Write the version; returns the outputs that plain diffusers must have with it, and of a merge those before it."""
    settings = run.config()
    model = _load(settings)
    base = _probe(model) if merged else None
    train = settings.train
    model.make_trainable(rank=train.lora_rank, alpha=train.lora_alpha, seed=settings.run.seed, reference=False)
    model.load_trainable(weights.load(run.url, ref, weights.PARTS[policy]))
    if merged and model.has_lora:
        expected = _probe(model)
        model.transformer.fuse_lora()
        model.transformer.unload_lora()
        model.transformer.save_pretrained(directory)
        return expected, base
    if model.has_lora:
        _loader(model).save_lora_weights(
            directory,
            transformer_lora_layers=dict(model.trainable()),
            # Without the adapter's settings, the loader silently takes the rank for alpha.
            transformer_lora_adapter_metadata=model.transformer.peft_config["default"].to_dict(),
        )
    else:
        model.transformer.save_pretrained(directory)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.transformer.dtype)  # as diffusers does with the float32 it reads
    return _probe(model), base


def _load_with_diffusers(settings: Config, directory: Path) -> models.Model:
    """The base model with the LoRA, or the full weights, through diffusers' own loaders only."""
    model = _load(settings)
    if not (directory / LORA_FILE).exists():
        model.transformer = type(model.transformer).from_pretrained(
            directory, torch_dtype=model.transformer.dtype, local_files_only=True, use_safetensors=True
        )
        return model
    loader = _loader(model)
    state, metadata = loader.lora_state_dict(
        str(directory), weight_name=LORA_FILE, return_lora_metadata=True, local_files_only=True, use_safetensors=True
    )
    alphas = {"network_alphas": None} if loader is FluxLoraLoaderMixin else {}
    loader.load_lora_into_transformer(state, transformer=model.transformer, metadata=metadata, **alphas)
    return model


def _loader(model: models.Model) -> Any:
    """The class with which diffusers saves and loads a LoRA of this transformer."""
    return LOADERS[type(model.transformer)]


def _load(settings: Config) -> models.Model:
    return models.load(settings.model.model_copy(update={"device": "cpu"}))


@torch.no_grad()
def _probe(model: models.Model) -> Tensor:
    """Predictions for one small random input, at noise levels from start to end; float32."""
    generator = torch.Generator().manual_seed(0)
    levels, text, config = (1.0, 0.5, 0.1), 8, model.transformer.config
    height_px, width_px = model.small_px
    tokens_BNC = torch.randn(len(levels), *model.latent_shape(height_px, width_px), generator=generator)
    texts_BTD = torch.randn(len(levels), text, config["joint_attention_dim"], generator=generator)
    pooled_BP = torch.randn(len(levels), config.get("pooled_projection_dim", 1), generator=generator)
    conditioning = models.Conditioning(
        embeds_BTD=texts_BTD, mask_BT=torch.ones(texts_BTD.shape[:2], dtype=torch.bool), pooled_BP=pooled_BP
    )
    return model.predict(tokens_BNC, torch.tensor(levels), conditioning, height_px, width_px, 3.5)
