"""A run on a virtual clock: the settings, loop, graphs, tasks and dispatcher of a live one, on simulated machines.

As `spotlight.run` for a live run, it puts the packages together: a virtual cluster in place of Dask's, and as device a
modelled one (no tensors) or an engine in this process (real learning). The result is a run directory like any other.
Neither Dask's distributed scheduler nor, with modelled learning, torch is imported.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.rules import rules_of
from cluster.virtual.clock import VirtualClock
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.timing import Denoising, Fixed, Stay
from graphs.loop import Loop
from graphs.tasks import exploration, refills, sampling, training
from graphs.tasks.context import prepare
from spotlight import config as configuration
from spotlight.background import refuse_beside_a_run, simulating
from spotlight.clock import wall_clock
from spotlight.config import Config, PoolSection
from spotlight.device import protocol
from spotlight.driver import summarise
from spotlight.files import shown
from spotlight.inputs import check_inputs
from spotlight.market.ledger import Ledger
from spotlight.market.trace_files import read_trace
from spotlight.market.traces import SECONDS_PER_H
from spotlight.plan.availability import made_up_s, pool_switches, preemption_kinds, ups
from spotlight.plan.durations import TaskDurations
from spotlight.records import GradientPart, Pool, Rollout, SpotlightError, WorkerLife, record
from spotlight.rl.sums import slices_of
from spotlight.store import resuming
from spotlight.store.accounts import Accounts, pool_prices, read_lives
from spotlight.store.creating import create_run
from spotlight.store.rows import DECISIONS, HISTORY, SIMULATED, Simulated
from spotlight.strategies import strategies

if TYPE_CHECKING:
    from cluster.dispatch.events import WorkerPool
    from graphs.layers import Graph
    from spotlight.plan.balance import Balance

logger = logging.getLogger(__name__)

Learning = Literal["modelled", "real"]
AS_CONFIGURED = "as configured"
"""The name of the settings themselves, unless they are one of the strategies that they are compared with."""
COLLECT_AFTER = 200_000
"""New objects between two garbage collections: some ten collections in an iteration of a thousand workers."""


@record
class Outcome:
    """The result of a simulated run."""

    name: str
    """Name of its strategy."""
    run_dir: Path
    iterations: int
    hours: float
    """Hours that the run took; emulated hours if it is paced."""
    learning: Learning
    """Whether learning was modelled, or the model itself trained."""
    score: float
    """Score of the last validation."""
    unvalidated: int
    """Iterations since then: a run that ends by the hour ends between two validations."""
    target: float | None
    """``run.target``."""
    target_h: float | None
    """Hours until a validation reached the target; None if none did, or no target was set."""
    usd: float
    target_usd: float | None
    preemptions: int
    spot_utilisation: float
    seeds_scored: float
    """Candidates scored per prompt and iteration."""
    ledger: Ledger


def simulate(
    settings: str | Path,
    overrides: Sequence[str] = (),
    *,
    learning: Learning | None = None,
    compare: bool = True,
    report: bool = True,
    follow: Callable[[str, int, float], None] = lambda name, iteration, hours: None,
) -> Iterator[Outcome]:
    """Run a settings file on a virtual clock, then each strategy that it is to be compared with.

    Args:
        settings: a TOML file, as `spotlight.run.Run` takes it.
        overrides: ``"section.key=value"`` each.
        learning: None: as the settings say.
        compare: whether to go on with ``[simulation.strategies]``; else only the file itself is run.
        report: whether each run directory gets its ``report.html``.
        follow: called with the strategy, its iteration, and the hours that have passed.

    Raises:
        SpotlightError: the settings, or a file that they name, cannot be used; or all workers that may roll out are
            gone for good.
    """
    if learning and learning not in get_args(Learning):
        raise SpotlightError(f"learning = {shown(learning)}: expected {' or '.join(map(repr, get_args(Learning)))}")
    configuration.check_overrides(overrides)
    refuse_beside_a_run()
    how = [f"simulation.learning={learning}"] if learning else []
    config = configuration.load(settings, [*overrides, *how])
    learning = config.simulation.learning
    first, others = AS_CONFIGURED, list[tuple[str, Config]]()
    for name, each in strategies(config, Path(settings).parent) if compare else ():
        if _same_run(each, config):
            first = f"{name} ({AS_CONFIGURED})"
        else:
            others.append((name, each))
    logged = set[str]()
    check_inputs(config, with_model=learning == "real", live=False, logged=logged)
    runs = [(first, config), *_usable(others, config, logged, with_model=learning == "real")]
    for _, each in runs if learning == "modelled" else ():
        _check_target(each)
    simulations = ((name, partial(Simulation, name, each, learning, follow)) for name, each in runs)
    if len(runs) == 1:
        return (begin().go(report=report) for _, begin in simulations)
    return (_go(name, begin, report=report) for name, begin in simulations)


def _check_target(config: Config) -> None:
    target, start = config.run.target, config.simulation.start
    if target is not None and not start < target < 1:
        raise SpotlightError(
            f"run.target = {target} with modelled learning, whose scores rise from simulation.start = {start} towards "
            "1: give a target between them, or --learning real"
        )


def _usable(
    others: Sequence[tuple[str, Config]], config: Config, logged: set[str], *, with_model: bool
) -> Iterator[tuple[str, Config]]:
    """The strategies whose inputs are there; all are checked before the first is run, for a run may take hours.

    Raises:
        SpotlightError: what one of ``simulation.strategies`` lacks; of the usual ones, such are left out.
    """
    for name, each in others:
        try:
            check_inputs(each, with_model=with_model, live=False, logged=logged)
        except SpotlightError as error:
            if config.simulation.strategies:
                raise SpotlightError(f"{name}: {error}") from None
            logger.warning("%r is not compared, for these settings cannot have it: %s", name, error)
            continue
        yield name, each


def _go(name: str, begin: Callable[[], Simulation], *, report: bool) -> Outcome:
    """Run one of several; an error says which it is."""
    try:
        return begin().go(report=report)
    except SpotlightError as error:
        raise SpotlightError(f"{name}: {error}") from None


def _same_run(one: Config, other: Config) -> bool:
    """Whether the settings are the same but for ``simulation.strategies``."""
    first, second = (config.model_dump() for config in (one, other))
    for settings in (first, second):
        del settings["simulation"]["strategies"]
    return first == second


class Simulation:
    """One simulated run, as `spotlight.run.Run` is a live one."""

    def __init__(
        self,
        name: str,
        config: Config,
        learning: Learning,
        follow: Callable[[str, int, float], None] = lambda name, iteration, hours: None,
    ) -> None:
        self.name, self.config, self._learning, self._follow = name, config, learning, follow
        self._began_s = _began_s(config)
        self.directory = create_run(config, wall_clock(), simulated=True)
        strategy = "" if name == AS_CONFIGURED else name
        self.directory.write_json(SIMULATED, Simulated(learning=learning, strategy=strategy))
        self._accounts = Accounts(self.directory, config)
        self._clock = VirtualClock(self._began_s)
        self._dispatch = Dispatcher(rules_of(config), logged=config.logs_decisions)
        self._cluster = VirtualCluster(
            self.directory.name,
            self._dispatch,
            self._clock,
            TaskTiming(config),
            stays(config, self._began_s),
            resumes=config.strategy.on_preemption == "resume",
        )

    def go(self, *, report: bool = True) -> Outcome:
        """Run until it ends as a live run would, or until the last hour."""
        with simulating(), _device(self._learning), _few_collections():
            if self.config.simulation.hours:
                limit_s = self.config.simulation.hours * SECONDS_PER_H / self.config.emulated_per_real_s
                self._clock.at(self._began_s + limit_s, self._end)
            with suppress(_Over):
                Loop(self.directory, self._compute, self, self._clock).go()
        self._take()
        self._accounts.close(self._clock.now_s)
        if not self.directory.validation():
            raise SpotlightError(
                f"simulation.hours = {self.config.simulation.hours}: nothing is validated in that time: give it more"
            )
        summarise(self.directory, self._accounts, now_s=self._clock.now_s, began_s=self._began_s)
        if report and self.config.run.report:
            from spotlight.report import write_report

            write_report(self.directory.url)
        return self._outcome()

    def _compute(self, graph: Graph) -> Mapping[str, Any]:
        keys = [key for output in graph.outputs.values() for key in (output if isinstance(output, list) else [output])]
        found = dict(zip(keys, self._cluster.compute(graph.graph, keys), strict=True))
        return {
            name: [found[key] for key in output] if isinstance(output, list) else found[output]
            for name, output in graph.outputs.items()
        }

    def _take(self) -> None:
        drained = self._dispatch.drain()
        if drained.decisions:
            self.directory.append(DECISIONS, *drained.decisions)
        self._accounts.take(drained)

    def _end(self) -> None:
        """The time is up: stop what runs; it does not count as lost."""
        self._cluster.stop()
        raise _Over

    # Watch

    def begin(self, phase: str, iteration: int) -> None:
        """Report progress."""
        self._follow(self.name, self.directory.count(HISTORY), self._hours(self._clock.now_s))

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        self._take()
        return self._accounts.measure(start_s, stop_s)

    def usd(self) -> float:
        self._take()
        return sum(self._accounts.usd_by_pool(self._clock.now_s).values())

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance | None:
        self._take()
        return self._accounts.balance(iteration, began_s, window_s)

    # What came of it

    @property
    def lives(self) -> Sequence[WorkerLife]:
        """The lives of all workers."""
        return read_lives(self.directory)

    def _hours(self, at_s: float) -> float:
        return (at_s - self._began_s) * self.config.emulated_per_real_s / SECONDS_PER_H

    def _outcome(self) -> Outcome:
        run, now_s, scale = self.directory, self._clock.now_s, self.config.emulated_per_real_s
        history, validation = run.history(), run.validation()
        ledger = self._accounts.ledger(now_s)
        scored = sum(row.metrics.get("seeds_scored", 0.0) for row in history)
        explored = max(1, len(history) * self.config.prompts_drawn)
        reached = resuming.reached(run, self.config)
        at_target = reached.at_s if reached else None
        target_usd = None if at_target is None else scale * sum(self._accounts.usd_by_pool(at_target).values())
        return Outcome(
            name=self.name,
            run_dir=run.path,
            iterations=len(history),
            hours=self._hours(now_s),
            learning=self._learning,
            score=validation[-1].score,
            unvalidated=len(history) - validation[-1].version,
            target=self.config.run.target,
            target_h=None if at_target is None else self._hours(at_target),
            usd=scale * ledger.usd(),
            target_usd=target_usd,
            preemptions=self._accounts.preemptions(),
            spot_utilisation=self._accounts.spot_utilisation(now_s),
            seeds_scored=scored / explored,
            ledger=ledger,
        )


class _Over(Exception):
    """The time is up."""


class TaskTiming:
    """How long the calls of `graphs.tasks` take, by `plan.durations` and a run's settings."""

    def __init__(self, config: Config) -> None:
        self._config, self._durations = config, (durations := TaskDurations(config))
        self._train_width = config.train.width
        self.launch_s, self.form_s = durations.launch_s, durations.form_s
        self.graph_s, self.start_up_s = durations.graph_s, durations.start_up_s

    def step_s(self, samples: int, width: int, pool: Pool) -> float:
        return self._durations.step_s(samples, width, pool)

    def work(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> Denoising | Fixed:
        if function in (sampling.rollout_shard, sampling.rollout_ahead):
            return _denoising(_by_name(function, arguments)["request"])
        if function is exploration.explore_slot:
            given = _by_name(function, arguments)
            allocation, slot = given["allocation"], given["slot"]
            return _denoising(allocation[slot]) if slot < len(allocation) else Fixed(seconds=0.0)
        if function is training.gradient and self._train_width > 1:
            given = _by_name(function, arguments)
            part = _part(given)
            return Denoising(  # whose passes a gang shares: a single step
                request=part.name, samples=len(part.samples), steps=1, step_s=self._gradient_s(given["run_dir"], part)
            )
        return Fixed(seconds=self._seconds(function, arguments))

    def _gradient_s(self, run_dir: str, part: GradientPart) -> float:
        """Seconds of a part; once its gradient is stored, it is not done again, whatever preempted work does."""
        if protocol.current().has_gradient(run_dir, part) or not part.samples:
            return 0.0
        return self._durations.train_s(len(part.samples), self._train_width) + self._durations.gradient_s

    def _seconds(self, function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> float:
        durations, device = self._durations, protocol.current()
        if function in (sampling.score, refills.score_whole, refills.score_all) and durations.scores_take_time:
            given = _by_name(function, arguments)
            results = given["done"] if function is refills.score_all else [given["done"]]
            drawn = [done.request for done in results if isinstance(done, Rollout)]
            unscored = [each for each in drawn if not device.has_scores(given["run_dir"], each)]
            return durations.score_s(sum(len(each.seeds) for each in unscored))
        if function is training.gradient:
            given = _by_name(function, arguments)
            return self._gradient_s(given["run_dir"], _part(given))
        if function is training.add_gradients:
            parts = _by_name(function, arguments)["parts"]
            fetched = sum(part.rows > 0 for part in parts)
            return (fetched + 1) / slices_of(self._config, len(parts)) * durations.gradient_s
        if function is training.update:
            gradients = _by_name(function, arguments)["gradients"][-1]
            fetched = sum(part.rows > 0 for part in gradients)
            terms = fetched if slices_of(self._config, len(gradients)) == 1 else 1
            return terms * durations.gradient_s + durations.update_s
        if function is training.publish:
            return durations.publish_s
        return durations.prepare_s if function is prepare else 0.0


@cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _by_name(function: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """{parameter: argument} of a task's function."""
    return dict(zip(_names(function), arguments(), strict=False))  # the last ones may be left out


def _part(given: Mapping[str, Any]) -> GradientPart:
    """The part whose gradient a call of `training.gradient` with these arguments computes."""
    return training.gradient_part(**{name: given[name] for name in _names(training.gradient_part) if name in given})


def _denoising(request: Any) -> Denoising:
    again = 1 if request.looks_back else 0
    return Denoising(request=request.id, samples=len(request.seeds), steps=request.steps, passes_to_resume=again)


def stays(config: Config, began_s: float) -> Iterator[Stay]:
    """When the machine of every worker is there, and how it is taken away; traces begin with the first workers."""
    durations = TaskDurations(config)
    first_s = began_s + durations.warm_up_s
    trace_s = first_s + durations.start_up_s
    for name, pool in config.pools:
        hours = config.simulation.hours
        duration_s = hours * SECONDS_PER_H / config.emulated_per_real_s if hours else made_up_s(pool)
        recorded = read_trace(pool.trace) if pool.trace else None
        switches = pool_switches(pool, recorded, seed=config.run.seed, duration_s=duration_s, name=name)
        for index, moments in enumerate(switches):
            yield Stay(
                pool=cast("WorkerPool", name),
                name=f"{name}-{index}",
                node=f"node:{name}-{index // pool.workers_per_node}",
                ups=tuple(
                    (trace_s + from_s if from_s else first_s, trace_s + until_s) for from_s, until_s in ups(moments)
                ),
                preemptions=preemption_kinds(pool),
                grace_s=pool.grace_s,
                replace_after_s=_replace_after_s(pool),
            )


def _replace_after_s(pool: PoolSection) -> float:
    """A trace itself says when workers come back, so one that is lost otherwise is replaced at once."""
    return 0.05 if pool.trace or pool.trace_model else pool.replace_after_s


def _began_s(config: Config) -> float:
    """Where the clock begins: at 0, or at the earliest date of a price series."""
    prices = pool_prices(config).values()
    calendars = [price.times_s[0] for price in prices if len(price.times_s) > 1 and not price.since_start]
    return min((time_s for time_s in calendars if time_s > 0), default=0.0)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: a run of a thousand workers keeps a million records, and leaves few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _device(learning: Learning) -> Iterator[None]:
    """Use a modelled device in this process, or an engine without pacing."""
    if learning == "modelled":
        from spotlight.device.modelled import ModelledDevice

        device: protocol.Device = ModelledDevice()
    else:
        from spotlight.device.engine import InProcess

        device = InProcess(paced=False)
    with protocol.using(device):
        yield
