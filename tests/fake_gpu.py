"""A device that is none: its tensors cannot be mixed with those of the CPU, as a GPU's cannot.

What a GPU computes is computed on the CPU. But an operator that is given tensors of both places, or a generator of the
wrong one, raises, as CUDA's would. So a whole run shows, without a GPU, whether something was left behind.

``python fake_gpu.py SETTINGS OVERRIDES ...`` runs the settings on the CPU and on the device, once for each argument
that follows, and prints by how much weights were moved, and by how much they differ between both, in all. An argument
holds overrides, divided by spaces. It is a program of its own because torch has one such device in a process, for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(f"{NAME}:0")
ATEN = torch.ops.aten
COPIES = {ATEN.copy_.default, ATEN._copy_from.default}
"""From place to place."""
INDEXES = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default, ATEN._index_put_impl_.default}
"""With CUDA, too, indices may be on the CPU."""
AT_ONCE = {ATEN._conj.default: ATEN.conj_physical.default, ATEN._neg_view.default: ATEN.neg.default}
"""What marks a tensor, for a later operator to do; here, the mark would be lost."""


class There(torch.Tensor):
    """A tensor on the device; ``raw`` is where it is in truth."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: type[There], raw: torch.Tensor) -> There:
        there: There = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
        )
        there.raw = raw
        return there

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # keywords may be left out
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class OnlyThere(TorchDispatchMode):
    """Creates tensors where they are asked for, and refuses to mix places."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    _replaced((args, kwargs), torch.Tensor, tensors.append)
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    here = [tensor for tensor in tensors if not isinstance(tensor, There) and tensor.dim()]  # numbers may be anywhere
    asked = kwargs.get("device")
    goes_there = torch.device(asked).type == NAME if asked is not None else bool(there)
    indexed = func in INDEXES and isinstance(args[0], There)
    if there and here and func not in COPIES and not indexed:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {_places(tensors)}")
    generator = kwargs.get("generator")
    if generator is not None and goes_there:
        raise RuntimeError(f"{func}: expected a generator on {DEVICE}, got one on {generator.device}")
    known = {id(tensor.raw): tensor for tensor in there}
    moved = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    raw_args, raw_kwargs = _replaced((args, moved), There, lambda tensor: tensor.raw)
    found = AT_ONCE.get(func, func)(*raw_args, **raw_kwargs)
    if func is ATEN.copy_.default:
        return args[0]
    if not goes_there:
        return found
    return _replaced(found, torch.Tensor, lambda raw: known[id(raw)] if id(raw) in known else There(raw))


def _replaced(value: Any, kind: type, becomes: Callable[[Any], Any]) -> Any:
    """With what becomes of each value of a kind that is in it: a third of the time that torch's own way takes."""
    if isinstance(value, kind):
        return becomes(value)
    if type(value) in (tuple, list):
        return type(value)([_replaced(each, kind, becomes) for each in value])
    if type(value) is dict:
        return {key: _replaced(each, kind, becomes) for key, each in value.items()}
    return value


def _places(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **others: Any) -> torch.Tensor:
    return There(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _empty(size: Any, dtype: Any = None, memory_format: Any = None, **others: Any) -> torch.Tensor:
    order = memory_format or torch.contiguous_format
    return There(torch.empty(size, dtype=dtype or torch.get_default_dtype(), memory_format=order))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    raw_source, raw_target = (each.raw if isinstance(each, There) else each for each in (source, target))
    raw_target.copy_(raw_source)
    return target


_library = torch.library.Library("aten", "IMPL")
for _operator, _does in (
    ("empty_strided", _empty_strided),
    ("empty.memory_format", _empty),
    ("_copy_from", _copy_from),
):
    _library.impl(_operator, _does, "PrivateUse1")


def main() -> None:
    import spotlight.device.engine
    import spotlight.rl.models
    from loops import apart, begun_and_ended

    settings = Path(sys.argv[1])
    for asked in sys.argv[2:]:
        old, here = begun_and_ended(settings, asked.split())
        with pytest.MonkeyPatch.context() as patch, OnlyThere():
            for module in (spotlight.device.engine, spotlight.rl.models):
                patch.setattr(module, "device_of", lambda model: DEVICE)
            _, there = begun_and_ended(settings, asked.split())
        print(apart(old, here), apart(here, there), flush=True)


if __name__ == "__main__":
    main()
