"""The model of learning: its rewards have the statistics that were measured, and depend on nothing but their names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config import SimulationSection
from spotlight.device import learning_model
from spotlight.device.learning_model import Array, after, captured, difficulty, rewards, unexplored_variance
from spotlight.plan.bandit import rank_correlation
from spotlight.plan.subset import max_variance_subset

PROMPTS = 4000
GAIN = SimulationSection().gain


def drawn(score: float, count: int, *, stale: bool = False, prompts: int = PROMPTS) -> Array:
    """Rewards of so many seeds of each prompt, (P, N)."""
    return np.array(
        [rewards(score, seeds_of(prompt, count), run_seed=1, prompt=prompt, stale=stale) for prompt in range(prompts)]
    )


def seeds_of(prompt: int, count: int) -> Sequence[int]:
    return range(1000 * prompt, 1000 * prompt + count)


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20, unique=True),
    run_seed=st.integers(0, 2**63 - 1),
    prompt=st.integers(0, 10**6),
    stale=st.booleans(),
)
def test_a_reward_does_not_depend_on_its_batch(seeds: list[int], run_seed: int, prompt: int, stale: bool) -> None:
    together = rewards(0.6, seeds, run_seed=run_seed, prompt=prompt, stale=stale)

    alone = [rewards(0.6, [seed], run_seed=run_seed, prompt=prompt, stale=stale)[0] for seed in reversed(seeds)]

    assert together.tolist() == alone[::-1]


def test_the_numbers_that_draws_are_made_of_are_those_of_splitmix64() -> None:
    """What was recorded rests on them. These are the first of Java's ``SplittableRandom(0)``."""
    states = np.arange(1, 4, dtype=np.uint64) * learning_model._STRIDE

    words = learning_model._hashed(states).tolist()

    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_another_prompt_run_or_seed_is_another_draw() -> None:
    seeds = range(64)
    first = rewards(0.5, seeds, run_seed=0, prompt=0)

    others = [
        rewards(0.5, seeds, run_seed=1, prompt=0),
        rewards(0.5, seeds, run_seed=0, prompt=1),
        rewards(0.5, range(64, 128), run_seed=0, prompt=0),
    ]

    assert all((other != first).mean() > 0.3 for other in others)


@pytest.mark.parametrize("score", [0.512, 0.75, 0.9])
def test_rewards_have_the_score_for_their_mean_and_stale_ones_rank_as_measured(score: float) -> None:
    regenerated_PN, explored_PN = drawn(score, 16), drawn(score, 16, stale=True)

    standard_error = 0.5 / regenerated_PN.size**0.5  # at most; prompts, which are spread evenly, add next to nothing
    assert regenerated_PN.mean() == pytest.approx(score, abs=4 * standard_error)
    assert explored_PN.mean() == pytest.approx(score, abs=4 * standard_error)
    correlation = rank_correlation(explored_PN.ravel(), regenerated_PN.ravel())
    assert correlation is not None
    assert 0.75 < correlation < 0.9  # 0.76 to 0.83 in runs of the embedded job, among chosen seeds


def test_the_few_prompts_of_a_validation_have_nearly_the_score_for_their_mean() -> None:
    means = [
        fmean(rewards(0.512, range(2000), run_seed=run, prompt=prompt, held_out=True).mean() for prompt in range(20))
        for run in range(30)
    ]

    assert np.sqrt(np.mean((np.array(means) - 0.512) ** 2)) < 0.02  # 20 independent prompts: 0.04


def test_held_out_prompts_are_others_than_those_of_training() -> None:
    assert difficulty(0, 3) != difficulty(0, 3, held_out=True)


def test_prompts_are_as_unlike_as_the_model_says() -> None:
    hardness = [difficulty(7, prompt) for prompt in range(1000)]

    assert np.mean(hardness) == pytest.approx(0, abs=0.01)
    assert np.std(hardness) == pytest.approx(learning_model.SPREAD, rel=0.02)


def test_seeds_that_nobody_chose_capture_the_unexplored_variance() -> None:
    groups = drawn(0.6, 8).tolist()

    assert captured(0.6, groups) == pytest.approx(1.0, abs=0.03)  # the variance of 4,000 groups of 8 varies by 1 %


def test_the_unexplored_variance_is_that_of_the_draws() -> None:
    within_P = drawn(0.8, 64, prompts=2000).var(axis=1, ddof=1)

    assert unexplored_variance(0.8) == pytest.approx(within_P.mean(), rel=0.03)


@pytest.mark.parametrize("stale", [False, True])
def test_chosen_seeds_capture_more_the_more_there_are_to_choose_from(stale: bool) -> None:
    explored_PN, regenerated_PN = drawn(0.6, 32, stale=stale, prompts=500), drawn(0.6, 32, prompts=500)
    found = []
    for tried in (8, 16, 32):
        chosen = [max_variance_subset(row[:tried], 8) for row in explored_PN]
        groups = [row[indices].tolist() for row, indices in zip(regenerated_PN, chosen, strict=True)]
        found.append(captured(0.6, groups))

    assert all(more > 1.2 * fewer for fewer, more in pairwise(found))


def test_half_of_the_samples_teach_less_than_all_of_them_though_they_vary_more() -> None:
    rows = drawn(0.6, 8, prompts=500).tolist()
    halves = [[row[at] for at in max_variance_subset(row, 4)] for row in rows]

    assert captured(0.6, rows) == captured(0.6, rows, rolled_out=8)
    assert 0.5 * captured(0.6, rows) < captured(0.6, halves, rolled_out=8) < captured(0.6, rows)
    assert captured(0.6, halves) > 1.5 * captured(0.6, rows)  # of four that were all there were


def test_the_model_meets_the_measured_run() -> None:
    score = SimulationSection().start
    for _ in range(16):
        score = after(score, 1.0, gain=GAIN)

    assert score == pytest.approx(0.781, abs=0.005)  # docs/trials.md: 16 iterations, not explored


@pytest.mark.parametrize("gain", [GAIN, 1.0])
def test_a_run_that_has_learnt_all_goes_on(gain: float) -> None:
    score = 0.5
    for _ in range(10_000):
        score = after(score, 1.0, gain=gain)

    assert rewards(score, range(8), run_seed=0, prompt=0).tolist() == [1.0] * 8
    assert captured(score, [[1.0] * 8]) == 0.0


def test_a_sample_alone_teaches_nothing() -> None:
    assert captured(0.5, [[1.0], [0.0]]) == 0.0
