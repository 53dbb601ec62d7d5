"""Builds tiny pipeline directories of every model family: the real on-disk layout, random weights, no hub.

Same bytes on every call: the seed is fixed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

TEXT_DIM, PUBLISHED_TEXT_DIM = 16, 3584
PACKED_CHANNELS, LATENT_CHANNELS = 16, 4
"""A packed token is a 2 x 2 patch of latent pixels."""
PX_PER_TOKEN = 8
"""2 ** 2 of the VAE (two stages down), times the patch of 2."""
WEIGHTS, FIRST_LAYER = "diffusion_pytorch_model", "transformer_blocks.0."
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_qwen_image(directory: Path) -> Path:
    """Write a pipeline of about half a million random weights to ``directory``, and return it."""
    return _qwen_image(directory, _transformer)


def qwen_image_of_layers(directory: Path, layers: int) -> Path:
    """The same with so many of the published transformer's 60 layers, of 0.34 billion weights each, in bfloat16."""

    def transformer() -> QwenImageTransformer2DModel:
        made = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=PACKED_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=layers,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=TEXT_DIM,
            guidance_embeds=False,
            axes_dims_rope=(16, 56, 56),
        )
        return made.to(torch.bfloat16)

    return _qwen_image(directory, transformer)


def qwen_image_as_published(directory: Path, layers: int = 60) -> Path:
    """The published transformer and VAE in shape, 41 GB with all layers; the text encoder is small.

    All layers are alike. They are written one by one, each to its own file, so that memory holds but one of them.
    """
    _qwen_image(
        directory,
        lambda: QwenImageTransformer2DModel(num_layers=1).to(torch.bfloat16),
        vae=AutoencoderKLQwenImage,
        text_encoder=lambda: _text_encoder(PUBLISHED_TEXT_DIM, heads=28, sections=[16, 24, 24]),
    )
    _repeat_layer(directory / "transformer", layers)
    return directory


def _repeat_layer(folder: Path, layers: int) -> None:
    """Make a transformer of one layer one of many."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_layers": layers}))
    rest = load_file(folder / f"{WEIGHTS}.safetensors")
    (folder / f"{WEIGHTS}.safetensors").unlink()
    layer = {name: rest.pop(name) for name in list(rest) if name.startswith(FIRST_LAYER)}
    pieces = [rest, *({name.replace("0", str(at), 1): layer[name] for name in layer} for at in range(layers))]
    files = {f"{WEIGHTS}-{at:05d}-of-{len(pieces):05d}.safetensors": piece for at, piece in enumerate(pieces, 1)}
    for file, piece in files.items():
        save_file(piece, folder / file, metadata={"format": "pt"})
    size_bytes = sum(value.nbytes for piece in pieces for value in piece.values())
    places = {name: file for file, piece in files.items() for name in piece}
    index = {"metadata": {"total_size": size_bytes}, "weight_map": places}
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index))


def _qwen_image(
    directory: Path,
    transformer: Callable[[], QwenImageTransformer2DModel],
    vae: Callable[[], AutoencoderKLQwenImage] | None = None,
    text_encoder: Callable[[], Qwen2_5_VLForConditionalGeneration] | None = None,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "scheduler": checkpoint_scheduler(),
            "vae": (vae or _vae)(),
            "text_encoder": (text_encoder or _text_encoder)(),
            "tokenizer": _tokenizer(),
            "transformer": transformer(),
        }
    pipeline: Any = QwenImagePipeline(**parts)
    pipeline.save_pretrained(directory, safe_serialization=True)
    return directory


def tiny_sd3(directory: Path, *, without_t5: bool = False) -> Path:
    """Write a Stable Diffusion 3.5 pipeline of random weights to ``directory``, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),  # as published: a shift that is always the same
            "vae": _image_vae(),
            "text_encoder": _clip(CLIPTextModelWithProjection),
            "tokenizer": clip_tokenizer(),
            "text_encoder_2": _clip(CLIPTextModelWithProjection),
            "tokenizer_2": clip_tokenizer(),
            "text_encoder_3": None if without_t5 else _t5(2 * TEXT_DIM),
            "tokenizer_3": None if without_t5 else _t5_tokenizer(),
            "transformer": SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=2 * TEXT_DIM,
                caption_projection_dim=64,
                pooled_projection_dim=2 * TEXT_DIM,
                pos_embed_max_size=24,
                qk_norm="rms_norm",
                dual_attention_layers=(0,),
            ),
        }
    StableDiffusion3Pipeline(**parts).save_pretrained(directory, safe_serialization=True)
    return directory


