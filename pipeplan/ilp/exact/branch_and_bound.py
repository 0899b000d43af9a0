"""Branch and bound over the orders of an allocation's ops: is there a schedule of a period?

One micro-batch per period on a given allocation. Ops are inserted one by one into the cyclic order
of their GPU (compare disjunctive graphs, Balas 1969): a node fixes the predecessor and the shift.
Places of a GPU say what is in memory when each of its ops starts, whatever the times; places of
all, with the chain, bound differences of times: t_v - t_u >= D[u, v], the longest path. A place is
given up where a cycle of bounds is longer than 0, or where bytes that are sure exceed a memory:

    at an op i of the GPU   states + own(i) + sum of A(l) * c(l, i) + tensors between its ops
    c(l, i), F_l and B_l placed:   turn(B_l) - turn(F_l) + [F_l before i] - [B_l before i]
             only F_l placed:      micro-batches since F_l  +  ceil(D[i, B_l] / T)
             neither placed:       floor((D[F_l, B_l] + d(B_l) + d(i) - 1) / T)
    on average over a period      sum of bytes times ns of a micro-batch / T, stays at least D

First without transfers: time between ops, without bytes. What is ruled out then is so for every
schedule; else again, with places for transfers as well (`transfer_branching`), and what is found
then is a schedule but for bytes of updates and of receives posted early by the sender's ops. What
is ruled out is so in every shorter period too (`cpsat.period_search`). In the paper's memory model
bytes count as compute ops start, so averages say nothing, and messages have permanent buffers. No
op need wait for a period or more: all behind it could come a period earlier, and nothing stays
longer. Limits on micro-batches in flight (R6) are left out. A stage of several layers is those
layers back to back: bytes of a running layer are at most those of its stage, overhead is counted
where stages surely begin. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.exact.op_table import OpTable
from pipeplan.ilp.exact.transfer_branching import CyclicOrder, TransferBranching, positions
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import OpKind, Stage

F, B, SEND_F, SEND_B = OpKind.F, OpKind.B, OpKind.SEND_F, OpKind.SEND_B

FIRST_NODES: Final = 250
"""Places tried as long as others have not been: a few allocations take most of the places."""
DEEPER: Final = 4
"""Factor from one turn of all to the next."""
QUICK_TURNS: Final = 2
"""Turns before the one that tries most."""
NODES: Final = FIRST_NODES * DEEPER**QUICK_TURNS
"""Places tried after which an allocation is left to CP-SAT."""
NODE_S: Final = 4e-5
"""Seconds that a place takes, about, .."""
TABLE_S: Final = 5e-4
""".. and the ops of an allocation."""

SENDING: Final = 4
"""How many times as many places are tried with transfers as without."""

LARGEST: Final = 1 << 58
"""Ns that times stay below, so that their sums are exact."""


def node_budget(seconds: float, turn: int) -> int:
    """The places without transfers that `decide` may try in so many seconds, in a turn of all."""
    return max(
        1, min(NODES, FIRST_NODES * int(DEEPER**turn), int(seconds / NODE_S / (1 + SENDING)))
    )


def decide(
    costs: CostModel,
    home: tuple[int, ...],
    period: int,
    taken: Callable[[Schedule], bool],
    clock: SearchClock,
    nodes: int = NODES,
) -> Status:
    """Whether a schedule of one micro-batch per period has this period or a shorter one.

    Args:
        costs: Durations and bytes.
        home: GPU of each layer.
        period: In ns.
        taken: Whether a schedule will do. It keeps (R2)-(R5) but for (T2)'s overhead of joined
            layers; its bytes are to be counted again. If it will not, other orders are tried.
        clock: Told of the work done.
        nodes: Places to try at most; `SENDING` times as many with transfers.

    Returns:
        UNKNOWN where none did, where there was more to try, or where an op has no length.
    """
    ops = OpTable(costs, home)
    clock.charge(TABLE_S)
    computes = ops.length[: 2 * ops.layers]
    if min(computes) <= 0 or 4 * len(ops.length) * period > LARGEST:
        return Status.UNKNOWN
    if max(ops.length) > period or min(ops.room) < 0:
        return Status.INFEASIBLE
    offered: list[Schedule] = []

    def tried(paths: Array) -> bool:
        offered.append(_schedule(ops, home, period, paths))
        return taken(offered[-1])

    for transfers, most in ((False, nodes), (True, SENDING * nodes)):
        search = _Search(ops, period, most, tried if transfers else None)
        found = search.place(0, ops.paths(period, transfers=transfers))
        clock.charge((most - max(0, search.left)) * NODE_S)
        if search.left >= 0 and found is None and not offered:
            return Status.INFEASIBLE
        if transfers and found is not None:
            return Status.FEASIBLE
    return Status.UNKNOWN


def _schedule(ops: OpTable, home: tuple[int, ...], period: int, paths: Array) -> Schedule:
    """Every op as early as D says; each layer a stage."""
    stages = tuple(Stage(id=n, layers=(n, n), gpu=gpu) for n, gpu in enumerate(home))
    times = {}
    for op, layer in enumerate(ops.layer):
        times[B if op >= ops.layers else F, layer] = (int(paths[0, op]),)
    for each in ops.transfers:
        kind = SEND_B if each.behind >= ops.layers else SEND_F
        times[kind, ops.layer[each.behind]] = (int(paths[0, each.op]),)
    return Schedule(stages, period, 1, times)


@dataclass
class _Search:
    """Depth-first over places."""

    ops: OpTable
    period: int
    left: int
    """Places that may still be tried."""
    taken: Callable[[Array], bool] | None
    """Whether a schedule of these longest paths will do; None where transfers are not placed."""

    def __post_init__(self) -> None:
        ops = self.ops
        self.orders: list[CyclicOrder] = [() for _ in ops.room]
        self.spare = [room * self.period for room in ops.room]
        for layer in range(ops.layers):
            forward, back, kept = ops.length[layer], ops.length[ops.back(layer)], ops.kept[layer]
            beside = (ops.own[layer] - kept) * forward + ops.own[ops.back(layer)] * back
            self.spare[ops.gpu[layer]] -= beside + kept * back

    def place(self, op: int, paths: Array) -> Array | None:
        """D with places for this op and all behind it; None if there are none, or too many."""
        ops = self.ops
        if op == 2 * ops.layers:
            return paths if self.taken is None else self._send(paths, self.taken)
        gpu = ops.gpu[op]
        order = self.orders[gpu]
        after, before = ops.length, -ops.length[op]
        for longer, new in positions(op, order, paths, self.period, after, [before] * len(after)):
            self.left -= 1
            if self.left < 0:
                return None
            self.orders[gpu] = longer
            found = self.place(op + 1, new) if self._fits(gpu, new) else None
            if found is not None:
                return found
            self.orders[gpu] = order
        return None

    def _send(self, paths: Array, taken: Callable[[Array], bool]) -> Array | None:
        """The same with places for transfers."""
        levels = [self._closed(order) if order else [] for order in self.orders]
        sending = TransferBranching(self.ops, self.period, self.orders, self.left, taken)
        found = sending.place(0, paths, levels)
        self.left = sending.left
        return found

    def _fits(self, gpu: int, paths: Array) -> bool:
        """Whether what is sure fits: on average on every GPU, at each op on this one."""
        ops = self.ops
        if ops.is_continuous and not self._fits_on_average(paths):
            return False
        order = self.orders[gpu]
        levels = self._closed(order)
        for layer, kept in enumerate(ops.kept):
            if ops.gpu[layer] == gpu and kept:
                self._open(layer, order, paths, levels)
        return max(levels) <= ops.room[gpu]

    def _fits_on_average(self, paths: Array) -> bool:
        """Whether bytes times ns of a micro-batch are at most each memory times a period."""
        ops, spare = self.ops, list(self.spare)
        for layer, kept in enumerate(ops.kept):
            spare[ops.gpu[layer]] -= kept * int(paths[layer, ops.back(layer)])
        return min(spare) >= 0

    def _closed(self, order: CyclicOrder) -> list[int]:
        """Bytes at each op of a GPU, of tensors whose two ops have a place, and its own."""
        ops, turn = self.ops, {op: -turn for op, turn in order}
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

    def _open(self, layer: int, order: CyclicOrder, paths: Array, levels: list[int]) -> None:
        """Add what a layer keeps whose backward, or both of whose ops, have no place yet."""
        ops, period = self.ops, self.period
        back, kept = ops.back(layer), ops.kept[layer]
        where = {op: (place, turn) for place, (op, turn) in enumerate(order)}
        if back in where:
            return
        if layer not in where:
            stay = int(paths[layer, back]) + ops.length[back] - 1
            for place, (op, _) in enumerate(order):
                levels[place] += kept * ((stay + ops.length[op]) // period)
            return
        begun, first = where[layer]
        for place, (op, turn) in enumerate(order):
            since = first - turn - (begun >= place)
            levels[place] += kept * (since - (-int(paths[op, back]) // period))
