"""Computes the gradient of one part of an update; knows no optimizer, no files, no Dask.

A gradient is a pure function of the weights, the part's samples and what is drawn for them: the same bits wherever it
is computed, on machines that compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field

import torch
from torch import Tensor

from spotlight.config import TrainSection
from spotlight.records import record
from spotlight.rl.algorithms import Rows, TrainingBatch, objective
from spotlight.rl.models.base import Model

Tensors = Mapping[str, Tensor]
"""{number of the parameter, as text: tensor}; parameters without a gradient are absent."""
FLOAT16_SCALE = 2.0**10
"""What losses are multiplied by on their way back through a float16 network, and gradients divided by: the mean over a
part's rows and elements would be below the smallest number there is. Measured: 2^6 to 2^14 lose nothing."""

ADVANTAGE_MAX = "advantage_max"
"""Name of the metric that says how far a part's samples are from their groups."""


@record
class PartGradient:
    """What a part adds to its update."""

    rows: int = 0
    loss: float = 0.0
    """Mean over the rows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    """The gradient of the sum of the rows' losses, float32."""


def part_gradient(
    model: Model,
    settings: TrainSection,
    batch: TrainingBatch,
    *,
    seed: int,
    iteration: int,
    old: Sequence[Tensor] | None,
    current: Tensors | None = None,
    on_pass: Callable[[], object] = lambda: None,
) -> PartGradient:
    """The gradient of a part's samples.

    Args:
        model: holds the weights that the iteration starts from; afterwards, those that the gradient was computed with.
        seed: the run's.
        old: of the policy that sampled, in the order of `Model.parameters`; None where that is the one in training.
        current: the weights that the previous update left, named as `Model.trainable`; None in the first.
        on_pass: is called before each micro-batch, also of the policy that the iteration starts from.

    Raises:
        SpotlightError: (Flow-GRPO) the model's policy is not the one that sampled.
    """
    goal = objective(model, settings, batch, seed=seed, iteration=iteration, old=old)
    if not goal.units:  # no pair of samples differs
        return PartGradient()
    rows = micro_batches(goal.units, goal.slots, settings.micro_batch, mixed=not settings.is_stepwise)

    def beaten() -> Iterator[Rows]:
        for each in rows:
            on_pass()
            yield each

    goal.remember(beaten(), first=current is None)
    if current is not None:
        model.load_trainable(current)
    total, loss_sum = goal.units * goal.slots, 0.0
    divisor = 1 / FLOAT16_SCALE if model.dtype == torch.float16 else total
    _clear_gradients(model)
    try:
        for each in beaten():
            loss = goal.loss(each) * (len(each.samples) / divisor)
            loss.backward()
            loss_sum += loss.item() * (divisor / total)
        tensors = {str(at): p.grad.float() * divisor for at, p in enumerate(model.parameters()) if p.grad is not None}
    finally:
        _clear_gradients(model)
    metrics = {**goal.metrics(), ADVANTAGE_MAX: float(abs(batch.advantages_B).max())}
    return PartGradient(rows=total, loss=loss_sum, metrics=metrics, tensors=tensors)


def rows_to_learn_from(settings: TrainSection, parts: Sequence[tuple[int, Mapping[str, float]]]) -> int:
    """Rows of an update; 0 where no sample was better than another and there is no KL term, so that no step is taken.

    The gradient is then rounding alone, of which AdamW would make a step of full size. In DiffusionNFT with an old
    policy it is a pull towards that one, which is left out, too.

    Args:
        parts: ``(rows, metrics)`` of each.
    """
    if not settings.kl and all(metrics.get(ADVANTAGE_MAX) == 0 for rows, metrics in parts if rows):
        return 0
    return sum(rows for rows, _ in parts)


def _clear_gradients(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def micro_batches(units: int, slots: int, size: int, *, mixed: bool) -> list[Rows]:
    """All slots of all units, in forward passes of ``size`` rows.

    Args:
        mixed: rows of several slots share a pass.
    """
    rows = [(unit, slot) for slot in range(slots) for unit in range(units)]
    runs = [rows] if mixed else [rows[slot * units : (slot + 1) * units] for slot in range(slots)]
    batches = [run[first : first + size] for run in runs for first in range(0, len(run), size)]
    return [Rows(samples=tuple(unit for unit, _ in each), slots=tuple(slot for _, slot in each)) for each in batches]


def merged(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Metrics of all rows from those of the parts: the mean over rows, unless the name ends otherwise.

    ``_max`` is the largest, ``_pairs`` the sum, and ``_std`` the standard deviation of all rows together.

    Args:
        parts: ``(rows, metrics)`` of each; those without rows have no metrics.
    """
    known = [(rows, metrics) for rows, metrics in parts if rows]
    total = sum(rows for rows, _ in known)

    def mean(name: str, power: int = 1) -> float:
        return sum(rows * metrics[name] ** power for rows, metrics in known) / total

    found: dict[str, float] = {}
    for name in known[0][1] if known else ():
        if name.endswith("_max"):
            found[name] = max(metrics[name] for _, metrics in known)
        elif name.endswith("_pairs"):
            found[name] = sum(metrics[name] for _, metrics in known)
        elif name.endswith("_std"):
            means = name.removesuffix("_std") + "_mean"
            found[name] = max(0.0, mean(name, 2) + mean(means, 2) - mean(means) ** 2) ** 0.5
        else:
            found[name] = mean(name)
    return found
