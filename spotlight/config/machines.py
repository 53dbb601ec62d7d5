"""Settings of machines: pools of workers, the cluster around them, what runs where, pacing and simulation."""

from __future__ import annotations

import re
from datetime import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from spotlight.config.section import DAY_S, GUIDANCE_MAX, PX_MAX, WIDTH_MAX, Section, distinct
from spotlight.files import shown
from spotlight.market.prices import price_list, usd_per_h
from spotlight.records import Pool

NOTICES = re.compile(r"sigterm|sigusr1|file:.+|(aws|gcp|azure)(:http://.+)?")
"""A source in ``pools.*.notices``."""
NO_GPU = "cpu"
"""``pools.*.gpu`` of a machine without one."""
MONTH_S = 30 * DAY_S
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?=[,(]|$)")
"""In Slurm's generic resources: GPUs, perhaps of a type, and how many."""
SPEEDUP_MIN, SPEEDUP_MAX = 1e-6, 1e6
"""At either limit, a second becomes eleven days, or the other way round."""


def _as_text(value: Any) -> Any:
    """A time as text: TOML reads 00:30:00 without quotation marks as a time of day."""
    return value.isoformat() if isinstance(value, time) else value


class SlurmSection(Section):
    """What a job asks Slurm for; see `man sbatch`. Only where ``cluster.manager = "slurm"``."""

    partition: str = ""
    """Empty: Slurm's default."""
    account: str = ""
    """Empty: the user's default."""
    gres: str = ""
    """Generic resources of a job, which has the workers of one node: such as "gpu:8", one GPU for each. A job that has
    fewer workers, the last of its pool, asks for as many GPUs as it has. A driver needs none."""
    time: Annotated[str, BeforeValidator(_as_text)] = ""
    """Most time that a job may take, such as "24:00:00"; empty: the partition's default."""
    cpus: int = Field(1, ge=1, le=65_536)
    """Cores of each worker, or of the driver."""
    memory: str = "4G"
    """Memory of a job. The default is for the embedded models: a machine holds a checkpoint's weights once, 41 GB for
    Qwen-Image, beside what its workers keep."""
    setup: tuple[str, ...] = ()
    """Shell lines to run first, such as "module load cuda". Jobs have the variables of the shell that submits them."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, such as "--qos=low"."""

    @property
    def gpus(self) -> int:
        """GPUs that ``gres`` asks for."""
        found = _GPUS.search(self.gres)
        return int(found[1] or 1) if found else 0

    def gres_of(self, workers: int, full: int) -> str:
        """``gres`` of a job that has fewer workers than a full one: if that has a GPU for each, this has, too."""
        found = _GPUS.search(self.gres)
        if not found or workers == full or self.gpus != full:
            return self.gres
        return f"{self.gres[: found.start(1)]}{workers}{self.gres[found.end(1) :]}"


