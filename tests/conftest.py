"""What every test shares: one thread per process, no terminal, reproducible examples, and data beside the project."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from hypothesis import settings

from spotlight.config import RESOLVED

# No deadline: a busy machine is no failure. Derandomised: the gate's verdict is the same on every run.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate")


for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)  # what tests expect to be said does not depend on who reads it where
for name in ("http_proxy", "https_proxy", "all_proxy"):
    for spelt in (name, name.upper()):
        os.environ.pop(spelt, None)  # servers of tests are on this machine

MARK = uuid4().hex
os.environ["SPOTLIGHT_TESTS"] = MARK  # of this process, so that what it starts is told from what others start


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After all tests of this process, nothing is there any more of what they started, but what ends with it."""
    yield
    from leftovers import OURS, described, marked, memory_of, soon_empty
    from spotlight.store.node import memory_roots

    me = os.getpid()
    names = {path.parent.name for path in tmp_path_factory.getbasetemp().rglob(RESOLVED)}
    workers = sys.modules.get("cluster.worker.process")
    kept = {scratch.path for scratch in workers._scratch} if workers else set()

    def left() -> list[str]:
        processes = [each for each in marked(OURS, MARK) if each.pid != me]
        folders = [path for path in memory_roots(f"scratch-{me}-") if path not in kept]
        unknown = [described(each) for each in processes if psutil.pid_exists(each.pid) and each.ppid() != me]
        return [*unknown, *map(str, (*folders, *memory_of(names)))]

    assert soon_empty(left) == []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--live", action="store_true", help="run the tests marked live, too: half an hour more")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of public data that is tested against but is no part of the project."""
    path = Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path} is absent: this check needs public data that the project does not ship")
    return path


def pytest_collection_finish() -> None:
    """What was imported is no garbage: collections look only at what tests make."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip live tests that nobody asked for, and GPU tests where there is none; only these ask torch."""
    if not config.getoption("--live"):
        for item in items:
            if item.get_closest_marker("live"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: ask for it by --live"))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
