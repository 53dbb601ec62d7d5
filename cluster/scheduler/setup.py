"""Sets Dask's scheduler for a run: losses are normal, no work is stolen, and the head worker is the run's alone.

It also keeps Dask's timers going when the system's clock is set back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from distributed import Scheduler, batched
from tornado.ioloop import IOLoop

from spotlight.clock import wall_clock

FAILURES = 1_000_000
"""Losses of a worker that a task survives: in effect, any number."""


def configure(scheduler: Scheduler) -> Callable[[], None]:
    """Set a scheduler so that losses are normal and only the dispatcher moves work; returns what undoes that."""
    names = ("allowed_failures", "worker_ttl", "no_workers_timeout")
    before = {name: getattr(scheduler, name) for name in names}
    scheduler.allowed_failures = FAILURES  # losing spot workers is normal; see `DispatchPlugin.log_event`
    if scheduler.worker_ttl is not None:
        scheduler.worker_ttl = inf  # see `DispatchPlugin._watch`, which knows a pause from a loss
    scheduler.no_workers_timeout = None  # tasks behind the gate wait as long as it takes
    stealing = "stealing" in scheduler.periodic_callbacks
    if stealing:  # the dispatcher alone moves work
        scheduler.loop.add_callback(scheduler.extensions["stealing"].stop)
    manager: Any = scheduler.extensions.get("amm")
    managed = manager is not None and manager.running
    if managed:  # results are small, and each is wanted where it is
        manager.stop()

    shared = _keep_others_off_the_head(scheduler)

    def restore() -> None:
        shared()
        for name, value in before.items():
            setattr(scheduler, name, value)
        if stealing:
            scheduler.loop.add_callback(scheduler.extensions["stealing"].start)
        if managed:
            manager.start()

    return restore


def _keep_others_off_the_head(scheduler: Scheduler) -> Callable[[], None]:
    """The worker that only decides is in the driver's process, and mostly idle: Dask would give it whatever others
    submit, which holds the run up for as long as it takes, or ends its driver. Returns what undoes it."""
    valid_workers, check_idle = scheduler.valid_workers, scheduler.check_idle_saturated
    decide_unqueued = scheduler.decide_worker_rootish_queuing_disabled

    def has_head() -> bool:
        return any("head" in state.resources for state in scheduler.running)

    def but_the_head(task: Any) -> set[Any] | None:
        found = valid_workers(task)
        if found is None and has_head():
            return {state for state in scheduler.running if "head" not in state.resources}
        return found

    def decide_among_valid(task: Any) -> Any:
        """Where "worker-saturation" is infinite, Dask asks for no valid workers for the first tasks of a graph."""
        return scheduler.decide_worker_non_rootish(task) if has_head() else decide_unqueued(task)

    def never_idle(state: Any, occ: float = -1.0) -> None:
        check_idle(state, occ)
        if "head" in state.resources:
            scheduler.idle_task_count.discard(state)

    replaced = {
        "valid_workers": but_the_head,
        "check_idle_saturated": never_idle,
        "decide_worker_rootish_queuing_disabled": decide_among_valid,
    }
    vars(scheduler).update(replaced)

    def restore() -> None:
        for name in replaced:
            del vars(scheduler)[name]

    return restore


def steady(loop: IOLoop) -> None:
    """Run this loop's timers on a clock that is never set back.

    Otherwise timers, and messages that follow another within milliseconds, would wait until a system clock that was set
    back has caught up.
    """
    ahead_s = loop.time() - wall_clock()
    loop.time = lambda: ahead_s + wall_clock()  # type: ignore[method-assign]
    vars(batched)["time"] = wall_clock  # of the whole process, which has one loop
