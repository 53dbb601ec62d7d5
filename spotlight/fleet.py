"""A scenario's cluster: where its GPUs stand, when they come and go, how long they take and what they cost.

Pure, but for the files of a trace and of prices that a scenario names. Times count from the run's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from spotlight.machines import Machines, Place, Timing
from spotlight.market.ledger import SECONDS_PER_H, Price
from spotlight.market.prices import read_prices
from spotlight.market.trace_files import read_trace
from spotlight.market.trace_models import MODELS, synthesise
from spotlight.market.traces import Switches
from spotlight.plan.durations import recovery_s, seconds_per_step, start_up_s, train_s
from spotlight.records import Pool
from spotlight.scenario import Scenario, Strategy


def spot_switches(scenario: Scenario) -> tuple[Switches, ...]:
    """When each spot node, or each spot GPU, comes and goes.

    Raises:
        SpotlightError: the trace's file is not usable, or is over before the run begins.
    """
    cluster, wanted = scenario.cluster, scenario.trace
    places = cluster.spot_nodes * (cluster.spot_gpus_per_node if wanted.takes == "gpu" else 1)
    start_s, lasts_s = wanted.offset_h * SECONDS_PER_H, scenario.hours * SECONDS_PER_H
    if wanted.climate:
        climate, end_s = MODELS[wanted.climate], start_s + lasts_s
        trace = synthesise(seed=scenario.seed, capacity=max(1, places), duration_s=end_s, climate=climate)
    elif wanted.file:
        trace = read_trace(wanted.file).sample(wanted.share, seed=scenario.seed)
    else:
        return (((0.0, True),),) * places
    return trace.cut(start_s, min(start_s + lasts_s, trace.duration_s)).places(places)


def pool_prices(scenario: Scenario) -> dict[str, Price]:
    """What a GPU of each pool costs, at times that count from the run's start.

    Raises:
        SpotlightError: the file of spot prices is not usable.
    """
    cluster = scenario.cluster
    spot = Price.constant(cluster.usd_per_h_spot)
    if cluster.prices_spot:
        spot = read_prices(cluster.prices_spot)
        zero_s = 0.0 if spot.since_start else spot.times_s[0]
        spot = spot.moved(-zero_s - scenario.trace.offset_h * SECONDS_PER_H)
    return {"reserved": Price.constant(cluster.usd_per_h_reserved), "spot": spot}


def arrive(machines: Machines, scenario: Scenario, strategy: Strategy, switches: Sequence[Switches]) -> None:
    """Every worker comes when it is there, is warned, and goes when it is not."""
    cluster = scenario.cluster
    for place in _places("reserved", cluster.reserved_gpus, cluster.reserved_gpus_per_node, whole=True):
        machines.come(place)
    if not strategy.rents_spot:
        return
    gpus = cluster.spot_nodes * cluster.spot_gpus_per_node
    places = _places("spot", gpus, cluster.spot_gpus_per_node, whole=scenario.trace.takes == "node")
    for place, moments in zip(places, switches, strict=True):
        came_s = 0.0
        for at_s, up in moments:
            machines.at(at_s, machines.come if up else machines.go, place)
            if up:
                came_s = at_s
            elif cluster.notice_s:
                machines.at(max(came_s, at_s - cluster.notice_s), machines.warn, place)


def timing(scenario: Scenario, strategy: Strategy) -> Timing:
    """How long things take on these machines, and what a preemption costs."""
    cluster, job, elastic = scenario.cluster, scenario.job, strategy.elastic
    startup_s, regroup_s = cluster.startup_s, cluster.recovery_s
    return Timing(
        step_s=partial(step_s, scenario),
        launch_s=job.launch_s,
        recovery_s=recovery_s(job.model, elastic=elastic) if regroup_s is None else regroup_s,
        startup_s=start_up_s(job.model) if startup_s is None else startup_s,
        resume=strategy.on_preemption == "resume",
        elastic=elastic,
        pays_start_up=cluster.pays_start_up,
        form_s=cluster.form_s,
    )


def step_s(scenario: Scenario, samples: int, width: int) -> float:
    """Seconds of one denoising step of a batch on a gang."""
    job, gpu = scenario.job, scenario.cluster.gpu
    return seconds_per_step(
        job.model, job.height_px, job.width_px, width=width, gpu=gpu, batch=samples, guidance=job.guidance
    )


def train_gpu_s(scenario: Scenario) -> float:
    """GPU-seconds to train on one sample."""
    job, gpu = scenario.job, scenario.cluster.gpu
    return train_s(
        job.model,
        job.height_px,
        job.width_px,
        gpu=gpu,
        timesteps=job.timesteps,
        guidance=job.guidance,
        lora=job.lora,
        old_log_probs=job.old_log_probs,
    )


def _places(pool: Pool, gpus: int, per_node: int, *, whole: bool) -> list[Place]:
    """The GPUs of a pool as places: its nodes, or each GPU for itself."""
    size = per_node if whole else 1
    return [
        Place(
            pool=pool,
            node=f"{pool}-{first // per_node}",
            workers=tuple(
                f"{pool}-{gpu // per_node}/{gpu % per_node}" for gpu in range(first, min(first + size, gpus))
            ),
        )
        for first in range(0, gpus, size)
    ]
