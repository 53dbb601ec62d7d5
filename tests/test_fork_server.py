"""Plain workers of a node share a fork server: it outlives the one that started it, and no engine outlives its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest

from cluster.worker import fork_server as fork_server
from cluster.worker import process
from runs import ROOT, wait_for
from spotlight.records import SpotlightError

WORKER = """
import os, sys, threading, time
from cluster.worker.fork_server import continue_fork_server, end_with_this_process, fork_server, place

def keep():
    while True:
        time.sleep(0.5)
        continue_fork_server()

threading.Thread(target=keep, daemon=True).start()
sys.excepthook = lambda *error: sys.__excepthook__(*error) or os._exit(1)  # an engine would be waited for
for _ in sys.stdin:
    child = fork_server().Process(target=time.sleep, args=(1000,))
    child.start()
    end_with_this_process(child.pid)
    print(child.pid, place(), flush=True)
"""


class Worker:
    """Does what a worker does to have an engine, at each line that it reads."""

    def __init__(self, mark: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPOTLIGHT_NODE": mark}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe
        )

    def engine(self) -> tuple[psutil.Process, Path]:
        """Another one, and where its parent lives."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        pid, place = self.process.stdout.readline().split()
        return psutil.Process(int(pid)), Path(place)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[[], Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a worker of one node, which this test has for itself."""
    mark, started = uuid4().hex, list[Worker]()

    def another() -> Worker:
        started.append(Worker(mark))
        return started[-1]

    yield another
    for worker in started:
        worker.kill()


def is_unread(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_parent_serves_the_workers_of_a_node_until_the_last_of_them_is_gone(start: Start) -> None:
    first, second = start(), start()
    (frozen, place), (engine, _) = first.engine(), second.engine()
    parent = frozen.parent()
    assert parent
    assert engine.parent() == parent
    frozen.send_signal(signal.SIGSTOP)

    first.kill()

    wait_for(lambda: is_gone(frozen))
    assert second.engine()[0].parent() == parent
    assert not is_gone(engine)

    second.kill()

    wait_for(lambda: is_gone(engine) and is_gone(parent) and not place.exists())


def test_a_parent_whose_place_was_removed_or_that_was_killed_is_followed_by_another(start: Start) -> None:
    worker = start()
    first, place = worker.engine()
    parents = [first.parent()]
    shutil.rmtree(place)

    parents.append(worker.engine()[0].parent())
    assert not is_gone(first)
    second = parents[1]
    assert second
    second.kill()
    wait_for(lambda: is_unread(place / "alive"))  # a process is a zombie a moment before all its files are closed
    parents.append(worker.engine()[0].parent())
    (place / "socket").unlink()
    parents.append(worker.engine()[0].parent())

    assert len(set(parents)) == 4


def test_a_parent_that_was_stopped_goes_on(start: Start) -> None:
    worker = start()
    parent = worker.engine()[0].parent()
    assert parent
    parent.send_signal(signal.SIGSTOP)
    wait_for(lambda: parent.status() == psutil.STATUS_STOPPED)

    assert worker.engine()[0].parent() == parent


def test_a_parent_that_ends_while_it_is_looked_at_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would end whoever looks after it: a worker's keeper, or the driver."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "pid").write_text(str(ended.pid))
    monkeypatch.setattr(fork_server, "_joined", [SimpleNamespace(root=tmp_path, is_there=True)])
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", ended.pid)
    monkeypatch.setattr(process, "is_stopped", lambda pid: pid == ended.pid)

    assert not fork_server.continue_fork_server()
    assert not process.continue_own_fork_server()


def test_a_turn_that_never_comes_ends_with_who_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "TURN_S", 0.1)
    with (tmp_path / "starting").open("a+") as first, (tmp_path / "starting").open("a+") as second:
        fork_server._wait_for(first)

        with pytest.raises(SpotlightError, match=rf"process {os.getpid()} has held {second.name} for 0\.1 s.*End it"):
            fork_server._wait_for(second)

    with (tmp_path / "starting").open("a+") as third:
        fork_server._wait_for(third)  # at once: the first is done


def test_only_workers_of_the_same_environment_share_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fork_server.place()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(sys, "path", ["/tmp/dask-scratch-space/worker-7", *sys.path, Path("/elsewhere")])
    assert fork_server.place() == mine

    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert fork_server.place() != mine


def test_two_users_of_the_same_environment_share_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `docker exec --user`: the second could not use what is the first one's."""
    mine = fork_server.place()

    monkeypatch.setattr(os, "getuid", lambda: 1001)

    assert fork_server.place() != mine
