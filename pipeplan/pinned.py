"""Page-locked memory of the host, of just the sizes that are asked for.

torch's own allocator of such memory rounds each block up to a power of two, so a host could need
twice what a plan counts ((H7) of docs/reference/model.md). Here a block is as many whole pages as
it needs, registered with CUDA once and used again for the next tensor of its size.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeplan.errors import RankError

Lock = Callable[[int, int], None]
"""Address, bytes -> page-locked from now on."""


class PinnedPool:
    """Blocks that are in use or wait to be; given back to the system when the pool is gone.

    A tensor's block is free again when nobody refers to its storage any more. Whoever starts a
    copy that goes on behind his back keeps the tensor until the copy has ended: torch, which does
    that for blocks of its own, knows nothing of these.
    """

    def __init__(self, lock: Lock | None = None, unlock: Callable[[int], None] | None = None):
        """Has no block yet.

        Args:
            lock: page-locks memory; None: CUDA.
            unlock: undoes it, given the address.
        """
        self._lock = lock or _register
        self._unlock = unlock or _unregister
        self._idle: dict[int, deque[_PinnedPages]] = defaultdict(deque)

    def __reduce__(self) -> tuple[type[PinnedPool], tuple[()]]:
        """A copy of it (of the module it belongs to) begins with no block."""
        return PinnedPool, ()

    def empty_like(self, part: Tensor) -> Tensor:
        """A tensor of the host with the shape, order and type of `part`, page-locked.

        Raises:
            RankError: if the system does not give or lock as much.
        """
        strides = torch.empty_like(part, device="meta").stride()
        if not part.numel():
            return torch.empty_strided(part.shape, strides, dtype=part.dtype)
        idle = self._idle[part.nbytes]
        try:
            block = idle.popleft()  # atomic, as is append: storages end in any thread
        except IndexError:
            block = _PinnedPages(part.nbytes, self._lock, self._unlock)
        flat = torch.frombuffer(block.memory, dtype=part.dtype, count=part.numel())
        weakref.finalize(flat.untyped_storage(), idle.append, block).atexit = False
        return flat.as_strided(part.shape, strides)


class _PinnedPages:
    """Whole pages of memory, locked as long as this object lives."""

    def __init__(self, size: int, lock: Lock, unlock: Callable[[int], None]) -> None:
        try:
            self.memory = mmap.mmap(-1, size)
            address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
            lock(address, size)
        except Exception as error:
            raise RankError(
                f"host: got no {size} page-locked bytes ({type(error).__name__}: {error}). Check"
                " the memory that is free, and ulimit -l; or plan with less host memory."
            ) from error
        weakref.finalize(self, _release, self.memory, unlock, address).atexit = False


def _release(memory: mmap.mmap, unlock: Callable[[int], None], address: int) -> None:
    """`memory` is an argument so that it goes only behind the unlocking."""
    unlock(address)


def _register(address: int, size: int) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))


def _unregister(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(address))
