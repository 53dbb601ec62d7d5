"""Clocks of several machines: how far one is ahead of another, and what happened there told by ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotlight.clock import ALIKE_S, ASKED, ahead_s
from spotlight.records import Drained, Span, WorkerLife


class Ways:
    """A clock here and one there, while questions and answers take their time."""

    def __init__(self, *, ahead_s: float, ways_s: Iterator[tuple[float, float]]) -> None:
        self._now_s, self._ahead_s, self._ways_s = 1_000.0, ahead_s, ways_s

    def here(self) -> float:
        return self._now_s

    def ask(self) -> float:
        there_s, back_s = next(self._ways_s)
        told_s = self._now_s + there_s - self._ahead_s
        self._now_s += there_s + back_s
        return told_s


def measured(difference_s: float, *ways_s: tuple[float, float]) -> float:
    """From so many questions, the last of which go the last one's way."""
    padded = [*ways_s, *[ways_s[-1]] * (ASKED - len(ways_s))]
    ways = Ways(ahead_s=difference_s, ways_s=iter(padded))
    return ahead_s(ways.ask, ways.here)


@pytest.mark.parametrize("difference_s", [600.0, -600.0, 2 * ALIKE_S])
def test_how_far_a_clock_is_ahead_is_told_by_the_shortest_way(difference_s: float) -> None:
    found_s = measured(difference_s, (0.0, 5.0), (0.004, 0.002), (0.0, 1.0))

    assert found_s == pytest.approx(difference_s - 0.001, abs=1e-9)


@pytest.mark.parametrize("way_s", [(0.0, 0.0), (0.0, 3.0), (3.0, 0.0)])
@pytest.mark.parametrize("difference_s", [0.0, 0.9 * ALIKE_S])
def test_clocks_that_are_alike_are_the_same_however_long_the_way_is(
    way_s: tuple[float, float], difference_s: float
) -> None:
    assert measured(difference_s, way_s) == 0.0


def test_what_happened_is_told_by_the_other_clock_and_decisions_are_as_they_were_made() -> None:
    span: dict[str, Any] = {"worker": "a", "pool": "spot", "phase": "train", "iteration": 0, "key": "k"}
    decision = {"at_s": 1.0, "decision": "dispatch"}
    there = Drained(
        spans=[Span(**span, start_s=1.0, stop_s=3.0, outcome="lost", uncommitted_s=2.0)],
        workers={
            0: WorkerLife(worker="a", pool="spot", joined_s=0.0, left_s=3.0, reason="lost"),
            1: WorkerLife(worker="b", pool="spot", joined_s=2.0, left_s=None, reason=""),
        },
        events=[{"at_s": 3.0, "event": "paused", "lost_s": 1.0}],
        decisions=[decision],
    )

    here = there.later(100.0)

    assert here == Drained(
        spans=[Span(**span, start_s=101.0, stop_s=103.0, outcome="lost", uncommitted_s=2.0)],
        workers={
            0: WorkerLife(worker="a", pool="spot", joined_s=100.0, left_s=103.0, reason="lost"),
            1: WorkerLife(worker="b", pool="spot", joined_s=102.0, left_s=None, reason=""),
        },
        events=[{"at_s": 103.0, "event": "paused", "lost_s": 1.0}],
        decisions=[decision],
    )
    assert there.later(0.0) is there
