"""Deterministic simulation tests: schedules of faults drawn by a seed, run against the dispatcher, and what must hold.

A schedule is a small cluster, a small iteration and a list of blows: kills, notices, freezes, lost engines, late and
doubled messages, drivers that die. The same seed always gives the same schedule and the same run.

What must hold after every event:

- a worker has at most one request, and runs one task at a time;
- the members of a gang begin together, or none does, all of them on one node;
- a step is committed only by the latest forming of its gang;
- no request waits beside an idle worker that could run it.

And at the end: the run ends, and its results are those of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Literal

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.local import get_sync

from cluster.dispatch import Dispatch, Rules
from cluster.events import Key
from cluster.virtual.clock import VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.timing import Denoising, Fixed, Stay
from cluster.virtual.workers import VirtualWorker
from spotlight.device.signals import signals
from spotlight.records import Dropped, Placement, Prompt, Quarantined, Request, SpotlightError, Surplus, WeightsRef

Blow = Literal["kill", "notice", "hang", "engine", "driver", "store"]
BLOWS: tuple[Blow, ...] = ("kill", "notice", "hang", "engine", "driver", "store")
MOST_EVENTS = 200_000
"""After so many events a run is taken to go on for ever; the largest that ends takes some thousand."""
QUIET_S = 600.0
"""So long after the last blow a run that has not ended is taken to hang."""
RUN = "faults"


class DriverKilled(Exception):
    """The driver dies: its cluster goes with it, what was committed stays."""


class StoreFailed(OSError):
    """The store did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happens to whom."""

    seed: int
    reserved: int
    spot: int
    per_node: int
    """Spot workers on each node."""
    widths: tuple[int, ...]
    rollouts: int
    rollout_pool: str
    rounds: int
    """Of exploration."""
    slots: int
    """Requests of each round."""
    parts: int
    """Of training."""
    window_s: float
    rules: Rules
    resumes: bool
    lag_s: float
    """Longest that a message is on its way."""
    blows: tuple[tuple[float, Blow, int], ...]
    """``(when, what, whom)``, the last being a number that is taken modulo the workers that are there."""


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
    blows = (
        (round(chance.uniform(0.0, 25.0), 3), chance.choice(BLOWS), chance.randrange(1 << 16))
        for _ in range(chance.randint(1, 14))
    )
    return Schedule(
        seed=seed,
        reserved=reserved,
        spot=spot,
        per_node=per_node,
        widths=widths,
        rollouts=chance.randint(1, 7),
        rollout_pool=chance.choice(pools),
        rounds=chance.randint(0, 3),
        slots=chance.randint(1, 4),
        parts=chance.randint(1, 3),
        window_s=chance.choice([inf, inf, 0.0, 3.0]),
        rules=Rules(
            close_with_training=chance.random() < 0.5,
            hang_after_s=2.0,
            quarantine_after=1000,
            widens=(resumes := chance.random() < 0.8),
            moves=resumes,
        ),
        resumes=resumes,
        lag_s=chance.choice([0.0, 0.0, 0.02, 0.5]),
        blows=tuple(sorted(blows)),
    )


def violations(schedule: Schedule) -> list[str]:
    """Run a schedule; each sentence says what did not hold. None of them is good."""
    found: list[str] = []
    try:
        got = _Trial(schedule, found).results()
    except (AssertionError, SpotlightError) as error:
        return [*found, f"{type(error).__name__}: {error}"]
    graph, outputs = _graph(schedule)
    signals.__init__()  # type: ignore[misc]  # nothing was asked of this process
    expected = dict(zip(outputs, get_sync(graph, outputs), strict=True))
    for key, value in got.items():
        if value != expected[key] and not _may_differ(schedule, key):
            found.append(f"{key} is {value!r} instead of {expected[key]!r}")
    return found


def _may_differ(schedule: Schedule, key: Key) -> bool:
    """How much is explored depends on time where the end of training ends it."""
    return key[0] == "select" and schedule.rules.close_with_training


class _Trial:
    """One run of a schedule, over the drivers that it takes."""

    def __init__(self, schedule: Schedule, found: list[str]) -> None:
        self._schedule, self._found = schedule, found
        self._chance = Random(schedule.seed + 1)
        self._clock = VirtualClock()
        self._committed: dict[str, int] = {}
        self._store_fails = False
        self._events = 0
        self._cluster = self._driver()
        for at_s, blow, whom in schedule.blows:
            self._clock.at(at_s, self._strike, blow, whom)

    def results(self) -> dict[Key, Any]:
        graph, outputs = _graph(self._schedule, self._store)
        for _ in range(len(self._schedule.blows) + 2):
            try:
                return dict(zip(outputs, self._cluster.compute(graph, outputs), strict=True))
            except (DriverKilled, StoreFailed):  # as a person would: `spotlight resume`
                self._cluster.close()
                self._cluster = self._driver()
        raise AssertionError("the run was resumed more often than it was struck")

    def _driver(self) -> VirtualCluster:
        schedule = self._schedule
        dispatch = Dispatch(schedule.rules, logged=False)
        return VirtualCluster(
            RUN,
            dispatch,
            self._clock,
            _Timing(schedule),
            _stays(schedule, self._clock.now_s),
            resumes=schedule.resumes,
            lag=lambda kind: self._chance.uniform(0.0, schedule.lag_s) if schedule.lag_s else 0.0,
            copies=lambda: 2 if schedule.lag_s and self._chance.random() < 0.2 else 1,
            committed=self._committed,
            check=partial(self._check, dispatch),
        )

    def _strike(self, blow: Blow, whom: int) -> None:
        workers = [worker for worker in self._cluster.workers.values() if worker.pool != "head"]
        match blow:
            case "driver":
                raise DriverKilled
            case "store":
                self._store_fails = True
            case _ if workers:
                worker = workers[whom % len(workers)]
                self._strike_worker(blow, worker)

    def _strike_worker(self, blow: Blow, worker: VirtualWorker) -> None:
        match blow:
            case "kill":
                self._cluster.kill(worker.address)
            case "notice":
                self._cluster.notice(worker.address, grace_s=self._chance.choice([0.1, 3.0]))
            case "hang":
                self._cluster.freeze(worker.address)
            case "engine":
                self._cluster.lose_engine(worker.address)

    def _store(self) -> None:
        if self._store_fails:
            self._store_fails = False
            raise StoreFailed("the store did not answer")

    def _check(self, dispatch: Dispatch) -> None:
        """After every event."""
        self._events += 1
        assert self._events < MOST_EVENTS, f"it goes on for ever: {MOST_EVENTS} events"
        last_s = self._schedule.blows[-1][0] if self._schedule.blows else 0.0
        assert self._clock.now_s < last_s + QUIET_S, f"it hangs: {self._clock.now_s:.0f} s have passed"
        self._found += broken_invariants(self._cluster_or_none(), dispatch)

    def _cluster_or_none(self) -> VirtualCluster | None:
        return getattr(self, "_cluster", None)


def broken_invariants(cluster: VirtualCluster | None, dispatch: Dispatch) -> Iterator[str]:
    """What does not hold now of a cluster and its dispatcher."""
    if cluster is None:
        return
    at = f"at {cluster.now_s:.3f} s"
    for worker in cluster.workers.values():
        shards = [key for key in (*worker.queue, *worker.running) if "gate" in cluster.tasks.all[key].needs]
        if worker.pool != "head" and len(shards) > 1:
            yield f"{at} worker {worker.name} has {len(shards)} tasks from behind the gate: {shards}"
        if len(worker.running) > worker.threads:
            yield f"{at} worker {worker.name} runs {len(worker.running)} tasks on {worker.threads} threads"
    for forming in cluster.formings.values():
        nodes = {worker.node for worker in forming.members.values()}
        if len(nodes) > 1:
            yield f"{at} gang {forming.name} spans the nodes {sorted(nodes)}"
        if forming.broken_s is None and len(forming.members) != forming.width:
            yield f"{at} gang {forming.name} takes steps with {len(forming.members)} of {forming.width} members"
    yield from (f"{at} {reason}" for reason in dispatch.idle_beside_waiting())


# A small iteration, of the shape of a real one


def _graph(schedule: Schedule, store: Callable[[], None] = lambda: None) -> tuple[HighLevelGraph, list[Key]]:
    """Roll out, score, train, publish; and explore for the next iteration beside it."""
    layers: dict[str, MaterializedLayer] = {}

    def add(name: str, pool: str, calls: Sequence[tuple[Any, ...]], **more: Any) -> list[Key]:
        needs = {"head": "head", "trainer": "reserved", "engine": "engine"}.get(pool, "gate")
        annotations = {"pool": pool, "phase": name.split("/")[0], "iteration": more.pop("iteration", 0)}
        annotations |= {"resources": {needs: 1}, **more}
        layers[name] = MaterializedLayer({(name, at): call for at, call in enumerate(calls)}, annotations=annotations)
        return [(name, at) for at in range(len(calls))]

    shards = max(schedule.widths)

    def requests(name: str, pool: str, calls: Sequence[tuple[Any, ...]], **more: Any) -> list[list[Key]]:
        sharded = [(*call, f"{name}/{at}", shard) for at, call in enumerate(calls) for shard in range(shards)]
        keys = add(name, pool, sharded, shards=shards, widths=list(schedule.widths), **more)
        return [keys[first : first + shards] for first in range(0, len(keys), shards)]

    rollouts = requests(
        "rollout",
        schedule.rollout_pool,
        [(_denoise, _request(schedule, "rollout", at)) for at in range(schedule.rollouts)],
        window_s=schedule.window_s,
    )
    scores = add("score", "engine", [(_score, keys[0]) for keys in rollouts])
    others = [key for keys in rollouts for key in keys[1:]]
    (whole,) = add("advantage", "trainer", [(_collect, store, scores, others)])
    parts = [(_train, whole, part, *([("train", part - 1)] if part else [])) for part in range(schedule.parts)]
    train = add("train", "training", parts)
    outputs = add("publish", "trainer", [(_publish, train[-1])])
    if schedule.rounds and schedule.spot:
        outputs += _exploration(schedule, add, requests)
    return HighLevelGraph(layers, {name: set() for name in layers}), [*outputs, whole]


def _exploration(schedule: Schedule, add: Any, requests: Any) -> list[Key]:
    scores: list[list[Key]] = []
    others: list[Key] = []
    for r in range(schedule.rounds):
        seen = [key for earlier in scores[: max(0, r - 1)] for key in earlier]
        (allocation,) = add(
            f"allocate-r{r}", "head", [(_allocate, schedule.seed, r, schedule.slots, seen)], iteration=1
        )
        calls = [(_explore, allocation, slot) for slot in range(schedule.slots)]
        explored = requests(f"explore-r{r}", "spot", calls, iteration=1)
        scores.append(add(f"explore-score-r{r}", "engine", [(_score, keys[0]) for keys in explored], iteration=1))
        others += [key for keys in explored for key in keys[1:]]
    everything = [key for some in scores for key in some]
    (select,) = add("select", "head", [(_select, everything, others)], iteration=1)
    return [select]


def _request(schedule: Schedule, purpose: Literal["rollout", "explore"], number: int) -> Request:
    steps = 2 + (schedule.seed + number) % 6
    return Request(
        run=RUN,
        iteration=int(purpose == "explore"),
        purpose=purpose,
        prompt=Prompt(id=number, text=""),
        seeds=tuple(range(number, number + 1 + number % 3)),
        sampler="ode",
        sigmas=tuple(range(steps + 1, 0, -1)),
        sde_window=(0, 1),
        noise_level=1.0,
        guidance=1.0,
        height_px=8,
        width_px=8,
        weights=WeightsRef(version=0, sha256=""),
    )


def _denoise(request: Request, gang: str, shard: int) -> str | Surplus | Dropped | Quarantined:
    place = signals.placed(gang, shard, request)
    if not isinstance(place, Placement):
        return place
    reason = signals.check(request)
    return Dropped(reason=reason) if reason else f"image {request.id}"


def _explore(allocation: Sequence[Request], slot: int, gang: str, shard: int) -> Any:
    return _denoise(allocation[slot], gang, shard)


def _allocate(seed: int, round_index: int, slots: int, seen: Sequence[Any]) -> list[Request]:
    schedule = replace(draw(seed), seed=seed)
    return [_request(schedule, "explore", 100 * round_index + slot) for slot in range(slots)]


def _score(image: Any) -> Any:
    return f"score of {image}" if isinstance(image, str) else image


def _collect(store: Callable[[], None], scores: Sequence[Any], surplus: Sequence[Any]) -> tuple[Any, ...]:
    store()
    return tuple(scores)


def _train(whole: Any, part: int, before: Any = None) -> Any:
    return (whole, part, before)


def _publish(trained: Any) -> Any:
    return ("published", trained)


def _select(scores: Sequence[Any], surplus: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(scores)


class _Timing:
    """Some work is long beside the blows, some short."""

    launch_s, form_s, graph_s, start_up_s = 0.02, 0.05, 0.1, 0.5

    def __init__(self, schedule: Schedule) -> None:
        self._step_s = 0.05 + (schedule.seed % 7) / 10
        self._train_s = 0.5 + schedule.seed % 3

    def work(self, function: Any, arguments: Sequence[Any], memory: dict[str, Any]) -> Denoising | Fixed:
        if function is _denoise or function is _explore:
            request = arguments[0] if function is _denoise else arguments[0][arguments[1]]
            return Denoising(request=request.id, samples=len(request.seeds), steps=request.steps)
        if function is _train:
            return Fixed(seconds=self._train_s)
        return Fixed(seconds=0.05 if function is _score else 0.0)

    def step_s(self, samples: int, width: int, pool: str) -> float:
        return self._step_s * samples / width


def _stays(schedule: Schedule, now_s: float) -> Iterator[Stay]:
    for at in range(schedule.reserved):
        yield Stay(
            pool="reserved", name=f"reserved-{at}", node="node:reserved", ups=((now_s, inf),), replace_after_s=1.0
        )
    for at in range(schedule.spot):
        node = f"node:spot-{at // schedule.per_node}"
        yield Stay(pool="spot", name=f"spot-{at}", node=node, ups=((now_s, inf),), replace_after_s=1.0)
