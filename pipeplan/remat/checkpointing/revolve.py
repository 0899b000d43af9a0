"""Revolve: the optimal checkpoints of a chain of equal layers, with a count of slots as memory.

Opt_0 of Theorem 1 in *Optimal Memory-aware Backpropagation of Deep Join Networks* (2019),
equations (C8)-(C9) of docs/reference/remat-rules.md; the homogeneous case of Rotor, and a
comparator elsewhere.
"""

from __future__ import annotations

import numpy as np

from pipeplan.remat.arrays import Floats
from pipeplan.remat.checkpointing.persistent import KEEP, unroll
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceSchedule


def opt_0(length: int, slots: int, forward: float = 1, backward: float = 1) -> Floats:
    """Table of Opt_0(l, c) for l <= `length` and c <= `slots`; inf where c slots do not suffice.

    Args:
        length: the most forwards between the kept input and the last backward.
        slots: the most tensors in memory, the input and the gradient among them.
        forward: time of one forward.
        backward: time of one backward, its own forward included.
    """
    table = np.full((length + 1, slots + 1), np.inf)
    table[0, 2:] = backward
    for c in range(3, slots + 1):
        for size in range(1, length + 1):
            steps = np.arange(1, size + 1)
            rest = table[size - steps, c - 1] + table[steps - 1, c]
            table[size, c] = (steps * forward + rest).min()
    return table


def revolve(costs: Costs, slots: int) -> DeviceSchedule:
    """The schedule of Opt_0 on this chain as if its layers were equal, with `slots` >= 3."""
    table = opt_0(costs.layers - 1, slots)

    def decide(s: int, t: int, _v: int, c: int) -> int:
        if s == t:
            return KEEP
        steps = np.arange(1, t - s + 1)
        return s + 1 + int((steps + table[t - s - steps, c - 1] + table[steps - 1, c]).argmin())

    whole = (0, costs.layers - 1, 0, slots)
    ops = unroll(decide, whole, lambda _s, _v: 0, [1] * (costs.layers + 1))
    return DeviceSchedule(costs.layers, tuple(ops))


def revolve_within(costs: Costs, budget: int) -> DeviceSchedule:
    """Revolve with the most slots whose schedule keeps `budget`; with 3 slots where none does."""
    for slots in range(costs.layers + 2, 3, -1):
        schedule = revolve(costs, slots)
        if judge(costs, schedule).peak_bytes <= budget:
            return schedule
    return revolve(costs, 3)
