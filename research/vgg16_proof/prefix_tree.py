"""Every allocation of a short chain, by how it begins: a period that none can keep.

GPUs are given to the layers in chain order. Where sums rule a beginning out, or `rounds` do, all
allocations that begin so are ruled out with it; else it is asked with one layer more. Sums are
those of `exact.enumeration`, over the layers that are there: load of a GPU and of a link, the room
left for the work of all others, and R(l) <= c(l) T with the layers behind all on one GPU. Where a
whole allocation is left, many more rounds are asked of its beginnings, the shortest first. Source:
ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal

from ortools.sat.python import cp_model

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.incumbent import Incumbent
from research.vgg16_proof.admission import Entrance, entrance
from research.vgg16_proof.cyclic_window import Loop

MOST_COPIES: Final = 4
"""Micro-batches that the first GPU takes in at most; with more, sums say nearly all."""
FEW: Final = 2
"""Rounds in a row that each beginning is asked for."""
MORE: Final = 3
"""Rounds that a whole allocation is asked for besides."""
MANY: Final = 6
"""Rounds asked of the beginnings of an allocation that is left: what differs at both ends of a row
counts less in a long one."""
ASK_S: Final = 10.0
"""Time limit of a question of few rounds."""

Assignment = tuple[int, ...]
Reason = Literal["sums", "rounds", "open"]


@dataclass(frozen=True, slots=True)
class Ruled:
    """What became of all allocations that begin with `home`."""

    home: Assignment
    reason: Reason
    rounds: int = 0
    """How many in a row do not fit; 0 where sums say so, or where it is open."""


@dataclass
class Beginnings:
    """The tree of beginnings at one period per micro-batch, of GPUs that are all alike."""

    state: Incumbent
    period: Fraction
    end: float
    """When to stop, in seconds of the state's clock: what is left then is open."""
    _gates: dict[int, Entrance | None] = field(default_factory=dict)
    _late: set[Assignment] = field(default_factory=set)
    """Beginnings ruled out only after an allocation that begins so was left."""

    def ruled(self, home: Assignment = (0,)) -> Iterator[Ruled]:
        """Each beginning at which the tree ends: none is open if no plan keeps the period."""
        if not self._sums_allow(home):
            yield Ruled(home, "sums")
        elif self._refuted(home, FEW, ASK_S):
            yield Ruled(home, "rounds", FEW)
        elif len(home) == self.state.costs.layers:
            yield self._whole(home)
        elif self.state.elapsed >= self.end:
            yield Ruled(home, "open")
        else:
            for gpu in range(min(self.state.costs.gpus, max(home) + 2)):
                if not any(home[: len(late)] == late for late in self._late):
                    yield from self.ruled((*home, gpu))

    def _whole(self, home: Assignment) -> Ruled:
        """What more rounds say of an allocation, or of all that share a beginning with it."""
        if self._refuted(home, MORE, ASK_S):
            return Ruled(home, "rounds", MORE)
        for layer in range(2, len(home)):
            begun = home[: layer + 1]
            new = home[layer] != home[layer - 1] and max(home[:layer]) > 0
            if new and self._refuted(begun, MANY, self.end - self.state.elapsed):
                self._late.add(begun)
                return Ruled(begun, "rounds", MANY)
        return Ruled(home, "open")

    def _refuted(self, home: Assignment, rounds: int, seconds: float) -> bool:
        """Whether `rounds` of c micro-batches in a row are proven to be too many."""
        if max(home) == 0:
            return False
        gate = self._gate(next(layer for layer, gpu in enumerate(home) if gpu) - 1)
        if gate is None or gate.copies > MOST_COPIES:
            return False
        if gate.copies == 0:
            return True
        left = max(0.1, min(seconds, self.end - self.state.elapsed))
        solver = configured(self.state.options, left)
        model = Loop.of(self.state.costs, home, gate).model(self.period, rounds * gate.copies)
        return run(solver, model) == cp_model.INFEASIBLE

    def _gate(self, last: int) -> Entrance | None:
        if last not in self._gates:
            self._gates[last] = entrance(self.state.costs, last)
        return self._gates[last]

    def _sums_allow(self, home: Assignment) -> bool:
        """Whether loads, links, work left and counts leave the period possible."""
        costs = self.state.costs
        loads = [0] * costs.gpus
        links: dict[tuple[int, int], int] = {}
        for layer, gpu in enumerate(home):
            loads[gpu] += _work(costs, layer)
            for place, length in _sent(costs, home, layer):
                links[place] = links.get(place, 0) + length
        left = sum(_work(costs, layer) for layer in range(len(home), costs.layers))
        if max([*loads, *links.values()]) > self.period:
            return False
        if sum(self.period - load for load in loads) < left:
            return False
        return self._counts_allow(home, left)

    def _counts_allow(self, home: Assignment, left: int) -> bool:
        """R(l) <= c(l) T for each layer that is there."""
        costs = self.state.costs
        room = list(costs.budgets)
        kept: list[int] = []
        sums = [0] * costs.gpus
        for layer, gpu in enumerate(home):
            size = costs.segment(layer, layer)
            room[gpu] -= size.states
            sums[gpu] += size.saved
            kept.append(sums[gpu])
            if layer and home[layer - 1] != gpu:
                for end in (gpu, home[layer - 1]):
                    room[end] -= 2 * costs.tensor_bytes(layer - 1, backward=False)
        span = left
        for layer in reversed(range(len(home))):
            size, gpu = costs.segment(layer, layer), home[layer]
            span += _work(costs, layer)
            free = room[gpu] - max(size.forward - size.saved, size.backward)
            if free < kept[layer] or (kept[layer] and span > free // kept[layer] * self.period):
                return False
            span += sum(length for _, length in _sent(costs, home, layer))
        return True


def proves(state: Incumbent, period: Fraction, end: float) -> bool:
    """Whether no plan of any k has a period per micro-batch up to `period`, found before `end`."""
    return all(each.reason != "open" for each in Beginnings(state, period, end).ruled())


def _work(costs: CostModel, layer: int) -> int:
    """Ns of both ops of a layer, without what a stage adds to them."""
    forward, backward = costs.compute_sums(0)
    return forward[layer + 1] - forward[layer] + backward[layer + 1] - backward[layer]


def _sent(costs: CostModel, home: Sequence[int], layer: int) -> list[tuple[tuple[int, int], int]]:
    """(link, ns) of both transfers of the cut before a layer, if there is one."""
    if not layer or home[layer - 1] == home[layer]:
        return []
    before, here, links = home[layer - 1], home[layer], costs.cluster.links
    return [
        (links.resource(before, here), costs.send_forward_ns(layer - 1, before, here)),
        (links.resource(here, before), costs.send_backward_ns(layer - 1, here, before)),
    ]
