"""A diffusers pipeline directory as a `Model`: what all families of checkpoints have in common.

Reads local files only, and no pickle. The text encoders, larger than everything else on a small worker, are resident
only inside `PipelineModel.preload`, and only if a text is missing from the cache.

Shapes: B samples, N latent tokens, C channels of a token, T text tokens, D text features, P features of a whole text.
"""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from shutil import copyfile
from typing import Any, ClassVar, Self

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from spotlight.files import shown
from spotlight.records import SpotlightError, record
from spotlight.rl.checkpoints import (
    STORED_AS,
    dtypes,
    require_class,
    require_pipeline,
    require_scheduler,
    require_tokenizer,
    weight_files,
)
from spotlight.rl.models.base import Conditioning, Model
from spotlight.rl.models.captured import compute_blocks_again
from spotlight.store.node import Node, NotOnNode, fingerprint
from spotlight.store.objects import atomic_write
from spotlight.store.room import is_in_memory, room_bytes

logger = logging.getLogger("spotlight")

COPIES = 8
"""Files of a checkpoint that are copied to a node's memory at a time: one thread copies 2.7 GB a second, and two 4.2
(2026-11-27, two cores, files in the page cache)."""
READ = {".safetensors", ".json"}
"""Of the files of a network, those that loading it reads."""
TEXT_MULTIPLE = 8
"""Text widths are rounded up to it, so that text splits among up to 8 ranks."""
ENCODER = "encoder"
"""Under this name, the cache of texts says which encoder they are from."""
SAVE_EVERY_S, SAVE_SHARE = 30.0, 0.1
"""While texts are encoded, those done so far are saved this often, or less often where saving would take a larger
share of the time."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""So many pieces of a weights file, evenly spread, tell encoders apart: one that was trained anew differs in all."""


@record
class Loading:
    """How a checkpoint is put on a device."""

    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype | None = None
    """None: as the transformer's."""
    vae_tiling: bool = False
    gradient_checkpointing: bool = False
    base: bool = True
    """Whether the base weights are read. The updates of a LoRA need none."""
    text_tokens: int = 0
    """Most of a prompt; 0: as many as the pipeline reads."""
    shift: float = 0.0
    """Of evenly spaced noise levels; 0: the checkpoint's own schedule."""


@record
class Encoded:
    """One text, without padding."""

    embeds_TD: Tensor
    pooled_P: Tensor | None = None


