"""One engine without a cluster: what it redoes when stored work is damaged, and what it refuses."""

from __future__ import annotations

import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Literal, NoReturn, Self
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.virtual.timing import Denoising, Fixed
from factories import answer
from graphs.requests import candidates_for, rollout_requests, unexplored
from graphs.tasks import refills, sampling, training
from graphs.tasks.context import RunContext, prepare
from graphs.tasks.seeds import candidate_seeds
from graphs.tasks.training import TrainingSet
from recorders import Repeats
from runs import settings_file
from spotlight import config
from spotlight.config import RewardSection
from spotlight.device import denoise, protocol
from spotlight.device.denoise import Denoiser
from spotlight.device.engine import Engine, InProcess
from spotlight.device.modelled import ModelledDevice
from spotlight.device.pace import Pace
from spotlight.device.process import Beat
from spotlight.device.protocol import ALONE, Device
from spotlight.device.residency import Residency
from spotlight.device.signals import Clear, CloseExploration, Stop, signals
from spotlight.plan.durations import SCORE_S
from spotlight.records import (
    Dropped,
    Gradient,
    GradientPart,
    Interrupted,
    Quarantined,
    Request,
    Rollout,
    Sample,
    Sampler,
    Scored,
    SpotlightError,
    Stopped,
    Updated,
    WeightsRef,
    row_of,
)
from spotlight.rl import models
from spotlight.rl.gradients import part_gradient
from spotlight.rl.models import captured
from spotlight.rl.parts import Cut
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import Scorer
from spotlight.simulation import TaskTiming
from spotlight.store import updates as kept_updates
from spotlight.store.creating import create_run
from spotlight.store.latents import MissingLatents, StaleEpoch, Writer
from spotlight.store.objects import StoreError
from spotlight.store.rundir import RunDir
from spotlight.store.weights import PARTS, load, publish, stage


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run(config.load(settings_file(tmp_path)), time.time())


@pytest.fixture
def context(run: RunDir) -> RunContext:
    return prepare(str(run.path))


@pytest.fixture
def request_(run: RunDir, context: RunContext) -> Iterator[Request]:
    settings = run.config()
    prompts = read_prompts(settings.data.train_prompts)[:1]
    yield rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    signals.obey(Clear(run=run.path.name))


