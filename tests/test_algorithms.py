"""Each algorithm against the published code's formulas, written out again: objectives, then what the trainer does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from batches import (
    ADVANTAGES,
    NOISE_LEVEL,
    PROMPTS,
    SIZE,
    UNBOUND,
    WINDOW,
    equal,
    gradient_of,
    make_batch,
    make_model,
    make_trainer,
    weights_of,
)
from spotlight.config import TrainSection
from spotlight.plan.stochastic_steps import stochastic_steps
from spotlight.rl.algorithms import Rows, TrainingBatch, objective
from spotlight.rl.algorithms.noising import noised
from spotlight.rl.flow import sde_step
from spotlight.rl.models.tiny_text import TinyText
from spotlight.rl.objectives import clipped_objective, dpo_loss, guarded_log_ratio, matching_log_prob
from spotlight.rl.parts import preference_pairs

GROUPS = (0, 0, 0, 1, 1, 1)
BATCH, TOKENS, CHANNELS = 4, 6, 5


def normal(name: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(name).standard_normal(shape or (BATCH, TOKENS, CHANNELS)))


# Objectives, in float64


def test_the_guarded_objective_is_that_of_the_published_code() -> None:
    log_prob, old, advantages = normal(1, BATCH) / 50 - 1.5, normal(2, BATCH) / 50 - 1.5, normal(3, BATCH)
    mean, old_mean = normal(4), normal(4) + normal(5) / 100
    g, dt, clip = 1.3, -0.08, 2e-3
    std = g * math.sqrt(-dt)

    guarded = guarded_log_ratio(log_prob, old, mean, old_mean, std)
    loss, _ = clipped_objective(guarded, torch.zeros(BATCH), advantages, clip_range=clip)

    # verl-omni's GRPOGuardLoss: sigma_t is g and sqrt_dt its own factor; per element, then the mean over 1 / sqrt_dt^2.
    terms = []
    for b in range(BATCH):
        scale = math.sqrt(-dt) * g
        bias = float(np.mean((mean[b] - old_mean[b]).numpy() ** 2)) / (2 * scale**2)
        ratio = math.exp((float(log_prob[b] - old[b]) + bias) * scale)
        a = float(advantages[b])
        terms.append(max(-a * ratio, -a * min(max(ratio, 1 - clip), 1 + clip)))
    expected = sum(terms) / BATCH / math.sqrt(-dt) ** 2
    assert (loss / -dt).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "t", "ghuber"])
def test_the_matching_log_prob_is_that_of_the_published_code(weighting: Literal["uniform", "t", "ghuber"]) -> None:
    v, target, t = normal(1), normal(2), torch.tensor([0.1, 0.4, 0.8, 1.0], dtype=torch.float64)

    found = matching_log_prob(v, target, t, weighting=weighting, power=0.25)

    expected = []
    for b in range(BATCH):
        log_prob = -float(np.mean((v[b] - target[b]).numpy() ** 2))
        if weighting == "t":
            log_prob *= float(t[b])
        elif weighting == "ghuber":
            log_prob = -(pow(-log_prob + 1e-10, 0.25) - pow(1e-10, 0.25)) * float(t[b]) / 0.25
        expected.append(log_prob)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_preference_loss_is_that_of_the_published_code() -> None:
    better, worse, better_ref, worse_ref = (normal(name, BATCH).abs() for name in (1, 2, 3, 4))
    beta = 3.0

    loss, right = dpo_loss(better, worse, better_ref, worse_ref, beta=beta)

    # flow_grpo's train_sd3_dpo.py: w_diff and l_diff of the errors, inside_term = -0.5 beta (w_diff - l_diff).
    inside = [-0.5 * beta * float((better[b] - better_ref[b]) - (worse[b] - worse_ref[b])) for b in range(BATCH)]
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in inside) / BATCH, rel=1e-6)
    assert right.item() == sum(m > 0 for m in inside) / BATCH


def test_a_policy_that_is_the_reference_tells_no_pair_apart() -> None:
    better, worse = normal(1, BATCH).abs(), normal(2, BATCH).abs()

    loss, right = dpo_loss(better, worse, better, worse, beta=3.0)

    assert loss.item() == pytest.approx(math.log(2))
    assert right.item() == 0


@pytest.mark.parametrize(
    "refused",
    [
        lambda: matching_log_prob(normal(1), normal(2), torch.ones(3), weighting="t", power=0.25),
        lambda: matching_log_prob(normal(1), normal(2), torch.ones(BATCH), weighting="huber", power=1.0),  # type: ignore[arg-type]
        lambda: dpo_loss(*(normal(1, BATCH),) * 4, beta=0.0),
        lambda: guarded_log_ratio(normal(1, BATCH), normal(2, BATCH), normal(3), normal(4), 0.0),
    ],
)
def test_objectives_refuse_what_they_cannot_use(refused: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"weighting|shape|std"):
        refused()


@pytest.mark.parametrize(
    ("pairs_max", "expected"),
    [(1, ((2, 1), (5, 3))), (2, ((2, 1), (0, 6), (5, 3)))],
)
def test_the_best_of_a_prompt_are_paired_with_its_worst_where_they_differ(
    pairs_max: int, expected: tuple[tuple[int, int], ...]
) -> None:
    advantages: NDArray[np.float64] = np.array([0.5, -2.0, 1.5, -0.25, 0.0, 0.25, 0.0, 0.3, 0.3])
    groups = (7, 7, 7, 8, 8, 8, 7, 9, 9)

    assert preference_pairs(advantages, groups, pairs_max=pairs_max) == expected


def test_stochastic_steps_slide_and_begin_again() -> None:
    starts = [stochastic_steps((1, 7), 3, order="sliding", stride=2, every=2, seed=0, iteration=k)[0] for k in range(9)]

    assert starts == [1, 1, 3, 3, 1, 1, 3, 3, 1]  # 5 would end at 8


def test_stochastic_steps_are_drawn_anywhere_by_seed_and_iteration() -> None:
    def drawn(seed: int) -> list[tuple[int, int]]:
        return [
            stochastic_steps((1, 7), 3, order="random", stride=1, every=1, seed=seed, iteration=k) for k in range(60)
        ]

    assert {start for start, _ in drawn(0)} == {1, 2, 3, 4}
    assert all(end - start == 3 for start, end in drawn(0))
    assert drawn(0) == drawn(0) != drawn(1)


# What the trainer does with them


def grouped(batch: TrainingBatch) -> TrainingBatch:
    return replace(batch, groups_B=GROUPS)


@pytest.mark.parametrize("algorithm", ["grpo", "grpo-guard", "awm"])
def test_before_the_first_update_the_ratio_is_one(algorithm: str) -> None:
    model = make_model()

    metrics = make_trainer(model, algorithm=algorithm, micro_batch=4).update(make_batch(model), iteration=0)

    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio_std"] < 1e-6
    assert metrics["pg_clipfrac"] == 0


def test_a_guarded_update_weighs_steps_by_their_noise() -> None:
    model = make_model()
    batch, policy = make_batch(model), copy.deepcopy(model)
    assert batch.window_BKNC is not None

    make_trainer(model, algorithm="grpo-guard", max_grad_norm=UNBOUND).update(batch, iteration=0)

    # At ratio 1 and no moved mean: the gradient of -mean(A log p) g sqrt(-dt) / -dt.
    for b, advantage in enumerate(ADVANTAGES):
        for step in range(*WINDOW):
            log_prob, std, dt = judged(policy, batch, b, step)
            weight = advantage * std / -dt / (len(ADVANTAGES) * (WINDOW[1] - WINDOW[0]))
            (-weight * log_prob).backward()
    expected = gradient_of(policy)
    assert (gradient_of(model) - expected).norm() < 1e-4 * expected.norm()


def judged(policy: TinyText, batch: TrainingBatch, b: int, step: int) -> tuple[Tensor, float, float]:
    """Log-probability, noise and duration of a step that a sample took."""
    assert batch.window_BKNC is not None
    t, dt = batch.sigmas[step], batch.sigmas[step + 1] - batch.sigmas[step]
    x, x_next = batch.window_BKNC[b : b + 1, step], batch.window_BKNC[b : b + 1, step + 1]
    v = policy.velocity(x, torch.tensor([t]), batch.conditioning.rows([b]), guidance=1.0, **SIZE)
    g = NOISE_LEVEL * math.sqrt(t / (1 - (batch.sigmas[1] if t == 1 else t)))
    std = g * math.sqrt(-dt)
    mean = x + (v + g**2 / (2 * t) * (x + (1 - t) * v)) * dt
    return torch.distributions.Normal(mean, std).log_prob(x_next).mean(), std, dt


EVERYONE = tuple(range(len(PROMPTS)))


def test_a_second_guarded_update_measures_the_mean_from_before_the_first() -> None:
    model, before = make_model(), make_model()
    advantages = ADVANTAGES + 1.0  # those that add up to nothing would leave mostly rounding
    batch = replace(make_batch(model), advantages_B=advantages)
    assert batch.window_BKNC is not None
    x, x_next, (t, t_next) = batch.window_BKNC[:, 1], batch.window_BKNC[:, 2], batch.sigmas[1:3]
    settings, rows = TrainSection(algorithm="grpo-guard", clip_range=0.5), Rows(EVERYONE, (1,) * len(EVERYONE))
    goal = objective(model, settings, batch, seed=0, iteration=0, old=None)
    goal.remember([rows], first=False)
    shift(model)

    loss = goal.loss(rows)

    def step(policy: TinyText) -> tuple[Tensor, Tensor, Tensor, float]:
        v = policy.velocity(x, torch.full((len(x),), t), batch.conditioning, guidance=1.0, **SIZE)
        cap = batch.sigmas[1]
        return sde_step(x, v, t, t_next, noise_level=NOISE_LEVEL, sigma_cap=cap, x_next_BNC=x_next)

    (_, old, old_mean, _), (_, log_prob, mean, std) = step(before), step(model)
    bias = (mean - old_mean).square().mean(dim=(1, 2)) / (2 * std**2)
    ratio, wanted = ((log_prob - old + bias) * std).exp(), torch.from_numpy(advantages)
    expected = torch.maximum(-wanted * ratio, -wanted * ratio.clamp(0.5, 1.5)).mean() / (t - t_next)
    assert bias.min() > 1e-3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
def shift(model: TinyText) -> None:
    """Move the policy, as updates do."""
    for parameter in model.parameters():
        parameter.mul_(1.5)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_distance_of_flow_grpo_has_either_form(form: str) -> None:
    model = make_model()
    batch = replace(make_batch(model), log_prob_BS=None)
    start = copy.deepcopy(model)
    trainer = make_trainer(model, algorithm="grpo", kl=0.5, kl_form=form)
    trainer.update(batch, iteration=0)
    shift(model)  # far enough for float32 to tell the two velocities apart
    moved = copy.deepcopy(model)

    found = trainer.update(batch, iteration=1)["kl"]

    # Published code: mean((mean - mean_ref)^2) / (2 g^2), g without sqrt(-dt); the paper's divides by -dt as well.
    # Means are x (1 + g^2 dt / (2 t)) + v (1 + g^2 (1 - t) / (2 t)) dt, of the same x.
    assert batch.window_BKNC is not None
    distances = []
    for step in range(*WINDOW):
        t, dt = batch.sigmas[step], batch.sigmas[step + 1] - batch.sigmas[step]
        g = NOISE_LEVEL * math.sqrt(t / (1 - (batch.sigmas[1] if t == 1 else t)))
        x, at = batch.window_BKNC[:, step], torch.full((len(PROMPTS),), t)
        with torch.no_grad():
            v, v_start = (
                policy.velocity(x, at, batch.conditioning, guidance=1.0, **SIZE).double() for policy in (moved, start)
            )
        apart = (v - v_start) * (1 + g**2 * (1 - t) / (2 * t)) * dt
        distances.append(apart.square().mean().item() / (2 * g**2 * (1.0 if form == "code" else -dt)))
    assert found == pytest.approx(sum(distances) / len(distances), rel=1e-6)


def test_the_published_form_of_the_distance_is_that_of_sde_steps_alone() -> None:
    model, distances = make_model(), []
    batch = replace(make_batch(model, sampler="dance"), log_prob_BS=None)
    shift(model)
    for form in ("paper", "code"):
        settings = TrainSection(algorithm="grpo", kl=0.5, kl_form=form)
        goal = objective(model, settings, batch, seed=0, iteration=0, old=None)
        goal.remember((), first=True)
        goal.loss(Rows(EVERYONE, (1,) * len(EVERYONE)))
        distances.append(goal.metrics()["kl"])

    assert distances[0] == distances[1] > 0


def test_the_awm_gradient_is_that_of_advantage_weighted_matching() -> None:
    model = make_model()
    batch, policy = make_batch(model, sampler="ode"), copy.deepcopy(model)
    settings: dict[str, Any] = {"timesteps": 2, "awm_weighting": "t", "clip_range": 0.5, "advantage_clip": 1.0}

    make_trainer(model, algorithm="awm", micro_batch=4, max_grad_norm=UNBOUND, **settings).update(batch, iteration=3)

    for b, advantage in enumerate(ADVANTAGES.clip(-1, 1)):
        for slot in range(2):
            at = noised(batch, Rows((b,), (slot,)), "sampler", (5, 3), policy)
            v = policy.velocity(at.x_RNC, at.sigma_R, batch.conditioning.rows([b]), guidance=1.0, **SIZE)
            error = (v - (at.noise_RNC - at.clean_RNC)).square().mean() * at.sigma_R
            (advantage * error / (2 * len(ADVANTAGES))).sum().backward()
    expected = gradient_of(policy)
    assert (gradient_of(model) - expected).norm() < 1e-4 * expected.norm()


def test_the_dpo_gradient_prefers_each_prompts_best_to_its_worst() -> None:
    start = make_model()
    batch = grouped(make_batch(start, sampler="ode"))
    settings: dict[str, Any] = {"algorithm": "dpo", "timesteps": 2, "dpo_beta": 40.0, "max_grad_norm": UNBOUND}
    model = copy.deepcopy(start)
    trainer = make_trainer(model, learning_rate=1e-3, **settings)
    trainer.update(batch, iteration=0)
    policy = copy.deepcopy(model)

    metrics = trainer.update(batch, iteration=1)

    for p in policy.parameters():
        p.grad = None
    for better, worse in ((0, 1), (5, 3)):  # by ADVANTAGES
        for slot in range(2):
            at = noised(batch, Rows((better,), (slot,)), "sampler", (5, 1), policy)
            errors = {}
            for b in (better, worse):
                x0 = batch.clean_BNC[b : b + 1]
                x_t = (1 - at.sigma_R) * x0 + at.sigma_R * at.noise_RNC
                for name, each in (("policy", policy), ("start", start)):
                    v = each.velocity(x_t, at.sigma_R, batch.conditioning.rows([b]), guidance=1.0, **SIZE)
                    errors[b, name] = (v - (at.noise_RNC - x0)).square().mean()
            gained = [errors[b, "policy"] - errors[b, "start"].detach() for b in (better, worse)]
            (-torch.nn.functional.logsigmoid(-0.5 * 40.0 * (gained[0] - gained[1])) / 4).backward()
    expected = gradient_of(policy)
    assert metrics["dpo_pairs"] == 2
    assert (gradient_of(model) - expected).norm() < 1e-3 * expected.norm()


def test_dpo_trains_on_as_many_pairs_of_a_prompt_as_the_settings_say() -> None:
    batch, found = replace(make_batch(make_model(), sampler="ode"), groups_B=(0,) * len(PROMPTS)), []
    for pairs in (1, 2):
        trainer = make_trainer(make_model(), algorithm="dpo", dpo_pairs=pairs, timesteps=1)
        found.append(trainer.update(batch, iteration=0)["dpo_pairs"])

    assert found == [1, 2]


def test_samples_that_are_all_alike_change_nothing_by_dpo() -> None:
    model = make_model()
    batch = replace(grouped(make_batch(model, sampler="ode")), advantages_B=np.zeros(6))
    before = weights_of(model)

    metrics = make_trainer(model, algorithm="dpo").update(batch, iteration=0)

    assert metrics == {"loss": 0, "grad_norm": 0}
    assert equal(weights_of(model), before)


@pytest.mark.parametrize("algorithm", ["awm", "dpo"])
def test_a_few_updates_bring_good_samples_nearer_than_bad_ones(algorithm: str) -> None:
    model = make_model()
    batch = grouped(make_batch(model, sampler="ode"))
    before = matching(model, batch)
    trainer = make_trainer(model, algorithm=algorithm, learning_rate=1e-4, clip_range=0.5, timesteps=8)

    for iteration in range(5):
        trainer.update(batch, iteration=iteration)

    change = matching(model, batch) - before
    assert change[0] < change[1]  # errors of the best and the worst of the first prompt
    assert change[5] < change[3]


@torch.no_grad()
def matching(model: TinyText, batch: TrainingBatch) -> Tensor:
    """Flow-matching errors of the samples, over fresh noises at the sampler's levels."""
    errors = []
    for slot in range(len(batch.sigmas) - 1):
        at = noised(batch, Rows(tuple(range(len(PROMPTS))), (slot,) * len(PROMPTS)), "sampler", (99, 0), model)
        v = model.velocity(at.x_RNC, at.sigma_R, batch.conditioning, guidance=1.0, **SIZE)
        errors.append((v - (at.noise_RNC - at.clean_RNC)).square().mean(dim=(1, 2)))
    return torch.stack(errors).mean(0)


def test_an_algorithm_without_a_case_is_not_taken_for_another() -> None:
    settings, model = TrainSection().model_copy(update={"algorithm": "mine"}), make_model()

    with pytest.raises(AssertionError, match="mine"):
        objective(model, settings, make_batch(model), seed=0, iteration=0, old=None)
