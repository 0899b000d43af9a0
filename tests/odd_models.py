"""Small models that an export or a cut gets wrong in silence, if nobody looks: one quirk each.

Every model takes five rows of six features and gives three scores. `Odd` has a quirk in its
middle, in a module of its own where that is the usual way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Odd(nn.Module):
    """Two linear layers, and between them whatever is odd."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle or nn.Tanh()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(value))))

    def between(self, value: Tensor) -> Tensor:
        return self.middle(value)


class Reverse(torch.autograd.Function):
    """The identity whose gradient is turned round (Ganin, Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Quantize(torch.autograd.Function):
    """Rounds; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.round(4 * value) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Square(torch.autograd.Function):
    """A square whose backward can be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return 2 * gradient * value


class Applied(nn.Module):
    """A linear layer and a function with a backward of its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function.apply(self.linear(value))


class Penalty(nn.Module):
    """Adds the gradient of its own output, so that its backward is a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        with torch.enable_grad():
            value = value if value.requires_grad else value.requires_grad_()
            made = Square.apply(self.linear(value))
            (slope,) = torch.autograd.grad(made.sum(), value, create_graph=True)
        return made + slope


class BoundPenalty(Penalty):
    """Takes a gradient by a name that was bound before anybody watched."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.enable_grad():
            value = value if value.requires_grad else value.requires_grad_()
            made = torch.tanh(self.linear(value)).square()
            (slope,) = grad(made.sum(), value, create_graph=True)
        return value + slope


class WritesAttribute(nn.Module):
    """Adds to a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.total = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        self.total.add_(value.detach().mean(0))
        return self.linear(value) + self.total


class TensorHook(nn.Module):
    """Its output's gradient counts ten times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        if made.requires_grad:
            made.register_hook(lambda gradient: 10 * gradient)
        return made


class RootFunction(Odd):
    """A function with a backward of its own in the model's own forward."""

    def between(self, value: Tensor) -> Tensor:
        return Reverse.apply(value)


class RootBoth(RootFunction):
    """Such a function, and a tensor hook."""

    def between(self, value: Tensor) -> Tensor:
        made = super().between(value)
        if made.requires_grad:
            made.register_hook(lambda gradient: 10 * gradient)
        return made


class RootHook(Odd):
    """A tensor hook in the model's own forward."""

    def between(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            value.register_hook(lambda gradient: 10 * gradient)
        return self.middle(value)


def hooked(kind: str) -> nn.Module:
    """A linear layer in the middle with a hook of some kind."""
    model = Odd(nn.Linear(WIDTH, WIDTH))
    if kind == "forward":
        model.middle.register_forward_hook(lambda _, __, made: 2 * made)
    elif kind == "forward pre":
        model.middle.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    elif kind == "backward":
        model.middle.register_full_backward_hook(lambda _, got, __: (3 * got[0],))
    elif kind == "parameter":
        model.middle.weight.register_hook(lambda gradient: gradient / 2)
    else:
        model.register_forward_hook(lambda _, __, made: 2 * made)
    return model


class Checkpointed(nn.Module):
    """Computes its inside again in its backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.reentrant = reentrant

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(self.inside, value, use_reentrant=self.reentrant)


class LayerDrop(nn.Module):
    """Is skipped now and then, as Python's generator says (Fan et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return value * 1
        return self.linear(value)


class NumpyNoise(nn.Module):
    """Scales by a number that numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value) * float(np.random.rand())


class RootDraw(Odd):
    """Draws in the model's own forward."""

    def between(self, value: Tensor) -> Tensor:
        return self.middle(value) * random.random()


class Counter(nn.Module):
    """Every other call does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(value) * (1 + self.calls % 2)


class CountingList(nn.Module):
    """Grows a list at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, value: Tensor) -> Tensor:
        self.seen.append(len(value))
        return self.linear(value) / len(self.seen)


_CALLS = [0]


class GlobalCounter(Odd):
    """Counts in a global variable, which no module shows."""

    def between(self, value: Tensor) -> Tensor:
        _CALLS[0] += 1
        return self.middle(value) * _CALLS[0]


class MovingAverage(nn.Module):
    """Subtracts a moving average of what it saw, which is a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
        return made - self.mean


class ReplacedBuffer(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        self.mean = 0.9 * self.mean + 0.1 * made.mean(0).detach()
        return made - self.mean


class Borrowed(Odd):
    """Uses a weight of another module through a property."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False))

    @property
    def shared(self) -> Tensor:
        return self.first.weight

    def between(self, value: Tensor) -> Tensor:
        return self.middle(value) @ self.shared