def test_of_several_gpus_an_engine_makes_its_own_the_current_one(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another, a CUDA graph would be captured empty, and repeat nothing."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("spotlight.device.engine.fix_order_of_sums", lambda settings: None)
    monkeypatch.setenv("LOCAL_RANK", "3")

    Engine(run.path)

    assert chosen == [torch.device("cuda:3")]


def _damage(run: RunDir, pattern: str) -> int:
    """Flip a byte in the middle of each file that matches; returns how many."""
    files = [path for path in (run.path / "latents").glob(pattern) if path.is_file()]
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    return len(files)


def test_a_request_with_a_corrupt_last_step_is_redone_from_the_step_before(run: RunDir, request_: Request) -> None:
    engine = Engine(run.path)
    engine.rollout(request_)
    good = engine.store.clean(request_)

    assert _damage(run, f"latents/*/steps/*/c.{request_.steps - 1}.*") == 1
    with pytest.raises(MissingLatents):
        engine.store.clean(request_)
    again = engine.rollout(request_)

    assert isinstance(again, Rollout)
    assert (again.steps_resumed, again.steps_run) == (request_.steps - 1, 1)
    np.testing.assert_array_equal(engine.store.clean(request_), good)


def test_images_of_a_request_whose_latents_are_all_lost_are_drawn_again(run: RunDir, request_: Request) -> None:
    engine = Engine(run.path)
    engine.rollout(request_)
    images = engine.images(request_)

    assert _damage(run, "latents/*/steps/*/c.*") == request_.steps
    again = Engine(run.path).images(request_)

    np.testing.assert_array_equal(again, images)


def test_what_follows_latents_that_were_drawn_again_may_take_any_time(run: RunDir, request_: Request) -> None:
    """Scoring sends no beats: after those of the steps, a slow scorer would be taken for a hung engine."""
    Engine(run.path).rollout(request_)
    beats: list[Beat | None] = []
    _damage(run, "latents/*/steps/*/c.*")

    Engine(run.path, beats.append).score(request_)

    assert [beat and (beat.step, beat.patience) for beat in beats][-2:] == [(None, 5.0), (None, inf)]


def test_a_store_that_is_away_for_long_is_no_hung_step(
    run: RunDir, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for up to `RETRY_S`, which may be longer than `cluster.hang_after_s`; but not for ever."""
    beats: list[Beat | None] = []
    waits: list[float] = []
    wait = Writer.wait

    def waited(writer: Writer) -> None:
        waits.append(beats[-1].patience if beats and beats[-1] else 1.0)
        wait(writer)

    monkeypatch.setattr(Writer, "wait", waited)
    Engine(run.path, beats.append).rollout(request_)

    assert waits == [5.0] * (request_.steps + 1)  # before each step's commit, and after the last
    assert [beat.patience for beat in beats if beat and beat.step is not None] == [1.0] * (request_.steps + 1)


def test_a_rollout_that_is_done_is_not_done_again(run: RunDir, request_: Request) -> None:
    Engine(run.path).rollout(request_)

    again = Engine(run.path).rollout(request_)

    assert isinstance(again, Rollout)
    assert (again.steps_resumed, again.steps_run) == (request_.steps, 0)


def test_restart_on_preemption_begins_at_the_first_step(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), ['strategy.on_preemption="restart"'])
    run = create_run(settings, time.time())
    context = prepare(str(run.path))
    prompts = read_prompts(settings.data.train_prompts)[:1]
    request = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    Engine(run.path).rollout(request)

    again = Engine(run.path).rollout(request)

    assert isinstance(again, Rollout)
    assert (again.steps_resumed, again.steps_run) == (0, request.steps)


def test_a_sample_does_not_depend_on_the_batch_it_was_drawn_in(run: RunDir, request_: Request) -> None:
    engine = Engine(run.path)
    alone = replace(request_, seeds=request_.seeds[1:])
    engine.rollout(request_)
    engine.rollout(alone)

    together, single = engine.store.clean(request_), engine.store.clean(alone)

    np.testing.assert_allclose(together[1:], single, atol=1e-5)


def test_a_matrix_product_of_one_row_does_not_depend_on_where_the_weights_lie() -> None:
    """An engine maps weights from a file, where they begin anywhere; another may have copied them."""
    numbers = torch.Generator().manual_seed(0)
    row, weights = (torch.randn(shape, generator=numbers) for shape in ((1, 192), (192, 192)))
    anywhere = torch.empty(weights.numel() + 16)

    products = {
        torch.nn.functional.linear(row, anywhere[at : at + weights.numel()].view(192, 192).copy_(weights))
        .numpy()
        .tobytes()
        for at in range(16)
    }

    assert len(products) == 1


def test_exploration_that_is_closed_is_dropped_and_rollouts_are_not(run: RunDir, request_: Request) -> None:
    signals.obey(CloseExploration(run=run.path.name, iteration=0))

    explored = Engine(run.path).rollout(replace(request_, purpose="explore"))
    rolled_out = Engine(run.path).rollout(request_)

    assert isinstance(explored, Dropped)
    assert "closed" in explored.reason
    assert isinstance(rolled_out, Rollout)


def test_a_stopped_run_starts_no_request(run: RunDir, request_: Request) -> None:
    signals.obey(Stop(run=run.path.name))

    with pytest.raises(Stopped):
        Engine(run.path).rollout(request_)


def test_truncated_weights_are_refused_with_the_file_named(run: RunDir, request_: Request) -> None:
    path = run.path / "weights" / "v00000" / "old.safetensors"  # which samples
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(SpotlightError, match=r"old\.safetensors"):
        Engine(run.path).rollout(request_)


def test_an_engine_keeps_the_two_latest_versions_that_it_used_and_no_earlier_one(
    run: RunDir, context: RunContext
) -> None:
    resident = Engine(run.path).resident
    versions = [context.start]
    for version in (1, 2):
        stage(run.path, version, resident.model.trainable(), {}, {})
        versions.append(publish(run.path, version).weights)
    for ref in versions:
        resident.use(ref)

    shutil.rmtree(run.path / "weights")

    resident.use(versions[1])
    resident.use(versions[2])
    with pytest.raises(SpotlightError, match="v00000"):
        resident.use(versions[0])


def test_a_missing_reward_is_replaced_by_a_fresh_seed_of_its_prompt(run: RunDir, request_: Request) -> None:
    engine = Engine(run.path)
    engine.rollout(request_)
    scored = engine.score(request_)
    assert isinstance(scored, Scored)
    failed = replace(scored, rewards=(None, *scored.rewards[1:]), errors=("out of order",))

    _, fresh = refills.refill(str(run.path), 0, failed)

    assert fresh.request.prompt == request_.prompt
    assert len(fresh.rewards) == 1
    assert fresh.rewards[0] is not None
    assert not set(fresh.request.seeds) & set(request_.seeds)


class Picky:
    """A device whose reward fails for some images, whichever way it is asked."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.fails, self.asked = fails, 0

    def rollout(self, run_dir: str, request: Request) -> None:
        self.asked += 1

    def score(self, run_dir: str, request: Request) -> Scored:
        rewards = tuple(None if self.fails(seed) else 0.5 for seed in request.seeds)
        return Scored(request=request, rewards=rewards, errors=("no face",) * rewards.count(None))


def test_a_sample_is_replaced_until_one_has_a_reward(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some images never have one: the fresh seed's may not either."""
    scored = Scored(request=request_, rewards=(None, *(0.5 for _ in request_.seeds[1:])), errors=("no face",))
    first = refills.REFILL + (request_.seeds[0] & (refills.REFILL - 1))
    stream = candidate_seeds(0, request_.iteration, request_.prompt, range(first, first + 5))
    bad = {*stream[:3]}
    monkeypatch.setattr(protocol, "_device", picky := Picky(bad.__contains__))

    _, *fresh = refills.refill("", 0, scored)

    assert [each.rewards for each in fresh] == [(None,), (None,), (None,), (0.5,)]
    assert fresh[-1].request.seeds == (stream[3],)
    bad.add(stream[3])
    with pytest.raises(SpotlightError, match=r"1 of \d+ seeds .* and for those that replaced them: no face; mend"):
        refills.refill("", 0, scored)
    picky.fails, picky.asked = (lambda seed: True), 0
    with pytest.raises(SpotlightError, match="no face; mend the scorer"):
        refills.refill("", 0, replace(scored, rewards=(None,) * len(request_.seeds)))
    assert picky.asked == 1  # nothing has a reward: nobody waits for more


def test_a_request_that_was_set_aside_is_replaced_as_a_whole(run: RunDir, request_: Request) -> None:
    aside = Quarantined(request=request_, preemptions=5)

    nothing, fresh = refills.refill(str(run.path), 0, aside)

    assert nothing.rewards == (None,) * len(request_.seeds)
    assert len([reward for reward in fresh.rewards if reward is not None]) == len(request_.seeds)
    assert not set(fresh.request.seeds) & set(request_.seeds)


def test_exploration_that_was_scored_before_it_was_called_off_is_not_lost(run: RunDir, request_: Request) -> None:
    explored = replace(request_, purpose="explore")
    done = sampling.rollout_shard(str(run.path), explored, "explore-r0-0/0", 0)
    scored = sampling.score(str(run.path), done)

    signals.obey(CloseExploration(run=run.path.name, iteration=explored.iteration))
    again = sampling.rollout_shard(str(run.path), explored, "explore-r0-0/0", 0)
    other = sampling.rollout_shard(str(run.path), replace(explored, seeds=(1, 2)), "explore-r0-0/1", 0)

    assert isinstance(scored, Scored)
    assert sampling.score(str(run.path), again) == replace(scored, steps_resumed=explored.steps)
    assert isinstance(other, Dropped)


def test_of_all_candidates_that_are_called_off_the_first_alone_reads_the_settings(
    run: RunDir, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    explored = replace(request_, purpose="explore")
    sampling.rollout_shard(str(run.path), explored, "explore-r0-0/0", 0)  # or there would be no latents
    signals.obey(CloseExploration(run=run.path.name, iteration=explored.iteration))
    read: list[str] = []
    config_of = RunDir.config

    def counted(run: RunDir) -> config.Config:
        read.append(run.name)
        return config_of(run)

    monkeypatch.setattr(RunDir, "config", counted)

    def reads(seed: int) -> int:
        read.clear()
        other = replace(explored, seeds=(seed, seed + 1))
        assert isinstance(sampling.rollout_shard(str(run.path), other, f"explore-r0-0/{seed}", 0), Dropped)
        return len(read)

    assert reads(10)
    assert not any(reads(seed) for seed in range(20, 40, 2))


def test_exploration_that_is_closed_before_it_is_scored_is_dropped_and_rollouts_are_not(
    run: RunDir, request_: Request
) -> None:
    explored = sampling.rollout_shard(str(run.path), replace(request_, purpose="explore"), "explore-r0-0/0", 0)
    rolled_out = sampling.rollout_shard(str(run.path), request_, "rollout-0/0", 0)

    signals.obey(CloseExploration(run=run.path.name, iteration=request_.iteration))

    assert isinstance(sampling.score(str(run.path), explored), Dropped)
    assert isinstance(sampling.score(str(run.path), rolled_out), Scored)


def test_the_end_of_training_ends_the_scoring_of_exploration_that_is_under_way(
    tmp_path: Path, run: RunDir, request_: Request
) -> None:
    explored, engine = replace(request_, purpose="explore"), Engine(run.path)
    engine.rollout(explored)
    an_hour_each = ["pace.gpu=h100", f"pace.speedup={SCORE_S / 3600}"]
    engine._pace = Pace(config.load(settings_file(tmp_path), an_hour_each))

    order = CloseExploration(run=run.path.name, iteration=explored.iteration)
    closing = threading.Timer(1.0, signals.obey, (order,))
    closing.start()
    scored = engine.score(explored)
    closing.join()

    assert isinstance(scored, Dropped)
    assert engine.store.scores(explored) is None


@pytest.fixture
def scored_apart(tmp_path: Path) -> tuple[RunDir, Request]:
    """A run with workers that only score, and a request that was rolled out."""
    settings = config.load(settings_file(tmp_path), ["pools.reward.workers=1", "pools.reward.usd_per_h=0.5"])
    run = create_run(settings, time.time())
    context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:1]
    request = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    Engine(run.path).rollout(request)
    return run, request


def test_a_worker_that_only_scores_loads_no_model_and_scores_as_the_one_that_denoised(
    scored_apart: tuple[RunDir, Request],
) -> None:
    run, request = scored_apart
    drawer, scorer, other = (Engine(run.path) for _ in range(3))
    drawer.decode(request)
    shutil.rmtree(run.path / "latents" / "latents")  # nobody can draw them again

    scored = scorer.score(request)
    again = other.score(request)

    assert isinstance(scored, Scored)
    assert None not in scored.rewards
    assert again == scored
    assert "model" not in scorer.resident.__dict__
    assert scorer.store.images(request) is None
    images_file = list((run.path / "latents" / "images").rglob("*-rollout-*"))
    assert images_file == []
    drawer.decode(request)  # it was scored: nobody needs the images
    assert drawer.store.images(request) is None


def test_images_that_were_lost_before_they_were_scored_are_drawn_again(scored_apart: tuple[RunDir, Request]) -> None:
    run, request = scored_apart
    drawer, explored = Engine(run.path), replace(scored_apart[1], purpose="explore")
    drawer.rollout(explored)
    drawer.decode(request)
    drawer.decode(explored)
    first = Engine(run.path).score(request)
    drawer.store.drop_images(explored)

    again = Engine(run.path).score(explored)  # the same samples for another purpose

    assert isinstance(first, Scored)
    assert isinstance(again, Scored)
    assert again.rewards == first.rewards


def test_exploration_that_is_closed_before_it_is_drawn_is_dropped(scored_apart: tuple[RunDir, Request]) -> None:
    run, request = scored_apart
    explored = sampling.rollout_shard(str(run.path), replace(request, purpose="explore"), "explore-r0-0/0", 0)

    signals.obey(CloseExploration(run=run.path.name, iteration=request.iteration))
    dropped = sampling.decode(str(run.path), explored)
    signals.obey(Clear(run=run.path.name))

    assert isinstance(dropped, Dropped)
    assert sampling.score(str(run.path), dropped) == dropped


def test_replacements_that_are_scored_elsewhere_are_those_that_are_scored_at_once(
    scored_apart: tuple[RunDir, Request],
) -> None:
    run, request = scored_apart
    whole = sampling.score(str(run.path), Engine(run.path).rollout(request))
    assert isinstance(whole, Scored)
    failed = replace(whole, rewards=(None, whole.rewards[1]), errors=("it is broken",))
    expected = [*refills.refill(str(run.path), 0, failed), *refills.refill(str(run.path), 0, whole)]

    drawn = refills.replace_unscored(str(run.path), 0, [failed, whole])
    again = refills.score_all(str(run.path), drawn)
    found = refills.refilled(0, [failed, whole], [each for each in again if isinstance(each, Scored)])

    def rewards(results: Sequence[Scored]) -> list[tuple[int, float]]:
        pairs = (pair for each in results for pair in zip(each.request.seeds, each.rewards, strict=True))
        return [(seed, reward) for seed, reward in pairs if reward is not None]

    assert len(drawn) == 1
    assert rewards(found) == rewards(expected)
    assert len(rewards(found)) == 2 * len(request.seeds)
    broken = [
        replace(each, rewards=(None,) * len(each.rewards), errors=("still broken",))
        for each in again
        if isinstance(each, Scored)
    ]
    with pytest.raises(SpotlightError, match="still broken; mend the scorer"):
        refills.refilled(0, [failed, whole], broken)


def test_latents_that_are_not_finite_are_a_missing_reward_and_never_a_score(run: RunDir, request_: Request) -> None:
    engine = Engine(run.path)
    engine.rollout(request_)
    latents = engine.store.clean(request_)
    epoch = engine.store.resume(request_).epoch
    latents[0, 0, 0] = np.nan
    engine.store.commit(request_, epoch, request_.steps, latents)

    scored = Engine(run.path).score(request_)

    assert isinstance(scored, Scored)
    assert scored.rewards[0] is None
    assert None not in scored.rewards[1:]
    assert scored.errors == (f"{request_.prompt.text!r}, seed {request_.seeds[0]}: latents are not finite",)


def test_an_engine_on_another_clock_does_not_wait_though_the_settings_pace_it(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), ["pace.gpu=h100", "pace.speedup=0.0001"])
    run, device = create_run(settings, time.time()), InProcess(paced=False)
    context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:1]
    request = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]

    began_s = time.monotonic()
    device.rollout(str(run.path), request)
    scored = device.score(str(run.path), request)
    took_s = time.monotonic() - began_s

    assert isinstance(scored, Scored)
    assert took_s < Pace(settings).step_s(len(request.seeds), 1)


