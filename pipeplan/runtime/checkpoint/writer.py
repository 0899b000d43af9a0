"""Saving beside the training: at once, or in a thread of its own while the next steps run.

In the background a rank first copies what it will write into the host's memory, page-locked where
it comes from a GPU: the GPU holds no byte more, and trains on while the copy travels. The ranks
agree over a process group of their own: messages
of two threads in one group would not come in one order. A failure is raised by the next `save` or
by `finish`; at most one checkpoint is under way.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_iter, tree_map

from pipeplan.errors import RankError
from pipeplan.pinned import PinnedPool
from pipeplan.runtime.checkpoint import named_state, nesting, storage
from pipeplan.runtime.stages.stage import StageRunner
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport


class CheckpointWriter:
    """Writes one checkpoint after the other."""

    def __init__(
        self,
        transport: GlooTransport | LocalTransport,
        *,
        background: bool,
        keep: int | None = None,
    ) -> None:
        """Takes the ranks; all of them make their savers at the same time.

        Args:
            transport: between the ranks that save together.
            background: whether `save` returns before the files are written.
            keep: complete checkpoints that stay, the newest ones; None: all.
        """
        self._keep = keep
        self._copies = HostCopies()
        self._rank, self._alone = transport.rank, transport.size == 1
        self._background = background
        self._group: ProcessGroup | None = None
        self._writes = True
        if isinstance(transport, GlooTransport):
            self._group = transport.checkpoint_group(background=background)
            self._writes = transport.replica == 0
        self._thread: threading.Thread | None = None
        self._failure: RankError | None = None

    def save(
        self,
        path: Path,
        meta: storage.CheckpointMeta,
        stages: Iterable[StageRunner],
        spared: Path | None = None,
    ) -> None:
        """Write a checkpoint at `path`; all ranks call it, with an empty pipeline.

        Replicas hold the same: the first one writes.

        Args:
            path: its folder.
            meta: the same on every rank.
            stages: what it is made of.
            spared: a checkpoint that stays, however old it is.

        Raises:
            InputError: if an optimizer keeps something that could not be read again.
            RankError: if this or an earlier checkpoint could not be written.
        """
        self.finish()
        if not self._writes:
            return
        state = nesting.flat(named_state.state_of(stages))
        if not self._background:
            self._write(path, meta, lambda: state, spared)
            self.finish()
            return
        copied = self._copies.begin(state)
        self._thread = threading.Thread(target=self._write, args=(path, meta, copied, spared))
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

    def _write(
        self,
        path: Path,
        meta: storage.CheckpointMeta,
        state: Callable[[], dict[str, Any]],
        spared: Path | None,
    ) -> None:
        try:
            storage.write(
                path, meta, state(), rank=self._rank, alone=self._alone, group=self._group
            )
        except (Exception, CheckpointException) as error:
            why = storage.cause(error)
            self._failure = RankError(
                f"rank {self._rank}: {path} could not be written: {why}. Checkpoints before it"
                " are untouched: make room and go on with --resume."
            )
            self._failure.__cause__ = error
            return
        if self._keep and self._rank == 0:
            self._prune(path.parent.parent, self._keep, spared)

    def _prune(self, out: Path, keep: int, spared: Path | None) -> None:
        try:
            storage.prune(out, keep, spared)
        except OSError as error:
            self._failure = RankError(
                f"rank {self._rank}: --keep {keep}: {error.filename} could not be removed:"
                f" {error.strerror}. The newest checkpoint is complete: go on with --resume."
            )
            self._failure.__cause__ = error


class HostCopies:
    """Copies of states, in the host's memory."""

    def __init__(
        self,
        pool: PinnedPool | None = None,
        leaves: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda,
    ) -> None:
        """Holds nothing yet.

        Args:
            pool: gives page-locked memory, and takes it back for the next state.
            leaves: whether a tensor is on another device than the host.
        """
        self._pool = pool or PinnedPool()
        self._leaves = leaves

    def begin(self, state: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin to copy `state`, which may be changed by what the GPU is given from now on.

        Returns:
            What waits for the copies and gives them; to be kept until then.
        """
        copied = {key: tree_map(self._copy, value) for key, value in state.items()}
        leaves = tree_iter(dict(state))
        devices = {each.device for each in leaves if isinstance(each, Tensor) and each.is_cuda}
        there = [torch.cuda.current_stream(device).record_event() for device in devices]

        def arrived() -> dict[str, Any]:
            for event in there:
                event.synchronize()
            return copied

        return arrived

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)  # an object that steps may change
        if not self._leaves(value):
            return value.clone()
        return self._pool.empty_like(value).copy_(value.detach(), non_blocking=True)
