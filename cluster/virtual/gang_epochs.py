"""Gangs at work on virtual workers: they take their steps together, and lose a member, form anew or end together.

Invariants: a step that was committed stays, and one in flight goes with any member of its gang; only the present
forming of a gang commits.
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
    """A gang at work: one forming of it, whose members take their steps together."""

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
    """The last step that the dispatcher was told of."""
    broken_s: float | None = None
    """When it lost a member: from then on it takes no step."""
    ends: Alarm | None = None

    def steps_by(self, now_s: float) -> int:
        """Steps committed, those found included."""
        until_s = now_s if self.broken_s is None else min(now_s, self.broken_s)
        taken = floor((until_s - self.from_s + SAME_MOMENT_S) / self.step_s) if self.step_s else self.work.steps
        return min(self.work.steps, self.first + max(0, taken))

    def boundary_s(self, now_s: float) -> float:
        """When the step in flight ends; now, where none is."""
        if not self.step_s or now_s <= self.from_s:
            return now_s
        in_flight = ceil((now_s - self.from_s - SAME_MOMENT_S) / self.step_s)
        return max(now_s, self.from_s + in_flight * self.step_s)


class GangEpochs:
    """The gangs at work, and what each request has committed.

    Args:
        run: name of the run, which the signals to workers carry.
        committed: steps of each request that a store holds from before.
        tell: is given each event for the dispatcher.
        epoch: the latest forming of a gang, as the dispatcher counts.
        finish: members' tasks have their results.
        hand_back: a member gives its task back, without a result.
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
        """Of each gang at work."""
        self._earlier: deque[tuple[str, ...]] = deque()

    def forget_earlier(self) -> None:
        """A graph is done: nobody asks again for the requests of those before the two last, one of which may be a
        validation between an iteration and the one that goes on with what it began."""
        if len(self._earlier) > 1:
            for request in self._earlier.popleft():
                self.committed.pop(request, None)
        self._earlier.append(tuple(self.committed))

    def begin(self, forming: GangEpoch) -> None:
        self.all[forming.name] = forming
        for worker in forming.members.values():
            worker.gang = forming.name
        work, begun = forming.work, forming.first
        end_s = forming.from_s + (work.steps - begun) * forming.step_s
        self._clock.together(forming.from_s, self._resumed, forming)
        if begun < work.steps and (forming.width > 1 or forming.epoch > 1 or self._messages.are_late):
            # of a worker at a fresh request nobody asks when it took its first step
            self._clock.together(forming.from_s + forming.step_s, self._stepped, forming)
        forming.ends = self._clock.together(end_s, self._done, forming)
        for key, worker in forming.members.items():
            if key not in worker.running:
                self.halt(forming)  # the others wait for it

    def of(self, worker: VirtualWorker) -> list[GangEpoch]:
        """The one that it is a member of, if any."""
        forming = self.all.get(worker.gang)
        return [forming] if forming and worker in forming.members.values() else []

    def tell_steps(self, gang_epochs: Iterable[GangEpoch]) -> None:
        """How far they are, of those of which the dispatcher does not know."""
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
        """They say with which step they begin, or which one they have just taken."""
        steps = [(forming, forming.first if resumed else forming.told) for forming in gang_epochs]
        if self._messages.are_late:
            for forming, step in steps:
                self._messages.send_beat(self._tell_beat, forming, step, resumed)
        elif steps:
            beats = tuple([self._beat_of(forming, step, resumed) for forming, step in steps])
            self._tell(GangBeats(at_s=self._clock.now_s, beats=beats))

    def _tell_beat(self, forming: GangEpoch, step: int, resumed: bool) -> None:
        self._tell(self._beat_of(forming, step, resumed))

    def _beat_of(self, forming: GangEpoch, step: int, resumed: bool) -> GangBeat:
        return GangBeat(
            at_s=self._clock.now_s,
            gang=forming.name,
            epoch=forming.epoch,
            step=step,
            steps=forming.work.steps,
            resumed=resumed,
        )

    def commit(self, forming: GangEpoch) -> None:
        """What it has done so far stays."""
        latest = self._epoch(forming.name)
        assert forming.epoch == latest, f"{forming.name}: epoch {forming.epoch} commits, and epoch {latest} was formed"
        steps = forming.steps_by(self._clock.now_s)
        self.committed[forming.work.request] = max(steps, self.committed.get(forming.work.request, 0))

    def _done(self, gang_epochs: Sequence[GangEpoch]) -> None:
        self._end([forming for forming in gang_epochs if self._is_current(forming)])

    def _end(self, gang_epochs: Sequence[GangEpoch]) -> None:
        """They are over, and their members' tasks have results."""
        for forming in gang_epochs:
            self.commit(forming)
        self.tell_steps(gang_epochs)
        for forming in gang_epochs:
            self.dissolve(forming)
        self._finish(member for forming in gang_epochs for member in forming.members.items())

    def dissolve(self, forming: GangEpoch) -> None:
        """It is over."""
        if forming.ends:
            forming.ends.cancel()
        self.all.pop(forming.name, None)

    def forget_empty(self) -> None:
        """A worker is gone, and may have been the last member of some."""
        for name in [name for name, forming in self.all.items() if not forming.members]:
            del self.all[name]

    def halt(self, forming: GangEpoch) -> None:
        """A member is gone, or frozen: the others wait for it in the step in flight."""
        if forming.broken_s is None:
            self.commit(forming)
            self.tell_steps([forming])
            forming.broken_s = self._clock.now_s
            if forming.ends:
                forming.ends.cancel()

    def call_off(self, gang: str, epoch: int, address: str) -> None:
        """The member gives its shard back at once."""
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
        """It forms anew after the step in flight."""
        forming = self.all.get(gang)
        if forming and forming.epoch == epoch:
            self.end_at_boundary(forming)

    def end_at_boundary(self, forming: GangEpoch) -> None:
        """The step in flight is the last of this forming, if it is not the last of all."""
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
        """Exploration is closed: the step in flight is the last."""
        self._clock.together(forming.boundary_s(self._clock.now_s), self._drop, forming)

    def _drop(self, gang_epochs: Sequence[GangEpoch]) -> None:
        """All members leave together; whoever was not told yet hears of it from those who were."""
        now_s, asked = self._clock.now_s, dict.fromkeys(gang_epochs)  # for each member once
        dropped = [each for each in asked if self._is_current(each) and each.steps_by(now_s) < each.work.steps]
        for forming in dropped:
            closed = max(worker.signals.closed(self._run) for worker in forming.members.values())
            for worker in forming.members.values():
                worker.signals.obey(orders.CloseExploration(run=self._run, iteration=closed))
        self._end(dropped)
