"""FLUX.1 checkpoints: a diffusers pipeline directory as a `Model`; guidance is embedded where the transformer has it.

FLUX.1-dev is told the guidance and takes one pass; one that was not distilled so (schnell) takes true guidance.
Texts have no padding of ours: T5 pads all to one width, which the transformer was trained with and does not mask.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline, calculate_shift
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from spotlight.rl.models.base import Conditioning
from spotlight.rl.models.pipeline import Encoded, PipelineModel, shift_options


class Flux(PipelineModel):
    """A transformer of double and single blocks and an image VAE; CLIP and T5 as text encoders."""

    pipeline_class = FluxPipeline
    transformer_class = FluxTransformer2DModel
    vae_class = AutoencoderKL
    encoder_classes = {"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel}
    tokenizer_classes = {"tokenizer": CLIPTokenizer, "tokenizer_2": T5Tokenizer}
    text_tokens = 512
    negative_text = ""
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    """Those of Flow-GRPO's recipe; of the single blocks, only the attention has such names."""

    def predict(
        self, x_BNC: Tensor, sigma_B: Tensor, text: Conditioning, height_px: int, width_px: int, guidance: float
    ) -> Tensor:
        assert text.pooled_BP is not None
        dtype, device = self.dtype, x_BNC.device
        places = self._pipeline._prepare_latent_image_ids(1, *self.grid(height_px, width_px), device, dtype)
        v_BNC = self.run(
            hidden_states=x_BNC.to(dtype),
            encoder_hidden_states=text.embeds_BTD.to(dtype),
            pooled_projections=text.pooled_BP.to(dtype),
            timestep=(1000 * sigma_B).to(dtype) / 1000,  # rounded where the pipeline rounds
            guidance=torch.full_like(sigma_B, guidance) if self.embeds_guidance else None,
            img_ids=places,
            txt_ids=torch.zeros(text.embeds_BTD.shape[1], 3, device=device, dtype=dtype),
        )
        return v_BNC.float()

    def _encode_alone(self, pipeline: Any, text: str) -> Encoded:
        embeds, pooled, _ = pipeline.encode_prompt(text, device=self.device, max_sequence_length=self.text_tokens)
        return Encoded(embeds_TD=embeds[0], pooled_P=pooled[0])

    def _set_timesteps(self, scheduler: Any, steps: int, tokens: int) -> None:
        mu = calculate_shift(tokens, **shift_options(scheduler))
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), mu=mu)

    def _latents(self, x_BNC: Tensor, height_px: int, width_px: int) -> Tensor:
        self.grid(height_px, width_px)
        pipeline, config = self._pipeline, self._pipeline.vae.config
        latents: Tensor = pipeline._unpack_latents(x_BNC, height_px, width_px, pipeline.vae_scale_factor)
        return latents / config.scaling_factor + config.shift_factor
