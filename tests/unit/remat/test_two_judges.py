"""The judge of chains and that of device programs say the same of a chain that is a graph."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat import judge as judge_chain
from pipeplan.remat import rematerialize_chain
from pipeplan.remat.checkpointing.periodic import keep_all, periodic
from pipeplan.remat.min_memory import least_memory
from pipeplan.remat.programs import judge as judge_program
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.schedule import FORWARDS, DeviceOpKind, DeviceSchedule
from tests.remat_brute import random_costs


@dataclass
class ChainGraph:
    """A chain's layers as operations.

    A boundary is three storages, nested as the tapes before and behind it keep it: what both keep,
    what the larger one keeps, the rest. A layer has an operation for its forward that keeps all,
    one for its forward that keeps nothing, and one for its backward.
    """

    costs: Costs
    storages: list[Storage] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.costs
        self._add("static", c.static, StorageKind.PARAMETER)
        self.boundaries = [
            [
                self._add(
                    f"{boundary} {part}",
                    size,
                    StorageKind.ACTIVATION if boundary else StorageKind.RECEIVED,
                )
                for part, size in enumerate(self._parts(boundary))
            ]
            for boundary in range(c.layers + 1)
        ]
        kind = StorageKind.ACTIVATION
        self.tapes = [self._add(f"tape {i}", c.saved[i], kind) for i in range(c.layers)]
        self.gradients = [
            self._add(f"gradient {i}", c.gradient[i], StorageKind.GRADIENT)
            for i in range(c.layers - 1)
        ]
        for layer in range(c.layers):
            reads, made = self.boundaries[layer], self.boundaries[layer + 1]
            self._run(
                layer, c.forward[layer], c.forward_work[layer], reads, [*made, self.tapes[layer]]
            )
        for layer in range(c.layers):
            reads, made = self.boundaries[layer], self.boundaries[layer + 1]
            self._run(layer, c.light[layer], c.light_work[layer], reads, made)
        for layer in reversed(range(c.layers)):
            last = layer == c.layers - 1
            reads = [self.tapes[layer], *([] if last else [self.gradients[layer]])]
            made = [self.gradients[layer - 1]] if layer else []
            work = c.backward_work[layer] + (c.gradient[layer] if last else 0)
            self._run(layer, c.backward[layer], work, reads, made, Phase.INPUT_GRADIENT)

    def _parts(self, boundary: int) -> tuple[int, int, int]:
        c = self.costs
        output = c.saved_output[boundary - 1] if boundary else 0
        entry = c.saved_input[boundary] if boundary < c.layers else 0
        low, high = sorted((output, entry))
        return low, high - low, c.boundary[boundary] - high

    def _add(self, name: str, size: int, kind: StorageKind) -> int:
        self.storages.append(Storage(name=name, bytes=size, kind=kind))
        return len(self.storages) - 1

    def _run(
        self,
        layer: int,
        time: int,
        work: int,
        reads: list[int],
        writes: list[int],
        phase: Phase = Phase.FORWARD,
    ) -> None:
        self.operations.append(
            Operation(
                name=f"{phase} {layer}",
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                time_ns=time,
                workspace_bytes=work,
            )
        )

    @property
    def graph(self) -> OperatorGraph:
        """The chain."""
        return OperatorGraph(
            name="chain",
            storages=tuple(self.storages),
            operations=tuple(self.operations),
            outputs=(),
        )

    def program(self, schedule: DeviceSchedule) -> DeviceProgram:
        """The schedule's operations, each followed by what it gives up."""
        layers, next_one = self.costs.layers, self.costs.layers - 1
        lines: list[tuple[InstructionKind, int]] = []
        full, taped, held = {0}, set[int](), set(self.boundaries[0])
        for op in schedule.ops:
            index = op.index
            if op.kind in FORWARDS:
                keeps = op.kind is DeviceOpKind.KEEP_ALL
                lines.append((InstructionKind.RUN, index if keeps else layers + index))
                taped |= {index} if keeps else set()
                full |= {index + 1}
                full -= set() if op.kind is DeviceOpKind.KEEP_INPUT else {index}
                held.update(self.boundaries[index + 1], [self.tapes[index]] if keeps else [])
            elif op.kind is DeviceOpKind.BACKWARD:
                lines += [(InstructionKind.END_F, 0)] if index == layers - 1 else []
                lines.append((InstructionKind.RUN, 3 * layers - 1 - index))
                held.update([self.gradients[index - 1]] if index else [])
                taped.discard(index)
                next_one = index - 1
            else:
                full.discard(index)
            wanted = self._wanted(full, taped, next_one)
            lines += [(InstructionKind.FREE, each) for each in sorted(held - wanted)]
            held &= wanted
        lines.append((InstructionKind.END_I, 0))
        return DeviceProgram.of([*lines, *((InstructionKind.FREE, each) for each in sorted(held))])

    def _wanted(self, full: set[int], taped: set[int], next_one: int) -> set[int]:
        """Full boundaries, tapes and their parts of boundaries, the gradient that waits."""
        found = {self.tapes[layer] for layer in taped}
        if 0 <= next_one < len(self.gradients):
            found.add(self.gradients[next_one])
        for boundary, parts in enumerate(self.boundaries):
            kept = self.costs.kept(
                boundary, before=boundary - 1 in taped, behind=boundary in taped
            )
            low, more, _ = self._parts(boundary)
            count = 3 if boundary in full else 2 if kept > low else 1 if kept else 0
            assert boundary in full or kept in (0, low, low + more)
            found.update(parts[:count])
        return found


@pytest.mark.parametrize("seed", range(60))
def test_both_judges_count_the_same_bytes_and_times(seed: int) -> None:
    """Of each forward and backward, for schedules of all recomputing planners."""
    rng = random.Random(seed)
    costs = random_costs(rng, rng.randint(2, 6))
    least = judge_chain(costs, least_memory(costs)).peak_bytes
    most = judge_chain(costs, keep_all(costs)).peak_bytes
    schedules = [keep_all(costs), least_memory(costs), periodic(costs, costs.layers)]
    budget = rng.randint(least, max(least, most))
    schedules.append(rematerialize_chain(costs, budget, "rotor").schedule)
    chain = ChainGraph(costs)
    for schedule in schedules:
        theirs = judge_chain(costs, schedule)
        mine = judge_program(chain.graph, chain.program(schedule))
        assert theirs.violations == mine.violations == ()
        runs = [step for step in mine.steps if step.instruction.kind is InstructionKind.RUN]
        computes = [step for step in theirs.steps if step.op.computes]
        assert [step.bytes for step in runs] == [step.bytes for step in computes]
        assert [step.end_ns for step in runs] == [step.end_ns for step in computes]
        assert mine.peak_bytes == theirs.peak_bytes
        assert mine.makespan_ns == theirs.makespan_ns


def test_both_judges_refuse_a_forward_without_its_input() -> None:
    """Each by its own rule."""
    costs = random_costs(random.Random(1), 2)
    schedule = DeviceSchedule.from_text("pipeplan-remat/1 2\nF_none 0\nF_none 1\nF_all 0\n")
    assert "full input at boundary 0" in judge_chain(costs, schedule).violations[0]
    chain = ChainGraph(costs)
    assert "(A2)" in judge_program(chain.graph, chain.program(schedule)).violations[0]
