"""What the dispatcher knows of a cluster, and what may be asked of that; it decides and sends nothing.

Knows no Dask and no clock. Questions that look often cost little: see `doing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, get_args

from cluster.dispatch.events import Key, TaskState
from cluster.dispatch.journal import Journal, Label
from cluster.dispatch.request_index import Requests
from cluster.dispatch.request_state import SCORING, TRAINING, RequestState
from cluster.dispatch.roster import Roster, WorkerState
from cluster.dispatch.rules import Rules
from cluster.dispatch.snapshot import Snapshot, WorkerActivity, view_of
from spotlight.plan.offload import ANYONE, PhaseDecision, PhaseView, decide_phase
from spotlight.records import Pool, record

ENOUGH_LOSSES = 10
"""Times ``Rules.quarantine_after``, after which a task is given up and the run with it: each loss may have been a
preemption, but a task that is done every second time is lost 50 times in a row once in 10**15."""


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
    gang: RequestState | None
    state: TaskState = "released"
    worker: str = ""
    losses: int = 0
    """How many workers left before it was done; of a task that is no request's."""
    alike: tuple[Key, ...] = ()
    """Of a `Task` that stands for the last shards of a request, all of these: what has happened to one of them so far
    has happened to all. Its key is the first of them."""
    keys: tuple[Key, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.alike or (self.key,)

    @property
    def explores(self) -> bool:
        return self.label.phase.startswith("explore")


class State:
    """What is known of workers, tasks and requests.

    Args:
        rules: what the settings say.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.journal = Journal()
        self._roster = Roster()
        self._requests = Requests()
        self._tasks: dict[Key, Task] = {}
        self._gangs: dict[str, RequestState] = {}
        self._ahead: dict[str, RequestState] = {}
        """Those of the next iteration's rollouts."""
        self._order = 0
        self._window = RolloutWindow()
        self._training: dict[Key, Task] = {}
        """Gradients of parts, their sums, and updates."""
        self._ready: dict[Key, Task] = {}
        """Those that wait behind the gate."""
        self._unscored: dict[Key, Task] = {}
        """Scoring that waits behind the gate for a worker that only scores."""
        self._unwanted: dict[Key, Task] = {}
        """The same of exploration that is closed."""
        self._trainer = ""
        self._trained = -1
        self._stopping = False
        self._decided_s = 0.0
        self.outlasted = ""
        """Why no worker will ever do a task that must be done; empty while that is not so."""

    # Of requests

    def _file(self, gang: RequestState) -> None:
        """Keep a request where `_decide` looks for it."""
        self._requests.file(gang, over=self._is_over(gang))

    def _is_over(self, gang: RequestState) -> bool:
        """Whether what is behind the gate has nothing to do any more: done, called off, or quarantined."""
        return gang.is_done or gang.quarantined or self._called_off(gang)

    def _called_off(self, gang: RequestState) -> bool:
        if gang.ahead:
            return gang.iteration <= self._trained + 1
        return gang.exploring and self._is_closed(gang.iteration)

    def _is_closed(self, iteration: int) -> bool:
        """Whether exploration for an iteration is closed."""
        return self.rules.close_with_training and self._trained >= 0 and iteration <= self._trained + 1

    def _pools_of(self, gang: RequestState, phase: PhaseDecision) -> tuple[Pool, ...]:
        """Rollouts run where it is their turn; once training has ended, reserved workers that can help to explore."""
        if gang.windowed and "reserved" in gang.pools and "reserved" not in phase.pools:
            return ("spot",)
        if gang.exploring and gang.iteration <= self._trained + 1 and self.rules.reserved_computes:
            return ("spot", "reserved")
        return gang.pools

    def _beside_idle(self) -> Iterator[RequestState]:
        """Gangs that idle workers, for whom nobody waits, might make wider."""
        if not self.rules.widens or self._requests.any_waits:
            return
        for node in dict.fromkeys(idle.node for idle in self._roster.idle.values()):
            for gang in self._requests.at_work.get(node, {}).values():
                if gang.widths[-1] > gang.width and not (gang.breaking or gang.planned):
                    yield gang

    # Of phases

    def _phase(self, at_s: float) -> PhaseDecision:
        """Who may roll out and who may train: everybody, where no rollout is left."""
        if not self._requests.rollouts:
            return PhaseDecision(pools=self._window.pools, trainers=ANYONE)
        elapsed_s, window_s = at_s - self._window.began_s, self._window.window_s
        view = PhaseView(
            pools=self._window.pools,
            elapsed_s=elapsed_s,
            window_s=window_s,
            spot=self._spot_for_rollouts() if elapsed_s >= window_s else 0,  # of no interest while the window is open
            waiting=self._requests.rollouts_waiting,
        )
        return decide_phase(view)

    def _spot_for_rollouts(self) -> int:
        """Spot workers that stay, on nodes where there are enough of them for a gang."""
        narrowest = self._gangs[next(iter(self._requests.rollouts))].widths[0]
        return self._roster.spot_on_nodes(of_at_least=narrowest)

    # Of training and workers

    def _lose(self, task: Task) -> None:
        """Its worker is gone, and it has to be done again: a request is set aside then, but the rest is needed."""
        task.losses += 1
        if task.losses >= ENOUGH_LOSSES * self.rules.quarantine_after:
            self.outlasted = (
                f"{task.label.phase} {task.label.iteration}: {task.losses} workers were lost at the task "
                f"{task.key}, so it is probably what ends them: see their memory, and what they logged; what was "
                "committed is kept"
            )

    def _unbegun(self, tasks: Mapping[Key, Task]) -> list[Task]:
        """Of what waits behind the gate, that for which no worker was named just now."""
        return [task for task in tasks.values() if not self._roster.has(task.key, task.worker)]

    def _trainers(self, task: Task) -> tuple[Pool, ...]:
        """Pools that may do a task of training: once it outlasted so many that left, the reserved one, if that can."""
        is_rescued = self.rules.reserved_computes and task.losses >= self.rules.quarantine_after
        return ("reserved",) if is_rescued else TRAINING[task.label.pool]

    def _burden(self, key: Key, address: str) -> None:
        """Count on the worker for a task before it begins, so that it gets no other."""
        self._roster.assign(key, address)
        self._alone(key).worker = address

    def _alone(self, key: Key) -> Task:
        """The task of a key, which stands for no other."""
        task = self._tasks[key]
        if task.alike:
            self._split(task, 1 if key == task.key else len(task.alike))
        return self._tasks[key]

    def _split(self, task: Task, count: int) -> None:
        """Something happens to the first so many that it stands for: each of them is a task of its own from now on."""
        if task.gang:
            task.gang.split(count)
        count = min(count, len(task.alike) - 1)  # then the last one stands alone
        at_work = self._roster.has(task.key, task.worker)
        started_s = self._roster.unassign(task.key, task.worker) if at_work else 0.0
        for keys in (*((key,) for key in task.alike[:count]), task.alike[count:]):
            alike = keys if len(keys) > 1 else ()
            part = Task(
                key=keys[0], label=task.label, gang=task.gang, state=task.state, worker=task.worker, alike=alike
            )
            self._tasks |= dict.fromkeys(keys, part)
            if at_work:
                self._roster.assign(part.key, task.worker, started_s)

    # What may be asked

    def widenable(self) -> list[str]:
        """Requests whose gangs might form anew, wider, with workers that are idle now: how far they are matters."""
        return [gang.name for gang in self._beside_idle()]

    def epoch(self, gang: str) -> int:
        """GangEpochs of a gang so far."""
        return self._gangs[gang].epoch if gang in self._gangs else 0

    def step(self, gang: str) -> int:
        """Of a gang's present forming, as far as was reported."""
        return self._gangs[gang].step if gang in self._gangs else 0

    def idle_beside_waiting(self) -> Iterator[str]:
        """Requests and training that wait although idle workers could do them, as sentences; after a decision none are.

        Looked at are requests that a single worker may run, on pools where none waits that needs several: workers may
        be kept for that.
        """
        phase = self._phase(self._decided_s)
        waiting = [
            (gang, self._pools_of(gang, phase))
            for gang in (self._gangs.values() if self._roster.idle and not self._stopping else ())
            if gang.behind and not gang.members and gang.parked and not self._is_over(gang)
        ]
        kept = {pool for gang, pools in waiting if gang.widths[0] > 1 for pool in pools}
        for gang, pools in waiting:
            if gang.widths[0] == 1:
                free = set(pools) - kept
                if idle := sorted(worker.worker for worker in self._roster.idle.values() if worker.pool in free):
                    yield f"request {gang.name} waits for a worker of {pools} and {', '.join(idle)} are idle"
        may = phase.trainers if self._ready and not self._stopping else ()
        for task in self._unbegun(self._ready):
            admitted = sorted(set(may).intersection(self._trainers(task)))
            if idle := sorted(worker.worker for worker in self._roster.idle.values() if worker.pool in admitted):
                yield f"{task.key} waits for a worker of {admitted} and {', '.join(idle)} are idle"
        if self._roster.idle_scorers and not self._stopping:
            idle = sorted(worker.worker for worker in self._roster.idle_scorers.values())
            for task in self._unbegun(self._unscored):
                yield f"{task.key} waits for a worker that scores and {', '.join(idle)} are idle"

    def holders(self, sha256: str) -> list[str]:
        """Workers, one a node, whose nodes hold a file of weights; the latest to get it first: it serves fewest."""
        return self._roster.holders(sha256)

    def knows(self, key: object) -> bool:
        """Whether a task is one of ours."""
        return key in self._tasks

    def doing(self) -> list[WorkerActivity]:
        """What each worker is at now; for displays, which look often: it costs a microsecond a worker."""
        return [self._doing(worker) for worker in self._roster.by_name.values()]

    def _doing(self, worker: WorkerState) -> WorkerActivity:
        who: dict[str, Any] = {
            "worker": worker.name,
            "pool": worker.pool,
            "leaving": worker.name in self._roster.leaving,
        }
        at_work = [(key, since_s) for key, since_s in worker.tasks.items() if since_s and key in self._tasks]
        if not at_work:
            return WorkerActivity(**who)
        key, since_s = at_work[0]
        task = self._tasks[key]
        return WorkerActivity(
            **who,
            phase=task.label.phase,
            iteration=task.label.iteration,
            key=str(key),
            forming=task.gang.forming if task.gang else "",
            since_s=since_s,
        )

    def missing_pools(self) -> tuple[str, ...]:
        """Pools without a worker that something waits for: requests, training, or tasks for any engine."""
        alive = {worker.pool for worker in self._roster.by_name.values()}
        missing: set[str] = {SCORING} if self._unscored and SCORING not in alive else set()
        if not alive.issuperset(get_args(Pool)):
            waiting = (gang for gang in self._gangs.values() if not gang.members and gang.parked)
            wanted = [*(gang.pools for gang in waiting), *(self._trainers(task) for task in self._ready.values())]
            missing |= {pool for pools in wanted if alive.isdisjoint(pools) for pool in pools}
            if not self.rules.reserved_computes and "spot" not in alive and self._any_engine_wanted():
                missing.add("spot")
        return tuple(sorted(missing))

    def _any_engine_wanted(self) -> bool:
        """Whether a task that Dask itself gives to any engine has none: to encode prompts, decode, or score."""
        return any(task.state == "gated" and task.label.pool == "engine" for task in self._tasks.values())

    def snapshot(self) -> Snapshot:
        """The state now; plain values."""
        lives = self.journal.lives.values()
        waiting = [gang for gang in self._gangs.values() if not gang.members and gang.parked]
        return Snapshot(
            workers={name: worker.address for name, worker in self._roster.by_name.items()},
            pools=dict(Counter(worker.pool for worker in self._roster.by_name.values())),
            running=dict(Counter(task.label.phase for task in self._tasks.values() if task.state == "processing")),
            waiting=len(waiting),
            waiting_for=self.missing_pools(),
            narrowest=max((gang.widths[0] for gang in waiting), default=0),
            widths=dict(Counter(gang.width for gang in self._requests.with_gang())),
            gangs={name: view_of(gang) for name, gang in self._gangs.items()},
            leaving=frozenset(self._roster.leaving),
            trained=self._trained,
            trainer=self._trainer,
            preemptions=sum(life.was_taken and life.pool == "spot" for life in lives),
            stopping=self._stopping,
        )
