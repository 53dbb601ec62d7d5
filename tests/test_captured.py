"""Captured passes: the bits of plain ones, one graph for each shape, and nothing in them that a GPU cannot capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine import passes
from gangs import gradients, tiny_model
from pipelines import qwen_image_of_layers
from recorders import Repeats
from spotlight.config import TrainSection
from spotlight.records import SpotlightError
from spotlight.rl.models import Loading, Model, attention, captured
from spotlight.rl.models.attention import Packing
from spotlight.rl.models.captured import KEPT, CapturedPasses
from spotlight.rl.models.qwen_image import QwenImage
from spotlight.rl.trainer import Trainer
from test_families import FAMILIES, LONG, SHORT, Checkpoints

LARGE, PACKED = "two of 60 layers", "two of 60 layers without a mask"
MODELS = ("tiny-text", *FAMILIES, LARGE, PACKED)
CASES = [(name, "cpu") for name in MODELS[:-2]]
CASES += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in MODELS]  # type: ignore[misc]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def load(name: str, made: Checkpoints, device: str) -> Model:
    """With a LoRA that changes the output."""
    at = torch.device(device)
    model: Model
    if name == "tiny-text":
        return tiny_model(lora=True, device=at)
    if name in FAMILIES:
        model = made.model(name, Loading(device=at, dtype=torch.float32, gradient_checkpointing=True))
    else:
        directory = made._root / LARGE.replace(" ", "-")
        if not directory.exists():
            qwen_image_of_layers(directory, 2)
        model = QwenImage.load(str(directory), Loading(device=at, dtype=torch.bfloat16, gradient_checkpointing=True))
        model.preload([SHORT, LONG])
        if name == PACKED:
            attention.pack_texts(model.transformer)
    model.make_trainable(rank=4, alpha=0, seed=0)
    move(model, seed=1)
    return model


def move(model: Model, seed: int) -> None:
    """Change what is trained, in place, as loading another version does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.device)


@torch.no_grad()
def velocity(model: Model, seed: int, *, rows: int = 2) -> Tensor:
    """Guided, of other noise and noise levels with every seed."""
    draw = torch.Generator().manual_seed(seed)
    height_px, width_px = (256, 256) if model.dtype == torch.bfloat16 else (16, 32)
    x_BNC = torch.randn(rows, *model.latent_shape(height_px, width_px), generator=draw).to(model.device)
    texts = model.encode([SHORT, LONG][:rows])
    levels_B = torch.rand(rows, generator=draw).to(model.device)
    return model.velocity(x_BNC, levels_B, texts, height_px=height_px, width_px=width_px, guidance=2.0)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_captured_passes_give_the_bits_of_plain_ones(
    made: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    model = load(name, made, device)
    if device == "cpu":
        monkeypatch.setattr(captured, "Graphs", Repeats)

    for seed in range(4):
        move(model, seed)
        plain, plain_alone = velocity(model, seed), velocity(model, seed, rows=1)
        with model.capturing():
            assert torch.equal(velocity(model, seed), plain)
            assert torch.equal(velocity(model, seed, rows=1), plain_alone)

    assert plain.abs().max() > 0
    recorded = [known for known in model._captured._known.values() if known]
    assert len(recorded) == 2  # one for each number of rows


def learned(model: Model, old: Sequence[Tensor], *, guidance: float, rows: Sequence[int] = (2, 2)) -> list[Tensor]:
    """The gradients of micro-batches: each is contrasted with an older policy and with the one before all training."""
    draw = torch.Generator().manual_seed(0)
    height_px, width_px = (256, 256) if model.dtype == torch.bfloat16 else (16, 32)
    for parameter in model.parameters():
        parameter.grad = None
    for count in rows:
        x_BNC = torch.randn(count, *model.latent_shape(height_px, width_px), generator=draw).to(model.device)
        levels_B = torch.rand(count, generator=draw).to(model.device)
        texts = model.encode([SHORT, LONG][:count])
        predicted = partial(model.velocity, x_BNC, levels_B, texts, height_px=height_px, width_px=width_px)
        with torch.no_grad(), model.reference():
            base_BNC = predicted(guidance=guidance)
        with torch.no_grad(), model.standing_in(old):
            old_BNC = predicted(guidance=guidance)
        v_BNC = predicted(guidance=guidance)
        loss = (v_BNC - 2 * old_BNC).square().mean() + 0.1 * (v_BNC - base_BNC).square().mean()
        loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.live), 2.0])
