"""A device without tensors: rewards come from a model of learning, and the weights are one number, the score.

It does a task's work in microseconds and takes no part in how long the task lasts. What it leaves behind looks like
any device's: published versions with a manifest and a hash, rewards of every sample; no latents. It imports neither
torch nor Dask nor Zarr.

Invariant: a reward is a pure function of the run's seed, the prompt, the sample's seed, the weights' score and whether
they are stale (`spotlight.device.learning_model`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.device import learning_model
from spotlight.device.protocol import ALONE, Prepared
from spotlight.device.signals import signals
from spotlight.records import Dropped, Placement, Request, Rollout, Sample, Scored, Surplus, WeightsRef
from spotlight.store import weights as store
from spotlight.store.rundir import RunDir

SCORE = "score"
"""The name of the one tensor of a version."""
EDGE_PX = 4
"""Of its images, which show nothing."""


class ModelledDevice:
    """A `spotlight.device.protocol.Device` for any number of runs."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def prepare(self, run_dir: str) -> Prepared:
        run = self._run(run_dir)
        settings = run.settings
        found = store.published(run.url, 0)
        if found is None:
            _stage(run.url, 0, settings.simulation.start, {})
            found = store.publish(run.url, 0)
        steps, explore_steps = settings.rollout.steps, settings.exploration.steps or settings.rollout.steps
        return Prepared(sigmas=_even(steps), explore_sigmas=_even(explore_steps), start=found.weights)

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        """All steps at once; like an engine, it needs the weights that the request names.

        Raises:
            SpotlightError: they are not published, or are others.
        """
        self._run(run_dir).score(request.weights)
        if place.rank:
            return Surplus()
        return Rollout(request=request, weights_sha256=request.weights.sha256, steps_resumed=0, steps_run=request.steps)

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        reason = signals.check(request)
        if reason:
            return Dropped(reason=reason)
        run = self._run(run_dir)
        rewards = learning_model.rewards(
            run.score(request.weights),
            request.seeds,
            run_seed=run.settings.run.seed,
            prompt=request.prompt.id,
            held_out=request.purpose == "validate",
            stale=request.purpose == "explore" and request.weights.version < request.iteration,
        )
        return Scored(request=request, rewards=tuple(rewards.tolist()))

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        return np.full((len(request.seeds), EDGE_PX, EDGE_PX, 3), 128, dtype=np.uint8)

    def train(
        self, run_dir: str, weights: WeightsRef, parts: tuple[tuple[Sample, ...], ...], of: int, iteration: int
    ) -> None:
        """Learn from the variance of the rewards, once all samples of the iteration are there."""
        run, version = self._run(run_dir), weights.version + 1
        samples = [sample for part in parts for sample in part]
        if len(samples) < of or store.published(run.url, version):
            return
        before = run.score(weights)
        captured = learning_model.captured(before, _groups(samples))
        after = learning_model.after(before, captured, gain=run.settings.simulation.gain)
        _stage(run.url, version, after, {"captured": captured, "modelled_score": after})

    def _run(self, run_dir: str) -> _Run:
        if run_dir not in self._runs:
            self._runs[run_dir] = _Run(url=run_dir, settings=RunDir(run_dir).config())
        return self._runs[run_dir]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is known of one run: its settings, and the scores of versions that were asked for."""

    url: str
    settings: Config
    scores: dict[WeightsRef, float] = field(default_factory=dict)

    def score(self, ref: WeightsRef) -> float:
        """The score of a published version.

        Raises:
            SpotlightError: it is not published, is another, or is damaged.
        """
        if ref not in self.scores:
            self.scores[ref] = float(store.load_arrays(self.url, ref)[SCORE])
        return self.scores[ref]


def _stage(run_dir: str, version: int, score: float, metrics: dict[str, float]) -> None:
    store.stage(run_dir, version, {SCORE: np.array(score, dtype=np.float64)}, {}, metrics)


def _even(steps: int) -> tuple[float, ...]:
    """Noise levels at even distances: nothing depends on them."""
    return tuple(1 - step / steps for step in range(steps + 1))


def _groups(samples: list[Sample]) -> list[list[float]]:
    """The rewards of each prompt's samples."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.request.prompt.id, []).append(sample.reward)
    return list(groups.values())
