"""A node's shared memory: what one process brings in, checked, every process of the node maps.

Bringing in needs no torch, so a light process can do it for the one that owns the device. Under the root,
a directory in memory, lie ::

    <sha256>.safetensors     a file by the hash of its content, brought in from a peer or the store
    made-<key>               what a process of this node made for all of them, such as its base weights
    gang-<name>              where the ranks of a gang find each other
    .<name>.<any>.partial    one of these, half written
    .lock-*, .alive          locked while one is written; locked as long as a process uses the node
    .node                    the node's name
    [reward-, reserved-]slot-<name>  who has a device: see `spotlight.store.device_locks`
    run/                     prompts of a run at a URL, and what the text encoders made of them

Invariants:

- What lies under its final name is whole: it came there by one rename, a received file after its hash was
  checked. What a kill leaves half done is never used, and is removed by the next process that brings anything in.
- No process waits for ever, not even for one that is frozen while it brings something in.
- Mappings are private: writing to a mapped tensor changes neither the file nor what others see.
- A file may be removed at any time: a process that maps it keeps it, one that wants it later brings it in again.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import math
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from hashlib import sha256 as new_sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote
from uuid import uuid4

from safetensors import SafetensorError

from spotlight.records import SpotlightError
from spotlight.store.device_locks import end_leftovers
from spotlight.store.room import SHARED_MEMORY, room_bytes
from spotlight.store.tensor_files import hashing

if TYPE_CHECKING:
    from torch import Tensor

Source = Callable[[str, int, int], bytes]
"""Reads ``(sha256, offset, length)`` of a file, from several threads at once; an OSError if it cannot."""

BLOCK_BYTES = 8 << 20
"""One read: large beside a round trip's cost, small beside a worker's memory."""
STREAMS = 4
"""Reads in flight, so that no stream's round trip leaves the link idle."""
KEEP_FILES = 4
"""Rollouts use version k, exploration k or k - 1, training both policies of k, validation the average of k."""

BRING_S = 120.0
"""Wait for another process that brings in a file, without progress: stores and peers answer sooner, or are gone."""
MAKE_S = 600.0
"""Wait for a process that makes a file: it may read a whole checkpoint before it writes anything."""
POLL_S = 0.02
"""Pause between two tries of a lock."""

PREFIX = f"spotlight-{os.getuid()}-"
"""Begins the names of all our directories on a machine."""
_NO_TRAPS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open what another user might have put there: no link is followed, and no pipe blocks."""
_SUFFIX, _PARTIAL = ".safetensors", ".partial"
_NAME = re.compile(r"[0-9a-f]{64}")


class NotOnNode(SpotlightError):
    """A file could not be brought into the node's memory; whoever wants it can still read the store."""


