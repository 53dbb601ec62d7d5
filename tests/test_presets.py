"""The recipes of examples/presets: each number has its source, and what is said to be another preset's is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from runs import ROOT

PRESETS = sorted((ROOT / "examples" / "presets").glob("*.toml"))
RECIPE = ("rollout", "exploration", "train")
TOLD = {"algorithm", "learning_rate", "updates", "kl", "advantage_std", "max_grad_norm", "weight_decay", "lora_rank"}
"""What changes what is learnt and is easily left to a default."""
LINE = re.compile(r"^(?P<key>\w+) = [^#]+?(?: # (?P<source>.+))?$")


def recipe(preset: Path) -> list[tuple[str, str, str]]:
    """Section, key and source of each number."""
    found, section = [], ""
    for line in preset.read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section in RECIPE and (said := LINE.match(line)) and said["key"] != "algorithm":
            found.append((section, said["key"], said["source"] or ""))
    return found


def values(preset: Path) -> dict[str, Any]:
    return tomllib.loads(preset.read_text("utf-8"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_each_number_names_its_source(preset: Path) -> None:
    sources = set(re.findall(r"\[(\w+)\]", preset.read_text("utf-8").split("[run]")[0]))

    without = [key for _, key, source in recipe(preset) if not re.search(rf"\[({'|'.join(sources)})\]|Sol-RL", source)]

    assert without == []
    assert values(preset)["train"].keys() >= TOLD


@pytest.mark.parametrize("name", ["grpo-guard", "mixgrpo", "dancegrpo"])
def test_advantages_are_divided_by_each_prompts_own_spread_where_the_published_recipe_has_it_so(name: str) -> None:
    """GRPO-Guard's configuration has ``global_std = False``, MixGRPO's script and DanceGRPO's ``--use_group``."""
    assert values(ROOT / "examples" / "presets" / f"{name}.toml")["train"]["advantage_std"] == "group"


@pytest.mark.parametrize("name", ["xfuser", "spot-heavy", "as-drawn"])
def test_what_is_said_to_be_the_nft_recipes_is(name: str) -> None:
    preset, nft = ROOT / "examples" / "presets" / f"{name}.toml", values(ROOT / "examples" / "presets" / "nft.toml")

    told = [(section, key) for section, key, source in recipe(preset) if "[nft]" in source]

    assert len(told) > 5
    assert {at: values(preset)[at[0]][at[1]] for at in told} == {at: nft[at[0]][at[1]] for at in told}
