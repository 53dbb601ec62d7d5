"""A cluster on Slurm: a Dask scheduler beside the driver, and jobs of a reserved and a spot partition as its workers.

A job is one node's worth of a pool: ``workers_per_node`` Dask workers, which share its memory and may form gangs. Jobs
that Slurm preempts are queued again by Slurm; one that ended for any other reason is submitted again here, later each
time. The workers join a run as any others do (`cluster.worker.plugin`).

Slurm signals the steps of a job before it ends them (SIGTERM); so the workers are a step (``srun``), and get it
themselves. A worker that is killed alone is started again where it was; one that fails takes its job along, and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed import Security, SpecCluster
from distributed.deploy.spec import ProcessInterface

from cluster.certificate import certificate, write
from cluster.scheduler.scheduler import LeanScheduler
from cluster.start import janitor
from spotlight.config import Config, PoolSection
from spotlight.files import home
from spotlight.records import SpotlightError, in_a_sentence

logger = logging.getLogger("spotlight.slurm")

POLL_S = 2.0
"""Time between two queries of the queue; one serves all jobs."""
AGAIN_S, AGAIN_MAX_S = 5.0, 300.0
"""Pause before a job that ended is submitted again: the first, and the longest; it doubles in between."""
FAILURES_MAX = 8
"""Jobs in a row that end before one of their workers has joined; after so many, no more are submitted."""
LAST_BYTES, LINE_MAX = 4_000, 240
"""Bytes at the end of a job's output that are searched for its last line, and characters of it that are shown."""
RUN_NAME_MAX = 40
"""Characters of a run's name in the names of its jobs, and of a directory, which may have 255 bytes."""
JOB_NUMBER = r"(?m)^(?:Submitted batch job )?(?P<job_id>\d+)(?:;.*| on cluster .*)?$"
"""The line of sbatch's answer with the job's number, with ``--parsable`` or without; sites have it say more."""
ANSWER_S = 60.0
"""How long to wait for an answer of Slurm."""
DRAIN_MARGIN_S = 10.0
"""Added to the time that a warned worker has; then its job is cancelled."""
WORKER_START_S = 60
"""A worker that finds no scheduler for so long ends; the scheduler is started first."""


