"""Builds the values that many tests start from; every field has a default and can be named."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.records import Gradient, Prompt, Request, Surplus, WeightsRef


def make_request(**overrides: Any) -> Request:
    """A request of 2 seeds and 4 steps, steps 1 and 2 of them stochastic.

    Args:
        overrides: fields of `Request`; ``steps`` stands for that many evenly spaced ``sigmas``, and
            ``prompt_id`` and ``version`` for a prompt and weights that differ in nothing else.
    """
    steps = overrides.pop("steps", 4)
    prompt_id = overrides.pop("prompt_id", 7)
    version = overrides.pop("version", 0)
    fields: dict[str, Any] = {
        "run": "test",
        "iteration": 0,
        "purpose": "rollout",
        "prompt": Prompt(id=prompt_id, text=f'a sign that says "{prompt_id:02d}"'),
        "seeds": (11, 12),
        "sampler": "sde",
        "sigmas": tuple(1 - step / steps for step in range(steps + 1)),
        "sde_window": (1, min(3, steps)),
        "noise_level": 0.7,
        "guidance": 1.0,
        "height_px": 16,
        "width_px": 32,
        "weights": WeightsRef(version=version, sha256=f"{version:064x}"),
    }
    unknown = overrides.keys() - fields.keys()
    assert not unknown, f"Request has no {sorted(unknown)}; it has {sorted(fields)}"
    return Request(**{**fields, **overrides})


def answer(found: Gradient | Surplus) -> Gradient:
    """What the first rank of a gang, or a worker alone, answers."""
    assert isinstance(found, Gradient)
    return found


def make_latents(request: Request, step: int, *, tokens: int = 3, channels: int = 2) -> NDArray[np.float32]:
    """Stand-in for denoising, shape (B, tokens, channels): a pure function of request and step, as latents are."""
    generator = np.random.default_rng([request.prompt.id, *request.seeds, step])
    return generator.standard_normal((len(request.seeds), tokens, channels), dtype=np.float32)
