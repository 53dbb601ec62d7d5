"""A run at a URL: what is there is whole, one driver has it, and whoever goes on with it needs nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast
from uuid import uuid4

import numpy as np
import pytest
import torch
from distributed.protocol.pickle import dumps, loads
from obstore.exceptions import GenericError, NotFoundError
from tblib.pickling_support import install  # type: ignore[import-untyped]
from zarr.core.sync import sync

from factories import make_request
from pipelines import tiny_qwen_image
from runs import settings_file
from spotlight import config
from spotlight.device.engine import Engine
from spotlight.plan.beliefs import Beliefs
from spotlight.records import Gradient, GradientPart, Quarantined, SpotlightError, Stopped, WeightsRef, row_of
from spotlight.rl.models.pipeline import PipelineModel
from spotlight.rl.prompts import read_prompts
from spotlight.store import journals, lease, rundir, updates, weights
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.journals import Journals
from spotlight.store.lease import LEASE_S, LOOK_S, RECORD_BYTES, Lease
from spotlight.store.node import Node
from spotlight.store.objects import (
    RETRY_S,
    BucketObjects,
    DirectoryObjects,
    Objects,
    StoreError,
    explaining,
    objects_at,
    retried,
)
from spotlight.store.rows import DECISIONS, HISTORY, QUARANTINED, SIMULATED, SPANS, VALIDATION
from spotlight.store.rundir import PUSH_S, RunDir, files_of
from spotlight.store.zarr_store import ZarrStore


@pytest.fixture
def bucket() -> str:
    """Of an object store that only this process sees."""
    return f"memory://{uuid4().hex}"


@pytest.fixture(params=["directory", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> Objects:
    return DirectoryObjects(tmp_path) if request.param == "directory" else BucketObjects(bucket)


@pytest.fixture
def run(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    return create_run(config.load(settings_file(tmp_path), [f"run.dir={bucket}"]), now_s=0.0)


@pytest.mark.parametrize("told", ["", "some/where"])
def test_local_files_of_a_run_at_a_url_do_not_depend_on_where_one_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", told)

    assert files_of("s3://bucket/run").is_relative_to(tmp_path / ".local" / "state" / "spotlight")


def on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunDir) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    return RunDir.open(run.url)


def test_an_object_is_created_once_and_put_again(objects: Objects) -> None:
    assert objects.get("a/b") is None
    assert objects.create("a/b", b"first")
    assert not objects.create("a/b", b"second")
    assert objects.get("a/b") == b"first"

    objects.put("a/b", b"third!")

    assert (objects.get("a/b"), objects.size("a/b")) == (b"third!", 6)
    assert objects.source("a/b")("", 1, 3) == b"hir"
    with objects.opened("a/b", 1, 3) as file:
        assert file.read(3) == b"hir"
    assert objects.sizes("a") == {"a/b": 6}
    objects.delete("a/b", "a/c")
    assert (objects.sizes("a"), objects.size("a/b")) == ({}, None)


def test_all_below_a_place_is_deleted_and_nothing_beside_it(objects: Objects) -> None:
    for key in ("a/b", "a/c/d", "ab/c", "b"):
        objects.put(key, b"x")

    for _ in range(2):
        objects.delete_below("a")

    assert [objects.size(key) for key in ("a/b", "a/c/d", "ab/c", "b")] == [None, None, 1, 1]


def test_a_slash_at_the_end_of_an_address_means_nothing(bucket: str, tmp_path: Path) -> None:
    for place in (bucket, str(tmp_path)):
        assert objects_at(f"{place}/").where("a") == f"{place}/a"
        assert RunDir(f"{place}/").url == place
        assert RunDir(f"{place}/").path == RunDir(place).path


def test_in_a_directory_only_whole_files_are_objects(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    for content in (b"first", b"second"):
        objects.create("a/b", content)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]

    (tmp_path / "a" / ".c.1-2.part").touch()
    (tmp_path / "a" / "d").mkdir()

    assert objects.sizes("a") == {"a/b": 5}
    assert objects.size("a/d") is None
    assert objects.get("a/b/c") is None


def test_what_a_killed_writer_left_or_another_thread_writes_is_in_nobodys_way(tmp_path: Path) -> None:
    objects, both = DirectoryObjects(tmp_path / "run"), threading.Barrier(2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    objects.path.mkdir()
    (objects.path / f".a.{os.getpid()}-{threading.get_ident()}.part").symlink_to(elsewhere)

    def meets() -> Iterator[memoryview]:
        both.wait(10)
        yield memoryview(b"whole")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(objects.put, "a", meets())
        objects.put("a", meets())
        other.result()

    assert elsewhere.read_bytes() == b"not ours"
    assert objects.get("a") == b"whole"
    assert [path.name for path in objects.path.iterdir()] == ["a"]


def test_what_could_not_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    objects.put("a", b"before")

    def fails() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        objects.put("a", fails())

    assert objects.get("a") == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_is_written_over_in_place_is_no_longer_than_before_and_no_link(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    objects.put("a", b"long")
    (tmp_path / "link").symlink_to("a")

    assert objects.overwrite("a", b"abc")
    assert not objects.overwrite("a", b"longer")
    assert not objects.overwrite("b", b"new")
    with pytest.raises(OSError, match="symbolic links"):
        objects.overwrite("link", b"de")

    assert objects.get("a") == b"abc"
    assert not (tmp_path / "b").exists()


class Clock(threading.Event):
    """A clock of one machine; it goes on while somebody waits for this event, which is to stop that."""

    def __init__(self, now_s: float = 1000.0, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.now_s, self.waited_s, self._meanwhile = now_s, 0.0, meanwhile

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        self.waited_s += timeout or 0.0
        self._meanwhile()
        return self.is_set()


@pytest.mark.parametrize("durable", [True, False])
def test_an_object_that_is_to_be_durable_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """A machine that loses its power may lose what was only written, or renamed."""
    synced, fsync = [], os.fsync

    def sync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").resolve()
        if place.is_relative_to(tmp_path):  # another test's lease may still be renewed
            synced.append((place.suffix or place.name, (tmp_path / "beliefs/00001.json").exists()))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", sync)
        DirectoryObjects(tmp_path).put("beliefs/00001.json", b"{}", durable=durable)

    assert synced == [(".part", False), ("beliefs", True)] * durable


def test_one_of_two_drivers_has_a_run_and_the_other_is_told_who(objects: Objects) -> None:
    """However far the second one's clock is ahead, or behind."""
    first = Lease(objects, "here", lambda: 1000.0)
    first.take()
    first.names("tls://head:8786", "http://head:8787/status")

    for now_s in (900.0, 1000.0, 1000.0 + 2 * LEASE_S):
        clock = Clock(now_s, first._keep_on)
        with pytest.raises(SpotlightError, match=r"process \d+ on .*, with the scheduler tls://head:8786, is running"):
            Lease(objects, "there", clock, clock).take(clock)
        assert clock.waited_s < LEASE_S

    first.check()
    first.release()
    second = Lease(objects, "there", lambda: 1000.0)
    second.take()
    assert second.holder() is not None
    second.release()
    assert first.holder() is None


