"""A lower bound for every k and every allocation: which layers share a GPU, counts by latency.

Let R(l) be the time from the start of layer l's forward to the end of its backward: at least the
work of layers l.. and both transfers of every cut behind l. With T ns per micro-batch, R(l) / T
are in flight on average, so at some start of F_l there are c >= ceil(R(l) / T), and at least c
until the next B_l starts. Whatever is in flight at l is so at every layer r < l too: its stay
there contains the stay at l. So on the GPU p of l at that start, whatever k is,

    states(p) + c * sum of A(r) over r <= l on p + working(l) <= M(p),

and on average, with w(r) and d(r) what F and B of r need beyond A and their lengths,

    states(p) + sum over r on p of ( A(r) R(r) + w(r) d(r) ) / T
            + sum over cuts at p of ( bytes of their messages * length of transfer ) / T <= M(p).

Counts, loads, averages and the cuts that do not fit into T only fall with growing T: infeasible at
T proves that no period up to T exists. Source: ours; it extends the count argument for one stage
per GPU (Little's law).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Final

from ortools.sat.python import cp_model

from pipeplan.ilp.bounds.load import min_link_occupancy
from pipeplan.ilp.cpsat.period_search import scaled
from pipeplan.ilp.cpsat.precedence import B, F, add_tied
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.cpsat.variables import Instance, Linear, Literal, Variables
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.segment_bytes import SegmentBytes

LEVELS: Final = 4
"""How many counts above the least one are told apart."""
MAX_PLACES: Final = 1200
"""Layers times GPUs up to which the bound is tried."""
PRECISION: Final = 20_000
"""The bound is sought to one part in this many."""
FIRST: Final = 32
"""The first step is the range between bound and best plan divided by this."""


def raise_bound(state: Incumbent, seconds: float) -> None:
    """Raise the bound for all plans, in steps that grow while they succeed and shrink after.

    Just above the bound contradictions are found soonest; a bisection would start where they are
    rare and spend its time there.
    """
    if state.best is None or state.costs.layers * state.costs.gpus > MAX_PLACES:
        return
    state.set_phase("counting bound")
    end = state.elapsed + min(seconds, state.remaining)
    low, high = int(state.bounds["any"]), int(-(-state.best.per_microbatch // 1))
    step = max(1, (high - low) // FIRST)
    while high - low > max(1, high // PRECISION) and not state.done and state.elapsed < end:
        middle = min(low + step, (low + high) // 2)
        tick = scaled(Instance(state.costs, ((0, 0),))).tick
        period = middle // tick
        if period and _impossible(state, period, tick, end - state.elapsed):
            low, step = max(middle, period * tick), 2 * step
            state.raise_bound("any", Fraction(period * tick))
            state.raise_bound("k1", Fraction(period * tick + 1))
        else:
            high, step = middle, max(1, step // 4)


def _impossible(state: Incumbent, period: int, tick: int, seconds: float) -> bool:
    """Whether no plan of at most `period` ticks per micro-batch is left."""
    layers = tuple((layer, layer) for layer in range(state.costs.layers))
    instance = replace(scaled(Instance(state.costs, layers)), tick=tick)
    solver = configured(state.options, seconds / 4)
    return run(solver, CountingRelaxation(instance, period).model) == cp_model.INFEASIBLE


@dataclass
class CountingRelaxation:
    """The relaxation at one period, layer by layer: a split stage has different counts."""

    instance: Instance
    period: int

    def __post_init__(self) -> None:
        """Build the model."""
        self.v = Variables(self.instance, self.period)
        self.model = self.v.model
        self._known: dict[tuple[int, int], Literal] = {}
        add_tied(self.v)
        for layer, busy in enumerate(min_link_occupancy(self.instance.costs)):
            if busy > self.period * self.instance.tick:
                self.model.add(self.v.same(layer, layer + 1) == 1)
        self._loads()
        spans = self._spans()
        for gpu in self.instance.gpus:
            self._memory(gpu, spans)

    def _ticks(self, item: int, gpu: int) -> int:
        return sum(self.instance.ticks(kind, item, gpu, begins=item == 0) for kind in (F, B))

    def _loads(self) -> None:
        items = range(len(self.instance.items))
        for gpu in self.instance.gpus:
            work = sum(self._ticks(n, gpu) * self.v.on[n][gpu] for n in items)
            self.model.add(work <= self.period)

    def _trips(self) -> list[int]:
        """Ticks of both transfers of each cut on the fastest pair of links."""
        return [forward + backward for forward, backward in self._trip_ticks]

    @cached_property
    def _trip_ticks(self) -> list[tuple[int, int]]:
        """Ticks of the forward and the backward transfer of each cut, each on its fastest link."""
        costs = self.instance.costs
        ends = [(p, q) for p in self.instance.gpus for q in self.instance.gpus if p != q]
        pairs = list({costs.link(*pair): pair for pair in ends}.values())

        def fastest(send: Callable[[int, int, int], int], layer: int) -> int:
            return min((send(layer, p, q) for p, q in pairs), default=0) // self.instance.tick

        return [
            (fastest(costs.send_forward_ns, layer), fastest(costs.send_backward_ns, layer))
            for layer in range(costs.layers - 1)
        ]

    def _works(self) -> list[int]:
        """Ticks of F and B of each item on the fastest GPU."""
        gpus = self.instance.gpus
        return [min(self._ticks(n, gpu) for gpu in gpus) for n in range(len(self.instance.items))]

    def _spans(self) -> list[Linear]:
        """R of each item: its own work, that of all behind it, the transfers of their cuts."""
        works, trips = self._works(), [*self._trips(), 0]
        span: Linear = 0
        spans: list[Linear] = []
        for n in reversed(range(len(works))):
            if n + 1 < len(works) and trips[n]:
                span = span + trips[n] * self.v.cut(n)
            span = span + works[n]
            spans.append(span)
        return spans[::-1]

    def _memory(self, gpu: int, spans: list[Linear]) -> None:
        """Both inequalities for one GPU."""
        v, instance = self.v, self.instance
        costs, unit = instance.costs, instance.unit
        count = len(instance.items)
        sizes = [costs.segment(a, b, n > 0) for n, (a, b) in enumerate(instance.items)]
        least = list(accumulate(reversed(self._works())))[::-1]
        states = sum(size.states // unit * v.on[n][gpu] for n, size in enumerate(sizes))
        states += sum(self._buffers(gpu))
        budget = costs.budgets[gpu] // unit
        self.model.add(states + self._average(gpu, sizes, least) <= budget)
        kept: Linear = 0
        for n in range(count):
            size, here = sizes[n], v.on[n][gpu]
            kept = kept + size.saved // unit * here
            working = max(size.forward - size.saved, size.backward) // unit
            least_count = -(-least[n] // self.period)
            for copies in range(max(1, least_count), least_count + LEVELS):
                held = states + copies * kept + working <= budget
                v.require(held, here, self._at_least(n, spans[n], copies))

    def _average(self, gpu: int, sizes: list[SegmentBytes], least: list[int]) -> Linear:
        """Memory units that a GPU holds on average beside its states."""
        v, unit = self.v, self.instance.unit * self.period
        total: Linear = 0
        for n, size in enumerate(sizes):
            kept = size.saved * self._kept_ticks(n, least[n]) + self._working(n, gpu, size)
            total = total + kept // unit * v.on[n][gpu]
        for n, trip in enumerate(self._trips()):
            while_sent = [size.saved * trip // unit for size in sizes[: n + 1]]
            if any(while_sent):
                held = sum(size * v.on[m][gpu] for m, size in enumerate(while_sent))
                waiting = self.model.new_int_var(0, sum(while_sent), f"average_{n}_{gpu}")
                v.require(waiting >= held, v.cut(n))
                total = total + waiting
            total = total + self._messages(n, gpu)
        return total

    def _working(self, item: int, gpu: int, size: SegmentBytes) -> int:
        """Bytes that F and B need beside what is saved, each times its ticks."""
        forward, backward = (
            self.instance.ticks(kind, item, gpu, begins=item == 0) for kind in (F, B)
        )
        beside = size.forward - size.saved if self.instance.costs.exact else size.forward
        return max(0, beside) * forward + max(0, size.backward) * backward

    def _messages(self, boundary: int, gpu: int) -> Linear:
        """Exact model: what a cut adds on average at either end while its tensors are sent."""
        costs, v = self.instance.costs, self.v
        if not costs.exact:
            return 0
        unit = self.instance.unit * self.period
        forward, backward = self._trip_ticks[boundary]
        ends = (
            (boundary, costs.unsaved_bytes(boundary, backward=False), forward,
             costs.tensor_bytes(boundary, backward=True), backward),
            (boundary + 1, costs.unsaved_bytes(boundary, backward=True), backward,
             costs.tensor_bytes(boundary, backward=False), forward),
        )  # fmt: skip
        total: Linear = 0
        for item, sent, leaving, received, coming in ends:
            size = (sent * leaving + received * coming) // unit
            if size:
                total = total + size * v.both(v.on[item][gpu], v.cut(boundary))
        return total

    def _kept_ticks(self, item: int, least: int) -> int:
        """How long a micro-batch is kept: from the start (exact) or the end (paper) of F."""
        if self.instance.costs.exact:
            return least
        back = (self.instance.ticks(B, item, gpu, begins=item == 0) for gpu in self.instance.gpus)
        return least - self._works()[item] + min(back)

    def _at_least(self, item: int, span: Linear, copies: int) -> Literal:
        """Whether R of an item exceeds `copies` - 1 periods, so that `copies` are in flight."""
        if isinstance(span, int):
            return int(span > self.period * (copies - 1))
        if (item, copies) not in self._known:
            literal = self.model.new_bool_var(f"c_{item}_{copies}")
            self.model.add(span <= self.period * (copies - 1)).only_enforce_if(literal.negated())
            self._known[item, copies] = literal
        return self._known[item, copies]

    def _buffers(self, gpu: int) -> list[Linear]:
        """Paper model: the slots of each cut that touches the GPU."""
        costs, v = self.instance.costs, self.v
        if costs.exact:
            return []
        terms: list[Linear] = []
        for n, (_, last) in enumerate(self.instance.items[:-1]):
            size = 2 * costs.tensor_bytes(last, backward=False) // self.instance.unit
            if size:
                sides = (v.on[n][gpu], v.on[n + 1][gpu])
                terms += [size * v.both(side, v.cut(n)) for side in sides]
        return terms
