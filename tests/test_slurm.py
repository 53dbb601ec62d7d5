"""On a real Slurm: workers as jobs, a job that a more important one displaces, a driver that is queued again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import psutil
import pytest
from distributed import Security

from cluster.start import slurm as slurm_jobs
from cluster.start import slurm_driver
from cluster.start.run_cluster import RunCluster
from cluster.start.slurm import again_s, worker_line
from leftovers import OURS, marked
from private_slurm import missing, private_slurm
from runs import COLD_S, LITTLE, ROOT, WAIT_S, outcome, settings_file, start, wait_for
from spotlight import config
from spotlight.records import SpotlightError
from spotlight.run import Run
from spotlight.shell import main
from spotlight.store.creating import create_run
from spotlight.store.rows import EVENTS, HISTORY, SUMMARY, WORKERS
from spotlight.store.rundir import RunDir
from strikes import EXPLORING, SLOWLY, strike
from strikes import undisturbed as alone

JOBS = (
    'cluster.manager="slurm"',
    'cluster.host="127.0.0.1"',
    'cluster.slurm.partition="reserved"',
    'cluster.slurm.extra=["--nodelist=n2"]',
    'pools.reserved.slurm.partition="reserved"',
    'pools.reserved.slurm.extra=["--nodelist=n3"]',
    'pools.spot.slurm.partition="spot"',
    'pools.spot.slurm.extra=["--nodelist=n1"]',
    "pools.spot.workers_per_node=2",
)
WORK = (*LITTLE, 'strategy.rollout_pools=["spot"]')  # without spot workers, nothing goes on
NO_SPOT = ("pools.spot.workers=0", "strategy.exploration=off")
JOINING = "Starting Worker plugin spotlight-member"
PACED = ("pace.gpu=h100", "pace.score_s=0", "pace.speedup=1.5")
"""A rollout lasts two seconds, and all of an iteration four: Slurm needs one to displace a job."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        with private_slurm(Path(directory)):
            yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What the same settings lead to without any cluster."""
    return alone(tmp_path_factory.mktemp("alone"), WORK)


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_jobs_that_are_displaced_or_warned_come_back_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    """A more important job takes the place of the spot job, which Slurm queues again; then it ends on a warning, and
    another is submitted."""
    run = Run(settings_file(tmp_path), [*JOBS, *WORK, *PACED]).start()
    eventually(lambda: rolling_out(run, iteration=0))
    (first,) = jobs("--partition=spot")
    displace = ["sbatch", "--partition=reserved", "--nodelist=n1", "--cpus-per-task=4", "--output=/dev/null"]
    slurms(*displace, "--wrap=sleep 1")

    eventually(lambda: "Restarts=1" in slurms("scontrol", "show", "job", first))
    eventually(lambda: rolling_out(run, iteration=1))
    slurms("scancel", "--signal=TERM", first)
    run.wait()

    lost, left = (
        {row["worker"] for row in run.directory.rows(WORKERS) if row["reason"] == reason} for reason in ("lost", "left")
    )
    assert outcome(run.directory.path) == undisturbed
    assert lost | left == {"spot-0", "spot-1"}
    assert "JobState=COMPLETED" in slurms("scontrol", "show", "job", first)
    eventually(lambda: not jobs())  # one that is cancelled is there until its processes are gone


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_a_job_that_is_not_wanted_any_more_is_drained_and_not_queued_again(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    run = Run(settings_file(tmp_path), [*JOBS, *WORK, *PACED]).start()
    eventually(lambda: rolling_out(run, iteration=0) and run.status.workers["spot"] == 2)
    (first,) = jobs("--partition=spot")
    with pytest.raises(SpotlightError, match="this run can have 0, 2"):
        run.scale(spot=1)

    run.scale(spot=0)
    eventually(lambda: "JobState=COMPLETED" in slurms("scontrol", "show", "job", first))
    eventually(lambda: "spot" in run.status.waiting_for)
    assert not jobs("--partition=spot")
    run.scale(spot=2)
    run.wait()

    reasons = {row["worker"]: row["reason"] for row in run.directory.rows(WORKERS) if row["reason"] != "end"}
    assert outcome(run.directory.path) == undisturbed
    assert reasons == {"spot-0": "sent away", "spot-1": "sent away"}
    assert "Restarts=0" in slurms("scontrol", "show", "job", first)


def rolling_out(run: Run, *, iteration: int) -> bool:
    assert run.alive, run.wait()
    return run.status.iteration == iteration and run.status.running.get("rollout", 0) > 0


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_a_driver_whose_time_is_over_is_queued_again_and_goes_on(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    submitted = submit(settings_file(tmp_path))
    lines = dict(line.split(maxsplit=1) for line in submitted.replace("run directory", "directory").splitlines())
    run = RunDir(lines["directory"])
    eventually(lambda: run.rows(HISTORY))

    slurms("scancel", "--batch", "--signal=USR1", lines["job"])  # as Slurm does before the time limit

    eventually(lambda: (run.path / SUMMARY).exists() and not jobs())
    assert "Restarts=1" in slurms("scontrol", "show", "job", lines["job"])
    assert outcome(run.path) == undisturbed


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_a_driver_that_is_a_job_can_be_stopped_in_order_from_anywhere(tmp_path: Path) -> None:
    line, directory, _ = submit(settings_file(tmp_path)).splitlines()
    run = RunDir(directory.split(maxsplit=2)[-1])
    eventually(lambda: run.rows(HISTORY))

    assert main(["stop", str(run.path)]) == 0

    eventually(lambda: not jobs())
    assert Run.attach(run.path).state == "stopped"
    assert "Restarts=0" in slurms("scontrol", "show", "job", line.split()[-1])


def test_a_driver_that_fails_at_once_fails_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the node has no such Python; the shell may hear of it before it can wait."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (script := tmp_path / "script").write_text(
        slurm_driver.driver_script(config.load(settings_file(tmp_path)), tmp_path / "run")
    )
    (slowly := tmp_path / "slowly").write_text("trap 'sleep 0.1' DEBUG\n")

    done = subprocess.run(["bash", script], env={**os.environ, "BASH_ENV": str(slowly)}, capture_output=True)

    assert done.returncode == 127


@pytest.mark.parametrize("setup", ["true", "set -euo pipefail"])
@pytest.mark.parametrize(
    ("signals", "status", "is_queued_again"),
    [("USR1", 7, True), ("USR1", 0, False), ("TERM", 7, False), ("TERM USR1", 7, False)],
)
def test_a_driver_is_queued_again_at_its_time_limit_unless_it_was_stopped_whatever_the_setup_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, signals: str, status: int, is_queued_again: bool
) -> None:
    """Nor if it ended well. In the job's script, the driver sends what Slurm would, as soon as the shell hears that."""
    (python := tmp_path / "python").write_text(
        "#!/bin/sh\ntrap told=1 TERM\nuntil grep -q 'SigCgt:.*[4-7c-f]...$' /proc/$PPID/status; do sleep 0.01; done\n"
        f'for each in {signals}; do kill -$each $PPID; until [ "$told" ]; do sleep 0.01; done; done\nexit {status}\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    commands(tmp_path, monkeypatch, scontrol=f'echo "$@" >> {(asked := tmp_path / "asked")}')
    asked.touch()
    settings = config.load(settings_file(tmp_path), [f'cluster.slurm.setup=["{setup}"]'])
    (script := tmp_path / "script").write_text(slurm_driver.driver_script(settings, tmp_path / "run"))

    done = subprocess.run(["bash", script], env={**os.environ, "SLURM_JOB_ID": "3"}, capture_output=True)

    assert done.returncode == status
    assert asked.read_text() == ("requeue 3\n" if is_queued_again else "")


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "none"])
def test_only_a_drivers_job_that_runs_is_told_to_stop_and_its_batch_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    (tmp_path / "slurm").mkdir()
    (run := RunDir(tmp_path)).path.joinpath(slurm_driver.JOB).write_text("7")
    (told := tmp_path / "told").touch()
    for command, does in (("squeue", f"echo 7 {state} None"), ("scancel", f'echo "$@" >> {told}')):
        (tmp_path / command).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert slurm_driver.stop_job(run) is (state == "RUNNING")
    assert told.read_text() == ("--batch --signal=TERM 7\n" if state == "RUNNING" else "")


