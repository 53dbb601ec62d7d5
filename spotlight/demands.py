"""Counts what a run will need before it starts: the impossible is refused, the unusual is logged."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from math import ceil, inf
from pathlib import Path
from typing import Any

from graphs.requests import request_size
from spotlight.config import Config
from spotlight.records import SpotlightError, record
from spotlight.rl.parts import Cut
from spotlight.rl.sums import slices_of
from spotlight.store.room import memory_bytes

TASKS_USUAL, TASKS_MAX = 20_000, 200_000
"""Tasks in one graph. A task takes some 10 kB of the driver, which holds the scheduler, and a millisecond of its
time."""
TOLD_USUAL, TOLD_MAX = 1_000_000, 10_000_000
"""References to gradients in one graph: to build it takes some 6 s for each million."""
IMAGES_USUAL, IMAGES_MAX = 100_000, 1_000_000
"""Images in one iteration: the planner keeps a number, and the store a file, of each."""
WORKER_THREADS = 11
"""Of the worker (4), and of the engine that owns its device, with one for torch (7): measured, as the next is."""
DRIVER_THREADS = 50
"""Of the driver, most of them Dask's, and of its fork server, resource tracker and janitor."""
DRIVER_FILES, WORKER_FILES = 80, 8
"""Open files of the driver: its own, and for each worker its connections and pipes."""
WORKER_BYTES = 400e6
"""Memory of a worker and its engine with the embedded model; a larger model is shared by a machine's workers."""
PIDS_MAX = Path("/sys/fs/cgroup/pids.max")
WORKERS = "pools.reserved.workers, pools.spot.workers or pools.reward.workers"

logger = logging.getLogger("spotlight")


@record
class Machine:
    """Limits of this machine."""

    open_files: float
    """Most open files of one process."""
    processes: float
    memory_bytes: float


@record
class Demand:
    """Something that a run needs: how much, how much is usual, and how much is possible."""

    what: str
    asked: float
    usual: float
    limit: float
    why: str
    """The reason for the limit."""
    settings: str
    """Settings that make it smaller."""

    def __str__(self) -> str:
        return f"{self.asked:,.0f} {self.what}, and {self.why}: lower {self.settings}"


def check_demands(config: Config, *, validation_prompts: int, live: bool, joins: bool = False) -> None:
    """Refuse demands that cannot be met, and log unusual ones.

    Args:
        live: whether there will be workers.
        joins: whether those are of a cluster that is there already.

    Raises:
        SpotlightError: the first demand that cannot be met, with its number and the settings to change.
    """
    for demand in demands(config, this_machine(), validation_prompts=validation_prompts, live=live and not joins):
        if demand.asked > demand.limit:
            raise SpotlightError(f"these settings ask for {demand}")
        if demand.asked > demand.usual:
            logger.warning("these settings ask for %s, if that was not meant", demand)


def this_machine() -> Machine:
    files, processes = (
        inf if soft == resource.RLIM_INFINITY else soft
        for soft, _ in map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    )
    group = PIDS_MAX.read_text().strip() if PIDS_MAX.is_file() else ""
    return Machine(
        open_files=files,
        processes=min(processes, int(group) if group.isdigit() else inf),
        memory_bytes=memory_bytes(),
    )


def demands(config: Config, machine: Machine, *, validation_prompts: int, live: bool) -> Iterator[Demand]:
    """All demands of settings that were checked one by one before.

    Args:
        machine: the driver's.
        live: whether the run has a scheduler and workers of its own.
    """
    yield from _tasks(config, validation_prompts)
    yield from _images(config, validation_prompts, machine)
    if live and config.cluster.manager == "local":
        yield from _processes(config, machine)
    if live:
        yield _open_files(config, machine)


