"""Who runs a run, as a record that all machines see: one driver at a time, and the second is told who has it.

Leases are numbered; each is created exclusively, and renewed by its owner alone. The highest number has the run, until
it is released or its owner is silent. An owner that finds a higher number has lost the run, and stops.

No clocks of two machines are compared to take a run: whoever wants it watches the record, and takes the run when by its
own clock the record has not changed for a lease's length. Times in records are for people, and for what is long over.

What is on the same machine needs no waiting: whoever holds the run's files there (a lock of the operating system, which
ends with its process) knows that an owner with the same files is gone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
from dataclasses import asdict, replace

from spotlight.clock import Clock, system_clock, wall_clock
from spotlight.records import SpotlightError, Stopped, record
from spotlight.store.decoding import from_json, readable
from spotlight.store.disks import is_full
from spotlight.store.objects import Objects

LEASE_S = 60.0
"""After a machine is lost, the next driver waits no longer than this; much longer than a store is out of reach."""
RENEW_S = 10.0
LOOK_S = 1.0
"""Between two looks at another's record."""
LONG_OVER_S = 3600.0 + 5 * LEASE_S
"""A lease that ended so long ago is over by any clock: those of two machines differ by no more than an hour, which is
what a time zone that is set wrongly makes."""
RECORD_BYTES = 2**14
"""A record with a reason that holds a worker's traceback takes three thousand."""

_KEY = re.compile(r"lease/\d{6,}\.json")

logger = logging.getLogger(__name__)


