"""What does an update of Qwen-Image's LoRA cost beside its passes, from the first gradient to weights on a worker?

``python -m benchmarks.updates`` uses a LoRA of a tenth of Qwen-Image's blocks, and scales the seconds; ``--blocks 60``
uses all of them. Weights are on the GPU if there is one. The cost model assumes a store behind a network of 10 Gb/s;
here it is a directory (``--at``), and node memory is this machine's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from benchmarks import at_least
from benchmarks.engine import took
from spotlight import config
from spotlight.plan.durations import GRADIENT_LORA_S, LORA_BYTES, PUBLISH_LORA_S, UPDATE_LORA_S
from spotlight.records import Gradient, GradientPart, WeightsRef
from spotlight.rl.sums import sliced, tree_sum
from spotlight.rl.trainer import Trainer
from spotlight.store import updates, weights
from spotlight.store.node import Node, shared_root, sweep

if TYPE_CHECKING:
    from spotlight.rl.models import Model

T = TypeVar("T")

SETTINGS = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
BLOCKS, DIM, RANK = 60, 3072, 64
LORA_SHAPES = [
    *([(RANK, DIM), (DIM, RANK)] * 8),  # queries, keys, values and outputs, of image and text
    *([(RANK, DIM), (4 * DIM, RANK), (RANK, 4 * DIM), (DIM, RANK)] * 2),  # both layers of their two MLPs
]
"""Shapes of the LoRA's tensors in a block of Qwen-Image: 1.7 GB in all blocks, in float32."""
PARTS, SLICES = 4, 12
"""Gradients that are added, and slices that they are stored in: as many as there are workers."""
KEEP = "keep the gradient of a part"
ADD = f"add {PARTS} gradients, all slices"
FETCH = "fetch their sum"
STEP = "clip, AdamW's step, the old policy's"
STAGE = "write the version: weights, old policy, optimizer"
PUBLISH = "publish it"
BRING = "bring the policy that samples to a node"
LOAD = "load it from there into a model"
PUBLISHING = "publishing in all"
"""Name of the time from the optimizer's step on."""


class Adapters:
    """The trainable weights of a LoRA in so many of Qwen-Image's blocks, and no model."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        shapes = [shape for _ in range(blocks) for shape in LORA_SHAPES]
        self._parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def trainable(self) -> dict[str, Tensor]:
        return {str(at): parameter.detach() for at, parameter in enumerate(self._parameters)}

    @contextmanager
    def standing_in(self, values: list[Tensor]) -> Iterator[None]:
        mine, self._parameters = self._parameters, cast("list[torch.nn.Parameter]", values)
        yield
        self._parameters = mine


class Clock:
    """Seconds of each piece of work, by name."""

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], T]) -> T:
        results: list[T] = []
        self.took_s[name].append(took(lambda: results.append(work())).wall_s)
        return results[0]


def turn(run: Path, node: Node, trainer: Trainer, adapters: Adapters, number: int, clock: Clock) -> None:
    """One update, and its version on a node."""
    gradient = {name: torch.randn_like(value) for name, value in adapters.trainable().items()}
    slices = [list(map(str, each)) for each in sliced([p.numel() for p in adapters.parameters()], SLICES)]
    first = WeightsRef(version=number, sha256="")
    made = [
        GradientPart(weights=first, iteration=number, update=0, number=at, samples=(), positions=(), slices=SLICES)
        for at in range(PARTS)
    ]
    parts: list[Gradient] = []
    for part in made:
        keep = partial(updates.put, run, part, Gradient(name="", rows=1), gradient, slices)
        parts.append(clock.time(KEEP, keep))

    def add() -> list[Gradient]:
        return [
            updates.put_sum(run, number, parts, at, tree_sum(updates.load_slices(run, number, parts, at)))
            for at in range(SLICES)
        ]

    terms = clock.time(ADD, add)
    found = clock.time(FETCH, lambda: list(updates.load_terms(run, number, terms)))

    def step() -> None:
        trainer.step(PARTS, found, iteration=number, update=0)
        trainer.finish([[(1, 0.0, {})]], [0.0], iteration=number)
        trainer.forget_gradients()

    clock.time(STEP, step)
    trainable = adapters.trainable()
    clock.time(STAGE, lambda: weights.stage(run, number, trainable, trainer.state(), {}, None, trainer.old()))
    ref = clock.time(PUBLISH, lambda: weights.publish(run, number)).weights
    updates.clear(run, number)
    clock.time(BRING, lambda: weights.bring(run, ref, node, "old"))

    @torch.no_grad()
    def load() -> None:
        state = weights.load(run, ref, "old", node)
        for name, value in adapters.trainable().items():
            value.copy_(state[name])

    clock.time(LOAD, load)
    weights.retain(run, {number})


def measure(blocks: int, turns: int, at: str | None) -> dict[str, float]:
    """Medians, for all blocks; the first turn warms up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapters, train, clock = Adapters(blocks, device), config.load(SETTINGS).train, Clock()
    assert train.keeps_old
    trainer = Trainer(cast("Model", adapters), train)
    with tempfile.TemporaryDirectory(prefix="updates-", dir=at) as run:
        node = Node(shared_root(Path(run).name))
        try:
            for number in range(turns + 1):
                turn(Path(run), node, trainer, adapters, number, clock)
        finally:
            node.close()
            sweep(node.root)
    found = {name: median(took[len(took) // (turns + 1) :]) * BLOCKS / blocks for name, took in clock.took_s.items()}
    return found | {PUBLISHING: sum(found[name] for name in (STAGE, PUBLISH, BRING, LOAD))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks", type=at_least(1), default=6, help="blocks of the LoRA, of the 60 that Qwen-Image has (%(default)s)"
    )
    parser.add_argument("--turns", type=at_least(1), default=5)
    parser.add_argument("--at", help="where the run's directory is made (a temporary directory)")
    arguments = parser.parse_args()
    if arguments.at and not Path(arguments.at).is_dir():
        parser.error(f"--at: {arguments.at} is no directory")
    torch.set_num_threads(1)

    found = measure(arguments.blocks, arguments.turns, arguments.at)
    print(f"A LoRA of {2 * LORA_BYTES / 1e9:.1f} GB in float32, {arguments.blocks} of {BLOCKS} blocks measured")
    modelled = {KEEP: GRADIENT_LORA_S, FETCH: GRADIENT_LORA_S, PUBLISHING: PUBLISH_LORA_S}
    modelled |= {} if torch.cuda.is_available() else {STEP: UPDATE_LORA_S}
    print("\n| what | s | cost model, s |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} | {modelled.get(name, '')} |")


if __name__ == "__main__":
    main()
