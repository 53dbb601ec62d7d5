"""Whatever ends a run, nothing of it is left moments later; what cannot be helped, the next start removes.

Ctrl-C, SIGTERM, SIGHUP and a killed driver are watched where their runs are tested (`test_run`).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from cluster.start import janitor
from leftovers import Watched, soon_empty
from runs import ROOT, WAIT_S, settings_file
from spotlight.records import SpotlightError, Stopped
from spotlight.store import leftovers, node, rundir
from spotlight.store.device_locks import DeviceLock
from spotlight.store.file_lock import FileLock
from spotlight.store.lease import Lease
from spotlight.store.leftovers import ENDING_S, Scratch, remove_half_written, sweep_ended, sweep_leftovers
from spotlight.store.node import PREFIX, Node, memory_roots, shared_root
from spotlight.store.objects import objects_at
from spotlight.store.rows import SPANS
from spotlight.store.rundir import RunDir

DRIVER = """
import os, signal, sys, threading, time
from contextlib import suppress
from elastic import engine_pid
from kills import client_of
from runs import wait_for
from spotlight.driver import Driver
from spotlight.run import Run
from spotlight.store.rows import SPANS

run = Run(sys.argv[1], ["run.iterations=1", "run.validate_every=1"]).start()
client = client_of(run)
wait_for(lambda: run.directory.rows(SPANS))
places = run.pools.cluster.workers

def worker(name):
    return places[name]._process.pid

def engine(name):
    workers = client.scheduler_info(n_workers=-1)["workers"]
    address = wait_for(lambda: next((at for at, each in workers.items() if each["name"] == name), None))
    return client.run(engine_pid, workers=[address])[address]
"""
ENDS = {
    "normal, after a worker was killed, and an engine frozen whose worker then went": """
os.kill(engine("spot-0"), signal.SIGSTOP)
os.kill(worker("spot-0"), signal.SIGKILL)
os.kill(worker("spot-1"), signal.SIGKILL)
run.wait()
""",
    "a driver that is killed while a worker and another's engine are frozen": """
os.kill(engine("spot-1"), signal.SIGSTOP)
os.kill(worker("spot-0"), signal.SIGSTOP)
(run.directory.path / ".a.json.1.part").write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
""",
    "an exception in the driver": """
def fail():
    raise RuntimeError("a bug")
Driver._follow = fail
run.wait()
""",
}
STATUS = dict(zip(ENDS, (0, -signal.SIGKILL, 1), strict=True))


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


@pytest.mark.parametrize("end", ENDS)
def test_after_the_end_nothing_is_left(end: str, watched: Watched, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER + ENDS[end])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**watched.environment, "PYTHONPATH": path}
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, str(script), str(settings_file(tmp_path / "runs"))]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
    try:
        driver.wait(2 * WAIT_S)  # on a busy machine the first worker alone may take a minute
    finally:
        driver.kill()
        driver.wait()

    assert driver.returncode == STATUS[end], (tmp_path / "said").read_text()
    assert list((tmp_path / "runs").glob(f"run-*/{SPANS}"))
    watched.assert_nothing_is_left(tmp_path / "runs")


KILLED = """
import os, signal, sys
from pathlib import Path
from spotlight.store.leftovers import Scratch
from spotlight.store.node import Node, shared_root
scratch, node = Scratch(), Node(shared_root(sys.argv[1]))
(node.root / "a").write_text("a")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_is_left_when_everything_was_killed_the_next_start_removes_and_names(tmp_path: Path) -> None:
    name = f"killed-{tmp_path.name}-{os.getpid()}"
    killed = subprocess.Popen([sys.executable, "-c", KILLED, name], cwd=ROOT)
    killed.wait()
    held, here = Node(shared_root(f"{name}-alive")), Scratch()

    swept = [path.name for path in sweep_leftovers()]

    try:
        assert [root.name for root in memory_roots(name)] == [held.root.name]
        assert any(f"scratch-{killed.pid}-" in each for each in swept) or not memory_roots(f"scratch-{killed.pid}-")
        assert here.path.is_dir()
    finally:
        held.close()
        here.close()
        sweep_leftovers(name)
    assert not here.path.exists()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that this machine has, and this user's temporary files."""
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_leftover_process_is_ended_though_another_uses_the_directory_but_not_if_anybody_can_name_it(
    memory: Path, is_ours: bool
) -> None:
    used = Node(shared_root("used"))
    process = subprocess.Popen(["sleep", "60"])
    try:
        slot = DeviceLock(used.root)
        slot.record(process.pid)
        slot.close()
        used.root.chmod(0o700 if is_ours else 0o777)

        swept = sweep_leftovers()

        is_ended = process.poll() is not None
    finally:
        process.kill()
        process.wait()
    assert is_ended == is_ours
    assert swept == []
    assert used.root.is_dir()


