"""A run goes on with what it began with; what it lacks and cannot make again is missed by name."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graphs.loop import Loop, synchronous
from runs import NoWatch, outcome, settings_file
from spotlight import config
from spotlight.device import protocol
from spotlight.device.engine import InProcess
from spotlight.device.modelled import ModelledDevice
from spotlight.driver import summarise
from spotlight.files import read_files
from spotlight.inputs import check_same_model
from spotlight.records import SpotlightError, row_of
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import Scorer
from spotlight.run import Run
from spotlight.store import resuming
from spotlight.store.accounts import Accounts
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.rows import (
    DECISIONS,
    FOLDERS,
    HISTORY,
    MODEL,
    PROMPTS,
    SIMULATED,
    SPANS,
    STARTED,
    SUMMARY,
    VALIDATION,
    WORKERS,
    HistoryRow,
)
from spotlight.store.rundir import RunDir

LAST = 3
"""Iterations of `runs.SETTINGS`, of which every one is validated here."""


class Killed(BaseException):
    """The driver ends here."""


class Server(Scorer):
    """A reward server that may be out of reach."""

    is_down = False

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        if self.is_down:
            raise ConnectionRefusedError("nobody answers")
        return [float(image.mean()) / 255 for image in images_BHWC]


class DownFrom(NoWatch):
    """Has the reward server end when a phase begins."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def begin(self, phase: str, iteration: int) -> None:
        Server.is_down |= phase == self._phase


class KilledAt(NoWatch):
    """Ends the driver when an iteration, or something else, begins."""

    def __init__(self, iteration: int, phase: str = "iterate") -> None:
        self._moment = phase, iteration

    def begin(self, phase: str, iteration: int) -> None:
        if (phase, iteration) == self._moment:
            raise Killed


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_device", ModelledDevice())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose driver died before its last iteration, and one that nothing happened to."""
    directory = tmp_path_factory.mktemp("runs")
    prompts = directory / "prompts.txt"
    settings = config.load(settings_file(directory), ["run.validate_every=1", "run.iterations=3"])
    shutil.copy(settings.data.train_prompts, prompts)
    settings = config.load(
        settings_file(directory), ["run.validate_every=1", "run.iterations=3", f"data.train_prompts={prompts}"]
    )
    with protocol.using(ModelledDevice()):
        whole = create_run(settings, 0.0)
        Loop(whole, synchronous, NoWatch()).go()
        killed = create_run(settings, 1.0)
        with pytest.raises(Killed):
            Loop(killed, synchronous, KilledAt(LAST - 1)).go()
    prompts.write_text('a sign that reads "47"\n' * 80)  # nobody looks at it any more
    return killed.path, whole.path


@pytest.fixture
def killed(runs: tuple[Path, Path], tmp_path: Path) -> RunDir:
    """A copy of the first, under its name, which its requests carry."""
    return RunDir(shutil.copytree(runs[0], tmp_path / runs[0].name))


def go_on(run: RunDir) -> None:
    """As `spotlight resume` does it."""
    resuming.check(run)
    rows = len(resuming.rows_that_stay(run))
    run.rewrite(HISTORY, run.rows(HISTORY)[:rows])
    Loop(run, synchronous, NoWatch()).go()


def refusal(run: RunDir) -> str:
    with pytest.raises(SpotlightError) as refused:
        go_on(RunDir.open(run.path))
    said = str(refused.value)
    assert "\n" not in said
    return said


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_run_goes_on_with_the_prompts_that_it_began_with(runs: tuple[Path, Path], killed: RunDir) -> None:
    go_on(killed)

    assert outcome(killed.path) == outcome(runs[1])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("selections", f"selections/0000{LAST - 1}.json: is missing"),
        ("beliefs", f"beliefs/0000{LAST - 1}.json: is missing"),
        (PROMPTS, f"{PROMPTS}: is missing"),
        ("prompts/train.txt", "prompts/train.txt: cannot be read as a prompt file: No such file"),
    ],
)
def test_what_cannot_be_made_again_is_missed_by_name(killed: RunDir, name: str, says: str) -> None:
    remove(killed.path / name)

    said = refusal(killed)

    assert f"{killed.path / says}" in said
    assert "restore it" in said


