"""Training as tasks: the weights are the same bits whoever computed which part, and whoever was killed meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Container
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cluster.virtual.faults import Schedule, draw
from loops import go_struck
from runs import outcome, settings_file
from spotlight import config
from spotlight.device.engine import InProcess
from spotlight.records import Gradient, GradientPart
from spotlight.store import updates
from spotlight.store.creating import create_run
from spotlight.store.weights import RunAt

SMALL = (
    *("run.iterations=2", "run.validate_every=2", "rollout.prompts=2", "rollout.seeds_kept=3", "rollout.steps=2"),
    *(
        'strategy.exploration="off"',
        "pools.spot.workers=0",
        'latents.keep="none"',
        "train.parts=5",
        "train.timesteps=1",
    ),
)


STOCHASTIC = ("rollout.sampler=sde", "rollout.sde_window=[0, 1]")


def schedule(*, reserved: int, spot: int = 0) -> Schedule:
    """Nothing happens by itself."""
    drawn = draw(0)
    return replace(
        drawn,
        reserved=reserved,
        spot=spot,
        ups=(((0.0, inf),),) * spot,
        rules=replace(drawn.rules, close_with_training=False, quarantine_after=1000),
        lag_s=0.0,
        step_s=0.1,
        train_s=1.0,
        start_up_s=0.0,
        replace_after_s=0.3,
        always_fails=None,
        faults=(),
        triggered=(),
    )


def went(
    directory: Path,
    how: Schedule,
    *overrides: str,
    kills: Container[int] = (),
    computed: list[str] | None = None,
) -> tuple[dict[str, object], list[str]]:
    """What came of a run, with real learning on a virtual cluster, and who trained, task by task.

    Args:
        computed: gets the name of each gradient that is computed, not found.
    """
    directory.mkdir()
    held_out = directory / "held-out.txt"
    held_out.write_text('a sign that says "12"\n')
    settings = config.load(settings_file(directory), [*SMALL, f"data.validation_prompts={held_out}", *overrides])
    run, trained = create_run(settings, 0.0), list[str]()

    keep = updates.put

    def put(run: RunAt, part: GradientPart, *rest: Any) -> Gradient:
        if computed is not None:
            computed.append(part.name)
        return keep(run, part, *rest)

    with patch.object(updates, "put", put):
        go_struck(run, how, lambda: InProcess(paced=False), trained, kills)
    found = outcome(run.path)
    shutil.rmtree(directory)
    return found, trained


SHARED = ((2, ()), (1, (2, 5, 9)), (4, (0, 3, 4, 5, 7, 8, 13)))
"""(reserved workers, which of those that begin to train are killed); other settings than the first ones take the
hardest."""


@pytest.mark.parametrize(
    ("each", "overrides"),
    [
        (6, ()),
        (6, ("train.algorithm=grpo", *STOCHASTIC)),
        (6, ("train.algorithm=grpo-guard", *STOCHASTIC)),
        (6, ("train.algorithm=awm", "train.updates=2")),
        (6, ("train.algorithm=dpo", "rollout.prompts=5")),
        (6, ("train.updates=2", "train.old_decay=copy", "train.kl=0.1")),
        (5, ("train.seeds_used=2",)),  # four samples of six
        (13, ("rollout.prompts=3", "train.parts=9", "pools.reserved.workers=3")),  # three add a slice of gradients
        pytest.param(
            *(13, ("rollout.prompts=6", "train.parts=9", "pools.reserved.workers=3", "train.updates=2")),
            marks=pytest.mark.live,
        ),
    ],
)
def test_any_number_of_reserved_workers_trains_the_same_bits_whoever_is_killed(
    tmp_path: Path, each: int, overrides: tuple[str, ...]
) -> None:
    alone, tasks = went(tmp_path / "alone", schedule(reserved=1), *overrides)
    each_iteration = len(tasks) // each // 2

    for reserved, kills in SHARED if not overrides else SHARED[-1:]:
        computed: list[str] = []
        found, trained = went(
            tmp_path / "more", schedule(reserved=reserved), *overrides, kills=kills, computed=computed
        )

        assert found == alone
        assert 0 < len(computed) <= len(set(computed)) + len(kills), "a lost worker costs a part at most"
        assert len({address.split("#")[0] for address in trained}) == reserved
        assert len(trained) >= 2 * each * each_iteration + len(kills)  # what was lost is done again


def test_gradients_on_spot_workers_change_no_bit(tmp_path: Path) -> None:
    settings = ("pools.spot.workers=3", "train.algorithm=grpo", *STOCHASTIC)
    both, on_spot = 'strategy.train_pools=["reserved", "spot"]', 'strategy.train_pools=["spot"]'
    cluster = schedule(reserved=1, spot=3)

    expected, reserved = went(tmp_path / "reserved", cluster, *settings)
    found, trained = went(tmp_path / "both", cluster, *settings, both, kills=(1, 2, 6, 9))
    without, apart = went(tmp_path / "spot", cluster, *settings, on_spot, kills=(1, 2))
    once = replace(cluster, rules=replace(cluster.rules, quarantine_after=1))
    outlasting, given_up = went(tmp_path / "given up", once, *settings, on_spot, kills=(1, 2))

    assert found == expected
    assert without == outlasting == expected
    assert sum("reserved" in address for address in apart) == 2, "the updates, one an iteration"
    assert sum("reserved" in address for address in given_up) == 4, "and two parts, whose spot workers left"
    assert {address.split("-")[0] for address in reserved} == {"virtual://reserved"}
    assert {address.split("-")[0] for address in trained} == {"virtual://reserved", "virtual://spot"}
