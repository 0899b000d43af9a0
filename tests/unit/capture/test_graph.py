"""Models cut by their graph: the layers in a row are the model, with its own weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from pipeplan import tasks
from pipeplan.capture import agreement, split
from pipeplan.capture.partition.graph_layers import GraphLayer
from pipeplan.capture.user_model.evaluation_mode import in_eval_mode
from pipeplan.capture.user_model.model_call import run_layers
from pipeplan.errors import InputError
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import capture_tasks, grids, short_networks

TASKS: dict[str, Callable[[], Task]] = {
    "gpt2": short_networks.gpt2,
    "gpt2 tied": partial(tasks.gpt2, tied=True),
    "llama": partial(short_networks.llama, blocks=1),
    "t5": short_networks.t5,
    "t5 tied": partial(tasks.t5, tied=True),
    "vit": tasks.vit,
    "resnet": short_networks.resnet,
    "densenet": short_networks.densenet,
    "inception": tasks.inception,
    "unet": partial(tasks.unet, depth=2),
    "mixer": partial(short_networks.mixer, blocks=1),
    "siamese": partial(tasks.siamese, layers=2),
    "crossmodal": partial(tasks.crossmodal, layers=1),
    "gpt2 of transformers": partial(capture_tasks.gpt2, blocks=1),
    "tied gpt2 of transformers": partial(capture_tasks.gpt2, tied=True, blocks=1),
    "llama of transformers": capture_tasks.llama,
}


AGAIN = {"gpt2 tied", "t5 tied", "llama of transformers", "vit", "inception"}
"""Ties, blocks and branches that others of them have, too: long."""


def whole_model(task: Task, source: Tensor, target: Tensor) -> tuple[Tensor, nn.Module]:
    """(output, a copy of the model with its gradients and buffers) of one seeded micro-batch."""
    model = copy.deepcopy(task.model)
    assert isinstance(model, nn.Module)
    torch.manual_seed(5)
    result = model(source)
    output = result if isinstance(result, Tensor) else result.logits
    task.loss(output, target).backward()
    return output, model


def in_a_row(task: Task, model: SplitModel, source: Tensor, target: Tensor) -> Tensor:
    """The output of the layers; their backward has been done."""
    torch.manual_seed(5)
    output = run_layers(model, (source,))
    task.loss(output, target).backward()
    return output


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=(pytest.mark.long,) if name in AGAIN else ())
        for name, make in TASKS.items()
    ],
)
def test_layers_equal_the_model(make: Callable[[], Task]) -> None:
    """Output, gradients and buffers are bit-equal; parameters are the model's objects.

    In eval mode the layers give what the model gives: no dropout, batch norm as learnt.
    """
    torch.manual_seed(0)
    task = make()
    assert isinstance(task.model, nn.Module)
    assert task.model.training
    model = split(task)
    users = dict([*task.model.named_parameters(), *task.model.named_buffers()])
    names = list(task.model.state_dict())
    source, target = task.microbatch(3)
    output, other = whole_model(task, source, target)
    assert torch.equal(in_a_row(task, model, source, target), output)
    for name, parameter in other.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, users[name].grad), name
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, users[name]), name
    for layer, fqns in zip(model.layers, model.fqns, strict=True):
        for local, parameter in layer.named_parameters():
            assert users[fqns[local]] is parameter
            own = ".".join(part.removeprefix("of_") for part in local.split("."))
            assert own.endswith(fqns[local])
    assert list(task.model.state_dict()) == names
    assert len(model.layers) >= 4
    assert task.model.training
    task.model.eval()
    for layer in model.layers:
        layer.eval()
    with torch.no_grad():
        result = task.model(source)
        output = result if isinstance(result, Tensor) else result.logits
        assert torch.equal(run_layers(model, (source,)), output)


@grids.first(1, blocks=[3, 24])
def test_each_block_is_attention_and_mlp(blocks: int) -> None:
    """However many there are: 24 of them take at most 15 seconds of processor time."""
    task = capture_tasks.gpt2(blocks=blocks)
    begin = time.process_time()
    model = split(task)
    assert blocks < 24 or time.process_time() - begin <= 15
    assert len(model.layers) == 2 * blocks + 2
    assert model.names[1:3] == ("transformer.h.0.ln_1..attn", "transformer.h.0.ln_2..mlp")


class Merging(nn.Linear):
    """Adds a low-rank product, which its eval mode has in the weight (as loralib does)."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.low, self.high = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 1))
        self.merged = False

    def train(self, mode: bool = True) -> Self:
        """Merges and parts; the sum may round."""
        super().train(mode)
        if mode == self.merged:
            product = self.high.data @ self.low.data
            self.weight.data += -product if mode else product
            self.merged = not mode
        return self

    def forward(self, value: Tensor) -> Tensor:
        """The sum of both."""
        result = super().forward(value)
        return result if self.merged else result + value @ self.low.t() @ self.high.t()


