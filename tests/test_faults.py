"""Claims about the dispatcher that must hold whatever happens: schedules of faults drawn by seeds, and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.faults import count, main
from cluster.dispatch.dispatcher import Dispatcher, differing
from cluster.virtual.faults import FAULTS, LIKELY, MOMENTS, Fault, Schedule, draw, verdict
from loops import go_struck
from mutants import MUTANTS, ForgivesLate
from regressions import REGRESSIONS
from runs import outcome, settings_file
from spotlight import config
from spotlight.store.creating import create_run
from spotlight.store.rundir import RunDir

SCHEDULES, FUNCTIONS = 1_200, 2
WITHIN = 400
"""The first so many schedules find each planted bug."""
LOOPS = 20


@pytest.mark.parametrize("part", range(FUNCTIONS))
def test_whatever_happens_the_run_ends_with_the_results_of_an_undisturbed_one(part: int) -> None:
    share = SCHEDULES // FUNCTIONS

    found = count(range(part * share, (part + 1) * share))

    assert found.broken == {}
    assert found.events > 100 * share


@pytest.mark.parametrize("schedule", REGRESSIONS.values(), ids=REGRESSIONS.keys())
def test_what_a_schedule_found_stays_mended(schedule: Schedule) -> None:
    assert verdict(schedule).violations == ()


def test_a_schedule_that_was_found_finds_its_bug_again() -> None:
    found = REGRESSIONS["a request that was set aside stays so when a step is told of late"]

    assert verdict(found, ForgivesLate).violations != ()


def test_the_schedules_strike_in_every_way() -> None:
    drawn = [draw(seed) for seed in range(WITHIN)]

    faults = {fault for schedule in drawn for _, fault, _ in schedule.faults}
    triggered = {(triggered.moment, triggered.fault) for schedule in drawn for triggered in schedule.triggered}

    assert faults == set(FAULTS)
    assert len(LIKELY) == len(FAULTS)
    assert {moment for moment, _ in triggered} == set(MOMENTS)
    assert {fault for _, fault in triggered} == set(FAULTS)


@pytest.mark.parametrize(("plant", "bug"), MUTANTS.items(), ids=[plant.__name__ for plant in MUTANTS])
def test_a_planted_bug_is_found_and_named(plant: type[Dispatcher], bug: str) -> None:
    sentences = (sentence for seed in range(WITHIN) for sentence in _found(plant, draw(seed)))

    assert any(bug in sentence for sentence in sentences)


def _found(plant: type[Dispatcher], schedule: Schedule) -> tuple[str, ...]:
    try:
        return verdict(schedule, plant).violations
    except (KeyError, TypeError):  # it confused itself
        return ()


@pytest.mark.parametrize("seed", range(20))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []

    verdicts = verdict(draw(seed), log=first), verdict(draw(seed), log=second)

    assert verdicts[0] == verdicts[1]
    assert len(first) > verdicts[0].events
    assert first == second


def test_another_seed_gives_another_run() -> None:
    assert draw(1) != draw(2)
    assert verdict(draw(1)) != verdict(draw(2))


@pytest.mark.parametrize("seed", range(50))
def test_the_log_of_a_schedule_dispatched_again_gives_the_same_instructions(seed: int) -> None:
    log: list[dict[str, Any]] = []
    verdict(draw(seed), log=log)

    rows = json.loads(json.dumps(log))

    assert list(differing(rows)) == []
    launched = [row for row in rows if "then" in row]
    assert list(differing([{**row, "then": []} if row is launched[0] else row for row in rows])) != []


def test_the_shell_counts_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--schedules", "3", "--first", "7"])

    table = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert table[0] == "| schedules | events | virtual hours | seconds | with violations |"
    assert table[2].startswith("| 3 |")
    assert table[2].endswith("| 0 |")


def test_the_shell_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--seed", "7", "--trace"])

    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Schedule(seed=7" in printed
    assert '"is": "Launch"' in printed
    assert "0 violations" in printed


# The loop itself, on a modelled device


def test_a_worker_whose_engine_always_fails_has_nothing_set_aside_and_ends_no_run() -> None:
    schedules = [
        replace(schedule, faults=(), triggered=(), rules=replace(schedule.rules, quarantine_after=5))
        for seed in range(300)
        if (schedule := draw(seed)).sick
    ]

    assert len(schedules) > 20
    assert [verdict(schedule).violations for schedule in schedules] == [()] * len(schedules)


AHEAD = (
    "strategy.exploration=off",
    "rollout.prompts_ahead=1",
    "train.parts=3",
    "run.iterations=4",
    "run.validate_every=1",
)
REUSE = ("exploration.reuse=true", "train.parts=3", "run.iterations=4")
FIRST = (*REUSE, 'strategy.train_pools=["reserved","spot"]')


def _run(directory: Path, *more: str) -> RunDir:
    overrides = ["run.name=struck", "strategy.widths=[1, 2]", 'strategy.offload="all"', *more]
    return create_run(config.load(settings_file(directory), overrides), 0.0)


def _loop_schedules() -> Iterator[Schedule]:
    """Blows over all of a run's time, at a cluster that can do any of its work."""
    for seed in range(LOOPS):
        schedule, chance = draw(seed), Random(seed)
        faults = [(25 * at_s / 12, fault, whom) for at_s, fault, whom in schedule.faults if fault != "store"]
        ends: tuple[Fault, ...] = ("driver", "stop", "node")
        more = (round(chance.uniform(0.0, 25.0), 3), chance.choice(ends), chance.randrange(99))
        yield replace(
            schedule,
            reserved=2,
            spot=4,
            per_node=2,
            ups=schedule.ups[:4] if len(schedule.ups) >= 4 else 4 * schedule.ups[:1],
            rules=replace(schedule.rules, close_with_training=False, explored_first=2, quarantine_after=1000),
            faults=tuple(sorted([*faults, more])),
        )


def _left_behind(run: RunDir) -> tuple[dict[str, Any], dict[str, bytes]]:
    weights = sorted(run.path.glob("weights/*/*.safetensors"))
    return outcome(run.path), {str(path.relative_to(run.path)): path.read_bytes() for path in weights}


@pytest.fixture(scope="module", params=[(), AHEAD, REUSE, FIRST], ids=["exploring", "ahead", "reuse", "first"])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], tuple[dict[str, Any], dict[str, bytes]]]:
    """Settings, and what a run with them leaves."""
    schedule = replace(next(_loop_schedules()), faults=(), lag_s=0.0)
    run = _run(tmp_path_factory.mktemp("undisturbed"), *request.param)
    assert go_struck(run, schedule) == ["done"]
    return request.param, _left_behind(run)


@pytest.mark.parametrize("schedule", [*_loop_schedules()], ids=lambda schedule: f"seed{schedule.seed}")
def test_a_struck_run_leaves_what_an_undisturbed_one_leaves(
    tmp_path: Path, undisturbed: tuple[tuple[str, ...], tuple[dict[str, Any], dict[str, bytes]]], schedule: Schedule
) -> None:
    overrides, expected = undisturbed
    run = _run(tmp_path, *overrides)

    go_struck(run, schedule)

    assert _left_behind(run) == expected
