"""What one device does: it holds a model with its resident weights, and runs requests and updates.

One engine per process and run. It knows nothing of Dask: the cluster tells it from outside when to
stop, and it looks between two denoising steps. It never decides what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight import data, flow, models, rewards, weights
from spotlight.latents import LatentStore, MissingLatents, Writer
from spotlight.models import Conditioning
from spotlight.records import Dropped, Request, Rollout, Sample, Scored, WeightsRef
from spotlight.rundir import RunDir
from spotlight.signals import signals
from spotlight.train import Trainer, TrainingBatch

RESIDENT_VERSIONS = 2
"""Rollouts use version k while exploration uses k or k - 1: no version is loaded twice."""


_engines: dict[str, Engine] = {}


def engine_of(run_dir: str) -> Engine:
    """This process's engine for a run; made at the first call, then reused."""
    if run_dir not in _engines:
        _engines[run_dir] = Engine(Path(run_dir))
    return _engines[run_dir]


class Engine:
    """A run's model on this process's device."""

    def __init__(self, run_dir: Path) -> None:
        torch.set_num_threads(1)  # one thread per worker process: several workers share a machine's cores
        self.run_dir = run_dir
        run = RunDir(run_dir)
        self.config = run.config()
        self.store = LatentStore(run.latents_url)
        self._versions: dict[tuple[WeightsRef, bool], dict[str, Tensor]] = {}
        self._loaded: tuple[WeightsRef, bool] | None = None
        self._trained: int | None = None  # the version that the optimizer's state in this process belongs to

    @cached_property
    def model(self) -> models.Model:
        settings = self.config
        model = models.load(settings.model)
        paths = (settings.data.train_prompts, settings.data.validation_prompts)
        texts = [prompt.text for path in paths for prompt in data.read_prompts(path)]
        model.preload(texts, cache=self.run_dir / "prompts.safetensors")
        model.make_trainable(rank=settings.train.lora_rank, alpha=settings.train.lora_alpha, seed=settings.run.seed)
        return model

    @cached_property
    def scorer(self) -> rewards.Scorer:
        return rewards.load(self.config.reward.name)

    @cached_property
    def trainer(self) -> Trainer:
        return Trainer(self.model, self.config.train, seed=self.config.run.seed)

    # Denoising

    def rollout(self, request: Request) -> Rollout | Dropped:
        """Denoise a request, committing each step; finished and half-finished work is not done again.

        Raises:
            Stopped: the run is being stopped; what was committed stays.
        """
        reason = signals.check(request)
        if reason:
            return Dropped(reason=reason)
        resume = self.config.strategy.on_preemption == "resume"
        if resume and self._is_done(request):
            return self._rolled_out(request, resumed=request.steps)
        return self._denoise(request, resume=resume)

    def _denoise(self, request: Request, *, resume: bool) -> Rollout | Dropped:
        found = self.store.resume(request)
        first = found.step if resume else 0
        x_BNC = torch.from_numpy(found.x_BNC) if first and found.x_BNC is not None else self._initial(request)
        self.use(request.weights, averaged=request.averaged)
        text = self.model.encode([request.prompt.text]).rows([0] * len(request.seeds))
        with self.store.writer(request, found.epoch) as writer:
            for step in range(first, request.steps):
                reason = signals.check(request)
                if reason:
                    return Dropped(reason=reason)
                x_BNC = self._step(request, step, x_BNC, text, writer)
        return self._rolled_out(request, resumed=first)

    def _rolled_out(self, request: Request, *, resumed: int) -> Rollout:
        ran = resumed < request.steps
        resident = self._loaded[0] if ran and self._loaded else request.weights
        return Rollout(
            request=request,
            weights_sha256=resident.sha256,
            steps_resumed=resumed,
            steps_run=request.steps - resumed,
        )

    def _is_done(self, request: Request) -> bool:
        with suppress(MissingLatents):
            self.store.clean(request)
            return True
        return False

    def _initial(self, request: Request) -> Tensor:
        tokens, channels = self.model.latent_shape(request.height_px, request.width_px)
        return flow.initial_noise(request.seeds, tokens, channels)

    @torch.no_grad()
    def _step(self, request: Request, step: int, x_BNC: Tensor, text: Conditioning, writer: Writer) -> Tensor:
        sigma, sigma_next = request.sigmas[step], request.sigmas[step + 1]
        device = self.model.device
        v_BNC = self.model.velocity(
            x_BNC.to(device),
            torch.full((len(request.seeds),), sigma, device=device),
            text,
            height_px=request.height_px,
            width_px=request.width_px,
            guidance=request.guidance,
        ).cpu()
        log_prob_B: NDArray[np.float32] | None = None
        if request.sampler != "ode" and request.window[0] <= step < request.window[1]:
            x_BNC, log_prob, _, _ = flow.sde_step(
                x_BNC,
                v_BNC,
                sigma,
                sigma_next,
                noise_level=request.noise_level,
                kind=request.sampler,
                sigma_cap=request.sigmas[1],
                noise_BNC=flow.step_noise(request.seeds, step, *x_BNC.shape[1:]),
            )
            log_prob_B = log_prob.numpy()
        else:
            x_BNC = flow.ode_step(x_BNC, v_BNC, sigma, sigma_next)
        writer.commit(step + 1, x_BNC.numpy(), log_prob_B)
        return x_BNC

    # Images and rewards

    def images(self, request: Request) -> NDArray[np.uint8]:
        """The images of a finished request, shape (B, height, width, 3).

        A request whose latents are lost or damaged is denoised again: it is a pure value.
        """
        with torch.no_grad():
            clean_BNC = torch.from_numpy(self._clean(request)).to(self.model.device)
            return self.model.decode(clean_BNC, request.height_px, request.width_px)

    def _clean(self, request: Request) -> NDArray[np.float32]:
        try:
            return self.store.clean(request)
        except MissingLatents:
            self.rollout(request)
            return self.store.clean(request)

    def _window(self, request: Request) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        initial_BNC = self._initial(request).numpy()
        try:
            return self.store.window(request, initial_BNC)
        except MissingLatents:
            self._denoise(request, resume=False)
            return self.store.window(request, initial_BNC)

    def score(self, request: Request) -> Scored:
        """Rewards of a finished request; what was scored before is read, not scored again."""
        name = f"scores/{request.id}"
        known = self.store.get_record(name)
        if known and known["digest"] == request.digest:
            return Scored(request=request, rewards=tuple(known["rewards"]), errors=tuple(known["errors"]))
        prompts = [request.prompt.text] * len(request.seeds)
        values, errors = rewards.score(self.scorer, self.images(request), prompts, attempts=self.config.reward.attempts)
        self.store.put_record(name, {"digest": request.digest, "rewards": values, "errors": errors})
        return Scored(request=request, rewards=tuple(values), errors=tuple(errors))

    # Weights

    def use(self, ref: WeightsRef, *, averaged: bool = False) -> None:
        """Make a weights version, or its moving average, the resident one; hashes are checked on reading.

        Raises:
            SpotlightError: the file is missing or damaged.
        """
        wanted = (ref, averaged)
        if self._loaded == wanted:
            return
        if wanted not in self._versions:
            while len(self._versions) >= RESIDENT_VERSIONS:
                self._versions.pop(min(self._versions, key=lambda old: old[0].version))
            self._versions[wanted] = weights.load(self.run_dir, ref, "ema" if averaged else "trainable")
        self._loaded = None
        self.model.load_trainable(self._versions[wanted])
        self._loaded = wanted

    def publish_start(self) -> WeightsRef:
        """Publish version 0: the weights that training starts from."""
        found = weights.published(self.run_dir, 0)
        if found is None:
            weights.stage(self.run_dir, 0, self.model.trainable(), self.trainer.state(), {}, self.trainer.ema())
            found = weights.publish(self.run_dir, 0)
        return found.weights

    # Training

    def train(self, ref: WeightsRef, samples: Sequence[Sample], *, iteration: int) -> None:
        """One iteration's updates, from version ``ref`` to the next one, which is left staged.

        Does nothing if that version is published already. The optimizer's state is taken from
        this process if it is the one that trained ``ref``, else from the checkpoint.
        """
        version = ref.version + 1
        if weights.published(self.run_dir, version):
            return
        batch = self._training_batch(samples)
        resident = self._trained == ref.version
        self.use(ref)
        if not resident:
            self.trainer.load_state(weights.load(self.run_dir, ref, "optimizer"))
        self._loaded = self._trained = None  # half-way through an update, nothing resident has a version
        metrics = self.trainer.update(batch, iteration=iteration)
        weights.stage(self.run_dir, version, self.model.trainable(), self.trainer.state(), metrics, self.trainer.ema())
        self._trained = version

    def _training_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Samples in the order given, whoever was ready first."""
        first = samples[0].request
        stochastic = first.sampler != "ode"
        rows: list[NDArray[np.float32]] = []
        windows: list[NDArray[np.float32]] = []
        log_probs: list[NDArray[np.float32]] = []
        for request, indices in _by_request(samples):
            rows.append(self._clean(request)[indices])
            if stochastic:
                window_BKNC, log_prob_BS = self._window(request)
                windows.append(window_BKNC[indices])
                log_probs.append(log_prob_BS[indices])
        device = self.model.device
        return TrainingBatch(
            clean_BNC=torch.from_numpy(np.concatenate(rows)).to(device),
            advantages_B=np.array([sample.advantage for sample in samples]),
            conditioning=self.model.encode([sample.request.prompt.text for sample in samples]),
            height_px=first.height_px,
            width_px=first.width_px,
            guidance=first.guidance,
            sigmas=first.sigmas,
            window=first.window,
            sampler=first.sampler,
            noise_level=first.noise_level,
            window_BKNC=torch.from_numpy(np.concatenate(windows)).to(device) if windows else None,
            log_prob_BS=torch.from_numpy(np.concatenate(log_probs)).to(device) if log_probs else None,
        )


def _by_request(samples: Sequence[Sample]) -> Iterator[tuple[Request, list[int]]]:
    for request, group in groupby(samples, key=lambda sample: sample.request):
        yield request, [sample.index for sample in group]