@pytest.mark.parametrize(
    ("squeue", "says", "of_a_stopped_run"),
    [
        ("echo 7 PENDING Priority", "its driver is Slurm's job 7, which is PENDING (Priority)", True),
        ("", "its driver's job 7 ended (it is not in the queue any more)", False),
        ("exit 1", "its driver is Slurm's job 7, and how that is, Slurm does not say here", False),
    ],
)
def test_a_drivers_job_is_not_said_to_have_ended_where_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, says: str, of_a_stopped_run: bool
) -> None:
    """As on a machine that has the run's directory and no Slurm."""
    (tmp_path / "slurm").mkdir()
    slurm_driver.record(run := RunDir(tmp_path), "7")
    commands(tmp_path, monkeypatch, squeue=squeue, scontrol="exit 1")

    assert slurm_driver.told_of(run, only_queued=False).startswith(says)
    assert bool(slurm_driver.told_of(run, only_queued=True)) is of_a_stopped_run


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_whoever_is_killed_or_frozen_on_slurm_the_bits_are_the_same(tmp_path: Path) -> None:
    """In exploration, training and rollout; then the driver, which is resumed."""
    settings, run = settings_file(tmp_path), tmp_path / "run"
    given = (*JOBS, *EXPLORING, *SLOWLY, "cluster.hang_after_s=15")
    driver = start("run", settings, "--into", run, *(part for setting in given for part in ("--set", setting)))
    try:
        killed = strike(run, "explore-r0-0", signal.SIGKILL, send)
        trainer = strike(run, "train-0", signal.SIGKILL, send)
        frozen = strike(run, "rollout-1", signal.SIGSTOP, send)
        eventually(lambda: "hung" in {row["event"] for row in RunDir(run).rows(EVENTS)})
        strike(run, "train-1", signal.SIGKILL, lambda *_: driver.kill())
    finally:
        driver.kill()
        driver.communicate()

    resumed = start("resume", run)
    _, said = resumed.communicate(timeout=COLD_S)

    ends = {(row["event"], row.get("worker")) for row in RunDir(run).rows(EVENTS)}
    assert resumed.returncode == 0, said
    assert outcome(run) == alone(tmp_path / "alone", EXPLORING)
    assert {("lost", killed), ("lost", trainer), ("hung", frozen)} <= ends
    eventually(lambda: not jobs())


@pytest.mark.live
@pytest.mark.timeout(3 * COLD_S)
@pytest.mark.usefixtures("slurm")
def test_workers_whose_driver_is_killed_while_they_begin_end_and_so_do_their_jobs(tmp_path: Path) -> None:
    """Told to stop, and killed a second later, as Slurm does with a driver's job that is cancelled."""
    settings, run = settings_file(tmp_path), tmp_path / "run"
    driver = start("run", settings, "--into", run, *(part for setting in JOBS for part in ("--set", setting)))
    try:
        eventually(lambda: [log for log in run.glob("slurm/spot-*.out") if JOINING in log.read_text()])
        driver.terminate()
        time.sleep(1.2)
    finally:
        driver.kill()
        driver.communicate()

    eventually(lambda: not jobs())


def send(worker: str, what: signal.Signals) -> None:
    """A signal to the worker of this name, which is a process of this machine."""
    (process,) = (each for each in marked(OURS, os.environ[OURS]) if ["--name", worker] in pairs(each.cmdline()))
    process.send_signal(what)


