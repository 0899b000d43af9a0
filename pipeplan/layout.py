"""How tensors lie in memory, and how they pass a boundary so that they lie there as before.

A message is a row of bytes. A tensor whose dimensions lie in another order in memory (as those of
`channels_last` do) travels in the order of its memory and gets its dimensions back where it
arrives: a contiguous copy would let kernels add in another order, and take another path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of `tensor` from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda i: (-strides[i], i)))


def is_dense(tensor: Tensor) -> bool:
    """Whether `tensor` is contiguous but for the order of its dimensions.

    No sparse tensor is, nor one whose size depends on values, nor one whose numbers are not those
    in memory (`is_lazy`).
    """
    if tensor.layout is not torch.strided or not has_size(tensor) or is_lazy(tensor):
        return False
    return not tensor.numel() or _has_no_holes(tensor)


def _has_no_holes(tensor: Tensor) -> bool:
    """Each number lies behind the one before it; told by strides, for which no operation runs."""
    shape, strides, step = tensor.shape, tensor.stride(), 1
    for place in reversed(memory_order(tensor)):
        if shape[place] != 1 and strides[place] != step:
            return False
        step *= shape[place]
    return True


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds the conjugate or negative of its numbers, as `.conj()` does it."""
    return tensor.is_conj() or tensor.is_neg()


def is_repeated(tensor: Tensor) -> bool:
    """Whether one number in memory stands in several places, as `.expand()` does it."""
    if tensor.layout is not torch.strided:
        return False
    return any(not step and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Put `value` into `tensor`, of which autograd takes no notice where it is dense.

    What is written into the `data` of a sparse tensor stays there.
    """
    if tensor.layout is torch.strided:
        tensor.data.copy_(value, non_blocking=True)
        return
    with torch.no_grad():
        tensor.copy_(value)


def has_size(tensor: Tensor) -> bool:
    """Whether its shape is the same in every run: that of `logits[mask]` depends on values."""
    return all(isinstance(length, int) for length in tensor.shape)


def passing_order(tensor: Tensor) -> tuple[int, ...]:
    """In which order the dimensions of a tensor like `tensor` travel; empty: as they are."""
    return () if tensor.is_contiguous() or not is_dense(tensor) else memory_order(tensor)


def travelling(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """`tensor` as a contiguous one with dimensions in `order`, whose bytes are its numbers.

    A copy where it lies apart, or is conjugated or negated when it is read (`is_lazy`).
    """
    ordered = tensor.permute(*order) if order else tensor
    return ordered.resolve_conj().resolve_neg().contiguous()


def arrived(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """What `travelling` was made of, in the same memory."""
    return tensor.permute([order.index(i) for i in range(len(order))]) if order else tensor


def kept(tensor: Tensor) -> Tensor:
    """A copy of `tensor` that lies in memory as it does behind a boundary."""
    return arrived(travelling(tensor, passing_order(tensor)).clone(), passing_order(tensor))
