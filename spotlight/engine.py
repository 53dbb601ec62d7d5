"""What one device does: it holds a model with its resident weights, and runs requests and updates.

One engine per process and run; `spotlight.device` gives it a process of its own. It knows nothing of Dask:
it is told from outside when to stop or to leave a gang, and looks between two denoising steps. It
never decides what runs.

The ranks of a gang hold the same latents: all of them take every step, and the first commits it. Whether they
go on is agreed before each step, so that all leave at the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight import data, flow, models, rewards, sequence, weights
from spotlight.device import Beat
from spotlight.latents import LatentStore, MissingLatents, StaleEpoch, Writer
from spotlight.models import Conditioning
from spotlight.node import Node
from spotlight.pace import Pace
from spotlight.records import (
    Dropped,
    Interrupted,
    Placement,
    Prompt,
    Request,
    Rollout,
    Sample,
    Scored,
    Spare,
    SpotlightError,
    Stopped,
    WeightsRef,
)
from spotlight.rundir import RunDir
from spotlight.sequence import Gang, GangBroken
from spotlight.signals import signals
from spotlight.train import Trainer, TrainingBatch

RESIDENT_VERSIONS = 2
"""Rollouts use version k while exploration uses k or k - 1: no version is loaded twice."""


ALONE = Placement(gang="", epoch=0, rank=0, width=1)
JOIN_TIMEOUT_S = 600.0
"""Longest that a rank waits for the others: they may have a large model to load first."""
GO_ON, LEAVE, DROP, STOP = range(4)
"""What the ranks of a gang may agree on before a step; the largest wins."""

Heart = Callable[[Beat | None], None]
"""Is given signs of life, of every step and while waiting for others."""

_engines: dict[str, Engine] = {}


def _no_heart(beat: Beat | None) -> None:
    """Where nobody watches."""


def engine_of(run_dir: str, beat: Heart = _no_heart, node: Node | None = None) -> Engine:
    """This process's engine for a run; made at the first call, then reused."""
    if run_dir not in _engines:
        _engines[run_dir] = Engine(Path(run_dir), beat, node)
    return _engines[run_dir]


