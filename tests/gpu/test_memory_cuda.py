"""Page-locked blocks of our own, and what a GPU says of its memory."""

from __future__ import annotations

import pytest
import torch

from pipeplan.host_copy import CopyEngine
from pipeplan.pinned import PinnedPool
from pipeplan.runtime.startup.gpu_memory import GpuMemory, GpuMemoryUse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]


def test_copies_go_through_blocks_of_just_the_size() -> None:
    """CUDA takes them for pinned, also the second time; bytes survive the way there and back."""
    pool, device = PinnedPool(), torch.device("cuda", 0)
    way = CopyEngine(device, duplex=True, pinned=pool)
    places = set()
    for number in range(3):
        source = torch.full((3, 2**19 + 1), float(number), device=device)
        copies = way.out([source])
        (host,) = copies.result()
        places.add(host.data_ptr())
        assert host.is_pinned()
        assert host.untyped_storage().nbytes() == source.nbytes
        target = torch.zeros_like(source)
        way.back([target], copies.result).result()
        way.join()
        assert torch.equal(target, torch.full_like(target, number))
        del host, copies
    assert len(places) == 1
    way.close()


def test_room_and_what_is_taken_of_it() -> None:
    """A tensor is missing in what is free or counted as held, and in what was taken."""
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    GpuMemoryUse.start(device)
    before = GpuMemory.of(device)
    kept = torch.ones(2**26, dtype=torch.uint8, device=device)
    room, taken = GpuMemory.of(device), GpuMemoryUse.since_start(device)
    assert before is not None
    assert room is not None
    assert room.total == before.total > room.free
    assert room.held >= kept.nbytes
    assert taken.allocated is not None
    assert taken.reserved is not None
    assert kept.nbytes <= taken.allocated <= taken.reserved
