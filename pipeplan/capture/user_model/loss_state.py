"""What a loss keeps from call to call: put back behind capture, refused where it matters.

A loss belongs to no layer at run time: nothing puts its state back for a second forward, and no
checkpoint holds it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pipeplan.capture.user_model.module_attributes import AttributeSnapshot, attributes_of
from pipeplan.errors import InputError
from pipeplan.nested import mapped
from pipeplan.repeat import kept_generators, seed_all

Loss = Callable[[Any, Any], Tensor]
_NOISE = 64
"""Units of rounding that two calls may be apart: not every kernel adds in the same order."""
_WAY_OUT = (
    "need one that keeps nothing: it belongs to no layer, so it is not put back where the last"
    " layer is computed again, and no checkpoint holds it. Let the model compute its loss itself"
    " (Task(loss=None), the target among its inputs)"
)


@contextmanager
def restored_loss(loss: Loss | None) -> Iterator[None]:
    """Gives the objects that `loss` is made of their attributes, buffers and tensors back."""
    parts = _parts(loss)
    attributes = AttributeSnapshot(parts)
    tensors = [each for part in parts for each in _tensors(part)]
    kept = [(each, each._version, each.detach().clone()) for each in tensors]  # noqa: SLF001
    try:
        yield
    finally:
        attributes.put_back()
        with torch.no_grad():
            for tensor, version, value in kept:
                if tensor._version != version:  # noqa: SLF001 - torch has no public name
                    tensor.copy_(value)


def check_keeps_nothing(loss: Loss, given: Any, target: Any) -> None:
    """Refuse a loss that remembers, or that draws from generators that nothing sets for it.

    It is called twice for the same. What is the same behind both calls is no memory: a table made
    once, the last value for a log.

    Args:
        loss: of the task; left as it was.
        given: what the model returned; copied.
        target: of the same micro-batch; copied.

    Raises:
        InputError: if the second call gives another loss, or changes what the first one left.
    """
    with restored_loss(loss), kept_generators():
        first, state = _called(loss, given, target)
        second, later = _called(loss, given, target)
    name = getattr(_owner(loss), "__name__", type(_owner(loss)).__name__)
    moved = sorted(key for key in later if not _alike(state.get(key), later[key]))
    if moved:
        raise InputError(f"task: loss {name}: changes its {moved[0]} at every call, {_WAY_OUT}.")
    if not _alike(first, second):
        raise InputError(
            f"task: loss {name}: got another loss from a second call with the same arguments and"
            f" seed, {_WAY_OUT}."
        )


def _called(loss: Loss, given: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss, and what its objects hold then.

    Raises:
        InputError: if it draws from Python's or numpy's generator.
    """
    seed_all(0)
    before = _drawn()
    value = loss(*mapped(torch.clone, (given, target)))
    if _drawn() != before:
        raise InputError(
            "task: loss: draws from Python's or numpy's generator, need draws from torch's, which"
            " are set for each micro-batch: torch.rand(()) in place of random.random()."
        )
    return value.detach(), dict(_state(loss))


def _drawn() -> object:
    """How far Python's and numpy's generators are."""
    return random.getstate(), str(np.random.get_state())


def _owner(loss: Any) -> Any:
    """The object that a call of `loss` may change."""
    while isinstance(loss, partial):
        loss = loss.func
    return loss.__self__ if isinstance(loss, MethodType) else loss


def _parts(loss: Loss | None) -> list[Any]:
    """Objects with attributes: all modules of a module; else itself, and modules it holds."""
    owner = _owner(loss)
    if isinstance(owner, nn.Module):
        return [owner]
    own = getattr(owner, "__dict__", None)
    if not isinstance(own, dict):
        return []
    return [owner, *(value for value in own.values() if isinstance(value, nn.Module))]


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    is_module = isinstance(part, nn.Module)
    for name, buffer in part.named_buffers() if is_module else ():
        yield f"buffer {name!r}", buffer
    for module in part.modules() if is_module else (part,):
        for name, value in attributes_of(module).items():
            yield f"attribute {name!r}", value


def _tensors(part: Any) -> Iterator[Tensor]:
    for _, value in _attributes(part):
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                yield leaf


def _state(loss: Loss) -> Iterator[tuple[str, Any]]:
    """Copies of tensors, numbers and texts in the objects of `loss`, by name."""
    for place, part in enumerate(_parts(loss)):
        for name, value in _attributes(part):
            for number, leaf in enumerate(tree_flatten(value)[0]):
                key = name if not place and not number else f"{name} ({place}, {number})"
                if isinstance(leaf, Tensor):
                    yield key, leaf.detach().clone()
                elif isinstance(leaf, bool | int | float | str):
                    yield key, leaf


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for rounding."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, Tensor | float):
        return bool(one == other)
    left, right = map(torch.as_tensor, (one, other))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    inexact = left.is_floating_point() or left.is_complex()
    spread = _NOISE * torch.finfo(left.dtype).eps if inexact else 0.0
    return torch.allclose(left, right, rtol=spread, atol=0.0, equal_nan=True)
