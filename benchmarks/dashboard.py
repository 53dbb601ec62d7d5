"""What the live page costs the scheduler: CPU seconds per second while it is open, with 100 workers at work.

A scheduler without workers gets the events of a synthetic run, so that its page shows what it would show of a real one.
``python -m benchmarks.dashboard`` prints a table in Markdown; ``--serve`` only serves the page, to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from distributed import Scheduler

from benchmarks import at_least
from cluster.dashboard.plugin import PAGE, PagePlugin, prepare
from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import (
    GangBeat,
    GraphCame,
    Key,
    Launch,
    Layer,
    TaskChanged,
    TimePassed,
    Work,
    WorkerJoined,
    WorkerLeft,
)
from cluster.dispatch.rules import Rules
from cluster.scheduler.plugin import DispatchPlugin
from spotlight.clock import wall_clock
from spotlight.records import Pool
from spotlight.store.thumbnails import thumbnail

RESERVED, NODE = 4, 4
"""Number of reserved workers, and workers of a node, which is the most that a gang has."""
TASK_S = 5.0
"""How long a gang is at work on a request, on average."""
TICK_S = 0.1
LOSS_S = 20.0
"""Time between two losses."""
ITERATION_S = 12.0


@dataclass(slots=True)
class Feeder:
    """Sends a dispatcher and a page the events of a synthetic cluster."""

    dispatch: Dispatcher
    page: PagePlugin
    workers: int
    chance: Random = field(default_factory=lambda: Random(7))
    layers: int = 0
    ending: list[tuple[float, tuple[Key, ...], tuple[str, ...]]] = field(default_factory=list)
    lost: list[tuple[float, str, str, str]] = field(default_factory=list)
    begun: dict[Key, float] = field(default_factory=dict)
    """{running task: when it began}"""
    iteration: int = 0
    joined: int = 0

    def begin(self, at_s: float) -> None:
        for number in range(self.workers):
            self._join(at_s, number)
        usd_per_h = {"reserved": 10.47, "spot": 2.66}
        about = {"kind": "run", "id": 0, "name": "made-up", "url": "made-up", "iterations": 200, "label": "MADE UP"}
        about["session"] = "made-up"
        self.page.take([{**about, "usd_per_h": usd_per_h}])

    def _join(self, at_s: float, number: int) -> None:
        self.joined += 1
        pool: Pool = "reserved" if number < RESERVED else "spot"
        index = number if number < RESERVED else number - RESERVED
        event = WorkerJoined(
            at_s=at_s,
            address=f"tcp://{self.joined}",
            name=f"{pool}-{index}",
            pool=pool,
            node=f"{pool}-{index // NODE}",
        )
        self.dispatch.handle(event)

    def tick(self, now_s: float, began_s: float) -> None:
        """Send the events up to ``now_s``."""
        for at_s, keys, addresses in [entry for entry in self.ending if entry[0] <= now_s]:
            self.ending.remove((at_s, keys, addresses))
            for key, address in zip(keys, addresses, strict=True):
                self._end(key, address, now_s)
        if not self.ending or sum(len(keys) for _, keys, _ in self.ending) < 0.8 * self.workers:
            self._graph(now_s)
        for instruction in self.dispatch.handle(TimePassed(at_s=now_s)):
            if isinstance(instruction, Launch):
                self._launch(instruction, now_s)
        for entry in [entry for entry in self.lost if entry[0] <= now_s]:
            self.lost.remove(entry)
            self._join(now_s, int(entry[2]))
        if int(now_s / LOSS_S) != int((now_s - TICK_S) / LOSS_S):
            self._lose(now_s)
        if (now_s - began_s) / ITERATION_S > self.iteration:
            self.page.take(list(iteration_rows(self.iteration, now_s, self.chance)))
            self.iteration += 1
        spent = (now_s - began_s) / 3600
        usd = {"reserved": spent * RESERVED * 10.47, "spot": spent * (self.workers - RESERVED) * 2.66}
        spent = sum(usd.values())
        money = {"kind": "money", "id": -1, "at_s": now_s, "usd": usd, "usd_reserved_only": 2.4 * spent}
        money |= {"ledger_s": now_s, "ledger_usd": spent}
        if int(now_s) != int(now_s - TICK_S):
            self.page.take([money])

    def _graph(self, now_s: float) -> None:
        self.layers += 1
        phase = ("rollout", "explore", "explore", "validate")[self.layers % 4]
        layer = Layer(
            name=f"{phase}-{self.layers}",
            indices=tuple(range(self.workers * NODE)),
            pool="any" if phase != "explore" else "spot",
            phase=phase,
            iteration=self.layers,
            shards=NODE,
            widths=(1, 2, 4),
        )
        self.dispatch.handle(GraphCame(at_s=now_s, layers=(layer,)))
        for index in layer.indices:
            self.dispatch.handle(TaskChanged(at_s=now_s, key=(layer.name, index), state="gated", worker=""))

    def _launch(self, launch: Launch, now_s: float) -> None:
        keys = tuple(member.key for member in launch.members)
        addresses = tuple(member.address for member in launch.members)
        for key, address in zip(keys, addresses, strict=True):
            self.begun[key] = now_s
            self.dispatch.handle(TaskChanged(at_s=now_s, key=key, state="processing", worker=address))
        epoch = self.dispatch.state.epoch(launch.gang)
        for step in (0, 1):
            beat = GangBeat(at_s=now_s, gang=launch.gang, epoch=epoch, step=step, steps=9, resumed=not step)
            self.dispatch.handle(beat)
        self.ending.append((now_s + self.chance.uniform(0.5, 1.5) * TASK_S, keys, addresses))

    def _end(self, key: Key, address: str, now_s: float) -> None:
        work = Work(start_s=self.begun.pop(key), stop_s=now_s, dropped=self.chance.random() < 0.05)
        self.dispatch.handle(TaskChanged(at_s=now_s, key=key, state="memory", worker=address, work=work))
        self.dispatch.handle(TaskChanged(at_s=now_s, key=key, state="forgotten", worker=""))

    def _lose(self, now_s: float) -> None:
        at = self.chance.randrange(len(self.ending)) if self.ending else -1
        if at < 0:
            return
        _, keys, addresses = self.ending[at]
        gone = addresses[0]
        name = next((worker for worker, where in self.dispatch.state.snapshot().workers.items() if where == gone), "")
        if not name.startswith("spot"):
            return
        del self.ending[at]
        self.dispatch.handle(WorkerLeft(at_s=now_s, address=gone, expected=self.chance.random() < 0.4))
        for key in keys:
            for state in ("released", "gated"):
                self.dispatch.handle(TaskChanged(at_s=now_s, key=key, state=state, worker=""))
        self.lost.append((now_s + 6.0, gone, str(int(name.removeprefix("spot-")) + RESERVED), name))


def iteration_rows(k: int, now_s: float, chance: Random) -> Iterator[dict[str, Any]]:
    """Rows that a driver might send about an iteration."""
    reward = 0.5 + 0.4 * (1 - 0.9**k) + chance.uniform(-0.03, 0.03)
    yield {
        "kind": "iteration",
        "id": k,
        "at_s": now_s,
        "usd": 0.9,
        "reward_mean": reward,
        "reward_std": 0.2,
        "explored_reward_mean": reward - 0.06,
        "rank_correlation": 0.8 + chance.uniform(-0.1, 0.1),
        "fidelity": 0.8,
        "seeds_scored": 800.0,
        "variance_kept": 0.11 + chance.uniform(0, 0.02),
        "variance_equal": 0.08 + chance.uniform(0, 0.02),
    }
    if k % 5 == 0:
        yield {"kind": "validation", "id": k, "score": reward - 0.02, "at_s": now_s}
    texts = [f'a sign that says "{chance.randrange(10, 99)}"' for _ in range(16)]
    tried = sorted((chance.randrange(4, 60) for _ in texts), reverse=True)
    yield {
        "kind": "prompts",
        "id": k + 1,
        "scored": sum(tried),
        "dropped": 31,
        "of": 64,
        "prompts": [
            {"prompt": text, "id": at, "tried": n, "reward": 0.5, "spread": 0.2, "kept": at % 3 == 0}
            for at, (text, n) in enumerate(zip(texts, tried, strict=True))
        ],
    }
    noise = np.random.default_rng(k)
    for kind, count, name in (("images", 12, "images"), ("seeds", 12, "pictures")):
        pictures = noise.integers(0, 255, (count, 32, 64, 3), dtype=np.uint8)
        yield {
            "kind": kind,
            "id": k,
            name: [
                {"prompt": texts[at], "seed": str(at), "reward": at / count, "url": thumbnail(picture)}
                for at, picture in enumerate(pictures)
            ],
        }


async def serve(workers: int, port: int) -> tuple[Scheduler, Feeder]:
    """Start a scheduler whose page shows a synthetic run; without events yet."""
    prepare()
    dispatch, page = DispatchPlugin("made-up", "", Rules(), owner="", driver="", member=""), PagePlugin()
    scheduler = await Scheduler(
        host="127.0.0.1", port=0, dashboard_address=f"127.0.0.1:{port}", plugins=[dispatch, page]
    )
    return scheduler, Feeder(dispatch.shown, page, workers)


def _port(scheduler: Scheduler) -> int:
    server: Any = scheduler.http_server
    return int(server.port)


async def feed(feeder: Feeder, stop: asyncio.Event) -> None:
    began_s = wall_clock()
    feeder.begin(began_s)
    while not stop.is_set():
        feeder.tick(wall_clock(), began_s)
        await asyncio.sleep(TICK_S)


async def measure(workers: int, seconds: float, readers: int) -> tuple[float, float]:
    """CPU seconds per second of this process, without and with the page open."""
    scheduler, feeder = await serve(workers, 0)
    stop = asyncio.Event()
    feeding = asyncio.create_task(feed(feeder, stop))
    await asyncio.sleep(min(3 * TASK_S, 3 * seconds))  # until the lanes are full
    before = await _cpu_share(seconds)
    address = f"http://127.0.0.1:{_port(scheduler)}/{PAGE}"
    sessions = [await asyncio.to_thread(_look, address) for _ in range(readers)]
    await asyncio.sleep(2.0)
    during = await _cpu_share(seconds)
    for session in sessions:
        await asyncio.to_thread(session.kill)
    stop.set()
    await feeding
    await scheduler.close()
    return before, during


def _look(address: str) -> Any:
    """Open the page in a session that receives all that it sends; runs in a process of its own."""
    import subprocess
    import sys

    code = f"""
