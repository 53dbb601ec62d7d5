"""Seconds and dollars: what a run's workers cost, where that went, and what a step of denoising or training takes.

Pure: no clock, no file, no Dask. Times are Unix seconds unless a docstring says otherwise; a `Window` is the
stretch of time that an account covers. Every second of every worker lands in exactly one column of the
`Ledger`, so its seconds add up to the seconds that workers were alive.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, Literal, TypeVar

from spotlight.records import SpotlightError

T = TypeVar("T")
SECONDS_PER_H = 3600.0
Window = tuple[float, float]
"""``(start_s, stop_s)``, Unix time."""
ALWAYS: Window = (-inf, inf)
Kind = Literal["useful", "idle", "start-up", "dropped", "lost", "redone"]
"""Of a worker's seconds: work that counts; nothing to do; joined, and no task yet; exploration that was called off;
steps that went with their worker before they were committed; steps done a second time."""
ALIASES = {"refill": "rollout", "validate-score": "validate", "validate-images": "validate"}
"""Phases that are a part of another one, or its work done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one worker did, from when to when: a line of ``spans.jsonl``."""

    worker: str
    pool: str
    phase: str
    iteration: int
    key: str
    """Of the task or the request."""
    start_s: float
    stop_s: float
    outcome: str
    """``done``; ``dropped`` (exploration called off), ``lost`` (with its worker), ``failed``, or ``stopped``
    (after the step in flight: by a person, or to go on wider or elsewhere)."""
    uncommitted_s: float | None = None
    """Of lost or failed work: its last seconds, whose steps were not committed. None where nobody knows."""
    redone_s: float = 0.0
    """Its first seconds, which repeated steps that count as useful in another span. A step that is computed twice
    is wasted once: here, or as uncommitted where it was computed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """From when to when a worker could be paid for: a line of ``workers.jsonl``."""

    worker: str
    pool: str
    joined_s: float
    left_s: float | None
    """None while it lives, or where whoever watched it died first."""
    reason: str
    """``lost``, ``left`` (on notice) or ``end`` (of the run)."""


def span_from_json(value: Mapping[str, Any]) -> Span:
    """A line of ``spans.jsonl``; fields that an account does not need are left out, newer ones may be absent."""
    names = [field.name for field in fields(Span) if field.name in value or field.default is MISSING]
    return Span(**{name: value[name] for name in names})


def life_from_json(value: Mapping[str, Any]) -> WorkerLife:
    """A line of ``workers.jsonl``; fields that an account does not need are left out."""
    return WorkerLife(**{name: value[name] for name in WorkerLife.__dataclass_fields__})


@cache
def base_phase(phase: str) -> str:
    """The phase as people count it: ``explore-r2`` is a round of ``explore``, a refill is a rollout."""
    phase = re.sub(r"-r\d+$", "", phase)
    return ALIASES.get(phase, phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one worker costs as time goes by: each price holds until the next begins.

    The first holds before its time, too, and the last for ever.
    """

    times_s: tuple[float, ...]
    """When each price begins, ascending."""
    usd_per_h: tuple[float, ...]
    since_start: bool = False
    """Times count from the moment the run's first worker joined; else they are Unix seconds."""

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.usd_per_h):
            raise ValueError(
                f"{len(self.times_s)} times and {len(self.usd_per_h)} prices: give as many, and one at least"
            )
        if any(after <= before for before, after in pairwise(self.times_s)):
            raise ValueError("the times of prices must rise")

    @classmethod
    def constant(cls, usd_per_h: float) -> Price:
        return cls(times_s=(0.0,), usd_per_h=(usd_per_h,))

    def moved(self, by_s: float) -> Price:
        """The same prices at times ``by_s`` later, no longer counted from the run's start."""
        return Price(times_s=tuple(at_s + by_s for at_s in self.times_s), usd_per_h=self.usd_per_h)

    def usd(self, start_s: float, stop_s: float) -> float:
        """Dollars of one worker from ``start_s`` to ``stop_s``: ``1/3600 * integral of usd_per_h(t) dt``."""
        first = max(0, bisect_right(self.times_s, start_s) - 1)
        last = max(first, bisect_left(self.times_s, stop_s) - 1)
        if first == last:  # nearly always, and called for every segment
            return (stop_s - start_s) * self.usd_per_h[first] / SECONDS_PER_H
        cuts_s = (start_s, *self.times_s[first + 1 : last + 1], stop_s)
        pieces_s = (after - before for before, after in pairwise(cuts_s))
        prices = self.usd_per_h[first : last + 1]
        return sum(seconds * price for seconds, price in zip(pieces_s, prices, strict=True)) / SECONDS_PER_H


