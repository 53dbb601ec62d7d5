"""Trackers: what they are told of a run, that a resumed run tells nothing twice, and that none of them can end a run.

None of them is a dependency. Where one is not installed, a module that records its calls stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runs import settings_file
from spotlight.config import Config, load
from spotlight.records import SpotlightError
from spotlight.report.tracking import MLflow, Tracking, check
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.rows import HISTORY, VALIDATION, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir

Call = tuple[Any, ...]


def history_row(k: int) -> dict[str, Any]:
    measured = {"stopped_s": 100.0 + k, "busy_s.spot-0": 1.0, "usd": 0.5}
    return asdict(
        HistoryRow(
            iteration=k, weights_version=k + 1, weights_sha256="", metrics={"reward_mean": 0.1 * k}, measured=measured
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """One validation and two iterations."""
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    row = ValidationRow(version=0, score=0.25, rewards=(0.25,), images="", at_s=99.0, metrics={"tag_counting": 0.5})
    run.append(VALIDATION, asdict(row))
    run.append(HISTORY, history_row(0), history_row(1))
    return run


def with_trackers(run: RunDir, *names: str) -> Config:
    config = run.config()
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"to": names, "project": "p"})})


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Have a module be there that is not installed; its parents too."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:number]))
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, loader=None)
        module.__path__ = []
        if number == len(parts):
            vars(module).update(content)
        if module.__name__ not in sys.modules or number == len(parts):
            monkeypatch.setitem(sys.modules, module.__name__, module)


def recorded_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls to a W&B that resumes after a run's last step, and drops what is logged below the present one."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    calls: list[Call] = []
    last: dict[str, int] = {}

    def init(**given: Any) -> Any:
        of = given["id"]
        calls.append(("init", given["project"], of, given["resume"]))

        def log(values: dict[str, float], step: int) -> None:
            known = step < max(starts, last.get(of, 0))
            last[of] = max(step, last.get(of, 0))
            calls.append(("dropped" if known else "log", step, values))

        starts = last.get(of, -1) + 1
        return SimpleNamespace(
            starting_step=starts,
            define_metric=lambda name, step_metric: calls.append(("define", name, step_metric)),
            log=log,
            finish=lambda exit_code: calls.append(("finish", exit_code)),
        )

    stand_in(monkeypatch, "wandb", init=init)
    return calls


def test_every_tracker_is_told_metrics_by_step_and_no_worker_by_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded_wandb(monkeypatch)

    tracking = Tracking(run, with_trackers(run, "wandb"))
    tracking.follow()
    tracking.follow()
    run.append(HISTORY, history_row(2))
    tracking.close("finished")

    assert calls == [
        ("init", "p", run.path.name, "allow"),
        ("define", "*", "iteration"),
        ("log", 0, {"iteration": 0, "validation_score": 0.25, "validation_tag_counting": 0.5}),
        ("log", 1, {"iteration": 0, "reward_mean": 0.0, "usd": 0.5}),
        ("log", 3, {"iteration": 1, "reward_mean": 0.1, "usd": 0.5}),
        ("log", 5, {"iteration": 2, "reward_mean": 0.2, "usd": 0.5}),
        ("finish", 0),
    ]


def test_a_stopped_run_has_not_failed_for_wandb_which_gets_the_iteration_that_it_was_stopped_in(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, config = recorded_wandb(monkeypatch), with_trackers(run, "wandb")
    run.append(VALIDATION, asdict(ValidationRow(version=2, score=0.5, rewards=(0.5,), images="", at_s=102.0)))

    Tracking(run, config).close("stopped")
    run.append(HISTORY, history_row(2))
    Tracking(run, config).close("finished")

    logged = [values for what, _, values in (call for call in calls if len(call) == 3) if what == "log"]
    assert [call for call in calls if call[0] == "finish"] == [("finish", 0), ("finish", 0)]
    assert [values["iteration"] for values in logged] == [0, 0, 1, 2, 2]
    assert "reward_mean" in logged[-1]
    assert not [call for call in calls if call[0] == "dropped"]


def test_a_new_run_of_an_old_name_is_another_one_for_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_wandb(monkeypatch)
    settings = load(settings_file(tmp_path), ['tracking.to=["wandb"]'])

    for _ in range(2):
        run = create_run_at(tmp_path / "runs" / "a", settings)
        run.append(HISTORY, history_row(0))
        Tracking(run, settings).close("finished")
        Tracking(run, settings).close("finished")
        shutil.rmtree(run.path)

    ids = [of for what, _, of, *_ in (call for call in calls if len(call) == 4)]
    assert [ids[0] == ids[1], ids[2] == ids[3], ids[1] == ids[2]] == [True, True, False]
    assert all(re.fullmatch(r"a-[0-9a-f]{12}", of) for of in ids)


def test_mlflow_finds_a_resumed_run_again_and_gets_the_same_points(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, str] = {}
    points: list[Call] = []
    statuses: list[str] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str) -> str:
            return f"experiment {name}"

        def search_runs(self, numbers: list[str], filter_string: str) -> list[Any]:
            return [SimpleNamespace(info=SimpleNamespace(run_id=kept[name])) for name in kept if name in filter_string]

        def create_run(self, number: str, run_name: str, tags: dict[str, str]) -> Any:
            kept[tags["spotlight.run"]] = f"{number}/{len(kept)}"
            return SimpleNamespace(info=SimpleNamespace(run_id=kept[tags["spotlight.run"]]))

        def log_batch(self, run_id: str, metrics: list[Call]) -> None:
            assert len(metrics) <= MLflow.BATCH
            points.extend((run_id, *metric) for metric in metrics)  # a store of files keeps what it has once more

        def get_metric_history(self, run_id: str, key: str) -> list[Any]:
            return [SimpleNamespace(step=point[4]) for point in points if point[:2] == (run_id, key)]

        def update_run(self, run_id: str, status: str) -> None:
            statuses.append(status)

        def set_terminated(self, run_id: str, status: str) -> None:
            statuses.append(status)

    stand_in(monkeypatch, "mlflow.entities", Metric=lambda *given: given)
    stand_in(monkeypatch, "mlflow", MlflowClient=Client)

    monkeypatch.setattr(MLflow, "BATCH", 4)  # of six points

    run.path.rename(odd := run.path.with_name("jo's: é2"))
    run = RunDir.open(odd)
    Tracking(run, with_trackers(run, "mlflow")).close("stopped")
    run.append(HISTORY, history_row(2))
    Tracking(run, with_trackers(run, "mlflow")).close("finished")

    assert list(kept) == ["jo-s---2"]
    assert statuses == ["KILLED", "RUNNING", "FINISHED"]
    assert ("experiment p/0", "reward_mean", 0.1, 101_000, 1) in points
    assert ("experiment p/0", "reward_mean", 0.2, 102_000, 2) in points
    assert len(points) == len(set(points)) == 8


def test_two_runs_that_make_an_experiment_of_mlflow_at_once_are_both_in_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    joined: list[str] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id=made[0]) if made else None

        def create_experiment(self, name: str) -> str:
            made.append("the other's")
            raise RuntimeError("RESOURCE_ALREADY_EXISTS")

        def search_runs(self, numbers: list[str], filter_string: str) -> list[Any]:
            return []

        def create_run(self, number: str, run_name: str, tags: dict[str, str]) -> Any:
            joined.append(number)
            return SimpleNamespace(info=SimpleNamespace(run_id="0"))

    stand_in(monkeypatch, "mlflow", MlflowClient=Client)

    Tracking(run, with_trackers(run, "mlflow")).close("finished")

    assert joined == ["the other's"]


def test_tensorboard_has_every_point_once_however_often_a_run_was_resumed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard") if _installed("tensorboard") else record_events(monkeypatch)
    config = with_trackers(run, "tensorboard")

    for _ in range(2):
        Tracking(run, config).close("finished")

    files = list((run.path / "tensorboard").iterdir())
    assert len(files) == 1
    if not _installed("tensorboard"):
        steps = [line.split()[:2] for line in files[0].read_text().splitlines()]
        assert steps == [["0", "99"], ["0", "100"], ["1", "101"]]


def record_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's writer, as a text file with a line per event."""

    class Writer:
        made = 0

        def __init__(self, folder: str) -> None:
            Path(folder).mkdir(exist_ok=True)
            type(self).made += 1
            self._file = (Path(folder) / f"events.out.tfevents.{self.made}").open("w")

        def add_event(self, event: Any) -> None:
            self._file.write(f"{event.step} {event.wall_time:g} {event.summary}\n")

        def flush(self) -> None:
            self._file.flush()

        def close(self) -> None:
            self._file.close()

    summary: Callable[..., Any] = SimpleNamespace
    Summary = type("Summary", (SimpleNamespace,), {"Value": SimpleNamespace})
    stand_in(monkeypatch, "tensorboard.summary.writer.event_file_writer", EventFileWriter=Writer)
    stand_in(monkeypatch, "tensorboard.compat.proto.event_pb2", Event=summary)
    stand_in(monkeypatch, "tensorboard.compat.proto.summary_pb2", Summary=Summary)


