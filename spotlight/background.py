"""A driver in a thread of this process: a run goes on while its notebook or script does other things.

When the process ends, the run is stopped in order. The error that it ended with is kept for `wait`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from spotlight.clock import wall_clock
from spotlight.config import Config
from spotlight.driver import Driver
from spotlight.files import is_url
from spotlight.records import SpotlightError, Stopped, in_a_sentence
from spotlight.store.accounts import Accounts
from spotlight.store.disks import full_disk, full_here, is_full
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from cluster.start.existing import ExistingCluster
    from spotlight.store.lease import Lease


class Background:
    """A thread that drives a run until it is finished, stopped or failed; it starts at once.

    Args:
        cluster: as in `spotlight.Run`.
        resume_command: the shell command that resumes the run.
        began_s: when it was started.
    """

    def __init__(
        self, run: RunDir, config: Config, cluster: ExistingCluster | None, *, resume_command: str, began_s: float
    ) -> None:
        self._run, self._config, self._cluster, self._resume_command = run, config, cluster, resume_command
        self.began_s, self.ended_s = began_s, 0.0
        self.accounts = Accounts(run, config)
        self.driver: Driver | None = None
        self.error: BaseException | None = None
        """Why it was stopped or failed."""
        self._state = "starting"
        self._stop = threading.Event()
        self._over = threading.Event()
        """Set when the thread's work is done: `Thread.is_alive` is wrong after a Ctrl-C in `Thread.join` (CPython
        3.11)."""
        _end_with_process(self)
        try:
            threading.Thread(target=self._work, name="spotlight-run").start()
        except RuntimeError:  # the system allows no more threads: there is no end to wait for
            self._over.set()
            raise

    @property
    def url(self) -> str:
        """The run's directory or URL."""
        return self._run.url

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def state(self) -> str:
        """See `Status.state`."""
        is_up = self._state == "starting" and self.driver is not None and self.driver.dashboard
        return "running" if is_up else self._state

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for its end, at most so long."""
        self._over.wait(timeout_s)

    def stop(self) -> None:
        """Ask it to end after the steps in flight."""
        self._stop.set()

    def stop_with_process(self) -> None:
        """Stop it, with a message on stderr unless it was asked to stop before, and wait for its end."""
        if not self._stop.is_set():
            self.stop()
            with suppress(OSError):  # nobody reads it, or its terminal is gone: the run is still to end in order
                print(
                    f"spotlight: this process ends, and with it the run; `{self._run.resume_command}` goes on, and "
                    "`run.wait()` would wait for its end",
                    file=sys.stderr,
                    flush=True,
                )
        self.wait()

    def _work(self) -> None:
        try:
            with self._run.lock(self._stop) as lease:
                self._drive(lease)
            self._state = "finished"
        except Stopped:
            self._state, self.error = "stopped", Stopped(f"resume with: {self._resume_command}")
        except BaseException as error:  # raised by `Run.wait`
            self._state, self.error = "failed", self.error or _explain(error, self._run)
        finally:
            self.ended_s = wall_clock()
            self._over.set()

    def _drive(self, lease: Lease) -> None:
        """Run it to its end; an error is left in the lease's record, where other processes see it."""
        if is_url(self._run.url):  # another machine may have continued it meanwhile
            self.accounts = Accounts(self._run, self._config, seen_s=self.accounts.seen_s)
        self.driver = Driver(self._run, self.accounts, lease, self._stop, began_s=self.began_s)
        try:
            self.driver.go(self._cluster)
        except Stopped:
            raise
        except BaseException as error:
            self.error = _explain(error, self._run)
            lease.failed(in_a_sentence(self.error))
            raise


def refuse_at_the_end() -> None:
    """
    Raises:
        SpotlightError: the main thread has ended. Python then lets no executor begin anything, and Dask needs some.
    """
    if getattr(threading, "_SHUTTING_DOWN", False):  # what `concurrent.futures` goes by
        raise SpotlightError(
            "this process is ending, for its main thread is done, so no run can begin in it: have the main thread wait "
            "for the one that starts the run (`thread.join()`)"
        )


def begun_here(url: str) -> Background | None:
    """The driver of this run, if it is a live thread of this process."""
    with _starting:
        return next((each for each in _started if each.url == url and not each.is_over), None)


def names_here(besides: str = "") -> set[str]:
    """Names of the runs that are live threads of this process, besides the one at this URL.

    Their signals to workers say no more than the name, so no two of them may have the same.
    """
    with _starting:
        return {each.name for each in _started if each.url != besides and not each.is_over}


def refuse_beside_a_run() -> None:
    """
    Raises:
        SpotlightError: a run goes on in this process, whose worker for decisions a simulation would disturb: both use
            the process's one device, and its signals.
    """
    if names := names_here():
        raise SpotlightError(
            f"the run {min(names)} goes on in this process, and a simulation would disturb it: simulate in another "
            "process (`spotlight simulate`), or once the run has ended"
        )


@contextmanager
def simulating() -> Iterator[None]:
    """
    Raises:
        SpotlightError: a run, or another simulation, goes on in this process.
    """
    refuse_beside_a_run()
    if not _simulating.acquire(blocking=False):
        raise SpotlightError(f"{_SIMULATES}: wait for it, or simulate in another process")
    try:
        yield
    finally:
        _simulating.release()


def refuse_while_simulating() -> None:
    """
    Raises:
        SpotlightError: a simulation goes on in this process.
    """
    if _simulating.locked():
        raise SpotlightError(f"{_SIMULATES}: wait for it, or start the run detached, or in another process")


_SIMULATES = "a simulation goes on in this process, and uses its one device"
_simulating = threading.Lock()
_started: WeakSet[Background] = WeakSet()
_starting = threading.RLock()
"""Guards `_started`; also held by who is interrupted by a signal, whose handler asks whether a run is alive."""


def _forget() -> None:
    """After a fork: the child has none of these threads, and the lock may be held by one of them."""
    global _starting, _simulating
    _starting, _simulating = threading.RLock(), threading.Lock()
    _started.clear()


os.register_at_fork(after_in_child=_forget)


def _end_with_process(run: Background) -> None:
    """Stop the run in order when the main thread ends, such as that of a script that does not wait for it.

    `atexit` is too late for that: by then Python has closed the executors that Dask needs, and waits for the run's
    thread, which waits for them.
    """
    with _starting:
        if not _started:
            threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
        _started.add(run)


def _stop_all() -> None:
    with _starting:
        runs = list(_started)
    for run in runs:
        if not run.is_over:
            run.stop_with_process()


def _explain(error: BaseException, run: RunDir) -> BaseException:
    """The error as it is shown: a full disk as a `SpotlightError`, an unforeseen error with a note on how to resume."""
    if isinstance(error, OSError) and is_full(error):
        where = getattr(error, "__notes__", ())  # a worker's
        found = where[0] if where else full_disk([run.path]) or full_here(error)
        return SpotlightError(
            f"{run.path}: the disk is full: {found}, then `{run.resume_command}`; all that was committed is kept"
        )
    if not isinstance(error, SpotlightError):
        error.add_note(f"all that was committed is kept; `{run.resume_command}` goes on from there")
    return error
