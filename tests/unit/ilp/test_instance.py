"""What the periodic models choose from."""

from __future__ import annotations

from dataclasses import replace

from pipeplan import planner
from pipeplan.cluster import Cluster, Gpu, Links
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.variables import Instance
from tests import handmade, oracle


def test_more_gpus_than_layers() -> None:
    """Of equal GPUs, here in turns with others, models know as many as there are layers."""
    of = handmade.chain([(2, 2), (1, 1)], [{"saved_bytes": 4, "output_bytes": 1}, {}])
    gpus = tuple(Gpu(name=f"g{n}", memory_bytes=8, speed=1.0 + n % 2) for n in range(7))
    cluster = Cluster(gpus=gpus, links=Links(bandwidth_bytes_per_s=10**9))
    free = Instance(CostModel(of, cluster, "2bw", "exact"), ((0, 0), (1, 1)))
    assert free.gpus == (0, 1, 2, 3)
    assert replace(free, places=((5,), (6,))).gpus == tuple(range(7))
    config = planner.Config(k=1, time_limit_s=5, workers=1, deterministic=True)
    plan = planner.solve(of, cluster, config)
    assert plan.solver.status == "optimal"
    assert plan.period_ns == oracle.optimum(of, cluster, limit=12)
