"""While a call is traced, composite operators do what they do in a run.

For tracers, torch has Python twins of some composite operators. They choose other operators than
a run does, so bits and bytes would be others; that of recurrent layers leaves out the dropout
between layers (torch 2.13). Private to torch, like the tracer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch import config

_aten = torch.ops.aten
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)  # noqa: SLF001
_TWINS = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("input", "data")),
    **dict.fromkeys(
        ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa"), ("vec",)
    ),
    **{f"_upsample_nearest_exact{n}d": ("default", "vec") for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": ("default", "vec") for n in (1, 2, 3)},
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bilinear2d"), ("default", "vec")),
    **dict.fromkeys(("upsample_linear1d", "upsample_trilinear3d"), ("vec",)),
    **dict.fromkeys(
        ("dropout", "hardshrink", "softshrink", "matmul", "unsafe_chunk", "broadcast_tensors"),
        ("default",),
    ),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), ("default",)),
}
"""Name of an operator -> overloads that have a twin. Those of batch norms are needed: they tell
the tracer which buffers change."""


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Without the twins; backwards run outside of the autocast of forwards, as in autograd."""
    own = [(each, dict(each.py_kernels)) for each in _found()]
    try:
        for each, _ in own:
            for key in _KEYS:
                each.py_kernels.pop(key, None)
            each._dispatch_cache.clear()  # noqa: SLF001
        _aten.dropout.default.py_kernels.update(dict.fromkeys(_KEYS, _dropout))
        with config.patch(backward_pass_autocast="off"):
            yield
    finally:
        for each, kernels in own:
            each.py_kernels.clear()
            each.py_kernels.update(kernels)
            each._dispatch_cache.clear()  # noqa: SLF001


def _found() -> list[Any]:
    names = ((name, kind) for name, kinds in _TWINS.items() for kind in kinds)
    each = (getattr(getattr(_aten, name, None), kind, None) for name, kind in names)
    return [operator for operator in each if operator is not None]


def _dropout(value: Tensor, p: float, train: bool) -> Tensor:
    """As in a run; but where a mask of bits gives the same bits, it is kept instead of floats."""
    if not train or p == 0 or not value.numel():
        return value
    if p == 1:
        return value * torch.zeros((), dtype=value.dtype, device=value.device)
    if value.is_cuda or _same_bits(value, p):
        kept: Tensor = _aten.native_dropout(value, p, train)[0]
        return kept
    noise = torch.empty_like(value).bernoulli_(1 - p).div_(1 - p)
    return value * noise


def _same_bits(value: Tensor, p: float) -> bool:
    """Whether to divide by 1 - p, or to multiply by the quotient, gives the same factor."""
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return False
    # Not with torch, which would trace it.
    kind = np.float32 if value.dtype is torch.float32 else np.float64
    return bool(kind(1) / kind(1 - p) == kind(1 / (1 - p)))
