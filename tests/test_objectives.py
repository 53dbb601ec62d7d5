"""Advantages and objectives: against the fixtures of the field, hand-computed cases and the papers' forms."""

from __future__ import annotations

import math
from statistics import pstdev
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from spotlight.rl.advantages import group_advantages, spread, zero_std_ratio
from spotlight.rl.flow import sde_step
from spotlight.rl.objectives import clipped_objective, dpo_loss, gaussian_kl, guarded_log_ratio, nft_loss

FIXTURE_GROUPS = list("abacba")
FIXTURE_REWARDS = [1, 2, 3, 4, 5, 6]
FIXTURE = {
    "global": [-1.36618011, -0.87825864, -0.19516859, 0, 0.87825864, 1.56134869],
    "group": [-1.13549469, -0.99993334, -0.16221353, 0, 0.99993334, 1.29770821],
}
"""Population standard deviations, eps = 1e-4; reproduced from the published Flow-GRPO code."""


def normal(name: int, shape: tuple[int, ...] = (3, 4, 5)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(name).standard_normal(shape)).float()


@pytest.mark.parametrize("std", ["global", "group"])
def test_advantages_are_those_of_the_published_code(std: Literal["global", "group"]) -> None:
    expected = FIXTURE[std]

    advantages = group_advantages(FIXTURE_REWARDS, FIXTURE_GROUPS, std=std)

    assert advantages.dtype == np.float64
    np.testing.assert_allclose(advantages, expected, atol=5e-9)  # the fixture has eight decimals


def test_without_a_spread_advantages_are_in_units_of_reward() -> None:
    """As Dr. GRPO has it, verl-omni's ``norm_adv_by_std_in_grpo = False``."""
    advantages = group_advantages([1.0, 2.0, 3.0, 7.0, 7.0, 5.0], "aaabbc", std="none")

    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("std", ["global", "group"])
def test_groups_of_one_or_of_equal_rewards_have_advantage_exactly_zero(std: Literal["global", "group"]) -> None:
    rewards = [0.1, 0.1, 0.1, 0.7, 0.2, 0.9]  # the mean of three 0.1 is not 0.1 in binary

    advantages = group_advantages(rewards, [0, 0, 0, 1, 2, 2], std=std)

    assert advantages[:4].tolist() == [0, 0, 0, 0]
    assert advantages[4] < 0 < advantages[5]


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=20),
    std=st.sampled_from(["global", "group"]),
)
def test_advantages_follow_the_definition_for_any_groups(
    rows: list[tuple[float, int]], std: Literal["global", "group"]
) -> None:
    rewards, groups = zip(*rows, strict=True)

    advantages = group_advantages(rewards, groups, std=std)

    for row, (reward, group) in enumerate(rows):
        own = [r for r, g in rows if g == group]
        spread = np.std(rewards if std == "global" else own)
        assert advantages[row] == pytest.approx((reward - sum(own) / len(own)) / (spread + 1e-4), abs=1e-9)


def test_the_spread_of_equal_rewards_is_exactly_zero_and_that_of_others_their_deviation() -> None:
    assert spread([0.1] * 7) == 0.0
    assert spread([0.1, 0.9, 0.4, 0.4]) == pytest.approx(pstdev([0.1, 0.9, 0.4, 0.4]), rel=1e-14)


def test_zero_std_ratio_is_the_share_of_groups_that_teach_nothing() -> None:
    rewards, groups = [0.1, 0.1, 0.1, 0.7, 0.2, 0.9, 0.3, 0.4], [0, 0, 0, 1, 2, 2, 3, 3]

    ratio = zero_std_ratio(rewards, groups)

    assert ratio == 2 / 4  # groups 0 (equal rewards) and 1 (one sample)


