"""The module that is handed out: it is the user's, and refuses what was not captured."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.errors import InputError
from pipeplan.gradients import give_sum
from pipeplan.operators import by_operators, capture
from pipeplan.remat.programs import judge, keep_all


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


def _freeze(other: Any) -> None:
    other[0].weight.requires_grad_(False)


def _hook_submodule(other: Any) -> None:
    other[0].register_forward_hook(lambda *_: None)


def _hook_gradient(other: Any) -> None:
    other[0].weight.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("requires_grad of parameters", _freeze),
        ("hooks of submodules", _hook_submodule),
        ("0.weight: got a hook on its gradient", _hook_gradient),
    ],
)
def test_what_would_be_passed_over_is_refused(said: str, change: Any) -> None:
    """The program knows nothing of what is done to the module behind its capture."""
    _, other = planned()
    change(other)
    with pytest.raises(InputError, match=said):
        other(torch.ones(3, 4))


def test_a_backward_under_autocast_is_refused() -> None:
    """Autograd would cast there; the program does not."""
    _, other = planned()
    result = other(torch.ones(3, 4)).sum()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="under autocast"):
        result.backward()


def test_a_copy_trains_its_own_parameters() -> None:
    """And leaves those of the first one alone."""
    _, other = planned()
    copied = copy.deepcopy(other)
    copied(torch.ones(3, 4)).sum().backward()
    assert all(each.grad is not None for each in copied.parameters())
    assert all(each.grad is None for each in other.parameters())


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


class HandsOn(nn.Module):
    """Uses its input twice, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.first(value).tanh() * mask + self.second(value).sigmoid()
        return made, value, mask


@pytest.mark.parametrize("own", [False, True])
def test_inputs_that_are_handed_on_are_no_copies(own: bool) -> None:
    """Output and input are one storage; gradients of all uses add up in the module's order."""
    torch.manual_seed(0)
    module, mask = HandsOn(), torch.rand(3, 4)
    captured = capture(module, torch.ones(3, 4, requires_grad=True), mask)
    captured = captured.with_own_inputs() if own else captured
    assert len(captured.graph.outputs) == 3
    program = keep_all(captured.graph)
    assert judge(captured.graph, program).violations == ()
    other = by_operators(module, captured, program)
    source, found = torch.randn(3, 4), []
    for each in (module, other):
        module.zero_grad()
        leaf = source.clone().requires_grad_()
        value = leaf * 1
        made, passed, same = each(value, mask)
        assert passed.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        assert same.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
        (made.square().sum() + (passed * 1.7).exp().sum()).backward()
        assert leaf.grad is not None
        found.append([leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_an_input_that_is_given_away_goes_when_nothing_reads_it() -> None:
    """Between forward and backward of a sigmoid only its output is there."""
    module = nn.Sigmoid()
    captured = capture(module, torch.ones(3, 4, requires_grad=True)).with_own_inputs()
    other = by_operators(module, captured, keep_all(captured.graph))
    value = torch.ones(3, 4, requires_grad=True) * 1
    watched = weakref.ref(value.untyped_storage())
    made = other(value)
    del value
    gc.collect()
    assert watched() is None
    made.sum().backward()


def test_wider_sums_of_gradients_are_added_to() -> None:
    """As a hook of ours does in a run: the leaf's own gradient stays empty."""
    module = nn.Linear(4, 2).to(torch.bfloat16)
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in module.parameters()]
    for parameter, total in zip(module.parameters(), sums, strict=True):
        give_sum(parameter, total)
    source = torch.randn(3, 4).to(torch.bfloat16)
    captured = capture(module, source)
    other = by_operators(module, captured, keep_all(captured.graph))
    for _ in range(2):
        other(source).square().sum().backward()
    mine = [total.clone() for total in sums]
    for total in sums:
        total.zero_()
    for _ in range(2):
        module(source).square().sum().backward()
    assert all(map(torch.equal, mine, sums))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_equal_structures_have_one_digest() -> None:
    """Names and times do not count; sizes, targets and whose the inputs are do."""

    def digest(module: nn.Module, rows: int = 3) -> str:
        return capture(module, torch.ones(rows, 4)).graph.structure_digest()

    one = digest(nn.Sequential(nn.Linear(4, 4)))
    assert one == digest(nn.Sequential(nn.Identity(), nn.Linear(4, 4)))
    assert one != digest(nn.Sequential(nn.Linear(4, 4)), rows=4)
    assert one != digest(nn.Sequential(nn.Linear(4, 4, bias=False)))
    captured = capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))
    times = tuple(range(len(captured.graph.operations)))
    assert one == captured.with_times(times).graph.structure_digest()
    assert one != captured.with_own_inputs().graph.structure_digest()
