"""A commit that `resume` returns is whole and true, whatever was killed, damaged, doubled or full."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from factories import make_latents, make_request
from spotlight.records import Request, SpotlightError
from spotlight.store.compaction import iteration_path
from spotlight.store.latents import LatentStore, MissingLatents, StaleEpoch
from spotlight.store.zarr_store import AT_ONCE, ZarrStore, all_of, check_url, run

TOKENS, CHANNELS = 3, 2
"""Of `make_latents`."""

IMPORT_ROOTS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def log_probs(request: Request, step: int) -> NDArray[np.float32]:
    return np.float32(-step) - np.arange(len(request.seeds), dtype=np.float32)


def commit_steps(store: LatentStore, request: Request, until: int) -> int:
    """Take the request over and go on to a step; returns the epoch."""
    found = store.resume(request)
    for step in range(found.step + 1, until + 1):
        store.commit(request, found.epoch, step, make_latents(request, step), log_probs(request, step))
    return found.epoch


def chunk_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("c.*") if path.is_file())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["local", "fsspec", "obstore"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LatentStore:
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="obstore is not installed")
    urls = {
        "local": str(tmp_path / "store"),
        "fsspec": f"memory://{uuid4().hex}",
        "obstore": f"file://{tmp_path}/store",
    }
    return LatentStore(urls[request.param])


# Every store


def test_a_request_goes_on_where_it_stopped(store: LatentStore) -> None:
    request = make_request()
    commit_steps(store, request, until=2)

    found = store.resume(request)

    assert (found.epoch, found.step) == (2, 2)
    np.testing.assert_array_equal(found.x_BNC, make_latents(request, 2))


def test_a_request_that_looks_back_goes_on_from_the_last_two_steps_in_a_row(store: LatentStore) -> None:
    request = make_request(sampler="dpm2", steps=6)
    first = store.resume(request)
    assert first.before_BNC is None
    for step in (1, 2, 4):
        store.commit(request, first.epoch, step, make_latents(request, step))

    found = store.resume(request)

    assert found.step == 2
    np.testing.assert_array_equal(found.x_BNC, make_latents(request, 2))
    np.testing.assert_array_equal(found.before_BNC, make_latents(request, 1))


def test_a_request_that_looks_back_goes_on_from_its_first_step(store: LatentStore) -> None:
    request = make_request(sampler="dpm2")
    store.commit(request, store.resume(request).epoch, 1, make_latents(request, 1))

    found = store.resume(request)

    assert (found.step, found.before_BNC) == (1, None)


def test_a_fresh_request_starts_at_step_0(store: LatentStore) -> None:
    found = store.resume(make_request())

    assert (found.epoch, found.step, found.x_BNC) == (1, 0, None)


def test_an_old_epoch_cannot_commit(store: LatentStore) -> None:
    request = make_request()
    old = commit_steps(store, request, until=1)
    new = store.resume(request)

    with pytest.raises(StaleEpoch, match="took it over from epoch 1"):
        store.commit(request, old, 2, make_latents(request, 2))

    assert store.resume(request).step == 1
    store.commit(request, new.epoch + 1, 2, make_latents(request, 2))


@pytest.mark.parametrize("keep", ["clean", "none"])
def test_an_old_epoch_cannot_commit_to_an_iteration_that_is_finished(
    store: LatentStore, keep: Literal["clean", "none"]
) -> None:
    request = make_request()
    frozen = store.resume(request).epoch
    store.commit(request, frozen, 1, make_latents(request, 1))
    commit_steps(store, request, until=request.steps)
    store.finish_iteration(request.iteration, keep)

    for epoch in (frozen, frozen + 1):
        with pytest.raises(StaleEpoch, match="or its iteration is finished; step 2 was not committed"):
            store.commit(request, epoch, 2, make_latents(request, 2))

    commit_steps(store, request, until=request.steps)  # who takes it over anew may
    np.testing.assert_array_equal(store.clean(request), make_latents(request, request.steps))


def test_a_window_holds_the_latents_around_its_steps_and_their_log_probs(store: LatentStore) -> None:
    request = make_request(sde_window=(0, 3), steps=4)
    commit_steps(store, request, until=2)
    commit_steps(store, request, until=4)
    initial_BNC = make_latents(request, 0)

    x_BKNC, log_prob_BS = store.window_latents(request, initial_BNC)

    np.testing.assert_array_equal(x_BKNC, np.stack([make_latents(request, step) for step in range(4)], axis=1))
    np.testing.assert_array_equal(log_prob_BS, np.stack([log_probs(request, step) for step in (1, 2, 3)], axis=1))


@pytest.mark.parametrize("keep", ["clean", "all", "none"])
def test_finishing_twice_is_finishing_once(store: LatentStore, keep: Literal["clean", "all", "none"]) -> None:
    done = [make_request(prompt_id=prompt_id, seeds=tuple(range(prompt_id))) for prompt_id in (1, 2, 3)]
    for request in done:
        commit_steps(store, request, until=request.steps)

    for _ in range(2):
        store.finish_iteration(0, keep)

    for request in done:
        if keep == "none":
            with pytest.raises(MissingLatents):
                store.clean(request)
        else:
            np.testing.assert_array_equal(store.clean(request), make_latents(request, request.steps))


def test_a_record_comes_back_as_it_was_put(store: LatentStore) -> None:
    value = {"rewards": [0.1, None], "errors": ['a "quote"', "é\n"], "nested": {"7": 1}}
    store.put_record("scores/a", {"old": 1})

    store.put_record("scores/a", value)

    assert store.get_record("scores/a") == value
    assert store.get_record("scores/b") is None


@pytest.mark.parametrize("keep", ["clean", "all", "none"])
def test_the_scores_of_a_finished_iteration_are_one_record(
    store: LatentStore, keep: Literal["clean", "all", "none"]
) -> None:
    done, other, late = (make_request(iteration=0, prompt_id=1), make_request(iteration=1), make_request(iteration=0))
    for request in (done, other):
        store.put_scores(request, {"digest": request.digest, "rewards": [0.5, None]})

    for _ in range(2):
        store.finish_iteration(0, keep)
        store.put_scores(late, {"digest": late.digest, "rewards": [1.0, 1.0]})

    assert [(store.scores(request) or {})["digest"] for request in (done, other, late)] == [
        request.digest for request in (done, other, late)
    ]
    assert store.get_record(f"scores/{done.id}") is None
    assert store.get_record(f"scores/{other.id}") is not None


def test_thumbnails_of_seeds_that_were_not_kept_go_with_the_iteration(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    kept, left = (make_request(purpose="explore", prompt_id=number) for number in (1, 2))
    rollout = make_request(purpose="rollout")
    for request in (kept, left, rollout):
        store.put_scores(request, {"digest": request.digest, "rewards": [0.5, 1.0], "thumbnails": ["a", "b"]})

    store.finish_iteration(0, "clean", {kept.id})

    assert ["thumbnails" in (store.scores(request) or {}) for request in (kept, left, rollout)] == [True, False, True]


def test_scores_that_a_killed_writer_left_half_stored_are_of_no_request(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    store.put_scores(request, {"digest": request.digest, "rewards": [0.5, None]})
    stored = tmp_path / "records" / "scores" / request.id
    stored.with_suffix(f".{uuid4().hex}.partial").write_bytes(stored.read_bytes())

    store.finish_iteration(request.iteration, "clean")

    assert list(store.get_record(f"scores-{request.iteration:05d}") or ()) == [request.id]
    assert not list(stored.parent.iterdir())


def test_what_lacks_a_reward_may_be_scored_anew(store: LatentStore) -> None:
    whole, failed = make_request(), make_request(prompt_id=1)
    for request, reward in ((whole, 0.5), (failed, None)):
        store.put_scores(request, {"digest": request.digest, "rewards": [0.25, reward]})

    store.forget_unscored()

    assert store.known_scores(failed) is None
    assert (store.known_scores(whole) or {})["rewards"] == [0.25, 0.5]


def test_what_a_request_was_scored_first_is_what_it_was_scored(store: LatentStore) -> None:
    request = make_request()
    other = replace(request, guidance=2.0)
    first, later = ({"digest": request.digest, "rewards": [reward]} for reward in (0.5, 0.75))

    assert store.put_scores(request, first) == first
    assert store.put_scores(request, later) == first
    of_other = {"digest": other.digest, "rewards": [1.0]}
    assert store.put_scores(other, of_other) == of_other  # of the same name, and not the same request
    assert store.scores(request) == store.known_scores(other) == of_other
    assert store.known_scores(request) is None


def test_images_are_kept_until_they_are_dropped_or_their_iteration_is_finished(store: LatentStore) -> None:
    scored, forgotten, other = make_request(), make_request(prompt_id=1), make_request(iteration=1)
    images_BHWC = np.arange(2 * 4 * 8 * 3, dtype=np.uint8).reshape(2, 4, 8, 3)
    finite_B = np.array([True, False])
    for request in (scored, forgotten, other):
        store.put_images(request, images_BHWC, finite_B)

    found = store.images(scored)
    store.drop_images(scored)
    store.drop_images(scored)
    store.finish_iteration(0, "all")

    assert found
    np.testing.assert_array_equal(found[0], images_BHWC)
    np.testing.assert_array_equal(found[1], finite_B)
    assert [store.images(request) is not None for request in (scored, forgotten, other)] == [False, False, True]


def test_images_that_are_damaged_or_of_another_request_are_none(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path / "store")), make_request()
    store.put_images(request, np.ones((2, 4, 8, 3), np.uint8), np.array([True, True]))

    assert store.images(replace(request, guidance=2.0)) is None
    (file,) = (path for path in (tmp_path / "store" / "images").rglob("*") if path.is_file())
    damage(file)
    assert store.images(request) is None
    file.write_bytes(file.read_bytes()[:40])
    assert store.images(request) is None


def test_finishing_one_iteration_leaves_the_others_and_the_records(store: LatentStore) -> None:
    other = make_request(iteration=1)
    commit_steps(store, make_request(), until=4)
    commit_steps(store, other, until=2)
    store.put_record("scores/a", {"rewards": [1.0]})

    store.finish_iteration(0, "none")

    assert store.resume(other).step == 2
    assert store.get_record("scores/a") == {"rewards": [1.0]}


# What is stored


def test_steps_and_compacted_latents_are_plain_zarr(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)

    steps = zarr.open_group(tmp_path / "latents", mode="r")[f"00000/steps/{request.id}.e1"]
    store.finish_iteration(0, "clean")
    clean = zarr.open_group(tmp_path / "latents", mode="r")["00000/clean-1-3x2"]

    assert isinstance(steps, zarr.Array)
    assert isinstance(clean, zarr.Array)
    assert steps.shape == (4, 2, TOKENS, CHANNELS)
    assert clean.shards == clean.shape == (2, TOKENS, CHANNELS)
    np.testing.assert_array_equal(clean[:], make_latents(request, 4))


def test_the_step_hierarchy_lists_without_a_warning(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    commit_steps(store, make_request(), until=4)

    with warnings.catch_warnings(record=True) as caught:
        members = dict(zarr.open_group(tmp_path / "latents", mode="r").members(max_depth=None))

    assert caught == []
    assert f"00000/steps/{make_request().id}.e1" in members


def test_a_step_written_twice_is_the_same_bytes(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    epoch = commit_steps(store, request, until=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    store.commit(request, epoch, 1, make_latents(request, 1), log_probs(request, 1))

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_values_for_a_committed_step_are_refused(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    epoch = commit_steps(store, request, until=2)

    with pytest.raises(StaleEpoch, match="with other values"):
        store.commit(request, epoch, 2, make_latents(request, 2) + 1)

    assert store.resume(request).step == 1


def test_latents_of_any_float_type_are_kept_as_float32(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    x_BNC = make_latents(request, 1).astype(np.float16)
    store.commit(request, store.resume(request).epoch, 1, x_BNC.transpose(0, 2, 1))

    found = store.resume(request).x_BNC

    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, x_BNC.transpose(0, 2, 1).astype(np.float32))


def test_steps_without_log_probs_read_as_nan(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request(sde_window=(1, 3))
    epoch = store.resume(request).epoch
    for step in range(1, 5):
        store.commit(request, epoch, step, make_latents(request, step), log_probs(request, step) if step == 3 else None)

    _, log_prob_BS = store.window_latents(request, make_latents(request, 0))

    np.testing.assert_array_equal(log_prob_BS, np.array([[np.nan, -3], [np.nan, -4]], np.float32))


def test_a_request_without_stochastic_steps_has_an_empty_window(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request(sampler="ode", sde_window=(2, 2))
    commit_steps(store, request, until=4)

    x_BKNC, log_prob_BS = store.window_latents(request, make_latents(request, 0))

    np.testing.assert_array_equal(x_BKNC[:, 0], make_latents(request, 2))
    assert log_prob_BS.shape == (2, 0)


def test_a_url_that_nothing_can_open_says_what_to_install() -> None:
    with pytest.raises(SpotlightError, match=r"latents\.url = 'nosuch://x' cannot be opened: .*install obstore"):
        LatentStore("nosuch://x")


# Damage


def test_a_corrupt_chunk_costs_one_commit(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=3)

    damage(chunk_files(tmp_path)[-1])

    assert store.resume(request).step == 2


@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5])])
def test_a_damaged_commit_record_costs_one_commit(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=3)

    harm(next(tmp_path.rglob("commit.1.3")))

    assert store.resume(request).step == 2


def test_with_every_chunk_corrupt_a_request_starts_again(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)

    for path in chunk_files(tmp_path):
        damage(path)

    found = store.resume(request)
    assert (found.step, found.x_BNC) == (0, None)
    with pytest.raises(MissingLatents, match=request.id):
        store.clean(request)
    with pytest.raises(MissingLatents, match="step 1 of its window 1 to 3"):
        store.window_latents(request, make_latents(request, 0))


def test_a_step_damaged_in_one_epoch_is_read_from_another(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    epoch = store.resume(request).epoch
    for step in range(1, 5):
        store.commit(request, epoch, step, make_latents(request, step), log_probs(request, step))

    for path in chunk_files(tmp_path / f"latents/00000/steps/{request.id}.e2"):
        damage(path)

    np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))
    assert store.window_latents(request, make_latents(request, 0))[0].shape == (2, 3, TOKENS, CHANNELS)


def test_work_for_another_request_of_the_same_name_is_not_resumed(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request(guidance=1.0)
    commit_steps(store, request, until=3)

    found = store.resume(make_request(guidance=2.0))

    assert (found.epoch, found.step) == (2, 0)
    assert store.resume(request).step == 3


def test_latents_of_another_request_of_the_same_name_are_not_its_own(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request(guidance=1.0)
    commit_steps(store, request, until=4)

    with pytest.raises(MissingLatents):
        store.clean(make_request(guidance=2.0))


def test_the_furthest_step_counts_and_of_each_step_the_newest_commit(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    epoch = store.resume(request).epoch
    store.commit(request, epoch, 1, make_latents(request, 11))

    window_BKNC, _ = store.window_latents(request, make_latents(request, 0))
    found = store.resume(request)

    np.testing.assert_array_equal(window_BKNC[:, 0], make_latents(request, 11))
    assert found.step == 4
    store.commit(request, found.epoch, 4, make_latents(request, 14))
    np.testing.assert_array_equal(store.resume(request).x_BNC, make_latents(request, 14))


def test_only_latents_that_are_clean_and_verify_are_compacted(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    done, unfinished, damaged = (make_request(prompt_id=number) for number in (1, 2, 3))
    for request, until in ((done, 4), (unfinished, 3), (damaged, 4)):
        commit_steps(store, request, until=until)
    damage(tmp_path / "latents" / "00000" / "steps" / f"{damaged.id}.e1" / "c.3.0.0.0")

    store.finish_iteration(0, "clean")

    np.testing.assert_array_equal(store.clean(done), make_latents(done, 4))
    for request in (unfinished, damaged):
        with pytest.raises(MissingLatents):
            store.clean(request)


def test_damaged_compacted_latents_are_missing_not_wrong(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    store.finish_iteration(0, "clean")

    damage(*chunk_files(tmp_path))

    with pytest.raises(MissingLatents, match="run it again"):
        store.clean(request)


def test_damaged_compacted_latents_are_left_out_when_others_join_them(tmp_path: Path) -> None:
    store, damaged, late = LatentStore(str(tmp_path)), make_request(prompt_id=1), make_request(prompt_id=2)
    commit_steps(store, damaged, until=4)
    store.finish_iteration(0, "clean")
    damage(*chunk_files(tmp_path))
    commit_steps(store, late, until=4)

    store.finish_iteration(0, "clean")

    np.testing.assert_array_equal(store.clean(late), make_latents(late, 4))
    with pytest.raises(MissingLatents, match="run it again"):
        store.clean(damaged)


def test_a_request_whose_compacted_latents_were_damaged_can_be_run_again(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    store.finish_iteration(0, "clean")
    damage(*chunk_files(tmp_path))
    commit_steps(store, request, until=4)

    store.finish_iteration(0, "clean")

    np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))


def test_a_request_can_be_run_again_after_another_process_compacted_it(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    LatentStore(str(tmp_path)).finish_iteration(0, "none")

    epoch = commit_steps(store, request, until=4)

    steps = zarr.open_group(tmp_path / "latents", mode="r")[f"00000/steps/{request.id}.e{epoch}"]
    assert isinstance(steps, zarr.Array)
    np.testing.assert_array_equal(steps[3], make_latents(request, 4))


def test_a_request_run_again_after_compaction_joins_the_compacted_ones(tmp_path: Path) -> None:
    store, early, late = LatentStore(str(tmp_path)), make_request(prompt_id=1), make_request(prompt_id=2)
    commit_steps(store, early, until=4)
    store.finish_iteration(0, "clean")
    commit_steps(store, late, until=4)

    for _ in range(2):  # the second time there is nothing to join
        store.finish_iteration(0, "clean")

    for request in (early, late):
        np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))
    assert [path.parent.name for path in chunk_files(tmp_path)] == ["clean-2-3x2"]


def test_latents_that_do_not_read_back_after_compaction_stay_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    monkeypatch.setattr(ZarrStore, "write_rows", lambda *_: None)  # nothing reaches the disk

    with pytest.raises(SpotlightError, match="do not read back as written"):
        store.finish_iteration(0, "clean")

    np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))


def test_of_many_steps_only_those_that_are_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, request, read = LatentStore(str(tmp_path)), make_request(steps=20), list[str]()
    commit_steps(store, request, until=20)
    get = ZarrStore.get

    async def counted(self: ZarrStore, key: str) -> bytes | None:
        read.append(key)
        return await get(self, key)

    monkeypatch.setattr(ZarrStore, "get", counted)

    np.testing.assert_array_equal(store.clean(request), make_latents(request, 20))
    assert len([key for key in read if "commit." in key]) == 1


def test_what_a_killed_compaction_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    left = tmp_path / iteration_path(0) / "clean-1-3x2" / "c.1.0.0"
    left.parent.mkdir()
    left.write_bytes(b"half")

    store.finish_iteration(0, "clean")

    assert [path.name for path in chunk_files(tmp_path)] == ["c.0.0.0"]


def test_requests_of_two_sizes_are_compacted_side_by_side(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    sizes = {make_request(prompt_id=1): 3, make_request(prompt_id=2): 5}
    for request, tokens in sizes.items():
        epoch = store.resume(request).epoch
        store.commit(request, epoch, 4, make_latents(request, 4, tokens=tokens))

    store.finish_iteration(0, "clean")

    for request, tokens in sizes.items():
        np.testing.assert_array_equal(store.clean(request), make_latents(request, 4, tokens=tokens))


def test_compaction_writes_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight.store.compaction._SHARD_BYTES", 3 * TOKENS * CHANNELS * 4)
    store = LatentStore(str(tmp_path))
    done = [make_request(prompt_id=count, seeds=tuple(range(count))) for count in (2, 5, 1)]
    for request in done:
        commit_steps(store, request, until=4)

    store.finish_iteration(0, "clean")

    # 2 + 5 + 1 samples in shards of 3.
    assert len(chunk_files(tmp_path)) == 3
    for request in done:
        np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))


def test_compaction_asks_a_store_many_questions_at_once_and_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = LatentStore(str(tmp_path)), [make_request(prompt_id=number) for number in range(3 * AT_ONCE)]
    for request in done:
        commit_steps(store, request, until=request.steps)
        store.put_scores(request, {"digest": request.digest, "rewards": [0.5]})
    under_way, seen, ask = set[object](), list[int](), ZarrStore._ask

    async def slow(self: ZarrStore, key: str, done: str, question: Any) -> Any:
        this = object()
        under_way.add(this)
        seen.append(len(under_way))
        await asyncio.sleep(0.005)
        try:
            return await ask(self, key, done, question)
        finally:
            under_way.remove(this)

    monkeypatch.setattr(ZarrStore, "_ask", slow)
    store.finish_iteration(0, "clean")

    assert max(seen) == AT_ONCE
    assert sum(count > AT_ONCE / 2 for count in seen) > 0.7 * len(seen)
    for request in done[::20]:
        np.testing.assert_array_equal(store.clean(request), make_latents(request, request.steps))


def test_a_place_for_latents_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    check_url(str(tmp_path))

    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_place_for_latents_that_keeps_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalStore.set

    async def torn(self: LocalStore, key: str, value: Buffer) -> None:
        await write(self, key, value[:3])

    monkeypatch.setattr(LocalStore, "set", torn)

    with pytest.raises(SpotlightError, match="what was written does not read back"):
        check_url(str(tmp_path))


def test_an_answer_that_is_no_broken_line_is_not_asked_for_again(tmp_path: Path) -> None:
    asked = []

    async def refuse() -> None:
        asked.append("once")
        raise PermissionError("not yours")

    with pytest.raises(PermissionError):
        run(ZarrStore(str(tmp_path), retry_s=0.3)._ask("a", "written", refuse))

    assert asked == ["once"]


def test_a_question_that_fails_ends_after_all_that_were_asked_with_it() -> None:
    answered = []

    async def ask(about: int) -> int:
        await asyncio.sleep(0.001 * about)
        if about == 2:
            raise OSError("no answer")
        answered.append(about)
        return about

    with pytest.raises(OSError, match="no answer"):
        asyncio.run(all_of(ask, range(5)))
    assert answered == [0, 1, 3, 4]
    assert asyncio.run(all_of(ask, (1, 0))) == [1, 0]


def test_finishing_collects_what_killed_writers_left(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    commit_steps(store, request, until=4)
    orphans = [path.with_suffix(".0123.partial") for path in (*chunk_files(tmp_path), *tmp_path.rglob("claim.1"))]
    for orphan in orphans:
        orphan.touch()

    store.finish_iteration(0, "all")

    assert not any(orphan.exists() for orphan in orphans)
    assert store.resume(request).step == 4


def test_a_corrupt_record_reads_as_none(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    store.put_record("selection-00001", {"kept": [1, 2]})

    damage(tmp_path / "records" / "selection-00001")

    assert store.get_record("selection-00001") is None


# Kills and races

COMMIT_FOR_EVER = """
import sys
sys.path[:0] = sys.argv[2:]
from factories import make_latents, make_request
from spotlight.store.latents import LatentStore

