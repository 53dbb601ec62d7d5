"""Bytes under keys, in a directory or in an object store: where a run's small records and its weights lie.

An object appears whole or not at all, and one that is created exclusively has one creator. Other modules decide what
lies where. A store that does not answer is asked again for a bounded time, then an error names it. Keys and passwords
come from the environment, as each store's own clients read them, and are never part of an address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache, partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, Protocol, TypeVar
from uuid import uuid4

from spotlight.files import OBJECT_SCHEMES, SECRETS_COME_FROM, check_url, is_url
from spotlight.records import SpotlightError
from spotlight.store.node import Source, from_file

T = TypeVar("T")

RETRY_S = 45.0
"""After so long without an answer, a store is out of reach: longer than a fail-over, shorter than a lease."""
FIRST_RETRY_S = 4.0
"""As `RETRY_S`, before anything depends on the store: its address may be wrong, and a person waits."""
BACKOFF: Any = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 3}
"""Pauses between two tries are drawn from 0.1 s to three times the last one; with a base of 2 they hardly grow."""
CLIENT_OPTIONS = {"connect_timeout": "5s", "timeout": "60s"}
"""Limits of one request; a part of a large object is 5 MB. They replace those that obstore takes from the environment,
so ``AWS_ALLOW_HTTP``, for a server without TLS, is read here."""


_LACKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""Errors of FAT, CIFS, gcsfuse and s3fs when a hard link is made, and of Lustre and NFS when a file is locked."""

_reached = set[str]()
"""Buckets that answered this process."""


class StoreError(SpotlightError, OSError):
    """An object store refused, or did not answer."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without this, tblib, with which Dask sends errors, cannot read one that has two builtin ancestors."""
        return type(self), self.args


