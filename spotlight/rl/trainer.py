"""Makes one iteration's weights from its samples: objectives, gradient accumulation, optimizer and averaged weights.

Knows torch and `Model`, but no Dask and no files. All that is drawn depends on (seed, iteration, sample) alone, so an
iteration that is repeated on another machine, or after a resume, makes the same weights. Metrics hold no seconds.

Shapes: B samples, N latent tokens, C channels of a token, S stochastic steps, K = S + 1 latents around them, R rows of
a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import Sampler, SpotlightError
from spotlight.rl.flow import sde_step
from spotlight.rl.models.base import Conditioning, Model
from spotlight.rl.objectives import clipped_objective, gaussian_kl, nft_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One iteration's samples, in request order, and how they were sampled."""

    clean_BNC: Tensor
    """Final latents, float32."""
    advantages_B: NDArray[np.float64]
    conditioning: Conditioning
    height_px: int
    width_px: int
    guidance: float
    sigmas: tuple[float, ...]
    sde_window: tuple[int, int]
    """Steps ``[start, end)`` that were stochastic; S of them."""
    sampler: Sampler
    noise_level: float
    window_BKNC: Tensor | None
    """Latents before each step of the window and after the last, float32; Flow-GRPO only."""
    log_prob_BS: Tensor | None
    """The workers' values; only compared with the trainer's own."""
    first: int = 0
    """Number of its first sample within the iteration: 0 unless it is a later part of it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch: samples that share a slot, which is a noise level drawn (NFT) or a window step (GRPO)."""

    samples: tuple[int, ...]
    slot: int


class Objective(Protocol):
    """What an algorithm computes from rows; made anew for each iteration."""

    slots: int
    """Rows per sample."""

    def remember(self, updates: Sequence[Sequence[Rows]]) -> None:
        """Look at the policy before its first update, without gradients."""

    def loss(self, rows: Rows) -> Tensor:
        """Mean over the rows; gradients flow to the model."""

    def metrics(self) -> dict[str, float]:
        """Over all rows whose loss was asked for."""


