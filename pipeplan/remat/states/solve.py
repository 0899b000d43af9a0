"""The door: from a problem to a program that the judge has replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.errors import InfeasibleError, InternalError, TimeLimitError
from pipeplan.remat.graph.milp.linear import run
from pipeplan.remat.programs import Placement, ProgramOutcome, judge
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.states.o_ilp import OIlp
from pipeplan.remat.states.pinned import PinnedGroup, pinned_groups
from pipeplan.remat.states.problem import StateProblem
from pipeplan.remat.states.sides import with_sides
from pipeplan.remat.states.step_graph import StepGraph, step_graph
from pipeplan.remat.states.step_program import step_program
from pipeplan.remat.states.variables import GroupParts
from pipeplan.remat.states.whole_tensors import TOLERANCE, TensorMoves, whole, whole_of_host

_ROUNDS: Final = 4
"""Of planning, each with as much less of the host as grouped buffers took too much."""


@dataclass(frozen=True)
class Relaxation:
    """What O-ILP says, in parts of groups.

    Attributes:
        step_ns: the sum of Time_t.
        bound_ns: below which no solution is.
        options: of each block.
        parts_on_host: X_w of each group, of its trained bytes.
        batch: as a multiple of the problem's.
    """

    step_ns: float
    bound_ns: float
    options: tuple[int, ...]
    parts_on_host: tuple[float, ...]
    batch: float = 1.0


@dataclass(frozen=True)
class StatePlan:
    """A step of training of whole tensors.

    Attributes:
        problem: its groups are updated whole, on the device or on the host.
        relaxation: what it was made from.
        step: the graph that the program is one of.
        program: what the device does in each step, without end.
        placement: where states are between two steps.
        outcome: by the judge.
    """

    problem: StateProblem
    relaxation: Relaxation
    step: StepGraph
    program: DeviceProgram
    placement: Placement
    outcome: ProgramOutcome

    @cached_property
    def pinned(self) -> tuple[PinnedGroup, ...]:
        """Groups of the host's buffers that only hold copies; they live as long as training."""
        return pinned_groups([self.step.graph.storages[each].bytes for each in self.copied])

    @property
    def gap(self) -> float | None:
        """(time of a step - bound) / bound; None where nothing is proven."""
        bound = self.relaxation.bound_ns
        return (self.outcome.makespan_ns - bound) / bound if bound > 0 else None

    @property
    def option_names(self) -> tuple[str, ...]:
        """By which option each block runs."""
        chosen = zip(self.problem.blocks, self.relaxation.options, strict=True)
        return tuple(block.options[option].name for block, option in chosen)

    @cached_property
    def copied(self) -> tuple[int, ...]:
        """Storages that the host only has copies of: the buffers of `pinned`, by index there."""
        found = self._on_host - self.updated_on_host
        return tuple(sorted(each for each in found if self.step.graph.storages[each].bytes))

    @property
    def host_bytes(self) -> int:
        """All that the host allocates: groups of buffers, and what it updates."""
        storages = self.step.graph.storages
        updated = sum(storages[each].bytes for each in self.updated_on_host)
        return updated + sum(group.bytes for group in self.pinned)

    @property
    def _on_host(self) -> set[int]:
        """Storages that are ever on the host."""
        kinds = (InstructionKind.COPY, InstructionKind.OFFLOAD)
        copied = {each.index for each in self.program.instructions if each.kind in kinds}
        return copied | self.placement.host

    @cached_property
    def updated_on_host(self) -> set[int]:
        """Storages that updates on the host read: values, gradients, optimizer states."""
        operations = self.step.graph.operations
        return {
            storage
            for each in self.program.instructions
            if each.kind is InstructionKind.HOST
            for storage in operations[each.index].reads
        }


def relax(
    problem: StateProblem,
    seconds: float,
    solver: str = "highs",
    batches: tuple[float, float] | None = None,
) -> Relaxation:
    """The best solution of O-ILP that is found.

    Args:
        problem: what is planned.
        seconds: of the solver.
        solver: highs or scip.
        batches: least and most batch as multiples of the problem's; None: the problem's own.

    Raises:
        InfeasibleError: if there is none.
        TimeLimitError: if none was found.
    """
    program = OIlp(problem, batches)
    found, feasible, proven = run(program.model, solver, seconds)
    if not feasible:
        raise _no_solution(problem, seconds, proven)
    options = [
        max(range(len(row)), key=lambda o, row=row: found.value(row[o]))  # type: ignore[misc]
        for row in program.chosen
    ]
    r = 1.0 if batches is None else found.value(program.r)
    parts = [found.value(each.x) / r if each.updated else 0.0 for each in program.parts]
    return Relaxation(
        found.objective_value * program.unit_ns,
        found.best_objective_bound * program.unit_ns,
        tuple(options),
        tuple(min(1.0, part) if part > TOLERANCE else 0.0 for part in parts),
        1 / r,
    )


