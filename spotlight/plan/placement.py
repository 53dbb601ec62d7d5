"""Who runs what, and how many of them together: placement as pure functions, for the cluster and the simulator.

Nothing here sleeps, logs, draws a random number or reads a clock. The same `View` always gives the
same plan, so a live run can be replayed offline. It is level-triggered: it looks at the whole state
each time, so a lost or doubled event cannot corrupt it.

Invariants: a gang is launched whole, on workers of one node; no worker gets two requests; what a broken gang's
survivors can run is not given to a fresh request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field
from operator import attrgetter

from spotlight.records import Pool, record

PoolNode = tuple[Pool, str]
"""A node of a pool."""
_Kind = tuple[tuple[Pool, ...], int, int]
"""What decides where a request fits: its pools, its narrowest gang, and its shards left."""


@record
class Idle:
    """A worker with nothing to do."""

    worker: str
    pool: Pool
    node: str = ""
    """Its machine. Gangs do not span nodes."""


@record
class Waiting:
    """A request whose inputs are ready and that no gang has."""

    id: str
    pools: tuple[Pool, ...]
    """Where it may run, the preferred pool first."""
    order: int
    """Arrival, smaller is earlier."""
    exploring: bool = False
    begun: bool = False
    """Whether it had workers before, and so may have committed steps to resume from."""
    widths: tuple[int, ...] = (1,)
    """How many workers may run it together, ascending."""
    slots: int = 1
    """Its shards that are not done: no gang can be wider."""
    held: tuple[str, ...] = ()
    """Survivors of its broken gang, kept for it; they are idle."""


@record
class Running:
    """A request that a gang is at work on."""

    id: str
    workers: tuple[str, ...]
    pool: Pool
    node: str
    widths: tuple[int, ...]
    slots: int
    remaining_s: float
    """Until it is done at its present width, as far as is known; 0 where it is not."""


@record
class View:
    """All that a placement decision may look at."""

    idle: tuple[Idle, ...]
    waiting: tuple[Waiting, ...]
    running: tuple[Running, ...] = ()
    alive: Mapping[PoolNode, int] = field(default_factory=dict)
    """Workers of a pool on a node, busy or idle. Where none are named, only the idle ones are there."""
    regroup_s: float = 0.5
    """Seconds that it costs a gang to form anew."""


@record
class Launch:
    """Run this request there, now."""

    request: str
    workers: tuple[str, ...]
    """By rank."""


def plan(view: View) -> list[Launch]:
    """Pair idle workers with waiting requests: pull, never push.

    A gang gets its next request when it is free and not before, so nothing queues on a machine that may
    vanish. Preempted requests go first, so that work half done never waits behind fresh work; what training
    waits for goes before exploration; then first come, first served.

    A gang is as wide as the free workers allow when they are shared evenly among the requests that
    wait: many requests run narrow, which wastes no communication, and the last few run wide. A broken
    gang may take its survivors, and those held for requests behind it.

    The first request of a kind that no node can run yet holds the node where it will soonest fit, so that narrower
    ones behind it cannot keep it waiting for ever; one that no node could ever run holds up nobody.
    """
    free = _Free(view)
    launches = []
    stuck: set[_Kind] = set()
    """Kinds of request of which one got nothing: it might have used any worker that a later one of the kind may use."""
    for waiting, rivals in _in_order(view):
        if not free.count:
            break
        if stuck and _kind(waiting) in stuck:
            continue
        if workers := free.take(waiting, rivals):
            launches.append(Launch(request=waiting.id, workers=workers))
        else:
            stuck.add(_kind(waiting))
            free.hold_node_for(waiting)
    return launches


def widen(view: View) -> list[str]:
    """Requests whose gangs should form anew, wider, at their next step boundary.

    Only workers that nobody waits for widen a gang, and only where the time it saves, if ``w`` workers are
    ``w`` times as fast, is more than forming anew costs::

        remaining_s * (1 - width / wider) > regroup_s
    """
    wanted = {pool for waiting in view.waiting for pool in waiting.pools}
    free = Counter((idle.pool, idle.node) for idle in view.idle if idle.pool not in wanted)
    chosen = []
    for running in sorted(view.running, key=lambda request: (-request.remaining_s, request.id)):
        place, width = (running.pool, running.node), len(running.workers)
        wider = max((w for w in running.widths if w <= min(running.slots, width + free[place])), default=width)
        if wider > width and running.remaining_s * (1 - width / wider) > view.regroup_s:
            free[place] -= wider - width
            chosen.append(running.id)
    return chosen


def _kind(waiting: Waiting) -> _Kind:
    return waiting.pools, waiting.widths[0], waiting.slots


def _in_order(view: View) -> Iterator[tuple[Waiting, int]]:
    """Waiting requests that some idle worker may run, in order, each with how many of its sort still wait.

    A queue is sorted when its turn comes, which for exploration is never while rollouts take all idle workers.
    """
    pools = {idle.pool for idle in view.idle}
    able = [request for request in view.waiting if not pools.isdisjoint(request.pools)]
    queues = {exploring: [request for request in able if request.exploring == exploring] for exploring in (False, True)}
    left = {exploring: len(queue) for exploring, queue in queues.items()}
    for begun in (True, False):
        for exploring, queue in queues.items():
            turn = sorted([request for request in queue if request.begun == begun], key=attrgetter("order"))
            yield from zip(turn, range(left[exploring], 0, -1), strict=False)
            left[exploring] -= len(turn)


class _Free:
    """Idle workers by pool and node, with the nodes of a pool in buckets by how many they have."""

    def __init__(self, view: View) -> None:
        self.count = len(view.idle)
        self._alive = Counter((idle.pool, idle.node) for idle in view.idle)
        self._alive.update({place: count - self._alive[place] for place, count in view.alive.items()})
        broken = sorted((request for request in view.waiting if request.held), key=_rank, reverse=True)
        holders = {worker: request for request in broken for worker in request.held}  # the first of two that claim it
        free: dict[PoolNode, list[str]] = defaultdict(list)
        self._held: dict[PoolNode, dict[str, tuple[bool, int]]] = defaultdict(dict)
        """{node: {worker kept for a broken gang: `_rank` of that gang's request}}"""
        for idle in sorted(view.idle, key=lambda idle: idle.worker):
            place, holder = (idle.pool, idle.node), holders.get(idle.worker)
            if holder and self._could_run(holder, place):
                self._held[place][idle.worker] = _rank(holder)
            else:
                free[place].append(idle.worker)
        self._workers: dict[PoolNode, list[str]] = defaultdict(list)
        self._buckets: dict[Pool, dict[int, dict[PoolNode, None]]] = {"reserved": {}, "spot": {}}
        self._by_pool: dict[Pool, int] = {"reserved": 0, "spot": 0}
        for place in sorted(free):
            self._set_free(place, free[place])

    def take(self, waiting: Waiting, rivals: int) -> tuple[str, ...]:
        """Workers for the request; none if no node has enough.

        First choice are the survivors of its gang with free workers beside them, then free workers alone, then, if it
        has begun, also workers held for requests behind it.

        Args:
            rivals: requests of its sort that still wait, this one included; they share the free workers evenly.
        """
        share = sum([self._by_pool[pool] for pool in waiting.pools]) // rivals
        workers = self._with_held(waiting, share, borrow=False) if waiting.held else ()
        workers = workers or self._fresh(waiting, share)
        if not workers and waiting.begun:
            workers = self._with_held(waiting, share, borrow=True)
        if workers and waiting.held:
            self._release(waiting)
        self.count -= len(workers)
        return workers

    def _with_held(self, waiting: Waiting, share: int, *, borrow: bool) -> tuple[str, ...]:
        """On a node with held workers: its own, free ones and, if it may borrow, those of requests behind it."""
        best: tuple[int, int, PoolNode, list[str]] | None = None
        for place, held in self._held.items():
            own = self._own(waiting, place)
            if place[0] in waiting.pools and (own or borrow):
                others = [worker for worker, rank in held.items() if rank > _rank(waiting)] if borrow else []
                usable = own + self._workers[place] + others
                width = _widest(waiting, len(usable), share + len(own))
                if width and (best is None or (len(own), width) > best[:2]):
                    best = (len(own), width, place, usable[:width])
        if best is None:
            return ()
        _, _, place, chosen = best
        for worker in chosen:
            self._held[place].pop(worker, None)
        self._set_free(place, [worker for worker in self._workers[place] if worker not in chosen])
        return tuple(chosen)

    def _fresh(self, waiting: Waiting, share: int) -> tuple[str, ...]:
        """Free workers where the gang is widest; ties go to the preferred pool, then to the node that it fills best."""
        best = 0
        for candidate in waiting.pools:
            counts = self._buckets[candidate]
            if counts and (width := _widest(waiting, max(counts), share)) > best:
                best, buckets = width, counts
        if not best:
            return ()
        closest = max(buckets)
        for count in buckets:
            if best <= count < closest:
                closest = count
        place = next(iter(buckets[closest]))
        workers = self._workers[place]
        self._set_free(place, workers[best:])
        return tuple(workers[:best])

    def _release(self, waiting: Waiting) -> None:
        """Free the survivors that its new gang did not take."""
        for place, held in self._held.items():
            if freed := self._own(waiting, place):
                for worker in freed:
                    del held[worker]
                self._set_free(place, self._workers[place] + freed)

    def _own(self, waiting: Waiting, place: PoolNode) -> list[str]:
        """Survivors of its gang that are kept for it there."""
        held = self._held.get(place, {})
        return [worker for worker in waiting.held if held.get(worker) == _rank(waiting)]

    def hold_node_for(self, waiting: Waiting) -> None:
        """Keep one node's free workers for it: of the nodes that could run it once all are idle, the one with most."""
        best: tuple[int, PoolNode] | None = None
        for place in {**self._workers, **self._held}:
            usable = len(self._workers[place]) + (len(self._own(waiting, place)) if waiting.held else 0)
            better = best is None or (usable, place) > best
            if better and place[0] in waiting.pools and self._could_run(waiting, place):
                best = (usable, place)
        if best is not None:
            self.count -= len(self._workers[best[1]])
            self._set_free(best[1], [])

    def _could_run(self, waiting: Waiting, place: PoolNode) -> bool:
        """Whether the node has the workers, busy or idle, for the narrowest gang."""
        return waiting.widths[0] <= min(waiting.slots, self._alive[place])

    def _set_free(self, place: PoolNode, workers: list[str]) -> None:
        """Put the node into the bucket of how many it has now."""
        buckets, before, after = self._buckets[place[0]], len(self._workers.get(place, ())), len(workers)
        if before:
            del buckets[before][place]
            if not buckets[before]:
                del buckets[before]
        if after:
            buckets.setdefault(after, {})[place] = None
        self._by_pool[place[0]] += after - before
        self._workers[place] = workers


def _rank(waiting: Waiting) -> tuple[bool, int]:
    """Orders requests whose gangs broke: the one to serve first is the smallest."""
    return waiting.exploring, waiting.order


def _widest(waiting: Waiting, available: int, share: int) -> int:
    """The widest allowed width that is available and no more than a fair share; the narrowest if even that is more."""
    widest = 0
    for width in waiting.widths:
        if width > available or width > waiting.slots or (widest and width > share):
            break
        widest = width
    return widest
