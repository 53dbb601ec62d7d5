"""Which candidates are tried next, and which seeds are kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import Literal

from graphs.tasks.sampling import ShardResult, rollout_shard
from graphs.tasks.seeds import candidate_seed, candidate_seeds
from spotlight.plan import bandit
from spotlight.plan.beliefs import Arm, Beliefs
from spotlight.plan.replay import allocation_row
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.records import Drawn, Dropped, Explored, Kept, Prompt, Quarantined, Request, Scored, Selection, record
from spotlight.rl.advantages import spread
from spotlight.rl.rewards import normalised
from spotlight.store.rows import DECISIONS
from spotlight.store.rundir import RunDir


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
    """Prompts that are trained on."""
    candidates_max: int
    """Candidates that there is time for, of all prompts together."""
    planner: Literal["bandit", "equal"] = "equal"
    beliefs: Beliefs = Beliefs()
    reuse: bool = False
    """Kept candidates are trained on as they were drawn."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and largest reward; the planner sees rewards mapped to [0, 1]."""


def allocate(
    run_dir: str,
    candidates: Candidates,
    round_index: int,
    scored: Sequence[Scored | Dropped | Quarantined],
    earlier: Sequence[Sequence[Request]],
) -> tuple[Request, ...]:
    """The requests of one round of exploration.

    Args:
        scored: results of all rounds before the previous one.
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
        "complete": candidates.groups if candidates.reuse else 0,
        "seed": candidate_seed(candidates.seed, candidates.iteration, Prompt(id=-1, text=""), round_index),
    }
    chunks = bandit.allocate(arms, candidates.beliefs, **given)
    RunDir(run_dir).append(DECISIONS, allocation_row(arms, candidates.beliefs, chunks, **given))
    return chunks


def _equal_chunks(candidates: Candidates, round_index: int) -> list[tuple[int, int, int]]:
    """Equal shares; there is a slot for each, whatever the planner allocates."""
    return bandit.equal_shares(
        *(len(candidates.prompts), candidates.seeds_tried, candidates.request_seeds, candidates.rounds, round_index),
        keep=candidates.keep if candidates.reuse else 0,
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


def select(
    candidates: Candidates,
    scored: Sequence[Scored | Dropped | Quarantined],
    allocations: Sequence[Sequence[Request]],
    surplus: Sequence[ShardResult] = (),
) -> Selection:
    """Keep the seeds of each prompt whose rewards vary most, and the prompts whose kept seeds' rewards vary most.

    Where too few seeds of a prompt were scored, untried ones are added.
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
    if candidates.reuse:
        groups = [replace(group, drawn=_drawn(group, scored)) for group in groups]
    kept_rewards = [[reward for reward in group.explored_rewards if reward is not None] for group in groups]
    kept = tuple(groups[index] for index in most_varied(kept_rewards, candidates.groups))
    rewards = [reward for each in rewards_of.values() for reward in each]
    failed = [result for result in scored if isinstance(result, Scored) and result.errors]
    return Selection(
        iteration=candidates.iteration,
        kept=kept,
        seeds_scored=len(rewards),
        seeds_dropped=sum(len(request.seeds) for requests in allocations for request in requests) - len(rewards),
        seeds_failed=sum(result.rewards.count(None) for result in failed),
        error=failed[0].errors[0] if failed else "",
        reward_mean=fmean(rewards) if rewards else None,
        reward_std=spread(rewards) if rewards else None,
        version=candidates.template.weights.version,
        explored_as=candidates.template.kind,
        explored=tuple(Explored(prompt=prompt, rewards=tuple(each)) for prompt, each in rewards_of.items()),
    )


def _drawn(kept: Kept, scored: Sequence[Scored | Dropped | Quarantined]) -> tuple[Drawn, ...]:
    """The requests that drew the kept seeds of a prompt; none if some of these were never drawn."""
    if None in kept.explored_rewards:
        return ()
    of_prompt = [each for each in scored if isinstance(each, Scored) and each.request.prompt == kept.prompt]
    return tuple(_only(each, kept.seeds) for each in of_prompt if not set(kept.seeds).isdisjoint(each.request.seeds))


def _only(scored: Scored, kept: Collection[int]) -> Drawn:
    """An explored request, with the rewards of its kept seeds alone."""
    seeds = scored.request.seeds

    def only(rewards: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(reward if seed in kept else None for seed, reward in zip(seeds, rewards, strict=True))

    return Drawn(seeds=seeds, rewards=only(scored.rewards), parts=tuple(map(only, scored.parts)))


def _keep(candidates: Candidates, prompt: Prompt, pairs: list[tuple[int, float]]) -> Kept:
    """The seeds to keep of a prompt, from its ``(seed, reward)`` pairs."""
    pairs = sorted(pairs)
    if len(pairs) > candidates.keep:
        chosen = [pairs[index] for index in max_variance_subset([reward for _, reward in pairs], candidates.keep)]
        return Kept(
            prompt=prompt,
            seeds=tuple(seed for seed, _ in chosen),
            explored_rewards=tuple(reward for _, reward in chosen),
        )
    known = dict(pairs)
    untried = candidate_seeds(candidates.seed, candidates.iteration, prompt, range(candidates.keep))
    fill = [seed for seed in untried if seed not in known][: candidates.keep - len(pairs)]
    seeds = (*known, *fill)
    return Kept(prompt=prompt, seeds=seeds, explored_rewards=tuple(known.get(seed) for seed in seeds))
