"""How a cluster is dispatched: what the settings say of it, and times that the live and the virtual one share."""

from __future__ import annotations

from spotlight.config import Config
from spotlight.records import record

WATCH_S = 0.5
"""How often the scheduler looks for silent workers."""
LEAVE_POLL_S = 0.01
"""How often a worker under notice looks whether it is idle."""
CLOSE_MARGIN_S = 2.0
"""How much of a notice's time is left for handing over what the worker's memory holds."""


@record
class Rules:
    """How a cluster is dispatched; the defaults are those of `spotlight.config`."""

    close_with_training: bool = True
    """The end of training closes exploration."""
    explored_first: int = 0
    """Requests that explore for an iteration which spot workers run before they compute gradients."""
    hang_after_s: float = 60.0
    """A worker that is silent for longer is ended."""
    quarantine_after: int = 5
    """Preemptions in a row without a new step, after which nobody runs a request any more."""
    reserved_computes: bool = True
    """Reserved workers can do a GPU's work: a training task that lost ``quarantine_after`` spot workers goes to one,
    and after training they help with exploration."""
    widens: bool = True
    """A gang at work forms anew when idle workers could make it wider; it then resumes its steps."""
    moves: bool = True
    """A rollout at work on reserved workers goes on elsewhere, from its last step, once their window is over."""


def rules_of(config: Config) -> Rules:
    """What the settings say about dispatching."""
    strategy = config.strategy
    return Rules(
        close_with_training=strategy.exploration == "stale" and config.exploration.budget != "fixed",
        explored_first=config.explored_first,
        hang_after_s=config.cluster.hang_after_s,
        quarantine_after=config.cluster.quarantine_after,
        reserved_computes=config.reserved_computes,
        widens=strategy.elastic and strategy.on_preemption == "resume",
        moves=strategy.on_preemption == "resume",
    )
