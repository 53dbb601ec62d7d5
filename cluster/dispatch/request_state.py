"""What the dispatcher remembers of each request: its shards, its gang, how far it is. It decides and sends nothing.

Knows no Dask: a shard is a key, a worker a name. A request's gang is formed, runs, and is done or breaks;
it counts as broken until its last shard has come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.dispatch.events import Key, TaskState
from spotlight.plan.placement import Running, Waiting
from spotlight.records import Pool

GATED: dict[str, tuple[Pool, ...]] = {"any": ("reserved", "spot"), "spot": ("spot",), "reserved": ("reserved",)}
"""Pool annotation of a gated task to the pools it may run in, the preferred one first."""
TRAINING: dict[str, tuple[Pool, ...]] = {
    **{f"gradient-{pool}": pools for pool, pools in GATED.items()},
    "update": ("reserved",),
}
"""Pool annotation of a training task to the pools it may run in; each runs on one worker, by itself."""
SCORING = "reward"
"""Pool annotation of tasks that score on workers of their own, which are a pool of this name: each by itself, too."""
ALONE = {*TRAINING, SCORING}
"""Pool annotations of gated tasks that are of no gang."""
BY_ONE_WORKER = 3
"""How many times as many losses it takes if they were on few of the workers that may run a request."""
Filed = Literal["", "fresh", "broken", "over"]
"""The dispatcher's list that a request is in: "fresh" ones wait for their first gang, "broken" ones for another gang,
"over" ones have shards behind the gate that have nothing to do; "" is in no list."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request and whoever runs it."""

    name: str
    iteration: int
    exploring: bool
    pools: tuple[Pool, ...]
    order: int
    widths: tuple[int, ...]
    windowed: bool = False
    """A rollout that training waits for: reserved workers take it while their window is open."""
    ahead: bool = False
    """A rollout of the next iteration, which goes on there if it is not done when training ends."""
    keys: list[Key] = field(default_factory=list)
    """Keys of its shards, in order."""
    epoch: int = 0
    """How often a gang was formed for it so far."""
    states: dict[Key, TaskState] = field(default_factory=dict)
    """{shard: Dask's state of its task}, changed by `change`; for alike shards the first stands for all."""
    alike: tuple[Key, ...] = ()
    """The last shards, as long as one task stands for them: what has happened to one has happened to all."""
    behind: int = 0
    """Shards behind the gate."""
    unready: int = 0
    """Shards that wait for their inputs."""
    filed: Filed = ""
    members: dict[Key, str] = field(default_factory=dict)
    """Address of the worker of each shard at work, by its key."""
    names: dict[str, str] = field(default_factory=dict)
    """Name of each of these workers, by address."""
    pool: Pool = "spot"
    """Pool of the present gang, or of the last; so is `node`."""
    node: str = ""
    width: int = 0
    """Width of the present gang, or of the last."""
    breaking: bool = False
    """A member of the present gang ended early; the others are to leave."""
    planned: bool = False
    """The present gang was asked to form anew."""
    held: tuple[str, ...] = ()
    """Survivors of the last gang."""
    step: int = 0
    """Steps committed, as far as was reported."""
    steps: int = 0
    best: int = 0
    """The highest step that any of its gangs came to."""
    preemptions: int = 0
    fruitless: int = 0
    """Losses in a row without a new step."""
    lost_at: set[str] = field(default_factory=set)
    """Addresses of all members of the gangs of these losses."""
    quarantined: bool = False
    """It is not run any more."""
    ran: bool = False
    """It had a result once: if that is lost, it is found in the store, so the request is never quarantined."""
    started_s: float = 0.0
    resumed_at: int = 0
    stepped_s: float = 0.0
    """When the present gang committed its last step; 0 where it committed none."""
    repeated_s: float = 0.0
    """When it committed its last step that an earlier gang had committed before; 0 where there was none."""

    def add(self, keys: Sequence[Key]) -> None:
        """Add shards, none of which begins yet; known ones stay as they are."""
        if not self.keys and len(keys) > 2:
            self.keys, self.alike = list(keys), tuple(keys[1:])
            self.states = dict.fromkeys(keys[:2], "released")
            return
        new = [key for key in keys if key not in self.keys]
        if new:
            self.split(len(self.alike))
        self.keys = sorted([*self.keys, *new])
        self.states |= dict.fromkeys(new, "released")

    def split(self, count: int) -> None:
        """Give the first ``count`` alike shards states of their own, and a single one that is left, too."""
        if self.alike:
            self.states |= dict.fromkeys(self.alike[: count + 1], self.states[self.alike[0]])
            self.alike = self.alike[count:] if count < len(self.alike) - 1 else ()

    def change(self, key: Key, state: TaskState, shards: int = 1) -> bool:
        """Note the new state of a shard's task; returns whether that may change what the request waits for.

        Args:
            shards: how many of them the task stands for, the shard is the first of these.
        """
        before, self.states[key] = self.states.get(key), state
        self.ran |= state == "memory" and key == self.keys[0] and not self.quarantined
        gated, waiting = (state == "gated") - (before == "gated"), (state == "waiting") - (before == "waiting")
        if gated or waiting:
            self.behind += shards * gated
            self.unready += shards * waiting
            return True
        return key == self.keys[0]

    @property
    def parked(self) -> int:
        """How many shards may begin: those behind the gate, once no shard waits for its inputs.

        A released shard does not count: Dask releases a task that nobody depends on any more.
        """
        return 0 if self.unready else self.behind

    @property
    def gated(self) -> list[tuple[int, Key]]:
        """The shards that may begin, with their numbers."""
        if not self.parked:
            return []
        alike = self.states[self.alike[0]] if self.alike else "released"
        return [(shard, key) for shard, key in enumerate(self.keys) if self.states.get(key, alike) == "gated"]

    @property
    def can_wait(self) -> bool:
        """Whether training goes first: nothing in its graph but the end waits for it."""
        return self.exploring or self.ahead

    @property
    def is_done(self) -> bool:
        """Whether the first shard, which returns the request's result, has ended, or nobody depends on that result."""
        return self.states[self.keys[0]] in ("memory", "erred", "released")

    def form(self, members: Mapping[Key, str], names: Mapping[str, str], pool: Pool, node: str) -> None:
        """Give it a new gang, of workers of one node."""
        self.epoch += 1
        self.members, self.names, self.pool, self.node = dict(members), dict(names), pool, node
        self.width, self.held = len(members), ()
        self.breaking = self.planned = False
        self.step = self.resumed_at = 0
        self.started_s = self.stepped_s = self.repeated_s = 0.0

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers at work on it, by rank."""
        return tuple(self.names[address] for address in self.members.values())

    @property
    def forming(self) -> str:
        """Name of its present gang, or of its last; empty where that was a single worker."""
        return f"{self.name}.e{self.epoch}" if self.width > 1 else ""

    def begin(self, step: int, steps: int, now_s: float) -> None:
        """The first rank found the step to go on from."""
        self.step = self.resumed_at = step
        self.steps, self.started_s = steps, now_s

    def advance(self, step: int, now_s: float) -> None:
        self.step, self.stepped_s = step, now_s
        if step > self.best:
            self.best, self.fruitless = step, 0
            self.lost_at.clear()
        else:
            self.repeated_s = now_s

    def waste(self, start_s: float, stop_s: float) -> tuple[float, float]:
        """Seconds of a member's time in the present gang that were wasted: on a step not committed, at the end, and on
        steps that an earlier gang had committed, at the beginning."""
        uncommitted_s = max(0.0, stop_s - max(start_s, self.stepped_s))
        return uncommitted_s, max(0.0, min(stop_s, self.repeated_s) - start_s)

    def lose(self) -> None:
        """Its gang broke."""
        self.preemptions += 1
        self.fruitless += 1
        self.lost_at.update(self.names)

    def is_to_blame(self, enough: int, able: int) -> bool:
        """Whether so many losses are the request's own fault, and not that of a worker whose engine always fails.

        Args:
            enough: losses that are enough, if they were on as many workers, or on all.
            able: workers that may run it.
        """
        return len(self.lost_at) >= min(enough, able) or self.fruitless >= BY_ONE_WORKER * enough

    def waiting(self, pools: tuple[Pool, ...], held: tuple[str, ...]) -> Waiting:
        """The request as `placement.plan` sees it while it waits for a gang.

        Shards whose results were lost may come back without the others. Their request is done, and a worker finds the
        committed latents, so one will do; as many as there are shards could not always share a pass.
        """
        parked = self.parked
        widths = self.widths if parked >= self.widths[0] else (1,)
        return Waiting(
            id=self.name,
            pools=pools,
            order=self.order,
            exploring=self.can_wait,
            begun=self.epoch > 0,
            widths=widths,
            slots=parked,
            held=held,
        )

    def running(self, slots: int, now_s: float) -> Running:
        """The request as `placement.widen` sees it while a gang is at work on it."""
        done = self.step - self.resumed_at
        pace_s = (now_s - self.started_s) / done if done else 0.0
        return Running(
            id=self.name,
            workers=self.workers,
            pool=self.pool,
            node=self.node,
            widths=self.widths,
            slots=slots,
            remaining_s=pace_s * (self.steps - self.step),
        )


def request_of(key: Key, shards: int) -> str:
    """Name of the request that a shard's key belongs to; shards of one request have neighbouring numbers."""
    layer, index = key
    return f"{layer}/{index // shards}"
