"""Whether forwards and backwards alone rule a period out: branch and bound over their orders.

One micro-batch per period on a given allocation. Op after op of the chain takes a place among
those of its GPU: behind which of them it comes, and how many periods later. Places of a GPU say
what is in memory when each of its ops starts, whatever the times; places of all, with the chain,
bound differences of times: t_v - t_u >= D[u, v], the longest path. A place is given up where a
cycle of bounds is longer than 0, or where bytes that are sure exceed a memory:

    at an op i of the GPU   states + own(i) + sum of A(l) * c(l, i) + tensors between its ops
    c(l, i), F_l and B_l placed:   turn(B_l) - turn(F_l) + [F_l before i] - [B_l before i]
             only F_l placed:      micro-batches since F_l  +  ceil(D[i, B_l] / T)
             neither placed:       floor((D[F_l, B_l] + d(B_l) + d(i) - 1) / T)
    on average over a period      sum of bytes times ns of a micro-batch / T, stays at least D

Left out are bytes of messages and of updates, and that transfers exclude each other: what is
ruled out here is so for every schedule, and in every shorter period (`periods`). Then no op need
wait for a period or more: all behind it could come a period earlier, and nothing stays longer.
A stage of several layers is those layers back to back: bytes of a running layer are at most those
of its stage, overhead is counted where stages surely begin. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeplan.ilp.clock import Clock
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.tables import Array

NODES: Final = 4000
"""Places tried after which an allocation is left to CP-SAT."""
NODE_S: Final = 1e-4
"""Seconds that a place takes, about."""

LARGEST: Final = 1 << 58
"""Ns that times stay below, so that their sums are exact."""

Ring = tuple[tuple[int, int], ...]
"""(op, turn) of a GPU's ops by their places in a period that begins with the first: at the time
t + turn * T the op lies in the period after the first one's time."""


class Ops:
    """The forwards and backwards of an allocation, numbered along the chain.

    Attributes:
        gpu: of each op.
        length: ns of each.
        behind: ns from the start of each to the earliest start of the next.
        own: bytes of its own micro-batch beside what is kept while it runs: all of them for a
            forward, those beyond A for a backward.
        kept: A of each layer.
        waits: bytes between each op and the next where both are on one GPU (M4).
        room: memory of each GPU beside its states.
    """

    def __init__(self, costs: Costs, home: tuple[int, ...]) -> None:
        count = costs.layers
        self.layers = count
        self.layer = [*range(count), *reversed(range(count))]
        self.gpu = [home[layer] for layer in self.layer]
        self.room = list(costs.budgets)
        cut = [not layer or home[layer - 1] != home[layer] for layer in range(count)]
        sizes = [costs.segment(layer, layer, not cut[layer]) for layer in range(count)]
        self.kept = [size.saved for size in sizes]
        self.own = [
            size.running if begins else size.forward
            for size, begins in zip(sizes, cut, strict=True)
        ]
        self.own += [size.backward for size in reversed(sizes)]
        for gpu, size in zip(home, sizes, strict=True):
            self.room[gpu] -= size.states
        overhead = costs.cluster.action_overhead_ns
        self.length = [
            time(layer, layer, home[layer]) - (0 if cut[layer] else overhead)
            for time, layers in (
                (costs.forward_ns, range(count)),
                (costs.backward_ns, reversed(range(count))),
            )
            for layer in layers
        ]
        self.behind, self.waits = list(self.length), [0] * (2 * count)
        for layer in range(count - 1):
            here, there, back = home[layer], home[layer + 1], 2 * count - 2 - layer
            if here == there:
                self.waits[layer] = costs.unsaved_bytes(layer, backward=False)
                self.waits[back] = costs.unsaved_bytes(layer, backward=True)
            else:
                self.behind[layer] += costs.send_forward_ns(layer, here, there)
                self.behind[back] += costs.send_backward_ns(layer, there, here)

    def back(self, layer: int) -> int:
        """The backward of a layer."""
        return 2 * self.layers - 1 - layer

    def paths(self, period: int) -> Array:
        """D of the chain alone: behind what it waits for, by less than a period."""
        begins = np.concatenate([[0], np.cumsum(np.array(self.behind[:-1], dtype=np.int64))])
        place = np.arange(len(begins))
        ahead = begins[None, :] - begins[:, None]
        late = (place[:, None] - place[None, :]) * (period - 1)
        paths: Array = np.where(ahead >= 0, ahead, ahead - late)
        return paths


def ruled_out(
    costs: Costs, home: tuple[int, ...], period: int, clock: Clock, nodes: int = NODES
) -> bool | None:
    """Whether no schedule of one micro-batch per period has this period or a shorter one.

    Args:
        costs: Durations and bytes; only the exact memory model is understood.
        home: GPU of each layer.
        period: In ns.
        clock: Told of the work done.
        nodes: Places to try at most.

    Returns:
        True is a proof; None if there were more places to try, or ops without length.
    """
    ops = Ops(costs, home)
    if not costs.exact or min(ops.length) <= 0 or len(ops.gpu) * period > LARGEST:
        return None
    if max(ops.length) > period or min(ops.room) < 0:
        return True
    search = _Search(ops, period, nodes)
    found = search.place(0, ops.paths(period))
    clock.spend((nodes - search.left) * NODE_S)
    return None if search.left < 0 else not found


