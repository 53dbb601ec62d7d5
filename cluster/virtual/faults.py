"""Deterministic simulation tests: schedules of faults drawn by a seed, run against the dispatcher, and what must hold.

A schedule is a small cluster, a small iteration and a list of faults. The same seed always gives the same schedule and
the same run. What must hold meanwhile is in `cluster.virtual.invariants`; at the end, the run has ended, and its
results are those of an undisturbed one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Literal

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    Event,
    GangBeats,
    Instruction,
    Key,
    Launch,
    TaskChanged,
    TasksChanged,
    Train,
    WorkerJoined,
    WorkerNoticed,
)
from cluster.dispatch.rules import Rules
from cluster.virtual.clock import VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.example import RUN, Example, ExampleTiming
from cluster.virtual.invariants import Invariants
from cluster.virtual.timing import Stay
from spotlight.records import SpotlightError, Stopped, record

Fault = Literal["kill", "notice", "hang", "engine", "pause", "suspect", "node", "driver", "stop", "store"]
"""A worker is killed, gets a notice, freezes, loses its engine, takes no tasks for a while, or is wrongly taken for
dead; all workers of a node are killed; the driver dies, or is stopped; the store does not answer once."""
FAULTS: tuple[Fault, ...] = ("kill", "notice", "hang", "engine", "pause", "suspect", "node", "driver", "stop", "store")
LIKELY = (5, 4, 2, 3, 2, 1, 1, 1, 1, 1)
"""Relative frequency of each."""
Moment = Literal["launched", "boundary", "trained", "came"]
"""A gang is launched; it is about to end a step, does, or just did; a gradient, a sum of some or an update ends; a
worker joins."""
MOMENTS: tuple[Moment, ...] = ("launched", "boundary", "trained", "came")
MOST_MOMENTS = 20_000
"""After so many moments a run counts as endless; the longest that ends has some thousand."""
QUIET_S = 600.0
"""A run that has not ended so long after the last fault counts as hanging."""
CURSE_S = 0.01
"""After its launch a request that always fails loses an engine: before its first step has ended."""


class DriverKilled(Exception):
    """The driver dies: its cluster goes with it, what was committed stays."""


class StoreFailed(OSError):
    """The store did not answer."""


@record
class TriggeredFault:
    """A fault of a worker, triggered when something happens there."""

    moment: Moment
    nth: int
    """Which occurrence triggers it, from 0 on."""
    after_s: float
    """Seconds from the occurrence to the fault; before it, if the occurrence can be known before."""
    fault: Fault


@record
class Schedule:
    """A cluster, an iteration, and the faults of a run."""

    seed: int
    example: Example
    reserved: int
    spot: int
    per_node: int
    """Spot workers on each node."""
    rules: Rules
    resumes: bool
    lag_s: float
    """Most seconds that a message takes, except one in ten, which may take four times as long."""
    step_s: float
    train_s: float
    start_up_s: float
    replace_after_s: float
    """From a loss until another machine is there; with both 0, a worker comes back in the moment that it goes."""
    ups: tuple[tuple[tuple[float, float], ...], ...]
    """When each spot worker's machine is there, in seconds after its driver's start."""
    always_fails: int | None
    """The rollout that loses an engine whenever it is launched."""
    faults: tuple[tuple[float, Fault, int], ...]
    """``(when, what, whom)``; ``whom`` is a number, taken modulo the number of workers."""
    triggered: tuple[TriggeredFault, ...]
    scorers: int = 0
    """Workers that only score."""
    sick: str = ""
    """Name of a worker that loses its engine whenever it is given a GPU's work."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = Random(seed)
    widths = chance.choice([(1,), (1, 2), (1, 2, 4), (2,), (1, 4)])
    per_node = chance.choice([w for w in (1, 2, 3, 4, 6) if w >= widths[0]])
    spot = per_node * chance.randint(1, max(1, 6 // per_node))
    reserved = chance.randint(1, 3)
    pools = [pool for pool, size in (("any", max(reserved, per_node)), ("spot", per_node)) if size >= widths[0]]
    if reserved >= widths[0]:
        pools.append("reserved")
    large = chance.random() < 0.1
    example = Example(
        widths=widths,
        rollouts=(rollouts := chance.randint(1, 8 if large else 3)),
        pool=chance.choice(pools),
        rounds=chance.randint(0, 3 if large else 2),
        slots=chance.randint(1, 4 if large else 2),
        parts=min(rollouts, chance.randint(1, 3)),
        updates=chance.choice([1, 1, 2]),
        train_pool=chance.choice(["reserved", "any"]),
        window_s=chance.choice([inf, inf, 0.0, 1.0, 3.0]),
    )
    scorers = Random(f"{seed} scores").choice([0, 0, 1, 2])
    example = replace(example, score_pool="reward" if scorers else "engine")
    if Random(f"{seed} train pool").random() < 0.2:
        example = replace(example, train_pool="spot")
    computes = example.train_pool != "spot" or Random(f"{seed} computes").random() < 0.5
    largest = {"reserved": reserved, "any": max(reserved, per_node), "spot": per_node}[example.train_pool]
    train_width = Random(f"{seed} train width").choice([1, 1, 2, 3])
    example = replace(example, slices=Random(f"{seed} sums").choice([1, 2]))
    always_fails = chance.randrange(example.rollouts) if chance.random() < 0.15 else None
    resumes = chance.random() < 0.8
    if resumes:
        example = replace(example, ahead=Random(f"{seed} ahead").choice([0, 0, 1, 3]))
    if always_fails is None and train_width <= largest:  # else a gradient, too, might be lost too often
        example = replace(example, train_width=train_width)
    can_do_without = always_fails is None and spot > 1 and widths[0] == example.train_width == 1
    return Schedule(
        seed=seed,
        example=example,
        reserved=reserved,
        spot=spot,
        per_node=per_node,
        rules=Rules(
            close_with_training=chance.random() < 0.5,
            explored_first=Random(f"{seed} explored first").choice([0, 0, 1, 3]),
            hang_after_s=2.0,
            quarantine_after=1000 if always_fails is None else chance.randint(1, 3),
            reserved_computes=computes,
            widens=resumes,
            moves=resumes,
        ),
        resumes=resumes,
        lag_s=chance.choice([0.0, 0.0, 0.02, 0.5, 2.0]),
        step_s=chance.choice([0.05, 0.2, 0.6]),
        train_s=chance.choice([0.5, 1.5, 2.5]),
        start_up_s=chance.choice([0.0, 0.5]),
        replace_after_s=chance.choice([0.0, 0.3, 1.5]),
        ups=tuple(_ups(chance) for _ in range(spot)),
        always_fails=always_fails,
        faults=_faults(chance),
        triggered=tuple(_triggered(chance) for _ in range(chance.choice([0, 0, 1, 2, 4]))),
        scorers=scorers,
        sick="spot-0" if can_do_without and Random(f"{seed} sick").random() < 0.3 else "",
    )


def _ups(chance: Random) -> tuple[tuple[float, float], ...]:
    """Most machines are there from the start, some come late, some go and come back."""
    first_s = round(chance.uniform(0.0, 6.0), 3) if chance.random() < 0.2 else 0.0
    if chance.random() < 0.8:
        return ((first_s, inf),)
    goes_s = first_s + round(chance.uniform(0.0, 6.0), 3)
    return ((first_s, goes_s), (goes_s + round(chance.choice([0.0, chance.uniform(0.0, 6.0)]), 3), inf))


def _faults(chance: Random) -> tuple[tuple[float, Fault, int], ...]:
    """Most within the first seconds, while much goes on; some at one moment."""
    faults: list[tuple[float, Fault, int]] = []
    for _ in range(chance.randint(0, 10)):
        at_s = round(chance.uniform(0.0, chance.choice([4.0, 12.0])), 3)
        if faults and chance.random() < 0.3:
            at_s = faults[-1][0]
        faults.append((at_s, chance.choices(FAULTS, LIKELY)[0], chance.randrange(1 << 16)))
    return tuple(sorted(faults))


def _triggered(chance: Random) -> TriggeredFault:
    return TriggeredFault(
        moment=chance.choice(MOMENTS),
        nth=chance.choice([0, chance.randrange(4), chance.randrange(12)]),
        after_s=chance.choice([-1e-4, 0.0, 0.0, 1e-4, 0.03]),
        fault=chance.choices(FAULTS, LIKELY)[0],
    )


@record
class Verdict:
    """The result of a schedule."""

    violations: tuple[str, ...]
    """Sentences that say what did not hold; empty if all did."""
    events: int
    virtual_s: float


def violations(schedule: Schedule) -> tuple[str, ...]:
    return verdict(schedule).violations


def verdict(
    schedule: Schedule, dispatch: type[Dispatcher] = Dispatcher, log: list[dict[str, Any]] | None = None
) -> Verdict:
    """Run a schedule.

    Args:
        dispatch: the dispatcher to try.
        log: gets the rules of each dispatcher, and its events with their instructions, in order.
    """
    trial = _Trial(schedule, dispatch, log)
    trial.go()
    return Verdict(violations=tuple(trial.found), events=trial.events, virtual_s=trial.clock.now_s)


class _Trial:
    """One run of a schedule, with as many drivers as it takes."""

    def __init__(self, schedule: Schedule, dispatch: type[Dispatcher], log: list[dict[str, Any]] | None) -> None:
        self.found: list[str] = []
        self.events = 0
        self.clock = VirtualClock()
        self._schedule, self._dispatch, self._log = schedule, dispatch, log
        self._chance = Random(schedule.seed + 1)
        self._graph, self._outputs = schedule.example.graph(self._store)
        self._committed: dict[str, int] = {}
        self._store_fails = False
        self._moments = 0
        self._happened: Counter[Moment] = Counter()
        self._triggered = {(triggered.moment, triggered.nth): triggered for triggered in schedule.triggered}
        self._last_s = max((at_s for at_s, _, _ in schedule.faults), default=0.0)
        for at_s, fault, whom in schedule.faults:
            self.clock.at(at_s, self._inject_somewhere, fault, whom)

    def go(self) -> None:
        try:
            results = self._results()
        except (AssertionError, SpotlightError) as error:
            self.found.append(f"{type(error).__name__}: {error}")
            return
        closes = self._schedule.rules.close_with_training
        self.found += self._schedule.example.wrong(results, closes=closes, may_quarantine=self._may_quarantine)
        always_fails = self._schedule.always_fails
        if always_fails is not None and isinstance(self._schedule.example.rollout_of(results, always_fails), str):
            self.found.append(f"rollout/{always_fails} was never quarantined")

    def _may_quarantine(self, gang: str, preemptions: int) -> bool:
        least = self._schedule.rules.quarantine_after
        return preemptions >= least and self._launches[gang] >= least and not self._schedule.sick

    def _results(self) -> dict[Key, Any]:
        for _ in range(len(self._schedule.faults) + len(self._schedule.triggered) + 2):
            dispatch = self._begin()
            try:
                return dict(zip(self._outputs, self._cluster.compute(self._graph, self._outputs), strict=True))
            except (DriverKilled, StoreFailed, Stopped):  # as a person would: `spotlight resume`
                self._cluster.close()
            finally:
                if self._log is not None:
                    self._log += dispatch.drain().decisions
        raise AssertionError("the run was resumed more often than it was struck")

    def _begin(self) -> Dispatcher:
        """Start a driver with a dispatcher and a cluster; returns the dispatcher."""
        schedule = self._schedule
        self._invariants = Invariants(self.found, schedule.rules)
        self._launches: Counter[str] = Counter()
        dispatch = self._dispatch(schedule.rules, logged=self._log is not None)
        self._cluster = VirtualCluster(
            RUN,
            dispatch,
            self.clock,
            ExampleTiming(step_s=schedule.step_s, train_s=schedule.train_s, start_up_s=schedule.start_up_s),
            stays(schedule, self.clock.now_s),
            resumes=schedule.resumes,
            lag=self._lag if schedule.lag_s else None,
            copies=self._copies,
            committed=self._committed,
            told=self._told,
            check=partial(self._check, dispatch),
        )
        return dispatch

    def _lag(self, kind: str) -> float:
        return self._chance.uniform(0.0, self._schedule.lag_s * (4 if self._chance.random() < 0.1 else 1))

    def _copies(self) -> int:
        return 2 if self._schedule.lag_s and self._chance.random() < 0.2 else 1

    def _store(self) -> None:
        if self._store_fails:
            self._store_fails = False
            raise StoreFailed("the store did not answer")

    # What must hold

    def _check(self, dispatch: Dispatcher) -> None:
        """Check the invariants, after every moment."""
        self._moments += 1
        assert self._moments < MOST_MOMENTS, f"it goes on for ever: {MOST_MOMENTS} moments"
        assert self.clock.now_s < self._last_s + QUIET_S, f"it hangs: {self.clock.now_s:.0f} s have passed"
        if self._moments > 1:
            self._invariants.check_moment(self._cluster, dispatch)

    def _told(self, event: Event, instructions: list[Instruction]) -> None:
        """Trigger the faults of an event, and check its instructions before they are carried out."""
        self.events += _count(event)
        if isinstance(event, TaskChanged | TasksChanged):
            if event.state == "memory":
                keys = (event.key,) if isinstance(event, TaskChanged) else event.keys
                for _ in filter(_trains, keys):
                    self._happens("trained", "")
        elif isinstance(event, WorkerNoticed):
            self._invariants.noticed.add(event.address)
        elif isinstance(event, WorkerJoined) and event.pool != "head":
            self._happens("came", event.address)
        if instructions:
            self._invariants.check_instructions(self._cluster, instructions)
        for instruction in instructions:
            if isinstance(instruction, Launch):
                self._launched(instruction)
            elif isinstance(instruction, Train):
                self._try_engines(instruction.address)

    # Faults

    def _launched(self, launch: Launch) -> None:
        self._launches[launch.gang] += 1
        address = self._chance.choice(launch.members).address
        self._happens("launched", address)
        self.clock.after(0.0, self._begins, launch.gang, address)
        if launch.gang == f"rollout/{self._schedule.always_fails}":
            self.clock.after(CURSE_S, self._inject, "engine", address)
        self._try_engines(*(member.address for member in launch.members))

    def _try_engines(self, *addresses: str) -> None:
        """Have the sick worker, if it is one of these, lose its engine."""
        for address in addresses:
            worker = self._cluster.workers.get(address)
            if worker and worker.name == self._schedule.sick:
                self.clock.after(CURSE_S, self._inject, "engine", address)

    def _begins(self, gang: str, address: str) -> None:
        """Schedule the fault for the step of this gang that is to end with one."""
        forming = self._cluster.gang_epochs.get(gang)
        if forming:
            steps = 1 + self._chance.randrange(max(1, forming.work.steps - forming.first))
            self._happens("boundary", address, forming.from_s + steps * forming.step_s - self.clock.now_s)

    def _happens(self, moment: Moment, address: str, in_s: float = 0.0) -> None:
        triggered = self._triggered.get((moment, self._happened[moment]))
        self._happened[moment] += 1
        if triggered:
            self._last_s = max(self._last_s, self.clock.now_s + in_s)
            self.clock.after(in_s + triggered.after_s, self._inject, triggered.fault, address)

    def _inject_somewhere(self, fault: Fault, whom: int) -> None:
        workers = [worker for worker in self._cluster.workers.values() if worker.pool != "head"]
        self._inject(fault, workers[whom % len(workers)].address if workers else "")

    def _inject(self, fault: Fault, address: str) -> None:
        if fault == "store":
            self._store_fails = True
        else:
            inject(self._cluster, fault, address, self._chance)


def _count(event: Event) -> int:
    """How many events it stands for."""
    if isinstance(event, TasksChanged):
        return len(event.keys)
    return len(event.beats) if isinstance(event, GangBeats) else 1


def _trains(key: Key) -> bool:
    return key[0].startswith(("train", "add", "update"))


def inject(cluster: VirtualCluster, fault: Fault, address: str, chance: Random) -> None:
    """Cause a fault of a worker, or of the driver.

    Raises:
        DriverKilled: the fault is the driver's death.
    """
    match fault:
        case "kill":
            cluster.machines.kill(address)
        case "notice":
            cluster.machines.notice(address, grace_s=chance.choice([0.1, 3.0]))
        case "hang":
            cluster.machines.freeze(address)
        case "engine":
            cluster.machines.lose_engine(address)
        case "pause":
            cluster.machines.pause(address, chance.choice([0.0, 0.5, 3.0]))
        case "suspect":
            cluster.machines.suspect(address, silent_s=inf)
        case "node" if address in cluster.workers:
            node = cluster.workers[address].node
            for other in [other for other in cluster.workers.values() if other.node == node]:
                cluster.machines.kill(other.address)
        case "driver":
            raise DriverKilled
        case "stop":
            cluster.stop()


def stays(schedule: Schedule, now_s: float) -> Iterator[Stay]:
    """Places of the workers of a driver that starts now, and when their machines are there."""
    replace_after_s = schedule.replace_after_s
    for at in range(schedule.reserved):
        name, ups = f"reserved-{at}", ((now_s, inf),)
        yield Stay(pool="reserved", name=name, node="node:reserved", ups=ups, replace_after_s=replace_after_s)
    for at in range(schedule.scorers):
        name, ups = f"reward-{at}", ((now_s, inf),)
        yield Stay(pool="reward", name=name, node="node:reward", ups=ups, replace_after_s=replace_after_s)
    for at, times in enumerate(schedule.ups):
        yield Stay(
            pool="spot",
            name=f"spot-{at}",
            node=f"node:spot-{at // schedule.per_node}",
            ups=tuple((now_s + from_s, now_s + until_s) for from_s, until_s in times),
            preemptions=(("kill", "notice", "hang")[(schedule.seed + at) % 3],),
            grace_s=1.0,
            replace_after_s=replace_after_s,
        )
