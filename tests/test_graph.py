"""The iteration graph itself: its layers, edges and pools, what its deciding tasks decide, and that Dask takes it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import pvariance
from typing import Any, Literal

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler
from hypothesis import given
from hypothesis import strategies as st

from cluster.dispatch.request_state import GATED, SCORING, TRAINING
from factories import make_request
from graphs.iteration import (
    Ahead,
    example_graph,
    exploration_graph,
    final_graph,
    iteration_graph,
    prepare_graph,
    validation_graph,
)
from graphs.layers import RESOURCES, Graph, Key
from graphs.loop import learn_from
from graphs.requests import candidates_for, drawn_samples, gangs_of, request_size, rollout_requests, unexplored
from graphs.tasks import exploration, refills, sampling, training
from graphs.tasks.context import RunContext
from graphs.tasks.exploration import Candidates
from graphs.tasks.seeds import candidate_seed
from kills import KillWorkers, client_of
from runs import ROOT, settings_file, wait_for
from spotlight import config
from spotlight.config import Config
from spotlight.plan.beliefs import Beliefs
from spotlight.records import (
    Dropped,
    Explored,
    Prompt,
    Quarantined,
    Request,
    Scored,
    Selection,
    SpotlightError,
    WeightsRef,
)
from spotlight.rl.advantages import group_advantages
from spotlight.rl.parts import Cut
from spotlight.run import Run

VERSION, BEFORE = WeightsRef(version=1, sha256="1" * 64), WeightsRef(version=0, sha256="0" * 64)
SETTING = RunContext(
    run_dir="",
    run="run",
    seed=5,
    sigmas=(1.0, 0.5, 0.0),
    explore_sigmas=(1.0, 0.0),
    validation_sigmas=(1.0, 0.7, 0.3, 0.0),
    start=replace(VERSION, version=0),
)
AHEAD = ("strategy.exploration=off", "rollout.prompts_ahead=2", "rollout.request_seeds=8")
REUSE = ("exploration.reuse=true", "train.advantage_std=group", "train.parts=8", "rollout.prompts=3")
PROMPTS = tuple(Prompt(id=index, text=f'a sign that says "{index}"') for index in (4, 7, 1))
SCORES_APART = ("pools.reward.workers=2", "pools.reward.usd_per_h=0.5")
SPOT_WORKS = ('strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]')
CHAIN = ["rollout-1", "score-1", "advantage-1", "train-1", "update-1", "publish-1"]


def load(*overrides: str) -> Config:
    return config.load(ROOT / "examples" / "ocr-tiny.toml", overrides)


def make_candidates(*, seeds_tried: int = 7, request_seeds: int = 2, rounds: int = 3, keep: int = 3) -> Candidates:
    """For iteration 2 and all prompts."""
    return replace(
        candidates_for(load("exploration.planner=equal"), SETTING, 2, PROMPTS, VERSION),
        seeds_tried=seeds_tried,
        request_seeds=request_seeds,
        rounds=rounds,
        keep=keep,
    )


def allocated(candidates: Candidates) -> list[list[Request]]:
    """What each round tries."""
    rounds: list[list[Request]] = []
    for r in range(candidates.rounds):
        rounds.append(list(exploration.allocate("", candidates, r, (), list(rounds))))
    return rounds


def seeds_of(candidates: Candidates, prompt: Prompt, count: int) -> list[int]:
    """A prompt's first candidates."""
    return [candidate_seed(candidates.seed, candidates.iteration, prompt, index) for index in range(count)]


def score(requests: Sequence[Request], rewards: Sequence[float | None]) -> list[Scored]:
    """Rewards to the requests' seeds, in order."""
    stream = iter(rewards)
    return [Scored(request=request, rewards=tuple(next(stream) for _ in request.seeds)) for request in requests]


def calls_of(graph: Graph) -> dict[Key, tuple[Any, ...]]:
    layers: Any = graph.graph.layers.values()
    return {key: call for layer in layers for key, call in layer.items()}


def notes(graph: Graph) -> dict[str, dict[str, Any]]:
    """The annotations of each layer."""
    return {name: dict(layer.annotations or {}) for name, layer in graph.graph.layers.items()}


