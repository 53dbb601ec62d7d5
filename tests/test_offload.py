"""The reserved rollout window and the size of requests, on cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.plan.balance import balance, cut_short
from spotlight.plan.batching import request_seeds
from spotlight.plan.offload import (
    FIRST_WINDOW_S,
    FLOOR_S,
    Measured,
    Offload,
    PhaseDecision,
    PhaseView,
    adapt,
    decide_phase,
    rollout_window_s,
    spot_worth_renting,
)
from spotlight.records import Pool, Span, WorkerLife

BOTH: tuple[Pool, ...] = ("reserved", "spot")


def make_sides(**settings: Any) -> PhaseView:
    """Two rollouts wait, before a window of 60 s is over."""
    defaults: dict[str, Any] = {
        "pools": BOTH,
        "elapsed_s": 59.0,
        "window_s": 60.0,
        "spot": 2,
        "waiting": 2,
    }
    return PhaseView(**defaults | settings)


@pytest.mark.parametrize(
    ("change", "pools", "trainers"),
    [
        ({}, BOTH, ()),  # the window is open, and all GPUs have rollouts to take
        ({"waiting": 0}, BOTH, BOTH),  # nothing is left to take
        ({"elapsed_s": 60.0}, ("spot",), ("reserved",)),  # the window is over
        ({"elapsed_s": 60.0, "waiting": 0}, ("spot",), BOTH),
        ({"elapsed_s": 60.0, "spot": 0}, BOTH, ()),  # nobody else rolls out
        ({"elapsed_s": 60.0, "pools": ("reserved",)}, ("reserved",), ("spot",)),
        ({"elapsed_s": 0.0, "pools": ("spot",)}, ("spot",), ("reserved",)),
    ],
)
def test_whose_turn_it_is(change: dict[str, Any], pools: tuple[Pool, ...], trainers: tuple[Pool, ...]) -> None:
    assert decide_phase(make_sides(**change)) == PhaseDecision(pools=pools, trainers=trainers)


def test_the_window_is_as_the_strategy_says() -> None:
    state = Offload(window_s=60.0)

    assert rollout_window_s("adaptive", state, streams=True, spot_trains=False) == 60.0
    assert rollout_window_s("adaptive", state, streams=False, spot_trains=False) == inf  # nothing could begin early
    assert rollout_window_s("adaptive", state, streams=True, spot_trains=True) == inf  # nobody has to begin early
    assert rollout_window_s("none", state, streams=True, spot_trains=False) == inf
    assert rollout_window_s("all", state, streams=True, spot_trains=True) == 0.0


def make_span(worker: str, phase: str, start_s: float, stop_s: float, iteration: int = 3) -> Span:
    pool = worker.rstrip("0123456789")
    return Span(
        worker=worker,
        pool=pool,
        phase=phase,
        iteration=iteration,
        key="",
        start_s=start_s,
        stop_s=stop_s,
        outcome="done",
    )


def make_life(worker: str, joined_s: float = 0.0, left_s: float | None = None) -> WorkerLife:
    return WorkerLife(worker=worker, pool=worker.rstrip("0123456789"), joined_s=joined_s, left_s=left_s, reason="")


SPANS = [
    make_span("reserved0", "rollout", 100.0, 121.0),  # handed back a second after a window of 20 s
    make_span("spot0", "rollout", 100.0, 150.0),
    make_span("reserved0", "train", 125.0, 140.0),
    make_span("reserved0", "train", 155.0, 170.0),
    make_span("spot0", "explore-r0", 150.0, 162.0, iteration=4),
]


def test_what_an_iteration_recorded_says_who_waited() -> None:
    found = balance(SPANS, [make_life("spot0")], 3, began_s=100.0, window_s=20.0)

    assert found
    assert found.measured == Measured(
        train_wait_s=(125.0 - 121.0) + (155.0 - 140.0), remote_wait_s=170.0 - 162.0, spot=1, rollout_s=150.0 - 100.0
    )
    assert (found.spare_s, found.train_s) == (170.0 - 150.0, 15.0 + 15.0)


def test_scoring_is_work_and_exploration_has_only_what_it_leaves() -> None:
    spans = [
        *SPANS,
        make_span("spot0", "score", 150.0, 152.0),
        make_span("spot0", "explore-score-r0", 162.0, 165.0, iteration=4),
    ]

    plain, found = (balance(each, [make_life("spot0")], 3, began_s=100.0, window_s=20.0) for each in (SPANS, spans))

    assert plain
    assert found
    assert (found.spare_s, found.work_s, found.explored_s) == (170.0 - 152.0, plain.work_s + 2.0, 12.0 + 3.0)


def test_who_scores_beside_the_gpus_takes_none_of_their_time() -> None:
    scored = replace(make_span("reward0", "score", 150.0, 169.0), pool="reward")

    assert balance([*SPANS, scored], [make_life("spot0")], 3, began_s=100.0, window_s=20.0) == balance(
        SPANS, [make_life("spot0")], 3, began_s=100.0, window_s=20.0
    )


def make_shared(trains_on: str) -> list[Span]:
    """Two GPUs a pool: all roll out for 20 s, then the reserved ones or all train for 30 s."""
    gpus = [f"{pool}{number}" for pool in BOTH for number in range(2)]
    trainers = [gpu for gpu in gpus if gpu.startswith(trains_on)]
    waves = [make_span(gpu, "rollout", at_s, at_s + 10.0) for gpu in gpus for at_s in (0.0, 10.0)]
    return [*waves, *(make_span(gpu, "train", 20.0, 50.0) for gpu in trainers)]


@pytest.mark.parametrize(("trains_on", "idle_s"), [("reserved", 20.0), ("", 0.0)])
def test_what_reserved_gpus_rolled_out_instead_of_training_lengthened_the_iteration(
    trains_on: str, idle_s: float
) -> None:
    lives = [make_life(f"{pool}{number}") for pool in BOTH for number in range(2)]

    found = balance(make_shared(trains_on), lives, 3, began_s=0.0, window_s=60.0)

    # The first sample came after 10 s. With training from then on, it had been over after 40 s instead of 50; spot GPUs
    # would have rolled out all of these but the reserved ones' first two: for 30 s each instead of 20.
    assert found
    assert found.spare_s == (60.0 if trains_on else 0.0)
    assert found.idle_s == idle_s


def test_a_rollout_that_was_lost_was_no_sample_to_train_on() -> None:
    lives = [make_life(f"{pool}{number}") for pool in BOTH for number in range(2)]
    lost = replace(make_span("spot0", "rollout", 0.0, 2.0), outcome="lost")

    found, plain = (
        balance(spans, lives, 3, began_s=0.0, window_s=60.0)
        for spans in ([lost, *make_shared("reserved")], make_shared("reserved"))
    )

    assert found
    assert plain
    assert found.idle_s == plain.idle_s


def test_exploration_that_was_worth_it_and_was_cut_short_lengthens_the_window() -> None:
    found = balance(SPANS, [make_life("spot0")], 3, began_s=100.0, window_s=20.0)
    assert found
    cut = cut_short(found, tried=4, dropped=2)

    assert cut.measured.explore_wait_s == 2 * 12.0 / 4
    assert cut_short(found, tried=0, dropped=2) == found
    of_two, of_none = (replace(found, measured=replace(found.measured, spot=spot)) for spot in (2, 0))
    assert cut_short(of_two, tried=4, dropped=2).measured.explore_wait_s == 2 * 12.0 / 4 / 2
    assert cut_short(of_none, tried=4, dropped=2) == of_none
    state, without = Offload(window_s=20.0), found.measured
    assert adapt(state, cut.measured).window_s == adapt(state, without).window_s + 2 * 12.0 / 4 / 3.0


def test_a_window_that_outlasts_the_rollout_does_not_grow_beyond_it_for_exploration() -> None:
    state = Offload(window_s=150.0)
    measured = Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=8, rollout_s=20.0, explore_wait_s=3.0)

    assert adapt(state, measured).window_s == 21.0


def test_a_trainer_whose_window_never_closed_has_not_waited_for_it() -> None:
    found = balance(SPANS, [make_life("spot0")], 3, began_s=100.0, window_s=60.0)

    assert found
    assert found.measured.train_wait_s == 0.0


@pytest.mark.parametrize(
    ("lives", "spot"),
    [([make_life("spot0", 0.0, 120.0), make_life("spot0", 130.0)], 1), ([make_life("spot0", 0.0, 120.0)], 0)],
)
def test_spot_workers_that_come_and_go_make_an_iteration_unsteady(lives: list[WorkerLife], spot: int) -> None:
    found = balance(SPANS, lives, 3, began_s=100.0, window_s=20.0)

    assert found
    assert (found.measured.spot, found.measured.steady) == (spot, False)


def test_what_reserved_workers_trained_before_the_window_closed_was_no_training_since() -> None:
    spans = [
        make_span("reserved0", "rollout", 100.0, 121.0),
        make_span("spot0", "rollout", 100.0, 150.0),
        make_span("reserved1", "train", 110.0, 131.0),
        make_span("reserved0", "train", 121.0, 131.0),
        *(make_span(f"reserved{number}", "train", 155.0, 170.0) for number in range(2)),
    ]
    lives = [make_life(name) for name in ("reserved0", "reserved1", "spot0")]

    found = balance(spans, lives, 3, began_s=100.0, window_s=20.0)

    assert found
    assert found.measured.train_wait_s == 155.0 - 131.0  # of both, since the window closed
    assert found.train_s == (21.0 + 10.0 + 15.0 + 15.0) / 2


def test_what_began_before_the_iteration_is_not_of_it() -> None:
    earlier = make_span("spot0", "explore-r0", 90.0, 101.0)

    found, plain = (
        balance(spans, [make_life("spot0")], 3, began_s=100.0, window_s=20.0) for spans in ([earlier, *SPANS], SPANS)
    )

    assert found == plain


def test_spot_workers_that_came_after_training_or_left_at_its_end_are_not_counted() -> None:
    lives = [make_life("spot0"), make_life("spot1", 0.0, 170.0), make_life("spot2", 171.0)]

    found = balance(SPANS, lives, 3, began_s=100.0, window_s=20.0)

    assert found
    assert found.measured.spot == 1
    assert found.spare_s == 170.0 - 150.0


def test_a_spot_worker_that_joined_late_had_time_from_then_on() -> None:
    found = balance(SPANS, [make_life("spot0"), make_life("spot1", 163.0)], 3, began_s=100.0, window_s=20.0)

    assert found
    assert found.spare_s == (170.0 - 150.0) + (170.0 - 163.0)


def test_rollouts_of_the_next_iteration_leave_exploration_less_time_and_nobody_has_waited_beside_them() -> None:
    ahead = make_span("spot0", "rollout", 162.0, 172.0, iteration=4)

    found = balance([*SPANS, ahead], [make_life("spot0")], 3, began_s=100.0, window_s=20.0)

    assert found
    assert found.spare_s == (170.0 - 150.0) - (172.0 - 162.0)
    assert found.measured.remote_wait_s == 0.0


def test_where_spot_workers_train_all_that_they_had_left_was_idle() -> None:
    lives = [*(make_life(f"{pool}{number}") for pool in BOTH for number in range(2)), make_life("spot2")]

    found = balance(make_shared(""), lives, 3, began_s=0.0, window_s=60.0)

    assert found
    assert found.idle_s == found.spare_s == 50.0


def test_an_iteration_that_did_not_train_has_no_balance() -> None:
    assert balance(SPANS[:2], [make_life("spot0")], 3, began_s=100.0, window_s=20.0) is None


def test_a_starved_trainer_lengthens_the_window_by_a_share_of_its_wait() -> None:
    state = Offload(window_s=100.0)

    after = adapt(state, Measured(train_wait_s=30.0, remote_wait_s=0.0, spot=4), eta=3.0)

    assert after.window_s == 100.0 + 30.0 / 3.0


def test_waiting_spot_gpus_shorten_the_window_by_a_share_of_the_difference() -> None:
    state = Offload(window_s=100.0)

    after = adapt(state, Measured(train_wait_s=10.0, remote_wait_s=70.0, spot=4), eta=3.0)

    assert after.window_s == 100.0 - 60.0 / 3.0


@pytest.mark.parametrize(("train_wait_s", "expected_s"), [(10.0, 40.0 - 20.0 / 4.0), (30.0, 100.0), (70.0, 110.0)])
def test_what_a_window_has_beyond_the_rollout_goes_at_once_where_spot_gpus_wait(
    train_wait_s: float, expected_s: float
) -> None:
    measured = Measured(train_wait_s=train_wait_s, remote_wait_s=30.0, spot=4, rollout_s=40.0)

    assert adapt(Offload(window_s=100.0), measured, eta=4.0).window_s == expected_s


def test_the_window_never_falls_below_its_floor() -> None:
    state = Offload(window_s=10.0)

    after = adapt(state, Measured(train_wait_s=0.0, remote_wait_s=900.0, spot=4))

    assert after.window_s == FLOOR_S


def test_a_count_of_spot_gpus_that_comes_back_brings_its_window_back() -> None:
    state = adapt(Offload(window_s=90.0), Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=8))
    state = adapt(state, Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=2, steady=False))
    state = adapt(state, Measured(train_wait_s=60.0, remote_wait_s=0.0, spot=2))

    back = adapt(state, Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=8, steady=False))

    assert state.memory == {8: 90.0, 2: 90.0 + 60.0 / 3.0}
    assert back.window_s == 90.0


def test_a_count_never_seen_goes_on_from_the_window_there_is() -> None:
    state = Offload(window_s=60.0, memory={8: 200.0})

    after = adapt(state, Measured(train_wait_s=9.0, remote_wait_s=0.0, spot=3, steady=False), eta=3.0)

    assert after == Offload(window_s=60.0 + 9.0 / 3.0, memory={8: 200.0})


def test_without_spot_gpus_the_reserved_ones_roll_out_to_the_end_and_nothing_is_learnt() -> None:
    state = Offload(window_s=60.0, memory={8: 200.0})

    after = adapt(state, Measured(train_wait_s=0.0, remote_wait_s=500.0, spot=0))

    assert after == state
    assert decide_phase(make_sides(elapsed_s=900.0, spot=0)).pools == BOTH


def test_the_feedback_settles_where_both_sides_wait_equally() -> None:
    work, train, reserved, spot = 1000.0, 150.0, 4, 8  # GPU-seconds, seconds, GPUs
    state = Offload(window_s=FIRST_WINDOW_S)

    for _ in range(200):
        remote_s = max(state.window_s, (work - reserved * state.window_s) / spot)
        end_s = max(state.window_s + train, remote_s)
        measured = Measured(train_wait_s=end_s - state.window_s - train, remote_wait_s=end_s - remote_s, spot=spot)
        state = adapt(state, measured)

    assert state.window_s == FLOOR_S  # 8 spot GPUs roll out alone in 125 s, sooner than training ends
    assert measured.train_wait_s == 0.0


@pytest.mark.parametrize("wrong", [{"eta": 0.0}, {"floor_s": -1.0}])
def test_a_feedback_that_could_not_settle_is_refused(wrong: dict[str, float]) -> None:
    measured = Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=1)

    with pytest.raises(ValueError, match=next(iter(wrong))):
        adapt(Offload(window_s=60.0), measured, **wrong)


def test_as_many_spot_gpus_pay_as_training_leaves_time_for() -> None:
    # 40 s on each of 8 spot GPUs and 30 s on each of 4 reserved ones: 440 GPU-seconds of rollout
    worth = spot_worth_renting(remote_s=40.0, spot=8, reserved_s=30.0, reserved=4, train_s=100.0)

    assert worth == 5  # 440 / 100, rounded up


def test_before_anything_is_measured_as_many_spot_gpus_pay_as_there_are_reserved_ones() -> None:
    assert spot_worth_renting(remote_s=0.0, spot=0, reserved_s=0.0, reserved=4, train_s=0.0) == 4


def test_requests_are_as_large_as_keeps_the_last_wave_full() -> None:
    size = request_seeds(prompts=8, seeds=8, gangs=16, seeds_max=8, fixed_s=0.1, sample_s=1.0)

    # 64 samples on 16 gangs: 4 each. Size 8 fills 8 gangs (8.1 s), 4 fills 16 once (4.1 s), 2 fills them twice (4.2 s).
    assert size == 4


def test_a_request_has_no_fewer_samples_than_take_as_long() -> None:
    of = {"prompts": 32, "seeds": 16, "gangs": 12, "seeds_max": 8, "fixed_s": 0.25, "sample_s": 1.0}

    # In waves of 12: 128 requests of 4 samples, or 64 of 8.
    assert request_seeds(**of) == 4  # type: ignore[arg-type]  # 11 x 4.25 s, and 6 x 8.25 s
    assert request_seeds(**of, least_s=5.0) == 8  # type: ignore[arg-type]  # 11 x 5.25 s, and 6 x 8.25 s


def test_where_size_makes_no_difference_requests_are_large() -> None:
    size = request_seeds(prompts=4, seeds=8, gangs=4, seeds_max=8, fixed_s=0.0, sample_s=1.0)

    assert size == 8


@given(
    prompts=st.integers(1, 40),
    seeds=st.integers(1, 32),
    gangs=st.integers(1, 64),
    limit=st.integers(1, 16),
    fixed_s=st.floats(0, 5),
    sample_s=st.floats(0, 5),
)
def test_no_other_size_ends_the_rollout_sooner(
    prompts: int, seeds: int, gangs: int, limit: int, fixed_s: float, sample_s: float
) -> None:
    def greedy_s(size: int) -> float:
        """List scheduling, request by request, all of the full size."""
        free_s = [0.0] * gangs
        for _ in range(prompts * ceil(seeds / size)):
            free_s.sort()
            free_s[0] += fixed_s + size * sample_s
        return max(free_s)

    size = request_seeds(prompts=prompts, seeds=seeds, gangs=gangs, seeds_max=limit, fixed_s=fixed_s, sample_s=sample_s)

    assert 1 <= size <= min(seeds, limit)
    best_s = min(greedy_s(other) for other in range(1, min(seeds, limit) + 1))
    assert greedy_s(size) == pytest.approx(best_s)


def test_a_size_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="gangs = 0"):
        request_seeds(prompts=1, seeds=1, gangs=0, seeds_max=1, fixed_s=0.0, sample_s=1.0)
