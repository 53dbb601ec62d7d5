"""What follows, given what is known: who is dismissed, launched, scored, trained or formed anew, each with its cause.

A decision looks at all that waits, whatever happened last. What happens is noted in `dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Decisions(State):
    """What follows from a state, and the state that follows from that."""

    def _decide(self, at_s: float) -> Iterator[Instruction]:
        """All that is to be done now."""
        self._decided_s = at_s
        for gang in list(self._requests.over.values()):
            yield from self._dismiss(gang, at_s)
        yield from self._score()
        if self._roster.idle or self._requests.rollouts_reserved:
            yield from self._hand_out(at_s)
        yield from self._make_room(at_s)

    def _hand_out(self, at_s: float) -> Iterator[Instruction]:
        """Whatever idle workers can do."""
        phase = self._phase(at_s)
        if "reserved" not in phase.pools and self._requests.rollouts_reserved and self.rules.moves:
            yield from self._move_rollouts(at_s)
        yield from self._train(phase)
        if self._ready and self._requests.rollouts_waiting:  # rollouts, then gradients, then what can wait
            yield from self._place(phase, at_s, everything=False)
            yield from self._train(self._phase(at_s))
        yield from self._place(phase, at_s)
        yield from self._train(self._phase(at_s))  # perhaps no rollout waits any more
        yield from self._widen(at_s)

    def _place(self, phase: PhaseDecision, at_s: float, *, everything: bool = True) -> Iterator[Instruction]:
        """Admit gangs for what waits; but for what can wait, where that is to wait longer."""
        if self._roster.idle and self._requests.any_waits:
            for launch in plan(self._view(phase, everything=everything)):
                yield self._launch(self._gangs[launch.request], launch.workers, at_s)

    def _make_room(self, at_s: float) -> Iterator[Instruction]:
        """Training that waits, and rollouts that lost their worker, get spot workers that roll out for the next
        iteration, where that can go on.

        Single workers only: who waits for a gang of them might never get it, since a request that lost its gang is
        placed before fresh ones. So no fresh rollout is looked at, either.
        """
        if not self._ahead:
            return
        phase = self._phase(at_s)
        wanted = self._lost_rollouts(phase)
        if self._ready and "spot" in phase.trainers:
            wanted += sum("spot" in self._trainers(task) for task in self._unbegun(self._ready))
        at_work = [gang for gang in self._ahead.values() if gang.members]
        for gang in sorted(at_work, key=lambda gang: not (gang.planned or gang.breaking)):  # those that leave already
            if wanted <= 0:
                break
            wanted -= len(set(gang.workers) - self._roster.leaving)
            if not (gang.planned or gang.breaking):
                yield from self._regroup(gang, at_s, "put off", "this iteration waits for a worker")

    def _lost_rollouts(self, phase: PhaseDecision) -> int:
        """Rollouts of this iteration that lost their worker, and may go on on a spot one."""
        if not (self.rules.moves and self._requests.rollouts_waiting):
            return 0
        lost = (gang for gang in self._requests.broken.values() if gang.windowed and gang.widths[0] == 1)
        return sum("spot" in self._pools_of(gang, phase) for gang in lost)

    def _dismiss(self, gang: RequestState, at_s: float) -> Iterator[Instruction]:
        head = self._roster.head
        if head is None:
            return
        gated = gang.gated
        if gated and gated[0][0] == 0:
            yield self._dismiss_first(gang, head.address, at_s)
            gated = gated[1:]
        tell, cause = Surplus(), "its request needs it no more"
        for shard, key in gated:
            if key in gang.alike:  # one instruction for all of these, which are the last
                alike = gang.alike
                yield Dismissals(keys=alike, address=head.address, gang=gang.name, first=shard, tell=tell, cause=cause)
                return
            yield Dismiss(key=key, address=head.address, gang=gang.name, shard=shard, tell=tell, cause=cause)

    def _dismiss_first(self, gang: RequestState, address: str, at_s: float) -> Dismiss:
        """The first shard returns the request's result, and is told what became of it."""
        tell: Surplus | int | None = Surplus()
        cause = "its request needs it no more"
        if gang.quarantined:
            tell, cause = gang.preemptions, f"its request was preempted {gang.fruitless} times without a new step"
            self.journal.event(at_s, "quarantined", gang=gang)
        elif self._called_off(gang):
            tell, cause = None, AHEAD_IS_OVER if gang.ahead else "exploration is closed"
        return Dismiss(key=gang.keys[0], address=address, gang=gang.name, shard=0, tell=tell, cause=cause)

    def _move_rollouts(self, at_s: float) -> Iterator[Instruction]:
        for gang in self._requests.with_gang():
            if gang.windowed and gang.pool == "reserved" and not (gang.breaking or gang.planned):
                yield from self._regroup(gang, at_s, "moves", "the rollout window of reserved workers is over")

    def _score(self) -> Iterator[Instruction]:
        """Let scoring go, what training waits for first; what was called off ends beside the scheduler."""
        head, free = self._roster.head, sorted(self._roster.idle_scorers.values(), key=attrgetter("worker"))
        for task in self._unbegun(self._unwanted) if head and self._unwanted else ():
            assert head
            self._burden(task.key, head.address)
            cause = "exploration is closed"
            yield Dismiss(key=task.key, address=head.address, gang="", shard=0, tell=None, cause=cause)
        if not (free and self._unscored):
            return
        waiting = self._unbegun(self._unscored)
        for task, idle in zip(nsmallest(len(free), waiting, key=_scoring_order), free, strict=False):
            address = self._roster.by_name[idle.worker].address
            self._burden(task.key, address)
            yield Score(key=task.key, address=address, cause=f"it is free, and {len(waiting)} wait to be scored")

    def _train(self, phase: PhaseDecision) -> Iterator[Instruction]:
        """Let updates that are ready go, then gradients and their sums, as many as there are free workers.

        An update goes to the worker that took the one before, if it is free, and gradients to that one last.
        """
        if not (self._ready and self._roster.idle):
            return
        free = sorted(
            self._roster.idle.values(), key=lambda idle: (idle.pool, idle.worker == self._trainer, idle.worker)
        )
        for task in sorted(self._unbegun(self._ready), key=_training_order):
            pools, is_update = set(phase.trainers).intersection(self._trainers(task)), task.label.pool == "training"
            able = (each for each in free if each.pool in pools and (not is_update or each.worker == self._trainer))
            found, cause = next(able, None), "it has the optimizer's state" if is_update else "it is free"
            if found is None and is_update:
                found, cause = next((each for each in free if each.pool in pools), None), "it is free"
            if found is None:
                continue
            free.remove(found)
            self._trainer = found.worker if is_update else self._trainer
            if found.pool not in TRAINING[task.label.pool]:
                cause = f"{task.losses} workers left before it was done"
            address = self._roster.by_name[found.worker].address
            self._burden(task.key, address)
            yield Train(key=task.key, address=address, cause=cause)

    def _view(self, phase: PhaseDecision, *, everything: bool) -> View:
        """What the plan looks at, less what could not change it: those who cannot use each other, and the far queue.

        Fresh requests of a kind are alike. With more than twice as many of them as there are idle workers each gets
        the narrowest gang, however many more there are, and the last ones get none.
        """
        enough = 2 * len(self._roster.idle) + 1
        pools = {worker.pool for worker in self._roster.idle.values()}
        names = [name for name, gang in self._requests.broken.items() if everything or not gang.can_wait]
        for queue in self._requests.queues.values():
            first = self._gangs[queue[0][1]]
            if (everything or not first.can_wait) and not pools.isdisjoint(self._pools_of(first, phase)):
                names += (name for _, name in islice(queue, enough))
        waiting = tuple(self._waiting(self._gangs[name], phase) for name in names)
        wanted = {pool for request in waiting for pool in request.pools}
        idle = tuple(worker for worker in self._roster.idle.values() if worker.pool in wanted)
        return View(idle=idle, waiting=waiting, alive=self._roster.alive)

    def _waiting(self, gang: RequestState, phase: PhaseDecision) -> Waiting:
        pools = self._pools_of(gang, phase)
        moved = gang.windowed and pools != gang.pools  # its survivors are where it may not run
        return gang.waiting(pools, held=() if moved else gang.held)

    def _launch(self, gang: RequestState, names: Sequence[str], at_s: float) -> Launch:
        """Admit a whole gang."""
        workers = [self._roster.by_name[name] for name in names]
        chosen = list(zip(gang.gated, [worker.address for worker in workers], strict=False))
        members = {key: address for (_, key), address in chosen}
        cause = f"forming {gang.epoch + 1}: {len(workers)} of {len(self._roster.idle)} idle workers"
        gang.form(members, {w.address: w.name for w in workers}, workers[0].idle.pool, workers[0].idle.node)
        for key, address in members.items():
            self._burden(key, address)
        self._file(gang)
        self.journal.gang_event(at_s, "formed", gang)
        launched = [
            LaunchedShard(
                key=key,
                shard=shard,
                address=address,
                place=Placement(gang=gang.name, epoch=gang.epoch, rank=rank, width=len(members)),
            )
            for rank, ((shard, key), address) in enumerate(chosen)
        ]
        return Launch(gang=gang.name, members=tuple(launched), cause=cause)

    def _widen(self, at_s: float) -> Iterator[Instruction]:
        """Gangs beside idle workers that nobody waits for form anew, wider, if that pays."""
        running = tuple(gang.running(len(gang.members) + gang.parked, at_s) for gang in self._beside_idle())
        for name in widen(View(idle=tuple(self._roster.idle.values()), waiting=(), running=running)) if running else ():
            yield from self._regroup(self._gangs[name], at_s, "regroup", "idle workers make it wider")

    def _regroup(self, gang: RequestState, at_s: float, event: str, cause: str) -> Iterator[Instruction]:
        """Have a gang form anew at its next step boundary: wider, or elsewhere."""
        gang.planned = True
        self.journal.event(at_s, event, gang=gang)
        for address in gang.members.values():
            yield Regroup(gang=gang.name, epoch=gang.epoch, address=address, cause=cause)


def _training_order(task: Task) -> tuple[bool, int, Key]:
    """Updates first."""
    return task.label.pool != "training", len(task.key[0]), task.key


def _scoring_order(task: Task) -> tuple[bool, int, int, Key]:
    """What training waits for, then what was submitted first: layers of later rounds have no shorter names."""
    return task.explores, task.label.iteration, len(task.key[0]), task.key
