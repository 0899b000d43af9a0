"""Sequential models: an `nn.Sequential` or a list of modules, whose members are the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeplan.capture.boundary_trace import BoundaryTrace, call_layer, fake_mode, trace_boundaries
from pipeplan.capture.eager_modules.detection import opaque_modules, outermost_modules
from pipeplan.capture.eager_modules.eager_operation import seed_like_torch
from pipeplan.capture.eager_modules.run_watch import OpaqueModule
from pipeplan.capture.partition.cut_selection import select_cuts
from pipeplan.capture.partition.shared_states import joined_notes, shared_states, starts_without
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.errors import InputError
from pipeplan.nested import LayerLoss, MicroBatch, ModelArguments
from pipeplan.split_model import TensorSpec


def is_sequential(model: nn.Module) -> bool:
    """Whether the members of `model` are its layers."""
    return type(model) in (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True, slots=True)
class SequentialLayers:
    """The layers of a sequence."""

    layers: dict[str, nn.Module]
    """By name, such as `0:Linear`."""
    traced: BoundaryTrace
    """The boundaries between them."""
    notes: tuple[str, ...]
    """What the user should know of those that were joined."""


def sequential_layers(
    model: nn.Module,
    loss: LayerLoss,
    batch: MicroBatch,
    max_layers: int | None = None,
    *,
    in_order: bool = False,
) -> SequentialLayers:
    """The layers of a sequence and the boundaries between them.

    Members of an `nn.Sequential` take several tensors as one tuple, those of a list one by one.
    A layer that only gives its input another shape, or works in place, joins the layer before it:
    a cut there would save nothing. Layers that share what a forward changes are one, unless they
    only ever run `in_order`.

    Raises:
        InputError: if there are none, one fails, returns anything but tensors, or changes its
            input and returns something else; if the first one gets named arguments.
    """
    layers = _members(model)
    positional, named = batch.arguments.filled()
    if named or len(positional) != len(batch.inputs):
        raise InputError(
            f"task: data(0): got the arguments {[*map(_kind, positional), *named]} for"
            f" a {type(model).__name__}, need a tensor or a tuple of tensors, which the first of"
            " its modules takes. Or give the model as one nn.Module with a forward of its own."
        )
    if isinstance(model, nn.Sequential):
        taking = {name: TupleLayer(layer) for name, layer in layers.items()}
        traced = trace_boundaries(taking, loss, batch)
        layers = _unwrapped(taking, traced)
    else:
        traced = trace_boundaries(layers, loss, batch)
    joined = _joined(layers, _starts(traced))
    if len(joined) < len(layers):
        layers, traced = joined, trace_boundaries(joined, loss, batch)
    states = [] if in_order else shared_states(list(layers.values()), traced.changes)
    notes = tuple(joined_notes(states, layers, model))
    if states:
        layers = _joined(layers, starts_without(states, len(layers)))
        traced = trace_boundaries(layers, loss, batch)
    if max_layers is not None and len(layers) > max_layers:
        layers = _coarsened(layers, traced, max_layers)
        traced = trace_boundaries(layers, loss, batch)
    for index, name in enumerate(layers):
        if index and traced.writes[index]:
            raise InputError(
                f"task: layer {name!r}: changes its input in place, need an input that stays as"
                " it is, since the layer before may keep it for its backward. Use the operation"
                " that returns a new tensor, or give both layers as one."
            )
    return SequentialLayers(layers, traced, notes)


def sequential_eager(model: nn.Module, arguments: ModelArguments) -> dict[str, OpaqueModule]:
    """Modules of the row that draw from Python's or numpy's generator, or change attributes.

    All else that a graph could not hold is no matter here: the modules run as they are.

    Raises:
        InputError: if the row as a whole has a hook, which none of its layers would run.
    """
    is_list = isinstance(model, nn.ModuleList)
    whole = JoinedLayer(list(model)) if isinstance(model, nn.ModuleList) else model
    found = opaque_modules(whole, arguments)
    if "" in found and not is_list:
        raise InputError(
            f"task: model {type(model).__name__}: it {found[''].reason}, need layers that run one"
            " by one. Do it in one of the layers."
        )
    prefix = "parts." if is_list else ""
    return {
        name.removeprefix(prefix): opaque
        for name, opaque in outermost_modules(found).items()
        if opaque.draws or opaque.counts
    }


def seeding_layers(
    layers: Mapping[str, nn.Module], drawing: Iterable[nn.Module]
) -> dict[str, nn.Module]:
    """`layers`, where those that hold one of the modules `drawing` set Python's generators."""
    wanted = set(drawing)
    return {
        name: SeedingLayer(layer) if wanted.intersection(layer.modules()) else layer
        for name, layer in layers.items()
    }


