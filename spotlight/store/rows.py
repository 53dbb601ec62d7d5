"""The journals and records of a run directory: their names, and what their lines hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from spotlight.records import record

HISTORY = "history.jsonl"
VALIDATION = "validation.jsonl"
SPANS = "spans.jsonl"
WORKERS = "workers.jsonl"
EVENTS = "events.jsonl"
"""What happened to gangs and workers, in order."""
DECISIONS = "decisions.jsonl"
"""Decisions, with what they were made from; see `spotlight.plan.replay`."""
ASIDE = "quarantined"
"""Requests that were set aside, one in each file: no worker runs them any more."""
QUARANTINED = "quarantined.jsonl"
"""The same in older runs."""
PROMPTS = "prompts.json"
"""The hashes of the prompts that the run began with, which are in ``prompts/``: a `PromptHashes`."""
MODEL = "model.json"
"""The `ModelHash` of a run whose model comes from a path."""
SUMMARY = "summary.json"
SIMULATED = "simulated.json"
"""Only in the directory of a simulated run: a `Simulated`."""

FOLDERS = (
    *("beliefs", "images", "latents", "offload", "prices", "prompts"),
    *(ASIDE, "selections", "updates", "weights"),
)
OF_TRACKERS = ("wandb",)
"""Folders that a tracker fills, with links that lead out of the run; nothing in them is read."""
JOURNALS = (HISTORY, VALIDATION, SPANS, WORKERS, EVENTS, DECISIONS, QUARANTINED)
STARTED = "started.json"
"""A `Started`, which tells a run from others of its name. At a URL it is written first, so that a name has one run; in
a directory it is there only if latents, or what a tracker is told, are kept elsewhere."""


@record
class Simulated:
    """Marks a run as simulated."""

    learning: Literal["modelled", "real"]
    """Whether rewards come from a model of learning, or from the real model."""
    strategy: str = ""
    """The strategy that it was compared as; empty in older runs."""


@record
class Started:
    """A run's identity."""

    by: str
    """Digits that no other run has."""
    latents: str = ""
    """Name of its folder below ``latents.url``, and for trackers; empty in older runs, of which both have the run's
    name."""


@record
class PromptHashes:
    """Hashes of the run's copies of its prompt files."""

    train_sha256: str
    validation_sha256: str


@record
class ModelHash:
    """Tells the weights that a run began with from others."""

    sha256: str
    """Of samples: `spotlight.rl.checkpoints.fingerprint`."""


@record
class HistoryRow:
    """A finished iteration: a line of ``history.jsonl``."""

    iteration: int
    weights_version: int
    """The version that the iteration ended with."""
    weights_sha256: str
    metrics: Mapping[str, float]
    """Values that do not depend on when or where work ran."""
    measured: Mapping[str, float]
    """Values that do: seconds, dollars and counts."""
    explored_next: bool | None = None
    """Whether seeds of the next iteration were explored beside it; None in rows of older versions."""


@record
class ValidationRow:
    """How good a weights version was: a line of ``validation.jsonl``."""

    version: int
    score: float
    """Mean of the rewards that are known."""
    rewards: tuple[float | None, ...]
    images: str
    """Path of an .npz inside the run directory."""
    at_s: float
    """Unix time."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further means: of each of several rewards, and over the prompts of each tag (``tag_counting`` of GenEval's)."""


@record
class Summary:
    """A finished run in a few numbers: ``summary.json``."""

    score_before: float
    score_after: float
    iterations: int
    wall_s: float
    usd: float
    usd_wasted: float
    usd_reserved_only: float
    preemptions: int
    first_image_s: float | None
