"""A run's settings: TOML in, frozen values out; an unknown name is an error that lists the known ones.

Read once, at the start. Tasks read the resolved copy in the run directory, never the original.
"""

from spotlight.config.files import (
    RESOLVED,
    changed,
    check_overrides,
    differences,
    dump,
    is_whole,
    leaves,
    load,
    not_written,
    parse,
    resolve,
    resolved,
    set_value,
    settings_named,
)
from spotlight.config.learning import (
    STEPS_MAX,
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
    PoolSection,
    PoolsSection,
    SimulationSection,
    SlurmSection,
    SpSection,
    StrategySection,
)
from spotlight.config.section import Section
from spotlight.config.settings import Config

__all__ = [
    "NO_GPU",
    "ClusterSection",
    "Config",
    "DataSection",
    "ExplorationSection",
    "LatentsSection",
    "ModelSection",
    "PaceSection",
    "PoolSection",
    "PoolsSection",
    "RESOLVED",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "STEPS_MAX",
    "Section",
    "SimulationSection",
    "SlurmSection",
    "SpSection",
    "StrategySection",
    "TrackingSection",
    "TrainSection",
    "changed",
    "check_overrides",
    "differences",
    "dump",
    "leaves",
    "load",
    "is_whole",
    "not_written",
    "resolved",
    "settings_named",
    "parse",
    "resolve",
    "set_value",
]
