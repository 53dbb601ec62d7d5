"""Every family of checkpoints draws what its plain diffusers pipeline draws, trains, and refuses what is broken."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines import tiny_flux, tiny_qwen_image, tiny_sd3
from runs import settings_file
from spotlight import Run, config
from spotlight.inputs import check_inputs
from spotlight.records import SpotlightError
from spotlight.rl import checkpoints
from spotlight.rl.models import Loading, Model, require_memory
from spotlight.rl.models.flux import Flux
from spotlight.rl.models.pipeline import PipelineModel, shifted
from spotlight.rl.models.qwen_image import QwenImage
from spotlight.rl.models.sd3 import StableDiffusion3
from spotlight.rl.trainer import Trainer

TINY = Path(__file__).parents[1] / "examples" / "ocr-tiny.toml"
HEIGHT_PX, WIDTH_PX, STEPS = 16, 32, 4
SHORT, LONG = 'a "4"', 'a shop sign that reads "47"'
CPU = Loading(device=torch.device("cpu"), dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One family, and how its plain pipeline is asked for what we draw."""

    kind: type[PipelineModel]
    build: Callable[[Path], Path]
    plain: Any
    guidance: float
    options: dict[str, Any]
    left_out: tuple[str, ...] = ()


CASES = {
    "qwen-image": Case(
        kind=QwenImage,
        build=tiny_qwen_image,
        plain=QwenImagePipeline,
        guidance=4.0,
        options={"negative_prompt": " ", "true_cfg_scale": 4.0},
    ),
    "sd3": Case(
        kind=StableDiffusion3,
        build=tiny_sd3,
        plain=StableDiffusion3Pipeline,
        guidance=4.5,
        options={"guidance_scale": 4.5},
    ),
    "sd3 without T5": Case(
        kind=StableDiffusion3,
        build=lambda directory: tiny_sd3(directory, without_t5=True),
        plain=StableDiffusion3Pipeline,
        guidance=1.0,
        options={"guidance_scale": 1.0},
        left_out=("text_encoder_3", "tokenizer_3"),
    ),
    "flux": Case(kind=Flux, build=tiny_flux, plain=FluxPipeline, guidance=3.5, options={"guidance_scale": 3.5}),
    "flux schnell": Case(
        kind=Flux,
        build=lambda directory: tiny_flux(directory, guidance_embeds=False),
        plain=FluxPipeline,
        guidance=2.0,
        options={"negative_prompt": "", "true_cfg_scale": 2.0},
    ),
}
FAMILIES = ("qwen-image", "sd3", "flux")


TOKENIZERS = (("qwen-image", "tokenizer"), ("sd3", "tokenizer_2"), ("flux", "tokenizer"), ("flux", "tokenizer_2"))


