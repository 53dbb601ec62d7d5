"""Training as tasks: the weights are the same bits whoever computed which part, and whoever was killed meanwhile."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.events import Event, Instruction, Train, WorkerLeft
from cluster.virtual.faults import Blow, Schedule, draw
from loops import go_struck
from runs import outcome, settings_file
from spotlight import config
from spotlight.device.engine import InProcess
from spotlight.store.rundir import RunDir

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


class Shared:
    """Which workers trained, and how many were lost while they did."""

    def __init__(self) -> None:
        self.workers: set[str] = set()
        self.lost = 0
        self._training: dict[str, str] = {}

    def told(self, event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, WorkerLeft) and event.address in self._training:
            self.lost += 1
        for each in instructions:
            if isinstance(each, Train):
                self.workers.add(each.address)
                self._training[each.address] = each.key[0]


def schedule(*, reserved: int, spot: int = 0, blows: tuple[tuple[float, Blow, int], ...] = ()) -> Schedule:
    """Nothing happens but what is named."""
    drawn = draw(0)
    return replace(
        drawn,
        reserved=reserved,
        spot=spot,
        ups=(((0.0, float("inf")),),) * spot,
        rules=replace(drawn.rules, close_with_training=False, quarantine_after=1000),
        lag_s=0.0,
        step_s=0.1,
        train_s=1.0,
        start_up_s=0.0,
        replace_after_s=0.3,
        cursed=None,
        blows=blows,
        aimed=(),
    )


def went(directory: Path, how: Schedule, *overrides: str) -> tuple[dict[str, object], Shared]:
    """What came of a run, with real learning on a virtual cluster, and who trained."""
    run, shared = RunDir.create(config.load(settings_file(directory), [*SMALL, *overrides]), 0.0), Shared()
    go_struck(run, how, lambda: InProcess(paced=False), shared.told)
    found = outcome(run.path)
    shutil.rmtree(directory)
    return found, shared


KILLS: tuple[tuple[float, Blow, int], ...] = tuple((0.8 + 0.55 * at, "kill", at) for at in range(12))


@pytest.mark.parametrize("overrides", [(), ("train.updates=2", "train.old_decay=copy", "train.kl=0.1")])
def test_any_number_of_reserved_workers_trains_the_same_bits_whoever_is_killed(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    alone, _ = went(tmp_path / "alone", schedule(reserved=1), *overrides)

    for reserved, blows in ((2, ()), (4, ()), (1, KILLS[::3]), (4, KILLS)):
        found, shared = went(tmp_path / "more", schedule(reserved=reserved, blows=blows), *overrides)

        assert found == alone
        assert len(shared.workers) >= reserved
        assert bool(shared.lost) == bool(blows)


@pytest.mark.parametrize("blows", [(), KILLS])
def test_gradients_on_spot_workers_change_no_bit(tmp_path: Path, blows: tuple[tuple[float, Blow, int], ...]) -> None:
    pools = ("pools.spot.workers=3", "train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window=[0, 1]")
    reserved, alone = went(tmp_path / "reserved", schedule(reserved=1, spot=3), *pools)

    both, shared = went(
        tmp_path / "both",
        schedule(reserved=1, spot=3, blows=blows),
        *pools,
        'strategy.train_pools=["reserved", "spot"]',
    )

    assert both == reserved
    assert {address.split("-")[0] for address in alone.workers} == {"virtual://reserved"}
    assert {address.split("-")[0] for address in shared.workers} == {"virtual://reserved", "virtual://spot"}
    assert bool(shared.lost) == bool(blows)
