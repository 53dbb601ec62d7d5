"""Diffusion transformers behind one small interface: texts and noise in, images out.

The only door to diffusers and peft. A further model family is one more file with one class,
and one more case in `load`.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from spotlight.records import WITHOUT_GPU, SpotlightError
from spotlight.rl import memory
from spotlight.rl.checkpoints import FAMILIES, survey
from spotlight.rl.models.base import Conditioning as Conditioning
from spotlight.rl.models.base import Model as Model
from spotlight.rl.models.pipeline import Loading as Loading

if TYPE_CHECKING:
    from spotlight.config import Config, ModelSection
    from spotlight.store.node import Node

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(settings: ModelSection, node: Node | None = None, *, base: bool = True) -> Model:
    """The model that the settings name, on its device, ready to be trained or sampled.

    Args:
        node: holds the base weights for all its processes, so that only the first of them reads the checkpoint.
        base: False: the base weights of a checkpoint are not read, which is enough for the updates of a LoRA. Embedded
            models are small and always read.

    Raises:
        SpotlightError: the directory is not a pipeline of that family, or a file in it is damaged.
    """
    device = device_of(settings)
    loading = Loading(
        device=device,
        dtype=DTYPES[settings.dtype],
        vae_dtype=None if settings.vae_dtype == "auto" else DTYPES[settings.vae_dtype],
        vae_tiling=settings.vae_tiling,
        gradient_checkpointing=settings.gradient_checkpointing,
        base=base,
        text_tokens=settings.text_tokens,
        shift=settings.shift,
    )
    match settings.name:
        case "tiny-text" | "tiny-mixed":
            from spotlight.rl.models.tiny_text import MIXED, TWO_DIGITS, TinyText

            variant = MIXED if settings.name == "tiny-mixed" else TWO_DIGITS
            return TinyText.load(settings.path, loading.device, loading.dtype, node, variant)
        case "tiny-shapes":
            from spotlight.rl.models.tiny_shapes import TinyShapes

            return TinyShapes.load(settings.path, loading.device, loading.dtype, node)
        case "qwen-image":
            from spotlight.rl.models.attention import can_pack, pack_texts
            from spotlight.rl.models.qwen_image import QwenImage

            model = QwenImage.load(settings.path, loading, node)
            if settings.pack_texts and settings.dtype != "float32" and can_pack(device):
                pack_texts(model.transformer)
            return model
        case "sd3":
            from spotlight.rl.models.sd3 import StableDiffusion3

            return StableDiffusion3.load(settings.path, loading, node)
        case "flux":
            from spotlight.rl.models.flux import Flux

            return Flux.load(settings.path, loading, node)


def works_without_gpu() -> bool:
    """Whether this process may use no GPU: it takes updates only, so it needs no texts either."""
    return WITHOUT_GPU in os.environ


def device_of(settings: ModelSection) -> torch.device:
    """The device that the settings name, unless this process may have none; of several GPUs, the one that it owns.

    Raises:
        SpotlightError: it is a GPU, and torch finds none here.
    """
    if works_without_gpu():
        return torch.device("cpu")
    device: str = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SpotlightError(
                f'on {socket.gethostname()} torch {torch.__version__} finds no GPU, and model.device = "cuda": look at '
                'nvidia-smi, install a build of torch for CUDA, or set model.device = "auto"'
            )
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return torch.device(device)


def make_own_gpu_current(settings: ModelSection) -> None:
    """Have what names no GPU go to this process's: CUDA graphs, which are captured on the current one, and rewards."""
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)


_rewards_on: list[ModelSection] = []
"""What the run of this process says of its device, once it has said so."""


def place_rewards(settings: ModelSection) -> None:
    """Have the networks of rewards, which are loaded when they are first asked, go where the run's model goes."""
    _rewards_on[:] = [settings]


def device_of_rewards() -> torch.device:
    """Where networks of rewards go: beside the run's model; without a run, on a GPU if there is one."""
    from spotlight.config import ModelSection

    return device_of(_rewards_on[0] if _rewards_on else ModelSection())


def fix_order_of_sums(settings: ModelSection) -> None:
    """Have this process's GPU compute the same bits each time, if the settings say so; before it computes anything."""
    if device_of(settings).type != "cuda":
        return
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch wants to know that cuBLAS has
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a help to find bugs
    torch.use_deterministic_algorithms(settings.deterministic)


@contextmanager
def any_order_of_sums() -> Iterator[None]:
    """Inside, kernels that have no fixed order are taken, too: networks of rewards may have no others."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(True)


def require_memory(settings: Config) -> None:
    """Find out, before anything is loaded, that a phase of the run does not fit this process's GPU.

    Raises:
        SpotlightError: one does not, or the checkpoint is unusable.
    """
    device = device_of(settings.model)
    if settings.model.name not in FAMILIES or device.type != "cuda":
        return
    found = survey(settings.model.name, settings.model.path)
    try:
        phases = memory.estimate(found, settings, lora_targets(settings.model))
    except (KeyError, TypeError) as error:
        raise SpotlightError(
            f"{settings.model.path}: config.json of its transformer or VAE has no usable {error}; copy it anew"
        ) from None
    properties = torch.cuda.get_device_properties(device)
    memory.require(phases, properties.total_memory, f"{device} ({properties.name})")


def lora_targets(settings: ModelSection) -> tuple[str, ...]:
    """Of the family that the settings name."""
    from spotlight.rl.models.flux import Flux
    from spotlight.rl.models.qwen_transformer import QwenTransformer
    from spotlight.rl.models.sd3 import StableDiffusion3

    kinds: dict[str, type[Model]] = {"sd3": StableDiffusion3, "flux": Flux}
    return kinds.get(settings.name, QwenTransformer).lora_targets
