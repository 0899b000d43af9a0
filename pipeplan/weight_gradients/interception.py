"""Sees each operation that layers run forward; those on activations and weights are kept apart."""

from __future__ import annotations

import types as types_
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from pipeplan.livebytes import key
from pipeplan.weight_gradients.small_graph import DeferredOperation, Look, Use, cut_off, edge_of
from pipeplan.weight_gradients.waiting import Waiting

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_PYTHON = ("torch.functional", "torch.nn.functional")
_METHODS = ("split", "norm", "unflatten", "__rsub__", "__rdiv__", "__rpow__", "__rmatmul__")
"""Modules, and methods of tensors, in which torch wrote operations in Python."""
_MATRIX = 2
"""Dimensions of a weight from which on its gradient waits: one of a vector is little work, and
what it needs (all of an input, all of a gradient) would wait with it."""
_WRITES = ("__set__", "__setitem__", "__delitem__")
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class _Later(torch.autograd.Function):
    """One operation, which has run already, in the graph of the layers."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Waiting,
        operation: DeferredOperation,
        outputs: list[Tensor],
        *activations: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.operation = owner, operation
        ctx.set_materialize_grads(False)
        found = tuple(output.detach() for output in outputs)
        outputs.clear()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        operation, ctx.operation = ctx.operation, None
        return (None, None, None, *ctx.owner.arrive(operation, arrived))


class Deferring(TorchFunctionMode):
    """Sees each operation of a layer, and puts those on activations and weights in `_Later`."""

    def __init__(self, owner: Waiting) -> None:
        super().__init__()
        self._owner = owner
        self._hooks: Any = None

    def __enter__(self) -> Any:
        self._hooks = _hooks_on_saved()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        given = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **given)
        tensors = _tensors(args, given)
        is_weight = self._owner.is_weight
        weights = [each for each in tensors if each.requires_grad and is_weight(each)]
        if not weights or not self._knows(func, given):
            return func(*args, **given)
        activations = [each for each in tensors if each.requires_grad and not is_weight(each)]
        alone = len(weights) == len(tensors)
        flat = all(weight.dim() < _MATRIX for weight in weights)
        if not alone and (flat or not activations):
            return func(*args, **given)
        if any(type(each) not in _PLAIN for each in tensors):
            return func(*args, **given)
        if isinstance(func, types_.FunctionType):
            return self._inside(func, args, given)
        if _name(func) == "__get__" and not _differentiable(found := func(*args, **given)):
            return found
        return self._later(func, args, given, activations, weights)

    def _knows(self, func: Any, kwargs: dict[str, Any]) -> bool:
        """Whether `func` may be deferred: it makes new tensors and nobody else looks on."""
        name = _name(func).partition(".")[0]
        inplace = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        schema = getattr(func, "_schema", None)
        return not (
            inplace
            or name in _WRITES
            or kwargs.get("out") is not None
            or (schema is not None and schema.is_mutable)
            or _hooks_on_saved() != self._hooks
            or torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
        )

    def _inside(self, func: types_.FunctionType, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function that torch wrote in Python, such that its operations are seen, too."""
        if func.__module__ not in _PYTHON and func.__name__ not in _METHODS:
            return func(*args, **kwargs)
        seen = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
        inner = types_.FunctionType(
            func.__code__, seen, func.__name__, func.__defaults__, func.__closure__
        )
        inner.__kwdefaults__ = func.__kwdefaults__
        with self:
            return inner(*args, **kwargs)

    def _later(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        activations: list[Tensor],
        weights: list[Tensor],
    ) -> Any:
        """Runs `func` on stand-ins; its weights' gradients come later."""
        activations, weights = _distinct(activations), _distinct(weights)
        entered = cut_off(activations) if activations else ()
        stand_ins = [self._owner.stand_in(weight) for weight in weights]
        table = dict(zip(map(id, activations), entered, strict=True))
        table.update(zip(map(id, weights), (alias for alias, _ in stand_ins), strict=True))
        result = func(*_replaced(args, table), **_replaced(kwargs, table))
        values = [result] if isinstance(result, Tensor) else result
        if not isinstance(values, list | tuple):
            return result  # a number, a size
        values = list(values)
        places = [
            place
            for place, value in enumerate(values)
            if isinstance(value, Tensor) and value.requires_grad
        ]
        if not places:
            return result
        operation = self._operation(
            [edge_of(values[place]) for place in places],
            [edge_of(each) for each in entered],
            [use for _, use in stand_ins],
        )
        taken = {key(tensor) for tensor in entered}
        if operation is None or any(key(values[place]) in taken for place in places):
            return func(*args, **kwargs)  # a view: no weight's number is in it
        del entered, stand_ins, table
        made = [values[place] for place in places]
        kind = None if isinstance(result, Tensor) else type(result)
        del result
        for place in places:
            values[place] = None
        parents = activations or weights
        later = _Later.apply(self._owner, operation, made, *parents)  # type: ignore[no-untyped-call]
        if not activations:
            self._owner.mark(later[0], operation)
        for place, value in zip(places, later, strict=True):
            values[place] = value
        return values[0] if kind is None else kind(values)

    def _operation(
        self, outputs: list[GradientEdge], ends: list[GradientEdge], uses: list[Use]
    ) -> DeferredOperation | None:
        """The small graph behind `outputs`; None if no weight is in it."""
        seen = Look(ends[0].node if ends else None, {edge.node for edge, _ in uses})
        seen.through([edge.node for edge in outputs])
        if not seen.weights:
            return None
        replaced = [
            self._owner.cast(seen.casts[use[0].node], use) if use[0].node in seen.casts else use
            for use in uses
        ]
        return DeferredOperation(
            order=self._owner.next_order(),
            outputs=tuple(outputs),
            activations=tuple(ends),
            uses=tuple(replaced),
            deferred=len(seen.joints) == 1,
            below=seen.below(),
        )


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return name


def _hooks_on_saved() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001


def _never(*_: Any) -> bool:
    return False


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Those among arguments, and in lists among them."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _replaced(values: Any, table: dict[int, Tensor]) -> Any:
    """`values` with what `table` has for some of them."""
    if isinstance(values, dict):
        return {name: _replaced(value, table) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_replaced(value, table) for value in values)
    return table.get(id(values), values)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
