"""What a run directory holds, and how it is written so that a kill at any moment loses nothing.

A journal is a file of JSON lines, appended and synced; a torn last line was never finished and is cut
off. Everything else appears whole, by renaming. One driver at a time holds the directory's lock, and its lease. What is
read is checked: a damaged file is an error that says what to do. No link may lead out of the directory:
that is checked before anything is read or written.

A run can also live at the URL of an object store. All that workers, or a driver that resumes the run, need is then
objects there: records at once, journals some seconds later. What can only be a file (journals,
prompts, pictures, the report) has a copy in a directory of this machine.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import shlex
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from spotlight import config
from spotlight.clock import wall_clock
from spotlight.files import check_slashes, from_home, home, is_text, is_url, whole
from spotlight.plan.beliefs import Beliefs
from spotlight.plan.offload import Offload
from spotlight.plan.replay import Allocation
from spotlight.records import Quarantined, Selection, SpotlightError, Stopped, record
from spotlight.store.decoding import Record, from_json, readable
from spotlight.store.file_lock import FileLock
from spotlight.store.journals import Journals
from spotlight.store.lease import Holder, Lease
from spotlight.store.lines import Growing, Lines
from spotlight.store.objects import atomic_write, check_address, check_reach, objects_at
from spotlight.store.rows import (
    ASIDE,
    DECISIONS,
    FOLDERS,
    HISTORY,
    JOURNALS,
    MODEL,
    OF_TRACKERS,
    PROMPTS,
    QUARANTINED,
    SIMULATED,
    STARTED,
    SUMMARY,
    VALIDATION,
    WORKERS,
    HistoryRow,
    ModelHash,
    PromptHashes,
    Simulated,
    Started,
    Summary,
    ValidationRow,
)

PUSH_S = 5.0
"""Time between two copies of what only a report needs: a lost machine loses as much."""
TURN_S = 120.0
"""Longest wait for a process that only reads a run's files: it may copy journals of gigabytes from a URL."""
SAY_S = 2.0
"""After so long, a message says what is waited for."""
POLL_S = 0.1
HERE = "a process of this machine"

logger = logging.getLogger(__name__)


@record
class _Decision:
    """What the lines of ``decisions.jsonl`` have in common."""

    decision: str


