"""A graph under construction: layers of tasks, their keys, edges and annotations.

The annotations say in which ``pool`` a layer's tasks run; the cluster turns that into places. Dask's synchronous
scheduler ignores them and gets the same results.

Pools of tasks that wait behind the gate:

- ``any``, ``spot``, ``reserved``: shards of denoising requests, as many each as the widest gang has ranks, until
  workers of that pool are free;
- ``gradient-any``, ``-spot``, ``-reserved``: gradients of an update's parts, and their sums, each on one worker, until
  one of that pool is free that no rollout needs;
- ``update``: the optimizer's step, on the reserved worker that took the one before, if it can be had;
- ``reward``: scores, until a worker that only scores is free, where there are such.

Pools of tasks that Dask places:

- ``engine``: what needs a model, where its input is; on a spot worker if reserved ones have no GPU;
- ``reserved-engine``: to prepare the run, and to publish, on a reserved worker;
- ``head``: what only decides, beside the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from spotlight.records import record

Key = tuple[str, int]
Calls = Sequence[tuple[Any, ...]]
"""A sequence of ``(function, *arguments)``; keys among the arguments become edges."""

RESOURCES = {
    "any": {"gate": 1},
    "spot": {"gate": 1},
    "reserved": {"gate": 1},
    "engine": {"engine": 1},
    "reward": {"gate": 1},
    "reserved-engine": {"reserved": 1, "engine": 1},
    "gradient-any": {"gate": 1},
    "gradient-reserved": {"gate": 1},
    "gradient-spot": {"gate": 1},
    "update": {"gate": 1},
    "head": {"head": 1},
}
"""{pool: resources that its tasks ask for}. No worker has a ``gate``: such a task waits until the cluster opens it."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A graph under construction, layer by layer, upstream first."""

    session: str = ""
    """Part of all keys: a scheduler that knows a key already would return its old result."""
    on_spot: bool = False
    """Tasks for an engine, updates excepted, run on spot workers: the reserved ones have no GPU."""
    tasks: dict[str, MaterializedLayer] = field(default_factory=dict)
    dependencies: dict[str, set[str]] = field(default_factory=dict)

    def add(
        self,
        phase: str,
        iteration: int,
        calls: Calls,
        *,
        pool: str,
        after: Sequence[Key] = (),
    ) -> list[Key]:
        """Add one task per call.

        Args:
            after: keys whose layers the calls depend on.
        """
        return self._add(self._free_name(phase, iteration), phase, iteration, calls, pool, after)

    def _free_name(self, phase: str, iteration: int) -> str:
        name = f"{phase}-{iteration}" + (f"-{self.session}" if self.session else "")
        while name in self.tasks:
            name += "+"
        return name

    def _add(
        self, name: str, phase: str, iteration: int, calls: Calls, pool: str, after: Sequence[Key], **more: Any
    ) -> list[Key]:
        needs = RESOURCES[pool] | ({"spot": 1} if self.on_spot and pool == "engine" else {})
        annotations = {"pool": pool, "phase": phase, "iteration": iteration, "resources": needs, **more}
        mapping = {(name, index): call for index, call in enumerate(calls)}
        self.tasks[name] = MaterializedLayer(mapping, annotations=annotations)
        self.dependencies[name] = {layer for layer, _ in after}
        return list(mapping)

    def add_requests(
        self,
        phase: str,
        iteration: int,
        calls: Calls,
        *,
        pool: str,
        widths: Sequence[int],
        after: Sequence[Key] = (),
        window_s: float = inf,
    ) -> list[list[Key]]:
        """Add requests, each as many tasks as the widest gang has ranks; returns the shards of each.

        A task is told its request's name within the graph and its own number, by which the cluster places it.

        Args:
            window_s: how long reserved workers run them while there are spot workers.
        """
        name, shards = self._free_name(phase, iteration), max(widths)
        sharded = [(*call, f"{name}/{index}", shard) for index, call in enumerate(calls) for shard in range(shards)]
        more = {"shards": shards, "widths": list(widths), "window_s": window_s}
        keys = self._add(name, phase, iteration, sharded, pool, after, **more)
        return [keys[first : first + shards] for first in range(0, len(keys), shards)]

    def graph(self) -> HighLevelGraph:
        return HighLevelGraph(self.tasks, self.dependencies)


@record
class Graph:
    """A graph, and the keys of what the driver wants from it."""

    graph: HighLevelGraph
    outputs: Mapping[str, Key | list[Key]]


def first_shards(requests: list[list[Key]]) -> list[Key]:
    """The shard of each request that returns its result."""
    return [shards[0] for shards in requests]


def other_shards(requests: list[list[Key]]) -> list[Key]:
    """The other shards.

    The task that collects the scores depends on them, since Dask forgets a task that nobody depends on. A score does
    not, so that it never waits for them.
    """
    return [key for shards in requests for key in shards[1:]]


def pool_of(pools: Sequence[str]) -> str:
    """The annotation of tasks that may run in these pools."""
    return "any" if len(set(pools)) > 1 else pools[0]
