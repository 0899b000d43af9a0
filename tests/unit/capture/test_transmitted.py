"""Parameters that pass from layer to layer (`tied="transmit"`): the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import agreement, profile_task, split
from pipeplan.errors import InputError
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import pipelines
from tests.captured import captured, chain_of

WORDS, WIDTH, M, STEPS = 7, 6, 4, 2


class Texts(nn.Module):
    """Words to words: the table of words is the last layer's weight, too, and scales a block."""

    def __init__(self, *, twice: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.words.weight.requires_grad_(not frozen)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.passes = 2 if twice else 1
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        rows = self.words(ids)
        for _ in range(self.passes):
            for block in self.blocks:
                rows = rows + torch.tanh(block(rows))
        result: Tensor = self.head(rows)
        return result


class Normed(nn.Module):
    """A weight that each forward scales to length 1, in place, before it is read; read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows."""
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        rows = torch.tanh(self.first(rows) @ self.weight)
        result: Tensor = self.second(rows) @ self.weight
        return result


class Views(nn.Module):
    """A table that is read through a transpose, made before all else, and through slices."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        turned, head, tail = self.words.weight.t(), *self.words.weight.split([3, WORDS - 3])
        rows = self.words(ids)
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        rows = torch.tanh(rows @ head.t()) @ head + torch.tanh(rows @ tail.t()) @ tail
        return rows @ turned


class _Times(torch.autograd.Function):
    """A product that no graph holds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight.t(), rows.t() @ gradient


class Product(nn.Module):
    """Stays eager."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows."""
        result: Tensor = _Times.apply(rows, self.weight)
        return result


class Eager(nn.Module):
    """A weight of an eager module that two layers of the graph read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.product = Product()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows."""
        rows = torch.tanh(self.first(rows)) @ self.product.weight
        rows = torch.tanh(self.product(rows))
        result: Tensor = self.second(rows) @ self.product.weight
        return result


class Otherwise(nn.Module):
    """Reads a shared weight in another place when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows."""
        if not self.training:
            rows = rows + self.first.weight[0]
        result: Tensor = self.second(torch.tanh(self.first(rows))) @ self.first.weight
        return result


class Regular(nn.Module):
    """Returns one of its weights beside the rows, for a loss that keeps it small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows, and the first weight."""
        return self.second(torch.relu(self.first(rows))), self.first.weight


def words(number: int) -> tuple[Tensor, Tensor]:
    """Ids, and those that follow."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(WORDS, (3, 5), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Rows, and rows."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Of all words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def regular(result: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Squares, those of the weight too."""
    return nn.functional.mse_loss(result[0], target) + result[1].square().mean()


def sequence() -> nn.Sequential:
    """Linear layers, the outer two of which share a weight."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    layers[3].weight = layers[0].weight
    return nn.Sequential(*layers)


def twice_in_sequence() -> nn.Sequential:
    """One layer at two places."""
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer)


def texts(*, twice: bool = False, frozen: bool = False) -> Task:
    """The task of `Texts`."""
    return task_of(lambda: Texts(twice=twice, frozen=frozen), words, cross_entropy)


def task_of(
    make: Callable[[], nn.Module],
    data: Callable[[int], tuple[Tensor, Tensor]] = rows,
    loss: Callable[..., Tensor] = nn.functional.mse_loss,
) -> Task:
    """With the same weights at each call."""
    torch.manual_seed(0)
    return Task(
        model=make(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=data,
        tied="transmit",
    )


TASKS: dict[str, Callable[[], Task]] = {
    "words twice": texts,
    "blocks twice": lambda: texts(twice=True),
    "a weight that is returned": lambda: task_of(Regular, loss=regular),
    "a sequence": lambda: task_of(sequence),
    "read otherwise in eval mode": lambda: task_of(Otherwise),
    "views": lambda: task_of(Views, words, cross_entropy),
    "a layer twice": lambda: task_of(twice_in_sequence),
}


def plain_loop(task: Task, share: int = M) -> dict[str, Tensor]:
    """Weights after all steps of the model in one piece; losses are divided by `share`.

    What is left to divide, the sums are divided by.
    """
    assert isinstance(task.model, nn.Module)
    assert task.loss
    optimizer = task.optimizer(task.model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * M, (step + 1) * M):
            source, target = task.data(number)
            (task.loss(task.model(source), target) / share).backward()
        for parameter in task.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(M // share)
        optimizer.step()
    return {name: value.detach() for name, value in task.model.named_parameters()}


def shared(model: SplitModel) -> list[str]:
    """Parameters that several layers have."""
    names = [name for layer in model.fqns for name in {*layer.values()}]
    return sorted({name for name in names if names.count(name) > 1})


@pytest.mark.parametrize("name", TASKS)
def test_a_run_has_the_bits_of_a_plain_loop(name: str) -> None:
    """Wherever one cut is, and with all of them; split backwards where a profile allows them."""
    expected = plain_loop(TASKS[name]())
    model, _ = captured(TASKS[name])
    count = len(model.layers)
    assert not shared(model)
    assert not model.notes
    layers = chain_of(TASKS[name]).layers
    splits = {at for at, layer in enumerate(layers) if layer.saved_for_weight_bytes is not None}
    for cuts in [range(1, count), *([cut] for cut in range(2, count))]:
        gpus = [index % 2 for index in range(len(cuts) + 1)]
        plan = pipelines.plan_of([*cuts], gpus, "flush", M, layers=count)
        spans = {stage.id: range(stage.first, stage.last + 1) for stage in plan.stages}
        stages = [stage for stage, span in spans.items() if splits.issuperset(span)]
        for each in (plan, pipelines.split_backwards(plan, stages)):
            model, task = captured(TASKS[name])
            pattern = pipelines.pattern_of(each, period=3)
            got = pipelines.train(each, pattern, model, task, STEPS).weights
            for tensor, value in expected.items():
                assert torch.equal(got[tensor], value), (tensor, cuts)


def test_hooks_hear_one_sum() -> None:
    """A hook on a parameter that passes hears the gradient of all layers, as in a plain loop."""

    def make() -> Task:
        task = texts()
        assert isinstance(task.model, Texts)
        task.model.words.weight.register_hook(lambda gradient: gradient.sign() * 2**-6)
        return task

    expected = plain_loop(make(), share=1)
    task = make()
    model = split(task)
    count = len(model.layers)
    plan = pipelines.plan_of([1, 2], [0, 1, 0], "flush", M, layers=count)
    pattern = pipelines.pattern_of(plan, period=3)
    got = pipelines.train(plan, pattern, model, task, STEPS).weights
    for tensor, value in expected.items():
        assert torch.equal(got[tensor], value), tensor


@pytest.mark.parametrize("name", TASKS)
def test_layers_agree_with_the_model(name: str) -> None:
    """In both modes; colocated ones share parameters."""
    task = TASKS[name]()
    model, source = split(task), task.data(0)[0]
    assert agreement(model, task).is_exact
    assert shared(split(replace(TASKS[name](), tied="colocate"), evaluates=False))
    assert isinstance(task.model, nn.Module)
    value: Tensor | tuple[Tensor, ...] = source
    for layer in model.layers:
        layer.eval()
        value = layer(*(value if isinstance(value, tuple) else (value,)))
    expected = task.model.eval()(source)
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (value, expected))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_copy_rides_along() -> None:
    """Boundaries between the first and the last use carry the weight, with a gradient."""
    model = split(texts())
    assert [name for layer in model.fqns for name in {*layer.values()}].count("words.weight") == 1
    size = WORDS * WIDTH
    passing = [
        [spec for spec in boundary if spec.shape == (WORDS, WIDTH)]
        for boundary in model.boundaries
    ]
    assert [len(specs) for specs in passing] == [0, *[1] * (len(model.layers) - 1)]
    assert all(spec.differentiable for specs in passing for spec in specs)
    chain = profile_task(texts(), repeats=1, warmup=0)
    plain = profile_task(replace(texts(), tied="colocate"), repeats=1, warmup=0)
    assert (chain.tied, plain.tied) == ("transmit", "colocate")
    assert profile_task(task_of(lambda: nn.Linear(WIDTH, WIDTH)), repeats=1, warmup=0).tied == (
        "colocate"
    )
    assert sum(each.gradient_bytes for each in chain.layers) == (
        sum(each.gradient_bytes for each in plain.layers) - 4 * size
    )


def test_what_cannot_pass_stays_shared() -> None:
    """Frozen weights need no sum, written ones no copy that is old; eager modules read theirs."""
    assert shared(split(texts(frozen=True))) == ["words.weight"]
    task = task_of(Normed)
    model = split(task)
    assert "weight" in {name for layer in model.fqns for name in layer.values()}
    assert agreement(model, task).is_exact
    task = task_of(Eager)
    model = split(task)
    assert shared(model) == ["product.weight"]
    assert "share a parameter" in model.notes[-1]
    assert agreement(model, task).is_exact


def test_lists_are_refused() -> None:
    """A list of layers may do what no graph holds; without shared parameters nothing is asked."""
    task = task_of(sequence)
    assert isinstance(task.model, nn.Sequential)
    with pytest.raises(InputError, match="got 'transmit' and a list of layers, of which 0 and 3"):
        split(replace(task, model=[*task.model]))
    with pytest.raises(InputError, match="a list of layers, of which 0 and 4 share a parameter"):
        split(replace(task, model=[*twice_in_sequence()]))
    assert len(split(replace(task, model=[nn.Linear(WIDTH, WIDTH)])).layers) == 1
    with pytest.raises(InputError, match="task: tied: got 'send', need one of 'colocate'"):
        replace(task, tied="send")
