"""What a step and an update cost in the engine, beside bare diffusers and peft, and what a request costs in the system.

Both sides run the same transformer in this process, in turn; a figure is the median of the turns' ratios. An update's
bare side repeats the passes through the transformer that the engine's update made (with or without gradients), takes
the mean square of each as a loss, and one step of AdamW.

``python -m benchmarks.engine`` uses the embedded model. With a GPU it uses a random transformer of Qwen-Image's size at
512 and 1280 px, and also shows the achieved rate beside that of a matrix product, the cost of a LoRA and of a fixed
order of sums, what the cost model says, the memory, and how fast weights are loaded.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dask.local import get_sync
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from numpy.typing import NDArray
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import at_least, overhead
from graphs.iteration import iteration_graph
from graphs.layers import Graph
from graphs.requests import rollout_requests, unexplored
from graphs.tasks.context import RunContext, prepare
from spotlight import config
from spotlight.config import ModelSection
from spotlight.device import protocol
from spotlight.device.engine import InProcess
from spotlight.plan.durations import BACKWARD_LORA, GPUS, seconds_per_step
from spotlight.records import Request, WeightsRef
from spotlight.rl.checkpoints import FAMILIES, Network, Survey
from spotlight.rl.memory import estimate
from spotlight.rl.models import fix_order_of_sums
from spotlight.rl.models.attention import pack_texts
from spotlight.rl.models.base import Conditioning, Model
from spotlight.rl.models.captured import compute_blocks_again
from spotlight.rl.models.qwen_transformer import QwenTransformer
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards.base import Scorer
from spotlight.store.creating import create_run
from spotlight.store.rundir import RunDir

QWEN_IMAGE = {"patch_size": 2, "in_channels": 64, "out_channels": 16, "attention_head_dim": 128}
QWEN_HEADS, QWEN_TEXT_DIM, QWEN_LAYERS = 24, 3584, 60
TEXT_TOKENS = 64
"""Tokens of the random transformer's prompts."""
SAMPLES = 2
"""Samples in a batch of the random transformer."""
SQUARE = 8192
"""Side of the matrices whose product is timed."""


class SeedlessScorer(Scorer):
    """Rewards that differ and cost nothing: a checksum of the image."""

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        return [int(image.sum(dtype=np.int64)) % 97 / 97 for image in images_BHWC]


