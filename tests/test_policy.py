"""Placement: who gets which worker, and that no state of the cluster confuses it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotlight.policy import Idle, Launch, Pool, View, Waiting, plan

ANY: tuple[Pool, ...] = ("reserved", "spot")


def idle(worker: str) -> Idle:
    return Idle(worker=worker, pool="spot" if worker.startswith("spot") else "reserved")


def waiting(
    name: str, order: int, *, pools: tuple[Pool, ...] = ANY, exploring: bool = False, losses: int = 0
) -> Waiting:
    return Waiting(id=name, pools=pools, order=order, exploring=exploring, losses=losses)


def test_preempted_work_goes_before_fresh_work() -> None:
    fresh, preempted = waiting("fresh", 1), waiting("preempted", 2, losses=1)

    launches = plan(View(idle=(idle("spot-0"),), waiting=(fresh, preempted)))

    assert launches == [Launch(request="preempted", worker="spot-0")]


def test_rollouts_go_before_exploration_that_came_first() -> None:
    exploration, rollout = waiting("explore", 1, exploring=True), waiting("rollout", 2)

    launches = plan(View(idle=(idle("spot-0"),), waiting=(exploration, rollout)))

    assert launches == [Launch(request="rollout", worker="spot-0")]


def test_a_request_that_nobody_may_take_holds_up_no_other() -> None:
    spot_only, anywhere = waiting("spot only", 1, pools=("spot",)), waiting("anywhere", 2)

    launches = plan(View(idle=(idle("reserved-0"),), waiting=(spot_only, anywhere)))

    assert launches == [Launch(request="anywhere", worker="reserved-0")]


def test_the_preferred_pool_is_taken_first() -> None:
    workers = (idle("reserved-0"), idle("spot-0"))

    launches = plan(View(idle=workers, waiting=(waiting("explore", 1, pools=("spot", "reserved"), exploring=True),)))

    assert launches == [Launch(request="explore", worker="spot-0")]


requests = st.lists(
    st.builds(
        lambda pools, exploring, losses: (pools, exploring, losses),
        st.sampled_from([ANY, ("spot",), ("reserved",), ("spot", "reserved")]),
        st.booleans(),
        st.integers(0, 2),
    ),
    max_size=12,
)


@given(requests, st.integers(0, 4), st.integers(0, 4))
def test_no_worker_is_used_twice_and_none_idles_beside_work_it_may_take(
    wanted: list[tuple[tuple[Pool, ...], bool, int]], reserved: int, spot: int
) -> None:
    everything = tuple(
        waiting(str(n), n, pools=pools, exploring=exploring, losses=losses)
        for n, (pools, exploring, losses) in enumerate(wanted)
    )
    workers = tuple(
        idle(f"{pool}-{n}") for pool, count in (("reserved", reserved), ("spot", spot)) for n in range(count)
    )

    launches = plan(View(idle=workers, waiting=everything))

    used = [launch.worker for launch in launches]
    assert len(set(used)) == len(used)
    launched = {launch.request for launch in launches}
    left = {one.pool for one in workers if one.worker not in used}
    assert not any(left & set(one.pools) for one in everything if one.id not in launched)


@given(requests, st.integers(0, 4), st.randoms())
def test_the_plan_depends_on_the_state_and_not_on_the_order_in_which_it_is_told(
    wanted: list[tuple[tuple[Pool, ...], bool, int]], spot: int, random: object
) -> None:
    everything = [
        waiting(str(n), n, pools=pools, exploring=exploring, losses=losses)
        for n, (pools, exploring, losses) in enumerate(wanted)
    ]
    workers = [idle(f"spot-{n}") for n in range(spot)]
    straight = plan(View(idle=tuple(workers), waiting=tuple(everything)))

    random.shuffle(everything)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    random.shuffle(workers)  # type: ignore[attr-defined]

    assert plan(View(idle=tuple(workers), waiting=tuple(everything))) == straight
