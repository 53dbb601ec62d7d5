"""Where the files of weights versions lie, in a run directory or in an object store; says nothing of what is in them.

In a directory a version is staged beside its place, and published by one rename. An object store has no rename: there
files are named by their content, so that nothing that was published is ever written again, and the manifest, put last,
publishes them ::

    weights/v00003/<sha256>.safetensors    written by the training task
    weights/staged-v00003.json             the manifest of a version that is whole, but not published
    weights/v00003/manifest.json           put last

`weights` holds the invariants.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from hashlib import file_digest
from hashlib import sha256 as new_sha256
from io import BufferedReader
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from spotlight.files import is_url
from spotlight.store.node import Source, from_file
from spotlight.store.objects import BucketObjects, flush
from spotlight.store.tensor_files import Content, hashing

MANIFEST = "manifest.json"
WRITING = ".writing-"
"""Begins the names of directories that attempts at a version write to."""
_VERSION = re.compile(r"v(\d{5,})")
_LEFT = re.compile(rf"\.(?:staged-{_VERSION.pattern}|writing-{_VERSION.pattern}-\w+)")
"""Directories that attempts left, with the version, which may be published by now."""
_SUFFIX = ".safetensors"
ATTEMPTS = 10
"""Tries of one rename."""


class Versions(Protocol):
    """The versions of one run, each staged or published or both."""

    def where(self, version: int, *, staged: bool = False) -> str:
        """Path or URL of a version, for people."""
        ...

    def numbers(self) -> list[int]:
        """The published versions, ascending."""
        ...

    def has(self, version: int, *, staged: bool = False) -> bool: ...

    def attempt(self, version: int) -> AbstractContextManager[None]:
        """At the end, remove what was written inside but not staged: the disk may be full."""
        ...

    def write(self, version: int, name: str, content: Content) -> str:
        """Put a file of a version that will be staged; durable when this returns its hash."""
        ...

    def stage(self, version: int, manifest: bytes) -> None:
        """Stage a version, all files of which are written, in place of what another attempt staged."""

    def manifest(self, version: int, *, staged: bool = False) -> bytes:
        """
        Raises:
            OSError: there is none, or it cannot be read.
        """
        ...

    def found(self, version: int, name: str, sha256: str, *, staged: bool = False) -> tuple[int, str]:
        """Size in bytes, and hash, of a file that should have this hash.

        A staged file is not hashed, and ``sha256`` is returned: it was hashed when written, and is again when read.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def publish(self, version: int) -> None:
        """Make a staged version the published one, atomically, also in place of one that is damaged."""

    def drop(self, version: int) -> None:
        """Remove what is staged of a version."""

    def read(self, version: int, name: str, sha256: str) -> bytes:
        """
        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def source(self, version: int, name: str, sha256: str) -> Source:
        """Reads ranges of a published version's file."""
        ...

    def retain(self, keep: Collection[int]) -> None:
        """Remove every published version but these, and what attempts at published ones left; what is staged of later
        ones stays."""


def versions_of(run: str | Path) -> Versions:
    """The versions of a run.

    Args:
        run: its directory or URL.
    """
    return BucketVersions(BucketObjects(str(run))) if is_url(run) else DirectoryVersions(Path(run) / "weights")


