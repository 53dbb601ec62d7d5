"""A run's settings: TOML in, frozen values out; what is not known is an error that names what is.

Read once, at the start. Tasks read the resolved copy in the run directory, never the original.
"""

from spotlight.config.files import (
    RESOLVED,
    differences,
    dump,
    leaves,
    load,
    not_written,
    parse,
    resolve,
    set_value,
)
from spotlight.config.sections import (
    STEPS_MAX,
    DataSection,
    ModelSection,
    PaceSection,
    PoolSection,
    PoolsSection,
    RewardSection,
    Section,
    SimulationSection,
    SlurmSection,
    TrainSection,
)
from spotlight.config.settings import Config

__all__ = [
    "RESOLVED",
    "STEPS_MAX",
    "Config",
    "DataSection",
    "ModelSection",
    "PaceSection",
    "PoolSection",
    "PoolsSection",
    "RewardSection",
    "Section",
    "SimulationSection",
    "SlurmSection",
    "TrainSection",
    "differences",
    "dump",
    "leaves",
    "load",
    "not_written",
    "parse",
    "resolve",
    "set_value",
]
