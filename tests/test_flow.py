"""Steps between noise levels: against the papers' forms, torch's own densities, and known distributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from spotlight.rl.flow import (
    Kind,
    Pass,
    dpm2_step,
    initial_noise,
    ode_step,
    sde_step,
    step_noise,
)

KINDS: tuple[Kind, ...] = ("sde", "cps", "dance")
SHAPE = (3, 4, 5)
ROUNDING = 1e-5
"""Float32 has 1.2e-7 of relative precision; a step is a dozen operations on numbers up to about 10."""


def normal(name: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.from_numpy(np.random.default_rng(name).standard_normal(shape)).float()


def test_ode_step_is_euler() -> None:
    x, v = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[4.0, -8.0]]])

    x_next = ode_step(x, v, 0.75, 0.5)

    # dt = -1/4
    assert x_next.tolist() == [[[0.0, 4.0]]]


def test_ode_steps_along_the_true_velocity_end_in_the_clean_latent() -> None:
    clean, x = normal(1), normal(2)
    v = x - clean

    for sigma, sigma_next in ((1.0, 0.9), (0.9, 0.3), (0.3, 0.0)):
        x = ode_step(x, v, sigma, sigma_next)

    torch.testing.assert_close(x, clean, atol=ROUNDING, rtol=0)


def solved(sigmas: Sequence[float], x: Tensor, velocity: Callable[[Tensor, float], Tensor], kind: str) -> Tensor:
    """Where a sampler's steps end."""
    before: Pass | None = None
    for sigma, sigma_next in itertools.pairwise(sigmas):
        now = Pass(x, velocity(x, sigma), sigma)
        x = ode_step(*now, sigma_next) if before is None or kind == "ode" else dpm2_step(now, sigma_next, before)
        before = now
    return x


def curved(x: Tensor, sigma: float) -> Tensor:
    """A velocity field that Euler's steps cut the corners of."""
    return torch.sin(3 * x) + 4 * sigma * x


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("steps", [2, 4, 10])
def test_dpm2_is_diffusers_solver(steps: int) -> None:
    shifted = [3 * t / (1 + 2 * t) for t in np.linspace(1, 0, steps + 1)]
    solver: Any = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        lower_order_final=True,
        final_sigmas_type="zero",
    )
    solver.set_timesteps(steps)
    solver.sigmas = torch.tensor(shifted, dtype=torch.float64)
    expected = normal(1)
    for timestep, sigma in zip(solver.timesteps, shifted, strict=False):
        expected = solver.step(curved(expected, sigma), timestep, expected).prev_sample

    found = solved(shifted, normal(1), curved, "dpm2")

    torch.testing.assert_close(found, expected, atol=ROUNDING * steps, rtol=0)


@pytest.mark.parametrize(("kind", "order"), [("ode", 1), ("dpm2", 2)])
def test_errors_fall_by_a_solvers_order(kind: str, order: int) -> None:
    x, first, last = normal(1), 0.9, 0.2
    exact = solved(np.linspace(first, last, 20_001).tolist(), x, curved, "ode")

    errors = [
        float((solved(np.linspace(first, last, steps + 1).tolist(), x, curved, kind) - exact).abs().mean())
        for steps in (40, 80)
    ]

    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.15)


def test_a_step_of_dpm2_refuses_a_pass_that_was_not_before() -> None:
    x, v = normal(1), normal(2)

    with pytest.raises(ValueError, match="goes down in noise"):
        dpm2_step(Pass(x, v, 0.5), 0.3, Pass(x, v, 0.4))
    with pytest.raises(ValueError, match="must be the same"):
        dpm2_step(Pass(x, v, 0.5), 0.3, Pass(x, v[:1], 0.6))