class Trainer:
    """Owns what outlives an iteration besides the weights: the optimizer's moments and the averaged weights."""

    def __init__(self, model: Model, settings: TrainSection, *, seed: int) -> None:
        """
        Args:
            model: already made trainable; its parameters are updated in place.
            settings: the run's.
            seed: the run's; all that training draws is keyed by it.
        """
        self._model = model
        self._settings = settings
        self._seed = seed
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._ema = (
            {name: value.float().clone() for name, value in model.trainable().items()} if settings.ema_decay else None
        )
        self._parts: list[tuple[int, dict[str, float]]] = []
        """Samples and metrics of the parts whose gradient is in the parameters; ``loss`` is a share, not a mean."""

    def update(self, batch: TrainingBatch, *, iteration: int) -> dict[str, float]:
        """Run the iteration's optimizer steps; the model holds the next version afterwards.

        Returns:
            ``loss``, ``grad_norm`` (before clipping; mean over the updates), ``kl`` where it is asked for, and what
            `clipped_objective` and the comparison of log-probabilities measure for Flow-GRPO.

        Raises:
            SpotlightError: fewer samples than updates; a gradient that is not finite; or (Flow-GRPO) the trainer's
                policy is not the one that sampled.
        """
        objective = self._objective(batch, iteration)
        updates = self._split(len(batch.advantages_B), objective.slots, iteration)
        objective.remember(updates)
        steps = []
        for u, rows in enumerate(updates):
            self._optimizer.zero_grad()
            loss = self._backward(objective, rows, sum(len(part.samples) for part in rows))
            steps.append((loss, self._step(loss, f"iteration {iteration}, update {u}")))
        loss, norm = np.mean(steps, axis=0)
        return {"loss": float(loss), "grad_norm": float(norm), **objective.metrics()}

    def accumulate(self, batch: TrainingBatch, *, iteration: int, of: int) -> None:
        """Add the gradient of a part of an iteration's samples; a part whose ``first`` is 0 begins anew.

        Parts follow each other in the order of their samples. Their sum is, up to rounding, the gradient of one
        batch of all: the loss is a mean over samples, and each adds its share of it.

        Args:
            of: samples of the whole iteration, which has one update.

        Raises:
            SpotlightError: as `update`.
        """
        assert self._settings.updates == 1, "the parts of an iteration make one update"
        assert batch.first == sum(samples for samples, _ in self._parts) or not batch.first, "a part was left out"
        if not batch.first:
            self._parts = []
            self._optimizer.zero_grad()
        samples = len(batch.advantages_B)
        objective = self._objective(batch, iteration)
        (rows,) = self._split(samples, objective.slots, iteration)
        objective.remember([rows])
        loss = self._backward(objective, rows, of * objective.slots)
        self._parts.append((samples, {"loss": loss, **objective.metrics()}))

    def finish(self, *, iteration: int) -> dict[str, float]:
        """Take the optimizer step for which all parts were accumulated; returns and raises what `update` does."""
        parts, self._parts = self._parts, []
        loss = sum(metrics["loss"] for _, metrics in parts)
        norm = self._step(loss, f"iteration {iteration}")
        return _merged(parts) | {"loss": loss, "grad_norm": norm}

    def state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's moments and the averaged weights, flat, as safetensors wants them.

        Parameters that never had a gradient (text branch of the last block) have no moments.
        """
        moments = self._optimizer.state_dict()["state"]
        flat = {f"adam.{at}.{name}": value.clone() for at, state in moments.items() for name, value in state.items()}
        return flat | {f"ema.{name}": value.clone() for name, value in (self._ema or {}).items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned, in this or another process.

        Raises:
            SpotlightError: it was saved for other parameters or without the averaged weights.
        """
        parameters = self._model.parameters()
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("adam."):
                _, index, field = name.split(".")
                moments.setdefault(int(index), {})[field] = value.clone()
        for at, fields in moments.items():
            shape = tuple(parameters[at].shape) if at < len(parameters) else None
            if tuple(fields["exp_avg"].shape) != shape:
                raise SpotlightError(
                    f"optimizer state: parameter {at} was saved with shape {tuple(fields['exp_avg'].shape)} and the "
                    f"model has {shape or f'only {len(parameters)} parameters'}: resume with the model and "
                    "train.lora_rank of the run that wrote it"
                )
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if self._ema is not None:
            saved = {name.removeprefix("ema."): value for name, value in state.items() if name.startswith("ema.")}
            if saved.keys() != self._ema.keys():
                raise SpotlightError(
                    f"optimizer state: {len(saved)} averaged weights were saved and train.ema_decay = "
                    f"{self._settings.ema_decay} needs {len(self._ema)}: resume with the settings of the run that "
                    "wrote it"
                )
            self._ema = {name: value.to(self._ema[name].device, copy=True) for name, value in saved.items()}

    def ema(self) -> dict[str, Tensor] | None:
        """The averaged weights, float32, named as `Model.trainable`; None where the average is off."""
        return None if self._ema is None else dict(self._ema)

    def _objective(self, batch: TrainingBatch, iteration: int) -> Objective:
        if self._settings.algorithm == "nft":
            return _Nft(self._model, self._settings, batch, seed=self._seed, iteration=iteration)
        return _Grpo(self._model, self._settings, batch, iteration=iteration)

    def _split(self, samples: int, slots: int, iteration: int) -> list[list[Rows]]:
        """The micro-batches of each update: samples in shuffled order, split evenly."""
        updates, micro_batch = self._settings.updates, self._settings.micro_batch
        if samples < updates:
            raise SpotlightError(
                f"iteration {iteration}: train.updates = {updates} and there are {samples} samples: "
                "every update needs one; lower train.updates"
            )
        order = _stream(self._seed, iteration).permutation(samples).tolist()
        edges = [samples * update // updates for update in range(updates + 1)]
        return [
            [
                Rows(samples=tuple(order[first : min(first + micro_batch, end)]), slot=slot)
                for slot in range(slots)
                for first in range(start, end, micro_batch)
            ]
            for start, end in pairwise(edges)
        ]

    def _backward(self, objective: Objective, parts: Sequence[Rows], total: int) -> float:
        """Add the gradient of the mean over ``total`` rows, of which these are some; returns their share of it."""
        loss_sum = 0.0
        for rows in parts:
            loss = objective.loss(rows) * (len(rows.samples) / total)
            loss.backward()
            loss_sum += loss.item()
        return loss_sum

    def _step(self, loss: float, where: str) -> float:
        """One optimizer step with the gradient that is there; returns its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm).item()
        if not math.isfinite(norm):
            raise SpotlightError(
                f"{where}: the gradient's norm is {norm} (loss {loss}), so the weights were left as they are: "
                'lower train.learning_rate, or set model.dtype = "float32"'
            )
        self._optimizer.step()
        if self._ema is not None:
            live, decay = self._model.trainable(), self._settings.ema_decay
            self._ema = {name: old.lerp(live[name].float(), 1 - decay) for name, old in self._ema.items()}
        return norm


def _merged(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Metrics of all samples from those of the parts: of a largest value the largest, else the mean over samples."""
    total = sum(samples for samples, _ in parts)
    return {
        name: max(metrics[name] for _, metrics in parts)
        if name.endswith("_max")
        else sum(samples * metrics[name] for samples, metrics in parts) / total
        for name in parts[0][1]
    }


class _Nft:
    """DiffusionNFT on noise levels drawn anew for every sample.

    Levels are uniform in (0, 1], as in the flow's own training, so that the weights suit samplers of any number of
    steps: exploration may use fewer than a rollout.
    """

    def __init__(
        self, model: Model, settings: TrainSection, batch: TrainingBatch, *, seed: int, iteration: int
    ) -> None:
        self.slots = settings.timesteps
        self._model, self._settings, self._batch = model, settings, batch
        self._key = (seed, iteration)
        self._v_old: dict[Rows, Tensor] = {}
        self._kl = _Mean()

    @torch.no_grad()
    def remember(self, updates: Sequence[Sequence[Rows]]) -> None:
        # The first update trains the very policy that sampled, so its velocities need no second forward pass.
        for rows in (rows for parts in updates[1:] for rows in parts):
            x_RNC, sigma_R = self._noised(rows)
            self._v_old[rows] = _velocity(self._model, self._batch, x_RNC, sigma_R, rows)

    def loss(self, rows: Rows) -> Tensor:
        settings, batch = self._settings, self._batch
        x_RNC, sigma_R = self._noised(rows)
        v_ref_RNC = _reference_velocity(self._model, batch, x_RNC, sigma_R, rows) if settings.kl else None
        v_RNC = _velocity(self._model, batch, x_RNC, sigma_R, rows)
        loss = nft_loss(
            v_RNC,
            self._v_old.get(rows, v_RNC),
            x_RNC,
            _take(batch.clean_BNC, rows, self._model),
            sigma_R,
            _advantages(batch, rows, self._model),
            beta=settings.nft_beta,
            advantage_clip=settings.advantage_clip,
        )
        if v_ref_RNC is None:
            return loss
        return loss + settings.kl * self._kl.add((v_RNC - v_ref_RNC).square().mean(), len(rows.samples))

    def metrics(self) -> dict[str, float]:
        return {"kl": self._kl.value()} if self._settings.kl else {}

    def _noised(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The rows' clean samples at their drawn noise levels, and the levels."""
        clean_RNC = _take(self._batch.clean_BNC, rows, self._model)
        noise = np.empty(tuple(clean_RNC.shape), dtype=np.float32)
        sigma = np.empty(len(rows.samples), dtype=np.float32)
        for row, sample in enumerate(rows.samples):
            stream = _stream(*self._key, sample=self._batch.first + sample, slot=rows.slot)
            sigma[row] = 1 - stream.random()
            stream.standard_normal(out=noise[row], dtype=np.float32)
        noise_RNC = torch.from_numpy(noise).to(clean_RNC.device)
        sigma_R = torch.from_numpy(sigma).to(clean_RNC.device)
        return clean_RNC.lerp(noise_RNC, sigma_R.view(-1, 1, 1)), sigma_R


class _Grpo:
    """Flow-GRPO on the stochastic steps that the samples were made with."""

    def __init__(self, model: Model, settings: TrainSection, batch: TrainingBatch, *, iteration: int) -> None:
        start, end = batch.sde_window
        if batch.window_BKNC is None or batch.sampler == "ode":
            raise SpotlightError(
                f'train.algorithm = "grpo" trains on the stochastic steps of a rollout, and sampler "{batch.sampler}" '
                'left none: set rollout.sampler to "sde", "cps" or "dance"'
            )
        assert batch.window_BKNC.shape[1] == end - start + 1, f"{batch.window_BKNC.shape} for window {batch.sde_window}"
        self.slots = end - start
        self._model, self._settings, self._batch = model, settings, batch
        self._window_BKNC, self._kind = batch.window_BKNC, batch.sampler
        self._iteration = iteration
        self._old_BS = torch.empty(len(batch.advantages_B), self.slots)
        self._diagnosis: dict[str, float] = {}
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._kl = _Mean()

    @torch.no_grad()
    def remember(self, updates: Sequence[Sequence[Rows]]) -> None:
        # Micro-batch by micro-batch as in `loss`: the same shapes give the same bits, and a first ratio of exactly 1.
        for rows in (rows for parts in updates for rows in parts):
            log_prob_R, _, _ = self._judge(rows, _velocity)
            self._old_BS[list(rows.samples), rows.slot] = log_prob_R.cpu()
        if self._batch.log_prob_BS is not None:
            self._diagnosis = self._compare(self._batch.log_prob_BS.cpu())

    def loss(self, rows: Rows) -> Tensor:
        settings = self._settings
        reference = self._judge(rows, _reference_velocity) if settings.kl else None
        log_prob_R, mean_RNC, std = self._judge(rows, _velocity)
        old_R = self._old_BS[list(rows.samples), rows.slot].to(log_prob_R.device)
        limit = settings.advantage_clip
        advantages_R = _advantages(self._batch, rows, self._model).clamp(-limit, limit)
        loss, _ = clipped_objective(log_prob_R, old_R, advantages_R, clip_range=settings.clip_range)
        self._seen.append((log_prob_R.detach(), old_R, advantages_R))
        if reference is None:
            return loss
        divergence = gaussian_kl(mean_RNC, reference[1], std).mean()
        return loss + settings.kl * self._kl.add(divergence, len(rows.samples))

    def metrics(self) -> dict[str, float]:
        log_prob, old, advantages = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        _, metrics = clipped_objective(log_prob, old, advantages, clip_range=self._settings.clip_range)
        return metrics | self._diagnosis | ({"kl": self._kl.value()} if self._settings.kl else {})

    def _judge(self, rows: Rows, velocity: Velocity) -> tuple[Tensor, Tensor, float]:
        """Log-probability, mean and noise of the step that each row's sample really took."""
        sigmas, step = self._batch.sigmas, self._batch.sde_window[0] + rows.slot
        x_RNC = _take(self._window_BKNC[:, rows.slot], rows, self._model)
        sigma_R = torch.full((len(rows.samples),), sigmas[step], device=x_RNC.device)
        _, log_prob_R, mean_RNC, std = sde_step(
            x_RNC,
            velocity(self._model, self._batch, x_RNC, sigma_R, rows),
            sigmas[step],
            sigmas[step + 1],
            noise_level=self._batch.noise_level,
            kind=self._kind,
            sigma_cap=sigmas[1],
            x_next_BNC=_take(self._window_BKNC[:, rows.slot + 1], rows, self._model),
        )
        return log_prob_R, mean_RNC, std

    def _compare(self, worker_BS: Tensor) -> dict[str, float]:
        """How far the trainer's log-probabilities are from the workers'; too far is an error."""
        delta_BS = self._old_BS - worker_BS
        off_BS = torch.expm1(delta_BS).abs()
        off_BS = torch.where(off_BS.isnan(), math.inf, off_BS)
        if off_BS.max() > self._settings.ratio_tolerance:
            sample, slot = divmod(int(off_BS.argmax()), self.slots)
            here, there = self._old_BS[sample, slot].item(), worker_BS[sample, slot].item()
            raise SpotlightError(
                f"iteration {self._iteration}: before the first update the trainer's policy is not the one that "
                f"sampled. |ratio - 1| reaches {off_BS.max().item():.3g} (sample {self._batch.first + sample}, step "
                f"{self._batch.sde_window[0] + slot}: log-probability {here:.7g} on the trainer, {there:.7g} from the "
                f"worker) and train.ratio_tolerance is {self._settings.ratio_tolerance:g}. Likely causes: the worker "
                "held another weights version; guidance passes batched in one path and separate in the other; another "
                "dtype, attention backend or text padding on the worker. Make worker and trainer alike, or raise "
                "train.ratio_tolerance if the difference is rounding"
            )
        return {"log_prob_delta": delta_BS.abs().mean().item(), "log_prob_delta_max": delta_BS.abs().max().item()}


class _Mean:
    """A mean over rows that arrive in micro-batches."""

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def add(self, mean: Tensor, rows: int) -> Tensor:
        """Count a micro-batch's mean, and hand it on."""
        self._sum += mean.item() * rows
        self._rows += rows
        return mean

    def value(self) -> float:
        return self._sum / self._rows


Velocity = Callable[[Model, TrainingBatch, Tensor, Tensor, Rows], Tensor]


def _velocity(model: Model, batch: TrainingBatch, x_RNC: Tensor, sigma_R: Tensor, rows: Rows) -> Tensor:
    """The model's velocity for the rows' prompts: the one train path, for old and new policy alike."""
    return model.velocity(
        x_RNC,
        sigma_R,
        batch.conditioning.rows(rows.samples),
        height_px=batch.height_px,
        width_px=batch.width_px,
        guidance=batch.guidance,
    )


def _reference_velocity(model: Model, batch: TrainingBatch, x_RNC: Tensor, sigma_R: Tensor, rows: Rows) -> Tensor:
    """The same of the policy that training started from.

    Ask before the pass that trains: without a LoRA the weights are swapped in place, which a pending backward forbids.
    """
    with torch.no_grad(), model.reference():
        return _velocity(model, batch, x_RNC, sigma_R, rows)


def _take(x_BNC: Tensor, rows: Rows, model: Model) -> Tensor:
    return x_BNC[list(rows.samples)].to(model.device)


def _advantages(batch: TrainingBatch, rows: Rows, model: Model) -> Tensor:
    return torch.from_numpy(batch.advantages_B[list(rows.samples)]).float().to(model.device)


def _stream(seed: int, iteration: int, *, sample: int | None = None, slot: int = 0) -> np.random.Generator:
    """What an iteration draws for its order (no sample named), or for one row.

    The counter's last word sets training apart from `flow`'s noise, which may have the same key.
    """
    counter = [0, slot, 0 if sample is None else sample + 1, 1]
    key = np.array([seed, iteration], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)))