@pytest.mark.parametrize("name", ["notes.txt", "000001.json/x", "000001.json~"])
def test_what_is_no_record_of_who_runs_a_run_is_named(objects: Objects, name: str) -> None:
    objects.put(f"lease/{name}", b"{}")

    with pytest.raises(SpotlightError, match=f"lease/{name}: is no record of who runs the run, such as .*: delete it"):
        Lease(objects, "here").holder()


def test_why_its_owner_failed_is_known_after_a_renewal_and_until_the_next_one_has_it(objects: Objects) -> None:
    clock = Clock()
    first, next_ = (Lease(objects, files, clock, clock) for files in ("here", "there"))
    first.take()
    first.failed("no room")
    clock.now_s += LEASE_S + 1
    first.check()  # renews it
    first.release()

    last = next_.last()
    assert last
    assert last.last_words == "no room"
    next_.take()
    next_.release()
    last = first.last()
    assert last
    assert last.last_words == ""


@pytest.mark.parametrize("reason", ["the disk is full", "é" * RECORD_BYTES])
def test_why_its_owner_failed_is_known_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    objects = DirectoryObjects(tmp_path)
    lease = Lease(objects, "here", lambda: 1000.0)
    lease.take()
    lease.failed(reason)

    def no_room(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "open", no_room)  # by which new files are made
        lease.release()

    last = lease.last()
    assert last
    if len(reason) < RECORD_BYTES:
        assert last.last_words == reason
    else:
        assert "ended without a word" in last.last_words  # too long for the place, the record stays whole


def test_an_error_with_half_an_emoji_does_not_make_the_lease_unreadable(objects: Objects) -> None:
    """As one that names a file whose name is no UTF-8."""
    lease = Lease(objects, "here", lambda: 1000.0)
    lease.take()
    lease.failed("no such file: caf\udce9.png")
    lease.release()

    last = lease.last()

    assert last
    assert last.error == "no such file: caf?.png"


