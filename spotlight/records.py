"""What travels between tasks: small, frozen values that mean the same on every machine.

Nothing here computes, reads a clock or opens a file. A record that crosses the scheduler stays
small: latents and images go to the store, and the record carries only what names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from json import dumps, loads
from typing import Any, Literal, TypeVar, dataclass_transform

Purpose = Literal["rollout", "explore", "validate"]
Sampler = Literal["ode", "dpm2", "sde", "cps", "dance"]
STOCHASTIC: frozenset[Sampler] = frozenset(("sde", "cps", "dance"))
"""Samplers that take stochastic steps; the others are deterministic."""
Policy = Literal["trained", "old", "average"]
"""Which weights of a version: those in training, the older ones that sample, or a moving average."""


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(kind: type[T]) -> type[T]:
    """A class whose instances are values: fields are given by name, and none is set again.

    mypy sees to that. A frozen dataclass would at run time, too, and take three times as long to make; a simulated day
    of a thousand GPUs makes ten million of them.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(kind)


class SpotlightError(ValueError):
    """An error that a person can fix; its text says where, what was found, and what to do."""


class Stopped(Exception):
    """The run was asked to stop; what was committed stays, the step in flight is done."""


class Interrupted(Exception):
    """Work was interrupted from outside; what was committed stays, the rest is done again."""


def is_of_the_device(error: BaseException) -> bool:
    """Whether it is a CUDA error after which the process can compute nothing more; full memory is not one.

    Errors of CUDA's libraries, such as cuBLAS, begin alike, but may have any cause.
    """
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def in_a_sentence(error: BaseException) -> str:
    """One sentence for a person about the error that ended a run or a command."""
    if isinstance(error, SpotlightError):
        return str(error)
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"an error in Spotlight itself, {type(error).__name__}: {error}{notes}"


@record
class Prompt:
    """A text to draw."""

    id: int
    """Index in its file, stable for the whole run."""
    text: str
    metadata: str = ""
    """Other fields of its line, for rewards that use them: a JSON object, or empty."""

    @property
    def tag(self) -> str:
        """The kind of prompt, from its metadata: GenEval's "counting", "colors" and others; or ""."""
        tag = loads(self.metadata).get("tag") if self.metadata else None
        return tag if isinstance(tag, str) else ""


@record
class PartRef:
    """Names one file of a version by its content."""

    name: str
    sha256: str
    bytes: int


@record
class WeightsRef:
    """Names one immutable version of what training changes."""

    version: int
    sha256: str
    """Hash of the safetensors file, hexadecimal."""
    parts: tuple[PartRef, ...] = field(default=(), compare=False)
    """All its files, so that peers can send them without the store being read; empty if the manifest was not read."""


@record
class Request:
    """One unit of denoising work: one prompt and a few seeds, small enough for one batch.

    A pure value: where and when it runs, and how often it is interrupted, cannot change a sample.
    """

    run: str
    iteration: int
    purpose: Purpose
    prompt: Prompt
    seeds: tuple[int, ...]
    """Each fixes all the noise of one image."""
    sampler: Sampler
    sigmas: tuple[float, ...]
    """Noise levels, descending, ``steps + 1`` of them; the last is 0."""
    sde_window: tuple[int, int]
    """Steps ``[start, end)`` that are stochastic; the others are ODE steps."""
    noise_level: float
    """Eta of the stochastic steps, dimensionless."""
    guidance: float
    """True classifier-free guidance scale; 1 means off."""
    height_px: int
    width_px: int
    weights: WeightsRef
    policy: Policy = "trained"
    """Which of the version's weights."""
    first_noise: int | None = None
    """Seed of the noise that all its images start from; ``seeds`` then fix the noise of stochastic steps only."""

    @property
    def id(self) -> str:
        """Unique within a run: no seed occurs twice for one prompt, purpose and iteration."""
        return request_id(self.iteration, self.purpose, self.prompt, self.seeds[0])

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def is_stochastic(self) -> bool:
        return self.sampler in STOCHASTIC

    @property
    def looks_back(self) -> bool:
        """Whether a step needs the velocity of the step before, too."""
        return self.sampler == "dpm2"

    @property
    def kind(self) -> str:
        """SHA-256 of all fields but its run, prompt and seeds."""
        return replace(self, run="", prompt=Prompt(id=-1, text=""), seeds=()).digest

    @property
    def digest(self) -> str:
        """SHA-256 of the whole value: work committed for another request is never resumed."""
        value = row_of(self)
        weights = row_of(self.weights)
        del weights["parts"]  # the other fields identify the weights
        if self.first_noise is None:
            del value["first_noise"]  # as in older versions, so that their commits are resumed
        return sha256(dumps(value | {"weights": weights}, sort_keys=True, default=row_of).encode()).hexdigest()


