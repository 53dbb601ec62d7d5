"""The log of what exploration was given, and from what: enough to make every allocation again and compare.

What the dispatcher decided is in its own log of events (`cluster.dispatch.events`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spotlight.plan import bandit
from spotlight.plan.beliefs import Arm, Beliefs
from spotlight.records import record, row_of


@record
class Allocation:
    """A row for one round of the bandit: what was given, and what came of it."""

    arms: tuple[Arm, ...]
    beliefs: Beliefs
    given: Mapping[str, int]
    """The other arguments of `bandit.allocate`, by name."""
    chunks: tuple[tuple[int, int, int], ...]


def allocation_row(
    arms: Sequence[Arm], beliefs: Beliefs, chunks: Sequence[tuple[int, int, int]], **given: int
) -> dict[str, Any]:
    """A row for one round of the bandit; ``given`` are the other arguments of `bandit.allocate`."""
    row = Allocation(arms=tuple(arms), beliefs=beliefs, given=given, chunks=tuple(chunks))
    believed = row_of(beliefs) | {"prompts": [row_of(seen) for seen in beliefs.prompts]}
    return {"decision": "allocate", **row_of(row), "arms": [row_of(arm) for arm in arms], "beliefs": believed}


def differing(rows: Iterable[Allocation | Mapping[str, Any]]) -> Iterator[Allocation]:
    """The logged allocations that `bandit.allocate` would now make otherwise, from the same input; skips other rows."""
    for row in rows:
        if isinstance(row, Allocation) and bandit.allocate(row.arms, row.beliefs, **row.given) != list(row.chunks):
            yield row
