"""Messages between the scheduler and virtual workers: each arrives at once, or late, but in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.virtual.clock import VirtualClock


class Messages:
    """Delivers messages.

    Args:
        lag: seconds that a message of a kind takes ("result", "beat", "order", "notice"); those between one worker
            and the scheduler arrive in order, except beats. None: all arrive at once.
        copies: how often a beat arrives.
    """

    def __init__(self, clock: VirtualClock, lag: Callable[[str], float] | None, copies: Callable[[], int]) -> None:
        self._clock, self._lag, self._copies = clock, lag, copies
        self._sent_s: dict[tuple[str, str], float] = {}
        """{(direction, worker): when its last message arrives}"""

    @property
    def are_late(self) -> bool:
        """Whether messages may be late."""
        return self._lag is not None

    def send(self, kind: str, address: str, call: Callable[..., None], *arguments: Any) -> None:
        """Deliver a message: at once, or late, after earlier ones of the same direction."""
        if self._lag is None:
            call(*arguments)
            return
        way = (kind if kind == "order" else "report", address)
        at_s = max(self._clock.now_s + self._lag(kind), self._sent_s.get(way, 0.0))
        if at_s <= self._clock.now_s:
            call(*arguments)
            return
        self._sent_s[way] = at_s
        self._clock.at(at_s, call, *arguments)

    def send_beat(self, call: Callable[..., None], *arguments: Any) -> None:
        """Deliver a beat: beats may overtake each other, and some arrive twice."""
        for _ in range(self._copies()):
            lag_s = self._lag("beat") if self._lag else 0.0
            if lag_s:
                self._clock.after(lag_s, call, *arguments)
            else:
                call(*arguments)
