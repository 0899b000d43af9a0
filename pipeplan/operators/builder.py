"""From a joint graph to storages, operations and values.

Memory is counted by storage: torch's tracer gives every tensor a storage without memory, which
views share, so what an operator allocates is told from what it shows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pipeplan.livebytes import key
from pipeplan.operator_graph import Storage, StorageKind
from pipeplan.operators.captured import Call, Computation, Ref, Value, View, refs_in
from pipeplan.operators.joint_graph import Argument, Given, is_backward
from pipeplan.operators.refusals import UncapturableError

_GIVEN = {
    Given.PARAMETER: StorageKind.PARAMETER,
    Given.BUFFER: StorageKind.BUFFER,
    Given.INPUT: StorageKind.INPUT,
    Given.TANGENT: StorageKind.TANGENT,
}


@dataclass
class OperationDraft:
    """An operation that is being built."""

    node: Node
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    computation: Computation
    backward: bool


@dataclass
class Builder:
    """Storages, values and operations so far."""

    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    drafts: list[OperationDraft] = field(default_factory=list)
    constants: list[tuple[int, Tensor]] = field(default_factory=list)
    _value: dict[Node, int] = field(default_factory=dict)
    _storage: dict[int, int] = field(default_factory=dict)
    """By the key of torch's storage."""
    _alive: list[torch.UntypedStorage] = field(default_factory=list)
    """So that no key is given away twice."""
    _items: dict[Node, list[int | None]] = field(default_factory=dict)
    """Values of the results of an operator that has several."""

    def value(self, node: Node) -> int:
        """The value of `node`.

        Raises:
            UncapturableError: if it is no tensor.
        """
        if node not in self._value:
            raise UncapturableError(f"{node.target} gives a value that is no tensor")
        return self._value[node]

    def argument(self, argument: Argument) -> int:
        """Adds what the caller gives; returns its value."""
        tensor = argument.node.meta["val"]
        name = argument.name or f"{argument.kind} {argument.place}"
        storage, _ = self._storage_of(tensor, name, _GIVEN[argument.kind])
        self._value[argument.node] = self._new(Value(storage))
        return self._value[argument.node]

    def constant(self, node: Node, module: GraphModule) -> None:
        """Adds a tensor that the module's code holds."""
        tensor = getattr(module, str(node.target))
        if not isinstance(tensor, Tensor):
            raise UncapturableError(f"the graph holds {type(tensor).__name__} {node.target}")
        storage, _ = self._storage_of(tensor, str(node.target), StorageKind.BUFFER)
        self._value[node] = self._new(Value(storage))
        self.constants.append((self._value[node], tensor))

    def call(self, node: Node) -> None:
        """Adds an operator: a view, an item of several results, or an operation."""
        if node.target is operator.getitem:
            self._item(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - its only name
            raise UncapturableError(f"{node.target} is no operator of torch")
        if node.target._schema.is_mutable:  # noqa: SLF001 - torch has no other way to ask
            raise UncapturableError(f"{node.target} changes its input in place")
        call = self._call(node)
        results: Any = node.meta.get("val")
        several = isinstance(results, (tuple, list))
        tensors = list(results) if several else [results]
        if not any(isinstance(each, Tensor) for each in tensors):
            raise UncapturableError(f"{node.target} reads values of tensors while the model runs")
        found = [self._made(each, node) if isinstance(each, Tensor) else None for each in tensors]
        fresh = tuple(dict.fromkeys(s for s, new in filter(None, found) if new))
        if fresh:
            places = [self._base(each, fresh) for each in found]
            self._operation(node, call, places, fresh)
        else:
            places = [
                self._new(Value(each[0], View(call, index if several else None)))
                if each is not None
                else None
                for index, each in enumerate(found)
            ]
        if several:
            self._items[node] = places
        elif places[0] is not None:
            self._value[node] = places[0]

    def _base(self, found: tuple[int, bool] | None, fresh: tuple[int, ...]) -> int | None:
        """The value of a result; one that only shows what was there is not handed on."""
        return self._new(Value(found[0])) if found is not None and found[0] in fresh else None

    def _operation(
        self, node: Node, call: Call, places: list[int | None], fresh: tuple[int, ...]
    ) -> None:
        reads = tuple(dict.fromkeys(self.values[each].storage for each in refs_in(call)))
        several = isinstance(node.meta["val"], (tuple, list))
        first = next(each for each in _tensors(node.meta["val"]))
        computation = Computation(call, tuple(places), several, first.device)
        self.drafts.append(OperationDraft(node, reads, fresh, computation, is_backward(node)))

    def _item(self, node: Node) -> None:
        parent, index = node.args
        assert isinstance(parent, Node) and isinstance(index, int)  # noqa: PT018
        found = self._items[parent][index] if parent in self._items else None
        if found is None:
            raise UncapturableError(f"result {index} of {parent.target} is no tensor of its own")
        self._value[node] = found

    def _call(self, node: Node) -> Call:
        def put(item: Any) -> Any:
            if isinstance(item, Node):
                return Ref(self.value(item))
            if isinstance(item, (list, tuple)):
                return type(item)(put(each) for each in item)
            return item

        kwargs = {name: put(each) for name, each in node.kwargs.items()}
        return Call(node.target, tuple(put(each) for each in node.args), kwargs)  # type: ignore[arg-type]

    def _made(self, tensor: Tensor, node: Node) -> tuple[int, bool]:
        kind = StorageKind.GRADIENT if is_backward(node) else StorageKind.ACTIVATION
        return self._storage_of(tensor, node.name, kind)

    def _storage_of(self, tensor: Tensor, name: str, kind: StorageKind) -> tuple[int, bool]:
        """The index of the storage behind `tensor`, and whether it is new."""
        if tensor.layout is not torch.strided:
            raise UncapturableError(f"{name} is a tensor of layout {tensor.layout}")
        known = self._storage.get(key(tensor))
        if known is not None:
            return known, False
        index = len(self.storages)
        memory = tensor.untyped_storage()
        self._storage[key(tensor)] = index
        self._alive.append(memory)
        self.storages.append(Storage(name=name, bytes=memory.nbytes(), kind=kind))
        return index, True

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _tensors(results: Any) -> list[Tensor]:
    items = results if isinstance(results, (tuple, list)) else [results]
    return [each for each in items if isinstance(each, Tensor)]
