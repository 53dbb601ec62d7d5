"""What one device does for a run: denoise requests, decode and score their images, train; it never decides what runs.

It knows nothing of Dask: it is told from outside when to stop or to leave a gang. `spotlight.device.process` gives it
a process of its own; `InProcess` is the device whose engines are in this one.
"""

from __future__ import annotations

import socket
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.device import sequence_parallel, xfuser_backend
from spotlight.device.denoise import Denoiser, OnBeat, ignore_beat
from spotlight.device.pace import Pace
from spotlight.device.process import keep_freed_memory
from spotlight.device.protocol import ALONE, Prepared
from spotlight.device.residency import Residency
from spotlight.device.signals import signals
from spotlight.device.training import Training
from spotlight.records import (
    Dropped,
    Gradient,
    GradientPart,
    Placement,
    Request,
    Rollout,
    Scored,
    SpotlightError,
    Surplus,
    Updated,
    WeightsRef,
)
from spotlight.rl import rewards
from spotlight.rl.models import (
    Model,
    any_order_of_sums,
    device_of,
    fix_order_of_sums,
    make_own_gpu_current,
    place_rewards,
    works_without_gpu,
)
from spotlight.store import updates
from spotlight.store.latents import LatentStore
from spotlight.store.node import Node
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import thumbnails
from spotlight.store.weights import published


class InProcess:
    """A `Device` whose engines, one a run, are in this process; each is made at its first call.

    Args:
        paced: whether work lasts what the settings say; false under a virtual clock, where nothing waits, and a
            request is computed in one go: its steps are committed only if they are read or kept.
        on_beat: is called as the engines' work goes on.
        node: see `Engine`.
    """

    def __init__(self, *, paced: bool = True, on_beat: OnBeat = ignore_beat, node: Node | None = None) -> None:
        self._paced, self._on_beat, self._node = paced, on_beat, node
        self._engines: dict[str, Engine] = {}

    def engine(self, run_dir: str) -> Engine:
        if run_dir not in self._engines:
            self._engines[run_dir] = Engine(run_dir, self._on_beat, self._node, paced=self._paced)
        return self._engines[run_dir]

    def load(self, run_dir: str) -> None:
        """Load the run's model ahead of its first call, unless the run is not prepared: `prepare` makes files it reads.

        A process that only takes updates (`works_without_gpu`) reads none of them.
        """
        if published(run_dir, 0) or works_without_gpu():
            _ = self.engine(run_dir).model

    def prepare(self, run_dir: str) -> Prepared:
        return self.engine(run_dir).prepare()

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        return self.engine(run_dir).rollout(request, place)

    def decode(self, run_dir: str, request: Request) -> Dropped | None:
        return self.engine(run_dir).decode(request)

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        return self.engine(run_dir).score(request)

    def has_scores(self, run_dir: str, request: Request) -> bool:
        return self.engine(run_dir).store.known_scores(request) is not None

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        return self.engine(run_dir).images(request)

    def gradient(self, run_dir: str, part: GradientPart, place: Placement = ALONE) -> Gradient | Surplus:
        return self.engine(run_dir).gradient(part, place)

    def has_gradient(self, run_dir: str, part: GradientPart) -> bool:
        return updates.find(run_dir, part) is not None

    def update(
        self,
        run_dir: str,
        weights: WeightsRef,
        gradients: tuple[tuple[Gradient, ...], ...],
        terms: tuple[tuple[Gradient, ...], ...],
        iteration: int,
        after: str = "",
    ) -> Updated:
        return self.engine(run_dir).update(weights, gradients, terms, iteration, after)


