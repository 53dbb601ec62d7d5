"""Who is there, and who holds which weights: asked of in a good order, and not remembered for ever."""

from __future__ import annotations

import pytest

from cluster.dispatch.events import WeightsHeld, WorkerJoined
from cluster.dispatch.roster import FILES_MAX, HOLDERS_MAX, REST_MAX_S, Roster


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


def test_a_worker_that_only_scores_is_no_member_of_any_gang(roster: Roster) -> None:
    roster.join(WorkerJoined(at_s=0.0, address="tcp://reward-0", name="reward-0", pool="reward", node="node-0"))

    assert roster.alive == {("spot", f"node-{number}"): 2 for number in range(5)}


def test_a_worker_whose_name_another_has_taken_leaves_without_it(roster: Roster) -> None:
    roster.join(WorkerJoined(at_s=0.0, address="tcp://again", name="spot-0", pool="spot", node="node-9"))

    roster.leave("tcp://spot-0", expected=True)

    assert roster.by_name["spot-0"].address == "tcp://again"
    assert "spot-0" not in roster.leaving


def test_no_worker_rests_longer_than_the_longest_rest(roster: Roster) -> None:
    worker = roster.workers["tcp://spot-0"]

    assert max(roster.lose_engine(worker, 0.0) for _ in range(20)) == REST_MAX_S


def test_spot_workers_that_are_about_to_leave_do_not_count_as_there(roster: Roster) -> None:
    roster.note_leaving("tcp://spot-0")

    assert roster.spot_on_nodes(of_at_least=1) == 9
    assert roster.spot_on_nodes(of_at_least=2) == 8
