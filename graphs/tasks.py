"""The functions in the graph: thin shells that may run twice, anywhere, and change nothing by it.

Arguments and results are small records; latents, images and weights stay in the stores. The engine is
imported inside the functions, so that the process which only builds graphs never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

from spotlight.explore import equal_shares, max_variance_subset
from spotlight.records import (
    Dropped,
    Kept,
    Prompt,
    Published,
    Request,
    Rollout,
    Sample,
    Scored,
    Selection,
    SpotlightError,
    WeightsRef,
)
from spotlight.rundir import RunDir, atomic_write
from spotlight.signals import signals

if TYPE_CHECKING:
    from spotlight.engine import Engine

REFILL = 1 << 20
"""Replacements are candidates numbered from here: no exploration tries so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all requests of a run share, worked out once by `prepare`."""

    run_dir: str
    run: str
    seed: int
    sigmas: tuple[float, ...]
    explore_sigmas: tuple[float, ...]
    start: WeightsRef
    """Version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    """An iteration's samples in request order, and what their rewards say."""

    samples: tuple[Sample, ...]
    metrics: dict[str, float]


def _engine(run_dir: str) -> Engine:
    from spotlight.engine import engine_of

    return engine_of(run_dir)


def prepare(run_dir: str) -> Setting:
    """Load the model once, publish version 0, and ask the model for its noise levels."""
    engine = _engine(run_dir)
    settings = engine.config
    size = settings.model.height_px, settings.model.width_px
    engine.model.grid(*size)
    return Setting(
        run_dir=run_dir,
        run=engine.run_dir.name,
        seed=settings.run.seed,
        sigmas=engine.model.sigmas(settings.rollout.steps, *size),
        explore_sigmas=engine.model.sigmas(settings.exploration.steps or settings.rollout.steps, *size),
        start=engine.publish_start(),
    )


def rollout_shard(run_dir: str, request: Request) -> Rollout | Dropped:
    """Denoise one request, resuming at its last committed step."""
    signals.check(request)
    return _engine(run_dir).rollout(request)


def score(run_dir: str, done: Rollout | Dropped) -> Scored | Dropped:
    """Rewards of what was rolled out.

    Raises:
        SpotlightError: it was rolled out with other weights than were asked for.
    """
    if isinstance(done, Dropped):
        return done
    if done.weights_sha256 != done.request.weights.sha256:
        raise SpotlightError(
            f"request {done.request.id} asked for weights {done.request.weights.sha256[:12]} and was run with "
            f"{done.weights_sha256[:12]}: nothing was trained on it; resume the run"
        )
    return _engine(run_dir).score(done.request)


def refill(run_dir: str, seed: int, scored: Sequence[Scored]) -> tuple[Scored, ...]:
    """Replace the samples whose scorer failed for good by fresh seeds of the same prompt.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    return tuple(part for one in scored for part in (one, *_replacements(run_dir, seed, one)))


def _replacements(run_dir: str, seed: int, scored: Scored) -> list[Scored]:
    missing = [index for index, reward in enumerate(scored.rewards) if reward is None]
    if not missing:
        return []
    request = scored.request
    replaced = scored.request.seeds[missing[0]] & (REFILL - 1)  # so that two requests of a prompt do not share seeds
    fresh = replace(
        request,
        seeds=tuple(
            candidate_seed(seed, request.iteration, request.prompt, REFILL + replaced + at)
            for at in range(len(missing))
        ),
    )
    engine = _engine(run_dir)
    engine.rollout(fresh)
    again = engine.score(fresh)
    if None in again.rewards:
        raise SpotlightError(
            f"the reward failed for {request.prompt.text!r}, seeds {request.seeds}, and for the seeds that replaced "
            f"them: {again.errors[0]}; mend the scorer, then resume the run"
        )
    return [again]


def advantage(settings_std: str, scored: Sequence[Scored]) -> TrainingSet:
    """Advantages of all samples that have a reward, in request order."""
    from spotlight.grpo import group_advantages, zero_std_ratio

    rows = [
        (one.request, index, reward) for one in scored for index, reward in enumerate(one.rewards) if reward is not None
    ]
    rewards = [reward for _, _, reward in rows]
    groups = [request.prompt.id for request, _, _ in rows]
    advantages = group_advantages(rewards, groups, std="group" if settings_std == "group" else "global")
    return TrainingSet(
        samples=tuple(
            Sample(request=request, index=index, reward=reward, advantage=float(value))
            for (request, index, reward), value in zip(rows, advantages, strict=True)
        ),
        metrics={
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
            "zero_std_ratio": zero_std_ratio(rewards, groups),
            "samples": float(len(rows)),
        },
    )


def train(run_dir: str, weights: WeightsRef, training: TrainingSet, iteration: int) -> int:
    """Update from one iteration's samples; the next version is left staged. Returns its number."""
    _engine(run_dir).train(weights, training.samples, iteration=iteration)
    return weights.version + 1