def keys_in(value: Any) -> Iterator[Key]:
    """All keys that a call names, also inside lists."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from keys_in(part)


def above(graph: Graph, layer: str) -> set[str]:
    """All layers that a layer waits for, near and far."""
    near = graph.graph.dependencies[layer]
    return near.union(*(above(graph, name) for name in near))


def reused(settings: Config, *, drawn: Sequence[Prompt]) -> Selection:
    """Iteration 1, of whose prompts exploration drew these, each in two requests, and nothing of the others."""
    candidates = candidates_for(settings, SETTING, 1, PROMPTS, BEFORE)
    count = settings.rollout.seeds_kept
    requests = [
        replace(candidates.template, prompt=prompt, seeds=tuple(seeds_of(candidates, prompt, 2 * count))[half::2])
        for prompt in drawn
        for half in (0, 1)
    ]
    scored = score(requests, [(11 * index % 21) / 21 for index in range(2 * count * len(drawn))])
    return exploration.select(candidates, scored, [requests])


GRAPHS = {
    "prepare": prepare_graph("run"),
    "iteration": example_graph(load()),
    "without exploration": example_graph(load('strategy.exploration="off"')),
    "some ahead": example_graph(load(*AHEAD)),
    "in parts": example_graph(load("train.advantage_std=group")),
    "drawn before": iteration_graph(
        load(*REUSE), SETTING, reused(load(*REUSE), drawn=PROMPTS), VERSION, None, drawn_with=BEFORE
    ),
    "some drawn before": iteration_graph(
        load(*REUSE, *SCORES_APART), SETTING, reused(load(*REUSE), drawn=PROMPTS[1:]), VERSION, None, drawn_with=BEFORE
    ),
    "scored apart": example_graph(load("train.advantage_std=group", *SCORES_APART)),
    "validation scored apart": validation_graph(load(*SCORES_APART), SETTING, PROMPTS, VERSION),
    "exploration": exploration_graph(load(), SETTING, make_candidates()),
    "validation": validation_graph(load(), SETTING, PROMPTS, VERSION),
    "final": final_graph(load(), SETTING, done=3),
}


# The shape


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_key_that_is_named_exists_and_its_layer_is_a_declared_dependency(graph: Graph) -> None:
    calls = calls_of(graph)

    assert set(keys_in(list(graph.outputs.values()))) <= calls.keys()
    for layer, declared in graph.graph.dependencies.items():
        named = {key for key, call in calls.items() if key[0] == layer for key in keys_in(call)}
        assert named <= calls.keys()
        assert {name for name, _ in named} - {layer} == declared


def test_an_iteration_has_the_edges_of_the_design() -> None:
    rounds = range(load().exploration.rounds)
    graph = example_graph(load()).graph

    edges = {(before, name) for name, above in graph.dependencies.items() for before in above}

    assert edges == {
        *pairwise(CHAIN),
        *((f"allocate-r{r}-2", f"explore-r{r}-2") for r in rounds),
        *((f"explore-r{r}-2", f"explore-score-r{r}-2") for r in rounds),
        *((f"explore-score-r{seen}-2", f"allocate-r{r}-2") for r in rounds for seen in range(r - 1)),
        *((f"allocate-r{earlier}-2", f"allocate-r{r}-2") for r in rounds for earlier in range(r)),
        *((f"{layer}-r{r}-2", "select-2") for r in rounds for layer in ("allocate", "explore-score")),
    }
    assert graph.layers.keys() - {name for edge in edges for name in edge} == {"compact-0"}


@pytest.mark.parametrize("std", ["group", "none"])
def test_a_part_of_training_waits_for_the_scores_of_its_prompts_only(std: str) -> None:
    settings = load(f"train.advantage_std={std}", "rollout.prompts=10", "rollout.request_seeds=3", "train.parts=8")
    graph = example_graph(settings)
    calls, requests = calls_of(graph), -(-settings.rollout.seeds_kept // 3)

    scores = [[index for name, index in keys_in(calls["advantage-1", at]) if name == "score-1"] for at in range(8)]

    assert [len(found) for found in scores] == [requests * count for count in [1, 1, 1, 2, 1, 1, 1, 2]]
    assert [index for found in scores for index in found] == list(range(10 * requests))
    assert [list(keys_in(calls["train-1", at])) for at in range(8)] == [[("advantage-1", at)] for at in range(8)]
    assert sorted(set(keys_in(calls["update-1", 0]))) == [("train-1", at) for at in range(8)]
    assert list(keys_in(calls["publish-1", 0])) == [("update-1", 0)]


@pytest.mark.parametrize(
    ("pools", "slices", "pool"),
    [
        ('["reserved"]', 2, "gradient-reserved"),
        ('["reserved","spot"]', 5, "gradient-any"),
        ('["spot"]', 3, "gradient-spot"),
    ],
)
def test_each_worker_that_trains_adds_a_slice_of_all_gradients(pools: str, slices: int, pool: str) -> None:
    workers = ("pools.reserved.workers=2", "pools.spot.workers=3")
    graph = example_graph(load(*workers, "rollout.prompts=33", "train.parts=33", f"strategy.train_pools={pools}"))
    calls = calls_of(graph)

    added = [list(keys_in(call)) for key, call in calls.items() if key[0] == "add-1"]

    assert added == [[("train-1", part) for part in range(33)]] * slices
    assert [list(each) for each in calls["update-1", 0][5]] == [[("add-1", at) for at in range(slices)]]
    assert {notes(graph)[name]["pool"] for name in ("add-1", "train-1")} == {pool}


def test_a_reserved_worker_without_a_gpu_denoises_nothing() -> None:
    bare = load("pools.reserved.gpu=cpu", *SPOT_WORKS)
    candidates = candidates_for(bare, SETTING, 0, PROMPTS, VERSION, pools=bare.gpu_pools)
    graphs = (
        prepare_graph("run", on_spot=True),
        example_graph(bare),
        exploration_graph(bare, SETTING, candidates),
        validation_graph(bare, SETTING, PROMPTS, VERSION),
        example_graph(load("pools.reserved.gpu=cpu", *SPOT_WORKS, *SCORES_APART)),
    )

    on_reserved = {
        name
        for graph in graphs
        for name, noted in notes(graph).items()
        if noted["pool"] in ("any", "reserved", "reserved-engine", "update") or noted["resources"] == {"engine": 1}
    }

    assert on_reserved == {"update-1", "publish-1"}


def test_with_more_parts_than_prompts_a_part_is_of_a_prompt_or_two() -> None:
    settings = load("train.advantage_std=group", "rollout.prompts=2", "rollout.seeds_kept=6", "train.parts=3")
    calls = calls_of(example_graph(settings))

    needed = [[index for name, index in keys_in(calls["train-1", at]) if name == "advantage-1"] for at in range(3)]

    assert needed == [[0], [0, 1], [1]]


@pytest.mark.parametrize("override", ["train.advantage_std=global", "train.updates=2", "strategy.offload=none"])
def test_all_parts_wait_for_all_samples_where_they_must_or_should(override: str) -> None:
    calls = calls_of(example_graph(load("train.advantage_std=group", "rollout.prompts=10", "train.parts=8", override)))

    assert [key for key in calls if key[0] == "advantage-1"] == [("advantage-1", 0)]
    assert all(("advantage-1", 0) in keys_in(calls["train-1", at]) for at in range(8))


def test_a_second_updates_gradients_wait_for_the_first_update() -> None:
    calls = calls_of(example_graph(load("train.updates=2", "train.parts=8")))

    assert all(("update-1", 0) in keys_in(calls["train-1+", at]) for at in range(8))
    assert {("train-1", at) for at in range(8)} | {("train-1+", at) for at in range(8)} <= set(
        keys_in(calls["update-1+", 0])
    )
    assert list(keys_in(calls["publish-1", 0])) == [("update-1+", 0)]


@pytest.mark.parametrize(
    ("pools", "pool"), [('["reserved"]', "reserved"), ('["reserved","spot"]', "any"), ('["spot"]', "spot")]
)
def test_the_parts_of_training_that_gangs_share_are_requests_of_one_width(pools: str, pool: str) -> None:
    settings = ("train.width=2", "train.parts=3", "train.updates=2", f"strategy.train_pools={pools}")
    graph = example_graph(load(*settings, "pools.reserved.workers=2"))
    calls, noted = calls_of(graph), notes(graph)["train-1"]

    assert (noted["pool"], noted["shards"], noted["widths"]) == (pool, 2, [2])
    ranks = [("train-1", at) for at in range(6)]
    assert [calls[key][-2:] for key in ranks] == [(f"train-1/{at // 2}", at % 2) for at in range(6)]
    assert set(ranks) <= set(keys_in(calls["update-1", 0]))  # Dask forgets what nobody depends on
    assert list(calls["update-1", 0][4]) == [ranks[0::2]]
    assert all(("update-1", 0) in keys_in(calls["train-1+", at]) for at in range(6))


def test_the_first_prompts_are_rolled_out_an_iteration_early_with_the_weights_before() -> None:
    graph = example_graph(load(*AHEAD))
    calls = calls_of(graph)
    rolled = {
        name: [(call[2].prompt.id, call[2].weights.version) for key, call in calls.items() if key[0] == name]
        for name in ("rollout-1", "rollout-ahead-2")
    }

    assert rolled["rollout-ahead-2"] == [(0, 1), (1, 1)]
    assert rolled["rollout-1"] == [(0, 0), (1, 0), *((prompt, 1) for prompt in range(2, 8))]
    assert above(graph, "ahead-2") == {"rollout-ahead-2", "score-ahead-2"}
    assert (notes(graph)["rollout-ahead-2"]["iteration"], notes(graph)["rollout-ahead-2"]["pool"]) == (2, "spot")


def test_the_next_iteration_asks_for_the_very_requests_that_were_begun_early() -> None:
    settings = load(*AHEAD)
    selections = [
        unexplored(settings, SETTING, k, [replace(PROMPTS[0], id=index) for index in range(8)]) for k in (1, 2)
    ]
    before, now = WeightsRef(version=0, sha256="0" * 64), VERSION

    first = iteration_graph(
        settings, SETTING, selections[0], now, None, ahead=Ahead(weights=before, following=selections[1])
    )
    last = iteration_graph(settings, SETTING, selections[1], replace(now, version=2), None, ahead=Ahead(weights=now))

    begun = [call[2] for key, call in calls_of(first).items() if key[0] == "rollout-ahead-2"]
    asked = [call[2] for key, call in calls_of(last).items() if key[0] == "rollout-2"]
    assert begun == asked[: len(begun)]
    assert not any("ahead" in name for name in last.graph.layers)


@pytest.mark.parametrize("apart", [(), SCORES_APART])
def test_what_exploration_drew_is_trained_on_and_only_the_rest_is_rolled_out(apart: Sequence[str]) -> None:
    settings = load(*REUSE, *apart)
    selection = reused(settings, drawn=PROMPTS[1:])
    graph = iteration_graph(settings, SETTING, selection, VERSION, None, drawn_with=BEFORE)
    calls = calls_of(graph)

    rolled = [call[2] for key, call in calls.items() if key[0] == "rollout-1"]
    assert {request.prompt for request in rolled} == {PROMPTS[0]}
    assert [seed for request in rolled for seed in request.seeds] == list(selection.kept[0].seeds)
    scores = [("refilled-1", 0)] if apart else [("score-1", at) for at in range(len(rolled))]
    assert sum(key[0] == "refilled-1" for key in calls) == bool(apart)
    for at, kept in enumerate(selection.kept):
        given = calls["advantage-1", at][2]
        waits_for = [] if kept.drawn else scores
        drawn = tuple(each for each in given if isinstance(each, tuple) and isinstance(each[0], Scored))
        assert given == [*waits_for, *drawn]
        assert [[scored.rewards for scored in each] for each in drawn] == [
            [each.rewards for each in kept.drawn] for _ in range(bool(kept.drawn))
        ]
    assert list(map(bool, (kept.drawn for kept in selection.kept))) == [False, True, True]


def test_of_what_exploration_drew_only_the_kept_samples_are_trained_on_with_the_rewards_that_they_have() -> None:
    settings = load(*REUSE)
    selection = reused(settings, drawn=PROMPTS)

    assert selection.version == 0
    for kept, drawn in zip(selection.kept, drawn_samples(settings, SETTING, selection, BEFORE), strict=True):
        trained = training.advantage("group", [drawn]).samples
        rewards = {sample.request.seeds[sample.index]: sample.reward for sample in trained}
        assert rewards == dict(zip(kept.seeds, kept.explored_rewards, strict=True))
        assert {(sample.request.purpose, sample.request.weights.version) for sample in trained} == {("explore", 0)}
        assert {sample.request.sigmas for sample in trained} == {SETTING.explore_sigmas}
        assert sum(sample.advantage or 0.0 for sample in trained) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        (("exploration.steps=2",), BEFORE),
        (("rollout.guidance=2",), BEFORE),
        ((), VERSION),
        ((), replace(BEFORE, sha256="2")),
    ],
)
def test_what_was_explored_with_other_settings_or_weights_is_not_trained_on(
    overrides: Sequence[str], weights: WeightsRef
) -> None:
    selection = reused(load(*REUSE), drawn=PROMPTS)
    context = replace(SETTING, explore_sigmas=(1.0, 0.4, 0.0)) if "exploration.steps=2" in overrides else SETTING

    with pytest.raises(SpotlightError, match=r"iteration 1 were explored with other weights .* delete weights/v00001"):
        iteration_graph(load(*REUSE, *overrides), context, selection, VERSION, None, drawn_with=weights)


def test_the_graph_that_is_drawn_has_no_rollout_where_candidates_are_trained_on() -> None:
    layers = example_graph(load(*REUSE)).graph.layers

    assert {name.partition("-")[0] for name in layers} >= {"explore", "advantage", "train"}
    assert not layers["rollout-1"]


def test_a_validation_has_its_own_steps() -> None:
    calls = calls_of(validation_graph(load(), SETTING, PROMPTS, VERSION))

    assert {call[2].sigmas for key, call in calls.items() if key[0] == "validate-1"} == {SETTING.validation_sigmas}


def test_a_prompt_of_which_some_seeds_were_never_drawn_is_rolled_out_as_a_whole() -> None:
    settings = load(*REUSE, "exploration.planner=equal")
    candidates = candidates_for(settings, SETTING, 1, PROMPTS, VERSION)
    (request, *_) = exploration.allocate("", candidates, 0, (), ())
    few = replace(request, seeds=request.seeds[:3])

    selection = exploration.select(candidates, score([few], (0.1, 0.5, 0.9)), [[few]])

    assert sorted(map(str, selection.kept[0].explored_rewards)) == ["0.1", "0.5", "0.9", *["None"] * 5]
    assert {kept.drawn for kept in selection.kept} == {()}


def test_exploration_waits_for_nothing_of_the_training_beside_it() -> None:
    graph = example_graph(load())

    waits_for = above(graph, "select-2")

    assert waits_for == {name for name in graph.graph.layers if name.startswith(("allocate", "explore"))}


def test_a_round_sees_every_score_of_the_rounds_up_to_the_one_before_the_last() -> None:
    graph = example_graph(load())
    calls = calls_of(graph)

    for r in range(load().exploration.rounds):
        seen = {key for key in keys_in(calls[f"allocate-r{r}-2", 0]) if key[0].startswith("explore-score")}
        assert seen == {key for key in calls for early in range(r - 1) if key[0] == f"explore-score-r{early}-2"}


def test_each_task_runs_in_the_pool_of_its_phase() -> None:
    pools = {layer["phase"]: layer["pool"] for layer in notes(example_graph(load())).values()}

    rounds = range(load().exploration.rounds)
    assert pools == {
        "rollout": "any",
        "score": "engine",
        "publish": "reserved-engine",
        "train": "gradient-reserved",
        "update": "update",
        **dict.fromkeys(("advantage", "compact", "select", *(f"allocate-r{r}" for r in rounds)), "head"),
        **{f"explore-r{r}": "spot" for r in rounds},
        **{f"explore-score-r{r}": "engine" for r in rounds},
    }


def test_with_workers_that_only_score_images_are_drawn_where_they_were_denoised_and_nothing_else_changes() -> None:
    graph = example_graph(load(*SCORES_APART))
    pools = {layer["phase"]: layer["pool"] for layer in notes(graph).values()}
    plain = {layer["phase"]: layer["pool"] for layer in notes(example_graph(load())).values()}

    rounds = range(load().exploration.rounds)
    scores = ("score", *(f"explore-score-r{r}" for r in rounds))
    draws = ("decode", *(f"explore-decode-r{r}" for r in rounds))
    more = {"refill": "reserved-engine", "refill-score": "reward", "refilled": "head"}
    assert pools == plain | dict.fromkeys(scores, "reward") | dict.fromkeys(draws, "engine") | more
    dependencies = graph.graph.dependencies
    assert dependencies["score-1"] == {"decode-1"}
    assert dependencies["decode-1"] == {"rollout-1"}
    assert dependencies["refill-score-1"] == {"refill-1"}
    assert dependencies["refilled-1"] == {"refill-score-1", "score-1"}
    assert dependencies["advantage-1"] == {"refilled-1"}


@pytest.mark.parametrize(
    ("pools", "pool"), [('["reserved"]', "reserved"), ('["spot"]', "spot"), ('["spot", "reserved"]', "any")]
)
def test_rollouts_go_where_the_strategy_says(pools: str, pool: str) -> None:
    graph = example_graph(load(f"strategy.rollout_pools={pools}"))

    assert notes(graph)["rollout-1"]["pool"] == pool


def test_exploration_before_an_iteration_runs_in_any_pool() -> None:
    layers = notes(exploration_graph(load(), SETTING, make_candidates()))

    assert {layers[f"explore-r{r}-2"]["pool"] for r in range(3)} == {"any"}


def test_every_task_arrives_at_the_scheduler_with_its_annotations() -> None:
    graph = example_graph(load())
    sent = {key: notes(graph)[key[0]] for key in calls_of(graph)}

    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        futures = client.get(graph.graph, list(graph.outputs.values()), sync=False)
        arrived = wait_for(lambda: client.run_on_scheduler(known_tasks))
        del futures

    assert arrived == {key: (layer, RESOURCES[layer["pool"]]) for key, layer in sent.items()}


def known_tasks(dask_scheduler: Scheduler) -> dict[Any, Any]:
    """Annotations and resources of each task that the scheduler knows."""
    return {key: (task.annotations, task.resource_restrictions) for key, task in dask_scheduler.tasks.items()}


def test_the_gate_is_asked_for_by_the_pools_that_placement_serves() -> None:
    assert {pool for pool, resources in RESOURCES.items() if "gate" in resources} == {*GATED, *TRAINING, SCORING}


# The decisions


@pytest.mark.parametrize(
    ("seeds_tried", "request_seeds", "rounds"), [(7, 2, 3), (8, 4, 2), (5, 8, 4), (1, 1, 1), (32, 8, 4)]
)
def test_the_rounds_try_every_candidate_of_every_prompt_once(seeds_tried: int, request_seeds: int, rounds: int) -> None:
    candidates = make_candidates(seeds_tried=seeds_tried, request_seeds=request_seeds, rounds=rounds)

    requests = [request for each in allocated(candidates) for request in each]

    tried = Counter((request.prompt, seed) for request in requests for seed in request.seeds)
    assert tried == Counter((prompt, seed) for prompt in PROMPTS for seed in seeds_of(candidates, prompt, seeds_tried))
    assert max(len(request.seeds) for request in requests) <= request_seeds


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that decisions are logged in."""
    return str(tmp_path_factory.mktemp("journals"))


