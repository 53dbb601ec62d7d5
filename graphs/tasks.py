"""The functions in the graph: thin shells that may run twice, anywhere, and change nothing by it.

Arguments and results are small records; latents, images and weights stay in the stores. The engine
is reached through `spotlight.device.protocol`, so a process that only builds graphs never imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from itertools import compress
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from spotlight.device import protocol as device
from spotlight.device.signals import signals
from spotlight.plan import bandit
from spotlight.plan.beliefs import Arm, Beliefs
from spotlight.plan.replay import allocation_row
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.records import (
    Dropped,
    Explored,
    Gradient,
    GradientPart,
    Kept,
    Prompt,
    Published,
    Quarantined,
    Request,
    Rollout,
    Sample,
    Scored,
    Selection,
    SpotlightError,
    Surplus,
    Updated,
    WeightsRef,
    record,
)
from spotlight.rl.advantages import group_advantages, spread, zero_std_ratio
from spotlight.rl.parts import Cut
from spotlight.rl.rewards import normalised
from spotlight.rl.sums import tree_sum
from spotlight.store.rows import DECISIONS
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from spotlight.store.latents import LatentStore

REFILL = 1 << 20
"""Replacements are candidates numbered from here: no exploration tries so many."""


@record
class RunContext:
    """What all requests of a run share, worked out once by `prepare`."""

    run_dir: str
    run: str
    seed: int
    sigmas: tuple[float, ...]
    explore_sigmas: tuple[float, ...]
    start: WeightsRef
    """Version 0."""
    session: str = ""
    """Which start of the run this is, where a scheduler may see several."""


@record
class Candidates:
    """What exploration for one iteration may try."""

    iteration: int
    prompts: tuple[Prompt, ...]
    template: Request
    """Its prompt and seeds are replaced. Its weights are one version old while the next is being trained."""
    seed: int
    seeds_tried: int
    request_seeds: int
    rounds: int
    keep: int
    groups: int
    """Prompts that are rolled out."""
    candidates_max: int
    """Candidates that there is time for, of all prompts together."""
    planner: Literal["bandit", "equal"] = "equal"
    beliefs: Beliefs = Beliefs()
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and largest reward; the planner sees rewards mapped to [0, 1]."""


@record
class TrainingSet:
    """Samples of an iteration, or of a part of it, in request order, and statistics of their rewards."""

    samples: tuple[Sample, ...]
    metrics: dict[str, float]
    steps_resumed: int = 0
    """Of their rollouts, found committed and not computed again."""


ShardResult = Rollout | Dropped | Surplus | Quarantined
"""What a shard of a request returns; the first shard's is the request's result."""


def prepare(run_dir: str, session: str = "") -> RunContext:
    """Load the model once, publish version 0, and ask the model for its noise levels."""
    run = RunDir(run_dir)
    prepared = device.current().prepare(run_dir)
    return RunContext(
        run_dir=run_dir,
        run=run.name,
        seed=run.config().run.seed,
        sigmas=prepared.sigmas,
        explore_sigmas=prepared.explore_sigmas,
        start=prepared.start,
        session=session,
    )


def rollout_shard(run_dir: str, request: Request, gang: str, shard: int) -> ShardResult:
    """One rank's part of denoising a request, resuming at its last committed step.

    Args:
        gang: names the request within the graph.
        shard: of all that the widest gang would have; those that are not needed return at once.
    """
    place = signals.placed(gang, shard, request)
    if isinstance(place, Quarantined):
        RunDir(run_dir).quarantine(place)
    if isinstance(place, Surplus | Quarantined):
        return place
    reason = signals.check(request)
    if reason:
        return _scored_before(run_dir, request) or Dropped(reason=reason)
    return device.current().rollout(run_dir, request, place)


def rollout_ahead(run_dir: str, request: Request, gang: str, shard: int) -> ShardResult:
    """As `rollout_shard`, of the next iteration. What comes of it is found there, in the store.

    Where nobody said who should, it is left to that iteration.
    """
    if not signals.was_told(gang, shard):
        return Dropped(reason=f"iteration {request.iteration} begins with it")
    place = signals.placed(gang, shard, request)
    return place if isinstance(place, Surplus | Quarantined) else device.current().rollout(run_dir, request, place)


def ended(results: Sequence[Any], surplus: Sequence[ShardResult]) -> None:
    """Wait for them; see `replace_unscored` for why the other shards come, too."""


