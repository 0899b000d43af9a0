"""Programs over captured modules: bits are the plain module's, bytes are the judge's."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from random import Random

import pytest
import torch

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.operator_graph import OperatorGraph
from pipeplan.operators import Captured, by_operators, capture, executor
from pipeplan.operators.host import BesideHost
from pipeplan.operators.prepared import PreparedProgram
from pipeplan.rehearsal import measured
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.device_programs import random_program, recomputing
from tests import grids
from tests.operator_models import MODELS, Model, model
from tests.operator_steps import Step, step

PROGRAMS: dict[str, Callable[[OperatorGraph], DeviceProgram]] = {
    "keeps all": keep_all,
    "keeps nothing": lambda graph: recomputing(graph, lambda _: False),
    "keeps every third": lambda graph: recomputing(graph, lambda storage: storage % 3 == 0),
    "random": lambda graph: random_program(graph, Random(1)),
    "random, with the host": lambda graph: random_program(graph, Random(2), host=True),
}


@cache
def found(name: str) -> tuple[Model, Captured, Step]:
    """A model, captured; what the plain module gives."""
    chosen = model(name)
    plain, _ = step(chosen.module, chosen)
    cast = torch.autocast("cpu", chosen.cast) if chosen.cast else nullcontext()
    with cast:
        captured = capture(chosen.module, *chosen.args)
    return chosen, measured(chosen.module, captured, repeats=1), plain


@pytest.mark.parametrize("kind", ["keeps nothing", "random, with the host"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_modules_whatever_runs_again(name: str, kind: str) -> None:
    """All of it, or what draws say, of each model."""
    check_bits_and_bytes(name, kind)


@grids.each_value(name=list(MODELS), kind=["keeps all", "keeps every third", "random"])
def test_bits_are_the_modules_and_bytes_the_judges(name: str, kind: str) -> None:
    """One of the other programs of each model."""
    check_bits_and_bytes(name, kind)


def check_bits_and_bytes(name: str, kind: str) -> None:
    """Outputs, gradients, buffers, random numbers; the peak to the byte."""
    chosen, captured, plain = found(name)
    program = PROGRAMS[kind](captured.graph)
    outcome = judge(captured.graph, program)
    assert outcome.violations == ()
    module = by_operators(chosen.module, captured, program)
    constants = [tensor for _, tensor in captured.constants]
    done, peak = step(module, chosen, constants)
    assert done.differs(plain) == []
    assert peak == outcome.peak_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt, explicit attention", "resnet", "lstm"])
def test_bits_are_the_modules_with_copies_beside_computes(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker copies, as for CUDA; when a copy ends is up to the machine, the bits are not."""
    chosen, captured, plain = found(name)
    program = random_program(captured.graph, Random(seed), host=True)
    assert "offload" in program.to_text()
    monkeypatch.setattr(executor, "host_of", BesideHost)
    module = by_operators(chosen.module, captured, program)
    done, _ = step(module, chosen, [tensor for _, tensor in captured.constants])
    assert done.differs(plain) == []


def test_storages_go_behind_their_copy_and_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an operation reads on its way out stays until then; one of no use goes."""
    chosen, captured, plain = found("gpt, explicit attention")
    graph = captured.graph
    reader = next(i for i, each in enumerate(graph.operations) if each.reads and each.writes)
    storage = graph.operations[reader].writes[0]
    lines = list(keep_all(graph).instructions)
    at = lines.index(Instruction(InstructionKind.RUN, reader)) + 1
    later = next(
        place
        for place in range(at, len(lines))
        if lines[place].kind is InstructionKind.RUN
        and storage in graph.operations[lines[place].index].reads
    )
    kinds = (InstructionKind.WAIT, InstructionKind.PREFETCH, InstructionKind.WAIT)
    lines[later + 1 : later + 1] = [Instruction(kind, storage) for kind in kinds]
    lines.insert(at, Instruction(InstructionKind.OFFLOAD, storage))
    program = DeviceProgram(tuple(lines))
    steps = PreparedProgram(captured, program).forward
    assert steps[at].used_later
    assert [index for index, each in enumerate(steps) if storage in each.unused] == [later + 1]
    monkeypatch.setattr(executor, "host_of", BesideHost)
    done, _ = step(by_operators(chosen.module, captured, program), chosen)
    assert done.differs(plain) == []


def _offloaded_early(captured: Captured) -> DeviceProgram:
    """The first result is on its way out while the forward reads it, and back for the backward."""
    graph = captured.graph
    storage = graph.operations[0].writes[0]
    lines = list(keep_all(graph).instructions)
    end = lines.index(Instruction(InstructionKind.END_F))
    lines.insert(end, Instruction(InstructionKind.WAIT, storage))
    lines.insert(1, Instruction(InstructionKind.OFFLOAD, storage))
    read = next(
        place
        for place in range(end, len(lines))
        if lines[place].kind is InstructionKind.RUN
        and storage in graph.operations[lines[place].index].reads
    )
    back = (InstructionKind.PREFETCH, InstructionKind.WAIT)
    lines[read:read] = [Instruction(kind, storage) for kind in back]
    return DeviceProgram(tuple(lines))


def _ends(before: int) -> bool:
    """Whether there are no more threads than `before`, within a minute."""
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return threading.active_count() <= before


def test_a_pass_without_a_backward_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for what will not run."""
    chosen, captured, _ = found("gpt, explicit attention")
    monkeypatch.setattr(executor, "host_of", BesideHost)
    module = by_operators(chosen.module, captured, _offloaded_early(captured))
    before = threading.active_count()
    result = module(*chosen.args)
    assert threading.active_count() > before
    del result
    assert _ends(before)


def test_a_pass_that_fails_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a storage that is leaving waits for its last reader; the error comes up."""
    chosen, captured, _ = found("gpt, explicit attention")
    monkeypatch.setattr(executor, "host_of", BesideHost)
    module = by_operators(chosen.module, captured, _offloaded_early(captured))
    usual = executor.ProgramPass._run

    def failing(self: executor.ProgramPass, index: int) -> None:
        if index == 1:
            raise RuntimeError("no memory")
        usual(self, index)

    monkeypatch.setattr(executor.ProgramPass, "_run", failing)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no memory"):
        module(*chosen.args)
    assert _ends(before)
