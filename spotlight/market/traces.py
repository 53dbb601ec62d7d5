"""Spot availability over time: reads off a trace, cuts, stretches and samples it, and assigns its instances to places.

Pure. Nobody is alive before time 0; an instance that is alive cannot be added, and one that is not cannot be removed.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spotlight.records import SpotlightError, record

SECONDS_PER_H = 3600.0
Kind = Literal["add", "remove"]
Switches = tuple[tuple[float, bool], ...]
"""``(time_s, up)`` in order: when a place comes up (True) or goes down. It begins down.

Down and up at the same time is a loss that is replaced at once."""


@record
class Event:
    """An instance came or went."""

    time_s: float
    instance: str
    kind: Kind


@record
class Loss:
    """Instances lost at one moment."""

    time_s: float
    instances: int


@record
class Summary:
    """What a trace is like; a *loss event* is all losses of one moment, an *instance-hour* one instance for an hour."""

    hours: float
    max_available: int
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


@record
class Trace:
    """Which instances of a pool were there, from time 0 to ``duration_s``.

    Raises:
        SpotlightError: the events are out of order, or contradict each other.
    """

    events: tuple[Event, ...]
    """In order of time; those of one moment in the order in which they happened."""
    duration_s: float

    def __post_init__(self) -> None:
        for _ in checked_events(enumerate(self.events), "trace, event "):
            pass
        last_s = self.events[-1].time_s if self.events else 0.0
        if not (math.isfinite(self.duration_s) and self.duration_s > 0 and self.duration_s >= last_s):
            raise SpotlightError(
                f"trace: it lasts {self.duration_s:g} s, and its last event is at {last_s:g} s: "
                "it must last longer than 0 s and until its last event"
            )

    def steps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Times in seconds, beginning with 0, and how many are alive from each on, both of shape (M,)."""
        counts = {0.0: 0}
        alive = 0
        for event in self.events:
            alive += 1 if event.kind == "add" else -1
            counts[event.time_s] = alive
        return np.array(list(counts)), np.array(list(counts.values()))

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
            max_available=int(counts.max()),
            mean_available=instance_h / hours,
            median_available=float(counts[by_count][half]),
            losses=losses,
            loss_events=len(events),
            losses_per_h=losses / hours,
            losses_per_instance_h=losses / instance_h if instance_h else 0.0,
            bulk_loss_share=sum(event.instances for event in events if event.instances > 1) / max(1, losses),
            collapse_share=int((left == 0).sum()) / max(1, len(events)),
            zero_share=float(lasting_s[counts == 0].sum()) / self.duration_s,
        )

    def cut(self, start_s: float, stop_s: float) -> Trace:
        """The part after ``start_s``, up to and with ``stop_s``; instances alive at the start are there from time 0.

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
        """The same trace, ``factor`` times as long; a speed-up of 60 is ``stretch(1 / 60)``.

        Raises:
            SpotlightError: the factor is not a positive number.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise SpotlightError(f"trace: cannot be stretched by {factor:g}: give a factor above 0")
        events = tuple(_at(event, event.time_s * factor) for event in self.events)
        return Trace(events=events, duration_s=self.duration_s * factor)

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

    def limit(self, capacity: int) -> Trace:
        """The trace of a pool that takes ``capacity`` instances at most; they are named ``place-0``, ``place-1``, ...

        An instance that finds every place taken waits. A place is lost with its instance; an instance that waits
        takes a free place at the same moment. So as many are alive as in this trace, but ``capacity`` at most.
        """
        free, waiting, places = list(range(capacity)), dict[str, None](), dict[str, int]()
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
        """When each of ``workers`` places of a pool is up, as in `limit`: bulk losses take several places down at once.

        Where the trace has many more instances than there are places, an instance always waits, and whatever is lost is
        replaced at once; `sample` about as many instances first to see places stay empty.
        """
        switches: dict[str, list[tuple[float, bool]]] = {f"place-{place}": [] for place in range(workers)}
        for event in self.limit(workers).events:
            switches[event.instance].append((event.time_s, event.kind == "add"))
        return tuple(map(tuple, switches.values()))


def checked_events(numbered: Iterable[tuple[int, Event]], where: str) -> Iterator[Event]:
    """Yields each event after a check that it may follow those before it."""
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
    """Apply an event to the instances that are alive, which are in order of arrival."""
    if event.kind == "add":
        alive[event.instance] = None
    else:
        del alive[event.instance]


def _at(event: Event, time_s: float) -> Event:
    return Event(time_s=time_s, instance=event.instance, kind=event.kind)
