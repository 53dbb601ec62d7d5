"""Names of what the scheduler and its workers tell each other, and of what the scheduler tells whoever started them."""

from __future__ import annotations

ORDER, PLACE = "spotlight-order", "spotlight-place"
"""To workers: an order for the work in flight; where a shard runs."""
BEAT, LOST_ENGINE = "spotlight-beat", "spotlight-lost-engine"
"""From workers: how far a gang is; the engine process died."""
HOLDS = "spotlight-holds"
"""From workers: a file of weights is on their node now."""
READY, REFUSED = "spotlight-ready", "spotlight-refused"
"""From workers: one can do the run's work; one cannot, at least not yet, and why."""
EVICTED = "spotlight-evicted"
"""Topic of the scheduler's events, for whoever started the workers: the process of one that hangs is to be ended."""
HEARD_OF = "spotlight-heard-of"
"""Topic of the scheduler's events, for the same: a worker is there, whether it can do the run's work or not."""
