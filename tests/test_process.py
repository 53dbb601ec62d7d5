"""The process that owns a device: whatever happens to it, its caller lives, learns of it, and gets another."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from distributed import Reschedule

from cluster.messages import HOLDS, LOST_ENGINE
from cluster.worker.device import WorkerDevice
from cluster.worker.process import own_fork_server, own_fork_server_pid
from factories import make_request
from graphs.requests import rollout_requests, unexplored
from graphs.tasks.context import prepare
from runs import settings_file, wait_for
from spotlight import config
from spotlight.background import _explain
from spotlight.device import process as device_process
from spotlight.device.calls import PrepareCall, RolloutCall
from spotlight.device.process import Beat, EngineLost, EngineProcess, TimedOut, take_environment
from spotlight.device.protocol import ALONE, Device
from spotlight.device.signals import Stop, signals
from spotlight.device.training import PASSES
from spotlight.records import (
    NO_DEVICE,
    WITHOUT_GPU,
    Gradient,
    GradientPart,
    Request,
    Rollout,
    Sample,
    Scored,
    SpotlightError,
    Stopped,
    Surplus,
)
from spotlight.rl.algorithms.nft import Nft
from spotlight.rl.prompts import read_prompts
from spotlight.store import updates
from spotlight.store.creating import create_run
from spotlight.store.node import Node
from spotlight.store.rundir import RunDir

HANG_AFTER_S = 1.0
SLOW = ["pace.gpu=h100", "pace.speedup=0.5"]
"""A request of two samples then lasts several seconds: it can be met at work."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return create_run(config.load(settings_file(tmp_path_factory.mktemp("device")), SLOW), time.time())


