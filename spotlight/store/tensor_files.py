"""The bytes of a safetensors file as views of the tensors' own memory: gigabytes are hashed and written, not copied.

The library reads these files. Its writer would make two copies of them, which takes longer than to hash and to write
them. The format, from its documentation (https://github.com/huggingface/safetensors#format) ::

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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # only those who touch tensors pay for torch

    Tensors = Mapping[str, Tensor | NDArray[Any]]
    """By name: all of torch, or all of numpy."""

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 4
"""That hash, read or write files of tensors at once. None of them holds Python's lock meanwhile."""
ALIGNED_BYTES = 8
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}


class Content:
    """What a file holds, in pieces that are not copied; tensors of a GPU were brought to the CPU."""

    def __init__(self, tensors: Tensors) -> None:
        """
        Args:
            tensors: may not change as long as this is used.
        """
        header, end = {}, 0
        views = {name: _viewed(tensor) for name, tensor in tensors.items()}
        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all are aligned
        for name in names:
            dtype, view = views[name]
            offsets = [end, end := end + view.nbytes]
            header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNED_BYTES)
        self.pieces = [memoryview(len(text).to_bytes(8, "little") + text)]
        self.pieces += [views[name][1] for name in names]

    def __len__(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)

    def sha256(self) -> str:
        digest = sha256()
        for piece in self.pieces:
            digest.update(piece)
        return digest.hexdigest()


def _viewed(tensor: Tensor | NDArray[Any]) -> tuple[str, memoryview]:
    """What safetensors calls the dtype, and the bytes."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor)
        return _DTYPES[array.dtype.name], array.reshape(-1).view(np.uint8).data
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    return _DTYPES[str(flat.dtype).removeprefix("torch.")], flat.view(torch.uint8).numpy().data


def ahead(does: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What ``map`` yields, a bounded number of calls ahead of the one that is yielded."""
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for item in items:
                begun.append(pool.submit(does, item))
                if len(begun) >= THREADS:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for each in begun:
                each.cancel()
