"""Settings that can be run, but are probably not meant: each doubt says why, and what to set."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spotlight.config.machines import NO_GPU, SlurmSection
from spotlight.market.prices import USUAL_GPU, price_list, usd_per_h

if TYPE_CHECKING:
    from spotlight.config.settings import Config

ALL_WEIGHTS_RATE = 5e-5
"""A learning rate above it is a LoRA's; published recipes for all weights have 1e-5 (DanceGRPO, MixGRPO)."""

OF_TRACES: tuple[str, ...] = ("speedup", "trace_share", "trace_offset_h", "trace_takes", "preemption")
"""Settings of a pool that say how its trace is followed."""


def doubts_of(settings: Config) -> Iterator[str]:
    """What is doubtful about settings, a sentence each."""
    yield from _of_model(settings)
    yield from _of_training(settings)
    yield from _of_exploration(settings)
    yield from _of_machines(settings)
    yield from _of_slurm(settings)
    yield from _of_prices(settings)
    yield from _of_traces(settings)
    yield from _of_pace(settings)
    yield from _of_paced_traces(settings)


def _of_model(settings: Config) -> Iterator[str]:
    model = settings.model
    given = {"gradient_checkpointing": False, "vae_tiling": False, "vae_dtype": "auto"}
    unused = [f"model.{key}" for key in given if getattr(model, key) != given[key]]
    if model.embedded and unused:
        yield f"{', '.join(unused)} counts nothing with {model.name!r}, which is small: leave it out"


def _of_training(settings: Config) -> Iterator[str]:
    train, rollout, model = settings.train, settings.rollout, settings.model
    if train.algorithm == "nft" and rollout.guidance > 1:
        yield (
            f"rollout.guidance = {rollout.guidance:g} with DiffusionNFT: a guided velocity is fitted to samples as if "
            "it were the flow's own, and published recipes draw and train without guidance; set rollout.guidance = 1"
        )
    if train.old_decay == "delayed" and settings.validation_policy == "old":
        yield (
            'train.old_decay = "delayed" without train.ema_decay: after some 200 updates the older policy, which is '
            "validated and exported, moves by a thousandth an iteration; set train.ema_decay = 0.9, as the published "
            'code has it, or run.validate_policy = "trained"'
        )
    if train.lora_alpha and not train.lora_rank:
        yield (
            f"train.lora_alpha = {train.lora_alpha:g} counts nothing without a LoRA: all weights are trained; set "
            "train.lora_rank"
        )
    if not (train.lora_rank or model.embedded) and train.learning_rate > ALL_WEIGHTS_RATE:
        yield (
            f"train.learning_rate = {train.learning_rate:g} with train.lora_rank = 0: all weights are trained, at the "
            "rate of a LoRA, and published recipes take 1e-5; set train.lora_rank, or a rate of "
            f"{ALL_WEIGHTS_RATE:g} at most"
        )
    if train.algorithm == "dpo" and train.kl:
        yield (
            f"train.kl = {train.kl:g} with Diffusion-DPO counts nothing: train.dpo_beta says how near to the reference "
            "the policy stays"
        )
    if train.steps_used and not train.is_stepwise:
        yield (
            f'train.steps_used = {train.steps_used} with train.algorithm = "{train.algorithm}" counts nothing: it '
            "trains on clean samples at train.timesteps noise levels; set that"
        )
    if rollout.is_stochastic and rollout.sde_window_order == "sliding" and not rollout.sde_window_size:
        yield (
            'rollout.sde_window_order = "sliding" counts nothing without a size: all steps of rollout.sde_window are '
            "stochastic; set rollout.sde_window_size"
        )
    if train.warm_up >= (updates := settings.run.iterations * train.updates):
        yield (
            f"train.warm_up = {train.warm_up} and the run has {updates} updates: the learning rate never comes to its "
            "value; make one smaller, or run.iterations larger"
        )
    for name in ("attempts", "batch", "limit_s", "patience_s"):
        default, first = type(settings.reward).model_fields[name].default, getattr(settings.reward, name)
        if others := {getattr(table, name) for table in settings.reward.also} - {default, first}:
            yield (
                f"reward.{name} = {min(others):g} of a further [[reward]] table counts nothing: the first table's "
                f"does, and is {first:g}"
            )
    if settings.reward.name == "ocr" and not model.embedded:
        yield (
            'reward.name = "ocr" takes the whole image for one line of text, and reads next to nothing in a scene: set '
            'reward.name = "scene-ocr"'
        )