store, request = LatentStore(sys.argv[1]), make_request(steps=1000)
found = store.resume(request)
print("resumed at", found.step, flush=True)
with store.writer(request, found.epoch) as writer:
    for step in range(found.step + 1, request.steps + 1):
        writer.commit(step, make_latents(request, step))
        print("handed over", step, flush=True)
"""


def test_kill_9_at_any_moment_loses_at_most_the_commit_under_way(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request(steps=1000)
    chance = np.random.default_rng(0)
    done = 0

    for kill in range(12):
        with start(COMMIT_FOR_EVER, tmp_path) as process:
            assert read_number(process) == done
            handed_over = [read_number(process) for _ in range(kill % 4)]
            time.sleep(chance.uniform(0.0, 0.005))
            process.kill()

        found = store.resume(request)
        assert found.step >= max(done, *handed_over[:-1], 0)
        if found.x_BNC is not None:
            np.testing.assert_array_equal(found.x_BNC, make_latents(request, found.step))
        done = found.step

    # Of every 4 kills one saw 2 steps handed over and one saw 3, so 1 and 2 of them were committed.
    assert done >= 12 // 4 * (1 + 2)


COMPACT = """
import sys
sys.path[:0] = sys.argv[2:]
from spotlight.store.latents import LatentStore

store = LatentStore(sys.argv[1])
print("begin", 0, flush=True)
store.finish_iteration(0, "clean")
"""


def test_kill_9_while_compacting_loses_nothing(tmp_path: Path) -> None:
    store = LatentStore(str(tmp_path))
    done = [make_request(prompt_id=prompt_id, steps=2) for prompt_id in range(40)]
    for request in done:
        commit_steps(store, request, until=2)

    for delay_s in np.linspace(0.0, 0.1, 6):
        with start(COMPACT, tmp_path) as process:
            read_number(process)
            time.sleep(delay_s)
            process.kill()
        for request in done:
            np.testing.assert_array_equal(store.clean(request), make_latents(request, 2))

    store.finish_iteration(0, "clean")
    (array,) = (path for path in (tmp_path / "latents" / "00000").iterdir() if path.is_dir())
    assert array.name.endswith("-3x2")
    for request in done:
        np.testing.assert_array_equal(store.clean(request), make_latents(request, 2))


def start(script: str, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(root), *IMPORT_ROOTS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_number(process: subprocess.Popen[str]) -> int:
    """The number that ends the next line the process prints."""
    assert process.stdout is not None
    return int(process.stdout.readline().split()[-1])


def test_two_claims_at_once_get_two_epochs(tmp_path: Path) -> None:
    request = make_request()
    stores = [LatentStore(str(tmp_path)) for _ in range(8)]

    with ThreadPoolExecutor(len(stores)) as threads:
        epochs = list(threads.map(lambda store: store.resume(request).epoch, stores))

    assert sorted(epochs) == list(range(1, 1 + len(stores)))


def test_requests_are_committed_while_another_iteration_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other threads, of which one store serves any number."""
    store, seeds = LatentStore(str(tmp_path)), count(1)

    def commit() -> None:
        request = make_request(iteration=2, seeds=(next(seeds),))
        store.commit(request, store.resume(request).epoch, 1, make_latents(request, 1))

    def path_meanwhile(iteration: int) -> str:
        if iteration == 1:
            commit()
        return iteration_path(iteration)

    commit()
    monkeypatch.setattr("spotlight.store.latents.iteration_path", path_meanwhile)

    store.finish_iteration(1, "clean")

    commit()
    assert len([*tmp_path.glob("commits/00002/*/commit.1.1")]) == next(seeds) - 1 > 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(owners=st.lists(st.sampled_from(["take over", "commit as newest", "commit as stale"]), max_size=14))