def _no_solution(
    problem: StateProblem, seconds: float, proven: bool
) -> InfeasibleError | TimeLimitError:
    if proven:
        return InfeasibleError(
            f"{_limits(problem)} there is no plan. Give more of one, or a smaller batch."
        )
    return TimeLimitError(f"{_limits(problem)} found no plan in {seconds:g} s. Give it more time.")


def _limits(problem: StateProblem) -> str:
    machine = problem.machine
    return f"device {machine.device_bytes} bytes, host {machine.host_bytes} bytes:"


def plan_states(problem: StateProblem, seconds: float, solver: str = "highs") -> StatePlan:
    """A program for one step that keeps both limits.

    O-ILP chooses options and parts; tensors that the host updates are chosen of these parts; the
    linear program is solved again with both given; Algorithm 8 makes whole tensors of its parts.

    Args:
        problem: what is planned.
        seconds: of the solver, for each of its two runs.
        solver: highs or scip.

    Raises:
        InfeasibleError: if there is no plan in parts, or none was found in whole tensors.
        TimeLimitError: if none was found in time.
    """
    limit = problem.machine.host_bytes
    lost = 0
    for _ in range(_ROUNDS):
        plan = _plan(_with_less(problem, lost), seconds, solver)
        if plan.outcome.violations:
            first = plan.outcome.violations[0]
            raise InternalError(f"the judge refuses the step of O-ILP: {first}")
        if plan.host_bytes <= limit:
            return replace(plan, problem=replace(plan.problem, machine=problem.machine))
        lost += plan.host_bytes - limit
    raise InfeasibleError(
        f"host {limit} bytes: its buffers in groups of powers of two take {plan.host_bytes}. Give"
        " the host as much."
    )


def _plan(problem: StateProblem, seconds: float, solver: str) -> StatePlan:
    relaxation = relax(problem, seconds, solver)
    for nearest in (True, False):
        sided = with_sides(problem, relaxation.parts_on_host, nearest)
        program = OIlp(sided, options=relaxation.options, relaxed=True)
        found, feasible, _ = run(program.model, solver, seconds)
        if feasible:
            return _whole(sided, relaxation, program, found)
    raise InfeasibleError(
        f"{_limits(problem)} found no plan in whole tensors, though there is one in parts. Give"
        " more of one, or a smaller batch."
    )


def _with_less(problem: StateProblem, host_bytes: int) -> StateProblem:
    """With a host smaller by that, and a device by what parts may be off (`TOLERANCE`)."""
    moved = sum(
        group.bytes + problem.states_per_value * group.trained_bytes for group in problem.groups
    )
    machine = replace(
        problem.machine,
        device_bytes=problem.machine.device_bytes - int(3 * TOLERANCE * moved),
        host_bytes=problem.machine.host_bytes - host_bytes,
    )
    return replace(problem, machine=machine)


def _whole(problem: StateProblem, relaxation: Relaxation, program: OIlp, found: Any) -> StatePlan:
    values = [_values(each, found) for each in program.parts]
    states = [_states(each, found, problem.states_per_value) for each in program.parts]
    step = step_graph(problem, relaxation.options)
    times = [found.value(each) * program.unit_ns for each in program.time]
    instructions, placement = step_program(problem, step, values, states, times)
    machine = problem.machine
    link = HostLink(machine.bandwidth, duplex=machine.duplex)
    outcome = judge(step.graph, instructions, machine.device_bytes, link, placement)
    return StatePlan(problem, relaxation, step, instructions, placement, outcome)


def _parts(found: Any, order: Sequence[int], variables: Sequence[Any]) -> list[float]:
    return [found.value(variables[t]) for t in order]


def _values(parts: GroupParts, found: Any) -> TensorMoves:
    tensors = parts.group.tensors
    sizes = [each.bytes for each in tensors]
    stored = _parts(found, parts.order, parts.stored)
    offloaded = _parts(found, parts.order, parts.offloaded)
    if parts.group.on_host:
        fetched = _parts(found, parts.order, parts.fetched)
        return whole_of_host(sizes, stored, offloaded, fetched, len(parts.window))
    frozen = [at for at, each in enumerate(tensors) if not each.trained]
    return whole(sizes, stored, offloaded, frozen)


def _states(parts: GroupParts, found: Any, count: int) -> TensorMoves | None:
    if parts.group.on_host or not parts.states:
        return None
    sizes = [count * each.bytes for each in parts.group.tensors if each.trained]
    stored = _parts(found, parts.order, parts.states_stored)
    return whole(sizes, stored, _parts(found, parts.order, parts.states_offloaded))
