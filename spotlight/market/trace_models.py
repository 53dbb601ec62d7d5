"""Makes synthetic spot traces: correlated losses whose means are those of published ones.

Pure: the same seed always gives the same trace.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from spotlight.market.traces import SECONDS_PER_H, Event, Trace
from spotlight.records import SpotlightError, record


@record
class TraceModel:
    """How a synthetic pool loses and regains instances; all losses are correlated."""

    mean_share: float
    """Mean availability, as a share of the capacity."""
    losses_per_instance_h: float
    spread: float
    """Mean share of the instances that a shock takes; the larger it is, the fewer and larger the losses."""
    collapse: float
    """Probability that a shock takes every instance."""


BURSTY = TraceModel(mean_share=24.0 / 32, losses_per_instance_h=0.611, spread=0.047, collapse=0.0)
"""bamboo's p3 trace, 32 nodes: the spread gives its 167 / 79 = 2.1 losses per event."""
CALM = TraceModel(mean_share=57.3 / 64, losses_per_instance_h=0.0995, spread=0.058, collapse=0.0)
"""bamboo's A100 trace on GCP, 64 nodes: the spread gives its 154 / 36 = 4.3 losses per event."""
COLLAPSING = TraceModel(mean_share=0.431, losses_per_instance_h=0.541, spread=0.4, collapse=0.62)
"""SkyPilot's 16-node trace of us-west-2a: 1473 / 145 = 10.2 losses per event, 98 of the 145 events to zero."""
MODELS = {"bursty": BURSTY, "calm": CALM, "collapsing": COLLAPSING}


@lru_cache(maxsize=8)  # a long one takes seconds; all strategies of a simulation have the same
def synthesise(*, seed: int, capacity: int, duration_s: float, model: TraceModel = BURSTY) -> Trace:
    """A synthetic trace with correlated losses, whose means are the model's.

    Shocks arrive at random (Poisson). One takes each instance that is alive with the same probability ``p``,
    drawn anew for each shock: 1 with probability ``collapse``, else from Beta(1, 1/spread - 1), whose mean is
    ``spread``. Capacity comes back in shocks of the same kind. With ``E[p] = collapse + (1 - collapse) spread``,
    ``r = losses_per_instance_h`` and ``a = mean_share``::

        loss shocks per hour   = r / E[p]
        return shocks per hour = r a / (1 - a) / E[p]

    so that in the long run an instance is lost ``r`` times per hour that it is alive, and ``a capacity`` are alive.
    It begins there. Losses per event grow with the capacity, as shocks take shares; the models that this file
    names were fitted at the capacity of their source.

    Raises:
        SpotlightError: a share is outside what it can be, or nothing could ever be alive.

    Source: the common-shock model of Marshall and Olkin (1967), fitted by us to published traces.
    """
    a, r, spread, collapse = model.mean_share, model.losses_per_instance_h, model.spread, model.collapse
    if not (0 < a < 1 and r > 0 and 0 < spread < 1 and 0 <= collapse <= 1 and capacity > 0):
        raise SpotlightError(
            f"synthetic trace: mean_share and spread must be above 0 and below 1, collapse in [0, 1], "
            f"losses_per_instance_h and capacity above 0: capacity is {capacity}, {model}"
        )
    rng = np.random.Generator(np.random.Philox(seed))
    taken = collapse + (1 - collapse) * spread
    losing_per_h, returning_per_h = r / taken, r * a / (1 - a) / taken
    alive = [f"node-{index}" for index in range(round(a * capacity))]
    born = len(alive)
    events = [Event(time_s=0.0, instance=instance, kind="add") for instance in alive]
    time_s = 0.0
    while (time_s := time_s + rng.exponential(SECONDS_PER_H / (losing_per_h + returning_per_h))) < duration_s:
        losing = rng.random() < losing_per_h / (losing_per_h + returning_per_h)
        p = 1.0 if rng.random() < collapse else rng.beta(1, 1 / spread - 1)
        if losing:
            hit = rng.random(len(alive)) < p
            gone = [instance for instance, lost in zip(alive, hit, strict=True) if lost]
            alive = [instance for instance, lost in zip(alive, hit, strict=True) if not lost]
            events += [Event(time_s=time_s, instance=instance, kind="remove") for instance in gone]
        else:
            back = int(rng.binomial(capacity - len(alive), p))
            new = [f"node-{index}" for index in range(born, born + back)]
            alive, born = alive + new, born + back
            events += [Event(time_s=time_s, instance=instance, kind="add") for instance in new]
    return Trace(events=tuple(events), duration_s=duration_s)
