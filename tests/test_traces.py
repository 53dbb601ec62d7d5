"""Claims about spot traces: public formats by hand, invariants on random traces, published statistics."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.market.trace_files import parse_trace, read_trace, write_trace
from spotlight.market.trace_models import BURSTY, CALM, COLLAPSING, TraceModel, synthesise
from spotlight.market.traces import SECONDS_PER_H, Event, Kind, Loss, Trace
from spotlight.records import SpotlightError


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    """Up to 40 events of up to 6 instances, on whole milliseconds, many of them at one moment."""
    alive: set[str] = set()
    events: list[Event] = []
    time_ms = 0
    steps = st.tuples(st.sampled_from([0, 0, 1, 700, 60_000]), st.integers(0, 5))
    for gap_ms, number in draw(st.lists(steps, max_size=40)):
        time_ms, instance = time_ms + gap_ms, f"node{number}"
        kind: Kind = "remove" if instance in alive else "add"
        alive ^= {instance}
        events.append(Event(time_s=time_ms / 1000, instance=instance, kind=kind))
    return Trace(events=tuple(events), duration_s=(time_ms + draw(st.integers(1, 90_000))) / 1000)


def available(trace: Trace, t_s: float) -> int:
    """How many are alive at a moment, after what happens at that moment."""
    return sum(1 if event.kind == "add" else -1 for event in trace.events if event.time_s <= t_s)


@pytest.fixture(scope="module")
def p3(shared_data: Path) -> Trace:
    """32 nodes for 11.4 h, published with bamboo."""
    return read_trace(shared_data / "bamboo_p3_trace.csv")


def test_the_published_trace_has_its_published_statistics(p3: Trace) -> None:
    summary = p3.summary()

    assert round(summary.hours, 2) == 11.37
    assert summary.max_available == 32
    assert round(summary.mean_available, 1) == 24.0
    assert (summary.losses, summary.loss_events) == (167, 79)
    assert round(summary.losses_per_instance_h, 3) == 0.611
    assert (summary.zero_share, summary.collapse_share) == (0.0, 0.0)  # its least is 10 nodes


def test_the_published_trace_is_the_same_as_counts(p3: Trace) -> None:
    """Parcae publishes bamboo's trace as counts; which instance went is lost, when and how many is not."""
    alive, rows = 0, []
    for event in p3.events:
        alive += 1 if event.kind == "add" else -1
        rows.append(f"{event.time_s * 1000:.0f},{alive}")

    counted = parse_trace("\n".join(rows), where="p3.csv")

    assert counted.summary() == p3.summary()
    assert len({event.instance for event in counted.events}) == 32


def test_half_of_the_published_instances_are_the_same_half_for_a_seed(p3: Trace) -> None:
    instances = {event.instance for event in p3.events}

    half = p3.sample(0.5, seed=3)

    assert len({event.instance for event in half.events}) == round(len(instances) / 2)
    assert half == p3.sample(0.5, seed=3)
    assert half != p3.sample(0.5, seed=4)
    assert half.duration_s == p3.duration_s
    assert len(parse_trace("0,3\n9000,3\n", where="t").sample(0.6, seed=0).events) == 2  # 1.8, rounded


def test_events_of_a_moment_are_one_loss() -> None:
    trace = parse_trace(
        "0,add,a\r\n0,add,b\r\n0,add,c\r\n9000,remove,b\r\n9000,remove,a\r\n36000,remove,c\r\n", where="t"
    )

    summary = trace.summary()

    assert trace.losses() == (Loss(time_s=9.0, instances=2), Loss(time_s=36.0, instances=1))
    assert [each.tolist() for each in trace.steps()] == [[0, 9, 36], [3, 1, 0]]
    assert summary.mean_available == (3 * 9 + 1 * 27) / 36
    assert summary.median_available == 1  # for 27 of 36 s
    assert summary.losses_per_h == 3 / 0.01
    assert summary.losses_per_instance_h == pytest.approx(3 * 3600 / (3 * 9 + 1 * 27))
    assert summary.bulk_loss_share == 2 / 3
    assert summary.collapse_share == 1 / 2


def test_half_of_the_time_there_were_as_many_as_the_median_or_fewer() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n23000,remove,a\n35000,remove,b\n40000,end,\n", where="t")

    summary = trace.summary()

    assert summary.median_available == 2  # for 23 of 40 s
    assert summary.zero_share == 5 / 40


