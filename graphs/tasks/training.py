"""Advantages, gradients of fixed parts, their sums, and the step that they are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import numpy as np

from graphs.tasks.sampling import ShardResult
from spotlight.device import protocol as device
from spotlight.device.signals import signals
from spotlight.plan.subset import max_variance_subset
from spotlight.records import (
    Gradient,
    GradientPart,
    Published,
    Sample,
    Scored,
    SpotlightError,
    Surplus,
    Updated,
    WeightsRef,
    record,
)
from spotlight.rl.advantages import group_advantages, spread, zero_std_ratio
from spotlight.rl.parts import Cut
from spotlight.rl.sums import tree_sum

TAGS_MAX = 32
"""Most different tags; where prompts have more, their means are left out."""


@record
class TrainingSet:
    """Samples of an iteration, or of a part of it, in request order, and statistics of their rewards."""

    samples: tuple[Sample, ...]
    metrics: dict[str, float]
    steps_resumed: int = 0
    """Steps of their rollouts that were found committed and not computed again."""
    failed: int = 0
    """Images that have no reward, in whose place others were drawn."""
    error: str = ""
    """The error of the first of them."""
    table_samples: tuple[int, ...] = ()
    """How many samples each of several rewards is for."""


def advantage(
    std: Literal["global", "group", "none"],
    scored: Sequence[Sequence[Scored]],
    weights: Sequence[float] = (),
    surplus: Sequence[ShardResult] = (),
    used: int = 0,
    filters: bool = False,
) -> TrainingSet:
    """All samples that have a reward, in request order; those that are trained on have advantages, among themselves.

    Args:
        std: whose spread advantages are divided by, ``train.advantage_std``.
        weights: of each reward, where their advantages are added (``train.combine = "advantages"``); empty where the
            rewards are added. Modelled rewards have no parts, so advantages are those of their sum.
        surplus: see `refills.replace_unscored`.
        used: samples of each prompt that are trained on; 0: all.
        filters: prompts whose samples all have the same reward will not be trained on.
    """
    results = [result for each in scored for result in each]
    rows = [
        (result, index, reward)
        for result in results
        for index, reward in enumerate(result.rewards)
        if reward is not None
    ]
    rewards = [reward for _, _, reward in rows]
    groups = [result.request.prompt.id for result, _, _ in rows]
    trained = _highest_variance_rows(rewards, groups, used) if used else list(range(len(rows)))
    among = [groups[at] for at in trained]
    if weights and all(result.parts for result, _, _ in rows):
        advantages = _added(std, weights, [rows[at] for at in trained], among)
    else:
        advantages = group_advantages([rewards[at] for at in trained], among, std=std).tolist()
    known = dict(zip(trained, advantages, strict=True))
    samples = tuple(
        Sample(request=result.request, index=index, reward=reward, advantage=known.get(at))
        for at, (result, index, reward) in enumerate(rows)
    )
    return TrainingSet(
        samples=samples,
        metrics=_statistics(samples, flat=zero_std_ratio(rewards, groups), filters=filters) | means_by_table(rows),
        steps_resumed=sum(result.steps_resumed for result in results),
        failed=sum(result.rewards.count(None) for result in results if result.errors),
        error=next((result.errors[0] for result in results if result.errors), ""),
        table_samples=tuple(map(len, _by_table(rows))),
    )


def _added(
    std: Literal["global", "group", "none"],
    weights: Sequence[float],
    rows: Sequence[tuple[Scored, int, float]],
    groups: Sequence[int],
) -> list[float]:
    """The sum of each reward's weighted advantages, which it has among the samples that it is for."""
    total = np.zeros(len(rows))
    for at, weight in enumerate(weights):
        parts = {
            row: part for row, (result, index, _) in enumerate(rows) if (part := result.parts[at][index]) is not None
        }
        if parts:
            total[[*parts]] += weight * group_advantages([*parts.values()], [groups[row] for row in parts], std=std)
    return [float(value) for value in total]


def _by_table(rows: Sequence[tuple[Scored, int, float]]) -> list[list[float]]:
    """The rewards of each table, where there are several, for the samples that it is for."""
    tables = min((len(result.parts) for result, _, _ in rows), default=0)
    each = ([result.parts[at][index] for result, index, _ in rows] for at in range(tables))
    return [[reward for reward in rewards if reward is not None] for rewards in each]