@pytest.mark.parametrize(("name", "device"), CASES)
def test_captured_passes_give_the_gradients_of_plain_ones(
    made: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, device: str, guidance: float
) -> None:
    """With guidance, two passes of the same shapes await their backward passes."""
    model = load(name, made, device)
    old = [parameter.detach() * 0.5 for parameter in model.parameters()]
    if device == "cpu":
        monkeypatch.setattr(captured, "Graphs", Repeats)

    for seed in range(3):
        move(model, seed)
        plain = learned(model, old, guidance=guidance)
        with model.capturing():
            found = learned(model, old, guidance=guidance)

        assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))

    assert any(gradient.abs().max() > 0 for gradient in plain if gradient.numel())
    assert [bool(known) for known in model._captured._known_learning.values()] == [True]
    assert {bool(known) for known in model._captured._known.values()} == {True}


def test_a_pass_whose_backward_never_came_is_repeated_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "Graphs", Repeats)
    model = tiny_model(lora=True)
    plain = gradients(model)
    recorded = []
    for fails in (False, True, False):
        with suppress(ZeroDivisionError), model.capturing():
            gradients(model)
            if fails:
                gradients(model, fails=lambda: 1 / 0)
        recorded.append(next(iter(model._captured._known_learning.values())))

    with model.capturing():
        assert all(map(np.array_equal, gradients(model), plain))
    assert recorded[0] is None
    assert recorded[1] is recorded[2]
    assert recorded[2]
    assert not recorded[2].is_ahead


def test_a_pass_is_captured_once_its_backward_pass_has_come() -> None:
    """Before, the kernels of the backward pass are not set up; with guidance, two passes await theirs."""
    repeats = Repeats()
    run = CapturedPasses(Layer(), repeats)
    outputs = [run(x=torch.ones(1))[0] for _ in range(2)]
    before = len(repeats.recorded)

    torch.cat(outputs).sum().backward()
    run(x=torch.ones(1))

    assert before == 0
    assert len(repeats.recorded) == 2  # forward and backward


def test_no_gradient_of_a_graph_goes_where_those_of_a_living_loss_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps a parameter's node, and the stream that it was made on, as long as any loss of it is alive."""
    layer = Layer()
    run = CapturedPasses(layer, Repeats())
    (loss,) = run(x=torch.ones(1))
    loss.backward()
    living = [get_gradient_edge(parameter).node for parameter in layer.parameters()]
    found: list[bool] = []

    def spied(outputs: Any, inputs: Sequence[Tensor], *others: Any, **named: Any) -> Any:
        found.extend(get_gradient_edge(each).node in living for each in inputs)
        return grad(outputs, inputs, *others, **named)

    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", spied)
    run(x=torch.ones(1))

    assert found == [False, False]


class Captured(TorchDispatchMode):
    """Inside, all is on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, *(kwargs or {}).values(), output) if isinstance(each, Tensor)]
        assert not any(each.device.type == "cpu" for each in tensors), f"{func} of the host"
        return output


class FromHost(TorchFunctionMode):
    """Inside, no tensor is made of numbers of the host; to read one from the device, torch itself refuses."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{func} of {args[0]}"
        return func(*args, **(kwargs or {}))


Work = Callable[[], Sequence[Tensor]]
CapturedPass = tuple[Callable[[], None], Sequence[Tensor]]


class Layer(torch.nn.Linear):
    """What it takes to be called as a transformer."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


def as_captured(work: Work) -> CapturedPass:
    with FromHost(), Captured():
        return lambda: None, work()


@pytest.mark.parametrize(("fills", "learns"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", ["tiny-text", *FAMILIES, "packed"])
def test_a_pass_neither_waits_for_the_host_nor_reads_from_it(
    made: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, fills: bool, learns: bool
) -> None:
    """Neither can be captured. On torch's meta device both are seen, without a GPU."""
    model = load("qwen-image" if name == "packed" else name, made, "cpu")
    with passes(model.transformer) as found:
        velocity(model, 0)
    if name == "packed":
        monkeypatch.setattr(transformer_qwenimage, "dispatch_attention_fn", attention._dispatch)
        for block in model.transformer.transformer_blocks:
            block.attn.processor = Packing()
    arguments = {
        name: each.to("meta") if isinstance(each, Tensor) else each for name, each in found[0].arguments.items()
    }
    rope = model.transformer.pos_embed
    model.transformer.to("meta")
    for angles in {"pos_freqs", "neg_freqs"} & vars(rope).keys():
        setattr(rope, angles, getattr(rope, angles).to("meta"))
    if not fills:
        monkeypatch.setattr(captured, "Fills", nullcontext)
    run = CapturedPasses(model.transformer, as_captured)

    with torch.set_grad_enabled(learns):
        (first,) = run(**arguments)
        if learns:
            first.backward(torch.empty_like(first))
        if name not in ("sd3", "flux") and not fills:
            with pytest.raises(AssertionError, match="as_tensor"):
                run(**arguments)
        else:
            (output,) = run(**arguments)
            assert output.device.type == "meta"
            assert output.requires_grad == learns


