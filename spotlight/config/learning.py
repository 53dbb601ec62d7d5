"""What is learnt, and how: the model, its prompts and rewards, what is rolled out, explored and trained on, and kept.

Defaults suit a first run; ``examples/ocr-tiny.toml`` and ``examples/presets`` say where they differ, and why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from spotlight.config.section import DAY_S, GUIDANCE_MAX, PX_MAX, WIDTH_MAX, Section, check_address, distinct
from spotlight.files import OBJECT_SCHEMES, is_url, shown
from spotlight.records import STOCHASTIC, Policy, Sampler

SEED_MAX = 2**63 - 1
"""The largest integer of TOML."""
BATCH_MAX = 4096
"""Samples in one forward batch: far beyond what pays (`plan.batching.SEEDS_MAX`)."""
STEPS_MAX = 1000
"""Noise levels that a flow model is trained on."""
NAME_MAX = 100
"""Bytes of a run's name: a directory's name has 255, and the time stands behind it."""


class RunSection(Section):
    """What a run is called, how long it is, and how it is validated."""

    name: str = "run"
    """Its directory's name begins with it."""
    seed: int = Field(0, ge=0, le=SEED_MAX)
    """Fixes all that is drawn: noise, prompts, made-up traces."""
    iterations: int = Field(30, ge=1, le=1_000_000)
    """Rounds of rollout, reward and training."""
    dir: str = "runs"
    """Run directories are made in here; relative to the working directory, or the URL of a place in an object store,
    such as ``s3://bucket/runs``. Keys come from the environment of the driver and of the workers."""
    shared: bool = False
    """Whether other users of the machine may look into the run directory, as far as the umask lets them."""
    validate_every: int = Field(10, ge=1, le=1_000_000)
    """Iterations between validations. Validation also runs before the first and after the last iteration."""
    validation_seeds: int = Field(4, ge=1, le=BATCH_MAX)
    """Images per validation prompt, all of them one forward batch."""
    validation_steps: int = Field(0, ge=0, le=STEPS_MAX)
    """Denoising steps of a validation image; 0 means as many as a rollout. Published recipes train on images of fewer
    steps than they are judged by."""
    validate_policy: Literal["auto", "trained", "old", "average"] = "auto"
    """Which weights of a version are validated and exported: those in training, the older ones that sample
    (``train.old_decay``), or their moving average (``train.ema_decay``). "auto" is the average where there is one, else
    the ones that sample."""
    report: bool = True
    """Whether ``report.html`` is written when the run ends; ``spotlight report`` writes it at any time."""

    @model_validator(mode="after")
    def _name_is_of_a_directory(self) -> Self:
        unfit = "/" in self.name or not self.name.isprintable() or len(self.name.encode()) > NAME_MAX
        if unfit or not self.name or self.name.startswith("-"):
            raise ValueError(
                f"run.name = {self.name[:NAME_MAX]!r} begins the name of a directory in run.dir: give it no '/', no "
                f"control characters, no '-' at its beginning, and 1 to {NAME_MAX} bytes"
            )
        if "\0" in self.dir:
            raise ValueError(f"run.dir = {shown(self.dir)}: a path has no NUL; give that of a directory")
        if is_url(self.dir):
            check_address("run.dir", self.dir, OBJECT_SCHEMES)
        scheme, colon, rest = self.dir.partition(":/")
        if colon and scheme in OBJECT_SCHEMES and not rest.startswith("/"):
            raise ValueError(f"run.dir = {shown(self.dir)}: a URL has two slashes: give {scheme}://{rest}")
        return self


EMBEDDED = {"tiny-text": (16, 32), "tiny-mixed": (16, 48), "tiny-shapes": (24, 24)}
"""Models whose weights are in the package, and the height and width of their images, in pixels: they draw no others."""


T5_TOKENS_MAX = 512
"""Of a prompt; the pipelines of SD 3.5 and FLUX.1 refuse more."""


