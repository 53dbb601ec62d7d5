"""Reads what a checkpoint directory says of itself: its classes, sizes and whether its files are whole; loads nothing.

Neither torch nor diffusers is imported, so a run's settings are checked before any process is started. Only JSON and
the headers of safetensors files are read; a directory whose weights are pickled is refused, never opened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from spotlight.records import SpotlightError, record

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that can run any code when they are loaded."""
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
"""Names that diffusers, and transformers, give the weights of a network; an index of several files ends in
``.index.json``."""
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""Class of the scheduler whose noise levels are drawn with."""
STEPS_LIKE = {"num_train_timesteps": 1000, "stochastic_sampling": False, "invert_sigmas": False}
"""Of its settings, those with which it would take other steps than ours, and the values that they must have."""
NUMBERS = {"AutoencoderKL": ("shift_factor",)}
"""{class of a network: settings that must be numbers, and whose default is none}"""
HEADER_BYTES_MAX = 100_000_000
"""The largest header that the safetensors format allows."""
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Where a weights file is looked into to tell it from another, and how far each time: a megabyte of it in all."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that stands for a large one in a copy that was made without Git LFS."""
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))
"""Sets of files that hold a vocabulary; a tokenizer has one of them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What safetensors calls them."""


@record
class Family:
    """What the pipeline directories of one model family hold."""

    pipeline: str
    """Class of the pipeline, as ``model_index.json`` names it."""
    transformer: str
    """Class of the transformer, as its ``config.json`` names it."""
    vae: str
    encoders: tuple[str, ...]
    """Folders of the text encoders."""
    text_tokens: int
    """Tokens that a prompt usually takes, or that all prompts are padded to."""
    padded_to: int
    """Of these, the tokens that T5 pads prompts to unless ``model.text_tokens`` says otherwise; 0: there is no T5."""
    shares: bool
    """Whether a gang can share a forward pass: diffusers has a plan for splitting this transformer."""


FAMILIES = {
    "qwen-image": Family(
        pipeline="QwenImagePipeline",
        transformer="QwenImageTransformer2DModel",
        vae="AutoencoderKLQwenImage",
        encoders=("text_encoder",),
        text_tokens=128,
        padded_to=0,
        shares=True,
    ),
    "sd3": Family(
        pipeline="StableDiffusion3Pipeline",
        transformer="SD3Transformer2DModel",
        vae="AutoencoderKL",
        encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
        text_tokens=333,
        padded_to=256,
        shares=False,
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        transformer="FluxTransformer2DModel",
        vae="AutoencoderKL",
        encoders=("text_encoder", "text_encoder_2"),
        text_tokens=512,
        padded_to=512,
        shares=True,
    ),
}
"""{``model.name``: family}"""


