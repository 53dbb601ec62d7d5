"""Journals in a directory: files of JSON lines, appended and synced.

A torn last line was never finished, and is cut off. What is read is checked: a damaged line is an error with its place.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

from pydantic_core import PydanticSerializationError, to_json

from spotlight.records import SpotlightError
from spotlight.store.decoding import Record, from_json
from spotlight.store.objects import atomic_write, content_of, not_a_file, unreadable, without_links
from spotlight.store.rows import ValidationRow

TAIL_BYTES = 2**16
"""A dozen rows of a history."""

_appending = threading.Lock()


class Lines:
    """The journals of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counted: dict[str, tuple[int, int]] = {}

    def records(self, journal: str, kind: type[Record]) -> list[Record]:
        """The finished lines of a journal; none if there is no such file yet.

        Raises:
            SpotlightError: a finished line is damaged.
        """
        path = self._directory / journal
        return [_record(path, number, line, kind) for number, line in _numbered(_lines_of(path))]

    def last(self, journal: str, kind: type[Record], rows: int) -> list[Record]:
        """The last so many finished lines of a journal, whatever stands before them.

        Raises:
            SpotlightError: one of them is damaged.
        """
        path, wanted = self._directory / journal, TAIL_BYTES
        size = path.stat().st_size if path.is_file() else 0
        while True:
            content = b""
            if size:
                with path.open("rb") as file:
                    file.seek(max(0, size - wanted))
                    content = file.read(wanted)
            lines = _whole_lines(content)
            if len(lines) > rows or wanted >= size:
                first = self.count(journal) - len(lines[-rows:]) + 1
                return [_record(path, number, line, kind) for number, line in enumerate(lines[-rows:], first)]
            wanted *= 4

    def records_by(self, journal: str, common: type[Record], kind_of: Callable[[Record], Any]) -> list[Any]:
        """As `records`, of a journal of several kinds: ``kind_of`` finds a line's kind from its ``common`` fields."""
        path = self._directory / journal
        found = ((number, line, _record(path, number, line, common)) for number, line in _numbered(_lines_of(path)))
        return [_record(path, number, line, kind_of(row)) for number, line, row in found]

    def count(self, journal: str) -> int:
        """Finished lines of a journal; only those that are new are read."""
        path = self._directory / journal
        known_bytes, lines = self._counted.get(journal, (0, 0))
        size = path.stat().st_size if path.is_file() else 0
        if size < known_bytes:
            known_bytes, lines = 0, 0
        if size > known_bytes:
            with path.open("rb") as file:
                file.seek(known_bytes)
                content = file.read(size - known_bytes)
            lines += content.count(b"\n")
            known_bytes += content.rfind(b"\n") + 1  # a torn line is cut off, and another one takes its place
        self._counted[journal] = (known_bytes, lines)
        return lines

    def append(self, journal: str, *rows: Mapping[str, Any]) -> None:
        """Add lines durably, cutting off a torn one first; any thread of the one driver may.

        Raises:
            SpotlightError: a directory has the journal's name.
        """
        path = self._directory / journal
        if path.is_dir():
            raise not_a_file(path)
        with _appending, open(path, "ab+", opener=without_links) as file:
            file.seek(max(0, file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):
                file.truncate(sum(map(len, _lines_of(path))))
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, journal: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a whole journal at once."""
        self._counted.pop(journal, None)
        with atomic_write(self._directory / journal) as file:
            file.write(_lines(list(rows)))

    def recount(self) -> None:
        """Forget the counts of lines, since journals have been replaced."""
        self._counted.clear()


class Growing(Generic[Record]):
    """A journal that is read as it grows: each finished line once, and all of them again if the file was replaced.

    A file that was written anew may have the number (inode) of the one before the last, and be longer. So it counts as
    the same only if the last line that was read stands where it stood.

    Args:
        rewritten: the journal is written anew at each change, so that any change means a new file.
    """

    def __init__(self, path: Path, kind: type[Record], *, rewritten: bool = False) -> None:
        self._path, self._kind, self._rewritten = path, kind, rewritten
        self._read = 0, 0, 0
        """(Inode, bytes read, lines read.)"""
        self._last, self._changed_ns = b"", 0
        """The last line that was read, and when the file was changed by then."""

    @property
    def lines(self) -> int:
        """Lines read so far."""
        return self._read[2]

    def new(self) -> tuple[int, list[Record]]:
        """(Number of the first new line, the new records); the number is 1 again if the file was replaced.

        Raises:
            SpotlightError: one of them is damaged; or the journal is written anew at each change, and ends in a torn
                line, which no driver leaves.
        """
        inode, known_bytes, known_lines = self._read
        content = b""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                file.seek(max(0, known_bytes - len(self._last)))
                stands = file.read(len(self._last)) == self._last if found.st_size >= known_bytes else False
                is_changed = self._rewritten and found.st_mtime_ns != self._changed_ns
                if found.st_ino != inode or is_changed or not stands:
                    inode, known_bytes, known_lines = found.st_ino, 0, 0
                self._changed_ns = found.st_mtime_ns
                file.seek(known_bytes)
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            inode, known_bytes, known_lines = 0, 0, 0
        except OSError as error:
            raise unreadable(self._path, error) from None
        lines = _whole_lines(content)
        if self._rewritten and sum(map(len, lines)) < len(content):
            where = f"{self._path}:{known_lines + len(lines) + 1}"
            raise SpotlightError(f"{where}: the line is cut short; restore the file or delete the line")
        rows = [_record(self._path, number, line, self._kind) for number, line in _numbered(lines, known_lines + 1)]
        self._read = inode, known_bytes + sum(map(len, lines)), known_lines + len(lines)
        self._last = lines[-1] if lines else self._last if known_bytes else b""
        return known_lines + 1, rows


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """JSON lines, one for each row."""
    try:
        return b"".join([to_json(row) + b"\n" for row in rows])
    except PydanticSerializationError:  # a lone surrogate, such as half an emoji, is replaced by "?"
        texts = (json.dumps(row, ensure_ascii=False) for row in rows)
        return b"".join([text.encode(errors="replace") + b"\n" for text in texts])


def _lines_of(path: Path) -> list[bytes]:
    return _whole_lines(content_of(path) or b"")


def _whole_lines(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _numbered(lines: Iterable[bytes], first: int = 1) -> Iterable[tuple[int, bytes]]:
    return enumerate((line.rstrip(b"\n") for line in lines), first)


def _record(path: Path, number: int, line: bytes, kind: type[Record]) -> Record:
    where, way_out = f"{path}:{number}", "restore the file or delete the line"
    return from_json(kind, line, where, way_out, finite=kind is ValidationRow)