def _scored_before(run_dir: str, request: Request) -> Rollout | None:
    """The result of a request that was called off although its scores are stored: the worker that held it is gone."""
    if _stored_scores(run_dir, request) is None:
        return None
    sha256 = request.weights.sha256
    return Rollout(request=request, weights_sha256=sha256, steps_resumed=request.steps, steps_run=0)


def _stored_scores(run_dir: str, request: Request) -> Scored | None:
    store = _latents(run_dir)
    known = store.known_scores(request) if store else None
    if known is None:
        return None
    parts = tuple(map(tuple, known.get("parts", ())))
    return Scored(request=request, rewards=tuple(known["rewards"]), errors=tuple(known["errors"]), parts=parts)


def decode(run_dir: str, done: ShardResult) -> ShardResult:
    """Decode the images of what was rolled out, for workers that only score; hands the result of the rollout on."""
    dropped = device.current().decode(run_dir, done.request) if isinstance(done, Rollout) else None
    return dropped or done


def score(run_dir: str, done: ShardResult) -> Scored | Dropped | Quarantined:
    """Rewards of what was rolled out, given the result of the request's first shard.

    Raises:
        SpotlightError: it was rolled out with other weights than were asked for.
    """
    assert not isinstance(done, Surplus)
    if not isinstance(done, Rollout):
        return done
    if done.weights_sha256 != done.request.weights.sha256:
        raise SpotlightError(
            f"request {done.request.id} asked for weights {done.request.weights.sha256[:12]} and was run with "
            f"{done.weights_sha256[:12]}: nothing was trained on it; resume the run"
        )
    reason = signals.check(done.request)
    scored: Scored | Dropped
    if reason:  # also beside the scheduler, where there is no device
        scored = _stored_scores(run_dir, done.request) or Dropped(reason=reason)
    else:
        scored = device.current().score(run_dir, done.request)
    if isinstance(scored, Scored) and scored.steps_resumed != done.steps_resumed:
        return replace(scored, steps_resumed=done.steps_resumed)
    return scored


def score_whole(run_dir: str, seed: int, done: ShardResult) -> tuple[Scored, ...]:
    """As `score`, of what is trained on: what has no reward is replaced at once, where it was denoised.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    scored = score(run_dir, done)
    assert not isinstance(scored, Dropped), "only exploration is dropped"
    return refill(run_dir, seed, scored)


def refill(run_dir: str, seed: int, scored: Scored | Quarantined) -> tuple[Scored, ...]:
    """Replace the samples that have no reward, or a request that was set aside, by fresh seeds of the same prompt.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    known = scored if isinstance(scored, Scored) else _unscored(scored)
    return (known, *_replacements(run_dir, seed, known))


def replace_unscored(
    run_dir: str, seed: int, scored: Sequence[Scored | Quarantined], surplus: Sequence[ShardResult] = ()
) -> tuple[ShardResult, ...]:
    """As `refill` of each, as far as the images of the fresh seeds: they are scored elsewhere.

    Args:
        surplus: the other shards of the requests. Dask forgets a task that nobody depends on, so whoever collects the
            scores also takes these.
    """
    found = (_fresh(seed, result if isinstance(result, Scored) else _unscored(result)) for result in scored)
    return tuple(decode(run_dir, device.current().rollout(run_dir, fresh)) for fresh in found if fresh)


def score_all(run_dir: str, done: Sequence[ShardResult]) -> tuple[Scored | Dropped | Quarantined, ...]:
    """As `score` of each."""
    return tuple(score(run_dir, each) for each in done)