def request_id(iteration: int, purpose: Purpose, prompt: Prompt, first_seed: int) -> str:
    """See `Request.id`."""
    return f"{iteration:05d}-{purpose}-{prompt.id:05d}-{first_seed}"


@record
class Placement:
    """Where one shard of a request runs: its rank in a gang that was formed for it."""

    gang: str
    """Names the request within the graph."""
    epoch: int
    """Counts the gangs that were formed for this request; work of an older one is called off."""
    rank: int
    width: int

    @property
    def name(self) -> str:
        """Name of the gang as it was formed this time."""
        return f"{self.gang}.e{self.epoch}"


@record
class Rollout:
    """A request that was run to its end; its clean latents are in the store."""

    request: Request
    weights_sha256: str
    """Hash of the weights that the worker really used."""
    steps_resumed: int
    """Steps found committed and not computed again."""
    steps_run: int


@record
class Dropped:
    """Exploration that was not done, and why. Never used for work that training needs."""

    reason: str


@record
class Surplus:
    """A shard without a result: its gang was narrower, or its first rank returns the result for all."""


@record
class Quarantined:
    """A request that kept losing its workers: it is not run again, and its samples are replaced."""

    request: Request
    preemptions: int


@record
class Scored:
    """Rewards of one request's samples, in the order of its seeds."""

    request: Request
    rewards: tuple[float | None, ...]
    """None where the scorer failed for good: a missing reward is never a number."""
    errors: tuple[str, ...] = ()
    parts: tuple[tuple[float | None, ...], ...] = ()
    """Each of several rewards by itself, in the order of their tables; ``rewards`` are their sums."""
    steps_resumed: int = 0
    """Steps of the rollout that were found committed."""


@record
class Drawn:
    """An exploring request of which some samples are trained on."""

    seeds: tuple[int, ...]
    rewards: tuple[float | None, ...]
    """Rewards of the samples that are trained on; None for the others."""
    parts: tuple[tuple[float | None, ...], ...] = ()
    """See `Scored`."""


@record
class Kept:
    """The seeds of one prompt's group that is trained on."""

    prompt: Prompt
    seeds: tuple[int, ...]
    explored_rewards: tuple[float | None, ...]
    """What exploration scored them with stale weights; None where nothing was explored."""
    drawn: tuple[Drawn, ...] = ()
    """The requests that explored them, where they are trained on as they were drawn, and not rolled out."""

    def __post_init__(self) -> None:
        if len(self.seeds) != len(self.explored_rewards):
            raise ValueError(f"{len(self.seeds)} seeds and {len(self.explored_rewards)} explored rewards: give as many")
        count = sum(reward is not None for request in self.drawn for reward in request.rewards)
        if self.drawn and count != len(self.seeds):
            raise ValueError(f"{len(self.seeds)} seeds, and rewards of {count} that were drawn: give as many")


@record
class Explored:
    """What exploration found of one prompt."""

    prompt: int
    """Its id."""
    rewards: tuple[float, ...]
    """Rewards of every candidate scored, kept or not."""


