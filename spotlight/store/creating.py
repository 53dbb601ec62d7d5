"""How a run directory is made: all at once, with the settings, prompts and prices that the run then keeps.

A run goes on with what it began with, whatever becomes of the files that a person named.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from spotlight import config
from spotlight.files import check_slashes, digest, is_url, read_bytes, read_files
from spotlight.records import SpotlightError
from spotlight.store.file_lock import FileLock
from spotlight.store.objects import StoreError, atomic_write, check_address, check_reach, objects_at
from spotlight.store.rows import PROMPTS, STARTED, PromptHashes, Started
from spotlight.store.rundir import RunDir, looked_into

ENDS = ("iterations", "target", "usd_max")
"""Settings of ``[run]`` that say when it ends, which `spotlight resume` may change."""
MAKING = ".making-"
"""Begins the names of directories in which runs are made."""


def create_run(
    settings: config.Config, now_s: float, *, simulated: bool = False, taken: Collection[str] = ()
) -> RunDir:
    """Make a new directory, named after the run and the time, with the resolved settings in it.

    Args:
        simulated: no driver will hold it, so any file system will do.
        taken: names of runs elsewhere that it may not have.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    parent = settings.run.dir.rstrip("/") if is_url(settings.run.dir) else settings.run.dir
    if is_url(parent):
        check_reach(parent)
    for attempt in range(100):
        name = f"{settings.run.name}-{stamp}{f'-{attempt}' if attempt else ''}"
        if name not in taken:
            with contextlib.suppress(FileExistsError):
                return _create(f"{parent}/{name}", settings, simulated=simulated)
    raise SpotlightError(f"{parent}: a hundred runs named {settings.run.name!r} were started this second")


def check_place(place: str | Path) -> None:
    """
    Raises:
        SpotlightError: no run can be there, or its store does not answer.
    """
    if not str(place).strip() or "\0" in str(place):
        raise SpotlightError(f"{str(place)!r} is no run directory: name one, or leave it out for a new one")
    check_slashes(place)
    if is_url(place):
        check_address(str(place))
        check_reach(str(place))


def create_run_at(place: str | Path, settings: config.Config) -> RunDir:
    """Open the run in this directory, or at this URL; if nothing is there, it is made.

    Raises:
        SpotlightError: what is there is no run, one of other settings, or another user's.
    """
    check_place(place)
    place = place if is_url(place) else Path(os.path.realpath(str(place).removeprefix("file://")))
    with looked_into(place):
        _create_if_absent(place, settings)
    run = RunDir.open(place)
    there = run.config()
    ours = {
        "data": there.data,
        "run": settings.run.model_copy(update={"dir": there.run.dir}),
        "pools": _with_prices(settings.pools, {name: pool.prices for name, pool in there.pools if pool.prices}),
    }
    if changed := list(config.differences(there, settings.model_copy(update=ours))):
        begun, wanted = there.run.model_dump(), settings.run.model_dump()
        ends = {name: wanted[name] for name in ENDS if wanted[name] not in (begun[name], None)}
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in ends.items())
        longer = f"; `{run.resume_command}{options}` changes how long it is" if options else ""
        raise SpotlightError(
            f"{place}: this run was begun with other settings: {'; '.join(changed)}; give those, or another "
            f"directory for a new run{longer}"
        )
    _check_same_prompts(run, settings)
    return run


def _check_same_prompts(run: RunDir, settings: config.Config) -> None:
    """
    Raises:
        SpotlightError: a prompt file was changed since the run began, which has a copy of it.
    """
    hashes, data = run.prompt_hashes(), settings.data
    if hashes is None:
        return  # `resuming.check` says so
    begun = {data.train_prompts: hashes.train_sha256, data.validation_prompts: hashes.validation_sha256}
    for path, expected in begun.items():
        if digest(read_files(path, "a prompt file")) != expected:
            raise SpotlightError(
                f"{path}: was changed since {run.url} began with it: put back what was there, which the run has a copy "
                "of (prompts/), or give another directory for a new run"
            )


def _create_if_absent(place: str | Path, settings: config.Config) -> None:
    """
    Raises:
        SpotlightError: something is there, and it is no run.
    """
    if is_url(place):
        if objects_at(place).size(config.RESOLVED) is None:
            _create(str(place), settings, anew=False)
        return
    place = Path(place)
    if not place.exists() or (place.is_dir() and _is_empty(place)):
        _create_at_once(place, settings)
    elif not (place / config.RESOLVED).exists():
        raise SpotlightError(
            f"{place}: something else is there, and no run (it has no {config.RESOLVED}): name a new or empty directory"
        )


def _create_at_once(path: Path, settings: config.Config) -> None:
    """Make it elsewhere and rename it, so that what a kill leaves is no half of a run.

    An empty directory stays the one that it is, since somebody may be in it. The run is made in it, since it may be a
    file system of its own, and who owns it may not be able to write beside it.
    """
    try:
        _make_folder(path.parent)
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=path if path.exists() else path.parent) as making:
            made = _create(f"{making}/{path.name}", settings).path
            if path.exists():
                _fill(path, made)
            else:
                made.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # somebody else was faster
            raise SpotlightError(
                f"{path}: cannot make the run directory: {error.strerror}; choose another one, or make room there"
            ) from None