def refilled(seed: int, scored: Sequence[Scored | Quarantined], again: Sequence[Scored]) -> tuple[Scored, ...]:
    """What `refill` returns of each, from what `score_all` says of the fresh seeds.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    fresh = {result.request: result for result in again}
    whole: list[Scored] = []
    for result in (each if isinstance(each, Scored) else _unscored(each) for each in scored):
        whole.append(result)
        asked = _fresh(seed, result)
        if asked:
            whole.append(_rewarded(result, fresh[asked]))
    return tuple(whole)


def _unscored(aside: Quarantined) -> Scored:
    error = f"set aside: it killed those who ran it {aside.preemptions} times"
    return Scored(request=aside.request, rewards=(None,) * len(aside.request.seeds), errors=(error,))


def _replacements(run_dir: str, seed: int, scored: Scored) -> list[Scored]:
    fresh = _fresh(seed, scored)
    if fresh is None:
        return []
    device.current().rollout(run_dir, fresh)
    again = device.current().score(run_dir, fresh)
    assert isinstance(again, Scored), "only exploration is dropped"
    return [_rewarded(scored, again)]


def _fresh(seed: int, scored: Scored) -> Request | None:
    """Fresh seeds for the samples that have no reward; None where all have one."""
    missing = [index for index, reward in enumerate(scored.rewards) if reward is None]
    if not missing:
        return None
    request = scored.request
    replaced = scored.request.seeds[missing[0]] & (REFILL - 1)  # so that two requests of a prompt do not share seeds
    return replace(
        request,
        seeds=candidate_seeds(
            seed, request.iteration, request.prompt, range(REFILL + replaced, REFILL + replaced + len(missing))
        ),
    )


def _rewarded(scored: Scored, again: Scored) -> Scored:
    """The scored replacements, if all have a reward.

    Raises:
        SpotlightError: they do not.
    """
    request = scored.request
    if None in again.rewards:
        raise SpotlightError(
            f"the reward failed for {request.prompt.text!r}, seeds {request.seeds}, and for the seeds that replaced "
            f"them: {again.errors[0]}; mend the scorer, then resume the run"
        )
    return again


def advantage(
    settings_std: str,
    scored: Sequence[Sequence[Scored]],
    weights: Sequence[float] = (),
    surplus: Sequence[ShardResult] = (),
    used: int = 0,
) -> TrainingSet:
    """Advantages of all samples that have a reward, in request order; of those that are trained on, among themselves.

    Args:
        weights: of the rewards that are added up, where it is their advantages that are; a model of rewards has no
            parts, and so those of the sum.
        surplus: see `replace_unscored`.
        used: samples of each prompt that are trained on; 0: all.
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
    std: Literal["global", "group"] = "group" if settings_std == "group" else "global"
    trained = _most_telling(rewards, groups, used) if used else list(range(len(rows)))
    among = [groups[at] for at in trained]
    if weights and all(result.parts for result, _, _ in rows):
        parts = [[result.parts[at][index] or 0.0 for result, index, _ in rows] for at in range(len(weights))]
        each = [
            weight * group_advantages([part[at] for at in trained], among, std=std)
            for weight, part in zip(weights, parts, strict=True)
        ]
        advantages = [float(sum(values)) for values in zip(*each, strict=True)]
    else:
        advantages = group_advantages([rewards[at] for at in trained], among, std=std).tolist()
    known = dict(zip(trained, advantages, strict=True))
    samples = tuple(
        Sample(request=result.request, index=index, reward=reward, advantage=known.get(at))
        for at, (result, index, reward) in enumerate(rows)
    )
    return TrainingSet(
        samples=samples,
        metrics=_statistics(samples, flat=zero_std_ratio(rewards, groups)),
        steps_resumed=sum(result.steps_resumed for result in results),
    )


def _most_telling(rewards: Sequence[float], groups: Sequence[int], used: int) -> list[int]:
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


def whole(parts: Sequence[TrainingSet]) -> TrainingSet:
    """The training set of an iteration from those of its parts, which share no prompt."""
    if len(parts) == 1:
        return parts[0]
    samples = tuple(sample for part in parts for sample in part.samples)
    groups = [len({sample.request.prompt.id for sample in part.samples}) for part in parts]
    flat = sum(part.metrics["zero_std_ratio"] * count for part, count in zip(parts, groups, strict=True))
    return TrainingSet(
        samples=samples,
        metrics=_statistics(samples, flat=flat / sum(groups)),
        steps_resumed=sum(part.steps_resumed for part in parts),
    )