Prices = Mapping[str, Price]
"""``{pool: price of one of its workers}``"""


def absolute(prices: Prices, workers: Iterable[WorkerLife]) -> dict[str, Price]:
    """The prices in the workers' own time: those that count from the run's start are moved to its first worker."""
    began_s = min((life.joined_s for life in workers), default=0.0)
    return {pool: price.moved(began_s) if price.since_start else price for pool, price in prices.items()}


def stay(life: WorkerLife, window: Window) -> Window:
    """When a worker was alive within the window; to the window's end where it never left. May be empty."""
    start_s = max(life.joined_s, window[0])
    return start_s, max(start_s, min(window[1], inf if life.left_s is None else life.left_s))


def pool_seconds(workers: Iterable[WorkerLife], window: Window) -> dict[str, float]:
    """Seconds that each pool's workers were alive, boot and idle time included.

    For each pool ``p``, with ``left_i`` the window's end for a worker that never left::

        alive_p = sum over workers i of p of |[joined_i, left_i] ∩ window|
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for life in workers:
        start_s, stop_s = stay(life, window)
        seconds[life.pool] += stop_s - start_s
    return dict(seconds)


def pool_usd(workers: Sequence[WorkerLife], prices: Prices, window: Window) -> dict[str, float]:
    """Dollars of each pool: its price, integrated over the time that each of its workers was alive.

    ``usd_p = 1/3600 * sum over workers i of p of integral over [joined_i, left_i] ∩ window of usd_per_h_p(t) dt``
    """
    usd: defaultdict[str, float] = defaultdict(float)
    prices = absolute(prices, workers)
    for life in workers:
        usd[life.pool] += prices[life.pool].usd(*stay(life, window))
    return dict(usd)


def overlap_s(start_s: float, stop_s: float, window: Window) -> float:
    """Seconds of ``[start_s, stop_s]`` inside the window: ``max(0, min(stop, w1) - max(start, w0))``."""
    return max(0.0, min(stop_s, window[1]) - max(start_s, window[0]))


def busy_intervals(spans: Iterable[Span]) -> dict[str, list[Window]]:
    """When each worker was busy: the union of its spans, as disjoint intervals in order of time."""
    merged: defaultdict[str, list[Window]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        intervals = merged[span.worker]
        if intervals and span.start_s <= intervals[-1][1]:
            start_s, stop_s = intervals.pop()
            intervals.append((start_s, max(stop_s, span.stop_s)))
        else:
            intervals.append((span.start_s, span.stop_s))
    return dict(merged)


def spot_utilisation(spans: Iterable[Span], workers: Iterable[WorkerLife], window: Window) -> float:
    """Busy share of the seconds that spot workers were alive within the window, in [0, 1].

    ``sum over spot workers of |union of their spans ∩ window| / alive_spot``; every outcome counts
    as busy, and the share is 0 where no spot worker was alive.
    """
    alive_s = pool_seconds(workers, window).get("spot", 0.0)
    intervals = busy_intervals(span for span in spans if span.pool == "spot").values()
    busy_s = sum(overlap_s(start_s, stop_s, window) for worker in intervals for start_s, stop_s in worker)
    return min(1.0, busy_s / alive_s) if alive_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one worker's time, in the one column of the ledger that it belongs to."""

    pool: str
    phase: str
    """As `base_phase` has it; ``idle`` and ``start-up`` where there was none."""
    kind: Kind
    start_s: float
    stop_s: float


