"""Small pictures of an iteration's samples, kept with their rewards, for pages and notebooks.

They are data URLs, which can be shown without a file. The same images give the same text.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.records import Kept, Selection, record, request_id
from spotlight.store.rundir import RunDir

SIDE_PX = 128
"""The longest side; smaller images stay as they are."""
JPEG_FROM_PX = 64
"""Larger pictures are JPEG, some 4 kB each; PNG keeps the edges of small ones."""


@record
class Picture:
    """One sample that an iteration was trained on."""

    prompt: str
    seed: int
    explored_reward: float | None
    """What exploration scored it with stale weights; None where nothing was explored."""
    reward: float | None
    url: str = field(repr=False)
    """A data URL; empty where there is no picture."""


def validation_images(file: Path, count: int) -> tuple[NDArray[np.uint8], list[str]] | None:
    """``count`` images (B, height, width, 3) and their prompts, of one validation; None where the file cannot be read,
    or holds something else."""
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            images, texts = arrays["images"], [str(text) for text in arrays["texts"]]
    except Exception:  # a damaged archive raises a dozen kinds: of NumPy, of ZIP files, of what is compressed in them
        return None
    is_whole = images.dtype == np.uint8 and images.size and images.shape[3:] == (3,)
    return (images, texts) if is_whole and len(images) == len(texts) == count else None


def thumbnails(images_BHWC: NDArray[np.uint8]) -> list[str]:
    """A data URL of each image."""
    return [thumbnail(image_HWC) for image_HWC in images_BHWC]


def thumbnail(image_HWC: NDArray[np.uint8]) -> str:
    """A data URL of an image, with its longest side at most `SIDE_PX`."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image_HWC))
    picture.thumbnail((SIDE_PX, SIDE_PX))
    kind: dict[str, Any] = {"format": "PNG", "optimize": True}
    if max(picture.size) > JPEG_FROM_PX:
        kind = {"format": "JPEG", "quality": 80}
    file = BytesIO()
    picture.save(file, **kind)
    return f"data:image/{kind['format'].lower()};base64,{b64encode(file.getvalue()).decode()}"


def pictures(run: RunDir, selection: Selection) -> list[Picture]:
    """The samples of an iteration's kept seeds, group by group; those that are not scored yet are left out."""
    if not run.has_latents():
        return []
    from spotlight.store.latents import LatentStore  # where nothing was ever stored, nobody imports Zarr

    find = LatentStore(run.latents_url).scores_by_id(selection.iteration)
    return [picture for kept in selection.kept for picture in _of_group(find, selection.iteration, kept)]


def _of_group(find: Callable[[str], dict[str, Any] | None], iteration: int, kept: Kept) -> Iterator[Picture]:
    """Pictures of a prompt's kept seeds: of the explored samples, where these are trained on, else of the rollouts."""
    for drawn in kept.drawn:
        found = find(request_id(iteration, "explore", kept.prompt, drawn.seeds[0]))
        urls = (found or {}).get("thumbnails") or [""] * len(drawn.seeds)
        for seed, reward, url in zip(drawn.seeds, drawn.rewards, urls, strict=False):
            if reward is not None:
                yield Picture(prompt=kept.prompt.text, seed=seed, explored_reward=reward, reward=reward, url=str(url))
    if kept.drawn:
        return
    at = 0
    while at < len(kept.seeds):
        found = find(request_id(iteration, "rollout", kept.prompt, kept.seeds[at]))
        count = len(found["rewards"]) if found else 1
        if found:
            urls = found.get("thumbnails") or [""] * count
            rows = zip(kept.seeds[at:], kept.explored_rewards[at:], found["rewards"], urls, strict=False)
            for seed, explored, reward, url in rows:
                yield Picture(prompt=kept.prompt.text, seed=seed, explored_reward=explored, reward=reward, url=str(url))
        at += count
