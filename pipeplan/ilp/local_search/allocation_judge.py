"""How far an allocation in arrays is from a plan, as machine code: load, room, bytes.

The same as `list_scheduler`, `peak_estimate` and, with a host, `relief_estimate` say of it on its
contracted chain, in a few microseconds.
"""

from __future__ import annotations

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, Records, compiled
from pipeplan.ilp.local_search.allocation_stages import (
    LayoutArrays,
    describe_bytes,
    describe_times,
    first_layers,
)
from pipeplan.ilp.local_search.chain_arrays import BUDGETS, ChainArrays
from pipeplan.ilp.local_search.layer_ways import WayArrays, offloadable
from pipeplan.ilp.local_search.peak_estimate import peaks
from pipeplan.ilp.modulo_scheduling import B, F, place
from pipeplan.ilp.offload.relief_estimate import relief


@compiled
def judge(
    chain: ChainArrays,
    by_way: WayArrays,
    host: Floats,
    stages: Records,
    layout: LayoutArrays,
    period: int,
) -> tuple[float, int]:
    """How far an allocation is from a plan at this period, as far as estimated.

    Args:
        chain: what `chain_arrays` makes of it.
        by_way: what `way_arrays` makes of it, or `NO_WAYS`.
        host: bytes per ns each way and, if both share them, 1, where activations may leave; or
            nothing.
        stages: room for as many as there are layers.
        layout: the allocation.
        period: of all copies, in ns.

    Returns:
        Bytes beyond memory, as shares of each GPU's, summed; above 1 where there is no room for
        all stages, above 2 where a GPU has too much to compute. How many stages were placed, of
        all copies.
    """
    homes, cuts, _, turns, ways = layout
    firsts, copies, gpus = first_layers(homes, cuts), len(turns), len(chain[BUDGETS])
    count = len(firsts) - 1
    stages = stages[:count]
    describe_times(chain, by_way, stages, layout, firsts, period)
    over = _overload(stages, gpus, period, copies)
    if over > 0:
        return 2 + over, 0
    describe_bytes(chain, by_way, stages, homes, ways, firsts)
    centres, times = np.empty(copies, np.int64), np.zeros((4, count, copies), np.int64)
    for copy in range(copies):
        centres[copy] = int(turns[copy] * period)
    placed = place(stages, gpus + 2 * count, period, centres, times)
    if placed < count or not _in_turn(times, period):
        return 2 - placed / (count + 1), placed * copies
    found = peaks(stages, period, times, gpus)
    if len(host) > 0:
        over_budgets = found - chain[BUDGETS]
        found -= _relief(by_way, layout, firsts, host, stages, times, over_budgets, period)
    return _overflow(found, chain[BUDGETS]), placed * copies


@compiled
def _overflow(found: Ints, budgets: Ints) -> float:
    """Bytes beyond memory, as shares of each GPU's, summed."""
    excess = 0.0
    for gpu in range(len(budgets)):
        if found[gpu] > budgets[gpu]:
            excess += found[gpu] / max(1, budgets[gpu]) - 1
    return excess


@compiled
def _relief(
    by_way: WayArrays,
    layout: LayoutArrays,
    firsts: Ints,
    host: Floats,
    stages: Records,
    times: Ints,
    over: Ints,
    period: int,
) -> Ints:
    """What each GPU's stages may offload, as far as it needs that."""
    homes, _, _, _, ways = layout
    count, copies = len(stages), times.shape[2]
    rests, most = np.empty(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        stay = (times[B, number] - times[F, number]).sum() // copies
        rests[number] = stay - stages[number].forward
        first = firsts[number]
        beside = number > 0 and homes[first - 1] == homes[first]
        most[number] = offloadable(by_way, ways, first, firsts[number + 1], beside)
    return relief(rests, homes[firsts[:-1]], most, over, copies, period, host)


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
def _overload(stages: Records, gpus: int, period: int, copies: int) -> float:
    """Load of all copies beyond the period, of all GPUs, as a share of it."""
    loads = np.zeros(gpus, np.int64)
    for number in range(len(stages)):
        stage = stages[number]
        loads[stage.gpu] += stage.forward + stage.backward
    over = 0.0
    for load in loads:
        if copies * load > period:
            over += copies * load - period
    return over / period
