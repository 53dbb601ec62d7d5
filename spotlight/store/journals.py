"""The journals of a run at a URL: written on the driver's machine, and kept in the object store in parts.

An object cannot be appended to. A part holds about a megabyte, whole lines, and is named by the byte with which it
begins; the last one is put again with what came since. Whoever reads the parts in order has the journal as it was at
some moment. A journal that is written anew at each change is one object.
"""

from __future__ import annotations

from pathlib import Path

from spotlight.store.objects import Objects, atomic_write

PART_BYTES = 2**20


class Journals:
    """The copies of the journals in one directory.

    Args:
        directory: on this machine.
        rewritten: names of those that are short, and written anew at each change.
    """

    def __init__(self, objects: Objects, directory: Path, rewritten: tuple[str, ...]) -> None:
        self._objects, self._directory, self._rewritten = objects, directory, rewritten
        self._pushed: dict[str, tuple[int, int]] = {}
        """{journal: (start of its last part, bytes in the store)}; of a rewritten one, (0, hash of its content)."""
        self._pulled: set[str] = set()
        self._stale: dict[str, list[str]] = {}
        """{journal: keys of parts in the store that no longer belong to it}; the next push removes them."""

    def push(self, name: str) -> None:
        """Put what the store lacks of a journal, whose copy here must begin with what the store has."""
        path = self._directory / name
        size = path.stat().st_size if path.is_file() else 0
        if stale := self._stale.pop(name, []):
            self._objects.delete(*stale)
        start, pushed = self._pushed.get(name) or self._in_store(name)
        if name in self._rewritten:
            content = path.read_bytes() if size else b""
            if content and (known := hash(content)) != pushed:
                self._objects.put(_key(name, 0), content)
                self._pushed[name] = (0, known)
            return
        if size == pushed:
            return
        content = _read(path, start, size)
        content = content[: content.rfind(b"\n") + 1]
        self._objects.put(_key(name, start), content)
        end = start + len(content)
        self._pushed[name] = (end if len(content) >= PART_BYTES else start, end)

    def replace(self, name: str) -> None:
        """Put a journal whose beginning has changed; what a kill leaves of the parts before is cut off by a reader."""
        path = self._directory / name
        self._objects.put(_key(name, 0), path.read_bytes())
        self._objects.delete(*(key for key in self._objects.sizes(_folder(name)) if key != _key(name, 0)))
        self._pushed[name] = (0, path.stat().st_size)

    def pull(self, name: str, *, anew: bool) -> bool:
        """Copy a journal from the store to this machine.

        Args:
            anew: whether all of it is read, not only what is new: what was here and never put is lost then.

        Returns:
            Whether all of it was read because it does not begin with what is here any more: it was replaced.
        """
        path = self._directory / name
        parts = self._objects.sizes(_folder(name))
        here = path.stat().st_size if path.is_file() else 0
        known = here if name in self._pulled and not anew and name not in self._rewritten else 0
        if known > sum(parts.values()):
            self.pull(name, anew=True)
            return True
        content, last, ours = bytearray(), (0, 0), 0
        for key, size in parts.items():
            start, at = int(key.rpartition("/")[2]), known + len(content)
            if start + size <= known:
                ours += 1
                continue
            if start > at or (start < at and content):  # of a journal before it was replaced
                break
            part = self._objects.get(key) or b""
            if known and not content and part[: at - start] != _read(path, start, at):
                self.pull(name, anew=True)
                return True
            content += part[at - start :]
            last, ours = (start, start + size), ours + 1
        if anew:  # another may have written it since this one did
            self._stale[name] = list(parts)[ours:]
            self._pushed.pop(name, None)
            if name not in self._rewritten:
                self._pushed[name] = (last[1] if last[1] - last[0] >= PART_BYTES else last[0], last[1])
        self._pulled.add(name)
        if known and content:
            with path.open("ab") as file:
                file.write(content)
        elif not known:
            with atomic_write(path) as whole:
                whole.write(content)
        return False

    def _in_store(self, name: str) -> tuple[int, int]:
        parts = self._objects.sizes(_folder(name))
        if not parts:
            return 0, 0
        key, size = max(parts.items())
        start = int(key.rpartition("/")[2])
        return start, start + size


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _folder(name: str) -> str:
    return f"journals/{name}"


def _key(name: str, start: int) -> str:
    return f"{_folder(name)}/{start:015d}"
