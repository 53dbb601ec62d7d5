"""What settings ask for is counted before a run starts: the impossible is refused, the unusual is said."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runs import settings_file
from spotlight import config
from spotlight.demands import Machine, check_demands, demands, this_machine
from spotlight.inputs import check_inputs
from spotlight.records import SpotlightError
from spotlight.run import Run
from spotlight.store import disks
from spotlight.store.disks import full_disk, full_here, is_full

LARGE = Machine(open_files=1e6, processes=1e5, memory_bytes=1e12)


def refused(directory: Path, machine: Machine, *overrides: str) -> list[str]:
    settings = config.load(settings_file(directory), overrides)
    found = demands(settings, machine, validation_prompts=20, live=True)
    return [str(demand) for demand in found if demand.asked > demand.limit]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "exploration.seeds_tried=1000000",
            ["1,500,0", "exploration.seeds_tried"],
        ),
        ("strategy.widths=[1, 2, 1024]", []),
        ("run.validation_seeds=4096", []),
        ("pools.spot.workers=100000", ["1,100,0", "threads", "and this user may have 100,000", "pools.spot.workers"]),
    ],
)
def test_what_a_large_machine_cannot_do_is_refused_with_the_number_and_the_setting(
    tmp_path: Path, override: str, says: list[str]
) -> None:
    found = " ".join(refused(tmp_path, LARGE, "strategy.exploration=stale", override))

    assert bool(found) == bool(says)
    assert [part for part in says if part not in found] == []


def test_training_counts_too(tmp_path: Path) -> None:
    many = ("rollout.prompts=3000", "rollout.seeds_kept=100", "rollout.request_seeds=100", "strategy.exploration=off")

    wide = refused(tmp_path, LARGE, *many, "train.updates=300", "train.parts=1000")
    long = refused(tmp_path, LARGE, *many, "train.updates=10000")

    assert "306,000 tasks in the graph of an iteration" in " ".join(wide)
    assert "references to gradients in the graph of an iteration" in " ".join(long)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (Machine(open_files=40, processes=1e5, memory_bytes=1e12), "104 open files of the driver, and a process may"),
        (Machine(open_files=1e6, processes=76, memory_bytes=1e12), "83 threads, each of which counts as a process"),
        (Machine(open_files=1e6, processes=1e5, memory_bytes=1e8), "bytes of memory for the workers, and this machine"),
        (Machine(open_files=1e6, processes=1e5, memory_bytes=1e3), "24,576 bytes for the images of one request, its"),
    ],
)
def test_what_this_machine_cannot_give_is_refused_with_the_number(tmp_path: Path, machine: Machine, says: str) -> None:
    assert says in " ".join(refused(tmp_path, machine))


def test_all_that_a_machine_has_may_be_asked_for_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of memory, four times as much: workers share pages."""
    monkeypatch.setattr(
        "spotlight.demands.this_machine", lambda: Machine(open_files=104, processes=83, memory_bytes=3e8)
    )

    check_demands(config.load(settings_file(tmp_path)), validation_prompts=6, live=True)

    assert ["83 threads" in said or "1,200,000,000 bytes of memory" in said for said in caplog.messages] == [True, True]


def test_exploration_that_is_off_asks_for_nothing(tmp_path: Path) -> None:
    assert refused(tmp_path, LARGE, "strategy.exploration=off", "exploration.seeds_tried=1000000") == []


def test_workers_on_other_machines_take_nothing_of_this_one_but_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver in a job of Slurm's has 4 GB, and a login node few processes."""
    job = Machine(open_files=1024, processes=100, memory_bytes=4e9)
    slurm = ("cluster.manager=slurm", "pools.spot.workers=100")

    assert refused(tmp_path, job, *slurm) == []
    assert "1,688 open files" in " ".join(refused(tmp_path, job, *slurm, "pools.spot.workers=200"))

    monkeypatch.setattr("spotlight.demands.this_machine", lambda: job)
    many = config.load(settings_file(tmp_path), ["pools.spot.workers=200"])
    with pytest.raises(SpotlightError, match="ask for 2,261 threads"):
        check_inputs(many, with_model=False)
    check_inputs(many, with_model=False, joins=True)
    assert caplog.messages == []


def test_the_example_asks_for_nothing_unusual(tmp_path: Path) -> None:
    settings = config.load(Path(__file__).parents[1] / "examples" / "ocr-tiny.toml")

    found = list(demands(settings, LARGE, validation_prompts=20, live=True))

    assert [str(demand) for demand in found if demand.asked > demand.usual] == []


def test_this_machine_is_measured() -> None:
    found = this_machine()

    assert found.open_files > 3
    assert found.processes > 1
    assert found.memory_bytes > 1e8


