"""The store in which ranks of one parent meet, as ranks of torchrun do in that of its agent.

The store has a thread. A process that is forked beside a thread may inherit a lock that nobody
gives back, and hangs at its first use. So ranks are started first, and each waits for the port.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]


class RankStore:
    """A store on this machine; it ends with this object, in the process that started the ranks."""

    def __init__(self, context: BaseContext, patience_s: float = 60.0) -> None:
        """Makes no store yet.

        Args:
            context: of the ranks' processes.
            patience_s: longest wait for a word of another rank.
        """
        self._ports = context.SimpleQueue()
        self._patience = timedelta(seconds=patience_s)
        self._store: TCPStore | None = None

    def start(self, ranks: Sequence[BaseProcess]) -> None:
        """Start the ranks, then the store."""
        for rank in ranks:
            rank.start()
        try:
            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=self._patience, wait_for_workers=False
            )
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        for _ in ranks:
            self._ports.put(self._store.port)

    def port(self) -> int:
        """Where the store is; each rank asks once, and waits until there is one."""
        return int(self._ports.get())