@record
class Selection:
    """All that an iteration needs to know of its exploration; recorded before it is used."""

    iteration: int
    kept: tuple[Kept, ...]
    seeds_scored: int
    seeds_dropped: int
    seeds_failed: int = 0
    """How many of those dropped have no reward because the scorer failed."""
    error: str = ""
    """The scorer's error for the first of them."""
    reward_mean: float | None = None
    """Mean reward of all seeds scored, kept or not; None where there were none."""
    reward_std: float | None = None
    version: int = 0
    """Version of the weights that explored."""
    explored_as: str = ""
    """`Request.kind` of all requests that explored."""
    explored: tuple[Explored, ...] = ()
    """Results for all prompts, also those that are not rolled out, for the planner to learn from."""


@record
class Sample:
    """One training sample: which latents to read, and how good its image was in its group."""

    request: Request
    index: int
    """Row of the request's batch."""
    reward: float
    advantage: float | None
    """None if it is not trained on."""


@dataclass(frozen=True, kw_only=True)  # no slots, so that its name can be kept
class GradientPart:
    """One of the fixed parts of an update. A pure value: its gradient is the same bits wherever it is computed."""

    weights: WeightsRef
    """The version that the iteration starts from."""
    iteration: int
    update: int
    number: int
    """Its index among the parts of the update."""
    samples: tuple[Sample, ...]
    """In request order."""
    positions: tuple[int, ...]
    """Index of each sample among the iteration's, which fixes what is drawn for it at random."""
    after: str = ""
    """SHA-256 of the weights that the previous update left; empty in the first."""
    settings: str = ""
    """SHA-256 of the settings that it is trained with."""
    slices: int = 1
    """How many slices its gradient is stored in."""

    @cached_property
    def name(self) -> str:
        """Name of what is stored for it: another part, or other samples of this one, have another name."""
        requests = {id(sample.request): sample.request for sample in self.samples}
        digests = {key: request.digest for key, request in requests.items()}
        rows = [
            (digests[id(sample.request)], sample.index, sample.advantage, position)
            for sample, position in zip(self.samples, self.positions, strict=True)
        ]
        which = (self.iteration, self.update, self.number, self.slices)
        content = dumps(["sum", self.weights.sha256, *which, self.after, self.settings, rows])
        return f"u{self.update}-p{self.number}-{sha256(content.encode()).hexdigest()[:16]}"


@record
class Slice:
    """Some tensors of a gradient: a range of its file that is a safetensors file of its own."""

    start: int
    """Offset in the file, in bytes."""
    size: int
    """Size in bytes."""
    sha256: str


