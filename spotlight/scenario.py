"""What the simulator is asked: cluster, job, spot trace and the strategies to compare; TOML in, frozen values out.

Unknown keys are errors that name the known ones. Times of a scenario count from the run's start.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from spotlight.config import Section, set_value
from spotlight.learning import PACE
from spotlight.market.prices import price_list, usd_per_h
from spotlight.plan.durations import SCORE_S, seconds_per_step
from spotlight.records import SpotlightError


class Scenario(Section):
    name: str
    seed: int = Field(0, ge=0)
    hours: float = Field(gt=0)
    """The simulation ends here, if nothing ended it before."""
    iterations: int = Field(0, ge=0)
    """Most iterations; 0 is no limit."""
    target: float = Field(0.0, ge=0, lt=1)
    """A strategy's simulation ends when it reaches this validation score; 0 is no target."""
    cluster: Cluster
    job: Job
    exploration: Exploration = Field(default_factory=lambda: Exploration())
    learning: Learning = Field(default_factory=lambda: Learning())
    trace: SpotTrace = Field(default_factory=lambda: SpotTrace())
    strategies: tuple[Strategy, ...] = Field(default_factory=lambda: BASELINES, min_length=1)
    """Side by side; left out, they are Spotlight and what it is measured against."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        job, cluster, tried = self.job, self.cluster, self.exploration.seeds_tried
        for strategy in self.strategies:
            where = f"strategies: {strategy.name!r}"
            if strategy.exploration != "off" and tried < job.seeds_kept:
                raise ValueError(
                    f"{where} explores, and exploration.seeds_tried = {tried} is fewer than job.seeds_kept = "
                    f"{job.seeds_kept}: nothing could be chosen"
                )
            if not cluster.spot_nodes and (strategy.exploration == "stale" or "reserved" not in strategy.rollout_pools):
                raise ValueError(f"{where} needs spot GPUs, and cluster.spot_nodes is 0")
            if not strategy.elastic:
                self._check_width(where, max(job.widths))
        if len({strategy.name for strategy in self.strategies}) < len(self.strategies):
            raise ValueError("strategies: two of them have the same name")
        self._check_width("job.widths", min(job.widths))
        explored = self.exploration.prompts
        if 0 < explored < job.prompts:
            raise ValueError(
                f"exploration.prompts = {explored} is fewer than job.prompts = {job.prompts}, which are taken from them"
            )
        for name, prompts in (("job", job.prompts), ("exploration", explored)):
            if prompts > job.dataset:
                raise ValueError(f"{name}.prompts = {prompts} is more than job.dataset = {job.dataset}")
        if sorted({width for width in job.widths if width > 0}) != list(job.widths):
            raise ValueError(f"job.widths = {list(job.widths)} must be whole numbers from 1 on, ascending")
        if 0 < self.target <= self.learning.start:
            raise ValueError(f"target = {self.target} is not above learning.start = {self.learning.start}")
        return self

    def _check_width(self, where: str, width: int) -> None:
        for name in ("reserved", "spot"):
            gpus = getattr(self.cluster, f"{name}_gpus_per_node")
            if width > gpus:
                raise ValueError(f"{where}: no gang of {width} fits cluster.{name}_gpus_per_node = {gpus}")


class Cluster(Section):
    reserved_gpus: int = Field(ge=1)
    reserved_gpus_per_node: int = Field(ge=1)
    spot_nodes: int = Field(ge=0)
    spot_gpus_per_node: int = Field(1, ge=1)
    gpu: str = "h100"
    listed: str = ""
    """The name in ``prices.toml`` of the prices that are not given here; left out, it is ``gpu``."""
    usd_per_h_reserved: float = Field(ge=0)
    """Of one GPU."""
    usd_per_h_spot: float = Field(ge=0)
    prices_spot: str = ""
    """CSV file of a spot price that changes in time (`market.prices.read_prices`), which then counts instead of
    ``usd_per_h_spot``; relative to the scenario's file. Its clock is the trace's: calendar times count from its first
    line, and the run begins at ``trace.offset_h``."""
    startup_s: float | None = Field(None, ge=0)
    """From the moment a GPU is there until it can work; left out, it is `durations.start_up_s`."""
    pays_start_up: bool = True
    """Whether that time is paid for, as clouds have it; pools on one machine count from when a worker joins."""
    recovery_s: float | None = Field(None, ge=0)
    """For a broken gang to form anew; left out, it is `durations.recovery_s`, which asks whether gangs are elastic."""
    form_s: float = Field(0.0, ge=0)
    """For the GPUs of a gang of several to find each other, each time that it is launched."""
    notice_s: float = Field(0.0, ge=0)
    """How long before it goes a spot machine is told; 0 is a kill."""

    @model_validator(mode="before")
    @classmethod
    def _listed_prices(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        missing = [pool for pool in ("reserved", "spot") if f"usd_per_h_{pool}" not in tree]
        name, known = tree.get("listed") or tree.get("gpu", "h100"), sorted(price_list())
        if not missing or not isinstance(name, str):
            return tree
        if name not in known:
            raise ValueError(
                f"cluster: {name!r} is not in the price list, which has {', '.join(map(repr, known))}: name one of "
                f"them in cluster.listed, or give cluster.usd_per_h_{missing[0]} yourself"
            )
        return tree | {f"usd_per_h_{pool}": usd_per_h(name, pool) for pool in missing}


class Job(Section):
    model: str = "qwen-image"
    height_px: int = Field(512, ge=1)
    width_px: int = Field(512, ge=1)
    steps: int = Field(10, ge=1)
    guidance: float = Field(1.0, ge=1)
    widths: tuple[int, ...] = Field((1,), min_length=1)
    """Sequence-parallel widths that gangs may have."""
    prompts: int = Field(32, ge=1)
    """Groups per iteration."""
    seeds_kept: int = Field(16, ge=2)
    """Samples per group."""
    request_seeds: int = Field(0, ge=0)
    """Most samples in a request; 0 leaves it to `offload.request_seeds`, up to what `batch` allows."""
    batch: int = Field(8, ge=1)
    """Samples that fit one forward batch."""
    timesteps: int = Field(2, ge=1)
    """Noise levels, or stochastic steps, that each sample is trained on."""
    lora: bool = True
    old_log_probs: bool = True
    """Training computes them again, as Flow-GRPO does and DiffusionNFT does not."""
    score_s: float = Field(SCORE_S, ge=0)
    """Seconds to score an image, on one of the GPUs that made it; 0 where rewards have machines of their own."""
    prepare_s: float = Field(0.0, ge=0)
    """From the run's start to its first graph; machines start meanwhile."""
    graph_s: float = Field(0.0, ge=0)
    """Between two graphs: to end one, and to build, send and place the next."""
    launch_s: float = Field(0.025, ge=0)
    """What a request costs beyond its steps. Measured: benchmarks/RESULTS.md, overhead."""
    publish_s: float = Field(1.0, ge=0)
    """From the last update to new weights on every GPU; the default is for a LoRA of 0.85 GB at 10 Gb/s."""
    validate_every: int = Field(10, ge=1)
    validation_images: int = Field(64, ge=0)
    dataset: int = Field(1018, ge=1)
    """Prompts that iterations choose from; the default is the OCR set's."""


