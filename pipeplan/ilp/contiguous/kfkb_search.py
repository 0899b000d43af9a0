"""Best-first search for contiguous plans whose period holds several micro-batches (kFkB).

A stage's average number of micro-batches in flight need not be an integer, so where memory is
scarce a steady state of k > 1 can beat every 1F1B plan (Beaumont, Eyraud-Dubois, Shilova 2020,
4.3). A node is a partition with one in-flight limit ("cap") per stage, the most micro-batches that
its GPU can hold. Its self-timed execution settles into a steady state, which is offered as a plan.

Two queues share the time equally. The first has the partitions not seen yet (all of them where
there are few), by a lower bound that holds for every order of ops:

    bound = max over stages s of ( load(s), load of a link, V(s) / cap(s) ),

V(s) = all work and transfers from F_s to B_s of one micro-batch: at fewer than V / T micro-batches
on average it cannot flow. A short execution of a partition, a probe, estimates its throughput. The
second queue is ordered by that estimate. Expanding a partition runs a few executions with other
in-flight limits and pushes its neighbours (one cut moved, removed or added) to the first queue.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, combinations, count, pairwise
from math import comb
from typing import ClassVar

from pipeplan.ilp.contiguous.in_flight_limits import in_flight_limits
from pipeplan.ilp.contiguous.initial_partitions import initial_partitions
from pipeplan.ilp.contiguous.steady_states import SteadyStates
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.symmetry import gpu_classes
from pipeplan.plan import Stage

FEW = 6000
"""Partitions up to which all are looked at."""
LATER = 1.002
"""What a partition's pace is multiplied by for each turn it had."""

Stages = tuple[Stage, ...]


@dataclass(order=True, frozen=True, slots=True)
class _Candidate:
    """A partition in a queue; `key` is in ns per micro-batch."""

    key: float
    number: int
    cycles: SteadyStates = field(compare=False)
    expansions: Iterator[None] = field(compare=False)
    expanded: bool = field(default=False, compare=False)


@dataclass
class KFkBSearch:
    """Best-first search over contiguous partitions; offers the eager cycles of each."""

    state: Incumbent
    name: ClassVar[str] = "kfkb"
    _new: list[_Candidate] = field(default_factory=list)
    """By what they need at least."""
    _glanced: list[_Candidate] = field(default_factory=list)
    """By their pace, a little more for each turn they had."""
    _seen: set[Stages] = field(default_factory=set)
    _number: Iterator[int] = field(default_factory=count)
    _end: float = 0.0
    _glances_s: float = 0.0
    _turns_s: float = 0.0

    def run(self, seconds: float) -> None:
        """Search until no partition left can beat the best plan, or `seconds` have passed."""
        self._end = self.state.elapsed + min(seconds, self.state.remaining)
        self.state.set_phase(self.name)
        for stages in chain(initial_partitions(self.state), self._all()):
            if stages is not None:
                self._add(stages)
            elif self.state.elapsed >= self._end:
                return
        while (self._new or self._glanced) and not self._over:
            begun = self.state.elapsed
            if self._new and (not self._glanced or self._glances_s <= self._turns_s):
                self._probe(heappop(self._new))
                self._glances_s += self.state.elapsed - begun
            else:
                self._expand(heappop(self._glanced))
                self._turns_s += self.state.elapsed - begun

    @cached_property
    def _gpus(self) -> int:
        """How many GPUs there are if all are alike, else 0."""
        costs = self.state.costs
        return costs.gpus if len(gpu_classes(costs)) == 1 else 0

    @property
    def _over(self) -> bool:
        return self.state.elapsed >= self._end or self.state.done

    def _promises(self, cycles: SteadyStates) -> bool:
        """Whether a partition could be better than the best plan."""
        return self.state.best is None or cycles.lower_bound < self.state.best.per_microbatch

    def _all(self) -> Iterator[Stages]:
        return _all_partitions(self.state.costs) if self._gpus else iter(())

    def _add(self, stages: Stages) -> None:
        """Queue a partition once, if it fits and could be better than the best plan."""
        if stages in self._seen or not self.state.costs.keeps_pins(stages):
            return
        self._seen.add(stages)
        caps = in_flight_limits(self.state.costs, stages, self.state.most_in_flight)
        if caps is None:
            return
        cycles = SteadyStates(self.state, stages, caps)
        if self._promises(cycles):
            heappush(
                self._new,
                _Candidate(
                    float(cycles.lower_bound), next(self._number), cycles, cycles.expansions()
                ),
            )

    def _probe(self, found: _Candidate) -> None:
        """Its pace decides when a partition has its turns."""
        if self._promises(found.cycles):
            heappush(self._glanced, replace(found, key=float(found.cycles.throughput())))

    def _expand(self, found: _Candidate) -> None:
        """A few executions, and the first time its neighbours: they are of interest, too."""
        if not self._promises(found.cycles):
            return
        if not found.expanded:
            for neighbour in _neighbours(found.cycles.stages, self._gpus):
                self._add(neighbour)
        for _ in found.expansions:
            fastest = None if found.expanded else found.cycles.fastest()
            key = found.key * LATER if fastest is None else float(fastest)
            heappush(self._glanced, replace(found, key=key, expanded=True))
            return


def _neighbours(stages: Stages, gpus: int) -> Iterator[Stages]:
    """Partitions with one border moved by one layer, removed, or (up to `gpus` stages) added.

    Args:
        stages: one per GPU.
        gpus: how many GPUs may be used where they are all alike; 0 keeps the stages' GPUs.
    """
    cuts = [stage.first for stage in stages[1:]]
    end = stages[-1].last + 1
    for index, cut in enumerate(cuts):
        for moved in (cut - 1, cut + 1):
            others = [0, *cuts[:index], *cuts[index + 1 :], end]
            if 0 < moved < end and moved not in others:
                yield _stages(sorted([*cuts[:index], moved, *cuts[index + 1 :]]), end, stages)
    if not gpus:
        return
    for index in range(len(cuts)):
        yield _stages(cuts[:index] + cuts[index + 1 :], end)
    if len(stages) < gpus:
        for stage in stages:
            for cut in range(stage.first + 1, stage.last + 1):
                yield _stages(sorted([*cuts, cut]), end)


def _all_partitions(costs: CostModel) -> Iterator[Stages]:
    """Every partition into at most one stage a GPU, if there are few of them."""
    most = min(costs.gpus, costs.layers)
    if sum(comb(costs.layers - 1, cuts) for cuts in range(most)) > FEW:
        return
    for number in range(most):
        for cuts in combinations(range(1, costs.layers), number):
            yield _stages(list(cuts), costs.layers)


def _stages(cuts: list[int], end: int, like: Stages | None = None) -> Stages:
    """Stages between `cuts`, on the GPUs of `like` or on the first ones."""
    borders = [0, *cuts, end]
    return tuple(
        Stage(id=i, layers=(a, b - 1), gpu=like[i].gpu if like else i)
        for i, (a, b) in enumerate(pairwise(borders))
    )