@given(data=st.data(), limit=st.integers(1, 6), rounds=st.integers(1, 4))
def test_the_bandit_tries_each_prompts_next_candidates_and_no_more_than_there_is_time_for(
    journals: str, data: st.DataObject, limit: int, rounds: int
) -> None:
    candidates = replace(make_candidates(rounds=rounds), planner="bandit", candidates_max=limit * 2)
    allocations: list[list[Request]] = []
    scored: list[list[Scored]] = []

    for r in range(rounds):
        seen = [each for earlier in scored[: max(0, r - 1)] for each in earlier]
        allocations.append(list(exploration.allocate(journals, candidates, r, seen, list(allocations))))
        rewards = [data.draw(st.sampled_from([0.0, 0.5, 1.0])) for each in allocations[r] for _ in each.seeds]
        scored.append(score(allocations[r], rewards))

    tried: dict[Prompt, list[int]] = {prompt: [] for prompt in PROMPTS}
    for each in (request for requests in allocations for request in requests):
        tried[each.prompt] += each.seeds
    for prompt, seeds in tried.items():
        assert seeds == seeds_of(candidates, prompt, len(seeds))
    assert sum(map(len, tried.values())) <= limit * 2


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_the_bandit_leaves_a_prompt_alone_whose_kept_seeds_cannot_differ_more(journals: str, least: float) -> None:
    candidates = replace(make_candidates(seeds_tried=16, keep=4), planner="bandit", reward_range=(least, least + 1.0))
    first = list(exploration.allocate(journals, candidates, 0, (), ()))
    known = [
        Scored(request=each, rewards=(least, least + 1.0) if each.prompt == PROMPTS[0] else (least + 1.0,) * 2)
        for prompt in PROMPTS
        for each in [
            replace(first[0], prompt=prompt, seeds=tuple(seeds_of(candidates, prompt, 6)[at : at + 2]))
            for at in (0, 2, 4)
        ]
    ]
    earlier = [[each.request for each in known], []]

    chosen = Counter(request.prompt for request in exploration.allocate(journals, candidates, 2, known, earlier))

    assert chosen[PROMPTS[0]] == 0  # two zeros and two ones are kept already
    assert min(chosen[PROMPTS[1]], chosen[PROMPTS[2]]) > 0


