"""Models and data as people have them: nested inputs, several outputs, losses of their own."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.runtime.data.feed import Uses
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import Task
from pipeplan.testing.in_process import run_ranks
from tests import grids, launch_task

RANKS, STEPS, ROWS = 2, 2, 4
Row = namedtuple("Row", "first second")


class Towers(nn.Module):
    """Two towers, for words and for an image whose rows arrive transposed, and how alike they are.

    With `classes` it computes its loss itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.read = nn.Linear(6, 6)
        self.see = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6)])
        self.last = nn.Linear(6, 3)

    def forward(
        self,
        words: Tensor,
        image: Tensor,
        mask: Tensor | None = None,
        classes: Tensor | None = None,
        *,
        strength: float = 1.0,
    ) -> dict[str, Any]:
        read = torch.tanh(self.read(self.words(words)))
        if mask is not None:
            read = read * mask[..., None]
        text = read.mean(1)
        seen = torch.relu(self.see[0](image.transpose(1, 2))).transpose(1, 2)
        seen = self.see[1](seen.transpose(1, 2)).mean(1)
        logits = self.last(text * seen * strength)
        loss = None if classes is None else nn.functional.cross_entropy(logits, classes)
        return {"loss": loss, "logits": logits, "both": (text, seen)}


def batch(number: int) -> dict[str, Any]:
    """Arguments by name: integers, floats, a mask that only the second half reads, a number."""
    generator = torch.Generator().manual_seed(number)
    return {
        "words": torch.randint(9, (ROWS, 7), generator=generator),
        "image": torch.randn(ROWS, 5, 6, generator=generator),
        "mask": (torch.rand(ROWS, 7, generator=generator) > 0.3).float(),
        "strength": 0.5,
    }


def classes(number: int) -> Tensor:
    """What the loss compares with."""
    return torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(number + 1000))


def several(output: Mapping[str, Any], target: Mapping[str, Tensor]) -> Tensor:
    """A loss of all outputs and of two targets."""
    text, seen = output["both"]
    wrong = nn.functional.cross_entropy(output["logits"], target["classes"])
    return wrong + target["weight"] * (text - seen).square().mean()


def by_name() -> Task:
    """Several outputs, arguments by name, a nested target."""
    return task_of(
        several, lambda n: (batch(n), {"classes": classes(n), "weight": torch.tensor(0.25)})
    )


def in_any_order() -> Task:
    """The same, whose dicts have another order in every second micro-batch."""
    usual = by_name()

    def data(number: int) -> tuple[Any, Any]:
        turned = reversed if number % 2 else list
        return tuple(dict(turned(part.items())) for part in usual.data(number))  # type: ignore[return-value]

    return replace(usual, data=data)


def by_place() -> Task:
    """The same, arguments in a row."""

    def data(number: int) -> tuple[Any, Any]:
        given = batch(number)
        row = given["words"], given["image"], given["mask"]
        return row, {"classes": classes(number), "weight": torch.tensor(0.25)}

    return task_of(several, data)


def own_loss() -> Task:
    """The model has a loss of its own; data are a tokenizer's kind of dict."""
    return task_of(None, lambda n: UserDict({**batch(n), "classes": classes(n)}))


