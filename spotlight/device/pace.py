"""Paced devices: how long work is made to last, as a cost model has it for a larger model on a GPU.

For experiments with a cluster's shape on one machine: learning, scheduling and losses are real, durations are
emulated. It decides no duration itself, and it never shortens one: a machine that is too slow shows in `late_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spotlight.config import Config, PaceSection
from spotlight.plan import durations

TICK_S = 0.05
"""A wait is looked up from so often: signs of life, and whether it was called off."""


class Pace:
    """Makes each piece of work last what the settings say; without pacing, no longer than it does.

    Args:
        waits: false where nothing is to be made longer, whatever the settings say.
    """

    def __init__(self, config: Config, *, waits: bool = True) -> None:
        self._pace = config.pace if waits else PaceSection()
        self._timesteps = config.train.timesteps if config.train.algorithm == "nft" else _window(config)
        self._looks_back = config.train.algorithm == "grpo" or config.train.updates > 1 or config.train.kl > 0
        self._trainers = config.pools.reserved.workers
        self.late_s = 0.0
        """Real seconds that work took beyond its emulated ones: 0 where the machine keeps up."""

    def step_s(self, samples: int, width: int) -> float:
        """Real seconds of one denoising step of a batch on a gang."""
        pace = self._pace
        if not pace.gpu:
            return 0.0
        size = pace.height_px, pace.width_px
        emulated_s = durations.seconds_per_step(
            pace.model, *size, width=width, gpu=pace.gpu, batch=samples, guidance=pace.guidance
        )
        return emulated_s / pace.speedup

    def train_s(self, samples: float) -> float:
        """Real seconds of training on so many samples, as if all reserved workers shared it evenly.

        A policy that is compared with an older one, or with the reference, takes one more forward pass. DiffusionNFT
        does without in its first update: it trains the very policy that sampled.
        """
        pace = self._pace
        if not pace.gpu:
            return 0.0
        per_sample_s = durations.train_s(
            pace.model,
            pace.height_px,
            pace.width_px,
            gpu=pace.gpu,
            timesteps=self._timesteps,
            guidance=pace.guidance,
            lora=pace.lora,
            old_log_probs=self._looks_back,
        )
        return samples * per_sample_s / self._trainers / pace.speedup

    def score_s(self, samples: int) -> float:
        """Real seconds of scoring a batch of images."""
        return samples * durations.SCORE_S / self._pace.speedup if self._pace.gpu else 0.0

    @contextmanager
    def lasting(self, real_s: float, look: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Make the body last so long; ``look`` is called now and then, and may raise to end the wait."""
        until_s = time.monotonic() + real_s
        yield
        remaining_s = until_s - time.monotonic()
        self.late_s += max(0.0, -remaining_s) if real_s else 0.0
        while remaining_s > 0:
            look()
            time.sleep(min(remaining_s, TICK_S))
            remaining_s = until_s - time.monotonic()


def _window(config: Config) -> int:
    return config.rollout.sde_window[1] - config.rollout.sde_window[0]
