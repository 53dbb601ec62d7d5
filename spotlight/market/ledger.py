"""Seconds and dollars: what a run's workers cost, and where that went.

Pure: no clock, no file, no Dask. Times are Unix seconds unless a docstring says otherwise; a `Window` is the
stretch of time that an account covers. Every second of every worker lands in exactly one column of the
`Ledger`, so its seconds add up to the seconds that workers were alive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from operator import attrgetter
from typing import Literal, get_args

from spotlight.market.traces import SECONDS_PER_H
from spotlight.records import Interval, Span, SpotlightError, WorkerLife, base_phase, record

ALWAYS: Interval = (-inf, inf)
LATEST_S = 1e12
"""Latest time that prices and journals may hold, the year 33658. Times are Unix seconds, or a virtual clock's."""
AT_RESERVED_PRICES = "the same useful seconds at reserved prices"
"""The name of `Ledger.usd_reserved_only` in tables and pages."""
Kind = Literal["useful", "idle", "start-up", "dropped", "lost", "redone"]
"""Kinds of a worker's seconds: work that counts; nothing to do; joined, and no task yet; exploration that was called
off; steps lost with their worker before they were committed; steps done a second time."""


@record
class Price:
    """What one worker costs over time: each price holds until the next begins.

    The first also holds before its time, the last for ever.
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

    def at_times(self, of: Callable[[float], float]) -> Price:
        """The same prices at times mapped by ``of``, which keeps their order; of several at once, the last holds."""
        found = dict(zip(map(of, self.times_s), self.usd_per_h, strict=True))
        return Price(times_s=tuple(found), usd_per_h=tuple(found.values()))

    def at(self, time_s: float) -> float:
        """Dollars an hour at a moment."""
        return self.usd_per_h[max(0, bisect_right(self.times_s, time_s) - 1)]

    def usd(self, start_s: float, stop_s: float) -> float:
        """Dollars of one worker from ``start_s`` to ``stop_s``: ``1/3600 * integral of usd_per_h(t) dt``."""
        first = max(0, bisect_right(self.times_s, start_s) - 1)
        last = max(first, bisect_left(self.times_s, stop_s) - 1)
        if first == last:  # nearly always, and called for every segment
            return (stop_s - start_s) * self.usd_per_h[first] / SECONDS_PER_H
        pieces_s = (after - before for before, after in self.pieces(start_s, stop_s))
        prices = self.usd_per_h[first : last + 1]
        return sum(seconds * price for seconds, price in zip(pieces_s, prices, strict=True)) / SECONDS_PER_H

    def pieces(self, start_s: float, stop_s: float) -> Iterator[Interval]:
        """The time from ``start_s`` to ``stop_s``, cut wherever the price changes."""
        changes = slice(max(1, bisect_right(self.times_s, start_s)), bisect_left(self.times_s, stop_s))
        return pairwise((start_s, *self.times_s[changes], stop_s))


Prices = Mapping[str, Price]
"""``{pool: price of one of its workers}``. If the reserved workers only take the updates, on another type of GPU than
the spot ones' or on none, `ON_DEMAND` has the on-demand price of a GPU like the spot ones."""
ON_DEMAND = "on demand"


def absolute(prices: Prices, workers: Iterable[WorkerLife]) -> dict[str, Price]:
    """The prices in the workers' own time: those that count from the run's start are moved to its first worker."""
    began_s = min((life.joined_s for life in workers), default=0.0)
    return {pool: price.moved(began_s) if price.since_start else price for pool, price in prices.items()}


def reserved_price(prices: Prices, pool: str) -> Price:
    """Price of a pool's work on reserved GPUs; it differs for spot workers only."""
    return prices.get(ON_DEMAND, prices["reserved"]) if pool == "spot" else prices[pool]


def stay(life: WorkerLife, window: Interval) -> Interval:
    """When a worker was alive within the window; to the window's end where it never left. May be empty."""
    start_s = max(life.joined_s, window[0])
    return start_s, max(start_s, min(window[1], inf if life.left_s is None else life.left_s))


