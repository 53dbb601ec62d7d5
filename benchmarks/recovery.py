"""How long a request is interrupted when its gang changes, compared with a cold start; and what losses cost over a
trace.

Everything is real: workers under ``kill -9``, fresh interpreters for the cold starts, a file on the disk for the
weights. Times come from the dispatcher's events, except that of the kill, which is taken when it is sent, and that of
the step, which is taken from its commit in the store. ``python -m benchmarks.recovery`` prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from benchmarks import at_least
from cluster.start.run_cluster import RunCluster
from graphs.iteration import prepare_graph
from graphs.layers import Layers
from graphs.requests import rollout_requests, unexplored
from graphs.tasks import sampling
from graphs.tasks.context import RunContext
from spotlight import config
from spotlight.market.trace_files import write_trace
from spotlight.market.trace_models import BURSTY, synthesise
from spotlight.market.traces import SECONDS_PER_H
from spotlight.records import Placement, Request, Rollout, WorkerLife
from spotlight.report.palette import FAINT, INK, LOST, OTHER, PHASE_COLOURS, RULE
from spotlight.rl.prompts import read_prompts
from spotlight.store.creating import create_run
from spotlight.store.node import Node, shared_root, sweep

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "ocr-tiny.toml"
BATCH = 32
"""Samples of a request: a step of the embedded model then takes some tens of milliseconds."""
POLL_S = 0.02
"""Time between two readings of the events, which carry their own times."""
PATIENCE_S, COLD_PATIENCE_S = 60.0, 300.0
"""Longest wait for what a healthy cluster does in a second or two; and where workers start cold, and import torch."""
WIDENS_S = 8.0
"""A request lasts so long that a gang which lost a rank early on becomes wide again, whatever the machine: a worker is
back within 2 s, and what is left must be worth twice what forming anew costs."""
STEPS = 200
"""Steps of a request along the trace: it takes some seconds, and a worker's start a fraction of one."""

PARTS = ("recoveries", "cold", "weights", "trace")
LOOKS = {
    "detect": ("worker lost: noticed", LOST),
    "step boundary": ("worker joined: step in flight ends", PHASE_COLOURS["explore"]),
    "re-form": ("gang formed anew", PHASE_COLOURS["train"]),
    "load and join": ("ranks joined; a fresh one loads its model", PHASE_COLOURS["validate"]),
    "step": ("first step, committed", PHASE_COLOURS["rollout"]),
    "interpreter": ("interpreter starts", OTHER),
    "imports": ("imports", FAINT),
    "model": ("model loaded", PHASE_COLOURS["publish"]),
    "join": ("ranks joined; a fresh one loads its model", PHASE_COLOURS["validate"]),
}
"""{part of a recovery or a cold start: (its name, its colour)}"""

Row = dict[str, Any]
"""An event of the dispatcher."""
Split = dict[str, float]
"""{part: seconds}, in order of time."""

COLD = """
import time
up_s = time.time()
import os, pickle, sys
from pathlib import Path
from spotlight.device.engine import Engine
from spotlight.store.node import Node
moments = [up_s, time.time()]

def heart(beat):
    if beat and (beat.resumed or beat.step == 1):
        moments.append(time.time())
    if beat and beat.step == 1:
        print(*moments, flush=True)

run_dir, node, request, place = pickle.load(sys.stdin.buffer)
engine = Engine(Path(run_dir), heart, Node(node))
engine.resident.use(request.weights)
moments.append(time.time())
engine.rollout(request, place)
"""
"""What a worker does before its first step where no fork server did it already. The first rank tells when it was
up, had its imports, its model, its peers, and its first step."""