def pairs(words: Sequence[str]) -> list[list[str]]:
    return [list(pair) for pair in pairwise(words)]


@pytest.mark.usefixtures("slurm")
def test_a_partition_that_is_not_there_is_named_in_slurms_words(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), [*JOBS, 'pools.spot.slurm.partition="sopt"']).start()
    with pytest.raises(SpotlightError, match=r"pools\.spot\.slurm: Slurm says: .*invalid partition.*sinfo"):
        run.wait()


@pytest.mark.usefixtures("slurm")
def test_jobs_that_a_killed_driver_left_are_cancelled_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the user has Slurm's commands show and cancel running jobs alone, and ask first."""
    run_dir, settings = tmp_path / "a run", config.load(settings_file(tmp_path), JOBS)
    names = [slurm_jobs.job_name(run_dir, name) for name in ("reserved-0", "spot-0", "other")]
    held = ["sbatch", "--parsable", "--hold", "--partition=reserved", "--output=/dev/null", "--wrap=true"]
    mine, spot, other = (slurms(*held, f"--job-name={name}").strip() for name in names)

    with monkeypatch.context() as users:
        for name, value in {"SQUEUE_STATES": "RUNNING", "SCANCEL_STATE": "RUNNING", "SCANCEL_INTERACTIVE": "1"}.items():
            users.setenv(name, value)
        waiting = asyncio.run(slurm_jobs._Queue().look())
        cancelled = slurm_jobs.cancel_all(settings, run_dir)

    assert waiting is not None
    assert {mine, spot, other} <= {*waiting}
    assert sorted(cancelled or []) == sorted([mine, spot])
    assert jobs() == [other]
    slurms("scancel", other)


def test_what_is_left_of_a_run_is_cancelled_by_one_look_at_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(config.load(settings_file(tmp_path), JOBS), 0.0)
    (run.path / "slurm").mkdir()
    slurm_driver.record(run, "7")
    (asked := tmp_path / "asked").touch()
    for command, does in (
        ("squeue", f"printf '6 caf\\351\\n'; echo '7 a'; echo '8 b'; echo '9 {run.name}'"),
        ("scancel", ":"),
    ):
        (script := tmp_path / command).write_text(f'#!/bin/sh\necho {command} "$1" >> {asked}\n{does}\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    cancelled = slurm_driver.cancel_left(run, run.config())

    assert cancelled == ["7"]
    assert asked.read_text().splitlines() == ["squeue --me", "scancel 7"]


@pytest.mark.parametrize(
    ("squeue", "scancel", "answers"), [("exit 1", "", False), ("exit 0", "", True), ("echo 7 driver", "exit 1", False)]
)
def test_a_slurm_that_does_not_answer_is_told_of_neither_as_an_empty_queue_nor_as_one_that_was_emptied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    squeue: str,
    scancel: str,
    answers: bool,
) -> None:
    run = create_run(config.load(settings_file(tmp_path), JOBS), 0.0)
    (run.path / "slurm").mkdir()
    slurm_driver.record(run, "7")
    commands(tmp_path, monkeypatch, squeue=squeue, scancel=scancel)

    assert main(["stop", str(run.path)]) == 1
    assert ("Slurm does not answer" in capsys.readouterr().err) == (not answers)


@pytest.mark.usefixtures("slurm")
def test_a_job_that_failed_is_told_of_with_its_exit_and_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    words = "--wrap=echo begun; echo no such python; exit 127"
    job = slurms("sbatch", "--parsable", "--partition=reserved", f"--output={output}", words).strip()
    eventually(lambda: "JobState=FAILED" in slurms("scontrol", "show", "job", job))

    said = asyncio.run(slurm_jobs.how_it_ended(job, output))

    assert said == f"job {job} ended (FAILED, exit 127), and last said: no such python; its output is in {output}"


@pytest.mark.usefixtures("slurm")
def test_a_job_that_was_killed_is_told_of_with_its_signal_whatever_its_run_is_called(tmp_path: Path) -> None:
    (log := tmp_path / 'the "last" 50%, really' / "slurm").mkdir(parents=True)
    script = f"#!/bin/sh\n#SBATCH {slurm_jobs.output_line(log.parent, 'spot-0')}\necho begun\nkill -9 $$\n"
    job = slurm_jobs.sbatch(script, "--parsable", "--partition=reserved", where="here")
    eventually(lambda: "JobState=FAILED" in slurms("scontrol", "show", "job", job))

    said = asyncio.run(slurm_jobs.how_it_ended(job, log / f"spot-0-{job}.out"))

    assert said.startswith(f"job {job} ended (FAILED, exit 0:9), and last said: begun; ")


@pytest.mark.usefixtures("slurm")
def test_a_run_whose_driver_waits_in_the_queue_says_so_and_can_be_stopped_and_queued_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_file(tmp_path)
    line, directory, _ = submit(settings, "--begin=now+1hour").splitlines()
    job, run_dir = line.split()[-1], directory.split(maxsplit=2)[-1]

    assert main(["status", run_dir]) == 0
    assert f"job {job}, which is PENDING (BeginTime)" in capsys.readouterr().out
    assert main(["resume", run_dir]) == 1
    assert f"scancel {job}" in capsys.readouterr().err
    assert main(["submit", run_dir]) == 1
    assert f"its driver is Slurm's job {job} (PENDING)" in capsys.readouterr().err
    assert main(["stop", run_dir]) == 0
    assert job in capsys.readouterr().out
    eventually(lambda: not jobs())
    assert main(["status", run_dir]) == 0
    assert f"job {job} ended (CANCELLED" in capsys.readouterr().out
    assert main(["stop", run_dir]) == 1

    assert main(["submit", run_dir, "--begin=now+1hour"]) == 0
    again = capsys.readouterr().out.split()[1]
    assert jobs() == [again]
    assert main(["stop", run_dir]) == 0
    assert main(["submit", run_dir, "--set", "run.seed=3"]) == 1
    assert "whose settings stay as they are" in capsys.readouterr().err