class Engine:
    """A run's model on this process's device.

    Args:
        node: shares weights with the other engines of the machine; gangs meet there.
    """

    def __init__(self, run_dir: Path, beat: Heart = _no_heart, node: Node | None = None) -> None:
        self._node = node
        self._beat = beat
        torch.set_num_threads(1)  # one thread per worker process: several workers share a machine's cores
        self.run_dir = run_dir
        run = RunDir(run_dir)
        self.config = run.config()
        self.store = LatentStore(run.latents_url)
        self._pace = Pace(self.config)
        self._versions: dict[tuple[WeightsRef, bool], dict[str, Tensor]] = {}
        self._loaded: tuple[WeightsRef, bool] | None = None
        self._trained: int | None = None  # the version that the optimizer's state in this process belongs to
        self._accumulated: list[tuple[Sample, ...]] = []  # parts of an iteration whose gradient is in the parameters

    @cached_property
    def model(self) -> models.Model:
        settings = self.config
        model = models.load(settings.model, self._node)
        texts = [prompt.text for prompt in self._prompts()]
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

    def prepare(self) -> tuple[tuple[float, ...], tuple[float, ...], WeightsRef]:
        """Noise levels of rollouts and of exploration; version 0 is published.

        Raises:
            SpotlightError: the model cannot draw this size, or cannot be split as the settings want.
        """
        settings = self.config
        size = settings.model.height_px, settings.model.width_px
        rows, columns = self.model.grid(*size)
        text_tokens = self.model.encode([next(iter(self._prompts())).text]).mask_BT.shape[1]
        sequence.check_widths(self.model.transformer, rows * columns, text_tokens, settings.strategy.widths)
        steps, explore_steps = settings.rollout.steps, settings.exploration.steps or settings.rollout.steps
        return self.model.sigmas(steps, *size), self.model.sigmas(explore_steps, *size), self.publish_start()

    def _prompts(self) -> Iterator[Prompt]:
        for path in (self.config.data.train_prompts, self.config.data.validation_prompts):
            yield from data.read_prompts(path)

    def rollout(self, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Spare:
        """Denoise a request, committing each step; finished and half-finished work is not done again.

        Args:
            place: this process's part in the gang that runs it.

        Returns:
            From the first rank a `Rollout`, from the others a `Spare`.

        Raises:
            Stopped: the run is being stopped; what was committed stays.
            Interrupted: the gang broke, or is to go on elsewhere; what was committed stays.
            SpotlightError: it does not fit the device's memory.
        """
        try:
            with self._memory(f"request {request.id} ({len(request.seeds)} samples)"):
                return self._denoise(request, place, resume=self.config.strategy.on_preemption == "resume")
        except (GangBroken, StaleEpoch) as error:
            reason = signals.check(request)  # what called the gang off may have been meant for all of the run
            if reason:
                return Dropped(reason=reason)
            raise Interrupted(str(error)) from error

    def _denoise(self, request: Request, place: Placement, *, resume: bool) -> Rollout | Dropped | Spare:
        if place.width == 1 and resume and self._is_done(request):
            return self._rolled_out(request, resumed=request.steps)
        self.use(request.weights, averaged=request.averaged)
        text = self.model.encode([request.prompt.text]).rows([0] * len(request.seeds))
        with ExitStack() as stack:
            gang = stack.enter_context(self._gang(request, place)) if place.width > 1 else None
            first, x_BNC, writer = self._begin(request, place, gang, stack, resume=resume)
            step_s = self._pace.step_s(len(request.seeds), place.width)
            for step in range(first, request.steps):
                reason = self._agree(request, place, gang)
                if reason:
                    return Dropped(reason=reason)
                with self._pace.lasting(step_s, partial(self._look, request, place)):
                    x_BNC, log_prob_B = self._step(request, step, x_BNC, text)
                if writer:
                    writer.commit(step + 1, x_BNC.numpy(), log_prob_B)
                self._beat(Beat(step=step + 1, steps=request.steps))
            if gang:
                if writer:
                    writer.wait()
                gang.agree(GO_ON)  # nobody is done before the last step is committed: what is done is never redone
        return Spare() if place.rank else self._rolled_out(request, resumed=first)

    def _gang(self, request: Request, place: Placement) -> Gang:
        assert self._node, "the ranks of a gang meet in their node's memory"
        return Gang(
            self.model.transformer,
            meeting=self._node.meeting(place.name),
            name=place.name,
            rank=place.rank,
            width=place.width,
            device=self.model.device,
            called_off=lambda: self._called_off(request, place),
            timeout_s=JOIN_TIMEOUT_S,
        )

    def _called_off(self, request: Request, place: Placement) -> str | None:
        """Looked at while waiting: others may have been told to drop the request before they joined."""
        self._beat(None)
        return f"{place.name} was called off" if signals.is_called_off(place) else signals.check(request)

    def _look(self, request: Request, place: Placement) -> None:
        reason = self._called_off(request, place)
        if reason:
            raise GangBroken(reason)

    def _begin(
        self, request: Request, place: Placement, gang: Gang | None, stack: ExitStack, *, resume: bool
    ) -> tuple[int, Tensor, Writer | None]:
        """The first rank finds where to go on and takes the request over; all ranks get its latents."""
        first, x_BNC, writer = 0, self._initial(request), None
        if place.rank == 0 and resume and self._is_done(request):
            first = request.steps
        elif place.rank == 0:
            found = self.store.resume(request)
            if resume and found.x_BNC is not None:
                first, x_BNC = found.step, torch.from_numpy(found.x_BNC)
            writer = stack.enter_context(self.store.writer(request, found.epoch))
            self._beat(Beat(step=first, steps=request.steps, resumed=True))
        if gang:
            first = int(gang.broadcast(torch.tensor([float(first)]))[0])
            x_BNC = gang.broadcast(x_BNC)
        return first, x_BNC, writer

    def _agree(self, request: Request, place: Placement, gang: Gang | None) -> str | None:
        """Before a step: whether all ranks take it, by the word of those who may not."""
        code, reason = GO_ON, None
        if signals.is_stopping(request.run):
            code = STOP
        elif reason := signals.check(request):
            code = DROP
        elif signals.must_leave(place):
            code = LEAVE
        code = gang.agree(code) if gang else code
        if code == STOP:
            raise Stopped(request.id)
        if code == LEAVE:
            raise Interrupted(f"{place.name} leaves at a step boundary")
        return (reason or "another rank called it off") if code == DROP else None

    def _rolled_out(self, request: Request, *, resumed: int) -> Rollout:
        ran = resumed < request.steps
        resident = self._loaded[0] if ran and self._loaded else request.weights
        return Rollout(
            request=request,
            weights_sha256=resident.sha256,
            steps_resumed=resumed,
            steps_run=request.steps - resumed,
        )

    @contextmanager
    def _memory(self, what: str) -> Iterator[None]:
        """Say of a full device what was too large for it, and what may be made smaller."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise SpotlightError(
                f"{what} does not fit the memory of device {self.model.device}: {error}; make rollout.request_seeds, "
                "exploration.request_seeds or train.micro_batch smaller, allow wider gangs (strategy.widths), or take "
                "a device with more memory"
            ) from error

    def _is_done(self, request: Request) -> bool:
        with suppress(MissingLatents):
            self.store.clean(request)
            return True
        return False

    def _initial(self, request: Request) -> Tensor:
        tokens, channels = self.model.latent_shape(request.height_px, request.width_px)
        return flow.initial_noise(request.seeds, tokens, channels)

    @torch.no_grad()
    def _step(
        self, request: Request, step: int, x_BNC: Tensor, text: Conditioning
    ) -> tuple[Tensor, NDArray[np.float32] | None]:
        """The latents after the step, and its log-probability where it is stochastic."""
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
        return x_BNC, log_prob_B

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
            self._denoise(request, ALONE, resume=False)
            return self.store.window(request, initial_BNC)

    def score(self, request: Request) -> Scored | Dropped:
        """Rewards of a finished request; what was scored before is read, not scored again.

        Exploration that is closed meanwhile is dropped: the next rollout needs the device.
        """
        name = f"scores/{request.id}"
        known = self.store.get_record(name)
        if known and known["digest"] == request.digest:
            return Scored(request=request, rewards=tuple(known["rewards"]), errors=tuple(known["errors"]))
        prompts = [request.prompt.text] * len(request.seeds)
        try:
            _still_wanted(request)
            with self._pace.lasting(self._pace.score_s(len(request.seeds)), partial(_still_wanted, request)):
                images = self.images(request)
                values, errors = rewards.score(self.scorer, images, prompts, attempts=self.config.reward.attempts)
        except _NotWanted as error:
            return Dropped(reason=str(error))
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
            self._versions[wanted] = weights.load(self.run_dir, ref, "ema" if averaged else "trainable", self._node)
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
        if weights.published(self.run_dir, version):
            return
        resident = self._trained == ref.version
        self.use(ref)
        if not resident:
            self.trainer.load_state(weights.load(self.run_dir, ref, "optimizer"))
            self._trained, self._accumulated = ref.version, []
        whole = sum(map(len, parts)) == of
        if whole and len(parts) == 1:
            self._stage(version, self._update(parts[0], iteration))
            return
        self._accumulate(parts, of, iteration)
        if whole:
            self._accumulated, self._loaded, self._trained = [], None, None
            self._stage(version, self.trainer.finish(iteration=iteration))

    def _update(self, samples: Sequence[Sample], iteration: int) -> dict[str, float]:
        batch = self._training_batch(samples, 0)
        self._loaded = self._trained = None  # half-way through an update, nothing resident has a version
        with self._training(samples, iteration):
            return self.trainer.update(batch, iteration=iteration)

    def _accumulate(self, parts: Sequence[tuple[Sample, ...]], of: int, iteration: int) -> None:
        """Make the gradient in the parameters that of all these parts, or of some more that came before."""
        done = self._accumulated
        if any(had != part for had, part in zip(done, parts, strict=False)):
            done = []
        for at in range(len(done), len(parts)):
            batch = self._training_batch(parts[at], sum(map(len, parts[:at])))
            self._accumulated = []  # half-way through a part, what is there is the gradient of nothing
            with self._training(parts[at], iteration):
                self.trainer.accumulate(batch, iteration=iteration, of=of)
            self._accumulated = list(parts[: at + 1])

    @contextmanager
    def _training(self, samples: Sequence[Sample], iteration: int) -> Iterator[None]:
        what = f"training of iteration {iteration} ({len(samples)} samples)"
        with self._memory(what), self._pace.lasting(self._pace.train_s(len(samples))):
            yield

    def _stage(self, version: int, metrics: dict[str, float]) -> None:
        weights.stage(self.run_dir, version, self.model.trainable(), self.trainer.state(), metrics, self.trainer.ema())
        self._trained = version

    def _training_batch(self, samples: Sequence[Sample], before: int) -> TrainingBatch:
        """Samples in the order given, whoever was ready first; so many of the iteration's come before them."""
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
            first=before,
        )


class _NotWanted(Exception):
    """Nobody waits for these rewards any more."""


def _still_wanted(request: Request) -> None:
    reason = signals.check(request)
    if reason:
        raise _NotWanted(reason)


def _by_request(samples: Sequence[Sample]) -> Iterator[tuple[Request, list[int]]]:
    for request, group in groupby(samples, key=lambda sample: sample.request):
        yield request, [sample.index for sample in group]
