"""Which seeds to try and to keep: against brute force, counting, and ranks and budgets by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import pvariance
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.plan.bandit import (
    PROBE_SHARE,
    ROUNDS_MAX,
    affordable,
    allocate,
    captured_variance,
    equal_shares,
    rank_correlation,
    rounds_of,
)
from spotlight.plan.beliefs import FADING, FORGOTTEN_AFTER, GRID_N, Arm, Beliefs, learn
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.plan.worlds import imagine

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


@given(groups=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), max_size=7), data=st.data())
def test_no_other_groups_vary_more_than_those_taken(groups: list[list[float]], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))

    taken = most_varied(groups, count)

    variances = [pvariance(rewards) for rewards in groups]
    assert taken == sorted(set(taken))
    assert len(taken) == min(count, len(groups))
    assert sum(variances[index] for index in taken) == pytest.approx(sum(sorted(variances, reverse=True)[:count]))


def test_a_group_of_which_nothing_is_known_is_better_than_a_flat_one_and_worse_than_a_varied_one() -> None:
    flat, unknown, varied = [1.0, 1.0], [0.5], [0.0, 1.0]

    assert most_varied([flat, unknown, varied], 1) == [2]
    assert most_varied([flat, unknown, varied], 2) == [1, 2]


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


@given(prompts=counts, tried=st.integers(1, 40), chunk=st.integers(1, 20), rounds=counts, keep=st.integers(0, 9))
def test_the_rounds_together_try_every_candidate_exactly_once(
    prompts: int, tried: int, chunk: int, rounds: int, keep: int
) -> None:
    shares = [equal_shares(prompts, tried, chunk, rounds, index, keep=keep) for index in range(rounds)]

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


def test_what_is_trained_on_as_drawn_is_dealt_prompt_by_prompt_and_the_rest_candidates_first() -> None:
    dealt = equal_shares(2, 8, 2, 1, 0, keep=3)

    assert dealt == [(0, 0, 2), (0, 2, 2), (1, 0, 2), (1, 2, 2), (0, 4, 2), (1, 4, 2), (0, 6, 2), (1, 6, 2)]


@given(slots=st.integers(1, 5000), gangs=st.integers(0, 500))
def test_two_rounds_have_work_for_all_who_explore(slots: int, gangs: int) -> None:
    rounds = rounds_of(slots, gangs)

    assert 1 <= rounds <= min(ROUNDS_MAX, slots)
    assert rounds == 1 or 2 * (slots // rounds) >= gangs
    assert rounds == ROUNDS_MAX or slots // (rounds + 1) < gangs / 2 + 1


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


KEEP, CHUNK = 4, 4
ALL_ZERO, ALL_ONE, VARIED = (0.0,) * 32, (1.0,) * 32, (0.3, 0.45, 0.5, 0.7) * 8
RARE = (0.0,) * 7 + (1.0,)
"""One success of the two that the kept four can use."""


def bandit(
    arms: Sequence[Arm],
    beliefs: Beliefs | None = None,
    *,
    iteration: int = 0,
    slots: int = 16,
    later: int = 0,
    candidates: int = 10**6,
    chunk: int = CHUNK,
    complete: int = 0,
    rho: float | None = 1.0,
    seed: int = 0,
) -> list[tuple[int, int, int]]:
    """`allocate` with what most tests do not care about."""
    return allocate(
        arms,
        beliefs or Beliefs(),
        iteration=iteration,
        slots=slots,
        later=later,
        candidates=candidates,
        chunk=chunk,
        keep=KEEP,
        complete=complete,
        rho=rho,
        seed=seed,
    )


def chunks_of(chunks: Iterable[tuple[int, int, int]], prompts: int) -> list[int]:
    count = Counter(prompt for prompt, _, _ in chunks)
    return [count[prompt] for prompt in range(prompts)]


rewards_in_range = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_over_the_rounds_no_candidate_is_skipped_or_tried_twice_and_no_budget_exceeded(data: st.DataObject) -> None:
    prompts, rounds = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    slots = data.draw(st.lists(st.integers(0, 6), min_size=rounds, max_size=rounds))
    budget = data.draw(st.integers(0, 80))
    scores = data.draw(st.lists(rewards_in_range, min_size=budget, max_size=budget))

    given_out: list[list[tuple[int, int, int]]] = []
    for r in range(rounds):
        tried, seen = ([_count(given_out[:upto], p) for p in range(prompts)] for upto in (r, max(0, r - 1)))
        arms = [
            Arm(prompt=p, rewards=tuple(scores[: seen[p]]), tried=tried[p], pending=tried[p] - seen[p])
            for p in range(prompts)
        ]
        left = budget - sum(tried)
        given_out.append(bandit(arms, slots=slots[r], later=sum(slots[r + 1 :]), candidates=left, seed=r))

    assert all(len(chunks) <= limit for chunks, limit in zip(given_out, slots, strict=True))
    for p in range(prompts):
        candidates = [first + i for chunks in given_out for q, first, count in chunks if q == p for i in range(count)]
        assert candidates == list(range(len(candidates)))
    counts = [count for chunks in given_out for _, _, count in chunks]
    assert sum(counts) <= budget
    assert all(1 <= count <= CHUNK for count in counts)


def _count(given_out: Iterable[Iterable[tuple[int, int, int]]], prompt: int) -> int:
    return sum(count for chunks in given_out for p, _, count in chunks if p == prompt)


@settings(max_examples=20, deadline=None)
@given(rewards=st.lists(rewards_in_range, max_size=12), seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_chunks(rewards: list[float], seed: int) -> None:
    arms = [Arm(prompt=0, rewards=tuple(rewards), tried=len(rewards)), Arm(prompt=7)]

    once, again = (bandit(arms, seed=seed) for _ in range(2))

    assert once == again


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.integers(1, 6),
    rewards=st.lists(rewards_in_range, max_size=12),
    pending=st.integers(0, 8),
    slots=st.integers(0, 24),
    seed=st.integers(0, 99),
)
def test_arms_that_look_alike_get_shares_within_a_chunk(
    prompts: int, rewards: list[float], pending: int, slots: int, seed: int
) -> None:
    tried = len(rewards) + pending
    arms = [Arm(prompt=p, rewards=tuple(rewards), tried=tried, pending=pending) for p in range(prompts)]

    shares = chunks_of(bandit(arms, slots=slots, seed=seed), prompts)

    assert max(shares) - min(shares) <= 1


def test_solved_and_hopeless_prompts_get_nothing_where_others_can_gain() -> None:
    arms = [Arm(prompt=p, rewards=rewards, tried=32) for p, rewards in enumerate((ALL_ZERO, RARE, ALL_ONE))]

    shares = chunks_of(bandit(arms, slots=2), 3)

    assert shares == [0, 2, 0]


def test_what_a_prompt_was_like_before_counts_before_it_is_scored_again() -> None:
    beliefs = learn(Beliefs(), 0, {0: ALL_ZERO, 1: RARE * 4, 2: ALL_ONE})

    shares = chunks_of(bandit([Arm(prompt=p) for p in range(3)], beliefs, iteration=1, slots=2), 3)

    assert shares == [0, 2, 0]


def test_new_prompts_are_taken_for_what_the_others_were() -> None:
    solved, rare = (learn(Beliefs(), 0, dict.fromkeys(range(20), rewards)) for rewards in (ALL_ONE, RARE * 4))
    arms = [Arm(prompt=99), Arm(prompt=98, rewards=RARE, tried=8)]

    after_solved, after_rare = (bandit(arms, beliefs, iteration=1, slots=2) for beliefs in (solved, rare))

    assert chunks_of(after_solved, 2) == [0, 2]
    assert chunks_of(after_rare, 2)[0] > 0


def test_an_old_belief_fades() -> None:
    beliefs = learn(learn(Beliefs(), 0, {0: ALL_ONE}), 1, dict.fromkeys(range(1, 9), VARIED))
    arms = [Arm(prompt=0), *(Arm(prompt=p) for p in range(1, 9))]

    soon, late = (chunks_of(bandit(arms, beliefs, iteration=k, slots=36), 9)[0] for k in (1, 60))

    assert soon == 0
    assert late > 0


def test_a_belief_fades_from_when_its_prompt_was_last_seen() -> None:
    beliefs = learn(learn(Beliefs(), 0, {0: ALL_ONE}), 60, dict.fromkeys(range(1, 9), VARIED))
    arms = [Arm(prompt=0), *(Arm(prompt=p) for p in range(1, 9))]

    assert chunks_of(bandit(arms, beliefs, iteration=61, slots=36), 9)[0] > 0


def test_what_prompts_were_like_in_general_fades_too() -> None:
    before = learn(Beliefs(), 0, {0: VARIED, 1: RARE})

    after = learn(before, 10, {})

    assert sum(after.kinds) == pytest.approx(FADING**10 * sum(before.kinds))
    assert sum(after.nodes) == pytest.approx(FADING**10 * sum(before.nodes))


def test_a_prompt_that_is_seen_again_is_remembered_once() -> None:
    beliefs = learn(learn(Beliefs(), 0, {0: VARIED}), 1, {0: VARIED})

    assert len(beliefs.prompts) == 1


def test_a_reward_outside_the_range_counts_at_its_end() -> None:
    outside, inside = ({0: ALL_ONE, 1: (low, high), 2: ALL_ZERO} for low, high in ((-0.5, 1.5), (0.0, 1.0)))

    assert learn(Beliefs(), 0, outside) == learn(Beliefs(), 0, inside)


def test_a_prompt_that_was_not_seen_for_long_is_forgotten() -> None:
    beliefs = learn(Beliefs(), 0, {0: ALL_ONE, 1: ALL_ZERO})

    for iteration in range(1, FORGOTTEN_AFTER + 2):
        beliefs = learn(beliefs, iteration, {2: VARIED, **({1: ALL_ZERO} if iteration == 9 else {})})
        known = {seen.prompt for seen in beliefs.prompts}
        assert known == ({0, 1, 2} if iteration <= FORGOTTEN_AFTER else {1, 2})


def test_the_less_ranking_transfers_the_less_is_explored() -> None:
    arms = [Arm(prompt=p, tried=CHUNK) for p in range(8)]  # their first chunk was lost

    tried = [len(bandit(arms, slots=64, rho=rho)) for rho in (1.0, 0.2, 0.1, 0.0)]

    assert tried[0] > tried[1] > tried[2] == tried[3] == 0


def test_the_less_ranking_was_seen_to_transfer_the_less_is_explored() -> None:
    explored, turned = (0.0, 0.0, 1.0, 1.0) * 100, (0.0, 1.0, 0.0, 1.0) * 100  # alike, but for their order
    faithful, faithless = (
        learn(Beliefs(), 0, {}, {1: list(zip(explored, y, strict=True))}) for y in (explored, turned)
    )
    arms = [Arm(prompt=p, tried=CHUNK) for p in range(8)]

    tried = [len(bandit(arms, beliefs, iteration=1, slots=64, rho=None)) for beliefs in (faithful, faithless)]

    assert tried[0] > 0
    assert tried[1] == 0


@pytest.mark.parametrize("prompts", [3, 700])
def test_solved_prompts_are_left_alone_among_many_as_among_few(prompts: int) -> None:
    arms = [Arm(prompt=p, rewards=RARE if p % 3 else ALL_ONE, tried=32) for p in range(prompts)]
    unsolved = [p for p in range(prompts) if p % 3]

    chunks = bandit(arms, slots=len(unsolved))

    assert {prompt for prompt, _, _ in chunks} <= set(unsolved)
    assert len(chunks) == len(unsolved)


def test_without_any_fidelity_a_few_prompts_are_explored_to_measure_it() -> None:
    arms = [Arm(prompt=p) for p in range(9)]

    first = bandit(arms, slots=32, rho=0.0)
    second = bandit([replace(arms[p], tried=CHUNK, pending=CHUNK) for p, _, _ in first], slots=32, rho=0.0)

    assert len(first) == len({prompt for prompt, _, _ in first}) == -(-9 // PROBE_SHARE)
    assert second == []


def test_pending_candidates_count_as_planned() -> None:
    fresh, planned = Arm(prompt=0), Arm(prompt=1, tried=8 * CHUNK, pending=8 * CHUNK)

    chunks = bandit([fresh, planned], slots=4)

    assert chunks_of(chunks, 2) == [4, 0]


def test_each_prompts_next_chunk_is_run_before_any_prompts_next_but_one() -> None:
    chunks = bandit([Arm(prompt=p) for p in range(3)], slots=3, later=3)

    assert sorted(chunks) == [(p, 0, CHUNK) for p in range(3)]


def test_a_prompt_that_gains_more_waits_with_its_second_chunk_for_the_first_ones_of_others() -> None:
    beliefs = learn(Beliefs(), 0, {0: VARIED, 1: RARE * 4})
    arms = [Arm(prompt=0), Arm(prompt=1)]

    chunks = bandit(arms, beliefs, iteration=1, slots=2, later=6)

    assert sorted(chunks) == [(p, 0, CHUNK) for p in range(2)]


def test_prompts_are_completed_one_after_the_other_before_any_gets_more() -> None:
    beliefs = learn(Beliefs(), 0, {**dict.fromkeys(range(3), VARIED), 3: ALL_ONE})
    arms = [*(Arm(prompt=p) for p in range(3)), Arm(prompt=3, tried=2, pending=2)]

    chunks = bandit(arms, beliefs, iteration=1, slots=5, later=64, chunk=2, complete=3)
    (second, _, _), (third, _, _) = chunks[1], chunks[3]

    assert chunks == [(3, 2, 2), (second, 0, 2), (second, 2, 2), (third, 0, 2), (third, 2, 2)]
    assert {second, third} < {0, 1, 2}


def test_solved_prompts_are_completed_too() -> None:
    """They would be rolled out whole."""
    beliefs = learn(Beliefs(), 0, {0: (1.0,) * 64, 1: (0.0, 1.0) * 32})
    arms = [Arm(prompt=0), Arm(prompt=1)]

    assert chunks_of(bandit(arms, beliefs, iteration=1, slots=8), 2)[0] == 0
    assert chunks_of(bandit(arms, beliefs, iteration=1, slots=8, complete=2), 2)[0] == KEEP // CHUNK


def test_no_more_is_given_out_to_complete_prompts_than_there_is_time_for() -> None:
    chunks = bandit([Arm(prompt=p) for p in range(4)], slots=16, candidates=CHUNK + 1, complete=4)

    assert sum(count for _, _, count in chunks) == CHUNK + 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"slots": -1}, "slots = -1"), ({"rho": 1.5}, "rho = 1.5"), ({"complete": -1}, "complete = -1")],
)
def test_an_allocation_out_of_range_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bandit([Arm(prompt=0)], **wrong)


def test_nothing_is_allocated_without_slots_candidates_or_prompts() -> None:
    assert bandit([]) == bandit([Arm(prompt=0)], slots=0) == bandit([Arm(prompt=0)], candidates=0) == []


def test_the_part_of_the_beliefs_about_some_prompts_decides_for_them_as_the_whole_does() -> None:
    beliefs = learn(Beliefs(), 0, dict(enumerate((ALL_ZERO, VARIED, ALL_ONE, VARIED))))
    arms = [Arm(prompt=1), Arm(prompt=2)]

    part = beliefs.about([1, 2])

    assert [seen.prompt for seen in part.prompts] == [1, 2]
    assert bandit(arms, part, iteration=1) == bandit(arms, beliefs, iteration=1)


def test_fidelity_is_the_slope_within_prompts_and_not_between_them() -> None:
    explored = [0.0, 1.0] * 2000
    halved = [(x, 0.25 + 0.5 * x) for x in explored]
    apart = {1: [(0.0, 0.0), (0.2, 0.0)] * 2000, 2: [(0.8, 1.0), (1.0, 1.0)] * 2000}  # pooled they correlate

    # 4000 pairs outweigh what was believed before, to within 1 %; in the second case twice as many do.
    assert learn(Beliefs(), 0, {}, {1: halved}).fidelity == pytest.approx(0.5, abs=0.01)
    assert learn(Beliefs(), 0, {}, apart).fidelity == pytest.approx(0.0, abs=0.01)


def test_choosing_seeds_by_their_explored_reward_does_not_bias_the_fidelity() -> None:
    rng = np.random.default_rng(0)
    explored = rng.normal(0.5, 0.1, 40_000)
    again = 0.5 + 0.6 * (explored - 0.5) + rng.normal(0, 0.08, 40_000)
    chosen = np.concatenate([np.argsort(explored)[:4000], np.argsort(explored)[-4000:]])

    beliefs = learn(Beliefs(), 0, {}, {1: list(zip(explored[chosen], again[chosen], strict=True))})

    assert beliefs.fidelity == pytest.approx(
        0.6, abs=0.02
    )  # ten standard errors of the slope, 0.08 / (0.18 sqrt(8000))
    pooled = rank_correlation(explored[chosen], again[chosen])
    assert pooled is not None
    assert pooled > 0.7  # which the choice has raised


def test_rewards_that_turn_round_leave_no_fidelity() -> None:
    turned = [(0.0, 1.0), (1.0, 0.0)] * 100

    assert learn(Beliefs(), 0, {}, {1: turned}).fidelity == 0.0


def test_where_explored_rewards_do_not_differ_nothing_is_learnt_of_the_fidelity() -> None:
    beliefs = learn(Beliefs(fidelity=0.4), 0, {}, {1: [(1.0, 0.0), (1.0, 1.0)], 2: []})

    assert beliefs.fidelity == 0.4


def test_explored_rewards_that_differ_by_next_to_nothing_teach_nothing_of_the_fidelity() -> None:
    beliefs = learn(Beliefs(fidelity=0.4), 0, {}, {1: [(0.0, 0.0), (1e-170, 1.0)]})

    assert beliefs.fidelity == 0.4


def test_candidates_beside_training_by_hand() -> None:
    measured: dict[str, Any] = {"spare_s": [9000.0, 300.0, 700.0, 500.0, 420.0], "seed_s": 2.5, "chunk": 4}

    # 1.5 x the mean of the last four, 480 s, are 720 s: 72 chunks of 4 x 2.5 s.
    assert affordable(**measured) == 72 * 4
    assert affordable(**measured | {"spare_s": [1.0]}) == 0
    assert affordable(**measured | {"seed_s": 0.0}) is None
    assert affordable(**measured | {"spare_s": [0.0]}) is None
    assert affordable(**measured | {"spare_s": []}) is None


@pytest.mark.parametrize("wrong", [{"spare_s": [1.0, -1.0]}, {"seed_s": math.nan}, {"chunk": 0}])
def test_time_for_exploration_that_is_no_time_is_refused(wrong: dict[str, Any]) -> None:
    possible: dict[str, Any] = {"spare_s": [1.0], "seed_s": 1.0, "chunk": 4}

    with pytest.raises(ValueError, match=next(iter(wrong))):
        affordable(**possible | wrong)


def captured(beliefs: Beliefs, prompts: int, groups: int) -> list[float]:
    return captured_variance(range(prompts), beliefs, iteration=1, groups=groups, chunks=40, chunk=4, keep=4, seed=0)


def test_the_variance_expected_of_exploration_begins_with_an_average_prompt_and_never_falls() -> None:
    coins = learn(Beliefs(), 0, {prompt: [0.0, 1.0] * 32 for prompt in range(4)})

    curve = captured(coins, prompts=4, groups=4)

    assert curve[0] == pytest.approx(4 * 0.25 * 3 / 4, rel=0.1)
    assert all(later >= before for before, later in itertools.pairwise(curve))
    assert 1.1 * curve[0] < curve[-1] <= 4 * 0.25


def test_candidates_that_are_drawn_in_any_case_are_not_counted_among_those_explored() -> None:
    coins = replace(learn(Beliefs(), 0, {prompt: [0.0, 1.0] * 32 for prompt in range(4)}), fidelity=1.0)
    facts: dict[str, Any] = {"iteration": 1, "groups": 4, "chunks": 40, "chunk": 2, "keep": 4, "seed": 0}

    all_counted = captured_variance(range(4), coins, **facts)
    curve = captured_variance(range(4), coins, **facts, drawn=2)

    assert curve[0] == pytest.approx(all_counted[0])  # four of four cannot be chosen
    assert curve[4] > all_counted[4] + 0.1 * all_counted[0]  # a chunk for each beyond those four, not half of the four
    assert curve[-1] == pytest.approx(all_counted[-1], rel=0.02)


def test_nothing_is_expected_of_solved_prompts_and_more_where_the_varied_ones_may_be_chosen() -> None:
    solved: dict[int, list[float]] = {prompt: [1.0] * 64 for prompt in range(4)}
    varied: dict[int, list[float]] = {prompt: [0.0, 0.5, 1.0] * 21 for prompt in range(4, 8)}

    assert captured(learn(Beliefs(), 0, solved), prompts=4, groups=4) == pytest.approx([0.0], abs=1e-3)
    mixed = captured(learn(Beliefs(), 0, solved | varied), prompts=8, groups=4)
    assert mixed[-1] > 2 * mixed[0]


def test_of_the_explored_prompts_those_that_vary_most_are_expected_to_be_rolled_out() -> None:
    near, coins = dict.fromkeys(range(2), VARIED * 2), dict.fromkeys(range(2, 4), (0.0, 1.0) * 32)

    curve = captured(replace(learn(Beliefs(), 0, near | coins), fidelity=1.0), prompts=4, groups=2)

    assert curve[-1] == pytest.approx(2 * 0.25, rel=0.1)  # that of the best four of coins, not of (0.3, 0.3, 0.7, 0.7)


@given(
    scored=st.lists(st.lists(st.sampled_from(GRID_N.tolist()), max_size=9), min_size=1, max_size=3),
    pending=st.integers(0, 5),
    keep=st.integers(2, 6),
    node=st.integers(0, len(GRID_N) - 1),
)
def test_where_new_rewards_are_sure_the_variance_imagined_is_that_of_the_best_subset(
    scored: list[list[float]], pending: int, keep: int, node: int
) -> None:
    arms = [Arm(prompt=p, rewards=tuple(rewards), pending=pending * p) for p, rewards in enumerate(scored)]
    sure_PKN, one_kind_PK = np.zeros((len(arms), 1, len(GRID_N))), np.ones((len(arms), 1))
    sure_PKN[..., node] = 1.0

    imagined_PWJ = imagine(arms, sure_PKN, one_kind_PK, 3, 2, keep, seed=0)

    for arm, imagined_WJ in zip(arms, imagined_PWJ, strict=True):
        for chunks in range(4):
            new = max(arm.pending + 2 * chunks, keep - len(arm.rewards))
            rewards = np.array([*arm.rewards, *[GRID_N[node]] * new])
            best = np.var(rewards[max_variance_subset(rewards, keep)])
            assert imagined_WJ[:, chunks] == pytest.approx(best, abs=1e-6)  # in single precision


def test_half_the_fidelity_is_expected_to_gain_a_quarter() -> None:
    coins = learn(Beliefs(), 0, {0: [0.0, 1.0] * 32})

    whole, half = (captured(replace(coins, fidelity=fidelity), prompts=1, groups=1) for fidelity in (1.0, 0.5))

    assert whole[0] == half[0]
    assert whole[1] - whole[0] == pytest.approx(4 * (half[1] - half[0]))