class Checkpoints:
    """The tiny pipelines, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        directory = self._root / name.replace(" ", "-")
        return directory if directory.exists() else CASES[name].build(directory)

    def model(self, name: str, loading: Loading = CPU) -> PipelineModel:
        """Loaded, its texts encoded."""
        model = CASES[name].kind.load(str(self[name]), loading)
        model.preload([SHORT, LONG], self._root / f"{name}.safetensors")
        return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(("name", "folder"), TOKENIZERS)
def test_a_tokenizer_without_its_vocabulary_is_refused_before_a_run_begins(
    made: Checkpoints, tmp_path: Path, name: str, folder: str
) -> None:
    """Transformers would load it, and give every text the same tokens."""
    damaged = shutil.copytree(made[name], tmp_path / "pipeline")
    for file in (damaged / folder).iterdir():
        file.unlink()

    with pytest.raises(SpotlightError, match=f"{folder}: has no vocabulary of a tokenizer"):
        checkpoints.survey(name, damaged)
    with pytest.raises(SpotlightError, match=f"{folder}: has no vocabulary of a tokenizer"):
        CASES[name].kind.load(str(damaged), CPU).preload([SHORT])


def noise(model: Model, rows: int = 1) -> Tensor:
    shape = (rows, *model.latent_shape(HEIGHT_PX, WIDTH_PX))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def velocity(model: Model, text: str = LONG, guidance: float = 1.0, sigma: float = 0.6) -> Tensor:
    size = {"height_px": HEIGHT_PX, "width_px": WIDTH_PX}
    x_BNC, sigma_B = noise(model).to(model.device), torch.tensor([sigma], device=model.device)
    return model.velocity(x_BNC, sigma_B, model.encode([text]), guidance=guidance, **size)


@torch.no_grad()
def denoised(model: Model, text: str, guidance: float) -> Tensor:
    x_BNC, sigmas = noise(model), model.sigmas(STEPS, HEIGHT_PX, WIDTH_PX)
    for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
        v_BNC = model.velocity(
            x_BNC,
            torch.tensor([sigma]),
            model.encode([text]),
            height_px=HEIGHT_PX,
            width_px=WIDTH_PX,
            guidance=guidance,
        )
        x_BNC = x_BNC + v_BNC * (sigma_next - sigma)
    return x_BNC


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("text", [SHORT, LONG])
def test_latents_and_pixels_are_those_of_the_plain_pipeline(made: Checkpoints, name: str, text: str) -> None:
    case, model = CASES[name], made.model(name)
    plain = case.plain.from_pretrained(made[name], **dict.fromkeys(case.left_out))
    plain.set_progress_bar_config(disable=True)
    start = noise(model)
    if isinstance(model, StableDiffusion3):
        start = model._unpacked(start, HEIGHT_PX, WIDTH_PX)
    asked = {"height": HEIGHT_PX, "width": WIDTH_PX, "num_inference_steps": STEPS, "latents": start, **case.options}

    theirs = plain(text, output_type="latent", **asked).images
    their_pixels = plain(text, output_type="np", **asked).images
    ours_BNC = denoised(model, text, case.guidance)

    theirs_BNC = model._packed(theirs) if isinstance(model, StableDiffusion3) else theirs
    scale = theirs_BNC.abs().max()
    assert (ours_BNC - theirs_BNC).abs().max() < 1e-5 * scale
    pixels = model.decode(ours_BNC, HEIGHT_PX, WIDTH_PX)
    np.testing.assert_allclose(pixels / 255, their_pixels, rtol=0, atol=0.5 / 255 + 1e-4)
    assert pixels.std() > 1


def test_a_prompt_that_is_too_long_is_cut_where_the_plain_pipeline_cuts_it(made: Checkpoints) -> None:
    case, text = CASES["qwen-image"], 300 * f"{SHORT} "
    model, plain = case.kind.load(str(made["qwen-image"]), CPU), case.plain.from_pretrained(made["qwen-image"])
    model.preload([text])

    theirs = plain.encode_prompt(text, max_sequence_length=512)[0]
    start, asked = noise(model), {"height": HEIGHT_PX, "width": WIDTH_PX, "num_inference_steps": STEPS}
    plain.set_progress_bar_config(disable=True)
    expected = plain(text, output_type="latent", latents=start, true_cfg_scale=1.0, **asked).images

    assert model.encode([text]).embeds_BTD.shape[1] == theirs.shape[1] == 512
    assert (denoised(model, text, 1.0) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_tokens_of_a_prompt_are_read_where_the_settings_say_so(made: Checkpoints, name: str) -> None:
    case, text, tokens = CASES[name], 20 * f"{SHORT} ", 16
    model = case.kind.load(str(made[name]), replace(CPU, text_tokens=tokens))
    model.preload([text])
    plain = case.plain.from_pretrained(made[name])
    plain.set_progress_bar_config(disable=True)
    start = noise(model)
    if isinstance(model, StableDiffusion3):
        start = model._unpacked(start, HEIGHT_PX, WIDTH_PX)
    asked = {"height": HEIGHT_PX, "width": WIDTH_PX, "num_inference_steps": STEPS, "latents": start, **case.options}

    theirs = plain(text, output_type="latent", max_sequence_length=tokens, **asked).images
    ours_BNC = denoised(model, text, case.guidance)

    theirs_BNC = model._packed(theirs) if isinstance(model, StableDiffusion3) else theirs
    assert (ours_BNC - theirs_BNC).abs().max() < 1e-5 * theirs_BNC.abs().max()
    assert model.encode([text]).mask_BT.shape[1] == tokens + (77 if name == "sd3" else 0)  # CLIP's stand before T5's


def test_texts_of_another_length_are_encoded_anew(made: Checkpoints, tmp_path: Path) -> None:
    cache = tmp_path / "texts.safetensors"
    widths = []
    for tokens in (0, 16, 16, 512):
        model = Flux.load(str(made["flux"]), replace(CPU, text_tokens=tokens))
        model.preload([SHORT], cache)
        widths.append(model.encode([SHORT]).embeds_BTD.shape[1])

    assert widths == [512, 16, 16, 512]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shift_of_the_settings_takes_the_place_of_the_checkpoints_schedule(made: Checkpoints, name: str) -> None:
    """As DanceGRPO draws FLUX.1: evenly spaced levels, shifted by 3, whatever the size."""
    model = CASES[name].kind.load(str(made[name]), replace(CPU, shift=3.0))
    even = torch.linspace(1, 0, 17, dtype=torch.float64)

    sigmas = [model.sigmas(16, *size) for size in ((HEIGHT_PX, WIDTH_PX), (32, 64))]

    np.testing.assert_allclose(sigmas[0], 3 * even / (1 + 2 * even), rtol=0, atol=1e-12)
    assert sigmas[0] == sigmas[1] != made.model(name).sigmas(16, HEIGHT_PX, WIDTH_PX)
    assert (sigmas[0][0], sigmas[0][-1]) == (1.0, 0.0)


@pytest.mark.parametrize("shift", [0.1, 0.3, 0.5, 1.0, 3.0, 100.0])
def test_any_shift_begins_with_pure_noise(shift: float) -> None:
    """Just beside 1, the first stochastic step would add a noise of millions, or be refused."""
    sigmas = shifted(shift, 8)

    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert list(sigmas) == sorted(set(sigmas), reverse=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_and_unpadded_prompts_give_the_same_image(made: Checkpoints, name: str) -> None:
    together, alone = made.model(name), CASES[name].kind.load(str(made[name]), CPU)
    alone.preload([SHORT])

    images = [model.decode(denoised(model, SHORT, 2.0), HEIGHT_PX, WIDTH_PX) for model in (together, alone)]

    assert together.encode([SHORT]).mask_BT.shape[1] >= alone.encode([SHORT]).mask_BT.shape[1]
    assert np.array_equal(images[0], images[1])


@pytest.mark.parametrize(("name", "matters"), [("flux", True), ("flux schnell", True), ("sd3", True)])
def test_guidance_reaches_the_prediction(made: Checkpoints, name: str, matters: bool) -> None:
    model = made.model(name)

    assert torch.equal(velocity(model, guidance=1.0), velocity(model, guidance=3.0)) != matters


def test_embedded_guidance_takes_one_pass_and_true_guidance_two(made: Checkpoints) -> None:
    passes = {}
    for name in ("flux", "flux schnell", "sd3"):
        model, count = made.model(name), itertools.count()
        model.transformer.register_forward_pre_hook(lambda *_, count=count: [next(count), None][1])
        velocity(model, guidance=3.0)
        passes[name] = next(count)

    assert passes == {"flux": 1, "flux schnell": 2, "sd3": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_changes_no_bit_of_a_gradient(made: Checkpoints, name: str) -> None:
    def gradients(checkpointed: bool) -> list[Tensor]:
        loading = Loading(device=CPU.device, dtype=CPU.dtype, gradient_checkpointing=checkpointed)
        model = made.model(name, loading)
        model.make_trainable(rank=2, alpha=0, seed=0)
        v_BNC = model.velocity(
            noise(model, 2),
            torch.tensor([0.9, 0.3]),
            model.encode([SHORT, LONG]),
            height_px=HEIGHT_PX,
            width_px=WIDTH_PX,
            guidance=2.0,
        )
        v_BNC.square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, checkpointed = gradients(False), gradients(True)

    assert plain
    assert any(gradient.any() for gradient in plain)
    assert all(map(torch.equal, plain, checkpointed))


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_that_are_no_numbers_are_no_image(made: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made.model(name)
    decode = model._pixels
    monkeypatch.setattr(model, "_pixels", lambda vae, latent: decode(vae, latent) * float("inf"))
    x_BNC = torch.zeros(1, *model.latent_shape(HEIGHT_PX, WIDTH_PX))

    with pytest.raises(SpotlightError, match=r"made pixels that are no numbers .*set model\.vae_dtype"):
        model.decode(x_BNC, HEIGHT_PX, WIDTH_PX)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predicts_nearly_the_same_and_the_vae_has_a_type_of_its_own(
    made: Checkpoints, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loading = Loading(device=CPU.device, dtype=dtype, vae_dtype=torch.float32, vae_tiling=True)
    half = CASES[name].kind.load(str(made[name]), loading)
    half.preload([SHORT, LONG], tmp_path / "texts.safetensors")

    exact, rounded = velocity(made.model(name)), velocity(half)

    assert rounded.dtype == torch.float32
    assert (exact - rounded).norm() < 0.1 * exact.norm()
    assert half._pipeline.vae.dtype == torch.float32
    assert half._pipeline.vae.use_tiling


@pytest.mark.parametrize("name", FAMILIES)
def test_a_lora_reaches_every_block_and_starts_without_effect(made: Checkpoints, name: str) -> None:
    model = made.model(name)
    before = velocity(model)

    model.make_trainable(rank=2, alpha=0, seed=0)

    blocks = [
        f"{each}.{number}"
        for each in ("transformer_blocks", "single_transformer_blocks")
        for number in range(len(getattr(model.transformer, each, ())))
    ]
    assert torch.equal(velocity(model), before)
    assert all(any(layer.startswith(f"{block}.") for layer in model.trainable()) for block in blocks)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_lora_beside_bfloat16_computes_in_it_what_peft_would_in_float32(made: Checkpoints, name: str) -> None:
    model = made.model(name, Loading(device=CPU.device, dtype=torch.bfloat16))
    alone = velocity(model)
    model.make_trainable(rank=4, alpha=0, seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))

    ours, our_gradients, our_bytes = pass_and_gradients(model)
    with model.reference():
        reference = velocity(model)
    for module in model.transformer.modules():
        if isinstance(module, LoraLayer):
            del module.__dict__["forward"]  # as peft has it
    theirs, their_gradients, their_bytes = pass_and_gradients(model)

    assert our_bytes < 0.9 * their_bytes
    assert torch.equal(reference, alone)
    assert (velocity(model) - alone).norm() > 0.1 * alone.norm()
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
    assert {gradient.dtype for gradient in our_gradients} == {torch.float32}
    apart = sum(float((a - b).square().sum()) for a, b in zip(our_gradients, their_gradients, strict=True))
    assert apart < 0.05**2 * sum(float(each.square().sum()) for each in their_gradients)


def pass_and_gradients(model: PipelineModel) -> tuple[Tensor, list[Tensor], int]:
    """What a pass predicts, the gradients of its mean square, and the bytes that were kept for these."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    size = {"height_px": HEIGHT_PX, "width_px": WIDTH_PX}
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        v_BNC = model.velocity(noise(model), torch.tensor([0.6]), model.encode([LONG]), guidance=1.0, **size)
    v_BNC.square().mean().backward()
    return v_BNC.detach(), [p.grad for p in model.parameters() if p.grad is not None], sum(kept.values())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_of_a_lora_need_no_base_weights(
    made: Checkpoints, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """The whole model is trained, and what holds adapters alone takes the same steps from the version it published."""
    empty = shutil.copytree(made[name], tmp_path / "empty")
    for weights in empty.glob("*/*.safetensors"):
        weights.unlink()
    settings = config.load(TINY).train
    updated = []
    whole = CASES[name].kind.load(str(made[name]), Loading(device=torch.device("cpu"), dtype=dtype))
    whole.make_trainable(rank=2, alpha=0.0, seed=0)
    start = {key: value.clone() for key, value in whole.trainable().items()}
    bare = CASES[name].kind.load(str(empty), Loading(device=torch.device("cpu"), dtype=dtype, base=False))
    bare.make_trainable(rank=2, alpha=0.0, seed=1)
    for model in (whole, bare):
        model.load_trainable(start)
        trainer = Trainer(model, settings)
        for update in range(2):
            rng = torch.Generator().manual_seed(update)
            gradients = {str(at): torch.randn(p.shape, generator=rng) for at, p in enumerate(model.parameters())}
            trainer.step(4, [gradients], iteration=0, update=update)
        trainer.finish([[(4, 0.0, {})]], [1.0], iteration=0)
        updated.append({**trainer.state(), **model.trainable(), **(trainer.old() or {})})

    torch.testing.assert_close(updated[1], updated[0], rtol=0, atol=0)
    assert not all(torch.equal(updated[0][key], start[key]) for key in start)
    frozen = [value for value in bare.transformer.parameters() if not value.requires_grad]
    assert {value.untyped_storage().nbytes() for value in frozen} == {dtype.itemsize}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_draws_what_the_cpu_draws(made: Checkpoints, name: str) -> None:
    here, there = made.model(name), made.model(name, Loading(device=torch.device("cuda"), dtype=torch.float32))

    expected, found = velocity(here, guidance=2.0), velocity(there, guidance=2.0)

    assert (found.cpu() - expected).abs().max() < 1e-3 * expected.abs().max()
    pixels = [model.decode(expected.to(model.device), HEIGHT_PX, WIDTH_PX) for model in (here, there)]
    assert np.abs(pixels[0].astype(int) - pixels[1].astype(int)).max() <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_an_estimate_of_a_gpus_memory_refuses_what_it_cannot_hold(made: Checkpoints, name: str) -> None:
    settings = config.resolve(
        {
            "data": {"train_prompts": "a", "validation_prompts": "b"},
            "model": {"name": name, "path": str(made[name]), "device": "cuda", "height_px": 2**14, "width_px": 2**14},
        },
        Path(),
    )

    with pytest.raises(SpotlightError, match=r"needs about .* GB"):
        require_memory(settings)


def test_a_size_beyond_the_positions_of_sd3_is_refused(made: Checkpoints) -> None:
    with pytest.raises(SpotlightError, match="up to 192 px a side"):
        made.model("sd3").grid(8, 200)


def test_texts_of_another_encoder_are_encoded_anew(made: Checkpoints, tmp_path: Path) -> None:
    cache, changed = tmp_path / "texts.safetensors", shutil.copytree(made["flux"], tmp_path / "flux")
    Flux.load(str(made["flux"]), CPU).preload([SHORT], cache)
    before = cache.stat().st_mtime_ns
    Flux.load(str(made["flux"]), CPU).preload([SHORT], cache)
    assert cache.stat().st_mtime_ns == before
    file = changed / "text_encoder_2" / "model.safetensors"
    save_file({name: value * 2 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})

    model = Flux.load(str(changed), CPU)
    model.preload([SHORT], cache)

    alone = Flux.load(str(changed), CPU)
    alone.preload([SHORT])
    assert cache.stat().st_mtime_ns != before
    assert torch.equal(model.encode([SHORT]).embeds_BTD, alone.encode([SHORT]).embeds_BTD)


# Checkpoints that are broken


@pytest.mark.parametrize("name", FAMILIES)
def test_every_table_of_families_tells_the_same(name: str) -> None:
    kind, family = CASES[name].kind, checkpoints.FAMILIES[name]

    assert family.pipeline == kind.pipeline_class.__name__
    assert family.transformer == kind.transformer_class.__name__
    assert family.vae == kind.vae_class.__name__
    assert family.encoders == tuple(kind.encoder_classes)
    assert family.shares == (kind.transformer_class._cp_plan is not None)
    assert family.padded_to == (0 if kind.masks_padding else kind.text_tokens)


def break_transformer_class(directory: Path) -> None:
    file = directory / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": "UNet2DConditionModel"}))


def cut_short(directory: Path) -> None:
    (file,) = (directory / "vae").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def lie_of_the_header(directory: Path) -> None:
    (file,) = (directory / "vae").glob("*.safetensors")
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])


