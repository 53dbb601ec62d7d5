"""Seconds and dollars: what a run's workers cost, how busy they were, and what they replaced.

Pure: no clock, no file, no Dask. Times are Unix seconds; a `Window` is the stretch of time that
an account covers. What a worker does twice at once (a span inside a span) counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

SECONDS_PER_H = 3600.0
Window = tuple[float, float]
"""``(start_s, stop_s)``, Unix time."""
ALWAYS: Window = (-inf, inf)


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
    """``done``; ``dropped`` (exploration called off), ``lost`` (with its worker) or ``stopped`` (by a person)."""


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
    """A line of ``spans.jsonl``; fields that an account does not need are left out."""
    return Span(**{name: value[name] for name in Span.__dataclass_fields__})


def life_from_json(value: Mapping[str, Any]) -> WorkerLife:
    """A line of ``workers.jsonl``; fields that an account does not need are left out."""
    return WorkerLife(**{name: value[name] for name in WorkerLife.__dataclass_fields__})


def overlap_s(start_s: float, stop_s: float, window: Window) -> float:
    """Seconds of ``[start_s, stop_s]`` inside the window: ``max(0, min(stop, w1) - max(start, w0))``."""
    return max(0.0, min(stop_s, window[1]) - max(start_s, window[0]))


def pool_seconds(workers: Iterable[WorkerLife], window: Window) -> dict[str, float]:
    """Seconds that each pool's workers were alive, boot and idle time included.

    For each pool ``p``, with ``left_i`` the window's end for a worker that never left::

        alive_p = sum over workers i of p of |[joined_i, left_i] ∩ window|
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for life in workers:
        left_s = window[1] if life.left_s is None else life.left_s
        seconds[life.pool] += overlap_s(life.joined_s, left_s, window)
    return dict(seconds)


def dollars(seconds_by_pool: Mapping[str, float], usd_per_h: Mapping[str, float]) -> float:
    """Price of the seconds that workers were alive: ``sum over pools p of alive_p / 3600 * usd_per_h_p``."""
    return sum(seconds / SECONDS_PER_H * usd_per_h[pool] for pool, seconds in seconds_by_pool.items())


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


def useful(spans: Iterable[Span]) -> list[Span]:
    """Spans that reserved workers would have had to run too: all but exploration that was called off.

    Work lost with its worker counts: its committed steps were resumed, not run again.
    """
    return [span for span in spans if span.outcome != "dropped"]


def reserved_only_usd(spans: Iterable[Span], usd_per_h_reserved: float, window: Window = ALWAYS) -> float:
    """Price of the same work on reserved workers alone, if they never idled.

    ``usd = usd_per_h_reserved / 3600 * sum over workers of |union of their useful spans ∩ window|``.
    Real reserved-only runs also pay for idle time, so this is the least that one could have cost.
    """
    intervals = busy_intervals(useful(spans)).values()
    busy_s = sum(overlap_s(start_s, stop_s, window) for worker in intervals for start_s, stop_s in worker)
    return busy_s / SECONDS_PER_H * usd_per_h_reserved


def spot_utilisation(spans: Iterable[Span], workers: Iterable[WorkerLife], window: Window) -> float:
    """Busy share of the seconds that spot workers were alive within the window, in [0, 1].

    ``sum over spot workers of |union of their spans ∩ window| / alive_spot``; every outcome counts
    as busy, and the share is 0 where no spot worker was alive.
    """
    alive_s = pool_seconds(workers, window).get("spot", 0.0)
    intervals = busy_intervals(span for span in spans if span.pool == "spot").values()
    busy_s = sum(overlap_s(start_s, stop_s, window) for worker in intervals for start_s, stop_s in worker)
    return min(1.0, busy_s / alive_s) if alive_s else 0.0
