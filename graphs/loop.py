"""Iteration after iteration: builds each graph, has it computed, and records what came of it.

It knows no cluster: ``compute`` runs a graph (on Dask's distributed or synchronous scheduler), ``watch`` is
told what happened and says what it cost. All that the next iteration needs is in the run directory
before this one counts as finished, so a run that was killed anywhere goes on as if it had not been.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from statistics import fmean
from typing import Any, Protocol

from dask.local import get_sync

from graphs.iteration import Ahead, exploration_graph, final_graph, iteration_graph, prepare_graph, validation_graph
from graphs.layers import Graph
from graphs.requests import candidates_for, unexplored
from graphs.tasks.context import RunContext
from graphs.tasks.exploration import Candidates
from graphs.tasks.sampling import forget_unscored
from graphs.tasks.training import TrainingSet, means_of_validation, whole
from spotlight.clock import Clock, wall_clock
from spotlight.config import Config
from spotlight.plan.balance import Balance, cut_short
from spotlight.plan.bandit import PROBE_SHARE, RECENT, affordable, captured_variance, rank_correlation
from spotlight.plan.beliefs import Beliefs, learn
from spotlight.plan.offload import (
    FIRST_WINDOW_S,
    FLOOR_S,
    Offload,
    adapt,
    rollout_window_s,
    spot_worth_renting,
)
from spotlight.plan.sharing import worth_exploring
from spotlight.records import Prompt, Published, Quarantined, Scored, Selection, SpotlightError, WeightsRef, row_of
from spotlight.rl import rewards
from spotlight.rl.prompts import choose_prompts, read_prompts
from spotlight.rl.rewards import normalised
from spotlight.store import resuming
from spotlight.store.rows import HISTORY, VALIDATION, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir
from spotlight.store.weights import published, retain

logger = logging.getLogger(__name__)


class Compute(Protocol):
    """Computes a graph; the results have the names and the nesting of its outputs."""

    def __call__(self, graph: Graph) -> Mapping[str, Any]: ...


class Watch(Protocol):
    """Follows a run; none of it changes what is computed."""

    def begin(self, phase: str, iteration: int) -> None:
        """A graph is about to be computed."""

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        """Seconds and dollars of a stretch of time."""
        ...

    def usd(self) -> float:
        """Dollars that the run has cost so far."""
        ...

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        """How reserved and spot workers shared an iteration; None where nothing is known of it."""


def synchronous(graph: Graph) -> Mapping[str, Any]:
    """Compute in this thread, task by task: for tests and debugging."""
    keys: list[Any] = list(graph.outputs.values())
    return dict(zip(graph.outputs, get_sync(graph.graph, keys), strict=True))


class Loop:
    """A run's iterations, from where its directory says it is to the last one, the run's target or its dollars' limit.

    Args:
        session: which start of the run this is, where a scheduler may see several.
    """

    def __init__(
        self, run: RunDir, compute: Compute, watch: Watch, clock: Clock = wall_clock, session: str = ""
    ) -> None:
        self._clock, self._session = clock, session
        self._run = run
        self._config: Config = run.config()
        self._compute = compute
        self._watch = watch
        self._train = read_prompts(self._config.data.train_prompts)
        self._validation = read_prompts(self._config.data.validation_prompts)
        self._has_told_of_nothing = False

    def go(self) -> None:
        """Run all iterations that the directory does not hold yet."""
        config = self._config
        self._watch.begin("prepare", 0)
        forget_unscored(self._run.url)
        context: RunContext = self._compute(
            prepare_graph(self._run.url, self._session, on_spot=not self._config.reserved_computes)
        )["context"]
        done = len(self._run.history())
        for version in resuming.unvalidated(self._run, config, done):
            self._validate(context, self._weights(version, context))
        weights = self._weights(done, context)
        for k in range(done, config.run.iterations):
            if k % config.run.validate_every == 0:
                self._validate(context, weights)
            if self._is_enough():
                break
            weights = self._iterate(context, k, weights)
        self._validate(context, weights)
        self._watch.begin("compact", weights.version)
        self._compute(final_graph(config, context, weights.version))

    def _is_enough(self) -> bool:
        """Whether the run ends before its last iteration."""
        usd = 0.0 if self._config.run.usd_max is None else self._watch.usd()
        return bool(resuming.enough(self._run, self._config, usd))

    def _weights(self, version: int, context: RunContext) -> WeightsRef:
        if not version:
            return context.start
        if found := published(self._run.url, version):
            return found.weights
        raise SpotlightError(
            f"{self._run.objects.where(f'weights/v{version:05d}')}: are missing, and the run goes on with these "
            "weights: restore them, or begin a new run"
        )

    def _iterate(self, context: RunContext, k: int, weights: WeightsRef) -> WeightsRef:
        config, run = self._config, self._run
        started_s = self._clock()
        selection = run.selection(k) or self._first_selection(context, k, weights)
        beliefs = run.beliefs(k)
        candidates = self._candidates(context, k + 1, weights, beliefs)
        self._watch.begin("iterate", k)
        begun_s = self._clock()
        window_s = self._window_s(k)
        ahead = self._rollouts_ahead(context, k)
        drawn_with = self._weights(selection.version, context) if any(kept.drawn for kept in selection.kept) else None
        graph = iteration_graph(
            config, context, selection, weights, candidates, drawn_with=drawn_with, ahead=ahead, window_s=window_s
        )
        results = self._compute(graph)
        after: Published = results["published"]
        training = whole(results["training"], filters=self._config.train.filter_groups)
        explored: Selection | None = results["selection"] if candidates else None
        _warn_of_rewards(k, training, explored)
        self._tell_of_nothing(explored)
        if explored:
            run.record_selection(explored)
        beliefs = learn_from(beliefs, selection, training, rewards.planned_range(rewards.build(config.reward)))
        run.record_beliefs(k + 1, beliefs)
        stopped_s = self._clock()
        measured = {
            "started_s": started_s,
            "stopped_s": stopped_s,
            "steps_resumed": training.steps_resumed,
            **self._watch.measure(started_s, stopped_s),
            **self._balance(k, begun_s, window_s, results.get("selection")),
        }
        row = HistoryRow(
            iteration=k,
            weights_version=after.weights.version,
            weights_sha256=after.weights.sha256,
            metrics=_metrics(selection, training, after) | self._believed(beliefs),
            measured=measured,
            explored_next=candidates is not None or run.selection(k + 1) is not None,
        )
        run.append(HISTORY, row_of(row))
        self._retain(k, weights.version, after.weights.version)
        return after.weights

    def _believed(self, beliefs: Beliefs) -> dict[str, float]:
        """The fidelity that the planner believes in; empty where no iteration measures it."""
        config = self._config
        measures = config.strategy.exploration != "off" and not config.exploration.reuse
        return {"fidelity": beliefs.fidelity} if measures else {}

    def _tell_of_nothing(self, explored: Selection | None) -> None:
        """Say once that exploration ends before it has scored anything; summary and report count such iterations."""
        if self._has_told_of_nothing or not explored or explored.seeds_scored or explored.seeds_failed:
            return
        if explored.seeds_dropped:
            self._has_told_of_nothing = True
            logger.warning(
                "exploration for iteration %d: none of its requests was done before training ended, so it was for "
                "nothing: make exploration.request_seeds, or exploration.steps, smaller, if any spot worker was there; "
                "how often that is so, the summary and the report say",
                explored.iteration,
            )

    def _candidates(self, context: RunContext, k: int, weights: WeightsRef, beliefs: Beliefs) -> Candidates | None:
        """What to explore for an iteration; None if nothing, or if it was explored before a resume."""
        config = self._config
        if config.strategy.exploration != "stale" or k >= config.run.iterations or self._run.selection(k):
            return None
        prompts = self._prompts(context, k)
        candidates_max = self._candidates_max(context, k, prompts, beliefs)
        return candidates_for(config, context, k, prompts, weights, beliefs=beliefs, candidates_max=candidates_max)

    def _retain(self, k: int, trained_from: int, made: int) -> None:
        """Remove the versions and beliefs that nothing needs after an iteration."""
        kept = {0, made, trained_from, *self._validated_to_keep()}
        if self._config.trains_on_older:  # some samples of this iteration are of the version before
            kept.add(max(0, k - 1))
        retain(self._run.url, kept)
        self._run.retain_beliefs(kept, trained_from - 1 - self._config.trains_on_older)

    def _rollouts_ahead(self, context: RunContext, k: int) -> Ahead | None:
        """What `iteration_graph` needs of the rollouts that are begun an iteration early; None if none are."""
        if not self._config.rollout.prompts_ahead:
            return None
        weights = self._weights(max(0, k - 1), context)
        last = k + 1 == self._config.run.iterations
        return Ahead(
            weights=weights,
            following=None if last else unexplored(self._config, context, k + 1, self._prompts(context, k + 1)),
        )

    def _window_s(self, k: int) -> float:
        """How long reserved workers roll out in an iteration, while there are spot workers to do it."""
        config = self._config
        if set(config.strategy.rollout_pools) != {"reserved", "spot"} or not config.pools.spot.workers:
            return inf
        streams, spot_trains = config.trains_as_scored, "spot" in config.strategy.train_pools
        return rollout_window_s(config.strategy.offload, self._offload(k), streams=streams, spot_trains=spot_trains)

    def _offload(self, k: int) -> Offload:
        return self._run.offload(k) or Offload(window_s=FIRST_WINDOW_S / self._config.emulated_per_real_s)

    def _balance(self, k: int, began_s: float, window_s: float, explored: Selection | None) -> dict[str, float]:
        """How reserved and spot workers shared the iteration, as numbers; records the window for the next one.

        Args:
            explored: the selection that exploration beside it made; None if nothing was explored.
        """
        found = self._watch.balance(k, began_s, window_s)
        rolled_out = found is not None and found.measured.rollout_s > 0  # else it says nothing of the window
        if found and explored and self._config.exploration.budget == "worth":
            found = cut_short(found, tried=explored.seeds_scored, dropped=explored.seeds_dropped)
        if self._config.strategy.offload == "adaptive" and window_s < inf:
            state, floor_s = self._offload(k), FLOOR_S / self._config.emulated_per_real_s
            adapted = adapt(state, found.measured, floor_s=floor_s) if found and rolled_out else state
            self._run.record_offload(k + 1, adapted)
        if found is None:
            return {}
        return {
            **({"beside_s": found.explored_s, "beside_seeds": explored.seeds_scored} if explored else {}),
            **({"window_s": window_s} if window_s < inf else {}),
            "spare_s": found.spare_s,
            "idle_s": found.idle_s,
            "work_s": found.work_s,
            "train_wait_s": found.measured.train_wait_s,
            "spot_wait_s": found.measured.remote_wait_s,
            **(self._worth_renting(found, window_s) if rolled_out else {}),
        }

    def _worth_renting(self, found: Balance, window_s: float) -> dict[str, float]:
        """How many spot workers rollouts could have used while reserved ones trained; empty if those do not train."""
        strategy, measured = self._config.strategy, found.measured
        if "reserved" not in strategy.train_pools:
            return {}
        worth = spot_worth_renting(
            remote_s=measured.rollout_s if "spot" in strategy.rollout_pools else 0.0,
            spot=measured.spot,
            reserved_s=min(window_s, measured.rollout_s) if "reserved" in strategy.rollout_pools else 0.0,
            reserved=found.reserved,
            train_s=found.train_s,
        )
        return {"spot_worth_renting": worth}

    def _first_selection(self, context: RunContext, k: int, weights: WeightsRef) -> Selection:
        """Seeds for an iteration that no iteration before it has explored for."""
        prompts = self._prompts(context, k)
        if self._config.strategy.exploration == "off":
            return unexplored(self._config, context, k, prompts)
        self._watch.begin("explore", k)
        beliefs = self._run.beliefs(k)
        candidates = candidates_for(
            self._config, context, k, prompts, weights, beliefs=beliefs, pools=self._config.gpu_pools
        )
        graph = exploration_graph(self._config, context, candidates)
        selection: Selection = self._compute(graph)["selection"]
        self._run.record_selection(selection)
        return selection

    def _prompts(self, context: RunContext, iteration: int) -> list[Prompt]:
        drawn = self._config.prompts_drawn
        chosen = choose_prompts(len(self._train), drawn, seed=context.seed, iteration=iteration)
        return [self._train[index] for index in chosen]

    def _validate(self, context: RunContext, weights: WeightsRef) -> None:
        if weights.version in self._validated_versions():
            return
        self._watch.begin("validate", weights.version)
        results = self._compute(validation_graph(self._config, context, self._validation, weights))
        scores = [scored for scored in results["scores"] if isinstance(scored, Scored)]
        rewards = [reward for scored in scores for reward in scored.rewards]
        known = [reward for reward in rewards if reward is not None]
        if not known:
            raise SpotlightError(
                f"version {weights.version}: no validation image has a reward: {_first_error(results['scores'])}; "
                "put that right, then resume the run"
            )
        row = ValidationRow(
            version=weights.version,
            score=sum(known) / len(known),
            rewards=tuple(rewards),
            images=results["images"],
            at_s=self._clock(),
            metrics=means_of_validation(scores),
        )
        self._run.append(VALIDATION, row_of(row))

    def _candidates_max(
        self, context: RunContext, iteration: int, prompts: Sequence[Prompt], beliefs: Beliefs
    ) -> int | None:
        """Most candidates to try, by the time or the worth measured in the last iterations; None: no limit."""
        exploration, history = self._config.exploration, self._run.last(HISTORY, HistoryRow, RECENT)
        if exploration.budget == "fixed" or not history:
            return None
        seed_s, chunk = _seed_s(history), exploration.request_seeds
        if exploration.budget == "time":
            spare_s = [row.measured["spare_s"] for row in history if "spare_s" in row.measured]
            limit = affordable(spare_s=spare_s, seed_s=seed_s, chunk=chunk)
            return None if limit is None else max(limit, chunk * self._config.explored_first)
        if not (seed_s and history[-1].measured.get("work_s")):
            return None
        probes = ceil(len(prompts) / PROBE_SHARE)  # or the fidelity would never be measured again
        worth = self._chunks_worth_trying(context, iteration, prompts, beliefs, history, chunk * seed_s)
        return chunk * max(probes, worth)

    def _chunks_worth_trying(
        self,
        context: RunContext,
        iteration: int,
        prompts: Sequence[Prompt],
        beliefs: Beliefs,
        history: Sequence[HistoryRow],
        chunk_s: float,
    ) -> int:
        """Chunks of candidates that are worth their seconds; what is trained on as drawn must be drawn in any case."""
        exploration, rollout = self._config.exploration, self._config.rollout
        chunk = exploration.request_seeds
        drawn = ceil(rollout.seeds_kept / chunk) if exploration.reuse else 0
        needed = drawn * len(prompts)
        captured = captured_variance(
            [prompt.id for prompt in prompts],
            replace(beliefs, fidelity=1.0) if exploration.reuse else beliefs,  # what is kept is what was drawn
            iteration=iteration,
            groups=rollout.prompts,
            chunks=max(0, exploration.seeds_tried * len(prompts) // chunk - needed),
            chunk=chunk,
            keep=rollout.seeds_kept,
            seed=context.seed,
            drawn=drawn,
        )
        idle_s = fmean(row.measured.get("idle_s", 0.0) for row in history)
        if self._config.explored_first:  # then spot workers did not idle meanwhile: their gradients waited
            idle_s -= fmean(row.measured.get("beside_s", 0.0) for row in history)
        else:
            idle_s -= needed * chunk_s
        work_s = history[-1].measured["work_s"] + needed * chunk_s
        return needed + worth_exploring(captured, work_s=work_s, chunk_s=chunk_s, idle_s=max(0.0, idle_s))

    def _validated_versions(self) -> set[int]:
        return {row.version for row in self._run.validation()}

    def _validated_to_keep(self) -> set[int]:
        rows, last = self._run.validation(), self._config.run.versions_kept
        if not last or len(rows) <= last:
            return self._validated_versions()
        best = max(rows, key=lambda row: row.score)
        return {best.version, *(row.version for row in rows[-last:])}


def _warn_of_rewards(k: int, training: TrainingSet, explored: Selection | None) -> None:
    if training.metrics["zero_std_ratio"] == 1.0:
        logger.warning("iteration %d: all images of each prompt have the same reward, so they teach nothing", k)
    if training.failed:
        logger.warning(
            "iteration %d: %d images had no reward, and others were drawn in their place: %s",
            *(k, training.failed, training.error),
        )
    if explored and explored.seeds_failed:
        logger.warning(
            "exploration for iteration %d: %d of %d candidates have no reward: %s",
            *(k + 1, explored.seeds_failed, explored.seeds_failed + explored.seeds_scored, explored.error),
        )


def _seed_s(history: Sequence[HistoryRow]) -> float:
    """Worker seconds of a candidate, in the last iteration that scored some beside its training; or 0.0."""
    for row in reversed(history):
        scored, beside_s = row.measured.get("beside_seeds", 0), row.measured.get("beside_s", 0.0)
        if scored and beside_s:
            return beside_s / scored
    return 0.0


def _first_error(results: Sequence[Scored | Quarantined]) -> str:
    errors = (result.errors for result in results if isinstance(result, Scored) and result.errors)
    return next((error for error, *_ in errors), "all requests were set aside")


def learn_from(beliefs: Beliefs, selection: Selection, training: TrainingSet, within: tuple[float, float]) -> Beliefs:
    """What the planner learns from an iteration: the explored rewards, and those of kept seeds that were rolled out.

    A prompt of which nothing was explored is left as it is: its past must not count twice. Samples that were trained on
    as drawn were not rolled out.

    Args:
        within: the range of rewards that the planner looks at.
    """
    explored_rewards = {each.prompt: normalised(within, each.rewards) for each in selection.explored if each.rewards}
    by_prompt: dict[int, list[tuple[float, float]]] = {}
    for prompt, explored, regenerated in _pairs(selection, training):
        before, after = normalised(within, (explored, regenerated))
        by_prompt.setdefault(prompt, []).append((before, after))
    return learn(beliefs, selection.iteration, explored_rewards, by_prompt)


def _pairs(selection: Selection, training: TrainingSet) -> list[tuple[int, float, float]]:
    """``(prompt id, explored reward, regenerated reward)`` of the kept seeds that were rolled out."""
    regenerated = {
        (sample.request.prompt.id, sample.request.seeds[sample.index]): sample.reward for sample in training.samples
    }
    return [
        (kept.prompt.id, explored, regenerated[kept.prompt.id, seed])
        for kept in selection.kept
        if not kept.drawn
        for seed, explored in zip(kept.seeds, kept.explored_rewards, strict=True)
        if explored is not None and (kept.prompt.id, seed) in regenerated
    ]


def _metrics(selection: Selection, training: TrainingSet, after: Published) -> dict[str, float]:
    """What the iteration measured, none of it dependent on time or place."""
    pairs = [(explored, regenerated) for _, explored, regenerated in _pairs(selection, training)]
    metrics = dict(training.metrics) | dict(after.metrics)
    metrics["seeds_scored"] = float(selection.seeds_scored)
    if selection.reward_mean is not None and selection.reward_std is not None:
        metrics |= {"explored_reward_mean": selection.reward_mean, "explored_reward_std": selection.reward_std}
    correlation = rank_correlation(*zip(*pairs, strict=True)) if pairs else None
    if correlation is not None:
        metrics["rank_correlation"] = correlation
    return metrics