class Live:
    """A cluster without a run's loop: requests on its spot workers, and their events.

    Args:
        existing: the scheduler file of an existing cluster.
    """

    def __init__(self, directory: str, overrides: Sequence[str], existing: Path | None = None) -> None:
        common = (
            f"run.dir={directory}",
            'strategy.exploration="off"',
            "cluster.dashboard_port=0",
            f"rollout.seeds_kept={BATCH}",
            f"rollout.request_seeds={BATCH}",
        )
        self.config = config.load(SETTINGS, [*common, *overrides])
        self.run = create_run(self.config, time.time())
        self.pools = RunCluster(self.config, self.run.path, existing)
        graph = prepare_graph(str(self.run.path))
        self.context: RunContext = self.pools.client.get(graph.graph, graph.outputs["context"])
        self.lives: dict[int, WorkerLife] = {}
        self.events: list[Row] = []
        self._requests = 0
        self._patience_s = COLD_PATIENCE_S if existing else PATIENCE_S
        self.steps = self.config.rollout.steps
        """Steps of the next request."""

    def request(self) -> Request:
        """A new request on every call."""
        self._requests += 1
        prompts = read_prompts(self.config.data.train_prompts)[:1]
        selection = unexplored(self.config, self.context, self._requests, prompts)
        request = rollout_requests(self.config, self.context, selection, self.context.start)[0]
        return replace(request, sigmas=tuple(1 - step / self.steps for step in range(self.steps + 1)))

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Start requests; returns the futures of all their shards."""
        layers = Layers()
        calls = [(sampling.rollout_shard, str(self.run.path), request) for request in requests]
        shards = layers.add_requests(
            "rollout", requests[0].iteration, calls, pool="spot", widths=self.config.strategy.widths
        )
        futures: list[Any] = self.pools.client.get(
            layers.graph(), [key for request in shards for key in request], sync=False
        )
        return futures

    def look(self) -> None:
        """Fetch the events since the last call."""
        news = self.pools.drain()
        self.lives |= news.workers
        self.events += news.events

    def event(self, name: str, **facts: Any) -> Row:
        """The first event of that name with these facts; waits for it."""

        def find() -> Row | None:
            self.look()
            return next((row for row in self.events if row["event"] == name and facts.items() <= row.items()), None)

        return self._wait(find, f"event {name!r} with {facts}")

    def event_or_end(self, futures: Sequence[Any], name: str, **facts: Any) -> Row | None:
        """As `event`; None if the futures end without one."""

        def find() -> Row | Literal["ended"] | None:
            ended = all(future.done() for future in futures)
            self.look()
            found = (row for row in self.events if row["event"] == name and facts.items() <= row.items())
            return next(found, "ended" if ended else None)

        row = self._wait(find, f"event {name!r} with {facts}")
        return None if row == "ended" else row

    def full(self) -> dict[str, str]:
        """{address: name} of the spot workers, once each place has one that takes requests: a Dask worker does so only
        moments after it joined, and a request that begins without it may never be as wide as is waited for."""

        def find() -> dict[str, str] | None:
            workers = self.pools.snapshot().workers
            spot = {address: name for name, address in workers.items() if name.startswith("spot")}
            return spot if len(spot) == self.config.pools.spot.workers else None

        found: dict[str, str] = self._wait(find, "full pool")
        return found

    def pids(self) -> dict[str, int]:
        """{name: process id} of the spot workers, once every place has one."""
        spot = self.full()
        return {spot[address]: pid for address, pid in self.pools.client.run(os.getpid, workers=list(spot)).items()}

    def _wait(self, find: Callable[[], Any], what: str) -> Any:
        until_s = time.monotonic() + self._patience_s
        while not (found := find()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"no {what} within {self._patience_s} s; the last events: {self.events[-8:]}")
            time.sleep(POLL_S)
        return found

    def committed_s(self, request: Request, step: int) -> float:
        """When a step was committed."""
        folder = Path(self.run.latents_url) / "commits" / f"{request.iteration:05d}" / request.id
        (record,) = self._wait(lambda: list(folder.glob(f"commit.*.{step}")), f"commit of step {step}")  # only one
        return record.stat().st_mtime


@contextmanager
def live(*overrides: str, existing: Path | None = None) -> Iterator[Live]:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Live(directory, overrides, existing)
        try:
            yield cluster
        finally:
            cluster.pools.close()


@dataclass(slots=True, kw_only=True)
class Measured:
    """Many recoveries of one kind."""

    splits: list[Split] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    """Steps that were done but not committed when the worker died, without the step in flight."""
    booted: list[float] = field(default_factory=list)
    """Seconds from the start of a worker's process until it joined."""

    def totals(self) -> list[float]:
        return [sum(split.values()) for split in self.splits]

    def beyond_step(self) -> list[float]:
        return [total - list(split.values())[-1] for split, total in zip(self.splits, self.totals(), strict=True)]

    def median(self) -> Split:
        """Median of each part by itself."""
        return {part: statistics.median(split[part] for split in self.splits) for part in self.splits[0]}


