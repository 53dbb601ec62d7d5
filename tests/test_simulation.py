"""A run on the virtual clock: what it must share with a live one, and what it needs to run."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.dispatch.dispatcher import differing
from cluster.start.local import _schedules
from runs import PROMPTS, ROOT, VALIDATED, outcome, settings_file
from spotlight import attach, config
from spotlight.display import comparison
from spotlight.plan.beliefs import Beliefs
from spotlight.plan.durations import TaskDurations
from spotlight.records import SpotlightError
from spotlight.run import Run
from spotlight.simulation import Learning, Simulation, simulate, stays
from spotlight.store import resuming
from spotlight.store.rows import DECISIONS, EVENTS, SPANS
from spotlight.store.rundir import RunDir
from spotlight.store.weights import published


def simulated(directory: Path, *overrides: str, learning: Learning = "modelled") -> Simulation:
    simulation = Simulation("test", config.load(settings_file(directory), overrides), learning)
    simulation.go(report=False)
    return simulation


def weights(run: RunDir) -> list[str]:
    return [row.weights_sha256 for row in run.history()]


def test_a_simulated_run_that_really_learns_is_the_live_run_bit_for_bit(tmp_path: Path) -> None:
    live = Run(settings_file(tmp_path / "live")).start()
    live.wait()

    virtual = simulated(tmp_path / "virtual", learning="real").directory

    assert outcome(virtual.path) == outcome(live.directory.path)
    assert weights(virtual) == weights(live.directory)


@pytest.mark.parametrize(
    "strategy",
    [
        (),
        ("strategy.exploration=off",),
        ("strategy.exploration=blocking", 'strategy.rollout_pools=["reserved"]'),
        ("strategy.on_preemption=restart", "strategy.elastic=false"),
        ("train.advantage_std=group", "strategy.offload=adaptive"),
        ("exploration.budget=time",),
        ("exploration.budget=worth", 'strategy.train_pools=["reserved","spot"]'),
        ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]'),
        ("pools.reserved.gpu=cpu", 'strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]'),
        ("strategy.exploration=off", "rollout.prompts_ahead=2", 'strategy.train_pools=["reserved","spot"]'),
    ],
)
def test_every_strategy_runs_to_its_end_and_its_dispatching_replays(tmp_path: Path, strategy: Sequence[str]) -> None:
    simulation = simulated(tmp_path, *strategy)

    run = simulation.directory
    assert [row.iteration for row in run.history()] == [0, 1]
    assert [row.version for row in run.validation()] == [0, 2]
    rows = run.rows(DECISIONS)
    assert rows
    assert list(differing(rows)) == []


SPOT_WORKS = ("pools.reserved.gpu=cpu", 'strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]')
NOTICES = ("pools.spot.trace_model=bursty", "pools.spot.preemption=notice", "pools.spot.speedup=2000")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("exploration.budget=fixed",), marks=pytest.mark.live),
        ("exploration.budget=time",),
        pytest.param(("strategy.exploration=blocking",), marks=pytest.mark.live),
        ("strategy.exploration=off", *NOTICES),
        pytest.param(("pools.reward.workers=1", "pools.reward.usd_per_h=1"), marks=pytest.mark.live),
    ],
)
def test_a_reserved_machine_without_a_gpu_updates_and_does_no_more(tmp_path: Path, more: Sequence[str]) -> None:
    more = ("rollout.steps=3", "rollout.prompts=2", *more)
    bare = simulated(tmp_path / "bare", *SPOT_WORKS, *more, learning="real").directory

    phases = {span["phase"] for span in bare.rows(SPANS) if span["pool"] == "reserved"}

    assert phases == {"update", "publish"}
    assert "explore-r0" in {span["phase"] for span in bare.rows(SPANS)} or "strategy.exploration=off" in more
    if "exploration.budget=time" not in more:
        usual = simulated(tmp_path / "usual", *more, learning="real").directory
        assert outcome(bare.path) == outcome(usual.path)


@pytest.mark.parametrize(
    "algorithm",
    [
        ("dpo",),
        ("awm", "train.timesteps=2"),
        ("grpo-guard", "rollout.sampler=sde", "rollout.sde_window=[0, 5]", "rollout.sde_window_size=2"),
    ],
)
def test_every_algorithm_trains_in_a_run(tmp_path: Path, algorithm: Sequence[str]) -> None:
    name, *more = algorithm
    few = ("run.iterations=1", "strategy.exploration=off", "rollout.prompts=2", "rollout.steps=6")

    run = simulated(tmp_path, *few, f"train.algorithm={name}", *more, learning="real").directory

    (row,) = run.history()
    start = published(run.path, 0)
    assert start
    assert row.weights_sha256 != start.weights.sha256
    assert row.metrics["grad_norm"] > 0


def test_an_error_of_the_only_simulation_names_no_strategy(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"^simulation\.hours"):
        next(simulate(settings_file(tmp_path), ["simulation.hours=1e-6"], compare=False))


def test_a_time_in_which_nothing_is_validated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"simulation\.hours = 1e-06: nothing is validated in that time"):
        simulated(tmp_path, "simulation.hours=1e-6")


@pytest.mark.parametrize("more", [(), ("pools.reward.workers=1", "pools.reward.usd_per_h=1")])
def test_rollouts_that_were_begun_early_go_on_where_they_were(tmp_path: Path, more: Sequence[str]) -> None:
    early = ("strategy.exploration=off", "rollout.prompts_ahead=2", "rollout.steps=40", "train.timesteps=1")
    long = ("run.iterations=3", *more)

    once, often = (
        simulated(tmp_path / every, *early, *long, f"run.validate_every={every}").directory for every in ("3", "1")
    )

    took_s = [[row.measured["wall_s"] for row in run.history()] for run in (once, often)]
    assert took_s[0] == pytest.approx(took_s[1]), "whatever was validated in between"
    spans = once.rows(SPANS)
    assert {span["outcome"] for span in spans if span["phase"] == "rollout-ahead"} >= {"done"}
    shorter = [span["stop_s"] - span["start_s"] for span in spans if span["phase"] == "rollout"]
    assert min(shorter) < max(shorter) / 2


def test_the_same_settings_give_the_same_run(tmp_path: Path) -> None:
    trace = ("pools.spot.trace_model=bursty", "pools.spot.preemption=mixed", "pools.spot.speedup=2000")

    first, second = (simulated(tmp_path / name, *trace).directory for name in ("a", "b"))

    assert [row.measured for row in first.history()] == [row.measured for row in second.history()]
    assert outcome(first.path) == outcome(second.path)


def test_heavy_training_is_worth_more_exploration_than_light_training(tmp_path: Path) -> None:
    worth = ("exploration.budget=worth", 'strategy.train_pools=["reserved", "spot"]', "exploration.seeds_tried=64")

    light, heavy = (
        simulated(tmp_path / str(levels), *worth, "run.iterations=5", f"train.timesteps={levels}").directory.history()
        for levels in (2, 50)
    )

    assert light[-1].metrics["seeds_scored"] < heavy[-1].metrics["seeds_scored"] < heavy[0].metrics["seeds_scored"]


def test_what_is_lost_on_the_way_changes_no_sample_under_a_fixed_budget(tmp_path: Path) -> None:
    calm = simulated(tmp_path / "calm")
    harsh = simulated(
        tmp_path / "harsh",
        "pools.spot.trace_model=bursty",
        "pools.spot.preemption=mixed",
        "pools.spot.speedup=20000",
        "cluster.hang_after_s=1",
    )

    taken = [life for life in harsh.lives if life.reason in ("lost", "left")]
    assert taken
    assert outcome(harsh.directory.path) == outcome(calm.directory.path)


def test_every_worker_that_trains_adds_a_slice_of_the_gradients_and_an_update_fetches_their_sum(tmp_path: Path) -> None:
    settings = ("rollout.prompts=16", "rollout.seeds_kept=2", "train.parts=32", "pools.reserved.workers=4")
    once = ("simulation.gradient_s=3", "strategy.exploration=off", "run.iterations=1")
    run = simulated(tmp_path, *settings, *once).directory

    spans = [span for span in run.rows("spans.jsonl") if span["pool"] != "head"]
    lasted = {
        phase: [span["stop_s"] - span["start_s"] for span in spans if span["phase"] == phase]
        for phase in ("train", "add", "update")
    }

    assert len(lasted["train"]) == 32
    assert min(lasted["train"]) > 3
    assert lasted["add"] == pytest.approx([33 / 4 * 3] * 4)  # a quarter of 32 to fetch, and of one to keep
    assert lasted["update"] == pytest.approx([3])


ALL_VALIDATED = f"data.validation_prompts={VALIDATED[20]}"
SCORES_APART = ("pools.reward.workers=2", "pools.reward.usd_per_h=0.5")
STRUCK = ("pools.reward.trace_model=bursty", "pools.reward.preemption=mixed", "pools.reward.speedup=20000")


@pytest.mark.live
def test_workers_that_only_score_and_are_lost_change_no_sample_no_score_and_no_weight(tmp_path: Path) -> None:
    few = ("run.iterations=2", "rollout.prompts=2", "rollout.steps=4", "cluster.hang_after_s=1")
    plain = simulated(tmp_path / "plain", *few, learning="real").directory
    apart = simulated(tmp_path / "apart", *few, *SCORES_APART, *STRUCK, learning="real")

    run, spans = apart.directory, apart.directory.rows("spans.jsonl")
    assert outcome(run.path) == outcome(plain.path)
    assert weights(run) == weights(plain)
    taken = [life for life in apart.lives if life.pool == "reward" and life.reason in ("lost", "left")]
    assert taken
    assert any(span["pool"] == "reward" and span["outcome"] == "lost" for span in spans)
    assert {span["pool"] for span in spans if "score" in span["phase"]} == {"reward"}
    assert list(differing(run.rows(DECISIONS))) == []


def test_scoring_apart_leaves_the_gpus_the_time_that_it_took_them_and_is_paid_for(tmp_path: Path) -> None:
    paced = ("pace.gpu=h100", "pace.speedup=60", "strategy.exploration=off", ALL_VALIDATED)
    beside = simulated(tmp_path / "beside", *paced)
    apart = simulated(tmp_path / "apart", *paced, *SCORES_APART)

    def scored_s(simulation: Simulation) -> dict[str, float]:
        rows = simulation.directory.rows("spans.jsonl")
        return {
            pool: sum(row["stop_s"] - row["start_s"] for row in rows if "score" in row["phase"] and row["pool"] == pool)
            for pool in ("reserved", "spot", "reward")
        }

    assert scored_s(beside)["reward"] == 0
    assert scored_s(apart)["reward"] == pytest.approx(scored_s(beside)["reserved"] + scored_s(beside)["spot"])
    assert scored_s(apart)["spot"] == 0
    assert apart.directory.history()[-1].measured["stopped_s"] < beside.directory.history()[-1].measured["stopped_s"]
    spent = apart._outcome().ledger
    assert spent.usd(pool="reward") > 0


def test_modelled_learning_imports_neither_torch_nor_the_distributed_scheduler(tmp_path: Path) -> None:
    code = (
        "import sys; from spotlight.shell import main; "
        f"status = main(['simulate', {str(settings_file(tmp_path))!r}, '--alone', '--no-report']); "
        "print(status, *(name for name in ('torch', 'distributed', 'zarr') if name in sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr


def test_a_target_ends_a_run_and_says_when_and_at_what_cost_it_was_reached(tmp_path: Path) -> None:
    overrides = ["run.iterations=200", "run.validate_every=1", "run.target=0.6", f"run.dir={tmp_path}"]

    (found,) = simulate(settings_file(tmp_path), overrides, compare=False, report=False)

    assert found.score >= 0.6
    assert found.iterations < 200
    assert found.target_h is not None
    assert 0 < found.target_h <= found.hours * (1 + 1e-9)
    assert found.target_usd is not None
    assert 0 < found.target_usd <= found.usd * (1 + 1e-9)


def test_a_target_is_checked_against_the_learning_that_is_asked_for(tmp_path: Path) -> None:
    settings, low = settings_file(tmp_path), "run.target=0.4"

    simulate(settings, [low], learning="real")
    with pytest.raises(SpotlightError, match=r"target = 0.4 with modelled .* rise from simulation.start = 0.512"):
        simulate(settings, [low, "simulation.learning=real"], learning="modelled")


def test_a_limit_of_dollars_ends_a_run_before_it_is_reached(tmp_path: Path) -> None:
    """Its validations cost hardly anything here."""
    overrides = ["run.iterations=40", "run.validate_every=40", f"run.dir={tmp_path}"]

    (found,) = simulate(settings_file(tmp_path), [*overrides, "run.usd_max=0.1"], compare=False, report=False)

    assert 0 < found.iterations < 40
    last_usd = RunDir.open(found.run_dir).history()[-1].measured["usd"]
    assert 0.1 - 2 * last_usd < found.usd < 0.1 + last_usd
    assert found.unvalidated == 0
    assert "run.usd_max is 0.1" in resuming.ended_early(RunDir.open(found.run_dir))


def test_the_last_hour_ends_a_run_which_is_then_finished(tmp_path: Path) -> None:
    overrides = ["run.iterations=2000", "simulation.hours=0.01", f"run.dir={tmp_path}"]

    (found,) = simulate(settings_file(tmp_path), overrides, compare=False, report=False)

    assert found.hours == pytest.approx(0.01)
    assert 0 < found.iterations < 2000
    run = RunDir.open(found.run_dir)
    assert {row["outcome"] for row in run.rows(SPANS)} == {"done", "stopped"}  # what ran then is not lost
    assert "broken" not in {row["event"] for row in run.rows(EVENTS)}
    assert attach(found.run_dir).state == "finished"


def test_a_trace_begins_when_its_first_workers_are_there(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n300,remove,b\n500,add,b\n")
    settings = (f"pools.spot.trace={trace}", "simulation.start_up_s=4.0", ALL_VALIDATED, "run.iterations=3")
    simulation = simulated(tmp_path / "run", *settings)

    joined = [(life.worker, life.joined_s) for life in simulation.lives]
    (lost_s,) = (life.left_s for life in simulation.lives if life.reason == "lost")

    there_s = joined[0][1]
    assert joined[:3] == [(name, there_s) for name in ("reserved-0", "spot-0", "spot-1")]
    ((again, again_s),) = joined[3:]
    assert again == "spot-1"
    assert again_s == pytest.approx(there_s + 0.5 + 4.0)
    assert lost_s == pytest.approx(there_s + 0.3)


def test_along_made_up_traces_workers_come_and_go_as_in_the_live_run(tmp_path: Path) -> None:
    made_up = [f"pools.{pool}.{what}" for pool in ("spot", "reward") for what in ("trace_model=bursty", "workers=3")]
    settings = config.load(settings_file(tmp_path), [*made_up, "pools.reward.usd_per_h=1", "run.seed=7"])
    durations = TaskDurations(settings)
    trace_s = durations.warm_up_s + durations.start_up_s

    def ends_s(ups: Sequence[tuple[float, float]] | None, began_s: float) -> list[float]:
        return [until_s - began_s for _, until_s in ups or ()]

    live = {
        f"{name}-{index}": ends_s(schedule.ups, 0.0)
        for name, pool in settings.pools
        for index, schedule in enumerate(_schedules(name, pool, settings))
        if pool.trace_model
    }

    simulated = {stay.name: ends_s(stay.ups, trace_s) for stay in stays(settings, 0.0)}
    assert len(live) == 6
    assert live == {name: pytest.approx(simulated[name]) for name in live}
    assert live["spot-0"] != live["reward-0"]


def test_exploration_that_had_no_workers_is_not_said_to_have_been_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (trace := tmp_path / "trace.csv").write_text("0,0\n3600000,0\n")

    simulated(tmp_path / "run", f"pools.spot.trace={trace}", "run.iterations=4", "exploration.budget=time")

    (said,) = caplog.messages
    assert "it was for nothing" in said
    assert "smaller, if any spot worker was there; " in said


@pytest.mark.parametrize("setting", ["strategy.rollout_pools", "strategy.train_pools"])
def test_spot_workers_that_are_gone_for_good_end_a_run_that_needs_them(tmp_path: Path, setting: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n5000,remove,a\n5000,remove,b\n")
    overrides = [f"pools.spot.trace={trace}", f'{setting}=["spot"]', "run.iterations=50"]

    with pytest.raises(SpotlightError, match="nothing happens any more.*spot"):
        simulated(tmp_path / "run", *overrides)


def test_a_run_without_a_gpu_whose_spot_workers_never_come_says_for_whom_it_waits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n1,remove,a\n")
    spot = ['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]', "pools.reserved.gpu=cpu"]

    with pytest.raises(SpotlightError, match="the pools spot, and none will come; give the reserved workers a GPU"):
        simulated(tmp_path / "run", f"pools.spot.trace={trace}", *spot)


def test_when_nothing_happens_any_more_is_told_from_the_start_though_prices_have_a_calendar(tmp_path: Path) -> None:
    trace, prices = tmp_path / "trace.csv", tmp_path / "prices.csv"
    trace.write_text("0,add,a\n5000,remove,a\n")
    prices.write_text("time,usd_per_h\n2026-11-28T00:00:00Z,2\n2026-11-28T01:00:00Z,3\n")
    files = (f"pools.spot.trace={trace}", f"pools.spot.prices={prices}")

    with pytest.raises(SpotlightError, match=r"nothing happens any more after \d{2} s"):
        simulated(tmp_path / "run", *files, 'strategy.rollout_pools=["spot"]', "run.iterations=50")


def test_hours_count_from_the_beginning_whatever_the_date_of_the_first_price(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("time,usd_per_h\n2026-11-28T00:00:00Z,2\n2026-11-28T01:00:00Z,2\n")
    short = ["run.iterations=2", f"run.dir={tmp_path}"]

    plain, dated = (
        next(simulate(settings_file(tmp_path), [*short, spot], compare=False, report=False))
        for spot in ("pools.spot.usd_per_h=2", f"pools.spot.prices={prices}")
    )

    assert dated.hours == pytest.approx(plain.hours)
    assert dated.usd == pytest.approx(plain.usd)


def test_hours_and_dollars_of_a_paced_run_are_those_of_what_it_emulates(tmp_path: Path) -> None:
    paced = ["pace.gpu=h100", "pace.speedup=60", "run.validate_every=1", "run.target=0.55", "run.iterations=99"]

    (found,) = simulate(settings_file(tmp_path), [*paced, f"run.dir={tmp_path}"], compare=False, report=False)

    run = RunDir.open(found.run_dir)
    summary = run.summary()
    assert summary
    assert 0 < found.seeds_scored <= run.config().exploration.seeds_tried
    assert found.hours == pytest.approx(60 * summary.wall_s / 3600)
    assert found.usd == pytest.approx(60 * summary.usd)
    assert found.target_usd == pytest.approx(found.usd, rel=0.1)
    assert found.target_h == pytest.approx(found.hours, rel=0.1)


def test_the_report_of_a_simulated_run_says_so(tmp_path: Path) -> None:
    simulation = Simulation("test", config.load(settings_file(tmp_path), ["run.report=true"]), "modelled")

    simulation.go()

    assert "simulated" in (simulation.directory.path / "report.html").read_text().lower()


def test_what_any_strategy_lacks_is_told_before_the_first_is_run(tmp_path: Path) -> None:
    settings = settings_file(tmp_path)
    text = '\n[simulation.strategies."on a trace"]\n"pools.spot.trace" = "none.csv"\n'
    settings.write_text(settings.read_text() + text)

    with pytest.raises(SpotlightError, match=f"^on a trace: {tmp_path}/none.csv"):
        next(simulate(settings, [f"run.dir={tmp_path}/runs"]))

    assert not (tmp_path / "runs").exists()


def test_what_a_usual_strategy_lacks_leaves_it_out_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        outcome.name
        for outcome in simulate(
            settings_file(tmp_path), ["strategy.exploration=off", "exploration.prompts=100"], report=False
        )
    ]

    assert names == ["as configured", "reserved only", "reserved + spot, no exploration"]
    assert "'Spotlight' is not compared" in caplog.text
    assert "an iteration takes 100 prompts" in caplog.text


def test_a_doubt_about_all_strategies_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_file(tmp_path)
    settings.write_text(settings.read_text() + '\n[simulation.strategies."other seed"]\n"run.seed" = 9\n')

    (trace := tmp_path / "trace.csv").write_text("0,add,a\n3600000,end,\n")
    simulate(settings, ["train.lora_alpha=8", f"pools.spot.trace={trace}"], report=False)

    for doubt in ("train.lora_alpha", "never come"):
        assert [doubt in message for message in caplog.messages].count(True) == 1


def test_a_strategy_that_changes_nothing_is_what_is_configured_and_not_run_again(tmp_path: Path) -> None:
    settings = settings_file(tmp_path)
    text = settings.read_text() + '\n[simulation.strategies."ours"]\n"strategy.elastic" = true\n'
    settings.write_text(text + '[simulation.strategies."other seed"]\n"run.seed" = 9\n')

    names = [run.name for run in simulate(settings, ["run.iterations=1", "strategy.elastic=true"], report=False)]

    assert names == ["ours (as configured)", "other seed"]


def test_what_the_planner_knew_is_kept_only_where_the_weights_are(tmp_path: Path) -> None:
    run = simulated(tmp_path, "run.iterations=7", "run.validate_every=3").directory

    known = {path.stem for path in run.path.glob("beliefs/*.json")}

    assert known == {"00003", "00006", "00007"}
    assert known | {"00000"} == {path.name[1:] for path in run.path.glob("weights/v*")}


def test_candidates_that_are_trained_on_are_planned_by_the_time_that_they_had(tmp_path: Path) -> None:
    few = ("run.iterations=7", "run.validate_every=3", "exploration.budget=time", "exploration.seeds_tried=16")
    run = simulated(tmp_path, *few, "exploration.reuse=true", "train.timesteps=1").directory

    history = run.history()
    assert all({"spare_s", "beside_s", "work_s"} <= row.measured.keys() for row in history[:-1])
    planned = [selection.seeds_scored + selection.seeds_dropped for k in range(2, 7) if (selection := run.selection(k))]
    assert max(planned) < 16 * 3
    known = {path.stem for path in run.path.glob("beliefs/*.json")}
    assert known == {"00003", "00005", "00006", "00007"}
    assert known | {"00000"} == {path.name[1:] for path in run.path.glob("weights/v*")}


def test_candidates_that_are_trained_on_are_weighed_as_they_were_drawn(tmp_path: Path) -> None:
    worth = ("exploration.budget=worth", 'strategy.train_pools=["reserved", "spot"]', "exploration.seeds_tried=64")
    more = (*worth, "run.iterations=5", "train.timesteps=20", "exploration.reuse=true")

    scored = []
    for fidelity in (0.2, 1.0):
        settings = config.load(settings_file(tmp_path / str(fidelity)), more)
        simulation = Simulation("test", settings, "modelled")
        simulation.directory.record_beliefs(0, Beliefs(fidelity=fidelity))
        simulation.go(report=False)
        scored.append([row.metrics["seeds_scored"] for row in simulation.directory.history()])

    assert scored[0] == scored[1]
    assert 0 < scored[0][-1] < scored[0][0]


@pytest.mark.parametrize("budget", ["time", "worth"])
def test_where_spot_workers_train_they_first_draw_what_is_trained_on_next(tmp_path: Path, budget: str) -> None:
    spot_trains = ('strategy.train_pools=["reserved","spot"]', "exploration.reuse=true", f"exploration.budget={budget}")
    many = ("run.iterations=6", "train.timesteps=8", "train.parts=24", "exploration.request_seeds=2")
    simulation = simulated(tmp_path, *spot_trains, *many, "pools.spot.workers=3")

    run, kept = simulation.directory, simulation.config.rollout.prompts * simulation.config.rollout.seeds_kept
    selections = [selection for k in range(1, 6) if (selection := run.selection(k))]
    assert len(selections) == 5
    assert all(kept <= selection.seeds_scored for selection in selections)
    assert all(each.drawn for selection in selections for each in selection.kept)
    pools = {span["pool"] for span in run.rows(SPANS) if span["phase"] == "train" and span["iteration"] > 0}
    assert pools == {"reserved", "spot"}


def test_the_shell_compares_with_what_the_settings_name(tmp_path: Path) -> None:
    settings = settings_file(tmp_path)
    text = settings.read_text() + '\n[simulation.strategies."no exploration"]\n"strategy.exploration" = "off"\n'
    settings.write_text(text)
    command = [sys.executable, "-m", "spotlight", "simulate", str(settings), "--no-report"]

    narrow = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=narrow)

    assert "as configured" in done.stdout
    assert "…" not in done.stdout, "what does not fit is left out"
    assert "no exploration" in done.stdout
    assert PROMPTS.is_dir()


def test_where_spot_workers_train_too_to_begin_training_early_makes_no_rollout_late(tmp_path: Path) -> None:
    spot_trains = ('strategy.train_pools=["reserved","spot"]', "strategy.exploration=off", "pools.spot.workers=3")
    work = ("pace.gpu=h100", "rollout.prompts=8", "rollout.seeds_kept=4", "rollout.request_seeds=2", "train.parts=8")
    lasted_s = {}
    for std in ("global", "group"):  # training waits for all samples, or begins with the first
        history = simulated(tmp_path / std, *spot_trains, *work, f"train.advantage_std={std}").directory.history()
        lasted_s[std] = [row.measured["wall_s"] for row in history]

    assert all(early <= late + 0.01 for early, late in zip(lasted_s["group"], lasted_s["global"], strict=True))


def test_settings_that_cannot_be_simulated_are_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="no such settings file"):
        simulate(tmp_path / "nowhere.toml")


def test_what_short_and_long_runs_take_and_cost_is_told_to_three_digits(tmp_path: Path) -> None:
    (run,) = simulate(settings_file(tmp_path), ["run.iterations=1"], compare=False, report=False)
    shown = io.StringIO()

    for hours, usd in ((0.02141, 0.0), (99.96, 1234.5)):
        Console(file=shown, width=80).print(comparison([replace(run, hours=hours, usd=usd)]))

    assert {"0.0214", "0.00", "100", "1,234"} <= set(shown.getvalue().split())


def test_what_a_target_took_is_told_and_what_a_run_took_that_missed_it(tmp_path: Path) -> None:
    (run,) = simulate(settings_file(tmp_path), ["run.iterations=1"], compare=False, report=False)
    missed = replace(run, name="missed", hours=3.0, usd=4.0, target=0.75)
    reached = replace(missed, name="reached", target_h=1.5, target_usd=2.5)
    shown = io.StringIO()

    for outcomes in ([missed, reached], [missed]):
        Console(file=shown, width=200).print(comparison(outcomes, 200))

    said = " ".join(shown.getvalue().split())
    assert "missed > 3.00 > 4.00" in said
    assert "reached 1.50 2.50" in said
    assert "missed 3.00 4.00" in said  # where nobody reached it
    assert said.count("nobody reached the target of 0.75") == 1


def test_a_score_from_before_the_last_hours_iterations_is_told_as_such(tmp_path: Path) -> None:
    (run,) = simulate(settings_file(tmp_path), ["run.iterations=3"], compare=False, report=False)
    hours = f"simulation.hours={run.hours * 0.9}"
    cut, whole = (
        next(simulate(settings_file(tmp_path), ["run.iterations=3", *more], compare=False, report=False))
        for more in ([hours, "run.validate_every=100"], [])
    )
    shown = io.StringIO()

    Console(file=shown, width=200).print(comparison([whole, cut]))

    assert (whole.unvalidated, cut.unvalidated) == (0, cut.iterations)
    assert f"score: as last validated, up to {cut.iterations} iterations before the end" in " ".join(
        shown.getvalue().split()
    )


@pytest.mark.parametrize(("width", "columns"), [(78, 7), (77, 5), (62, 5), (61, 3), (46, 3)])
def test_a_narrow_terminal_leaves_columns_out_and_keeps_every_name(width: int, columns: int) -> None:
    shown = io.StringIO()
    outcome: Any = SimpleNamespace(
        **{"name": "the settings as they are", "hours": 1.25, "usd": 2.5, "score": 0.75, "iterations": 31},
        **{"preemptions": 4, "spot_utilisation": 0.5, "seeds_scored": 12.5, "learning": "real", "unvalidated": 0},
        **dict.fromkeys(("target", "target_h", "target_usd")),
    )

    Console(file=shown, width=width).print(comparison([outcome], width))

    lines = shown.getvalue().splitlines()
    (row,) = (re.split(r"  +", line.strip()) for line in lines if "as they are" in line)
    assert max(map(len, lines)) <= width
    assert row == ["the settings as they are", *["1.25", "2.50", "0.750", "31", "4", "50%", "12.5"][:columns]]
