"""Keeps the versions of what training changes: staged, published atomically, verified when read.

Nothing is ever unpickled, and a published version never changes. In a run directory lie ::

    weights/v00003/weights.safetensors      what training changes
                   optimizer.safetensors
                   old.safetensors          the policy that samples, where it is an older one
                   ema.safetensors          only if training keeps an average
                   manifest.json            hash and size of each file, and what the training measured
    weights/.writing-v00003-<attempt>/      being written by an attempt at the training task
    weights/.staged-v00003/                 written, not yet published

and in an object store what `versions` says.

Invariants:

- A version appears whole, by one rename or one last object after everything in it was made durable: a kill at any
  moment leaves either no such version or a complete one.
- The hash of ``weights.safetensors`` is a pure function of its tensors: names are sorted, no time is in it.
- `load` returns only bytes whose hash was checked: by itself, or when they came to its node.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from hashlib import sha256
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from spotlight.files import is_url
from spotlight.records import PartRef, Policy, Published, SpotlightError, WeightsRef, record
from spotlight.store.decoding import from_json
from spotlight.store.node import Node, NotOnNode, Source, map_tensors
from spotlight.store.objects import StoreError
from spotlight.store.tensor_files import Content
from spotlight.store.versions import MANIFEST, Versions, versions_of

if TYPE_CHECKING:
    from torch import Tensor  # only those who touch tensors pay for torch: the driver asks for hashes alone

    from spotlight.store.tensor_files import Tensors

Part = Literal["trainable", "optimizer", "old", "ema"]

_FILES: dict[Part, str] = {
    "trainable": "weights.safetensors",
    "optimizer": "optimizer.safetensors",
    "old": "old.safetensors",
    "ema": "ema.safetensors",
}
PARTS: dict[Policy, Part] = {"trained": "trainable", "old": "old", "average": "ema"}
"""Where the weights of each policy are."""
RunAt = str | Path
"""A run's directory, or its URL."""


@record
class FileEntry:
    """Expected hash and size of a file of a version."""

    sha256: str
    bytes: int


