"""Puts a LoRA that was trained elsewhere into a model, so that training starts from it.

Reads what diffusers' ``save_lora_weights`` and peft's ``save_pretrained`` write, so also what `spotlight export` and
Flow-GRPO do; no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from spotlight.config import TrainSection
from spotlight.files import kind_of, shown
from spotlight.records import SpotlightError
from spotlight.rl.checkpoints import tensors

if TYPE_CHECKING:
    from spotlight.rl.models import Model

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Names that diffusers, and peft, give the file of a LoRA."""
PREFIXES = ("transformer.", "base_model.model.")
"""What they put before the names of layers."""
NOT_PLAIN = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")
"""Settings of a LoRA that scales or computes otherwise than ours."""


def start_from_lora(model: Model, train: TrainSection) -> None:
    """Copy the LoRA of ``train.lora_path``, if there is one, into the model's own.

    Args:
        model: already made trainable.

    Raises:
        SpotlightError: as `require_lora`, or its layers are not those of the model's LoRA.
    """
    if not train.lora_path:
        return
    from safetensors.torch import load_file

    file = require_lora(train)
    state = {_layer(name): value for name, value in load_file(file).items()}
    own = model.trainable()
    differing = [name for name in own.keys() | state.keys() if _shape(own, name) != _shape(state, name)]
    if differing:
        raise SpotlightError(
            f"{file}: its layers are not those that a LoRA of this model adapts: {len(differing)} differ, such as "
            f"{min(differing)}; start from a LoRA of the same layers, or merge it into the checkpoint of model.path"
        )
    model.load_trainable(state)


def require_lora(train: TrainSection) -> Path:
    """The file of a LoRA that can be started from, from its header alone.

    Raises:
        SpotlightError: there is none, it is damaged or no plain LoRA, or its rank or scale is not that of the settings.
    """
    file = _file(Path(train.lora_path))
    ranks = {shape[0] for name, shape in tensors(file).items() if shape and name.endswith(".lora_A.weight")}
    if ranks != {train.lora_rank}:
        found = f"has rank {shown(sorted(ranks))}" if ranks else "is no LoRA of diffusers or peft"
        raise SpotlightError(f"{file}: it {found}, and train.lora_rank is {train.lora_rank}: the two must agree")
    stored = _settings(file)
    if unusual := [name for name in NOT_PLAIN if stored.get(name)]:
        raise SpotlightError(
            f"{file}: it is no plain LoRA ({unusual[0]} is set): merge it into the checkpoint of model.path"
        )
    alpha, wanted = stored.get("lora_alpha", train.lora_rank), train.lora_alpha or 2 * train.lora_rank
    if alpha != wanted:
        raise SpotlightError(
            f"{file}: its alpha is {shown(alpha)}{'' if 'lora_alpha' in stored else ', as it does not say,'} and "
            f"train.lora_alpha is {wanted:g}: set train.lora_alpha = {shown(alpha)}"
        )
    return file


def _file(path: Path) -> Path:
    """
    Raises:
        SpotlightError: there is none.
    """
    places = [path / name for name in FILES] if kind_of(path) == "directory" else [path]
    file = next((place for place in places if place.is_file() and place.suffix == ".safetensors"), None)
    if file is None:
        raise SpotlightError(
            f"train.lora_path = {str(path)!r}: no LoRA there; give a .safetensors file, or a directory with "
            f"{' or '.join(FILES)}"
        )
    return file


def _settings(file: Path) -> Mapping[str, Any]:
    """What diffusers writes into the file's header, and peft beside the file; nothing, where neither did.

    Raises:
        SpotlightError: it is damaged, or the header is.
    """
    beside = file.with_name("adapter_config.json")
    try:
        with safe_open(file, framework="numpy") as opened:  # whose checks of a header are stricter than ours
            stored = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
        if beside.exists():
            return dict(json.loads(beside.read_text()))
        return {name.removeprefix("transformer."): value for name, value in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise SpotlightError(f"{file}: what it says of itself is not readable ({error}); copy it anew") from None


def _layer(name: str) -> str:
    prefix = next((each for each in PREFIXES if name.startswith(each)), "")
    return name.removeprefix(prefix)


def _shape(state: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
