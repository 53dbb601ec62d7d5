"""Qwen-Image's transformer behind `Model`: how a forward pass is called, and how guidance is combined.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spotlight.rl.models.base import Conditioning, Model


class QwenTransformer(Model):
    """A family whose transformer is a `QwenImageTransformer2DModel`."""

    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    """The twelve linear layers of a block that published recipes adapt."""

    @property
    def embeds_guidance(self) -> bool:
        return False  # its pipeline knows of a distilled variant, of which there is no published checkpoint

    def predict(
        self, x_BNC: Tensor, sigma_B: Tensor, text: Conditioning, height_px: int, width_px: int, guidance: float
    ) -> Tensor:
        dtype = self.dtype
        v_BNC = self.run(
            hidden_states=x_BNC.to(dtype),
            encoder_hidden_states=text.embeds_BTD.to(dtype),
            encoder_hidden_states_mask=text.mask_BT,
            timestep=self._timestep(sigma_B, dtype),
            img_shapes=[[(1, *self.grid(height_px, width_px))]] * x_BNC.shape[0],
        )
        return v_BNC.float()

    def _timestep(self, sigma_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Noise levels as the transformer takes them."""
        return sigma_B.to(dtype)

    def guide(self, positive_BNC: Tensor, negative_BNC: Tensor, guidance: float) -> Tensor:
        """Per token, the mix keeps the norm of the positive pass::

            mix = neg + s (pos - neg)
            v   = mix |pos| / |mix|

        Source: Qwen-Image's pipeline in diffusers.
        """
        mix_BNC = super().guide(positive_BNC, negative_BNC, guidance)
        return mix_BNC * (positive_BNC.norm(dim=-1, keepdim=True) / mix_BNC.norm(dim=-1, keepdim=True))