@pytest.mark.parametrize(("learns", "setting"), [(False, r"model\.cuda_graphs"), (True, r"train\.cuda_graphs")])
def test_what_cannot_be_captured_is_named_with_the_way_out(learns: bool, setting: str) -> None:
    def refuses(work: Work) -> CapturedPass:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing\n"
            "Search for `cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com for more information. Compile"
        )

    run = CapturedPasses(Layer(), refuses)
    with torch.set_grad_enabled(learns):
        (output,) = run(x=torch.ones(1))
        if learns:
            output.backward()

        with pytest.raises(SpotlightError, match=rf"graph \(CUDA error: .* is capturing\): set {setting} = false"):
            run(x=torch.ones(1))


@pytest.mark.parametrize("hidden", [False, True])
@torch.no_grad()
def test_the_memory_that_a_graph_does_not_get_is_spoken_of_as_everywhere(hidden: bool) -> None:
    def fills_up(work: Work) -> CapturedPass:
        try:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        finally:
            if hidden:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    run = CapturedPasses(lambda **arguments: (arguments["x"],), fills_up)
    run(x=torch.ones(1))

    with pytest.raises(torch.OutOfMemoryError):
        run(x=torch.ones(1))


@torch.no_grad()
def test_the_graphs_of_the_shapes_used_last_are_kept() -> None:
    repeats = Repeats()
    run = CapturedPasses(lambda **arguments: (2 * arguments["x"],), repeats)

    for rows in (1, 1, 2, 2, 1, *range(3, KEPT + 2), 1, 2, 2):
        assert torch.equal(run(x=torch.full((rows,), 3.0))[0], torch.full((rows,), 6.0))

    assert [len(output) for (output,) in repeats.recorded] == [1, 2, 2]


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_stay_where_a_graph_reads_them(rank: int) -> None:
    """Whatever is loaded, compared with or learned in between."""
    model = tiny_model()
    model.make_trainable(rank=rank, alpha=0, seed=0)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    state = {name: value + 1 for name, value in model.trainable().items()}
    trainer = Trainer(model, TrainSection(lora_rank=rank, old_decay=0.5, ema_decay=0.5))

    model.load_trainable(state)
    with model.reference():
        pass
    with model.standing_in([parameter.detach().clone() for parameter in model.parameters()]):
        model.load_trainable(state)
    gradient = {f"{at}": torch.ones_like(parameter) for at, parameter in enumerate(model.parameters())}
    assert trainer.step(1, [gradient], iteration=0, update=0) > 0
    trainer.load_state(trainer.state(), trainer.old())

    assert [parameter.data_ptr() for parameter in model.parameters()] == places


class Keys:
    """In place of captured passes: by which weights they are told apart."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer, self.seen = transformer, list[tuple[object, ...]]()

    def __call__(self, weights: tuple[object, ...], **arguments: Any) -> Any:
        self.seen.append(weights)
        return self.transformer(**arguments)

    def forget(self, *_: object) -> None:
        pass

    __getattr__ = forget


def test_a_pass_is_known_by_its_weights_though_the_first_was_the_references() -> None:
    """Inside, a LoRA has no parameters; training asks the reference first."""
    model = tiny_model(lora=True, device=torch.device("cpu"))
    keys = vars(model)["_captured"] = Keys(model.transformer)
    height_px, width_px = model.small_px
    tokens, channels = model.latent_shape(height_px, width_px)

    def denoise() -> None:
        x_BNC, sigma_B = torch.zeros(1, tokens, channels), torch.ones(1)
        text = model.encode(['"47"'])
        model.velocity(x_BNC, sigma_B, text, height_px=height_px, width_px=width_px, guidance=1.0)

    model._capturing = True
    with torch.no_grad():
        with model.reference():
            denoise()
        denoise()

    weights = tuple(parameter.data_ptr() for parameter in model.parameters())
    assert keys.seen == [(True, *weights), (False, *weights)]