@pytest.mark.parametrize(
    ("keep", "sampler", "window", "committed"),
    [
        ("clean", "ode", (0, 0), {8}),
        ("clean", "sde", (0, 2), {1, 2, 8}),
        ("clean", "sde", (2, 4), {2, 3, 4, 8}),
        ("all", "ode", (0, 0), {1, 2, 3, 4, 5, 6, 7, 8}),
    ],
)
def test_on_the_virtual_clock_only_steps_that_are_read_or_kept_are_committed(
    tmp_path: Path, keep: str, sampler: Literal["ode", "sde"], window: tuple[int, int], committed: set[int]
) -> None:
    settings = config.load(settings_file(tmp_path), [f"latents.keep={keep}", "rollout.steps=8"])
    run = create_run(settings, time.time())
    context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:1]
    drawn = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    request = replace(drawn, sampler=sampler, sde_window=window, noise_level=0.7)
    engine, live = Engine(run.path, paced=False), Engine(run.path)

    engine.rollout(request)

    folder = run.path / "latents" / "commits" / f"{request.iteration:05d}" / request.id
    assert {int(path.name.rpartition(".")[2]) for path in folder.glob("commit.*")} == committed
    clean = engine.store.clean(request)
    read = engine.store.window_latents(request, clean) if sampler == "sde" else None
    shutil.rmtree(run.path / "latents")
    live.rollout(request)
    np.testing.assert_array_equal(clean, live.store.clean(request))
    if read:
        np.testing.assert_equal(read, live.store.window_latents(request, clean))


