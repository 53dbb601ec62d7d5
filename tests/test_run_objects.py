"""Objects of a run in one process: several of the same run agree, and none hides a run or waits for nothing."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runs import LITTLE, WAIT_S, settings_file, start, wait_for
from spotlight import attach, notebook, simulate
from spotlight.background import names_here, simulating
from spotlight.config import load
from spotlight.detached import _found_here
from spotlight.driver import POLL_S
from spotlight.records import SpotlightError, Stopped
from spotlight.rl.export import export_weights
from spotlight.rl.sample import sample
from spotlight.run import Run
from spotlight.shell import main
from spotlight.status import HINT_AFTER_S
from spotlight.store.creating import create_run, create_run_at
from spotlight.store.rows import SUMMARY
from spotlight.store.rundir import RunDir

SCORER = """
from spotlight.rl.rewards import Scorer

class R(Scorer):
    def __call__(self, images_BHWC, prompts):
        return [0.5] * len(prompts)
"""
SMALL = ("run.iterations=1", "run.validate_every=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that is over, which no test changes."""
    run = Run(settings_file(tmp_path_factory.mktemp("finished")), SMALL).start()
    run.wait()
    return run.directory.path


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory where Python finds modules; what was imported from it is forgotten."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_module_that_begins_a_run_as_it_is_imported_begins_none(modules: Path) -> None:
    settings = settings_file(modules)
    begin = f"\nfrom spotlight.run import Run\nRun({str(settings)!r}, ['reward.name=looping:R']).start()\n"
    (modules / "looping.py").write_text(SCORER + begin)

    with pytest.raises(SpotlightError, match=r"looping begins a run as it is imported.*__main__") as raised:
        Run(settings, ["reward.name=looping:R"])
    assert "PYTHONPATH" not in str(raised.value)  # the module was found

    assert not list(modules.glob("run-*"))


def test_a_reward_beside_the_settings_is_found_by_driver_and_workers_and_when_resumed(tmp_path: Path) -> None:
    (tmp_path / "beside_settings.py").write_text("from helps_beside import HALF\n" + SCORER.replace("0.5", "HALF"))
    (tmp_path / "helps_beside.py").write_text("HALF = 0.5\n")

    settings = ["reward.name=beside_settings:R", "run.iterations=1", *LITTLE, "rollout.steps=3"]

    process = start("run", settings_file(tmp_path), *(word for each in settings for word in ("--set", each)))
    said, _ = process.communicate(timeout=WAIT_S)

    assert process.returncode == 0, said
    (run_dir,) = tmp_path.glob("run-*")
    assert RunDir.open(run_dir).history()[0].metrics["reward_mean"] == 0.5
    resumed = start("resume", run_dir, "--iterations", "2")
    resumed.communicate(timeout=WAIT_S)
    assert resumed.returncode == 0


def test_a_reward_that_python_finds_elsewhere_than_beside_the_settings_is_refused(modules: Path) -> None:
    (modules / "twice.py").write_text(SCORER)
    settings = settings_file(modules / "settings")
    assert Run(settings, ["reward.name=twice:R"]).state == "new"

    (other := modules / "settings" / "twice.py").write_text(SCORER)

    with pytest.raises(
        SpotlightError, match=rf"Python finds {modules / 'twice.py'}, and {other} is another: rename it"
    ):
        Run(settings, ["reward.name=twice:R"])


def test_a_reward_that_is_nowhere_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=rf"No module named 'nowhere'.*a file in {tmp_path}, or .*PYTHONPATH"):
        Run(settings_file(tmp_path), ["reward.name=nowhere:R"])


def test_a_reward_whose_file_was_changed_is_read_again(modules: Path) -> None:
    settings, file = settings_file(modules), modules / "edited.py"
    file.write_text(SCORER + "    def check(self, prompts):\n        raise ValueError('none of these')\n")
    with pytest.raises(SpotlightError, match="none of these"):
        Run(settings, ["reward.name=edited:R"])

    file.write_text(SCORER + "\nclass Q(R):\n    pass\n")
    os.utime(file, (time.time() + 10, time.time() + 10))

    assert Run(settings, ["reward.name=edited:Q"]).state == "new"
    (modules / "mine.py").write_text(SCORER)
    importlib.import_module("mine")  # by the notebook itself
    (modules / "mine.py").write_text(SCORER + "\nclass Later(R):\n    pass\n")
    os.utime(modules / "mine.py", (time.time() + 10, time.time() + 10))
    assert Run(settings, ["reward.name=mine:Later"]).state == "new"
    file.write_text("def (")
    with pytest.raises(SpotlightError, match=r"edited\.py was changed and cannot be imported again"):
        Run(settings, ["reward.name=edited:Q"])


