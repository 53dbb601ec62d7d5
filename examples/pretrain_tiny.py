"""Pre-train the embedded model on rendered two-digit numbers, stopping early on purpose.

Plain flow matching on CPU, one thread, fixed seed: ``python examples/pretrain_tiny.py`` writes
``spotlight/rl/models/weights/tiny_text.safetensors``. It stops while the model still misspells about
half of what it is asked for, so that post-training has something to teach.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from spotlight.rl.models.tiny_text import HEIGHT_PX, WEIGHTS, WIDTH_PX, TinyText, patches

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
TARGETS = tuple(f"{number:02d}" for number in range(100))
RENDERINGS = 20_000
"""Different pictures to learn from; more made no difference, fewer were learned by heart."""


def render(text: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Black text on white, in a random face and size, a little off the centre."""
    face = FACES[rng.integers(len(FACES))]
    font = ImageFont.truetype(str(FONTS / f"{face}.ttf"), int(rng.integers(11, 15)))
    image = Image.new("L", (WIDTH_PX, HEIGHT_PX), 255)
    canvas = ImageDraw.Draw(image)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    x = (WIDTH_PX - right - left) / 2 + rng.integers(-2, 3)
    y = (HEIGHT_PX - bottom - top) / 2 + rng.integers(-1, 2)
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
        height_px=HEIGHT_PX,
        width_px=WIDTH_PX,
        guidance=1.0,
    )
    return (v_BNC - (noise_BNC - clean_BNC)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    model = TinyText()
    for table in (model.letters, model.places):
        torch.nn.init.normal_(table.weight)
    modules = (model.transformer, model.letters, model.places)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 200))

    targets = [TARGETS[index] for index in rng.integers(len(TARGETS), size=RENDERINGS)]
    clean = patches(np.stack([render(target, rng) for target in targets]))
    started_s = time.monotonic()
    for done in track(range(1, arguments.batches + 1), description="pre-training"):
        index = rng.integers(RENDERINGS, size=arguments.batch)
        loss = flow_matching_loss(model, clean[torch.from_numpy(index)], [f'"{targets[i]}"' for i in index], generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        warm_up.step()
        if done % 500 == 0:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            save_file({k: v.contiguous() for k, v in model.state().items()}, arguments.out)
            print(f"{done} batches, {time.monotonic() - started_s:.0f} s, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
