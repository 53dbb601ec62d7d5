"""Which seeds to try and to keep: against brute force, counting, and ranks by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.explore import equal_shares, max_variance_subset, rank_correlation

rewards_of_any_kind = st.one_of(
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9),
)


@given(rewards=rewards_of_any_kind, data=st.data())
def test_no_subset_has_a_larger_variance_than_the_kept_one(rewards: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(rewards)))

    kept = max_variance_subset(rewards, keep)

    best = max(np.var(subset) for subset in combinations(rewards, keep))
    rounding = 1e-12 * np.ptp(rewards) ** 2  # relative to the spread
    assert np.var([rewards[index] for index in kept]) == pytest.approx(best, abs=rounding, rel=1e-12)


@given(rewards=rewards_of_any_kind, data=st.data())
def test_the_kept_are_distinct_ascending_plain_ints(rewards: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(rewards)))

    kept = max_variance_subset(np.array(rewards), keep)

    assert len(set(kept)) == keep
    assert kept == sorted(kept)
    assert all(type(index) is int for index in kept)


def test_extremes_are_kept_wherever_they_stand() -> None:
    rewards = [0.5, 1.0, 0.4, 0.0, 0.6, 0.9, 0.1]

    kept = max_variance_subset(rewards, 4)

    assert kept == [1, 3, 5, 6]


def test_a_large_common_offset_changes_nothing() -> None:
    rewards = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 0.125])  # exact in binary beside the offset
    offset = 2.0**30

    kept = max_variance_subset(rewards + offset, 3)

    assert kept == max_variance_subset(rewards, 3)


def test_among_equal_rewards_the_earlier_candidates_are_kept() -> None:
    assert max_variance_subset([0.1] * 5, 2) == [0, 1]
    assert max_variance_subset([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], 2) == [0, 1]
    assert max_variance_subset([0.5, 0.5, 1.0, 0.5, 0.0, 0.5], 4) == [0, 1, 2, 4]
    assert max_variance_subset([0.0, 1.0, 0.0, 1.0], 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("rewards", "keep", "said"),
    [
        ([1.0, 2.0], 3, "keep = 3 of 2"),
        ([1.0, 2.0], 0, "keep = 0 of 2"),
        ([], 1, "keep = 1 of 0"),
        ([1.0, math.nan], 1, "nan"),
        ([[1.0], [2.0]], 1, "row of finite numbers"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(rewards: list[float], keep: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        max_variance_subset(rewards, keep)


counts = st.integers(1, 7)


@given(prompts=counts, tried=st.integers(1, 40), chunk=st.integers(1, 20), rounds=counts)
def test_the_rounds_together_try_every_candidate_exactly_once(
    prompts: int, tried: int, chunk: int, rounds: int
) -> None:
    shares = [equal_shares(prompts, tried, chunk, rounds, index) for index in range(rounds)]

    dealt = [(p, first + i) for share in shares for p, first, count in share for i in range(count)]
    assert sorted(dealt) == [(p, candidate) for p in range(prompts) for candidate in range(tried)]
    assert all(1 <= count <= chunk for share in shares for _, _, count in share)


@given(prompts=counts, tried=st.integers(1, 40), chunk=st.integers(1, 20), rounds=counts)
def test_wherever_exploration_is_cut_prompts_are_within_a_chunk(
    prompts: int, tried: int, chunk: int, rounds: int
) -> None:
    shares = [equal_shares(prompts, tried, chunk, rounds, index) for index in range(rounds)]

    explored = [0] * prompts
    for share in shares:
        for prompt, _, count in share:
            explored[prompt] += count
            assert max(explored) - min(explored) <= chunk
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_are_dealt_candidates_first() -> None:
    first, second = (equal_shares(2, 5, 3, 2, index) for index in (0, 1))

    assert first == [(0, 0, 3), (1, 0, 3)]
    assert second == [(0, 3, 2), (1, 3, 2)]


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1, 1, 0), (1, 0, 1, 1, 0), (1, 1, 0, 1, 0), (1, 1, 1, 1, 1), (1, 1, 1, 1, -1)]
)
def test_shares_of_nothing_or_of_no_such_round_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"prompts = {arguments[0]}.*round_index = {arguments[4]}"):
        equal_shares(*arguments)


def test_rank_correlation_by_hand() -> None:
    # Without ties it is 1 - 6 sum(d^2) / (n (n^2 - 1)); here d = 0, -1, 1, 0 and n = 4.
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # With ties, ranks 1.5 1.5 3 against 1 2 3: centred (-.5 -.5 1) and (-1 0 1).
    assert rank_correlation([0, 0, 1], [0, 1, 2]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20, unique=True))
def test_only_the_order_counts(values: list[float]) -> None:
    ranks = np.argsort(np.argsort(values))

    assert rank_correlation(values, np.exp(ranks / len(ranks))) == 1
    assert rank_correlation(values, -ranks) == -1


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [2.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0])])
def test_rank_correlation_is_none_where_it_is_undefined(a: list[float], b: list[float]) -> None:
    assert rank_correlation(a, b) is None


def test_rank_correlation_refuses_what_is_not_pairs_of_numbers() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        rank_correlation([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="nan"):
        rank_correlation([1.0, math.nan], [1.0, 2.0])
