"""Selection heuristics: units to offload by GREEDY, vDNN, AutoSwap and TFLMS.

docs/reference/remat-rules.md §5 says how each is read: M. Rhu et al., *vDNN* (2016); J. Zhang et
al., *Efficient memory management for GPU-based deep learning systems* (2019, AutoSwap); T. Le et
al., *TFLMS: large model support in TensorFlow by graph rewriting* (2018).

Each function yields sets of units or timed schedules; the no-wait schedule of the best one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np

from pipeplan.remat.arrays import Floats
from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit
from pipeplan.remat.offloading.no_wait import (
    NoWaitSchedule,
    no_wait,
    prefetch_positions,
    with_transfers,
)
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind

UnitSet = frozenset[int]

AHEAD = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610)
"""Operations ahead of its use at which TFLMS calls a unit back."""
_QUARTERS = 4
"""Steps of a score's weight in AUTOSWAP."""


def ranked_sets(
    line: ComputeOrder, sets: Iterable[UnitSet], budget: int, channel: HostLink
) -> list[tuple[UnitSet, NoWaitSchedule]]:
    """The sets that have a no-wait schedule, with it, fastest first."""
    timed = ((chosen, no_wait(line, chosen, budget, channel)) for chosen in dict.fromkeys(sets))
    found = [(chosen, each) for chosen, each in timed if each is not None]
    return sorted(found, key=lambda pair: pair[1].makespan_ns)


def fastest_set(
    line: ComputeOrder, sets: Iterable[UnitSet], budget: int, channel: HostLink
) -> tuple[UnitSet, NoWaitSchedule] | None:
    """The set whose no-wait schedule is shortest, and that schedule."""
    return next(iter(ranked_sets(line, sets, budget, channel)), None)


def greedy(line: ComputeOrder, budget: int) -> UnitSet:
    """The first units that together cover what the peak lacks (Theorem 2, rounded up)."""
    lacking = line.peak - budget
    chosen: list[int] = []
    for unit in line.units:
        if lacking <= 0:
            break
        chosen.append(unit.index)
        lacking -= unit.size
    return frozenset(chosen)


def vdnn(line: ComputeOrder) -> Iterator[UnitSet]:
    """Units whose next forward is long for their size, above each threshold; all, or every other.

    After VDNN++ as the paper generalizes it to layers that are not known to be convolutions.
    """
    ratio = [line.time[unit.away - 1] / unit.size for unit in line.units]
    for threshold in sorted(set(ratio)):
        chosen = [u.index for u, each in zip(line.units, ratio, strict=True) if each >= threshold]
        yield frozenset(chosen)
        yield frozenset(chosen[::2])


def tflms(line: ComputeOrder, budget: int, channel: HostLink) -> NoWaitSchedule | None:
    """The first n units, each called back a fixed number of operations before its use.

    The best n and distance; computation never waits for offloads, as in TFLMS.
    """
    best: NoWaitSchedule | None = None
    for count in range(len(line.units) + 1):
        units = line.units[:count]
        if prefetch_positions(line, units[::-1], budget) is None:
            continue
        for ahead in AHEAD:
            found = _at_distance(line, units, ahead, budget, channel)
            if found is not None and (best is None or found.makespan_ns < best.makespan_ns):
                best = found
            if ahead > len(line.ops) or not units:
                break
    return best


def _at_distance(
    line: ComputeOrder, units: tuple[OffloadUnit, ...], ahead: int, budget: int, channel: HostLink
) -> NoWaitSchedule | None:
    issues: dict[int, list[DeviceOp]] = {}
    for unit in units:
        issues.setdefault(unit.ready, []).append(DeviceOp(DeviceOpKind.OFFLOAD, unit.index))
    for unit in reversed(units):
        at = max(line.turn, unit.due - ahead)
        issues.setdefault(at, []).append(DeviceOp(DeviceOpKind.PREFETCH, unit.index))
    return with_transfers(line, issues, budget, channel, late=False)


def autoswap(line: ComputeOrder, budget: int, channel: HostLink) -> Iterator[UnitSet]:
    """Units by a weighted mean of four scores, as many as make every operation fit.

    The scores of AUTOSWAP: time away, time away times size, excess of the load over the budget
    during it, and that excess as the units chosen before leave it. All mixes of quarters.
    """
    scores = _scores(line, budget, channel)
    steps = range(_QUARTERS + 1)
    for weights in product(steps, repeat=len(scores)):
        if sum(weights) == _QUARTERS:
            yield _until_it_fits(line, np.array(weights) @ scores, budget)


def _until_it_fits(line: ComputeOrder, score: Floats, budget: int) -> UnitSet:
    load = line.need.copy()
    chosen: list[int] = []
    for at in np.argsort(-score, kind="stable"):
        if load.max(initial=0) <= budget:
            break
        unit = line.units[at]
        load[unit.away : unit.due] -= unit.size
        chosen.append(unit.index)
    return frozenset(chosen)


def _scores(line: ComputeOrder, budget: int, channel: HostLink) -> Floats:
    """One row per score, each with 1 as its largest."""
    ends = np.cumsum(line.time)
    time = line.time.astype(np.float64)
    excess = np.maximum(line.need - budget, 0).astype(np.float64)
    rows = np.zeros((4, len(line.units)))
    for at, unit in enumerate(line.units):
        away = float(ends[unit.due - 1] - ends[unit.away - 1])
        rows[0, at] = max(0.0, away - 2 * channel.time_ns(unit.size))
        rows[1, at] = rows[0, at] * unit.size
        rows[2, at] = _relief(unit, excess, time)
    rows[3] = _submodular(line, excess, time)
    most = rows.max(axis=1, initial=0, keepdims=True)
    scaled: Floats = rows / np.where(most > 0, most, 1)
    return scaled


def _relief(unit: OffloadUnit, excess: Floats, time: Floats) -> float:
    """Bytes over the budget that the unit's absence saves, over time."""
    away = slice(unit.away, unit.due)
    return float((np.minimum(excess[away], unit.size) * time[away]).sum())


def _submodular(line: ComputeOrder, excess: Floats, time: Floats) -> Floats:
    """The relief of each unit when it is chosen, the largest first, behind those chosen before."""
    left, found = list(range(len(line.units))), np.zeros(len(line.units))
    excess = excess.copy()
    while left:
        relief = [_relief(line.units[at], excess, time) for at in left]
        best = int(np.argmax(relief))
        at = left.pop(best)
        found[at] = relief[best]
        unit = line.units[at]
        away = slice(unit.away, unit.due)
        excess[away] = np.maximum(excess[away] - unit.size, 0)
    return found
