"""How long workers have been silent, or have joined and not become ready, less pauses of this process. Pure."""

from __future__ import annotations

PAUSE_S = 2.0
"""If a look at the workers comes so much too late, this process was paused, and the workers may have been too."""
SAID_PAUSE_S = 10.0
"""A pause worth reporting; shorter ones happen on a busy machine."""
NOT_READY_LIMITS = 10
"""A worker that joined has hung if it is not ready after so many times the limit of a silent one."""
STARTING_LIMITS = 3
"""Before it is ready, a worker has hung if it is silent for so many times the limit: it may be importing until then."""
MISSED = 3
"""No worker counts as hung before so many heartbeats are due: a busy one sends them late."""


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
        """{address: the last heartbeat by Dask's clock, and when it was seen by ours}"""
        self._came: dict[str, float] = {}
        """{address: when the worker joined}, of workers that are not ready yet."""

    def expect(self, beat_s: float) -> None:
        """Workers send a heartbeat every ``beat_s``. Each keeps to an earlier one for a while, so the limit grows."""
        self.limit_s = max(self.limit_s, MISSED * beat_s + self._every_s)

    def look(self, now_s: float) -> float:
        """Look again; returns how long this process, and perhaps the whole machine, stood still since the last look."""
        late_s = max(0.0, now_s - self._looked_s - self._every_s)
        self._looked_s, self._paused_s = now_s, late_s if late_s > PAUSE_S else 0.0
        self._came = {address: at_s + self._paused_s for address, at_s in self._came.items()}
        return self._paused_s

    def is_worth_telling(self, paused_s: float) -> bool:
        """Whether a pause should be reported."""
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
        """How long a worker has been there without being ready, if that, or its silence, is too long; else 0."""
        unready_s = self._looked_s - self._came.setdefault(address, self._looked_s)
        hangs = unready_s > NOT_READY_LIMITS * self.limit_s or silent_s > STARTING_LIMITS * self.limit_s
        return unready_s if hangs else 0.0

    def note_ready(self, address: str) -> None:
        """The worker is ready, or said that it cannot take part."""
        self._came.pop(address, None)

    def forget(self, address: str) -> None:
        """The worker is gone."""
        self._heard.pop(address, None)
        self._came.pop(address, None)
