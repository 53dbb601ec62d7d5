"""The report of a synthetic run, of runs cut short, and of what is no run at all."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from browser import CHROMIUM, browser
from factories import make_request
from runs import ROOT, settings_file
from spotlight import config
from spotlight.device.learning_model import MODEL
from spotlight.display import _Display, status_table, summary_table, terminal
from spotlight.market.ledger import Price, pool_usd
from spotlight.notebook import plot
from spotlight.records import Prompt, Quarantined, SpotlightError
from spotlight.report import PHASE_COLOURS, base_phase, history_frame, phase_colour, write_report
from spotlight.report.facts import COLUMNS, LANES_MAX, read
from spotlight.report.money import WASTE, bought, rows
from spotlight.report.page import HIDDEN, METRICS, _cards
from spotlight.report.pictures import _target, draw
from spotlight.report.plots import money_plot, reward_plot, spending_plot, timeline_plot
from spotlight.run import Run
from spotlight.shell import main
from spotlight.simulation import Learning, Simulation
from spotlight.store.creating import create_run
from spotlight.store.rows import SIMULATED
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import validation_images

START_S = 1_700_000_000.0
ITERATION_S, TRAIN_S = 4.0, 1.5
SPOTS = 2


def write_run(
    run_dir: Path,
    *,
    iterations: int = 8,
    spots: int = SPOTS,
    prompts: int = 5,
    until: str = "end",
    name: str = "ocr-tiny",
) -> Path:
    """A run directory as a run of so many iterations would leave it: one loss, stale exploration.

    Args:
        until: the file that the run got to before it was stopped; "config.toml", "history.jsonl" or "end".
    """
    (run_dir / "images").mkdir(parents=True)
    settings = config.resolve(
        {
            "run": {"name": name, "iterations": iterations},
            "data": {"train_prompts": "a.txt", "validation_prompts": "b.txt"},
            "pools": {"reserved": {"workers": 1, "usd_per_h": 10.47}, "spot": {"workers": spots, "usd_per_h": 2.66}},
        },
        run_dir,
    )
    (run_dir / config.RESOLVED).write_text(config.dump(settings))
    if until == "config.toml":
        return run_dir
    write_jsonl(run_dir / "history.jsonl", (_history_line(k, iterations) for k in range(iterations)))
    if until == "history.jsonl":
        return run_dir
    random = np.random.default_rng(0)
    workers = ["reserved-0", *(f"spot-{n}" for n in range(spots))]
    lost_k, stop_s = iterations // 2, START_S + 1 + iterations * ITERATION_S
    lost_s = START_S + 1 + lost_k * ITERATION_S + 0.4
    spans = [_span(workers[-1], "rollout", lost_k, f"{lost_k}-lost", lost_s - 0.4, lost_s, "lost")]
    for k in range(iterations):
        alive = workers if k < lost_k else workers[:-1] if k < lost_k + 2 else [*workers[:-1], f"spot-{spots}"]
        spans += _span_lines(k, alive, random)
    write_jsonl(run_dir / "spans.jsonl", spans)
    joined = [_life(worker, START_S + n / 4, None, "end") for n, worker in enumerate(workers)]
    joined[-1] |= {"left_s": lost_s, "reason": "lost"}
    write_jsonl(run_dir / "workers.jsonl", [*joined, _life(f"spot-{spots}", lost_s + 7, stop_s, "end")])
    validation = [
        _validation_line(run_dir, version, prompts, 0.5 + 0.3 * version / iterations, random)
        for version in (0, iterations // 2, iterations)
    ]
    write_jsonl(run_dir / "validation.jsonl", validation)
    summary = {"score_before": 0.52, "score_after": 0.81, "iterations": iterations, "wall_s": stop_s - START_S}
    summary |= {"usd": 0.62, "usd_wasted": 0.01, "usd_reserved_only": 1.19, "preemptions": 1, "first_image_s": 7.25}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def write_jsonl(path: Path, values: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _history_line(k: int, iterations: int) -> dict[str, Any]:
    learned = 1 - np.exp(-2 * k / iterations)
    metrics = {
        "reward_mean": 0.5 + 0.3 * learned + 0.02 * np.sin(9.0 * k),
        "reward_std": 0.22 - 0.08 * learned,
        **({"explored_reward_mean": 0.44 + 0.3 * learned + 0.02 * np.cos(7.0 * k)} if k else {}),
        "zero_std_ratio": 0.05 + 0.2 * learned,
        "rank_correlation": 0.8 - 0.1 * learned + 0.03 * np.sin(5.0 * k),
        "seeds_scored": 250 - k,
        "loss": 0.9 - 0.1 * learned,
    }
    started_s = START_S + 1 + k * ITERATION_S
    measured = {"wall_s": ITERATION_S, "train_s": TRAIN_S, "usd": 0.0175, "spot_utilisation": 0.93, "preemptions": 0}
    measured |= {"started_s": started_s, "stopped_s": started_s + ITERATION_S}
    return {"iteration": k, "weights_version": k + 1, "weights_sha256": "ab", "metrics": metrics, "measured": measured}


def _span_lines(k: int, workers: list[str], random: np.random.Generator) -> Iterable[dict[str, Any]]:
    """One iteration: everyone rolls out, the reserved worker trains while the spot workers explore."""
    start_s = START_S + 1 + k * ITERATION_S
    rolled_s = start_s + 2.0
    trained_s = rolled_s + 0.2 + TRAIN_S
    for worker in workers:
        at_s = start_s
        for n in range(2):
            for phase, lasts_s in (("rollout", 0.7), ("score", 0.25)):
                stop_s = at_s + lasts_s * random.uniform(0.9, 1.05)
                yield _span(worker, phase, k, f"{k}-{n}", at_s, stop_s)
                at_s = stop_s
        if worker == "reserved-0":
            yield _span(worker, "train", k, f"train-{k}", rolled_s + 0.2, trained_s)
            yield _span(worker, "publish", k, f"publish-{k}", trained_s, trained_s + 0.1)
            continue
        while at_s < trained_s:
            for phase, lasts_s in (("explore", 0.32), ("explore-score", 0.12)):
                stop_s = min(at_s + lasts_s * random.uniform(0.9, 1.1), trained_s)
                yield _span(
                    worker, f"{phase}-r0", k + 1, f"x{k}", at_s, stop_s, "dropped" if stop_s == trained_s else "done"
                )
                at_s = stop_s


def _span(
    worker: str, phase: str, k: int, key: str, start_s: float, stop_s: float, outcome: str = "done"
) -> dict[str, Any]:
    pool = worker.split("-")[0]
    what = {"worker": worker, "pool": pool, "phase": phase, "iteration": k, "key": key}
    return what | {"start_s": start_s, "stop_s": stop_s, "outcome": outcome}


def _life(worker: str, joined_s: float, left_s: float | None, reason: str) -> dict[str, Any]:
    return {"worker": worker, "pool": worker.split("-")[0], "joined_s": joined_s, "left_s": left_s, "reason": reason}


def _validation_line(
    run_dir: Path, version: int, prompts: int, score: float, random: np.random.Generator
) -> dict[str, Any]:
    images = f"images/validation-{version:05d}.npz"
    texts = np.array([f'A sign that reads "{10 + n}"' for n in range(prompts)])
    pixels = random.integers(0, 256, (prompts, 16, 32, 1), dtype=np.uint8).repeat(3, axis=-1)
    np.savez(run_dir / images, images=pixels, texts=texts)
    rewards = (random.uniform(-0.2, 0.2, prompts) + score).round(2).tolist()
    at_s = START_S + 1 + version * ITERATION_S
    return {"version": version, "score": float(np.mean(rewards)), "at_s": at_s, "images": images, "rewards": rewards}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended well, with its report; tests only read it."""
    run_dir = write_run(tmp_path_factory.mktemp("finished") / "run")
    write_report(run_dir)
    return run_dir


