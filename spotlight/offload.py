"""How much of the rollout reserved GPUs take before they train, how many spot GPUs pay, how large a request is.

Pure, and level-triggered like `spotlight.policy`: a state and what one iteration measured give the next state; there is
no clock here. All but the size of a request is RLBoost's (arXiv 2510.19225, algorithm 1; the constants are its code's).

Invariants: the window is never below its floor; without spot GPUs it has no end, because then nobody else rolls out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

FIRST_WINDOW_S = 150.0
FLOOR_S = 5.0
ETA = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an iteration tells about the balance of its two sides."""

    train_wait_s: float
    """The trainer had closed its rollout window and waited for samples of the spot GPUs."""
    remote_wait_s: float
    """Spot GPUs had no rollout left and waited for the next weights, exploring or not."""
    spot: int
    """Spot GPUs at the iteration's end."""
    steady: bool = True
    """No spot GPU came or went during it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The reserved rollout window, and the windows that were right for other numbers of spot GPUs."""

    window_s: float = FIRST_WINDOW_S
    """T_seed: how long reserved GPUs roll out before they train."""
    memory: Mapping[int, float] = field(default_factory=dict)
    """M: spot GPUs -> window at the end of the last iteration that had so many throughout."""


def adapt(state: Offload, measured: Measured, *, eta: float = ETA, floor_s: float = FLOOR_S) -> Offload:
    """The window for the next iteration: longer where the trainer starved, shorter where spot GPUs did.

    ::

        T_seed <- max(floor, T_seed + (train_wait - remote_wait) / eta)
        M[n]   <- T_seed     where the number of spot GPUs stayed n
        T_seed <- M[n]       where it became n, and M[n] is known

    An iteration without spot GPUs measures no balance and changes nothing.

    Raises:
        ValueError: ``eta`` or ``floor_s`` is not positive.
    """
    if not (eta > 0 and floor_s > 0):
        raise ValueError(f"eta = {eta} and floor_s = {floor_s} must be positive")
    if not measured.spot:
        return state
    window_s = max(floor_s, state.window_s + (measured.train_wait_s - measured.remote_wait_s) / eta)
    if measured.steady:
        return Offload(window_s=window_s, memory={**state.memory, measured.spot: window_s})
    return replace(state, window_s=state.memory.get(measured.spot, window_s))


def reserved_window_s(state: Offload, spot: int) -> float:
    """Seconds that reserved GPUs roll out before they train, with so many spot GPUs alive."""
    return state.window_s if spot else inf


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


def request_seeds(*, prompts: int, seeds: int, gangs: int, most: int, fixed_s: float, sample_s: float) -> int:
    """Seeds per request that end the rollout soonest: large batches waste no time, small ones make the last wave short.

    With ``b`` seeds in a request there are ``prompts * ceil(seeds / b)`` requests, and the rollout takes::

        ceil(requests / gangs) * (fixed_s + b * sample_s)

    Args:
        prompts: groups to roll out.
        seeds: samples per group.
        gangs: requests that run at once.
        most: samples that fit one forward batch.
        fixed_s: what a request costs whatever its size.
        sample_s: what each of its samples adds.

    Returns:
        From 1 to ``min(seeds, most)``; of equals the largest, which is the fewest requests.

    Raises:
        ValueError: a count is not positive, or a time is negative.
    """
    if min(prompts, seeds, gangs, most) < 1 or min(fixed_s, sample_s) < 0:
        raise ValueError(
            f"prompts = {prompts}, seeds = {seeds}, gangs = {gangs} and most = {most} must be positive, "
            f"fixed_s = {fixed_s} and sample_s = {sample_s} not negative"
        )

    def makespan_s(size: int) -> float:
        requests = prompts * ceil(seeds / size)
        return ceil(requests / gangs) * (fixed_s + size * sample_s)

    return min(range(min(seeds, most), 0, -1), key=makespan_s)