@pytest.mark.parametrize("sampler", ["ode", "dpm2"])
@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_request_that_goes_on_elsewhere_has_the_same_bits(tmp_path: Path, sampler: Sampler, done: int) -> None:
    settings = config.load(settings_file(tmp_path), ["rollout.steps=6", f'rollout.sampler="{sampler}"'])
    run = create_run(settings, time.time())
    context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:1]
    request = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    assert request.sampler == sampler
    undisturbed = Engine(run.path)
    undisturbed.rollout(request)
    whole = undisturbed.store.clean(request)
    folder = run.path / "latents" / "commits" / f"{request.iteration:05d}" / request.id
    for commit in folder.glob("commit.*"):
        if int(commit.name.rpartition(".")[2]) > done:
            commit.unlink()
    passes: list[float] = []
    other = Engine(run.path)
    velocity = other.model.velocity

    def counted(x_BNC: Tensor, sigma_B: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        passes.append(float(sigma_B[0]))
        return velocity(x_BNC, sigma_B, *args, **kwargs)

    with patch.object(other.model, "velocity", counted):
        result = other.rollout(request)

    assert isinstance(result, Rollout)
    assert (result.steps_resumed, result.steps_run) == (done, 6 - done)
    again = done - 1 if request.looks_back else done
    np.testing.assert_allclose(passes, request.sigmas[again:-1], rtol=1e-6)
    np.testing.assert_array_equal(other.store.clean(request), whole)


def test_samples_of_a_prompt_may_begin_with_one_noise_and_differ_by_that_of_their_steps(tmp_path: Path) -> None:
    grpo = ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window=[0, 2]", "strategy.exploration=off"]
    one, own = (f"rollout.same_noise={shares}" for shares in ("true", "false"))
    windows = []
    for at, shares in enumerate((one, own)):
        settings = config.load(
            settings_file(tmp_path / str(at)), [*grpo, shares, "rollout.seeds_kept=3", "rollout.request_seeds=2"]
        )
        run = create_run(settings, time.time())
        context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:2]
        requests = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)
        engine = Engine(run.path)
        windows.append([engine._denoiser.window(request)[0] for request in requests])

    (first, second), alone, other, _ = (list(window) for window in windows[0])
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[0], alone[0][0])  # of another request of the prompt
    assert not np.array_equal(first[1], second[1])
    assert not np.array_equal(first[0], other[0][0])  # of another prompt
    assert not np.array_equal(windows[1][0][0, 0], windows[1][0][1, 0])


