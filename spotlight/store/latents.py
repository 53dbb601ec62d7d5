"""Commits denoising steps to Zarr and finds the step to resume at.

It knows nothing of models or devices. Under the store's URL lie ::

    latents/                          a Zarr v3 hierarchy, read by plain ``zarr.open``
      00003/steps/<request>.e2        (steps, B, N, C) float32, one chunk per step: what epoch 2 wrote
      00003/clean-1-32x16             (samples, N, C) float32, sharded: a compacted iteration
    commits/00003/<request>/
      claim.2                         epoch 2 is taken; holds its owner's token
      commit.2.5                      step 5 of epoch 2 is complete: digest, hash of the bytes, log-probs
    images/00003/<request>            decoded images of a request, from their decoding until it is scored elsewhere
    records/<name>                    small JSON values
      scores/<request>                what a request was scored
      scores-00003                    the scores of all requests of a compacted iteration

Invariants:

- Every (request, epoch) has its own array and one owner, so no two writers share a chunk.
- A chunk is written first and its commit record last; a reader believes a record only if its own hash
  and the chunk's hash hold. Damage therefore means "one commit back", never wrong latents.
- Claims are made in sequence, so an epoch is stale exactly when the next claim exists, or its own no longer does:
  compaction removes the claims of an iteration.

On file systems where `zarr_store` cannot create a key exclusively, two simultaneous claims may both win: give each
request one worker there.

Shapes: B samples of a request, N latent tokens, C channels, K latents of a window, S = K - 1 steps in it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from functools import cache, partial
from hashlib import sha256
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spotlight.records import Request, record
from spotlight.store import compaction
from spotlight.store.compaction import Clean, index_key, iteration_path
from spotlight.store.zarr_store import (
    PARTIAL,
    Float32,
    ZarrStore,
    all_of,
    array_metadata,
    group_metadata,
    run,
    seal,
    unseal,
)

_COMMIT = re.compile(r"commit\.(\d+)\.(\d+)")
_CLAIM = re.compile(r"claim\.(\d+)")
RECENT = 3
"""Iterations before and after the present one whose existing arrays are remembered."""


class StaleEpoch(Exception):
    """Another worker has taken over this request; stop working on it."""


class MissingLatents(Exception):
    """Latents that were asked for are absent, or every copy is corrupt; run the request again."""


@record
class Resume:
    """Where work on a request goes on."""

    epoch: int
    """The caller's own; every older one can no longer commit."""
    step: int
    """Steps done; 0 when nothing usable is committed."""
    x_BNC: Float32 | None
    """The latents after those steps; None when ``step`` is 0."""
    before_BNC: Float32 | None = None
    """The latents a step earlier, of a request that looks back; None when ``step`` is below 2."""


