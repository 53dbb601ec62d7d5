"""How long work takes: a cost model of denoising, training, scoring and loading, and what a run's settings ask of it.

Pure: no clock, no file, no Dask. It is calibrated to published runs and to the embedded model; what a number is from,
and what is assumed, stands beside it. Seconds are those of one GPU or one group of GPUs; what they cost is
`market.ledger`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TypeVar

from spotlight.config import Config, TrainSection
from spotlight.market.prices import USUAL_GPU
from spotlight.records import Pool, SpotlightError, record

T = TypeVar("T")

EFFICIENCY = 0.215
"""Share of a GPU's peak that a whole run sustains. Calibrated to three published Qwen-Image runs at 512 px on H800 and
H200, which give 0.210, 0.210 and 0.221; it absorbs text encoding, VAE and waits. On other GPUs it is assumed."""
LINK_EFFICIENCY, COLLECTIVE_S = 0.7, 30e-6
"""Share of the link's peak that an all-to-all reaches, and what starting one costs. Assumed."""


@record
class Transformer:
    """What of a diffusion transformer its speed depends on."""

    layers: int
    dim: int
    heads: int
    px_per_token: int
    """Edge of the square of pixels behind one latent token: VAE factor x patch."""
    text_tokens: int
    weights_bytes: float


@record
class Gpu:
    """What a worker computes with: a GPU as its maker describes it, or a processor's core."""

    flops_per_s: float
    """Dense bfloat16."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """Bandwidth to its neighbours in the node, in one direction."""
    collective_s: float = COLLECTIVE_S
    """What starting an all-to-all costs."""
    train_speed: float = 1.0
    """Operations per second in training, whose batches are large, over those in denoising."""


TRANSFORMERS = {
    # Published: the checkpoint's own settings; 20.43e9 parameters in bfloat16. About 100 text tokens is inferred.
    "qwen-image": Transformer(layers=60, dim=3072, heads=24, px_per_token=16, text_tokens=100, weights_bytes=40.9e9),
    # The embedded models, as `rl.models.tiny` builds them, in float32.
    "tiny-text": Transformer(layers=3, dim=64, heads=4, px_per_token=4, text_tokens=8, weights_bytes=1.97e6),
    "tiny-mixed": Transformer(layers=3, dim=128, heads=4, px_per_token=4, text_tokens=8, weights_bytes=7.54e6),
    "tiny-shapes": Transformer(layers=3, dim=96, heads=4, px_per_token=4, text_tokens=8, weights_bytes=4.34e6),
}
GPUS = {  # published: the makers' data sheets
    "a100": Gpu(flops_per_s=312e12, bytes_per_s=2.04e12, link_bytes_per_s=300e9),
    "b200": Gpu(flops_per_s=2250e12, bytes_per_s=8.0e12, link_bytes_per_s=900e9),
    "h100": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=450e9),
    "h200": Gpu(flops_per_s=989e12, bytes_per_s=4.8e12, link_bytes_per_s=450e9),
    "h800": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=200e9),
    "l40s": Gpu(flops_per_s=362e12, bytes_per_s=0.864e12, link_bytes_per_s=32e9),
    # One core, for the embedded model. Measured on 2026-11-21, the least CPU time of eight trials on a busy machine: a
    # step of the demo's requests of 8 samples takes 13 ms, one of the smallest request 10 ms (as reading the weights
    # here), training 17.5 ms a sample with 8 timesteps. The link is assumed: gloo on one machine.
    "cpu": Gpu(flops_per_s=37.3e9, bytes_per_s=197e6, link_bytes_per_s=1e9, collective_s=3e-4, train_speed=2.97),
}
SCORE_S = (420 - 360) * 4 / 512
"""GPU-seconds to score an image with a vision-language model of 8e9 parameters. Published: moving the reward off four
H800 shortened a step of 512 images from 420 to 360 s (verl-omni)."""
LAYER_S = 0.0094
"""What a processor takes to launch the kernels of a layer with a LoRA, one by one. Measured on hosts of an H100, for 60
layers: 0.41, 0.53, 0.59 and 0.75 s, of which it is the middle (docs/results/gpu.md). On others it is assumed."""
BATCH_MANY = 64
"""Samples of a batch so large that launching kernels takes no share of its step."""
BACKWARD_LORA, BACKWARD_FULL = 2, 3
"""Backward passes cost this many forward ones: activations again (checkpointing), their gradients, and the weights'."""
BOOT_S = 120.0
"""From asking for a spot machine to its worker's first line. Assumed: no measurement was found."""
LORA_BYTES = 0.85e9
"""Size of a LoRA in bfloat16, as the transformer is; its files are in float32, twice as large. Assumed: rank 64 of
twelve linear layers in each of Qwen-Image's blocks."""
PUBLISH_LORA_S = 7.2
"""To write a version of it, 6.8 GB with the old policy and the optimizer's state, to have the old policy, 1.7 GB, on
every worker, at 10 Gb/s (computed), and to load it there. With a directory in memory, one core that hashes 1.8 GB/s and
another beside it, 6.8 s were measured: `benchmarks.updates`, docs/results/gpu.md."""
LOCAL_PUBLISH_S, LOCAL_START_UP_S = 0.084, 0.1
"""To publish a version of the embedded model, and from the start of a worker's process until it works, where workers
are processes of one machine. Measured: docs/results/speed.md, fixed costs (0.051 s to join and 0.045 s for the first
request)."""
GRADIENT_LORA_S = 1.4
"""To keep the gradient of a LoRA of 0.85 GB, 1.7 GB in float32, where others find it, or to fetch it, at 10 Gb/s.
Computed."""
UPDATE_LORA_S = 1.8
"""AdamW, the gradient's norm and the old policy of a LoRA of 0.85 GB, on one core of a processor. Measured with a tenth
of its weights: `benchmarks.updates`, docs/results/gpu.md."""
LOCAL_GRADIENT_S = 0.015
"""The same of the embedded model, on one machine: 1.8 MB, written or read and hashed. Measured, in CPU time."""
OCR_SCORE_S = 0.0063
"""To decode a small image and to read it with the embedded OCR engine, on one core. Measured as the core's speed is."""


