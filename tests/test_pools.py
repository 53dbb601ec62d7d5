"""Pools of worker processes: along a trace they lose and regain workers, and nothing that hangs stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic import Live
from runs import wait_for
from spotlight.records import SpotlightError

TRACE = """0,add,a
0,add,b
8000,remove,b
16000,add,c
"""
"""Two workers; after 8 s one of them goes, after 16 s there is another. In milliseconds."""


def start(directory: Path, *settings: str) -> Live:
    (directory / "trace.csv").write_text(TRACE)
    return Live(directory, ("pools.spot.trace=trace.csv", *settings))


def alive(live: Live, count: int) -> Callable[[], bool]:
    return lambda: sum(name.startswith("spot") for name in live.placer._addresses) == count


@pytest.mark.parametrize(("loss", "reason"), [("kill", "lost"), ("notice", "left")])
def test_a_pool_follows_its_trace(tmp_path: Path, loss: str, reason: str) -> None:
    live = start(tmp_path, f"pools.spot.loss={loss}")
    try:
        wait_for(alive(live, 1))
        wait_for(alive(live, 2))
    finally:
        live.close()

    lives = [life for life in live.placer._lives.values() if life.pool == "spot"]
    assert len(lives) == 3
    assert [life.reason for life in lives if life.left_s and life.reason != "end"][:1] == [reason]


def test_an_unknown_source_of_notices_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"pools\.spot\..*telegram"):
        start(tmp_path, 'pools.spot.notices=["telegram"]')
