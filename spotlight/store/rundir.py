"""What a run directory holds, and how it is written so that a kill at any moment loses nothing.

A journal is a file of JSON lines, appended and synced; a torn last line was never finished and is cut
off. Everything else appears whole, by renaming. One driver at a time holds the directory's lock. What is read is
checked: a damaged file is an error that says what to do. No link leads out of the directory: who opens it finds that
out before anything is read or written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from spotlight import config
from spotlight.files import digest, read_files
from spotlight.plan.beliefs import Beliefs
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
PROMPTS = "prompts.json"
"""The hashes of the prompts that the run began with, which are in ``prompts/``: a `PromptHashes`."""
SUMMARY = "summary.json"
SIMULATED = "simulated.json"
"""Only in the directory of a simulated run: a `Simulated`."""

TAIL_BYTES = 2**16
"""A dozen rows of a history."""

_appending = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Says of a run that no machine ran it."""

    learning: Literal["modelled", "real"]
    """By a model of learning, or of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHashes:
    """Of the run's copies of its prompt files."""

    train_sha256: str
    validation_sha256: str


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
        self._counted: dict[str, tuple[int, int]] = {}

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
    def into(cls, path: str | Path, settings: config.Config) -> RunDir:
        """The run in this very directory; it is made, all at once, if nothing is there.

        Raises:
            SpotlightError: what is there is no run, or one of other settings.
        """
        path = Path(path).resolve()
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            cls._create_at_once(path, settings)
        run = cls.open(path)
        there = run.config()
        ours = {"data": there.data, "run": settings.run.model_copy(update={"dir": there.run.dir})}
        if changed := list(config.differences(there, settings.model_copy(update=ours))):
            raise SpotlightError(
                f"{path}: this run was begun with other settings: {'; '.join(changed)}; give those, or another "
                "directory for a new run"
            )
        return run

    @classmethod
    def _create_at_once(cls, path: Path, settings: config.Config) -> None:
        """Make it elsewhere and rename it, so that what a kill leaves is no half of a run."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as making:
                cls._create(Path(making) / path.name, settings).path.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # somebody else was faster
                raise SpotlightError(
                    f"{path}: cannot make the run directory: {error.strerror}; choose another one, or make room there"
                ) from None

    @classmethod
    def _create(cls, path: Path, settings: config.Config) -> RunDir:
        train = read_files(settings.data.train_prompts, "a prompt file")
        validation = read_files(settings.data.validation_prompts, "a prompt file")
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            path.mkdir(mode=0o777 if settings.run.shared else 0o700)
            run = cls(path)
            data = run._keep_prompts(settings.data, train, validation)
            with atomic_write(path / config.RESOLVED) as file:
                file.write(config.dump(settings.model_copy(update={"data": data})).encode())
        except FileExistsError:
            raise
        except OSError as error:
            raise SpotlightError(
                f"{path}: cannot make the run directory: {error.strerror}; choose another run.dir, or make room there"
            ) from None
        return run

    def _keep_prompts(
        self, data: config.DataSection, train: Mapping[str, bytes], validation: Mapping[str, bytes]
    ) -> config.DataSection:
        """Write the prompts into the directory, since the run goes on with those it began with; where they are.

        They keep their suffix, which says how they are read.
        """
        (self.path / "prompts").mkdir()
        kept = {
            "train": f"prompts/train{Path(data.train_prompts).suffix}",
            "validation": f"prompts/validation{Path(data.validation_prompts).suffix}",
        }
        for name, files in (("train", train), ("validation", validation)):
            if files.keys() != {""}:
                (self.path / kept[name]).mkdir()
            for file, content in files.items():
                with atomic_write(self.path / kept[name] / file) as written:
                    written.write(content)
        self.write_json(PROMPTS, PromptHashes(train_sha256=digest(train), validation_sha256=digest(validation)))
        return config.DataSection(train_prompts=kept["train"], validation_prompts=kept["validation"])

    def prompt_hashes(self) -> PromptHashes | None:
        """Of the prompts that the run began with; None where nobody wrote them down."""
        return self._file(PROMPTS, PromptHashes, "restore it, or begin a new run")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run's directory.

        Raises:
            SpotlightError: it is not one, or something in it leads out of it.
        """
        run = cls(path)
        if not (run.path / config.RESOLVED).is_file():
            raise SpotlightError(
                f"{path}: not a run directory: it has no {config.RESOLVED}; `spotlight run CONFIG` makes one"
            )
        for found in _no_own_files(run.path, run.path):
            raise SpotlightError(found)
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
        with open(self.path / "lock", "a+", opener=_without_links) as file:
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

    def last(self, journal: str, kind: type[Record], rows: int) -> list[Record]:
        """The last so many finished lines of a journal, whatever stands before them.

        Raises:
            SpotlightError: one of them is damaged.
        """
        path, wanted = self.path / journal, TAIL_BYTES
        size = path.stat().st_size if path.is_file() else 0
        while True:
            content = b""
            if size:
                with path.open("rb") as file:
                    file.seek(max(0, size - wanted))
                    content = file.read(wanted)
            lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
            if len(lines) > rows or wanted >= size:
                first = self.count(journal) - len(lines[-rows:]) + 1
                return [self._record(journal, number, line, kind) for number, line in enumerate(lines[-rows:], first)]
            wanted *= 4

    def count(self, journal: str) -> int:
        """Finished lines of a journal; only those that are new are read."""
        path = self.path / journal
        known_bytes, lines = self._counted.get(journal, (0, 0))
        size = path.stat().st_size if path.is_file() else 0
        if size < known_bytes:
            known_bytes, lines = 0, 0
        if size > known_bytes:
            with path.open("rb") as file:
                file.seek(known_bytes)
                lines += file.read(size - known_bytes).count(b"\n")
        self._counted[journal] = (size, lines)
        return lines

    def history(self) -> list[HistoryRow]:
        return self.records(HISTORY, HistoryRow)

    def validation(self) -> list[ValidationRow]:
        """In order of versions, whenever they were validated."""
        return sorted(self.records(VALIDATION, ValidationRow), key=lambda row: row.version)

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
        where, way_out = f"{self.path / journal}:{number}", "restore the file or delete the line"
        return from_json(kind, line, where, way_out, finite=kind is ValidationRow)

    def append(self, journal: str, *rows: Mapping[str, Any]) -> None:
        """Add lines durably, cutting off a torn one first; any thread of the one driver may."""
        with _appending, open(self.path / journal, "ab+", opener=_without_links) as file:
            file.seek(max(0, file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):
                file.truncate(sum(len(line) for line in _whole_lines(self.path / journal)))
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, journal: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a whole journal at once."""
        self._counted.pop(journal, None)
        with atomic_write(self.path / journal) as file:
            file.write(_lines(rows))

    def write_json(self, name: str, value: Any) -> None:
        """A mapping, or a record by its fields' names."""
        with atomic_write(self.path / name) as file:
            file.write(indented(value).encode())

    def selection(self, iteration: int) -> Selection | None:
        """The recorded kept seeds of an iteration."""
        way_out = f"restore it, or delete it, and {made_again(iteration)}"
        return self._file(f"selections/{iteration:05d}.json", Selection, way_out)

    def selection_path(self, iteration: int) -> Path:
        return self.path / "selections" / f"{iteration:05d}.json"

    def record_selection(self, selection: Selection) -> None:
        (self.path / "selections").mkdir(exist_ok=True)
        self.write_json(f"selections/{selection.iteration:05d}.json", selection)

    def beliefs(self, iteration: int) -> Beliefs:
        """What exploration knew before an iteration was trained on."""
        way_out = f"restore it, or delete it, and {made_again(iteration)}"
        return self._file(f"beliefs/{iteration:05d}.json", Beliefs, way_out) or Beliefs()

    def beliefs_path(self, iteration: int) -> Path:
        return self.path / "beliefs" / f"{iteration:05d}.json"

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
        content = _content(path)
        return None if content is None else from_json(kind, content, path, way_out, finite=True)


def made_again(iteration: int) -> str:
    """How to have what exploration left for an iteration made again."""
    if iteration == 0:
        return "`spotlight resume` makes it again"
    return (
        f"delete weights/v{iteration:05d}: `spotlight resume` then does iteration {iteration - 1} again, which makes it"
    )


def _no_own_files(directory: Path, root: Path) -> Iterator[str]:
    """What is in a run directory and is neither a file nor a directory of its own, as sentences."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink():
            target = Path(os.path.realpath(entry.path))
            if not target.is_relative_to(root):
                yield (
                    f"{entry.path}: is a link to {target}, and nothing in a run directory is followed out of it: put "
                    "there what it links to, or delete it"
                )
        elif entry.is_dir():
            yield from _no_own_files(Path(entry.path), root)
        elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            yield f"{entry.path}: is a named pipe, a socket or a device, which no run writes: delete it"


def _without_links(path: str, flags: int) -> int:
    """Open a file, but not what a link in its place leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _content(path: Path) -> bytes | None:
    """All of a file; None if it is not there.

    Raises:
        SpotlightError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpotlightError(f"{path}: cannot be read: {error.strerror}; restore it, or delete it") from None


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole and on the disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:  # which follows no link
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
    encode = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` would make one for each row
    return b"".join([encode(row).encode() + b"\n" for row in rows])


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in (_content(path) or b"").splitlines(keepends=True) if line.endswith(b"\n")]
