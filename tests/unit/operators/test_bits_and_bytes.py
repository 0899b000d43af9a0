"""Programs over captured modules: bits are the plain module's, bytes are the judge's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from random import Random

import pytest
import torch

from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import OperatorGraph
from pipeplan.operators import Captured, by_operators, capture, measured
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.device_programs import random_program, recomputing
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


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_modules_and_bytes_the_judges(name: str, kind: str) -> None:
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