def test_a_request_without_a_noise_of_its_own_to_begin_with_is_named_as_ever(request_: Request) -> None:
    """So that a run that began before there was one goes on after its last committed step."""
    value = {key: field for key, field in row_of(request_).items() if key not in ("first_noise", "weights")}
    weights = {key: field for key, field in row_of(request_.weights).items() if key != "parts"}
    content = json.dumps({**value, "weights": weights}, sort_keys=True, default=row_of)

    assert request_.digest == sha256(content.encode()).hexdigest()
    assert replace(request_, first_noise=1).digest != request_.digest


def test_latents_of_a_window_that_several_workers_draw_again_are_those_of_the_last(tmp_path: Path) -> None:
    """Parts of an update may need the same request; who is overtaken waits for who overtook it."""
    settings = config.load(settings_file(tmp_path), ["rollout.steps=8"])
    run = create_run(settings, time.time())
    context, prompts = prepare(str(run.path)), read_prompts(settings.data.train_prompts)[:1]
    drawn = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
    request = replace(drawn, sampler="sde", sde_window=(0, 2), noise_level=0.7)
    engines = [Engine(run.path) for _ in range(3)]
    engines[0].rollout(request)
    expected = engines[0]._denoiser.window(request)
    shutil.rmtree(run.path / "latents")

    with ThreadPoolExecutor(len(engines)) as pool:
        found = list(pool.map(lambda engine: engine._denoiser.window(request), engines))

    for each in found:
        np.testing.assert_equal(each, expected)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_who_waits_for_latents_that_nobody_draws_any_more_begins_again(
    run: RunDir, request_: Request, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    engine = Engine(run.path)

    def overtaken(*_: object, **__: object) -> None:
        raise StaleEpoch("another worker took it over")

    monkeypatch.setattr(engine._denoiser, "_denoise", overtaken)
    monkeypatch.setattr(denoise, "ELSEWHERE_S", 0.3)
    if is_stopping:
        signals.obey(Stop(run=run.path.name))
    try:
        with pytest.raises(Stopped if is_stopping else Interrupted):
            engine._denoiser.window(replace(request_, sampler="sde", sde_window=(0, 2), noise_level=0.7))
    finally:
        signals.obey(Clear(run=run.path.name))


@pytest.mark.parametrize("device", [InProcess(paced=False), ModelledDevice()], ids=["real", "modelled"])
def test_on_the_virtual_clock_scores_that_are_kept_take_no_time(tmp_path: Path, device: Device) -> None:
    """As live: a score whose result was lost with its worker is read again, not computed again."""
    settings = config.load(settings_file(tmp_path), ["pace.gpu=h100", "pace.score_s=0.5"])
    run = str(create_run(settings, time.time()).path)
    with protocol.using(device):
        context, prompts = prepare(run), read_prompts(settings.data.train_prompts)[:1]
        request = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)[0]
        done, timing = device.rollout(run, request), TaskTiming(settings)

        first = timing.work(sampling.score, lambda: (run, done))
        sampling.score(run, done)
        again = timing.work(sampling.score, lambda: (run, done))
        all_again = timing.work(refills.score_all, lambda: (run, [done]))

    assert first == Fixed(seconds=0.5 * len(request.seeds))
    assert again == all_again == Fixed(seconds=0.0)