class RunDir:
    """One run, in its directory or at its URL.

    Args:
        place: the directory; or the URL of an object store, where ``file://`` names a directory too.
        copy: directory on this machine for the files of a run at a URL; None: the one that its driver has.

    Raises:
        SpotlightError: its path is no text.
    """

    def __init__(self, place: str | Path, *, copy: Path | None = None) -> None:
        remote = is_url(place)
        self.path = copy if copy and remote else Path(os.path.realpath(files_of(place)))
        self.url = str(place).rstrip("/") if remote else str(self.path)
        """Where the run is, for its workers and for people."""
        check_slashes(place)
        if not is_text(self.url):
            raise SpotlightError(
                f"{self.url!r}: the path of a run has bytes that are not UTF-8, which no report can hold: "
                "rename that directory, or choose another one"
            )
        self.name = self.url.rpartition("/")[2]
        self.objects = objects_at(self.url)
        self._journals = Journals(self.objects, self.path, (WORKERS,)) if remote else None
        self._pushed_s = 0.0
        self._lock = FileLock(self.path)
        self._lines = Lines(self.path)

    def __fspath__(self) -> str:
        """The run's path or URL, so that a `RunDir` can stand for it."""
        return self.url

    def __repr__(self) -> str:
        return f"<RunDir {self.url}>"

    def prompt_hashes(self) -> PromptHashes | None:
        """Hashes of the prompts that the run began with; None if they were not recorded."""
        return self._file(PROMPTS, PromptHashes, "restore it, or begin a new run")

    def model_hash(self) -> ModelHash | None:
        """What tells the weights that the run began with from others; None if nothing was recorded."""
        return self._file(MODEL, ModelHash, "delete it, if `model.path` holds the weights that the run began with")

    @property
    def is_remote(self) -> bool:
        """Whether it is at a URL of an object store."""
        return self._journals is not None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """Open an existing run, in a directory or at a URL.

        Raises:
            SpotlightError: it is not one, something in it leads out of it, or this user may not look into it.
        """
        path = from_home(os.fspath(path))
        with looked_into(path):
            return cls._open(path)

    @classmethod
    def _open(cls, path: str) -> RunDir:
        if not path.strip():  # an unset variable of a shell; as a path it would be where we are
            raise SpotlightError(f"{path!r} is no run directory: name one")
        if is_url(path):
            check_address(path)
            check_reach(path)
        run = cls(path)
        if run.objects.size(config.RESOLVED) is None:
            found, way_out = "no such directory", "`spotlight run CONFIG` makes one"
            if run.is_remote or run.path.is_dir():
                found = f"not a run directory: it has no {config.RESOLVED}"
                way_out = ("" if run.is_remote else _latest_within(run.path)) or way_out
            elif run.path.exists():
                found = "a file, and no run directory"
            else:
                way_out = _alike(run.path) or way_out
            raise SpotlightError(f"{path}: {found}; {way_out}")
        if run._journals:
            run.pull(anew=True)
        else:
            for found in _forbidden_entries(run.path, run.path):
                raise SpotlightError(found)
            for file in filter(Path.is_file, map(run.path.joinpath, FOLDERS)):
                raise SpotlightError(f"{file}: expected a directory, found a file: move it away, or delete it")
        return run

    def pull(self, *, anew: bool = False) -> None:
        """Of a run at a URL, copy to this machine what others put there; not while its driver is on this machine.

        Without the log of decisions, which may be gigabytes: only who drives the run needs it, to add to it.

        Args:
            anew: whether what is here already is read again.
        """
        if self._journals:
            with self._held(shared=True) as held:
                if held:
                    self._pull([journal for journal in JOURNALS if journal != DECISIONS], anew=anew)

    def _pull(self, journals: Iterable[str], *, anew: bool) -> None:
        assert self._journals, "a directory is all there is of a run in it"
        replaced = [self._journals.pull(journal, anew=anew) for journal in journals]
        if anew or any(replaced):
            self._lines.recount()
        if anew:
            self.fetch("prompts")
            self.fetch("prices")

    def fetch(self, name: str) -> Path:
        """The file, or all files below the directory, of this name; those of a run at a URL are brought here."""
        if self._journals:
            if not (self.path / name).resolve().is_relative_to(self.path.resolve()):
                raise SpotlightError(f"{self.objects.where(name)}: leads out of the run: delete it")
            for key in self.objects.sizes(name) or [name]:
                self._fetch_file(key)
        return self.path / name

    def _fetch_file(self, key: str) -> None:
        to = self.path / key  # obstore gives no key with ".." in it
        content = self.objects.get(key)
        if content is not None:
            to.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(to) as file:
                file.write(content)

    def push(self, *, at_once: bool = False) -> None:
        """Of a run at a URL, put what was journalled since the last time: now, or every `PUSH_S` if not ``at_once``."""
        now_s = wall_clock()
        if self._journals and (at_once or now_s > self._pushed_s + PUSH_S):
            self._pushed_s = now_s
            for journal in JOURNALS:
                self._journals.push(journal)

    def push_files(self, *names: str) -> None:
        """Of a run at a URL, put files, or all files below directories, there too."""
        if self._journals:
            for name in names:
                path = self.path / name
                for file in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
                    self.objects.put(str(file.relative_to(self.path)), file.read_bytes())

    def config(self) -> config.Config:
        where = self.objects.where(config.RESOLVED)
        content = self.objects.get(config.RESOLVED)
        if content is None:
            raise SpotlightError(f"{where}: no such settings file; restore it")
        return config.parse(content, self.path, where, of_a_run=True)

    def change_end(
        self, *, iterations: int | None = None, target: float | None = None, usd_max: float | None = None
    ) -> None:
        """Let the run end later than before, or sooner; what is done stays done. None leaves a setting as it is.

        Raises:
            SpotlightError: more iterations are done, a value is none that a run can have, or somebody runs it.
        """
        if iterations is not None:
            iterations = whole(iterations, "iterations")
        wanted = {"run.iterations": iterations, "run.target": target, "run.usd_max": usd_max}
        with self.lock():
            if iterations is not None and iterations < (done := self.count(HISTORY)):
                raise SpotlightError(
                    f"{self.url}: {done} iterations are done, so it cannot end after {iterations}: give {done} or more"
                )
            before = self.objects.get(config.RESOLVED) or b""
            after = config.changed(before, [f"{name}={value}" for name, value in wanted.items() if value is not None])
            config.parse(after, self.path, self.objects.where(config.RESOLVED), of_a_run=True)
            self.objects.put(config.RESOLVED, after)

    @property
    def latents_url(self) -> str:
        """Where this run's latents are: with it, or below the configured URL in a folder that no other run has."""
        url = self.config().latents.url
        return f"{url.rstrip('/')}/{self.own_name}" if url else f"{self.url}/latents"

    @property
    def own_name(self) -> str:
        """The name of what is kept of it elsewhere, which no other run has; in older runs, that of its directory."""
        content = self.objects.get(STARTED)
        started = from_json(Started, content, self.objects.where(STARTED), "restore it") if content else None
        return (started and started.latents) or self.name

    @property
    def simulated(self) -> Literal["", "modelled", "real"]:
        """How a simulated run learns; empty for a live one.

        Raises:
            SpotlightError: the record of it is damaged.
        """
        found = self._simulated()
        return found.learning if found else ""

    @property
    def strategy(self) -> str:
        """The strategy that a simulated run was compared as; empty for a live one."""
        found = self._simulated()
        return found.strategy if found else ""

    def _simulated(self) -> Simulated | None:
        return self._file(SIMULATED, Simulated, "restore the file")

    def has_latents(self) -> bool:
        """Whether anything may be in the store of latents; a modelled device leaves none."""
        if self.simulated == "modelled":
            return False
        return bool(self._journals) or (self.path / "latents").exists() or bool(self.config().latents.url)

    @contextlib.contextmanager
    def lock(self, stop: threading.Event | None = None) -> Iterator[Lease]:
        """Hold the run: by the lock of its files, which the system releases when this process ends, and by its lease.

        Args:
            stop: ends the wait for a holder that may be gone, or soon will be.

        Raises:
            SpotlightError: somebody else holds it.
            Stopped: ``stop`` was set.
        """
        stop = stop or threading.Event()
        with self._alone(stop):
            lease = self._lease()
            lease.take(stop)
            try:
                if self._journals:
                    self._pull(JOURNALS, anew=True)
                    self.push(at_once=True)
                try:
                    yield lease
                except BaseException:
                    with contextlib.suppress(SpotlightError):  # the store is out of reach, or the run another's
                        lease.check()
                        self.push(at_once=True)
                    raise
                self.push(at_once=True)
            finally:
                lease.release()

    def _alone(self, stop: threading.Event) -> contextlib.ExitStack:
        """Hold the run's files on this machine alone, until the stack is closed; wait for processes that only read.

        Raises:
            SpotlightError: somebody else has them, or reads them for long.
            Stopped: ``stop`` was set.
        """
        began_s, is_said = wall_clock(), False
        while True:
            with contextlib.ExitStack() as stack:
                if stack.enter_context(self._held()):
                    return stack.pop_all()
            if self._lock.is_held():
                holder = self.holder() or HERE  # it may just have ended
                raise SpotlightError(f"{self.url}: {holder} is running this run: wait for it, or stop it first")
            waited_s = wall_clock() - began_s
            if waited_s > TURN_S:
                raise SpotlightError(
                    f"{self.url}: a process of this machine has looked at the run's files for {TURN_S:g} s, as one "
                    f"that removes what a killed driver left: `fuser {self.path / 'lock'}` names it; end it, or wait"
                )
            if waited_s > SAY_S and not is_said:
                is_said = True
                said = "%s: waits for a process that looks at its files, as one that removes what a killed driver left"
                logger.warning(said, self.url)
            if stop.wait(POLL_S):
                raise Stopped

    @contextlib.contextmanager
    def _held(self, *, shared: bool = False) -> Iterator[bool]:
        """As `FileLock.held`; of a run at a URL, the directory for its files is made."""
        if self._journals:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock.held(shared=shared) as held:
            yield held

    @contextlib.contextmanager
    def unused(self) -> Iterator[bool]:
        """Yields whether nobody has the run; inside, no process of this machine can take it."""
        with self._held(shared=True) as held:
            yield held and self._lease().elsewhere() is None

    def _lease(self) -> Lease:
        return Lease(self.objects, self._lock.identity)

    def perhaps_lost(self) -> Holder | None:
        """The holder on another machine, while a process has the run's files as seen from this one.

        Both are one process where machines share file locks; else the holder may be lost, and the process waits for it.
        """
        return self._lease().elsewhere() if self._lock.is_held() else None

    def holder(self) -> str:
        """The process that runs the run, on whichever machine; empty where none does."""
        here, lease = self._lock.is_held(), self._lease()
        found = lease.holder()
        if here or (found and found.files != lease.files):
            return str(found or HERE)
        return ""

    def last_holder(self) -> Holder | None:
        """Who runs the run, or ran it last; None where nobody ever did: a driver that waits in a queue has not."""
        return self._lease().last()

    def lease_holder(self) -> Holder | None:
        """Who runs the run, by its lease's record alone; None where that says nobody."""
        return self._lease().holder()

    @property
    def resume_command(self) -> str:
        """The shell command that resumes the run."""
        return f"spotlight resume {shlex.quote(self.url)}"

    def history(self) -> list[HistoryRow]:
        return self.records(HISTORY, HistoryRow)

    def unscored(self) -> int:
        """Number of iterations for which seeds were explored, and none was scored: that was for nothing."""
        if self.config().strategy.exploration == "off":
            return 0
        return sum(row.metrics.get("seeds_scored") == 0 for row in self.history())

    def validation(self) -> list[ValidationRow]:
        """In order of versions, whenever they were validated."""
        return sorted(self.records(VALIDATION, ValidationRow), key=lambda row: row.version)

    def records(self, journal: str, kind: type[Record]) -> list[Record]:
        """The finished lines of a journal; none if there is no such file yet.

        Raises:
            SpotlightError: a finished line is damaged.
        """
        return self._lines.records(journal, kind)

    def rows(self, journal: str) -> list[dict[str, Any]]:
        """As `records`, with whatever fields the lines have."""
        return self.records(journal, dict[str, Any])

    def growing(self, journal: str, kind: type[Record]) -> Growing[Record]:
        """A reader of a journal for repeated use: it reads only what is new."""
        return Growing(self.path / journal, kind, rewritten=journal == WORKERS)

    def last(self, journal: str, kind: type[Record], rows: int) -> list[Record]:
        """As `records`, the last ``rows`` only; damage before them is not noticed."""
        return self._lines.last(journal, kind, rows)

    def count(self, journal: str) -> int:
        """Finished lines of a journal; only those that are new are read."""
        return self._lines.count(journal)

    def decisions(self) -> list[Allocation | dict[str, Any]]:
        """Rows for `spotlight.plan.replay`."""
        return self._lines.records_by(
            DECISIONS, _Decision, lambda row: Allocation if row.decision == "allocate" else dict[str, Any]
        )

    def append(self, journal: str, *rows: Mapping[str, Any]) -> None:
        """Add lines durably; any thread of the one driver may.

        Of a run at a URL, what a resumed run needs is there when this returns; for the rest see `push`.
        """
        self._lines.append(journal, *rows)
        if self._journals and journal in (HISTORY, VALIDATION):
            self._journals.push(journal)

    def rewrite(self, journal: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a whole journal at once."""
        self._lines.rewrite(journal, rows)
        if self._journals:
            self._journals.replace(journal)

    def write_json(self, name: str, value: Any) -> None:
        """Write a mapping, or a record by its fields' names, as JSON."""
        self.objects.put(name, indented(value).encode())

    def quarantine(self, request: Quarantined) -> None:
        """Record a request that is set aside; any worker may, and so may each that had a share of it."""
        self.write_json(f"{ASIDE}/{request.request.id}.json", request)

    def all_quarantined(self) -> list[Quarantined]:
        """The requests that `quarantine` recorded; older versions did so in a journal."""
        keys = [key for key in self.objects.sizes(ASIDE) if not key.removeprefix(f"{ASIDE}/").startswith(".")]
        found = [self._file(key, Quarantined, "restore it, or delete it") for key in keys]
        return [*self.records(QUARANTINED, Quarantined), *(each for each in found if each)]

    def selection(self, iteration: int) -> Selection | None:
        """The recorded kept seeds of an iteration."""
        way_out = f"restore it, or delete it, and {made_again(iteration)}"
        return self._file(self.selection_key(iteration), Selection, way_out)

    def selection_key(self, iteration: int) -> str:
        return f"selections/{iteration:05d}.json"

    def record_selection(self, selection: Selection) -> None:
        self.write_json(self.selection_key(selection.iteration), selection)

    def beliefs(self, iteration: int) -> Beliefs:
        """What exploration knew before an iteration was trained on."""
        way_out = f"restore it, or delete it, and {made_again(iteration)}"
        return self._file(self.beliefs_key(iteration), Beliefs, way_out) or Beliefs()

    def beliefs_key(self, iteration: int) -> str:
        return f"beliefs/{iteration:05d}.json"

    def record_beliefs(self, iteration: int, beliefs: Beliefs) -> None:
        self.write_json(self.beliefs_key(iteration), beliefs)

    def retain_beliefs(self, keep: Collection[int], iteration: int) -> None:
        """Remove the beliefs of an iteration, unless it is one to keep: with twenty thousand prompts they are
        megabytes."""
        if iteration not in keep:
            self.objects.delete(self.beliefs_key(iteration))

    def offload(self, iteration: int) -> Offload | None:
        """The rollout window of an iteration, and those remembered; None where none was worked out."""
        way_out = "restore it, or delete it: the window then begins at its first length"
        return self._file(f"offload/{iteration:05d}.json", Offload, way_out)

    def record_offload(self, iteration: int, state: Offload) -> None:
        self.write_json(f"offload/{iteration:05d}.json", state)

    def summary(self) -> Summary | None:
        """None before the run has ended, and if it went on since."""
        found = self._file(SUMMARY, Summary, "delete it: `spotlight resume` writes it anew, a report does without")
        return found if found and found.iterations == self.count(HISTORY) else None

    def write_summary(self, summary: Summary) -> None:
        self.write_json(SUMMARY, summary)

    def _file(self, name: str, kind: type[Record], way_out: str) -> Record | None:
        content = self.objects.get(name)
        return None if content is None else from_json(kind, content, self.objects.where(name), way_out, finite=True)


def files_of(place: str | Path) -> Path:
    """The directory of a run's files on this machine: the run's own, or one for the run at a URL.

    It is the same for every process of a user.
    """
    url = str(place)
    if not is_url(url):
        return Path(url.removeprefix("file://"))
    told = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = told if told.is_absolute() else home() / ".local" / "state"  # relative ones count for nothing, by XDG
    url = url.rstrip("/")
    return state.resolve() / "spotlight" / sha256(url.encode()).hexdigest()[:12] / url.rpartition("/")[2]


@contextlib.contextmanager
def looked_into(place: str | Path) -> Iterator[None]:
    """Turn a missing permission inside into one sentence about the run that a person named.

    Raises:
        SpotlightError: this user may not look into it.
    """
    try:
        yield
    except PermissionError as error:
        raise SpotlightError(
            f"{place}: you may not look into it ({error.filename or place}: {error.strerror}): it is another user's; "
            "that user can let you, by `chmod -R go+rX` on it, and by run.shared = true for runs to come"
        ) from None


def made_again(iteration: int) -> str:
    """How to have what exploration left for an iteration made again."""
    if iteration == 0:
        return "`spotlight resume` makes it again"
    return (
        f"delete weights/v{iteration:05d}: `spotlight resume` then does iteration {iteration - 1} again, which makes it"
    )


def _alike(path: Path) -> str:
    """Names a run that is called nearly so and lies beside it; empty if there is none."""
    runs = [file.parent.name for file in path.parent.glob(f"*/{config.RESOLVED}")]
    close = difflib.get_close_matches(path.name, runs, n=1)
    return f"did you mean {path.with_name(close[0])}?" if close else ""


def _latest_within(folder: Path) -> str:
    """Names the latest run in a directory of runs; empty if there is none."""
    found = max(folder.glob(f"*/{config.RESOLVED}"), key=lambda file: file.stat().st_mtime, default=None)
    return f"it holds runs, of which {found.parent} is the latest" if found else ""


def _forbidden_entries(directory: Path, root: Path) -> Iterator[str]:
    """A sentence about each entry of a run directory that leads out of it, or to nothing, or is no file or directory.

    The run may be going on: what it removes meanwhile is of no interest.
    """
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_symlink():
            target = Path(os.path.realpath(entry.path))
            if not target.is_relative_to(root):
                yield (
                    f"{entry.path}: is a link to {target}, and nothing in a run directory is followed out of it: put "
                    "there what it links to, or delete it"
                )
            elif not target.exists():
                yield f"{entry.path}: is a link to nothing: put there what it linked to, or delete it"
        elif entry.is_dir():
            if not (directory == root and entry.name in OF_TRACKERS):
                yield from _forbidden_entries(Path(entry.path), root)
        elif not (entry.is_file(follow_symlinks=False) or not os.path.lexists(entry.path)):
            yield f"{entry.path}: is a named pipe, a socket or a device, which no run writes: delete it"


def indented(value: Any, line: str = "\n") -> str:
    """JSON over several lines, of a record by its fields' names.

    The same text as ``json.dumps(value, indent=1, sort_keys=True)``, in a tenth of the time: where that
    function indents, it runs in Python, number by number. But a lone surrogate, which no reader takes, is replaced by
    "?".

    Args:
        line: a line break, with the indentation of the line on which the value begins.
    """
    deeper = line + " "
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping) and value:
        names = {key: key if isinstance(key, str) else json.dumps(key) for key in sorted(value)}
        entries = [f"{json.dumps(readable(name))}: {indented(value[key], deeper)}" for key, name in names.items()]
        return "{" + deeper + ("," + deeper).join(entries) + line + "}"
    if isinstance(value, (list, tuple)) and value:
        if set(map(type, value)) <= {int, float, bool, type(None)}:  # ", " is in none of them
            return "[" + deeper + json.dumps(value)[1:-1].replace(", ", "," + deeper) + line + "]"
        return "[" + deeper + ("," + deeper).join([indented(part, deeper) for part in value]) + line + "]"
    return json.dumps(readable(value) if isinstance(value, str) else value)
