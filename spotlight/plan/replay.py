"""The log of what was decided from what: enough to make every decision anew and compare.

Pure functions decide; this file turns their inputs and outputs into JSON rows and back. A row of placement says only
which of the waiting requests changed since the row before, so a long queue is not written again each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from spotlight.plan import bandit, offload, placement
from spotlight.plan.bandit import Arm, Beliefs
from spotlight.plan.offload import Sides, Turn
from spotlight.plan.placement import Idle, Launch, Running, View, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A row for one round of the bandit: what was given, and what came of it."""

    arms: tuple[Arm, ...]
    beliefs: Beliefs
    given: Mapping[str, int]
    """The other arguments of `bandit.allocate`, by name."""
    chunks: tuple[tuple[int, int, int], ...]


class PlacementLog:
    """Rows for one session's placements, in order."""

    def __init__(self) -> None:
        self._known: dict[str, Waiting] = {}

    def row(self, view: View, launches: Sequence[Launch], widened: Sequence[str]) -> dict[str, Any]:
        changed = [one for one in view.waiting if self._known.get(one.id) != one]
        self._known |= {one.id: one for one in changed}
        return {
            "decision": "plan",
            "idle": [asdict(one) for one in view.idle],
            "waiting": [one.id for one in view.waiting],
            "changed": [asdict(one) for one in changed],
            "running": [asdict(one) for one in view.running],
            "nodes": dict(view.nodes),
            "regroup_s": view.regroup_s,
            "launches": [asdict(one) for one in launches],
            "widened": list(widened),
        }


def allocation_row(
    arms: Sequence[Arm], beliefs: Beliefs, chunks: Sequence[tuple[int, int, int]], **given: int
) -> dict[str, Any]:
    """A row for one round of the bandit; ``given`` are the other arguments of `bandit.allocate`."""
    row = Allocation(arms=tuple(arms), beliefs=beliefs, given=given, chunks=tuple(chunks))
    return {"decision": "allocate", **asdict(row)}


def turn_row(sides: Sides, turned: Turn) -> dict[str, Any]:
    """A row for whose turn it became between rollout and training; a window without end is null."""
    window_s = None if sides.window_s == inf else sides.window_s
    return {"decision": "turn", "sides": asdict(sides) | {"window_s": window_s}, "turn": asdict(turned)}


def differing(rows: Iterable[Allocation | Mapping[str, Any]]) -> Iterator[Allocation | Mapping[str, Any]]:
    """The rows whose decision would be another if it were made now, from the same input."""
    known: dict[str, Waiting] = {}
    for row in rows:
        if isinstance(row, Allocation):
            if bandit.allocate(row.arms, row.beliefs, **row.given) != list(row.chunks):
                yield row
            continue
        if row["decision"] == "turn":
            if _turn(row) != Turn(**_tuples(row["turn"])):
                yield row
            continue
        known |= {one["id"]: Waiting(**_tuples(one)) for one in row["changed"]}
        view = View(
            idle=tuple(Idle(**one) for one in row["idle"]),
            waiting=tuple(known[name] for name in row["waiting"]),
            running=tuple(Running(**_tuples(one)) for one in row["running"]),
            nodes=row["nodes"],
            regroup_s=row["regroup_s"],
        )
        launches = [Launch(**_tuples(one)) for one in row["launches"]]
        if placement.plan(view) != launches or (row["widened"] and placement.widen(view) != row["widened"]):
            yield row


def _turn(row: Mapping[str, Any]) -> Turn:
    sides = _tuples(row["sides"])
    return offload.turn(Sides(**sides | {"window_s": inf if sides["window_s"] is None else sides["window_s"]}))


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