@pytest.mark.parametrize(("ahead_s", "waits_s"), [(-100.0, LEASE_S), (0.0, LEASE_S), (3000.0, LEASE_S), (1e4, 0.0)])
def test_a_lease_whose_machine_is_gone_ends_and_its_owner_finds_out(
    objects: Objects, ahead_s: float, waits_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """By silence, whatever the clocks say; what is over since hours needs none."""
    clock = Clock(1000.0 + ahead_s)
    lost, next_ = Lease(objects, "here", lambda: 1000.0), Lease(objects, "there", clock, clock)
    lost.take()

    next_.take(clock)
    lost.names("tls://head:8786", "http://head:8787/status")  # it comes back, and renews

    with pytest.raises(SpotlightError, match="is running this run"):
        lost.check()
    lost.release()
    next_.check()
    assert list(objects.sizes("lease")) == ["lease/000002.json"]
    assert waits_s <= clock.waited_s <= waits_s + 2 * LOOK_S
    assert caplog.text.count("has not given this run back: it is taken over in 60 s") == bool(waits_s)


def test_a_record_that_somebody_deleted_is_written_again_but_not_after_it_was_given_back(objects: Objects) -> None:
    lease = Lease(objects, "here", lambda: 1000.0)
    lease.take()
    objects.delete("lease/000001.json")

    lease._keep_on()
    lease.check()
    assert lease.holder()

    lease.release()
    lease._keep_on()  # a renewal that was on its way
    assert lease.holder() is None


def test_who_waits_for_an_owner_that_is_gone_can_be_stopped_and_sees_it_give_the_run_back(objects: Objects) -> None:
    first = Lease(objects, "here")
    first.take()
    clock = Clock()
    clock.set()
    with pytest.raises(Stopped):
        Lease(objects, "there", clock, clock).take(clock)

    clock = Clock(meanwhile=first.release)
    Lease(objects, "there", clock, clock).take(clock)

    assert clock.waited_s <= 2 * LOOK_S


def test_a_machine_that_slept_past_its_lease_finds_out_before_it_writes(objects: Objects) -> None:
    """Its system's clock was set back meanwhile."""
    clock = Clock()
    slept, alone = (Lease(objects, "here", lambda: 1000.0, clock) for _ in range(2))
    slept.take()
    clock.now_s += LEASE_S + 1
    slept.check()  # nobody took it meanwhile
    clock.now_s += LEASE_S + 1
    alone.take()
    alone.release()

    with pytest.raises(SpotlightError, match="is running this run"):
        slept.check()


def test_who_holds_the_same_files_need_not_wait_for_a_lease_to_end(objects: Objects) -> None:
    Lease(objects, "here").take()

    Lease(objects, "here").take()


def renew_and_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody waits for seconds."""
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    monkeypatch.setattr(lease, "LOOK_S", 0.1)


class Late:
    """Objects of a driver whose machine is slow: others come and go between its looking and its reading."""

    def __init__(self, objects: Objects, meanwhile: Callable[[], None], at: str) -> None:
        self._objects, self._meanwhile, self._at, self._is_done = objects, meanwhile, at, False

    def __getattr__(self, name: str) -> Any:
        if name == self._at and not self._is_done:
            self._is_done = True
            self._meanwhile()
        return getattr(self._objects, name)


@pytest.mark.parametrize("at", ["get", "create"])
@pytest.mark.parametrize("drivers", [1, 2, 3])
def test_who_is_slow_to_take_a_run_does_not_have_it_beside_another(
    objects: Objects, at: str, drivers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that it saw are deleted meanwhile, by those who came after them."""
    renew_and_look_often(monkeypatch)
    for _ in range(3):
        (before := Lease(objects, "before")).take()
        before.release()
    others = [Lease(objects, f"there-{each}") for each in range(drivers)]

    def meanwhile() -> None:
        others[0].take()
        for one, following in pairwise(others):
            one.release()
            following.take()

    slow = Lease(cast(Objects, Late(objects, meanwhile, at)), "here")

    with pytest.raises(SpotlightError, match="is running this run"):
        slow.take()

    others[-1].names("tls://head:8786", "")  # it renews
    others[-1].check()
    others[-1].release()
    slow.take()
    slow.release()


def test_a_journal_comes_in_parts_and_goes_on_elsewhere(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "PART_BYTES", 100)
    objects, here, there = BucketObjects(bucket), tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    writer, reader = Journals(objects, here, ()), Journals(objects, there, ())
    for row in range(30):
        with (here / "rows").open("a") as file:
            file.write(f"row {row} of them\n")
        writer.push("rows")
        if row % 7 == 0:
            reader.pull("rows", anew=row == 14)
            assert (there / "rows").read_bytes() == (here / "rows").read_bytes()
    assert len(objects.sizes("journals/rows")) > 3

    (here / "rows").write_text("row 0 of them\n")
    writer.replace("rows")
    reader.pull("rows", anew=True)

    assert (there / "rows").read_text() == "row 0 of them\n"


def test_a_long_journal_is_copied_in_time_in_proportion_to_its_length(tmp_path: Path) -> None:
    part = (b"x" * 1023 + b"\n") * 64
    parts = {f"journals/rows/{number * len(part):015d}": len(part) for number in range(1500)}
    objects: Any = SimpleNamespace(sizes=lambda folder: parts, get=lambda key: part)
    began_s = time.process_time()

    Journals(objects, tmp_path, ()).pull("rows", anew=True)

    assert (tmp_path / "rows").stat().st_size == sum(parts.values())
    assert time.process_time() - began_s < 3.0  # if all that came before is copied with each part, ten times as long


def write(journal: Path, of: Journals, rows: range) -> None:
    for row in rows:
        with journal.open("a") as file:
            file.write(f"row {row} of them\n")
        of.push(journal.name)


def test_a_journal_goes_on_after_another_machine_had_it(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "PART_BYTES", 100)
    first, second, third = (Journals(BucketObjects(bucket), tmp_path / name, ()) for name in "abc")
    for name in "abc":
        (tmp_path / name).mkdir()
    write(tmp_path / "a" / "rows", first, range(3))
    second.pull("rows", anew=True)
    write(tmp_path / "b" / "rows", second, range(3, 20))

    first.pull("rows", anew=True)
    write(tmp_path / "a" / "rows", first, range(20, 40))
    third.pull("rows", anew=True)

    assert (tmp_path / "c" / "rows").read_text().split("\n")[:-1] == [f"row {row} of them" for row in range(40)]


@pytest.mark.parametrize(("kept", "then"), [(1, 8), (1, 9), (14, 20)])  # of 30 rows, of which old parts begin with 8
def test_a_journal_whose_replacement_was_cut_short_goes_on(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, kept: int, then: int
) -> None:
    monkeypatch.setattr(journals, "PART_BYTES", 100)
    objects, rows = BucketObjects(bucket), tmp_path / "rows"
    killed, later = Journals(objects, tmp_path, ()), Journals(objects, tmp_path, ())
    write(rows, killed, range(30))
    rows.write_text("".join(f"row {row} of them\n" for row in range(kept)))
    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "delete", lambda *_: None)
        killed.replace("rows")

    later.pull("rows", anew=True)
    write(rows, later, range(kept, then))

    rows.unlink()
    Journals(objects, tmp_path, ()).pull("rows", anew=True)
    assert rows.read_text() == "".join(f"row {row} of them\n" for row in range(then))


