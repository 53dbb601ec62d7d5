"""Runs in notebooks: the examples work from top to bottom, and what a notebook shows of a run is true."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import nbformat
import numpy as np
import pytest
from PIL import Image

from runs import ROOT, VALIDATED, kill, settings_file, start, wait_for
from spotlight import attach, notebook
from spotlight.clock import wall_clock
from spotlight.config import load
from spotlight.market.ledger import AT_RESERVED_PRICES
from spotlight.records import Drawn, Kept, Prompt, Selection, Span, SpotlightError, Stopped, WorkerLife, row_of
from spotlight.run import Run
from spotlight.store.creating import create_run
from spotlight.store.latents import LatentStore
from spotlight.store.rows import HISTORY, SPANS, WORKERS, HistoryRow
from spotlight.store.thumbnails import Picture, pictures, thumbnail

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
QUICK = {
    "quickstart": ("SETTINGS = [", ["run.iterations=5", "exploration.budget=fixed", "cluster.dashboard_port=0"]),
    "plan-a-cluster": ("SETTINGS = [", ["run.iterations=3"]),
}
"""Of each example, the line that a test replaces so that it takes seconds, and what it says instead. A run
lasts longer than its first iterations, after which a worker is killed."""
SMALL = [
    *("rollout.prompts=3", "rollout.seeds_kept=4", "exploration.seeds_tried=8", "train.timesteps=2"),
    *("run.validation_seeds=1", f"data.validation_prompts={VALIDATED[6]}"),
]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    assert cells
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.filterwarnings("ignore")  # of Jupyter's own, which is not ours to mend
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = quick(path, [f"run.dir={tmp_path}", *SMALL])

    client = NotebookClient(
        cells, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()

    shown = [output for cell in cells.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]


def test_the_view_of_a_run_follows_it_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel: of a task on the event loop, and of what a shell is asked to show."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # of another one it would warn
    monkeypatch.setattr(notebook, "REFRESH_S", 0.05)
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)
    shell = InteractiveShell.instance()
    shell.display_pub = publisher = CapturingDisplayPublisher()

    async def look() -> None:
        with directory.lock():
            attach(directory.path)._ipython_display_()
            await asyncio.sleep(0.2)
        await asyncio.gather(*notebook._views)

    try:
        asyncio.run(look())
    finally:
        InteractiveShell.clear_instance()

    first, *updates = publisher.outputs
    assert "running" in first["data"]["text/html"]
    assert first["data"]["text/plain"] == f"<Run {directory.path}: running>"  # what a terminal shows
    assert len(updates) > 1
    assert all(update["update"] for update in updates)
    assert {update["transient"]["display_id"] for update in updates} == {first["transient"]["display_id"]}
    assert "stopped" in updates[-1]["data"]["text/html"]
    assert not notebook._views


def quick(path: Path, more: list[str]) -> Any:
    """The notebook with settings that take seconds."""
    read = nbformat.read(path, as_version=4)
    beginning, settings = QUICK[path.stem]
    replaced = 0
    for cell in read.cells:
        lines = cell.source.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(beginning):
                lines[number] = f"SETTINGS = {[*settings, *more]!r}"
                replaced += 1
        cell.source = "\n".join(lines)
    assert replaced == 1
    return read


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[Run, int]]:
    """A run that another process is at, attached to, and that process."""
    process = start("run", settings_file(tmp_path), "--set", "run.iterations=300")
    try:
        wait_for(lambda: list(tmp_path.glob("run-*/history.jsonl")), process)
        yield attach(next(tmp_path.glob("run-*"))), process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_goes_on_elsewhere_is_seen_as_it_is_and_is_stopped_once_its_driver_is_killed(
    elsewhere: tuple[Run, int],
) -> None:
    run, pid = elsewhere

    during = run.status
    done = wait_for(lambda: len(run.history))
    with pytest.raises(TimeoutError, match="still running"):
        run.wait(0.3)
    with pytest.raises(SpotlightError, match="no cluster here and now: start it, or use the client where it was"):
        _ = run.client
    kill(pid)
    wait_for(lambda: not run.alive)

    assert (during.state, during.workers) == ("running", {"reserved": 1, "spot": 2})
    assert during.usd > 0
    assert 0 < during.elapsed_s < 1000
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/spotlight", during.live_page)
    assert done > 0
    assert run.state == "stopped"
    assert run.status.live_page == ""
    with pytest.raises(SpotlightError, match=r"iteration -1: expected 0 to \d+, so there are no pictures"):
        run.images(-1)
    with pytest.raises(SpotlightError, match=r"iteration 300: expected 0 to \d+, so there are no pictures"):
        run.images(300)
    assert "stopped" in run._repr_html_()
    assert f"its driver, process {pid} on " in run.status.error
    with pytest.raises(Stopped, match=r"ended without a word: killed, .*; resume with: spotlight resume"):
        asyncio.run(awaited(run))


async def awaited(run: Run) -> Any:
    return await run


def test_a_run_that_nobody_started_is_new_and_says_so(tmp_path: Path) -> None:
    run = Run(settings_file(tmp_path))

    assert run.state == "new"
    assert repr(run) == "<Run run: new>"
    assert "not started yet" in run._repr_html_()


def test_the_view_of_a_run_that_failed_says_why(tmp_path: Path) -> None:
    run = Run.into(tmp_path / "made", settings_file(tmp_path), cluster="tcp://127.0.0.1:1").start()
    with pytest.raises(SpotlightError) as failed:
        run.wait()

    assert run.status.error == str(failed.value)
    assert escape(str(failed.value)) in run._repr_html_()


def test_the_view_of_a_run_says_what_it_waits_for_and_who_takes_no_part(tmp_path: Path) -> None:
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)
    with directory.lock():
        status = replace(attach(directory.path).status, refused={"spot-7": "it has <no> memory"})

    assert ("waiting for workers", "reserved and spot") in notebook._facts(status)
    assert notebook._troubles(status) == ["worker spot-7 takes no part: it has <no> memory"]


def test_the_view_of_a_run_prices_only_what_is_known(tmp_path: Path) -> None:
    status = attach(create_run(load(settings_file(tmp_path)), now_s=0.0).path).status
    going_on = replace(status, state="running", iteration=3, usd_reserved_only=2.0)

    assert (AT_RESERVED_PRICES, "–") in notebook._facts(status)
    assert (AT_RESERVED_PRICES, "$2.0000 by the end of iteration 2") in notebook._facts(going_on)
    assert (AT_RESERVED_PRICES, "$2.0000") in notebook._facts(replace(going_on, state="finished"))
    assert (AT_RESERVED_PRICES, "$2.0000") in notebook._facts(replace(going_on, iteration=0))


def test_a_run_of_another_process_is_accounted_for_up_to_its_last_iteration(tmp_path: Path) -> None:
    directory, now_s = create_run(load(settings_file(tmp_path)), now_s=0.0), wall_clock()
    worked = Span(
        worker="reserved-0",
        pool="reserved",
        phase="train",
        iteration=0,
        key="train",
        start_s=now_s - 3800,
        stop_s=now_s - 200,
        outcome="done",
    )
    life = WorkerLife(worker="reserved-0", pool="reserved", joined_s=now_s - 3900, left_s=None, reason="end")
    directory.append(WORKERS, row_of(life))
    directory.append(SPANS, row_of(worked), row_of(replace(worked, start_s=now_s - 100, stop_s=now_s)))
    with directory.lock():
        begun = attach(directory.path).status
        measured = {"started_s": now_s - 3800, "stopped_s": now_s - 200}
        row = HistoryRow(iteration=0, weights_version=1, weights_sha256="", metrics={}, measured=measured)
        directory.append(HISTORY, row_of(row))
        going_on = attach(directory.path).status

    assert (AT_RESERVED_PRICES, "–") in notebook._facts(begun)
    assert (AT_RESERVED_PRICES, "$10.00 by the end of iteration 0") in notebook._facts(going_on)
    assert going_on.wasted_s["idle"] == 0
    assert going_on.usd > 10.5


def test_the_view_of_a_run_that_can_be_read_no_more_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "REFRESH_S", 0.01)
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)
    views: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda view, raw: views.append(view))
    with directory.lock():
        run = attach(directory.path)
        (directory.path / SPANS).write_text("damaged\n")
        asyncio.run(notebook._follow(run, handle))

    assert "not JSON" in views[-1]["text/plain"]
    assert "show the run again" in views[-1]["text/html"]


def test_the_table_of_workers_says_who_is_there_and_how_long_the_others_were() -> None:
    here = WorkerLife(worker="w1", pool="spot", joined_s=86_400.5, left_s=None, reason="end")
    gone = WorkerLife(worker="w0", pool="spot", joined_s=86_400.0, left_s=86_460.0, reason="lost")

    table = notebook.workers_frame([here, gone])

    assert list(table["worker"]) == ["w0", "w1"]
    assert list(table["alive"]) == [False, True]
    assert [table["seconds"][0], np.isnan(table["seconds"][1])] == [60.0, True]
    assert table["joined"][0].isoformat() == "1970-01-02T00:00:00+00:00"
    assert list(notebook.workers_frame([])) == list(table)


def test_pictures_are_told_in_a_terminal_without_their_bytes() -> None:
    picture = Picture(prompt="a sign", seed=7, explored_reward=None, reward=0.5, url="data:image/png;base64,AAAA")

    shown = notebook.Images([picture, picture])
    assert repr(shown) == "<2 pictures>"
    assert repr(shown[1:]) == "<1 pictures>"  # and a notebook shows it
    assert shown[-1] is picture
    assert "base64" not in repr(picture)


def test_pictures_are_those_of_the_seeds_that_were_trained_on(tmp_path: Path) -> None:
    """Of rollouts, which may be several requests, or of what exploration drew; without a score there is none."""
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)
    first, again, other, unscored = (Prompt(id=number, text=f'a "{number}"') for number in range(4))
    drawn = (Drawn(seeds=(5, 6, 7), rewards=(0.1, None, 0.3)), Drawn(seeds=(8,), rewards=(0.4,)))
    selection = Selection(
        iteration=3,
        kept=(
            Kept(prompt=first, seeds=(1, 2, 3), explored_rewards=(0.5, None, 0.7)),
            Kept(prompt=again, seeds=(5, 7, 8), explored_rewards=(0.1, 0.3, 0.4), drawn=drawn),
            Kept(prompt=other, seeds=(10, 11), explored_rewards=(None, None)),
            Kept(prompt=unscored, seeds=(12,), explored_rewards=(None,)),
        ),
        seeds_scored=0,
        seeds_dropped=0,
    )
    assert pictures(directory, selection) == []
    store = LatentStore(directory.latents_url)
    store.put_record("scores/00003-rollout-00000-1", {"rewards": [1.0, 2.0], "thumbnails": ["r1", "r2"]})
    store.put_record("scores/00003-rollout-00000-3", {"rewards": [3.0]})
    store.put_record("scores/00003-explore-00001-5", {"rewards": [9.0] * 3, "thumbnails": ["e5", "e6", "e7"]})
    store.put_record("scores/00003-rollout-00002-11", {"rewards": [None], "thumbnails": ["r11"]})

    found = pictures(directory, selection)

    assert [(each.prompt, each.seed, each.explored_reward, each.reward, each.url) for each in found] == [
        ('a "0"', 1, 0.5, 1.0, "r1"),
        ('a "0"', 2, None, 2.0, "r2"),
        ('a "0"', 3, 0.7, 3.0, ""),
        ('a "1"', 5, 0.1, 0.1, "e5"),
        ('a "1"', 7, 0.3, 0.3, "e7"),
        ('a "1"', 8, 0.4, 0.4, ""),
        ('a "2"', 11, None, None, "r11"),
    ]


@pytest.mark.parametrize(
    ("shape", "kind", "size"),
    [
        ((64, 32), "png", (32, 64)),
        ((65, 32), "jpeg", (32, 65)),
        ((32, 65), "jpeg", (65, 32)),
        ((512, 256), "jpeg", (64, 128)),
    ],
)
def test_a_small_picture_stays_as_it_is_and_a_large_one_is_made_small(
    shape: tuple[int, int], kind: str, size: tuple[int, int]
) -> None:
    url = thumbnail(np.zeros((*shape, 3), np.uint8))

    head, content = url.split(",")
    assert head == f"data:image/{kind};base64"
    assert Image.open(BytesIO(b64decode(content))).size == size


def test_to_look_at_a_run_takes_its_lock_from_nobody(tmp_path: Path) -> None:
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)

    with directory.lock():
        assert attach(directory.path).alive
    assert not attach(directory.path).alive
    with directory.lock():
        pass


def test_a_view_of_a_long_run_reads_at_each_look_only_what_is_new(tmp_path: Path) -> None:
    run = create_run(load(settings_file(tmp_path)), now_s=0.0)
    joined_s = wall_clock() - 100
    lives = [WorkerLife(worker=f"spot-{n}", pool="spot", joined_s=joined_s, left_s=None, reason="") for n in range(2)]
    work = Span(
        worker="spot-0",
        pool="spot",
        phase="rollout",
        iteration=0,
        key="k",
        start_s=joined_s + 10,
        stop_s=joined_s + 30,
        outcome="done",
        uncommitted_s=None,
        redone_s=0.0,
    )
    run.append(SPANS, row_of(work))
    run.append(WORKERS, *map(row_of, lives))

    with run.lock():
        seen = attach(run.path)
        first = seen.status
        run.append(SPANS, row_of(replace(work, worker="spot-1")))
        run.rewrite(WORKERS, [row_of(replace(lives[0], left_s=joined_s + 50, reason="lost")), row_of(lives[1])])
        second = seen.status
        run.rewrite(SPANS, [row_of(work)])
        third = seen.status

    assert (first.workers, first.preemptions) == ({"spot": 2}, 0)
    assert (second.workers, second.preemptions) == ({"spot": 1}, 1)
    assert first.spot_utilisation == pytest.approx(20 / 200, rel=0.2)
    assert second.spot_utilisation == pytest.approx(40 / 150, rel=0.2)
    assert third.spot_utilisation == pytest.approx(20 / 150, rel=0.2)


def test_there_is_no_picture_of_what_did_not_happen(tmp_path: Path) -> None:
    run = attach(create_run(load(settings_file(tmp_path)), now_s=0.0).path)

    with pytest.raises(SpotlightError, match="nothing to draw"):
        run.plot()
    with pytest.raises(SpotlightError, match="'reward', 'timeline', 'before-after'"):
        run.plot("costs")  # type: ignore[arg-type]
    with pytest.raises(SpotlightError, match="iteration = '1': give a whole number"):
        run.images("1")  # type: ignore[arg-type]
    with pytest.raises(SpotlightError, match="no iteration is finished yet"):
        run.images()
    assert run.workers.empty


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attach(create_run(load(settings_file(tmp_path)), now_s=0.0).path)

    def read_only(path: Path) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("spotlight.report.page.atomic_write", read_only)
    with pytest.raises(SpotlightError, match=f"{run.directory.path}: cannot be written: .*Read-only.*make room"):
        run.report()