class PoolSection(Section):
    """Workers of one kind: what they cost, and when they come and go.

    ``replace_after_s``, ``preemption``, ``speedup`` and all that begins with ``trace`` are for pools of this machine
    and for simulations; elsewhere Slurm, a cloud or you decide.
    """

    workers: int = Field(1, ge=0, le=100_000)
    """Worker processes; each owns one device."""
    gpu: str = ""
    """Type of GPU, by its name in ``spotlight/market/prices.toml``. It sets the price if ``usd_per_h`` is left out. For
    a checkpoint it also sets what work takes in a simulation ("h100-aws" is an "h100"), unless ``pace.gpu`` does. "cpu"
    in the reserved pool is a machine without a GPU: it takes the updates and keeps all state, and no more
    (``strategy.train_pools``)."""
    usd_per_h: float = Field(ge=0, le=1e5)
    """Price of one worker, in US dollars per hour; left out, it is that of its ``gpu``."""
    prices: str = ""
    """CSV file of a price that changes over time (`market.prices.read_prices`); relative to the settings file. Costs
    are then computed with it, and ``usd_per_h`` is only used to plan."""
    replace_after_s: float = Field(10.0, ge=0, le=MONTH_S)
    """How long the pool waits before it replaces a lost worker; along a trace, that says when."""
    workers_per_node: int = Field(8, ge=1, le=WIDTH_MAX)
    """Workers that share a machine, its memory and its links; gangs do not span machines."""
    notices: tuple[str, ...] = ("sigterm",)
    """Where a worker learns that its machine will be taken away: "sigterm", "sigusr1", "file:PATH", "aws", "gcp",
    "azure"; the clouds also with the base URL of their metadata service, as in "aws:http://127.0.0.1:1234". A file is a
    notice for as long as it is there, for each worker that starts, too; its path is best absolute, or else relative to
    the directory that workers were started in."""
    grace_s: float = Field(30.0, ge=0, le=DAY_S)
    """How long a machine stays after a notice that does not say so itself; on Slurm, the time that a preempted job has
    left."""
    trace: str = ""
    """A file of spot availability that the pool follows; relative to the settings file."""
    speedup: float = Field(1.0, ge=SPEEDUP_MIN, le=SPEEDUP_MAX)
    """The trace runs this many times as fast, by the run's own clock: with ``pace.speedup`` set it the same, and
    workers come and go as often in an emulated hour as in an hour of the trace."""
    trace_model: Literal["", "bursty", "calm", "collapsing"] = ""
    """Instead of a file: a synthetic trace, drawn by ``run.seed``; see `market.trace_models`. It has 30 days, or with a
    ``speedup`` above 30 as many as a run of a day needs, 417 at most; then the workers of its end stay."""
    trace_share: float = Field(1.0, gt=0, le=1)
    """Share of the file's instances that are used, drawn by ``run.seed``."""
    trace_offset_h: float = Field(0.0, ge=0, le=1e5)
    """Where in the trace the run begins."""
    trace_takes: Literal["gpu", "node"] = "gpu"
    """What an instance of the trace is: one worker, or all workers of a node (``workers_per_node``)."""
    preemption: Literal["kill", "notice", "hang", "mixed"] = "kill"
    """How the trace takes workers away: without a word, with a notice, by freezing them, or each in turn."""
    slurm: SlurmSection = SlurmSection()
    """What the pool's jobs ask for."""

    @property
    def node_workers(self) -> int:
        """Workers of a machine that has as many as the pool's machines may have."""
        return min(self.workers, self.workers_per_node)

    @field_validator("gpu")
    @classmethod
    def _listed_gpus_are_written_as_listed(cls, gpu: str) -> str:
        if gpu not in price_list() and gpu.lower() in price_list():
            raise PydanticCustomError("gpu", "is '{meant}' meant?", {"meant": gpu.lower()})
        return gpu

    @field_validator("notices")
    @classmethod
    def _notices_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if not NOTICES.fullmatch(name)]:
            raise PydanticCustomError(
                "notices",
                "there is no source {unknown}; there are 'sigterm', 'sigusr1', 'file:PATH', 'aws', 'gcp' and 'azure' "
                "(these three also as 'aws:http://HOST:PORT')",
                {"unknown": shown(unknown[0])},
            )
        return names

    @model_validator(mode="after")
    def _trace_is_from_one_source(self) -> Self:
        if self.trace and self.trace_model:
            raise ValueError(
                f"trace = {self.trace!r} and trace_model = {self.trace_model!r} of one pool: give one of them"
            )
        return self


class PoolsSection(Section):
    reserved: PoolSection = PoolSection(workers=1, usd_per_h=10.47)
    spot: PoolSection = PoolSection(workers=2, usd_per_h=2.66)
    # Prices of one H100: RLBoost (arXiv 2510.19225), on demand and spot.
    reward: PoolSection = PoolSection(workers=0, usd_per_h=0.0)
    """Workers that only score images, beside the GPUs' work. With none, a request is scored where it was denoised."""

    @model_validator(mode="before")
    @classmethod
    def _listed_prices(cls, tree: Any) -> Any:
        """Write the listed price of a pool's GPU beside it, so that a run keeps what it began with."""
        if not isinstance(tree, dict):
            return tree
        return tree | {
            name: pool | {"usd_per_h": usd_per_h(pool["gpu"], name)}
            for name, pool in tree.items()
            if name in cls.model_fields and isinstance(pool, dict) and "usd_per_h" not in pool
            if isinstance(pool.get("gpu"), str) and pool["gpu"]
        }


