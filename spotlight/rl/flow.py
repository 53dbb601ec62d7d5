"""Moves latents from one noise level to the next, and says how likely a stochastic move was.

Flow matching: ``x = (1 - sigma) clean + sigma noise``, with velocity ``v = noise - clean``; sampling
goes from sigma = 1 down to 0. Everything is computed in float32, whatever dtype comes in: bfloat16 overflows
in the log-probability. Noise depends on (seed, step) alone, never on place, batch or device.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Kind = Literal["sde", "cps", "dance"]


class Pass(NamedTuple):
    """A forward pass of the model: its input and its output."""

    x_BNC: Tensor
    """Latents that went in."""
    v_BNC: Tensor
    """The velocity that came out."""
    sigma: float
    """Their noise level."""


def ode_step(x_BNC: Tensor, v_BNC: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One Euler step of the probability flow: ``x_next = x + (sigma_next - sigma) v``.

    Args:
        x_BNC: latents at noise level ``sigma``.
        v_BNC: velocity there, same shape.
        sigma, sigma_next: noise levels, ``1 >= sigma > sigma_next >= 0``.

    Returns:
        Latents at ``sigma_next``; float32, shape of ``x_BNC``.

    Raises:
        ValueError: the shapes differ, or the noise levels are out of order.
    """
    _check_step(x_BNC, v_BNC, sigma, sigma_next)
    return x_BNC.float() + (sigma_next - sigma) * v_BNC.float()


def dpm2_step(now: Pass, sigma_next: float, before: Pass) -> Tensor:
    """One deterministic step that uses two passes: Euler's step, and a correction.

    With ``clean = x - sigma v`` and ``snr(s) = log((1 - s) / s)``, the correction is::

        (1 - sigma_next / sigma) (clean - clean_before) / (2 r),
        r = (snr(sigma) - snr(sigma_before)) / (snr(sigma_next) - snr(sigma))

    There is none where a signal-to-noise ratio is 0 or infinite: in the second step, after one from sigma = 1, and in
    the last, to sigma = 0.

    Args:
        now: the pass at the latents that the step begins with.
        before: the pass of the step before.

    Returns:
        Latents at ``sigma_next``; float32.

    Raises:
        ValueError: shapes differ, or the noise levels are out of order.

    Source: DPM-Solver++(2M) (arXiv 2211.01095), which DiffusionNFT samples with.
    """
    x_BNC, v_BNC, sigma = now
    _check_step(before.x_BNC, before.v_BNC, before.sigma, sigma)
    x_next = ode_step(x_BNC, v_BNC, sigma, sigma_next)
    if sigma_next == 0 or before.sigma == 1:
        return x_next
    r = (_log_snr(sigma) - _log_snr(before.sigma)) / (_log_snr(sigma_next) - _log_snr(sigma))
    change = x_BNC.float() - sigma * v_BNC.float() - (before.x_BNC.float() - before.sigma * before.v_BNC.float())
    return x_next + (1 - sigma_next / sigma) / (2 * r) * change


