"""The device program of a step: what Algorithm 8 chose, in an order that the judge replays.

X. Zhao's thesis, section 4.6. A step of the plan gives up what it may, issues its copies, runs
its block, and waits only for what it reads or gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.remat.programs import Placement
from pipeplan.remat.schedules.host_link import Transfer, TransferQueue
from pipeplan.remat.states.activations import leaving_step, returning_step
from pipeplan.remat.states.host_updates import UpdateOnHost, place_updates
from pipeplan.remat.states.problem import StateProblem
from pipeplan.remat.states.step_graph import StepGraph, TensorStorages
from pipeplan.remat.states.whole_tensors import TensorMoves


@dataclass
class _StepLists:
    """What happens in one step, beside its run; storages, or operations where it says so."""

    frees: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    updates_on_host: list[TensorStorages] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    """Operations, behind the run."""
    frees_behind: list[int] = field(default_factory=list)
    copies_behind: list[int] = field(default_factory=list)


def step_program(
    problem: StateProblem,
    step: StepGraph,
    values: Sequence[TensorMoves],
    states: Sequence[TensorMoves | None],
    times: Sequence[float],
) -> tuple[DeviceProgram, Placement]:
    """The program, and where states are at both of its ends.

    Args:
        problem: whose groups are updated whole on the device or on the host.
        step: its graph.
        values: of each group, of its parameters; copies are of gradients where the host updates.
        states: of each group that the device updates, of its optimizer states.
        times: planned ns of each step.
    """
    plan = _Plan(problem, step, values, states)
    plan.place_updates(times)
    writer = _Writer(step, problem.machine.duplex)
    for t, lists in enumerate(plan.lists):
        _StepWriter(problem, step, writer, t, lists).write()
    writer.wait_for_all()
    program = DeviceProgram(tuple(writer.lines))
    return program, Placement(frozenset(plan.device), frozenset(plan.host))


class _Plan:
    """Lists of each step, and what is where as step 0 begins."""

    def __init__(
        self,
        problem: StateProblem,
        step: StepGraph,
        values: Sequence[TensorMoves],
        states: Sequence[TensorMoves | None],
    ) -> None:
        self.problem, self.step = problem, step
        self.lists = [_StepLists() for _ in range(problem.steps)]
        self.device: set[int] = set()
        self.host: set[int] = set()
        self._copied: dict[tuple[int, int], int] = {}
        self._fetched: dict[tuple[int, int], int] = {}
        for g, group in enumerate(problem.groups):
            own = step.tensors[g]
            if group.on_host:
                self._updated_on_host(g, values[g])
                continue
            trained = [each for each in own if each.gradient >= 0]
            last = self.lists[problem.last_gradient(group)]
            last.updates += [each.on_device for each in trained]
            last.frees_behind += [each.gradient for each in trained]
            self._moved(g, values[g], [each.value for each in own])
            self.host |= {each.value for each in own if each.gradient < 0}
            moves = states[g]
            if moves is not None:
                self._moved(g, moves, [each.states for each in trained if each.states >= 0])

    def _step(self, group: int, position: int) -> int:
        """The step at a position since g_w."""
        return (self._last(group) + position) % self.problem.steps

    def _last(self, group: int) -> int:
        return self.problem.last_gradient(self.problem.groups[group])

    def _first_position(self, group: int) -> int:
        """Of step 0."""
        return self.problem.steps - self._last(group)

    def _moved(self, group: int, moves: TensorMoves, storages: Sequence[int]) -> None:
        """Values or states that the device updates: all there at g_w, with no copy."""
        begin = self._first_position(group)
        self._come_and_go(group, moves, storages, set(storages))
        for position, tensors in moves.copies.items():
            chosen = [storages[each] for each in tensors]
            lists = self.lists[self._step(group, position)]
            (lists.copies if position else lists.copies_behind).extend(chosen)
            if position < begin:
                self.host.update(chosen)

    def _come_and_go(
        self, group: int, moves: TensorMoves, storages: Sequence[int], alive: set[int]
    ) -> None:
        begin = self._first_position(group)
        for position in range(self.problem.steps + 1):
            if position == begin:
                self.device |= alive
            freed = [storages[each] for each in moves.frees.get(position, ())]
            fetched = [storages[each] for each in moves.fetches.get(position, ())]
            lists = self.lists[self._step(group, position)]
            lists.frees += freed
            lists.fetches += fetched
            alive.difference_update(freed)
            alive.update(fetched)

    def _updated_on_host(self, group: int, moves: TensorMoves) -> None:
        own = self.step.tensors[group]
        begin = self._first_position(group)
        self.lists[self._last(group)].frees_behind += [each.value for each in own]
        self.host.update(each.value for each in own)
        self.host.update(each.states for each in own if each.states >= 0)
        self._come_and_go(group, moves, [each.value for each in own], set())
        for position, tensors in moves.copies.items():
            lists = self.lists[self._step(group, position)]
            chosen = [own[each].gradient for each in tensors]
            (lists.copies if position else lists.copies_behind).extend(chosen)
            self.lists[self._step(group, position + 1)].frees += chosen
            self._copied |= {(group, each): position for each in tensors}
            if position + 1 >= begin:
                self.device.update(chosen)
        for position in sorted(moves.fetches, reverse=True):
            self._fetched |= {(group, each): position for each in moves.fetches[position]}

    def place_updates(self, times: Sequence[float]) -> None:
        """When the host updates what it updates."""
        jobs = [
            UpdateOnHost(
                key=key,
                ready=self._last(key[0]) + copied + 1,
                due=self._last(key[0]) + self._fetched[key],
                time_ns=self.step.graph.operations[self._tensor(key).on_host].time_ns,
            )
            for key, copied in self._copied.items()
        ]
        management = self.problem.machine.management_ns
        for key, at in place_updates(jobs, times, management).items():
            tensor, begin = self._tensor(key), self.problem.steps
            self.lists[at % begin].updates_on_host.append(tensor)
            waits = at >= begin
            copied = self._last(key[0]) + self._copied[key]
            if waits and copied < begin:
                self.host.add(tensor.gradient)
            if not waits:
                self.device.discard(tensor.gradient)

    def _tensor(self, key: tuple[int, int]) -> TensorStorages:
        return self.step.tensors[key[0]][key[1]]


class _Writer:
    """Instructions so far, and copies that are not known to have ended."""

    def __init__(self, step: StepGraph, duplex: bool) -> None:
        self.lines: list[Instruction] = []
        self._graph = step.graph
        self._queue = TransferQueue(duplex)

    def emit(self, kind: InstructionKind, indices: Iterable[int]) -> None:
        """One instruction for each index."""
        for index in indices:
            self.lines.append(Instruction(kind, index))
            if kind in (InstructionKind.COPY, InstructionKind.OFFLOAD):
                self._queue.issue(Transfer(index, out=True))
            elif kind is InstructionKind.PREFETCH:
                self._queue.issue(Transfer(index, out=False))

    def wait(self, storages: Iterable[int]) -> None:
        """Until no copy of these is under way."""
        for storage in storages:
            if any(each.unit == storage for each in self._queue.pending):
                self.emit(InstructionKind.WAIT, [storage])
                self._queue.end(storage)

    def free(self, storages: Iterable[int]) -> None:
        """Give them up, once they are copied."""
        for storage in storages:
            self.wait([storage])
            self.emit(InstructionKind.FREE, [storage])

    def run(self, operation: int) -> None:
        """Execute an operation once all that it reads has come, and what it writes has left."""
        done = self._graph.operations[operation]
        coming = {each.unit for each in self._queue.pending if not each.out}
        self.wait(each for each in done.reads if each in coming or each in done.writes)
        self.emit(InstructionKind.RUN, [operation])

    def wait_for_all(self) -> None:
        """Until all copies have ended."""
        while self._queue.pending:
            self.wait([self._queue.pending[-1].unit])


@dataclass
class _StepWriter:
    """The instructions of step t, in the order of the methods."""

    problem: StateProblem
    step: StepGraph
    writer: _Writer
    t: int
    lists: _StepLists

    def write(self) -> None:
        """All of them."""
        self._give_up()
        self._issue_copies()
        self.writer.run(self.t)
        if self.t == len(self.problem.blocks) - 1:
            self.writer.lines.append(Instruction(InstructionKind.END_F))
            if not self._is_read_by_own_backward(self.t):
                self.writer.free([self.step.outputs[self.t]])
        if self.t >= len(self.problem.blocks):
            self._finish_backward(self.problem.block_of(self.t))

    def _offloaded(self, when: Callable[[StateProblem, int], int], t: int) -> list[int]:
        """Activations whose copy is in step t."""
        return [
            storage
            for block, storage in enumerate(self.step.offloaded)
            if storage >= 0 and when(self.problem, block) == t
        ]

    def _give_up(self) -> None:
        self.writer.wait(self._offloaded(leaving_step, self.t - 1))
        self.writer.free(self.lists.frees)

    def _issue_copies(self) -> None:
        if self.problem.machine.management_ns:
            self.writer.emit(InstructionKind.HOST, [self.step.management])
        self.writer.emit(InstructionKind.OFFLOAD, self._offloaded(leaving_step, self.t))
        self.writer.emit(InstructionKind.COPY, self.lists.copies)
        for tensor in self.lists.updates_on_host:
            self.writer.emit(InstructionKind.HOST, [tensor.on_host])
            self.writer.free([tensor.gradient])
        back = self._offloaded(returning_step, self.t)
        self.writer.emit(InstructionKind.PREFETCH, [*back, *self.lists.fetches])

    def _finish_backward(self, block: int) -> None:
        step, writer = self.step, self.writer
        behind = block > 0 and not self._is_read_by_own_backward(block - 1)
        read = [step.outputs[block - 1]] if behind else []
        read += [step.outputs[block]] if self._is_read_by_own_backward(block) else []
        done = [*read, *step.internal(block), *self._added_up(block)]
        writer.free([step.gradients[block], *done])
        if not block:
            writer.lines.append(Instruction(InstructionKind.END_I))
        for operation in self.lists.updates:
            writer.run(operation)
        writer.free(self.lists.frees_behind)
        writer.emit(InstructionKind.COPY, self.lists.copies_behind)

    def _is_read_by_own_backward(self, block: int) -> bool:
        backward = self.step.graph.operations[self.problem.steps - 1 - block]
        return self.step.outputs[block] in backward.reads

    def _added_up(self, block: int) -> list[int]:
        """Gradients of earlier uses, which are in that of this use now."""
        return [
            partial[len(users) - 2 - users.index(block)]
            for partial, users in (
                (partial, self.problem.groups[g].blocks)
                for g, partial in self.step.partial.items()
            )
            if block in users and block != users[-1]
        ]