def forward_flops(model: str, height_px: int, width_px: int) -> float:
    """Floating-point operations of one forward pass for one image.

    ``2 L 12 d^2 S + 4 L d S^2`` with ``S`` image and text tokens: the linear layers and attention.

    Raises:
        SpotlightError: no such model, or the size is not a whole number of tokens.
    """
    shape = _known(TRANSFORMERS, model, "model")
    if min(height_px, width_px) < shape.px_per_token or height_px % shape.px_per_token or width_px % shape.px_per_token:
        raise SpotlightError(
            f"{height_px} x {width_px} px is no size of {model}: both edges must be multiples of {shape.px_per_token}"
        )
    tokens = _tokens(shape, height_px, width_px)
    return 24.0 * shape.layers * shape.dim**2 * tokens + 4.0 * shape.layers * shape.dim * tokens**2


def seconds_per_step(
    model: str,
    height_px: int,
    width_px: int,
    *,
    width: int = 1,
    gpu: str,
    batch: int = 1,
    guidance: float = 1.0,
    layer_s: float = 0.0,
) -> float:
    """Seconds of one denoising step of a batch on a sequence-parallel group of ``width`` GPUs in one node::

        passes * (max(batch F / (width e P), W / M, L l) + 4 L (batch (S / width) 2 d (width - 1) / width / B + c))

    ``F`` is `forward_flops`, ``e P`` the peak times `EFFICIENCY`, ``W / M`` the time to read all weights once, ``l``
    (``layer_s``) what launching a layer's kernels takes; each layer has four all-to-alls of ``2 d`` bytes per token at
    bandwidth ``B``, each with a latency ``c``; a width of 1 has none. True classifier-free guidance (above 1) takes two
    passes.

    Raises:
        SpotlightError: no such model or GPU, a size of no whole tokens, or a width that does not divide the heads.
    """
    shape, device = _known(TRANSFORMERS, model, "model"), _known(GPUS, gpu, "GPU")
    if width < 1 or shape.heads % width:
        raise SpotlightError(f"width {width} does not divide the {shape.heads} attention heads of {model}")
    compute_s = batch * forward_flops(model, height_px, width_px) / (width * EFFICIENCY * device.flops_per_s)
    exchange_s = 0.0
    if width > 1:
        sent_bytes = batch * _tokens(shape, height_px, width_px) / width * 2 * shape.dim * (width - 1) / width
        exchange_s = 4 * shape.layers * (sent_bytes / (LINK_EFFICIENCY * device.link_bytes_per_s) + device.collective_s)
    at_least_s = max(shape.weights_bytes / device.bytes_per_s, shape.layers * layer_s)
    return _passes(guidance) * (max(compute_s, at_least_s) + exchange_s)


def parallel_efficiency(model: str, height_px: int, width_px: int, *, width: int, gpu: str, batch: int = 1) -> float:
    """Images per GPU-second at a width against width 1: ``t(1) / (width t(width))``, in (0, 1]."""
    alone_s, together_s = (
        seconds_per_step(model, height_px, width_px, width=w, gpu=gpu, batch=batch) for w in (1, width)
    )
    return alone_s / (width * together_s)


