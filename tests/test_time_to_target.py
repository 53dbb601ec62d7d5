"""The benchmark of time to a score treats all strategies alike, and counts what its raw data says."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import time_to_target
from benchmarks.target import cases, figure, outcomes, readme, tables
from benchmarks.target.cases import OURS, SEEDS, SOONEST, SPACE, STRATEGIES, TRIALS, TUNING_SEEDS, Case, Row
from benchmarks.target.prices import at_prices
from runs import ROOT
from spotlight import config
from spotlight.plan.durations import GPUS

CELL = {"job": "digits", "regime": "2 levels", "size": "512"}

TRIED = cases.tried(OURS, TRIALS)
"""The recipes of a strategy that explores."""


def asked(**other: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "jobs": ["digits"],
        "regimes": ["2 levels"],
        "sizes": ["512"],
        "strategies": list(STRATEGIES),
    }
    values |= {"trials": TRIALS, "tuning_seeds": list(TUNING_SEEDS), "seeds": list(SEEDS), "iterations": 60}
    values |= {"to_last": False}
    return argparse.Namespace(**values | other)


def shown(**other: Any) -> argparse.Namespace:
    """The fresh seeds are those that most tests have runs of."""
    return asked(**{"seeds": [0, 1]} | other)


def row(
    strategy: str, trial: int, seed: int, *, second_s: float = 1.0, there: int = 4, last: int = 8
) -> dict[str, Any]:
    """A run that is at every target from a version on, at so many seconds and as many dollars a version."""
    versions = range(last + 1)
    return {
        **CELL,
        "strategy": strategy,
        "trial": trial,
        "seed": seed,
        "settings": Case(**CELL, strategy=strategy, trial=trial, seed=seed).digest,
        "scores": {str(version): 0.99 if version >= there else 0.5 for version in versions[::2]},
        "seconds": [second_s * version for version in versions],
        "usd": [second_s * version for version in versions],
        "preemptions": [0.0] * last,
        "spot_busy": [0.0] * last,
        "seeds_scored": [0.0] * last,
        "cpu_s": 1.0,
    }


def test_all_that_explore_try_the_same_recipes_and_so_do_all_that_do_not() -> None:
    wanted = time_to_target.missing([], asked())

    by_strategy = {name: {(case.trial, case.seed) for case in wanted if case.strategy == name} for name in STRATEGIES}

    for name, mine in by_strategy.items():
        explores = "strategy.exploration=off" not in STRATEGIES[name]
        assert mine == by_strategy["Spotlight" if explores else "reserved only (4)"]
        assert len(mine) == len(TRIED) * len(TUNING_SEEDS)
    points = cases.recipes()
    assert {points[trial]["explored"] for trial, _ in by_strategy["reserved only (4)"]} == {"4"}
    assert not set(TUNING_SEEDS) & set(SEEDS)


def test_recipes_differ_and_each_is_one_that_a_run_can_have() -> None:
    points = cases.recipes()

    assert len({tuple(point.values()) for point in points}) == len(points) == 72
    assert list(points[0].values()) == [next(iter(choices)) for choices in SPACE.values()]
    for strategy in STRATEGIES:
        for trial in cases.tried(strategy, TRIALS):
            config.load(cases.SETTINGS, Case(**CELL, strategy=strategy, trial=trial, seed=0).overrides())


def test_half_of_a_prompts_samples_is_half_of_what_the_recipe_has() -> None:
    large = next(trial for trial, point in enumerate(cases.recipes()) if point["groups x samples"] == "6 x 16")

    def settings(strategy: str, trial: int) -> config.Config:
        return config.load(cases.SETTINGS, Case(**CELL, strategy=strategy, trial=trial, seed=0).overrides())

    chosen, drawn = "chosen of eight in six steps (1 + 11)", "Spotlight, four as drawn"
    assert [settings(chosen, trial).train.seeds_used for trial in (0, large)] == [4, 8]
    assert [settings(drawn, trial).rollout.seeds_kept for trial in (0, large)] == [4, 8]


def test_the_best_trial_is_run_on_fresh_seeds_once_all_trials_are_there() -> None:
    name = "Spotlight"
    trials = [row(name, trial, seed, second_s=3.0 if trial else 5.0) for trial in TRIED for seed in TUNING_SEEDS]
    trials[2 * 4] |= {"seconds": [0.1 * s for s in trials[2 * 4]["seconds"]]}  # the fifth is quick on one seed

    before = time_to_target.missing(trials[:-1], asked(strategies=[name]))
    after = time_to_target.missing(trials, asked(strategies=[name]))

    assert [(case.trial, case.seed) for case in before] == [(TRIED[-1], TUNING_SEEDS[-1])]
    assert [(case.trial, case.seed) for case in after] == [(TRIED[4], seed) for seed in SEEDS]


def test_a_recipe_chosen_by_the_last_target_is_the_soonest_there_and_has_longer_tuning_runs(tmp_path: Path) -> None:
    """The soonest in the middle is not always the soonest at the end."""
    name, (soon, sure) = "Spotlight", TRIED[:2]
    scores = {soon: {"2": 0.86, "4": 0.86, "6": 0.86, "60": 0.86}, sure: {"4": 0.5, "6": 0.93, "8": 0.93}}
    trials = [
        {**row(name, trial, seed), "scores": scores.get(trial, {"60": 0.5}), "seconds": list(range(61))}
        for trial, seed in product(TRIED, TUNING_SEEDS)
    ]
    short = {**trials[0], "scores": {"2": 0.86, "4": 0.86}}
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (*trials[1:], short)))

    by_middle, by_last = (asked(strategies=[name], to_last=last, data=path) for last in (False, True))

    assert {case.trial for case in time_to_target.missing(time_to_target.read(by_middle), by_middle)} == {soon}
    (case,) = time_to_target.missing(time_to_target.read(by_last), by_last)
    assert (case.trial, case.seed) == (soon, TUNING_SEEDS[0])
    assert {case.trial for case in time_to_target.missing(trials, by_last)} == {sure}


def test_the_table_shows_the_base_recipe_until_the_best_one_was_run_on_fresh_seeds() -> None:
    name = "Spotlight"
    tuned = [row(name, trial, seed, second_s=3.0 if trial else 5.0) for trial in TRIED for seed in TUNING_SEEDS]
    fresh = [row(each, 0, seed) for each in (name, OURS) for seed in (0, 1)]
    tuned_too = [row(name, TRIED[1], seed) for seed in (0, 1)]

    before, half = (
        tables.table(rows, **CELL, arguments=shown()) for rows in ([*tuned, *fresh], [*tuned, *fresh, tuned_too[0]])
    )
    after = tables.table([*tuned, *fresh, *tuned_too], **CELL, arguments=shown())

    recipe = cases.told(TRIED[1])
    assert ("| Spotlight | untuned |" in before, recipe in before) == (True, False)
    assert half == before
    assert ("| Spotlight | untuned |" in after, f"| Spotlight | {recipe} |" in after) == (False, True)


def test_a_strategy_is_in_the_tables_once_all_fresh_seeds_were_run() -> None:
    runs = [row("reserved only (4)", 0, seed) for seed in (0, 1)]

    some = tables.page([*runs, row(OURS, 0, 0)], shown(trials=1))
    both = tables.page([*runs, row(OURS, 0, 0), row(OURS, 0, 1)], shown(trials=1))

    assert (OURS in some, OURS in both) == (False, True)


def test_only_runs_that_explore_nothing_and_train_alike_are_shared() -> None:
    four, twelve, streaming, ours = (
        Case(**CELL, strategy=name, trial=0, seed=1)
        for name in ("reserved only (4)", "all reserved (12)", "reserved + spot, no exploration", "Spotlight")
    )
    learnt: Row = row("reserved only (4)", 0, 1)

    assert all(case.learns_as(learnt) for case in (four, twelve, streaming))
    assert not ours.learns_as(learnt)
    assert not four.learns_as(row("Spotlight", 0, 1))
    assert not four.learns_as(row("reserved only (4)", 0, 2))
    assert Case(**CELL, strategy="all reserved (48)", trial=0, seed=1).learns_as(learnt)  # though its work is cut finer
    assert not replace(twelve, trial=7).learns_as(learnt)
    assert not Case(**CELL, strategy="half trained, reserved only (4)", trial=0, seed=1).learns_as(learnt)
    blocking = Case(**CELL, strategy="reserved only (4), blocking exploration", trial=0, seed=1)
    assert replace(blocking, size="1280").learns_as(row(blocking.strategy, 0, 1))  # no clock decides what it explores
    assert not blocking.learns_as(learnt)
    assert not replace(ours, size="1280").learns_as(row(OURS, 0, 1))  # how much it explores differs
    few = Case(**CELL, strategy="chosen of eight in six steps (1 + 11)", trial=0, seed=1)
    assert few.learns_as(row("chosen of eight in six steps (1 + 47)", 0, 1))
    assert not few.learns_as(row("half trained (1 + 11)", 0, 1))  # in sixteen
    assert not twelve.learns_as({**learnt, "settings": "what four had once"})


def test_a_run_is_made_again_when_its_strategy_has_other_settings() -> None:
    (case,) = time_to_target.missing([], asked(strategies=["Spotlight"], trials=1, seeds=[3]))
    made = {name: value for name, value in row("Spotlight", 0, 3).items() if name != "settings"}

    again = [
        time_to_target.missing([line], asked(strategies=["Spotlight"], trials=1, seeds=[3]))
        for line in (made, {**made, "settings": case.digest}, {**made, "settings": "0" * 12})
    ]

    assert again == [[], [], [case]]


def test_what_a_run_under_way_learns_is_not_begun_a_second_time() -> None:
    names = ["reserved only (4)", "all reserved (12)"]
    wanted = time_to_target.missing([], asked(strategies=names, sizes=["512", "1280"], trials=1, seeds=[0, 1]))
    first, second = (case for case in wanted if (case.strategy, case.size) == (names[0], "512"))

    assert time_to_target.to_begin(wanted, []) == first
    assert time_to_target.to_begin(wanted, [first]) == second
    assert time_to_target.to_begin(wanted, [first, second]) is None


def test_the_estimate_counts_what_is_missing_and_learns() -> None:
    names = ["reserved only (4)", "all reserved (12)", "Spotlight"]
    made = [{**row("reserved only (4)", 0, seed), "cpu_s": 360.0} for seed in range(7)]

    lines = time_to_target.estimate(made, asked(strategies=names, trials=1)).splitlines()

    assert lines == [
        "reserved only (4): 1 runs, of which 1 learn: 0.1 h",
        "all reserved (12): 8 runs, of which 0 learn: 0.0 h",
        "Spotlight: 8 runs, of which 8 learn: 0.8 h",
        "all: 0.9 h of one core",
    ]
    tuned = time_to_target.estimate(made, asked(strategies=["Spotlight"]))
    assert f"{len(TRIED) * len(TUNING_SEEDS) + 8} runs" in tuned


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({0: 10.0, 1: 20.0, 2: 30.0}, (1.0, 1.0, 1.0)),
        ({0: 20.0, 1: 40.0, 2: 60.0, 9: 1.0}, (2.0, 2.0, 2.0)),  # nobody ran seed 9 of ours
        ({0: inf, 1: inf, 2: inf}, (inf, inf, inf)),
    ],
)
def test_ratios_are_of_seeds_that_both_ran(theirs: dict[int, float], expected: tuple[float, ...]) -> None:
    assert outcomes.interval(theirs, {0: 10.0, 1: 20.0, 2: 30.0}) == pytest.approx(expected)


def test_a_ratio_of_which_neither_side_got_there_has_no_number() -> None:
    lost, there = dict.fromkeys(range(4), inf), dict.fromkeys(range(4), 1.0)

    assert [outcomes.ratio(outcomes.interval(*both)) for both in ((lost, lost), (lost, there), (there, lost))] == [
        "not there"
    ] * 3


def test_an_interval_holds_what_other_seeds_might_have_shown() -> None:
    ours = dict.fromkeys(range(8), 10.0)
    theirs = {seed: 20.0 + 2 * seed for seed in range(8)}

    whole, low, high = outcomes.interval(theirs, ours)

    assert whole == pytest.approx(2.7)
    assert 2.0 < low < 2.4
    assert 3.0 < high < 3.4


def test_an_interval_is_that_of_all_draws_of_the_seeds() -> None:
    theirs, ours = {0: 7.0, 1: 9.0, 2: 20.0, 3: inf}, {0: 5.0, 1: 1.0, 2: inf, 3: 4.0}

    def of(draw: tuple[int, ...]) -> float:
        a, b = (float(np.median([side[seed] for seed in draw])) for side in (theirs, ours))
        return 1.0 if a == b == inf else a / b

    every = sorted(map(of, product(range(4), repeat=4)))
    expected = every[ceil(0.025 * len(every)) - 1], every[ceil(0.975 * len(every)) - 1]

    assert outcomes.interval(theirs, ours)[1:] == expected
    many = {seed: float(seed + 1) for seed in range(20)}
    assert outcomes.interval(many, many) == (1.0, 1.0, 1.0)


def test_a_target_is_reached_by_two_validations_in_a_row() -> None:
    once, twice = row("Spotlight", 0, 0, there=8), row("Spotlight", 0, 0, there=6)

    assert outcomes.reached(once, 0.9) == inf
    assert outcomes.reached(twice, 0.9) == 6
    assert outcomes.until(twice, 0.9, "usd") == 6.0


def test_the_table_has_a_line_for_each_strategy_that_was_run(tmp_path: Path) -> None:
    runs = [row(OURS, 0, seed) for seed in (*TUNING_SEEDS, 0, 1)]
    runs += [row("reserved only (4)", 0, seed, second_s=4.0) for seed in (*TUNING_SEEDS, 0, 1)]

    lines = tables.table(runs, **CELL, arguments=shown(trials=1)).splitlines()

    middle = [line for line in lines if "| 0.85 |" in line]
    assert [line.split(" | ")[0] for line in middle] == ["| reserved only (4)", f"| {OURS}"]
    assert "4.00 [4.00, 4.00]" in middle[0]


def test_at_a_glance_each_strategy_is_compared_with_reserved_gpus_alone() -> None:
    """Twice as soon and as cheap with one recipe; a strategy that was not run in a cell has a dash there."""
    runs = [row("reserved only (4)", 0, seed, second_s=4.0) for seed in (0, 1)]
    runs += [row(OURS, 0, seed, second_s=2.0) for seed in (0, 1)]
    elsewhere = [{**row("reserved only (4)", 0, seed), "size": "1280"} for seed in (0, 1)]

    lines = tables.page([*runs, *elsewhere], shown(trials=1, sizes=["512", "1280"])).splitlines()
    untuned = tables.page(runs, shown()).splitlines()

    assert lines.count("| reserved only (4) | 1 | 1 |") == 2
    assert lines.count(f"| {OURS} | 2.0 [2.0, 2.0] | – |") == 2
    assert untuned.count(f"| {OURS} | *2.0 [2.0, 2.0]* |") == 2


def test_runs_that_are_older_than_their_strategys_settings_are_marked() -> None:
    runs = [row("reserved only (4)", 0, seed, second_s=4.0) for seed in (0, 1)]
    runs += [row(OURS, 0, seed, second_s=2.0) for seed in (0, 1)]
    older = [*runs[:-1], {**runs[-1], "settings": "0" * 12}]

    now, before = (tables.page(rows, shown(trials=1)) for rows in (runs, older))

    assert tables.OLD not in now
    assert f"| {OURS} | 2.0 [2.0, 2.0] † |" in before
    assert before.count(tables.OLDER) == 1
    assert f"| {cases.told(0)} †" in before


def test_the_readmes_first_table_is_beside_what_has_goals_and_beside_the_same_gpus() -> None:
    seconds = dict.fromkeys((*readme.GOALS, *cases.WITHOUT.values(), *readme.LIGHT.values()), 2.0) | {SOONEST: 0.25}
    runs = [row(name, 0, seed, second_s=second_s) for name, second_s in seconds.items() for seed in (0, 1)]

    (table,) = readme.headlines(runs, shown(trials=1))

    equal, eight = "1.0 [1.0, 1.0]; 1.0 [1.0, 1.0]", "8.0 [8.0, 8.0]; 8.0 [8.0, 8.0]"
    assert table.splitlines()[2:] == [
        f"| 1 + 11, explored | {equal} | {equal} | {equal} |",
        f"| 1 + 47, explored | {eight} | {eight} | {eight} |",
        f"| 1 + 47, in six steps | {equal} | {equal} | {equal} |",
        f"| no GPU + 12, in six steps | {equal} | {equal} | {equal} |",
    ]


def test_a_strategy_without_a_recipe_of_its_own_is_not_in_the_readmes_first_table() -> None:
    names = {*readme.GOALS, *cases.WITHOUT.values(), *readme.LIGHT.values()}
    runs = [row(name, 0, seed) for name in names for seed in (0, 1)]

    assert readme.headlines(runs, shown()) == []


def test_the_readmes_second_table_has_a_column_for_each_cell_with_heavy_training() -> None:
    half = "half trained (4 + 8), only reserved GPUs train"
    seconds = {"reserved + spot, no exploration": 3.0, half: 2.0, cases.FOUR_EXPLORED: 1.5, cases.AS_DRAWN: 1.0}
    seconds |= {cases.CHOSEN_ON_RESERVED: 4.0, cases.CHOSEN_ON_MANY: 1.0}
    runs = [row(name, 0, seed, second_s=second_s) for name, second_s in seconds.items() for seed in (0, 1)]
    heavy = [{**each, "regime": cases.HEAVY} for each in runs]
    large = [{**each, "size": "1280"} for each in heavy if each["strategy"] != cases.CHOSEN_ON_MANY]

    (table,) = readme.headlines(
        [*runs, *heavy, *large], shown(trials=1, regimes=["2 levels", cases.HEAVY], sizes=["512", "1280"])
    )

    (untuned,) = readme.headlines(heavy, shown(regimes=[cases.HEAVY]))
    lines = table.splitlines()
    assert lines[0] == "| 6 levels | how many times | digits 512 px | digits 1280 px |"
    assert [line.split(" | ")[2:] for line in lines[2:]] == [
        ["–", "– |"],
        ["**4.0 [4.0, 4.0]**", "– |"],
        ["–", "– |"],
        ["–", "– |"],
        ["–", "– |"],
        ["**3.0 [3.0, 3.0]**", "**3.0 [3.0, 3.0]** |"],
        ["**1.5 [1.5, 1.5]**", "**1.5 [1.5, 1.5]** |"],
    ]
    assert "| 3.0 [3.0, 3.0] |" in untuned
    assert "**" not in untuned


def test_both_of_two_have_the_base_recipe_unless_both_were_tuned() -> None:
    theirs, mine = "reserved only (4)", "Spotlight"
    trials = [
        row(name, trial, seed, second_s=2.0 if trial else 4.0)
        for name in (theirs, mine)
        for trial in cases.tried(name, TRIALS)
        for seed in TUNING_SEEDS
    ]
    runs = [row(name, trial, seed) for name in (theirs, mine) for trial in cases.tried(name, TRIALS) for seed in (0, 1)]
    cell = ("digits", "2 levels", "512")

    def recipes(rows: list[dict[str, Any]]) -> tuple[int, int, bool]:
        found = outcomes.compared(rows, cell, theirs, mine, shown())
        return found.theirs[0]["trial"], found.mine[0]["trial"], found.is_tuned

    best = cases.tried(theirs, 2)[1], cases.tried(mine, 2)[1]
    assert recipes([*trials, *runs]) == (*best, True)
    assert recipes([*trials[:-1], *runs]) == (0, 0, False)
    without_base = [each for each in runs if (each["strategy"], each["trial"]) != (theirs, 0)]
    assert recipes([*trials[:-1], *without_base]) == (best[0], 0, False)


def test_chosen_samples_are_compared_with_all_that_trains_on_reserved_gpus_alone() -> None:
    half = "half trained (4 + 8), only reserved GPUs train"
    seconds = {"reserved + spot, no exploration": 3.0, half: 2.0, "Spotlight": 2.0, cases.FOUR_EXPLORED: 1.0}
    runs = [row(name, 0, seed, second_s=second_s) for name, second_s in seconds.items() for seed in (0, 1)]

    page = tables.page(runs, shown(trials=1))
    heavy = tables.page([{**each, "regime": cases.HEAVY} for each in runs], shown(trials=1, regimes=[cases.HEAVY]))

    assert f"| *{cases.FOUR_EXPLORED}*, beside | digits, 2 levels, 512 px |\n|---|---|\n" in page
    assert f"| *{cases.FOUR_EXPLORED}*, beside | digits, 6 levels, 512 px |\n|---|---|\n" in heavy
    assert f"| {half} | 2.0 [2.0, 2.0]" in heavy
    assert f"| {half} | 12 x 8 | 48 | – | 4, 4 | 2 | 1.5 [1.5, 1.5] | 1.5 [1.5, 1.5] | 2.0 [2.0, 2.0] |" in page


def test_a_whole_run_takes_longer_than_its_iterations_by_start_up_and_validations() -> None:
    arguments = asked(strategies=["reserved only (4)"], iterations=2, every=1)

    *_, line = time_to_target.whole(arguments, time_to_target.SMOKE)

    name, *numbers = line.strip("| ").split(" | ")
    iterations_min, whole_min, iterations_usd, whole_usd = map(float, numbers)
    assert name == "reserved only (4)"
    assert 0 < iterations_min < whole_min
    assert 0 < iterations_usd < whole_usd


def test_an_iteration_is_also_told_at_the_speed_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times slower at training, say; the cost model is as before afterwards."""
    name, usual = "no exploration, gradients on spot (1 + 47)", dict(GPUS)
    arguments, brief = (
        asked(strategies=[name], iterations=2),
        [each for each in time_to_target.SMOKE if "request" not in each],
    )
    slow = replace(time_to_target.SPEEDS["512"], denoising=1.0, training=0.1)
    monkeypatch.setitem(time_to_target.SPEEDS, "512", slow)

    *_, line = time_to_target.as_measured(arguments, brief)

    _, found, usual_s, measured_s, seeds, times = line.strip("| ").split(" | ")
    assert found == name
    assert float(measured_s) > 1.5 * float(usual_s) > 0
    assert int(seeds) in time_to_target.REQUESTS
    assert float(times) == pytest.approx(float(measured_s) / float(usual_s), rel=0.02)
    assert usual == GPUS