class Exploration(Section):
    prompts: int = Field(0, ge=0)
    """Prompts of which candidates are tried; the ``job.prompts`` of them whose kept rewards vary most are rolled out. 0
    means as many as are rolled out."""
    seeds_tried: int = Field(48, ge=1)
    """Most candidates per prompt and iteration."""
    request_seeds: int = Field(4, ge=1)
    rounds: int = Field(4, ge=1)
    steps: int = Field(0, ge=0)
    """Denoising steps of a candidate; 0 means as many as a rollout. Fewer are taken to rank as well."""


class Learning(Section):
    start: float = Field(0.512, gt=0, lt=1)
    """Validation score at the start; the default is the embedded job's."""
    pace: float = Field(PACE, gt=0)
    """Share of the distance to 1 that an iteration without exploration closes."""


class SpotTrace(Section):
    """When spot nodes come and go; with neither a file nor a climate they stay."""

    file: str = ""
    """In a format that `traces.read_trace` knows; relative to the scenario's file. What it has at its end stays."""
    climate: Literal["", "bursty", "calm", "collapsing"] = ""
    """Synthesises a trace for the scenario's seed: `traces.BURSTY`, `CALM` or `COLLAPSING`."""
    share: float = Field(1.0, gt=0, le=1)
    """Of the file's instances, drawn by the scenario's seed."""
    offset_h: float = Field(0.0, ge=0)
    """Where in the trace, and in the file of spot prices, the run begins."""
    takes: Literal["node", "gpu"] = "node"
    """What an instance of the trace is: a spot node, or one GPU, whose neighbours stay."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file and self.climate:
            raise ValueError(f"trace.file = {self.file!r} and trace.climate = {self.climate!r}: give one of them")
        return self


class Strategy(Section):
    """What is compared: the settings of a run's `[strategy]`."""

    name: str
    exploration: Literal["stale", "blocking", "off"] = "stale"
    rollout_pools: tuple[Literal["reserved", "spot"], ...] = Field(("reserved", "spot"), min_length=1)
    on_preemption: Literal["resume", "restart"] = "resume"
    elastic: bool = True
    """Gangs may form anew at any width; else only at the widest, and every process of a broken one loads again."""
    offload: Literal["adaptive", "all", "none"] = "none"
    """What reserved GPUs leave to spot ones: what is left after RLBoost's window, every rollout, or nothing. But for
    "none", training begins with the first samples that are scored."""

    @property
    def rents_spot(self) -> bool:
        """Whether spot GPUs would have anything to do."""
        return self.exploration == "stale" or "spot" in self.rollout_pools


