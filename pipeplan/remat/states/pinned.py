"""Buffers of the host in groups whose sizes are nearly powers of two.

torch rounds each pinned allocation up to the next power of two. X. Zhao's thesis, section 4.7.2,
allocates groups and names no method; this is first fit by decreasing size (Johnson 1973), into
bins of each power of two at most that of the sum, of which the least total is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedGroup:
    """Buffers that are allocated as one; `bytes` is a power of two."""

    buffers: tuple[int, ...]
    bytes: int


def pinned_groups(sizes: Sequence[int]) -> tuple[PinnedGroup, ...]:
    """Groups of all buffers, by index; `sizes` are positive bytes."""
    if not sizes:
        return ()
    least, most = _power(max(sizes)), _power(sum(sizes))
    capacities = [1 << bits for bits in range(least.bit_length() - 1, most.bit_length())]
    alone = tuple(PinnedGroup((at,), _power(size)) for at, size in enumerate(sizes))
    found = [_packed(sizes, capacity) for capacity in capacities]
    return min((alone, *found), key=lambda groups: sum(group.bytes for group in groups))


def _power(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << (size - 1).bit_length()


def _packed(sizes: Sequence[int], capacity: int) -> tuple[PinnedGroup, ...]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        place = next((b for b, room in enumerate(rooms) if room >= sizes[at]), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[place].append(at)
        rooms[place] -= sizes[at]
    return tuple(PinnedGroup(tuple(own), _power(sum(sizes[at] for at in own))) for own in bins)
