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

import numpy as np

from pipeplan.cluster import Host
from pipeplan.ilp.compiled import Floats, Ints, compiled
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options import inner_bytes, own_input_bytes
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
    copies = len(times[OpKind.F, 0])
    rests, most = np.empty(len(stages), np.int64), np.empty(len(stages), np.int64)
    for stage, (first, last, gpu) in enumerate(stages):
        begins, ends = times[OpKind.F, stage], times[OpKind.B, stage]
        rests[stage] = (sum(ends) - sum(begins)) // copies - costs.forward_ns(first, last, gpu)
        covered = stage > 0 and stages[stage - 1][2] == gpu
        most[stage] = offloadable_segments(costs, first, last, covered=covered)
    gpus, lacking = np.array([gpu for _, _, gpu in stages]), np.array(over, np.int64)
    return list(map(int, relief(rests, gpus, most, lacking, copies, period, link_of(host))))


def link_of(host: Host) -> Floats:
    """Bytes per ns each way, and 1 if both ways share them."""
    return np.array([host.bandwidth_bytes_per_s / SECOND, float(host.duplex == "half")])


@compiled
def relief(
    rests: Ints, gpus: Ints, most: Ints, over: Ints, copies: int, period: int, link: Floats
) -> Ints:
    """Bytes of each GPU that are away all the time, at most what it needs.

    Args:
        rests: by stage, ns between its F and its B in the mean of all copies.
        gpus: where each stage is.
        most: bytes of it that may leave.
        over: what each GPU lacks.
        copies: k.
        period: ns of all copies.
        link: as `link_of` says.
    """
    found = np.zeros(len(over), np.int64)
    ways = np.full(len(over), period * link[0] // (1 + link[1]))
    for stage in np.argsort(-rests, kind="mergesort"):
        gpu = gpus[stage]
        missing = over[gpu] - found[gpu]
        if missing <= 0:
            continue
        leaving = min(most[stage], ways[gpu] // copies)
        size, freed = _enough(leaving, missing, rests[stage], copies, period, link[0])
        found[gpu] += freed
        ways[gpu] -= size * copies
    return found


@compiled
def _enough(
    most: float, missing: int, rest: int, copies: int, period: int, bytes_per_ns: float
) -> tuple[int, int]:
    """(bytes that leave of each micro-batch, bytes of them away at any time): enough, or most."""
    best = freed = 0
    for away in range(rest * copies // period, 0, -1):
        # As many bytes as still leave so many micro-batches away.
        room = (rest - away * period // copies) * bytes_per_ns / 2
        size = int(min(most, room, -(-missing // away)))
        if size * away > freed:
            best, freed = size, size * away
    return best, freed


def offloadable_segments(costs: CostModel, first: int, last: int, *, covered: bool) -> int:
    """The most bytes that layers first..last as a stage can send, its input's among them: (H1)."""
    own, inner = _sums(costs)
    inside = own[last + 1] - own[first] + inner[last + 1] - inner[first + 1]
    return inside + own_input_bytes(costs, first, covered=covered)


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
