"""What time it is: the one place that asks the operating system. Everything else is given a `Clock`."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since 1970, or since a virtual beginning; never goes back."""

_TICKING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts on while the machine sleeps, where the system has such a clock."""
_BEGAN_S = time.time() - time.clock_gettime(_TICKING)


def wall_clock() -> float:
    """Seconds since 1970 as this process began to count them: setting the system's clock changes nothing."""
    return _BEGAN_S + time.clock_gettime(_TICKING)


def system_clock() -> float:
    """Seconds since 1970 as the machine has it now: for what other machines wrote, or are to read. It may jump."""
    return time.time()


def on_wall_clock(told_s: float) -> float:
    """When it is on this process's `wall_clock`, what another machine says will be then."""
    return wall_clock() + told_s - system_clock()


ASKED = 5
"""Times that another clock is asked: the shortest way there and back tells best."""
ALIKE_S = 0.05
"""Clocks that differ by less are taken for the same: it is less than any work takes, or a decision looks at."""


def ahead_s(ask: Callable[[], float], clock: Clock = wall_clock) -> float:
    """By how much a clock is ahead of one that has to be asked; 0 where the way there and back may be all of it.

    Two processes whose clocks are the same get 0, however long an answer takes: it was given on the way.
    """
    readings = []
    for _ in range(ASKED):
        asked_s, told_s, came_s = clock(), ask(), clock()
        readings.append((came_s - asked_s, (asked_s + came_s) / 2 - told_s))
    way_s, found_s = min(readings)
    return found_s if abs(found_s) > max(ALIKE_S, way_s) else 0.0
