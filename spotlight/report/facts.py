"""Reads a run directory and computes what the report's pictures and tables show; draws nothing.

A run that stopped early gives fewer facts and a list of what is missing; only a directory that is no run, or a damaged
file, is an error. All times are seconds since the first recorded moment, without long stretches in which there was no
worker: a run that is resumed after a day is shown without the gap.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.market.ledger import Ledger, Price, absolute, busy_intervals, reserved_price, segments, stay
from spotlight.records import Interval, Pool, Quarantined, Span, WorkerLife, record
from spotlight.report.palette import PHASE_COLOURS, base_phase
from spotlight.store import resuming
from spotlight.store.accounts import pool_prices, read_lives, read_spans, run_ledger, samples_done
from spotlight.store.rows import HistoryRow, Summary, ValidationRow
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import validation_images

Lane = tuple[str, str]
"""``(pool, worker)``: a row of a timeline."""

ZOOM_MARGIN = 2
"""Iterations shown on either side of the one that a timeline zooms in on."""
MONEY_POINTS = 120
"""Points of a curve of dollars: one every 10 px of the page."""
COUNT_POINTS = 600
"""Stretches of time in which busy workers are counted: one every 2 px of the page."""
AWAY_S, AWAY_SHARE = 30.0, 0.1
"""A stretch without a worker is left out if it is longer than this, and than this share of the time with workers."""
LANES_MAX, SPANS_MAX = 64, 20_000
"""Rows and bars of a timeline: more cannot be told apart, and a browser takes long to draw them."""


COLUMNS = ["weights_version", "weights_sha256", "reward_mean", "reward_std", "zero_std_ratio", "samples"]
COLUMNS += ["seeds_scored", "wall_s", "rollout_s", "score_s", "train_s", "publish_s", "usd", "preemptions"]
"""Columns that the history of every run has."""


def history_frame(run: str | Path | RunDir) -> pd.DataFrame:
    """Metrics and measurements of every finished iteration, one column each, indexed by iteration.

    Before the first, it has the columns that every run has, and no row.

    Args:
        run: its directory or URL; or an opened `RunDir`, which spares checking the directory again.

    Raises:
        SpotlightError: the directory is not a run, or its history is damaged.
    """
    frame = _frame((run if isinstance(run, RunDir) else RunDir.open(run)).history())
    return frame if len(frame) else frame.reindex(columns=COLUMNS)


def _frame(history: Sequence[HistoryRow]) -> pd.DataFrame:
    rows = {}
    for row in history:
        what = {
            "iteration": row.iteration,
            "weights_version": row.weights_version,
            "weights_sha256": row.weights_sha256,
        }
        rows[row.iteration] = {**what, **row.metrics, **row.measured}
    frame = pd.DataFrame.from_records([rows[iteration] for iteration in sorted(rows)])
    return frame.set_index("iteration") if rows else pd.DataFrame(index=pd.Index([], name="iteration"))


@record
class Facts:
    """All that a run directory says, and a list of what is missing."""

    dir: Path
    settings: Config
    history: pd.DataFrame
    validation: list[ValidationRow]
    spans: list[Span]
    workers: list[WorkerLife]
    summary: Summary | None
    prices: dict[str, Price]
    """What a worker costs, by pool."""
    ledger: Ledger
    whole: Interval
    """From 0 to the last recorded moment."""
    breaks: list[tuple[float, float]]
    """``(when, seconds)`` of each long stretch without a worker; these seconds are left out of all times."""
    missing: list[str]
    quarantined: list[Quarantined]
    """Requests that nobody ran any more, with how many workers each had lost."""
    simulated: str
    """How a simulated run learns, "modelled" or "real"; empty for a live one."""
    strategy: str
    """The strategy that a simulated run was compared as; empty for a live one."""
    unscored: int
    """Iterations for which seeds were explored, and none was scored."""
    ended_early: str
    """Why it ended although iterations are left, in words; empty if it did not."""

    def is_crowded(self) -> bool:
        """Whether a timeline of every worker over the whole run would be too full to read."""
        return len(self.spans) > SPANS_MAX or len(self.lanes()) > LANES_MAX

    def closer(self) -> Facts:
        """Only what at most `LANES_MAX` workers did in the iterations of `zoom`, some of every pool, evenly chosen."""
        start_s, stop_s = self.zoom()
        part = replace(
            self,
            spans=[span for span in self.spans if span.start_s < stop_s and span.stop_s > start_s],
            workers=[
                life
                for life in self.workers
                if life.joined_s < stop_s and (life.left_s is None or life.left_s > start_s)
            ],
        )
        shown = set(_evenly(part.lanes()))
        return replace(
            part,
            spans=[span for span in part.spans if (span.pool, span.worker) in shown],
            workers=[life for life in part.workers if (life.pool, life.worker) in shown],
        )

    def time_axis(self) -> str:
        """Label of the time axis."""
        return "seconds since the first worker joined" + (", without the breaks (dotted)" if self.breaks else "")

    def lanes(self) -> list[Lane]:
        """Every worker, reserved ones first, then by name with numbers in order."""

        def order(lane: Lane) -> tuple[bool, str, list[tuple[int, str]]]:
            pool, worker = lane
            parts = re.findall(r"(\d+)|(\D+)", worker)
            return pool != "reserved", pool, [(int(number or 0), text) for number, text in parts]

        found = {(span.pool, span.worker) for span in self.spans} | {(life.pool, life.worker) for life in self.workers}
        return sorted(found, key=order)

    def by_phase(self) -> dict[str, list[Span]]:
        """The work of every phase that the run had, in the order of an iteration, unknown phases last."""
        found: defaultdict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[base_phase(span.phase)].append(span)
        names = (*PHASE_COLOURS, *sorted(found.keys() - PHASE_COLOURS.keys()))
        return {phase: found[phase] for phase in names if phase in found}

    def zoom(self) -> Interval:
        """A few iterations worth a closer look: around the first loss, else the middle; all of a short run."""
        last: dict[int, float] = {}
        for span in self.spans:
            if base_phase(span.phase) == "train":
                last[span.iteration] = max(span.stop_s, last.get(span.iteration, span.stop_s))
        ends = sorted(last.values())
        if len(ends) <= 2 * ZOOM_MARGIN + 1:
            return self.whole
        losses = [span.stop_s for span in self.spans if span.outcome == "lost"]
        middle = int(np.searchsorted(ends, losses[0])) if losses else len(ends) // 2
        at = max(ZOOM_MARGIN, min(middle, len(ends) - 1 - ZOOM_MARGIN))
        return ends[at - ZOOM_MARGIN], ends[at + ZOOM_MARGIN]

    def counts(self) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Moments, and how many workers were at every phase around each of them; "idle" are those without work."""
        edges_s = np.linspace(*self.whole, COUNT_POINTS + 1)

        def count(intervals: list[Interval]) -> NDArray[np.float64]:
            lasting = [interval for interval in intervals if interval[1] > interval[0]]
            seconds = _done_by(lasting, [stop_s - start_s for start_s, stop_s in lasting], edges_s)
            return np.asarray(np.diff(seconds) / np.diff(edges_s))

        counts = {
            phase: count([(span.start_s, span.stop_s) for span in spans]) for phase, spans in self.by_phase().items()
        }
        alive = count([interval for _, interval in self.alive()])
        return (edges_s[1:] + edges_s[:-1]) / 2, {**counts, "idle": np.maximum(alive - sum(counts.values()), 0.0)}

    def training(self) -> list[Interval]:
        """When at least one worker trained."""
        spans = [replace(span, worker="") for span in self.spans if base_phase(span.phase) == "train"]
        return busy_intervals(spans).get("", [])

    def alive(self) -> list[tuple[Lane, Interval]]:
        """From when to when there was a worker; to the end of the run where nobody saw it go."""
        return [
            ((life.pool, life.worker), (life.joined_s, self.whole[1] if life.left_s is None else life.left_s))
            for life in self.workers
        ]

    def departures(self) -> list[tuple[Lane, float]]:
        """Workers that were taken before the run's end, and when."""
        return [((life.pool, life.worker), left_s) for life, left_s in self._taken()]

    def losses(self) -> list[tuple[Lane, float]]:
        """Where and when a preemption struck: at the lost work where there was any, else as the worker went."""
        struck: dict[Lane, list[float]] = {}
        for span in self.spans:
            if span.outcome == "lost":
                struck.setdefault((span.pool, span.worker), []).append(span.stop_s)
        found = [(lane, at_s) for lane, times in struck.items() for at_s in times]
        for life, left_s in self._taken():
            lane = (life.pool, life.worker)  # of this life alone: names are used again
            if not any(life.joined_s <= at_s <= left_s for at_s in struck.get(lane, ())):
                found.append((lane, left_s))
        return found

    def _taken(self) -> Iterator[tuple[WorkerLife, float]]:
        """With when they went."""
        return ((life, life.left_s) for life in self.workers if life.left_s is not None and life.was_taken)

    def money(self) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]], NDArray[np.float64]]:
        """Times, the dollars spent by then in each pool, and the reserved-only price of the work by then."""
        at_s = np.linspace(*self.whole, MONEY_POINTS)
        pools = {pool: self._spent(pool, at_s) for pool in self._pools()}
        useful = [part for part in segments(self.spans, self.workers, self.whole) if part.kind == "useful"]
        usd = [reserved_price(self.prices, part.pool).usd(part.start_s, part.stop_s) for part in useful]
        return at_s, pools, _done_by([(part.start_s, part.stop_s) for part in useful], usd, at_s)

    def _spent(self, pool: str, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Dollars that a pool's workers had cost by each of these moments."""
        price = absolute(self.prices, self.workers)[pool]
        lives = [stay(life, self.whole) for life in self.workers if life.pool == pool]
        pieces = [piece for life in lives for piece in price.pieces(*life) if piece[1] > piece[0]]
        return _done_by(pieces, [price.usd(*piece) for piece in pieces], at_s)

    def _pools(self) -> list[str]:
        """Those that denoise or train, and others that had workers."""
        had = {life.pool for life in self.workers}
        return [pool for pool in self.prices if pool in had or pool in get_args(Pool)]

    def reward_band(self) -> pd.DataFrame | None:
        """Of trained samples, ``low`` and ``high``: a standard deviation around the mean, by version, if known."""
        reward, spread = self.curve("reward_mean"), self.curve("reward_std")
        if reward is None or spread is None:
            return None
        return pd.DataFrame({"low": reward - spread, "high": reward + spread}).dropna()

    def curve(self, name: str) -> pd.Series[float] | None:
        """A metric over iterations, where the run has it at all and it is a number."""
        if name not in self.history:
            return None
        values = pd.to_numeric(self.history[name], errors="coerce").replace([inf, -inf], nan).dropna()
        return values if len(values) else None

    def images(self, line: ValidationRow) -> tuple[NDArray[np.uint8], list[str]] | None:
        """Images (B, height, width, 3) and prompts of one validation; None where they cannot be read.

        Those of a modelled device show nothing.
        """
        path = (self.dir / line.images).resolve()
        if self.simulated == "modelled" or not path.is_file() or not path.is_relative_to(self.dir):
            return None
        return validation_images(path, len(line.rewards))


def _evenly(lanes: Sequence[Lane]) -> list[Lane]:
    """At most `LANES_MAX` of the lanes, of every pool in proportion, and at least one."""
    if len(lanes) <= LANES_MAX:
        return list(lanes)
    pools = [[lane for lane in lanes if lane[0] == pool] for pool in dict.fromkeys(pool for pool, _ in lanes)]
    chosen = []
    for pool in pools:
        count = 1 + (LANES_MAX - len(pools)) * len(pool) // len(lanes)
        chosen += [pool[index * len(pool) // count] for index in range(count)]
    return chosen


def _done_by(intervals: Sequence[Interval], amounts: Sequence[float], at_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cumulative amount done by each moment, if each interval does its amount at a constant rate."""
    starts_s, stops_s = np.array(intervals, dtype=np.float64).reshape(-1, 2).T
    rates = np.array(amounts) / (stops_s - starts_s)

    def ramps(begins_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of lines that are 0 until each of these moments and rise at the rates from then on."""
        order = np.argsort(begins_s)
        begun = np.searchsorted(begins_s[order], at_s)
        rate, offset = (
            np.concatenate([[0.0], np.cumsum(values[order])])[begun] for values in (rates, rates * begins_s)
        )
        return np.asarray(rate * at_s - offset)

    return ramps(starts_s) - ramps(stops_s)


def _away(lives: Sequence[Interval]) -> list[Interval]:
    """Stretches between the first and the last of these lives in which there is none, if they are long."""
    gaps, until_s, alive_s = [], -inf, 0.0
    for joined_s, left_s in sorted(lives):
        if -inf < until_s < joined_s:
            gaps.append((until_s, joined_s))
        alive_s += max(0.0, left_s - max(joined_s, until_s))
        until_s = max(until_s, left_s)
    return [(start_s, stop_s) for start_s, stop_s in gaps if stop_s - start_s > max(AWAY_S, AWAY_SHARE * alive_s)]


def read(run_dir: str | Path) -> Facts:
    """All facts of a run.

    Raises:
        SpotlightError: the directory is not a run, or one of its files is damaged.
    """
    run = RunDir.open(run_dir)
    history, validation = _frame(run.history()), run.validation()
    for line in validation[:1] + validation[-1:]:
        run.fetch(line.images)
    spans, workers = read_spans(run), read_lives(run)
    summary = run.summary()
    absent = {
        "history.jsonl: no iteration has finished, so there is no reward curve": not len(history),
        "validation.jsonl: nothing was validated, so there is no score and no image": not validation,
        "validation.jsonl: validated only once, so there is no score after training": len(validation) == 1,
        "spans.jsonl: no work was recorded, so there is no timeline": not spans,
        "workers.jsonl: no worker was recorded, so there are no dollars": not workers,
        "summary.json: the run has not ended; the numbers below are worked out from the other files": not summary,
    }
    moments_s = [
        *(moment for span in spans for moment in (span.start_s, span.stop_s)),
        *(moment for life in workers for moment in (life.joined_s, life.left_s) if moment is not None),
        *(line.at_s for line in validation),
    ]
    zero_s = min(moments_s, default=0.0)
    settings = run.config()
    last_s = max(moments_s, default=0.0)
    away = _away([(life.joined_s, last_s if life.left_s is None else life.left_s) for life in workers])

    def shown_s(at_s: float) -> float:
        """Never falls as its argument rises, however it is rounded."""
        left_out_s, least_s = 0.0, -inf
        for start_s, stop_s in away:
            if at_s <= start_s:
                break
            least_s = start_s - zero_s - left_out_s
            if at_s < stop_s:
                return least_s
            left_out_s += stop_s - start_s
        return max(least_s, at_s - zero_s - left_out_s)

    whole = (0.0, shown_s(last_s) if moments_s else 0.0)
    prices = {pool: price.at_times(shown_s) for pool, price in absolute(pool_prices(settings), workers).items()}
    spans = [replace(span, start_s=shown_s(span.start_s), stop_s=shown_s(span.stop_s)) for span in spans]
    workers = [
        replace(life, joined_s=shown_s(life.joined_s), left_s=None if life.left_s is None else shown_s(life.left_s))
        for life in workers
    ]
    return Facts(
        dir=run.path,
        settings=settings,
        history=history,
        validation=validation,
        spans=list(spans),
        workers=workers,
        summary=summary,
        prices=prices,
        ledger=run_ledger(settings, spans, workers, prices, whole, samples_done(run.history()), validation),
        whole=whole,
        breaks=[(shown_s(start_s), stop_s - start_s) for start_s, stop_s in away],
        missing=[text for text, is_absent in absent.items() if is_absent],
        quarantined=run.all_quarantined(),
        simulated=run.simulated,
        strategy=run.strategy,
        unscored=run.unscored(),
        ended_early=resuming.ended_early(run),
    )
