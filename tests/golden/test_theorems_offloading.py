"""Theorems 1 and 3 of paper 001: offloading is 3-partition, with interruptions 2-partition.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU Offloading Strategies" (2020). A unit of time is
V ns here and the channel moves a byte per ns, so that V bytes take one. Each instance is judged
from both sides: a solution of the partition problem gives a schedule that the judge accepts, the
fastest schedule gives a solution, and where there is none, no schedule is as fast. That greedy is
optimal where parts may move (Theorem 2) is tested in tests/property/test_remat_offload.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.cpsat.exact import Proof, exact_offload
from pipeplan.remat.offloading.compute_order import compute_order
from pipeplan.remat.offloading.discretization import discretize
from pipeplan.remat.offloading.dynprog import choose
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule
from tests.partitions import NO, YES, is_three_partition, target, three_partition, two_partition

BYTE_PER_NS = HostLink(10**9)


def costs_of(times: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Costs:
    """F_i and B_i of these times; x_i, of these sizes, is all that is kept."""
    nothing = (0,) * len(times)
    return Costs(
        names=tuple(f"op{i}" for i in range(len(times))),
        forward=tuple(forward for forward, _ in times),
        light=tuple(forward for forward, _ in times),
        backward=tuple(backward for _, backward in times),
        boundary=(*sizes, 0),
        gradient=nothing,
        saved_input=tuple(sizes),
        saved=nothing,
        saved_output=nothing,
        forward_work=nothing,
        light_work=nothing,
        backward_work=nothing,
    )


# --- Theorem 1: whole units, no interruptions ---------------------------------------------------


def problem_1(values: Sequence[int], offset: int = 2) -> Costs:
    """F_0..F_5m: x_0..x_(3m-1) are the u, F_(3m+2k) lasts V and x_(3m+2k+offset) has V bytes.

    The paper prints offset 1, the output of F_(3m+2k). Then F_3m needs V bytes more than there are
    before anything has left, so that no schedule begins without waiting; its own proof releases
    them for F_(3m+2k+1), whose output is offset 2.
    """
    v, m = target(values), len(values) // 3
    times, sizes = [(0, 0)] * (5 * m + 1), [*values] + [0] * (2 * m + 1)
    for k in range(m):
        times[3 * m + 2 * k] = (v, 0)
        sizes[3 * m + 2 * k + offset] = v
    times[3 * m] = (v, m * v)
    return costs_of(times, sizes)


def fastest(costs: Costs, budget: int) -> Proof:
    """The fastest offloading, one transfer at a time, with its proof."""
    return exact_offload(compute_order(costs, keep_all(costs)), budget, BYTE_PER_NS, 60)


@pytest.mark.parametrize("values", [*YES.values(), *NO.values()])
def test_no_idle_time_is_a_three_partition(values: Sequence[int]) -> None:
    """M = mV: a makespan of 2mV, all computation, if and only if there is a 3-partition."""
    v, m, parts = target(values), len(values) // 3, three_partition(values)
    costs = problem_1(values)
    assert costs.compute == 2 * m * v
    if parts is not None:
        outcome = judge(costs, overlapped(costs, m, parts), m * v, BYTE_PER_NS)
        assert (outcome.violations, outcome.makespan_ns) == ((), 2 * m * v)

    proof = fastest(costs, m * v)
    assert proof.found is not None
    outcome = judge(costs, proof.found.schedule, m * v, BYTE_PER_NS)
    assert (outcome.violations, outcome.makespan_ns) == ((), proof.found.makespan_ns)
    if parts is None:
        assert proof.bound_ns > 2 * m * v
    else:
        assert outcome.makespan_ns == 2 * m * v
        assert is_three_partition(values, filled(proof.found.schedule, values, v))


def overlapped(costs: Costs, m: int, parts: Sequence[Sequence[int]]) -> DeviceSchedule:
    """Triple k leaves while F_(3m+2k) runs; all come back while B_3m does."""
    ops: list[DeviceOp] = []
    for layer in range(costs.layers):
        k, rest = divmod(layer - 3 * m, 2)
        leaving = parts[k] if 0 <= k < m and rest == 0 else ()
        ops += [DeviceOp(DeviceOpKind.OFFLOAD, unit) for unit in leaving]
        ops.append(DeviceOp(DeviceOpKind.KEEP_ALL, layer))
        ops += [DeviceOp(DeviceOpKind.WAIT, unit) for unit in leaving]
    for layer in reversed(range(costs.layers)):
        units = range(3 * m - 1, -1, -1) if layer == 3 * m else ()
        ops += [DeviceOp(DeviceOpKind.PREFETCH, unit) for unit in units]
        ops += [DeviceOp(DeviceOpKind.WAIT, layer)] * (layer < 3 * m)
        ops.append(DeviceOp(DeviceOpKind.BACKWARD, layer))
    return DeviceSchedule(costs.layers, tuple(ops))


def filled(schedule: DeviceSchedule, values: Sequence[int], v: int) -> list[list[int]]:
    """What leaves, in order, cut wherever V bytes more have left: what one forward hides."""
    parts: list[list[int]] = [[]]
    for op in schedule.ops:
        if op.kind is DeviceOpKind.OFFLOAD:
            if sum(values[i] for i in parts[-1]) >= v:
                parts.append([])
            parts[-1].append(op.index)
    return parts


def test_the_printed_index_cannot_be_meant() -> None:
    """With x_(3m+2k+1) as printed, instances that have a 3-partition idle, too."""
    values = YES["two triples of 15"]
    v, m = target(values), 2
    assert fastest(problem_1(values, offset=1), m * v).bound_ns > 2 * m * v


# --- Theorem 3: whole units, with interruptions -------------------------------------------------


@pytest.mark.parametrize(
    "values", [(3, 1, 1, 2, 2, 1), (5, 4, 3, 2), (7, 7), (5, 5, 2), (9, 1, 2), (3, 3, 4, 4, 4)]
)
def test_no_idle_time_with_interruptions_is_a_two_partition(values: Sequence[int]) -> None:
    """M = 2V: a makespan of 2V if and only if half of all u can leave, no more and no less.

    The first n ops have the u as inputs, F_n and B_n last V ns, x_(n+2) has V bytes.
    """
    n, v, half = len(values), sum(values) // 2, two_partition(values)
    costs = costs_of([(0, 0)] * n + [(v, v), (0, 0), (0, 0)], [*values, 0, 0, v])
    line = compute_order(costs, keep_all(costs))
    assert (costs.compute, line.peak) == (2 * v, 3 * v)
    if half is not None:
        outcome = judge(costs, around(costs, n, half), 2 * v, BYTE_PER_NS)
        assert (outcome.violations, outcome.makespan_ns) == ((), 2 * v)

    none = np.zeros(len(line.units), dtype=np.int64)
    choice = choose(discretize(line, 2 * v, BYTE_PER_NS, 2 * v, none))
    assert choice is not None
    assert choice.exact
    assert (choice.idle == 0) == (half is not None)
    moved = [sum(values[i] for i in units) for units in choice.sets]
    assert (v in moved) == (half is not None)
    assert all(size >= v for size in moved)


def around(costs: Costs, n: int, half: Sequence[int]) -> DeviceSchedule:
    """`half` leaves while F_n runs and comes back while B_n does."""
    ops: list[DeviceOp] = []
    for layer in range(costs.layers):
        leaving = half if layer == n else ()
        ops += [DeviceOp(DeviceOpKind.OFFLOAD, unit) for unit in leaving]
        ops.append(DeviceOp(DeviceOpKind.KEEP_ALL, layer))
        ops += [DeviceOp(DeviceOpKind.WAIT, unit) for unit in leaving]
    for layer in reversed(range(costs.layers)):
        back = sorted(half, reverse=True) if layer == n else ()
        ops += [DeviceOp(DeviceOpKind.PREFETCH, unit) for unit in back]
        ops += [DeviceOp(DeviceOpKind.WAIT, layer)] * (layer in half)
        ops.append(DeviceOp(DeviceOpKind.BACKWARD, layer))
    return DeviceSchedule(costs.layers, tuple(ops))