def pickle_weights(directory: Path) -> None:
    (file,) = (directory / "transformer").glob("*.safetensors")
    file.with_suffix(".bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    file.unlink()


def lose_index(directory: Path) -> None:
    (directory / "model_index.json").unlink()


def lose_weights(directory: Path) -> None:
    (file,) = (directory / "vae").glob("*.safetensors")
    file.unlink()


def leave_out_where_a_tensor_lies(directory: Path) -> None:
    (file,) = (directory / "vae").glob("*.safetensors")
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": []}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 123\n"


def lose_one_of_several_files(directory: Path) -> None:
    (file,) = (directory / "transformer").glob("*.safetensors")
    index = {"weight_map": {"a": file.name, "b": "other.safetensors"}}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))


def leave_a_pointer(directory: Path) -> None:
    (file,) = (directory / "transformer").glob("*.safetensors")
    file.write_text(LFS)


def keep_a_variant_only(directory: Path) -> None:
    (file,) = (directory / "transformer").glob("*.safetensors")
    file.rename(file.with_suffix(".fp16.safetensors"))


def quantize(directory: Path) -> None:
    file = directory / "transformer" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )


def take_another_scheduler(directory: Path) -> None:
    scheduler = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))


def sample_with_noise(directory: Path) -> None:
    file = directory / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stochastic_sampling": True}))


