"""Pareto filter: states of a dynamic program that no other one dominates.

(O10) of docs/reference/remat-rules.md; the dominance rules are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeplan.remat.arrays import Ints


@dataclass(frozen=True)
class StateSet:
    """Arrays with one entry per state; times and amounts in slots.

    Attributes:
        kept: amount that never leaves.
        a: to offload still, or below 0 the time since the last offload ended.
        b: the same for prefetches, from the end backwards.
        idle: time without computation up to here.
        came: twice the state before the last decision, and 1 if that was to offload.
    """

    kept: Ints
    a: Ints
    b: Ints
    idle: npt.NDArray[Any]
    came: Ints

    def __len__(self) -> int:
        return len(self.idle)

    def take(self, which: npt.NDArray[np.bool_] | Ints) -> StateSet:
        """The states at `which`."""
        return StateSet(
            self.kept[which], self.a[which], self.b[which], self.idle[which], self.came[which]
        )


def concatenated(first: StateSet, second: StateSet) -> StateSet:
    """All states of the two."""
    return StateSet(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)])
            for name in ("kept", "a", "b", "idle", "came")
        )
    )


def non_dominated(states: StateSet) -> StateSet:
    """(O10) along each axis: the states that no other one replaces.

    Waiting turns time into transfers one to one, so what is smaller in one amount by d and later
    by d or more is no better.
    """
    for _ in range(2):
        states = _front(states, states.kept, (states.a, states.b), waits=False)
        states = _front(states, states.a, (states.kept, states.b), waits=True)
        states = _front(states, states.b, (states.kept, states.a), waits=True)
    return states


def _front(states: StateSet, axis: Ints, others: tuple[Ints, Ints], waits: bool) -> StateSet:
    """Within equal `others`: no entry beaten by one of smaller `axis`; with `waits`, nor by one
    of larger `axis` that is as much earlier.
    """
    low = [int(each.min()) for each in others]
    span = int(others[1].max()) - low[1] + 1
    group = (others[0] - low[0]) * span + (others[1] - low[1])
    order = np.lexsort((states.idle, axis, group))
    states, axis, group = states.take(order), axis[order], group[order]
    ids: Ints = np.cumsum(np.diff(group, prepend=group[0]) != 0)
    left = _falling(states.idle, ids)
    states, axis, ids = states.take(left), axis[left], ids[left]
    if waits:
        sums = (states.idle + axis)[::-1]
        states = states.take(_falling(sums, ids[-1] - ids[::-1])[::-1])
    return states


def _falling(values: Ints, ids: Ints) -> npt.NDArray[np.bool_]:
    """Entries below all before them with the same id; ids rise along the array."""
    apart = values - ids * (int(values.max()) - int(values.min()) + 1)
    ahead = np.minimum.accumulate(apart)
    return np.concatenate([[True], apart[1:] < ahead[:-1]])
