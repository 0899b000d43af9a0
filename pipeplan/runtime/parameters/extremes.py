"""The least and the greatest number of a tensor: if both are finite, all of them are.

torch finds both at once without a copy, but not in every type that weights may have.
"""

from __future__ import annotations

import torch
from torch import Tensor


def extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Least and greatest number, not read; none where all are finite, whatever they are."""
    if tensor.is_complex():
        return extremes(torch.view_as_real(tensor.resolve_conj()))
    if not tensor.is_floating_point() or not tensor.numel():
        return ()
    narrow = tensor.dtype.itemsize == 1
    least, greatest = (tensor.bfloat16() if narrow else tensor).aminmax()
    return least, greatest
