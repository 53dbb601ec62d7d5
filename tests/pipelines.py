"""Builds a tiny Qwen-Image pipeline directory: the real on-disk layout, random weights, no hub.

Same bytes on every call: the seed is fixed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

TEXT_DIM = 16
PACKED_CHANNELS, LATENT_CHANNELS = 16, 4
"""A packed token is a 2 x 2 patch of latent pixels."""
PX_PER_TOKEN = 8
"""2 ** 2 of the VAE (two stages down), times the patch of 2."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_qwen_image(directory: Path) -> Path:
    """Write a pipeline of about half a million random weights to ``directory``, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "scheduler": checkpoint_scheduler(),
            "vae": _vae(),
            "text_encoder": _text_encoder(),
            "tokenizer": _tokenizer(),
            "transformer": _transformer(),
        }
    pipeline: Any = QwenImagePipeline(**parts)
    pipeline.save_pretrained(directory, safe_serialization=True)
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


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "hidden_size": TEXT_DIM,
        "intermediate_size": 2 * TEXT_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "bos_token_id": 256,
        "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
