"""Enumeration of balanced allocations by their number of stages, each decided by orders.

Where memory is ample, what keeps plans of a few dozen layers above the bound is that loads do not
come out even. Just below the best plan's period hardly any allocation of few runs has loads that
allow it: of ResNet-18 on 4 GPUs none with up to 7 runs, 3 with 8, some hundred with 10. Fewest
runs first, then by `lower_bound`, each is a chain whose layers are its runs; `branch_and_bound`
decides in milliseconds to seconds what CP-SAT leaves open for minutes. Plans only, no bound: a run
that is split into several stages may do better. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import nlargest, nsmallest
from itertools import accumulate, islice
from typing import ClassVar, Final

from pipeplan.ilp.bounds.load import min_link_occupancy
from pipeplan.ilp.coarsening import grouped
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.exact.branch_and_bound import decide
from pipeplan.ilp.exact.enumeration import Assignment, lower_bound, next_places
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import Allocation
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.symmetry import gpu_classes
from pipeplan.plan import Stage

MOST_LAYERS: Final = 40
"""Longer chains have too many allocations for each to be looked at."""
FEWEST: Final = 3
"""Runs from which on some GPU can have two."""
KEPT: Final = 20_000
"""Allocations of one number of runs that are decided at most, those of the lowest lower bounds."""
LOOK: Final = 64
"""Beginnings of allocations between two looks at the clock."""
STEP: Final = Fraction(1, 1000)
"""Share by which a period asked for is below the best."""


@dataclass
class StageCountEnumeration:
    """Allocations with few runs, one number of runs after the other, turn by turn."""

    state: Incumbent
    name: ClassVar[str] = "stage counts"
    _runs: int = field(default=FEWEST - 1, init=False)
    """How many runs what is looked at has."""
    _tree: Iterator[Assignment | None] = field(default_factory=lambda: iter(()), init=False)
    """Those with so many that are still to be looked at."""
    _known: list[tuple[Fraction, Assignment]] = field(default_factory=list, init=False)
    """Those looked at that may be shorter than the best plan."""
    _end: float = field(default=0.0, init=False)

    def run(self, seconds: float) -> None:
        """Look for shorter plans for `seconds`, from where it was left; there must be one."""
        state = self.state
        if state.best is None or not state.costs.exact or state.costs.layers > MOST_LAYERS:
            return
        self._end = state.elapsed + min(seconds, state.remaining)
        while self._runs <= state.costs.layers and not self._over:
            state.set_phase(f"{self.name}: {self._runs} stages")
            if not self._look():
                self._decide()

    @property
    def _over(self) -> bool:
        return self.state.done or self.state.elapsed >= self._end

    @property
    def _best(self) -> Fraction:
        assert self.state.best is not None
        return self.state.best.per_microbatch

    @property
    def _highest(self) -> Fraction:
        return self._best * (1 - STEP)

    def _look(self) -> bool:
        """Whether the time ended before all allocations with so many runs were looked at."""
        costs, most = self.state.costs, self.state.most_in_flight
        while not self._over:
            some = list(islice(self._tree, LOOK))
            if not some:
                return False
            for home in some:
                bound = None if home is None else lower_bound(costs, home, most)
                if home is not None and bound is not None and bound < self._highest:
                    self._known.append((bound, home))
            if len(self._known) > 2 * KEPT:
                self._known = nsmallest(KEPT, self._known)
        return True

    def _decide(self) -> None:
        """Decide those that are known, lowest lower bounds first; then one more run."""
        self._known.sort(reverse=True)
        while self._known and not self._over:
            bound, home = self._known.pop()
            if bound < self._highest:
                self._improve(bound, home)
        if not self._known:
            self._runs += 1
            self._tree = balanced_allocations(self.state.costs, int(self._highest), self._runs)

    def _improve(self, bound: Fraction, home: Assignment) -> None:
        """Ask for shorter periods, halfway down to what was not found, while each is found."""
        runs, costs = Allocation(home, frozenset()).runs(), self.state.costs
        groups = [(first, last) for first, last, _ in runs]
        chain = grouped(costs.chain, groups, [gpu.speed for gpu in costs.cluster.gpus])
        short = replace(costs, chain=chain, recomputed=frozenset(), pins=())
        stages = tuple(
            Stage(id=number, layers=(first, last), gpu=gpu)
            for number, (first, last, gpu) in enumerate(runs)
        )
        low, asked = bound, self._highest
        while asked > low and not self._over:
            if not self._shortened(short, stages, int(asked)):
                low = asked
            asked = min((low + self._best) / 2, self._highest)

    def _shortened(self, short: CostModel, stages: tuple[Stage, ...], period: int) -> bool:
        """Whether orders give a schedule of a period that fits and is the best.

        Args:
            short: of the chain whose layers are the stages.
            stages: of the chain itself.
            period: in ns.
        """

        def taken(found: Schedule) -> bool:
            return self._taken(replace(found, stages=stages))

        gpus = tuple(stage.gpu for stage in stages)
        told = decide(short, gpus, period, taken, self.state.options.clock)
        return told is Status.FEASIBLE

    def _taken(self, schedule: Schedule) -> bool:
        """Whether a schedule, or it as short as its orders allow, is the best now."""
        state, best = self.state, self._best
        for each in (
            schedule,
            minimize_period_for_order(state.costs, schedule, max(1, int(state.bounds["any"]))),
        ):
            state.offer(each)
        return self._best < best


def balanced_allocations(costs: CostModel, period: int, runs: int) -> Iterator[Assignment | None]:
    """Allocations of so many runs whose loads and cuts allow a period, of equal GPUs in order.

    None stands for a beginning that was given up, so that who asks can look at the clock.
    """
    return _BalancedAllocations(costs, period).behind((), runs)


class _BalancedAllocations:
    """Depth-first, layer by layer, with the time that each GPU has left."""

    def __init__(self, costs: CostModel, period: int) -> None:
        self._costs = costs
        self._classes = gpu_classes(costs)
        self._spare = [period] * costs.gpus
        self._whole = [busy <= period for busy in min_link_occupancy(costs)]
        overhead = 2 * costs.cluster.action_overhead_ns
        self._work = [
            [costs.load_ns(layer, layer, gpu) - overhead for gpu in range(costs.gpus)]
            for layer in range(costs.layers)
        ]
        least = (min(work) for work in reversed(self._work))
        self._left = [*accumulate(least, initial=0)][::-1]

    def behind(self, start: Assignment, runs: int) -> Iterator[Assignment | None]:
        """What begins like `start` and has so many more runs."""
        layer = len(start)
        if layer == self._costs.layers:
            yield None if runs else start
            return
        if runs > self._costs.layers - layer or self._room(start, runs) < self._left[layer]:
            yield None
            return
        ended = True
        for gpu in self._choices(start, runs):
            work = self._work[layer][gpu]
            if work <= self._spare[gpu]:
                ended = False
                self._spare[gpu] -= work
                begins = not start or start[-1] != gpu
                yield from self.behind((*start, gpu), runs - begins)
                self._spare[gpu] += work
        if ended:
            yield None

    def _room(self, start: Assignment, runs: int) -> int:
        """Time that is left on the GPU of the last run and on those that `runs` more may reach."""
        if not start:
            return sum(nlargest(runs, self._spare))
        others = (spare for gpu, spare in enumerate(self._spare) if gpu != start[-1])
        return self._spare[start[-1]] + sum(nlargest(runs, others))

    def _choices(self, start: Assignment, runs: int) -> Iterator[int]:
        """GPUs that the next layer may sit on."""
        may_cut = runs > 0 and (not start or self._whole[len(start) - 1])
        for gpu in next_places(self._costs, self._classes, start):
            if may_cut or start[-1:] == (gpu,):
                yield gpu
