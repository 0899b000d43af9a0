"""Places for the transfers of an allocation whose forwards and backwards all have theirs.

A transfer e of w ns takes a place on its link; another among the starts of its
sender's ops, behind which its bytes there are given back (O4); and one among the ends of its
receiver's, behind which they are there: an op that ends later finds them posted (O3). Each place
is two bounds on differences of times, and says how many copies each op finds:

    sender    end of producer .. t_e + w:   t_x + k T < t_e + w <= t_y + k' T
    receiver  t_e .. start of consumer:     t_x + d_x + k T <= t_e < t_y + d_y + k' T
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pipeplan.ilp.exact.op_table import OpTable, TransferOp
from pipeplan.ilp.segment_tables import Array

TRIAL: Final = 100
"""Places that one question whether a schedule will do counts as: its times are made anew."""

CyclicOrder = tuple[tuple[int, int], ...]
"""(op, turn) of what shares a GPU or link, by places in a period that begins with the first: at
the time t + turn * T the op lies in the period after the first one's time."""


def positions(
    op: int,
    order: CyclicOrder,
    paths: Array,
    period: int,
    after: Sequence[int],
    before: Sequence[int],
) -> Iterator[tuple[CyclicOrder, Array]]:
    """Each place of an op in a order, earliest first, with the longest paths then.

    Args:
        op: What is placed.
        order: What has its place already.
        paths: [u, v] -> least t_v - t_u.
        period: In ns.
        after: By op, least time of `op` beyond that of what it is placed behind.
        before: By op, most time of `op` beyond that of what it is placed before.
    """
    if not order:
        yield ((op, 0),), paths
        return
    late = int(paths[order[0][0], op]) // period - 1
    while True:
        for index, (one, turn) in enumerate(order):
            other, following = order[(index + 1) % len(order)]
            following += index + 1 == len(order)
            begin = (turn + late) * period + after[one]
            end = (following + late) * period + before[other]
            if begin > -paths[op, one]:
                return
            new = _with(paths, one, op, begin)
            if new is not None:
                new = _with(new, op, other, -end)
            if new is not None:
                yield (*order[: index + 1], (op, -late), *order[index + 1 :]), new
        late += 1


def _with(paths: Array, one: int, other: int, least: int) -> Array | None:
    """Longest paths with t_other - t_one >= least; None if that cannot be."""
    if least + paths[other, one] > 0:
        return None
    if least <= paths[one, other]:
        return paths
    longer: Array = np.maximum(paths, paths[:, one, None] + least + paths[None, other, :])
    return longer


@dataclass
class TransferBranching:
    """Depth-first over places of transfers, in chain order."""

    ops: OpTable
    period: int
    orders: list[CyclicOrder]
    """Of the GPUs."""
    left: int
    """Places that may still be tried."""
    taken: Callable[[Array], bool]
    """Whether a schedule of these longest paths will do; else others are sought."""
    links: dict[tuple[int, ...], CyclicOrder] = field(default_factory=dict)

    def place(self, number: int, paths: Array, levels: list[list[int]]) -> Array | None:
        """Longest paths with places for this transfer and all behind it; None if there are none.

        Args:
            number: Of the transfer.
            paths: So far.
            levels: By GPU, bytes at each op of its order.
        """
        if any(max(level, default=0) > room for level, room in self._filled(levels)):
            return None
        if number == len(self.ops.transfers):
            self.left -= TRIAL
            return paths if self.taken(paths) else None
        each = self.ops.transfers[number]
        order = self.links.get(each.link, ())
        for longer, new in self._linked(each, order, paths):
            self.links[each.link] = longer
            for last, more in self._held(each, new, levels):
                self.left -= 1
                if self.left < 0:
                    return None
                found = self.place(number + 1, last, more)
                if found is not None:
                    return found
        self.links[each.link] = order
        return None

    def _filled(self, levels: list[list[int]]) -> Iterator[tuple[list[int], int]]:
        return zip(levels, self.ops.room, strict=True)

    def _linked(
        self, each: TransferOp, order: CyclicOrder, paths: Array
    ) -> Iterator[tuple[CyclicOrder, Array]]:
        """Places on the link; one without length lies between others as well (R4)."""
        length = self.ops.length
        return positions(each.op, order, paths, self.period, length, [-each.ns] * len(length))

    def _held(
        self, each: TransferOp, paths: Array, levels: list[list[int]]
    ) -> Iterator[tuple[Array, list[list[int]]]]:
        """Places among the ops of sender and receiver, with the bytes that they find then."""
        ops, count = self.ops, len(self.ops.length)
        here, there = ops.gpu[each.behind], ops.gpu[each.behind + 1]
        frees = [1 - each.ns] * count, [-each.ns] * count
        posts = ops.length, [length - 1 for length in ops.length]
        for order, one in self._places(each.op, here, paths, frees, each.sent):
            sent = self._copies(order, each.behind, each.op, each.sent) if each.sent else None
            for other, last in self._places(each.op, there, one, posts, each.received):
                more = list(levels)
                if sent is not None:
                    more[here] = [a + b for a, b in zip(more[here], sent, strict=True)]
                if each.received:
                    found = self._copies(other, each.op, each.behind + 1, each.received)
                    more[there] = [a + b for a, b in zip(more[there], found, strict=True)]
                yield last, more

    def _places(
        self, op: int, gpu: int, paths: Array, bounds: tuple[list[int], list[int]], size: int
    ) -> Iterator[tuple[CyclicOrder, Array]]:
        if not size:
            return iter([((), paths)])
        return positions(op, self.orders[gpu], paths, self.period, *bounds)

    def _copies(self, order: CyclicOrder, begin: int, end: int, size: int) -> list[int]:
        """Bytes at each op of a GPU of a tensor from one event of its order to another.

        An op does not find what it makes, nor what it uses up.
        """
        where = {op: (place, -turn) for place, (op, turn) in enumerate(order)}
        (first, since), (last, until) = where[begin], where[end]
        transfer = begin if begin >= 2 * self.ops.layers else end
        return [
            size * (until - since + (first < place) - (last <= place))
            for place, (op, _) in enumerate(order)
            if op != transfer
        ]
