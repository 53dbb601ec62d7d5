"""The shell's manners: help with examples, exit statuses, tracebacks only when asked for, JSON for scripts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import spotlight
from cluster.dashboard.plugin import prepare
from runs import ROOT, settings_file, start, wait_for
from spotlight import run as running
from spotlight import shell
from spotlight.config import load
from spotlight.display import _asked_to_stop, _Display, _facts, status_table
from spotlight.records import Drained, SpotlightError, Stopped, WorkerLife
from spotlight.run import Run
from spotlight.shell import EXAMPLES, main
from spotlight.simulation import Simulation
from spotlight.store.accounts import Accounts
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.lease import Lease
from spotlight.store.rundir import RunDir


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_every_verb_has_examples_that_can_be_parsed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])

    said = capsys.readouterr().out
    assert left.value.code == 0
    for example in EXAMPLES[verb]:
        assert f"spotlight {example}" in said
        shell._parser().parse_args(re.split(r" [|>] ", example)[0].split())


def test_files_that_examples_name_are_there() -> None:
    named = {word for lines in EXAMPLES.values() for line in lines for word in line.split() if "examples/" in word}

    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_a_person_can_put_right_is_one_sentence_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["status", str(tmp_path)])

    said = capsys.readouterr()
    assert status == 1
    assert said.out == ""
    assert said.err.startswith(f"spotlight: {tmp_path}: not a run directory")
    assert len(said.err.splitlines()) == 1


def test_what_is_not_there_is_not_told_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "nope")]) == 1
    assert capsys.readouterr().err.startswith(f"spotlight: {tmp_path / 'nope'}: no such directory; ")
    run = create_run(load(settings_file(tmp_path), ["run.name=yesterday"]), 0.0).path
    assert main(["status", str(run)[:-1]]) == 1
    assert capsys.readouterr().err.endswith(f"no such directory; did you mean {run}?\n")
    assert main(["run", ""]) == 1
    assert capsys.readouterr().err.startswith("spotlight: '' is no settings file: name one")
    (tmp_path / "notes").touch()
    assert main(["status", str(tmp_path / "notes")]) == 1
    assert capsys.readouterr().err.startswith(f"spotlight: {tmp_path / 'notes'}: a file, and no run directory; ")


@pytest.mark.parametrize("verb", ["status", "report", "stop"])
def test_a_run_that_is_not_named_is_not_where_we_are(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a script names a variable that is not set."""
    assert main([verb, ""]) == 1
    assert capsys.readouterr().err == "spotlight: '' is no run directory: name one\n"


def test_a_terminal_that_has_no_width_is_as_wide_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)

    assert main(["status", run.url]) == 0
    assert "0 of 2" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])

    assert left.value.code == 0
    assert capsys.readouterr().out == f"spotlight {spotlight.__version__}\n"


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_ours_is_status_70_and_shows_its_traceback_only_with_debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(running.Run, "attach", fail)
    status = main(["status", str(tmp_path), *(["--debug"] if debug else [])])

    said = capsys.readouterr().err
    assert status == 70
    assert "RuntimeError: a bug" in said
    assert ("Traceback" in said) == debug
    kept = list(tmp_path.glob("spotlight-error-*.txt"))
    assert [("Traceback" in file.read_text(), file.stat().st_mode & 0o077) for file in kept] == [(True, 0)] * (
        not debug
    )


def test_a_command_that_does_not_exist_is_status_2() -> None:
    with pytest.raises(SystemExit) as left:
        main(["fly"])

    assert left.value.code == 2


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--learning-rate 1e-4", "; a setting is changed by --set train.learning_rate=1e-4"),
        ("--train.learning_rate=1e-4", "; a setting is changed by --set train.learning_rate=1e-4"),
        ("--iterations", "; a setting is changed by --set run.iterations=..."),
        ("--workers 3", "--set pools.reserved.workers=3 or --set pools.spot.workers=3"),
        ("--unheard-of 3", "unrecognized arguments: --unheard-of 3\n"),
    ],
)
def test_a_setting_that_is_given_as_an_option_is_answered_with_the_way(
    capsys: pytest.CaptureFixture[str], typed: str, says: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "a.toml", *typed.split()])

    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_settings_of_a_run_that_is_there_stay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "RUN", "--set", "train.learning_rate=1e-4"])

    assert "`spotlight resume` takes --iterations, --target and --usd-max" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["export RUN", "sample RUN --prompt cat", "graph a.toml"])
