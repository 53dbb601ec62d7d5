"""Claims about settings: what is read, what is refused, and how the refusal helps."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight import files
from spotlight.config import Config, Section, changed, dump, load, resolve
from spotlight.config.doubts import ALL_WEIGHTS_RATE
from spotlight.market.prices import read_prices, usd_per_h
from spotlight.market.trace_files import read_trace
from spotlight.records import SpotlightError
from spotlight.rl.prompts import read_prompts

DATA = '[data]\ntrain_prompts = "train.txt"\nvalidation_prompts = "validation.txt"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The least that a settings file must hold; tests append to it."""
    path = tmp_path / "run.toml"
    path.write_text(DATA)
    return path


def refusal(file: Path, *overrides: str) -> str:
    """Of the file, or of one with these values in it."""
    with pytest.raises(SpotlightError) as raised:
        _load(file, overrides)
    return str(raised.value)


def _load(file: Path, overrides: Sequence[str]) -> None:
    if not overrides:
        load(file)
    before = file.read_bytes()
    file.write_bytes(changed(before, overrides))
    try:
        load(file)
    finally:
        file.write_bytes(before)


def test_a_file_with_data_alone_gets_the_defaults(file: Path) -> None:
    config = load(file)

    assert config.rollout.seeds_kept == type(config.rollout)().seeds_kept
    assert config.strategy.exploration == "stale"


def test_paths_are_relative_to_the_settings_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")

    config = load(file, ["model.name=qwen-image", "model.path=checkpoint", "model.height_px=512", "model.width_px=512"])

    assert config.data.train_prompts == str(file.parent / "train.txt")
    assert config.model.path == str(file.parent / "checkpoint")


def test_a_path_may_begin_with_a_home_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    config = load(file, ["data.train_prompts=~/train.txt", "run.dir=~/runs", "latents.url=./~/latents"])

    assert config.data.train_prompts == "/home/me/train.txt"
    assert config.run.dir == "/home/me/runs"
    assert config.latents.url == str(file.parent / "~" / "latents")
    for setting in ("data.train_prompts", "run.dir", "reward.options.head"):
        with pytest.raises(SpotlightError, match=f"{setting} = '~nobody-here/x': there is no such user"):
            load(file, ["reward.name=aesthetic", f"{setting}=~nobody-here/x"])
    with pytest.raises(SpotlightError, match="data.train_prompts = .*: there is no such user"):
        load(file, ["data.train_prompts=~\0"])


def test_settings_survive_being_written_and_read(file: Path) -> None:
    config = load(file, ["rollout.sde_window=[1, 3]", "train.learning_rate=1e-5", 'strategy.rollout_pools=["spot"]'])
    copy = file.parent / "elsewhere" / "config.toml"
    copy.parent.mkdir()

    copy.write_text(dump(config))

    assert load(copy) == config


@given(
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(1e-300, 1),
    name=st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/-"), min_size=1, max_size=25),
)
def test_any_value_survives_being_written_and_read(seed: int, rate: float, name: str) -> None:
    tree = {
        "run": {"seed": seed, "name": name},
        "train": {"learning_rate": rate},
        "data": {"train_prompts": "/train.txt", "validation_prompts": "/validation.txt"},
    }

    config = resolve(tree, Path("/"))

    assert resolve(tomllib.loads(dump(config)), Path("/")) == config


def test_settings_cannot_be_changed_after_reading(file: Path) -> None:
    config = load(file)

    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]  # the error that a type checker reports, too