def test_sde_step_is_the_papers_formula() -> None:
    x, v, noise = normal(1), normal(2), normal(3)
    t, dt, a = 0.6, -0.15, 0.7

    x_next, _, _, _ = sde_step(x, v, t, t + dt, noise_level=a, kind="sde", sigma_cap=0.9, noise_BNC=noise)

    x64, v64, noise64 = x.double(), v.double(), noise.double()
    sigma_t = a * math.sqrt(t / (1 - t))
    drift = v64 + sigma_t**2 / (2 * t) * (x64 + (1 - t) * v64)
    expected = x64 + drift * dt + sigma_t * math.sqrt(abs(dt)) * noise64
    torch.testing.assert_close(x_next.double(), expected, atol=ROUNDING, rtol=0)


def test_dance_step_follows_the_score() -> None:
    x, v, noise = normal(1), normal(2), normal(3)
    t, dt, eta = 0.6, -0.15, 0.3

    x_next, _, _, _ = sde_step(x, v, t, t + dt, noise_level=eta, kind="dance", sigma_cap=0.9, noise_BNC=noise)

    # dx = (v - eta^2/2 score) dt + eta dW, and the score of a flow at t is -E[noise | x] / t.
    x64, v64, noise64 = x.double(), v.double(), noise.double()
    score = -(x64 + (1 - t) * v64) / t
    expected = x64 + (v64 - eta**2 / 2 * score) * dt + eta * math.sqrt(-dt) * noise64
    torch.testing.assert_close(x_next.double(), expected, atol=ROUNDING, rtol=0)


def test_cps_step_keeps_the_amounts_of_clean_and_noise() -> None:
    clean, old_noise, noise = normal(1), normal(2), normal(3)
    sigma, sigma_next, eta = 0.8, 0.5, 0.8
    x, v = (1 - sigma) * clean + sigma * old_noise, old_noise - clean

    x_next, _, _, std = sde_step(x, v, sigma, sigma_next, noise_level=eta, kind="cps", sigma_cap=0.9, noise_BNC=noise)

    # Old and fresh noise share sigma_next as cosine and sine of the angle eta pi / 2.
    angle = eta * math.pi / 2
    mixed = math.cos(angle) * old_noise + math.sin(angle) * noise
    torch.testing.assert_close(x_next, (1 - sigma_next) * clean + sigma_next * mixed, atol=ROUNDING, rtol=0)
    assert std == pytest.approx(sigma_next * math.sin(angle))


@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_log_prob_is_the_mean_log_density_of_a_normal(kind: Kind) -> None:
    x, v, noise = normal(1), normal(2), normal(3)

    x_next, log_prob, mean, std = sde_step(x, v, 0.6, 0.45, noise_level=0.7, kind=kind, sigma_cap=0.9, noise_BNC=noise)

    expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean(dim=(1, 2))
    torch.testing.assert_close(log_prob, expected, atol=ROUNDING, rtol=0)


def test_cps_log_prob_is_the_bare_square() -> None:
    x, v, noise = normal(1), normal(2), normal(3)

    _, log_prob, _, std = sde_step(x, v, 0.6, 0.45, noise_level=0.7, kind="cps", sigma_cap=0.9, noise_BNC=noise)

    torch.testing.assert_close(log_prob, -((std * noise) ** 2).mean(dim=(1, 2)), atol=ROUNDING, rtol=0)


