"""Pre-train an embedded model on rendered text, stopping early on purpose.

Plain flow matching on CPU, one thread, fixed seed: ``python examples/pretrain_tiny.py digits`` (or ``mixed``) writes
``spotlight/rl/models/weights/tiny_text.safetensors`` (or ``tiny_mixed``). It stops while the model still misspells
about half of what it is asked for, so that post-training has something to teach.
``--score`` instead says how well the model draws each kind of text, and how well perfect pictures are read.
"""

from __future__ import annotations

import argparse
import statistics
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from spotlight.rl.models.tiny_text import MIXED, TWO_DIGITS, Shape, TinyText, patches
from spotlight.rl.rewards.ocr import OcrScorer

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
RENDERINGS = 20_000
"""Different pictures to learn from; more made no difference, fewer were learned by heart."""
CAPITALS = "".join(letter for letter in string.ascii_uppercase if letter not in "IO")
"""Without those that nobody tells from digits."""
ALPHABETS = {"digits": string.digits, "capitals": CAPITALS, "mixed": string.digits + CAPITALS}
LENGTHS = (1, 2, 3, 4)
LENGTH_SHARES = (0.25, 0.35, 0.25, 0.15)
ALPHABET_SHARES = (0.45, 0.35, 0.2)
COMMON = 4
"""A text's letters have shares 1 / (COMMON + place in their alphabet): late ones are rare, and so drawn badly."""
UNIFORM = 1e9
"""In its place: no letter is rarer than another."""


def two_digits(rng: np.random.Generator, count: int) -> list[str]:
    return [f"{number:02d}" for number in rng.integers(100, size=count)]


def mixed(rng: np.random.Generator, count: int) -> list[str]:
    """One to four digits and capitals, some kinds and some letters rarer than others."""
    return [
        text_of(rng, ALPHABETS[str(kind)], int(length))
        for kind, length in zip(
            rng.choice(list(ALPHABETS), size=count, p=ALPHABET_SHARES),
            rng.choice(LENGTHS, size=count, p=LENGTH_SHARES),
            strict=True,
        )
    ]


def text_of(rng: np.random.Generator, alphabet: str, length: int, common: float = COMMON) -> str:
    shares = 1 / (common + np.arange(len(alphabet)))
    return "".join(rng.choice(list(alphabet), size=length, p=shares / shares.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a model is taught."""

    shape: Shape
    texts: Callable[[np.random.Generator, int], list[str]]
    """So many targets."""
    faces: tuple[str, ...]
    sizes: tuple[int, int]
    """Of type, in pixels: at least, and less than."""
    batches: int
    batch: int


JOBS = {
    "digits": Job(shape=TWO_DIGITS, texts=two_digits, faces=FACES, sizes=(11, 15), batches=2000, batch=128),
    "mixed": Job(shape=MIXED, texts=mixed, faces=FACES[:2], sizes=(10, 14), batches=4000, batch=64),
}


def render(text: str, job: Job, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Black text on white, in a random face and size, a little off the centre."""
    width_px, height_px = job.shape.width_px, job.shape.height_px
    face = job.faces[rng.integers(len(job.faces))]
    font = ImageFont.truetype(str(FONTS / f"{face}.ttf"), int(rng.integers(*job.sizes)))
    image = Image.new("L", (width_px, height_px), 255)
    canvas = ImageDraw.Draw(image)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    x = (width_px - right - left) / 2 + rng.integers(-2, 3)
    y = (height_px - bottom - top) / 2 + rng.integers(-1, 2)
    canvas.text((x, y), text, fill=0, font=font)
    return np.asarray(image)


def flow_matching_loss(model: TinyText, clean_BNC: Tensor, texts: list[str], generator: torch.Generator) -> Tensor:
    """Mean squared error of the predicted velocity at logit-normal noise levels (arXiv 2403.03206)."""
    noise_BNC = torch.randn(clean_BNC.shape, generator=generator)
    sigma_B = torch.sigmoid(torch.randn(len(texts), generator=generator))
    sigma_B11 = sigma_B[:, None, None]
    v_BNC = model.velocity(
        (1 - sigma_B11) * clean_BNC + sigma_B11 * noise_BNC,
        sigma_B,
        model.encode(texts),
        height_px=model.shape.height_px,
        width_px=model.shape.width_px,
        guidance=1.0,
    )
    return (v_BNC - (noise_BNC - clean_BNC)).square().mean()


def train(job: Job, arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    model = TinyText(job.shape)
    for table in (model.letters, model.places):
        torch.nn.init.normal_(table.weight)
    modules = (model.transformer, model.letters, model.places)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 200))

    targets = job.texts(rng, RENDERINGS)
    clean = patches(np.stack([render(target, job, rng) for target in targets]))
    out = arguments.out or job.shape.weights
    out.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    for done in track(range(1, (arguments.batches or job.batches) + 1), description="pre-training"):
        index = rng.integers(RENDERINGS, size=job.batch)
        loss = flow_matching_loss(model, clean[torch.from_numpy(index)], [f'"{targets[i]}"' for i in index], generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        warm_up.step()
        if done % arguments.save_every == 0:
            path = Path(str(out).format(batches=done))
            save_file({k: v.contiguous() for k, v in model.state().items()}, path)
            spent = f"{time.monotonic() - started_s:.0f} s, of which {time.process_time():.0f} s of CPU"
            print(f"{done} batches, {spent}, loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def draw(model: TinyText, texts: list[str], steps: int, seed: int) -> NDArray[np.uint8]:
    """Pictures by the ODE sampler, as post-training begins with."""
    size = model.small_px
    generator = torch.Generator().manual_seed(seed)
    x_BNC = torch.randn(len(texts), *model.latent_shape(*size), generator=generator)
    conditioning = model.encode([f'"{text}"' for text in texts])
    sigmas = model.sigmas(steps, *size)
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        level_B = torch.full((len(texts),), sigma)
        v_BNC = model.velocity(x_BNC, level_B, conditioning, height_px=size[0], width_px=size[1], guidance=1.0)
        x_BNC = x_BNC + (following - sigma) * v_BNC
    return model.decode(x_BNC, *size)


def score(job: Job, arguments: argparse.Namespace) -> None:
    """The mean OCR score of each kind of text, drawn and rendered, as a table in Markdown."""
    path = str(arguments.out or "")
    model = TinyText.load(path, torch.device("cpu"), torch.float32, shape=job.shape)
    scorer, rng = OcrScorer(), np.random.default_rng(arguments.seed)
    kinds = {
        f"{length} {name}": [text_of(rng, alphabet, length, common=UNIFORM) for _ in range(arguments.images)]
        for name, alphabet in ALPHABETS.items()
        for length in LENGTHS
        if not (length == 1 and name == "mixed")
    }
    if job.shape is TWO_DIGITS:
        kinds = {"2 digits": two_digits(rng, arguments.images)}
    print("| kind | drawn | rendered |\n|---|---|---|")
    rows = []
    for kind, texts in kinds.items():
        prompts = [f'"{text}"' for text in texts]
        drawn = statistics.fmean(scorer(draw(model, texts, arguments.steps, arguments.seed), prompts))
        perfect = np.stack([np.repeat(render(text, job, rng)[..., None], 3, axis=-1) for text in texts])
        rows.append((drawn, statistics.fmean(scorer(perfect, prompts))))
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
    parser.add_argument("--images", type=int, default=48, help="of each kind, for --score")
    parser.add_argument("--steps", type=int, default=8, help="of denoising, for --score")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    (score if arguments.score else train)(JOBS[arguments.job], arguments)


if __name__ == "__main__":
    main()
