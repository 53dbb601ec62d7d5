"""An iteration's updates on the embedded model with random weights: what they compute, and that they repeat."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import (
    ADVANTAGES,
    NOISE_LEVEL,
    PROMPTS,
    SIZE,
    STEPS,
    UNBOUND,
    WINDOW,
    equal,
    gradient_of,
    make_batch,
    make_model,
    make_trainer,
    some_of,
    weights_of,
)
from recorders import Repeats
from spotlight import config
from spotlight.config import TrainSection
from spotlight.records import Interrupted, Sampler, SpotlightError
from spotlight.rl import gradients
from spotlight.rl.algorithms import Rows, TrainingBatch, objective
from spotlight.rl.algorithms.base import Objective
from spotlight.rl.algorithms.nft import Nft
from spotlight.rl.algorithms.noising import noised
from spotlight.rl.flow import initial_noise, sde_step
from spotlight.rl.gradients import merged, micro_batches, part_gradient, rows_to_learn_from
from spotlight.rl.models import captured
from spotlight.rl.models.tiny_text import TinyText
from spotlight.rl.objectives import nft_loss
from spotlight.rl.parts import Cut, preference_pairs
from spotlight.rl.sums import ADD_COST, SLICES_MAX, best_slices, sliced, tree_sum
from spotlight.rl.trainer import Trainer, old_decay

ALGORITHMS = ("nft", "grpo")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("sampler", ["sde", "cps", "dance"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_before_the_first_update_the_ratio_is_exactly_one(sampler: Sampler, guidance: float) -> None:
    model = make_model()
    batch = make_batch(model, sampler=sampler, guidance=guidance)

    metrics = make_trainer(model, algorithm="grpo", micro_batch=4).update(batch, iteration=0)

    assert metrics["ratio_mean"] == 1
    assert metrics["ratio_std"] == metrics["approx_kl"] == metrics["pg_clipfrac"] == 0
    # The worker ran another batch size, which changes the rounding of a mean of 512 squares and no more.
    assert metrics["log_prob_delta"] <= metrics["log_prob_delta_max"] < 1e-6


def test_steps_of_a_window_are_judged_at_their_own_noise_levels() -> None:
    model = make_model()
    batch = make_batch(model, window=(1, 3))

    metrics = make_trainer(model, algorithm="grpo", micro_batch=4).update(batch, iteration=0)

    assert metrics["log_prob_delta_max"] < 1e-6


@pytest.mark.parametrize("algorithm", ["grpo", "grpo-guard", "awm"])
def test_a_pass_before_the_update_gives_what_the_one_that_trains_gives(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So in an iteration's first update, whose policy is the one that trains, there is none."""
    model, looks = make_model(), 0
    batch, settings = make_batch(model), TrainSection(algorithm=algorithm, micro_batch=4)
    before = model.predict

    def predict(*arguments: Any) -> Tensor:
        nonlocal looks
        looks += 1
        return before(*arguments)

    monkeypatch.setattr(model, "predict", predict)
    metrics, counts = [], []
    for first in (True, False):
        goal = objective(model, settings, batch, seed=0, iteration=0, old=None)
        rows = micro_batches(goal.units, goal.slots, settings.micro_batch, mixed=not settings.is_stepwise)
        looks = 0
        goal.remember(rows, first=first)
        for each in rows:
            goal.loss(each)
        metrics.append(goal.metrics())
        counts.append(looks)

    assert counts[1] == 2 * counts[0]
    assert metrics[0] == metrics[1]
    assert metrics[0]["ratio_mean"] == 1


def test_the_grpo_gradient_is_the_policy_gradient_of_every_sample_and_step() -> None:
    model = make_model()
    batch = make_batch(model)
    assert batch.window_BKNC is not None
    policy = copy.deepcopy(model)

    make_trainer(model, algorithm="grpo", micro_batch=4, max_grad_norm=UNBOUND).update(batch, iteration=0)

    expected = policy_gradient(policy, batch, range(*WINDOW))
    assert (gradient_of(model) - expected).norm() < 1e-4 * expected.norm()


def test_grpo_trains_on_as_many_of_the_stochastic_steps_as_the_settings_say_others_in_other_iterations() -> None:
    used = []
    for iteration in range(6):
        model = make_model()
        batch = make_batch(model)
        policy = copy.deepcopy(model)
        settings: dict[str, Any] = {"algorithm": "grpo", "max_grad_norm": UNBOUND, "steps_used": 1, "parts": 3}
        metrics = make_trainer(model, **settings).update(batch, iteration=iteration)
        found = gradient_of(model)
        for step in range(*WINDOW):
            expected = policy_gradient(copy.deepcopy(policy), batch, [step])
            if (found - expected).norm() < 1e-4 * expected.norm():
                used.append(step)
        assert metrics["log_prob_delta_max"] < 1e-4  # of the steps that were trained on

    assert len(used) == 6
    assert set(used) == set(range(*WINDOW))


