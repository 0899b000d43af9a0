"""Operator graphs and device programs as files."""

from __future__ import annotations

import pytest

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.errors import InputError
from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind

KINDS = (StorageKind.INPUT, StorageKind.ACTIVATION, StorageKind.TANGENT, StorageKind.GRADIENT)
STORAGES = tuple(
    Storage(name=str(number), bytes=8, kind=kind) for number, kind in enumerate(KINDS)
)
FORWARD = Operation(name="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), time_ns=1)
BACKWARD = Operation(name="b", phase=Phase.INPUT_GRADIENT, reads=(1, 2), writes=(3,), time_ns=2)


def graph(*operations: Operation, outputs: tuple[int, ...] = (1,)) -> OperatorGraph:
    """A forward and a backward over four storages."""
    return OperatorGraph(
        name="g", storages=STORAGES, operations=operations, outputs=outputs, input_gradients=()
    )


def test_a_graph_comes_back_from_its_file() -> None:
    """And tells what its operations take."""
    first = graph(FORWARD, BACKWARD)
    assert OperatorGraph.from_json(first.to_json()) == first
    assert (first.forwards, first.compute_ns) == (1, 3)


@pytest.mark.parametrize(
    ("operations", "outputs", "said"),
    [
        ((BACKWARD,), (2,), "got storage 1, which nothing before makes"),
        ((FORWARD, BACKWARD, FORWARD), (1,), "got F behind I or W"),
        ((FORWARD.model_copy(update={"writes": (2,)}),), (0,), "of kind tangent"),
        ((FORWARD.model_copy(update={"writes": (9,)}),), (0,), "need one below 4"),
        ((FORWARD,), (3,), "outputs: got storage 3, which nothing makes"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(
    operations: tuple[Operation, ...], outputs: tuple[int, ...], said: str
) -> None:
    """Each says where and why."""
    with pytest.raises(ValueError, match=said):
        graph(*operations, outputs=outputs)


def test_a_program_comes_back_from_its_text() -> None:
    """With every kind of instruction."""
    program = DeviceProgram(tuple(Instruction(kind) for kind in InstructionKind))
    assert DeviceProgram.from_text(program.to_text()) == program


@pytest.mark.parametrize("line", ["", "run", "run 01", "run -1", "runs 1", "run 1 2", "end F 0"])
def test_a_line_that_is_no_instruction_is_refused(line: str) -> None:
    """By its number."""
    with pytest.raises(InputError, match="line 2: got"):
        DeviceProgram.from_text(f"pipeplan-device-program/1\n{line}\n")