@record
class Gradient:
    """The gradient of a part, which is in the store, and what was measured of it; or a slice of the sum of all parts.

    It is the gradient of the sum of the losses of its rows, so that gradients are simply added.
    """

    name: str
    """Empty if it is no longer needed, since the next version is published."""
    rows: int = 0
    """Rows that the loss is a mean over; 0 where there is nothing to learn."""
    loss: float = 0.0
    """Loss of a part; 0 for a sum of several, which has no metrics either."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()
    """Slices of its file, in order; none where it has no tensors. A sum has one."""


@record
class Updated:
    """An optimizer step that was taken."""

    version: int
    """The version that the iteration makes; staged after its last update."""
    update: int
    weights_sha256: str = ""
    """Hash of the weights after it; empty after the last update."""


@record
class Published:
    """A new weights version that any worker may now use, and what its training measured."""

    weights: WeightsRef
    metrics: Mapping[str, float]


Interval = tuple[float, float]
"""``(start_s, stop_s)``, Unix time."""


AHEAD = "rollout-ahead"
"""Phase of rollouts that are begun an iteration early."""
ALIASES = {
    "add": "train",
    "decode": "score",
    "draw": "score",
    "explore-decode": "explore-score",
    "explore-draw": "explore-score",
    "refill": "rollout",
    "refill-score": "score",
    AHEAD: "rollout",
    "score-ahead": "score",
    "update": "train",
    "validate-decode": "validate",
    "validate-draw": "validate",
    "validate-images": "validate",
    "validate-score": "validate",
}
"""{phase: the phase that it is a part or a repetition of}; "draw" is the old name of "decode"."""


@record
class Span:
    """What one worker did, from when to when: a line of ``spans.jsonl``."""

    worker: str
    pool: str
    phase: str
    iteration: int
    key: str
    """Key of the task or the request."""
    start_s: float
    stop_s: float
    outcome: str
    """``done``; ``dropped`` (exploration called off), ``lost`` (with its worker), ``failed``, or ``stopped``
    (after the step in flight: by a person, or to go on wider or elsewhere)."""
    uncommitted_s: float | None = None
    """Of lost or failed work: its last seconds, whose steps were not committed. None if no step was."""
    redone_s: float = 0.0
    """Its first seconds, which repeated steps that count as useful in another span. A step that is computed twice
    is wasted once: here, or as uncommitted where it was computed first."""


@record
class WorkerLife:
    """From when to when a worker could be paid for: a line of ``workers.jsonl``."""

    worker: str
    pool: str
    joined_s: float
    left_s: float | None
    """None while it lives, or if its driver died first."""
    reason: str
    """``lost``, ``left`` (on notice), ``sent away`` (by `Run.scale`) or ``end`` (of the run)."""

    @property
    def was_taken(self) -> bool:
        """Whether it was taken before the run's end, with or without a notice."""
        return self.reason in ("lost", "left")

    def later(self, seconds: float) -> WorkerLife:
        """The same life, by a clock that is ``seconds`` ahead."""
        left_s = None if self.left_s is None else self.left_s + seconds
        return replace(self, joined_s=self.joined_s + seconds, left_s=left_s)


def row_of(record: Any) -> dict[str, Any]:
    """A record's fields by name; `dataclasses.asdict` copies what needs no copy, and takes ten times as long."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


@record
class Drained:
    """What happened on a cluster since its driver last asked."""

    spans: Sequence[Span] = ()
    workers: Mapping[int, WorkerLife] = field(default_factory=dict)
    """The lives that began or ended, each with a number of its own."""
    events: Sequence[dict[str, Any]] = ()
    decisions: Sequence[dict[str, Any]] = ()

    def later(self, seconds: float) -> Drained:
        """The same, by a clock that is ``seconds`` ahead; decisions keep their times, so that they can be replayed."""
        if not seconds:
            return self
        return replace(
            self,
            spans=[replace(span, start_s=span.start_s + seconds, stop_s=span.stop_s + seconds) for span in self.spans],
            workers={number: life.later(seconds) for number, life in self.workers.items()},
            events=[{**event, "at_s": event["at_s"] + seconds} for event in self.events],
        )

    def message(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "spans": [row_of(span) for span in self.spans],
            "workers": [(number, row_of(life)) for number, life in self.workers.items()],
            "events": list(self.events),
            "decisions": list(self.decisions),
        }

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Drained:
        """The inverse of `message`."""
        return cls(
            spans=[Span(**row) for row in message["spans"]],
            workers={number: WorkerLife(**row) for number, row in message["workers"]},
            events=message["events"],
            decisions=message["decisions"],
        )


NO_DEVICE = -1
"""A device number that means: the process works without a GPU, even if its machine has one."""
WITHOUT_GPU = "SPOTLIGHT_WITHOUT_GPU"
"""Environment variable of such a process."""


@cache
def base_phase(phase: str) -> str:
    """The phase under which it is reported: ``explore-r2`` is a round of ``explore``, a refill is a rollout."""
    phase = re.sub(r"-r\d+$", "", phase)
    return ALIASES.get(phase, phase)


Pool = Literal["reserved", "spot"]
