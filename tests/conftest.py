"""What every test shares: one thread per process, reproducible examples, and data kept beside the project."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a busy machine is no failure. Derandomised: the gate's verdict is the same on every run.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--live", action="store_true", help="run the live benchmarks' small forms, too")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of public data that is tested against but is no part of the project."""
    path = Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path} is absent: this check needs public data that the project does not ship")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none; torch is asked only if such a test was selected."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
