"""Contiguous partitions whose stages are several small ones where their GPU lacks memory.

What a stage offloads is there until its forward is over, and back before its backward. So it holds
a whole micro-batch while it runs, and the last one of a pipeline, whose backward follows at once,
saves nothing. Cut into small stages that run one after the other on the same GPU, the first ones
are away while the last ones run. A GPU with one micro-batch at a time follows the per-device
planner (`offload.one_at_a_time`), waits included. Where several are in flight, small stages run
back to back or wait for the way to the host, and `offload.repair` chooses among them. Source:
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, product
from math import ceil
from typing import Final

from pipeplan.ilp.clock import OutOfTimeError
from pipeplan.ilp.contiguous.dynamic_program import (
    ContiguousDP,
    ContiguousPartition,
)
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition, trip_span
from pipeplan.ilp.contiguous.recurrence import extend_one_span
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.offload.byte_options import byte_options
from pipeplan.ilp.offload.copy_placement import transfer_ns
from pipeplan.ilp.offload.one_at_a_time import DeviceShare, OneAtATime, cut
from pipeplan.ilp.offload.repair import repair_by_offloading
from pipeplan.ilp.schedule import OpId, Schedule, StageOffload, duration
from pipeplan.plan import OpKind, Stage

NAME: Final = "small stages"
LAYER_S: Final = 75e-4
"""What the per-device planner counts for, for each layer, where work is counted."""
PARTS: Final = 4096
"""The period is found to this part of it."""
WAYS: Final = (*((grain, False) for grain in (2**30, 8, 4, 2, 1)), (2, True), (1, True))
"""Most layers of a stage where several micro-batches are in flight, and whether it waits for what
leaves: few stages first."""


@dataclass(frozen=True)
class _Part:
    """A stage of a partition as small ones: a schedule of these alone, from 0 on.

    Attributes:
        alone: of one micro-batch; its period is V of the stage, its offloads are decided.
        forward: ns until its last forward ends.
        backward: ns from the start of its first backward on.
    """

    alone: Schedule
    forward: int
    backward: int


def applies(state: Incumbent) -> bool:
    """Whether there may be such plans; one GPU has its planner to itself (`one_gpu`)."""
    allowed = state.options.offload and not state.options.contiguous_only
    return allowed and state.costs.gpus > 1 and state.uses(NAME)


def shorten(state: Incumbent, lowest: int) -> None:
    """Offer the shortest such schedule found; periods are judged by an exact count.

    Args:
        state: hears of it.
        lowest: a bound on the period.
    """
    state.set_phase(NAME)
    solvers = [
        ContiguousDP(
            state.costs, state.most_in_flight, messages=messages, offload=True, small=True
        )
        for messages in (False, True)
    ]
    low, high = lowest - 1, solvers[0].serial_ns
    if state.best is not None:
        high = ceil(state.best.per_microbatch)
    clock = state.options.clock

    def over() -> bool:
        return state.best is not None and clock.spent >= state.options.time_limit_s

    small = SmallStages(state.costs, clock.charge, over)
    while high - low > max(1, low // PARTS) and (state.remaining > 0 or state.best is None):
        middle = (low + high) // 2
        found = (solver.solve(middle, over=over) for solver in solvers)
        tried = (small.schedules(each) for each in found if each is not None)
        try:
            fits = any(any(map(state.offer, each)) for each in tried)
        except OutOfTimeError:
            return
        if fits:
            high = middle
        else:
            low = middle


class SmallStages:
    """Partitions of one chain, in small stages where a GPU lacks memory."""

    def __init__(
        self, costs: CostModel, charge: Callable[[float], None], over: Callable[[], bool]
    ) -> None:
        """No GPU is asked for yet.

        Args:
            costs: with a host, under the exact memory model.
            charge: hears of the work, in units of the limit.
            over: whether to try nothing more.
        """
        self._costs, self._charge, self._over = costs, charge, over
        self._asked: dict[DeviceShare, OneAtATime] = {}

    def schedules(self, partition: ContiguousPartition) -> Iterator[Schedule]:
        """Those in which every GPU's offloading was found; whether they fit is to be counted.

        Args:
            partition: at its period; V of its stages grows where that is needed.
        """
        costs = self._costs
        rows = memory_rows(costs, schedule_partition(costs, partition))
        lacking = frozenset(row.gpu for row in rows if row.peak_bytes > row.budget_bytes)
        for (grain, waits), messages in product(WAYS, (False, True)):
            if self._over():
                return
            cuts = _Cuts(costs, partition, lacking, grain, waits, messages, self._planner)
            placed = cuts.placed()
            if placed is None or (messages and not cuts.planned):
                continue
            for gradients_wait in (True, False):
                schedule = placed.schedule(costs, gradients_wait=gradients_wait)
                found = repair_by_offloading(costs, schedule, self._charge)
                if found is not None:
                    yield found

    def _planner(self, share: DeviceShare) -> OneAtATime:
        # The same GPU is asked for at one period after the other.
        if share not in self._asked:
            first, last = share.layers
            self._charge(LAYER_S * (1 + last - first))
            self._asked[share] = OneAtATime(self._costs, share)
        return self._asked[share]


@dataclass(frozen=True)
class _Placed:
    """A partition, V of its stages as the small stages of each need it."""

    partition: ContiguousPartition
    parts: Sequence[_Part]

    def schedule(self, costs: CostModel, *, gradients_wait: bool) -> Schedule:
        """Of all small stages, from that of whole ones."""
        lengths: dict[OpId, int] = {}
        for stage, part in enumerate(self.parts):
            lengths |= {(OpKind.F, stage): part.forward, (OpKind.B, stage): part.backward}
        whole = schedule_partition(
            costs, self.partition, gradients_wait=gradients_wait, lengths=lengths
        )
        stages: list[Stage] = []
        times: dict[OpId, tuple[int, ...]] = {}
        offloads: list[StageOffload] = []
        for stage, part in enumerate(self.parts):
            base, inside, begin = len(stages), part.alone, whole.times[OpKind.F, stage][0]
            late = whole.times[OpKind.B, stage][0] - (inside.period - part.backward)
            for (kind, n), (time,) in inside.times.items():
                times[kind, base + n] = (time + (begin if kind is OpKind.F else late),)
            stages += [each.model_copy(update={"id": base + each.id}) for each in inside.stages]
            for each in inside.offloads:
                moved = {copy: (a + begin, b + begin) for copy, (a, b) in each.times.items()}
                offloads.append(replace(each, stage=each.stage + base, times=moved))
            for kind, end in ((OpKind.SEND_F, len(stages) - 1), (OpKind.SEND_B, base)):
                if (kind, stage) in whole.times:
                    times[kind, end] = whole.times[kind, stage]
        return Schedule(tuple(stages), whole.period, 1, times, tuple(offloads))


@dataclass
class _Cuts:
    """What the stages of a partition are cut into.

    Attributes:
        costs: with a host.
        partition: the stages.
        over: GPUs that lack memory.
        grain: most layers of a small stage where several micro-batches are in flight.
        waits: whether these wait for what leaves and comes back, as far as there is time.
        messages: whether the per-device planner leaves room for every message.
        planner: what it says of one GPU.
        planned: whether it was asked.
    """

    costs: CostModel
    partition: ContiguousPartition
    over: frozenset[int]
    grain: int
    waits: bool
    messages: bool
    planner: Callable[[DeviceShare], OneAtATime]
    planned: bool = False

    def placed(self) -> _Placed | None:
        """From the last stage on; None where one does not fit, or not into the period."""
        stages, period = self.partition.stages, self.partition.period
        parts: list[_Part] = []
        spans: list[int] = []
        for stage in reversed(stages):
            trip = self._trip(stage, spans[0]) if spans else 0
            part = self._part(stage, trip)
            if part is None or part.forward + part.backward > period:
                return None
            span = part.alone.period
            if not part.alone.offloads:
                least = extend_one_span(trip, part.forward + part.backward, period)
                span = max(least, self.partition.spans[stage.id])
            parts, spans = [part, *parts], [span, *spans]
        return _Placed(replace(self.partition, spans=tuple(spans)), parts)

    def _trip(self, stage: Stage, behind: int) -> int:
        stages = self.partition.stages
        ops = (OpKind.SEND_F, stage.id), (OpKind.SEND_B, stage.id + 1)
        transfers = sum(duration(self.costs, stages, op) for op in ops)
        return trip_span(self.costs, behind, transfers, self.partition.period)

    def _part(self, stage: Stage, trip: int) -> _Part | None:
        """Whole where there is room; by the per-device planner where that has the GPU alone."""
        load = self.costs.load_ns(stage.first, stage.last, stage.gpu)
        if stage.gpu not in self.over:
            return _in_turn(self.costs, stage, self.costs.layers, 0)
        if trip + load > self.partition.period:
            most = self.partition.period if self.waits else 0
            return _in_turn(self.costs, stage, self.grain, most)
        self.planned = True
        room = self.costs.budgets[stage.gpu] - self.messages * self._messages(stage)
        found = self.planner(DeviceShare(stage.layers, stage.gpu, room, trip))
        alone = next(found.schedules(), None)
        if alone is None or alone.period > self.partition.period:
            return None
        last = len(alone.stages) - 1
        forward = alone.times[OpKind.F, last][0] + duration(
            self.costs, alone.stages, (OpKind.F, last)
        )
        return _Part(alone, forward, alone.period - alone.times[OpKind.B, last][0])

    def _messages(self, stage: Stage) -> int:
        """Every tensor of both boundaries once."""
        costs, total = self.costs, 0
        if stage.first:
            total += costs.tensor_bytes(stage.first - 1, backward=False)
            total += costs.unsaved_bytes(stage.first - 1, backward=True)
        if stage.last + 1 < costs.layers:
            total += costs.unsaved_bytes(stage.last, backward=False)
            total += costs.tensor_bytes(stage.last, backward=True)
        return total


def _in_turn(costs: CostModel, stage: Stage, grain: int, most_ns: int) -> _Part:
    """Small stages one behind the other, which wait for the way to the host.

    Args:
        costs: durations.
        stage: what is cut.
        grain: most layers of each.
        most_ns: what all of it may take with waits: all of these shrink alike.
    """
    stages = tuple(
        Stage(id=n, layers=layers, gpu=stage.gpu)
        for n, layers in enumerate(cut(stage.layers, grain))
    )
    moved = [0, *accumulate(_moved_ns(costs, each) for each in stages[:-1])]
    own = {
        kind: [duration(costs, stages, (kind, each.id)) for each in stages]
        for kind in (OpKind.F, OpKind.B)
    }
    done = {kind: list(accumulate(each, initial=0)) for kind, each in own.items()}
    late = {
        kind: list(accumulate((max(0, m - t) for m, t in zip(moved, each, strict=False)), max))
        for kind, each in done.items()
    }
    waits = late[OpKind.F][-1] + late[OpKind.B][-1]
    spare = max(0, most_ns - done[OpKind.F][-1] - done[OpKind.B][-1])
    share = min(Fraction(1), Fraction(spare, waits)) if waits else Fraction(0)
    forward, backward = (done[kind][-1] + int(late[kind][-1] * share) for kind in own)
    times: dict[OpId, tuple[int, ...]] = {}
    for n in range(len(stages)):
        times[OpKind.F, n] = (done[OpKind.F][n] + int(late[OpKind.F][n] * share),)
        # Backwards as forwards, from the end.
        end = done[OpKind.B][n] + int(late[OpKind.B][n] * share)
        times[OpKind.B, n] = (forward + backward - end - own[OpKind.B][n],)
    return _Part(Schedule(stages, forward + backward, 1, times), forward, backward)


def _moved_ns(costs: CostModel, stage: Stage) -> int:
    """All that a stage can send, one way."""
    options = byte_options(costs, stage.first, stage.last)
    return transfer_ns(costs, options[-1][0]) if options else 0
