"""Which settings to compare: baselines are settings of a run that differ, not other programs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spotlight.config import NO_GPU, Config, TrainSection, leaves, resolve
from spotlight.records import SpotlightError

logger = logging.getLogger(__name__)

_ON_RESERVED = {
    "strategy.rollout_pools": ["reserved"],
    "strategy.train_pools": ["reserved"],
    "pools.spot.workers": 0,
    "rollout.prompts_ahead": 0,
}
_ON_BOTH = {"strategy.rollout_pools": ["reserved", "spot"], "rollout.prompts_ahead": 0}
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "reserved only": {**_ON_RESERVED, "strategy.exploration": "off"},
    "reserved only, blocking exploration": {**_ON_RESERVED, "strategy.exploration": "blocking"},
    # As RLBoost: reserved workers roll out for a while, then train on what comes; training in parts needs "group".
    "reserved + spot, no exploration": {
        **_ON_BOTH,
        "strategy.exploration": "off",
        "strategy.offload": "adaptive",
        "train.advantage_std": "group",
    },
    "spot, restart on preemption": {
        **_ON_BOTH,
        "strategy.exploration": "stale",
        "strategy.on_preemption": "restart",
        "strategy.elastic": False,
    },
    "Spotlight": {
        **_ON_BOTH,
        "strategy.exploration": "stale",
        "strategy.on_preemption": "resume",
        "strategy.elastic": True,
    },
}
"""What is compared if the settings do not say: Spotlight and its baselines."""


def strategies(config: Config, base: Path = Path("/")) -> Iterator[tuple[str, Config]]:
    """The name and the whole settings of each strategy that is to be compared, in order.

    `BASELINES` that these settings cannot have are left out, with a line in the log.

    Args:
        base: what the paths in strategies are relative to: the directory of the settings file.

    Raises:
        SpotlightError: one of them changes an unknown setting, or gives an invalid value.
    """
    asked = config.simulation.strategies
    for name, changes in (asked or _baselines(config)).items():
        tree = config.model_dump(mode="json", exclude_none=True)
        del tree["simulation"]["strategies"]
        where = f"[simulation.strategies] {name!r}"
        changed = {path: value for path, value in leaves(changes) if value != {}}
        _forget_what_goes_by(changed, tree, config)
        for path, value in changed.items():
            _put(tree, path, value, where)
        try:
            whole = resolve(tree, base, where)
        except SpotlightError as error:
            if asked:
                raise
            logger.warning("%r is not compared, for these settings cannot have it: %s", name, error)
            continue
        yield name, whole


def _forget_what_goes_by(changed: Mapping[str, Any], tree: dict[str, Any], config: Config) -> None:
    """Remove values from a tree of settings that belong to what a strategy changes."""
    for pool in tree["pools"]:
        if f"pools.{pool}.gpu" in changed:  # prices are those of its other GPU
            tree["pools"][pool].pop("usd_per_h", None)
            tree["pools"][pool].pop("prices", None)
    if config.pools.reserved.gpu == NO_GPU != changed.get("pools.reserved.gpu", NO_GPU):
        tree["simulation"].pop("update_s", None)  # measured without a GPU, and this strategy has one
    usual = TrainSection(algorithm=config.train.algorithm).clip_range
    if "train.algorithm" in changed and config.train.clip_range == usual:  # each algorithm has its own
        del tree["train"]["clip_range"]
    if "model.name" in changed and config.model.embedded:  # each embedded model has its own
        for name in ("height_px", "width_px", "gradient_checkpointing"):
            del tree["model"][name]


def _baselines(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """`BASELINES`, adapted to the settings. If reserved workers only take the updates, they do so in all strategies
    with spot workers; in those without, the reserved workers are as the spot ones."""
    baselines = BASELINES
    if config.train.advantage_std == "none":  # which can train in parts, too
        baselines = {
            name: {key: value for key, value in changes.items() if key != "train.advantage_std"}
            for name, changes in BASELINES.items()
        }
    if not config.reserved_only_updates:
        return baselines
    spot = config.pools.spot
    alike = {
        "pools.reserved.gpu": spot.gpu if spot.gpu != NO_GPU else "",
        "pools.reserved.usd_per_h": config.on_demand_usd_per_h,
        "pools.reserved.workers": spot.workers,
        "pools.reserved.workers_per_node": spot.workers_per_node,
        **dict.fromkeys(("pools.reserved.prices", "pools.reserved.trace", "pools.reserved.trace_model"), ""),
    }
    return {
        name: {**changes, **alike}
        if "pools.spot.workers" in changes
        else {**changes, "strategy.rollout_pools": ["spot"]}
        for name, changes in baselines.items()
    }


def _put(tree: dict[str, Any], path: str, value: Any, where: str) -> None:
    *sections, key = path.split(".")
    if not sections or sections[0] == "simulation":
        raise SpotlightError(f'{where}: {path!r}: expected a setting of a run, such as "strategy.exploration" = "off"')
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise SpotlightError(f"{where}: {path!r}: {section!r} is a value, not a section")
    tree[key] = value
