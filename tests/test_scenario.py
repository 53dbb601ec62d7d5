"""Scenarios as people meet them: their files, what is refused, what the shell and the page show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scenarios import STRATEGIES, TINY, preempted, scenario
from spotlight import learning
from spotlight.__main__ import main
from spotlight.fleet import spot_switches
from spotlight.records import SpotlightError
from spotlight.report.timeline import results_table, write_timeline
from spotlight.scenario import BASELINES, load
from spotlight.simulator import simulate, simulate_file

EXAMPLES = Path(__file__).parents[1] / "examples" / "scenarios"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("hours = 2.0", "hours = -2.0", "hours = -2.0"),
        ("hours = 2.0", "", "hours is missing"),
        ("reserved_gpus = 2", 'reserved_gpus = "two"', "cluster.reserved_gpus = 'two'"),
        ("spot_nodes = 2", "spot_knots = 2", "'cluster.spot_knots'.*did you mean 'spot_nodes'"),
        ("widths = [1, 2]", "widths = [2, 1]", r"job.widths = \[2, 1\].*ascending"),
        ("widths = [1, 2]", "widths = [5, 8]", "no gang of 5 fits"),
        ("widths = [1, 2]", 'model = "no-such"', "no cost model of the model 'no-such'"),
        ("seeds_tried = 12", "seeds_tried = 3", "seeds_tried = 3 is fewer than"),
        ("[job]", "[job", "not valid TOML"),
        ("prompts = 4", "prompts = 40", "prompts = 40 is more than"),
        ("seeds_tried = 12", "seeds_tried = 12\nprompts = 3", "exploration.prompts = 3 is fewer than job.prompts = 4"),
        (
            "seeds_tried = 12",
            "seeds_tried = 12\nprompts = 17",
            "exploration.prompts = 17 is more than job.dataset",
        ),
        ("[job]", 'gpu = "b200"\n[job]', "cluster: 'b200' is not in the price list.*cluster.usd_per_h_reserved"),
    ],
)
def test_a_malformed_scenario_is_refused_with_file_and_field(
    tmp_path: Path, before: str, after: str, reason: str
) -> None:
    with pytest.raises(SpotlightError, match=f"scenario.toml: .*{reason}"):
        scenario(tmp_path, "stale", text=TINY.replace(before, after, 1))


def test_a_scenario_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="nothing.toml"):
        simulate_file(tmp_path / "nothing.toml")


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_the_examples_are_scenarios(name: str) -> None:
    loaded = load(EXAMPLES / name)

    switches = spot_switches(loaded)

    assert len(switches) == loaded.cluster.spot_nodes


def test_the_page_and_the_table_show_every_strategy_and_say_that_learning_is_modelled(
    tmp_path: Path,
) -> None:
    result = simulate(preempted(tmp_path))

    table = results_table(result)
    write_timeline(result, tmp_path / "timeline.html")

    page = (tmp_path / "timeline.html").read_text("utf-8")
    assert list(table.columns[0].cells) == list(STRATEGIES)
    assert table.caption == learning.MODEL
    assert all(name in page for name in (*STRATEGIES, learning.MODEL))
    assert re.findall(r"<(?:script|link)[^>]*(?:src|href)=", page) == []  # it needs no network


def test_the_shell_simulates_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario(tmp_path, "reserved only", "stale")

    status = main(["simulate", str(tmp_path / "scenario.toml"), "--timeline", str(tmp_path / "timeline.html")])

    printed = capsys.readouterr().out
    assert status == 0
    assert "tiny (simulated)" in printed
    assert "stale" in printed
    assert (tmp_path / "timeline.html").stat().st_size > 0


def test_the_shell_asks_what_if_and_shows_every_baseline_where_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TINY)
    changes = ("iterations=1", "cluster.spot_nodes=4", "trace.climate=calm", "job.widths=[1]")
    overrides = [part for change in changes for part in ("--set", change)]

    status = main(["simulate", str(tmp_path / "scenario.toml"), *overrides, "--timeline", str(tmp_path / "t.html")])

    printed = capsys.readouterr().out
    asked = load(tmp_path / "scenario.toml", changes)
    assert status == 0
    assert (asked.iterations, asked.cluster.spot_nodes, asked.trace.climate, asked.job.widths) == (1, 4, "calm", (1,))
    assert asked.strategies == BASELINES
    assert all(word in printed for one in BASELINES for word in one.name.replace(",", "").split())
    assert all(one.name in (tmp_path / "t.html").read_text("utf-8") for one in BASELINES)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("cluster.spot_nodes", "--set 'cluster.spot_nodes': expected section.key=value"),
        ("cluster.spot_knots=3", "'cluster.spot_knots' (did you mean 'spot_nodes'?)"),
        ("cluster=3", "cluster = 3: input should be"),
        ("hours=0", "hours = 0: input should be greater than 0"),
        ("hours.long=1", "--set 'hours.long=1': 'hours' is a value, not a section"),
        ("trace.file=gone.csv", "gone.csv"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused(tmp_path: Path, override: str, reason: str) -> None:
    (tmp_path / "scenario.toml").write_text(TINY)

    with pytest.raises(SpotlightError, match=re.escape(reason)):
        simulate_file(tmp_path / "scenario.toml", [override])


def test_the_shell_says_what_is_wrong_with_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(TINY.replace("prompts = 4", "promts = 4") + '[[strategies]]\nname = "stale"\n')

    status = main(["simulate", str(path)])

    assert status == 1
    assert re.search(
        r"^spotlight: .*scenario.toml: .*'job.promts' \(did you mean 'prompts'\?\)", capsys.readouterr().err
    )