@pytest.mark.parametrize(
    ("rewards", "groups", "said"),
    [
        ([], [], "0 group ids"),
        ([1.0, 2.0], [0], "1 group ids"),
        ([1.0, math.nan], [0, 0], "nan"),
        ([-math.inf], [0], "-inf"),
    ],
)
def test_rewards_that_are_not_numbers_of_samples_are_refused(
    rewards: list[float], groups: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        group_advantages(rewards, groups)
    with pytest.raises(ValueError, match=said):
        zero_std_ratio(rewards, groups)


def test_an_unknown_kind_of_std_is_refused() -> None:
    with pytest.raises(ValueError, match="'batch'"):
        group_advantages([1.0], [0], std="batch")  # type: ignore[arg-type]


def test_the_clipped_objective_stops_where_the_ratio_left_its_range_for_the_better() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    log_prob = ratios.log().requires_grad_()

    loss, metrics = clipped_objective(log_prob, torch.zeros(5), advantages, clip_range=0.25)
    (gradient,) = torch.autograd.grad(loss, log_prob)

    # max(-A r, -A clip(r, 0.75, 1.25)) by hand; moving further would only count where it makes things worse.
    terms = [-1.25, 1.5, -0.5, 0.75, -2.0]
    assert loss.item() == pytest.approx(sum(terms) / 5)
    np.testing.assert_allclose(gradient * 5, [0, 1.5, -0.5, 0, -2.0], atol=1e-6)
    assert metrics == pytest.approx(
        {
            "ratio_mean": 1.0,
            "ratio_std": math.sqrt(4 * 0.25 / 5),
            "pg_clipfrac": 0.8,
            "pg_clipfrac_higher": 0.4,
            "pg_clipfrac_lower": 0.4,
            "approx_kl": (2 * math.log(1.5) ** 2 + 2 * math.log(0.5) ** 2) / 5 / 2,
        }
    )


def test_no_gradient_flows_to_what_a_policy_is_compared_with() -> None:
    old_B, old_BNC = torch.zeros(3, requires_grad=True), normal(1).requires_grad_()
    new_B, new_BNC = torch.zeros(3, requires_grad=True), normal(2).requires_grad_()
    losses = [
        clipped_objective(new_B, old_B, torch.ones(3), clip_range=0.2)[0],
        gaussian_kl(new_BNC, old_BNC, 0.5).sum(),
        guarded_log_ratio(new_B, old_B, new_BNC, old_BNC, 0.5).sum(),
        dpo_loss(new_B, new_B, old_B, old_B, beta=1.0)[0],
    ]

    for loss in losses:
        loss.backward()

    assert new_B.grad is not None
    assert new_BNC.grad is not None
    assert old_B.grad is None
    assert old_BNC.grad is None


def test_the_clipped_objective_refuses_unequal_shapes_and_ranges_out_of_range() -> None:
    three, two = torch.zeros(3), torch.zeros(2)

    with pytest.raises(ValueError, match=r"\(3,\), \(2,\) and \(3,\)"):
        clipped_objective(three, two, three, clip_range=0.1)
    for clip_range in (0, 1.5):
        with pytest.raises(ValueError, match=f"clip_range = {clip_range}"):
            clipped_objective(three, three, three, clip_range=clip_range)


def test_the_gaussian_kl_is_torchs() -> None:
    mean, mean_ref, std = normal(1), normal(2), 0.3

    divergence = gaussian_kl(mean, mean_ref, std)

    policy, reference = torch.distributions.Normal(mean, std), torch.distributions.Normal(mean_ref, std)
    expected = torch.distributions.kl_divergence(policy, reference).mean(dim=(1, 2))
    torch.testing.assert_close(divergence, expected)


def test_the_gaussian_kl_of_sde_steps_is_the_papers_distance_of_velocities() -> None:
    x, noise, v, v_ref = normal(1), normal(2), normal(3), normal(4)
    t, dt, eta = 0.6, -0.15, 0.7
    step: dict[str, Any] = {"noise_level": eta, "sigma_cap": 0.9, "noise_BNC": noise}

    _, _, mean, std = sde_step(x, v, t, t + dt, **step)
    _, _, mean_ref, _ = sde_step(x, v_ref, t, t + dt, **step)

    # Flow-GRPO, the divergence of its sampler's steps: |dt|/2 (s (1-t) / (2t) + 1/s)^2 |v - v_ref|^2.
    s = eta * math.sqrt(t / (1 - t))
    expected = -dt / 2 * (s * (1 - t) / (2 * t) + 1 / s) ** 2 * (v - v_ref).square().mean(dim=(1, 2))
    torch.testing.assert_close(gaussian_kl(mean, mean_ref, std), expected, rtol=1e-5, atol=0)


def test_the_gaussian_kl_of_noiseless_steps_or_unequal_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"std = 0\.0"):
        gaussian_kl(normal(1), normal(2), 0.0)
    with pytest.raises(ValueError, match=r"\(1, 4, 5\)"):
        gaussian_kl(normal(1), normal(2, (1, 4, 5)), 0.1)


def nft_by_definition(
    v: Tensor, v_old: Tensor, x_t: Tensor, clean: Tensor, sigma: Tensor, advantages: Tensor, beta: float, clip: float
) -> float:
    """DiffusionNFT sample by sample in float64 numpy, from the positive and negative policies of the paper."""
    losses = []
    for b in range(len(v)):
        new, old, x, x0 = (tensor[b].double().numpy() for tensor in (v, v_old, x_t, clean))
        t, r = float(sigma[b]), 0.5 + 0.5 * min(max(float(advantages[b]) / clip, -1), 1)

        def loss(
            velocity: NDArray[np.float64],
            x: NDArray[np.float64] = x,
            x0: NDArray[np.float64] = x0,
            t: float = t,
        ) -> float:
            error = (x - t * velocity) - x0
            return float(np.mean(error**2) / max(float(np.mean(np.abs(error))), 1e-5))

        good, bad = old + beta * (new - old), old - beta * (new - old)
        losses.append((r * loss(good) + (1 - r) * loss(bad)) / beta * clip)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("beta", "clip"), [(1.0, 5.0), (0.1, 2.0)])
