"""A plan of states on the host as a file: `states.json` of docs/reference/formats.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeplan.device_program import DeviceProgram
from pipeplan.document import Count, Document, Positive, Record
from pipeplan.errors import InputError
from pipeplan.operator_graph import MOST
from pipeplan.remat.programs import Placement, judge
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.states.problem import (
    DeviceAndHost,
    ParameterGroup,
    StateBlock,
    StateBlockOption,
    StateProblem,
    StateTensor,
)
from pipeplan.remat.states.solve import Relaxation, StatePlan
from pipeplan.remat.states.step_graph import step_graph

Storages = Annotated[tuple[Count, ...], Field(max_length=MOST)]


class StateOptionRecord(Record):
    """As `problem.StateBlockOption`."""

    name: str
    forward_ns: Count
    backward_ns: Count
    kept_bytes: Count
    offloaded_bytes: Count
    forward_workspace_bytes: Count
    backward_workspace_bytes: Count
    keeps_output: bool


class StateBlockRecord(Record):
    """As `problem.StateBlock`."""

    name: str
    options: Annotated[tuple[StateOptionRecord, ...], Field(min_length=1)]
    output_bytes: Count
    gradient_bytes: Count
    option: Count
    """By which of its options it runs."""


class StateTensorRecord(Record):
    """As `problem.StateTensor`."""

    name: str
    bytes: Count
    trained: bool
    update_workspace_bytes: Count


class StateGroupRecord(Record):
    """As `problem.ParameterGroup`, updated whole."""

    name: str
    tensors: tuple[StateTensorRecord, ...]
    blocks: tuple[Count, ...]
    on_host: bool


class DeviceAndHostRecord(Record):
    """As `problem.DeviceAndHost`."""

    device_bytes: Count
    host_bytes: Count
    bandwidth: Positive
    device_update: Positive
    host_update: Positive | None
    management_ns: Count
    duplex: bool = Field(default=True, exclude_if=lambda duplex: duplex)


class StatePlanFile(Document):
    """What a device and its host do in each step of training, without end."""

    format: Literal["pipeplan-states/1"] = "pipeplan-states/1"
    name: str
    task: str | None = None
    """Whose model it is; for people."""
    task_digest: str | None = None
    """Of the split model."""
    blocks: Annotated[tuple[StateBlockRecord, ...], Field(min_length=1)]
    groups: tuple[StateGroupRecord, ...]
    machine: DeviceAndHostRecord
    states_per_value: Count
    input_bytes: Count
    program: str
    """A device program of the step's graph, as text."""
    device: Storages
    """Storages whose value is on the device between two steps."""
    host: Storages
    """Storages whose value the host has between two steps."""
    bound_ns: Count
    """Below which O-ILP found no solution."""

    @classmethod
    def of(
        cls, plan: StatePlan, task: str | None = None, task_digest: str | None = None
    ) -> StatePlanFile:
        """The file of `plan`."""
        problem, found = plan.problem, plan.relaxation
        options = zip(problem.blocks, found.options, strict=True)
        return cls(
            name=problem.name,
            task=task,
            task_digest=task_digest,
            blocks=tuple(
                StateBlockRecord(**_fields(block, option=option)) for block, option in options
            ),
            groups=tuple(
                StateGroupRecord(**_fields(each, on_host=bool(each.on_host)))
                for each in problem.groups
            ),
            machine=DeviceAndHostRecord(**asdict(problem.machine)),
            states_per_value=problem.states_per_value,
            input_bytes=problem.input_bytes,
            program=plan.program.to_text(),
            device=tuple(sorted(plan.placement.device)),
            host=tuple(sorted(plan.placement.host)),
            bound_ns=int(found.bound_ns),
        )

    def plan(self, where: str = "states.json") -> StatePlan:
        """The plan, judged anew.

        Args:
            where: the file, for messages.

        Raises:
            InputError: if it means nothing, or the judge refuses it.
        """
        problem = self._problem(where)
        options = tuple(block.option for block in self.blocks)
        step = step_graph(problem, options)
        program = DeviceProgram.from_text(self.program, f"{where}: program")
        placement = Placement(frozenset(self.device), frozenset(self.host))
        machine, count = problem.machine, len(step.graph.storages)
        odd = next((each for each in (*self.device, *self.host) if each >= count), None)
        if odd is not None:
            raise InputError(f"{where}: got storage {odd}, need one below {count}. Plan again.")
        link = HostLink(machine.bandwidth, duplex=machine.duplex)
        outcome = judge(step.graph, program, machine.device_bytes, link, placement)
        if outcome.violations:
            raise InputError(f"{where}: program: {outcome.violations[0]}. Plan again.")
        parts = tuple(float(bool(group.on_host)) for group in problem.groups)
        relaxation = Relaxation(outcome.makespan_ns, self.bound_ns, options, parts)
        return StatePlan(problem, relaxation, step, program, placement, outcome)

    def _problem(self, where: str) -> StateProblem:
        blocks = []
        for block in self.blocks:
            if block.option >= len(block.options):
                raise InputError(
                    f"{where}: block {block.name}: got option {block.option}, need one below"
                    f" {len(block.options)}. Plan again."
                )
            options = tuple(StateBlockOption(**each.model_dump()) for each in block.options)
            sizes = block.output_bytes, block.gradient_bytes
            blocks.append(StateBlock(block.name, options, *sizes))
        groups = tuple(
            ParameterGroup(
                group.name,
                tuple(StateTensor(**each.model_dump()) for each in group.tensors),
                group.blocks,
                group.on_host,
            )
            for group in self.groups
        )
        return StateProblem(
            tuple(blocks),
            groups,
            DeviceAndHost(**self.machine.model_dump()),
            self.states_per_value,
            self.input_bytes,
            self.name,
        )


def _fields(item: StateBlock | ParameterGroup, **others: object) -> dict[str, Any]:
    """Those of a dataclass, with records in place of what it has rows of."""
    found = asdict(item)
    if isinstance(item, StateBlock):
        found["options"] = tuple(StateOptionRecord(**each) for each in found["options"])
    else:
        found["tensors"] = tuple(StateTensorRecord(**each) for each in found["tensors"])
    return found | others
