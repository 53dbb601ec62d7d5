"""What the virtual cluster must be told about work, since a graph is only data to it: how long its calls last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cluster.dispatch.events import WorkerPool
from spotlight.records import Pool, record


@record
class Denoising:
    """A call that denoises a request, step by step, and commits each step; or other work that a gang does together."""

    request: str
    """Names what is committed: the same for whoever does it again."""
    samples: int
    steps: int
    step_s: float | None = None
    """Of each step, where it is not what `Timing.step_s` says: of other work that a gang does together."""
    passes_to_resume: int = 0
    """Before its first step, each as long as one, if it goes on after a step that was committed."""


@record
class Fixed:
    """A call that takes so long, and is done anew if it is interrupted."""

    seconds: float


class Timing(Protocol):
    """How long work takes, in seconds of the virtual clock."""

    launch_s: float
    """From a worker's getting a request until its first step begins."""
    form_s: float
    """For the workers of a gang of several to find each other."""
    graph_s: float
    """To build and submit a graph, and to fetch what came of it."""
    start_up_s: float
    """From the moment that a machine is there until its worker can work."""

    def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
        """What a call does.

        Args:
            arguments: gives those of the call; long ones take a while, and most calls last no time whatever they are.
        """
        ...

    def step_s(self, samples: int, width: int, pool: Pool) -> float:
        """Seconds of one denoising step of a batch on a gang of so many workers of a pool."""
        ...


@record
class Stay:
    """When one worker's machine is there, and how it is taken away."""

    pool: WorkerPool
    name: str
    node: str
    ups: tuple[tuple[float, float], ...]
    """``(from_s, until_s)``, in order."""
    preemptions: tuple[str, ...] = ("kill",)
    """At each end, in turn: "kill", "notice" or "hang"."""
    grace_s: float = 30.0
    """From a notice to the kill."""
    replace_after_s: float = 10.0
    """From a loss that is not at the end of an up to the next worker."""