@pytest.mark.parametrize("name", ["selections", "beliefs"])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text('{"iter')])
def test_what_exploration_left_is_made_again_as_the_refusal_says(
    runs: tuple[Path, Path], killed: RunDir, name: str, damage: Callable[[Path], object]
) -> None:
    path = killed.path / name / f"0000{LAST - 1}.json"
    damage(path)

    assert f"delete weights/v0000{LAST - 1}" in refusal(killed)
    path.unlink(missing_ok=True)
    shutil.rmtree(killed.path / "weights" / f"v0000{LAST - 1}")
    go_on(killed)

    assert outcome(killed.path) == outcome(runs[1])


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
def test_versions_are_validated_again_where_their_row_is_lost(
    runs: tuple[Path, Path], killed: RunDir, lost: tuple[int, ...]
) -> None:
    killed.rewrite(VALIDATION, [row for row in killed.rows(VALIDATION) if row["version"] not in lost])

    go_on(killed)

    scores = [(row.version, row.score) for row in killed.validation()]
    assert scores == [(row.version, row.score) for row in RunDir(runs[1]).validation()]


def test_a_lost_validation_whose_weights_are_gone_is_missed_by_name(killed: RunDir) -> None:
    killed.rewrite(VALIDATION, [row for row in killed.rows(VALIDATION) if row["version"] != 1])
    shutil.rmtree(killed.path / "weights" / "v00001")

    assert f"{killed.path / VALIDATION}: has no row of version 1" in refusal(killed)


def test_other_prompts_are_refused(killed: RunDir) -> None:
    with (killed.path / "prompts" / "validation.txt").open("a") as file:
        file.write('a sign that reads "00"\n')

    said = refusal(killed)

    assert f"{killed.path}/prompts/validation.txt: expected the prompts that the run began with" in said


