"""Qwen-Image checkpoints: a diffusers pipeline directory as a `Model`.

Reads local files only, and no pickle. The text encoder, larger than everything else on a small
worker, is resident only inside `QwenImage.preload`, and only if a text is missing from the cache.

Shapes: B samples, N latent tokens, C channels of a token, T text tokens, D text features.
"""

from __future__ import annotations

import fcntl
import gc
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from spotlight.records import SpotlightError
from spotlight.rl.models.base import Conditioning, Model
from spotlight.store.node import Node, NotOnNode, fingerprint
from spotlight.store.rundir import atomic_write

NEGATIVE = " "
CHAT_TOKEN = "<|im_start|>"
TEXT_MULTIPLE = 8
"""Text widths are rounded up to it, so that text splits among up to 8 ranks."""


class QwenImage(Model):
    """A Qwen-Image transformer and VAE on one device, and the encoded texts of one run on the host."""

    def __init__(self, path: Path, pipeline: Any, device: torch.device) -> None:
        self._path = path
        self._pipeline = pipeline
        self.device = device
        self.transformer = pipeline.transformer
        self._texts: dict[str, Tensor] = {}
        """Encoded tokens (T, D) by text, without padding."""

    @classmethod
    def load(cls, path: str, device: torch.device, dtype: torch.dtype, node: Node | None = None) -> QwenImage:
        """Load all but the text encoder from a directory that ``save_pretrained`` wrote.

        Args:
            node: holds the networks for all its processes. The first one reads the checkpoint; on the CPU the
                parameters are views of the node's memory, on a GPU they are copied from there.

        Raises:
            SpotlightError: the directory is not a Qwen-Image pipeline, or a file in it is damaged.
        """
        directory = Path(path)
        diffusers.utils.logging.disable_progress_bar()  # a run shows its own progress
        transformers.utils.logging.disable_progress_bar()
        _require_pipeline(directory)
        parts: dict[str, Any] = {
            "scheduler": _part(FlowMatchEulerDiscreteScheduler, directory, "scheduler"),
            "text_encoder": None,
            "tokenizer": None,
        }
        for name, kind in (("vae", AutoencoderKLQwenImage), ("transformer", QwenImageTransformer2DModel)):
            source = _on_node(node, kind, directory, name, dtype) if node else directory
            parts[name] = _weights(kind, source, name, torch_dtype=dtype).to(device)
        return cls(directory, QwenImagePipeline(**parts), device)

    def preload(self, texts: Sequence[str], cache: Path | None = None) -> None:
        """Encode a run's texts and the negative prompt once; the text encoder is gone afterwards.

        Every process of a run must preload the same texts, because the width of a text, and so the
        rounding of a forward pass, follows from the longest.

        Args:
            texts: all that `encode` will be asked for.
            cache: a safetensors file; texts found in it are not encoded, others are added to it.

        Raises:
            SpotlightError: the cache or a file of the text encoder is damaged.
        """
        wanted = sorted({*texts, NEGATIVE})
        self._texts = self._run_text_encoder(wanted) if cache is None else self._through(cache, wanted)
        self.__dict__.pop("negative", None)  # encoded at another width

    def _through(self, cache: Path, texts: Sequence[str]) -> dict[str, Tensor]:
        """What the cache has of the texts; the rest is encoded by one process while the others wait for it."""
        with cache.with_name(f"{cache.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by closing
            stored = _read_cache(cache) if cache.exists() else {}
            if missing := [text for text in texts if _key(text) not in stored]:
                stored |= {_key(text): tokens for text, tokens in self._run_text_encoder(missing).items()}
                with atomic_write(cache) as file:
                    file.write(save(stored))
        return {text: stored[_key(text)] for text in texts}

    @torch.no_grad()
    def _run_text_encoder(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """One text at a time: in a batch, the padding of its neighbours would change the last bits."""
        dtype = self.transformer.dtype
        encoder = _weights(Qwen2_5_VLForConditionalGeneration, self._path, "text_encoder", dtype=dtype)
        parts: dict[str, Any] = {
            "scheduler": None,
            "vae": None,
            "transformer": None,
            "text_encoder": encoder.to(self.device),
            "tokenizer": _part(Qwen2Tokenizer, self._path, "tokenizer"),
        }
        pipeline: Any = QwenImagePipeline(**parts)
        if CHAT_TOKEN not in pipeline.tokenizer.get_vocab():  # from_pretrained is content without a vocabulary
            raise SpotlightError(
                f"{self._path / 'tokenizer'}: its vocabulary has no {CHAT_TOKEN}, with which every prompt begins; "
                "copy the pipeline anew"
            )
        # A text alone has no padding, so the mask that comes along is always None.
        encoded = {text: pipeline.encode_prompt(text, device=self.device)[0][0].cpu().contiguous() for text in texts}
        del pipeline, parts, encoder
        gc.collect()  # modules refer to each other in cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return encoded

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Look preloaded texts up; padded to the run's one width, with the padding masked out.

        Raises:
            SpotlightError: a text was not preloaded.
        """
        for text in texts:
            if text not in self._texts:
                raise SpotlightError(
                    f"the text {text!r} was not encoded when the run began, and the text encoder of "
                    f"{self._path} is no longer in memory: pass every text to preload()"
                )
        longest = max(len(tokens) for tokens in self._texts.values())
        width = -(-longest // TEXT_MULTIPLE) * TEXT_MULTIPLE
        features = self._texts[NEGATIVE].shape[1]
        embeds_BTD = torch.zeros(len(texts), width, features, dtype=self.transformer.dtype)
        mask_BT = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens = self._texts[text]
            embeds_BTD[row, : len(tokens)] = tokens
            mask_BT[row, : len(tokens)] = True
        return Conditioning(embeds_BTD=embeds_BTD.to(self.device), mask_BT=mask_BT.to(self.device))

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        unit = 2 * self._pipeline.vae_scale_factor  # a token is a patch of 2 x 2 latent pixels
        if height_px % unit or width_px % unit:
            heights, widths = _around(height_px, unit), _around(width_px, unit)
            raise SpotlightError(
                f"{self._path} draws sizes in multiples of {unit} px, and model.height_px x model.width_px is "
                f"{height_px} x {width_px}; the nearest sizes are "
                + " or ".join(f"{height} x {width}" for height in heights for width in widths)
            )
        return height_px // unit, width_px // unit

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        """The checkpoint's own schedule, shifted by the number of tokens as its pipeline does.

        Raises:
            SpotlightError: the schedule is not one of descending levels, as with a single step.
        """
        scheduler = self._pipeline.scheduler
        tokens, _ = self.latent_shape(height_px, width_px)
        given = {
            parameter: scheduler.config[name]
            for parameter, name in (
                ("base_seq_len", "base_image_seq_len"),
                ("max_seq_len", "max_image_seq_len"),
                ("base_shift", "base_shift"),
                ("max_shift", "max_shift"),
            )
            if name in scheduler.config
        }
        with np.errstate(invalid="ignore"):  # stretching a single step to the terminal level divides 0 by 0
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), mu=calculate_shift(tokens, **given))
        sigmas = tuple(scheduler.sigmas.tolist())
        if not all(high > low for high, low in zip(sigmas, sigmas[1:], strict=False)):
            raise SpotlightError(
                f"{self._path / 'scheduler'} gives the noise levels {sigmas} for {steps} steps, which do not "
                "descend: take at least 2 steps (rollout.steps, exploration.steps)"
            )
        return sigmas

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        self.grid(height_px, width_px)
        vae, pipeline = self._pipeline.vae, self._pipeline
        x = pipeline._unpack_latents(x_BNC.to(self.device), height_px, width_px, pipeline.vae_scale_factor)
        std, mean = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_std, vae.config.latents_mean)
        )
        latents = (x.float() * std + mean).to(vae.dtype)
        # One image at a time: a VAE's activations at full size are many times those of the transformer.
        images = torch.cat([vae.decode(latent, return_dict=False)[0][:, :, 0].float() for latent in latents.split(1)])
        pixels: NDArray[np.float32] = pipeline.image_processor.postprocess(images, output_type="np")
        return (pixels * 255).round().astype(np.uint8)


def _require_pipeline(directory: Path) -> None:
    index = directory / "model_index.json"
    expected = QwenImagePipeline.__name__
    try:
        found = json.loads(index.read_text()).get("_class_name")
    except FileNotFoundError:
        raise SpotlightError(
            f"{directory}: {'has no model_index.json' if directory.is_dir() else 'no such directory'}; "
            f"model.path must name a diffusers {expected} directory on this machine"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise SpotlightError(f"{index}: not a readable pipeline index ({error}); copy the pipeline anew") from None
    if found != expected:
        raise SpotlightError(f"{index}: the pipeline is of class {found!r}, and model.name needs {expected!r}")


def _part(kind: Any, directory: Path, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(directory, subfolder=name, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise SpotlightError(f"{directory / name}: not loadable as {kind.__name__}: {error}") from error


def _weights(kind: Any, directory: Path, name: str, **dtype: torch.dtype) -> Any:
    """A frozen network. What from_pretrained passes over is checked: which file is cut short, and absent weights."""
    for file in sorted((directory / name).glob("*.safetensors")):
        _require_whole(file)
    network, report = _part(kind, directory, name, use_safetensors=True, output_loading_info=True, **dtype)
    if missing := sorted(report["missing_keys"]):
        raise SpotlightError(
            f"{directory / name}: {len(missing)} weights that {kind.__name__} needs are absent, such as {missing[0]}; "
            "copy the pipeline anew"
        )
    return network.requires_grad_(False).eval()


def _on_node(node: Node, kind: Any, directory: Path, name: str, dtype: torch.dtype) -> Path:
    """The node's copy of one network, in the layout and place of the checkpoint's but already of this dtype.

    Loading from it copies nothing: diffusers maps a file whose dtype is the one wanted. Without room on the
    node, it is the checkpoint itself.
    """
    files = [file for file in (directory / name).glob("*") if file.is_file()]
    key = fingerprint(files, name, str(dtype))

    def write(copy: Path) -> None:
        _weights(kind, directory, name, torch_dtype=dtype).save_pretrained(copy / name)

    try:
        return node.make(key, write, size_bytes=sum(file.stat().st_size for file in files))
    except NotOnNode:
        return directory


def _require_whole(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass  # opening compares the header's sizes with the file's
    except (SafetensorError, OSError) as error:
        raise SpotlightError(f"{file}: damaged or cut short ({error}); copy it anew") from None


def _read_cache(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise SpotlightError(f"{file}: damaged cache of encoded texts ({error}); delete it to encode anew") from None


def _key(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _around(size_px: int, unit_px: int) -> list[int]:
    below = size_px // unit_px * unit_px
    sizes = {size_px} if below == size_px else {below, below + unit_px}
    return sorted(sizes - {0})
