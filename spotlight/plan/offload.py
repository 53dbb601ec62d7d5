"""How long reserved GPUs roll out before they train, and how many spot GPUs find a rollout to do.

Pure, and level-triggered like `plan.placement`: a state and what one iteration measured give the next state, and
time is an argument. The window and its feedback are RLBoost's (arXiv 2510.19225, algorithm 1; the constants are its
code's).

Invariants: the window is never below its floor; without spot GPUs it has no end, because then nobody else rolls out;
a reserved GPU does not train while a rollout waits that it may run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from math import ceil, inf
from typing import Literal, get_args

from spotlight.records import Pool, record

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
