"""Virtual time: a queue of events, and the time of the latest one. Nothing here sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

SAME_MOMENT_S = 1e-6
"""Events closer than this are one moment: equal waves end together in spite of rounding."""


@dataclass(slots=True, eq=False)
class Alarm:
    """A scheduled event, which can be cancelled."""

    call: Callable[..., None]
    arguments: tuple[Any, ...]
    together: bool = False
    """Consecutive events of one moment with the same ``call`` become one call, with a list of their arguments."""
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True, eq=False)
class VirtualClock:
    """The virtual time and the events to come; called, it returns the time, as any `spotlight.clock.Clock`.

    Events of one moment happen in the order in which they were scheduled.
    """

    now_s: float = 0.0
    _alarms: list[tuple[float, int, Alarm]] = field(default_factory=list)
    _count: int = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> Alarm:
        """Schedule a call at ``at_s``, or now if that is past."""
        return self._push(at_s, Alarm(call, arguments))

    def after(self, wait_s: float, call: Callable[..., None], *arguments: Any) -> Alarm:
        return self.at(self.now_s + wait_s, call, *arguments)

    def together(self, at_s: float, call: Callable[[list[Any]], None], about: Any) -> Alarm:
        """Schedule a call with a list of ``about``, and of that of the next events of that moment with the same call.

        A thousand workers end their tasks in waves: one call for a wave costs far less than one for each.
        """
        return self._push(at_s, Alarm(call, (about,), together=True))

    def _push(self, at_s: float, alarm: Alarm) -> Alarm:
        self._count += 1
        heappush(self._alarms, (at_s if at_s > self.now_s else self.now_s, self._count, alarm))
        return alarm

    @property
    def next_s(self) -> float | None:
        """Time of the next event; None if there is none."""
        while self._alarms and self._alarms[0][2].cancelled:
            heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def step(self) -> bool:
        """Run the next event, or several that make one call; returns False if it was the last of its moment."""
        next_s = self.next_s
        assert next_s is not None, "nothing happens any more"
        _, _, alarm = heappop(self._alarms)
        self.now_s = max(self.now_s, next_s)
        if alarm.together:
            alarm.call([*alarm.arguments, *self._alike(alarm)])
        else:
            alarm.call(*alarm.arguments)
        return self._goes_on

    @property
    def _goes_on(self) -> bool:
        """Whether there are more events in this moment."""
        next_s = self.next_s
        return next_s is not None and next_s <= self.now_s + SAME_MOMENT_S

    def _alike(self, alarm: Alarm) -> Iterator[Any]:
        """What the next events of this moment are about, as long as they have the same call as ``alarm``."""
        while self._goes_on and self._alarms[0][2].together and self._alarms[0][2].call == alarm.call:
            at_s, _, other = heappop(self._alarms)
            self.now_s = max(self.now_s, at_s)
            yield other.arguments[0]
