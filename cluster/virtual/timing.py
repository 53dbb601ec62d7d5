"""How long the calls of a graph take, which the virtual cluster must be told: a graph is only data to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cluster.dispatch.events import WorkerPool
from spotlight.records import Pool, record


@record
class Denoising:
    """A call that denoises a request, step by step, and commits each step; or other work that a gang does together."""

    request: str
    """Names what is committed: the same whenever it is done again."""
    samples: int
    steps: int
    step_s: float | None = None
    """Seconds of each step of other work that a gang does together; None: as `Timing.step_s` says."""
    passes_to_resume: int = 0
    """Passes before its first step, each as long as a step, if it resumes after a committed step."""


@record
class Fixed:
    """A call that takes a fixed time, and is done again if it is interrupted."""

    seconds: float


class Timing(Protocol):
    """How long work takes, in seconds of the virtual clock."""

    launch_s: float
    """From when a worker gets a request until its first step begins."""
    form_s: float
    """Time for the workers of a gang to connect."""
    graph_s: float
    """Time to build and submit a graph, and to fetch its results."""
    start_up_s: float
    """From the moment that a machine is there until its worker can work."""

    def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
        """What a call does, and so how long it takes.

        Args:
            arguments: returns the call's arguments; computing them may take a while, and most calls need none.
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
    """How the worker is taken away at each end, in turn: "kill", "notice" or "hang"."""
    grace_s: float = 30.0
    """Seconds from a notice to the kill."""
    replace_after_s: float = 10.0
    """Seconds from a loss within one of ``ups`` to the next worker."""
