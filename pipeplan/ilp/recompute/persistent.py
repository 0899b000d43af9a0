"""Sets of runs as the per-device planner makes them, for one GPU with one micro-batch at a time.

There the chain is one stage, and what it computes again is what `pipeplan.remat` decides: layers
that keep all, and runs that keep their input and hold such runs when they are computed again
((C1)-(C6) of docs/reference/remat-rules.md, after Rotor). One table has the fastest schedules of
all budgets. Its sizes are rounded up, and its count of bytes differs from a plan's in detail: so
schedules of larger budgets are looked at, too, and who asks counts the bytes. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pipeplan.chain import Chain
from pipeplan.ilp.runs import Run, Runs
from pipeplan.remat.checkpointing.rotor import persistent_schedules
from pipeplan.remat.schedules.costs import from_chain
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind

SLOTS: Final = 500
"""Units that the largest budget is divided into, at most."""
CHOICES: Final = 2 * 10**9
"""Units times layers cubed, at most: longer chains have fewer units."""
CHOICE_S: Final = 2e-9
"""What each of these counts for, where work is counted."""


def persistent_runs(chain: Chain, room: int) -> Iterator[Runs]:
    """Sets of runs that `room` bytes beside the states suffice for, nearly; shortest first."""
    costs = from_chain(chain)
    for schedule in persistent_schedules(costs, costs.static + room, _slots(chain)):
        yield runs_of(schedule.ops)


def work_s(chain: Chain) -> float:
    """What `persistent_runs` counts for, where work is counted."""
    return float(CHOICE_S * _slots(chain) * len(chain.layers) ** 3)


def _slots(chain: Chain) -> int:
    return min(SLOTS, CHOICES // len(chain.layers) ** 3)


def runs_of(ops: Sequence[DeviceOp]) -> Runs:
    """The runs of a persistent schedule; what moves and frees says nothing of them."""
    return _pieces([op for op in reversed(ops) if op.computes])


def _pieces(ahead: list[DeviceOp]) -> Runs:
    """Forwards up to the next backward, then all backwards; takes them off the end of `ahead`."""
    spans: list[tuple[int, int, bool]] = []
    while ahead[-1].kind is not DeviceOpKind.BACKWARD:
        op = ahead.pop()
        first = last = op.index
        while ahead[-1].kind is DeviceOpKind.KEEP_NOTHING:
            last = ahead.pop().index
        spans.append((first, last, op.kind is DeviceOpKind.KEEP_ALL))
    runs: list[Run] = []
    for first, last, kept in reversed(spans):
        if kept:
            ahead.pop()
        else:
            runs.append(Run(first, last, inner=_pieces(ahead)))
    return tuple(reversed(runs))
