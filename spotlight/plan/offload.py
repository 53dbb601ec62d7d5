"""How long reserved GPUs roll out before they train, and how many spot GPUs find a rollout to do.

Pure, and level-triggered like `plan.placement`: a state and what one iteration measured give the next state, and
time is an argument. The window and its feedback are RLBoost's (arXiv 2510.19225, algorithm 1; the constants are its
code's).

Invariants: the window is never below its floor; without spot GPUs it has no end, because then nobody else rolls out;
a reserved GPU does not train while a rollout waits that it may run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from math import ceil, inf
from typing import Literal, get_args

from spotlight.records import Pool, Span, WorkerLife, base_phase, record

FIRST_WINDOW_S = 150.0
FLOOR_S = 5.0
ETA = 3.0
ANYONE: tuple[Pool, ...] = get_args(Pool)


@record
class Measured:
    """What an iteration measured of the balance between reserved and spot GPUs."""

    train_wait_s: float
    """How long the trainer, whose rollout window was closed, waited for samples of the spot GPUs."""
    remote_wait_s: float
    """How long spot GPUs had no rollout and no exploration left and waited for the next weights.

    RLBoost, which does not explore, counts all the time without a rollout. Exploration is what spot GPUs are there for
    as well: where it fills their time, nobody waits, and the window stays as it is."""
    spot: int
    """Spot GPUs at the iteration's end."""
    rollout_s: float = inf
    """From the iteration's beginning to the end of its last rollout."""
    steady: bool = True
    """Whether no spot GPU came or went during it."""
    explore_wait_s: float = 0.0
    """Worthwhile exploration that the end of training cut off, in seconds of each spot GPU."""


@record
class Offload:
    """The reserved rollout window, and the windows that were right for other numbers of spot GPUs."""

    window_s: float
    """T_seed: how long reserved GPUs roll out before they train."""
    memory: Mapping[int, float] = field(default_factory=dict)
    """M: spot GPUs -> window at the end of the last iteration that had so many throughout."""


def adapt(state: Offload, measured: Measured, *, eta: float = ETA, floor_s: float = FLOOR_S) -> Offload:
    """The window for the next iteration: longer where the trainer or exploration waited, shorter where spot GPUs did.

    ::

        T_seed <- rollout    where spot GPUs or exploration waited longer, and the window outlasted the rollout
        T_seed <- max(floor, T_seed + (train_wait + explore_wait - remote_wait) / eta)
        M[n]   <- T_seed     where the number of spot GPUs stayed n
        T_seed <- M[n]       where it became n, and M[n] is known

    The first line is ours: RLBoost's rollouts outlast its first window, but a small job's do not, and what a window has
    beyond the rollout would take many iterations to go, to no effect.

    It settles where the trainer waits as long as spot GPUs do, and for as long as exploration fills their time: then
    neither waits. An iteration without spot GPUs measures no balance and changes nothing.

    Raises:
        ValueError: ``eta`` or ``floor_s`` is not positive.
    """
    if not (eta > 0 and floor_s > 0):
        raise ValueError(f"eta = {eta} and floor_s = {floor_s} must be positive")
    if not measured.spot:
        return state
    surplus_s = measured.train_wait_s + measured.explore_wait_s - measured.remote_wait_s
    moves = surplus_s < 0 or measured.explore_wait_s > 0
    effective_s = min(state.window_s, measured.rollout_s) if moves else state.window_s
    window_s = max(floor_s, effective_s + surplus_s / eta)
    if measured.steady:
        return Offload(window_s=window_s, memory={**state.memory, measured.spot: window_s})
    return replace(state, window_s=state.memory.get(measured.spot, window_s))


def rollout_window_s(
    offload: Literal["adaptive", "all", "none"], state: Offload, *, streams: bool, spot_trains: bool
) -> float:
    """Seconds that reserved GPUs roll out while there are spot GPUs, as ``strategy.offload`` has it.

    To stop early gains nothing where training needs all samples at once, nor where spot GPUs train as well: the last
    rollouts would only begin later, and training ends after them.
    """
    if offload == "all":
        return 0.0
    return state.window_s if offload == "adaptive" and streams and not spot_trains else inf


@record
class PhaseView:
    """What decides how reserved and spot GPUs share an iteration, at one moment of it."""

    pools: tuple[Pool, ...]
    """That may roll out at all, the preferred one first."""
    elapsed_s: float
    """Since the iteration began."""
    window_s: float
    spot: int
    """Spot GPUs alive."""
    waiting: int
    """Rollout requests that nobody is at work on."""


@record
class PhaseDecision:
    """Where rollouts run, and who may train."""

    pools: tuple[Pool, ...]
    """Where rollouts run from now on; those at work elsewhere end at their next step boundary, and go on there."""
    trainers: tuple[Pool, ...]
    """Pools whose free GPUs no rollout waits for: they may train on what is ready."""


def decide_phase(view: PhaseView) -> PhaseDecision:
    """Reserved GPUs roll out while their window is open, or nobody else does; who is free of rollouts trains."""
    closed = view.elapsed_s >= view.window_s and "spot" in view.pools and view.spot > 0
    pools: tuple[Pool, ...] = ("spot",) if closed else view.pools
    return PhaseDecision(pools=pools, trainers=tuple(pool for pool in ANYONE if not (view.waiting and pool in pools)))


