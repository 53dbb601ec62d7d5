"""Every benchmark runs to its end in its smallest form."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import dashboard, fidelity, fixed_costs, learning, planner
from benchmarks.bandits.policies import ITERATIONS, Trial, Unexplored, explore
from benchmarks.bandits.rewards import SCENARIOS
from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.rules import Rules
from runs import ROOT
from spotlight.simulation import Simulation
from spotlight.store.rows import HISTORY, SIMULATED

SMALL = {
    "faults": ("--schedules", "20"),
    "fidelity": ("--table",),
    "planner": ("--explore-steps",),
    "recovery": ("--parts", "weights", "--weights-gb", "0.01"),
    "scale": ("--turns", "1", "--hours", "0"),
    "soak": ("--iterations", "10"),
    "updates": ("--blocks", "1", "--turns", "1"),
    "time_to_target": ("--table", "--data", "{tmp}/data/time_to_target.jsonl", "--figure", "{tmp}/figure.png"),
}
"""Takes seconds: what is recorded is shown, what is pure is computed, and what is live is tried once."""
LIVE = {
    "algorithms": ("--seconds", "1", "--seeds", "1", "--only", "NFT, explored"),
    "dashboard": ("--workers", "8", "--seconds", "0.5"),
    "engine": ("--turns", "1", "--samples", "8", "--cpu"),
    "fixed_costs": (),
    "full_size": ("--smoke",),
    "joining": ("--smoke",),
    "learning": ("--smoke",),
    "overhead": ("--turns", "1", "--iterations", "3"),
    "recovery": ("--parts", "cold", "recoveries", "trace", "--cold", "1", "--kills", "1", "--requests", "2"),
    "soak": ("--live", "--iterations", "4", "--every", "1"),
    "time_to_target": ("--smoke",),
    "tls": ("--iterations", "3"),
}
"""Starts clusters, or trains: a minute and more. Ask for them by ``pytest --live``."""
LIVE_S = 900
"""On a busy machine; a test's own limit is longer by what it takes to say so."""
ELSEWHERE = {"fuzz"}
"""`test_fuzz` runs it, case by case."""
REFUSED = [
    ("algorithms --only nothing", "contains 'nothing': DiffusionNFT, explored, "),
    ("algorithms --seeds 0", "--seeds: at least 1, not 0"),
    ("dashboard --seconds nan", "--seconds: at least 0.1, not nan"),
    ("engine --turns 0", "--turns: at least 1, not 0"),
    ("faults --processes 0", "--processes: at least 1, not 0"),
    ("fidelity --shapes 7", "--shapes: invalid choice: 7"),
    ('fidelity --costs {"lunch_s":1}', "--costs: "),
    ("fidelity --costs 3", "--costs: "),
    ("fuzz --cases 0", "--cases: at least 1, not 0"),
    ("joining --trials 0", "--trials: at least 1, not 0"),
    ("overhead --iterations 2", "--iterations: at least 3, not 2"),
    ("planner --only nothing", "contains 'nothing': alike: coins of 0.5, "),
    ("planner --told --only alike", "contains 'alike': coins of Beta(0.3, 0.3), "),
    ("recovery --kills 0", "--kills: at least 1, not 0"),
    ("recovery --parts weights --plot a.png", "--plot: it draws recoveries, which are not among --parts"),
    ("scale --turns 0", "--turns: at least 1, not 0"),
    ("tls --iterations 2", "--iterations: at least 3, not 2"),
    ("updates --at /nowhere", "--at: /nowhere is no directory"),
    ("updates --blocks 0", "--blocks: at least 1, not 0"),
]
"""(command, end of what it says)"""


def test_every_benchmark_has_a_small_form() -> None:
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}

    assert there == SMALL.keys() | LIVE.keys() | ELSEWHERE


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    run(name, SMALL[name], tmp_path)


