"""A version of the weights is whole or absent, and what is loaded is what was published."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spotlight.records import SpotlightError, WeightsRef
from spotlight.store import weights
from spotlight.store.node import Node, NotOnNode
from spotlight.store.tensor_files import Content
from spotlight.store.versions import DirectoryVersions
from spotlight.store.weights import Part

IMPORT_ROOT = str(Path(__file__).parents[1])


def tensors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(4, 3, generator=generator) for name in ("b.up", "a.down")}


def publish(run_dir: Path, version: int) -> WeightsRef:
    moments = {"a.down.exp_avg": torch.full((4, 3), float(version))}
    weights.stage(run_dir, version, tensors(version), moments, {"loss": 1 / (1 + version)})
    return weights.publish(run_dir, version).weights


def versions(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "weights").iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def become_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["trainable", "optimizer", "ema"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_numbers_that_are_not_finite_are_never_staged(tmp_path: Path, value: float, part: str, library: str) -> None:
    parts: dict[str, Any] = {
        name: {"a.down": np.ones((4, 3), np.float32)} for name in ("trainable", "optimizer", "ema")
    }
    parts[part]["a.down"][1, 1] = value
    if library == "torch":
        parts = {name: {"a.down": torch.from_numpy(tensors["a.down"])} for name, tensors in parts.items()}

    with pytest.raises(SpotlightError, match=r"version 3: a\.down has numbers that are not finite"):
        weights.stage(tmp_path, 3, parts["trainable"], parts["optimizer"], {}, parts["ema"])

    assert not (tmp_path / "weights").exists()


def test_a_published_version_loads_as_it_was_staged(tmp_path: Path) -> None:
    ema = {"a.down": torch.zeros(4, 3, dtype=torch.bfloat16)}
    weights.stage(tmp_path, 3, tensors(3), {}, {"loss": 0.5}, ema, old=tensors(2))

    done = weights.publish(tmp_path, 3)

    assert done == weights.published(tmp_path, 3) == weights.latest(tmp_path)
    assert (done.weights.version, done.metrics) == (3, {"loss": 0.5})
    parts: dict[Part, dict[str, Tensor]] = {"trainable": tensors(3), "optimizer": {}, "old": tensors(2), "ema": ema}
    for part, expected in parts.items():
        torch.testing.assert_close(weights.load(tmp_path, done.weights, part), expected, rtol=0, atol=0)


def test_the_hash_depends_on_the_tensors_alone(tmp_path: Path) -> None:
    reversed_names = dict(reversed(tensors(0).items()))
    not_contiguous = {name: tensor.T.contiguous().T for name, tensor in tensors(0).items()}
    changed = tensors(0) | {"a.down": tensors(0)["a.down"] + 1}

    hashes = []
    for number, trainable in enumerate((tensors(0), reversed_names, not_contiguous, changed)):
        weights.stage(tmp_path / str(number), 0, trainable, {}, {"loss": float(number)})
        hashes.append(weights.publish(tmp_path / str(number), 0).weights.sha256)

    assert hashes[0] == hashes[1] == hashes[2]
    assert hashes[3] != hashes[0]


def test_what_is_only_staged_is_not_there_yet(tmp_path: Path) -> None:
    first = publish(tmp_path, 0)
    weights.stage(tmp_path, 1, tensors(1), {}, {})

    assert weights.published(tmp_path, 1) is None
    latest = weights.latest(tmp_path)
    assert latest is not None
    assert latest.weights == first
    with pytest.raises(SpotlightError, match=r"version 1 is not published; .* has \[0\]"):
        weights.load(tmp_path, WeightsRef(version=1, sha256=first.sha256))


def test_a_run_without_versions_has_no_latest(tmp_path: Path) -> None:
    assert weights.latest(tmp_path) is None
    assert weights.published(tmp_path, 0) is None


def test_publishing_twice_changes_nothing(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    weights.stage(tmp_path, 1, tensors(2), {}, {})

    again = weights.publish(tmp_path, 1)

    assert again.weights == first
    assert versions(tmp_path) == ["v00001"]


def test_an_abandoned_staging_is_overwritten(tmp_path: Path) -> None:
    weights.stage(tmp_path, 1, tensors(2), {}, {}, ema=tensors(2))
    alter(tmp_path / "weights" / ".staged-v00001" / "weights.safetensors")

    weights.stage(tmp_path, 1, tensors(1), {}, {})
    ref = weights.publish(tmp_path, 1).weights

    torch.testing.assert_close(weights.load(tmp_path, ref), tensors(1), rtol=0, atol=0)
    assert not (tmp_path / "weights" / "v00001" / "ema.safetensors").exists()
    with pytest.raises(SpotlightError, match=r"version 1 has no ema\.safetensors .*train\.ema_decay.*; it has"):
        weights.load(tmp_path, ref, "ema")


def test_attempts_at_one_version_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A worker that was taken for dead may be at the same update as its successor."""

    def stage(_: int) -> None:
        weights.stage(tmp_path, 1, tensors(1), {"step": torch.ones(3)}, {})

    with ThreadPoolExecutor(4) as attempts:
        list(attempts.map(stage, range(40)))
    ref = weights.publish(tmp_path, 1).weights

    torch.testing.assert_close(weights.load(tmp_path, ref), tensors(1), rtol=0, atol=0)
    stage(0)  # the last one comes after it was published
    weights.retain(tmp_path, {1})
    assert versions(tmp_path) == ["v00001"]


