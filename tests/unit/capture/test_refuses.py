"""What capture by graph refuses says what is wrong, where, and what to do; the rest it takes."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from pipeplan import fitting
from pipeplan.capture import profile_task, split
from pipeplan.capture.graph.export import export_graph
from pipeplan.capture.partition.cut_selection import select_cuts
from pipeplan.capture.user_model.model_call import run_layers
from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments
from pipeplan.task import Task, load
from tests import capture_tasks, grids, pipelines
from tests.capture_tasks import sgd


def rows(_: int) -> tuple[Tensor, Tensor]:
    """Eight rows of four features."""
    return torch.ones(8, 4), torch.zeros(8, 4)


def task_of(model: nn.Module) -> Task:
    """A task around `model` with (8, 4) inputs and outputs."""
    return Task(model=model, loss=nn.functional.mse_loss, optimizer=sgd, data=rows)


class Base(nn.Module):
    """A model of two linear layers, between which its kinds differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        """Both, with `middle` between."""
        result: Tensor = self.last(self.middle(self.first(value)))
        return result

    def middle(self, value: Tensor) -> Tensor:
        """Nothing."""
        return value


class Rows(Base):
    """How many rows there are is not known before it runs."""

    def middle(self, value: Tensor) -> Tensor:
        return value[value.sum(1) > 0]


class Branch(Base):
    def middle(self, value: Tensor) -> Tensor:
        return value if value.sum() > 0 else -value


class Item(Base):
    def middle(self, value: Tensor) -> Tensor:
        return value[: int(value.abs().max().item())]


class Chosen(Base):
    def middle(self, value: Tensor) -> Tensor:
        return value[value > 0].sum() + value


class WritesInput(Base):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.add_(1))


class InPlace(Base):
    """Writes into what was made before, and reads it once more."""

    def middle(self, value: Tensor) -> Tensor:
        kept = value * 2
        made = torch.tanh(self.last(kept))
        kept.add_(1)
        return made + kept


class Structure(Base):
    def forward(self, value: Tensor) -> dict[str, Tensor]:
        return {"one": self.first(value), "two": self.last(value)}


class Text(Base):
    def forward(self, value: Tensor) -> str:
        return f"{self.first(value).shape}"


class Remembers(Base):
    def middle(self, value: Tensor) -> Tensor:
        self.seen = value
        return value


class Chance(Base):
    """Draws from a generator that is not torch's."""

    def middle(self, value: Tensor) -> Tensor:
        return value * random.random()


class Plain(Base):
    """A part without parameters that costs something, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)

    def middle(self, value: Tensor) -> Tensor:
        return torch.softmax(value @ value.t(), -1) @ value


class Wrong(nn.Module):
    """Fails whatever it is given."""

    def forward(self, value: Tensor) -> Tensor:
        raise ValueError(f"no rows of {value.shape[1]}")


class HoldsWrong(Base):
    """Fails in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = Wrong()

    def middle(self, value: Tensor) -> Tensor:
        return self.wrong(value)


def expanded() -> nn.Module:
    """A buffer whose rows are one in memory."""
    model = Base()
    model.last.register_buffer("mask", torch.ones(1, 4).expand(2, 4))
    return nn.Sequential(model, model.last)


def two_devices() -> nn.Module:
    """One layer on the processor, one on another device."""
    model = Base()
    model.last.to("meta")
    return model


