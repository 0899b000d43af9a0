"""The stages of an allocation in arrays, as `modulo_scheduling` places them: machine code."""

from __future__ import annotations

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, Records, compiled
from pipeplan.ilp.local_search.chain_arrays import (
    BACKWARD,
    BUDGETS,
    EXACT,
    FACTS,
    FORWARD,
    GRADIENT_RECEIVED,
    GRADIENT_SENT,
    HALF_DUPLEX,
    MESSAGES,
    RECEIVED,
    RETURNING,
    RUNNING,
    RUNNING_BESIDE,
    SAVED,
    SAVED_BESIDE,
    SENT,
    SIZES,
    STATES,
    ChainArrays,
    send_ns,
)
from pipeplan.ilp.local_search.layer_ways import (
    WayArrays,
    keeps_all,
    stage_bytes,
    stage_ns,
    unsaved_output,
)

LayoutArrays = tuple[Ints, Ints, Floats, Floats, Ints]
"""An allocation: the GPU of each layer; whether a stage is split off before a layer though it
stays on the GPU; by first layer of a stage, the waits after its F and before its B, in periods;
when the copies' turns lie, in periods, rising from 0; how each layer runs (`layer_ways`), or
nothing where all keep all."""


@compiled
def first_layers(homes: Ints, cuts: Ints) -> Ints:
    """First layers of the stages, and the number of layers."""
    firsts, count = np.empty(len(homes) + 1, np.int64), 0
    for layer in range(len(homes)):
        if layer == 0 or cuts[layer] or homes[layer] != homes[layer - 1]:
            firsts[count] = layer
            count += 1
    firsts[count] = len(homes)
    return firsts[: count + 1]


@compiled
def describe_times(
    chain: ChainArrays,
    by_way: WayArrays,
    stages: Records,
    layout: LayoutArrays,
    firsts: Ints,
    period: int,
) -> None:
    """Fill in where each stage is, what its ops take and how long they wait."""
    homes, _, waits, _, ways = layout
    for number in range(len(stages)):
        stage, first, behind = stages[number], firsts[number], firsts[number + 1]
        stage.gpu = homes[first]
        stage.forward, stage.backward = stage_ns(chain, by_way, ways, first, behind, stage.gpu)
        stage.in_wait = int(waits[first, 0] * period)
        stage.out_wait = int(waits[first, 1] * period)


@compiled
def describe_bytes(
    chain: ChainArrays,
    by_way: WayArrays,
    stages: Records,
    homes: Ints,
    ways: Ints,
    firsts: Ints,
) -> None:
    """Fill in the bytes of each stage and what crosses cuts, as `modulo_scheduling.STAGE` says."""
    sizes, messages, exact = chain[SIZES], chain[MESSAGES], chain[FACTS][EXACT]
    for number in range(len(firsts) - 1):
        stage, first, last = stages[number], firsts[number], firsts[number + 1] - 1
        gpu = homes[first]
        beside = number > 0 and homes[first - 1] == gpu
        stage.fixed, stage.returning = sizes[STATES, first, last], sizes[RETURNING, first, last]
        stage.saved = sizes[SAVED_BESIDE if beside else SAVED, first, last]
        stage.running = sizes[RUNNING_BESIDE if beside else RUNNING, first, last]
        if not keeps_all(ways, first, last + 1):
            stage.saved, stage.running, stage.returning = stage_bytes(
                chain, by_way, ways, first, last + 1, beside
            )
        stage.kept_after = 0
        if exact:
            stage.running -= stage.saved
        else:
            # A micro-batch's bytes count from F's end on; buffers of a cut are always there.
            stage.kept_after = stage.forward
            if number > 0 and not beside:
                stage.fixed += messages[first - 1, RECEIVED]
                stage.fixed += messages[first - 1, GRADIENT_RECEIVED]
        sent = 0
        if last < len(homes) - 1:
            kept = len(ways) == 0
            sent = messages[last, SENT] if kept else unsaved_output(by_way, ways[last], last)
        _describe_cut(chain, stage, homes, firsts, last, sent)


@compiled
def _describe_cut(
    chain: ChainArrays, stage: Records, homes: Ints, firsts: Ints, last: int, sent: int
) -> None:
    """Fill in what crosses the cut behind the stage that ends with layer `last`."""
    messages = chain[MESSAGES]
    stage.out = stage.back = -1
    stage.send_forward = stage.send_backward = 0
    stage.sent = stage.received = stage.gradient_sent = stage.gradient_received = 0
    if last == len(homes) - 1:
        return
    here, there = homes[last], homes[last + 1]
    exact, half_duplex = chain[FACTS][EXACT], chain[FACTS][HALF_DUPLEX]
    if here == there or exact:
        stage.sent, stage.gradient_sent = sent, messages[last, GRADIENT_SENT]
    if here == there:
        return
    gpus = len(chain[BUDGETS])
    stage.out = gpus + _link(homes, firsts, here, there, half_duplex)
    stage.back = gpus + _link(homes, firsts, there, here, half_duplex)
    stage.send_forward = send_ns(chain, FORWARD, last, here, there)
    stage.send_backward = send_ns(chain, BACKWARD, last, there, here)
    received, returned = messages[last, RECEIVED], messages[last, GRADIENT_RECEIVED]
    if exact:
        stage.received, stage.gradient_received = received, returned
    else:
        stage.fixed += received + returned


@compiled
def _link(homes: Ints, firsts: Ints, source: int, target: int, half_duplex: int) -> int:
    """Number of the link from a GPU to another: by the first cut between the two."""
    cut = 0
    while True:
        one, other = homes[firsts[cut]], homes[firsts[cut + 1]]
        if one == source and other == target:
            return 2 * cut
        if one == target and other == source:
            return 2 * cut + 1 - half_duplex
        cut += 1
