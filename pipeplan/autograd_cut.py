"""Where a graph of layers begins and ends, such that autograd alone decides what stays alive.

`capture` measures layers and `runtime` runs stages between the same two ends: a prediction and
what it predicts must keep the same tensors. Hence it lies below both, beside `livebytes`.

A leaf that requires a gradient is kept by its own gradient accumulator, and a gradient passed to
`backward()` is kept by the caller: either would hold bytes that the memory model
(docs/reference/model.md, M2-M5) says are gone. `enter` and `leave` avoid both: the graph knows
only a `Slot`, and tensors pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Slot:
    """Holds gradients between the executor and a graph; whoever takes them, owns them."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Hand `tensors` over."""
        self._tensors = list(tensors)

    def take(self) -> list[Tensor] | None:
        """The tensors, which the slot forgets; None if nothing was put."""
        tensors, self._tensors = self._tensors, None
        return tensors


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, trigger: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.slot.put(gradients)
        return (None, None, *(None for _ in gradients))


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, *tensors: Tensor) -> Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.slot.take())


_TRIGGER = torch.empty(0, requires_grad=True)


def enter(slot: Slot, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same storages as inputs of a new graph, whose backward puts their gradients into `slot`.

    Args:
        slot: gets one gradient per tensor, zeros where the graph does not use it.
        tensors: floating-point tensors of the boundary; not kept by the graph.
    """
    result: tuple[Tensor, ...] = _Entry.apply(slot, _TRIGGER, *tensors)  # type: ignore[no-untyped-call]
    return result


def enter_some(slot: Slot, tensors: Sequence[Tensor], flags: Sequence[bool]) -> tuple[Tensor, ...]:
    """`tensors` in their order, of which those with a flag `enter` a new graph."""
    chosen = [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]
    entered = iter(enter(slot, chosen) if chosen else ())
    pairs = zip(tensors, flags, strict=True)
    return tuple(next(entered) if flag else tensor for tensor, flag in pairs)


def leave(slot: Slot, tensors: Sequence[Tensor]) -> Tensor:
    """A root of zero bytes for the graph behind `tensors`, which it does not keep.

    `run_backward(root)` takes one gradient per tensor out of `slot`.
    """
    root: Tensor = _Exit.apply(slot, *tensors)  # type: ignore[no-untyped-call]
    return root


def run_backward(root: Tensor) -> None:
    """Backward through the graph of `root`; saved tensors are released on the way."""
    torch.autograd.backward((root,), (root.new_empty(0),))