@record
class _Commit:
    """What a commit record says."""

    iteration: int
    request_id: str
    digest: str
    epoch: int
    step: int
    steps: int
    """Steps of its request; a commit with ``step == steps`` holds clean latents."""
    shape: Sequence[int]
    """(B, N, C)."""
    sha256: str
    """Hash of the chunk, which is the latents' float32 bytes."""
    log_prob_B: list[float] | None


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
        self._store = ZarrStore(url)
        self._ready: set[str] = set()
        """Arrays and groups that exist. It is copied before it is looked through: another thread may add to it."""

    def resume(self, request: Request) -> Resume:
        """Take the request over: claim a new epoch, then find its highest commit that verifies.

        If the request looks back, the commit before that one verifies, too. Commits of any epoch count, as long as they
        were made for a request with the same digest.
        """
        return run(self._resume(request))

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
            StaleEpoch: a newer epoch was claimed, someone else commits under this one, or its iteration is finished.
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
        run(self._commit(commit, chunk))

    def writer(self, request: Request, epoch: int) -> Writer:
        """Commit in the background while the next step is computed; use it as a context manager."""
        return Writer(self, request, epoch)

    def clean(self, request: Request) -> Float32:
        """The final latents, shape (B, N, C), also after the iteration was compacted.

        Raises:
            MissingLatents: there are none, or no copy verifies.
        """
        (found,) = run(self._find(request, [request.steps]))
        if found is not None:
            return found[1]
        compacted = compaction.index(self._store, request.iteration).get(request.digest)
        x_BNC = None if compacted is None else compaction.rows(self._store, compacted)
        if x_BNC is None:
            raise MissingLatents(f"{self.url}: request {request.id} has no clean latents that verify; run it again")
        return x_BNC

    def window_latents(self, request: Request, initial_BNC: ArrayLike) -> tuple[Float32, Float32]:
        """Latents and log-probabilities of the request's stochastic steps.

        With ``start, end = request.sde_window`` there are ``S = end - start`` steps between ``K = S + 1`` latents.

        Args:
            initial_BNC: the noise at step 0, which is not stored; used only when ``start`` is 0.

        Returns:
            Latents at steps ``start`` to ``end`` inclusive, shape (B, K, N, C), and the worker's
            log-probabilities of the steps between them, shape (B, S); NaN where it gave none.

        Raises:
            MissingLatents: a step is absent, every copy of it is corrupt, or it was compacted away.
        """
        start, end = request.sde_window
        steps = range(max(start, 1), end + 1)
        latents, log_probs = [], []
        if start == 0:
            latents.append(np.asarray(initial_BNC, dtype=np.float32))
        for step, found in zip(steps, run(self._find(request, steps)), strict=True):
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
        run(self._store.set(_record_key(name), seal(value)))

    def get_record(self, name: str) -> dict[str, Any] | None:
        """The value put under a name; None if there is none or it does not verify. Tuples come back as lists."""
        return unseal(run(self._store.get(_record_key(name))))

    def put_scores(self, request: Request, value: Mapping[str, Any]) -> dict[str, Any]:
        """Store a request's scores, a small JSON value with the request's ``digest``; returns what is stored.

        If two workers score a request, the first counts: scores never change.
        """
        name = f"scores/{request.id}"
        run(self._store.create(_record_key(name), seal(value)))
        found = self.get_record(name)
        if found is None or found["digest"] != value["digest"]:  # damaged, or of another request of this name
            self.put_record(name, value)
            found = dict(value)
        return found

    def scores(self, request: Request) -> dict[str, Any] | None:
        """A request's scores, also after the iteration was compacted; None if there are none, or they do not verify."""
        return self.scores_by_id(request.iteration)(request.id)

    def known_scores(self, request: Request) -> dict[str, Any] | None:
        """As `scores`; None also if they are those of another request that had the same id."""
        known = self.scores(request)
        return known if known and known["digest"] == request.digest else None

    def forget_unscored(self) -> None:
        """Delete scores that lack a reward, in unfinished iterations, so that these requests are scored anew."""
        known = self._each_scores(run(self._store.names("records/scores")))
        unscored = [name for name, value in known.items() if None in value["rewards"]]
        run(all_of(self._store.delete, map(_scores_key, unscored)))

    def _each_scores(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """{request id: its scores}, of requests not compacted yet, where they are stored and verify."""
        values = map(unseal, run(all_of(self._store.get, map(_scores_key, names))))
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def scores_by_id(self, iteration: int) -> Callable[[str], dict[str, Any] | None]:
        """A function that finds the scores of an iteration's request by its id alone; see `scores`."""
        compacted = cache(lambda: self.get_record(_scores_of(iteration)) or {})
        return lambda request: self.get_record(f"scores/{request}") or compacted().get(request)

    def put_images(self, request: Request, images_BHWC: NDArray[np.uint8], finite_B: NDArray[np.bool_]) -> None:
        """Keep decoded images until another worker has scored them; written again, they are the same bytes.

        Args:
            finite_B: which of them can be used: those whose latents are finite.
        """
        content = np.ascontiguousarray(images_BHWC).tobytes()
        head = {
            "digest": request.digest,
            "shape": list(images_BHWC.shape),
            "sha256": sha256(content).hexdigest(),
            "finite": [bool(value) for value in finite_B],
        }
        run(self._store.set(_images_key(request), seal(head) + b"\n" + content))

    def images(self, request: Request) -> tuple[NDArray[np.uint8], NDArray[np.bool_]] | None:
        """Images and ``finite_B`` that `put_images` stored; None if they are absent, damaged or another request's."""
        sealed, _, content = (run(self._store.get(_images_key(request))) or b"").partition(b"\n")
        head = unseal(sealed)
        if head is None or head["digest"] != request.digest or sha256(content).hexdigest() != head["sha256"]:
            return None
        return np.frombuffer(content, np.uint8).reshape(head["shape"]), np.array(head["finite"], np.bool_)

    def drop_images(self, request: Request) -> None:
        """Delete the images of a request, if there are any."""
        run(self._store.delete(_images_key(request)))

    def finish_iteration(
        self, iteration: int, keep: Literal["clean", "all", "none"], pictured: Container[str] | None = None
    ) -> None:
        """Compact an iteration that nobody works on any more, and remove what is not kept.

        ``clean`` moves the clean latents of its complete requests into one sharded array (one per latent
        shape, should they differ) and removes everything else; ``all`` keeps every step; ``none`` removes
        the iteration. Call it again after a kill: old data goes only after its copy verifies.
        Orphan ``.partial`` files of killed writers, and images that nobody scored, are always removed. Scores, one
        record a request, become one record of the iteration; other records stay.

        Args:
            pictured: ids of the exploration requests whose thumbnails are kept; None: all.

        Raises:
            SpotlightError: the compacted copy does not read back as written; nothing was removed.
        """
        root, commits = iteration_path(iteration), f"commits/{iteration:05d}"
        for prefix in (root, commits):
            run(self._store.delete_partials(prefix))
        run(self._store.delete_all(f"images/{iteration:05d}"))
        self._compact_scores(iteration, pictured)
        if keep == "all":
            return
        doomed = [commits, root]
        if keep == "clean":
            compacted = compaction.compact(self._store, iteration, run(self._complete(iteration)))
            kept = {"zarr.json", *(row.array for row in compacted.values())}
            doomed = [commits, *(f"{root}/{name}" for name in run(self._store.names(root)) if name not in kept)]
        else:
            run(self._store.delete(index_key(iteration)))
        for prefix in doomed:
            run(self._store.delete_all(prefix))
        self._forget(iteration)

    def _compact_scores(self, iteration: int, pictured: Container[str] | None) -> None:
        """Join the scores of an iteration in one record, then delete the record of each request."""
        names = [name for name in run(self._store.names("records/scores")) if name.startswith(f"{iteration:05d}-")]
        if names:
            known = self._each_scores(sorted(name for name in names if not name.endswith(PARTIAL)))
            for name, value in known.items():
                if pictured is not None and "-explore-" in name and name not in pictured:
                    value.pop("thumbnails", None)
            self.put_record(_scores_of(iteration), (self.get_record(_scores_of(iteration)) or {}) | known)
        run(all_of(self._store.delete, map(_scores_key, names)))

    def _forget(self, iteration: int) -> None:
        """Forget that an iteration's arrays and groups exist: they were removed, and are made again if needed."""
        ready = self._ready.copy()
        self._ready = {path for path in ready if not f"{path}/".startswith(f"{iteration_path(iteration)}/")}

    def _create_steps(self, path: str, iteration: int, shape: tuple[int, ...]) -> None:
        """Make the array of one (request, epoch) and the groups above it, once; races write the same bytes."""
        if path in self._ready:
            return
        root = iteration_path(iteration)
        if root not in self._ready:  # what an earlier iteration still needs is made again, with the same bytes
            recent = tuple(f"{iteration_path(each)}/" for each in range(max(0, iteration - RECENT), iteration + RECENT))
            self._ready = {ready for ready in self._ready.copy() if f"{ready}/".startswith(recent)}
        metadata = {group: group_metadata() for group in ("latents", root, f"{root}/steps")}
        metadata[path] = array_metadata(("step", "sample", "token", "channel"), shape, (1, *shape[1:]))
        for node, value in metadata.items():
            if node not in self._ready:
                run(self._store.create(f"{node}/zarr.json", value))
                self._ready.add(node)

    async def _commit(self, commit: _Commit, chunk: bytes) -> None:
        folder = _commits_path(commit.iteration, commit.request_id)
        await self._store.set(_chunk_key(commit), chunk)
        claims = [f"{folder}/claim.{epoch}" for epoch in (commit.epoch, commit.epoch + 1)]
        if await all_of(self._store.exists, claims) != [True, False]:
            raise StaleEpoch(
                f"request {commit.request_id}: another worker took it over from epoch {commit.epoch}, or its iteration "
                f"is finished; step {commit.step} was not committed"
            )
        key, record = f"{folder}/commit.{commit.epoch}.{commit.step}", seal(asdict(commit))
        await self._store.create(key, record)
        if await self._store.get(key) != record:
            raise StaleEpoch(
                f"request {commit.request_id}: step {commit.step} of epoch {commit.epoch} is committed already, "
                "with other values"
            )

    async def _resume(self, request: Request) -> Resume:
        folder = _commits_path(request.iteration, request.id)
        claims = (_CLAIM.fullmatch(name) for name in await self._store.names(folder))
        epoch = 1 + max((int(claim[1]) for claim in claims if claim), default=0)
        token = uuid4().hex.encode()
        while True:
            await self._store.create(f"{folder}/claim.{epoch}", token)
            if await self._store.get(f"{folder}/claim.{epoch}") == token:
                break
            epoch += 1
        if _steps_path(request.iteration, request.id, epoch) in self._ready:
            self._forget(request.iteration)  # an epoch comes twice only if another process removed the iteration
        # Only now, so that all that older epochs managed to commit counts.
        async for commit in self._records(request.iteration, request.id):
            if commit.digest == request.digest:
                x_BNC = await self._latents(commit)
                if x_BNC is None:
                    continue
                before = None
                if request.looks_back and 1 < commit.step < commit.steps:
                    (before,) = await self._find(request, [commit.step - 1])
                    if before is None:
                        continue
                return Resume(
                    epoch=epoch, step=commit.step, x_BNC=x_BNC, before_BNC=None if before is None else before[1]
                )
        return Resume(epoch=epoch, step=0, x_BNC=None)

    async def _find(self, request: Request, steps: Sequence[int]) -> list[tuple[_Commit, Float32] | None]:
        """For each step its newest commit that verifies and belongs to this very request."""
        found: dict[int, tuple[_Commit, Float32]] = {}
        async with aclosing(self._records(request.iteration, request.id)) as records:
            async for commit in records:
                if commit.step in steps and commit.step not in found and commit.digest == request.digest:
                    x_BNC = await self._latents(commit)
                    if x_BNC is not None:
                        found[commit.step] = (commit, x_BNC)
                if len(found) == len({*steps}):
                    break
        return [found.get(step) for step in steps]

    async def _complete(self, iteration: int) -> dict[str, Clean]:
        """Committed clean latents that verify, ``{request digest: clean latents}``."""
        requests = sorted(await self._store.names(f"commits/{iteration:05d}"))
        complete: dict[str, Clean] = {}
        for found in await all_of(partial(self._complete_of, iteration), requests):
            complete |= {digest: clean for digest, clean in found.items() if digest not in complete}
        return complete

    async def _complete_of(self, iteration: int, request_id: str) -> dict[str, Clean]:
        complete: dict[str, Clean] = {}
        async for commit in self._records(iteration, request_id):
            fresh = commit.step == commit.steps and commit.digest not in complete
            if fresh and await self._latents(commit) is not None:
                complete[commit.digest] = Clean(
                    shape=commit.shape, sha256=commit.sha256, read=partial(self._read, commit)
                )
        return complete

    def _read(self, commit: _Commit) -> Float32 | None:
        return run(self._latents(commit))

    async def _records(self, iteration: int, request_id: str) -> AsyncGenerator[_Commit]:
        """Commits of a request whose record verifies, the furthest step first, among equals the newest epoch."""
        folder = _commits_path(iteration, request_id)
        matches = [match for name in await self._store.names(folder) if (match := _COMMIT.fullmatch(name))]
        for match in sorted(matches, key=lambda match: (-int(match[2]), -int(match[1]))):
            record = unseal(await self._store.get(f"{folder}/{match[0]}"))
            if record is not None:
                yield _Commit(**record)

    async def _latents(self, commit: _Commit) -> Float32 | None:
        """The latents of a commit, or None if they are absent or do not verify."""
        chunk = await self._store.get(_chunk_key(commit))
        if chunk is None or sha256(chunk).hexdigest() != commit.sha256:
            return None
        return np.frombuffer(chunk, dtype="<f4").reshape(commit.shape).copy()


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


def _steps_path(iteration: int, request_id: str, epoch: int) -> str:
    return f"{iteration_path(iteration)}/steps/{request_id}.e{epoch}"


def _chunk_key(commit: _Commit) -> str:
    """Step 1 is the first chunk: the noise before it is not stored."""
    path = _steps_path(commit.iteration, commit.request_id, commit.epoch)
    return f"{path}/c.{commit.step - 1}.0.0.0"


def _commits_path(iteration: int, request_id: str) -> str:
    return f"commits/{iteration:05d}/{request_id}"


def _images_key(request: Request) -> str:
    return f"images/{request.iteration:05d}/{request.id}"


def _scores_key(request_id: str) -> str:
    return _record_key(f"scores/{request_id}")


def _scores_of(iteration: int) -> str:
    """The record of all scores of a compacted iteration."""
    return f"scores-{iteration:05d}"


def _record_key(name: str) -> str:
    assert re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name), f"not a record name: {name!r}"
    return f"records/{name}"
