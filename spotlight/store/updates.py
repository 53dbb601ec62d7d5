"""Keeps the intermediate results of an iteration's training: gradients of parts, and weights between two updates.

Until the version that they lead to is published, there are in the run's directory, or at its URL ::

    updates/00003/u0-p2-<16 digits>.safetensors     a gradient, float32; the digits name all that it depends on
                  u0-p2-<16 digits>.json            what its computation measured, and its slices; written last
                  sum-<16 digits>.safetensors       the sum of a slice of all parts' gradients, which the digits name
                  sum-<16 digits>.json              its rows and its slice; written last
                  <sha256>.safetensors              the weights after an update that is not the last

A gradient in several slices is as many safetensors files, one after the other in one, so that each can be read by
itself.

Invariants: a file appears whole; written again, it has the same bytes; what is read has the hash that it was announced
with. Nothing is flushed to the disk: what is lost is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING

from spotlight.records import Gradient, GradientPart, Slice, SpotlightError
from spotlight.store.decoding import from_json
from spotlight.store.objects import objects_at
from spotlight.store.tensor_files import THREADS, Content, ahead, hash_of, read_arrays
from spotlight.store.weights import RunAt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor  # only those who touch tensors pay for torch

_SUM = "sum-"


def find(run: RunAt, part: GradientPart) -> Gradient | None:
    """A part's gradient if it was computed before, else None."""
    return _found(run, part.iteration, part.name)


def _found(run: RunAt, iteration: int, name: str) -> Gradient | None:
    """The gradient of this name, if its file is there with all bytes of its slices, else None."""
    objects, key = objects_at(run), f"{_folder(iteration)}/{name}.json"
    content = objects.get(key)
    if content is None:
        return None
    found = from_json(Gradient, content, objects.where(key), "delete it, and `spotlight resume` computes it again")
    if not found.slices:
        return found
    ends = list(accumulate(each.size for each in found.slices))
    follow = [each.start for each in found.slices] == [0, *ends[:-1]]
    return found if follow and objects.size(f"{_folder(iteration)}/{name}.safetensors") == ends[-1] else None


def put(
    run: RunAt,
    part: GradientPart,
    gradient: Gradient,
    tensors: Mapping[str, Tensor],
    slices: Sequence[Iterable[str]] | None = None,
) -> Gradient:
    """Keep a gradient; returns it with its name and slices.

    Args:
        gradient: its measurements; its name and slices are filled in.
        slices: names of the tensors of each slice, some of which may be absent; None: one slice has all.
    """
    contents: list[Content] = []
    if tensors:
        names = [sorted(tensors)] if slices is None else slices
        there = [{each: tensors[each] for each in some if each in tensors} for some in names]
        assert sum(map(len, there)) == len(tensors), "each tensor is in one slice"
        contents = [Content(some) for some in there]
    return _put(run, part.iteration, replace(gradient, name=part.name), contents)


def _put(run: RunAt, iteration: int, gradient: Gradient, contents: Sequence[Content]) -> Gradient:
    """Write a gradient that has these slices."""
    digests: list[Future[str]] = []
    if contents:
        with ThreadPoolExecutor(THREADS) as pool:

            def pieces() -> Iterator[memoryview]:
                for content in contents:
                    whole = list(content)
                    digests.append(pool.submit(hash_of, whole))
                    yield from whole

            objects_at(run).put(f"{_folder(iteration)}/{gradient.name}.safetensors", pieces(), durable=False)
    ends = accumulate(map(len, contents))
    slices = tuple(
        Slice(start=end - len(content), size=len(content), sha256=digest.result())
        for end, content, digest in zip(ends, contents, digests, strict=True)
    )
    return _announced(run, iteration, replace(gradient, slices=slices))


def _announced(run: RunAt, iteration: int, gradient: Gradient) -> Gradient:
    key = f"{_folder(iteration)}/{gradient.name}.json"
    objects_at(run).put(key, json.dumps(asdict(gradient)).encode(), durable=False)
    return gradient


def load(run: RunAt, iteration: int, gradient: Gradient) -> dict[str, Tensor]:
    """The tensors of a gradient.

    Raises:
        SpotlightError: its file is lost or damaged; it is computed again when the run is resumed.
    """
    import torch

    slices = ahead(partial(_slice, run, iteration, gradient), range(len(gradient.slices)))
    return {name: torch.from_numpy(array) for arrays in slices for name, array in arrays.items()}


