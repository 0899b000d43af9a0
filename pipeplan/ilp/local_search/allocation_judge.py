"""How far an allocation in arrays is from a plan, as machine code: load, room, bytes.

The same as `list_scheduler` and `peak_estimate` say of it, in a few microseconds.
"""

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
    op_ns,
    send_ns,
)
from pipeplan.ilp.local_search.peak_estimate import peaks
from pipeplan.ilp.modulo_scheduling import place


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
def judge(
    chain: tuple[Ints, ...],
    stages: Records,
    layout: tuple[Ints, Ints, Floats, Floats],
    period: int,
) -> tuple[float, int]:
    """How far an allocation is from a plan at this period, as far as estimated.

    Returns:
        Bytes beyond memory, as shares of each GPU's, summed; above 1 where there is no room for
        all stages, above 2 where a GPU has too much to compute. How many stages were placed, of
        all copies.
    """
    homes, cuts, waits, turns = layout
    firsts, copies, budgets = first_layers(homes, cuts), len(turns), chain[BUDGETS]
    count = len(firsts) - 1
    over = _overload(chain, homes, firsts, period, copies)
    if over > 0:
        return 2 + over, 0
    _describe(chain, stages, homes, firsts)
    centres = np.empty(copies, np.int64)
    for copy in range(copies):
        centres[copy] = int(turns[copy] * period)
    for number in range(count):
        stage, first = stages[number], firsts[number]
        stage.in_wait = int(waits[first, 0] * period)
        stage.out_wait = int(waits[first, 1] * period)
    times = np.zeros((4, count, copies), np.int64)
    placed = place(stages[:count], len(budgets) + 2 * count, period, centres, times)
    if placed < count or not _in_turn(times, period):
        return 2 - placed / (count + 1), placed * copies
    excess = 0.0
    found = peaks(stages[:count], period, times, len(budgets))
    for gpu in range(len(budgets)):
        if found[gpu] > budgets[gpu]:
            excess += found[gpu] / max(1, budgets[gpu]) - 1
    return excess, placed * copies


@compiled
def _in_turn(times: Ints, period: int) -> bool:
    """Whether no copy's op overtakes that of the next period (R5)."""
    last = times.shape[2] - 1
    for op in range(times.shape[0]):
        for stage in range(times.shape[1]):
            if times[op, stage, last] - times[op, stage, 0] >= period:
                return False
    return True


@compiled
def _overload(
    chain: tuple[Ints, ...], homes: Ints, firsts: Ints, period: int, copies: int
) -> float:
    """Load of all copies beyond the period, of all GPUs, as a share of it."""
    loads = np.zeros(len(chain[BUDGETS]), np.int64)
    for number in range(len(firsts) - 1):
        first, behind, gpu = firsts[number], firsts[number + 1], homes[firsts[number]]
        for op in (FORWARD, BACKWARD):
            loads[gpu] += op_ns(chain, op, first, behind, gpu)
    over = 0.0
    for load in loads:
        if copies * load > period:
            over += copies * load - period
    return over / period


@compiled
def _describe(chain: tuple[Ints, ...], stages: Records, homes: Ints, firsts: Ints) -> None:
    """Fill in a record of each stage, as `modulo_scheduling.STAGE` says."""
    sizes, messages, exact = chain[SIZES], chain[MESSAGES], chain[FACTS][EXACT]
    for number in range(len(firsts) - 1):
        stage, first, last = stages[number], firsts[number], firsts[number + 1] - 1
        gpu = homes[first]
        beside = number > 0 and homes[first - 1] == gpu
        stage.gpu = gpu
        stage.forward = op_ns(chain, FORWARD, first, last + 1, gpu)
        stage.backward = op_ns(chain, BACKWARD, first, last + 1, gpu)
        stage.fixed, stage.returning = sizes[STATES, first, last], sizes[RETURNING, first, last]
        stage.saved = sizes[SAVED_BESIDE if beside else SAVED, first, last]
        stage.running = sizes[RUNNING_BESIDE if beside else RUNNING, first, last]
        stage.kept_after = 0
        if exact:
            stage.running -= stage.saved
        else:
            # A micro-batch's bytes count from F's end on; buffers of a cut are always there.
            stage.kept_after = stage.forward
            if number > 0 and not beside:
                stage.fixed += messages[first - 1, RECEIVED]
                stage.fixed += messages[first - 1, GRADIENT_RECEIVED]
        _describe_cut(chain, stage, homes, firsts, last)


@compiled
def _describe_cut(
    chain: tuple[Ints, ...], stage: Records, homes: Ints, firsts: Ints, last: int
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
        stage.sent, stage.gradient_sent = messages[last, SENT], messages[last, GRADIENT_SENT]
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