def test_what_is_told_of_the_raw_data_is_what_it_says() -> None:
    """``python -m benchmarks.time_to_target --table --readme README.md`` writes them again."""
    rows, arguments = time_to_target.read(time_to_target.parse([])), time_to_target.parse([])

    assert tables.tables(rows, arguments) == time_to_target.DATA.with_suffix(".md").read_text()
    assert tables.page(rows, arguments) == time_to_target.FIGURE.with_suffix(".md").read_text()
    text = (ROOT / "README.md").read_text()
    assert readme.put(text, readme.headlines(rows, arguments)) == text


def test_the_readmes_tables_are_put_below_their_marks() -> None:
    text = f"one\n\n{readme.MARK}\n| a |\n|---|\n| 1 |\n\ntwo | three\n\n{readme.MARK}\n| b |\n\n"

    again = readme.put(text, ["| c |\n|---|", "| d |"])

    assert again == f"one\n\n{readme.MARK}\n| c |\n|---|\n\ntwo | three\n\n{readme.MARK}\n| d |\n\n"
    with pytest.raises(ValueError, match="has 2 times"):
        readme.put(text, ["| c |"])


def test_a_strategy_whose_trials_are_not_all_there_is_shown_untuned() -> None:
    runs = [row(OURS, trial, seed) for trial in TRIED for seed in TUNING_SEEDS][:-1]
    runs += [row(OURS, trial, seed, second_s=2.0 - trial) for trial in (0, 1) for seed in SEEDS]

    before = tables.table(runs, **CELL, arguments=shown())
    after = tables.table([*runs, row(OURS, TRIED[-1], TUNING_SEEDS[-1], there=8)], **CELL, arguments=shown())

    assert "| untuned |" in before
    assert "untuned" not in after


