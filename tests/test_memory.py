"""Memory estimates: what they are made of is what torch keeps on its meta device, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from spotlight import config
from spotlight.config import Config, RewardSection
from spotlight.records import SpotlightError
from spotlight.rl import memory
from spotlight.rl.checkpoints import FAMILIES, Network, Survey
from spotlight.rl.models.qwen_image import QwenImage

HEADS, HEAD_DIM, IMAGE, TEXT = 4, 32, 256, 32
TOKENS, WIDTH = IMAGE + TEXT, HEADS * HEAD_DIM
EMBEDS = {"guidance_embeds": True}
DTYPE = torch.bfloat16
"""In which some of what is kept is float32 all the same."""
COMMON: dict[str, Any] = {"attention_head_dim": HEAD_DIM, "num_attention_heads": HEADS, "joint_attention_dim": 16}


def kept_bytes(kind: Any, settings: dict[str, Any], inputs: dict[str, Tensor | Any]) -> int:
    """What a forward pass of a network with these settings keeps for its backward, besides weights."""
    with torch.device("meta"):
        network = kind(**settings, **COMMON).to(DTYPE)
    weights = {value.untyped_storage()._cdata for value in network.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage()._cdata] = value
        return value

    if kind is QwenImageTransformer2DModel:  # its angles are plain tensors, made outside of the device's context
        network.pos_embed.pos_freqs, network.pos_embed.neg_freqs = (
            freqs.to("meta") for freqs in (network.pos_embed.pos_freqs, network.pos_embed.neg_freqs)
        )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(**inputs, return_dict=False)
    return sum(value.untyped_storage().nbytes() for at, value in kept.items() if at not in weights)


def blank(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=DTYPE)


QWEN: dict[str, Any] = {"axes_dims_rope": (8, 12, 12), "in_channels": 16, "out_channels": 4}
QWEN_INPUTS = {
    "hidden_states": blank(1, IMAGE, 16),
    "encoder_hidden_states": blank(1, TEXT, 16),
    "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.bool, device="meta"),
    "timestep": blank(1),
    "img_shapes": [[(1, 16, 16)]],
}
FLUX: dict[str, Any] = {"axes_dims_rope": (8, 12, 12), "in_channels": 16, "pooled_projection_dim": 16}
FLUX_INPUTS = {
    "hidden_states": blank(1, IMAGE, 16),
    "encoder_hidden_states": blank(1, TEXT, 16),
    "pooled_projections": blank(1, 16),
    "timestep": blank(1),
    "img_ids": blank(IMAGE, 3),
    "txt_ids": blank(TEXT, 3),
}
SD3: dict[str, Any] = {
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "sample_size": 32,
    "qk_norm": "rms_norm",
}
SD3_INPUTS = {
    "hidden_states": blank(1, 4, 32, 32),
    "encoder_hidden_states": blank(1, TEXT, 16),
    "pooled_projections": blank(1, 16),
    "timestep": blank(1),
}


@pytest.mark.parametrize(
    ("kind", "settings", "inputs", "more", "expected"),
    [
        (QwenImageTransformer2DModel, QWEN, QWEN_INPUTS, "num_layers", memory.SAVED_DOUBLE),
        (SD3Transformer2DModel, SD3, SD3_INPUTS, "num_layers", memory.SAVED_DOUBLE),
        (FluxTransformer2DModel, FLUX, FLUX_INPUTS, "num_layers", memory.SAVED_DOUBLE),
        (FluxTransformer2DModel, FLUX, FLUX_INPUTS, "num_single_layers", memory.SAVED_SINGLE),
    ],
)
def test_a_block_keeps_what_the_estimate_says(
    kind: Any, settings: dict[str, Any], inputs: dict[str, Any], more: str, expected: int
) -> None:
    layers = {"num_layers": 2} | ({"num_single_layers": 1} if kind is FluxTransformer2DModel else {})

    few, many = (kept_bytes(kind, {**settings, **layers, more: layers[more] + extra}, inputs) for extra in (0, 1))

    matrices = 2 * HEADS * TOKENS**2  # the meta device has no fused attention, and keeps two of these
    assert ((many - few) / 2 - matrices) / (TOKENS * WIDTH) == pytest.approx(expected, rel=0.1)


def qwen_image(train: Any = (), run: Any = (), **changes: Any) -> tuple[Survey, Config]:
    """The published Qwen-Image, as far as an estimate looks at it: 20.43 billion parameters."""
    d, layers = 3072, 60
    shapes: dict[str, tuple[int, ...]] = {"rest": (20_430_000_000 - 60 * 12 * d * d * 2,)}
    for block in range(layers):
        for target in QwenImage.lora_targets:
            wide = {"img_mlp.net.0.proj": (4 * d, d), "img_mlp.net.2": (d, 4 * d)}
            wide |= {name.replace("img", "txt"): shape for name, shape in wide.items()}
            shapes[f"transformer_blocks.{block}.{target}.weight"] = wide.get(target, (d, d))
    transformer = Network(
        config={
            "num_layers": layers,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "joint_attention_dim": 3584,
        },
        shapes=shapes,
    )
    vae = Network(config={"base_dim": 96, "temperal_downsample": [False, True, True]}, shapes={"all": (127_000_000,)})
    survey = Survey(family=FAMILIES["qwen-image"], transformer=transformer, vae=vae, encoders=())
    settings = config.resolve(
        {
            "data": {"train_prompts": "a", "validation_prompts": "b"},
            "model": {
                "name": "qwen-image",
                "path": "x",
                "dtype": "bfloat16",
                "height_px": 16,
                "width_px": 32,
                **changes,
            },
            "rollout": {"guidance": 4.0, "request_seeds": 4},
            "exploration": {"request_seeds": 4},
            "train": {"micro_batch": 1, "lora_rank": 64, "old_decay": "copy", **dict(train)},
            "run": dict(run),
        },
        Path(),
    )
    return survey, settings


@pytest.mark.parametrize(
    ("side_px", "checkpointed", "expected_gb"),
    [
        (512, False, (73, 82)),  # docs: some 77 to 82 GB
        (512, True, (46, 52)),  # 49
        (1280, True, (51, 57)),  # 54
    ],
)
def test_training_the_published_model_needs_what_was_reckoned_for_it(
    side_px: int, checkpointed: bool, expected_gb: tuple[float, float]
) -> None:
    size = {"height_px": side_px, "width_px": side_px}
    survey, settings = qwen_image(**size, gradient_checkpointing=checkpointed, cuda_graphs=False)

    *_, training = memory.estimate(survey, settings, QwenImage.lora_targets)

    assert expected_gb[0] < training.total_bytes / 1e9 < expected_gb[1]
    assert training.parts["what is trained"] == pytest.approx(16 * 424.7e6, rel=0.01)


@pytest.mark.parametrize(
    ("family", "expected"), [("qwen-image", 0), ("sd3", 128 - 256), ("flux", 128 - 512)], ids=lambda each: str(each)
)
def test_an_estimate_counts_the_tokens_that_prompts_are_padded_to(family: str, expected: int) -> None:
    survey, settings = qwen_image()
    survey = replace(survey, family=FAMILIES[family])
    fewer = settings.model.model_copy(update={"text_tokens": 128})

    assert memory.tokens(survey, fewer) - memory.tokens(survey, settings.model) == expected


@pytest.mark.parametrize(
    ("train", "bytes_each"),
    [({"old_decay": 0.5}, 24), ({"old_decay": 0.5, "ema_decay": 0.9}, 28)],
)
def test_old_policies_and_averages_count(train: dict[str, float], bytes_each: int) -> None:
    survey, settings = qwen_image(train=train)

    *_, training = memory.estimate(survey, settings, QwenImage.lora_targets)

    assert training.parts["what is trained"] == pytest.approx(bytes_each * 424.7e6, rel=0.01)


def test_a_validation_is_a_batch_too() -> None:
    few, many = (
        memory.estimate(*qwen_image(run={"validation_seeds": seeds}), QwenImage.lora_targets)[1] for seeds in (4, 512)
    )

    assert many.total_bytes > few.total_bytes
    assert "run.validation_seeds" in many.way_out


def test_exploration_is_a_batch_too_where_there_is_some() -> None:
    survey, settings = qwen_image()
    large = settings.model_copy(update={"exploration": settings.exploration.model_copy(update={"request_seeds": 512})})
    off = large.model_copy(update={"strategy": settings.strategy.model_copy(update={"exploration": "off"})})

    few, many, unexplored = (
        memory.estimate(survey, each, QwenImage.lora_targets)[1].parts["activations"] for each in (settings, large, off)
    )

    assert many > few == unexplored


def test_graphs_of_denoising_are_there_while_training() -> None:
    with_graphs, without = (
        memory.estimate(*qwen_image(height_px=1280, width_px=1280, cuda_graphs=on), QwenImage.lora_targets)
        for on in (True, False)
    )

    _, denoising, decoding, training = with_graphs
    for phase, same in ((decoding, without[2]), (training, without[3])):
        assert phase.total_bytes - same.total_bytes == pytest.approx(denoising.parts["activations"])
    assert denoising == without[1]
    with pytest.raises(SpotlightError, match=r"set model\.cuda_graphs = false"):
        memory.require([training], 50e9, "a GPU")


def test_graphs_of_training_are_there_while_denoising() -> None:
    with_graphs, without = (
        memory.estimate(*qwen_image(train={"cuda_graphs": on}), QwenImage.lora_targets) for on in (True, False)
    )
    kept = without[-1].parts["activations"]

    assert with_graphs[0] == without[0]
    for phase, same in zip(with_graphs[1:], without[1:], strict=True):
        assert phase.total_bytes - same.total_bytes == pytest.approx(2 * kept)
    off = memory.estimate(*qwen_image(train={"cuda_graphs": True}, cuda_graphs=False), QwenImage.lora_targets)
    assert all("CUDA graphs" not in phase.parts for phase in off)


def test_the_ranks_of_a_gang_share_what_training_keeps() -> None:
    survey, settings = qwen_image(height_px=1280, width_px=1280, gradient_checkpointing=False)
    shared = settings.model_copy(update={"train": settings.train.model_copy(update={"width": 4})})

    alone, together = (memory.estimate(survey, each, QwenImage.lora_targets)[-1].parts for each in (settings, shared))

    assert together == {**alone, "activations": alone["activations"] / 4}


def test_the_texts_of_all_samples_of_a_part_count() -> None:
    survey, settings = qwen_image()
    many = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"prompts": 800})})

    few, more = (memory.estimate(survey, each, QwenImage.lora_targets)[-1] for each in (settings, many))

    assert few.parts["texts"] == 8 * 128 * 3584 * 2  # samples, tokens, width, bytes
    assert more.parts["texts"] == 100 * few.parts["texts"]
    assert ["train.parts" in each.way_out for each in (few, more)] == [False, True]


@pytest.mark.parametrize("levels", [1, 2])
def test_a_pass_has_no_more_rows_than_its_part(levels: int) -> None:
    """A part has eight samples, each at so many noise levels."""
    one, default = (
        memory.estimate(*qwen_image(train={"timesteps": levels, "micro_batch": size}), QwenImage.lora_targets)[-1]
        for size in (1, 64)
    )

    assert default.parts["activations"] == 8 * levels * one.parts["activations"]


def test_both_samples_of_a_pair_count() -> None:
    one, pair = (
        memory.estimate(*qwen_image(train={"algorithm": name, "kl": 0.0}), QwenImage.lora_targets)[-1]
        for name in ("awm", "dpo")
    )

    assert pair.parts["activations"] == 2 * one.parts["activations"]


def activations(prompts: int, seeds: int, **train: Any) -> float:
    survey, settings = qwen_image(train={"micro_batch": 64, "kl": 0.0, **train})
    rollout = settings.rollout.model_copy(update={"prompts": prompts, "seeds_kept": seeds})
    settings = settings.model_copy(update={"rollout": rollout})
    return memory.estimate(survey, settings, QwenImage.lora_targets)[-1].parts["activations"]


def test_a_part_has_whole_prompts_and_the_largest_counts() -> None:
    two_prompts = activations(16, 24, algorithm="awm", timesteps=1, parts=8)

    assert activations(9, 24, algorithm="awm", timesteps=1, parts=8) == two_prompts
    assert activations(8, 24, algorithm="awm", timesteps=1, parts=8) == two_prompts / 2


def test_a_pass_over_pairs_has_as_many_rows_as_its_part_has_pairs() -> None:
    one, default = (
        activations(8, 24, algorithm="dpo", dpo_pairs=1, timesteps=2, parts=8, micro_batch=size) for size in (2, 64)
    )

    assert default == one  # a pair, at two noise levels
    assert activations(8, 24, algorithm="dpo", dpo_pairs=2, timesteps=2, parts=8) == 2 * one


def test_both_passes_of_true_guidance_are_kept_and_where_it_is_embedded_there_is_one() -> None:
    survey, settings = qwen_image()
    embedded = replace(survey, transformer=replace(survey.transformer, config={**survey.transformer.config, **EMBEDS}))
    unguided = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"guidance": 1.0})})

    true, one, none = (
        memory.estimate(*each, QwenImage.lora_targets)[-1].parts["activations"]
        for each in ((survey, settings), (embedded, settings), (survey, unguided))
    )

    assert true == 2 * one == 2 * none


@pytest.mark.parametrize(
    ("checkpointed", "expected"),
    [
        (False, 2 * memory.SAVED_DOUBLE + 3 * memory.SAVED_SINGLE),
        (True, 2 + 3 + memory.SAVED_DOUBLE),  # the inputs of all blocks, and all of one
    ],
)
def test_blocks_of_both_kinds_are_kept_or_their_inputs(checkpointed: bool, expected: int) -> None:
    survey, settings = qwen_image(gradient_checkpointing=checkpointed)
    layers = {"num_layers": 2, "num_single_layers": 3, **EMBEDS}
    survey = replace(survey, transformer=replace(survey.transformer, config={**survey.transformer.config, **layers}))

    kept = memory.estimate(survey, settings, QwenImage.lora_targets)[-1].parts["activations"]

    assert kept == expected * memory.tokens(survey, settings.model) * memory.width(survey.transformer) * 2  # bytes


@pytest.mark.parametrize(("kl", "copies"), [(0.0, 3), (0.1, 4)])
def test_where_training_of_full_weights_started_is_kept_if_it_is_compared_with(kl: float, copies: int) -> None:
    survey, settings = qwen_image(train={"lora_rank": 0, "kl": kl, "algorithm": "awm"}, dtype="float32")

    *_, training = memory.estimate(survey, settings, QwenImage.lora_targets)

    assert training.parts["what is trained"] == copies * 4 * survey.transformer.parameters


def test_a_tiled_image_is_decoded_in_tiles_of_512_px() -> None:
    whole, tiled, small = (
        memory.estimate(
            *qwen_image(height_px=height, width_px=width, vae_tiling=on, cuda_graphs=False), QwenImage.lora_targets
        )[2].parts["pixels"]
        for height, width, on in ((1024, 256, False), (1024, 256, True), (512, 256, False))
    )

    assert whole == 2 * tiled
    assert tiled == small


def test_a_vae_of_videos_keeps_more_of_an_image() -> None:
    survey, settings = qwen_image()
    plain = replace(survey, vae=replace(survey.vae, config={"block_out_channels": [96, 192, 384]}))

    of_video, of_image = (memory.estimate(each, settings, QwenImage.lora_targets)[2] for each in (survey, plain))

    assert of_video.parts["pixels"] == 3 * of_image.parts["pixels"]


def test_networks_of_rewards_count_where_they_score_beside_the_model(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    stored = float((tmp_path / "model.safetensors").stat().st_size)
    survey, settings = qwen_image()
    read = settings.model_copy(update={"reward": RewardSection(name="vlm-ocr", path=str(tmp_path))})
    pools = read.pools.model_copy(update={"reward": read.pools.reward.model_copy(update={"workers": 1})})

    alone, beside = (memory.estimate(survey, each, QwenImage.lora_targets) for each in (settings, read))
    apart = memory.estimate(survey, read.model_copy(update={"pools": pools}), QwenImage.lora_targets)

    assert [with_.total_bytes - without.total_bytes for with_, without in zip(beside, alone, strict=True)] == [
        0.0,  # prompts are encoded before anything is scored
        *(stored,) * 3,
    ]
    assert apart == alone


def test_the_clip_of_a_reward_counts_with_its_head(tmp_path: Path) -> None:
    survey, settings = qwen_image()
    for name in ("head", "clip"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.zeros(1000)}, tmp_path / name / "model.safetensors")
    reward = RewardSection(name="geneval", path=str(tmp_path / "head"), options={"clip": str(tmp_path / "clip")})

    found = memory.reward_bytes(settings.model_copy(update={"reward": reward}))

    assert found == 2 * (tmp_path / "clip" / "model.safetensors").stat().st_size


def test_some_of_a_device_is_left_for_what_is_not_counted() -> None:
    phase = memory.Phase(name="training", parts={"weights": 95e9}, way_out="rest")

    memory.require([phase], 104e9, "a GPU")
    with pytest.raises(SpotlightError, match=r"needs about 95 GB .* and a GPU has 100"):
        memory.require([phase], 100e9, "a GPU")


def test_what_does_not_fit_is_refused_with_a_way_out() -> None:
    survey, settings = qwen_image(height_px=1280, width_px=1280, gradient_checkpointing=False)
    phases = memory.estimate(survey, settings, QwenImage.lora_targets)

    memory.require(phases, 500e9, "a GPU")
    with pytest.raises(
        SpotlightError, match=r"training at 1280 x 1280 px without .*GB.* has 80: set model\.gradient_ch"
    ):
        memory.require(phases, 80e9, "a GPU")
    with pytest.raises(SpotlightError, match=r"encoding the prompts needs about 41 GB"):
        memory.require(phases, 40e9, "a GPU")
