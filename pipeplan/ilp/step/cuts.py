"""Where a placement's stages begin: GPUs' work even, and none that must wait for memory.

A micro-batch stays in stage s from the start of F to the end of B or I, at least as long as its
forwards and backwards from there to the end of the chain take. A GPU with `room` for saved bytes
therefore has a period of at least (sum of saved(s) * stay(s) + kept(s) * W(s)) / room (Little
1961), as well as its load. Its step takes m periods and, where no W fill it, the time in which a
micro-batch comes to its first stage and goes home from there. Random descent makes the steps of
all GPUs short and even. Memory may count more than once, as no schedule reaches this bound.
Source: ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Final, NamedTuple

from pipeplan.ilp.costs import CostModel

MEMORY: Final = (0.0, 1.0, 1.3, 1.7)
"""How often memory counts; each descent goes on from the cuts of the one before."""
TRIES: Final = 4_000
"""Moves of borders per descent."""
SHIFTS: Final = (-3, -2, -1, -1, 1, 1, 2, 3)
"""Layers by which borders move."""
RUNS: Final = 0.5
"""How likely all borders between two move along."""
NORM: Final = 8
"""Of the steps of all GPUs: if only the longest counted, most moves would change nothing."""
BEYOND_ROOM: Final = 50
"""Steps of a GPU that has no room for one micro-batch, in loads."""


class _Segment(NamedTuple):
    """One stage: ns of all its ops, and of W alone; bytes."""

    load: int
    weight: int
    saved: int
    kept: int
    states: int
    beyond: int


class CutSearch:
    """Random descent over the cuts of one placement after the other."""

    def __init__(
        self, costs: CostModel, random: Random, microbatches: int, *, split: bool
    ) -> None:
        self.costs, self.random, self.split = costs, random, split
        self.microbatches = microbatches
        self._segments: dict[tuple[int, int, float, bool], _Segment] = {}
        layers = range(costs.layers)
        stays = (costs.load_ns(layer, layer, 0) for layer in reversed(layers))
        self._stay = list(accumulate(stays))[::-1]
        """By first layer: ns from there to the end of the chain and back."""
        ways = (
            (costs.forward_ns if split else costs.load_ns)(layer, layer, 0) for layer in layers
        )
        self._way = list(accumulate(ways, initial=0))

    def all(self, placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """First layers of the stages, for all that memory may count; each cuts once."""
        cuts = [*_equal_work(self.costs, placement), self.costs.layers]
        seen = set()
        for memory in MEMORY:
            descent = _Descent(self, placement, cuts, memory)
            if memory and descent.steps == _Descent(self, placement, cuts, 0.0).steps:
                continue
            cuts = descent.run()
            if tuple(cuts) not in seen:
                seen.add(tuple(cuts))
                yield tuple(cuts[:-1])

    def segment(self, first: int, behind: int, gpu: int, *, covered: bool) -> _Segment:
        """A stage of layers first..behind - 1; `covered`: the stage before is on the same GPU."""
        costs, last = self.costs, behind - 1
        key = first, last, costs.cluster.gpus[gpu].speed, covered
        if key not in self._segments:
            size = costs.segment(first, last, covered)
            split = self.split and costs.may_split(first, last)
            forward = costs.split_forward_ns if split else costs.forward_ns
            backward = costs.input_backward_ns if split else costs.backward_ns
            weight = costs.weight_backward_ns(first, last, gpu) if split else 0
            self._segments[key] = _Segment(
                load=forward(first, last, gpu) + backward(first, last, gpu) + weight,
                weight=weight,
                saved=size.saved,
                kept=size.weight if split else 0,
                states=size.states,
                beyond=size.most_beyond_saved(split),
            )
        return self._segments[key]

    def way_ns(self, first: int) -> int:
        """Least time of a micro-batch before layer `first`: there, and back if no W fill it."""
        return self._way[first]

    def stay_ns(self, first: int) -> int:
        """How long a micro-batch is at least in a stage that begins with layer `first`."""
        return self._stay[first]


class _Descent:
    """Borders that move as long as the norm of the GPUs' steps does not grow."""

    def __init__(
        self, search: CutSearch, placement: Sequence[int], cuts: Sequence[int], memory: float
    ) -> None:
        self.search, self.placement, self.memory = search, placement, memory
        self.cuts = list(cuts)
        """Of all stages, and the number of layers."""
        self.hosted = [
            [stage for stage, gpu in enumerate(placement) if gpu == each]
            for each in range(search.costs.gpus)
        ]
        self.steps = [self._step(gpu) for gpu in range(search.costs.gpus)]
        self._scale = max(self.steps) or 1.0

    def run(self) -> list[int]:
        """The cuts where it ends."""
        cost, stages = self._cost(self.steps), len(self.placement)
        for _ in range(TRIES if stages > 1 else 0):
            before = list(self.cuts)
            touched = self._move(stages)
            if all(before[s] == self.cuts[s] for s in touched) or not self._in_order(touched):
                self.cuts = before
                continue
            steps = list(self.steps)
            for gpu in {self.placement[stage] for stage in touched}:
                steps[gpu] = self._step(gpu)
            new = self._cost(steps)
            if new <= cost:
                cost, self.steps = new, steps
            else:
                self.cuts = before
        return self.cuts

    def _move(self, stages: int) -> set[int]:
        """Move one border, or two, or all between two alike; the stages beside them."""
        random = self.search.random
        borders = [random.randrange(1, stages) for _ in range(random.choice((1, 2)))]
        by = random.choice(SHIFTS)
        if random.random() < RUNS:
            for border in range(min(borders), max(borders) + 1):
                self.cuts[border] += by
            return set(range(min(borders) - 1, max(borders) + 1))
        for border in borders:
            self.cuts[border] += by
            by = random.choice(SHIFTS)
        return {border - 1 for border in borders} | set(borders)

    def _in_order(self, touched: set[int]) -> bool:
        return all(self.cuts[stage] < self.cuts[stage + 1] for stage in touched)

    def _cost(self, steps: Sequence[float]) -> float:
        return sum((step / self._scale) ** NORM for step in steps)

    def _step(self, gpu: int) -> float:
        """The least step of a GPU in ns, by load, by memory and by the way."""
        if not self.hosted[gpu]:
            return 0.0
        load = held = saved = states = beyond = 0
        placement, cuts = self.placement, self.cuts
        for stage in self.hosted[gpu]:
            covered = stage > 0 and placement[stage - 1] == gpu
            own = self.search.segment(cuts[stage], cuts[stage + 1], gpu, covered=covered)
            load += own.load
            held += own.saved * self.search.stay_ns(cuts[stage]) + own.kept * own.weight
            saved += own.saved
            states += own.states
            beyond = max(beyond, own.beyond)
        budget = self.search.costs.budgets[gpu]
        period: float = load
        left = budget - states - beyond
        if left < saved:
            return self.search.microbatches * load * BEYOND_ROOM * (1 + (saved - left) / budget)
        if left:
            period = max(period, self.memory * held / left)
        way = self.search.way_ns(cuts[self.hosted[gpu][0]])
        return self.search.microbatches * period + way


def _equal_work(costs: CostModel, placement: Sequence[int]) -> list[int]:
    """Borders at which each stage has work in proportion to the speed of its GPU."""
    work = list(accumulate(x.forward_ns + x.backward_ns for x in costs.chain.layers))
    shares = list(accumulate(costs.cluster.gpus[gpu].speed for gpu in placement))
    cuts = [0]
    for index in range(1, len(placement)):
        border = bisect_left(work, work[-1] * shares[index - 1] / shares[-1]) + 1
        most = costs.layers - (len(placement) - index)
        cuts.append(min(max(border, cuts[-1] + 1), most))
    return cuts
