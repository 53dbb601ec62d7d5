"""What a run directory holds is read as it was written, and what is damaged is refused with the way out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import make_request
from spotlight.plan.bandit import allocate
from spotlight.plan.beliefs import Arm, Beliefs, learn
from spotlight.plan.offload import Offload
from spotlight.plan.replay import Allocation, allocation_row
from spotlight.records import (
    Drawn,
    Explored,
    Kept,
    Prompt,
    Quarantined,
    Selection,
    Span,
    SpotlightError,
    WorkerLife,
)
from spotlight.store.accounts import read_lives, read_spans
from spotlight.store.decoding import from_json
from spotlight.store.lines import TAIL_BYTES
from spotlight.store.rows import (
    ASIDE,
    DECISIONS,
    EVENTS,
    HISTORY,
    QUARANTINED,
    SPANS,
    SUMMARY,
    VALIDATION,
    WORKERS,
    HistoryRow,
    Summary,
    ValidationRow,
)
from spotlight.store.rundir import RunDir, indented
from spotlight.store.weights import FileEntry, Manifest, published

K = 3
PROMPT = Prompt(id=7, text='a sign that says "47"')
SELECTION = Selection(
    iteration=K,
    kept=(
        Kept(prompt=PROMPT, seeds=(2**62 + 1, 5), explored_rewards=(0.25, None)),
        Kept(
            prompt=PROMPT,
            seeds=(5, 9),
            explored_rewards=(0.5, 1.0),
            drawn=(Drawn(seeds=(5, 6, 9), rewards=(0.5, None, 1.0), parts=((0.1, None, 0.2),)),),
        ),
    ),
    version=2,
    explored_as="a" * 64,
    seeds_scored=4,
    seeds_dropped=2,
    reward_mean=0.1 + 0.2,
    reward_std=0.0,
    explored=(Explored(prompt=7, rewards=(0.25, 1.0)),),
)
BELIEFS = learn(Beliefs(), K, {7: (0.0, 0.5, 1.0), 8: (1.0, 1.0)}, {7: [(0.0, 0.1), (1.0, 0.9)]})
OFFLOAD = Offload(window_s=12.5, memory={2: 30.0, 8: 5.0})
SPAN = Span(
    worker="spot-0", pool="spot", phase="rollout", iteration=K, key="k", start_s=1.5, stop_s=2.5, outcome="lost"
)
LIFE = WorkerLife(worker="spot-0", pool="spot", joined_s=1.0, left_s=None, reason="")
HISTORY_ROW = HistoryRow(
    iteration=K, weights_version=K + 1, weights_sha256="ab", metrics={"samples": 24.0}, measured={"preemptions": 2}
)
VALIDATION_ROW = ValidationRow(
    version=K, score=0.5, rewards=(1.0, None, 0.0), images="images/v.npz", at_s=1.5, metrics={"tag_counting": 0.5}
)
SUMMARY_ = Summary(
    score_before=0.5,
    score_after=0.75,
    iterations=1,
    wall_s=60.0,
    usd=1.0,
    usd_wasted=0.25,
    usd_reserved_only=2.0,
    preemptions=1,
    first_image_s=None,
)
QUARANTINED_ = Quarantined(request=make_request(), preemptions=5)
MANIFEST = Manifest(
    version=0, files={"weights.safetensors": FileEntry(sha256="ab", bytes=3)}, metrics={"loss": 0.5}, created="now"
)
GIVEN = {"iteration": K, "slots": 2, "later": 0, "candidates": 8, "chunk": 2, "keep": 2, "seed": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A directory that holds one of everything."""
    run = RunDir(tmp_path)
    run.record_selection(SELECTION)
    run.record_beliefs(K, BELIEFS)
    run.record_offload(K, OFFLOAD)
    run.write_summary(SUMMARY_)
    run.append(SPANS, asdict(SPAN))
    run.append(WORKERS, asdict(LIFE))
    run.append(HISTORY, asdict(HISTORY_ROW))
    run.append(VALIDATION, asdict(VALIDATION_ROW))
    run.append(QUARANTINED, asdict(QUARANTINED_))
    run.append(DECISIONS, allocation_row([Arm(prompt=7, rewards=(0.5,))], BELIEFS, [(0, 0, 2)], **GIVEN))
    (tmp_path / "weights" / "v00000").mkdir(parents=True)
    run.write_json(f"weights/{'v00000'}/manifest.json", asdict(MANIFEST))
    return run