REFUSED = {
    "a branch on values": (Branch(), r"depend on the values of tensors at test_.*\.py:\d+ \(mid"),
    "a size from values": (Item(), "depend on the values of tensors"),
    "a choice of rows": (
        Rows(),
        r"size of what aten.index.Tensor makes in \S*Rows depends on the values.*torch.where",
    ),
    "the input changed": (WritesInput(), r"aten.add_.Tensor writes into the model's input"),
    "several tensors": (Structure(), "loss failed.*returned 2 tensors.*let"),
    "no tensor": (Text(), "returned no tensor, need what the loss"),
    "two devices": (two_devices(), "first.weight on cpu and last.weight on meta, need one device"),
    "an expanded buffer": (
        expanded(),
        r"0\.last\.mask: got an expanded tensor .*strides \[0, 1\].*\.contiguous\(\)",
    ),
    "a wrong shape": (nn.Linear(5, 4), "torch.export failed.*Check that model"),
    "too few arguments": (nn.Bilinear(4, 4, 4), "missing .* 'input2', need what forward"),
    "a forward that fails": (
        HoldsWrong(),
        r"fails on data\(0\) at test_.*\.py:\d+ \(forward\): ValueError: no rows of 4\. Check",
    ),
    "random numbers of another kind": (
        Chance(),
        "forward draws from Python's or numpy's generator",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(model: nn.Module, message: str) -> None:
    """What cannot be captured is an InputError that names the place."""
    with pytest.raises(InputError, match=message):
        split(task_of(model))


class Weighted(nn.MSELoss):
    """A loss with a weight of its own."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=trained)


def test_a_loss_that_would_be_trained() -> None:
    """No optimizer gets its parameters; frozen ones are constants."""
    with pytest.raises(InputError, match=r"loss Weighted: weight: .*requires_grad_\(False\)"):
        split(replace(task_of(Base()), loss=Weighted(trained=True)))
    split(replace(task_of(Base()), loss=Weighted(trained=False)))


@pytest.mark.parametrize("row", [False, True])
def test_a_loss_that_trains_what_other_layers_own(row: bool) -> None:
    """Other ranks' gradients would be lost; the last layer's own parameters are at hand."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if row else Base()
    first, last = list(model.children())

    def loss_with(part: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        known = list(part.parameters())
        return lambda output, target: (output - target).pow(2).mean() + known[0].pow(2).sum()

    with pytest.raises(InputError, match=r"^task: loss: trains a parameter of shape \(4, 4\)"):
        split(replace(task_of(model), loss=loss_with(first)))
    split(replace(task_of(model), loss=loss_with(last)))


class Gives(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> object:
        """What it makes."""
        return self.function(value)


def packed(value: Tensor) -> object:
    """A named tuple of two tensors and two Nones."""
    lengths = torch.tensor([4] * 8)
    return nn.utils.rnn.pack_padded_sequence(value[:, :, None], lengths, batch_first=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda value: (value, None),
            "layer '1:Gives': returned a tuple of Tensor, NoneType, need",
        ),
        (packed, "layer '1:Gives': returned a tuple of Tensor, Tensor, NoneType, NoneType, need"),
        (
            Tensor.to_sparse,
            "layer '1:Gives': got a tensor of layout torch.sparse_coo, need strided",
        ),
        (
            lambda value: torch.nested.as_nested_tensor(list(value)),
            "layer '1:Gives': got a nested tensor, need strided",
        ),
    ],
)
def test_rows_hand_on_plain_tensors(function: Callable[[Tensor], object], message: str) -> None:
    """Whatever else a layer returns is named."""
    layers = [nn.Linear(4, 4), Gives(function), Gives(lambda value: value), nn.Linear(4, 4)]
    with pytest.raises(InputError, match=message):
        split(replace(task_of(Base()), model=layers))


def test_gradients_that_are_off() -> None:
    """What passes back between layers is found by autograd."""
    with torch.no_grad(), pytest.raises(InputError, match=r"split: .*inside of torch.no_grad"):
        split(task_of(Base()))


def test_only_the_model_speaks_while_it_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch prints no graph of what it cannot export and logs as before; the model is heard."""

    class Loud(Branch):
        def middle(self, value: Tensor) -> Tensor:
            print("half way", file=sys.stderr)
            return super().middle(value)

    logger = logging.getLogger("torch")
    before = logger.level
    with pytest.raises(InputError):
        export_graph(Loud(), ModelArguments.of(rows(0)[0]))
    assert capsys.readouterr().err == "half way\n"
    assert logger.level == before


@pytest.mark.parametrize("kind", [InPlace, Plain, partial(nn.Linear, 4, 4)])
def test_takes(kind: Callable[[], nn.Module]) -> None:
    """In-place operations stay in a layer; layers may lack parameters; one layer is a chain."""
    model = kind()
    result = split(task_of(model))
    source, _ = rows(0)
    assert torch.equal(run_layers(result, (source,)), model(source))


def test_a_storage_is_not_parted_from_a_later_write() -> None:
    """No cut lies between the making of a tensor and the operation that changes it."""
    kinds = [
        {
            str(node.target)
            for part in layer.modules()
            if isinstance(part, fx.GraphModule)
            for node in part.graph.nodes
        }
        for layer in split(task_of(InPlace())).layers
    ]
    assert len(kinds) == 3
    assert {"aten.mul.Tensor", "aten.add_.Tensor"} <= kinds[1]


def test_a_fallback_is_named() -> None:
    """A model that cannot be captured can be given as a list of its modules."""
    model = Branch()
    with pytest.raises(InputError, match="as a Python list"):
        split(task_of(model))
    assert len(split(replace(task_of(model), model=[model.first, model.last])).layers) == 2


def test_a_batch_that_does_not_divide() -> None:
    """A last micro-batch with fewer rows is refused, and the message says what to do."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        return tuple(part[: 8 - number] for part in rows(0))  # type: ignore[return-value]

    task = Task(model=Base(), loss=nn.functional.mse_loss, optimizer=sgd, data=data)
    with pytest.raises(InputError, match="choose a size of micro-batches that divides them"):
        profile_task(task, repeats=1)


def test_a_pair_without_a_loss() -> None:
    """Where the task has no loss, (input, target) are two arguments of the model."""
    needs = r"with \(tensor, tensor\): too many .* forward\(value.*the task needs a loss"
    with pytest.raises(InputError, match=needs):
        split(replace(task_of(Base()), loss=None))
    with pytest.raises(
        InputError,
        match=r"missing .* 'value', .*\(value.*takes\. .* tuple: \(\(inputs,\), target\)\.$",
    ):
        split(replace(task_of(Base()), data=lambda n: ({"it": rows(n)[0]}, rows(n)[1])))


def test_a_plain_number_that_changes() -> None:
    """It is part of the graph; the message says to make a tensor of it."""

    class Steps(Base):
        def forward(self, value: Tensor, step: int) -> Tensor:
            return super().forward(value) * step

    def data(number: int) -> tuple[tuple[Tensor, int], Tensor]:
        return (rows(0)[0], number), rows(0)[1]

    task = Task(model=Steps(), loss=nn.functional.mse_loss, optimizer=sgd, data=data)
    with pytest.raises(
        InputError, match=r"data\(1\).*\(tensor, 1\), need \(tensor, 0\).*as a tensor"
    ):
        profile_task(task, repeats=1)


def test_a_model_that_needs_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that weights are missing and that a configuration will do."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    # where it has been imported before; it would try for 20 s
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path / "far.py"
    place.write_text(
        "from transformers import AutoModel\n"
        "def task():\n    return AutoModel.from_pretrained('no-such-owner/no-such-model')\n"
    )
    with pytest.raises(InputError, match="download"):
        load(f"{place}:task")


def test_merging_keeps_cheap_cuts_and_even_work() -> None:
    """The cut between the smallest layers goes first; a dear one between cheap ones before it."""
    assert select_cuts([1, 1, 5, 5], [8, 8, 8], 3) == [1, 2]
    assert select_cuts([4, 4, 4, 4], [1, 9, 1], 3) == [0, 2]
    assert select_cuts([3, 3], [1], 5) == [0]
    assert select_cuts([3, 3, 3], [1, 1], 1) == []


@grids.each_value(
    make={
        "gpt2": partial(capture_tasks.gpt2, blocks=1),
        "mlp": capture_tasks.mlp,
        "conv": capture_tasks.conv,
    },
    count=[3, 7, 1],
)
def test_merged_layers_are_the_model(make: object, count: int) -> None:
    """Any number of layers computes the same, and holds every parameter."""
    torch.manual_seed(0)
    task = make()  # type: ignore[operator]
    full, merged = split(task), split(task, max_layers=count)
    assert len(merged.layers) == min(count, len(full.layers))
    names = [set(chosen.values()) for chosen in merged.fqns]
    assert set().union(*names) == set().union(*(set(chosen.values()) for chosen in full.fqns))
    source, _ = task.microbatch(1)
    torch.manual_seed(1)
    want = run_layers(full, (source,))
    torch.manual_seed(1)
    assert torch.equal(run_layers(merged, (source,)), want)


def test_a_plan_of_merged_layers_finds_them_again() -> None:
    """`launch` merges the model as the chain of the plan was."""
    task = capture_tasks.gpt2(blocks=1)
    chain = profile_task(task, repeats=1, warmup=0, max_layers=3)
    plan = pipelines.plan_of([1], [0, 1], "flush", 2, layers=3)
    plan = plan.model_copy(update={"chain": chain, "task_digest": chain.task_digest})
    assert fitting.split_for(plan, task).names == tuple(layer.name for layer in chain.layers)


def test_no_layers_at_all_is_refused() -> None:
    """`max_layers` starts at one."""
    with pytest.raises(InputError, match="max_layers: got 0"):
        split(task_of(Base()), max_layers=0)
