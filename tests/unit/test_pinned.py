"""Page-locked blocks: their sizes, their second use, their end; CUDA is played by the tests."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from pipeplan.errors import RankError
from pipeplan.host_copy import CopyEngine
from pipeplan.pinned import PinnedPool


class Locks:
    """Takes note of what is locked."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.made = 0

    def lock(self, address: int, size: int) -> None:
        """No byte is locked twice, and every one is there to be written."""
        assert all(
            address >= other + length or other >= address + size
            for other, length in self.sizes.items()
        )
        self.sizes[address] = size
        self.made += 1

    def unlock(self, address: int) -> None:
        """What is not locked cannot be unlocked."""
        del self.sizes[address]


@pytest.fixture
def locks() -> Locks:
    """Nothing yet."""
    return Locks()


@pytest.fixture
def pool(locks: Locks) -> PinnedPool:
    """Without CUDA."""
    return PinnedPool(locks.lock, locks.unlock)


def test_blocks_are_of_just_the_size(pool: PinnedPool, locks: Locks) -> None:
    """No rounding up to a power of two: 5 MiB + 12 bytes take as much."""
    part = torch.empty(5 * 2**18 + 3)
    made = pool.empty_like(part)
    assert list(locks.sizes.items()) == [(made.data_ptr(), 5 * 2**20 + 12)]
    assert made.data_ptr() % 4096 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_are_like_what_they_are_made_for(pool: PinnedPool, dtype: torch.dtype) -> None:
    """Shape, type and order in memory; what is written is read."""
    for part in (
        torch.ones(3, 4, dtype=dtype).T,
        torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.ones((), dtype=dtype),
        torch.ones(0, 3, dtype=dtype),
    ):
        made, expected = pool.empty_like(part), torch.empty_like(part)
        assert (made.shape, made.dtype, made.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
        assert torch.equal(made.copy_(part), part)


def test_a_block_is_used_again_when_its_storage_is_gone(pool: PinnedPool, locks: Locks) -> None:
    """Not before: a view of it keeps it; and not for another size."""
    part = torch.empty(100)
    first = pool.empty_like(part)
    view, place = first[10:].view(-1), first.data_ptr()
    del first
    second = pool.empty_like(part)
    assert second.data_ptr() != place
    del view
    third = pool.empty_like(part)
    assert third.data_ptr() == place
    assert locks.made == 2
    pool.empty_like(torch.empty(101))
    assert sorted(locks.sizes.values()) == [400, 400, 404]


def test_nothing_stays_locked_behind_the_pool(locks: Locks) -> None:
    """Blocks in use are unlocked with their last tensor, idle ones with the pool."""
    pool = PinnedPool(locks.lock, locks.unlock)
    kept, idle = pool.empty_like(torch.empty(7)), pool.empty_like(torch.empty(8))
    del idle, pool
    gc.collect()
    assert list(locks.sizes.values()) == [28]
    kept.fill_(1)
    del kept
    gc.collect()
    assert locks.sizes == {}


def test_what_cannot_be_locked_is_named() -> None:
    """With the size and the next step; the pool works on."""

    def refuse(_: int, __: int) -> None:
        raise RuntimeError("out of memory")

    pool = PinnedPool(refuse, lambda _: pytest.fail("never locked"))
    with pytest.raises(RankError, match=r"got no 400 page-locked bytes \(.*out of memory.*ulimit"):
        pool.empty_like(torch.empty(100))


def test_a_copy_of_a_pool_is_an_empty_one(pool: PinnedPool) -> None:
    """A module that owns one can be copied."""
    used = pool.empty_like(torch.empty(100))
    assert isinstance(copy.deepcopy(pool), PinnedPool)
    assert used.numel() == 100


def test_ways_on_the_processor_lock_nothing(pool: PinnedPool, locks: Locks) -> None:
    """Ordinary memory will do there."""
    way = CopyEngine(torch.device("cpu"), duplex=False, pinned=pool)
    assert torch.equal(way.out([torch.ones(3)]).result()[0], torch.ones(3))
    way.close()
    assert locks.made == 0


def test_ways_of_gpus_use_the_pool(
    pool: PinnedPool, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round the same blocks."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    way = CopyEngine(torch.device("cuda", 0), duplex=False, pinned=pool)
    monkeypatch.setattr(CopyEngine, "_now", lambda _: (None, None))
    for number in range(4):
        copies = way.out([torch.full((5,), float(number)), torch.ones(9)])
        target = [torch.zeros(5), torch.zeros(9)]
        kept = list(target)
        way.back(target, copies.result).result()
        assert kept[0].tolist() == [number] * 5
        del copies
    way.close()
    assert locks.made == 2
