"""What is resident on this process's device: a run's model, and the versions of its weights; it computes nothing.

What is in the model belongs to the version last used, or to none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from spotlight.config import Config
from spotlight.records import Policy, Prompt, SpotlightError, WeightsRef
from spotlight.rl import models, prompts
from spotlight.store import weights
from spotlight.store.node import Node
from spotlight.store.rundir import RunDir

ENCODED = "prompts.safetensors"
"""Cache of the run's encoded texts: `models.Model.preload`."""
RESIDENT_VERSIONS = 2
"""Rollouts use version k, while exploration, and what was begun an iteration early, uses k or k - 1: no version is
loaded twice."""


class Residency:
    """A run's model on this process's device, and the weights versions that need not be read again.

    Args:
        node: shares weights with the other engines of the machine.
    """

    def __init__(self, run: RunDir, config: Config, node: Node | None) -> None:
        self._run, self._config, self._node = run, config, node
        self._versions: dict[tuple[WeightsRef, Policy], dict[str, Tensor]] = {}
        self._loaded: tuple[WeightsRef, Policy] | None = None
        self._old: tuple[WeightsRef, list[Tensor]] | None = None

    @cached_property
    def model(self) -> models.Model:
        settings, only_updates = self._config, models.works_without_gpu()
        models.require_memory(settings)
        train = settings.train
        with self.limits("the model"):
            model = models.load(settings.model, self._node, base=not (only_updates and train.lora_rank))
            if not only_updates:
                self._preload(model)
            model.make_trainable(
                rank=train.lora_rank, alpha=train.lora_alpha, seed=settings.run.seed, reference=train.has_reference
            )
        return model

    def _preload(self, model: models.Model) -> None:
        """Encode the run's prompts, unless another machine's encodings are at the run's URL; upload new ones."""
        run, cache = self._run, self._run.path / ENCODED
        if not cache.exists():
            run.fetch(ENCODED)
        model.preload([prompt.text for prompt in self.prompts()], cache=cache)
        if cache.exists() and run.objects.size(ENCODED) != cache.stat().st_size:
            run.push_files(ENCODED)

    def prompts(self) -> Iterator[Prompt]:
        """The prompts that the run may draw: encoding takes time, and of a large file the run may need few.

        With an embedded model, the whole file: a prompt that the model cannot draw is found before the run begins.
        """
        config = self._config
        train = prompts.read_prompts(config.data.train_prompts)
        drawn = (
            range(len(train))
            if config.model.embedded
            else prompts.all_chosen(
                len(train), config.prompts_drawn, seed=config.run.seed, iterations=config.run.iterations
            )
        )
        yield from (train[index] for index in drawn)
        yield from prompts.read_prompts(config.data.validation_prompts)

    @property
    def sp_backend(self) -> str:
        """What shares a forward pass among the members of a gang."""
        return self._config.sp.backend

    @property
    def captures(self) -> bool:
        """Whether denoising passes are repeated as CUDA graphs, outside of gangs."""
        return self._config.model.cuda_graphs and self.model.device.type == "cuda"

    @property
    def captures_training(self) -> bool:
        """The same of a part's passes, those with gradients included."""
        return self.captures and self._config.train.cuda_graphs

    @property
    def loaded(self) -> WeightsRef | None:
        """The version that is in the model."""
        return self._loaded[0] if self._loaded else None

    def use(self, ref: WeightsRef, policy: Policy = "trained") -> None:
        """Make a policy of a weights version the one in the model; hashes are checked on reading.

        Raises:
            SpotlightError: the file is missing or damaged.
        """
        if self._loaded == (ref, policy):
            return
        state = self._state(ref, policy)
        self._loaded = None
        self.model.load_trainable(state)
        self._loaded = (ref, policy)

    def old(self, ref: WeightsRef) -> list[Tensor] | None:
        """The policy that samples, in the order of `Model.parameters`; None where it is the one in training.

        Raises:
            SpotlightError: as `use`.
        """
        if not self._config.train.keeps_old:
            return None
        if self._old is None or self._old[0] != ref:
            values = self._old[1] if self._old else [p.detach().clone() for p in self.model.parameters()]
            state, self._old = self._state(ref, "old"), None
            with self.model.standing_in(values):
                self.model.load_trainable(state)
            self._old = (ref, values)
        return self._old[1]

    def _state(self, ref: WeightsRef, policy: Policy) -> dict[str, Tensor]:
        wanted = (ref, policy)
        if wanted not in self._versions:
            while len(self._versions) >= RESIDENT_VERSIONS:
                self._versions.pop(min(self._versions, key=lambda old: old[0].version))
            self._versions[wanted] = weights.load(self._run.url, ref, weights.PARTS[policy], self._node)
        return self._versions[wanted]

    def changed(self) -> None:
        """Note that the weights in the model belong to no version any more: they are being trained."""
        self._loaded = None

    @contextmanager
    def limits(self, what: str) -> Iterator[None]:
        """Raise a `SpotlightError` with a way out if the device's memory is full, or a kernel is not deterministic."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise SpotlightError(
                f"{what} does not fit the memory of device {models.device_of(self._config.model)}: {error}; make "
                "rollout.request_seeds, exploration.request_seeds, run.validation_seeds or train.micro_batch smaller, "
                "set model.cuda_graphs = false or model.vae_tiling = true, allow wider gangs (strategy.widths), or "
                "take a device with more memory, or one that no other process uses"
            ) from error
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise SpotlightError(
                f"{what}: {str(error).partition('. ')[0]}; set model.deterministic = false, and a run that loses "
                "workers may have other last bits than one that loses none"
            ) from error