def page_of(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def test_a_report_is_one_file_that_needs_no_network(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")

    fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=[\"']([^\"']+)", page)

    assert fetched
    assert all(address.startswith("data:image/png;base64,") for address in fetched)


def test_the_headline_repeats_the_summary(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")

    assert "0.52 → 0.81" in page
    assert "$0.62" in page
    assert "$1.19" in page
    assert "Not in this run directory" not in page


def test_a_run_for_less_than_a_cent_has_its_cost_in_the_headline(finished: Path) -> None:
    facts = read(finished)
    assert facts.summary

    cards = _cards(replace(facts, summary=replace(facts.summary, usd=0.0041, usd_reserved_only=0.0123)))

    assert "$0.0041" in cards
    assert "$0.0123 (3.0 ×)" in cards


def test_every_worker_and_phase_is_on_the_page_in_its_colour(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")

    assert all(f'"spot-{n}"' in page for n in range(SPOTS + 1))
    assert all(
        PHASE_COLOURS[phase] in page for phase in ("rollout", "score", "train", "publish", "explore", "explore-score")
    )


def test_the_page_embeds_the_grid_that_it_writes(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")

    (embedded,) = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', page)

    assert base64.b64decode(embedded) == (finished / "images/before-after.png").read_bytes()


def test_of_many_workers_the_page_counts_all_and_shows_some_of_every_pool(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", spots=150)
    facts = read(run_dir)
    shown, every = facts.closer().lanes(), facts.lanes()

    page = page_of(run_dir)

    assert len(shown) <= LANES_MAX < len(every)
    assert ("reserved", "reserved-0") in shown
    assert f"a lane for each of {len(shown)} of its {len(every)} workers, evenly chosen, in" in page
    assert set(re.findall(r'"(spot-\d+)"', page)) == {worker for pool, worker in shown if pool == "spot"}


def test_of_a_long_run_a_few_iterations_are_shown_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read(write_run(tmp_path / "run", iterations=20))
    assert not facts.is_crowded()
    monkeypatch.setattr("spotlight.report.facts.SPANS_MAX", len(facts.spans) - 1)

    start_s, stop_s = facts.zoom()
    shown = facts.closer().spans

    assert facts.is_crowded()
    assert 0 < len(shown) < len(facts.spans) / 2
    assert all(span.stop_s > start_s and span.start_s < stop_s for span in shown)
    assert any(span.outcome == "lost" for span in shown)
    assert "a lane for each of its 4 workers, in the iterations" in page_of(facts.dir)


def test_the_closer_look_is_around_the_first_loss_or_else_in_the_middle(tmp_path: Path) -> None:
    facts = read(write_run(tmp_path / "run", iterations=20))
    first_end_s = 1 + 2.2 + TRAIN_S
    (lost,) = (span for span in facts.spans if span.outcome == "lost")

    def zoom(*losses_s: float) -> list[int]:
        """Iterations whose training ends where the closer look begins and ends."""
        spans = [*(replace(lost, stop_s=at_s) for at_s in losses_s), *(span for span in facts.spans if span != lost)]
        return [round((at_s - first_end_s) / ITERATION_S) for at_s in replace(facts, spans=spans).zoom()]

    assert zoom() == [8, 12]
    assert zoom(first_end_s + 4.5 * ITERATION_S, first_end_s + 9.5 * ITERATION_S) == [3, 7]
    assert zoom(0.5) == [0, 4]
    assert zoom(facts.whole[1]) == [15, 19]
    short = read(write_run(tmp_path / "short", iterations=5))
    assert short.zoom() == short.whole


def test_the_seconds_of_a_run_of_days_are_written_out(finished: Path) -> None:
    facts = read(finished)

    axes = [plot.xaxis[0] for plot in (*timeline_plot(facts).children, money_plot(facts))]

    assert [axis.formatter.use_scientific for axis in axes] == [False, False, False]  # by default 1.000e+5


def test_the_counted_workers_are_those_of_the_records(finished: Path) -> None:
    facts = read(finished)

    at_s, counts = facts.counts()

    step_s = at_s[1] - at_s[0]
    assert counts.keys() - {"idle"} == {base_phase(span.phase) for span in facts.spans}
    for phase, spans in facts.by_phase().items():
        assert counts[phase].sum() * step_s == pytest.approx(sum(span.stop_s - span.start_s for span in spans))
    stays_s = sum(stop_s - start_s for _, (start_s, stop_s) in facts.alive())
    assert np.sum(list(counts.values())) * step_s == pytest.approx(stays_s)


def test_workers_and_phases_are_in_the_order_that_people_expect(tmp_path: Path) -> None:
    facts = read(write_run(tmp_path / "run", iterations=2, spots=11))
    spans = [*(replace(span, phase="later") for span in facts.spans[:1]), *facts.spans[::-1]]
    mixed = replace(facts, spans=spans, workers=facts.workers[::-1])

    assert mixed.lanes() == [("reserved", "reserved-0"), *(("spot", f"spot-{n}") for n in range(12))]
    assert [*mixed.by_phase()] == ["rollout", "score", "train", "publish", "explore", "explore-score", "later"]
    assert [*mixed.money()[1]] == ["reserved", "spot"]


def test_images_from_outside_of_the_run_are_not_shown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=1)
    facts = read(run_dir)
    within = facts.validation[0]
    (run_dir / within.images).rename(tmp_path / "other.npz")

    assert validation_images(tmp_path / "other.npz", len(within.rewards))
    assert facts.images(replace(within, images="../other.npz")) is None
    assert facts.images(facts.validation[-1])


def test_bands_show_when_a_worker_trained_and_nothing_else(finished: Path) -> None:
    lasted_s = [stop_s - start_s for start_s, stop_s in read(finished).training()]

    assert lasted_s == pytest.approx([TRAIN_S] * 8)


@pytest.mark.parametrize("name", ["reward", "timeline", "before-after"])
def test_a_picture_shows_more_than_a_blank_sheet(finished: Path, name: str) -> None:
    pixels = imread(finished / f"images/{name}.png")[..., :3]

    assert np.unique(pixels.reshape(-1, 3), axis=0).shape[0] > len(PHASE_COLOURS)


@pytest.mark.parametrize(
    ("until", "missing"),
    [
        ("config.toml", ["history.jsonl", "validation.jsonl", "spans.jsonl", "workers.jsonl", "summary.json"]),
        ("history.jsonl", ["validation.jsonl", "spans.jsonl", "workers.jsonl", "summary.json"]),
    ],
)
def test_a_run_that_stopped_early_says_what_is_missing(tmp_path: Path, until: str, missing: list[str]) -> None:
    page = page_of(write_run(tmp_path / "run", until=until))

    assert re.findall(r"<li>([a-z]+\.[a-z]+):", page) == missing


def test_without_a_summary_the_records_are_added_up(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=8, spots=1)
    (run_dir / "summary.json").unlink()
    # One reserved worker lives for 1 + 8 x 4 = 33 s, the spot workers from 0.25 s to the loss at
    # 1 + 4 x 4 + 0.4 = 17.4 s and from 24.4 s to 33 s.
    usd = (33 * 10.47 + (17.4 - 0.25 + 33 - 24.4) * 2.66) / 3600

    page = page_of(run_dir)

    assert f"${usd:.4f}" in page
    assert "first image after" not in page  # only the driver knows it


@pytest.mark.parametrize("ended", [True, False])
def test_a_reserved_worker_that_was_lost_is_no_preemption_but_is_told(tmp_path: Path, ended: bool) -> None:
    run_dir = write_run(tmp_path / "run")
    lives = [json.loads(line) for line in (run_dir / "workers.jsonl").read_text().splitlines()]
    (reserved,) = [life for life in lives if life["pool"] == "reserved"]
    write_jsonl(run_dir / "workers.jsonl", [*lives, reserved | {"left_s": START_S + 9, "reason": "lost"}])
    if not ended:
        (run_dir / "summary.json").unlink()

    page = page_of(run_dir)

    assert "<h3>Preemptions</h3><b>1</b><span>spot workers lost on the way; 1 reserved, too</span>" in page
    if ended:
        names, texts = (list(column.cells) for column in summary_table(RunDir(run_dir)).columns)
        told = list(zip(names, texts, strict=True))
        assert told[:3] == [
            ("validation score", "0.520 -> 0.810  (+0.290)"),
            ("iterations", "8"),
            ("wall time", "33.0 s (first image after 7.250 s)"),
        ]
        assert told[-2:] == [
            ("preemptions survived", "1"),
            ("reserved workers lost", "1, and survived"),
        ]


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_the_page_fits_a_narrow_window(finished: Path) -> None:
    async def is_too_wide() -> tuple[bool, list[str]]:
        async with browser() as page:
            await page.open((finished / "report.html").as_uri(), width_px=480)
            return bool(await page.js("document.documentElement.scrollWidth > window.innerWidth")), page.errors

    assert asyncio.run(is_too_wide()) == (False, [])


def test_the_page_says_where_every_dollar_went(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")

    (section,) = re.findall(r"<h2>Where the dollars went</h2>.*?</section>", page, flags=re.DOTALL)

    # The reserved worker lives from 0 s to the last moment, 1 + 8 x 4 = 33 s.
    assert "<td>33.0</td>" in section
    assert all(name in section for name in ("rollout", "train", "explore", "idle", "start-up", "dropped exploration"))
    assert "repeated steps" not in section
    assert "<td>100.0%</td>" in section


def test_page_and_shell_list_every_kind_of_waste_and_what_dollars_bought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    begins_s = START_S + 1 + 3 * ITERATION_S
    again = _span("spot-0", "rollout", 2, "again", begins_s - 0.1, begins_s) | {"redone_s": 0.1}
    with (run_dir / "spans.jsonl").open("a") as journal:
        journal.write(json.dumps(again) + "\n")

    main(["cost", str(run_dir)])

    shown = [capsys.readouterr().out, page_of(run_dir)]
    names = [name for name, _ in WASTE.values()] + [name for name, _ in bought(read(run_dir).ledger)]
    assert set(WASTE) == {kind for kind, seconds in read(run_dir).ledger.wasted_s.items() if seconds}
    assert [name for text in shown for name in names if name not in text] == []


def test_the_account_can_be_read_on_a_narrow_terminal(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    main(["cost", str(finished)])

    said = capsys.readouterr().out
    assert "100.0%" in said
    assert "\u2026" not in said


@pytest.mark.parametrize(("columns", "pools"), [("60", 0), ("", 3)])
def test_a_long_account_of_three_pools_is_never_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, pools: int
) -> None:
    """On a narrow terminal all pools together, in a file each of them; in hours and whole cents."""
    run_dir = write_run(tmp_path / "run", iterations=3)
    lives = [_life("reward-0", START_S, START_S + 5e6, "end") | {"pool": "reward"}]
    lives += [json.loads(line) for line in (run_dir / "workers.jsonl").read_text().splitlines()]
    write_jsonl(run_dir / "workers.jsonl", lives)
    monkeypatch.setenv("COLUMNS", columns)

    main(["cost", str(run_dir)])

    said = capsys.readouterr().out
    assert "\u2026" not in said
    assert sum(f"{pool} h" in said for pool in ("reserved", "spot", "reward")) == pools
    assert ("a wider terminal" in said) == (not pools)
    assert re.search(r"1,38\d\.\d", said)


def test_texts_with_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run [spot]", iterations=1)
    status = replace(Run.attach(run_dir).status, state="failed", error="no worker: [/mnt/w] is full :warning:")
    console = terminal()

    main(["cost", str(run_dir)])
    console.print(status_table(status))
    _Display(console).show(replace(status, refused={"w1": "no [/dev/shm] here"}))

    said = capsys.readouterr().out
    assert said.count("run [spot]") == 2
    assert all(text in said for text in ("[/mnt/w] is full :warning:", "no [/dev/shm] here"))


def test_a_run_that_was_resumed_after_a_day_is_shown_side_by_side_with_its_beginning(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=4)
    before, middle_s, day_s = read(run_dir), START_S + 1 + 2 * ITERATION_S, 86_400.0
    spans = [json.loads(line) for line in (run_dir / "spans.jsonl").read_text().splitlines()]
    later = [span for span in spans if span["start_s"] >= middle_s - 1e-6]
    for span in later:
        span |= {"start_s": span["start_s"] + day_s, "stop_s": span["stop_s"] + day_s}
    first = [json.loads(line) for line in (run_dir / "workers.jsonl").read_text().splitlines()][:-1]
    ended = [life | {"left_s": middle_s, "reason": "end"} for life in first]
    again = [life | {"joined_s": middle_s + day_s, "left_s": None} for life in first]
    write_jsonl(run_dir / "spans.jsonl", spans)
    write_jsonl(run_dir / "workers.jsonl", [*ended, *again])
    (run_dir / "validation.jsonl").write_text("")

    facts = read(run_dir)
    page = page_of(run_dir)

    assert np.array(facts.breaks) == pytest.approx(np.array([(middle_s - START_S, day_s)]))
    assert facts.whole[1] < 2 * before.whole[1]
    assert max(span.stop_s for span in facts.spans) == pytest.approx(max(span.stop_s for span in before.spans), abs=0.1)
    assert "the run had no worker for 24 h 00 min" in page
    assert facts.money()[1]["spot"][-1] == pytest.approx(facts.ledger.usd(pool="spot"))


def test_a_script_without_a_font_here_warns_nobody(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=1)
    for path in (run_dir / "images").glob("*.npz"):
        found = dict(np.load(path))
        np.savez(path, **found | {"texts": np.array(['a sign that says "\u4f60\n\u597d"'] * len(found["texts"]))})

    write_report(run_dir)  # warnings are errors here
    plot(run_dir, "before-after")._repr_png_()

    assert _target('a sign that says "\u4f60\n\u597d"') == "\u4f60 \u597d"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ('a sign that says "47"', "47"),
        ('say "" now', 'say "" now'),
        ('say " " now', 'say " " now'),
        ('6" tall', '6" tall'),
        ('"a longer text than fits"', "a longer text…"),
        ("", ""),
    ],
)
def test_a_picture_is_titled_by_what_is_to_be_written_or_else_by_its_prompt(text: str, title: str) -> None:
    assert _target(text) == title


def test_dollar_signs_are_shown_as_they_are_and_not_read_as_formulas(tmp_path: Path) -> None:
    """Matplotlib would take what stands between two of them for TeX."""
    run_dir = write_run(tmp_path / "run", iterations=1)
    for name in ("spans.jsonl", "workers.jsonl"):
        (run_dir / name).write_text((run_dir / name).read_text().replace("spot-1", r"$\\frac$"))
    for path in (run_dir / "images").glob("*.npz"):
        found = dict(np.load(path))
        np.savez(path, **found | {"texts": np.array([r'a sign that says "$\frac$"'] * len(found["texts"]))})

    write_report(run_dir)
    shown = {what: plot(run_dir, what) for what in ("timeline", "before-after")}

    assert all(picture._repr_png_() for picture in shown.values())
    assert r"$\frac$" in [label.get_text() for label in shown["timeline"].figure.axes[0].get_yticklabels()]
    assert shown["before-after"].figure.axes[0].get_title() == r"$\frac$"


def test_a_pool_of_free_workers_has_its_seconds_drawn(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=1)
    ledger = read(run_dir).ledger
    free = replace(ledger, entries=tuple(replace(each, usd=0.0, usd_reserved=0.0) for each in ledger.entries))

    plots = spending_plot(ledger), spending_plot(free)

    assert [str(plot.xaxis[0].axis_label)[:7] for plot in plots] == ["US doll", "seconds"]
    assert [bool(plot.renderers) for plot in plots] == [True, True]


def test_the_ledger_and_the_curve_of_dollars_end_alike(finished: Path) -> None:
    facts = read(finished)

    _, pools, reserved_only = facts.money()

    assert {pool: usd[-1] for pool, usd in pools.items()} == pytest.approx(
        {pool: facts.ledger.usd(pool=pool) for pool in pools}
    )
    assert reserved_only[-1] == pytest.approx(facts.ledger.usd_reserved_only)


def test_the_curve_of_dollars_follows_prices_that_change(finished: Path) -> None:
    facts = read(finished)
    changes_s = tuple(np.linspace(*facts.whole, 7))
    prices = {"reserved": Price.constant(10.0), "spot": Price(times_s=changes_s, usd_per_h=(1, 9, 2, 8, 3, 7, 4))}

    at_s, pools, _ = replace(facts, prices=prices).money()

    spent = [pool_usd(facts.workers, prices, (0.0, until_s)) for until_s in at_s]
    for pool, usd in pools.items():
        assert usd == pytest.approx([each.get(pool, 0.0) for each in spent])


def test_the_rows_of_the_account_add_up(finished: Path) -> None:
    ledger = read(finished).ledger

    *parts, whole = rows(ledger)

    assert sum(sum(row.seconds.values()) for row in parts if not row.is_sum) == pytest.approx(ledger.seconds())
    assert sum(row.share for row in parts if row.is_sum) == pytest.approx(whole.share) == pytest.approx(1.0)


def test_the_shell_says_what_a_run_cost(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["cost", str(finished)])

    out = capsys.readouterr().out
    assert status == 0
    assert all(name in out for name in ("rollout", "wasted", "per iteration (8)", "useful seconds at reserved prices"))
    assert "as far as it is recorded" not in out


def test_a_clock_that_is_behind_those_of_a_run_takes_nothing_off_its_account(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["cost", str(finished)])
    told, spent = capsys.readouterr().out, Run.attach(finished).status.usd
    for module in ("spotlight.run", "spotlight.shell"):
        monkeypatch.setattr(f"{module}.wall_clock", lambda: START_S)

    assert main(["cost", str(finished)]) == 0
    assert capsys.readouterr().out == told
    assert Run.attach(finished).status.usd == spent > 0


def test_the_shell_gives_machines_every_column(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["cost", str(finished), "--json"])

    account = json.loads(capsys.readouterr().out)
    assert account["seconds"] == pytest.approx(sum(entry["seconds"] for entry in account["entries"]))
    assert account["usd"] == pytest.approx(sum(account["usd_by_pool"].values()))
    assert account["usd_per_iteration"] == pytest.approx(account["usd"] / 8)


def test_the_cost_of_a_run_without_workers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["cost", str(write_run(tmp_path / "run", until="history.jsonl"))])

    assert status == 1
    assert "workers.jsonl: is missing or empty" in capsys.readouterr().err


def test_the_cost_of_a_run_that_has_not_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()

    main(["cost", str(run_dir)])

    assert "as far as it is recorded" in " ".join(capsys.readouterr().out.split())


def test_what_was_set_aside_is_listed_with_its_prompt_and_seeds(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    request = make_request(prompt=Prompt(id=3, text="a <b>sign</b>"), seeds=(11, 12), iteration=4)
    write_jsonl(run_dir / "quarantined.jsonl", [asdict(Quarantined(request=request, preemptions=5))])

    page = write_report(run_dir).read_text()

    assert "<tr><th>a &lt;b&gt;sign&lt;/b&gt;</th><td>4</td><td>11, 12</td><td>5</td></tr>" in page


EVIL = "<script>alert(1)</script>"


def test_a_prompt_that_was_quarantined_cannot_become_markup(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    request = make_request(prompt=Prompt(id=3, text=EVIL))
    write_jsonl(run_dir / "quarantined.jsonl", [asdict(Quarantined(request=request, preemptions=5))])

    page = page_of(run_dir)

    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 1


@pytest.mark.parametrize("evil", [{"iteration": EVIL}, {"seeds": [EVIL]}, {"sigmas": EVIL}])
def test_a_quarantined_request_of_another_shape_is_refused(tmp_path: Path, evil: dict[str, object]) -> None:
    run_dir = write_run(tmp_path)
    row = {"request": asdict(make_request()) | evil, "preemptions": 5}
    write_jsonl(run_dir / "quarantined.jsonl", [row])

    with pytest.raises(SpotlightError, match=r"quarantined\.jsonl:1: request\.\w+"):
        write_report(run_dir)


@pytest.mark.parametrize("learning", ["modelled", "real"])
def test_a_simulated_run_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str], learning: str) -> None:
    run_dir = write_run(tmp_path)
    live = page_of(run_dir)
    main(["cost", str(run_dir), "--json"])
    live_account = json.loads(capsys.readouterr().out)
    (run_dir / SIMULATED).write_text(json.dumps({"learning": learning, "strategy": "no exploration"}))

    page = page_of(run_dir)
    main(["cost", str(run_dir), "--json"])
    account = json.loads(capsys.readouterr().out)
    main(["cost", str(run_dir)])
    table = " ".join(capsys.readouterr().out.split())

    said = f"SIMULATED: durations by the cost model, learning {learning}"
    assert "SIMULATED" not in live
    assert "<title>SIMULATED: ocr-tiny: no exploration" in page
    assert said in page
    assert said in table
    assert (live_account["simulated"], account["simulated"]) == ("", learning)
    assert (MODEL in page) == (learning == "modelled")


def test_images_of_a_modelled_device_are_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    pages = {}
    for learning in ("real", "modelled"):
        (run_dir / SIMULATED).write_text(json.dumps({"learning": learning}))
        pages[learning] = page_of(run_dir)

    assert "Before and after" in pages["real"]
    assert "Before and after" not in pages["modelled"]


def test_paced_devices_are_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, iterations=1)
    plain = write_report(run_dir).read_text()
    settings = config.RESOLVED
    text = (run_dir / settings).read_text()
    (run_dir / settings).write_text(text.replace('gpu = ""\nmodel', 'gpu = "h100"\nmodel'))

    paced = write_report(run_dir).read_text()

    main(["cost", str(run_dir)])
    assert "PACED" in paced
    assert "PACED" not in plain
    assert "PACED: qwen-image on h100 is emulated" in " ".join(capsys.readouterr().out.split())


def test_a_run_whose_sums_have_no_fixed_order_is_named_as_such(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, iterations=1)
    plain = write_report(run_dir).read_text()
    text = (run_dir / config.RESOLVED).read_text()
    (run_dir / config.RESOLVED).write_text(text.replace("deterministic = true", "deterministic = false"))

    assert "NOT DETERMINISTIC" in write_report(run_dir).read_text()
    assert "NOT DETERMINISTIC" not in plain


@pytest.mark.parametrize(
    ("exploration", "ahead", "said"),
    [
        ("stale", 0, "amber below it is exploration for the next iteration"),
        ("blocking", 0, "Amber is exploration, which each rollout (blue) waits for"),
        ("off", 0, "In the blue bands a worker rolls out, in the violet ones it trains"),
        ("off", 1, "blue beside it are the first rollouts of the next iteration"),
    ],
)
def test_the_lanes_are_explained_by_what_the_run_does(tmp_path: Path, exploration: str, ahead: int, said: str) -> None:
    run_dir = write_run(tmp_path, iterations=1)
    text = (run_dir / config.RESOLVED).read_text().replace("prompts_ahead = 0", f"prompts_ahead = {ahead}")
    (run_dir / config.RESOLVED).write_text(text.replace('exploration = "stale"', f'exploration = "{exploration}"'))

    page = page_of(run_dir)

    assert said in page
    assert ("amber" in page.lower().partition("<section>")[2]) == (exploration != "off")
    assert ("seeds that were explored" in page) == (exploration != "off")
    assert "trained on as they were drawn" not in page
    (run_dir / config.RESOLVED).write_text(
        (run_dir / config.RESOLVED).read_text().replace("reuse = false", "reuse = true")
    )
    reused = page_of(run_dir)
    assert ("trained on as they were drawn" in reused) == (exploration != "off")
    earlier = "one version earlier than the samples chosen from them"
    assert ((earlier in page), (earlier in reused)) == (exploration == "stale", False)


def test_explored_seeds_are_not_called_stale_for_their_weights_may_be_the_present_ones(finished: Path) -> None:
    facts = read(finished)
    (legend,), figure = reward_plot(facts).legend, draw(facts, "reward")
    assert figure

    called = [item.label.value for item in legend.items] + figure.axes[0].get_legend_handles_labels()[1]

    assert [name for name in called if "explored" in name or "stale" in name] == ["explored seeds"] * 2


def test_a_terminal_that_has_no_sign_for_times_shows_the_account_all_the_same(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, iterations=1)
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}

    done = subprocess.run([sys.executable, "-m", "spotlight", "cost", str(run_dir)], cwd=ROOT, env=plain, check=False)

    assert done.returncode == 0


def test_unreadable_images_cost_only_the_grid(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    for path in (run_dir / "images").glob("*.npz"):
        path.write_bytes(b"not an archive")

    page = page_of(run_dir)

    assert "What every worker did" in page
    assert "Before and after" not in page


@pytest.mark.parametrize("damage", [(0, None, b""), (0, 4, b"none"), (80, 160, bytes(80)), (-200, None, b"")])
def test_images_that_cannot_be_read_are_none_whatever_happened_to_them(
    tmp_path: Path, damage: tuple[int, int | None, bytes]
) -> None:
    file = tmp_path / "images.npz"
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), dtype=np.uint8)
    np.savez_compressed(file, images=images, texts=["a", "b"])
    content, (begin, end, instead) = file.read_bytes(), damage
    assert validation_images(file, 2) is not None

    file.write_bytes(content[:begin] + instead + (content[end:] if end is not None else b""))

    assert validation_images(file, 2) is None


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (1, 8, 8, 3), (2, 0, 8, 3), (2, 8, 8), (2, 8, 8, 4), (3, 8, 8, 3)])
def test_images_of_another_shape_or_number_are_none(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = tmp_path / "images.npz"
    np.savez_compressed(file, images=np.zeros(shape, np.uint8), texts=["a", "b"])

    assert validation_images(file, 2) is None
    assert validation_images(file, shape[0]) is None


@pytest.mark.parametrize("end", ["before", "after"])
def test_a_prompt_that_was_set_aside_before_or_after_is_left_out_of_both(tmp_path: Path, end: str) -> None:
    """Else pictures of different prompts would stand under one another."""
    run_dir = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]
    ends = {"before": lines[0], "after": lines[-1]}
    with np.load(run_dir / ends[end]["images"]) as arrays:
        np.savez(run_dir / ends[end]["images"], images=arrays["images"][1:], texts=arrays["texts"][1:])
    del ends[end]["rewards"][0]
    write_jsonl(run_dir / "validation.jsonl", lines)

    figure = draw(read(run_dir), "before-after")

    assert figure
    assert [title for ax in figure.axes if (title := ax.get_title())] == ["11", "12", "13", "14"]
    drawn = np.array([ax.images[0].get_array() for ax in figure.axes])
    for turn, line in enumerate(ends.values()):
        with np.load(run_dir / line["images"]) as arrays:
            assert np.array_equal(drawn[turn::2], arrays["images"][-4:])
    rewards = [ax.texts[0].get_text() for ax in figure.axes]
    assert rewards[1::2] == [f"{reward:.2f}" for reward in lines[-1]["rewards"][-4:]]
    page_of(run_dir)


