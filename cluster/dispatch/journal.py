"""What happened to workers, gangs and tasks, kept until the driver fetches it for the run directory; decides nothing.

Times are those of the dispatcher's events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from cluster.dispatch.events import Key
from cluster.dispatch.request_state import RequestState
from spotlight.records import Drained, Span, WorkerLife, record

SHOWN, RECENT = 4_000, 500
"""Spans and events that a display may look back at: some minutes of a hundred workers, in 2 MB."""


@record
class NumberedSpan:
    """A span for a display."""

    number: int
    """Counts all spans of the run from 1: a display asks for those after the last that it has."""
    span: Span
    forming: str
    """Name of the gang that it was a part of, the same for all members; empty for a worker alone."""


@record
class Label:
    """What the annotations say of a task."""

    pool: str
    phase: str
    iteration: int


class Journal:
    """Lives of workers, spans of work and events, in the order in which they came."""

    def __init__(self) -> None:
        self.lives: dict[str, WorkerLife] = {}
        """All workers that there were, by address; an earlier one at the same address, by address and time."""
        self.spans: list[Span] = []
        """Spans since the last `drain`; so are the events."""
        self.events: list[dict[str, Any]] = []
        self.shown: deque[NumberedSpan] = deque(maxlen=SHOWN)
        """The latest spans; a `drain` leaves them, as it does `recent`."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        """The latest events."""
        self._numbered = 0
        self._numbers: dict[str, int] = {}
        """{address: number of the life}"""
        self._changed: dict[int, WorkerLife] = {}
        """{number: life} of those that changed since the last `drain`."""

    def joined(self, at_s: float, address: str, worker: str, pool: str) -> None:
        if address in self.lives:  # of one that is gone
            self.lives[f"{address} until {at_s}"] = self.lives.pop(address)
        self._numbers[address] = len(self.lives)
        life = self.lives[address] = WorkerLife(worker=worker, pool=pool, joined_s=at_s, left_s=None, reason="")
        self._changed[self._numbers[address]] = life
        self.event(at_s, "joined", worker=worker)

    def left(self, at_s: float, address: str, reason: str) -> None:
        life = self.lives[address] = replace(self.lives[address], left_s=at_s, reason=reason)
        self._changed[self._numbers[address]] = life
        self.event(at_s, reason, worker=life.worker)

    def event(self, at_s: float, event: str, *, request: RequestState | None = None, **facts: Any) -> None:
        row: dict[str, Any] = {"at_s": at_s, "event": event, **facts}
        if request:
            row |= {"gang": request.name, "epoch": request.epoch, "width": request.width, "step": request.step}
            row["workers"] = list(request.workers)
        self.events.append(row)
        self.recent.append(row)

    def gang_event(self, at_s: float, event: str, request: RequestState) -> None:
        """Note what happened to a gang; a single worker that starts a fresh request is left out."""
        if request.epoch > 1 or request.width > 1:
            self.event(at_s, event, request=request)

    def span(
        self,
        key: Key,
        label: Label,
        request: RequestState | None,
        address: str,
        start_s: float,
        stop_s: float,
        outcome: str,
    ) -> None:
        """Note that a worker was at work on a task; workers that never joined are left out."""
        life = self.lives.get(address)
        if life is None:
            return
        uncommitted_s, redone_s = request.waste(start_s, stop_s) if request else (None, 0.0)
        span = Span(
            worker=life.worker,
            pool=life.pool,
            phase=label.phase,
            iteration=label.iteration,
            key=str(key),
            start_s=start_s,
            stop_s=stop_s,
            outcome=outcome,
            uncommitted_s=uncommitted_s,
            redone_s=redone_s,
        )
        self.spans.append(span)
        self._numbered += 1
        self.shown.append(NumberedSpan(number=self._numbered, span=span, forming=request.forming if request else ""))

    def drain(self) -> Drained:
        """The spans and events since the last call, and the lives that began or ended since then."""
        spans, self.spans = self.spans, []
        events, self.events = self.events, []
        changed, self._changed = self._changed, {}
        return Drained(spans=spans, workers=changed, events=events)
