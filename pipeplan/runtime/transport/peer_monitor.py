"""Who looks out for ranks that are gone where no message tells, as under NCCL.

Under gloo a connection that closes wakes whoever waits on it. A process under NCCL never waits for
a message, its GPU does, for ever. So each rank posts a receive over gloo to the next one, in a
ring, which nobody answers before all leave: it fails when that rank's process ends. Whoever sees
this writes it into the ranks' store, where all look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

TAG = (1 << 31) - 2
"""Of the messages that say good-bye; used by nothing else."""
LOOK_S = 0.25
PATIENCE_S = 5.0
"""How long the main thread may take to find out and end by itself."""
_GONE = "gone"
_FOREVER = timedelta(days=365)


class PeerMonitor:
    """One rank's place in the ring."""

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Begins to look out; all ranks of `group` do, and `store` is used by nothing else."""
        self._group, self._store = group, store
        here, size = group.rank(), group.size()
        self._next, self._before = (here + 1) % size, (here - 1) % size
        self._gone = ""
        self._stuck: Callable[[str], None] = lambda _: None
        self._over = threading.Event()
        self._bye = threading.Thread(target=self._await_good_bye, daemon=True)
        self._look = threading.Thread(target=self._look_around, daemon=True)
        self._bye.start()
        self._look.start()

    def gone(self) -> str:
        """Which rank is gone, in words; empty for none."""
        return self._gone

    def if_stuck(self, end: Callable[[str], None]) -> None:
        """Let `end` be called from another thread, where this process does not end by itself.

        Some waits inside of CUDA ask nobody, and never end once a message is missing.
        """
        self._stuck = end

    def tell(self, what: str) -> None:
        """Tell all ranks that one is gone, first come first heard."""
        try:
            heard = self._store.compare_set(_GONE, "", what)
            self._gone = self._gone or heard.decode()
        except RuntimeError:
            self._gone = self._gone or what

    def close(self) -> None:
        """Say good-bye; all ranks do, behind a barrier."""
        sent = self._group.send([torch.zeros(1)], self._before, TAG)
        self._bye.join()
        sent.wait()
        self._over.set()
        self._look.join()

    def _await_good_bye(self) -> None:
        """In a thread: the wait is as long as the run."""
        try:
            self._group.recv([torch.zeros(1)], self._next, TAG).wait(_FOREVER)
        except RuntimeError:
            if not self._over.is_set():
                self.tell(f"rank {self._next} of all is gone")

    def _look_around(self) -> None:
        while not self._gone and not self._over.wait(LOOK_S):
            try:
                if self._store.check([_GONE]):
                    self._gone = self._store.get(_GONE).decode()
            except RuntimeError:
                self._gone = "the store of the ranks is gone"
        if self._gone and not self._over.wait(PATIENCE_S):
            self._stuck(self._gone)
