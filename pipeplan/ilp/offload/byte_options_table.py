"""How many bytes every segment of the chain can offload, all segments at once: (H1).

The vectorised form of `byte_options`. From left to right every set of layers has two lists of byte
counts, one if its last layer stays and one if it is offloaded; each list keeps `MOST` of them,
spread evenly, the least and the most always.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.segment_tables import Array

MOST = 10
"""Byte counts of a segment that are told apart."""
NEVER = np.int64(2**60)
"""In the place of a byte count that does not exist."""


@dataclass(frozen=True)
class ByteOptions:
    """[m, segment] -> byte counts with the last layer staying, and with it leaving."""

    stays: Array
    leaves: Array

    @classmethod
    def empty(cls, count: int) -> ByteOptions:
        """Of `count` segments without layers."""
        leaves = np.full((MOST, count), NEVER)
        stays = leaves.copy()
        stays[0] = 0
        return cls(stays, leaves)

    def at(self, where: slice | NDArray[np.intp]) -> ByteOptions:
        """Of some of the segments."""
        return ByteOptions(self.stays[:, where], self.leaves[:, where])

    def all(self) -> Array:
        """[m, segment] -> byte counts, fewest first; the most fills what is left."""
        found = _spread(np.concatenate([self.stays, self.leaves]))
        most = np.where(found < NEVER, found, -1).max(axis=0)
        made: Array = np.minimum(found, most)
        return made

    def kept(self, own: int, inner: int | Array) -> ByteOptions:
        """One more layer behind each, which keeps `own` bytes and `inner` of the boundary."""
        before = self._any()
        alone = np.where(before < NEVER, before + own, NEVER)
        joined = np.where(self.leaves < NEVER, self.leaves + own + inner, NEVER)
        return ByteOptions(before, _spread(np.concatenate([alone, joined])))

    def stopped(self) -> ByteOptions:
        """The same segments with a layer behind that never leaves."""
        return ByteOptions(self._any(), np.full_like(self.leaves, NEVER))

    def _any(self) -> Array:
        return _spread(np.concatenate([self.stays, self.leaves]))


def segment_byte_options(costs: CostModel) -> Array:
    """[m, i, j] -> what layers i..j as a stage can offload, fewest first."""
    count, layers = costs.layers, costs.chain.layers
    made = np.zeros((MOST, count, count), dtype=np.int64)
    lists = ByteOptions.empty(count)
    for last in range(count):
        before = ByteOptions.empty(count)
        # Segments that begin behind this layer stay empty.
        begun = np.arange(count) <= last
        inner = inner_bytes(costs.chain, last) if last else 0
        if last in costs.recomputed:
            grown = lists.stopped()
        else:
            grown = lists.kept(layers[last].saved_bytes, inner)
        lists = ByteOptions(
            np.where(begun, grown.stays, before.stays),
            np.where(begun, grown.leaves, before.leaves),
        )
        made[:, :, last] = lists.all()
    return made


def _spread(found: Array) -> Array:
    """`MOST` of the byte counts of each column, each once, the rest `NEVER`."""
    ordered = np.sort(found, axis=0)
    ordered[1:][ordered[1:] == ordered[:-1]] = NEVER
    ordered = np.sort(ordered, axis=0)
    counts = (ordered < NEVER).sum(axis=0)
    slots = np.arange(MOST)[:, None]
    even = np.round(slots * (counts - 1) / (MOST - 1)).astype(np.int64)
    place = np.where(counts <= MOST, np.minimum(slots, len(ordered) - 1), np.maximum(even, 0))
    return np.take_along_axis(ordered, place, axis=0)