class StrategySection(Section):
    """What runs where, and what happens to work when a worker is lost."""

    exploration: Literal["stale", "blocking", "off"] = "stale"
    """"stale": spot workers explore for the next iteration while this one trains. "blocking": exploration comes before
    each rollout, with current weights. "off": none."""
    rollout_pools: Annotated[tuple[Pool, ...], AfterValidator(distinct)] = ("reserved", "spot")
    """Which workers roll out. (Stale exploration always runs on spot workers.)"""
    train_pools: Annotated[tuple[Pool, ...], AfterValidator(distinct)] = ("reserved",)
    """Which workers compute the gradients of an update's parts (``train.parts``), and add them; the update itself is
    taken on a reserved one, which keeps all state. With "spot" too, a spot worker that no rollout needs prefers a part
    to exploration; between equal GPUs no bit changes, and a part whose worker is lost is computed again elsewhere.
    With ["spot"] here and in ``rollout_pools``, no rollout and no gradient needs the reserved worker: it takes the
    updates, and validates and explores before the first iteration with the others. A cheaper GPU will do, if the model
    and what training keeps fit its memory; or none (``pools.reserved.gpu = "cpu"``): then it takes the updates only.
    Without spot workers the run waits."""
    on_preemption: Literal["resume", "restart"] = "resume"
    """"resume": a request whose worker is lost goes on after its last committed step. "restart": it starts again from
    its first step."""
    elastic: bool = True
    """False: every gang has the widest of ``widths``, and waits for as many workers when it loses one."""
    widths: tuple[int, ...] = (1,)
    """How many workers of a node may run one request together (sequence parallelism); narrow and wide gangs mix freely.
    Another width rounds differently: latents differ by some 1e-5."""
    offload: Literal["adaptive", "all", "none"] = "adaptive"
    """What reserved workers leave to spot ones, while there are any, where both may roll out. "adaptive": the rollouts
    that are left after a time window, whose length is adapted so that neither side waits; training begins with the
    first samples. "all": every rollout; training begins as early. "none": nothing; both roll out, then training begins.
    Where training needs all samples at once (`Config.trains_as_scored`), there is nothing to begin early, and
    "adaptive" is "none". With "spot" in ``train_pools``, "adaptive" has no window: all workers roll out first, and each
    that no rollout needs any more trains."""


class SpSection(Section):
    """How the members of a gang share a forward pass (sequence parallelism)."""

    backend: Literal["native", "xfuser"] = "native"
    """"native": diffusers' own split, whose exchanges end with the gang. "xfuser": for Qwen-Image on GPUs only,
    verified with two members on one GPU; the extra "xfuser" installs it. A lost peer is noticed after
    ``cluster.hang_after_s``."""


class PaceSection(Section):
    """Paced devices: the model computes as usual, then waits as long as a larger model on a GPU would have taken."""

    gpu: str = ""
    """GPU that a worker emulates, by its name in `plan.durations.GPUS`; empty: no pacing. Seconds are then emulated."""
    model: str = "qwen-image"
    """Model that is emulated, by its name in `plan.durations.TRANSFORMERS`."""
    height_px: int = Field(512, ge=16, le=PX_MAX)
    """Height of an emulated image."""
    width_px: int = Field(512, ge=16, le=PX_MAX)
    """Width of an emulated image."""
    guidance: float = Field(4.0, ge=1, le=GUIDANCE_MAX)
    """Guidance of the emulated model, in denoising and in training; above 1 both take two passes instead of one.
    DiffusionNFT as published uses none: 1."""
    lora: bool = True
    """Whether the emulated model trains a LoRA, or all of its weights, whatever the real one trains."""
    score_s: float | None = Field(None, ge=0, le=DAY_S)
    """Seconds to score an image on the worker that scores it: one of ``pools.reward``, or the one that denoised it. 0
    where a server elsewhere scores at once. Left out, it is what a vision-language model takes on a GPU
    (`plan.durations.SCORE_S`)."""
    layer_s: float = Field(0.0, ge=0, le=DAY_S)
    """Seconds that a CPU takes to launch the kernels of one layer, where passes are not CUDA graphs (training, gangs,
    or all with ``model.cuda_graphs = false``). Measured on hosts of an H100: 0.0068 to 0.0126, in the middle 0.0094
    (docs/results/gpu.md)."""
    speedup: float = Field(1.0, ge=SPEEDUP_MIN, le=SPEEDUP_MAX)
    """Emulated seconds in one real second."""


class ClusterSection(Section):
    """The cluster around the pools."""

    manager: Literal["local", "slurm"] = "local"
    """What starts workers, where no ``--cluster`` is given: this process, on this machine; or Slurm, as jobs."""
    host: str = ""
    """Where the scheduler listens for Slurm's jobs: a name or address of this machine; empty: its host name."""
    slurm: SlurmSection = SlurmSection()
    """What the driver's own job asks for (`spotlight submit`)."""

    dashboard_port: int = Field(8787, ge=0, le=65535)
    """Port of Dask's dashboard; 0 takes any free port."""
    dashboard_host: str = Field("127.0.0.1", min_length=1)
    """Where the dashboard listens. It has no password: if it listens beyond this machine, whoever reaches it sees
    prompts, images and figures."""
    hang_after_s: float = Field(60.0, ge=0.1, le=DAY_S)
    """A worker that shows no sign of life for so long is replaced, and so is an engine process whose denoising step
    takes so long, or whose pass of training (``train.micro_batch`` rows) takes five times as long. A worker is given
    three of Dask's heartbeats at least: 2 s up to 10 workers, 7 s from 50 on, 19 s at 1,000."""
    quarantine_after: int = Field(5, ge=1, le=1000)
    """A request that loses its workers, or their engines, so many times in a row without a new step is set aside and
    replaced: if these were as many workers, or all that may run it; else after three times as many losses. A part of
    training that outlasts so many workers is given to a reserved one; if those have no GPU, to another spot one."""
    tls: bool = True
    """All of Dask's connections are encrypted, and both ends prove by a certificate made for the run that they belong
    to it. False: any user of this machine can run code in the run's processes. A cluster that is there already
    (``--cluster``) has its own certificates."""
    insecure: bool = False
    """Use a scheduler on another machine even without TLS: for a network on which everybody may run code in the run's
    processes."""


