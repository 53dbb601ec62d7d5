"""Keeps what an iteration's training is made of while it lasts: gradients of parts, and weights between two updates.

With the run, in its directory or at its URL, lie until the version that they make is published ::

    updates/00003/u0-p2-<16 digits>.safetensors     a gradient, float32; the digits name all that it depends on
                  u0-p2-<16 digits>.json            what its computation measured, and its hash; written last
                  sum-<16 digits>.safetensors       the sum of neighbouring parts' gradients, which the digits name
                  sum-<16 digits>.json              its rows and its hash; written last
                  <sha256>.safetensors              the weights after an update that is not the last

Invariants: a file appears whole; written again, it has the same bytes; what is read has the hash that it was announced
with. Nothing is flushed to the disk: who loses it computes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from spotlight.records import Gradient, GradientPart, SpotlightError
from spotlight.store.decoding import from_json
from spotlight.store.objects import objects_at
from spotlight.store.weights import RunAt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor  # only those who touch tensors pay for torch


def find(run: RunAt, part: GradientPart) -> Gradient | None:
    """The gradient of a part that was computed before."""
    return _found(run, part.iteration, part.name)


def _found(run: RunAt, iteration: int, name: str) -> Gradient | None:
    objects, key = objects_at(run), f"{_folder(iteration)}/{name}.json"
    content = objects.get(key)
    if content is None:
        return None
    found = from_json(Gradient, content, objects.where(key), "delete it, and `spotlight resume` computes it again")
    lost = found.sha256 and objects.size(f"{_folder(iteration)}/{name}.safetensors") is None
    return None if lost else found


def put(run: RunAt, part: GradientPart, gradient: Gradient, tensors: Mapping[str, Tensor]) -> Gradient:
    """Keep a gradient.

    Args:
        gradient: what was measured; its name and hash are filled in.
    """
    name = part.name
    digest = _write_tensors(run, part.iteration, tensors, name) if tensors else ""
    return _announced(run, part.iteration, replace(gradient, name=name, sha256=digest))


def _announced(run: RunAt, iteration: int, gradient: Gradient) -> Gradient:
    key = f"{_folder(iteration)}/{gradient.name}.json"
    objects_at(run).put(key, json.dumps(asdict(gradient)).encode(), durable=False)
    return gradient


def load(run: RunAt, iteration: int, gradient: Gradient) -> dict[str, Tensor]:
    """The tensors of a gradient.

    Raises:
        SpotlightError: its file is lost or damaged; it is computed again when the run is resumed.
    """
    return _load(run, iteration, gradient.name, gradient.sha256) if gradient.sha256 else {}


def load_arrays(run: RunAt, iteration: int, gradient: Gradient) -> dict[str, NDArray[np.float32]]:
    """As `load`, without torch."""
    from safetensors.numpy import load as from_bytes

    if not gradient.sha256:
        return {}
    arrays: dict[str, NDArray[np.float32]] = from_bytes(_content(run, iteration, gradient.name, gradient.sha256))
    return arrays


def find_sum(run: RunAt, iteration: int, parts: Sequence[Gradient]) -> Gradient | None:
    """The sum of several gradients that were added before."""
    return _found(run, iteration, _sum_name(parts))


def put_sum(
    run: RunAt, iteration: int, parts: Sequence[Gradient], arrays: Mapping[str, NDArray[np.float32]]
) -> Gradient:
    """Keep the sum of several gradients; where none has tensors, there is nothing to keep."""
    summed = Gradient(name=_sum_name(parts), rows=sum(part.rows for part in parts))
    if not arrays:
        return summed
    from safetensors.numpy import save

    digest = _write(run, iteration, save({each: arrays[each] for each in sorted(arrays)}), summed.name)
    return _announced(run, iteration, replace(summed, sha256=digest))


def _sum_name(parts: Sequence[Gradient]) -> str:
    named = json.dumps([(part.name, part.sha256) for part in parts])
    return f"sum-{sha256(named.encode()).hexdigest()[:16]}"


def put_weights(run: RunAt, iteration: int, tensors: Mapping[str, Tensor]) -> str:
    """Keep the weights after an update; returns their hash."""
    return _write_tensors(run, iteration, tensors)


def load_weights(run: RunAt, iteration: int, digest: str) -> dict[str, Tensor]:
    """Weights between two updates.

    Raises:
        SpotlightError: their file is lost or damaged.
    """
    return _load(run, iteration, digest, digest)


def clear(run: RunAt, iteration: int) -> None:
    """Remove all that is kept of an iteration."""
    objects_at(run).delete_below(_folder(iteration))


def _folder(iteration: int) -> str:
    return f"updates/{iteration:05d}"


def _write_tensors(run: RunAt, iteration: int, tensors: Mapping[str, Tensor], name: str = "") -> str:
    """Write a file, named by its content where it has no name; returns its hash."""
    from safetensors.torch import save

    content = save({each: tensors[each].detach().cpu().contiguous() for each in sorted(tensors)})
    return _write(run, iteration, content, name)


def _write(run: RunAt, iteration: int, content: bytes, name: str = "") -> str:
    digest = sha256(content).hexdigest()
    objects_at(run).put(f"{_folder(iteration)}/{name or digest}.safetensors", content, durable=False)
    return digest


def _load(run: RunAt, iteration: int, name: str, digest: str) -> dict[str, Tensor]:
    from safetensors.torch import load as from_bytes

    return from_bytes(_content(run, iteration, name, digest))


def _content(run: RunAt, iteration: int, name: str, digest: str) -> bytes:
    objects, key = objects_at(run), f"{_folder(iteration)}/{name}.safetensors"
    content = objects.get(key)
    found = "no such file" if content is None else f"sha256 {sha256(content).hexdigest()}"
    if content is None or found != f"sha256 {digest}":
        clear(run, iteration)  # so that it is not found, and computed again
        raise SpotlightError(
            f"{objects.where(key)}: expected sha256 {digest}, found {found}; it was removed: `spotlight resume` "
            "computes it again"
        )
    return content