class DirectoryVersions:
    """A version is a directory that appears, and goes, by one rename."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._attempt = uuid4().hex

    def where(self, version: int, *, staged: bool = False) -> str:
        return str(self._path(version, staged=staged))

    def _path(self, version: int, *, staged: bool = False) -> Path:
        return self._root / f"{'.staged-' if staged else ''}v{version:05d}"

    def numbers(self) -> list[int]:
        found = (_VERSION.fullmatch(path.name) for path in self._root.glob("v*"))
        return sorted(int(match[1]) for match in found if match)

    def has(self, version: int, *, staged: bool = False) -> bool:
        return self._path(version, staged=staged).exists()

    def _writing(self, version: int) -> Path:
        """A directory of this attempt alone: a worker taken for dead may be writing the same version."""
        return self._root / f"{WRITING}v{version:05d}-{self._attempt}"

    @contextmanager
    def attempt(self, version: int) -> Iterator[None]:
        try:
            yield
        finally:
            shutil.rmtree(self._writing(version), ignore_errors=True)

    def write(self, version: int, name: str, content: Content) -> str:
        path, digest = self._writing(version) / name, new_sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(hashing(content, digest))
        flush(path)
        return digest.hexdigest()

    def stage(self, version: int, manifest: bytes) -> None:
        writing, staged = self._writing(version), self._path(version, staged=True)
        (writing / MANIFEST).write_bytes(manifest)
        flush(writing / MANIFEST)
        flush(writing)
        aside = []
        for _ in range(ATTEMPTS):  # another attempt may stage in between
            aside.append(self._set_aside(staged))
            with suppress(OSError):
                writing.rename(staged)
                break
        else:
            writing.rename(staged)
        flush(self._root)
        for replaced in aside:  # only now: the version may be published at any moment
            shutil.rmtree(replaced, ignore_errors=True)

    def manifest(self, version: int, *, staged: bool = False) -> bytes:
        return (self._path(version, staged=staged) / MANIFEST).read_bytes()

    def found(self, version: int, name: str, sha256: str, *, staged: bool = False) -> tuple[int, str]:
        with _opened(self._path(version, staged=staged) / name) as file:
            digest = sha256 if staged else file_digest(file, "sha256").hexdigest()
            return os.fstat(file.fileno()).st_size, digest

    def publish(self, version: int) -> None:
        self._remove(version)
        self._path(version, staged=True).rename(self._path(version))
        flush(self._root)

    def drop(self, version: int) -> None:
        shutil.rmtree(self._path(version, staged=True), ignore_errors=True)

    def read(self, version: int, name: str, sha256: str) -> bytes:
        with _opened(self._path(version) / name) as file:
            return file.read()

    def source(self, version: int, name: str, sha256: str) -> Source:
        return from_file(self._path(version) / name)

    def retain(self, keep: Collection[int]) -> None:
        for version in self.numbers():
            if version not in keep:
                self._remove(version)
        newest = max(self.numbers(), default=-1)
        for left in self._root.glob(".*"):
            match = _LEFT.fullmatch(left.name)
            if left.name.startswith(".removed-") or (match and int(match[1] or match[2]) <= newest):
                shutil.rmtree(left, ignore_errors=True)

    def _remove(self, version: int) -> None:
        self._take_away(self._path(version))

    def _take_away(self, directory: Path) -> None:
        """Rename a directory, then remove it, so that a kill cannot leave half of it in its place."""
        shutil.rmtree(self._set_aside(directory), ignore_errors=True)

    def _set_aside(self, directory: Path) -> Path:
        """Rename a directory, if it is there, to one that `retain` removes; returns its new path."""
        aside = directory.with_name(f".removed-{directory.name.lstrip('.')}-{uuid4().hex}")
        with suppress(FileNotFoundError):  # there is none
            directory.rename(aside)
        return aside


def _opened(path: Path) -> BufferedReader:
    """
    Raises:
        FileNotFoundError: there is none; a directory in its place is no file either.
    """
    try:
        return path.open("rb")
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(str(error)) from None


class BucketVersions:
    """A version is what its manifest names."""

    def __init__(self, objects: BucketObjects) -> None:
        self._objects = objects

    def where(self, version: int, *, staged: bool = False) -> str:
        return self._objects.where(self._manifest(version, staged=True) if staged else f"weights/v{version:05d}")

    def _manifest(self, version: int, *, staged: bool) -> str:
        return f"weights/staged-v{version:05d}.json" if staged else f"weights/v{version:05d}/{MANIFEST}"

    def _file(self, version: int, sha256: str) -> str:
        return f"weights/v{version:05d}/{sha256}{_SUFFIX}"

    def numbers(self) -> list[int]:
        return self._numbers(self._objects.sizes("weights"))

    def _numbers(self, keys: Collection[str]) -> list[int]:
        found = (re.fullmatch(rf"weights/{_VERSION.pattern}/{MANIFEST}", key) for key in keys)
        return sorted(int(match[1]) for match in found if match)

    def has(self, version: int, *, staged: bool = False) -> bool:
        return self._objects.size(self._manifest(version, staged=staged)) is not None

    def attempt(self, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, version: int, name: str, content: Content) -> str:
        whole = bytes(content)
        digest = new_sha256(whole).hexdigest()
        self._objects.put(self._file(version, digest), whole)
        return digest

    def stage(self, version: int, manifest: bytes) -> None:
        self._objects.put(self._manifest(version, staged=True), manifest)

    def manifest(self, version: int, *, staged: bool = False) -> bytes:
        key = self._manifest(version, staged=staged)
        content = self._objects.get(key)
        if content is None:
            raise FileNotFoundError(f"{self._objects.where(key)}: no such object")
        return content

    def found(self, version: int, name: str, sha256: str, *, staged: bool = False) -> tuple[int, str]:
        """Only the size is looked up: the store checked what it was sent, and readers check what they get."""
        size = self._objects.size(self._file(version, sha256))
        if size is None:
            raise FileNotFoundError
        return size, sha256

    def publish(self, version: int) -> None:
        self._objects.put(self._manifest(version, staged=False), self.manifest(version, staged=True))
        self.drop(version)

    def drop(self, version: int) -> None:
        self._objects.delete(self._manifest(version, staged=True))

    def read(self, version: int, name: str, sha256: str) -> bytes:
        content = self._objects.get(self._file(version, sha256))
        if content is None:
            raise FileNotFoundError
        return content

    def source(self, version: int, name: str, sha256: str) -> Source:
        return self._objects.source(self._file(version, sha256))

    def retain(self, keep: Collection[int]) -> None:
        """Manifests are deleted first; what a kill left of older versions, or of a deleted one, is deleted, too. So is
        what was staged of any of them."""
        keys = self._objects.sizes("weights")
        published = self._numbers(keys)
        newest = max(published, default=-1)
        self._objects.delete(*(self._manifest(version, staged=False) for version in published if version not in keep))
        left = (self._manifest(version, staged=True) for version in range(newest + 1))
        self._objects.delete(*(key for key in left if key in keys))
        for key in keys:
            match = re.match(rf"weights/{_VERSION.pattern}/", key)
            if match and int(match[1]) not in keep and int(match[1]) <= newest:
                self._objects.delete(key)
