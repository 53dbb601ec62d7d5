"""A cluster without machines: workers, gangs and requests as discrete events; `placement.plan` says what runs where.

Pure: nothing sleeps, reads a clock or draws a random number. All events of one moment are applied before anything is
planned, so a wave of requests that ends together is planned together.

Invariants: a worker does one thing at a time; every request that is submitted ends once, done or dropped; work that
lost its gang goes back to the queue with the steps that were committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, islice
from math import ceil, floor
from typing import Any

from spotlight.plan.placement import Idle, Launch, Running, View, Waiting, plan, widen
from spotlight.records import Pool, Span, WorkerLife

SAME_MOMENT_S = 1e-6
"""Events closer than this are one moment: equal waves end together in spite of rounding."""
RETURNED = "+"
"""Between a worker's name and how often its place was taken: each stay has a name of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Workers that come and go together: a spot node, or one of its GPUs."""

    pool: Pool
    node: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take, and what a preemption costs."""

    step_s: Callable[[int, int], float]
    """``(samples, width)`` -> seconds of one denoising step."""
    launch_s: float
    """What a request costs beyond its steps."""
    recovery_s: float
    """For a broken gang to form anew."""
    startup_s: float
    """From the moment a worker is paid for until it can work."""
    resume: bool
    """Committed steps stay; else a request that lost its gang begins anew."""
    elastic: bool
    """Gangs may be widened while they run."""
    pays_start_up: bool = True
    """Whether the time until a worker can work is paid for."""
    form_s: float = 0.0
    """For the workers of a gang of several to find each other, at each launch."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A request on its way: how far it is, and who has it."""

    waiting: Waiting
    phase: str
    iteration: int
    samples: int
    steps: int
    score_s: float
    """Seconds that one worker of its gang takes to score its images."""
    payload: Any
    done: int = 0
    """Steps committed."""
    gang: tuple[_Worker, ...] = ()
    turn: int = 0
    """Counts launches, so that an event of an earlier one is known for what it is."""
    stopping: bool = False
    called_off: bool = False
    """Exploration whose time is over: it ends with the step in flight, or with its gang."""
    began_s: float = 0.0
    steps_from_s: float = 0.0
    """When the first step of this launch begins."""
    step_s: float = 0.0

    @property
    def denoised_s(self) -> float:
        """When its last step ends, if nothing comes between."""
        return self.steps_from_s + (self.steps - self.done) * self.step_s

    def steps_by(self, now_s: float) -> int:
        """Steps that this launch has finished."""
        finished = floor((now_s - self.steps_from_s + SAME_MOMENT_S) / self.step_s)
        return min(self.steps - self.done, max(0, finished))

    def boundary_s(self, now_s: float) -> float:
        """When the step in flight ends; now, where none is."""
        in_flight = ceil((now_s - self.steps_from_s - SAME_MOMENT_S) / self.step_s)
        return self.steps_from_s + in_flight * self.step_s if in_flight > 0 else now_s


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    name: str
    idle: Idle
    joined_s: float
    ready: bool = False
    leaving: bool = False
    """It was told that it goes: it gets nothing more to do."""
    work: Work | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Machines:
    """All workers and requests, and what will happen to them."""

    timing: Timing
    ended: Callable[[Work, bool], None]
    """Called with each request that is over, and whether it is done; else it was dropped."""
    now_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    preemptions: int = 0
    """Spot workers lost."""
    steps_lost: int = 0
    """Computed, and not committed or not kept."""
    changes: int = 0
    """Workers that came or went."""
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _idle: dict[str, _Worker] = field(default_factory=dict)
    _up: dict[Place, list[_Worker]] = field(default_factory=dict)
    _places: dict[str, list[Place]] = field(default_factory=dict)
    """Of each node, those that are up."""
    _ready: dict[Pool, dict[str, _Worker]] = field(default_factory=lambda: {"reserved": {}, "spot": {}})
    _sizes: dict[str, int] = field(default_factory=dict)
    """Ready workers on each node."""
    _visits: dict[Place, int] = field(default_factory=dict)
    _lives: list[WorkerLife] = field(default_factory=list)
    _fresh: dict[bool, deque[Work]] = field(default_factory=lambda: {False: deque(), True: deque()})
    """Requests that wait for their first gang; exploring ones apart."""
    _broken: dict[str, Work] = field(default_factory=dict)
    """Requests that wait for another gang."""
    _running: dict[str, Work] = field(default_factory=dict)
    _occupied: dict[str, tuple[list[_Worker], int, float]] = field(default_factory=dict)
    """By phase: a whole pool, the iteration, and since when."""
    _count: int = 0
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)

    # Time

    def at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call it then."""
        self._count += 1
        heappush(self._events, (max(at_s, self.now_s), self._count, call, arguments))

    def run(self, until_s: float, advance: Callable[[], object]) -> None:
        """Let time pass to ``until_s``, or until ``advance`` says that all is over or there is nothing left to happen.

        Args:
            advance: called at every moment at which something happened; submits what has become due.
        """
        while not advance():
            self._place()
            if not self._events or self._events[0][0] > until_s:
                self.now_s = until_s if self._events else self.now_s
                return
            self.now_s = self._events[0][0]
            while self._events and self._events[0][0] <= self.now_s + SAME_MOMENT_S:
                _, _, call, arguments = heappop(self._events)
                call(*arguments)

    # Workers

    def count(self, pool: Pool) -> int:
        """Workers of a pool that can work."""
        return len(self._ready[pool])

    def busy(self, pool: Pool) -> int:
        """Workers of a pool that have work."""
        return sum(name not in self._idle for name in self._ready[pool])

    def come(self, place: Place) -> None:
        """A place's workers are there from now on; they can work once they have started."""
        if place in self._up:
            return
        self._visits[place] = visit = self._visits.get(place, 0) + 1
        suffix = f"{RETURNED}{visit}" if visit > 1 else ""
        joined_s = self.now_s + (0.0 if self.timing.pays_start_up else self.timing.startup_s)
        workers = [
            _Worker(
                name=name + suffix,
                idle=Idle(worker=name + suffix, pool=place.pool, node=place.node),
                joined_s=joined_s,
            )
            for name in place.workers
        ]
        self._up[place] = workers
        self._places.setdefault(place.node, []).append(place)
        self.at(self.now_s + self.timing.startup_s, self._started, workers)

    def warn(self, place: Place) -> None:
        """A place's workers will go: they finish the step in flight and get nothing more to do."""
        for worker in self._up.get(place, ()):
            worker.leaving = True
            self._unready(worker)
            if worker.work:
                self.stop(worker.work)

    def go(self, place: Place) -> None:
        """A place's workers are gone, with the step that was in flight."""
        if place not in self._up:
            return
        workers = self._up.pop(place)
        self._places[place.node].remove(place)
        for work in {worker.work.waiting.id: worker.work for worker in workers if worker.work}.values():
            self._break(work, [worker for worker in work.gang if worker not in workers])
        for worker in workers:
            self._unready(worker)
            if worker.joined_s <= self.now_s:
                self.preemptions += 1
                self._lives.append(self._life(worker, "left" if worker.leaving else "lost"))
            worker.leaving = True

    def close(self) -> None:
        """Nothing happens after now: write down what was under way."""
        for work in list(self._running.values()):
            self._leave(work, "stopped")
        for phase in list(self._occupied):
            self._free_occupied(phase, "stopped")

    def lives(self) -> list[WorkerLife]:
        """Of all workers so far; those that are up end now."""
        up = (worker for workers in self._up.values() for worker in workers)
        return [*self._lives, *(self._life(worker, "end") for worker in up if worker.joined_s <= self.now_s)]

    def occupy(self, pool: Pool, seconds: float, phase: str, iteration: int, then: Callable[[], None]) -> None:
        """All workers of a pool, which must be idle, do one thing together."""
        workers = [self._idle.pop(name) for name in self._ready[pool]]
        self._occupied[phase] = (workers, iteration, self.now_s)
        self.at(self.now_s + seconds, self._released, phase, then)

    def _started(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            if not worker.leaving:
                self.changes += 1
                self._ready[worker.idle.pool][worker.name] = self._idle[worker.name] = worker
                self._sizes[worker.idle.node] = self._sizes.get(worker.idle.node, 0) + 1

    def _unready(self, worker: _Worker) -> None:
        self._idle.pop(worker.name, None)
        if self._ready[worker.idle.pool].pop(worker.name, None):
            self.changes += 1
            self._sizes[worker.idle.node] -= 1

    def _released(self, phase: str, then: Callable[[], None]) -> None:
        self._free_occupied(phase, "done")
        then()

    def _free_occupied(self, phase: str, outcome: str) -> None:
        workers, iteration, began_s = self._occupied.pop(phase)
        for worker in workers:
            self._span(worker, phase, iteration, phase, began_s, self.now_s, outcome)
            self._idle[worker.name] = worker

    def _life(self, worker: _Worker, reason: str) -> WorkerLife:
        return WorkerLife(
            worker=worker.name, pool=worker.idle.pool, joined_s=worker.joined_s, left_s=self.now_s, reason=reason
        )

    # Requests

    def submit(self, work: Work) -> None:
        """It waits for a gang from now on."""
        self._fresh[work.waiting.exploring].append(work)

    def waits(self) -> int:
        """Requests that are no exploration and have no gang."""
        return len(self._fresh[False]) + sum(not work.waiting.exploring for work in self._broken.values())

    def unplaced(self) -> list[Work]:
        """All requests without a gang."""
        return [*self._broken.values(), *self._fresh[False], *self._fresh[True]]

    def move(self, phase: str, pools: tuple[Pool, ...]) -> None:
        """Requests of a phase run in these pools from now on; gangs of other pools hand theirs back after the step."""
        for work in self.unplaced():
            if work.phase == phase:
                work.waiting = replace(work.waiting, pools=pools)
        for work in list(self._running.values()):
            if work.phase == phase:
                work.waiting = replace(work.waiting, pools=pools)
                if self.timing.resume and work.gang[0].idle.pool not in pools:
                    self.stop(work)

    def drop_exploration(self) -> None:
        """Waiting exploration is not done; running one ends after the step in flight."""
        waiting = [*self._fresh[True], *(work for work in self._broken.values() if work.waiting.exploring)]
        self._fresh[True].clear()
        for work in waiting:
            self._broken.pop(work.waiting.id, None)
            self.ended(work, False)
        for work in self._running.values():
            if work.waiting.exploring and self.now_s < work.denoised_s:
                work.called_off = True
                self.at(work.boundary_s(self.now_s), self._dropped, work, work.turn)

    def stop(self, work: Work) -> None:
        """Its gang hands it back after the step in flight, if that is not the last."""
        at_s = work.boundary_s(self.now_s)
        if not work.stopping and at_s < work.denoised_s - SAME_MOMENT_S:
            work.stopping = True
            self.at(at_s, self._stopped, work, work.turn)

    def _place(self) -> None:
        """Ask the policy, and do what it says."""
        if not self._idle:
            return
        view, works = self._view()
        if view.idle and view.waiting:
            launches = plan(view)
            for launch in launches:
                self._launch(works[launch.request], launch)
            self._forget({launch.request for launch in launches})
        if self._idle and self._running and self.timing.elastic:
            self._widen()

    def _view(self) -> tuple[View, dict[str, Work]]:
        """What the plan looks at, less what could not change it: idle workers that nobody may use, and the far queue.

        Fresh requests of a queue are alike. With more than twice as many of them as there are idle workers each gets
        the narrowest gang, however many more there are, and the last ones get none.
        """
        broken = list(self._broken.values())
        heads = [queue[0] for queue in self._fresh.values() if queue]
        pools = {pool for work in chain(broken, heads) for pool in work.waiting.pools}
        idle = tuple(worker.idle for worker in self._idle.values() if worker.idle.pool in pools)
        enough = 2 * len(idle) + 1
        fresh = chain.from_iterable(islice(queue, enough) for queue in self._fresh.values())
        works = {work.waiting.id: work for work in chain(broken, fresh)}
        waiting = tuple(work.waiting for work in works.values())
        regroup_s = self.timing.recovery_s + self.timing.form_s
        return View(idle=idle, waiting=waiting, nodes=self._sizes, regroup_s=regroup_s), works

    def _forget(self, launched: set[str]) -> None:
        """Take launched requests out of the queues, at the front of which they mostly are."""
        for exploring, queue in self._fresh.items():
            while queue and queue[0].waiting.id in launched:
                launched.discard(queue.popleft().waiting.id)
            if launched and any(work.waiting.id in launched for work in islice(queue, 2 * len(launched) + 1)):
                self._fresh[exploring] = deque(work for work in queue if work.waiting.id not in launched)
        for request in launched & self._broken.keys():
            del self._broken[request]

    def _launch(self, work: Work, launch: Launch) -> None:
        work.gang = tuple(self._idle.pop(name) for name in launch.workers)
        for worker in work.gang:
            worker.work = work
        work.turn += 1
        work.stopping = False
        work.began_s = self.now_s
        recovery_s = self.timing.recovery_s if work.waiting.preemptions else 0.0
        form_s = self.timing.form_s if len(work.gang) > 1 else 0.0
        work.steps_from_s = self.now_s + self.timing.launch_s + recovery_s + form_s
        work.step_s = self._step_s(work.samples, len(work.gang))
        self._running[work.waiting.id] = work
        if len(work.gang) > 1 and work.score_s:
            self.at(work.denoised_s, self._denoised, work, work.turn)
        self.at(work.denoised_s + work.score_s, self._finished, work, work.turn)

    def _step_s(self, samples: int, width: int) -> float:
        if (samples, width) not in self._seconds:
            self._seconds[samples, width] = self.timing.step_s(samples, width)
        return self._seconds[samples, width]

    def _denoised(self, work: Work, turn: int) -> None:
        """One of the gang scores; the others are free."""
        if turn == work.turn:
            for worker in work.gang[1:]:
                self._span(worker, work.phase, work.iteration, work.waiting.id, work.began_s, self.now_s)
                self._release(worker)
            work.gang = work.gang[:1]

    def _finished(self, work: Work, turn: int) -> None:
        if turn == work.turn:
            self._leave(work, "done")
            work.done = work.steps
            self.ended(work, True)

    def _dropped(self, work: Work, turn: int) -> None:
        if turn == work.turn:
            self._leave(work, "dropped")
            self.ended(work, False)

    def _stopped(self, work: Work, turn: int) -> None:
        """Hand it back; its gang, or what is left of it, is kept for it."""
        if turn != work.turn:
            return
        steps, gang = work.steps_by(self.now_s), work.gang
        self._leave(work, "done" if self.timing.resume else "lost", kept_until_s=work.began_s)
        self._again(work, steps, gang)

    def _break(self, work: Work, survivors: Sequence[_Worker]) -> None:
        """Its gang lost a member: the step in flight is lost, or all of them where nothing is resumed."""
        steps = work.steps_by(self.now_s)
        boundary_s = work.boundary_s(self.now_s)
        self.steps_lost += self.now_s + SAME_MOMENT_S < boundary_s <= work.denoised_s + SAME_MOMENT_S
        kept_until_s = work.steps_from_s + steps * work.step_s if self.timing.resume else work.began_s
        self._leave(work, "lost", kept_until_s=kept_until_s)
        self._again(work, steps, survivors)

    def _again(self, work: Work, steps: int, survivors: Sequence[_Worker]) -> None:
        """Back to the queue, with what it may keep; but exploration that was called off is over."""
        if self.timing.resume:
            work.done += steps
        else:
            self.steps_lost += steps
        if work.called_off:
            self.ended(work, False)
            return
        held = tuple(worker.name for worker in survivors if not worker.leaving)
        work.waiting = replace(work.waiting, preemptions=work.waiting.preemptions + 1, held=held)
        self._broken[work.waiting.id] = work

    def _leave(self, work: Work, outcome: str, *, kept_until_s: float = 0.0) -> None:
        """The gang is free again; write down what it did, and since when nothing of that is kept."""
        gang, work.gang = work.gang, ()
        work.turn += 1
        del self._running[work.waiting.id]
        denoised_s = min(self.now_s, work.denoised_s)
        lost_s = max(0.0, denoised_s - kept_until_s) if outcome == "lost" else None
        for worker in gang:
            self._release(worker)
            self._span(worker, work.phase, work.iteration, work.waiting.id, work.began_s, denoised_s, outcome, lost_s)
            if denoised_s < self.now_s:
                phase = _scoring(work.phase)
                self._span(worker, phase, work.iteration, work.waiting.id, denoised_s, self.now_s, outcome)

    def _release(self, worker: _Worker) -> None:
        worker.work = None
        if not worker.leaving:
            self._idle[worker.name] = worker

    def _widen(self) -> None:
        """Gangs beside idle workers that nobody waits for form anew, wider, if that pays."""
        nodes = sorted({worker.idle.node for worker in self._idle.values()})
        beside = {
            worker.work.waiting.id: worker.work
            for node in nodes
            for place in self._places.get(node, ())
            for worker in self._up[place]
            if worker.work and not worker.work.stopping and len(worker.work.gang) < worker.work.waiting.widths[-1]
        }
        if beside:
            running = tuple(self._as_running(work) for work in beside.values())
            idle = tuple(worker.idle for worker in self._idle.values())
            for request in widen(replace(self._view()[0], idle=idle, running=running)):
                self.stop(beside[request])

    def _as_running(self, work: Work) -> Running:
        return Running(
            id=work.waiting.id,
            workers=tuple(worker.name for worker in work.gang),
            pool=work.gang[0].idle.pool,
            node=work.gang[0].idle.node,
            widths=work.waiting.widths,
            slots=work.waiting.slots,
            remaining_s=max(0.0, work.denoised_s - self.now_s),
        )

    def _span(
        self,
        worker: _Worker,
        phase: str,
        iteration: int,
        key: str,
        start_s: float,
        stop_s: float,
        outcome: str = "done",
        uncommitted_s: float | None = None,
    ) -> None:
        self.spans.append(
            Span(
                worker=worker.name,
                pool=worker.idle.pool,
                phase=phase,
                iteration=iteration,
                key=key,
                start_s=start_s,
                stop_s=stop_s,
                outcome=outcome,
                uncommitted_s=uncommitted_s,
            )
        )


def _scoring(phase: str) -> str:
    """The phase's scoring, as the live graph names it: ``score``, ``explore-score-r2``, ``validate-score``."""
    if phase == "rollout":
        return "score"
    kind, _, rest = phase.partition("-")
    return f"{kind}-score-{rest}" if rest else f"{kind}-score"