def test_every_refusal_begins_with_the_file(file: Path) -> None:
    lines = refusal(file, "run.seed=-1", "run.iteration=3", "rollout.steps=many").splitlines()

    assert len(lines) == 3
    assert all(line.startswith(f"{file}: ") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["rollout.steps=many"], "--set 'rollout.steps'"),
        (["rollout.steps=4", "rollout.steps=many"], "--set 'rollout.steps'"),
        (["run.iteration=3"], "--set 'run.iteration'"),
        (["runs.seed=3"], "FILE with --set 'runs.seed'"),
        (["pools.spot.gpu=h99", "pools.spot.workers=1"], "FILE with --set 'pools.spot.gpu'"),
        (["model.path=a\0b"], "--set 'model.path'"),
        (["pools.spot.workers=1"], "FILE"),  # its price is missing
    ],
)
def test_a_refused_override_is_named_as_the_place(file: Path, overrides: list[str], place: str) -> None:
    with pytest.raises(SpotlightError) as raised:
        load(file, overrides)

    assert str(raised.value).startswith(f"{place.replace('FILE', str(file))}: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "exploration.seed_tried=3",
            "[exploration] has no field 'seed_tried' (did you mean 'seeds_tried'?); "
            "it has 'budget', 'planner', 'prompts', 'request_seeds', 'reuse', 'rounds', 'seeds_tried', 'steps'",
        ),
        (
            "latents.trace=a.csv",
            "[latents] has no field 'trace' (did you mean pools.reserved.trace or pools.spot.trace or "
            "pools.reward.trace?); it has 'keep', 'url'",
        ),
        ("latents.zzz=1", "[latents] has no field 'zzz'; it has 'keep', 'url'"),
        (
            "pools.spott.workers=1",
            "[pools] has no field 'spott' (did you mean 'spot'?); it has 'reserved', 'reward', 'spot'",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_known_ones(file: Path, override: str, message: str) -> None:
    text = refusal(file, "pools.spot.usd_per_h=1", override)

    assert text == f"{file}: {message}"


def test_an_override_without_its_section_is_told_where_it_belongs(file: Path) -> None:
    with pytest.raises(SpotlightError, match=r"--set 'iterations=3': expected .* \(did you mean run\.iterations\?\)"):
        load(file, ["iterations=3"])


def test_a_run_is_no_settings_file(file: Path) -> None:
    (file.parent / "config.toml").write_text(dump(load(file)))

    with pytest.raises(SpotlightError, match=f"is a run, and no settings file: `spotlight resume {file.parent}`"):
        load(file.parent)


def test_an_unknown_field_of_a_pool_is_refused_with_the_known_ones(file: Path) -> None:
    text = refusal(file, "pools.spot.gpu=h100", "pools.spot.zzz=1")

    known = ", ".join(map(repr, sorted(type(load(file).pools.spot).model_fields)))
    assert text == f"{file}: [pools.spot] has no field 'zzz'; it has {known}"


def test_a_pools_gpu_sets_its_price_unless_the_settings_do(file: Path) -> None:
    overrides = ["pools.reserved.gpu=h100-aws", "pools.spot.gpu=h100-aws", "pools.spot.usd_per_h=1.5"]

    config = load(file, overrides)

    assert config.pools.reserved.usd_per_h == usd_per_h("h100-aws", "reserved")
    assert config.pools.spot.usd_per_h == 1.5


def test_an_unlisted_gpu_needs_a_price(file: Path) -> None:
    text = refusal(file, "pools.spot.gpu=h99")

    assert text.startswith(
        f"{file}: pools.spot.gpu = 'h99' is not in the price list, which has 'a100-80gb', 'cpu', 'h100',"
    )
    assert load(file, ["pools.spot.gpu=h99", "pools.spot.usd_per_h=1"]).pools.spot.gpu == "h99"


def test_a_gpu_that_may_be_misspelt_is_asked_about(file: Path) -> None:
    price = "pools.spot.usd_per_h=1"

    assert "pools.spot.gpu = 'CPU': is 'cpu' meant?" in refusal(file, "pools.spot.gpu=CPU", price)
    (doubt,) = load(file, ["pools.spot.gpu=h1000", price]).doubts
    assert doubt.startswith("pools.spot.gpu = 'h1000' is not in the price list (did you mean 'h100'?)")
    assert load(file, ["pools.spot.gpu=h100-elsewhere", price]).doubts == ()


def test_a_pools_gpu_that_changes_no_pace_is_told_of(file: Path) -> None:
    paced = ["pace.gpu=h100", "pools.reserved.gpu=h100-aws", "pools.spot.workers=1"]

    assert load(file, [*paced, "pools.spot.gpu=h100"]).doubts == ()
    (doubt,) = load(file, [*paced, "pools.spot.gpu=l40s"]).doubts

    assert doubt.startswith("pools.spot.gpu = 'l40s' sets the price alone: with [pace], whose gpu is 'h100'")


def test_an_unknown_source_of_notices_is_named_beside_the_known_ones(file: Path) -> None:
    text = refusal(file, 'pools.spot.notices=["sigterm", "telegram"]', "pools.spot.usd_per_h=1")

    assert text.startswith(f"{file}: pools.spot.notices = ['sigterm', 'telegram']: there is no source 'telegram'; ")
    assert text.endswith("'azure' (these three also as 'aws:http://HOST:PORT')")


def test_a_gpu_that_is_no_name_is_refused(file: Path) -> None:
    assert "pools.spot.gpu = [1]: input should be a valid string" in refusal(file, "pools.spot.gpu=[1]")


def test_a_price_written_by_one_run_outlives_the_list(file: Path) -> None:
    copy = file.with_name("config.toml")

    copy.write_text(dump(load(file, ["pools.spot.gpu=l40s"])))

    assert f"usd_per_h = {usd_per_h('l40s', 'spot')}" in copy.read_text()


def test_files_of_prices_are_relative_to_the_settings_file(file: Path) -> None:
    config = load(file, ["pools.spot.gpu=h100", "pools.spot.prices=spot.csv"])

    assert config.pools.spot.prices == str(file.parent / "spot.csv")
    assert config.pools.reserved.prices == ""


@pytest.mark.parametrize(
    ("name", "size"), [("tiny-text", (16, 32)), ("tiny-mixed", (16, 48)), ("tiny-shapes", (24, 24))]
)
def test_an_embedded_model_has_the_size_that_it_draws(file: Path, name: str, size: tuple[int, int]) -> None:
    model = load(file, [f"model.name={name}"]).model

    assert (model.height_px, model.width_px) == size


def test_an_unknown_section_is_refused_with_the_known_ones(file: Path) -> None:
    text = refusal(file, "explorer.rounds=1")

    assert "there is no section 'explorer' (did you mean 'exploration'?); there are 'cluster', 'data'," in text
    assert all(repr(section) in text for section in Config.model_fields)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=x", "run.seed = 'x': input should be a valid integer"),
        ("run.seed=1.5", "run.seed = 1.5: input should be a valid integer"),
        ("run.seed=-1", "run.seed = -1: input should be greater than or equal to 0"),
        ("model.path=3", "model.path = 3: expected a text, so put it into quotation marks"),
        ("train.learning_rate=nan", "train.learning_rate = nan: input should be a finite number"),
        ("strategy.exploration=stall", "strategy.exploration = 'stall': input should be 'stale', 'blocking' or 'off'"),
        ("reward.options.graded=no", "reward.options.graded = 'no' of 'ocr' must be true or false"),
        ("rollout.sde_window=[1, 2, 3]", "rollout.sde_window = [1, 2, 3]: tuple should have at most 2 items"),
        ("strategy.rollout_pools=spot", """strategy.rollout_pools = 'spot': expected a list, such as ["spot"]"""),
        ("data.train_prompts=''", "data.train_prompts = '': string should have at least 1 character"),
        (
            "model.height_px=32",
            "model.height_px x model.width_px is 32 x 32, and 'tiny-text' draws 16 x 32 only: leave",
        ),
        ("train.lora_alpha=null", "train.lora_alpha = 'null': TOML has no null; leave it out, and it has its default"),
        ("rollout.sde_window=['a', 2]", "rollout.sde_window.0 = 'a': input should be a valid integer"),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_should_be(file: Path, override: str, message: str) -> None:
    text = refusal(file, override)

    assert message in text


def test_a_value_in_place_of_a_section_is_refused_with_its_fields(file: Path) -> None:
    file.write_text("latents = 3\n" + DATA)

    assert refusal(file) == f"{file}: latents = 3, but it is a section; it has 'keep', 'url'"


def test_a_missing_section_is_refused_with_its_fields(file: Path) -> None:
    file.write_text("")

    assert refusal(file) == f"{file}: the section [data] is missing; it has 'train_prompts', 'validation_prompts'"


def test_a_missing_field_is_refused_by_its_full_name(file: Path) -> None:
    text = refusal(file, "pools.spot.workers=3")

    assert text == (
        f"{file}: pools.spot.usd_per_h is missing: give a worker's price per hour, or pools.spot.gpu, whose listed "
        "price is taken"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.name=first try", "first try"),
        ("run.name='quoted'", "quoted"),
        ("run.name=a=b", "a=b"),
        (" run . name = spaced ", "spaced"),
    ],
)
def test_an_overrides_bare_words_are_text(file: Path, override: str, expected: str) -> None:
    config = load(file, [override])

    assert config.run.name == expected


