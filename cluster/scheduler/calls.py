"""The dispatcher's instructions as calls of Dask's scheduler, and as messages to its workers; it decides nothing.

Invariants: the shards of a gang are launched in one transition; a launch and what it says to a shard travel in the same
ordered stream, so a task finds its placement on the worker when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distributed import Scheduler

from cluster.dispatch.events import (
    CallOff,
    CloseExploration,
    CloseGate,
    Dismiss,
    Evict,
    Instruction,
    Key,
    Launch,
    Regroup,
    Score,
    StopWork,
    Train,
    Wake,
    one_by_one,
)
from cluster.messages import ORDER, PLACE
from spotlight.clock import Clock
from spotlight.device import signals as orders
from spotlight.device.signals import Order, PlaceShard, order_to_message, shard_to_message
from spotlight.records import Placement, Surplus

GATE = {"gate": 1}


class SchedulerCalls:
    """Does what the dispatcher says.

    Args:
        run: name of the run, and `session`, which start of it: orders carry both.
        members: addresses of the workers that take part. An order would end any other worker, which does not know it.
        evict: is called for each worker that is to be ended.
        wake_at: is called with the moment of the next `TimePassed`, at the latest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        *,
        run: str,
        session: str,
        members: Callable[[], Iterable[str]],
        evict: Callable[[Evict], None],
        wake_at: Callable[[float], None],
    ) -> None:
        self._scheduler, self._clock, self._run, self._session = scheduler, clock, run, session
        self._members, self._evict, self._wake_at = members, evict, wake_at

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions, in their order."""
        for instruction in one_by_one(instructions):
            match instruction:
                case Launch():
                    self._launch(instruction)
                case Dismiss():
                    if instruction.tell is not None:
                        self._place(instruction.address, instruction.gang, instruction.shard, instruction.tell)
                    self._open_gate(instruction.key, instruction.address, "head")
                case Train():
                    self._open_gate(instruction.key, instruction.address, "engine")
                case Score():
                    self._open_gate(instruction.key, instruction.address, "reward")
                case CallOff():
                    order = orders.CallOff(gang=instruction.gang, epoch=instruction.epoch)
                    self._order(instruction.address, order)
                case Regroup():
                    self._order(instruction.address, orders.Regroup(gang=instruction.gang, epoch=instruction.epoch))
                case CloseExploration():
                    self._order_all(orders.CloseExploration(run=self._run, iteration=instruction.iteration))
                case StopWork():
                    self._order_all(orders.Stop(run=self._run))
                case CloseGate():
                    self._close_gate(instruction.key)
                case Evict():
                    self._evict(instruction)
                case Wake():
                    self._wake_at(instruction.at_s)

    def _launch(self, launch: Launch) -> None:
        """Admit a whole gang, in one transition."""
        for member in launch.members:
            self._place(member.address, launch.gang, member.shard, member.place)
            self._restrict(member.key, member.address, "engine")
        keys = [member.key for member in launch.members]
        self._scheduler.transitions(dict.fromkeys(keys, "processing"), stimulus_id=f"spotlight-{launch.gang}")

    def _open_gate(self, key: Key, address: str, resource: str) -> None:
        self._restrict(key, address, resource)
        self._scheduler.transitions({key: "processing"}, stimulus_id=f"spotlight-open-{self._clock()}")

    def _restrict(self, key: Key, address: str, resource: str) -> None:
        self._scheduler.tasks[key].resource_restrictions = {resource: 1}
        self._scheduler.set_restrictions({key: {address}})

    def _close_gate(self, key: Key) -> None:
        task = self._scheduler.tasks.get(key)
        if task is not None:
            task.resource_restrictions, task.worker_restrictions = dict(GATE), None

    def _order_all(self, order: Order) -> None:
        for address in self._members():
            self._order(address, order)

    def _order(self, address: str, order: Order) -> None:
        self._send(address, {"op": ORDER, "session": self._session, **order_to_message(order)})

    def _place(self, address: str, gang: str, shard: int, placement: Placement | Surplus | int) -> None:
        command = PlaceShard(gang=gang, shard=shard, placement=placement)
        self._send(address, {"op": PLACE, **shard_to_message(command)})

    def _send(self, address: str, message: dict[str, Any]) -> None:
        if address in self._scheduler.workers:
            self._scheduler.send_all({}, {address: [message]})