class Objects(Protocol):
    """The objects below one place; any number of threads may use it.

    Methods raise `StoreError`, or OSError where the place is a directory.
    """

    def where(self, key: str) -> str:
        """Path or URL of a key, for people."""
        ...

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if it is not there."""
        ...

    def put(self, key: str, content: bytes | Iterable[memoryview], *, durable: bool = True) -> None:
        """Write a key, or replace it, atomically.

        Args:
            content: in one piece, or in several that are asked for one after the other.
            durable: whether it must be on the disk when this returns; not needed if it can be made again.
        """
        ...

    def opened(self, key: str, start: int, size: int) -> AbstractContextManager[BinaryIO]:
        """A file whose next bytes are this range of a key.

        Raises:
            OSError: it is not there, or has no such range.
        """
        ...

    def create(self, key: str, content: bytes) -> bool:
        """Put a key unless it is there; returns whether this call did."""
        ...

    def overwrite(self, key: str, content: bytes) -> bool:
        """Write over a key in place, for which a full disk has room, too. Unlike `put`, this is not atomic.

        Returns:
            Whether it was written: not if the old content is shorter, or the place is no directory.
        """
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """{key: its size in bytes}, of all keys below ``prefix/``."""
        ...

    def size(self, key: str) -> int | None:
        """Size of a key in bytes; None if it is not there."""
        ...

    def delete(self, *keys: str) -> None:
        """Delete keys; one that is not there is no error."""
        ...

    def delete_below(self, prefix: str) -> None:
        """Delete all keys below ``prefix/``."""
        ...

    def source(self, key: str) -> Source:
        """Reads ranges of a key."""
        ...


def objects_at(place: str | Path) -> Objects:
    """The objects in a directory, or at a URL.

    Raises:
        SpotlightError: nothing installed can open the URL.
    """
    return BucketObjects(str(place)) if is_url(place) else DirectoryObjects(Path(place))


class DirectoryObjects:
    """Objects as files. When one is written, a link in its place is not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, key: str) -> str:
        return str(self.path / key)

    def get(self, key: str) -> bytes | None:
        """
        Raises:
            SpotlightError: something that is no file is in its place.
        """
        return content_of(self.path / key)

    def put(self, key: str, content: bytes | Iterable[memoryview], *, durable: bool = True) -> None:
        with atomic_write(self._place(key), durable=durable) as file:
            file.writelines([content] if isinstance(content, bytes) else content)

    @contextlib.contextmanager
    def opened(self, key: str, start: int, size: int) -> Iterator[BinaryIO]:
        with (self.path / key).open("rb") as file:
            file.seek(start)
            yield file

    def create(self, key: str, content: bytes) -> bool:
        path = self._place(key)
        mine = path.with_name(f".{path.name}.{uuid4().hex}.part")
        try:
            with atomic_write(mine) as file:
                file.write(content)
            with needed_of(self.path, "hard links"):
                os.link(mine, path)  # whole from the first moment on
        except FileExistsError:
            if path.is_dir():
                raise not_a_file(path) from None
            return False
        finally:
            mine.unlink(missing_ok=True)
        return True

    def overwrite(self, key: str, content: bytes) -> bool:
        if (self.size(key) or 0) < len(content):
            return False
        with open(os.open(self.path / key, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as file:
            file.write(content)
            file.truncate()
            os.fsync(file)
        return True

    def sizes(self, prefix: str) -> dict[str, int]:
        walked = os.walk(self.path / prefix)  # which minds no folder that goes meanwhile
        found = (Path(folder, name) for folder, _, names in walked for name in names)
        whole = sorted(path for path in found if not path.name.endswith(".part"))
        keys = (str(path.relative_to(self.path)) for path in whole)
        return {key: size for key in keys if (size := self.size(key)) is not None}

    def size(self, key: str) -> int | None:
        try:
            found = (self.path / key).stat()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, *keys: str) -> None:
        for key in keys:
            (self.path / key).unlink(missing_ok=True)

    def delete_below(self, prefix: str) -> None:
        shutil.rmtree(self.path / prefix, ignore_errors=True)

    def source(self, key: str) -> Source:
        return from_file(self.path / key)

    def _place(self, key: str) -> Path:
        """Path at which to write a key; its directories are made, but not the root."""
        path = self.path / key
        if path.parent != self.path:
            for folder in reversed(PurePath(key).parents[:-1]):
                try:
                    (self.path / folder).mkdir(exist_ok=True)
                except FileExistsError:
                    raise SpotlightError(
                        f"{self.path / folder}: expected a directory, found a file: move it away, or delete it"
                    ) from None
        return path


class BucketObjects:
    """Objects of a store that obstore knows."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = object_store(self.url)

    def where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def get(self, key: str) -> bytes | None:
        import obstore

        with explaining(self.where(key), "read"), contextlib.suppress(FileNotFoundError):
            return retried(lambda: bytes(obstore.get(self._store, key).bytes()))
        return None

    def put(self, key: str, content: bytes | Iterable[memoryview], *, durable: bool = True) -> None:
        import obstore

        whole = content if isinstance(content, bytes) else b"".join(content)
        with explaining(self.where(key), "written"):
            retried(lambda: obstore.put(self._store, key, whole))

    @contextlib.contextmanager
    def opened(self, key: str, start: int, size: int) -> Iterator[BinaryIO]:
        yield BytesIO(self.source(key)("", start, size))

    def create(self, key: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with explaining(self.where(key), "written"):
            try:
                retried(lambda: obstore.put(self._store, key, content, mode="create"))
            except AlreadyExistsError:  # perhaps by this call's first try, whose answer was lost
                return self.get(key) == content
            return True

    def overwrite(self, key: str, content: bytes) -> bool:
        return False

    def sizes(self, prefix: str) -> dict[str, int]:
        import obstore

        with explaining(self.where(prefix), "listed"):
            found = retried(lambda: [meta for batch in obstore.list(self._store, prefix) for meta in batch])
        return {meta["path"]: meta["size"] for meta in sorted(found, key=lambda meta: meta["path"])}

    def size(self, key: str) -> int | None:
        import obstore

        with explaining(self.where(key), "read"), contextlib.suppress(FileNotFoundError):
            return retried(lambda: int(obstore.head(self._store, key)["size"]))
        return None

    def delete(self, *keys: str) -> None:
        import obstore

        for key in keys:
            with explaining(self.where(key), "deleted"), contextlib.suppress(FileNotFoundError):
                retried(partial(obstore.delete, self._store, key))

    def delete_below(self, prefix: str) -> None:
        self.delete(*self.sizes(prefix))

    def source(self, key: str) -> Source:
        import obstore

        def read(_: str, offset: int, length: int) -> bytes:
            with explaining(self.where(key), "read"):
                return retried(lambda: bytes(obstore.get_range(self._store, key, start=offset, length=length)))

        return read


def check_address(url: str) -> None:
    """
    Raises:
        SpotlightError: no run can be at this URL, or it holds a secret.
    """
    try:
        check_url(url)
    except ValueError as error:
        raise SpotlightError(str(error)) from None
    scheme = url.partition("://")[0]
    if scheme not in (*OBJECT_SCHEMES, "memory"):
        raise SpotlightError(f"{url}: expected a directory, or a URL of {', '.join(OBJECT_SCHEMES)}")


def check_reach(url: str) -> None:
    """Check within seconds that a store answers, the first time that this process uses it.

    Raises:
        StoreError: it does not.
    """
    bucket = "/".join(url.split("/")[:3])
    if bucket not in _reached:
        store = object_store(url, FIRST_RETRY_S)
        import obstore

        with explaining(url, "read"), contextlib.suppress(FileNotFoundError):
            obstore.head(store, "config.toml")
        _reached.add(bucket)


@lru_cache
def object_store(url: str, retry_s: float = RETRY_S) -> Any:
    """obstore's store of a URL, the same object for the same URL: so ``memory://`` is shared within a process.

    Args:
        retry_s: for how long an operation is tried again.

    Raises:
        SpotlightError: it cannot be opened.
    """
    if not find_spec("obstore"):
        raise SpotlightError(f"{url!r} cannot be opened: install obstore, which reads and writes object stores")
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore, from_url

    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore()
    retry: Any = {"max_retries": 1_000, "retry_timeout": timedelta(seconds=retry_s), "backoff": BACKOFF}
    options: Any = CLIENT_OPTIONS | {"allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1")}
    try:
        return from_url(url, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise SpotlightError(
            f"{url!r} cannot be opened: {first_line(error)}; give a URL of {', '.join(OBJECT_SCHEMES)}"
        ) from None


def retried(ask: Callable[[], T]) -> T:
    """Run an operation of a store, and repeat it while the connection breaks.

    obstore does not repeat what may have been done already; what is run here may be done twice.
    """
    pauses = pauses_s(RETRY_S)
    while True:
        try:
            return ask()
        except Exception as error:
            if not is_broken_line(error) or (pause_s := next(pauses, None)) is None:
                raise
            time.sleep(pause_s)


def pauses_s(retry_s: float) -> Iterator[float]:
    """Pauses between the tries of one operation, until ``retry_s`` after this call."""
    until_s = time.monotonic() + retry_s

    def growing() -> Iterator[float]:
        pause_s = 0.1
        while time.monotonic() < until_s:
            yield pause_s
            pause_s = min(2 * pause_s, 5.0)

    return growing()


def is_broken_line(error: Exception) -> bool:
    """Whether obstore got no answer at all; its errors of this kind have no class of their own."""
    return type(error).__module__.startswith("obstore") and "HTTP error" in str(error)


@contextlib.contextmanager
def explaining(where: str, done: str) -> Iterator[None]:
    """Turn obstore's errors into one sentence that says which object could not be read or written, and why.

    Raises:
        StoreError: with that sentence.
        FileNotFoundError: it is not there.
    """
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except NotFoundError as error:
        if done != "written":
            raise FileNotFoundError(str(error)) from None
        raise StoreError(
            f"{where}: cannot be written: there is no such bucket ({first_line(error)}); make it, or give the address "
            "of one that is there"
        ) from None
    except BaseError as error:
        without_tls = " a server without TLS needs AWS_ALLOW_HTTP=true;" if "builder error" in str(error) else ""
        raise StoreError(
            f"{where}: cannot be {done}: {first_line(error)};{without_tls} check the address, the network, and what "
            f"this user may do there ({SECRETS_COME_FROM}); what was committed is kept, and `spotlight resume` goes on"
        ) from None


def first_line(error: Exception) -> str:
    """The first line of a store client's error, without the headers and bodies that follow it."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def without_links(path: str, flags: int) -> int:
    """An opener for `open` that does not follow a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def needed_of(directory: Path, what: str) -> Iterator[None]:
    """Turn errors inside into one sentence if the file system of a run's directory lacks ``what``.

    Raises:
        SpotlightError: with that sentence.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LACKS:
            raise
        raise SpotlightError(
            f"{directory}: a run has one driver at a time by means of {what}, which this file system lacks "
            f"({error.strerror}): give a run.dir on a local disk, on NFS with its lock service, on Lustre mounted with "
            "-o flock, or at the URL of an object store"
        ) from None


def content_of(path: Path) -> bytes | None:
    """All of a file; None if it is not there.

    Raises:
        SpotlightError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> SpotlightError:
    """The error for a file that is there but cannot be read."""
    return SpotlightError(f"{path}: cannot be read: {error.strerror}; restore it, or delete it")


def not_a_file(path: Path) -> SpotlightError:
    """The error for a directory in the place of a file that is to be written."""
    return SpotlightError(f"{path}: expected a file, found a directory: move it away, or delete it")


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole and, if it is to be durable, on the disk.

    Raises:
        SpotlightError: a directory has its name.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:  # which follows no link
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if durable:
            flush(path.parent)
    except IsADirectoryError:
        raise not_a_file(path) from None
    finally:
        part.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