def publish(run_dir: str, version: int) -> Published:
    """Make a staged version one that anybody may use."""
    from spotlight.weights import publish as publish_staged

    return publish_staged(Path(run_dir), version)


def candidate_seed(seed: int, iteration: int, prompt: Prompt, index: int) -> int:
    """The index-th candidate of a prompt in an iteration: 63 bits of a hash, so that no two runs share noise."""
    name = f"{seed}/{iteration}/{prompt.id}/{index}".encode()
    return int.from_bytes(sha256(name).digest()[:8]) >> 1


def validation_seeds(prompt: Prompt, count: int) -> tuple[int, ...]:
    """The same for every version and every run, so that scores compare."""
    return tuple(candidate_seed(-1, 0, prompt, index) for index in range(count))


def allocate(candidates: Candidates, round_index: int, scored: Sequence[Scored | Dropped]) -> tuple[Request, ...]:
    """What the slots of one round try. Equal shares look at no score."""
    del scored  # the edge is in the graph for planners that do look
    chunks = equal_shares(
        len(candidates.prompts), candidates.seeds_tried, candidates.request_seeds, candidates.rounds, round_index
    )
    requests = []
    for prompt_index, first, count in chunks:
        prompt = candidates.prompts[prompt_index]
        seeds = (
            candidate_seed(candidates.seed, candidates.iteration, prompt, index)
            for index in range(first, first + count)
        )
        requests.append(replace(candidates.template, prompt=prompt, seeds=tuple(seeds)))
    return tuple(requests)


def explore_slot(run_dir: str, allocation: Sequence[Request], slot: int) -> Rollout | Dropped:
    """Run what the round's allocation gave this slot; called off in time, it costs nothing."""
    request = allocation[slot]
    reason = signals.check(request)
    return Dropped(reason=reason) if reason else _engine(run_dir).rollout(request)


def save_images(run_dir: str, version: int, scored: Sequence[Scored]) -> str:
    """Write the validation images of a version as one .npz; returns its path inside the run directory."""
    import numpy as np

    engine = _engine(run_dir)
    name = f"images/validation-{version:05d}.npz"
    path = Path(run_dir) / name
    path.parent.mkdir(exist_ok=True)
    texts = [one.request.prompt.text for one in scored for _ in one.request.seeds]
    with atomic_write(path) as file:
        np.savez_compressed(file, images=np.concatenate([engine.images(one.request) for one in scored]), texts=texts)
    return name


def compact(run_dir: str, iteration: int, keep: Literal["clean", "all", "none"]) -> None:
    """Apply the retention setting to the latents of an iteration that training is done with."""
    from spotlight.latents import LatentStore

    LatentStore(RunDir(run_dir).latents_url).finish_iteration(iteration, keep)


def select(candidates: Candidates, scored: Sequence[Scored | Dropped]) -> Selection:
    """Keep the seeds of each prompt whose rewards differ most; fill up with untried ones if too few were scored."""
    by_prompt: dict[int, list[tuple[int, float]]] = {prompt.id: [] for prompt in candidates.prompts}
    for one in scored:
        if isinstance(one, Scored):
            pairs = zip(one.request.seeds, one.rewards, strict=True)
            by_prompt[one.request.prompt.id] += [(seed, reward) for seed, reward in pairs if reward is not None]
    kept = tuple(_keep(candidates, prompt, by_prompt[prompt.id]) for prompt in candidates.prompts)
    rewards = [reward for pairs in by_prompt.values() for _, reward in pairs]
    return Selection(
        iteration=candidates.iteration,
        kept=kept,
        seeds_scored=len(rewards),
        seeds_dropped=candidates.seeds_tried * len(candidates.prompts) - len(rewards),
        reward_mean=fmean(rewards) if rewards else None,
        reward_std=pstdev(rewards) if rewards else None,
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
