"""Keys, sealed JSON and float32 arrays in a Zarr store.

The only file that uses zarr. It knows nothing of requests and commits: what is stored where is decided by `latents`
and `compaction`.

Durability: on a local path each key is a temporary file that is renamed, without fsync. A killed process
leaves whole keys and at most an orphan ``.partial``; a crashed *host* may lose or tear what it had not
yet flushed, which a hash of the content then finds. Keys are created exclusively on local paths and on the object
stores of obstore; on other fsspec file systems the underlying check-then-set lets two at once both create.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.buffer.cpu import Buffer, buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from spotlight.files import OBJECT_SCHEMES
from spotlight.records import SpotlightError
from spotlight.store.objects import (
    FIRST_RETRY_S,
    RETRY_S,
    explaining,
    first_line,
    is_broken_line,
    object_store,
    pauses_s,
)

S = TypeVar("S")
T = TypeVar("T")
Float32 = NDArray[np.float32]

run = sync
"""Runs a coroutine of a store on zarr's event loop and returns its value, from any thread."""

AT_ONCE = 16
"""Operations on a store at a time; the latents of so many requests are in memory meanwhile."""

PARTIAL = ".partial"
"""Ends the names of local files that are being written."""

PROBE_S = 20.0
"""A store answers within a second; clients try again for minutes before they give up."""

_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "value": (.*)\}')


