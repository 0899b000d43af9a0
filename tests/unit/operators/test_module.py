"""The module that is handed out: it is the user's, and refuses what was not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.errors import InputError
from pipeplan.operators import by_operators, capture
from pipeplan.remat.programs import keep_all


def planned(source: Tensor | None = None) -> tuple[nn.Module, nn.Module]:
    """A module, and the one that runs a program."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    captured = capture(module, torch.ones(3, 4) if source is None else source)
    return module, by_operators(module, captured, keep_all(captured.graph))


def test_it_shares_all_with_the_module() -> None:
    """Parameters, submodules, state; without gradients and in evaluation it is the plain one."""
    module, other = planned()
    assert isinstance(other, nn.Sequential)
    assert [id(each) for each in module.parameters()] == [id(each) for each in other.parameters()]
    with torch.no_grad():
        assert other(torch.ones(7, 4)).shape == (7, 2)
    other.eval()
    assert torch.equal(other(torch.ones(7, 4)), module.eval()(torch.ones(7, 4)))


def test_two_passes_at_once_are_two_passes() -> None:
    """Backwards in any order."""
    module, other = planned()
    sources = [torch.randn(3, 4) for _ in range(2)]
    expected = []
    for source in sources:
        torch.manual_seed(0)
        module.zero_grad()
        module(source).sum().backward()
        expected.append(module[0].weight.grad.clone())  # type: ignore[union-attr, index, operator]
    module.zero_grad()
    outputs = []
    for source in sources:
        torch.manual_seed(0)
        outputs.append(other(source))
    outputs[0].sum().backward()
    assert torch.equal(module[0].weight.grad, expected[0])  # type: ignore[index, arg-type]
    outputs[1].sum().backward()
    assert torch.equal(module[0].weight.grad, expected[0] + expected[1])  # type: ignore[index, arg-type]


def test_a_second_backward_is_refused() -> None:
    """What was kept is gone."""
    _, other = planned()
    result = other(torch.ones(3, 4)).sum()
    result.backward(retain_graph=True)
    with pytest.raises(InputError, match="got a second backward, need one per forward"):
        result.backward()


def test_weights_that_change_before_the_backward_are_refused() -> None:
    """They are read again."""
    module, other = planned()
    result = other(torch.ones(3, 4)).sum()
    with torch.no_grad():
        module[0].weight.add_(1)  # type: ignore[operator, union-attr, index]
    with pytest.raises(InputError, match="weights or inputs changed between"):
        result.backward()


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("input 0: got", lambda other: other(torch.ones(2, 4))),
        ("input 0: got", lambda other: other(torch.ones(3, 4, dtype=torch.float64))),
        ("input 0: got", lambda other: other(torch.ones(3, 4, requires_grad=True))),
        ("arguments: got", lambda other: other(input=torch.ones(3, 4))),
        ("autocast: got", lambda other: _cast(other)),
        ("training modes of submodules", lambda other: (other[1].eval(), other(torch.ones(3, 4)))),
    ],
)
def test_calls_unlike_the_captured_one_are_refused(said: str, call: Any) -> None:
    """What is other, and what to do."""
    _, other = planned()
    with pytest.raises(InputError, match=f"module by operators: {said}"):
        call(other)


def _cast(other: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return other(torch.ones(3, 4))


def test_gradients_of_other_layouts_are_taken() -> None:
    """An expanded one, as that of a sum, and none at all, where another output has one."""
    module = nn.Linear(4, 4)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = module

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(value), 2 * self.body(value)

    both = Two()
    captured = capture(both, torch.ones(3, 4))
    other = by_operators(both, captured, keep_all(captured.graph))
    both(torch.ones(3, 4))[1].sum().backward()
    assert module.weight.grad is not None
    expected, module.weight.grad = module.weight.grad, None
    other(torch.ones(3, 4))[1].sum().backward()
    assert torch.equal(module.weight.grad, expected)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((Instruction(InstructionKind.RUN, 99),), r"device program: step 0, run 99: \(A1\)"),
        (None, "got parameter '0.weight', need a storage that the module does not hold"),
    ],
)
def test_programs_that_cannot_run_are_refused(
    lines: tuple[Instruction, ...] | None, said: str
) -> None:
    """Before anything runs."""
    module = nn.Sequential(nn.Linear(4, 4))
    captured = capture(module, torch.ones(3, 4))
    if lines is None:
        kinds = (InstructionKind.OFFLOAD, InstructionKind.PREFETCH, InstructionKind.WAIT)
        away = tuple(Instruction(kind, 0) for kind in kinds)
        lines = (*away, *keep_all(captured.graph).instructions)
    with pytest.raises(InputError, match=said):
        by_operators(module, captured, DeviceProgram(lines))