def test_a_version_can_be_published_while_another_attempt_removes_what_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take a while."""
    weights.stage(tmp_path, 1, tensors(1), {}, {})
    remove = shutil.rmtree

    def publish_first(path: Path, **how: Any) -> None:
        if path.name.startswith(".removed-staged-"):
            weights.publish(tmp_path, 1)
        remove(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", publish_first)
        weights.stage(tmp_path, 1, tensors(1), {}, {})

    assert versions(tmp_path) == ["v00001"]


def test_an_attempt_that_fails_leaves_nothing_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DirectoryVersions, version: int, manifest: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryVersions, "stage", full)
        with pytest.raises(OSError, match="No space left"):
            weights.stage(tmp_path, 1, tensors(1), {}, {})

    assert versions(tmp_path) == []


@pytest.mark.parametrize("part", ["trainable", "optimizer"])
def test_an_attempt_that_goes_on_after_another_was_published_harms_nothing(tmp_path: Path, part: weights.Part) -> None:
    late = DirectoryVersions(tmp_path / "weights")
    late.write(1, "weights.safetensors", Content(tensors(1)))
    ref = publish(tmp_path, 1)
    late.write(1, "optimizer.safetensors", Content({}))

    assert weights.published(tmp_path, 1)
    weights.load(tmp_path, ref, part)
    weights.retain(tmp_path, {1})
    assert versions(tmp_path) == ["v00001"]


def test_a_version_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power may lose what was only written, or renamed."""
    root, flushed, fsync = tmp_path / "weights", list[str](), os.fsync

    def synced(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").resolve()
        if place.is_relative_to(tmp_path):  # another test's lease may still be renewed
            flushed.extend(versions(tmp_path) if place == root else [place.name.partition("-v0")[0]])
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", synced)
        publish(tmp_path, 1)

    assert sorted(flushed[:2]) == ["optimizer.safetensors", "weights.safetensors"]
    assert flushed[2:] == ["manifest.json", ".writing", ".staged-v00001", "v00001"]


def test_publishing_what_was_never_staged_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"version 2 was never staged; `spotlight resume`"):
        weights.publish(tmp_path, 2)


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_staging_that_is_not_whole_is_not_published(
    tmp_path: Path, name: str, harm: Callable[[Path], object]
) -> None:
    weights.stage(tmp_path, 1, tensors(1), {"step": torch.ones(3)}, {})
    harm(tmp_path / "weights" / ".staged-v00001" / name)
    if name == "manifest.json" and harm is truncate:
        harm(tmp_path / "weights" / ".staged-v00001" / name)  # the last byte is only a line break

    with pytest.raises(SpotlightError, match=rf"{name}: (expected .*, found|not JSON) .*delete .*\.staged-v00001"):
        weights.publish(tmp_path, 1)

    assert weights.published(tmp_path, 1) is None


@pytest.mark.parametrize("part", ["trainable", "optimizer"])
def test_bytes_that_a_disk_changed_before_publishing_are_refused_by_who_reads_them(
    tmp_path: Path, part: weights.Part
) -> None:
    name = {"trainable": "weights", "optimizer": "optimizer"}[part]
    weights.stage(tmp_path, 1, tensors(1), {"step": torch.ones(3)}, {})
    alter(tmp_path / "weights" / ".staged-v00001" / f"{name}.safetensors")

    ref = weights.publish(tmp_path, 1).weights

    with pytest.raises(SpotlightError, match=rf"{name}\.safetensors: expected sha256 .*; delete .* and `spotlight res"):
        weights.load(tmp_path, ref, part)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (truncate, r"(\d+) bytes, found (?!\1)\d+ bytes"),
        (alter, r"sha256 (\w{64}), found sha256 (?!\1)\w{64}"),
        (Path.unlink, r"\d+ bytes, found no such file"),
        (become_a_directory, r"\d+ bytes, found no such file"),
    ],
)
def test_damaged_weights_are_refused_with_the_way_out(
    tmp_path: Path, harm: Callable[[Path], object], what: str
) -> None:
    ref = publish(tmp_path, 1)
    directory = tmp_path / "weights" / "v00001"

    harm(directory / "weights.safetensors")

    with pytest.raises(SpotlightError) as refused:
        weights.load(tmp_path, ref)
    file = re.escape(str(directory / "weights.safetensors"))
    way_out = re.escape(f"delete {directory} and `spotlight resume` goes on from the version before")
    assert re.fullmatch(rf"{file}: expected {what}; {way_out}", str(refused.value))
    assert weights.load(tmp_path, ref, "optimizer")


