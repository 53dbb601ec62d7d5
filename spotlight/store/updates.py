"""Keeps what an iteration's training is made of while it lasts: gradients of parts, and weights between two updates.

Under the run directory lie, until the version that they make is published ::

    updates/00003/u0-p2-<16 digits>.safetensors     a gradient, float32; the digits name all that it depends on
                  u0-p2-<16 digits>.json            what its computation measured, and its hash; written last
                  <sha256>.safetensors              the weights after an update that is not the last

Invariants: a file appears whole, by a rename; written again, it has the same bytes; what is read has the hash that it
was announced with. Nothing is flushed to the disk: who loses it computes it again.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from spotlight.records import Gradient, GradientPart, SpotlightError
from spotlight.store.decoding import from_json

if TYPE_CHECKING:
    from torch import Tensor  # only those who touch tensors pay for torch


def find(run_dir: Path, part: GradientPart) -> Gradient | None:
    """The gradient of a part that was computed before."""
    return _found(run_dir, part.iteration, part.name)


def _found(run_dir: Path, iteration: int, name: str) -> Gradient | None:
    file = _directory(run_dir, iteration) / f"{name}.json"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return from_json(Gradient, content, file, "delete it, and `spotlight resume` computes it again")


def put(run_dir: Path, part: GradientPart, gradient: Gradient, tensors: Mapping[str, Tensor]) -> Gradient:
    """Keep a gradient.

    Args:
        gradient: what was measured; its name and hash are filled in.
    """
    name = part.name
    digest = _write_tensors(run_dir, part.iteration, tensors, name) if tensors else ""
    kept = replace(gradient, name=name, sha256=digest)
    _write(_directory(run_dir, part.iteration) / f"{name}.json", json.dumps(asdict(kept)).encode())
    return kept


def load(run_dir: Path, iteration: int, gradient: Gradient) -> dict[str, Tensor]:
    """The tensors of a gradient.

    Raises:
        SpotlightError: its file is lost or damaged; it is computed again when the run is resumed.
    """
    return _load(run_dir, iteration, gradient.name, gradient.sha256) if gradient.sha256 else {}


def put_weights(run_dir: Path, iteration: int, tensors: Mapping[str, Tensor]) -> str:
    """Keep the weights after an update; returns their hash."""
    return _write_tensors(run_dir, iteration, tensors)


def load_weights(run_dir: Path, iteration: int, digest: str) -> dict[str, Tensor]:
    """Weights between two updates.

    Raises:
        SpotlightError: their file is lost or damaged.
    """
    return _load(run_dir, iteration, digest, digest)


def clear(run_dir: Path, iteration: int) -> None:
    """Remove all that is kept of an iteration."""
    shutil.rmtree(_directory(run_dir, iteration), ignore_errors=True)


def _directory(run_dir: Path, iteration: int) -> Path:
    return run_dir / "updates" / f"{iteration:05d}"


def _write_tensors(run_dir: Path, iteration: int, tensors: Mapping[str, Tensor], name: str = "") -> str:
    """Write a file, named by its content where it has no name; returns its hash."""
    from safetensors.torch import save

    content = save({each: tensors[each].detach().cpu().contiguous() for each in sorted(tensors)})
    digest = sha256(content).hexdigest()
    _write(_directory(run_dir, iteration) / f"{name or digest}.safetensors", content)
    return digest


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    partial.write_bytes(content)
    partial.rename(path)


def _load(run_dir: Path, iteration: int, name: str, digest: str) -> dict[str, Tensor]:
    from safetensors.torch import load as from_bytes

    file = _directory(run_dir, iteration) / f"{name}.safetensors"
    try:
        content = file.read_bytes()
        found = f"sha256 {sha256(content).hexdigest()}"
    except FileNotFoundError:
        content, found = b"", "no such file"
    if found != f"sha256 {digest}":
        clear(run_dir, iteration)  # so that it is not found, and computed again
        raise SpotlightError(
            f"{file}: expected sha256 {digest}, found {found}; it was removed: `spotlight resume` computes it again"
        )
    return from_bytes(content)
