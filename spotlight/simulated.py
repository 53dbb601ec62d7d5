"""One strategy's run on simulated machines: what `graphs.loop` and `graphs.iteration` do live, phase by phase.

Pure, and level-triggered: whenever something happened, `Run.advance` looks at the whole state and starts what is due.
What is decided is decided by the functions that decide in a live run; how long it takes is the cost model's.

Invariants: every iteration trains on ``prompts * seeds_kept`` samples, each kept seed once; nothing is explored for an
iteration once the training before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import inf

import numpy as np

from spotlight import fleet, learning
from spotlight.config import PARTS
from spotlight.learning import Rewards
from spotlight.machines import Machines, Work
from spotlight.market.ledger import SECONDS_PER_H
from spotlight.market.traces import Switches
from spotlight.plan.bandit import Arm, Beliefs, affordable, allocate, equal_shares, learn
from spotlight.plan.batching import parts, request_seeds
from spotlight.plan.offload import (
    FIRST_WINDOW_S,
    Measured,
    Offload,
    Sides,
    Turn,
    adapt,
    rollout_window_s,
    spare_s,
    spot_worth_renting,
    turn,
)
from spotlight.plan.placement import Waiting
from spotlight.plan.subset import max_variance_subset, most_varied
from spotlight.records import Pool, Span, SpotlightError
from spotlight.scenario import Scenario, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One phase of an iteration's graph, as `graphs.iteration` builds it; its tasks start when ``after`` is done."""

    phase: str
    after: tuple[str, ...] = ()


def iteration_layers(rounds: int, *, streams: bool) -> tuple[Layer, ...]:
    """One iteration: roll out, score (a part of rolling out here), train, publish; and explore for the next one.

    Args:
        rounds: of exploration; 0 is none.
        streams: training takes samples as they arrive.
    """
    return (
        Layer(phase="rollout"),
        Layer(phase="train", after=() if streams else ("rollout",)),
        Layer(phase="publish", after=("rollout", "train")),
        *exploration_layers(rounds),
    )


def exploration_layers(rounds: int) -> tuple[Layer, ...]:
    """Rounds of allocating and exploring, then the selection; a round sees the scores of rounds up to ``r - 2``."""
    layers = []
    for r in range(rounds):
        seen = tuple(f"explore-r{earlier}" for earlier in range(r - 1))
        layers.append(Layer(phase=f"allocate-r{r}", after=seen))
        layers.append(Layer(phase=f"explore-r{r}", after=(f"allocate-r{r}",)))
    if layers:
        layers.append(Layer(phase="select", after=tuple(f"explore-r{r}" for r in range(rounds))))
    return tuple(layers)


PREPARATION = (Layer(phase="prepare"),)
VALIDATION = (Layer(phase="validate"),)