def test_overrides_reach_nested_sections_and_the_last_one_counts(file: Path) -> None:
    overrides = [
        "pools.spot.usd_per_h=1.5",
        "pools.spot.workers=3",
        "pools.spot.workers=4",
        "rollout.sde_window=[2, 4]",
    ]

    config = load(file, overrides)

    assert (config.pools.spot.usd_per_h, config.pools.spot.workers) == (1.5, 4)
    assert config.rollout.sde_window == (2, 4)


def test_overrides_win_over_the_file(file: Path) -> None:
    file.write_text(DATA + "[run]\nseed = 1\nname = 'kept'\n")

    config = load(file, ["run.seed=2"])

    assert (config.run.seed, config.run.name) == (2, "kept")


@pytest.mark.parametrize("override", ["run.seed", "seed=3", ".seed=3", "run.=3", "=3", ""])
def test_a_malformed_override_is_refused_with_an_example(file: Path, override: str) -> None:
    text = refusal(file, override)

    expected = f"--set {override!r}: expected section.key=value, for example --set run.seed=3"
    assert text == f"{expected}{' (did you mean run.seed?)' if override == 'seed=3' else ''}"


def test_an_override_below_a_value_is_refused(file: Path) -> None:
    text = refusal(file, "run.seed=3", "run.seed.low=3")

    assert text == "--set 'run.seed.low=3': 'seed' is a value, not a section"


@pytest.mark.parametrize("content", [b"[run\nseed = 1", b"[run]\nname = '\xff'"])
def test_a_file_that_is_not_toml_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    assert refusal(file).startswith(f"{file}: not valid TOML: ")


def test_a_missing_file_is_refused_with_a_place_to_start(file: Path) -> None:
    absent = file.with_name("absent.toml")

    assert refusal(absent) == f"{absent}: no such settings file; examples/ holds some to start from"
    with pytest.raises(SpotlightError, match="^'' is no settings file: name one"):
        load("")