def _installed(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is not None


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = recorded_wandb(monkeypatch)

    def fail(**given: Any) -> None:
        raise ConnectionError("no network")

    stand_in(monkeypatch, "mlflow", MlflowClient=fail)

    Tracking(run, with_trackers(run, "mlflow", "wandb")).close("failed")

    assert calls[-1] == ("finish", 1)
    assert [record.message for record in caplog.records if "mlflow failed" in record.message] != []


def test_a_tracker_that_hangs_keeps_nobody_waiting(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = recorded_wandb(monkeypatch)
    answers = Event()
    stand_in(monkeypatch, "mlflow", MlflowClient=lambda: answers.wait())

    tracking = Tracking(run, with_trackers(run, "mlflow", "wandb"))
    tracking.follow()
    tracking.close("finished", within_s=0.2)
    left = [thread.daemon for thread in enumerate_threads() if thread.name == "mlflow"]
    answers.set()

    assert set(left) == {True}  # or the process could not end
    assert calls[-1] == ("finish", 0)
    assert "mlflow has not taken all of this run within 0.2 s, and is left" in caplog.text


@pytest.mark.parametrize(
    ("netrc", "server", "variable", "asked"),
    [
        ("machine api.wandb.ai", "https://api.wandb.ai", "", {}),
        ("machine api.wandb.ai", "https://api.wandb.ai", "NETRC", {}),
        ("machine elsewhere", "https://api.wandb.ai", "", {"mode": "offline"}),
        ("machine ours", "https://ours:8080", "", {}),  # as `wandb login --host` leaves it
        ("no file of this kind", "https://api.wandb.ai", "", {"mode": "offline"}),
        ("machine elsewhere", "https://api.wandb.ai", "WANDB_MODE", {}),
        ("machine elsewhere", "https://api.wandb.ai", "WANDB_IDENTITY_TOKEN_FILE", {}),
    ],
)
def test_wandb_without_a_key_is_offline_for_it_would_ask_in_the_terminal(
    *,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    netrc: str,
    server: str,
    variable: str,
    asked: dict[str, str],
) -> None:
    """The file of keys may be readable by others, as far as W&B is concerned."""
    given: dict[str, Any] = {}
    file = tmp_path / ("keys" if variable == "NETRC" else ".netrc")
    file.write_text(f"{netrc} login user password secret\n")
    file.chmod(0o644)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, str(file))
    known = SimpleNamespace(settings=SimpleNamespace(base_url=server))
    stand_in(monkeypatch, "wandb", init=lambda **all_given: given.update(all_given), setup=lambda: known)

    Tracking(run, with_trackers(run, "wandb")).close("finished")

    assert {name: given[name] for name in given if name == "mode"} == asked
    assert (given["dir"], given["name"]) == (str(run.path), run.name)
    assert given["config"]["tracking"]["project"] == "p"


def test_a_tracker_that_is_not_installed_is_an_error_unless_it_is_the_default(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotlight.report.tracking.find_spec", lambda name: None)

    assert check(run.config()) == []
    with pytest.raises(SpotlightError, match="'wandb', which is not installed"):
        check(with_trackers(run, "wandb"))