def test_a_journal_that_is_written_anew_at_each_change_is_put_and_read_as_a_whole(tmp_path: Path, bucket: str) -> None:
    first, second = (Journals(BucketObjects(bucket), tmp_path / name, ("lives",)) for name in "ab")
    a, b = (tmp_path / name / "lives" for name in "ab")
    for folder in (a.parent, b.parent):
        folder.mkdir()
    a.write_text("one\n")
    first.push("lives")
    second.pull("lives", anew=True)
    b.write_text("two\n")
    second.push("lives")

    first.pull("lives", anew=True)
    assert a.read_text() == "two\n"
    a.write_text("one\n")
    first.push("lives")
    second.pull("lives", anew=False)
    assert b.read_text() == "one\n"


def test_weights_at_a_url_are_published_by_their_manifest_and_kept_by_version(tmp_path: Path, bucket: str) -> None:
    refs = []
    for version in range(3):
        weights.stage(bucket, version, {"a": np.full(3, version, np.float32)}, {}, {"loss": 0.5})
        assert weights.published(bucket, version) is None
        refs.append(weights.publish(bucket, version).weights)
    assert weights.latest(bucket) == weights.publish(bucket, 2)

    weights.retain(bucket, {0, 2})

    assert weights.published(bucket, 1) is None
    assert weights.load_arrays(bucket, refs[2])["a"].tolist() == [2, 2, 2]
    assert weights.bring(bucket, refs[0], Node(tmp_path / "node")).exists()
    assert [key for key in BucketObjects(bucket).sizes("weights") if "v00001" in key or "staged" in key] == []


def test_what_an_attempt_at_a_url_staged_after_another_was_published_goes(bucket: str) -> None:
    """By a worker that was taken for dead."""
    for version in range(2):
        weights.stage(bucket, version, {"a": np.full(3, version, np.float32)}, {}, {})
        weights.publish(bucket, version)
        weights.stage(bucket, version, {"a": np.full(3, version, np.float32)}, {}, {})
    weights.stage(bucket, 2, {"a": np.ones(3, np.float32)}, {}, {})

    for _ in range(2):
        weights.retain(bucket, {1})
        keys = BucketObjects(bucket).sizes("weights")
        weights.stage(bucket, 0, {"a": np.ones(3, np.float32)}, {}, {})  # after it was removed

    assert {key for key in keys if key.endswith(".json")} == {
        "weights/staged-v00002.json",
        "weights/v00001/manifest.json",
    }
    assert not [key for key in keys if "v00000" in key]
    assert weights.publish(bucket, 2).weights.version == 2