def task_of(loss: Callable[..., Tensor] | None, data: Callable[[int], Any]) -> Task:
    """A task on towers with the same weights each time."""
    torch.manual_seed(0)
    return Task(
        model=Towers(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=data,
    )


class Heads(nn.Module):
    """Whatever is named makes one row of features, in the order given; two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleDict({"size": nn.Linear(6, 2), "kind": nn.Linear(6, 2)})

    def forward(self, **features: Tensor) -> dict[str, Tensor]:
        trunk = torch.tanh(self.trunk(torch.cat(list(features.values()), -1)))
        return {name: head(trunk) for name, head in self.heads.items()}


def in_order() -> Task:
    """Dicts whose order tells: of inputs, and of targets that meet outputs one by one."""

    def data(number: int) -> tuple[Any, Any]:
        left, right = torch.randn(2, ROWS, 4, generator=torch.Generator().manual_seed(number))
        return {"wide": left, "deep": right}, {"size": left[:, :2], "kind": right[:, :2] + 1}

    def one_by_one(output: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        pairs = zip(output.values(), target.values(), strict=True)
        return torch.stack([(one - other).square().mean() for one, other in pairs]).sum()

    torch.manual_seed(0)
    return replace(task_of(one_by_one, data), model=Heads())


TASKS = {
    "in order": in_order,
    "in any order": in_any_order,
    "by name": by_name,
    "by place": by_place,
    "own loss": own_loss,
}


@cache
def chain(name: str) -> Chain:
    """Of one of the tasks."""
    return launch_task.leveled(profile_task(TASKS[name](), repeats=1, warmup=0))


def plain(task: Task, steps: int, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The loop that everyone writes: mean losses and final weights."""
    model = copy.deepcopy(task.model)
    assert isinstance(model, nn.Module)
    optimizer = task.optimizer(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        found = []
        for number in range(step * microbatches, (step + 1) * microbatches):
            source, target = (task.data(number), None) if not task.loss else task.data(number)
            output = model(*source) if isinstance(source, tuple) else model(**source)
            loss = task.loss(output, target) if task.loss else output["loss"]
            loss.backward()
            found.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= microbatches
        optimizer.step()
        losses.append(sum(found) / microbatches)
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("name", TASKS)
def test_trains_as_the_plain_loop_does(name: str) -> None:
    """Two ranks, two steps: losses and weights to the bit."""
    task = TASKS[name]()
    plan = launch_task.plan_of(chain(name), RANKS, "flush")
    losses, weights = plain(task, STEPS, plan.microbatches)
    tasks = [replace(task, model=copy.deepcopy(task.model)) for _ in range(RANKS)]

    def body(transport: Transport) -> tuple[list[float], dict[str, Any]]:
        with Pipeline(tasks[transport.rank], plan, transport=transport) as pipeline:
            return pipeline.run(STEPS), copy.deepcopy(pipeline.state_dict())

    told = run_ranks(RANKS, body)
    assert next(found for found, _ in told if found) == losses
    found = {key: value for _, state in told for key, value in state.items()}
    for key, value in weights.items():
        assert torch.equal(found[f"model.{key}"], value), key


@grids.first(1, semantics=["2bw", "flush"])
def test_batches_of_a_script(semantics: Semantics) -> None:
    """`step` cuts nested batches as the task would have given them; a dict in any order."""
    plan = launch_task.plan_of(chain("own loss"), RANKS, semantics)
    parts = [own_loss().microbatch(number)[0] for number in range(plan.microbatches)]
    tasks = {given: [own_loss() for _ in range(RANKS)] for given in (False, True)}
    names = [name for name in reversed(parts[0]) if name != "strength"]
    whole = {name: torch.cat([part[name] for part in parts]) for name in names}

    def body(transport: Transport, *, given: bool) -> float | None:
        with Pipeline(tasks[given][transport.rank], plan, transport=transport) as pipeline:
            return pipeline.step({**whole, "strength": 0.5} if given else None)

    told = [
        run_ranks(RANKS, lambda transport, given=given: body(transport, given=given))
        for given in (False, True)
    ]
    assert told[0] == told[1]
    assert any(told[0])


def test_each_rank_gets_what_it_needs() -> None:
    """The first layer takes the words alone; image and mask go to the layers that read them."""
    model = split(by_name())
    names = [name for name in batch(0) if name != "strength"]
    assert [names[place] for place in model.entering] == ["words"]
    assert len(model.boundaries[0]) == 1
    readers = {
        name: [layer for layer in range(len(model.layers)) if place in model.fed_to(layer)]
        for place, name in enumerate(names)
    }
    assert not readers["words"]
    assert len(readers["image"]) == 1
    assert readers["mask"]
    plan = launch_task.plan_of(chain("by name"), RANKS, "flush")
    for rank in range(RANKS):
        layers = {i for stage in plan.hosted(rank) for i in range(stage.first, stage.last + 1)}
        uses = Uses.of(plan, model, rank)
        for place, name in enumerate(names):
            wanted = len(layers.intersection(readers[name])) + (name == "words" and 0 in layers)
            assert uses.inputs[place] == wanted
        assert uses.targets == (len(model.layers) - 1 in layers)


def test_what_is_no_tensor_stays_the_same() -> None:
    """A number that changes from micro-batch to micro-batch would be ignored: it is refused."""
    plan = launch_task.plan_of(chain("own loss"), 1, "flush")
    same = own_loss()

    def data(number: int) -> Any:
        return {**same.data(number), "strength": 0.5 if number < 3 else 0.7}

    with (
        Pipeline(replace(same, data=data), plan) as pipeline,
        pytest.raises(InputError, match=r"data\(3\).*strength=0.7.*need.*strength=0.5"),
    ):
        pipeline.run(1)


def test_data_come_in_plain_containers() -> None:
    """Mappings are dicts in the same order; rows stay rows; tensors are copies."""
    one, two = torch.ones(2), torch.zeros(3)
    given = UserDict({"b": [one, None], "a": Row(two, 1.5)}), (one, {"x": "text"})
    source, target = replace(by_name(), data=lambda _: given).microbatch(0)
    assert list(source) == ["b", "a"]
    assert isinstance(source["a"], Row)
    assert source["a"].second == 1.5
    assert source["b"][1] is None
    assert target[1] == {"x": "text"}
    assert torch.equal(source["b"][0], one)
    assert source["b"][0].data_ptr() != one.data_ptr()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (({"x": np.ones(2)}, torch.ones(1)), r"input\['x'\]: got a ndarray.*torch.as_tensor"),
        ((torch.eye(2).to_sparse(), torch.ones(1)), r"input: got a tensor of layout.*to_dense"),
        ((torch.ones(1), [object()]), r"target\[0\]: got a object, need a tensor"),
    ],
)
def test_what_no_stage_can_be_given_is_refused(given: object, why: str) -> None:
    """The message names the place and what would do."""
    with pytest.raises(InputError, match=why):
        replace(by_name(), data=lambda _: given).microbatch(0)


def test_the_samples_are_those_of_the_first_input_that_has_elements() -> None:
    """One without is data as any other is; a micro-batch of nothing is refused."""
    rows = (torch.zeros(0, 3), torch.ones(ROWS, 3))

    class Second(nn.Linear):
        def forward(self, nothing: Tensor, rows: Tensor) -> Tensor:
            return super().forward(rows).mean() + nothing.sum()

    def task(*rows: Tensor) -> Task:
        return replace(own_loss(), model=Second(3, 1), loss=torch.sub, data=lambda _: (rows, 1.0))

    assert split(task(*rows)).microbatch_size == ROWS
    with pytest.raises(InputError, match=r"data\(0\): got inputs of shape \[0, 3\], \[0, 3\]"):
        split(task(rows[0], rows[0]))


def test_a_model_without_a_loss_is_refused() -> None:
    """It says how a model gives one."""
    task = replace(own_loss(), data=batch)
    with pytest.raises(InputError, match=r"loss=None: the model returned a dict without a loss"):
        split(task)


def test_layers_in_a_row_take_no_names() -> None:
    """The first of several modules gets a row of tensors."""
    task = replace(by_name(), model=[nn.Linear(5, 5), nn.Linear(5, 1)])
    with pytest.raises(InputError, match="need a tensor or a tuple of tensors"):
        split(task)
