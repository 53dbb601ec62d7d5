"""Keeps the versions of what training changes: staged, published at once, verified when read.

Nothing is ever unpickled, and a published version never changes. Under the run directory lie ::

    weights/v00003/weights.safetensors      what training changes
                   optimizer.safetensors
                   old.safetensors          the policy that samples, where it is an older one
                   ema.safetensors          only if training keeps an average
                   manifest.json            hash and size of each file, and what the training measured
    weights/.staged-v00003/                 written by the training task, not yet published

Invariants:

- A version's directory appears whole, by one rename after everything in it was flushed to disk: a kill at
  any moment leaves either no such version or a complete one.
- The hash of ``weights.safetensors`` is a pure function of its tensors: names are sorted, no time is in it.
- `load` returns only bytes whose hash was checked: by itself, or when they came to its node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from spotlight.records import Policy, Published, SpotlightError, WeightsRef
from spotlight.store.decoding import from_json
from spotlight.store.node import Node, NotOnNode, Source, from_file, map_tensors

if TYPE_CHECKING:
    from torch import Tensor  # only those who touch tensors pay for torch: the driver asks for hashes alone

    Tensors = Mapping[str, Tensor | NDArray[Any]]
    """By name: all of torch, or all of numpy."""

Part = Literal["trainable", "optimizer", "old", "ema"]

_FILES: dict[Part, str] = {
    "trainable": "weights.safetensors",
    "optimizer": "optimizer.safetensors",
    "old": "old.safetensors",
    "ema": "ema.safetensors",
}
PARTS: dict[Policy, Part] = {"trained": "trainable", "old": "old", "average": "ema"}
"""Where the weights of each policy are."""
_MANIFEST = "manifest.json"
_VERSION = re.compile(r"v(\d{5,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a file of a version is to be."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version consists of: its ``manifest.json``."""

    version: int
    files: Mapping[str, FileEntry]
    metrics: Mapping[str, float]
    """What the training measured."""
    created: str = ""

    def __post_init__(self) -> None:
        if _FILES["trainable"] not in self.files:
            raise ValueError(f"files has no {_FILES['trainable']}; it has {sorted(self.files)}")