# Recoveries


def narrowings(
    cluster: Live, width: int, kills: int, chance: random.Random, after: Callable[..., None], lasts_s: float = 0.0
) -> Measured:
    """Kill a random rank of a gang of this width, again and again, at a random moment of a step.

    Args:
        lasts_s: about how long a request lasts at least, undisturbed.
        after: is given the request, its gang, the row of the first step after the recovery, the victim, when it was
            killed, the futures of the request.
    """
    found = Measured()
    for trial in range(kills + 1):
        pids, request = cluster.pids(), cluster.request()
        gang = f"rollout-{request.iteration}/0"
        futures = cluster.start([request])
        stepped = cluster.event("stepped", gang=gang, width=width)
        step_s = stepped["at_s"] - cluster.event("resumed", gang=gang, epoch=stepped["epoch"])["at_s"]
        time.sleep(chance.uniform(1, 2) * step_s)
        victim = chance.choice(stepped["workers"])
        killed_s = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        broken = cluster.event("broken", gang=gang, epoch=stepped["epoch"])
        split, resumed = _formed_again(cluster, request, gang, broken)
        if trial:  # the first one finds engines that have no model yet
            found.splits.append({"detect": broken["at_s"] - killed_s, **split})
            found.redone.append(max(0, broken["step"] - resumed["step"]))
            after(request, gang, resumed, victim, killed_s, futures)
        cluster.steps = max(cluster.config.rollout.steps, math.ceil(lasts_s / step_s))
        for future in futures:
            future.result(timeout=PATIENCE_S)
    return found


def _formed_again(cluster: Live, request: Request, gang: str, ended: Row) -> tuple[Split, Row]:
    """Time from the end of one epoch to the first committed step of the next; and the event that began that one."""
    epoch = ended["epoch"] + 1
    moments = [ended] + [cluster.event(name, gang=gang, epoch=epoch) for name in ("formed", "resumed", "stepped")]
    _, formed, resumed, stepped = (row["at_s"] for row in moments)
    committed_s = max(stepped, cluster.committed_s(request, moments[2]["step"] + 1))
    split = {"re-form": formed - ended["at_s"], "load and join": resumed - formed, "step": committed_s - resumed}
    return split, moments[2]


def four_to_two(kills: int, chance: random.Random) -> Measured:
    settings = ("pools.spot.workers=4", "strategy.widths=[1,2,4]", "pools.spot.replace_after_s=0.8", "rollout.steps=24")
    with live(*settings) as cluster:
        return narrowings(cluster, 4, kills, chance, lambda *_: None)


def two_to_one_to_two(kills: int, chance: random.Random) -> tuple[Measured, Measured]:
    """Recoveries from two ranks to one, and back to two, the latter from when the replacement has joined."""
    after_s = 0.3
    settings = ("pools.spot.workers=2", "strategy.widths=[1,2]", f"pools.spot.replace_after_s={after_s}")
    widened = Measured()
    with live(*settings, "rollout.steps=110") as cluster:

        def widen(
            request: Request, gang: str, resumed: Row, victim: str, killed_s: float, futures: Sequence[Any]
        ) -> None:
            left = cluster.event_or_end(futures, "leaves", gang=gang, epoch=resumed["epoch"])
            if left is None:  # so little was left that it did not pay
                return
            joined = [row for row in cluster.events if row["event"] == "joined" and row["at_s"] > killed_s][0]
            split, begun = _formed_again(cluster, request, gang, left)
            assert (joined["worker"], begun["width"]) == (victim, 2)
            widened.splits.append({"step boundary": left["at_s"] - joined["at_s"], **split})
            widened.redone.append(max(0, left["step"] - begun["step"]))
            widened.booted.append(joined["at_s"] - killed_s - after_s)

        return narrowings(cluster, 2, kills, chance, widen, WIDENS_S), widened