def test_in_any_order_only_the_newest_owner_advances(tmp_path: Path, owners: list[str]) -> None:
    store, request = LatentStore(str(tmp_path / uuid4().hex)), make_request(steps=20)
    found = store.resume(request)
    epoch, step = found.epoch, found.step

    for move in owners:
        if move == "take over":
            found = store.resume(request)
            assert (found.epoch, found.step) == (epoch + 1, step)
            epoch = found.epoch
        elif move == "commit as newest":
            step += 1
            store.commit(request, epoch, step, make_latents(request, step))
        elif epoch > 1:
            with pytest.raises(StaleEpoch):
                store.commit(request, epoch - 1, step + 1, make_latents(request, step + 1))

    assert store.resume(request).step == step


# The background writer


def test_a_writer_has_committed_everything_when_it_closes(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    buffer_BNC = np.empty((2, TOKENS, CHANNELS), np.float32)

    with store.writer(request, store.resume(request).epoch) as writer:
        for step in range(1, 5):
            buffer_BNC[:] = make_latents(request, step)
            writer.commit(step, buffer_BNC)
            buffer_BNC[:] = np.nan

    np.testing.assert_array_equal(store.clean(request), make_latents(request, 4))
    np.testing.assert_array_equal(store.window_latents(request, buffer_BNC)[0][:, 0], make_latents(request, 1))


def test_a_writer_that_lost_its_epoch_says_so_at_the_latest_when_it_closes(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()
    epoch = store.resume(request).epoch
    store.resume(request)

    with pytest.raises(StaleEpoch), store.writer(request, epoch) as writer:
        writer.commit(1, make_latents(request, 1))

    assert store.resume(request).step == 0


def test_a_writer_tries_no_step_after_one_that_failed(tmp_path: Path) -> None:
    store, request = LatentStore(str(tmp_path)), make_request()

    with store.writer(request, store.resume(request).epoch) as writer:
        writer.commit(1, make_latents(request, 1)[:1])  # one sample of two
        with pytest.raises(AssertionError, match="expected"):
            writer.commit(2, make_latents(request, 2))

    assert store.resume(request).step == 0


FILL_THE_DISK = """
import errno, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import numpy as np
from factories import make_latents, make_request
from spotlight.store.latents import LatentStore

def latents(step):
    return make_latents(request, step, tokens=512, channels=16)

ballast = Path(sys.argv[1], "ballast")
ballast.write_bytes(bytes(65536))
store, request = LatentStore(sys.argv[1]), make_request(steps=100)
try:
    with store.writer(request, store.resume(request).epoch) as writer:
        for step in range(1, request.steps + 1):
            writer.commit(step, latents(step))
except OSError as error:
    assert (type(error), error.errno) == (OSError, errno.ENOSPC), repr(error)
ballast.unlink()
found = store.resume(request)
assert found.step == step - 2, f"step {step - 1} failed, as handing over {step} told, but {found.step} are there"
np.testing.assert_array_equal(found.x_BNC, latents(found.step))
print("committed", found.step)
"""


def test_a_full_disk_is_an_oserror_and_loses_no_commit(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system in a namespace of its own")

    command = [*private, f'{mount} && exec "$0" "$@"', sys.executable, "-c", FILL_THE_DISK, str(tmp_path)]
    ran = subprocess.run([*command, *IMPORT_ROOTS], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    # A chunk of 2 x 512 x 16 float32 has 64 KiB, and 1 MiB holds fewer than 16 of them beside the rest.
    assert 1 <= int(ran.stdout.removeprefix("committed ")) < 16