@pytest.mark.parametrize("width", [1, 2])
def test_on_the_virtual_clock_a_gradient_that_is_kept_takes_no_time(tmp_path: Path, width: int) -> None:
    """As live, where workers find it, also those of a gang that shares its passes, whatever becomes of requests."""
    more = ["strategy.on_preemption=restart", "simulation.gradient_s=3", f"train.width={width}"]
    settings = config.load(settings_file(tmp_path), [*more, 'strategy.train_pools=["reserved","spot"]'])
    run = str(create_run(settings, time.time()).path)
    with protocol.using(ModelledDevice()):
        context, prompts = prepare(run), read_prompts(settings.data.train_prompts)[: settings.rollout.prompts]
        requests = rollout_requests(settings, context, unexplored(settings, context, 0, prompts), context.start)
        samples = tuple(
            Sample(request=request, index=index, reward=0.5, advantage=1.0)
            for request in requests
            for index in range(len(request.seeds))
        )
        sets = [TrainingSet(samples=samples, metrics={})]
        given, timing = (run, context.start, 0, Cut.of(settings), 0, 0, sets, 1), TaskTiming(settings)

        first = timing.work(training.gradient, lambda: given)
        training.gradient(*given)
        again = timing.work(training.gradient, lambda: given)

    def seconds(work: Denoising | Fixed) -> float:
        return work.seconds if isinstance(work, Fixed) else (work.step_s or 0.0) * work.steps

    assert isinstance(first, Fixed if width == 1 else Denoising)
    assert seconds(first) > 3
    assert seconds(again) == 0


def test_widths_that_the_model_cannot_be_split_into_are_refused_with_those_that_it_can(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), ["strategy.widths=[1, 3]", "pools.spot.workers=3"])
    run = create_run(settings, time.time())

    with pytest.raises(SpotlightError, match=r"gang of 3 .* choose among the widths 1, 2 and 4|widths 1, 2, 4"):
        prepare(str(run.path))


class Alone:
    """A gang of one that is told it is two."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def agree(self, code: int) -> int:
        return code

    def broadcast(self, values: Tensor) -> Tensor:
        return values


@pytest.mark.parametrize(("on", "width", "expected"), [(True, 1, 1), (False, 1, 0), (True, 2, 0)])
def test_passes_are_captured_on_a_gpu_outside_of_gangs(
    run: RunDir, request_: Request, monkeypatch: pytest.MonkeyPatch, on: bool, width: int, expected: int
) -> None:
    engine, repeats = Engine(run.path), Repeats()
    engine.rollout(request_)
    plain = engine.store.clean(request_)
    shutil.rmtree(run.path / "latents")
    assert not engine.resident.captures  # on a processor
    monkeypatch.setattr(Residency, "captures", on)
    monkeypatch.setattr(captured, "Graphs", lambda: repeats)
    monkeypatch.setattr(Denoiser, "_gang_of", lambda *_: Alone())

    engine.rollout(request_, replace(ALONE, width=width))

    assert len(repeats.recorded) == expected
    np.testing.assert_array_equal(engine.store.clean(request_), plain)


def test_a_request_too_large_for_the_device_is_named_with_what_would_make_it_fit(run: RunDir) -> None:
    with (
        pytest.raises(SpotlightError, match=r"request r7 .* rollout\.request_seeds"),
        Engine(run.path).resident.limits("request r7 (64 samples)"),
    ):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")


def test_a_model_too_large_for_a_device_that_it_shares_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may have the rest of its memory; while the model is not there, nobody asks it for its device."""

    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(models, "load", fill)

    with pytest.raises(SpotlightError, match=r"the model does not fit the memory of device cpu: .* no other process"):
        _ = Engine(run.path).model


