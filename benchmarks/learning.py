"""How many iterations explored seeds save, without a cluster: the embedded job in one process, nothing paced.

What a cluster can explore in time is left out; what the samples teach is not: the same model, prompts, seeds, reward,
choice of seeds and trainer as in a run. The raw data has a line per run; those that are there are not run again.
``python -m benchmarks.learning`` prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphs.tasks import candidate_seed, validation_seeds
from spotlight import config
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.records import Prompt
from spotlight.rl import flow, models, rewards
from spotlight.rl.advantages import group_advantages
from spotlight.rl.prompts import choose_prompts, read_prompts
from spotlight.rl.trainer import Trainer, TrainingBatch

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "paced.toml"
DATA = ROOT / "benchmarks" / "data" / "learning.jsonl"
BATCH, IN_A_ROW = 64, 2
SPAN = slice(8, 17)
"""Iterations whose scores are averaged: a run's single scores are noise."""
Drawn = tuple[Prompt, int]
"""A prompt and a seed: an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is explored before each iteration; nothing if ``seeds`` is 0."""

    prompts: int = 8
    seeds: int = 0
    """Candidates of each prompt."""
    steps: int = 16
    stale: bool = True
    """With the weights of the iteration before."""
    regenerated: bool = True
    """Kept seeds are rolled out with current weights; else trained on as they were explored."""


VARIANTS = {
    "not explored": Variant(),
    "8 prompts x 32, current weights": Variant(seeds=32, stale=False),
    "16 prompts x 16, current weights": Variant(prompts=16, seeds=16, stale=False),
    "8 prompts x 16, stale, 6 steps": Variant(seeds=16, steps=6),
    "12 prompts x 12, stale, 6 steps": Variant(prompts=12, seeds=12, steps=6),
    "8 prompts x 21, stale, 6 steps": Variant(seeds=21, steps=6),
    "8 prompts x 32, stale, 6 steps": Variant(seeds=32, steps=6),
    "16 prompts x 16, stale, 6 steps": Variant(prompts=16, seeds=16, steps=6),
    "8 prompts x 13, stale, trained on as explored": Variant(seeds=13, regenerated=False),
    "16 prompts x 16, stale, trained on as explored": Variant(prompts=16, seeds=16, regenerated=False),
}


class Job:
    """A run's model, data and trainer, in this process."""

    def __init__(self, settings: config.Config) -> None:
        self.settings = settings
        self.size = settings.model.height_px, settings.model.width_px
        self.model = models.load(settings.model)
        self.model.make_trainable(rank=settings.train.lora_rank, alpha=settings.train.lora_alpha, seed=0)
        self.trainer = Trainer(self.model, settings.train, seed=settings.run.seed)
        self.train = read_prompts(settings.data.train_prompts)

    @cached_property
    def validation(self) -> list[Drawn]:
        prompts, count = read_prompts(self.settings.data.validation_prompts), 4
        return [(prompt, seed) for prompt in prompts for seed in validation_seeds(prompt, count)]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.trainable().items()}

    def candidates(self, iteration: int, prompts: int, seeds: int) -> list[list[Drawn]]:
        """Of each prompt of the iteration."""
        seed = self.settings.run.seed
        chosen = [self.train[at] for at in choose_prompts(len(self.train), prompts, seed=seed, iteration=iteration)]
        return [[(prompt, candidate_seed(seed, iteration, prompt, at)) for at in range(seeds)] for prompt in chosen]

    @torch.no_grad()
    def draw(self, images: Sequence[Drawn], steps: int) -> tuple[Tensor, NDArray[np.float64]]:
        """Clean latents and rewards, with the weights that the model has."""
        tokens, channels = self.model.latent_shape(*self.size)
        sigmas, clean = self.model.sigmas(steps, *self.size), []
        for first in range(0, len(images), BATCH):
            part = images[first : first + BATCH]
            x_BNC = flow.initial_noise([seed for _, seed in part], tokens, channels)
            text = self.model.encode([prompt.text for prompt, _ in part])
            for step in range(steps):
                sigma_B = torch.full((len(part),), sigmas[step])
                v_BNC = self.model.velocity(
                    x_BNC, sigma_B, text, height_px=self.size[0], width_px=self.size[1], guidance=1.0
                )
                x_BNC = flow.ode_step(x_BNC, v_BNC, sigmas[step], sigmas[step + 1])
            clean.append(x_BNC)
        clean_BNC = torch.cat(clean)
        scorer = rewards.build(self.settings.reward)
        return clean_BNC, np.array(scorer(self.model.decode(clean_BNC, *self.size), [one.text for one, _ in images]))

    def learn(self, iteration: int, images: Sequence[Drawn], clean_BNC: Tensor, rewards_B: NDArray[np.float64]) -> None:
        settings = self.settings
        groups = [prompt.id for prompt, _ in images]
        batch = TrainingBatch(
            clean_BNC=clean_BNC,
            advantages_B=group_advantages(rewards_B, groups, std=settings.train.advantage_std),
            conditioning=self.model.encode([prompt.text for prompt, _ in images]),
            height_px=self.size[0],
            width_px=self.size[1],
            guidance=1.0,
            sigmas=self.model.sigmas(settings.rollout.steps, *self.size),
            sde_window=settings.rollout.sde_window,
            sampler="ode",
            noise_level=settings.rollout.noise_level,
            window_BKNC=None,
            log_prob_BS=None,
        )
        self.trainer.update(batch, iteration=iteration)