def submitted(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """A graph as it is sent: all of it waits until it is there."""
    return (Layer(phase="submit"), *(replace(layer, after=layer.after or ("submit",)) for layer in layers))


@dataclass(slots=True, kw_only=True, eq=False)
class _Exploration:
    """What is known of the candidates of one iteration."""

    prompts: list[int]
    rewards: Rewards
    stale: bool
    tried: list[int]
    """Candidates given out, of each prompt."""
    scored: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Of each prompt: ``(round, first candidate, number)`` of the chunks that were scored."""
    pending: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each prompt: ``(round, number)`` of all chunks that were given out."""

    def candidates(self, index: int, before: int) -> list[int]:
        """A prompt's candidates that were scored in rounds before that one."""
        chunks = sorted((first, count) for r, first, count in self.scored[index] if r < before)
        return [candidate for first, count in chunks for candidate in range(first, first + count)]

    def arm(self, index: int, round_index: int) -> Arm:
        """A prompt as the round may know it: the scores of rounds up to ``r - 2``."""
        seen = self.candidates(index, round_index - 1)
        return Arm(
            prompt=self.prompts[index],
            rewards=tuple(self.rewards.explored_PN[index, seen].tolist()),
            tried=self.tried[index],
            pending=sum(count for r, count in self.pending[index] if r == round_index - 1),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Balance:
    """How the two sides of an iteration get on."""

    began_s: float = 0.0
    window_s: float = inf
    """Until then after its beginning, reserved GPUs roll out."""
    pools: tuple[Pool, ...] = ()
    """Where rollouts run now."""
    groups_left: list[int] = field(default_factory=list)
    """Requests of each prompt that are not done."""
    rolled_out_s: float = 0.0
    changes: int = 0
    trained: int = 0
    """Groups."""
    training: bool = False
    train_s: float = 0.0
    waiting_since_s: float | None = None
    train_wait_s: float = 0.0

    def ready(self) -> int:
        """Groups that may be trained on next: training consumes them in order."""
        for index in range(self.trained, len(self.groups_left)):
            if self.groups_left[index]:
                return index - self.trained
        return len(self.groups_left) - self.trained


class Run:
    """A strategy's iterations, one after the other, to the target, the last iteration or the last hour."""

    def __init__(self, scenario: Scenario, strategy: Strategy, switches: Sequence[Switches]) -> None:
        self.scenario, self.strategy, self.job = scenario, strategy, scenario.job
        self.machines = Machines(timing=fleet.timing(scenario, strategy), ended=self._ended)
        self.widths = self.job.widths if strategy.elastic else self.job.widths[-1:]
        self.train_gpu_s = fleet.train_gpu_s(scenario)
        self.parts = 1 if strategy.offload == "none" else PARTS
        self.over = False
        self.k = self.exploring = 0
        """The iteration that trains, and the one that is explored for."""
        self.chunks: dict[int, list[tuple[int, int, int]]] = {}
        """What each round tries: ``(prompt index, first candidate, number)``."""
        self.score = scenario.learning.start
        self.target_s: float | None = None
        self.beliefs, self.offload = Beliefs(), Offload(window_s=FIRST_WINDOW_S)
        self.difficulty_D = learning.difficulties(self.job.dataset, seed=scenario.seed)
        self.layers: tuple[Layer, ...] = ()
        self.left: dict[str, int] = {}
        """Tasks of each started layer that are not done."""
        self.explorations: dict[int, _Exploration] = {}
        """By the iteration that they are for."""
        self.kept: dict[int, dict[int, list[int]]] = {}
        """By iteration: the kept candidates of each prompt that is rolled out, by its index among all of them."""
        self.pairs: dict[int, list[tuple[float, float]]] = {}
        """By prompt: explored and regenerated rewards of the last iteration's kept seeds."""
        self.explored = self.order = self.worth = 0
        self.seed_s = 0.0
        """GPU-seconds of denoising a candidate, as the last iteration measured them; 0 where it explored nothing."""
        self.spare_s: list[float] = []
        """Worker seconds that spot workers had beside each iteration's training."""
        self.windows: list[tuple[float, float]] = []
        """When each iteration began and ended."""
        self.captured_sum = 0.0
        self.balance = _Balance()
        fleet.arrive(self.machines, scenario, strategy, switches)
        self.script = self._go()

    def go(self) -> None:
        """Run it to its end.

        Raises:
            SpotlightError: only spot GPUs may roll out, and they are gone for good.
        """
        limit_s = self.scenario.hours * SECONDS_PER_H
        self.machines.run(limit_s, self.advance)
        self.machines.close()
        if not self.over and self.machines.now_s < limit_s:
            waiting = len(self.machines.unplaced())
            raise SpotlightError(
                f"strategy {self.strategy.name!r}: every spot GPU is gone for good at {self.machines.now_s:.0f} s, and "
                f'{waiting} requests wait: add "reserved" to its rollout_pools, or extend the trace'
            )

    # Iteration after iteration

    def _go(self) -> Iterator[tuple[Layer, ...]]:
        """The graphs of a run, each when the one before is done."""
        job, explores, last = self.job, self.strategy.exploration, self.scenario.iterations - 1
        rounds, streams = self.scenario.exploration.rounds, self.parts > 1
        yield PREPARATION
        while self.k != last + 1 or last < 0:
            if job.validation_images and self.k % job.validate_every == 0:
                yield submitted(VALIDATION)
            began_s, spans = self.machines.now_s, len(self.machines.spans)
            if explores != "off" and self.k not in self.kept:
                self._begin_exploration(self.k, stale=False)
                yield submitted(exploration_layers(rounds))
            stale = explores == "stale" and self.k != last
            self._begin_iteration(stale=stale)
            yield submitted(iteration_layers(rounds if stale else 0, streams=streams))
            self.windows.append((began_s, self.machines.now_s))
            self.seed_s = self._measured_seed_s(self.machines.spans[spans:])
            self._end_iteration()
            if self.target_s is not None:
                return

    def advance(self) -> bool:
        """Start what has become due; True when the run is over. Looks at the whole state, like a plan."""
        while not self.over:
            if all(self.left.get(layer.phase) == 0 for layer in self.layers):
                self.layers, self.left = next(self.script, ()), {}
                self.over = not self.layers
            due = [layer for layer in self.layers if layer.phase not in self.left and self._is_due(layer)]
            for layer in due:
                self._start(layer.phase)
            self._move_rollouts()
            if not due and not self.over and not self._train_on():
                return False
        return True

    def _is_due(self, layer: Layer) -> bool:
        return all(self.left.get(phase) == 0 for phase in layer.after)

    def _start(self, phase: str) -> None:
        self.left[phase] = 0
        kind, _, number = phase.partition("-r")
        match kind:
            case "prepare" | "submit":
                self.left[phase] = 1
                seconds = self.job.prepare_s if kind == "prepare" else self.job.graph_s
                self.machines.at(self.machines.now_s + seconds, self._done, phase)
            case "rollout":
                self._roll_out()
            case "train":
                self.left[phase] = self.job.prompts
            case "publish":
                self.left[phase] = 1
                self.machines.occupy("reserved", self.job.publish_s, phase, self.k, partial(self._done, phase))
            case "allocate":
                self._allocate(int(number))
            case "explore":
                self._explore(phase, int(number))
            case "select":
                self._select()
            case "validate":
                self._validate()

    def _done(self, phase: str) -> None:
        self.left[phase] = 0

    def _ended(self, work: Work, done: bool) -> None:
        self.left[work.phase] -= 1
        if work.phase == "rollout":
            self.balance.groups_left[work.payload] -= 1
            self.balance.rolled_out_s = self.machines.now_s
        elif work.phase != "validate" and done:
            index, *chunk = work.payload
            self.explorations[work.iteration].scored[index].append(tuple(chunk))
            self.explored += chunk[-1]

    def _submit(
        self, phase: str, iteration: int, name: str, samples: int, steps: int, pools: tuple[Pool, ...], payload: object
    ) -> None:
        self.order += 1
        self.left[phase] += 1
        waiting = Waiting(
            id=f"{iteration}-{phase}-{name}",
            pools=pools,
            order=self.order,
            exploring=phase.startswith("explore"),
            widths=self.widths,
            slots=self.widths[-1],
        )
        score_s = samples * self.job.score_s
        self.machines.submit(
            Work(
                waiting=waiting,
                phase=phase,
                iteration=iteration,
                samples=samples,
                steps=steps,
                score_s=score_s,
                payload=payload,
            )
        )

    # Rollout, training, learning

    def _begin_iteration(self, *, stale: bool) -> None:
        job, machines = self.job, self.machines
        if self.k not in self.kept:
            self.kept[self.k] = {index: list(range(job.seeds_kept)) for index in range(job.prompts)}
        if stale:
            self._begin_exploration(self.k + 1, stale=True)
        window_s = rollout_window_s(self.strategy.offload, self.offload, parts=self.parts)
        self.balance = _Balance(began_s=machines.now_s, window_s=window_s, changes=machines.changes)
        if window_s < inf:
            machines.at(machines.now_s + window_s, _wake)

    def _roll_out(self) -> None:
        job, balance = self.job, self.balance
        balance.pools = self._turn().pools
        size = job.request_seeds or self._request_seeds(balance.pools)
        balance.groups_left = [-(-job.seeds_kept // size)] * job.prompts
        for index in range(job.prompts):
            for first in range(0, job.seeds_kept, size):
                samples = min(size, job.seeds_kept - first)
                self._submit("rollout", self.k, f"{index}-{first}", samples, job.steps, balance.pools, index)

    def _request_seeds(self, pools: Sequence[Pool]) -> int:
        job = self.job
        return request_seeds(
            prompts=job.prompts,
            seeds=job.seeds_kept,
            gangs=max(1, sum(self.machines.count(pool) for pool in pools) // self.widths[0]),
            most=job.batch,
            fixed_s=job.launch_s,
            sample_s=job.steps * fleet.step_s(self.scenario, 1, self.widths[0]) + job.score_s,
        )

    def _turn(self) -> Turn:
        """Whether reserved GPUs roll out or train now."""
        balance, machines = self.balance, self.machines
        return turn(
            Sides(
                pools=self.strategy.rollout_pools,
                elapsed_s=machines.now_s - balance.began_s,
                window_s=balance.window_s,
                spot=machines.count("spot"),
                waiting=machines.waits(),
                rolling=machines.busy("reserved"),
            )
        )

    def _move_rollouts(self) -> None:
        """Look for the end of the window, and for spot GPUs that come or go after it."""
        if self.left.get("rollout") and self.balance.window_s < inf:
            pools = self._turn().pools
            if pools != self.balance.pools:
                self.balance.pools = pools
                self.machines.move("rollout", pools)

    def _train_on(self) -> bool:
        """Train on the next part, if it is ready and the reserved GPUs are free for it."""
        balance, machines = self.balance, self.machines
        if not self.left.get("train") or balance.training or not machines.count("reserved") or not self._turn().train:
            return False
        part = next(one for one in parts(self.job.prompts, most=self.parts) if one.start == balance.trained)
        if balance.ready() < len(part):
            if balance.waiting_since_s is None:
                balance.waiting_since_s = machines.now_s
            return False
        if balance.waiting_since_s is not None:
            balance.train_wait_s += machines.now_s - balance.waiting_since_s
        seconds = len(part) * self.job.seeds_kept * self.train_gpu_s / machines.count("reserved")
        balance.training, balance.waiting_since_s = True, None
        balance.train_s += seconds
        machines.occupy("reserved", seconds, "train", self.k, lambda: self._trained(len(part)))
        return True

    def _trained(self, groups: int) -> None:
        self.balance.training = False
        self.balance.trained += groups
        self.left["train"] = self.job.prompts - self.balance.trained
        if not self.left["train"]:
            self.machines.drop_exploration()

    def _end_iteration(self) -> None:
        self._measure()
        kept, exploration = self.kept.pop(self.k), self.explorations.pop(self.k, None)
        prompts = exploration.prompts if exploration else self._prompts(self.k)
        stale = exploration.stale if exploration else False
        rewards = self._draw(self.k, prompts, 1 + max(map(max, kept.values())), stale)
        captured = rewards.captured(kept)
        if exploration:
            self.pairs = {
                prompts[index]: [
                    (float(exploration.rewards.explored_PN[index, one]), float(rewards.regenerated_PN[index, one]))
                    for one in seeds
                    if any(first <= one < first + count for _, first, count in exploration.scored[index])
                ]
                for index, seeds in kept.items()
            }
        self.captured_sum += captured
        self.score = learning.after(self.score, captured, pace=self.scenario.learning.pace)
        self.k += 1
        if self.scenario.target and self.score >= self.scenario.target and self.target_s is None:
            self.target_s = self.machines.now_s

    def _measure(self) -> None:
        """What the iteration says about the balance of its two sides."""
        balance, spot = self.balance, self.machines.count("spot")
        rollout_s = balance.rolled_out_s - balance.began_s
        measured = Measured(
            train_wait_s=balance.train_wait_s,
            rollout_s=rollout_s,
            remote_wait_s=self.machines.now_s - max(balance.rolled_out_s, self._explored_s()),
            spot=spot,
            steady=self.machines.changes == balance.changes,
        )
        self.spare_s.append(self._spare_s())
        if self.strategy.offload == "adaptive":
            self.offload = adapt(self.offload, measured)
        self.worth = spot_worth_renting(
            remote_s=rollout_s if "spot" in self.strategy.rollout_pools else 0.0,
            spot=spot,
            reserved_s=min(balance.window_s, rollout_s) if "reserved" in self.strategy.rollout_pools else 0.0,
            reserved=self.scenario.cluster.reserved_gpus,
            train_s=balance.train_s,
        )

    def _spare_s(self) -> float:
        """What spot workers had beside the training that ends now."""
        machines, began_s = self.machines, self.balance.began_s
        recent = takewhile(lambda span: span.stop_s >= began_s, reversed(machines.spans))
        rollouts = [span for span in recent if span.phase == "rollout"]
        return spare_s(rollouts, machines.lives(), began_s=began_s, until_s=machines.now_s)

    def _explored_s(self) -> float:
        """When the last exploration of this iteration ended; 0 where there was none."""
        recent = takewhile(lambda span: span.stop_s >= self.balance.began_s, reversed(self.machines.spans))
        return max((span.stop_s for span in recent if span.phase.startswith("explore")), default=0.0)

    # Exploration

    def _begin_exploration(self, iteration: int, *, stale: bool) -> None:
        prompts = self._prompts(iteration)
        self.explorations[iteration] = _Exploration(
            prompts=prompts,
            rewards=self._draw(iteration, prompts, self.scenario.exploration.seeds_tried, stale),
            stale=stale,
            tried=[0] * len(prompts),
            scored=[[] for _ in prompts],
            pending=[[] for _ in prompts],
        )
        self.exploring = iteration

    def _allocate(self, round_index: int) -> None:
        """What the round's slots try; nothing once training has ended."""
        settings, exploration = self.scenario.exploration, self.explorations[self.exploring]
        prompts, chunk = len(exploration.prompts), settings.request_seeds
        self.chunks[round_index] = []
        if self.left.get("train") == 0:
            return
        slots = [
            len(equal_shares(prompts, settings.seeds_tried, chunk, settings.rounds, r)) for r in range(settings.rounds)
        ]
        most = self._affordable() if exploration.stale else settings.seeds_tried * prompts
        chunks = self.chunks[round_index] = allocate(
            [exploration.arm(index, round_index) for index in range(prompts)],
            self.beliefs,
            iteration=self.exploring,
            slots=slots[round_index],
            later=sum(slots[round_index + 1 :]),
            candidates=max(0, most - sum(exploration.tried)),
            chunk=chunk,
            keep=self.job.seeds_kept,
            seed=(self.scenario.seed << 32) + self.exploring * settings.rounds + round_index,
        )
        for index, _, count in chunks:
            exploration.tried[index] += count
            exploration.pending[index].append((round_index, count))
        most = max(exploration.tried)
        if most > exploration.rewards.explored_PN.shape[1]:
            exploration.rewards = self._draw(self.exploring, exploration.prompts, most, exploration.stale)

    def _affordable(self) -> int:
        """Candidates that can be explored while the next version is trained, going by the last iterations: as live."""
        settings = self.scenario.exploration
        limit = settings.seeds_tried * (settings.prompts or self.job.prompts)
        most = affordable(spare_s=self.spare_s, seed_s=self.seed_s, chunk=settings.request_seeds)
        return limit if most is None else min(limit, most)

    def _measured_seed_s(self, spans: Sequence[Span]) -> float:
        """Seconds that a candidate took in the iteration's exploration; 0 where none was scored."""
        exploration = self.explorations.get(self.k)
        scored = sum(count for chunks in exploration.scored for _, _, count in chunks) if exploration else 0
        explored_s = sum(span.stop_s - span.start_s for span in spans if span.phase.startswith("explore-r"))
        return explored_s / scored if scored else 0.0

    def _explore(self, phase: str, round_index: int) -> None:
        stale = self.explorations[self.exploring].stale
        pools: tuple[Pool, ...] = ("spot",) if stale else ("reserved", "spot")
        steps = self.scenario.exploration.steps or self.job.steps
        for index, first, count in self.chunks[round_index]:
            name, payload = f"{index}-{first}", (index, round_index, first, count)
            self._submit(phase, self.exploring, name, count, steps, pools, payload)

    def _select(self) -> None:
        """Keep the seeds whose rewards differ most; fill up with untried ones where too few were scored."""
        exploration, keep = self.explorations[self.exploring], self.job.seeds_kept
        everything = [exploration.candidates(index, len(self.layers)) for index in range(len(exploration.prompts))]
        rewards = exploration.rewards.explored_PN
        kept, known = [], []
        for index, scored in enumerate(everything):
            if len(scored) > keep:
                kept.append([scored[one] for one in max_variance_subset(rewards[index, scored], keep)])
                known.append(rewards[index, kept[-1]].tolist())
            else:
                untried = (one for one in range(keep + len(scored)) if one not in scored)
                kept.append(scored + [next(untried) for _ in range(keep - len(scored))])
                known.append(rewards[index, scored].tolist())
        self.kept[self.exploring] = {index: kept[index] for index in most_varied(known, self.job.prompts)}
        seen = {
            prompt: rewards[index, scored].tolist()
            for index, (prompt, scored) in enumerate(zip(exploration.prompts, everything, strict=True))
        }
        self.beliefs = learn(self.beliefs, self.exploring, seen, self.pairs)

    def _validate(self) -> None:
        images, size = self.job.validation_images, self.job.batch
        for first in range(0, images, size):
            samples = min(size, images - first)
            self._submit("validate", self.k, str(first), samples, self.job.steps, ("reserved", "spot"), None)

    # The scenario's numbers

    def _prompts(self, iteration: int) -> list[int]:
        explored = 0 if self.strategy.exploration == "off" else self.scenario.exploration.prompts
        rng = np.random.default_rng([self.scenario.seed, 2, iteration])
        return sorted(rng.choice(self.job.dataset, explored or self.job.prompts, replace=False).tolist())

    def _draw(self, iteration: int, prompts: Sequence[int], candidates: int, stale: bool) -> Rewards:
        return learning.draw(
            self.score,
            self.difficulty_D[list(prompts)],
            candidates=max(candidates, self.job.seeds_kept),
            stale=stale,
            seed=self.scenario.seed,
            iteration=iteration,
        )


def _wake() -> None:
    """Something may have become due."""