def test_a_damaged_version_is_replaced_by_a_sound_staging(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    alter(tmp_path / "weights" / "v00001" / "weights.safetensors")

    with pytest.raises(SpotlightError, match="expected sha256"):
        weights.publish(tmp_path, 1)

    assert publish(tmp_path, 1) == ref
    torch.testing.assert_close(weights.load(tmp_path, ref), tensors(1), rtol=0, atol=0)


def test_weights_of_another_run_are_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    other = WeightsRef(version=1, sha256="0" * 64)

    with pytest.raises(SpotlightError, match=f"expected weights with sha256 {other.sha256}, found {ref.sha256}"):
        weights.load(tmp_path, other)


def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    (tmp_path / "weights" / "v00001" / "manifest.json").write_text(json.dumps({"version": 1}))

    with pytest.raises(SpotlightError, match=r"manifest\.json: no field 'files'; it has \['version'\]; no .*; delete"):
        weights.latest(tmp_path)


def test_a_manifest_without_weights_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    manifest = {"version": 1, "files": {"optimizer.safetensors": {"sha256": "0" * 64, "bytes": 1}}, "metrics": {}}
    (tmp_path / "weights" / "v00001" / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(SpotlightError, match=r"files has no weights\.safetensors; it has \['optimizer\.safetensors'\]"):
        weights.latest(tmp_path)


def test_only_versions_to_keep_stay(tmp_path: Path) -> None:
    refs = [publish(tmp_path, version) for version in range(4)]
    weights.stage(tmp_path, 4, tensors(4), {}, {})
    (tmp_path / "weights" / ".removed-v00009").mkdir()

    for _ in range(2):
        weights.retain(tmp_path, {0, 3})

    assert versions(tmp_path) == [".staged-v00004", "v00000", "v00003"]
    assert weights.load(tmp_path, refs[3]).keys() == tensors(3).keys()


def test_a_version_comes_to_a_node_once_and_is_mapped_there(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    node = Node(tmp_path / "node")

    first = weights.load(tmp_path, ref, node=node)
    alter(tmp_path / "weights" / "v00001" / "weights.safetensors")
    first["b.up"].zero_()  # private to this mapping
    second = weights.load(tmp_path, ref, node=node)

    torch.testing.assert_close(second, tensors(1), rtol=0, atol=0)
    assert node.holds(ref.sha256)


def test_a_peer_is_asked_before_the_store(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    there, here = Node(tmp_path / "there"), Node(tmp_path / "here")
    weights.bring(tmp_path, ref, there)
    alter(tmp_path / "weights" / "v00001" / "weights.safetensors")

    loaded = weights.load(tmp_path, ref, node=here, peers=[there.read])

    torch.testing.assert_close(loaded, tensors(1), rtol=0, atol=0)


@pytest.mark.parametrize("harm", [truncate, alter, Path.unlink])
def test_a_damaged_store_is_named_with_a_node_as_without(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    ref = publish(tmp_path, 1)
    harm(tmp_path / "weights" / "v00001" / "weights.safetensors")

    refusals = []
    for node in (None, Node(tmp_path / "node")):
        with pytest.raises(SpotlightError) as refused:
            weights.load(tmp_path, ref, node=node)
        refusals.append(str(refused.value))

    assert refusals[0] == refusals[1]


def test_a_file_that_another_process_removes_from_the_node_is_read_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, node, bring = publish(tmp_path, 1), Node(tmp_path / "node"), Node.bring

    def bring_and_lose(self: Node, *what: Any) -> Path:
        path = bring(self, *what)
        path.unlink()
        return path

    monkeypatch.setattr(Node, "bring", bring_and_lose)

    torch.testing.assert_close(weights.load(tmp_path, ref, node=node), tensors(1), rtol=0, atol=0)


def test_a_joiner_needs_only_peers(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    there, here = Node(tmp_path / "there"), Node(tmp_path / "here")
    weights.bring(tmp_path, ref, there)
    shutil.rmtree(tmp_path / "weights")

    loaded = weights.load(tmp_path, ref, node=here, peers=[there.read])

    torch.testing.assert_close(loaded, tensors(1), rtol=0, atol=0)


def test_a_part_that_a_version_has_not_is_named_without_the_store(tmp_path: Path) -> None:
    ref = publish(tmp_path, 1)
    shutil.rmtree(tmp_path / "weights")

    with pytest.raises(SpotlightError, match=r"version 1 has no ema\.safetensors; it has \['optimizer"):
        weights.load(tmp_path, ref, "ema", node=Node(tmp_path / "node"))


def test_a_node_does_not_serve_another_runs_version(tmp_path: Path) -> None:
    ref = replace(publish(tmp_path, 1), parts=())
    node = Node(tmp_path / "node")
    weights.bring(tmp_path, ref, node)
    other = tmp_path / "other"
    weights.stage(other, 1, tensors(2), {}, {})
    weights.publish(other, 1)

    with pytest.raises(SpotlightError, match=f"expected weights with sha256 {ref.sha256}"):
        weights.load(other, ref, node=node)


def test_a_node_without_room_leaves_reading_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = publish(tmp_path, 1)
    node = Node(tmp_path / "node")
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=0))

    with pytest.raises(NotOnNode, match="no room"):
        weights.bring(tmp_path, ref, node)
    loaded = weights.load(tmp_path, ref, node=node)

    torch.testing.assert_close(loaded, tensors(1), rtol=0, atol=0)
    assert not node.holds(ref.sha256)


PUBLISH_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from spotlight.store import weights

run_dir = Path(sys.argv[1])
latest = weights.latest(run_dir)
version = latest.weights.version + 1 if latest else 0
print(version, flush=True)
while True:
    trainable = {str(name): torch.full((512, 64), float(version)) for name in range(4)}
    weights.stage(run_dir, version, trainable, trainable, {"version": version})
    weights.publish(run_dir, version)
    weights.retain(run_dir, {version})
    print(version, flush=True)
    version += 1
"""


def test_kill_9_at_any_moment_leaves_whole_versions(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUBLISH_FOR_EVER, str(tmp_path), IMPORT_ROOT]
    chance = np.random.default_rng(0)

    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            seen = int(process.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.02))
            process.kill()

        latest = weights.latest(tmp_path)
        assert latest is not None
        version = latest.weights.version
        assert version >= seen
        for loaded in (weights.load(tmp_path, latest.weights), weights.load(tmp_path, latest.weights, "optimizer")):
            assert {float(tensor.mean()) for tensor in loaded.values()} == {float(version)}


FILL_THE_DISK = """
import errno, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from spotlight.store import weights

run_dir = Path(sys.argv[1])
weights.stage(run_dir, 0, {"a": torch.ones(100)}, {}, {})
first = weights.publish(run_dir, 0)
try:
    weights.stage(run_dir, 1, {"a": torch.ones(1_000_000)}, {}, {})
except OSError as error:
    assert (type(error), error.errno) == (OSError, errno.ENOSPC), repr(error)
    assert weights.latest(run_dir) == first
    assert weights.load(run_dir, first.weights)["a"].sum() == 100
    print("full")
"""


def test_a_full_disk_is_an_oserror_and_leaves_the_version_before(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"  # version 1 needs 4 MB
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system in a namespace of its own")

    command = [*private, f'{mount} && exec "$0" "$@"', sys.executable, "-c", FILL_THE_DISK, str(tmp_path), IMPORT_ROOT]
    ran = subprocess.run(command, capture_output=True, text=True)

    assert (ran.stdout, ran.returncode) == ("full\n", 0), ran.stderr


def test_arrays_are_staged_without_torch_and_hash_as_tensors_do(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np; from pathlib import Path; from spotlight.store import weights\n"
        f"run_dir = Path({str(tmp_path / 'arrays')!r})\n"
        "weights.stage(run_dir, 2, {'b': np.arange(6, dtype=np.float32), 'a': np.array(0.5)}, {}, {'loss': 0.5})\n"
        "ref = weights.publish(run_dir, 2).weights\n"
        "assert float(weights.load_arrays(run_dir, ref)['a']) == 0.5\n"
        "print(ref.sha256, 'torch' in sys.modules)"
    )
    tensors = {"a": torch.tensor(0.5, dtype=torch.float64), "b": torch.arange(6, dtype=torch.float32)}

    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=IMPORT_ROOT
    ).stdout
    weights.stage(tmp_path, 2, tensors, {}, {"loss": 0.5})

    assert printed.split() == [weights.publish(tmp_path, 2).weights.sha256, "False"]