class SlurmJobs(ProcessInterface):
    """One job of a pool, submitted again when it ends."""

    def __init__(self, scheduler: str, *, name: str, job: Mapping[str, Any]) -> None:
        super().__init__()
        self._scheduler, self._name, self._job = scheduler, name, job
        self._running: Any = None
        self._submitting: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = False
        """Whether a worker of the present job has joined."""
        self.failure = ""
        """Why no job is submitted any more; else empty."""

    @property
    def pool(self) -> str:
        return str(self._job["pool"])

    @property
    def _number(self) -> str:
        """Slurm's number of the present job; empty if there is none, or while it is being submitted."""
        return str(self._running.job_id or "") if self._running is not None else ""

    def heard_of(self) -> None:
        """One of its workers has joined."""
        self._joined = True

    def waits(self) -> str:
        """Slurm's state and reason of the job while it is queued; empty if it runs, or there is none."""
        state, reason = queue.last.get(self._number, ("", ""))
        return f"job {self._number} is {state} ({reason})" if state in QUEUED else ""

    def has(self, worker: str) -> bool:
        """Whether the job runs the worker of this name."""
        first = self._job["first"]
        numbers = range(first, first + self._job["section"].workers_per_node)
        return worker in (f"{self.pool}-{number}" for number in numbers)

    def evict(self) -> None:
        """Cancel the present job, which may not answer; another is submitted."""
        if job := self._number:
            self._begin(_scancel("--signal=KILL", "--full", job))

    def want(self, wanted: bool) -> None:
        """Set whether there is to be a job; workers of one that is no longer wanted are warned, and leave."""
        if wanted:
            self._wanted.set()
        elif self._wanted.is_set():
            self._wanted.clear()
            self._begin(self._drain())

    async def _drain(self) -> None:
        """Wait until the job has ended: it is cancelled if it is queued; else its workers leave, and it is cancelled if
        that takes too long."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._job["section"].grace_s + DRAIN_MARGIN_S
        while self._running is not None and not self._wanted.is_set():
            if job := self._number:
                await _scancel("--state=PENDING", job)
                await _scancel(*(() if clock() > until_s else ("--signal=TERM",)), job)  # to its steps: the workers
            await asyncio.sleep(POLL_S)

    async def start(self) -> None:
        await super().start()
        self._begin(self._keep())

    def _begin(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._submitting is not None:  # Slurm may have taken the job, though nobody has heard its number yet
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await asyncio.gather(self._submitting, return_exceptions=True)
        if job := self._number:
            await _scancel(job)
        await super().close()

    async def _keep(self) -> None:
        try:
            await self._submit_again_and_again()
        except Exception as error:
            logger.info("%s: no job is submitted any more", self._name, exc_info=error)
            self.failure = f"{self._name}: no job is submitted any more: {in_a_sentence(error)}"

    async def _submit_again_and_again(self) -> None:
        failures = 0
        while failures < FAILURES_MAX:
            await self._wanted.wait()
            self._joined = False
            cause = await self._submit_and_wait()
            if not self._wanted.is_set():
                continue
            wait_s = again_s(0 if self._joined else failures)
            failures = 0 if self._joined else failures + 1
            if failures < FAILURES_MAX:
                tell = logger.info if self._joined else logger.warning
                tell("%s: %s; another is submitted in %.0f s", self._name, cause, wait_s)
                await asyncio.sleep(wait_s)
        self.failure = (
            f"pools.{self.pool}.slurm, {self._name}: {failures} jobs in a row ended before a worker had joined: {cause}"
        )

    async def _submit_and_wait(self) -> str:
        """Submit a job and wait for its end; returns why it ended."""
        self._running = worker_job(self._scheduler, **self._job)
        self._submitting = asyncio.ensure_future(self._running.start())
        try:
            await asyncio.shield(self._submitting)
        except (RuntimeError, OSError, ValueError) as error:  # refused, unreachable, or no number in the answer
            self._running = None
            return slurms_words(str(error))
        number = self._number
        await _end_of(number)
        self._running = None
        return await how_it_ended(number, self._job["run_dir"] / "slurm" / f"{self._name}-{number}.out")


def again_s(failures: int) -> float:
    """Pause in seconds before a job is submitted again, after so many failures in a row."""
    return min(AGAIN_S * 2**failures, AGAIN_MAX_S)


async def _scancel(*arguments: str) -> None:
    """Cancel jobs; if Slurm does not answer, the caller tries again."""
    await answer("scancel", *arguments)


async def answer(*command: str) -> str | None:
    """Output of a command of Slurm; None if it fails, or is ended because it takes too long.

    It may be a script around the real one, so it has a process group of its own, all of which is ended: a process that
    is left has its output open, and is waited for.
    """
    quiet = asyncio.subprocess.DEVNULL
    try:
        asked = await asyncio.create_subprocess_exec(
            *command,
            stdin=quiet,
            stdout=asyncio.subprocess.PIPE,
            stderr=quiet,
            env=_environment(),
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            printed, _ = await asked.communicate()
    except TimeoutError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(asked.pid, signal.SIGKILL)
        await asked.wait()
    return printed.decode(errors="replace") if asked.returncode == 0 else None


def run_command(*command: str, script: str = "") -> tuple[int, str, str]:
    """Run a command of Slurm; returns its exit status, output and errors.

    Raises:
        OSError, subprocess.TimeoutExpired: it cannot be run, or takes too long.
    """
    done = subprocess.run(
        command, input=os.fsencode(script), capture_output=True, timeout=ANSWER_S, check=False, env=_environment()
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def _environment() -> dict[str, str]:
    """The environment without the user's own defaults for these commands: SQUEUE_STATES hides jobs, as if they had
    ended, and SCANCEL_INTERACTIVE asks first."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}


async def _end_of(job: str) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        there = await queue.look()
        if there is not None and job not in there:
            return


async def how_it_ended(job: str, output: Path) -> str:
    """One sentence on how a job ended: Slurm's state of it, and the job's last line."""
    shown = await answer("scontrol", "--oneliner", "show", "job", job) or ""
    known = dict(re.findall(r"\b(JobState|ExitCode)=(\S+)", shown))
    state = known.get("JobState", "it is not in the queue any more")
    code = f", exit {known['ExitCode'].removesuffix(':0')}" if "ExitCode" in known else ""  # 0:9 is signal 9
    said = last_line(output)
    return f"job {job} ended ({state}{code}){f', and last said: {said}' if said else ''}; its output is in {output}"


