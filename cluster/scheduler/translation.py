"""What Dask tells of tasks and graphs, in our words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.dispatch.events import Key, Layer, TaskState, Work

STATES: dict[str, TaskState] = {
    "waiting": "waiting",
    "queued": "waiting",
    "no-worker": "gated",
    "processing": "processing",
    "memory": "memory",
    "erred": "erred",
    "released": "released",
    "forgotten": "forgotten",
}
"""Dask's names of a task's states to ours."""
STEP_S = 1.0
"""Least difference of the system's clock from ours that means that it was set."""


def layer_of(keys: list[Key], annotations: Mapping[str, Mapping[Key, Any]]) -> Layer:
    """Tasks of one layer, whose annotations are the same."""
    first = keys[0]
    more = {name: annotations[name][first] for name in ("shards", "window_s") if first in annotations.get(name, {})}
    if first in annotations.get("widths", {}):
        more["widths"] = tuple(annotations["widths"][first])
    return Layer(
        name=first[0],
        indices=tuple(sorted(index for _, index in keys)),
        pool=annotations["pool"][first],
        phase=annotations["phase"][first],
        iteration=annotations["iteration"][first],
        **more,
    )


def work_of(facts: Mapping[str, Any], set_s: float = 0.0) -> Work | None:
    """What a worker did for a task that has a result or an error, from Dask's facts of the transition; None if unknown.

    Args:
        set_s: how far the system's clock, which Dask reports, is behind ours.
    """
    compute = [entry for entry in facts.get("startstops") or () if entry["action"] == "compute"]
    if not compute:
        return None
    dropped = str(facts.get("typename")).endswith(".Dropped")
    start_s, stop_s = compute[0]["start"] + set_s, compute[-1]["stop"] + set_s
    return Work(start_s=min(start_s, stop_s), stop_s=stop_s, dropped=dropped)