Read = Callable[[RunDir], Any]
READERS: dict[str, Read] = {
    f"selections/{K:05d}.json": lambda run: run.selection(K),
    f"beliefs/{K:05d}.json": lambda run: run.beliefs(K),
    f"offload/{K:05d}.json": lambda run: run.offload(K),
    SUMMARY: lambda run: run.summary(),
    SPANS: read_spans,
    WORKERS: read_lives,
    HISTORY: lambda run: run.history(),
    VALIDATION: lambda run: run.validation(),
    QUARANTINED: lambda run: run.records(QUARANTINED, Quarantined),
    DECISIONS: lambda run: run.decisions(),
    "weights/v00000/manifest.json": lambda run: published(run.path, 0),
}


def test_what_was_written_is_read(run: RunDir) -> None:
    assert run.selection(K) == SELECTION
    assert run.beliefs(K) == BELIEFS
    assert run.offload(K) == OFFLOAD
    assert run.summary() == SUMMARY_
    assert (read_spans(run), read_lives(run)) == ([SPAN], [LIFE])
    assert (run.history(), run.validation()) == ([HISTORY_ROW], [VALIDATION_ROW])
    assert run.records(QUARANTINED, Quarantined) == [QUARANTINED_]


def test_a_logged_allocation_is_given_back_as_it_was(run: RunDir) -> None:
    arm = Arm(prompt=7, rewards=(0.5,))

    (row,) = run.decisions()

    assert row == Allocation(arms=(arm,), beliefs=BELIEFS, given=GIVEN, chunks=((0, 0, 2),))
    assert isinstance(row, Allocation)
    assert allocate(row.arms, row.beliefs, **row.given) == allocate([arm], BELIEFS, **GIVEN)


@pytest.mark.parametrize("inside", ["}\n{", "\u2028é", inf, [{"a": 1}, {"b": 2}], (1, 2.5e-300)])
def test_a_row_is_a_line_whatever_is_in_it(tmp_path: Path, inside: Any) -> None:
    run, rows = RunDir(tmp_path), [{"what": inside}, {}, {"what": inside, "at_s": 1.5}]

    run.append(EVENTS, *rows)
    run.append(EVENTS, rows[0])

    assert run.rows(EVENTS) == json.loads(json.dumps([*rows, rows[0]]))
    assert run.count(EVENTS) == 4


def test_rows_that_were_appended_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, synced, fsync = RunDir(tmp_path), list[int](), os.fsync

    def sync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(tmp_path):  # and no lease of another test
            synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", sync)
        run.append(EVENTS, {"what": 1}, {"what": 2})

    assert synced == [(tmp_path / EVENTS).stat().st_size]


