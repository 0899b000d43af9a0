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

import numpy as np

from pipeplan.ilp.compiled import Bools, Floats, Ints, compiled
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

LOAD, HELD, SAVED, STATES, BEYOND = range(5)
"""Of a segment: ns of all its ops; bytes x ns that a micro-batch keeps at least; bytes."""
KNOWN: Final = -1
"""In place of a stage: all segments are known."""


class _Question(NamedTuple):
    """What a descent reads and does not change."""

    placement: Ints
    """By stage: the GPU."""
    classes: Ints
    """By GPU: which of the different speeds it has."""
    segments: Floats
    """By speed, whether the stage before is on the same GPU, first layer, and layer behind."""
    known: Bools
    """The same; whether `segments` has it."""
    ways: Floats
    """By first layer: least ns of a micro-batch before it, and back if no W fill that."""
    budgets: Floats
    microbatches: int
    memory: float


class CutSearch:
    """Random descent over the cuts of one placement after the other."""

    def __init__(
        self, costs: CostModel, random: Random, microbatches: int, *, split: bool
    ) -> None:
        self.costs, self.split, self.microbatches = costs, split, microbatches
        self.random = np.random.default_rng(random.getrandbits(64))
        speeds = [gpu.speed for gpu in costs.cluster.gpus]
        different = sorted(set(speeds))
        self._classes = np.array([different.index(speed) for speed in speeds])
        size = len(different), 2, costs.layers, costs.layers + 1
        self._segments, self._known = np.empty((*size, 5)), np.zeros(size, np.bool_)
        layers = range(costs.layers)
        stays = (costs.load_ns(layer, layer, 0) for layer in reversed(layers))
        self._stay = list(accumulate(stays))[::-1]
        """By first layer: ns from there to the end of the chain and back."""
        ways = (
            (costs.forward_ns if split else costs.load_ns)(layer, layer, 0) for layer in layers
        )
        self._ways = np.array(list(accumulate(ways, initial=0)), np.float64)

    def all(self, placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """First layers of the stages, for all that memory may count; each cuts once."""
        cuts = np.array([*_equal_work(self.costs, placement), self.costs.layers])
        seen = set()
        for memory in MEMORY:
            question = self._question(placement, memory)
            steps = self._steps(question, cuts)
            if memory and steps == self._steps(self._question(placement, 0.0), cuts):
                continue
            self._descend(question, cuts, np.array(steps))
            found = tuple(cuts.tolist())
            if found not in seen:
                seen.add(found)
                yield found[:-1]

    def _question(self, placement: Sequence[int], memory: float) -> _Question:
        return _Question(
            np.array(placement),
            self._classes,
            self._segments,
            self._known,
            self._ways,
            np.array(self.costs.budgets, np.float64),
            self.microbatches,
            memory,
        )

    def _steps(self, question: _Question, cuts: Ints) -> list[float]:
        """The least steps of all GPUs."""
        for stage in range(len(question.placement)):
            self._learn(question, cuts, stage)
        return [_step(question, cuts, gpu) for gpu in range(self.costs.gpus)]

    def _descend(self, question: _Question, cuts: Ints, steps: Floats) -> None:
        """The cuts become those where random descent ends."""
        stages, turn = len(cuts) - 1, 0
        moves = self._moves(stages) if stages > 1 else np.zeros((0, 5), np.int64)
        scale = float(steps.max()) or 1.0
        while turn < len(moves):
            turn, asked, other = _descend(question, moves, turn, cuts, steps, scale)
            if asked != KNOWN:
                self._learn(question, other, asked)

    def _moves(self, stages: int) -> Ints:
        """Of each try: two borders that move, by how much, and whether all between them do."""
        random = self.random
        one, other = random.integers(1, stages, (2, TRIES))
        by, other_by = random.choice(SHIFTS, (2, TRIES))
        single = random.random(TRIES) < 0.5
        other[single], other_by[single] = one[single], 0
        return np.stack([one, other, by, other_by, random.random(TRIES) < RUNS], axis=1)

    def _learn(self, question: _Question, cuts: Ints, stage: int) -> None:
        """The segment of a stage becomes known."""
        gpu, first, behind = int(question.placement[stage]), int(cuts[stage]), int(cuts[stage + 1])
        covered = stage > 0 and int(question.placement[stage - 1]) == gpu
        place = self._classes[gpu], int(covered), first, behind
        if not self._known[place]:
            self._known[place] = True
            self._segments[place] = self._segment(first, behind - 1, gpu, covered=covered)

    def _segment(self, first: int, last: int, gpu: int, *, covered: bool) -> tuple[float, ...]:
        """A stage's `LOAD` to `BEYOND`; `covered`: the stage before is on the same GPU."""
        costs = self.costs
        size = costs.segment(first, last, covered)
        split = self.split and costs.may_split(first, last)
        forward = costs.split_forward_ns if split else costs.forward_ns
        backward = costs.input_backward_ns if split else costs.backward_ns
        weight = costs.weight_backward_ns(first, last, gpu) if split else 0
        load = forward(first, last, gpu) + backward(first, last, gpu) + weight
        held = size.saved * self._stay[first] + size.weight * weight
        return load, held, size.saved, size.states, size.most_beyond_saved(split)


@compiled
def _descend(
    question: _Question, moves: Ints, turn: int, cuts: Ints, steps: Floats, scale: float
) -> tuple[int, int, Ints]:
    """Borders move as long as the norm of the GPUs' steps does not grow.

    Args:
        question: that is answered.
        moves: of all turns.
        turn: to go on with.
        cuts: of all stages, and the number of layers; changed.
        steps: of all GPUs; changed.
        scale: of the steps.

    Returns:
        the turn to go on with, and a stage and cuts whose segment must be known for it; `KNOWN`
        if all turns are over.
    """
    new, newer, touched = cuts.copy(), steps.copy(), np.zeros(steps.size, np.bool_)
    while turn < len(moves):
        one, other, by, other_by, along = moves[turn]
        low, high = min(one, other), max(one, other)
        if along:
            new[low : high + 1] += by
        else:
            new[one] += by
            new[other] += other_by
        allowed, changed = True, False
        touched[:] = False
        for stage in range(low - 1, high + 1):
            allowed &= new[stage] < new[stage + 1]
            if new[stage] != cuts[stage] or new[stage + 1] != cuts[stage + 1]:
                changed = touched[question.placement[stage]] = True
        if allowed and changed:
            for stage in range(low - 1, high + 1):
                if not question.known[_place(question, new, stage)]:
                    return turn, stage, new
            for gpu in range(steps.size):
                newer[gpu] = _step(question, new, gpu) if touched[gpu] else steps[gpu]
            if _norm(newer, scale) <= _norm(steps, scale):
                cuts[:], steps[:] = new, newer
        new[low - 1 : high + 2] = cuts[low - 1 : high + 2]
        turn += 1
    return turn, KNOWN, new


@compiled
def _norm(steps: Floats, scale: float) -> float:
    """Of the steps of all GPUs, to the power of `NORM`."""
    total = 0.0
    for step in steps:
        power = 1.0
        for _ in range(NORM):
            power *= step / scale
        total += power
    return total


@compiled
def _place(question: _Question, cuts: Ints, stage: int) -> tuple[int, int, int, int]:
    """Of a stage's segment in `segments`."""
    gpu = question.placement[stage]
    covered = 1 if stage > 0 and question.placement[stage - 1] == gpu else 0
    return question.classes[gpu], covered, cuts[stage], cuts[stage + 1]


@compiled
def _step(question: _Question, cuts: Ints, gpu: int) -> float:
    """The least step of a GPU in ns, by load, by memory and by the way."""
    load = held = saved = states = beyond = 0.0
    first = -1
    for stage in range(cuts.size - 1):
        if question.placement[stage] == gpu:
            first = stage if first < 0 else first
            own = question.segments[_place(question, cuts, stage)]
            load += own[LOAD]
            held += own[HELD]
            saved += own[SAVED]
            states += own[STATES]
            beyond = max(beyond, own[BEYOND])
    if first < 0:
        return 0.0
    budget = question.budgets[gpu]
    left = budget - states - beyond
    if left < saved:
        beyond_room = BEYOND_ROOM * (1 + (saved - left) / max(1, budget))
        return float(question.microbatches * load * beyond_room)
    period = load
    if left > 0:
        period = max(period, question.memory * held / left)
    return float(question.microbatches * period + question.ways[cuts[first]])


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