def test_a_version_at_a_url_is_no_longer_published_when_its_files_go(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(2):
        weights.stage(bucket, version, {"a": np.ones(3, np.float32)}, {}, {})
        weights.publish(bucket, version)
    delete = BucketObjects.delete

    def killed(self: BucketObjects, *keys: str) -> None:
        delete(self, keys[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BucketObjects, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            weights.retain(bucket, {1})

    assert weights.published(bucket, 0) is None


def test_a_store_that_does_not_answer_is_not_taken_for_a_damaged_version(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights.stage(bucket, 0, {"a": np.zeros(3, np.float32)}, {}, {})
    first = weights.publish(bucket, 0)
    weights.stage(bucket, 0, {"a": np.ones(3, np.float32)}, {}, {})
    get, asked = BucketObjects.get, list[str]()

    def silent_once(self: BucketObjects, key: str) -> bytes | None:
        asked.append(key)
        if len(asked) == 1:
            raise StoreError("no answer")
        return get(self, key)

    with monkeypatch.context() as patched:
        patched.setattr(BucketObjects, "get", silent_once)
        with pytest.raises(StoreError, match="no answer"):
            weights.publish(bucket, 0)

    assert weights.published(bucket, 0) == first


def test_gradients_are_at_the_url_until_their_version_is_published(bucket: str) -> None:
    part = GradientPart(
        weights=WeightsRef(version=0, sha256="0" * 64), iteration=0, update=0, number=1, samples=(), positions=(),
        slices=2,
    )  # fmt: skip
    assert updates.find(bucket, part) is None
    tensors = {"0": torch.ones(3), "1": torch.arange(2.0)}
    kept = updates.put(bucket, part, Gradient(name="", rows=5), tensors, [["0"], ["1", "2"]])
    digest = updates.put_weights(bucket, 0, {"a": torch.zeros(2)})

    parts = [kept, Gradient(name="without a row")]
    assert updates.find_sum(bucket, 0, parts, 1) is None
    summed = updates.put_sum(bucket, 0, parts, 1, {"1": 2 * next(updates.load_slices(bucket, 0, [kept], 1))["1"]})
    assert updates.find_sum(bucket, 0, parts, 1) == summed
    assert updates.find_sum(bucket, 0, parts, 0) is None
    assert summed.rows == 5
    assert updates.load(bucket, 0, summed)["1"].tolist() == [0, 2]
    BucketObjects(bucket).delete(f"updates/00000/{summed.name}.safetensors")
    assert updates.find_sum(bucket, 0, parts, 1) is None  # its rows alone are no use

    assert updates.find(bucket, part) == kept
    whole = updates.load(bucket, 0, kept)
    assert (whole["0"].tolist(), whole["1"].tolist()) == ([1, 1, 1], [0, 1])
    assert updates.load_weights(bucket, 0, digest)["a"].tolist() == [0, 0]

    bytes_kept = BucketObjects(bucket).get(f"updates/00000/{kept.name}.safetensors") or b""
    BucketObjects(bucket).put(f"updates/00000/{kept.name}.safetensors", bytes_kept[:-1] + b"x")
    assert next(updates.load_slices(bucket, 0, [kept], 0))["0"].tolist() == [1, 1, 1]
    damaged = f"memory://.*/{kept.name}.safetensors: expected sha256 {kept.slices[1].sha256}"
    with pytest.raises(SpotlightError, match=damaged):
        next(updates.load_slices(bucket, 0, [kept], 1))
    assert BucketObjects(bucket).sizes("updates") == {}
    with pytest.raises(SpotlightError, match="no such file"):
        updates.load(bucket, 0, kept)

    updates.put(bucket, part, Gradient(name="", rows=5), tensors, [["0"], ["1", "2"]])
    BucketObjects(bucket).put(f"updates/00000/{kept.name}.safetensors", bytes_kept[: kept.slices[1].start])
    assert updates.find(bucket, part) is None  # without its end
    with pytest.raises(SpotlightError, match="found no such file"):
        next(updates.load_slices(bucket, 0, [kept], 1))


def test_the_same_command_makes_a_run_at_a_url_and_then_finds_it(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    settings = config.load(settings_file(tmp_path))
    BucketObjects(f"{bucket}/a").create("started.json", b"{}")  # by a driver that was killed at once

    made, found = (create_run_at(f"{bucket}/a", settings) for _ in range(2))

    assert made.config() == found.config()
    with pytest.raises(SpotlightError, match="run.seed"):
        create_run_at(f"{bucket}/a", config.load(settings_file(tmp_path), ["run.seed=4"]))


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_runs_that_begin_in_the_same_second_have_names_of_their_own(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    monkeypatch.setenv("TZ", "UTC-5")  # five hours east of it
    time.tzset()
    parent = str(tmp_path) if place == "directory" else bucket
    settings = config.load(settings_file(tmp_path), [f"run.dir={parent}/"])

    try:
        made = [create_run(settings, now_s=0.0).url for _ in range(3)]
    finally:
        monkeypatch.undo()
        time.tzset()

    assert made == [f"{parent}/run-19700101-050000{suffix}" for suffix in ("", "-1", "-2")]


def test_damaged_weights_at_a_url_are_refused(bucket: str) -> None:
    weights.stage(bucket, 0, {"a": np.ones(3, np.float32)}, {}, {})
    ref = weights.publish(bucket, 0).weights
    objects = BucketObjects(bucket)
    objects.put(f"weights/v00000/{ref.sha256}.safetensors", b"no weights")

    with pytest.raises(SpotlightError, match="expected .* bytes, found 10 bytes; delete memory://.*/weights/v00000"):
        weights.load_arrays(bucket, ref)


def test_what_a_run_goes_on_from_is_at_its_url(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = Quarantined(request=make_request(), preemptions=5)
    with run.lock():
        run.append(HISTORY, {"iteration": 0})
        run.append(SPANS, {"at_s": 1.0})
        run.record_beliefs(1, Beliefs(fidelity=0.25))
        run.quarantine(aside)
        run.quarantine(aside)
        elsewhere = on_another_machine(tmp_path, monkeypatch, run)
        assert elsewhere.holder().startswith("process ")
        assert elsewhere.rows(HISTORY) == [{"iteration": 0}]

    elsewhere.pull()

    assert elsewhere.path != run.path
    assert elsewhere.holder() == ""
    assert elsewhere.rows(SPANS) == [{"at_s": 1.0}]
    assert elsewhere.beliefs(1) == Beliefs(fidelity=0.25)
    assert elsewhere.all_quarantined() == [aside]
    found = Path(elsewhere.config().data.train_prompts)
    assert found.read_bytes() == (run.path / "prompts" / "train.txt").read_bytes()
    assert found.is_relative_to(elsewhere.path)
    assert stat.S_IMODE(elsewhere.path.stat().st_mode) == 0o700


def test_who_looks_at_a_run_at_a_url_takes_nothing_from_its_driver_on_this_machine(run: RunDir) -> None:
    """Where the only copy is of what was journalled in the last seconds."""
    rows = [{"at_s": 1.0}, {"at_s": 2.0}]
    with run.lock():
        run.append(SPANS, rows[0])
        assert RunDir.open(run.url).rows(SPANS) == rows[:1]
        run.append(SPANS, rows[1])

    assert RunDir.open(run.url).rows(SPANS) == rows


@pytest.mark.parametrize("looks_meanwhile", [True, False])
def test_who_watches_from_elsewhere_sees_a_history_that_was_cut_off_as_it_goes_on(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_meanwhile: bool
) -> None:
    """As that of a run whose last weights were deleted: its resumed driver does these iterations again."""
    run.append(HISTORY, *({"iteration": each} for each in range(12)))
    watcher = on_another_machine(tmp_path, monkeypatch, run)
    assert watcher.count(HISTORY) == 12

    run.rewrite(HISTORY, run.rows(HISTORY)[:9])
    if looks_meanwhile:
        watcher.pull()
        assert watcher.rows(HISTORY) == run.rows(HISTORY)
    run.append(HISTORY, *({"iteration": each, "again": True} for each in range(9, 14)))
    watcher.pull()

    assert watcher.rows(HISTORY) == run.rows(HISTORY)
    assert watcher.count(HISTORY) == 14


def test_what_older_versions_set_aside_is_still_known(run: RunDir) -> None:
    aside = Quarantined(request=make_request(), preemptions=5)
    run.append(QUARANTINED, row_of(aside))

    assert run.all_quarantined() == [aside]


def test_what_the_first_iteration_needs_is_made_again_without_its_weights(run: RunDir) -> None:
    run.objects.put(run.selection_key(0), b"{")

    with pytest.raises(SpotlightError, match=r"00000\.json: .*delete it, and `spotlight resume` makes it again"):
        run.selection(0)


def test_beliefs_are_removed_unless_they_are_to_be_kept(run: RunDir) -> None:
    for iteration in (1, 2):
        run.record_beliefs(iteration, Beliefs(fidelity=0.25))
        run.retain_beliefs({2}, iteration)

    assert [run.objects.size(run.beliefs_key(iteration)) is None for iteration in (1, 2)] == [True, False]


def test_what_a_resumed_run_needs_is_put_at_once(run: RunDir) -> None:
    for journal in (HISTORY, VALIDATION, SPANS):
        run.append(journal, {"iteration": 0})

    assert [bool(run.objects.sizes(f"journals/{each}")) for each in (HISTORY, VALIDATION, SPANS)] == [True, True, False]


def test_what_only_a_report_needs_is_put_every_few_seconds(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(rundir, "wall_clock", lambda: now_s)

    def pushed() -> int:
        run.append(SPANS, {"at_s": now_s})
        run.push()
        return b"".join(run.objects.get(key) or b"" for key in run.objects.sizes(f"journals/{SPANS}")).count(b"\n")

    counts = [pushed(), pushed()]
    now_s += PUSH_S + 1
    counts += [pushed(), pushed()]

    assert counts == [1, 1, 3, 3]


def test_a_file_of_a_run_at_a_url_comes_alone_or_with_its_directory(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.npz", "b.npz"):
        (run.path / "images").mkdir(exist_ok=True)
        (run.path / "images" / name).write_text(name)
    run.push_files("images/a.npz")
    elsewhere = on_another_machine(tmp_path, monkeypatch, run)

    assert elsewhere.fetch("images/a.npz").read_text() == "a.npz"
    assert not elsewhere.fetch("images/b.npz").exists()
    run.push_files("images")
    assert sorted(path.name for path in elsewhere.fetch("images").iterdir()) == ["a.npz", "b.npz"]


def test_only_a_run_that_may_have_latents_is_looked_into_for_them(run: RunDir, tmp_path: Path) -> None:
    local = create_run(config.load(settings_file(tmp_path)), now_s=1.0)
    apart = create_run(config.load(settings_file(tmp_path), [f"latents.url={tmp_path}/apart"]), now_s=2.0)

    assert [each.has_latents() for each in (run, local, apart)] == [True, False, True]
    (local.path / "latents").mkdir()
    assert local.has_latents()
    apart.write_json(SIMULATED, {"learning": "modelled"})
    assert not apart.has_latents()


def test_lines_that_others_took_back_are_not_counted(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append(HISTORY, {"iteration": 0}, {"iteration": 1})
    elsewhere = on_another_machine(tmp_path, monkeypatch, run)
    assert elsewhere.count(HISTORY) == 2

    run.rewrite(HISTORY, [{"iteration": 0}])
    elsewhere.pull(anew=True)

    assert elsewhere.count(HISTORY) == 1


def test_prices_and_directories_of_prompts_are_at_the_url(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    (tmp_path / "prices.csv").write_text("time_s,usd_per_h\n0,1.5\n")
    (tmp_path / "saved").mkdir()
    for name in ("data-00000-of-00001.arrow", "state.json"):
        (tmp_path / "saved" / name).write_text(name)
    given = [f"pools.spot.prices={tmp_path}/prices.csv", f"data.validation_prompts={tmp_path}/saved"]
    run = create_run(config.load(settings_file(tmp_path), [f"run.dir={bucket}", *given]), now_s=0.0)
    (tmp_path / "prices.csv").unlink()
    shutil.rmtree(tmp_path / "saved")

    found = on_another_machine(tmp_path, monkeypatch, run).config()

    assert Path(found.pools.spot.prices).read_text() == "time_s,usd_per_h\n0,1.5\n"
    assert {path.name: path.read_text() for path in Path(found.data.validation_prompts).iterdir()} == {
        name: name for name in ("data-00000-of-00001.arrow", "state.json")
    }


def test_a_run_at_a_url_has_one_driver(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renew_and_look_often(monkeypatch)
    with run.lock():
        elsewhere = on_another_machine(tmp_path, monkeypatch, run)
        with (
            pytest.raises(SpotlightError, match=r"memory://.*: process \d+ on .* is running this run"),
            elsewhere.lock(),
        ):
            pass
    with elsewhere.lock():
        elsewhere.append(HISTORY, {"iteration": 0})

    with run.lock():  # what others did meanwhile is here again
        assert run.rows(HISTORY) == [{"iteration": 0}]


def test_what_was_decided_is_brought_to_who_drives_a_run_alone(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.lock():
        run.append(DECISIONS, {"at_s": 1.0})

    elsewhere = on_another_machine(tmp_path, monkeypatch, run)
    elsewhere.pull()

    assert not (elsewhere.path / DECISIONS).exists()
    with elsewhere.lock():
        elsewhere.append(DECISIONS, {"at_s": 2.0})
    with run.lock():
        assert run.rows(DECISIONS) == [{"at_s": 1.0}, {"at_s": 2.0}]


def test_what_a_run_at_a_url_did_before_it_was_stopped_is_there(run: RunDir) -> None:
    with suppress(Stopped), run.lock():
        run.append(SPANS, {"at_s": 1.0})
        raise Stopped

    assert RunDir.open(run.url).rows(SPANS) == [{"at_s": 1.0}]


def test_a_driver_that_lost_its_run_puts_nothing_there(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(Stopped), run.lock() as held:
        monkeypatch.setattr(held, "_lost", "another has it")
        run.append(SPANS, {"at_s": 1.0})
        raise Stopped

    assert not RunDir.open(run.url).rows(SPANS)


def test_texts_are_encoded_by_one_machine_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = PipelineModel._run_text_encoders

    def counted(model: PipelineModel, texts: Sequence[str]) -> Any:
        encoded.append(len(texts))
        return encode(model, texts)

    monkeypatch.setattr(PipelineModel, "_run_text_encoders", counted)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    checkpoint = [f'model.path="{tiny_qwen_image(tmp_path / "model")}"', 'model.name="qwen-image"']
    sizes = ["model.height_px=32", "model.width_px=32"]
    settings = [*checkpoint, *sizes, f'run.dir="memory://{uuid4().hex}/runs"']
    url = create_run(config.load(settings_file(tmp_path), settings), 0.0).url

    models = [Engine(url, node=Node(tmp_path / name)).model for name in ("one", "another")]

    assert len(encoded) == 1
    texts = [prompt.text for prompt in read_prompts(RunDir.open(url).config().data.validation_prompts)]
    assert torch.equal(*(model.encode(texts).embeds_BTD for model in models))


def test_an_object_whose_name_leads_out_of_the_run_is_refused(run: RunDir) -> None:
    with pytest.raises(SpotlightError, match="leads out of the run"):
        run.fetch("../../outside")


@pytest.mark.parametrize("url", ["s3://me:hush@bucket/runs", "s3://bucket/runs?key=hush"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    for setting in ("run.dir", "latents.url"):
        with pytest.raises(SpotlightError, match="leave them out; keys come from the environment") as refused:
            config.load(settings_file(tmp_path), [f"{setting}={url}"])
        assert "hush" not in str(refused.value)
    with pytest.raises(SpotlightError, match="leave them out") as refused:
        RunDir.open(url)
    assert "hush" not in str(refused.value)
    assert config.load(settings_file(tmp_path), ["run.dir=s3://bucket/me@work"]).run.dir == "s3://bucket/me@work"


def test_without_obstore_a_url_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{uuid4().hex}/runs"
    monkeypatch.setattr("spotlight.store.objects.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(SpotlightError, match="install obstore"):
        RunDir.open(url)
    with pytest.raises(SpotlightError, match="install obstore"):
        create_run(config.load(settings_file(tmp_path), [f"run.dir={url}"]), now_s=0.0)


@pytest.mark.parametrize(
    ("allows_http", "says"),
    [
        ("true", "error sending request; check"),
        ("True", "error sending request; check"),
        ("1", "error sending request; check"),
        ("", "builder error; a server without TLS needs AWS_ALLOW_HTTP=true; check"),
    ],
)
def test_a_store_out_of_reach_is_one_sentence_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allows_http: str, says: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", allows_http)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setattr("spotlight.store.objects.FIRST_RETRY_S", 0.1)
    url = f"s3://{uuid4().hex}/runs/a"
    settings = config.load(settings_file(tmp_path), [f"run.dir={url}"])
    began_s = time.monotonic()

    for begin in (
        lambda: RunDir.open(url),
        lambda: create_run(settings, now_s=0.0),
        lambda: create_run_at(url, settings),
    ):
        with pytest.raises(StoreError, match=rf"s3://.*/a: cannot be read: .*{says}.*AWS_ACCESS_KEY_ID") as refused:
            begin()

        assert "\n" not in str(refused.value)
        assert "hush" not in str(refused.value)
    assert time.monotonic() - began_s < RETRY_S / 2


OLD = ("runs/commits/a", "runs/commits/b")
FACTS = "<LastModified>2026-11-24T00:00:00.000Z</LastModified><Size>1</Size>"


class BrokenLine(BaseHTTPRequestHandler):
    """An object store that hangs up on whoever writes, until it has done so often enough."""

    objects: ClassVar[dict[str, bytes]] = {}
    hang_ups: ClassVar[list[str]] = []
    """For each, whether what came is kept all the same."""

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        is_there = self.path in self.objects
        how = self.hang_ups.pop(0) if self.hang_ups else ""
        if how != "lost" and not is_there:
            self.objects[self.path] = content
        if how:
            self._reset()
        else:
            self._answer(412 if is_there else 200, b"")

    def do_POST(self) -> None:  # of several objects, which are to be deleted
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.hang_ups and self.hang_ups.pop(0):
            self._reset()
        else:
            names = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in OLD)
            self._answer(200, f"<DeleteResult>{names}</DeleteResult>".encode())

    def do_GET(self) -> None:
        names = "".join(f"<Contents><Key>{name}</Key>{FACTS}</Contents>" for name in OLD)
        found = f"<ListBucketResult><IsTruncated>false</IsTruncated>{names}</ListBucketResult>"
        self._answer(200, found.encode() if "?" in self.path else self.objects[self.path])

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("hang_ups", [["lost"], ["lost", "lost"], ["kept"]])
def test_what_may_have_been_done_is_asked_for_again_when_the_store_hangs_up(
    monkeypatch: pytest.MonkeyPatch, hang_ups: list[str]
) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setattr(BrokenLine, "objects", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), BrokenLine) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            url = f"s3://{uuid4().hex}/runs"

            monkeypatch.setattr(BrokenLine, "hang_ups", list(hang_ups))
            assert BucketObjects(url).create("lease", b"mine")
            monkeypatch.setattr(BrokenLine, "hang_ups", list(hang_ups))
            sync(ZarrStore(url).create("commit", b"step 3"))

            monkeypatch.setattr(BrokenLine, "hang_ups", list(hang_ups))
            sync(ZarrStore(url).delete_all("commits"))

            assert not BrokenLine.hang_ups
            assert not BucketObjects(url).create("lease", b"another's")
            assert sorted(BrokenLine.objects.values()) == [b"mine", b"step 3"]
        finally:
            server.shutdown()


def test_a_store_is_given_up_in_time_though_one_try_takes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.store.objects.RETRY_S", 0.05)
    tries = list[float]()

    def try_for_long() -> None:
        tries.append(time.monotonic())
        time.sleep(0.1)
        raise GenericError("HTTP error: error sending request")

    with pytest.raises(GenericError):
        retried(try_for_long)

    assert len(tries) == 1


def test_a_store_that_hangs_up_is_asked_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)

    def answers_late() -> str:
        if len(slept) < 8:
            raise GenericError("HTTP error: error sending request")
        return "here"

    assert retried(answers_late) == "here"
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]

    with pytest.raises(GenericError, match="refused"):
        retried(refuses)
    assert len(slept) == 8


def refuses() -> NoReturn:
    raise GenericError("refused: 403")


def test_an_error_of_a_store_comes_back_from_a_worker_as_it_was() -> None:
    install(StoreError)  # as it is where Dask is imported later
    error = loads(dumps(StoreError("out of reach")))

    assert isinstance(error, StoreError)
    assert str(error) == "out of reach"


@pytest.mark.parametrize("url", ["s3://", "gs:///"])
def test_a_url_without_a_bucket_is_no_local_directory(tmp_path: Path, url: str) -> None:
    for setting in ("run.dir", "latents.url"):
        with pytest.raises(SpotlightError, match=rf"{setting}: '{url}' names no bucket"):
            config.load(settings_file(tmp_path), [f"{setting}={url}"])
    with pytest.raises(SpotlightError, match="names no bucket"):
        RunDir.open(url)


@pytest.mark.parametrize("url", ["s3://bucket/runs/..", "gs://bucket/../runs", "s3://bucket/./runs"])
def test_a_url_that_leads_upwards_is_refused(tmp_path: Path, url: str) -> None:
    """On this machine the copies of other runs are there, and what is new begins with an empty directory."""
    settings = settings_file(tmp_path)

    for begin in (lambda: RunDir.open(url), lambda: create_run_at(url, config.load(settings))):
        with pytest.raises(SpotlightError, match="an object store has no '.' and no '..'"):
            begin()
    with pytest.raises(SpotlightError, match="run.dir: .* an object store has no '.' and no '..'"):
        config.load(settings, [f"run.dir={url}"])


@pytest.mark.parametrize("url", ["ftp://host/runs", "https://host/runs"])
def test_an_address_that_is_no_object_stores_is_refused(tmp_path: Path, url: str) -> None:
    settings = config.load(settings_file(tmp_path))

    for begin in (lambda: RunDir.open(url), lambda: create_run_at(url, settings)):
        with pytest.raises(SpotlightError, match=f"{url}: expected a directory, or a URL of s3"):
            begin()
    with pytest.raises(SpotlightError, match="run.dir = .*expected a directory, or a URL of s3"):
        config.load(settings_file(tmp_path), [f"run.dir={url}"])


def test_a_bucket_that_is_not_there_is_not_blamed_on_the_disk() -> None:
    with (
        pytest.raises(StoreError, match=r"s3://b/x: cannot be written: there is no such bucket"),
        explaining("s3://b/x", "written"),
    ):
        raise NotFoundError("NoSuchBucket")
    with pytest.raises(FileNotFoundError), explaining("s3://b/x", "read"):
        raise NotFoundError("NoSuchKey")