def _statistics(samples: Sequence[Sample], *, flat: float) -> dict[str, float]:
    """What is told of a training set; how many are trained on only where it is not all.

    Args:
        flat: share of groups whose rewards are all equal.
    """
    rewards, trained = [sample.reward for sample in samples], sum(sample.advantage is not None for sample in samples)
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
    """What a call of `gradient` is to compute."""
    samples = [sample for each in sets for sample in each.samples if sample.advantage is not None]
    first = 0 if len(samples) == cut.prompts * cut.seeds else cut.chunks[cut.needs(part)[0]].start * cut.seeds
    looked_at = samples if cut.updates > 1 else ()
    advantages = [sample.advantage or 0.0 for sample in looked_at]
    groups = [sample.request.prompt.id for sample in looked_at]
    positions = cut.positions(iteration, update, part, advantages, groups)
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
    arrays = (updates.load_slice(run_dir, iteration, part, at) for part in parts)
    try:
        return updates.put_sum(run_dir, iteration, parts, at, tree_sum(arrays))
    except SpotlightError:
        if is_over():  # by now, and what it was made of is removed
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
        gradients: what the parts of this update measured, and of those before it, which another worker may have taken.
        terms: what each of these updates adds: its parts' gradients, or the slices of their sum.
        before: the update before this one.
        surplus: the other ranks of gangs. Dask forgets a task that nobody depends on.
    """
    known, added = (tuple(tuple(parts) for parts in each) for each in (gradients, terms))
    after = before.weights_sha256 if before else ""
    return device.current().update(run_dir, weights, known, added, iteration, after)


def publish(run_dir: str, updated: Updated) -> Published:
    """Make a staged version one that anybody may use."""
    from spotlight.store.updates import clear
    from spotlight.store.weights import publish as publish_staged

    published = publish_staged(run_dir, updated.version)
    clear(run_dir, updated.version - 1)
    return published


def candidate_seed(seed: int, iteration: int, prompt: Prompt, index: int) -> int:
    """The index-th candidate of a prompt in an iteration: 63 bits of a hash, so that no two runs share noise."""
    return candidate_seeds(seed, iteration, prompt, (index,))[0]


def candidate_seeds(seed: int, iteration: int, prompt: Prompt, indices: Iterable[int]) -> tuple[int, ...]:
    """As `candidate_seed`, of several."""
    name = f"{seed}/{iteration}/{prompt.id}/"
    return tuple([int.from_bytes(sha256(f"{name}{index}".encode()).digest()[:8]) >> 1 for index in indices])


def validation_seeds(prompt: Prompt, count: int) -> tuple[int, ...]:
    """The same for every version and every run, so that scores compare."""
    return candidate_seeds(-1, 0, prompt, range(count))


def allocate(
    run_dir: str,
    candidates: Candidates,
    round_index: int,
    scored: Sequence[Scored | Dropped | Quarantined],
    earlier: Sequence[Sequence[Request]],
) -> tuple[Request, ...]:
    """The requests of one round of exploration.

    Args:
        scored: what the rounds up to the last but one brought.
        earlier: the requests of all rounds before.
    """
    chunks = _equal_chunks(candidates, round_index)
    if candidates.planner == "bandit":
        chunks = _bandit_chunks(run_dir, candidates, round_index, scored, earlier)
    requests = []
    for prompt_index, first, count in chunks:
        prompt = candidates.prompts[prompt_index]
        seeds = candidate_seeds(candidates.seed, candidates.iteration, prompt, range(first, first + count))
        requests.append(replace(candidates.template, prompt=prompt, seeds=seeds))
    return tuple(requests)


def _bandit_chunks(
    run_dir: str,
    candidates: Candidates,
    round_index: int,
    scored: Sequence[Scored | Dropped | Quarantined],
    earlier: Sequence[Sequence[Request]],
) -> list[tuple[int, int, int]]:
    arms = _arms(candidates, scored, earlier)
    given = {
        "iteration": candidates.iteration,
        "slots": len(_equal_chunks(candidates, round_index)),
        "later": sum(len(_equal_chunks(candidates, r)) for r in range(round_index + 1, candidates.rounds)),
        "candidates": max(0, candidates.candidates_max - sum(arm.tried for arm in arms)),
        "chunk": candidates.request_seeds,
        "keep": candidates.keep,
        "seed": candidate_seed(candidates.seed, candidates.iteration, Prompt(id=-1, text=""), round_index),
    }
    chunks = bandit.allocate(arms, candidates.beliefs, **given)
    RunDir(run_dir).append(DECISIONS, allocation_row(arms, candidates.beliefs, chunks, **given))
    return chunks


def _equal_chunks(candidates: Candidates, round_index: int) -> list[tuple[int, int, int]]:
    return bandit.equal_shares(
        len(candidates.prompts), candidates.seeds_tried, candidates.request_seeds, candidates.rounds, round_index
    )


def _arms(
    candidates: Candidates,
    scored: Sequence[Scored | Dropped | Quarantined],
    earlier: Sequence[Sequence[Request]],
) -> list[Arm]:
    """What is known of each prompt; the scores of the last round are still to come."""
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for result in scored:
        if isinstance(result, Scored):
            rewards[result.request.prompt.id] += [reward for reward in result.rewards if reward is not None]
    tried, pending = Counter[int](), Counter[int]()
    for requests in earlier:
        pending.clear()
        for request in requests:
            pending[request.prompt.id] += len(request.seeds)
        tried.update(pending)
    return [
        Arm(
            prompt=prompt.id,
            rewards=normalised(candidates.reward_range, rewards[prompt.id]),
            tried=tried[prompt.id],
            pending=pending[prompt.id],
        )
        for prompt in candidates.prompts
    ]


def explore_slot(run_dir: str, allocation: Sequence[Request], slot: int, gang: str, shard: int) -> ShardResult:
    """Run what the round's allocation gave this slot; if it is called off before it begins, it costs nothing."""
    if slot >= len(allocation):
        return Dropped(reason="the round's allocation needs fewer slots")
    return rollout_shard(run_dir, allocation[slot], gang, shard)