def pool_seconds(workers: Iterable[WorkerLife], window: Interval) -> dict[str, float]:
    """Seconds that each pool's workers were alive, idle or not, since they joined, without the machines' boot time.

    For each pool ``p``, with ``left_i`` the window's end for a worker that never left::

        alive_p = sum over workers i of p of |[joined_i, left_i] ∩ window|
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for life in workers:
        start_s, stop_s = stay(life, window)
        seconds[life.pool] += stop_s - start_s
    return dict(seconds)


def pool_usd(workers: Sequence[WorkerLife], prices: Prices, window: Interval) -> dict[str, float]:
    """Dollars of each pool: its price, integrated over the time that each of its workers was alive.

    ``usd_p = 1/3600 * sum over workers i of p of integral over [joined_i, left_i] ∩ window of usd_per_h_p(t) dt``
    """
    usd: defaultdict[str, float] = defaultdict(float)
    prices = absolute(prices, workers)
    _require_prices(prices, workers)
    for life in workers:
        usd[life.pool] += prices[life.pool].usd(*stay(life, window))
    return dict(usd)


def _require_prices(prices: Prices, workers: Iterable[WorkerLife]) -> None:
    for life in workers:
        if life.pool not in prices:
            raise SpotlightError(
                f"workers.jsonl: {life.worker} is of the pool {life.pool!r}, which the settings do not have: restore it"
            )


def overlap_s(start_s: float, stop_s: float, window: Interval) -> float:
    """Seconds of ``[start_s, stop_s]`` inside the window: ``max(0, min(stop, w1) - max(start, w0))``."""
    return max(0.0, min(stop_s, window[1]) - max(start_s, window[0]))


def busy_intervals(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """When each worker was busy: the union of its spans, as disjoint intervals in order of time."""
    merged: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        intervals = merged[span.worker]
        if intervals and span.start_s <= intervals[-1][1]:
            start_s, stop_s = intervals.pop()
            intervals.append((start_s, max(stop_s, span.stop_s)))
        else:
            intervals.append((span.start_s, span.stop_s))
    return dict(merged)


def spot_utilisation(spans: Iterable[Span], workers: Iterable[WorkerLife], window: Interval) -> float:
    """Busy share of the seconds that spot workers were alive within the window, in [0, 1].

    ``sum over spot workers of |union of their spans ∩ window| / alive_spot``; every outcome counts
    as busy, and the share is 0 where no spot worker was alive.
    """
    alive_s = pool_seconds(workers, window).get("spot", 0.0)
    intervals = busy_intervals(span for span in spans if span.pool == "spot").values()
    busy_s = sum(overlap_s(start_s, stop_s, window) for worker in intervals for start_s, stop_s in worker)
    return min(1.0, busy_s / alive_s) if alive_s else 0.0


@record
class Segment:
    """A stretch of one worker's time, in the one column of the ledger that it belongs to."""

    pool: str
    phase: str
    """As `base_phase` returns it; ``idle`` or ``start-up`` if there was no work."""
    kind: Kind
    start_s: float
    stop_s: float


def segments(
    spans: Iterable[Span],
    workers: Iterable[WorkerLife],
    window: Interval = ALWAYS,
) -> Iterator[Segment]:
    """Cut the time of every worker into stretches that touch and do not overlap.

    A worker's time before its first task is start-up (all of it, where none came), the rest without a span is
    idle. Where spans overlap on a worker, useful work counts before wasted work, then what began last.
    """
    pieces: defaultdict[str, list[Segment]] = defaultdict(list)
    for span in spans:
        pieces[span.worker] += _pieces(span)
    ends_s: dict[str, list[float]] = {}
    """When all pieces up to each one have ended, by worker."""
    for worker, work in pieces.items():
        work.sort(key=attrgetter("start_s"))
        ends_s[worker] = list(accumulate((piece.stop_s for piece in work), max))
    for life in workers:
        whole = stay(life, (-inf, window[1]))
        work = pieces[life.worker]  # of all lives of that name, which may be hundreds
        first = bisect_right(ends_s.get(life.worker, []), whole[0])
        last = bisect_left(work, whole[1], key=attrgetter("start_s"))
        yield from _partition(life, work[first:last], window)


def _pieces(span: Span) -> list[Segment]:
    """A span cut into repeated, useful and lost seconds, in this order, without empty parts; or dropped ones only."""
    phase, start_s, stop_s = base_phase(span.phase), span.start_s, max(span.start_s, span.stop_s)
    if span.outcome == "done" and not span.redone_s:  # nearly always
        useful = Segment(pool=span.pool, phase=phase, kind="useful", start_s=start_s, stop_s=stop_s)
        return [useful] if stop_s > start_s else []
    redone_s = min(stop_s, start_s + span.redone_s)
    useful_s = stop_s
    if span.outcome in ("lost", "failed"):
        useful_s = start_s if span.uncommitted_s is None else stop_s - span.uncommitted_s
        useful_s = max(redone_s, useful_s)
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