class SimulationSection(Section):
    """Further settings for `spotlight simulate`; a live run does not use them.

    The fixed costs are those of the system itself, in seconds of a live run's clock.
    """

    hours: float = Field(0.0, ge=0, le=1e5)
    """A simulated run ends after so many hours at the latest; those of a paced one are emulated. 0: no limit."""
    learning: Literal["modelled", "real"] = "modelled"
    """"modelled": rewards and scores come from a model of learning, without torch; "real": from the model itself, which
    is trained in this process."""
    start: float = Field(0.512, gt=0, lt=1)
    """Validation score at the start of modelled learning; the default is the embedded job's."""
    gain: float = Field(0.050, gt=0, le=100)
    """Share of the score's distance to 1 that an iteration without exploration closes, where learning is modelled.
    Measured: 0.512 to 0.781 in 16 iterations of the embedded job, ``ln(0.488 / 0.219) / 16`` (docs/trials.md). An
    iteration that kept the 8 of some 15 explored seeds closed 0.086, 1.7 times as much, where the model of learning
    says 1.4; in a trial 8 of 32 halved the iterations, and it says 1.8 (current weights: 2.2). So the model is on the
    careful side."""
    launch_s: float = Field(0.025, ge=0, le=DAY_S)
    """Seconds that a request takes beyond its steps. Measured: docs/results/speed.md, fixed costs."""
    form_s: float = Field(0.016, ge=0, le=DAY_S)
    """Seconds for the workers of a gang to connect, at each launch. Measured on one machine with gloo
    (docs/results/speed.md, fixed costs)."""
    graph_s: float = Field(0.041, ge=0, le=DAY_S)
    """Seconds between two graphs: to end one, and to build, send and place the next. Measured: as ``form_s``."""
    warm_up_s: float = Field(6.3, ge=0, le=DAY_S)
    """Seconds from the run's start until its first workers can be started: the fork server does its imports. Measured:
    as ``form_s``."""
    prepare_s: float = Field(0.4, ge=0, le=DAY_S)
    """Seconds from then, after the workers' own ``start_up_s``, to the run's first graph. Measured: as ``form_s``."""
    gradient_s: float | None = Field(None, ge=0, le=DAY_S)
    """Seconds to write a gradient, or a sum of some, where others find it; reading it takes as long. Left out, it is
    0.015 s where the workers are processes of one machine (measured), and else what it takes at 10 Gb/s."""
    publish_s: float | None = Field(None, ge=0, le=DAY_S)
    """Seconds from the last update to new weights on every worker. Left out, it is 0.084 s where the workers are
    processes of one machine (the embedded model, paced or not; measured: as ``form_s``), and else what a LoRA of 1.7 GB
    in float32, or all weights, take at 10 Gb/s, with the old policy and the optimizer's state."""
    update_s: float | None = Field(None, ge=0, le=DAY_S)
    """Seconds of an optimizer's step, beyond reading the gradients. Left out, it is nothing on a GPU or for an embedded
    model; on a reserved worker without a GPU, 1.8 s for a LoRA of 1.7 GB in float32 (measured on one core,
    docs/results/gpu.md), in proportion for all weights. In a comparison, a strategy that replaces such a worker by one
    with a GPU does not use the value given here."""
    start_up_s: float | None = Field(None, ge=0, le=DAY_S)
    """Seconds from when a worker's machine is there until the worker can work. Left out, it is 0.1 s where the workers
    are processes of one machine (measured: as ``form_s``), and else `plan.durations.start_up_s`. Dollars do not count
    them, though a cloud may (docs/results/trust.md)."""
    strategies: dict[str, dict[str, Any]] = {}
    """Strategies to compare: the settings that each changes, by name, as in ``"strategy.exploration" = "off"``. Left
    out, they are Spotlight and its baselines (`strategies.BASELINES`)."""
