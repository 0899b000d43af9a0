"""How operations and functions of torch meet tensors without memory (`ghosts`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class GhostReadError(RuntimeError):
    """Code asked for a value of a parameter that has no memory."""


class GhostOperations(TorchDispatchMode):
    """Runs every operation as ever, but for those on tensors that are empty."""

    def __init__(self, ghosts: _Ghosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ghosts = ghosts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation."""
        given = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **given)
        empty = list(filter(self._ghosts.lacks, _tensors((args, given))))
        if not empty or func.overloadpacket in _SHAPE_ONLY:
            if _is_random(func):
                self._ghosts.drew()
            return func(*args, **given)
        if func.is_view:
            with self._ghosts.lent(empty):
                return func(*args, **given)
        written = _written(func, args, given)
        if func.overloadpacket in _FILLS and len(empty) == 1 and args[0] is empty[0]:
            return self._fill(func, args, given)
        if written:
            return self._write(func, written, empty)
        return self._compute(func, args, given, empty)

    def _fill(self, func: OpOverload, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """An operation that writes the whole of its first argument and reads nothing of it."""
        ghosts, target = self._ghosts, args[0]
        if not ghosts.draws:
            if _is_random(func):
                ghosts.skip_draw()
            return target
        if ghosts.is_whole(target):
            ghosts.take_in_hand(target)
            return func(*args, **given)
        if _is_random(func):
            with ghosts.lent([target]):
                return func(*args, **given)
        return target

    def _write(self, func: OpOverload, written: Sequence[Tensor], empty: Sequence[Tensor]) -> Any:
        """An operation in place, or into `out`: what it does to ghosts is left out."""
        real = not all(map(self._ghosts.numbers_of, written))
        if real or _is_random(func) or func.overloadpacket in _RESHAPES:
            raise _refusal(self._ghosts, func, empty)
        for tensor in written:
            self._ghosts.lost(tensor, empty)
        returns = len(func._schema.returns)  # noqa: SLF001
        return None if not returns else written[0] if returns == 1 else tuple(written)

    def _compute(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        given: dict[str, Any],
        empty: Sequence[Tensor],
    ) -> Any:
        """An operation that makes something new: it is empty where torch can tell its shape."""
        if _is_random(func):
            raise _refusal(self._ghosts, func, empty)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            faked_args, faked = tree_map_only(Tensor, mode.from_tensor, (args, given))
            with mode:
                shapes = func(*faked_args, **faked)
        except Exception as error:  # the operation looks at values
            raise _refusal(self._ghosts, func, empty) from error
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(shapes)):
            raise _refusal(self._ghosts, func, empty)
        return tree_map_only(
            Tensor, lambda shape: self._ghosts.without_memory(shape, empty), shapes
        )


class GhostReads(TorchFunctionMode):
    """Sees what reaches into memory past all operations."""

    def __init__(self, ghosts: _Ghosts) -> None:
        super().__init__()
        self._ghosts = ghosts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one function of torch."""
        if func in _LOOKS and self._ghosts.lacks(args[0]):
            raise _refusal(self._ghosts, func, [args[0]])
        return func(*args, **(kwargs or {}))


class GhostFunctions(GhostReads):
    """Sees also what a constructor does beside operations: other data for a parameter."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one function of torch."""
        ghosts = self._ghosts
        if func == _SET_DATA:
            return func(args[0], ghosts.data_for(*args))
        if func == _IS_META and not ghosts.draws and ghosts.lacks(args[0]):
            return True  # initialisers that look at what they drew leave such tensors alone
        return super().__torch_function__(func, types, args, kwargs)


class _Ghosts(Protocol):
    """What the modes ask and tell; see `ghosts.Ghosts`."""

    @property
    def draws(self) -> bool: ...
    def lacks(self, tensor: Tensor) -> bool: ...
    def numbers_of(self, tensor: Tensor) -> frozenset[int]: ...
    def want(self, tensors: Sequence[Tensor]) -> None: ...
    def without_memory(self, like: Tensor, sources: Sequence[Tensor]) -> Tensor: ...
    def lost(self, tensor: Tensor, sources: Sequence[Tensor]) -> None: ...
    def data_for(self, parameter: Tensor, value: Tensor) -> Tensor: ...
    def skip_draw(self) -> None: ...
    def drew(self) -> None: ...
    def is_whole(self, tensor: Tensor) -> bool: ...
    def take_in_hand(self, tensor: Tensor) -> None: ...
    def lent(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]: ...


def _refusal(ghosts: _Ghosts, func: object, empty: Sequence[Tensor]) -> GhostReadError:
    ghosts.want(empty)
    name = getattr(func, "__name__", str(func))
    return GhostReadError(f"{name} needs values of a parameter that has no memory")


def _tensors(arguments: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _written(func: OpOverload, args: tuple[Any, ...], given: dict[str, Any]) -> list[Tensor]:
    """The arguments that `func` writes into."""
    found = []
    for place, each in enumerate(func._schema.arguments):  # noqa: SLF001
        if each.alias_info is not None and each.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else given.get(each.name))
    return found


def _packets(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name) for name in names}


_FILLS = _packets(
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "cauchy_",
    "log_normal_",
    "geometric_",
    "fill_",
    "zero_",
    "copy_",
)
_SHAPE_ONLY = _packets(
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
)
"""They look at the shape and type of what they are given: their results have values."""
_RESHAPES = _packets("set_", "resize_", "resize_as_")
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_LOOKS = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.share_memory_,
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
}
"""They reach into memory past all operations."""
