"""A device's verbs as values, so that they can go to an engine in another process; they decide and do nothing."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from spotlight.device.protocol import Device, Prepared
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

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """One verb of `Device` with its arguments."""

    verb: ClassVar[str]

    def on(self, device: Device, run_dir: str) -> T_co:
        """Run it on a device."""
        ...


@record
class PrepareCall:
    verb: ClassVar[str] = "prepare"

    def on(self, device: Device, run_dir: str) -> Prepared:
        return device.prepare(run_dir)


@record
class RolloutCall:
    verb: ClassVar[str] = "rollout"
    request: Request
    place: Placement

    def on(self, device: Device, run_dir: str) -> Rollout | Dropped | Surplus:
        return device.rollout(run_dir, self.request, self.place)


@record
class DecodeCall:
    verb: ClassVar[str] = "decode"
    request: Request

    def on(self, device: Device, run_dir: str) -> Dropped | None:
        return device.decode(run_dir, self.request)


@record
class ScoreCall:
    verb: ClassVar[str] = "score"
    request: Request

    def on(self, device: Device, run_dir: str) -> Scored | Dropped:
        return device.score(run_dir, self.request)


@record
class ImagesCall:
    verb: ClassVar[str] = "images"
    request: Request

    def on(self, device: Device, run_dir: str) -> NDArray[np.uint8]:
        return device.images(run_dir, self.request)


@record
class GradientCall:
    verb: ClassVar[str] = "gradient"
    part: GradientPart
    place: Placement

    def on(self, device: Device, run_dir: str) -> Gradient | Surplus:
        return device.gradient(run_dir, self.part, self.place)


@record
class UpdateCall:
    verb: ClassVar[str] = "update"
    weights: WeightsRef
    gradients: tuple[tuple[Gradient, ...], ...]
    terms: tuple[tuple[Gradient, ...], ...]
    iteration: int
    after: str

    def on(self, device: Device, run_dir: str) -> Updated:
        return device.update(run_dir, self.weights, self.gradients, self.terms, self.iteration, self.after)