BASELINES: tuple[Strategy, ...] = (
    Strategy(name="reserved only", exploration="off", rollout_pools=("reserved",)),
    Strategy(name="reserved only, blocking exploration", exploration="blocking", rollout_pools=("reserved",)),
    Strategy(name="reserved + spot, no exploration", exploration="off", offload="adaptive"),
    Strategy(name="spot, restart on preemption", on_preemption="restart", elastic=False),
    Strategy(name="Spotlight"),
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read and check a scenario's file.

    Args:
        path: a TOML file; the files that it names are relative to its directory.
        overrides: ``"section.key=value"`` or ``"key=value"`` each, as for a run's settings.

    Raises:
        SpotlightError: the file, a key or a value is not usable; the text says which and why.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpotlightError(f"{path}: cannot be read as a scenario: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpotlightError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        set_value(tree, override, sections=0, example="cluster.spot_nodes=8")
    try:
        scenario = Scenario.model_validate(tree)
        for width in scenario.job.widths:  # does the cost model know model, GPU, size and width?
            job = scenario.job
            seconds_per_step(job.model, job.height_px, job.width_px, width=width, gpu=scenario.cluster.gpu)
    except ValidationError as error:
        raise SpotlightError("\n".join(_explain(path, tree, one) for one in error.errors())) from None
    except SpotlightError as error:
        raise SpotlightError(f"{path}: {error}") from None
    cluster, trace = scenario.cluster, scenario.trace
    return scenario.model_copy(
        update={
            "cluster": cluster.model_copy(update={"prices_spot": _absolute(cluster.prices_spot, path.parent)}),
            "trace": trace.model_copy(update={"file": _absolute(trace.file, path.parent)}),
        }
    )


def _absolute(file: str, base: Path) -> str:
    return str((base / file).resolve()) if file else ""


def _explain(path: Path, tree: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """One pydantic error as one sentence: where, the rule, what came, the way out."""
    location = [str(part) for part in error["loc"]]
    name, message = ".".join(location), str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            known = _fields(location[:-1])
            close = difflib.get_close_matches(location[-1], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            return f"{path}: there is no {name!r}{hint}; there are {', '.join(map(repr, sorted(known)))}"
        case "missing":
            return f"{path}: {name} is missing, and it has no default"
        case "value_error":  # ours: its text names the fields
            return f"{path}: {message}"
        case _:
            return f"{path}: {name} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def _fields(location: list[str]) -> list[str]:
    sections: dict[str, type[Section]] = {
        "cluster": Cluster,
        "job": Job,
        "exploration": Exploration,
        "learning": Learning,
        "trace": SpotTrace,
        "strategies": Strategy,
    }
    return list((sections[location[0]] if location else Scenario).model_fields)
