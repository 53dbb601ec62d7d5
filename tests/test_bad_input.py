"""What people and machines get wrong, through the real shell command: one message, the way out, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from runs import PROMPTS, WAIT_S, outcome, settings_file, spotlight, start, wait_for
from spotlight import config, driver
from spotlight.inputs import check_inputs
from spotlight.records import SpotlightError
from spotlight.run import Run
from spotlight.shell import main
from spotlight.store import creating
from spotlight.store.creating import MAKING, create_run, create_run_at
from spotlight.store.rows import HISTORY, VALIDATION
from spotlight.store.rundir import RunDir

MARK = "SPOTLIGHT_TEST"
"""A variable that every process of a command inherits: an orphan has lost its parent, but not this."""
DISK = "size=64m"
"""Twice of what a run of `runs.SETTINGS` writes."""
TRAIN_PROMPTS = len((PROMPTS / "digits-train.txt").read_text().splitlines())


@pytest.fixture(autouse=True)
def _nothing_is_left_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """However a command ends, its workers end with it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    wait_for(lambda: not processes(tmp_path))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing happened to."""
    run = Run(settings_file(tmp_path_factory.mktemp("undisturbed"))).start()
    run.wait()
    return run.directory.path


@pytest.fixture
def stopped(undisturbed: Path, tmp_path: Path) -> RunDir:
    """The directory of that run as if it had been stopped before its last iteration."""
    run = RunDir(shutil.copytree(undisturbed, tmp_path / undisturbed.name))
    for journal in (HISTORY, VALIDATION):
        run.rewrite(journal, run.rows(journal)[:-1])
    shutil.rmtree(run.path / "weights" / "v00002")
    return run


def test_a_run_whose_path_is_no_text_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it made, found again, or looked at."""
    here = Path(os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfcn"))
    here.mkdir()
    settings = config.load(settings_file(tmp_path), ["run.dir=runs"])
    monkeypatch.chdir(here)

    with pytest.raises(
        SpotlightError, match=r"gr\\udcfcn/runs/run-.*bytes that are not UTF-8, .* rename that directory"
    ):
        create_run(settings, now_s=0.0)
    for begin in (lambda: create_run_at(here / "a", settings), lambda: RunDir.open(here)):
        with pytest.raises(SpotlightError, match="rename that directory"):
            begin()
    assert list(here.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be filled without harm."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"only who may mount a file system can fill one: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.promts=3", ["--set 'rollout.promts': [rollout] has no field 'promts'", "did you mean 'prompts'"]),
        ("rollouts.prompts=3", ["run.toml", "no section 'rollouts'", "did you mean 'rollout'"]),
        ("rollout.prompts=many", ["--set 'rollout.prompts': rollout.prompts = 'many'", "valid integer"]),
        ("train.ema_decay=1", ["--set 'train.ema_decay': train.ema_decay = 1", "less than 1"]),
        ("train.old_decay=1", ["--set 'train.old_decay': train.old_decay = 1", "'copy', 'linear'", "[0, 1)"]),
        ("run.validate_policy=average", ["run.validate_policy", "train.ema_decay = 0.0 keeps no such weights"]),
        ("exploration.prompts=1", ["exploration.prompts = 1", "fewer than rollout.prompts", "raise it"]),
        ("rollout.prompts", ["'rollout.prompts'", "expected section.key=value"]),
        (f"rollout.prompts={TRAIN_PROMPTS + 1}", [f"{TRAIN_PROMPTS + 1}", f"{TRAIN_PROMPTS} prompts", "lower it"]),
        ("data.train_prompts=nowhere.txt", ["nowhere.txt", "No such file", "[data]"]),
        ("model.name=qwen-image", ["run.toml", "needs model.path"]),
        ("model.path=nowhere", ["model.path", "nowhere", "no such file", "pretrain_tiny.py"]),
        ("reward.name=orc", ["reward.name = 'orc' is not known", "'ocr'"]),
        ("run.dir=/dev/null", ["/dev/null/run-", "Not a directory", "choose another run.dir"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, says: list[str]
) -> None:
    settings = settings_file(tmp_path)

    status = main(["run", str(settings), "--set", override])

    said = refused(status, capfd.readouterr().err)

    assert [part for part in says if part not in said] == [], said
    assert list(tmp_path.glob("run-*")) == []


@pytest.mark.parametrize(
    ("setting", "overrides"),
    [
        ("strategy.widths", ["strategy.widths=[1, 3]"]),
        ("train.width", ["train.width=3", 'strategy.train_pools=["spot"]']),
    ],
)
def test_a_gang_that_cannot_share_an_embedded_model_is_refused_before_anything_starts(
    tmp_path: Path, setting: str, overrides: list[str]
) -> None:
    settings = settings_file(tmp_path)

    with pytest.raises(SpotlightError, match=f"{setting}: a gang of 3 .* the 4 attention heads of tiny-text: choose"):
        Run(settings, ["pools.spot.workers=3", *overrides])


def test_a_python_that_drops_docstrings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker could import transformers."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    assert "-OO, or PYTHONOPTIMIZE=2" in refusal("run", settings_file(tmp_path))


@pytest.mark.parametrize("verb", ["run", "graph"])
def test_a_file_of_dasks_configuration_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    (tmp_path / "dask.yaml").write_text("distributed: [1,\n")
    monkeypatch.setenv("DASK_CONFIG", str(tmp_path / "dask.yaml"))

    said = refusal(verb, settings_file(tmp_path))

    assert f"{tmp_path / 'dask.yaml'}' is malformed" in said
    assert "mend that file, or move it away" in said
    assert list(tmp_path.glob("run-*")) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'A sign that reads "47".\nA blank sign.\n', [":2:", "'A blank sign.'", "double quotes"]),
        (b'A sign that reads "47".\nA caf\xe9 called "48".\n', [":2:", "0xe9", "save the file as UTF-8"]),
        (b"\n", ["empty", "one prompt a line"]),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_by_file_and_line(
    tmp_path: Path, content: bytes, says: list[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)

    said = refusal("run", settings_file(tmp_path), "--set", f"data.validation_prompts={prompts}")

    assert [part for part in [str(prompts), *says] if part not in said] == [], said


def test_a_trace_that_cannot_be_used_is_named_by_file_and_line_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text("0,add,a\n100,vanish,a\n")

    changed = ("--set", f"pools.spot.trace={trace}", "--set", "pools.spot.replace_after_s=10")
    said = refusal("run", settings_file(tmp_path), *changed)

    assert [part for part in [f"{trace}:2", "vanish"] if part not in said] == [], said
    assert list(tmp_path.glob("run-*")) == []


def test_a_settings_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = tmp_path / "nowhere.toml"

    said = refusal("run", settings)

    assert f"{settings}: no such settings file; examples/" in said


@pytest.mark.parametrize("overrides", ["run.seed=3", {"run.seed": 3}, [("run.seed", 3)], None])
def test_overrides_that_are_no_list_of_texts_are_refused(tmp_path: Path, overrides: Any) -> None:
    with pytest.raises(SpotlightError, match=r'overrides = .*: give a list of texts, such as \["run\.seed=3"\]'):
        Run(settings_file(tmp_path), overrides)


@pytest.mark.parametrize("command", [["resume"], ["report"], ["export", "--to", "new"]])
def test_a_directory_that_is_no_run_is_named(tmp_path: Path, command: list[str]) -> None:
    verb, *options = command

    said = refusal(verb, tmp_path, *options)

    assert f"{tmp_path}: not a run directory: it has no config.toml; `spotlight run CONFIG` makes one" in said


def test_a_path_whose_links_lead_in_a_circle_is_named(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)

    with pytest.raises(SpotlightError, match=f"^{circle}: no such directory"):
        RunDir.open(circle)
    with pytest.raises(SpotlightError, match=f"^{circle}: cannot make the run directory: Not a directory"):
        create_run_at(circle, config.load(settings_file(tmp_path)))


def test_no_run_can_be_in_a_file(tmp_path: Path) -> None:
    settings = settings_file(tmp_path)

    with pytest.raises(SpotlightError, match=f"^{settings}/run: cannot make the run directory: Not a directory"):
        create_run_at(settings / "run", config.load(settings))


def test_in_a_directory_of_runs_the_latest_is_named(tmp_path: Path) -> None:
    for at, name in enumerate(("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
        os.utime(tmp_path / name / "config.toml", (at, at))

    assert f"it holds runs, of which {tmp_path / 'a'} is the latest" in refusal("status", tmp_path)


def test_an_empty_directory_that_is_a_file_system_of_its_own_holds_a_run(small_disk: Path) -> None:
    """Also where a kill left one half made."""
    (small_disk / f"{MAKING}123").mkdir()

    run = create_run_at(small_disk, config.load(settings_file(small_disk.parent)))

    assert run.path == small_disk
    assert [path.name for path in small_disk.glob(".*")] == [f"{MAKING}123"]


@pytest.mark.parametrize("shut", [".", "weights"])
def test_a_run_of_a_user_who_lets_nobody_look_into_it_is_named(tmp_path: Path, shut: str) -> None:
    """Root may look into all: it acts as somebody else."""
    with tempfile.TemporaryDirectory() as parent:  # `tmp_path` is shut itself
        os.chmod(parent, 0o755)
        settings = config.load(settings_file(tmp_path))
        run = create_run_at(f"{parent}/run", settings)
        (run.path / "weights").mkdir()
        os.chmod(run.path, 0o755)
        os.chmod(run.path / shut, 0o000)
        try:
            with _as_somebody_else():
                for look in (RunDir.open, Run.attach, lambda path: create_run_at(path, settings)):
                    with pytest.raises(SpotlightError, match=rf"^{run.path}: you may not look into it .*run\.shared"):
                        look(run.path)
        finally:
            os.chmod(run.path / shut, 0o755)


@pytest.mark.parametrize(
    "changes",
    [
        ["data.train_prompts={}"],
        ["model.path={}"],
        ["pools.spot.prices={}"],
        ["reward.name=clip-score", "reward.path={}"],
        ["train.lora_rank=4", "train.lora_path={}"],
    ],
)
def test_what_lies_where_this_user_may_not_look_is_named(tmp_path: Path, changes: list[str]) -> None:
    file = settings_file(tmp_path)
    with tempfile.TemporaryDirectory() as theirs, tempfile.TemporaryDirectory() as ours:
        os.chmod(theirs, 0o000)
        os.chmod(ours, 0o755)
        data = config.load(file).data
        copies = [  # this checkout may be shut, too
            f"data.{name}={shutil.copy(getattr(data, name), f'{ours}/{name}.txt')}"
            for name in ("train_prompts", "validation_prompts")
        ]
        settings = config.load(file, [*copies, *(change.format(f"{theirs}/it") for change in changes)])
        with pytest.raises(SpotlightError):  # root does not find it, and has imported what is needed by then
            check_inputs(settings)
        with _as_somebody_else(), pytest.raises(SpotlightError, match=f"{theirs}/it.*: Permission denied"):
            check_inputs(settings)


def test_settings_where_this_user_may_not_look_are_named() -> None:
    with tempfile.TemporaryDirectory() as theirs:
        os.chmod(theirs, 0o000)
        with _as_somebody_else(), pytest.raises(SpotlightError, match=f"{theirs}/it.*: Permission denied"):
            config.load(f"{theirs}/it")


@contextlib.contextmanager
def _as_somebody_else() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_graph_is_not_drawn_in_a_form_that_nobody_knows(tmp_path: Path) -> None:
    picture = tmp_path / "iteration.gif"

    said = refusal("graph", settings_file(tmp_path), "--to", picture)

    assert f"{picture}: a graph is drawn as .svg or .png, not as '.gif'" in said
    assert not picture.exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    picture = Path("/dev/null/iteration.svg")

    said = refusal("graph", settings_file(tmp_path), "--to", picture)

    assert f"{picture}: cannot be written" in said
    assert "choose another place" in said


def test_help_and_an_unknown_verb_name_the_verbs() -> None:
    verbs = {"run", "resume", "report", "graph", "export"}

    asked, mistyped = spotlight("--help"), spotlight("rnu")

    assert asked.returncode == 0
    assert verbs <= set(asked.stdout.split())
    assert mistyped.returncode == 2
    assert "invalid choice: 'rnu'" in mistyped.stderr
    assert [verb for verb in verbs if verb not in mistyped.stderr] == []


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal("run", settings_file(tmp_path), "--set", f"cluster.dashboard_port={port}")

    assert f"cluster.dashboard_port = {port} cannot be used (Address already in use)" in said
    assert "--set cluster.dashboard_port=0" in said
    assert list(tmp_path.glob("run-*")) == []


# Another machine's, by RFC 5737; IPv6, and Dask's are IPv4; a name that no host can have.
@pytest.mark.parametrize("host", ["192.0.2.1", "::1", "rechner..zürich"])
def test_a_host_on_which_no_dashboard_can_listen_is_named_and_not_its_port(tmp_path: Path, host: str) -> None:
    said = refusal("run", settings_file(tmp_path), "--set", f"cluster.dashboard_host={host}")

    assert f"cluster.dashboard_host = '{host}': the dashboard cannot listen there" in said
    assert "dashboard_port" not in said
    assert list(tmp_path.glob("run-*")) == []


def test_an_empty_host_does_not_put_the_dashboard_on_all_interfaces(tmp_path: Path) -> None:
    said = refusal("run", settings_file(tmp_path), "--set", "cluster.dashboard_host=")

    assert "cluster.dashboard_host = ''" in said


def test_a_run_has_one_driver_at_a_time(tmp_path: Path) -> None:
    run = create_run(config.load(settings_file(tmp_path)), now_s=0.0)

    with run.lock():
        said = refusal("resume", run.path)

    driver = f"process {os.getpid()} on {socket.gethostname()}"
    assert f"{run.path}: {driver} is running this run: wait for it, or stop it first" in said


@pytest.mark.live
def test_cut_short_weights_are_named_and_the_way_out_leads_to_the_same_outcome(
    undisturbed: Path, stopped: RunDir
) -> None:
    version = stopped.path / "weights" / "v00002"
    file = version / "weights.safetensors"
    whole_bytes = file.stat().st_size
    os.truncate(file, whole_bytes // 2)

    said = refusal("resume", stopped.path)

    assert f"{file}: expected {whole_bytes} bytes, found {whole_bytes // 2} bytes; delete {version}" in said
    shutil.rmtree(version)
    done = spotlight("resume", stopped.path)
    assert done.returncode == 0, done.stderr
    assert outcome(stopped.path) == outcome(undisturbed)


def test_a_full_disk_loses_nothing(undisturbed: Path, small_disk: Path) -> None:
    process = start("run", settings_file(small_disk))
    ((run_dir, *_),) = wait_for(lambda: [path.parents for path in small_disk.glob("run-*/history.jsonl")], process)
    ballast = fill(small_disk)
    _, said = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    # Where tests run beside others, a run may also say that it removed what their killed processes had left.
    told, *others = (line for line in said.splitlines() if not line.startswith("removed what processes"))
    assert not others, said
    assert told.startswith(f"spotlight: {run_dir}: the disk is full")
    assert f"make room, then `spotlight resume {run_dir}`" in told
    ballast.unlink()
    done = spotlight("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert outcome(run_dir) == outcome(undisturbed)


def test_what_nobody_foresaw_says_how_to_go_on(
    stopped: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError("of a kind that nobody foresaw")

    monkeypatch.setattr(driver, "remove_half_written", fail)

    status, said = main(["resume", str(stopped.path)]), capsys.readouterr().err

    assert status == 70
    assert "ZeroDivisionError: of a kind" in said
    assert f"`spotlight resume {stopped.path}` goes on" in said
    told = re.search(r"where it happened is in (\S+);", said)
    assert told
    assert "Traceback" in Path(told[1]).read_text()
    Path(told[1]).unlink()


def test_ctrl_c_twice_leaves_at_once(tmp_path: Path) -> None:
    process = start("run", settings_file(tmp_path))
    wait_for(lambda: processes(tmp_path, "forkserver"), process)
    for each in processes(tmp_path):  # as a terminal does: everybody hears it, also who is still importing
        each.send_signal(signal.SIGINT)
    assert process.stdout
    said = next(line for line in process.stdout if "Ctrl-C" in line)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=WAIT_S)

    (run_dir,) = tmp_path.glob("run-*")
    assert process.returncode == 130
    assert f"`spotlight resume {run_dir}` goes on" in said
    assert error.splitlines()[-1] == "spotlight: left at once"
    swept = "removed what processes that were killed had left"  # by tests beside this one
    assert all(line.startswith(swept) for line in error.splitlines()[:-1])


def refusal(*arguments: str | Path) -> str:
    """What a command says that refuses, in a process of its own."""
    done = spotlight(*arguments)
    return refused(done.returncode, done.stderr)


def refused(status: int, said: str) -> str:
    """What a command said that refused: one line, which is all that it says of it."""
    assert status == 1, said
    assert re.fullmatch(r"spotlight: .+\n", said), said
    return said


def processes(mark: Path, command: str = "") -> list[psutil.Process]:
    """All that live, were started with the mark, and have this in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie is no such process either
            if process.environ().get(MARK) == str(mark) and command in " ".join(process.cmdline()):
                found.append(process)
    return found


def fill(disk: Path) -> Path:
    """Leave no room; returns what is to be deleted to make some."""
    ballast = disk / "ballast"
    page = bytes(4096)
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(page)
    return ballast


def test_a_run_that_the_disk_has_no_room_for_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: RunDir, *_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.path))

    monkeypatch.setattr(creating, "_keep_prompts", full)

    with pytest.raises(SpotlightError, match="cannot make the run directory: No space left on device; choose another"):
        create_run(config.load(settings_file(tmp_path)), now_s=0.0)

    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
