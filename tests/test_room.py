"""How much a directory can still take, where memory is limited by more than its file system."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from spotlight.store import room
from spotlight.store.node import Node, NotOnNode

GB = 10**9
MEMORY = SimpleNamespace(total=100 * GB, available=40 * GB)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GB of memory, of which 40 are free, in no control group."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MEMORY)
    monkeypatch.setattr(room, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(room, "OWN_GROUPS", tmp_path / "own")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if not room.SHARED_MEMORY.is_dir():
        pytest.skip("this machine has no /dev/shm")
    with tempfile.TemporaryDirectory(dir=room.SHARED_MEMORY) as name:
        yield Path(name)


def write_group(directory: Path, limit: str, used: int, cached: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        f"{prefix}anon 5\n{prefix}active_file 7\n{prefix}inactive_file {cached - 7}\n"
    )


def test_a_directory_on_a_disk_takes_what_its_file_system_has(tmp_path: Path) -> None:
    assert room.room_bytes(tmp_path) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_a_directory_in_memory_takes_no_more_than_memory_is_free(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage(in_memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=90 * GB))

    assert room.room_bytes(in_memory) == 35 * GB  # a twentieth of the machine's memory is left
    (tmp_path / "link").symlink_to(in_memory)
    assert room.room_bytes(tmp_path / "link") == 35 * GB
    with pytest.raises(NotOnNode, match=rf"no room for {36 * GB} bytes .* {35 * GB} bytes are free"):
        Node(in_memory / "node").make("key", lambda _: pytest.fail("it was written"), size_bytes=36 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=3 * GB))
    assert room.room_bytes(in_memory) == 3 * GB


@pytest.mark.parametrize(("version", "root", "line"), [(2, "", "0::"), (1, "memory", "4:cpu,memory:")])
@pytest.mark.parametrize("limited", ["job/step", "job", ""])
def test_the_narrowest_control_group_decides(tmp_path: Path, version: int, root: str, line: str, limited: str) -> None:
    (tmp_path / "own").write_text(f"1:pids:/elsewhere\n{line}/job/step\n")
    for group in ("", "job", "job/step"):
        limit = str(30 * GB) if group == limited else "max" if version == 2 else str(2**63 - 4096)
        write_group(tmp_path / "groups" / root / group, limit, 20 * GB, 4 * GB, version)

    assert (room.memory_bytes(), room.spare_memory_bytes()) == (30 * GB, 14 * GB)


def test_a_group_that_cannot_be_seen_from_inside_a_container_is_that_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/kubepods/pod-7/container\n")
    write_group(tmp_path / "groups", str(30 * GB), 20 * GB, 7, 2)

    assert (room.memory_bytes(), room.spare_memory_bytes()) == (30 * GB, 10 * GB + 7)


def test_a_group_may_have_colons_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pod:cri:7\n")
    write_group(tmp_path / "groups" / "pod:cri:7", str(30 * GB), 20 * GB, 7, 2)

    assert room.memory_bytes() == 30 * GB


def test_without_groups_it_is_what_the_machine_has() -> None:
    assert (room.memory_bytes(), room.spare_memory_bytes()) == (100 * GB, 40 * GB)
