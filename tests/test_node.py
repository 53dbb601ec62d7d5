"""A node's shared memory: files come in once, checked; mappings are shared until written to; nothing half is used."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from spotlight.records import SpotlightError
from spotlight.store import node as node_module
from spotlight.store.node import (
    BLOCK_BYTES,
    Node,
    NotOnNode,
    Source,
    fingerprint,
    from_file,
    map_tensors,
    shared_root,
    sweep,
)

IMPORT_ROOT = str(Path(__file__).parents[1])
CONTENT = os.urandom(2 * BLOCK_BYTES + 5)
"""Three blocks, the last of them short."""
NAME = sha256(CONTENT).hexdigest()


def sends(content: bytes) -> Source:
    return lambda _, offset, length: content[offset : offset + length]


def fails(_: str, offset: int, length: int) -> bytes:
    raise ConnectionResetError("gone")


def breaks_off(sha256: str, offset: int, length: int) -> bytes:
    return fails(sha256, offset, length) if offset else CONTENT[:length]


def visible(node: Node) -> list[str]:
    return sorted(path.name for path in node.root.iterdir() if not path.name.startswith((".lock-", ".alive")))


def python(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {IMPORT_ROOT!r})\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def mappings(file: Path) -> Iterator[range]:
    """The addresses at which this process has mapped this very file, by its inode."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if int(inode) == file.stat().st_ino:
            first, end = addresses.split("-")
            yield range(int(first, 16), int(end, 16))


# Bringing in


def test_a_file_comes_from_the_first_source_that_has_it(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    wrong = bytes(len(CONTENT))

    path = node.bring(NAME, len(CONTENT), [fails, breaks_off, sends(wrong), sends(CONTENT[:-1]), sends(CONTENT), fails])

    assert path.read_bytes() == CONTENT
    assert visible(node) == [path.name]


def test_a_file_found_on_the_node_is_not_read_again(tmp_path: Path) -> None:
    first, second = Node(tmp_path), Node(tmp_path)
    path = first.bring(NAME, len(CONTENT), [sends(CONTENT)])

    again = second.bring(NAME, len(CONTENT), [fails])

    assert again == path
    assert second.holds(NAME)


def test_without_a_good_source_nothing_stays_and_each_reason_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)

    with pytest.raises(NotOnNode) as refused:
        node.bring(NAME, len(CONTENT), [breaks_off, sends(bytes(len(CONTENT))), sends(CONTENT[:-1])])

    short = f"source 2: expected 5 bytes at {2 * BLOCK_BYTES}, came 4"
    for reason in ("source 0: gone", f"source 1: expected sha256 {NAME}, came ", short):
        assert reason in str(refused.value)
    with pytest.raises(NotOnNode, match="no source sent it .none was given"):
        node.bring(NAME, len(CONTENT), [])
    assert visible(node) == []
    assert not node.holds(NAME)


def test_a_source_that_hangs_and_fails_is_not_waited_for(tmp_path: Path) -> None:
    goes_on, ended = threading.Event(), list[int]()

    def hangs(_: str, offset: int, length: int) -> bytes:
        if offset:
            raise ConnectionResetError("gone")
        goes_on.wait(5.0)
        ended.append(offset)
        return CONTENT[:length]

    path = Node(tmp_path).bring(NAME, len(CONTENT), [hangs, sends(CONTENT)])

    assert ended == []
    assert path.read_bytes() == CONTENT
    goes_on.set()


def test_no_more_is_read_ahead_than_the_streams_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "BLOCK_BYTES", 1)
    content, asked, ahead = os.urandom(50), list[int](), list[int]()

    def source(_: str, offset: int, length: int) -> bytes:
        asked.append(offset)
        if offset == 0:
            time.sleep(0.1)
            ahead.append(len(asked))
        return content[offset : offset + length]

    Node(tmp_path).bring(sha256(content).hexdigest(), len(content), [source])

    assert ahead[0] <= node_module.STREAMS + 1
    assert sorted(asked) == list(range(50))