import time
from bokeh.client import pull_session
session = pull_session(url={address!r})
print("open", flush=True)
while session.connected:
    session.force_roundtrip()
    time.sleep(0.5)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "open\n"
    return process


async def _cpu_share(seconds: float) -> float:
    began_s, used_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used_s) / (time.perf_counter() - began_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=at_least(1), default=100)
    parser.add_argument("--seconds", type=at_least(0.1), default=20.0)
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the page on 127.0.0.1, until Ctrl-C")
    parsed = parser.parse_args(arguments)
    if parsed.serve is not None:
        asyncio.run(_serve_for_ever(parsed.workers, parsed.serve))
        return
    print("| workers | page open | scheduler's CPU, share of a core | the page's part |\n|---|---|---|---|")
    before, during = asyncio.run(measure(parsed.workers, parsed.seconds, 1))
    print(f"| {parsed.workers} | no | {before:.2%} | |")
    print(f"| {parsed.workers} | yes | {during:.2%} | {during - before:.2%} |")


async def _serve_for_ever(workers: int, port: int) -> None:
    scheduler, feeder = await serve(workers, port)
    print(f"http://127.0.0.1:{_port(scheduler)}/{PAGE}", flush=True)
    await feed(feeder, asyncio.Event())


if __name__ == "__main__":
    main()