class Node:
    """The shared memory of one node, as one of its processes sees it.

    Args:
        root: the same for all processes of the node, and nobody else's; made if absent.
        keep: received files that stay; the least recently used goes when another comes.

    Raises:
        SpotlightError: the root belongs to another user, who could put anything there.
    """

    def __init__(self, root: Path, *, keep: int = KEEP_FILES) -> None:
        self.root = root
        self._keep = keep
        self._name = uuid4().hex
        self._making = threading.Lock()
        self._given_up: set[str] = set()
        """Locks that were waited for too long: they are not waited for again until they were free once."""
        self._hold()

    def _hold(self) -> None:
        self._descriptor = hold(self.root)
        self._let_go = weakref.finalize(self, os.close, self._descriptor)

    def close(self) -> None:
        """Stop using the node: once no process uses it, its directory can be removed."""
        self._let_go()

    def keep(self) -> None:
        """Make the directory again if it was removed, as at a logout. Mapped files stay, others come in anew."""
        with self._making:
            if self._let_go.alive and not is_held(self.root, self._descriptor):
                let_go = self._let_go
                self._hold()
                let_go()
                self._write_name()

    @property
    def name(self) -> str:
        """The node's name: the same for all processes that share this memory, and for no others."""
        self.keep()
        return self._write_name()

    def _write_name(self) -> str:
        token = self.root / ".node"
        mine = self.root / f".node-{os.getpid()}-{threading.get_ident()}"
        if not token.exists():
            mine.write_text(self._name)
            with suppress(FileExistsError):
                os.link(mine, token)  # appears whole, and the first process's name stays
            mine.unlink()
        self._name = token.read_text()
        return self._name

    def holds(self, sha256: str) -> bool:
        """Whether the file with this content is here now."""
        return self._path(sha256).exists()

    def bring(self, sha256: str, size_bytes: int, sources: Iterable[Source]) -> Path:
        """The file with this content, from the first source that has it; found here already, it is not read again.

        One process of the node reads, the others wait for it as long as it makes progress.

        Args:
            sources: in order of preference; one that fails or sends other bytes is passed over.

        Raises:
            NotOnNode: there is no room, no source sent this content (with each one's reason), or the process that reads
                it made no progress for `BRING_S`.
        """
        path = self._path(sha256)
        with self._lock(path, BRING_S):
            with suppress(FileNotFoundError):
                os.utime(path)  # used now: it is the last to go
                return path
            self._clear()
            refusals = []
            with self._partial(path, size_bytes) as partial:
                for number, source in enumerate(sources):
                    try:
                        _receive(partial, sha256, size_bytes, source)
                    except OSError as error:
                        if _is_full(error):
                            raise
                        refusals.append(f"source {number}: {error}")
                    else:
                        partial.rename(path)
                        return path
        raise NotOnNode(f"{path}: no source sent it ({'; '.join(refusals) or 'none was given'})")

    def make(self, key: str, write: Callable[[Path], object], *, size_bytes: int) -> Path:
        """Path of a file or directory that ``write`` makes at the path it is given; made once, then found.

        One process of the node writes, the others wait as long as it makes progress. The result stays with the root.

        Args:
            key: names all that the result depends on, such as `fingerprint` of what it is made from.
            size_bytes: about what it needs; without that much room, nothing is written.

        Raises:
            NotOnNode: there is no room, or the process that writes it made no progress for `MAKE_S`.
        """
        path = self.root / f"made-{key}"
        with self._lock(path, MAKE_S):
            if not path.exists():
                with self._partial(path, size_bytes) as partial:
                    write(partial)
                    partial.rename(path)
        return path

    def meeting(self, name: str) -> Path:
        """Path by which the ranks of a gang find each other; whoever forms the gang makes the file and removes it."""
        self.keep()
        return self.root / f"gang-{quote(name, safe='')}"

    def read(self, sha256: str, offset: int, length: int) -> bytes:
        """A range of a file held here: what another node's `bring` asks for.

        Raises:
            SpotlightError: ``sha256`` is no hash; a path never is.
            OSError: the file is not here, or not any more.
        """
        return from_file(self._path(sha256))(sha256, offset, length)

    def _path(self, sha256: str) -> Path:
        if not _NAME.fullmatch(sha256):
            raise SpotlightError(f"{self.root}: files are named by 64 hexadecimal digits, and {sha256!r} is none")
        return self.root / f"{sha256}{_SUFFIX}"

    @contextmanager
    def _lock(self, path: Path, limit_s: float) -> Iterator[None]:
        """Hold a file's lock; it is released however the process ends. Files may share a lock: that costs only a wait.

        Args:
            limit_s: how long to wait while nothing more is written of this file; 0 asks once.

        Raises:
            NotOnNode: another process holds it.
        """
        self.keep()
        shared = new_sha256(path.name.encode()).hexdigest()[:2]  # so that there are 256 of them, never removed
        with (self.root / f".lock-{shared}").open("a") as lock:
            if not self._waited_for(lock, path, 0.0 if shared in self._given_up else limit_s):
                if limit_s:
                    self._given_up.add(shared)
                raise NotOnNode(
                    f"{path}: another process of the node is at it, and wrote nothing for {limit_s:g} s: it may be "
                    f"frozen; end it (`fuser {lock.name}` names it)"
                )
            self._given_up.discard(shared)
            yield

    def _waited_for(self, lock: IO[str], path: Path, limit_s: float) -> bool:
        """Wait for a lock, as long as its holder makes progress; returns whether it is held now."""
        written = self._written(path)
        while not _held(lock, limit_s):
            before, written = written, self._written(path)
            if written == before:
                return False
        return True

    def _written(self, path: Path) -> list[tuple[str, int, int]]:
        """Path, size and time of change of all that is written so far of a file, to see progress."""
        found = []
        for partial in self._partials(path.name):
            with suppress(FileNotFoundError):  # just done
                for file in (partial, *partial.rglob("*")):
                    found.append((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns))
        return sorted(found)

    def _partials(self, name: str) -> Iterable[Path]:
        return self.root.glob(f".{glob.escape(name)}.*{_PARTIAL}")

    @contextmanager
    def _partial(self, path: Path, size_bytes: int) -> Iterator[Path]:
        """A path to write to, which the caller renames to ``path`` when it is whole; else it is removed.

        Its name is unique: a process that was frozen, and lost its lock with the root, may write at the same time.
        """
        for left in self._partials(path.name):
            _remove(left)
        partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}{_PARTIAL}")
        try:
            free_bytes = room_bytes(self.root)
            if free_bytes < size_bytes:
                raise OSError(errno.ENOSPC, f"{max(0.0, free_bytes):.0f} bytes are free")
            yield partial
        except (OSError, SafetensorError) as error:
            if not _is_full(error):
                raise
            raise NotOnNode(
                f"{path}: no room for {size_bytes} bytes in the node's shared memory ({error}); "
                "the file system of that directory needs more, or the machine more memory"
            ) from None
        finally:
            _remove(partial)

    def _clear(self) -> None:
        """Remove the least recently used file, and what killed processes left half received."""
        for partial in self.root.glob(f".*{_PARTIAL}"):
            name, _, _ = partial.name.removeprefix(".").removesuffix(_PARTIAL).rpartition(".")
            with suppress(NotOnNode), self._lock(self.root / name, 0.0):
                _remove(partial)
        with suppress(FileNotFoundError):  # another process clears at the same time
            newest_first = sorted(self.root.glob(f"*{_SUFFIX}"), key=lambda file: -file.stat().st_mtime_ns)
            for old in newest_first[self._keep - 1 :]:
                old.unlink()


