"""Commits denoising steps to Zarr and finds the step to resume at.

It knows nothing of models or devices, and it is the only file that uses zarr. Under the store's URL lie ::

    latents/                          a Zarr v3 hierarchy, read by plain ``zarr.open``
      00003/steps/<request>.e2        (steps, B, N, C) float32, one chunk per step: what epoch 2 wrote
      00003/clean-1-32x16             (samples, N, C) float32, sharded: a compacted iteration
    commits/00003/<request>/
      claim.2                         epoch 2 is taken; holds its owner's token
      commit.2.5                      step 5 of epoch 2 is complete: digest, hash of the bytes, log-probs
    records/<name>                    small JSON values

Invariants:

- Every (request, epoch) has its own array and one owner, so no two writers share a chunk.
- A chunk is written first and its commit record last; a reader believes a record only if its own hash
  and the chunk's hash hold. Damage therefore means "one commit back", never wrong latents.
- Claims are made in sequence, so an epoch is stale exactly when the claim after it exists.

Durability: on a local path each key is a temporary file that is renamed, without fsync. A killed process
leaves whole keys and at most an orphan ``.partial``; a crashed *host* may lose or tear what it had not
yet flushed, which the hashes then find. Claims are exclusive on local paths and on the object stores of
obstore; on other fsspec file systems the underlying check-then-set lets two simultaneous claims
both win, so give each request one worker there.

Shapes: B samples of a request, N latent tokens, C channels, K latents of a window, S = K - 1 steps in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray
from zarr.abc.store import Store
from zarr.buffer.cpu import Buffer, buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from spotlight.records import Request, SpotlightError

Float32 = NDArray[np.float32]

_OBSTORE_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")
"""Preferred over fsspec where obstore is installed: it creates a key exclusively."""

_SHARD_BYTES = 64 * 2**20
"""A shard is built in memory and uploaded whole; 64 MiB is ample for throughput and small for a host."""

_COMMIT = re.compile(r"commit\.(\d+)\.(\d+)")
_CLAIM = re.compile(r"claim\.(\d+)")
_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "value": (.*)\}')


class StaleEpoch(Exception):
    """Another worker has taken over this request; stop working on it."""


class MissingLatents(Exception):
    """Latents that were asked for are absent, or every copy is corrupt; run the request again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where work on a request goes on."""

    epoch: int
    """The caller's own; every older one can no longer commit."""
    step: int
    """Steps done; 0 when nothing usable is committed."""
    x_BNC: Float32 | None
    """The latents after those steps; None when ``step`` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    """What a commit record says."""

    iteration: int
    request_id: str
    digest: str
    epoch: int
    step: int
    steps: int
    """Of its request; a commit with ``step == steps`` holds clean latents."""
    shape: Sequence[int]
    """(B, N, C)."""
    sha256: str
    """Of the chunk, which is the latents' float32 bytes."""
    log_prob_B: list[float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compacted:
    """Where a request's clean latents are once its iteration was compacted."""

    iteration: int
    array: str
    start: int
    """First row; there are ``shape[0]`` of them."""
    shape: Sequence[int]
    sha256: str


class LatentStore:
    """The committed steps and small records of one run.

    One object serves any number of threads, and keeps its handles open; each process makes its own.
    """

    def __init__(self, url: str) -> None:
        """Open a store; nothing is written yet.

        Args:
            url: a local path, or ``scheme://...``: obstore serves file, s3, gs and az, fsspec all others.

        Raises:
            SpotlightError: nothing installed can open the URL.
        """
        self.url = url
        self._store = _open(url)
        self._ready: set[str] = set()

    def resume(self, request: Request) -> Resume:
        """Take the request over: claim a new epoch, then find its highest commit that verifies.

        Commits of any epoch count, as long as they were made for a request with the same digest.
        """
        return sync(self._resume(request))

    def commit(
        self, request: Request, epoch: int, step: int, x_BNC: ArrayLike, log_prob_B: ArrayLike | None = None
    ) -> None:
        """Store the latents after ``step`` steps; when this returns, `resume` finds them.

        Called again with the same values it writes the same bytes. An owner that loses its epoch
        between the check and the record still leaves a true commit, which a later epoch may use.

        Args:
            epoch: as `resume` gave it.
            step: number of steps done, from 1 to ``request.steps``.
            x_BNC: any float dtype, stored as float32.
            log_prob_B: the worker's log-probability of this step, nats per element, if it has one.

        Raises:
            StaleEpoch: a newer epoch was claimed, or someone else commits under this one.
            OSError: the store refused, for example because the disk is full; earlier commits stay.
        """
        x_BNC = np.asarray(x_BNC, dtype="<f4")
        B = len(request.seeds)
        assert x_BNC.shape == (B, *x_BNC.shape[-2:]), f"expected ({B}, N, C), got {x_BNC.shape}"
        assert 1 <= step <= request.steps, f"step {step} of {request.steps}"
        if log_prob_B is not None:
            log_prob_B = np.asarray(log_prob_B, dtype=np.float32)
            assert log_prob_B.shape == (B,), f"expected ({B},), got {log_prob_B.shape}"
        chunk = x_BNC.tobytes()
        commit = _Commit(
            iteration=request.iteration,
            request_id=request.id,
            digest=request.digest,
            epoch=epoch,
            step=step,
            steps=request.steps,
            shape=x_BNC.shape,
            sha256=sha256(chunk).hexdigest(),
            log_prob_B=None if log_prob_B is None else log_prob_B.tolist(),
        )
        path = _steps_path(request.iteration, request.id, epoch)
        self._create_steps(path, request.iteration, (request.steps, *x_BNC.shape))
        sync(self._commit(commit, chunk))

    def writer(self, request: Request, epoch: int) -> Writer:
        """Commit in the background while the next step is computed; use it as a context manager."""
        return Writer(self, request, epoch)

    def clean(self, request: Request) -> Float32:
        """The final latents, shape (B, N, C), also after the iteration was compacted.

        Raises:
            MissingLatents: there are none, or no copy verifies.
        """
        (found,) = sync(self._find(request, [request.steps]))
        if found is not None:
            return found[1]
        compacted = self._index(request.iteration).get(request.digest)
        x_BNC = None if compacted is None else self._rows(compacted)
        if x_BNC is None:
            raise MissingLatents(f"{self.url}: request {request.id} has no clean latents that verify; run it again")
        return x_BNC

    def window(self, request: Request, initial_BNC: ArrayLike) -> tuple[Float32, Float32]:
        """Latents and log-probabilities of the request's stochastic steps.

        With ``start, end = request.window`` there are ``S = end - start`` steps between ``K = S + 1`` latents.

        Args:
            initial_BNC: the noise at step 0, which is not stored; used only when ``start`` is 0.

        Returns:
            Latents at steps ``start`` to ``end`` inclusive, shape (B, K, N, C), and the worker's
            log-probabilities of the steps between them, shape (B, S); NaN where it gave none.

        Raises:
            MissingLatents: a step is absent, every copy of it is corrupt, or it was compacted away.
        """
        start, end = request.window
        steps = range(max(start, 1), end + 1)
        latents, log_probs = [], []
        if start == 0:
            latents.append(np.asarray(initial_BNC, dtype=np.float32))
        for step, found in zip(steps, sync(self._find(request, steps)), strict=True):
            if found is None:
                raise MissingLatents(
                    f"{self.url}: request {request.id}: step {step} of its window {start} to {end} is absent or "
                    "corrupt; run the request again"
                )
            commit, x_BNC = found
            latents.append(x_BNC)
            if step > start:
                log_probs.append(commit.log_prob_B or [np.nan] * len(request.seeds))
        return np.stack(latents, axis=1), np.array(log_probs, np.float32).reshape(-1, len(request.seeds)).T

    def put_record(self, name: str, value: Mapping[str, Any]) -> None:
        """Store a small JSON value under a name, replacing what was there at once."""
        sync(self._set(_record_key(name), _seal(value)))

    def get_record(self, name: str) -> dict[str, Any] | None:
        """The value put under a name; None if there is none or it does not verify. Tuples come back as lists."""
        return _unseal(sync(self._get(_record_key(name))))

    def finish_iteration(self, iteration: int, keep: Literal["clean", "all", "none"]) -> None:
        """Compact an iteration that nobody works on any more, and remove what is not kept.

        ``clean`` moves the clean latents of its complete requests into one sharded array (one per latent
        shape, should they differ) and removes everything else; ``all`` keeps every step; ``none`` removes
        the iteration. Call it again after a kill: old data goes only after its copy verifies.
        Orphan ``.partial`` files of killed writers go in any case. Records stay.

        Raises:
            SpotlightError: the compacted copy does not read back as written; nothing was removed.
        """
        root, commits = _iteration_path(iteration), f"commits/{iteration:05d}"
        for prefix in (root, commits):
            sync(self._remove_partials(prefix))
        if keep == "all":
            return
        doomed = [commits, root]
        if keep == "clean":
            kept = {"zarr.json", *(row.array for row in self._compact(iteration).values())}
            doomed = [commits, *(f"{root}/{name}" for name in sync(self._names(root)) if name not in kept)]
        else:
            sync(self._store.delete(_record_key(_index_name(iteration))))
        for prefix in doomed:
            sync(self._store.delete_dir(prefix))
        self._forget(iteration)

    def _forget(self, iteration: int) -> None:
        """The arrays and groups of an iteration are gone: make them again if they are needed again."""
        self._ready = {path for path in self._ready if not f"{path}/".startswith(f"{_iteration_path(iteration)}/")}

    def _compact(self, iteration: int) -> dict[str, _Compacted]:
        """Bring all clean latents into compacted arrays; return their index, {request digest: where they are}.

        Arrays that the present index names are never written again: new requests make a new generation.
        """
        index = self._index(iteration)
        old = {digest: row for digest, row in index.items() if self._rows(row) is not None}
        new = {digest: row for digest, row in sync(self._complete(iteration)).items() if digest not in old}
        if not new:
            return index
        sources: dict[str, _Compacted | _Commit] = {**old, **new}
        by_shape: dict[tuple[int, ...], dict[str, _Compacted | _Commit]] = {}
        for digest, source in sorted(sources.items()):
            by_shape.setdefault(tuple(source.shape[1:]), {})[digest] = source
        generation = 1 + max((int(row.array.split("-")[1]) for row in index.values()), default=0)
        rows: dict[str, _Compacted] = {}
        for same in by_shape.values():
            rows |= self._write_clean(iteration, generation, same)
        if any(self._rows(row) is None for row in rows.values()):
            raise SpotlightError(
                f"{self.url}: iteration {iteration}: compacted latents do not read back as written; "
                "the committed steps were kept: check the disk, then `spotlight resume`"
            )
        self.put_record(_index_name(iteration), {digest: asdict(row) for digest, row in rows.items()})
        return rows

    def _write_clean(
        self, iteration: int, generation: int, sources: Mapping[str, _Compacted | _Commit]
    ) -> dict[str, _Compacted]:
        """Write requests of one latent shape, shard by shard: memory holds one shard and one request."""
        samples = sum(source.shape[0] for source in sources.values())
        _, N, C = next(iter(sources.values())).shape
        shard_samples = max(1, min(samples, _SHARD_BYTES // (4 * N * C)))
        name = f"clean-{generation}-{N}x{C}"
        path = f"{_iteration_path(iteration)}/{name}"
        metadata = _array_metadata(("sample", "token", "channel"), (samples, N, C), (1, N, C), (shard_samples, N, C))
        sync(self._store.delete_dir(path))
        sync(self._set(f"{path}/zarr.json", metadata))
        array = zarr.open_array(self._store, path=path, mode="r+")
        rows: dict[str, _Compacted] = {}
        start, flushed, pending = 0, 0, np.empty((0, N, C), np.float32)
        for digest, source in sources.items():
            x_BNC = self._rows(source) if isinstance(source, _Compacted) else sync(self._latents(source))
            assert x_BNC is not None, f"{source} was verified a moment ago"
            pending = np.concatenate([pending, x_BNC])
            rows[digest] = _Compacted(
                iteration=iteration, array=name, start=start, shape=list(x_BNC.shape), sha256=source.sha256
            )
            start += len(x_BNC)
            whole = len(pending) if start == samples else len(pending) // shard_samples * shard_samples
            if whole:
                array[flushed : flushed + whole] = pending[:whole]
                flushed, pending = flushed + whole, pending[whole:]
        return rows

    def _index(self, iteration: int) -> dict[str, _Compacted]:
        index = self.get_record(_index_name(iteration)) or {}
        return {digest: _Compacted(**row) for digest, row in index.items()}

    def _rows(self, row: _Compacted) -> Float32 | None:
        """One request's rows of a compacted array; None if they are absent or do not verify."""
        try:
            array = zarr.open_array(self._store, path=f"{_iteration_path(row.iteration)}/{row.array}", mode="r")
            x_BNC = np.asarray(array[row.start : row.start + row.shape[0]], dtype="<f4")
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            # What zarr makes of a missing array, damaged metadata or a shard whose index fails its CRC.
            # A store that cannot be reached raises something else: that is no proof of damage.
            return None
        return x_BNC if sha256(x_BNC.tobytes()).hexdigest() == row.sha256 else None

    def _create_steps(self, path: str, iteration: int, shape: tuple[int, ...]) -> None:
        """Make the array of one (request, epoch) and the groups above it, once; races write the same bytes."""
        if path in self._ready:
            return
        root = _iteration_path(iteration)
        metadata = {group: _group_metadata() for group in ("latents", root, f"{root}/steps")}
        metadata[path] = _array_metadata(("step", "sample", "token", "channel"), shape, (1, *shape[1:]))
        for node, value in metadata.items():
            if node not in self._ready:
                sync(self._store.set_if_not_exists(f"{node}/zarr.json", Buffer.from_bytes(value)))
                self._ready.add(node)

    async def _commit(self, commit: _Commit, chunk: bytes) -> None:
        folder = _commits_path(commit.iteration, commit.request_id)
        await self._set(_chunk_key(commit), chunk)
        if await self._store.exists(f"{folder}/claim.{commit.epoch + 1}"):
            raise StaleEpoch(
                f"request {commit.request_id}: another worker took it over from epoch {commit.epoch}; "
                f"step {commit.step} was not committed"
            )
        key, record = f"{folder}/commit.{commit.epoch}.{commit.step}", _seal(asdict(commit))
        await self._store.set_if_not_exists(key, Buffer.from_bytes(record))
        if await self._get(key) != record:
            # The store does not tell whether it wrote: reading back does.
            raise StaleEpoch(
                f"request {commit.request_id}: step {commit.step} of epoch {commit.epoch} is committed already, "
                "with other values"
            )

    async def _resume(self, request: Request) -> Resume:
        folder = _commits_path(request.iteration, request.id)
        claims = (_CLAIM.fullmatch(name) for name in await self._names(folder))
        epoch = 1 + max((int(claim[1]) for claim in claims if claim), default=0)
        token = uuid4().hex.encode()
        while True:
            await self._store.set_if_not_exists(f"{folder}/claim.{epoch}", Buffer.from_bytes(token))
            if await self._get(f"{folder}/claim.{epoch}") == token:
                break
            epoch += 1
        if _steps_path(request.iteration, request.id, epoch) in self._ready:
            self._forget(request.iteration)  # an epoch comes twice only if another process removed the iteration
        # Only now, so that all that older epochs managed to commit counts.
        async for commit in self._records(request.iteration, request.id):
            if commit.digest == request.digest:
                x_BNC = await self._latents(commit)
                if x_BNC is not None:
                    return Resume(epoch=epoch, step=commit.step, x_BNC=x_BNC)
        return Resume(epoch=epoch, step=0, x_BNC=None)

    async def _find(self, request: Request, steps: Sequence[int]) -> list[tuple[_Commit, Float32] | None]:
        """For each step its newest commit that verifies and belongs to this very request."""
        found: dict[int, tuple[_Commit, Float32]] = {}
        async for commit in self._records(request.iteration, request.id):
            if commit.step in steps and commit.step not in found and commit.digest == request.digest:
                x_BNC = await self._latents(commit)
                if x_BNC is not None:
                    found[commit.step] = (commit, x_BNC)
        return [found.get(step) for step in steps]

    async def _complete(self, iteration: int) -> dict[str, _Commit]:
        """Verified commits of clean latents, {request digest: commit}."""
        complete: dict[str, _Commit] = {}
        for request_id in sorted(await self._names(f"commits/{iteration:05d}")):
            async for commit in self._records(iteration, request_id):
                fresh = commit.step == commit.steps and commit.digest not in complete
                if fresh and await self._latents(commit) is not None:
                    complete[commit.digest] = commit
        return complete

    async def _records(self, iteration: int, request_id: str) -> AsyncIterator[_Commit]:
        """Commits of a request whose record verifies, the furthest step first, among equals the newest epoch."""
        folder = _commits_path(iteration, request_id)
        matches = [match for name in await self._names(folder) if (match := _COMMIT.fullmatch(name))]
        for match in sorted(matches, key=lambda match: (-int(match[2]), -int(match[1]))):
            record = _unseal(await self._get(f"{folder}/{match[0]}"))
            if record is not None:
                yield _Commit(**record)

    async def _latents(self, commit: _Commit) -> Float32 | None:
        """The latents of a commit, or None if they are absent or do not verify."""
        chunk = await self._get(_chunk_key(commit))
        if chunk is None or sha256(chunk).hexdigest() != commit.sha256:
            return None
        return np.frombuffer(chunk, dtype="<f4").reshape(commit.shape).copy()

    async def _get(self, key: str) -> bytes | None:
        value = await self._store.get(key, prototype=buffer_prototype)
        return None if value is None else value.to_bytes()

    async def _set(self, key: str, value: bytes) -> None:
        await self._store.set(key, Buffer.from_bytes(value))

    async def _names(self, prefix: str) -> list[str]:
        return [name.strip("/") async for name in self._store.list_dir(prefix)]

    async def _remove_partials(self, prefix: str) -> None:
        for key in [key async for key in self._store.list_prefix(prefix + "/")]:
            if key.endswith(".partial"):
                await self._store.delete(key)


class Writer:
    """Commits a request's steps on one background thread while the next step is computed.

    At most one commit is under way: a kill loses the step being computed, and the one before it only
    if the kill falls within a commit's latency.
    """

    def __init__(self, store: LatentStore, request: Request, epoch: int) -> None:
        self._store = store
        self._request = request
        self._epoch = epoch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="latents")
        self._pending: Future[None] | None = None

    def commit(self, step: int, x_BNC: ArrayLike, log_prob_B: ArrayLike | None = None) -> None:
        """Wait for the commit before, hand this one over and return; arguments as `LatentStore.commit`.

        The arrays are copied, so the caller may reuse them at once.

        Raises:
            StaleEpoch, OSError: the commit *before* this one failed; this one is not tried.
        """
        self.wait()
        x_BNC = np.array(x_BNC, dtype=np.float32)
        log_prob_B = None if log_prob_B is None else np.array(log_prob_B, dtype=np.float32)
        self._pending = self._thread.submit(self._store.commit, self._request, self._epoch, step, x_BNC, log_prob_B)

    def wait(self) -> None:
        """Return once everything handed over is committed, or raise what went wrong."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _open(url: str) -> Store:
    scheme, separator, _ = url.partition("://")
    if not separator:
        return LocalStore(Path(url))
    if scheme in _OBSTORE_SCHEMES and find_spec("obstore"):
        from obstore.store import from_url

        return ObjectStore(from_url(url, mkdir=True) if scheme == "file" else from_url(url))
    try:
        return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise SpotlightError(
            f"latents.url = {url!r} cannot be opened: {error}; give a local path, install obstore for "
            f"{', '.join(_OBSTORE_SCHEMES)}, or the fsspec package of {scheme}"
        ) from error


def _seal(value: Mapping[str, Any]) -> bytes:
    """JSON that carries the hash of the value's own text, so that a torn or altered one is recognised."""
    body = json.dumps(value)
    return f'{{"sha256": "{sha256(body.encode()).hexdigest()}", "value": {body}}}'.encode()


def _unseal(sealed: bytes | None) -> dict[str, Any] | None:
    """The value of `_seal`; None if it is absent or its hash does not hold."""
    match = _SEALED.fullmatch(sealed or b"")
    if match is None or sha256(match[2]).hexdigest().encode() != match[1]:
        return None
    value: dict[str, Any] = json.loads(match[2])
    return value


@lru_cache
def _group_metadata() -> bytes:
    store = MemoryStore()
    zarr.create_group(store)
    return _metadata(store)


@lru_cache
def _array_metadata(
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


def _iteration_path(iteration: int) -> str:
    return f"latents/{iteration:05d}"


def _steps_path(iteration: int, request_id: str, epoch: int) -> str:
    return f"{_iteration_path(iteration)}/steps/{request_id}.e{epoch}"


def _chunk_key(commit: _Commit) -> str:
    """Step 1 is the first chunk: the noise before it is not stored."""
    path = _steps_path(commit.iteration, commit.request_id, commit.epoch)
    return f"{path}/c.{commit.step - 1}.0.0.0"


def _commits_path(iteration: int, request_id: str) -> str:
    return f"commits/{iteration:05d}/{request_id}"


def _index_name(iteration: int) -> str:
    return f"clean-{iteration:05d}"


def _record_key(name: str) -> str:
    assert re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name), f"not a record name: {name!r}"
    return f"records/{name}"
