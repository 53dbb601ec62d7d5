"""The whole system with real processes and real kills: whatever happens, the outcome is the same bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.dispatch.dispatcher import differing as dispatched_otherwise
from cluster.worker.plugin import terms_of
from graphs.loop import Loop, synchronous
from kills import KillWorkers, client_of
from leftovers import Watched
from runs import ROOT, VALIDATED, WAIT_S, NoWatch, outcome, settings_file, spotlight, start, wait_for
from spotlight import config
from spotlight.driver import Driver
from spotlight.plan.replay import Allocation, differing
from spotlight.records import SpotlightError, Stopped
from spotlight.run import Run
from spotlight.shell import main
from spotlight.store.accounts import read_lives
from spotlight.store.creating import create_run
from spotlight.store.rows import DECISIONS, EVENTS, HISTORY, SPANS, SUMMARY, VALIDATION
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import pictures


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing happened to."""
    run = Run(settings_file(tmp_path_factory.mktemp("undisturbed")), ["run.report=true"]).start()
    run.wait()
    return run.directory.path


def test_a_run_that_is_over_is_resumed_without_a_worker_and_gets_its_report_again(undisturbed: Path) -> None:
    (undisturbed / "report.html").unlink()
    directory = RunDir.open(undisturbed)
    before = read_lives(directory), directory.rows(SPANS), outcome(undisturbed)

    status = Run.resume(undisturbed).start().wait()

    assert status.state == "finished"
    assert (undisturbed / "report.html").is_file()
    assert (read_lives(directory), directory.rows(SPANS), outcome(undisturbed)) == before


