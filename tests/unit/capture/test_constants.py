"""Models that look at values: those made from numbers alone are known while a graph is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture.graph.export import export_graph
from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments

Read = Callable[[Tensor], bool]


class Branching(nn.Module):
    """Sines where what it reads is true, cosines elsewhere."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return x.sin() if self.read(x) else x.cos()


def positions(x: Tensor) -> bool:
    """As a library finds out that no sequences are packed."""
    ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    steps = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1)
    return bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())


def written_with_numbers(_: Tensor) -> bool:
    """Writes into what it made, through a view."""
    table = torch.zeros(4, 4)
    table[1:][0].fill_(7)
    return table.sum().item() == 28


def later_than_written(x: Tensor) -> bool:
    """Writes the input into a view of what it reads."""
    table = torch.zeros(2, 3)
    assert table.sum().item() == 0
    table[1:].copy_(x[:1])
    return table.sum().item() > 0


def input_itself(x: Tensor) -> bool:
    """Another value with every input."""
    return x.sum().item() > 0


def chance(_: Tensor) -> bool:
    """Another value with every run."""
    return torch.rand(2).sum().item() > 1


def asks_for_fakes(x: Tensor) -> bool:
    """As libraries do before they look at values."""
    return isinstance(x, torch._subclasses.FakeTensor)


def kinds(read: Read) -> set[str]:
    """Names of the operations in the graph of such a model."""
    graph = export_graph(Branching(read), ModelArguments.of(torch.ones(2, 3))).module.graph
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("read", [positions, written_with_numbers])
def test_values_made_from_numbers_are_read(read: Read) -> None:
    """The graph takes the way that a run takes."""
    assert read(torch.ones(2, 3))
    assert "aten.sin.default" in kinds(read)
    assert "aten.cos.default" not in kinds(read)


@pytest.mark.parametrize("read", [later_than_written, input_itself, chance])
def test_other_values_are_not_made_up(read: Read) -> None:
    """What depends on inputs, parameters or chance is refused as before."""
    with pytest.raises(InputError, match="depend on the values"):
        kinds(read)


def test_a_model_sees_no_fake_tensors() -> None:
    """It computes as in a usual run, and torch is left as it was."""
    before = torch._subclasses.FakeTensor
    assert "aten.cos.default" in kinds(asks_for_fakes)
    assert torch._subclasses.FakeTensor is before


def test_generators_stay() -> None:
    """Looking at what a function gives draws no random numbers."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(InputError):
        kinds(chance)
    assert torch.equal(before, torch.get_rng_state())
