"""When a rank acts, and in which order: (O1) to (O5), (H5).

A `Moment` is the sort key of one event. All are built in absolute time for copy c in period 0;
`Ledger` folds them into one period.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from pipeplan.verifier.durations import link
from pipeplan.verifier.timetable import TimedOp, Timetable

END, POST, SHORT, UPDATE, START = range(5)
"""Classes of (O5): ends, RECVs, zero-length ops and SENDs, optimizer steps, starts."""


class Moment(NamedTuple):
    """(O5): events of a rank happen in this order.

    `step` tells the two halves of an event that has no length: 0 its start, 1 its end.
    """

    time: int
    rank_class: int
    microbatch: int
    position: int
    sub: int = 0
    step: int = 0


def start_of(op: TimedOp) -> Moment:
    """The start of a compute op."""
    return Moment(op.start, START if op.duration else SHORT, op.copy, op.position)


def end_of(op: TimedOp) -> Moment:
    """The end of a compute op."""
    if op.duration:
        return Moment(op.end, END, op.copy, op.position)
    return Moment(op.end, SHORT, op.copy, op.position, step=1)


def free_of(transfer: TimedOp) -> Moment:
    """(O4), (H5): the sent bytes are given back."""
    if transfer.duration:
        return Moment(transfer.end, END, transfer.copy, transfer.position)
    return Moment(transfer.end, SHORT, transfer.copy, transfer.position, sub=1)


def update_of(backward: TimedOp) -> Moment:
    """The optimizer step that may follow a backward."""
    return Moment(backward.end, UPDATE, backward.copy, backward.position)


class Hold:
    """(O1): a rank can act only between its computes."""

    def __init__(self, table: Timetable) -> None:
        self._period = table.period
        self._table = table
        busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for op in table.all:
            if op.kind.is_compute and op.duration:
                busy[table.gpu(op)].append((op.start % table.period, op.duration))
        self._busy = {gpu: sorted(intervals) for gpu, intervals in busy.items()}
        self._starts = {gpu: [s for s, _ in known] for gpu, known in self._busy.items()}

    def __call__(self, gpu: int, time: int) -> int:
        """Start of the compute on `gpu` that `time` lies strictly inside of, else `time`.

        The last compute that starts before `time`, modulo T, is the only candidate: computes of a
        GPU are disjoint.
        """
        starts = self._starts.get(gpu)
        if not starts:
            return time
        start, duration = self._busy[gpu][bisect_left(starts, time % self._period) - 1]
        inside = (time - start) % self._period
        return time - inside if 0 < inside < duration else time

    def issue(self, transfer: TimedOp) -> Moment:
        """(O2), (H5): when the SEND is handed to the link, or OFFLOAD begins."""
        time = self(self._table.gpu(transfer), transfer.start)
        return Moment(time, SHORT, transfer.copy, transfer.position)

    def post(self, transfer: TimedOp) -> Moment:
        """(O3), (H5): when the RECV is posted, or PREFETCH begins: of its GPU, after `issue`."""
        target = self._table.gpu(transfer)
        if transfer.kind.is_send:
            _, target = link(self._table.plan, transfer.kind, transfer.stage)
        time = self(target, self.issue(transfer).time)
        return Moment(time, POST, transfer.copy, transfer.position)
