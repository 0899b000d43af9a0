"""An assignment relaxation in CP-SAT: which GPU holds which unit at a fixed period.

The model has no times. V of the contiguous plan (`contiguous`) is written as constraints: each
unit and each cut lies in one of the periods counted from the end of the chain, a run of units on
one GPU in the same one, and a unit in period g keeps g micro-batches. That is exact for contiguous
plans; with several stages on a GPU their peaks need not coincide (pessimistic) and their orders
may conflict (optimistic). The model proposes allocations; exact scheduling decides. Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from pipeplan.ilp.cpsat.precedence import SEND_B, SEND_F, B, F, add_tied
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.cpsat.variables import Instance, Linear, Variables
from pipeplan.ilp.incumbent import SearchOptions

Assignment = tuple[int, ...]


@dataclass
class AssignmentModel:
    """One assignment model at one period (ticks)."""

    instance: Instance
    period: int
    most_cuts: int
    tabu: list[Assignment] = field(default_factory=list)
    """Allocations that must not come again."""

    def __post_init__(self) -> None:
        """Build the model."""
        self.v = Variables(self.instance, self.period)
        self.model = self.v.model
        count = len(self.instance.items)
        self.depth = [self.model.new_int_var(1, 4 * count, f"g_{n}") for n in range(count)]
        self._assign()
        self._count()
        self._memory()

    def solve(self, options: SearchOptions, seconds: float) -> Assignment | None:
        """An allocation that keeps all estimates, or None if there is none or time ran out."""
        solver = configured(options, seconds)
        if run(solver, self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return tuple(
            next(gpu for gpu in self.instance.gpus if solver.boolean_value(row[gpu]))
            for row in self.v.on
        )

    def _assign(self) -> None:
        """Loads, links that a cut may use, tied layers, few cuts, nothing tried before."""
        v, instance = self.v, self.instance
        items = range(len(instance.items))
        for gpu in instance.gpus:
            work = [
                sum(instance.ticks(kind, n, gpu, begins=n == 0) for kind in (F, B)) for n in items
            ]
            self.model.add(sum(work[n] * v.on[n][gpu] for n in items) <= self.period)
        cuts = [v.cut(n) for n in items[:-1]]
        self.model.add(sum(cuts) <= self.most_cuts)
        for n, cut in enumerate(cuts):
            if self._cut_ticks(n) > self.period:
                self.model.add(cut == 0)
        add_tied(v)
        for home in self.tabu:
            self.model.add(sum(v.on[n][gpu] for n, gpu in enumerate(home)) < len(home))

    def _pair(self) -> tuple[int, int]:
        """GPUs whose link stands for all: the assignment model only estimates."""
        return 0, self.instance.costs.gpus - 1

    def _cut_ticks(self, boundary: int) -> int:
        """Ticks that a cut keeps a link busy per micro-batch."""
        p, q = self._pair()
        if p == q:
            return 0
        forward = self.instance.send_ticks(SEND_F, boundary, p, q)
        backward = self.instance.send_ticks(SEND_B, boundary + 1, q, p)
        half = self.instance.costs.cluster.links.duplex == "half"
        return forward + backward if half else max(forward, backward)

    def _trip_ticks(self, boundary: int) -> int:
        p, q = self._pair()
        if p == q:
            return 0
        forward = self.instance.send_ticks(SEND_F, boundary, p, q)
        return forward + self.instance.send_ticks(SEND_B, boundary + 1, q, p)

    def _count(self) -> None:
        """V of every unit and cut, from the end of the chain; half-duplex cuts exclude too."""
        v, model, period = self.v, self.model, self.period
        count = len(self.instance.items)
        top = 4 * count * period
        behind: Linear = 0
        half = self.instance.costs.cluster.links.duplex == "half"
        for n in reversed(range(count)):
            work = v.length((F, n, 0)) + v.length((B, n, 0))
            span = model.new_int_var(0, top, f"v_{n}")
            if n + 1 < count:
                cut, trip = v.cut(n), self._trip_ticks(n)
                after = model.new_int_var(0, top, f"c_{n}")
                model.add(after >= behind)
                model.add(after >= behind + trip).only_enforce_if(cut)
                if half and trip:
                    turn = model.new_int_var(1, 4 * count, f"t_{n}")
                    model.add(after <= period * turn).only_enforce_if(cut)
                    model.add(after - trip >= period * (turn - 1)).only_enforce_if(cut)
                v.require(self.depth[n] == self.depth[n + 1], v.same(n, n + 1))
                behind = after
            model.add(span >= behind + work)
            model.add(span <= period * self.depth[n])
            model.add(span - work >= period * (self.depth[n] - 1))
            behind = span

    def _memory(self) -> None:
        """States, g copies of what units keep, the largest working set, tensors of the cuts."""
        v, instance, unit = self.v, self.instance, self.instance.unit
        costs, count = instance.costs, len(instance.items)
        sizes = [costs.segment(a, b, n > 0) for n, (a, b) in enumerate(instance.items)]
        for gpu in instance.gpus:
            terms: list[Linear] = []
            peak = self.model.new_int_var(0, costs.budgets[gpu] // unit, f"peak_{gpu}")
            for n, size in enumerate(sizes):
                here = v.on[n][gpu]
                copies = self.model.new_int_var(0, 4 * count, f"n_{n}_{gpu}")
                self.model.add(copies >= self.depth[n]).only_enforce_if(here)
                terms += [size.states // unit * here, size.saved // unit * copies]
                working = max(size.backward, size.forward - size.saved, size.optimizer, 0)
                self.model.add(peak >= working // unit).only_enforce_if(here)
                if self.instance.most is not None:
                    self.model.add(self.depth[n] <= self.instance.most)
            for n in range(count - 1):
                terms += self._boundary(n, gpu)
            self.model.add(sum(terms) + peak <= costs.budgets[gpu] // unit)

    def _boundary(self, boundary: int, gpu: int) -> list[Linear]:
        """Tensors of one cut on one GPU: all slots (paper), or those that wait a while (exact)."""
        costs, v = self.instance.costs, self.v
        layer = self.instance.items[boundary][1]
        if costs.exact:
            return []
        size = 2 * costs.tensor_bytes(layer, backward=False) // self.instance.unit
        if not size:
            return []
        cut = v.cut(boundary)
        sides = (v.on[boundary][gpu], v.on[boundary + 1][gpu])
        return [size * v.both(side, cut) for side in sides]
