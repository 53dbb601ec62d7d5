"""What happened to workers, gangs and tasks, kept until the driver fetches it for the run directory; decides nothing.

Times are in seconds since 1970.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.gangs import GangState
from spotlight.records import Pool, Span, WorkerLife


@dataclass(frozen=True, slots=True)
class Label:
    """What the annotations say of a task."""

    pool: str
    phase: str
    iteration: int


class Journal:
    """Lives of workers, spans of work, events and decisions, in the order in which they came."""

    def __init__(self) -> None:
        self.lives: dict[str, WorkerLife] = {}
        """Of all workers there were, by address."""
        self.spans: list[Span] = []
        """Since the last `drain`, as are the events and the decisions."""
        self.events: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []
        """Rows of `spotlight.plan.replay`."""

    def joined(self, address: str, worker: str, pool: str) -> None:
        self.lives[address] = WorkerLife(worker=worker, pool=pool, joined_s=time.time(), left_s=None, reason="")
        self.event("joined", worker=worker)

    def left(self, address: str, reason: str) -> None:
        life = self.lives[address] = replace(self.lives[address], left_s=time.time(), reason=reason)
        self.event(reason, worker=life.worker)

    def pool(self, address: str) -> Pool:
        return "spot" if self.lives[address].pool == "spot" else "reserved"

    def event(self, event: str, *, gang: GangState | None = None, **facts: Any) -> None:
        row: dict[str, Any] = {"at_s": time.time(), "event": event, **facts}
        if gang:
            row |= {"gang": gang.name, "epoch": gang.epoch, "width": gang.width, "step": gang.step}
            row["workers"] = list(gang.members.values())
        self.events.append(row)

    def gang_event(self, event: str, gang: GangState) -> None:
        """Of a single worker that starts a request afresh there is nothing to tell."""
        if gang.epoch > 1 or gang.width > 1:
            self.event(event, gang=gang)

    def ended(self, key: Any, label: Label, gang: GangState | None, facts: Mapping[str, Any], *, failed: bool) -> None:
        """A task has a result or an error, of which Dask tells these facts."""
        address = facts.get("worker", "")
        compute = [one for one in facts.get("startstops") or () if one["action"] == "compute"]
        if address in self.lives and compute:
            outcome = "failed" if failed else "dropped" if str(facts.get("typename")).endswith(".Dropped") else "done"
            self.span(key, label, gang, address, compute[0]["start"], compute[-1]["stop"], outcome)

    def span(
        self, key: Any, label: Label, gang: GangState | None, address: str, start_s: float, stop_s: float, outcome: str
    ) -> None:
        """A worker was at work on a task."""
        life = self.lives[address]
        uncommitted_s, redone_s = gang.waste(start_s, stop_s) if gang else (None, 0.0)
        self.spans.append(
            Span(
                worker=life.worker,
                pool=life.pool,
                phase=label.phase,
                iteration=label.iteration,
                key=str(key),
                start_s=start_s,
                stop_s=stop_s,
                outcome=outcome,
                uncommitted_s=uncommitted_s,
                redone_s=redone_s,
            )
        )

    def drain(self) -> dict[str, list[dict[str, Any]]]:
        """The spans, events and decisions since the last call, and the lives of all workers so far."""
        spans, self.spans = self.spans, []
        events, self.events = self.events, []
        decisions, self.decisions = self.decisions, []
        return {
            "spans": [asdict(span) for span in spans],
            "workers": [asdict(life) for life in self.lives.values()],
            "events": events,
            "decisions": decisions,
        }
