"""The job of a run's driver on Slurm: queued by `spotlight submit`, warned before its time limit, queued again.

The driver then submits its workers' jobs (`cluster.start.slurm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.start.slurm import (
    JOB_NUMBER,
    Jobs,
    cancel_all,
    check_job,
    how_it_ended,
    output_line,
    plain,
    queue,
    run_command,
    sbatch,
    worker_job,
)
from spotlight.config import Config
from spotlight.files import shown
from spotlight.records import SpotlightError
from spotlight.store.rundir import RunDir, files_of

JOB = "slurm/driver-job"
"""File in the run's directory with the number of the driver's job that was submitted last."""
DRIVER_NOTICE_S = 120
"""So long before its time limit, the driver's job is warned: the run stops after the steps in flight, and is
requeued."""
DRIVER_LEAST_S = 300
"""Shortest time limit with which a driver makes progress."""
RESUME = "SIGUSR1"


def driver_script(config: Config, run_dir: Path | str, *, begin: str = "") -> str:
    """The batch script of a run's driver: resumes the run, and queues itself again before its time limit.

    `scancel` (SIGTERM) stops the run; the signal before the time limit is another one.
    """
    slurm, run, files = config.cluster.slurm, shlex.quote(str(run_dir)), files_of(run_dir)
    header = [
        f"--job-name={plain(files.name)}",
        output_line(files, "driver"),
        f"--signal=B:{RESUME.removeprefix('SIG')}@{DRIVER_NOTICE_S}",
        "--requeue",
        "--open-mode=append",
        f"--cpus-per-task={slurm.cpus}",
        f"--mem={slurm.memory}",
        *(f"--{name}={value}" for name in ("partition", "account", "gres", "time") if (value := getattr(slurm, name))),
        *([f"--begin={begin}"] if begin else []),
        *slurm.extra,
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {line}" for line in header),
            *slurm.setup,
            "set +eu; again=",  # a setup may have begun with `set -eu`, and a wait that a signal ends has failed
            f"{shlex.quote(sys.executable)} -m spotlight resume {run} & driver=$!",
            f"trap 'again=1; kill -TERM $driver' {RESUME.removeprefix('SIG')}",
            "trap 'trap \"\" USR1; kill -TERM $driver' TERM",  # a run that is stopped stays so at the time limit, too
            "while kill -0 $driver 2> /dev/null; do wait $driver; done",  # a signal ends a wait before the driver ends
            "wait $driver; status=$?",  # bash still knows it, also if the driver ended before the first wait
            '[ -z "$again" ] || [ $status = 0 ] || scontrol requeue "$SLURM_JOB_ID"',
            "exit $status",
            "",
        ]
    )


def check_time(config: Config) -> None:
    """
    Raises:
        SpotlightError: the driver's time limit is too short to make progress.
    """
    limit_s = seconds_of(config.cluster.slurm.time)
    if limit_s is not None and 0 < limit_s < DRIVER_LEAST_S:  # 0 is no limit
        raise SpotlightError(
            f"cluster.slurm.time = {config.cluster.slurm.time!r}: the driver is told {DRIVER_NOTICE_S} s before its "
            f"time is over, and needs minutes to get on: give it {DRIVER_LEAST_S // 60} minutes at least"
        )


def check_jobs(config: Config, run_dir: Path | str) -> None:
    """Ask Slurm whether it would take the jobs that the driver will submit.

    Raises:
        SpotlightError: it would not.
    """
    for pool, section in config.pools:
        if section.workers:
            check_job(pool, section, files_of(run_dir), None)


def seconds_of(limit: str) -> float | None:
    """Seconds of a time limit in a form of `man sbatch`; None for other forms, which are left to Slurm."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    numbers = list(map(int, parts))
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60.0 + seconds
    hours, minutes, seconds = (0, *numbers, 0)[:3] if len(numbers) < 3 else numbers  # minutes[:seconds], or all three
    return (hours * 60 + minutes) * 60.0 + seconds


def submit(script: str) -> str:
    """Queue a batch script; returns its number.

    Raises:
        SpotlightError: Slurm does not take it, or does not say its number.
    """
    printed = sbatch(script, "--parsable", where="the driver's job")
    found = re.search(JOB_NUMBER, printed)
    if not found:
        raise SpotlightError(
            f"the driver's job: sbatch answered without a job's number: {shown(printed)}: `squeue --me` tells whether "
            "the job is queued: cancel it before you submit the run again"
        )
    return found["job_id"]


def scripts(config: Config, run_dir: Path | str, *, begin: str = "") -> Mapping[str, str]:
    """All that `spotlight submit` would queue, now or from the driver: ``{what it is: batch script}``."""
    found = {"the driver": driver_script(config, run_dir, begin=begin)}
    for pool, section in config.pools:
        jobs = len(range(0, section.workers, section.workers_per_node))
        if jobs:
            job = worker_job(
                "tls://DRIVER:PORT", pool=pool, first=0, section=section, run_dir=files_of(run_dir), security=None
            )
            found[f"{jobs} x {pool}, by the driver"] = job.job_script()
    return found


def record(run: RunDir, job: str) -> None:
    """Keep the number of a run's driver job."""
    (run.path / JOB).write_text(job)


def job_of(run: RunDir) -> str:
    """The number of the driver's job that was submitted last; empty where none was."""
    try:
        return (run.path / JOB).read_text().strip()
    except OSError:
        return ""


def _queued() -> Jobs | None:
    """This user's jobs; None where Slurm does not answer."""
    return asyncio.run(queue.look())


def told_of(run: RunDir, *, only_queued: bool) -> str:
    """One sentence on the driver's job of a run that nobody runs; empty if none was submitted.

    Args:
        only_queued: also empty if the job is over, or Slurm does not answer.
    """
    if not (job := job_of(run)):
        return ""
    queued = _queued()
    if known := (queued or {}).get(job):
        return f"its driver is Slurm's job {job}, which is {known[0]} ({known[1]})"
    if only_queued:
        return ""
    if queued is None:
        return f"its driver is Slurm's job {job}, and how that is, Slurm does not say here: see `squeue --me`"
    return f"its driver's {asyncio.run(how_it_ended(job, run.path / 'slurm' / f'driver-{job}.out'))}"


def refuse_second(run: RunDir) -> None:
    """
    Raises:
        SpotlightError: the run's driver is a job that is queued, or still there, and this is another one.
    """
    job = job_of(run)
    if job and job != os.environ.get("SLURM_JOB_ID") and (known := (_queued() or {}).get(job)):
        raise SpotlightError(
            f"{run.url}: its driver is Slurm's job {job} ({known[0]}), and would find the run taken: `scancel {job}` "
            "first, or wait for it"
        )


def stop_job(run: RunDir) -> bool:
    """Ask the run's driver, if it is a running job, to end in order; returns whether Slurm passed that on.

    Only its batch script is signalled, so Slurm kills nothing, however long the steps in flight take.
    """
    job = job_of(run)
    if not job or (_queued() or {}).get(job, ("", ""))[0] != "RUNNING":
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return run_command("scancel", "--batch", "--signal=TERM", job)[0] == 0
    return False


def cancel_left(run: RunDir, config: Config) -> list[str] | None:
    """Cancel a driver's job that has not begun, and the workers' jobs that a killed driver left in the queue.

    Returns:
        Their numbers; None where Slurm does not answer.
    """
    return cancel_all(config, run.path, driver=job_of(run))
