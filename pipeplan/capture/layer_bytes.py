"""What one layer holds: saved by autograd in three parts, and the working bytes beyond them.

The layer runs alone, as a stage of its own runs in the runtime: nothing but autograd keeps its
input, output or gradients alive. So what lives is what a rank will hold, and the workspaces are
what the formula (M3) of docs/model.md does not explain already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.capture.trace import call, check_loss
from pipeplan.livebytes import LiveBytes, key

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch, named as in `pipeplan.chain.Layer`."""

    output: int
    output_gradient: int
    saved_input: int
    saved: int
    saved_output: int
    forward_workspace: int
    backward_workspace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One layer with the data to run it on."""

    name: str
    layer: nn.Module
    inputs: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    """Per input: whether a gradient is sent back for it."""
    loss: tuple[Loss, Tensor] | None = None
    """For the last layer: the loss function and its target."""


def measure(run: LayerRun) -> LayerBytes:
    """Runs forward and backward of one layer and counts what lives.

    Saved: the storages that are alive between forward and backward. Those of the input count as
    saved input (also where the output shares them), those of the output as saved output, all
    others (the target among them) as saved; parameters, buffers and gradient buffers not at all.
    Working bytes are the measured peak minus what (M3) counts for a stage of this layer alone,
    never below zero:

        forward_workspace  = peak(F) - (input + saved + output)
        backward_workspace = peak(B) - (saved, all parts + gradients of output and input)

    The parameters need gradient buffers already: adding to them is part of the backward.
    """
    states = [*run.layer.parameters(), *run.layer.buffers()]
    live = LiveBytes([*states, *(state.grad for state in states if state.grad is not None)])
    with live:
        # The first run shows what a layer makes once and keeps (tables, caches): no cost of a
        # micro-batch, so only the second one counts.
        _run(run, live)
        return _run(run, live)


@dataclass(slots=True, kw_only=True)
class _Between:
    """What is known of one micro-batch between its forward and its backward."""

    root: Tensor | None
    peak: int
    inputs: _Storages
    outputs: _Storages
    output_bytes: int
    gradients: list[tuple[torch.Size, torch.dtype]]


class _Storages:
    """Storages of some tensors, watched without keeping them alive."""

    def __init__(self, tensors: Iterable[Tensor], without: _Storages | None = None) -> None:
        found = {key(tensor): tensor.untyped_storage() for tensor in tensors}
        for storage in without.living() if without else ():
            found.pop(id(storage), None)
        self._found = [weakref.ref(storage) for storage in found.values()]

    def living(self) -> list[torch.UntypedStorage]:
        """Those that are still alive."""
        return [storage for reference in self._found if (storage := reference()) is not None]

    def alive(self) -> int:
        """Bytes of those that are still alive."""
        return sum(storage.nbytes() for storage in self.living())


class _Entry(torch.autograd.Function):
    """Passes tensors on; puts their gradients into a list. No leaf keeps the tensors alive."""

    @staticmethod
    def forward(ctx: Any, taken: list[Tensor], _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.taken = taken
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.taken.extend(gradients)
        return (None, None, *(None for _ in gradients))


class _Exit(torch.autograd.Function):
    """A root of zero bytes; takes the gradients out of a list, so that no caller keeps them."""

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.given = given
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.given)
        ctx.given.clear()
        return (None, *gradients)


def _run(run: LayerRun, live: LiveBytes) -> LayerBytes:
    base = live.live
    given: list[Tensor] = []
    taken: list[Tensor] = []
    middle = _forward(run, live, given, taken)
    kept = live.live - base
    saved_input = middle.inputs.alive()
    saved_output = min(middle.outputs.alive(), middle.output_bytes)
    saved = kept - saved_input - saved_output
    given.extend(torch.ones(shape, dtype=dtype) for shape, dtype in middle.gradients)
    incoming = sum(gradient.nbytes for gradient in given)
    live.reset_peak()
    _backward(run, middle, taken)
    inputs = [value.nbytes for value in run.inputs]
    outgoing = sum(size for size, flag in zip(inputs, run.differentiable, strict=True) if flag)
    used = sum(inputs) + saved + middle.output_bytes
    return LayerBytes(
        output=middle.output_bytes,
        output_gradient=incoming,
        saved_input=saved_input,
        saved=saved,
        saved_output=saved_output,
        forward_workspace=max(0, middle.peak - base - used),
        backward_workspace=max(0, live.peak - base - (kept + incoming + outgoing)),
    )


def _forward(run: LayerRun, live: LiveBytes, given: list[Tensor], taken: list[Tensor]) -> _Between:
    """`value` is the only name for what flows, so each tensor dies when it is replaced."""
    value: Any = tuple(tensor.clone() for tensor in run.inputs)
    entered = _Storages(value)
    target: Any = run.loss[1].clone() if run.loss else None
    live.reset_peak()
    value = _enter(value, run.differentiable, taken)
    value = call(run.name, run.layer, value)
    if run.loss:
        value = (check_loss(run.loss[0](value[0], target)),)
    roots = [output for output in value if output.requires_grad]
    root = _Exit.apply(given, *roots) if roots else None  # type: ignore[no-untyped-call]
    return _Between(
        root=root,
        peak=live.peak,
        inputs=entered,
        outputs=_Storages(value, without=entered),
        output_bytes=sum(output.nbytes for output in value),
        gradients=[(output.shape, output.dtype) for output in roots],
    )


def _enter(
    values: tuple[Tensor, ...], flags: Sequence[bool], taken: list[Tensor]
) -> tuple[Tensor, ...]:
    chosen = [value for value, flag in zip(values, flags, strict=True) if flag]
    if not chosen:
        return values
    trigger = torch.empty(0, requires_grad=True)
    entered = iter(_Entry.apply(taken, trigger, *chosen))  # type: ignore[no-untyped-call]
    pairs = zip(values, flags, strict=True)
    return tuple(next(entered) if flag else value for value, flag in pairs)


def _backward(run: LayerRun, middle: _Between, taken: list[Tensor]) -> None:
    if middle.root is not None:
        torch.autograd.backward((middle.root,), (middle.root.new_empty(0),))
    if not taken:
        pairs = zip(run.inputs, run.differentiable, strict=True)
        taken.extend(torch.zeros_like(value) for value, flag in pairs if flag)