def train_s(
    model: str,
    height_px: int,
    width_px: int,
    *,
    gpu: str,
    timesteps: int,
    guidance: float = 1.0,
    lora: bool = True,
    looks: int = 1,
) -> float:
    """GPU-seconds to train on one sample: ``timesteps passes F (1 + backward + looks) / (e P)``, e P as in training.

    Symbols as in `seconds_per_step`; ``backward`` is 2 forward passes for a LoRA and 3 for full weights, ``looks``
    are the passes of policies that are compared with: an older one, the reference. Divide by the GPUs that share the
    batch.

    Raises:
        SpotlightError: no such model or GPU, or a size of no whole tokens.
    """
    device = _known(GPUS, gpu, "GPU")
    forwards = 1 + (BACKWARD_LORA if lora else BACKWARD_FULL) + looks
    flops = timesteps * _passes(guidance) * forwards * forward_flops(model, height_px, width_px)
    return flops / (EFFICIENCY * device.flops_per_s * device.train_speed)


def load_s(model: str, *, gbit_per_s: float = 10.0) -> float:
    """Seconds to bring a model's weights over the network: ``8 weights_bytes / (1e9 gbit_per_s)``."""
    return 8 * _known(TRANSFORMERS, model, "model").weights_bytes / (1e9 * gbit_per_s)


def start_up_s(model: str, *, boot_s: float = BOOT_S, gbit_per_s: float = 10.0) -> float:
    """Seconds from asking for a machine to its first step: boot, then `load_s`."""
    return boot_s + load_s(model, gbit_per_s=gbit_per_s)