@record
class Balance:
    """How reserved and spot workers shared an iteration."""

    measured: Measured
    spare_s: float
    """Worker seconds that exploration had; see the function `spare_s`, less what spot workers trained, or rolled out
    for the next iteration."""
    idle_s: float
    """The part of `spare_s` that lengthened nothing. Where reserved workers alone train, it is what would be left if
    they had begun as soon as there were samples: the iteration would have been shorter, and spot workers would have
    done the rollouts that reserved ones did after that."""
    work_s: float
    """Worker seconds of the iteration's rollouts, with their scoring, and of its training."""
    explored_s: float
    """Worker seconds of exploration, with its scoring."""
    train_s: float
    """Seconds that each reserved worker trained, if they shared it evenly."""
    reserved: int = 0
    """Reserved GPUs alive at the end of training."""


def spare_s(rollouts: Iterable[Span], workers: Iterable[WorkerLife], *, began_s: float, until_s: float) -> float:
    """Worker seconds that spot workers had beside training, each from the end of its last rollout.

    Args:
        rollouts: spans of an iteration's rollouts and of their scoring.
        workers: of all pools; those that are not alive at the end had no time.
        began_s, until_s: when the iteration began, and when its training ended.
    """
    free_s: dict[str, float] = {}
    for span in rollouts:
        free_s[span.worker] = max(free_s.get(span.worker, began_s), span.stop_s)
    alive = [life for life in workers if life.pool == "spot" and (life.left_s is None or life.left_s >= until_s)]
    return sum(max(0.0, until_s - max(free_s.get(life.worker, began_s), life.joined_s)) for life in alive)


def balance(
    spans: Sequence[Span], workers: Iterable[WorkerLife], iteration: int, *, began_s: float, window_s: float
) -> Balance | None:
    """How an iteration was shared, from its recorded spans; None if it did not train.

    ::

        train_wait_s  = end of training - closing of the window - training since then, shared by all reserved workers,
                        where a rollout ended after the window had closed, else 0
        remote_wait_s = end of training - end of the last rollout or exploration of a spot worker
        idle_s        = spare_s - (rollouts by reserved workers - reserved x first_s) (1 + spot / reserved)

    Closing lasts until the last reserved worker has handed its rollout back. The first sample comes after ``first_s``,
    or training begins then, with samples that were drawn before; until then reserved workers could not have trained.
    Where spot workers train, too, all of ``spare_s`` is idle.

    Args:
        spans: at least those since ``began_s``; times in seconds of one clock.
    """
    by_phase: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.start_s >= began_s and span.pool in ANYONE:
            by_phase[base_phase(span.phase)].append(span)
    training, rollouts, scores = (
        [span for span in by_phase[phase] if span.iteration == iteration] for phase in ("train", "rollout", "score")
    )
    ahead = [span for span in (*by_phase["rollout"], *by_phase["score"]) if span.iteration > iteration]
    if not training:
        return None
    trained_s = max(span.stop_s for span in training)
    rolled_out_s = max((span.stop_s for span in rollouts), default=began_s)
    closed_s = max([began_s + window_s, *(span.stop_s for span in rollouts if span.pool == "reserved")])
    remote = [min(span.stop_s, trained_s) for span in (*by_phase["rollout"], *by_phase["explore"]) if _on_spot(span)]
    lives = list(workers)
    alive = Counter(life.pool for life in lives if life.joined_s <= trained_s < (life.left_s or inf))
    spot = [life for life in lives if life.pool == "spot"]
    trainers = max(1, alive["reserved"])
    on_reserved = [span for span in training if not _on_spot(span)]
    useful_s = sum(max(0.0, span.stop_s - max(span.start_s, closed_s)) for span in on_reserved) / trainers
    moments = [moment for life in spot for moment in (life.joined_s, life.left_s) if moment is not None]
    sampling = [*rollouts, *scores]
    other_s = _worker_s(span for span in (*training, *ahead) if _on_spot(span))
    left_s = max(0.0, spare_s(sampling, spot, began_s=began_s, until_s=trained_s) - other_s)
    samples = [span.stop_s for span in scores or rollouts if span.outcome == "done"]
    first_s = min([*samples, *(span.start_s for span in training)]) - began_s
    movable_s = max(0.0, _worker_s(span for span in sampling if not _on_spot(span)) - trainers * first_s)
    all_train = any(map(_on_spot, training))
    return Balance(
        measured=Measured(
            train_wait_s=max(0.0, trained_s - closed_s - useful_s) if rolled_out_s > closed_s else 0.0,
            remote_wait_s=trained_s - max(remote, default=trained_s),
            rollout_s=rolled_out_s - began_s,
            spot=alive["spot"],
            steady=not any(began_s <= moment <= trained_s for moment in moments),
        ),
        spare_s=left_s,
        idle_s=left_s if all_train else max(0.0, left_s - movable_s * (1 + alive["spot"] / trainers)),
        work_s=_worker_s((*sampling, *training)),
        explored_s=_worker_s((*by_phase["explore"], *by_phase["explore-score"])),
        train_s=_worker_s(on_reserved) / trainers,
        reserved=alive["reserved"],
    )


def _on_spot(span: Span) -> bool:
    return span.pool == "spot"


def _worker_s(spans: Iterable[Span]) -> float:
    return sum(span.stop_s - span.start_s for span in spans)


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


def spot_worth_renting(*, remote_s: float, spot: int, reserved_s: float, reserved: int, train_s: float) -> int:
    """The most spot GPUs that a rollout can use: with more, rollout is over before the trainer could take it.

    ``N_prem = ceil((t_remote * n_spot + T_seed * N_reserved) / t_train)``: the whole rollout's GPU-seconds over the
    seconds that training takes. Before anything is measured (``train_s = 0``) it is the number of reserved GPUs.

    Args:
        remote_s: t_remote, seconds that the spot GPUs rolled out (not explored).
        spot: how many of them there were.
        reserved_s: T_seed, or less where the rollout was over before the window was.
    """
    if train_s <= 0:
        return reserved
    return ceil((remote_s * spot + reserved_s * reserved) / train_s)
