"""Replay of a device program, by rule, by byte and by time: the one judge of every planner.

docs/reference/device-programs.md has the rules (A1)-(A16), the bytes (B1)-(B5) and the times
(T1)-(T5).
"""

from __future__ import annotations

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.programs.device_memory import DeviceMemory
from pipeplan.remat.programs.host_copies import CopiesOnHost, Placement
from pipeplan.remat.programs.outcome import ProgramOutcome, ProgramStep
from pipeplan.remat.schedules.host_link import HostLink, Lanes, Transfer
from pipeplan.remat.schedules.replay import INSTANT

_COPIES = (InstructionKind.OFFLOAD, InstructionKind.COPY, InstructionKind.PREFETCH)


def judge(
    graph: OperatorGraph,
    program: DeviceProgram,
    budget: int | None = None,
    link: HostLink = INSTANT,
    begin: Placement | None = None,
) -> ProgramOutcome:
    """What `program` does on a device that runs `graph`.

    The replay ends at the first instruction that is not allowed; a budget that is exceeded is
    reported for the first instruction that does, and the replay goes on.

    Args:
        graph: what the indices of the program mean.
        program: any instructions; those that are not allowed are reported, not raised.
        budget: bytes, static ones included; None: no limit.
        link: the way to the host.
        begin: where parameters, optimizer states and waiting gradients are at both ends; None:
            they are on the device, and no gradient waits.
    """
    copies = CopiesOnHost(graph, begin, program)
    replay = _Replay(graph, link, copies)
    refusal = copies.refuse_begin()
    if refusal is not None:
        return replay.outcome([f"the begin: {refusal}"])
    found: list[str] = []
    for number, instruction in enumerate(program.instructions):
        refusal = replay.memory.refusal(instruction)
        if refusal is not None:
            return replay.outcome([*found, f"step {number}, {instruction}: {refusal}"])
        used = replay.step(instruction)
        if budget is not None and used > budget and not found:
            found.append(
                f"step {number}, {instruction}: holds {used} bytes, need at most {budget}"
            )
    missing = replay.memory.refuse_end()
    return replay.outcome(found if missing is None else [*found, f"the end: {missing}"])


class _Replay:
    """Steps so far, and what they add up to."""

    def __init__(self, graph: OperatorGraph, link: HostLink, copies: CopiesOnHost) -> None:
        self.memory = DeviceMemory(graph, link.duplex, copies)
        self._graph = graph
        self._lanes = Lanes(link)
        self._steps: list[ProgramStep] = []
        self._peaks = [0, 0]
        self._times = [0, 0]
        self._saved = 0

    def step(self, instruction: Instruction) -> int:
        """Carries `instruction` out, which is allowed; returns its bytes."""
        memory, kind = self.memory, instruction.kind
        before = memory.during(instruction)
        if kind is InstructionKind.END_F:
            self._peaks[0] = max(self._peaks[0], before)
            self._saved = memory.saved
        memory.apply(instruction)
        used = before if kind is InstructionKind.RUN else max(before, memory.held())
        start, end = self._lane(instruction)
        part = int(InstructionKind.END_F in memory.ended)
        self._peaks[part] = max(self._peaks[part], used)
        if kind is InstructionKind.RUN:
            self._times[part] += end - start
        self._steps.append(ProgramStep(instruction, start, end, used, memory.host_bytes))
        return used

    def _lane(self, instruction: Instruction) -> tuple[int, int]:
        kind, index = instruction.kind, instruction.index
        if kind in _COPIES:
            size = self._graph.storages[index].bytes
            return self._lanes.transfer(
                Transfer(index, kind is not InstructionKind.PREFETCH), size
            )
        if kind is InstructionKind.HOST:
            operation = self._graph.operations[index]
            return self._lanes.host(operation.time_ns, operation.reads, operation.writes)
        if kind is InstructionKind.WAIT:
            return self._lanes.wait(index)
        is_run = kind is InstructionKind.RUN
        return self._lanes.run(self._graph.operations[index].time_ns if is_run else 0)

    def outcome(self, violations: list[str]) -> ProgramOutcome:
        """Of the steps so far."""
        return ProgramOutcome(
            steps=tuple(self._steps),
            violations=tuple(violations),
            static_bytes=self._graph.static_bytes,
            saved_bytes=self._saved,
            forward_peak_bytes=self._peaks[0],
            backward_peak_bytes=self._peaks[1],
            forward_ns=self._times[0],
            backward_ns=self._times[1],
            makespan_ns=self._lanes.end,
            host_peak_bytes=max((step.host_bytes for step in self._steps), default=0),
        )
