"""Who runs a run, as a record that all machines see: one driver at a time, and the second is told who has it.

Leases are numbered; each is created exclusively, and renewed by its owner alone. The highest number has the run, until
it is released or its time is over. An owner that finds a higher number has lost the run, and stops. Times are wall
clocks': those of two machines may differ by some seconds, which is little beside a lease's length.

What is on the same machine needs no waiting: whoever holds the run's files there (a lock of the operating system, which
ends with its process) knows that an owner with the same files is gone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, replace

from spotlight.clock import Clock, system_clock
from spotlight.records import SpotlightError, record
from spotlight.store.decoding import from_json
from spotlight.store.disks import is_full
from spotlight.store.objects import Objects

LEASE_S = 60.0
"""After a machine is lost, the next driver waits no longer than this; much longer than a store is out of reach."""
RENEW_S = 10.0
RECORD_BYTES = 2**14
"""A record with a reason that holds a worker's traceback takes three thousand."""

logger = logging.getLogger(__name__)


@record
class Holder:
    """Who has a run, or had it last."""

    host: str
    pid: int
    files: str
    """Names the files that its driver holds, on all machines."""
    until_s: float
    scheduler: str = ""
    dashboard: str = ""
    cluster: str = ""
    """The scheduler's address, where it was there before the run and will be there after it."""
    released: bool = False
    error: str = ""
    """Why it failed; empty where it did not, or could not say."""

    @property
    def last_words(self) -> str:
        """Of one that has the run no more: why it failed, or that it was killed; empty where it ended in order."""
        if self.released:
            return self.error
        return f"its driver, process {self.pid} on {self.host}, ended without a word: killed, or its machine was lost"

    def __str__(self) -> str:
        with_scheduler = f", with the scheduler {self.scheduler}," if self.scheduler else ""
        return f"process {self.pid} on {self.host}{with_scheduler}"


class Lease:
    """The lease of one run, as one process sees it.

    Args:
        files: as `Holder` has it, of this process.
    """

    def __init__(self, objects: Objects, files: str, clock: Clock = system_clock) -> None:
        self._objects, self._files, self._clock = objects, files, clock
        self._number = 0
        self._mine: Holder | None = None
        self._lost = ""
        self._renewing = threading.Lock()
        self._ended = threading.Event()

    @property
    def files(self) -> str:
        return self._files

    def last(self) -> Holder | None:
        """Who has the run, or had it last; None where nobody ever had it."""
        return self._last()[1]

    def holder(self) -> Holder | None:
        """Who has the run now, going by the records alone; None where nobody does."""
        _, last = self._last()
        return last if last and not last.released and last.until_s > self._clock() else None

    def take(self) -> None:
        """Have the run, and keep it until `release`. Whoever calls this holds the run's files on this machine.

        Raises:
            SpotlightError: somebody else has it.
        """
        number, last = self._last()
        if last and not last.released and last.files != self._files and last.until_s > self._clock():
            raise self._refusal(last)
        self._number = number + 1
        self._mine = Holder(host=socket.gethostname(), pid=os.getpid(), files=self._files, until_s=self._until_s())
        is_first = self._objects.create(_key(self._number), _json(self._mine))
        highest, last = self._last()
        if not is_first or highest > self._number:  # others came, and went perhaps, since it was looked at
            if is_first:
                self._objects.delete(_key(self._number))
            raise self._refusal(last or self._mine)
        self._objects.delete(*(_key(old) for old in range(max(1, number - 1), number + 1)))
        threading.Thread(target=self._keep, name="spotlight-lease", daemon=True).start()

    def names(self, scheduler: str, dashboard: str, *, is_ours: bool = True) -> None:
        """Have the record say where the run's scheduler and its dashboard are.

        Args:
            is_ours: the scheduler ends with the run.
        """
        self._renew(scheduler, dashboard, "" if is_ours else scheduler)

    def check(self) -> None:
        """
        Raises:
            SpotlightError: somebody else has the run now, or may have.
        """
        if self._mine and not self._lost and self._clock() > self._mine.until_s:  # this machine slept
            self._keep_on()
        if self._lost:
            raise SpotlightError(self._lost)

    def failed(self, error: str) -> None:
        """Have the record say why, when it is released."""
        with self._renewing:
            if self._mine:
                self._mine = replace(self._mine, error=error)

    def release(self) -> None:
        """Let the next one have it."""
        self._ended.set()
        with self._renewing:
            if self._mine and not self._lost:
                try:
                    self._give_back(_key(self._number), _json(replace(self._mine, released=True)))
                except OSError as error:  # it ends by itself
                    logger.info("the lease could not be given back: %s", error)

    def _give_back(self, key: str, content: bytes) -> None:
        try:
            self._objects.put(key, content)
        except OSError as error:
            if not (is_full(error) and self._objects.overwrite(key, content)):
                raise

    def _keep(self) -> None:
        while not (self._lost or self._ended.wait(RENEW_S)):
            self._keep_on()

    def _keep_on(self) -> None:
        """Renew it, or find that it is lost."""
        try:
            self._renew()
        except Exception as error:  # the store is out of reach: perhaps not for long
            logger.info("the lease could not be renewed: %s", error)
            assert self._mine
            if self._clock() > self._mine.until_s:
                where = self._objects.where(_key(self._number))
                self._lost = f"{where}: could not be renewed for {LEASE_S:g} s, so another may have the run: {error}"

    def _renew(self, scheduler: str = "", dashboard: str = "", cluster: str = "") -> None:
        with self._renewing:
            assert self._mine
            number, last = self._last()
            if number > self._number:
                self._lost = str(self._refusal(last or self._mine))
            elif not self._ended.is_set():
                mine = self._mine
                scheduler, dashboard = scheduler or mine.scheduler, dashboard or mine.dashboard
                renewed = replace(
                    mine,
                    until_s=self._until_s(),
                    scheduler=scheduler,
                    dashboard=dashboard,
                    cluster=cluster or mine.cluster,
                )
                self._objects.put(_key(self._number), _json(renewed))
                self._mine = renewed

    def _until_s(self) -> float:
        return self._clock() + LEASE_S

    def _last(self) -> tuple[int, Holder | None]:
        """The highest number, and who has it; 0 where there is none."""
        while key := max(self._objects.sizes("lease"), default=""):
            content = self._objects.get(key)
            if content is not None:  # else it was deleted since, by one who has a higher number
                way_out = "delete it, if nobody runs this run"
                number = int(key.rpartition("/")[2].partition(".")[0])
                return number, from_json(Holder, content, self._objects.where(key), way_out)
        return 0, None

    def _refusal(self, holder: Holder) -> SpotlightError:
        ends = time.strftime("%H:%M:%S", time.localtime(holder.until_s))
        return SpotlightError(
            f"{self._objects.where('').rstrip('/')}: {holder} is running this run: wait for it, or stop it first; "
            f"if it is gone without a word, the run is free at {ends}"
        )


def _key(number: int) -> str:
    return f"lease/{number:06d}.json"


def _json(holder: Holder) -> bytes:
    """Of one length, whatever it says: when the disk is full, why its owner failed has room in the record's place."""
    return json.dumps(asdict(holder), indent=1).encode().ljust(RECORD_BYTES)
