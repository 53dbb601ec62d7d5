"""How much exploration is worth its GPU-seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.plan.sharing import worth_exploring


@given(work_s=st.floats(10, 1000), chunk_s=st.floats(0.1, 5), gain=st.floats(0.01, 10))
def test_exploration_ends_where_its_relative_gain_comes_down_to_its_share_of_the_iteration(
    work_s: float, chunk_s: float, gain: float
) -> None:
    captured = [1 + gain * math.log1p(chunk / 8) for chunk in range(400)]

    best = worth_exploring(captured, work_s=work_s, chunk_s=chunk_s)

    def relative_gain(chunk: int) -> float:
        return (captured[chunk + 1] - captured[chunk]) / captured[chunk] / chunk_s

    if best < len(captured) - 1:
        assert relative_gain(best) <= 1 / (work_s + best * chunk_s) * (1 + 1e-9)
    if best:
        assert relative_gain(best - 1) > 1 / (work_s + (best - 1) * chunk_s) * (1 - 1e-9)


def test_heavy_training_pays_for_more_exploration_than_light_training() -> None:
    captured = [2 - 1 / (1 + chunk / 10) for chunk in range(100)]

    light, heavy = (worth_exploring(captured, work_s=work_s, chunk_s=1.0) for work_s in (20.0, 400.0))

    assert 0 < light < heavy


def test_chunks_that_gain_only_together_are_taken_together_or_not_at_all() -> None:
    captured = [1.0, 1.0, 1.0, 2.0]

    assert worth_exploring(captured, work_s=4.0, chunk_s=1.0) == 3  # 2 / 7 against 1 / 4
    assert worth_exploring(captured, work_s=2.0, chunk_s=1.0) == 0  # 2 / 5 against 1 / 2


def test_exploration_in_seconds_that_would_idle_costs_nothing() -> None:
    captured = [2 - 1 / (1 + chunk / 10) for chunk in range(100)]

    busy, idle = (worth_exploring(captured, work_s=20.0, chunk_s=1.0, idle_s=idle_s) for idle_s in (0.0, 40.0))

    assert busy < 40 == idle
    assert worth_exploring([1.0, 2.0, 2.0, 2.0], work_s=20.0, chunk_s=1.0, idle_s=40.0) == 1  # no more than gains


@pytest.mark.parametrize(
    ("captured", "times"),
    [
        ([], (1.0, 1.0, 0.0)),
        ([1.0, math.nan], (1.0, 1.0, 0.0)),
        ([-1.0], (1.0, 1.0, 0.0)),
        ([1.0], (0.0, 1.0, 0.0)),
        ([1.0], (1.0, 0.0, 0.0)),
        ([1.0], (1.0, 1.0, -1.0)),
        ([1.0], (1.0, 1.0, math.inf)),
    ],
)
def test_what_is_no_curve_and_no_time_is_refused(captured: list[float], times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        worth_exploring(captured, work_s=times[0], chunk_s=times[1], idle_s=times[2])