def test_a_row_goes_in_the_place_of_one_that_a_kill_tore(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append(EVENTS, {"what": 1})
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"what": "torn')

    run.append(EVENTS, {"what": 2})

    assert run.rows(EVENTS) == [{"what": 1}, {"what": 2}]


def test_the_last_rows_are_found_and_numbered_however_long_they_are(tmp_path: Path) -> None:
    run, rows = RunDir(tmp_path), [{"row": row, "text": "x" * (TAIL_BYTES // 2 - 100)} for row in range(1, 12)]
    run.append(EVENTS, *rows)

    for count in (1, 2, 3, 9, 11, 12):
        assert run.last(EVENTS, dict[str, Any], count) == rows[-count:]

    run.append(EVENTS, {"row": 12})
    with pytest.raises(SpotlightError, match=rf"{EVENTS}:10: text: expected a valid integer"):
        run.last(EVENTS, dict[str, int], 3)


def test_a_row_counts_that_is_as_long_as_the_torn_one_whose_place_it_takes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / EVENTS).write_bytes(b'{"at":1}\n{"at": 123')
    assert run.count(EVENTS) == 1

    counts = []
    for at in (23, 4):
        run.append(EVENTS, {"at": at})
        counts.append(run.count(EVENTS))

    assert counts == [2, 3]


def test_rows_are_counted_as_they_come_and_anew_where_a_journal_became_shorter(tmp_path: Path) -> None:
    run, counts = RunDir(tmp_path), []
    for rows in (1, 2):
        run.append(EVENTS, *[{"what": 1}] * rows)
        counts.append(run.count(EVENTS))
    (tmp_path / EVENTS).write_text("{}\n")

    assert [*counts, run.count(EVENTS)] == [1, 3, 1]


def test_of_half_an_emoji_a_row_keeps_the_rest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    run.append(EVENTS, {"what": "\ud83d é"}, {"at_s": 1.5})

    assert run.rows(EVENTS) == [{"what": "? é"}, {"at_s": 1.5}]


@pytest.mark.parametrize("rewards", [(0.5, inf), (1.0, 0.5, nan), (None, -inf)])
def test_a_number_that_is_not_finite_is_found_in_a_list(rewards: tuple[float | None, ...]) -> None:
    content = json.dumps({"explored": [{"seeds": [1, 2, 3], "rewards": rewards}]}).encode()

    with pytest.raises(SpotlightError, match=rf"explored\[0\].rewards\[{len(rewards) - 1}\]: expected a finite number"):
        from_json(dict[str, Any], content, "file", "delete it", finite=True)


@given(st.floats(allow_nan=False))
def test_a_number_is_read_bit_by_bit(value: float) -> None:
    (back,) = from_json(tuple[float, ...], json.dumps([value]).encode(), "file", "delete it")

    assert back.hex() == value.hex()


def test_what_is_not_there_is_not_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    assert (run.selection(K), run.offload(K), run.summary()) == (None, None, None)
    assert run.beliefs(K) == Beliefs()
    assert (run.history(), run.validation(), run.decisions(), read_spans(run)) == ([], [], [], [])


@pytest.mark.parametrize("name", READERS)
def test_fields_of_a_newer_version_are_left_out(run: RunDir, name: str) -> None:
    before = READERS[name](run)

    edit(run, name, lambda value: value.update(node="n0"))

    assert READERS[name](run) == before


def test_spans_from_before_a_field_was_added_are_read(run: RunDir) -> None:
    edit(run, SPANS, lambda value: (value.pop("uncommitted_s"), value.pop("redone_s")))

    assert read_spans(run) == [SPAN]


DAMAGE: list[tuple[str, Callable[[Any], object], str]] = [
    # Wrong types
    (f"selections/{K:05d}.json", lambda v: v.update(seeds_scored="4"), "seeds_scored: expected a valid integer"),
    (f"beliefs/{K:05d}.json", lambda v: v.update(fidelity=None), "fidelity: expected a valid number, found None"),
    (f"offload/{K:05d}.json", lambda v: v["memory"].update(many=1.0), "memory.many: expected a valid integer"),
    (SUMMARY, lambda v: v.update(usd="free"), "usd: expected a valid number, found 'free'"),
    (SPANS, lambda v: v.update(start_s="soon"), "start_s: expected a valid number, found 'soon'"),
    (WORKERS, lambda v: v.update(left_s=[]), r"left_s: expected a valid number, found \[\]"),
    (HISTORY, lambda v: v["metrics"].update(loss="low"), "metrics.loss: expected a valid number, found 'low'"),
    (VALIDATION, lambda v: v.update(score=True), "score: expected a valid number, found True"),
    (QUARANTINED, lambda v: v["request"].update(purpose="fun"), "request.purpose: expected 'rollout', 'explore' or"),
    (DECISIONS, lambda v: v["given"].update(slots=0.5), "given.slots: expected a valid integer, found 0.5"),
    (DECISIONS, lambda v: v.update(decision=None), "decision: expected a valid string, found None"),
    ("weights/v00000/manifest.json", lambda v: v.update(version="0"), "version: expected a valid integer, found '0'"),
    # Missing fields
    (
        f"selections/{K:05d}.json",
        lambda v: v["kept"][0].pop("seeds"),
        r"no field 'kept\[0\].seeds'; it has \['drawn', '",
    ),
    (f"beliefs/{K:05d}.json", lambda v: v["prompts"][1].pop("counts"), r"no field 'prompts\[1\].counts'; it has \["),
    (f"offload/{K:05d}.json", lambda v: v.pop("window_s"), r"no field 'window_s'; it has \['memory'\]"),
    (SUMMARY, lambda v: v.pop("usd"), "no field 'usd'"),
    (SPANS, lambda v: v.pop("pool"), "no field 'pool'"),
    (WORKERS, lambda v: v.pop("reason"), "no field 'reason'"),
    (HISTORY, lambda v: v.pop("weights_version"), "no field 'weights_version'"),
    (VALIDATION, lambda v: v.pop("at_s"), "no field 'at_s'"),
    (
        QUARANTINED,
        lambda v: v["request"]["prompt"].pop("text"),
        r"no field 'request.prompt.text'; it has \['id', 'metadata'\]",
    ),
    (DECISIONS, lambda v: v.pop("chunks"), "no field 'chunks'"),
    ("weights/v00000/manifest.json", lambda v: v["files"].clear(), r"files has no weights.safetensors; it has \[\]"),
    # Wrong shapes
    (f"selections/{K:05d}.json", lambda v: v["kept"][0]["seeds"].pop(), r"kept\[0\]: 1 seeds and 2 explored rewards"),
    (
        f"beliefs/{K:05d}.json",
        lambda v: v["prompts"][0]["counts"].pop(),
        r"prompts\[0\]: counts has 20 values: give 21",
    ),
    (f"beliefs/{K:05d}.json", lambda v: v["nodes"].pop(), "nodes has 20 values: give 21"),
    (f"offload/{K:05d}.json", lambda v: v.update(memory=[1.0]), r"memory: expected an object, found \[1.0\]"),
    (SUMMARY, lambda v: v.update(usd=[1.0]), "usd: expected a valid number"),
    (SPANS, lambda v: v.update(worker={}), "worker: expected a valid string"),
    (WORKERS, lambda v: v.update(pool=["spot"]), "pool: expected a valid string"),
    (HISTORY, lambda v: v.update(metrics=[0.5]), "metrics: expected an object"),
    (VALIDATION, lambda v: v.update(rewards=0.5), "rewards: expected a valid array, found 0.5"),
    (QUARANTINED, lambda v: v["request"].update(sde_window=[1, 2, 3]), "request.sde_window"),
    (DECISIONS, lambda v: v["chunks"][0].pop(), r"chunks\[0\]"),
    ("weights/v00000/manifest.json", lambda v: v.update(files=[]), r"files: expected an object, found \[\]"),
]


@pytest.mark.parametrize(("name", "harm", "says"), DAMAGE)
def test_a_damaged_record_is_refused_by_file_line_and_field(
    run: RunDir, name: str, harm: Callable[[Any], object], says: str
) -> None:
    edit(run, name, harm)

    with pytest.raises(SpotlightError, match=says) as refused:
        READERS[name](run)

    check_paragraph(str(refused.value), run.path / name)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda text: text[: len(text) // 2], "not JSON ("),
        (lambda text: b"\xff" + text[1:], "not JSON (expected value"),
        (lambda text: b"[" + text.strip() + b"]", "expected an object, found [{"),
        (lambda text: b"null", "expected an object, found None"),
        (lambda text: b"", "not JSON (EOF while parsing"),
    ],
    ids=("cut", "bytes", "list", "null", "empty"),
)
def test_what_is_no_record_at_all_is_refused_by_file_and_line(
    run: RunDir, name: str, content: Callable[[bytes], bytes], says: str
) -> None:
    path = run.path / name
    path.write_bytes(content(path.read_bytes()) + b"\n")

    with pytest.raises(SpotlightError) as refused:
        READERS[name](run)

    assert says in str(refused.value)
    check_paragraph(str(refused.value), path)


def test_of_many_faults_the_first_are_told_and_the_others_counted(run: RunDir) -> None:
    (run.path / SUMMARY).write_text("{}")

    with pytest.raises(SpotlightError, match=r"'score_before'.*'score_after'.*'iterations'; it has \[\]; and 6 more;"):
        run.summary()


def test_the_line_of_a_journal_is_counted_from_one(run: RunDir) -> None:
    with (run.path / SPANS).open("ab") as file:
        file.write(b'{"worker": 1}\n')

    with pytest.raises(SpotlightError, match=r"spans\.jsonl:2: "):
        read_spans(run)


def test_a_journal_that_grows_is_read_once_line_by_line_and_anew_where_it_is_another(run: RunDir) -> None:
    journal, second, third = run.growing(SPANS, Span), replace(SPAN, key="second"), replace(SPAN, key="third")
    path = run.path / SPANS
    assert journal.new() == (1, [SPAN])
    assert journal.new() == (2, [])

    run.append(SPANS, asdict(second))
    with path.open("ab") as file:
        file.write(b'{"worker": "torn')
    assert journal.new() == (2, [second])
    with path.open("ab") as file:
        file.write(b'"}\n')
    for _ in range(2):
        with pytest.raises(SpotlightError, match=r"spans\.jsonl:3: "):
            journal.new()

    for rows in (4, 5, 6):  # each time anew, and longer: a file may have the number of the one before the last
        run.rewrite(SPANS, [asdict(third)] * (rows - 1))
        run.rewrite(SPANS, [asdict(third)] * (rows - 1) + [asdict(SPAN)])
        assert journal.new() == (1, [third] * (rows - 1) + [SPAN])
    path.unlink()
    assert journal.new() == (1, [])


def test_a_journal_that_is_written_anew_is_read_anew_at_each_change(run: RunDir) -> None:
    """A worker's end changes a line in the middle."""
    ended = [LIFE, replace(LIFE, left_s=9.0), LIFE]
    journal = run.growing(WORKERS, WorkerLife)
    for lives in ([LIFE], [LIFE] * 3, ended, [*ended, LIFE]):
        run.rewrite(WORKERS, map(asdict, lives))
        assert journal.new() == (1, list(lives))
        assert journal.new() == (len(lives) + 1, [])


def test_a_journal_that_is_written_anew_has_no_torn_line(run: RunDir) -> None:
    """Of one that is appended to, a kill may tear the last line."""
    path = run.path / WORKERS
    run.rewrite(WORKERS, map(asdict, [LIFE, LIFE]))
    path.write_bytes(path.read_bytes()[:-5])

    with pytest.raises(SpotlightError, match=rf"{path}:2: the line is cut short; restore the file or delete the line"):
        run.growing(WORKERS, WorkerLife).new()


def edit(run: RunDir, name: str, change: Callable[[Any], object]) -> None:
    """Change the value that a file of one record holds."""
    path = run.path / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value) + "\n")


