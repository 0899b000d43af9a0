"""A lower bound on a step: no GPU can begin before something reaches it, nor end too early.

Source: ours; heads and tails as in schedules of flow shops (Carlier 1982).
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.costs import CostModel, ceil_div_fraction


def step_bound(costs: CostModel, microbatches: int) -> Fraction:
    """Ns per micro-batch of the shortest step of any placement, order and split.

    The first layers of the GPUs that are used differ, so the j-th of them (from 0) starts after j
    forwards at least and a transfer. Where no backward is split, the last op of a GPU is a
    backward of its first layer, and the backwards of the layers before it come after that. Work
    is that of the fastest GPU; all of it is at most the sum over GPUs of (step - head - tail).
    """
    fastest = max(Fraction(repr(gpu.speed)) for gpu in costs.cluster.gpus)
    layers, overhead = costs.chain.layers, costs.cluster.action_overhead_ns
    forward = [ceil_div_fraction(layer.forward_ns, fastest) for layer in layers]
    backward = [ceil_div_fraction(layer.backward_ns, fastest) for layer in layers]
    splits = any(costs.may_split(layer, layer) for layer in range(1, costs.layers))
    heads = list(accumulate(forward, initial=0))
    tails = [0] * len(heads) if splits else list(accumulate(backward, initial=0))
    hop = _least_transfer(costs)
    ends = 0
    total = microbatches * (sum(forward) + sum(backward))
    best: Fraction | None = None
    for used in range(1, min(costs.gpus, costs.layers) + 1):
        first = used - 1
        ends += heads[first] + tails[first]
        if first:
            ends += (hop + overhead) * (1 if splits else 2)
        average = Fraction(total + ends, used) + 2 * overhead * microbatches
        best = average if best is None else min(best, average)
    assert best is not None
    return max(best / microbatches, load_bound(costs))


def _least_transfer(costs: CostModel) -> int:
    """The shortest transfer of any boundary over any link, in ns."""
    gpus, boundaries = range(costs.gpus), range(costs.layers - 1)
    latencies = [costs.link(one, other) for one in gpus for other in gpus if one != other]
    if not latencies or not boundaries:
        return 0
    return min(latency for latency, _ in latencies)
