"""What `benchmarks.time_to_target` compares: jobs, clusters, strategies, and the recipes that each may have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from spotlight import config
from spotlight.rl.parts import Cut

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "examples" / "paced.toml"
PROMPTS = ROOT / "examples" / "prompts"

COMMON = ["pace.speedup=1", "latents.keep=none", "rollout.request_seeds=4", "rollout.steps=16", "exploration.steps=6"]
COMMON += ["train.old_decay=0.5", "train.nft_beta=0.1", "train.levels=sampler", "pace.guidance=1.0"]
TRACE_SPEEDUP = 5.33
COMMON += ["pools.spot.trace_model=bursty", "pools.spot.trace_takes=node", f"pools.spot.speedup={TRACE_SPEEDUP}"]
COMMON += ["simulation.start_up_s=28.6", "simulation.publish_s=0.19", "simulation.gradient_s=0.26", "train.parts=24"]
"""An iteration has 96 samples where the paper's has 512: the trace passes, and machines start, 5.33 times as fast.
As many parts as twelve GPUs can share."""
MIXED = [
    "model.name=tiny-mixed",
    "model.width_px=48",
    f"data.train_prompts={PROMPTS / 'mixed-train.txt'}",
    f"data.validation_prompts={PROMPTS / 'mixed-validation.txt'}",
    "run.validation_seeds=6",
]
STRICT = [f"model.path={ROOT / 'examples' / 'weights' / 'tiny_mixed_8000.safetensors'}", "reward.options.graded=false"]
JOBS: dict[str, list[str]] = {
    "digits": ["run.validation_seeds=12"],
    "mixed": MIXED,
    "strict": [*MIXED, *STRICT],
}
"""Strict: an image is right or wrong, as in GenEval, and the model knows more: some prompts are nearly solved, others
nearly hopeless, and most of their groups flat."""
TARGETS = {"digits": (0.75, 0.85, 0.92), "mixed": (0.6, 0.7, 0.8), "strict": (0.7, 0.8, 0.9)}
"""The last is near the plateau of the first and of the third job (0.93); of the second it is as far as time allowed.
Recipes are chosen by the one in the middle, or by the last."""
HEAVY = "6 levels"
REGIMES = {"2 levels": ["train.timesteps=2"], HEAVY: ["train.timesteps=6"]}
"""How heavy training is. With two noise levels a sample, spot GPUs would idle for 49 % of an iteration that neither
explores nor streams, at 512 px (the paper has 47 %); with the demo's six, for 74 %."""
SIZES = {"512": ["pace.height_px=512", "pace.width_px=512"], "1280": ["pace.height_px=1280", "pace.width_px=1280"]}

ON_RESERVED = ["pools.spot.workers=0", 'strategy.rollout_pools=["reserved"]']
ON_SPOT = ['strategy.train_pools=["reserved","spot"]']
ONE_RESERVED = ["pools.reserved.workers=1", "pools.spot.workers=11"]
FINER = ["rollout.request_seeds=1", "train.parts=48"]
"""How work is cut for 48 GPUs: of six ways, what ends an iteration of either cluster soonest at 512 px; at 1280 px, 96
parts would end one of 1 + 47 a tenth sooner. For four and twelve GPUs, 24 requests of four samples and as many parts
are within 5 % of the best of six ways (docs/results/time_and_dollars.md)."""
MORE_SPOT = ["pools.reserved.workers=1", "pools.spot.workers=47", *FINER]
ONLY_UPDATES = ['strategy.rollout_pools=["spot"]', 'strategy.train_pools=["spot"]']
ONLY_UPDATES += ["pools.reserved.workers=1", "pools.reserved.gpu=a100-80gb"]
"""The reserved GPU neither rolls out nor computes gradients, so it need not be an H100."""
NO_GPU = [*(each for each in ONLY_UPDATES if "gpu" not in each), "pools.reserved.gpu=cpu", "simulation.update_s=0.34"]
"""Nor need it be a GPU. The optimizer's step then takes 1.8 s on one core (`plan.durations`), scaled as the rest."""
AHEAD = "rollout.prompts_ahead=3"
"""Of the base recipe's twelve prompts: half of the six of another."""
HALF = "train.seeds_used={half}"
"""Trains on a prompt's samples whose rewards vary most (PODS): four of the base recipe's eight."""
FOUR = "rollout.seeds_kept={half}"
"""Half of a prompt's samples: four instead of the base recipe's eight. What explores chooses them from up to 32
candidates."""
VARIED = "train.filter_groups=true"
"""Prompts whose samples all have the same reward are not trained on."""
SIX = "rollout.prompts=6"
"""Prompts of an iteration, instead of the base recipe's twelve."""
SHORT = ["rollout.steps=6", "run.validation_steps=16"]
"""Samples of as few steps as candidates have; validated as all others are."""
CHOSEN = [HALF, *SHORT]
"""Eight samples in six steps, of which the four are trained on whose rewards vary most: what comes nearest to training
on candidates without exploration."""
OURS = "Spotlight, gradients on spot (1 + 11)"
"""The strategy that all others are compared with."""
SOONEST = "Spotlight, gradients on spot (1 + 47)"
STRATEGIES: dict[str, list[str]] = {
    "reserved only (4)": [*ON_RESERVED, "strategy.exploration=off"],
    "reserved only (4), blocking exploration": [*ON_RESERVED, "strategy.exploration=blocking"],
    "all reserved (12)": [*ON_RESERVED, "strategy.exploration=off", "pools.reserved.workers=12"],
    "all reserved (48)": [*ON_RESERVED, "strategy.exploration=off", "pools.reserved.workers=48", *FINER],
    "reserved + spot, no exploration": ["strategy.exploration=off"],
    "restart on preemption": ["strategy.on_preemption=restart", "strategy.elastic=false"],
    "Spotlight": [],
    "no exploration, gradients on spot": ["strategy.exploration=off", *ON_SPOT],
    "no exploration, gradients on spot (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED],
    "no exploration, gradients on spot (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT],
    "no exploration, only updates on reserved (A100 + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *ONLY_UPDATES,
    ],
    "no exploration, only updates on reserved (A100 + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*ONLY_UPDATES, *FINER),
    ],
    "no exploration, only updates on reserved (no GPU + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *NO_GPU,
    ],
    "no exploration, only updates on reserved (no GPU + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*NO_GPU, *FINER),
    ],
    "a quarter ahead (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED, AHEAD],
    "a quarter ahead (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT, AHEAD],
    "a quarter ahead (4 + 8), only reserved GPUs train": ["strategy.exploration=off", AHEAD],
    "a quarter ahead, only updates on reserved (A100 + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*ONLY_UPDATES, AHEAD),
    ],
    "a quarter ahead, only updates on reserved (A100 + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*ONLY_UPDATES, *FINER, AHEAD),
    ],
    "a quarter ahead, only updates on reserved (no GPU + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*NO_GPU, AHEAD),
    ],
    "a quarter ahead, only updates on reserved (no GPU + 48)": [
        *("strategy.exploration=off", "pools.spot.workers=48"),
        *(*NO_GPU, *FINER, AHEAD),
    ],
    "half trained, reserved only (4)": [*ON_RESERVED, "strategy.exploration=off", HALF],
    "half trained (4 + 8), only reserved GPUs train": ["strategy.exploration=off", HALF],
    "half trained (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED, HALF],
    "half trained (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT, HALF],
    "half trained, only updates on reserved (no GPU + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*NO_GPU, HALF),
    ],
    "half trained, a quarter ahead, only updates on reserved (no GPU + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*NO_GPU, HALF, AHEAD),
    ],
    "four of a prompt, no exploration (4 + 8), only reserved GPUs train": ["strategy.exploration=off", FOUR],
    "four of a prompt, no exploration (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT, FOUR],
    "six prompts, no exploration (4 + 8), only reserved GPUs train": ["strategy.exploration=off", SIX],
    "Spotlight, four of a prompt": [FOUR, "exploration.request_seeds=4"],
    "Spotlight, four of a prompt (1 + 47)": [*ON_SPOT, *MORE_SPOT, FOUR, "exploration.request_seeds=2"],
    "chosen of eight in six steps, reserved only (4)": [*ON_RESERVED, "strategy.exploration=off", *CHOSEN],
    "chosen of eight in six steps (4 + 8), only reserved GPUs train": ["strategy.exploration=off", *CHOSEN],
    "chosen of eight in six steps (1 + 11)": ["strategy.exploration=off", *ON_SPOT, *ONE_RESERVED, *CHOSEN],
    "chosen of eight in six steps (1 + 47)": ["strategy.exploration=off", *ON_SPOT, *MORE_SPOT, *CHOSEN],
    "chosen of eight in six steps, only updates on reserved (no GPU + 12)": [
        *("strategy.exploration=off", "pools.spot.workers=12"),
        *(*NO_GPU, *CHOSEN),
    ],
    "chosen of eight in six steps, all reserved (12)": [
        *(*ON_RESERVED, "strategy.exploration=off", "pools.reserved.workers=12"),
        *CHOSEN,
    ],
    "chosen of eight in six steps, gradients on spot (4 + 8)": ["strategy.exploration=off", *ON_SPOT, *CHOSEN],
    "Spotlight, four as drawn": [FOUR, "exploration.request_seeds=4", "exploration.reuse=true"],
    "Spotlight, eight as drawn": ["exploration.request_seeds=4", "exploration.reuse=true"],
    "Spotlight, eight as drawn, gradients on spot (4 + 8)": [
        *(*ON_SPOT, "exploration.request_seeds=4", "exploration.reuse=true", "exploration.budget=worth"),
    ],
    "Spotlight, four as drawn (1 + 47)": [
        *(*ON_SPOT, *MORE_SPOT, FOUR),
        *("exploration.request_seeds=1", "exploration.reuse=true"),
    ],
    "Spotlight, gradients on spot (4 + 8)": [*ON_SPOT, "exploration.budget=worth"],
    OURS: [*ON_SPOT, *ONE_RESERVED, "exploration.budget=worth"],
    SOONEST: [*ON_SPOT, *MORE_SPOT, "exploration.request_seeds=2"],
}
"""Reserved + spot without exploration streams, as RLBoost, unless its recipe divides advantages by the spread of all
rewards. Restart on preemption is Spotlight but for what it does about a loss. With gradients on spot GPUs too, 4 + 8
and 1 + 11 explore what is worth its seconds; 1 + 47 explores as long as training lasts, in small requests, which fill
the gaps between its other requests and parts. A quarter ahead: idle GPUs begin with the next iteration's rollouts, with
weights that are one version old; it explores nothing, nor does half trained. Four of a prompt: rolls out and trains on
four samples of each instead of eight. Six prompts: rolls out and trains on as many samples, eight of each. As drawn:
trains on the four (or eight) candidates of a prompt whose rewards vary most, which were drawn in six steps while the
iteration before trained, and rolls out nothing. Chosen of eight in six steps: trains on such four of eight samples of
as few steps, which are rolled out with the weights of now, and explores nothing."""
RESERVED_ONLY, FOUR_EXPLORED = "reserved only (4)", "Spotlight, four of a prompt"
FOUR_ON_MANY, AS_DRAWN = "Spotlight, four of a prompt (1 + 47)", "Spotlight, four as drawn"
DRAWN_ON_MANY, EIGHT_DRAWN = "Spotlight, four as drawn (1 + 47)", "Spotlight, eight as drawn"
EIGHT_ON_BOTH = "Spotlight, eight as drawn, gradients on spot (4 + 8)"
SIX_ON_MANY = "six steps (1 + 47)"
SIX_WITHOUT_GPU = "six steps, only updates on reserved (no GPU + 12)"
CHOSEN_ON_RESERVED = "chosen of eight in six steps, reserved only (4)"
CHOSEN_ON_MANY = "chosen of eight in six steps (1 + 47)"
CHOSEN_WITHOUT_GPU = "chosen of eight in six steps, only updates on reserved (no GPU + 12)"
NO_GPU_UNEXPLORED = "no exploration, only updates on reserved (no GPU + 12)"
CHOSEN_ON_BOTH = "chosen of eight in six steps, gradients on spot (4 + 8)"
IN_SIX_STEPS = {
    "six steps, reserved only (4)": RESERVED_ONLY,
    "six steps (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "six steps, gradients on spot (4 + 8)": "no exploration, gradients on spot",
    "six steps (1 + 11)": "no exploration, gradients on spot (1 + 11)",
    SIX_ON_MANY: "no exploration, gradients on spot (1 + 47)",
    SIX_WITHOUT_GPU: NO_GPU_UNEXPLORED,
}
"""What rolls out in as few steps as candidates have, and trains on all eight; and the same in sixteen."""
STRATEGIES |= {name: [*STRATEGIES[other], *SHORT] for name, other in IN_SIX_STEPS.items()}
FILTERED = {
    f"filtered, {name}": name
    for name in (
        *(RESERVED_ONLY, "no exploration, gradients on spot", "no exploration, gradients on spot (1 + 11)"),
        *("no exploration, gradients on spot (1 + 47)", NO_GPU_UNEXPLORED),
        *(CHOSEN_ON_RESERVED, CHOSEN_ON_BOTH, "chosen of eight in six steps (1 + 11)", CHOSEN_ON_MANY),
        *(CHOSEN_WITHOUT_GPU, EIGHT_DRAWN, EIGHT_ON_BOTH),
        *(name for name in IN_SIX_STEPS if "(4 + 8), only" not in name),
    )
}
"""What trains on no prompt whose samples all have the same reward, and the same that trains on all."""
FILTERED_ON_BOTH = f"filtered, {CHOSEN_ON_BOTH}"
STRATEGIES |= {name: [*STRATEGIES[other], VARIED] for name, other in FILTERED.items()}
WITHOUT = {
    "reserved only (4), blocking exploration": RESERVED_ONLY,
    "Spotlight": "reserved + spot, no exploration",
    "Spotlight, gradients on spot (4 + 8)": "no exploration, gradients on spot",
    OURS: "no exploration, gradients on spot (1 + 11)",
    SOONEST: "no exploration, gradients on spot (1 + 47)",
    "a quarter ahead (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "half trained, reserved only (4)": RESERVED_ONLY,
    "half trained (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "half trained (1 + 11)": "no exploration, gradients on spot (1 + 11)",
    "half trained (1 + 47)": "no exploration, gradients on spot (1 + 47)",
    "half trained, only updates on reserved (no GPU + 12)": NO_GPU_UNEXPLORED,
    "four of a prompt, no exploration (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "six prompts, no exploration (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    FOUR_EXPLORED: "reserved + spot, no exploration",
    FOUR_ON_MANY: "no exploration, gradients on spot (1 + 47)",
    "four of a prompt, no exploration (1 + 47)": "no exploration, gradients on spot (1 + 47)",
    CHOSEN_ON_RESERVED: RESERVED_ONLY,
    "chosen of eight in six steps (4 + 8), only reserved GPUs train": "reserved + spot, no exploration",
    "chosen of eight in six steps (1 + 11)": "no exploration, gradients on spot (1 + 11)",
    CHOSEN_ON_MANY: "no exploration, gradients on spot (1 + 47)",
    CHOSEN_WITHOUT_GPU: NO_GPU_UNEXPLORED,
    CHOSEN_ON_BOTH: "no exploration, gradients on spot",
    AS_DRAWN: "reserved + spot, no exploration",
    EIGHT_DRAWN: "reserved + spot, no exploration",
    EIGHT_ON_BOTH: "no exploration, gradients on spot",
    DRAWN_ON_MANY: "no exploration, gradients on spot (1 + 47)",
} | {
    name: name.replace("a quarter ahead", "no exploration, gradients on spot" if "(1 +" in name else "no exploration")
    for name in STRATEGIES
    if name.startswith("a quarter ahead") and "(4 +" not in name
}
WITHOUT |= FILTERED | IN_SIX_STEPS
"""What explores, begins rollouts early, or trains on half of the samples or on those that vary; and the same GPUs that
do none of it."""
ON_FOUR_RESERVED = [
    "reserved + spot, no exploration",
    "a quarter ahead (4 + 8), only reserved GPUs train",
    "half trained (4 + 8), only reserved GPUs train",
    "four of a prompt, no exploration (4 + 8), only reserved GPUs train",
    "six prompts, no exploration (4 + 8), only reserved GPUs train",
    "chosen of eight in six steps (4 + 8), only reserved GPUs train",
    "Spotlight",
    FOUR_EXPLORED,
    AS_DRAWN,
]
"""What trains on four reserved GPUs alone, while eight spot ones roll out."""
ON_ALL_TWELVE = ["no exploration, gradients on spot", CHOSEN_ON_BOTH]
"""What else these twelve may do without exploration: all of them train."""
ON_MANY = [
    "no exploration, gradients on spot (1 + 47)",
    "a quarter ahead (1 + 47)",
    "half trained (1 + 47)",
    "four of a prompt, no exploration (1 + 47)",
    CHOSEN_ON_MANY,
    FOUR_ON_MANY,
]
"""What one reserved and 47 spot GPUs may do instead of training on candidates as drawn."""
SPACE: dict[str, dict[str, list[str]]] = {
    "learning rate": {f"{rate:g}": [f"train.learning_rate={rate}"] for rate in (3e-4, 2e-4, 4.5e-4)},
    "advantages by": {"group": ["train.advantage_std=group"], "global": ["train.advantage_std=global"]},
    "updates": {"1": ["train.updates=1"], "2": ["train.updates=2"]},
    "groups x samples": {
        "12 x 8": ["rollout.prompts=12", "rollout.seeds_kept=8"],
        "6 x 16": ["rollout.prompts=6", "rollout.seeds_kept=16"],
    },
    "explored": {"4": ["times=4"], "2": ["times=2"], "2 of twice the prompts": ["times=2", "prompts=2"]},
}
"""What a recipe may be, by dimension. The first of each make the base recipe, which is the demo's but for advantages:
divided by the spread of their own prompt, they let training begin with the first samples. Explored: candidates for each
sample kept."""
TRIALS, TUNING_SEEDS, SEEDS = 6, (100, 101), tuple(range(8))
Row = Mapping[str, Any]
"""A line of the raw data: a `Case` and its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    job: str
    regime: str
    size: str
    strategy: str
    trial: int
    """Which recipe, by its place in `recipes`."""
    seed: int

    @classmethod
    def of(cls, row: Row) -> Case:
        """The case of a line of the raw data."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    def overrides(self) -> list[str]:
        learnt = [*COMMON, *JOBS[self.job], *REGIMES[self.regime], *recipe(self.trial), f"run.seed={self.seed}"]
        half = int(dict(each.split("=") for each in recipe(self.trial))["rollout.seeds_kept"]) // 2
        return [*learnt, *SIZES[self.size], *(each.format(half=half) for each in STRATEGIES[self.strategy])]

    def learns_as(self, row: Row) -> bool:
        """Whether a run has learnt the same, on whatever GPUs and at whatever size: no clock decides what either tries.

        How work is cut changes the order of sums, so bits, and no score so far (docs/results/time_and_dollars.md).
        """
        if any(row[name] != getattr(self, name) for name in ("job", "regime", "trial", "seed")):
            return False
        other = Case.of(row)
        if row.get("settings", other.digest) != other.digest:
            return False
        mine = _learnt(self)
        return mine is not None and mine == _learnt(other)

    @property
    def digest(self) -> str:
        """Hash of the settings in which it differs from the settings file."""
        return _digest(self)


@cache
def _digest(case: Case) -> str:
    told = json.dumps(case.overrides()).replace(str(ROOT), "")
    return sha256(told.encode()).hexdigest()[:12]


@cache
def _learnt(case: Case) -> tuple[Any, ...] | None:
    """All settings that decide what is learnt; None if time decides, too."""
    settings = config.load(SETTINGS, [*case.overrides(), "train.parts=1", "rollout.request_seeds=0"])
    how = settings.strategy.exploration
    if how == "stale" or (how == "blocking" and not settings.exploration.rounds):  # as many as keep the GPUs busy
        return None
    explored = settings.exploration if how == "blocking" else None
    return how, explored, settings.rollout, settings.run.validation_steps, Cut.of(settings)


@cache
def recipes() -> Sequence[Mapping[str, str]]:
    """The base recipe, then all other points of the space in a random order."""
    points = [dict(zip(SPACE, names, strict=True)) for names in product(*SPACE.values())]
    order = np.random.Generator(np.random.Philox(0)).permutation(np.arange(1, len(points)))
    return [points[0], *(points[index] for index in order)]


def tried(strategy: str, trials: int) -> list[int]:
    """Indices of the recipes that a strategy tries. Without exploration, recipes that differ only in it are one."""
    explores = "strategy.exploration=off" not in STRATEGIES[strategy]
    points = recipes()
    fitting = (at for at, point in enumerate(points) if explores or point["explored"] == points[0]["explored"])
    return list(islice(fitting, trials))


def recipe(trial: int) -> list[str]:
    """The overrides of a trial."""
    point = recipes()[trial]
    found = [override for name, choice in point.items() if name != "explored" for override in SPACE[name][choice]]
    rolled = dict(override.rpartition("=")[::2] for override in found)
    explored = dict(override.split("=") for override in SPACE["explored"][point["explored"]])
    prompts = int(rolled["rollout.prompts"]) * int(explored.get("prompts", 1))
    tried = int(rolled["rollout.seeds_kept"]) * int(explored["times"])
    return [*found, f"exploration.prompts={prompts}", f"exploration.seeds_tried={tried}", "exploration.request_seeds=8"]


def tuning_target(job: str, *, last: bool) -> float:
    """The target that recipes are chosen by: the last one, or the one in the middle."""
    return TARGETS[job][-1 if last else len(TARGETS[job]) // 2]


def told(trial: int | None) -> str:
    """A recipe as text: how it differs from the base one."""
    if trial is None:
        return "untuned"
    point = recipes()[trial]
    other = [f"{dimension} {choice}" for dimension, choice in point.items() if choice != next(iter(SPACE[dimension]))]
    return ", ".join(other) or "base"


def first_case(job: str, regime: str, size: str, name: str) -> Case:
    """The first run of a strategy."""
    return Case(job=job, regime=regime, size=size, strategy=name, trial=0, seed=0)
