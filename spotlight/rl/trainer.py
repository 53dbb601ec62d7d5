"""Makes one iteration's weights from its samples: gradient accumulation, optimizer, old policy and averaged weights.

Knows torch and `Model`, but no Dask and no files. All that is drawn depends on (seed, iteration, sample) alone, so an
iteration that is repeated on another machine, or after a resume, makes the same weights. Metrics hold no seconds.
What is computed from samples is in `spotlight.rl.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import SpotlightError
from spotlight.rl.algorithms import Objective, Rows, TrainingBatch, objective
from spotlight.rl.algorithms.base import stream
from spotlight.rl.models.base import Model

DECAY_LINEAR, DECAY_LINEAR_MAX = 0.001, 0.5
"""Of the old policy: growth per update, and its end. NVlabs/DiffusionNFT, ``decay_type = 1`` (GenEval)."""
DECAY_DELAYED, DECAY_DELAYED_MAX, DECAY_DELAY = 0.0075, 0.999, 75
"""As above, after so many updates. NVlabs/DiffusionNFT, ``decay_type = 2`` (OCR, and several rewards)."""


def old_decay(kind: str | float, updates: int) -> float:
    """How much of the old policy stays after so many updates: ``old <- d old + (1 - d) trained``.

    Args:
        kind: ``train.old_decay``: "copy" is ``d = 0``, "linear" ``d = min(0.001 updates, 0.5)``, "delayed" 0 before
            update 75 and then ``d = min(0.0075 (updates - 75), 0.999)``; a number is d.

    Source: DiffusionNFT (arXiv 2509.16117), the form of its published code.
    """
    match kind:
        case "copy":
            return 0.0
        case "linear":
            return min(DECAY_LINEAR * updates, DECAY_LINEAR_MAX)
        case "delayed":
            return min(DECAY_DELAYED * max(0, updates - DECAY_DELAY), DECAY_DELAYED_MAX)
        case _:
            return float(kind)


class Trainer:
    """Owns what outlives an iteration besides the weights: the optimizer's moments, the old policy, the averages.

    The old policy is the one that samples. It follows the one in training at the end of each iteration, and stays as it
    is during one.
    """

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
        self._old = [p.detach().clone() for p in model.parameters()] if settings.keeps_old else None
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
        goal = self._objective(batch, iteration)
        if not goal.units:  # no pair of samples differs: there is nothing to learn
            self._follow(iteration)
            return {"loss": 0.0, "grad_norm": 0.0}
        updates = self._split(goal.units, goal.slots, iteration)
        goal.remember(updates)
        steps = []
        for u, rows in enumerate(updates):
            self._optimizer.zero_grad()
            loss = self._backward(goal, rows, sum(len(part.samples) for part in rows))
            steps.append((loss, self._step(loss, iteration, u)))
        self._follow(iteration)
        loss, norm = np.mean(steps, axis=0)
        return {"loss": float(loss), "grad_norm": float(norm), **goal.metrics()}

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
        goal = self._objective(batch, iteration)
        (rows,) = self._split(goal.units, goal.slots, iteration)
        goal.remember([rows])
        loss = self._backward(goal, rows, of * goal.slots)
        self._parts.append((samples, {"loss": loss, **goal.metrics()}))

    def finish(self, *, iteration: int) -> dict[str, float]:
        """Take the optimizer step for which all parts were accumulated; returns and raises what `update` does."""
        parts, self._parts = self._parts, []
        loss = sum(metrics["loss"] for _, metrics in parts)
        norm = self._step(loss, iteration, 0)
        self._follow(iteration)
        return _merged(parts) | {"loss": loss, "grad_norm": norm}

    def state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's moments and the averaged weights, flat, as safetensors wants them.

        Parameters that never had a gradient (text branch of the last block) have no moments.
        """
        moments = self._optimizer.state_dict()["state"]
        flat = {f"adam.{at}.{name}": value.clone() for at, state in moments.items() for name, value in state.items()}
        return flat | {f"ema.{name}": value.clone() for name, value in (self._ema or {}).items()}

    def load_state(self, state: Mapping[str, Tensor], old: Mapping[str, Tensor] | None = None) -> None:
        """Continue from what `state` and `old` returned, in this or another process.

        Raises:
            SpotlightError: it was saved for other parameters or without the averaged weights.
        """
        if self._old is not None:
            assert old is not None, "train.old_decay keeps an old policy, and every version holds it"
            with self._model.standing_in(self._old):
                self._model.load_trainable(old)
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

    def old(self) -> dict[str, Tensor] | None:
        """The policy that samples, copied, named as `Model.trainable`; None where it is the one in training."""
        if self._old is None:
            return None
        with self._model.standing_in(self._old):
            return {name: value.clone() for name, value in self._model.trainable().items()}

    def _objective(self, batch: TrainingBatch, iteration: int) -> Objective:
        return objective(self._model, self._settings, batch, seed=self._seed, iteration=iteration, old=self._old)

    def _split(self, samples: int, slots: int, iteration: int) -> list[list[Rows]]:
        """The micro-batches of each update: samples in shuffled order, split evenly."""
        updates, micro_batch = self._settings.updates, self._settings.micro_batch
        if samples < updates:
            raise SpotlightError(
                f"iteration {iteration}: train.updates = {updates} and there are {samples} samples: "
                "every update needs one; lower train.updates"
            )
        order = stream(self._seed, iteration).permutation(samples).tolist()
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

    def _step(self, loss: float, iteration: int, update: int) -> float:
        """One optimizer step with the gradient that is there; returns its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm).item()
        if not math.isfinite(norm):
            raise SpotlightError(
                f"iteration {iteration}, update {update}: the gradient's norm is {norm} (loss {loss}), so the weights "
                'were left as they are: lower train.learning_rate, or set model.dtype = "float32"'
            )
        self._warm_up(iteration * self._settings.updates + update)
        self._optimizer.step()
        if self._ema is not None:
            live, decay = self._model.trainable(), self._settings.ema_decay
            self._ema = {name: old.lerp(live[name].float(), 1 - decay) for name, old in self._ema.items()}
        return norm

    def _warm_up(self, updates: int) -> None:
        """Set the learning rate of the update after so many."""
        warm_up = self._settings.warm_up
        share = min(1.0, (updates + 1) / warm_up) if warm_up else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share

    @torch.no_grad()
    def _follow(self, iteration: int) -> None:
        """At an iteration's end, move the old policy towards the trained one."""
        decay = old_decay(self._settings.old_decay, (iteration + 1) * self._settings.updates)
        if self._old is not None:
            for old, trained in zip(self._old, self._model.parameters(), strict=True):
                old.copy_(trained.lerp(old, decay))


def _merged(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Metrics of all samples from those of the parts: of a largest value the largest, else the mean over samples."""
    total = sum(samples for samples, _ in parts)
    return {
        name: max(metrics[name] for _, metrics in parts)
        if name.endswith("_max")
        else sum(samples * metrics[name] for samples, metrics in parts) / total
        for name in parts[0][1]
    }