def policy_gradient(policy: TinyText, batch: TrainingBatch, steps: Sequence[int]) -> Tensor:
    """At ratio 1 the gradient is that of -mean(A log p), here one step at a time in the form of Flow-GRPO."""
    assert batch.window_BKNC is not None
    for b, advantage in enumerate(ADVANTAGES):
        for step in steps:
            t, dt = batch.sigmas[step], batch.sigmas[step + 1] - batch.sigmas[step]
            x, x_next = batch.window_BKNC[b : b + 1, step], batch.window_BKNC[b : b + 1, step + 1]
            v = policy.velocity(x, torch.tensor([t]), batch.conditioning.rows([b]), guidance=1.0, **SIZE)
            capped = batch.sigmas[1] if t == 1 else t
            g = NOISE_LEVEL * math.sqrt(t / (1 - capped))
            mean = x + (v + g**2 / (2 * t) * (x + (1 - t) * v)) * dt
            log_prob = torch.distributions.Normal(mean, g * math.sqrt(-dt)).log_prob(x_next).mean()
            (-advantage * log_prob / (len(ADVANTAGES) * len(steps))).backward()
    return gradient_of(policy)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_any_number_of_parts_gives_the_gradient_of_the_whole_batch(algorithm: str, kl: float) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "kl": kl, "micro_batch": 2, "max_grad_norm": UNBOUND}
    gradients, metrics = [], []
    for parts in (1, 2, 4, 6):
        model = make_model()
        batch = make_batch(model)
        metrics.append(make_trainer(model, parts=parts, **settings).update(batch, iteration=3))
        gradients.append(gradient_of(model))

    for gradient, measured in zip(gradients[1:], metrics[1:], strict=True):
        assert (gradient - gradients[0]).norm() < 1e-4 * gradients[0].norm()
        assert measured == pytest.approx(metrics[0], rel=1e-3, abs=1e-6)


EACH: dict[str, dict[str, Any]] = {
    "nft": {},
    "nft-copy": {"algorithm": "nft", "old_decay": "copy"},
    "grpo": {},
    "grpo-guard": {},
    "awm": {},
    "dpo": {"dpo_pairs": 2},
}


@pytest.mark.parametrize(("name", "updates"), [("nft", 1), *((name, 2) for name in EACH)])
def test_parts_computed_anywhere_in_any_order_give_the_bits_of_one_process(name: str, updates: int) -> None:
    settings: dict[str, Any] = {
        "algorithm": name,
        "kl": 0.1,
        "updates": updates,
        "micro_batch": 5,
        "timesteps": 2,
    } | EACH[name]
    here, there = make_model(), [make_model(), make_model()]
    batch = replace(make_batch(here), groups_B=(0, 0, 0, 1, 1, 1), log_prob_BS=None)
    start = weights_of(here)
    for parts in (1, 3, len(PROMPTS)):
        for model in (here, there[0]):
            model.load_trainable(start)
        trainer, elsewhere = (make_trainer(model, parts=parts, **settings) for model in (here, there[0]))
        for iteration in range(2 if parts == 3 else 1):
            expected = trainer.update(batch, iteration=iteration)
            found = share_out(elsewhere, there, batch, iteration, TrainSection(parts=parts, **settings))

            assert found == expected
            assert equal(weights_of(there[0]), weights_of(here))
            assert equal(elsewhere.state(), trainer.state())


@pytest.mark.parametrize(("name", "rank"), [("nft", 0), *((name, 4) for name in EACH)])
def test_captured_passes_train_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, rank: int) -> None:
    monkeypatch.setattr(captured, "Graphs", Repeats)
    settings: dict[str, Any] = {"algorithm": name, "kl": 0.1, "micro_batch": 4, "lora_rank": rank} | EACH[name]
    plain, repeated = (make_model(rank=rank) for _ in range(2))
    batch = replace(make_batch(plain), groups_B=(0, 0, 0, 1, 1, 1), log_prob_BS=None)
    trainers = [make_trainer(model, parts=2, updates=2, **settings) for model in (plain, repeated)]
    for iteration in range(2):
        expected = trainers[0].update(batch, iteration=iteration)
        with repeated.capturing():
            found = trainers[1].update(batch, iteration=iteration)

        assert found == expected
        assert equal(weights_of(repeated), weights_of(plain))
    assert any(repeated._captured._known_learning.values())


def share_out(
    trainer: Trainer, models: list[TinyText], batch: TrainingBatch, iteration: int, settings: TrainSection
) -> dict[str, float]:
    """An iteration, as several machines do it: parts from the last to the first, each on another model."""
    pairs = settings.dpo_pairs if settings.algorithm == "dpo" else 0
    cut = Cut(parts=settings.parts, updates=settings.updates, prompts=2, seeds=3, pairs=pairs, seed=5)
    start, old = weights_of(models[0]), trainer.old()
    updates, norms = [], []
    for u in range(settings.updates):
        current, made = weights_of(models[0]), {}
        for part in reversed(range(cut.count)):
            model = models[part % len(models)]
            model.load_trainable(start)
            values = None if old is None else [parameter.detach().clone() for parameter in model.parameters()]
            if old is not None and values is not None:
                with model.standing_in(values):
                    model.load_trainable(old)
            chosen = some_of(batch, cut.positions(iteration, u, part, ADVANTAGES.tolist(), (0, 0, 0, 1, 1, 1)))
            made[part] = part_gradient(
                model, settings, chosen, seed=5, iteration=iteration, old=values, current=current if u else None
            )
        parts = [made[part] for part in range(cut.count)]
        models[0].load_trainable(current)
        tensors = [part.tensors for part in parts]
        norms.append(trainer.step(sum(part.rows for part in parts), tensors, iteration=iteration, update=u))
        updates.append([(part.rows, part.loss, part.metrics) for part in parts])
    return trainer.finish(updates, norms, iteration=iteration)