@dataclass
class _Search:
    """Depth-first over places."""

    ops: Ops
    period: int
    left: int
    """Places that may still be tried."""

    def __post_init__(self) -> None:
        ops = self.ops
        self.rings: list[Ring] = [() for _ in ops.room]
        self.spare = [room * self.period for room in ops.room]
        for layer in range(ops.layers):
            forward, back, kept = ops.length[layer], ops.length[ops.back(layer)], ops.kept[layer]
            beside = (ops.own[layer] - kept) * forward + ops.own[ops.back(layer)] * back
            self.spare[ops.gpu[layer]] -= beside + kept * back

    def place(self, op: int, paths: Array) -> bool:
        """Whether this op and all behind it find places, as far as is tried."""
        if op == len(self.ops.length):
            return True
        gpu = self.ops.gpu[op]
        ring = self.rings[gpu]
        for longer, new in self._places(op, ring, paths):
            self.left -= 1
            if self.left < 0:
                return True
            self.rings[gpu] = longer
            if self._fits(gpu, new) and self.place(op + 1, new):
                return True
            self.rings[gpu] = ring
        return False

    def _places(self, op: int, ring: Ring, paths: Array) -> Iterator[tuple[Ring, Array]]:
        """Each place of an op among those of its GPU, earliest first, with D then."""
        if not ring:
            yield ((op, 0),), paths
            return
        period, length = self.period, self.ops.length
        late = int(paths[ring[0][0], op]) // period
        while True:
            for index, (before, turn) in enumerate(ring):
                after, following = ring[(index + 1) % len(ring)]
                following += index + 1 == len(ring)
                begin = (turn + late) * period + length[before]
                end = (following + late) * period - length[op]
                if begin > -paths[op, before]:
                    return
                new = _with(paths, before, op, begin)
                if new is not None:
                    new = _with(new, op, after, -end)
                if new is not None:
                    yield (*ring[: index + 1], (op, -late), *ring[index + 1 :]), new
            late += 1

    def _fits(self, gpu: int, paths: Array) -> bool:
        """Whether what is sure fits: on average on every GPU, at each op on this one."""
        ops, spare = self.ops, list(self.spare)
        for layer, kept in enumerate(ops.kept):
            spare[ops.gpu[layer]] -= kept * int(paths[layer, ops.back(layer)])
        if min(spare) < 0:
            return False
        ring = self.rings[gpu]
        levels = self._closed(ring)
        for layer, kept in enumerate(ops.kept):
            if ops.gpu[layer] == gpu and kept:
                self._open(layer, ring, paths, levels)
        return max(levels) <= ops.room[gpu]

    def _closed(self, ring: Ring) -> list[int]:
        """Bytes at each op of a GPU, of tensors whose two ops have a place, and its own."""
        ops, turn = self.ops, {op: -turn for op, turn in ring}
        level, levels = 0, []
        for op in turn:
            back = ops.back(op)
            if op < back and back in turn:
                level += ops.kept[op] * (turn[back] - turn[op])
            if ops.waits[op] and op + 1 in turn:
                level += ops.waits[op] * (turn[op + 1] - turn[op])
        for op in turn:
            if op and op - 1 in turn:
                level -= ops.waits[op - 1]
            levels.append(level + ops.own[op])
            if ops.back(op) in turn:
                level += ops.kept[ops.layer[op]] * (1 if op < ops.layers else -1)
            if op + 1 in turn:
                level += ops.waits[op]
        return levels

    def _open(self, layer: int, ring: Ring, paths: Array, levels: list[int]) -> None:
        """Add what a layer keeps whose backward, or both of whose ops, have no place yet."""
        ops, period = self.ops, self.period
        back, kept = ops.back(layer), ops.kept[layer]
        where = {op: (place, turn) for place, (op, turn) in enumerate(ring)}
        if back in where:
            return
        if layer not in where:
            stay = int(paths[layer, back]) + ops.length[back] - 1
            for place, (op, _) in enumerate(ring):
                levels[place] += kept * ((stay + ops.length[op]) // period)
            return
        begun, first = where[layer]
        for place, (op, turn) in enumerate(ring):
            since = first - turn - (begun >= place)
            levels[place] += kept * (since - (-int(paths[op, back]) // period))


def _with(paths: Array, one: int, other: int, least: int) -> Array | None:
    """D with t_other - t_one >= least; None if that cannot be."""
    if least + paths[other, one] > 0:
        return None
    if least <= paths[one, other]:
        return paths
    longer: Array = np.maximum(paths, paths[:, one, None] + least + paths[None, other, :])
    return longer