class ZarrStore:
    """Keys and arrays under one URL; any number of threads may use it."""

    def __init__(self, url: str, retry_s: float = RETRY_S) -> None:
        """Open a store; nothing is written yet.

        Args:
            retry_s: for how long an object store is asked again.

        Raises:
            SpotlightError: nothing installed can open the URL.
        """
        self.url, self._retry_s = url, retry_s
        self._store = _open(url, retry_s)
        self._explaining = explaining if isinstance(self._store, ObjectStore) else _as_it_is

    async def get(self, key: str) -> bytes | None:
        """The bytes of a key; None if it is not there."""
        value = await self._ask(key, "read", lambda: self._store.get(key, prototype=buffer_prototype))
        return None if value is None else value.to_bytes()

    async def set(self, key: str, value: bytes) -> None:
        await self._ask(key, "written", lambda: self._store.set(key, Buffer.from_bytes(value)))

    async def create(self, key: str, value: bytes) -> None:
        """Write a key unless it is there. The store does not tell whether it wrote: reading back does."""
        await self._ask(key, "written", lambda: self._store.set_if_not_exists(key, Buffer.from_bytes(value)))

    async def exists(self, key: str) -> bool:
        return await self._ask(key, "read", lambda: self._store.exists(key))

    async def names(self, prefix: str) -> list[str]:
        """Names directly under a prefix."""

        async def listed() -> list[str]:
            return [name.strip("/") async for name in self._store.list_dir(prefix)]

        return await self._ask(prefix, "listed", listed)

    async def delete(self, key: str) -> None:
        await self._ask(key, "deleted", lambda: self._store.delete(key))

    async def delete_all(self, prefix: str) -> None:
        """Remove every key under a prefix."""
        await self._ask(prefix, "deleted", lambda: self._store.delete_dir(prefix))

    async def _ask(self, key: str, done: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Run an operation of the store, and repeat it while the connection breaks, as `objects.retried` does."""
        pauses = pauses_s(self._retry_s)
        with self._explaining(f"{self.url}/{key}", done):
            while True:
                try:
                    return await ask()
                except Exception as error:
                    if not is_broken_line(error) or (pause_s := next(pauses, None)) is None:
                        raise
                    await asyncio.sleep(pause_s)

    async def delete_partials(self, prefix: str) -> None:
        """Remove what killed writers left under a prefix."""
        with self._explaining(f"{self.url}/{prefix}", "listed"):
            found = [key async for key in self._store.list_prefix(prefix + "/") if key.endswith(PARTIAL)]
        for key in found:
            await self.delete(key)

    def write_rows(self, path: str, start: int, rows: Float32) -> None:
        """Write rows of an existing float32 array."""
        with self._explaining(f"{self.url}/{path}", "written"):
            array = zarr.open_array(self._store, path=path, mode="r+", zarr_format=3)
            array[start : start + len(rows)] = rows

    def rows(self, path: str, start: int, stop: int) -> Float32 | None:
        """Rows of a float32 array; None if they are absent or damaged."""
        try:
            with self._explaining(f"{self.url}/{path}", "read"):
                array = zarr.open_array(self._store, path=path, mode="r", zarr_format=3)
                return np.asarray(array[start:stop], dtype="<f4")
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            # What zarr raises for a missing array, damaged metadata or a shard whose index fails its CRC.
            # A store that cannot be reached raises something else: that is no proof of damage.
            return None


async def all_of(ask: Callable[[S], Awaitable[T]], about: Iterable[S]) -> list[T]:
    """The results of ``ask`` for each item, in order; `AT_ONCE` calls run at a time.

    When this returns, or raises the first error, no call is still running.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def asked(each: S) -> T:
        async with turn:
            return await ask(each)

    answers = await asyncio.gather(*map(asked, about), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[T], answers)


@contextlib.contextmanager
def _as_it_is(where: str, done: str) -> Iterator[None]:
    """Pass errors on unchanged: those of stores other than obstore's say enough."""
    yield


def check_url(url: str) -> None:
    """Write, read and delete a key, so that a place that cannot be used is found before work goes there.

    Raises:
        SpotlightError: it cannot be used.
    """
    store = ZarrStore(url, FIRST_RETRY_S)
    try:
        sync(_probe(store))
    except TimeoutError:
        raise SpotlightError(
            f"latents.url = {url!r} cannot be used: no answer within {PROBE_S:g} s; check the address and the network"
        ) from None
    except Exception as error:  # each kind of store has errors of its own
        why = error.__cause__ if isinstance(error, SpotlightError) and error.__cause__ else error
        said = str(why).strip().splitlines() or [type(why).__name__]
        raise SpotlightError(
            f"latents.url = {url!r} cannot be used: {said[0]}; give a place that this user may write to"
        ) from error


async def _probe(store: ZarrStore) -> None:
    key, value = f"probe-{uuid4().hex}", b"spotlight"
    async with asyncio.timeout(PROBE_S):
        await store.set(key, value)
        found = await store.get(key)
        await store.delete(key)
    if found != value:
        raise OSError("what was written does not read back")


def _open(url: str, retry_s: float) -> Store:
    scheme, separator, _ = url.partition("://")
    if not separator:
        return LocalStore(Path(url))
    if scheme in OBJECT_SCHEMES and find_spec("obstore"):
        return ObjectStore(object_store(url, retry_s))
    try:
        if scheme == "file" and find_spec("obstore"):
            from obstore.exceptions import BaseError
            from obstore.store import from_url

            if urlsplit(url).netloc not in ("", "localhost"):
                raise ValueError("a path follows three slashes, as in file:///scratch/latents")
            try:
                return ObjectStore(from_url(url, mkdir=True))
            except BaseError as error:
                raise OSError(first_line(error)) from None
        return FsspecStore.from_url(url)
    except (ImportError, ValueError, OSError) as error:
        raise SpotlightError(
            f"latents.url = {url!r} cannot be opened: {error}; give a local path, install obstore for "
            f"{', '.join(OBJECT_SCHEMES)}, or the fsspec package of {scheme}"
        ) from error


def seal(value: Mapping[str, Any]) -> bytes:
    """JSON that carries the hash of the value's own text, so that a torn or altered one is recognised."""
    body = json.dumps(value)
    return f'{{"sha256": "{sha256(body.encode()).hexdigest()}", "value": {body}}}'.encode()


def unseal(sealed: bytes | None) -> dict[str, Any] | None:
    """The value of `seal`; None if it is absent or its hash does not hold."""
    match = _SEALED.fullmatch(sealed or b"")
    if match is None or sha256(match[2]).hexdigest().encode() != match[1]:
        return None
    value: dict[str, Any] = json.loads(match[2])
    return value


@lru_cache
def group_metadata() -> bytes:
    """The ``zarr.json`` of a group."""
    store = MemoryStore()
    zarr.create_group(store)
    return _metadata(store)


@lru_cache
def array_metadata(
    names: tuple[str, ...], shape: tuple[int, ...], chunks: tuple[int, ...], shards: tuple[int, ...] | None = None
) -> bytes:
    """The ``zarr.json`` of a float32 array: made by zarr once per shape, since that costs more than a commit.

    Uncompressed, because a step's chunk then *is* the bytes that its commit hashes, and noise does not compress.
    """
    store = MemoryStore()
    zarr.create_array(
        store,
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype="float32",
        filters=None,
        compressors=None,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=names,
    )
    return _metadata(store)


def _metadata(store: MemoryStore) -> bytes:
    value = sync(store.get("zarr.json", prototype=buffer_prototype))
    assert value is not None
    return value.to_bytes()