@pytest.mark.parametrize(
    ("text", "steps", "duration_s"),
    [
        ("0,add,a\n500,add,b\n1500,remove,a\n", {0: 1, 0.5: 2, 1.5: 1}, 1.5),
        ("0,add,a\n500,remove,a\n2000,end,\n", {0: 1, 0.5: 0}, 2.0),
        ("0,1\n0,2\n60000,1\n", {0: 2, 60: 1}, 60.0),
        ("2021-12-11, 23:59:30, 2\n2021-12-12, 00:00:30, 1\n", {0: 2, 60: 1}, 60.0),
        ("2021-12-11, 11:00:00, 2\n2021-12-11, 11:00:50, 0\n2021-12-11, 11:00:20, 1\n", {0: 2, 20: 1, 50: 0}, 50.0),
        ('{"metadata": {"gap_seconds": 195},\n "data": [0, 2, 2, 0]}', {0: 0, 195: 2, 585: 0}, 780.0),
        (
            '[0, "add", {"nodes": ["a", "b"], "duration": 60000, "strategy": [4, 4]}]\n'
            '[60000, "no-op", {"nodes": [], "duration": 60000}]\n'
            '[120000, "remove", {"nodes": ["b"], "duration": 60000}]\n',
            {0: 2, 120: 1},
            180.0,
        ),
    ],
    ids=["events", "events-that-end-later", "counts", "dated-counts", "out-of-order-counts", "gaps", "json-lines"],
)
def test_public_formats_are_read(tmp_path: Path, text: str, steps: dict[float, int], duration_s: float) -> None:
    path = tmp_path / "trace"
    path.write_text(text)

    trace = read_trace(path)

    times_s, counts = trace.steps()
    assert dict(zip(times_s.tolist(), counts.tolist(), strict=True)) == steps
    assert trace.duration_s == duration_s


def test_counts_take_the_instance_that_lived_longest() -> None:
    trace = parse_trace("0,2\n1000,1\n2000,2\n3000,1\n", where="counts")

    lost = [event.instance for event in trace.events if event.kind == "remove"]

    assert lost == ["node-0", "node-1"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "t.csv: the trace is empty"),
        ("\n \n", "t.csv: the trace is empty"),
        ("0,add,a\n\n1000,adds,b", "t.csv:3: expected 'milliseconds,add|remove,instance', not '1000,adds,b'"),
        ("0,add,a\n1000,add", "t.csv:2: expected 'milliseconds,add|remove,instance', not '1000,add'"),
        ("0,add,a\nsoon,add,b", "t.csv:2: expected milliseconds from 0 on, not 'soon'"),
        ("0,add,a\nnan,add,b", "t.csv:2: expected milliseconds from 0 on, not 'nan'"),
        ("-5,add,a", "t.csv:1: expected milliseconds from 0 on, not '-5'"),
        ("0,add,a\n2000,remove,a\n1000,add,b", "t.csv:3: its time is 1 s, and events are in order of time from 2 s on"),
        ("0,add,a\n1000,add,a", "t.csv:2: a is there already"),
        ("0,add,a\n1000,remove,b", "t.csv:2: b is not there to be removed"),
        ("0,add,a b\n1000,remove,a b", "t.csv:1: an instance cannot be called 'a b'"),
        ("0,add,a\n1000,end,\n2000,remove,a", "t.csv:2: expected"),
        ("0,add,a\n1000,remove,a\n500,end,", "t.csv: trace: it lasts 0.5 s, and its last event is at 1 s"),
        ("0,add,a", "t.csv: trace: it lasts 0 s"),
        ("0,add,a", "; a last line such as '3600000,end,' says how long"),
        ("0,4", "; a second line, with a later time, says how long"),
        ("0,1\n1000,-1", "t.csv:2: expected a number of instances, not '-1'"),
        ("0,1\n1000,2,3", "t.csv:2: expected 'milliseconds,count' or"),
        (
            "2021-12-11, 11:00:00, 2\n2021-12-11, 25:00:00, 1",
            "t.csv:2: expected 'YYYY-MM-DD, HH:MM:SS', not '2021-12-11",
        ),
        ("2021-12-11, 11:00:00, 2\n2021-12-11, 11:01, 1", "t.csv:2: expected 'YYYY-MM-DD, HH:MM:SS', not '2021-12-11"),
        ('{"metadata": {"gap_seconds": 300},\n"data": [1,', "t.csv:2: not JSON"),
        ('{"data": [1, 2]}', 't.csv:1: expected {"metadata": {"gap_seconds"'),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "t.csv:1: expected"),
        ('{"metadata": {"gap_seconds": 300}, "data": "4312"}', "t.csv:1: expected"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "t.csv:1: expected"),
        (
            '{"metadata": {"gap_seconds": 300}, "data": [1, 2.5]}',
            "t.csv: data[1]: expected a number of instances, not '2.5'",
        ),
        (
            '[0, "add", {"nodes": ["a"], "duration": 9}]\n[9, "sub", {"nodes": ["a"], "duration": 9}]',
            "t.csv:2: expected",
        ),
        ('[0, "add", {"nodes": ["a"], "duration": 9}]\n[9, "remove"', "t.csv:2: expected"),
    ],
)
def test_a_malformed_trace_is_named_with_line_and_reason(text: str, complaint: str) -> None:
    with pytest.raises(SpotlightError) as caught:
        parse_trace(text, where="t.csv")

    assert complaint in str(caught.value)


