"""Paced devices: makes work last as long as a cost model says that a larger model would take on a GPU.

For experiments with a cluster's shape on one machine: learning, scheduling and losses are real, durations are
emulated. It decides no duration itself, and it never shortens one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spotlight.config import Config
from spotlight.plan.durations import TaskDurations

TICK_S = 0.05
"""How often a wait is interrupted, to report that the work goes on and to see whether it was called off."""


class Pace:
    """Makes each piece of work last as long as the settings say; without pacing, adds no wait.

    Args:
        waits: false: add no wait, whatever the settings say.
    """

    def __init__(self, config: Config, *, waits: bool = True) -> None:
        self._durations = TaskDurations(config) if config.pace.gpu and waits else None

    def step_s(self, samples: int, width: int) -> float:
        """Real seconds of one denoising step of a batch on a gang."""
        return self._durations.step_s(samples, width) if self._durations else 0.0

    def train_s(self, samples: float, width: int = 1) -> float:
        """Real seconds of the gradient of so many samples on a gang."""
        return self._durations.train_s(samples, width) if self._durations else 0.0

    def score_s(self, samples: int) -> float:
        """Real seconds of scoring a batch of images."""
        return self._durations.score_s(samples) if self._durations else 0.0

    @contextmanager
    def lasting(self, real_s: float, look: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Make the body last ``real_s`` at least; ``look`` is called while waiting, and may raise to end the wait."""
        until_s = time.monotonic() + real_s
        yield
        remaining_s = until_s - time.monotonic()
        while remaining_s > 0:
            look()
            time.sleep(min(remaining_s, TICK_S))
            remaining_s = until_s - time.monotonic()
