"""Splitting: the layers in a row are the user's model, and what cannot be cut is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import split
from pipeplan.errors import InputError
from pipeplan.split_model import TensorSpec
from pipeplan.task import Task
from tests.capture_tasks import conv, gpt2, llama, mlp, sgd, skips


def rows(_: int) -> tuple[Tensor, Tensor]:
    """Eight rows of four features."""
    return torch.zeros(8, 4), torch.zeros(8, 1)


def simple(model: object, **changes: object) -> Task:
    """A task around `model` with (8, 4) inputs."""
    task = Task(model=nn.Linear(1, 1), loss=nn.functional.mse_loss, optimizer=sgd, data=rows)
    return replace(task, model=model, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [mlp, conv, skips, partial(gpt2, blocks=1), partial(llama, blocks=1)]
)
def test_names_cover_every_parameter_and_buffer(make: Callable[[], Task]) -> None:
    """Each layer's tensors are the user's own objects, under the user's names."""
    task = make()
    model = task.model if isinstance(task.model, nn.Module) else nn.ModuleList(task.model)
    users = dict([*model.named_parameters(), *model.named_buffers()])
    found = set()
    result = split(task)
    for layer, fqns in zip(result.layers, result.fqns, strict=True):
        own = dict([*layer.named_parameters(), *layer.named_buffers()])
        assert own.keys() <= fqns.keys()
        for local, tensor in own.items():
            assert users[fqns[local]] is tensor
            found.add(fqns[local])
    assert found >= {name for name, _ in model.named_parameters()}
    assert found >= model.state_dict().keys() & users.keys()


def test_a_module_used_twice_is_tied_to_itself() -> None:
    """Both places of one module are layers, with the same parameter names."""
    linear = nn.Linear(4, 4)
    result = split(simple(nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(4, 1))))
    assert result.names[0] != result.names[2]
    assert result.fqns[0] == result.fqns[2] == {"weight": "0.weight", "bias": "0.bias"}


def test_boundaries_of_several_tensors() -> None:
    """A tuple of tensors is one boundary; integers in it carry no gradient."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.linear(value)
            return hidden, hidden.argmax(1)

    class Tail(nn.Module):
        def forward(self, hidden: Tensor, index: Tensor) -> Tensor:
            return hidden.gather(1, index.unsqueeze(1))

    result = split(simple([Head(), Tail()]))
    assert result.boundaries[1] == (
        TensorSpec((8, 4), "torch.float32", True),
        TensorSpec((8,), "torch.int64", False),
    )


def test_members_take_pairs_as_torch_gives_them() -> None:
    """A list hands them on as arguments; what takes one tensor is the member itself."""
    members = [nn.Linear(4, 1), Pair(), SumOf()]
    assert split(simple(members)).layers[2] is members[2]


def test_frozen_first_layers_send_no_gradient() -> None:
    """Behind layers without trainable parameters a boundary is not differentiable."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    assert split(simple(model)).boundaries[1] == (TensorSpec((8, 4), "torch.float32", False),)


def test_views_and_in_place_layers_join_the_layer_before() -> None:
    """In-place ReLU and flatten are no layers of their own; names and functions remain."""
    task = conv()
    result = split(task)
    assert "1:BatchNorm2d+2:ReLU" in result.names
    assert "6:AdaptiveAvgPool2d+7:Flatten" in result.names
    source, _ = task.microbatch(0)
    assert isinstance(task.model, nn.Sequential)
    value = source
    for layer in result.layers:
        value = layer(value)
    assert torch.equal(value, task.model(source))


