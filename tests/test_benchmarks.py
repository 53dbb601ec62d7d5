"""Every benchmark runs to its end in its smallest form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT

SMALL = {
    "faults": ("--schedules", "20"),
    "fidelity": ("--table",),
    "planner": ("--explore-steps",),
    "recovery": ("--parts", "weights", "--weights-gb", "0.01"),
    "scale": ("--turns", "1", "--hours", "0"),
    "soak": ("--iterations", "30"),
    "time_to_target": ("--seeds", "--figure", "{tmp}/figure.png"),
}
"""Takes seconds: what is recorded is shown, what is pure is computed."""
LIVE = {
    "algorithms": ("--seconds", "1", "--seeds", "1", "--only", "nft"),
    "dashboard": ("--workers", "8", "--seconds", "2"),
    "learning": ("--smoke",),
    "overhead": ("--turns", "1", "--iterations", "1"),
    "recovery": ("--parts", "recoveries", "--kills", "1"),
    "tls": ("--iterations", "1"),
}
"""Starts clusters, or trains: a minute and more. Ask for them by ``pytest -m slow --live``."""
ELSEWHERE = {"fuzz"}
"""`test_fuzz` runs it, case by case."""


def test_every_benchmark_has_a_small_form() -> None:
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}

    assert there == SMALL.keys() | LIVE.keys() | ELSEWHERE


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    run(name, SMALL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIVE))
def test_a_live_benchmark_runs_to_its_end(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--live"):
        pytest.skip("takes minutes: ask for it by --live")
    run(name, LIVE[name], tmp_path)


def run(name: str, arguments: tuple[str, ...], directory: Path) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *(each.format(tmp=directory) for each in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