def test_a_driver_that_is_submitted_takes_any_free_port_unless_one_was_chosen(tmp_path: Path) -> None:
    needs_jobqueue()
    chosen = tmp_path / "chosen"
    chosen.mkdir()

    found = [
        config.load(SlurmTaken.run_dir(where, *more) / "config.toml").cluster.dashboard_port
        for where, more in ((tmp_path, ()), (chosen, ("--set", "cluster.dashboard_port=8799")))
    ]

    assert found == [0, 8799]


class SlurmTaken:
    """A Slurm that takes everything, and does nothing."""

    @staticmethod
    def run_dir(where: Path, *more: str) -> Path:
        (commands := where / "bin").mkdir()
        for command in ("sbatch", "squeue", "scancel"):
            (commands / command).write_text("#!/bin/sh\necho 7\n")
            (commands / command).chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
            printed = submit(settings_file(where), *more)
        return Path(printed.splitlines()[1].split(maxsplit=2)[-1])


def test_what_slurm_is_asked_for_is_for_slurm_to_judge(tmp_path: Path) -> None:
    needs_jobqueue()
    settings = config.load(settings_file(tmp_path), [*JOBS, 'pools.spot.slurm.memory="0"'])

    _, _, spot = slurm_driver.scripts(settings, tmp_path).values()

    assert "#SBATCH --mem=0\n" in spot


def test_a_home_that_cannot_hold_the_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")

    with pytest.raises(SpotlightError, match=r"/proc/\.spotlight cannot be made or written .* set HOME"):
        ExitStack().enter_context(slurm_jobs._certificates(tmp_path))


def test_a_run_s_certificate_is_this_user_s_alone_and_one_that_was_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (run := tmp_path / "a [run]").mkdir()
    (left := tmp_path / ".spotlight" / slurm_jobs.job_name(run, "tls-left")).mkdir(parents=True)
    (others := tmp_path / ".spotlight" / slurm_jobs.job_name(tmp_path / "b" / run.name, "tls-used")).mkdir()

    with slurm_jobs._certificates(run):
        (key,) = tmp_path.glob(".spotlight/*/key.pem")
        assert not left.exists()
        assert {path.stat().st_mode & 0o077 for path in (key, key.parent)} == {0}

    assert list((tmp_path / ".spotlight").iterdir()) == [others]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, ""),
        (b"", ""),
        (b"first\nlast\n\n", "last"),
        (b"caf\xe9\n", "caf\ufffd"),
        (b"\x1b[31mred\x1b[0m\n", "[31mred[0m"),
        (b"a" * 1_000, "a" * slurm_jobs.LINE_MAX),
        (b"long ago\n" + b"\n" * slurm_jobs.LAST_BYTES, ""),
    ],
)
def test_the_last_words_of_a_job_are_a_line_that_a_terminal_can_show(
    tmp_path: Path, written: bytes | None, said: str
) -> None:
    if written is not None:
        (tmp_path / "out").write_bytes(written)

    assert slurm_jobs.last_line(tmp_path / "out") == said


@pytest.mark.parametrize(
    ("address", "given", "warns"),
    [
        ("tls://127.0.1.1:40001", "", True),
        ("tls://[::1]:40001", "", True),
        ("tls://10.0.0.5:40001", "", False),
        ("tls://127.0.0.1:40001", "127.0.0.1", False),
    ],
)
def test_an_address_that_other_machines_do_not_reach_is_warned_of_unless_it_was_chosen(
    caplog: pytest.LogCaptureFixture, address: str, given: str, warns: bool
) -> None:
    slurm_jobs._warn_of_loopback(address, given=given)

    assert [address in record.getMessage() for record in caplog.records] == [True] * warns


def test_a_run_begins_by_cancelling_what_a_killed_driver_of_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_jobqueue()
    settings = config.load(settings_file(tmp_path), [*JOBS, *NO_SPOT])
    left = slurm_jobs.job_name(tmp_path, "reserved-0")
    asked = f'echo $(basename $0) "$@" >> {tmp_path / "asked"}; '
    queued = f"{asked}case $* in *%j*) echo 6 {left};; *) echo 7 PENDING None;; esac"
    commands(tmp_path, monkeypatch, sbatch=f"{asked}echo Submitted batch job 7", squeue=queued, scancel=asked)

    with slurm_jobs.slurm_cluster(settings, tmp_path, str(tmp_path)):
        wait_for(lambda: (tmp_path / "asked").read_text().count("sbatch") >= 2)

    lines = (tmp_path / "asked").read_text().splitlines()
    (cancels,) = (number for number, line in enumerate(lines) if line == "scancel 6")
    assert ["--test-only" in line for line in lines if "sbatch" in line] == [True, False]
    assert not any("sbatch" in line and "--test-only" not in line for line in lines[:cancels])
    assert lines[-1] == "scancel 7"