class Engine:
    """A run's model on this process's device.

    Args:
        node: shares weights with the other engines of the machine.
        paced: see `InProcess`.
    """

    def __init__(
        self, run_dir: str | Path, on_beat: OnBeat = ignore_beat, node: Node | None = None, *, paced: bool = True
    ) -> None:
        torch.set_num_threads(1)  # one thread per worker process: several workers share a machine's cores
        keep_freed_memory()
        run = RunDir(run_dir, copy=node.root / "run" if node else None)
        run.fetch("prompts")
        self._config = run.config()
        fix_order_of_sums(self._config.model)
        make_own_gpu_current(self._config.model)
        self._pace = Pace(self._config, waits=paced)
        self.store = LatentStore(run.latents_url)
        self.resident = Residency(run, self._config, node)
        self._denoiser = Denoiser(
            self.resident,
            self.store,
            self._pace,
            on_beat,
            node,
            resumes=self._config.strategy.on_preemption == "resume",
            commits_each_step=paced or self._config.latents.keep == "all",
        )
        self._training = Training(run.url, self._config, self.resident, self._denoiser, self._pace, on_beat, node)
        self.rollout = self._denoiser.rollout
        self.gradient = self._training.gradient
        self.update = self._training.update

    @property
    def model(self) -> Model:
        return self.resident.model

    @cached_property
    def _scorer(self) -> rewards.Scorer:
        place_rewards(self._config.model)
        try:
            return rewards.build(self._config.reward)
        except SpotlightError as error:  # the driver could make it: this machine lacks something
            raise SpotlightError(f"on {socket.gethostname()}: {error}") from None

    def prepare(self) -> Prepared:
        """Noise levels of rollouts, of exploration and of validations; version 0 is published.

        Raises:
            SpotlightError: the model cannot draw this size, or ``sp.backend`` cannot split it as the settings want.
        """
        settings = self._config
        if settings.sp.backend == "xfuser":
            xfuser_backend.require(device_of(settings.model))
        size = settings.model.height_px, settings.model.width_px
        rows, columns = self.model.grid(*size)
        text_tokens = self.model.encode([next(iter(self.resident.prompts())).text]).mask_BT.shape[1]
        for setting, widths in (
            ("strategy.widths", settings.strategy.widths),
            ("train.width", (settings.train.width,)),
        ):
            sequence_parallel.check_widths(self.model.transformer, rows * columns, text_tokens, widths, setting)
        steps = settings.rollout.steps
        return Prepared(
            sigmas=self.model.sigmas(steps, *size),
            explore_sigmas=self.model.sigmas(settings.exploration.steps or steps, *size),
            validation_sigmas=self.model.sigmas(settings.run.validation_steps or steps, *size),
            start=self._training.publish_start(),
        )

    def images(self, request: Request) -> NDArray[np.uint8]:
        """The images of a finished request, shape (B, height, width, 3).

        A request whose latents are lost or damaged is denoised again: it is a pure value. Where a sample's latents are
        not finite, its image is that of zeros.
        """
        return self._images(request)[0]

    def _images(self, request: Request) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """The images, and for each (B) whether its latents were finite."""
        clean_BNC = self._denoiser.clean(request)
        finite_B = np.asarray(np.isfinite(clean_BNC).all(axis=(1, 2)))
        clean_BNC = np.where(finite_B[:, None, None], clean_BNC, np.float32(0))
        with torch.no_grad(), self.resident.limits(f"decoding request {request.id}"):
            latents_BNC = torch.from_numpy(clean_BNC).to(self.model.device)
            return self.model.decode(latents_BNC, request.height_px, request.width_px), finite_B

    def decode(self, request: Request) -> Dropped | None:
        """Decode a finished request's images and keep them, unless they are kept already, or scored.

        Exploration that is closed meanwhile is dropped: the next rollout needs the device.
        """
        if self.store.known_scores(request) or self.store.images(request):
            return None
        try:
            _still_wanted(request)
        except _NotWanted as error:
            return Dropped(reason=str(error))
        self.store.put_images(request, *self._images(request))
        return None

    def score(self, request: Request) -> Scored | Dropped:
        """Rewards of a finished request; what was scored before is read, not scored again.

        Images that `decode` kept are not decoded again, and go once the scores are stored. Exploration that is closed
        meanwhile is dropped: the next rollout needs the device.
        """
        known = self.store.known_scores(request)
        try:
            if known is None:
                _still_wanted(request)
                with self._pace.lasting(self._pace.score_s(len(request.seeds)), partial(_still_wanted, request)):
                    found = self._scores(request)
                known = self.store.put_scores(request, found)
        except _NotWanted as error:
            return Dropped(reason=str(error))
        if self._config.scores_apart:
            self.store.drop_images(request)
        return Scored(
            request=request,
            rewards=tuple(known["rewards"]),
            errors=tuple(known["errors"]),
            parts=tuple(map(tuple, known.get("parts", ()))),
        )

    def _scores(self, request: Request) -> dict[str, Any]:
        """The row to store for a request: its rewards, or the row that another worker has stored meanwhile."""
        kept = self.store.images(request) if self._config.scores_apart else None
        if kept is None and self._config.scores_apart and (known := self.store.known_scores(request)):
            return known  # the worker that stored it removed the images
        images, finite_B = kept or self._images(request)
        values, parts, errors = self._rewards(request, images, finite_B)
        trained = request.purpose != "explore" or self._config.exploration.reuse
        extras: dict[str, Any] = {"thumbnails": thumbnails(images)} if trained else {}
        if parts:
            extras["parts"] = parts
        return {"digest": request.digest, "rewards": values, "errors": errors, **extras}

    def _rewards(
        self, request: Request, images: NDArray[np.uint8], finite_B: NDArray[np.bool_]
    ) -> tuple[rewards.Rewards, list[rewards.Rewards], list[str]]:
        """Score the images of finite latents.

        Returns:
            Rewards in the order of seeds, None where there is none; the same for each table of a weighted sum; and a
            text for each reward that is missing.
        """
        shown = np.flatnonzero(finite_B)
        prompts = [request.prompt] * len(shown)
        settings = self._config.reward
        with any_order_of_sums():
            found, found_parts, errors = rewards.score_each(
                self._scorer,
                images[shown],
                prompts,
                attempts=settings.attempts,
                batch=settings.batch,
                patience_s=min(settings.patience_s, settings.limit_s / 2),  # before the engine is ended at the limit
            )
        values, *parts = (_scattered(shown, each, len(request.seeds)) for each in (found, *found_parts))
        lost = [request.seeds[index] for index in np.flatnonzero(~finite_B)]
        return (
            values,
            parts,
            [f"{request.prompt.text!r}, seed {seed}: latents are not finite" for seed in lost] + errors,
        )


def _scattered(indices: NDArray[np.intp], known: rewards.Rewards, count: int) -> rewards.Rewards:
    """``count`` rewards: those known, at their indices, and None elsewhere."""
    values: rewards.Rewards = [None] * count
    for index, value in zip(indices, known, strict=True):
        values[index] = value
    return values


class _NotWanted(Exception):
    """Nobody waits for these rewards any more."""


def _still_wanted(request: Request) -> None:
    reason = signals.check(request)
    if reason:
        raise _NotWanted(reason)