def test_a_run_that_this_process_drives_can_be_reached_by_its_directory(tmp_path: Path) -> None:
    """A cell that starts a run, given twice, leaves a run that no variable holds any more."""
    run = Run(settings_file(tmp_path), [*SMALL, "run.iterations=200"]).start()
    found = attach(run.directory)

    assert found.alive
    with pytest.raises(SpotlightError, match="already running"):
        Run.resume(run.directory.path).start()
    namesake = create_run_at(tmp_path / "elsewhere" / run.directory.name, run.config)
    with pytest.raises(SpotlightError, match=r"elsewhere.*: another run of this name goes on in this process"):
        Run.resume(namesake.path).start()
    at_s = time.mktime(time.strptime(run.directory.name[-15:], "%Y%m%d-%H%M%S"))
    assert create_run(load(settings_file(tmp_path / "other")), at_s, taken=names_here()).name.endswith("-1")
    with pytest.raises(SpotlightError, match="goes on in this process, and a simulation would disturb it"):
        simulate(settings_file(tmp_path / "other"))
    wait_for(lambda: found.status.workers)
    assert found.client.scheduler_info()
    found.stop()

    with pytest.raises(Stopped):
        found.wait()
    assert run.state == attach(run.directory.path).state == "stopped"

    again = Run.resume(run.directory.path).start()
    assert (found.alive, run.alive, found.state) == (True, True, again.state)
    run.stop()
    with pytest.raises(Stopped):
        again.wait()
    assert not names_here()


def test_neither_a_run_nor_another_simulation_begins_beside_a_simulation(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), SMALL)
    with simulating():
        with pytest.raises(SpotlightError, match="start the run detached, or in another process"):
            run.start()
        with pytest.raises(SpotlightError, match="wait for it, or simulate in another process"), simulating():
            pass

    assert run.state == "new"
    with simulating():
        pass


def test_a_run_that_somebody_else_goes_on_with_is_seen_as_it_is(tmp_path: Path) -> None:
    mine = Run(settings_file(tmp_path), [*SMALL, "run.iterations=200"]).start()
    wait_for(lambda: mine.status.workers)
    mine.stop()
    with pytest.raises(Stopped):
        mine.wait()

    theirs = attach(mine.directory.path).start(detached=True)

    assert (mine.alive, mine.state) == (True, "running")
    theirs.stop()
    for each in (mine, theirs):
        with pytest.raises(Stopped):
            each.wait()


def test_a_run_is_not_made_longer_by_a_call_that_is_refused(modules: Path) -> None:
    (modules / "gone.py").write_text(SCORER)
    run = Run(settings_file(modules), [*SMALL, "reward.name=gone:R"]).start()
    run.wait()
    (modules / "gone.py").unlink()
    del sys.modules["gone"]
    shutil.rmtree(modules / "__pycache__", ignore_errors=True)

    with pytest.raises(SpotlightError, match="cannot be imported"):
        Run.resume(run.directory.path, iterations=3)

    assert (attach(run.directory.path).state, attach(run.directory.path).config.run.iterations) == ("finished", 1)


def test_an_object_learns_that_another_made_its_run_longer(tmp_path: Path) -> None:
    first = Run(settings_file(tmp_path), SMALL).start()
    first.wait()
    looked_at = attach(first.directory.path)
    assert looked_at.state == "finished"

    Run.resume(first.directory.path, iterations=2)
    assert attach(first.directory.path).state == "stopped"
    looked_at.start()
    looked_at.wait()

    assert looked_at.config.run.iterations == 2
    assert (looked_at.state, looked_at.status.iteration) == ("finished", 2)


def test_nobody_waits_for_a_run_whose_directory_is_gone(tmp_path: Path) -> None:
    run = attach(_made(tmp_path))
    shutil.rmtree(run.directory.path)

    with pytest.raises(SpotlightError, match="the run's directory is gone"):
        run.wait()
    assert "is gone" in repr(run)