def test_a_directory_is_refused_as_a_settings_file(file: Path) -> None:
    assert refusal(file.parent).startswith(f"{file.parent}: cannot be read as a settings file: ")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["pools.reserved.workers=0", "pools.reserved.usd_per_h=1"], ["pools.reserved.workers"]),
        (["exploration.seeds_tried=4"], ["exploration.seeds_tried = 4", "rollout.seeds_kept = 8"]),
        (["rollout.prompts_ahead=4"], ["rollout.prompts_ahead = 4", 'strategy.exploration = "stale"']),
        (
            ["exploration.reuse=true", "train.algorithm=grpo", "rollout.sampler=sde"],
            ["exploration.reuse = true", 'train.algorithm = "grpo"', "exploration.reuse = false"],
        ),
        (["rollout.prompts_ahead=99"], ["rollout.prompts_ahead = 99", "rollout.prompts = 8: lower it"]),
        (
            ["rollout.prompts_ahead=4", "strategy.exploration=off", "strategy.on_preemption=restart"],
            ["rollout.prompts_ahead = 4", 'on_preemption = "restart"'],
        ),
        (
            ["rollout.prompts_ahead=4", "strategy.exploration=off", 'strategy.rollout_pools=["reserved"]'],
            ["rollout.prompts_ahead = 4", "there are none"],
        ),
        (
            ["rollout.prompts_ahead=4", "strategy.exploration=off", "train.algorithm=dpo"],
            ["rollout.prompts_ahead = 4", 'train.algorithm = "dpo"'],
        ),
        (["train.seeds_used=1"], ["train.seeds_used = 1", "from 2 to rollout.seeds_kept = 8"]),
        (["train.seeds_used=9"], ["train.seeds_used = 9", "from 2 to rollout.seeds_kept = 8"]),
        (
            ["train.algorithm=dpo", "train.dpo_pairs=1", "train.updates=9"],
            ["train.updates = 9 is more than the 8 pairs"],
        ),
        (
            ["train.algorithm=dpo", "train.dpo_pairs=9", "train.updates=33"],
            ["train.updates = 33 is more than the 32 pairs"],
        ),
        (
            [
                "rollout.prompts_ahead=4",
                "strategy.exploration=off",
                "pools.spot.workers=0",
                "pools.spot.usd_per_h=1",
            ],
            ["rollout.prompts_ahead = 4", "there are none"],
        ),
        (
            ["run.validate_policy=old", "train.old_decay=copy"],
            ["run.validate_policy", "train.old_decay = 'copy' keeps no such weights: set train.old_decay"],
        ),
        (
            ["run.validate_policy=old", "train.algorithm=awm"],
            ['run.validate_policy = "old" with train.algorithm = "awm"', 'set run.validate_policy = "auto"'],
        ),
        (["train.seeds_used=2", "train.updates=17"], ["train.updates = 17", "train.seeds_used = 16 samples"]),
        (["pools.spot.workers=0", "pools.spot.usd_per_h=1"], ['strategy.exploration = "stale"', "pools.spot.workers"]),
        (["train.algorithm=grpo"], ['train.algorithm = "grpo"', 'rollout.sampler = "ode"']),
        (
            ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window=[0, 4]", "train.steps_used=5"],
            ["train.steps_used = 5 is more than the 4 stochastic steps"],
        ),
        (["rollout.same_noise=true", "strategy.exploration=off"], ['rollout.sampler = "ode"', "would be one"]),
        (["rollout.same_noise=true", "rollout.sampler=sde"], ["rollout.same_noise", 'exploration = "off"']),
        (["rollout.sampler=sde", "rollout.sde_window=[3, 3]"], ["rollout.sde_window = [3, 3]"]),
        (
            ["rollout.sampler=sde", "rollout.sde_window=[6, 8]", "rollout.steps=8"],
            ["rollout.sde_window = [6, 8]", "[0, 7]"],
        ),
        (["strategy.rollout_pools=[]"], ["strategy.rollout_pools is empty"]),
        (["strategy.widths=[2, 1]"], ["strategy.widths = [2, 1]", "ascending", "[1, 2, 4]"]),
        (["strategy.widths=[]"], ["strategy.widths = []", "from 1 on"]),
        (["strategy.widths=[4]"], ["needs 4 workers on one machine", "rollouts have machines of 2"]),
        (
            [
                *("strategy.widths=[2]", "pools.reserved.workers=2", "pools.reserved.usd_per_h=1"),
                *("pools.spot.workers_per_node=1", "pools.spot.usd_per_h=1"),
                *("strategy.exploration=off", "rollout.prompts_ahead=2"),
            ],
            ["needs 2 workers on one machine", "(rollout.prompts_ahead) have machines of 1", "workers to pools.spot"],
        ),
        (["train.width=4"], ["train.width = 4 needs as many workers", "machines of 1"]),
        (["strategy.widths=[1, 4]", "strategy.elastic=false"], ["needs 4 workers on one machine", "narrower"]),
        (
            [
                'strategy.rollout_pools=["spot"]',
                "strategy.exploration=off",
                "pools.spot.workers=0",
                "pools.spot.usd_per_h=1",
            ],
            ['strategy.rollout_pools = ["spot"]', "pools.spot.workers"],
        ),
        (["strategy.train_pools=[]"], ["strategy.train_pools is empty"]),
        (
            [
                'strategy.train_pools=["spot"]',
                "strategy.exploration=off",
                "pools.spot.workers=0",
                "pools.spot.usd_per_h=1",
            ],
            ['strategy.train_pools = ["spot"]', "nobody would compute gradients"],
        ),
        (["pools.reserved.gpu=cpu"], ['pools.reserved.gpu = "cpu"', "only take the updates", 'train_pools = ["spot"]']),
        (["model.name=qwen-image"], ['model.name = "qwen-image"', "model.path"]),
        (["sp.backend=xfuser"], ['sp.backend = "xfuser"', 'model.name is "tiny-text"', 'sp.backend = "native"']),
        (["model.shift=3"], ["model.text_tokens and model.shift", "'tiny-text' is an embedded model"]),
        (["model.text_tokens=128"], ["model.text_tokens and model.shift", "'tiny-text' is an embedded model"]),
        (
            ["model.name=sd3", "model.path=x", "model.text_tokens=520"],
            ["model.text_tokens = 520", "'sd3' reads 512 at most"],
        ),
        (["model.name=flux", "model.path=x"], ['model.name = "flux"', "model.height_px and model.width_px", "512"]),
        (["run.dir=s3:/bucket/runs"], ["run.dir = 's3:/bucket/runs'", "two slashes", "s3://bucket/runs"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    file: Path, overrides: list[str], names: list[str]
) -> None:
    text = refusal(file, *overrides)

    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["exploration.seeds_tried=4", "strategy.exploration=off"],
        ["pools.spot.workers=0", "pools.spot.usd_per_h=1", "strategy.exploration=blocking"],
        ["train.algorithm=grpo", "rollout.sampler=sde"],
        ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window=[0, 4]", "train.steps_used=4"],
        ["train.steps_used=5"],
        ["train.algorithm=grpo", "rollout.sampler=sde", "exploration.reuse=true", "strategy.exploration=off"],
        ["train.algorithm=dpo", "train.dpo_pairs=1", "train.updates=8"],
        ["train.updates=64"],
        ["train.seeds_used=8"],
        ["rollout.prompts_ahead=8", "strategy.exploration=off"],
        ["exploration.prompts=8"],
        ["exploration.prompts=4", "strategy.exploration=off"],
        ["run.validate_policy=old"],
        ["run.validate_policy=average", "train.ema_decay=0.9"],
        ["rollout.sampler=cps", "rollout.noise_level=1"],
        ["rollout.sampler=cps", "rollout.sde_window=[6, 7]", "rollout.steps=8"],
        ["rollout.sampler=ode", "rollout.sde_window=[9, 9]"],
    ],
)
def test_settings_that_agree_are_taken(file: Path, overrides: list[str]) -> None:
    config = load(file, overrides)

    assert isinstance(config, Config)


