"""What every model offers: encode texts, predict velocities, decode latents, and be trained.

Nothing here knows of runs, stores or schedulers, nor of one transformer's arguments: those are a family's. A forward
pass depends on its arguments and the resident weights only, and the optimizer's parameters keep their identity
whatever is loaded.

Shapes: B samples, N latent tokens, C channels of a token, T text tokens, D text features, P features of a whole text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from spotlight.records import record
from spotlight.rl.models import lora
from spotlight.rl.models.captured import CapturedPasses


@record
class Conditioning:
    """Encoded texts. The mask is always given: diffusers treats None and all-true differently."""

    embeds_BTD: Tensor
    mask_BT: Tensor
    """True where a token counts."""
    pooled_BP: Tensor | None = None
    """One vector a text, for families that want one."""

    def rows(self, index: Tensor | Sequence[int]) -> Conditioning:
        """The conditioning of the samples at ``index``, in that order."""
        at = torch.as_tensor(index, dtype=torch.long, device=self.mask_BT.device)  # also where there is none
        pooled = None if self.pooled_BP is None else self.pooled_BP[at]
        return Conditioning(embeds_BTD=self.embeds_BTD[at], mask_BT=self.mask_BT[at], pooled_BP=pooled)


class Model(ABC):
    """A transformer with its text and image ends.

    A family says how it encodes, how many tokens an image has, which noise levels its sampler visits, how one forward
    pass is called, and how latents become pixels; the rest is common. Its own ``load`` makes it from files.

    Whether a gang can share a forward pass (`device.sequence_parallel`) is up to the transformer: diffusers must have a
    plan for it (``_cp_plan``), and its heads, its latent tokens and its text tokens must divide by the gang's width.
    """

    lora_targets: ClassVar[tuple[str, ...]]
    """Linear layers of a block that a LoRA adapts, by the end of their names."""
    negative_text: ClassVar[str] = " "
    """What true classifier-free guidance steers away from."""

    transformer: Any
    """A network of diffusers. Its settings name ``num_attention_heads``."""
    device: torch.device
    _base: dict[str, Tensor]
    """Where full-weights training started, by parameter name; empty beside a LoRA."""
    _trained: Sequence[torch.nn.Parameter] = ()
    """`parameters`, looked for once, and outside `reference`, where a LoRA has none: there are thousands of layers."""
    _in_reference: bool = False
    _capturing: bool = False

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
    def predict(
        self, x_BNC: Tensor, sigma_B: Tensor, text: Conditioning, height_px: int, width_px: int, guidance: float
    ) -> Tensor:
        """One pass of the transformer, float32; ``guidance`` is for transformers that embed it."""

    @abstractmethod
    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        """Clean latents to images of shape (B, height, width, 3)."""

    def latent_shape(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Tokens N and channels C of one sample."""
        rows, columns = self.grid(height_px, width_px)
        return rows * columns, self.token_channels

    @property
    @abstractmethod
    def small_px(self) -> tuple[int, int]:
        """Height and width of a small image that the model has: for trying a network out."""

    @property
    def token_channels(self) -> int:
        return int(self.transformer.config["in_channels"])

    @cached_property
    def dtype(self) -> torch.dtype:
        """What the transformer computes in, found once: diffusers looks through its modules each time."""
        found: torch.dtype = self.transformer.dtype
        return found

    @property
    def embeds_guidance(self) -> bool:
        """Whether guidance is an input of the transformer, so that one pass is enough."""
        return bool(self.transformer.config.get("guidance_embeds"))

    @cached_property
    def negative(self) -> Conditioning:
        """The encoded negative text."""
        return self.encode([self.negative_text])

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

        Where guidance is not embedded, ``guidance`` > 1 takes two passes of B rows each, which `guide` combines.

        Args:
            x_BNC: noisy latents, any float dtype; the transformer computes in its own.
            sigma_B: in [0, 1].
            conditioning: B rows.

        Returns:
            Shape (B, N, C), float32.
        """
        positive = self.predict(x_BNC, sigma_B, conditioning, height_px, width_px, guidance)
        if guidance == 1.0 or self.embeds_guidance:
            return positive
        negative = self.negative.rows([0] * x_BNC.shape[0])
        against = self.predict(x_BNC, sigma_B, negative, height_px, width_px, guidance)
        return self.guide(positive, against, guidance)

    def guide(self, positive_BNC: Tensor, negative_BNC: Tensor, guidance: float) -> Tensor:
        """True classifier-free guidance: ``neg + s (pos - neg)``."""
        return negative_BNC + guidance * (positive_BNC - negative_BNC)

    def run(self, **arguments: Any) -> Tensor:
        """What the transformer returns; the only door to it for `predict`."""
        if self._capturing:
            weights = (self._in_reference, *(parameter.data_ptr() for parameter in self._trained))
            (output,) = self._captured(weights, **arguments, return_dict=False)
            return output
        plain: Tensor = self.transformer(**arguments, return_dict=False)[0]
        return plain

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, a GPU repeats passes whose shapes it has seen (`captured`); gradients are those of `parameters`."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
            if "_captured" in vars(self):
                self._captured.forget_what_is_ahead()

    @cached_property
    def _captured(self) -> CapturedPasses:
        return CapturedPasses(self.transformer)

    # What training changes: the whole transformer, or a LoRA beside it.

    def make_trainable(self, *, rank: int, alpha: float, seed: int, reference: bool = True) -> None:
        """Choose what training changes; call it once.

        Args:
            rank: of the LoRA; 0 trains every weight of the transformer.
            alpha: LoRA scale; 0 means twice the rank.
            seed: of the LoRA's initial weights.
            reference: whether `reference` will be asked for, which takes a copy of all weights where all are trained.
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
                        target_modules=list(self.lora_targets),
                    )
                )
            for parameter in self.parameters():
                parameter.data = parameter.data.float()  # adapters learn in float32 whatever the base is
            if self.dtype == torch.bfloat16:
                lora.compute_in_the_networks_dtype(self.transformer)
            self._base = {}
        else:
            self.transformer.requires_grad_(True)
            start = self.transformer.named_parameters() if reference else ()
            self._base = {name: value.detach().clone() for name, value in start}
        self.transformer.eval()
        self._trained = self.parameters()

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
        assert self._base, "make_trainable was told that no reference would be asked for"
        for name, parameter in self.transformer.named_parameters():
            # The storages change places: a copy in place would spoil the passes that await their backward.
            parameter.data, self._base[name] = self._base[name], parameter.data


def _shape(state: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None