def _is_empty(directory: Path) -> bool:
    """Whether nothing is there, but for runs that are being made, or whose making was killed."""
    return all(entry.name.startswith(MAKING) for entry in directory.iterdir())


def _fill(empty: Path, made: Path) -> None:
    """Move all of a new run into an empty directory; its settings, which make it a run, come last.

    Raises:
        OSError: it is not empty any more.
    """
    if not _is_empty(empty):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    with contextlib.suppress(PermissionError):  # who may write to somebody else's directory cannot change its mode
        empty.chmod(stat.S_IMODE(made.stat().st_mode))
    for entry in sorted(made.iterdir(), key=lambda entry: (entry.name == config.RESOLVED, entry.name != "prompts")):
        entry.rename(empty / entry.name)  # no directory replaces another's, so one of two does all of this


def _create(place: str, settings: config.Config, *, anew: bool = True, simulated: bool = False) -> RunDir:
    """
    Args:
        anew: of a run at a URL, whether it must not be there yet; else one whose making was cut short is completed.
        simulated: as of `create_run`.

    Raises:
        FileExistsError: it is there already.
        SpotlightError: it cannot be made, or no driver could have it there.
    """
    train = read_files(settings.data.train_prompts, "a prompt file")
    validation = read_files(settings.data.validation_prompts, "a prompt file")
    prices = {name: read_bytes(pool.prices, "a CSV file of prices") for name, pool in settings.pools if pool.prices}
    run, by = RunDir(place), uuid4().hex
    path = run.path
    started = json.dumps(asdict(Started(by=by, latents=f"{run.name}-{by[:12]}"))).encode()
    try:
        if run.is_remote:
            if not run.objects.create(STARTED, started) and anew:
                raise FileExistsError
            shutil.rmtree(path, ignore_errors=True)  # of a run of this name whose objects were deleted
        _make_folder(path.parent)
        path.mkdir(mode=0o777 if settings.run.shared else 0o700)
        with contextlib.ExitStack() as if_cut_short:
            if_cut_short.callback(shutil.rmtree, path, ignore_errors=True)
            if not simulated:
                _check_file_system(run)
            if (settings.latents.url or set(settings.tracking.to) - {"tensorboard"}) and not run.is_remote:
                run.objects.put(STARTED, started)
            data = _keep_prompts(run, settings.data, train, validation)
            pools = _with_prices(settings.pools, {name: _keep_prices(run, name, prices[name]) for name in prices})
            run.push_files("prompts", "prices")
            kept = settings.model_copy(update={"data": data, "pools": pools})
            run.objects.put(config.RESOLVED, config.resolved(kept))
            if_cut_short.pop_all()
    except (FileExistsError, StoreError):
        raise
    except OSError as error:
        raise SpotlightError(
            f"{path}: cannot make the run directory: {error.strerror}; choose another run.dir, or make room there"
        ) from None
    return run


def _check_file_system(run: RunDir) -> None:
    """Check that a driver could hold a run in a new directory.

    Raises:
        SpotlightError: the file system lacks file locks or hard links.
    """
    probe = "probe"
    with FileLock(run.path).held():
        if not run.is_remote:
            run.objects.create(probe, b"")
            run.objects.delete(probe)


def _keep_prompts(
    run: RunDir, data: config.DataSection, train: Mapping[str, bytes], validation: Mapping[str, bytes]
) -> config.DataSection:
    """Copy the prompts into the directory, since the run goes on with those it began with; returns the copies' paths.

    They keep their suffix, which says how they are read.
    """
    (run.path / "prompts").mkdir()
    kept = {
        "train": f"prompts/train{Path(data.train_prompts).suffix}",
        "validation": f"prompts/validation{Path(data.validation_prompts).suffix}",
    }
    for name, files in (("train", train), ("validation", validation)):
        if files.keys() != {""}:
            (run.path / kept[name]).mkdir()
        for file, content in files.items():
            with atomic_write(run.path / kept[name] / file) as written:
                written.write(content)
    run.write_json(PROMPTS, PromptHashes(train_sha256=digest(train), validation_sha256=digest(validation)))
    return config.DataSection(train_prompts=kept["train"], validation_prompts=kept["validation"])


def _keep_prices(run: RunDir, pool: str, content: bytes) -> str:
    """Copy a file of prices into the directory, so that past costs stay as they were; returns the copy's path."""
    file = f"prices/{pool}.csv"
    (run.path / "prices").mkdir(exist_ok=True)
    with atomic_write(run.path / file) as written:
        written.write(content)
    return file


def _make_folder(path: Path) -> None:
    """Make a directory, with those above it.

    Raises:
        NotADirectoryError: something else is there. `Path.mkdir` says FileExistsError, as if a folder were.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error


def _with_prices(pools: config.PoolsSection, files: Mapping[str, str]) -> config.PoolsSection:
    """The pools, those that have a file of prices with this one in its place."""
    given = {name: pool for name, pool in pools if pool.prices and name in files}
    return pools.model_copy(
        update={name: pool.model_copy(update={"prices": files[name]}) for name, pool in given.items()}
    )
