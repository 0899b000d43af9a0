"""Chains of a few layers, and stages of theirs on random GPUs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from pipeplan.cluster import uniform
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.list_scheduler import PlacedStage
from pipeplan.plan import MemoryModel
from tests import handmade


def random_costs(random: Random, model: MemoryModel, gpus: int) -> CostModel:
    """A chain of a few layers with messages on equal GPUs with half-duplex links."""
    layers = random.randint(2, 8)
    times = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(layers)]
    fields = [
        {
            "output_bytes": random.randint(0, 3),
            "saved_bytes": random.randint(0, 4),
            "weight_bytes": random.randint(0, 2),
        }
        for _ in range(layers)
    ]
    cluster = uniform(gpus, 10**6, bandwidth_bytes_per_s=10**9, duplex="half")
    return CostModel(handmade.chain(times, fields), cluster, "2bw", model)


def random_runs(random: Random, costs: CostModel) -> list[PlacedStage]:
    """Stages on random GPUs, several on some."""
    cuts = sorted(random.sample(range(1, costs.layers), random.randint(0, costs.layers - 1)))
    edges = [0, *cuts, costs.layers]
    return [(first, behind - 1, random.randrange(costs.gpus)) for first, behind in pairwise(edges)]