@record
class Network:
    """One network of a checkpoint, as its files describe it."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """{name of a weight: shape}"""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def require_pipeline(directory: Path, expected: str) -> None:
    """Check that a directory is a pipeline of the class that the settings name.

    Raises:
        SpotlightError: it is not; the text says what it is.
    """
    index = directory / "model_index.json"
    try:
        found = json.loads(index.read_text()).get("_class_name")
    except FileNotFoundError:
        raise SpotlightError(
            f"{directory}: {'has no model_index.json' if directory.is_dir() else 'no such directory'}; "
            f"model.path must name a diffusers {expected} directory on this machine"
        ) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SpotlightError(f"{index}: not a readable pipeline index ({error}); copy the pipeline anew") from None
    if found != expected:
        raise SpotlightError(f"{index}: the pipeline is of class {found!r}, and model.name needs {expected!r}")


def require_class(directory: Path, expected: str | None) -> Mapping[str, Any]:
    """The settings of one network, which must be of the class expected, if one is.

    Raises:
        SpotlightError: ``config.json`` is missing, unreadable or of another class, lacks a number, or is of quantized
            weights.
    """
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
        found = config.get("_class_name")
    except FileNotFoundError:
        raise SpotlightError(f"{directory}: has no config.json; copy this part of the pipeline anew") from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SpotlightError(f"{file}: not readable ({error}); copy this part of the pipeline anew") from None
    if expected and found != expected:
        raise SpotlightError(f"{file}: the network is of class {found!r}, and {expected!r} is expected here")
    if expected and config.get("quantization_config"):
        raise SpotlightError(
            f"{file}: the weights are quantized (quantization_config), and plain ones are expected here: take the "
            "checkpoint that they were made from"
        )
    for name in NUMBERS.get(expected or "", ()):
        if not isinstance(config.get(name), float | int):
            raise SpotlightError(
                f"{file}: {name} is {config.get(name)!r}, and a number is expected here: take the file of the "
                "published checkpoint"
            )
    return dict(config)


def require_scheduler(directory: Path) -> None:
    """Check that a pipeline's scheduler is the one whose noise levels are drawn with: diffusers reads any as that one.

    Raises:
        SpotlightError: it is missing, unreadable or of another class, or takes other steps than ours.
    """
    file = directory / "scheduler" / "scheduler_config.json"
    try:
        config = json.loads(file.read_text())
        found = config.get("_class_name")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SpotlightError(f"{file}: not readable ({error}); copy this part of the pipeline anew") from None
    if found != SCHEDULER:
        raise SpotlightError(
            f"{file}: the scheduler is of class {found!r}, and {SCHEDULER!r} is expected here: other settings would be "
            "read as if they were its own; take the file of the published checkpoint"
        )
    for name, expected in STEPS_LIKE.items():
        if config.get(name, expected) != expected:
            raise SpotlightError(
                f"{file}: {name} is {config[name]!r}, and {expected!r} is expected here: images would not be those of "
                "the checkpoint's own pipeline; take the file of the published checkpoint"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of one network; each is whole, and none that the index names is missing.

    Raises:
        SpotlightError: there are none, or under other names only, they are pickled, one is missing or cut short.
    """
    files = _files(directory)
    for index in directory.glob("*.safetensors.index.json"):
        for name in sorted(set(_index(index).values())):
            if not (directory / name).is_file():
                raise SpotlightError(f"{directory / name}: named by {index.name}, but missing; copy it anew")
    if not files:
        pickled = sorted(file.name for file in directory.glob("*") if file.suffix in PICKLES)
        if pickled:
            raise SpotlightError(
                f"{directory}: its weights are pickled ({pickled[0]}), and a pickle can run any code when it is "
                "loaded: take a copy in safetensors, or save it so with save_pretrained(..., safe_serialization=True)"
            )
        others = sorted(file.name for file in directory.glob("*.safetensors"))
        if others:
            raise SpotlightError(
                f"{directory}: its weights are in {others[0]}, and {' or '.join(WEIGHTS)} (or its index) is expected: "
                "if they are a variant, load the pipeline with it (variant = ...), and save it without one"
            )
        raise SpotlightError(f"{directory}: has no .safetensors file; copy this part of the pipeline anew")
    for file in files:
        tensors(file)
    return files


def network(directory: Path, expected: str | None) -> Network:
    """What the files of one network say of it.

    Raises:
        SpotlightError: as `require_class` and `weight_files`.
    """
    config = require_class(directory, expected)
    shapes = {name: shape for file in weight_files(directory) for name, shape in tensors(file).items()}
    return Network(config=config, shapes=shapes)


