"""The tensors of one pass, by storage; the only references to them.

A storage that is freed has no tensor here any more, so its bytes go with the caller's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeplan.operators.captured import Call, Captured, Ref, Value, View

Filled = Callable[[Callable[[int], Tensor]], tuple[list[Any], dict[str, Any]]]
"""Arguments of a call, given how to get a value."""


class Memory:
    """Storage -> tensors that show it, the base among them."""

    def __init__(self, values: Sequence[Value], views: dict[int, tuple[View, Filled]]) -> None:
        """Is empty.

        Args:
            values: of the captured call.
            views: what makes each view, prepared once for all passes.
        """
        self._storages = [value.storage for value in values]
        self._views = views
        self._shown: list[dict[int, Tensor] | None] = [None] * (1 + max(self._storages, default=0))

    def get(self, value: int) -> Tensor:
        """The tensor of `value`, made from what it views if it is not there."""
        shown = self._shown[self._storages[value]]
        assert shown is not None, "the judge allows no read of what is not there"
        tensor = shown.get(value)
        if tensor is None:
            view, filled = self._views[value]
            args, kwargs = filled(self.get)
            made = view.call.function(*args, **kwargs)
            tensor = made if view.item is None else made[view.item]
            shown[value] = tensor
        return tensor

    def put(self, value: int, tensor: Tensor) -> None:
        """Adds a base."""
        storage = self._storages[value]
        shown = self._shown[storage]
        if shown is None:
            shown = self._shown[storage] = {}
        shown[value] = tensor

    def has(self, storage: int) -> bool:
        """Whether the storage has tensors."""
        return self._shown[storage] is not None

    def free(self, storage: int) -> None:
        """Forgets all tensors of a storage."""
        self._shown[storage] = None

    def bases(self, storage: int) -> dict[int, Tensor]:
        """Its tensors that are no views."""
        shown = self._shown[storage] or {}
        return {value: tensor for value, tensor in shown.items() if value not in self._views}


def views_of(captured: Captured) -> dict[int, tuple[View, Filled]]:
    """How each view of `captured` is made."""
    return {
        index: (value.view, filler(value.view.call))
        for index, value in enumerate(captured.values)
        if value.view is not None
    }


def filler(call: Call) -> Filled:
    """Puts tensors where the arguments of `call` say so."""
    flat = [(place, item.value) for place, item in enumerate(call.args) if isinstance(item, Ref)]
    nested = [
        place
        for place, item in enumerate(call.args)
        if isinstance(item, (tuple, list)) and any(isinstance(each, Ref) for each in item)
    ]
    named = [name for name, item in call.kwargs.items() if isinstance(item, Ref)]
    proto, options = list(call.args), call.kwargs

    def fill(get: Callable[[int], Tensor]) -> tuple[list[Any], dict[str, Any]]:
        args = proto.copy()
        for place, value in flat:
            args[place] = get(value)
        for place in nested:
            args[place] = [
                get(each.value) if isinstance(each, Ref) else each for each in proto[place]
            ]
        if not named:
            return args, options
        return args, {**options, **{name: get(options[name].value) for name in named}}

    return fill


def contiguous_as(
    tensor: Tensor, layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
) -> Tensor:
    """`tensor`, or a copy of it with the strides that the graph was captured with."""
    shape, strides, dtype = layout
    whole = tensor.untyped_storage().nbytes() == _span(shape, strides) * tensor.itemsize
    if tuple(tensor.shape) == shape and tensor.stride() == strides and whole:
        return tensor
    copied = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
    return copied.copy_(tensor)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
