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
