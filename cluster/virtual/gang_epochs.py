"""Gangs at work on virtual workers: their members take steps together, and form anew or end together after a loss.

Invariants: a committed step stays, and the step in flight is lost with any member of its gang; only the present epoch
of a gang commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor

from cluster.dispatch.events import Event, GangBeat, GangBeats, Key
from cluster.virtual.clock import SAME_MOMENT_S, Alarm, VirtualClock
from cluster.virtual.messages import Messages
from cluster.virtual.timing import Denoising
from cluster.virtual.workers import VirtualWorker
from spotlight.device import signals as orders


@dataclass(slots=True, kw_only=True, eq=False)
class GangEpoch:
    """One epoch of a gang at work, whose members take their steps together."""

    name: str
    epoch: int
    work: Denoising
    members: dict[Key, VirtualWorker]
    step_s: float
    first: int
    """Steps that were committed when it began."""
    from_s: float
    """When its first step begins."""
    explores: bool
    width: int
    told: int = 0
    """The last step that was reported to the dispatcher."""
    broken_s: float | None = None
    """When it lost a member: from then on it takes no step."""
    ends: Alarm | None = None

    def steps_by(self, now_s: float) -> int:
        """Steps committed by ``now_s``, with those found at its start."""
        until_s = now_s if self.broken_s is None else min(now_s, self.broken_s)
        taken = floor((until_s - self.from_s + SAME_MOMENT_S) / self.step_s) if self.step_s else self.work.steps
        return min(self.work.steps, self.first + max(0, taken))

    def taken_s(self, step: int) -> float:
        """When it had taken a step, counted from 1."""
        return self.from_s + (step - self.first) * self.step_s

    def boundary_s(self, now_s: float) -> float:
        """When the step in flight ends; ``now_s`` if there is none."""
        if not self.step_s or now_s <= self.from_s:
            return now_s
        in_flight = ceil((now_s - self.from_s - SAME_MOMENT_S) / self.step_s)
        return max(now_s, self.from_s + in_flight * self.step_s)


class GangEpochs:
    """The gangs at work, and what each request has committed.

    Args:
        run: name of the run, which the signals to workers carry.
        committed: steps of each request that a store holds already.
        tell: called with each event for the dispatcher.
        epoch: returns the latest epoch of a gang, as the dispatcher counts.
        finish: called when members' tasks have their results.
        hand_back: called when a member gives its task back, without a result.
    """

    def __init__(
        self,
        run: str,
        clock: VirtualClock,
        messages: Messages,
        committed: dict[str, int],
        *,
        tell: Callable[[Event], None],
        epoch: Callable[[str], int],
        finish: Callable[[Iterable[tuple[Key, VirtualWorker]]], None],
        hand_back: Callable[[Key, VirtualWorker], None],
    ) -> None:
        self._run, self._clock, self._messages, self.committed = run, clock, messages, committed
        self._tell, self._epoch, self._finish, self._hand_back = tell, epoch, finish, hand_back
        self.all: dict[str, GangEpoch] = {}
        """{gang: its epoch at work}"""
        self._earlier: deque[tuple[str, ...]] = deque()

    def forget_earlier(self) -> None:
        """A graph is done: forget the requests of all graphs but the last two. A later graph may still use those: one
        of the two may be a validation between an iteration and the next, which resumes what the first began."""
        if len(self._earlier) > 1:
            for request in self._earlier.popleft():
                self.committed.pop(request, None)
        self._earlier.append(tuple(self.committed))

    def begin(self, forming: GangEpoch) -> None:
        self.all[forming.name] = forming
        for worker in forming.members.values():
            worker.gang = forming.name
        work, begun = forming.work, forming.first
        self._clock.together(forming.from_s, self._resumed, forming)
        if begun < work.steps and (forming.width > 1 or forming.epoch > 1 or self._messages.are_late):
            # the first step of a single worker at a fresh request is not needed
            self._clock.together(forming.taken_s(begun + 1), self._stepped, forming)
        known = min(self.committed.get(work.request, 0), work.steps)
        if known > begun:  # if it may not resume: what it does until then is done again
            self._clock.together(forming.taken_s(known), self._stepped, forming)
        forming.ends = self._clock.together(forming.taken_s(work.steps), self._done, forming)
        for key, worker in forming.members.items():
            if key not in worker.running:
                self.halt(forming)  # the others wait for it

    def of(self, worker: VirtualWorker) -> list[GangEpoch]:
        """The gang that a worker is a member of, if any."""
        forming = self.all.get(worker.gang)
        return [forming] if forming and worker in forming.members.values() else []

    def tell_steps(self, gang_epochs: Iterable[GangEpoch]) -> None:
        """Report steps that the dispatcher does not know of yet."""
        told: list[GangEpoch] = []
        for forming in gang_epochs:
            step = forming.steps_by(self._clock.now_s)
            if step > max(forming.told, forming.first):
                forming.told = step
                told.append(forming)
        self._beat(told, resumed=False)

    def _is_current(self, forming: GangEpoch) -> bool:
        return self.all.get(forming.name) is forming and forming.broken_s is None

    def _resumed(self, gang_epochs: Sequence[GangEpoch]) -> None:
        self._beat([forming for forming in gang_epochs if self._is_current(forming)], resumed=True)

    def _stepped(self, gang_epochs: Sequence[GangEpoch]) -> None:
        self.tell_steps(forming for forming in gang_epochs if self._is_current(forming))

    def _beat(self, gang_epochs: Sequence[GangEpoch], *, resumed: bool) -> None:
        """Report the step at which gangs begin, or the one that they took last, by the time at which they had."""
        steps = [(forming, forming.first if resumed else forming.told) for forming in gang_epochs]
        if self._messages.are_late:
            for forming, step in steps:
                self._messages.send_beat(self._tell_beat, forming, step, resumed)
        elif steps:
            now_s = self._clock.now_s
            beats = [
                self._beat_of(forming, step, resumed, min(now_s, forming.taken_s(step))) for forming, step in steps
            ]
            self._tell(GangBeats(at_s=now_s, beats=tuple(beats)))

    def _tell_beat(self, forming: GangEpoch, step: int, resumed: bool) -> None:
        self._tell(self._beat_of(forming, step, resumed, self._clock.now_s))

    def _beat_of(self, forming: GangEpoch, step: int, resumed: bool, at_s: float) -> GangBeat:
        return GangBeat(
            at_s=at_s,
            gang=forming.name,
            epoch=forming.epoch,
            step=step,
            steps=forming.work.steps,
            resumed=resumed,
        )

    def commit(self, forming: GangEpoch) -> None:
        """Record the steps that a gang has done so far as committed."""
        latest = self._epoch(forming.name)
        assert forming.epoch == latest, f"{forming.name}: epoch {forming.epoch} commits, and epoch {latest} was formed"
        steps = forming.steps_by(self._clock.now_s)
        self.committed[forming.work.request] = max(steps, self.committed.get(forming.work.request, 0))

    def _done(self, gang_epochs: Sequence[GangEpoch]) -> None:
        self._end([forming for forming in gang_epochs if self._is_current(forming)])

    def _end(self, gang_epochs: Sequence[GangEpoch]) -> None:
        """End gangs whose work is done; their members' tasks have results."""
        for forming in gang_epochs:
            self.commit(forming)
        self.tell_steps(gang_epochs)
        for forming in gang_epochs:
            self.dissolve(forming)
        self._finish(member for forming in gang_epochs for member in forming.members.items())

    def dissolve(self, forming: GangEpoch) -> None:
        """End a gang without results."""
        if forming.ends:
            forming.ends.cancel()
        self.all.pop(forming.name, None)

    def forget_empty(self) -> None:
        """Forget gangs without members, after a worker is gone."""
        for name in [name for name, forming in self.all.items() if not forming.members]:
            del self.all[name]

    def halt(self, forming: GangEpoch) -> None:
        """Halt a gang of which a member is gone, or frozen: the others wait for it in the step in flight."""
        if forming.broken_s is None:
            self.commit(forming)
            self.tell_steps([forming])
            forming.broken_s = self._clock.now_s
            if forming.ends:
                forming.ends.cancel()

    def call_off(self, gang: str, epoch: int, address: str) -> None:
        """Have a member give its shard back at once."""
        forming = self.all.get(gang)
        if forming is None or forming.epoch != epoch:
            return
        self.halt(forming)
        for key, worker in list(forming.members.items()):
            if worker.address == address and not worker.frozen:
                del forming.members[key]
                self._hand_back(key, worker)
        if not forming.members:
            self.dissolve(forming)

    def regroup(self, gang: str, epoch: int) -> None:
        """Form a gang anew after the step in flight."""
        forming = self.all.get(gang)
        if forming and forming.epoch == epoch:
            self.end_at_boundary(forming)

    def end_at_boundary(self, forming: GangEpoch) -> None:
        """End an epoch after the step in flight, unless that is the request's last step."""
        if forming.broken_s is None:
            self._clock.at(forming.boundary_s(self._clock.now_s), self._end_forming, forming)

    def _end_forming(self, forming: GangEpoch) -> None:
        if self._is_current(forming) and forming.steps_by(self._clock.now_s) < forming.work.steps:
            self.commit(forming)
            self.tell_steps([forming])
            self.dissolve(forming)
            for key, worker in forming.members.items():
                self._hand_back(key, worker)

    def drop_at_boundary(self, forming: GangEpoch) -> None:
        """End a request of exploration after the step in flight."""
        self._clock.together(forming.boundary_s(self._clock.now_s), self._drop, forming)

    def _drop(self, gang_epochs: Sequence[GangEpoch]) -> None:
        """End gangs with all their members; members that were not told learn it from the others."""
        now_s, asked = self._clock.now_s, dict.fromkeys(gang_epochs)  # for each member once
        dropped = [each for each in asked if self._is_current(each) and each.steps_by(now_s) < each.work.steps]
        for forming in dropped:
            closed = max(worker.signals.closed(self._run) for worker in forming.members.values())
            for worker in forming.members.values():
                worker.signals.obey(orders.CloseExploration(run=self._run, iteration=closed))
        self._end(dropped)
