"""Weights come from other workers, real processes here, whatever those do: answer, die, freeze or send wrong bytes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Scheduler, Security, Worker

from cluster.worker import peers
from spotlight.store.node import BLOCK_BYTES, STREAMS, Node, NotOnNode, Source, from_file

IMPORT_ROOT = str(Path(__file__).parents[1])
CONTENT = os.urandom(50 << 20)
NAME = sha256(CONTENT).hexdigest()

HOLDER = f"""
import asyncio, pickle, sys
sys.path.insert(0, {IMPORT_ROOT!r})
from pathlib import Path
from distributed import Scheduler, Worker
from cluster.worker import peers
from spotlight.store.node import Node

async def main():
    security = pickle.load(sys.stdin.buffer)
    common = {{"host": "127.0.0.1", "security": security}}
    async with Scheduler(port=0, dashboard_address="127.0.0.1:0", **common) as scheduler:
        async with Worker(scheduler.address, nthreads=1, **common) as worker:
            if len(sys.argv) > 1:
                peers.serve(worker, Node(Path(sys.argv[1])))
            print(worker.address, flush=True)
            await worker.finished()

asyncio.run(main())
"""


class Holder:
    """A worker in a process of its own, on a node that holds the file."""

    def __init__(self, root: Path | None, security: Security | None) -> None:
        if root:
            self.file = Node(root).bring(NAME, len(CONTENT), [lambda _, at, length: CONTENT[at : at + length]])
        command = [sys.executable, "-c", HOLDER, *([str(root)] if root else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.process.stdin as stdin:
            pickle.dump(security, stdin)
        self.address = self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Holder]]:
    with ExitStack() as stack:

        def started(root: Path | None, security: Security | None = None) -> Holder:
            holder = Holder(root, security)
            stack.callback(holder.close)
            return holder

        yield started


def with_worker(work: Callable[[Worker], Path], security: Security | None = None) -> Path:
    """What ``work`` returns, called in a thread beside the event loop of a worker of this process."""

    async def main() -> Path:
        async with (
            Scheduler(port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", security=security) as scheduler,
            Worker(scheduler.address, nthreads=1, host="127.0.0.1", security=security) as worker,
        ):
            return await asyncio.to_thread(work, worker)

    return asyncio.run(main())


def pull(
    root: Path,
    holders: list[str],
    *,
    store: Path | None = None,
    before_block: Callable[[int], None],
    security: Security | None = None,
) -> Path:
    """Bring the file to a node; ``before_block`` is called with the number of each block before it is asked for."""

    def spied(source: Source) -> Source:
        def read(name: str, offset: int, length: int) -> bytes:
            before_block(offset // BLOCK_BYTES)
            return source(name, offset, length)

        return read

    def work(worker: Worker) -> Path:
        first, *others = peers.sources(worker, holders)
        last = [from_file(store)] if store else []
        return Node(root).bring(NAME, len(CONTENT), [spied(first), *others, *last])

    return with_worker(work, security)


def nothing(block: int) -> None:
    """For a pull that goes undisturbed."""


Start = Callable[..., Holder]


def test_a_file_comes_from_a_peer_in_several_streams(tmp_path: Path, start: Start) -> None:
    holder = start(tmp_path / "there")
    blocks: list[int] = []

    path = pull(tmp_path / "here", [holder.address], before_block=blocks.append)

    assert path.read_bytes() == CONTENT
    assert sorted(blocks) == list(range(-(-len(CONTENT) // BLOCK_BYTES)))
    assert len(blocks) > STREAMS  # so that every stream had something to do


def test_a_file_comes_from_a_peer_with_the_same_certificate_and_from_no_other(tmp_path: Path, start: Start) -> None:
    ours = Security.temporary()
    stranger, friend = start(tmp_path / "stranger", Security.temporary()), start(tmp_path / "friend", ours)

    with pytest.raises(NotOnNode, match=f"source 0: {stranger.address}: "):
        pull(tmp_path / "refused", [stranger.address], before_block=nothing, security=ours)
    path = pull(tmp_path / "here", [friend.address], before_block=nothing, security=ours)

    assert friend.address.startswith("tls://")
    assert path.read_bytes() == CONTENT


def test_a_holder_killed_in_mid_pull_is_passed_over_for_the_next(tmp_path: Path, start: Start) -> None:
    first, second = start(tmp_path / "first"), start(tmp_path / "second")

    def kill(block: int) -> None:
        if block == 2:
            first.process.kill()
            first.process.wait()

    path = pull(tmp_path / "here", [first.address, second.address], before_block=kill)

    assert path.read_bytes() == CONTENT
    assert first.process.returncode == -signal.SIGKILL


def test_without_a_holder_left_the_store_serves(tmp_path: Path, start: Start) -> None:
    holder = start(tmp_path / "there")
    (tmp_path / "stored").write_bytes(CONTENT)

    def kill(block: int) -> None:
        if block == 2:
            holder.process.kill()
            holder.process.wait()

    path = pull(tmp_path / "here", [holder.address], store=tmp_path / "stored", before_block=kill)

    assert path.read_bytes() == CONTENT


def test_a_frozen_holder_is_passed_over(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "READ_TIMEOUT_S", 0.5)
    frozen = start(tmp_path / "frozen")
    (tmp_path / "stored").write_bytes(CONTENT)

    def freeze(block: int) -> None:
        if block == 2:
            frozen.process.send_signal(signal.SIGSTOP)

    path = pull(tmp_path / "here", [frozen.address], store=tmp_path / "stored", before_block=freeze)

    assert path.read_bytes() == CONTENT


def test_wrong_bytes_from_a_peer_are_rejected(tmp_path: Path, start: Start) -> None:
    wrong = start(tmp_path / "wrong")
    with wrong.file.open("r+b") as file:
        file.seek(len(CONTENT) // 2)
        file.write(bytes([CONTENT[len(CONTENT) // 2] ^ 1]))

    with pytest.raises(NotOnNode, match=f"source 0: expected sha256 {NAME}, came "):
        pull(tmp_path / "here", [wrong.address], before_block=nothing)

    assert not Node(tmp_path / "here").holds(NAME)


def test_a_peer_without_the_file_says_so(tmp_path: Path, start: Start) -> None:
    without, silent = start(tmp_path / "there"), start(None)
    without.file.unlink()

    with pytest.raises(NotOnNode) as refused:
        pull(tmp_path / "here", [without.address, silent.address], before_block=nothing)

    assert f"source 0: {without.address}: [Errno 2] No such file" in str(refused.value)
    assert f"source 1: {silent.address}: serves no weights" in str(refused.value)


@pytest.mark.timeout(60)
def test_a_holder_that_is_gone_costs_no_wait(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "READ_TIMEOUT_S", 3600.0)  # to wait for one of the limits would fail the test
    gone, holder = start(None), start(tmp_path / "there")
    gone.close()

    with dask.config.set({"distributed.comm.timeouts.connect": "1h"}):
        path = pull(tmp_path / "here", [gone.address, holder.address], before_block=nothing)

    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (("../../etc/passwd", 0, 1), "named by 64 hexadecimal digits"),
        ((NAME, -1, 1), "a range has at most"),
        ((NAME, 0, BLOCK_BYTES + 1), "a range has at most"),
        ((NAME, 0, -1), "a range has at most"),
        ((NAME, "0", 1), "not supported between instances of 'str' and 'int'"),
    ],
)
def test_a_worker_serves_ranges_of_what_its_node_holds_and_nothing_else(
    tmp_path: Path, asked: tuple[Any, ...], answer: str
) -> None:
    def ask(worker: Worker) -> Path:
        peers.serve(worker, Node(tmp_path))
        (source,) = peers.sources(worker, [worker.address])
        source(*asked)
        return tmp_path

    with pytest.raises(OSError, match=answer):
        with_worker(ask)