def last_line(output: Path) -> str:
    """The last line of a job's output; empty if there is none there."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    readable = ("".join(filter(str.isprintable, line)).strip() for line in reversed(lines))
    return next(filter(None, readable), "")[:LINE_MAX]


QUEUED = ("PENDING", "CONFIGURING")
"""States of a job that has not begun."""


Jobs = Mapping[str, tuple[str, str]]
"""``{number: (state, reason)}``"""


class _Queue:
    """This user's jobs; Slurm is asked at most every `POLL_S`, and once at a time, however many callers there are."""

    def __init__(self) -> None:
        self._look: tuple[float, asyncio.Task[Jobs | None] | None] = 0.0, None
        """When the latest look began, and it; in one, as another run of this process may look in its own thread."""
        self.last: Jobs = {}
        """What Slurm answered last."""

    async def look(self) -> Jobs | None:
        """The jobs that wait or run, at most `POLL_S` / 2 ago; None, which means nothing, if Slurm does not answer."""
        loop = asyncio.get_running_loop()
        since_s = loop.time() - POLL_S / 2
        while True:
            begun_s, looking = self._look
            if looking is None or looking.get_loop() is not loop or (looking.done() and begun_s < since_s):
                begun_s, looking = self._look = loop.time(), loop.create_task(self._ask())
            if begun_s >= since_s:
                return await asyncio.shield(looking)
            await asyncio.wait([looking])  # it may not know yet of a job that was submitted since

    async def _ask(self) -> Jobs | None:
        printed = await answer("squeue", "--me", "--noheader", "--format=%A %T %r")
        if printed is None:
            return None
        jobs = (line.split(maxsplit=2) for line in printed.splitlines())
        self.last = {words[0]: (words[1], words[2].strip()) for words in jobs if len(words) == 3}
        return self.last


queue = _Queue()


@contextlib.contextmanager
def slurm_cluster(config: Config, run_dir: Path, directory: str) -> Iterator[SpecCluster]:
    """A scheduler here, and the pools' jobs in the queue; all are cancelled at the end.

    Jobs that a killed driver left behind are cancelled at the beginning.

    Args:
        directory: private to this user, for the scheduler's scratch files: Dask imports from there.

    Raises:
        SpotlightError: dask-jobqueue or Slurm's commands are not there, or Slurm refuses a pool's job.
    """
    check_commands()
    log = run_dir / "slurm"
    log.mkdir(exist_ok=True)
    with _certificates(run_dir) as (security, theirs):
        host = config.cluster.host or socket.gethostname()
        dashboard = f"{config.cluster.dashboard_host}:{config.cluster.dashboard_port}"
        address = {"host": host, "security": security, "dashboard_address": dashboard, "local_directory": directory}
        jobs: dict[str, Any] = {}
        for pool, section in config.pools:
            for first in range(0, section.workers, section.workers_per_node):
                job = {"pool": pool, "first": first, "section": section, "run_dir": run_dir, "security": theirs}
                jobs[f"{pool}-{first}"] = {"cls": SlurmJobs, "options": {"job": job}}
            if section.workers:
                check_job(pool, section, run_dir, theirs)
        cancel_all(config, run_dir)
        with SpecCluster(
            scheduler={"cls": LeanScheduler, "options": address}, workers=jobs, security=security
        ) as cluster:
            _warn_of_loopback(cluster.scheduler_address, given=config.cluster.host)
            yield cluster


def _warn_of_loopback(address: str, *, given: str) -> None:
    host = urlsplit(address).hostname or ""
    if not given and (host.startswith("127.") or host in ("::1", "localhost")):
        logger.warning(
            "the scheduler listens on %s, since that is what this machine's name stands for here, and workers on other "
            "machines cannot reach it: set cluster.host to an address of this machine that they reach",
            address,
        )


