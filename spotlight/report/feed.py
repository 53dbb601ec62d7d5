"""Sends the scheduler's live page what only the driver knows of a run, as small rows that may come twice.

A row has a ``kind`` and an ``id``: a later row with the same two replaces the earlier one, so a driver that begins anew
sends all of them again and changes nothing. Rows are plain values, a few kilobytes each; no file is shared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from random import Random
from statistics import fmean, pvariance
from typing import Any
from uuid import uuid4

from spotlight.config import Config
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.records import Selection
from spotlight.report.money import emulated
from spotlight.store.rows import HISTORY, VALIDATION, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import Picture, pictures, thumbnail, validation_images

Row = dict[str, Any]

PROMPTS_SHOWN, IMAGES_SHOWN, PICTURES_SHOWN = 16, 12, 6
"""Most prompts of an iteration, images of a validation, and best (and worst) kept seeds that a panel shows."""
TEXT_SHOWN = 240
"""Characters of a prompt."""
DRAWS = 8
"""Random draws of equal shares, whose mean is taken."""
AT_ONCE = 50
"""Iterations sent at once, the latest first: each takes some 10 ms of the driver, and more at a URL."""
METRICS = ("reward_mean", "reward_std", "explored_reward_mean", "rank_correlation", "fidelity", "seeds_scored")
MEASURED = ("wall_s", "spot_utilisation", "preemptions", "gangs_broken", "recovery_s", "spot_worth_renting")


class Feed:
    """The rows of one run, as far as they are new."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run, self._config = run, config
        self._session = uuid4().hex
        """Id of this driver, so that rows of an earlier one are not mixed with its own."""
        self._sizes: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()
        self._are_left = False
        """Whether earlier iterations are not sent yet."""

    def rows(self, money: Mapping[str, Any]) -> list[Row]:
        """What is new since the last call, the money always."""
        rows: list[Row] = [] if self._told else [self._about()]
        if self._has_grown(HISTORY) or self._are_left or not self._told:
            rows += self._iterations(self._run.history())
        if self._has_grown(VALIDATION):
            rows += self._validations(self._run.validation())
        self._told.update((row["kind"], row["id"]) for row in rows)
        return [*rows, {"kind": "money", "id": -1, **money}]

    def _has_grown(self, name: str) -> bool:
        path = self._run.path / name
        size = path.stat().st_size if path.exists() else 0
        grown = size != self._sizes.get(name, 0)
        self._sizes[name] = size
        return grown

    def _about(self) -> Row:
        config = self._config
        return {
            "kind": "run",
            "id": 0,
            "name": self._run.name,
            "url": self._run.url,
            "session": self._session,
            "iterations": config.run.iterations,
            "label": emulated(config, self._run.simulated),
            "usd_per_h": {name: pool.usd_per_h for name, pool in config.pools},
        }

    def _iterations(self, history: Sequence[HistoryRow]) -> Iterator[Row]:
        """A row for each iteration, and for the seeds of the next one, which are chosen beside it."""
        untold = [row for row in history if ("iteration", row.iteration) not in self._told]
        self._are_left = len(untold) > AT_ONCE
        for row in untold[-AT_ONCE:]:
            yield self._iteration(row)
        latest = history[-1].iteration if history else -1
        for k in (latest, latest + 1):
            if k >= 0 and ("prompts", k) not in self._told and (selection := self._run.selection(k)):
                yield self._prompts(selection)
        if history and ("seeds", latest) not in self._told and (selection := self._run.selection(latest)):
            yield {"kind": "seeds", "id": latest, "pictures": best_and_worst(pictures(self._run, selection))}

    def _iteration(self, row: HistoryRow) -> Row:
        selection = self._run.selection(row.iteration)
        numbers = {name: row.metrics[name] for name in METRICS if name in row.metrics}
        numbers |= {name: row.measured[name] for name in MEASURED if name in row.measured}
        stopped_s = row.measured.get("stopped_s", 0.0)
        return {
            "kind": "iteration",
            "id": row.iteration,
            "at_s": stopped_s,
            "usd": row.measured.get("usd", 0.0),
            **numbers,
            **(variances(selection, seed=self._config.run.seed) if selection else {}),
        }

    def _prompts(self, selection: Selection) -> Row:
        """How many candidates exploration tried of each prompt, most first, and their rewards."""
        kept = {group.prompt.id: group for group in selection.kept}
        rows = [
            {
                "prompt": kept[explored.prompt].prompt.text[:TEXT_SHOWN] if explored.prompt in kept else "",
                "id": explored.prompt,
                "tried": len(explored.rewards),
                "reward": fmean(explored.rewards) if explored.rewards else None,
                "spread": pvariance(explored.rewards) ** 0.5 if explored.rewards else 0.0,
                "kept": explored.prompt in kept,
            }
            for explored in sorted(selection.explored, key=lambda explored: (-len(explored.rewards), explored.prompt))
        ]
        return {
            "kind": "prompts",
            "id": selection.iteration,
            "scored": selection.seeds_scored,
            "dropped": selection.seeds_dropped,
            "of": len(rows),
            "prompts": rows[:PROMPTS_SHOWN],
        }

    def _validations(self, validation: Sequence[ValidationRow]) -> Iterator[Row]:
        for row in validation:
            if ("validation", row.version) not in self._told:
                yield {"kind": "validation", "id": row.version, "score": row.score, "at_s": row.at_s}
        if validation and ("images", validation[-1].version) not in self._told:
            latest = validation[-1]
            images = [] if self._run.simulated == "modelled" else _images(self._run, latest)
            yield {"kind": "images", "id": latest.version, "images": images}


