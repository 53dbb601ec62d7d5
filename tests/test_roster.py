"""Who holds which weights: asked of in a good order, and not remembered for ever."""

from __future__ import annotations

import pytest

from cluster.dispatch.events import WeightsHeld, WorkerJoined
from cluster.dispatch.roster import FILES_MAX, HOLDERS_MAX, Roster


@pytest.fixture
def roster() -> Roster:
    """Two workers on each of five nodes."""
    roster = Roster()
    for number in range(10):
        name, node = f"spot-{number}", f"node-{number // 2}"
        roster.join(WorkerJoined(at_s=0.0, address=f"tcp://{name}", name=name, pool="spot", node=node))
    return roster


def hold(roster: Roster, file: str, number: int) -> None:
    roster.hold(WeightsHeld(at_s=0.0, address=f"tcp://spot-{number}", sha256=file))


def test_of_each_node_one_holder_is_named_the_latest_first(roster: Roster) -> None:
    for number in (0, 1, 2, 4, 6):
        hold(roster, "weights", number)

    assert roster.holders("weights") == ["tcp://spot-6", "tcp://spot-4", "tcp://spot-2"]
    assert len(roster.holders("weights")) == HOLDERS_MAX


def test_a_worker_that_left_holds_nothing(roster: Roster) -> None:
    hold(roster, "weights", 0)
    hold(roster, "weights", 2)
    roster.leave("tcp://spot-2", expected=False)

    assert roster.holders("weights") == ["tcp://spot-0"]


def test_of_so_many_files_the_holders_are_known_those_that_were_held_last(roster: Roster) -> None:
    hold(roster, "base", 0)
    for version in range(FILES_MAX - 1):
        hold(roster, f"weights-{version}", 0)
    hold(roster, "base", 2)  # by a worker that came later
    hold(roster, "one-more", 0)

    assert roster.holders("base") == ["tcp://spot-2", "tcp://spot-0"]
    assert roster.holders("weights-0") == []
    assert roster.holders("weights-1") == ["tcp://spot-0"]