def test_a_run_with_a_damaged_file_is_not_said_to_be_gone(tmp_path: Path) -> None:
    run = attach(_made(tmp_path))
    (run.directory.path / "lease").mkdir()
    (run.directory.path / "lease" / "000001.json").write_text("{")

    assert repr(run) == f"<Run {run.directory.url}: its state cannot be read>"


def test_a_detached_driver_that_cannot_begin_leaves_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attach(_made(tmp_path))

    def refuse(*_: object) -> None:
        raise SpotlightError("the driver ended: no such module")

    monkeypatch.setattr("spotlight.run.begin", refuse)
    with pytest.raises(SpotlightError, match="no such module"):
        run.start(detached=True)

    assert (run.state, run.status.error) == ("failed", "the driver ended: no such module")
    with pytest.raises(SpotlightError, match="no such module"):
        run.wait()


def test_a_detached_driver_that_is_killed_leaves_a_run_that_is_stopped(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), [*SMALL, "run.iterations=200"]).start(detached=True)
    assert (holder := run.directory.lease_holder())
    os.kill(holder.pid, signal.SIGKILL)

    for each in (run, attach(run.directory.path)):
        with pytest.raises(Stopped, match=r"ended without a word: killed, .*; resume with: spotlight resume"):
            each.wait(WAIT_S)


def test_a_run_that_gets_no_thread_has_not_begun(tmp_path: Path) -> None:
    run = attach(_made(tmp_path))
    before = threading.stack_size(1 << 46)  # more than any process has
    try:
        with pytest.raises(RuntimeError, match="can't start new thread") as kept:  # as a notebook keeps it
            run.start()
    finally:
        threading.stack_size(before)

    assert kept.value.__traceback__
    assert (run.alive, run.state) == (False, "new")


def test_an_event_loop_goes_on_while_the_driver_of_an_ended_run_ends(tmp_path: Path) -> None:
    run = attach(_made(tmp_path))
    with run.directory.lock():
        pass
    run._process = subprocess.Popen(["sleep", "1"])
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(POLL_S)

    async def both() -> None:
        beating = asyncio.create_task(beat())
        with pytest.raises(Stopped):
            await run
        beating.cancel()

    asyncio.run(both())
    assert len(beats) > 1


def test_a_detached_driver_that_cannot_write_to_the_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """As it is in another user's run; root may write there."""
    run = attach(_made(tmp_path))
    (run.directory.path / "driver.log").mkdir()

    with pytest.raises(SpotlightError, match=f"^{run.directory.url}: cannot be written"):
        run.start(detached=True)


def test_who_interrupts_the_start_of_a_detached_driver_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attach(_made(tmp_path))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            run.start(detached=True)
    finally:
        signal.signal(signal.SIGALRM, before)

    assert not [each for each in psutil.Process().children() if run.directory.url in each.cmdline()]
    assert run.state == "new"


def test_an_error_that_nobody_foresaw_of_a_detached_driver_is_told_with_where_it_happened(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(modules))
    run = Run(settings_file(modules), SMALL)
    (modules / "distributed.py").write_text("raise RuntimeError('no such luck')")
    run.start(detached=True)

    with pytest.raises(SpotlightError, match=r"RuntimeError: no such luck; .*; where it happened is in"):
        run.wait()


def test_a_detached_driver_whose_run_is_deleted_is_no_error_of_ours(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), ["run.iterations=200"]).start(detached=True)
    shutil.rmtree(run.directory.path)

    with pytest.raises(SpotlightError, match=r"it said nothing|is gone"):
        run.wait(WAIT_S)


def test_a_simulation_that_was_interrupted_is_stopped_and_not_new(tmp_path: Path) -> None:
    (outcome,) = simulate(settings_file(tmp_path), SMALL, compare=False, report=False)
    run = RunDir(outcome.run_dir)
    (run.path / SUMMARY).unlink()
    settings = run.path / "config.toml"
    settings.write_text(settings.read_text().replace("\niterations = 1\n", "\niterations = 5\n"))

    assert attach(outcome.run_dir).state == "stopped"