@pytest.mark.parametrize(
    "example", sorted(Path(__file__).parents[1].glob("examples/**/*.toml")), ids=lambda path: path.name
)
def test_the_examples_are_valid_and_their_prompts_exist(example: Path) -> None:
    config = load(example)

    assert Path(config.data.train_prompts).is_file()
    assert Path(config.data.validation_prompts).is_file()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.dtype=bfloat16"], 'model.dtype = "bfloat16" and train.lora_rank = 0'),
        (["model.dtype=float16"], 'model.dtype = "float16" and train.lora_rank = 0'),
        (["rollout.sde_window=[1, 3]", "rollout.sde_window_size=3"], "sde_window_size = 3 does not fit"),
        (["train.algorithm=grpo-guard", "rollout.sampler=cps"], 'rollout.sampler = "sde", and that is "cps"'),
        (["train.algorithm=grpo-guard"], 'rollout.sampler = "ode" has none'),
        (["rollout.sampler=cps", "rollout.noise_level=2"], "above 1 a step has less noise again"),
        (["reward.weight=0"], "reward.weight = 0 counts nothing"),
        (["run.dir="], 'run.dir = "": name a directory'),
        (["reward.range=[1, 0]"], "reward.range = [1.0, 0.0] must be"),
        (["reward.range=[0.5, 0.5]"], "reward.range = [0.5, 0.5] must be"),
    ],
)
def test_learning_that_cannot_work_is_refused(file: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trace_offset_h=3"], "trace_offset_h = 3.0 counts nothing without a trace; set trace or trace_model"),
        (["speedup=60"], "speedup = 60.0 counts nothing without a trace"),
        (["preemption=notice"], "preemption = 'notice' counts nothing without a trace"),
        (["trace_share=0.5"], "trace_share = 0.5 counts nothing without a trace"),
        (["trace_share=0.5", "trace_model=calm"], "trace_share = 0.5 counts nothing without a file"),
        (["replace_after_s=60", "trace_model=calm"], "replace_after_s = 60.0 counts nothing along a trace"),
    ],
)
def test_what_says_how_to_follow_a_trace_is_doubted_without_one(file: Path, overrides: list[str], says: str) -> None:
    (doubt,) = load(file, [f"pools.spot.{each}" for each in ("gpu=h100", *overrides)]).doubts

    assert doubt.startswith(f"pools.spot.{says}")
    followed = ("gpu=h100", "trace=a.csv", "trace_share=0.5", "speedup=60")
    assert load(file, [f"pools.spot.{each}" for each in followed]).doubts == ()


def test_spot_workers_that_would_only_idle_are_doubted(file: Path) -> None:
    idle = ["pools.spot.gpu=h100", "pools.spot.workers=2", "strategy.exploration=off"]
    idle.append('strategy.rollout_pools=["reserved"]')

    (doubt,) = load(file, idle).doubts

    assert doubt.startswith("pools.spot.workers = 2 only validate")
    for works in ("strategy.exploration=blocking", 'strategy.train_pools=["reserved", "spot"]', "pools.spot.workers=0"):
        assert load(file, [*idle, works]).doubts == ()


def test_spot_workers_too_few_on_a_machine_for_any_gang_are_doubted(file: Path) -> None:
    wide = ["strategy.widths=[2]", "strategy.exploration=off", "pools.reserved.gpu=h100", "pools.reserved.workers=2"]
    spot = ["pools.spot.gpu=h100", "pools.spot.workers=4", "pools.spot.workers_per_node"]

    (doubt,) = load(file, [*wide, *spot[:2], f"{spot[2]}=1"]).doubts

    assert doubt.startswith("strategy.widths = [2] needs 2 workers on one machine, and pools.spot has machines of 1")
    assert load(file, [*wide, *spot[:2], f"{spot[2]}=2"]).doubts == ()


def test_a_reserved_price_that_nobody_knows_is_doubted(file: Path) -> None:
    alone = ['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]', "pools.reserved.gpu=cpu"]

    (doubt,) = load(file, [*alone, "pools.spot.gpu=h100-elsewhere", "pools.spot.usd_per_h=4"]).doubts

    assert "'h100-elsewhere' has no listed price on demand" in doubt
    assert "is told with 4 an hour, the higher of the pools' prices" in doubt
    assert load(file, [*alone, "pools.spot.gpu=h100-aws"]).doubts == ()


def test_a_price_that_another_gpu_left_behind_is_doubted(file: Path) -> None:
    before = ["pools.spot.gpu=h100", "pools.spot.usd_per_h=2.66"]

    (doubt,) = load(file, [*before, "pools.spot.gpu=l40s"]).doubts

    assert "usd_per_h = 2.66 is the listed price of 'h100', and pools.spot.gpu = 'l40s' is listed for 0.53" in doubt
    assert load(file, before).doubts == load(file, ["pools.spot.gpu=l40s", "pools.spot.usd_per_h=2.5"]).doubts == ()