@pytest.mark.parametrize("planner", ["bandit", "equal"])
def test_prompts_that_are_trained_on_as_drawn_are_completed_one_after_the_other(
    journals: str, planner: Literal["bandit", "equal"]
) -> None:
    candidates = replace(make_candidates(keep=4), planner=planner, reuse=True, groups=2, candidates_max=10)

    allocated = exploration.allocate(journals, candidates, 0, (), ())

    first, second, third, fourth = [request.prompt for request in allocated[:4]]
    assert first == second != third == fourth


def test_advantages_of_several_rewards_are_added_where_the_settings_ask_for_it() -> None:
    requests = [make_request(prompt_id=at, seeds=(1, 2, 3)) for at in range(2)]
    parts = [((0.0, 0.5, 1.0), (9.0, 3.0, None)), ((0.2, 0.2, 0.9), (0.0, 100.0, 50.0))]
    scored = [
        Scored(request=request, rewards=(1.0, 2.0, None if first[-1] is None else 3.0), parts=(rewards, first))
        for request, (rewards, first) in zip(requests, parts, strict=True)
    ]
    groups = [0, 0, 1, 1, 1]

    added = training.advantage("group", [scored], (2.0, -1.0)).samples
    plain = training.advantage("group", [scored]).samples

    texts, means = (group_advantages(row, groups, std="group") for row in ([0, 0.5, 0.2, 0.2, 0.9], [9, 3, 0, 100, 50]))
    assert [sample.advantage for sample in added] == pytest.approx(list(2 * texts - means))
    assert [sample.advantage for sample in plain] == pytest.approx(
        list(group_advantages([1, 2, 1, 2, 3], groups, std="group"))
    )


