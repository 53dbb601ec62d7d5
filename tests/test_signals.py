"""What the outside may ask of work in flight: it arrives as it was sent, and concerns nothing else."""

from __future__ import annotations

import json

import pytest

from factories import make_request as request
from spotlight.device.signals import (
    GANGS_MAX,
    ORDERS,
    PLACES_MAX,
    CallOff,
    Clear,
    CloseExploration,
    Leave,
    Order,
    PlaceShard,
    Regroup,
    Signals,
    Stop,
    order_from_message,
    order_to_message,
    shard_from_message,
    shard_to_message,
)
from spotlight.records import Placement, Quarantined, Stopped, Surplus

EVERY_ORDER: list[Order] = [
    Clear(run="r"),
    Stop(run="r"),
    CloseExploration(run="r", iteration=3),
    Leave(),
    Regroup(gang="rollout-0/1", epoch=2),
    CallOff(gang="rollout-0/1", epoch=2),
]
PLACES = [
    Placement(gang="g", epoch=1, rank=0, width=1),
    Placement(gang="g", epoch=1, rank=1, width=2),
    Surplus(),
    5,
]


def test_every_order_is_tried_here() -> None:
    assert {type(order) for order in EVERY_ORDER} == set(ORDERS.values())


@pytest.mark.parametrize("order", EVERY_ORDER)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    travelled = json.loads(json.dumps(order_to_message(order)))

    assert order_from_message(**travelled) == order


@pytest.mark.parametrize("placement", PLACES)
def test_the_place_of_a_shard_arrives_as_it_was_sent(placement: Placement | Surplus | int) -> None:
    command = PlaceShard(gang="g", shard=1, placement=placement)

    travelled = json.loads(json.dumps(shard_to_message(command)))

    assert shard_from_message(**travelled) == command


def test_a_stopped_run_stops_until_it_is_cleared_and_no_other_run_does() -> None:
    signals, mine, other = Signals(), request(run="mine"), request(run="other")

    signals.obey(Stop(run="mine"))

    assert signals.is_stopping("mine")
    assert signals.check(other) is None
    with pytest.raises(Stopped):
        signals.check(mine)
    signals.obey(Clear(run="mine"))
    assert signals.check(mine) is None


def test_exploration_once_closed_stays_closed() -> None:
    signals = Signals()

    signals.obey(CloseExploration(run="r", iteration=3))
    signals.obey(CloseExploration(run="r", iteration=2))

    assert signals.check(request(run="r", purpose="explore", iteration=3))
    assert signals.check(request(run="r", purpose="explore", iteration=4)) is None
    assert signals.check(request(run="r", purpose="rollout", iteration=3)) is None


def test_a_run_that_is_resumed_explores_again_what_an_earlier_session_closed() -> None:
    signals = Signals()
    signals.obey(CloseExploration(run="mine", iteration=3))
    signals.obey(CloseExploration(run="other", iteration=3))

    signals.obey(Clear(run="mine"))

    assert signals.check(request(run="mine", purpose="explore", iteration=3)) is None
    assert signals.check(request(run="other", purpose="explore", iteration=3))


def test_what_nobody_asks_for_any_more_is_forgotten_earliest_first() -> None:
    signals = Signals()
    last = GANGS_MAX
    places = [Placement(gang=f"g{n}", epoch=1, rank=0, width=2) for n in range(last + 1)]

    for place in places:
        signals.obey(CallOff(gang=place.gang, epoch=1))
        signals.obey(PlaceShard(gang=place.gang, shard=0, placement=place))

    assert [signals.is_called_off(places[n]) for n in (0, 1, last)] == [False, True, True]
    kept = (last - PLACES_MAX, last - PLACES_MAX + 1, last)
    assert [signals.was_told(f"g{n}", 0) for n in kept] == [False, True, True]


def test_only_formings_up_to_the_one_named_end() -> None:
    signals = Signals()
    now, later = (Placement(gang="g", epoch=epoch, rank=0, width=2) for epoch in (2, 3))

    signals.obey(Regroup(gang="g", epoch=2))
    signals.obey(CallOff(gang="g", epoch=2))

    assert signals.must_leave(now)
    assert signals.is_called_off(now)
    assert not signals.must_leave(later)
    assert not signals.is_called_off(later)
    signals.obey(Leave())
    assert signals.must_leave(later)


def test_a_shard_finds_its_place_once_and_a_number_sets_its_request_aside() -> None:
    signals, wanted = Signals(), request(run="r")
    placed = Placement(gang="g", epoch=4, rank=1, width=2)

    signals.obey(PlaceShard(gang="g", shard=1, placement=placed))
    signals.obey(PlaceShard(gang="g", shard=0, placement=5))

    assert signals.placed("g", 0, wanted) == Quarantined(request=wanted, preemptions=5)
    assert signals.placed("g", 1, wanted) == placed
    assert signals.placed("g", 1, wanted) == Surplus()


def test_what_another_worker_was_asked_counts_only_while_one_stands_in_for_it() -> None:
    here, other = Signals(), Signals()
    other.obey(Leave())
    place = Placement(gang="g", epoch=1, rank=0, width=1)

    with here.standing_in_for(other):
        within = here.must_leave(place)
        here.obey(Stop(run="r"))

    assert within
    assert not here.must_leave(place)
    assert not here.is_stopping("r")
    assert other.is_stopping("r")
