"""The promises of docs/extending.md, kept with the examples that it prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from runs import ROOT, settings_file
from spotlight import config
from spotlight.config import Config
from spotlight.display import summary_table
from spotlight.inputs import check_inputs
from spotlight.records import Prompt, SpotlightError
from spotlight.report import write_report
from spotlight.rl import rewards
from spotlight.rl.models import Conditioning, Model
from spotlight.rl.models.flux import Flux
from spotlight.rl.models.qwen_image import QwenImage
from spotlight.rl.models.qwen_transformer import QwenTransformer
from spotlight.rl.models.sd3 import StableDiffusion3
from spotlight.rl.models.tiny_text import TinyText
from spotlight.rl.prompts import read_prompts
from spotlight.rl.rewards import Scorer
from spotlight.simulation import Simulation
from spotlight.strategies import strategies

PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")


def example(heading: str, language: str) -> str:
    """The first block of a language under a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    assert found, f"{heading} has no example in {language}"
    return found[1]


@pytest.fixture
def brightness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's scorer, in the file that the page names."""
    (tmp_path / "mine.py").write_text(example("A reward", "python"))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def without_quotes(directory: Path) -> Config:
    """Settings of a run on prompts that name no text, for the page's scorer."""
    prompts = directory / "prompts.txt"
    prompts.write_text("a bright sign\na dark sign\na grey sign\n")
    changed = [f"data.{name}_prompts={prompts}" for name in ("train", "validation")]
    return config.load(settings_file(directory), [*changed, "reward.name=mine:Brightness", "run.iterations=1"])


class Counting(Scorer):
    """A person's own, that wants more of a prompt than its text."""

    def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
        return [json.loads(prompt.metadata)["count"] / 10 for prompt in prompts]

    def check_prompt(self, prompt: Prompt) -> None:
        if json.loads(prompt.metadata or "{}").get("count") is None:
            raise ValueError("it has no count")


class Nothing(Scorer):
    """Scores nothing."""


def test_a_reward_may_want_whole_prompts_and_say_so_by_any_error(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "count": 3}\n{"prompt": "b"}\n')
    changed = [f"data.{name}_prompts={prompts}" for name in ("train", "validation")]
    settings = config.load(settings_file(tmp_path), [*changed, f"reward.name={__name__}:Counting"])

    scorer = rewards.build(settings.reward)

    first, _ = read_prompts(prompts)
    assert scorer.of(np.zeros((1, 2, 2, 3), np.uint8), [first]) == [0.3]
    with pytest.raises(
        SpotlightError, match=r"prompts\.jsonl:2: the reward refuses it: ValueError\('it has no count'\)"
    ):
        check_inputs(settings)


class Unlicensed(Counting):
    """Cannot be made."""

    def __init__(self, key: str = "") -> None:
        raise RuntimeError("no license")


class Undecided(Counting):
    """Says no, where it has to raise."""

    def check_prompt(self, prompt: Prompt) -> None:
        return False  # type: ignore[return-value]


