"""Random plans whose updates run beside what their ranks do next (U7)."""

from __future__ import annotations

from random import Random

from pipeplan.cluster import Host
from pipeplan.plan import Plan
from pipeplan.testing import plans

RATES = (10**9 // 40, 10**9 // 4, 10**9)
"""Bytes of weights a second; by the slowest ones forwards wait."""


def beside(seed: int, gpus: int | None = None) -> Plan:
    """A valid plan of two versions; all states are on the host, and nothing waits or offloads."""
    plan = plans.random_plan(seed, gpus=gpus, semantics="2bw", memory_model="exact", offload=False)
    rate = Random(f"{seed} beside").choice(RATES)
    host = Host(memory_bytes=2**40, bandwidth_bytes_per_s=10**9, update_bytes_per_s=rate)
    layers = tuple(
        layer.model_copy(update={"waiting_gradient_bytes": 0}) for layer in plan.chain.layers
    )
    ample = tuple(gpu.with_budget(2**40) for gpu in plan.cluster.gpus)
    chain = plan.chain.model_copy(update={"layers": layers})
    changes = {
        "chain": chain,
        "chain_digest": chain.digest(),
        "cluster": plan.cluster.model_copy(update={"host": host, "gpus": ample}),
        "stages": tuple(each.model_copy(update={"states": "host"}) for each in plan.stages),
    }
    return plans.settle(plan.model_copy(update=changes))
