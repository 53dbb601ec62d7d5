"""What a run directory holds, and how it is written so that a kill at any moment loses nothing.

A journal is a file of JSON lines, appended and synced; a torn last line was never finished and is cut
off. Everything else appears whole, by renaming. One driver at a time holds the directory's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

from spotlight import config
from spotlight.plan.bandit import Beliefs
from spotlight.plan.offload import Offload
from spotlight.records import Explored, Kept, Prompt, Selection, SpotlightError

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
"""Only in the directory of a simulated run: ``{"learning": "modelled" | "real"}``."""


_appending = threading.Lock()


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
        path = self.path / SIMULATED
        if not path.is_file():
            return ""
        content = path.read_bytes()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            match json.loads(content)["learning"]:
                case "modelled" | "real" as learning:
                    return learning
        raise SpotlightError(
            f'{path}: expected {{"learning": "modelled"}} or "real", found {content[:80]!r}; restore the file'
        )

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

    def rows(self, journal: str) -> list[dict[str, Any]]:
        """The finished lines of a journal; none if there is no such file yet.

        Raises:
            SpotlightError: a finished line is not JSON.
        """
        path, rows = self.path / journal, []
        for number, line in enumerate(_whole_lines(path), 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise SpotlightError(
                    f"{path}:{number}: not JSON ({error}); restore the file or delete the line"
                ) from None
        return rows

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

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        with atomic_write(self.path / name) as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())

    def selection(self, iteration: int) -> Selection | None:
        """The recorded kept seeds of an iteration."""
        path = self.path / "selections" / f"{iteration:05d}.json"
        if not path.is_file():
            return None
        value = json.loads(path.read_text())
        kept = tuple(
            Kept(
                prompt=Prompt(**one["prompt"]),
                seeds=tuple(one["seeds"]),
                explored_rewards=tuple(one["explored_rewards"]),
            )
            for one in value.pop("kept")
        )
        explored = tuple(
            Explored(prompt=one["prompt"], rewards=tuple(one["rewards"])) for one in value.pop("explored", ())
        )
        return Selection(kept=kept, explored=explored, **value)

    def record_selection(self, selection: Selection) -> None:
        (self.path / "selections").mkdir(exist_ok=True)
        self.write_json(f"selections/{selection.iteration:05d}.json", asdict(selection))

    def beliefs(self, iteration: int) -> Beliefs:
        """What exploration knew before an iteration was trained on."""
        path = self.path / "beliefs" / f"{iteration:05d}.json"
        return Beliefs.of(json.loads(path.read_text())) if path.is_file() else Beliefs()

    def record_beliefs(self, iteration: int, beliefs: Beliefs) -> None:
        (self.path / "beliefs").mkdir(exist_ok=True)
        self.write_json(f"beliefs/{iteration:05d}.json", asdict(beliefs))

    def offload(self, iteration: int) -> Offload | None:
        """The rollout window of an iteration, and those remembered; None where none was worked out."""
        path = self.path / "offload" / f"{iteration:05d}.json"
        if not path.is_file():
            return None
        value = json.loads(path.read_text())
        return Offload(window_s=value["window_s"], memory={int(n): one for n, one in value["memory"].items()})

    def record_offload(self, iteration: int, state: Offload) -> None:
        (self.path / "offload").mkdir(exist_ok=True)
        self.write_json(f"offload/{iteration:05d}.json", asdict(state))


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


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)


def _whole_lines(path: Path) -> list[bytes]:
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
