"""Buffers of layers that are computed again: seen as by the first forward, and changed once.

A second forward of a micro-batch must see buffers as the first one did, though later micro-batches
have changed them since (spectral norm, a codebook of moving averages), and leave no trace. Most
layers write what they do not read in training (running statistics): of these nothing is kept.
Which is which a trial on a copy of the layers shows, before the run: other values in the buffers
that a forward writes change its result, or they do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.layout import overwrite

Forward = Callable[[Sequence[nn.Module]], Sequence[Tensor]]
"""Layers -> what they return for some input, always the same one."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A name of a module under which a tensor is registered."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is there now; layers may change it in place, or put another tensor there."""
        return getattr(self.module, self.name, None)


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
            setattr(self.buffer.module, self.buffer.name, self.tensor)
        if self.tensor is not None and self.copy is not None:
            overwrite(self.tensor, self.copy)


Values = Sequence[_Value]
"""Buffers at one moment."""


class ModuleBuffers:
    """The buffers of some layers."""

    def __init__(self, layers: Sequence[nn.Module], forward: Forward) -> None:
        """Finds out how the layers use their buffers; `forward` gets a copy of them."""
        self._all = _buffers(layers)
        changed, read = _tried(layers, forward) if self._all else ([], False)
        self._changed = {self._all[index] for index in changed}
        self._read = self._changed if read else set()

    def before(self) -> Values:
        """What a first forward is going to see."""
        return _values(self._all, copied=self._read)

    def kept(self, before: Values) -> Values:
        """Out of `before`, after the first forward of a micro-batch, what the second one needs.

        Raises:
            InputError: if the layers have written to what they let be in the trial.
        """
        for value in before:
            if value.buffer not in self._changed and value.has_changed:
                raise InputError(
                    f"task: {type(value.buffer.module).__name__}: changes its buffer"
                    f" {value.buffer.name!r} in some forwards only, and is computed again, which"
                    " needs the value before. Change it in every one, or plan without --recompute."
                )
        return [value for value in before if value.buffer in self._read]

    def turn_back(self, then: Values) -> Values:
        """Let the buffers be as they were `then`; how they have been until now."""
        values = _values(self._all, copied=self._all)
        put_back(then)
        return values

    def settle(self, values: Values) -> Values:
        """After a second forward: put back what is only written; the rest.

        That is put back after the backward, whose graph may use the buffers of its forward.
        """
        put_back([value for value in values if value.buffer not in self._read])
        return [value for value in values if value.buffer in self._read]


def put_back(values: Values) -> None:
    """Let buffers be as they were when `values` were taken."""
    for value in values:
        value.put_back()


@contextmanager
def restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets the buffers of `layers` be in the end as they are in the beginning."""
    every = _buffers(layers)
    values = _values(every, copied=every)
    try:
        yield
    finally:
        put_back(values)


def _buffers(layers: Iterable[nn.Module]) -> list[_Buffer]:
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [_Buffer(module, name) for module in modules for name in module._buffers]  # noqa: SLF001


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


def _tried(layers: Sequence[nn.Module], forward: Forward) -> tuple[Sequence[int], bool]:
    """Which buffers a forward changes, by index, and whether any of these change its result."""
    try:
        copied = copy.deepcopy(list(layers))
        buffers = _buffers(copied)
        before = _values(buffers, copied=buffers)
        result = forward(copied)
        changed = [index for index, value in enumerate(before) if value.has_changed]
        put_back(before)
        for index in changed:
            _spoil(buffers[index].tensor)
        same = not changed or all(map(torch.equal, result, forward(copied)))
    except Exception:  # layers that only their own data suit: what they need must be kept
        return range(len(_buffers(layers))), True
    return changed, not same


def _spoil(tensor: Tensor | None) -> None:
    """Put other values in it, which spread to whatever is computed from it."""
    if tensor is not None:
        odd = tensor.is_floating_point() or tensor.is_complex()
        tensor.data.copy_(torch.full_like(tensor, torch.nan) if odd else tensor == 0)
