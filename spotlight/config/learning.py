"""Settings of learning: the model, its prompts and rewards, rollouts, exploration, training, and what is kept.

Defaults suit a first run; ``examples/ocr-tiny.toml`` and ``examples/presets`` say where they differ, and why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from spotlight.config.section import DAY_S, GUIDANCE_MAX, PX_MAX, WIDTH_MAX, Section, check_address, distinct
from spotlight.files import OBJECT_SCHEMES, check_slashes, from_home, is_url, shown
from spotlight.records import STOCHASTIC, Policy, Sampler, SpotlightError

SEED_MAX = 2**63 - 1
"""The largest integer of TOML."""
BATCH_MAX = 4096
"""Samples in one forward batch: far beyond what pays (`plan.batching.SEEDS_MAX`)."""
STEPS_MAX = 1000
"""Noise levels that a flow model is trained on."""
NAME_MAX = 100
"""Most bytes of a run's name: a directory's name may have 255, and the time is appended to it."""


class RunSection(Section):
    """What a run is called, how long it is, and how it is validated."""

    name: str = "run"
    """Its directory's name begins with it."""
    seed: int = Field(0, ge=0, le=SEED_MAX)
    """Seed of all random choices: noise, prompts, synthetic traces."""
    iterations: int = Field(30, ge=1, le=1_000_000)
    """Rounds of rollout, reward and training, unless ``target`` or ``usd_max`` end the run sooner."""
    target: float | None = Field(None, ge=-1e9, le=1e9)
    """The run ends as soon as a validation reaches this score, live or simulated. Left out, it does all its
    iterations."""
    usd_max: float | None = Field(None, gt=0, le=1e9)
    """The run ends in order before it costs more dollars than this: no iteration begins that would go beyond, if it
    cost as much as the last one. The last validation comes on top. Dollars of a paced run are emulated. Left out, there
    is no limit."""
    dir: str = "runs"
    """Where run directories are made: a path, relative to the working directory or to your home directory (``~``), or a
    URL in an object store, such as ``s3://bucket/runs``. Keys come from the environment of the driver and of the
    workers."""
    shared: bool = False
    """Whether other users of the machine may look into the run directory, as far as the umask lets them."""
    validate_every: int = Field(10, ge=1, le=1_000_000)
    """Iterations between validations. Validation also runs before the first and after the last iteration."""
    versions_kept: int = Field(0, ge=0, le=1_000_000)
    """Weights that a run keeps beside the first and the latest: those of so many of the last validations, and of the
    best one; 0: of all validations. With what its training needs, a LoRA of Qwen-Image takes 6.8 GB a version at rank
    64. ``spotlight export`` can only write versions that were kept."""
    validation_seeds: int = Field(4, ge=1, le=BATCH_MAX)
    """Images per validation prompt, all in one forward batch."""
    validation_steps: int = Field(0, ge=0, le=STEPS_MAX)
    """Denoising steps of a validation image; 0 means as many as a rollout. Published recipes train on images of fewer
    steps than they validate with."""
    validate_policy: Literal["auto", "trained", "old", "average"] = "auto"
    """Which weights of a version are validated and exported: "trained", those in training; "old", the older ones that
    sample (``train.old_decay``); "average", their moving average (``train.ema_decay``). "auto": the average if there is
    one, else the ones that sample."""
    report: bool = True
    """Whether ``report.html`` is written when the run ends; ``spotlight report`` writes it at any time."""

    @field_validator("dir")
    @classmethod
    def _dir_may_be_in_a_home_directory(cls, place: str) -> str:
        try:
            return from_home(place)
        except SpotlightError as error:
            raise ValueError(f"run.dir = {error}") from None

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
        try:
            check_slashes(self.dir)
        except SpotlightError as error:
            raise ValueError(f"run.dir = {error}") from None
        return self


EMBEDDED = {"tiny-text": (16, 32), "tiny-mixed": (16, 48), "tiny-shapes": (24, 24)}
"""Models whose weights are in the package, and the height and width of their images, in pixels: they draw no others."""


T5_TOKENS_MAX = 512
"""Most tokens of a prompt; the pipelines of SD 3.5 and FLUX.1 refuse more."""


