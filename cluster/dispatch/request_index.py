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
"""Of fresh requests: exploring, rolling out for training, iteration, pools, widths. Those of a kind are alike."""


class Requests:
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
        """Of each rollout that training waits for: 1 if nobody is at work on it, and reserved workers at work on it."""
        self.rollouts_waiting = self.rollouts_reserved = 0

    @property
    def any_waits(self) -> bool:
        return bool(self.queues or self.broken)

    def with_gang(self) -> Iterator[RequestState]:
        for there in self.at_work.values():
            yield from there.values()

    def file(self, gang: RequestState, *, over: bool) -> None:
        """Keep a request where a decision looks for it.

        Args:
            over: what is behind the gate of it has nothing to do any more.
        """
        if gang.windowed:
            rolling = len(gang.members) if gang.pool == "reserved" else 0
            self._count_rollout(gang.name, (int((gang.breaking or not gang.members) and not over), rolling))
        if gang.members:
            self.at_work.setdefault(gang.node, {})[gang.name] = gang
        else:
            self._note_not_at_work(gang)
        filed: Filed = ""
        if gang.parked and (over or not gang.members):
            filed = "over" if over else "broken" if gang.epoch else "fresh"
        if filed != gang.filed:
            self.take_out(gang)
            gang.filed = filed
            match filed:
                case "over":
                    self.over[gang.name] = gang
                case "broken":
                    self.broken[gang.name] = gang
                case "fresh":
                    insort(self.queues.setdefault(_kind(gang), []), (gang.order, gang.name))

    def unfile(self, gang: RequestState) -> None:
        """Nobody wants it any more."""
        self.take_out(gang)
        self._note_not_at_work(gang)
        if gang.windowed:
            self._count_rollout(gang.name, (0, 0))

    def take_out(self, gang: RequestState) -> None:
        """Out of the list that it is in."""
        match gang.filed:
            case "over":
                del self.over[gang.name]
            case "broken":
                del self.broken[gang.name]
            case "fresh":
                queue, entry = self.queues[_kind(gang)], (gang.order, gang.name)
                del queue[bisect_left(queue, entry)]
                if not queue:
                    del self.queues[_kind(gang)]
        gang.filed = ""

    def _note_not_at_work(self, gang: RequestState) -> None:
        there = self.at_work.get(gang.node)
        if there and there.pop(gang.name, None) and not there:
            del self.at_work[gang.node]

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


def _kind(gang: RequestState) -> _Kind:
    return gang.exploring, gang.windowed, gang.iteration, gang.pools, gang.widths
