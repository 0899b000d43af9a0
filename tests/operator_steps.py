"""One training step of a module: what it gives, and the most bytes that were alive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeplan.livebytes import LiveBytes
from tests.operator_models import Model


@dataclass(frozen=True)
class Step:
    """All that a step leaves behind."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    of_inputs: list[Tensor | None]
    random: Tensor

    def differs(self, other: Step) -> list[str]:
        """What is not equal bit for bit."""
        names = ("outputs", "gradients", "buffers", "of_inputs")
        found = [
            f"{name}[{index}]"
            for name in names
            for index, (mine, theirs) in enumerate(
                zip(getattr(self, name), getattr(other, name), strict=True)
            )
            if not _equal(mine, theirs)
        ]
        return found if torch.equal(self.random, other.random) else [*found, "random numbers"]


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


class _Gradients(torch.autograd.Function):
    """Stands for all behind the model: hands out gradients, and keeps none."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], end: Tensor, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return end.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, None, *gradients)


def tensors(result: object) -> list[Tensor]:
    """Those in what a module returns."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def step(
    module: nn.Module, model: Model, constants: Sequence[Tensor] = (), fresh: bool = False
) -> tuple[Step, int]:
    """A step of `module`, called as `model` says, and its peak of live bytes.

    Gradients of parameters are there before, unless `fresh`; buffers are put back behind it.
    """
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    sources = [each for each in tensors(model.args)]
    for each in sources:
        each.grad = None
    for parameter in module.parameters():
        parameter.grad = None if fresh or not parameter.requires_grad else _half(parameter)
    torch.manual_seed(11)
    meter = LiveBytes()
    end, one = torch.zeros(()), torch.ones(())
    meter.count([*module.parameters(), *module.buffers(), *sources, *constants])
    meter.count(each.grad for each in module.parameters() if each.grad is not None)
    cast = torch.autocast("cpu", model.cast) if model.cast else nullcontext()
    with meter:
        with cast:
            result = module(*model.args)
        with meter.paused():
            seen = [each.detach().clone() for each in tensors(result)]
            outputs = [each for each in tensors(result) if each.requires_grad]
            generator = torch.Generator().manual_seed(3)
            gradients = [
                torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs
            ]
        # The caller drops what he was given, and autograd what it was given.
        meter.count(gradients)
        del result
        with meter.paused():
            root = _Gradients.apply(gradients, end, *outputs)  # type: ignore[no-untyped-call]
        outputs.clear()
        root.backward(one)
    left = Step(
        seen,
        [each.grad for each in module.parameters()],
        [each.clone() for each in module.buffers()],
        [each.grad for each in sources],
        torch.get_rng_state(),
    )
    with torch.no_grad():
        for name, each in module.named_buffers():
            each.copy_(buffers[name])
    return left, meter.peak


def _half(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, 0.5, requires_grad=False)
