"""One worker process: it lives as long as its driver, runs one task at a time, and imports little itself.

Processes are forked from a warm parent that has done the imports, so that a worker starts in
well under a second; the parent starts no thread and holds no device.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import dask
from distributed import Worker

from cluster.plugins import Ears


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker process needs to know."""

    name: str
    number: int
    """Among the machine's workers; picks its GPU where there are several."""
    scheduler: str
    resources: Mapping[str, float]
    local_directory: str
    settings: Mapping[str, Any]
    """Dask's configuration, the same for all processes of a run."""


def warm_parent() -> ForkServerContext:
    """The context whose processes are forked from the warm parent; the first start waits for its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cluster.warm"])
    return context


def serve(spec: WorkerSpec, lifeline: Connection) -> None:
    """Run a worker until it is told to close or the driver is gone; the body of a worker process.

    Args:
        lifeline: its other end is held by the driver; when that closes, however the driver ended,
            this process ends at once, so that no orphan goes on training or committing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which stops workers in order
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ["LOCAL_RANK"] = str(spec.number)  # read by spotlight.models.load
    dask.config.set(spec.settings)
    logging.getLogger("distributed").setLevel(logging.ERROR)  # losing a peer is no news here
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)  # a failed task's error goes to the driver
    asyncio.run(_serve(spec))
    os._exit(0)  # a task thread that is still at work would keep the process alive


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


async def _serve(spec: WorkerSpec) -> None:
    async with Worker(
        spec.scheduler,
        name=spec.name,
        nthreads=1,
        resources=dict(spec.resources),
        memory_limit=0,
        host="127.0.0.1",
        local_directory=spec.local_directory,
        dashboard=False,
        plugins=(Ears(),),
    ) as worker:
        await worker.finished()
