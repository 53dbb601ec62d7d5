"""How soon work begins on an existing cluster, and how much CPU its scheduler takes with many workers.

Everything is real: the processes are started by Dask's own commands, as in the tests of existing clusters
(`tests/existing.py`), or are workers on hosts made of network namespaces (`tests/hosts.py`), with TLS. Times come from
the scheduler's events; first steps are timed by their commits. ``python -m benchmarks.joining`` prints tables in
Markdown; each names the load average at its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Client, Worker

from benchmarks import at_least
from benchmarks.recovery import COLD_PATIENCE_S, ROOT, Live, live
from cluster.worker.process import own_fork_server
from spotlight.device.process import end_with_parent
from spotlight.store.rows import DECISIONS, EVENTS, HISTORY, SPANS
from spotlight.store.rundir import RunDir

sys.path.append(str(ROOT / "tests"))

from existing import DaskCluster, certificates, dask_settings
from hosts import Hosts, missing

PARTS = ("join", "resume", "scheduler")
JOIN_GOAL_S, RESUME_GOAL_S, SCHEDULER_GOAL = 2.0, 2.0, 0.2
POLL_S = 0.02
NEVER_S = 3600.0
NODE = 8
"""Workers of a host."""
RESERVED = 2
PORT = 8786
CPU_S = 1.0
"""Time between two readings of the scheduler's CPU seconds."""
COMMON = ("run.validation_seeds=1", "cluster.dashboard_port=0")
LIGHT = ('reward.name="benchmarks.engine:SeedlessScorer"',)
"""64 OCR engines would fill this machine's memory. The driver imports what the scorer imports, to check the prompts."""

Split = dict[str, float]
"""{part: seconds}, in order of time."""


# A worker joins


def joins(trials: int) -> dict[str, list[Split]]:
    """Time from a worker's start to its first step, on a warm node, where another worker of the run has the weights."""
    return {"`dask worker`, a new process": list(_plain(trials)), "a local pool's, forked": list(_forked(trials))}


def _plain(trials: int) -> Iterator[Split]:
    with (
        standing_cluster(spot=1) as cluster,
        live(*COMMON, *LIGHT, "strategy.widths=[1]", existing=cluster.file) as work,
    ):
        _warm(work)
        held = _held(work, "spot-0")
        for trial in range(trials):
            began_s, name = time.time(), f"late-{trial}"
            process = cluster.worker(name, "spot")
            yield _to_first_step(work, name, began_s)
            process.kill()
            process.wait()
            work.event("lost", worker=name)
        held.release()


def _forked(trials: int) -> Iterator[Split]:
    pools = ("pools.spot.workers=2", "pools.spot.workers_per_node=2", "pools.spot.replace_after_s=0")
    with live(*COMMON, *LIGHT, *pools, "strategy.widths=[1]") as work:
        _warm(work)
        held = _held(work, "spot-0")
        for _ in range(trials):
            address = next(address for address, name in work.full().items() if name == "spot-1")
            (pid,) = work.pools.client.run(os.getpid, workers=[address]).values()
            began_s = time.time()
            psutil.Process(pid).kill()
            yield _to_first_step(work, "spot-1", began_s)
        held.release()


def _warm(work: Live) -> None:
    """Have every spot worker run a part of a request, so that the node has the weights."""
    work.pools.client.gather(work.start([work.request() for _ in range(4)]))


def _held(work: Live, name: str) -> Any:
    """Give a worker another task: it gets no work of the run while the result is kept."""
    client = work.pools.client
    task = client.submit(time.sleep, NEVER_S, workers=[name], pure=False)
    while not any(task.key in keys for keys in client.processing().values()):
        time.sleep(POLL_S)
    return task