@record
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
    run: RunAt,
    version: int,
    trainable: Tensors,
    optimizer: Tensors,
    metrics: Mapping[str, float],
    ema: Tensors | None = None,
    old: Tensors | None = None,
) -> None:
    """Write a version completely, flushed to disk, where only `publish` looks.

    What an earlier attempt staged is replaced, once all is written. Tensors of a mapping may not share memory.

    Args:
        trainable: all that training changes, by name; of floating-point, integer or bool dtypes, on any device. Arrays
            of numpy do without torch.
        optimizer: the optimizer's tensors; parameters without state are simply absent.
        metrics: what the training of this version measured.

    Raises:
        SpotlightError: a number is not finite; nothing was staged.
        OSError: for example because the disk is full; published versions stay.
    """
    for tensors in (trainable, optimizer, ema or {}):
        _check_finite(f"{run}: version {version}", tensors)
    versions = versions_of(run)
    parts: dict[Part, Tensors] = {"trainable": trainable, "optimizer": optimizer}
    if old is not None:
        parts["old"] = old
    if ema is not None:
        parts["ema"] = ema
    with versions.attempt(version):
        with ThreadPoolExecutor(
            1 if is_url(run) else len(parts)
        ) as pool:  # what goes to a bucket is in memory as a whole
            written = {_FILES[part]: pool.submit(_write, versions, version, part, parts[part]) for part in parts}
            files = {name: entry.result() for name, entry in written.items()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(version=version, files=files, metrics=dict(metrics), created=created)
        versions.stage(version, f"{json.dumps(asdict(manifest), indent=2)}\n".encode())


def _check_finite(where: str, tensors: Tensors) -> None:
    if _all_finite(tensors.values()):
        return
    name = next(name for name, tensor in tensors.items() if not _all_finite([tensor]))
    raise SpotlightError(
        f"{where}: {name} has numbers that are not finite (NaN or infinite), so nothing was published: lower "
        'train.learning_rate, set model.dtype = "float32", or mend the weights of model.path'
    )


def _all_finite(tensors: Iterable[Tensor | NDArray[Any]]) -> bool:
    """Whether all numbers are finite. Each device is waited for once; minimum and maximum suffice, and are faster on a
    CPU than `isfinite` of all."""
    found: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            if not np.isfinite(tensor).all():
                return False
        elif tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()
            found[tensor.device].append(low.isfinite() & high.isfinite())
    return all(reduce(and_, finite) for finite in found.values())


def publish(run: RunAt, version: int) -> Published:
    """Make a staged version the published one, atomically; if it is published already, return that.

    A published version that is intact wins over a staged one, since workers may already use it; a damaged
    one is replaced.

    Raises:
        SpotlightError: there is nothing to publish, or a staged file is not there or not whole.
    """
    versions = versions_of(run)
    if versions.has(version) and _is_intact(versions, version):
        versions.drop(version)
        return _published(versions, version)
    if not versions.has(version, staged=True):
        if versions.has(version):
            _verify(versions, version)
        raise SpotlightError(
            f"{versions.where(version, staged=True)}: version {version} was never staged; `spotlight resume` trains it "
            f"from version {version - 1}"
        )
    _verify(versions, version, staged=True)
    versions.publish(version)
    return _published(versions, version)


def published(run: RunAt, version: int) -> Published | None:
    """What a version's manifest says, without reading its tensors; None if it was not published.

    Raises:
        SpotlightError: its manifest is damaged.
    """
    versions = versions_of(run)
    return _published(versions, version) if versions.has(version) else None


def latest(run: RunAt) -> Published | None:
    """The highest published version; None before the first."""
    return published(run, numbers[-1]) if (numbers := versions_of(run).numbers()) else None


def load(
    run: RunAt, ref: WeightsRef, part: Part = "trainable", node: Node | None = None, peers: Sequence[Source] = ()
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
        # If the node has no room, or the file was just removed there, the store is read.
        with suppress(NotOnNode, FileNotFoundError):
            return map_tensors(bring(run, ref, node, part, peers))
    return from_bytes(_content(run, ref, part))


def load_arrays(run: RunAt, ref: WeightsRef) -> dict[str, NDArray[Any]]:
    """The trained tensors of a published version, from the store, as NumPy arrays; torch is not needed.

    Raises:
        SpotlightError: as `load`.
    """
    from safetensors.numpy import load as from_bytes

    return dict(from_bytes(_content(run, ref, "trainable")))


def _content(run: RunAt, ref: WeightsRef, part: Part) -> bytes:
    """The bytes of one file of a version, read from the store and checked."""
    versions, name = versions_of(run), _FILES[part]
    entry = _find(versions, ref, name)
    try:
        content = versions.read(ref.version, name, entry.sha256)
    except FileNotFoundError:
        raise _damage(versions.where(ref.version), name, f"{entry.bytes} bytes", "no such file") from None
    _check(versions.where(ref.version), name, entry, len(content), sha256(content).hexdigest())
    return content


def bring(run: RunAt, ref: WeightsRef, node: Node, part: Part = "trainable", peers: Sequence[Source] = ()) -> Path:
    """Bring one file of a published version into the node's memory, its hash checked, without torch; returns its path.

    A file that the node has costs milliseconds; else it comes from the first peer that sends it, or from the store.

    Raises:
        NotOnNode: there is no room, or neither a peer nor the store sent what the manifest says; `load` says more.
        SpotlightError: the version or the file is absent, or is not the one that ``ref`` names.
    """
    entry = part_ref(run, ref, part)
    return node.bring(
        entry.sha256, entry.bytes, [*peers, versions_of(run).source(ref.version, entry.name, entry.sha256)]
    )


def part_ref(run: RunAt, ref: WeightsRef, part: Part = "trainable") -> PartRef:
    """Name, hash and size of one file of a version; the store is read only if ``ref`` does not hold them.

    Raises:
        SpotlightError: the version has no such file; or, where the store is read, as `load`.
    """
    name = _FILES[part]
    if not ref.parts:
        entry = _find(versions_of(run), ref, name)
        return PartRef(name=name, sha256=entry.sha256, bytes=entry.bytes)
    for known in ref.parts:
        if known.name == name:
            return known
    have = sorted(known.name for known in ref.parts)
    raise SpotlightError(f"{versions_of(run).where(ref.version)}: version {ref.version} has no {name}; it has {have}")


def _find(versions: Versions, ref: WeightsRef, name: str) -> FileEntry:
    """The entry of a version's file in its manifest."""
    where = versions.where(ref.version)
    if not versions.has(ref.version):
        parent = where.rpartition("/")[0]
        raise SpotlightError(f"{where}: version {ref.version} is not published; {parent} has {versions.numbers()}")
    files = _manifest(versions, ref.version).files
    digest = files[_FILES["trainable"]].sha256
    if digest != ref.sha256:
        raise SpotlightError(
            f"{where}: expected weights with sha256 {ref.sha256}, found {digest}: they belong to another run or "
            "were trained again; use the run directory that the request came from"
        )
    if name not in files:
        average = " (averaged weights are kept where train.ema_decay is not 0)" if name == _FILES["ema"] else ""
        raise SpotlightError(f"{where}: version {ref.version} has no {name}{average}; it has {sorted(files)}")
    return files[name]


def retain(run: RunAt, keep: Collection[int]) -> None:
    """Remove every published version but those to keep, and what attempts at published ones left."""
    versions_of(run).retain(keep)


def _write(versions: Versions, version: int, part: Part, tensors: Tensors) -> FileEntry:
    """Write and flush one file; return its entry of the manifest."""
    content = Content(tensors)
    return FileEntry(sha256=versions.write(version, _FILES[part], content), bytes=len(content))


def _published(versions: Versions, version: int) -> Published:
    manifest = _manifest(versions, version)
    parts = tuple(
        PartRef(name=name, sha256=entry.sha256, bytes=entry.bytes) for name, entry in sorted(manifest.files.items())
    )
    weights = WeightsRef(version=manifest.version, sha256=manifest.files[_FILES["trainable"]].sha256, parts=parts)
    return Published(weights=weights, metrics=manifest.metrics)


def _manifest(versions: Versions, version: int, *, staged: bool = False) -> Manifest:
    where = versions.where(version, staged=staged)
    try:
        content = versions.manifest(version, staged=staged)
    except StoreError:
        raise
    except OSError as error:
        raise _damage(where, MANIFEST, "a manifest", str(error)) from None
    return from_json(Manifest, content, f"{where}/{MANIFEST}", _way_out(where))


def _verify(versions: Versions, version: int, *, staged: bool = False) -> None:
    where = versions.where(version, staged=staged)
    for name, entry in _manifest(versions, version, staged=staged).files.items():
        try:
            size_bytes, digest = versions.found(version, name, entry.sha256, staged=staged)
        except FileNotFoundError:
            raise _damage(where, name, f"{entry.bytes} bytes", "no such file") from None
        _check(where, name, entry, size_bytes, digest)


def _is_intact(versions: Versions, version: int) -> bool:
    try:
        _verify(versions, version)
    except StoreError:
        raise
    except SpotlightError:
        return False
    return True


def _check(where: str, name: str, entry: FileEntry, size_bytes: int, digest: str) -> None:
    if size_bytes != entry.bytes:
        raise _damage(where, name, f"{entry.bytes} bytes", f"{size_bytes} bytes")
    if digest != entry.sha256:
        raise _damage(where, name, f"sha256 {entry.sha256}", f"sha256 {digest}")


def _damage(where: str, name: str, expected: str, found: str) -> SpotlightError:
    return SpotlightError(f"{where}/{name}: expected {expected}, found {found}; {_way_out(where)}")


def _way_out(where: str) -> str:
    return f"delete {where} and `spotlight resume` goes on from the version before"