def test_a_directory_that_takes_no_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a full disk; into this one not even root can write."""
    (tmp_path / ".spotlight").symlink_to("/proc/self/fdinfo")
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(SpotlightError, match=r"\.spotlight cannot be made or written .* set HOME"):
        ExitStack().enter_context(slurm_jobs._certificates(tmp_path))


def test_a_host_that_is_not_this_machine_s_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_jobqueue()
    commands(tmp_path, monkeypatch, sbatch="", squeue="", scancel="")
    settings = config.load(settings_file(tmp_path), [*JOBS, 'cluster.host="192.0.2.1"'])  # no machine has it

    with pytest.raises(SpotlightError, match=r"\(.*address.*\): see that 192\.0\.2\.1 is an address of this machine"):
        RunCluster(settings, tmp_path)


def test_a_run_s_certificate_fits_into_a_directory_s_name_however_long_the_run_s_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    runs = [tmp_path / ("\u4e00" * 84 + number) for number in "12"]

    with slurm_jobs._certificates(runs[0]), slurm_jobs._certificates(runs[1]):
        lent = list(tmp_path.glob(".spotlight/*/key.pem"))

    assert len(lent) == 2


def test_a_job_that_was_sent_away_is_followed_by_another_as_soon_as_it_is_wanted_and_no_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state := tmp_path / "state").touch()
    (said := tmp_path / "said").touch()
    submits = f"echo submitted >> {said}; echo 7 RUNNING None > {state}; echo Submitted batch job 7"
    commands(tmp_path, monkeypatch, sbatch=submits, squeue=f"cat {state}", scancel=f": > {state}")
    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.02)
    monkeypatch.setattr(slurm_jobs, "again_s", lambda failures: COLD_S)
    place = spot_jobs(tmp_path)

    async def live() -> int:
        await place.start()
        await until(lambda: place._number)
        place.want(False)
        await until(lambda: not place._number)
        await asyncio.sleep(0.1)
        early = said.read_text().count("submitted")
        place.want(True)
        await until(lambda: said.read_text().count("submitted") == 2)
        await place.close()
        return early

    assert asyncio.run(live()) == 1


def test_a_place_knows_its_workers_and_says_what_its_job_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state := tmp_path / "state").write_text("7 PENDING Priority")
    commands(tmp_path, monkeypatch, sbatch="echo Submitted batch job 7", squeue=f"cat {state}", scancel="")
    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.02)
    place = spot_jobs(tmp_path)

    async def live() -> None:
        await place.start()
        await until(lambda: place.waits() == "job 7 is PENDING (Priority)")
        state.write_text("7 RUNNING None")
        await until(lambda: not place.waits())
        await place.close()

    asyncio.run(live())

    asked = ("spot-0", "spot-1", "spot-2", "reserved-0", "head-1a2b")
    assert [name for name in asked if place.has(name)] == ["spot-0", "spot-1"]


def test_a_hint_fits_what_slurm_refused() -> None:
    said = [
        slurm_jobs.slurms_words(f"sbatch: error: {words}")
        for words in ("invalid partition specified: x", "Invalid account or account/partition", "Invalid --mem value")
    ]

    assert ["sinfo" in words for words in said] == [True, True, False]
    assert ["sacctmgr" in words for words in said] == [False, True, False]
    assert said[2] == "Invalid --mem value"


def test_what_would_be_submitted_can_be_read_first(tmp_path: Path) -> None:
    needs_jobqueue()
    slurm = ('time="2:00:00"', 'account="ours"', "cpus=3", 'setup=["module load cuda"]')
    more = [f"--set=pools.reserved.slurm.{setting}" for setting in slurm]
    printed = submit(
        settings_file(tmp_path), "--dry-run", "--begin=22:00", '--set=pools.spot.slurm.gres="gpu:2"', *more
    )
    driver, reserved, spot = printed.split("#!/usr/bin/env bash")[1:]

    assert "#SBATCH --begin=22:00" in driver
    assert "#SBATCH --requeue" in driver
    assert "spotlight resume" in driver
    assert "--resources reserved=1" in reserved
    assert "#SBATCH --ntasks=2" in spot
    assert "#SBATCH --gres=gpu:2" in spot
    assert "#SBATCH --nodelist=n1" in spot
    assert "#SBATCH -t" not in spot
    asked = {"#SBATCH -t 2:00:00", "#SBATCH -A ours", "#SBATCH --cpus-per-task=3"}
    assert asked <= {*reserved.splitlines()}
    assert " --cpus-per-task=3 " in reserved  # of the step
    assert reserved.index("module load cuda") < reserved.index("mktemp")  # it may say where scratch files go
    for job in (reserved, spot):  # Slurm queues it again, adds to its output, and warns it before its time is over
        assert {"#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=TERM@30"} <= {*job.splitlines()}
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_last_job_of_a_pool_has_the_workers_that_are_left_and_is_warned_without_grace_too(tmp_path: Path) -> None:
    needs_jobqueue()
    more = ("pools.spot.workers=3", "pools.spot.grace_s=0", 'pools.spot.slurm.gres="gpu:h100:2,disk:1"')
    settings = config.load(settings_file(tmp_path), [*JOBS, *more])

    last = slurm_jobs.worker_job(
        "tls://here:1", pool="spot", first=2, section=settings.pools.spot, run_dir=tmp_path, security=None
    )

    asked = {"#SBATCH --ntasks=1", "#SBATCH --signal=TERM@1", "#SBATCH --gres=gpu:h100:1,disk:1"}
    assert asked <= {*last.job_script().splitlines()}
    assert "srun --ntasks=1 " in last.job_script()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400.0),
        ("1:30", 90.0),
        ("01:00:00", 3600.0),
        ("2-3", 51 * 3600.0),
        ("1-00:30", 88_200.0),
        ("1-00:00:30", 86_430.0),
        ("", None),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, seconds: float | None) -> None:
    assert slurm_driver.seconds_of(limit) == seconds


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("cluster.slurm.time=00:03:00", "cluster.slurm.time = '00:03:00': "),  # a time of day, to TOML
        ('tracking.to=["wandb"]', "tracking.to names 'wandb', which is not installed"),
    ],
)
def test_what_the_driver_would_fail_of_is_refused_before_its_script_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, says: str
) -> None:
    needs_jobqueue()

    assert main(["submit", str(settings_file(tmp_path)), "--dry-run", "--set", setting]) == 1

    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out


def test_a_time_limit_of_zero_is_none_as_to_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_jobqueue()
    commands(tmp_path, monkeypatch, sbatch=f"cat >> {tmp_path / 'asked'}")

    given = [*JOBS, 'cluster.slurm.time="0"', *NO_SPOT]

    slurm_driver.check_jobs(config.load(settings_file(tmp_path), given), tmp_path / "run")

    assert (tmp_path / "asked").read_text().count("#!/usr/bin/env bash") == 1  # no job without workers


def test_a_workers_own_page_is_for_its_machine_alone(tmp_path: Path) -> None:
    needs_jobqueue()
    settings = config.load(settings_file(tmp_path), JOBS)

    found = slurm_driver.scripts(settings, tmp_path / "run")

    assert ["--dashboard-address 127.0.0.1:0" in script for script in found.values()] == [False, True, True]


@pytest.mark.parametrize(
    ("failures", "cut_off_after_s", "tries", "status"),
    [
        ("kill -9 $$", 60, 3, 0),
        ("exit 0", -1, 3, 0),
        ("exit 0", 60, 1, 0),
        ("exit 1", 60, 1, 1),
        ("kill -TERM $PPID $$", 60, 1, 0),
    ],
)
def test_a_worker_that_is_killed_or_cut_off_starts_again_in_its_job_and_one_that_fails_or_is_told_to_leave_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: str, cut_off_after_s: int, tries: int, status: int
) -> None:
    """The line of the job's script, with a shell for the step and one for the worker, which is told the third time."""
    monkeypatch.setattr(slurm_jobs, "CUT_OFF_AFTER_S", cut_off_after_s)
    monkeypatch.setattr(slurm_jobs, "_WAIT", ":")
    python = tmp_path / "python"
    third = f"[ $(wc -l < {tmp_path}/tries) = 3 ]"
    python.write_text(f"#!/bin/sh\necho $4 >> {tmp_path}/tries\n{third} && kill -TERM $PPID && exit 0\n{failures}\n")
    python.chmod(0o755)
    line = worker_line("spot", first=4, workers=2, cpus=1, python=str(python))
    step, _, rest = line.partition("--mpi=none ")

    done = subprocess.run(["sh", "-c", f"{rest} -m worker"], env={**os.environ, "SLURM_PROCID": "1"})

    assert step.startswith("srun --ntasks=2")
    assert (tmp_path / "tries").read_text().split() == ["spot-5"] * tries
    assert done.returncode == status