def test_images_too_large_for_the_device_are_named_with_what_would_make_them_fit(
    run: RunDir, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(run.path)
    engine.rollout(request_)

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(engine.model, "decode", fill)

    with pytest.raises(SpotlightError, match=r"decoding request .*model\.vae_tiling = true"):
        engine.decode(request_)


def test_a_kernel_without_a_fixed_order_of_its_sums_is_named_with_the_way_out(run: RunDir) -> None:
    text = "put_ does not have a deterministic implementation, but you set 'torch.use_det(True)'. You can turn off"
    said = r"^request r7: put_ .*, but you set 'torch\.use_det\(True\)'; set model\.deterministic = false"
    with pytest.raises(SpotlightError, match=said), Engine(run.path).resident.limits("request r7"):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="another"), Engine(run.path).resident.limits("request r7"):
        raise RuntimeError("another error")


def test_only_rewards_may_take_kernels_without_a_fixed_order(run: RunDir, request_: Request) -> None:
    engine, found = Engine(run.path), []

    class Reader(Scorer):
        def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
            found.append(torch.is_deterministic_algorithms_warn_only_enabled())
            warnings.warn("a kernel does not have a deterministic implementation", UserWarning, stacklevel=1)
            return [0.5] * len(images_BHWC)

    engine.__dict__["_scorer"] = Reader()
    torch.use_deterministic_algorithms(True)
    try:
        engine.rollout(request_)
        scored = engine.score(request_)

        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)

    assert isinstance(scored, Scored)
    assert scored.errors == ()
    assert found == [True] * len(found) != []


