"""Strategies to compare: what they change, and how a mistake in them is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight import config
from spotlight.config import Config
from spotlight.inputs import check_inputs
from spotlight.market.prices import usd_per_h
from spotlight.records import SpotlightError
from spotlight.strategies import BASELINES, strategies

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain_prompts = "a.txt"\nvalidation_prompts = "b.txt"\n' + text)
    return config.load(path)


def test_left_out_they_are_spotlight_and_what_it_is_measured_against() -> None:
    settings = config.load(EXAMPLES / "ocr-tiny.toml")

    compared = dict(strategies(settings))

    assert list(compared) == list(BASELINES)
    assert compared["Spotlight"] == settings
    assert compared["reserved only"].pools.spot.workers == 0
    assert not compared["spot, restart on preemption"].strategy.elastic


def test_seconds_of_an_update_without_a_gpu_are_not_charged_where_there_is_one() -> None:
    works = ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]', "pools.reserved.gpu=cpu")
    settings = config.load(EXAMPLES / "paper-512.toml", [*works, "simulation.update_s=5", "simulation.strategies={}"])

    compared = dict(strategies(settings))

    assert compared["reserved only"].simulation.update_s is None
    assert compared["Spotlight"].simulation.update_s == 5


def test_seconds_of_an_update_are_charged_to_all_where_reserved_workers_are_alike() -> None:
    works = ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]')
    settings = config.load(EXAMPLES / "paper-512.toml", [*works, "simulation.update_s=5", "simulation.strategies={}"])

    assert {each.simulation.update_s for _, each in strategies(settings)} == {5}


@pytest.mark.parametrize("gpu", ["cpu", "a100-80gb"])
def test_where_the_reserved_worker_only_updates_gpus_alone_are_like_the_spot_ones(gpu: str) -> None:
    works = ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]', f"pools.reserved.gpu={gpu}")
    settings = config.load(
        EXAMPLES / "paper-512.toml", [*works, "pools.reserved.usd_per_h=1", "simulation.strategies={}"]
    )

    compared = dict(strategies(settings))

    assert list(compared) == list(BASELINES)
    alone, streaming = compared["reserved only"], compared["reserved + spot, no exploration"]
    assert (alone.pools.reserved.gpu, alone.pools.reserved.usd_per_h) == ("h100", usd_per_h("h100", "reserved"))
    assert (alone.strategy.train_pools, alone.pools.reserved.workers) == (("reserved",), settings.pools.spot.workers)
    assert (streaming.pools.reserved, streaming.strategy.rollout_pools) == (settings.pools.reserved, ("spot",))


@pytest.mark.parametrize(("std", "compared_std"), [("global", "group"), ("group", "group"), ("none", "none")])
def test_streaming_changes_advantages_only_if_they_need_other_prompts(std: str, compared_std: str) -> None:
    settings = config.load(EXAMPLES / "ocr-tiny.toml", [f"train.advantage_std={std}"])

    compared = dict(strategies(settings))

    assert compared["reserved + spot, no exploration"].train.advantage_std == compared_std
    assert compared["Spotlight"].train.advantage_std == std


def test_a_run_that_begins_rollouts_early_is_compared_with_what_does_not() -> None:
    settings = config.load(EXAMPLES / "ocr-tiny.toml", ["strategy.exploration=off", "rollout.prompts_ahead=2"])

    compared = dict(strategies(settings))

    assert {each.rollout.prompts_ahead for each in compared.values()} == {0}


@pytest.mark.parametrize("name", ["paper-512", "paper-1280", "large"])
def test_the_examples_and_their_strategies_are_settings_that_a_simulation_takes(name: str) -> None:
    settings = config.load(EXAMPLES / f"{name}.toml")
    check_inputs(settings, with_model=False, live=False)

    compared = dict(strategies(settings))

    assert "Spotlight" in compared
    assert len(set(map(config.dump, compared.values()))) == len(compared)


@pytest.mark.parametrize("key", ['"strategy.exploration"', "strategy.exploration"])
def test_a_strategy_is_the_settings_but_for_what_it_names(tmp_path: Path, key: str) -> None:
    settings = load(tmp_path, f'[simulation]\nhours = 3\n[simulation.strategies."no exploration"]\n{key} = "off"\n')

    ((name, changed),) = strategies(settings)

    assert name == "no exploration"
    assert changed.strategy == settings.strategy.model_copy(update={"exploration": "off"})
    assert changed.simulation == settings.simulation.model_copy(update={"strategies": {}})
    assert (changed.data, changed.pools) == (settings.data, settings.pools)


@pytest.mark.parametrize("given", ["usd_per_h = 3.0", 'prices = "prices.csv"'])
def test_another_gpu_has_its_own_price(tmp_path: Path, given: str) -> None:
    (tmp_path / "prices.csv").write_text("time,usd_per_h\n0,1\n")
    other = '[simulation.strategies."on L40S"]\n"pools.spot.gpu" = "l40s"\n'
    settings = load(tmp_path, f'[pools.spot]\ngpu = "h100"\n{given}\n{other}')

    ((_, changed),) = strategies(settings)

    assert (changed.pools.spot.usd_per_h, changed.pools.spot.prices) == (usd_per_h("l40s", "spot"), "")


def test_what_these_settings_cannot_be_compared_with_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = '[pools.spot]\nworkers = 0\ngpu = "h100"\n[strategy]\nexploration = "off"\nrollout_pools = ["reserved"]\n'
    left_out = [name for name, changes in BASELINES.items() if changes["strategy.exploration"] == "stale"]

    compared = dict(strategies(load(tmp_path, alone)))

    assert [name for name in BASELINES if name not in compared] == left_out
    assert [said.partition(" is not compared, for")[0] for said in caplog.messages] == list(map(repr, left_out))


def test_another_algorithm_has_its_own_clip_range_and_another_model_its_own_size(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        '[simulation.strategies.a]\n"train.algorithm" = "awm"\n'
        '[simulation.strategies.b]\n"train.algorithm" = "awm"\n"train.clip_range" = 0.5\n'
        '[simulation.strategies.c]\n"model.name" = "tiny-mixed"\n',
    )
    kept = load(tmp_path, '[train]\nclip_range = 0.1\n[simulation.strategies.a]\n"train.algorithm" = "awm"\n')

    compared = dict(strategies(settings))

    assert [compared[name].train.clip_range for name in "ab"] == [1.0, 0.5]
    assert next(strategies(kept))[1].train.clip_range == 0.1
    assert (compared["c"].model.height_px, compared["c"].model.width_px) == (16, 48)


@pytest.mark.parametrize("order", [1, -1])
def test_a_price_beside_another_gpu_counts_wherever_it_stands(tmp_path: Path, order: int) -> None:
    lines = ['"pools.spot.usd_per_h" = 100', '"pools.spot.gpu" = "h100-aws"'][::order]
    settings = load(tmp_path, '[simulation.strategies."dear"]\n' + "\n".join(lines))

    ((_, changed),) = strategies(settings)

    assert changed.pools.spot.usd_per_h == 100


def test_paths_in_a_strategy_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n")
    settings = load(tmp_path, '[simulation.strategies."on a trace"]\n"pools.spot.trace" = "trace.csv"\n')

    ((_, changed),) = strategies(settings, tmp_path)

    assert changed.pools.spot.trace == str(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ('"strategy.explore" = "off"', "[strategy] has no field 'explore' (did you mean 'exploration'?)"),
        ('"strategy.exploration" = "maybe"', "strategy.exploration = 'maybe': input should be"),
        ('"strategy.exploration.kind" = "off"', "'exploration' is a value, not a section"),
        ('"exploration" = "off"', "expected a setting of a run"),
        ('"simulation.hours" = 2', "expected a setting of a run"),
        ('"pools.spot.workers" = 0', 'strategy.exploration = "stale" runs on spot workers'),
    ],
)
def test_a_mistake_in_a_strategy_is_told_with_its_name(tmp_path: Path, changes: str, reason: str) -> None:
    settings = load(tmp_path, f'[simulation.strategies."mine"]\n{changes}\n')

    with pytest.raises(SpotlightError) as refused:
        list(strategies(settings))

    assert str(refused.value).startswith("[simulation.strategies] 'mine': ")
    assert reason in str(refused.value)


def test_strategies_outlive_being_written_and_read(tmp_path: Path) -> None:
    settings = load(tmp_path, '[simulation.strategies."a, b"]\n"strategy.exploration" = "off"\n')
    copy = tmp_path / "config.toml"

    copy.write_text(config.dump(settings))

    assert config.load(copy) == settings
