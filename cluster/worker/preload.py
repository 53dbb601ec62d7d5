"""What the fork server of the workers imports, once for all of them; nothing else may import it.

A process that `multiprocessing` starts first runs the driver's main script again. A worker needs nothing
from there, and a script that starts a run at its top level would start it once more in every worker. And
a process that was forked from the fork server would start a fork server of its own for its children, though
it has the address of this one.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection, forkserver, reduction, spawn
from types import TracebackType
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by torch's import: losing a peer is no news here
# A library that looks for GPUs at its import must not open CUDA here: processes forked from here could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
gc.disable()  # imports leave little to collect; to look for it time and again takes a seventh of their time

import cluster.worker.plugin
import cluster.worker.process
import spotlight.device.engine
import spotlight.rl.models.tiny_text  # brings the transformers of all models, for an engine to start at once
from cluster.worker.process import KEYED

cluster.worker.process.take_back_pythonpath()
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is for the driver, which stops its workers in order


def _leave_out(main: str) -> None:
    """Stands in for running the driver's main script."""


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of a driver that left while a worker was being started: the worker ends, as it should."""
    if not isinstance(error, EOFError | BrokenPipeError):
        sys.__excepthook__(kind, error, trace)


def _ensure_running(server: forkserver.ForkServer) -> None:
    """A worker's engine is forked from the parent that the worker came from."""
    if server._forkserver_address is None:  # type: ignore[attr-defined]
        _start_server(server)


class _Vanished(ConnectionAbortedError, EOFError):
    """A client was killed in the middle of a request. `multiprocessing` takes EOFError for the end of its own pipe, and
    would end with all that it forked; a ConnectionAbortedError it ignores."""


def _received(sock: socket.socket, size: int) -> list[int]:
    try:
        return _receive(sock, size)
    except EOFError:
        raise _Vanished(errno.ECONNABORTED, "vanished while it asked for a process") from None


def _keyed(challenge: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
    """From Python 3.14 on, who asks must know the server's key, which is kept for what is forked from here."""

    def challenged(asking: Any, key: bytes) -> None:
        server: Any = forkserver._forkserver
        if server._forkserver_authkey is None:
            server._forkserver_authkey = key
        try:
            challenge(asking, key)
        except OSError as error:
            raise _Vanished(errno.ECONNABORTED, f"vanished while it asked for a process: {error}") from None

    return challenged


_receive = reduction.recvfds
reduction.recvfds = _received
if KEYED:
    connection.deliver_challenge = _keyed(connection.deliver_challenge)  # type: ignore[assignment]
    connection.answer_challenge = _keyed(connection.answer_challenge)  # type: ignore[assignment]
_start_server = forkserver.ForkServer.ensure_running
forkserver.ForkServer.ensure_running = _ensure_running  # type: ignore[assignment,method-assign]
sys.excepthook = _report
spawn._fixup_main_from_name = spawn._fixup_main_from_path = _leave_out  # type: ignore[attr-defined]

gc.freeze()  # a collection in a forked process writes to every object that it looks at, and so copies its page
gc.enable()

__all__ = ["cluster", "spotlight"]