class ModelSection(Section):
    """What is trained, and the size of its images."""

    name: Literal["tiny-text", "tiny-mixed", "tiny-shapes", "qwen-image", "sd3", "flux"] = "tiny-text"
    """An embedded model (of two digits; of one to four digits and capitals; of coloured shapes), or a checkpoint of
    Qwen-Image, Stable Diffusion 3.5 or FLUX.1."""
    path: str = ""
    """Directory of a diffusers pipeline; or, of an embedded model, a file of other weights, else empty."""
    height_px: int = Field(16, ge=4, le=PX_MAX)
    """Of an image. May be left out of the embedded models: "tiny-text" draws 16 x 32 only, "tiny-mixed" 16 x 48,
    "tiny-shapes" 24 x 24."""
    width_px: int = Field(32, ge=4, le=PX_MAX)
    """As ``height_px``."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the model's weights; a LoRA is always float32."""
    vae_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights that make pixels of latents; "auto": as ``dtype``."""
    vae_tiling: bool = False
    """Pixels are made tile by tile, which takes less memory and changes the seams slightly."""
    gradient_checkpointing: bool = False
    """Training keeps each block's input only, and computes the rest again: the same bits, about 4/3 of the time, a
    fraction of the memory. Left out, it is on for all models but the embedded ones."""
    text_tokens: int = Field(0, ge=0, le=1024, multiple_of=8)
    """Most tokens of a prompt that Qwen2.5-VL or T5 reads; T5 pads all prompts to so many, so fewer take less time, and
    draw slightly other images. A multiple of 8, so that gangs can share them. 0: as many as the diffusers pipeline
    reads, 512 with Qwen-Image and FLUX.1, and 256 with SD 3.5. Flow-GRPO and DiffusionNFT read 128 with SD 3.5 and
    FLUX.1, verl-omni 256 with Qwen-Image. CLIP always reads 77."""
    shift: float = Field(0.0, ge=0, le=100)
    """Of the sampler's noise levels, towards the noisy ones: evenly spaced levels t become ``s t / (1 + (s - 1) t)``.
    DanceGRPO and MixGRPO draw FLUX.1 with 3. 0: the checkpoint's own schedule, which may depend on the size; exported
    weights are drawn with that, unless their scheduler is changed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where torch finds one."""
    deterministic: bool = True
    """A GPU computes the same bits each time, so no kill changes any, if all GPUs of the run are of one kind. False: it
    may take faster kernels whose sums have no fixed order. On a processor the bits are always the same."""
    cuda_graphs: bool = True
    """A GPU denoises with passes that are captured once for their shapes, and repeated as a whole, which saves the time
    that their kernels take to be launched: with few samples it is most of a pass. The same bits; it keeps the memory of
    a pass. Not in gangs."""
    pack_texts: bool = True
    """Qwen-Image in half precision attends without a mask, its texts packed, on a GPU that has flash attention for it
    (compute capability 8.0 or higher; seen on 9.0). At 1280 px that takes less time, most of all where sums have a
    fixed order. In gangs, with other models, in float32 and on other devices it changes nothing."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_model(cls, tree: Any) -> Any:
        """Large models save memory; the embedded ones draw one size."""
        if not isinstance(tree, dict):
            return tree
        name = tree.get("name", "tiny-text")
        size = EMBEDDED.get(name) if isinstance(name, str) else None
        sizes = dict(zip(("height_px", "width_px"), size, strict=True)) if size else {}
        return {"gradient_checkpointing": size is None, **sizes, **tree}

    @model_validator(mode="after")
    def _checkpoints_need_a_path_and_a_size(self) -> Self:
        if self.embedded and (size := EMBEDDED[self.name]) != (self.height_px, self.width_px):
            raise ValueError(
                f"model.height_px x model.width_px is {self.height_px} x {self.width_px}, and {self.name!r} draws "
                f"{size[0]} x {size[1]} only: leave both out"
            )
        if self.embedded and (self.text_tokens or self.shift):
            raise ValueError(
                f"model.text_tokens and model.shift are of checkpoints, and {self.name!r} is an embedded model: leave "
                "them out"
            )
        if self.name in ("sd3", "flux") and self.text_tokens > T5_TOKENS_MAX:
            raise ValueError(
                f"model.text_tokens = {self.text_tokens}: {self.name!r} reads {T5_TOKENS_MAX} at most, as its pipeline "
                "does"
            )
        if not self.embedded and not self.path:
            raise ValueError(f'model.name = "{self.name}" needs model.path = "DIR", a diffusers pipeline directory')
        if not self.embedded and not {"height_px", "width_px"} <= self.model_fields_set:
            raise ValueError(
                f'model.name = "{self.name}" needs model.height_px and model.width_px, the size of its images, such as '
                "512 each: the defaults are the embedded model's"
            )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the package itself holds its weights."""
        return self.name in EMBEDDED


class DataSection(Section):
    """The prompts."""

    train_prompts: str = Field(min_length=1)
    """Text file, one prompt a line; or .jsonl, .csv, .tsv, .parquet, or a directory that `datasets` saved, with a
    column "prompt" (or "text", "caption", "input") and metadata for rewards. Relative to the settings file."""
    validation_prompts: str = Field(min_length=1)
    """The same, held out from training."""


class RolloutSection(Section):
    """The samples that are trained on."""

    prompts: int = Field(8, ge=1, le=100_000)
    """Prompts (groups) per iteration."""
    seeds_kept: int = Field(8, ge=2, le=10_000)
    """Samples per group that are rolled out and trained on. If exploration chooses them, and an iteration waits for
    training, half as many can teach nearly as much (docs/results/time_and_dollars.md)."""
    request_seeds: int = Field(0, ge=0, le=BATCH_MAX)
    """Most samples in one request: one forward batch. 0 leaves it to `plan.batching.request_seeds`: up to 8, such that
    the workers of the rollout pools have no short last wave, and not so few that launching kernels takes the time."""
    prompts_ahead: int = Field(0, ge=0, le=100_000)
    """Of the prompts of an iteration, so many are rolled out while the one before it trains, by spot workers that would
    idle, with weights that are one version old (one-step off-policy). For DiffusionNFT without exploration."""
    steps: int = Field(8, ge=1, le=STEPS_MAX)
    """Denoising steps of a sample."""
    sampler: Sampler = "ode"
    """"ode" takes Euler's steps. "dpm2" (DPM-Solver++(2M), as in DiffusionNFT's code) also uses the velocity of the
    step before, and so needs fewer steps; what goes on after a preemption takes one pass more. Both are deterministic;
    the others take stochastic steps, as Flow-GRPO needs. Validation takes Euler's steps, exploration too where the
    sampler is stochastic."""
    noise_level: float = Field(0.7, gt=0, le=10)
    """Of stochastic steps."""
    sde_window: tuple[int, int] = (0, 2)
    """Steps ``[start, end)`` that may be stochastic; not used by the ODE sampler."""
    sde_window_size: int = Field(0, ge=0, le=STEPS_MAX)
    """How many of them are, in a row and the same for all samples of an iteration; 0: all."""
    sde_window_order: Literal["random", "sliding"] = "random"
    """Where an iteration's are: anywhere in ``sde_window``, drawn by ``run.seed``; or from its start, moving on by
    ``sde_window_stride`` every ``sde_window_every`` iterations and beginning again at its end."""
    sde_window_stride: int = Field(1, ge=1, le=STEPS_MAX)
    """See ``sde_window_order``."""
    sde_window_every: int = Field(1, ge=1, le=1_000_000)
    """See ``sde_window_order``."""
    same_noise: bool = False
    """All samples of a prompt begin with one noise, and differ by that of their stochastic steps only, as in DanceGRPO
    and MixGRPO (``init_same_noise``; Flow-GRPO's ``same_latent``). Without exploration, which chooses what they begin
    with."""
    guidance: float = Field(1.0, ge=1, le=GUIDANCE_MAX)
    """Classifier-free guidance, in denoising and in training; above 1 a step takes two passes, unless the model was
    distilled to take guidance as an input, as FLUX.1-dev was."""

    @model_validator(mode="after")
    def _window_is_of_steps(self) -> Self:
        if not all(0 <= step <= STEPS_MAX for step in self.sde_window):
            raise ValueError(f"rollout.sde_window = {shown(list(self.sde_window))} must lie in [0, {STEPS_MAX}]")
        return self

    @property
    def is_stochastic(self) -> bool:
        return self.sampler in STOCHASTIC

    @property
    def stochastic_steps(self) -> int:
        """Of a sample, by samplers that have any."""
        return self.sde_window_size or self.sde_window[1] - self.sde_window[0]


class ExplorationSection(Section):
    """The search for seeds that the next iteration is trained on."""

    prompts: int = Field(0, ge=0, le=100_000)
    """Prompts of which candidates are tried. Those ``rollout.prompts`` of them whose kept rewards vary most are rolled
    out, so that no training goes into what is solved or hopeless. 0 means as many as are rolled out."""
    seeds_tried: int = Field(32, ge=1, lt=2**20)
    """Most candidate seeds per prompt and iteration, on average over its prompts. Replacements of samples without a
    reward are numbered from 2^20 on."""
    request_seeds: int = Field(16, ge=1, le=BATCH_MAX)
    """Candidates in one request: one forward batch."""
    rounds: int = Field(0, ge=0, le=1000)
    """How many times the planner chooses; each round uses the scores of all but the one before. 0 means as many, up to
    16, as keep those busy who explore, for as many candidates as there is time for."""
    steps: int = Field(0, ge=0, le=STEPS_MAX)
    """Denoising steps of a candidate; 0 means as many as a rollout."""
    reuse: bool = False
    """Train on the kept candidates as exploration drew them, instead of rolling their seeds out again: with weights one
    version old (one-step off-policy) where exploration is "stale", with current ones where it is "blocking". For
    DiffusionNFT, which trains on clean samples, whoever drew them. So the planner gives prompt after prompt
    ``rollout.seeds_kept`` candidates before any gets more; one that has fewer when training ends is rolled out."""
    planner: Literal["bandit", "equal"] = "bandit"
    """"bandit": candidates go where they raise the variance of the kept seeds most; "equal": to all prompts alike."""
    budget: Literal["time", "fixed", "worth"] = "time"
    """"time": the end of training closes exploration; "fixed": every candidate is tried; "worth": candidates
    are tried while the next ones raise the expected variance of the kept seeds by a larger share than they lengthen the
    iteration. Seconds in which spot GPUs would idle count as free. It is for clusters whose GPUs could all roll out or
    train instead (``strategy.train_pools``)."""


FILES_IN_OPTIONS = {"aesthetic": ("head",), "geneval": ("clip",)}
"""By the name of a reward: those of its options that are paths, relative to the settings file."""


class RewardSection(Section):
    """What scores images. Several ``[[reward]]`` tables are added up, each times its weight."""

    name: str = "ocr"
    """"ocr" (one line that fills the image), "scene-ocr", "vlm-ocr", "geneval", "clip-score", "pickscore", "aesthetic",
    "http", "chat", "chat-ocr"; or ``module:Class`` of your own."""
    attempts: int = Field(3, ge=1, le=10)
    """Times that a failing scorer is tried before a sample is dropped and replaced; of several, the first table's. The
    pause between two doubles each time: from 0.05 s to 13 s before the tenth."""
    batch: int = Field(0, ge=0, le=BATCH_MAX)
    """Most images that the scorer is given at once; of several, the first table's. 0: all of a request."""
    limit_s: float = Field(600.0, gt=0, le=DAY_S)
    """Longest that it may take to score a request, all attempts together; of several, the first table's. The engine
    process is then ended, and the request's samples have no reward, as if the scorer had failed."""
    patience_s: float = Field(300.0, ge=0, le=DAY_S)
    """For how long a server that is not there, or says that it is busy, is waited for each time, half of ``limit_s`` at
    most; of several, the first table's. Then the run ends, and can be resumed. 0: it counts as a failure."""
    weight: float = Field(1.0, ge=-1000, le=1000)
    """Of this reward in the sum. Flow-GRPO and DiffusionNFT divide PickScore by 26, and their CLIP score is the cosine
    times 100 / 30: so a weight of theirs is 1/26 as much here ("pickscore") or 3.33 times as much ("clip-score")."""
    tags: tuple[str, ...] = ()
    """Only prompts are scored whose ``tag`` in the metadata is one of these, and others get 0 from this table: so data
    sets that are scored in different ways are trained on together, in one file. Left out: all prompts."""
    range: tuple[float, float] | None = None
    """Least and largest score; one outside is a fault. Left out, it is the scorer's own."""
    path: str = ""
    """Checkpoint directory of "clip-score", "pickscore", "aesthetic", "vlm-ocr" and the detector "mask2former";
    relative to the settings file."""
    module_dir: str = ""
    """Where the file of ``module:Class`` is looked for, if Python does not find it by itself; relative to the settings
    file. All workers must see it there. Left out, it is the directory of the settings file."""
    url: str = ""
    """Server of "http" (``POST URL/compute``), "chat" and "chat-ocr" (``POST URL/v1/chat/completions``)."""
    timeout_s: float = Field(60.0, gt=0, le=3600)
    """Longest that a server may take for one answer."""
    options: dict[str, Any] = {}
    """Further arguments: ``graded`` of those that read text and of "geneval" (false: 1 if all is there that was asked
    for, else 0); ``head`` of "aesthetic"; ``model`` of "chat-ocr"; ``model`` and ``question`` of "chat"; ``question``,
    ``text`` and ``tokens`` of "vlm-ocr"; ``detector`` ("shapes", "mask2former" or ``module:Class``) of "geneval", the
    rest being the detector's, as ``clip`` of "mask2former"; those of your own class."""
    also: tuple[RewardSection, ...] = ()
    """The further ``[[reward]]`` tables."""

    @model_validator(mode="after")
    def _graded_or_not(self) -> Self:
        graded = self.options.get("graded", True)
        if ":" not in self.name and not isinstance(graded, bool):
            raise ValueError(f"reward.options.graded = {graded!r} of {self.name!r} must be true or false")
        return self

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"reward.range = {list(self.range)} must be the least score and a larger one")
        if any(table.also for table in self.also):
            raise ValueError("a [[reward]] table has no tables beside it of its own: write them one after the other")
        if not self.weight:
            raise ValueError("reward.weight = 0 counts nothing: give it another weight, or leave the table out")
        return self


