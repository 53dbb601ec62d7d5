"""What every device can do, and which one does this process's work; it does none of it itself.

A task asks `current()`. It never knows whether that is an engine in this process, one in a process of its own, or
a model of one. Nothing here imports torch or Dask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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

ALONE = Placement(gang="", epoch=0, rank=0, width=1)
"""The placement of a request that nobody placed: it belongs to no gang."""


@record
class Prepared:
    """What all requests of a run need to know of its model."""

    sigmas: tuple[float, ...]
    """Noise levels of rollouts."""
    explore_sigmas: tuple[float, ...]
    validation_sigmas: tuple[float, ...]
    start: WeightsRef
    """Version 0, which is published."""


class Device(Protocol):
    """Does a task's work: an engine here, in a process of its own, or modelled.

    Every verb is safe to run twice, anywhere: what is done already is found, not done again.
    """

    def prepare(self, run_dir: str) -> Prepared:
        """Load the model, publish version 0, and work out the noise levels.

        Raises:
            SpotlightError: the model cannot draw this size, or cannot be split as the settings want.
        """
        ...

    def rollout(self, run_dir: str, request: Request, place: Placement = ALONE) -> Rollout | Dropped | Surplus:
        """Denoise a request, committing its steps.

        Args:
            place: this device's part in the gang that runs it.

        Returns:
            From the first rank a `Rollout`, from the others a `Surplus`.

        Raises:
            Stopped: the run is being stopped; what was committed stays.
            SpotlightError: it does not fit the device's memory.
        """
        ...

    def decode(self, run_dir: str, request: Request) -> Dropped | None:
        """Decode the images of a finished request, and keep them for whoever scores them elsewhere."""
        ...

    def score(self, run_dir: str, request: Request) -> Scored | Dropped:
        """Rewards of a finished request."""
        ...

    def has_scores(self, run_dir: str, request: Request) -> bool:
        """Whether the rewards of a request are kept, so that `score` only finds them."""
        ...

    def images(self, run_dir: str, request: Request) -> NDArray[np.uint8]:
        """The images of a finished request, shape (B, height, width, 3)."""
        ...

    def gradient(self, run_dir: str, part: GradientPart, place: Placement = ALONE) -> Gradient | Surplus:
        """Compute the gradient of a part of an update, and keep it.

        Args:
            place: this device's part in the gang that shares the passes.

        Returns:
            From the first rank a `Gradient`, from the others a `Surplus`.
        """
        ...

    def has_gradient(self, run_dir: str, part: GradientPart) -> bool:
        """Whether the gradient of a part is kept, so that `gradient` only finds it."""
        ...

    def update(
        self,
        run_dir: str,
        weights: WeightsRef,
        gradients: tuple[tuple[Gradient, ...], ...],
        terms: tuple[tuple[Gradient, ...], ...],
        iteration: int,
        after: str = "",
    ) -> Updated:
        """Take an optimizer step; after an iteration's last, stage the version after ``weights``.

        Args:
            weights: the version that the iteration starts from.
            gradients: for each update of the iteration up to this one, what its parts measured, in order.
            terms: for each of these updates, the tensors to add: its parts' gradients, or the slices of their sum. A
                device that did not take the earlier steps takes them, too.
            after: hash of the weights that the previous update left; empty in the first.
        """
        ...


_device: Device | None = None


def install(device: Device) -> None:
    """From now on, this device does all of this process's work."""
    global _device
    _device = device


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Have this process's work done by another device for a while."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def current() -> Device:
    """What does this process's work: an engine in it, where nothing else was installed."""
    if _device is None:
        from spotlight.device.engine import InProcess

        install(InProcess())
    assert _device
    return _device
