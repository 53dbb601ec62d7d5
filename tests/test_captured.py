"""Captured passes: the bits of plain ones, one graph for each shape, and nothing in them that a GPU cannot capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor
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
        model = made.model(name, Loading(device=at, dtype=torch.float32))
    else:
        directory = made._root / LARGE.replace(" ", "-")
        if not directory.exists():
            qwen_image_of_layers(directory, 2)
        model = QwenImage.load(str(directory), Loading(device=at, dtype=torch.bfloat16))
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


def test_a_pass_that_is_to_be_learned_from_is_not_captured() -> None:
    model = tiny_model(lora=True)

    with pytest.raises(AssertionError, match="no gradients"), model.capturing():
        gradients(model)


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


def as_captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    with FromHost(), Captured():
        return lambda: None, work()


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("name", ["tiny-text", *FAMILIES, "packed"])
def test_a_pass_neither_waits_for_the_host_nor_reads_from_it(
    made: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, fills: bool
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

    with torch.no_grad():
        run(**arguments)
        if name not in ("sd3", "flux") and not fills:
            with pytest.raises(AssertionError, match="as_tensor"):
                run(**arguments)
        else:
            assert run(**arguments)[0].device.type == "meta"


def test_what_cannot_be_captured_is_named_with_the_way_out(made: Checkpoints) -> None:
    def refuses(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing. Compile with")

    run = CapturedPasses(lambda **arguments: (arguments["x"],), refuses)
    run(x=torch.ones(1))

    with pytest.raises(SpotlightError, match=r"cannot be captured .*is capturing\): set model\.cuda_graphs = false"):
        run(x=torch.ones(1))


@pytest.mark.parametrize("hidden", [False, True])
def test_the_memory_that_a_graph_does_not_get_is_spoken_of_as_everywhere(hidden: bool) -> None:
    def fills_up(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        try:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        finally:
            if hidden:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    run = CapturedPasses(lambda **arguments: (arguments["x"],), fills_up)
    run(x=torch.ones(1))

    with pytest.raises(torch.OutOfMemoryError):
        run(x=torch.ones(1))


def test_the_graphs_of_the_shapes_used_last_are_kept() -> None:
    repeats = Repeats()
    run = CapturedPasses(lambda **arguments: (2 * arguments["x"],), repeats)

    for rows in (1, 1, 2, 2, 1, *range(3, KEPT + 2), 1, 2, 2):
        assert torch.equal(run(x=torch.full((rows,), 3.0))[0], torch.full((rows,), 6.0))

    assert [len(output) for output in repeats.recorded] == [1, 2, 2]


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_stay_where_a_graph_reads_them(rank: int) -> None:
    """Whatever is loaded, compared with or learned in between."""
    model = tiny_model()
    model.make_trainable(rank=rank, alpha=0, seed=0)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    state = {name: value + 1 for name, value in model.trainable().items()}
    trainer = Trainer(model, TrainSection(lora_rank=rank, old_decay=0.5, ema_decay=0.5), seed=0)

    model.load_trainable(state)
    with model.reference():
        pass
    with model.standing_in([parameter.detach().clone() for parameter in model.parameters()]):
        model.load_trainable(state)
    gradient = {f"{at}": torch.ones_like(parameter) for at, parameter in enumerate(model.parameters())}
    assert trainer.step(1, [gradient], iteration=0, update=0) > 0
    trainer.load_state(trainer.state(), trainer.old())

    assert [parameter.data_ptr() for parameter in model.parameters()] == places