def test_spares_that_were_drawn_for_nobody_do_not_count_as_images_that_were_replaced() -> None:
    failed = Scored(request=make_request(seeds=(1, 2, 3, 4)), rewards=(0.1, None, 0.3, 0.4), errors=("it is broken",))
    asked = refills._with_spares(0, failed)
    assert asked
    again = Scored(request=asked, rewards=(None, 0.5, 0.6, 0.7), errors=("still broken",))

    found = training.advantage("group", [refills.refilled(0, [failed], [again])])

    assert (found.failed, found.error) == (1, "it is broken")
    assert [sample.reward for sample in found.samples] == [0.1, 0.3, 0.4, 0.5]


def test_a_reward_that_is_for_other_prompts_is_in_no_mean_and_no_spread() -> None:
    own, others = (make_request(prompt_id=at, seeds=(1, 2)) for at in range(2))
    scored = [
        Scored(request=own, rewards=(0.0, 1.0), parts=((0.0, 1.0), (None, None))),
        Scored(request=others, rewards=(2.0, 6.0), parts=((None, None), (2.0, 6.0))),
    ]

    for std in ("global", "group"):
        added = training.advantage(std, [scored], (1.0, 1.0))
        assert [sample.advantage for sample in added.samples] == pytest.approx([-1, 1, -1, 1], abs=1e-3)
    together, apart = added.metrics, [training.advantage("global", [[each]]) for each in scored]

    assert (together["reward_1_mean"], together["reward_2_mean"]) == (0.5, 4.0)
    assert training.whole(apart).metrics == together
    assert "reward_2_mean" not in apart[0].metrics
    assert training.means_of_validation(scored) == {"reward_1_mean": 0.5, "reward_2_mean": 4.0}


def test_a_validation_tells_of_each_reward_and_of_each_tag_of_the_prompts() -> None:
    """As Flow-GRPO's ``eval_reward_*`` and the accuracies of GenEval's kinds of prompts."""
    tags = ['{"tag": "counting"}', '{"tag": "color attr"}', '{"tag": "counting"}', "", '{"tag": 3}']
    prompts = [Prompt(id=at, text="dogs", metadata=metadata) for at, metadata in enumerate(tags)]
    rewards = [(1.0, None), (0.5, 0.0), (0.0, 0.5), (1.0, 1.0), (0.0, 0.0)]
    plain = [
        Scored(request=make_request(prompt=prompt), rewards=row) for prompt, row in zip(prompts, rewards, strict=True)
    ]
    several = [Scored(request=make_request(prompt=prompts[3]), rewards=(1.0, 2.0), parts=((0.5, 1.0), (0.5, 1.0)))]
    numbered = [Prompt(id=at, text="dogs", metadata=f'{{"tag": "{at}"}}') for at in range(training.TAGS_MAX + 1)]

    assert training.means_of_validation(plain) == {"tag_color_attr": 0.25, "tag_counting": 0.5}
    assert training.means_of_validation(several) == {"reward_1_mean": 0.75, "reward_2_mean": 0.75}
    each = [Scored(request=make_request(prompt=prompt), rewards=(1.0, 1.0)) for prompt in numbered]
    assert (len(training.means_of_validation(each[1:])), training.means_of_validation(each)) == (training.TAGS_MAX, {})


def test_each_reward_of_several_is_told_of_by_itself() -> None:
    requests = [make_request(prompt_id=at, seeds=(1, 2)) for at in range(2)]
    tables = [((0.0, 0.5), (9.0, 3.0)), ((0.2, None), (0.0, 100.0))]
    scored = [
        Scored(request=request, rewards=(1.0, 2.0 if None not in each[0] else None), parts=each)
        for request, each in zip(requests, tables, strict=True)
    ]
    of_one = [Scored(request=request, rewards=(1.0, 2.0)) for request in requests]

    together = training.advantage("group", [scored]).metrics
    apart = training.whole([training.advantage("group", [[each]]) for each in scored]).metrics

    expected = {"reward_1_mean": pytest.approx(0.7 / 3), "reward_2_mean": pytest.approx(4.0)}
    for metrics in (together, apart):
        assert {name: metrics[name] for name in expected} == expected
    assert "reward_1_mean" not in training.advantage("group", [of_one]).metrics