def tensors(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file, from its header alone.

    Raises:
        SpotlightError: it is damaged, or not as long as its header says.
    """
    return {name: shape for name, (shape, _) in _header(file).items()}


def dtypes(directory: Path) -> set[str]:
    """The types of one network's weights, as safetensors names them: "F32", "BF16".

    Raises:
        SpotlightError: a file is damaged, or not as long as its header says.
    """
    return {dtype for file in _files(directory) for _, dtype in _header(file).values()}


def fingerprint(name: str, path: str | Path) -> str:
    """A hash that tells these weights from others without reading all of them: sizes, and samples of each file.

    Args:
        name: ``model.name``; of an embedded model, ``path`` is one file.
    """
    place, found = Path(path), sha256()
    if name in FAMILIES:
        folders = ("transformer", "vae", *FAMILIES[name].encoders)
        files = [file for folder in folders for file in _files(place / folder)]
    else:
        files = [place]
    for file in files:
        for sample in _samples(file):
            found.update(sample)
    return found.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """The size of a file, and bytes from all over it, its beginning and end included."""
    size = file.stat().st_size
    yield size.to_bytes(8, "big")
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as stream:
        for at in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
            stream.seek(at)
            yield stream.read(SAMPLE_BYTES)


def stored_bytes(directory: Path) -> int:
    """Bytes of all weights of one network, as they are stored."""
    return sum(file.stat().st_size for file in _files(directory))


def _files(directory: Path) -> list[Path]:
    """Of the safetensors files of one network, those that are read: there may be a variant beside them."""
    indexed = {name for index in directory.glob("*.safetensors.index.json") for name in _index(index).values()}
    return sorted(file for name in {*WEIGHTS, *indexed} if (file := directory / name).is_file())


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor."""
    _require_content(file)
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {name: (tuple(map(int, tensor["shape"])), str(tensor["dtype"])) for name, tensor in header.items()}
        expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        size = file.stat().st_size
        if size != expected:
            raise ValueError(f"{size} bytes instead of {expected}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise SpotlightError(f"{file}: damaged or cut short ({error}); copy it anew") from None
    return found


def _index(file: Path) -> dict[str, str]:
    try:
        found = {
            str(name): file.with_name(where).name for name, where in json.loads(file.read_text())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpotlightError(f"{file}: not a readable index of weights ({error}); copy it anew") from None
    return found


def require_tokenizer(directory: Path) -> None:
    """Check that a tokenizer's vocabulary is there: transformers loads one without, which encodes all texts alike.

    Raises:
        SpotlightError: it is not; the text says which files are expected, or which has no content.
    """
    if not any(all((directory / name).is_file() for name in names) for names in VOCABULARIES):
        raise SpotlightError(
            f"{directory}: has no vocabulary of a tokenizer: one of "
            f"{', '.join(' with '.join(names) for names in VOCABULARIES)} is expected; copy this part anew"
        )
    for file in sorted(filter(Path.is_file, directory.glob("*"))):
        _require_content(file)


def _require_content(file: Path) -> None:
    """
    Raises:
        SpotlightError: the file is a pointer of Git LFS.
    """
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return  # whoever reads it says so
    if is_pointer:
        raise SpotlightError(
            f"{file}: is a Git LFS pointer, without the content: run `git lfs pull` where the copy was made, and copy "
            "it anew"
        )


@record
class Survey:
    """What a whole checkpoint says of itself."""

    family: Family
    transformer: Network
    vae: Network
    encoders: tuple[Network, ...]
    """The text encoders that are there: a run whose texts are encoded already needs none."""


def survey(name: str, path: str | Path) -> Survey:
    """Look through a checkpoint without loading it.

    Args:
        name: of the family, as ``model.name`` gives it.

    Raises:
        SpotlightError: a part is missing, of another class, cut short, quantized or pickled.
    """
    family, directory = FAMILIES[name], Path(path)
    require_pipeline(directory, family.pipeline)
    require_scheduler(directory)
    there = [directory / folder for folder in family.encoders if (directory / folder).is_dir()]
    for folder in there:
        require_tokenizer(directory / folder.name.replace("text_encoder", "tokenizer"))
    return Survey(
        family=family,
        transformer=network(directory / "transformer", family.transformer),
        vae=network(directory / "vae", family.vae),
        encoders=tuple(network(folder, None) for folder in there),
    )