@record
class Holder:
    """Who has a run, or had it last."""

    host: str
    pid: int
    files: str
    """Names the files that its driver holds, on all machines."""
    until_s: float
    """When the lease ends, by the clock of its owner's machine."""
    renewals: int = 0
    """How many times it was renewed, so that each renewal changes the record, whatever the clock says."""
    scheduler: str = ""
    dashboard: str = ""
    cluster: str = ""
    """The scheduler's address, where the cluster outlives the run."""
    released: bool = False
    error: str = ""
    """Why the run failed; empty where it did not, or could not say."""

    @property
    def seen_s(self) -> float:
        """When it was renewed last, by the clock of its owner's machine."""
        return self.until_s - LEASE_S

    @property
    def last_words(self) -> str:
        """Why a former holder failed, or that it was killed; empty where it ended in order."""
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
        clock: for what other machines read, or wrote.
        steady: measures how long something lasts here, while the machine sleeps, too.
    """

    def __init__(self, objects: Objects, files: str, clock: Clock = system_clock, steady: Clock = wall_clock) -> None:
        self._objects, self._files, self._clock, self._steady = objects, files, clock, steady
        self._number = 0
        self._over_s = 0.0
        """When the lease is over unless it is renewed, on the steady clock."""
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
        """Who has the run now, going by the records and this machine's clock alone; None where nobody does."""
        _, last = self._last()
        return last if last and not last.released and last.until_s > self._clock() else None

    def take(self, stop: threading.Event | None = None) -> None:
        """Take the run, and keep it until `release`. The caller must hold the run's files on this machine.

        Args:
            stop: ends the wait for an owner that may be gone.

        Raises:
            SpotlightError: somebody else has it.
            Stopped: ``stop`` was set.
        """
        number = self._wait_for_silence(stop or threading.Event())
        self._number = number + 1
        self._over_s = self._steady() + LEASE_S
        self._mine = Holder(host=socket.gethostname(), pid=os.getpid(), files=self._files, until_s=self._until_s())
        is_first = self._objects.create(_key(self._number), _json(self._mine))
        highest, last = self._last()
        if not is_first or highest > self._number:  # others have taken it since, and perhaps ended
            if is_first:
                self._objects.delete(_key(self._number))
            raise self._refusal(last or self._mine)
        self._objects.delete(*(_key(old) for old in range(max(1, number - 1), number + 1)))
        threading.Thread(target=self._keep, name="spotlight-lease", daemon=True).start()

    def _wait_for_silence(self, stop: threading.Event) -> int:
        """Wait until no other machine has the run; returns the highest lease number by then.

        Raises:
            SpotlightError: its owner lives.
            Stopped: ``stop`` was set.
        """
        number, last = first = self._last()
        if not (other := self._elsewhere(last)):
            return number
        said = "%s: %s has not given this run back: it is taken over in %g s, unless that process shows that it lives"
        logger.warning(said, self._place, other, LEASE_S)
        over_s, is_over = self._steady() + LEASE_S, False
        while not is_over:
            if stop.wait(LOOK_S):
                raise Stopped
            is_over = self._steady() > over_s  # before the last look
            number, last = self._last()
            other = self._elsewhere(last)
            if other is None:
                break
            if (number, last) != first:
                raise self._refusal(other)
        return number

    def elsewhere(self) -> Holder | None:
        """Who may have the run on another machine, or with other files: it was not given back, nor is it long over."""
        return self._elsewhere(self._last()[1])

    def _elsewhere(self, last: Holder | None) -> Holder | None:
        if last is None or last.released or last.files == self._files:
            return None
        return last if self._clock() < last.until_s + LONG_OVER_S else None

    def names(self, scheduler: str, dashboard: str, *, is_ours: bool = True) -> None:
        """Write the addresses of the run's scheduler and dashboard into the record.

        Args:
            is_ours: the scheduler ends with the run.
        """
        self._renew(scheduler, dashboard, "" if is_ours else scheduler)

    def check(self) -> None:
        """
        Raises:
            SpotlightError: somebody else has the run now, or may have.
        """
        if self._mine and not self._lost and self._steady() > self._over_s:  # this machine slept
            self._keep_on()
        if self._lost:
            raise SpotlightError(self._lost)

    def failed(self, error: str) -> None:
        """Keep the error, which the record will have when it is released."""
        with self._renewing:
            if self._mine:
                self._mine = replace(self._mine, error=readable(error))

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
            if self._steady() > self._over_s:
                where = self._objects.where(_key(self._number))
                self._lost = f"{where}: could not be renewed for {LEASE_S:g} s, so another may have the run: {error}"

    def _renew(self, scheduler: str = "", dashboard: str = "", cluster: str = "") -> None:
        with self._renewing:
            assert self._mine
            number, last = self._last()
            if number > self._number:
                self._lost = str(self._refusal(last or self._mine))
            elif not self._ended.is_set():
                mine, over_s = self._mine, self._steady() + LEASE_S
                scheduler, dashboard = scheduler or mine.scheduler, dashboard or mine.dashboard
                renewed = replace(
                    mine,
                    until_s=self._until_s(),
                    renewals=mine.renewals + 1,
                    scheduler=scheduler,
                    dashboard=dashboard,
                    cluster=cluster or mine.cluster,
                )
                self._objects.put(_key(self._number), _json(renewed))
                self._mine, self._over_s = renewed, over_s

    def _until_s(self) -> float:
        return self._clock() + LEASE_S

    def _last(self) -> tuple[int, Holder | None]:
        """The highest number, and who has it; 0 where there is none."""
        while key := max(self._objects.sizes("lease"), default=""):
            if not _KEY.fullmatch(key):
                where = self._objects.where(key)
                raise SpotlightError(f"{where}: is no record of who runs the run, such as {_key(1)}: delete it")
            content = self._objects.get(key)
            if content is not None:  # else it was deleted since, by one who has a higher number
                way_out = "delete it, if nobody runs this run"
                number = int(key.rpartition("/")[2].partition(".")[0])
                return number, from_json(Holder, content, self._objects.where(key), way_out)
        return 0, None

    def _refusal(self, holder: Holder) -> SpotlightError:
        return SpotlightError(f"{self._place}: {holder} is running this run: wait for it, or stop it first")

    @property
    def _place(self) -> str:
        return self._objects.where("").rstrip("/")


def _key(number: int) -> str:
    return f"lease/{number:06d}.json"


def _json(holder: Holder) -> bytes:
    """A record, padded to one length: an error then has room in the old record's place when the disk is full."""
    return json.dumps(asdict(holder), indent=1).encode().ljust(RECORD_BYTES)
