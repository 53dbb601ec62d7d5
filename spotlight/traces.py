"""Spot availability over time: reads public traces, cuts and stretches them, makes up new ones, hands out places.

Pure: the only thing it touches is the file that it is given. Nobody is alive before time 0; an
instance that is alive cannot be added, and one that is not cannot be removed.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spotlight.records import SpotlightError

SECONDS_PER_H = 3600.0
MS_PER_S = 1000.0
Kind = Literal["add", "remove"]
Switches = tuple[tuple[float, bool], ...]
"""When a place comes up (True) and goes down, ``(time_s, up)`` in order; it begins down.

Down and up at one moment is a loss that is replaced at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An instance came or went."""

    time_s: float
    instance: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Instances that went at one moment."""

    time_s: float
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a trace is like; a *loss event* is all losses of one moment, an *instance-hour* one instance for an hour."""

    hours: float
    most: int
    """Largest number alive at once."""
    mean_available: float
    """``instance-hours / hours``."""
    median_available: float
    """Half of the time there were this many or fewer."""
    losses: int
    loss_events: int
    losses_per_h: float
    losses_per_instance_h: float
    bulk_loss_share: float
    """Share of the losses that came in events of two or more."""
    collapse_share: float
    """Share of the loss events that left nobody alive."""
    zero_share: float
    """Share of the time with nobody alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Which instances of a pool were there, from time 0 to ``duration_s``.

    Raises:
        SpotlightError: the events are out of order, or contradict each other.
    """

    events: tuple[Event, ...]
    """In order of time; those of one moment in the order in which they happened."""
    duration_s: float

    def __post_init__(self) -> None:
        for _ in _checked(enumerate(self.events), "trace, event "):
            pass
        last_s = self.events[-1].time_s if self.events else 0.0
        if not (math.isfinite(self.duration_s) and self.duration_s > 0 and self.duration_s >= last_s):
            raise SpotlightError(
                f"trace: it lasts {self.duration_s:g} s, and its last event is at {last_s:g} s: "
                "it must last longer than 0 s and until its last event"
            )

    def steps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """How many are alive from when on: moments in s, beginning with 0, and counts, both of shape (M,)."""
        counts = {0.0: 0}
        alive = 0
        for event in self.events:
            alive += 1 if event.kind == "add" else -1
            counts[event.time_s] = alive
        return np.array(list(counts)), np.array(list(counts.values()))

    def available(self, t_s: float) -> int:
        """How many are alive at a moment, after what happens at that moment; for many moments take `steps`."""
        times_s, counts = self.steps()
        return int(counts[np.searchsorted(times_s, t_s, side="right") - 1]) if t_s >= 0 else 0

    def losses(self) -> tuple[Loss, ...]:
        """What was lost together, in order of time."""
        moments = groupby((event for event in self.events if event.kind == "remove"), key=lambda event: event.time_s)
        return tuple(Loss(time_s=time_s, instances=len(list(events))) for time_s, events in moments)

    def summary(self) -> Summary:
        """The trace in a few numbers."""
        times_s, counts = self.steps()
        lasting_s = np.diff(times_s, append=self.duration_s)
        instance_h = float(counts @ lasting_s) / SECONDS_PER_H
        by_count = np.argsort(counts, kind="stable")
        half = int(np.searchsorted(np.cumsum(lasting_s[by_count]), self.duration_s / 2))
        events = self.losses()
        losses = sum(event.instances for event in events)
        left = counts[np.searchsorted(times_s, [event.time_s for event in events])]
        hours = self.duration_s / SECONDS_PER_H
        return Summary(
            hours=hours,
            most=int(counts.max()),
            mean_available=instance_h / hours,
            median_available=float(counts[by_count][min(half, len(counts) - 1)]),
            losses=losses,
            loss_events=len(events),
            losses_per_h=losses / hours,
            losses_per_instance_h=losses / instance_h if instance_h else 0.0,
            bulk_loss_share=sum(event.instances for event in events if event.instances > 1) / max(1, losses),
            collapse_share=int((left == 0).sum()) / max(1, len(events)),
            zero_share=float(lasting_s[counts == 0].sum()) / self.duration_s,
        )

    def cut(self, start_s: float, stop_s: float) -> Trace:
        """The part after ``start_s``, up to and with ``stop_s``; who is alive at the start is there from time 0.

        Raises:
            SpotlightError: the part is empty or reaches beyond the trace.
        """
        if not 0 <= start_s < stop_s <= self.duration_s:
            raise SpotlightError(
                f"trace: there is no part from {start_s:g} to {stop_s:g} s: "
                f"choose one within 0 to {self.duration_s:g} s"
            )
        alive: dict[str, None] = {}
        for event in self.events:
            if event.time_s <= start_s:
                _follow(alive, event)
        there = [Event(time_s=0.0, instance=instance, kind="add") for instance in alive]
        later = [_at(event, event.time_s - start_s) for event in self.events if start_s < event.time_s <= stop_s]
        return Trace(events=(*there, *later), duration_s=stop_s - start_s)

    def stretch(self, factor: float) -> Trace:
        """The same in ``factor`` times the time; a speed-up of 60 is ``stretch(1 / 60)``.

        Raises:
            SpotlightError: the factor is not a positive number.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise SpotlightError(f"trace: cannot be stretched by {factor:g}: give a factor above 0")
        events = tuple(_at(event, event.time_s * factor) for event in self.events)
        return Trace(events=events, duration_s=self.duration_s * factor)

    def resample(self, step_s: float) -> Trace:
        """What somebody sees who looks every ``step_s``: changes between two looks appear together at the second.

        Who came and went between two looks is not seen. The last look is at the end or less than a step after it.

        Raises:
            SpotlightError: the step is not a positive number.
        """
        if not (math.isfinite(step_s) and step_s > 0):
            raise SpotlightError(f"trace: cannot be looked at every {step_s:g} s: give a step above 0")
        seen: list[Event] = []
        alive: dict[str, None] = {}
        for tick, events in groupby(self.events, key=lambda event: math.ceil(event.time_s / step_s)):
            before = dict(alive)
            for event in events:
                _follow(alive, event)
            seen += [Event(time_s=tick * step_s, instance=name, kind="remove") for name in before if name not in alive]
            seen += [Event(time_s=tick * step_s, instance=name, kind="add") for name in alive if name not in before]
        return Trace(events=tuple(seen), duration_s=math.ceil(self.duration_s / step_s) * step_s)

    def sample(self, fraction: float, *, seed: int) -> Trace:
        """A share of the instances, rounded, drawn without replacement; the same seed draws the same.

        Raises:
            SpotlightError: the fraction is outside [0, 1].
        """
        if not 0 <= fraction <= 1:
            raise SpotlightError(f"trace: cannot sample {fraction:g} of its instances: give a share between 0 and 1")
        instances = sorted({event.instance for event in self.events})
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(instances))
        kept = {instances[index] for index in order[: round(fraction * len(instances))]}
        return Trace(events=tuple(event for event in self.events if event.instance in kept), duration_s=self.duration_s)

    def limit(self, most: int) -> Trace:
        """The trace of a pool that takes at most so many instances; its instances are ``place-0``, ``place-1``, ...

        An instance that finds every place taken waits. A place whose instance is lost is lost with it; whoever waits
        takes a free place at that same moment. So ``min(most, available)`` are alive at any moment.
        """
        free, waiting, places = list(range(most)), dict[str, None](), dict[str, int]()
        limited: list[Event] = []
        for time_s, events in groupby(self.events, key=lambda event: event.time_s):
            for event in events:
                if event.kind == "remove" and event.instance in places:
                    heapq.heappush(free, place := places.pop(event.instance))
                    limited.append(Event(time_s=time_s, instance=f"place-{place}", kind="remove"))
                else:
                    _follow(waiting, event)
            while free and waiting:
                instance, place = next(iter(waiting)), heapq.heappop(free)
                del waiting[instance]
                places[instance] = place
                limited.append(Event(time_s=time_s, instance=f"place-{place}", kind="add"))
        return Trace(events=tuple(limited), duration_s=self.duration_s)

    def places(self, workers: int) -> tuple[Switches, ...]:
        """When each of so many places of a pool is up, as in `limit`: bulk losses take several places down at once.

        Where the trace has many more instances than there are places, somebody always waits, and whatever is lost is
        replaced at once; `sample` about as many instances first to see places stay empty.
        """
        switches: dict[str, list[tuple[float, bool]]] = {f"place-{place}": [] for place in range(workers)}
        for event in self.limit(workers).events:
            switches[event.instance].append((event.time_s, event.kind == "add"))
        return tuple(map(tuple, switches.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Climate:
    """How a synthetic pool loses and regains instances; all losses are correlated."""

    mean_share: float
    """Mean availability, as a share of the capacity."""
    losses_per_instance_h: float
    spread: float
    """Mean share of the instances that a shock takes; more of it, fewer and larger losses."""
    collapse: float
    """Probability that a shock takes every instance."""


BURSTY = Climate(mean_share=24.0 / 32, losses_per_instance_h=0.611, spread=0.047, collapse=0.0)
"""bamboo's p3 trace, 32 nodes: the spread gives its 167 / 79 = 2.1 losses per event."""
CALM = Climate(mean_share=57.3 / 64, losses_per_instance_h=0.0995, spread=0.058, collapse=0.0)
"""bamboo's A100 trace on GCP, 64 nodes: the spread gives its 154 / 36 = 4.3 losses per event."""
COLLAPSING = Climate(mean_share=0.431, losses_per_instance_h=0.541, spread=0.4, collapse=0.62)
"""SkyPilot's 16-node trace of us-west-2a: 1473 / 145 = 10.2 losses per event, 98 of the 145 events to zero."""


def synthesise(*, seed: int, capacity: int, duration_s: float, climate: Climate = BURSTY) -> Trace:
    """A made-up trace with correlated losses, whose means are the climate's.

    Shocks arrive at random (Poisson). One takes each instance that is alive with the same probability ``p``,
    drawn anew for each shock: 1 with probability ``collapse``, else from Beta(1, 1/spread - 1), whose mean is
    ``spread``. Capacity comes back in shocks of the same kind. With ``E[p] = collapse + (1 - collapse) spread``,
    ``r = losses_per_instance_h`` and ``a = mean_share``::

        loss shocks per hour   = r / E[p]
        return shocks per hour = r a / (1 - a) / E[p]

    so that in the long run an instance is lost ``r`` times per hour that it is alive, and ``a capacity`` are alive.
    It begins there. Losses per event grow with the capacity, as shocks take shares; the climates that this file
    names were fitted at the capacity of their source.

    Raises:
        SpotlightError: a share is outside what it can be, or nothing could ever be alive.

    Source: the common-shock model of Marshall and Olkin (1967), fitted by us to published traces.
    """
    a, r, spread, collapse = climate.mean_share, climate.losses_per_instance_h, climate.spread, climate.collapse
    if not (0 < a < 1 and r > 0 and 0 < spread < 1 and 0 <= collapse <= 1 and capacity > 0):
        raise SpotlightError(
            f"synthetic trace: mean_share and spread must be above 0 and below 1, collapse in [0, 1], "
            f"losses_per_instance_h and capacity above 0: capacity is {capacity}, {climate}"
        )
    rng = np.random.Generator(np.random.Philox(seed))
    taken = collapse + (1 - collapse) * spread
    losing_per_h, returning_per_h = r / taken, r * a / (1 - a) / taken
    alive = [f"node-{index}" for index in range(round(a * capacity))]
    born = len(alive)
    events = [Event(time_s=0.0, instance=instance, kind="add") for instance in alive]
    time_s = 0.0
    while (time_s := time_s + rng.exponential(SECONDS_PER_H / (losing_per_h + returning_per_h))) < duration_s:
        losing = rng.random() < losing_per_h / (losing_per_h + returning_per_h)
        p = 1.0 if rng.random() < collapse else rng.beta(1, 1 / spread - 1)
        if losing:
            hit = rng.random(len(alive)) < p
            gone = [instance for instance, lost in zip(alive, hit, strict=True) if lost]
            alive = [instance for instance, lost in zip(alive, hit, strict=True) if not lost]
            events += [Event(time_s=time_s, instance=instance, kind="remove") for instance in gone]
        else:
            back = int(rng.binomial(capacity - len(alive), p))
            new = [f"node-{index}" for index in range(born, born + back)]
            alive, born = alive + new, born + back
            events += [Event(time_s=time_s, instance=instance, kind="add") for instance in new]
    return Trace(events=tuple(events), duration_s=duration_s)


def read_trace(path: str | Path) -> Trace:
    """The trace in a file of any format that `parse_trace` knows.

    Raises:
        SpotlightError: the file is missing, is not UTF-8 text or is malformed; names line and reason.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise SpotlightError(f"{path}: cannot be read as a trace: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpotlightError(f"{path}: not a trace: byte {error.start} is not UTF-8 text") from None
    return parse_trace(text, where=str(path))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the event format, ``milliseconds,add|remove,instance``, times rounded to whole milliseconds.

    A trace that outlasts its last event gets a last line ``milliseconds,end,``, which `read_trace` knows.
    """
    lines = [f"{round(event.time_s * MS_PER_S)},{event.kind},{event.instance}\n" for event in trace.events]
    if not trace.events or trace.duration_s > trace.events[-1].time_s:
        lines.append(f"{round(trace.duration_s * MS_PER_S)},end,\n")
    Path(path).write_text("".join(lines), "utf-8")


def parse_trace(text: str, *, where: str) -> Trace:
    """The trace in a text; the first line tells which format it is.

    ============================================  ==========================================================
    ``0,add,node1``                               events: milliseconds, add or remove, instance (bamboo)
    ``60000,19``                                  counts: milliseconds, number alive from then on (Parcae)
    ``2021-12-11, 11:11:30, 55``                  counts: date, time, number alive (bamboo on GCP)
    ``{"metadata": {"gap_seconds": 300}, ...}``   counts: ``data``, one per gap (SkyPilot)
    ``[0, "add", {"nodes": [...], ...}]``         JSON lines: milliseconds, operation, instances and duration (Parcae)
    ============================================  ==========================================================

    Counts do not say which instances went: those that lived longest go first, so that losses spread over all.
    Lines of counts may be out of order, as published ones are, and are sorted by time.

    Args:
        where: the file's name, for errors.

    Raises:
        SpotlightError: a line is malformed or contradicts the ones before; names line and reason.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise SpotlightError(f"{where}: the trace is empty: give it one event or count a line")
    if lines[0][1].startswith("{"):
        return _gap_counts(text, where)
    if lines[0][1].startswith("["):
        return _json_lines(lines, where)
    rows = [(number, [field.strip() for field in line.split(",")]) for number, line in lines]
    dated = bool(re.match(r"\d{4}-", lines[0][1]))
    if len(rows[0][1]) == 3 and not dated:
        return _event_rows(rows, where)
    return _count_rows(rows, where, dated=dated)


def _event_rows(rows: Sequence[tuple[int, list[str]]], where: str) -> Trace:
    events: list[tuple[int, Event]] = []
    duration_s = 0.0
    for line, row in rows:
        match row:
            case [ms, "add" | "remove" as kind, instance]:
                duration_s = _seconds(ms, where, line)
                events.append((line, Event(time_s=duration_s, instance=instance, kind=kind)))
            case [ms, "end", ""] if line == rows[-1][0]:
                duration_s = _seconds(ms, where, line)
            case _:
                form = "milliseconds,add|remove,instance"
                raise SpotlightError(f"{where}:{line}: expected '{form}', not {','.join(row)!r}")
    return _trace(events, duration_s, where)


def _count_rows(rows: Sequence[tuple[int, list[str]]], where: str, *, dated: bool) -> Trace:
    counts: list[tuple[float, int]] = []
    for line, row in rows:
        match row:
            case [ms, count] if not dated:
                time_s = _seconds(ms, where, line)
            case [date, time, count] if dated:
                time_s = _moment_s(date, time, where, line)
            case _:
                form = "date, time, count" if dated else "milliseconds,count' or 'milliseconds,add|remove,instance"
                raise SpotlightError(f"{where}:{line}: expected '{form}', not {','.join(row)!r}")
        counts.append((time_s, _count(count, f"{where}:{line}")))
    counts.sort(key=lambda pair: pair[0])
    start_s = counts[0][0] if dated else 0.0
    return _from_counts([(time_s - start_s, count) for time_s, count in counts], counts[-1][0] - start_s, where)


def _gap_counts(text: str, where: str) -> Trace:
    try:
        value = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise SpotlightError(f"{where}:{line}: not JSON: {error}") from None
    try:
        gap_s, data = float(value["metadata"]["gap_seconds"]), list(value["data"])
        if not 0 < gap_s < math.inf:
            raise ValueError("no gap")
    except (KeyError, TypeError, ValueError, OverflowError):
        form = '{"metadata": {"gap_seconds": seconds above 0}, "data": [count, ...]}'
        raise SpotlightError(f"{where}:1: expected {form}") from None
    counts = [(index * gap_s, _count(count, f"{where}: data[{index}]")) for index, count in enumerate(data)]
    return _from_counts(counts, len(data) * gap_s, where)


def _json_lines(lines: Sequence[tuple[int, str]], where: str) -> Trace:
    events: list[tuple[int, Event]] = []
    duration_s = 0.0
    for line, content in lines:
        try:
            match json.loads(content):
                case [
                    float() | int() as ms,
                    "add" | "remove" | "migration" | "no-op" as operation,
                    {"nodes": [*instances], "duration": float() | int() as lasts},
                ]:
                    time_s, duration_s = ms / MS_PER_S, (ms + lasts) / MS_PER_S
                case _:
                    raise ValueError("another shape or operation")
        except (ValueError, OverflowError) as error:
            form = '[milliseconds, "add|remove|migration|no-op", {"nodes": [...], "duration": milliseconds}]'
            raise SpotlightError(f"{where}:{line}: expected {form}: {error}") from None
        if operation == "add" or operation == "remove":
            events += [(line, Event(time_s=time_s, instance=str(name), kind=operation)) for name in instances]
    return _trace(events, duration_s, where)


def _from_counts(counts: Iterable[tuple[float, int]], duration_s: float, where: str) -> Trace:
    """Instances for counts in order of time; names are used again, so that there are as many as were ever alive."""
    events: list[Event] = []
    alive: deque[int] = deque()
    free: list[int] = []
    for time_s, count in counts:
        while len(alive) > count:
            heapq.heappush(free, number := alive.popleft())
            events.append(Event(time_s=time_s, instance=f"node-{number}", kind="remove"))
        while len(alive) < count:
            alive.append(number := heapq.heappop(free) if free else len(alive))
            events.append(Event(time_s=time_s, instance=f"node-{number}", kind="add"))
    return _trace(enumerate(events), duration_s, where)


def _trace(numbered: Iterable[tuple[int, Event]], duration_s: float, where: str) -> Trace:
    events = tuple(_checked(numbered, f"{where}:"))
    try:
        return Trace(events=events, duration_s=duration_s)
    except SpotlightError as error:  # about how long it lasts; the events are fine
        raise SpotlightError(f"{where}: {error}") from None


def _checked(numbered: Iterable[tuple[int, Event]], where: str) -> Iterator[Event]:
    """Each event, once it is sure that it may follow those before it."""
    alive: dict[str, None] = {}
    last_s = 0.0
    for number, event in numbered:
        wrong = None
        if not re.fullmatch(r"[^\s,]+", event.instance):
            wrong = f"an instance cannot be called {event.instance!r}: no spaces, no commas"
        elif not (math.isfinite(event.time_s) and event.time_s >= last_s):
            wrong = f"its time is {event.time_s:g} s, and events are in order of time from {last_s:g} s on"
        elif (event.kind == "add") == (event.instance in alive):
            wrong = f"{event.instance} {'is there already' if event.kind == 'add' else 'is not there to be removed'}"
        if wrong:
            raise SpotlightError(f"{where}{number}: {wrong}")
        _follow(alive, event)
        last_s = event.time_s
        yield event


def _follow(alive: dict[str, None], event: Event) -> None:
    """Keep the set of who is there, in the order in which they came."""
    if event.kind == "add":
        alive[event.instance] = None
    else:
        del alive[event.instance]


def _at(event: Event, time_s: float) -> Event:
    return Event(time_s=time_s, instance=event.instance, kind=event.kind)


def _seconds(ms: str, where: str, line: int) -> float:
    if not re.fullmatch(r"\d{1,15}(\.\d*)?", ms, re.ASCII):
        raise SpotlightError(f"{where}:{line}: expected milliseconds from 0 on, not {ms!r}")
    return float(ms) / MS_PER_S


def _moment_s(date: str, time: str, where: str, line: int) -> float:
    try:
        if not re.fullmatch(r"[\d:]{8}", time, re.ASCII):
            raise ValueError("no time of day")
        return float(np.datetime64(f"{date}T{time}", "ms").astype(np.int64)) / MS_PER_S
    except ValueError:
        raise SpotlightError(f"{where}:{line}: expected 'YYYY-MM-DD, HH:MM:SS', not '{date}, {time}'") from None


def _count(value: Any, where: str) -> int:
    """A number of instances, as text or from JSON."""
    text = str(value)
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise SpotlightError(f"{where}: expected a number of instances, not {text!r}")
    return int(text)