def test_modules_that_a_kernel_finds_its_detached_driver_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, "", *sys.path])  # a Path harms no import
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    found = _found_here()

    assert found[:2] == [str(tmp_path), str(Path.cwd())]
    assert found[-1] == "/elsewhere"
    assert not [path for path in found if "site-packages" in path or path.startswith(sys.base_prefix)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seeds": 3}, r"seeds = 3: give several numbers"),
        ({"seeds": ["1"]}, r"seeds = '1': give a whole number"),
        ({"seeds": [1.5]}, r"seeds = 1\.5: give a whole number"),
        ({"steps": "3"}, r"steps = '3': give a whole number"),
        ({"prompt": 47}, r"prompt = 47: give a text"),
        ({"version": "latest"}, r"version = 'latest': give a whole number"),
    ],
)
def test_what_is_no_sample_is_refused_by_name(tmp_path: Path, finished: Path, given: dict[str, Any], says: str) -> None:
    fields: dict[str, Any] = {"prompt": 'c "47"', "to": str(tmp_path / "a.png"), "seeds": [1], **given}

    with pytest.raises(SpotlightError, match=says):
        sample(finished, **fields)


def test_exports_and_samples_take_places_as_texts(tmp_path: Path, finished: Path) -> None:
    assert sample(finished, 'c "47"', str(tmp_path / "a.png"), seeds=range(2)).is_file()
    with pytest.raises(SpotlightError, match="policy = 'xx': expected 'trained'"):
        export_weights(finished, str(tmp_path / "weights"), policy="xx")  # type: ignore[arg-type]
    with pytest.raises(SpotlightError, match="/proc/weights: cannot be written"):
        export_weights(finished, "/proc/weights")


def test_learning_of_a_simulation_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="learning = 'Real': expected 'modelled' or 'real'"):
        simulate(settings_file(tmp_path), learning="Real")  # type: ignore[arg-type]

    assert not list(tmp_path.glob("run-*"))


def test_overrides_of_a_simulation_are_checked_as_those_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"overrides = 'run\.seed=3': give a list of texts"):
        simulate(settings_file(tmp_path), "run.seed=3")


def test_no_run_is_made_where_nothing_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_file(tmp_path)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(TypeError):
        Run.into(None, settings)  # type: ignore[arg-type]

    assert [path.name for path in tmp_path.iterdir()] == [settings.name]


def test_pictures_of_modelled_learning_are_refused(tmp_path: Path) -> None:
    (outcome,) = simulate(settings_file(tmp_path), SMALL, learning="modelled", compare=False, report=False)

    with pytest.raises(SpotlightError, match="learning was modelled"):
        attach(outcome.run_dir).images()


def test_a_notebook_says_how_workers_are_started_that_a_run_waits_for(tmp_path: Path) -> None:
    status = replace(attach(_made(tmp_path)).status, state="running", waiting_for=("reserved",))

    def described(elapsed_s: float) -> str:
        run: Any = SimpleNamespace(
            state="running",
            status=replace(status, elapsed_s=elapsed_s),
            how_to_start=lambda pools: f"start <{pools[0]}>",
        )
        return notebook.describe(run)

    assert "start &lt;reserved&gt;" in described(HINT_AFTER_S + 1)
    assert "start &lt;reserved&gt;" not in described(HINT_AFTER_S - 1)


def test_a_notebook_says_how_far_a_run_is_and_links_to_its_live_page_while_there_is_one(tmp_path: Path) -> None:
    status = replace(attach(_made(tmp_path)).status, state="running", iteration=1, iterations=4, emulated="a <GPU>")

    def described(dashboard: str) -> str:
        run: Any = SimpleNamespace(state="running", status=replace(status, dashboard=dashboard))
        return notebook.describe(run)

    assert f'"color: {notebook.STATE_COLOURS["running"]}">running' in described("")
    assert '"width: 25.0%"' in described("")
    assert '<a href="http://head:8787/spotlight"' in described("http://head:8787/status")
    assert "href" not in described("")
    assert "<b>a &lt;GPU&gt;</b>" in described("")


def test_a_long_prompt_is_shown_by_its_beginning(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "a.png")

    assert main(["sample", str(finished), "--prompt", f'c "{"1" * 10_000}"', "--to", where]) == 1

    assert len(capsys.readouterr().err) < 1_000


def _made(where: Path) -> Path:
    from spotlight.config import load
    from spotlight.store.creating import create_run

    return create_run(load(settings_file(where)), now_s=0.0).path