def test_one_node_is_a_source_for_another(tmp_path: Path) -> None:
    here, there = Node(tmp_path / "here"), Node(tmp_path / "there")
    there.bring(NAME, len(CONTENT), [sends(CONTENT)])

    path = here.bring(NAME, len(CONTENT), [there.read])

    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", NAME.upper(), NAME + "\n", ""],
    ids=["above", "absolute", "capitals", "more", "empty"],  # the hash is another in each process
)
def test_only_the_hash_of_a_content_names_a_file(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path)

    with pytest.raises(SpotlightError, match="named by 64 hexadecimal digits"):
        node.read(name, 0, 1)


BRING = """
import os
from pathlib import Path
from spotlight.store.node import Node, from_file

root, stored, journal, name = sys.argv[1:]
def source(*asked):
    with open(journal, "a") as file:
        file.write(f"{asked[1]}\\n")
    return from_file(Path(stored))(*asked)
print("ready", flush=True)
sys.stdin.readline()
Node(Path(root)).bring(name, os.path.getsize(stored), [source])
print("torch" in sys.modules, flush=True)
"""


def test_one_process_reads_while_the_others_wait_and_none_needs_torch(tmp_path: Path) -> None:
    stored, journal = tmp_path / "stored", tmp_path / "journal"
    stored.write_bytes(CONTENT)

    processes = [python(BRING, tmp_path / "node", stored, journal, NAME) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    told = [process.communicate("go\n")[0] for process in processes]

    assert told == ["False\n"] * 4
    assert sorted(int(line) for line in journal.read_text().split()) == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]


STALL = f"""
import time
from pathlib import Path
from spotlight.store.node import Node

def stalls(name, offset, length):
    if offset:
        print("half", flush=True)
        time.sleep(600)
    return bytes(length)
Node(Path(sys.argv[1])).bring(sys.argv[2], 3 * {BLOCK_BYTES}, [stalls])
"""


@pytest.mark.parametrize("next_content", [CONTENT, b"another file"])
def test_what_a_killed_process_left_half_done_is_never_used_and_removed_by_the_next(
    tmp_path: Path, next_content: bytes
) -> None:
    with python(STALL, tmp_path, NAME) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    node = Node(tmp_path)
    left = visible(node)

    path = node.bring(sha256(next_content).hexdigest(), len(next_content), [sends(next_content)])

    (partial,) = left
    assert partial.startswith(f".{NAME}.safetensors.")
    assert path.read_bytes() == next_content
    assert visible(node) == [path.name]


def test_a_receipt_under_way_is_not_removed_by_another(tmp_path: Path) -> None:
    other = "f" * 64
    with python(STALL, tmp_path, other) as process:
        assert process.stdout is not None
        process.stdout.readline()

        Node(tmp_path).bring(NAME, len(CONTENT), [sends(CONTENT)])

        assert list(tmp_path.glob(f".{other}.safetensors.*.partial"))
        process.kill()


STALL_MAKING = """
import time
from pathlib import Path
from spotlight.store.node import Node

def stalls(to):
    to.write_text("half")
    print("half", flush=True)
    time.sleep(600)
Node(Path(sys.argv[1])).make(sys.argv[2], stalls, size_bytes=0)
"""


@pytest.mark.parametrize("code", [STALL, STALL_MAKING], ids=["brings", "makes"])
def test_one_that_is_frozen_holds_the_others_up_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    for limit in ("BRING_S", "MAKE_S"):
        monkeypatch.setattr(node_module, limit, 1.0)
    node = Node(tmp_path)

    def wanted() -> Path:
        if code == STALL:
            return node.bring(NAME, len(CONTENT), [sends(CONTENT)])
        return node.make(NAME, lambda to: to.write_bytes(CONTENT), size_bytes=0)

    waited_s = []
    with python(code, tmp_path, NAME) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            for _ in range(2):
                began_s = time.monotonic()
                with pytest.raises(
                    NotOnNode, match=r"wrote nothing for 1 s: it may be frozen; end it \(`fuser .*\.lock-"
                ):
                    wanted()
                waited_s.append(time.monotonic() - began_s)
        finally:
            process.kill()

    assert waited_s[0] >= 1.0 > waited_s[1]
    assert wanted().read_bytes() == CONTENT
    assert visible(node) == [wanted().name]


