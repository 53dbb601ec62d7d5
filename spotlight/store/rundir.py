"""What a run directory holds, and how it is written so that a kill at any moment loses nothing.

A journal is a file of JSON lines, appended and synced; a torn last line was never finished and is cut
off. Everything else appears whole, by renaming. One driver at a time holds the directory's lock. What is read is
checked: a damaged file is an error that says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from spotlight import config
from spotlight.plan.bandit import Beliefs
from spotlight.plan.offload import Offload
from spotlight.plan.replay import Allocation
from spotlight.records import Selection, SpotlightError
from spotlight.store.decoding import Record, from_json

HISTORY = "history.jsonl"
VALIDATION = "validation.jsonl"
SPANS = "spans.jsonl"
WORKERS = "workers.jsonl"
EVENTS = "events.jsonl"
"""What happened to gangs and workers, as it happened."""
DECISIONS = "decisions.jsonl"
"""What was decided from what; see `spotlight.plan.replay`."""
QUARANTINED = "quarantined.jsonl"
"""Requests that nobody runs any more."""
SUMMARY = "summary.json"
SIMULATED = "simulated.json"
"""Only in the directory of a simulated run: a `Simulated`."""

_appending = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Says of a run that no machine ran it."""

    learning: Literal["modelled", "real"]
    """By a model of learning, or of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """A finished iteration: a line of ``history.jsonl``."""

    iteration: int
    weights_version: int
    """That it ended with."""
    weights_sha256: str
    metrics: Mapping[str, float]
    """None of them depends on time or place."""
    measured: Mapping[str, float]
    """Seconds, dollars and counts, which do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """How good a weights version was: a line of ``validation.jsonl``."""

    version: int
    score: float
    """Mean of the rewards that are known."""
    rewards: tuple[float | None, ...]
    images: str
    """Path of an .npz inside the run directory."""
    at_s: float
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run that came to its end, in a few numbers: ``summary.json``."""

    score_before: float
    score_after: float
    iterations: int
    wall_s: float
    usd: float
    usd_wasted: float
    usd_reserved_only: float
    preemptions: int
    first_image_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    decision: str


class RunDir:
    """The directory of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @classmethod
    def create(cls, settings: config.Config, now_s: float) -> RunDir:
        """Make a new directory, named after the run and the time, with the resolved settings in it."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
        parent = Path(settings.run.dir)
        for attempt in range(100):
            path = parent / f"{settings.run.name}-{stamp}{f'-{attempt}' if attempt else ''}"
            with contextlib.suppress(FileExistsError):
                return cls._create(path, settings)
        raise SpotlightError(f"{parent}: a hundred runs named {settings.run.name!r} were started this second")

    @classmethod
    def _create(cls, path: Path, settings: config.Config) -> RunDir:
        try:
            path.mkdir(parents=True)
            with atomic_write(path / config.RESOLVED) as file:
                file.write(config.dump(settings).encode())
        except FileExistsError:
            raise
        except OSError as error:
            raise SpotlightError(
                f"{path}: cannot make the run directory: {error.strerror}; choose another run.dir, or make room there"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run's directory.

        Raises:
            SpotlightError: it is not one.
        """
        run = cls(path)
        if not (run.path / config.RESOLVED).is_file():
            raise SpotlightError(
                f"{path}: not a run directory: it has no {config.RESOLVED}; `spotlight run CONFIG` makes one"
            )
        return run

    def config(self) -> config.Config:
        return config.load(self.path / config.RESOLVED)

    @property
    def latents_url(self) -> str:
        """Where this run's latents are: in its directory, or below the configured URL under its name."""
        url = self.config().latents.url
        return f"{url.rstrip('/')}/{self.path.name}" if url else str(self.path / "latents")

    @property
    def simulated(self) -> Literal["", "modelled", "real"]:
        """How a simulated run learns; empty for a live one.

        Raises:
            SpotlightError: the record of it is damaged.
        """
        found = self._file(SIMULATED, Simulated, "restore the file")
        return found.learning if found else ""

    def has_latents(self) -> bool:
        """Whether anything may be in the store of latents; a modelled device leaves none."""
        if self.simulated == "modelled":
            return False
        return (self.path / "latents").exists() or bool(self.config().latents.url)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory; the operating system lets go when this process ends, however it ends.

        Raises:
            SpotlightError: another process holds it.
        """
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip()
                raise SpotlightError(
                    f"{self.path}: process {owner or '(unknown)'} is running this run: wait for it, or stop it first"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def holder(self) -> str:
        """The process that holds the directory; empty where none does. It asks as one of many, and lets go at once."""
        file = self.path / "lock"
        if not file.exists():
            return ""
        with file.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return held.read().strip() or "(unknown)"
        return ""

    def records(self, journal: str, kind: type[Record]) -> list[Record]:
        """The finished lines of a journal; none if there is no such file yet.

        Raises:
            SpotlightError: a finished line is damaged.
        """
        return [self._record(journal, number, line, kind) for number, line in self._lines(journal)]

    def rows(self, journal: str) -> list[dict[str, Any]]:
        """The same, with whatever fields they have."""
        return self.records(journal, dict[str, Any])

    def iterations(self) -> int:
        """How many are finished."""
        return len(_whole_lines(self.path / HISTORY))

    def history(self) -> list[HistoryRow]:
        return self.records(HISTORY, HistoryRow)

    def validation(self) -> list[ValidationRow]:
        return self.records(VALIDATION, ValidationRow)

    def decisions(self) -> list[Allocation | dict[str, Any]]:
        """Rows for `spotlight.plan.replay`."""
        rows: list[Allocation | dict[str, Any]] = []
        for number, line in self._lines(DECISIONS):
            if self._record(DECISIONS, number, line, _Decision).decision == "allocate":
                rows.append(self._record(DECISIONS, number, line, Allocation))
            else:
                rows.append(self._record(DECISIONS, number, line, dict[str, Any]))
        return rows

    def _lines(self, journal: str) -> Iterable[tuple[int, bytes]]:
        return enumerate((line.rstrip(b"\n") for line in _whole_lines(self.path / journal)), 1)

    def _record(self, journal: str, number: int, line: bytes, kind: type[Record]) -> Record:
        return from_json(kind, line, f"{self.path / journal}:{number}", "restore the file or delete the line")

    def append(self, journal: str, *rows: Mapping[str, Any]) -> None:
        """Add lines durably, cutting off a torn one first; any thread of the one driver may."""
        with _appending, (self.path / journal).open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):
                file.truncate(sum(len(line) for line in _whole_lines(self.path / journal)))
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, journal: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a whole journal at once."""
        with atomic_write(self.path / journal) as file:
            file.write(_lines(rows))

    def write_json(self, name: str, value: Any) -> None:
        """A mapping, or a record by its fields' names."""
        with atomic_write(self.path / name) as file:
            file.write(indented(value).encode())

    def selection(self, iteration: int) -> Selection | None:
        """The recorded kept seeds of an iteration."""
        way_out = "restore it, or delete it: `spotlight resume` then explores for that iteration anew"
        return self._file(f"selections/{iteration:05d}.json", Selection, way_out)

    def record_selection(self, selection: Selection) -> None:
        (self.path / "selections").mkdir(exist_ok=True)
        self.write_json(f"selections/{selection.iteration:05d}.json", selection)

    def beliefs(self, iteration: int) -> Beliefs:
        """What exploration knew before an iteration was trained on."""
        way_out = "restore it, or delete it: the planner then begins without beliefs"
        return self._file(f"beliefs/{iteration:05d}.json", Beliefs, way_out) or Beliefs()

    def record_beliefs(self, iteration: int, beliefs: Beliefs) -> None:
        (self.path / "beliefs").mkdir(exist_ok=True)
        self.write_json(f"beliefs/{iteration:05d}.json", beliefs)

    def offload(self, iteration: int) -> Offload | None:
        """The rollout window of an iteration, and those remembered; None where none was worked out."""
        way_out = "restore it, or delete it: the window then begins at its first length"
        return self._file(f"offload/{iteration:05d}.json", Offload, way_out)

    def record_offload(self, iteration: int, state: Offload) -> None:
        (self.path / "offload").mkdir(exist_ok=True)
        self.write_json(f"offload/{iteration:05d}.json", state)

    def summary(self) -> Summary | None:
        """None before the run has come to its end."""
        return self._file(SUMMARY, Summary, "delete it: `spotlight resume` writes it anew, a report does without")

    def write_summary(self, summary: Summary) -> None:
        self.write_json(SUMMARY, summary)

    def _file(self, name: str, kind: type[Record], way_out: str) -> Record | None:
        path = self.path / name
        return from_json(kind, path.read_bytes(), path, way_out) if path.is_file() else None


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole and on the disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def indented(value: Any, line: str = "\n") -> str:
    """JSON over several lines, of a record by its fields' names.

    The same text as ``json.dumps(value, indent=1, sort_keys=True)``, in a tenth of the time: where it indents, that one
    is written in Python, and looks at every number.

    Args:
        line: how the line ends on which it begins, and the next one begins.
    """
    deeper = line + " "
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping) and value:
        names = {key: key if isinstance(key, str) else json.dumps(key) for key in sorted(value)}
        entries = [f"{json.dumps(name)}: {indented(value[key], deeper)}" for key, name in names.items()]
        return "{" + deeper + ("," + deeper).join(entries) + line + "}"
    if isinstance(value, (list, tuple)) and value:
        if set(map(type, value)) <= {int, float, bool, type(None)}:  # ", " is in none of them
            return "[" + deeper + json.dumps(value)[1:-1].replace(", ", "," + deeper) + line + "]"
        return "[" + deeper + ("," + deeper).join([indented(part, deeper) for part in value]) + line + "]"
    return json.dumps(value)


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)


def _whole_lines(path: Path) -> list[bytes]:
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