class SeedingLayer(nn.Module):
    """A layer that draws from Python's or numpy's generator, which it sets first."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *boundary: Tensor) -> Any:
        """What the layer returns."""
        seed_like_torch()
        return self.part(*boundary)


class TupleLayer(nn.Module):
    """A member of an `nn.Sequential`, which hands a tuple on as one argument; a list does not."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *boundary: Tensor) -> Any:
        """What the member returns."""
        return self.part(boundary if len(boundary) > 1 else boundary[0])


def _unwrapped(layers: Mapping[str, TupleLayer], traced: BoundaryTrace) -> dict[str, nn.Module]:
    """`layers`, where those that take a single tensor are the members themselves."""
    rows = zip(layers.items(), traced.boundaries, strict=True)
    return {name: layer.part if len(taken) == 1 else layer for (name, layer), taken in rows}


class JoinedLayer(nn.Module):
    """Neighbouring modules that form one layer."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *boundary: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One part after the other."""
        values = boundary
        for part in self.parts:
            result = part(*values)
            values = result if isinstance(result, tuple) else (result,)
        return values if len(values) > 1 else values[0]


def _members(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a sequence by name; one that occurs twice comes twice."""
    layers = {
        f"{name}:{type(layer).__name__}": layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    if not layers:
        raise InputError("task: model: got no layers, need at least one")
    return layers


def _starts(traced: BoundaryTrace) -> list[int]:
    """Where layers begin if each whose output is its input's memory joins the one before it.

    The first of all joins the one after it.
    """
    starts = [index for index, alias in enumerate(traced.aliases) if index == 0 or not alias]
    if traced.aliases[0] and len(starts) > 1:
        del starts[1]
    return starts


def _joined(layers: dict[str, nn.Module], starts: Sequence[int]) -> dict[str, nn.Module]:
    """One layer from each of `starts` up to the next; names are joined by `+`."""
    named = list(layers.items())
    result: dict[str, nn.Module] = {}
    for first, end in pairwise([*starts, len(named)]):
        names, parts = zip(*named[first:end], strict=True)
        result["+".join(names)] = JoinedLayer(parts) if len(parts) > 1 else parts[0]
    return result


def _coarsened(
    layers: dict[str, nn.Module], traced: BoundaryTrace, count: int
) -> dict[str, nn.Module]:
    """At most `count` layers."""
    sizes = [sum(map(_size, boundary)) for boundary in traced.boundaries[1:]]
    cuts = select_cuts(_work(layers, traced), sizes, count)
    return _joined(layers, [0, *(cut + 1 for cut in cuts)])


def _work(layers: dict[str, nn.Module], traced: BoundaryTrace) -> list[int]:
    """Floating-point operations of each layer, and one per element that it returns."""
    found = []
    with restored(layers.values()), fake_mode(layers.values()), torch.no_grad():
        for (name, layer), boundary in zip(layers.items(), traced.boundaries, strict=True):
            values = tuple(torch.zeros(spec.shape, dtype=_dtype(spec)) for spec in boundary)
            with FlopCounterMode(display=False) as counter:
                outputs = call_layer(name, layer, values)
            elements = sum(output.numel() for output in outputs)
            found.append(counter.get_total_flops() + elements)
    return found


def _kind(value: object) -> str:
    return type(value).__name__


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return dtype


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize
