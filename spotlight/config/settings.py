"""All sections of a run's settings, and what must hold between them."""

from __future__ import annotations

from math import ceil
from typing import Any, Self

from pydantic import model_validator

from spotlight.config.doubts import doubts_of
from spotlight.config.learning import (
    DataSection,
    ExplorationSection,
    LatentsSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrackingSection,
    TrainSection,
)
from spotlight.config.machines import (
    NO_GPU,
    ClusterSection,
    PaceSection,
    PoolsSection,
    SimulationSection,
    SpSection,
    StrategySection,
)
from spotlight.config.section import WIDTH_MAX, Section
from spotlight.files import shown
from spotlight.market.prices import USUAL_GPU, price_list, usd_per_h
from spotlight.records import Policy, Pool

LOGGED_WORKERS = 100
"""With more workers, the log of the dispatcher's decisions is not kept."""


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    exploration: ExplorationSection = ExplorationSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    pools: PoolsSection = PoolsSection()
    strategy: StrategySection = StrategySection()
    sp: SpSection = SpSection()
    pace: PaceSection = PaceSection()
    latents: LatentsSection = LatentsSection()
    tracking: TrackingSection = TrackingSection()
    cluster: ClusterSection = ClusterSection()
    simulation: SimulationSection = SimulationSection()

    @model_validator(mode="before")
    @classmethod
    def _several_rewards(cls, tree: Any) -> Any:
        """Put further ``[[reward]]`` tables into the first one's ``also``."""
        tables = tree.get("reward") if isinstance(tree, dict) else None
        if not isinstance(tables, list) or not tables or not isinstance(tables[0], dict):
            return tree
        if any("also" in table for table in tables if isinstance(table, dict)):
            raise ValueError("reward.also: each [[reward]] table is one reward: write them one after the other")
        return tree | {"reward": {**tables[0], "also": tables[1:]} if tables[1:] else tables[0]}

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if not self.run.dir:
            raise ValueError('run.dir = "": name a directory, or leave it out for "runs"')
        self._check_pools()
        self._check_exploration()
        self._check_training()
        self._check_sampler()
        self._check_ahead()
        self._check_reuse()
        self._check_widths()
        if self.sp.backend == "xfuser" and self.model.name != "qwen-image":
            raise ValueError(
                f'sp.backend = "xfuser" splits "qwen-image" only, and model.name is "{self.model.name}": set '
                'sp.backend = "native"'
            )
        return self

    def _check_pools(self) -> None:
        pools = self.pools
        if pools.reserved.workers < 1:
            raise ValueError("pools.reserved.workers is 0, but updates are taken on reserved workers only: give it 1")
        if not self.strategy.rollout_pools:
            raise ValueError('strategy.rollout_pools is empty: name "reserved", "spot" or both')
        if not self.strategy.train_pools:
            raise ValueError('strategy.train_pools is empty: name "reserved", "spot" or both')
        for setting, does in (("rollout_pools", "roll out"), ("train_pools", "compute gradients")):
            if set(getattr(self.strategy, setting)) == {"spot"} and pools.spot.workers == 0:
                raise ValueError(
                    f'strategy.{setting} = ["spot"] and pools.spot.workers is 0: nobody would {does}; '
                    f'add spot workers, or add "reserved" to {setting}'
                )
        if not self.reserved_computes and not self.reserved_only_updates:
            raise ValueError(
                f'pools.reserved.gpu = "{NO_GPU}" has no GPU, so it can only take the updates: set '
                'strategy.rollout_pools = ["spot"] and strategy.train_pools = ["spot"], or name another '
                "pools.reserved.gpu"
            )

    def _check_exploration(self) -> None:
        rollout, pools = self.rollout, self.pools
        if self.strategy.exploration == "off":
            return
        if self.exploration.seeds_tried < rollout.seeds_kept:
            raise ValueError(
                f"exploration.seeds_tried = {self.exploration.seeds_tried} is fewer than "
                f"rollout.seeds_kept = {rollout.seeds_kept}: nothing could be chosen; raise seeds_tried "
                'or set strategy.exploration = "off"'
            )
        if 0 < self.exploration.prompts < rollout.prompts:
            raise ValueError(
                f"exploration.prompts = {self.exploration.prompts} is fewer than rollout.prompts = {rollout.prompts}, "
                "which are taken from them: raise it, or set it to 0 for as many as are rolled out"
            )
        if self.strategy.exploration == "stale" and pools.spot.workers == 0:
            raise ValueError(
                'strategy.exploration = "stale" runs on spot workers and pools.spot.workers is 0: '
                'add spot workers, or set strategy.exploration to "blocking" or "off"'
            )

    def _check_training(self) -> None:
        rollout = self.rollout
        if self.model.dtype != "float32" and not self.train.lora_rank:
            raise ValueError(
                f'model.dtype = "{self.model.dtype}" and train.lora_rank = 0: most updates of full weights would be '
                "lost in their rounding (in a trial with bfloat16, 93 % of the weights never changed; with float16, "
                "most were no numbers after one update); set train.lora_rank, whose weights are float32, or "
                'model.dtype = "float32"'
            )
        policy = self.run.validate_policy
        if policy == "old" and self.train.algorithm != "nft":
            raise ValueError(
                f'run.validate_policy = "old" with train.algorithm = "{self.train.algorithm}": only "nft" keeps an '
                'older policy; set run.validate_policy = "auto"'
            )
        if (policy == "old" and not self.train.keeps_old) or (policy == "average" and not self.train.ema_decay):
            setting = "train.old_decay" if policy == "old" else "train.ema_decay"
            raise ValueError(
                f'run.validate_policy = "{policy}" and {setting} = {self.train.model_dump()[setting[6:]]!r} keeps no '
                f'such weights: set {setting}, or run.validate_policy = "auto"'
            )
        used = self.train.seeds_used
        if used == 1 or used > rollout.seeds_kept:
            raise ValueError(
                f"train.seeds_used = {used} must be from 2 to rollout.seeds_kept = {rollout.seeds_kept}: samples are "
                "compared with each other; change it, or set it to 0 to train on all"
            )
        if self.train.updates > rollout.prompts * self.seeds_trained:
            of_each = "train.seeds_used" if used else "rollout.seeds_kept"
            raise ValueError(
                f"train.updates = {self.train.updates} is more than the rollout.prompts * {of_each} = "
                f"{rollout.prompts * self.seeds_trained} samples of an iteration, and each needs one: lower it"
            )
        pairs = rollout.prompts * min(self.train.dpo_pairs, self.seeds_trained // 2)
        if self.train.algorithm == "dpo" and self.train.updates > pairs:
            raise ValueError(
                f"train.updates = {self.train.updates} is more than the {pairs} pairs of an iteration (of each of "
                "rollout.prompts, train.dpo_pairs or half of its samples), and each needs one: lower it"
            )

    def _check_sampler(self) -> None:
        rollout = self.rollout
        if self.train.is_stepwise and not rollout.is_stochastic:
            raise ValueError(
                f'train.algorithm = "{self.train.algorithm}" needs log-probabilities, and rollout.sampler = '
                f'"{rollout.sampler}" has none: set rollout.sampler to "sde", "cps" or "dance"'
            )
        if rollout.sampler == "cps" and rollout.noise_level > 1:
            raise ValueError(
                f'rollout.noise_level = {rollout.noise_level:g} with rollout.sampler = "cps": above 1 a step has less '
                "noise again, and at 2 none: give it at most 1"
            )
        if self.train.algorithm == "grpo-guard" and rollout.sampler != "sde":
            raise ValueError(
                f'train.algorithm = "grpo-guard" corrects the steps of rollout.sampler = "sde", and that is '
                f'"{rollout.sampler}"'
            )
        if rollout.is_stochastic and not 0 <= rollout.sde_window[0] < rollout.sde_window[1] < rollout.steps:
            raise ValueError(
                f"rollout.sde_window = {list(rollout.sde_window)} must lie in [0, {rollout.steps - 1}] and not be "
                f"empty: the last of rollout.steps = {rollout.steps} steps is never stochastic"
            )
        if rollout.stochastic_steps > rollout.sde_window[1] - rollout.sde_window[0]:
            raise ValueError(
                f"rollout.sde_window_size = {rollout.sde_window_size} does not fit into rollout.sde_window = "
                f"{list(rollout.sde_window)}: make one larger or the other smaller"
            )

        if rollout.same_noise and (not rollout.is_stochastic or self.strategy.exploration != "off"):
            raise ValueError(
                f'rollout.same_noise with rollout.sampler = "{rollout.sampler}" and strategy.exploration = '
                f'"{self.strategy.exploration}": without stochastic steps all samples of a prompt would be one, and '
                'exploration chooses what they begin with; set a stochastic sampler, and exploration = "off"'
            )
        if self.train.is_stepwise and self.train.steps_used > rollout.stochastic_steps:
            raise ValueError(
                f"train.steps_used = {self.train.steps_used} is more than the {rollout.stochastic_steps} stochastic "
                "steps of rollout.sde_window and rollout.sde_window_size: lower it, or set it to 0 for all"
            )

    def _check_ahead(self) -> None:
        ahead = self.rollout.prompts_ahead
        if not ahead:
            return
        if "spot" not in self.strategy.rollout_pools or not self.pools.spot.workers:
            raise ValueError(
                f"rollout.prompts_ahead = {ahead} is for spot workers that roll out, and there are none: set it to 0, "
                'add "spot" to strategy.rollout_pools, or workers to pools.spot'
            )
        if ahead > self.rollout.prompts:
            raise ValueError(
                f"rollout.prompts_ahead = {ahead} is more than rollout.prompts = {self.rollout.prompts}: lower it"
            )
        if self.strategy.on_preemption == "restart":
            raise ValueError(
                f'rollout.prompts_ahead = {ahead} with strategy.on_preemption = "restart": rollouts that are begun '
                'early go on after their last committed step; set prompts_ahead = 0, or on_preemption = "resume"'
            )
        if self.train.algorithm != "nft":
            raise ValueError(
                f'rollout.prompts_ahead = {ahead} with train.algorithm = "{self.train.algorithm}": its samples must be '
                'drawn with the weights that are trained; set prompts_ahead = 0, or train.algorithm = "nft"'
            )
        if self.strategy.exploration != "off":
            raise ValueError(
                f'rollout.prompts_ahead = {ahead} with strategy.exploration = "{self.strategy.exploration}": both use '
                'the time that spot workers have beside training; set prompts_ahead = 0, or exploration = "off"'
            )

    def _check_reuse(self) -> None:
        if self.exploration.reuse and self.strategy.exploration != "off" and self.train.algorithm != "nft":
            raise ValueError(
                f'exploration.reuse = true with train.algorithm = "{self.train.algorithm}": its samples must be drawn '
                'by rollouts; set exploration.reuse = false, or train.algorithm = "nft"'
            )

    @property
    def doubts(self) -> tuple[str, ...]:
        """Sentences about settings that can be run, but are probably not meant."""
        return tuple(doubts_of(self))

    @property
    def logs_decisions(self) -> bool:
        """Whether the dispatcher's log is kept: with many workers it would be most of the run directory."""
        return sum(pool.workers for _, pool in self.pools) <= LOGGED_WORKERS

    @property
    def seeds_trained(self) -> int:
        """Samples of each prompt that are trained on."""
        return self.train.seeds_used or self.rollout.seeds_kept

    @property
    def adds_advantages(self) -> bool:
        """Whether there are several rewards, each with advantages of its own, which are added."""
        return self.train.combine == "advantages" and bool(self.reward.also)

    @property
    def reserved_only_updates(self) -> bool:
        """Whether spot workers alone roll out and compute gradients."""
        return set(self.strategy.rollout_pools) == set(self.strategy.train_pools) == {"spot"}

    @property
    def reserved_computes(self) -> bool:
        """Whether reserved workers can do a GPU's work at all."""
        return self.pools.reserved.gpu != NO_GPU

    @property
    def reserved_differs(self) -> bool:
        """Whether reserved workers only take the updates, on another type of GPU than the spot workers', or on none."""
        reserved, spot = ((pool.gpu or USUAL_GPU).partition("-")[0] for pool in (self.pools.reserved, self.pools.spot))
        return self.reserved_only_updates and reserved != spot

    @property
    def on_demand_usd_per_h(self) -> float:
        """Price per hour of a reserved GPU that does a GPU's work: an existing one, or one like the spot GPUs.

        If that one is not in the price list, this is the higher of both pools' prices, which is too low.
        """
        reserved, spot = self.pools.reserved, self.pools.spot
        gpu = spot.gpu or USUAL_GPU
        if not self.reserved_differs:
            return reserved.usd_per_h
        return usd_per_h(gpu, "reserved") if gpu in price_list() else max(reserved.usd_per_h, spot.usd_per_h)

    @property
    def gpu_pools(self) -> tuple[Pool, ...]:
        """Pools whose workers may validate, and explore when nothing else runs."""
        return ("reserved", "spot") if self.reserved_computes else ("spot",)

    @property
    def scores_apart(self) -> bool:
        """Whether separate workers score images (``pools.reward``)."""
        return self.pools.reward.workers > 0

    @property
    def emulated_per_real_s(self) -> float:
        """Emulated seconds in a real one: 1 where nothing is paced."""
        return self.pace.speedup if self.pace.gpu else 1.0

    @property
    def validation_policy(self) -> Policy:
        """Which weights of a version are validated and exported."""
        if self.run.validate_policy != "auto":
            return self.run.validate_policy
        return "average" if self.train.ema_decay else self.train.sampling_policy

    @property
    def prompts_drawn(self) -> int:
        """How many prompts an iteration draws: those explored, or else those rolled out."""
        explored = 0 if self.strategy.exploration == "off" else self.exploration.prompts
        return explored or self.rollout.prompts

    @property
    def explored_first(self) -> int:
        """Requests of candidates that spot workers run before they compute gradients.

        Where candidates are trained on as they were drawn, as many as give each prompt ``rollout.seeds_kept``: what has
        fewer is rolled out once training has ended, when nothing else can be done. All, if they are worth their time.
        """
        exploration, spot_trains = self.exploration, "spot" in self.strategy.train_pools
        if not (exploration.reuse and spot_trains and self.strategy.exploration == "stale"):
            return 0
        if exploration.budget == "worth":
            return self.prompts_drawn * ceil(exploration.seeds_tried / exploration.request_seeds)
        return self.rollout.prompts * ceil(self.rollout.seeds_kept / exploration.request_seeds)

    @property
    def trains_on_older(self) -> bool:
        """Whether samples of an iteration may be drawn with the version before the one that it starts from."""
        return bool(self.rollout.prompts_ahead) or (self.exploration.reuse and self.strategy.exploration == "stale")

    @property
    def trains_as_scored(self) -> bool:
        """Whether parts of an update are computed as soon as their samples are scored; the bits are the same.

        Not if a part must wait for all samples: for advantages over all of them, or because several updates share them
        out in a random order.
        """
        whole = self.train.advantage_std == "global" or self.train.updates > 1 or self.strategy.offload == "none"
        return self.train.parts > 1 and not whole

    def _check_widths(self) -> None:
        widths, pools = self.strategy.widths, self.pools
        if not widths or not 1 <= min(widths) <= max(widths) <= WIDTH_MAX or sorted(set(widths)) != list(widths):
            raise ValueError(
                f"strategy.widths = {shown(list(widths))} must be whole numbers from 1 on to {WIDTH_MAX}, ascending, "
                "such as [1, 2, 4]"
            )
        sizes = {"reserved": pools.reserved.node_workers, "spot": pools.spot.node_workers}
        narrowest = widths[0] if self.strategy.elastic else widths[-1]
        for work, wanted, where in (
            ("rollouts", True, self.strategy.rollout_pools),
            ("exploration", self.strategy.exploration == "stale", ("spot",)),
            ("rollouts that begin early (rollout.prompts_ahead)", self.rollout.prompts_ahead > 0, ("spot",)),
        ):
            largest = max((sizes[name] for name in where), default=0)
            if wanted and 0 < largest < narrowest:
                raise ValueError(
                    f"strategy.widths = {list(widths)} needs {narrowest} workers on one machine, and {work} have "
                    f"machines of {largest}: add a narrower width, or workers to pools.{where[0]} (workers_per_node)"
                )
        largest = max(sizes[name] for name in self.strategy.train_pools)
        if largest < self.train.width:
            raise ValueError(
                f"train.width = {self.train.width} needs as many workers on one machine, and training has machines of "
                f"{largest}: make it smaller, or add workers to pools.{self.strategy.train_pools[0]} (workers_per_node)"
            )
