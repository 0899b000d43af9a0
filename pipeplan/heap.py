"""Freed large blocks go back to the system at once, where glibc would keep them.

A fresh process takes each block of at least 128 KiB from the system by itself, and gives it back
when it is freed. But glibc raises this threshold to the largest block freed so far, up to 32 MiB,
and has all smaller ones in its heap. There a hole between two others is no use to the next tensor
of its size: for an aligned block glibc looks for a larger hole (seen in glibc 2.36). So the heap
grows, and a rank had up to half more resident than its tensors hold.

A block from the system is cleared by it, page by page, each time; hence a threshold above most
activations of a small model, where that would take longer than what is computed with them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

LARGE = 2**20
"""Bytes of the smallest block that goes back by itself."""
_TOP = 32 * LARGE
"""Bytes of smaller blocks that may stay free at the heap's end: it is not cut and grown again at
each of them. glibc's own limit rises to twice as much."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As malloc.h of glibc numbers them."""


def give_back_large_blocks(environment: Mapping[str, str], large: int = LARGE) -> bool:
    """Let each block of at least `large` bytes be the system's again when it is freed.

    For the rest of the process, in all its threads. Only glibc on Linux needs it and can do it.

    Args:
        environment: of the process; what it sets for glibc's blocks holds.
        large: in bytes.

    Returns:
        Whether it is done.
    """
    if sys.platform != "linux" or _is_set(environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # in musl there is none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, large) and mallopt(_M_TRIM_THRESHOLD, _TOP))


def _is_set(environment: Mapping[str, str]) -> bool:
    """Whether the user has chosen what glibc keeps: one of both thresholds is enough for it."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in ("mmap_threshold", "trim_threshold")
    )