def test_a_trace_that_does_not_keep_step_with_the_pace_is_doubted(file: Path) -> None:
    paced = ["pace.gpu=h100", "pace.speedup=8", "pools.spot.gpu=h100", "pools.spot.trace_model=calm"]

    (doubt,) = load(file, paced).doubts

    assert "workers come and go 0.125 times as often as it says; set pools.spot.speedup = 8" in doubt
    assert load(file, [*paced, "pools.spot.speedup=8"]).doubts == ()
    assert load(file, [*paced, "pace.speedup=1"]).doubts == ()


def test_a_pace_without_a_gpu_is_doubted(file: Path) -> None:
    overrides = ["pace.lora=false", "pace.speedup=8"]

    (doubt,) = load(file, overrides).doubts

    assert "pace.lora, pace.speedup counts nothing" in doubt
    assert load(file, [*overrides, "pace.gpu=h100"]).doubts == ()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["exploration.seeds_tried=8", "exploration.request_seeds=16"], "some prompts get none"),
        (["exploration.budget=worth", "strategy.exploration=blocking"], "only what goes on beside training is weighed"),
        (["exploration.budget=worth", "exploration.planner=equal"], "equal shares weigh nothing"),
    ],
)
def test_exploration_that_does_not_do_what_its_settings_seem_to_say_is_doubted(
    file: Path, overrides: list[str], says: str
) -> None:
    (doubt,) = load(file, overrides).doubts

    assert says in doubt


def test_what_only_checkpoints_have_is_doubted_with_an_embedded_model(file: Path) -> None:
    (doubt,) = load(file, ["model.gradient_checkpointing=true", "model.vae_dtype=bfloat16"]).doubts

    assert doubt.startswith("model.gradient_checkpointing, model.vae_dtype counts nothing with 'tiny-text'")
    assert load(file, ["model.gradient_checkpointing=false"]).doubts == ()


def test_guidance_with_nft_is_doubted(file: Path) -> None:
    (doubt,) = load(file, ["rollout.guidance=4"]).doubts

    assert "rollout.guidance = 4 with DiffusionNFT" in doubt
    assert load(file).doubts == load(file, ["rollout.guidance=4", "train.algorithm=awm"]).doubts == ()


SD3 = ["model.name=sd3", "model.path=x", "model.height_px=64", "model.width_px=64", "reward.name=scene-ocr"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.old_decay=delayed"], "the older policy, which is validated and exported, moves by a thousandth"),
        (["train.lora_alpha=64"], "train.lora_alpha = 64 counts nothing without a LoRA"),
        (["train.steps_used=2"], 'train.steps_used = 2 with train.algorithm = "nft" counts nothing'),
        (["train.algorithm=dpo", "train.kl=0.1"], "train.kl = 0.1 with Diffusion-DPO counts nothing"),
        (
            ["train.algorithm=grpo", "rollout.sampler=sde", "rollout.sde_window_order=sliding"],
            'rollout.sde_window_order = "sliding" counts nothing without a size',
        ),
        (["train.warm_up=8", "train.updates=2", "run.iterations=4"], "train.warm_up = 8 and the run has 8 updates"),
        (
            SD3,
            "train.learning_rate = 0.0003 with train.lora_rank = 0: all weights are trained, at the rate of a LoRA",
        ),
    ],
)
def test_training_that_is_probably_not_meant_is_doubted(file: Path, overrides: list[str], says: str) -> None:
    (doubt,) = load(file, overrides).doubts

    assert says in doubt


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.lora_alpha=64", "train.lora_rank=32"],
        ["train.algorithm=grpo", "rollout.sampler=sde", "train.steps_used=1"],
        ["train.algorithm=grpo", "rollout.sampler=sde", "train.old_decay=delayed"],
        ["train.algorithm=dpo"],
        ["train.kl=0.1"],
        [
            "train.algorithm=grpo",
            "rollout.sampler=sde",
            "rollout.sde_window_order=sliding",
            "rollout.sde_window_size=1",
        ],
        ["train.warm_up=7", "train.updates=2", "run.iterations=4"],
        [*SD3, "train.lora_rank=32"],
        [*SD3, f"train.learning_rate={ALL_WEIGHTS_RATE}"],
        ["exploration.seeds_tried=8", "exploration.request_seeds=8"],
    ],
)
def test_settings_that_go_together_are_not_doubted(file: Path, overrides: list[str]) -> None:
    assert load(file, overrides).doubts == ()


def test_delayed_old_policies_beside_an_average_are_as_published(file: Path) -> None:
    assert load(file, ["train.old_decay=delayed", "train.ema_decay=0.9"]).doubts == ()
    assert load(file, ["train.old_decay=delayed", "run.validate_policy=trained"]).doubts == ()


@pytest.mark.parametrize(("algorithm", "clip"), [("grpo", 1e-4), ("grpo-guard", 2e-6), ("awm", 1.0)])
def test_ratios_are_clipped_as_each_algorithms_recipe_has_it(file: Path, algorithm: str, clip: float) -> None:
    sampler = [] if algorithm == "awm" else ["rollout.sampler=sde"]

    assert load(file, [f"train.algorithm={algorithm}", *sampler]).train.clip_range == clip
    assert load(file, [f"train.algorithm={algorithm}", *sampler, "train.clip_range=0.2"]).train.clip_range == 0.2