class NoGrad(nn.Module):
    """Part of it is not to be trained through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(value))
        return self.linear(value) * gate


class Straight(nn.Module):
    """Rounds, with the gradient passed by detaching."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        return made + (torch.round(4 * made) / 4 - made).detach()


class Fork(nn.Module):
    """Draws from a generator state of its own and puts the old one back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.rand(WIDTH)
        return self.linear(value) * noise


class OwnGenerator(nn.Module):
    """Draws from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value) * torch.rand(WIDTH, generator=self.generator)


class WritesInput(Odd):
    """Changes the tensor it is given."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.mul_(2))


class Doubles(nn.Module):
    """Changes the tensor it is given, as a first layer that normalizes in place."""

    def forward(self, value: Tensor) -> Tensor:
        return value.mul_(2)


class Branch(nn.Module):
    """Takes one of two ways, as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.one(value) if value.sum() > 0 else self.two(value)


class Aware(nn.Module):
    """Computes in another way when somebody exports it, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        return made if torch.compiler.is_exporting() or torch.compiler.is_compiling() else 2 * made


class Stowaway(nn.Module):
    """Uses a module that it does not own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, value: Tensor) -> Tensor:
        return self.other[0](value)


def stowaway() -> list[nn.Module]:
    """A row whose last layer trains the first one's weights in secret."""
    first = nn.Linear(WIDTH, WIDTH)
    return [first, nn.Tanh(), Stowaway(first), nn.Linear(WIDTH, 3)]


class Own(nn.Module):
    """A checkpointing call of its own, around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __call__(self, *given: Any) -> Any:
        return checkpoint(super().__call__, *given, use_reentrant=False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value))


def compiled(part: str) -> nn.Module:
    """A model of which a part, or all, is compiled; by a backend that computes eagerly."""
    model = Odd(nn.Linear(WIDTH, WIDTH))
    if part == "middle":
        model.middle = torch.compile(model.middle, backend="aot_eager")  # type: ignore[assignment]
        return model
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


class CountsInBuffer(Odd):
    """Assigns a buffer of its own and multiplies with it, so that its backward needs it."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value)
        self.number += 1
        return made * self.number / self.number.sqrt()


class InputAverage(Odd):
    """Subtracts a moving average of its input, which a block under no_grad reads."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(value.mean(0), alpha=0.1)
            shifted = value.clone()
            shifted.sub_(self.mean)
        return super().forward(shifted)


class WritesInputView(Odd):
    """Changes its input in a block under no_grad, by a view."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            value[:, 0].zero_()
        return super().forward(value)


class Teacher(nn.Module):
    """Adds what a frozen copy makes of the input, which follows the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.mul_(0.9).add_(fast, alpha=0.1)
            taught = self.teacher(value)
        return torch.tanh(self.student(value)) + taught


class WatchedTeacher(Teacher):
    """Looks at values, so that no fake pass shows what it does."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value if value.sum() > 0 else -value)


@dataclass
class Schedule:
    """Counts its steps in an object that is no module."""

    steps: int = 0

    def factor(self) -> float:
        self.steps += 1
        return 1.0 / self.steps


class Scheduled(nn.Module):
    """Multiplies with less each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plan = nn.Linear(WIDTH, WIDTH), {"main": Schedule()}

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value) * self.plan["main"].factor()


class Twice(nn.Module):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), value


class OfPair(nn.Module):
    """Takes two tensors as one argument, as an `nn.Sequential` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(pair[0])), pair[1]


class SumOfPair(nn.Module):
    """One tensor of two."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class NamedAsTheGraph(nn.Module):
    """Its modules have names that a module of a graph has for itself, or that are no names."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Linear(WIDTH, WIDTH)
        self.graph = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.code = nn.ModuleDict({"class": nn.Linear(WIDTH, WIDTH), "in": nn.Linear(WIDTH, 3)})

    def forward(self, value: Tensor) -> Tensor:
        return self.code["in"](self.code["class"](self.graph(self.meta(value))))