class RandomQwen(QwenTransformer):
    """A transformer of Qwen-Image's shape with random weights; its texts and images are random, too."""

    def __init__(self, device: torch.device, *, layers: int) -> None:
        self.device = device
        with torch.device(device):
            self.transformer = QwenImageTransformer2DModel(
                **QWEN_IMAGE,
                num_layers=1,
                num_attention_heads=QWEN_HEADS,
                joint_attention_dim=QWEN_TEXT_DIM,
                axes_dims_rope=(16, 56, 56),
            ).to(torch.bfloat16)
        blocks = self.transformer.transformer_blocks
        blocks.extend(deepcopy(blocks[0]) for _ in range(layers - 1))  # never all of them in float32: that is 82 GB

    def encode(self, texts: Sequence[str]) -> Conditioning:
        draw = torch.Generator().manual_seed(0)
        embeds_BTD = torch.randn(1, TEXT_TOKENS, QWEN_TEXT_DIM, generator=draw).expand(len(texts), -1, -1)
        mask_BT = torch.ones(len(texts), TEXT_TOKENS, dtype=torch.bool)
        return Conditioning(embeds_BTD=embeds_BTD.to(self.device), mask_BT=mask_BT.to(self.device))

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        return height_px // 16, width_px // 16

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        return tuple(1 - step / steps for step in range(steps + 1))

    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        return (x_BNC.float().cpu().numpy()[:, :16, :3, None] * 40).astype(np.uint8).repeat(3, axis=3)

    @property
    def small_px(self) -> tuple[int, int]:
        return 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run in this process, and its model."""

    run: RunDir
    settings: config.Config
    device: InProcess
    context: RunContext

    @property
    def model(self) -> Model:
        return self.device.engine(str(self.run.path)).model

    def requests(self, iteration: int, weights: WeightsRef) -> list[Request]:
        prompts = read_prompts(self.settings.data.train_prompts)[: self.settings.rollout.prompts]
        selection = unexplored(self.settings, self.context, iteration, prompts)
        return rollout_requests(self.settings, self.context, selection, weights)

    def graph(self, iteration: int, weights: WeightsRef) -> Graph:
        prompts = read_prompts(self.settings.data.train_prompts)[: self.settings.rollout.prompts]
        selection = unexplored(self.settings, self.context, iteration, prompts)
        return iteration_graph(self.settings, self.context, selection, weights, None)


@contextmanager
def bench(overrides: Sequence[str], model: Callable[[], Model] | None = None) -> Iterator[Bench]:
    """A new run, with ``model`` in place of the settings' model if it is given."""
    with tempfile.TemporaryDirectory() as directory, protocol.using(InProcess()):
        device = protocol.current()
        assert isinstance(device, InProcess)
        more = [f"run.dir={directory}", 'strategy.exploration="off"', 'reward.name="benchmarks.engine:SeedlessScorer"']
        settings = config.load(overhead.SETTINGS, [*more, *overrides])
        run = create_run(settings, time.time())
        if model:
            made, train = model(), settings.train
            made.make_trainable(rank=train.lora_rank, alpha=train.lora_alpha, seed=settings.run.seed)
            device.engine(str(run.path)).resident.__dict__["model"] = made  # where its cached property keeps it
        yield Bench(run=run, settings=settings, device=device, context=prepare(str(run.path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds of some work."""

    wall_s: float
    """Seconds of the clock, with the GPU's work."""
    cpu_s: float
    """CPU seconds of this process, which other work on the machine hardly changes."""


def took(work: Callable[[], object]) -> Took:
    _finish()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    _finish()
    return Took(wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Medians over all turns but the first, which warms up."""

    bare_s: float
    ratio: float
    """Bare / engine, in clock seconds."""
    cpu_ratio: float
    """The same in CPU seconds."""


def compared(bare: Sequence[Took], engine: Sequence[Took]) -> Compared:
    pairs = list(zip(bare, engine, strict=True))[1:]
    return Compared(
        bare_s=statistics.median(bare.wall_s for bare, _ in pairs),
        ratio=statistics.median(bare.wall_s / ours.wall_s for bare, ours in pairs),
        cpu_ratio=statistics.median(bare.cpu_s / ours.cpu_s for bare, ours in pairs),
    )


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def steps(made: Bench, turns: int) -> Compared:
    """Compare all steps of a request."""
    (template, *_) = made.requests(0, made.context.start)
    bare, engine = [], []
    for turn in range(turns + 1):
        first = turn * len(template.seeds)
        request = replace(template, sampler="ode", seeds=tuple(range(first, first + len(template.seeds))))
        bare.append(took(partial(bare_rollout, made.model, request)))
        engine.append(took(partial(made.device.rollout, str(made.run.path), request)))
    return compared(bare, engine)


@torch.no_grad()
def bare_rollout(model: Model, request: Request) -> Tensor:
    """Euler steps with diffusers' transformer and nothing else; without guidance."""
    text = model.encode([request.prompt.text]).rows([0] * len(request.seeds))
    tokens, channels = model.latent_shape(request.height_px, request.width_px)
    x_BNC = torch.randn(len(request.seeds), tokens, channels, device=model.device)
    for sigma, sigma_next in zip(request.sigmas, request.sigmas[1:], strict=False):
        x_BNC = x_BNC + (sigma_next - sigma) * _forward(model, x_BNC, sigma, text, request)
    return x_BNC.cpu()


def _forward(model: Model, x_BNC: Tensor, sigma: float, text: Conditioning, request: Request) -> Tensor:
    transformer, dtype, batch = model.transformer, model.dtype, x_BNC.shape[0]
    (v_BNC,) = transformer(
        hidden_states=x_BNC.to(dtype),
        encoder_hidden_states=text.embeds_BTD.to(dtype),
        encoder_hidden_states_mask=text.mask_BT,
        timestep=torch.full((batch,), sigma, device=model.device, dtype=dtype),
        img_shapes=[[(1, *model.grid(request.height_px, request.width_px))]] * batch,
        return_dict=False,
    )
    return v_BNC.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward pass that an update made of the transformer."""

    arguments: dict[str, Any]
    with_gradient: bool


def updates(made: Bench, turns: int) -> tuple[Compared, list[Pass]]:
    """Compare an update and its publishing; also returns the update's passes."""
    weights, bare, engine = made.context.start, [], []
    made_of: list[Pass] = []
    for turn in range(turns + 1):
        graph = made.graph(turn, weights)
        _computed(graph, "training")  # the rollouts and scores, which the update finds done
        with passes(made.model.transformer) as found:
            engine.append(took(partial(_computed, graph, "published")))
        weights = _computed(graph, "published").weights
        bare.append(took(partial(bare_update, made.model, found)))
        made_of = found
    return compared(bare, engine), made_of


def _computed(graph: Graph, output: str) -> Any:
    wanted = graph.outputs[output]
    keys = wanted if isinstance(wanted, list) else [wanted]
    found = get_sync(graph.graph.cull(set(keys)), keys)
    return found if isinstance(wanted, list) else found[0]


@contextmanager
def passes(transformer: Any) -> Iterator[list[Pass]]:
    """Yields a list that gets the passes made inside."""
    found: list[Pass] = []

    def note(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept = {name: each.detach() if isinstance(each, Tensor) else each for name, each in named.items()}
        found.append(Pass(arguments=kept, with_gradient=torch.is_grad_enabled()))

    hook = transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def bare_update(model: Model, made: Sequence[Pass]) -> None:
    """The same passes, backward where they had gradients, and one step of AdamW, which changes nothing."""
    parameters = model.parameters()
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    for each in made:
        with torch.set_grad_enabled(each.with_gradient):
            (v_BNC,) = model.transformer(**each.arguments)
            if each.with_gradient:
                v_BNC.float().square().mean().backward()
    optimizer.step()
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient


def on_cpu(turns: int, samples: int) -> None:
    """The embedded model, in batches for which a step takes some 0.2 s; then requests of 0.5 s on a cluster of one."""
    print("| what | bare, s | bare / engine (goal 0.98) | the same in CPU seconds |\n|---|---|---|---|", flush=True)
    sized = [f"rollout.seeds_kept={samples}", f"rollout.request_seeds={samples}", "rollout.prompts=1"]
    with bench(sized) as made:
        count = made.settings.rollout.steps
        print(_row(f"{count} steps of {samples} samples", steps(made, turns)), flush=True)
        found, made_of = updates(made, turns)
        print(_row(f"an update of {samples} samples, {len(made_of)} passes", found), flush=True)
    batch = max(8, samples * 5 // 16)
    bare_s, _, ratios = overhead.measure(batch, 8, turns)
    ratio = statistics.median(ratios)
    print(f"| a request of {batch} samples, 8 steps, through the whole system | {bare_s:.3f} | {ratio:.3f} | |")


def _row(what: str, found: Compared) -> str:
    return f"| {what} | {found.bare_s:.3f} | {found.ratio:.3f} | {found.cpu_ratio:.3f} |"


def passes_on_gpu(turns: int, layers: int, rank: int, sizes: Sequence[int], forms: Sequence[str]) -> None:
    """Measure passes of a random transformer of Qwen-Image's size."""
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    rate = matrix_rate(device)
    print(f"{name}: {rate / 1e12:.0f} TFLOP/s in a product of {SQUARE} x {SQUARE} bfloat16")
    print(f"weights come in at {map_in_rate(device) / 1e9:.1f} GB/s (a file in the page cache, to the GPU)\n")
    fix_order_of_sums(ModelSection(device="cuda"))
    model = RandomQwen(device, layers=layers)
    compute_blocks_again(model.transformer)
    model.make_trainable(rank=rank, alpha=0, seed=0)
    print(f"LoRA of rank {rank}, without one it computes at TFLOP/s (of the product's)\n")
    print("| a pass | form | s | GPU busy, s | cost model, s | TFLOP/s |\n" + "|---" * 6 + "|", flush=True)
    for px in sizes:
        for samples in (4 * SAMPLES, SAMPLES, 1) if px <= 512 else (SAMPLES,):  # as many as training has room for
            for row in _passes_rows(model, px, samples, turns, rate, forms):
                print(row, flush=True)


def engine_on_gpu(turns: int, layers: int, rank: int, sizes: Sequence[int]) -> None:
    """Measure the engine with the same transformer."""
    print(f"\n| what, {SAMPLES} samples | bare, s | bare / engine (goal 0.98) | in CPU seconds ", end="")
    print("| cost model, s | memory, GB | estimated, GB |\n" + "|---" * 7 + "|", flush=True)
    for px in sizes:
        sized = [f"model.height_px={px}", f"model.width_px={px}", "rollout.prompts=1", f"rollout.seeds_kept={SAMPLES}"]
        more = [f"rollout.request_seeds={SAMPLES}", f"run.validation_seeds={SAMPLES}", "rollout.guidance=1"]
        large = [f"train.lora_rank={rank}", 'model.device="cuda"', "train.timesteps=2", f"train.micro_batch={SAMPLES}"]
        with bench([*sized, *more, *large], partial(RandomQwen, torch.device("cuda"), layers=layers)) as made:
            compute_blocks_again(made.model.transformer)
            costs = CostModel(made)
            torch.cuda.reset_peak_memory_stats()
            found, count = steps(made, turns), made.settings.rollout.steps
            used = f"{count * costs.step_s:.2f} | {_peak_gb():.1f} | {costs.denoising_gb:.1f}"
            print(_row(f"{px} px: {count} steps", found) + f" {used} |", flush=True)
            torch.cuda.reset_peak_memory_stats()
            found, made_of = updates(made, turns)
            used = f"{costs.passes_s(made_of):.2f} | {_peak_gb():.1f} | {costs.training_gb:.1f}"
            print(_row(f"{px} px: an update, {len(made_of)} passes", found) + f" {used} |", flush=True)
        del made, costs
        gc.collect()  # modules refer to each other in cycles
        torch.cuda.empty_cache()


def _passes_rows(
    model: RandomQwen, px: int, samples: int, turns: int, rate: float, forms: Sequence[str]
) -> Iterator[str]:
    """Table of a forward pass, and of one with its backward pass, each in several forms."""
    text = model.encode([""] * samples)
    x_BNC = torch.randn(samples, *model.latent_shape(px, px), device=model.device)
    sigma_B = torch.full((samples,), 0.5, device=model.device)
    work = partial(model.predict, x_BNC, sigma_B, text, px, px, 1.0)
    modelled_s = samples * seconds_per_step("qwen-image", px, px, gpu=gpu_name())

    def learn() -> None:
        work().square().mean().backward()

    for form in forms:
        within, learns = FORMS[form], form.startswith(LEARNS)
        with within(model), nullcontext() if learns else torch.no_grad():
            does = learn if learns else work
            does()
            wall_s = statistics.median([took(does).wall_s for _ in range(turns + 1)][1:])
            busy_s, expected_s = _kernels_s(does), modelled_s * (1 + BACKWARD_LORA if learns else 1)
            speed = ""
            if form == WITHOUT_LORA:
                with FlopCounterMode(display=False) as counter:
                    does()
                flops_per_s = counter.get_total_flops() / wall_s
                speed = f"{flops_per_s / 1e12:.0f} ({flops_per_s / rate:.2f})"
        yield f"| {px} px, {samples} samples | {form} | {wall_s:.3f} | {busy_s:.3f} | {expected_s:.2f} | {speed} |"


def _kernels_s(work: Callable[[], object]) -> float:
    """Seconds in which the GPU runs kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in found.key_averages()) / 1e6


@contextmanager
def as_peft(model: Model) -> Iterator[None]:
    """Inside, the LoRA's layers compute in float32, as in peft."""
    layers: list[Any] = [each for each in model.transformer.modules() if isinstance(each, LoraLayer)]
    ours = [each.__dict__.pop("forward") for each in layers]
    try:
        yield
    finally:
        for each, forward in zip(layers, ours, strict=True):
            each.forward = forward


@contextmanager
def packing(model: Model) -> Iterator[None]:
    """Inside, attention has no mask (`model.pack_texts`)."""
    attentions = [block.attn for block in model.transformer.transformer_blocks]
    plain = [each.processor for each in attentions]
    pack_texts(model.transformer)
    try:
        yield
    finally:
        for each, processor in zip(attentions, plain, strict=True):
            each.processor = processor


@contextmanager
def in_any_order(_: Model) -> Iterator[None]:
    """Inside, sums have no fixed order (`model.deterministic = false`)."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def _within(*contexts: Callable[[Model], AbstractContextManager[Any]]) -> Callable[[Model], ExitStack]:
    """All contexts, nested."""

    def entered(model: Model) -> ExitStack:
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context(model))
        return stack

    return entered


def _capturing(model: Model) -> AbstractContextManager[Any]:
    model.__dict__.pop("_captured", None)  # graphs of another form
    return model.capturing()


WITHOUT_LORA, LEARNS = "without a LoRA", "with backward"
FORMS = {
    WITHOUT_LORA: _within(lambda model: model.reference()),
    "with it": _within(),
    "as peft computes it": _within(as_peft),
    "without a mask": _within(packing),
    "captured": _within(_capturing),
    "captured, without a mask": _within(packing, _capturing),
    LEARNS: _within(),
    f"{LEARNS}, as peft computes it": _within(as_peft),
    f"{LEARNS}, without a mask": _within(packing),
    f"{LEARNS}, captured": _within(_capturing),
    f"{LEARNS}, captured, without a mask": _within(packing, _capturing),
    f"{LEARNS}, without a fixed order of sums": _within(in_any_order),
    f"{LEARNS}, without either": _within(packing, in_any_order),
}
"""Of a pass."""


class CostModel:
    """What the simulator says of the same work (`plan.durations`), and `rl.memory` of its memory."""

    def __init__(self, made: Bench) -> None:
        settings, transformer = made.settings, made.model.transformer
        model = {"name": "qwen-image", "dtype": "bfloat16", "gradient_checkpointing": True}
        large = settings.model_copy(update={"model": settings.model.model_copy(update=model)})
        weights = {name.replace(".base_layer", ""): tuple(at.shape) for name, at in transformer.state_dict().items()}
        shapes = {name: shape for name, shape in weights.items() if ".lora_" not in name}
        survey = Survey(
            family=FAMILIES["qwen-image"],
            transformer=Network(config=transformer.config, shapes=shapes),
            vae=Network(config={"base_dim": 96, "temperal_downsample": (False, True, True)}, shapes={}),  # here is none
            encoders=(),
        )
        _, denoising, _, training = estimate(survey, large, QwenTransformer.lora_targets)
        self.denoising_gb, self.training_gb = (each.total_bytes / 1e9 for each in (denoising, training))
        size = settings.model.height_px, settings.model.width_px
        self._forward_s = seconds_per_step("qwen-image", *size, gpu=gpu_name())
        self.step_s = SAMPLES * self._forward_s

    def passes_s(self, passes: Sequence[Pass]) -> float:
        """Seconds of an update with these passes."""
        rows = ((len(each.arguments["hidden_states"]), each.with_gradient) for each in passes)
        return sum(count * self._forward_s * (1 + BACKWARD_LORA * learns) for count, learns in rows)


def gpu_name() -> str:
    """The GPU's name in the cost model; "h100" for those that it does not know."""
    name = torch.cuda.get_device_name().lower()
    return next((known for known in GPUS if known in name), "h100")


def _peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9


def matrix_rate(device: torch.device, times: int = 20) -> float:
    """FLOP/s of a large product in bfloat16."""
    a, b = (torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return times * 2 * SQUARE**3 / took(lambda: [a @ b for _ in range(times)]).wall_s


def map_in_rate(device: torch.device, gb: float = 2.0) -> float:
    """Bytes a second from a cached safetensors file to the device."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "weights.safetensors"
        save_file({f"{at}": torch.zeros(int(gb * 1e9 / 16), dtype=torch.bfloat16) for at in range(8)}, file)
        load_file(file)
        took_s = took(lambda: [each.to(device) for each in load_file(file).values()]).wall_s
    return gb * 1e9 / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=at_least(1), default=7)
    parser.add_argument("--samples", type=at_least(1), default=512, help="samples of a batch, on a CPU (%(default)s)")
    parser.add_argument(
        "--layers", type=at_least(1), default=QWEN_LAYERS, help="layers of the random transformer (%(default)s)"
    )
    parser.add_argument(
        "--sizes",
        type=at_least(1),
        nargs="+",
        default=[512, 1280],
        help="image sizes in pixels, on a GPU (%(default)s)",
    )
    parser.add_argument("--rank", type=at_least(1), default=32, help="rank of its LoRA (%(default)s)")
    parser.add_argument("--only", choices=["passes", "engine"], help="only one of the two tables of a GPU")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms of its passes (all)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    if torch.cuda.is_available() and not arguments.cpu:
        large = arguments.turns, arguments.layers, arguments.rank, arguments.sizes
        if arguments.only != "engine":
            passes_on_gpu(*large, arguments.forms)
            gc.collect()  # modules refer to each other in cycles
            torch.cuda.empty_cache()
        if arguments.only != "passes":
            engine_on_gpu(*large)
    else:
        on_cpu(arguments.turns, arguments.samples)


if __name__ == "__main__":
    main()