@given(st.lists(st.integers(0, 2**24), min_size=1, max_size=300))
def test_the_bits_of_a_sum_do_not_depend_on_its_slices(drawn: list[int]) -> None:
    values = np.random.Generator(np.random.Philox(len(drawn))).normal(size=len(drawn)).astype(np.float32)
    parts = [
        {"0": value, "1": value} if number % 3 else {"0": value} for number, value in zip(drawn, values, strict=True)
    ]
    at_once = tree_sum(parts)

    slices = [tree_sum([{name: part[name] for name in (each,) if name in part} for part in parts]) for each in "01"]

    assert tree_sum(slices) == at_once
    assert at_once["0"] == pytest.approx(float(values.astype(np.float64).sum()), abs=1e-3)


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=80), slices=st.integers(1, SLICES_MAX))
def test_slices_have_every_parameter_once_and_about_as_many_numbers_each(sizes: list[int], slices: int) -> None:
    found = sliced(sizes, slices)

    assert [at for each in found for at in each] == list(range(len(sizes)))
    assert len(found) == slices
    assert max(sum(sizes[at] for at in each) for each in found) <= sum(sizes) / slices + max(sizes)


@given(parts=st.integers(1, 1024), workers=st.integers(0, 2000))
def test_gradients_are_kept_in_slices_where_an_update_is_sooner_done_so(parts: int, workers: int) -> None:
    slices = best_slices(parts, workers)

    assert 1 <= slices <= max(1, workers)
    assert slices == 1 or (parts + 1) / slices + 1 + ADD_COST < parts
    assert slices > 1 or workers < 2 or parts < 8


@given(
    prompts=st.integers(1, 12), seeds=st.integers(2, 6), parts=st.integers(1, 12), updates=st.integers(1, 3),
    pairs=st.integers(0, 2),
)  # fmt: skip
def test_every_sample_is_in_one_part_of_one_update(
    prompts: int, seeds: int, parts: int, updates: int, pairs: int
) -> None:
    assume(updates <= prompts * seeds)  # settings with more are refused
    cut = Cut(parts=parts, updates=updates, prompts=prompts, seeds=seeds, pairs=pairs, seed=3)
    groups = [prompt for prompt in range(prompts) for _ in range(seeds)]
    advantages = [float((7 * at) % 11) for at in range(len(groups))]

    found = [cut.positions(4, u, part, advantages, groups) for u in range(updates) for part in range(cut.count)]

    if pairs and updates > 1:
        units = preference_pairs(advantages, groups, pairs_max=pairs)
        assert sorted(sample for part in found for sample in part) == sorted(chain(*units))
        assert [pair for part in found for pair in units if pair[0] in part and pair[1] not in part] == []
    else:
        assert sorted(sample for part in found for sample in part) == list(range(len(groups)))
        assert max(map(len, found)) - min(map(len, found)) <= (seeds if cut.count <= prompts else 1)
    if updates == 1:
        chunks = [prompt for chunk in cut.chunks for prompt in chunk]
        assert chunks == list(range(prompts))
        for part, samples in enumerate(found):
            ready = {prompt for chunk in cut.needs(part) for prompt in cut.chunks[chunk]}
            assert {groups[sample] for sample in samples} <= ready


def test_a_cut_has_pairs_only_where_these_are_trained_on_and_knows_the_settings_of_training(tmp_path: Path) -> None:
    def cut(**train: Any) -> Cut:
        data = {"train_prompts": "a", "validation_prompts": "b"}
        return Cut.of(config.resolve({"data": data, "train": train}, tmp_path))

    assert (cut().pairs, cut(algorithm="dpo", dpo_pairs=2).pairs) == (0, 2)
    assert cut().settings == cut().settings != cut(learning_rate=1e-5).settings


@pytest.mark.parametrize("algorithm", ["nft", "grpo", "grpo-guard", "awm"])
def test_no_two_passes_follow_each_other_without_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """In a later update, those of the policy that the iteration started from come first, for all rows of the part."""
    model, seen = make_model(), []
    batch, predict = make_batch(model), model.predict

    def seen_predict(*arguments: Any) -> Tensor:
        seen.append("pass")
        return predict(*arguments)

    monkeypatch.setattr(model, "predict", seen_predict)
    part_gradient(
        model,
        TrainSection(algorithm=algorithm, micro_batch=2),
        batch,
        seed=0,
        iteration=0,
        old=None,
        current=weights_of(model),
        on_pass=lambda: seen.append("sign"),
    )

    assert seen == ["sign", "pass"] * 12


def test_a_part_that_is_called_off_leaves_no_gradients_in_memory() -> None:
    model, passes = make_model(), iter(range(3))

    def called_off() -> None:
        if next(passes) == 2:
            raise Interrupted("the gang broke")

    with pytest.raises(Interrupted):
        part_gradient(
            model,
            TrainSection(micro_batch=4),
            make_batch(model, sampler="ode"),
            seed=0,
            iteration=0,
            old=None,
            on_pass=called_off,
        )

    assert all(parameter.grad is None for parameter in model.parameters())


