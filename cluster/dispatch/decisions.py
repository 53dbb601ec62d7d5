"""Decides what is to be done now: who is dismissed, launched, scored, trained or formed anew, each with its cause.

A decision looks at all that waits, whatever happened last. `dispatcher` notes what happens in the `State`; this reads
it, and notes in it what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter

from cluster.dispatch.events import Dismiss, Dismissals, Instruction, Key, Launch, LaunchedShard, Regroup, Score, Train
from cluster.dispatch.request_state import TRAINING, RequestState
from cluster.dispatch.state import State, Task
from spotlight.plan.offload import PhaseDecision
from spotlight.plan.placement import View, Waiting, plan, widen
from spotlight.records import Placement, Surplus

AHEAD_IS_OVER = "training has ended, and it goes on in the next iteration"


class Decisions:
    """What follows from a state.

    Args:
        state: read, and changed where something is decided.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def decide(self, at_s: float) -> Iterator[Instruction]:
        """All that is to be done now."""
        state = self._state
        state.decided_s = at_s
        state.roster.rise(at_s)
        for request in list(state.index.over.values()):
            yield from self._dismiss(request, at_s)
        yield from self._score()
        if state.roster.idle or state.index.rollouts_reserved:
            yield from self._hand_out(at_s)
        yield from self._make_room(at_s)

    def _hand_out(self, at_s: float) -> Iterator[Instruction]:
        """Give idle workers what they can do."""
        state = self._state
        phase = state.phase(at_s)
        if "reserved" not in phase.pools and state.index.rollouts_reserved and state.rules.moves:
            yield from self._move_rollouts(at_s)
        yield from self._explore_first(phase, at_s)
        yield from self._train(phase)
        if state.ready and state.index.rollouts_waiting:  # rollouts before gradients, and these before what can wait
            yield from self._place(phase, at_s, lambda request: not request.can_wait)
            yield from self._train(state.phase(at_s))
        yield from self._place(phase, at_s)
        yield from self._widen(at_s)

    def _explore_first(self, phase: PhaseDecision, at_s: float) -> Iterator[Instruction]:
        """Begin what is to be explored before gradients are computed, once no rollout waits."""
        state = self._state
        if not (state.rules.explored_first and state.ready) or state.index.rollouts_waiting:
            return
        lost = sum(request.exploring for request in state.index.broken.values())
        left = (state.rules.explored_first - state.explored[iteration] for iteration in state.index.explored_for())
        fresh = max([0, *left])

        def is_first(request: RequestState) -> bool:
            return request.exploring and (fresh > 0 or request.epoch > 0)

        yield from self._place(phase, at_s, is_first, most=lost + fresh)

    def _place(
        self,
        phase: PhaseDecision,
        at_s: float,
        which: Callable[[RequestState], bool] = lambda _: True,
        *,
        most: int | None = None,
    ) -> Iterator[Instruction]:
        """Admit gangs for waiting requests.

        Args:
            which: whether a request may be admitted now; requests of a kind are alike.
            most: how many may be.
        """
        state = self._state
        if state.roster.idle and state.index.any_waits:
            for launch in islice(plan(self._view(phase, which)), most):
                yield self._launch(state.requests[launch.request], launch.workers, at_s)

    def _make_room(self, at_s: float) -> Iterator[Instruction]:
        """Take spot workers from rollouts of the next iteration, for training or rollouts of this one that wait.

        Only for what a single worker can run: what needs a gang might wait for ever. And only for rollouts that lost
        their worker: they are placed before fresh ones, which would not get the worker.
        """
        state = self._state
        if not state.ahead:
            return
        phase = state.phase(at_s)
        wanted = self._lost_rollouts(phase)
        if state.ready and "spot" in phase.trainers:
            wanted += sum("spot" in state.training_pools(task) for task in state.unbegun(state.ready))
        at_work = [request for request in state.ahead.values() if request.members]
        at_work.sort(key=lambda request: not (request.planned or request.breaking))  # first those that leave anyway
        for request in at_work:
            if wanted <= 0:
                break
            wanted -= len(set(request.workers) - state.roster.leaving)
            if not (request.planned or request.breaking):
                yield from self.regroup(request, at_s, "put off", "this iteration waits for a worker")

    def _lost_rollouts(self, phase: PhaseDecision) -> int:
        """Rollouts of this iteration that lost their worker, and may go on on a spot one."""
        state = self._state
        if not (state.rules.moves and state.index.rollouts_waiting):
            return 0
        lost = (request for request in state.index.broken.values() if request.windowed and request.widths[0] == 1)
        return sum("spot" in state.pools_of(request, phase) for request in lost)

    def _dismiss(self, request: RequestState, at_s: float) -> Iterator[Instruction]:
        """End the shards of a request that have nothing to do, on the worker beside the scheduler."""
        head = self._state.roster.head
        if head is None:
            return
        gated = request.gated
        if gated and gated[0][0] == 0:
            yield self._dismiss_first(request, head.address, at_s)
            gated = gated[1:]
        tell, cause = Surplus(), "its request needs it no more"
        for shard, key in gated:
            if key in request.alike:  # one instruction for all of these, which are the last
                keys, at = request.alike, head.address
                yield Dismissals(keys=keys, address=at, gang=request.name, first=shard, tell=tell, cause=cause)
                return
            yield Dismiss(key=key, address=head.address, gang=request.name, shard=shard, tell=tell, cause=cause)

    def _dismiss_first(self, request: RequestState, address: str, at_s: float) -> Dismiss:
        """The first shard returns the request's result, and is told what became of it."""
        tell: Surplus | int | None = Surplus()
        cause = "its request needs it no more"
        if request.quarantined:
            tell, cause = request.preemptions, f"its request was preempted {request.fruitless} times without a new step"
            self._state.journal.event(at_s, "quarantined", request=request)
        elif self._state.is_called_off(request):
            tell, cause = None, AHEAD_IS_OVER if request.ahead else "exploration is closed"
        return Dismiss(key=request.keys[0], address=address, gang=request.name, shard=0, tell=tell, cause=cause)

    def _move_rollouts(self, at_s: float) -> Iterator[Instruction]:
        """Have rollouts leave the reserved workers, whose window is over."""
        for request in self._state.index.with_gang():
            if request.windowed and request.pool == "reserved" and not (request.breaking or request.planned):
                yield from self.regroup(request, at_s, "moves", "the rollout window of reserved workers is over")

    def _score(self) -> Iterator[Instruction]:
        """Begin scoring, first what training waits for; what was called off ends on the worker beside the scheduler."""
        state = self._state
        head, free = state.roster.head, sorted(state.roster.idle_scorers.values(), key=attrgetter("worker"))
        for task in state.unbegun(state.unwanted) if head and state.unwanted else ():
            assert head
            state.assign(task.key, head.address)
            cause = "exploration is closed"
            yield Dismiss(key=task.key, address=head.address, gang="", shard=0, tell=None, cause=cause)
        if not (free and state.unscored):
            return
        waiting = state.unbegun(state.unscored)
        for task, idle in zip(nsmallest(len(free), waiting, key=_scoring_order), free, strict=False):
            address = state.roster.by_name[idle.worker].address
            state.assign(task.key, address)
            yield Score(key=task.key, address=address, cause=f"it is free, and {len(waiting)} wait to be scored")

    def _train(self, phase: PhaseDecision) -> Iterator[Instruction]:
        """Begin updates that are ready, then gradients and their sums, as many as there are free workers.

        An update goes to the worker that took the one before, if it is free; gradients go to that worker last, but for
        those that lost their engines.
        """
        state = self._state
        if not (state.ready and state.roster.idle):
            return
        free = sorted(
            state.roster.idle.values(),
            key=lambda idle: (
                *(idle.pool, state.roster.by_name[idle.worker].engines_lost),
                *(idle.worker == state.optimizer_worker, idle.worker),
            ),
        )
        for task in sorted(state.unbegun(state.ready), key=_training_order):
            pools = set(phase.trainers).intersection(state.training_pools(task))
            found, cause = next((each for each in free if each.pool in pools), None), "it is free"
            if found is None:
                continue
            if task.label.pool == "update":
                able = (each for each in free if each.pool in pools and each.worker == state.optimizer_worker)
                if has_optimizer := next(able, None):
                    found, cause = has_optimizer, "it has the optimizer's state"
                state.optimizer_worker = found.worker
            free.remove(found)
            if found.pool not in TRAINING[task.label.pool]:
                cause = f"{task.losses} workers left before it was done"
            address = state.roster.by_name[found.worker].address
            state.assign(task.key, address)
            yield Train(key=task.key, address=address, cause=cause)

    def _view(self, phase: PhaseDecision, which: Callable[[RequestState], bool]) -> View:
        """What the plan looks at, without what cannot change it: requests and workers with no match, ends of queues.

        Fresh requests of a kind are alike. With more than twice as many of them as there are idle workers each gets
        the narrowest gang, however many more there are, and the last ones get none.
        """
        state = self._state
        enough = 2 * len(state.roster.idle) + 1
        pools = {worker.pool for worker in state.roster.idle.values()}
        names = [name for name, request in state.index.broken.items() if which(request)]
        for queue in state.index.queues.values():
            first = state.requests[queue[0][1]]
            if which(first) and not pools.isdisjoint(state.pools_of(first, phase)):
                names += (name for _, name in islice(queue, enough))
        waiting = tuple(self._waiting(state.requests[name], phase) for name in names)
        wanted = {pool for request in waiting for pool in request.pools}
        idle = tuple(worker for worker in state.roster.idle.values() if worker.pool in wanted)
        return View(idle=idle, waiting=waiting, alive=state.roster.alive)

    def _waiting(self, request: RequestState, phase: PhaseDecision) -> Waiting:
        pools = self._state.pools_of(request, phase)
        moved = request.windowed and pools != request.pools  # its survivors are where it may not run
        return request.waiting(pools, held=() if moved else request.held)

    def _launch(self, request: RequestState, names: Sequence[str], at_s: float) -> Launch:
        """Admit a whole gang."""
        state = self._state
        workers = [state.roster.by_name[name] for name in names]
        chosen = list(zip(request.gated, [worker.address for worker in workers], strict=False))
        members = {key: address for (_, key), address in chosen}
        cause = f"forming {request.epoch + 1}: {len(workers)} of {len(state.roster.idle)} idle workers"
        if request.exploring and not request.epoch:
            state.explored[request.iteration] += 1
        request.form(members, {w.address: w.name for w in workers}, workers[0].idle.pool, workers[0].idle.node)
        for key, address in members.items():
            state.assign(key, address)
        state.file(request)
        state.journal.gang_event(at_s, "formed", request)
        launched = [
            LaunchedShard(
                key=key,
                shard=shard,
                address=address,
                place=Placement(gang=request.name, epoch=request.epoch, rank=rank, width=len(members)),
            )
            for rank, ((shard, key), address) in enumerate(chosen)
        ]
        return Launch(gang=request.name, members=tuple(launched), cause=cause)

    def _widen(self, at_s: float) -> Iterator[Instruction]:
        """Gangs beside idle workers that nobody waits for form anew, wider, if that pays."""
        state = self._state
        running = tuple(request.running(len(request.members) + request.parked, at_s) for request in state.beside_idle())
        if not running:
            return
        for name in widen(View(idle=tuple(state.roster.idle.values()), waiting=(), running=running)):
            yield from self.regroup(state.requests[name], at_s, "regroup", "idle workers make it wider")

    def regroup(self, request: RequestState, at_s: float, event: str, cause: str) -> Iterator[Instruction]:
        """Have a gang form anew at its next step boundary: wider, or elsewhere."""
        request.planned = True
        self._state.journal.event(at_s, event, request=request)
        for address in request.members.values():
            yield Regroup(gang=request.name, epoch=request.epoch, address=address, cause=cause)


def _training_order(task: Task) -> tuple[bool, int, Key]:
    """Updates first."""
    return task.label.pool != "update", len(task.key[0]), task.key


def _scoring_order(task: Task) -> tuple[bool, int, int, Key]:
    """What training waits for, then what was submitted first: layers of later rounds have no shorter names."""
    return task.explores, task.label.iteration, len(task.key[0]), task.key
