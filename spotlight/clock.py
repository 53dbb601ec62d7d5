"""What time it is: the one place that asks the operating system. Everything else is given a `Clock`."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since 1970, or since a virtual beginning; never goes back."""

_TICKING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that runs on while the machine sleeps, if the system has one."""
_BEGAN_S = time.time() - time.clock_gettime(_TICKING)


def wall_clock() -> float:
    """Seconds since 1970, by the system's clock when this process began: setting that clock later changes nothing."""
    return _BEGAN_S + time.clock_gettime(_TICKING)


def system_clock() -> float:
    """Seconds since 1970 by the system's clock, for times that other machines wrote or will read. It may jump."""
    return time.time()


def on_wall_clock(told_s: float) -> float:
    """A time that another machine gave, converted to this process's `wall_clock`."""
    return wall_clock() + told_s - system_clock()


ASKED = 5
"""How often another clock is read: the shortest round trip is the most accurate."""
ALIKE_S = 0.05
"""Clocks that differ by less count as equal: no work is as short, and no decision as fine."""


def ahead_s(ask: Callable[[], float], clock: Clock = wall_clock) -> float:
    """By how many seconds ``clock`` is ahead of the one that ``ask`` reads; 0 if the round trip may explain it all.

    Two processes with equal clocks get 0, however long the round trip: the reading lies within it.
    """
    readings = []
    for _ in range(ASKED):
        asked_s, told_s, came_s = clock(), ask(), clock()
        readings.append((came_s - asked_s, (asked_s + came_s) / 2 - told_s))
    way_s, found_s = min(readings)
    return found_s if abs(found_s) > max(ALIKE_S, way_s) else 0.0
