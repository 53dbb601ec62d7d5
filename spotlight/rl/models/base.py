"""What every model offers: encode texts, predict velocities, decode latents, and be trained.

Nothing here knows of runs, stores or schedulers. A forward pass depends on its arguments and the
resident weights only, and the optimizer's parameters keep their identity whatever is loaded.

What holds for Qwen-Image's transformer alone says "Qwen only": another transformer replaces it.

Shapes: B samples, N latent tokens, C channels of a token, T text tokens, D text features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from numpy.typing import NDArray
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor

LORA_TARGETS = (
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
"""Qwen only: the twelve linear layers of a block that published recipes adapt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """Encoded texts. The mask is always given: diffusers treats None and all-true differently."""

    embeds_BTD: Tensor
    mask_BT: Tensor
    """True where a token counts."""

    def rows(self, index: Tensor | Sequence[int]) -> Conditioning:
        """The conditioning of the samples at ``index``, in that order."""
        at = torch.as_tensor(index, device=self.mask_BT.device)
        return Conditioning(embeds_BTD=self.embeds_BTD[at], mask_BT=self.mask_BT[at])


class Model(ABC):
    """A Qwen-Image transformer with its text and image ends.

    A family says how it encodes, how many tokens an image has, which noise levels its sampler
    visits, and how latents become pixels; the rest is common. Its own ``load`` makes it from files.
    """

    transformer: QwenImageTransformer2DModel
    """Qwen only, as is its split among the ranks of a gang (`device.sequence_parallel`)."""
    device: torch.device
    _base: dict[str, Tensor]
    """Where full-weights training started, by parameter name; empty beside a LoRA."""
    _in_reference: bool = False

    def preload(self, texts: Sequence[str], cache: Path | None = None) -> None:  # noqa: B027  # nothing is the default
        """Encode all texts of a run at once, where encoding is costly; otherwise there is nothing to do.

        Args:
            texts: all that `encode` will be asked for, besides the negative prompt.
            cache: a file that holds the encodings for the run's other processes; made if absent.
        """

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """One row a text, all of one width; a row does not depend on the other texts.

        Raises:
            SpotlightError: a text cannot be encoded; it is named.
        """

    @abstractmethod
    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Rows and columns of latent tokens.

        Raises:
            SpotlightError: the model has no such size; the text says which it has.
        """

    @abstractmethod
    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        """``steps + 1`` noise levels, from 1 down to 0."""

    @abstractmethod
    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        """Clean latents to images of shape (B, height, width, 3)."""

    def latent_shape(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Tokens N and channels C of one sample. Qwen only: the name of the channels in the transformer's settings."""
        rows, columns = self.grid(height_px, width_px)
        return rows * columns, int(self.transformer.config["in_channels"])

    @cached_property
    def negative(self) -> Conditioning:
        """What true classifier-free guidance steers away from. Qwen only: the single space that its recipes use."""
        return self.encode([" "])

    def velocity(
        self,
        x_BNC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        *,
        height_px: int,
        width_px: int,
        guidance: float,
    ) -> Tensor:
        """Predict ``v = noise - clean`` at noise levels ``sigma_B``.

        With ``guidance`` s > 1, two forward passes of B rows each are combined, per token. Qwen only: the norm of the
        mix is that of the positive pass::

            mix = neg + s (pos - neg)
            v   = mix |pos| / |mix|

        Args:
            x_BNC: noisy latents, any float dtype; the transformer computes in its own.
            sigma_B: in [0, 1].
            conditioning: B rows.

        Returns:
            Shape (B, N, C), float32.

        Source: Qwen-Image's pipeline in diffusers.
        """
        positive = self._forward(x_BNC, sigma_B, conditioning, height_px, width_px)
        if guidance == 1.0:
            return positive
        negative = self.negative.rows([0] * x_BNC.shape[0])
        against = self._forward(x_BNC, sigma_B, negative, height_px, width_px)
        combined = against + guidance * (positive - against)
        return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _forward(self, x_BNC: Tensor, sigma_B: Tensor, text: Conditioning, height_px: int, width_px: int) -> Tensor:
        """One pass of the transformer. Qwen only: the names and forms of its arguments."""
        dtype = self.transformer.dtype
        (v_BNC,) = self.transformer(
            hidden_states=x_BNC.to(dtype),
            encoder_hidden_states=text.embeds_BTD.to(dtype),
            encoder_hidden_states_mask=text.mask_BT,
            timestep=sigma_B.to(dtype),
            img_shapes=[[(1, *self.grid(height_px, width_px))]] * x_BNC.shape[0],
            return_dict=False,
        )
        return v_BNC.float()

    # What training changes: the whole transformer, or a LoRA beside it.

    def make_trainable(self, *, rank: int, alpha: float, seed: int) -> None:
        """Choose what training changes; call it once.

        Args:
            rank: of the LoRA; 0 trains every weight of the transformer.
            alpha: LoRA scale; 0 means twice the rank.
            seed: of the LoRA's initial weights.
        """
        if rank:
            self.transformer.requires_grad_(False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.transformer.add_adapter(
                    LoraConfig(
                        r=rank,
                        lora_alpha=alpha or 2 * rank,  # type: ignore[arg-type]  # peft also takes floats
                        init_lora_weights="gaussian",
                        target_modules=list(LORA_TARGETS),
                    )
                )
            for parameter in self.parameters():
                parameter.data = parameter.data.float()  # adapters learn in float32 whatever the base is
            self._base = {}
        else:
            self.transformer.requires_grad_(True)
            self._base = {name: value.detach().clone() for name, value in self.transformer.named_parameters()}
        self.transformer.eval()

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer updates, in a fixed order."""
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]

    @property
    def has_lora(self) -> bool:
        return bool(getattr(self.transformer, "_hf_peft_config_loaded", False))

    def trainable(self) -> dict[str, Tensor]:
        """What a weights version holds; the tensors are the live ones."""
        state = get_peft_model_state_dict(self.transformer) if self.has_lora else self.transformer.state_dict()
        return {name: value.detach() for name, value in state.items()}

    def load_trainable(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `trainable` returned, here or elsewhere, into the live parameters, which keep their identity."""
        live = self.trainable()
        differing = {name for name in live.keys() | state.keys() if _shape(live, name) != _shape(state, name)}
        assert not differing, f"weights of another model or LoRA rank: {sorted(differing)[:4]}"
        for name, value in live.items():
            value.copy_(state[name])

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is the one that training started from; may be nested.

        Gradients of passes made outside stay right, but nothing may be trained, loaded or
        published inside.
        """
        if self._in_reference:
            yield
            return
        self._in_reference = True
        self._exchange_reference(enter=True)
        try:
            yield
        finally:
            self._exchange_reference(enter=False)
            self._in_reference = False

    @contextmanager
    def standing_in(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these tensors are the model's `parameters`, in that order; what is loaded goes into them.

        Nothing may be trained inside, and passes made outside that await their backward need none of it.
        """
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)

    def _exchange(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.data, value.data = value.data, parameter.data

    def _exchange_reference(self, *, enter: bool) -> None:
        if self.has_lora:
            (self.transformer.disable_adapters if enter else self.transformer.enable_adapters)()
            return
        for name, parameter in self.transformer.named_parameters():
            # The storages change places: a copy in place would spoil the passes that await their backward.
            parameter.data, self._base[name] = self._base[name], parameter.data


def _shape(state: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None
