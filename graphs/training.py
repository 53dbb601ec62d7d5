"""The layers of training: advantages, then of each update the gradients of its parts, their sums, and the step.

Prompts whose samples become ready together are a *chunk*; where samples are trained on as they are scored, each chunk
gets its advantages by itself, and a part of an update waits only for the chunks that it has samples of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

from graphs.layers import Calls, Key, Layers, first_shards, other_shards, pool_of
from graphs.requests import request_size
from graphs.tasks import refills, training
from graphs.tasks.context import RunContext
from spotlight.config import Config
from spotlight.records import Scored, Selection, WeightsRef, record
from spotlight.rl.parts import Cut
from spotlight.rl.sums import slices_of


@record
class _Rolled:
    """The tasks of a chunk's rollouts; prompts that are trained on as they were explored have none."""

    scores: list[Key]
    surplus: list[Key]
    """The other shards of its rollouts: a later task takes them, since Dask forgets what no task depends on."""

    @property
    def keys(self) -> list[Key]:
        return [*self.scores, *self.surplus]


def add_training(
    layers: Layers,
    config: Config,
    context: RunContext,
    selection: Selection,
    weights: WeightsRef,
    rollouts: list[list[Key]],
    scores: list[Key],
    drawn: Sequence[tuple[Scored, ...]],
) -> tuple[list[Key], Key]:
    """Add all of an iteration's training; returns the keys of the training sets, and of the last update.

    Args:
        rollouts: the shards of each request, in the order of the kept seeds.
        scores: of each request.
        drawn: for each prompt, its samples that are trained on as exploration drew them.
    """
    assert all(len(kept.seeds) == config.rollout.seeds_kept for kept in selection.kept), "prompts differ in seeds"
    cut = replace(Cut.of(config), prompts=len(selection.kept))
    chunks = cut.chunks if config.trains_as_scored else [range(cut.prompts)]
    rolled = _rollouts_of_chunks(config, selection, chunks, rollouts, scores)
    if config.scores_apart:
        rolled = _add_refills(layers, config, context, selection.iteration, rolled)
    explored = [[each for each in drawn[chunk.start : chunk.stop] if each] for chunk in chunks]
    sets = _add_advantages(layers, config, selection.iteration, rolled, explored)
    return sets, _add_updates(layers, config, context, selection.iteration, weights, cut, sets)


def _rollouts_of_chunks(
    config: Config, selection: Selection, chunks: Sequence[range], rollouts: list[list[Key]], scores: list[Key]
) -> list[_Rolled]:
    """The rollouts of each chunk."""
    requests = len(range(0, config.rollout.seeds_kept, request_size(config)))  # of a prompt
    before = list(accumulate((0 if kept.drawn else requests for kept in selection.kept), initial=0))
    spans = [slice(before[chunk.start], before[chunk.stop]) for chunk in chunks]
    return [_Rolled(scores=scores[span], surplus=other_shards(rollouts[span])) for span in spans]


def _add_refills(
    layers: Layers, config: Config, context: RunContext, k: int, rolled: Sequence[_Rolled]
) -> list[_Rolled]:
    """Replace samples without a reward, chunk by chunk; the reward pool scores the replacements."""
    run_dir, seed = context.run_dir, context.seed
    chunks = [chunk for chunk in rolled if chunk.scores]
    if not chunks:
        return list(rolled)
    calls: Calls = [(refills.replace_unscored, run_dir, seed, chunk.scores, chunk.surplus) for chunk in chunks]
    after = [key for chunk in chunks for key in chunk.keys]
    pool = "reserved-engine" if config.reserved_computes else "engine"
    redrawn = layers.add("refill", k, calls, pool=pool, after=after)
    calls = [(refills.score_all, run_dir, key) for key in redrawn]
    scored_again = layers.add("refill-score", k, calls, pool="reward", after=redrawn)
    calls = [(refills.refilled, seed, chunk.scores, key) for chunk, key in zip(chunks, scored_again, strict=True)]
    after = [*chain(*(chunk.scores for chunk in chunks)), *scored_again]
    whole = iter(layers.add("refilled", k, calls, pool="head", after=after))
    return [_Rolled(scores=[next(whole)] if chunk.scores else [], surplus=[]) for chunk in rolled]


def _add_advantages(
    layers: Layers, config: Config, k: int, rolled: Sequence[_Rolled], explored: Sequence[Sequence[object]]
) -> list[Key]:
    """The training set of each chunk: its samples with their advantages.

    Args:
        explored: for each chunk, its samples that are trained on as exploration drew them.
    """
    train = config.train
    weights = tuple(table.weight for table in (config.reward, *config.reward.also)) if config.adds_advantages else ()
    how = (train.seeds_used, train.filter_groups)
    calls: Calls = [
        (training.advantage, train.advantage_std, [*chunk.scores, *drawn], weights, chunk.surplus, *how)
        for chunk, drawn in zip(rolled, explored, strict=True)
    ]
    return layers.add("advantage", k, calls, pool="head", after=[key for chunk in rolled for key in chunk.keys])


def _add_updates(
    layers: Layers, config: Config, context: RunContext, k: int, weights: WeightsRef, cut: Cut, sets: list[Key]
) -> Key:
    """One update after the other; returns the key of the last one.

    An update also gets the gradients and sums of those before it: a worker without the optimizer's state takes their
    steps again.
    """
    run_dir, slices = context.run_dir, slices_of(config, cut.count)
    gradients: list[list[Key]] = []
    sums: list[list[Key]] = []
    before: Key | None = None
    for update in range(cut.updates):
        parts, surplus = _add_gradients(layers, config, run_dir, k, weights, cut, update, sets, before)
        gradients.append(parts)
        if slices > 1:
            calls: Calls = [(training.add_gradients, run_dir, weights, k, parts, at) for at in range(slices)]
            parts = layers.add("add", k, calls, pool=_gradient_pool(config), after=parts)
        sums.append(parts)
        call = (training.update, run_dir, weights, k, list(gradients), list(sums), before, surplus)
        after = [*chain(*gradients, *sums), *surplus, *([before] if before else [])]
        (before,) = layers.add("update", k, [call], pool="update", after=after)
    assert before is not None, "train.updates is at least 1"
    return before


def _add_gradients(
    layers: Layers,
    config: Config,
    run_dir: str,
    k: int,
    weights: WeightsRef,
    cut: Cut,
    update: int,
    sets: list[Key],
    before: Key | None,
) -> tuple[list[Key], list[Key]]:
    """The gradients of an update's parts, each on one worker, or on a gang that shares its passes.

    Args:
        before: the update before this one.

    Returns:
        The keys of the gradients, and of the other ranks' tasks.
    """
    slices = slices_of(config, cut.count)
    calls: Calls = [
        (training.gradient, run_dir, weights, k, cut, update, part, _needed(sets, cut, part), slices, before)
        for part in range(cut.count)
    ]
    after = [*sets, *([before] if before else [])]
    if config.train.width == 1:
        return layers.add("train", k, calls, pool=_gradient_pool(config), after=after), []
    pool = pool_of(config.strategy.train_pools)
    gangs = layers.add_requests("train", k, calls, pool=pool, widths=[config.train.width], after=after)
    return first_shards(gangs), other_shards(gangs)


def _gradient_pool(config: Config) -> str:
    return f"gradient-{pool_of(config.strategy.train_pools)}"


def _needed(sets: list[Key], cut: Cut, part: int) -> list[Key]:
    """The training sets that a part has samples of."""
    return sets if len(sets) == 1 else [sets[chunk] for chunk in cut.needs(part)]
