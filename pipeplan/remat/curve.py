"""Time over budget: every method at budgets from the smallest feasible one to all that is kept."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.errors import InfeasibleError
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.methods import OFFLOADING, Rematerialization, rematerialize_chain
from pipeplan.remat.min_memory import least_memory, least_with_host
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import INSTANT, judge

CURVE = ("rotor", "revolve", "periodic", "pofo", "swap", "dynprog", "greedy", "vdnn", "autoswap")
"""The methods of a curve; TFLMS and CP-SAT take their own time."""


def budgets(costs: Costs, channel: HostLink | None, count: int) -> tuple[int, ...]:
    """`count` budgets, evenly from the smallest feasible one to the peak with nothing given up."""
    smallest = [least_memory(costs)]
    with_host = None if channel is None else least_with_host(costs, channel)
    smallest += [] if with_host is None else [with_host]
    low = min(judge(costs, each, None, channel or INSTANT).peak_bytes for each in smallest)
    high = judge(costs, keep_all(costs)).peak_bytes
    return tuple(low + (high - low) * at // max(1, count - 1) for at in range(count))


def curve(
    costs: Costs,
    limits: Sequence[int],
    slots: int = 500,
    channel: HostLink | None = None,
    methods: Sequence[str] = CURVE,
) -> dict[str, list[Rematerialization | None]]:
    """What each method finds at each of `limits`; None where it has nothing that small."""
    found: dict[str, list[Rematerialization | None]] = {}
    for method in methods:
        if method in OFFLOADING and channel is None:
            continue
        found[method] = [_one(costs, limit, method, slots, channel) for limit in limits]
    return found


def _one(
    costs: Costs, budget: int, method: str, slots: int, channel: HostLink | None
) -> Rematerialization | None:
    try:
        return rematerialize_chain(costs, budget, method, slots, channel)
    except InfeasibleError:
        return None
