"""Safetensors files, tensor by tensor: gigabytes are hashed while they are written or read, not copied before.

The library copies all bytes twice to make a file, and to allocate gigabytes for each file takes longer than to hash and
write them. So one tensor is handled at a time, and its memory is used again for the next. The format,
from its documentation (https://github.com/huggingface/safetensors#format) ::

    8 bytes     length of the header, little-endian
    header      JSON: of each tensor dtype, shape, and where its bytes begin and end in what follows; padded with spaces
    tensors     one after the other, contiguous, little-endian
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # only those who touch tensors pay for torch

    Tensors = Mapping[str, Tensor | NDArray[Any]]
    """Tensors by name: all of torch, or all of NumPy."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Piece = TypeVar("Piece", bytes, memoryview)

THREADS = 4
"""Threads that hash or read files at once; meanwhile they release the GIL."""
SMALL_BYTES = 1 << 16
"""Pieces up to this size are hashed at once: to hand them to a thread would take longer."""
ALIGNED_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""Largest header, as in the library."""
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}
_ARRAYS = {known: np.dtype(name) for name, known in _DTYPES.items() if name != "bfloat16"}


class Digest(Protocol):
    """A hash object, as `hashlib` makes them."""

    def update(self, piece: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Content:
    """The bytes of a safetensors file, piece by piece; each tensor is copied from its device when it is asked for."""

    def __init__(self, tensors: Tensors) -> None:
        """
        Args:
            tensors: of floating-point, integer and bool dtypes. They may not change as long as this is used.
        """
        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all are aligned
        self._tensors = [tensors[name] for name in names]
        header, end = {}, 0
        for name, tensor in zip(names, self._tensors, strict=True):
            offsets = [end, end := end + tensor.nbytes]
            dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNED_BYTES)
        self._head = len(text).to_bytes(8, "little") + text
        self._size = len(self._head) + end

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        yield from map(_viewed, self._tensors)

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self)


def _viewed(tensor: Tensor | NDArray[Any]) -> memoryview:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def hash_of(pieces: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of all pieces, as hexadecimal digits."""
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def hashing(pieces: Iterable[Piece], digest: Digest) -> Iterator[Piece]:
    """Yields the same pieces; a thread hashes each while the consumer uses it."""
    busy: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:
        for piece in pieces:
            if busy:
                busy.result()
                busy = None
            if len(piece) > SMALL_BYTES:
                busy = thread.submit(digest.update, piece)
            else:
                digest.update(piece)
            yield piece
    if busy:
        busy.result()


def read_arrays(file: BinaryIO, size: int) -> tuple[dict[str, NDArray[Any]], str]:
    """The arrays that the next bytes of a file hold, and the SHA-256 of these bytes.

    Raises:
        ValueError: they are no safetensors file of this size, or one of dtypes that numpy lacks.
    """
    digest, arrays, end = sha256(), {}, 0
    length = file.read(8)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(size, HEADER_BYTES_MAX):
        raise ValueError(f"a header of {header_bytes} bytes")
    text = file.read(header_bytes)
    digest.update(length)
    digest.update(text)
    left = size - len(length) - len(text)
    try:
        header: dict[str, dict[str, Any]] = json.loads(text)
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            dtype, shape = _ARRAYS[header[name]["dtype"]], header[name]["shape"]
            if not all(type(count) is int for count in shape):
                raise ValueError("a shape that is none")
            if prod(shape) * dtype.itemsize > left:
                raise ValueError("a tensor that is larger than the file")
            array = np.empty(shape, dtype)
            if header[name]["data_offsets"] != [end, end := end + array.nbytes]:
                raise ValueError("a tensor that is not where it should be")
            view, left = _viewed(array), left - array.nbytes
            if file.readinto(view) != array.nbytes:  # type: ignore[attr-defined]
                raise ValueError("a tensor that was cut short")
            digest.update(view)
            arrays[name] = array
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("a header that is none") from None
    if left:
        raise ValueError(f"{left} bytes that belong to no tensor")
    return arrays, digest.hexdigest()


def ahead(does: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What ``map`` yields, up to `THREADS` calls ahead; an error is raised in its place and waits for no other call."""
    begun: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for item in items:
            begun.append(pool.submit(does, item))
            if len(begun) >= THREADS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a read that hangs ends by its own limit