EXACT: dict[str, Callable[[], nn.Module | list[nn.Module]]] = {
    "gradient reversal": lambda: Odd(Applied(Reverse)),
    "straight-through quantizer": lambda: Odd(Applied(Quantize)),
    "custom Function, differentiable backward": lambda: Odd(Applied(Square)),
    "double backward inside": lambda: Odd(Penalty()),
    "gradient inside by a bound name": lambda: Odd(BoundPenalty()),
    "tensor hook": lambda: Odd(TensorHook()),
    "forward hook": lambda: hooked("forward"),
    "forward pre-hook": lambda: hooked("forward pre"),
    "backward hook": lambda: hooked("backward"),
    "parameter hook": lambda: hooked("parameter"),
    "checkpoint": lambda: Odd(Checkpointed(reentrant=False)),
    "reentrant checkpoint": lambda: Odd(Checkpointed(reentrant=True)),
    "checkpointing call": lambda: Odd(Own()),
    "scripted module": lambda: Odd(torch.jit.script(nn.Linear(WIDTH, WIDTH))),
    "compiled module": lambda: compiled("middle"),
    "compiled model": lambda: compiled("all"),
    "counter in forward": lambda: Odd(Counter()),
    "names of a graph's module": NamedAsTheGraph,
    "list that grows": lambda: Odd(CountingList()),
    "spectral norm": lambda: Odd(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm by a hook": lambda: Odd(spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "weight norm": lambda: Odd(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "weight norm by a hook": lambda: Odd(weight_norm(nn.Linear(WIDTH, WIDTH))),
    "moving average": lambda: Odd(MovingAverage()),
    "batch norm": lambda: Odd(nn.BatchNorm1d(WIDTH)),
    "counter that is a buffer": CountsInBuffer,
    "moving average of the input": InputAverage,
    "teacher in a Sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Teacher(), nn.Linear(WIDTH, 3)
    ),
    "teacher that looks at values": lambda: Odd(WatchedTeacher()),
    "no_grad inside": lambda: Odd(NoGrad()),
    "detach trick": lambda: Odd(Straight()),
    "forked generator": lambda: Odd(Fork()),
    "branch on values": lambda: Odd(Branch()),
    "asks whether it is exported": lambda: Odd(Aware()),
    "Function in the model's forward": RootFunction,
    "input changed in place in a Sequential": lambda: nn.Sequential(
        Doubles(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    ),
    "hooks in a Sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), TensorHook(), Applied(Reverse), nn.Linear(WIDTH, 3)
    ),
    "pairs in a Sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Twice(), OfPair(), SumOfPair(), nn.Linear(WIDTH, 3)
    ),
    "counter in an object": lambda: Odd(Scheduled()),
    "counter in an object, in a Sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Scheduled(), nn.Linear(WIDTH, 3)
    ),
    "counter in a list": lambda: [nn.Linear(WIDTH, WIDTH), Counter(), nn.Linear(WIDTH, 3)],
}
"""Trained bit for bit as a plain loop does."""

TIED: dict[str, Callable[[], nn.Module | list[nn.Module]]] = {
    "teacher": lambda: Odd(Teacher()),
    "weight tied by a property": Borrowed,
}
"""The same, where gradients of one parameter are added up layer by layer."""

DRAWN: dict[str, Callable[[], nn.Module | list[nn.Module]]] = {
    "LayerDrop": lambda: Odd(LayerDrop()),
    "LayerDrop in a list": lambda: [nn.Linear(WIDTH, WIDTH), LayerDrop(), nn.Linear(WIDTH, 3)],
    "noise of numpy": lambda: Odd(NumpyNoise()),
}
"""The same, where each layer begins with generators set for it."""

REFUSED: dict[str, tuple[Callable[[], nn.Module | list[nn.Module]], str]] = {
    "Function and hook in the model's forward": (RootBoth, r"hook of a tensor at odd_models"),
    "tensor hook in the model's forward": (RootHook, r"hook of a tensor at odd_models\.py:\d+"),
    "hook of the whole model": (lambda: hooked("model"), "has a hook"),
    "draw in the model's forward": (RootDraw, "Python's or numpy's generator"),
    "counter in a global variable": (GlobalCounter, "do not train as the model does"),
    "generator of its own": (lambda: Odd(OwnGenerator()), "got a Generator, need tensors only"),
    "generator of its own in a list": (
        lambda: [nn.Linear(WIDTH, WIDTH), OwnGenerator(), nn.Linear(WIDTH, 3)],
        r"differs by .* \(let it draw from torch's, without generator=\)",
    ),
    "attribute written into in a list": (
        lambda: [nn.Linear(WIDTH, WIDTH), WritesAttribute(), nn.Linear(WIDTH, 3)],
        r"differs by .* plain attribute \(register_buffer it\)",
    ),
    "input changed in place": (WritesInput, "writes into the model's input"),
    "input changed under no_grad": (WritesInputView, "writes into the model's input"),
    "lazy module": (lambda: Odd(nn.LazyLinear(WIDTH)), "lazy"),
    "module of another layer": (stowaway, "not among its own"),
    "hook of a Sequential": (
        lambda: _with_hook(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))),
        "has a hook",
    ),
    "buffer replaced": (lambda: Odd(ReplacedBuffer()), "stores tensors in its attributes|buffer"),
}


def _with_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda _, __, made: 2 * made)
    return model