def test_of_each_prompt_the_most_telling_samples_are_trained_on_and_compared_with_each_other() -> None:
    requests = [make_request(prompt_id=at, seeds=(1, 2, 3, 4)) for at in range(2)]
    rewards = [(0.5, 1.0, 0.4, 0.9), (0.0, 0.2, 0.2, 0.2)]
    scored = [
        Scored(request=request, rewards=row, parts=(row, tuple(10 * reward for reward in row)))
        for request, row in zip(requests, rewards, strict=True)
    ]

    both = training.advantage("group", [scored], used=2)
    together = training.advantage("group", [scored], (1.0, 0.5), used=2)
    apart = [training.advantage("group", [[each]], used=2) for each in scored]

    found = [[sample.advantage for sample in both.samples[at : at + 4]] for at in (0, 4)]
    assert found[0] == [None, pytest.approx(1, abs=1e-3), pytest.approx(-1, abs=1e-3), None]
    assert found[1][0] == pytest.approx(-1, abs=2e-3)
    assert sum(value is None for value in found[1]) == 2
    assert [sample.reward for sample in both.samples] == [*rewards[0], *rewards[1]]  # for the planner
    assert [each and each * 1.5 for each in found[0]] == [
        each and pytest.approx(each, abs=2e-3) for each in (sample.advantage for sample in together.samples[:4])
    ]
    assert training.whole(apart).samples == both.samples
    assert (both.metrics["samples"], both.metrics["samples_trained"]) == (8, 4)
    assert training.whole(apart).metrics == both.metrics
    cut = Cut(parts=2, updates=1, prompts=2, seeds=2, pairs=0, seed=0)
    for sets in (([both], [both]), ([apart[0]], [apart[1]])):
        parts = [training.gradient_part(VERSION, 0, cut, 0, part, sets[part]) for part in (0, 1)]
        assert [part.positions for part in parts] == [(0, 1), (2, 3)]
        assert [[sample.reward for sample in part.samples] for part in parts] == [[1.0, 0.4], [0.0, 0.2]]