class Scaling(nn.Linear):
    """Has another factor in eval mode."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = 1.0

    def train(self, mode: bool = True) -> Self:
        """Chooses the factor."""
        self.scale = 1.0 if mode else 0.5
        return super().train(mode)

    def forward(self, value: Tensor) -> Tensor:
        """Scaled."""
        return super().forward(value) * self.scale


class Switching(nn.Module):
    """One of them between others."""

    def __init__(self, kind: Callable[[], nn.Linear]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), kind(), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        """One after the other."""
        result: Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(value)))))
        return result


def to_itself(model: nn.Module, rows: Tensor) -> Task:
    """A task whose model is to return what it is given."""
    return Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=capture_tasks.sgd,
        data=lambda _: (rows, rows),
    )


@pytest.mark.parametrize("kind", [Merging, Scaling])
def test_a_switch_of_the_models_own_is_undone(kind: Callable[[], nn.Linear]) -> None:
    """Weights keep their bits, attributes their values; layers evaluate as the model does."""
    torch.manual_seed(0)
    model, rows = Switching(kind), torch.randn(8, 4)
    attributes = dict(vars(model.middle))
    before = copy.deepcopy(model.state_dict())
    task = to_itself(model, rows)
    made = split(task)
    assert model.training
    assert vars(model.middle) == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for layer in made.layers:
        layer.train(False)
    with torch.no_grad():
        found = run_layers(made, (rows,))
        expected = copy.deepcopy(model).eval()(rows)
    assert isinstance(found, Tensor)
    assert torch.allclose(found, expected, atol=1e-5)


def test_one_that_merges_leaves_the_others_their_switch() -> None:
    """Each module is switched by itself, as a stage does."""
    torch.manual_seed(0)
    model, rows = nn.ModuleDict({"merging": Merging(), "scaling": Scaling()}), torch.randn(8, 4)
    with in_eval_mode(model), torch.no_grad():
        found = model["scaling"](model["merging"](rows))
    assert model["scaling"].scale == 1.0
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()
        assert torch.allclose(found, expected["scaling"](expected["merging"](rows)), atol=1e-5)


class Remembering(nn.Module):
    """Reads a buffer that the same forward has written, in both modes; counts evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("room", torch.zeros(8, 4), persistent=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        """Each row with the one before it."""
        value = torch.tanh(self.first(value))
        self.room.copy_(value.detach().roll(1, 0))
        if not self.training:
            self.seen += 1
            value = value + self.seen
        result: Tensor = self.last(torch.relu(value + self.room))
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_what_is_read_from_a_buffer_is_written_before(trains: bool) -> None:
    """In both graphs; the second forward reads what the first one left."""
    torch.manual_seed(0)
    model, rows = Remembering(), torch.randn(8, 4)
    task = to_itself(model, rows)
    alone = copy.deepcopy(model).train(trains)
    made = split(task)
    for layer in made.layers:
        layer.train(trains)
    with torch.no_grad():
        for _ in range(2):
            found, expected = run_layers(made, (rows,)), alone(rows)
            assert isinstance(found, Tensor)
            assert torch.equal(found, expected)
    assert torch.equal(model.seen, alone.seen)


def test_hooks_of_parameters_are_told() -> None:
    """They see gradients of micro-batches that are not divided yet."""
    model, rows = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    task = to_itself(model, rows)
    assert not any("hooks" in note for note in split(task).notes)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    (said,) = (note for note in split(task).notes if "hooks" in note)
    assert "'0:Linear.weight' (4 parameters have some)" in said


def test_layers_that_evaluate_otherwise_are_refused() -> None:
    """Layers and model are compared in eval mode, too."""
    torch.manual_seed(0)
    model, rows = Remembering(), torch.randn(8, 4)
    task = to_itself(model, rows)
    made = split(task)
    assert agreement(made, task).is_exact
    for layer in made.layers:
        assert isinstance(layer, GraphLayer)
        layer.in_evaluation = layer.in_training
    with pytest.raises(InputError, match="output 0 in eval mode differs by"):
        agreement(made, task)
    assert model.training
