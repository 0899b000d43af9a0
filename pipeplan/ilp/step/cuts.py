"""Where a placement's stages begin: GPUs' loads even, and none that must wait for memory.

A micro-batch stays in stage s from the start of F to the end of B or I, at least as long as it
takes to go to the end of the chain and back. A GPU with `room` for saved bytes therefore has a
period of at least (sum of saved(s) * stay(s) + kept(s) * W(s)) / room (Little 1961), as well as
its load. Cuts make the longest of these periods short. Memory counts `weight` times, as no
schedule reaches this bound. Source: ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import log, sqrt
from random import Random
from typing import Final, NamedTuple

from pipeplan.ilp.costs import CostModel

WEIGHTS: Final = (0.0, 1.0, 1.3, 1.7)
"""How often memory counts; 0: only loads do."""
MOVES: Final = 15_000
"""Of one annealing, times stages."""
TEMPERATURE: Final = 0.02
"""At its start, as a share of the cost."""
BEYOND_ROOM: Final = 50
"""Periods of a GPU that has no room for one micro-batch, in loads."""


class _Segment(NamedTuple):
    """One stage: F, B or I, and W in ns; bytes."""

    forward: int
    backward: int
    weight: int
    saved: int
    kept: int
    states: int
    beyond: int


class CutSearch:
    """Simulated annealing over the cuts of one placement after the other."""

    def __init__(self, costs: CostModel, random: Random, *, split: bool) -> None:
        self.costs, self.random, self.split = costs, random, split
        self._segments: dict[tuple[int, int, float, bool], _Segment] = {}
        self._trips: dict[tuple[int, int, int], int] = {}

    def all(self, placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """First layers of the stages, for all weights of memory that matter; each cuts once."""
        cuts = _equal_work(self.costs, placement)
        seen = set()
        for weight in WEIGHTS:
            if weight and self._cost(cuts, placement, weight) == self._cost(cuts, placement, 0):
                continue
            cuts = self._anneal(cuts, placement, weight)
            if tuple(cuts) not in seen:
                seen.add(tuple(cuts))
                yield tuple(cuts)

    def _anneal(self, cuts: list[int], placement: Sequence[int], weight: float) -> list[int]:
        random, layers = self.random, self.costs.layers
        best = now = self._cost(cuts, placement, weight)
        found = cuts
        moves = MOVES // len(cuts) if len(cuts) > 1 else 0
        for move in range(moves):
            new = list(cuts)
            for _ in range(random.choice((1, 1, 2, 2, 3))):
                new[random.randrange(1, len(new))] += random.choice((-1, 1, -1, 1, -2, 2, -3, 3))
            if not all(one < other for one, other in pairwise([*new, layers])):
                continue
            cost = self._cost(new, placement, weight)
            warmth = TEMPERATURE * best * (1 - move / moves)
            if cost <= now - warmth * log(1 - random.random()):
                cuts, now = new, cost
                if cost < best:
                    found, best = new, cost
        return found

    def _segment(self, first: int, last: int, gpu: int, *, covered: bool) -> _Segment:
        costs = self.costs
        key = first, last, costs.cluster.gpus[gpu].speed, covered
        if key not in self._segments:
            size = costs.segment(first, last, covered)
            split = self.split and costs.may_split(first, last)
            forward = costs.split_forward_ns if split else costs.forward_ns
            backward = costs.input_backward_ns if split else costs.backward_ns
            self._segments[key] = _Segment(
                forward=forward(first, last, gpu),
                backward=backward(first, last, gpu),
                weight=costs.weight_backward_ns(first, last, gpu) if split else 0,
                saved=size.saved,
                kept=size.weight if split else 0,
                states=size.states,
                beyond=size.most_beyond_saved(split),
            )
        return self._segments[key]

    def _round_trip(self, border: int, here: int, there: int) -> int:
        """Ns of a boundary's message and of its gradient."""
        key = border, here, there
        if key not in self._trips:
            self._trips[key] = self.costs.send_forward_ns(*key)
            self._trips[key] += self.costs.send_backward_ns(border, there, here)
        return self._trips[key]

    def _cost(self, cuts: Sequence[int], placement: Sequence[int], weight: float) -> float:
        """The longest period of a GPU in ns; among equals, the more even loads."""
        costs, gpus = self.costs, self.costs.gpus
        segments = [
            self._segment(
                first, behind - 1, gpu, covered=index > 0 and placement[index - 1] == gpu
            )
            for index, (gpu, (first, behind)) in enumerate(
                zip(placement, pairwise([*cuts, costs.layers]), strict=True)
            )
        ]
        load, stays = [0] * gpus, [0] * gpus
        saved, beyond, room = [0] * gpus, [0] * gpus, list(costs.budgets)
        stay = 0
        for index in range(len(cuts) - 1, -1, -1):
            gpu, own = placement[index], segments[index]
            stay += own.forward + own.backward
            if index + 1 < len(cuts) and placement[index + 1] != gpu:
                stay += self._round_trip(cuts[index + 1] - 1, gpu, placement[index + 1])
            load[gpu] += own.forward + own.backward + own.weight
            stays[gpu] += own.saved * stay + own.kept * own.weight
            saved[gpu] += own.saved
            room[gpu] -= own.states
            beyond[gpu] = max(beyond[gpu], own.beyond)
        longest = 0.0
        for gpu, own_load in enumerate(load):
            left = room[gpu] - beyond[gpu]
            period: float = own_load
            if left < saved[gpu]:
                period *= BEYOND_ROOM * (1 + (saved[gpu] - left) / costs.budgets[gpu])
            elif left:
                period = max(period, weight * stays[gpu] / left)
            longest = max(longest, period)
        return longest + 1e-3 * sqrt(sum(own**2 for own in load) / gpus)


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
