"""A communicator over gloo, which has no tags here either: what NCCL does, on processors."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from pipeplan.runtime.transport.pair_communicator import PairCommunicator


def gloo(store: Store, end: int, timeout: timedelta) -> PairCommunicator:
    """As `pair_communicator.nccl`, between processors: returns once both ends are there."""
    return cast("PairCommunicator", ProcessGroupGloo(store, end, 2, timeout))
