"""Whole runs on a device whose tensors do not mix with the CPU's: what a GPU would refuse is found without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import tiny_flux, tiny_qwen_image, tiny_sd3
from runs import ROOT, settings_file

SHORT = (
    "run.iterations=1 run.validate_every=1 rollout.prompts=2 rollout.steps=3 rollout.seeds_kept=2 "
    "exploration.seeds_tried=4 exploration.rounds=1 exploration.prompts=2 "
    "data.train_prompts=few.txt data.validation_prompts=one.txt"
)
CHECKPOINT = (
    f"{SHORT} model.height_px=16 model.width_px=64 rollout.guidance=4.0 train.lora_rank=2 train.lora_alpha=4 "
    "model.gradient_checkpointing=false"  # which asks a device for much that this one has not
)
ROUNDED = 1e-4
"""Of how far weights were moved: kernels differ, and so do sums."""
EMBEDDED = {
    "DiffusionNFT with an old policy": "train.old_decay=0.5",
    "AWM": "train.algorithm=awm",
    "Flow-GRPO": "train.algorithm=grpo rollout.sampler=sde train.kl=0.01",
    "Diffusion-DPO": "train.algorithm=dpo",
}
CHECKPOINTS = {"qwen-image": tiny_qwen_image, "sd3": tiny_sd3, "flux": tiny_flux}


def write_prompts(directory: Path) -> None:
    """Those of `SHORT`."""
    few = [f'A sign that says "{text}".\n' for text in ("42", "7", "e", "a")]
    (directory / "few.txt").write_text("".join(few))
    (directory / "one.txt").write_text(few[0])


Pair = tuple[float, float]
"""How far weights were moved, and how far those of the CPU and of the device are apart, in all."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """What came of each case; one program runs all, since its imports take longer than any of them."""
    directory = tmp_path_factory.mktemp("both")
    write_prompts(directory)
    cases = {name: f"{SHORT} {more}" for name, more in EMBEDDED.items()}
    for name, make in CHECKPOINTS.items():
        cases[name] = f"{CHECKPOINT} model.name={name} model.path={make(directory / name)}"
    command = [sys.executable, str(ROOT / "tests" / "fake_gpu.py"), str(settings_file(directory)), *cases.values()]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert told.returncode == 0, told.stderr
    lines = map(str.split, told.stdout.splitlines())
    return {name: (float(moved), float(apart)) for name, (moved, apart) in zip(cases, lines, strict=True)}


@pytest.mark.parametrize("name", [*EMBEDDED, *CHECKPOINTS])
def test_every_algorithm_and_checkpoint_keeps_to_its_device(found: dict[str, Pair], name: str) -> None:
    moved, apart = found[name]

    assert apart < moved * ROUNDED
