"""Results of the search's inner loops, as machine code or as plain Python makes them.

    python -m tests.machine_code

`unit/ilp/test_compiled.py` compares the two. `make test` runs this beside the first tests, so that
all others find what most of them need compiled.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np

from pipeplan.cluster import Host, uniform
from pipeplan.ilp.compiled import AVAILABLE
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.local_search.visit_cuts import VisitCuts
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.step.cuts import CutSearch
from pipeplan.ilp.step.instance import instance
from pipeplan.ilp.step.list_scheduler import schedule_step
from pipeplan.ilp.step.placements import stages_of
from pipeplan.ilp.step.rules import random_rule
from tests.equal_steps import equal
from tests.random_placements import random_costs, random_runs
from tests.unit.ilp.test_recompute import costs_of, some_chain

HOST = Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**9)
STEPS, PERIODS, CHAINS = 4, 60, 8
"""Settings of steps, random periods and chains with options that are tried."""


def of_steps() -> None:
    """Cuts, and 20 schedules of random rules, in ample and scarce memory: 21 lines each."""
    for split in (True, False):
        for memory in (Fraction(1, 3), Fraction(1)):
            _, costs = equal(3, split=split, memory=memory)
            stages = stages_of(costs, range(0, 12, 2), (0, 1, 2, 2, 1, 0), [split] * 6)
            of, random = instance(costs, stages, 5), Random(0)
            print(list(CutSearch(costs, random, 5, split=split).all((0, 1, 2, 0, 1, 2))))
            for horizon in (float("inf"), 6 * of.load_ns):
                for _ in range(10):
                    times, events = schedule_step(of, random_rule(of, random), horizon)
                    print(events, times and (times.starts.tolist(), times.end, times.ends))


def of_periods() -> None:
    """A schedule, its shortest period, balanced loads, a walk and visits of each: five lines."""
    random = Random(0)
    for number in range(PERIODS):
        costs, k = (
            random_costs(random, ("exact", "paper")[number % 2], 3),
            (1, 1, 2, 3)[number % 4],
        )
        period = int(k * costs.load_ns(0, costs.layers - 1, 0) * random.choice((0.5, 0.7, 1)))
        schedule_of(costs, random, period, k)
        loads = AssignmentAnnealing(
            costs, period, [0] * costs.layers, [2.0] * costs.layers, [0.1] * 3, 0.02
        )
        loads.anneal(random, 200)
        print(loads.homes, loads.total, loads.overload, loads.bytes)
        draws = np.random.default_rng(k)
        walk = AllocationWalk(costs, draws)
        walk.begin(Allocation((0,) * costs.layers, frozenset()), 3.0, max(1, period // k))
        print(walk.run(np.full(100, 0.03)), walk.new, walk.closest)
        visits = VisitCuts(costs, (0, 1, 2, 1, 0), max(1, period // k), 1.1)
        visits.anneal(draws, 100)
        print(visits.homes, visits.excess)


def schedule_of(costs: CostModel, random: Random, period: int, k: int) -> None:
    """Of random stages, one of which waits."""
    runs, wait = random_runs(random, costs), (random.randint(0, 3), random.randint(0, 3))
    centres = [copy * period // k for copy in range(k)]
    placing = ModuloListScheduler(costs, runs, period, centres, {0: wait})
    done = placing.place()
    found = placing.schedule() if done else None
    print(done, placing.placed, found and (placing.peaks(), found))
    print(found and minimize_period_for_order(costs, found, 1))


def of_recomputation() -> None:
    """Options, relaxed ones, the contiguous plan and a walk that changes runs: four lines each."""
    for seed in range(CHAINS):
        chain = some_chain(seed, 6, options=seed % 3)
        ways = {"offload": seed % 2 == 1, "nested": seed % 4 > 1}
        listed = [list_options(chain, relaxed=relaxed, **ways) for relaxed in (False, True)]
        for offered in listed:
            print([each.tolist() for each in (offered.more, offered.saved, offered.peak)])
        print(RecomputeDP(costs_of(chain, 3, 50), options=listed[0]).shortest(1))
        costs = replace(costs_of(chain, 3, 50), cluster=uniform(3, 50, host=HOST))
        host = HOST if seed % 2 else None
        walk = AllocationWalk(costs, np.random.default_rng(seed), recompute=True, host=host)
        walk.begin(Allocation((0,) * 6, frozenset()), 3.0, costs.load_ns(0, 5, 0))
        for _ in range(20):
            walk.run(np.full(30, 0.1))
            if walk.waits:
                walk.judged(0.1)
        print(walk.new, walk.closest)


if __name__ == "__main__":
    print("numba" if AVAILABLE else "plain")
    of_steps()
    of_periods()
    of_recomputation()
