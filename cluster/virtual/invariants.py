"""What must always hold of a cluster and its dispatcher: checked at every instruction, and after every moment.

At an instruction:

- a gang is launched whole, on workers of one node that are there, stay, and have nothing else to do, and of a pool of
  its request, or reserved ones that help with exploration;
- no worker still has a shard of an earlier epoch of the gang, and the epoch has a new number;
- a gradient, a sum of some, or an update begins on a free worker of a pool that trains, or on a reserved one after it
  outlasted many, and scoring on one that only scores.

After a moment:

- a worker has at most one task from behind the gate, and runs no more tasks than it has threads;
- a gang spans one node, and takes steps only with all its members;
- the dispatcher knows of no step that the present epoch of a gang did not take;
- no request waits beside an idle worker that could run it, and no gradient, update or scoring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import Instruction, Key, Launch, Score, Train
from cluster.dispatch.request_state import GATED, SCORING, TRAINING
from cluster.dispatch.rules import Rules
from cluster.virtual.cluster import VirtualCluster
from cluster.virtual.gang_epochs import GangEpoch
from cluster.virtual.workers import VirtualWorker


class Invariants:
    """Watches one dispatcher and its cluster.

    Args:
        found: gets a sentence for whatever does not hold.
        rules: a part that was given to ``quarantine_after`` workers may be computed on reserved ones, whatever its
            pools, if those compute.
    """

    def __init__(self, found: list[str], rules: Rules) -> None:
        self._found = found
        self._rules = rules
        self._begun: Counter[Key] = Counter()
        self.noticed: set[str] = set()
        """Addresses of workers whose notice the dispatcher knows of."""
        self._epochs: dict[str, int] = {}

    def check_instructions(self, cluster: VirtualCluster, instructions: list[Instruction]) -> None:
        """Check instructions before they are carried out."""
        for instruction in instructions:
            if isinstance(instruction, Launch):
                self._report(cluster, self._wrong_launch(cluster, instruction))
            elif isinstance(instruction, Train | Score):
                self._report(cluster, self._wrong_alone(cluster, instruction))

    def _wrong_launch(self, cluster: VirtualCluster, launch: Launch) -> Iterator[str]:
        epoch = launch.members[0].place.epoch
        if epoch <= self._epochs.get(launch.gang, 0):
            yield f"{launch.gang} is formed again as forming {epoch}"
        self._epochs[launch.gang] = epoch
        places = [(member.place.rank, member.place.width, member.place.epoch) for member in launch.members]
        if places != [(rank, len(places), epoch) for rank in range(len(places))]:
            yield f"{launch.gang} is launched with (rank, width, forming) of {places}"
        if launch.members[0].shard:
            yield f"{launch.gang} begins without its first shard"
        if len({member.address for member in launch.members}) < len(places):
            yield f"{launch.gang} has two shards on one worker"
        for member in launch.members:
            yield from (f"{launch.gang}: {why}" for why in self._unfit(cluster, member.address))
            worker, task = cluster.workers.get(member.address), cluster.tasks.all[member.key]
            helps = task.phase.startswith("explore") and self._rules.reserved_computes
            if worker and worker.pool not in (*GATED[task.pool], *(("reserved",) if helps else ())):
                yield f"{launch.gang}, of the pool {task.pool}, is to run on {worker.name}, of the pool {worker.pool}"
        for worker in cluster.workers.values():
            has = (cluster.tasks.all[key].shard[0] for key in (*worker.queue, *worker.running))
            if worker.pool != "head" and launch.gang in has:  # which ends those that have nothing to do
                yield f"{launch.gang} is launched, and {worker.name} still has a shard of an earlier forming"

    def _wrong_alone(self, cluster: VirtualCluster, begin: Train | Score) -> Iterator[str]:
        yield from (f"{begin.key}: {why}" for why in self._unfit(cluster, begin.address))
        worker, pool = cluster.workers.get(begin.address), cluster.tasks.all[begin.key].pool
        pools: set[str] = {*TRAINING[pool]} if isinstance(begin, Train) else {SCORING}
        was_lost = self._begun[begin.key] >= self._rules.quarantine_after
        if isinstance(begin, Train) and was_lost and self._rules.reserved_computes:
            pools.add("reserved")
        self._begun[begin.key] += 1
        if worker and worker.pool not in pools:
            yield f"{begin.key} is to run on {worker.name}, of the pool {worker.pool}"

    def _unfit(self, cluster: VirtualCluster, address: str) -> Iterator[str]:
        worker = cluster.workers.get(address)
        if worker is None:
            yield f"{address} is gone"
        elif address in self.noticed:
            yield f"{address} is under notice"
        elif worker.paused:
            yield f"{address} is paused"
        elif gated := _gated(cluster, worker):
            yield f"{address} has {gated}"

    def check_moment(self, cluster: VirtualCluster, dispatch: Dispatcher) -> None:
        for worker in cluster.workers.values():
            if worker.load > 1 and worker.pool != "head":
                self._report(cluster, _overloaded(cluster, worker))
        for forming in cluster.gang_epochs.values():
            if forming.width > 1:
                self._report(cluster, _torn(forming))
            known, taken = dispatch.state.step(forming.name), forming.steps_by(cluster.now_s)
            if known > taken and dispatch.state.epoch(forming.name) == forming.epoch:
                self._report(cluster, [f"{forming.name}: step {known} is known, forming {forming.epoch} is at {taken}"])
        self._report(cluster, dispatch.state.idle_beside_waiting())

    def _report(self, cluster: VirtualCluster, wrong: Iterator[str] | list[str]) -> None:
        for sentence in wrong:
            self._found.append(f"at {cluster.now_s:.3f} s {sentence}")


def _gated(cluster: VirtualCluster, worker: VirtualWorker) -> list[str]:
    return [str(key) for key in (*worker.queue, *worker.running) if cluster.tasks.all[key].gated]


def _overloaded(cluster: VirtualCluster, worker: VirtualWorker) -> Iterator[str]:
    if len(worker.running) > worker.threads:
        yield f"worker {worker.name} runs {len(worker.running)} tasks on {worker.threads} threads"
    if len(gated := _gated(cluster, worker)) > 1:
        yield f"worker {worker.name} has {len(gated)} tasks from behind the gate: {gated}"


def _torn(forming: GangEpoch) -> Iterator[str]:
    if len({worker.node for worker in forming.members.values()}) > 1:
        yield f"gang {forming.name} spans nodes"
    if forming.broken_s is None and len(forming.members) != forming.width:
        yield f"gang {forming.name} takes steps with {len(forming.members)} of {forming.width} members"