def test_a_job_has_ended_when_squeue_has_answered_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"7": ("PENDING", "Priority")}, {"7": ("RUNNING", "None")}, None, {}, None])

    async def look() -> slurm_jobs.Jobs | None:
        return next(answers)

    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.01)
    monkeypatch.setattr(slurm_jobs.queue, "look", look)

    asyncio.run(slurm_jobs._end_of("7"))

    assert list(answers) == [None]


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (
            "echo '7 RUNNING None'; echo; echo slurm; echo '8 PENDING (Resources, held)'",
            {"7": ("RUNNING", "None"), "8": ("PENDING", "(Resources, held)")},
        ),
        ("printf '7 PENDING caf\\351\\n'", {"7": ("PENDING", "caf\ufffd")}),
        ("echo '7 RUNNING None'; exit 1", None),
        ("echo $$ > {pid}; exec sleep 600", None),
        ("sleep 600 & echo $! > {pid}; wait", None),  # a script around the real one
    ],
)
def test_whatever_squeue_answers_is_heard_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, found: slurm_jobs.Jobs | None
) -> None:
    (squeue := tmp_path / "squeue").write_text(f"#!/bin/sh\n{does.format(pid=tmp_path / 'pid')}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_jobs, "ANSWER_S", 2.0 if "sleep" in does else WAIT_S)

    assert asyncio.run(slurm_jobs._Queue().look()) == found

    if "sleep" in does:
        pid = int((tmp_path / "pid").read_text())
        wait_for(lambda: not psutil.pid_exists(pid))


def test_however_many_wait_for_a_slow_squeue_it_is_asked_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said := tmp_path / "said").touch()
    slowly = f"until [ -e {tmp_path / 'goes-on'} ]; do sleep 0.01; done"
    commands(tmp_path, monkeypatch, squeue=f"echo begun >> {said}; {slowly}; echo ended >> {said}")
    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.001)
    queue = slurm_jobs._Queue()

    async def look() -> tuple[slurm_jobs.Jobs | None, int]:
        found = await queue.look()
        return found, said.read_text().count("ended")

    async def looks() -> list[tuple[slurm_jobs.Jobs | None, int]]:
        first = asyncio.create_task(look())
        await until(lambda: "begun" in said.read_text())
        others = [asyncio.create_task(look()) for _ in range(4)]
        await asyncio.sleep(0.1)  # all wait
        (tmp_path / "goes-on").touch()
        return await asyncio.gather(first, *others)

    assert asyncio.run(looks()) == [({}, 1)] + [({}, 2)] * 4  # what began after they asked
    assert said.read_text().split() == ["begun", "ended"] * 2


def test_a_job_that_is_being_submitted_is_not_told_to_leave_before_it_has_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said := tmp_path / "said").touch()
    submits = f"echo begun >> {said}; sleep 0.3; echo Submitted batch job 7"
    commands(tmp_path, monkeypatch, sbatch=submits, scancel=f'echo "$@" >> {said}', squeue="echo 7 RUNNING None")
    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.02)
    place = spot_jobs(tmp_path)

    async def live() -> None:
        await place.start()
        await until(lambda: said.read_text())
        place.evict()
        place.want(False)
        await until(lambda: "TERM" in said.read_text())
        place.evict()
        await until(lambda: "KILL" in said.read_text())
        await place.close()

    asyncio.run(live())

    begun, *told, last = said.read_text().splitlines()
    assert (begun, last) == ("begun", "7")
    assert {*told} == {"--state=PENDING 7", "--signal=TERM 7", "--signal=KILL --full 7"}