def test_a_view_as_first_layer_joins_the_next() -> None:
    """There is no layer before the first one."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    assert split(simple(model)).names == ("0:Flatten+1:Linear",)


class Row(nn.Module):
    """Modules without parameters between those that have some; two of them do nothing."""

    def __init__(self) -> None:
        super().__init__()
        modules = [nn.Linear(4, 4), nn.ReLU(), nn.Identity(), nn.Linear(4, 4), nn.ReLU()]
        self.row = nn.ModuleList(modules)
        self.drop, self.last = nn.Dropout(0.1), nn.Identity()
        self.head = nn.Linear(4, 1)

    def forward(self, value: Tensor) -> Tensor:
        """One after the other."""
        for module in (*self.row, self.drop, self.last, self.head):
            value = module(value)
        return value


def test_every_module_is_in_a_layer() -> None:
    """Those without parameters are where they run, those that do nothing behind their elder."""
    result = split(simple(Row()))
    whole = [f"row.{number}" for number in range(5)] + ["drop", "last", "head"]
    assert [name for modules in result.modules for name in modules] == whole
    assert len(result.modules) == len(result.layers) > 1
    assert result.modules[0] == ("row.0", "row.1", "row.2")


def test_splitting_leaves_no_trace() -> None:
    """Random state, running statistics and weights are as before."""
    task = conv()
    assert isinstance(task.model, nn.Sequential)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    task = replace(task, data=lambda _: (torch.ones(4, 3, 16, 16), torch.ones(4).long()))
    random = torch.random.get_rng_state()
    split(task)
    assert torch.equal(random, torch.random.get_rng_state())
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_layer_that_looks_at_values_is_traced_for_real(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fake tensors cannot tell a value, so the shapes come from a real pass, and it says so."""

    class Branch(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * 2 if value.sum().item() > 0 else value.tanh()

    result = split(simple([nn.Linear(4, 4), Branch(), nn.BatchNorm1d(4), nn.Linear(4, 1)]))
    assert [len(boundary) for boundary in result.boundaries] == [1] * 4
    assert "a pass with values" in caplog.text
    assert isinstance(result.layers[2], nn.BatchNorm1d)
    assert result.layers[2].num_batches_tracked == 0


def test_digest_follows_shapes_and_names() -> None:
    """The same task gives the same digest; another width, name or micro-batch another one."""
    digest = split(mlp()).digest()
    assert split(mlp()).digest() == digest
    wide = replace(mlp(), data=lambda _: (torch.randn(33, 64), torch.randn(33, 64)))
    assert split(wide).digest() != digest
    task = mlp()
    assert isinstance(task.model, nn.Sequential)
    assert split(replace(task, model=list(task.model)[:-1])).digest() != digest


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Twice the same."""
        return value + 1, value + 2


class SumOf(nn.Module):
    """Takes two tensors."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Their sum."""
        return one + other


class Odd(nn.Module):
    """Returns a dict."""

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        """No tensor."""
        return {"value": value}


class AddOne(nn.Module):
    """Changes its input and returns another tensor."""

    def forward(self, value: Tensor) -> Tensor:
        """Twice what is one more."""
        return value.add_(1) * 2


LINEAR = nn.Linear(4, 1)
REFUSED = {
    "no module": (simple(7), "got a int"),
    "a name": (simple("resnet"), "got a str"),
    "a list with a function": (simple([LINEAR, torch.tanh]), r"model\[1\]"),
    "an empty list": (simple([]), "no layers"),
    "an empty sequence": (simple(nn.Sequential()), "no layers"),
    "a layer that returns a dict": (simple([LINEAR, Odd()]), "'1:Odd': returned a dict"),
    "a layer that changes its input": (
        simple([nn.Linear(4, 4), AddOne(), LINEAR]),
        "'1:AddOne': changes its input in place",
    ),
    "a last layer with two outputs": (simple([LINEAR, Pair()]), "returned 2 tensors"),
    "a sequence that hands a pair to two arguments": (
        simple(nn.Sequential(LINEAR, Pair(), SumOf())),
        "'2:SumOf'.* missing 1 required .* as one tuple, a Python list",
    ),
    "shapes that do not fit": (simple([nn.Linear(5, 1)]), r"'0:Linear', input of shape \(8, 4\)"),
    "a loss that is no scalar": (simple([LINEAR], loss=lambda a, b: a - b), r"shape \(8, 1\)"),
    "a loss that is no tensor": (simple([LINEAR], loss=lambda a, b: 1.0), "returned a float"),
    "a loss that fails": (simple([LINEAR], loss=lambda a, b: a @ b), "loss failed"),
    "an integer loss": (simple([LINEAR], loss=lambda a, b: a.sum().long()), "torch.int64"),
    "nothing to train": (
        simple([nn.Linear(4, 1).requires_grad_(False)]),
        "no trainable parameter",
    ),
    "data that fails": (simple([LINEAR], data=lambda _: 1 / 0), "ZeroDivisionError"),
    "data that is one tensor": (simple([LINEAR], data=lambda _: torch.ones(4)), "got Tensor"),
    "data that is no tensor": (
        simple([LINEAR], data=lambda _: (1, 2)),
        r"got the input \(1\), need a tensor",
    ),
}


def test_two_parameters_in_one_memory_are_refused() -> None:
    """Ties go by identity: these would be trained apart as soon as they are on two GPUs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), LINEAR)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        InputError, match=r"'0\.weight' and '1\.weight' lie in.*b\.weight = a\.wei"
    ):
        split(simple(model))
    model[1].weight = model[0].weight
    model[1].register_buffer("old", model[0].weight.detach())
    with pytest.raises(InputError, match=r"'0\.weight' and '1\.old' lie in.*clone"):
        split(simple(model))


def test_parts_of_one_storage_are_no_ties() -> None:
    """Neighbours have memory of their own; buffers that nobody trains may share theirs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), LINEAR)
    whole = torch.ones(8, 4)
    for layer, part in zip(model, whole.split(4), strict=False):
        layer.weight.data = part
        layer.register_buffer("table", whole.clone())
    model[1].table = model[0].table[:4]
    assert len(split(simple(model)).layers) == 3


@pytest.mark.parametrize(("task", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(task: Task, message: str) -> None:
    """What cannot be split is an InputError that names the place."""
    with pytest.raises(InputError, match=message):
        split(task)


def test_capture_does_not_import_transformers() -> None:
    """Only a task with a Hugging Face model pays for that library."""
    code = "import sys, pipeplan.capture; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tables_with_sparse_gradients_are_told_of() -> None:
    """A plain loop adds their rows in another order."""
    batch = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 12)
    layers: list[nn.Module] = [nn.Embedding(9, 4, sparse=True), nn.Flatten()]
    (note,) = split(simple(layers, data=lambda _: batch)).notes
    assert note.startswith("module '0' makes sparse gradients")
    layers[0].requires_grad_(False)
    layers[1] = nn.Sequential(nn.Flatten(), nn.Linear(12, 12))
    assert split(simple(layers, data=lambda _: batch)).notes == ()
