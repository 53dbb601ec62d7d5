"""The process that owns one device: started, called, told, watched, and started again when it is lost.

It imports neither torch nor Dask: the caller stays light and alive whatever happens to the device. One
call runs at a time. A call that ends without an answer (killed, out of memory, hung) raises, and the
next call finds a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from spotlight.device.calls import Call, T
from spotlight.device.signals import Order, Signals, signals
from spotlight.records import NO_DEVICE, WITHOUT_GPU, is_of_the_device, record
from spotlight.store.device_locks import is_stopped
from spotlight.store.node import Node

POLL_S = 0.5
ENDS_S = 30.0
"""How long to wait until a killed process is gone: one that hangs in a driver of the system may never be."""
_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's <malloc.h>."""
_MMAP_THRESHOLD_MAX = 32 * 2**20
"""The most that glibc takes."""
KEPT_BYTES = 256 * 2**20
BEAT_S = 0.1
"""Beats are sent no more often than this, except those that report a step."""


class EngineLost(Exception):
    """The engine process ended, or was ended, in the middle of a call."""


class TimedOut(EngineLost):
    """The engine process was ended because a call took longer than its limit."""


class _Hung(Exception):
    """A call that sent beats sends none any more."""


class _TooLong(Exception):
    """A call takes longer than it may."""


@record
class Beat:
    """A message from a call in progress: it goes on, and perhaps how far it is."""

    step: int | None = None
    """Steps committed; None where the beat says only that the call goes on."""
    steps: int = 0
    """Steps of the whole request."""
    resumed: bool = False
    """True: the call begins at this step. False: it has just run the step."""
    patience: float = 1.0
    """The next beat may take this many times ``cluster.hang_after_s``; infinite where there is no limit, as when
    writing to a slow store."""


