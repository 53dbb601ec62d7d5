"""Brings the clean latents of a finished iteration into few large arrays, and finds them there.

It removes nothing but half-written arrays of its own: the caller removes the originals after `compact` has returned.

Invariants:

- Arrays that the present index names are never written again: new requests make a new generation.
- The index is written last, after its rows were read back; a reader believes rows only if their hash holds.

Shapes: B samples of a request, N latent tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from hashlib import sha256

import numpy as np

from spotlight.records import SpotlightError, record
from spotlight.store.zarr_store import AT_ONCE, Float32, ZarrStore, array_metadata, run, seal, unseal

_SHARD_BYTES = 64 * 2**20
"""A shard is built in memory and uploaded whole; 64 MiB is ample for throughput and small for a host."""


@record
class Clean:
    """Verified clean latents of a request, wherever they are."""

    shape: Sequence[int]
    """(B, N, C)."""
    sha256: str
    """Hash of their float32 bytes."""
    read: Callable[[], Float32 | None]


@record
class Compacted:
    """Where a request's clean latents are."""

    iteration: int
    array: str
    start: int
    """First row; there are ``shape[0]`` of them."""
    shape: Sequence[int]
    sha256: str


def index(store: ZarrStore, iteration: int) -> dict[str, Compacted]:
    """The compacted requests of an iteration, ``{request digest: where its latents are}``."""
    value = unseal(run(store.get(index_key(iteration)))) or {}
    return {digest: Compacted(**row) for digest, row in value.items()}


def rows(store: ZarrStore, row: Compacted) -> Float32 | None:
    """One request's rows of a compacted array, (B, N, C); None if they are absent or do not verify."""
    path = f"{iteration_path(row.iteration)}/{row.array}"
    x_BNC = store.rows(path, row.start, row.start + row.shape[0])
    return x_BNC if x_BNC is not None and sha256(x_BNC.tobytes()).hexdigest() == row.sha256 else None


def compact(store: ZarrStore, iteration: int, complete: Mapping[str, Clean]) -> dict[str, Compacted]:
    """Bring all clean latents into compacted arrays; return their index, ``{request digest: where they are}``.

    Args:
        complete: ``{request digest: its clean latents}``, of requests that may or may not be compacted already.

    Raises:
        SpotlightError: what was written does not read back; the index before it still holds.
    """
    before = index(store, iteration)
    held = _held(store, before)
    sources = {
        digest: Clean(shape=row.shape, sha256=row.sha256, read=partial(rows, store, row))
        for digest, row in before.items()
        if digest in held
    }
    if complete.keys() <= sources.keys():
        return before
    sources = {**complete, **sources}
    by_shape: dict[tuple[int, ...], dict[str, Clean]] = {}
    for digest, source in sorted(sources.items(), key=lambda item: item[0]):
        by_shape.setdefault(tuple(source.shape[1:]), {})[digest] = source
    generation = 1 + max((int(row.array.split("-")[1]) for row in before.values()), default=0)
    after: dict[str, Compacted] = {}
    for same in by_shape.values():
        after |= _write(store, iteration, generation, same)
    if after.keys() != _held(store, after):
        raise SpotlightError(
            f"{store.url}: iteration {iteration}: compacted latents do not read back as written; "
            "the committed steps were kept: check the disk, then `spotlight resume`"
        )
    run(store.set(index_key(iteration), seal({digest: asdict(row) for digest, row in after.items()})))
    return after


def _held(store: ZarrStore, index: Mapping[str, Compacted]) -> set[str]:
    """Digests of the requests whose rows are there and verify."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verified = pool.map(lambda row: rows(store, row) is not None, index.values())
        return {digest for digest, holds in zip(index, verified, strict=True) if holds}


def _read(sources: Sequence[Clean]) -> Iterator[tuple[Clean, Float32]]:
    """Each source with its latents, in order; `AT_ONCE` are read at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(sources), AT_ONCE):
            batch = sources[first : first + AT_ONCE]
            for source, x_BNC in zip(batch, pool.map(lambda source: source.read(), batch), strict=True):
                assert x_BNC is not None, f"{source} was verified a moment ago"
                yield source, x_BNC


def _write(store: ZarrStore, iteration: int, generation: int, sources: Mapping[str, Clean]) -> dict[str, Compacted]:
    """Write requests of one latent shape, shard by shard: memory holds one shard and `AT_ONCE` requests."""
    samples = sum(source.shape[0] for source in sources.values())
    _, N, C = next(iter(sources.values())).shape
    shard_samples = max(1, min(samples, _SHARD_BYTES // (4 * N * C)))
    name = f"clean-{generation}-{N}x{C}"
    path = f"{iteration_path(iteration)}/{name}"
    metadata = array_metadata(("sample", "token", "channel"), (samples, N, C), (1, N, C), (shard_samples, N, C))
    run(store.delete_all(path))
    run(store.set(f"{path}/zarr.json", metadata))
    written: dict[str, Compacted] = {}
    start, flushed, pending = 0, 0, np.empty((0, N, C), np.float32)
    for digest, (source, x_BNC) in zip(sources, _read([*sources.values()]), strict=True):
        pending = np.concatenate([pending, x_BNC])
        written[digest] = Compacted(
            iteration=iteration, array=name, start=start, shape=list(x_BNC.shape), sha256=source.sha256
        )
        start += len(x_BNC)
        whole = len(pending) if start == samples else len(pending) // shard_samples * shard_samples
        if whole:
            store.write_rows(path, flushed, pending[:whole])
            flushed, pending = flushed + whole, pending[whole:]
    return written


def iteration_path(iteration: int) -> str:
    """The Zarr group of an iteration."""
    return f"latents/{iteration:05d}"


def index_key(iteration: int) -> str:
    """Where the index of an iteration's compacted latents is."""
    return f"records/clean-{iteration:05d}"