# Cold starts


def cold_starts(width: int, times: int) -> Measured:
    """Time from the start of a gang of fresh interpreters to its first step; files that they read are in the page
    cache."""
    found = Measured()
    with live("strategy.widths=[1,2]", "rollout.steps=24") as cluster:
        for trial in range(times + 1):
            split = _cold_start(cluster, width, f"cold-{trial}")
            if trial:  # the first one fills the page cache
                found.splits.append(split)
    return found


def _cold_start(cluster: Live, width: int, gang: str) -> Split:
    request, started_s = cluster.request(), time.time()
    command = [sys.executable, "-c", COLD]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(width)]
    try:
        for rank, process in enumerate(ranks):
            place = Placement(gang=gang, epoch=1, rank=rank, width=width)
            assert process.stdin
            pickle.dump((str(cluster.run.path), cluster.run.path / f"node-{gang}", request, place), process.stdin)
            process.stdin.close()
        assert ranks[0].stdout
        moments = [started_s, *map(float, ranks[0].stdout.readline().split())]
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:  # only now, so that none has time to miss another
            process.wait()
    parts = ("interpreter", "imports", "model", "join", "step")
    assert len(moments) == 1 + len(parts), "the first rank ended before its first step: its own words are above"
    return {part: stop_s - start_s for part, (start_s, stop_s) in zip(parts, pairwise(moments), strict=True)}


# Weights


