"""Computes what the page shows, from the dispatcher and from the driver's rows; knows neither Dask nor Bokeh.

What the scheduler sees (workers, gangs, spans, losses) comes from the dispatcher, here and now. What only the driver
knows comes as rows (`spotlight.report.feed`), of which the last with a kind and an id counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.journal import NumberedSpan
from cluster.dispatch.rules import Rules
from cluster.dispatch.snapshot import WorkerActivity
from spotlight.clock import Clock, wall_clock
from spotlight.records import WorkerLife, record

Row = Mapping[str, Any]
Lane = tuple[str, str]
"""``(pool, worker)``"""

ROWS_MAX = {"run": 1, "images": 1, "seeds": 1, "prompts": 2, "iteration": 5_000, "validation": 5_000}
"""Rows kept of each kind, those with the highest ids; other kinds are refused."""
MONEY = ("at_s", "usd", "usd_reserved_only", "ledger_s", "ledger_usd")
POINTS = 240
"""Most points of the curve of dollars; with more, every other is dropped."""


@record
class Money:
    """What was spent by a moment."""

    at_s: float
    usd: Mapping[str, float]
    """{pool: dollars}"""
    usd_reserved_only: float
    """Price of the useful work up to ``ledger_s`` at reserved prices."""
    ledger_s: float
    """The end of the last iteration."""
    ledger_usd: float
    """What all pools had cost by ``ledger_s``."""


@record
class Recovery:
    """A worker that was lost, or whose engine died, and how its work was resumed."""

    at_s: float
    worker: str
    what: str
    requests: int = 0
    """Requests that it was working on."""
    work_s: float | None = None
    """Seconds until the last of these took its next step elsewhere; None before that, or if there were none."""
    back_s: float | None = None
    """Seconds until a worker of the same name had joined, or another of its pool in its place."""


class Facts:
    """All that the page may show.

    Args:
        dispatch: returns the dispatcher of the live run, or None.
        clock: that of the dispatcher's events.
    """

    def __init__(self, dispatch: Callable[[], Dispatcher | None], clock: Clock = wall_clock) -> None:
        self._find, self._clock = dispatch, clock
        self._latest = NOTHING
        self._rows: dict[str, dict[int, Row]] = {}
        self._session = ""
        self.money: deque[Money] = deque()
        self._usd_per_h: dict[str, float] = {}
        self.changes: Counter[str] = Counter()
        """{kind of row but money: how many were new}; panels of a kind are redrawn when it changes."""

    @property
    def dispatch(self) -> Dispatcher:
        """The dispatcher of the live run, or of the last one; before any, one that knows nothing."""
        self._latest = self._find() or self._latest
        return self._latest

    @property
    def has_run(self) -> bool:
        """Whether there is a live run."""
        return self._find() is not None

    def clock(self) -> float:
        """The time now; once a run is over, when its driver was last heard of."""
        return self.money[-1].at_s if self.money and not self.has_run else self._clock()

    def take(self, rows: Iterable[Row]) -> None:
        """Add the driver's rows; of the same kind and id, the last counts.

        Another run, or another driver of the run, clears all rows first: its history may be shorter.
        """
        _ = self.dispatch  # so that it is known after the run, also where nobody looked
        for row in rows:
            if row["kind"] == "money":
                self._take_money(row)
                continue
            limit = ROWS_MAX[row["kind"]]
            if row["kind"] == "run" and row["session"] != self._session:
                self._session = row["session"]
                self.changes.update(list(self._rows))
                self._rows.clear()
                self.money.clear()
            of_kind = self._rows.setdefault(row["kind"], {})
            if of_kind.get(row["id"]) != row:
                self.changes[row["kind"]] += 1
            of_kind[row["id"]] = row
            for surplus in sorted(of_kind)[: max(0, len(of_kind) - limit)]:
                del of_kind[surplus]

    def _take_money(self, row: Row) -> None:
        self._usd_per_h = row.get("usd_per_h", {})
        now = Money(**{name: row[name] for name in MONEY})
        if self.money and now.at_s <= self.money[-1].at_s:
            return
        self.money.append(now)
        if len(self.money) > POINTS:
            self.money = deque(islice(self.money, 0, None, 2))

    # Of the driver

    def rows(self, kind: str) -> list[Row]:
        """Rows of a kind, by id."""
        found = self._rows.get(kind, {})
        return [found[number] for number in sorted(found)]

    def latest(self, kind: str) -> Row:
        """The row with the highest id; empty where there is none."""
        found = self._rows.get(kind)
        return found[max(found)] if found else {}

    def prices(self) -> dict[str, float]:
        """Dollars an hour of one worker now, by pool."""
        return dict(self._usd_per_h or self.latest("run").get("usd_per_h", {}))

    def usd_per_h(self) -> float:
        """Dollars an hour of all workers that are alive now."""
        prices = self.prices()
        return sum(prices.get(doing.pool, 0.0) for doing in self.doing())

    # Of the scheduler

    def doing(self) -> list[WorkerActivity]:
        """What workers do now; there are none once a run is over."""
        return self.dispatch.state.doing() if self.has_run else []

    def missing_pools(self) -> tuple[str, ...]:
        """Pools without a worker that work waits for."""
        return self.dispatch.state.missing_pools() if self.has_run else ()

    def lives(self) -> list[WorkerLife]:
        """The lives of all workers of this session; they end with the run."""
        lives = list(self.dispatch.state.journal.lives.values())
        if self.has_run:
            return lives
        end_s = self.clock()
        return [replace(life, left_s=max(end_s, life.joined_s)) if life.left_s is None else life for life in lives]

    def zero_s(self) -> float:
        """When the first worker of this session joined; now, before that."""
        lives = self.dispatch.state.journal.lives.values()
        return min((life.joined_s for life in lives), default=self.clock())

    def shown_after(self, number: int) -> list[NumberedSpan]:
        """Spans after the one of this number, oldest first, as far as they are still remembered."""
        shown = self.dispatch.state.journal.shown
        new = min(len(shown), shown[-1].number - number) if shown else 0
        return list(islice(reversed(shown), max(0, new)))[::-1]

    def recoveries(self) -> list[Recovery]:
        """Recoveries among the latest events, oldest first."""
        return recoveries(self.dispatch.state.journal.recent, {life.worker: life.pool for life in self.lives()})


NOTHING = Dispatcher(Rules(), logged=False)
"""Stands for the dispatcher where there is no live run."""


def lanes(lives: Iterable[WorkerLife], since_s: float) -> list[Lane]:
    """Workers that are alive, or were after a moment: reserved ones first, numbers in order."""
    found = {(life.pool, life.worker) for life in lives if life.left_s is None or life.left_s >= since_s}
    return sorted(found, key=lambda lane: (lane[0] != "reserved", lane[0], _numbered(lane[1])))


def _numbered(name: str) -> tuple[str, int, str]:
    """A sort key by which spot-2 comes before spot-10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0), name