class Awaited(Scorer):
    """Wants to be awaited."""

    async def __call__(self, images_BHWC: Any, prompts: Any) -> list[float]:  # type: ignore[override]
        return [0.0 for _ in images_BHWC]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Awaited", r"__call__ is a coroutine, which nothing awaits: write `def` instead of `async def`"),
        ("Nothing", "scores nothing: give it __call__"),
        ("Unlicensed", r"cannot be made: RuntimeError: no license \(.*test_extending\.py:\d+\)"),
        ("no:Such", r"No module named 'no'.*PYTHONPATH"),
        ("./mine.py:Such", r"names no module: .* mypkg/mine\.py is mypkg\.mine"),
        ("broken:Such", r"cannot be imported \(SyntaxError: .*broken\.py, line 1"),
        ("raising:Such", r"cannot be imported \(ZeroDivisionError: division by zero \(.*raising\.py:2\)\)"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    (tmp_path / "broken.py").write_text("class Such(\n")
    (tmp_path / "raising.py").write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = name if ":" in name else f"{__name__}:{name}"
    settings = config.load(settings_file(tmp_path), [f"reward.name={named}"])

    with pytest.raises(SpotlightError, match=says):
        rewards.build(settings.reward)


def test_options_that_are_no_arguments_are_told_from_faults(tmp_path: Path) -> None:
    named = [f"reward.name={__name__}:Unlicensed", "reward.options={kee='a'}"]
    settings = config.load(settings_file(tmp_path), named)

    with pytest.raises(SpotlightError, match="its options do not fit: got an unexpected keyword argument 'kee'"):
        rewards.build(settings.reward)


def test_a_check_that_answers_is_refused(tmp_path: Path) -> None:
    settings = config.load(settings_file(tmp_path), [f"reward.name={__name__}:Undecided"])

    with pytest.raises(SpotlightError, match=r"digits-train\.txt:1: the reward's check returned False: it has to"):
        check_inputs(settings)


class Same(Scorer):
    """Tells no image from another."""

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        return [0.5] * len(prompts)


class Faceless(Scorer):
    """Finds nothing to score in some images, always the same ones."""

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        if any(crc32(image.tobytes()) % 6 == 0 for image in images_BHWC):
            raise ValueError("no face")
        return [float(image.mean()) / 255 for image in images_BHWC]


def test_images_without_a_reward_are_replaced_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config.load(
        settings_file(tmp_path), [f"reward.name={__name__}:Faceless", "reward.attempts=1", "run.iterations=2"]
    )
    run = Simulation("faceless", settings, "real")
    run.go(report=False)

    told = [message for message in caplog.messages if "no face" in message]
    assert any(
        re.match(r"iteration \d: \d+ images had no reward, and others were drawn in their pl", each) for each in told
    )
    assert any(re.match(r"exploration for iteration 1: \d+ of \d+ candidates have no reward: ", each) for each in told)
    assert any(
        re.match("the reward Faceless failed for several images at once, so each is scored alone: ", each)
        for each in told
    )
    samples = {row.metrics["samples"] for row in run.directory.history()}
    assert samples == {float(settings.rollout.prompts * settings.rollout.seeds_kept)}


def test_exploration_for_nothing_is_told_of_once_and_counted_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["run.iterations=4", "train.timesteps=1", "exploration.request_seeds=8", "exploration.rounds=1"]
    settings = config.load(settings_file(tmp_path), [*overrides, "exploration.budget=time", "exploration.steps=60"])
    run = Simulation("slow", settings, "modelled")

    run.go(report=True)

    assert ["for nothing" in message for message in caplog.messages] == [True]
    said = [str(cell) for column in summary_table(run.directory).columns for cell in column.cells]
    assert "3 of 4 iterations: no seed was scored before training ended" in said
    assert "For 3 of 4 iterations no seed was scored" in write_report(run.directory.path).read_text("utf-8")


def test_a_reward_that_teaches_nothing_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config.load(settings_file(tmp_path), [f"reward.name={__name__}:Same", "run.iterations=1"])

    Simulation("same", settings, "real").go(report=False)

    assert "iteration 0: all images of each prompt have the same reward, so they teach nothing" in caplog.messages


@pytest.mark.usefixtures("brightness")
def test_a_reward_of_three_lines_trains_on_prompts_without_quoted_text(tmp_path: Path) -> None:
    settings = without_quotes(tmp_path)

    check_inputs(settings)
    simulation = Simulation("brightness", settings, "real")
    simulation.go(report=False)

    before, after = simulation.directory.validation()
    assert before.version == 0
    assert after.version == 1
    assert all(0 < reward < 1 for row in (before, after) for reward in row.rewards if reward is not None)


def test_every_reward_of_the_table_can_be_had_by_its_name() -> None:
    for name, kind in rewards.SCORERS.items():
        assert isinstance(rewards.load(name), kind)


class Stripes(QwenTransformer):
    """A model of the page's methods, around the embedded model's transformer."""

    small_px = (16, 32)

    @classmethod
    def load(cls) -> Stripes:
        model = cls()
        model.transformer, model.device = TinyText().transformer, torch.device("cpu")
        model.transformer.requires_grad_(False)
        return model

    def encode(self, texts: Sequence[str]) -> Conditioning:
        embeds_BTD = torch.ones(len(texts), 8, self.transformer.config["joint_attention_dim"])
        return Conditioning(embeds_BTD=embeds_BTD, mask_BT=torch.ones(len(texts), 8, dtype=torch.bool))

    def grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        return height_px // 4, width_px // 4

    def sigmas(self, steps: int, height_px: int, width_px: int) -> tuple[float, ...]:
        return tuple(1 - step / steps for step in range(steps + 1))

    def decode(self, x_BNC: Tensor, height_px: int, width_px: int) -> NDArray[np.uint8]:
        return np.zeros((len(x_BNC), height_px, width_px, 3), dtype=np.uint8)


def test_the_methods_of_a_model_are_those_that_the_page_lists() -> None:
    section = PAGE.partition("\n## A model\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)", section, flags=re.MULTILINE))

    assert listed == Model.__abstractmethods__ | {"load"}
    assert all(callable(kind.load) for kind in (TinyText, QwenImage, StableDiffusion3, Flux))