def test_the_dearest_is_one_of_those_that_got_there() -> None:
    dear, lost = "reserved only (4)", "all reserved (12)"
    runs = [row(dear, 0, seed, second_s=400.0) for seed in (0, 1)]
    runs += [row(OURS, 0, seed, second_s=100.0) for seed in (0, 1)]
    runs += [row(lost, 0, seed, second_s=900.0, there=9) for seed in (0, 1)]

    lines = tables.page(runs, shown(trials=1)).rpartition("### At other prices")[2].splitlines()

    second = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:3] for line in lines if "| " in line}
    assert second[dear][1] == "1"
    assert second[lost] == ["–", "not there"]
    assert second[OURS][1] not in ("1", "–")


def test_a_cell_in_which_nobody_got_there_is_on_the_page() -> None:
    runs = [row(name, 0, seed, there=9) for name in ("reserved only (4)", OURS) for seed in (0, 1)]

    lines = tables.page(runs, shown(trials=1)).splitlines()

    assert f"| {OURS} | not there |" in lines
    assert f"| {OURS} | – | not there | – | not there | – | not there |" in lines
    assert not [line for line in lines if "nan" in line.split()]


def test_the_figure_joins_those_that_no_other_beats_in_both() -> None:
    minutes_and_dollars = {"soon": (1.0, 9.0), "cheap": (9.0, 1.0), "middle": (4.0, 4.0), "alike": (4.0, 5.0)}

    assert figure.unbeaten(minutes_and_dollars) == ["soon", "cheap", "middle", "alike"]
    assert figure.unbeaten(minutes_and_dollars | {"better": (3.9, 3.9)}) == ["soon", "cheap", "better"]


def test_dollars_at_other_prices_are_of_the_same_seconds() -> None:
    name = "no exploration, only updates on reserved (A100 + 12)"
    hours = [0.0, 1.0, 2.0]
    run = row(name, 0, 0, last=2) | {
        "seconds": [3600 * h for h in hours],
        "usd": [(3.43 + 9 * 2.66) * h for h in hours],
    }

    same, aws = (at_prices({0: run}, name, gpu)[0]["usd"] for gpu in ("h100", "h100-aws"))

    assert same == pytest.approx(run["usd"])
    assert aws == pytest.approx([(3.43 + 9 * 1.28) * h for h in hours])
