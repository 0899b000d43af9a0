"""Values that do not depend on inputs, parameters or chance, known while a model is traced.

While a model is traced its tensors have no values, so a model that looks at one cannot go on as it
would. Some values are the same in every run with inputs of one shape: those of tensors that are
made from numbers alone, such as the positions 0, 1, .. from which a library finds out that a batch
packs no sequences and needs no mask. Here these are computed beside the traced tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MOST: Final = 1 << 20
"""Numbers of a tensor up to which its values are computed."""

_READS: Final = frozenset(
    {
        Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item,
        Tensor.tolist, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose,
        torch.is_nonzero,
    }
)  # fmt: skip
"""What gives Python a value of a tensor."""
_FROM_NUMBERS: Final = frozenset(
    {
        torch.arange, torch.linspace, torch.tensor, torch.scalar_tensor, torch.zeros, torch.ones,
        torch.full, torch.eye, torch.tril_indices, torch.triu_indices,
        torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.floor_divide,
    }
)  # fmt: skip
"""What makes a tensor from numbers (Longformer divides its sizes by `torch.div`)."""


class ConstantPropagation(TorchFunctionMode):
    """Computes beside each traced tensor that is made from numbers alone what it holds."""

    def __init__(self) -> None:
        """None is known yet."""
        super().__init__()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The same result; a value where one is read that is known."""
        given = (args, kwargs or {})
        value = self._value(func, given)
        if value is not None and func in _READS:
            return value[0]
        if value is None and _writes(func, given[1]):
            self._forget(given)
        result = func(*args, **(kwargs or {}))
        if value is not None:
            self._learn(result, value[0])
        return result

    def _value(self, func: Any, given: Any) -> tuple[Any] | None:
        """What `func` gives for known arguments; None where some are not known, or it draws."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        known = [self._known.get(tensor) for tensor in tensors]
        if any(each is None for each in known) or not (tensors or func in _FROM_NUMBERS):
            return None
        if any(not isinstance(leaf, _PLAIN) for leaf in tree_leaves(given)):
            return None
        here = tree_map(self._here, given)
        with _disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            before = torch.get_rng_state()
            try:
                found = func(*here[0], **here[1])
            except Exception:  # the traced call says why
                return None
            if not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)
                return None
        return (found,)

    def _here(self, leaf: Any) -> Any:
        """The leaf's value, on the CPU."""
        if isinstance(leaf, Tensor):
            return self._known[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _learn(self, result: Any, value: Any) -> None:
        """Keep the values of the tensors of a result."""
        pairs = zip(tree_leaves(result), tree_leaves(value), strict=False)
        for tensor, known in pairs:
            if isinstance(tensor, Tensor) and isinstance(known, Tensor):
                same = tensor.shape == known.shape and tensor.dtype == known.dtype
                if same and math.prod(known.shape) <= MOST:
                    self._known[tensor] = known

    def _forget(self, given: Any) -> None:
        """What is written to with unknown values is unknown, and so is all that shares memory."""
        written = {
            self._known[leaf].untyped_storage().data_ptr()
            for leaf in tree_leaves(given)
            if isinstance(leaf, Tensor) and leaf in self._known
        }
        for tensor, known in list(self._known.items()):
            if known.untyped_storage().data_ptr() in written:
                del self._known[tensor]


_PLAIN: Final = (Tensor, int, float, bool, str, slice, torch.dtype, torch.device, torch.layout,
                 torch.memory_format, type(None), type(Ellipsis))  # fmt: skip
"""Arguments whose meaning is their value; anything else (symbols, generators) is not looked at."""


def _writes(func: Callable[..., Any], named: dict[str, Any]) -> bool:
    """Whether a function may write to its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in _SETTERS or "out" in named


_SETTERS: Final = frozenset({"__setitem__", "__set__", "__delitem__"})
