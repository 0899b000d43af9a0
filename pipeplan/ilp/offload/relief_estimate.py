"""A fast estimate of what a schedule could offload: annealing compares it, `repair` decides.

A stage whose micro-batches rest for R between forward and backward and offload o bytes, d = o /
bandwidth each way, has at least floor((R - 2 d) / T) of k = 1 on the host at any time. All that a
GPU's stages offload in a period must pass its host link. Stages that rest longest come first.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.schedule import OpId
from pipeplan.plan import OpKind

PlacedStage = tuple[int, int, int]
"""(first layer, last layer, GPU)."""
SECOND = 10**9


def estimate_relief(
    costs: CostModel,
    stages: Sequence[PlacedStage],
    times: Mapping[OpId, tuple[int, ...]],
    period: int,
    over: Sequence[int],
) -> list[int]:
    """Bytes of each GPU that are away all the time, at most what it needs.

    Args:
        costs: of the exact memory model, with a host.
        stages: in chain order.
        times: of all computes, for each copy.
        period: ns of all copies.
        over: what each GPU lacks; of those that lack nothing none is asked.
    """
    host = costs.cluster.host
    assert host is not None
    found = [0] * costs.gpus
    ways = [period * host.bandwidth_bytes_per_s // SECOND // (1 + (host.duplex == "half"))] * (
        costs.gpus
    )
    for rest, stage, copies in _by_rest(costs, stages, times, over):
        first, last, gpu = stages[stage]
        missing = over[gpu] - found[gpu]
        if missing <= 0:
            continue
        most = min(offloadable_segments(costs, first, last), ways[gpu] // copies)
        size, freed = _enough(most, missing, rest, copies, period, host.bandwidth_bytes_per_s)
        found[gpu] += freed
        ways[gpu] -= size * copies
    return found


def _enough(
    most: int, missing: int, rest: int, copies: int, period: int, bandwidth: int
) -> tuple[int, int]:
    """(bytes that leave of each micro-batch, bytes of them away at any time): enough, or most."""
    best = (0, 0)
    for away in range(rest * copies // period, 0, -1):
        # As many bytes as still leave so many micro-batches away.
        room = (rest - away * period // copies) * bandwidth // (2 * SECOND)
        size = min(most, room, -(-missing // away))
        if size * away > best[1]:
            best = (size, size * away)
    return best


def _by_rest(
    costs: CostModel,
    stages: Sequence[PlacedStage],
    times: Mapping[OpId, tuple[int, ...]],
    over: Sequence[int],
) -> list[tuple[int, int, int]]:
    """(mean rest, stage, copies) of the stages of GPUs that lack bytes, longest rest first."""
    found: list[tuple[int, int, int]] = []
    for stage, (first, last, gpu) in enumerate(stages):
        if over[gpu] > 0:
            begins, ends = times[OpKind.F, stage], times[OpKind.B, stage]
            length = costs.forward_ns(first, last, gpu)
            rest = (sum(ends) - sum(begins)) // len(begins) - length
            found.append((rest, stage, len(begins)))
    return sorted(found, reverse=True)


def offloadable_segments(costs: CostModel, first: int, last: int) -> int:
    """The most bytes that layers first..last as a stage can send: (H1)."""
    own, inner = _sums(costs)
    return own[last + 1] - own[first] + inner[last + 1] - inner[first + 1]


@lru_cache(maxsize=64)
def _sums(costs: CostModel) -> tuple[list[int], list[int]]:
    """Sums up to each layer: of what layers keep, and of what lies between two that may leave."""
    stays, layers = costs.recomputed, costs.chain.layers
    own = [0 if n in stays else layer.saved_bytes for n, layer in enumerate(layers)]
    inner = [
        0 if n == 0 or n in stays or n - 1 in stays else inner_bytes(costs.chain, n)
        for n in range(len(layers))
    ]
    return list(accumulate(own, initial=0)), list(accumulate(inner, initial=0))
