"""Persistent schedules as a tree of decisions: what each needs, and the operations it stands for.

A subproblem (s, t, v) runs layers s..t forward and backward, starting with the full boundary s
and, for t < L - 1, the gradient behind t; v = 1 where the tape of layer s - 1 is alive.
docs/reference/remat-rules.md §3, after Rotor (`rotor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeplan.remat.arrays import Ints
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind

KEEP = -1
"""The decision to run layer s for its backward; any other is the next boundary to keep in full."""


@dataclass(frozen=True)
class Needs:
    """Bytes that decisions need and leave for the rest, input and gradient included."""

    costs: Costs

    def residue(self, s: int, v: int) -> int:
        """What stays of boundary s beside its tape's rest after a keep-all forward of layer s."""
        return self.costs.kept(s, before=v == 1, behind=True)

    def taken(self, s: int, v: int) -> int:
        """Bytes that layer s's tape takes from the rest of the subproblem (C2)."""
        return self.costs.saved[s] + self.residue(s, v)

    def keep(self, s: int, t: int, v: int) -> int:
        """Least memory for the forward and backward of layer s itself (C3)."""
        c = self.costs
        forward = c.boundary[s] + c.saved[s] + c.forward_work[s] + c.boundary[s + 1]
        backward = self.taken(s, v) + c.saved_output[s] + c.gradient[s] + c.backward_work[s]
        return max(forward + c.incoming(t), backward + c.gradient_in(s))

    def sweep(self, s: int) -> Ints:
        """Least memory to go from boundary s to s' and keep s, for s' = s+1..L-1 (C4).

        The gradient behind t comes on top.
        """
        c = self.costs
        inner = [c.light_work[s] + c.boundary[s + 1]]
        inner += [
            c.boundary[k] + c.light_work[k] + c.boundary[k + 1] for k in range(s + 1, c.layers - 1)
        ]
        return c.boundary[s] + np.maximum.accumulate(np.array(inner, dtype=np.int64))


Decide = Callable[[int, int, int, int], int]
"""(s, t, v, m) -> KEEP or the boundary s' to keep next, m being the solver's own memory units."""


Sub = tuple[int, int, int, int]
"""(s, t, v, memory)."""


def unroll(
    decide: Decide, whole: Sub, taken: Callable[[int, int], int], full: list[int]
) -> list[DeviceOp]:
    """The operations of `whole`; `taken(s, v)` and `full[s]` are sizes in the memory's unit."""
    ops: list[DeviceOp] = []
    todo: list[DeviceOp | Sub] = [whole]
    while todo:
        item = todo.pop()
        if isinstance(item, DeviceOp):
            ops.append(item)
            continue
        s, t, v, m = item
        cut = decide(s, t, v, m)
        if cut == KEEP:
            ops.append(DeviceOp(DeviceOpKind.KEEP_ALL, s))
            todo.append(DeviceOp(DeviceOpKind.BACKWARD, s))
            inside = (s + 1, t, 1, m - taken(s, v))
            todo.append(inside if t > s else DeviceOp(DeviceOpKind.FREE, s + 1))
        else:
            ops.append(DeviceOp(DeviceOpKind.KEEP_INPUT, s))
            ops.extend(DeviceOp(DeviceOpKind.KEEP_NOTHING, k) for k in range(s + 1, cut))
            todo.append((s, cut - 1, v, m))
            todo.append((cut, t, 0, m - full[s]))
    return ops
