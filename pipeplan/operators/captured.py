"""A captured call: its operator graph, and how each operation is computed.

A *value* is one tensor of the joint graph: a base, which an operation or the caller makes, or a
view, which is made anew from what it views whenever it is asked for and not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.operator_graph import OperatorGraph, StorageKind
from pipeplan.operators.flat_module import Arguments, TensorTree


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value among arguments."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """What computes something: an operator of torch, and its arguments with `Ref`s for values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """How a value is made from another value of the same storage."""

    call: Call
    item: int | None = None
    """Which of several results."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor."""

    storage: int
    view: View | None = None
    """None: a base."""


@dataclass(frozen=True, slots=True)
class Computation:
    """How an operation runs, and which results are which values."""

    call: Call
    results: tuple[int | None, ...]
    """Value of each result; None for one that is no tensor, or shows what was there before."""
    several: bool
    """Whether it returns a row of results, not one tensor."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is added to a parameter's gradient, or copied into a buffer."""

    name: str
    value: int


@dataclass(frozen=True)
class Captured:
    """One call of a module, as operations that can be run one by one.

    Indices of storages and operations are those of `graph`.
    """

    graph: OperatorGraph
    values: tuple[Value, ...]
    computations: tuple[Computation, ...]
    """One per operation."""
    parameters: dict[str, int]
    """Name to value, as in the next ones."""
    buffers: dict[str, int]
    constants: tuple[tuple[int, Tensor], ...]
    """Values that the module's code holds, and their tensors."""
    inputs: tuple[int | None, ...]
    """Value of each input tensor; None where nothing reads it."""
    input_gradients: tuple[int | None, ...]
    """Value of each input's gradient; None where it has none."""
    outputs: tuple[int, ...]
    tangents: tuple[int | None, ...]
    """Value of each output's gradient; None for one that has none."""
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]
    """Shape, strides and type of each tangent."""
    added: dict[int, tuple[Gradient, ...]]
    """Storage to what of it goes where, for storages that are accumulated or update buffers."""
    arguments: Arguments
    form: TensorTree
    device: torch.device
    cast: torch.dtype | None
    """What a block of autocast around the call cast to."""
    training: tuple[bool, ...] = field(default=())
    """Mode of each submodule."""

    def with_own_inputs(self) -> Captured:
        """The same where the caller gives its inputs away: their bytes go when they are freed."""
        storages = tuple(
            each.model_copy(update={"kind": StorageKind.RECEIVED})
            if each.kind is StorageKind.INPUT
            else each
            for each in self.graph.storages
        )
        return replace(self, graph=self.graph.model_copy(update={"storages": storages}))

    def with_times(self, times: tuple[int, ...]) -> Captured:
        """The same with other times of its operations, in ns."""
        pairs = zip(self.graph.operations, times, strict=True)
        operations = tuple(each.model_copy(update={"time_ns": time}) for each, time in pairs)
        return replace(self, graph=self.graph.model_copy(update={"operations": operations}))


def refs_in(call: Call) -> list[int]:
    """Values that `call` reads, in order, each once."""
    found: dict[int, None] = {}

    def look(item: Any) -> None:
        if isinstance(item, Ref):
            found[item.value] = None
        elif isinstance(item, (tuple, list)):
            for each in item:
                look(each)
        elif isinstance(item, dict):
            look(tuple(item.values()))

    look(call.args)
    look(call.kwargs)
    return list(found)
