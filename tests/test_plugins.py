"""What the plugin on the scheduler does about workers that others use, too: a scheduler and workers in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import dask
import pytest
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Reschedule, Scheduler, Status, Worker

from cluster.dispatch import stall
from cluster.dispatch.events import Evict
from cluster.dispatch.heartbeats import Heartbeats
from cluster.dispatch.rules import WATCH_S, Rules
from cluster.messages import HEARD_OF, ORDER, PLACE, READY, REFUSED
from cluster.scheduler.plugin import DispatchPlugin
from cluster.worker.device import WorkerDevice
from spotlight.device.process import EngineLost
from spotlight.records import Drained

WAIT_S = 30.0
RULES = Rules()


class Live:
    """A scheduler with the plugin, and workers that say that they are ready as a member of a run does."""

    def __init__(self, scheduler: Scheduler, client: Client, stack: AsyncExitStack) -> None:
        self.scheduler, self.client, self._stack = scheduler, client, stack

    @property
    def plugin(self) -> DispatchPlugin:
        plugin = self.scheduler.plugins[DispatchPlugin.name]
        assert isinstance(plugin, DispatchPlugin)
        return plugin

    async def worker(self, name: str | int, **resources: float) -> Worker:
        worker = Worker(
            self.scheduler.address, name=name, nthreads=1, resources=resources, dashboard=False, memory_limit=0
        )
        return await self._stack.enter_async_context(worker)

    async def member(self, name: str | int, pool: str, *, foreign_s: float = 0.0) -> Worker:
        """
        Args:
            foreign_s: how long it is busy with what is no task of the run when it joins.
        """
        worker = await self.worker(name, **{pool: 1})
        if foreign_s:
            await self.occupy(worker, foreign_s)
        await worker.set_resources(engine=1)
        worker.stream_handlers[ORDER] = worker.stream_handlers[PLACE] = _ignore
        worker.batched_send({"op": READY, "session": "s", "pool": pool, "node": "n"})
        await until(lambda: str(name) in self.plugin.snapshot().workers)
        return worker

    async def occupy(self, worker: Worker, seconds: float = WAIT_S) -> None:
        """Give it what is no task of the run, for so long or until `_freed`; have the plugin look at all workers."""
        _freed.clear()
        self.foreign = self.client.submit(_is_freed, seconds, workers=[worker.address], pure=False)
        await until(lambda: worker.state.executing_count)
        self.plugin.schedule_decision()
        await asyncio.sleep(0.1)

    async def rolled_out(self, requests: int, *, name: str = "rollout-0", seconds: float = 0.2) -> list[str]:
        """Names of the workers that did each, in so many seconds."""
        keys = [(name, index) for index in range(requests)]
        annotations: dict[str, Any] = {"pool": "any", "phase": "rollout", "iteration": 0, "shards": 1, "widths": [1]}
        calls = dict.fromkeys(keys, (_name_of_worker, seconds))
        layer = MaterializedLayer(calls, annotations=annotations | {"resources": {"gate": 1}})
        futures: Any = self.client.get(HighLevelGraph({name: layer}, {name: set()}), keys, sync=False)
        return list(await asyncio.wait_for(self.client.gather(futures), WAIT_S))


def _ignore(**_: Any) -> None:
    """Takes an order, or a place in a gang."""


_freed = threading.Event()
"""Ends what occupies a worker, which is in this process, too."""


def _is_freed(at_most_s: float) -> bool:
    return _freed.wait(at_most_s)


def _name_of_worker(seconds: float) -> str:
    from distributed import get_worker

    time.sleep(seconds)
    return str(get_worker().name)


def _plus_one(value: int) -> int:
    return value + 1


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not what():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def live(rules: Rules = RULES) -> AsyncIterator[Live]:
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp")
        )
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True, set_as_default=False))
        plugin = DispatchPlugin("run", "s", rules, owner=client.id, driver="me", member="m")
        await client.register_plugin(plugin)
        yield Live(scheduler, client, stack)


def test_workers_that_take_no_part_are_sent_no_orders() -> None:
    async def stopped() -> tuple[Status, int]:
        async with live() as there:
            await there.member("spot-0", "spot")
            other = await there.worker("somebody-elses")
            (data,) = await there.client.scatter([1], workers=[other.address])
            there.plugin.stop()
            found = await asyncio.wait_for(there.client.submit(_plus_one, data, workers=[other.address]), WAIT_S)
            return other.status, found

    assert asyncio.run(stopped()) == (Status.running, 2)


def test_what_a_worker_says_to_an_earlier_start_of_the_run_is_not_taken_for_this_one_s() -> None:
    """It would be given work, and end none of it when it is told to."""

    async def joined() -> tuple[dict[str, int], int]:
        async with live() as there:
            worker = await there.worker("spot-0", spot=1)
            told = {"session": "before", "pool": "reserved", "node": "n"}
            worker.batched_send({"op": REFUSED, "session": "before", "reason": "no disk", "lasts": True})
            worker.batched_send({"op": READY, **told})
            worker.batched_send({"op": READY, **told, "session": "s", "pool": "spot"})
            await until(lambda: "spot-0" in there.plugin.snapshot().workers)
            return dict(there.plugin.snapshot().pools), len(there.scheduler.get_events(HEARD_OF))

    assert asyncio.run(joined()) == ({"spot": 1}, 1)


def test_what_a_driver_fetched_is_given_again_if_it_was_lost_on_its_way_and_nothing_twice() -> None:
    async def fetched() -> list[Drained]:
        async with live() as there:
            await there.member("spot-0", "spot")
            driver: Any = there.client.scheduler
            return [Drained.of(await driver.spotlight_drain(session="s", fetched=fetched)) for fetched in (0, 0, 1)]

    lost, again, then = asyncio.run(fetched())

    assert lost == again
    assert [life.worker for life in again.workers.values()] == ["spot-0"]
    assert not then.workers


def test_what_others_submit_is_no_task_of_the_run_whatever_they_call_it() -> None:
    async def known() -> bool:
        async with live() as there, Client(there.scheduler.address, asynchronous=True, set_as_default=False) as other:
            there.client, ours = other, there.client
            waiting = asyncio.create_task(there.rolled_out(1))
            await until(lambda: there.scheduler.tasks)
            there.client = ours
            waiting.cancel()
            return there.plugin.shown.state.knows(("rollout-0", 0))

    assert not asyncio.run(known())


def test_engines_that_a_worker_whose_name_is_a_number_loses_are_counted() -> None:
    """As those of a `LocalCluster`."""

    def sick(*_: object) -> None:
        raise EngineLost("signal 9")

    async def lost() -> None:
        async with live() as there:
            worker, engine, node = await there.member(0, "spot"), cast(Any, SimpleNamespace(call=sick)), cast(Any, None)
            doing = asyncio.create_task(there.rolled_out(1))
            await until(lambda: worker.state.executing_count)
            with pytest.raises(Reschedule):
                await asyncio.to_thread(WorkerDevice(worker, engine, node, quarantine_after=5).prepare, "")
            await until(lambda: there.plugin.shown.state.roster.by_name["0"].engines_lost)
            await doing

    asyncio.run(lost())


def test_during_a_run_dask_neither_moves_work_nor_gives_it_up_and_afterwards_it_does_as_before() -> None:
    def rules_of(scheduler: Scheduler) -> dict[str, object]:
        return {
            "losses": scheduler.allowed_failures,
            "silence_s": scheduler.worker_ttl,
            "waiting": scheduler.no_workers_timeout,
            "steals": "stealing" in scheduler.periodic_callbacks,
            "moves results": scheduler.extensions["amm"].running,
            "its own": {name for name in vars(scheduler) if callable(getattr(Scheduler, name, None))},
        }

    async def run() -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            before = rules_of(scheduler)
            plugin = DispatchPlugin("run", "s", RULES, owner=client.id, driver="me", member="m")
            await client.register_plugin(plugin)
            await until(lambda: "stealing" not in scheduler.periodic_callbacks)
            during, there = rules_of(scheduler), scheduler.plugins[DispatchPlugin.name]
            assert isinstance(there, DispatchPlugin)
            await there.leave()
            await until(lambda: "stealing" in scheduler.periodic_callbacks)
            return before, during, rules_of(scheduler)

    with dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.no-workers-timeout": 60}):
        before, during, after = asyncio.run(run())

    assert before["steals"]
    assert before["moves results"]
    assert during == {
        "losses": 1_000_000,
        "silence_s": inf,
        "waiting": None,
        "steals": False,
        "moves results": False,
        "its own": {"valid_workers", "check_idle_saturated", "decide_worker_rootish_queuing_disabled"},
    }
    assert after == before


@pytest.mark.parametrize(("tasks", "saturation"), [(2, 1.1), pytest.param(40, 1.1, marks=pytest.mark.live), (40, inf)])
def test_what_others_submit_never_runs_beside_the_scheduler(tasks: int, saturation: float) -> None:
    """There the driver is. Other workers are busy, so that the head is the one that Dask would choose."""

    async def run() -> set[str]:
        async with live() as there:
            await there.worker("head", head=4)
            spot = await there.member("spot-0", "spot")
            await there.occupy(spot, 1.0)
            futures: Any = there.client.map(_name_of_worker, [0.2] * tasks, pure=False)
            return set(await asyncio.wait_for(there.client.gather(futures), WAIT_S))

    with dask.config.set({"distributed.scheduler.worker-saturation": saturation}):
        assert asyncio.run(run()) == {"spot-0"}


def test_what_others_submit_waits_where_the_head_alone_is_there() -> None:
    async def run() -> tuple[str, str]:
        async with live() as there:
            await there.worker("head", head=4)
            future: Any = there.client.submit(_name_of_worker, 0, pure=False)
            await asyncio.sleep(0.5)
            early = future.status
            await there.member("spot-0", "spot")
            return early, await asyncio.wait_for(future.result(), WAIT_S)

    assert asyncio.run(run()) == ("pending", "spot-0")


def test_a_worker_that_joins_busy_with_something_else_gets_nothing_until_it_is_free() -> None:
    async def run() -> tuple[set[str], set[str]]:
        async with live() as there:
            await there.member("spot-0", "spot", foreign_s=WAIT_S)
            await there.member("reserved-0", "reserved")
            beside = await there.rolled_out(4)
            _freed.set()
            assert await there.foreign
            await asyncio.sleep(3 * WATCH_S)
            return set(beside), set(await there.rolled_out(4, name="rollout-1"))

    assert asyncio.run(run()) == ({"reserved-0"}, {"reserved-0", "spot-0"})


@pytest.mark.parametrize("paused", [False, True])
def test_what_waits_for_a_busy_worker_begins_soon_after_it_is_free(paused: bool) -> None:
    async def run() -> tuple[bool, list[str], str]:
        async with live() as there:
            worker = await there.member("spot-0", "spot")
            if paused:
                worker.status = Status.paused
                await until(lambda: not there.scheduler.running)
                there.plugin.schedule_decision()
            else:
                await there.occupy(worker)
            doing = asyncio.create_task(there.rolled_out(2))
            await until(lambda: there.plugin.snapshot().waiting)
            await asyncio.sleep(1.0)
            early = not there.plugin.snapshot().waiting
            if paused:
                worker.status = Status.running
            else:
                _freed.set()
            return early, await doing, there.plugin.status()["hopeless"]

    assert asyncio.run(run()) == (False, ["spot-0", "spot-0"], "")


@pytest.mark.parametrize("foreign_s", [0.0, 1.0])
def test_a_run_goes_on_where_its_workers_are_at_work_however_long_on_it_or_on_something_else(
    monkeypatch: pytest.MonkeyPatch, foreign_s: float
) -> None:
    monkeypatch.setattr(stall, "GIVE_UP", 1)

    async def said() -> set[str]:
        async with live(Rules(hang_after_s=0.5)) as there:
            head = await there.worker("head-1", head=1)
            head.batched_send({"op": READY, "session": "s", "pool": "head", "node": ""})
            await there.member("reserved-0", "reserved", foreign_s=foreign_s)
            doing = asyncio.create_task(there.rolled_out(2, seconds=0.2 if foreign_s else 1.0))
            found = set[str]()
            while not doing.done():
                await asyncio.sleep(0)  # at each turn of the loop
                if there.plugin.snapshot().waiting and not doing.done():
                    found.add(there.plugin.status()["hopeless"])
            await doing
            return found

    assert asyncio.run(said()) == {""}


def test_what_waits_is_kept_although_dask_s_settings_would_have_it_fail() -> None:
    async def done() -> list[str]:
        async with live() as there:
            waiting = asyncio.create_task(there.rolled_out(1))
            await asyncio.sleep(0.5)
            await there.member("spot-0", "spot")
            return await waiting

    with dask.config.set({"distributed.scheduler.no-workers-timeout": "0.1s"}):
        assert asyncio.run(done()) == ["spot-0"]


def test_a_worker_that_is_nobody_s_business_is_not_ended_though_it_never_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def evicted() -> list[str]:
        async with live() as there:
            for name, pool in (("spot-0", "spot"), ("head-0", "head"), ("somebody-elses", "memory")):
                await there.worker(name, **{pool: 1})
            with monkeypatch.context() as patch:
                patch.setattr(Heartbeats, "overdue_s", lambda *_: 600.0)
                there.plugin._look_at_unready(0.0, dict.fromkeys(there.scheduler.workers, 0.0))
            return [each.name for each in there.plugin._evicting]

    assert asyncio.run(evicted()) == ["spot-0"]


def test_a_worker_that_hangs_is_ended_though_the_end_of_another_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with live() as there:
            refused, remove = (await there.member("spot-0", "spot")).address, there.scheduler.remove_worker
            hung = (await there.member("spot-1", "spot")).address

            async def fails_once(address: str, **facts: Any) -> str:
                if address == refused:
                    raise OSError("of another plugin")
                return await remove(address, **facts)

            monkeypatch.setattr(there.scheduler, "remove_worker", fails_once)
            there.plugin._evicting.extend(Evict(address=each, name="", cause="silent") for each in (refused, hung))
            await until(lambda: hung not in there.scheduler.workers)
            monkeypatch.undo()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("who", "computes", "pool"), [("spot", True, "spot"), ("spot", False, "engine"), ("reward", True, "reward")]
)
def test_a_run_ends_where_nobody_who_is_there_can_do_what_waits(
    monkeypatch: pytest.MonkeyPatch, who: str, computes: bool, pool: str
) -> None:
    """But not before others had time to come."""
    monkeypatch.setattr(stall, "GIVE_UP", 1)

    async def run() -> tuple[str, str, float]:
        async with live(Rules(reserved_computes=computes, hang_after_s=2.0)) as there:
            head = await there.worker("head-1", head=1)
            head.batched_send({"op": READY, "session": "s", "pool": "head", "node": ""})
            await there.member("reserved-0", "reserved")
            refused = await there.worker(f"{who}-0", **{who: 1})
            refusal = {"op": REFUSED, "session": "s", "reason": "it has no run directory"}
            refused.batched_send(refusal | {"lasts": False})
            await until(lambda: there.plugin.status()["refused"])
            assert there.plugin._refusal(cast("Any", who)) == "", "it tries again"
            refused.batched_send(refusal | {"lasts": True})
            await until(lambda: there.plugin._refusal(cast("Any", who)))
            annotations = {"pool": pool, "phase": "score", "iteration": 0, "shards": 1, "widths": [1]}
            resources = {"engine": 1, "spot": 1} if pool == "engine" else {"gate": 1}
            layer = MaterializedLayer({("x", 0): (_plus_one, 1)}, annotations=annotations | {"resources": resources})
            graph: Any = HighLevelGraph({"x": layer}, {"x": set()})
            waiting = there.client.get(graph, [("x", 0)], sync=False)
            at_once, began_s = there.plugin.status()["hopeless"], time.monotonic()
            await until(lambda: there.plugin.status()["hopeless"])
            del waiting
            return at_once, there.plugin.status()["hopeless"], time.monotonic() - began_s

    at_once, said, after_s = asyncio.run(run())

    assert at_once == ""
    assert said == f"no {who} worker can take part in the run: {who}-0: it has no run directory"
    assert after_s > 1.0


def test_a_limit_below_dask_s_heartbeats_ends_only_who_sends_none_and_is_said_once() -> None:
    async def run() -> tuple[set[str], list[str], list[str]]:
        async with live(Rules(hang_after_s=0.1)) as there:
            await there.member("spot-0", "spot")
            mute = await there.member("spot-1", "spot")
            await asyncio.sleep(4 * WATCH_S)
            well = set(there.plugin.snapshot().workers)
            mute.periodic_callbacks["heartbeat"].stop()
            await until(lambda: "spot-1" not in there.plugin.snapshot().workers)
            await asyncio.sleep(4 * WATCH_S)
            events = there.plugin.drain()["events"]
            hung = [event["worker"] for event in events if event["event"] == "hung"]
            return well, hung, [event["what"] for event in events if event["event"] == "limited"]

    well, hung, said = asyncio.run(run())

    assert well == {"spot-0", "spot-1"}
    assert hung == ["spot-1"]
    (limit,) = said
    assert limit.startswith("cluster.hang_after_s = 0.1, but Dask has a worker send a heartbeat every 0.5 s (")
    assert limit.endswith("one that is silent is ended after 2 s")
