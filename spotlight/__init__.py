"""Spotlight: RL post-training of diffusion transformers on reserved and spot GPUs.

Importing this package imports neither torch nor Dask; `Run` and `simulate` do when they are first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from spotlight.run import Run as Run
    from spotlight.simulation import simulate as simulate

os.environ.setdefault("MKL_CBWR", "AUTO")
"""Asks MKL, torch's matrix products on most CPUs, for results that do not depend on where in memory operands lie.
Without it a product of one row has other last bits where weights are mapped from a file than where they are copied.
"""
__version__ = "0.1.0"
__all__ = ["Run", "__version__", "attach", "simulate"]


def attach(run_dir: str | PathLike[str]) -> Run:
    """A run to watch, whichever process runs it, or ran it. See `Run.attach`."""
    from spotlight.run import Run

    return Run.attach(run_dir)


def __dir__() -> list[str]:
    """Names for completion in notebooks, with those that are imported on first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name == "Run":
        from spotlight.run import Run

        return Run
    if name == "simulate":
        from spotlight.simulation import simulate

        return simulate
    raise AttributeError(f"module 'spotlight' has no attribute {name!r}")