def test_a_job_that_slurm_takes_while_its_place_is_closed_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said := tmp_path / "said").touch()
    submits = f"echo begun >> {said}; sleep 0.3; echo Submitted batch job 7"
    commands(tmp_path, monkeypatch, sbatch=submits, squeue="", scancel=f'echo cancel "$@" >> {said}')
    place = spot_jobs(tmp_path)

    async def live() -> None:
        await place.start()
        await until(lambda: said.read_text())
        await place.close()

    asyncio.run(live())

    assert said.read_text().splitlines() == ["begun", "cancel 7"]


@pytest.mark.parametrize("says", ["Submitted batch job 7", "Submitted batch job 7 on cluster a1", "7;a1", "7"])
def test_a_jobs_number_is_found_whatever_a_site_has_sbatch_say_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    submits = f"echo 12 hours of 2026 are left; echo '{says}'; echo 3 more may wait"
    commands(tmp_path, monkeypatch, sbatch=submits, squeue="echo 7 RUNNING None", scancel="")
    place = spot_jobs(tmp_path)

    async def number() -> str:
        await place.start()
        await until(lambda: place._number)
        found = place._number
        await place.close()
        return found

    assert (asyncio.run(number()), slurm_driver.submit("#!/bin/sh")) == ("7", "7")


def test_an_answer_without_a_jobs_number_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, sbatch="echo queued, all is well")

    with pytest.raises(SpotlightError, match="the driver's job: sbatch answered without a job's number: 'queued, all"):
        slurm_driver.submit("#!/bin/sh")


def test_a_place_is_closed_though_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (said := tmp_path / "said").touch()
    commands(tmp_path, monkeypatch, sbatch=f"echo begun >> {said}; sleep 2; echo ended >> {said}")
    monkeypatch.setattr(slurm_jobs, "ANSWER_S", 0.1)
    place = spot_jobs(tmp_path)

    async def live() -> str:
        await place.start()
        await until(lambda: said.read_text())
        await place.close()
        so_far = said.read_text()
        await until(lambda: "ended" in said.read_text())
        return so_far

    assert asyncio.run(live()) == "begun\n"


def spot_jobs(run_dir: Path) -> slurm_jobs.SlurmJobs:
    needs_jobqueue()
    section = config.load(settings_file(run_dir), JOBS).pools.spot
    job = {"pool": "spot", "first": 0, "section": section, "run_dir": run_dir, "security": None}
    return slurm_jobs.SlurmJobs("tcp://127.0.0.1:1", name="spot-0", job=job)


def test_a_worker_of_anothers_naming_is_in_no_job(tmp_path: Path) -> None:
    jobs = spot_jobs(tmp_path)

    found = [jobs.has(name) for name in ("spot-0", "spot-mine", "spot-", "spot-01", "reserved-0", "spot")]

    assert found == [True, *[False] * 5]


def commands(where: Path, monkeypatch: pytest.MonkeyPatch, **does: str) -> None:
    """Commands of Slurm, by what a shell does for them."""
    for command, script in does.items():
        (where / command).write_text(f"#!/bin/sh\n{script}\n")
        (where / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(where), prepend=os.pathsep)


def needs_jobqueue() -> None:
    """Skips a test where it is not installed, and does not import it: that would set the handler of SIGINT."""
    if not find_spec("dask_jobqueue"):
        pytest.skip("dask_jobqueue is not installed")


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not what():
            await asyncio.sleep(0.01)


def test_a_run_may_have_any_name_and_lie_anywhere(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), JOBS)

    needs_jobqueue()
    found = slurm_driver.scripts(settings, "/runs of mine/50% as long, twice")

    for script in found.values():
        (output,) = (line for line in script.splitlines() if "--output" in line)
        (name,) = (
            line.split("=" if "job-name" in line else " -J ")[1]
            for line in script.splitlines()
            if "-J" in line or "job-name" in line
        )
        assert output.startswith('#SBATCH --output="/runs of mine/50%% as long, twice/slurm/')
        assert name.startswith("50__as_long__twice")
    assert "resume '/runs of mine/50% as long, twice'" in found["the driver"]


@pytest.mark.parametrize("path", [r"/a\b/run", "/a\nb/run"])
def test_a_run_whose_path_slurm_does_not_take_is_refused(tmp_path: Path, path: str) -> None:
    settings = config.load(settings_file(tmp_path), JOBS)

    with pytest.raises(SpotlightError, match="with a backslash or a line break in its path: choose another one"):
        slurm_driver.scripts(settings, path)


