"""How reserved and spot workers shared an iteration, from the spans that were recorded of it.

Pure: times are in seconds of one clock, and each quantity is a function of what was recorded. The two waits are those
that RLBoost's feedback compares (arXiv 2510.19225, algorithm 1; see `plan.offload.adapt`); the others are ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spotlight.plan.offload import ANYONE, Measured
from spotlight.records import Pool, Span, WorkerLife, base_phase, record


@record
class Balance:
    """How reserved and spot workers shared an iteration."""

    measured: Measured
    spare_s: float
    """Worker seconds that exploration had; see the function `spare_s`."""
    idle_s: float
    """The part of `spare_s` that lengthened nothing; see the function `idle_s`."""
    work_s: float
    """Worker seconds of the iteration's rollouts, with their scoring, and of its training."""
    explored_s: float
    """Worker seconds of exploration, with its scoring."""
    train_s: float
    """Seconds that each reserved worker trained, if they shared it evenly."""
    reserved: int = 0
    """Reserved GPUs alive at the end of training."""


@record
class Recorded:
    """What GPUs did from an iteration's beginning on, and who was alive when its training ended."""

    began_s: float
    trained_s: float
    """When its training ended."""
    training: Sequence[Span]
    rollouts: Sequence[Span]
    scores: Sequence[Span]
    """The scoring of its rollouts."""
    ahead: Sequence[Span]
    """Rollouts of later iterations, and their scoring."""
    remote: Sequence[Span]
    """All rollouts and all exploration of spot workers, without scoring."""
    explored: Sequence[Span]
    """Exploration and its scoring."""
    spot_lives: Sequence[WorkerLife]
    """All spot workers, those that are gone included."""
    spot: int
    """Spot workers alive when training ended."""
    reserved: int
    """Reserved workers alive then."""

    @property
    def sampling(self) -> Sequence[Span]:
        return (*self.rollouts, *self.scores)

    @property
    def rolled_out_s(self) -> float:
        """When the last rollout ended."""
        return max((span.stop_s for span in self.rollouts), default=self.began_s)

    @property
    def trainers(self) -> int:
        """The reserved workers, to divide by; 1 where none is left."""
        return max(1, self.reserved)


def balance(
    spans: Iterable[Span], workers: Iterable[WorkerLife], iteration: int, *, began_s: float, window_s: float
) -> Balance | None:
    """How an iteration was shared; None if it did not train.

    Args:
        spans: at least those since ``began_s``.
        workers: of all pools.
        window_s: how long reserved workers were to roll out while there were spot workers.
    """
    seen = _recorded(spans, list(workers), iteration, began_s)
    if seen is None:
        return None
    return Balance(
        measured=Measured(
            train_wait_s=train_wait_s(seen, window_s),
            remote_wait_s=remote_wait_s(seen),
            rollout_s=seen.rolled_out_s - began_s,
            spot=seen.spot,
            steady=is_steady(seen),
        ),
        spare_s=spare_s(seen),
        idle_s=idle_s(seen),
        work_s=_worker_s((*seen.sampling, *seen.training)),
        explored_s=_worker_s(seen.explored),
        train_s=_worker_s(_on("reserved", seen.training)) / seen.trainers,
        reserved=seen.reserved,
    )


def _recorded(spans: Iterable[Span], workers: Sequence[WorkerLife], iteration: int, began_s: float) -> Recorded | None:
    """Sort what was recorded by what it was for; None if the iteration did not train."""
    all_of: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.start_s >= began_s and span.pool in ANYONE:
            all_of[base_phase(span.phase)].append(span)
    training, rollouts, scores = (
        [span for span in all_of[phase] if span.iteration == iteration] for phase in ("train", "rollout", "score")
    )
    if not training:
        return None
    trained_s = max(span.stop_s for span in training)
    alive = Counter(life.pool for life in workers if life.joined_s <= trained_s and _stayed_until(trained_s, life))
    return Recorded(
        began_s=began_s,
        trained_s=trained_s,
        training=training,
        rollouts=rollouts,
        scores=scores,
        ahead=[span for span in (*all_of["rollout"], *all_of["score"]) if span.iteration > iteration],
        remote=_on("spot", (*all_of["rollout"], *all_of["explore"])),
        explored=(*all_of["explore"], *all_of["explore-score"]),
        spot_lives=[life for life in workers if life.pool == "spot"],
        spot=alive["spot"],
        reserved=alive["reserved"],
    )


