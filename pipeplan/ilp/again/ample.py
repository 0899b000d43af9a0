"""The cuts that are best where memory is no limit."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.ilp.contiguous.solver import ContiguousSolver
from pipeplan.ilp.state.incumbent import Incumbent
from pipeplan.plan import Stage

AMPLE = 2**60
"""Bytes of a GPU whose memory is no limit."""


def ample_stages(state: Incumbent) -> tuple[Stage, ...]:
    """Stages of the shortest contiguous 1F1B plan without a limit; none if (R6) forbids all."""
    costs = state.costs
    gpus = tuple(gpu.model_copy(update={"memory_bytes": AMPLE}) for gpu in costs.cluster.gpus)
    cluster = costs.cluster.model_copy(update={"gpus": gpus})
    ample = replace(costs, cluster=cluster)
    found = ContiguousSolver(ample, state.most_in_flight).shortest(1)
    return () if found is None else found.stages