def test_what_samples_is_validated_unless_an_average_is_kept(file: Path) -> None:
    def policies(*overrides: str) -> tuple[str, str]:
        config = load(file, list(overrides))
        return config.train.sampling_policy, config.validation_policy

    assert policies() == ("old", "old")
    assert policies("train.old_decay=copy") == policies("train.algorithm=awm") == ("trained", "trained")
    assert policies("train.ema_decay=0.9") == ("old", "average")
    assert policies("run.validate_policy=trained") == ("old", "trained")


def test_a_pool_follows_one_trace(file: Path) -> None:
    text = refusal(file, "pools.spot.gpu=h100", "pools.spot.trace=spot.csv", "pools.spot.trace_model=calm")

    assert "trace = 'spot.csv' and trace_model = 'calm' of one pool: give one of them" in text


def test_settings_without_a_value_are_left_out_when_written(file: Path) -> None:
    config = load(file, ["simulation.start_up_s=3"])

    assert "start_up_s = 3.0" in dump(config)
    assert "publish_s" not in dump(config)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.steps=true",
        "train.learning_rate=true",
        "strategy.widths=[true]",
        "rollout.sde_window=[false, 2]",
        "run.name=true",
    ],
)
def test_true_is_no_number(file: Path, override: str) -> None:
    assert "input should not be true or false" in refusal(file, override)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9223372036854775808",
        "run.iterations=99999999999999999999999999",
        "exploration.seeds_tried=1048576",
        "exploration.rounds=100000",
        "train.lora_rank=100000",
        "train.learning_rate=1e308",
        "cluster.hang_after_s=1e-320",
        "pace.speedup=1e-320",
        "pools.spot.workers=1000001",
        "reward.attempts=100",
        "rollout.sde_window=[0, 99999999999999999999999999]",
        "strategy.widths=[1, 2048]",
    ],
)
def test_a_number_that_means_nothing_is_refused_by_name(file: Path, override: str) -> None:
    text = refusal(file, "pools.spot.usd_per_h=1", override)

    assert override.split("=")[0] in text


def test_every_number_has_an_upper_bound() -> None:
    def numbers(section: type[Section], name: str = "") -> Iterator[tuple[str, list[Any]]]:
        for key, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from numbers(kind, f"{key}.")
            elif kind in (int, float, float | None):
                yield name + key, field.metadata

    unbounded = [
        name
        for name, rules in numbers(Config)
        if not any(getattr(rule, bound, None) is not None for rule in rules for bound in ("le", "lt"))
    ]

    assert unbounded == []


def test_overrides_are_a_list(file: Path) -> None:
    with pytest.raises(SpotlightError, match=r"overrides = 'run\.seed=3': give a list of texts, such as \["):
        load(file, "run.seed=3")


@pytest.mark.parametrize("text", ["3\nrun.name = 'x'", "3\n[model]", "3\r\nx = 1"])
def test_nothing_after_a_newline_is_dropped(file: Path, text: str) -> None:
    assert "expected one value; give each setting a --set of its own" in refusal(file, f"run.seed={text}")


def test_a_value_of_several_lines_is_one_value(file: Path) -> None:
    assert load(file, ["rollout.sde_window=[1,\n3]"]).rollout.sde_window == (1, 3)


@pytest.mark.parametrize("name", ["../evil/x", "a/b", "a\nb", "a\x00b", "x" * 101, "", "-x"])
def test_a_runs_name_names_a_directory_in_run_dir(file: Path, name: str) -> None:
    with pytest.raises(SpotlightError, match="begins the name of a directory in run.dir"):
        resolve({"run": {"name": name}, "data": {"train_prompts": "a", "validation_prompts": "b"}}, file.parent)


@pytest.mark.parametrize("field", ["data.train_prompts", "model.path", "latents.url", "pools.spot.trace"])
def test_paths_that_cannot_be_are_refused_by_name(file: Path, field: str) -> None:
    section, _, key = field.rpartition(".")
    loop = file.parent / "loop"
    loop.symlink_to(loop)
    for path in ("a\x00b", str(loop / "x")):
        tree: dict[str, Any] = {"data": {"train_prompts": "a", "validation_prompts": "b"}}
        place = tree
        for name in section.split("."):
            place = place.setdefault(name, {})
        place[key] = path
        if section == "pools.spot":
            place["usd_per_h"] = 1.0
        with pytest.raises(SpotlightError, match=rf"{field} = .*(null|circle|NUL)"):
            resolve(tree, file.parent)


def test_a_directory_for_runs_that_cannot_be_is_refused_by_name(file: Path) -> None:
    with pytest.raises(SpotlightError, match="run.dir = .*: a path has no NUL"):
        resolve({"run": {"dir": "a\0b"}, "data": {"train_prompts": "a", "validation_prompts": "b"}}, file.parent)


def test_a_path_that_is_no_text_is_refused_by_name_before_it_is_written(file: Path) -> None:
    settings = load(file, ["run.dir=/tmp/\udcff"])

    with pytest.raises(SpotlightError, match=r"^run\.dir = '/tmp/\\udcff': has bytes that are not UTF-8, which"):
        dump(settings)


@pytest.mark.parametrize(
    "content", ["x = " + "9" * 5000, "x = " + "[" * 5000, "[run]\nseed = " + "9" * 5000, "a = {b = " * 3000]
)
def test_settings_that_are_too_much_are_refused(file: Path, content: str) -> None:
    file.write_text(content)

    assert refusal(file).startswith(f"{file}: not valid TOML: ")