def test_prompts_whose_rewards_do_not_vary_are_left_out_of_the_parts_that_they_would_be_in() -> None:
    rewards = ((0.5, 0.5, 0.5), (0.2, 0.0, 0.1), (1.0, 1.0, 1.0))  # the middle one's third sample has no advantage
    requests = [make_request(prompt_id=at, seeds=(1, 2, 3)) for at in range(3)]
    scored = [Scored(request=request, rewards=row) for request, row in zip(requests, rewards, strict=True)]
    sets = training.advantage("group", [scored], filters=True)
    apart = [training.advantage("group", [[each]], filters=True) for each in scored]
    keeps = Cut(parts=9, updates=1, prompts=3, seeds=3, pairs=0, seed=0)

    for source in ([sets] * 9, [apart[at // 3] for at in range(9)]):
        made, whole = (
            [training.gradient_part(VERSION, 0, cut, 0, part, [source[part]]) for part in range(9)]
            for cut in (replace(keeps, filters=True), keeps)
        )
        assert [part.positions for part in made] == [(), (), (), (3,), (4,), (5,), (), (), ()]
        assert made[3:6] == whole[3:6]
        assert [part.positions for part in whole] == [(at,) for at in range(9)]
    two = replace(keeps, parts=2, updates=2, filters=True)
    shared = [training.gradient_part(VERSION, 0, two, u, part, [sets]) for u in (0, 1) for part in (0, 1)]
    assert sorted(at for part in shared for at in part.positions) == [3, 4, 5]
    assert sets.metrics["samples_trained"] == 3
    assert training.whole(apart, filters=True).metrics == sets.metrics
    assert "samples_trained" not in training.advantage("group", [scored]).metrics


def test_the_weights_of_rewards_reach_advantages_only_where_these_are_added() -> None:
    several = {"reward": [{"name": "ocr", "weight": 2.0}, {"name": "scene-ocr"}]}

    def weights(*overrides: str) -> set[tuple[float, ...]]:
        settings = load(*overrides)
        tables = config.resolve({"data": {"train_prompts": "a", "validation_prompts": "b"}, **several}, ROOT).reward
        calls = calls_of(example_graph(settings.model_copy(update={"reward": tables})))
        return {call[3] for key, call in calls.items() if key[0] == "advantage-1"}

    assert weights() == {()}
    assert weights("train.combine=advantages") == {(2.0, 1.0)}


def test_a_round_has_a_slot_for_each_request_that_it_allocates() -> None:
    candidates = make_candidates()
    graph = exploration_graph(load(), SETTING, candidates).graph

    slots = [len(graph.layers[f"explore-r{r}-2"]) for r in range(candidates.rounds)]

    assert slots == [len(requests) for requests in allocated(candidates)]


def test_rounds_are_of_the_candidates_that_there_is_time_for() -> None:
    settings = load("exploration.rounds=0", "exploration.request_seeds=2", "pools.spot.workers=6")

    little, much = (
        candidates_for(settings, SETTING, 2, PROMPTS, VERSION, candidates_max=wanted) for wanted in (12, 10_000)
    )

    assert (little.rounds, little.candidates_max) == (2, 12)  # six requests, three a round
    assert much.rounds == 16
    assert much.candidates_max == settings.exploration.seeds_tried * len(PROMPTS)
    layers = exploration_graph(settings, SETTING, little).graph.layers
    assert [len(layers[f"explore-r{r}-2"]) for r in range(2)] == [3, 3]
    assert candidates_for(settings, SETTING, 2, PROMPTS, VERSION, candidates_max=0).rounds == 1


def test_equal_shares_are_of_all_candidates_and_no_round_is_without_a_request() -> None:
    few = ("exploration.planner=equal", "exploration.seeds_tried=8", "exploration.request_seeds=4")
    as_many, too_many = (load(*few, f"exploration.rounds={rounds}") for rounds in (0, 16))

    shared = candidates_for(as_many, SETTING, 2, PROMPTS, VERSION, candidates_max=6)

    assert shared.seeds_tried == 8
    assert candidates_for(too_many, SETTING, 2, PROMPTS, VERSION).rounds == 8 // 4 * len(PROMPTS)


@pytest.mark.parametrize(("elastic", "gangs"), [("true", 3), ("false", 1)])
def test_as_many_requests_run_at_once_as_there_are_gangs(elastic: str, gangs: int) -> None:
    settings = load("pools.spot.workers=6", "strategy.widths=[2, 4]", f"strategy.elastic={elastic}")

    assert gangs_of(settings, ("spot",)) == gangs


def test_exploration_is_an_ode_with_its_own_steps_and_the_weights_that_are_there() -> None:
    settings = load("train.algorithm=grpo", "rollout.sampler=sde")

    template = candidates_for(settings, SETTING, 2, PROMPTS, VERSION).template

    assert (template.purpose, template.iteration, template.sampler) == ("explore", 2, "ode")
    assert (template.sigmas, template.weights) == (SETTING.explore_sigmas, VERSION)


def test_candidates_differ_between_prompts_iterations_runs_and_replacements() -> None:
    indices = [*range(16), *range(refills.REFILL, refills.REFILL + 16)]

    seeds = {
        candidate_seed(seed, iteration, prompt, index)
        for seed in (-1, 0, 1, 11)
        for iteration in (0, 1, 11)
        for prompt in PROMPTS
        for index in indices
    }

    assert len(seeds) == 4 * 3 * len(PROMPTS) * len(indices)
    assert all(0 <= seed < 2**63 for seed in seeds)  # as far as TOML and JSON readers go


def test_the_kept_seeds_are_those_whose_rewards_differ_most() -> None:
    candidates = make_candidates()
    requests = [request for each in allocated(candidates) for request in each]
    rewards = [(11 * index % 21) / 21 for index in range(candidates.seeds_tried * len(PROMPTS))]
    scored = score(requests, rewards)

    selection = exploration.select(candidates, scored, allocated(candidates))

    assert [kept.prompt for kept in selection.kept] == list(PROMPTS)
    for kept in selection.kept:
        of_prompt = {
            seed: reward
            for each in scored
            if each.request.prompt == kept.prompt
            for seed, reward in zip(each.request.seeds, each.rewards, strict=True)
            if reward is not None
        }
        best = max(pvariance(subset) for subset in combinations(of_prompt.values(), candidates.keep))
        assert kept.explored_rewards == tuple(of_prompt[seed] for seed in kept.seeds)
        assert pvariance([of_prompt[seed] for seed in kept.seeds]) == pytest.approx(best)


def test_too_few_scores_are_filled_up_with_untried_candidates() -> None:
    candidates = make_candidates(keep=4)
    requests = [request for request in allocated(candidates)[0] if request.prompt == PROMPTS[0]][:1]
    dropped = [Dropped(reason="exploration was closed")] * 3

    selection = exploration.select(candidates, [*score(requests, (0.25, 0.5)), *dropped], allocated(candidates))

    kept = selection.kept[0]
    assert dict(zip(kept.seeds, kept.explored_rewards, strict=True)) == {
        **dict(zip(requests[0].seeds, (0.25, 0.5), strict=True)),
        **dict.fromkeys(seeds_of(candidates, PROMPTS[0], 4)[2:]),
    }
    assert (selection.seeds_scored, selection.seeds_dropped) == (2, 7 * len(PROMPTS) - 2)


def test_exploration_that_scored_nothing_keeps_what_no_exploration_keeps() -> None:
    settings = load()
    count = settings.rollout.seeds_kept
    candidates = candidates_for(settings, SETTING, 2, PROMPTS, VERSION)

    plain = unexplored(settings, SETTING, 2, PROMPTS)
    selection = exploration.select(candidates, [Dropped(reason="exploration was closed")], ())

    assert [list(kept.seeds) for kept in plain.kept] == [seeds_of(candidates, prompt, count) for prompt in PROMPTS]
    assert selection.kept == plain.kept
    assert {reward for kept in plain.kept for reward in kept.explored_rewards} == {None}


def test_of_more_prompts_than_are_rolled_out_those_are_taken_whose_kept_rewards_vary_most() -> None:
    candidates = replace(make_candidates(), groups=len(PROMPTS) - 1)
    solved = PROMPTS[1]
    requests = [request for each in allocated(candidates) for request in each]
    rewards = [1.0 if request.prompt == solved else index % 2 for request in requests for index in (0, 1)]
    scored = score(requests, rewards)

    selection = exploration.select(candidates, scored, allocated(candidates))

    assert [kept.prompt for kept in selection.kept] == [prompt for prompt in PROMPTS if prompt != solved]
    assert [each.prompt for each in selection.explored] == [
        prompt.id for prompt in PROMPTS
    ]  # the planner learns of all
    assert sum(len(each.rewards) for each in selection.explored) == selection.seeds_scored


def test_what_is_known_of_a_prompt_counts_once_however_often_it_is_drawn_and_not_explored() -> None:
    seen, undrawn = PROMPTS[:2]
    explored = Explored(prompt=seen.id, rewards=(0.0, 1.0))
    nothing = (Explored(prompt=seen.id, rewards=()), Explored(prompt=undrawn.id, rewards=()))
    scored = [Scored(request=make_request(prompt=seen, seeds=(1, 2)), rewards=(1.0, 0.0))]
    trained = training.advantage("global", [scored])

    def learnt(beliefs: Beliefs, iteration: int, *explored: Explored) -> Beliefs:
        selection = Selection(iteration=iteration, kept=(), seeds_scored=0, seeds_dropped=0, explored=explored)
        return learn_from(beliefs, selection, trained, within=(0.0, 1.0))

    once = learnt(Beliefs(), 1, explored)
    later = learnt(once, 2, *nothing)

    assert [known.prompt for known in later.prompts] == [seen.id]
    assert 0 < sum(later.kinds) < sum(once.kinds)  # what is older counts less, and nothing was added


def test_exploration_may_look_at_more_prompts_than_a_rollout_without_it() -> None:
    explores, off = (
        load("rollout.prompts=2", "exploration.prompts=6", f"strategy.exploration={how}") for how in ("stale", "off")
    )

    assert (explores.prompts_drawn, off.prompts_drawn) == (6, 2)


@given(data=st.data(), keep=st.integers(1, 7))
def test_whatever_was_scored_each_prompt_keeps_so_many_different_candidates(data: st.DataObject, keep: int) -> None:
    candidates = make_candidates(keep=keep)
    rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))
    scored: list[Scored | Dropped] = [
        Dropped(reason="exploration was closed")
        if data.draw(st.booleans())
        else Scored(request=request, rewards=tuple(data.draw(rewards) for _ in request.seeds))
        for each in allocated(candidates)
        for request in each
    ]

    selection = exploration.select(candidates, scored, allocated(candidates))

    for kept in selection.kept:
        assert len(kept.seeds) == len(set(kept.seeds)) == len(kept.explored_rewards) == keep
        assert set(kept.seeds) <= set(seeds_of(candidates, kept.prompt, candidates.seeds_tried))


def test_seeds_of_equal_rewards_are_kept_whatever_came_first() -> None:
    candidates = make_candidates(keep=3)
    scored = [
        Scored(request=request, rewards=(0.5,) * len(request.seeds))
        for each in allocated(candidates)
        for request in each
    ]

    straight, turned = (exploration.select(candidates, each, allocated(candidates)) for each in (scored, scored[::-1]))

    assert straight.kept == turned.kept


def test_parts_count_by_their_prompts_in_the_share_that_teaches_nothing() -> None:
    requests = [replace(make_request(), prompt=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    flat, *varied = score(requests, (1.0, 1.0, 0.0, 1.0, 0.0, 1.0))

    parts = [training.advantage("group", [[flat]]), training.advantage("group", [varied])]

    assert training.whole(parts).metrics["zero_std_ratio"] == pytest.approx(1 / 3)


def test_rollouts_are_requested_prompt_by_prompt_in_the_order_of_the_selection() -> None:
    settings = load("rollout.request_seeds=3", "rollout.seeds_kept=8")
    selection = unexplored(settings, SETTING, 1, PROMPTS)

    requests = rollout_requests(settings, SETTING, selection, VERSION)

    asked = [(request.prompt, seed) for request in requests for seed in request.seeds]
    assert asked == [(kept.prompt, seed) for kept in selection.kept for seed in kept.seeds]
    assert [len(request.seeds) for request in requests] == [3, 3, 2] * len(PROMPTS)
    assert {(request.purpose, request.iteration, request.weights) for request in requests} == {("rollout", 1, VERSION)}
    assert len({request.id for request in requests}) == len(requests)


def test_requests_are_sized_for_the_workers_that_roll_out_unless_the_settings_size_them() -> None:
    """8 prompts of 8 samples: 12 workers take 24 requests of at most 3 in two waves, 4 take 8 of 8 in two."""
    workers = ["rollout.prompts=8", "rollout.seeds_kept=8", "pools.reserved.workers=4", "pools.spot.workers=8"]
    alone = ['strategy.rollout_pools=["reserved"]']

    both, reserved = load(*workers, "rollout.request_seeds=0"), load(*workers, *alone, "rollout.request_seeds=0")
    set_by_hand = load(*workers, "rollout.request_seeds=5")

    assert [request_size(settings) for settings in (both, reserved, set_by_hand)] == [3, 8, 5]


def test_requests_of_a_large_model_without_cuda_graphs_have_enough_samples_to_fill_a_gpu() -> None:
    """32 prompts of 16 samples, 12 workers: requests of 4 end soonest, if a step takes as long as its samples."""
    large = ["rollout.request_seeds=0", "pools.reserved.workers=4", "pools.spot.workers=8"]
    file = ROOT / "examples" / "qwen-image-ocr.toml"
    launched = "model.cuda_graphs=false"
    settings, unknown = (config.load(file, [*large, launched, f"model.name={name}"]) for name in ("qwen-image", "flux"))
    captured = config.load(file, large)
    paced = config.load(ROOT / "examples" / "paper-512.toml", ["rollout.request_seeds=0"])

    assert [request_size(each) for each in (settings, unknown, paced, captured)] == [8, 4, 4, 4]


# A real cluster


@contextlib.contextmanager
def heard(handler: logging.Handler) -> Iterator[None]:
    """Dask keeps its records from the root logger, where pytest listens."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "tornado.application")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@pytest.mark.parametrize("widths", [pytest.param("[1]", marks=pytest.mark.live), "[1,2]"])
def test_dasks_state_stays_valid_though_a_worker_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, widths: str
) -> None:
    (tmp_path / "validation.txt").write_text(PROMPTS[0].text)
    overrides = ["run.iterations=2", 'data.validation_prompts="validation.txt"', f"strategy.widths={widths}"]

    with dask.config.set({"distributed.scheduler.validate": True}), heard(caplog.handler):
        run = Run(settings_file(tmp_path), overrides).start()
        client = client_of(run)
        client.register_plugin(KillWorkers("rollout", pool="spot", count=1))
        validating = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.validate)
        status = run.wait()

    assert validating
    assert status.preemptions == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_all_samples_of_an_iteration_have_the_same_stochastic_steps_and_those_change() -> None:
    settings = load("rollout.sampler=sde", "rollout.sde_window=[0, 7]", "rollout.sde_window_size=2")

    def windows(iteration: int) -> set[tuple[int, int]]:
        selection = unexplored(settings, SETTING, iteration, PROMPTS)
        return {request.sde_window for request in rollout_requests(settings, SETTING, selection, VERSION)}

    each = [windows(iteration) for iteration in range(8)]
    assert {len(same) for same in each} == {1}
    assert len(set.union(*each)) > 1


def test_what_samples_is_what_is_explored_with_and_validated() -> None:
    def policies(*overrides: str) -> set[str]:
        settings = load(*overrides)
        selection = unexplored(settings, SETTING, 1, PROMPTS)
        requests = rollout_requests(settings, SETTING, selection, VERSION)
        calls = calls_of(validation_graph(settings, SETTING, PROMPTS, VERSION)).values()
        validated = [call[2] for call in calls if call[0] is sampling.rollout_shard]
        template = candidates_for(settings, SETTING, 2, PROMPTS, VERSION).template
        return {request.policy for request in (*requests, *validated, template)}

    assert policies() == {"old"}
    assert policies("train.old_decay=copy") == {"trained"}
    assert policies("run.validate_policy=trained") == {
        "old",
        "trained",
    }  # where the settings say so, another is validated


def test_a_version_of_which_every_image_was_set_aside_has_none(tmp_path: Path) -> None:
    """The loop then says why; see `Loop._validate`."""
    assert sampling.save_images(str(tmp_path), 0, [Quarantined(request=make_request(), preemptions=5)]) == ""
