"""Parameters, gradients and optimizer states by storage of the plan's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeplan.host_copy import flat
from pipeplan.offmate.host_room import HostRoom
from pipeplan.offmate.moving import resize
from pipeplan.offmate.optimizer import TensorOptimizer
from pipeplan.offmate.parameters import Parameters
from pipeplan.remat.programs import Placement
from pipeplan.remat.states import StatePlan
from pipeplan.remat.states.step_graph import TensorStorages
from pipeplan.task import Task


@dataclass
class TrainedTensor:
    """One parameter on device and host.

    Attributes:
        name: in the user's model.
        storages: of the plan's graph.
        parameter: the user's own.
        optimizer: what updates it; None where it is frozen.
        on_host: the copy that the host updates; None where the device does.
        first_block: the block that reads the value first, whose backward ends the gradient.
        waits: whether a gradient has no update yet.
        away: storages whose bytes only the host has, or that are on their way back.
    """

    name: str
    storages: TensorStorages
    parameter: nn.Parameter
    first_block: int
    optimizer: TensorOptimizer | None = None
    on_host: nn.Parameter | None = None
    waits: bool = False
    away: set[int] = field(default_factory=set)

    def parts(self, storage: int) -> list[Tensor]:
        """The flat tensors on the device that a storage of the graph is."""
        if storage == self.storages.value:
            return [flat(self.parameter.untyped_storage())]
        if storage == self.storages.gradient:
            assert self.parameter.grad is not None
            return [flat(self.parameter.grad.untyped_storage())]
        assert self.optimizer is not None
        return [flat(each.untyped_storage()) for each in self.optimizer.states]

    def begin(self, placement: Placement) -> None:
        """The device gives up what it does not have as the plan's step begins, and gradients."""
        self.parameter.grad = None
        states = self.storages.states if self.on_host is None else -1
        for storage in {self.storages.value, states} - {-1} - placement.device:
            self.empty(storage)

    def empty(self, storage: int) -> None:
        """The device gives a value or states up."""
        self.away.add(storage)
        for part in self.parts(storage):
            resize(part, 0)

    def fill(self, storage: int) -> list[Tensor]:
        """The device takes their bytes again, into which they are copied next."""
        for part in self.parts(storage):
            resize(part, self.parameter.nbytes)
        return self.parts(storage)

    def step_on_device(self) -> None:
        """Updates the parameter; its gradient stays until it is given up."""
        assert self.optimizer is not None
        if self.waits:
            self.optimizer.step()
        self.waits = False

    def step_on_host(self, room: HostRoom) -> None:
        """Updates the host's copy by the gradient there."""
        assert self.optimizer is not None
        assert self.on_host is not None
        self.on_host.grad = room.shown(self.storages.gradient, self.on_host)
        self.optimizer.step()

    def come_back(self, room: HostRoom) -> None:
        """The device has value and states again."""
        for storage in tuple(self.away):
            room.give(storage, self.fill(storage))
            self.away.discard(storage)

    def end_update(self, room: HostRoom) -> None:
        """Ends an update of the host that waits; the device has the new value."""
        storages = self.storages
        if self.on_host is not None and self.waits:
            if self.parameter.grad is not None:
                room.take(storages.gradient, self.parts(storages.gradient))
            self.step_on_host(room)
            room.give(storages.value, self.parts(storages.value))
        self.parameter.grad, self.waits = None, False


def trained_tensors(
    task: Task, found: Parameters, names: Sequence[str], plan: StatePlan, room: HostRoom
) -> Iterator[TrainedTensor]:
    """All parameters, on the device; the host has its copies.

    Args:
        task: has the optimizer.
        found: of its model.
        names: `state_names`.
        plan: how they train.
        room: of the host.
    """
    for group, own in zip(plan.problem.groups, plan.step.tensors, strict=True):
        for tensor, storages in zip(group.tensors, own, strict=True):
            each = TrainedTensor(
                tensor.name, storages, found.by_name[tensor.name], group.blocks[0]
            )
            if storages.value in plan.placement.host:
                room.take(storages.value, each.parts(storages.value))
            if tensor.trained:
                _give_optimizer(each, task, names, room, on_host=bool(group.on_host))
            if each.on_host is None and storages.states in plan.placement.host:
                room.take(storages.states, each.parts(storages.states))
            yield each


def _give_optimizer(
    each: TrainedTensor, task: Task, names: Sequence[str], room: HostRoom, *, on_host: bool
) -> None:
    like, states = each.parameter.detach(), each.storages.states
    if not on_host:
        each.optimizer = TensorOptimizer(task.optimizer, each.parameter, names)
        return
    each.on_host = nn.Parameter(room.shown(each.storages.value, like))
    vars(each.on_host).update(vars(each.parameter))
    places = [room.shown(states, like, at) for at in range(len(names))]
    each.optimizer = TensorOptimizer(task.optimizer, each.parameter, names, each.on_host, places)