def test_the_nft_loss_is_the_papers(beta: float, clip: float) -> None:
    v, v_old, x_t, clean = (normal(name).double() for name in (1, 2, 3, 4))
    sigma, advantages = (torch.tensor(row, dtype=torch.float64) for row in ([0.1, 0.5, 1.0], [1.0, -0.7, 9.0]))

    loss = nft_loss(v, v_old, x_t, clean, sigma, advantages, beta=beta, advantage_clip=clip)

    expected = nft_by_definition(v, v_old, x_t, clean, sigma, advantages, beta, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_nft_loss_of_a_hand_computed_case() -> None:
    unit = torch.ones(1, 1, 1)
    x_t, clean, v, v_old = 1.0 * unit, 0.0 * unit, 0.5 * unit, 0.0 * unit
    sigma, advantage = torch.tensor([1.0]), torch.tensor([1.0])

    loss = nft_loss(v, v_old, x_t, clean, sigma, advantage, beta=1.0, advantage_clip=2.0)

    # r = 3/4; x0+ = 1 - 0.5 = 0.5, x0- = 1 + 0.5 = 1.5; with one element e^2 / |e| = |e|; times clip / beta = 2.
    assert loss.item() == pytest.approx((0.75 * 0.5 + 0.25 * 1.5) * 2)


def test_the_nft_loss_divides_an_error_that_vanishes_by_the_published_floor() -> None:
    zero, error = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 1e-6)

    loss = nft_loss(zero, zero, error, zero, torch.ones(1), torch.zeros(1), beta=1.0, advantage_clip=5.0)

    assert loss.item() == pytest.approx(1e-6**2 / 1e-5 * 5)


def test_the_nft_gradient_holds_the_weights_and_the_old_velocity_fixed() -> None:
    unit = torch.ones(1, 1, 1)
    v, v_old = (0.5 * unit).requires_grad_(), (0.0 * unit).requires_grad_()
    sigma, advantage = torch.tensor([1.0]), torch.tensor([1.0])

    nft_loss(v, v_old, unit, 0.0 * unit, sigma, advantage, beta=1.0, advantage_clip=2.0).backward()

    # d/dv of (1 - v)^2 / w+ is -2 (0.5) / 0.5 = -2, of (1 + v)^2 / w- is 2 (1.5) / 1.5 = 2; r = 3/4; times 2.
    assert v.grad is not None
    assert v.grad.item() == pytest.approx((0.75 * -2 + 0.25 * 2) * 2)
    assert v_old.grad is None


@pytest.mark.parametrize(("advantage", "direction"), [(1.0, -1), (-1.0, 1), (0.0, 0)])
def test_nft_moves_towards_good_samples_and_away_from_bad_ones(advantage: float, direction: int) -> None:
    noise, clean = normal(1, (1, 4, 5)), normal(2, (1, 4, 5))
    v = torch.zeros(1, 4, 5, requires_grad=True)
    sigma = torch.tensor([0.5])

    x_t = 0.5 * clean + 0.5 * noise
    nft_loss(v, v, x_t, clean, sigma, torch.tensor([advantage]), beta=1.0, advantage_clip=5.0).backward()

    assert v.grad is not None
    towards = (v.grad * (noise - clean)).sum().item()  # the velocity that would draw this very sample
    assert math.copysign(1, towards) == direction if direction else abs(towards) < 1e-6


def test_the_nft_loss_of_a_perfect_velocity_is_zero_with_a_finite_gradient() -> None:
    noise, clean = normal(1), normal(2)
    v = (noise - clean).requires_grad_()
    sigma = torch.full((3,), 0.5)

    loss = nft_loss(v, v, 0.5 * (clean + noise), clean, sigma, torch.ones(3), beta=1.0, advantage_clip=5.0)
    loss.backward()

    # Rounding leaves errors of about 1e-7, far below the floor of 1e-5 on the weight: a loss of 1e-7^2 / 1e-5 times 5.
    assert loss.item() < 1e-8
    assert v.grad is not None
    assert torch.isfinite(v.grad).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v_old_BNC": torch.zeros(2, 4, 5)}, "(2, 4, 5)"),
        ({"sigma_B": torch.ones(2)}, "(2,)"),
        ({"advantages_B": torch.ones(3, 1)}, "(3, 1)"),
        ({"beta": 0.0}, "beta = 0.0"),
        ({"advantage_clip": -1.0}, "advantage_clip = -1.0"),
    ],
)
def test_the_nft_loss_refuses_what_does_not_fit_together(change: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        **{name: torch.zeros(3, 4, 5) for name in ("v_BNC", "v_old_BNC", "x_t_BNC", "clean_BNC")},
        "sigma_B": torch.ones(3),
        "advantages_B": torch.ones(3),
        "beta": 1.0,
        "advantage_clip": 5.0,
    }

    with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is checked below
        nft_loss(**{**good, **change})

    assert said in str(error.value)
