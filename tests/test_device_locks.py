"""Which of a machine's devices a process has, and that nothing is left on them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotlight.store.device_locks import DeviceLock, end_leftovers, visible_devices
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


def test_workers_that_see_the_gpus_in_orders_of_their_own_take_different_ones(tmp_path: Path) -> None:
    """So does dask-cuda start them: each has its own GPU first."""
    seen = [visible_devices({"CUDA_VISIBLE_DEVICES": names}) for names in ("0,1,2", "1, 2,0", "2,0,1", "0,1,2")]

    locks = [DeviceLock(tmp_path, devices=names) for names in seen]

    assert [names[lock.number] for names, lock in zip(seen, locks, strict=True)] == ["0", "1", "2", "0"]


def test_each_of_two_jobs_on_a_node_uses_all_its_gpus(tmp_path: Path) -> None:
    """Whoever comes first, and though Slurm gives the GPUs of both the same numbers."""
    seen = [visible_devices({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": job}) for job in "aabb"]
    locks = [DeviceLock(tmp_path, devices=seen[at]) for at in (0, 2, 1, 3)]

    assert [lock.number for lock in locks] == [0, 0, 1, 1]


def test_a_part_of_a_gpu_has_a_lock_in_the_same_directory(tmp_path: Path) -> None:
    names = visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-GPU-1f/1/0"})

    assert DeviceLock(tmp_path, devices=names).number == 0
    assert len(list(tmp_path.glob("slot-*"))) == 1
    assert visible_devices({}) == []


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
