"""The relaxation behind the bound from counts and averages holds for every schedule.

A schedule with its own peaks as budgets leaves no room: if the relaxation refuses its allocation
at its period, it asks for more than plans need, and a bound from it would be wrong.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from random import Random

import pytest
from ortools.sat.python import cp_model

from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.ilp.bounds.counting import CountingRelaxation
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, PlacedStage
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import MemoryModel
from tests import handmade

ROOMY = 10**6


def random_costs(random: Random, model: MemoryModel) -> CostModel:
    """Two to seven layers, messages large in front, on three GPUs."""
    layers = random.randint(2, 7)
    sizes = sorted((random.randint(0, 30) for _ in range(layers - 1)), reverse=True)
    fields = [
        {
            "output_bytes": size,
            "saved_input_bytes": random.randint(0, before),
            "saved_output_bytes": random.randint(0, size),
            "saved_bytes": random.randint(0, 60),
            "weight_bytes": random.randint(0, 20),
            "forward_workspace_bytes": random.choice((0, 0, 9)),
        }
        for before, size in zip([0, *sizes], [*sizes, 0], strict=True)
    ]
    times = [(random.randint(5, 40), random.randint(5, 60)) for _ in fields]
    duplex = random.choice(("half", "full"))
    cluster = uniform(3, ROOMY, bandwidth_bytes_per_s=10**9, duplex=duplex)
    return CostModel(handmade.chain(times, fields), cluster, "2bw", model)


def random_schedule(random: Random, costs: CostModel) -> Schedule | None:
    """Stages on random GPUs, one to three micro-batches, as short as the orders allow."""
    cuts = sorted(random.sample(range(1, costs.layers), random.randint(0, costs.layers - 1)))
    edges = [0, *cuts, costs.layers]
    runs: list[PlacedStage] = [
        (first, behind - 1, random.randrange(costs.gpus)) for first, behind in pairwise(edges)
    ]
    k = random.choice((1, 1, 2, 3))
    loads = [sum(costs.load_ns(a, b, g) for a, b, g in runs if g == p) for p in range(costs.gpus)]
    period = int(k * max(loads) * random.uniform(1.0, 1.6)) + 1
    placed = ModuloListScheduler(costs, runs, period, [copy * period // k for copy in range(k)])
    return minimize_period_for_order(costs, placed.schedule(), 1) if placed.place() else None


@pytest.mark.parametrize("model", ["exact", "paper"])
def test_every_schedule_satisfies_it(model: MemoryModel) -> None:
    """No schedule's allocation is refused at its period with its own bytes as budgets."""
    random, met = Random(23), 0
    for _ in range(110):
        costs = random_costs(random, model)
        schedule = random_schedule(random, costs)
        if schedule is None:
            continue
        met += 1
        budgets: list[int] = []
        for row in memory_rows(costs, schedule):
            # no two GPUs count as equal, so that their order stays
            budgets.append(next(n for n in count(max(1, row.peak_bytes)) if n not in budgets))
        tight = replace(costs, cluster=_with_memories(costs.cluster, budgets))
        layers = tuple((layer, layer) for layer in range(costs.layers))
        master = CountingRelaxation(Instance(tight, layers), -(-schedule.period // schedule.k))
        for stage in schedule.stages:
            for layer in range(stage.first, stage.last + 1):
                master.model.add(master.v.on[layer][stage.gpu] == 1)
        assert cp_model.CpSolver().solve(master.model) == cp_model.OPTIMAL
    assert met > 55


def _with_memories(cluster: Cluster, budgets: list[int]) -> Cluster:
    gpus = tuple(
        Gpu(name=gpu.name, memory_bytes=budget, speed=gpu.speed)
        for gpu, budget in zip(cluster.gpus, budgets, strict=True)
    )
    return Cluster(gpus=gpus, links=cluster.links)
