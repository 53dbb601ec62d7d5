"""Which workers there are, which of them are idle, and who holds which weights; it decides and sends nothing.

A worker is idle that takes tasks, has none, and is not under notice. Another may take its name, and, where ports are
few, its address, when it is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.dispatch.events import Key, WeightsHeld, WorkerJoined, WorkerPool
from spotlight.plan.placement import Idle, PoolNode

FILES_MAX = 256
"""Most files of weights whose holders are remembered; the store has older ones."""
REST_S, REST_MAX_S = 0.5, 60.0
"""How long a worker gets no work that has lost its engine twice in a row; with each further one twice as long, up to
the second."""
HOLDERS_MAX = 3
"""Most holders named to a node that lacks a file: more than one, should the first be lost in the middle of it."""


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """A worker, and the tasks that it has."""

    address: str
    name: str
    pool: WorkerPool
    idle: Idle
    """As `placement` sees it when it has nothing to do; of one that only scores, only the name is used."""
    available: bool = True
    tasks: dict[Key, float] = field(default_factory=dict)
    """{task at work, or about to be: when it began}"""
    engines_lost: int = 0
    """Engine processes that it lost in a row, each in the middle of a task from behind the gate."""


class Roster:
    """The workers that are alive, and what must be remembered of those that are gone."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerState] = {}
        """All workers, by address."""
        self.by_name: dict[str, WorkerState] = {}
        """All but the head worker, by name."""
        self.idle: dict[str, Idle] = {}
        """Idle workers, by address, without those that only score."""
        self.idle_scorers: dict[str, Idle] = {}
        """Idle workers that only score, by address."""
        self.leaving: set[str] = set()
        """Names of workers under notice, until another takes the name."""
        self.hung: set[str] = set()
        """Addresses of workers that were ended because they were silent."""
        self.resting: dict[str, float] = {}
        """{address of a worker that gets no work for a while: until when}"""
        self.alive: Counter[PoolNode] = Counter()
        """Workers of a pool on a node, but for those that only score."""
        self._early: dict[str, dict[Key, float]] = {}
        """{address of a worker that has not joined yet: {task that Dask gave it: when it began}}"""
        self._gone: dict[Key, float] = {}
        """{task whose worker is gone: when it began}, until Dask changes the task's state."""
        self._holders: dict[str, dict[str, str]] = {}
        """{hash of a file of weights: {worker that has it: its node}}; in both, the latest last."""

    @property
    def head(self) -> WorkerState | None:
        """The worker beside the scheduler."""
        return next((worker for worker in self.workers.values() if worker.pool == "head"), None)

    def largest_node(self, pools: Collection[str]) -> int:
        """Workers of the node that has most of one of these pools: a gang is of one pool, on one node."""
        return max((count for (pool, _), count in self.alive.items() if pool in pools), default=0)

    def join(self, event: WorkerJoined) -> None:
        worker = WorkerState(
            address=event.address,
            name=event.name,
            pool=event.pool,
            idle=Idle(worker=event.name, pool="spot" if event.pool == "spot" else "reserved", node=event.node),
            tasks=self._early.pop(event.address, {}),
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
        """Remove a worker. ``expected``: it left on purpose; that may be known before its notice, in another stream."""
        worker = self.workers.pop(address, None)
        if worker is None:
            return None
        self._gone.update(worker.tasks)
        self.resting.pop(address, None)
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
        """Put a worker under notice, so that it gets no more work; None if it is unknown, or was already."""
        worker = self.workers.get(address)
        if worker is None or worker.name in self.leaving:
            return None
        self.leaving.add(worker.name)
        self._note_busy(worker)
        return worker

    def note_idle(self, worker: WorkerState) -> None:
        if worker.pool == "head":
            return
        free = worker.available and not worker.tasks and worker.address not in self.resting
        if free and worker.name not in self.leaving:
            self._idle_like(worker)[worker.address] = worker.idle
        else:
            self._note_busy(worker)

    def lose_engine(self, worker: WorkerState, at_s: float) -> float:
        """Count an engine that it lost; returns until when it rests, in which others may do what it could not."""
        worker.engines_lost += 1
        if worker.engines_lost < 2:
            return at_s
        until_s = at_s + min(REST_MAX_S, REST_S * 2 ** (worker.engines_lost - 2))
        self.resting[worker.address] = until_s
        self._note_busy(worker)
        return until_s

    def rise(self, at_s: float) -> None:
        """End rests that are over."""
        for address in [address for address, until_s in self.resting.items() if until_s <= at_s]:
            del self.resting[address]
            self.note_idle(self.workers[address])

    def note_working(self, address: str) -> None:
        """A worker's engine got something done."""
        if address in self.workers:
            self.workers[address].engines_lost = 0

    def _note_busy(self, worker: WorkerState) -> None:
        self._idle_like(worker).pop(worker.address, None)

    def _idle_like(self, worker: WorkerState) -> dict[str, Idle]:
        return self.idle_scorers if worker.pool == "reward" else self.idle

    # Tasks

    def assign(self, key: Key, address: str, at_s: float = 0.0) -> None:
        """Reserve a worker for a task, also before it begins, so that it gets no other."""
        worker = self.workers.get(address)
        if worker:
            worker.tasks[key] = at_s
            self._note_busy(worker)
        else:
            self._early.setdefault(address, {})[key] = at_s

    def has(self, key: Key, address: str) -> bool:
        """Whether a worker has a task, or is reserved for it."""
        return address in self.workers and key in self.workers[address].tasks

    def unassign(self, key: Key, address: str) -> float:
        """Take a task from a worker; returns when the task began."""
        worker = self.workers.get(address)
        if worker is None:
            return self._unassign_absent(key, address)
        started_s = worker.tasks.pop(key, 0.0)
        self.note_idle(worker)
        return started_s

    def _unassign_absent(self, key: Key, address: str) -> float:
        early = self._early.get(address, {})
        started_s = early.pop(key) if key in early else self._gone.pop(key, 0.0)
        if not early:
            self._early.pop(address, None)
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

    def spot_on_nodes(self, *, of_at_least: int) -> int:
        """Spot workers not under notice, on nodes with at least so many of them."""
        staying = [worker for worker in self.by_name.values() if worker.pool == "spot"]
        nodes = Counter(worker.idle.node for worker in staying if worker.name not in self.leaving)
        return sum(count for count in nodes.values() if count >= of_at_least)