def _of_exploration(settings: Config) -> Iterator[str]:
    exploration, how = settings.exploration, settings.strategy.exploration
    if how == "off":
        return
    if exploration.planner == "bandit" and exploration.request_seeds > exploration.seeds_tried:
        yield (
            f"exploration.request_seeds = {exploration.request_seeds} is more than exploration.seeds_tried = "
            f"{exploration.seeds_tried}: each request takes the share of several prompts, and some prompts get none; "
            "set it to that at most"
        )
    if exploration.budget == "worth" and how == "blocking":
        yield (
            'exploration.budget = "worth" with strategy.exploration = "blocking" explores all of '
            'exploration.seeds_tried: only what goes on beside training is weighed; "stale" does'
        )
    if exploration.budget == "worth" and exploration.planner == "equal":
        yield (
            'exploration.budget = "worth" with exploration.planner = "equal" is as "time": equal shares weigh nothing; '
            'set the planner to "bandit"'
        )


def _of_machines(settings: Config) -> Iterator[str]:
    pools, pace = settings.pools, settings.pace
    if not settings.reserved_computes and not settings.model.embedded and not settings.train.lora_rank:
        yield (
            f'pools.reserved.gpu = "{NO_GPU}" and train.lora_rank = 0: to update all weights takes minutes on a '
            "processor, and five times their memory; set train.lora_rank"
        )
    strategy = settings.strategy
    if (
        pools.spot.workers
        and strategy.exploration == "off"
        and "spot" not in strategy.rollout_pools + strategy.train_pools
    ):
        yield (
            f'pools.spot.workers = {pools.spot.workers} only validate: strategy.exploration is "off", and neither '
            'strategy.rollout_pools nor strategy.train_pools has "spot"; add it there, or set pools.spot.workers = 0'
        )
    node = pools.spot.node_workers
    narrowest = strategy.widths[0 if strategy.elastic else -1]
    if 0 < node < narrowest and "spot" in strategy.rollout_pools and "spot" not in strategy.train_pools:
        yield (
            f"strategy.widths = {list(strategy.widths)} needs {narrowest} workers on one machine, and pools.spot has "
            f"machines of {node}, which can do nothing: add a narrower width, or workers to pools.spot "
            "(workers_per_node)"
        )
    kinds = {name.partition("-")[0] for name in price_list()}
    for name, pool in pools:
        kind = pool.gpu.partition("-")[0]
        if pool.gpu and kind not in kinds:
            close = difflib.get_close_matches(pool.gpu, price_list(), n=1)
            yield (
                f"pools.{name}.gpu = {pool.gpu!r} is not in the price list"
                f"{f' (did you mean {close[0]!r}?)' if close else ''}: its price is taken from pools.{name}.usd_per_h"
            )
        works = pool.workers and name != "reward" and (name == "spot" or settings.reserved_computes)
        if pace.gpu and works and kind and kind != pace.gpu.partition("-")[0]:
            yield (
                f"pools.{name}.gpu = {pool.gpu!r} sets the price alone: with [pace], whose gpu is {pace.gpu!r}, all "
                "workers are as fast as that"
            )
    gpu = pools.spot.gpu or USUAL_GPU
    is_dear = gpu in price_list() and pools.reserved.usd_per_h >= usd_per_h(gpu, "reserved")
    if not settings.reserved_computes and is_dear and gpu != NO_GPU:
        yield (
            f"pools.reserved.usd_per_h = {pools.reserved.usd_per_h:g} for a machine without a GPU (gpu = "
            f'"{NO_GPU}"), which the list has for {usd_per_h(NO_GPU, "reserved"):g}: leave it out, or set your price'
        )


