"""Hands a run's metrics to the trackers that people use beside the run directory: TensorBoard, W&B, MLflow.

Each is imported when a run wants it, here alone. What was logged may be logged again: a run that is resumed hands over
its whole history, and no point is doubled. A tracker that fails is left out for the rest of the run, which goes on.
Keys and addresses come from the tracker's own environment (``WANDB_API_KEY``, ``MLFLOW_TRACKING_URI``), never from the
settings, which are written to the run directory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from spotlight.config import Config
from spotlight.records import SpotlightError, record
from spotlight.store.rundir import HISTORY, VALIDATION, HistoryRow, RunDir, ValidationRow

HIDDEN = ("started_s", "stopped_s", "busy_s.")
"""What names of measurements begin with that no curve is made of."""

logger = logging.getLogger("spotlight.tracking")


@record
class Point:
    """What was measured at one step."""

    step: int
    """An iteration; of a validation, the weights version."""
    at_s: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """Somewhere that points go."""

    def log(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """The trackers of one run.

    Raises:
        SpotlightError: one that the settings name is not installed.
    """

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._sizes = (0, 0)
        self._logged: set[tuple[str, int]] = set()
        self._trackers: dict[str, Tracker] = {}
        for name in check(config):
            with _Leaving(self._trackers, name):
                self._trackers[name] = TRACKERS[name](run, config)

    def follow(self) -> None:
        """Hand over what is new since the last call."""
        if not self._trackers:
            return
        sizes = (self._size(HISTORY), self._size(VALIDATION))
        if sizes == self._sizes:
            return
        self._sizes = sizes
        new = [*map(_iteration, self._run.history()), *map(_validation, self._run.validation())]
        points = [point for kind, point in new if (kind, point.step) not in self._logged]
        points.sort(key=lambda point: (point.step, point.at_s))
        self._logged.update((kind, point.step) for kind, point in new)
        for name, tracker in list(self._trackers.items()):
            with _Leaving(self._trackers, name):
                tracker.log(points)

    def _size(self, name: str) -> int:
        path = self._run.path / name
        return path.stat().st_size if path.exists() else 0

    def close(self) -> None:
        self.follow()
        for name, tracker in list(self._trackers.items()):
            with _Leaving(self._trackers, name):
                tracker.close()


class _Leaving:
    """Leaves a tracker out once it fails, and says so once."""

    def __init__(self, trackers: dict[str, Tracker], name: str) -> None:
        self._trackers, self._name = trackers, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._trackers.pop(self._name, None)
        logger.warning("%s failed and is told nothing more of this run, which goes on: %r", self._name, error)
        return True


def check(config: Config) -> list[str]:
    """The trackers that a run has: those that the settings name, TensorBoard only where it is installed.

    Raises:
        SpotlightError: another one is not installed.
    """
    found: list[str] = []
    for name in config.tracking.to:
        if find_spec(name) is not None:
            found.append(name)
        elif name != "tensorboard":
            raise SpotlightError(f"tracking.to names {name!r}, which is not installed: install it, or leave it out")
    return found


def _iteration(row: HistoryRow) -> tuple[str, Point]:
    values = {**row.metrics, **{name: row.measured[name] for name in row.measured if not name.startswith(HIDDEN)}}
    return "iteration", Point(step=row.iteration, at_s=row.measured.get("stopped_s", 0.0), values=values)


def _validation(row: ValidationRow) -> tuple[str, Point]:
    return "validation", Point(step=row.version, at_s=row.at_s, values={"validation_score": row.score})


class TensorBoard:
    """Event files in the run directory; those of an earlier session are replaced, as all is logged again."""

    FOLDER = "tensorboard"

    def __init__(self, run: RunDir, config: Config) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.path / self.FOLDER
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.at_s, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of W&B for each of ours, resumed with it; it drops steps that it has already."""

    def __init__(self, run: RunDir, config: Config) -> None:
        import wandb

        name = run.name
        self._run = wandb.init(
            project=config.tracking.project,
            id=name,
            name=name,
            resume="allow",
            dir=str(run.path),
            config=config.model_dump(mode="json"),
        )

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One run of MLflow for each of ours, found again by its tag; a point that is logged again is the same point."""

    TAG = "spotlight.run"
    BATCH = 1000
    """Most metrics that MLflow takes at once."""

    def __init__(self, run: RunDir, config: Config) -> None:
        import mlflow

        self._client, project, name = mlflow.MlflowClient(), config.tracking.project, run.name
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([number], filter_string=f"tags.`{self.TAG}` = '{name}'")
        made = found[0] if found else self._client.create_run(number, run_name=name, tags={self.TAG: name})
        self._id = made.info.run_id

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.at_s), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + self.BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
