"""One pass through a rematerialized module: the operations of a schedule on real tensors.

Each layer is a segment of the runtime (`pipeplan.runtime.stages.segment`); this module decides
only which tensors stay where between them, as docs/reference/remat-rules.md §2 says for each
operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.gradients import has_hooks
from pipeplan.pinned import PinnedPool
from pipeplan.remat import DeviceOp, DeviceOpKind
from pipeplan.rematerialized.parts import Buffer
from pipeplan.rematerialized.precision import Autocast, as_in
from pipeplan.rematerialized.script import Order, Script, used
from pipeplan.rematerialized.states import ForwardStates
from pipeplan.rematerialized.units import Units
from pipeplan.runtime.stages.segment import Fed, SegmentSpec, StoredSegment
from pipeplan.split_model import SplitModel

Flags = tuple[bool, ...]
Watch = Callable[[DeviceOp], AbstractContextManager[Any]]
"""What every operation runs inside of: a clock, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that passes share."""

    split: SplitModel
    script: Script
    flags: tuple[Flags, ...]
    """Per boundary, that behind the last layer included: which tensors get a gradient."""
    changed: tuple[tuple[Buffer, ...], ...]
    """Per layer: the buffers that forwards change."""
    fixed: tuple[Buffer, ...]
    """The others."""
    tables: tuple[Tensor, ...]
    """Tensors that layers held as they were planned, neither parameters nor buffers."""
    shared: tuple[nn.Parameter, ...]
    """Parameters of more than one layer."""
    offload: bool
    """Whether units may leave the device."""
    device: torch.device
    autocast: Autocast
    pinned: PinnedPool
    """Of the host: passes use the same blocks one after the other, the rehearsal's before all:
    locking memory takes longer than a copy."""


class Pass:
    """One forward and its backward; use once."""

    def __init__(self, prepared: Prepared, source: Tensor, watch: Watch = nullcontext) -> None:
        """Nothing has run yet.

        Raises:
            InputError: if a parameter that layers share has hooks.
        """
        _check_hooks(prepared)
        self._prepared = prepared
        self._watch = watch
        self.source = source.detach()
        """Shares the caller's bytes and count of changes."""
        self._segments = [self._segment(index) for index in range(len(prepared.split.layers))]
        again = {layer: prepared.changed[layer] for layer in prepared.script.again}
        self._states = ForwardStates(prepared.device, again)
        self._full: dict[int, list[Tensor]] = {0: [self.source]}
        self._gradients: list[Tensor] = []
        self._units = _units(prepared, self.source)
        if self._units is not None:
            weakref.finalize(self, self._units.drop)

    def versions(self) -> dict[str, list[tuple[int, int]]]:
        """Which tensors are read again, and how often each has been written to, by torch's count.

        Weights are the caller's to watch.
        """
        read = {"input": [self.source], "buffers": [each.tensor for each in self._prepared.fixed]}
        return {
            name: [(id(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001
            for name, tensors in read.items()
        }

    def forward(self) -> Tensor:
        """The module's output, cut off the graph."""
        self._run(self._prepared.script.forward)
        (output,) = self._full.pop(len(self._segments))
        return output

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor]:
        """Adds to the parameters' gradients; returns those of the inputs that have one.

        Args:
            gradients: of the output; emptied, so that the caller keeps nothing alive.

        Raises:
            InputError: if a parameter that layers share has got hooks since.
        """
        _check_hooks(self._prepared)
        self._gradients = [each for each in gradients if each is not None]
        gradients.clear()
        with _summed_apart(self._prepared.shared):
            self._run(self._prepared.script.backward)
        if self._units is not None:
            self._units.close()
        return self._gradients

    def _run(self, orders: Sequence[Order]) -> None:
        """Ends the transfers where an operation fails: the worker would wait for the rest."""
        try:
            for order in orders:
                with self._watch(order.op):
                    self._step(order)
        except BaseException:
            if self._units is not None:
                self._units.drop()
                self._units.close()
            raise

    def _step(self, order: Order) -> None:
        op = order.op
        if op.computes:
            self._compute(op)
            if order.last_use and self._units is not None:
                self._units.used(used(op))
        elif op.kind is DeviceOpKind.FREE:
            self._full.pop(op.index, None)
        else:
            assert self._units is not None
            self._units.move(order)

    def _compute(self, op: DeviceOp) -> None:
        if op.kind is DeviceOpKind.BACKWARD:
            self._gradients = self._segments[op.index].backward(0, self._gradients, 1.0)
        else:
            self._forward(op)

    def _forward(self, op: DeviceOp) -> None:
        layer = op.index
        segment, units = self._segments[layer], self._units
        inputs = list(self._full[layer])
        if op.kind is not DeviceOpKind.KEEP_INPUT:
            del self._full[layer]
        # Backwards run as the caller's does, as those of the plain module.
        cast = as_in(self._prepared.device, self._prepared.autocast)
        with self._states.of(layer), cast:
            if op.kind is DeviceOpKind.KEEP_ALL:
                with torch.enable_grad(), units.taping(layer, inputs) if units else nullcontext():
                    outputs = segment.forward(0, inputs, _no_target)
            else:
                outputs = segment.evaluate(0, inputs, _no_target)
        self._full[layer + 1] = outputs
        if units is not None:
            units.made(layer + 1, outputs)

    def _segment(self, index: int) -> StoredSegment:
        prepared = self._prepared
        split, flags = prepared.split, prepared.flags
        places = split.fed_to(index)
        # Not a method's: a segment must not keep the pass, nor the pass itself, alive.
        source = self.source
        specs = tuple(split.boundaries[0][place] for place in places)
        fed = {0: Fed(specs, lambda _: [source for _ in places])} if places else {}
        return StoredSegment(
            SegmentSpec(
                first_layer=index,
                layers=(split.layers[index],),
                inputs=split.boundaries[index],
                entered=flags[index],
                left=flags[index + 1],
                loss=None,
                seed=None,
                fed=fed,
                device=prepared.device,
            )
        )


def _units(prepared: Prepared, source: Tensor) -> Units | None:
    if not prepared.offload:
        return None
    layers = prepared.split.layers
    states = [tensor for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]]
    fixed = [*states, *prepared.tables, source]
    return Units(prepared.device, prepared.script.moved, fixed, prepared.pinned)


def _check_hooks(prepared: Prepared) -> None:
    """Refuses hooks that would see the gradient of each layer instead of the sum."""
    hooked = next((each for each in prepared.shared if has_hooks(each)), None)
    if hooked is not None:
        raise InputError(
            f"rematerialized module: parameter {_name(prepared.split, hooked)!r}: got hooks on its"
            " gradient, need none: several layers share it, and each has a backward of its own"
            " that would run them. Change .grad behind the backward, or share nothing."
        )


def _name(split: SplitModel, parameter: nn.Parameter) -> str:
    """Of a parameter of a layer, in the user's module."""
    return next(
        names[local]
        for layer, names in zip(split.layers, split.fqns, strict=True)
        for local, each in layer.named_parameters()
        if each is parameter
    )


@contextmanager
def _summed_apart(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Sums the layers' gradients of shared parameters first, as one backward of all layers does.

    Added to the gradient of earlier micro-batches one by one they would be rounded otherwise.
    """
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                if parameter.grad is not None:
                    gradient += parameter.grad
                parameter.grad = gradient


def _no_target(_: int) -> Tensor:
    raise AssertionError("a layer without a loss has no target")
