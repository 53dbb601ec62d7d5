"""When each worker of a pool is there: all the time, or along a trace that was recorded or is made up.

Pure: chance is fixed by the seed. The live pools and the virtual cluster follow the same answer.
"""

from __future__ import annotations

from spotlight.config import PoolSection
from spotlight.market.trace_models import MODELS, synthesise
from spotlight.market.traces import SECONDS_PER_H, Switches, Trace


def pool_switches(pool: PoolSection, recorded: Trace | None, *, seed: int, duration_s: float) -> tuple[Switches, ...]:
    """When each worker's place comes up and goes down, in seconds from the pool's start, one entry for each worker.

    After the trace's end every place stays as it was then.

    Args:
        recorded: what the file ``pool.trace`` says; None where the pool names none.
        seed: of the run; fixes a made-up trace, and the share that is drawn of a recorded one.
        duration_s: how long a made-up trace must last.

    Raises:
        SpotlightError: the recorded trace is over before the run begins.
    """
    size = pool.workers_per_node if pool.trace_takes == "node" else 1
    places, start_s = -(-pool.workers // size), pool.trace_offset_h * SECONDS_PER_H
    if pool.trace_model:
        stop_s = start_s + duration_s * pool.speedup
        trace = synthesise(seed=seed, capacity=max(1, places), duration_s=stop_s, climate=MODELS[pool.trace_model])
    elif recorded:
        trace = recorded.sample(pool.trace_share, seed=seed) if pool.trace_share < 1 else recorded
    else:
        return (((0.0, True),),) * pool.workers
    if start_s:
        trace = trace.cut(start_s, trace.duration_s)
    switches = trace.stretch(1 / pool.speedup).places(places)
    return tuple(switches[worker // size] for worker in range(pool.workers))
