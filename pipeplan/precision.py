"""Autocast: the precision in which layers run, wherever they run.

Under `torch.autocast` a weight is cast once and the cast kept until the outermost context ends. A
cast that outlives an update computes with old weights and gives the new ones no gradient; one made
without autograd gives none at all; one that the graphs of several micro-batches share has other
bytes than were planned. So each forward of a layer keeps casts of its own, in `capture` and
`runtime` alike. Hence this lies below both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from pipeplan.errors import InputError

HALVES = (torch.bfloat16, torch.float16)


def check_autocast(dtype: object) -> None:
    """Refuse what layers cannot be cast to.

    Raises:
        InputError: if `dtype` is neither None nor a type of 16 bits.
    """
    if dtype is not None and dtype not in HALVES:
        raise InputError(
            f"task: autocast: got {dtype!r}, need torch.bfloat16, torch.float16, or None for"
            " layers that run in the types of their weights"
        )


def around(device: torch.device) -> torch.dtype | None:
    """What a block of `torch.autocast` around this call casts to; None outside of one."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def check_around(split: torch.dtype | None, device: torch.device) -> None:
    """Refuse to run under another block than the one that was around the split of the model.

    Raises:
        InputError: if boundaries between ranks would be of other types.
    """
    now = around(device)
    if now != split:
        wanted = now or split
        raise InputError(
            f"pipeline: got torch.autocast to {now} around a call, need {split}, as when the model"
            " was split: other ranks wait for tensors of those types. Leave the block, give"
            f" Task(autocast={wanted}), profile and plan again."
        )


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Around one forward of a layer, or of the loss: under autocast, with casts of its own.

    Args:
        dtype: as `Task.autocast`; None leaves the setting as it is around the call.
        device: where the layer is.
    """
    if dtype is None and not (around(device) and torch.is_autocast_cache_enabled()):
        return nullcontext()
    return _casting(dtype, device)


@contextmanager
def _casting(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            yield
    finally:
        torch.clear_autocast_cache()