def rolled_out(
    run: RunDir, context: RunContext, engine: Engine, prompts: int, weights: WeightsRef | None = None
) -> tuple[Sample, ...]:
    """
    Args:
        weights: by default those that training starts from.
    """
    settings, weights = run.config(), weights or context.start
    chosen = read_prompts(settings.data.train_prompts)[:prompts]
    selection = unexplored(settings, context, weights.version, chosen)
    requests = rollout_requests(settings, context, selection, weights)
    for request in requests:
        engine.rollout(request)
    return tuple(
        Sample(request=request, index=at, reward=0.0, advantage=at - 0.5)
        for request in requests
        for at in range(len(request.seeds))
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_training_in_parts_gives_the_same_bytes_whoever_does_them_and_however_often(
    run: RunDir, context: RunContext, updates: int
) -> None:
    train = run.config().train.model_copy(update={"updates": updates})
    (run.path / config.RESOLVED).write_text(config.dump(run.config().model_copy(update={"train": train})))
    engines = [Engine(run.path) for _ in range(3)]
    samples = rolled_out(run, context, engines[0], 3)
    cut = replace(Cut.of(run.config()), prompts=3, parts=3)
    published = []
    # Of each part and of each update, who does it: one; two in turn, so that the second takes the first's step too;
    # or another than for the parts, twice, as if the first result had been lost. Then slices are added before.
    for of_parts, of_updates, slices in (
        ((0, 0, 0), ((0,), (0,)), 1),
        ((1, 2, 1), ((1,), (2,)), 1),
        ((2, 1, 2), ((0, 0), (0, 0)), 4),
    ):
        gradients: list[tuple[Gradient, ...]] = []
        sums: list[tuple[Gradient, ...]] = []
        updated: Updated | None = None
        for u in range(updates):
            sets = [TrainingSet(samples=samples, metrics={})]
            parts = [training.gradient_part(context.start, 0, cut, u, part, sets, slices, updated) for part in range(3)]
            done = (engines[who].gradient(part) for who, part in zip(of_parts, parts, strict=True))
            gradients.append(tuple(map(answer, done)))
            add = partial(training.add_gradients, str(run.path), context.start, 0, gradients[u])
            sums.append(tuple(map(add, range(slices))) if slices > 1 else gradients[u])
            after = updated.weights_sha256 if updated else ""
            for who in of_updates[u]:
                engines[who].resident.use(context.start)  # as what it rolled out in between did
                updated = engines[who].update(context.start, gradients, sums, 0, after)
        published.append(publish(run.path, 1).weights)
        late = training.add_gradients(str(run.path), context.start, 0, gradients[0], 0)
        assert late.name == ""  # as of a gradient that nobody needs any more
        shutil.rmtree(run.path / "weights" / "v00001")
        shutil.rmtree(run.path / "updates")

    assert len(set(published)) == 1


def test_each_of_several_rewards_is_stored_beside_their_sum(run: RunDir, context: RunContext) -> None:
    twice = RewardSection(weight=1.0, also=(RewardSection(weight=0.5),))
    (run.path / config.RESOLVED).write_text(config.dump(run.config().model_copy(update={"reward": twice})))
    selection = unexplored(run.config(), context, 0, read_prompts(run.config().data.train_prompts)[:1])
    request = rollout_requests(run.config(), context, selection, context.start)[0]
    engine = Engine(run.path)
    engine.rollout(request)

    scored, again = engine.score(request), Engine(run.path).score(request)

    assert isinstance(scored, Scored)
    assert scored == again
    assert scored.parts[0] == scored.parts[1]
    assert scored.rewards == tuple(1.5 * (reward or 0.0) for reward in scored.parts[0])


def out_of_reach(*_: object) -> Iterator[NoReturn]:
    def fail(_: int) -> NoReturn:
        raise StoreError("s3://a: could not be read")

    return map(fail, [0])


def test_a_gradient_that_was_computed_is_found_and_a_damaged_one_is_named(
    run: RunDir, context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its store is out of reach it is not taken for damaged."""
    engine = Engine(run.path)
    samples = rolled_out(run, context, engine, 2)
    cut = replace(Cut.of(run.config()), prompts=2, parts=1)
    part = training.gradient_part(context.start, 0, cut, 0, 0, [TrainingSet(samples=samples, metrics={})])

    found = answer(engine.gradient(part))
    shutil.rmtree(run.path / "latents")
    again = Engine(run.path).gradient(part)  # without a latent it cannot be computed
    with monkeypatch.context() as away:
        away.setattr(kept_updates, "load_terms", out_of_reach)
        with pytest.raises(StoreError):
            engine.update(context.start, [[found]], [[found]], 0)
    there_still = kept_updates.find(run.path, part)
    (file,) = (run.path / "updates" / "00000").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    assert again == found == there_still
    with pytest.raises(SpotlightError, match=r"expected sha256 .*it was removed: `spotlight resume` computes it again"):
        engine.update(context.start, [[found]], [[found]], 0)
    assert kept_updates.find(run.path, part) is None


def test_a_gradient_whose_latents_are_drawn_again_on_the_way_is_the_same(run: RunDir, context: RunContext) -> None:
    """They are drawn with the old policy, and the gradient is that of the one in training."""
    engine = Engine(run.path)
    cut = replace(Cut.of(run.config()), prompts=2, parts=1)

    def part(weights: WeightsRef) -> GradientPart:
        samples = rolled_out(run, context, engine, 2, weights)
        return training.gradient_part(weights, weights.version, cut, 0, 0, [TrainingSet(samples=samples, metrics={})])

    first = (answer(engine.gradient(part(context.start))),)
    engine.update(context.start, [first], [first], 0)
    second = part(publish(run.path, 1).weights)
    found = answer(engine.gradient(second))
    shutil.rmtree(run.path / "updates" / "00001")
    assert second.samples[0].request.policy == "old"
    assert _damage(run, "latents/00001/steps/*/c.*")

    again = answer(Engine(run.path).gradient(second))

    assert again == found


def test_candidates_are_trained_on_at_the_levels_of_rollouts_and_drawn_again_though_exploration_is_closed(
    run: RunDir, context: RunContext
) -> None:
    engine, settings = Engine(run.path), run.config()
    few = replace(context, explore_sigmas=engine.model.sigmas(2, settings.model.height_px, settings.model.width_px))
    prompts = read_prompts(settings.data.train_prompts)[:2]
    template = candidates_for(settings, few, 0, prompts, context.start).template
    requests = [replace(template, prompt=prompt, seeds=(7, 8)) for prompt in prompts]
    for request in requests:
        engine.rollout(request)
    samples = tuple(
        Sample(request=request, index=at, reward=0.0, advantage=at - 0.5) for request in requests for at in (0, 1)
    )
    cut = replace(Cut.of(settings), prompts=2, seeds=2, parts=1)
    part = training.gradient_part(context.start, 0, cut, 0, 0, [TrainingSet(samples=samples, metrics={})])

    with patch("spotlight.device.training.part_gradient", wraps=part_gradient) as passes:
        found = answer(engine.gradient(part))
    assert passes.call_args.args[2].sigmas == context.sigmas
    shutil.rmtree(run.path / "updates")
    shutil.rmtree(run.path / "latents")
    signals.obey(CloseExploration(run=run.path.name, iteration=0))
    again = answer(Engine(run.path).gradient(part))

    assert {len(request.sigmas) for request in requests} == {3}
    assert again == found


@pytest.mark.parametrize("filters", [False, True])
def test_where_no_sample_is_better_than_another_no_step_is_taken(
    run: RunDir, context: RunContext, filters: bool
) -> None:
    """What is left of the gradient is rounding, of which AdamW would make a step of full size."""
    engine = Engine(run.path)
    samples = [replace(sample, advantage=0.0) for sample in rolled_out(run, context, engine, 2)]
    cut = replace(Cut.of(run.config()), prompts=2, parts=1, filters=filters)
    part = training.gradient_part(context.start, 0, cut, 0, 0, [TrainingSet(samples=tuple(samples), metrics={})])

    found = answer(engine.gradient(part))
    engine.update(context.start, [[found]], [[found]], 0)

    before, after = (load(run.path, ref, PARTS["trained"]) for ref in (context.start, publish(run.path, 1).weights))
    assert bool(found.rows) != filters
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_of_other_settings_is_no_part_of_this_update(run: RunDir, context: RunContext) -> None:
    engine, settings = Engine(run.path), run.config()
    samples = rolled_out(run, context, engine, 2)
    edited = settings.model_copy(update={"train": settings.train.model_copy(update={"nft_beta": 0.5})})
    cuts = [replace(Cut.of(each), prompts=2, parts=1) for each in (settings, edited)]
    sets = [TrainingSet(samples=samples, metrics={})]
    before, after = (training.gradient_part(context.start, 0, cut, 0, 0, sets) for cut in cuts)

    answer(engine.gradient(before))

    assert kept_updates.find(run.path, before) is not None
    assert kept_updates.find(run.path, after) is None