class ModelSection(Section):
    """What is trained, and the size of its images."""

    name: Literal["tiny-text", "tiny-mixed", "tiny-shapes", "qwen-image", "sd3", "flux"] = "tiny-text"
    """An embedded model (of two digits; of one to four digits and capitals; of coloured shapes), or a checkpoint of
    Qwen-Image, Stable Diffusion 3.5 or FLUX.1."""
    path: str = ""
    """Directory of a diffusers pipeline. For an embedded model: a file of other weights, or empty."""
    height_px: int = Field(16, ge=4, le=PX_MAX)
    """Height of an image. May be left out for embedded models: "tiny-text" draws 16 x 32 only, "tiny-mixed" 16 x 48,
    "tiny-shapes" 24 x 24."""
    width_px: int = Field(32, ge=4, le=PX_MAX)
    """Width of an image; see ``height_px``."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the model's weights; a LoRA is always float32."""
    vae_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights of the VAE, which decodes latents to pixels; "auto": as ``dtype``."""
    vae_tiling: bool = False
    """The VAE decodes images tile by tile, which takes less memory and changes the seams slightly."""
    gradient_checkpointing: bool = False
    """Training keeps only each block's input, and computes its activations again: the same bits, about 4/3 of the time,
    a fraction of the memory. Left out, it is on for all models but the embedded ones."""
    text_tokens: int = Field(0, ge=0, le=1024, multiple_of=8)
    """Most tokens of a prompt that Qwen2.5-VL or T5 reads; T5 pads all prompts to this length, so a lower one saves
    time, and changes images slightly. A multiple of 8, so that gangs can share them. 0: as many as the diffusers
    pipeline reads, 512 with Qwen-Image and FLUX.1, and 256 with SD 3.5. Flow-GRPO and DiffusionNFT read 128 with SD 3.5
    and FLUX.1, verl-omni 256 with Qwen-Image. CLIP always reads 77."""
    shift: float = Field(0.0, ge=0, le=100)
    """Shift s of the noise levels towards noisier ones: evenly spaced levels t become ``s t / (1 + (s - 1) t)``.
    DanceGRPO and MixGRPO draw FLUX.1 with 3. 0: the checkpoint's own schedule, which may depend on the size; exported
    weights are drawn with that, unless their scheduler is changed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where torch finds one."""
    deterministic: bool = True
    """A GPU computes the same bits each time, so no kill changes a result, if all GPUs of the run are of one kind.
    False: it may use faster kernels whose sums have no fixed order. On a CPU the bits are always the same."""
    cuda_graphs: bool = True
    """A GPU denoises with CUDA graphs: a pass is captured once for each shape and replayed, which saves the time to
    launch its kernels, most of a pass with few samples. The same bits; it keeps the memory of a pass. Not in gangs."""
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
    """As ``train_prompts``, held out from training."""


class RolloutSection(Section):
    """The samples that are trained on."""

    prompts: int = Field(8, ge=1, le=100_000)
    """Prompts (groups) per iteration."""
    seeds_kept: int = Field(8, ge=2, le=10_000)
    """Samples per group that are rolled out and trained on. If exploration chooses them, and training takes most of an
    iteration, half as many can teach nearly as much (docs/results/time_and_dollars.md)."""
    request_seeds: int = Field(0, ge=0, le=BATCH_MAX)
    """Most samples in one request: one forward batch. 0: up to 8, chosen by `plan.batching.request_seeds` so that no
    worker of the rollout pools idles in a short last wave, and launching kernels does not dominate."""
    prompts_ahead: int = Field(0, ge=0, le=100_000)
    """How many prompts of an iteration are rolled out while the previous one trains, by spot workers that would idle,
    with weights that are one version old (one-step off-policy). For DiffusionNFT without exploration."""
    steps: int = Field(8, ge=1, le=STEPS_MAX)
    """Denoising steps of a sample."""
    sampler: Sampler = "ode"
    """"ode" takes Euler's steps. "dpm2" (DPM-Solver++(2M), as in DiffusionNFT's code) also uses the velocity of the
    previous step, and so needs fewer steps; a request that resumes takes one more pass. Both are deterministic; the
    others take stochastic steps, as Flow-GRPO needs. Validation takes Euler's steps, and so does exploration if the
    sampler is stochastic."""
    noise_level: float = Field(0.7, gt=0, le=10)
    """Noise level (eta) of stochastic steps, dimensionless."""
    sde_window: tuple[int, int] = (0, 2)
    """Steps ``[start, end)`` that may be stochastic; not used by the ODE sampler."""
    sde_window_size: int = Field(0, ge=0, le=STEPS_MAX)
    """How many steps of ``sde_window`` are stochastic, in a row and the same for all samples of an iteration; 0:
    all."""
    sde_window_order: Literal["random", "sliding"] = "random"
    """Where an iteration's stochastic steps are. "random": anywhere in ``sde_window``, drawn by ``run.seed``.
    "sliding": from its start, moving on by ``sde_window_stride`` every ``sde_window_every`` iterations, and again from
    the start after its end."""
    sde_window_stride: int = Field(1, ge=1, le=STEPS_MAX)
    """Steps by which a "sliding" window moves."""
    sde_window_every: int = Field(1, ge=1, le=1_000_000)
    """Iterations after which a "sliding" window moves."""
    same_noise: bool = False
    """All samples of a prompt start from the same noise, and differ by the noise of their stochastic steps only, as in
    DanceGRPO and MixGRPO (``init_same_noise``; Flow-GRPO's ``same_latent``). Not with exploration, which chooses the
    noise that they start from."""
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
        """Stochastic steps of a sample, if the sampler has any."""
        return self.sde_window_size or self.sde_window[1] - self.sde_window[0]


class ExplorationSection(Section):
    """The search for seeds that the next iteration is trained on."""

    prompts: int = Field(0, ge=0, le=100_000)
    """Prompts of which candidates are tried. The ``rollout.prompts`` whose kept rewards vary most are rolled out, so
    that no training goes into prompts that are solved or hopeless. 0 means as many as are rolled out."""
    seeds_tried: int = Field(32, ge=1, lt=2**20)
    """Most candidate seeds per prompt and iteration, on average over its prompts. Replacements of samples without a
    reward are numbered from 2^20 on."""
    request_seeds: int = Field(16, ge=1, le=BATCH_MAX)
    """Candidates in one request: one forward batch."""
    rounds: int = Field(0, ge=0, le=1000)
    """How many times the planner chooses; a round uses the scores of all rounds but the previous one. 0 means as many,
    up to 16, as keep the exploring workers busy with the candidates that there is time for."""
    steps: int = Field(0, ge=0, le=STEPS_MAX)
    """Denoising steps of a candidate; 0 means as many as a rollout."""
    reuse: bool = False
    """Train on the kept candidates as exploration drew them, instead of rolling their seeds out again: with weights one
    version old (one-step off-policy) where exploration is "stale", with current ones where it is "blocking". For
    DiffusionNFT, which trains on clean samples, whoever drew them. So the planner gives prompt after prompt
    ``rollout.seeds_kept`` candidates before any gets more; one that has fewer when training ends is rolled out. Where
    spot workers train, too (``strategy.train_pools``), they draw those candidates before they compute gradients."""
    planner: Literal["bandit", "equal"] = "bandit"
    """"bandit": candidates go to the prompts where they raise the variance of the kept seeds most; "equal": to all
    alike."""
    budget: Literal["time", "fixed", "worth"] = "time"
    """"time": the end of training closes exploration; "fixed": every candidate is tried; "worth": candidates
    are tried while the next ones raise the expected variance of the kept seeds by a larger share than they lengthen the
    iteration. Seconds in which spot GPUs would idle count as free, and so do, with ``reuse``, the candidates that must
    be drawn in any case. It is for clusters whose GPUs could all roll out or train instead
    (``strategy.train_pools``)."""


FILES_IN_OPTIONS = {"aesthetic": ("head",), "geneval": ("clip",)}
"""{name of a reward: those of its options that are paths, relative to the settings file}"""


class RewardSection(Section):
    """What scores images. The rewards of several ``[[reward]]`` tables are added, each times its weight."""

    name: str = "ocr"
    """"ocr" (one line that fills the image), "scene-ocr", "vlm-ocr", "geneval", "clip-score", "pickscore", "aesthetic",
    "http", "chat", "chat-ocr"; or ``module:Class`` of your own."""
    attempts: int = Field(3, ge=1, le=10)
    """How often a failing scorer is tried before a sample is dropped and replaced; of several tables, the first one's
    counts. The pause between two tries doubles each time: from 0.05 s to 13 s before the tenth."""
    batch: int = Field(0, ge=0, le=BATCH_MAX)
    """Most images that the scorer is given at once; of several tables, the first one's counts. 0: all of a request."""
    limit_s: float = Field(600.0, gt=0, le=DAY_S)
    """Most seconds to score a request, all attempts together; of several tables, the first one's counts. The engine
    process is then ended, and the request's samples have no reward, as if the scorer had failed."""
    patience_s: float = Field(300.0, ge=0, le=DAY_S)
    """How long to wait each time for a server that is not there, or says that it is busy, half of ``limit_s`` at most;
    of several tables, the first one's counts. Then the run ends, and can be resumed. 0: that counts as a failure at
    once."""
    weight: float = Field(1.0, ge=-1000, le=1000)
    """Weight of this reward in the sum. Flow-GRPO and DiffusionNFT divide PickScore by 26, and their CLIP score is the
    cosine times 100 / 30: so their weight is 1/26 as much here ("pickscore") or 3.33 times as much ("clip-score")."""
    tags: tuple[str, ...] = ()
    """Only prompts whose ``tag`` in the metadata is one of these are scored; others get 0 from this table. So one file
    can hold data sets that are scored in different ways. Left out: all prompts."""
    range: tuple[float, float] | None = None
    """Least and largest score; a score outside is an error. Left out, it is the scorer's own range."""
    path: str = ""
    """Checkpoint directory of "clip-score", "pickscore", "aesthetic", "vlm-ocr" and the detector "mask2former";
    relative to the settings file."""
    module_dir: str = ""
    """Where the file of ``module:Class`` is looked for, if Python does not find it by itself; relative to the settings
    file. All workers must see it there. Left out, it is the directory of the settings file."""
    url: str = ""
    """Server of "http" (``POST URL/compute``), "chat" and "chat-ocr" (``POST URL/v1/chat/completions``)."""
    timeout_s: float = Field(60.0, gt=0, le=3600)
    """Most seconds that a server may take for one answer."""
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
    """"nft": DiffusionNFT; "grpo": Flow-GRPO; "grpo-guard": GRPO-Guard, which corrects its ratios; "awm":
    advantage-weighted matching; "dpo": online Diffusion-DPO. Flow-GRPO and GRPO-Guard train on the sampler's stochastic
    steps, the others on clean samples at drawn noise levels."""
    learning_rate: float = Field(3e-4, gt=0, le=1)
    """Learning rate of AdamW."""
    warm_up: int = Field(0, ge=0, le=1_000_000)
    """Number of first updates over which the learning rate rises linearly to its value."""
    weight_decay: float = Field(1e-4, ge=0, le=10)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0, le=1e9)
    """A gradient of larger norm is scaled down to this norm."""
    updates: int = Field(1, ge=1, le=10_000)
    """Optimizer steps per iteration; the samples are split evenly among them."""
    parts: int = Field(8, ge=1, le=1024)
    """Parts that each update's samples are cut into, whatever the number of workers: each part's gradient is a task, on
    any free worker, with the same bits wherever it is computed. Use more parts than workers that train, so that all end
    at about the same time; use fewer if launching a part takes as long as computing it. Where several workers train,
    each then adds a slice of all gradients, so that the update has only one sum to fetch."""
    width: int = Field(1, ge=1, le=WIDTH_MAX)
    """Workers of a node that share the passes of a part (sequence parallelism), where one GPU does not hold the
    activations. The bits depend on the width, not on the workers."""
    micro_batch: int = Field(64, ge=1, le=100_000)
    """Rows (samples x timesteps) in one forward pass; no effect on the result beyond rounding."""
    cuda_graphs: bool = False
    """A GPU trains with CUDA graphs, too, if ``model.cuda_graphs`` is on: the same bits, and less time to launch passes
    with few rows. Two pairs of graphs keep the activations of a pass. Not in gangs. **Not verified on a GPU**: off."""
    lora_rank: int = Field(0, ge=0, le=4096)
    """Rank of the LoRA; 0 trains all weights."""
    lora_alpha: float = Field(0.0, ge=0, le=1e4)
    """Alpha of the LoRA; 0 means twice the rank."""
    lora_path: str = ""
    """A LoRA to start from, of the same layers, rank and alpha: a file or directory that `spotlight export`, diffusers
    or peft (so Flow-GRPO and DiffusionNFT) wrote; relative to the settings file. It is read once, as the run begins, by
    one worker. Empty: a new LoRA without effect. ``kl`` still measures the distance to the checkpoint without it."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of a moving average of the weights, which is kept beside each version and validated: the share of the
    average that stays after an update (less in the first ones, so that it soon forgets the untrained weights); 0: no
    average. DiffusionNFT has 0.9; so has Flow-GRPO, but for every eighth update, which is some 0.987 here."""
    advantage_std: Literal["global", "group", "none"] = "global"
    """Standard deviation that advantages are divided by. "global": that of all rewards of the iteration, so that
    training waits for the last of them. "group": that of each prompt's rewards, so that training may begin with the
    first prompts that are scored. "none", as in Dr. GRPO (arXiv 2503.20783): prompts count in proportion to their
    spread, and ``advantage_clip`` is in units of reward."""
    seeds_used: int = Field(0, ge=0, le=100_000)
    """Samples of each prompt that are trained on, of the ``rollout.seeds_kept``: those whose rewards vary most, with
    advantages among themselves (PODS, arXiv 2504.13818), which shortens training; 0: all."""
    filter_groups: bool = False
    """Prompts whose samples all have the same reward are not trained on: their advantages are 0, and they take as long
    as any other. Flow-GRPO's script for SD 3.5 does the same; DAPO (arXiv 2503.14476) also draws others in their place,
    which is not done here. Terms of ``kl`` or of DiffusionNFT's old policy for these samples are left out, too."""
    combine: Literal["rewards", "advantages"] = "rewards"
    """What is added if there are several ``[[reward]]`` tables, each times its weight. "rewards": rewards, and
    advantages are those of the sum. "advantages": each reward's own advantages, so that no reward's scale outweighs
    another's (as in DanceGRPO), unless ``advantage_std`` is "none". Seeds are chosen by the sum of rewards."""
    advantage_clip: float = Field(5.0, gt=0, le=1000)
    """Advantages are clipped to plus and minus this."""
    kl: float = Field(0.0, ge=0, le=1e4)
    """Weight of the distance to the reference policy (the model without its LoRA, or the starting weights)."""
    old_decay: Annotated[Literal["copy", "linear", "delayed"] | float, BeforeValidator(_old_decay)] = 0.5
    """Decay of the old policy, which samples and is contrasted with: the share of it that stays after an iteration, the
    rest being the policy in training. "copy": nothing, so the two are one; "linear": 0.001 for each update so far, up
    to 0.5; "delayed": nothing for 75 updates, then 0.0075 for each, up to 0.999; or a number. DiffusionNFT only. If the
    old policy hardly moves any more, validate another: give ``ema_decay``, as the published code does."""
    kl_form: Literal["paper", "code"] = "paper"
    """Form of the ``kl`` distance in Flow-GRPO and GRPO-Guard. "paper": between steps as they are taken. "code": as the
    published code has it, which leaves the step size out of the noise ("sde" only) and is smaller by that factor."""
    clip_range: float = Field(1e-4, gt=0, le=1)
    """Clip range of the ratio of policies; Flow-GRPO, GRPO-Guard and AWM only. Left out, it is that of their published
    recipes: 1e-4, 2e-6 and 1."""
    awm_weighting: Literal["uniform", "t", "ghuber"] = "uniform"
    """Weighting of the matching error at noise level t. "uniform": none; "t": times t; "ghuber": its generalised Huber
    form times t. AWM only."""
    awm_power: float = Field(0.25, gt=0, le=1)
    """Power of the generalised Huber form; AWM only."""
    dpo_beta: float = Field(100.0, gt=0, le=1e6)
    """How strongly a preference counts; Diffusion-DPO only."""
    dpo_pairs: int = Field(1, ge=1, le=5000)
    """Most pairs of a prompt's samples: the best with the worst, the second best with the second worst, and so on;
    Diffusion-DPO only."""
    nft_beta: float = Field(0.1, gt=0, le=1000)
    """How far the implicit policies are from the old one; DiffusionNFT only. No effect in the first update of an
    iteration where ``old_decay`` is "copy"."""
    timesteps: int = Field(2, ge=1, le=STEPS_MAX)
    """Noise levels drawn per sample (or pair) and iteration; not for Flow-GRPO and GRPO-Guard."""
    levels: Literal["sampler", "uniform"] = "sampler"
    """Where noise levels are drawn from. "sampler": those that the sampler visits, each once before any twice.
    "uniform": all of (0, 1]. Not for Flow-GRPO and GRPO-Guard."""
    steps_used: int = Field(0, ge=0, le=STEPS_MAX)
    """How many of the stochastic steps are trained on, drawn anew in each iteration and the same for all samples, which
    shortens training; 0: all. DanceGRPO trains on 9 of 15, drawn for each sample. Flow-GRPO and GRPO-Guard only."""
    ratio_tolerance: float = Field(1e-2, gt=0, le=1)
    """Largest |ratio - 1| before the first update of an iteration; Flow-GRPO and GRPO-Guard only."""

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
        """Set the published clip range: AWM's ratios, of matching errors, move a thousand times as far as those of
        steps."""
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
    """Where steps are committed, in a folder for each run: a path, relative to the settings file, or an fsspec URL;
    empty means inside the run directory."""
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
