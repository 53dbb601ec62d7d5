"""What the dispatcher knows of a cluster, and what may be asked of that; it decides and sends nothing.

Knows no Dask and no clock. Questions that look often cost little: see `doing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, get_args

from cluster.dispatch.events import Key, TaskState
from cluster.dispatch.journal import Journal, Label
from cluster.dispatch.request_index import RequestIndex
from cluster.dispatch.request_state import SCORING, TRAINING, RequestState
from cluster.dispatch.roster import Roster, WorkerState
from cluster.dispatch.rules import Rules
from cluster.dispatch.snapshot import Snapshot, WorkerActivity, view_of
from spotlight.plan.offload import ANYONE, PhaseDecision, PhaseView, decide_phase
from spotlight.records import Pool, record

ENOUGH_LOSSES = 10
"""Times ``Rules.quarantine_after``, after which a task is given up and the run with it: each loss may have been a
preemption, but a task that is done every second time is lost 50 times in a row once in 10**15."""
ENGINES_MIN = 5
"""Engines in a row that each worker which may do a task of training must have lost, at least, before the run ends."""


@record
class RolloutWindow:
    """How long reserved workers roll out, from when an iteration's graph came."""

    began_s: float = 0.0
    window_s: float = inf
    pools: tuple[Pool, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A task of ours, and how far it is."""

    key: Key
    label: Label
    request: RequestState | None
    state: TaskState = "released"
    worker: str = ""
    losses: int = 0
    """How many workers, or engines of workers, were lost before it was done; of a task that is no request's."""
    is_lost: bool = False
    """Whether the worker that began it last is among these losses: its engine may be lost first, and then itself."""
    alike: tuple[Key, ...] = ()
    """Keys of the last shards of a request, if this task stands for all of them: the same has happened to each so far.
    `key` is the first of them."""
    keys: tuple[Key, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.alike or (self.key,)

    @property
    def explores(self) -> bool:
        return self.label.phase.startswith("explore")

    @property
    def is_gated(self) -> bool:
        """Whether it is a GPU's work that we hand out."""
        return self.request is not None or self.label.pool in TRAINING


class State:
    """What is known of workers, tasks and requests.

    Args:
        rules: what the settings say.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.journal = Journal()
        self.roster = Roster()
        self.index = RequestIndex()
        self.tasks: dict[Key, Task] = {}
        self.requests: dict[str, RequestState] = {}
        self.ahead: dict[str, RequestState] = {}
        """Requests that are rollouts of the next iteration."""
        self.explored = Counter[int]()
        """{iteration: how many requests that explore for it have begun so far}"""
        self.order = 0
        """How many requests were added so far."""
        self.window = RolloutWindow()
        self.training: dict[Key, Task] = {}
        """Gradients of parts, their sums, and updates."""
        self.ready: dict[Key, Task] = {}
        """Those of `training` that wait behind the gate."""
        self.unscored: dict[Key, Task] = {}
        """Scoring that waits behind the gate for a worker that only scores."""
        self.unwanted: dict[Key, Task] = {}
        """Scoring behind the gate of exploration that is closed."""
        self.optimizer_worker = ""
        """Name of the worker that was given the latest update."""
        self.trained = -1
        """Last iteration whose training has ended."""
        self.stopping = False
        self.decided_s = 0.0
        self.outlasted = ""
        """Why the run must end: a task that must be done lost too many workers; else empty."""

    # Of requests

    def file(self, request: RequestState) -> None:
        """Keep a request where `Decisions.decide` looks for it."""
        self.index.file(request, over=self.is_over(request))

    def is_over(self, request: RequestState) -> bool:
        """Whether what is behind the gate has nothing to do any more: done, called off, or quarantined."""
        return request.is_done or request.quarantined or self.is_called_off(request)

    def is_called_off(self, request: RequestState) -> bool:
        if request.ahead:
            return request.iteration <= self.trained + 1
        return request.exploring and self.is_closed(request.iteration)

    def is_closed(self, iteration: int) -> bool:
        """Whether exploration for an iteration is closed."""
        return self.rules.close_with_training and self.trained >= 0 and iteration <= self.trained + 1

    def pools_of(self, request: RequestState, phase: PhaseDecision) -> tuple[Pool, ...]:
        """Pools for a request now: reserved workers leave rollouts after their window, and explore after training."""
        if request.windowed and "reserved" in request.pools and "reserved" not in phase.pools:
            return ("spot",)
        if request.exploring and request.iteration <= self.trained + 1 and self.rules.reserved_computes:
            return ("spot", "reserved")
        return request.pools

    def able(self, request: RequestState, at_s: float) -> int:
        """How many workers may run a request now, idle or not; those under notice do not."""
        pools = self.pools_of(request, self.phase(at_s))
        staying = (worker for worker in self.roster.by_name.values() if worker.name not in self.roster.leaving)
        return sum(worker.pool in pools for worker in staying)

    def beside_idle(self) -> Iterator[RequestState]:
        """Gangs that idle workers, for whom nobody waits, might make wider."""
        if not self.rules.widens or self.index.any_waits:
            return
        for node in dict.fromkeys(idle.node for idle in self.roster.idle.values()):
            for request in self.index.at_work.get(node, {}).values():
                if request.widths[-1] > request.width and not (request.breaking or request.planned):
                    yield request

    # Of phases

    def phase(self, at_s: float) -> PhaseDecision:
        """Who may roll out and who may train: everybody, where no rollout is left."""
        if not self.index.rollouts:
            return PhaseDecision(pools=self.window.pools, trainers=ANYONE)
        elapsed_s, window_s = at_s - self.window.began_s, self.window.window_s
        view = PhaseView(
            pools=self.window.pools,
            elapsed_s=elapsed_s,
            window_s=window_s,
            spot=self._spot_for_rollouts() if elapsed_s >= window_s else 0,  # of no interest while the window is open
            waiting=self.index.rollouts_waiting,
        )
        return decide_phase(view)

    def _spot_for_rollouts(self) -> int:
        """Spot workers that stay, on nodes where there are enough of them for a gang."""
        narrowest = self.requests[next(iter(self.index.rollouts))].widths[0]
        return self.roster.spot_on_nodes(of_at_least=narrowest)

    # Of training and workers

    def lose(self, task: Task) -> None:
        """Count a worker that was lost at a task of no request: it cannot be quarantined, so the run ends at last."""
        if task.is_lost:
            return
        task.is_lost = True
        task.losses += 1
        if task.losses >= ENOUGH_LOSSES * self.rules.quarantine_after:
            self.outlasted = (
                f"{task.label.phase} {task.label.iteration}: {task.losses} workers were lost at the task "
                f"{task.key}, so it is probably what ends them: see their memory, and what they logged; what was "
                "committed is kept"
            )

    def lose_engine(self, task: Task, reason: str) -> None:
        """Count an engine that was lost at a task of training; where no worker can do any better, the run ends."""
        self.lose(task)
        able = [worker for worker in self.roster.by_name.values() if worker.pool in self.training_pools(task)]
        lost = min((worker.engines_lost for worker in able), default=0)
        if lost >= max(ENGINES_MIN, self.rules.quarantine_after):
            self.outlasted = (
                f"{task.label.phase} {task.label.iteration}: each worker that may do it lost its engine process {lost} "
                f"times in a row, the last one so: {reason}; if memory is short, make train.micro_batch smaller, then "
                "`spotlight resume` the run"
            )

    def unbegun(self, tasks: Mapping[Key, Task]) -> list[Task]:
        """The tasks, of those that wait behind the gate, for which no worker was named just now."""
        return [task for task in tasks.values() if not self.roster.has(task.key, task.worker)]

    def training_pools(self, task: Task) -> tuple[Pool, ...]:
        """Pools that may do a training task; the reserved one alone, if that can, after too many losses."""
        is_rescued = self.rules.reserved_computes and task.losses >= self.rules.quarantine_after
        return ("reserved",) if is_rescued else TRAINING[task.label.pool]

    def assign(self, key: Key, address: str) -> None:
        """Reserve the worker for a task before it begins, so that it gets no other."""
        self.roster.assign(key, address)
        self.single(key).worker = address

    def single(self, key: Key) -> Task:
        """The task of a key, which stands for no other."""
        task = self.tasks[key]
        if task.alike:
            self.split(task, 1 if key == task.key else len(task.alike))
        return self.tasks[key]

    def split(self, task: Task, count: int) -> None:
        """Make each of the first ``count`` shards that a task stands for a task of its own."""
        if task.request:
            task.request.split(count)
        count = min(count, len(task.alike) - 1)  # then the last one stands alone
        at_work = self.roster.has(task.key, task.worker)
        started_s = self.roster.unassign(task.key, task.worker) if at_work else 0.0
        for keys in (*((key,) for key in task.alike[:count]), task.alike[count:]):
            alike = keys if len(keys) > 1 else ()
            part = Task(
                key=keys[0], label=task.label, request=task.request, state=task.state, worker=task.worker, alike=alike
            )
            self.tasks |= dict.fromkeys(keys, part)
            if at_work:
                self.roster.assign(part.key, task.worker, started_s)

    # What may be asked

    def widenable(self) -> list[str]:
        """Requests whose gangs might form anew, wider, with workers that are idle now: how far they are matters."""
        return [request.name for request in self.beside_idle()]

    def epoch(self, request: str) -> int:
        """How many gangs were formed for a request so far."""
        return self.requests[request].epoch if request in self.requests else 0

    def step(self, request: str) -> int:
        """Steps that a request's present gang has committed, as far as was reported."""
        return self.requests[request].step if request in self.requests else 0

    def idle_beside_waiting(self) -> Iterator[str]:
        """Requests and training that wait although idle workers could do them, as sentences; after a decision none are.

        Looked at are requests that a single worker may run, on pools where none waits that needs several: workers may
        be kept for that.
        """
        phase = self.phase(self.decided_s)
        waiting = [
            (request, self.pools_of(request, phase))
            for request in (self.requests.values() if self.roster.idle and not self.stopping else ())
            if request.behind and not request.members and request.parked and not self.is_over(request)
        ]
        kept = {pool for request, pools in waiting if request.widths[0] > 1 for pool in pools}
        for request, pools in waiting:
            if request.widths[0] == 1:
                free = set(pools) - kept
                if idle := sorted(worker.worker for worker in self.roster.idle.values() if worker.pool in free):
                    yield f"request {request.name} waits for a worker of {pools} and {', '.join(idle)} are idle"
        may = phase.trainers if self.ready and not self.stopping else ()
        for task in self.unbegun(self.ready):
            admitted = sorted(set(may).intersection(self.training_pools(task)))
            if idle := sorted(worker.worker for worker in self.roster.idle.values() if worker.pool in admitted):
                yield f"{task.key} waits for a worker of {admitted} and {', '.join(idle)} are idle"
        if self.roster.idle_scorers and not self.stopping:
            idle = sorted(worker.worker for worker in self.roster.idle_scorers.values())
            for task in self.unbegun(self.unscored):
                yield f"{task.key} waits for a worker that scores and {', '.join(idle)} are idle"

    def holders(self, sha256: str) -> list[str]:
        """Workers, one a node, whose nodes hold a file of weights; the latest to get it first: it serves fewest."""
        return self.roster.holders(sha256)

    def knows(self, key: object) -> bool:
        """Whether a task is one of ours."""
        return key in self.tasks

    def doing(self) -> list[WorkerActivity]:
        """What each worker is at now; for displays, which look often: it costs a microsecond a worker."""
        return [self._doing(worker) for worker in self.roster.by_name.values()]

    def _doing(self, worker: WorkerState) -> WorkerActivity:
        who: dict[str, Any] = {
            "worker": worker.name,
            "pool": worker.pool,
            "leaving": worker.name in self.roster.leaving,
        }
        at_work = [(key, since_s) for key, since_s in worker.tasks.items() if since_s and key in self.tasks]
        if not at_work:
            return WorkerActivity(**who)
        key, since_s = at_work[0]
        task = self.tasks[key]
        return WorkerActivity(
            **who,
            phase=task.label.phase,
            iteration=task.label.iteration,
            key=str(key),
            forming=task.request.forming if task.request else "",
            since_s=since_s,
        )

    def missing_pools(self) -> tuple[str, ...]:
        """Pools without a worker that something waits for: requests, training, or tasks for any engine."""
        alive = {worker.pool for worker in self.roster.by_name.values()}
        missing: set[str] = {SCORING} if self.unscored and SCORING not in alive else set()
        if not alive.issuperset(get_args(Pool)):
            waiting = (request for request in self.requests.values() if not request.members and request.parked)
            wanted = [
                *(request.pools for request in waiting),
                *(self.training_pools(task) for task in self.ready.values()),
            ]
            missing |= {pool for pools in wanted if alive.isdisjoint(pools) for pool in pools}
            if not self.rules.reserved_computes and "spot" not in alive and self._any_engine_wanted():
                missing.add("spot")
        return tuple(sorted(missing))

    def _any_engine_wanted(self) -> bool:
        """Whether a task that Dask itself gives to any engine has none: to encode prompts, decode, or score."""
        return any(task.state == "gated" and task.label.pool == "engine" for task in self.tasks.values())

    def _too_wide(self, waiting: Iterable[RequestState]) -> int:
        narrowest: dict[tuple[str, ...], int] = {}
        for request in waiting:
            narrowest[request.pools] = max(request.widths[0], narrowest.get(request.pools, 0))
        return max(
            (width for pools, width in narrowest.items() if width > self.roster.largest_node(pools) > 0), default=0
        )

    def snapshot(self) -> Snapshot:
        """The state now; plain values."""
        lives = self.journal.lives.values()
        waiting = [request for request in self.requests.values() if not request.members and request.parked]
        return Snapshot(
            workers={name: worker.address for name, worker in self.roster.by_name.items()},
            pools=dict(Counter(worker.pool for worker in self.roster.by_name.values())),
            running=dict(Counter(task.label.phase for task in self.tasks.values() if task.state == "processing")),
            waiting=len(waiting),
            waiting_for=self.missing_pools(),
            too_wide=self._too_wide(waiting),
            widths=dict(Counter(request.width for request in self.index.with_gang())),
            gangs={name: view_of(request) for name, request in self.requests.items()},
            leaving=frozenset(self.roster.leaving),
            preemptions=sum(life.was_taken and life.pool == "spot" for life in lives),
            stopping=self.stopping,
        )