def means_by_table(rows: Sequence[tuple[Scored, int, float]]) -> dict[str, float]:
    """The mean of each reward by itself, where there are several: ``reward_1_mean`` is the first table's.

    That of a table that is for none of the samples is left out.
    """
    return {f"reward_{at}_mean": fmean(rewards) for at, rewards in enumerate(_by_table(rows), 1) if rewards}


def means_of_validation(scored: Sequence[Scored]) -> dict[str, float]:
    """Metrics of a validation beside its score: the mean of each of several rewards, and the mean of each tag.

    A tag is the field "tag" of the prompts' metadata: GenEval's "counting", "colors" and others.
    """
    rows = [
        (result, index, reward)
        for result in scored
        for index, reward in enumerate(result.rewards)
        if reward is not None
    ]
    tagged: dict[str, list[float]] = {}
    for result, _, reward in rows:
        if tag := result.request.prompt.tag:
            tagged.setdefault("tag_" + re.sub(r"\W+", "_", tag), []).append(reward)
    means = {name: fmean(each) for name, each in sorted(tagged.items())} if len(tagged) <= TAGS_MAX else {}
    return means_by_table(rows) | means


def _highest_variance_rows(rewards: Sequence[float], groups: Sequence[int], used: int) -> list[int]:
    """Rows of each group whose rewards vary most, ascending; all of a group that has no more."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    chosen = (
        rows[at]
        for rows in members.values()
        for at in max_variance_subset([rewards[row] for row in rows], min(used, len(rows)))
    )
    return sorted(chosen)


def whole(parts: Sequence[TrainingSet], *, filters: bool = False) -> TrainingSet:
    """The training set of an iteration from those of its parts, which share no prompt; ``filters`` as `advantage`."""
    if len(parts) == 1:
        return parts[0]
    samples = tuple(sample for part in parts for sample in part.samples)
    groups = [len({sample.request.prompt.id for sample in part.samples}) for part in parts]
    flat = sum(part.metrics["zero_std_ratio"] * count for part, count in zip(parts, groups, strict=True))
    tables = range(min(len(part.table_samples) for part in parts))
    table_samples = tuple(sum(part.table_samples[at] for part in parts) for at in tables)
    means = {}
    for at, count in enumerate(table_samples):
        name = f"reward_{at + 1}_mean"
        total = sum(part.metrics[name] * part.table_samples[at] for part in parts if part.table_samples[at])
        if count:
            means[name] = total / count
    return TrainingSet(
        samples=samples,
        metrics=_statistics(samples, flat=flat / sum(groups), filters=filters) | means,
        steps_resumed=sum(part.steps_resumed for part in parts),
        failed=sum(part.failed for part in parts),
        error=next((part.error for part in parts if part.error), ""),
        table_samples=table_samples,
    )


def _statistics(samples: Sequence[Sample], *, flat: float, filters: bool) -> dict[str, float]:
    """Metrics of a training set; ``samples_trained`` only where it is not all.

    Args:
        flat: share of groups whose rewards are all equal.
    """
    rewards, with_signal = [sample.reward for sample in samples], prompts_with_signal(samples)
    trained = sum(
        sample.advantage is not None and (not filters or sample.request.prompt.id in with_signal) for sample in samples
    )
    found = {"reward_mean": fmean(rewards), "reward_std": spread(rewards), "zero_std_ratio": flat}
    found["samples"] = float(len(samples))
    return found if trained == len(samples) else {**found, "samples_trained": float(trained)}


def gradient(
    run_dir: str,
    weights: WeightsRef,
    iteration: int,
    cut: Cut,
    update: int,
    part: int,
    sets: Sequence[TrainingSet],
    slices: int,
    before: Updated | None = None,
    gang: str = "",
    shard: int = 0,
) -> Gradient | Surplus:
    """The gradient of one of the fixed parts of an update, which stays in the store.

    Args:
        weights: the version that the iteration starts from.
        sets: of the chunks that the part has samples of, in order.
        slices: that it is kept in.
        before: the update before this one.
        gang: names the part within the graph, where several ranks share its passes; the first one's result is the
            part's.
        shard: of all ranks.

    Raises:
        SpotlightError: its gang was lost again and again.
    """
    place = signals.told(gang, shard) if gang else device.ALONE
    if isinstance(place, Surplus):
        return place
    if isinstance(place, int):
        raise SpotlightError(
            f"part {part} of iteration {iteration}'s training lost its gang {place} times: if memory is short, make "
            "train.micro_batch smaller; if workers leave too soon, cut training into more train.parts, or train on "
            'reserved GPUs only, if there are any (strategy.train_pools = ["reserved"]); then resume the run'
        )
    wanted = gradient_part(weights, iteration, cut, update, part, sets, slices, before)
    return device.current().gradient(run_dir, wanted, place)


def gradient_part(
    weights: WeightsRef,
    iteration: int,
    cut: Cut,
    update: int,
    part: int,
    sets: Sequence[TrainingSet],
    slices: int = 1,
    before: Updated | None = None,
) -> GradientPart:
    """The part whose gradient a call of `gradient` is to compute."""
    samples = [sample for each in sets for sample in each.samples if sample.advantage is not None]
    first = 0 if len(samples) == cut.prompts * cut.seeds else cut.chunks[cut.needs(part)[0]].start * cut.seeds
    looked_at = samples if cut.updates > 1 else ()
    advantages = [sample.advantage or 0.0 for sample in looked_at]
    groups = [sample.request.prompt.id for sample in looked_at]
    positions = cut.positions(iteration, update, part, advantages, groups)
    if cut.filters:
        with_signal = prompts_with_signal(samples)
        positions = tuple(at for at in positions if samples[at - first].request.prompt.id in with_signal)
    return GradientPart(
        weights=weights,
        iteration=iteration,
        update=update,
        number=part,
        samples=tuple(samples[position - first] for position in positions),
        positions=positions,
        after=before.weights_sha256 if before else "",
        settings=cut.settings,
        slices=slices,
    )


def prompts_with_signal(samples: Sequence[Sample]) -> set[int]:
    """Ids of the prompts some of whose samples have an advantage that is not 0."""
    return {sample.request.prompt.id for sample in samples if sample.advantage}


def add_gradients(run_dir: str, weights: WeightsRef, iteration: int, parts: Sequence[Gradient], at: int) -> Gradient:
    """The sum of one slice of all parts' gradients, which stays in the store: the update has one gradient to read."""
    from spotlight.store import updates
    from spotlight.store.weights import published

    def is_over() -> bool:
        return published(run_dir, weights.version + 1) is not None

    if not any(part.slices for part in parts):
        return updates.put_sum(run_dir, iteration, parts, at, {})
    if is_over():
        return Gradient(name="")
    if found := updates.find_sum(run_dir, iteration, parts, at):
        return found
    try:
        return updates.put_sum(
            run_dir, iteration, parts, at, tree_sum(updates.load_slices(run_dir, iteration, parts, at))
        )
    except SpotlightError:
        if is_over():  # meanwhile, and the gradients were removed
            return Gradient(name="")
        raise


def update(
    run_dir: str,
    weights: WeightsRef,
    iteration: int,
    gradients: Sequence[Sequence[Gradient]],
    terms: Sequence[Sequence[Gradient]],
    before: Updated | None = None,
    surplus: Sequence[Gradient | Surplus] = (),
) -> Updated:
    """Take an optimizer step with the sum of its parts' gradients; the last one leaves the next version staged.

    Args:
        gradients: for each update of the iteration up to this one, what its parts measured; another worker may have
            taken the earlier ones.
        terms: for each of these updates, the tensors to add: its parts' gradients, or the slices of their sum.
        before: the update before this one.
        surplus: the other ranks of gangs. Dask forgets a task that nobody depends on.
    """
    known, added = (tuple(tuple(parts) for parts in each) for each in (gradients, terms))
    after = before.weights_sha256 if before else ""
    return device.current().update(run_dir, weights, known, added, iteration, after)


def publish(run_dir: str, updated: Updated) -> Published:
    """Publish a staged version, and clear what earlier updates left in the store."""
    from spotlight.store.updates import clear_until
    from spotlight.store.weights import publish as publish_staged

    published = publish_staged(run_dir, updated.version)
    clear_until(run_dir, updated.version - 1)
    return published
