"""Virtual time: a queue of what will happen, and the moment that it has come to. Nothing here sleeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

SAME_MOMENT_S = 1e-6
"""Events closer than this are one moment: equal waves end together in spite of rounding."""


@dataclass(slots=True, eq=False)
class Alarm:
    """Something that will happen, unless it is cancelled."""

    call: Callable[..., None]
    arguments: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True, eq=False)
class VirtualClock:
    """What time it is, and what happens next; called, it tells the time like any `spotlight.clock.Clock`.

    Events of one moment happen in the order in which they were asked for.
    """

    now_s: float = 0.0
    _alarms: list[tuple[float, int, Alarm]] = field(default_factory=list)
    _count: int = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> Alarm:
        """Have it called at that moment; at the earliest now."""
        self._count += 1
        alarm = Alarm(call, arguments)
        heappush(self._alarms, (at_s if at_s > self.now_s else self.now_s, self._count, alarm))
        return alarm

    def after(self, wait_s: float, call: Callable[..., None], *arguments: Any) -> Alarm:
        return self.at(self.now_s + wait_s, call, *arguments)

    @property
    def next_s(self) -> float | None:
        """When something happens next; None if nothing does any more."""
        while self._alarms and self._alarms[0][2].cancelled:
            heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def step(self) -> bool:
        """Go to the next event, and let it happen; False if it was the last of its moment."""
        next_s = self.next_s
        assert next_s is not None, "nothing happens any more"
        _, _, alarm = heappop(self._alarms)
        self.now_s = max(self.now_s, next_s)
        alarm.call(*alarm.arguments)
        following_s = self.next_s
        return following_s is not None and following_s <= self.now_s + SAME_MOMENT_S
