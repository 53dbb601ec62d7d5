"""Placement: who gets which workers, and that no state of the cluster confuses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.plan.placement import Idle, Launch, PoolNode, Running, View, Waiting, plan, widen
from spotlight.records import Pool

ANY: tuple[Pool, ...] = ("reserved", "spot")
DOUBLING = (1, 2, 4)
"""Widths that divide what they split, as those of real models do."""


def idle(worker: str) -> Idle:
    """The worker ``pool[-node][/rank]``: ``spot/1``, ``spot-b/0``; without a rank a node of its own."""
    return Idle(worker=worker, pool="spot" if worker.startswith("spot") else "reserved", node=worker.split("/")[0])


def node(name: str, workers: int) -> tuple[Idle, ...]:
    return tuple(idle(f"{name}/{rank}") for rank in range(workers))


def places(nodes: Mapping[str, int]) -> dict[PoolNode, int]:
    """Workers alive on each, all of one pool."""
    return {(idle(name).pool, name): count for name, count in nodes.items()}


def waiting(
    name: str,
    order: int,
    *,
    pools: tuple[Pool, ...] = ANY,
    exploring: bool = False,
    widths: tuple[int, ...] = (1,),
    begun: bool = False,
    held: tuple[str, ...] = (),
) -> Waiting:
    return Waiting(
        id=name,
        pools=pools,
        order=order,
        exploring=exploring,
        begun=begun or bool(held),
        widths=widths,
        slots=max(widths),
        held=held,
    )


def running(name: str, *workers: str, remaining_s: float, widths: tuple[int, ...] = DOUBLING) -> Running:
    place = idle(workers[0])
    return Running(
        id=name,
        workers=workers,
        pool=place.pool,
        node=place.node,
        widths=widths,
        slots=max(widths),
        remaining_s=remaining_s,
    )


def placed(launches: list[Launch]) -> dict[str, tuple[str, ...]]:
    return {launch.request: launch.workers for launch in launches}


def test_preempted_work_goes_before_fresh_work() -> None:
    fresh, preempted = waiting("fresh", 1), waiting("preempted", 2, begun=True)

    launches = plan(View(idle=(idle("spot-0"),), waiting=(fresh, preempted)))

    assert launches == [Launch(request="preempted", workers=("spot-0",))]


def test_rollouts_go_before_exploration_that_came_first() -> None:
    exploration, rollout = waiting("explore", 1, exploring=True), waiting("rollout", 2)

    launches = plan(View(idle=(idle("spot-0"),), waiting=(exploration, rollout)))

    assert launches == [Launch(request="rollout", workers=("spot-0",))]


def test_a_request_that_nobody_may_take_holds_up_no_other() -> None:
    spot_only, anywhere = waiting("spot only", 1, pools=("spot",)), waiting("anywhere", 2)

    launches = plan(View(idle=(idle("reserved-0"),), waiting=(spot_only, anywhere)))

    assert launches == [Launch(request="anywhere", workers=("reserved-0",))]


def test_the_preferred_pool_is_taken_first() -> None:
    workers = (idle("reserved-0"), idle("spot-0"))

    launches = plan(View(idle=workers, waiting=(waiting("explore", 1, pools=("spot", "reserved"), exploring=True),)))

    assert launches == [Launch(request="explore", workers=("spot-0",))]


def test_many_requests_run_narrow() -> None:
    requests = tuple(waiting(f"r{n}", n, widths=DOUBLING) for n in range(9))

    launches = plan(View(idle=(*node("spot-a", 4), *node("spot-b", 4)), waiting=requests))

    assert [len(launch.workers) for launch in launches] == [1] * 8
    assert [launch.request for launch in launches] == [f"r{n}" for n in range(8)]


def test_the_last_few_requests_run_wide() -> None:
    workers = (*node("spot-a", 4), *node("spot-b", 4))
    four, two = (tuple(waiting(f"r{n}", n, widths=DOUBLING) for n in range(count)) for count in (4, 2))

    shared_by_four, shared_by_two = (plan(View(idle=workers, waiting=requests)) for requests in (four, two))

    assert [len(launch.workers) for launch in shared_by_four] == [2] * 4
    assert [len(launch.workers) for launch in shared_by_two] == [4] * 2


def test_requests_that_have_their_workers_take_no_share_of_what_is_left() -> None:
    preempted, last = waiting("preempted", 2, begun=True), waiting("last", 1, widths=DOUBLING)

    launches = plan(View(idle=node("spot", 5), waiting=(preempted, last)))

    assert {name: len(gang) for name, gang in placed(launches).items()} == {"preempted": 1, "last": 4}


def test_no_gang_is_wider_than_the_shards_that_are_not_done() -> None:
    nearly_done = replace(waiting("r", 1, widths=DOUBLING), slots=3)

    (launch,) = plan(View(idle=node("spot", 4), waiting=(nearly_done,)))

    assert len(launch.workers) == 2


def test_a_gang_never_spans_nodes_or_pools() -> None:
    one_each = (idle("spot-a/0"), idle("spot-b/0"), idle("reserved-a/0"), idle("reserved-b/0"))

    either, pair = (plan(View(idle=one_each, waiting=(waiting("r", 1, widths=w),))) for w in (DOUBLING, (2, 4)))

    assert either == [Launch(request="r", workers=("reserved-a/0",))]
    assert pair == []


def test_workers_of_both_pools_on_one_machine_make_no_gang() -> None:
    machine = (Idle(worker="w0", pool="reserved", node="n"), Idle(worker="w1", pool="spot", node="n"))

    launches = plan(View(idle=machine, waiting=(waiting("r", 1, widths=(2,)),)))

    assert launches == []


def test_a_gang_takes_the_node_that_it_fills_best() -> None:
    workers = (*node("spot-a", 4), *node("spot-b", 2))

    launches = plan(View(idle=workers, waiting=(waiting("pair", 1, widths=(2,)), waiting("four", 2, widths=(4,)))))

    assert {name: idle(gang[0]).node for name, gang in placed(launches).items()} == {"pair": "spot-b", "four": "spot-a"}


def test_a_broken_gang_takes_its_survivors_and_frees_those_it_cannot_use() -> None:
    survivors = ("spot/0", "spot/2", "spot/3")  # 1 of 4 was lost
    broken, fresh = waiting("broken", 2, widths=DOUBLING, held=survivors), waiting("fresh", 1)

    launches = plan(View(idle=tuple(map(idle, survivors)), waiting=(fresh, broken)))

    assert placed(launches) == {"broken": ("spot/0", "spot/2"), "fresh": ("spot/3",)}


def test_a_broken_gang_widens_over_free_workers_beside_its_survivors() -> None:
    survivors = ("spot/0", "spot/2", "spot/3")
    broken = waiting("broken", 1, widths=DOUBLING, held=survivors)

    launches = plan(View(idle=node("spot", 4), waiting=(broken,)))

    assert placed(launches) == {"broken": (*survivors, "spot/1")}


def test_survivors_are_not_given_to_fresh_requests() -> None:
    broken = waiting("broken", 2, widths=(2,), held=("spot/0",))
    fresh = waiting("fresh", 1)

    launches = plan(View(idle=(idle("spot/0"),), waiting=(fresh, broken), alive=places({"spot": 2})))

    assert launches == []


def test_survivors_on_a_node_that_shrank_below_every_width_are_free_for_others() -> None:
    broken = waiting("broken", 1, widths=(4,), held=("spot/0", "spot/1", "spot/2"))
    fresh = waiting("fresh", 2, widths=(2,))

    launches = plan(View(idle=node("spot", 3), waiting=(broken, fresh), alive=places({"spot": 3})))

    assert placed(launches) == {"fresh": ("spot/0", "spot/1")}


def test_workers_of_another_pool_on_the_node_make_no_gang_possible() -> None:
    """On a machine of three reserved workers and a spot one, no two spot workers can meet."""
    wide, narrow = waiting("wide", 1, pools=("spot",), widths=(2,), held=("spot-0",)), waiting("narrow", 2)
    spot = Idle(worker="spot-0", pool="spot", node="m")

    launches = plan(View(idle=(spot,), waiting=(wide, narrow), alive={("spot", "m"): 1, ("reserved", "m"): 3}))

    assert placed(launches) == {"narrow": ("spot-0",)}


def test_a_broken_gang_that_moves_to_another_node_frees_all_its_survivors() -> None:
    broken = waiting("broken", 1, widths=(2,), held=("spot-a/0",))
    fresh = waiting("fresh", 2)

    launches = plan(
        View(idle=(idle("spot-a/0"), *node("spot-b", 2)), waiting=(broken, fresh), alive=places({"spot-a": 2}))
    )

    assert placed(launches) == {"broken": ("spot-b/0", "spot-b/1"), "fresh": ("spot-a/0",)}


def test_of_two_broken_gangs_with_half_a_gang_each_the_older_takes_both_halves() -> None:
    older = waiting("older", 1, widths=(2,), held=("spot/1",))
    younger = waiting("younger", 2, widths=(2,), held=("spot/0",))

    launches = plan(View(idle=node("spot", 2), waiting=(younger, older)))

    assert placed(launches) == {"older": ("spot/1", "spot/0")}


def test_a_broken_gang_borrows_beside_its_own_survivors_rather_than_where_it_would_be_wider() -> None:
    broken = waiting("broken", 1, widths=(2, 3), held=("spot-b/0",))
    beside = waiting("beside", 2, exploring=True, widths=(2,), held=("spot-b/1",))
    elsewhere = waiting("elsewhere", 3, exploring=True, widths=(3,), held=("spot-a/0", "spot-a/1", "spot-a/2"))
    alone = tuple(idle(f"spot-{name}/0") for name in "cde")

    launches = plan(View(idle=(*node("spot-a", 3), *node("spot-b", 2), *alone), waiting=(broken, beside, elsewhere)))

    assert placed(launches)["broken"] == ("spot-b/0", "spot-b/1")


def test_a_broken_rollout_takes_the_survivors_of_a_broken_exploration_and_not_the_other_way_round() -> None:
    exploration = waiting("explore", 1, exploring=True, widths=(2,), held=("spot/0",))
    rollout = waiting("rollout", 2, widths=(2,), held=("spot/1",))

    launches = plan(View(idle=node("spot", 2), waiting=(exploration, rollout)))

    assert placed(launches) == {"rollout": ("spot/1", "spot/0")}


def test_survivors_of_others_are_taken_only_where_free_workers_do_not_do() -> None:
    older = waiting("older", 1, widths=(2,), begun=True)
    younger = waiting("younger", 2, widths=(2,), held=("spot-a/0", "spot-a/1"))

    launches = plan(View(idle=(*node("spot-a", 2), *node("spot-b", 2)), waiting=(younger, older)))

    assert placed(launches) == {"older": ("spot-b/0", "spot-b/1"), "younger": ("spot-a/0", "spot-a/1")}


def test_survivors_kept_for_an_older_request_are_not_given_to_a_younger_one() -> None:
    older = waiting("older", 1, widths=(2,), held=("spot/0",))
    younger = waiting("younger", 2, begun=True)

    launches = plan(View(idle=(idle("spot/0"),), waiting=(younger, older), alive=places({"spot": 2})))

    assert launches == []


def test_a_worker_that_two_broken_gangs_claim_is_given_to_the_older_one() -> None:
    older, younger = (waiting("older", 1, widths=(2,), held=("spot/0",)), waiting("younger", 2, held=("spot/0",)))

    now = plan(View(idle=node("spot", 2), waiting=(older, younger)))
    too_early = plan(View(idle=node("spot", 1), waiting=(older, younger), alive=places({"spot": 2})))

    assert placed(now) == {"older": ("spot/0", "spot/1")}
    assert too_early == []


def test_of_many_wide_requests_only_the_first_holds_a_node() -> None:
    wide, narrow = (waiting("wide 1", 1, widths=(4,)), waiting("wide 2", 2, widths=(4,))), waiting("narrow", 3)

    launches = plan(
        View(
            idle=(idle("spot-a/0"), idle("spot-b/0")), waiting=(*wide, narrow), alive=places({"spot-a": 4, "spot-b": 4})
        )
    )

    assert placed(launches) == {"narrow": ("spot-a/0",)}


def test_a_wide_request_holds_the_node_where_it_will_soonest_fit() -> None:
    wide, narrow = waiting("wide", 1, widths=(4,)), waiting("narrow", 2)
    workers = (*node("spot-a", 1), *node("spot-b", 3))

    launches = plan(View(idle=workers, waiting=(wide, narrow), alive=places({"spot-a": 4, "spot-b": 4})))

    assert placed(launches) == {"narrow": ("spot-a/0",)}


def test_a_request_that_no_node_could_ever_run_holds_up_nobody() -> None:
    too_wide, narrow = waiting("too wide", 1, widths=(4,)), waiting("narrow", 2)
    too_few_shards = replace(waiting("too few shards", 0, widths=(2,)), slots=1)

    launches = plan(View(idle=(idle("spot/0"),), waiting=(too_few_shards, too_wide, narrow), alive=places({"spot": 3})))

    assert placed(launches) == {"narrow": ("spot/0",)}


def test_a_gang_widens_over_workers_that_nobody_waits_for() -> None:
    narrow = running("narrow", "spot/3", remaining_s=8.0)
    beside, elsewhere = View(idle=node("spot", 3), waiting=(), running=(narrow,)), node("spot-b", 3)

    assert widen(beside) == ["narrow"]
    assert widen(replace(beside, idle=elsewhere)) == []
    assert widen(replace(beside, waiting=(waiting("w", 1, pools=("spot",), widths=(4,)),))) == []
    assert widen(replace(beside, waiting=(waiting("w", 1, pools=("reserved",)),))) == ["narrow"]


def test_a_gang_widens_only_when_that_saves_more_than_forming_anew_costs() -> None:
    view = View(idle=node("spot", 1), waiting=(), regroup_s=1.0)  # 1 -> 2 workers halves what is left

    worth, not_worth = (replace(view, running=(running("r", "spot/1", remaining_s=left),)) for left in (2.1, 2.0))

    assert widen(worth) == ["r"]
    assert widen(not_worth) == []


def test_a_gang_widens_no_further_than_its_shards_that_are_not_done() -> None:
    nearly_done = replace(running("r", "spot/3", remaining_s=8.0), slots=1)

    assert widen(View(idle=node("spot", 3), waiting=(), running=(nearly_done,))) == []


def test_the_gang_with_most_left_widens_first_and_no_worker_is_counted_twice() -> None:
    short, long = (running(name, f"spot/{name}", remaining_s=left) for name, left in (("short", 8.0), ("long", 9.0)))

    chosen = widen(View(idle=node("spot", 1), waiting=(), running=(short, long)))

    assert chosen == ["long"]


requests = st.lists(
    st.builds(
        lambda pools, exploring, begun, widths: (pools, exploring, begun, widths),
        st.sampled_from([ANY, ("spot",), ("reserved",), ("spot", "reserved")]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([(1,), (1, 2, 4), (2, 4), (1, 3)]),
    ),
    max_size=12,
)
Wanted = list[tuple[tuple[Pool, ...], bool, bool, tuple[int, ...]]]


def all_waiting(wanted: Wanted) -> list[Waiting]:
    return [
        waiting(str(n), n, pools=pools, exploring=exploring, begun=begun, widths=widths)
        for n, (pools, exploring, begun, widths) in enumerate(wanted)
    ]


@given(requests, st.integers(0, 4), st.integers(0, 4))
def test_no_worker_is_used_twice_and_none_idles_beside_work_it_may_take(
    wanted: Wanted, reserved: int, spot: int
) -> None:
    everything = [each for each in all_waiting(wanted) if each.widths[0] == 1]  # a wider one may have to hold a node
    workers = (*node("reserved", reserved), *node("spot", spot))

    launches = plan(View(idle=workers, waiting=tuple(everything)))

    used = [worker for launch in launches for worker in launch.workers]
    assert len(set(used)) == len(used)
    launched = {launch.request for launch in launches}
    left = {each.pool for each in workers if each.worker not in used}
    assert not any(left & set(each.pools) for each in everything if each.id not in launched)


@given(requests, st.integers(0, 4), st.integers(0, 4), st.randoms())
def test_the_plan_depends_on_the_state_and_not_on_the_order_in_which_it_is_told(
    wanted: Wanted, first: int, second: int, random: Random
) -> None:
    everything = all_waiting(wanted)
    workers = [*node("spot-a", first), *node("spot-b", second)]
    straight = plan(View(idle=tuple(workers), waiting=tuple(everything)))

    random.shuffle(everything)
    random.shuffle(workers)

    assert plan(View(idle=tuple(workers), waiting=tuple(everything))) == straight


LONGEST = 3
"""Rounds that a gang is at work in the test below, at most."""


@given(
    st.lists(st.integers(2, 4), min_size=1, max_size=3),
    st.lists(st.sampled_from([(1,), (2,), (3,), (1, 2, 4)]), max_size=4),
    st.randoms(use_true_random=False),
)
def test_an_endless_stream_of_narrow_requests_does_not_starve_a_wide_one(
    sizes: list[int], ahead: list[tuple[int, ...]], random: Random
) -> None:
    workers = tuple(each for n, size in enumerate(sizes) for each in node(f"spot-{n}", size))
    nodes = {f"spot-{n}": size for n, size in enumerate(sizes)}
    queue = [waiting(f"ahead {n}", n, widths=widths) for n, widths in enumerate(ahead) if widths[0] <= max(sizes)]
    queue.append(waiting("wide", len(ahead), widths=(max(sizes),)))
    busy = {each.worker: random.randint(1, LONGEST) for each in workers}  # rounds left
    # The first of the queue holds a node after LONGEST rounds. Each time that it moves to a fuller node, and when the
    # one it holds is free, at most LONGEST rounds have gone by; a node has at most 4 workers.
    rounds = LONGEST * (1 + max(sizes)) * len(queue)

    for number in range(rounds):
        if not any(each.id == "wide" for each in queue):
            break
        busy = {worker: left - 1 for worker, left in busy.items() if left > 1}
        queue += [waiting(f"narrow {number}/{n}", 100 + number, widths=(1,)) for n in range(len(workers))]
        free = tuple(each for each in workers if each.worker not in busy)
        launches = placed(plan(View(idle=free, waiting=tuple(queue), alive=places(nodes))))
        queue = [each for each in queue if each.id not in launches]
        for gang in launches.values():
            busy |= dict.fromkeys(gang, random.randint(1, LONGEST))

    assert not any(each.id == "wide" for each in queue)


class Cluster:
    """A small cluster that keeps the books as the scheduler plugin does, and checks every plan that it is given."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.machines = {f"{random.choice(ANY)}-{n}": random.randint(1, 4) for n in range(random.randint(1, 3))}
        self.alive = {each.worker: each for name, size in self.machines.items() for each in node(name, size)}
        self.lost: list[str] = []
        self.waiting: dict[str, Waiting] = {}
        self.gangs: dict[str, tuple[Waiting, tuple[str, ...]]] = {}
        self.arrived = 0

    def arrive(self) -> None:
        """Feasible on some machine that is whole, in some pool that it may use."""
        home = self.random.choice(sorted(self.machines))
        narrowest, name = self.random.randint(1, self.machines[home]), f"r{self.arrived}"
        fresh = waiting(
            name,
            self.arrived,
            pools=self.random.choice([ANY, ANY[::-1], (idle(home).pool,)]),
            exploring=self.random.random() < 1 / 4,
            widths=(narrowest, *(width for width in range(narrowest + 1, 5) if self.random.random() < 1 / 3)),
        )
        self.waiting[name] = replace(fresh, slots=self.random.randint(narrowest, 4))
        self.arrived += 1

    def finish(self) -> None:
        if self.gangs:
            del self.gangs[self.random.choice(sorted(self.gangs))]

    def lose(self) -> None:
        """The worker's gang breaks; the others of the gang wait with the request."""
        if not self.alive:
            return
        gone = self.random.choice(sorted(self.alive))
        del self.alive[gone]
        self.lost.append(gone)
        for name, (request, workers) in list(self.gangs.items()):
            if gone in workers:
                del self.gangs[name]
                self.waiting[name] = replace(request, begun=True, held=workers)
        for name, request in self.waiting.items():
            self.waiting[name] = replace(request, held=tuple(worker for worker in request.held if worker != gone))

    def join(self) -> None:
        if self.lost:
            back = self.lost.pop(self.random.randrange(len(self.lost)))
            self.alive[back] = idle(back)

    def pump(self) -> None:
        view = self.view()
        launches = plan(view)
        free = {each.worker: each for each in view.idle}
        for launch in launches:
            request = self.waiting.pop(launch.request)  # KeyError: launched twice, or never asked for
            members = [free.pop(worker) for worker in launch.workers]  # KeyError: busy, lost, or given away twice
            assert len({(each.pool, each.node) for each in members}) == 1
            assert members[0].pool in request.pools
            assert len(members) in request.widths
            assert len(members) <= request.slots
            self.gangs[launch.request] = (replace(request, held=()), launch.workers)
        self.check_survivors(view, placed(launches))
        assert self.gangs or not any(self.could_run(each, name) for each in view.waiting for name in self.machines), (
            view
        )

    def could_run(self, request: Waiting, name: str) -> bool:
        return idle(name).pool in request.pools and request.widths[0] <= self.view().alive.get(
            (idle(name).pool, name), 0
        )

    def check_survivors(self, view: View, launches: dict[str, tuple[str, ...]]) -> None:
        """What is kept for a request that still waits, and is of use to it, went to none but broken gangs before it."""
        taken = {worker: self.gangs[name][0] for name, workers in launches.items() for worker in workers}
        for kept in self.waiting.values():
            for worker in taken.keys() & set(kept.held):
                by, useless = taken[worker], view.alive[idle(worker).pool, idle(worker).node] < kept.widths[0]
                assert useless or (by.begun and (by.exploring, by.order) < (kept.exploring, kept.order))

    def view(self) -> View:
        busy = {worker for _, workers in self.gangs.values() for worker in workers}
        return View(
            idle=tuple(each for worker, each in self.alive.items() if worker not in busy),
            waiting=tuple(self.waiting.values()),
            alive=Counter((each.pool, each.node) for each in self.alive.values()),
        )


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_no_order_of_events_overlaps_or_splits_a_gang_or_blocks_the_cluster(seed: int) -> None:
    random = Random(seed)
    cluster = Cluster(random)

    for _ in range(100):
        event = random.choice([cluster.arrive, cluster.finish, cluster.lose, cluster.join])
        event()
        if random.random() < 3 / 4:  # else some events pass between two looks
            cluster.pump()  # checks what it is given


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_once_the_world_is_calm_every_request_gets_done(seed: int) -> None:
    random = Random(seed)
    cluster = Cluster(random)
    for _ in range(100):
        random.choice([cluster.arrive, cluster.finish, cluster.lose, cluster.join, cluster.pump])()

    while cluster.lost:
        cluster.join()
    for _ in range(len(cluster.waiting) + len(cluster.gangs)):  # one gang ends in each round, the last launched first
        cluster.pump()
        cluster.gangs.popitem()

    assert not cluster.waiting
