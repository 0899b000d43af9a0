"""What the GPU of the first layers lets through, whatever the plan and its stages.

Every micro-batch enters the chain on the GPU of layer 0 and comes back to it. Let layers 0..f be
the run that sits there first. Under the paper memory model a stage of several layers needs exactly
what its layers need one by one, back to back (P2)-(P4), so it is enough to look at single layers.
Bytes then depend on how many of its 2(f + 1) ops each micro-batch has done, and on which op
begins: the states in which one can go on forever are few. Let U be such that no more than U + m D
of work was ever done on the run in a state in which B_f of m is still to come, D = the work of a
micro-batch, and W such that no less than W + n D was when F_f of n ends. Then between the arrival
a(m) of the gradient of m and the end e(n) of F_f of n, where n >= m + c, the GPU works for

    e(n) - a(m) >= (n - m) D + W - U >= (n - m - c + 1) D,         c = ceil((U - W) / D) + 1.

So it lets no more through than one that takes c micro-batches in, and for each that comes back in
its turn works D and lets the next one go. Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import networkx as nx

from pipeplan.ilp.costs import CostModel
from pipeplan.units import ceil_div

MOST_STATES: Final = 20_000
"""States that are looked at; with more there is no answer."""

Progress = tuple[int, ...]
"""Ops done by each micro-batch on its way, the first that has not done all of them first."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """What the GPU of the first layers is at best."""

    work_ns: int
    """D, ns of one micro-batch."""
    copies: int
    """c; 0 where no micro-batch fits."""


def entrance(costs: CostModel, last: int) -> Entrance | None:
    """What holds where layers 0..`last` share a GPU and the next layer sits on another.

    Args:
        costs: Durations and bytes under the paper memory model.
        last: f, not the last layer of the chain.

    Returns:
        None where the states are too many, or an op has no length (its bytes have no instant).
    """
    run = _Run(costs, last)
    if costs.exact or min(run.lengths) <= 0:
        return None
    graph = _steps(run)
    if graph is None:
        return None
    lasting = {
        state
        for states in nx.strongly_connected_components(graph)
        if len(states) > 1
        for state in states
    }
    if not lasting:
        return Entrance(run.work, 0)
    before = max(run.done(state) - run.work * _first_away(state, last + 1) for state in lasting)
    behind = min(
        run.done(after) + run.work * (graph[state][after]["gone"] - graph[state][after]["index"])
        for state, after in graph.edges
        if {state, after} <= lasting and graph[state][after]["op"] == last
    )
    return Entrance(run.work, ceil_div(before - behind, run.work) + 1)


def _first_away(state: Progress, forwards: int) -> int:
    """The first micro-batch whose gradient may be still to come."""
    return next((index for index, ops in enumerate(state) if ops <= forwards), len(state))


@dataclass(frozen=True)
class _Run:
    """Bytes and ns of the layers 0..last, one by one, in the order F_0 .. F_last B_last .. B_0."""

    costs: CostModel
    last: int

    @cached_property
    def lengths(self) -> list[int]:
        """Ns of each op, without what a stage adds to it."""
        forward, backward = self.costs.compute_sums(0)
        layers = range(self.last + 1)
        return [
            *(forward[layer + 1] - forward[layer] for layer in layers),
            *(backward[layer + 1] - backward[layer] for layer in reversed(layers)),
        ]

    @cached_property
    def work(self) -> int:
        """D."""
        return sum(self.lengths)

    @cached_property
    def room(self) -> int:
        """Memory beside the states and one slot for each message of the cut behind the run."""
        states = sum(self.costs.segment(layer, layer).states for layer in range(self.last + 1))
        return self.costs.budgets[0] - states - 2 * self._size(self.last)

    @cached_property
    def held(self) -> list[int]:
        """Bytes of a micro-batch between two ops: (P2), (P4)."""
        return [self._saved(ops) + self._direct(ops) for ops in range(len(self.lengths) + 1)]

    @cached_property
    def working(self) -> list[int]:
        """Bytes of a micro-batch while an op runs: (P2), (P3)."""
        sizes = []
        for op in range(len(self.lengths)):
            layer = min(op, len(self.lengths) - 1 - op)
            size = self.costs.segment(layer, layer)
            sizes.append(self._saved(op) + (size.forward if op <= self.last else size.backward))
        return sizes

    def done(self, state: Progress) -> int:
        """Ns of the ops done by the micro-batches of a state."""
        return sum(self._until[ops] for ops in state)

    @cached_property
    def _until(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    def _size(self, boundary: int) -> int:
        return self.costs.tensor_bytes(boundary, backward=False)

    def _saved(self, ops: int) -> int:
        layers = min(ops, len(self.lengths) - ops)
        return sum(self.costs.segment(layer, layer).saved for layer in range(layers))

    def _direct(self, ops: int) -> int:
        """The tensor between two layers of the run, or its gradient, if it waits there."""
        layers = min(ops, len(self.lengths) - ops)
        return self._size(layers - 1) if 0 < layers <= self.last else 0


def _steps(run: _Run) -> nx.DiGraph[Progress] | None:
    """States that fit, with the op that leads from one to the next; None if they are too many.

    An edge has the op, the index of the micro-batch that does it, and how many are `gone` by it.
    """
    graph: nx.DiGraph[Progress] = nx.DiGraph()
    graph.add_node(())
    left: list[Progress] = [()]
    while left:
        state = left.pop()
        for index, op in _next_ops(run, state):
            ops = list(state) + [0] * (index == len(state))
            ops[index] += 1
            gone = int(ops[0] == len(run.lengths))
            after = tuple(ops[gone:])
            if after not in graph:
                left.append(after)
            graph.add_edge(state, after, op=op, index=index, gone=gone)
        if len(graph) > MOST_STATES:
            return None
    return graph


def _next_ops(run: _Run, state: Progress) -> list[tuple[int, int]]:
    """(index of the micro-batch, op) of what may begin: in order (R5), within the memory."""
    total = sum(run.held[ops] for ops in state)
    found = []
    for index, op in enumerate((*state, 0)):
        behind = index and state[index - 1] <= op
        if not behind and total - run.held[op] + run.working[op] <= run.room:
            found.append((index, op))
    return found