@pytest.fixture(scope="module")
def slow(run: RunDir) -> Request:
    settings, setting = run.config(), prepare(str(run.path))
    prompts = read_prompts(settings.data.train_prompts)[:1]
    return rollout_requests(settings, setting, unexplored(settings, setting, 0, prompts), setting.start)[0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(own_fork_server(), 0, node=tmp_path / "node", hang_after_s=HANG_AFTER_S)
    yield process
    process.close()


class Met:
    """Does something once the call has taken two steps, so that the first of them is committed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self.steps: list[int] = []

    def __call__(self, beat: Beat) -> None:
        if beat.step is not None and not beat.resumed:
            self.steps.append(beat.step)
            if len(self.steps) == 2:
                threading.Thread(target=self._then).start()


def test_an_engine_comes_from_the_own_fork_server(engine: EngineProcess) -> None:
    other = EngineProcess(own_fork_server(), 1, node=engine._node, hang_after_s=HANG_AFTER_S)

    parents = {psutil.Process(process.pid).ppid() for process in (engine, other)}
    other.close()

    assert len(parents) == 1
    assert os.getpid() not in parents


OWN = """
import multiprocessing, os
from cluster.worker.process import own_fork_server, own_fork_server_pid
multiprocessing.get_context("forkserver").Process(target=os.getpid).start()
own = own_fork_server_pid()
own_fork_server().Process(target=os.getpid).start()
print(own, own_fork_server_pid())
"""


def test_a_programs_own_fork_server_is_not_taken_for_the_own_fork_server() -> None:
    """It has not done our imports: each worker, and each engine, would do them again."""
    told = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=True)

    own, ours = map(int, told.stdout.split())
    assert 0 < own != ours > 0


STOPPED = """
import sys, time
from pathlib import Path
from cluster.worker.process import own_fork_server
from spotlight.device.process import EngineProcess
engine = EngineProcess(own_fork_server(), 0, node=Path(sys.argv[1]), hang_after_s=60)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_stopped_ends_with_its_worker_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout
            engine = psutil.Process(int(worker.stdout.readline()))
            wait_for(lambda: engine.num_threads() > 1, worker)  # one takes orders
            engine.suspend()
        finally:
            worker.kill()

    wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


class SayCall:
    verb = "say"

    def on(self, device: object, run_dir: str) -> None:
        os.write(1, b"to stdout")
        os.write(2, b"to stderr")


def test_what_an_engine_writes_goes_where_its_worker_writes(
    engine: EngineProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parent that it is forked from, here since the first engine, writes elsewhere."""
    other = EngineProcess(own_fork_server(), 1, node=engine._node, hang_after_s=HANG_AFTER_S)
    say: Any = SayCall()
    other.call("", say, lambda beat: None)
    other.close()

    assert capfd.readouterr() == ("to stdout", "to stderr")


class EnvironmentCall:
    def on(self, device: object, run_dir: str) -> dict[str, str]:
        return dict(os.environ)


def test_an_engine_knows_what_its_caller_was_told_after_the_parent_began(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    later = EngineProcess(own_fork_server(), 1, node=engine._node, hang_after_s=HANG_AFTER_S)
    call: Any = EnvironmentCall()

    known = later.call(str(tmp_path), call, lambda beat: None)
    later.close()

    assert known["AWS_ACCESS_KEY_ID"] == "someone"
    assert known["LOCAL_RANK"] == "1"


def test_no_process_sees_the_gpus_of_the_worker_that_started_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that it is as before after the test

    take_environment({"LOCAL_RANK": "1"})
    unsaid = os.environ.get("CUDA_VISIBLE_DEVICES")
    take_environment({"CUDA_VISIBLE_DEVICES": "5"})

    assert unsaid is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize("number", [1, NO_DEVICE])
def test_an_engine_without_a_device_is_told_so(engine: EngineProcess, tmp_path: Path, number: int) -> None:
    other = EngineProcess(own_fork_server(), number, node=engine._node, hang_after_s=HANG_AFTER_S)
    call: Any = EnvironmentCall()

    known = other.call(str(tmp_path), call, lambda beat: None)
    other.close()

    assert (WITHOUT_GPU in known) == (number == NO_DEVICE)


class LoadedCall:
    def on(self, device: Any, run_dir: str) -> list[str]:
        return [run for run, engine in device._engines.items() if "model" in vars(engine.resident)]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_an_engine_has_the_model_of_a_prepared_run_before_it_is_called(
    tmp_path: Path, run: RunDir, slow: Request, is_prepared: bool
) -> None:
    """Who prepares a run makes what the others only read."""
    where = run.path if is_prepared else create_run(config.load(settings_file(tmp_path)), time.time()).path
    process = EngineProcess(own_fork_server(), 0, node=tmp_path / "node", hang_after_s=HANG_AFTER_S, run_dir=str(where))
    call: Any = LoadedCall()

    loaded = process.call(str(where), call, lambda beat: None)
    process.close()

    assert loaded == ([str(where)] if is_prepared else [])


def test_who_is_killed_while_it_asks_for_a_process_takes_no_others_with_it(engine: EngineProcess) -> None:
    """The parent takes the end of a connection for its own, and what was forked from it would end."""
    parent, server = own_fork_server_pid(), cast("Any", forkserver._forkserver)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(server._forkserver_address)

    other = EngineProcess(own_fork_server(), 1, node=engine._node, hang_after_s=HANG_AFTER_S)
    came_from = psutil.Process(other.pid).ppid()
    other.close()

    assert came_from == parent == psutil.Process(engine.pid).ppid()


def test_a_notice_that_comes_to_all_processes_of_a_job_ends_no_engine(engine: EngineProcess, tmp_path: Path) -> None:
    """As Slurm sends it, more than once if need be."""
    first, parent, call = engine.pid, own_fork_server_pid(), EnvironmentCall()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        for process in (parent, first):
            os.kill(process, number)

    engine.call(str(tmp_path), call, lambda beat: None)  # type: ignore[arg-type]

    assert engine.pid == first
    assert psutil.Process(first).ppid() == parent


def test_a_killed_engine_is_replaced_and_its_work_goes_on(engine: EngineProcess, run: RunDir, slow: Request) -> None:
    killed = Met(lambda: os.kill(engine.pid, signal.SIGKILL))
    first = engine.pid

    with pytest.raises(EngineLost, match="SIGKILL"):
        engine.call(str(run.path), RolloutCall(request=slow, place=ALONE), killed)
    done = engine.call(str(run.path), RolloutCall(request=slow, place=ALONE), lambda beat: None)

    assert engine.pid != first
    assert isinstance(done, Rollout)
    assert done.steps_resumed >= 1


class EndedCall:
    """Its process is ended by a signal that has no name of its own."""

    verb = "ended"

    def on(self, device: Device, run_dir: str) -> None:
        os.kill(os.getpid(), signal.SIGRTMIN + 6)


def test_an_engine_that_a_signal_without_a_name_ended_is_replaced(engine: EngineProcess, tmp_path: Path) -> None:
    first = engine.pid

    with pytest.raises(EngineLost, match="Real-time signal 6"):
        engine.call(str(tmp_path), EndedCall(), lambda beat: None)  # type: ignore[arg-type]

    assert engine.pid != first


def test_a_frozen_engine_is_ended_after_the_limit(engine: EngineProcess, run: RunDir, slow: Request) -> None:
    frozen = Met(lambda: os.kill(engine.pid, signal.SIGSTOP))
    first = engine.pid

    with pytest.raises(EngineLost, match=f"no sign of life for {HANG_AFTER_S:g} s"):
        engine.call(str(run.path), RolloutCall(request=replace(slow, iteration=1), place=ALONE), frozen)

    assert not psutil.pid_exists(first)


class SlowPart:
    """Computes the gradient of a part, and sleeps for so long within a pass, after the passes, or as it is written."""

    verb = "gradient"

    def __init__(self, part: GradientPart, where: str, seconds: float) -> None:
        self.part, self.where, self.seconds = part, where, seconds

    def on(self, device: Device, run_dir: str) -> Gradient | Surplus:
        places = {"in its first pass": (Nft, "loss"), "after its passes": (Nft, "metrics")}
        owner, name = {**places, "in its writing": (updates, "put")}[self.where]
        original = getattr(owner, name)

        def slowly(*arguments: Any) -> Any:
            time.sleep(self.seconds)
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, slowly)
            return device.gradient(run_dir, self.part)


@pytest.fixture
def part(engine: EngineProcess, tmp_path: Path) -> tuple[str, GradientPart]:
    """With its run, which is not paced; its latents are there, so that nothing is denoised again."""
    run = create_run(config.load(settings_file(tmp_path)), time.time())
    settings, setting = run.config(), prepare(str(run.path))
    prompts = read_prompts(settings.data.train_prompts)[:1]
    request = rollout_requests(settings, setting, unexplored(settings, setting, 0, prompts), setting.start)[0]
    engine.call(str(run.path), RolloutCall(request=request, place=ALONE), lambda beat: None)
    samples = tuple(Sample(request=request, index=index, reward=0.5, advantage=1.0) for index in (0, 1))
    fields: dict[str, Any] = {"iteration": 0, "update": 0, "number": 0, "positions": (0, 1)}
    return str(run.path), GradientPart(weights=request.weights, samples=samples, **fields)


@pytest.mark.parametrize("where", ["in its first pass", "after its passes"])
def test_an_engine_whose_training_gets_stuck_is_ended_after_the_limit(
    engine: EngineProcess, part: tuple[str, GradientPart], where: str
) -> None:
    run_dir, first = part[0], engine.pid
    stuck: Any = SlowPart(part[1], where, 60.0)

    with pytest.raises(EngineLost, match=f"no sign of life for {PASSES.patience * HANG_AFTER_S:g} s"):
        engine.call(run_dir, stuck, lambda beat: None)

    assert not psutil.pid_exists(first)


def test_an_engine_that_writes_a_gradient_slowly_is_left_to_it(
    engine: EngineProcess, part: tuple[str, GradientPart]
) -> None:
    run_dir, first = part[0], engine.pid
    patient: Any = SlowPart(part[1], "in its writing", 1.5 * PASSES.patience * HANG_AFTER_S)

    assert isinstance(engine.call(run_dir, patient, lambda beat: None), Gradient)

    assert engine.pid == first


def test_orders_reach_the_work_in_flight(engine: EngineProcess, run: RunDir, slow: Request) -> None:
    stopped = Met(lambda: engine.tell(Stop(run=slow.run)))

    with pytest.raises(Stopped):
        engine.call(str(run.path), RolloutCall(request=replace(slow, iteration=2), place=ALONE), stopped)

    assert len(stopped.steps) < slow.steps


class LargeCall:
    """Its answer is larger than what the system holds between two processes."""

    verb = "large"
    content = b""

    def on(self, device: Any, run_dir: str) -> bytes:
        device._on_beat(Beat(step=1, steps=1))
        return bytes(8 << 20)


def test_an_engine_that_is_frozen_in_the_middle_of_its_answer_is_ended_after_the_limit(
    engine: EngineProcess, tmp_path: Path
) -> None:
    def freeze(_: Beat) -> None:
        assert engine._calls.poll(60.0)
        os.kill(engine.pid, signal.SIGSTOP)

    with pytest.raises(EngineLost, match="no sign of life for 1 s"):
        engine.call(str(tmp_path), cast("Any", LargeCall()), freeze)


def test_an_engine_that_is_frozen_before_it_takes_a_large_call_is_ended_after_the_limit(
    engine: EngineProcess, tmp_path: Path
) -> None:
    large = LargeCall()
    large.content = bytes(8 << 20)
    os.kill(engine.pid, signal.SIGSTOP)

    with pytest.raises(EngineLost, match="no sign of life for 1 s"):
        engine.call(str(tmp_path), cast("Any", large), lambda beat: None)


def test_an_engine_that_the_system_cannot_end_holds_nobody_up(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in its device's driver."""
    monkeypatch.setattr(device_process, "ENDS_S", 0.1)
    stuck, asks = engine._process, cast("Any", EnvironmentCall())
    with monkeypatch.context() as patch:
        patch.setattr(stuck, "kill", lambda: None)
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match="no sign of life"):
            engine.call(str(tmp_path), asks, lambda beat: None)

    assert engine.call(str(tmp_path), asks, lambda beat: None)
    assert stuck.is_alive()
    stuck.kill()
    stuck.join()


class StopIsKnown:
    verb = "wait"

    def on(self, device: object, run_dir: str) -> bool:
        until_s = time.monotonic() + 5.0
        while not signals.is_stopping("r") and time.monotonic() < until_s:
            time.sleep(0.01)
        return signals.is_stopping("r")


def test_an_order_that_comes_while_an_engine_comes_up_anew_reaches_it(tmp_path: Path) -> None:
    engines: list[EngineProcess] = []

    def started(_: int) -> None:
        for each in engines:
            each.tell(Stop(run="r"))

    engine = EngineProcess(own_fork_server(), 0, node=tmp_path / "node", hang_after_s=HANG_AFTER_S, on_start=started)
    engines.append(engine)
    call: Any = StopIsKnown()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        engine.call(str(tmp_path), call, lambda beat: None)

    known = engine.call(str(tmp_path), call, lambda beat: None)
    engine.close()

    assert known


def test_an_engine_that_is_closed_while_it_comes_up_anew_ends(
    engine: EngineProcess, run: RunDir, slow: Request
) -> None:
    """A worker may leave at the very moment when its engine was killed."""
    fresh = replace(slow, iteration=3)
    closer = threading.Thread(target=engine.close)

    def strike() -> None:
        os.kill(engine.pid, signal.SIGKILL)
        closer.start()

    killed = Met(strike)
    with pytest.raises(EngineLost):
        engine.call(str(run.path), RolloutCall(request=fresh, place=ALONE), killed)
    closer.join()

    assert not psutil.pid_exists(engine.pid)
    with pytest.raises(EngineLost):
        engine.call(str(run.path), RolloutCall(request=fresh, place=ALONE), killed)


def test_what_an_engine_raises_its_caller_gets(engine: EngineProcess, tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="no such settings file") as raised:
        engine.call(str(tmp_path), PrepareCall(), lambda beat: None)

    assert "engine.py" in raised.value.__notes__[0]  # where it was raised, over there


class Refusal(Exception):
    """Pickles, and cannot be made again from that: its arguments are not the text that it keeps."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


class RefusedCall:
    def on(self, device: object, run_dir: str) -> None:
        raise Refusal(7, "the store said no")


def test_an_error_that_cannot_be_unpickled_is_told_in_words(engine: EngineProcess, tmp_path: Path) -> None:
    """Exceptions of some libraries are so; else its caller would get the error of unpickling it, and not learn why."""
    refused: Any = RefusedCall()

    with pytest.raises(RuntimeError, match=r"the store said no \(7\)") as raised:
        engine.call(str(tmp_path), refused, lambda beat: None)

    assert "test_process.py" in raised.value.__notes__[0]  # where it was raised, over there


class SleepCall:
    verb = "sleep"

    def on(self, device: object, run_dir: str) -> None:
        time.sleep(600)


class Activations:
    """What a pass has in the device's memory."""


_held: list[weakref.ref[Activations]] = []
"""In the engine's process."""


class FillsMemoryCall:
    def on(self, device: Any, run_dir: str) -> None:
        activations = Activations()
        _held.append(weakref.ref(activations))
        with ExitStack() as stack:
            stack.enter_context(device.engine(run_dir).resident.limits("a part"))
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")


class HeldCall:
    def on(self, device: object, run_dir: str) -> list[bool]:
        return [reference() is not None for reference in _held]


def test_what_filled_the_memory_is_gone_when_the_next_call_begins(engine: EngineProcess, run: RunDir) -> None:
    """An error's frames hold the tensors of the pass that failed; so do those of a gang that broke."""
    fails, asks = cast("Any", FillsMemoryCall()), cast("Any", HeldCall())
    with pytest.raises(SpotlightError, match="does not fit the memory"):
        engine.call(str(run.path), fails, lambda beat: None)

    assert engine.call(str(run.path), asks, lambda beat: None) == [False]


class BrokenDeviceCall:
    def __init__(self, kind: type[RuntimeError]) -> None:
        self._kind = kind

    def on(self, device: object, run_dir: str) -> None:
        raise self._kind("CUDA error: uncorrectable ECC error encountered\nSearch for it")


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_an_engine_whose_device_failed_is_replaced(
    engine: EngineProcess, tmp_path: Path, kind: type[RuntimeError]
) -> None:
    """After an error of CUDA each further call of the process would end with it."""
    before, fails = engine.pid, cast("Any", BrokenDeviceCall(kind))

    with pytest.raises(EngineLost, match=r"its device failed \(CUDA error: uncorrectable ECC error encountered\)"):
        engine.call(str(tmp_path), fails, lambda beat: None)

    asks: Any = HeldCall()
    assert engine.call(str(tmp_path), asks, lambda beat: None) == []
    assert engine.pid != before


def test_a_call_that_takes_longer_than_it_may_is_ended_and_the_next_one_finds_another_process(
    engine: EngineProcess, run: RunDir
) -> None:
    before, sleep = engine.pid, SleepCall()

    with pytest.raises(TimedOut, match="'sleep' took longer than 1 s"):
        engine.call(str(run.path), sleep, lambda beat: None, limit_s=1.0)  # type: ignore[arg-type]

    assert engine.pid != before
    call: Any = EnvironmentCall()
    assert engine.call(str(run.path), call, lambda beat: None, limit_s=60.0)


class BeatsOnceCall:
    verb = "work"

    def on(self, device: Any, run_dir: str) -> str:
        device._on_beat(Beat())
        time.sleep(3.6)
        return "done"


def test_time_in_which_the_caller_was_paused_ends_no_call(tmp_path: Path) -> None:
    def pause(beat: Beat) -> None:
        whole_process = ctypes.PyDLL(None)  # whose calls keep the interpreter's lock
        threading.Thread(target=whole_process.usleep, args=(3_000_000,)).start()

    first: Any = EnvironmentCall()
    call: Any = BeatsOnceCall()
    engine = EngineProcess(own_fork_server(), 0, node=tmp_path, hang_after_s=2.0)
    try:
        engine.call("", first, lambda beat: None)  # now it is up
        assert engine.call("", call, pause, limit_s=2.0) == "done"
    finally:
        engine.close()


@pytest.mark.parametrize("scores_only", [False, True])
def test_scoring_that_takes_too_long_leaves_its_samples_without_a_reward(
    monkeypatch: pytest.MonkeyPatch, scores_only: bool
) -> None:
    """On a worker of a GPU as on one that only scores."""
    monkeypatch.setattr(WorkerDevice, "_bring", lambda *_: None)
    limits, told = [], list[str]()

    class Slow:
        def call(self, run_dir: str, call: object, on_beat: object, limit_s: float) -> None:
            limits.append(limit_s)
            raise TimedOut("it took longer than 5 s")

    worker: Any = SimpleNamespace(
        name="w", batched_send=None, loop=SimpleNamespace(add_callback=lambda _, message: told.append(message["op"]))
    )
    engine: Any = Slow()
    node: Any = None
    device = WorkerDevice(worker, engine, node, quarantine_after=5, score_limit_s=5.0, scores_only=scores_only)

    scored = device.score("", request := make_request())

    assert isinstance(scored, Scored)
    assert scored.rewards == (None,) * len(request.seeds)
    assert "longer than 5 s (reward.limit_s)" in scored.errors[0]
    assert (limits, told) == ([5.0], [LOST_ENGINE])


def test_engines_lost_in_training_are_judged_by_the_scheduler_and_others_by_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It alone knows whether another worker fares better."""
    monkeypatch.setattr(WorkerDevice, "_bring", lambda *_: None)
    told = list[str]()

    def sick(*_: object) -> None:
        raise EngineLost("signal 9")

    loop = SimpleNamespace(add_callback=lambda _, message: told.append(message["op"]))
    worker: Any = SimpleNamespace(name="w", batched_send=None, loop=loop)
    engine, node = SimpleNamespace(call=sick), None
    device = WorkerDevice(worker, cast("Any", engine), cast("Any", node), quarantine_after=2)
    weights: Any = None

    for _ in range(5):
        with pytest.raises(Reschedule):
            device.update("", weights, (), (), 0)
    assert told == 5 * [LOST_ENGINE]
    for _ in range(3):  # not in a row
        with pytest.raises(Reschedule):
            device.images("", make_request())
        engine.call = lambda *_: "images"
        assert cast("Any", device.images("", make_request())) == "images"
        engine.call = sick
    with pytest.raises(Reschedule):
        device.images("", make_request())
    with pytest.raises(SpotlightError, match="'images' lost its engine process 2 times in a row on worker w: signal 9"):
        device.images("", make_request())


def test_weights_come_from_the_store_where_the_scheduler_does_not_say_who_else_has_them(
    run: RunDir, slow: Request, tmp_path: Path
) -> None:
    """It may be too busy to answer, or paused."""
    engine: Any = SimpleNamespace(call=lambda *_: "images")
    told, node = [], Node(tmp_path / "node")

    async def busy(sha256: str) -> list[str]:
        raise OSError("Timed out during handshake")

    async def drawn() -> Any:
        loop = SimpleNamespace(
            asyncio_loop=asyncio.get_running_loop(), add_callback=lambda _, message: told.append(message["op"])
        )
        scheduler = SimpleNamespace(spotlight_holders=busy)
        worker: Any = SimpleNamespace(loop=loop, scheduler=scheduler, batched_send=None)
        device = WorkerDevice(worker, engine, node, quarantine_after=5)
        return await asyncio.to_thread(device.images, str(run.path), slow)

    assert asyncio.run(drawn()) == "images"
    assert told == [HOLDS]
    assert [part.sha256 for part in slow.weights.parts if node.holds(part.sha256)]


def test_a_disk_that_is_full_on_a_workers_machine_is_named_at_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere" / "part"

    class Full:
        def call(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(elsewhere))

    engine: Any = Full()
    nothing: Any = None
    device = WorkerDevice(nothing, engine, nothing, quarantine_after=5)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    with pytest.raises(OSError, match="No space left") as raised:
        device.prepare("")
    monkeypatch.undo()

    told = _explain(pickle.loads(pickle.dumps(raised.value)), RunDir(tmp_path))

    assert str(told).startswith(f"{tmp_path}: the disk is full: on node-7, {elsewhere}: make room, then `spotlight res")
