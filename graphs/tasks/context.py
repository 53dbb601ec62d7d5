"""What all tasks of a run share, and the task that works it out."""

from __future__ import annotations

from spotlight.device import protocol as device
from spotlight.records import WeightsRef, record
from spotlight.store.rundir import RunDir


@record
class RunContext:
    """What all requests of a run share, worked out once by `prepare`."""

    run_dir: str
    run: str
    seed: int
    sigmas: tuple[float, ...]
    explore_sigmas: tuple[float, ...]
    validation_sigmas: tuple[float, ...]
    start: WeightsRef
    """Version 0."""
    session: str = ""
    """Which start of the run this is, where a scheduler may see several."""


def prepare(run_dir: str, session: str = "") -> RunContext:
    """Load the model once, publish version 0, and ask the model for its noise levels."""
    run = RunDir(run_dir)
    prepared = device.current().prepare(run_dir)
    return RunContext(
        run_dir=run_dir,
        run=run.name,
        seed=run.config().run.seed,
        sigmas=prepared.sigmas,
        explore_sigmas=prepared.explore_sigmas,
        validation_sigmas=prepared.validation_sigmas,
        start=prepared.start,
        session=session,
    )
