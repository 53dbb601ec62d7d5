"""Makes one iteration's weights from the gradients of its parts: optimizer, old policy and averaged weights.

Knows torch and `Model`, but no Dask and no files. It draws nothing, so an iteration that is repeated on another
machine, or after a resume, makes the same weights. Metrics hold no seconds. Gradients come from
`spotlight.rl.gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import SpotlightError
from spotlight.rl.gradients import Tensors, merged
from spotlight.rl.models.base import Model
from spotlight.rl.sums import tree_sum

DECAY_LINEAR, DECAY_LINEAR_MAX = 0.001, 0.5
"""The old policy's decay: growth per update, and maximum. NVlabs/DiffusionNFT, ``decay_type = 1`` (GenEval)."""
DECAY_DELAYED, DECAY_DELAYED_MAX, DECAY_DELAY = 0.0075, 0.999, 75
"""As above, after so many updates. NVlabs/DiffusionNFT, ``decay_type = 2`` (OCR)."""


def old_decay(kind: str | float, updates: int) -> float:
    """The decay d of the old policy after so many updates, in ``old <- d old + (1 - d) trained``.

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


def averaged_share(decay: float, updates: int) -> float:
    """Weight of the old average after an update: ``min((1 + updates) / (10 + updates), decay)``.

    So the average forgets the weights that training started from within some tens of updates, whatever the decay.

    Args:
        decay: ``train.ema_decay``.
        updates: taken before.

    Source: yifan123/flow_grpo, ``ema.py``; NVlabs/DiffusionNFT has the same.
    """
    return min((1 + updates) / (10 + updates), decay)


class Trainer:
    """Owns what outlives an iteration besides the weights: the optimizer's moments, the old policy, the averages.

    The old policy is the one that samples. It follows the one in training at the end of each iteration, and stays as it
    is during one.
    """

    def __init__(self, model: Model, settings: TrainSection) -> None:
        """
        Args:
            model: already made trainable; its parameters are updated in place.
            settings: the run's.
        """
        self._model = model
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._old = [p.detach().clone() for p in model.parameters()] if settings.keeps_old else None
        self._ema = (
            {name: value.float().clone() for name, value in model.trainable().items()} if settings.ema_decay else None
        )

    def step(self, rows: int, gradients: Iterable[Tensors], *, iteration: int, update: int) -> float:
        """Take one optimizer step with the gradients of all parts of an update; returns its norm before clipping.

        Without a row in any part there is nothing to learn, and no step.

        Args:
            rows: of all parts.
            gradients: of the sums of the losses of each part, or their sum in slices, in the order of the
                parts; read one after the other.

        Raises:
            SpotlightError: the gradient is not finite; the weights are left as they were.
        """
        if not rows:
            return 0.0
        found = tree_sum(gradients)
        for at, parameter in enumerate(self._model.parameters()):
            value = found.get(str(at))
            parameter.grad = None if value is None else (value / rows).to(parameter.device, parameter.dtype)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm).item()
        if not math.isfinite(norm):
            raise SpotlightError(
                f"iteration {iteration}, update {update}: the gradient's norm is {norm}, so the weights were left as "
                'they are: set model.dtype = "float32" if it is not, and resume the run, or begin another one with a '
                "lower train.learning_rate"
            )
        self._warm_up(iteration * self._settings.updates + update)
        self._optimizer.step()
        if self._ema is not None:
            live = self._model.trainable()
            decay = averaged_share(self._settings.ema_decay, iteration * self._settings.updates + update)
            self._ema = {name: old.lerp(live[name].float(), 1 - decay) for name, old in self._ema.items()}
        return norm

    def forget_gradients(self) -> None:
        """Free the memory of the last step's gradients."""
        self._optimizer.zero_grad()

    def finish(
        self,
        updates: Sequence[Sequence[tuple[int, float, Mapping[str, float]]]],
        norms: Sequence[float],
        *,
        iteration: int,
    ) -> dict[str, float]:
        """End an iteration: move the old policy towards the trained one, and merge the metrics of the updates.

        Args:
            updates: for each, ``(rows, loss, metrics)`` of its parts.
            norms: for each, what `step` returned.

        Returns:
            ``loss``, ``grad_norm`` (before clipping; mean over the updates), and what the algorithm measures.
        """
        self._follow(iteration)
        losses = [
            sum(rows * loss for rows, loss, _ in parts) / max(1, sum(rows for rows, _, _ in parts)) for parts in updates
        ]
        found = merged([(rows, metrics) for parts in updates for rows, _, metrics in parts])
        return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms)), **found}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's moments and the averaged weights, flat, as safetensors wants them: the live ones, since a
        device may have no room for copies.

        Parameters that never had a gradient (text branch of the last block) have no moments.
        """
        moments = self._optimizer.state_dict()["state"]
        flat = {f"adam.{at}.{name}": value for at, state in moments.items() for name, value in state.items()}
        return flat | {f"ema.{name}": value for name, value in (self._ema or {}).items()}

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
        """The policy that samples, live, named as `Model.trainable`; None where it is the one in training."""
        if self._old is None:
            return None
        with self._model.standing_in(self._old):
            return self._model.trainable()

    def _warm_up(self, updates: int) -> None:
        """Set the learning rate of the next update, after so many."""
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
