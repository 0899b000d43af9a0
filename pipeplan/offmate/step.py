"""One step of training: a plan's program on real tensors, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pipeplan.device_program import InstructionKind
from pipeplan.host_copy import flat
from pipeplan.offmate.block import LayerBlock
from pipeplan.offmate.host_room import HostRoom
from pipeplan.offmate.moving import Moving
from pipeplan.offmate.tensors import TrainedTensor
from pipeplan.offmate.trial import RECOMPUTE
from pipeplan.remat.states import StatePlan
from pipeplan.rematerialized.states import ForwardStates
from pipeplan.runtime.stages.saved_tensors import FreedStorage, SavedStorage


@dataclass
class HostCount:
    """Bytes of the host's buffers that are in use."""

    now: int
    peak: int = field(init=False)

    def __post_init__(self) -> None:
        """It is the most so far."""
        self.peak = self.now

    def change(self, size: int) -> None:
        """That many more."""
        self.now += size
        self.peak = max(self.peak, self.now)


class Roles:
    """What the indices of a plan's graph are."""

    def __init__(self, plan: StatePlan, tensors: Iterable[TrainedTensor]) -> None:
        step = plan.step
        self.outputs = _numbered(step.outputs)
        self.kept = _numbered(step.kept)
        self.offloaded = _numbered(step.offloaded)
        self.gradients = _numbered(step.gradients)
        self.partial = {each for partial in step.partial.values() for each in partial}
        self.tensors: dict[int, TrainedTensor] = {}
        self.updates: dict[int, TrainedTensor] = {}
        for each in tensors:
            own = each.storages
            self.tensors |= dict.fromkeys({own.value, own.gradient, own.states} - {-1}, each)
            self.updates |= dict.fromkeys({own.on_device, own.on_host} - {-1}, each)


def _numbered(storages: Sequence[int]) -> dict[int, int]:
    return {storage: block for block, storage in enumerate(storages) if storage >= 0}


class StepRun:
    """One step; use once."""

    def __init__(
        self,
        plan: StatePlan,
        roles: Roles,
        blocks: Sequence[LayerBlock],
        inputs: Sequence[Tensor],
        room: HostRoom,
        moving: Moving,
        host: HostCount,
    ) -> None:
        """Nothing runs yet.

        Args:
            plan: whose program runs.
            roles: of its graph.
            blocks: of the model, which keep nothing.
            inputs: of the first block.
            room: the host's buffers.
            moving: the lanes beside the device.
            host: counts buffers of activations that are taken.
        """
        self.loss = float("nan")
        self._plan, self._roles, self._blocks = plan, roles, blocks
        self._room, self._moving, self._host = room, moving, host
        self._values: dict[int, list[Tensor]] = {-1: list(inputs)}
        self._gradients: dict[int, list[Tensor]] = {len(blocks) - 1: []}
        self._away: dict[int, list[FreedStorage]] = {}
        self._sizes = [each.bytes for each in plan.step.graph.storages]
        names = plan.option_names
        self._again = [name == RECOMPUTE for name in names]
        twice = {b: () for b, again in enumerate(self._again) if again}
        self._states = ForwardStates(torch.device("cpu"), twice)

    def run(self) -> None:
        """Executes the program."""
        calls: dict[InstructionKind, Callable[[int], None]] = {
            InstructionKind.RUN: self._run,
            InstructionKind.FREE: self._free,
            InstructionKind.OFFLOAD: self._offload,
            InstructionKind.COPY: self._copy,
            InstructionKind.PREFETCH: self._prefetch,
            InstructionKind.WAIT: self._moving.wait,
            InstructionKind.HOST: self._update_on_host,
            InstructionKind.END_F: self._end_of_forward,
            InstructionKind.END_I: _pass,
        }
        for each in self._plan.program.instructions:
            calls[each.kind](each.index)

    def _run(self, operation: int) -> None:
        last = len(self._blocks) - 1
        if operation <= last:
            self._forward(operation)
        elif operation <= 2 * last + 1:
            self._backward(2 * last + 1 - operation)
        else:
            self._roles.updates[operation].step_on_device()

    def _forward(self, b: int) -> None:
        inputs = self._values[b - 1]
        self._values[b] = self._blocks[b].forward(inputs, self._states, keep=not self._again[b])

    def _backward(self, b: int) -> None:
        block, inputs = self._blocks[b], self._values[b - 1]
        found = block.backward(inputs, self._gradients[b], self._states, again=self._again[b])
        if b:
            self._gradients[b - 1] = found
        for each in self._roles.tensors.values():
            # The last block in a step that makes a gradient is the first that reads the value.
            each.waits = each.waits or (each.parameter.grad is not None and b == each.first_block)

    def _free(self, storage: int) -> None:
        roles = self._roles
        if storage in roles.outputs:
            del self._values[roles.outputs[storage]]
        elif storage in roles.gradients:
            del self._gradients[roles.gradients[storage]]
        elif storage in roles.kept or storage in roles.offloaded:
            block = roles.kept[storage] if storage in roles.kept else roles.offloaded[storage]
            self._blocks[block].kept.clear()
        elif storage in roles.tensors:
            self._free_state(roles.tensors[storage], storage)

    def _free_state(self, each: TrainedTensor, storage: int) -> None:
        if storage == each.storages.gradient:
            # Where the device has none, it is the host's buffer, which stays.
            each.parameter.grad = None
        else:
            each.empty(storage)

    def _offload(self, storage: int) -> None:
        self._host.change(self._sizes[storage])
        kept = self._blocks[self._roles.offloaded[storage]].kept

        def leave() -> None:
            self._away[storage] = [FreedStorage.of(each) for each in kept]
            kept.clear()

        self._moving.out(storage, [flat(each.storage) for each in kept], leave)

    def _copy(self, storage: int) -> None:
        each = self._roles.tensors[storage]
        if storage != each.storages.gradient or each.waits:
            self._moving.out(storage, each.parts(storage))
        else:
            self._moving.out(storage, [])

    def _prefetch(self, storage: int) -> None:
        if storage in self._roles.tensors:
            each = self._roles.tensors[storage]
            self._moving.back(storage, each.fill(storage), partial(each.away.discard, storage))
            return
        kept = self._blocks[self._roles.offloaded[storage]].kept
        for gone in self._away.pop(storage):
            gone.come_back()
            kept.append(SavedStorage(gone.saved[0].tensor().untyped_storage(), gone.saved))
        given = partial(self._host.change, -self._sizes[storage])
        self._moving.back(storage, [flat(each.storage) for each in kept], given)

    def _update_on_host(self, operation: int) -> None:
        each = self._roles.updates.get(operation)
        if each is None or not each.waits:
            return  # the host's own time, or a gradient of a step before the first one
        each.waits = False
        done = self._plan.step.graph.operations[operation]
        step = partial(each.step_on_host, self._room)
        self._moving.update({*done.reads, *done.writes}, step)

    def _end_of_forward(self, _: int) -> None:
        (loss,) = self._values[len(self._blocks) - 1]
        self.loss = float(loss)


def _pass(_: int) -> None:
    """A mark that asks for nothing."""
