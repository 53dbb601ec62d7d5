"""Where each request is filed, so that a decision need not look through all of them; it decides and sends nothing.

Invariants: a request is in one list at most, the one that `RequestState.filed` names; requests with a gang are found by
its node; the counts of rollouts are those of the requests that training waits for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from cluster.dispatch.request_state import Filed, RequestState
from spotlight.records import Pool

_Kind = tuple[bool, bool, int, tuple[Pool, ...], tuple[int, ...]]
"""Of a fresh request: exploring, windowed, iteration, pools, widths. Requests of one kind are interchangeable."""


class RequestIndex:
    """All requests that wait or have a gang."""

    def __init__(self) -> None:
        self.queues: dict[_Kind, list[tuple[int, str]]] = {}
        """Requests that wait for their first gang, by order; alike ones together."""
        self.broken: dict[str, RequestState] = {}
        """Requests that wait for another gang."""
        self.over: dict[str, RequestState] = {}
        """Requests with shards behind the gate that have nothing to do any more."""
        self.at_work: dict[str, dict[str, RequestState]] = {}
        """Requests that have a gang, by its node."""
        self.rollouts: dict[str, tuple[int, int]] = {}
        """{rollout that training waits for: (1 if no worker is at work on it, reserved workers at work on it)}"""
        self.rollouts_waiting = self.rollouts_reserved = 0

    @property
    def any_waits(self) -> bool:
        return bool(self.queues or self.broken)

    def explored_for(self) -> set[int]:
        """Iterations for which there is exploration that waits for its first gang."""
        return {iteration for exploring, _, iteration, *_ in self.queues if exploring}

    def with_gang(self) -> Iterator[RequestState]:
        for there in self.at_work.values():
            yield from there.values()

    def file(self, request: RequestState, *, over: bool) -> None:
        """Keep a request where a decision looks for it.

        Args:
            over: its shards behind the gate have nothing to do any more.
        """
        if request.windowed:
            rolling = len(request.members) if request.pool == "reserved" else 0
            self._count_rollout(request.name, (int((request.breaking or not request.members) and not over), rolling))
        if request.members:
            self.at_work.setdefault(request.node, {})[request.name] = request
        else:
            self._note_not_at_work(request)
        filed: Filed = ""
        if request.parked and (over or not request.members):
            filed = "over" if over else "broken" if request.epoch else "fresh"
        if filed != request.filed:
            self.take_out(request)
            request.filed = filed
            match filed:
                case "over":
                    self.over[request.name] = request
                case "broken":
                    self.broken[request.name] = request
                case "fresh":
                    insort(self.queues.setdefault(_kind(request), []), (request.order, request.name))

    def unfile(self, request: RequestState) -> None:
        """Take a request out of all lists: nobody wants it any more."""
        self.take_out(request)
        self._note_not_at_work(request)
        if request.windowed:
            self._count_rollout(request.name, (0, 0))

    def take_out(self, request: RequestState) -> None:
        """Take a request out of the list that `RequestState.filed` names."""
        match request.filed:
            case "over":
                del self.over[request.name]
            case "broken":
                del self.broken[request.name]
            case "fresh":
                queue, entry = self.queues[_kind(request)], (request.order, request.name)
                del queue[bisect_left(queue, entry)]
                if not queue:
                    del self.queues[_kind(request)]
        request.filed = ""

    def _note_not_at_work(self, request: RequestState) -> None:
        there = self.at_work.get(request.node)
        if there and there.pop(request.name, None) and not there:
            del self.at_work[request.node]

    def _count_rollout(self, name: str, counts: tuple[int, int]) -> None:
        before = self.rollouts.get(name, (0, 0))
        if counts == before:
            return
        self.rollouts_waiting += counts[0] - before[0]
        self.rollouts_reserved += counts[1] - before[1]
        if counts == (0, 0):
            del self.rollouts[name]
        else:
            self.rollouts[name] = counts


def _kind(request: RequestState) -> _Kind:
    return request.exploring, request.windowed, request.iteration, request.pools, request.widths
