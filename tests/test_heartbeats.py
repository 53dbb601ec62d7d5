"""Claims about who counts as silent: the time since a new heartbeat was seen, less the pauses of whoever looks."""

from __future__ import annotations

import pytest

from cluster.dispatch.heartbeats import Heartbeats

EVERY_S, LIMIT_S = 0.5, 4.0


def heartbeats() -> Heartbeats:
    return Heartbeats(limit_s=LIMIT_S, every_s=EVERY_S, now_s=0.0)


def test_a_worker_is_silent_from_its_last_new_heartbeat_on() -> None:
    seen = heartbeats()
    silent_s = []

    for now_s, last_seen in ((0.5, 7.0), (1.0, 7.4), (1.5, 7.4), (2.0, 7.4)):
        seen.look(now_s)
        silent_s.append(seen.silent_s("a", last_seen))

    assert silent_s == [0.0, 0.0, 0.5, 1.0]


def test_a_pause_of_whoever_looks_makes_nobody_silent_or_overdue() -> None:
    seen = heartbeats()
    seen.look(0.5)
    seen.silent_s("a", 7.0)
    seen.overdue_s("b", 0.0)

    paused_s = seen.look(0.5 + EVERY_S + 100.0)

    assert paused_s == pytest.approx(100.0)
    assert seen.is_worth_telling(paused_s)
    assert seen.silent_s("a", 7.0) == pytest.approx(EVERY_S)
    assert seen.overdue_s("b", 0.0) == 0.0


def test_a_look_that_comes_a_little_late_is_no_pause() -> None:
    seen = heartbeats()

    assert seen.look(EVERY_S + 1.9) == 0.0


def test_a_pause_that_is_longer_than_a_worker_may_be_silent_is_told() -> None:
    seen = heartbeats()

    assert not seen.is_worth_telling(LIMIT_S)
    assert seen.is_worth_telling(LIMIT_S + 0.1)


def test_a_worker_that_takes_the_address_of_one_that_is_gone_is_not_silent() -> None:
    seen = heartbeats()
    seen.silent_s("a", 7.0)
    seen.forget("a")
    seen.look(EVERY_S)

    assert seen.silent_s("a", 7.0) == 0.0


def test_a_worker_is_overdue_after_ten_limits_unless_it_is_ready_or_gone() -> None:
    seen = heartbeats()
    for address in ("late", "ready"):
        seen.overdue_s(address, 0.0)
    seen.note_ready("ready")

    for look in range(1, 100):
        seen.look(look * EVERY_S)

    assert seen.overdue_s("late", 0.0) == pytest.approx(99 * EVERY_S)
    assert seen.overdue_s("ready", 0.0) == 0.0
    seen.forget("late")
    assert seen.overdue_s("late", 0.0) == 0.0


@pytest.mark.parametrize(("beat_s", "limit_s"), [(0.5, LIMIT_S), (1.0, LIMIT_S), (2.0, 6.5), (6.0, 18.5)])
def test_nobody_has_hung_before_three_heartbeats_are_due(beat_s: float, limit_s: float) -> None:
    seen = heartbeats()
    seen.overdue_s("imports", 0.0)

    seen.expect(beat_s)
    seen.expect(0.5)  # workers are gone; those that stay may not know yet that they are to send more

    assert seen.limit_s == limit_s
    seen.look(EVERY_S)
    assert seen.overdue_s("imports", 3 * limit_s) == 0.0
    assert seen.overdue_s("imports", 3 * limit_s + 0.1) > 0.0


def test_a_worker_that_is_not_ready_and_silent_is_overdue_after_three_limits() -> None:
    seen = heartbeats()
    seen.overdue_s("imports", 0.0)
    looks = int(4 * LIMIT_S / EVERY_S)

    for look in range(1, looks + 1):
        seen.look(look * EVERY_S)

    assert seen.overdue_s("imports", 3 * LIMIT_S) == 0.0
    assert seen.overdue_s("imports", 3 * LIMIT_S + EVERY_S) == pytest.approx(looks * EVERY_S)
