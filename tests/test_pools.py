"""Pools of worker processes: along a trace they lose and regain workers, and nothing that hangs stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic import Live
from runs import wait_for
from spotlight.records import SpotlightError

TRACE = """0,add,a
0,add,b
20000,remove,b
21000,add,c
33000,remove,c
34000,add,d
"""
"""Two workers, one of which is lost and replaced twice. In milliseconds, with ample time to boot between."""


def start(directory: Path, *settings: str) -> Live:
    (directory / "trace.csv").write_text(TRACE)
    return Live(directory, ("pools.spot.trace=trace.csv", *settings))


def test_a_pool_follows_its_trace(tmp_path: Path) -> None:
    live = start(tmp_path, "pools.spot.preemption=mixed")
    try:
        fourth = wait_for(lambda: [life for life in live.lives() if life.pool == "spot"][3:])
        reasons = [life.reason for life in live.lives() if life.left_s]
    finally:
        live.close()

    assert fourth[0].worker == "spot-1"
    assert reasons == ["lost", "left"]  # killed, then warned


def test_an_unknown_source_of_notices_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpotlightError, match=r"pools\.spot\..*telegram"):
        start(tmp_path, 'pools.spot.notices=["telegram"]')
