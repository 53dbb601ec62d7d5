"""A run that is quiet says what it waits for, again and again, and ends where nobody will bring that about."""

from __future__ import annotations

from cluster.dispatch.stall import GIVE_UP, StallDetector, sentence

LIMIT_S = 60.0


def said(quiet: StallDetector, until_s: int) -> list[int]:
    """The seconds at which it is time to say something, looked at once a second."""
    return [second for second in range(until_s) if quiet.is_due(float(second))]


def test_what_is_waited_for_is_said_after_the_limit_and_then_ever_more_rarely() -> None:
    assert said(StallDetector(LIMIT_S, 0.0), 500) == [60, 120, 240, 480]


def test_whatever_happens_begins_it_anew() -> None:
    quiet = StallDetector(LIMIT_S, 0.0)
    quiet.is_due(70.0)
    quiet.happened(100.0)

    assert said(quiet, 230) == [160, 220]


def test_a_pause_is_not_quiet() -> None:
    quiet = StallDetector(LIMIT_S, 0.0)
    quiet.paused(3600.0)

    assert not quiet.is_due(3610.0)
    assert not quiet.is_over(3610.0)
    assert quiet.lasts_s(3610.0) == 10.0


def test_what_could_have_begun_is_given_up_only_after_many_times_the_limit() -> None:
    quiet = StallDetector(LIMIT_S, 0.0)

    assert not quiet.is_over(GIVE_UP * LIMIT_S - 1)
    assert quiet.is_over(GIVE_UP * LIMIT_S)


def test_the_longest_work_the_missing_workers_and_the_requests_are_named() -> None:
    running = [("train 3", "reserved-0", 75.0), *((f"rollout {at}", f"spot-{at}", float(at)) for at in range(4))]

    assert sentence(75.4, running, missing=["spot"], requests=12) == (
        "nothing has happened for 75 s; the run waits for train 3 on reserved-0 (for 75 s); "
        "rollout 3 on spot-3 (for 3 s); rollout 2 on spot-2 (for 2 s); 2 more tasks; a worker: spot; "
        "12 requests are not begun"
    )
    assert "more tasks" not in sentence(75.4, running[:3], missing=[], requests=0)
    assert sentence(75.4, [], missing=[], requests=0).endswith("waits for its scheduler")