def stage(
    run_dir: Path,
    version: int,
    trainable: Tensors,
    optimizer: Tensors,
    metrics: Mapping[str, float],
    ema: Tensors | None = None,
    old: Tensors | None = None,
) -> None:
    """Write a version completely, flushed to disk, where only `publish` looks.

    A directory that an earlier attempt left behind is replaced. Tensors of a mapping may not share memory.

    Args:
        trainable: all that training changes, by name; any dtype and device. Arrays of numpy do without torch.
        optimizer: the optimizer's tensors; parameters without state are simply absent.
        metrics: what the training of this version measured.

    Raises:
        SpotlightError: a number is not finite; nothing was staged.
        OSError: for example because the disk is full; published versions stay.
    """
    for tensors in (trainable, optimizer, ema or {}):
        _check_finite(f"{run_dir}: version {version}", tensors)
    staged = _staged(run_dir, version)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    parts: dict[Part, Tensors] = {"trainable": trainable, "optimizer": optimizer}
    if old is not None:
        parts["old"] = old
    if ema is not None:
        parts["ema"] = ema
    files = {_FILES[part]: _write_tensors(staged / _FILES[part], tensors) for part, tensors in parts.items()}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(version=version, files=files, metrics=dict(metrics), created=created)
    (staged / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    _flush(staged / _MANIFEST)
    _flush(staged)


def _check_finite(where: str, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        finite = np.isfinite(tensor) if isinstance(tensor, np.ndarray) else tensor.isfinite()
        if not finite.all():
            raise SpotlightError(
                f"{where}: {name} has numbers that are not finite (NaN or infinite), so nothing was published: lower "
                'train.learning_rate, set model.dtype = "float32", or mend the weights of model.path'
            )


def publish(run_dir: Path, version: int) -> Published:
    """Make a staged version the published one, in one rename; done before, it returns what is there.

    A published version that is intact wins over a staged one, since workers may already use it; a damaged
    one is replaced.

    Raises:
        SpotlightError: there is nothing to publish, or a staged file is not what its manifest says.
    """
    staged, final = _staged(run_dir, version), _directory(run_dir, version)
    if final.exists() and _is_intact(final):
        shutil.rmtree(staged, ignore_errors=True)
        return _published(final)
    if not staged.exists():
        if final.exists():
            _verify(final)
        raise SpotlightError(
            f"{staged}: version {version} was never staged; `spotlight resume` trains it from version {version - 1}"
        )
    _verify(staged)
    _remove(final)
    staged.rename(final)
    _flush(final.parent)
    return _published(final)


def published(run_dir: Path, version: int) -> Published | None:
    """What a version's manifest says, without reading its tensors; None if it was not published.

    Raises:
        SpotlightError: its manifest is damaged.
    """
    directory = _directory(run_dir, version)
    return _published(directory) if directory.exists() else None


def latest(run_dir: Path) -> Published | None:
    """The highest published version; None before the first."""
    return published(run_dir, max(versions)) if (versions := dict(_versions(run_dir))) else None


def load(
    run_dir: Path, ref: WeightsRef, part: Part = "trainable", node: Node | None = None, peers: Sequence[Source] = ()
) -> dict[str, Tensor]:
    """One file of a published version, on the CPU: mapped from the node's memory, or read from the store.

    Args:
        node: brings the file in, once for all its processes, and maps it; if it cannot, the store is read.
        peers: asked before the store, if the node lacks the file.

    Raises:
        SpotlightError: the version or the file is absent, is not the one that ``ref`` names, or is damaged.
    """
    from safetensors.torch import load as from_bytes

    if node is not None:
        # Without room, it is read from the store as without a node; so it is when others removed it just now.
        with suppress(NotOnNode, FileNotFoundError):
            return map_tensors(bring(run_dir, ref, node, part, peers))
    return from_bytes(_content(run_dir, ref, part))


def load_arrays(run_dir: Path, ref: WeightsRef) -> dict[str, NDArray[Any]]:
    """What training changed in a published version, from the store, as arrays of numpy; torch is not needed.

    Raises:
        SpotlightError: as `load`.
    """
    from safetensors.numpy import load as from_bytes

    return dict(from_bytes(_content(run_dir, ref, "trainable")))


def _content(run_dir: Path, ref: WeightsRef, part: Part) -> bytes:
    """The bytes of one file of a version, read from the store and checked."""
    file, entry = _find(run_dir, ref, part)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise _damage(file.parent, file.name, f"{entry.bytes} bytes", "no such file") from None
    _check(file.parent, file.name, entry, len(content), sha256(content).hexdigest())
    return content


def bring(run_dir: Path, ref: WeightsRef, node: Node, part: Part = "trainable", peers: Sequence[Source] = ()) -> Path:
    """Have one file of a published version in the node's memory, its hash checked; torch is not needed.

    Found on the node, it costs milliseconds; else it comes from the first peer that sends it, or from the store.

    Raises:
        NotOnNode: there is no room, or neither a peer nor the store sent what the manifest says; `load` says more.
        SpotlightError: the version or the file is absent, or is not the one that ``ref`` names.
    """
    file, entry = _find(run_dir, ref, part)
    return node.bring(entry.sha256, entry.bytes, [*peers, from_file(file)])


def digest(run_dir: Path, ref: WeightsRef, part: Part = "trainable") -> str:
    """SHA-256 of one file of a published version, by which nodes name it."""
    return _find(run_dir, ref, part)[1].sha256


def _find(run_dir: Path, ref: WeightsRef, part: Part) -> tuple[Path, FileEntry]:
    """Where a version's file lies in the store, and its entry of the manifest."""
    directory = _directory(run_dir, ref.version)
    if not directory.exists():
        have = sorted(dict(_versions(run_dir)))
        raise SpotlightError(f"{directory}: version {ref.version} is not published; {directory.parent} has {have}")
    files = _manifest(directory).files
    name = _FILES[part]
    digest = files[_FILES["trainable"]].sha256
    if digest != ref.sha256:
        raise SpotlightError(
            f"{directory}: expected weights with sha256 {ref.sha256}, found {digest}: they belong to another run or "
            "were trained again; use the run directory that the request came from"
        )
    if name not in files:
        raise SpotlightError(f"{directory}: version {ref.version} has no {name}; it has {sorted(files)}")
    return directory / name, files[name]


def retain(run_dir: Path, keep: Collection[int]) -> None:
    """Remove every published version but those to keep; what is staged stays."""
    for version, directory in list(_versions(run_dir)):
        if version not in keep:
            _remove(directory)
    for left in (run_dir / "weights").glob(".removed-*"):
        shutil.rmtree(left, ignore_errors=True)


def _directory(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"v{version:05d}"


def _staged(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f".staged-v{version:05d}"


def _versions(run_dir: Path) -> Iterator[tuple[int, Path]]:
    for path in (run_dir / "weights").glob("v*"):
        if match := _VERSION.fullmatch(path.name):
            yield int(match[1]), path


def _write_tensors(path: Path, tensors: Tensors) -> FileEntry:
    """Write and flush one file; return its entry of the manifest."""
    # Through memory, because safetensors' own writer hides a full disk in an error of its own type.
    content = _safetensors({name: tensors[name] for name in sorted(tensors)})
    path.write_bytes(content)
    _flush(path)
    return FileEntry(sha256=sha256(content).hexdigest(), bytes=len(content))


def _safetensors(tensors: Tensors) -> bytes:
    """The file's bytes, by the library that the tensors are of."""
    arrays = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, np.ndarray)}
    if len(arrays) == len(tensors):
        from safetensors.numpy import save as save_arrays

        return bytes(save_arrays(arrays))
    from safetensors.torch import save

    others = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, np.ndarray)}
    assert not arrays, f"a version is of torch or of numpy, and {sorted(arrays)} are of numpy"
    return bytes(save({name: tensor.detach().cpu().contiguous() for name, tensor in others.items()}))


