"""When each worker of a pool is there: all the time, or along a trace that was recorded or is made up.

Pure: chance is fixed by the seed. The live pools and the virtual cluster follow the same answer.
"""

from __future__ import annotations

from math import inf

from spotlight.config import PoolSection
from spotlight.market.trace_models import MODELS, synthesise
from spotlight.market.traces import SECONDS_PER_H, Switches, Trace
from spotlight.records import SpotlightError

MADE_UP_S = 30 * 24 * SECONDS_PER_H
"""Length of a made-up trace, in its own time; the workers at its end stay."""
LONGEST_RUN_S = 24 * SECONDS_PER_H
"""The least length of a made-up trace, in the run's time, if that is at most `MADE_UP_MAX_S` in its own."""
MADE_UP_MAX_S = 10_000 * SECONDS_PER_H
"""With "bursty", 2 to 48 places then lose and regain 18,000 to 440,000 instances: made in 2 to 3 s of CPU."""


def made_up_s(pool: PoolSection) -> float:
    """How long a pool's made-up trace must last, in the run's time."""
    return max(MADE_UP_S / pool.speedup, min(LONGEST_RUN_S, MADE_UP_MAX_S / pool.speedup))


def pool_switches(
    pool: PoolSection, recorded: Trace | None, *, seed: int, duration_s: float, name: str = "spot"
) -> tuple[Switches, ...]:
    """When each worker's place comes up and goes down, in seconds from the pool's start, one entry for each worker.

    After the trace's end every place stays as it was then.

    Args:
        recorded: what the file ``pool.trace`` says; None where the pool names none.
        seed: of the run; fixes a made-up trace, and the share that is drawn of a recorded one.
        duration_s: how long a made-up trace must last.
        name: of the pool. Pools with made-up traces do not lose the same places at the same moments.

    Raises:
        SpotlightError: the recorded trace is over before the run begins.
    """
    workers_per_place = pool.workers_per_node if pool.trace_takes == "node" else 1
    places, start_s = -(-pool.workers // workers_per_place), pool.trace_offset_h * SECONDS_PER_H
    if pool.trace_model:
        stop_s = start_s + duration_s * pool.speedup
        trace_seed = seed if name == "spot" else seed + sum(name.encode()) * 1_000_003
        trace = synthesise(seed=trace_seed, capacity=max(1, places), duration_s=stop_s, model=MODELS[pool.trace_model])
    elif recorded:
        trace = recorded.sample(pool.trace_share, seed=seed) if pool.trace_share < 1 else recorded
    else:
        return (((0.0, True),),) * pool.workers
    if start_s >= trace.duration_s:
        raise SpotlightError(f"the trace lasts {trace.duration_s / SECONDS_PER_H:g} h: begin before its end")
    if start_s:
        trace = trace.cut(start_s, trace.duration_s)
    switches = trace.stretch(1 / pool.speedup).places(places)
    return tuple(switches[worker // workers_per_place] for worker in range(pool.workers))


def ups(switches: Switches) -> tuple[tuple[float, float], ...]:
    """When a place has a worker, as ``(from_s, until_s)``; after the last switch it stays as it was."""
    found: list[tuple[float, float]] = []
    since_s: float | None = None
    for time_s, up in switches:
        if up and since_s is None:
            since_s = time_s
        elif not up and since_s is not None:
            found.append((since_s, time_s))
            since_s = None
    return (*found, (since_s, inf)) if since_s is not None else tuple(found)


def preemption_kinds(pool: PoolSection) -> tuple[str, ...]:
    """How a place's workers are taken away, in turn."""
    return ("kill", "notice", "hang") if pool.preemption == "mixed" else (pool.preemption,)