def test_a_path_that_looks_like_markup_is_followed_as_any_other(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed, tmp_path / "a[" / "b]")

    assert main(["resume", str(tmp_path / "a[" / "b]"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_run_that_lacks_its_last_validation_is_not_over(undisturbed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed, copy)
    lines = (copy / VALIDATION).read_text().splitlines(keepends=True)
    states = []
    for kept in (lines, lines[:-1], lines[1:]):
        (copy / VALIDATION).write_text("".join(kept))
        states.append(Run.attach(copy).state)

    assert states == ["finished", "stopped", "stopped"]


def test_why_a_run_failed_is_told_to_all_until_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(Driver, "go", fail)
    run = Run(settings_file(tmp_path)).start()
    with pytest.raises(RuntimeError, match="nobody foresaw this"):
        run.wait(WAIT_S)
    found = Run.attach(run.directory.path)

    assert found.state == run.state == "failed"
    for status in (found.status, run.status):
        assert "in Spotlight itself, RuntimeError: nobody foresaw this; all that was committed is kept" in status.error
    assert "nobody foresaw this" in found._repr_html_()
    with pytest.raises(SpotlightError, match="nobody foresaw this"):
        found.wait(WAIT_S)
    with run.directory.lock():
        assert (found.state, found.status.error) == ("running", "")
    assert (found.state, found.status.error) == ("stopped", "")


def test_a_run_that_nobody_has_begun_is_new_and_waited_for(tmp_path: Path) -> None:
    """As one whose driver waits in Slurm's queue; "stopped" would invite a second driver."""
    directory = create_run(config.load(settings_file(tmp_path)), now_s=0.0)
    run = Run.attach(directory.path)

    assert run.state == run.status.state == "new"
    with pytest.raises(TimeoutError, match=r"nobody has begun it after 0.1 s"):
        run.wait(0.1)
    with directory.lock():
        assert run.state == "running"
    with pytest.raises(Stopped):
        run.wait(0.1)


def test_a_run_whose_last_weights_are_gone_makes_them_again_and_has_no_summary_till_then(
    undisturbed: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed, copy)
    shutil.rmtree(copy / "weights" / "v00002")

    run = Run.resume(copy).start()
    wait_for(lambda: not (copy / SUMMARY).exists())
    run.wait()

    assert json.loads((copy / SUMMARY).read_text())["iterations"] == 2
    assert outcome(copy) == outcome(undisturbed)


def test_a_run_leaves_what_a_person_looks_for(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())

    assert {path.name for path in undisturbed.iterdir()} >= {"config.toml", "report.html", "history.jsonl", "weights"}
    assert (undisturbed / "images" / "before-after.png").is_file()
    assert summary["iterations"] == 2
    assert summary["usd"] > 0
    assert 0 < summary["first_image_s"] < summary["wall_s"]


def test_the_ledger_of_a_run_adds_up_to_the_time_of_its_workers(undisturbed: Path) -> None:
    lives = read_lives(RunDir.open(undisturbed))

    status, printed = Run.resume(undisturbed).status, spotlight("cost", undisturbed, "--json")

    account = json.loads(printed.stdout)
    alive_s = sum((life.left_s or 0) - life.joined_s for life in lives)
    assert account["seconds"] == pytest.approx(alive_s)
    assert account["usd"] == pytest.approx(status.usd) == pytest.approx(sum(status.usd_by_pool.values()))
    assert 0 < status.usd_wasted < status.usd
    assert sum(status.wasted_s.values()) < alive_s
    same = ("usd_wasted", "usd_reserved_only", "usd_per_iteration", "usd_per_sample", "usd_per_point", "wasted_s")
    assert {name: account[name] for name in same} == {name: getattr(status, name) for name in same}
    assert status.usd_per_iteration == pytest.approx(status.usd / 2)


def test_every_decision_of_a_run_is_made_again_from_its_log(undisturbed: Path) -> None:
    run = RunDir.open(undisturbed)

    rows = run.rows(DECISIONS)
    assert {row["decision"] for row in rows} == {"dispatch rules", "dispatch", "allocate"}
    assert [*differing(run.decisions()), *dispatched_otherwise(rows)] == []


def test_a_logged_decision_that_was_another_is_found(undisturbed: Path) -> None:
    run = RunDir.open(undisturbed)
    rows, found = run.rows(DECISIONS), run.decisions()
    decided = next(row for row in rows if row.get("is") == "TimePassed" and "then" in row)
    at, allocation = next((at, row) for at, row in enumerate(found) if isinstance(row, Allocation))

    decided["then"] = decided["then"][1:]
    found[at] = other = replace(allocation, chunks=allocation.chunks[1:])

    assert list(differing(found)) == [other]
    assert list(dispatched_otherwise(rows)) == [decided]


def test_the_synchronous_scheduler_gets_the_same(undisturbed: Path, tmp_path: Path) -> None:
    run = create_run(config.load(settings_file(tmp_path)), now_s=0.0)

    Loop(run, synchronous, NoWatch()).go()

    assert outcome(run.path) == outcome(undisturbed)


FREE_WIDTHS = 0.1
"""Tolerance of a mean reward: at other widths latents differ by 1e-5, and one of its six or twelve images may read
differently by one of its two letters."""


def test_with_free_widths_and_kills_the_scores_are_those_of_single_workers(undisturbed: Path, tmp_path: Path) -> None:
    settings = ["strategy.widths=[1,2,4]", "pools.spot.workers=4"]

    run = Run(settings_file(tmp_path), settings).start()
    client_of(run).register_plugin(KillWorkers("rollout", pool="spot", count=3))
    run.wait()

    widths = {row["width"] for row in run.directory.rows(EVENTS) if row["event"] == "stepped"}
    assert max(widths) > 1
    for free, alone in zip(_scores(run.directory.path), _scores(undisturbed), strict=True):
        assert free == pytest.approx(alone, abs=FREE_WIDTHS)


def _scores(run_dir: Path) -> list[float]:
    run = RunDir.open(run_dir)
    rewards = [row["metrics"]["reward_mean"] for row in run.rows(HISTORY)]
    return rewards + [row["score"] for row in run.rows(VALIDATION)]


def test_a_run_that_is_over_needs_no_port(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    settings = tmp_path / "run" / "config.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"dashboard_port = {taken.getsockname()[1]}"
        settings.write_text(settings.read_text().replace("dashboard_port = 0", port))

        status = Run.resume(tmp_path / "run").start().wait()

    assert port in settings.read_text()
    assert status.state == "finished"


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


@pytest.mark.parametrize(
    ("phase", "pool", "count"),
    [("rollout", "spot", 2), pytest.param("explore-r", "spot", 2, marks=pytest.mark.live), ("train", "reserved", 1)],
)
def test_workers_killed_in_the_middle_of_a_task_change_nothing(
    undisturbed: Path, tmp_path: Path, phase: str, pool: str, count: int
) -> None:
    run = Run(settings_file(tmp_path)).start()
    client_of(run).register_plugin(KillWorkers(phase, pool=pool, count=count, settle_s=0.3))

    status = run.wait()

    lost = [row["phase"] for row in run.directory.rows(SPANS) if row["outcome"] == "lost"]
    assert len(lost) == count
    assert all(each.startswith(phase) for each in lost)
    assert status.preemptions == (count if pool == "spot" else 0)
    assert outcome(run.directory.path) == outcome(undisturbed)


@pytest.mark.parametrize("gpu", [pytest.param("h100", marks=pytest.mark.live), "cpu"])
def test_a_reserved_worker_that_only_updates_changes_nothing(undisturbed: Path, tmp_path: Path, gpu: str) -> None:
    apart = ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]', f"pools.reserved.gpu={gpu}")
    run = Run(settings_file(tmp_path), apart).start()
    client_of(run).register_plugin(KillWorkers("train", pool="spot", count=1))

    run.wait()

    spans = run.directory.rows(SPANS)
    assert [span["phase"] for span in spans if span["outcome"] == "lost"].count("train") == 1
    pools = {
        phase: {span["pool"] for span in spans if span["phase"] == phase} for phase in ("rollout", "train", "update")
    }
    assert pools == {"rollout": {"spot"}, "train": {"spot"}, "update": {"reserved"}}
    on_reserved = {span["phase"].partition("-")[0] for span in spans if span["pool"] == "reserved"}
    bare = terms_of(run.directory.config(), run.directory.url, "").bare
    assert bare == (("reserved",) if gpu == "cpu" else ())
    assert on_reserved & {"explore", "validate", "score"} == (set() if gpu == "cpu" else {"explore", "validate"})
    assert outcome(run.directory.path) == outcome(undisturbed)


@pytest.mark.live
def test_rollouts_that_are_made_early_are_the_same_whoever_is_killed(tmp_path: Path) -> None:
    early = (
        *("strategy.exploration=off", "rollout.prompts_ahead=3", "rollout.steps=60", "train.timesteps=1"),
        *("run.validation_steps=6", f"data.validation_prompts={VALIDATED[20]}"),
    )
    alone = create_run(config.load(settings_file(tmp_path / "alone"), early), now_s=0.0)
    Loop(alone, synchronous, NoWatch()).go()
    run = Run(settings_file(tmp_path / "struck"), early).start()
    client_of(run).register_plugin(KillWorkers("rollout-ahead", pool="spot", count=1))

    run.wait()

    spans = [span for span in run.directory.rows(SPANS) if span["phase"] == "rollout-ahead"]
    assert {span["pool"] for span in spans} == {"spot"}
    assert {"lost", "stopped"} <= {span["outcome"] for span in spans}, "training ends before they do"
    assert "put off" in {row["event"] for row in run.directory.rows(EVENTS)}
    resumed = [row.measured["steps_resumed"] for row in run.directory.history()]
    assert any(steps % 60 for steps in resumed), "some went on from a step in their middle"
    assert outcome(run.directory.path) == outcome(alone.path)


@pytest.mark.live
def test_candidates_that_are_trained_on_are_the_same_whoever_is_killed(tmp_path: Path) -> None:
    reuse = ("exploration.reuse=true", "exploration.steps=4", "rollout.steps=8", "train.parts=3", "run.iterations=3")
    alone = create_run(config.load(settings_file(tmp_path / "alone"), reuse), now_s=0.0)
    Loop(alone, synchronous, NoWatch()).go()
    run = Run(settings_file(tmp_path / "struck"), reuse).start()
    client_of(run).register_plugin(KillWorkers("explore-r1-2", pool="spot", count=2))
    client_of(run).register_plugin(KillWorkers("train-1", pool="reserved", count=1), name="kill-training")

    run.wait()

    spans = run.directory.rows(SPANS)
    phases = [span["phase"] for span in spans]
    assert "rollout" not in phases, "all candidates are scored, so that no prompt lacks any"
    assert {span["phase"].partition("-")[0] for span in spans if span["outcome"] == "lost"} >= {"explore", "train"}
    selections = [alone.selection(k) for k in (1, 2)]
    assert [selection.version for selection in selections if selection] == [0, 1]
    for selection in filter(None, selections):  # the first one's latents and scores are compacted by now
        assert all(kept.drawn for kept in selection.kept)
        shown = pictures(alone, selection)
        assert [each.reward for each in shown] == [each.explored_reward for each in shown]
        assert [each.url[:10] for each in shown] == ["data:image"] * 12
    assert outcome(run.directory.path) == outcome(alone.path)


def test_an_iteration_that_is_done_again_trains_on_the_same_candidates_or_says_what_it_lacks(tmp_path: Path) -> None:
    reuse = ("exploration.reuse=true", "exploration.steps=4", "run.iterations=3")
    alone = create_run(config.load(settings_file(tmp_path / "alone"), reuse), now_s=0.0)
    Loop(alone, synchronous, NoWatch()).go()
    again = tmp_path / "again"
    shutil.copytree(alone.path, again)
    shutil.rmtree(again / "weights" / "v00003")
    shutil.rmtree(again / "latents")  # so that they are drawn again, with the weights before

    Run.resume(again).start().wait()
    repeated = outcome(again)
    for version in ("v00003", "v00001"):
        shutil.rmtree(again / "weights" / version)

    assert repeated == outcome(alone.path)
    with pytest.raises(SpotlightError, match=r"v00001: are missing, and samples of iteration 2 are drawn with these"):
        Run.resume(again)


def test_gangs_that_share_training_and_are_killed_at_it_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    shared = ("train.width=2", "train.parts=9", 'strategy.train_pools=["reserved","spot"]', "pools.reserved.workers=2")
    quiet, struck = (Run(settings_file(tmp_path / name), shared).start() for name in ("quiet", "struck"))
    client_of(struck).register_plugin(KillWorkers("train", pool="reserved", count=2))
    client_of(struck).register_plugin(KillWorkers("train", pool="spot", count=1), name="kill-spot")
    for pool in ("reserved", "spot"):  # at once: to add little gradients takes a few milliseconds
        adding = KillWorkers("add", pool=pool, count=1, after_s=0)
        client_of(struck).register_plugin(adding, name=f"kill-adding-{pool}")

    for run in (quiet, struck):
        run.wait()

    lost = [row["phase"] for row in struck.directory.rows(SPANS) if row["outcome"] == "lost"]
    assert {"train", "add"} <= set(lost)
    assert outcome(struck.directory.path) == outcome(quiet.directory.path)
    trained = [row for row in quiet.directory.rows(SPANS) if row["phase"] == "train" and row["outcome"] == "done"]
    assert len(trained) == 2 * 9 * 2  # iterations, parts, ranks
    added = [row for row in quiet.directory.rows(SPANS) if row["phase"] == "add" and row["outcome"] == "done"]
    assert len(added) == 2 * 4  # iterations, slices
    for together, alone in zip(_scores(quiet.directory.path), _scores(undisturbed), strict=True):
        assert together == pytest.approx(alone, abs=FREE_WIDTHS)


@pytest.mark.live
def test_workers_that_only_score_and_are_killed_at_it_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    apart = ("pools.reward.workers=1", "pools.reward.usd_per_h=0.5", "pools.reward.replace_after_s=0.5")
    run = Run(settings_file(tmp_path), apart).start()
    client_of(run).register_plugin(KillWorkers("score", pool="reward", count=2))

    run.wait()

    spans = run.directory.rows(SPANS)
    lost = [span for span in spans if span["outcome"] == "lost"]
    assert {span["pool"] for span in lost} == {"reward"}
    assert any(span["phase"] == "score" for span in lost)
    assert {span["pool"] for span in spans if "score" in span["phase"]} == {"reward"}
    assert not list(run.directory.path.glob("latents/images/*/*"))
    assert outcome(run.directory.path) == outcome(undisturbed)


@pytest.mark.parametrize(
    ("phase", "iteration", "state"),
    [
        pytest.param("explore-r0", 0, "processing", marks=pytest.mark.live),
        pytest.param("rollout", 1, "memory", marks=pytest.mark.live),
        ("train", 1, "processing"),
        pytest.param("publish", 1, "processing", marks=pytest.mark.live),
    ],
)
def test_a_killed_driver_leaves_nothing_and_is_resumed_as_if_nothing_had_been(
    undisturbed: Path, watched: Watched, tmp_path: Path, phase: str, iteration: int, state: str
) -> None:
    settings = settings_file(tmp_path)
    command = [sys.executable, str(ROOT / "tests" / "killing_driver.py"), str(settings), phase, str(iteration), state]
    environment = watched.environment
    killed = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=WAIT_S, env=environment
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    watched.assert_nothing_is_left(tmp_path)
    (run_dir,) = tmp_path.glob("run-*")

    Run.resume(run_dir).start().wait()

    assert outcome(run_dir) == outcome(undisturbed)


@pytest.mark.parametrize(
    "asked",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.live),
        pytest.param(signal.SIGHUP, marks=pytest.mark.live),
    ],
)
def test_ctrl_c_and_its_like_stop_cleanly_leave_nothing_and_say_how_to_resume(
    undisturbed: Path, watched: Watched, tmp_path: Path, asked: signal.Signals
) -> None:
    process = start("run", settings_file(tmp_path), environment=watched.environment)
    wait_for(lambda: list(tmp_path.glob("run-*/history.jsonl")), process)
    process.send_signal(asked)
    _, err = process.communicate(timeout=WAIT_S)
    watched.assert_nothing_is_left(tmp_path)
    (run_dir,) = tmp_path.glob("run-*")

    assert process.returncode == 130
    assert f"spotlight resume {run_dir}" in err
    if asked != signal.SIGINT:
        return
    done = spotlight("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert f"spotlight report {run_dir}" in done.stdout
    assert not (run_dir / "report.html").exists()
    assert outcome(run_dir) == outcome(undisturbed)


def test_a_result_that_is_lost_with_its_worker_is_waited_for_until_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask says that it is lost, has it made again since somebody wants it, and says that it is there."""
    future = SimpleNamespace(status="pending", release=lambda: None)
    came, told = iter(["finished", "lost", "lost", "finished"]), list[str]()
    other = SimpleNamespace(status="pending", release=lambda: None)

    def follow(driver: Driver) -> None:
        future.status = next(came)
        other.status = "pending" if len(told) < 2 else "finished"
        told.append(future.status)

    client = SimpleNamespace(get=lambda graph, keys, sync: [future, other], gather=lambda packed: ["found", "other"])
    monkeypatch.setattr("spotlight.driver._wait", lambda client, futures: None)
    monkeypatch.setattr(Driver, "_follow", follow)
    none: Any = None
    driver = Driver(none, none, none, threading.Event(), began_s=0.0)
    driver.pools = cast("Any", SimpleNamespace(client=client))

    found = driver._compute(cast("Any", SimpleNamespace(graph=None, outputs={"a": "x", "b": "y"})))

    assert found == {"a": "found", "b": "other"}
    assert told == ["finished", "lost", "lost", "finished"]


def test_who_is_interrupted_while_waiting_can_wait_again(undisturbed: Path, tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that test beside others ignore it
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)).start()

    try:
        with pytest.raises(KeyboardInterrupt):
            run.wait()
    finally:
        signal.signal(signal.SIGINT, before)

    assert run.alive
    assert run.wait().state == "finished"
    assert outcome(run.directory.path) == outcome(undisturbed)


def test_stop_ends_a_run_that_start_takes_up_again(undisturbed: Path, tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path)).start()
    wait_for(lambda: run.directory.rows(HISTORY))
    run.stop()
    with pytest.raises(Stopped, match="spotlight resume"):
        run.wait()

    run.start().wait()

    assert outcome(run.directory.path) == outcome(undisturbed)
    assert list(run.history.index) == [0, 1]


@pytest.mark.live
def test_exploration_is_one_setting_away(undisturbed: Path, tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path), ['strategy.exploration="off"', "run.iterations=1"]).start()
    run.wait()

    explored, plain = RunDir.open(undisturbed).rows(SPANS), run.directory.rows(SPANS)
    assert any(row["phase"].startswith("explore") for row in explored)
    assert not any(row["phase"].startswith("explore") for row in plain)
    assert run.directory.rows(HISTORY)[0]["metrics"]["seeds_scored"] == 0


def test_latents_go_where_the_settings_say(tmp_path: Path) -> None:
    overrides = ["strategy.exploration=off", "run.iterations=1", f"latents.url=file://{tmp_path}/store"]
    run = Run(settings_file(tmp_path), overrides).start()
    run.wait()

    assert Path(run.directory.latents_url.removeprefix("file://")).parent == tmp_path / "store"
    assert list(Path(run.directory.latents_url.removeprefix("file://")).iterdir())
    assert not (run.directory.path / "latents").exists()


@pytest.mark.live
def test_a_script_without_a_main_guard_starts_one_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    settings = settings_file(tmp_path)
    overrides = ["strategy.exploration=off", "run.iterations=1"]
    script.write_text(f"import spotlight\nspotlight.Run({str(settings)!r}, {overrides}).start().wait()\n")

    subprocess.run([sys.executable, str(script)], check=True, timeout=WAIT_S)

    (run_dir,) = tmp_path.glob("run-*")
    assert len(RunDir.open(run_dir).rows(HISTORY)) == 1


ENDS = """
import sys, time, spotlight
run = spotlight.Run(sys.argv[1], ["run.iterations=100"]).start()
while not run.status.iteration:
    time.sleep(0.1)
print(run.directory.path, flush=True)
raise KeyboardInterrupt
"""


def test_a_script_that_ends_without_waiting_for_its_run_stops_it_and_says_so(watched: Watched, tmp_path: Path) -> None:
    script = [sys.executable, "-c", ENDS, str(settings_file(tmp_path))]
    done = subprocess.run(
        script, cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S, check=False, env=watched.environment
    )

    run = RunDir.open(done.stdout.strip())
    assert f"this process ends, and with it the run; `{run.resume_command}` goes on" in done.stderr
    assert "cannot schedule new futures" not in done.stderr
    assert 0 < len(run.history()) < 100
    assert not [life for life in read_lives(run) if life.left_s is None]
    watched.assert_nothing_is_left(tmp_path)


UNHEARD = """
import os, sys, time, spotlight
run = spotlight.Run(sys.argv[1], ["run.iterations=100"]).start()
while not run.directory.lease_holder():
    time.sleep(0.1)
reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, 2)
"""


def test_a_script_that_ends_where_nobody_reads_what_it_says_stops_its_run_in_order(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", UNHEARD, str(settings_file(tmp_path))], cwd=ROOT, timeout=WAIT_S, check=False)

    (run_dir,) = tmp_path.glob("run-*")
    assert (last := RunDir.open(run_dir).last_holder())
    assert last.released


STOPS = """
import sys, spotlight
spotlight.Run(sys.argv[1]).start().stop()
"""


def test_a_script_that_stops_its_run_and_ends_is_not_told_that_its_run_ends(tmp_path: Path) -> None:
    script = [sys.executable, "-c", STOPS, str(settings_file(tmp_path))]
    done = subprocess.run(script, cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LATE = """
import sys, threading
from spotlight import Run

def begin():
    threading.main_thread().join()
    Run(sys.argv[1]).start()

threading.Thread(target=begin).start()
"""


def test_a_run_that_begins_when_its_script_has_ended_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    script = [sys.executable, "-c", LATE, str(settings_file(tmp_path))]
    done = subprocess.run(script, cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S, check=False)

    assert "SpotlightError: this process is ending, for its main thread is done" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


FORKS = """
import os, sys
from spotlight import Run, background
from spotlight.records import Stopped
run = Run(sys.argv[1]).start()
assert len(background._started) == 1
if not (child := os.fork()):
    os._exit(len(background._started))
found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
run.stop()
try:
    run.wait()
except Stopped:
    sys.exit(found)
"""


def test_a_fork_of_a_script_waits_for_no_run_of_it(tmp_path: Path) -> None:
    script = [sys.executable, "-c", FORKS, str(settings_file(tmp_path))]

    assert subprocess.run(script, cwd=ROOT, timeout=WAIT_S, check=False).returncode == 0


def test_training_closes_exploration_that_runs_on_time(tmp_path: Path) -> None:
    overrides = ["exploration.budget=time", "exploration.seeds_tried=100"]
    run = Run(settings_file(tmp_path), overrides).start()
    run.wait()

    first, second = (RunDir.open(run.directory.path).selection(k) for k in (0, 1))
    assert first is not None
    assert second is not None
    assert first.seeds_dropped == 0
    assert second.seeds_dropped > 0
    assert len(second.kept[0].seeds) == 4


def test_how_workers_are_started_is_told_where_that_is_not_up_to_the_run(tmp_path: Path) -> None:
    there = Run(settings_file(tmp_path), cluster="tls://head:8786")

    assert "start `dask worker tls://head:8786 --resources spot=1`" in there.how_to_start(["spot", "the driver's own"])
    assert "start 8 on one node" in there.how_to_start(["8 on one node"])
    assert there.how_to_start(["the driver's own"]) == ""
    assert Run(settings_file(tmp_path)).how_to_start(["spot"]) == ""
