"""Stable Diffusion 3 and 3.5 checkpoints: a diffusers pipeline directory as a `Model`, with true guidance.

Its transformer takes whole latents, which stand here as tokens: patches of 2 x 2 latent pixels, as it makes them
itself. Texts have no padding of ours: its encoders pad all to one width.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
    calculate_shift,
)
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from spotlight.records import SpotlightError
from spotlight.rl.models.base import Conditioning
from spotlight.rl.models.pipeline import Encoded, PipelineModel, shift_options


class StableDiffusion3(PipelineModel):
    """An MMDiT transformer and an image VAE; two CLIP text encoders and, unless it was left out, T5."""

    pipeline_class = StableDiffusion3Pipeline
    transformer_class = SD3Transformer2DModel
    vae_class = AutoencoderKL
    encoder_classes = {
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
    }
    tokenizer_classes = {"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer, "tokenizer_3": T5Tokenizer}
    text_tokens = 256
    optional_parts = ("text_encoder_3", "tokenizer_3")
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
    )
    """Those of Flow-GRPO's recipe."""

    @property
    def token_channels(self) -> int:
        return int(self.transformer.config["in_channels"] * self._patch**2)

    @property
    def _patch(self) -> int:
        return int(self.transformer.config["patch_size"])

    @property
    def _unit_px(self) -> int:
        return int(self._pipeline.vae_scale_factor) * self._patch

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        rows, columns = super().grid(height_px, width_px)
        side = int(self.transformer.config["pos_embed_max_size"])
        if max(rows, columns) > side:
            raise SpotlightError(
                f"{self._path} draws up to {side * self._unit_px} px a side, and model.height_px x model.width_px is "
                f"{height_px} x {width_px}: make the larger of them smaller"
            )
        return rows, columns

    def predict(
        self, x_BNC: Tensor, sigma_B: Tensor, text: Conditioning, height_px: int, width_px: int, guidance: float
    ) -> Tensor:
        assert text.pooled_BP is not None
        dtype = self.dtype
        v = self.run(
            hidden_states=self._unpacked(x_BNC.to(dtype), height_px, width_px),
            encoder_hidden_states=text.embeds_BTD.to(dtype),
            pooled_projections=text.pooled_BP.to(dtype),
            timestep=1000 * sigma_B,
        )
        return self._packed(v.float())

    def _packed(self, x: Tensor) -> Tensor:
        """Latents (B, channels, rows, columns) to tokens (B, N, C)."""
        batch, channels, height, width = x.shape
        patch = self._patch
        x = x.view(batch, channels, height // patch, patch, width // patch, patch).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(batch, -1, channels * patch * patch)

    def _unpacked(self, x_BNC: Tensor, height_px: int, width_px: int) -> Tensor:
        """The inverse of `_packed`."""
        rows, columns = self.grid(height_px, width_px)
        patch = self._patch
        x = x_BNC.view(len(x_BNC), rows, columns, -1, patch, patch).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(x_BNC), -1, rows * patch, columns * patch)

    def _encode_alone(self, pipeline: Any, text: str) -> Encoded:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            text,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
        )
        return Encoded(embeds_TD=embeds[0], pooled_P=pooled[0])

    def _set_timesteps(self, scheduler: Any, steps: int, tokens: int) -> None:
        dynamic = scheduler.config.get("use_dynamic_shifting")
        mu = calculate_shift(tokens, **shift_options(scheduler)) if dynamic else None
        scheduler.set_timesteps(steps, mu=mu)

    def _latents(self, x_BNC: Tensor, height_px: int, width_px: int) -> Tensor:
        config = self._pipeline.vae.config
        return self._unpacked(x_BNC, height_px, width_px) / config.scaling_factor + config.shift_factor
