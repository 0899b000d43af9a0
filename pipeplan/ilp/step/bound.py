"""A lower bound on a step: no GPU can begin before something reaches it, nor end too early.

Source: ours; heads and tails as in schedules of flow shops (Carlier 1982).
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from itertools import accumulate, repeat
from operator import add

from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.costs import CostModel, ceil_div_fraction


def step_bound(costs: CostModel, microbatches: int) -> Fraction:
    """Ns per micro-batch of the shortest step of any placement, order and split.

    The first layers of the GPUs that are used differ, so the j-th of them (from 0) starts after j
    forwards at least and a transfer. Where no backward is split, the last op of a GPU is a
    backward of its first layer, and the backwards of the layers before it come after that. What
    is left of the step is the GPU's capacity, for all micro-batches of its layers. Capacities
    hold all layers only if they hold their sum, and for every n the n longest ones, of which a
    capacity holds no more than it holds of the shortest of them. Work is that of the fastest GPU.
    No step is shorter than the way of one micro-batch through all layers and back, either.
    """
    fastest = max(Fraction(repr(gpu.speed)) for gpu in costs.cluster.gpus)
    layers, overhead = costs.chain.layers, costs.cluster.action_overhead_ns
    forward = [ceil_div_fraction(layer.forward_ns, fastest) for layer in layers]
    backward = [ceil_div_fraction(layer.backward_ns, fastest) for layer in layers]
    heads = accumulate(forward, initial=0)
    tails = repeat(0) if costs.splits else accumulate(backward, initial=0)
    first_hop = (_least_transfer(costs) + overhead) * (1 if costs.splits else 2)
    idle = [
        head + tail + (first_hop if gpu else 0)
        for gpu, head, tail in zip(
            range(min(costs.gpus, costs.layers)), heads, tails, strict=False
        )
    ]
    works = sorted(map(add, forward, backward), reverse=True)

    def holds(step: int) -> bool:
        spare = [(step - ends) // microbatches - 2 * overhead for ends in idle]
        capacities = [each for each in spare if each > 0]
        return sum(capacities) >= sum(works) and all(
            sum(capacity // work for capacity in capacities) >= count
            for count, work in enumerate(works, start=1)
            if work
        )

    enough = idle[-1] + microbatches * (sum(works) + 2 * overhead)
    least = bisect_left(range(enough), True, key=holds)
    least = max(least, ceil_div_fraction(_way_ns(costs), fastest))
    return max(Fraction(least, microbatches), load_bound(costs))


def _way_ns(costs: CostModel) -> int:
    """All forwards, and all backwards without what may be W, at speed 1."""
    layers = enumerate(costs.chain.layers)
    late = (x.backward_weight_ns or 0 if costs.may_split(at, at) else 0 for at, x in layers)
    return sum(x.forward_ns + x.backward_ns for x in costs.chain.layers) - sum(late)


def _least_transfer(costs: CostModel) -> int:
    """The shortest transfer of any boundary over any link, in ns."""
    gpus, boundaries = range(costs.gpus), range(costs.layers - 1)
    latencies = [costs.link(one, other) for one in gpus for other in gpus if one != other]
    if not latencies or not boundaries:
        return 0
    return min(latency for latency, _ in latencies)
