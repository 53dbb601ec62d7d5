"""Passes of a transformer as CUDA graphs: a GPU is told once which kernels a pass has, and then to repeat them.

A pass of a large transformer is thousands of kernels. With few samples, to launch them one by one takes several times
as long as they compute (docs/results/gpu.md, "On a GPU").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from spotlight.records import SpotlightError, record

KEPT = 12
"""Graphs of passes without gradients: they have few sizes, and each graph keeps its inputs and its output."""
KEPT_LEARNING = 2
"""Pairs of graphs of passes with gradients: micro-batches have one size, but for the last; each keeps activations."""

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], Sequence[Tensor]]], tuple[Replay, Sequence[Tensor]]]
"""Records some work, which it need not do: what does it again, and the tensors that then hold its results."""
Found = TypeVar("Found")


@record
class CapturedPass:
    """A pass that can be repeated, and where it reads and writes."""

    inputs: Mapping[str, Tensor]
    replay: Replay
    output: Tensor


@dataclass(slots=True, kw_only=True)
class CapturedTrainingPass:
    """A pass that can be repeated with the backward pass after it, and where they read and write."""

    inputs: Mapping[str, Tensor]
    forward: Replay
    output: Tensor
    output_gradient: Tensor
    backward: Replay
    parameters: Sequence[Parameter]
    """Those that have a gradient."""
    gradients: Sequence[Tensor]
    """Of each of these."""
    is_ahead: bool = False
    """Whether its backward pass is still to come: it may not be repeated till then."""


class CapturedPasses:
    """Calls a transformer as it would be called, by keyword, for a tuple of one tensor.

    Where gradients are asked for, they are those of the parameters alone, and the backward pass is captured, too.

    The first pass of its shapes runs as it is, for kernels and libraries set themselves up in it; the second is
    captured. With gradients, the first is one whose backward pass has come. All give the same bits. A graph reads the
    weights where they were when it was captured.

    Args:
        recorder: makes graphs; by default, CUDA's.
    """

    def __init__(self, transformer: Any, recorder: Recorder | None = None) -> None:
        self._transformer = transformer
        self._recorder = recorder or Graphs()
        self._apart: Callable[[], Recorder] = (lambda: recorder) if recorder else Graphs
        # By shapes and weights, the one used last at the end; None: seen once.
        self._known: dict[object, CapturedPass | None] = {}
        self._known_learning: dict[object, CapturedTrainingPass | None] = {}

    def __call__(self, weights: object = None, **arguments: Any) -> tuple[Tensor]:
        """The transformer's output.

        Args:
            weights: which ones are in it and where, as far as that changes from pass to pass.
        """
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in arguments.items() if name not in tensors}
        shapes = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        key = (weights, shapes, repr(others))
        if torch.is_grad_enabled():
            return self._learn(key, tensors, others)
        if key not in self._known:
            _keep(self._known, key, None, KEPT)
            return self._plain(tensors, others)
        recorded = self._known[key] or self._capture(tensors, others)
        _keep(self._known, key, recorded, KEPT)
        _fill(recorded.inputs, tensors)
        recorded.replay()
        return (recorded.output.clone(),)  # the next pass writes there, too

    def forget_what_is_ahead(self) -> None:
        """No backward pass is still to come."""
        for learning in self._known_learning.values():
            if learning:
                learning.is_ahead = False

    def _learn(self, key: object, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> tuple[Tensor]:
        known = self._known_learning
        learning = known.get(key)
        if key not in known:
            (output,) = self._plain(tensors, others)
            output.register_hook(lambda _: _keep(known, key, known.get(key), KEPT_LEARNING))
            return (output,)
        if learning and learning.is_ahead:
            _keep(known, key, learning, KEPT_LEARNING)
            return self._plain(tensors, others)
        learning = learning or self._capture_learning(tensors, others)
        _keep(known, key, learning, KEPT_LEARNING)
        _fill(learning.inputs, tensors)
        repeated: Tensor = _Repeated.apply(learning, *learning.parameters)
        return (repeated,)

    def _plain(self, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> tuple[Tensor]:
        output: tuple[Tensor] = self._transformer(**tensors, **others)
        return output

    def _capture(self, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> CapturedPass:
        inputs = {name: value.clone() for name, value in tensors.items()}

        def work() -> tuple[Tensor]:
            with Fills():
                return self._plain(inputs, others)

        replay, (output,) = self._recorded(lambda: self._recorder(work), "model.cuda_graphs")
        return CapturedPass(inputs=inputs, replay=replay, output=output)

    def _capture_learning(self, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> CapturedTrainingPass:
        """Both graphs have memory of their own: what the first leaves for the second is no other graph's to use.

        In place of the parameters stand tensors that share their memory. Where a loss is still alive, torch hands a
        parameter's gradients to the node, and so to the stream, that its passes had, which ends a capture on another.
        """
        inputs = {name: value.clone() for name, value in tensors.items()}
        named = {name: value for name, value in self._transformer.named_parameters() if value.requires_grad}
        leaves = {name: value.detach().requires_grad_() for name, value in named.items()}
        parameters = list(named.values())
        made: list[Tensor] = []
        used: list[int] = []

        def forward() -> tuple[Tensor]:
            with Fills(), torch.enable_grad():  # a recorder may do it again where torch has switched them off
                made[:] = functional_call(self._transformer, leaves, (), {**inputs, **others})
            return (made[0].detach(),)

        def backward() -> list[Tensor]:
            found = torch.autograd.grad(made, list(leaves.values()), [output_gradient], allow_unused=True)
            used[:] = [at for at, gradient in enumerate(found) if gradient is not None]
            return [found[at] for at in used]

        recorder = self._apart()
        replay, (output,) = self._recorded(lambda: recorder(forward), "train.cuda_graphs")
        output_gradient = torch.empty_like(output)
        repeat, gradients = self._recorded(lambda: recorder(backward), "train.cuda_graphs")
        made.clear()
        return CapturedTrainingPass(
            inputs=inputs,
            forward=replay,
            output=output,
            output_gradient=output_gradient,
            backward=repeat,
            parameters=[parameters[at] for at in used],
            gradients=gradients,
        )

    def _recorded(self, record_it: Callable[[], Found], setting: str) -> Found:
        try:
            return record_it()
        except RuntimeError as error:
            for each in (error, error.__context__):  # what ends the capture in vain may hide why
                if isinstance(each, torch.OutOfMemoryError):
                    raise each from None
            said = str(error).partition("\n")[0].partition(". ")[0]
            raise SpotlightError(
                f"a pass of {type(self._transformer).__name__} cannot be captured as a CUDA graph ({said}): set "
                f"{setting} = false"
            ) from error


class _Repeated(torch.autograd.Function):
    """Repeats a pass, and in turn its backward pass, as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, learning: CapturedTrainingPass, *_: Parameter) -> Tensor:
        learning.forward()
        learning.is_ahead = True
        ctx.learning = learning
        return learning.output.clone()

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        learning: CapturedTrainingPass = ctx.learning
        learning.output_gradient.copy_(output_gradient)
        learning.backward()
        learning.is_ahead = False
        # As they are: torch copies what is held elsewhere before it adds to it
        return (None, *learning.gradients)


def _keep(known: dict[object, Found], key: object, value: Found, most: int) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        known.pop(next(iter(known)))


def _fill(inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        inputs[name].copy_(value)


def compute_blocks_again(transformer: Any) -> None:
    """Have passes with gradients keep each block's input only.

    Nothing is drawn in a block. So no generator's state is kept for it, which could not be captured.
    """
    transformer.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, preserve_rng_state=False))


class Graphs:
    """Records work as CUDA graphs, which share the memory for what is between their inputs and outputs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
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