def tiny_flux(directory: Path, *, guidance_embeds: bool = True) -> Path:
    """Write a FLUX.1-dev pipeline (or, without embedded guidance, schnell) of random weights, and return its place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "scheduler": FlowMatchEulerDiscreteScheduler(
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
                shift=3.0,
                use_dynamic_shifting=True,
            ),
            "vae": _image_vae(),
            "text_encoder": _clip(CLIPTextModel),
            "tokenizer": clip_tokenizer(),
            "text_encoder_2": _t5(TEXT_DIM),
            "tokenizer_2": _t5_tokenizer(),
            "transformer": FluxTransformer2DModel(
                patch_size=1,
                in_channels=PACKED_CHANNELS,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=TEXT_DIM,
                pooled_projection_dim=TEXT_DIM,
                guidance_embeds=guidance_embeds,
                axes_dims_rope=(8, 4, 4),
            ),
        }
    FluxPipeline(**parts).save_pretrained(directory, safe_serialization=True)
    return directory


def checkpoint_scheduler(shift_terminal: float | None = 0.02) -> FlowMatchEulerDiscreteScheduler:
    """With the settings of the published Qwen-Image checkpoint."""
    return FlowMatchEulerDiscreteScheduler(
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=shift_terminal,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )


def _transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=PACKED_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        # Unlike the defaults of zero and one, these show a mean or a deviation that is left out.
        latents_mean=[0.1, -0.2, 0.3, -0.4],
        latents_std=[0.5, 1.0, 1.5, 2.0],
    )


def _tokenizer() -> Qwen2Tokenizer:
    """One token a byte: ids 0..255 are the letters that byte-level BPE gives to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = range(0x100, 0x100 + 256 - len(printable))  # spaces and control bytes, moved up in order
    letters = [chr(code) for code in (*printable, *shifted)]
    vocabulary = {token: index for index, token in enumerate((*letters, *SPECIAL_TOKENS))}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(SPECIAL_TOKENS[1:]))


def _text_encoder(
    dim: int = TEXT_DIM, heads: int = 2, sections: Sequence[int] = (1, 1, 2)
) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "hidden_size": dim,
        "intermediate_size": 2 * TEXT_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "bos_token_id": 256,
        "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 1e6},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": dim}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _image_vae() -> AutoencoderKL:
    """Scales by 4, as the tiny Qwen-Image's does."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        layers_per_block=1,
        scaling_factor=1.5,  # unlike one and zero, these show a scale or a shift that is left out
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip(kind: Any) -> Any:
    config = CLIPTextConfig(
        hidden_size=TEXT_DIM,
        projection_dim=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=514,
        max_position_embeddings=77,
        bos_token_id=512,
        eos_token_id=513,
    )
    return kind(config)


def clip_tokenizer() -> CLIPTokenizer:
    """One token a byte, and one a byte that ends a word."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in (*printable, *range(0x100, 0x100 + 256 - len(printable)))]
    tokens = (*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5(dim: int) -> T5EncoderModel:
    config = T5Config(
        d_model=dim, d_kv=8, d_ff=2 * dim, num_layers=2, num_heads=2, vocab_size=256, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config).eval()


def _t5_tokenizer() -> T5Tokenizer:
    """One token a printable character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [("\u2581", -1.0), *((chr(code), -2.0) for code in range(ord("!"), ord("~") + 1))]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512)


def write_clip(path: Path) -> Path:
    """A tiny CLIP of random weights, in the real layout."""
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": 514, "max_position_embeddings": 77, "bos_token_id": 512, "eos_token_id": 513}
    vision = {**layers, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    model.save_pretrained(path)
    clip_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return path