def test_what_a_simulated_run_was_told_to_spend_beside_its_work_is_found_in_it(tmp_path: Path) -> None:
    told = {"launch_s": 0.07, "graph_s": 0.3, "publish_s": 0.25, "prepare_s": 0.9}
    asked = fixed_costs.settings(tmp_path)
    told_all = {**told, "gradient_s": 0.0}  # a cost by itself, which counts as publishing
    asked = asked.model_copy(update={"simulation": asked.simulation.model_copy(update=told_all)})
    simulation = Simulation("test", asked, "modelled")
    simulation.go(report=False)

    assert fixed_costs.fixed_costs(simulation.directory, asked) == pytest.approx(told, rel=0.02)


def test_a_live_run_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    simulation = Simulation("test", fixed_costs.settings(tmp_path), "modelled")
    simulation.go(report=False)
    run = simulation.directory
    (run.path / SIMULATED).unlink()
    whole = fidelity.recorded(tmp_path)

    run.rewrite(HISTORY, run.rows(HISTORY)[:-1])

    assert [each.path for each in whole] == [run.path]
    assert fidelity.recorded(tmp_path) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_prompts_are_met_for_the_first_time_in_the_iterations_that_the_planners_table_says(name: str) -> None:
    """Of the 40 recorded ones 32 are met, in turns of two iterations."""
    met: list[set[int]] = []

    class Noting(Unexplored):
        def end(self, trial: Trial) -> None:
            met.append(set(trial.ids))

    explore(SCENARIOS[name], Noting(), rounds=1, seed=0)

    every, first, later = (list(range(ITERATIONS))[part] for part in planner.parts(SCENARIOS[name]))
    assert first == [k for k, ids in enumerate(met) if not ids & set().union(*met[:k])]
    assert every == [*first, *later]


@pytest.mark.parametrize("name", sorted({*SMALL, *LIVE, *ELSEWHERE}))
def test_a_benchmark_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its imports are then there."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])

    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()

    assert ended.value.code == 0
    assert f"benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "said"), REFUSED)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])

    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main()

    *usage, error = capsys.readouterr().err.splitlines()
    assert said in error
    assert usage[0].startswith("usage: ")


def test_the_page_of_learning_has_what_the_recorded_runs_say() -> None:
    page = (ROOT / "docs" / "results" / "learning.md").read_text("utf-8")

    recorded = learning.table([json.loads(line) for line in learning.DATA.read_text("utf-8").splitlines()])

    assert [line for line in recorded.splitlines()[2:] if line not in page] == []
    assert len(recorded.splitlines()) > 2


def test_a_score_is_reached_by_two_validations_in_a_row_and_a_fall_counts_from_the_best_before() -> None:
    curve = [(0, 0.5), (4, 0.95), (8, 0.8), (12, 0.9), (16, 0.91), (20, 0.7)]

    assert learning.reached(curve) == 12
    assert learning.reached(curve[:3]) == float("inf")
    assert learning.fall(curve) == pytest.approx(0.25)


def test_made_up_workers_go_on_where_one_was_chosen_to_be_lost_that_cannot_be() -> None:
    """Reserved ones: there are no others among so few."""
    feeder, at_s = dashboard.Feeder(Dispatcher(Rules()), Mock(), dashboard.RESERVED), 0.0
    feeder.begin(at_s)

    while at_s < 2.5 * dashboard.LOSS_S:
        at_s += dashboard.TICK_S
        feeder.tick(at_s, 0.0)

    assert min(feeder.begun.values()) > at_s - 2 * dashboard.TASK_S  # no task lasts so long


@pytest.mark.live
@pytest.mark.timeout(LIVE_S + 60)
@pytest.mark.parametrize("name", sorted(LIVE))
def test_a_live_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    run(name, LIVE[name], tmp_path, LIVE_S)


def run(name: str, arguments: tuple[str, ...], directory: Path, limit_s: float = 280) -> str:
    shutil.copytree(ROOT / "benchmarks" / "data", directory / "data")
    command = [sys.executable, "-m", f"benchmarks.{name}", *(each.format(tmp=directory) for each in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
