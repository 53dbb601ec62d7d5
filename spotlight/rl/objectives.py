"""Turns advantages into the objectives that training minimises.

Log-probabilities and velocities stay as the model gave them. Nothing here calls a model: what an objective needs of it
comes as an argument.

Shapes: B samples, N latent tokens, C channels of a token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NFT_WEIGHT_FLOOR = 1e-5
"""Smallest mean error that DiffusionNFT divides by (NVlabs/DiffusionNFT)."""

GHUBER_FLOOR = 1e-10
"""Keeps the power of a vanishing error smooth (AWM's published code)."""


def clipped_objective(
    log_prob_B: Tensor, old_log_prob_B: Tensor, advantages_B: Tensor, *, clip_range: float
) -> tuple[Tensor, dict[str, float]]:
    """The policy loss of PPO and GRPO: ``mean(max(-A r, -A clip(r, 1 - c, 1 + c)))``, ``r = exp(log_prob - old)``.

    Args:
        log_prob_B: of the policy in training; gradients flow through it.
        old_log_prob_B: of the policy that the iteration started from.
        advantages_B: already clamped as the recipe wants.
        clip_range: c, in (0, 1].

    Returns:
        The loss, a scalar; and the usual metrics of this loss: ``ratio_mean``, ``ratio_std`` (population form),
        ``pg_clipfrac`` (share of ratios outside the range), its parts ``pg_clipfrac_higher`` and
        ``pg_clipfrac_lower``, and ``approx_kl = mean((log_prob - old)^2) / 2``.

    Raises:
        ValueError: the shapes differ, or the range is not in (0, 1].

    Source: Flow-GRPO (arXiv 2505.05470).
    """
    if not log_prob_B.shape == old_log_prob_B.shape == advantages_B.shape:
        raise ValueError(
            "log-probabilities, old ones and advantages must have one shape, and have "
            f"{tuple(log_prob_B.shape)}, {tuple(old_log_prob_B.shape)} and {tuple(advantages_B.shape)}"
        )
    if not 0 < clip_range <= 1:
        raise ValueError(f"clip_range = {clip_range} must be in (0, 1]")
    moved_B = log_prob_B - old_log_prob_B.detach()
    ratio_B = moved_B.exp()
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(-advantages_B * ratio_B, -advantages_B * clipped_B).mean()
    with torch.no_grad():
        higher, lower = ratio_B > 1 + clip_range, ratio_B < 1 - clip_range
        metrics = {
            "ratio_mean": ratio_B.mean(),
            "ratio_std": ratio_B.std(correction=0),
            "pg_clipfrac": (higher | lower).float().mean(),
            "pg_clipfrac_higher": higher.float().mean(),
            "pg_clipfrac_lower": lower.float().mean(),
            "approx_kl": moved_B.square().mean() / 2,
        }
    return loss, {name: float(value) for name, value in metrics.items()}


def gaussian_kl(mean_BNC: Tensor, mean_ref_BNC: Tensor, std: float) -> Tensor:
    """KL divergence of two steps with equal noise: ``(mean - mean_ref)^2 / (2 std^2)``.

    This is the paper's form, with the step size inside ``std`` (as `flow.sde_step` returns it); the published code
    leaves the step size out of it.

    Args:
        mean_BNC, mean_ref_BNC: means of the step under the policy and the reference.
        std: standard deviation of the noise really added, positive.

    Returns:
        Shape (B,), nats per latent element: the mean over N and C.

    Raises:
        ValueError: the shapes differ, or ``std`` is not positive.

    Source: Flow-GRPO (arXiv 2505.05470).
    """
    if mean_BNC.shape != mean_ref_BNC.shape:
        raise ValueError(f"the means differ in shape: {tuple(mean_BNC.shape)} and {tuple(mean_ref_BNC.shape)}")
    if not std > 0:
        raise ValueError(f"std = {std} must be positive: between steps without noise the divergence is infinite")
    return (mean_BNC - mean_ref_BNC.detach()).square().flatten(1).mean(1) / (2 * std**2)


def nft_loss(
    v_BNC: Tensor,
    v_old_BNC: Tensor,
    x_t_BNC: Tensor,
    clean_BNC: Tensor,
    sigma_B: Tensor,
    advantages_B: Tensor,
    *,
    beta: float,
    advantage_clip: float,
) -> Tensor:
    """DiffusionNFT: pull the velocity towards well rewarded samples and mirror it away from the others.

    With t = ``sigma_B``, a = ``advantage_clip``, and w detached, in double precision::

        r  = 1/2 + 1/2 clip(A / a, -1, 1)
        v+ = beta v + (1 - beta) v_old,            v- = (1 + beta) v_old - beta v
        L+- = mean((x_t - t v+- - clean)^2) / w+-,  w+- = max(mean |x_t - t v+- - clean|, 1e-5)
        loss = mean(r L+ + (1 - r) L-) a / beta

    Args:
        v_BNC: velocity in training at ``x_t_BNC``; gradients flow through it.
        v_old_BNC: velocity of the policy that samples: the old one (``train.old_decay``), or the one that the iteration
            started from. Samples that were begun an iteration early are of the version before.
        x_t_BNC: ``clean_BNC`` noised to the levels ``sigma_B``.
        clean_BNC: the samples that were rewarded.
        sigma_B: noise levels, in (0, 1].
        advantages_B: unclamped.
        beta: strength of the implicit policies, positive.
        advantage_clip: advantage at which a sample counts as fully good or bad.

    Returns:
        A scalar, float64.

    Raises:
        ValueError: the shapes differ, or ``beta`` or ``advantage_clip`` is not positive.

    Source: DiffusionNFT (arXiv 2509.16117), the form of its published code.
    """
    shapes = [tuple(tensor.shape) for tensor in (v_BNC, v_old_BNC, x_t_BNC, clean_BNC)]
    if len(set(shapes)) > 1:
        raise ValueError(f"v_BNC, v_old_BNC, x_t_BNC and clean_BNC must have one shape, and have {shapes}")
    if not tuple(sigma_B.shape) == tuple(advantages_B.shape) == shapes[0][:1]:
        raise ValueError(
            f"sigma_B {tuple(sigma_B.shape)} and advantages_B {tuple(advantages_B.shape)} need one value for each of "
            f"the {shapes[0][0]} samples"
        )
    if not (beta > 0 and advantage_clip > 0):
        raise ValueError(f"beta = {beta} and advantage_clip = {advantage_clip} must be positive")
    old_BNC, sigma_B11 = v_old_BNC.detach(), sigma_B.view(-1, 1, 1)

    def error_B(implicit_BNC: Tensor) -> Tensor:
        off_BNC = x_t_BNC - sigma_B11 * implicit_BNC - clean_BNC
        weight_B = off_BNC.detach().double().abs().flatten(1).mean(1).clamp(min=NFT_WEIGHT_FLOOR)
        return off_BNC.square().flatten(1).mean(1) / weight_B

    good_B = error_B(beta * v_BNC + (1 - beta) * old_BNC)
    bad_B = error_B((1 + beta) * old_BNC - beta * v_BNC)
    r_B = 0.5 + 0.5 * (advantages_B.double() / advantage_clip).clamp(-1, 1)
    return (r_B * good_B + (1 - r_B) * bad_B).mean() * (advantage_clip / beta)


def guarded_log_ratio(
    log_prob_B: Tensor, old_log_prob_B: Tensor, mean_BNC: Tensor, old_mean_BNC: Tensor, std: float
) -> Tensor:
    """GRPO-Guard's log-ratio of an ``sde`` step, without the bias that a moved mean has at each noise level::

        (log_prob - old + mean (mean - old_mean)^2 / (2 std^2)) std

    The objective made of it is to be divided by ``-dt``, so that all steps weigh alike.

    Args:
        log_prob_B, old_log_prob_B: of the step under the policy in training and the one that the iteration started
            from, shape (B,).
        mean_BNC, old_mean_BNC: of the same steps.
        std: standard deviation of the noise really added, ``g sqrt(-dt)``, positive.

    Returns:
        Shape (B,): nats per latent element, times ``std``.

    Raises:
        ValueError: the shapes of the means differ, or ``std`` is not positive.

    Source: GRPO-Guard (arXiv 2510.22319), in the form of verl-omni's ``GRPOGuardLoss``.
    """
    return (log_prob_B - old_log_prob_B.detach() + gaussian_kl(mean_BNC, old_mean_BNC, std)) * std


def matching_log_prob(
    v_BNC: Tensor,
    target_BNC: Tensor,
    sigma_B: Tensor,
    *,
    weighting: Literal["uniform", "t", "ghuber"],
    power: float,
) -> Tensor:
    """Minus the weighted flow-matching error, which stands for a log-probability.

    With ``e = mean (v - target)^2``, t = ``sigma_B`` and p = ``power``::

        uniform  -e
        t        -t e
        ghuber   -t ((e + 1e-10)^p - 1e-10^p) / p

    Args:
        v_BNC: predicted velocity at the noised samples.
        target_BNC: noise less clean sample.
        sigma_B: noise levels, in (0, 1].

    Returns:
        Shape (B,), float64.

    Raises:
        ValueError: the shapes differ, or there is no such weighting.

    Source: AWM (arXiv 2509.25050), in the form of its published code.
    """
    if v_BNC.shape != target_BNC.shape or sigma_B.shape != v_BNC.shape[:1]:
        raise ValueError(
            f"v_BNC {tuple(v_BNC.shape)} and target_BNC {tuple(target_BNC.shape)} must have one shape, and sigma_B "
            f"{tuple(sigma_B.shape)} a value for each sample"
        )
    error_B = (v_BNC.double() - target_BNC.double()).square().flatten(1).mean(1)
    match weighting:
        case "uniform":
            return -error_B
        case "t":
            return -error_B * sigma_B
        case "ghuber":
            return -((error_B + GHUBER_FLOOR) ** power - GHUBER_FLOOR**power) * sigma_B / power
    raise ValueError(f"weighting = {weighting!r} must be 'uniform', 't' or 'ghuber'")


def dpo_loss(
    better_B: Tensor, worse_B: Tensor, better_ref_B: Tensor, worse_ref_B: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Diffusion-DPO, of flow-matching errors e of pairs, beside those of the reference policy::

        m = -beta / 2 ((e_better - e_better_ref) - (e_worse - e_worse_ref))
        loss = mean(-log sigmoid(m))

    Args:
        better_B, worse_B: errors under the policy in training, shape (B,); gradients flow through them.
        better_ref_B, worse_ref_B: under the reference.
        beta: how far the policy may go from the reference, positive.

    Returns:
        The loss, a scalar; and the share of pairs with ``m > 0``, which the policy tells apart better than the
        reference.

    Raises:
        ValueError: the shapes differ, or ``beta`` is not positive.

    Source: Diffusion-DPO (arXiv 2311.12908), in flow_grpo's form (train_sd3_dpo.py).
    """
    shapes = {tuple(error_B.shape) for error_B in (better_B, worse_B, better_ref_B, worse_ref_B)}
    if len(shapes) > 1 or not beta > 0:
        raise ValueError(f"errors of shapes {sorted(shapes)} and beta = {beta}: one shape, and a positive beta")
    margin_B = -beta / 2 * ((better_B - better_ref_B.detach()) - (worse_B - worse_ref_B.detach()))
    return -torch.nn.functional.logsigmoid(margin_B).mean(), (margin_B > 0).float().mean().detach()