def test_grpo_clamps_advantages_to_their_limit() -> None:
    limit, gradients = 0.5, []

    for advantages in (ADVANTAGES, ADVANTAGES.clip(-limit, limit)):
        model = make_model()
        batch = replace(make_batch(model), advantages_B=advantages)
        make_trainer(model, algorithm="grpo", advantage_clip=limit).update(batch, iteration=0)
        gradients.append(gradient_of(model))

    assert torch.equal(gradients[0], gradients[1])


def test_every_nft_update_measures_against_the_policy_that_the_iteration_started_from() -> None:
    model = make_model()
    batch = make_batch(model, sampler="ode")
    start, policy = copy.deepcopy(model), copy.deepcopy(model)
    settings: dict[str, Any] = {"updates": 2, "timesteps": 2, "max_grad_norm": UNBOUND, "nft_beta": 0.5}
    settings |= {"old_decay": "copy", "levels": "uniform"}
    seed, iteration = 5, 3

    make_trainer(model, seed=seed, micro_batch=4, **settings).update(batch, iteration=iteration)

    # The same two updates, one row at a time; draws are Philox keyed by (seed, iteration), counted by sample and slot.
    def stream(*counter: int) -> np.random.Generator:
        words = np.array([0, *counter, 1], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=seed + (iteration << 64), counter=words))

    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4)
    for samples in stream(0, 0).permutation(6).reshape(2, 3):
        optimizer.zero_grad()
        for b in samples.tolist():
            for slot in range(2):
                draws = stream(slot, b + 1)
                t = torch.tensor([1 - draws.random()]).float()
                clean = batch.clean_BNC[b : b + 1]
                noise = torch.from_numpy(draws.standard_normal(clean.shape, dtype=np.float32))
                x_t = (1 - t) * clean + t * noise
                args: dict[str, Any] = {"guidance": 1.0, **SIZE}
                v = policy.velocity(x_t, t, batch.conditioning.rows([b]), **args)
                v_old = start.velocity(x_t, t, batch.conditioning.rows([b]), **args)
                advantage = torch.tensor(ADVANTAGES[b : b + 1])
                loss = nft_loss(v, v_old, x_t, clean, t, advantage, beta=0.5, advantage_clip=5.0)
                (loss / 6).backward()  # 3 samples x 2 noise levels in an update
        optimizer.step()
    expected = gradient_of(policy)
    assert (gradient_of(model) - expected).norm() < 1e-3 * expected.norm()


def test_nft_keeps_the_velocities_of_a_whole_part_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(Tensor):
        def cpu(self, *_: Any, **__: Any) -> Tensor:
            return self.as_subclass(Tensor)

    model = make_model()
    settings = TrainSection(old_decay="copy", micro_batch=4)
    goal = Nft(model, settings, make_batch(model, sampler="ode"), seed=0, iteration=0, old=None)
    rows = micro_batches(goal.units, goal.slots, settings.micro_batch, mixed=True)
    velocity = goal._velocity
    monkeypatch.setattr(goal, "_velocity", lambda at, rows: velocity(at, rows).as_subclass(OnDevice))

    goal.remember(rows, first=False)

    assert [type(kept) for kept in goal._v_old.values()] == [Tensor] * len(rows)


@pytest.mark.parametrize("rank", [0, 4])
def test_nft_contrasts_with_the_older_policy_that_sampled(rank: int) -> None:
    model = make_model(rank=rank)
    settings: dict[str, Any] = {"old_decay": 0.75, "nft_beta": 0.1, "timesteps": 3, "learning_rate": 1e-2}
    trainer = make_trainer(model, seed=5, micro_batch=4, max_grad_norm=UNBOUND, **settings)
    trainer.update(make_batch(model, sampler="ode"), iteration=0)
    older, policy = copy.deepcopy(model), copy.deepcopy(model)
    old = trainer.old()
    assert old is not None
    older.load_trainable(old)
    batch = make_batch(older, sampler="ode")

    trainer.update(batch, iteration=1)

    # One row at a time. A sample's levels are the sampler's, in an order drawn with the key (seed, iteration).
    def stream(*counter: int) -> np.random.Generator:
        words = np.array([0, *counter, 1], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=5 + (1 << 64), counter=words))

    for p in policy.parameters():
        p.grad = None
    for b, advantage in enumerate(ADVANTAGES):
        order = stream(2**32, b + 1).permutation(STEPS)[:3]
        for slot, level in enumerate(order):
            draws = stream(slot, b + 1)
            draws.random()
            t, clean = torch.tensor([batch.sigmas[level]]), batch.clean_BNC[b : b + 1]
            noise = torch.from_numpy(draws.standard_normal(clean.shape, dtype=np.float32))
            x_t = (1 - t) * clean + t * noise
            args: dict[str, Any] = {"guidance": 1.0, **SIZE}
            v = policy.velocity(x_t, t, batch.conditioning.rows([b]), **args)
            with torch.no_grad():
                v_old = older.velocity(x_t, t, batch.conditioning.rows([b]), **args)
            better = 0.1 * v + 0.9 * v_old
            worse = 1.1 * v_old - 0.1 * v
            errors = [(x_t - t * each - clean) for each in (better, worse)]
            pulls = [e.square().mean() / e.detach().abs().mean() for e in errors]
            share = 0.5 + 0.5 * advantage / 5
            ((share * pulls[0] + (1 - share) * pulls[1]) * 5 / 0.1 / (3 * len(ADVANTAGES))).backward()
    expected = gradient_of(policy)
    assert (v - v_old).abs().max() > 1e-4
    assert (gradient_of(model) - expected).norm() < 1e-3 * expected.norm()