SLOW = f"""
import time
from pathlib import Path
from spotlight.store import node

def slow(name, offset, length):
    print("on its way", flush=True)
    time.sleep(1.0)
    return node.from_file(Path(sys.argv[3]))(name, offset, length)
node.STREAMS = 1
node.Node(Path(sys.argv[1])).bring(sys.argv[2], 2 * {BLOCK_BYTES} + 5, [slow])
"""


def test_one_that_is_slow_is_waited_for_as_long_as_it_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "BRING_S", 2.0)
    (stored := tmp_path / "stored").write_bytes(CONTENT)
    with python(SLOW, tmp_path / "node", NAME, stored) as process:
        assert process.stdout is not None
        process.stdout.readline()

        path = Node(tmp_path / "node").bring(NAME, len(CONTENT), [fails])

    assert path.read_bytes() == CONTENT


def test_a_directory_is_waited_for_as_long_as_a_file_in_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "MAKE_S", 0.5)
    has_begun = threading.Event()

    def grows(to: Path) -> None:
        to.mkdir()
        with (to / "file").open("wb", buffering=0) as file:
            for _ in range(35):
                file.write(b"x")
                has_begun.set()
                time.sleep(0.02)

    with ThreadPoolExecutor() as pool:
        made = pool.submit(Node(tmp_path).make, "key", grows, size_bytes=0)
        has_begun.wait()

        found = Node(tmp_path).make("key", grows, size_bytes=0)

    assert found == made.result()


# Room


def test_the_least_recently_used_file_goes_and_who_maps_it_keeps_it(tmp_path: Path) -> None:
    node = Node(tmp_path, keep=2)
    contents = [save({"a": torch.full((1000,), float(number))}) for number in range(3)]
    names = [sha256(content).hexdigest() for content in contents]
    paths = [node.bring(names[n], len(contents[n]), [sends(contents[n])]) for n in (0, 1)]
    mapped = map_tensors(paths[1])["a"]
    time.sleep(0.01)  # file systems count time in ticks of a few milliseconds
    node.bring(names[0], len(contents[0]), [])

    node.bring(names[2], len(contents[2]), [sends(contents[2])])

    assert [node.holds(name) for name in names] == [True, False, True]
    assert torch.equal(mapped, torch.full((1000,), 1.0))


def test_without_room_nothing_is_read(tmp_path: Path) -> None:
    node = Node(tmp_path)
    free_bytes = shutil.disk_usage(tmp_path).free
    asked: list[int] = []

    def source(_: str, offset: int, length: int) -> bytes:
        asked.append(offset)
        return bytes(length)

    with pytest.raises(NotOnNode, match=rf"no room for {2 * free_bytes} bytes"):
        node.bring(NAME, 2 * free_bytes, [source])

    assert asked == []


FILL = """
from hashlib import sha256
from pathlib import Path
import torch
from safetensors.torch import save_file
from spotlight.store.node import Node, NotOnNode

node = Node(Path(sys.argv[1]))
def sends(name, offset, length):
    ballast.write_bytes(bytes(900_000))  # the room is gone after it was looked for
    return bytes(length)
ballast = node.root / "ballast"
for bring in (
    lambda: node.bring("f" * 64, 500_000, [sends]),
    lambda: node.make("key", lambda to: save_file({"a": torch.ones(1_000_000)}, to), size_bytes=0),
):
    try:
        bring()
    except NotOnNode as error:
        assert "no room" in str(error), error
        print([path.name for path in node.root.iterdir() if path.name[0] != "."])
        ballast.unlink(missing_ok=True)
"""