def test_a_checkpoint_that_was_replaced_is_refused(killed: RunDir, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(bytes(10_000))
    settings = config.load(settings_file(tmp_path), [f"model.path={weights}"])
    check_same_model(killed, settings)
    check_same_model(killed, settings)

    weights.write_bytes(bytes(9_999) + b"1")

    resolved = killed.objects.get(config.RESOLVED) or b""
    killed.objects.put(config.RESOLVED, config.changed(resolved, [f"model.path={weights}"]))
    with pytest.raises(SpotlightError, match=f"{weights}: holds other weights than those that {killed.url} began with"):
        Run.resume(killed.path).start()
    (killed.path / MODEL).unlink()
    check_same_model(killed, settings)


def test_prompts_keep_the_form_that_they_came_in(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "a sign that reads \\"47\\"", "n": 1}\n')
    (tmp_path / "saved").mkdir()
    for name in (b"data-00000-of-00001.arrow", b"state.json", b"not UTF-8: \xff"):
        (tmp_path / "saved" / os.fsdecode(name)).write_bytes(name)
    data = [f"data.train_prompts={tmp_path / 'few.jsonl'}", f"data.validation_prompts={tmp_path / 'saved'}"]

    run = create_run(config.load(settings_file(tmp_path), data), 0.0)

    kept = run.config().data
    assert read_prompts(kept.train_prompts) == read_prompts(tmp_path / "few.jsonl")
    assert kept.validation_prompts == str(run.path / "prompts" / "validation")
    assert read_files(kept.validation_prompts, "prompts") == read_files(tmp_path / "saved", "prompts")
    resuming.check(run)
    (Path(kept.validation_prompts) / "state.json").write_text("another")
    assert f"{kept.validation_prompts}: expected the prompts that the run began with" in refusal(run)


def test_a_line_lost_from_the_middle_of_the_history_is_named(runs: tuple[Path, Path], killed: RunDir) -> None:
    lines = (killed.path / HISTORY).read_text().splitlines(keepends=True)
    (killed.path / HISTORY).write_text("".join(lines[1:]))

    assert f"{killed.path / HISTORY}:1: iteration: expected 0, found 1" in refusal(killed)
    (killed.path / HISTORY).write_text("")
    go_on(killed)

    assert outcome(killed.path) == outcome(runs[1])


def test_weights_that_are_others_than_the_history_says_are_named(killed: RunDir) -> None:
    rows = killed.rows(HISTORY)
    killed.rewrite(HISTORY, [*rows[:-1], rows[-1] | {"weights_sha256": "ab"}])

    assert f"weights/v0000{LAST - 1}: expected weights with sha256 ab, as {HISTORY}:{LAST - 1} says" in refusal(killed)


def test_iterations_whose_weights_were_deleted_are_done_again(killed: RunDir) -> None:
    assert len(resuming.rows_that_stay(killed)) == 2
    for version in (2, 1):
        remove(killed.path / "weights" / f"v0000{version}")
        assert len(resuming.rows_that_stay(killed)) == version - 1


def test_the_first_weights_are_made_again_and_validated(runs: tuple[Path, Path], killed: RunDir) -> None:
    killed.rewrite(VALIDATION, [row for row in killed.rows(VALIDATION) if row["version"]])
    remove(killed.path / "weights" / "v00000")

    go_on(killed)

    scores = [(row.version, row.score) for row in killed.validation()]
    assert scores == [(row.version, row.score) for row in RunDir(runs[1]).validation()]


def test_rows_of_older_versions_do_not_say_whether_seeds_were_explored(killed: RunDir, tmp_path: Path) -> None:
    """A run that was killed explored, and one that came to its end did not."""
    ended = finished(tmp_path)
    for run in (killed, ended):
        run.rewrite(HISTORY, [{**row, "explored_next": None} for row in run.rows(HISTORY)])
        shutil.rmtree(run.path / "selections")
    ended.change_end(iterations=4)

    resuming.check(ended)
    assert f"selections/0000{LAST - 1}.json: is missing" in refusal(killed)


def test_a_run_of_an_older_version_that_never_explored_needs_no_selection(tmp_path: Path) -> None:
    run = finished(tmp_path, "strategy.exploration=off")
    run.rewrite(HISTORY, [{**row, "explored_next": None} for row in run.rows(HISTORY)])
    (run.path / SUMMARY).unlink()
    run.change_end(iterations=4)

    resuming.check(run)


def test_the_first_weights_are_not_missed_where_older_ones_are_needed(tmp_path: Path) -> None:
    """They are made again."""
    ahead = ("strategy.exploration=off", "rollout.prompts_ahead=2", "rollout.request_seeds=4")
    run = finished(tmp_path, *ahead, iterations=1)
    remove(run.path / "weights/v00000")
    run.change_end(iterations=3)

    go_on(run)

    assert len(run.history()) == 3


@pytest.mark.parametrize("name", ["selections", "beliefs"])
def test_what_exploration_left_is_read_before_anything_starts(killed: RunDir, name: str) -> None:
    (killed.path / name / f"0000{LAST - 1}.json").write_text("{")

    with pytest.raises(SpotlightError, match=rf"{name}/0000{LAST - 1}\.json: .*restore it, or delete it"):
        resuming.check(killed)


def test_a_simulated_run_is_not_gone_on_with(killed: RunDir) -> None:
    killed.write_json(SIMULATED, {"learning": "modelled"})

    assert "simulate its settings again" in refusal(killed)
    seen = Run.attach(killed.path)  # though it may be looked at
    with pytest.raises(SpotlightError, match="simulate its settings again"):
        seen.start()


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("[train]", "has no train.algorithm, train.learning_rate, "),
        ("gain =", "has no simulation.gain, simulation.launch_s, "),
        ("[simulation.strategies]", "has no simulation.strategies, though"),
    ],
)
def test_settings_that_were_cut_short_are_not_filled_up_with_defaults(killed: RunDir, last: str, says: str) -> None:
    path = killed.path / config.RESOLVED
    path.write_text(path.read_text().split(last)[0])

    assert f"{path}: {says}" in refusal(killed)


