"""Parts that graphs and loops find hard: functions, draws, branches, compilers, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pipeplan.task import Task
from tests.zoo.architecture import WORDS, Architecture, classes, floats, sgd, supervised

WIDTH = 16


def mlp(inside: int, outside: int, wide: int = 32) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inside, wide), nn.GELU(), nn.Linear(wide, outside))


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    return floats(number, WIDTH), classes(number, 5)


def same(number: int) -> tuple[Tensor, None]:
    """No target."""
    return floats(number, WIDTH), None


class Clamped(torch.autograd.Function):
    """Clamps; its gradient passes where a clamp has none."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clamp(-0.1, 0.1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Between(nn.Module):
    """Three layers, and something between them."""

    def __init__(self, middle: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.middle = mlp(WIDTH, WIDTH), mlp(WIDTH, 5), middle

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(value))))


class Applies(nn.Module):
    """The Function in a module, behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return Clamped.apply(self.linear(value))


class Equilibrium(nn.Module):
    """Repeats a layer until it does not change any more (Bai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        state = torch.zeros_like(value)
        for _ in range(20):
            after = torch.tanh(0.3 * self.linear(state) + value)
            if (after - state).abs().max() < 1e-2:
                break
            state = after
        return after


class Quantized(nn.Module):
    """The nearest of some vectors, whose gradient passes (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        chosen = self.codes(torch.cdist(value, self.codes.weight).argmin(-1))
        return value + (chosen - value).detach() + 0.1 * (chosen - value.detach())


class Depth(nn.Module):
    """Is left out now and then, as torch's generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.5:
            return value
        return value + self.inner(value)


class Checkpoints(nn.Module):
    """Computes its inside again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + checkpoint(self.inner, value, use_reentrant=False)


class Lora(nn.Module):
    """A fixed layer and a low-rank change of it (Hu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.base(value) + self.up(self.down(value))


class Hyper(nn.Module):
    """A network that makes the weights of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.last = mlp(WIDTH, WIDTH * 8), nn.Linear(8, 5)

    def forward(self, value: Tensor) -> Tensor:
        weights = self.maker(value).view(-1, 8, WIDTH)
        return self.last(torch.bmm(weights, value[:, :, None]).squeeze(-1))


def scripted() -> nn.Module:
    """A scripted block in the middle."""
    return Between(torch.jit.script(mlp(WIDTH, WIDTH)))


def compiled() -> nn.Module:
    """A compiled block in the middle, by torch's own compiler."""
    return Between(torch.compile(mlp(WIDTH, WIDTH)))  # type: ignore[arg-type]


def lazy(*, called: bool) -> nn.Module:
    """Layers that find out their width when they are called first."""
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(5))
    if called:
        model(rows(0)[0])
    return model


def halves() -> nn.Module:
    """In bfloat16."""
    return Between(nn.Sequential(mlp(WIDTH, WIDTH), nn.LayerNorm(WIDTH))).bfloat16()


def sparse_gradients() -> Task:
    """A table whose gradients are sparse."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Flatten(), mlp(4 * WIDTH, 5))
    return Task(model=model, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                data=lambda n: (classes(n, WORDS, 4), classes(n, 5)))  # fmt: skip


PARTS = (
    Architecture(
        "custom Function in a module", supervised(lambda: Between(Applies()), cross_entropy, rows)
    ),
    Architecture(
        "custom Function in the forward",
        supervised(lambda: Between(Clamped.apply), cross_entropy, rows),
    ),
    Architecture(
        "deep equilibrium, stops by value",
        supervised(lambda: Between(Equilibrium()), cross_entropy, rows),
    ),
    Architecture(
        "vector quantization, straight through",
        supervised(lambda: Between(Quantized()), cross_entropy, rows),
    ),
    Architecture(
        "stochastic depth, drawn",
        supervised(lambda: Between(Depth()), cross_entropy, rows),
        draws=True,
    ),
    Architecture(
        "gradient checkpointing", supervised(lambda: Between(Checkpoints()), cross_entropy, rows)
    ),
    Architecture(
        "low-rank adapters on a fixed network",
        supervised(lambda: Between(Lora()), cross_entropy, rows),
    ),
    Architecture("hypernetwork", supervised(Hyper, cross_entropy, rows)),
    Architecture("scripted block", supervised(scripted, cross_entropy, rows)),
    Architecture("compiled block", supervised(compiled, cross_entropy, rows)),
    Architecture(
        "lazy modules",
        supervised(lambda: lazy(called=False), cross_entropy, rows),
        "the model called once before the task is returned",
        supervised(lambda: lazy(called=True), cross_entropy, rows),
    ),
    Architecture(
        "bfloat16",
        supervised(
            halves,
            lambda made, target: cross_entropy(made.float(), target),
            lambda n: (rows(n)[0].bfloat16(), rows(n)[1]),
        ),
    ),
    Architecture(
        "autocast to bfloat16",
        lambda: Task(
            model=Between(mlp(WIDTH, WIDTH)),
            loss=cross_entropy,
            optimizer=sgd,
            data=rows,
            autocast=torch.bfloat16,
        ),
    ),
    Architecture(
        "sparse gradients of a table",
        sparse_gradients,
        reason="gradients add up in dense sums, which the optimizer steps; a plain loop adds every"
        " part of a sparse gradient to its row by itself",
    ),
    Architecture(
        "list of layers",
        supervised(
            lambda: [mlp(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), mlp(WIDTH, 5)], cross_entropy, rows
        ),
    ),
)