def segments(
    spans: Iterable[Span],
    workers: Iterable[WorkerLife],
    window: Window = ALWAYS,
    *,
    step_s: Mapping[str, float] | None = None,
) -> Iterator[Segment]:
    """Cut the time of every worker into stretches that touch and do not overlap.

    A worker's time before its first task is start-up (all of it, where none came), the rest without a span is
    idle. Where spans overlap on a worker, useful work counts before wasted work, then what began last.

    Args:
        step_s: ``{phase: longest that one step may last}`` for phases that commit every step. Of lost or failed work
            that does not say what was uncommitted, the last step is taken for wasted; of a phase that is not named
            here, everything is: both are upper bounds.
    """
    pieces: defaultdict[str, list[Segment]] = defaultdict(list)
    for span in spans:
        pieces[span.worker] += _pieces(span, step_s or {})
    for life in workers:
        yield from _partition(life, pieces[life.worker], window)


def _pieces(span: Span, step_s: Mapping[str, float]) -> list[Segment]:
    """A span's steps done twice, its useful and its lost ones, in this order; empty parts left out."""
    phase, start_s, stop_s = base_phase(span.phase), span.start_s, max(span.start_s, span.stop_s)
    redone_s = min(stop_s, start_s + span.redone_s)
    useful_s = stop_s
    if span.outcome in ("lost", "failed"):
        assumed_s = step_s.get(phase, stop_s - start_s)
        useful_s = max(redone_s, stop_s - (assumed_s if span.uncommitted_s is None else span.uncommitted_s))
    parts: list[tuple[Kind, float, float]] = [
        ("redone", start_s, redone_s),
        ("useful", redone_s, useful_s),
        ("lost", useful_s, stop_s),
    ]
    if span.outcome == "dropped":
        parts = [("dropped", start_s, stop_s)]
    return [
        Segment(pool=span.pool, phase=phase, kind=kind, start_s=begin_s, stop_s=end_s)
        for kind, begin_s, end_s in parts
        if end_s > begin_s
    ]