def _of_slurm(settings: Config) -> Iterator[str]:
    pools = [(f"pools.{name}.slurm", pool) for name, pool in settings.pools if pool.workers]
    if settings.cluster.manager != "slurm":
        if given := [name for name, pool in pools if pool.slurm != SlurmSection()]:
            yield (
                f'{", ".join(given)} counts nothing with cluster.manager = "{settings.cluster.manager}", for no job is '
                'submitted; set cluster.manager = "slurm", or use `spotlight submit`'
            )
        return
    model = settings.model
    if model.device == "cpu" or (model.device == "auto" and model.embedded):
        return
    for name, pool in pools:
        asks_otherwise = any("gpu" in option for option in pool.slurm.extra)
        if name == "pools.reward.slurm" or pool.gpu == NO_GPU or asks_otherwise or pool.slurm.gpus == pool.node_workers:
            continue
        yield (
            f"{name}.gres = {pool.slurm.gres!r}: GPUs of a job: {pool.slurm.gpus}, and its workers (workers, or "
            f"workers_per_node): {pool.node_workers}; where a worker finds no free GPU, it shares one with another; "
            f'set "gpu:{pool.node_workers}"'
        )


def _of_prices(settings: Config) -> Iterator[str]:
    for name, pool in settings.pools:
        listed = {gpu: usd_per_h(gpu, name) for gpu in price_list()}
        others = [gpu for gpu in listed if listed[gpu] == pool.usd_per_h]
        if pool.gpu in listed and pool.gpu not in {*others, NO_GPU} and others:
            yield (
                f"pools.{name}.usd_per_h = {pool.usd_per_h:g} is the listed price of {others[0]!r}, and pools.{name}."
                f"gpu = {pool.gpu!r} is listed for {listed[pool.gpu]:g}: leave it out, or set your price"
            )
    gpu = settings.pools.spot.gpu or USUAL_GPU
    if settings.reserved_differs and gpu not in price_list():
        yield (
            f"pools.spot.gpu = {gpu!r} has no listed price on demand: what its work costs at reserved prices, and on "
            f"reserved GPUs alone, is told with {settings.on_demand_usd_per_h:g} an hour, the higher of the pools' "
            "prices, which is too low; add it to spotlight/market/prices.toml"
        )


def _of_traces(settings: Config) -> Iterator[str]:
    for name, pool in settings.pools:
        if not (pool.trace or pool.trace_model):
            unused = dict.fromkeys(OF_TRACES, "without a trace; set trace or trace_model")
        else:
            unused = {"replace_after_s": "along a trace, which says when workers come back"}
        if pool.trace_model:
            unused["trace_share"] = "without a file; set trace instead of trace_model"
        for key, why in unused.items():
            if (value := getattr(pool, key)) != type(pool).model_fields[key].default:
                yield f"pools.{name}.{key} = {value!r} counts nothing {why}"


def _of_pace(settings: Config) -> Iterator[str]:
    pace = settings.pace
    given = [f"pace.{key}" for key, field in type(pace).model_fields.items() if getattr(pace, key) != field.default]
    if given and not pace.gpu:
        yield f"without pace.gpu nothing is paced, and {', '.join(given)} counts nothing: name a GPU there"


def _of_paced_traces(settings: Config) -> Iterator[str]:
    scale = settings.emulated_per_real_s
    for name, pool in settings.pools:
        if (pool.trace or pool.trace_model) and pool.speedup == 1 != scale:
            yield (
                f"pools.{name}.speedup = 1 with pace.speedup = {scale:g}: the trace goes by the run's own clock, so in "
                f"an emulated hour workers come and go {1 / scale:.3g} times as often as it says; set "
                f"pools.{name}.speedup = {scale:g}"
            )