def save_images(
    run_dir: str, version: int, scored: Sequence[Scored | Quarantined], surplus: Sequence[ShardResult] = ()
) -> str:
    """Write the validation images of a version as one .npz.

    Returns:
        Its path inside the run directory; empty where every request was set aside.
    """
    import numpy as np

    name = f"images/validation-{version:05d}.npz"
    requests = [result.request for result in scored if isinstance(result, Scored)]
    if not requests:
        return ""
    texts = [request.prompt.text for request in requests for _ in request.seeds]
    images = [device.current().images(run_dir, request) for request in requests]
    content = BytesIO()
    np.savez_compressed(content, images=np.concatenate(images), texts=texts)
    RunDir(run_dir).objects.put(name, content.getvalue())
    return name


def forget_unscored(run_dir: str) -> None:
    """Have what lacks a reward scored anew: the scorer may have been mended since."""
    store = _latents(run_dir)
    if store:
        store.forget_unscored()


def compact(run_dir: str, iteration: int, keep: Literal["clean", "all", "none"]) -> None:
    """Apply the retention setting to the latents of an iteration that training is done with."""
    store = _latents(run_dir)
    if store:
        store.finish_iteration(iteration, keep)


def _latents(run_dir: str) -> LatentStore | None:
    """The run's store of latents; None where nothing was ever stored, so that nobody imports Zarr for that."""
    run = RunDir(run_dir)
    if not run.has_latents():
        return None
    from spotlight.store.latents import LatentStore

    return LatentStore(run.latents_url)


def select(
    candidates: Candidates,
    scored: Sequence[Scored | Dropped | Quarantined],
    allocations: Sequence[Sequence[Request]],
    surplus: Sequence[ShardResult] = (),
) -> Selection:
    """Keep the seeds of each prompt whose rewards differ most, and the prompts whose kept seeds' do.

    Where too few seeds were scored, untried ones fill up.
    """
    seeds_of: dict[int, list[int]] = {prompt.id: [] for prompt in candidates.prompts}
    rewards_of: dict[int, list[float]] = {prompt.id: [] for prompt in candidates.prompts}
    for result in scored:
        if isinstance(result, Scored):
            assert len(result.rewards) == len(result.request.seeds), f"{result.request.id}: a reward for each seed"
            prompt_id, known = result.request.prompt.id, [reward is not None for reward in result.rewards]
            seeds_of[prompt_id] += compress(result.request.seeds, known)
            rewards_of[prompt_id] += [reward for reward in result.rewards if reward is not None]
    groups = [
        _keep(candidates, prompt, list(zip(seeds_of[prompt.id], rewards_of[prompt.id], strict=True)))
        for prompt in candidates.prompts
    ]
    kept_rewards = [[reward for reward in group.explored_rewards if reward is not None] for group in groups]
    kept = tuple(groups[index] for index in most_varied(kept_rewards, candidates.groups))
    rewards = [reward for each in rewards_of.values() for reward in each]
    return Selection(
        iteration=candidates.iteration,
        kept=kept,
        seeds_scored=len(rewards),
        seeds_dropped=sum(len(request.seeds) for requests in allocations for request in requests) - len(rewards),
        reward_mean=fmean(rewards) if rewards else None,
        reward_std=spread(rewards) if rewards else None,
        explored=tuple(Explored(prompt=prompt, rewards=tuple(each)) for prompt, each in rewards_of.items()),
    )


def _keep(candidates: Candidates, prompt: Prompt, pairs: list[tuple[int, float]]) -> Kept:
    pairs = sorted(pairs)
    if len(pairs) > candidates.keep:
        chosen = [pairs[index] for index in max_variance_subset([reward for _, reward in pairs], candidates.keep)]
        return Kept(
            prompt=prompt,
            seeds=tuple(seed for seed, _ in chosen),
            explored_rewards=tuple(reward for _, reward in chosen),
        )
    known = dict(pairs)
    untried = (
        candidate_seed(candidates.seed, candidates.iteration, prompt, index)
        for index in range(candidates.seeds_tried + candidates.keep)
    )
    fill = [seed for seed in untried if seed not in known][: candidates.keep - len(pairs)]
    seeds = (*known, *fill)
    return Kept(prompt=prompt, seeds=seeds, explored_rewards=tuple(known.get(seed) for seed in seeds))
