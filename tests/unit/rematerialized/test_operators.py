"""`rematerialize` with single operators: bits of the plain module, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan import rematerialize
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.livebytes import peak_bytes
from pipeplan.operators import UncapturableError
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.refusals import least_bytes
from tests.operator_models import ExplicitAttention, Gpt

IDS = torch.arange(32).view(2, 16)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt() -> Gpt:
    """The same weights each time."""
    torch.manual_seed(0)
    return Gpt(1, 32, 4, 0.1)


def trained(module: nn.Module) -> list[Tensor]:
    """Gradients of two micro-batches, and the state of the generator."""
    torch.manual_seed(5)
    module.zero_grad()
    for _ in range(2):
        loss(module(IDS), IDS).backward()
    found = [each.grad for each in module.parameters() if each.grad is not None]
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("method", ["operators", pytest.param("hiremate", marks=pytest.mark.long)])
def test_a_budget_is_kept_bit_for_bit(method: str) -> None:
    """With the loss and the target counted; operators run again; what is told is what is held."""
    module = gpt()
    expected = [each.clone() for each in trained(module)]
    plain = peak_bytes(module, loss, IDS, IDS)
    budget = plain * 9 // 10
    lean: Any = rematerialize(module, (IDS, IDS), budget, loss=loss, method=method, repeats=1)
    plan = lean.rematerialization
    assert (plan.option.method == "hiremate") == (method == "hiremate")
    assert plan.peak_bytes <= budget
    assert plan.option.outcome.compute_ns > plan.graph.compute_ns
    found = trained(lean)
    assert all(map(torch.equal, expected, found))
    assert peak_bytes(lean, loss, IDS, IDS) <= budget


def test_all_is_kept_where_it_fits() -> None:
    """And that is proven to be fastest."""
    module = gpt()
    lean: Any = rematerialize(module, IDS, "1GiB", method="operators", repeats=1)
    plan = lean.rematerialization
    assert plan.option.program == keep_all(plan.graph)
    assert plan.proven
    assert plan.peak_bytes == judge(plan.graph, keep_all(plan.graph)).peak_bytes


def test_a_budget_that_cannot_be_kept_names_one_that_can() -> None:
    """Which is then kept."""
    module, rows = ExplicitAttention(32, 4, 0.1), torch.randn(2, 16, 32)
    with pytest.raises(InfeasibleError, match="of them all the time") as refused:
        rematerialize(module, rows, 1000, method="operators", repeats=1)
    least = least_bytes(refused.value)
    lean: Any = rematerialize(module, rows, least, method="operators", repeats=1)
    assert lean.rematerialization.peak_bytes <= least


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    """With the way out."""

    class Branch(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value if value.sum() > 0 else -value)

    with pytest.raises(UncapturableError, match="Plan whole layers instead"):
        rematerialize(Branch(4, 4), torch.ones(2, 4), "1MiB", method="operators")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": True}, "offload: got it with method operators"),
        ({"max_layers": 3}, "max_layers: got it with method operators"),
    ],
)
def test_what_means_nothing_here_is_refused(options: dict[str, Any], said: str) -> None:
    """Instead of being passed over."""
    with pytest.raises(InputError, match=said):
        rematerialize(gpt(), IDS, "1MiB", method="operators", **options)