def weights_seconds(size_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds until a worker that joins can use a file of weights, by where it comes from and what is done with it.

    Args:
        size_bytes: of the file. It lies in the temporary directory's file system; the memory holds it four times.
    """
    import torch

    from spotlight.store import weights

    torch.set_num_threads(1)  # as in a worker
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        part = torch.ones(size_bytes // 8 // 2, dtype=torch.bfloat16)
        weights.stage(folder, 0, {f"layer{n}": part + n for n in range(8)}, {}, {})
        weights.publish(folder, 0)
        file = folder / "weights" / "v00000" / "weights.safetensors"
        root = shared_root(f"recovery-{os.getpid()}", size_bytes=2 * size_bytes)

        def forget() -> None:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # pages are clean: publishing flushed them
            os.close(descriptor)

        try:
            disk = _load_seconds(folder, None, forget, repeats)
            memory = _load_seconds(folder, Node(root), lambda: None, repeats)
        finally:
            sweep(root)
    sources = {"disk store": disk, "node memory": memory}
    return {f"{source}, {what}": took for source, found in sources.items() for what, took in found.items()}


def _load_seconds(folder: Path, node: Node | None, before: Callable[[], None], repeats: int) -> dict[str, list[float]]:
    import torch

    from spotlight.store import weights

    published = weights.published(folder, 0)
    assert published
    ref = published.weights
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.load(folder, ref, node=node).items()}

    def read() -> None:
        for tensor in weights.load(folder, ref, node=node).values():
            tensor.view(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE")].max()

    def copy() -> None:
        for name, tensor in weights.load(folder, ref, node=node).items():
            model[name].copy_(tensor)

    def seconds(work: Callable[[], None]) -> float:
        before()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    uses = {"every page read": read, "copied into a model": copy}
    return {what: [seconds(work) for _ in range(repeats)] for what, work in uses.items()}


# Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Results of the same requests under one regime."""

    wall_s: float
    available: float
    """Mean share of the workers that were alive."""
    losses: int
    """Lost workers."""
    redone: int
    """Steps that were done more than once, without those in flight."""


def passage(requests: int, *overrides: str) -> Passage:
    """Run requests on two spot workers, one each, to their end."""
    settings = (
        "pools.spot.workers=2",
        "strategy.widths=[1]",
        f"rollout.steps={STEPS}",
        "cluster.quarantine_after=1000",
    )
    with live(*settings, *overrides) as cluster:
        cluster.full()
        start_s = time.time()
        done = [future.result() for future in cluster.start([cluster.request() for _ in range(requests)])]
        stop_s = time.time()
        cluster.look()
    assert all(isinstance(result, Rollout) for result in done)
    spot = [life for life in cluster.lives.values() if life.pool == "spot"]
    there_s = sum(max(0.0, min(life.left_s or stop_s, stop_s) - max(life.joined_s, start_s)) for life in spot)
    broken = [row for row in cluster.events if row["event"] == "broken"]
    resumed = [row for row in cluster.events if row["event"] == "resumed"]
    begun = [next((event["step"] for event in resumed if _follows(event, row)), row["step"]) for row in broken]
    return Passage(
        wall_s=stop_s - start_s,
        available=there_s / 2 / (stop_s - start_s),
        losses=len(broken),
        redone=sum(max(0, row["step"] - step) for row, step in zip(broken, begun, strict=True)),
    )


def _follows(later: Row, row: Row) -> bool:
    return bool(later["gang"] == row["gang"] and later["epoch"] > row["epoch"])


def passages(requests: int, seed: int) -> dict[str, Passage]:
    """Requests undisturbed, and along the same trace with either setting of ``strategy.on_preemption``.

    The trace runs so fast that a worker lives, on average, as long as a request takes undisturbed.
    """
    quiet = passage(requests)
    life_s = quiet.wall_s * 2 / requests
    speedup = SECONDS_PER_H / BURSTY.losses_per_instance_h / life_s
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.csv"
        lasts_s = 20 * quiet.wall_s * speedup  # longer than the slowest
        write_trace(synthesise(seed=seed, capacity=2, duration_s=lasts_s, model=BURSTY), path)
        trace = (f'pools.spot.trace="{path}"', f"pools.spot.speedup={speedup}")
        ways = {way: passage(requests, *trace, f"strategy.on_preemption={way}") for way in ("resume", "restart")}
    return {"undisturbed": quiet, **ways}


# What is shown


def ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ({_p90(values) * 1e3:.0f})"


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def print_recoveries(found: Mapping[str, Measured]) -> None:
    print("Milliseconds, median (90th percentile); each part by itself, so that the parts need not add up.\n")
    print(
        "| gang | times | noticed | re-formed | loaded and joined | stepped | all | without the step | steps redone |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, measured in found.items():
        parts = [ms([split[part] for split in measured.splits]) for part in measured.splits[0]]
        cells = [name, str(len(measured.splits)), *parts, ms(measured.totals()), ms(measured.beyond_step())]
        print(f"| {' | '.join(cells)} | {statistics.fmean(measured.redone):.2f} |")
    for name, measured in found.items():
        if measured.booted:
            print(f"\n{name}: from the start of the worker's process until it joins {ms(measured.booted)} ms.")


def print_cold(cold: Mapping[int, Measured], found: Mapping[str, Measured]) -> None:
    print("\n| cold start | times | interpreter | imports | model | join | step | all |")
    print("|---|---|---|---|---|---|---|---|")
    for width, measured in cold.items():
        parts = [ms([split[part] for split in measured.splits]) for part in measured.splits[0]]
        print(f"| width {width} | {' | '.join([str(len(measured.splits)), *parts, ms(measured.totals())])} |")
    print()
    for name, measured in found.items():
        width = int(name[-1])
        if width in cold:
            ratio = statistics.median(cold[width].totals()) / statistics.median(measured.totals())
            print(f"Cold start at width {width} / {name}: {ratio:.1f}")


def print_weights(found: Mapping[str, Sequence[float]], size_bytes: int) -> None:
    print(f"\n| {size_bytes / 1e9:g} GB of weights | s, median (slowest) |")
    print("|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.3f} ({max(values):.3f}) |")
    for what in ("every page read", "copied into a model"):
        disk, memory = (statistics.median(found[f"{where}, {what}"]) for where in ("disk store", "node memory"))
        print(f"\nDisk store / node memory, {what}: {disk / memory:.1f}")


def print_passages(found: Mapping[str, Passage], requests: int) -> None:
    base = found["undisturbed"].wall_s
    print(f"\n| {requests} requests of {STEPS} steps | wall, s | throughput | workers there | losses | steps redone |")
    print("|---|---|---|---|---|---|")
    for name, each in found.items():
        cells = (f"{each.wall_s:.1f}", f"{base / each.wall_s:.2f}", f"{each.available:.2f}", str(each.losses))
        print(f"| {name} | {' | '.join(cells)} | {each.redone} of {requests * STEPS} |")


def draw(path: Path, found: Mapping[str, Measured], cold: Mapping[int, Measured]) -> None:
    """The medians of the parts as stacked bars, with the median of all: recoveries alone, then beside cold starts."""
    from matplotlib import pyplot

    starts = {f"cold start, width {width}": measured for width, measured in cold.items()}
    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    rows = (len(found), len(found) + len(starts))
    figure, (near, far) = pyplot.subplots(2, 1, figsize=(8.8, 4.6), height_ratios=rows, layout="constrained")
    _draw_bars(near, found, scale=1e3, unit="{:.0f} ms")
    near.set_xlabel("milliseconds until the first committed step", color=INK)
    _draw_bars(far, {**found, **starts}, scale=1.0, unit="{:.2f} s")
    far.set_xlabel("the same beside cold starts, in seconds", color=INK)
    handles = {label: bar for axes in (near, far) for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, labelcolor=INK)
    figure.savefig(path, dpi=160)


def _draw_bars(axes: Any, bars: Mapping[str, Measured], *, scale: float, unit: str) -> None:
    for row, measured in enumerate(bars.values()):
        left = 0.0
        for part, seconds in measured.median().items():
            label, colour = LOOKS[part]
            axes.barh(row, seconds * scale, left=left, color=colour, label=label, height=0.62)
            left += seconds * scale
        text = unit.format(statistics.median(measured.totals()) * scale)
        axes.annotate(text, (left, row), xytext=(5, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.tick_params(colors=FAINT, length=0)
    axes.grid(axis="x", color=RULE)
    axes.set_axisbelow(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    parser.add_argument("--kills", type=at_least(1), default=30, help="kills of each kind")
    parser.add_argument("--cold", type=at_least(1), default=6, help="cold starts of each width")
    parser.add_argument("--weights-gb", type=float, default=2.0, help="size of the weights file")
    parser.add_argument("--requests", type=at_least(1), default=8, help="requests along the trace")
    parser.add_argument("--seed", type=int, default=0, help="seed of the victims, the moments and the trace")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the recoveries and the cold starts there")
    arguments = parser.parse_args()
    if arguments.plot and "recoveries" not in arguments.parts:
        parser.error("--plot: it draws recoveries, which are not among --parts")

    load = f"load average {os.getloadavg()[0]:.1f} before"
    found: dict[str, Measured] = {}
    cold: dict[int, Measured] = {}
    if "recoveries" in arguments.parts:
        chance = random.Random(arguments.seed)
        found["4 to 2"] = four_to_two(arguments.kills, chance)
        found["2 to 1"], found["1 to 2"] = two_to_one_to_two(arguments.kills, chance)
        found = {name: measured for name, measured in found.items() if measured.splits}
        print_recoveries(found)
    if "cold" in arguments.parts:
        cold = {width: cold_starts(width, arguments.cold) for width in (1, 2)}
        print_cold(cold, found)
    if "weights" in arguments.parts:
        size_bytes = int(arguments.weights_gb * 1e9)
        print_weights(weights_seconds(size_bytes, repeats=3), size_bytes)
    if "trace" in arguments.parts:
        print_passages(passages(arguments.requests, arguments.seed), arguments.requests)
    print(f"\n{os.cpu_count()} cores, {load}, {os.getloadavg()[0]:.1f} after.")
    if arguments.plot:
        draw(arguments.plot, found, cold)


if __name__ == "__main__":
    main()
