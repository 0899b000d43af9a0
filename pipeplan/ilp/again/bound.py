"""What every contiguous plan needs, whatever it computes again."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.ilp.again.options import options
from pipeplan.ilp.again.partition import RunSolver
from pipeplan.ilp.bounds import relaxed_bound
from pipeplan.ilp.costs import Costs


def again_bound(costs: Costs, lowest: int) -> Fraction | None:
    """The least period per micro-batch of contiguous plans of any k; None if none can exist.

    The relaxed dynamic program of `contiguous` on relaxed options: V is a plain sum, messages
    cost no bytes, and no choice of runs takes less time, kept bytes or peak than some option.
    At other speeds than 1 a run's time is rounded differently, so that only `lowest` is claimed.
    Source: ours.

    Args:
        costs: chain and machines.
        lowest: a bound that is known, in whole ns.
    """
    if any(gpu.speed != 1 for gpu in costs.cluster.gpus):
        return Fraction(lowest)
    relaxed = RunSolver(costs, any_k=True, options=options(costs.chain, relaxed=True))
    return relaxed_bound(relaxed, lowest)
