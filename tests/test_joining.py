"""A worker that cannot take part says why and tries again, unless that is in vain; what it had opened is closed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Status, Worker

from cluster.messages import READY, REFUSED
from cluster.start.run_cluster import RunCluster
from cluster.version import code_version
from cluster.worker import plugin as joining
from cluster.worker.notices import Notice
from cluster.worker.plugin import SpotlightWorkerPlugin, Terms
from runs import WAIT_S, settings_file, wait_for
from spotlight import config
from spotlight.clock import wall_clock
from spotlight.device.signals import Clear, Stop, order_to_message, signals
from spotlight.records import Stopped
from spotlight.store.creating import create_run
from spotlight.store.node import hold, shared_root, sweep

RUN = "run-of-test-joining"


def terms(run_dir: Path, version: str) -> Terms:
    return Terms(
        version=version,
        run_dir=str(run_dir),
        session="s",
        hang_after_s=60.0,
        quarantine_after=5,
        score_limit_s=60.0,
        notices={"reward": ()},
        grace_s={"reward": 30.0},
    )


def refusals(asked: Terms, *, until: Callable[[list[str]], object], node: str = "a") -> list[str]:
    """What a worker says that is asked to take part until then; asked no more, it says nothing."""
    said: list[str] = []

    def refuse(worker: str, session: str, reason: str, **_: Any) -> None:
        said.append(reason)

    async def join() -> list[str]:
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp")
            )
            scheduler.stream_handlers[REFUSED] = refuse
            resources = {"reward": 1.0, f"node:{node}": 1.0}
            worker = await stack.enter_async_context(
                Worker(scheduler.address, resources=resources, dashboard=False, memory_limit=0)
            )
            member = SpotlightWorkerPlugin(asked)
            await worker.plugin_add(member)
            async with asyncio.timeout(WAIT_S):
                while not until(said):
                    await asyncio.sleep(0.01)
            await worker.plugin_remove(member.name)
            await asyncio.sleep(0.1)  # for what it has said by then
            found = [*said]
            await asyncio.sleep(0.5)
            assert said == found, "it goes on trying"
            return found

    return asyncio.run(join())


def test_a_worker_tries_again_until_it_is_asked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)

    said = refusals(terms(tmp_path / RUN, code_version()), until=lambda said: len(said) > 3)

    assert all("there is no run directory" in reason for reason in said)


def test_to_try_again_with_other_code_is_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    ends_s = time.monotonic() + 1.0

    said = refusals(terms(tmp_path / RUN, "0.0.1"), until=lambda said: said and time.monotonic() > ends_s)

    (reason,) = said
    assert "the driver has 0.0.1: install the same version on both" in reason


def test_a_node_whose_name_cannot_be_a_directory_s_is_refused_with_its_resource(tmp_path: Path) -> None:
    run = create_run(config.load(settings_file(tmp_path)), time.time())

    said = refusals(terms(run.path, code_version()), until=len, node="rack/1")

    assert said[0].startswith("its resource node:rack/1 names a node"), said


def test_a_run_whose_directory_has_the_longest_name_that_one_may_have_gets_memory() -> None:
    asked = terms(Path("/runs") / ("\N{GREEK SMALL LETTER ALPHA}" * 127), code_version())
    root = shared_root(f"{asked.memory}-reserved-0")

    os.close(hold(root))

    assert sweep(root)


def test_what_was_opened_before_it_failed_is_closed(tmp_path: Path) -> None:
    run = create_run(config.load(settings_file(tmp_path)), time.time())
    asked = terms(run.path, code_version())
    memory, freed = shared_root(asked.memory), []
    held = hold(memory)  # or it would be swept, with what is in the way there
    (memory / "reward-slot-0").mkdir()

    def free(said: list[str]) -> bool:
        if said:
            os.close(held)
            freed.append(sweep(memory))
        return bool(said)

    said = refusals(asked, until=free)

    assert "Is a directory" in said[0]
    assert freed == [True], "the worker uses it still"


def test_workers_that_come_before_the_run_directory_work_once_it_is_there(tmp_path: Path) -> None:
    """As where a mount comes late, or a store is out of reach."""
    run = create_run(config.load(settings_file(tmp_path)), time.time())
    settings, elsewhere = run.config(), run.path.with_name("elsewhere")
    run.path.rename(elsewhere)
    pools = RunCluster(settings, run.path)
    try:
        wait_for(lambda: len(pools.status()["refused"]) == 3)
        assert pools.status()["hopeless"] == "", "it is tried again"
        elsewhere.rename(run.path)
        wait_for(lambda: len(pools.snapshot().workers) == 3)
        after = pools.status()
    finally:
        pools.close()

    assert after["refused"] == {}
    assert after["hopeless"] == ""


def test_a_task_that_ends_because_its_run_is_stopped_is_no_error_in_a_workers_log(tmp_path: Path) -> None:
    """Any other is, and so is that one once the worker takes part no more."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

    def fail(error: Exception, _: int) -> None:
        raise error

    async def tasks() -> None:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp") as scheduler,
            Worker(scheduler.address, dashboard=False, memory_limit=0) as worker,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            member = SpotlightWorkerPlugin(terms(tmp_path, code_version()))
            await worker.plugin_add(member)
            for error in (Stopped("a request"), ValueError("a bug")):
                await client.submit(fail, error, 0).exception()
            await worker.plugin_remove(member.name)
            await client.submit(fail, Stopped("a request"), 1).exception()

    logging.getLogger("distributed.worker").addHandler(handler)
    try:
        asyncio.run(tasks())
    finally:
        logging.getLogger("distributed.worker").removeHandler(handler)

    failed = [line for line in said if line.startswith("Compute Failed")]
    assert ["ValueError" in line for line in failed] == [True, False]


