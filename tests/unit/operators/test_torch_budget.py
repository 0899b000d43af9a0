"""PyTorch's partitioner as a device program: allowed by the judge, and the bits of the module."""

from __future__ import annotations

import pytest
import torch

from pipeplan.operators import by_operators, capture
from pipeplan.rehearsal import measured
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.torch_budget import partitioned
from tests.operator_models import model


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_torchs_program_is_allowed_and_gives_the_bits(budget: float) -> None:
    """Cheap operators run again at 1.0, too; gradients are those of eager, dropout among them."""
    given = model("gpt, explicit attention")
    module, args = given.module, given.args
    captured = measured(module, capture(module, *args), 1)
    program = partitioned(module, args, captured.graph, budget)
    outcome = judge(captured.graph, program)
    assert outcome.violations == ()
    everything = judge(captured.graph, keep_all(captured.graph))
    assert outcome.saved_bytes <= everything.saved_bytes
    assert outcome.compute_ns > everything.compute_ns
    found = []
    for each in (module, by_operators(module, captured, program)):
        module.zero_grad()
        torch.manual_seed(3)
        each(*args).sum().backward()
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        found.append([gradient.clone() for gradient in gradients])
    assert all(map(torch.equal, *found))
