"""Chains of equal layers whose steps are searched."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.ilp.costs import CostModel
from tests import handmade


def equal(gpus: int, *, split: bool, memory: Fraction) -> tuple[Chain, CostModel]:
    """Four equal layers a GPU; memory is a share of what 1F1B's first GPU keeps."""
    weight = {"backward_weight_ns": 1000, "saved_for_weight_bytes": 600} if split else {}
    layers = 4 * gpus
    chain = handmade.chain([(1000, 2000)] * layers, [{"saved_bytes": 1000} | weight] * layers)
    cluster = uniform(gpus, int(memory * gpus * 4000) + 1000, latency_ns=5)
    return chain, CostModel(chain, cluster, "flush", "exact")
