"""Qwen-Image checkpoints: a diffusers pipeline directory as a `Model`, with true guidance and masked padding.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from spotlight.records import SpotlightError
from spotlight.rl.models.pipeline import Encoded, PipelineModel, shift_options
from spotlight.rl.models.qwen_transformer import QwenTransformer

CHAT_TOKEN = "<|im_start|>"


class QwenImage(QwenTransformer, PipelineModel):
    """A Qwen-Image transformer and VAE, one text encoder."""

    pipeline_class = QwenImagePipeline
    transformer_class = QwenImageTransformer2DModel
    vae_class = AutoencoderKLQwenImage
    encoder_classes = {"text_encoder": Qwen2_5_VLForConditionalGeneration}
    tokenizer_classes = {"tokenizer": Qwen2Tokenizer}
    text_tokens = 512
    masks_padding = True

    def _encode_alone(self, pipeline: Any, text: str) -> Encoded:
        # A text alone has no padding, so the mask that comes along is always None.
        embeds_BTD = pipeline.encode_prompt(text, device=self.device, max_sequence_length=self.text_tokens)[0]
        return Encoded(embeds_TD=embeds_BTD[0])

    def _check_tokenizer(self, pipeline: Any) -> None:
        if CHAT_TOKEN not in pipeline.tokenizer.get_vocab():  # from_pretrained is content without a vocabulary
            raise SpotlightError(
                f"{self._path / 'tokenizer'}: its vocabulary has no {CHAT_TOKEN}, with which every prompt begins; "
                "copy the pipeline anew"
            )

    def _timestep(self, sigma_B: Tensor, dtype: torch.dtype) -> Tensor:
        return (1000 * sigma_B).to(dtype) / 1000  # rounded where the pipeline rounds

    def _set_timesteps(self, scheduler: Any, steps: int, tokens: int) -> None:
        mu = calculate_shift(tokens, **shift_options(scheduler))
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), mu=mu)

    def _latents(self, x_BNC: Tensor, height_px: int, width_px: int) -> Tensor:
        self.grid(height_px, width_px)
        vae, pipeline = self._pipeline.vae, self._pipeline
        x = pipeline._unpack_latents(x_BNC, height_px, width_px, pipeline.vae_scale_factor)
        std, mean = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_std, vae.config.latents_mean)
        )
        latents: Tensor = x * std + mean
        return latents

    def _pixels(self, vae: Any, latent: Tensor) -> Tensor:
        return super()._pixels(vae, latent)[:, :, 0]  # its VAE is one of videos