def load_terms(run: RunAt, iteration: int, gradients: Sequence[Gradient]) -> Iterator[dict[str, Tensor]]:
    """As `load`, of several gradients: slices of a sum are read in parallel, whole gradients one after the other."""
    several = ahead if all(each.name.startswith(_SUM) for each in gradients) else map
    yield from several(partial(load, run, iteration), gradients)


def load_slices(
    run: RunAt, iteration: int, gradients: Iterable[Gradient], at: int
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Slice ``at`` of each part's gradient, without torch; raises as `load`."""

    def read(gradient: Gradient) -> dict[str, NDArray[np.float32]]:
        return _slice(run, iteration, gradient, at) if gradient.slices else {}

    return ahead(read, gradients)


def find_sum(run: RunAt, iteration: int, parts: Sequence[Gradient], at: int) -> Gradient | None:
    """The sum of slice ``at`` of several gradients if it was computed before, else None."""
    return _found(run, iteration, _sum_name(parts, at))


def put_sum(
    run: RunAt, iteration: int, parts: Sequence[Gradient], at: int, arrays: Mapping[str, NDArray[np.float32]]
) -> Gradient:
    """Keep the sum of a slice of several gradients; where none has tensors, there is nothing to keep."""
    summed = Gradient(name=_sum_name(parts, at), rows=sum(part.rows for part in parts))
    if not any(part.slices for part in parts):
        return summed
    import numpy as np

    # NumPy's sum of scalars is not an array
    return _put(run, iteration, summed, [Content({name: np.asarray(array) for name, array in arrays.items()})])


def _sum_name(parts: Sequence[Gradient], at: int) -> str:
    named = json.dumps([at, *((part.name, part.slices[at].sha256 if part.slices else "") for part in parts)])
    return f"{_SUM}{sha256(named.encode()).hexdigest()[:16]}"


def put_weights(run: RunAt, iteration: int, tensors: Mapping[str, Tensor]) -> str:
    """Keep the weights after an update; returns their hash."""
    pieces = list(Content(tensors))
    digest = hash_of(pieces)
    objects_at(run).put(f"{_folder(iteration)}/{digest}.safetensors", pieces, durable=False)
    return digest


def load_weights(run: RunAt, iteration: int, digest: str) -> dict[str, Tensor]:
    """Weights between two updates.

    Raises:
        SpotlightError: their file is lost or damaged.
    """
    from safetensors.torch import load as from_bytes

    key = f"{_folder(iteration)}/{digest}.safetensors"
    content = objects_at(run).get(key)
    found = "no such file" if content is None else f"sha256 {hash_of([content])}"
    if content is None or found != f"sha256 {digest}":
        raise _damaged(run, iteration, key, digest, found)
    return from_bytes(content)


def clear(run: RunAt, iteration: int) -> None:
    """Remove all that is kept of an iteration."""
    objects_at(run).delete_below(_folder(iteration))


def clear_until(run: RunAt, iteration: int) -> None:
    """As `clear`, of this iteration and all before it: a worker taken for dead may have written after one had ended."""
    objects = objects_at(run)
    for folder in sorted({key.split("/")[1] for key in objects.sizes("updates")}):
        if folder.isdigit() and int(folder) <= iteration:
            objects.delete_below(f"updates/{folder}")


def _folder(iteration: int) -> str:
    return f"updates/{iteration:05d}"


def _slice(run: RunAt, iteration: int, gradient: Gradient, at: int) -> dict[str, NDArray[np.float32]]:
    objects, key, chosen = objects_at(run), f"{_folder(iteration)}/{gradient.name}.safetensors", gradient.slices[at]
    stop = chosen.start + chosen.size
    try:
        with objects.opened(key, chosen.start, chosen.size) as file:
            arrays, digest = read_arrays(file, chosen.size)
            if digest == chosen.sha256:
                return arrays
            found = f"sha256 {digest}"
    except OSError:
        if (size := objects.size(key)) is not None and size >= stop:
            raise  # the store's fault
        found = "no such file"
    except ValueError as error:
        found = str(error)
    where = f" in bytes {chosen.start} to {stop}" if len(gradient.slices) > 1 else ""
    raise _damaged(run, iteration, key, f"{chosen.sha256}{where}", found)


def _damaged(run: RunAt, iteration: int, key: str, expected: str, found: str) -> SpotlightError:
    clear(run, iteration)  # so that it is not found, and computed again
    return SpotlightError(
        f"{objects_at(run).where(key)}: expected sha256 {expected}, found {found}; it was removed: `spotlight resume` "
        "computes it again"
    )