@pytest.mark.parametrize("error", [RuntimeError("sbatch: error: busy"), OSError("no sbatch"), ValueError("no number")])
def test_a_job_that_cannot_be_submitted_is_tried_again_until_the_place_gives_up(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tries: list[str] = []

    class Refused:
        async def start(self) -> None:
            tries.append("start")
            raise error

    monkeypatch.setattr(slurm_jobs, "worker_job", lambda *_, **__: Refused())
    monkeypatch.setattr(slurm_jobs, "again_s", lambda failures: 0.0)

    async def kept() -> str:
        place = slurm_jobs.SlurmJobs("tcp://127.0.0.1:1", name="spot-0", job={"pool": "spot"})
        await asyncio.wait_for(place._keep(), 30.0)
        return place.failure

    assert str(error).removeprefix("sbatch: error: ") in asyncio.run(kept())
    assert len(tries) == slurm_jobs.FAILURES_MAX


def test_jobs_that_are_submitted_no_more_for_an_unforeseen_error_are_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("cores")

    monkeypatch.setattr(slurm_jobs, "worker_job", fail)
    place = slurm_jobs.SlurmJobs("tcp://127.0.0.1:1", name="spot-0", job={"pool": "spot"})

    asyncio.run(place._keep())

    said = "spot-0: no job is submitted any more: an error in Spotlight itself, KeyError: 'cores'"
    assert place.failure == said


def test_a_job_counts_as_failed_only_if_no_worker_of_it_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = slurm_jobs.SlurmJobs("tcp://127.0.0.1:1", name="spot-0", job={"pool": "spot"})
    waits: list[int] = []
    joins = iter([False, False, True] + [False] * slurm_jobs.FAILURES_MAX)

    async def submit_and_wait() -> str:
        if next(joins):
            place.heard_of()
        return "job 7 ended (FAILED, exit 127)"

    def again(failures: int) -> float:
        waits.append(failures)
        return 0.0

    monkeypatch.setattr(place, "_submit_and_wait", submit_and_wait)
    monkeypatch.setattr(slurm_jobs, "again_s", again)

    asyncio.run(place._keep())

    assert waits == [0, 1, 0, *range(slurm_jobs.FAILURES_MAX)]
    assert "spot-0: 8 jobs in a row ended before a worker had joined: job 7 ended (FAILED, exit 127)" in place.failure
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2 + slurm_jobs.FAILURES_MAX - 1  # the last is the failure's own


@pytest.mark.parametrize(
    ("failing", "ends"),
    [
        (("spot-0",), False),
        (("spot-0", "spot-2"), False),
        (("reserved-0",), False),
        (("reserved-0", "reserved-1"), True),
    ],
)
def test_a_run_goes_on_without_jobs_that_always_fail_while_others_of_their_pool_are_there(
    caplog: pytest.LogCaptureFixture, failing: tuple[str, ...], ends: bool
) -> None:
    places = {}
    for name in ("reserved-0", "reserved-1", "spot-0", "spot-2"):
        pool, _, first = name.partition("-")
        place = places[name] = object.__new__(slurm_jobs.SlurmJobs)
        place._job = {"pool": pool, "first": int(first), "section": SimpleNamespace(workers_per_node=1)}
        place.failure = f"{name} always fails" if name in failing else ""
    pools: Any = object.__new__(RunCluster)
    pools.cluster, pools._needed, pools._reported = SimpleNamespace(workers=places), ("reserved", "reward"), set()

    if ends:
        with pytest.raises(SpotlightError, match="reserved-0 always fails"):
            pools._look_at_jobs()
        return
    pools._look_at_jobs()
    pools._look_at_jobs()

    assert [record.getMessage() for record in caplog.records] == [
        f"{name} always fails; the run goes on without it" for name in failing
    ]


NO_SBATCH, NO_SCANCEL = "needs the command `sbatch`", "needs the command `scancel`"
REFUSED = "pools.reserved.slurm: Slurm says: invalid partition"


@pytest.mark.parametrize(
    ("verb", "says"), [("run", NO_SBATCH), ("submit", NO_SBATCH), ("run", NO_SCANCEL), ("submit", REFUSED)]
)
def test_where_slurm_takes_nothing_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, says: str
) -> None:
    (commands := tmp_path / "bin").mkdir()
    there = {NO_SBATCH: (), NO_SCANCEL: ("sbatch", "squeue"), REFUSED: ("sbatch", "squeue", "scancel")}
    for command in there[says]:
        (commands / command).write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
        (commands / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))

    left = main([verb, str(settings_file(tmp_path)), "--set", 'cluster.manager="slurm"'])

    assert left == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("run-*"))


def test_an_sbatch_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, sbatch="exec sleep 60")
    monkeypatch.setattr(slurm_jobs, "ANSWER_S", 0.2)

    with pytest.raises(SpotlightError, match="the driver's job: sbatch does not answer .*: is Slurm up"):
        slurm_driver.submit("#!/bin/sh")


def test_ctrl_c_is_heard_as_before_once_jobs_are_known() -> None:
    """Though dask-jobqueue, as it is imported, would have that signal for itself."""
    needs_jobqueue()
    code = """
import signal
from cluster.start.slurm import _slurm_job
before = signal.getsignal(signal.SIGINT)
print(_slurm_job().__name__, signal.getsignal(signal.SIGINT) is before)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    assert slurms(sys.executable, "-c", code, env=environment).split() == ["SLURMJob", "True"]


def test_a_job_gives_its_workers_only_options_that_they_know(tmp_path: Path) -> None:
    """Whatever else Dask's configuration says of TLS."""
    needs_jobqueue()
    files = {name: str(tmp_path / name) for name in ("tls_ca_file", "tls_worker_cert", "tls_worker_key")}
    settings = config.load(settings_file(tmp_path), JOBS)

    with dask.config.set({"distributed.comm.tls.ciphers": "ECDHE-RSA-AES256-GCM-SHA384"}):
        security = Security(require_encryption=True, **files)
        job = slurm_jobs.worker_job(
            "tls://here:1", pool="spot", first=0, section=settings.pools.spot, run_dir=tmp_path, security=security
        )

    given = {*re.findall(r" (--tls-\S+)", job.job_script())}
    known = slurms(sys.executable, "-m", "distributed.cli.dask_worker", "--help")
    assert given == {"--tls-ca-file", "--tls-cert", "--tls-key"}
    assert given <= {*known.split()}


def test_a_job_is_submitted_again_ever_later() -> None:
    assert [again_s(failures) for failures in range(8)] == [5, 10, 20, 40, 80, 160, 300, 300]


def test_the_slurm_sections_are_settings_like_any_other(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), JOBS)
    assert settings.pools.spot.slurm.extra == ("--nodelist=n1",)
    with pytest.raises(SpotlightError, match=r"\[pools\.spot\.slurm\] has no field 'partitoin'"):
        config.load(settings_file(tmp_path), ['pools.spot.slurm.partitoin="spot"'])


def eventually(what: Callable[[], object]) -> None:
    wait_for(what, at_most_s=COLD_S)


def submit(settings: Path, *more: str) -> str:
    given = [part for setting in (*JOBS, *WORK) for part in ("--set", setting)]
    return slurms(sys.executable, "-m", "spotlight", "submit", str(settings), *given, *more)


def jobs(*which: str) -> list[str]:
    return slurms("squeue", "--noheader", "--format=%A", *which).split()


def slurms(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm's, or of ours about it, prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
