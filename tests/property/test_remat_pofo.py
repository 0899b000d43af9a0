"""POFO against all persistent schedules with all sets of offloaded units, in its own model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from pipeplan.errors import InfeasibleError
from pipeplan.remat.checkpointing.rotor import rotor
from pipeplan.remat.combined.pofo import pofo
from pipeplan.remat.methods import rematerialize_chain
from pipeplan.remat.min_memory import least_memory, least_with_host
from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit, compute_order
from pipeplan.remat.offloading.no_wait import no_wait
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule
from tests import grids
from tests.remat_brute import random_costs

ONE = HostLink(10**9)


def trees(s: int, t: int) -> Iterator[tuple[DeviceOp, ...]]:
    """All persistent orders of layers s..t from the full boundary s."""
    for tail in [(DeviceOp(DeviceOpKind.FREE, s + 1),)] if s == t else trees(s + 1, t):
        yield (DeviceOp(DeviceOpKind.KEEP_ALL, s), *tail, DeviceOp(DeviceOpKind.BACKWARD, s))
    for cut in range(s + 1, t + 1):
        sweep = tuple(DeviceOp(DeviceOpKind.KEEP_NOTHING, k) for k in range(s + 1, cut))
        for right in trees(cut, t):
            for left in trees(s, cut - 1):
                yield (DeviceOp(DeviceOpKind.KEEP_INPUT, s), *sweep, *right, *left)


def idle(line: ComputeOrder, units: tuple[OffloadUnit, ...], budget: int) -> int | None:
    """Least idle time with transfers of one byte a ns that may be interrupted; None if it is full.

    Offloads end before the turn, prefetches begin behind it.
    """
    lacking = [int(need) - budget for need in line.need]
    total = 0
    left = []
    for back in (False, True):
        waiting = out = 0
        order = range(len(lacking) - 1, line.turn - 1, -1) if back else range(line.turn)
        for at in order:
            waiting += 0 if back else sum(u.size for u in units if u.ready == u.away == at)
            wait = max(0, lacking[at] - out)
            if wait > waiting:
                return None
            total, waiting, out = total + wait, waiting - wait, out + wait
            waiting += 0 if back else sum(u.size for u in units if u.ready == at < u.away)
            moved = min(waiting, int(line.time[at]))
            waiting, out = waiting - moved, out + moved
            waiting += sum(u.size for u in units if u.due == at) if back else 0
        left.append(waiting + (0 if back else sum(u.size for u in units if u.ready == line.turn)))
    return total + sum(left)


def fastest(costs: Costs, budget: int) -> int | None:
    """The least time over all orders and sets."""
    best: int | None = None
    for ops in trees(0, costs.layers - 1):
        line = compute_order(costs, DeviceSchedule(costs.layers, ops))
        for size in range(len(line.units) + 1):
            for units in combinations(line.units, size):
                wait = idle(line, units, budget)
                if wait is not None and (best is None or line.compute + wait < best):
                    best = line.compute + wait
    return best


def _case(seed: int, layers: int) -> tuple[Costs, int]:
    rng = random.Random(seed)
    costs = random_costs(rng, rng.randint(1, layers))
    least = judge(costs, least_memory(costs)).peak_bytes
    return costs, max(costs.static + 1, least + rng.randint(-3, 6))


@pytest.mark.parametrize("first", range(0, 240, 24))
def test_pofo_equals_all_orders_and_sets(first: int) -> None:
    """With slots of one byte nothing in the model is faster, and what it says can be built."""
    for seed in range(first, first + 24):
        costs, budget = _case(seed, 4)
        found = pofo(costs, budget, ONE, budget - costs.static)
        best = fastest(costs, budget)
        if found is None:
            assert best is None
            continue
        assert found.time_ns == best
        timed = no_wait(compute_order(costs, found.base), found.units, budget, ONE)
        assert timed is not None
        assert judge(costs, timed.schedule, budget, ONE).violations == ()


@grids.first(8, seed=range(60))
def test_pofo_is_never_worse_than_its_parts(seed: int) -> None:
    """Its program never loses to Rotor; its schedule to neither Rotor, DYNPROG nor GREEDY."""
    costs, budget = _case(seed, 8)
    slots = max(2, budget - costs.static)
    plain, both = rotor(costs, budget, slots), pofo(costs, budget, ONE, slots)
    if plain is not None:
        assert both is not None
        assert both.time_ns <= judge(costs, plain).makespan_ns
    # The smallest budget of both together is that of neither part alone.
    smallest = least_with_host(costs, ONE)
    assert smallest is not None
    least = judge(costs, smallest, None, ONE).peak_bytes
    budget = max(budget, least)
    best = rematerialize_chain(costs, budget, "pofo", 40, ONE).outcome
    assert best.peak_bytes <= budget
    for method in ("rotor", "dynprog", "greedy"):
        try:
            other = rematerialize_chain(costs, budget, method, 40, ONE).outcome
        except InfeasibleError:
            continue
        assert best.makespan_ns <= other.makespan_ns