def test_a_worker_takes_part_though_the_scheduler_did_not_hear_at_once_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that many workers join at once may be too busy to answer."""
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    asked = replace(terms(tmp_path, code_version()), notices={"spot": ()}, grace_s={"spot": 30.0})
    tries: list[float] = []

    async def opened(_: joining.Member) -> str:
        return "node"

    async def busy(worker: Worker, **resources: float) -> None:
        tries.append(resources["engine"])
        if len(tries) == 1:
            raise OSError("Timed out during handshake")

    async def join() -> None:
        ready = asyncio.Event()
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp") as scheduler,
            Worker(scheduler.address, resources={"spot": 1.0}, dashboard=False, memory_limit=0) as worker,
        ):
            scheduler.stream_handlers[READY] = lambda **_: ready.set()
            await worker.plugin_add(SpotlightWorkerPlugin(asked))
            await asyncio.wait_for(ready.wait(), 5.0)

    monkeypatch.setattr(joining.Member, "_opened_at_last", opened)
    monkeypatch.setattr(Worker, "set_resources", busy)
    asyncio.run(join())

    assert tries == [1, 1]


def test_a_worker_takes_part_in_the_next_run_though_what_one_left_could_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    os.close(hold(memory))
    memory.chmod(0o777)  # as somebody did meanwhile

    async def opened(member: joining.Member) -> str:
        member._opened.callback(sweep, memory)
        return "node"

    async def join() -> list[str]:
        ready: asyncio.Queue[str] = asyncio.Queue()
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp") as scheduler,
            Worker(scheduler.address, resources={"reward": 1.0}, dashboard=False, memory_limit=0) as worker,
        ):
            scheduler.stream_handlers[READY] = lambda session, **_: ready.put_nowait(session)
            for session in ("a", "b"):
                asked = replace(terms(tmp_path, code_version()), session=session)
                await worker.plugin_add(SpotlightWorkerPlugin(asked))
                assert await asyncio.wait_for(ready.get(), 5.0) == session
            return list(worker.plugins)

    monkeypatch.setattr(joining.Member, "_opened_at_last", opened)

    assert joining.member_name("b") in asyncio.run(join())


def test_an_order_to_an_earlier_start_of_the_run_is_not_obeyed(tmp_path: Path) -> None:
    """As the last one before a run was stopped, and started again at once."""
    member = object.__new__(joining.Member)
    member._terms, member._engine = terms(tmp_path, ""), None
    stop, found = order_to_message(Stop(run="stopped")), []

    for session in ("before", "s"):
        member._order(session=session, **stop)
        found.append(signals.is_stopping("stopped"))
    signals.obey(Clear(run="stopped"))

    assert found == [False, True]


def test_a_worker_that_leaves_takes_no_more_tasks_though_its_memory_would_allow_some() -> None:
    """Dask resumes a paused worker that keeps within its limit of memory, as of a `LocalCluster`."""

    async def leave() -> Status:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", protocol="tcp") as scheduler,
            Worker(scheduler.address, dashboard=False, memory_limit="1 TB") as worker,
        ):
            await joining._finish(worker, Notice(source="file", reason="it appeared", deadline_s=wall_clock() + 30.0))
            await worker.memory_manager.memory_monitor(worker)
            return worker.status

    assert asyncio.run(leave()) == Status.paused