OLD_DECAYS = ("copy", "linear", "delayed")


def _old_decay(value: Any) -> Any:
    if value in OLD_DECAYS or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1):
        return value
    raise ValueError(f"train.old_decay = {value!r} must be {', '.join(map(repr, OLD_DECAYS))} or a number in [0, 1)")


class TrainSection(Section):
    """How weights are updated."""

    algorithm: Literal["nft", "grpo", "grpo-guard", "awm", "dpo"] = "nft"
    """DiffusionNFT; Flow-GRPO, or GRPO-Guard, which corrects its ratios; advantage-weighted matching; or online
    Diffusion-DPO. The first and the last two train on clean samples at drawn noise levels, the others on the
    stochastic steps of the sampler."""
    learning_rate: float = Field(3e-4, gt=0, le=1)
    """Of AdamW."""
    warm_up: int = Field(0, ge=0, le=1_000_000)
    """The first updates, over which the learning rate rises evenly to its value."""
    weight_decay: float = Field(1e-4, ge=0, le=10)
    """Of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0, le=1e9)
    """A longer gradient is shortened to it."""
    updates: int = Field(1, ge=1, le=10_000)
    """Optimizer steps per iteration; the samples are split evenly among them."""
    parts: int = Field(8, ge=1, le=1024)
    """Parts that each update's samples are cut into, never the number of workers: each part's gradient is a task of its
    own, on whichever worker is free, and the same bits wherever it is computed. Use more parts than workers that train,
    so that all end at about the same time; use fewer if to launch a part takes as long as to compute it. Where several
    workers train, each then adds a slice of all gradients, so that the update has only one sum to fetch."""
    width: int = Field(1, ge=1, le=WIDTH_MAX)
    """Workers of a node that share the passes of a part (sequence parallelism), where one GPU does not hold the
    activations. The same bits whoever they are, but others than with another width."""
    micro_batch: int = Field(64, ge=1, le=100_000)
    """Rows (samples x timesteps) in one forward pass; no effect on the result beyond rounding."""
    cuda_graphs: bool = False
    """A GPU trains with captured passes, too, if ``model.cuda_graphs`` is on: the same bits. Its passes with few rows
    take long to launch, one kernel at a time. Two pairs of graphs keep the activations of a pass. Not in gangs. **Not
    verified on a GPU**: off."""
    lora_rank: int = Field(0, ge=0, le=4096)
    """0 trains the full weights."""
    lora_alpha: float = Field(0.0, ge=0, le=1e4)
    """0 means twice the rank."""
    lora_path: str = ""
    """A LoRA to start from, of the same layers, rank and alpha: a file or directory that `spotlight export`, diffusers
    or peft (so Flow-GRPO and DiffusionNFT) wrote; relative to the settings file. It is read as the run begins, by one
    worker, and no more. Empty: one without effect. ``kl`` still is the distance to the checkpoint without it."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Of averaged weights, which are kept beside each version and validated: how much of the average stays after an
    update (less in the first ones, so that it soon forgets the untrained weights); 0 turns it off. DiffusionNFT
    has 0.9; so has Flow-GRPO, but of every eighth update, which is some 0.987 here."""
    advantage_std: Literal["global", "group", "none"] = "global"
    """Spread that advantages are divided by. "global": of all rewards of the iteration, so that training waits for the
    last of them. "group": of each prompt's own, so that training may begin with the first prompts that are scored.
    "none", as in Dr. GRPO (arXiv 2503.20783): prompts count by their spread, and ``advantage_clip`` is in units of
    reward."""
    seeds_used: int = Field(0, ge=0, le=100_000)
    """Samples of each prompt that are trained on, of the ``rollout.seeds_kept``: those whose rewards vary most, with
    advantages among themselves (PODS, arXiv 2504.13818), so that training takes so much less; 0: all."""
    filter_groups: bool = False
    """Prompts whose samples all have the same reward are not trained on: they have no advantages, and take as long as
    any other. So does Flow-GRPO's script for SD 3.5; DAPO (arXiv 2503.14476) draws others in their place, which this
    does not. What ``kl`` or DiffusionNFT's old policy would hold these samples to is left out, too."""
    combine: Literal["rewards", "advantages"] = "rewards"
    """What is added up where there are several ``[[reward]]`` tables, each times its weight: rewards, of whose sum
    advantages are made; or advantages, made of each reward by itself, so that no reward's scale outweighs another's
    (as DanceGRPO does), but where ``advantage_std`` is "none". Seeds are chosen by the sum of rewards."""
    advantage_clip: float = Field(5.0, gt=0, le=1000)
    """Advantages are cut off at plus and minus this."""
    kl: float = Field(0.0, ge=0, le=1e4)
    """Weight of the distance to the reference policy (adapter off, or the starting weights)."""
    old_decay: Annotated[Literal["copy", "linear", "delayed"] | float, BeforeValidator(_old_decay)] = 0.5
    """Of the old policy, which samples and is contrasted with: how much of it stays after an iteration, the rest being
    the policy in training. "copy": nothing, so the two are one; "linear": 0.001 for each update so far, up to 0.5;
    "delayed": nothing for 75 updates, then 0.0075 for each, up to 0.999; or a share. DiffusionNFT only. Validate
    another policy than one that hardly moves any more: give ``ema_decay``, as the published code does."""
    kl_form: Literal["paper", "code"] = "paper"
    """Of the distance in Flow-GRPO and GRPO-Guard: between steps as they are taken; or as the published code has it,
    which leaves the step size out of the noise ("sde" only) and is smaller by it."""
    clip_range: float = Field(1e-4, gt=0, le=1)
    """Of the ratio of policies; Flow-GRPO, GRPO-Guard and AWM. Left out, it is what their published recipes have: 1e-4,
    2e-6 and 1."""
    awm_weighting: Literal["uniform", "t", "ghuber"] = "uniform"
    """Of the matching error at level t: as it is; times t; or its generalised Huber form times t. AWM only."""
    awm_power: float = Field(0.25, gt=0, le=1)
    """Of the generalised Huber form; AWM only."""
    dpo_beta: float = Field(100.0, gt=0, le=1e6)
    """How strongly a preference counts; Diffusion-DPO only."""
    dpo_pairs: int = Field(1, ge=1, le=5000)
    """Most pairs of a prompt's samples: the best with the worst, the second best with the second worst, and so on;
    Diffusion-DPO only."""
    nft_beta: float = Field(0.1, gt=0, le=1000)
    """How far the implicit policies are from the old one; DiffusionNFT only. No effect in the first update of an
    iteration where ``old_decay`` is "copy"."""
    timesteps: int = Field(2, ge=1, le=STEPS_MAX)
    """Noise levels drawn per sample (or pair) and iteration; not Flow-GRPO and GRPO-Guard."""
    levels: Literal["sampler", "uniform"] = "sampler"
    """Noise levels that are drawn from: those that the sampler visits, each once before any twice, or all in (0, 1];
    not Flow-GRPO and GRPO-Guard."""
    steps_used: int = Field(0, ge=0, le=STEPS_MAX)
    """Of the stochastic steps that samples were made with, so many are trained on, drawn anew in each iteration, the
    same for all samples, so that training takes so much less; 0: all. DanceGRPO trains on 9 of 15, drawn for each
    sample. Flow-GRPO and GRPO-Guard."""
    ratio_tolerance: float = Field(1e-2, gt=0, le=1)
    """Largest |ratio - 1| before the first update of an iteration; Flow-GRPO and GRPO-Guard."""

    @model_validator(mode="after")
    def _starts_from_a_lora_with_one(self) -> Self:
        if self.lora_path and not self.lora_rank:
            raise ValueError(
                f"train.lora_path = {self.lora_path!r} needs train.lora_rank, the rank of that LoRA: with 0, all "
                "weights are trained"
            )
        return self

    @property
    def is_stepwise(self) -> bool:
        """Whether it trains on the stochastic steps that samples were made with, rather than on clean samples."""
        return self.algorithm in ("grpo", "grpo-guard")

    @model_validator(mode="before")
    @classmethod
    def _clips_as_published(cls, given: Any) -> Any:
        """Ratios of log-probabilities that are matching errors (AWM) move a thousand times as far as those of steps."""
        if not isinstance(given, dict) or "clip_range" in given:
            return given
        published = {"grpo-guard": 2e-6, "awm": 1.0}.get(str(given.get("algorithm")))
        return given if published is None else {**given, "clip_range": published}

    @property
    def keeps_old(self) -> bool:
        """Whether the policy that samples is another than the one in training."""
        return self.algorithm == "nft" and self.old_decay not in ("copy", 0)

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the one that training started from."""
        return self.kl > 0 or self.algorithm == "dpo"

    @property
    def sampling_policy(self) -> Policy:
        return "old" if self.keeps_old else "trained"


class LatentsSection(Section):
    """Where latents are kept, and for how long."""

    url: str = ""
    """Where steps are committed, each run's in a folder of its own: a path, relative to the settings file, or an fsspec
    URL; empty means inside the run directory."""
    keep: Literal["clean", "all", "none"] = "clean"
    """What of a finished iteration stays: clean latents, every committed step, or nothing."""

    @model_validator(mode="after")
    def _url_holds_no_secret(self) -> Self:
        if is_url(self.url):
            check_address("latents.url", self.url, ())
        return self


class TrackingSection(Section):
    """Where metrics go beside the run directory."""

    to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], AfterValidator(distinct)] = ("tensorboard",)
    """TensorBoard's events are written into the run directory, where it is installed. W&B and MLflow must be installed,
    and take keys and addresses from their own environment (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ...)."""
    project: str = Field("spotlight", min_length=1)
    """What W&B calls a project, and MLflow an experiment."""