@pytest.mark.parametrize("override", ["run.seed=" + "9" * 5000, "run.seed=" + "[" * 5000, ".".join("a" * 5000) + "=1"])
def test_an_override_that_is_too_much_is_refused_in_a_line(file: Path, override: str) -> None:
    text = refusal(file, override)

    assert text.startswith("--set 'run.seed=" if override.startswith("run") else "--set 'a.a.a")
    assert len(text) < 500


def test_a_named_pipe_is_not_waited_for(file: Path) -> None:
    pipe = file.with_name("pipe")
    os.mkfifo(pipe)

    for read in (load, read_prompts, read_trace, read_prices):
        with pytest.raises(SpotlightError, match=r"pipe: cannot be read as .*: it is a named pipe"):
            read(pipe)


def test_what_is_too_large_to_be_read_or_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 8)
    (tmp_path / "a").write_bytes(bytes(8))

    assert files.read_bytes(tmp_path / "a", "prompts") == bytes(8)
    assert files.read_files(tmp_path, "prompts") == {"a": bytes(8)}
    with pytest.raises(SpotlightError, match="cannot be read as prompts: it is a directory"):
        files.read_bytes(tmp_path, "prompts")
    (tmp_path / "b").write_bytes(bytes(1))
    with pytest.raises(SpotlightError, match=f"{tmp_path}: its files have more than 8 bytes"):
        files.read_files(tmp_path, "prompts")
    (tmp_path / "a").write_bytes(bytes(9))
    with pytest.raises(SpotlightError, match="a: cannot be read as prompts: it has more than 8 bytes"):
        files.read_bytes(tmp_path / "a", "prompts")


def test_of_several_rewards_none_has_more_beside_it(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"data": {"train_prompts": "a", "validation_prompts": "b"}}
    nested = {"name": "ocr", "also": [{"name": "ocr"}]}

    for reward in ([{"name": "ocr"}, nested], [nested, {"name": "ocr"}], {"name": "ocr", "also": [nested]}):
        with pytest.raises(SpotlightError, match="write them one after the other"):
            resolve(tree | {"reward": reward}, tmp_path)
    for no_table in ([], [1]):
        with pytest.raises(SpotlightError, match=r"reward = \[.*\], but it is a section; it has 'also'"):
            resolve(tree | {"reward": no_table}, tmp_path)
    with pytest.raises(SpotlightError, match=r"\[reward\] has no field 'foo'"):
        resolve(tree | {"reward": {"name": "ocr", "also": [{"name": "ocr", "also": [{"foo": 1}]}]}}, tmp_path)


def test_one_of_several_rewards_is_changed_in_the_file(file: Path) -> None:
    file.write_text(f'{file.read_text()}\n[[reward]]\nname = "ocr"\n[[reward]]\nname = "ocr"\n')

    assert refusal(file, "reward.attempts=5").endswith("there are several [[reward]] tables: change the file")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('strategy.rollout_pools=["spot","spot"]', "strategy.rollout_pools = ['spot', 'spot']: names one twice"),
        ('tracking.to=["wandb","wandb"]', "tracking.to = ['wandb', 'wandb']: names one twice"),
        ("pools.spot.slurm.memory=200", "slurm.memory = 200: expected a text, so put it into quotation marks"),
        ("rollout.sde_window=3", "rollout.sde_window = 3: expected a list of 2, such as [0, 2]"),
        ("rollout.sde_window=[3]", "rollout.sde_window: expected a list of 2, such as [0, 2]"),
        ('pools.spot.notices="sigterm"', """pools.spot.notices = 'sigterm': expected a list, such as ["sigterm"]"""),
    ],
)
def test_what_is_of_another_type_is_refused_with_what_it_should_be(file: Path, override: str, said: str) -> None:
    assert said in refusal(file, override)


SLURM = 'cluster.manager="slurm"'
WORKERS = ("pools.reserved.gpu=h100", "pools.spot.gpu=h100", "pools.spot.workers=10", "pools.spot.workers_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (['pools.spot.slurm.partition="x"'], 'pools.spot.slurm counts nothing with cluster.manager = "local"'),
        (
            [SLURM, "model.device=cuda"],
            "pools.reserved.slurm.gres = '': GPUs of a job: 0, and its workers",
        ),
        (
            [SLURM, "model.device=cuda", "pools.reserved.slurm.gres=gpu", "pools.spot.slurm.gres=gpu:h100:4"],
            "pools.spot.slurm.gres = 'gpu:h100:4': GPUs of a job: 4, and its workers",
        ),
    ],
)
def test_what_slurm_is_not_asked_for_or_asked_too_little_for_is_doubted(
    file: Path, overrides: list[str], says: str
) -> None:
    assert any(doubt.startswith(says) for doubt in load(file, [*WORKERS, *overrides]).doubts)


@pytest.mark.parametrize(
    "overrides",
    [
        [SLURM],
        [SLURM, "model.device=cuda", "pools.reserved.slurm.gres=gpu:1", "pools.spot.slurm.gres=disk:1,gpu:1g.10gb:2"],
        [SLURM, "model.device=cuda", *(f'pools.{pool}.slurm.extra=["--gpus=2"]' for pool in ("reserved", "spot"))],
    ],
)
def test_as_many_gpus_as_workers_are_not_doubted(file: Path, overrides: list[str]) -> None:
    assert not [doubt for doubt in load(file, [*WORKERS, *overrides]).doubts if "slurm" in doubt]


def test_a_time_limit_may_look_like_a_time_of_day(file: Path) -> None:
    assert load(file, ["cluster.slurm.time=00:30:00"]).cluster.slurm.time == "00:30:00"
