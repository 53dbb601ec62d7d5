"""Reads spot traces in the formats that they are published in, and writes one of them.

Pure, but for the file that it is given: the first line tells the format, and a malformed line is named.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spotlight.files import read_bytes, shown
from spotlight.market.traces import Event, Trace, checked_events
from spotlight.records import SpotlightError

MS_PER_S = 1000.0


def read_trace(path: str | Path) -> Trace:
    """The trace in a file of any format that `parse_trace` knows.

    Raises:
        SpotlightError: the file is missing, is not UTF-8 text or is malformed; names line and reason.
    """
    try:
        text = read_bytes(path, "a trace").decode("utf-8-sig")
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
                raise SpotlightError(f"{where}:{line}: expected '{form}', not {shown(','.join(row))}")
    return _trace(events, duration_s, where, "; a last line such as '3600000,end,' says how long")


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
                raise SpotlightError(f"{where}:{line}: expected '{form}', not {shown(','.join(row))}")
        counts.append((time_s, _count(count, f"{where}:{line}")))
    counts.sort(key=lambda pair: pair[0])
    start_s = counts[0][0] if dated else 0.0
    way_out = "; a second line, with a later time, says how long"
    from_start = [(time_s - start_s, count) for time_s, count in counts]
    return _from_counts(from_start, counts[-1][0] - start_s, where, way_out)


def _gap_counts(text: str, where: str) -> Trace:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise SpotlightError(f"{where}:{line}: not JSON: {error}") from None
    try:
        gap_s, data = float(value["metadata"]["gap_seconds"]), value["data"]
        if not (0 < gap_s < math.inf and isinstance(data, list) and data):
            raise ValueError("no gap, or no counts")
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
        except (ValueError, OverflowError, RecursionError) as error:
            form = '[milliseconds, "add|remove|migration|no-op", {"nodes": [...], "duration": milliseconds}]'
            raise SpotlightError(f"{where}:{line}: expected {form}: {error}") from None
        if operation == "add" or operation == "remove":
            events += [(line, Event(time_s=time_s, instance=str(name), kind=operation)) for name in instances]
    return _trace(events, duration_s, where)


def _from_counts(counts: Iterable[tuple[float, int]], duration_s: float, where: str, way_out: str = "") -> Trace:
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
    return _trace(enumerate(events), duration_s, where, way_out)


def _trace(numbered: Iterable[tuple[int, Event]], duration_s: float, where: str, way_out: str = "") -> Trace:
    events = tuple(checked_events(numbered, f"{where}:"))
    try:
        return Trace(events=events, duration_s=duration_s)
    except SpotlightError as error:  # about how long it lasts; the events are fine
        raise SpotlightError(f"{where}: {error}{way_out}") from None


def _seconds(ms: str, where: str, line: int) -> float:
    if not re.fullmatch(r"\d{1,15}(\.\d*)?", ms, re.ASCII):
        raise SpotlightError(f"{where}:{line}: expected milliseconds from 0 on, not {shown(ms)}")
    return float(ms) / MS_PER_S


def _moment_s(date: str, time: str, where: str, line: int) -> float:
    try:
        if not re.fullmatch(r"[\d:]{8}", time, re.ASCII):
            raise ValueError("no time of day")
        return float(np.datetime64(f"{date}T{time}", "ms").astype(np.int64)) / MS_PER_S
    except ValueError:
        raise SpotlightError(
            f"{where}:{line}: expected 'YYYY-MM-DD, HH:MM:SS', not {shown(f'{date}, {time}')}"
        ) from None


def _count(value: Any, where: str) -> int:
    """A number of instances, as text or from JSON."""
    text = str(value)
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise SpotlightError(f"{where}: expected a number of instances, not {shown(text)}")
    return int(text)