def train_wait_s(seen: Recorded, window_s: float) -> float:
    """Seconds that the trainers, whose rollout window was closed, waited for samples of spot workers.

    ::

        trained - closed - training of reserved workers since then / reserved

    where a rollout ended after the window had closed, else 0. Closing lasts until the last reserved worker has handed
    its rollout back.
    """
    closed_s = max([seen.began_s + window_s, *(span.stop_s for span in _on("reserved", seen.rollouts))])
    if seen.rolled_out_s <= closed_s:
        return 0.0
    since = (max(0.0, span.stop_s - max(span.start_s, closed_s)) for span in _on("reserved", seen.training))
    return max(0.0, seen.trained_s - closed_s - sum(since) / seen.trainers)


def remote_wait_s(seen: Recorded) -> float:
    """Seconds from the last rollout or exploration of a spot worker to the end of training; 0 where there was none."""
    return max(0.0, seen.trained_s - max((span.stop_s for span in seen.remote), default=seen.trained_s))


def is_steady(seen: Recorded) -> bool:
    """Whether no spot worker came or went from the iteration's beginning to the end of its training."""
    moments = (moment for life in seen.spot_lives for moment in (life.joined_s, life.left_s) if moment is not None)
    return not any(seen.began_s <= moment <= seen.trained_s for moment in moments)


def spare_s(seen: Recorded) -> float:
    """Worker seconds that spot workers alive at the end of training had beside it.

    Each has them from the end of its last rollout and of its scoring on, less what spot workers trained, or rolled out
    for the next iteration.
    """
    free_s: dict[str, float] = {}
    for span in seen.sampling:
        free_s[span.worker] = max(free_s.get(span.worker, seen.began_s), span.stop_s)
    stayed = [life for life in seen.spot_lives if _stayed_until(seen.trained_s, life)]
    had_s = sum(max(0.0, seen.trained_s - max(free_s.get(life.worker, seen.began_s), life.joined_s)) for life in stayed)
    return max(0.0, had_s - _worker_s(_on("spot", (*seen.training, *seen.ahead))))


def idle_s(seen: Recorded) -> float:
    """The worker seconds of `spare_s` that lengthened nothing: all, where spot workers train, too.

    Where reserved workers alone train, it is what would be left if they had begun as soon as there were samples: the
    iteration would have been shorter, and spot workers would have done the rollouts that reserved ones did after that::

        spare_s - (rollouts by reserved workers - reserved x first) (1 + spot / reserved)

    The first sample comes after ``first`` seconds, or training begins then, with samples that were drawn before; until
    then reserved workers could not have trained.
    """
    if _on("spot", seen.training):
        return spare_s(seen)
    samples = [span.stop_s for span in seen.scores or seen.rollouts if span.outcome == "done"]
    first_s = min([*samples, *(span.start_s for span in seen.training)]) - seen.began_s
    movable_s = max(0.0, _worker_s(_on("reserved", seen.sampling)) - seen.trainers * first_s)
    return max(0.0, spare_s(seen) - movable_s * (1 + seen.spot / seen.trainers))


def cut_short(found: Balance, *, tried: int, dropped: int) -> Balance:
    """The same balance, with the exploration that training cut short as `Measured.explore_wait_s`.

    Args:
        tried: candidates that were explored.
        dropped: candidates that training left no time for.
    """
    if not (tried and found.measured.spot):
        return found
    wanted_s = dropped * found.explored_s / tried / found.measured.spot
    return replace(found, measured=replace(found.measured, explore_wait_s=wanted_s))


def _stayed_until(moment_s: float, life: WorkerLife) -> bool:
    """Whether a worker had not left by then; one that leaves at the very moment had."""
    return life.left_s is None or life.left_s > moment_s


def _on(pool: Pool, spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.pool == pool]


def _worker_s(spans: Iterable[Span]) -> float:
    return sum(span.stop_s - span.start_s for span in spans)