def scores(job: Job, variant: Variant, iterations: int) -> Iterator[float]:
    """Validation scores at the start and after each iteration."""
    rollout, stale = job.settings.rollout, job.weights()
    yield float(job.draw(job.validation, rollout.steps)[1].mean())
    for k in range(iterations):
        current = job.weights()
        groups = job.candidates(k, variant.prompts, variant.seeds or rollout.seeds_kept)
        everything = [image for group in groups for image in group]
        explored = None
        if variant.seeds:
            job.model.load_trainable(stale if variant.stale else current)
            explored = job.draw(everything, variant.steps)
            job.model.load_trainable(current)
        kept = _kept(explored[1], groups, rollout.prompts, rollout.seeds_kept) if explored else range(len(everything))
        images = [everything[at] for at in kept]
        if explored and not variant.regenerated:
            job.learn(k, images, explored[0][list(kept)], explored[1][list(kept)])
        else:
            job.learn(k, images, *job.draw(images, rollout.steps))
        stale = current
        yield float(job.draw(job.validation, rollout.steps)[1].mean())


def _kept(rewards_B: NDArray[np.float64], groups: Sequence[Sequence[Drawn]], prompts: int, seeds: int) -> list[int]:
    """Indices of the images that a run would keep."""
    size = len(groups[0])
    chosen = [
        [first + at for at in max_variance_subset(rewards_B[first : first + size], seeds)]
        for first in range(0, len(rewards_B), size)
    ]
    return [at for one in most_varied([rewards_B[group].tolist() for group in chosen], prompts) for at in chosen[one]]


def table(rows: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> str:
    """A line for each recipe and variant, its runs by seed."""
    columns = ["recipe", "variant", "seeds", *(f"iterations to {target}" for target in targets)]
    columns.append(f"mean score, iterations {SPAN.start} to {SPAN.stop - 1}: of the seeds")
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        runs[row["recipe"], row["variant"]].append(row)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (recipe, variant), mine in sorted(runs.items(), key=lambda one: (one[0][0], [*VARIANTS].index(one[0][1]))):
        means = [statistics.fmean(row["scores"][SPAN]) for row in mine]
        cells = [recipe, variant, ", ".join(str(row["seed"]) for row in mine)]
        cells += [", ".join(_reached(row["scores"], target) for row in mine) for target in targets]
        cells.append(f"{statistics.fmean(means):.2f}: {', '.join(f'{mean:.2f}' for mean in means)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _reached(curve: Sequence[float], target: float) -> str:
    firsts = range(len(curve) - IN_A_ROW + 1)
    first = next((at for at in firsts if min(curve[at : at + IN_A_ROW]) >= target), inf)
    return f"> {len(curve) - 1}" if first == inf else str(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=[], choices=list(VARIANTS), metavar="NAME", help="to be run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="run seeds")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--targets", type=float, nargs="*", default=[0.7, 0.8, 0.85])
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--timesteps", type=int, default=4, help="noise levels per sample")
    parser.add_argument("--advantage-std", choices=["global", "group"], default="global")
    parser.add_argument("--data", type=Path, default=DATA, help="raw data, read and added to")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    recipe = f"{arguments.learning_rate:g}, {arguments.timesteps} levels, {arguments.advantage_std}"
    rows = [json.loads(line) for line in arguments.data.read_text().splitlines()] if arguments.data.exists() else []
    there = {(row["recipe"], row["variant"], row["seed"]) for row in rows}
    for seed in arguments.seeds:
        for name in arguments.variants:
            if (recipe, name, seed) in there:
                continue
            overrides = ["pace.gpu=", f"run.seed={seed}", f"train.learning_rate={arguments.learning_rate}"]
            overrides += [f"train.timesteps={arguments.timesteps}", f"train.advantage_std={arguments.advantage_std}"]
            began_s = time.monotonic()
            curve = [
                round(score, 5)
                for score in scores(Job(config.load(SETTINGS, overrides)), VARIANTS[name], arguments.iterations)
            ]
            rows.append({"recipe": recipe, "variant": name, "seed": seed, "scores": curve})
            with arguments.data.open("a") as file:
                file.write(f"{json.dumps(rows[-1])}\n")
            print(f"{name}, seed {seed}, {time.monotonic() - began_s:.0f} s: {curve[-1]}", file=sys.stderr, flush=True)
    print(table(rows, arguments.targets))


if __name__ == "__main__":
    main()
