"""How far two tensors are apart, and what rounding explains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeplan.split_model import SplitModel

_NOISE = 64
"""Units of rounding, of the largest gradient of all, below which a difference is rounding: some
gradients are zero but for rounding, such as those of the biases of attention's keys."""


def rounding_unit(tensors: Iterable[Tensor], model: SplitModel) -> float:
    """The unit of rounding: of the least precise type of `tensors`, or of what is computed in.

    That is autocast's where layers are compiled: compiled code leaves casts between two operations
    out, so it rounds otherwise; eager layers cast as the model does.
    """
    kinds = [tensor.dtype for tensor in tensors]
    if model.compile and model.autocast:
        kinds.append(model.autocast)
    return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)


def densified(tensor: Tensor) -> Tensor:
    """`tensor` with its zeros."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def largest_size(tensor: Tensor) -> float:
    """The largest number in `tensor`, by size; 0 for none."""
    if not tensor.numel():
        return 0.0
    return float(_wide(tensor).abs().max())


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two numbers in the same place; infinite for other shapes."""
    if one.shape != other.shape:
        return float("inf")
    gap = _wide(one) - _wide(other)
    return largest_size(gap.nan_to_num(nan=float("inf")))


def relative_difference(one: Tensor, other: Tensor, unit: float, scale: float = 0.0) -> float:
    """How far `other` is from `one`, relative to the largest number of `one`; 0 for equal bits.

    Args:
        one: what is expected.
        other: what was found.
        unit: of rounding.
        scale: the largest gradient of all; what is rounding beside it is relative to it.
    """
    one, other = densified(one), densified(other)
    if torch.equal(one, other):
        return 0.0
    far = largest_difference(one, other)
    small = scale and far <= _NOISE * unit * scale
    size = scale if small else largest_size(one)
    return far / size if size else 1.0


def _wide(tensor: Tensor) -> Tensor:
    """In as many bits as there are: both parts of complex numbers count."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return densified(tensor.detach()).to(kind)