def test_names_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", name="<img src=x onerror=alert(1)>"))

    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


MARKUP = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "</title></style><svg/onload=alert(1)>",
    "<!--<script>",
    "]]><![CDATA[<b>",
    "&lt;script&gt;&#60;b&#62;",
    "javascript:alert(1)",
    "$banner ${title} {{7*7}}",
)
"""What becomes markup, or ends it, where it is not escaped."""


class Skeleton(HTMLParser):
    """The elements of a page and their attributes, but for the text of any, and for the scripts that draw the plots."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[tuple[str, tuple[str, ...]]] = set()
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add((tag, tuple(sorted(name for name, _ in attrs))))
        self.scripts += tag == "script"


def test_nothing_in_a_run_directory_becomes_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.report.page.write_pictures", lambda facts: None)  # they hold no markup
    plain = Skeleton(page_of(with_markup(tmp_path / "plain", "a run", "words")))

    page = page_of(with_markup(tmp_path / "marked", MARKUP[2], " ".join(MARKUP)))

    found = Skeleton(page)
    assert found.elements <= plain.elements
    assert found.scripts == plain.scripts
    assert page.count("</main>") == page.count("</title>") == 1
    assert [markup for markup in MARKUP if html.escape(markup) not in page] == []


def with_markup(run_dir: Path, name: str, text: str) -> Path:
    """A run that has the text wherever a run directory has text of its own."""
    write_run(run_dir, iterations=2, name=name)

    def replaced(journal: str, change: Callable[[dict[str, Any]], object]) -> None:
        rows = [json.loads(line) for line in (run_dir / journal).read_text().splitlines()]
        for row in rows:
            change(row)
        write_jsonl(run_dir / journal, rows)

    replaced("spans.jsonl", lambda row: row.update(worker=f"{row['worker']}{text}", key=text, outcome=text))
    replaced("spans.jsonl", lambda row: row.update(phase=f"{row['phase']}{text}"))
    replaced("workers.jsonl", lambda row: row.update(worker=f"{row['worker']}{text}", reason=text))
    replaced("history.jsonl", lambda row: row["metrics"].update({text: 1.0, f"{text}_s": 2.0}))
    replaced("history.jsonl", lambda row: row["measured"].update({f"more {text}": 1.0}))
    replaced("validation.jsonl", lambda row: row.update(images=text))
    request = asdict(make_request(prompt=Prompt(id=1, text=text), run=text))
    write_jsonl(run_dir / "quarantined.jsonl", [{"request": request, "preemptions": 5}])
    return run_dir


@pytest.mark.parametrize("field", ["iteration", "seeds", "preemptions"])
def test_text_in_the_place_of_a_number_is_refused_before_it_is_shown(tmp_path: Path, field: str) -> None:
    run_dir = write_run(tmp_path / "run")
    row: dict[str, Any] = {"request": asdict(make_request()), "preemptions": 5}
    (row if field in row else row["request"])[field] = MARKUP[0]
    write_jsonl(run_dir / "quarantined.jsonl", [row])

    with pytest.raises(SpotlightError, match=rf"quarantined.jsonl:1: .*{field}"):
        write_report(run_dir)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"not a run directory.*config\.toml"):
        write_report(tmp_path)


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", until="config.toml")
    (run_dir / "history.jsonl").write_bytes(f'{json.dumps(_history_line(0, 2))}\n{{"iteration": 1, "é'.encode()[:-1])

    history = history_frame(run_dir)

    assert list(history.index) == [0]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", until="config.toml")
    first, last = (json.dumps(_history_line(k, 3)) for k in (0, 2))
    (run_dir / "history.jsonl").write_text(f'{first}\n{{"iterat\n{last}\n')

    with pytest.raises(SpotlightError, match=r"history\.jsonl:2: not JSON.*restore the file or delete the line"):
        write_report(run_dir)


def test_a_record_without_a_field_is_an_error_that_names_both(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_jsonl(run_dir / "spans.jsonl", [{"worker": "spot-0"}])

    with pytest.raises(SpotlightError, match=r"spans\.jsonl:1: no field 'pool'"):
        write_report(run_dir)


def test_every_label_names_a_metric_of_a_real_run_and_every_metric_but_seconds_has_one(tmp_path: Path) -> None:
    gangs = ("strategy.widths=[1,2]", "pools.spot.workers_per_node=2", "pools.spot.workers=4")
    pools = ("spot", "reserved")
    losses = [f"pools.{pool}.{setting}" for pool in pools for setting in ("trace_model=bursty", "speedup=20000")]
    in_parts = ("train.advantage_std=group", "train.seeds_used=2", "exploration.budget=time")
    few = ("rollout.prompts=2", "rollout.steps=3", "exploration.seeds_tried=4")
    policy = (*few, "train.algorithm=grpo", "train.kl=0.01", "rollout.sampler=sde", "run.iterations=1")

    runs: dict[Learning, tuple[str, ...]] = {"modelled": (*gangs, *losses, *in_parts), "real": policy}

    seen: set[str] = set()
    for learning, overrides in runs.items():
        run = Simulation("test", config.load(settings_file(tmp_path / learning), overrides), learning)
        run.go(report=False)
        found = {str(metric) for metric in history_frame(run.directory.path)}
        assert set(COLUMNS) <= found
        seen |= found

    assert METRICS.keys() - seen == set()
    shown = {metric for metric in seen if not metric.startswith(HIDDEN)}
    assert {metric for metric in shown - METRICS.keys() if not metric.endswith("_s")} == set()


def test_history_is_flat_and_indexed_by_iteration(tmp_path: Path) -> None:
    frame = history_frame(write_run(tmp_path / "run", iterations=3))

    assert list(frame.index) == [0, 1, 2]
    assert list(frame["weights_version"]) == [1, 2, 3]
    assert {"reward_mean", "rank_correlation", "wall_s", "usd"} <= set(frame)


def test_a_history_without_an_iteration_has_columns_all_the_same(tmp_path: Path) -> None:
    frame = history_frame(create_run(config.load(settings_file(tmp_path)), 0.0))

    assert len(frame) == len(frame["reward_mean"]) == 0
    assert frame.index.name == "iteration"


def test_an_iteration_that_was_run_again_counts_once(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", until="config.toml")
    runs = ((0, 1.0), (1, 2.0), (1, 3.0))
    lines = [_history_line(k, 2) | {"metrics": {"loss": loss}} for k, loss in runs]
    write_jsonl(run_dir / "history.jsonl", lines)

    assert list(history_frame(run_dir)["loss"]) == [1.0, 3.0]


def test_a_phase_that_repeats_another_has_its_colour() -> None:
    assert phase_colour("refill") == PHASE_COLOURS["rollout"]
    assert base_phase("explore-score-r12") == "explore-score"
    assert phase_colour("anything else") not in PHASE_COLOURS.values()


def test_the_colours_come_without_the_libraries_that_draw() -> None:
    code = "import sys, spotlight.report.palette; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert "spotlight.report.palette" in loaded.split()
    assert not {"bokeh", "matplotlib", "numpy", "pandas"} & set(loaded.split())


def test_every_loss_has_its_cross_though_names_are_used_again(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", iterations=4)
    file = run_dir / "workers.jsonl"
    lives = [json.loads(line) for line in file.read_text().splitlines()]
    name = f"spot-{SPOTS - 1}"  # the one that was lost with work
    later = [_life(name, START_S + 30 + n, START_S + 30.5 + n, "left") for n in range(3)]
    write_jsonl(file, [*lives, *later])

    found = read(run_dir).losses()

    assert len([lane for lane, _ in found if lane == ("spot", name)]) == 1 + 3


def test_damaged_metrics_leave_a_report(tmp_path: Path) -> None:
    """What is no number is left out; what is missing stays empty."""
    run_dir = write_run(tmp_path / "run")
    file = run_dir / "history.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["metrics"]["reward_mean"] = float("nan")
    write_jsonl(file, rows)
    validated = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]
    validated[-1]["rewards"] = validated[-1]["rewards"][:1]
    write_jsonl(run_dir / "validation.jsonl", validated)

    assert "</main>" in page_of(run_dir)


@pytest.mark.parametrize("verb", ["cost", "status"])
@pytest.mark.parametrize("name", ["workers.jsonl", "spans.jsonl"])
def test_the_account_of_a_run_without_its_workers_or_their_work_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, verb: str
) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / name).unlink()

    assert main([verb, str(run_dir)]) == 1
    assert f"{run_dir / name}: is missing or empty" in capsys.readouterr().err