def test_a_node_that_fills_up_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m,mode=700 none {tmp_path}"
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system in a namespace of its own")
    code = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r})\n{FILL}"

    command = [*private, f'{mount} && exec "$0" "$@"', sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)

    assert (ran.stdout, ran.returncode) == ("['ballast']\n[]\n", 0), ran.stderr


# Mapping

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def test_tensors_are_views_of_the_file_whatever_their_dtype(tmp_path: Path) -> None:
    given: dict[str, Tensor] = {str(dtype): torch.arange(33).to(dtype) for dtype in DTYPES}
    others = {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(given | others, tmp_path / "file", metadata={"format": "pt"})

    mapped = map_tensors(tmp_path / "file")

    torch.testing.assert_close(mapped, given | others, rtol=0, atol=0)
    (pages,) = mappings(tmp_path / "file")
    assert all(value.data_ptr() in pages for value in mapped.values() if value.numel())


def test_nothing_is_kept_of_a_file_that_was_mapped(tmp_path: Path) -> None:
    save_file({str(number): torch.zeros(300 + number) for number in range(50)}, tmp_path / "file")
    map_tensors(tmp_path / "file")
    before = sys.getallocatedblocks()

    for _ in range(20):
        map_tensors(tmp_path / "file")

    gc.collect()
    assert sys.getallocatedblocks() - before < 500  # one for each tensor would be 1,000


def test_writing_to_a_mapped_tensor_changes_neither_the_file_nor_other_mappings(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5000)}, tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    mine, other = (map_tensors(tmp_path / "file")["a"] for _ in range(2))

    mine.add_(1)

    assert mine.sum() == 5000
    assert other.sum() == 0
    assert (tmp_path / "file").read_bytes() == before


MAP = """
import json
from pathlib import Path
from spotlight.store.node import map_tensors

file = Path(sys.argv[1])

def tell():
    smaps, rows = {}, iter(Path("/proc/self/smaps").read_text().splitlines())
    for row in rows:
        if row.endswith(str(file)):
            break
    for row in rows:
        key, value, *unit = row.split()
        if unit != ["kB"]:
            break
        smaps[key.rstrip(":")] = int(value) << 10
    print(json.dumps([smaps, float(tensor.sum())]), flush=True)

tensor = map_tensors(file)["a"]
tensor.sum()
for command in sys.stdin:
    if command == "write\\n":
        tensor[: tensor.numel() // 2] = 0
    tell()
"""


