"""Large neighbourhood search (Shaw 1998) around the best plan: fix some of it, optimize the rest.

First the best plan's own allocation is scheduled exactly. Then each neighbourhood splits some
stages into blocks and lets some blocks choose among few GPUs; the CP-SAT model looks for a
schedule a little shorter than the best one. Small models answer in seconds where the unrestricted
one does not. The allocation may keep several micro-batches per period.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Final

from pipeplan.ilp.cpsat.period_search import scaled, solve_and_repair
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from pipeplan.units import ceil_div

SHRINK: Final = (0.04, 0.02, 0.01, 0.005, 0.0025)
"""By how much a step tries to shorten the period."""
MAX_TASKS: Final = 40
"""Largest number of forwards in a model: blocks times micro-batches per period."""
STEP_S: Final = 4.0
"""Time limit of one model at first."""

Blocks = list[tuple[int, int, tuple[int, ...]]]
"""(first layer, last layer, GPUs it may sit on)."""


@dataclass
class LargeNeighbourhoodSearch:
    """Improves `state.best` step by step."""

    state: Incumbent
    random: Random = field(init=False)
    _polished: Schedule | None = None
    """The plan whose allocation was scheduled exactly last."""
    _step_s: float = STEP_S

    def __post_init__(self) -> None:
        """Repeatable for a seed."""
        self.random = Random(self.state.options.seed)

    def run(self, seconds: float) -> None:
        """Polish the best allocation, then search around it until nothing helps or time ends.

        Called again, it gives each model more time than before.
        """
        end = self.state.elapsed + min(seconds, self.state.remaining)
        if self._polished is not self.state.best:
            self._polish(end)
            self._polished = self.state.best
        for shrink in SHRINK:
            while self._round(shrink, end):
                pass
        self._step_s *= 1.5

    def _over(self, end: float) -> bool:
        return self.state.done or self.state.best is None or self.state.elapsed >= end

    def _polish(self, end: float) -> None:
        """The same stages and GPUs at other times, for several numbers of micro-batches."""
        for k in self._ks():
            for shrink in SHRINK:
                while not self._over(end) and self._try(self._whole(), k, shrink, end):
                    pass

    def _ks(self) -> list[int]:
        """The best plan's k first."""
        best = self.state.best
        found = [] if best is None else [best.k]
        return list(dict.fromkeys([*found, *self.state.model_ks]))

    def _round(self, shrink: float, end: float) -> bool:
        """Try every neighbourhood once; whether one helped."""
        helped = False
        for name, blocks in self._neighbourhoods():
            if self._over(end):
                return False
            best = self.state.best
            assert best is not None
            if len(blocks) * best.k > MAX_TASKS:
                continue
            self.state.set_phase(f"neighbourhoods: {name}, {shrink:.1%} shorter")
            helped |= self._try(blocks, best.k, shrink, end)
        return helped

    def _try(self, blocks: Blocks, k: int, shrink: float, end: float) -> bool:
        """Whether a plan shorter by `shrink` (and at least 1 ns) is found."""
        state, best = self.state, self.state.best
        if best is None or len(blocks) * k > MAX_TASKS:
            return False
        instance = scaled(
            Instance(
                state.costs,
                tuple((first, last) for first, last, _ in blocks),
                tuple(gpus for *_, gpus in blocks),
                k=k,
                most=state.most_in_flight,
            )
        )
        target = best.per_microbatch * k * (1 - Fraction(shrink))
        period = min(int(target), -(-best.per_microbatch * k // 1) - 1)
        if period < -(-state.bound * k // 1):
            return False
        limit = min(self._step_s, max(0.1, end - state.elapsed))
        result = solve_and_repair(state, instance, ceil_div(int(period), instance.tick), limit)
        return result.status is Status.FEASIBLE and state.best is not best

    def _whole(self) -> Blocks:
        best = self.state.best
        assert best is not None
        return [(stage.first, stage.last, (stage.gpu,)) for stage in best.stages]

    def _neighbourhoods(self) -> Iterator[tuple[str, Blocks]]:
        """Borders may move; two GPUs share anew; three blocks go anywhere."""
        best = self.state.best
        assert best is not None
        gpus = list(range(self.state.costs.gpus))
        yield "borders", self._borders(best)
        pairs = [(p, q) for p in gpus for q in gpus if p < q]
        self.random.shuffle(pairs)
        for p, q in pairs[:6]:
            yield f"GPUs {p} and {q}", self._shared(best, (p, q))
        for number in range(3):
            blocks = self._split(best, 2)
            for index in self.random.sample(range(len(blocks)), min(3, len(blocks))):
                first, last, _ = blocks[index]
                blocks[index] = (first, last, tuple(gpus))
            yield f"three blocks ({number + 1})", blocks

    def _borders(self, best: Schedule) -> Blocks:
        """The first and last layers of each stage may join the stage beside them."""
        blocks: Blocks = []
        stages = best.stages
        for stage in stages:
            before = stages[stage.id - 1].gpu if stage.id else stage.gpu
            behind = stages[stage.id + 1].gpu if stage.id + 1 < len(stages) else stage.gpu
            for first, last in _ends(stage.first, stage.last):
                gpus = {stage.gpu}
                gpus |= {before} if first == stage.first else set()
                gpus |= {behind} if last == stage.last else set()
                blocks.append((first, last, tuple(sorted(gpus))))
        return blocks

    def _shared(self, best: Schedule, pair: tuple[int, int]) -> Blocks:
        """Everything on two GPUs, split into blocks, may sit on either."""
        blocks: Blocks = []
        for stage in best.stages:
            if stage.gpu not in pair:
                blocks.append((stage.first, stage.last, (stage.gpu,)))
            else:
                halves = self._parts(stage.first, stage.last, 4)
                blocks += [(first, last, pair) for first, last in halves]
        return blocks

    def _split(self, best: Schedule, parts: int) -> Blocks:
        return [
            (first, last, (stage.gpu,))
            for stage in best.stages
            for first, last in self._parts(stage.first, stage.last, parts)
        ]

    def _parts(self, first: int, last: int, most: int) -> list[tuple[int, int]]:
        """A run of layers in at most `most` parts, borders at random."""
        count = min(most, last - first + 1)
        starts = sorted([first, *self.random.sample(range(first + 1, last + 1), count - 1)])
        return list(zip(starts, [*(start - 1 for start in starts[1:]), last], strict=True))


def _ends(first: int, last: int) -> list[tuple[int, int]]:
    """First layer, middle, last layer of a run, as far as there are so many."""
    if last - first < 2:
        return [(layer, layer) for layer in range(first, last + 1)]
    return [(first, first), (first + 1, last - 1), (last, last)]