def shared_root(name: str, *, size_bytes: int = 0) -> Path:
    """The directory that the processes of a node share: in memory, or on disk if memory is too small, or not this
    user's to write to, as in some containers.

    What killed runs left behind is removed first.

    Args:
        name: of the run, and of the node if several are emulated on one machine.
        size_bytes: about what the node will hold.
    """
    may_write = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    in_memory = may_write and shutil.disk_usage(SHARED_MEMORY).total >= size_bytes
    parent = SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    for root in _roots(parent):
        with suppress(SpotlightError):  # another user's: of no concern here
            sweep(root)
    return parent / f"{PREFIX}{name}"


def memory_roots(name: str = "") -> list[Path]:
    """All directories that `shared_root` made on this machine for names that begin with ``name``."""
    return [root for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())) for root in _roots(parent, name)]


def _roots(parent: Path, name: str = "") -> Iterable[Path]:
    return parent.glob(f"{glob.escape(PREFIX + name)}*")


def sweep(root: Path) -> bool:
    """Remove a node's memory, unless a process still uses it, or it is not a directory of this user's own.

    Any user may put something of this name where all users have their shared memory: so no link is followed, and
    no pipe blocks. A directory without ``.alive`` was being made, or removed, by a process that was killed.

    Returns:
        Whether it was removed.
    """
    with suppress(OSError), own_directory(root) as directory:
        alive = os.open(".alive", os.O_RDWR | os.O_CREAT | _NO_TRAPS, 0o600, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(alive).st_mode):
                return False
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end_leftovers(root)  # it holds their ids: frozen ones would stay for ever
            swept = root.with_name(f"{root.name}.swept")
            root.rename(swept)  # at once, so that whoever comes now makes it anew
            shutil.rmtree(swept)
            return True
        finally:
            os.close(alive)
    return False