def variances(selection: Selection, *, seed: int) -> Row:
    """Mean reward variance of the kept groups, and what equal shares of the same candidates would have kept.

    Equal shares are imagined: as many candidates of each prompt as there were on average, drawn from its own rewards
    (again and again from the same few, where the planner tried fewer). Nothing where too few were scored.
    """
    scored = {explored.prompt: explored.rewards for explored in selection.explored if explored.rewards}
    groups = [[reward for reward in kept.explored_rewards if reward is not None] for kept in selection.kept]
    groups = [rewards for rewards in groups if len(rewards) > 1]
    if not groups or not scored:
        return {}
    keep, share = max(map(len, groups)), max(1, round(selection.seeds_scored / len(selection.explored)))
    chance = Random(seed * 1_000_003 + selection.iteration)
    equal = fmean(_equal_shares(list(scored.values()), share, keep, len(groups), chance) for _ in range(DRAWS))
    return {"variance_kept": fmean(map(pvariance, groups)), "variance_equal": equal}


def _equal_shares(scored: Iterable[Sequence[float]], share: int, keep: int, groups: int, chance: Random) -> float:
    drawn = [
        chance.sample(rewards, share) if len(rewards) >= share else chance.choices(rewards, k=share)
        for rewards in scored
    ]
    kept = [[rewards[at] for at in max_variance_subset(rewards, min(keep, share))] for rewards in drawn]
    return fmean(pvariance(kept[at]) for at in most_varied(kept, min(groups, len(kept))))


def best_and_worst(found: Sequence[Picture]) -> list[Row]:
    """The best kept seeds by their reward, then the worst."""
    known = [picture for picture in found if picture.reward is not None]
    known.sort(key=lambda picture: (-(picture.reward or 0.0), picture.seed))
    count = min(PICTURES_SHOWN, len(known) // 2)
    shown = [*known[:count], *(known[-count:] if count else [])]
    return [asdict(picture) | {"prompt": picture.prompt[:TEXT_SHOWN], "seed": str(picture.seed)} for picture in shown]


def _images(run: RunDir, row: ValidationRow) -> list[Row]:
    """The first image of each prompt of a validation; none where the file cannot be read."""
    if not re.fullmatch(r"images/[\w.-]+", row.images):
        return []
    if (found := validation_images(run.fetch(row.images), len(row.rewards))) is None:
        return []
    images, texts = found
    firsts = [texts.index(text) for text in dict.fromkeys(texts)][:IMAGES_SHOWN]
    return [
        {"prompt": texts[at][:TEXT_SHOWN], "reward": row.rewards[at], "url": thumbnail(images[at])} for at in firsts
    ]
