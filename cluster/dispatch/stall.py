"""Tells when a run has stalled: when to report what it waits for, and when to give up. Pure.

A run in which nothing happens reports what it waits for after a while, again after twice as long, and so on. Where all
that it needs is there and still nothing begins, it is to end.
"""

from __future__ import annotations

from collections.abc import Sequence

GIVE_UP = 10
"""A run is stalled for good if nothing began for so many times the limit, although all that it needs is there."""
NAMED = 3
"""Tasks that are named, the longest at work first."""


class StallDetector:
    """How long nothing has happened.

    Args:
        limit_s: after so long without an event, it is time to report what the run waits for.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._since_s, self._next_s = now_s, limit_s

    def happened(self, at_s: float) -> None:
        """Note that something happened."""
        self._since_s, self._next_s = at_s, self._limit_s

    def paused(self, lost_s: float) -> None:
        """Note a pause, in which nothing could happen."""
        self._since_s += lost_s

    def lasts_s(self, now_s: float) -> float:
        return now_s - self._since_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to report what is waited for; true once, then not before twice as long has passed."""
        if self.lasts_s(now_s) < self._next_s:
            return False
        self._next_s *= 2
        return True

    def is_over(self, now_s: float) -> bool:
        """Whether to give up: whatever can begin would have begun by now."""
        return self.lasts_s(now_s) >= GIVE_UP * self._limit_s


def sentence(
    lasts_s: float, running: Sequence[tuple[str, str, float]], *, missing: Sequence[str], requests: int
) -> str:
    """What a run waits for.

    Args:
        running: ``(task, worker, seconds)`` of each that is at work.
        missing: kinds of workers that there are none of.
        requests: that wait for workers.
    """
    longest = sorted(running, key=lambda each: -each[2])
    reasons = [f"{task} on {worker} (for {seconds:.0f} s)" for task, worker, seconds in longest[:NAMED]]
    if len(longest) > NAMED:
        reasons.append(f"{len(longest) - NAMED} more tasks")
    reasons += [f"a worker: {pool}" for pool in missing]
    if requests:
        reasons.append(f"{requests} requests are not begun")
    return f"nothing has happened for {lasts_s:.0f} s; the run waits for {'; '.join(reasons) or 'its scheduler'}"