def _flush(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Take a version away in one rename, so that a kill cannot leave half of it in its place."""
    if directory.exists():
        removed = directory.with_name(f".removed-{directory.name}")
        shutil.rmtree(removed, ignore_errors=True)
        directory.rename(removed)
        shutil.rmtree(removed)


def _published(directory: Path) -> Published:
    manifest = _manifest(directory)
    weights = WeightsRef(version=manifest.version, sha256=manifest.files[_FILES["trainable"]].sha256)
    return Published(weights=weights, metrics=manifest.metrics)


def _manifest(directory: Path) -> Manifest:
    try:
        content = (directory / _MANIFEST).read_bytes()
    except OSError as error:
        raise _damage(directory, _MANIFEST, "a manifest", str(error)) from None
    return from_json(Manifest, content, directory / _MANIFEST, _way_out(directory))


def _verify(directory: Path) -> None:
    for name, entry in _manifest(directory).files.items():
        try:
            with (directory / name).open("rb") as file:
                _check(directory, name, entry, os.fstat(file.fileno()).st_size, file_digest(file, "sha256").hexdigest())
        except FileNotFoundError:
            raise _damage(directory, name, f"{entry.bytes} bytes", "no such file") from None


def _is_intact(directory: Path) -> bool:
    try:
        _verify(directory)
    except SpotlightError:
        return False
    return True


def _check(directory: Path, name: str, entry: FileEntry, size_bytes: int, digest: str) -> None:
    if size_bytes != entry.bytes:
        raise _damage(directory, name, f"{entry.bytes} bytes", f"{size_bytes} bytes")
    if digest != entry.sha256:
        raise _damage(directory, name, f"sha256 {entry.sha256}", f"sha256 {digest}")


def _damage(directory: Path, name: str, expected: str, found: str) -> SpotlightError:
    return SpotlightError(f"{directory / name}: expected {expected}, found {found}; {_way_out(directory)}")


def _way_out(directory: Path) -> str:
    return f"delete {directory} and `spotlight resume` goes on from the version before"
