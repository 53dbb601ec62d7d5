"""What an iteration asks for: the requests that explore, roll out and validate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil

from graphs.tasks.context import RunContext
from graphs.tasks.exploration import Candidates
from graphs.tasks.seeds import candidate_seed, candidate_seeds, validation_seeds
from spotlight.config import Config
from spotlight.plan import batching
from spotlight.plan.bandit import rounds_of
from spotlight.plan.beliefs import Beliefs
from spotlight.plan.durations import TRANSFORMERS, TaskDurations
from spotlight.plan.stochastic_steps import stochastic_steps
from spotlight.records import Kept, Prompt, Purpose, Request, Scored, Selection, SpotlightError, WeightsRef
from spotlight.rl import rewards
from spotlight.store.rundir import made_again

REQUEST_S = 0.25
"""What a request costs whatever its size, in samples: half a sample of the embedded model, nothing for a large one."""
SHARED = -1
"""Index of the seed of the first noise that all samples of a prompt share (``rollout.same_noise``); no candidate's."""


def candidates_for(
    config: Config,
    context: RunContext,
    iteration: int,
    prompts: Sequence[Prompt],
    weights: WeightsRef,
    *,
    beliefs: Beliefs = Beliefs(),  # noqa: B008  # a frozen value
    candidates_max: int | None = None,
    pools: Collection[str] = ("spot",),
) -> Candidates:
    """What exploration for an iteration may try with the given weights.

    Args:
        beliefs: what the planner learnt from the iterations before.
        candidates_max: how many there is time for; None where nothing is known of the time.
        pools: whose workers explore.
    """
    exploration, known = config.exploration, beliefs.about([prompt.id for prompt in prompts])
    limit = exploration.seeds_tried * len(prompts)
    candidates_max = limit if candidates_max is None else min(limit, candidates_max)
    seeds_tried, rounds = exploration.seeds_tried, exploration.rounds
    if not rounds and exploration.planner == "bandit":  # it may give one prompt more than another
        seeds_tried = max(1, ceil(candidates_max / len(prompts)))
    slots = len(prompts) * ceil(seeds_tried / exploration.request_seeds)
    rounds = min(slots, rounds or rounds_of(slots, gangs_of(config, pools)))  # each round has a request at least
    return Candidates(
        iteration=iteration,
        prompts=tuple(prompts),
        template=exploring_template(config, context, iteration, weights),
        seed=context.seed,
        seeds_tried=seeds_tried,
        request_seeds=exploration.request_seeds,
        rounds=rounds,
        keep=config.rollout.seeds_kept,
        groups=config.rollout.prompts,
        candidates_max=candidates_max,
        planner=exploration.planner,
        beliefs=replace(known, fidelity=1.0) if exploration.reuse else known,  # what is kept is what was drawn
        reuse=exploration.reuse,
        reward_range=rewards.planned_range(rewards.build(config.reward)),
    )


def unexplored(config: Config, context: RunContext, iteration: int, prompts: Sequence[Prompt]) -> Selection:
    """The selection where nothing is explored: each prompt's first candidates."""
    count = config.rollout.seeds_kept
    kept = tuple(
        Kept(
            prompt=prompt,
            seeds=candidate_seeds(context.seed, iteration, prompt, range(count)),
            explored_rewards=(None,) * count,
        )
        for prompt in prompts
    )
    return Selection(iteration=iteration, kept=kept, seeds_scored=0, seeds_dropped=0)


def rollout_requests(
    config: Config, context: RunContext, selection: Selection, weights: WeightsRef, *, before: WeightsRef | None = None
) -> list[Request]:
    """The kept seeds as requests, in the order in which training consumes them.

    Prompts whose seeds are trained on as exploration drew them have none.

    Args:
        before: weights for the first ``rollout.prompts_ahead`` prompts, in place of ``weights``.
    """
    template = request_template(config, context, "rollout", selection.iteration, weights)
    size, early = request_size(config), config.rollout.prompts_ahead
    shares = config.rollout.same_noise
    return [
        replace(
            template,
            prompt=kept.prompt,
            seeds=kept.seeds[first : first + size],
            first_noise=candidate_seed(context.seed, selection.iteration, kept.prompt, SHARED) if shares else None,
            weights=before if before and number < early else weights,
        )
        for number, kept in enumerate(selection.kept)
        if not kept.drawn
        for first in range(0, len(kept.seeds), size)
    ]