class TaskDurations:
    """How long each kind of task of a run lasts, in seconds of a live run's clock: emulated ones over the speed-up.

    What a paced run emulates is what its devices wait for. Any other run is its own model: a large one on the GPUs of
    its pools ("h100" where none is named), the embedded one on a processor's core for each worker.
    """

    def __init__(self, config: Config) -> None:
        pace, model, train = config.pace, config.model, config.train
        paced, embedded = bool(pace.gpu), model.embedded
        self._model = pace.model if paced else model.name
        self._size = (pace.height_px, pace.width_px) if paced else (model.height_px, model.width_px)
        self._guidance = pace.guidance if paced else config.rollout.guidance
        self._layer_s = pace.layer_s if paced else 0.0 if embedded else LAYER_S
        self._captures = model.cuda_graphs
        self._captures_training = model.cuda_graphs and train.cuda_graphs
        self._lora = pace.lora if paced else train.lora_rank > 0
        self._gpus = {
            name: pace.gpu or ("cpu" if embedded else (pool.gpu or USUAL_GPU).partition("-")[0])
            for name, pool in config.pools
        }
        self._trains_on = self._gpus["reserved" if "reserved" in config.strategy.train_pools else "spot"]
        stochastic = train.steps_used or config.rollout.stochastic_steps
        self._timesteps = stochastic if train.is_stepwise else train.timesteps
        self._looks, self._micro_batch, self._is_stepwise = _looks(train), train.micro_batch, train.is_stepwise
        pairs = min(train.dpo_pairs, config.seeds_trained // 2)
        is_thinned = train.algorithm == "dpo" and train.updates == 1  # parts of several updates hold pairs alone
        self._trained_share = 2 * pairs / config.seeds_trained if is_thinned else 1.0
        self._score_s = (SCORE_S if pace.score_s is None else pace.score_s) if paced else OCR_SCORE_S
        self._speedup = config.emulated_per_real_s
        self._steps: dict[tuple[int, int, Pool], float] = {}
        self._fixed = config.simulation
        self._is_local = paced or embedded
        self._reserved_computes = config.reserved_computes

    def step_s(self, samples: int, width: int, pool: Pool = "reserved") -> float:
        """Seconds of one denoising step of a batch on a gang of a pool. Alone, CUDA graphs are launched in no time."""
        asked = (samples, width, pool)
        if asked not in self._steps:
            emulated_s = seconds_per_step(
                self._model,
                *self._size,
                width=width,
                gpu=self._gpus[pool],
                batch=samples,
                guidance=self._guidance,
                layer_s=0.0 if self._captures and width == 1 else self._layer_s,
            )
            self._steps[asked] = emulated_s / self._speedup
        return self._steps[asked]

    def least_samples(self, pool: Pool = "reserved") -> float:
        """The batch size below which a step gets no shorter: launching kernels, or reading the weights, bounds it."""
        return self.step_s(1, 1, pool) * BATCH_MANY / self.step_s(BATCH_MANY, 1, pool)

    @property
    def scores_take_time(self) -> bool:
        return self._score_s > 0

    def score_s(self, samples: int) -> float:
        """Seconds of scoring a batch of images."""
        return samples * self._score_s / self._speedup

    def train_s(self, samples: float, width: int = 1) -> float:
        """Seconds of the gradient of ``samples`` on a gang of ``width`` workers: reserved ones if they may, else spot.

        To compare with an older policy takes one more forward pass, and with the reference another. DiffusionNFT does
        without the older one in one update of the very policy that sampled. Diffusion-DPO trains on pairs alone.
        Launching the kernels of each pass is a lower bound, but for captured ones.
        """
        per_sample_s = train_s(
            self._model,
            *self._size,
            gpu=self._trains_on,
            timesteps=self._timesteps,
            guidance=self._guidance,
            lora=self._lora,
            looks=self._looks,
        )
        efficiency = (
            parallel_efficiency(self._model, *self._size, width=width, gpu=self._trains_on) if width > 1 else 1.0
        )
        trained = samples * self._trained_share
        if self._is_stepwise:  # a micro-batch has rows of one timestep
            batches = self._timesteps * ceil(trained / self._micro_batch)
        else:
            batches = ceil(trained * self._timesteps / self._micro_batch)
        passes = batches * _passes(self._guidance)
        forwards = 1 + (BACKWARD_LORA if self._lora else BACKWARD_FULL) + self._looks
        layer_s = 0.0 if self._captures_training and width == 1 else self._layer_s
        launches_s = passes * forwards * _known(TRANSFORMERS, self._model, "model").layers * layer_s
        return max(trained * per_sample_s / (width * efficiency * self._speedup), launches_s / self._speedup)

    # What the system itself costs, on top of the work

    @property
    def launch_s(self) -> float:
        """What a request costs beyond its steps."""
        return self._fixed.launch_s

    @property
    def form_s(self) -> float:
        """What it costs the workers of a gang to meet, at each launch."""
        return self._fixed.form_s

    @property
    def warm_up_s(self) -> float:
        """From the run's start until its first workers can be started."""
        return self._fixed.warm_up_s

    @property
    def prepare_s(self) -> float:
        """From when the first workers are there to the run's first graph."""
        return self._fixed.prepare_s

    @property
    def graph_s(self) -> float:
        """Between two graphs."""
        return self._fixed.graph_s

    @property
    def gradient_s(self) -> float:
        """To write a gradient, or a sum of some, where others find it; or to read it."""
        if self._fixed.gradient_s is not None:
            return self._fixed.gradient_s
        large_s = GRADIENT_LORA_S if self._lora else 2 * load_s(self._model)  # weights are in bfloat16
        return LOCAL_GRADIENT_S if self._is_local else large_s

    @property
    def update_s(self) -> float:
        """An optimizer step, without reading the gradients that it adds."""
        if self._fixed.update_s is not None:
            return self._fixed.update_s
        if self._is_local or self._reserved_computes:
            return 0.0
        return UPDATE_LORA_S * self._loras

    @property
    def publish_s(self) -> float:
        """From the last update to new weights on every worker."""
        if self._fixed.publish_s is not None:
            return self._fixed.publish_s
        return LOCAL_PUBLISH_S if self._is_local else PUBLISH_LORA_S * self._loras

    @property
    def _loras(self) -> float:
        """Size of what training changes, in units of a LoRA."""
        return 1.0 if self._lora else TRANSFORMERS[self._model].weights_bytes / LORA_BYTES

    @property
    def start_up_s(self) -> float:
        """From the moment a worker's machine is there until the worker can work."""
        if self._fixed.start_up_s is not None:
            return self._fixed.start_up_s
        return LOCAL_START_UP_S if self._is_local else start_up_s(self._model)


def _looks(train: TrainSection) -> int:
    """Forward passes of policies that the one in training is compared with, for each that it takes itself."""
    if train.algorithm == "dpo":
        return 1
    return int(train.keeps_old or train.updates > 1) + (train.kl > 0)


def _tokens(shape: Transformer, height_px: int, width_px: int) -> int:
    return height_px // shape.px_per_token * (width_px // shape.px_per_token) + shape.text_tokens


def _passes(guidance: float) -> int:
    return 2 if guidance > 1 else 1


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise SpotlightError(
            f"there is no cost model of the {what} {name!r}; there are {', '.join(map(repr, table))}: name one of them "
            f"in {_NAMED_IN[what]}"
        )
    return table[name]


_NAMED_IN = {
    "GPU": "pace.gpu, or in pools.reserved.gpu and pools.spot.gpu",
    "model": "pace.model, with a GPU in pace.gpu, or in model.name",
}
