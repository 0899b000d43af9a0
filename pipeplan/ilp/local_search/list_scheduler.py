"""List scheduling modulo the period, for any allocation, from the last stage to the first.

A stage's activation memory grows with the time between its forward and its backward, and all later
stages run within that time. So stages are scheduled from the last to the first: every B as early
and every F as late as the later stages and the modulo reservation table allow. With one stage per
GPU the result is the contiguous optimum (`extend_span`); with several it is a heuristic of
microseconds: a stage that waits may leave a later one of its GPU a better place, which is for
local search to find out (`waits`). Compare iterative modulo scheduling, Rau (1994), which also
backtracks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.packing_lookahead import fits_rest, place_pair
from pipeplan.ilp.reservation_table import ReservationTable
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.plan import OpKind, Stage

F, B, SEND_F, SEND_B = OpKind.F, OpKind.B, OpKind.SEND_F, OpKind.SEND_B

PlacedStage = tuple[int, int, int]
"""(first layer, last layer, GPU)."""

Wait = tuple[int, int]
"""Between the end of a stage's F and what needs it, and between what its B needs and its B."""


@dataclass
class ModuloListScheduler:
    """One placement of `runs` at `period` for k = len(centres) micro-batches.

    `centres` say around which instants the copies' turns from F to B lie, in increasing order.
    """

    costs: CostModel
    runs: Sequence[PlacedStage]
    period: int
    centres: Sequence[int] = (0,)
    waits: Mapping[int, Wait] = field(default_factory=dict)
    """Of stages that are to be placed apart from the later ones though there may be room beside
    them; ns."""
    placed: int = 0
    """Stages that found room."""
    times: dict[OpId, tuple[int, ...]] = field(default_factory=dict)
    """Starts of all copies, by op."""
    _tables: dict[tuple[int, ...], ReservationTable] = field(default_factory=dict)
    _rest: dict[int, list[int]] = field(default_factory=dict)
    """Lengths of the ops that each GPU has still to place."""

    def __post_init__(self) -> None:
        """Collect what is to be placed on each GPU."""
        for first, last, gpu in self.runs:
            lengths = self._lengths(first, last, gpu)
            self._rest.setdefault(gpu, []).extend(lengths * len(self.centres))

    def place(self) -> bool:
        """Whether all ops find room and none overtakes the next period's (R5)."""
        opening, closing = list(self.centres), list(self.centres)
        last = len(self.runs) - 1
        for stage in range(last, -1, -1):
            if stage < last and not self._send(stage, opening, closing):
                return False
            if not self._compute(stage, opening, closing):
                return False
            self.placed += 1
        return all(row[-1] < row[0] + self.period for row in self.times.values())

    def schedule(self) -> Schedule:
        """What was placed, from time 0 on."""
        origin = min(min(row) for row in self.times.values())
        times = {op: tuple(time - origin for time in row) for op, row in self.times.items()}
        stages = tuple(
            Stage(id=index, layers=(first, last), gpu=gpu)
            for index, (first, last, gpu) in enumerate(self.runs)
        )
        return Schedule(stages, self.period, len(self.centres), times)

    def _compute(self, stage: int, opening: list[int], closing: list[int]) -> bool:
        first, last, gpu = self.runs[stage]
        before, behind = self.waits.get(stage, (0, 0))
        opening[:] = [end - before for end in opening]
        closing[:] = [begin + behind for begin in closing]
        table = self._table((gpu,))
        lengths = self._lengths(first, last, gpu)
        ops = (F, stage), (B, stage)
        return self._pairs(ops, (table, table), lengths, opening, closing, self._rest[gpu])

    def _lengths(self, first: int, last: int, gpu: int) -> tuple[int, int]:
        return self.costs.forward_ns(first, last, gpu), self.costs.backward_ns(first, last, gpu)

    def _send(self, stage: int, opening: list[int], closing: list[int]) -> bool:
        """Both transfers of the cut behind a stage, if there is one."""
        _, boundary, here = self.runs[stage]
        there = self.runs[stage + 1][2]
        if here == there:
            return True
        costs, links = self.costs, self.costs.cluster.links
        tables = (
            self._table(links.resource(here, there)),
            self._table(links.resource(there, here)),
        )
        forward = costs.send_forward_ns(boundary, here, there)
        backward = costs.send_backward_ns(boundary, there, here)
        ops = (SEND_F, stage), (SEND_B, stage + 1)
        return self._pairs(ops, tables, (forward, backward), opening, closing, None)

    def _table(self, key: tuple[int, ...]) -> ReservationTable:
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = ReservationTable(self.period)
        return table

    def _pairs(
        self,
        ops: tuple[OpId, OpId],
        tables: tuple[ReservationTable, ReservationTable],
        lengths: tuple[int, int],
        opening: list[int],
        closing: list[int],
        rest: list[int] | None,
    ) -> bool:
        """Place an op on the way in and its counterpart on the way out, for all copies.

        Copies are alike, so their starts are handed out in order: FIFO (R5). On a GPU, what is
        left of `rest` afterwards must find room too.
        """
        ins: list[int] = []
        outs: list[int] = []
        for window in zip(opening, closing, strict=True):
            found = _pair(*tables, *lengths, *window)
            if rest is not None:
                found = _roomy(tables[0], lengths, window, rest, found)
            elif found is None and tables[0] is tables[1]:
                found = _anywhere(tables[0], lengths, window, ())
            if found is None:
                return False
            ins.append(found[0])
            outs.append(found[1])
        ins.sort()
        outs.sort()
        self.times[ops[0]], self.times[ops[1]] = tuple(ins), tuple(outs)
        opening[:] = ins
        closing[:] = [start + lengths[1] for start in outs]
        return True


