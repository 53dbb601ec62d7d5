"""What the outside may ask of work in flight; asked from any thread, read between two steps.

One `signals` object per process: the cluster sets it, the work reads it. It imports nothing heavy, so
that work which is called off costs nothing. A run's signals never touch another run's.
"""

from __future__ import annotations

from spotlight.records import Request, Stopped


class Signals:
    """Requests to end early, by run; single assignments to a dict, so any thread may make them."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()
        self._closed: dict[str, int] = {}

    def clear(self, run: str) -> None:
        """Forget what was asked of an earlier session of this run."""
        self._stopped.discard(run)
        self._closed.pop(run, None)

    def stop(self, run: str) -> None:
        """Everything in flight ends at its next step boundary."""
        self._stopped.add(run)

    def close_exploration(self, run: str, iteration: int) -> None:
        """Exploration for ``iteration``, and any earlier one, ends at its next step boundary."""
        self._closed[run] = max(iteration, self._closed.get(run, -1))

    def check(self, request: Request) -> str | None:
        """Why the request is to be dropped, or None to go on.

        Raises:
            Stopped: the run is being stopped.
        """
        if request.run in self._stopped:
            raise Stopped(request.id)
        if request.purpose == "explore" and request.iteration <= self._closed.get(request.run, -1):
            return f"exploration for iteration {request.iteration} is closed"
        return None


signals = Signals()
