"""On a real Slurm: workers as jobs, a job that a more important one displaces, a driver that is queued again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from private_slurm import missing, private_slurm
from runs import outcome, settings_file, wait_for
from spotlight import config
from spotlight.records import SpotlightError
from spotlight.run import Run
from spotlight.store.rundir import HISTORY, SUMMARY, RunDir

JOBS = [
    'cluster.manager="slurm"',
    'cluster.host="127.0.0.1"',
    'cluster.slurm.partition="reserved"',
    'pools.reserved.slurm.partition="reserved"',
    'pools.reserved.slurm.extra=["--nodelist=n3"]',
    'pools.spot.slurm.partition="spot"',
    'pools.spot.slurm.extra=["--nodelist=n1"]',
    "pools.spot.workers_per_node=2",
    "strategy.widths=[1,2]",
    "run.iterations=12",
    "rollout.steps=20",
]


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
    """What the same settings lead to on processes of this machine."""
    run = Run(settings_file(tmp_path_factory.mktemp("local")), [*JOBS, 'cluster.manager="local"']).start()
    run.wait()
    return outcome(run.directory.path)


@pytest.mark.usefixtures("slurm")
@pytest.mark.timeout(600)
def test_a_displaced_job_is_queued_again_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    run = Run(settings_file(tmp_path), JOBS).start()
    wait_for(lambda: run.directory.rows(HISTORY) or not run.alive)
    displace = ["sbatch", "--partition=reserved", "--nodelist=n1", "--cpus-per-task=4", "--output=/dev/null"]
    subprocess.run([*displace, "--wrap=sleep 1"], check=True, capture_output=True)
    run.wait()

    assert run.status.preemptions >= 1
    assert outcome(run.directory.path) == undisturbed
    assert not _jobs()


@pytest.mark.usefixtures("slurm")
@pytest.mark.timeout(600)
def test_a_driver_whose_time_is_over_is_queued_again_and_goes_on(
    tmp_path: Path, undisturbed: dict[str, list[object]]
) -> None:
    submitted = _submit(settings_file(tmp_path))
    lines = dict(line.split(maxsplit=1) for line in submitted.stdout.replace("run directory", "directory").splitlines())
    run = RunDir(lines["directory"])
    wait_for(lambda: run.rows(HISTORY))

    subprocess.run(["scancel", "--batch", "--signal=USR1", lines["job"]], check=True)  # as before its time limit

    wait_for(lambda: (run.path / SUMMARY).exists() and not _jobs())
    shown = subprocess.run(["scontrol", "show", "job", lines["job"]], capture_output=True, text=True, check=True)
    assert "Restarts=1" in shown.stdout
    assert outcome(run.path) == undisturbed


@pytest.mark.usefixtures("slurm")
def test_a_partition_that_is_not_there_is_named_in_slurms_words(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), [*JOBS, 'pools.spot.slurm.partition="sopt"']).start()
    with pytest.raises(SpotlightError, match=r"pools\.spot\.slurm: Slurm says: .*invalid partition.*sinfo"):
        run.wait()


def test_what_would_be_submitted_can_be_read_first(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    printed = _submit(settings_file(tmp_path), "--dry-run", "--begin=22:00", '--set=pools.spot.slurm.gres="gpu:2"')
    driver, reserved, spot = printed.stdout.split("#!/usr/bin/env bash")[1:]

    assert "#SBATCH --begin=22:00" in driver
    assert "#SBATCH --requeue" in driver
    assert "spotlight resume" in driver
    assert "--resources reserved=1" in reserved
    assert "#SBATCH --ntasks=2" in spot
    assert "#SBATCH --gres=gpu:2" in spot
    assert "#SBATCH -t" not in spot
    assert not (tmp_path / "runs").exists()


def test_the_slurm_sections_are_settings_like_any_other(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), JOBS)
    assert settings.pools.spot.slurm.extra == ("--nodelist=n1",)
    with pytest.raises(SpotlightError, match=r"\[pools\.spot\.slurm\] has no field 'partitoin'"):
        config.load(settings_file(tmp_path), ['pools.spot.slurm.partitoin="spot"'])


def _submit(settings: Path, *more: str) -> subprocess.CompletedProcess[str]:
    jobs = [part for job in JOBS for part in ("--set", job)]
    command = [sys.executable, "-m", "spotlight", "submit", str(settings), *jobs, *more]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _jobs() -> list[str]:
    return subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True, check=True).stdout.split()
