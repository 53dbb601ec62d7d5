"""Pre-train an embedded model on rendered pictures, stopping early on purpose.

Plain flow matching on CPU, one thread, fixed seed: ``python examples/pretrain_tiny.py digits`` (or ``mixed``, or
``shapes``) writes the weights that ship with the package, in ``spotlight/rl/models/weights/``. It stops while the model
still fails at about half of what it is asked for, so that post-training has something to teach.
``--score`` instead says how well the model draws each kind of prompt, and how well perfect pictures are rewarded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pictures_of_shapes import Shapes
from pictures_of_texts import Digits, Mixed
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from spotlight.records import Prompt
from spotlight.rl.models.tiny import Tiny, Variant, patches
from spotlight.rl.models.tiny_shapes import SCENES, TinyShapes
from spotlight.rl.models.tiny_text import MIXED, TWO_DIGITS, TinyText
from spotlight.rl.rewards import GenEvalScorer, Scorer
from spotlight.rl.rewards.ocr import OcrScorer
from spotlight.rl.rewards.shapes import ShapeDetector

RENDERINGS = 20_000
"""Different pictures to learn from; of texts, more made no difference, and fewer were learned by heart."""


class Pictures(Protocol):
    """What a model is taught to draw."""

    def prompts(self, rng: np.random.Generator, count: int) -> list[Prompt]:
        """To learn from, as often as they should be learned from."""
        ...

    def kinds(self, rng: np.random.Generator, count: int) -> Mapping[str, list[Prompt]]:
        """So many prompts of each kind, to be scored by."""
        ...

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        """A perfect picture, of shape (height, width, colours)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and how it is taught."""

    model: type[Tiny]
    variant: Variant
    pictures: Callable[[], Pictures]
    scorer: Callable[[bool], Scorer]
    """Graded, or right or wrong."""
    batches: int
    batch: int
    renderings: int = RENDERINGS


def texts(graded: bool) -> Scorer:
    return OcrScorer(graded=graded)


JOBS = {
    "digits": Job(model=TinyText, variant=TWO_DIGITS, pictures=Digits, scorer=texts, batches=2000, batch=128),
    "mixed": Job(model=TinyText, variant=MIXED, pictures=Mixed, scorer=texts, batches=4000, batch=64),
    "shapes": Job(
        model=TinyShapes,
        variant=SCENES,
        pictures=Shapes,
        scorer=lambda graded: GenEvalScorer(ShapeDetector(), graded=graded),
        batches=4500,
        batch=64,
    ),
}


def flow_matching_loss(model: Tiny, clean_BNC: Tensor, texts: list[str], generator: torch.Generator) -> Tensor:
    """Mean squared error of the predicted velocity at logit-normal noise levels (arXiv 2403.03206)."""
    noise_BNC = torch.randn(clean_BNC.shape, generator=generator)
    sigma_B = torch.sigmoid(torch.randn(len(texts), generator=generator))
    sigma_B11 = sigma_B[:, None, None]
    v_BNC = model.velocity(
        (1 - sigma_B11) * clean_BNC + sigma_B11 * noise_BNC,
        sigma_B,
        model.encode(texts),
        height_px=model.variant.height_px,
        width_px=model.variant.width_px,
        guidance=1.0,
    )
    return (v_BNC - (noise_BNC - clean_BNC)).square().mean()


def train(job: Job, arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    model, pictures = job.model(job.variant), job.pictures()
    for table in (model.letters, model.places):
        torch.nn.init.normal_(table.weight)
    modules = (model.transformer, model.letters, model.places)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 200))

    prompts = pictures.prompts(rng, job.renderings)
    clean = patches(np.stack([pictures.render(prompt, rng) for prompt in prompts]))
    out = arguments.out or job.variant.weights
    out.parent.mkdir(parents=True, exist_ok=True)
    started_s, batches = time.monotonic(), arguments.batches or job.batches
    for done in track(range(1, batches + 1), description="pre-training"):
        index = rng.integers(job.renderings, size=job.batch)
        loss = flow_matching_loss(model, clean[torch.from_numpy(index)], [prompts[i].text for i in index], generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        warm_up.step()
        if done % arguments.save_every == 0 or done == batches:
            path = Path(str(out).format(batches=done))
            save_file({k: v.contiguous() for k, v in model.state().items()}, path)
            spent = f"{time.monotonic() - started_s:.0f} s, of which {time.process_time():.0f} s of CPU"
            print(f"{done} batches, {spent}, loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def draw(model: Tiny, prompts: list[Prompt], steps: int, seed: int) -> NDArray[np.uint8]:
    """Pictures by the ODE sampler, as post-training begins with."""
    size = model.small_px
    generator = torch.Generator().manual_seed(seed)
    x_BNC = torch.randn(len(prompts), *model.latent_shape(*size), generator=generator)
    conditioning = model.encode([prompt.text for prompt in prompts])
    sigmas = model.sigmas(steps, *size)
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        level_B = torch.full((len(prompts),), sigma)
        v_BNC = model.velocity(x_BNC, level_B, conditioning, height_px=size[0], width_px=size[1], guidance=1.0)
        x_BNC = x_BNC + (following - sigma) * v_BNC
    return model.decode(x_BNC, *size)


def score(job: Job, arguments: argparse.Namespace) -> None:
    """The mean reward of each kind of prompt, drawn and rendered, as a table in Markdown."""
    path = str(arguments.out or "")
    model = job.model.load(path, torch.device("cpu"), torch.float32, variant=job.variant)
    scorer, pictures, rng = job.scorer(not arguments.strict), job.pictures(), np.random.default_rng(arguments.seed)
    print("| kind | drawn | rendered |\n|---|---|---|")
    rows = []
    for kind, prompts in pictures.kinds(rng, arguments.images).items():
        drawn = statistics.fmean(scorer.of(draw(model, prompts, arguments.steps, arguments.seed), prompts))
        perfect = np.stack([pictures.render(prompt, rng) for prompt in prompts])
        rows.append((drawn, statistics.fmean(scorer.of(np.repeat(perfect, 3 // perfect.shape[-1], -1), prompts))))
        print(f"| {kind} | {rows[-1][0]:.2f} | {rows[-1][1]:.2f} |")
    means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    print(f"| all kinds alike | {means[0]:.3f} | {means[1]:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=list(JOBS), help="what to teach")
    parser.add_argument("--batches", type=int, default=0, help="other than the job's")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path, help="weights file; '{batches}' in it keeps each one saved")
    parser.add_argument("--score", action="store_true", help="of the weights file, instead of training")
    parser.add_argument("--strict", action="store_true", help="an image scores 1 or 0, for --score")
    parser.add_argument("--images", type=int, default=48, help="of each kind, for --score")
    parser.add_argument("--steps", type=int, default=8, help="of denoising, for --score")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    (score if arguments.score else train)(JOBS[arguments.job], arguments)


if __name__ == "__main__":
    main()
