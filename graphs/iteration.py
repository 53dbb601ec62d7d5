"""One iteration as a Dask graph: a layer for each of its phases. It starts and watches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from graphs.layers import Calls, Graph, Key, Layers, first_shards, other_shards, pool_of
from graphs.requests import (
    candidates_for,
    drawn_samples,
    exploring_template,
    rollout_requests,
    unexplored,
    validation_requests,
    widths_of,
)
from graphs.tasks import exploration, refills, sampling, training
from graphs.tasks.context import RunContext, prepare
from graphs.tasks.exploration import Candidates
from graphs.training import add_training
from spotlight.config import Config
from spotlight.plan.bandit import equal_shares
from spotlight.records import AHEAD, Drawn, Kept, Prompt, Selection, WeightsRef, record


@record
class Ahead:
    """The rollouts that are begun an iteration early, of its first ``rollout.prompts_ahead`` prompts."""

    weights: WeightsRef
    """The weights that these prompts of this iteration are rolled out with, whether they were begun early or not."""
    following: Selection | None = None
    """The seeds of the next iteration, if there is one."""


def prepare_graph(run_dir: str, session: str = "", *, on_spot: bool = False) -> Graph:
    """Load the model, encode the prompts, publish version 0.

    Args:
        session: which start of the run this is, where a scheduler may see several.
        on_spot: the reserved workers have no GPU.
    """
    layers = Layers(session, on_spot)
    pool = "engine" if on_spot else "reserved-engine"
    (key,) = layers.add("prepare", 0, [(prepare, run_dir, session)], pool=pool)
    return Graph(graph=layers.graph(), outputs={"context": key})


def iteration_graph(
    config: Config,
    context: RunContext,
    selection: Selection,
    weights: WeightsRef,
    candidates: Candidates | None,
    *,
    drawn_with: WeightsRef | None = None,
    ahead: Ahead | None = None,
    window_s: float = inf,
) -> Graph:
    """Iteration k: roll out and train on the kept seeds; meanwhile explore for k + 1, or roll out some of its seeds.

    Training is a task for each part of each update, and one for each update; where samples may be trained on as they
    arrive, a part waits for its own only.

    Args:
        selection: the kept seeds of iteration k.
        weights: version k.
        candidates: what exploration for k + 1 may try; None where it is off or already known.
        drawn_with: the weights that explored for k, where explored samples are trained on.
        ahead: the rollouts that are begun an iteration early; None where there are none.
        window_s: how long reserved workers roll out while there are spot workers.
    """
    layers, k, run_dir = _layers(config, context), selection.iteration, context.run_dir
    requests = rollout_requests(config, context, selection, weights, before=ahead.weights if ahead else None)
    calls = [(sampling.rollout_shard, run_dir, request) for request in requests]
    pool, widths = pool_of(config.strategy.rollout_pools), widths_of(config)
    rollouts = layers.add_requests("rollout", k, calls, pool=pool, widths=widths, window_s=window_s)
    scores = _add_scores(layers, config, "{}", k, run_dir, rollouts, seed=context.seed)
    drawn = drawn_samples(config, context, selection, drawn_with or weights)
    sets, updated = add_training(layers, config, context, selection, weights, rollouts, scores, drawn)
    publish = (training.publish, run_dir, updated)
    (published,) = layers.add("publish", k, [publish], pool="reserved-engine", after=[updated])
    outputs: dict[str, Key | list[Key]] = {"training": sets, "published": published}
    if k > 0:
        (outputs["compacted"],) = layers.add(
            "compact", k - 1, [(sampling.compact, run_dir, k - 1, config.latents.keep)], pool="head"
        )
    if candidates:
        outputs["selection"] = _add_exploration(layers, config, context, candidates, pool="spot")
    if ahead and ahead.following:
        outputs["ahead"] = _add_rollouts_ahead(layers, config, context, ahead.following, weights)
    return Graph(graph=layers.graph(), outputs=outputs)


def final_graph(config: Config, context: RunContext, done: int) -> Graph:
    """Compact the last iteration and the validation of its weights, which no later iteration does.

    Args:
        done: how many iterations the run has.
    """
    layers, last = _layers(config, context), range(max(0, done - 1), done + 1)
    calls = [(sampling.compact, context.run_dir, iteration, config.latents.keep) for iteration in last]
    keys = layers.add("compact", last[0], calls, pool="head")
    return Graph(graph=layers.graph(), outputs={"compacted": keys})


def exploration_graph(config: Config, context: RunContext, candidates: Candidates) -> Graph:
    """Exploration with nothing beside it: before the first iteration, or before each one."""
    layers = _layers(config, context)
    selection = _add_exploration(layers, config, context, candidates, pool=pool_of(config.gpu_pools))
    return Graph(graph=layers.graph(), outputs={"selection": selection})


def validation_graph(config: Config, context: RunContext, prompts: Sequence[Prompt], weights: WeightsRef) -> Graph:
    """Score a weights version on the held-out prompts; the seeds are the same for every version."""
    layers, requests = _layers(config, context), validation_requests(config, context, prompts, weights)
    calls: Calls = [(sampling.rollout_shard, context.run_dir, request) for request in requests]
    pool, widths = pool_of(config.gpu_pools), widths_of(config)
    rollouts = layers.add_requests("validate", weights.version, calls, pool=pool, widths=widths)
    scores = _add_scores(layers, config, "validate-{}", weights.version, context.run_dir, rollouts)
    surplus = other_shards(rollouts)
    save = (sampling.save_images, context.run_dir, weights.version, scores, surplus)
    images = layers.add("validate-images", weights.version, [save], pool="engine", after=[*scores, *surplus])
    return Graph(graph=layers.graph(), outputs={"scores": scores, "images": images[0]})


def example_graph(config: Config) -> Graph:
    """Iteration 1 as it would be built, without a model or a run: for drawing."""
    steps = config.rollout.steps
    sigmas = tuple(1 - step / steps for step in range(steps + 1))
    version = [WeightsRef(version=number, sha256="") for number in (0, 1)]
    context = RunContext(
        run_dir="",
        run="",
        seed=config.run.seed,
        sigmas=sigmas,
        explore_sigmas=sigmas,
        validation_sigmas=sigmas,
        start=version[0],
    )
    prompts = [Prompt(id=index, text="") for index in range(config.prompts_drawn)]
    explores = config.strategy.exploration == "stale"
    now, following = (unexplored(config, context, k, prompts[: config.rollout.prompts]) for k in (1, 2))
    if explores and config.exploration.reuse:
        drawn = (replace(kept, drawn=(_all_of(kept),)) for kept in now.kept)
        now = replace(now, kept=tuple(drawn), explored_as=exploring_template(config, context, 1, version[0]).kind)
    return iteration_graph(
        config,
        context,
        now,
        version[1],
        candidates_for(config, context, 2, prompts, version[1]) if explores else None,
        drawn_with=version[0],
        ahead=Ahead(weights=version[0], following=following) if config.rollout.prompts_ahead else None,
    )


def _all_of(kept: Kept) -> Drawn:
    """A request that explored all of a prompt's kept seeds."""
    return Drawn(seeds=kept.seeds, rewards=(0.0,) * len(kept.seeds))


