"""The best contiguous plans without a memory limit, and whether memory binds."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.plan import Stage

UNCONSTRAINED_BYTES = 2**60
"""Bytes of a GPU whose memory is no limit."""


def unconstrained_stages(state: Incumbent, *, quick: bool = False) -> tuple[Stage, ...]:
    """Stages of the shortest contiguous 1F1B plan without a limit; none if (R6) forbids all.

    Args:
        state: costs and limits.
        quick: whether one order of GPUs is enough where all take long.
    """
    solver = _unconstrained(state)
    if quick and solver.is_slow:
        solver = replace(solver, in_order=True)
    found = solver.shortest(1)
    return () if found is None else found.stages


def is_memory_bound(state: Incumbent) -> bool:
    """Whether the best contiguous plan would be shorter if memory were no limit.

    Taken for granted where the answer takes long.
    """
    known, solver = state.contiguous, _unconstrained(state)
    if known is None or solver.is_slow:
        return True
    found = solver.shortest(1)
    return found is None or found.period < known


def _unconstrained(state: Incumbent) -> ContiguousDP:
    costs = state.costs
    gpus = tuple(gpu.with_budget(UNCONSTRAINED_BYTES) for gpu in costs.cluster.gpus)
    cluster = costs.cluster.model_copy(update={"gpus": gpus})
    return ContiguousDP(replace(costs, cluster=cluster), state.most_in_flight)