def test_sigma_cap_replaces_sigma_only_under_the_root_and_only_at_one() -> None:
    x, v, noise = normal(1), normal(2), normal(3)
    eta, cap = 0.7, 0.9

    _, _, at_one, std = sde_step(x, v, 1.0, 0.9, noise_level=eta, sigma_cap=cap, noise_BNC=noise)
    below = [sde_step(x, v, 0.9, 0.8, noise_level=eta, sigma_cap=c, noise_BNC=noise)[0] for c in (0.9, 0.5)]

    # At sigma = 1: g^2 = eta^2 / (1 - cap), the drift is v + g^2/2 x, and dt = -0.1.
    g2 = eta**2 / (1 - cap)
    torch.testing.assert_close(at_one, x + (v + g2 / 2 * x) * -0.1, atol=ROUNDING, rtol=0)
    assert std == pytest.approx(math.sqrt(g2 * 0.1))
    assert torch.equal(below[0], below[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_std_is_that_of_the_noise_really_added(kind: Kind) -> None:
    x, v, noise = normal(1), normal(2), normal(3)

    x_next, _, mean, std = sde_step(x, v, 0.6, 0.45, noise_level=0.7, kind=kind, sigma_cap=0.9, noise_BNC=noise)

    torch.testing.assert_close(x_next - mean, std * noise, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_little_noise_is_the_ode_step(kind: Kind) -> None:
    x, v, noise = normal(1), normal(2), normal(3)
    eta = 1e-6

    x_next, log_prob, _, _ = sde_step(x, v, 0.6, 0.45, noise_level=eta, kind=kind, sigma_cap=0.9, noise_BNC=noise)

    torch.testing.assert_close(x_next, ode_step(x, v, 0.6, 0.45), atol=ROUNDING, rtol=0)
    assert torch.isfinite(log_prob).all()


@pytest.mark.parametrize("kind", KINDS)
def test_judging_a_step_gives_the_log_prob_of_taking_it_bit_for_bit(kind: Kind) -> None:
    x, v, noise = normal(1), normal(2), normal(3)
    settings: dict[str, Any] = {"noise_level": 0.7, "kind": kind, "sigma_cap": 0.9}

    x_next, taken, _, _ = sde_step(x, v, 1.0, 0.9, noise_BNC=noise, **settings)
    same, judged, _, _ = sde_step(x, v, 1.0, 0.9, x_next_BNC=x_next, **settings)

    assert torch.equal(taken, judged)
    assert torch.equal(same, x_next)


@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_stochastic_steps_draw_from_the_distribution_of_the_flow(kind: Kind) -> None:
    # Not so for cps: it renews the same share of the noise however small the step, so many steps narrow what it draws.
    # Clean latents are N(0, 1), so x at t has variance (1-t)^2 + t^2 and the velocity is known:
    # v = E[noise - clean | x] = x (t - (1-t)) / variance.
    steps, values = 200, 20_000
    sigmas = [1 - i / steps for i in range(steps + 1)]
    x = normal(0, (1, values, 1))

    for step, (t, t_next) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        v = x * ((2 * t - 1) / ((1 - t) ** 2 + t**2))
        noise = normal(step + 1, (1, values, 1))
        x = sde_step(x, v, t, t_next, noise_level=0.5, kind=kind, sigma_cap=sigmas[1], noise_BNC=noise)[0]

    # The sampling error of the variance is sqrt(2 / values) = 0.01; the rest is for the step size.
    assert x.var().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_widened_before_anything_is_computed(kind: Kind) -> None:
    x, v, noise = (normal(name).bfloat16() for name in (1, 2, 3))
    settings: dict[str, Any] = {"noise_level": 0.7, "kind": kind, "sigma_cap": 0.9}

    half = sde_step(x, v, 0.6, 0.45, noise_BNC=noise, **settings)
    full = sde_step(x.float(), v.float(), 0.6, 0.45, noise_BNC=noise.float(), **settings)

    for low, high in zip(half[:3], full[:3], strict=True):
        assert low.dtype == torch.float32
        assert torch.equal(low, high)


def test_deterministic_steps_widen_half_precision_as_well() -> None:
    def steps(x: Tensor, v: Tensor, x_before: Tensor, v_before: Tensor) -> tuple[Tensor, Tensor]:
        return ode_step(x, v, 0.6, 0.45), dpm2_step(Pass(x, v, 0.6), 0.45, Pass(x_before, v_before, 0.8))

    half = [normal(name).bfloat16() for name in (1, 2, 3, 4)]

    for low, high in zip(steps(*half), steps(*(each.float() for each in half)), strict=True):
        assert low.dtype == torch.float32
        assert torch.equal(low, high)


def test_the_log_prob_pulls_on_the_mean_but_not_on_the_sample() -> None:
    x, v, noise = normal(1), normal(2).requires_grad_(), normal(3)
    sigma, sigma_next, eta = 0.6, 0.45, 0.7

    _, log_prob, _, std = sde_step(x, v, sigma, sigma_next, noise_level=eta, sigma_cap=0.9, noise_BNC=noise)
    (gradient,) = torch.autograd.grad(log_prob.sum(), v)

    # d log p / d mean = noise / std per element, averaged over 4 x 5;
    # d mean / d v = (1 + g^2 (1 - sigma) / (2 sigma)) dt.
    g2 = eta**2 * sigma / (1 - sigma)
    mean_per_v = (1 + g2 * (1 - sigma) / (2 * sigma)) * (sigma_next - sigma)
    torch.testing.assert_close(gradient, noise / std * mean_per_v / 20, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"noise_level": 0.0}, "noise_level = 0.0"),
        ({"noise_level": math.nan}, "noise_level = nan"),
        ({"noise_level": math.inf}, "noise_level = inf"),
        ({"sigma": 0.4, "sigma_next": 0.5}, "got 0.4, 0.5"),
        ({"sigma": 0.5, "sigma_next": 0.5}, "got 0.5, 0.5"),
        ({"sigma": 1.5}, "got 1.5"),
        ({"sigma_next": -0.1}, "-0.1"),
        ({"sigma": 1.0, "sigma_cap": 1.0}, "sigma_cap = 1.0"),
        ({"noise_BNC": None}, "neither came"),
        ({"x_next_BNC": torch.zeros(SHAPE)}, "both came"),
        ({"noise_BNC": torch.zeros(1, 4, 5)}, "(1, 4, 5)"),
        ({"v_BNC": torch.zeros(3, 4, 1)}, "(3, 4, 1)"),
        ({"kind": "ode"}, "'ode'"),
    ],
)
def test_a_wrong_step_is_refused_with_the_values_that_came(change: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "x_BNC": normal(1),
        "v_BNC": normal(2),
        "sigma": 0.6,
        "sigma_next": 0.45,
        "noise_level": 0.7,
        "sigma_cap": 0.9,
        "noise_BNC": normal(3),
    }

    with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is checked below
        sde_step(**{**good, **change})

    assert said in str(error.value)