def _to_first_step(work: Live, name: str, began_s: float) -> Split:
    """Time to the first step of a worker that was started at ``began_s``, and runs the only request."""
    request = work.request()
    futures = work.start([request])
    first_s = work.committed_s(request, 1)
    work.pools.client.gather(futures)
    work.look()
    ready_s = next(row["at_s"] for row in work.events if _is(row, "joined", name) and row["at_s"] > began_s)
    came_s = max(at_s for at_s, what in _said(work.pools.client) if what == "add-worker" and began_s < at_s < ready_s)
    return {"start": came_s - began_s, "get ready": ready_s - came_s, "first step": first_s - ready_s}


def _is(row: Mapping[str, Any], event: str, worker: str) -> bool:
    return row["event"] == event and row.get("worker") == worker


def _said(client: Client) -> list[tuple[float, str]]:
    """``(time, event)`` of what the scheduler saw."""
    return [(at_s, said["action"]) for at_s, said in client.get_events("all")]


# A driver is killed and resumed


def resumes(trials: int) -> list[Split]:
    """Time of `spotlight resume`, right after the driver was killed, until a worker works for the run again."""
    found = []
    with tempfile.TemporaryDirectory() as directory, standing_cluster(spot=2) as cluster:
        run = Path(directory) / "run"
        given = [part for setting in (*COMMON, "run.iterations=1000") for part in ("--set", setting)]
        settings = str(ROOT / "examples" / "ocr-tiny.toml")
        driver = _driver(cluster, "run", settings, "--into", str(run), *given)
        try:
            with Client(cluster.address, set_as_default=False) as observer:
                for _ in range(trials):
                    _one_more(run, driver)
                    driver.kill()
                    driver.wait()
                    began_s = time.time()
                    driver = _driver(cluster, "resume", str(run))
                    found.append(_to_work(RunDir(run), observer, driver, began_s))
        finally:
            driver.kill()
            driver.wait()
    return found