def test_a_url_is_no_local_path_to_write_to(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--to", "s3://bucket/x"])

    assert left.value.code == 2
    assert "'s3://bucket/x' is a URL: give a local path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["s"], ["submit", "status", "stop", "simulate", "sample"]),
        (["run", "--c"], ["--cluster"]),
        (["run", "a.toml", "--set", "pools.spot.slurm.p"], ["pools.spot.slurm.partition="]),
        (["run", "a.toml", "--set", "=", "pools.spot.slurm.p"], ["pools.spot.slurm.partition="]),
        (["simulate", "a.toml", "--learning", ""], ["modelled", "real"]),
        (["simulate", "a.toml", "--learning", "="], ["modelled", "real"]),
        (["export", "runs/a", "--policy", "=", "t"], ["trained"]),
        (["run", "ex"], []),  # the shell then completes names of files
    ],
)
def test_a_shell_completes_verbs_options_and_settings(
    capsys: pytest.CaptureFixture[str], typed: list[str], offered: list[str]
) -> None:
    """In a real bash, for which unset variables are errors: what it would offer after these words."""
    assert main(["completion"]) == 0

    words = shlex.join(["spotlight", *typed])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _spotlight 2> /dev/null; echo ${{COMPREPLY[@]}}"
    shell = subprocess.run(["bash", "-uc", f"{capsys.readouterr().out}\n{ask}"], capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    assert shell.stdout.split() == offered


def test_what_is_no_terminal_gets_lines_though_colours_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    console = Console(file=io.StringIO())

    assert console.is_terminal
    assert _Display(console)._live is None


@pytest.mark.parametrize(("kind", "is_live"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_can_only_append_gets_lines(kind: str, is_live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, Rich shows a live panel only once it has ended."""
    monkeypatch.setenv("TERM", kind)
    master, slave = os.openpty()

    with os.fdopen(slave, "w") as terminal:
        assert (_Display(Console(file=terminal))._live is not None) == is_live
    os.close(master)


def test_without_a_terminal_each_thing_is_told_once(tmp_path: Path) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    refused, dashboard = {"w": "it has no memory"}, "http://head:8787/status"
    status = replace(Run.attach(run.path).status, refused=refused, dashboard=dashboard, waiting_for=())
    shown = io.StringIO()
    display = _Display(Console(file=shown, width=200))

    for iteration, waiting_for in ((0, ()), (0, ()), (1, ()), (1, ("spot",)), (1, ("spot",))):
        display.show(replace(status, iteration=iteration, waiting_for=waiting_for))

    told = ("live page       http://head:8787/spotlight", "worker w takes no part: it has no memory")
    assert [shown.getvalue().count(text) for text in (*told, "waiting for workers: spot")] == [1, 1, 1]
    assert [shown.getvalue().count(f"iteration {k}/2") for k in range(2)] == [1, 2]


def test_the_panel_of_a_run_tells_none_from_what_is_not_known(tmp_path: Path) -> None:
    status = Run.attach(create_run(load(settings_file(tmp_path)), now_s=0.0).path).status
    late = replace(status, running={"rollout": 2}, workers={"spot": 3}, window_s=3.25, spot_worth_renting=0)

    unknown, known = printed(_facts(status)), printed(_facts(late))

    assert "rollout window - spot workers worth renting - spot utilisation 0% " in unknown
    assert "rollout window 3.2 s (then waited - s) spot workers worth renting 0 " in known
    assert "running rollout x 2 " in known
    assert "workers 3 spot " in known


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "validation - "),
        (5, "validation 0.000 -> 0.100 -> 0.200 -> 0.300 -> 0.400 "),
        (6, "validation 0.000 -> ... -> 0.300 -> 0.400 -> 0.500 "),
    ],
)
def test_of_many_validations_the_first_and_the_last_are_told(tmp_path: Path, count: int, said: str) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    scores = {version: version / 10 for version in reversed(range(count))}
    shown = io.StringIO()

    _Display(Console(file=shown, width=200)).show(replace(Run.attach(run.path).status, scores=scores))

    assert said in shown.getvalue()


def test_how_a_run_stands_names_what_it_waits_for_and_its_live_page_if_there_are_any(tmp_path: Path) -> None:
    plain = Run.attach(create_run(load(settings_file(tmp_path)), now_s=0.0).path).status
    full = replace(plain, waiting_for=("reserved", "spot"), dashboard="http://head:8787/status")

    told, told_of_plain = printed(status_table(full)), printed(status_table(plain))

    assert "waiting for workers │ reserved and spot" in told
    assert "live page │ http://head:8787/spotlight" in told
    assert not [name for name in ("waiting", "live page") if name in told_of_plain]


def printed(what: Any) -> str:
    """What a wide terminal shows of it, its blanks as one each."""
    shown = io.StringIO()
    Console(file=shown, width=200).print(what)
    return " ".join(shown.getvalue().split())


def test_the_status_of_a_run_is_json_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)

    assert main(["status", str(run.path), "--json"]) == 0

    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["iteration"], status["iterations"]) == ("new", 0, 2)


def test_the_status_of_a_run_that_has_ended_early_says_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    with run.lock():
        pass

    assert main(["status", str(run.path)]) == 0

    assert f"`spotlight resume {run.path}` goes on" in capsys.readouterr().out


def test_a_simulation_is_a_line_of_json_per_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "run.iterations=1", "--alone", "--no-report", "--json"]

    assert main(["simulate", str(settings_file(tmp_path)), *overrides]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    outcome = json.loads(line)
    assert (outcome["iterations"], outcome["learning"]) == (1, "modelled")
    assert Path(outcome["run_dir"]).is_dir()


def test_a_simulation_says_that_its_scores_are_modelled_and_that_its_target_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["--set", "run.iterations=1", "--set", "run.target=0.9", "--alone", "--no-report"]

    assert main(["simulate", str(settings_file(tmp_path)), *overrides]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "scores those of a model of learning" in shown
    assert "nobody reached the target of 0.9" in shown


def test_a_strategy_that_cannot_go_on_is_named_and_those_before_it_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, trace = settings_file(tmp_path), tmp_path / "trace.csv"
    trace.write_text("0,add,a\n5000,remove,a\n")
    stuck = '\n[simulation.strategies."on spot"]\n"strategy.rollout_pools" = ["spot"]\n'
    settings.write_text(settings.read_text() + f'{stuck}"pools.spot.trace" = "{trace}"\n"run.iterations" = 50\n')

    assert main(["simulate", str(settings), "--set", "run.iterations=1", "--no-report"]) == 1

    told = capsys.readouterr()
    assert "iter-" in told.out, "the table's head"
    assert told.out.count("as configured") == 2, "a line of its own, and a row"
    assert "on spot: nothing happens any more" in told.err


def test_a_run_into_a_directory_is_made_once_and_found_again(tmp_path: Path) -> None:
    settings, there = settings_file(tmp_path), tmp_path / "runs" / "a"

    made, found = (Run.into(there, settings, ["run.seed=3"]).directory.path for _ in range(2))

    assert made == found == there
    assert [path.name for path in there.parent.iterdir()] == ["a"]
    with pytest.raises(SpotlightError, match=r"other settings: run\.seed = 3 there and 4 here"):
        Run.into(there, settings, ["run.seed=4"])
    with pytest.raises(SpotlightError, match=r"new run; `spotlight resume .*/runs/a --iterations 9` changes how long"):
        Run.into(there, settings, ["run.seed=3", "run.iterations=9"])
    with pytest.raises(SpotlightError, match=r"/runs/a --target 0\.5 --usd-max 7\.0` changes how long it is"):
        Run.into(there, settings, ["run.seed=3", "run.target=0.5", "run.usd_max=7"])
    with pytest.raises(SpotlightError, match="something else is there, and no run.*name a new or empty directory"):
        Run.into(tmp_path, settings)
    for nowhere in ("", " ", "a\0b"):
        with pytest.raises(SpotlightError, match="is no run directory: name one"):
            Run.into(nowhere, settings)
    for place in (Path("s3://bucket/runs"), "s3:/bucket/runs"):
        with pytest.raises(SpotlightError, match=r"has two slashes: give s3://bucket/runs, and as text"):
            Run.into(place, settings)
        with pytest.raises(SpotlightError, match=r"has two slashes: give s3://bucket/runs, and as text"):
            Run.attach(place)
    assert not Path("s3:").exists()


def test_a_run_is_made_where_a_file_address_says(tmp_path: Path) -> None:
    run = create_run_at(f"file://{tmp_path}/a", load(settings_file(tmp_path)))

    assert run.path == tmp_path / "a"


def test_a_run_is_made_in_the_empty_directory_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "here").mkdir()
    here.chmod(0o755)  # whatever the umask
    monkeypatch.chdir(here)

    run = create_run_at(".", load(settings_file(tmp_path)))

    assert Path.cwd() == run.path == RunDir.open(".").path
    assert stat.S_IMODE(here.stat().st_mode) == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"here", "run.toml"}


def test_a_run_is_made_in_an_empty_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "volume").mkdir()

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)

    assert create_run_at(here, load(settings_file(tmp_path))).path == here


def test_what_others_put_into_a_directory_meanwhile_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's directory is locked once while it is made."""
    (here := tmp_path / "here").mkdir()
    here.chmod(0o755)  # whatever the umask
    flock = fcntl.flock

    def meanwhile(descriptor: int, how: int) -> None:
        (here / "thesis.tex").touch()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(SpotlightError, match="not a run directory"):
        create_run_at(here, load(settings_file(tmp_path)))

    assert [path.name for path in here.iterdir()] == ["thesis.tex"]
    assert stat.S_IMODE(here.stat().st_mode) == 0o755


def test_a_run_may_be_in_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell writes out what follows an equals sign, as in --into=~/a, nor does Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)

    run = Run.into("~/a", settings_file(tmp_path)).directory

    assert run.path == tmp_path / "a" == Run.attach("~/a").directory.path
    assert list(here.iterdir()) == []
    with pytest.raises(SpotlightError, match="there is no such user"):
        Run.into("~nobody-here/a", settings_file(tmp_path))


def test_a_run_into_a_directory_with_changed_prompts_is_refused(tmp_path: Path) -> None:
    settings, there, prompts = settings_file(tmp_path), tmp_path / "runs" / "a", tmp_path / "other.txt"
    prompts.write_text("".join(f'a "{number}"\n' for number in range(10, 50)))
    override = f"data.train_prompts={prompts}"
    Run.into(there, settings, [override])

    prompts.write_text("".join(f'a "{number}"\n' for number in range(11, 51)))

    with pytest.raises(SpotlightError, match=r"other\.txt: was changed since .*/runs/a began with it: put back"):
        Run.into(there, settings, [override])


def test_the_cost_of_a_run_that_goes_on_is_its_cost_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, now_s = create_run(load(settings_file(tmp_path)), 0.0), time.time()
    life = WorkerLife(worker="reserved-0", pool="reserved", joined_s=now_s - 7200, left_s=None, reason="")
    Accounts(run, run.config()).take(Drained(workers={0: life}))

    with run.lock():
        main(["cost", str(run.path), "--json"])

    assert json.loads(capsys.readouterr().out)["usd"] == pytest.approx(20.0, rel=0.01)


def test_a_run_into_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a queue's script names a variable that is not set."""
    assert main(["run", str(settings_file(tmp_path)), "--into", ""]) == 1
    assert "'' is no run directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(("cluster", "said"), [("here", "neither an address"), ("tcp://192.0.2.1:8786", "anybody who")])
def test_a_cluster_that_cannot_be_meant_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str, said: str
) -> None:
    assert main(["run", str(settings_file(tmp_path)), "--cluster", cluster]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("module", ["spotlight.config", "spotlight.run"])
def test_ctrl_c_while_modules_are_imported_ends_a_command_quietly(module: str) -> None:
    """A module that nobody else imports is where the interrupt comes; tests in the background ignore it."""
    code = f"""
import signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["spotlight", "run", "examples/ocr-tiny.toml"]
from spotlight.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 130
    assert done.stderr in ("", "spotlight: left at once\n")


def with_nobody_reading(*command: str) -> tuple[str, int | None]:
    """What Python says as an error, and its exit status, if the reader of its output is gone."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        said = process.stderr.read()
    return said, process.returncode


def test_a_reader_that_is_gone_ends_a_verb_quietly() -> None:
    assert with_nobody_reading("-m", "spotlight", "completion") == ("", 128 + signal.SIGPIPE)


def test_a_reader_that_is_gone_is_not_taken_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Unbuffered, as in many containers: there, what is printed is written at once."""
    run = Simulation("a", load(settings_file(tmp_path), ["run.iterations=1"]), "modelled")
    run.go(report=False)

    assert with_nobody_reading("-u", "-m", "spotlight", "report", run.directory.url) == ("", 128 + signal.SIGPIPE)


def test_a_command_in_a_directory_that_is_gone_says_so(tmp_path: Path) -> None:
    settings, here = settings_file(tmp_path), tmp_path / "here"
    here.mkdir()
    command = 'rmdir ../here; exec "$0" -m spotlight run "$1"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        ["bash", "-c", command, sys.executable, settings], cwd=here, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert done.stderr == "spotlight: the directory in which this command began is gone: change to another (`cd`)\n"


def test_who_has_no_home_directory_is_asked_for_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user of a container that has a number alone; bokeh, which draws the page, wants to know it, too."""
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    assert main(["status", "memory://bucket/run"]) == 1
    assert "set HOME to a directory" in capsys.readouterr().err
    with pytest.raises(SpotlightError, match="set HOME to a directory"):
        prepare()


@pytest.mark.parametrize(("where", "status"), [(">/dev/full", 1), (">&-", 0), (">&- 2>&-", 0)])
def test_what_cannot_be_printed_is_no_error_of_ours(tmp_path: Path, where: str, status: int) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    command = f'exec "$0" -m spotlight status "$1" {where}'

    done = subprocess.run(
        ["bash", "-c", command, sys.executable, run.path], cwd=ROOT, text=True, stderr=subprocess.PIPE, check=False
    )

    said = "spotlight: what this command prints cannot be written (No space left on device): make room\n"
    assert (done.returncode, done.stderr) == (status, said if status else "")


def test_what_nohup_has_a_run_ignore_it_ignores() -> None:
    """And what nobody has it ignore, it hears."""
    run: Any = None
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _asked_to_stop(run):
            ignored, heard = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert ignored == signal.SIG_IGN
    assert callable(heard)


@pytest.mark.parametrize(("second", "leaves"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_only_ctrl_c_leaves_at_once(second: signal.Signals, leaves: bool) -> None:
    """Slurm, and then its batch script, send SIGTERM to a job."""
    run: Any = SimpleNamespace(alive=True)
    expected = pytest.raises(KeyboardInterrupt) if leaves else contextlib.nullcontext()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it

    try:
        with expected, _asked_to_stop(run) as asked:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(second)
    finally:
        signal.signal(signal.SIGINT, before)

    assert asked == [signal.SIGTERM, second]


INTERRUPTED = """
import signal, sys
from spotlight import attach, background
from spotlight.display import _asked_to_stop
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with _asked_to_stop(attach(sys.argv[1])), background._starting:
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("heard")
"""


def test_a_signal_that_comes_while_the_runs_of_a_process_are_looked_at_is_heard(tmp_path: Path) -> None:
    run = create_run(load(settings_file(tmp_path)), 0.0)
    command = [sys.executable, "-c", INTERRUPTED, str(run.path)]

    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout == b"heard\n"


def test_a_run_is_stopped_from_another_shell(tmp_path: Path) -> None:
    process = start("run", settings_file(tmp_path), "--set", "run.iterations=300")
    wait_for(lambda: list(tmp_path.glob("run-*/history.jsonl")), process)
    (run_dir,) = tmp_path.glob("run-*")

    assert main(["stop", str(run_dir)]) == 0
    process.communicate()

    assert process.returncode == 130
    assert main(["stop", str(run_dir)]) == 1  # nobody runs it


def test_a_run_that_no_command_runs_is_not_killed_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook's kernel would not stop its run in order, and would be gone."""
    run = create_run(load(settings_file(tmp_path)), 0.0)

    with run.lock():
        status = main(["stop", str(run.path)])

    assert status == 1
    assert "is no `spotlight` command: stop it there" in capsys.readouterr().err


def test_who_stops_a_driver_that_waits_for_a_lost_machine_is_told_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(load(settings_file(tmp_path)), 0.0)
    lease = Lease(run.objects, "of another machine")
    lease.take()
    stop = threading.Event()

    def wait() -> None:
        with contextlib.suppress(Stopped), run.lock(stop):
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(run._lock.is_held)

    status = main(["stop", str(run.path)])

    stop.set()
    waiting.join()
    lease.release()
    said = capsys.readouterr().err
    assert status == 1
    assert re.search(r"process \d+ on \S+ runs this run: stop it there\. If that machine is lost", said)
    assert f"`fuser {run.path / 'lock'}` names it" in said


def test_a_run_where_nothing_can_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(load(settings_file(tmp_path)), 0.0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("spotlight.store.file_lock.open", refuse, raising=False)

    with pytest.raises(SpotlightError, match=r"nothing can be written there \(Read-only file system\)"):
        Run.resume(run.path).start().wait()


def test_how_a_run_stands_says_what_is_not_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(load(settings_file(tmp_path), ["pace.gpu=h100", "pace.speedup=8"]), 0.0)

    main(["status", str(run.path)])
    shown = " ".join(capsys.readouterr().out.split())
    main(["status", str(run.path), "--json"])
    told = json.loads(capsys.readouterr().out)

    assert "PACED: qwen-image on h100 is emulated, seconds and dollars are 8 times fewer" in shown.replace(
        " │ │ │ ", " "
    )
    assert told["emulated_per_real_s"] == 8
    assert told["emulated"].startswith("PACED")
