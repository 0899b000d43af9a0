"""The ops of an allocation by number, and the distances that the chain alone imposes on them.

Forwards 0..L-1, backwards in chain order L..2L-1, behind them the transfers in chain order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.exact.allocations import room_beside
from pipeplan.ilp.segment_tables import Array


@dataclass(frozen=True, slots=True)
class TransferOp:
    """What crosses a cut behind a compute op."""

    op: int
    """Its own number."""
    behind: int
    """The producer; the consumer is the compute op after it."""
    link: tuple[int, ...]
    ns: int
    sent: int
    """Bytes on the sender that nothing else keeps there."""
    received: int


class OpTable:
    """What the ops of one micro-batch need, each layer for itself.

    Attributes:
        gpu: of each forward and backward.
        length: ns of each op, transfers included.
        own: bytes of its own micro-batch beside what is kept while it runs: all of them for a
            forward, those beyond A for a backward.
        kept: A of each layer.
        waits: bytes between each compute op and the next where both are on one GPU (M4).
        room: memory of each GPU beside its states and permanent buffers.
        is_continuous: whether bytes count at all times, or, in the paper's model, as ops start.
        transfers: over the cuts, in chain order.
    """

    def __init__(self, costs: CostModel, home: tuple[int, ...]) -> None:
        count = costs.layers
        self.layers, self.is_continuous = count, costs.exact
        self.layer = [*range(count), *reversed(range(count))]
        self.gpu = [home[layer] for layer in self.layer]
        cut = [not layer or home[layer - 1] != home[layer] for layer in range(count)]
        sizes = [costs.segment(layer, layer, not cut[layer]) for layer in range(count)]
        self.kept = [size.saved for size in sizes]
        self.own = [
            size.running if begins and costs.exact else size.forward
            for size, begins in zip(sizes, cut, strict=True)
        ]
        self.own += [size.backward for size in reversed(sizes)]
        self.room = room_beside(costs, home)
        overhead = costs.cluster.action_overhead_ns
        self.length = [
            (costs.forward_ns if op < count else costs.backward_ns)(layer, layer, home[layer])
            - (0 if cut[layer] else overhead)
            for op, layer in enumerate(self.layer)
        ]
        self.waits, self.transfers = [0] * (2 * count), list[TransferOp]()
        for op in range(2 * count - 1):
            if op != count - 1:
                self._hand_over(costs, op)

    def _hand_over(self, costs: CostModel, op: int) -> None:
        """What waits between an op and the next, or crosses the cut between them."""
        here, there = self.gpu[op], self.gpu[op + 1]
        back = op >= self.layers
        boundary = self.layer[op] - back
        bytes_ = costs.unsaved_bytes(boundary, backward=back)
        if here == there:
            self.waits[op] = bytes_
            return
        time = costs.send_backward_ns if back else costs.send_forward_ns
        counts = costs.exact  # else they are permanent buffers
        self.transfers.append(
            TransferOp(
                op=len(self.length),
                behind=op,
                link=costs.cluster.links.resource(here, there),
                ns=time(boundary, here, there),
                sent=bytes_ if counts else 0,
                received=costs.tensor_bytes(boundary, backward=back) if counts else 0,
            )
        )
        self.length.append(self.transfers[-1].ns)

    def back(self, layer: int) -> int:
        """The backward of a layer."""
        return 2 * self.layers - 1 - layer

    def paths(self, period: int, *, transfers: bool) -> Array:
        """[u, v] -> least t_v - t_u: behind what it waits for, by less than a period.

        Args:
            period: In ns.
            transfers: Whether they are ops that may wait as well; else time between two others.
        """
        over = {each.behind: each for each in self.transfers}
        begins, places = dict[int, int](), dict[int, int]()
        now = 0
        for op in range(2 * self.layers):
            begins[op], places[op] = now, len(places)
            now += self.length[op]
            if op in over and transfers:
                begins[over[op].op], places[over[op].op] = now, len(places)
            now += over[op].ns if op in over else 0
        begin = np.array([begins[op] for op in sorted(begins)], dtype=np.int64)
        place = np.array([places[op] for op in sorted(places)], dtype=np.int64)
        ahead = begin[None, :] - begin[:, None]
        late = (place[:, None] - place[None, :]) * (period - 1)
        paths: Array = np.where(late <= 0, ahead, ahead - late)
        return paths