def _driver(cluster: DaskCluster, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "spotlight", *arguments, "--cluster", str(cluster.file)]
    with (cluster.directory / "driver.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=dict(cluster.environment), stdout=log, stderr=log)


def _one_more(run: Path, driver: subprocess.Popen[bytes]) -> None:
    """Wait until another iteration has ended, so that the next one is under way."""
    before = _finished(run)
    _wait(lambda: _finished(run) > before, driver)


def _finished(run: Path) -> int:
    """Iterations finished so far."""
    history = run / HISTORY
    return len(history.read_bytes().splitlines()) if history.exists() else 0


def _to_work(run: RunDir, observer: Client, driver: subprocess.Popen[bytes], began_s: float) -> Split:
    def working() -> list[float]:
        """When workers began tasks of the run since then, except the first one, which only prepares."""
        spans = run.rows(SPANS)
        return [row["start_s"] for row in spans if row["start_s"] > began_s and row["phase"] != "prepare"]

    at_work_s = min(_wait(working, driver))
    prepared_s = min(row["start_s"] for row in run.rows(SPANS) if row["start_s"] > began_s)
    ready_s = min(row["at_s"] for row in run.rows(EVENTS) if row["event"] == "joined" and row["at_s"] > began_s)
    came_s = min(at_s for at_s, what in _said(observer) if what == "add-client" and at_s > began_s)
    return {
        "start": came_s - began_s,
        "workers ready": ready_s - came_s,
        "first task": prepared_s - ready_s,
        "at work": at_work_s - prepared_s,
    }


# Many workers


def scheduler_share(workers: int, seconds: float, height_px: int) -> dict[str, float]:
    """Shares of a core that scheduler and driver take with so many workers at work, on hosts of eight, as slow as an
    H100 with Qwen-Image."""
    names = [f"h{number}" for number in range(-(-workers // NODE))]
    with tempfile.TemporaryDirectory() as shared:
        hosts = Hosts(Path(shared), "head", *names)
        try:
            scheduler, driver, run = _many(hosts, names, workers, height_px)
            _wait(lambda: _have_worked(run) >= workers - RESERVED, driver)
            began_s, shares = time.time(), list(_shares([scheduler, _inner(driver)], seconds))
            stopped_s = time.time()
            time.sleep(2.0)  # until the driver has written down what happened by then
            happened = Counter(
                row["is"]
                for row in RunDir(run).rows(DECISIONS)
                if row["decision"] == "dispatch" and began_s < row["at_s"] < stopped_s
            )
        finally:
            hosts.close()
    ours = [share for share, _ in shares]
    return {
        "workers": workers,
        "px": height_px,
        "seconds": stopped_s - began_s,
        "scheduler": statistics.fmean(ours),
        "scheduler_max_5s": max(statistics.fmean(ours[at : at + 5]) for at in range(max(1, len(ours) - 4))),
        "driver": statistics.fmean(share for _, share in shares),
        "steps_per_s": happened["GangBeat"] / (stopped_s - began_s),
        "events_per_s": happened.total() / (stopped_s - began_s),
    }


def _many(
    hosts: Hosts, names: Sequence[str], workers: int, height_px: int
) -> tuple[psutil.Process, subprocess.Popen[bytes], Path]:
    """Scheduler, driver and run directory of a run on all hosts."""
    tls = certificates(hosts.shared / "tls")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **tls}
    address = f"tls://{hosts.address('head')}:{PORT}"
    line = f"-m dask scheduler --protocol tls --port {PORT} --dashboard-address 127.0.0.1:0 --host"
    scheduler = hosts.start("head", [sys.executable, *line.split(), hosts.address("head")], environment)
    for number, name in enumerate(names):
        there = min(NODE, workers - NODE * number)
        of_it = ("--host-of", str(there), name, hosts.address(name), address)
        hosts.start(name, [sys.executable, "-m", "benchmarks.joining", *of_it], environment)
    run = hosts.shared / "run"
    overrides = [
        *COMMON,
        *LIGHT,
        "run.iterations=1000",
        "run.validate_every=1000",
        f"rollout.prompts={workers // 2}",
        "rollout.seeds_kept=8",
        "rollout.request_seeds=4",
        "exploration.request_seeds=4",
        "exploration.seeds_tried=16",
        "strategy.widths=[1]",
        "pace.gpu=h100",
        f"pace.height_px={height_px}",
        f"pace.width_px={height_px}",
        f"pools.reserved.workers={RESERVED}",
        f"pools.spot.workers={workers - RESERVED}",
    ]
    settings = str(ROOT / "examples" / "ocr-tiny.toml")
    given = [part for setting in overrides for part in ("--set", setting)]
    command = ["-m", "spotlight", "run", settings, "--into", str(run), "--cluster", address, *given]
    _wait(lambda: "Scheduler at" in hosts.log("head"), scheduler)
    return _inner(scheduler), hosts.start("head", [sys.executable, *command], environment), run


def _inner(entered: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that was started inside a host's namespace."""
    (inner,) = psutil.Process(entered.pid).children()
    return inner


def _have_worked(run: Path) -> int:
    """How many workers have finished a task: engines load their model at their first request."""
    return len({row["worker"] for row in RunDir(run).rows(SPANS)}) if (run / SPANS).exists() else 0


def _shares(processes: Sequence[psutil.Process], seconds: float) -> Iterator[tuple[float, ...]]:
    """Share of a core of each process, second by second."""
    at_s, used_s = time.perf_counter(), [_cpu_s(process) for process in processes]
    for _ in range(round(seconds / CPU_S)):
        time.sleep(CPU_S)
        now_s, now_used_s = time.perf_counter(), [_cpu_s(process) for process in processes]
        yield tuple((now - before) / (now_s - at_s) for now, before in zip(now_used_s, used_s, strict=True))
        at_s, used_s = now_s, now_used_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def serve_host(count: int, name: str, host: str, scheduler: str) -> None:
    """Run ``count`` workers on this host, forked from one fork server; the first host has the reserved ones."""
    from benchmarks.joining import _serve  # by a name that processes find which do not begin as this one did

    context = own_fork_server()
    with tempfile.TemporaryDirectory() as directory:
        pools = ["reserved" if name == "h0" and number < RESERVED else "spot" for number in range(count)]
        processes = [
            context.Process(target=_serve, args=(scheduler, host, f"{name}-{number}", pool, directory))
            for number, pool in enumerate(pools)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def _serve(scheduler: str, host: str, name: str, pool: str, directory: str) -> None:
    end_with_parent()

    async def live() -> None:
        options: dict[str, Any] = {"memory_limit": 0, "dashboard": False, "local_directory": directory}
        async with Worker(scheduler, name=name, nthreads=1, resources={pool: 1}, host=host, **options) as worker:
            await worker.finished()

    asyncio.run(live())


# All of it


@contextmanager
def standing_cluster(*, spot: int) -> Iterator[DaskCluster]:
    """A scheduler, a reserved worker and ``spot`` spot workers, started by the documentation's commands."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = DaskCluster(Path(directory))
        try:
            cluster.worker("trainer", "reserved")
            for number in range(spot):
                cluster.worker(f"spot-{number}", "spot")
            with dask.config.set(dask_settings(cluster.tls)):
                yield cluster
        finally:
            cluster.close()


def _wait(find: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    until_s = time.monotonic() + COLD_PATIENCE_S
    while not (found := find()):
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        assert time.monotonic() < until_s, f"waited {COLD_PATIENCE_S} s in vain"
        time.sleep(POLL_S)
    return found


def print_splits(found: Mapping[str, Sequence[Split]], goal_s: float) -> None:
    """Print the median of each part, and the median and maximum of the whole."""
    for name, splits in found.items():
        totals = [sum(split.values()) for split in splits]
        parts = {part: statistics.median(split[part] for split in splits) for part in splits[0]}
        print(f"\n| {name} | {' | '.join(parts)} | all: median | slowest | times | goal |")
        print(f"|---|{'---|' * (len(parts) + 4)}")
        seconds = " | ".join(f"{each:.2f}" for each in parts.values())
        print(f"| s | {seconds} | {statistics.median(totals):.2f} | {max(totals):.2f} | {len(totals)} | {goal_s:g} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    parser.add_argument(
        "--trials", type=at_least(1), default=10, help="workers that join, of each kind, and drivers that are killed"
    )
    parser.add_argument("--workers", type=at_least(3), default=64)
    parser.add_argument("--seconds", type=at_least(1.0), default=60.0, help="how long to watch the scheduler")
    parser.add_argument("--px", type=int, default=1280, help="size of the images whose durations are emulated")
    parser.add_argument("--smoke", action="store_true", help="each part once, with four workers, for some seconds")
    parser.add_argument("--save", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--host-of", nargs=4, help=argparse.SUPPRESS)  # what this script has its hosts do
    arguments = parser.parse_args()
    if arguments.host_of:
        count, *rest = arguments.host_of
        serve_host(int(count), *rest)
        return
    trials, workers, seconds = (
        (1, 4, 5.0) if arguments.smoke else (arguments.trials, arguments.workers, arguments.seconds)
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as where it is installed
    saved: dict[str, Any] = {}
    for part in arguments.parts:
        load = round(os.getloadavg()[0], 1)
        print(f"\n{part}: {os.cpu_count()} cores, load average {load:.1f} before it")
        if part == "join":
            saved[part] = joins(trials)
            print_splits(saved[part], JOIN_GOAL_S)
        elif part == "resume":
            saved[part] = resumes(trials)
            print_splits({"`spotlight resume`": saved[part]}, RESUME_GOAL_S)
        elif reason := missing():
            print(f"not measured: {reason}")
        else:
            saved[part] = found = scheduler_share(workers, seconds, arguments.px)
            print(f"\n| {' | '.join(found)} | goal |\n|{'---|' * (len(found) + 1)}")
            print(f"| {' | '.join(f'{value:.4g}' for value in found.values())} | {SCHEDULER_GOAL:g} |")
        saved[f"{part}_load"] = load
    if arguments.save:
        arguments.save.write_text(json.dumps(saved) + "\n")


if __name__ == "__main__":
    main()