def sde_step(
    x_BNC: Tensor,
    v_BNC: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    noise_level: float,
    kind: Kind = "sde",
    sigma_cap: float,
    noise_BNC: Tensor | None = None,
    x_next_BNC: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """One stochastic step ``x_next = mean + std noise``, and its log-probability.

    With ``dt = sigma_next - sigma < 0``, ``clean = x - sigma v``, ``noise = x + (1 - sigma) v``::

        sde    g = noise_level sqrt(sigma / (1 - sigma))
               mean = x + (v + g^2 / (2 sigma) (x + (1 - sigma) v)) dt,                std = g sqrt(-dt)
        cps    std = sigma_next sin(pi noise_level / 2)
               mean = (1 - sigma_next) clean + sqrt(sigma_next^2 - std^2) noise
        dance  mean = x + (v + noise_level^2 (x - (1 - sigma) clean) / (2 sigma^2)) dt,  std = noise_level sqrt(-dt)

    The log-probability is that of a Gaussian; for ``cps`` it is ``-(x_next - mean)^2``, constants and variance
    dropped, as published recipes for that sampler are tuned to.

    Args:
        x_BNC, v_BNC: latents at ``sigma`` and the velocity there; any float dtype.
        sigma, sigma_next: noise levels, ``1 >= sigma > sigma_next >= 0``.
        noise_level: eta, dimensionless, positive.
        kind: the sampler.
        sigma_cap: the schedule's second noise level; ``sde`` uses it for the ``1 - sigma`` inside
            the root of g where sigma is exactly 1, and nowhere else.
        noise_BNC: standard normal noise, to take a step;
        x_next_BNC: or the outcome of a step taken before, to be judged. Exactly one of the two.

    Returns:
        ``x_next_BNC``, float32. ``log_prob_B``, float32, nats per latent element: the *mean* over N and C, so that
        the ratio of two policies does not grow with resolution; no gradient flows through x_next.
        ``mean_BNC``, float32. ``std``: the standard deviation of the noise really added, sqrt(-dt) included.

    Raises:
        ValueError: shapes differ, the noise levels are out of order, the noise level is not positive, both or neither
            of ``noise_BNC`` and ``x_next_BNC`` came, or ``sde`` starts at sigma = 1 without a cap below 1.

    Source: Flow-GRPO (arXiv 2505.05470), its CPS variant, DanceGRPO (arXiv 2505.07818).
    """
    _check_step(x_BNC, v_BNC, sigma, sigma_next)
    if not 0 < noise_level < math.inf:
        raise ValueError(f"noise_level = {noise_level} must be positive: a step without noise has no log-probability")
    given = noise_BNC if x_next_BNC is None else x_next_BNC
    if given is None or (noise_BNC is not None and x_next_BNC is not None):
        came = "neither" if given is None else "both"
        raise ValueError(f"give either noise_BNC, to take a step, or x_next_BNC, to judge one; {came} came")
    if given.shape != x_BNC.shape:
        name = "noise_BNC" if x_next_BNC is None else "x_next_BNC"
        raise ValueError(f"{name} has shape {tuple(given.shape)} and x_BNC {tuple(x_BNC.shape)}: they must be equal")
    mean_BNC, std = _transition(x_BNC.float(), v_BNC.float(), sigma, sigma_next, noise_level, kind, sigma_cap)
    x_next = mean_BNC + std * given.float() if x_next_BNC is None else given.float()
    square_B = (x_next.detach() - mean_BNC).square().flatten(1).mean(1)
    if kind == "cps":
        return x_next, -square_B, mean_BNC, std
    log_prob_B = -square_B / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
    return x_next, log_prob_B, mean_BNC, std


def initial_noise(seeds: Sequence[int], tokens: int, channels: int) -> Tensor:
    """The noise that each seed's image starts from: standard normal, float32, shape (B, N, C), on the CPU.

    Raises:
        ValueError: a seed is not in [0, 2**64).
    """
    return _noise(seeds, 0, tokens, channels)


def step_noise(seeds: Sequence[int], step: int, tokens: int, channels: int) -> Tensor:
    """The noise of step ``step`` (0 is the first) for each seed; as `initial_noise`, and independent of it."""
    return _noise(seeds, step + 1, tokens, channels)


def _noise(seeds: Sequence[int], slot: int, tokens: int, channels: int) -> Tensor:
    """One Philox stream per (seed, slot), so that no sample's noise depends on its neighbours in the batch."""
    noise_BNC = np.empty((len(seeds), tokens, channels), dtype=np.float32)
    for row, seed in enumerate(seeds):
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} is not in [0, 2**64)")
        stream = np.random.Generator(np.random.Philox(key=np.array([seed, slot], dtype=np.uint64)))
        stream.standard_normal(out=noise_BNC[row], dtype=np.float32)
    return torch.from_numpy(noise_BNC)


def _log_snr(sigma: float) -> float:
    """Half of the logarithm of the signal-to-noise ratio."""
    return math.log((1 - sigma) / sigma)


def _transition(
    x: Tensor, v: Tensor, sigma: float, sigma_next: float, noise_level: float, kind: Kind, sigma_cap: float
) -> tuple[Tensor, float]:
    """Mean and standard deviation of a step; the formulas are in `sde_step`."""
    dt = sigma_next - sigma
    if kind == "sde":
        capped = sigma_cap if sigma == 1 else sigma
        if not 0 < capped < 1:
            raise ValueError(
                f"sigma_cap = {sigma_cap} must be in (0, 1) for a step from sigma = 1, where g would be infinite: "
                "give the schedule's second noise level"
            )
        g = noise_level * math.sqrt(sigma / (1 - capped))
        drift = g**2 / (2 * sigma)
        return x * (1 + drift * dt) + v * ((1 + drift * (1 - sigma)) * dt), g * math.sqrt(-dt)
    clean = x - sigma * v
    if kind == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        return (1 - sigma_next) * clean + math.sqrt(sigma_next**2 - std**2) * (x + (1 - sigma) * v), std
    if kind == "dance":
        pull = noise_level**2 / (2 * sigma**2)
        return x + (v + pull * (x - (1 - sigma) * clean)) * dt, noise_level * math.sqrt(-dt)
    raise ValueError(f"kind = {kind!r} is no stochastic sampler; they are 'sde', 'cps' and 'dance'")


def _check_step(x_BNC: Tensor, v_BNC: Tensor, sigma: float, sigma_next: float) -> None:
    if x_BNC.ndim != 3 or x_BNC.shape != v_BNC.shape:
        raise ValueError(
            f"x_BNC has shape {tuple(x_BNC.shape)} and v_BNC {tuple(v_BNC.shape)}: "
            "both must be the same (samples, tokens, channels)"
        )
    if not 1 >= sigma > sigma_next >= 0:
        raise ValueError(f"a step goes down in noise: expected 1 >= sigma > sigma_next >= 0, got {sigma}, {sigma_next}")