def test_iterations_that_were_explored_for_nothing_are_counted(tmp_path: Path) -> None:
    """In rows of older versions nothing says how many seeds were scored."""
    explored, not_explored = (
        create_run(config.load(settings_file(tmp_path), [f"strategy.exploration={how}"]), 0.0)
        for how in ("stale", "off")
    )
    for run in (explored, not_explored):
        for iteration, metrics in enumerate([{"seeds_scored": 0}, {"seeds_scored": 3}, {}]):
            row = HistoryRow(iteration=iteration, weights_version=0, weights_sha256="", metrics=metrics, measured={})
            run.append(HISTORY, row_of(row))

    assert (explored.unscored(), not_explored.unscored()) == (1, 0)


def test_validations_are_in_the_order_of_versions(killed: RunDir) -> None:
    rows = killed.rows(VALIDATION)
    killed.rewrite(VALIDATION, reversed(rows))

    assert [row.version for row in killed.validation()] == [row["version"] for row in rows]


def test_the_command_that_resumes_a_run_can_be_given_to_a_shell(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "a b").resume_command == f"spotlight resume '{tmp_path}/a b'"


def test_a_run_goes_on_with_a_version_that_has_more_settings(killed: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    path = killed.path / config.RESOLVED
    *lines, last = path.read_text().replace("filter_groups = false\n", "").splitlines(keepends=True)
    older, mark = "".join(lines), last.rpartition(" ")[0]
    path.write_text(f"{older}{mark} {sha256(older.encode()).hexdigest()}\n")

    resuming.check(killed)

    assert "began this run, without train.filter_groups: these have their defaults" in caplog.text
    killed.change_end(iterations=7)
    resuming.check(killed)
    path.write_text(path.read_text().replace("steps = ", "steps =  "))
    assert f"{path}: has no train.filter_groups, though" in refusal(killed)


def test_a_run_goes_on_though_its_version_had_a_setting_that_is_gone(killed: RunDir) -> None:
    path = killed.path / config.RESOLVED
    path.write_text(path.read_text().replace("[simulation]\n", "[simulation]\ntarget = 0.0\n"))
    older, mark, _ = path.read_text().rpartition(config.files.WHOLE)
    path.write_text(f"{older}{mark}{sha256(older.encode()).hexdigest()}\n")

    resuming.check(killed)
    killed.change_end(iterations=7)

    assert killed.config().run.iterations == 7
    with pytest.raises(SpotlightError, match=r"'target' \(did you mean run.target\?\)"):
        config.load(path)


# Longer


def finished(tmp_path: Path, *overrides: str, iterations: int = 2) -> RunDir:
    """A run of so many iterations that has come to its end."""
    wanted = ["run.validate_every=1", f"run.iterations={iterations}", *overrides]
    run = create_run(config.load(settings_file(tmp_path), wanted), float(iterations))
    Loop(run, synchronous, NoWatch()).go()
    summarise(run, Accounts(run, run.config()), now_s=1.0, began_s=0.0)
    return run


def test_a_run_that_is_made_longer_is_as_one_that_was_longer_from_the_start(tmp_path: Path) -> None:
    run, longer = (finished(tmp_path, "strategy.exploration=off", iterations=count) for count in (2, 4))

    run.change_end(iterations=4)
    assert not resuming.is_over(run, run.config())
    go_on(run)

    assert outcome(run.path) == outcome(longer.path)


def test_a_longer_run_explores_before_the_iteration_that_none_explored_for(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert run.selection(2) is None

    run.change_end(iterations=4)
    copy = RunDir(shutil.copytree(run.path, tmp_path / "copy" / run.name))
    resuming.check(run)
    with pytest.raises(Killed):
        Loop(run, synchronous, KilledAt(3)).go()
    go_on(run)
    go_on(copy)

    assert len(run.history()) == 4
    assert run.selection(2)
    assert outcome(run.path) == outcome(copy.path)


def test_a_run_that_was_killed_at_its_end_is_made_longer_and_may_be_killed_again(tmp_path: Path) -> None:
    """Nobody had explored behind that end, and it had not been summed up."""
    settings = config.load(settings_file(tmp_path), ["run.validate_every=1", "run.iterations=2"])
    run = create_run(settings, 2.0)
    with pytest.raises(Killed):
        Loop(run, synchronous, KilledAt(2, "validate")).go()

    longer = Run.resume(run.path, iterations=4).directory
    with pytest.raises(Killed):
        Loop(longer, synchronous, KilledAt(2, "explore")).go()
    go_on(RunDir.open(run.path))

    assert len(run.history()) == 4


class Paid(NoWatch):
    """Two dollars an iteration."""

    def __init__(self) -> None:
        self._usd = 0.0

    def begin(self, phase: str, iteration: int) -> None:
        self._usd += 2.0 * (phase == "iterate")

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        return {"usd": 2.0}

    def usd(self) -> float:
        return self._usd


def test_a_run_that_a_target_ended_goes_on_as_if_it_had_had_none(tmp_path: Path) -> None:
    """What it explored for the iteration that did not follow is kept."""
    whole, run = finished(tmp_path, iterations=4), finished(tmp_path, "run.target=2", iterations=4)
    assert outcome(whole.path) == outcome(run.path)
    wanted = run.validation()[2].score

    early = finished(tmp_path, f"run.target={wanted}", iterations=4)

    done = len(early.history())
    assert done == next(row.version for row in run.validation() if row.score >= wanted)
    assert done < 4
    assert resuming.is_over(early, early.config())
    assert f"version {done} scored" in resuming.ended_early(early)
    early.change_end(target=2)
    assert not resuming.is_over(early, early.config())
    go_on(early)
    assert outcome(early.path) == outcome(whole.path)


def test_a_target_that_was_reached_before_all_training_ends_the_run(tmp_path: Path) -> None:
    run = finished(tmp_path, "run.target=0", iterations=4)

    assert not run.history()
    assert [row.version for row in run.validation()] == [0]
    assert resuming.is_over(run, run.config())


def test_no_iteration_begins_that_would_go_beyond_the_limit_of_dollars(tmp_path: Path) -> None:
    wanted = ["run.validate_every=3", "run.iterations=9", "run.usd_max=5"]
    run = create_run(config.load(settings_file(tmp_path), wanted), 0.0)
    Loop(run, synchronous, Paid()).go()
    summarise(run, Accounts(run, run.config()), now_s=1.0, began_s=0.0)
    summary = run.summary()
    assert summary
    run.write_summary(replace(summary, usd=4.0))  # nobody kept accounts

    assert len(run.history()) == 2
    assert [row.version for row in run.validation()] == [0, 2]
    assert resuming.is_over(run, run.config())
    assert resuming.ended_early(run) == "it cost $4.00, the last iteration $2.00, and run.usd_max is 5"
    run.change_end(usd_max=6.0)
    assert not resuming.is_over(run, run.config())


def test_what_was_explored_for_a_longer_run_is_missed(tmp_path: Path) -> None:
    run = finished(tmp_path)
    run.change_end(iterations=4)
    with pytest.raises(Killed):
        Loop(run, synchronous, KilledAt(3)).go()

    (run.path / "selections/00003.json").unlink()

    assert "selections/00003.json: is missing" in refusal(run)


@pytest.mark.parametrize(
    ("missing", "overrides"),
    [
        ("beliefs/00002.json", ()),
        ("weights/v00001", ("strategy.exploration=off", "rollout.prompts_ahead=2", "rollout.request_seeds=4")),
    ],
)
def test_what_only_a_longer_run_needs_is_missed_before_it_is_made_longer(
    tmp_path: Path, missing: str, overrides: tuple[str, ...]
) -> None:
    run = finished(tmp_path, *overrides)
    remove(run.path / missing)

    with pytest.raises(SpotlightError, match=missing):
        Run.resume(run.path, iterations=4)
    assert run.config().run.iterations == 2
    Run.resume(run.path)  # of the run as long as it is, nothing is missing


def test_a_run_that_became_longer_is_checked_again_before_it_starts(tmp_path: Path) -> None:
    run = finished(tmp_path)
    held = Run.resume(run.path)
    remove(run.path / "beliefs/00002.json")

    run.change_end(iterations=4)

    with pytest.raises(SpotlightError, match=r"beliefs/00002\.json: is missing"):
        held.start()


def test_weights_that_are_gone_are_not_replaced_by_the_first_ones(tmp_path: Path) -> None:
    run = finished(tmp_path, "strategy.exploration=off", "rollout.prompts_ahead=2", "rollout.request_seeds=4")
    run.change_end(iterations=3)
    remove(run.path / "weights/v00001")

    with pytest.raises(SpotlightError, match="weights/v00001: are missing"):
        Loop(run, synchronous, NoWatch()).go()


def test_a_summary_is_of_the_run_as_it_stands(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert resuming.is_over(run, run.config())

    run.change_end(iterations=3)
    assert run.summary()
    go_on(run)

    assert run.summary() is None
    assert not resuming.is_over(run, run.config())  # the driver sums it up


def test_a_run_is_over_when_all_is_done_validated_and_summed_up(tmp_path: Path) -> None:
    """A simulated one may end sooner."""
    run = finished(tmp_path)
    rows, settings = run.rows(VALIDATION), run.config()
    longer = settings.model_copy(update={"run": settings.run.model_copy(update={"iterations": 3})})
    assert resuming.is_over(run, settings)

    for lost in (1, 2):
        run.rewrite(VALIDATION, [row for row in rows if row["version"] != lost])
        assert not resuming.is_over(run, settings)
    run.rewrite(VALIDATION, [*rows, rows[-1] | {"version": 3}])
    assert not resuming.is_over(run, longer)
    run.write_json(SIMULATED, {"learning": "modelled"})
    assert resuming.is_over(run, longer)
    (run.path / SUMMARY).unlink()
    assert not resuming.is_over(run, longer)


def test_a_run_has_begun_when_its_first_weights_are_there(killed: RunDir, tmp_path: Path) -> None:
    made = create_run(config.load(settings_file(tmp_path)), 0.0)

    assert [resuming.has_begun(place) for place in (killed.url, made.path, tmp_path / "none")] == [True, False, False]


def test_only_versions_that_were_due_are_validated_later(killed: RunDir, tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), ["run.validate_every=2"])

    assert list(resuming.unvalidated(killed, settings, 6)) == [4]
    killed.rewrite(VALIDATION, [])
    assert list(resuming.unvalidated(killed, settings, 6)) == [0, 2, 4]


@pytest.mark.parametrize(
    ("iterations", "says"),
    [
        (1, "2 iterations are done, so it cannot end after 1"),
        (2_000_000, "run.iterations"),
        (8.0, "iterations = 8.0: give a whole number"),
    ],
)
def test_a_run_cannot_end_where_it_is_past_or_be_endless(tmp_path: Path, iterations: Any, says: str) -> None:
    run = finished(tmp_path)
    before = run.config()

    with pytest.raises(SpotlightError, match=says):
        Run.resume(run.path, iterations=iterations)

    assert run.config() == before


def test_a_run_that_somebody_runs_is_not_made_longer(killed: RunDir) -> None:
    with killed.lock(), pytest.raises(SpotlightError, match="is running this run"):
        RunDir.open(killed.path).change_end(iterations=60)


# Nothing leads out


@pytest.mark.parametrize("name", ["lock", "decisions.jsonl", "images", "weights", "beliefs", "report.html"])
def test_no_link_leads_out_of_a_run_directory(killed: RunDir, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    path = killed.path / name
    if path.exists():
        remove(path)
    path.symlink_to(outside)

    assert f"{path}: is a link to {outside}, and nothing in a run directory is followed out of it" in refusal(killed)
    assert list(outside.iterdir()) == []


def test_links_that_wandb_makes_in_its_folder_are_left_alone(killed: RunDir, tmp_path: Path) -> None:
    logs = killed.path / "wandb" / "run-20261129_105320-r" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "core-debug.log")  # in W&B's cache, of version 0.31

    go_on(RunDir.open(killed.path))

    assert (logs / "debug-core.log").is_symlink()
    shutil.rmtree(killed.path / "wandb")
    (killed.path / "wandb").symlink_to(tmp_path)
    assert f"{killed.path / 'wandb'}: is a link to {tmp_path}" in refusal(killed)
    (killed.path / "wandb").unlink()
    (deeper := killed.path / "images" / "wandb").mkdir()
    (deeper / "out").symlink_to(tmp_path)
    assert f"{deeper / 'out'}: is a link to {tmp_path}" in refusal(killed)


def test_a_link_that_appears_later_is_not_followed_either(killed: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    for name in ("lock", SPANS):
        (killed.path / name).unlink(missing_ok=True)
        (killed.path / name).symlink_to(outside)

    with pytest.raises(OSError, match="symbolic links"), killed.lock():
        pass
    with pytest.raises(OSError, match="symbolic links"):
        killed.append(SPANS, {})
    assert not outside.exists()


def test_a_link_within_a_run_directory_is_fine(runs: tuple[Path, Path], killed: RunDir) -> None:
    (killed.path / "images" / "latest.npz").symlink_to("validation-00000.npz")

    go_on(RunDir.open(killed.path))

    assert outcome(killed.path) == outcome(runs[1])


@pytest.mark.parametrize("name", [HISTORY, "lock", "images/validation-00000.npz"])
@pytest.mark.parametrize("target", ["nothing", "itself"])
def test_a_link_to_nothing_is_named(killed: RunDir, name: str, target: str) -> None:
    path = killed.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(path.name if target == "itself" else "nothing")

    assert refusal(killed) == f"{path}: is a link to nothing: put there what it linked to, or delete it"


def test_a_named_pipe_in_a_run_directory_is_not_waited_for(killed: RunDir) -> None:
    (killed.path / HISTORY).unlink()
    os.mkfifo(killed.path / HISTORY)

    assert f"{killed.path / HISTORY}: is a named pipe" in refusal(killed)


def test_a_directory_in_place_of_a_file_is_no_empty_file(killed: RunDir) -> None:
    (killed.path / HISTORY).unlink()
    (killed.path / HISTORY).mkdir()

    assert f"{killed.path / HISTORY}: cannot be read: Is a directory" in refusal(killed)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_in_place_of_a_directory_is_named(killed: RunDir, name: str) -> None:
    path = killed.path / name
    if path.exists():
        remove(path)
    path.touch()

    assert refusal(killed) == f"{path}: expected a directory, found a file: move it away, or delete it"


def test_all_directories_of_a_run_are_known(runs: tuple[Path, Path]) -> None:
    assert {path.name for run in runs for path in run.iterdir() if path.is_dir()} <= set(FOLDERS)


def test_a_directory_in_the_place_of_a_file_that_is_to_be_written_is_named(killed: RunDir) -> None:
    place = killed.path / "images/validation-99999.npz"
    place.mkdir()

    with pytest.raises(SpotlightError, match=r"validation-99999\.npz: expected a file, found a directory: move it"):
        killed.objects.put("images/validation-99999.npz", b"")
    with pytest.raises(SpotlightError, match=r"validation-99999\.npz: expected a file, found a directory: move it"):
        killed.objects.create("images/validation-99999.npz", b"")
    (killed.path / DECISIONS).unlink(missing_ok=True)
    (killed.path / DECISIONS).mkdir()
    with pytest.raises(SpotlightError, match=rf"{DECISIONS}: expected a file, found a directory: move it"):
        killed.append(DECISIONS, {})


def test_a_directory_in_the_place_of_the_lock_is_named(killed: RunDir) -> None:
    path = killed.path / "lock"
    path.unlink(missing_ok=True)
    path.mkdir()

    with pytest.raises(SpotlightError, match=f"{path}: expected a file, found a directory: move it away"):
        killed.holder()
    with (
        pytest.raises(SpotlightError, match=f"{path}: expected a file, found a directory: move it away"),
        killed.lock(),
    ):
        pass


def test_a_file_in_the_place_of_a_directory_is_named(killed: RunDir) -> None:
    place = killed.path / "lease"
    place.write_bytes(b"")

    with (
        pytest.raises(SpotlightError, match=f"{place}: expected a directory, found a file: move it away"),
        killed.lock(),
    ):
        pass


def test_pictures_that_are_lost_are_missed_by_name(killed: RunDir) -> None:
    run = Run.attach(killed.path)

    with pytest.raises(
        SpotlightError, match=f"{killed.path}/latents: the scores of iteration 0 are missing or damaged"
    ):
        run.images(0)
    (killed.path / killed.selection_key(0)).unlink()
    with pytest.raises(SpotlightError, match=f"{killed.selection_key(0)}: is missing, and says which seeds were kept"):
        run.images(0)


def test_dollars_that_are_no_longer_counted_are_told(killed: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    for journal in (SPANS, WORKERS):
        (killed.path / journal).write_text("{}\n")
    resuming.check(killed)
    assert "no longer counted" not in caplog.text

    (killed.path / WORKERS).unlink()
    resuming.check(killed)
    assert f"{killed.path / WORKERS}: is missing or empty: what was spent before is no longer counted" in caplog.text
    (killed.path / SPANS).unlink()
    resuming.check(killed)
    assert f"{killed.path / SPANS}: is missing or empty" in caplog.text


def test_before_the_first_iteration_is_done_nothing_was_spent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resuming.check(create_run(config.load(settings_file(tmp_path)), 0.0))

    assert caplog.text == ""


@pytest.mark.parametrize(("shared", "mode"), [("false", 0o700), ("true", 0o755)])
def test_only_who_started_a_run_may_look_into_it_unless_it_is_shared(tmp_path: Path, shared: str, mode: int) -> None:
    before = os.umask(0o022)
    try:
        run = create_run(config.load(settings_file(tmp_path), [f"run.shared={shared}"]), 0.0)
    finally:
        os.umask(before)

    assert stat.S_IMODE(run.path.stat().st_mode) == mode
    assert stat.S_IMODE((run.path / "lock").stat().st_mode) == 0o644  # who may look into it sees whether it goes on


def test_the_hashes_of_prompts_are_of_the_copies(killed: RunDir) -> None:
    hashes = json.loads((killed.path / PROMPTS).read_text())

    assert set(hashes) == {"train_sha256", "validation_sha256"}
    assert killed.config().data.train_prompts == str(killed.path / "prompts" / "train.txt")


@pytest.mark.parametrize(("phase", "says"), [("validate", "put that right"), ("iterate", "mend the scorer")])
def test_what_a_reward_server_failed_to_score_is_scored_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, says: str
) -> None:
    monkeypatch.setattr(protocol, "_device", InProcess(paced=False))
    monkeypatch.setattr(Server, "is_down", False)
    settings = [f"reward.name={__name__}:Server", "reward.attempts=1", "run.iterations=1", "strategy.exploration=off"]
    run = create_run(config.load(settings_file(tmp_path), settings), 0.0)
    with pytest.raises(SpotlightError, match=f"nobody answers.*; {says}"):
        Loop(run, synchronous, DownFrom(phase)).go()
    Server.is_down = False

    go_on(run)

    assert len(run.history()) == 1


def test_gradients_that_are_not_finite_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_device", InProcess(paced=False))
    run = create_run(config.load(settings_file(tmp_path), ["run.iterations=1", "strategy.exploration=off"]), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: torch.tensor(torch.nan))
        with pytest.raises(SpotlightError, match="the gradient's norm is nan"):
            Loop(run, synchronous, NoWatch()).go()
    assert not list((run.path / "updates").rglob("*.json"))

    go_on(run)

    assert len(run.history()) == 1


def test_a_run_that_goes_on_elsewhere_is_not_started(killed: RunDir) -> None:
    looking = Run.attach(killed.path)

    with killed.lock(), pytest.raises(SpotlightError, match="is running this run: wait for it, or stop it first"):
        looking.start()

    assert looking.state == "stopped"


def test_latents_at_one_place_are_of_one_run_whatever_its_name(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), [f"latents.url={tmp_path}/latents"])
    mine, yours = (create_run_at(tmp_path / name / "a", settings) for name in ("mine", "yours"))

    assert mine.latents_url != yours.latents_url
    assert RunDir.open(mine.path).latents_url == mine.latents_url
    before = mine.latents_url
    shutil.rmtree(mine.path)
    assert create_run_at(mine.path, settings).latents_url != before
    (yours.path / STARTED).unlink()  # as runs were before they had one
    assert yours.latents_url == f"{tmp_path}/latents/a"
