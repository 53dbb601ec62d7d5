"""Small runs of the whole system, and what two runs must have in common to count as equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from spotlight.plan.balance import Balance
from spotlight.store.rows import HISTORY, VALIDATION
from spotlight.store.rundir import RunDir

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "examples" / "prompts"
VALIDATED = {
    1: ROOT / "tests" / "prompts" / "validation-1.txt",
    6: ROOT / "tests" / "prompts" / "validation-6.txt",
    20: PROMPTS / "digits-validation.txt",
}
"""Prompts to validate, by their number: the first ones of the demo."""
WAIT_S = 240.0
"""Longest that any of these tests waits for something; a run takes some ten seconds of a quiet machine."""
COLD_S = 400.0
"""The same where workers begin cold: each imports torch itself, which takes ten seconds of a core."""

SETTINGS = f"""
[run]
iterations = 2
validate_every = 2
validation_seeds = 1
report = false

[data]
train_prompts = "{PROMPTS / "digits-train.txt"}"
validation_prompts = "VALIDATED"

[rollout]
prompts = 3
seeds_kept = 4
request_seeds = 2
steps = 6

[exploration]
seeds_tried = 8
request_seeds = 4
rounds = 2
budget = "fixed"

[pools.reserved]
workers = 1
usd_per_h = 10.0

[pools.spot]
workers = 2
usd_per_h = 2.5
replace_after_s = 0.5

[cluster]
dashboard_port = 0
"""


LITTLE = (
    "rollout.prompts=2",
    "rollout.steps=10",
    "strategy.widths=[1]",
    'strategy.exploration="off"',
)
"""Settings of a run for workers that begin cold."""


class NoWatch:
    """A `graphs.loop.Watch` that follows nothing."""

    def begin(self, phase: str, iteration: int) -> None: ...

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        return {}

    def usd(self) -> float:
        return 0.0

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        return None


def settings_file(directory: Path, validated: Literal[1, 20] = 1) -> Path:
    """A settings file whose runs go into the same directory.

    Args:
        validated: so many of the demo's prompts. To make and read the images of all twenty takes longer than all else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "run.toml"
    settings = SETTINGS.replace("VALIDATED", str(VALIDATED[validated]))
    path.write_text(settings.replace("[run]", f'[run]\ndir = "{directory}"'))
    return path


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on where, when, or how often interrupted it ran."""
    run = RunDir.open(run_dir)
    return {
        "history": [{**row, "measured": None} for row in run.rows(HISTORY)],
        "selections": [path.read_text() for path in sorted((run_dir / "selections").glob("*.json"))],
        "validation": [(row["version"], row["score"], row["rewards"]) for row in run.rows(VALIDATION)],
    }


def start(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The shell command in a process of its own, which hears signals even where `nohup` began the tests."""
    command = ["env", "--default-signal=HUP,INT", sys.executable, "-m", "spotlight", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, env=environment)


def spotlight(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The shell command, to its end."""
    process = start(*arguments)
    try:
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(
    what: Callable[[], Any], process: subprocess.Popen[str] | None = None, *, at_most_s: float = WAIT_S
) -> Any:
    """Poll until something is true, and return it."""
    deadline_s = time.monotonic() + at_most_s
    while time.monotonic() < deadline_s:
        value = what()
        if value:
            return value
        assert process is None or process.poll() is None, f"ended early: {process.communicate()}"
        time.sleep(0.01)
    raise AssertionError(f"waited {at_most_s} s in vain")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
