"""Steps of annealing over allocations as machine code: moves, list schedules, what does not fit.

An allocation is four arrays: the GPU of each layer; whether a stage is split off before a layer
though it stays on the GPU; by first layer of a stage, the waits after its F and before its B, in
periods; when the copies' turns lie, in periods, rising from 0. A step takes its random numbers
from a row that it is given, so that the same rows give the same steps.
"""

from __future__ import annotations

from math import exp
from typing import Final

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
    PINS,
    RECEIVED,
    RETURNING,
    RUNNING,
    RUNNING_BESIDE,
    SAVED,
    SAVED_BESIDE,
    SENT,
    SIZES,
    STATES,
    TIED,
    op_ns,
    send_ns,
)
from pipeplan.ilp.local_search.peak_estimate import peaks
from pipeplan.ilp.modulo_scheduling import place

HOMES, CUTS, WAITS, TURNS = range(4)
"""What an allocation is."""

CHANGE: Final = 6
"""Random numbers that a change takes."""
DRAWS: Final = 2 * CHANGE + 3
"""Those of a step: of two changes, of tied layers, whether there are two, whether it is taken."""
TWICE: Final = 0.3
"""Share of the steps that make two changes."""
WAITING: Final = 0.3
"""Share of the changes that let a stage wait, or no longer."""
LONGEST_WAIT: Final = 0.5
"""In periods."""
SHIFT: Final = 0.15
"""By how much a copy's turn moves at most, in periods."""
BORDER_MOVES: Final = (1, 1, 1, 2, 3)
"""Layers by which a border moves."""
RUN_LENGTHS: Final = (1, 1, 2, 3, 5, 9)
"""Layers of a stage that move to another GPU."""


@compiled
def walk(
    chain: tuple[Ints, ...],
    stages: Records,
    at: tuple[Ints, Ints, Floats, Floats],
    new: tuple[Ints, Ints, Floats, Floats],
    closest: tuple[Ints, Ints, Floats, Floats],
    excesses: Floats,
    period: int,
    draws: Floats,
    heats: Floats,
    judged: bool,
    enough: int,
) -> tuple[int, int, bool]:
    """Anneal until a step's schedule fits as far as estimated, or until there are no more steps.

    Args:
        chain: what `chain_arrays` makes of it.
        stages: room for as many as there are layers.
        at: the allocation that the next step changes; is changed.
        new: that of the last step; is changed.
        closest: the one with the least excess; is changed.
        excesses: of the three, as shares of a GPU's memory; changed with them.
        period: of all copies, in ns.
        draws: random numbers from 0 to 1, `DRAWS` for each step.
        heats: by step, the excess that it accepts with probability 1/e.
        judged: whether the first step is made and judged already, so that `excesses` has what it
            came to: it is accepted or not.
        enough: after so many copies of stages that were placed no other step begins.

    Returns:
        How many steps are done, and how many copies of stages were placed; whether one more step
        is made, which has no excess by the estimate.
    """
    placed = 0
    for step in range(len(draws)):
        row = draws[step]
        if step > 0 or not judged:
            _copy(at, new)
            make_step(new, chain, row)
            excesses[1], stages_placed = judge(chain, stages, new, period)
            placed += stages_placed
            if excesses[1] <= 0:
                return step, placed, True
        behind = excesses[1] - excesses[0]
        if behind <= 0 or row[-1] < exp(-behind / heats[step]):
            _copy(new, at)
            excesses[0] = excesses[1]
            if excesses[0] < excesses[2]:
                _copy(at, closest)
                excesses[2] = excesses[0]
        if placed >= enough:
            return step + 1, placed, False
    return len(draws), placed, False


@compiled
def _copy(
    one: tuple[Ints, Ints, Floats, Floats], other: tuple[Ints, Ints, Floats, Floats]
) -> None:
    """Make `other` the same allocation."""
    other[HOMES][:] = one[HOMES]
    other[CUTS][:] = one[CUTS]
    other[WAITS][:] = one[WAITS]
    other[TURNS][:] = one[TURNS]


@compiled
def make_step(
    layout: tuple[Ints, Ints, Floats, Floats], chain: tuple[Ints, ...], draws: Floats
) -> None:
    """One or two random changes; tied and pinned layers stay where they must."""
    gpus = len(chain[BUDGETS])
    _change(layout, gpus, draws[:CHANGE])
    if draws[-2] < TWICE:
        _change(layout, gpus, draws[CHANGE : 2 * CHANGE])
    homes, _, _, _ = layout
    keep(homes, chain, draws[-3])


@compiled
def keep(homes: Ints, chain: tuple[Ints, ...], draw: float) -> None:
    """Put tied layers where one of theirs is, pinned ones on their GPUs."""
    for group in chain[TIED]:
        gpu = homes[group[1 + _pick(draw, group[0])]]
        for member in range(group[0]):
            homes[group[1 + member]] = gpu
    for layer in range(len(homes)):
        if chain[PINS][layer] >= 0:
            homes[layer] = chain[PINS][layer]