@contextmanager
def own_directory(path: Path) -> Iterator[int]:
    """A descriptor of a directory that belongs to this user alone.

    Raises:
        OSError: there is none, it is a link, or it is no directory.
        SpotlightError: it is another user's, or others may write to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_TRAPS)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise SpotlightError(f"{path}: belongs to user {found.st_uid}, not to you; name another directory")
        if found.st_mode & 0o022:
            raise SpotlightError(f"{path}: other users may write to it; take that right away (chmod 700), or remove it")
        yield descriptor
    finally:
        os.close(descriptor)


def map_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU and without a copy: its pages are shared until written to.

    The library's own reader (0.8) maps a file, too, but keeps two integers for every tensor that it reads for ever.
    """
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtypes |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "BOOL": torch.bool}
    dtypes |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
    with file.open("rb") as opened:
        start = int.from_bytes(opened.read(8), "little") + 8
        header = json.loads(opened.read(start - 8))
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(dtype: torch.dtype, shape: list[int], begin: int) -> Tensor:
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start + begin).view(shape)

    header.pop("__metadata__", None)
    return {
        name: tensor(dtypes[entry["dtype"]], entry["shape"], entry["data_offsets"][0]) for name, entry in header.items()
    }


def from_file(file: Path) -> Source:
    """A source that reads this one file, whatever hash it is asked for."""

    def read(_: str, offset: int, length: int) -> bytes:
        with file.open("rb") as content:
            content.seek(offset)
            return content.read(length)  # one `os.pread` gives 2 GB at most

    return read


def fingerprint(files: Iterable[Path], *circumstances: str) -> str:
    """Identifies the content of files without reading it, by path, size and time of change: 64 hexadecimal digits."""
    found = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(files)]
    return new_sha256(repr((found, circumstances)).encode()).hexdigest()


def hold(root: Path) -> int:
    """Make a directory, if it is absent; returns a descriptor that keeps `sweep` away from it until it is closed."""
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError), own_directory(root) as directory:  # swept meanwhile: make it anew
            descriptor = os.open(".alive", os.O_RDWR | os.O_CREAT | _NO_TRAPS, 0o600, dir_fd=directory)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(descriptor), (root / ".alive").stat()):
                    return os.dup(descriptor)
            finally:
                os.close(descriptor)


def is_held(root: Path, descriptor: int) -> bool:
    """Whether the directory is still the one that this descriptor holds."""
    try:
        return os.path.samestat(os.fstat(descriptor), (root / ".alive").stat())
    except FileNotFoundError:
        return False


def _held(lock: IO[str], limit_s: float) -> bool:
    """Whether a lock was taken before the limit; time in which this process was paused does not count."""
    for looks_left in reversed(range(1 + math.ceil(limit_s / POLL_S))):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S if looks_left else 0.0)
        else:
            return True
    return False


def _receive(partial: Path, sha256: str, size_bytes: int, source: Source) -> None:
    digest = new_sha256()
    with partial.open("wb") as file:
        file.writelines(hashing(_blocks(sha256, size_bytes, source), digest))
    if digest.hexdigest() != sha256:
        raise OSError(f"expected sha256 {sha256}, came {digest.hexdigest()}")


def _blocks(sha256: str, size_bytes: int, source: Source) -> Iterator[bytes]:
    """A file in order, with a bounded number of reads ahead of the one that is yielded."""

    def read(offset: int) -> bytes:
        length = min(BLOCK_BYTES, size_bytes - offset)
        block = source(sha256, offset, length)
        if len(block) != length:
            raise OSError(f"expected {length} bytes at {offset}, came {len(block)}")
        return block

    ahead: deque[Future[bytes]] = deque()
    streams = ThreadPoolExecutor(STREAMS)
    try:
        for offset in range(0, size_bytes, BLOCK_BYTES):
            ahead.append(streams.submit(read, offset))
            if len(ahead) > STREAMS:
                yield _first(ahead)
        while ahead:
            yield _first(ahead)
    finally:
        streams.shutdown(wait=False, cancel_futures=True)  # a read that hangs ends by its own limit


def _first(ahead: deque[Future[bytes]]) -> bytes:
    """Take the first block; raises as soon as any read fails, even while the first one hangs."""
    first, pending = ahead[0], set(ahead)
    while not first.done():
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for read in done:
            read.result()
    return ahead.popleft().result()


def _is_full(error: Exception) -> bool:
    # safetensors' own writer hides the number in a text
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(os.strerror(number) in str(error) for number in full)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
