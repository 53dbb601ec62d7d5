"""Draws images of a prompt with a run's trained weights, and beside them the same noise without: does not train."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from spotlight.config import STEPS_MAX, Config
from spotlight.files import is_text, shown
from spotlight.files import whole as whole_number
from spotlight.records import SpotlightError, WeightsRef
from spotlight.rl import flow, models
from spotlight.store import weights
from spotlight.store.rundir import RunDir
from spotlight.store.versions import versions_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""Image formats that are written, by the file's ending."""
GAP_PX = 4
"""Gap between the images of a sheet."""


def sample(
    run_dir: str | Path,
    prompt: str,
    to: str | Path,
    *,
    seeds: Sequence[int],
    steps: int = 0,
    version: int | None = None,
) -> Path:
    """Write one sheet of images: the upper row as the run began, the lower with what it trained.

    Args:
        run_dir: of a finished or stopped run; nothing in it is changed.
        to: an image file; if it is there, it is replaced.
        seeds: one column each.
        steps: 0 for as many as a validation has.
        version: of the weights; the latest if not given.

    Raises:
        SpotlightError: no such run or version, the prompt cannot be encoded, or the image cannot be written.
    """
    to = Path(to)
    seeds, steps = _check(prompt, to, seeds, steps)
    run = open_trained(run_dir)
    settings, ref = run.config(), find_version(run.url, version)
    _write(Image.new("RGB", (1, 1)), to, keep=False)  # find out before drawing whether it can be written
    model = models.load(settings.model)
    model.preload([prompt])
    train = settings.train
    model.make_trainable(rank=train.lora_rank, alpha=train.lora_alpha, seed=settings.run.seed, reference=False)
    if train.lora_path:
        model.load_trainable(weights.load(run.url, find_version(run.url, 0)))
    rows = [draw(model, settings, prompt, seeds, steps)]
    model.load_trainable(weights.load(run.url, ref, weights.PARTS[settings.validation_policy]))
    rows.append(draw(model, settings, prompt, seeds, steps))
    _write(Image.fromarray(sheet(rows)), to)
    return to


def open_trained(run_dir: str | Path) -> RunDir:
    """A run that has weights.

    Raises:
        SpotlightError: there is no such run, or it was simulated with modelled learning.
    """
    run = RunDir.open(run_dir)
    if run.simulated == "modelled":
        raise SpotlightError(
            f"{run.url}: learning was modelled in this simulated run, so it has no weights: run its settings, or "
            "simulate them with --learning real"
        )
    return run


def _check(prompt: str, to: Path, seeds: Sequence[int], steps: int) -> tuple[list[int], int]:
    """Check the arguments before anything is opened; returns the seeds and the steps as numbers."""
    if not isinstance(prompt, str):
        raise SpotlightError(f"prompt = {shown(prompt)}: give a text")
    if not is_text(prompt):
        raise SpotlightError(f"prompt = {shown(prompt)}: is not Unicode, such as half an emoji; give it in UTF-8")
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise SpotlightError(f"seeds = {shown(seeds)}: give several numbers, such as [1, 2, 3]")
    seeds, steps = [whole_number(seed, "seeds") for seed in seeds], whole_number(steps, "steps")
    if to.suffix.lower() not in SUFFIXES or to.is_dir():
        raise SpotlightError(f"{to}: expected the name of an image file that ends in {', '.join(SUFFIXES)}")
    if not seeds:
        raise SpotlightError("no seeds: expected one for each column")
    if wrong := [seed for seed in seeds if not 0 <= seed < 2**64]:
        raise SpotlightError(f"seeds {wrong}: expected numbers from 0 to 2^64 - 1")
    if not 0 <= steps <= STEPS_MAX:
        raise SpotlightError(
            f"steps {steps}: expected a number from 1 to {STEPS_MAX}, or 0 for as many as a validation has"
        )
    return seeds, steps


def _write(image: Image.Image, to: Path, *, keep: bool = True) -> None:
    """Write the file atomically; without ``keep``, only check that it could be written."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as directory:
            made = Path(directory) / to.name
            image.save(made)
            if keep:
                made.replace(to)
    except (OSError, ValueError) as error:  # Pillow's, of a sheet that is too large for the format
        raise SpotlightError(f"{to}: cannot be written ({error}): choose another place, or a name in .png") from None


@torch.no_grad()
def draw(model: models.Model, settings: Config, prompt: str, seeds: Sequence[int], steps: int) -> NDArray[np.uint8]:
    """One image a seed, (B, height, width, 3), by a deterministic sampler; each is drawn by itself."""
    height_px, width_px = settings.model.height_px, settings.model.width_px
    sigmas = model.sigmas(steps or settings.run.validation_steps or settings.rollout.steps, height_px, width_px)
    text = model.encode([prompt])
    images = []
    for seed in seeds:
        x_BNC = flow.initial_noise([seed], *model.latent_shape(height_px, width_px)).to(model.device)
        for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
            sigma_B = torch.full((1,), sigma, device=model.device)
            guidance = settings.rollout.guidance
            v_BNC = model.velocity(x_BNC, sigma_B, text, height_px=height_px, width_px=width_px, guidance=guidance)
            x_BNC = flow.ode_step(x_BNC, v_BNC, sigma, sigma_next)
        images.append(model.decode(x_BNC, height_px, width_px))
    return np.concatenate(images)


def sheet(rows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Rows of images (B, height, width, 3) as one, on white."""
    _, height, width, channels = rows[0].shape
    count = max(map(len, rows))
    whole = np.full(
        (len(rows) * (height + GAP_PX) - GAP_PX, count * (width + GAP_PX) - GAP_PX, channels), 255, dtype=np.uint8
    )
    for r, images in enumerate(rows):
        for c, image in enumerate(images):
            top, left = r * (height + GAP_PX), c * (width + GAP_PX)
            whole[top : top + height, left : left + width] = image
    return whole


def find_version(run_dir: str, version: int | None) -> WeightsRef:
    """A published version; the latest if none is named.

    Raises:
        SpotlightError: there is none, or not that one; the text says which there are.
    """
    if version is not None:
        version = whole_number(version, "version")
    found = weights.latest(run_dir) if version is None else weights.published(run_dir, version)
    if found is not None:
        return found.weights
    there = ", ".join(map(str, versions_of(run_dir).numbers()))
    if not there:
        raise SpotlightError(f"{run_dir}: no weights were published yet; let the run finish an iteration")
    raise SpotlightError(f"{run_dir}: has no weights version {version}; it has {there}")