class PipelineModel(Model):
    """A transformer and a VAE on one device, and the encoded texts of one run on the host.

    A family names its classes, and says how a text is encoded, which sizes there are, how the scheduler is asked, and
    how tokens are latents.
    """

    pipeline_class: ClassVar[Any]
    transformer_class: ClassVar[Any]
    vae_class: ClassVar[Any]
    encoder_classes: ClassVar[Mapping[str, Any]]
    """By folder, as are the tokenizers."""
    tokenizer_classes: ClassVar[Mapping[str, Any]]
    text_tokens: int
    """Most of a prompt; what is longer is cut. The class has what its pipeline reads unless it is told otherwise."""

    optional_parts: ClassVar[tuple[str, ...]] = ()
    """Encoders and tokenizers that a checkpoint may come without."""
    masks_padding: ClassVar[bool] = False
    """Whether the transformer takes a mask. One that does not is given texts that all have the encoders' own width."""

    def __init__(self, path: Path, pipeline: Any, loading: Loading) -> None:
        self._path = path
        self._pipeline = pipeline
        self.device = loading.device
        self._shift = loading.shift
        self.text_tokens = loading.text_tokens or type(self).text_tokens
        self.transformer = pipeline.transformer
        self._texts: dict[str, Encoded] = {}

    @classmethod
    def load(cls, path: str, loading: Loading, node: Node | None = None) -> Self:
        """Load all but the text encoders from a directory that ``save_pretrained`` wrote.

        Without its base weights the transformer has shapes only, and there is no VAE.

        Args:
            node: holds the networks for all its processes. The first one reads the checkpoint; on the CPU the
                parameters are views of the node's memory, on a GPU they are copied from there.

        Raises:
            SpotlightError: the directory is not a pipeline of this family, or a file in it is damaged or pickled.
        """
        directory = Path(path)
        diffusers.utils.logging.disable_progress_bar()  # a run shows its own progress
        transformers.utils.logging.disable_progress_bar()
        require_pipeline(directory, cls.pipeline_class.__name__)
        require_scheduler(directory)
        parts: dict[str, Any] = dict.fromkeys([*cls.encoder_classes, *cls.tokenizer_classes, "vae"])
        parts["scheduler"] = _part(FlowMatchEulerDiscreteScheduler, directory, "scheduler")
        if not loading.base:
            parts["transformer"] = _shapes(cls.transformer_class, directory, "transformer", loading.dtype)
            return cls(directory, cls.pipeline_class(**parts), loading)
        networks = (
            ("vae", cls.vae_class, loading.vae_dtype or loading.dtype),
            ("transformer", cls.transformer_class, loading.dtype),
        )
        for name, kind, dtype in networks:
            source = _on_node(node, kind, directory, name, dtype) if node else directory
            parts[name] = _weights(kind, directory, name, source, torch_dtype=dtype).to(loading.device)
        if loading.vae_tiling:
            parts["vae"].enable_tiling()
        if loading.gradient_checkpointing:
            compute_blocks_again(parts["transformer"])
        model = cls(directory, cls.pipeline_class(**parts), loading)
        model._check_vae()
        return model

    def _check_vae(self) -> None:
        """
        Raises:
            SpotlightError: it has other latents than the transformer.
        """
        scale, config = int(self._pipeline.vae_scale_factor), self._pipeline.vae.config
        channels = config.get("latent_channels") or config.get("z_dim")  # a family of your own may have neither
        if channels and channels * (self._unit_px // scale) ** 2 != self.token_channels:
            raise SpotlightError(
                f"{self._path / 'vae'}: its latents have {channels} channels, and a token of the transformer has "
                f"{self.token_channels} values of {self._unit_px // scale} x {self._unit_px // scale} latent pixels: "
                "the two are of different checkpoints; copy the pipeline anew"
            )

    # Texts

    def preload(self, texts: Sequence[str], cache: Path | None = None) -> None:
        """Encode a run's texts and the negative prompt once; the text encoders are gone afterwards.

        Every process of a run must preload the same texts, because the width of a text, and so the
        rounding of a forward pass, may follow from the longest.

        Args:
            texts: all that `encode` will be asked for.
            cache: a safetensors file; texts found in it, from the same encoders, are not encoded; others are added.

        Raises:
            SpotlightError: the cache or a file of a text encoder is damaged.
        """
        wanted = sorted({*texts, self.negative_text})
        self._texts = dict(self._run_text_encoders(wanted)) if cache is None else self._through(cache, wanted)
        self.__dict__.pop("negative", None)  # encoded at another width

    @abstractmethod
    def _encode_alone(self, pipeline: Any, text: str) -> Encoded:
        """What the pipeline's own encoders make of one text, on any device."""

    def _through(self, cache: Path, texts: Sequence[str]) -> dict[str, Encoded]:
        """What the cache has of the texts; the rest is encoded by one process while the others wait for it.

        A process that is lost meanwhile leaves what it saved last, to those that see the same file.
        """
        encoder = self._encoder_hash()
        with cache.with_name(f"{cache.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by closing
            stored = _read_cache(cache, encoder) if cache.exists() else {}
            if missing := [text for text in texts if _key(text) not in stored]:
                saved_s, took_s = time.monotonic(), 0.0
                for text, encoding in self._run_text_encoders(missing):
                    stored[_key(text)] = encoding.embeds_TD
                    if encoding.pooled_P is not None:
                        stored[_pooled_key(text)] = encoding.pooled_P
                    if time.monotonic() - saved_s >= max(SAVE_EVERY_S, took_s / SAVE_SHARE):
                        began_s = time.monotonic()
                        _write_cache(cache, stored, encoder)
                        saved_s = time.monotonic()
                        took_s = saved_s - began_s
                _write_cache(cache, stored, encoder)
        return {text: Encoded(embeds_TD=stored[_key(text)], pooled_P=stored.get(_pooled_key(text))) for text in texts}

    def _encoder_hash(self) -> str | None:
        """Names the text encoders by their content, and what they read; None where their files are not here."""
        cut = "" if self.text_tokens == type(self).text_tokens else f" {self.text_tokens}"
        digest, found = sha256(f"{self.transformer.dtype}{cut}".encode()), False
        for folder in (*self.encoder_classes, *self.tokenizer_classes):
            for file in sorted(filter(Path.is_file, (self._path / folder).glob("*"))):
                found = True
                digest.update(f"{folder}/{file.name}".encode())
                digest.update(_sampled(file) if file.suffix == ".safetensors" else file.read_bytes())
        return digest.hexdigest() if found else None

    @torch.no_grad()
    def _run_text_encoders(self, texts: Sequence[str]) -> Iterator[tuple[str, Encoded]]:
        """One text at a time: in a batch, the padding of its neighbours would change the last bits."""
        parts: dict[str, Any] = {"scheduler": None, "vae": None, "transformer": self.transformer}
        index = json.loads((self._path / "model_index.json").read_text())
        left_out = [name for name in self.optional_parts if index.get(name, (None, None))[1] is None]
        parts |= dict.fromkeys(left_out)
        for name in self.encoder_classes.keys() - left_out:
            encoder = _weights(self.encoder_classes[name], self._path, name, dtype=self.transformer.dtype)
            parts[name] = encoder.to(self.device)
        for name in self.tokenizer_classes.keys() - left_out:
            require_tokenizer(self._path / name)
            parts[name] = _part(self.tokenizer_classes[name], self._path, name)
        pipeline: Any = self.pipeline_class(**parts)
        self._check_tokenizer(pipeline)
        for text in texts:
            encoding = self._encode_alone(pipeline, text)
            self._check_features(encoding)
            pooled_P = None if encoding.pooled_P is None else encoding.pooled_P.cpu().contiguous()
            yield text, Encoded(embeds_TD=encoding.embeds_TD.cpu().contiguous(), pooled_P=pooled_P)
        del pipeline, parts, encoder
        gc.collect()  # modules refer to each other in cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_features(self, encoding: Encoded) -> None:
        """
        Raises:
            SpotlightError: the transformer takes texts with another number of features.
        """
        for name, encoded in (
            ("joint_attention_dim", encoding.embeds_TD),
            ("pooled_projection_dim", encoding.pooled_P),
        ):
            expected = self.transformer.config.get(name)  # a family of your own may have none
            if encoded is not None and expected and encoded.shape[-1] != expected:
                raise SpotlightError(
                    f"{self._path}: its text encoders give a text {encoded.shape[-1]} features, and the transformer "
                    f"takes {expected} ({name}): they are of different checkpoints; copy the "
                    "pipeline anew"
                )

    def _check_tokenizer(self, pipeline: Any) -> None:
        """Raise SpotlightError for a tokenizer that loads but is not the family's."""

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Look preloaded texts up; padded to the run's one width, with the padding masked out.

        Raises:
            SpotlightError: a text was not preloaded.
        """
        for text in texts:
            if text not in self._texts:
                raise SpotlightError(
                    f"the text {shown(text)} was not encoded when the run began, and the text encoder of "
                    f"{self._path} is no longer in memory: pass every text to preload()"
                )
        longest = max(len(encoding.embeds_TD) for encoding in self._texts.values())
        width = -(-longest // TEXT_MULTIPLE) * TEXT_MULTIPLE if self.masks_padding else longest
        negative = self._texts[self.negative_text]
        embeds_BTD = torch.zeros(len(texts), width, negative.embeds_TD.shape[1], dtype=self.transformer.dtype)
        mask_BT = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens_TD = self._texts[text].embeds_TD
            embeds_BTD[row, : len(tokens_TD)] = tokens_TD
            mask_BT[row, : len(tokens_TD)] = True
        pooled = [self._texts[text].pooled_P for text in texts] if negative.pooled_P is not None else None
        return Conditioning(
            embeds_BTD=embeds_BTD.to(self.device),
            mask_BT=mask_BT.to(self.device),
            pooled_BP=torch.stack(pooled).to(self.device) if pooled else None,  # type: ignore[arg-type]
        )

    # Sizes and schedule

    @property
    def _unit_px(self) -> int:
        """Height and width of one token."""
        return 2 * int(self._pipeline.vae_scale_factor)  # a token is a patch of 2 x 2 latent pixels

    @property
    def small_px(self) -> tuple[int, int]:
        return 4 * self._unit_px, 4 * self._unit_px

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        unit = self._unit_px
        if height_px % unit or width_px % unit:
            heights, widths = _around(height_px, unit), _around(width_px, unit)
            raise SpotlightError(
                f"{self._path} draws sizes in multiples of {unit} px, and model.height_px x model.width_px is "
                f"{height_px} x {width_px}; the nearest sizes are "
                + " or ".join(f"{height} x {width}" for height in heights for width in widths)
            )
        return height_px // unit, width_px // unit

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        """The checkpoint's own schedule, shifted by the number of tokens as its pipeline does; or that of the settings.

        Raises:
            SpotlightError: the schedule is not one of descending levels, as with a single step.
        """
        if self._shift:
            return shifted(self._shift, steps)
        scheduler = self._pipeline.scheduler
        tokens, _ = self.latent_shape(height_px, width_px)
        # Stretching a single step to the terminal level divides 0 by 0
        with np.errstate(invalid="ignore"), _loading(type(scheduler), self._path / "scheduler"):
            self._set_timesteps(scheduler, steps, tokens)
        sigmas = tuple(scheduler.sigmas.tolist())
        if not all(high > low for high, low in zip(sigmas, sigmas[1:], strict=False)):
            raise SpotlightError(
                f"{self._path / 'scheduler'} gives the noise levels {sigmas} for {steps} steps, which do not "
                "descend: take at least 2 steps (rollout.steps, exploration.steps; of `spotlight sample`, --steps)"
            )
        return sigmas

    @abstractmethod
    def _set_timesteps(self, scheduler: Any, steps: int, tokens: int) -> None:
        """Ask the scheduler for its levels, as the family's pipeline does."""

    # Pixels

    @torch.no_grad()
    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        vae, pipeline = self._pipeline.vae, self._pipeline
        latents = self._latents(x_BNC.to(self.device).float(), height_px, width_px).to(vae.dtype)
        # One image at a time: a VAE's activations at full size are many times those of the transformer.
        images = torch.cat([self._pixels(vae, latent).float() for latent in latents.split(1)])
        if not torch.isfinite(images).all():
            raise SpotlightError(
                f"the VAE, in {vae.dtype}, made pixels that are no numbers of finite latents: set model.vae_dtype = "
                '"float32"'
            )
        pixels: NDArray[np.float32] = pipeline.image_processor.postprocess(images, output_type="np")
        return (pixels * 255).round().astype(np.uint8)

    @abstractmethod
    def _latents(self, x_BNC: Tensor, height_px: int, width_px: int) -> Tensor:
        """What the VAE decodes, from tokens."""

    def _pixels(self, vae: Any, latent: Tensor) -> Tensor:
        image: Tensor = vae.decode(latent, return_dict=False)[0]
        return image


def shifted(shift: float, steps: int) -> tuple[float, ...]:
    """Levels ``s t / (1 + (s - 1) t)`` of evenly spaced t, from 1 down to 0.

    Source: SD 3 (arXiv 2403.03206); DanceGRPO's ``sd3_time_shift``.
    """
    below = (1 - step / steps for step in range(1, steps + 1))
    return (1.0, *(shift * t / (1 + (shift - 1) * t) for t in below))  # below s = 1 the first would be rounded


def shift_options(scheduler: Any) -> dict[str, Any]:
    """What the scheduler's settings say of the shift, under the names that ``calculate_shift`` has for it."""
    names = (
        ("base_seq_len", "base_image_seq_len"),
        ("max_seq_len", "max_image_seq_len"),
        ("base_shift", "base_shift"),
        ("max_shift", "max_shift"),
    )
    return {parameter: scheduler.config[name] for parameter, name in names if name in scheduler.config}


def _part(kind: Any, directory: Path, name: str, source: Path | None = None, **options: Any) -> Any:
    """
    Args:
        source: a copy of the directory that is read instead; errors name the directory.
    """
    with _loading(kind, directory / name):
        return kind.from_pretrained(source or directory, subfolder=name, local_files_only=True, **options)


@contextmanager
def _loading(kind: Any, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
        raise SpotlightError(f"{path}: not loadable as {kind.__name__}: {error}") from error


def _weights(kind: Any, directory: Path, name: str, source: Path | None = None, **dtype: torch.dtype) -> Any:
    """A frozen network, as `_part`. What from_pretrained passes over is checked: pickles, cut files, absent weights."""
    read = (source or directory) / name
    require_class(read, kind.__name__ if issubclass(kind, ModelMixin) else None)
    weight_files(read)
    network, report = _part(kind, directory, name, source, use_safetensors=True, output_loading_info=True, **dtype)
    if issubclass(kind, ModelMixin) and (left := sorted(report["unexpected_keys"])):
        raise SpotlightError(
            f"{directory / name}: {len(left)} weights have no place in the network that config.json describes, such "
            f"as {left[0]}: the two are of different checkpoints; copy the pipeline anew"
        )
    if missing := sorted(report["missing_keys"]):
        raise SpotlightError(
            f"{directory / name}: {len(missing)} weights that {kind.__name__} needs are absent, such as {missing[0]}; "
            "copy the pipeline anew"
        )
    return network.requires_grad_(False).eval()


def _shapes(kind: Any, directory: Path, name: str, dtype: torch.dtype) -> Any:
    """A network whose weights are all 0, each kept as one number: a few megabytes, whatever its size."""
    require_class(directory / name, kind.__name__)
    with _loading(kind, directory / name), torch.device("meta"):
        network = kind.from_config(kind.load_config(directory, subfolder=name, local_files_only=True))
    nothing = torch.zeros((), dtype=dtype)
    network.load_state_dict({key: nothing.expand(at.shape) for key, at in network.state_dict().items()}, assign=True)
    return network.requires_grad_(False).eval()


def _on_node(node: Node, kind: Any, directory: Path, name: str, dtype: torch.dtype) -> Path:
    """The node's copy of one network, in the layout and place of the checkpoint's but already of this dtype.

    Loading from it copies nothing: diffusers maps a file whose dtype is the one wanted. Without room on the
    node, it is the checkpoint itself; also where that is in memory already, as it should be.
    """

    def is_as_wanted() -> bool:
        return dtypes(directory / name) == {STORED_AS[str(dtype).removeprefix("torch.")]}

    if is_in_memory(directory) and is_as_wanted():
        return directory
    files = [file for file in (directory / name).glob("*") if file.is_file()]
    key = fingerprint(files, name, str(dtype))

    def write(copy: Path) -> None:
        if is_as_wanted():
            require_class(directory / name, kind.__name__)
            weight_files(directory / name)
            _copy([file for file in files if file.suffix in READ], copy / name)
        else:
            network = _weights(kind, directory, name, torch_dtype=dtype)
            if (size_bytes := network.get_memory_footprint()) > room_bytes(node.root):  # the files may be half of it
                raise NotOnNode(f"no room for {size_bytes} bytes in the node's shared memory")
            network.save_pretrained(copy / name)

    try:
        return node.make(key, write, size_bytes=sum(file.stat().st_size for file in files))
    except NotOnNode as error:
        logger.warning("%s is read by each worker: %s", directory / name, error)
        return directory


def _copy(files: Sequence[Path], to: Path) -> None:
    to.mkdir(parents=True)
    with ThreadPoolExecutor(COPIES) as threads:
        list(threads.map(lambda file: copyfile(file, to / file.name), files))


def _read_cache(file: Path, encoder: str | None) -> dict[str, Tensor]:
    """The cached texts; none if they are from other encoders than those that are here."""
    try:
        with safe_open(file, framework="pt") as opened:
            written_by = (opened.metadata() or {}).get(ENCODER)
        return load_file(file) if encoder in (None, written_by) else {}
    except (SafetensorError, OSError) as error:
        raise SpotlightError(f"{file}: damaged cache of encoded texts ({error}); delete it to encode anew") from None


def _write_cache(file: Path, stored: Mapping[str, Tensor], encoder: str | None) -> None:
    with atomic_write(file) as opened:
        opened.write(save(dict(stored), metadata={ENCODER: encoder or ""}))


def _sampled(file: Path) -> bytes:
    """Pieces of a file that tell it from any other of its kind, without reading gigabytes."""
    size = file.stat().st_size
    digest = sha256(str(size).encode())
    with file.open("rb") as stream:
        for piece in range(SAMPLES):
            stream.seek(piece * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def _key(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _pooled_key(text: str) -> str:
    return f"{_key(text)}.pooled"


def _around(size_px: int, unit_px: int) -> list[int]:
    below = size_px // unit_px * unit_px
    sizes = {size_px} if below == size_px else {below, below + unit_px}
    return sorted(sizes - {0})
