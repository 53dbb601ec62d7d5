"""A small iteration to try faults on: its graph, how long its work takes, and what its results must be.

It has the shape of a real one: roll out, score, train (gradients, their sums, updates), publish, and explore for the
next iteration beside it. Its results name their inputs, so that one that is missing, or made of something else, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any, Literal

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cluster.dispatch.events import Key
from cluster.virtual.timing import Denoising, Fixed
from spotlight.device.signals import signals
from spotlight.records import AHEAD, Dropped, Placement, Prompt, Quarantined, Request, Surplus, WeightsRef, record

RUN = "faults"
FIRST_AHEAD = 1000
"""Number of the first rollout of the next iteration."""


@record
class Example:
    """The size and kind of the iteration."""

    widths: tuple[int, ...]
    rollouts: int
    pool: str
    """Pool of rollouts, as in a task's annotation."""
    rounds: int
    """Rounds of exploration."""
    slots: int
    """Requests of each round."""
    parts: int
    """Parts of each update, no more than rollouts."""
    updates: int = 1
    train_pool: str = "reserved"
    """Pool of gradients, as in a task's annotation."""
    window_s: float = inf
    train_width: int = 1
    """Workers that compute a gradient together."""
    slices: int = 1
    """Slices of a gradient, each added by a task of its own; 1: updates add all."""
    score_pool: str = "engine"
    """Where scores are computed: where a request was denoised; or, with "reward", by workers that only score."""
    ahead: int = 0
    """Rollouts of the next iteration."""

    def graph(self, store: Callable[[], None]) -> tuple[HighLevelGraph, list[Key]]:
        """The graph, and the keys whose results are wanted.

        Args:
            store: is called before the samples of each part are collected; what it raises, the task raises.
        """
        layers = _Layers(self)
        requests = [(_denoise, request("rollout", at)) for at in range(self.rollouts)]
        rollouts = layers.add_requests("rollout", self.pool, requests, window_s=self.window_s)
        scores = self._add_scores(layers, "{}", [keys[0] for keys in rollouts])
        calls = [(_collect, store, scores[p :: self.parts], _others(rollouts[p :: self.parts])) for p in self._parts]
        samples = layers.add("advantage", "head", calls)
        gradients: list[list[Key]] = []
        before: list[Key] = []
        for u in range(self.updates):
            name, shares = "+" * u, [(u, p, samples[p], before[0] if before else ()) for p in self._parts]
            firsts, others = self._add_gradients(layers, f"train{name}", shares)
            gradients.append(firsts)
            terms = self._add_sums(layers, f"add{name}", firsts)
            call = (_update, u, self.slices, list(gradients), terms, before[0] if before else (), others)
            before = layers.add(f"update{name}", "update", [call], phase="update")
        outputs = layers.add("publish", "reserved-engine", [(_publish, before[0])])
        if self.rounds:
            outputs += self._add_exploration(layers)
        if self.ahead:
            outputs += self._add_rollouts_ahead(layers)
        return HighLevelGraph(layers.layers, {name: set() for name in layers.layers}), [*outputs, *samples]

    @property
    def _parts(self) -> range:
        return range(self.parts)

    def _add_exploration(self, layers: _Layers) -> list[Key]:
        scores: list[list[Key]] = []
        others: list[Key] = []
        for r in range(self.rounds):
            seen = [key for earlier in scores[: max(0, r - 1)] for key in earlier]
            (allocation,) = layers.add(f"allocate-r{r}", "head", [(_allocate, r, self.slots, seen)], iteration=1)
            calls = [(_explore, allocation, slot) for slot in range(self.slots)]
            explored = layers.add_requests(f"explore-r{r}", "spot", calls, iteration=1)
            results = [keys[0] for keys in explored]
            scores.append(self._add_scores(layers, f"explore-{{}}-r{r}", results, iteration=1))
            others += _others(explored)
        return layers.add("select", "head", [(_collect, _nothing, sum(scores, []), others)], iteration=1)

    def _add_rollouts_ahead(self, layers: _Layers) -> list[Key]:
        calls = [(_denoise_ahead, request("rollout", FIRST_AHEAD + at)) for at in range(self.ahead)]
        rollouts = layers.add_requests(AHEAD, "spot", calls, iteration=1)
        ends = [keys[0] for keys in rollouts]
        if self.score_pool == "engine":
            ends = self._add_scores(layers, "{}-ahead", ends, iteration=1)
        return layers.add("ahead", "head", [(_collect, _nothing, ends, _others(rollouts))], iteration=1)

    def _add_gradients(
        self, layers: _Layers, name: str, shares: Sequence[tuple[Any, ...]]
    ) -> tuple[list[Key], list[Key]]:
        if self.train_width == 1:
            return layers.add(
                name, f"gradient-{self.train_pool}", [(_gradient, *share) for share in shares], phase="train"
            ), []
        calls = [(_shared, *share) for share in shares]
        gangs = layers.add_requests(name, self.train_pool, calls, widths=(self.train_width,), phase="train")
        return [keys[0] for keys in gangs], _others(gangs)

    def _add_sums(self, layers: _Layers, name: str, gradients: list[Key]) -> list[Key]:
        calls = [(_add, at, gradients) for at in range(self.slices)]
        return layers.add(name, f"gradient-{self.train_pool}", calls, phase="add") if self.slices > 1 else gradients

    def _add_scores(self, layers: _Layers, phase: str, results: list[Key], iteration: int = 0) -> list[Key]:
        if self.score_pool != "engine":
            results = layers.add(phase.format("decode"), "engine", [(_decode, key) for key in results], iteration)
        return layers.add(phase.format("score"), self.score_pool, [(_score, key) for key in results], iteration)

    def rollout_of(self, got: dict[Key, Any], number: int) -> Any:
        """The result of one of the rollouts."""
        return got["advantage", number % self.parts][number // self.parts]

    def wrong(self, got: dict[Key, Any], *, closes: bool, may_quarantine: Callable[[str, int], bool]) -> list[str]:
        """Sentences about results that are not as they must be.

        Args:
            closes: the end of training closes exploration, of which any part may be dropped then.
            may_quarantine: whether a request, by the name of its gang, may have been set aside after so many losses.
        """
        found = []
        for at in range(self.rollouts):
            result = self.rollout_of(got, at)
            found += _wrong(f"rollout/{at}", request("rollout", at), result, may_quarantine, may_drop=False)
        samples = [got["advantage", part] for part in self._parts]
        expected: Any = ()
        for u in range(self.updates):  # every part of every update once, in order
            gradients = tuple(("gradient", u, p, samples[p], expected) for p in self._parts)
            expected = ("updated", u, gradients, expected)
        if got["publish", 0] != ("published", expected):
            found.append(f"published is {got['publish', 0]!r} instead of {expected!r}")
        for at, result in enumerate(got.get(("select", 0), ())):
            r, slot = divmod(at, self.slots)
            asked = request("explore", 100 * r + slot)
            if slot < _slots_used(r, self.slots) or not isinstance(result, Dropped | Quarantined):
                found += _wrong(f"explore-r{r}/{slot}", asked, result, may_quarantine, may_drop=closes)
        for at, result in enumerate(got.get(("ahead", 0), ())):
            asked, gang = request("rollout", FIRST_AHEAD + at), f"{AHEAD}/{at}"
            if self.score_pool == "engine" or result != _image(asked):
                found += _wrong(gang, asked, result, may_quarantine, may_drop=True)
        counts = sum(map(len, samples)), *(len(got.get((name, 0), ())) for name in ("select", "ahead"))
        if counts != (self.rollouts, self.rounds * self.slots, self.ahead):
            found.append(f"{counts} results of rollouts, of exploration and for the next iteration came of {self}")
        return found


class _Layers:
    """A graph under construction."""

    def __init__(self, example: Example) -> None:
        self.layers: dict[str, MaterializedLayer] = {}
        self._widths = example.widths

    def add(self, name: str, pool: str, calls: Sequence[tuple[Any, ...]], iteration: int = 0, **more: Any) -> list[Key]:
        more = {"phase": name, **more}
        needs = {"head": "head", "reserved-engine": "reserved", "engine": "engine"}.get(pool, "gate")
        annotations = {"pool": pool, "iteration": iteration, "resources": {needs: 1}, **more}
        tasks = {(name, at): call for at, call in enumerate(calls)}
        self.layers[name] = MaterializedLayer(tasks, annotations=annotations)
        return list(tasks)

    def add_requests(
        self, name: str, pool: str, calls: Sequence[tuple[Any, ...]], widths: Sequence[int] = (), **more: Any
    ) -> list[list[Key]]:
        """Add tasks for each request, as many as the widest gang has ranks; returns their keys, request by request."""
        widths = widths or self._widths
        shards = widths[-1]
        sharded = [(*call, f"{name}/{at}", shard) for at, call in enumerate(calls) for shard in range(shards)]
        keys = self.add(name, pool, sharded, shards=shards, widths=list(widths), **more)
        return [keys[first : first + shards] for first in range(0, len(keys), shards)]


def _others(requests: Sequence[Sequence[Key]]) -> list[Key]:
    """All shards but the first: Dask forgets a task that nobody depends on, so the task that collects scores takes
    these."""
    return [key for keys in requests for key in keys[1:]]


@cache
def request(purpose: Literal["rollout", "explore"], number: int) -> Request:
    """A request of one or three samples, and two or seven steps, by its number."""
    return Request(
        run=RUN,
        iteration=int(purpose == "explore"),
        purpose=purpose,
        prompt=Prompt(id=number, text=""),
        seeds=tuple(range(number, number + 1 + number % 3)),
        sampler="ode",
        sigmas=tuple(range(3 + number % 6, 0, -1)),
        sde_window=(0, 1),
        noise_level=1.0,
        guidance=1.0,
        height_px=8,
        width_px=8,
        weights=WeightsRef(version=0, sha256=""),
    )


def _image(asked: Request) -> str:
    return f"image {asked.id}"


def _denoise(asked: Request, gang: str, shard: int) -> str | Surplus | Dropped | Quarantined:
    place = signals.placed(gang, shard, asked)
    if not isinstance(place, Placement):
        return place
    reason = signals.check(asked)
    return Dropped(reason=reason) if reason else _image(asked)


def _denoise_ahead(asked: Request, gang: str, shard: int) -> str | Surplus | Dropped | Quarantined:
    return _denoise(asked, gang, shard) if signals.was_told(gang, shard) else Dropped(reason="it goes on later")


def _explore(allocation: Sequence[Request], slot: int, gang: str, shard: int) -> Any:
    return _denoise(allocation[slot], gang, shard) if slot < len(allocation) else Dropped(reason="no use for it")


def _allocate(round_index: int, slots: int, seen: Sequence[Any]) -> list[Request]:
    return [request("explore", 100 * round_index + slot) for slot in range(_slots_used(round_index, slots))]


def _slots_used(round_index: int, slots: int) -> int:
    """Slots of a round that have a request: in some rounds, one has none."""
    return max(1, slots - round_index % 2)


def _decode(image: Any) -> Any:
    return image


def _score(image: Any) -> Any:
    return f"score of {image}" if isinstance(image, str) else image


def _nothing() -> None: ...


def _collect(store: Callable[[], None], scores: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    store()
    assert all(isinstance(other, Surplus | Dropped | Quarantined) for other in others), others
    return tuple(scores)


def _gradient(update: int, part: int, samples: Any, before: Any = ()) -> Any:
    return ("gradient", update, part, samples, before)


def _shared(update: int, part: int, samples: Any, before: Any, gang: str, shard: int) -> Any:
    """One rank's part of a gradient that a gang computes."""
    place = signals.told(gang, shard)
    return _gradient(update, part, samples, before) if isinstance(place, Placement) else place


def _add(at: int, gradients: Sequence[Any]) -> Any:
    """A sum is the gradients that a slice of it adds, in order."""
    return ("sum", at, tuple(gradients))


def _update(
    update: int,
    slices: int,
    gradients: Sequence[Sequence[Any]],
    terms: Sequence[Any],
    before: Any,
    others: Sequence[Any],
) -> Any:
    assert all(isinstance(other, Surplus) for other in others), others
    added = tuple(gradients[update])
    assert tuple(terms) == (tuple(("sum", at, added) for at in range(slices)) if slices > 1 else added), terms
    return ("updated", update, added, before)


def _publish(updated: Any) -> Any:
    return ("published", updated)


def _wrong(
    gang: str, asked: Request, result: Any, may_quarantine: Callable[[str, int], bool], *, may_drop: bool
) -> list[str]:
    match result:
        case Dropped() if may_drop:
            return []
        case Quarantined(request=given, preemptions=count) if given == asked and may_quarantine(gang, count):
            return []
    expected = f"score of {_image(asked)}"
    return [] if result == expected else [f"{gang} is {result!r} instead of {expected!r}"]


class ExampleTiming:
    """How long the example's work takes.

    Args:
        step_s: of a denoising step of one sample on one worker.
        train_s: of a gradient, or an update; a sum of gradients takes a quarter of it.
        start_up_s: from a machine's coming until its worker works.
    """

    launch_s, form_s, graph_s = 0.02, 0.05, 0.1

    def __init__(self, *, step_s: float, train_s: float, start_up_s: float) -> None:
        self._step_s, self._train_s, self.start_up_s = step_s, train_s, start_up_s

    def work(self, function: Any, given: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
        arguments = given()
        if function is _explore and arguments[1] >= len(arguments[0]):
            return Fixed(seconds=0.0)
        if function in (_denoise, _denoise_ahead, _explore):
            asked = arguments[0] if function is not _explore else arguments[0][arguments[1]]
            return Denoising(request=asked.id, samples=len(asked.seeds), steps=asked.steps)
        if function is _shared:
            return Denoising(request=f"u{arguments[0]}-p{arguments[1]}", samples=1, steps=1, step_s=self._train_s)
        if function is _gradient or function is _update:
            return Fixed(seconds=self._train_s)
        if function is _add:
            return Fixed(seconds=self._train_s / 4)
        return Fixed(seconds=0.05 if function is _score else 0.0)

    def step_s(self, samples: int, width: int, pool: str) -> float:
        return self._step_s * samples / width
