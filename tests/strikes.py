"""Strikes at the workers and the driver of a run on other machines, as soon as its log shows what they are at."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphs.loop import Loop, synchronous
from runs import COLD_S, NoWatch, outcome, settings_file
from spotlight import config
from spotlight.store.creating import create_run
from spotlight.store.rows import DECISIONS
from spotlight.store.rundir import RunDir

EXPLORING = (
    "run.iterations=2",
    "rollout.prompts=2",
    "rollout.steps=10",
    "strategy.widths=[1]",
    'strategy.rollout_pools=["spot"]',
)
"""Settings of a run for workers that begin cold; it explores by a fixed budget, and spot workers alone roll out."""
SLOWLY = ("pace.gpu=h100", "pace.score_s=0", "pace.speedup=1.5")
"""A rollout takes two seconds then, and so does training: time enough to strike."""
POLL_S = 0.2
"""The driver writes its log four times a second."""


def undisturbed(directory: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """What settings lead to without any cluster."""
    run = create_run(config.load(settings_file(directory), settings), now_s=0.0)
    Loop(run, synchronous, NoWatch()).go()
    return outcome(run.path)


def strike(run: Path, layer: str, how: signal.Signals, send: Callable[[str, signal.Signals], None]) -> str:
    """Send a signal to a worker as soon as it has a task of a layer, and return the worker's name.

    Args:
        layer: as its name begins: phase and iteration.
        send: is given the worker's name and the signal.
    """
    until_s = time.monotonic() + COLD_S
    while time.monotonic() < until_s:
        if worker := at_work(run, layer):
            send(worker, how)
            return worker
        time.sleep(POLL_S)
    raise AssertionError(f"nobody was at {layer} within {COLD_S} s")


def at_work(run: Path, layer: str) -> str:
    """Name of a worker that has a task of a layer, as of a moment ago; empty if none has."""
    names: dict[str, str] = {}
    doing: dict[tuple[str, int], str] = {}
    for row in RunDir(run).rows(DECISIONS) if (run / DECISIONS).exists() else ():
        match row.get("is"):
            case "WorkerJoined":
                names[row["address"]] = row["name"]
            case "WorkerLeft":
                names.pop(row["address"], None)
            case "TaskChanged" if row["key"][0].startswith(f"{layer}-"):
                layer_and_index = (row["key"][0], row["key"][1])
                doing[layer_and_index] = row.get("worker", "") if row["state"] == "processing" else ""
    return next((names[address] for address in doing.values() if address in names), "")
