"""State of layers that are computed again: seen as by the first forward, and changed once.

A second forward of a micro-batch must see buffers, and tensors that are plain attributes, as the
first one did, though later micro-batches have changed them since (spectral norm, a codebook of
moving averages, a memory), and leave no trace. What a forward changes a trial on a copy of the
layers shows, before the run. All of that is kept: it may steer what comes out, or the gradient
alone. The exception is what no operation of the trial reads: statistics that a batch norm in
training only writes, and their counter. A frozen parameter that a forward moves is refused by
name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeplan.errors import InputError
from pipeplan.layout import overwrite
from pipeplan.livebytes import key

Forward = Callable[[Sequence[nn.Module]], Sequence[Tensor]]
"""Layers -> what they return for some input, always the same one."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A name of a module under which a tensor is registered, or is a plain attribute."""

    module: nn.Module
    name: str
    is_attribute: bool = False

    @property
    def tensor(self) -> Tensor | None:
        """What is there now; layers may change it in place, or put another tensor there."""
        held = getattr(self.module, self.name, None)
        return held if isinstance(held, Tensor) else None

    def put(self, tensor: Tensor | None) -> None:
        """Let it be there; an attribute that may be a property's is put past it."""
        if self.is_attribute:
            vars(self.module)[self.name] = tensor
        else:
            setattr(self.module, self.name, tensor)


@dataclass(frozen=True, slots=True)
class _Value:
    """A buffer at one moment: the tensor and, where it may be written to, a copy."""

    buffer: _Buffer
    tensor: Tensor | None
    version: int
    copy: Tensor | None

    @property
    def has_changed(self) -> bool:
        """By tensor, count of writes, or values: writes through `data` are not counted."""
        now = self.buffer.tensor
        if now is None or now is not self.tensor:
            return now is not self.tensor
        if now._version != self.version:  # noqa: SLF001
            return True
        return self.copy is not None and not torch.equal(now, self.copy)

    def put_back(self) -> None:
        """Through `data`, of which autograd takes no notice: graphs use no old value."""
        if self.buffer.tensor is not self.tensor:
            self.buffer.put(self.tensor)
        if self.tensor is not None and self.copy is not None:
            overwrite(self.tensor, self.copy)


Values = Sequence[_Value]
"""Buffers at one moment."""


class ModuleBuffers:
    """The buffers of some layers, and the tensors that are plain attributes."""

    def __init__(self, layers: Sequence[nn.Module], forward: Forward) -> None:
        """Finds out how the layers use their buffers; `forward` gets a copy of them."""
        self._all = [*_buffers(layers), *_attributes(layers)]
        changed, read = _tried(layers, forward) if self._all else ([], [])
        self._changed = {self._all[index] for index in changed}
        self._read = {self._all[index] for index in read}
        self._frozen = _Frozen(layers)

    def before(self) -> Values:
        """What a first forward is going to see."""
        self._frozen.remember()
        return _values(self._all, copied=self._read)

    def kept(self, before: Values) -> Values:
        """Out of `before`, after the first forward of a micro-batch, what the second one needs.

        Raises:
            InputError: if the layers have written to what they let be in the trial, or to a
                frozen parameter.
        """
        self._frozen.check()
        for value in before:
            if value.buffer not in self._changed and value.has_changed:
                raise InputError(
                    f"task: {type(value.buffer.module).__name__}: changes its"
                    f" {'attribute' if value.buffer.is_attribute else 'buffer'}"
                    f" {value.buffer.name!r} in some forwards only, and is computed again, which"
                    " needs the value before. Change it in every one, or plan without --recompute."
                )
        return [value for value in before if value.buffer in self._read]

    def turn_back(self, then: Values) -> Values:
        """Let the buffers be as they were `then`; how they have been until now."""
        buffers = {each for each in self._all if not each.is_attribute}
        values = _values(self._all, copied=buffers | self._changed)
        put_back(then)
        return values

    def settle(self, values: Values) -> Values:
        """After a second forward: put back what is only written; the rest.

        That is put back after the backward, whose graph may use the buffers of its forward.
        """
        put_back([value for value in values if value.buffer not in self._read])
        return [value for value in values if value.buffer in self._read]