def _partition(life: WorkerLife, pieces: Iterable[Segment], window: Interval) -> Iterator[Segment]:
    """One worker's stay in the window, cut wherever a piece of work, in order of their starts, begins or ends."""
    whole = stay(life, (-inf, window[1]))
    work = [piece for piece in pieces if overlap_s(piece.start_s, piece.stop_s, whole)]
    first_s = work[0].start_s if work else whole[1]
    start_s, stop_s = stay(life, window)
    moments_s = {start_s, stop_s, *(at_s for piece in work for at_s in (piece.start_s, piece.stop_s))}
    under_way: list[Segment] = []
    work.reverse()
    for begin_s, end_s in pairwise(sorted(at_s for at_s in moments_s if start_s <= at_s <= stop_s)):
        while work and work[-1].start_s <= begin_s:
            under_way.append(work.pop())
        under_way = [piece for piece in under_way if piece.stop_s > begin_s]
        chosen = under_way[0] if under_way else None
        if len(under_way) > 1:
            chosen = max(under_way, key=lambda piece: (piece.kind == "useful", piece.start_s, piece.phase))
        if chosen and chosen.start_s == begin_s and chosen.stop_s == end_s:  # nearly always
            yield chosen
            continue
        waiting: Kind = "start-up" if begin_s < first_s else "idle"
        yield Segment(
            pool=life.pool,
            phase=chosen.phase if chosen else waiting,
            kind=chosen.kind if chosen else waiting,
            start_s=begin_s,
            stop_s=end_s,
        )


@record
class Entry:
    """One column of a ledger."""

    pool: str
    phase: str
    kind: Kind
    seconds: float
    usd: float
    usd_reserved: float
    """The same seconds at the price of a reserved GPU (`reserved_price`)."""


def summed(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """One entry for each column, of stretches of time that do not overlap."""
    columns: dict[tuple[str, str, Kind], Entry] = {}
    for entry in entries:
        key = entry.pool, entry.phase, entry.kind
        before = columns.get(key)
        columns[key] = entry if before is None else _sum(before, entry)
    return tuple(columns[key] for key in sorted(columns))


def _sum(entry: Entry, other: Entry) -> Entry:
    return replace(
        entry,
        seconds=entry.seconds + other.seconds,
        usd=entry.usd + other.usd,
        usd_reserved=entry.usd_reserved + other.usd_reserved,
    )


@record
class Ledger:
    """Where a run's seconds and dollars went, and what they bought."""

    entries: tuple[Entry, ...]
    iterations: int = 0
    """Iterations finished."""
    samples: int = 0
    """Samples kept. Some may not be trained on (``train.seeds_used``, ``train.filter_groups``)."""
    points: float | None = None
    """Validation score gained, in hundredths; None where it was not measured twice."""

    def seconds(self, **where: str) -> float:
        """Sum over the entries whose fields have these values: ``ledger.seconds(pool="spot", kind="idle")``."""
        return sum(entry.seconds for entry in self._where(where))

    def usd(self, **where: str) -> float:
        """US dollars, summed as in `seconds`."""
        return sum(entry.usd for entry in self._where(where))

    @property
    def wasted_s(self) -> dict[str, float]:
        """Worker seconds that bought nothing, by kind; every kind is there."""
        return {kind: self.seconds(kind=kind) for kind in get_args(Kind) if kind != "useful"}

    @property
    def usd_wasted(self) -> float:
        """``usd - usd(kind="useful")``."""
        return sum(entry.usd for entry in self.entries if entry.kind != "useful")

    @property
    def usd_reserved_only(self) -> float:
        """Price of the same work on reserved GPUs that never start, idle or lose anything.

        ``1/3600 * integral over useful seconds t of usd_per_h_reserved(t) dt``: exploration counts unless it was called
        off. A run on reserved GPUs alone pays for idle time, too, and does less: it need not explore.
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
    window: Interval = ALWAYS,
    *,
    iterations: int = 0,
    samples: int = 0,
    scores: Sequence[float] = (),
) -> Ledger:
    """Account for every second that workers were alive within the window.

    ``seconds[pool, phase, kind] = sum of |segment|`` and ``usd = 1/3600 * integral of usd_per_h_pool(t) dt`` over the
    `segments` of that column, so both add up: the seconds to `pool_seconds`, the dollars to `pool_usd`.

    Args:
        window: must end, if a worker still lives.
        scores: of every validation, in [0, 1], in order of time.
    """
    prices = absolute(prices, workers)
    _require_prices(prices, workers)
    sums: defaultdict[tuple[str, str, Kind], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    reserved = {pool: reserved_price(prices, pool) for pool in {life.pool for life in workers}}
    for segment in segments(spans, workers, window):
        column = sums[segment.pool, segment.phase, segment.kind]
        column[0] += segment.stop_s - segment.start_s
        column[1] += prices[segment.pool].usd(segment.start_s, segment.stop_s)
        column[2] += reserved[segment.pool].usd(segment.start_s, segment.stop_s)
    return Ledger(
        entries=tuple(
            Entry(pool=pool, phase=phase, kind=kind, seconds=seconds, usd=usd, usd_reserved=usd_reserved)
            for (pool, phase, kind), (seconds, usd, usd_reserved) in sorted(sums.items())
        ),
        iterations=iterations,
        samples=samples,
        points=100 * (scores[-1] - scores[0]) if len(scores) > 1 else None,
    )