def test_a_model_of_these_methods_predicts_trains_and_takes_back_what_it_trained() -> None:
    model = Stripes.load()
    model.make_trainable(rank=2, alpha=0.0, seed=0)
    tokens, channels = model.latent_shape(16, 32)
    x_BNC, sigma_B = torch.ones(2, tokens, channels), torch.tensor([1.0, 0.5])

    def velocity() -> Tensor:
        return model.velocity(x_BNC, sigma_B, model.encode(["a", "b"]), height_px=16, width_px=32, guidance=2.0)

    start = {name: value.clone() for name, value in model.trainable().items()}
    before_BNC = velocity()
    before_BNC.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    changed_BNC = velocity()
    model.load_trainable(start)

    assert before_BNC.shape == x_BNC.shape
    assert not torch.equal(changed_BNC, before_BNC)
    assert torch.equal(velocity(), before_BNC)


def test_the_pool_of_the_page_loses_a_worker_and_is_paid_for_while_its_workers_are_there(tmp_path: Path) -> None:
    file = settings_file(tmp_path, validated=20)
    file.write_text(re.sub(r"\[pools\.spot\]\n(.+\n)+", example("A pool", "toml"), file.read_text()))
    (tmp_path / "trace.csv").write_text(example("A pool", "csv"))

    settings = config.load(file, ["pools.spot.speedup=10", "run.iterations=3", "run.validate_every=3"])
    simulation = Simulation("pool", settings, "modelled")
    outcome = simulation.go(report=False)

    lives = [life for life in simulation.lives if life.pool == "spot"]
    (lost,) = [life for life in lives if life.reason == "left"]
    first_s = min(life.joined_s for life in lives)
    assert (lost.left_s or 0.0) - first_s == pytest.approx(2.0, abs=0.1)  # the trace begins with its first worker
    assert [life.joined_s - first_s > 4.0 for life in lives] == [False, False, True]
    seconds = sum((life.left_s or 0.0) - life.joined_s for life in lives)
    assert outcome.ledger.usd(pool="spot") == pytest.approx(seconds * 3.0 / 3600)


def test_the_strategies_of_the_page_are_run_as_written(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    file.write_text(file.read_text() + example("A strategy", "toml"))
    settings = config.load(file)

    compared = dict(strategies(settings))

    unlike = {name: _differing(settings, each) for name, each in compared.items()}
    assert unlike == {"no exploration": {"strategy"}, "twice the spot workers": {"pools"}}
    for name, each in compared.items():
        simulation = Simulation(name, each, "modelled")
        simulation.go(report=False)
        assert len(simulation.directory.history()) == settings.run.iterations


def _differing(first: Config, other: Config) -> set[str]:
    """Sections that are not the same, but for the list of strategies itself."""
    return {name for name, section in first if section != getattr(other, name)} - {"simulation"}