def test_ode_step_refuses_to_go_up_in_noise() -> None:
    with pytest.raises(ValueError, match=r"got 0\.25, 0\.5"):
        ode_step(normal(1), normal(2), 0.25, 0.5)


def test_noise_does_not_depend_on_the_batch() -> None:
    alone = initial_noise([7], 4, 5), step_noise([7], 2, 4, 5)

    together = initial_noise([3, 7, 9], 4, 5)[1:2], step_noise([9, 7], 2, 4, 5)[1:2]

    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_noise_is_philox_keyed_by_seed_and_step() -> None:
    seed, step = 2**63 + 5, 2

    noise = step_noise([seed], step, 4, 5)

    # The key as one 128-bit number: the seed below, the slot above; slot 0 is the initial noise.
    stream = np.random.Generator(np.random.Philox(key=seed + ((step + 1) << 64)))
    assert noise.dtype == torch.float32
    assert np.array_equal(noise[0].numpy(), stream.standard_normal((4, 5), dtype=np.float32))


def test_streams_of_seeds_and_steps_are_independent_and_standard_normal() -> None:
    tokens, channels = 100, 100
    streams = [initial_noise([0, 1], tokens, channels), step_noise([0, 1], 0, tokens, channels)]
    streams.append(step_noise([0, 1], 1, tokens, channels))

    values = torch.cat(streams).flatten(1)

    # 1e4 values each: the standard error of a mean and of a correlation is 0.01; five of them are never reached.
    assert values.mean(1).abs().max() < 0.05
    assert torch.equal((torch.corrcoef(values) - torch.eye(6)).abs() < 0.05, torch.ones(6, 6, dtype=torch.bool))
    assert (values.var(1) - 1).abs().max() < 0.08  # its standard error is sqrt(2) times that


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_64_bit_number_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=str(seed)):
        initial_noise([seed], 4, 5)
