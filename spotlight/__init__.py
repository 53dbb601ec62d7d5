"""Spotlight: RL post-training of diffusion transformers on reserved and spot GPUs.

Importing this package pulls in neither torch nor Dask; `Run` does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotlight.run import Run as Run

__version__ = "0.1.0"
__all__ = ["Run", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from spotlight.run import Run

        return Run
    raise AttributeError(f"module 'spotlight' has no attribute {name!r}")
