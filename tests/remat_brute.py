"""Exhaustive search over operations by the device's rules alone: what planners must equal."""

from __future__ import annotations

import heapq
import random
from itertools import count

from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.device_state import DeviceState
from pipeplan.remat.schedules.schedule import FORWARDS, DeviceOp, DeviceOpKind
from tests.offload_brute import copy_of


def random_costs(rng: random.Random, layers: int, most: int = 8, whole: bool = False) -> Costs:
    """Costs with every field in use, zeros among them; `whole`: no tape smaller than its input."""

    def some(high: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, high) for _ in range(layers))

    boundary = tuple(rng.randint(0, most) for _ in range(layers + 1))
    entry = tuple(rng.randint(0, size) for size in boundary[:-1])
    saved = some(most)
    if whole:
        saved = tuple(
            map(max, saved, (x - kept for x, kept in zip(boundary[:-1], entry, strict=True)))
        )
    return Costs(
        names=tuple(f"layer{index}" for index in range(layers)),
        forward=some(9),
        light=some(9),
        backward=some(9),
        boundary=boundary,
        gradient=some(most),
        saved_input=entry,
        saved=saved,
        saved_output=tuple(rng.randint(0, size) for size in boundary[1:]),
        forward_work=some(3),
        light_work=some(4),
        backward_work=some(4),
        static=rng.randint(0, 3),
    )


def fastest_persistent(costs: Costs, budget: int, in_time: bool = True) -> int | None:
    """Least time of any persistent order of operations within `budget`; None where there is none.

    Persistent: a boundary kept by F_ck is given up only by the F_all that starts from it.
    `in_time`: a kept boundary is run from again only once nothing is kept behind it.
    """
    ticket = count()
    heap = [(0, next(ticket), DeviceState(costs), frozenset[int]())]
    seen: set[object] = set()
    while heap:
        time, _, device, marked = heapq.heappop(heap)
        if device.pending < 0:
            return time
        key = (frozenset(device.full), frozenset(device.tapes), device.pending, marked)
        if key in seen:
            continue
        seen.add(key)
        for op in _operations(costs, device, marked, in_time):
            if device.refusal(op) is None and device.during(op) <= budget:
                after = copy_of(device)
                after.apply(op)
                kept = marked | {op.index} if op.kind is DeviceOpKind.KEEP_INPUT else marked
                kept = kept - {op.index} if op.kind is DeviceOpKind.KEEP_ALL else kept
                heapq.heappush(heap, (time + _time(costs, op), next(ticket), after, kept))
    return None


def _operations(
    costs: Costs, device: DeviceState, marked: frozenset[int], in_time: bool
) -> list[DeviceOp]:
    found = [DeviceOp(DeviceOpKind.BACKWARD, device.pending)]
    for boundary in device.full:
        behind = range(boundary + 1, device.pending + 1)
        if in_time and boundary in marked and not {*behind}.isdisjoint(device.full | device.tapes):
            continue
        if boundary < costs.layers:
            found += [
                DeviceOp(DeviceOpKind.KEEP_ALL, boundary),
                DeviceOp(DeviceOpKind.KEEP_INPUT, boundary),
            ]
        if boundary not in marked:
            found.append(DeviceOp(DeviceOpKind.FREE, boundary))
            if boundary < costs.layers:
                found.append(DeviceOp(DeviceOpKind.KEEP_NOTHING, boundary))
    return found


def _time(costs: Costs, op: DeviceOp) -> int:
    if op.kind is DeviceOpKind.KEEP_ALL:
        return costs.forward[op.index]
    if op.kind in FORWARDS:
        return costs.light[op.index]
    return costs.backward[op.index] if op.kind is DeviceOpKind.BACKWARD else 0
