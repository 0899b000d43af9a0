"""Odd modules train by operators to the bits of the plain module, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.operators import UncapturableError, by_operators, capture
from pipeplan.rehearsal import check_agreement
from pipeplan.testing.device_programs import random_program
from tests import odd_models
from tests.operator_models import Model
from tests.operator_steps import step

OTHERWISE = "the graph gives other bits than the module"
DRAWS = "draws from Python's or numpy's generator"
REFUSED = {
    "LayerDrop": DRAWS,
    "noise of numpy": DRAWS,
    "counter in forward": OTHERWISE,
    "list that grows": OTHERWISE,
    "counter in an object": OTHERWISE,
    "counter in an object, in a Sequential": OTHERWISE,
    "forked generator": OTHERWISE,
    "draw in the model's forward": DRAWS,
    "counter in a global variable": OTHERWISE,
    "parameter hook": "has hooks on its gradient",
    "reentrant checkpoint": "torch cannot trace the call",
    "compiled module": "torch cannot trace the call",
    "compiled model": "torch cannot trace the call",
    "branch on values": "torch cannot trace the call",
    "teacher that looks at values": "torch cannot trace the call",
    "teacher in a Sequential": "works in place on p",
    "teacher": "works in place on p",
    "input changed under no_grad": "works in place on input 0",
    "lazy module": "torch cannot trace the call",
    "generator of its own": "the graph holds Generator",
    "input changed in place": "works in place on input 0",
    "input changed in place in a Sequential": "works in place on input 0",
    "buffer replaced": "puts another tensor in its place",
    "hook of the whole model": "the module itself has hooks",
    "hook of a Sequential": "the module itself has hooks",
}


def _makers() -> dict[str, Callable[[], Any]]:
    refused = {name: maker for name, (maker, _) in odd_models.REFUSED.items()}
    every = {**odd_models.EXACT, **odd_models.TIED, **odd_models.DRAWN, **refused}
    return {name: make for name, make in every.items() if " in a list" not in name}


MAKERS = {name: make for name, make in _makers().items() if name != "module of another layer"}
"""All that are one module."""


@pytest.mark.parametrize("name", MAKERS)
def test_bits_are_the_modules_or_it_is_refused(name: str) -> None:
    """Three steps with other inputs than the captured one; nothing trains wrongly in silence."""
    torch.manual_seed(0)
    module = MAKERS[name]()
    source = torch.randn(4, odd_models.WIDTH)
    if name in REFUSED:
        with pytest.raises(UncapturableError, match=REFUSED[name]):
            check_agreement(module, capture(module, source))
        return
    captured = capture(module, source)
    check_agreement(module, captured)
    for seed in range(3):
        chosen = Model(module, (torch.randn(4, odd_models.WIDTH),))
        plain, _ = step(module, chosen)
        program = random_program(captured.graph, Random(seed))
        done, _ = step(by_operators(module, captured, program), chosen)
        assert done.differs(plain) == []


def test_hooks_around_the_module_run_once() -> None:
    """Those that come behind planning."""
    module = nn.Sequential(nn.Linear(4, 4))
    captured = capture(module, torch.ones(2, 4))
    other = by_operators(module, captured, random_program(captured.graph, Random(0)))
    other.register_forward_hook(lambda _, __, made: 2 * made)
    assert torch.equal(other(torch.ones(2, 4)), module(torch.ones(2, 4)))
    module._forward_hooks.clear()
    assert torch.equal(other(torch.ones(2, 4)), module(torch.ones(2, 4)))