def _add_rollouts_ahead(
    layers: Layers, config: Config, context: RunContext, following: Selection, weights: WeightsRef
) -> Key:
    """Begin the first prompts of the next iteration, which asks for the same requests; returns the key of their end."""
    k, early = following.iteration, replace(following, kept=following.kept[: config.rollout.prompts_ahead])
    requests = rollout_requests(config, context, early, weights)
    calls: Calls = [(sampling.rollout_ahead, context.run_dir, request) for request in requests]
    begun = layers.add_requests(AHEAD, k, calls, pool="spot", widths=widths_of(config))
    ends, surplus = first_shards(begun), other_shards(begun)
    if not config.scores_apart:  # the workers of the reward pool score what training waits for
        calls = [(sampling.score, context.run_dir, key) for key in ends]
        ends = layers.add("score-ahead", k, calls, pool="engine", after=ends)
    return layers.add("ahead", k, [(sampling.ended, ends, surplus)], pool="head", after=[*ends, *surplus])[0]


def _layers(config: Config, context: RunContext) -> Layers:
    return Layers(context.session, on_spot=not config.reserved_computes)


def _add_scores(
    layers: Layers,
    config: Config,
    phase: str,
    iteration: int,
    run_dir: str,
    requests: list[list[Key]],
    *,
    seed: int | None = None,
) -> list[Key]:
    """Score each request on the worker that denoised it; or decode its images there, and score them in the reward pool.

    Args:
        phase: pattern of the phases' names, whose ``{}`` becomes "decode" and "score".
        seed: the run's, where the samples are trained on: then those without a reward are replaced at once, if the
            worker that denoised them scores.

    Returns:
        The keys of the scores.
    """
    results, pool = first_shards(requests), "engine"
    if config.scores_apart:
        calls: Calls = [(sampling.decode, run_dir, key) for key in results]
        results, pool = layers.add(phase.format("decode"), iteration, calls, pool="engine", after=results), "reward"
    calls = [(sampling.score, run_dir, key) for key in results]
    if seed is not None and not config.scores_apart:
        calls = [(refills.score_whole, run_dir, seed, key) for key in results]
    return layers.add(phase.format("score"), iteration, calls, pool=pool, after=results)


def _add_exploration(layers: Layers, config: Config, context: RunContext, candidates: Candidates, *, pool: str) -> Key:
    """Rounds of allocate, slots and score, then select; returns the key of the selection.

    Round r sees the scores of rounds up to r - 2, so that no slot waits for the round before it.
    """
    k, run_dir = candidates.iteration, context.run_dir
    scores: list[list[Key]] = []
    allocations: list[Key] = []
    surplus: list[Key] = []
    for r in range(candidates.rounds):
        seen = [key for earlier in scores[: max(0, r - 1)] for key in earlier]
        call = (exploration.allocate, run_dir, candidates, r, seen, list(allocations))
        allocations += layers.add(f"allocate-r{r}", k, [call], pool="head", after=[*seen, *allocations])
        slots = len(
            equal_shares(
                len(candidates.prompts), candidates.seeds_tried, candidates.request_seeds, candidates.rounds, r
            )
        )
        calls: Calls = [(exploration.explore_slot, run_dir, allocations[r], slot) for slot in range(slots)]
        explored = layers.add_requests(
            f"explore-r{r}", k, calls, pool=pool, widths=widths_of(config), after=allocations[r:]
        )
        scores.append(_add_scores(layers, config, f"explore-{{}}-r{r}", k, run_dir, explored))
        surplus += other_shards(explored)
    everything = [key for round_scores in scores for key in round_scores]
    select = (exploration.select, candidates, everything, allocations, surplus)
    return layers.add("select", k, [select], pool="head", after=[*everything, *allocations, *surplus])[0]
