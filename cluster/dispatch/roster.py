"""Which workers there are, which of them are idle, and who holds which weights; it decides and sends nothing.

A worker is idle that takes tasks, has none, and is not under notice. Another may take its name, and, where ports are
few, its address, when it is gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cluster.dispatch.events import Key, WeightsHeld, WorkerJoined, WorkerPool
from spotlight.plan.placement import Idle, PoolNode

FILES_MAX = 256
"""Of weights: holders of older ones are forgotten. The store has them too, and who gets one there is a holder again."""
HOLDERS_MAX = 3
"""Told to a node that lacks a file: the others are there should the first be lost in the middle of it."""


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """A worker, and the tasks that it has."""

    address: str
    name: str
    pool: WorkerPool
    idle: Idle
    """As the policy sees it when it has nothing to do; of one that only scores, its name alone means anything."""
    available: bool = True
    tasks: dict[Key, float] = field(default_factory=dict)
    """At work or about to be, with the moment."""


class Roster:
    """The workers that are alive, and what must be remembered of those that are gone."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerState] = {}
        """By address."""
        self.by_name: dict[str, WorkerState] = {}
        """All but the one beside the scheduler."""
        self.idle: dict[str, Idle] = {}
        """By address, those that only score left out."""
        self.idle_scorers: dict[str, Idle] = {}
        """Those, by address."""
        self.leaving: set[str] = set()
        """Names of workers under notice, until another takes the name."""
        self.hung: set[str] = set()
        """Addresses of workers that were ended because they were silent."""
        self.alive: Counter[PoolNode] = Counter()
        """Workers of a pool on a node, but for those that only score."""
        self._gone: dict[Key, float] = {}
        """Tasks whose worker is gone, until they change, with when they began."""
        self._holders: dict[str, dict[str, str]] = {}
        """Of each file of weights, by hash, the workers that have it, with their nodes; the latest last, of both."""

    @property
    def head(self) -> WorkerState | None:
        """The worker beside the scheduler."""
        return next((worker for worker in self.workers.values() if worker.pool == "head"), None)

    def join(self, event: WorkerJoined) -> None:
        worker = WorkerState(
            address=event.address,
            name=event.name,
            pool=event.pool,
            idle=Idle(worker=event.name, pool="spot" if event.pool == "spot" else "reserved", node=event.node),
        )
        self.workers[event.address] = worker
        self.hung.discard(event.address)
        if event.pool != "head":
            self.by_name[event.name] = worker
            self.leaving.discard(event.name)
            if event.pool != "reward":
                self.alive[worker.idle.pool, event.node] += 1
            self.note_idle(worker)

    def leave(self, address: str, *, expected: bool) -> WorkerState | None:
        """Take a worker off; that it left on purpose may be known before its notice, in another stream."""
        worker = self.workers.pop(address, None)
        if worker is None:
            return None
        self._gone.update(worker.tasks)
        self._note_busy(worker)
        for holders in self._holders.values():
            holders.pop(address, None)
        if worker.pool == "head":
            return worker
        if worker.pool != "reward":
            self.alive[worker.idle.pool, worker.idle.node] -= 1
        if self.by_name.get(worker.name) is worker:
            del self.by_name[worker.name]
            if expected and address not in self.hung:
                self.leaving.add(worker.name)
        return worker

    def note_available(self, address: str, *, available: bool) -> None:
        worker = self.workers.get(address)
        if worker:
            worker.available = available
            self.note_idle(worker)

    def note_leaving(self, address: str) -> WorkerState | None:
        """It is under notice, if it was not yet: it gets no more work."""
        worker = self.workers.get(address)
        if worker is None or worker.name in self.leaving:
            return None
        self.leaving.add(worker.name)
        self._note_busy(worker)
        return worker

    def note_idle(self, worker: WorkerState) -> None:
        if worker.pool == "head":
            return
        if worker.available and not worker.tasks and worker.name not in self.leaving:
            self._idle_like(worker)[worker.address] = worker.idle
        else:
            self._note_busy(worker)

    def _note_busy(self, worker: WorkerState) -> None:
        self._idle_like(worker).pop(worker.address, None)

    def _idle_like(self, worker: WorkerState) -> dict[str, Idle]:
        return self.idle_scorers if worker.pool == "reward" else self.idle

    # Tasks

    def assign(self, key: Key, address: str, at_s: float = 0.0) -> None:
        """Count on a worker for a task, also before it begins, so that it gets no other."""
        worker = self.workers.get(address)
        if worker:
            worker.tasks[key] = at_s
            self._note_busy(worker)

    def has(self, key: Key, address: str) -> bool:
        """Whether a worker is counted on for a task."""
        return address in self.workers and key in self.workers[address].tasks

    def unassign(self, key: Key, address: str) -> float:
        """A worker has one task less; returns when that began."""
        worker = self.workers.get(address)
        if worker is None:
            return self._gone.pop(key, 0.0)
        started_s = worker.tasks.pop(key, 0.0)
        self.note_idle(worker)
        return started_s

    # Weights

    def hold(self, event: WeightsHeld) -> None:
        worker = self.workers.get(event.address)
        if worker:
            known = self._holders.pop(event.sha256, {})
            self._holders[event.sha256] = {**known, event.address: worker.idle.node}
            if len(self._holders) > FILES_MAX:
                del self._holders[next(iter(self._holders))]

    def holders(self, sha256: str) -> list[str]:
        """Workers, one a node, whose nodes hold a file of weights; the latest to get it first: it serves fewest."""
        by_node = {node: address for address, node in self._holders.get(sha256, {}).items()}
        return list(by_node.values())[::-1][:HOLDERS_MAX]

    # Of those that stay

    def spot_on_nodes(self, *, of_at_least: int) -> int:
        """Spot workers that stay, on nodes where there are so many of them."""
        staying = [worker for worker in self.by_name.values() if worker.pool == "spot"]
        nodes = Counter(worker.idle.node for worker in staying if worker.name not in self.leaving)
        return sum(count for count in nodes.values() if count >= of_at_least)
