"""What orders rule out has no schedule, what they find is one; they settle nearly everything."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import permutations, product

import pytest

from pipeplan.cluster import uniform
from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.exact.branch_and_bound import (
    NODES,
    QUICK_TURNS,
    SENDING,
    decide,
    node_budget,
)
from pipeplan.ilp.exact.transfer_branching import TRIAL
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import OpKind
from tests import handmade, oracle, wheels
from tests.property.test_planner_recompute_enumeration import machines, tiny
from tests.searches import limits


@pytest.mark.parametrize(
    ("layers", "gpus", "seeds"),
    [(3, 2, 5), (3, 3, 3), pytest.param(4, 2, 5, marks=pytest.mark.long)],
)
def test_orders_say_what_brute_force_does(layers: int, gpus: int, seeds: int) -> None:
    """Every set of runs, every allocation, the periods up to its shortest, by brute force."""
    told: Counter[Status] = Counter()
    for seed in range(seeds):
        chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
        for case in wheels.every_case(chain, cluster):
            costs = CostModel(case.machine.chain, cluster, "2bw", "exact")
            for period in range(case.load, case.load + 3):
                state = Incumbent(costs, limits())
                answer = decide(costs, case.homes, period, state.offer, SearchClock())
                possible = case.possible(period)
                assert answer is not (Status.INFEASIBLE if possible else Status.FEASIBLE)
                told[answer] += 1
                if possible:
                    break
    assert 50 * told[Status.UNKNOWN] < told[Status.FEASIBLE] + told[Status.INFEASIBLE]


def test_orders_say_what_brute_force_does_by_the_papers_bytes() -> None:
    """Every allocation of three layers, at its least period and those behind it."""
    told: Counter[Status] = Counter()
    fields = {"semantics": "2bw", "memory_model": "paper", "microbatches": 64}
    for seed in range(16):
        memory = machines(seed, 3, 2).gpus[0].memory_bytes + 4 * (seed % 4)
        chain, cluster = tiny(seed, 3), uniform(2, memory, bandwidth_bytes_per_s=2 * 10**9)
        costs = CostModel(chain, cluster, "2bw", "paper")
        cases: dict[tuple[int, ...], list[oracle.Case]] = {}
        for stages in oracle.every_allocation(chain, cluster):
            homes = tuple(gpu for first, last, gpu in stages for _ in range(first, last + 1))
            case = oracle.Case(chain, cluster, stages, 1, fields)
            cases.setdefault(homes, []).append(case)
        for homes, alike in cases.items():
            for period in range(3, 10):
                state = Incumbent(costs, limits())
                answer = decide(costs, homes, period, state.offer, SearchClock())
                possible = any(case.possible(period) for case in alike)
                assert answer is not (Status.INFEASIBLE if possible else Status.FEASIBLE)
                told[answer] += 1
    assert min(told[Status.FEASIBLE], told[Status.INFEASIBLE]) > 10 * told[Status.UNKNOWN]


def test_it_gives_up_where_there_is_too_much_to_try() -> None:
    """Beyond the places allowed nothing is claimed."""
    costs = CostModel(tiny(0, 4), machines(0, 4, 3), "2bw", "exact")
    state = Incumbent(costs, limits())
    full = decide(costs, (0, 1, 0, 2), 6, state.offer, SearchClock())
    short = decide(costs, (0, 1, 0, 2), 6, state.offer, SearchClock(), nodes=0)
    assert (full, short) == (Status.INFEASIBLE, Status.UNKNOWN)


def test_schedules_that_will_not_do_are_work() -> None:
    """Where each of very many orders is refused, it gives up after few of them."""
    chain = handmade.chain([(1, 1)] * 6, [{"output_bytes": 1}] * 6)
    costs = CostModel(chain, uniform(3, 100, bandwidth_bytes_per_s=10**9), "2bw", "exact")
    asked: list[Schedule] = []

    def refused(schedule: Schedule) -> bool:
        asked.append(schedule)
        return False

    assert decide(costs, (0, 1, 2, 0, 1, 2), 40, refused, SearchClock()) is Status.UNKNOWN
    assert 1 < len(asked) <= SENDING * NODES // TRIAL + 1


def test_less_time_is_fewer_places() -> None:
    """What is tried fits into the time that is left; all that may be tried into long times."""
    assert node_budget(100.0, QUICK_TURNS) == NODES
    assert node_budget(0.1, QUICK_TURNS) == 500
    assert node_budget(0.0, QUICK_TURNS) == 1
    assert 1 < node_budget(100.0, 0) < node_budget(100.0, QUICK_TURNS - 1) < NODES


def test_a_transfer_without_length_lies_between_others() -> None:
    """One inside another's interval on the same link breaks (R4): the planner's plan has none."""
    forward, kept, sent = (3, 3, 1, 2), (0, 2, 1, 2), (0, 1, 3, 1)
    fields = [{"saved_bytes": a, "output_bytes": y} for a, y in zip(kept, sent, strict=True)]
    chain = handmade.chain([(each, 1) for each in forward], fields)
    for duplex in ("full", "half"):
        cluster = uniform(2, 12, bandwidth_bytes_per_s=10**9, duplex=duplex)
        costs = CostModel(chain, cluster, "flush", "exact")
        for home, period in product(product((0, 1), repeat=3), (8, 9)):
            told = decide(
                costs, (0, *home), period, partial(overlaps, costs), SearchClock(), 20 * TRIAL
            )
            assert told is not Status.FEASIBLE


def overlaps(costs: CostModel, schedule: Schedule) -> bool:
    """Whether two transfers share a link at once, one without length inside another included."""
    busy: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for (kind, stage), (start,) in schedule.times.items():
        here = schedule.stages[stage].gpu
        if kind in (OpKind.SEND_F, OpKind.SEND_B):
            there = schedule.stages[stage + (1 if kind is OpKind.SEND_F else -1)].gpu
            send = costs.send_forward_ns if kind is OpKind.SEND_F else costs.send_backward_ns
            boundary = stage if kind is OpKind.SEND_F else stage - 1
            link = costs.cluster.links.resource(here, there)
            busy.setdefault(link, []).append((start, send(boundary, here, there)))
    return any(
        0 < (one - other) % schedule.period < length
        for each in busy.values()
        for (one, _), (other, length) in permutations(each, 2)
    )