class EngineProcess:
    """An engine in a process of its own, forked from a fork server that has done the imports.

    Args:
        context: the server's.
        number: of the device among the machine's, which becomes LOCAL_RANK; or `NO_DEVICE`.
        node: root of the node's shared memory, for weights; see `spotlight.store.node`.
        hang_after_s: a call is ended, with its process, when this many seconds times the ``patience`` of its last beat
            pass without another beat (before the first there is no limit), or this many while the process is
            stopped. Time in which the caller was paused does not count.
        run_dir: a run whose model each process loads as it begins, so that the first call need not; "" for none.
        on_start: is called with the id of each process that is started.
        renew: makes sure, before each start, that the server can be reached.
    """

    def __init__(
        self,
        context: BaseContext,
        number: int,
        *,
        node: Path,
        hang_after_s: float,
        run_dir: str = "",
        on_start: Callable[[int], None] = lambda pid: None,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self._context = context
        self._renew = renew
        self._on_start = on_start
        self._number = number
        self._node = node
        self._hang_after_s = hang_after_s
        self._run_dir = run_dir
        self._orders_lock = threading.Lock()
        self._process_lock = threading.Lock()
        """Held while the process is replaced or ended: a worker may leave while its engine comes up anew."""
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def _start(self) -> None:
        calls, self._calls = self._context.Pipe()
        orders, sender = self._context.Pipe(duplex=False)
        with self._orders_lock:
            self._orders = sender  # what is told from now on, it finds when it is up
        outputs = [Connection(os.dup(output), readable=False) for output in (1, 2)]
        arguments = (self._number, self._node, self._run_dir, calls, orders, signals, dict(os.environ), outputs)
        self._renew()
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=serve, args=arguments, daemon=True
        )
        process.start()
        self._process = process
        self._on_start(self.pid)
        for given in (calls, orders, *outputs):
            given.close()

    def call(self, run_dir: str, call: Call[T], on_beat: Callable[[Beat], None], limit_s: float = inf) -> T:
        """Run a call on the engine, and wait until it ends.

        Args:
            limit_s: longest that it may take; time in which the caller was paused does not count.

        Raises:
            TimedOut: it took longer.
            EngineLost: there is no answer, and never will be.
            Exception: whatever the call raised.
        """
        try:
            self._send((run_dir, call))
            kind, value = self._answer(on_beat, limit_s)
        except (EOFError, OSError):
            raise EngineLost(f"the engine process ended with {_exit_reason(self._restart())}") from None
        except _TooLong:
            self._restart()
            raise TimedOut(f"{call.verb!r} took longer than {limit_s:g} s, and its process was ended") from None
        except _Hung as hung:
            self._restart()
            raise EngineLost(f"the engine gave no sign of life for {hung} and was ended") from None
        if kind == "raised":
            raise value
        if kind == "failed":
            self._restart()
            raise EngineLost(f"its device failed ({value}), and its process was ended")
        return value

    def _send(self, message: tuple[str, Call[Any]]) -> None:
        """Send what may be more than the system holds between two processes.

        Raises:
            _Hung: the process is stopped, and was ended.
        """
        taken, is_ended = threading.Event(), False

        def end_if_stopped() -> None:
            nonlocal is_ended
            while not (taken.wait(self._hang_after_s) or is_ended):
                if is_stopped(self.pid):
                    is_ended = True
                    self._process.kill()

        threading.Thread(target=end_if_stopped, daemon=True).start()
        try:
            self._calls.send(message)
        except OSError:
            if is_ended:
                raise _Hung(f"{self._hang_after_s:g} s") from None
            raise
        finally:
            taken.set()

    def _answer(self, on_beat: Callable[[Beat], None], limit_s: float) -> tuple[str, Any]:
        """Wait for the answer to a call: ``("done", value)``, ``("raised", error)`` or ``("failed", text)``."""
        patience, heard_s, looked_s, began_s = inf, time.monotonic(), time.monotonic(), time.monotonic()
        while True:
            heard = self._calls.poll(POLL_S)
            now_s = time.monotonic()
            paused_s = max(0.0, now_s - looked_s - POLL_S)  # this process, and perhaps the engine
            heard_s, began_s = heard_s + paused_s, began_s + paused_s
            looked_s = now_s
            message: tuple[str, Any] = self._received() if heard else ("", None)
            kind, value = message
            if kind not in ("", "beat"):
                return kind, value
            if now_s - began_s > limit_s:
                raise _TooLong
            if not heard:
                silent_s = now_s - heard_s
                if silent_s > self._hang_after_s * patience:
                    raise _Hung(f"{self._hang_after_s * patience:g} s")
                if silent_s > self._hang_after_s and is_stopped(self.pid):
                    raise _Hung(f"{self._hang_after_s:g} s")
                continue
            patience, heard_s = value.patience, now_s
            on_beat(value)

    def _received(self) -> tuple[str, Any]:
        """A message that has begun to come.

        Raises:
            _Hung: the rest of it did not come.
        """
        limit = threading.Timer(self._hang_after_s, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            message: tuple[str, Any] = self._calls.recv()
        except (EOFError, OSError):
            if limit.finished.is_set():
                raise _Hung(f"{self._hang_after_s:g} s") from None
            raise
        finally:
            limit.cancel()
        return message

    def tell(self, order: Order) -> None:
        """Send an order to the process; if that has just ended, the order is lost."""
        with self._orders_lock, contextlib.suppress(OSError):
            self._orders.send(order)

    def _restart(self) -> int | None:
        """Make sure that the process is gone, if it can be, and start another, unless closed; returns how it ended."""
        with self._process_lock:
            self._end()
            code = self._process.exitcode
            if not self._closed:
                with contextlib.suppress(EOFError, OSError):  # the server died this moment; the next call tries again
                    self._start()
        return code

    def close(self) -> None:
        """End it for good, whatever it is doing."""
        with self._process_lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        self._process.kill()  # works on a stopped process too
        self._process.join(ENDS_S)
        self._calls.close()
        with self._orders_lock:
            self._orders.close()


def end_with_parent() -> None:
    """Have the system kill this process, frozen or not, when the process that forked it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Let this process keep up to `KEPT_BYTES` of freed memory, where its C library is glibc.

    Otherwise each step's tensors are mapped anew, page by page: a tenth of its time on a CPU.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _exit_reason(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "SIGKILL (killed from outside, as by the system when its memory is full)"
    return f"signal {-code} ({signal.strsignal(-code)})" if code and code < 0 else f"exit code {code}"


def serve(
    number: int,
    node: Path,
    run_dir: str,
    calls: Connection,
    orders: Connection,
    asked: Signals,
    environment: Mapping[str, str],
    outputs: Sequence[Connection],
) -> None:
    """The body of an engine process: answer calls until the other end is gone.

    Args:
        run_dir: the run whose model is loaded before the first call; "" for none.
        environment: the caller's. This process inherits that of the fork server, which is older than the caller and
            may serve others, too.
        outputs: the caller's stdout and stderr, for the same reason.
    """
    take_environment(environment)
    for output, given in enumerate(outputs, 1):
        os.dup2(given.fileno(), output)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the worker, which passes them on as orders
        signal.signal(ignored, signal.SIG_IGN)
    end_with_parent()
    if number == NO_DEVICE:
        os.environ[WITHOUT_GPU] = "1"
    else:
        os.environ["LOCAL_RANK"] = str(number)  # both are read by spotlight.rl.models
    signals.adopt(asked)
    threading.Thread(target=_obey, args=(orders,), daemon=True).start()
    from spotlight.device.engine import InProcess

    device = InProcess(on_beat=_BeatSender(calls).on_beat, node=Node(node))
    if run_dir:
        with contextlib.suppress(Exception):  # the first call raises it again, to its caller
            device.load(run_dir)
    while True:
        _answer_next(calls, device)


def take_environment(environment: Mapping[str, str]) -> None:
    """Take over the caller's environment, without the server's CUDA_VISIBLE_DEVICES, which may be another worker's."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(environment)


def _answer_next(calls: Connection, device: Any) -> None:
    """Run one call. A function of its own, so that none of its values stay in memory during the next."""
    try:
        run_dir, call = _received(calls)
    except (EOFError, OSError):
        os._exit(1)
    try:
        answer = ("done", call.on(device, run_dir))
    except Exception as error:  # carried to whoever called
        error.add_note("".join(traceback.format_exception(error)))
        answer = ("failed", str(error).partition("\n")[0]) if is_of_the_device(error) else ("raised", error)
        _free_frames(error)
    with contextlib.suppress(OSError):  # the caller is gone; the next recv ends this process
        _send(calls, answer)


def _free_frames(error: BaseException | None) -> None:
    """Free the local variables of the frames in an error's traceback, such as a pass's tensors."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _received(calls: Connection) -> tuple[str, Call[Any]]:
    run_dir, call = calls.recv()
    return run_dir, call


def _send(calls: Connection, answer: tuple[str, Any]) -> None:
    kind, value = answer
    try:
        if kind == "raised":
            ForkingPickler.loads(ForkingPickler.dumps(value))
        calls.send(answer)
    except Exception as error:  # a few exceptions of libraries cannot be pickled, or not be made again from that
        instead = RuntimeError(f"{value!r} (not transferable: {error})")
        for note in getattr(value, "__notes__", ()):
            instead.add_note(note)
        calls.send(("raised", instead))


def _obey(orders: Connection) -> None:
    while True:
        try:
            order: Order = orders.recv()
        except (EOFError, OSError):
            os._exit(1)  # the worker is gone: nobody waits for what is being done, and a successor may be at it
        signals.obey(order)


class _BeatSender:
    """Sends beats to the caller: one for every step, and otherwise now and then."""

    def __init__(self, calls: Connection) -> None:
        self._calls = calls
        self._last_s = 0.0

    def on_beat(self, beat: Beat | None = None) -> None:
        now_s = time.monotonic()
        if beat or now_s - self._last_s > BEAT_S:
            self._last_s = now_s
            self._calls.send(("beat", beat or Beat()))