def worker_job(
    scheduler: str, *, pool: str, first: int, section: PoolSection, run_dir: Path, security: Security | None
) -> Any:
    """A job of a pool, as dask-jobqueue has it.

    Args:
        first: number of its first worker within the pool.
        security: its files are visible on the job's node, too.
    """
    SLURMJob = _slurm_job()
    slurm, workers = section.slurm, min(section.workers_per_node, section.workers - first)
    job = SLURMJob(
        scheduler,
        name=pool,
        queue=slurm.partition or None,
        account=slurm.account or None,
        walltime=slurm.time or None,
        cores=slurm.cpus,
        job_cpu=slurm.cpus,
        memory="1 GB",  # not used: what Slurm is asked for is below
        processes=1,
        nanny=False,
        python=worker_line(pool, first=first, workers=workers, cpus=slurm.cpus),
        death_timeout=WORKER_START_S,
        local_directory='"$scratch"',
        job_name=job_name(run_dir, f"{pool}-{first}"),
        # Slurm limits memory itself
        worker_extra_args=["--resources", f"{pool}=1", "--memory-limit", "0", *_QUIET, *_tls(security)],
        job_directives_skip=["-n 1", "--mem=", *([] if slurm.time else ["-t "])],
        job_extra_directives=[output_line(run_dir, f"{pool}-{first}"), *_directives(section, workers)],
        job_script_prologue=[*slurm.setup, *_SCRATCH],
        shebang="#!/usr/bin/env bash",
    )
    job.job_id_regexp = JOB_NUMBER
    return job


def job_name(run_dir: Path, name: str) -> str:
    """A job's name in the queue, with its run's, since a user may have several runs there."""
    return f"{plain(run_dir.name)[:RUN_NAME_MAX]}-{sha256(bytes(run_dir)).hexdigest()[:6]}-{name}"


def _tls(security: Security | None) -> Iterator[str]:
    """A worker's TLS options, as of dask-jobqueue, which does not quote paths."""
    for name, value in (security.get_tls_config_for_role("worker") if security else {}).items():
        if value and name != "ciphers":
            yield f"--tls-{name.replace('_', '-')}"
            yield shlex.quote(value)


def plain(name: str) -> str:
    """A name without characters that separate words, or names, for Slurm."""
    return re.sub(r"[^\w.+-]", "_", name)


def output_line(run_dir: Path, job: str) -> str:
    """The directive for a job's output file: Slurm replaces %j by the job's number, %% by %, and \\" by a quote.

    Raises:
        SpotlightError: Slurm cannot be told of this directory: after a backslash, it replaces nothing.
    """
    if {"\\", "\n"} & {*str(run_dir)}:
        raise SpotlightError(
            f"{str(run_dir)!r}: Slurm writes no job's output into a directory with a backslash or a line break in its "
            "path: choose another one"
        )
    directory = str(run_dir).replace("%", "%%").replace('"', '\\"')
    return f'--output="{directory}/slurm/{job}-%j.out"'


_QUIET = ("--dashboard-address", "127.0.0.1:0")
"""A worker's own dashboard is for its machine alone."""
_SCRATCH = (
    "scratch=$(mktemp -d); trap 'rm -rf \"$scratch\"' EXIT",  # Dask imports from there; its default is open to others
    "trap : TERM USR1",  # the workers hear it themselves
)


def _directives(section: PoolSection, workers: int) -> Iterator[str]:
    slurm = section.slurm
    yield "--nodes=1"
    yield f"--ntasks={workers}"
    yield f"--mem={slurm.memory}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=TERM@{max(1, round(section.grace_s))}"
    if slurm.gres:
        yield f"--gres={slurm.gres_of(workers, section.node_workers)}"
    yield from slurm.extra


def worker_line(pool: str, *, first: int, workers: int, cpus: int, python: str = sys.executable) -> str:
    """The command before the worker's arguments: each task of the step is a worker with a name of its own."""
    step = f"srun --ntasks={workers} --cpus-per-task={cpus} --kill-on-bad-exit=1 --mpi=none"
    worker = f'{shlex.quote(python)} "$@" --name {pool}-$(({first} + SLURM_PROCID))'
    was_cut_off = f"[ $status = 0 ] && [ $(($(date +%s) - began)) -gt {CUT_OFF_AFTER_S} ] && {{ {_WAIT}; }}"
    again = f'[ -z "$told" ] && {{ [ $status -gt 128 ] || {{ {was_cut_off}; }}; }} && [ -z "$told" ]'
    until_told = f'trap "told=1" TERM USR1; while began=$(date +%s); {worker}; status=$?; {again}; do :; done; {_END}'
    return f"{step} sh -c {shlex.quote(until_told)} sh"