def drawn_samples(
    config: Config, context: RunContext, selection: Selection, weights: WeightsRef
) -> list[tuple[Scored, ...]]:
    """For each kept prompt, its explored samples that are trained on; none where the prompt is rolled out.

    Args:
        weights: those that explored.

    Raises:
        SpotlightError: the samples were explored with other weights or other settings.
    """
    template = exploring_template(config, context, selection.iteration, weights)
    if any(kept.drawn for kept in selection.kept) and template.kind != selection.explored_as:
        raise SpotlightError(
            f"{context.run_dir}: the samples of iteration {selection.iteration} were explored with other weights or "
            f"other settings, and would be drawn anew for their old rewards: put the settings back as they were, or "
            f"{made_again(selection.iteration)}"
        )
    return [
        tuple(
            Scored(
                request=replace(template, prompt=kept.prompt, seeds=each.seeds), rewards=each.rewards, parts=each.parts
            )
            for each in kept.drawn
        )
        for kept in selection.kept
    ]


def validation_requests(
    config: Config, context: RunContext, prompts: Sequence[Prompt], weights: WeightsRef
) -> list[Request]:
    """One for each held-out prompt; its seeds are the same for every version."""
    template = replace(
        request_template(config, context, "validate", weights.version, weights),
        sampler="ode",
        sigmas=context.validation_sigmas,
        policy=config.validation_policy,
    )
    count = config.run.validation_seeds
    return [replace(template, prompt=prompt, seeds=validation_seeds(prompt, count)) for prompt in prompts]


def request_size(config: Config) -> int:
    """Most samples in a rollout's request: the settings', or the size that ends the rollout soonest on these pools."""
    rollout = config.rollout
    return rollout.request_seeds or batching.request_seeds(
        prompts=rollout.prompts,
        seeds=rollout.seeds_kept,
        gangs=max(1, gangs_of(config, config.strategy.rollout_pools)),
        seeds_max=batching.SEEDS_MAX,
        fixed_s=REQUEST_S,
        sample_s=1.0,
        least_s=_least_samples(config),
    )


def _least_samples(config: Config) -> float:
    """The batch size below which a step gets no shorter; 0 where there is no cost model."""
    emulated = bool(config.pace.gpu)
    name = config.pace.model if emulated else config.model.name
    if name not in TRANSFORMERS or (config.model.embedded and not emulated):
        return 0.0
    return TaskDurations(config).least_samples(config.strategy.rollout_pools[0])


def gangs_of(config: Config, pools: Collection[str]) -> int:
    """Requests that the workers of these pools can run at once."""
    workers = {"reserved": config.pools.reserved.workers, "spot": config.pools.spot.workers}
    return sum(workers[pool] for pool in set(pools)) // widths_of(config)[0]


def widths_of(config: Config) -> tuple[int, ...]:
    widths = config.strategy.widths
    return widths if config.strategy.elastic else widths[-1:]


def request_template(
    config: Config, context: RunContext, purpose: Purpose, iteration: int, weights: WeightsRef
) -> Request:
    rollout, model = config.rollout, config.model
    return Request(
        run=context.run,
        iteration=iteration,
        purpose=purpose,
        prompt=Prompt(id=-1, text=""),
        seeds=(),
        sampler=rollout.sampler,
        sigmas=context.sigmas,
        sde_window=stochastic_steps(
            rollout.sde_window,
            rollout.stochastic_steps,
            order=rollout.sde_window_order,
            stride=rollout.sde_window_stride,
            every=rollout.sde_window_every,
            seed=context.seed,
            iteration=iteration,
        ),
        noise_level=rollout.noise_level,
        guidance=rollout.guidance,
        height_px=model.height_px,
        width_px=model.width_px,
        weights=weights,
        policy=config.train.sampling_policy,
    )


def exploring_template(config: Config, context: RunContext, iteration: int, weights: WeightsRef) -> Request:
    """A request that explores, without its prompt and seeds."""
    template = request_template(config, context, "explore", iteration, weights)
    sampler = "ode" if template.is_stochastic else template.sampler
    return replace(template, sampler=sampler, sigmas=context.explore_sigmas)