def test_what_is_no_directory_keeps_nobody_from_the_rest(memory: Path) -> None:
    (memory / f"{PREFIX}file").touch()
    (memory / f"{PREFIX}link").symlink_to(memory)
    (memory / f"{PREFIX}loop").symlink_to(f"{PREFIX}loop")
    (memory / f"{PREFIX}left").mkdir(mode=0o700)

    assert set(sweep_leftovers()) == {memory / f"{PREFIX}left"}
    assert {path.name for path in memory.iterdir()} == {f"{PREFIX}{name}" for name in ("file", "link", "loop")}


def test_processes_that_are_still_ending_are_waited_for_but_not_for_ever(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, stays = Node(shared_root("run-a")), Node(shared_root("run-b"))
    threading.Timer(0.1, ending.close).start()

    sweep_ended("run-a")
    monkeypatch.setattr(leftovers, "ENDING_S", 0.1)
    sweep_ended("run-b")

    assert not ending.root.exists()
    assert stays.root.exists()


@pytest.mark.parametrize("name", ["short", "x" * 150])
def test_sockets_can_be_made_wherever_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    (tmp_path / name).mkdir()
    scratch = Scratch(sockets=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(scratch.path / "listener-12345678"))
        assert scratch.path in memory_roots()
    finally:
        scratch.close()


@pytest.mark.parametrize(
    ("length", "sockets", "memory", "moved"),
    [
        (107, True, "memory", False),
        (108, True, "memory", True),
        (108, False, "memory", False),
        (108, True, "nowhere", False),
    ],
)
def test_only_a_directory_whose_sockets_would_have_too_long_names_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, sockets: bool, memory: str, moved: bool
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / memory)
    with tempfile.TemporaryDirectory() as parent:
        rest = f"{parent}//{PREFIX}scratch-{os.getpid()}-12345678/listener-12345678"
        folder = Path(parent, "x" * (length - len(rest)))
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        scratch = Scratch(sockets=sockets)
        scratch.close()

    assert scratch.path.parent == (tmp_path / memory if moved else folder)


