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


def graph(
    *operations: Operation,
    outputs: tuple[int, ...] = (1,),
    storages: tuple[Storage, ...] = STORAGES,
) -> OperatorGraph:
    """A forward and a backward over four storages."""
    return OperatorGraph(
        name="g", storages=storages, operations=operations, outputs=outputs, input_gradients=()
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
        ((FORWARD, BACKWARD), (3,), "outputs: got storage 3, which no forward makes"),
        ((FORWARD, BACKWARD), (2,), "outputs: got storage 2, which no forward makes"),
        (
            (FORWARD.model_copy(update={"reads": (0, 2)}), BACKWARD),
            (1,),
            r"operations\[0\].reads: got storage 2, a tangent, which comes behind the forwards",
        ),
        (
            (FORWARD.model_copy(update={"writes": (1, 1)}), BACKWARD),
            (1,),
            r"operations\[0\].writes: got storage 1 twice",
        ),
        ((FORWARD,), (1,), r"storages\[3\]: got one of kind gradient that no operation makes"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(
    operations: tuple[Operation, ...], outputs: tuple[int, ...], said: str
) -> None:
    """Each says where and why."""
    with pytest.raises(ValueError, match=said):
        graph(*operations, outputs=outputs)


def with_new_buffer(**changes: object) -> tuple[Storage, ...]:
    """The four storages, a buffer, and what is copied into it."""
    new = Storage(name="new", bytes=4, kind=StorageKind.NEW_BUFFER, targets=("old",))
    old = Storage(name="old", bytes=4, kind=StorageKind.BUFFER)
    return (*STORAGES, old, new.model_copy(update=changes))


def test_new_buffers_are_made_by_forwards_and_go_into_buffers_that_only_forwards_read() -> None:
    """Otherwise no program keeps (A4) and (A8)."""
    forward = FORWARD.model_copy(update={"reads": (0, 4), "writes": (1, 5)})
    graph(forward, BACKWARD, storages=with_new_buffer())
    late = BACKWARD.model_copy(update={"writes": (3, 5)})
    with pytest.raises(ValueError, match=r"storages\[5\]: got a new buffer that no forward makes"):
        graph(FORWARD, late, storages=with_new_buffer())
    with pytest.raises(ValueError, match=r"storages\[5\].targets: got none of a new buffer"):
        graph(forward, BACKWARD, storages=with_new_buffer(targets=()))
    again = BACKWARD.model_copy(update={"reads": (1, 2, 4)})
    with pytest.raises(ValueError, match=r"operations\[1\].reads: got storage 4, a buffer which"):
        graph(forward, again, storages=with_new_buffer())


def test_what_stays_is_added_to_nothing() -> None:
    """(A7) asks for what a micro-batch makes."""
    given = STORAGES[0].model_copy(update={"targets": ("w",)})
    with pytest.raises(
        ValueError, match=r"storages\[0\].targets: got some of kind input, need none"
    ):
        graph(FORWARD, BACKWARD, storages=(given, *STORAGES[1:]))


def test_a_program_comes_back_from_its_text() -> None:
    """With every kind of instruction."""
    program = DeviceProgram(tuple(Instruction(kind) for kind in InstructionKind))
    assert DeviceProgram.from_text(program.to_text()) == program


@pytest.mark.parametrize("line", ["", "run", "run 01", "run -1", "runs 1", "run 1 2", "end F 0"])
def test_a_line_that_is_no_instruction_is_refused(line: str) -> None:
    """By its number."""
    with pytest.raises(InputError, match="line 2: got"):
        DeviceProgram.from_text(f"pipeplan-device-program/1\n{line}\n")
