"""A tiny scenario, and strategies to compare in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotlight.scenario import Scenario, load

TINY = """
name = "tiny"
hours = 2.0
iterations = 3
[cluster]
reserved_gpus = 2
reserved_gpus_per_node = 2
spot_nodes = 2
spot_gpus_per_node = 2
startup_s = 30.0
recovery_s = 1.0
[job]
widths = [1, 2]
prompts = 4
seeds_kept = 4
request_seeds = 2
validate_every = 2
validation_images = 8
dataset = 16
[exploration]
seeds_tried = 12
request_seeds = 4
rounds = 3
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "reserved only": {"exploration": "off", "rollout_pools": ["reserved"]},
    "blocking": {"exploration": "blocking", "rollout_pools": ["reserved"]},
    "spot rollouts": {"exploration": "off", "offload": "adaptive"},
    "restart": {"on_preemption": "restart", "elastic": False},
    "stale": {},
    "stale, window": {"offload": "adaptive"},
    "stale, all": {"offload": "all"},
    "spot only": {"rollout_pools": ["spot"]},
}


def scenario(tmp_path: Path, *names: str, text: str = TINY, **changes: Any) -> Scenario:
    """The tiny scenario with some of the strategies; ``cluster={...}`` and the like change its sections."""
    tables = [f'[[strategies]]\nname = "{name}"\n{toml(STRATEGIES[name])}' for name in names or STRATEGIES]
    path = tmp_path / "scenario.toml"
    path.write_text(text + "\n".join(tables))
    loaded = load(path)
    for section, fields in changes.items():
        value = getattr(loaded, section).model_copy(update=fields) if isinstance(fields, dict) else fields
        loaded = loaded.model_copy(update={section: value})
    return loaded


def toml(fields: dict[str, Any]) -> str:
    return "\n".join(
        f"{name} = {str(value).lower() if value in (True, False) else value!r}" for name, value in fields.items()
    )


def preempted(tmp_path: Path) -> Scenario:
    """All strategies, on two nodes of which each goes and comes back in the middle of things."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n70000,remove,a\n90000,add,c\n131000,remove,b\n131000,remove,c\n300000,add,d\n")
    return scenario(tmp_path, trace={"file": str(trace)})
