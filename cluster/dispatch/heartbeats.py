"""For how long workers have been silent, or there and not ready, less any pause of the process that looks. Pure."""

from __future__ import annotations

PAUSE_S = 2.0
"""If a look at the workers comes so much too late, this process was paused, and the workers may have been too."""
SAID_PAUSE_S = 10.0
"""A pause that is told of; a busy machine may bring a shorter one."""
NOT_READY_LIMITS = 10
"""Times the limit after which a silent worker has hung: one that has joined and is not ready by then has hung, too."""
STARTING_LIMITS = 3
"""Times that limit: one that is silent for so long before it is ready has hung. It may be importing until then."""
MISSED = 3
"""Nobody has hung before so many heartbeats are due: one comes late from a worker that is busy."""


class Heartbeats:
    """When each worker was heard of last, by our clock.

    Args:
        limit_s: a worker that is silent for longer has hung, unless `expect` says more.
        every_s: between two looks.
    """

    def __init__(self, *, limit_s: float, every_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        """A worker that is silent for longer has hung."""
        self._every_s = every_s
        self._looked_s, self._paused_s = now_s, 0.0
        self._heard: dict[str, tuple[float, float]] = {}
        """Of each worker: its last heartbeat by Dask's clock, and when we saw that by ours."""
        self._came: dict[str, float] = {}
        """When workers joined that are not ready yet."""

    def expect(self, beat_s: float) -> None:
        """Workers send a heartbeat so often; who was told so keeps to it for a while, so that the limit only grows."""
        self.limit_s = max(self.limit_s, MISSED * beat_s + self._every_s)

    def look(self, now_s: float) -> float:
        """Look again; returns how long this process, and perhaps the whole machine, stood still since the last look."""
        late_s = max(0.0, now_s - self._looked_s - self._every_s)
        self._looked_s, self._paused_s = now_s, late_s if late_s > PAUSE_S else 0.0
        self._came = {address: at_s + self._paused_s for address, at_s in self._came.items()}
        return self._paused_s

    def is_worth_telling(self, paused_s: float) -> bool:
        """Of a pause, whether anybody else should know of it."""
        return paused_s > min(SAID_PAUSE_S, max(PAUSE_S, self.limit_s))

    def silent_s(self, address: str, last_seen: float) -> float:
        """For how long no new heartbeat of a worker was seen, at the last look.

        Args:
            last_seen: the heartbeat, by Dask's clock.
        """
        heard = self._heard.get(address)
        if heard is None or heard[0] != last_seen:
            heard = last_seen, self._looked_s
        else:
            heard = last_seen, heard[1] + self._paused_s  # no heartbeat was seen meanwhile
        self._heard[address] = heard
        return self._looked_s - heard[1]

    def overdue_s(self, address: str, silent_s: float) -> float:
        """For how long a worker that is not ready has been there, once that, or its silence, is too long; else 0."""
        unready_s = self._looked_s - self._came.setdefault(address, self._looked_s)
        hangs = unready_s > NOT_READY_LIMITS * self.limit_s or silent_s > STARTING_LIMITS * self.limit_s
        return unready_s if hangs else 0.0

    def note_ready(self, address: str) -> None:
        """It is, or never will be and said so."""
        self._came.pop(address, None)

    def forget(self, address: str) -> None:
        """It is gone."""
        self._heard.pop(address, None)
        self._came.pop(address, None)
