"""Which of a machine's devices a process has, and that nothing is left on them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotlight.store.device_locks import DeviceLock, end_leftovers, own_devices
from spotlight.store.node import sweep


@pytest.fixture
def frozen() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing any more, not even end when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


def test_each_takes_the_first_device_that_no_other_has(tmp_path: Path) -> None:
    first, second = DeviceLock(tmp_path), DeviceLock(tmp_path)
    first.close()

    assert (first.number, second.number, DeviceLock(tmp_path).number) == (0, 1, 0)


def test_each_job_of_a_node_counts_its_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gives two jobs of a node four GPUs each, and both see theirs as 0 to 3."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    taken: dict[str, list[DeviceLock]] = {"7": [], "8": []}
    for job in ("7", "7", "7", "8", "7", "8", "8", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        taken[job].append(DeviceLock(tmp_path, kind=own_devices()))

    assert [[each.number for each in job] for job in taken.values()] == [[0, 1, 2, 3]] * 2


def test_without_a_choice_of_devices_all_of_the_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    assert own_devices() == ""


def test_who_takes_a_device_ends_what_was_left_on_it(tmp_path: Path, frozen: subprocess.Popen[bytes]) -> None:
    slot = DeviceLock(tmp_path)
    slot.record(frozen.pid)
    slot.close()

    assert DeviceLock(tmp_path).number == slot.number
    assert frozen.wait(timeout=10) == -signal.SIGKILL


def test_what_is_left_at_the_end_is_ended_unless_its_device_is_in_use(
    tmp_path: Path, frozen: subprocess.Popen[bytes]
) -> None:
    slot = DeviceLock(tmp_path)
    slot.record(frozen.pid)
    end_leftovers(tmp_path)
    assert frozen.poll() is None

    slot.close()
    end_leftovers(tmp_path)

    assert frozen.wait(timeout=10) == -signal.SIGKILL


def test_nobody_forgets_who_is_left_by_removing_the_record(tmp_path: Path, frozen: subprocess.Popen[bytes]) -> None:
    """The last worker to leave removes the memory; one that was killed a moment before has left its engine."""
    root = tmp_path / "memory"
    root.mkdir(mode=0o700)
    slot = DeviceLock(root)
    slot.record(frozen.pid)
    slot.close()

    assert sweep(root)

    assert not root.exists()
    assert frozen.wait(timeout=10) == -signal.SIGKILL


def test_another_process_that_got_the_number_is_left_alone(tmp_path: Path, frozen: subprocess.Popen[bytes]) -> None:
    slot = DeviceLock(tmp_path)
    slot.record(frozen.pid)
    slot.close()
    (record,) = tmp_path.glob("slot-*")
    record.write_text(f"{frozen.pid} 1")

    end_leftovers(tmp_path)

    assert frozen.poll() is None
