"""What an update is made of: gradients of parts, and slices of their sum, in a directory."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphs.tasks.training import publish
from runs import wait_for
from spotlight.records import Gradient, GradientPart, SpotlightError, Updated, WeightsRef
from spotlight.rl.sums import tree_sum
from spotlight.store import updates, weights
from spotlight.store.objects import DirectoryObjects

FIRST = WeightsRef(version=0, sha256="0" * 64)
SLICES = (["0", "1"], ["2"])


def part_of(number: int, iteration: int = 0) -> GradientPart:
    return GradientPart(weights=FIRST, iteration=iteration, update=0, number=number, samples=(), positions=(), slices=2)


def keep(run: Path, number: int, tensors: dict[str, Tensor], iteration: int = 0) -> Gradient:
    part = part_of(number, iteration)
    return updates.put(run, part, Gradient(name="", rows=1), tensors, SLICES if tensors else None)


def test_slices_are_added_by_the_same_tree_as_whole_gradients_scalars_and_all(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    made: list[dict[str, Tensor]] = [
        {
            "0": torch.randn((), generator=draw),
            "1": torch.randn(3, 2, generator=draw),
            "2": torch.randn(5, generator=draw),
        }
        for _ in range(7)
    ]
    made[2] = {}  # nothing to learn
    parts = [keep(tmp_path, number, tensors) for number, tensors in enumerate(made)]

    terms = [
        updates.put_sum(tmp_path, 0, parts, at, tree_sum(updates.load_slices(tmp_path, 0, parts, at))) for at in (0, 1)
    ]

    expected = tree_sum(made)
    for found in (
        tree_sum(updates.load_terms(tmp_path, 0, terms)),
        tree_sum(updates.load_terms(tmp_path, 0, parts)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_whole_gradients_are_read_one_after_the_other_and_slices_of_a_sum_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def load(run: str, iteration: int, gradient: Gradient) -> dict[str, Tensor]:
        read.append(gradient.name)
        return {}

    monkeypatch.setattr(updates, "load", load)

    for prefix, ahead in (("u0-p", False), ("sum-", True)):
        read.clear()
        terms = updates.load_terms(tmp_path, 0, [Gradient(name=f"{prefix}{number}") for number in range(9)])
        next(terms)
        if ahead:
            wait_for(lambda: len(read) > 1)
        else:
            time.sleep(0.1)
            assert len(read) == 1
        assert len(read) < 9
        assert len(list(terms)) == 8


def test_a_gradient_is_found_again_if_it_is_whole_and_in_the_slices_that_are_wanted(tmp_path: Path) -> None:
    kept = keep(tmp_path, 0, {name: torch.ones(int(name) + 1) for name in "012"})
    announced = tmp_path / "updates" / "00000" / f"{kept.name}.json"

    assert updates.find(tmp_path, part_of(0)) == kept
    assert updates.find(tmp_path, replace(part_of(0), slices=3)) is None
    announced.write_text(json.dumps(asdict(replace(kept, slices=kept.slices[::-1]))))
    assert updates.find(tmp_path, part_of(0)) is None


def test_a_sum_is_found_again_for_the_same_gradients_alone(tmp_path: Path) -> None:
    kept = keep(tmp_path, 0, {name: torch.ones(2) for name in "012"})
    summed = updates.put_sum(tmp_path, 0, [kept], 0, next(updates.load_slices(tmp_path, 0, [kept], 0)))
    other = replace(kept, slices=tuple(replace(each, sha256="0" * 64) for each in kept.slices))

    assert updates.find_sum(tmp_path, 0, [kept], 0) == summed
    assert updates.find_sum(tmp_path, 0, [other], 0) is None


def test_nothing_is_kept_of_a_sum_of_parts_that_taught_nothing(tmp_path: Path) -> None:
    part = keep(tmp_path, 0, {})

    summed = updates.put_sum(tmp_path, 0, [part], 0, {})

    assert (summed.slices, summed.rows) == ((), part.rows)
    assert [path.stem for path in (tmp_path / "updates" / "00000").iterdir()] == [part.name]


def test_weights_between_two_updates_that_were_damaged_are_refused(tmp_path: Path) -> None:
    digest = updates.put_weights(tmp_path, 0, {"a": torch.ones(2)})
    file = tmp_path / "updates" / "00000" / f"{digest}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    with pytest.raises(SpotlightError, match=f"expected sha256 {digest}, found sha256"):
        updates.load_weights(tmp_path, 0, digest)


def test_publishing_again_leaves_the_gradients_of_the_next_iteration(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2) for name in "012"}
    weights.stage(tmp_path, 2, tensors, {}, {})
    for _ in range(2):  # as when the worker that published is lost before it says so
        for earlier in (0, 1):  # the first by a worker that was taken for dead
            keep(tmp_path, 0, tensors, iteration=earlier)
        later = keep(tmp_path, 0, tensors, iteration=2)
        (tmp_path / "updates" / "notes").touch()

        publish(str(tmp_path), Updated(version=2, update=0))

        assert sorted(path.name for path in (tmp_path / "updates").iterdir()) == ["00002", "notes"]
        assert updates.load(tmp_path, 2, later).keys() == tensors.keys()


def test_a_folder_may_go_while_what_is_kept_is_listed(tmp_path: Path) -> None:
    """As where a worker that was taken for dead publishes what another one has published."""
    objects, is_over = DirectoryObjects(tmp_path), threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            for iteration in range(8):
                objects.put(f"updates/{iteration:05d}/a.json", b"a", durable=False)
            updates.clear_until(tmp_path, 7)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(1_000):
            assert set(objects.sizes("updates").values()) <= {1}
    finally:
        is_over.set()
        other.join()