@pytest.mark.parametrize("content", [None, b"0,add,\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.csv"
    if content:
        path.write_bytes(content)

    with pytest.raises(
        SpotlightError, match=r"trace\.csv: (cannot be read as a trace: No such file|not a trace: byte 6)"
    ):
        read_trace(path)


fragments = st.sampled_from(
    ["0", "1000", "9e999", "-1", "add", "remove", "end", "a", "2021-12-11", "11:00:00", "[", "{"]
)


@given(text=st.one_of(st.text(max_size=60), st.lists(fragments, max_size=12).map(",".join)))
def test_whatever_the_text_it_is_a_trace_or_an_error_for_people(text: str) -> None:
    with contextlib.suppress(SpotlightError):
        assert parse_trace(text, where="t").duration_s > 0


@given(trace=random_traces())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.csv"

    write_trace(trace, path)

    assert read_trace(path) == trace


def test_the_published_trace_is_written_as_it_was_read(p3: Trace, shared_data: Path, tmp_path: Path) -> None:
    write_trace(p3, tmp_path / "p3.csv")

    written = (tmp_path / "p3.csv").read_text().split()

    assert written == (shared_data / "bamboo_p3_trace.csv").read_text().split()


@given(trace=random_traces(), start=st.floats(0, 1), later_s=st.integers(0, 600))
def test_a_cut_has_who_was_there_then(trace: Trace, start: float, later_s: int) -> None:
    start_s = math.floor(start * trace.duration_s * 0.99)

    part = trace.cut(start_s, trace.duration_s)

    assert available(part, later_s) == available(trace, start_s + later_s)
    assert part.duration_s == trace.duration_s - start_s


@given(trace=random_traces(), at=st.floats(0.01, 0.99))
def test_adjoining_cuts_share_out_the_losses(trace: Trace, at: float) -> None:
    middle_s = at * trace.duration_s
    born_dead = sum(loss.instances for loss in trace.losses() if loss.time_s == 0)  # who is gone at 0 was never there

    parts = trace.cut(0, middle_s), trace.cut(middle_s, trace.duration_s)

    assert sum(part.summary().losses for part in parts) == trace.summary().losses - born_dead


@given(trace=random_traces(), factor=st.floats(1e-3, 1e3))
def test_a_stretched_trace_differs_in_time_alone(trace: Trace, factor: float) -> None:
    before = trace.summary()

    after = trace.stretch(factor).summary()

    assert after.hours == pytest.approx(before.hours * factor)
    assert after.mean_available == pytest.approx(before.mean_available)
    assert after.losses_per_h == pytest.approx(before.losses_per_h / factor)
    assert (after.losses, after.loss_events, after.max_available) == (
        before.losses,
        before.loss_events,
        before.max_available,
    )


@given(trace=random_traces(), workers=st.integers(0, 8))
def test_places_follow_the_trace_up_to_their_number(trace: Trace, workers: int) -> None:
    places = trace.places(workers)

    assert len(places) == workers
    for time_s in trace.steps()[0].tolist():
        up = sum(is_up(switches, time_s) for switches in places)
        assert up == min(workers, available(trace, time_s))


@given(trace=random_traces(), workers=st.integers(1, 8))
def test_a_place_comes_up_and_goes_down_in_turn(trace: Trace, workers: int) -> None:
    places = trace.places(workers)

    for switches in places:
        assert [up for _, up in switches] == [index % 2 == 0 for index in range(len(switches))]
        assert all(before <= after for (before, _), (after, _) in pairwise(switches))
        assert all(goes > comes for (comes, up), (goes, _) in pairwise(switches) if up)  # nobody lives for 0 s


def test_a_bulk_loss_takes_several_places_at_once_and_who_waits_replaces_them() -> None:
    text = (
        "0,add,a\n0,add,b\n0,add,c\n1000,remove,a\n1000,remove,b\n2000,add,d\n3000,remove,c\n3000,remove,d\n4000,end,"
    )
    trace = parse_trace(text, where="bulk")

    places = trace.places(2)

    assert places == (
        ((0.0, True), (1.0, False), (1.0, True), (3.0, False)),  # a; replaced at once by c, who had waited
        ((0.0, True), (1.0, False), (2.0, True), (3.0, False)),  # b; nobody; d
    )


@given(trace=random_traces(), limit=st.integers(0, 8))
def test_a_limited_trace_never_has_more(trace: Trace, limit: int) -> None:
    limited = trace.limit(limit)

    assert limited.steps()[1].max() <= limit
    assert trace.steps()[1].min() >= 0


@pytest.mark.parametrize(
    ("model", "capacity", "losses_per_event", "collapse_share", "hours"),
    [
        (BURSTY, 32, 167 / 79, 0, 1000),
        (CALM, 64, 154 / 36, 0, 4000),
        (COLLAPSING, 16, 1473 / 145, 98 / 145, 16000),
    ],
    ids=["bamboo-p3", "bamboo-a100", "skypilot-us-west-2a"],
)
def test_a_synthetic_trace_has_the_published_statistics(
    model: TraceModel, capacity: int, losses_per_event: float, collapse_share: float, hours: int
) -> None:
    """Within 5 %: over so many hours there are some 5,000 loss events or more, whose mean is known to 2 %."""
    trace = synthesise(seed=1, capacity=capacity, duration_s=hours * SECONDS_PER_H, model=model)

    summary = trace.summary()
    assert summary.max_available <= capacity
    assert summary.mean_available / capacity == pytest.approx(model.mean_share, rel=0.05)
    assert summary.losses_per_instance_h == pytest.approx(model.losses_per_instance_h, rel=0.05)
    assert summary.losses / summary.loss_events == pytest.approx(losses_per_event, rel=0.05)
    assert summary.collapse_share == pytest.approx(collapse_share, abs=0.05)


def test_a_synthetic_trace_loses_as_much_in_bulk_as_the_published_one_which_was_not_fitted(p3: Trace) -> None:
    synthetic = synthesise(seed=1, capacity=32, duration_s=1000 * SECONDS_PER_H, model=BURSTY)

    assert synthetic.summary().bulk_loss_share == pytest.approx(p3.summary().bulk_loss_share, rel=0.05)


def test_a_synthetic_trace_depends_on_its_seed_alone() -> None:
    first = synthesise(seed=7, capacity=8, duration_s=24 * SECONDS_PER_H)

    again = synthesise(seed=7, capacity=8, duration_s=24 * SECONDS_PER_H)

    assert again == first
    assert synthesise(seed=8, capacity=8, duration_s=24 * SECONDS_PER_H) != first


@pytest.mark.parametrize(
    "wrong", [{"mean_share": 1.0}, {"losses_per_instance_h": 0.0}, {"spread": 0.0}, {"collapse": 1.5}]
)
def test_an_impossible_climate_is_refused(wrong: dict[str, float]) -> None:
    model = replace(BURSTY, **wrong)

    with pytest.raises(SpotlightError, match="mean_share and spread must be above 0"):
        synthesise(seed=0, capacity=8, duration_s=60, model=model)


def test_what_cannot_be_done_to_a_trace_is_refused() -> None:
    trace = parse_trace("0,add,a\n10000,remove,a", where="t")

    with pytest.raises(SpotlightError, match="no part from 5 to 11 s: choose one within 0 to 10 s"):
        trace.cut(5, 11)
    with pytest.raises(SpotlightError, match="stretched by 0"):
        trace.stretch(0)
    with pytest.raises(SpotlightError, match=r"sample 1\.5"):
        trace.sample(1.5, seed=0)


def is_up(switches: tuple[tuple[float, bool], ...], t_s: float) -> bool:
    """Whether a place is up after what happens at a moment."""
    return [False, *(up for time_s, up in switches if time_s <= t_s)][-1]
