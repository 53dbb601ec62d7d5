"""Passes of a transformer as CUDA graphs: a GPU is told once which kernels a pass has, and then to repeat them.

A pass of a large transformer is thousands of kernels. With few samples, to launch them one by one takes several times
as long as they compute (docs/results.md, "On a GPU").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spotlight.records import SpotlightError, record

KEPT = 8
"""Graphs of a transformer: requests have few sizes, and each graph keeps its inputs and its output."""

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Records some work, which it need not do: what does it again, and the tensor that then holds its result."""


@record
class Recorded:
    """A pass that can be repeated, and where it reads and writes."""

    inputs: Mapping[str, Tensor]
    replay: Replay
    output: Tensor


class CapturedPasses:
    """Calls a transformer as it would be called, without gradients; by keyword, for a tuple of one tensor.

    The first pass of its shapes runs as it is, for kernels and libraries set themselves up in it; the second is
    captured. All give the same bits. A graph reads the weights where they were when it was captured: they may change
    in place, but may not be exchanged.

    Args:
        recorder: makes graphs; by default, CUDA's.
    """

    def __init__(self, transformer: Any, recorder: Recorder | None = None) -> None:
        self._transformer = transformer
        self._recorder = recorder or Graphs()
        self._known: dict[object, Recorded | None] = {}  # by shapes, the one used last at the end; None: seen once

    def __call__(self, **arguments: Any) -> tuple[Tensor]:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in arguments.items() if name not in tensors}
        shapes = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        key = (shapes, repr(others))
        if key not in self._known:
            self._keep(key, None)
            output: tuple[Tensor] = self._transformer(**arguments)
            return output
        recorded = self._known[key] or self._capture(tensors, others)
        self._keep(key, recorded)
        for name, value in tensors.items():
            recorded.inputs[name].copy_(value)
        recorded.replay()
        return (recorded.output.clone(),)  # the next pass writes there, too

    def _keep(self, key: object, recorded: Recorded | None) -> None:
        self._known.pop(key, None)
        self._known[key] = recorded
        while len(self._known) > KEPT:
            self._known.pop(next(iter(self._known)))

    def _capture(self, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> Recorded:
        inputs = {name: value.clone() for name, value in tensors.items()}

        def work() -> Tensor:
            with Fills():
                (output,) = self._transformer(**inputs, **others)
            made: Tensor = output
            return made

        try:
            replay, output = self._recorder(work)
        except RuntimeError as error:
            for each in (error, error.__context__):  # what ends the capture in vain may hide why
                if isinstance(each, torch.OutOfMemoryError):
                    raise each from None
            raise SpotlightError(
                f"a pass of {type(self._transformer).__name__} cannot be captured as a CUDA graph "
                f"({str(error).partition('.')[0]}): set model.cuda_graphs = false"
            ) from error
        return Recorded(inputs=inputs, replay=replay, output=output)


class Graphs:
    """Records work as CUDA graphs, which share the memory for what is between their inputs and outputs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # A thread that leaves a gang may call the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        return graph.replay, output


class Fills(TorchFunctionMode):
    """Inside, a tensor made of one number is filled on its device; to copy it there, as torch does, cannot be captured.

    Qwen-Image's transformer, as diffusers has it, makes such a one.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in (torch.as_tensor, torch.tensor) and isinstance(args[0], int | float) and "device" in named:
            return torch.full((), args[0], **named)
        return func(*args, **named)
