"""What all workers of a run did, and what that cost, over all of its sessions; kept on disk as the run goes on.

Memory holds the spans of the last iterations; earlier ones are summed up, so that it does not grow with a long run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from json import dumps
from math import inf, isfinite
from operator import attrgetter, itemgetter
from statistics import median
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

from spotlight.config import Config, PoolSection, PoolsSection
from spotlight.files import shown
from spotlight.market.ledger import (
    LATEST_S,
    ON_DEMAND,
    Entry,
    Ledger,
    Price,
    absolute,
    busy_intervals,
    ledger,
    overlap_s,
    pool_seconds,
    pool_usd,
    spot_utilisation,
    summed,
)
from spotlight.market.prices import read_prices
from spotlight.plan.balance import Balance, balance
from spotlight.records import Drained, Interval, Span, SpotlightError, WorkerLife, base_phase, row_of
from spotlight.store.lines import Growing
from spotlight.store.objects import atomic_write
from spotlight.store.rows import EVENTS, HISTORY, SPANS, WORKERS, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir

FOLD_SPANS = 2_000
"""Spans that are kept before old ones are summed up: half a megabyte."""
P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(method: Callable[Concatenate[Accounts, P], T]) -> Callable[Concatenate[Accounts, P], T]:
    """Of the methods of one object: the driver's thread adds to the accounts, while displays ask."""

    @wraps(method)
    def alone(self: Accounts, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


class Accounts:
    """Spans and worker lives of one run; times are Unix seconds. Any number of threads may use it.

    Args:
        watched: another process drives the run, so workers that have not left are alive.
        seen_s: when a driver that was killed was last seen; None: as its lease has it. Workers that have not left had
            it until then, or until the last span.
    """

    def __init__(self, run: RunDir, config: Config, *, watched: bool = False, seen_s: float | None = None) -> None:
        self._run, self._config = run, config
        self._lock = RLock()
        self._prices = pool_prices(config)
        self._spans: list[Span] = []
        self._latest_s: list[float] = []
        """For each span, the latest end of it and of all spans before it."""
        self._first_spot: dict[str, tuple[float, int]] = {}
        """{spot worker: (when its earliest span began, index of that span)}"""
        self._history = run.growing(HISTORY, HistoryRow)
        self._samples: dict[int, float] = {}
        """{finished iteration: samples that it kept}"""
        self._broken: dict[str, float] = {}
        self._recoveries: list[tuple[float, float]] = []
        self._pauses: list[tuple[float, float]] = []
        """(When the run went on, seconds lost) of each pause."""
        self._pause_measured: dict[int, float] = {}
        """{index of a pause: end of the time window whose measures include it}"""
        self._first_done_s: float | None = None
        self._span_lines, self._life_lines = run.growing(SPANS, Span), run.growing(WORKERS, WorkerLife)
        self._add_spans(new_spans(run, self._span_lines)[1])
        self.seen_s = _killed_s(run) if seen_s is None else seen_s
        self._lives: dict[int, WorkerLife] = {}
        """Workers of this session, by number."""
        self._earlier: list[WorkerLife] = []
        self._divide(new_lives(run, self._life_lines)[1], watched=watched)
        self._written_earlier = "".join(map(_line, self._earlier))
        self._written: dict[int, str] = {}
        """Their lines of the journal, by number."""
        self._ledger: Ledger | None = None
        self._ledger_s = 0.0
        self._folded_s = 0.0
        self._folded: tuple[Entry, ...] = ()
        self._folded_busy_s = 0.0  # of spot workers
        self._measured_s = 0.0
        self._measured: dict[Interval, dict[str, float]] = {}
        """{time window measured last: its measures}, until more is reported."""
        self.running: Mapping[str, int] = {}
        """Tasks in progress, by phase."""
        if watched:
            self._fold_watched()

    @_one_at_a_time
    def take(self, drained: Drained) -> None:
        """Add what the cluster reports: new spans, and lives of its workers that began or ended."""
        self._recoveries += recoveries(drained.events, self._broken)
        self._pauses += [(event["at_s"], event["lost_s"]) for event in drained.events if event["event"] == "paused"]
        if drained.events:
            self._run.append(EVENTS, *drained.events)
        self._add_spans(drained.spans)
        if drained.events or drained.spans:
            self._measured = {}
        if drained.spans:
            self._run.append(SPANS, *map(row_of, drained.spans))
        if drained.workers:
            self._lives |= drained.workers
            self._measured = {}
            self._write_lives(drained.workers)

    @_one_at_a_time
    def look(self) -> bool:
        """Read what is new of a watched run.

        Returns:
            Whether what was read before still holds: not if its journal of spans was replaced.

        Raises:
            SpotlightError: a line is damaged.
        """
        known = self._span_lines.lines
        first_span, spans = new_spans(self._run, self._span_lines)
        first_life, lives = new_lives(self._run, self._life_lines)
        if known and first_span == 1:
            return False
        self._add_spans(spans)
        if first_life == 1:
            self._divide(lives, watched=True)
        self._fold_watched()
        self._ledger = None
        return True

    def _fold_watched(self) -> None:
        """Sum up old spans as the driver does after each iteration, by when the last two finished ones began."""
        began_s = [row.measured.get("started_s", 0.0) for row in self._run.last(HISTORY, HistoryRow, 2)]
        if len(began_s) == 2:
            self._measured_s = began_s[0]
            self._fold(began_s[1])

    def _divide(self, lives: Sequence[WorkerLife], *, watched: bool) -> None:
        """Divide lives into those of this session and those that have ended."""
        last_s = max([self.seen_s, *self._latest_s[-1:]])
        self._lives = {at: life for at, life in enumerate(lives) if watched and life.left_s is None}
        self._earlier = [_ended(life, last_s) for at, life in enumerate(lives) if at not in self._lives]

    @_one_at_a_time
    def settle(self) -> None:
        """Write down until when workers of earlier sessions are paid for: what tells it of a killed one is lost with
        the next."""
        if self._earlier:
            self._write_lives({})

    @_one_at_a_time
    def check(self) -> None:
        """Check that the journals are there by which a run is paid for; not while it goes on.

        Raises:
            SpotlightError: iterations are finished, and no worker is recorded, or nothing that one did.
        """
        if self._run.count(HISTORY):
            for journal, rows in ((WORKERS, self._all()), (SPANS, self._spans)):
                if not rows:
                    raise SpotlightError(
                        f"{self._run.path / journal}: is missing or empty, and workers are paid for by it: restore it; "
                        "`spotlight report` does without"
                    )

    @_one_at_a_time
    def until_s(self, now_s: float) -> float:
        """Now; where no worker is alive, the latest moment on record if this machine's clock is behind it."""
        if self.alive():
            return now_s
        return max([now_s, *self._latest_s[-1:], *(life.left_s or 0.0 for life in self._all())])

    @_one_at_a_time
    def close(self, now_s: float) -> None:
        """End the session, and with it the lives of workers that are still alive."""
        self._lives, self._measured = {at: _ended(life, now_s) for at, life in self._lives.items()}, {}
        self.running = {}
        self._write_lives(self._lives)
        self._ledger = None

    @_one_at_a_time
    def measure(self, start_s: float, stop_s: float) -> dict[str, float]:
        """What is measured of a time window: seconds by phase and by worker, dollars, lost workers, recoveries."""
        window = (start_s, stop_s)
        if window not in self._measured:  # an iteration's is asked for twice
            self._measured = {window: self._measure(window)}
        self._ledger = None
        self._fold(start_s)
        return self._measured[window]

    def _measure(self, window: Interval) -> dict[str, float]:
        start_s, stop_s = window
        spans, workers = self._since(start_s), self._all()
        by_phase: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            by_phase[_phase(span)] += overlap_s(span.start_s, span.stop_s, window)
        busy = {life.worker: 0.0 for life in workers if _was_alive(life, window)}
        for worker, intervals in busy_intervals(spans).items():
            if busy_s := sum(overlap_s(*interval, window) for interval in intervals):
                busy[worker] = busy_s
        taken = [life for life in workers if life.was_taken and start_s < (life.left_s or 0) <= stop_s]
        preempted = [life for life in taken if life.pool == "spot"]
        recoveries_s = [r for at_s, r in self._recoveries if start_s < at_s <= stop_s]
        lost_s = self._paused_s(stop_s)
        firsts = [self._spans[index] for _, index in sorted(self._first_spot.values(), key=itemgetter(1))]
        return {
            "wall_s": stop_s - start_s,
            **{f"{phase}_s": seconds for phase, seconds in by_phase.items() if seconds},
            **{f"busy_s.{worker}": seconds for worker, seconds in busy.items()},
            "usd": sum(self.usd_by_pool(stop_s, start_s).values()),
            "spot_utilisation": spot_utilisation([*firsts, *spans], workers, window),  # adds up in the same order
            "preemptions": float(len(preempted)),
            **({"others_lost": float(len(taken) - len(preempted))} if len(taken) > len(preempted) else {}),
            "gangs_broken": float(len(recoveries_s)),
            **({"recovery_s": median(recoveries_s)} if recoveries_s else {}),
            **({"paused_s": lost_s} if lost_s else {}),
        }

    def _paused_s(self, stop_s: float) -> float:
        """Seconds lost in pauses that no earlier window includes: some are known only after their iteration."""
        for at, (at_s, _) in enumerate(self._pauses):
            if at_s <= stop_s:
                self._pause_measured.setdefault(at, stop_s)
        return sum(lost_s for at, (_, lost_s) in enumerate(self._pauses) if self._pause_measured.get(at) == stop_s)

    @_one_at_a_time
    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        """How reserved and spot workers shared an iteration."""
        return balance(self._since(began_s), self._all(), iteration, began_s=began_s, window_s=window_s)

    @_one_at_a_time
    def usd_by_pool(self, now_s: float, since_s: float = 0.0) -> dict[str, float]:
        """Price of each pool's seconds, idle or not, up to ``now_s``."""
        return pool_usd(self._all(), self._prices, (since_s, now_s))

    @_one_at_a_time
    def money(self, now_s: float) -> dict[str, Any]:
        """What was spent, and what a worker of each pool costs an hour now, for the page on the dashboard."""
        ledger = self.ledger(now_s)
        prices = absolute(self._prices, self._all())
        return {
            "at_s": now_s,
            "usd": self.usd_by_pool(now_s),
            "usd_reserved_only": ledger.usd_reserved_only,
            "ledger_s": self._ledger_s,
            "ledger_usd": ledger.usd(),
            "usd_per_h": {name: prices[name].at(now_s) for name, _ in self._config.pools},
        }

    @_one_at_a_time
    def ledger(self, now_s: float) -> Ledger:
        """Where seconds and dollars went, as computed last: after each iteration, and at the run's end.

        Computing it takes some microseconds a span, too long for each look at a long run.
        """
        if self._ledger is None:
            self._ledger_s = now_s
            run, window = self._run, (self._folded_s, max(self._folded_s, now_s))
            recent = run_ledger(
                self._config, self._spans, self._all(), self._prices, window, self._samples_done(), run.validation()
            )
            self._ledger = replace(recent, entries=summed((*self._folded, *recent.entries)))
        return self._ledger

    def _samples_done(self) -> Mapping[int, float]:
        """As `samples_done`; only new rows of the history are read."""
        first, rows = self._history.new()
        self._samples = ({} if first == 1 else self._samples) | samples_done(rows)
        return self._samples

    @_one_at_a_time
    def spot_utilisation(self, now_s: float) -> float:
        alive_s = pool_seconds(self._all(), (0.0, now_s)).get("spot", 0.0)
        return min(1.0, (self._folded_busy_s + self._busy_s((self._folded_s, now_s))) / alive_s) if alive_s else 0.0

    def _busy_s(self, window: Interval) -> float:
        """Seconds that spot workers were busy."""
        share = spot_utilisation(self._spans, self._all(), window)
        return share * pool_seconds(self._all(), window).get("spot", 0.0)

    def _fold(self, start_s: float) -> None:
        """Sum up the spans from before the previous iteration, and forget them.

        Of a span that is reported later than that, only seconds after the fold count. Each worker's first span stays:
        it separates start-up from idle time.
        """
        until_s, self._measured_s = self._measured_s, start_s
        if len(self._spans) <= FOLD_SPANS or until_s <= self._folded_s:
            return
        window = (self._folded_s, until_s)
        old = run_ledger(self._config, self._spans, self._all(), self._prices, window, {}, ())
        self._folded = summed((*self._folded, *old.entries))
        self._folded_busy_s += self._busy_s(window)
        self._folded_s = until_s
        joined: dict[str, list[float]] = {}
        for life in sorted(self._all(), key=attrgetter("joined_s")):
            if life.left_s is None or life.left_s > until_s:
                joined.setdefault(life.worker, []).append(life.joined_s)
        first: dict[tuple[str, int], Span] = {}
        for span in self._spans:
            life_at = bisect_right(joined.get(span.worker, ()), span.start_s) - 1  # names are used again
            known = first.get((span.worker, life_at))
            if life_at >= 0 and (known is None or span.start_s < known.start_s):
                first[span.worker, life_at] = span
        kept = {id(span) for span in first.values()}
        spans = [span for span in self._spans if span.stop_s > until_s or id(span) in kept]
        self._spans, self._latest_s, self._first_spot = [], [], {}
        self._add_spans(spans)
        self._recoveries = [(at_s, lasted_s) for at_s, lasted_s in self._recoveries if at_s > until_s]

    @_one_at_a_time
    def preemptions(self) -> int:
        return sum(life.pool == "spot" and life.was_taken for life in self._all())

    @_one_at_a_time
    def lives(self) -> list[WorkerLife]:
        """The lives of all workers, over all sessions."""
        return self._all()

    @_one_at_a_time
    def alive(self) -> dict[str, int]:
        """Workers alive now, by pool."""
        return dict(Counter(life.pool for life in self._lives.values() if life.left_s is None))

    @_one_at_a_time
    def worked_s(self, until_s: float) -> float:
        """Seconds of earlier sessions, before ``until_s``, in which there was any worker."""
        return alive_s(self._earlier, until_s)

    @_one_at_a_time
    def first_image_s(self, began_s: float) -> float | None:
        """Seconds from ``began_s``, the run's start, to the first finished request.

        None if none has finished, or after an earlier session, whose start-up time is unknown.
        """
        if self._earlier:
            return None
        ends = [span.stop_s for span in self._spans if _makes_images(span)]
        if self._first_done_s is not None:
            ends.append(self._first_done_s)
        return min((end - began_s for end in ends if end >= began_s), default=None)

    def _add_spans(self, spans: Sequence[Span]) -> None:
        latest_s = self._latest_s[-1] if self._latest_s else -inf
        for index, span in enumerate(spans, len(self._spans)):
            latest_s = max(latest_s, span.stop_s)
            self._latest_s.append(latest_s)
            if span.pool == "spot":
                known = self._first_spot.get(span.worker)
                if known is None or span.start_s < known[0]:
                    self._first_spot[span.worker] = (span.start_s, index)
        self._spans += spans
        if self._first_done_s is None:
            self._first_done_s = min((span.stop_s for span in spans if _makes_images(span)), default=None)

    def _since(self, at_s: float) -> list[Span]:
        """All spans but the leading ones that ended before ``at_s``."""
        return self._spans[bisect_left(self._latest_s, at_s) :]

    def _all(self) -> list[WorkerLife]:
        return [*self._earlier, *self._lives.values()]

    def _write_lives(self, changed: Mapping[int, WorkerLife]) -> None:
        self._written |= {at: _line(life) for at, life in changed.items()}
        with atomic_write(self._run.path / WORKERS) as file:
            file.write("".join((self._written_earlier, *self._written.values())).encode())


def _line(life: WorkerLife) -> str:
    return f"{dumps(row_of(life), sort_keys=True)}\n"


def _was_alive(life: WorkerLife, window: Interval) -> bool:
    return life.joined_s < window[1] and (life.left_s is None or life.left_s > window[0])


def alive_s(lives: Iterable[WorkerLife], until_s: float) -> float:
    """Seconds before ``until_s`` in which there was any worker, so without pauses between a run's sessions."""
    total_s = reached_s = 0.0
    for life in sorted(lives, key=attrgetter("joined_s")):
        stop_s = min(until_s, until_s if life.left_s is None else life.left_s)
        total_s += max(0.0, stop_s - max(life.joined_s, reached_s))
        reached_s = max(reached_s, stop_s)
    return total_s


def read_spans(run: RunDir) -> list[Span]:
    """What workers did, over all sessions.

    Raises:
        SpotlightError: a line is damaged.
    """
    return new_spans(run, run.growing(SPANS, Span))[1]


def new_spans(run: RunDir, journal: Growing[Span]) -> tuple[int, list[Span]]:
    """As `Growing.new`, of spans.

    Raises:
        SpotlightError: a line is damaged.
    """
    first, spans = journal.new()
    _check_rows(run, SPANS, first, spans, "start_s", "stop_s", "uncommitted_s", "redone_s")
    return first, spans


def read_lives(run: RunDir) -> list[WorkerLife]:
    """When workers came and went, over all sessions.

    Raises:
        SpotlightError: a line is damaged.
    """
    return new_lives(run, run.growing(WORKERS, WorkerLife))[1]


def new_lives(run: RunDir, journal: Growing[WorkerLife]) -> tuple[int, list[WorkerLife]]:
    """As `Growing.new`, of workers' lives.

    Raises:
        SpotlightError: a line is damaged.
    """
    first, lives = journal.new()
    _check_rows(run, WORKERS, first, lives, "joined_s", "left_s")
    return first, lives


def _check_rows(run: RunDir, journal: str, first: int, rows: Sequence[Span | WorkerLife], *moments: str) -> None:
    """Refuse times that no clock shows, and pools that do not exist."""
    for number, row in enumerate(rows, first):
        wrong = [name for name in moments if not 0 <= (getattr(row, name) or 0.0) <= LATEST_S]
        found = [f"{name}: expected seconds from 0 to {LATEST_S:.0e}, found {getattr(row, name)}" for name in wrong]
        if row.pool not in PoolsSection.model_fields:
            found.append(f"pool: expected one of {tuple(PoolsSection.model_fields)}, found {shown(row.pool)}")
        if found:
            raise SpotlightError(
                f"{run.path / journal}:{number}: {'; '.join(found)}; restore the file or delete the line"
            )


def pool_prices(config: Config) -> dict[str, Price]:
    """What a worker of each pool costs, from the file of prices where one is named; see `Prices`.

    Raises:
        SpotlightError: that file is not usable.
    """
    prices = {name: _price(config, f"pools.{name}.prices", pool) for name, pool in config.pools}
    if config.reserved_differs:
        prices[ON_DEMAND] = Price.constant(config.on_demand_usd_per_h)
    return prices


def _price(config: Config, setting: str, pool: PoolSection) -> Price:
    """A pool's price over the run's own clock, whose second may stand for several (``pace.speedup``)."""
    if not pool.prices:
        return Price.constant(pool.usd_per_h)
    price, scale = read_prices(pool.prices), config.emulated_per_real_s
    if scale == 1.0 or len(price.times_s) == 1:
        return price
    if not price.since_start:
        raise SpotlightError(
            f"{setting} = {pool.prices!r}: its times are those of a calendar, and this run's clock is {scale:g} times "
            "as fast: give since_start_s instead of time, or set pace.speedup = 1"
        )
    return replace(price, times_s=tuple(at_s / scale for at_s in price.times_s))


def run_ledger(
    config: Config,
    spans: Sequence[Span],
    workers: Sequence[WorkerLife],
    prices: Mapping[str, Price],
    window: Interval,
    done: Mapping[int, float],
    validation: Sequence[ValidationRow],
) -> Ledger:
    """The ledger of a run, with what it bought.

    Args:
        done: as `samples_done` has it.
    """
    return ledger(
        spans,
        workers,
        prices,
        window,
        iterations=len(done),
        samples=int(sum(done.values())),
        scores=[row.score for row in validation],
    )


def samples_done(history: Iterable[HistoryRow]) -> dict[int, float]:
    """How many samples each finished iteration kept; one that was run again counts once."""
    counts = {row.iteration: row.metrics.get("samples", 0.0) for row in history}
    return {iteration: count if isfinite(count) else 0.0 for iteration, count in counts.items()}


def recoveries(
    events: Iterable[Mapping[str, Any]], broken: dict[str, float] | None = None
) -> Iterator[tuple[float, float]]:
    """``(when it broke, seconds until its next committed step)`` of each gang that lost a member and went on.

    Args:
        broken: when gangs broke that did not go on before these events; it is brought up to date.
    """
    broken = {} if broken is None else broken
    for event in events:
        if event["event"] == "broken":
            broken.setdefault(event["gang"], event["at_s"])
        elif event["event"] == "stepped" and event["gang"] in broken:
            at_s = broken.pop(event["gang"])
            yield at_s, event["at_s"] - at_s


def _makes_images(span: Span) -> bool:
    return span.phase.startswith(("rollout", "explore", "validate"))


def _killed_s(run: RunDir) -> float:
    """When a run's driver that was killed was last seen; 0 if the last one ended in order."""
    last = run.last_holder()
    return last.seen_s if last and not last.released else 0.0


def _ended(life: WorkerLife, now_s: float) -> WorkerLife:
    return life if life.left_s is not None else replace(life, left_s=max(now_s, life.joined_s), reason="end")


def _phase(span: Span) -> str:
    """The phase under which a span is reported: all scoring is one phase, whatever was scored."""
    phase = base_phase(span.phase)
    return "score" if phase == "explore-score" else phase