def head_count(lives: Iterable[WorkerLife], pools: Sequence[str]) -> list[tuple[float, dict[str, int]]]:
    """``(from when, {pool: workers alive})``, one for each worker that joined or left."""
    steps = [(life.joined_s, life.pool, 1) for life in lives]
    steps += [(life.left_s, life.pool, -1) for life in lives if life.left_s is not None]
    counts, found = dict.fromkeys(pools, 0), []
    for at_s, pool, by in sorted(steps):
        counts[pool] = counts.get(pool, 0) + by
        found.append((at_s, dict(counts)))
    return found


WHAT = {
    "lost": "lost without a notice",
    "left": "left on notice",
    "hung": "hung, and was ended",
    "engine lost": "engine died",
}


def recoveries(events: Iterable[Row], pools: Mapping[str, str]) -> list[Recovery]:
    """How the run recovered from each loss among the events.

    A worker's loss comes before the requests that it broke; the next step of each of them, and the next worker of
    its name or pool, come later.

    Args:
        pools: of workers, by name.
    """
    found: list[Recovery] = []
    last: dict[str, int] = {}
    """{worker that is away: index of its latest loss}"""
    struck: dict[str, int] = {}
    """As ``last``, also for workers that are back."""
    broken: dict[str, int] = {}
    """{request that has not resumed yet: index of the loss that broke it}"""
    for event in events:
        kind, worker = event["event"], event.get("worker", "")
        if kind in WHAT and not (kind == "lost" and _is_told(found, struck.get(worker), "hung")):
            struck[worker] = len(found)
            if kind != "engine lost":
                last[worker] = len(found)
            found.append(Recovery(at_s=event["at_s"], worker=worker, what=WHAT[kind]))
            if kind == "engine lost" and event.get("gang"):
                broken[event["gang"]] = struck[worker]
                found[-1] = replace(found[-1], requests=1)
        elif kind in ("broken", "leaves") and event.get("lost") in struck:
            at = broken[event["gang"]] = struck[event["lost"]]
            found[at] = replace(found[at], requests=found[at].requests + 1)
        elif kind == "stepped" and event["gang"] in broken:
            at = broken.pop(event["gang"])
            found[at] = replace(found[at], work_s=event["at_s"] - found[at].at_s)
        elif kind == "joined":
            struck.pop(worker, None)
            away = [name for name in last if name == worker] or [name for name in last if _same(pools, name, worker)]
            if not away:
                continue
            at = last.pop(away[0])
            found[at] = replace(found[at], back_s=event["at_s"] - found[at].at_s)
    return found


def _same(pools: Mapping[str, str], one: str, other: str) -> bool:
    return one in pools and pools[one] == pools.get(other)


def _is_told(found: Sequence[Recovery], at: int | None, kind: str) -> bool:
    """Whether a worker's end is known already by its cause."""
    return at is not None and found[at].what == WHAT[kind]


def median_work_s(found: Iterable[Recovery]) -> float | None:
    known = [recovery.work_s for recovery in found if recovery.work_s is not None]
    return median(known) if known else None
