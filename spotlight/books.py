"""What all workers of a run did and what that cost, over all of its sessions; kept on disk as it goes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from json import dumps
from typing import Any

from spotlight.config import Config
from spotlight.costs import (
    Span,
    Window,
    WorkerLife,
    busy_intervals,
    dollars,
    life_from_json,
    overlap_s,
    pool_seconds,
    reserved_only_usd,
    span_from_json,
    spot_utilisation,
)
from spotlight.rundir import SPANS, WORKERS, RunDir, atomic_write


class Books:
    """Spans and worker lives of one run; times are Unix seconds."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._prices = {"reserved": config.pools.reserved.usd_per_h, "spot": config.pools.spot.usd_per_h}
        self._spans = [span_from_json(row) for row in run.rows(SPANS)]
        last_s = max((span.stop_s for span in self._spans), default=0.0)
        self._earlier = [_ended(life_from_json(row), last_s) for row in run.rows(WORKERS)]
        self._lives: list[WorkerLife] = []
        self.running: Mapping[str, int] = {}
        """Tasks in progress, by phase."""

    def take(self, drained: Mapping[str, Any], running: Mapping[str, int]) -> None:
        """Add what the cluster reports: new spans, and the lives of all its workers."""
        self.running = running
        self._spans += [span_from_json(row) for row in drained["spans"]]
        if drained["spans"]:
            self._run.append(SPANS, *drained["spans"])
        lives = [life_from_json(row) for row in drained["workers"]]
        if lives != self._lives:
            self._lives = lives
            self._write_lives()

    def close(self, now_s: float) -> None:
        """The session ends, and with it the workers that are still alive."""
        self._lives = [_ended(life, now_s) for life in self._lives]
        self.running = {}
        self._write_lives()

    def measure(self, start_s: float, stop_s: float) -> dict[str, float]:
        """Seconds and dollars of a stretch of time: by phase, by worker, by pool."""
        window = (start_s, stop_s)
        by_phase: defaultdict[str, float] = defaultdict(float)
        for span in self._spans:
            by_phase[_phase(span)] += overlap_s(span.start_s, span.stop_s, window)
        busy = {
            worker: sum(overlap_s(*interval, window) for interval in intervals)
            for worker, intervals in busy_intervals(self._spans).items()
        }
        lost = [life for life in self._all() if life.reason == "lost" and start_s <= (life.left_s or 0) <= stop_s]
        return {
            "wall_s": stop_s - start_s,
            **{f"{phase}_s": seconds for phase, seconds in by_phase.items() if seconds},
            **{f"busy_s.{worker}": seconds for worker, seconds in busy.items()},
            "usd": self.usd(window, stop_s),
            "spot_utilisation": spot_utilisation(self._spans, self._all(), window),
            "preemptions": float(len(lost)),
        }

    def usd(self, window: Window | None = None, now_s: float | None = None) -> float:
        """Price of all workers' seconds, idle or not, up to ``now_s``."""
        window = window or (0.0, now_s or 0.0)
        return dollars(pool_seconds(self._all(), window), self._prices)

    def usd_reserved_only(self) -> float:
        """The least that the same work would have cost on reserved workers alone."""
        return reserved_only_usd(self._spans, self._prices["reserved"])

    def spot_utilisation(self, now_s: float) -> float:
        return spot_utilisation(self._spans, self._all(), (0.0, now_s))

    def preemptions(self) -> int:
        return sum(life.reason == "lost" and life.pool == "spot" for life in self._all())

    def alive(self) -> dict[str, int]:
        """Workers alive now, by pool."""
        return dict(Counter(life.pool for life in self._lives if life.left_s is None))

    def first_image_s(self, began_s: float) -> float | None:
        """Seconds from ``began_s`` to the first finished request."""
        ends = [span.stop_s for span in self._spans if span.phase.startswith(("rollout", "explore", "validate"))]
        return min((end - began_s for end in ends if end >= began_s), default=None)

    def _all(self) -> list[WorkerLife]:
        return self._earlier + self._lives

    def _write_lives(self) -> None:
        with atomic_write(self._run.path / WORKERS) as file:
            file.write("".join(f"{dumps(asdict(life), sort_keys=True)}\n" for life in self._all()).encode())


def _ended(life: WorkerLife, now_s: float) -> WorkerLife:
    return life if life.left_s is not None else replace(life, left_s=max(now_s, life.joined_s), reason="end")


def _phase(span: Span) -> str:
    """Phases as people count them: scoring is scoring, whatever was scored."""
    if "score" in span.phase:
        return "score"
    return "explore" if span.phase.startswith("explore") else span.phase