def _partition(life: WorkerLife, pieces: Iterable[Segment], window: Window) -> Iterator[Segment]:
    """One worker's stay in the window, cut wherever a piece of work begins or ends."""
    whole = stay(life, (-inf, window[1]))
    work = [piece for piece in pieces if overlap_s(piece.start_s, piece.stop_s, whole)]
    work.sort(key=lambda piece: piece.start_s)
    first_s = work[0].start_s if work else whole[1]
    start_s, stop_s = stay(life, window)
    moments_s = {start_s, stop_s, *(at_s for piece in work for at_s in (piece.start_s, piece.stop_s))}
    under_way: list[Segment] = []
    work.reverse()
    for begin_s, end_s in pairwise(sorted(at_s for at_s in moments_s if start_s <= at_s <= stop_s)):
        while work and work[-1].start_s <= begin_s:
            under_way.append(work.pop())
        under_way = [piece for piece in under_way if piece.stop_s > begin_s]
        chosen = max(under_way, key=lambda piece: (piece.kind == "useful", piece.start_s, piece.phase), default=None)
        waiting: Kind = "start-up" if begin_s < first_s else "idle"
        yield Segment(
            pool=life.pool,
            phase=chosen.phase if chosen else waiting,
            kind=chosen.kind if chosen else waiting,
            start_s=begin_s,
            stop_s=end_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One column of a ledger."""

    pool: str
    phase: str
    kind: Kind
    seconds: float
    usd: float
    usd_reserved: float
    """The same seconds at the reserved pool's price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where a run's seconds and dollars went, and what they bought."""

    entries: tuple[Entry, ...]
    iterations: int = 0
    """Finished."""
    samples: int = 0
    """Kept and trained on."""
    points: float | None = None
    """Validation score gained, in hundredths; None where it was not measured twice."""

    def seconds(self, **where: str) -> float:
        """Sum over the entries whose fields have these values: ``ledger.seconds(pool="spot", kind="idle")``."""
        return sum(entry.seconds for entry in self._where(where))

    def usd(self, **where: str) -> float:
        """As `seconds`."""
        return sum(entry.usd for entry in self._where(where))

    @property
    def usd_wasted(self) -> float:
        """``usd - usd(kind="useful")``."""
        return sum(entry.usd for entry in self.entries if entry.kind != "useful")

    @property
    def usd_reserved_only(self) -> float:
        """Price of the same work on reserved workers that never start, idle or lose anything.

        ``1/3600 * integral over useful seconds t of usd_per_h_reserved(t) dt``: exploration counts unless it was called
        off. Real reserved-only runs pay for idle time, too, so this is the least that one could have cost.
        """
        return sum(entry.usd_reserved for entry in self._where({"kind": "useful"}))

    @property
    def usd_per_iteration(self) -> float | None:
        """``usd / iterations``: idle time, exploration and validation included."""
        return self.usd() / self.iterations if self.iterations else None

    @property
    def usd_per_sample(self) -> float | None:
        """``usd / samples kept``."""
        return self.usd() / self.samples if self.samples else None

    @property
    def usd_per_point(self) -> float | None:
        """``usd / (100 * (last validation score - first))``; None where the score has not risen."""
        return self.usd() / self.points if self.points and self.points > 0 else None

    def _where(self, where: Mapping[str, str]) -> Iterator[Entry]:
        return (entry for entry in self.entries if all(getattr(entry, name) == value for name, value in where.items()))


def ledger(
    spans: Iterable[Span],
    workers: Sequence[WorkerLife],
    prices: Prices,
    window: Window = ALWAYS,
    *,
    step_s: Mapping[str, float] | None = None,
    iterations: int = 0,
    samples: int = 0,
    scores: Sequence[float] = (),
) -> Ledger:
    """Account for every second that workers were alive within the window.

    ``seconds[pool, phase, kind] = sum of |segment|`` and ``usd = 1/3600 * integral of usd_per_h_pool(t) dt`` over the
    `segments` of that column, so both add up: the seconds to `pool_seconds`, the dollars to `pool_usd`.

    Args:
        window: must end, if a worker still lives.
        step_s: as in `segments`.
        scores: of every validation, in [0, 1], in order of time.
    """
    prices = absolute(prices, workers)
    sums: defaultdict[tuple[str, str, Kind], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for segment in segments(spans, workers, window, step_s=step_s):
        column = sums[segment.pool, segment.phase, segment.kind]
        column[0] += segment.stop_s - segment.start_s
        column[1] += prices[segment.pool].usd(segment.start_s, segment.stop_s)
        column[2] += prices["reserved"].usd(segment.start_s, segment.stop_s)
    return Ledger(
        entries=tuple(
            Entry(pool=pool, phase=phase, kind=kind, seconds=seconds, usd=usd, usd_reserved=usd_reserved)
            for (pool, phase, kind), (seconds, usd, usd_reserved) in sorted(sums.items())
        ),
        iterations=iterations,
        samples=samples,
        points=100 * (scores[-1] - scores[0]) if len(scores) > 1 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """What of a diffusion transformer its speed depends on."""

    layers: int
    dim: int
    heads: int
    px_per_token: int
    """Edge of the square of pixels behind one latent token: VAE factor x patch."""
    text_tokens: int
    weights_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its maker describes it."""

    flops_per_s: float
    """Dense bfloat16."""
    bytes_per_s: float
    """Of its memory."""
    link_bytes_per_s: float
    """To its neighbours in the node, one direction."""


TRANSFORMERS = {
    # Published: the checkpoint's own settings; 20.43e9 parameters in bfloat16. About 100 text tokens is inferred.
    "qwen-image": Transformer(layers=60, dim=3072, heads=24, px_per_token=16, text_tokens=100, weights_bytes=40.9e9),
}
GPUS = {  # published: the makers' data sheets
    "a100": Gpu(flops_per_s=312e12, bytes_per_s=2.04e12, link_bytes_per_s=300e9),
    "b200": Gpu(flops_per_s=2250e12, bytes_per_s=8.0e12, link_bytes_per_s=900e9),
    "h100": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=450e9),
    "h200": Gpu(flops_per_s=989e12, bytes_per_s=4.8e12, link_bytes_per_s=450e9),
    "h800": Gpu(flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=200e9),
    "l40s": Gpu(flops_per_s=362e12, bytes_per_s=0.864e12, link_bytes_per_s=32e9),
}
EFFICIENCY = 0.215
"""Share of a GPU's peak that a whole run sustains. Calibrated to three published Qwen-Image runs at 512 px on H800 and
H200, which give 0.210, 0.210 and 0.221; it absorbs text encoding, VAE and waits. On other GPUs it is assumed."""
LINK_EFFICIENCY, COLLECTIVE_S = 0.7, 30e-6
"""Share of the link's peak that an all-to-all reaches, and what starting one costs. Assumed."""
SCORE_S = (420 - 360) * 4 / 512
"""GPU-seconds to score an image with a vision-language model of 8e9 parameters. Published: moving the reward off four
H800 shortened a step of 512 images from 420 to 360 s (verl-omni)."""
BACKWARD_LORA, BACKWARD_FULL = 2, 3
"""Backward passes cost this many forward ones: activations again (checkpointing), their gradients, and the weights'."""
BOOT_S = 120.0
"""From asking for a spot machine to its worker's first line. Assumed: no measurement was found."""
REGROUP_S = 0.64
"""To re-form a sequence-parallel group from survivors. Measured on two CPU cores with gloo; assumed for GPUs."""


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
    model: str, height_px: int, width_px: int, *, width: int = 1, gpu: str, batch: int = 1, guidance: float = 1.0
) -> float:
    """Seconds of one denoising step of a batch on a sequence-parallel group of ``width`` GPUs in one node::

        passes * (max(batch F / (width e P), W / M) + 4 L (batch (S / width) 2 d (width - 1) / width / B + c))

    ``F`` is `forward_flops`, ``e P`` the peak times `EFFICIENCY`, ``W / M`` the time to read all weights once;
    each layer has four all-to-alls of ``2 d`` bytes per token at bandwidth ``B``, each with a latency ``c``; a width
    of 1 has none. True classifier-free guidance (above 1) takes two passes.

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
        exchange_s = 4 * shape.layers * (sent_bytes / (LINK_EFFICIENCY * device.link_bytes_per_s) + COLLECTIVE_S)
    return _passes(guidance) * (max(compute_s, shape.weights_bytes / device.bytes_per_s) + exchange_s)


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
    old_log_probs: bool = True,
) -> float:
    """GPU-seconds to train on one sample: ``timesteps passes F (1 + backward + old) / (e P)``.

    Symbols as in `seconds_per_step`; ``backward`` is 2 forward passes for a LoRA and 3 for full weights, ``old`` is 1
    where old log-probabilities are computed again. Divide by the GPUs that share the batch.

    Raises:
        SpotlightError: no such model or GPU, or a size of no whole tokens.
    """
    device = _known(GPUS, gpu, "GPU")
    forwards = 1 + (BACKWARD_LORA if lora else BACKWARD_FULL) + old_log_probs
    flops = timesteps * _passes(guidance) * forwards * forward_flops(model, height_px, width_px)
    return flops / (EFFICIENCY * device.flops_per_s)


def load_s(model: str, *, gbit_per_s: float = 10.0) -> float:
    """Seconds to bring a model's weights over the network: ``8 weights_bytes / (1e9 gbit_per_s)``."""
    return 8 * _known(TRANSFORMERS, model, "model").weights_bytes / (1e9 * gbit_per_s)


def start_up_s(model: str, *, boot_s: float = BOOT_S, gbit_per_s: float = 10.0) -> float:
    """Seconds from asking for a machine to its first step: boot, then `load_s`."""
    return boot_s + load_s(model, gbit_per_s=gbit_per_s)


def recovery_s(model: str, *, elastic: bool, gbit_per_s: float = 10.0) -> float:
    """Seconds until a group that lost a member steps again: survivors re-form, or every process loads its weights."""
    return REGROUP_S if elastic else REGROUP_S + load_s(model, gbit_per_s=gbit_per_s)


def _tokens(shape: Transformer, height_px: int, width_px: int) -> int:
    return height_px // shape.px_per_token * (width_px // shape.px_per_token) + shape.text_tokens


def _passes(guidance: float) -> int:
    return 2 if guidance > 1 else 1


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise SpotlightError(f"there is no cost model of the {what} {name!r}; there are {', '.join(map(repr, table))}")
    return table[name]
