"""Live bytes: how much memory tensors hold now, and the most they held at once.

Both `capture` (what a layer keeps) and `runtime` (what a rank really held) measure with this one
instrument, although they are strangers to each other: a prediction and its check must mean the
same bytes. Hence it lies below both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with storages that `tensor` is made of: itself, or those of a sparse one."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`; views of one storage count once."""
    parts = (part for tensor in tensors for part in dense(tensor))
    return sum({key(part): part.untyped_storage().nbytes() for part in parts}.values())


def key(tensor: torch.Tensor) -> int:
    """What identifies the storage behind `tensor` as long as it lives.

    torch keeps one Python object per storage for the storage's whole life, so its id will do.
    """
    return id(tensor.untyped_storage())


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The keys of the distinct storages behind `tensors`."""
    return {key(part) for tensor in tensors for part in dense(tensor)}


def peak_bytes(
    module: torch.nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
) -> int:
    """Most live bytes of one training step of `module` on top of gradients that are there."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    live = LiveBytes([*module.parameters(), *module.buffers(), *gradients, source, target])
    with live:
        result = loss(module(source), target)
        result.backward()
        del result
    return live.peak


_METERS: weakref.WeakSet[LiveBytes] = weakref.WeakSet()


def resized(tensor: torch.Tensor) -> None:
    """Tells every meter the present size of the storage behind `tensor`.

    For storages that are emptied and filled again behind the dispatcher's back, in any thread.
    """
    for meter in list(_METERS):
        meter.resized(tensor)


class LiveBytes(TorchDispatchMode):
    """While entered, counts the storage of every tensor that an operation makes until it is freed.

    A storage is counted once however many tensors view it, from the operation that makes it to the
    end of its last reference (Python's or autograd's). Scratch memory that a kernel takes and
    returns inside one operation is not seen, nor is what an allocator rounds up or keeps.
    Tensors that exist already (parameters, buffers, gradients) must be given to `count` first, or
    the first operation that returns a view of them counts them as new.
    """

    idle = False
    """Whether nobody looks at it now: then no one needs to count for it."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes since the start or the last `reset_peak`."""
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, _End] = {}
        self._paused = False
        self._lock = threading.RLock()
        _METERS.add(self)
        self.count(tensors)

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts the storages of `tensors` from now on, those not counted yet."""
        for tensor in tensors:
            self._see(tensor)

    def resized(self, tensor: torch.Tensor) -> None:
        """Counts the storage of `tensor` by its present size, if it is counted at all."""
        with self._lock:
            if key(tensor) in self._sizes:
                self._see(tensor)

    def reset_peak(self) -> None:
        """Forgets the past: the peak is what lives now."""
        self.peak = self.live

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing new inside: for work that is no part of what is measured."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation and counts what it returns."""
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            for value in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._see(value)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        for part in dense(tensor):
            self._see_dense(part)

    def _see_dense(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        name, size = id(storage), storage.nbytes()
        with self._lock:
            known = self._sizes.get(name)
            if known == size:
                return
            if known is None:
                self._ends[name] = _End(storage, self._forget, name)
            self._sizes[name] = size
            self._changed(name, size - (known or 0))

    def _changed(self, name: int, difference: int) -> None:
        """The storage `name` has so many bytes more, or fewer; called under the lock."""
        self.live += difference
        self.peak = max(self.peak, self.live)

    def _forget(self, end: _End) -> None:
        with self._lock:
            del self._ends[end.name]
            self._changed(end.name, -self._sizes.pop(end.name))


class _End(weakref.ref[torch.UntypedStorage]):
    """Calls back when a storage dies; it knows whose end it is."""

    __slots__ = ("name",)

    def __new__(
        cls, storage: torch.UntypedStorage, told: Callable[[_End], None], name: int
    ) -> Self:
        made = super().__new__(cls, storage, told)
        made.name = name
        return made

    def __init__(
        self, storage: torch.UntypedStorage, told: Callable[[_End], None], name: int
    ) -> None:
        super().__init__(storage, told)  # type: ignore[call-arg]

    name: int