CUT_OFF_AFTER_S = 60
"""A worker that leaves by itself after so long has lost its connection to the scheduler, and starts again. One that
leaves sooner found no scheduler any more, or its machine is to be taken away."""
_WAIT = "sleep 5 & wait $! || :"
"""Shell: until a job that is to end has been told; a signal ends it."""
_END = '[ -z "$told" ] || exit 0; exit $status'
"""Exit 0 if the worker was told to leave, even if a second signal killed it while it was leaving."""


def sbatch(script: str, *options: str, where: str) -> str:
    try:
        status, printed, errors = run_command("sbatch", *options, script=script)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpotlightError(f"{where}: sbatch does not answer ({error}): is Slurm up? `sinfo` should tell") from None
    if status:
        raise SpotlightError(f"{where}: Slurm says: {slurms_words(errors)}")
    return printed.strip()


def check_job(pool: str, section: PoolSection, run_dir: Path, security: Security | None) -> None:
    """
    Raises:
        SpotlightError: Slurm would not take a job of this pool.
    """
    job = worker_job("tcp://scheduler", pool=pool, first=0, section=section, run_dir=run_dir, security=security)
    sbatch(job.job_script(), "--test-only", where=f"pools.{pool}.slurm")


def cancel_all(config: Config, run_dir: Path, *, driver: str = "") -> list[str] | None:
    """Cancel this user's jobs of a run's workers; if Slurm does not answer, running ones end because they have no
    scheduler.

    Args:
        driver: the number of the driver's job, if that is to be cancelled, too.

    Returns:
        Their numbers; None where Slurm does not answer.
    """
    wanted = {
        job_name(run_dir, f"{pool}-{first}")
        for pool, section in config.pools
        for first in range(0, section.workers, section.workers_per_node)
    }
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        status, printed, _ = run_command("squeue", "--me", "--noheader", "--format=%A %j")
        jobs = [line.split(maxsplit=1) for line in printed.splitlines()]
        named = [words for words in jobs if len(words) == 2]
        if numbers := [job for job, name in named if name.strip() in wanted or job == driver]:
            status = run_command("scancel", *numbers)[0] or status  # 0, too, if a job has just ended
        return None if status else numbers
    return None


def slurms_words(text: str) -> str:
    """Slurm's error text, with what to check."""
    said = re.findall(r"(?:sbatch|srun|squeue): error: (.+)", text)
    words = "; ".join(dict.fromkeys(said)) or text.strip()
    known = {"partition": "`sinfo` lists partitions", "account": "`sacctmgr show assoc user=$USER` lists accounts"}
    hints = [hint for what, hint in known.items() if what in words.lower()]
    return f"{words} ({', '.join(hints)})" if hints else words


def check_commands() -> None:
    """
    Raises:
        SpotlightError: dask-jobqueue or a command of Slurm is not there.
    """
    for command in ("sbatch", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise SpotlightError(
                f'cluster.manager = "slurm" needs the command `{command}`, and it is not on PATH: run this on a login '
                "node, where Slurm's commands are"
            )
    _slurm_job()


def _slurm_job() -> Any:
    """dask-jobqueue's class.

    Raises:
        SpotlightError: it is not installed.
    """
    ours, signal.signal = signal.signal, lambda *_: None  # it sets SIGINT's handler as it is imported
    try:
        from dask_jobqueue.slurm import SLURMJob
    except ImportError:
        raise SpotlightError('cluster.manager = "slurm" needs dask-jobqueue: pip install dask-jobqueue') from None
    finally:
        signal.signal = ours
    return SLURMJob


@contextlib.contextmanager
def _certificates(run_dir: Path) -> Iterator[tuple[Security, Security]]:
    """The run's own certificate: for the scheduler here, and as files for the jobs, which share this home directory.

    Only this user can read the files. They are removed with the cluster, or when the driver is killed; those left by a
    machine that failed are removed now.
    """
    security = certificate()
    folder = home() / ".spotlight"
    prefix = job_name(run_dir, "tls-")
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for left in folder.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=folder))
            stack.enter_context(janitor.registered("folder", directory))
            cert, key = map(str, write(Path(directory), security))
        except OSError as error:
            raise SpotlightError(
                f"{folder} cannot be made or written ({error.strerror}): the run's certificate lies there for the "
                "workers' jobs while it goes on: set HOME to a directory of yours that all nodes see"
            ) from None
        yield security, Security(require_encryption=True, tls_ca_file=cert, tls_worker_cert=cert, tls_worker_key=key)
