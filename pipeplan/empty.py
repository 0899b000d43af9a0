"""Tensors that have shape, type and device, and no memory: their storages are empty.

They stay what they are to everything that looks at shapes: modules hold them, `torch.export` and
fake tensors read them as they read any other tensor. But a kernel that touches their values ends
the process, so only `ghosts` lets operations near them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor


def emptied(like: Tensor, device: torch.device | None = None) -> Tensor:
    """An empty tensor of the size, strides and type of `like`; on its device where none is given.

    The memory is there for a moment, untouched.
    """
    made = torch.empty_strided(
        like.size(), like.stride(), dtype=like.dtype, device=device or like.device
    )
    made.untyped_storage().resize_(0)
    return made


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The storage of a plain tensor; None for sparse and fake ones and those on `meta`."""
    plain = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return tensor.untyped_storage() if plain and tensor.device.type != "meta" else None


def is_empty(tensor: Tensor) -> bool:
    """Whether `tensor` should have values and has none."""
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == 0 and tensor.numel() > 0


def has_empty(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters or buffers of `modules` are empty: nothing can be computed with them."""
    return any(is_empty(t) for x in modules for t in (*x.parameters(), *x.buffers()))


def bytes_of(tensor: Tensor) -> int:
    """What a storage needs for `tensor`, if it begins where the tensor does."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize


def hollow(parameter: nn.Parameter) -> None:
    """Let an empty parameter that nobody will fill be all NaN, in the memory of one element.

    Whoever still computes with it sees that at once. Integers have no NaN; they are 0.
    """
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    one = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
    parameter.data = one.expand(parameter.size())


def give_back_free_memory() -> None:
    """Return what tensors let go of to the system, where the C library keeps it for later.

    glibc keeps blocks of up to 32 MiB, in pieces that do not fit the next tensor of their size.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
        if trim is not None:
            trim(0)
