"""Hands a run's metrics to the trackers that people use beside the run directory: TensorBoard, W&B, MLflow.

Each is imported only here, when a run uses it. What was logged may be logged again: a resumed run hands over its whole
history, and no point is doubled. A tracker that fails is left out for the rest of the run, and a slow one delays
nothing. Keys and addresses come from the tracker's own environment (``WANDB_API_KEY``, ``MLFLOW_TRACKING_URI``), never
from the settings, which are written to the run directory.
"""

from __future__ import annotations

import logging
import netrc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from spotlight.config import Config
from spotlight.records import SpotlightError, record
from spotlight.store.rows import HISTORY, VALIDATION, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir

HIDDEN = ("started_s", "stopped_s", "busy_s.")
"""Beginnings of the names of measurements that get no curve."""

CLOSE_S = 30.0
"""How long trackers may take for the rest when a run has ended."""
Ended = Literal["finished", "stopped", "failed"]
"""How a run's session ended."""

logger = logging.getLogger("spotlight.tracking")


@record
class Point:
    """What was measured at one step."""

    step: int
    """The iteration; for a validation, the weights version."""
    validates: bool
    """Whether it is a validation, which comes before the iteration of its number."""
    at_s: float
    values: Mapping[str, float]

    @property
    def order(self) -> int:
        """A number that no other point of the run has, and that rises in the order in which they are measured."""
        return 2 * self.step + (not self.validates)


class Tracker(Protocol):
    """Somewhere that points go."""

    def log(self, points: Sequence[Point]) -> None: ...

    def close(self, ended: Ended) -> None: ...


class Tracking:
    """The trackers of one run. Each is made and called in a thread of its own: nobody waits for a slow one.

    Raises:
        SpotlightError: one that the settings name is not installed.
    """

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._sizes = (0, 0)
        self._logged: set[int] = set()
        self._threads = [_Thread(name, partial(TRACKERS[name], run, config)) for name in check(config)]

    def follow(self) -> None:
        """Hand over what is new since the last call."""
        if not self._threads:
            return
        sizes = (self._size(HISTORY), self._size(VALIDATION))
        if sizes == self._sizes:
            return
        self._sizes = sizes
        found = [*map(_iteration, self._run.history()), *map(_validation, self._run.validation())]
        points = sorted((point for point in found if point.order not in self._logged), key=attrgetter("order"))
        self._logged.update(point.order for point in points)
        for thread in self._threads:
            thread.told.put(points)

    def _size(self, name: str) -> int:
        path = self._run.path / name
        return path.stat().st_size if path.exists() else 0

    def close(self, ended: Ended, *, within_s: float = CLOSE_S) -> None:
        """Hand over the rest, and how the run ended; a tracker that has not taken it after ``within_s`` is
        abandoned."""
        self.follow()
        for thread in self._threads:
            thread.told.put(ended)
        until_s = monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - monotonic()))
            if thread.is_alive():
                logger.warning("%s has not taken all of this run within %g s, and is left", thread.name, within_s)


class _Thread(Thread):
    """Makes a tracker, and hands it the points put to ``told``, until the run's end is put there, or the tracker
    fails."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self._make = make
        self.told: SimpleQueue[Sequence[Point] | Ended] = SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            tracker = self._make()
            while not isinstance(told := self.told.get(), str):
                tracker.log(told)
            tracker.close(told)
        except Exception as error:
            logger.warning("%s failed and is told nothing more of this run, which goes on: %r", self.name, error)


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


def _iteration(row: HistoryRow) -> Point:
    values = {**row.metrics, **{name: row.measured[name] for name in row.measured if not name.startswith(HIDDEN)}}
    at_s = row.measured.get("stopped_s", 0.0)
    return Point(step=row.iteration, validates=False, at_s=at_s, values=values)


def _validation(row: ValidationRow) -> Point:
    values = {"validation_score": row.score, **{f"validation_{name}": mean for name, mean in row.metrics.items()}}
    return Point(step=row.version, validates=True, at_s=row.at_s, values=values)


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

    def close(self, ended: Ended) -> None:
        self._writer.close()


class Wandb:
    """One run of W&B for each of ours, resumed with it.

    A resumed run takes only steps beyond its last one, so each point has a step of its own; charts go by `STEP`.
    Without a key, W&B would ask for one in the terminal: then it writes into the run directory, for ``wandb sync``.
    """

    STEP = "iteration"

    def __init__(self, run: RunDir, config: Config) -> None:
        import wandb

        online = _has_wandb_key(wandb)
        if not online:
            logger.warning(
                "W&B has no key (WANDB_API_KEY, or `wandb login`): its files are kept in %s, for `wandb sync`", run.path
            )
        self._run = wandb.init(
            **({} if online else {"mode": "offline"}),
            project=config.tracking.project,
            id=_plain(run.own_name),
            name=run.name,
            resume="allow",
            dir=str(run.path),
            config=config.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric=self.STEP)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.order >= self._run.starting_step:
                self._run.log({self.STEP: point.step, **point.values}, step=point.order)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=int(ended == "failed"))  # W&B shows runs as finished or failed


def _has_wandb_key(wandb: Any) -> bool:
    """Whether W&B need not ask for a key; also if it is told to stay offline. It knows its server, which the variable
    WANDB_BASE_URL or `wandb login --host` may have set."""
    if any(os.environ.get(name) for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    try:
        path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
        hosts = netrc.netrc(path).hosts  # if it is named, it may be readable by others, as for W&B
    except (OSError, netrc.NetrcParseError):
        return False
    return urlsplit(wandb.setup().settings.base_url).hostname in hosts


def _plain(name: str) -> str:
    """A run's name with only letters, digits, dots and dashes."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)


class MLflow:
    """One run of MLflow for each of ours, found again by its tag."""

    TAG = "spotlight.run"
    BATCH = 1000
    """Most metrics that MLflow takes at once."""

    def __init__(self, run: RunDir, config: Config) -> None:
        import mlflow

        self._client, project, name = mlflow.MlflowClient(), config.tracking.project, _plain(run.own_name)
        number = self._experiment(project)
        found = self._client.search_runs([number], filter_string=f"tags.`{self.TAG}` = '{name}'")
        made = found[0] if found else self._client.create_run(number, run_name=run.name, tags={self.TAG: name})
        self._id, self._is_resumed = made.info.run_id, bool(found)
        self._known: dict[str, set[int]] = {}
        """{metric: the steps that it had before this session}; a store of files would keep a step twice."""
        if found:
            self._client.update_run(self._id, status="RUNNING")

    def _experiment(self, name: str) -> str:
        """The experiment of this name; another run may make it at the same moment."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.at_s), point.step)
            for point in points
            for name, value in point.values.items()
            if point.step not in self._known_steps(name)
        ]
        for first in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + self.BATCH])

    def _known_steps(self, name: str) -> set[int]:
        if name not in self._known:
            known = self._client.get_metric_history(self._id, name) if self._is_resumed else ()
            self._known[name] = {metric.step for metric in known}
        return self._known[name]

    STATUS: Mapping[Ended, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def close(self, ended: Ended) -> None:
        self._client.set_terminated(self._id, self.STATUS[ended])


TRACKERS: Mapping[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
