"""Trains a run's model on parts of an iteration's samples; it stages versions, and publishes none but the first.

Safe to run twice, anywhere: the same samples on the same version give the same bytes, whoever did which part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.device.denoise import Denoiser
from spotlight.device.pace import Pace
from spotlight.device.residency import Residency
from spotlight.records import Request, Sample, WeightsRef
from spotlight.rl.algorithms import TrainingBatch
from spotlight.rl.trainer import Trainer
from spotlight.store import weights


class Training:
    """The updates of a run, as far as this process does them.

    Args:
        drawn: gives the latents of finished requests.
    """

    def __init__(self, run_dir: str, config: Config, resident: Residency, drawn: Denoiser, pace: Pace) -> None:
        self._run_dir, self._config, self._resident, self._drawn, self._pace = run_dir, config, resident, drawn, pace
        self._trained: int | None = None  # the version that the optimizer's state in this process belongs to
        self._accumulated: list[tuple[Sample, ...]] = []  # parts of an iteration whose gradient is in the parameters

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._resident.model, self._config.train, seed=self._config.run.seed)

    def publish_start(self) -> WeightsRef:
        """Publish version 0: the weights that training starts from."""
        found = weights.published(self._run_dir, 0)
        if found is None:
            self._write(0, {})
            found = weights.publish(self._run_dir, 0)
        return found.weights

    def train(self, ref: WeightsRef, parts: Sequence[tuple[Sample, ...]], of: int, iteration: int) -> None:
        """Train on some more of an iteration's samples; with the last of them, stage the version after ``ref``.

        Safe to run twice, anywhere: parts that this process holds the gradient of are not done again, all others
        are, also those that another process did. Nothing is done if that version is published already. The
        optimizer's state is taken from this process if it is the one that trained ``ref``, else from the checkpoint.

        Args:
            parts: all parts so far, in order; several of them make one update.
            of: samples of the whole iteration.
        """
        version = ref.version + 1
        if weights.published(self._run_dir, version):
            return
        known = self._trained == ref.version
        self._resident.use(ref)
        if not known:
            old = weights.load(self._run_dir, ref, "old") if self._config.train.keeps_old else None
            self._trainer.load_state(weights.load(self._run_dir, ref, "optimizer"), old)
            self._trained, self._accumulated = ref.version, []
        whole = sum(map(len, parts)) == of
        if whole and len(parts) == 1:
            self._stage(version, self._update(parts[0], iteration))
            return
        self._accumulate(parts, of, iteration)
        if whole:
            self._accumulated, self._trained = [], None
            self._resident.changed()
            self._stage(version, self._trainer.finish(iteration=iteration))

    def _update(self, samples: Sequence[Sample], iteration: int) -> dict[str, float]:
        batch = self._training_batch(samples, 0)
        self._trained = None  # half-way through an update, nothing resident has a version
        self._resident.changed()
        with self._lasting(samples, iteration):
            return self._trainer.update(batch, iteration=iteration)

    def _accumulate(self, parts: Sequence[tuple[Sample, ...]], of: int, iteration: int) -> None:
        """Bring the gradient in the parameters to that of all these parts, or keep that of these and some more."""
        done = self._accumulated
        if any(had != part for had, part in zip(done, parts, strict=False)):
            done = []
        for at in range(len(done), len(parts)):
            batch = self._training_batch(parts[at], sum(map(len, parts[:at])))
            self._accumulated = []  # half-way through a part, the gradient belongs to no set of whole parts
            with self._lasting(parts[at], iteration):
                self._trainer.accumulate(batch, iteration=iteration, of=of)
            self._accumulated = list(parts[: at + 1])

    @contextmanager
    def _lasting(self, samples: Sequence[Sample], iteration: int) -> Iterator[None]:
        what = f"training of iteration {iteration} ({len(samples)} samples)"
        with self._resident.memory(what), self._pace.lasting(self._pace.train_s(len(samples))):
            yield

    def _stage(self, version: int, metrics: dict[str, float]) -> None:
        self._write(version, metrics)
        self._trained = version

    def _write(self, version: int, metrics: dict[str, float]) -> None:
        trainable, trainer = self._resident.model.trainable(), self._trainer
        weights.stage(self._run_dir, version, trainable, trainer.state(), metrics, trainer.ema(), trainer.old())

    def _training_batch(self, samples: Sequence[Sample], before: int) -> TrainingBatch:
        """Samples in the order given, whoever was ready first; so many of the iteration's come before them."""
        first = samples[0].request
        stochastic = first.sampler != "ode"
        rows: list[NDArray[np.float32]] = []
        windows: list[NDArray[np.float32]] = []
        log_probs: list[NDArray[np.float32]] = []
        for request, indices in _by_request(samples):
            rows.append(self._drawn.clean(request)[indices])
            if stochastic:
                window_BKNC, log_prob_BS = self._drawn.window(request)
                windows.append(window_BKNC[indices])
                log_probs.append(log_prob_BS[indices])
        model = self._resident.model
        return TrainingBatch(
            clean_BNC=torch.from_numpy(np.concatenate(rows)).to(model.device),
            advantages_B=np.array([sample.advantage for sample in samples]),
            conditioning=model.encode([sample.request.prompt.text for sample in samples]),
            height_px=first.height_px,
            width_px=first.width_px,
            guidance=first.guidance,
            sigmas=first.sigmas,
            sde_window=first.sde_window,
            sampler=first.sampler,
            noise_level=first.noise_level,
            window_BKNC=torch.from_numpy(np.concatenate(windows)).to(model.device) if windows else None,
            log_prob_BS=torch.from_numpy(np.concatenate(log_probs)).to(model.device) if log_probs else None,
            groups_B=tuple(sample.request.prompt.id for sample in samples),
            first=before,
        )


def _by_request(samples: Sequence[Sample]) -> Iterator[tuple[Request, list[int]]]:
    for request, group in groupby(samples, key=lambda sample: sample.request):
        yield request, [sample.index for sample in group]