@compiled
def _pick(draw: float, count: int) -> int:
    """One of so many, by a number from 0 to 1."""
    return min(int(draw * count), count - 1)


@compiled
def _firsts(homes: Ints, cuts: Ints) -> Ints:
    """First layers of the stages, and the number of layers."""
    firsts, count = np.empty(len(homes) + 1, np.int64), 0
    for layer in range(len(homes)):
        if layer == 0 or cuts[layer] or homes[layer] != homes[layer - 1]:
            firsts[count] = layer
            count += 1
    firsts[count] = len(homes)
    return firsts[: count + 1]


@compiled
def _change(layout: tuple[Ints, Ints, Floats, Floats], gpus: int, draws: Floats) -> None:
    """Move a border, a run of layers or a whole stage; swap two; split, join; shift; wait."""
    homes, cuts, waits, turns = layout
    firsts, kind = _firsts(homes, cuts), draws[1]
    stages = len(firsts) - 1
    one, other = _pick(draws[2], stages), _pick(draws[3], stages)
    gpu = _pick(draws[4], gpus)
    first, behind = firsts[one], firsts[one + 1]
    if draws[0] < WAITING:
        _change_waits(waits, firsts, draws[2:])
    elif len(turns) > 1 and kind < 0.1:
        _shift(turns, draws[2], draws[3])
    elif kind < 0.45 and stages > 1:
        _move_border(homes, firsts, draws[2:])
    elif kind < 0.72:
        begin = first + _pick(draws[3], behind - first)
        length = RUN_LENGTHS[_pick(draws[5], len(RUN_LENGTHS))]
        homes[begin : min(behind, begin + length)] = gpu
    elif kind < 0.82:
        homes[first:behind] = gpu
    elif kind < 0.9:
        here, there = homes[first], homes[firsts[other]]
        homes[first:behind] = there
        homes[firsts[other] : firsts[other + 1]] = here
    else:
        _resplit(homes, cuts, draws[2:])


@compiled
def _move_border(homes: Ints, firsts: Ints, draws: Floats) -> None:
    """Give some layers beside a border to the other side."""
    at = 1 + _pick(draws[0], len(firsts) - 2)
    border, count = firsts[at], BORDER_MOVES[_pick(draws[1], len(BORDER_MOVES))]
    if draws[2] < 0.5:
        homes[border : min(firsts[at + 1], border + count)] = homes[border - 1]
    else:
        homes[max(firsts[at - 1], border - count) : border] = homes[border]


@compiled
def _resplit(homes: Ints, cuts: Ints, draws: Floats) -> None:
    """Forget splits that do nothing, and one of the others, or add one."""
    real = 0
    for layer in range(1, len(homes)):
        if cuts[layer] and homes[layer] != homes[layer - 1]:
            cuts[layer] = 0
        real += cuts[layer]
    if real > 0 and draws[0] < 0.5:
        left = _pick(draws[1], real)
        for layer in range(1, len(homes)):
            if cuts[layer]:
                if left == 0:
                    cuts[layer] = 0
                left -= 1
    elif len(homes) > 1:
        cuts[1 + _pick(draws[1], len(homes) - 1)] = 1


@compiled
def _change_waits(waits: Floats, firsts: Ints, draws: Floats) -> None:
    """No wait for one of the stages that wait, or one for any stage, at its F or its B."""
    kept = np.zeros(waits.shape)
    waiting = np.empty(len(firsts), np.int64)
    count = 0
    for first in firsts[:-1]:
        if waits[first, 0] > 0 or waits[first, 1] > 0:
            kept[first] = waits[first]
            waiting[count] = first
            count += 1
    if count > 0 and draws[0] < 0.5:
        kept[waiting[_pick(draws[1], count)]] = 0
    else:
        first = firsts[_pick(draws[1], len(firsts) - 1)]
        kept[first] = 0
        kept[first, int(draws[2] < 0.5)] = LONGEST_WAIT * draws[3]
    waits[:] = kept


@compiled
def _shift(turns: Floats, which: float, way: float) -> None:
    """Move the turn of one copy; turns rise."""
    copy, last = 1 + _pick(which, len(turns) - 1), len(turns) - 1
    moved = min(max(turns[copy] + SHIFT * (2 * way - 1), 0.0), 0.999)
    while copy > 1 and turns[copy - 1] > moved:
        turns[copy] = turns[copy - 1]
        copy -= 1
    while copy < last and turns[copy + 1] < moved:
        turns[copy] = turns[copy + 1]
        copy += 1
    turns[copy] = moved


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
    firsts, copies, budgets = _firsts(homes, cuts), len(turns), chain[BUDGETS]
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
