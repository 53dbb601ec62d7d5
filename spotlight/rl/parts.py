"""Cuts an iteration's samples into the fixed parts of its updates; knows no torch, no model and no worker.

Which samples a part has depends on the settings, the run's seed, the iteration and the samples' order alone: never on
how many workers there are, nor on who was ready first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spotlight.config import Config
from spotlight.records import record


def stream(seed: int, iteration: int, *, sample: int | None = None, slot: int = 0) -> np.random.Generator:
    """The random numbers of an iteration: for its order of samples (no sample named), or for one sample and slot.

    The counter's last word keeps them apart from `flow`'s noise, which may have the same key.
    """
    counter = [0, slot, 0 if sample is None else sample + 1, 1]
    key = np.array([seed, iteration], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)))


def preference_pairs(
    advantages_B: Sequence[float] | NDArray[np.float64], groups_B: Sequence[int], *, pairs_max: int
) -> tuple[tuple[int, int], ...]:
    """``(better, worse)`` samples of each group: its best with its worst, then the next ones, as long as they differ.

    Given only the samples of some of these pairs, it finds the same pairs.

    Args:
        pairs_max: most pairs of a group.
    """
    pairs: list[tuple[int, int]] = []
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(groups_B):
        groups[group].append(row)
    for members in groups.values():
        ranked = sorted(members, key=lambda row: -advantages_B[row])
        facing = list(zip(ranked, reversed(ranked), strict=True))[: min(pairs_max, len(ranked) // 2)]
        pairs += [(better, worse) for better, worse in facing if advantages_B[better] > advantages_B[worse]]
    return tuple(pairs)


@record
class Cut:
    """The parts of an iteration's updates.

    With one update, a part has samples that follow each other, so that it can be computed as soon as they are scored:
    those of whole prompts, or of a piece of one where there are more parts than prompts. Several updates share out the
    samples in an order that is drawn.
    """

    parts: int
    """How many parts each update is to have; see `count`."""
    updates: int
    prompts: int
    seeds: int
    """Samples of each prompt that are trained on."""
    pairs: int
    """Most pairs of a prompt's samples, where training is on pairs: both samples of a pair are in one part. Else 0."""
    seed: int
    """The run's."""
    filters: bool = False
    """Prompts whose advantages are all 0 are left out of their parts (``train.filter_groups``)."""
    settings: str = ""
    """SHA-256 of ``[train]``: gradients that were computed with other settings are no parts of these updates."""

    @classmethod
    def of(cls, config: Config) -> Self:
        train, rollout = config.train, config.rollout
        return cls(
            parts=train.parts,
            updates=train.updates,
            prompts=rollout.prompts,
            seeds=config.seeds_trained,
            pairs=train.dpo_pairs if train.algorithm == "dpo" else 0,
            seed=config.run.seed,
            filters=train.filter_groups,
            settings=sha256(train.model_dump_json().encode()).hexdigest(),
        )

    @property
    def count(self) -> int:
        """Parts of each update: as many as are wanted, but no more than can have a sample."""
        if self.updates > 1:
            return min(self.parts, self.prompts * self.seeds // self.updates)
        return min(self.parts, self.prompts if self.pairs else self.prompts * self.seeds)

    @property
    def chunks(self) -> list[range]:
        """Ranges of prompts that become ready together, where samples are trained on as they are scored."""
        count = min(self.count, self.prompts)
        edges = [self.prompts * chunk // count for chunk in range(count + 1)]
        if self.count > self.prompts:
            edges = list(range(self.prompts + 1))
        return [range(edges[chunk], edges[chunk + 1]) for chunk in range(count)]

    def span(self, part: int) -> range:
        """Positions of a part's samples among all of the iteration, where there is one update."""
        assert self.updates == 1, "the samples of several updates are in an order that is drawn"
        if self.count <= self.prompts:
            prompts = self.chunks[part]
            return range(prompts.start * self.seeds, prompts.stop * self.seeds)
        samples = self.prompts * self.seeds
        return range(samples * part // self.count, samples * (part + 1) // self.count)

    def needs(self, part: int) -> list[int]:
        """The chunks that a part has samples of."""
        span = self.span(part)
        return [
            number
            for number, prompts in enumerate(self.chunks)
            if prompts.start * self.seeds < span.stop and span.start < prompts.stop * self.seeds
        ]

    def positions(
        self, iteration: int, update: int, part: int, advantages_B: Sequence[float], groups_B: Sequence[int]
    ) -> tuple[int, ...]:
        """Positions of a part's samples among all of the iteration, ascending.

        Args:
            advantages_B: of all samples of the iteration.
            groups_B: their prompts. With one update neither is used.
        """
        if self.updates == 1:
            return tuple(self.span(part))
        units = [(sample,) for sample in range(len(groups_B))]
        if self.pairs:
            units = list(preference_pairs(advantages_B, groups_B, pairs_max=self.pairs))  # type: ignore[arg-type]
        order = stream(self.seed, iteration).permutation(len(units)).tolist()
        start, stop = (len(units) * at // self.updates for at in (update, update + 1))
        first, end = (start + (stop - start) * at // self.count for at in (part, part + 1))
        return tuple(sorted(sample for unit in order[first:end] for sample in units[unit]))