def test_the_unusual_is_logged_and_the_impossible_refused_before_a_run_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many, too_many = (
        config.load(settings_file(tmp_path), [f"exploration.seeds_tried={tried}"]) for tried in (50_000, 500_000)
    )

    with caplog.at_level(logging.WARNING):
        check_inputs(many, with_model=False)
    with pytest.raises(SpotlightError, match=r"ask for 7.*tasks in the graph of an iteration.*exploration.seeds_tried"):
        check_inputs(too_many, with_model=False)

    assert "tasks in the graph of an iteration" in caplog.text


@pytest.mark.parametrize("url", ["/dev/null/x", "/proc/x", "memoryy://x", "file:///proc/x", "file://rel/x"])
def test_a_place_for_latents_that_cannot_be_used_is_found_before_the_cluster_starts(tmp_path: Path, url: str) -> None:
    with pytest.raises(SpotlightError, match=rf"latents.url = .*{url}.* cannot be (used|opened)"):
        Run(settings_file(tmp_path), [f"latents.url={url}"])

    assert list(tmp_path.glob("run-*")) == []


@pytest.mark.parametrize("setting", ["run.dir", "latents.url"])
def test_the_memory_of_a_process_is_no_place_for_what_workers_share(tmp_path: Path, setting: str) -> None:
    run = Run(settings_file(tmp_path), [f"{setting}=memory://x"])

    with pytest.raises(SpotlightError, match=rf"{setting} = 'memory://x': workers are processes"):
        run.start()


@pytest.mark.parametrize("patience_s", [0.05, 60.0])  # we give up first, or the store's client does
def test_an_unreachable_bucket_is_found_before_the_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr("spotlight.store.zarr_store.PROBE_S", patience_s)
    pytest.importorskip("obstore")
    for name, value in {
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "x",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SpotlightError, match=r"latents.url = 's3://bucket/x' cannot be used"):
        Run(settings_file(tmp_path), ["latents.url=s3://bucket/x"])


def test_latents_have_a_place_relative_to_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_file(tmp_path)
    monkeypatch.chdir("/")

    Run(settings, ["latents.url=store"])

    assert (tmp_path / "store").is_dir()


@pytest.fixture(params=["size=1m", "size=64m,nr_inodes=20"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"only who may mount a file system can fill one: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_named_and_what_of_it_is_full(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.statvfs(small_disk).f_files < 100:
        for number in range(18):
            (small_disk / str(number)).touch()
        expected = f"{small_disk} has 1 inodes left of 20, and "
    else:
        (small_disk / "ballast").write_bytes(bytes(900_000))
        expected = f"{small_disk} has 0.1 MB left: make room"

    assert full_disk([tmp_path, small_disk / "somewhere" / "below"]).startswith(expected)
    (tmp_path / "link").symlink_to(small_disk)
    assert full_disk([tmp_path / "link"]).startswith(expected)
    assert full_disk([tmp_path]) == ""
    here, error = f"on {socket.gethostname()}, {expected}", OSError(errno.ENOSPC, "No space left on device")
    assert full_here(OSError(errno.ENOSPC, error.strerror, str(small_disk / "file"))).startswith(here)
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(small_disk))
        assert full_here(error).startswith(here)
    monkeypatch.setattr(disks, "SHARED_MEMORY", small_disk)
    assert full_here(error).startswith(here)


def test_a_file_that_a_quota_leaves_no_room_for_is_named(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "file"))

    assert is_full(error)
    assert full_here(error) == f"on {socket.gethostname()}, {tmp_path}/file: make room"
    assert full_here(OSError(errno.EDQUOT, "Disk quota exceeded")) == f"on {socket.gethostname()}, make room"
    assert not is_full(ValueError("no error of a disk"))


@pytest.mark.parametrize(
    ("inodes", "inodes_left", "blocks_left", "says"),
    [(0, 0, 1000, ""), (100, 50, 1000, ""), (100, 50, 100, "has 0.4 MB left"), (100, 9, 1000, "has 9 inodes left")],
    ids=["Btrfs counts no inodes", "room", "blocks of its owner", "inodes of its owner"],
)
def test_what_only_the_owner_of_a_disk_may_take_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, inodes_left: int, blocks_left: int, says: str
) -> None:
    found = SimpleNamespace(
        f_files=inodes, f_favail=inodes_left, f_ffree=inodes, f_bavail=blocks_left, f_bfree=10**6, f_frsize=4096
    )
    monkeypatch.setattr(os, "statvfs", lambda _: found)

    said = full_disk([tmp_path])

    assert says in said
    assert bool(said) == bool(says)


def test_a_gpu_that_is_not_there_is_missed_before_a_local_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other machines there may be one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = settings_file(tmp_path)
    settings = config.load(file, ["model.device=cuda"])

    with pytest.raises(SpotlightError, match=r'finds no GPU, and model\.device = "cuda"'):
        check_inputs(settings)
    check_inputs(settings, joins=True)
    check_inputs(settings, live=False)
    check_inputs(config.load(file, ["model.device=cuda", "cluster.manager=slurm"]))
