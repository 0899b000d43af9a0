"""Autocast: layers that run again run in the precision of their first time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Autocast = tuple[bool, torch.dtype]


def autocast(device: torch.device) -> Autocast:
    """Whether operations on `device` are cast now, and to what."""
    if not torch.amp.is_autocast_available(device.type):
        return False, torch.float32
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def as_in(device: torch.device, setting: Autocast) -> AbstractContextManager[Any]:
    """That setting again; each forward of a layer keeps casts of its own (`precision.casting`)."""
    enabled, dtype = setting
    if not enabled and not autocast(device)[0]:
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=enabled)