def test_two_processes_map_the_same_pages_until_one_writes(tmp_path: Path) -> None:
    size_bytes = 4 << 20
    save_file({"a": torch.ones(size_bytes // 4)}, tmp_path / "file")

    def asks(process: subprocess.Popen[str], command: str = "tell") -> tuple[dict[str, int], float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{command}\n")
        process.stdin.flush()
        memory, total = json.loads(process.stdout.readline())
        return memory, total

    with python(MAP, tmp_path / "file") as first, python(MAP, tmp_path / "file") as other:
        asks(first), asks(other)  # both have touched every page now
        shared, total = asks(first)
        written, _ = asks(other, "write")
        _, unharmed = asks(first)
        first.communicate(), other.communicate()

    assert shared["Rss"] >= size_bytes
    assert shared["Pss"] == pytest.approx(shared["Rss"] / 2, rel=0.01)  # each page counts half, as two map it
    assert shared["Private_Dirty"] == 0
    assert written["Private_Dirty"] == pytest.approx(size_bytes / 2, abs=3 * 4096)  # whole pages at both ends
    assert unharmed == total == size_bytes / 4


# What a node makes for itself


def test_what_is_made_is_made_once_and_whole_or_absent(tmp_path: Path) -> None:
    made: list[Path] = []

    def write(to: Path) -> None:
        made.append(to)
        to.mkdir()
        (to / "file").write_text("x" * len(made))
        if len(made) == 1:
            raise ConnectionError("half-way")

    with pytest.raises(ConnectionError, match="half-way"):
        Node(tmp_path).make("key", write, size_bytes=2)
    after_failure = visible(Node(tmp_path))
    paths = [Node(tmp_path).make("key", write, size_bytes=2) for _ in range(2)]

    assert after_failure == []
    assert paths[0] == paths[1]
    assert (paths[0] / "file").read_text() == "xx"
    assert len(made) == 2


def test_a_fingerprint_follows_the_files_and_the_circumstances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, two = tmp_path / "one", tmp_path / "two"
    first.write_text("1")
    two.write_text("2")
    before = fingerprint([first, two], "float32")

    same = fingerprint([two, first], "float32")
    monkeypatch.chdir(tmp_path)
    from_here = fingerprint([Path("one"), Path("two")], "float32")
    otherwise = {fingerprint([first], "float32"), fingerprint([first, two], "bfloat16")}
    os.utime(first, ns=(0, 0))
    changed = fingerprint([first, two], "float32")
    first.write_text("11")
    os.utime(first, ns=(0, 0))
    longer = fingerprint([first, two], "float32")

    assert same == from_here == before
    assert len({before, changed, longer, *otherwise}) == 5


# The root


def test_memory_is_freed_only_after_the_last_process_that_uses_it(tmp_path: Path) -> None:
    root = tmp_path / "node"
    code = "from pathlib import Path\nfrom spotlight.store.node import Node\nnode = Node(Path(sys.argv[1]))\n"
    with python(code + "print('held', flush=True)\nsys.stdin.read()", root) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (root / "file").touch()
        sweep(root)
        kept = (root / "file").exists()
        process.kill()

    sweep(root)

    assert kept
    assert list(tmp_path.iterdir()) == []


def test_a_swept_root_is_made_anew(tmp_path: Path) -> None:
    sweep(tmp_path / "absent")
    node = Node(tmp_path / "node")
    del node
    sweep(tmp_path / "node")

    path = Node(tmp_path / "node").bring(NAME, len(CONTENT), [sends(CONTENT)])

    assert path.read_bytes() == CONTENT


def test_a_root_that_was_made_anew_can_be_removed_when_its_user_ends(tmp_path: Path) -> None:
    """A worker says at its start what is to be closed at its end."""
    node, at_the_end = Node(tmp_path / "node"), ExitStack()
    at_the_end.callback(sweep, node.root)
    at_the_end.callback(node.close)
    shutil.rmtree(node.root)
    node.keep()

    at_the_end.close()

    assert not node.root.exists()


def test_a_root_that_could_not_be_made_anew_at_once_is_made_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path / "node")
    shutil.rmtree(node.root)

    def full(root: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(node_module, "hold", full)
        with pytest.raises(OSError, match="No space left"):
            node.keep()
    node.keep()

    assert node.root.exists()
    assert not sweep(node.root)
    node.close()
    assert sweep(node.root)


def test_a_node_whose_root_was_removed_goes_on_under_its_name(tmp_path: Path) -> None:
    """A logout may remove what lies in memory."""
    root = tmp_path / "node"
    node = Node(root)
    name = node.name

    shutil.rmtree(root)
    assert node.name == name
    shutil.rmtree(root)
    assert node.bring(NAME, len(CONTENT), [sends(CONTENT)]).exists()
    assert Node(root).name == name
    shutil.rmtree(root)
    node.meeting("a/b").touch()
    assert node.meeting("a/b").parent == root

    node.close()
    shutil.rmtree(root)
    node.keep()
    assert not root.exists()


def test_a_root_that_another_made_anew_is_used_by_both(tmp_path: Path) -> None:
    first = Node(tmp_path / "node")
    shutil.rmtree(first.root)
    second = Node(tmp_path / "node")

    first.keep()

    second.close()
    assert not sweep(first.root)
    first.close()
    assert sweep(first.root)


def test_a_root_that_is_removed_while_it_is_being_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, flock = tmp_path / "node", fcntl.flock

    def removed_first(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(root)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    node = Node(root)

    assert root.is_dir()
    assert not sweep(root)
    node.close()


def test_nobody_else_may_look_into_a_root(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        node = Node(tmp_path / "node")
    finally:
        os.umask(before)

    assert stat.S_IMODE(node.root.stat().st_mode) == 0o700


def test_another_users_root_is_refused(tmp_path: Path) -> None:
    root = Path("/usr")
    if os.getuid() == 0:
        root = tmp_path / "foreign"
        root.mkdir()
        os.chown(root, 12345, -1)

    with pytest.raises(SpotlightError, match=r"belongs to user \d+, not to you"):
        Node(root)


def test_a_node_is_in_memory_if_that_is_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.store.node.SHARED_MEMORY", tmp_path)

    small, huge = shared_root("a-test"), shared_root("a-test", size_bytes=1 << 60)

    assert small == tmp_path / huge.name
    assert huge.parent == Path(tempfile.gettempdir())


def test_a_node_is_not_in_memory_that_this_user_may_not_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        monkeypatch.setattr("spotlight.store.node.SHARED_MEMORY", Path(name))
        user = os.getuid()
        if user == 0:  # who may write anywhere
            os.setresuid(65534, 65534, 0)
        try:
            root = shared_root("a-test")
        finally:
            os.setresuid(user, user, user)

    assert root.parent == Path(tempfile.gettempdir())


def test_the_next_run_frees_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.store.node.SHARED_MEMORY", tmp_path)
    used, left = Node(shared_root("used")), Node(shared_root("left"))
    (anybodys := shared_root("open")).mkdir()
    anybodys.chmod(0o777)
    roots = used.root, left.root, anybodys
    del left  # as the end of its process would

    shared_root("next")

    assert [root.exists() for root in roots] == [True, False, True]


def test_what_was_killed_while_it_removed_or_made_a_root_leaves_one_that_can_be_removed(tmp_path: Path) -> None:
    root = tmp_path / "without-a-mark"
    root.mkdir(mode=0o700)
    (root / "file").touch()

    assert sweep(root)

    assert list(tmp_path.iterdir()) == []


def test_the_store_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "stored").write_bytes(CONTENT)

    path = Node(tmp_path / "node").bring(
        NAME, len(CONTENT), [from_file(tmp_path / "absent"), from_file(tmp_path / "stored")]
    )

    assert path.read_bytes() == CONTENT


def test_a_pipe_in_the_place_of_the_mark_hangs_nobody(tmp_path: Path) -> None:
    root = tmp_path / "trap"
    root.mkdir(mode=0o700)
    os.mkfifo(root / ".alive")

    sweep(root)

    assert root.is_dir()


def test_a_link_in_the_place_of_the_mark_is_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "trap", tmp_path / "elsewhere"
    root.mkdir(mode=0o700)
    (root / ".alive").symlink_to(elsewhere)

    sweep(root)
    with pytest.raises(OSError, match="symbolic links|loop"):
        Node(root).bring("0" * 64, 0, [])

    assert not elsewhere.exists()


def test_a_link_in_the_place_of_the_root_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / ".alive").touch()
    (tmp_path / "link").symlink_to(mine)

    assert not sweep(tmp_path / "link")

    assert (mine / ".alive").exists()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_root_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(mode)

    with pytest.raises(SpotlightError, match=r"open: other users may write to it.*chmod 700"):
        Node(root).bring("0" * 64, 0, [])


def test_a_node_is_who_shares_the_memory(tmp_path: Path) -> None:
    first, other, elsewhere = Node(tmp_path / "here"), Node(tmp_path / "here"), Node(tmp_path / "there")

    assert first.name == other.name != elsewhere.name
    assert visible(first) == [".node"]


def test_memory_that_is_used_no_more_can_be_removed(tmp_path: Path) -> None:
    node = Node(tmp_path / "here")
    sweep(node.root)
    assert node.root.exists()

    node.close()
    sweep(node.root)

    assert not node.root.exists()