def _tasks(config: Config, validation_prompts: int) -> Iterator[Demand]:
    """A request is a task for each rank that its gang may have, and one or two to score it.

    Each update, and each task that adds a slice, takes all gradients before it as arguments, so that the time to build
    a graph grows with the square of their number.
    """
    rollout, exploration, cut = config.rollout, config.exploration, Cut.of(config)
    each = max(config.strategy.widths) + 1 + config.scores_apart
    rolled_out = (rollout.prompts + rollout.prompts_ahead) * ceil(rollout.seeds_kept / request_size(config))
    explored = config.prompts_drawn * ceil(exploration.seeds_tried / exploration.request_seeds)
    explores = config.strategy.exploration != "off"
    slices = slices_of(config, cut.count)
    adds = slices if slices > 1 else 0
    common: dict[str, Any] = {"usual": TASKS_USUAL, "limit": TASKS_MAX, "why": f"a graph may have {TASKS_MAX:,}"}
    yield Demand(
        what="tasks in the graph of an iteration",
        asked=each * (rolled_out + explored * explores) + cut.updates * (cut.count * config.train.width + adds),
        settings="rollout.prompts, rollout.prompts_ahead, rollout.seeds_kept, exploration.seeds_tried, "
        "strategy.widths, train.updates, train.parts or train.width, or raise rollout.request_seeds or "
        "exploration.request_seeds",
        **common,
    )
    yield Demand(
        what="references to gradients in the graph of an iteration (each update and each sum lists what it may need)",
        asked=(cut.updates * (cut.updates + 1) // 2 + cut.updates * adds) * cut.count,
        usual=TOLD_USUAL,
        limit=TOLD_MAX,
        why=f"there may be {TOLD_MAX:,}",
        settings="train.updates or train.parts",
    )
    yield Demand(
        what="tasks in the graph of a validation",
        asked=each * validation_prompts,
        settings="the number of data.validation_prompts",
        **common,
    )


def _images(config: Config, validation_prompts: int, machine: Machine) -> Iterator[Demand]:
    rollout, exploration, model = config.rollout, config.exploration, config.model
    explores = config.strategy.exploration != "off"
    per_prompt = exploration.seeds_tried * explores
    yield Demand(
        what="images in an iteration",
        asked=rollout.prompts * rollout.seeds_kept + config.prompts_drawn * per_prompt,
        usual=IMAGES_USUAL,
        limit=IMAGES_MAX,
        why=f"there may be {IMAGES_MAX:,}",
        settings="rollout.prompts, rollout.seeds_kept or exploration.seeds_tried",
    )
    image_bytes = 3 * model.height_px * model.width_px
    batch = max(request_size(config), exploration.request_seeds * explores, config.run.validation_seeds)
    memory = machine.memory_bytes
    common: dict[str, Any] = {"usual": memory / 4, "limit": memory, "why": f"this machine has {memory:,.0f} of memory"}
    yield Demand(
        what="bytes for the images of one request, its largest tensor",
        asked=4 * batch * image_bytes,
        settings="rollout.request_seeds, exploration.request_seeds, run.validation_seeds or the size of images",
        **common,
    )
    yield Demand(
        what="bytes for the images of one validation",
        asked=validation_prompts * config.run.validation_seeds * image_bytes,
        settings="run.validation_seeds, or the number of data.validation_prompts",
        **common,
    )


def _processes(config: Config, machine: Machine) -> Iterator[Demand]:
    """Demands of workers on this machine; workers elsewhere only need connections."""
    workers = _workers(config)
    yield Demand(
        what="threads, each of which counts as a process",
        asked=DRIVER_THREADS + WORKER_THREADS * workers,
        usual=machine.processes / 2,
        limit=machine.processes,
        why=f"this user may have {machine.processes:,.0f} here (ulimit -u, or the control group's pids.max)",
        settings=WORKERS,
    )
    yield Demand(
        what="bytes of memory for the workers",
        asked=WORKER_BYTES * workers,
        usual=machine.memory_bytes,
        limit=4 * machine.memory_bytes,
        why=f"this machine has {machine.memory_bytes:,.0f}",
        settings=WORKERS,
    )


def _open_files(config: Config, machine: Machine) -> Demand:
    return Demand(
        what="open files of the driver",
        asked=DRIVER_FILES + WORKER_FILES * _workers(config),
        usual=machine.open_files,
        limit=machine.open_files,
        why=f"a process may have {machine.open_files:,.0f} (ulimit -n, which you may raise)",
        settings=WORKERS,
    )


def _workers(config: Config) -> int:
    return sum(pool.workers for _, pool in config.pools)