def _pair(
    table_in: ReservationTable,
    table_out: ReservationTable,
    long_in: int,
    long_out: int,
    end: int,
    begin: int,
) -> tuple[int, int] | None:
    """Start one op as late as it can end by `end`, another as early as from `begin` on.

    Where both want the same place, the one yields that lengthens the whole stay the least.
    """
    early = table_out.earliest_fit(begin, long_out)
    late = table_in.latest_fit(end, long_in)
    if early is None or late is None:
        return None
    table_out.add(early, long_out)
    yielding = table_in.latest_fit(end, long_in)
    if yielding == late:
        table_in.add(late, long_in)
        return late, early
    table_out.remove(early, long_out)
    table_in.add(late, long_in)
    waiting = table_out.earliest_fit(begin, long_out)
    if waiting is not None and (yielding is None or waiting - early <= late - yielding):
        table_out.add(waiting, long_out)
        return late, waiting
    table_in.remove(late, long_in)
    if yielding is None:
        return None
    table_in.add(yielding, long_in)
    table_out.add(early, long_out)
    return yielding, early


def _roomy(
    table: ReservationTable,
    lengths: tuple[int, int],
    window: tuple[int, int],
    rest: list[int],
    found: tuple[int, int] | None,
) -> tuple[int, int] | None:
    """The places found if they leave room for all that is to come, else others that do."""
    for length in lengths:
        rest.remove(length)
    if found is not None:
        if fits_rest(table.free_intervals(), rest):
            return found
        for start, length in zip(found, lengths, strict=True):
            table.remove(start, length)
    return _anywhere(table, lengths, window, rest)


def _anywhere(
    table: ReservationTable, lengths: tuple[int, int], window: tuple[int, int], rest: Sequence[int]
) -> tuple[int, int] | None:
    """Occupy the nearest places that leave room for all that is to come."""
    found = place_pair(table.free_intervals(), table.period, lengths, window, rest)
    if found is not None:
        for start, length in zip(found, lengths, strict=True):
            table.add(start, length)
    return found
