"""When the workers of a pool are there, as the live pools and simulations follow it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import settings_file
from spotlight.config import PoolSection, load
from spotlight.inputs import check_inputs
from spotlight.market.trace_files import parse_trace
from spotlight.market.trace_models import CALM, synthesise
from spotlight.market.traces import Switches
from spotlight.plan.availability import made_up_s, pool_switches
from spotlight.records import SpotlightError

RECORDED = parse_trace("0,add,a\n0,add,b\n60000,remove,b\n90000,add,c\n120000,remove,a\n", where="trace")
DAY_S = 24 * 3600.0


def pool(**fields: object) -> PoolSection:
    return PoolSection.model_validate({"usd_per_h": 1.0, "workers": 4} | fields)


def test_pools_with_made_up_traces_lose_other_places_at_other_moments() -> None:
    bursty = pool(trace_model="bursty", speedup=100)

    reserved, spot = (
        pool_switches(bursty, None, seed=7, duration_s=made_up_s(bursty), name=name) for name in ("reserved", "spot")
    )

    assert reserved != spot


def test_a_made_up_trace_goes_on_for_a_day_unless_that_would_take_for_ever_to_make() -> None:
    assert made_up_s(pool()) == 30 * DAY_S
    assert made_up_s(pool(speedup=20)) == 1.5 * DAY_S
    assert made_up_s(pool(speedup=400)) == DAY_S
    assert made_up_s(pool(speedup=1e6)) == 36


def test_without_a_trace_everybody_stays() -> None:
    assert pool_switches(pool(), None, seed=0, duration_s=DAY_S) == (((0.0, True),),) * 4


def test_a_recorded_trace_is_followed_worker_by_worker() -> None:
    first, second, *others = pool_switches(pool(), RECORDED, seed=0, duration_s=DAY_S)

    assert first == ((0.0, True), (120.0, False))
    assert second == ((0.0, True), (60.0, False), (90.0, True))
    assert others == [(), ()]


def test_a_node_comes_and_goes_as_a_whole() -> None:
    nodes = pool_switches(pool(trace_takes="node", workers_per_node=2), RECORDED, seed=0, duration_s=DAY_S)

    assert nodes[0] == nodes[1] == ((0.0, True), (120.0, False))
    assert nodes[2] == nodes[3] == ((0.0, True), (60.0, False), (90.0, True))


def test_a_node_that_is_not_full_counts_as_one() -> None:
    nodes = pool_switches(pool(workers=3, trace_takes="node", workers_per_node=2), RECORDED, seed=0, duration_s=DAY_S)

    assert [len(moments) for moments in nodes] == [2, 2, 3]


def test_a_trace_passes_faster_from_where_the_run_begins() -> None:
    first, second, *_ = pool_switches(pool(speedup=10, trace_offset_h=75 / 3600), RECORDED, seed=0, duration_s=DAY_S)

    assert [up for _, up in first] == [True, False]
    assert [time_s for time_s, _ in first] == pytest.approx([0.0, 4.5])
    assert [up for _, up in second] == [True]
    assert [time_s for time_s, _ in second] == pytest.approx([1.5])


def test_a_trace_that_is_over_before_the_run_begins_is_refused() -> None:
    with pytest.raises(SpotlightError, match="the trace lasts 0.0333333 h: begin before its end"):
        pool_switches(pool(trace_offset_h=1), RECORDED, seed=0, duration_s=DAY_S)


def test_a_share_of_the_instances_is_drawn_by_the_seed() -> None:
    shares = {pool_switches(pool(trace_share=0.34), RECORDED, seed=seed, duration_s=DAY_S)[0] for seed in range(20)}

    assert shares == {((0.0, True), (120.0, False)), ((0.0, True), (60.0, False)), ((90.0, True),)}


def test_a_made_up_trace_is_that_of_its_model_and_seed() -> None:
    made_up = pool(workers=8, trace_model="calm", trace_takes="node", workers_per_node=2)

    switches = pool_switches(made_up, None, seed=3, duration_s=DAY_S)

    assert switches[::2] == synthesise(seed=3, capacity=4, duration_s=DAY_S, model=CALM).places(4)
    assert switches != pool_switches(made_up, None, seed=4, duration_s=DAY_S)


def test_a_longer_made_up_trace_begins_as_a_shorter_one() -> None:
    made_up = pool(trace_model="collapsing")

    short, long = (pool_switches(made_up, None, seed=1, duration_s=days * DAY_S) for days in (1, 3))

    for few, many in zip(short, long, strict=True):
        assert many[: len(few)] == few


@given(
    workers=st.integers(0, 9),
    per_node=st.integers(1, 4),
    takes=st.sampled_from(["gpu", "node"]),
    model=st.sampled_from(["bursty", "calm", "collapsing"]),
    offset_h=st.floats(0, 5),
    speedup=st.floats(0.5, 100),
    seed=st.integers(0, 2**32),
)
def test_every_place_goes_up_and_down_in_turn(
    workers: int, per_node: int, takes: str, model: str, offset_h: float, speedup: float, seed: int
) -> None:
    fields = {"workers_per_node": per_node, "trace_takes": takes, "trace_model": model}
    asked = pool(workers=workers, trace_offset_h=offset_h, speedup=speedup, **fields)

    switches = pool_switches(asked, None, seed=seed, duration_s=3600.0)

    assert len(switches) == workers
    assert all(alternates(moments) for moments in switches)


def alternates(moments: Switches) -> bool:
    """Up first, then down, in order of time."""
    in_order = all(before[0] <= after[0] for before, after in pairwise(moments))
    return in_order and [up for _, up in moments] == [index % 2 == 0 for index in range(len(moments))]


def test_a_target_above_all_rewards_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for target in ("1", "95"):
        check_inputs(load(settings_file(tmp_path), [f"run.target={target}"]))

    assert [said for said in caplog.messages if "run.target" in said] == [
        "run.target = 95 ends nothing: no reward is above 1; lower it"
    ]


def test_workers_that_a_trace_never_has_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n20000,remove,a\n40000,add,a\n3600000,end,\n")

    for workers in (2, 4):
        settings = [f"pools.spot.trace={trace}", f"pools.spot.workers={workers}", "pools.reserved.workers=1"]
        check_inputs(load(settings_file(tmp_path), settings))

    (said,) = (message for message in caplog.messages if "pools.spot.workers" in message)
    assert said == f"pools.spot.workers = 4, and 2 of them never come: {trace} has no more at a time"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["pace.height_px=500"], r"\[pace\], with strategy\.widths = .*: 500 x 512 px is no size of qwen-image"),
        (["pace.gpu=v100"], "there is no cost model of the GPU 'v100'"),
        (["pace.model=flux"], "of the model 'flux'; .* name one of them in pace.model, with a GPU in pace.gpu, or"),
        (["pools.spot.trace_model=bursty", "pools.spot.trace_offset_h=1"], ""),
    ],
)
def test_what_the_cost_model_does_not_know_is_found_before_anything_starts(
    tmp_path: Path, more: list[str], said: str
) -> None:
    settings = load(settings_file(tmp_path), ["pace.gpu=h100", *more])

    with pytest.raises(SpotlightError, match=said) if said else nullcontext():
        check_inputs(settings)


def test_a_made_up_trace_that_nobody_could_wait_for_is_refused(tmp_path: Path) -> None:
    asked = ["pools.spot.trace_model=bursty", "pools.spot.speedup=1000", "simulation.hours=1000"]

    with pytest.raises(SpotlightError, match=r"ask for a made-up trace of 1,000,000 h, and at most 100,000"):
        check_inputs(load(settings_file(tmp_path), asked), live=False)
    check_inputs(load(settings_file(tmp_path), [*asked, "pace.gpu=h100", "pace.speedup=1000"]), live=False)