def test_the_old_policy_follows_at_the_end_of_each_iteration() -> None:
    model, decay = make_model(), 0.75
    batch = make_batch(model, sampler="ode")
    trainer = make_trainer(model, old_decay=decay, updates=2)

    expected = weights_of(model)
    for iteration in range(2):
        trainer.update(batch, iteration=iteration)
        expected = {name: decay * old + (1 - decay) * model.trainable()[name] for name, old in expected.items()}

    old = trainer.old()
    assert old is not None
    for name, value in expected.items():
        torch.testing.assert_close(old[name], value, atol=1e-6, rtol=0)
    assert make_trainer(model, old_decay="copy").old() is None
    assert make_trainer(model, algorithm="grpo", old_decay=decay).old() is None


def test_the_old_policy_follows_by_the_decay_of_all_updates_so_far() -> None:
    model = make_model()
    trainer, before = make_trainer(model, old_decay="linear", updates=2, learning_rate=0.1), weights_of(model)
    trainer.step(1, [ones_of(model)], iteration=99, update=1)

    trainer.finish([[(1, 0.0, {})]], [1.0], iteration=99)

    old = trainer.old()
    assert old is not None
    for name, value in before.items():  # 0.001 of 200 updates
        torch.testing.assert_close(old[name], 0.2 * value + 0.8 * model.trainable()[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("updates", [0, 1, 74, 75, 76, 100, 208, 209, 500, 600])
def test_the_decays_of_the_old_policy_are_those_of_the_published_code(updates: int) -> None:
    def published(step: int, flat: int, uprate: float, uphold: float) -> float:
        return 0.0 if step < flat else min((step - flat) * uprate, uphold)

    assert old_decay("linear", updates) == published(updates, 0, 0.001, 0.5)
    assert old_decay("delayed", updates) == published(updates, 75, 0.0075, 0.999)
    assert (old_decay("copy", updates), old_decay(0.3, updates)) == (0, 0.3)


@pytest.mark.parametrize("slots", [STEPS, 2 * STEPS + 1])
def test_each_of_the_samplers_levels_is_drawn_before_any_is_again(slots: int) -> None:
    model = make_model()
    batch = make_batch(model, sampler="ode")
    everyone = tuple(range(len(PROMPTS)))

    rows = [Rows(everyone, (slot,) * len(everyone)) for slot in range(slots)]
    drawn = torch.stack([noised(batch, each, "sampler", (5, 0), model).sigma_R for each in rows], dim=1)

    visited = torch.tensor(batch.sigmas[:-1])
    for first in range(0, slots - STEPS + 1, STEPS):
        for levels in drawn[:, first : first + STEPS]:
            assert torch.equal(levels.sort().values, visited.sort().values)
    assert len({tuple(levels) for levels in drawn.tolist()}) > 1  # in an order of each sample's own


def ones_of(model: TinyText) -> dict[str, Tensor]:
    """A gradient of all parameters."""
    return {str(at): torch.ones_like(parameter) for at, parameter in enumerate(model.parameters())}


@pytest.mark.parametrize(
    ("iteration", "update", "share"), [(0, 0, 1 / 4), (0, 1, 2 / 4), (1, 0, 3 / 4), (1, 1, 1), (2, 0, 1)]
)
def test_the_learning_rate_rises_over_the_first_updates(iteration: int, update: int, share: float) -> None:
    model = make_model()
    trainer, before = make_trainer(model, warm_up=4, updates=2, weight_decay=0, learning_rate=1e-2), weights_of(model)

    trainer.step(1, [ones_of(model)], iteration=iteration, update=update)

    for name, value in weights_of(model).items():  # AdamW's first steps are as long as the learning rate
        torch.testing.assert_close(before[name] - value, torch.full_like(value, share * 1e-2), rtol=1e-3, atol=1e-6)


def test_weights_decay_as_the_settings_say() -> None:
    moved = []
    for decay in (0.0, 0.5):
        model = make_model()
        make_trainer(model, weight_decay=decay, learning_rate=1e-2).step(1, [ones_of(model)], iteration=0, update=0)
        moved.append(weights_of(model))

    for name, value in weights_of(make_model()).items():
        torch.testing.assert_close(moved[0][name] - moved[1][name], 1e-2 * 0.5 * value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_size_of_micro_batches_changes_nothing_but_rounding(algorithm: str) -> None:
    gradients, losses = [], []
    for micro_batch in (64, 4, 1):
        model = make_model()
        trainer = make_trainer(model, algorithm=algorithm, micro_batch=micro_batch, max_grad_norm=UNBOUND)
        losses.append(trainer.update(make_batch(model), iteration=0)["loss"])
        gradients.append(gradient_of(model))

    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert (gradient - gradients[0]).norm() < 1e-4 * gradients[0].norm()
        assert loss == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, algorithm: str, rank: int) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "updates": 2, "kl": 0.1, "ema_decay": 0.9, "micro_batch": 2}
    batch = make_batch(make_model(rank=rank))
    batch = replace(batch, log_prob_BS=None)  # the second iteration trains on the samples of the first
    unbroken, broken = make_model(rank=rank), make_model(rank=rank)
    trainer = make_trainer(unbroken, **settings)

    first_half = make_trainer(broken, **settings)
    first_half.update(batch, iteration=0)
    save_file(first_half.state(), tmp_path / "optimizer.safetensors")
    save_file(weights_of(broken), tmp_path / "weights.safetensors")
    torch.manual_seed(99)  # another process has another position of the global generator
    resumed = make_model(rank=rank)
    resumed.load_trainable(load_file(tmp_path / "weights.safetensors"))
    second_half = make_trainer(resumed, **settings)
    second_half.load_state(load_file(tmp_path / "optimizer.safetensors"), first_half.old())
    metrics = second_half.update(batch, iteration=1)

    trainer.update(batch, iteration=0)
    assert trainer.update(batch, iteration=1) == metrics
    assert equal(weights_of(unbroken), weights_of(resumed))
    assert equal(trainer.state(), second_half.state())
    assert equal(trainer.old() or {}, second_half.old() or {})


def test_the_seed_and_the_iteration_decide_what_is_drawn() -> None:
    batch = make_batch(make_model(), sampler="ode")

    def loss(seed: int, iteration: int) -> float:
        return make_trainer(make_model(), seed=seed).update(batch, iteration=iteration)["loss"]

    assert loss(5, 0) == loss(5, 0)
    assert len({loss(5, 0), loss(5, 1), loss(6, 0)}) == 3


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_distance_to_the_reference_is_zero_at_the_start_and_grows(algorithm: str, rank: int) -> None:
    model = make_model(rank=rank)
    batch = replace(make_batch(model), log_prob_BS=None)
    trainer = make_trainer(model, algorithm=algorithm, kl=0.5)

    first = trainer.update(batch, iteration=0)
    second = trainer.update(batch, iteration=1)

    assert first["kl"] == 0
    assert second["kl"] > 0


@pytest.mark.parametrize("algorithm", ["nft", "grpo", "grpo-guard", "awm"])
def test_kl_is_added_to_the_loss_with_its_weight(algorithm: str) -> None:
    start = make_model()
    batch = replace(make_batch(start), log_prob_BS=None)
    make_trainer(start, algorithm=algorithm).update(batch, iteration=0)
    moved = weights_of(start)

    def metrics(kl: float) -> dict[str, float]:
        model = make_model()
        model.load_trainable(moved)
        return make_trainer(model, algorithm=algorithm, kl=kl).update(batch, iteration=1)

    free, bound = metrics(0), metrics(1000)  # so much that the term is seen beside the policy's loss
    assert "kl" not in free
    assert bound["loss"] - free["loss"] == pytest.approx(1000 * bound["kl"], rel=1e-3)


@pytest.mark.parametrize("algorithm", ["nft", "awm"])
def test_kl_pulls_the_policy_to_a_reference_that_stands_still(algorithm: str) -> None:
    model, start = make_model(), make_model()
    batch = replace(make_batch(model, sampler="ode"), advantages_B=np.zeros(len(PROMPTS)))
    settings: dict[str, Any] = {"algorithm": algorithm, "kl": 0.5, "timesteps": 1, "old_decay": "copy"}
    trainer = make_trainer(model, max_grad_norm=UNBOUND, **settings)
    trainer.step(1, [ones_of(model)], iteration=0, update=0)
    policy = copy.deepcopy(model)

    trainer.update(batch, iteration=1)

    for p in policy.parameters():
        p.grad = None
    for b in range(len(PROMPTS)):
        at = noised(batch, Rows((b,), (0,)), "sampler", (5, 1), policy)
        v, v_start = (
            each.velocity(at.x_RNC, at.sigma_R, batch.conditioning.rows([b]), guidance=1.0, **SIZE)
            for each in (policy, start)
        )
        (0.5 * (v - v_start.detach()).square().mean() / len(PROMPTS)).backward()
    expected = gradient_of(policy)
    assert (gradient_of(model) - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_make_good_samples_likelier_and_bad_ones_less_so(algorithm: str) -> None:
    model = make_model()
    batch = replace(make_batch(model), log_prob_BS=None)
    likelihood: Callable[[TinyText, TrainingBatch], Tensor] = step_log_prob if algorithm == "grpo" else minus_flow_error
    before = likelihood(model, batch)
    # Full advantages; a wide range so that no ratio is clipped on the way; levels enough to speak for all of them.
    batch = replace(batch, advantages_B=np.array([5.0, -5.0, 5.0, -5.0, 5.0, -5.0]))
    trainer = make_trainer(model, algorithm=algorithm, learning_rate=1e-4, clip_range=0.5, timesteps=16)

    for iteration in range(5):
        trainer.update(batch, iteration=iteration)

    change = likelihood(model, batch) - before
    assert change[0::2].min() > 0
    assert change[1::2].max() < 0


@torch.no_grad()
def step_log_prob(model: TinyText, batch: TrainingBatch) -> Tensor:
    """Log-probability of each sample's first stochastic step."""
    assert batch.window_BKNC is not None
    x, x_next = batch.window_BKNC[:, 0], batch.window_BKNC[:, 1]
    v = model.velocity(x, torch.ones(len(x)), batch.conditioning, guidance=1.0, **SIZE)
    cap = batch.sigmas[1]
    return sde_step(x, v, 1.0, cap, noise_level=NOISE_LEVEL, sigma_cap=cap, x_next_BNC=x_next)[1]


@torch.no_grad()
def minus_flow_error(model: TinyText, batch: TrainingBatch) -> Tensor:
    """The flow's bound on the likelihood, less its constant: minus the velocity's error, over many noises."""
    errors = []
    for level in range(1, 17):
        noise, t = initial_noise([1000 + level] * len(PROMPTS), *batch.clean_BNC.shape[1:]), level / 16
        x_t = (1 - t) * batch.clean_BNC + t * noise
        v = model.velocity(x_t, torch.full((len(PROMPTS),), t), batch.conditioning, guidance=1.0, **SIZE)
        errors.append((v - (noise - batch.clean_BNC)).square().mean(dim=(1, 2)))
    return -torch.stack(errors).mean(0)


def test_weights_that_did_not_sample_are_refused_before_any_update() -> None:
    model = make_model()
    batch = make_batch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    before = weights_of(model)

    with pytest.raises(SpotlightError, match=r"iteration 3: .*train\.ratio_tolerance is 0\.001.*weights version"):
        make_trainer(model, algorithm="grpo", ratio_tolerance=1e-3).update(batch, iteration=3)

    assert equal(weights_of(model), before)


@pytest.mark.parametrize("change", [math.nan, 0.5, -0.5])
def test_a_log_prob_that_is_another_or_not_a_number_is_refused(change: float) -> None:
    model = make_model()
    batch = make_batch(model, window=(1, 3))
    assert batch.log_prob_BS is not None
    batch.log_prob_BS[4, 1] += change

    with pytest.raises(SpotlightError, match=r"sample 4, step 2: .* from the worker"):
        make_trainer(model, algorithm="grpo").update(batch, iteration=0)


def test_metrics_name_only_what_applies() -> None:
    model = make_model()
    batch = make_batch(model)

    nft = make_trainer(model).update(batch, iteration=0)
    grpo = make_trainer(make_model(), algorithm="grpo").update(batch, iteration=0)

    assert nft.keys() == {"loss", "grad_norm", "advantage_max"}
    assert nft["advantage_max"] == 2  # of the worst sample: how far from its group, whichever way
    clipping = {"ratio_mean", "ratio_std", "pg_clipfrac", "pg_clipfrac_higher", "pg_clipfrac_lower", "approx_kl"}
    assert grpo.keys() == nft.keys() | {"log_prob_delta", "log_prob_delta_max"} | clipping
    assert all(type(value) is float for value in (nft | grpo).values())


def test_gradients_are_clipped_to_their_norm_and_reported_before_it() -> None:
    model = make_model()
    limit = 1e-3

    metrics = make_trainer(model, max_grad_norm=limit).update(make_batch(model, sampler="ode"), iteration=0)

    assert metrics["grad_norm"] > limit
    assert gradient_of(model).norm().item() == pytest.approx(limit, rel=1e-3)


def test_the_averaged_weights_follow_every_update() -> None:
    """From the published code's warm-up on: a tenth of the untrained weights stays after the first update."""
    model = make_model()
    trainer, expected = make_trainer(model, ema_decay=0.2, updates=2, learning_rate=1e-2), weights_of(model)

    for number, stays in enumerate((1 / 10, 2 / 11, 0.2)):
        trainer.step(1, [ones_of(model)], iteration=number // 2, update=number % 2)
        expected = {name: stays * old + (1 - stays) * model.trainable()[name] for name, old in expected.items()}

    averaged = trainer.ema()
    assert averaged is not None
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value, atol=1e-6, rtol=0)
    assert make_trainer(model).ema() is None


def test_the_loss_is_a_mean_over_the_rows_of_each_update_and_then_over_updates() -> None:
    updates: list[list[tuple[int, float, dict[str, float]]]] = [
        [(1, 2.0, {}), (3, 6.0, {})],
        [(4, 1.0, {}), (0, 0.0, {})],
    ]

    found = make_trainer(make_model()).finish(updates, [1.0, 4.0], iteration=0)

    assert found == {"loss": ((1 * 2 + 3 * 6) / 4 + 1) / 2, "grad_norm": 2.5}


def test_the_spread_of_parts_that_are_alike_is_zero_however_their_means_are_rounded() -> None:
    assert merged([(3, {"ratio_mean": 0.9, "ratio_std": 0.0}), (4, {"ratio_mean": 0.9, "ratio_std": 0.0})]) == {
        "ratio_mean": pytest.approx(0.9),
        "ratio_std": 0,
    }


def test_parameters_without_a_gradient_have_no_state_and_need_none() -> None:
    model = make_model(rank=4)
    trainer = make_trainer(model)
    trainer.update(make_batch(model, sampler="ode"), iteration=0)

    state = trainer.state()

    trained = {name.split(".")[1] for name in state}
    without = [str(i) for i, parameter in enumerate(model.parameters()) if parameter.grad is None]
    assert without  # text branch of the last block
    assert trained == {str(i) for i in range(len(model.parameters()))} - set(without)
    fresh = make_trainer(make_model(rank=4))
    fresh.load_state(state, trainer.old())
    assert equal(fresh.state(), state)


def test_what_a_version_keeps_of_a_trainer_takes_no_memory_beside_it() -> None:
    """Where all weights are trained, copies of them would not fit a device that holds what training keeps."""
    model = make_model()
    trainer = make_trainer(model, ema_decay=0.5, old_decay=0.5)
    trainer.update(make_batch(model, sampler="ode"), iteration=0)

    kept, again = ({**trainer.state(), **(trainer.old() or {})} for _ in range(2))

    assert {name.partition(".")[0] for name in kept} > {"adam", "ema"}
    assert all(value.data_ptr() == again[name].data_ptr() for name, value in kept.items())


def test_state_of_another_model_or_without_the_averages_is_refused() -> None:
    model = make_model(rank=4)
    trainer = make_trainer(model)
    trainer.update(make_batch(model, sampler="ode"), iteration=0)
    state = trainer.state()

    with pytest.raises(SpotlightError, match=r"parameter 0 was saved with shape \(4, .*train\.lora_rank"):
        make_trainer(make_model(rank=2), old_decay="copy").load_state(state)
    with pytest.raises(SpotlightError, match=r"0 averaged weights were saved and train\.ema_decay = 0\.5"):
        make_trainer(make_model(rank=4), ema_decay=0.5, old_decay="copy").load_state(state)


@pytest.mark.parametrize("name", ["grpo", "grpo-guard", "awm", "dpo"])
def test_samples_without_an_advantage_add_nothing_to_a_gradient(name: str) -> None:
    model = make_model()
    batch = replace(make_batch(model), groups_B=(0, 0, 0, 1, 1, 1))
    batch.advantages_B[3:] = 0.0
    settings = TrainSection(lora_rank=4, algorithm=name, **EACH[name])
    made = [
        part_gradient(model, settings, given, seed=5, iteration=0, old=None)
        for given in (batch, some_of(batch, (0, 1, 2)))
    ]

    for parameter in made[0].tensors:
        assert made[0].tensors[parameter] == pytest.approx(made[1].tensors[parameter], abs=1e-6)
    assert any(made[1].tensors[parameter].abs().max() > 1e-4 for parameter in made[1].tensors)


def test_grpo_without_stochastic_steps_is_refused() -> None:
    model = make_model()

    with pytest.raises(SpotlightError, match=r'sampler "ode" left none: set rollout\.sampler'):
        make_trainer(model, algorithm="grpo").update(make_batch(model, sampler="ode"), iteration=0)


class Shrunk:
    """An objective whose losses are so many times smaller, as those of larger images or parts are."""

    def __init__(self, whole: Objective, times: float) -> None:
        self._whole, self._times = whole, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def loss(self, rows: Rows) -> Tensor:
        return self._whole.loss(rows) / self._times


def test_a_float16_network_has_gradients_however_many_rows_their_part_has(monkeypatch: pytest.MonkeyPatch) -> None:
    times, losses = 2.0**15, list[float]()
    settings, found = TrainSection(lora_rank=4), {}
    for dtype in (torch.float32, torch.float16):
        model = TinyText.load("", torch.device("cpu"), dtype)
        model.make_trainable(rank=4, alpha=0, seed=1)
        batch = make_batch(model, sampler="ode")
        with monkeypatch.context() as patch:
            patch.setattr(gradients, "objective", lambda *args, **named: Shrunk(objective(*args, **named), times))
            made = part_gradient(model, settings, batch, seed=5, iteration=0, old=None)
        losses.append(made.loss)
        found[dtype] = torch.cat([made.tensors[name].flatten() for name in sorted(made.tensors)]) * times

    cosine = torch.nn.functional.cosine_similarity(found[torch.float16], found[torch.float32], dim=0)
    assert cosine > 0.99
    assert found[torch.float16].norm() == pytest.approx(found[torch.float32].norm().item(), rel=0.05)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(value: float) -> None:
    model = make_model()
    before, gradient = weights_of(model), ones_of(model)
    gradient["2"].view(-1)[0] = value

    with pytest.raises(SpotlightError, match=f"iteration 4, update 0: the gradient's norm is {value}"):
        make_trainer(model).step(1, [gradient], iteration=4, update=0)

    assert equal(weights_of(model), before)


def test_samples_that_are_all_alike_are_nothing_to_learn_from() -> None:
    model = make_model()
    batch = replace(make_batch(model, sampler="ode"), advantages_B=np.zeros(len(PROMPTS)))
    before = weights_of(model)

    metrics = make_trainer(model, ema_decay=0.5).update(batch, iteration=0)

    assert metrics["grad_norm"] == 0
    assert equal(weights_of(model), before)


def test_an_update_learns_from_all_its_rows_if_one_part_can_be_learnt_from_or_the_policy_is_held_back() -> None:
    alike, apart = {"advantage_max": 0.0}, {"advantage_max": 0.5}

    assert rows_to_learn_from(TrainSection(), [(4, alike), (2, apart), (0, {})]) == 6
    assert rows_to_learn_from(TrainSection(), [(4, alike), (2, alike), (0, {})]) == 0
    assert rows_to_learn_from(TrainSection(kl=0.1), [(4, alike), (2, alike), (0, {})]) == 6
