"""What each worker said last of whether it takes part in the run, until it is gone."""

from __future__ import annotations

from cluster.dispatch.events import WorkerPool
from spotlight.records import record


@record
class Ready:
    """It takes part."""

    pool: WorkerPool
    node: str
    """Empty for a head worker."""


@record
class Refusal:
    """It takes no part, for now or for good."""

    name: str
    reason: str
    lasts: bool
    """Whether the reason is taken to last."""


class Answers(dict[str, Ready | Refusal]):
    """By address. A worker that has not answered yet, or takes part in no run, is not here."""

    def ready_in(self, *pools: WorkerPool) -> dict[str, Ready]:
        """The workers of some pools that take part."""
        return {at: each for at, each in self.items() if isinstance(each, Ready) and each.pool in pools}

    def refusals(self) -> dict[str, Refusal]:
        """The workers that take no part; the first to say so first."""
        return {at: each for at, each in self.items() if isinstance(each, Refusal)}
