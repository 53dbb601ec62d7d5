"""The log of what exploration was given, and from what: enough to make every allocation again and compare.

What the dispatcher decided is in its own log of events (`cluster.events`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spotlight.plan import bandit
from spotlight.plan.bandit import Arm, Beliefs


def allocation_row(
    arms: Sequence[Arm], beliefs: Beliefs, chunks: Sequence[Sequence[int]], **given: Any
) -> dict[str, Any]:
    """A row for one round of the bandit; ``given`` are the other arguments of `bandit.allocate`."""
    return {
        "decision": "allocate",
        "arms": [asdict(arm) for arm in arms],
        "beliefs": asdict(beliefs),
        "given": given,
        "chunks": [list(chunk) for chunk in chunks],
    }


def differing(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows of allocations that would be others if they were made now, from the same input."""
    for row in rows:
        if row["decision"] == "allocate" and _allocate(row) != [tuple(chunk) for chunk in row["chunks"]]:
            yield row


def _allocate(row: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    arms = [Arm(**_tuples(arm)) for arm in row["arms"]]
    return bandit.allocate(arms, Beliefs.of(row["beliefs"]), **row["given"])


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
