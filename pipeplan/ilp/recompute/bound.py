"""A lower bound on every contiguous plan, whatever it recomputes."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.ilp.bounds.load import relaxed_bound
from pipeplan.ilp.clock import never
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import SearchOptions
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options


def recompute_bound(
    costs: CostModel,
    known: Fraction | int,
    *,
    offload: bool = False,
    limit: SearchOptions | None = None,
) -> Fraction | None:
    """The least period per micro-batch of contiguous plans of any k; None if none can exist.

    The relaxed dynamic program of `contiguous` on relaxed options: V is a plain sum, messages
    cost no bytes, and no choice of runs takes less time, kept bytes or peak than some option.
    With `offload`, all that can leave is away of every micro-batch but the one that runs, as soon
    as its forward ends and until its backward starts, and takes no time on the way: no plan that
    offloads needs less at the instant when most are in flight and one of them runs.
    At other speeds than 1 a run's time is rounded differently, so that only `known` is claimed.
    Source: ours.

    Args:
        costs: chain and machines.
        known: a bound on the period per micro-batch, in ns.
        offload: whether plans may offload what they keep.
        limit: when slow programs end; None for never.
    """
    if any(gpu.speed != 1 for gpu in costs.cluster.gpus):
        return Fraction(known)
    options = list_options(costs.chain, relaxed=True, offload=offload, nested=True)
    relaxed = RecomputeDP(costs, any_k=True, options=options)
    return relaxed_bound(relaxed, known, relaxed.limit(limit) if limit else never)