def check_paragraph(said: str, path: Path) -> None:
    """One paragraph that begins with the place and ends with the way out."""
    assert said.startswith(f"{path}:1: " if path.suffix == ".jsonl" else f"{path}: "), said
    assert "\n" not in said
    assert "restore" in said.split("; ")[-1] or "delete" in said.split("; ")[-1], said
    assert len(said) < 500, said


@pytest.mark.parametrize("record", [SELECTION, BELIEFS, OFFLOAD])
def test_a_record_is_written_as_json_would_indent_it(record: Any) -> None:
    assert indented(record) == json.dumps(asdict(record), indent=1, sort_keys=True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_is_written_as_json_would_indent_it(value: Any) -> None:
    assert indented(value) == json.dumps(value, indent=1, sort_keys=True)


def test_requests_that_several_workers_set_aside_are_recorded_once_each(run: RunDir) -> None:
    """Each that had a share of one records it, while another may be in the middle of writing."""
    first, second = (Quarantined(request=make_request(seeds=(seed,)), preemptions=5) for seed in (1, 2))
    before = run.all_quarantined()

    for found in (first, second, first):
        run.quarantine(found)
    (run.path / ASIDE / ".nfs0000000001").write_text("of a file system")

    assert run.all_quarantined() == [*before, first, second]


def test_an_error_with_half_an_emoji_does_not_make_its_record_unreadable(run: RunDir) -> None:
    """As one that names a file whose name is no UTF-8."""
    run.record_selection(replace(SELECTION, error="no such file: caf\udce9.png"))

    found = run.selection(SELECTION.iteration)

    assert found == replace(SELECTION, error="no such file: caf?.png")
