"""The figure of an iteration graph: where layers stand, and what refuses to be drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from matplotlib.image import imread

from graphs.iteration import example_graph
from spotlight import config
from spotlight.records import SpotlightError
from spotlight.report.iteration_figure import (
    BOXES_MAX,
    _ancestors,
    _columns,
    _grid,
    _Layer,
    _nearest,
    _picture,
    _read,
    _rows,
    _subtitles,
    _title,
    draw,
)
from spotlight.report.palette import phase_colour

EXAMPLES = Path(__file__).parents[1] / "examples"


def build(*layers: tuple[str, int, str, tuple[str, ...]]) -> HighLevelGraph:
    """A graph of ``(name, tasks, pool, names of layers before)``."""
    return HighLevelGraph(
        {
            name: MaterializedLayer({(name, n): (sum, [n]) for n in range(tasks)}, annotations={"pool": pool})
            for name, tasks, pool, _ in layers
        },
        {name: set(before) for name, _, _, before in layers},
    )


def iteration(*, rounds: int = 3, samples: int = 16) -> HighLevelGraph:
    """Iteration 3 with exploration for iteration 4; round r sees the scores of rounds up to r - 2."""
    layers: list[tuple[str, int, str, tuple[str, ...]]] = [
        ("rollout-3", samples, "any", ()),
        ("score-3", samples, "any", ("rollout-3",)),
        ("advantage-3", 1, "head", ("score-3",)),
        ("train-3", 1, "reserved", ("advantage-3",)),
        ("publish-3", 1, "reserved", ("train-3",)),
    ]
    for r in range(rounds):
        seen = tuple(f"explore-score-4-r{n}" for n in range(r - 1))
        layers += [
            (f"allocate-4-r{r}", 1, "head", seen),
            (f"explore-4-r{r}", 6, "spot", (f"allocate-4-r{r}",)),
            (f"explore-score-4-r{r}", 6, "spot", (f"explore-4-r{r}",)),
        ]
    if rounds:
        layers.append(("select-4", 1, "head", tuple(f"explore-score-4-r{r}" for r in range(rounds))))
    return build(*layers)


def columns_of(graph: HighLevelGraph) -> dict[str, range]:
    layers = _read(graph)
    return _columns(layers, {name: set(graph.dependencies[name]) for name in layers})


def test_time_flows_from_left_to_right_along_every_edge() -> None:
    graph = iteration()

    columns = columns_of(graph)

    assert all(
        columns[before].stop <= columns[name].start for name, above in graph.dependencies.items() for before in above
    )


def test_exploration_stands_beside_training_and_ends_with_it() -> None:
    columns = columns_of(iteration(rounds=4))

    rounds = [columns[f"explore-score-4-r{r}"] for r in range(4)]

    assert all(columns["score-3"].stop <= score.start for score in rounds)
    assert columns["train-3"].stop == rounds[-1].stop == columns["publish-3"].start


@pytest.mark.parametrize(
    ("settings", "reserved", "spot"),
    [
        (['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]'], "update the weights", "then train"),
        (['strategy.train_pools=["reserved", "spot"]'], "then train", "then train\nand explore"),
        (['strategy.train_pools=["reserved", "spot"]', "train.width=2"], "then train", "then train\nand explore"),
        (["train.updates=2"], "then train", "then explore"),
        (["strategy.exploration=off"], "then train", "then wait"),
        (["strategy.exploration=off", "rollout.prompts_ahead=1"], "then train", "begin\nwith the next"),
        (['strategy.rollout_pools=["reserved"]', 'strategy.train_pools=["spot"]'], "then update", "then train"),
    ],
)
def test_training_covers_no_exploration_wherever_it_is(settings: list[str], reserved: str, spot: str) -> None:
    graph = example_graph(config.load(EXAMPLES / "ocr-tiny.toml", settings)).graph
    layers, columns = _read(graph), columns_of(graph)

    at = [(row, column) for name in layers for row in _rows(layers[name]) for column in columns[name]]
    subtitles = _subtitles(list(layers.values()))

    assert len(at) == len(set(at))
    assert reserved in subtitles["reserved"]
    assert spot in subtitles["spot"]


@pytest.mark.parametrize(("exploration", "ends"), [("stale", True), ("blocking", False), ("off", False)])
def test_a_figure_says_what_is_made_and_where_training_ends_exploration(exploration: str, ends: bool) -> None:
    settings = [f"strategy.exploration={exploration}", "exploration.rounds=2"]
    graph = example_graph(config.load(EXAMPLES / "ocr-tiny.toml", settings)).graph
    layers = _read(graph)
    nearest = _nearest(graph, layers)

    texts = {text.get_text() for text in _picture(layers, nearest, _columns(layers, nearest)).axes[0].texts}

    assert {"rollout × 8", "publish", "weights 2"} <= texts
    assert ({"explore r0 × 16", "score r1 × 16", "kept seeds 2"} <= texts) == ends
    assert any(text.startswith("training ends") for text in texts) == ends


@pytest.mark.parametrize(
    ("exploration", "title"),
    [
        ("stale", "Iteration 1: train on its samples while spot workers explore seeds for iteration 2"),
        ("blocking", "Iteration 1"),
        ("off", "Iteration 1"),
    ],
)
def test_the_title_says_what_goes_on_beside_training(exploration: str, title: str) -> None:
    settings = config.load(EXAMPLES / "ocr-tiny.toml", [f"strategy.exploration={exploration}"])

    layers = _read(example_graph(settings).graph).values()

    assert _title({layer.phase: layer.iteration for layer in layers}) == title


def test_rounds_of_exploration_take_turns_on_the_spot_workers() -> None:
    columns = columns_of(iteration(rounds=4))

    starts = [columns[f"explore-4-r{r}"].start for r in range(4)]

    assert starts == sorted(set(starts))


def test_exploration_that_a_rollout_waits_for_stands_before_it() -> None:
    graph = build(
        ("allocate-0-r0", 1, "head", ()),
        ("explore-0-r0", 4, "spot", ("allocate-0-r0",)),
        ("select-0", 1, "head", ("explore-0-r0",)),
        ("rollout-0", 4, "any", ("select-0",)),
        ("train-0", 1, "reserved", ("rollout-0",)),
    )

    columns = columns_of(graph)

    assert [columns[name].start for name in graph.layers] == [0, 1, 2, 3, 4]


def test_scoring_stands_where_its_input_is() -> None:
    graph = build(
        ("explore-r0-2", 2, "spot", ()),
        ("explore-score-r0-2", 2, "engine", ("explore-r0-2",)),
        ("rollout-1", 2, "any", ()),
        ("score-1", 2, "engine", ("rollout-1",)),
    )

    layers = _read(graph)

    assert layers["explore-score-r0-2"].lanes == {"spot"}
    assert layers["score-1"].lanes == {"reserved", "spot"}


@pytest.mark.parametrize("name", ["explore-score-r1-4", "explore-score-4-r1", "explore-score-r1-4+"])
def test_a_name_says_phase_round_and_iteration(name: str) -> None:
    (layer,) = _read(build((name, 1, "spot", ()))).values()

    assert (layer.phase, layer.round, layer.iteration) == ("explore-score", "1", "4")


def test_ancestors_reach_through_layers() -> None:
    above = _ancestors({"a": set(), "b": {"a"}, "c": {"b"}})

    assert above == {"a": set(), "b": {"a"}, "c": {"a", "b"}}


def test_a_layer_of_many_tasks_is_counted_and_not_drawn_task_by_task(tmp_path: Path) -> None:
    few, many = tmp_path / "few.svg", tmp_path / "many.svg"

    draw(iteration(samples=BOXES_MAX), few)
    draw(iteration(samples=40 * BOXES_MAX), many)

    boxes = [len(re.findall(phase_colour("rollout"), path.read_text())) for path in (few, many)]
    assert boxes == [BOXES_MAX, BOXES_MAX]


def test_the_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"

    draw(iteration(), first)
    draw(iteration(), second)

    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_picture_grows_with_exploration(tmp_path: Path, rounds: int) -> None:
    draw(iteration(rounds=rounds), tmp_path / "new" / "graph.png")

    height, width = imread(tmp_path / "new" / "graph.png").shape[:2]

    assert (width > 2 * height) == (rounds > 0)


def test_there_are_no_more_rounds_than_requests(tmp_path: Path) -> None:
    few = ["rollout.prompts=2", "exploration.prompts=2", "exploration.seeds_tried=8", "exploration.rounds=4"]
    graph = example_graph(config.load(EXAMPLES / "ocr-tiny.toml", few)).graph

    draw(graph, tmp_path / "graph.svg")

    assert 0 not in map(len, graph.layers.values())
    assert sum("allocate" in name for name in graph.layers) == 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_example_has_a_figure_that_fits_a_page(tmp_path: Path, path: Path) -> None:
    graph = example_graph(config.load(path)).graph

    draw(graph, tmp_path / "graph.png")

    assert imread(tmp_path / "graph.png").shape[1] < 3_700
    assert sum(layer.tasks for layer in _read(graph).values()) == sum(map(len, graph.layers.values()))


@pytest.mark.parametrize(("updates", "parts"), [(2, 8), (3, 1)])
def test_spot_workers_that_train_in_several_updates_and_explore_have_a_figure(
    tmp_path: Path, updates: int, parts: int
) -> None:
    settings = ['strategy.train_pools=["spot"]', f"train.updates={updates}", f"train.parts={parts}"]
    graph = example_graph(config.load(EXAMPLES / "paced.toml", settings)).graph

    draw(graph, tmp_path / "graph.png")

    assert (tmp_path / "graph.png").exists()


def test_layers_without_a_task_are_left_out_and_what_they_joined_stays_joined() -> None:
    graph = build(("rollout-1", 2, "any", ()), ("score-1", 0, "any", ("rollout-1",)), ("x-1", 1, "head", ("score-1",)))

    layers = _read(graph)

    assert _nearest(graph, layers) == {"rollout-1": set(), "x-1": {"rollout-1"}}


def test_of_many_rounds_the_last_stands_for_all_after_the_first_two() -> None:
    layers = _read(iteration(rounds=7))

    explored = [(layer.round, layer.tasks) for layer in layers.values() if layer.phase == "explore"]
    assert explored == [("0", 6), ("1", 6), ("2–6", 30)]


def test_where_candidates_are_trained_on_as_drawn_nobody_is_said_to_roll_out() -> None:
    path = EXAMPLES / "presets" / "spot-heavy.toml"

    told = _subtitles(list(_read(example_graph(config.load(path)).graph).values()))

    assert told["reserved"] == "train"
    assert told["spot"] == "train\nand explore"


def test_another_suffix_is_refused_with_those_that_work(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"\.svg or \.png, not as '\.pdf'"):
        draw(iteration(), tmp_path / "graph.pdf")


def test_an_empty_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match="no layers"):
        draw(HighLevelGraph({}, {}), tmp_path / "graph.svg")


def test_parts_of_training_stand_one_after_the_other() -> None:
    train = _Layer(phase="train", iteration="1", round="", tasks=5, lanes=frozenset({"reserved"}))

    assert _grid(train, rows=1) == (1, 5)
    assert _grid(replace(train, phase="rollout"), rows=1) == (3, 2)
