"""One step of training as an operator graph: blocks under their options, updates of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat.states.problem import ParameterGroup, StateBlockOption, StateProblem
from pipeplan.units import ceil_div


@dataclass
class TensorStorages:
    """Indices of one trained or frozen tensor's storages and updates; -1: there is none.

    Attributes:
        value: the parameter.
        gradient: its gradient, whole.
        states: its optimizer states.
        on_device: the operation that updates it on the device.
        on_host: the one that updates it on the host.
    """

    value: int
    gradient: int = -1
    states: int = -1
    on_device: int = -1
    on_host: int = -1


@dataclass
class StepGraph:
    """A graph and what its indices mean.

    Attributes:
        outputs: of each block: its output.
        kept: of each block: internal activations that stay on the device; -1: none.
        offloaded: of each block: those that wait on the host; -1: none.
        gradients: of each block: the gradient of its output.
        tensors: of each group, of each tensor.
        partial: of each group: gradients of single uses, by step.
        management: the host's own work in a step.
        graph: for the judge of device programs.
    """

    outputs: list[int]
    kept: list[int]
    offloaded: list[int]
    gradients: list[int]
    tensors: list[list[TensorStorages]]
    partial: dict[int, list[int]]
    management: int = -1
    graph: OperatorGraph = field(init=False)

    def internal(self, block: int) -> list[int]:
        """What a block keeps inside, on the device or on the host."""
        return [each for each in (self.kept[block], self.offloaded[block]) if each >= 0]


def step_graph(problem: StateProblem, options: Sequence[int]) -> StepGraph:
    """The graph of a step in which block b runs by option `options[b]`."""
    return _Builder(problem, options).build()


@dataclass
class _Builder:
    problem: StateProblem
    options: Sequence[int]
    storages: list[Storage] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def build(self) -> StepGraph:
        """All storages but partial gradients, then all operations."""
        blocks = self.problem.blocks
        begin = self._storage("input", self.problem.input_bytes, StorageKind.INPUT)
        activation = StorageKind.ACTIVATION
        made = [self._storage(f"{b.name} output", b.output_bytes, activation) for b in blocks]
        chosen = [block.options[o] for block, o in zip(blocks, self.options, strict=True)]
        named = [(b.name, option) for b, option in zip(blocks, chosen, strict=True)]
        found = StepGraph(
            outputs=made,
            kept=[self._some(f"{name} kept", each.kept_bytes) for name, each in named],
            offloaded=[self._some(f"{n} offloaded", each.offloaded_bytes) for n, each in named],
            gradients=self._gradients(),
            tensors=[self._tensors(group) for group in self.problem.groups],
            partial={},
        )
        inputs = [begin, *made]
        for b, option in enumerate(chosen):
            self._forward(found, b, inputs[b], option)
        for b in reversed(range(len(blocks))):
            self._backward(found, b, inputs[b], chosen[b])
        self._updates(found.tensors)
        management = self.problem.machine.management_ns
        found.management = self._run(Phase.UPDATE, "management", [], [], management, 0)
        found.graph = OperatorGraph(
            name=self.problem.name or "step",
            storages=tuple(self.storages),
            operations=tuple(self.operations),
            outputs=(made[-1],),
        )
        return found

    def _gradients(self) -> list[int]:
        last = len(self.problem.blocks) - 1
        return [
            self._storage(
                f"{block.name} gradient",
                block.gradient_bytes,
                StorageKind.TANGENT if b == last else StorageKind.GRADIENT,
            )
            for b, block in enumerate(self.problem.blocks)
        ]

    def _forward(self, step: StepGraph, b: int, read: int, option: StateBlockOption) -> None:
        self._run(
            Phase.FORWARD,
            f"{self.problem.blocks[b].name} forward",
            [read, *self._values(step.tensors, b)],
            [step.outputs[b], *step.internal(b)],
            option.forward_ns,
            option.forward_workspace_bytes,
        )

    def _backward(self, step: StepGraph, b: int, read: int, option: StateBlockOption) -> None:
        so_far, made = self._parameter_gradients(step, b)
        values = self._values(step.tensors, b)
        own = [step.outputs[b]] if option.keeps_output else []
        self._run(
            Phase.INPUT_GRADIENT,
            f"{self.problem.blocks[b].name} backward",
            [read, step.gradients[b], *step.internal(b), *own, *values, *so_far],
            [*step.gradients[b - 1 : b], *made],
            option.backward_ns,
            option.backward_workspace_bytes,
        )

    def _storage(self, name: str, size: int, kind: StorageKind) -> int:
        self.storages.append(Storage(name=name, bytes=size, kind=kind))
        return len(self.storages) - 1

    def _some(self, name: str, size: int) -> int:
        return self._storage(name, size, StorageKind.ACTIVATION) if size else -1

    def _run(
        self, phase: Phase, name: str, reads: list[int], writes: list[int], time: int, extra: int
    ) -> int:
        self.operations.append(
            Operation(
                name=name,
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                time_ns=time,
                workspace_bytes=extra,
            )
        )
        return len(self.operations) - 1

    def _tensors(self, group: ParameterGroup) -> list[TensorStorages]:
        found = []
        for each in group.tensors:
            value = self._storage(each.name, each.bytes, StorageKind.PARAMETER)
            tensor = TensorStorages(value)
            if each.trained:
                name = f"{each.name} gradient"
                tensor.gradient = self._storage(name, each.bytes, StorageKind.GRADIENT)
                size = each.bytes * self.problem.states_per_value
                if size:
                    name = f"{each.name} states"
                    tensor.states = self._storage(name, size, StorageKind.OPTIMIZER)
            found.append(tensor)
        return found

    def _values(self, tensors: list[list[TensorStorages]], block: int) -> list[int]:
        return [
            each.value
            for group, own in zip(self.problem.groups, tensors, strict=True)
            if block in group.blocks
            for each in own
        ]

    def _parameter_gradients(self, step: StepGraph, block: int) -> tuple[list[int], list[int]]:
        """What the backward of a block reads and makes of them: several uses add up in turn."""
        read: list[int] = []
        made: list[int] = []
        for g, group in enumerate(self.problem.groups):
            if block not in group.blocks or not group.trained_bytes:
                continue
            partial = step.partial.setdefault(g, [])
            read += partial[-1:]
            if block == group.blocks[0]:
                made += [each.gradient for each in step.tensors[g] if each.gradient >= 0]
            else:
                name = f"{group.name} gradient so far, of block {block}"
                partial.append(self._storage(name, group.trained_bytes, StorageKind.GRADIENT))
                made += partial[-1:]
        return read, made

    def _updates(self, tensors: list[list[TensorStorages]]) -> None:
        machine = self.problem.machine
        for group, own in zip(self.problem.groups, tensors, strict=True):
            for tensor, each in zip(group.tensors, own, strict=True):
                if each.gradient < 0:
                    continue
                states = [each.states] if each.states >= 0 else []
                reads, writes = [each.value, each.gradient, *states], [each.value, *states]
                time = ceil_div(tensor.bytes * 10**9, machine.device_update)
                name, extra = f"update {tensor.name}", tensor.update_workspace_bytes
                each.on_device = self._run(Phase.UPDATE, name, reads, writes, time, extra)
                if machine.host_update is not None:
                    time = ceil_div(tensor.bytes * 10**9, machine.host_update)
                    name = f"update {tensor.name} on the host"
                    each.on_host = self._run(Phase.UPDATE, name, reads, writes, time, 0)
