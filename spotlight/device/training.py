"""Computes gradients of parts, and takes optimizer steps; it stages versions, and publishes none but the first.

Safe to run twice, anywhere: the same parts on the same version give the same bytes, whoever did which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.device.denoise import RESTS, Denoiser, OnBeat, ignore_beat, join_gang
from spotlight.device.pace import Pace
from spotlight.device.process import Beat
from spotlight.device.protocol import ALONE
from spotlight.device.residency import Residency
from spotlight.device.sequence_parallel import Gang, GangBroken
from spotlight.device.signals import signals
from spotlight.records import (
    Gradient,
    GradientPart,
    Interrupted,
    Placement,
    Request,
    Sample,
    SpotlightError,
    Surplus,
    Updated,
    WeightsRef,
)
from spotlight.rl.algorithms import TrainingBatch
from spotlight.rl.gradients import PartGradient, part_gradient, rows_to_learn_from
from spotlight.rl.start import start_from_lora
from spotlight.rl.sums import sliced
from spotlight.rl.trainer import Trainer
from spotlight.store import updates, weights
from spotlight.store.node import Node
from spotlight.store.objects import StoreError

PASSES = Beat(patience=5.0)
"""A pass forward and back, of many rows, takes a multiple of a denoising step."""


class Training:
    """The updates of a run, as far as this process does them.

    Args:
        denoiser: gives the latents of finished requests.
        on_beat: is called with None while waiting for others, and with a beat before each pass, and before what may
            take long in one piece.
        node: where the ranks of a gang meet; None where there are no gangs.
    """

    def __init__(
        self,
        run_dir: str,
        config: Config,
        resident: Residency,
        denoiser: Denoiser,
        pace: Pace,
        on_beat: OnBeat = ignore_beat,
        node: Node | None = None,
    ) -> None:
        self._run_dir, self._config, self._resident, self._pace = run_dir, config, resident, pace
        self._denoiser = denoiser
        self._on_beat, self._node = on_beat, node
        self._at: tuple[int, int] | None = None  # the version, and updates since, that the optimizer's state belongs to
        self._norms: list[float] = []  # of these updates

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._resident.model, self._config.train)

    def publish_start(self) -> WeightsRef:
        """Publish version 0: the weights that training starts from, on all workers."""
        found = weights.published(self._run_dir, 0)
        if found is None:
            start_from_lora(self._resident.model, self._config.train)
            self._write(0, {})
            found = weights.publish(self._run_dir, 0)
        return found.weights

    def gradient(self, part: GradientPart, place: Placement = ALONE) -> Gradient | Surplus:
        """Compute the gradient of a part of an update, and keep it; nothing, if it is kept or needed no more.

        Args:
            place: this process's part in the gang that shares the passes.

        Returns:
            From the first rank the gradient, from the others a `Surplus`.

        Raises:
            Interrupted: the gang broke; it is to be formed anew.
        """
        if place.width == 1:
            return self._known(part) or self._keep(part, self._gradient(part))
        batch = self._training_batch(part) if part.samples and not self._known(part) else None  # alone, before joining
        try:
            with join_gang(self._resident, self._node, place, called_off=lambda: self._called_off(part, place)) as gang:
                if place.rank == 0:
                    self._on_beat(Beat(step=0, steps=1, resumed=True))
                known = self._known(part)
                if not gang.agree(int(known is not None)):  # all decide alike, though they looked at different times
                    made = self._gradient(part, gang, batch)
                    known = self._keep(part, made) if place.rank == 0 else None
                    self._on_beat(Beat(step=1, steps=1))
                    gang.agree(0)  # a barrier: a finished shard never runs again, so it is kept first
        except GangBroken as error:
            raise Interrupted(str(error)) from error
        if place.rank:
            return Surplus()
        found = known or self._known(part)
        assert found, f"another rank found {part.name}"
        return found

    def _goes_on(self) -> None:
        self._on_beat(None)

    def _called_off(self, part: GradientPart, place: Placement) -> str | None:
        """Looked at while waiting for the other ranks."""
        self._on_beat(None)
        if signals.is_called_off(place):
            return f"{place.name} was called off"
        return "the run is being stopped" if part.samples and signals.is_stopping(part.samples[0].request.run) else None

    def _known(self, part: GradientPart) -> Gradient | None:
        """The gradient if it is kept; an empty one if the next version is published, so that nobody needs it."""
        if weights.published(self._run_dir, part.weights.version + 1):
            return Gradient(name="")
        return updates.find(self._run_dir, part)

    def _keep(self, part: GradientPart, made: PartGradient) -> Gradient:
        measured = Gradient(name="", rows=made.rows, loss=made.loss, metrics=made.metrics)
        sizes = [parameter.numel() for parameter in self._resident.model.parameters()]
        slices = [list(map(str, each)) for each in sliced(sizes, part.slices)]
        self._on_beat(RESTS)
        return updates.put(self._run_dir, part, measured, made.tensors, slices)

    def _gradient(
        self, part: GradientPart, gang: Gang | None = None, batch: TrainingBatch | None = None
    ) -> PartGradient:
        """Compute a part's gradient; in a gang, the sum of those that each rank has from its own tokens."""
        if not part.samples:
            return PartGradient()
        resident = self._resident
        batch = batch or self._training_batch(part)  # first: lost latents are denoised again, with other weights
        self._on_beat(RESTS)
        current = updates.load_weights(self._run_dir, part.iteration, part.after) if part.after else None
        old = resident.old(part.weights)
        resident.use(part.weights)
        if current is not None:
            resident.changed()
        what = f"part {part.number} of iteration {part.iteration}'s training ({len(part.samples)} samples)"
        width = gang.width if gang else 1
        with ExitStack() as stack:
            stack.enter_context(resident.limits(what))
            stack.enter_context(self._pace.lasting(self._pace.train_s(len(part.samples), width), self._goes_on))
            if resident.captures_training and not gang:
                stack.enter_context(resident.model.capturing())
            made = part_gradient(
                resident.model,
                self._config.train,
                batch,
                seed=self._config.run.seed,
                iteration=part.iteration,
                old=old,
                current=current,
                on_pass=partial(self._on_beat, PASSES),
            )
            if gang is None:
                return made
            return replace(made, tensors={name: gang.sum(made.tensors[name]) for name in sorted(made.tensors)})

    def update(
        self,
        ref: WeightsRef,
        gradients: Sequence[Sequence[Gradient]],
        terms: Sequence[Sequence[Gradient]],
        iteration: int,
        after: str = "",
    ) -> Updated:
        """Take an optimizer step; after an iteration's last, stage the version after ``ref``.

        Nothing is done if that version is published already. The optimizer's state is that of this process if it has
        taken the step before; else it comes from the checkpoint, and the steps since then are taken again.

        Args:
            gradients: for each update of the iteration up to this one, what its parts measured, in order.
            terms: for each of these updates, the tensors to add: its parts' gradients, or the slices of their sum.
            after: hash of the weights that the previous update left; empty in the first.
        """
        version, update = ref.version + 1, len(gradients) - 1
        last = update + 1 == self._config.train.updates
        if weights.published(self._run_dir, version):
            return Updated(version=version, update=update)
        for step in range(self._begin(ref, update, iteration, after), update + 1):
            measured = [(part.rows, part.metrics) for part in gradients[step]]
            self._step(ref, terms[step], step, iteration, rows=rows_to_learn_from(self._config.train, measured))
        if last:
            parts = [[(part.rows, part.loss, part.metrics) for part in each] for each in gradients]
            metrics, self._at = self._trainer.finish(parts, self._norms, iteration=iteration), None
            self._write(version, metrics)
            self._at, self._norms = (version, 0), []
            return Updated(version=version, update=update)
        digest = updates.put_weights(self._run_dir, iteration, self._resident.model.trainable())
        return Updated(version=version, update=update, weights_sha256=digest)

    def _begin(self, ref: WeightsRef, update: int, iteration: int, after: str) -> int:
        """Load the optimizer's state, and the weights, after the latest update that this process can continue from.

        Returns:
            The first update to take.
        """
        if self._at == (ref.version, update):
            if update:
                self._resident.changed()
                self._resident.model.load_trainable(updates.load_weights(self._run_dir, iteration, after))
            return update
        if self._at != (ref.version, 0):
            old = weights.load(self._run_dir, ref, "old") if self._config.train.keeps_old else None
            self._trainer.load_state(weights.load(self._run_dir, ref, "optimizer"), old)
            self._at, self._norms = (ref.version, 0), []
        return 0

    def _step(self, ref: WeightsRef, terms: Sequence[Gradient], step: int, iteration: int, *, rows: int) -> None:
        if step == 0:
            self._resident.use(ref)
        self._resident.changed()
        self._at = None  # half-way through a step, the optimizer's state belongs to none
        tensors = updates.load_terms(self._run_dir, iteration, terms)
        try:
            norm = self._trainer.step(rows, tensors, iteration=iteration, update=step)
        except StoreError:  # out of reach for a while: the gradients are as they were
            raise
        except SpotlightError:
            updates.clear(self._run_dir, iteration)  # a resumed run, with other settings, would find them again
            raise
        finally:
            self._trainer.forget_gradients()
        self._norms.append(norm)
        self._at = (ref.version, step + 1)

    def _write(self, version: int, metrics: dict[str, float]) -> None:
        trainable, trainer = self._resident.model.trainable(), self._trainer
        weights.stage(self._run_dir, version, trainable, trainer.state(), metrics, trainer.ema(), trainer.old())

    def _training_batch(self, part: GradientPart) -> TrainingBatch:
        """The samples of a part, in their order, as tensors."""
        samples = part.samples
        first = samples[0].request
        stochastic = first.is_stochastic and self._config.train.is_stepwise
        rows: list[NDArray[np.float32]] = []
        windows: list[NDArray[np.float32]] = []
        log_probs: list[NDArray[np.float32]] = []
        for request, indices in _by_request(samples):
            rows.append(self._denoiser.clean(request)[indices])
            if stochastic:
                window_BKNC, log_prob_BS = self._denoiser.window(request)
                windows.append(window_BKNC[indices])
                log_probs.append(log_prob_BS[indices])
        model = self._resident.model
        size = first.height_px, first.width_px
        explored = first.purpose == "explore"  # perhaps in fewer steps: training takes the rollouts' levels
        return TrainingBatch(
            clean_BNC=torch.from_numpy(np.concatenate(rows)),
            advantages_B=np.array([sample.advantage for sample in samples]),
            conditioning=model.encode([sample.request.prompt.text for sample in samples]),
            height_px=first.height_px,
            width_px=first.width_px,
            guidance=first.guidance,
            sigmas=model.sigmas(self._config.rollout.steps, *size) if explored else first.sigmas,
            sde_window=first.sde_window,
            sampler=first.sampler,
            noise_level=first.noise_level,
            window_BKNC=torch.from_numpy(np.concatenate(windows)) if windows else None,
            log_prob_BS=torch.from_numpy(np.concatenate(log_probs)) if log_probs else None,
            groups_B=tuple(sample.request.prompt.id for sample in samples),
            positions=part.positions,
        )


def _by_request(samples: Sequence[Sample]) -> Iterator[tuple[Request, list[int]]]:
    for request, group in groupby(samples, key=lambda sample: sample.request):
        yield request, [sample.index for sample in group]
