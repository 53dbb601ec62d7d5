"""A device without tensors: rewards come from a model of learning, and the weights are one number, the score.

It does a task's work in microseconds and takes no part in how long the task lasts. What it leaves behind looks like
any device's: published versions with a manifest and a hash, rewards of every sample; no latents. It imports neither
torch nor Dask nor Zarr.

Invariant: a reward is a pure function of the run's seed, the prompt, the sample's seed, the weights' score and whether
they are stale (`spotlight.device.learning_model`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.device import learning_model
from spotlight.device.protocol import ALONE, Prepared
from spotlight.device.signals import signals
from spotlight.records import (
    Dropped,
    Gradient,
    GradientPart,
    Placement,
    Request,
    Rollout,
    Scored,
    Surplus,
    Updated,
    WeightsRef,
    record,
)
from spotlight.store import weights as store
from spotlight.store.rundir import RunDir

SCORE = "score"
"""The name of the one tensor of a version."""
EDGE_PX = 4
"""Edge of its images, which are blank."""


REMEMBERED = 8
"""Versions whose scores are kept; concurrent tasks ask for three."""


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
        steps = settings.rollout.steps
        return Prepared(
            sigmas=_even(steps),
            explore_sigmas=_even(settings.exploration.steps or steps),
            validation_sigmas=_even(settings.run.validation_steps or steps),
            start=found.weights,
        )

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        """All steps at once; like an engine, it needs the weights that the request names.

        Raises:
            SpotlightError: they are not published, or are others.
        """
        self._run(run_dir).score(request.weights)
        if place.rank:
            return Surplus()
        return Rollout(request=request, weights_sha256=request.weights.sha256, steps_resumed=0, steps_run=request.steps)

    def decode(self, run_dir: str, request: Request) -> Dropped | None:
        """There is nothing to keep: a score needs no image."""
        reason = signals.check(request)
        return Dropped(reason=reason) if reason else None

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        reason = signals.check(request)
        if reason:
            return Dropped(reason=reason)
        run = self._run(run_dir)
        run.note_scored(request)
        rewards = learning_model.rewards(
            run.score(request.weights),
            request.seeds,
            run_seed=run.settings.run.seed,
            prompt=request.prompt.id,
            held_out=request.purpose == "validate",
            stale=request.purpose == "explore" and request.weights.version < request.iteration,
        )
        return Scored(request=request, rewards=tuple(rewards.tolist()))

    def has_scores(self, run_dir: str, request: Request) -> bool:
        return request in self._run(run_dir).scored.get(request.iteration, ())

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        return np.full((len(request.seeds), EDGE_PX, EDGE_PX, 3), 128, dtype=np.uint8)

    def gradient(self, run_dir: str, part: GradientPart, place: Placement = ALONE) -> Gradient | Surplus:
        """What a step learns from, in place of a gradient: metrics ``{"prompt id/position": reward}``."""
        if place.rank:
            return Surplus()
        run = self._run(run_dir)
        if store.published(run.url, part.weights.version + 1):
            return Gradient(name="")
        if not run.has_gradient(part):
            named = zip(part.samples, part.positions, strict=True)
            rewards = {f"{sample.request.prompt.id}/{position}": sample.reward for sample, position in named}
            made = Gradient(name=f"u{part.update}-p{part.number}", rows=len(part.samples), metrics=rewards)
            run.gradients[part.update, part.number] = part, made
        return run.gradients[part.update, part.number][1]

    def has_gradient(self, run_dir: str, part: GradientPart) -> bool:
        return self._run(run_dir).has_gradient(part)

    def update(
        self,
        run_dir: str,
        weights: WeightsRef,
        gradients: tuple[tuple[Gradient, ...], ...],
        terms: tuple[tuple[Gradient, ...], ...],
        iteration: int,
        after: str = "",
    ) -> Updated:
        """Learn from the variance of the rewards, with an iteration's last update."""
        run, version, update = self._run(run_dir), weights.version + 1, len(gradients) - 1
        done = Updated(version=version, update=update)
        if update + 1 < run.settings.train.updates or store.published(run.url, version):
            return done
        score = run.score(weights)
        rollout = run.settings.rollout
        groups, rolled_out = _groups(part for parts in gradients for part in parts), rollout.seeds_kept
        groups += [[0.0]] * (rollout.prompts - len(groups))  # not trained on, for their rewards do not vary
        captured = learning_model.captured(score, groups, rolled_out=rolled_out)
        learnt = learning_model.after(score, captured, gain=run.settings.simulation.gain)
        _stage(run.url, version, learnt, {"captured": captured, "modelled_score": learnt})
        return done

    def _run(self, run_dir: str) -> _Run:
        if run_dir not in self._runs:
            self._runs[run_dir] = _Run(url=run_dir, settings=RunDir(run_dir).config())
        return self._runs[run_dir]


@record
class _Run:
    """What is known of one run: its settings, the scores of versions that were asked for, and gradients.

    Gradients are not in the store: a run that is resumed works them out again in no time.
    """

    url: str
    settings: Config
    scores: dict[WeightsRef, float] = field(default_factory=dict)
    gradients: dict[tuple[int, int], tuple[GradientPart, Gradient]] = field(default_factory=dict)
    """{(update, number of the part): the latest such part, and its gradient}"""
    scored: dict[int, set[Request]] = field(default_factory=dict)
    """{iteration: requests scored}, for the latest two."""

    def note_scored(self, request: Request) -> None:
        self.scored.setdefault(request.iteration, set()).add(request)
        while len(self.scored) > 2:
            del self.scored[min(self.scored)]

    def has_gradient(self, part: GradientPart) -> bool:
        known = self.gradients.get((part.update, part.number))
        return known is not None and known[0] == part

    def score(self, ref: WeightsRef) -> float:
        """The score of a published version.

        Raises:
            SpotlightError: it is not published, is another, or is damaged.
        """
        if ref not in self.scores:
            while len(self.scores) >= REMEMBERED:
                del self.scores[next(iter(self.scores))]
            self.scores[ref] = float(store.load_arrays(self.url, ref)[SCORE])
        return self.scores[ref]


def _stage(run_dir: str, version: int, score: float, metrics: dict[str, float]) -> None:
    store.stage(run_dir, version, {SCORE: np.array(score, dtype=np.float64)}, {}, metrics)


def _even(steps: int) -> tuple[float, ...]:
    """Noise levels at even distances: nothing depends on them."""
    return tuple(1 - step / steps for step in range(steps + 1))


def _groups(parts: Iterable[Gradient]) -> list[list[float]]:
    """The rewards of each prompt's samples, both in request order."""
    groups: dict[str, list[float]] = {}
    rewards = {int(name.split("/")[1]): (name, reward) for part in parts for name, reward in part.metrics.items()}
    for _, (name, reward) in sorted(rewards.items()):
        groups.setdefault(name.split("/")[0], []).append(reward)
    return list(groups.values())