BROKEN = {
    "class": (break_transformer_class, r"transformer/config\.json: .*'UNet2DConditionModel'"),
    "cut short": (cut_short, r"vae/.*safetensors: damaged or cut short"),
    "header": (lie_of_the_header, rf"vae/.*safetensors: damaged or cut short \(a header of {2**40} bytes\)"),
    "offsets": (leave_out_where_a_tensor_lies, r"vae/.*safetensors: damaged or cut short"),
    "pickled": (pickle_weights, r"transformer: its weights are pickled \(diffusion_pytorch_model\.bin\)"),
    "no index": (lose_index, "has no model_index.json"),
    "no weights": (lose_weights, r"vae: has no \.safetensors file"),
    "one lost": (lose_one_of_several_files, r"transformer/other\.safetensors: named by .*\.index\.json, but missing"),
    "pointer": (leave_a_pointer, r"diffusion_pytorch_model\.safetensors: is a Git LFS pointer"),
    "variant": (keep_a_variant_only, r"transformer: its weights are in diffusion_pytorch_model\.fp16\.safetensors"),
    "quantized": (quantize, r"transformer/config\.json: the weights are quantized"),
    "scheduler": (take_another_scheduler, r"scheduler_config\.json: .*'UniPCMultistepScheduler'"),
    "sampler": (sample_with_noise, r"scheduler_config\.json: stochastic_sampling is True, and False is expected"),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_checkpoint_gets_one_clear_message(made: Checkpoints, tmp_path: Path, name: str, damage: str) -> None:
    broken, message = BROKEN[damage]
    directory = shutil.copytree(made[name], tmp_path / "pipeline")
    broken(directory)

    with pytest.raises(SpotlightError, match=message) as raised:
        CASES[name].kind.load(str(directory), CPU)
    with pytest.raises(SpotlightError, match=message):
        checkpoints.survey(name, directory)

    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_is_a_pointer_is_refused_before_a_run_begins(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline")
    (directory / "tokenizer_2" / "tokenizer.json").write_text(LFS)

    with pytest.raises(SpotlightError, match=r"tokenizer_2/tokenizer\.json: is a Git LFS pointer"):
        checkpoints.survey("flux", directory)


def test_a_variant_beside_the_weights_is_not_read(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline") / "transformer"
    bytes_before = checkpoints.stored_bytes(directory)
    (file,) = directory.glob("*.safetensors")
    save_file({name: value.half() for name, value in load_file(file).items()}, file.with_suffix(".fp16.safetensors"))

    assert checkpoints.stored_bytes(directory) == bytes_before
    assert checkpoints.dtypes(directory) == {"F32"}
    assert checkpoints.weight_files(directory) == [file]


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_latents_that_are_shifted_by_no_number_are_refused_before_a_run_begins(
    made: Checkpoints, tmp_path: Path, name: str
) -> None:
    directory = shutil.copytree(made[name], tmp_path / "pipeline")
    file = directory / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift_factor": None}))

    for look in (lambda: checkpoints.survey(name, directory), lambda: CASES[name].kind.load(str(directory), CPU)):
        with pytest.raises(SpotlightError, match=r"vae/config\.json: shift_factor is None, and a number is expected"):
            look()


def test_weights_are_told_from_others_by_a_part_of_them(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline")
    before = checkpoints.fingerprint("flux", directory)
    (directory / "transformer" / "config.json").touch()
    assert checkpoints.fingerprint("flux", directory) == before == checkpoints.fingerprint("flux", made["flux"])

    (file,) = (directory / "transformer").glob("*.safetensors")
    state = load_file(file)
    name = sorted(state)[len(state) // 2]  # neither at the file's start nor at its end
    size = file.stat().st_size
    save_file({**state, name: state[name] + 0.01}, file, metadata={"format": "pt"})

    assert file.stat().st_size == size
    assert checkpoints.fingerprint("flux", directory) != before


def test_weights_are_told_from_others_by_their_size_where_all_that_is_looked_at_is_equal(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    for file, size in ((short, 2_000_000), (long, 3_000_000)):
        with file.open("wb") as stream:
            stream.truncate(size)  # zeros

    assert checkpoints.fingerprint("tiny-text", short) != checkpoints.fingerprint("tiny-text", long)


def test_a_quantized_encoder_whose_library_is_absent_is_named(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline")
    file = directory / "text_encoder_2" / "config.json"
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    model = Flux.load(str(directory), CPU)

    with pytest.raises(SpotlightError, match="text_encoder_2: not loadable as T5EncoderModel: .*bitsandbytes"):
        model.preload([SHORT])


def test_a_vae_of_other_latents_is_refused_before_anything_is_drawn(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline")
    AutoencoderKL.from_config({**AutoencoderKL.load_config(directory / "vae"), "latent_channels": 8}).save_pretrained(
        directory / "vae"
    )

    with pytest.raises(SpotlightError, match="vae: its latents have 8 channels, and a token of the transformer has 16"):
        Flux.load(str(directory), CPU)


def test_texts_of_another_width_are_refused_before_anything_is_drawn(made: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(made["flux"], tmp_path / "pipeline")
    shutil.rmtree(directory / "text_encoder_2")
    shutil.copytree(made["sd3"] / "text_encoder_3", directory / "text_encoder_2")
    model = Flux.load(str(directory), CPU)

    with pytest.raises(
        SpotlightError, match=r"give a text 32 features, and the transformer takes 16 \(joint_attention"
    ):
        model.preload([SHORT])


@pytest.mark.parametrize(
    ("name", "widths", "message"),
    [
        ("sd3", [1, 2], "a gang of 2 cannot share a forward pass of .*: diffusers has no plan for splitting a SD3"),
        ("qwen-image", [1, 3], "a gang of 3 cannot evenly share the 4 attention heads of "),
        ("flux", [1, 3], "a gang of 3 cannot evenly share the 4 attention heads of "),
    ],
)
def test_a_gang_that_cannot_share_a_model_is_refused_before_a_cluster_begins(
    made: Checkpoints, tmp_path: Path, name: str, widths: list[int], message: str
) -> None:
    settings = settings_file(tmp_path)
    of_model = [f"model.name={name}", f"model.path={made[name]}", "model.height_px=64", "model.width_px=64"]

    with pytest.raises(SpotlightError, match=f"strategy.widths: {message}"):
        Run(settings, [*of_model, f"strategy.widths={widths}"])


@pytest.mark.parametrize(
    ("name", "overrides", "is_said"),
    [
        ("flux", [], True),
        ("flux", ["rollout.guidance=3.5"], False),
        ("flux schnell", [], False),  # it takes none
        ("flux", ["train.algorithm=nft", "rollout.sampler=ode"], False),  # as Flow-Factory trains it
    ],
)
def test_a_transformer_that_is_to_be_told_guidance_and_is_told_none_is_doubted(
    made: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, overrides: list[str], is_said: bool
) -> None:
    of_model = ["model.name=flux", f"model.path={made[name]}", "model.height_px=64", "model.width_px=64"]
    settings = ["train.algorithm=grpo", "train.lora_rank=4", "rollout.sampler=sde", *overrides]

    check_inputs(config.load(settings_file(tmp_path), [*of_model, *settings]))

    assert ("rollout.guidance = 1 with" in caplog.text) == is_said


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_counted_without_loading_them(made: Checkpoints, name: str) -> None:
    model = made.model(name)

    found = checkpoints.survey(name, made[name])

    assert found.transformer.parameters == sum(value.numel() for value in model.transformer.state_dict().values())
    assert found.vae.parameters == sum(value.numel() for value in model._pipeline.vae.state_dict().values())
    assert len(found.encoders) == len(model.encoder_classes)