class _Frozen:
    """Parameters that are not trained, which a forward that runs twice must let be."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Looks at none yet."""
        self._sums: list[Tensor] = []
        self._first = True
        self._held = [
            (module, name, parameter)
            for module in dict.fromkeys(m for layer in layers for m in layer.modules())
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad
        ]
        self._before: list[object] = []

    def remember(self) -> None:
        """Before a forward; values only before the first one, as writes by `data` are in all."""
        self._before = self._marks()
        self._sums = self._summed() if self._first else []

    def check(self) -> None:
        """Refuse what the forward since `remember` has changed.

        Raises:
            InputError: if it has.
        """
        same = [a == b for a, b in zip(self._marks(), self._before, strict=True)]
        if self._first:
            pairs = zip(self._summed(), self._sums, same, strict=True)
            same = [torch.allclose(a, b, 0, 0, equal_nan=True) and equal for a, b, equal in pairs]
        self._first, self._sums = False, []
        for (module, name, _), equal in zip(self._held, same, strict=True):
            if not equal:
                raise InputError(
                    f"task: {type(module).__name__}: changes its parameter {name!r}, which is not"
                    " trained, in its forward, and is computed again, which needs the value"
                    " before. Register it as a buffer, or plan without --recompute."
                )

    def _marks(self) -> list[object]:
        return [(each.data_ptr(), each._version) for *_, each in self._held]  # noqa: SLF001

    def _summed(self) -> list[Tensor]:
        with torch.no_grad():
            return [each.sum() for *_, each in self._held]


def put_back(values: Values) -> None:
    """Let buffers be as they were when `values` were taken."""
    for value in values:
        value.put_back()


@contextmanager
def restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets buffers and plain tensors of `layers` be in the end as they are in the beginning."""
    every = [*_buffers(layers), *_attributes(layers)]
    values = _values(every, copied=every)
    try:
        yield
    finally:
        put_back(values)


def _buffers(layers: Iterable[nn.Module]) -> list[_Buffer]:
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [_Buffer(module, name) for module in modules for name in module._buffers]  # noqa: SLF001


def _attributes(layers: Iterable[nn.Module]) -> list[_Buffer]:
    """Plain attributes that are tensors, or nothing yet, where a forward may put one."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [
        _Buffer(module, name, is_attribute=True)
        for module in modules
        for name, value in vars(module).items()
        if (value is None or isinstance(value, Tensor)) and name not in _OWN | _derived(module)
    ]


def _derived(module: nn.Module) -> set[str]:
    """Attributes that hooks of torch make of parameters before each forward."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001
    named = {each.name for each in hooks if isinstance(each, WeightNorm | SpectralNorm)}
    pruned = {
        each._tensor_name  # noqa: SLF001
        for each in hooks
        if isinstance(each, BasePruningMethod)
    }
    return named | pruned


def _values(buffers: Iterable[_Buffer], copied: Collection[_Buffer]) -> list[_Value]:
    """`buffers` now, with one copy of each tensor among `copied`, whatever names it has."""
    copies: dict[Tensor, Tensor] = {}
    values = []
    for buffer in buffers:
        tensor, copied_one = buffer.tensor, None
        if tensor is not None and buffer in copied:
            if tensor not in copies:
                copies[tensor] = tensor.clone()
            copied_one = copies[tensor]
        version = 0 if tensor is None else tensor._version  # noqa: SLF001
        values.append(_Value(buffer, tensor, version, copied_one))
    return values


def _tried(layers: Sequence[nn.Module], forward: Forward) -> tuple[Sequence[int], Sequence[int]]:
    """What a forward changes, and what of that it reads, by index."""
    try:
        copied = copy.deepcopy(list(layers))
        buffers = [*_buffers(copied), *_attributes(copied)]
        before = _values(buffers, copied=buffers)
        with _Uses() as uses:
            forward(copied)
    except Exception:  # layers that only their own data suit: what they need must be kept
        every = range(len(_buffers(layers)) + len(_attributes(layers)))
        return every, every
    changed = [index for index, value in enumerate(before) if value.has_changed]
    return changed, [index for index in changed if uses.read(before[index])]


_STATISTICS = {
    "aten::native_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_batch_norm_with_update": None,
}
"""Batch norms, with the place of the flag by which they write statistics and do not read them."""


class _Uses(TorchDispatchMode):
    """Sees which tensors operations read, and which they only add to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read: set[object] = set()
        self._counted: set[object] = set()
        self._statistics: set[object] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.name().partition(".")[0]
        written = _only_written(operation, args)
        places = {key(args[place]) for place in written if args[place] is not None}
        (self._statistics if operation in _STATISTICS else self._counted).update(places)
        others = [each for place, each in enumerate(args) if place not in written]
        leaves = tree_leaves((others, kwargs or {}))
        self._read.update(key(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return result

    def read(self, value: _Value) -> bool:
        """Whether more may be done with it than to write to it, in the backward, too."""
        if value.tensor is None or key(value.tensor) in self._read:
            return True
        is_counter = value.buffer.name.endswith("num_batches_tracked")
        return key(value.tensor) not in self._statistics | (self._counted if is_counter else set())


def _only_written(operation: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Places of arguments that `operation` changes and whose values go nowhere else."""
    if operation == "aten::add_":
        return (0,)
    if operation in _STATISTICS:
        flag = _STATISTICS[operation]
        return (3, 4) if flag is None or args[flag] else ()
    return ()