def test_a_directory_for_one_process_that_could_not_be_made_anew_at_once_is_made_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch = Scratch()
    try:
        shutil.rmtree(scratch.path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", no_room)
            with pytest.raises(OSError, match="No space left"):
                scratch.keep()
        scratch.keep()
        assert scratch.path not in sweep_leftovers(scratch.path.name.removeprefix(PREFIX))
        assert scratch.path.is_dir()
    finally:
        scratch.close()

    assert not scratch.path.exists()


def no_room(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as writer:
        parts = [tmp_path / f".report.html.{pid}-1.part" for pid in (writer.pid, os.getpid(), 2**22 + 1)]
        for part in parts:
            part.touch()
        removed = set(remove_half_written(tmp_path))
        writer.kill()

    assert removed == set(parts[1:])


def test_what_was_half_written_is_removed_and_nothing_else(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "images").mkdir()
    (tmp_path / "weights" / ".writing-v00003-12ab").mkdir(parents=True)
    (tmp_path / "weights" / ".staged-v00002").mkdir()
    half = ".a.json.7.part", "images/c0.0.0.12ab.partial", "weights/.writing-v00003-12ab/old.safetensors"
    whole = "a.json", "images/part.npz", "images/score.part", "weights/.staged-v00002/old.safetensors"
    for name in (*half, *whole):
        (tmp_path / name).write_text("")
    (elsewhere / ".a.json.7.part").write_text("")
    (tmp_path / "link").symlink_to(elsewhere)

    removed = {str(path.relative_to(tmp_path)) for path in remove_half_written(tmp_path)}

    assert removed == {*half[:2], "weights/.writing-v00003-12ab"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*whole}
    assert len(list(elsewhere.iterdir())) == 1
    assert remove_half_written(tmp_path / "gone") == []


@pytest.mark.parametrize("has_driver", [False, True])
def test_the_janitor_leaves_a_run_alone_that_has_its_next_driver_already(tmp_path: Path, has_driver: bool) -> None:
    (tmp_path / "c0.12ab.partial").write_text("")

    with FileLock(tmp_path).held() if has_driver else nullcontext():
        janitor.clean([("half written", str(tmp_path)), ("half written", str(tmp_path / "gone"))])

    assert (tmp_path / "c0.12ab.partial").exists() == has_driver


@pytest.mark.parametrize("driver", ["elsewhere", "killed here", "released elsewhere"])
def test_the_janitor_leaves_a_run_alone_whose_next_driver_another_machine_has(tmp_path: Path, driver: str) -> None:
    """Where file locks are each machine's own, only the record of the lease tells."""
    with RunDir(tmp_path).lock() as ours:
        here = ours.files
    lease = Lease(objects_at(str(tmp_path)), here if driver == "killed here" else "of another machine")
    lease.take()
    if driver == "released elsewhere":
        lease.release()
    (tmp_path / "c0.12ab.partial").write_text("")

    janitor.clean([("half written", str(tmp_path))])

    assert (tmp_path / "c0.12ab.partial").exists() == (driver == "elsewhere")


@pytest.mark.parametrize("driver", ["killed here", "elsewhere"])
def test_who_was_killed_here_has_a_run_no_longer_and_who_is_elsewhere_may_be_lost(tmp_path: Path, driver: str) -> None:
    run = RunDir(tmp_path)
    with run.lock() as ours:
        here = ours.files
    lease = Lease(run.objects, here if driver == "killed here" else "of another machine")
    lease.take()

    assert run.holder().startswith("process ") == (driver == "elsewhere")
    assert run.perhaps_lost() is None
    with FileLock(tmp_path).held():
        assert (run.perhaps_lost() is not None) == (driver == "elsewhere")
    lease.release()


def test_who_has_not_said_yet_who_it_is_has_a_run_all_the_same(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    with FileLock(tmp_path).held():
        assert run.holder() == "a process of this machine"
        with pytest.raises(SpotlightError, match="a process of this machine is running this run"), run.lock():
            pass


def test_nobody_is_kept_from_a_run_where_nothing_is_left(tmp_path: Path) -> None:
    """A directory may have a million files: its lock is held for what is removed, not for the walk."""
    (tmp_path / "a.json").write_text("")
    asked: list[bool] = []

    @contextmanager
    def unused() -> Iterator[bool]:
        asked.append((tmp_path / "c0.12ab.partial").exists())
        yield True

    remove_half_written(tmp_path, unused)
    (tmp_path / "c0.12ab.partial").write_text("")
    remove_half_written(tmp_path, unused)

    assert asked == [True]


def test_who_only_looks_at_a_run_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rundir, "SAY_S", 0.2)
    run, looking = RunDir(tmp_path), ExitStack()
    looking.enter_context(FileLock(tmp_path).held(shared=True))
    (asked := threading.Event()).set()

    with pytest.raises(Stopped), run.lock(asked):
        pass
    monkeypatch.setattr(rundir, "TURN_S", 0.5)
    with (
        pytest.raises(SpotlightError, match=rf"has looked at .* for 0\.5 s, .*`fuser {tmp_path}/lock` names it"),
        run.lock(),
    ):
        pass
    assert caplog.text.count("waits for a process that looks at its files") == 1

    monkeypatch.setattr(rundir, "TURN_S", WAIT_S)
    threading.Timer(0.5, looking.close).start()
    with run.lock():
        assert run.holder()


OWNER = """
import subprocess, sys, time
from cluster.start import janitor
from spotlight.store.device_locks import began
frozen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
janitor.register("process", f"{frozen.pid} {began(frozen.pid)}")
janitor.register("folder", sys.argv[1])
janitor.register("folder", sys.argv[2])
janitor.unregister("folder", sys.argv[2])
if sys.argv[3:]:
    import os, signal
    os.kill(janitor._janitors[0]._pid, signal.SIGKILL)
    os.waitpid(janitor._janitors[0]._pid, os.WNOHANG)
    time.sleep(0.5)
    janitor.register("folder", sys.argv[3])
    janitor.register("folder", sys.argv[3])
print(frozen.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_janitor_ends_and_removes_what_it_was_told_of_and_no_more(tmp_path: Path, is_killed: bool) -> None:
    """Killed itself, it is followed by another that is told the same."""
    gone, kept, later = (tmp_path / name for name in ("gone", "kept", "later"))
    for folder in (gone, kept, later):
        folder.mkdir()
    command = [sys.executable, "-c", OWNER, str(gone), str(kept), *([str(later)] if is_killed else [])]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    frozen = psutil.Process(int(owner.stdout.readline()))
    frozen.suspend()

    owner.kill()
    owner.communicate()

    assert soon_empty(lambda: [str(gone)] * gone.exists() + ["frozen"] * frozen.is_running()) == []
    assert kept.is_dir()
    assert later.exists() != is_killed


def test_the_key_that_a_driver_on_slurm_lends_its_jobs_goes_with_it(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from cluster.start.slurm import _certificates
with _certificates(Path({str(tmp_path / "run-1")!r})):
    assert list((Path.home() / ".spotlight").rglob("*.pem"))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    driver = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)})

    assert driver.returncode == -signal.SIGKILL
    assert soon_empty(lambda: list(map(str, (tmp_path / ".spotlight").iterdir()))) == []


def test_a_path_as_long_as_can_be_does_not_keep_the_janitor_from_the_rest(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = f"""
import os, signal
from cluster.start import janitor
janitor.register("folder", "/" + "\\xe4" * 4000)  # six bytes each in JSON
janitor.register("folder", {str(tmp_path / "gone")!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)

    assert soon_empty(lambda: [str(tmp_path)] * (tmp_path / "gone").exists()) == []


def test_a_janitor_cleans_although_its_owner_has_more_than_texts_in_its_path(tmp_path: Path) -> None:
    """A notebook may well put a `Path` there, which imports skip."""
    script = f"""
import os, pathlib, signal, sys
sys.path.append(pathlib.Path("/elsewhere"))
from cluster.start import janitor
janitor.register("folder", {str(tmp_path / "gone")!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "gone").mkdir()
    subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT)

    assert soon_empty(lambda: [str(tmp_path)] * (tmp_path / "gone").exists()) == []


def test_another_process_finds_modules_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "src", Path("/elsewhere"), "/there"])

    assert janitor.module_path() == [str(tmp_path), str(tmp_path / "src"), "/there"]


def test_a_janitor_cleans_although_a_child_of_its_owner_has_its_pipe_and_it_got_the_owners_signals(
    tmp_path: Path,
) -> None:
    script = f"""
import os, signal, time
from cluster.start import janitor
janitor.register("folder", {str(tmp_path / "gone")!r})
if os.fork() == 0:
    time.sleep(600)
pid = janitor._janitors[0]._pid
while os.readlink(f"/proc/{{pid}}/cwd") != "/":  # until it watches
    time.sleep(0.01)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    os.kill(pid, each)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "SPOTLIGHT_WATCHED": tmp_path.name}
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, start_new_session=True)
    owner.wait()

    try:
        assert soon_empty(lambda: [str(tmp_path)] * (tmp_path / "gone").exists()) == []
    finally:
        os.killpg(owner.pid, signal.SIGKILL)


def test_what_cannot_be_removed_keeps_nobody_from_the_rest(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    began_s = time.monotonic()

    janitor.clean({("folder", str(tmp_path / "none")), ("folder", str(tmp_path / "folder")), ("process", "0 ")})

    assert not (tmp_path / "folder").exists()
    assert time.monotonic() - began_s < ENDING_S
