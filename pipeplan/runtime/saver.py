"""Saving beside the training: at once, or in a thread of its own while the next steps run.

In the background a rank first copies what it will write, so it holds its weights and optimizer
state twice until the files are there. The ranks agree over a process group of their own: messages
of two threads in one group would not come in one order. A failure is raised by the next `save` or
by `finish`; at most one checkpoint is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from pipeplan.errors import RankError
from pipeplan.runtime import checkpoint, stored
from pipeplan.runtime.stage import Stage
from pipeplan.runtime.transport import GlooTransport, LocalTransport


class Saver:
    """Writes one checkpoint after the other."""

    def __init__(self, transport: GlooTransport | LocalTransport, *, background: bool) -> None:
        """Takes the ranks; all of them make their savers at the same time.

        Args:
            transport: between the ranks that save together.
            background: whether `save` returns before the files are written.
        """
        self._rank, self._alone = transport.rank, transport.size == 1
        self._background = background
        self._group: ProcessGroup | None = None
        self._writes = True
        if isinstance(transport, GlooTransport) and (background or transport.replicas > 1):
            self._group = transport.another_group()
            self._writes = transport.replica == 0
        self._thread: threading.Thread | None = None
        self._failure: RankError | None = None

    def save(self, path: Path, meta: stored.Meta, stages: Iterable[Stage]) -> None:
        """Write a checkpoint of `stages` at `path`; all ranks call it, with an empty pipeline.

        Replicas hold the same: the first one writes.

        Raises:
            RankError: if this or an earlier checkpoint could not be written.
        """
        self.finish()
        if not self._writes:
            return
        state = checkpoint.state_of(stages)
        if not self._background:
            self._write(path, meta, state)
            self.finish()
            return
        copied = {key: _copy(value) for key, value in state.items()}
        self._thread = threading.Thread(target=self._write, args=(path, meta, copied))
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            RankError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, path: Path, meta: stored.Meta, state: dict[str, Any]) -> None:
        try:
            stored.write(path, meta, state, rank=self._rank, alone=self._alone, group=self._group)
        except (Exception, CheckpointException) as error:
            why = stored.cause(error)
            self._failure = RankError(
                f"rank {self._rank}: {path} could not be written: {why}. Checkpoints before it"
                " are untouched: make room and go on with --resume."
            )
            self._failure.__cause__ = error


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
